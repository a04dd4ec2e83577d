"""Windows and their sums in NumPy: slices of the padded image, tap by tap."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from ...dtypes import F32, F64
from ...ops.base import Problem
from ...ops.unfold import UnfoldProblem
from . import Expected, Reference


def _slices(p: UnfoldProblem, tap: tuple[int, ...]) -> tuple[slice, ...]:
    """What a tap sees of the padded image."""
    along = (slice(t * d, t * d + (q - 1) * u + 1, u) for t, d, u, q in zip(tap, p.dilation, p.stride, p.positions, strict=True))
    return (slice(None), slice(None), *along)


def _reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p, x = problem, inputs["x"]
    assert isinstance(p, UnfoldProblem)
    n, c, *extents = p.desc(p.image).shape
    length = prod(p.positions)
    if not p.sums:
        padded = np.pad(x, ((0, 0), (0, 0), *p.padding))
        seen = np.stack([padded[_slices(p, tap)].reshape(n, c, length) for tap in np.ndindex(*p.kernel)], 2)  # n c taps l
        if p.order == "rsc":
            seen = seen.swapaxes(1, 2)
        columns = seen.reshape(n, c * prod(p.kernel), length)
        return {"y": Expected(columns.swapaxes(1, 2) if p.has_rows else columns)}
    columns = x.swapaxes(1, 2) if p.has_rows else x
    taps = prod(p.kernel)
    seen = columns.reshape(n, taps, c, length).swapaxes(1, 2) if p.order == "rsc" else columns.reshape(n, c, taps, length)

    def added(seen: np.ndarray) -> np.ndarray:
        padded = np.zeros((n, c, *(e + lo + hi for e, (lo, hi) in zip(extents, p.padding, strict=True))))
        for i, tap in enumerate(np.ndindex(*p.kernel)):
            padded[_slices(p, tap)] += seen[:, :, i].reshape(n, c, *p.positions)
        return padded[(slice(None), slice(None), *(slice(lo, lo + e) for e, (lo, _) in zip(extents, p.padding, strict=True)))]

    return {"y": Expected(added(seen), added(np.abs(seen)), taps, F64 if p.desc("x").dtype is F64 else F32)}


REFERENCES: dict[str, Reference] = {op: _reference for op in ("unfold", "fold", "im2col", "col2im")}
