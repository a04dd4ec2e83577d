"""Histories of one tensor and of many, with numbers that say nothing; scales quantised once more."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dtypes import E4M3, F32
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...tensor import TensorDesc
from . import Fill, Sampler
from .tensors import random_desc


def _delayed(rng: np.random.Generator, size: str) -> Problem:
    steps = int(rng.choice([1, 2, 16, 33] if size == "tiny" else [16, 100, 1024]))
    each = [] if rng.random() < 0.3 else [int(rng.integers(1, 6 if size == "tiny" else 200))]
    tensors = {"history": random_desc(rng, F32, [steps, *each]), "amax": random_desc(rng, F32, each), "scale": random_desc(rng, F32, each)}
    attrs: dict[str, Any] = {"kind": str(rng.choice(["e4m3", "e5m2", "s8"])), "margin": int(rng.integers(-2, 3)),
                             "reduction": str(rng.choice(["max", "latest"]))}
    if rng.random() < 0.5:
        tensors["new_history"] = random_desc(rng, F32, [steps, *each], is_output=True)
    return OPS["delayed_scale"].make(tensors, attrs, Policy())


def _shape(rng: np.random.Generator, size: str) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.integers(1, 12 if size == "tiny" else 60, int(rng.integers(1, 4))))


def _double(rng: np.random.Generator, size: str) -> Problem:
    x = TensorDesc.packed(F32, _shape(rng, size))
    return OPS["double_quantize"].make({"x": x}, {"group": int(rng.choice([16, 37, 256]))}, Policy())


def _back(rng: np.random.Generator, size: str) -> Problem:
    x, group = TensorDesc.packed(E4M3, _shape(rng, size)), int(rng.choice([16, 37, 256]))
    tensors = {"x": x, "scale": random_desc(rng, F32, [-(-x.numel // group)]), "offset": random_desc(rng, F32, [])}
    return OPS["double_dequantize"].make(tensors, {"group": group}, Policy())


def _sizes(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    shape = problem.desc("history").shape
    sizes = np.abs(rng.standard_normal(shape))
    return sizes if rng.random() < 0.7 else np.where(rng.random(shape) < 0.1, rng.choice([0.0, np.inf, np.nan]), sizes)


def _newest(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    shape = problem.desc("amax").shape
    return np.where(rng.random(shape) < 0.2, rng.choice([0.0, np.inf, np.nan]), np.abs(rng.standard_normal(shape)))


def _positive(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.uniform(0.5, 2.0, problem.desc("scale").shape)


def _absmax(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.uniform(0.1, 3.0, problem.desc("x").shape)


def _codes(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return np.round(rng.uniform(-16, 16, problem.desc("x").shape)) * 8


SAMPLES: dict[str, Sampler] = {"delayed_scale": _delayed, "double_quantize": _double, "double_dequantize": _back}
FILLS: dict[tuple[str, str], Fill] = {
    ("delayed_scale", "history"): _sizes, ("delayed_scale", "amax"): _newest, ("delayed_scale", "scale"): _positive,
    ("double_quantize", "x"): _absmax, ("double_dequantize", "x"): _codes, ("double_dequantize", "scale"): _positive}
CASES: dict[str, tuple[str, ...]] = {
    "delayed_scale": ("delayed_scale history=f32[16]nchw amax=f32[]nchw scale=f32[]nchw",
                      "delayed_scale history=f32[40,7]nchw amax=f32[7]nchw scale=f32[7]nchw kind=e5m2 margin=1 reduction=latest",
                      "delayed_scale history=f32[4,0]nchw amax=f32[0]nchw scale=f32[0]nchw"),
    "double_quantize": ("double_quantize x=f32[8,40]nchw", "double_quantize x=f32[1]nchw group=16"),
    "double_dequantize": ("double_dequantize x=e4m3[8,40]nchw scale=f32[2]nchw offset=f32[]nchw",
                          "double_dequantize x=e4m3[0]nchw scale=f32[0]nchw offset=f32[]nchw"),
}
