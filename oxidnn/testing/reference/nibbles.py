"""Numbers of four bits by tables."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...ops.base import Problem
from ...ops.nibbles import NibbleProblem
from . import Expected, Reference

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def codes(values: np.ndarray, kind: str, saturate: bool = True) -> np.ndarray:
    """The four bits of every number."""
    if kind == "e2m1":
        given = np.asarray(values, np.float64)
        size = np.where(np.isnan(given), np.inf, np.minimum(np.abs(given), 6.0))
        far = np.abs(size[..., None] - E2M1[:8])
        far[np.isinf(size)] = np.abs(6.0 - E2M1[:8])
        best = far.min(-1, keepdims=True)
        tied = far == best
        even = tied & (np.arange(8) % 2 == 0)
        code = np.where(even.any(-1), even.argmax(-1), tied.argmax(-1))
        return code + 8 * (np.signbit(given) & ~np.isnan(given))
    low, high = ((-8, 7) if kind == "s4" else (0, 15)) if saturate else (-(2**31), 2**31 - 1)
    if not saturate and values.dtype.kind != "f":
        return values.astype(np.int64) & 15
    if values.dtype.kind == "f":
        values = np.nan_to_num(values, nan=0.0, posinf=1e300, neginf=-1e300)
    whole = np.trunc(np.clip(values, low, high))
    return whole.astype(np.int64) & 15


def numbers(code: np.ndarray, kind: str) -> np.ndarray:
    if kind == "e2m1":
        return E2M1[code]
    return np.where(code >= 8, code - 16, code) if kind == "s4" else code


def pack4(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, NibbleProblem)
    code = codes(inputs["x"], problem.kind, problem.saturate)
    code = np.pad(code, [(0, 0)] * (code.ndim - 1) + [(0, code.shape[-1] % 2)])
    return {"y": Expected(code[..., 0::2] + 16 * code[..., 1::2])}


def unpack4(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, NibbleProblem)
    x, y = inputs["x"].astype(np.int64), problem.desc("y")
    code = np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], 2 * x.shape[-1])[..., : y.shape[-1]]
    want = numbers(code, problem.kind)
    if not y.dtype.is_float:
        want = np.trunc(want).astype(np.int64)
        want = np.maximum(want, 0) if y.dtype.kind == "uint" else want
    return {"y": Expected(want)}


REFERENCES: dict[str, Reference] = {"pack4": pack4, "unpack4": unpack4}
