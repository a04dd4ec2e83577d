"""Small square matrices in any layout, for Sinkhorn's iterations."""

from __future__ import annotations

from functools import partial

import numpy as np

from ...dtypes import BF16, F16, F32, F64
from ...ops import OPS
from ...ops.base import Policy, Problem
from . import Fill, Sampler
from .tensors import random_desc


def _draw(name: str, rng: np.random.Generator, size: str) -> Problem:
    kind = (F32, F32, F16, BF16, F64)[int(rng.integers(5))]
    n = int(rng.choice([1, 2, 3, 4, 4, 5] if kind is F64 else [1, 2, 3, 4, 4, 5, 7, 8]))
    batch = [int(v) for v in rng.integers(1, 6 if size == "tiny" else 20, int(rng.integers(0, 4)))]
    if batch and rng.random() < 0.05:
        batch[0] = 0
    tensors = {o: random_desc(rng, kind, (*batch, n, n)) for o in (("dy", "x") if name.endswith("_backward") else ("x",))}
    if rng.random() < 0.5:
        tensors["dx" if name.endswith("_backward") else "y"] = random_desc(rng, kind, (*batch, n, n), is_output=True)
    return OPS[name].make(tensors, {"iterations": int(rng.choice([0, 1, 3, 20])), "eps": float(rng.choice([1e-6, 1e-3, 0.0]))}, Policy())


def _x(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.standard_normal(problem.desc("x").shape) * float(rng.choice([0.3, 2.0]))


SAMPLES: dict[str, Sampler] = {n: partial(_draw, n) for n in ("sinkhorn", "sinkhorn_backward")}
FILLS: dict[tuple[str, str], Fill] = {(n, "x"): _x for n in SAMPLES}
CASES: dict[str, tuple[str, ...]] = {
    "sinkhorn": ("sinkhorn x=f32[130,4,4]nchw", "sinkhorn x=bf16[3,5,4,4]nchw iterations=3", "sinkhorn x=f64[7,3,3]nchw eps=0.0",
                 "sinkhorn x=f16[2,8,8]nchw", "sinkhorn x=f32[4,4](1,4)", "sinkhorn x=f32[0,4,4]nchw", "sinkhorn x=f32[2,1,1]nchw",
                 "sinkhorn x=f32[9,4,4]nchw@8", "sinkhorn x=f16[9,4,4]nchw@4"),
    "sinkhorn_backward": ("sinkhorn_backward dy=f32[130,4,4]nchw x=f32[130,4,4]nchw",
                          "sinkhorn_backward dy=bf16[9,4,4]nchw x=bf16[9,4,4]nchw iterations=5",
                          "sinkhorn_backward dy=f64[7,5,5]nchw x=f64[7,5,5]nchw eps=0.0",
                          "sinkhorn_backward dy=f32[3,8,8]nchw x=f32[3,8,8]nchw iterations=0"),
}
