"""Local response normalisation: sizes odd and even, longer than the channels, every type and layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, F64
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...tensor import TensorDesc
from . import Sampler
from .pool import view


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    is_divisive = op.startswith("divisive")
    rank = int(rng.integers(3 if is_divisive else 2, 6))
    top = {"tiny": (0, 0, 0, 60, 9, 5), "small": (0, 0, 0, 500, 30, 12)}[size][rank]
    shape = (int(rng.integers(1, 4)), int(rng.integers(1, 30)), *(int(n) for n in rng.integers(1, top + 1, rank - 2)))
    if rng.random() < 0.5:
        shape = (shape[0], -(-shape[1] // 8) * 8, *shape[2:])
    if rng.random() < 0.04:
        shape = (0, *shape[1:])
    kind = (F32, F32, F16, BF16, F64)[int(rng.integers(5))]

    def drawn() -> TensorDesc:
        return view(rng, kind, shape) if rank > 2 else TensorDesc.packed(kind, shape)

    tensors = {name: drawn() for name in OPS[op].inputs if name != "means" or rng.random() < 0.7}
    if rng.random() < 0.5:
        tensors[OPS[op].outputs[0]] = drawn()
    attrs: dict[str, Any] = {"size": int(rng.integers(1, 12)), "alpha": float(rng.uniform(0.0, 2.0)), "beta": float(rng.uniform(0.2, 1.5)),
                             "k": float(rng.uniform(0.5, 2.0))}
    if rng.random() < 0.2:
        attrs = {}
    if is_divisive:
        attrs["size"] = int(rng.integers(1, {3: 9, 4: 6, 5: 4}[rank]))
    elif 3 <= rank <= 5 and rng.random() < 0.5:
        attrs |= {"within": True, "size": int(rng.integers(1, {3: 9, 4: 6, 5: 4}[rank]))}
    return OPS[op].make(tensors, attrs, Policy())


SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in ("lrn", "lrn_backward", "divisive_norm", "divisive_norm_backward")}
CASES: dict[str, tuple[str, ...]] = {
    "lrn": ("lrn x=f32[2,7,5,5]nchw", "lrn x=bf16[2,16,5,5]nhwc alpha=1.0 k=2.0", "lrn x=f16[1,3,9] size=33 alpha=0.5",
            "lrn x=f32[2,3,5,7]nchw size=3 alpha=2.0 within=True", "lrn x=bf16[1,8,4,3,3]nhwc size=2 alpha=2.0 within=True",
            "lrn x=f64[2,5,3,3]nchw size=4 alpha=1.0 beta=0.5"),
    "lrn_backward": ("lrn_backward dy=f32[2,3,5,7]nchw x=f32[2,3,5,7]nhwc size=4 alpha=2.0 within=True",
                     "lrn_backward dy=f32[2,7,5,5]nchw x=f32[2,7,5,5]nchw alpha=1.0",
                     "lrn_backward dy=bf16[2,16,5,5]nhwc x=bf16[2,16,5,5]nhwc size=3 alpha=1.0",
                     "lrn_backward dy=f32[1,40,3] x=f32[1,40,3] size=20 alpha=1.0",
                     "lrn_backward dy=f64[2,5,9] x=f64[2,5,9] size=6 alpha=1.0"),
    "divisive_norm": ("divisive_norm x=f32[2,3,9,7]nchw means=f32[2,3,9,7]nhwc", "divisive_norm x=bf16[2,8,5,6]nhwc size=3 alpha=2.0 k=0.5",
                      "divisive_norm x=f64[1,2,3,4,5]nchw means=f64[1,2,3,4,5]nchw size=2 beta=0.75", "divisive_norm x=f32[0,3,4]nchw"),
    "divisive_norm_backward": ("divisive_norm_backward dy=f32[2,3,9,7]nchw x=f32[2,3,9,7]nhwc means=f32[2,3,9,7]nchw",
                               "divisive_norm_backward dy=f16[2,8,5,6]nhwc x=f16[2,8,5,6]nhwc size=4",
                               "divisive_norm_backward dy=f64[2,3,11]nchw x=f64[2,3,11]nchw means=f64[2,3,11]nchw size=3 beta=1.0"),
}
