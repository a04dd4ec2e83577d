"""GEMM in float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...ops.base import Problem
from ...ops.gemm import GemmProblem
from . import Expected
from .epilogue import finish, product_error


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, GemmProblem)
    a = inputs["a"].swapaxes(-1, -2) if p.transpose_a else inputs["a"]
    b = inputs["b"].swapaxes(-1, -2) if p.transpose_b else inputs["b"]
    acc, magnitude = p.alpha * (a @ b), abs(p.alpha) * (np.abs(a) @ np.abs(b))
    slack = product_error(p) * magnitude
    if p.beta:
        acc, magnitude = acc + p.beta * inputs["c"], magnitude + abs(p.beta) * np.abs(inputs["c"])
    return {"d": finish(p, p.epilogue, acc, magnitude, slack, p.k + 2, inputs, scalars, -1)}


REFERENCES = {"gemm": reference}
