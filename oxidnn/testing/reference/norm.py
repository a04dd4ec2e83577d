"""Layer and RMS normalisation in float64, from the definitions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...ops.base import Problem
from ...ops.epilogue import accumulator_of
from ...ops.norm import NormProblem
from ..compare import accumulated_error
from . import Expected, Reference
from .epilogue import finish, narrowed


def _moments(problem: NormProblem, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean, or 0 for RMS; mean of the squares about it), with the axes kept."""
    axes = problem.axes
    mean = np.zeros_like(h.mean(axes, keepdims=True)) if problem.is_rms else h.mean(axes, keepdims=True)
    return mean, ((h - mean) ** 2).mean(axes, keepdims=True)


def _spread(problem: NormProblem, values: np.ndarray) -> np.ndarray:
    """A parameter over the axes, in x's rank."""
    return values.reshape([problem.shape[i] if i in problem.axes else 1 for i in range(len(problem.shape))])


def forward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, NormProblem)
    h = inputs["x"] + inputs.get("residual", 0.0)
    accumulator, terms, axes = accumulator_of(problem.desc("x").dtype), problem.columns, problem.axes
    results = {}
    if problem.has("sum"):
        results["sum"] = Expected(h, np.abs(inputs["x"]) + np.abs(inputs.get("residual", 0.0)), 1, accumulator)
    if h.size == 0:
        return results | {o.name: Expected(np.zeros(o.desc.shape)) for o in problem.outputs}
    mean, variance = _moments(problem, h)
    with np.errstate(all="ignore"):
        rstd = 1 / np.sqrt(variance + problem.eps)
        gamma, beta = (_spread(problem, inputs[n]) if n in inputs else np.float64(v) for n, v in (("gamma", 1.0), ("beta", 0.0)))
        acc = (h - mean) * rstd * gamma + beta
        # h - mean errs by eps * size; the root of the mean of its squares by at most eps * spread, in relation
        size = np.abs(h) + np.abs(h).mean(axes, keepdims=True)
        spread = 1 + (s := np.sqrt((size**2).mean(axes, keepdims=True)) * rstd) + accumulator.epsilon * s**2
        magnitude = rstd * np.abs(gamma) * (size + np.abs(h - mean) * spread) + np.abs(beta)
    results |= quantised(problem, finish(problem, problem.epilogue, acc, magnitude, None, terms, inputs, scalars, axes[-1]))
    squeezed = tuple(n for i, n in enumerate(h.shape) if i not in axes)
    if problem.has("mean"):
        results["mean"] = Expected(mean.reshape(squeezed), np.abs(h).mean(axes), terms, accumulator)
    if problem.has("rstd"):
        results["rstd"] = Expected(rstd.reshape(squeezed), (rstd * spread).reshape(squeezed), terms, accumulator)
    return results


def quantised(problem: NormProblem, result: Expected) -> dict[str, Expected]:
    """y, and the scales of rows that it was divided by: how far the result's own tolerance moves them."""
    if not problem.has("row_scale"):
        return {"y": narrowed(problem, result)}
    kind, accumulator = problem.desc("y").dtype, accumulator_of(problem.desc("x").dtype)
    want = np.asarray(result.want, np.float64)
    with np.errstate(all="ignore"):
        error = accumulated_error(accumulator, result.terms) * (np.abs(want) if result.magnitude is None else result.magnitude)
        error = error + (0.0 if result.slack is None else result.slack) + 4 * accumulator.epsilon * np.abs(want)
        largest = np.abs(want).max(problem.axes, keepdims=True)
        scale = np.where(largest == 0, 1.0, largest / kind.max)
        scale = np.where(np.isfinite(want).all(problem.axes, keepdims=True), scale, np.nan)
        moved = error.max(problem.axes, keepdims=True) / kind.max + 4 * accumulator.epsilon * scale
        shape = problem.desc("row_scale").shape
        y = Expected(want / scale, terms=0, slack=(error + np.abs(want / scale) * moved) / scale)
    return {"row_scale": Expected(scale.reshape(shape), slack=moved.reshape(shape)), "y": narrowed(problem, y)}


def backward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, NormProblem)
    x, dy, axes, accumulator = inputs["x"], inputs["dy"], problem.axes, accumulator_of(problem.desc("x").dtype)
    kept = [1 if i in axes else n for i, n in enumerate(x.shape)]
    rstd = inputs["rstd"].reshape(kept)
    mean = inputs["mean"].reshape(kept) if "mean" in inputs else np.zeros(kept)
    gamma = _spread(problem, inputs["gamma"]) if "gamma" in inputs else np.float64(1.0)
    z, z_size = (x - mean) * rstd, (np.abs(x) + np.abs(mean)) * np.abs(rstd)
    g = dy * gamma
    terms, n = problem.columns, max(1, problem.columns)
    total = g.sum(axes, keepdims=True) * (0.0 if problem.is_rms else 1.0)
    dx = rstd * (g - (total + z * (g * z).sum(axes, keepdims=True)) / n)
    size = np.abs(g) + (np.abs(g).sum(axes, keepdims=True) + z_size * (np.abs(g) * z_size).sum(axes, keepdims=True)) / n
    results = {"dx": Expected(dx, np.abs(rstd) * size, terms, accumulator)}
    rows = problem.kept
    count = int(np.prod([x.shape[i] for i in rows]))
    for name, values, sizes in (("dgamma", dy * z, np.abs(dy) * z_size), ("dbeta", dy, np.abs(dy))):
        if problem.has(name):
            shape = problem.desc(name).shape
            results[name] = Expected(values.sum(rows).reshape(shape), sizes.sum(rows).reshape(shape), count, accumulator)
    return results


REFERENCES: dict[str, Reference] = {"layer_norm": forward, "rms_norm": forward, "layer_norm_backward": backward,
                                    "rms_norm_backward": backward}
