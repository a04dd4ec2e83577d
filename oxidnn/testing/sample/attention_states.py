"""States of attention to be merged: layouts, types, states without weight."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, F64
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...tensor import TensorDesc, packed_strides
from . import Fill, Sampler

_OP = "merge_attention_states"


def _draw(rng: np.random.Generator, size: str) -> Problem:
    most = 6 if size == "tiny" else 40
    kind = (F16, BF16, F32, F64)[int(rng.integers(4))]
    shape = tuple(int(rng.integers(1, most)) for _ in range(3)) + (int(rng.choice([8, 16, 64, 5, 6])),)

    def rows() -> TensorDesc:
        order = (0, 2, 1, 3) if rng.random() < 0.4 else (0, 1, 2, 3)
        roomy = (*shape[:3], shape[3] + (8 if rng.random() < 0.2 else 0))
        return TensorDesc(kind, shape, packed_strides(roomy, order))

    exact = F64 if kind is F64 else F32
    tensors = {"out_a": rows(), "out_b": rows()}
    for name in ("lse_a", "lse_b"):
        tensors[name] = TensorDesc(exact, shape[:3], packed_strides(shape[:3], (0, 2, 1) if rng.random() < 0.3 else None))
    if rng.random() < 0.3:
        tensors["out"] = tensors["out_a"]
    if rng.random() < 0.2:
        tensors = {n: TensorDesc(d.dtype, d.shape[1:], d.strides[1:]) for n, d in tensors.items()}
    return OPS[_OP].make(tensors, {}, Policy())


def _lse(rng: np.random.Generator, problem: Problem) -> Any:
    shape = problem.desc("lse_a").shape
    return np.where(rng.random(shape) < 0.2, -np.inf, rng.choice([0.1, 3.0, 100.0]) * rng.standard_normal(shape))


SAMPLES: dict[str, Sampler] = {_OP: _draw}
FILLS: dict[tuple[str, str], Fill] = {(_OP, "lse_a"): _lse, (_OP, "lse_b"): _lse}
CASES: dict[str, tuple[str, ...]] = {
    _OP: (f"{_OP} out_a=bf16[2,3,5,64]nchw lse_a=f32[2,3,5] out_b=bf16[2,3,5,64](960,64,192,1) lse_b=f32[2,3,5]",
          f"{_OP} out_a=f64[3,4,7] lse_a=f64[3,4] out_b=f64[3,4,7] lse_b=f64[3,4]",
          f"{_OP} out_a=f16[0,3,5,8]nchw lse_a=f32[0,3,5] out_b=f16[0,3,5,8]nchw lse_b=f32[0,3,5]"),
}
