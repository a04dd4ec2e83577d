"""Shuffles of pixels and channels by NumPy's reshape and transpose."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...ops.base import Problem
from . import Expected, Reference


def _run(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    x, attrs = inputs["x"], dict(problem.attrs)
    n, c, *space = x.shape
    if problem.op == "channel_shuffle":
        groups = attrs["groups"]
        return {"y": Expected(x.reshape(n, groups, c // groups, *space).swapaxes(1, 2).reshape(x.shape))}
    r, crd = attrs["factor"], attrs.get("order", "crd") == "crd"
    h, w = space
    if problem.op == "pixel_shuffle":
        few = c // (r * r)
        split = x.reshape(n, few, r, r, h, w) if crd else x.reshape(n, r, r, few, h, w).transpose(0, 3, 1, 2, 4, 5)
        return {"y": Expected(split.transpose(0, 1, 4, 2, 5, 3).reshape(n, few, h * r, w * r))}
    split = x.reshape(n, c, h // r, r, w // r, r)  # n c h i w j
    order = (0, 1, 3, 5, 2, 4) if crd else (0, 3, 5, 1, 2, 4)
    return {"y": Expected(split.transpose(order).reshape(n, c * r * r, h // r, w // r))}


REFERENCES: dict[str, Reference] = {op: _run for op in ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")}
