"""Maps of rows in float64, from the definitions; sparsemax by sorting."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...ops.base import Problem
from ...ops.epilogue import accumulator_of
from ...ops.row_map import NORMALIZE_EPS, POWER_EPS, RowMapProblem
from . import Expected, Reference


def _number(problem: Problem, name: str, default: float) -> float:
    return dict(problem.attrs).get(name, default)


def _columns(problem: RowMapProblem, values: np.ndarray) -> np.ndarray:
    return values.reshape([n if i in problem.axes else 1 for i, n in enumerate(problem.shape)])


def _rows(problem: RowMapProblem, values: np.ndarray) -> np.ndarray:
    if values.size == 1:
        return values.reshape((1,) * len(problem.shape))
    return values.reshape([1 if i in problem.axes else n for i, n in enumerate(problem.shape)])


def _slope(x: np.ndarray, p: float) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.where(x == 0, 0.0, np.sign(x) * np.abs(x) ** (p - 1))


def normalize(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, RowMapProblem)
    x, axes, acc = inputs["x"], problem.axes, accumulator_of(problem.desc("x").dtype)
    p, eps = _number(problem, "p", 2.0), _number(problem, "eps", NORMALIZE_EPS)
    g = _rows(problem, inputs["g"]) if "g" in inputs else np.float64(1.0)
    with np.errstate(all="ignore"):
        norm = (np.abs(x) ** p).sum(axes, keepdims=True) ** (1 / p)
        y = x / np.maximum(norm, eps) * g
    results = {"y": Expected(y, 8 * np.abs(y), problem.columns, acc)}
    if problem.has("norm"):
        norm = norm.reshape(problem.desc("norm").shape)
        results["norm"] = Expected(norm, 8 * norm, problem.columns, acc)
    return results


def normalize_backward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, RowMapProblem)
    dy, x, axes, acc = inputs["dy"], inputs["x"], problem.axes, accumulator_of(problem.desc("x").dtype)
    p, eps = _number(problem, "p", 2.0), _number(problem, "eps", NORMALIZE_EPS)
    g = _rows(problem, inputs["g"]) if "g" in inputs else np.float64(1.0)
    with np.errstate(all="ignore"):
        norm = (np.abs(x) ** p).sum(axes, keepdims=True) ** (1 / p)
        m = np.maximum(norm, eps)
        dot, size = (dy * x).sum(axes, keepdims=True), np.abs(dy * x).sum(axes, keepdims=True)
        slope = np.where(norm < eps, 0.0, _slope(x, p) / norm ** (p - 1))
        dx = g / m * (dy - dot / m * slope)
        magnitude = np.abs(g) / m * (np.abs(dy) + size / m * np.abs(slope))
    results = {"dx": Expected(dx, 8 * magnitude, problem.columns, acc)}
    if problem.has("dg"):
        dg, size = dot / m + 0 * g, size / m + 0 * g
        if inputs["g"].size == 1:
            dg, size = dg.sum(), size.sum()
        shape = problem.desc("dg").shape
        results["dg"] = Expected(dg.reshape(shape), 8 * size.reshape(shape), problem.columns, acc)
    return results


def power_norm(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, RowMapProblem)
    x, axes, acc = inputs["x"], problem.axes, accumulator_of(problem.desc("x").dtype)
    p, eps = _number(problem, "p", 2.0), _number(problem, "eps", POWER_EPS)
    gamma, beta = (_columns(problem, inputs[n]) if n in inputs else np.float64(v) for n, v in (("gamma", 1.0), ("beta", 0.0)))
    with np.errstate(all="ignore"):
        r = ((np.abs(x) ** p).mean(axes, keepdims=True) + eps) ** (-1 / p) if x.size else np.ones(x.sum(axes, keepdims=True).shape)
        y = x * r * gamma
    results = {"y": Expected(y + beta, 8 * (np.abs(y) + np.abs(beta)), problem.columns, acc)}
    if problem.has("rstd"):
        rstd = r.reshape(problem.desc("rstd").shape)
        results["rstd"] = Expected(rstd, 8 * rstd, problem.columns, acc)
    return results


def power_norm_backward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, RowMapProblem)
    dy, x, axes, acc = inputs["dy"], inputs["x"], problem.axes, accumulator_of(problem.desc("x").dtype)
    p, r = _number(problem, "p", 2.0), _rows(problem, inputs["rstd"])
    g = dy * (_columns(problem, inputs["gamma"]) if "gamma" in inputs else 1.0)
    n = max(1, problem.columns)
    with np.errstate(all="ignore"):
        part = np.abs(r) ** (p + 1) / n * _slope(x, p)
    dx = g * r - (g * x).sum(axes, keepdims=True) * part
    results = {"dx": Expected(dx, 8 * (np.abs(g * r) + np.abs(g * x).sum(axes, keepdims=True) * np.abs(part)), n, acc)}
    if problem.has("dgamma"):
        z, shape = dy * x * r, problem.desc("dgamma").shape
        count = int(np.prod([x.shape[i] for i in problem.kept]))
        results["dgamma"] = Expected(z.sum(problem.kept).reshape(shape), np.abs(z).sum(problem.kept).reshape(shape), count, acc)
    return results


def sparsemax(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    """Sorted descending, the threshold is that of the longest beginning whose k-th element is above (its sum - 1) / k."""
    assert isinstance(problem, RowMapProblem)
    x, axis, acc = inputs["x"], problem.axes[0], accumulator_of(problem.desc("x").dtype)
    n = x.shape[axis]
    with np.errstate(all="ignore"):
        w = x - x.max(axis, keepdims=True, initial=-np.inf)
        down = -np.sort(-w, axis)
        k = np.arange(1, n + 1).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        sums = np.cumsum(np.where(down == -np.inf, 0, down), axis)
        support = ((down > (sums - 1) / k) & (down > -np.inf)).sum(axis, keepdims=True)
        total = np.take_along_axis(sums, np.maximum(support - 1, 0), axis) if x.size else sums
        t = (total - 1) / support
        y = np.where(np.isnan(w).any(axis, keepdims=True), np.nan, np.maximum(w - t, 0.0))
    slack = np.broadcast_to(4 * acc.epsilon * np.sqrt(np.maximum(support, 1)), y.shape)
    return {"y": Expected(y, None, 1, acc, slack=slack)}


def sparsemax_backward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, RowMapProblem)
    dy, y, axis = inputs["dy"], inputs["y"], problem.axes[0]
    support = y > 0
    with np.errstate(all="ignore"):
        count = support.sum(axis, keepdims=True)
        mean = (dy * support).sum(axis, keepdims=True) / count
        size = np.abs(dy) + np.abs(dy * support).sum(axis, keepdims=True) / count
        dx = np.where(support, dy - mean, 0.0)
    return {"dx": Expected(dx, size, dy.shape[axis], accumulator_of(problem.desc("dy").dtype))}


REFERENCES: dict[str, Reference] = {
    "normalize": normalize, "normalize_backward": normalize_backward, "power_norm": power_norm, "power_norm_backward": power_norm_backward,
    "sparsemax": sparsemax, "sparsemax_backward": sparsemax_backward,
}
