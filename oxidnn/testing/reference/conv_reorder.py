"""Reordered filters hold the same numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...ops.base import Problem
from . import Expected


def _reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    return {"packed": Expected(inputs["w"])}


REFERENCES = {"conv_reorder": _reference}
