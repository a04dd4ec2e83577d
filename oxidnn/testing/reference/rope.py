"""Rotary position embedding: angles in extended precision, rotation in float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import F32, DType
from ...ops.base import Problem
from ...ops.rope import RopeProblem, Rotation
from . import Expected, Reference


def turns(r: Rotation, inputs: Mapping[str, np.ndarray], batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin (batch, length, R), as the two elements of each pair have them: first all first ones."""
    positions = np.broadcast_to(inputs.get("positions", np.arange(length)), (batch, length))
    if "cos" in inputs:
        found = []
        for name in ("cos", "sin"):
            table = inputs[name]
            rows = table if table.ndim == 3 else table[np.clip(positions, 0, len(table) - 1)]
            found.append(rows if rows.shape[-1] == 2 * r.pairs else np.concatenate((rows, rows), -1))
        return found[0], found[1]
    angle = positions[..., None].astype(np.longdouble) * np.array(r.frequencies, np.longdouble)
    angle = np.concatenate((angle, angle), -1)
    return tuple((r.magnitude * f(angle)).astype(np.float64) for f in (np.cos, np.sin))  # type: ignore[return-value]


def rotated(r: Rotation, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the rows (batch, heads, length, dim) turned, the magnitudes of their terms)."""
    n = r.pairs
    first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if r.interleaved else (slice(0, n), slice(n, 2 * n))
    a, b = x[..., first], x[..., second]
    (c, s), (d, t) = ((cos[:, None, :, h], sin[:, None, :, h]) for h in (slice(0, n), slice(n, 2 * n)))
    y, size = x.copy(), np.zeros(x.shape)
    s, t = (-t, -s) if r.inverse else (s, t)
    y[..., first], y[..., second] = a * c - b * s, b * d + a * t
    size[..., first], size[..., second] = abs(a * c) + abs(b * s), abs(b * d) + abs(a * t)
    return y, size


def angle_slack(r: Rotation, inputs: Mapping[str, np.ndarray], x: np.ndarray, compute: DType) -> np.ndarray:
    """What roundings of angles, cosines and sines leave: a part in 2^22 of 1 in float32, nothing where tables hold them."""
    off = 0.0
    if r.frequencies:
        farthest = float(np.abs(inputs.get("positions", np.zeros(1))).max(initial=x.shape[2]))
        off = r.magnitude * (2.0**-51 * (4 + farthest) + (2.0**-22 if compute is F32 else 0.0))
    ones = np.ones((x.shape[0], x.shape[2], 2 * r.pairs))
    return off * rotated(r, x, ones, ones)[1]


def _rope(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, RopeProblem)
    x = inputs["x"].reshape(problem.heads_of("x").shape)
    y, size = rotated(problem.rotation, x, *turns(problem.rotation, inputs, x.shape[0], x.shape[2]))
    shape = problem.desc("y").shape
    slack = angle_slack(problem.rotation, inputs, x, problem.compute)
    return {"y": Expected(y.reshape(shape), size.reshape(shape), 2, problem.compute, slack=slack.reshape(shape))}


REFERENCES: dict[str, Reference] = {"rope": _rope}
