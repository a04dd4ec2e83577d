"""Shuffles of every type, layout, factor and order."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import TABLE
from ...ops import OPS
from ...ops.base import Policy, Problem
from . import Sampler
from .pointwise import view


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    top = 6 if size == "tiny" else 40
    n, c, h, w = (int(v) for v in rng.integers(1, top + 1, 4))
    n = 0 if rng.random() < 0.04 else min(n, 3)
    factor = int(rng.integers(1, 4))
    attrs: dict[str, Any] = {"groups": factor}
    shape: tuple[int, ...] = (n, c * factor, h, w)[:int(rng.integers(2, 5))]
    if op != "channel_shuffle":
        attrs = {"factor": factor} | ({"order": "dcr"} if rng.random() < 0.4 else {})
        shape = (n, c * factor * factor, h, w) if op == "pixel_shuffle" else (n, c, h * factor, w * factor)
    problem = OPS[op].make({"x": view(rng, TABLE[int(rng.integers(len(TABLE)))], shape)}, attrs, Policy())
    if rng.random() < 0.5:
        y = problem.desc("y")
        problem = OPS[op].make({"x": problem.desc("x"), "y": view(rng, y.dtype, y.shape, True)}, attrs, Policy())
    return problem


SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")}
CASES: dict[str, tuple[str, ...]] = {
    "pixel_shuffle": ("pixel_shuffle x=bf16[2,36,5,7]nchw factor=3", "pixel_shuffle x=f32[1,64,6,4]nhwc factor=2 order=dcr"),
    "pixel_unshuffle": ("pixel_unshuffle x=f16[2,5,6,8]nchw factor=2", "pixel_unshuffle x=u8[1,8,9,12]nhwc factor=3 order=dcr"),
    "channel_shuffle": ("channel_shuffle x=bf16[2,48,5,7]nhwc groups=3", "channel_shuffle x=s64[3,10] groups=5"),
}
