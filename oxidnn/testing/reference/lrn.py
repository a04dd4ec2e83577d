"""Local response normalisation in float64, channel by channel as its formula says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import F32, F64
from ...ops.base import Problem
from ...ops.lrn import LrnProblem
from . import Expected


def _windows(problem: LrnProblem, values: np.ndarray, before: int, after: int) -> np.ndarray:
    """The sum of `values` over windows from `before` before to `after` behind: along the channels, or along all spatial dimensions."""
    for axis in range(2, values.ndim) if problem.within else (1,):
        moved = np.moveaxis(values, axis, 0)
        count = len(moved)
        total = np.stack([moved[max(0, i - before):min(count, i + after + 1)].sum(0) for i in range(count)]) if count else moved
        values = np.moveaxis(total, 0, axis)
    return values


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, LrnProblem)
    x, before, after = inputs["x"], problem.before, problem.size - 1 - problem.before
    is_double = problem.desc("x").dtype is F64
    accumulate, error = (F64, 1e-14) if is_double else (F32, 4e-6)
    kind = np.float64 if is_double else np.float32
    alpha, beta, k = (float(kind(v)) for v in (problem.factor, problem.beta, problem.k))
    taps = problem.size ** (x.ndim - 2) if problem.within else problem.size
    means = inputs.get("means", np.float64(0.0))
    u = x - means
    with np.errstate(all="ignore"):
        s = k + alpha * _windows(problem, u * u, before, after)
        # u errs by what x and means lost in the difference
        reach = kind(accumulate.epsilon) * alpha * _windows(problem, 2 * np.abs(u) * (np.abs(x) + np.abs(means)), before, after) / s
        if not problem.is_backward:
            return {"y": Expected(x * s**-beta, None, taps + 2, accumulate, error, slack=np.abs(x) * s**-beta * beta * reach)}
        dy = inputs["dy"]
        share = dy * x * s ** (-beta - 1)
        own, others = dy * s**-beta, -2 * alpha * beta * u * _windows(problem, share, after, before)
        size = 2 * alpha * beta * np.abs(u) * _windows(problem, np.abs(share), after, before)
        lost = 2 * alpha * beta * np.abs(u) * _windows(problem, np.abs(share) * (beta + 1) * reach, after, before)
        lost = lost + accumulate.epsilon * 2 * alpha * beta * (np.abs(x) + np.abs(means)) * _windows(problem, np.abs(share), after, before)
        results = {"dx": Expected(own + others, np.abs(own) + size, taps + 4, accumulate, error, slack=lost + np.abs(own) * beta * reach)}
        if problem.has("dmeans"):
            results["dmeans"] = Expected(-others, size, taps + 4, accumulate, error, slack=lost)
        return results


REFERENCES = {op: reference for op in ("lrn", "lrn_backward", "divisive_norm", "divisive_norm_backward")}
