"""Random and fixed filters to reorder."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dtypes import BF16, E4M3, E5M2, F16, F32, F64, S8, U8
from ...ops import OPS, Policy, Problem
from .tensors import random_desc


def _sample(rng: np.random.Generator, size: str) -> Problem:
    top = 20 if size == "tiny" else 200
    kind = (S8, S8, U8, E4M3, E5M2, F16, BF16, F32, F64)[int(rng.integers(9))]
    shape = [int(rng.integers(1, top + 1)), int(rng.integers(1, top + 1)), *(int(n) for n in rng.integers(1, 5, int(rng.integers(1, 4))))]
    if rng.random() < 0.03:
        shape[int(rng.integers(2))] = 0
    attrs: dict[str, Any] = {} if rng.random() < 0.5 else {"use": "dgrad"}
    tensors = {"w": random_desc(rng, kind, shape)}
    if rng.random() < 0.2:
        tensors["packed"] = random_desc(rng, kind, shape, is_output=True)
    return OPS["conv_reorder"].make(tensors, attrs, Policy())


SAMPLES = {"conv_reorder": _sample}
CASES = {"conv_reorder": ("conv_reorder w=s8[64,3,7,7]", "conv_reorder w=s8[17,5,3]nhwc", "conv_reorder w=u8[24,16,3,3] use=dgrad",
                          "conv_reorder w=e4m3[5,40,2,2,2]@4 use=dgrad", "conv_reorder w=bf16[3,0,3,3]")}
