"""PReLU: one slope and slopes of channels, types mixed, layouts, strides and misaligned tensors."""

from __future__ import annotations

from functools import partial

import numpy as np

from ...dtypes import dtype
from ...ops import OPS
from ...ops.base import Policy, Problem
from . import Sampler
from .pointwise import FLOATS, _shape, view


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    shape = _shape(rng, size, 1)
    kinds = [dtype(str(k)) for k in rng.choice(FLOATS, 4)]
    if rng.random() < 0.6:
        kinds = [kinds[0]] * 4
    count = shape[1] if len(shape) > 1 and rng.random() < 0.7 else 1
    tensors = {"x": view(rng, kinds[0], shape), "slope": view(rng, kinds[1], (count,))}
    if op == "prelu_backward":
        tensors["dy"] = view(rng, kinds[2], shape)
    if rng.random() < 0.4:
        tensors["y" if op == "prelu" else "dx"] = view(rng, kinds[3], shape, True)
    return OPS[op].make(tensors, {}, Policy())


SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in ("prelu", "prelu_backward")}
CASES: dict[str, tuple[str, ...]] = {
    "prelu": ("prelu x=f16[2,16,5,7]nhwc slope=f16[16]", "prelu x=f32[33]nchw slope=f32[1]", "prelu x=bf16[4,9]nchw slope=f32[1]"),
    "prelu_backward": ("prelu_backward dy=f16[2,16,5,7]nhwc x=f16[2,16,5,7]nhwc slope=f16[16]",
                       "prelu_backward dy=f32[333]nchw x=f32[333]nchw slope=f32[1]", "prelu_backward dy=bf16[4,9] x=bf16[4,9] slope=f32[9]",
                       "prelu_backward dy=f32[0,3] x=f32[0,3] slope=f32[3]"),
}
