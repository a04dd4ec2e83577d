"""Gated linear units: every unit and axis, types mixed, layouts, gaps and misaligned tensors; halves that packs do not divide."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import dtype
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.glu import UNITS
from . import Sampler
from .pointwise import FLOATS, view


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    rank = int(rng.integers(1, 5))
    most = ({1: 500, 2: 40, 3: 12, 4: 6} if size == "tiny" else {1: 70000, 2: 400, 3: 50, 4: 24})[rank]
    shape = [int(n) for n in rng.integers(1, most + 1, rank)]
    axis = rank - 1 if rng.random() < 0.5 else int(rng.integers(rank))
    least = 0 if rng.random() < 0.05 else 1
    shape[axis] = 2 * (int(rng.choice([8, 16, 64])) if rng.random() < 0.4 else int(rng.integers(least, most // 2 + 1)))
    kinds = [dtype(str(k)) for k in rng.choice(FLOATS, 3)]
    if rng.random() < 0.6:
        kinds = [kinds[0]] * 3
    half = (*shape[:axis], shape[axis] // 2, *shape[axis + 1:])
    tensors = {"x": view(rng, kinds[0], tuple(shape))}
    attrs: dict[str, Any] = {"name": str(rng.choice(list(UNITS))), "axis": axis - rank if rng.random() < 0.5 else axis}
    if op == "glu_backward":
        tensors["dy"] = view(rng, kinds[1], half)
    if rng.random() < 0.5:
        tensors["y" if op == "glu" else "dx"] = view(rng, kinds[2], half if op == "glu" else tuple(shape), True)
    return OPS[op].make(tensors, attrs, Policy())


SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in ("glu", "glu_backward")}
CASES: dict[str, tuple[str, ...]] = {
    "glu": ("glu x=bf16[9,128]", "glu x=f32[7,30]nchw name=swiglu", "glu x=f16[2,16,5,7]nhwc axis=1 name=geglu",
            "glu x=f64[6,3,5]nchw axis=0 name=reglu", "glu x=bf16[33,70](80,1) y=f32[33,35](1,40) name=geglu_tanh",
            "glu x=f32[0,8] name=bilinear"),
    "glu_backward": ("glu_backward dy=bf16[9,64] x=bf16[9,128]", "glu_backward dy=f32[7,15]nchw x=f32[7,30]nchw name=swiglu",
                     "glu_backward dy=f16[2,8,5,7]nhwc x=f16[2,16,5,7]nhwc axis=1 name=geglu",
                     "glu_backward dy=f64[3,3,5]nchw x=f64[6,3,5]nchw axis=0 name=reglu",
                     "glu_backward dy=f32[33,35] x=bf16[33,70](80,1) dx=f16[33,70](1,40) name=bilinear"),
}
