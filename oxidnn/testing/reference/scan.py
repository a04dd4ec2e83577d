"""Scans by NumPy's accumulating functions and by recurrences, in float64 or exact integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...dtypes import F32, F64
from ...ops.base import Problem
from ...ops.scan import ScanProblem, compute_type
from . import Expected, Reference


def _turned(x: np.ndarray, problem: ScanProblem) -> np.ndarray:
    """The array with the axis first, in the order of the forward scan."""
    x = np.moveaxis(x, problem.axis, 0)
    return x[::-1] if problem.reverse else x


def _back(x: np.ndarray, problem: ScanProblem) -> np.ndarray:
    return np.moveaxis(x[::-1] if problem.reverse else x, 0, problem.axis)


def _shifted(y: np.ndarray, problem: ScanProblem, neutral: Any) -> np.ndarray:
    if not problem.exclusive or len(y) == 0:
        return y
    return np.concatenate([np.full_like(y[:1], neutral), y[:-1]])


def cummax(x: np.ndarray, smallest: bool) -> tuple[np.ndarray, np.ndarray]:
    """Values and indices along the first dimension: the last of equals, NaN before all."""
    y, indices = x.copy(), np.zeros(x.shape, np.int64)
    for i in range(1, len(x)):
        better = (x[i] <= y[i - 1]) if smallest else (x[i] >= y[i - 1])
        if x.dtype.kind == "f":
            better = np.isnan(x[i]) | (better & ~np.isnan(y[i - 1]))
        y[i] = np.where(better, x[i], y[i - 1])
        indices[i] = np.where(better, i, indices[i - 1])
    return y, indices


def _cumprod_gradient(dy: np.ndarray, x: np.ndarray, exclusive: bool) -> np.ndarray:
    before = np.concatenate([np.ones_like(x[:1]), np.cumprod(x, 0)[:-1]])
    dx = np.zeros_like(x)
    later = np.zeros_like(x[:1])[0]  # sum over k behind i of dy_k times the product between i and k
    for i in reversed(range(len(x))):
        dx[i] = before[i] * (later if exclusive else dy[i] + later)
        later = dy[i] + x[i] * later if exclusive else x[i] * (dy[i] + later)
    return dx


def _run(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, ScanProblem)
    op, n = problem.op, max(problem.extent, 1)
    given = {name: _turned(a, problem) for name, a in inputs.items()}
    accumulate = F64 if compute_type(problem) == "f64" else F32
    with np.errstate(all="ignore"):
        if op in ("cummax", "cummin"):
            x = given["x"] if given["x"].dtype.kind == "f" else given["x"].astype(np.int64)
            y, indices = cummax(x, op == "cummin")
            places = problem.extent - 1 - indices if problem.reverse else indices
            return {"y": Expected(_back(y, problem)), "indices": Expected(_back(places, problem))}
        if op in ("cumsum", "cumprod"):
            x, y_type = given["x"], problem.desc("y").dtype
            x = x if x.dtype.kind == "f" else x.astype(np.float64 if y_type.is_float else np.int64)
            accumulated = np.cumsum if op == "cumsum" else np.cumprod
            neutral = 0 if op == "cumsum" else 1
            want = _back(_shifted(accumulated(x, 0), problem, neutral), problem)
            if x.dtype.kind != "f":
                return {"y": Expected(want.astype(y_type.numpy))}
            magnitude = _back(_shifted(accumulated(np.abs(x), 0), problem, 0.0), problem)
            if op == "cumprod":
                magnitude = magnitude * n**0.5  # every factor's rounding is relative to the product
            return {"y": Expected(want, magnitude, n, accumulate)}
        if op == "logcumsumexp":
            want = _back(_shifted(np.logaddexp.accumulate(given["x"], 0) if len(given["x"]) else given["x"], problem, -np.inf), problem)
            # The sum's relative error is the logarithm's absolute one; the maximum is added back and rounded.
            return {"y": Expected(want, np.where(np.isfinite(want), np.abs(want), 0.0) + 8.0, n, accumulate,
                                  2.0**-21 if accumulate is F32 else 0.0)}
        dy = given["dy"]
        if op == "cumprod_backward":
            want = _cumprod_gradient(dy, given["x"], problem.exclusive)
            magnitude = _cumprod_gradient(np.abs(dy), np.abs(given["x"]), problem.exclusive)
            return {"dx": Expected(_back(want, problem), _back(magnitude, problem), 4 * n + 8, accumulate)}
        if op == "cummax_backward":
            places = given["indices"].astype(np.int64)
            places = problem.extent - 1 - places if problem.reverse else places
            columns = np.indices(dy.shape)[1:]
            want, magnitude = np.zeros(dy.shape), np.zeros(dy.shape)
            np.add.at(want, (places, *columns), dy)
            np.add.at(magnitude, (places, *columns), np.abs(dy))
            return {"dx": Expected(_back(want, problem), _back(magnitude, problem), n, accumulate)}
        x, y = given["x"], given["y"]
        weights = np.where(np.isneginf(y), 0.0, np.exp(-y))
        sums = [np.cumsum((t * weights)[::-1], 0)[::-1] for t in (dy, np.abs(dy))]
        if problem.exclusive:
            sums = [np.concatenate([s[1:], np.zeros_like(s[:1])]) for s in sums]
        want, magnitude = (np.where(np.isneginf(x), 0.0, np.exp(x) * s) for s in sums)
        approximate = 2.0**-18 if accumulate is F32 else 2.0**-45
        return {"dx": Expected(_back(want, problem), _back(magnitude, problem), 4 * n + 32, accumulate, approximate)}


_OPS = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "cumprod_backward", "cummax_backward", "logcumsumexp_backward")
REFERENCES: dict[str, Reference] = {op: _run for op in _OPS}
