"""Sinkhorn's iterations in float64, and their gradient step by step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import F64
from ...ops.base import Problem
from ...ops.epilogue import accumulator_of
from ...ops.sinkhorn import SinkhornProblem
from . import Expected, Reference

_APPROXIMATE = 4e-6  # of e^x in f32, for x down to some tens below 0


def _steps(problem: SinkhornProblem, x: np.ndarray) -> list[tuple[np.ndarray, int, np.ndarray]]:
    """(the matrices after a half step, its axis of summation, the reciprocal of the sums), the powers first."""
    with np.errstate(all="ignore"):
        most = x.max(-2, keepdims=True) if x.size else x
        m = np.exp(x - np.where(most == -np.inf, 0.0, most))
        found = [(m, 0, np.ones(()))]
        for _ in range(problem.iterations):
            for axis in (-2, -1):
                scale = 1 / (m.sum(axis, keepdims=True) + problem.eps)
                m = m * scale
                found.append((m, axis, scale))
    return found


def _error(problem: SinkhornProblem) -> float:
    epsilon = accumulator_of(problem.desc("x").dtype).epsilon
    return (0.0 if problem.desc("x").dtype is F64 else _APPROXIMATE) + (16 + 8 * problem.iterations) * epsilon


def forward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, SinkhornProblem)
    y = _steps(problem, inputs["x"])[-1][0]
    return {"y": Expected(y, terms=0, accumulate=accumulator_of(problem.desc("x").dtype), slack=_error(problem) * np.abs(y))}


def backward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, SinkhornProblem)
    steps = _steps(problem, inputs["x"])
    d = inputs["dy"].astype(np.float64)
    size = np.abs(d)
    for m, axis, scale in reversed(steps[1:]):
        d = scale * (d - (d * m).sum(axis, keepdims=True))
        size = scale * (size + (size * m).sum(axis, keepdims=True))
    m = steps[0][0]
    accumulator = accumulator_of(problem.desc("x").dtype)
    return {"dx": Expected(d * m, terms=0, accumulate=accumulator, slack=_error(problem) * size * m)}


REFERENCES: dict[str, Reference] = {"sinkhorn": forward, "sinkhorn_backward": backward}
