"""Reductions in float64 or exact integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...codegen.pointwise import round_to
from ...dtypes import F32, F64, dtype
from ...ops.base import Problem
from ...ops.reduce import FRACTIONAL, ReduceGradientProblem, ReduceProblem
from . import Expected


def _arg(x: np.ndarray, axes: tuple[int, ...], largest: bool) -> np.ndarray:
    """NumPy's argmax over several axes: they are moved last and flattened."""
    kept = [i for i in range(x.ndim) if i not in axes]
    flat = x.transpose(*kept, *axes).reshape(*(x.shape[i] for i in kept), -1)
    return np.asarray((np.argmax if largest else np.argmin)(flat, axis=-1))


def _logsumexp(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    top = np.max(x, axis=axes, keepdims=True, initial=-np.inf)
    held = np.where(np.isfinite(top), top, 0.0)
    return np.log(np.sum(np.exp(x - held), axis=axes)) + held.reshape(np.sum(x, axis=axes).shape)


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, ReduceProblem)
    kind, axes, y = problem.kind, problem.axes, problem.desc("y")
    x: Any = inputs["x"]
    if problem.diagonal is not None:
        x = np.diagonal(x, problem.diagonal, -2, -1)
    x = x.astype(np.float64) if x.dtype.kind == "f" or kind in FRACTIONAL else x.astype(np.int64)
    floating, count = x.dtype.kind == "f", problem.num_reduced
    kinds = (problem.desc("x").dtype, y.dtype)
    accumulate = F64 if F64 in kinds or not kinds[0].is_float else F32
    magnitude: Any = None
    approximate = 0.0
    a = np.abs(x)
    with np.errstate(all="ignore"):
        if kind in ("sum", "mean"):
            divisor = np.float64(count if kind == "mean" else 1)
            want, magnitude = np.sum(x, axis=axes), np.sum(a, axis=axes)
            if kind == "mean":
                want, magnitude = want / divisor, magnitude / divisor
        elif kind in ("max", "min"):
            want = (np.max if kind == "max" else np.min)(x, axis=axes)
        elif kind == "amax":
            want = np.max(a, axis=axes)
        elif kind == "norm1":
            want = np.sum(a, axis=axes)
        elif kind == "norm2":
            want = np.sqrt(np.sum(x * x, axis=axes))
        elif kind in ("prod", "mul_no_zeros"):
            want = np.prod(np.where(x == 0, 1, x) if kind == "mul_no_zeros" else x, axis=axes)
            magnitude = np.abs(want) * max(1.0, count) ** 0.5  # every factor's rounding is relative to the product
        elif kind in ("any", "all"):
            want = (np.any if kind == "any" else np.all)(x, axis=axes)
        elif kind == "count_nonzero":
            want = np.count_nonzero(x, axis=axes)
        elif kind in ("argmax", "argmin"):
            want = _arg(x, axes, kind == "argmax")
        elif kind == "logsumexp":
            want = np.asarray(_logsumexp(x, axes))
            # The sum's relative error is the logarithm's absolute one; the maximum is added back and rounded.
            magnitude = np.abs(want) + 4.0
            approximate = 2.0**-22 if accumulate is F32 else 0.0
        else:
            mean = np.mean(x, axis=axes, keepdims=True)
            mean = mean + np.mean(x - mean, axis=axes, keepdims=True)  # what the first rounding left
            divisor = np.float64(max(0, count - problem.correction))
            want = np.sum((x - mean) ** 2, axis=axes) / divisor
            want = np.sqrt(want) if kind == "std" else want  # squares: the error is relative to the result
    want = np.asarray(want).reshape(y.shape)
    found = {}
    if problem.has("indices"):
        found["indices"] = Expected(_arg(a if kind == "amax" else x, axes, kind != "min").reshape(y.shape))
    if not y.dtype.is_float:
        exact = want if y.dtype.name == "s64" else np.asarray(round_to(want, y.dtype.name))
        return found | {"y": Expected(exact)}
    if not floating:
        return found | {"y": Expected(want.astype(np.float64), accumulate=F64)}
    if magnitude is not None:
        magnitude = np.asarray(magnitude, np.float64).reshape(y.shape)
    return found | {"y": Expected(want, magnitude, max(1, count), accumulate, approximate)}


def gradient(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    """By the derivative of each kind; errors of what the reduction found (relative, or of the mean absolute) are the slack."""
    assert isinstance(problem, ReduceGradientProblem)
    kind, axes, kept = problem.kind, problem.axes, problem.kept
    x: Any = inputs["x"]
    dy: Any = inputs["dy"].reshape(kept)
    count = int(np.prod([x.shape[a] for a in axes], dtype=np.int64))
    epsilon = dtype(problem.accumulate).epsilon
    unit = epsilon * (4 + 2 * count**0.5)  # of sums and products of so many
    with np.errstate(all="ignore"):
        a, mean = np.abs(x), np.sum(x, axis=axes, keepdims=True) / np.float64(count)
        over: dict[str, Any] = {"axis": axes, "keepdims": True}
        divisor = np.float64(max(count - problem.correction, 0))
        finds: dict[str, Callable[[], Any]] = {
            "max": lambda: np.max(x, initial=-np.inf, **over), "min": lambda: np.min(x, initial=np.inf, **over),
            "amax": lambda: np.max(a, initial=0, **over), "norm2": lambda: np.sqrt(np.sum(x * x, **over)),
            "logsumexp": lambda: _logsumexp(x, axes).reshape(kept), "std": lambda: np.sqrt(np.sum((x - mean) ** 2, **over) / divisor),
            "mul_no_zeros": lambda: np.prod(np.where(x == 0, 1, x), **over),
        }
        y: Any = inputs["y"].reshape(kept) if "y" in inputs else finds[kind]() if kind in finds else None
        lost: Any = 0.0  # absolute
        relative: Any = unit
        if kind in ("sum", "mean"):
            want = np.broadcast_to(dy / (count if kind == "mean" else 1), x.shape)
        elif kind == "norm1":
            want = dy * np.sign(x)
        elif kind == "norm2":
            want = np.where(y == 0, 0, dy * x / y)
        elif kind == "logsumexp":
            want, relative = dy * np.exp(x - y), unit + epsilon * (4 * np.abs(x - y) + 2 * np.abs(y) + 2 * a + 8)
        elif kind in ("max", "min", "amax"):
            hit = (a if kind == "amax" else x) == y
            want = np.where(hit, dy * (np.sign(x) if kind == "amax" else 1) / np.sum(hit, **over), 0)
        elif kind == "mul_no_zeros":
            want = np.where(x == 0, 0, dy * y / x)
        elif kind == "prod":
            zeros = np.sum(x == 0, **over)
            others = finds["mul_no_zeros"]()
            want = dy * np.where(zeros == 0, others / x, np.where((zeros == 1) & (x == 0), others, 0))
        else:
            scale = 2 * dy if kind == "var" else np.where(y == 0, 0, dy / y)
            want = scale * (x - mean) / divisor
            lost = np.abs(scale) / divisor * unit * (np.abs(mean) + np.sum(a, **over) / max(count, 1))
            want = np.where(y == 0, 0, want) if kind == "std" else want
        slack = np.nan_to_num(np.broadcast_to(2 * (np.abs(want) * relative + lost), x.shape), nan=0.0, posinf=0.0)
    return {"dx": Expected(np.asarray(want, np.float64), terms=0, accumulate=dtype(problem.accumulate), slack=slack)}


REFERENCES = {"reduce": reference, "reduce_to": reference, "trace": reference, "reduce_backward": gradient}
