"""References in float64 (exact integers where the types allow), one file a family; they know nothing of engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

import numpy as np

from ...dtypes import DType
from ...ops import FAMILIES
from ...ops.base import Problem


@dataclass(frozen=True, slots=True)
class Expected:
    """What an output should be.

    want: float64 or integer array of the output's logical shape (not yet rounded to its type). magnitude: sum of the absolute values
    of the terms behind each element (None: |want|). terms: how many were summed, in `accumulate` precision (None: the output's);
    0 if `slack` says all. approximate: relative error of approximate functions used (0 for exactly rounded arithmetic).
    slack: absolute error allowed beyond that, for roundings of intermediate values (None: 0). written: which elements are written,
    the others keep what their memory held (None: all). coarse_slack: slack of engines that sum coarsely (8-bit floats
    in tensor cores, Winograd's transforms).
    """

    want: np.ndarray
    magnitude: np.ndarray | None = None
    terms: int = 1
    accumulate: DType | None = None
    approximate: float = 0.0
    slack: np.ndarray | None = None
    written: np.ndarray | None = None
    coarse_slack: np.ndarray | None = None


# reference(problem, inputs, scalars) -> outputs. Inputs are float64 arrays holding the values of the storage type, or integers;
# scalars are what their types hold.
Reference = Callable[[Problem, Mapping[str, np.ndarray], Mapping[str, float]], dict[str, Expected]]

REFERENCES: dict[str, Reference] = {}
for _family in FAMILIES:
    REFERENCES.update(import_module(f".{_family}", __name__).REFERENCES)
