"""Deformable convolutions: groups of either kind, with and without masks, offsets that lead outside, every type and layout."""

from __future__ import annotations

from functools import partial
from math import lcm
from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, F64
from ...ops import OPS
from ...ops.base import Policy, Problem
from . import Fill, Sampler
from .tensors import random_desc


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    def each(low: int, high: int) -> tuple[int, int]:
        return int(rng.integers(low, high + 1)), int(rng.integers(low, high + 1))

    is_tiny = size == "tiny"
    groups, offset_groups = (int(rng.choice((1, 1, 2, 3))) for _ in range(2))
    least = lcm(groups, offset_groups)
    many = (2, 8, 16, 32) if is_tiny else (8, 16, 64)
    channels = least * int(rng.integers(1, 4)) if rng.random() < 0.5 else least * int(rng.choice(many))
    filters = groups * int(rng.integers(1, 6 if is_tiny else 20))
    kernel, stride = each(1, 3), each(1, 2)
    dilation = each(1, 2) if rng.random() < 0.3 else (1, 1)
    padding = tuple(zip(each(0, 2), each(0, 2), strict=True)) if rng.random() < 0.6 else ((0, 0), (0, 0))
    reach = [(r - 1) * d + 1 for r, d in zip(kernel, dilation, strict=True)]
    extents = tuple(max(1, e - lo - hi) + int(rng.integers(0, 4 if is_tiny else 16)) for e, (lo, hi) in zip(reach, padding, strict=True))
    positions = tuple((n + lo + hi - e) // u + 1 for n, (lo, hi), e, u in zip(extents, padding, reach, stride, strict=True))
    n = 0 if rng.random() < 0.04 else int(rng.integers(1, 3))
    kind = (F32, F32, F16, BF16, F64)[int(rng.integers(5))]
    own = F32 if kind is not F64 and rng.random() < 0.3 else kind
    taps = kernel[0] * kernel[1]
    shapes = {"x": (n, channels, *extents), "w": (filters, channels // groups, *kernel), "dy": (n, filters, *positions),
              "offset": (n, 2 * offset_groups * taps, *positions), "mask": (n, offset_groups * taps, *positions), "bias": (filters,)}
    left_out = {name for name in ("mask", "bias") if rng.random() < 0.4}
    is_dense = rng.random() < 0.3
    tensors = {name: random_desc(rng, own if name in ("offset", "mask") else kind, shapes[name], is_dense=is_dense)
               for name in OPS[op].inputs if name not in left_out}
    attrs: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if op == "deform_conv_backward":
        attrs["bias_gradient"] = bool(rng.random() < 0.5)
    problem = OPS[op].make(tensors, attrs, Policy())
    if rng.random() < 0.6:
        results = {o.name: random_desc(rng, o.desc.dtype, o.desc.shape, is_output=True, is_dense=is_dense) for o in problem.outputs}
        problem = OPS[op].make(tensors | results, attrs, Policy())
    return problem


def _offsets(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Mostly about a pixel, some whole numbers, some far outside."""
    shape = problem.desc("offset").shape
    values = rng.standard_normal(shape) * 1.5
    draw = rng.random(shape)
    return np.where(draw < 0.1, np.round(values), np.where(draw > 0.97, values * 1e4, values))


_OPS = ("deform_conv", "deform_conv_backward")
SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in _OPS}
FILLS: dict[tuple[str, str], Fill] = {(op, "offset"): _offsets for op in _OPS}
CASES: dict[str, tuple[str, ...]] = {
    "deform_conv": (
        "deform_conv x=f32[2,4,5,6]nchw offset=f32[2,18,5,6]nchw w=f32[3,4,3,3]nchw mask=f32[2,9,5,6]nchw bias=f32[3] padding=1",
        "deform_conv x=bf16[1,16,6,6]nhwc offset=bf16[1,36,6,6]nchw w=bf16[8,16,3,3]nhwc mask=bf16[1,18,6,6]nchw padding=1",
        "deform_conv x=f16[1,6,7,5]nchw offset=f32[1,16,3,2]nchw w=f16[4,3,2,2]nchw groups=2 stride=2",
        "deform_conv x=f64[1,2,4,4]nchw offset=f64[1,8,3,3]nchw w=f64[1,2,2,2]nchw",
        "deform_conv x=f32[0,2,4,4]nchw offset=f32[0,8,3,3]nchw w=f32[1,2,2,2]nchw",
    ),
    "deform_conv_backward": (
        "deform_conv_backward dy=f32[2,3,5,6]nchw x=f32[2,4,5,6]nchw offset=f32[2,18,5,6]nchw w=f32[3,4,3,3]nchw mask=f32[2,9,5,6]nchw "
        "padding=1 bias_gradient=True",
        "deform_conv_backward dy=bf16[1,8,6,6]nhwc x=bf16[1,16,6,6]nhwc offset=bf16[1,36,6,6]nchw w=bf16[8,16,3,3]nhwc "
        "mask=bf16[1,18,6,6]nchw padding=1",
        "deform_conv_backward dy=f64[1,1,3,3]nchw x=f64[1,2,4,4]nchw offset=f64[1,8,3,3]nchw w=f64[1,2,2,2]nchw",
        "deform_conv_backward dy=f32[0,1,3,3]nchw x=f32[0,2,4,4]nchw offset=f32[0,8,3,3]nchw w=f32[1,2,2,2]nchw bias_gradient=True",
    ),
}
