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
    with np.errstate(all="ignore"):
        s = k + alpha * _windows(problem, x * x, before, after)
        if not problem.is_backward:
            return {"y": Expected(x * s**-beta, None, taps + 2, accumulate, error)}
        dy = inputs["dy"]
        share = dy * x * s ** (-beta - 1)
        own, others = dy * s**-beta, -2 * alpha * beta * x
        magnitude = np.abs(own) + np.abs(others) * _windows(problem, np.abs(share), after, before)
        return {"dx": Expected(own + others * _windows(problem, share, after, before), magnitude, taps + 4, accumulate, error)}


REFERENCES = {"lrn": reference, "lrn_backward": reference}
