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
from .pointwise import error_bound


def _moments(problem: NormProblem, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean, or 0 for RMS; mean of the squares about it), with the axes kept."""
    axes = problem.axes
    mean = np.zeros_like(h.mean(axes, keepdims=True)) if problem.is_rms else h.mean(axes, keepdims=True)
    return mean, ((h - mean) ** 2).mean(axes, keepdims=True)


def _spread(problem: NormProblem, values: np.ndarray) -> np.ndarray:
    """A parameter over the axes, in x's rank, which it may have already."""
    if values.ndim == len(problem.shape) and values.shape != tuple(problem.shape[a] for a in problem.axes):
        return values
    return values.reshape([problem.shape[i] if i in problem.axes else 1 for i in range(len(problem.shape))])


def _parameters(problem: NormProblem, inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    gamma, beta = (_spread(problem, inputs[n]) if n in inputs else np.asarray(v) for n, v in (("gamma", 1.0), ("beta", 0.0)))
    return gamma + problem.zero_centered, beta


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
        gamma, beta = _parameters(problem, inputs)
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
    gamma, beta = _parameters(problem, inputs)
    z, z_size = (x - mean) * rstd, (np.abs(x) + np.abs(mean)) * np.abs(rstd)
    off = np.zeros(x.shape)  # what rounding before the epilogue may add to dy times its slope
    if problem.epilogue is not None:
        slope = problem.epilogue.differentiate("acc")
        before, reach = z * gamma + beta, 4 * accumulator.epsilon * (z_size * np.abs(gamma) + np.abs(beta))
        ends = [np.broadcast_to(slope.evaluate({"acc": at, "dy": dy})[0], x.shape) for at in (before, before - reach, before + reach)]
        moved = np.maximum(np.abs(ends[1] - ends[0]), np.abs(ends[2] - ends[0]))
        dy, off = ends[0], moved + 2 * error_bound(slope, {"acc": before, "dy": dy}, {}, accumulator.name)[0]
    g = dy * gamma
    terms, n = problem.columns, max(1, problem.columns)

    def gradient(g: np.ndarray, z: np.ndarray, sign: float) -> np.ndarray:
        """Of dx by the formula; with sign 1 and absolute values, its magnitude."""
        total = g.sum(axes, keepdims=True) * (0.0 if problem.is_rms else 1.0)
        return rstd * (g + sign * (total + z * (g * z).sum(axes, keepdims=True)) / n)

    off_g = off * np.abs(gamma)
    results = {"dx": Expected(gradient(g, z, -1.0), np.abs(gradient(np.abs(g), z_size, 1.0)), terms, accumulator,
                              slack=np.abs(gradient(off_g, z_size, 1.0)))}
    rows = problem.kept
    count = int(np.prod([x.shape[i] for i in rows]))
    for name, values, sizes, slack in (("dgamma", dy * z, np.abs(dy) * z_size, off * z_size), ("dbeta", dy, np.abs(dy), off)):
        if problem.has(name):
            summed = tuple(i for i in rows if i not in problem.samples)
            want, size, more = (a.sum(summed).reshape(problem.desc(name).shape) for a in (values, sizes, slack))
            results[name] = Expected(want, size, count, accumulator, slack=more)
    return results


REFERENCES: dict[str, Reference] = {"layer_norm": forward, "rms_norm": forward, "layer_norm_backward": backward,
                                    "rms_norm_backward": backward}
