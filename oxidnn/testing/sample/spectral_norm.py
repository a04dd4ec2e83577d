"""Weights of two to five dimensions in any layout, vectors with steps, for spectral normalisation."""

from __future__ import annotations

from functools import partial

import numpy as np

from ...dtypes import BF16, F16, F32, F64
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.epilogue import accumulator_of
from . import Fill, Sampler
from .tensors import random_desc


def _draw(name: str, rng: np.random.Generator, size: str) -> Problem:
    kind = (F32, F32, F16, BF16, F64)[int(rng.integers(5))]
    rank = int(rng.integers(2, 6))
    most = {2: 70, 3: 12, 4: 6, 5: 4}[rank] if size == "tiny" else {2: 400, 3: 40, 4: 16, 5: 8}[rank]
    shape = [int(v) for v in rng.integers(1, most + 1, rank)]
    dim, accumulator = int(rng.integers(rank)) if rng.random() < 0.5 else 0, accumulator_of(kind)
    columns = int(np.prod(shape)) // shape[dim]

    def draw(extents: list[int], dtype: object = kind, is_output: bool = False) -> object:
        return random_desc(rng, dtype, extents, is_output=is_output)  # type: ignore[arg-type]

    tensors = {"w": draw(shape), "u": draw([shape[dim]], accumulator), "v": draw([columns], accumulator)}
    if name.endswith("_backward"):
        tensors |= {"dy": draw(shape), "sigma": draw([], accumulator)}
        if rng.random() < 0.5:
            tensors["dw"] = draw(shape, is_output=True)
        return OPS[name].make(tensors, {"dim": dim}, Policy())  # type: ignore[arg-type]
    if rng.random() < 0.5:
        tensors["y"] = draw(shape, is_output=True)
    attrs: dict[str, float] = {"dim": dim - rank if rng.random() < 0.3 else dim, "iterations": int(rng.choice([0, 1, 1, 2]))}
    if rng.random() < 0.3:
        attrs["eps"] = 1e-6
    return OPS[name].make(tensors, attrs, Policy())  # type: ignore[arg-type]


def _positive(name: str, rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Numbers whose products do not cancel: a sigma of some size."""
    return rng.uniform(0.2, 1.0, problem.desc(name).shape)


SAMPLES: dict[str, Sampler] = {n: partial(_draw, n) for n in ("spectral_norm", "spectral_norm_backward")}
FILLS: dict[tuple[str, str], Fill] = {("spectral_norm", n): partial(_positive, n) for n in ("w", "u", "v")}
FILLS |= {("spectral_norm_backward", "sigma"): partial(_positive, "sigma")}
CASES: dict[str, tuple[str, ...]] = {
    "spectral_norm": ("spectral_norm w=f32[64,32,3,3] u=f32[64] v=f32[288]", "spectral_norm w=bf16[16,300] u=f32[16] v=f32[300]",
                      "spectral_norm w=f16[8,6,5] u=f32[5] v=f32[48] dim=2 iterations=3",
                      "spectral_norm w=f64[9,33] u=f64[9] v=f64[33]",
                      "spectral_norm w=f32[4,16,3,3]nhwc u=f32[4] v=f32[144] iterations=0", "spectral_norm w=f32[1,1] u=f32[1] v=f32[1]",
                      "spectral_norm w=f32[8,64] u=f32[8]@4 v=f32[64]@8"),
    "spectral_norm_backward": (
        "spectral_norm_backward dy=f32[64,32,3,3] w=f32[64,32,3,3] u=f32[64] v=f32[288] sigma=f32[]",
        "spectral_norm_backward dy=bf16[16,300] w=bf16[16,300] u=f32[300] v=f32[16] sigma=f32[] dim=1",
        "spectral_norm_backward dy=f64[9,3,7] w=f64[9,3,7] u=f64[9] v=f64[21] sigma=f64[]",
        "spectral_norm_backward dy=f32[8,64] w=f32[8,64] u=f32[8]@4 v=f32[64]@4 sigma=f32[]"),
}
