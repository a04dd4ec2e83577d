"""Elementwise losses in float64: the expression element by element, then a plain sum."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import dtype
from ...ops.base import Problem
from ...ops.elementwise_loss import LossProblem
from . import Expected
from .pointwise import reference as pointwise


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, LossProblem)
    if not problem.is_reduced:
        return pointwise(problem, inputs, scalars)
    losses = pointwise(problem.elements, inputs, scalars)["loss"]
    assert losses.slack is not None
    with np.errstate(all="ignore"):
        total, size, slack = (np.asarray(v.sum() / np.float64(problem.divisor)) for v in (losses.want, np.abs(losses.want), losses.slack))
    return {problem.outputs[0].name: Expected(total, size, max(1, losses.want.size), dtype(problem.compute), slack=slack)}


REFERENCES = {"loss": reference, "loss_backward": reference, "dot": reference}
