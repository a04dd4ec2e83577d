"""Causal convolutions: either dimension innermost, widths 2 to 7, states, activations, mixed types, sequences shorter than the filter."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, F64
from ...ops import OPS
from ...ops.base import Policy, Problem
from . import Sampler
from .tensors import random_desc


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    is_tiny, is_update = size == "tiny", op == "causal_conv1d_update"
    batch = 0 if rng.random() < 0.04 else int(rng.integers(1, 4))
    channels = int(rng.integers(1, 12)) if rng.random() < 0.4 else 8 * int(rng.integers(1, 4 if is_tiny else 20))
    width = int(rng.integers(2, 5)) if rng.random() < 0.8 else int(rng.integers(5, 8))
    length = int(rng.integers(1, 5)) if is_update or rng.random() < 0.2 else int(rng.integers(1, 60 if is_tiny else 700))
    if not is_update:
        length = length // 16 * 16 if rng.random() < 0.4 else length
    kind = (F32, F16, BF16, BF16, F64)[int(rng.integers(5))]
    own = F32 if kind is not F64 and rng.random() < 0.3 else kind
    sequence: tuple[int, ...] = (batch, channels, length)
    if is_update and length == 1 and rng.random() < 0.7:
        sequence = (batch, channels)
    past = (batch, channels, width - 1)
    shapes = {"x": sequence, "dy": sequence, "w": (channels, width), "bias": (channels,), "state": past, "d_final_state": past}
    left_out = {n for n in ("bias", "state", "d_final_state") if rng.random() < 0.5 and not (is_update and n == "state")}
    is_dense = rng.random() < 0.35  # channels innermost
    tensors = {n: random_desc(rng, kind if n in ("x", "dy") else own, shapes[n], is_dense=is_dense)
               for n in OPS[op].inputs if n not in left_out}
    attrs: dict[str, Any] = {"activation": "silu"} if rng.random() < 0.6 else {}
    if op == "causal_conv1d" and rng.random() < 0.5:
        attrs["return_state"] = True
    problem = OPS[op].make(tensors, attrs, Policy())
    if rng.random() < 0.6:
        results = {o.name: random_desc(rng, o.desc.dtype, o.desc.shape, is_output=True, is_dense=is_dense) for o in problem.outputs}
        if is_update and rng.random() < 0.6 and tensors["state"].is_injective:
            results["new_state"] = tensors["state"]
        problem = OPS[op].make(tensors | results, attrs, Policy())
    return problem


_OPS = ("causal_conv1d", "causal_conv1d_update", "causal_conv1d_backward")
SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in _OPS}
CASES: dict[str, tuple[str, ...]] = {
    "causal_conv1d": (
        "causal_conv1d x=bf16[2,16,40]nchw w=bf16[16,4] bias=bf16[16] activation=silu",
        "causal_conv1d x=bf16[2,16,40]nhwc w=bf16[16,4] bias=f32[16] state=f32[2,16,3] activation=silu return_state=True",
        "causal_conv1d x=f32[1,3,2]nchw w=f32[3,4] state=f32[1,3,3] return_state=True",
        "causal_conv1d x=f16[1,5,33]nhwc w=f16[5,2] return_state=True", "causal_conv1d x=f64[1,2,9]nchw w=f64[2,16] activation=silu",
        "causal_conv1d x=f32[2,4,0]nchw w=f32[4,3] state=f32[2,4,2] return_state=True",
        "causal_conv1d x=f32[70000,1,3]nchw w=f32[1,2]",
    ),
    "causal_conv1d_update": (
        "causal_conv1d_update x=bf16[3,24] state=bf16[3,24,3] w=bf16[24,4] bias=bf16[24] new_state=bf16[3,24,3] activation=silu",
        "causal_conv1d_update x=f32[2,7,5]nchw state=f32[2,7,2] w=f32[7,3]",
    ),
    "causal_conv1d_backward": (
        "causal_conv1d_backward dy=bf16[2,16,40]nchw x=bf16[2,16,40]nchw w=bf16[16,4] bias=bf16[16] activation=silu",
        "causal_conv1d_backward dy=bf16[2,16,40]nhwc x=bf16[2,16,40]nhwc w=bf16[16,4] bias=f32[16] state=f32[2,16,3] "
        "d_final_state=f32[2,16,3] activation=silu",
        "causal_conv1d_backward dy=f32[1,3,2]nchw x=f32[1,3,2]nchw w=f32[3,4] state=f32[1,3,3] d_final_state=f32[1,3,3]",
        "causal_conv1d_backward dy=f32[1,3,2]nchw x=f32[1,3,2]nhwc w=f32[3,7] d_final_state=f32[1,3,6]",
        "causal_conv1d_backward dy=f32[0,3,5]nchw x=f32[0,3,5]nchw w=f32[3,4] bias=f32[3]",
        "causal_conv1d_backward dy=f32[2,3,0]nchw x=f32[2,3,0]nchw w=f32[3,4] state=f32[2,3,3] d_final_state=f32[2,3,3]",
        "causal_conv1d_backward dy=f64[2,2,300]nchw x=f64[2,2,300]nchw w=f64[2,3] bias=f64[2] activation=silu",
    ),
}
