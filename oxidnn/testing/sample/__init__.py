"""Random and fixed problems of every op, one file a family: SAMPLES draws one, CASES lists lines of the case grammar.

A sampler takes a generator and a size: "tiny" runs in the emulator in some tens of milliseconds (at most about 30,000 multiply-adds),
"small" is for GPUs (sizes 1 to 40, all attributes). It draws layouts, strided and misaligned views, types, and every attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from ...ops import FAMILIES
from ...ops.base import Problem

Sampler = Callable[[np.random.Generator, str], Problem]
Fill = Callable[[np.random.Generator, Problem], Any]

SAMPLES: dict[str, Sampler] = {}
CASES: dict[str, tuple[str, ...]] = {}
# (op, operand or scalar) -> values that are not simply normal, e.g. class labels in range, a probability
FILLS: dict[tuple[str, str], Fill] = {}
for _family in FAMILIES:
    _module = import_module(f".{_family}", __name__)
    SAMPLES.update(_module.SAMPLES)
    CASES.update(_module.CASES)
    FILLS.update(getattr(_module, "FILLS", {}))
