"""Gated linear units: the expression over NumPy's halves, with the bounds of expressions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...ops.base import Problem
from ...ops.pointwise import PointwiseProblem
from . import Expected
from .pointwise import expected_values


def _run(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, PointwiseProblem)
    axis = dict(problem.attrs).get("axis", inputs["x"].ndim - 1)
    a, b = np.split(inputs["x"], 2, axis)
    found = expected_values(problem, {"a": a, "b": b, **inputs}, scalars)
    if problem.op == "glu":
        return {"y": found[0]}
    first, second = found
    assert first.slack is not None and second.slack is not None
    joined = np.concatenate([first.want, second.want], axis)
    return {"dx": Expected(joined, terms=0, accumulate=first.accumulate, slack=np.concatenate([first.slack, second.slack], axis))}


REFERENCES = {"glu": _run, "glu_backward": _run}
