"""Random and fixed GEMMs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, F64
from ...ops import OPS, Policy, Problem
from ...tensor import TensorDesc
from .conv import draw_epilogue
from .tensors import random_desc


def sample(rng: np.random.Generator, size: str) -> Problem:
    top = 18 if size == "tiny" else 40
    m, n, k = (int(rng.integers(1, top + 1)) for _ in range(3))
    is_dense = rng.random() < 0.25  # what tensor cores and bulk copies want: 16-bit, packed, extents in eights
    if is_dense:
        m, n, k = (8 * int(rng.integers(1, 9)) for _ in range(3))
    elif rng.random() < 0.05:
        m, n, k = ((0, n, k), (m, 0, k), (m, n, 0))[int(rng.integers(3))]
    batch = [int(rng.integers(1, 4)) for _ in range(int(rng.choice((0, 1, 2), p=(0.6, 0.3, 0.1))))]
    attrs: dict[str, Any] = {"transpose_a": bool(rng.random() < 0.4), "transpose_b": bool(rng.random() < 0.4)}
    kind = (F16, BF16)[int(rng.integers(2))] if is_dense else (F32, F64, F16, BF16)[int(rng.integers(4))]
    out_kind = (F32, F64, F16, BF16)[int(rng.integers(4))] if rng.random() < 0.2 else kind

    def own_batch() -> list[int]:
        """The batch, or less of it: some dimensions 1, leading ones left out."""
        own = [1 if rng.random() < 0.3 else e for e in batch]
        return own[int(rng.integers(len(own) + 1)):] if rng.random() < 0.3 else own

    def draw(rows: int, columns: int) -> TensorDesc:
        shape = (*own_batch(), rows, columns)
        return TensorDesc.packed(kind, shape) if is_dense else random_desc(rng, kind, shape)

    tensors = {"a": draw(*((k, m) if attrs["transpose_a"] else (m, k))), "b": draw(*((n, k) if attrs["transpose_b"] else (k, n)))}
    shape = (*np.broadcast_shapes(tensors["a"].shape[:-2], tensors["b"].shape[:-2]), m, n)
    tensors["d"] = random_desc(rng, out_kind, shape, is_output=True)
    if rng.random() < 0.3:
        attrs["alpha"] = float(rng.choice((0.5, -2.0, 0.0)))
    if rng.random() < 0.3:
        attrs["beta"] = float(rng.choice((1.0, 0.25)))
        tensors["c"] = tensors["d"] if rng.random() < 0.3 else random_desc(rng, kind, shape if rng.random() < 0.7 else (m, 1))
    draw_epilogue(rng, tensors, attrs, shape, -1, tensors["d"])
    return OPS["gemm"].make(tensors, attrs, Policy())


SAMPLES = {"gemm": sample}
CASES = {"gemm": (
    "gemm a=f32[5,7] b=f32[7,3]",
    "gemm a=bf16[2,17,33] b=bf16[33,9] bias=f32[9] epilogue=bias_relu",
    "gemm a=f16[3,1,4,5] b=f16[2,5,6] d=f32[3,2,4,6]",
    "gemm a=f64[6,5] b=f64[4,6] transpose_a=True transpose_b=True alpha=0.5 beta=2.0 c=f64[5,4]",
    "gemm a=f32[4,0] b=f32[0,3] bias=f32[3]",
    "gemm a=f32[0,4] b=f32[4,3]",
    "gemm a=f16[9,8]@2 b=f16[8,8](9,1)@2 d=f16[9,8](11,1)@2",
    "gemm a=f32[65537,1] b=f32[1,2]",
    "gemm a=f32[65537,1,2] b=f32[65537,2,1]",
)}
