"""Resize problems: every mode, rule and attribute; plain, channels-last, strided and misaligned tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, F64
from ...errors import InvalidArgument
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.resize import COORDINATES, ROUNDINGS
from . import Sampler
from .pool import view


def _attrs(rng: np.random.Generator, rank: int, top: int) -> dict[str, Any]:
    mode = str(rng.choice(["nearest", "nearest_exact", "linear", "cubic", "area"], p=[0.15, 0.1, 0.3, 0.3, 0.15]))
    attrs: dict[str, Any] = {"mode": mode}
    if mode == "area" or rng.random() < 0.7:
        attrs["size"] = tuple(int(v) for v in rng.integers(1, top + 1, rank))
    else:
        attrs["scales"] = tuple(float(v) for v in rng.choice([0.3, 0.5, 0.6, 1.0, 1.5, 2.0, 2.3], rank))
    if mode in ("linear", "cubic") and rng.random() < 0.3:
        attrs["antialias"] = True
    elif mode in ("nearest", "linear", "cubic") and rng.random() < 0.6:
        attrs["coordinates"] = str(rng.choice(COORDINATES))
    if mode == "nearest":
        attrs["rounding"] = str(rng.choice(ROUNDINGS))
    if mode == "cubic" and rng.random() < 0.5:
        attrs["cubic_coefficient"] = -0.5
    if mode in ("linear", "cubic") and rng.random() < 0.3:
        attrs["exclude_outside"] = bool(rng.random() < 0.5)
    return attrs


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    while True:
        rank = int(rng.integers(1, 4))
        top = {"tiny": (0, 14, 7, 4), "small": (0, 40, 24, 12)}[size][rank]
        shape = (int(rng.integers(1, 4)), int(rng.choice([1, 3, 4, 8, 16, 5])), *(int(v) for v in rng.integers(1, top + 1, rank)))
        if rng.random() < 0.04:
            shape = (0, *shape[1:])
        dtype = (F32, F32, F16, BF16, F64)[int(rng.integers(5))]
        attrs = _attrs(rng, rank, top)
        try:
            forward = OPS["resize"].make({"x": view(rng, dtype, shape)}, attrs, Policy())
            y = view(rng, dtype, forward.desc("y").shape)
            if op == "resize":
                return OPS[op].make({"x": forward.desc("x")} | ({"y": y} if rng.random() < 0.5 else {}), attrs, Policy())
            tensors = {"dy": y} | ({"dx": forward.desc("x")} if rng.random() < 0.5 else {})
            return OPS[op].make(tensors, attrs | {"x_shape": shape}, Policy())
        except InvalidArgument:  # e.g. a scale that leaves no output: draw again
            continue


SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in ("resize", "resize_backward")}

CASES: dict[str, tuple[str, ...]] = {
    "resize": (
        "resize x=f32[1,1,5]nchw size=3",
        "resize x=f32[1,1,5]nchw size=3 mode=nearest_exact",
        "resize x=bf16[2,16,5,7]nhwc size=(10,14)",
        "resize x=bf16[2,16,5,7]nhwc size=(10,14) mode=linear",
        "resize x=f16[2,16,5,7]nhwc size=(9,13) mode=cubic",
        "resize x=f32[1,3,6,5]nchw size=(11,8) mode=linear align_corners=True",
        "resize x=f16[1,3,6,5]nchw scales=(1.7,0.6) mode=cubic align_corners=True",
        "resize x=f64[1,2,3,4,5]nchw size=(5,4,6) mode=linear",
        "resize x=f32[1,2,13,11]nchw size=(4,5) mode=cubic antialias=True cubic_coefficient=-0.5",
        "resize x=f16[1,8,13,11]nhwc size=(4,5) mode=linear antialias=True",
        "resize x=bf16[1,3,7,8]nchw size=(3,3) mode=area",
        "resize x=f32[1,1,4,4]nchw scales=(0.8,0.8) mode=cubic exclude_outside=True",
        "resize x=f32[0,3,4,4]nchw size=8",
    ),
    "resize_backward": (
        "resize_backward dy=f32[1,1,3]nchw x_shape=(1,1,5)",
        "resize_backward dy=bf16[2,16,10,14]nhwc mode=linear x_shape=(2,16,5,7)",
        "resize_backward dy=f16[2,16,9,13]nhwc mode=cubic x_shape=(2,16,5,7)",
        "resize_backward dy=f64[1,2,4,5]nchw mode=cubic antialias=True x_shape=(1,2,13,11)",
        "resize_backward dy=f32[1,2,5,4,6]nchw mode=linear align_corners=True x_shape=(1,2,3,4,5)",
        "resize_backward dy=bf16[1,3,3,3]nchw mode=area x_shape=(1,3,7,8)",
    ),
}
