"""Numbers of four bits: odd and even rows of every type in any layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import F64, U8
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.nibbles import KINDS, WIDE
from . import Fill, Sampler
from .tensors import random_desc


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    rank = int(rng.integers(1, 5))
    shape = [int(n) for n in rng.integers(1, 5 if size == "tiny" else 20, rank)]
    shape[-1] = int(rng.choice([1, 2, 7, 8, 16, 33, 64, 100])) if size == "tiny" else int(rng.choice([5, 77, 128, 1001, 4096]))
    if rank > 1 and rng.random() < 0.04:
        shape[0] = 0
    wide, bytes_shape = WIDE[int(rng.integers(len(WIDE)))], [*shape[:-1], -(-shape[-1] // 2)]
    attrs: dict[str, Any] = {"kind": KINDS[int(rng.integers(3))]}
    given, result = (wide, U8) if op == "pack4" else (U8, wide)
    tensors = {"x": random_desc(rng, given, shape if op == "pack4" else bytes_shape)}
    if op == "pack4" and attrs["kind"] != "e2m1" and rng.random() < 0.2:
        attrs["saturate"] = False
    if op == "unpack4":
        attrs |= {"size": shape[-1], "dtype": wide.name}
    if rng.random() < 0.5:
        tensors["y"] = random_desc(rng, result, bytes_shape if op == "pack4" else shape, is_output=True)
    return OPS[op].make(tensors, attrs, Policy())


def _spread(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Numbers within and beyond the range, some halfway between two codes; of floats also what is no number."""
    desc = problem.desc("x")
    x = np.round(rng.uniform(-10, 18, desc.shape) * 4) / 4
    if not desc.dtype.is_float:
        return np.maximum(np.round(x), 0 if desc.dtype.kind == "uint" else -100)
    x = np.where(rng.random(desc.shape) < 0.5, x + rng.uniform(-0.3, 0.3, desc.shape), x)
    special = rng.choice([np.nan, np.inf, -np.inf, -0.0, 1e30 if desc.dtype is F64 else 3e4, -1e-7], desc.shape)
    return np.where(rng.random(desc.shape) < 0.1, special, x)


def _bytes(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.integers(0, 256, problem.desc("x").shape)


SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in ("pack4", "unpack4")}
FILLS: dict[tuple[str, str], Fill] = {("pack4", "x"): _spread, ("unpack4", "x"): _bytes}
CASES: dict[str, tuple[str, ...]] = {
    "pack4": ("pack4 x=f32[3,33]nchw kind=s4", "pack4 x=bf16[4,64]nchw kind=e2m1", "pack4 x=s32[5,16]nchw kind=u4",
              "pack4 x=f16[2,8,4](40,1,9) kind=s4", "pack4 x=f32[0,4]nchw", "pack4 x=f64[7]nchw kind=e2m1", "pack4 x=f32[3,0]nchw",
              "pack4 x=bf16[3,16]nchw kind=u4 saturate=False"),
    "unpack4": ("unpack4 x=u8[3,17]nchw size=33", "unpack4 x=u8[4,32]nchw kind=e2m1 dtype=bf16", "unpack4 x=u8[5,8]nchw kind=u4 dtype=s32",
                "unpack4 x=u8[2,4](9,2) kind=s4 dtype=f16", "unpack4 x=u8[0,4]nchw", "unpack4 x=u8[4]nchw size=7 dtype=s8"),
}
