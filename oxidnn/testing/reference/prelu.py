"""PReLU and its gradients by their definitions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...ops.base import Problem
from ...ops.prelu import PreluGradientProblem
from . import Expected
from .pointwise import reference as pointwise


def _gradient(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, PreluGradientProblem)
    dy, x, slope = inputs["dy"], inputs["x"], inputs["slope"]
    beside = slope.reshape((1, -1) + (1,) * (x.ndim - 2)) if x.ndim > 1 else slope
    shares = np.where(x > 0, 0.0, dy * x)
    terms = int(np.prod([x.shape[a] for a in problem.axes], dtype=np.int64))
    total, size = (v.sum(problem.axes).reshape(slope.shape) for v in (shares, np.abs(shares)))
    return {"dx": Expected(np.where(x > 0, dy, dy * beside), accumulate=problem.accumulate),
            "dslope": Expected(total, size, max(1, terms), problem.accumulate)}


REFERENCES = {"prelu": pointwise, "prelu_backward": _gradient}
