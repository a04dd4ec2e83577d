"""Rotary position embedding: both pairings, parts of rows, every scaling, far positions, tables of either width."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, F64, S32, S64
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...tensor import TensorDesc, packed_strides
from . import Fill, Sampler

LENGTH = ("original_max_position_embeddings", 64.0)


def scaling_of(rng: np.random.Generator, pairs: int) -> Any:
    """One of all types."""
    factors = tuple(float(v) for v in rng.choice([1.0, 1.5, 4.0], pairs))
    return (None, (("type", "linear"), ("factor", 4.0)),
            (("type", "llama3"), ("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0), LENGTH),
            (("type", "yarn"), ("factor", 4.0), LENGTH),
            (("type", "yarn"), ("factor", 2.0), LENGTH, ("beta_fast", 16.0), ("attention_factor", 1.25)),
            (("type", "longrope"), ("factors", factors), ("factor", 4.0), LENGTH))[int(rng.integers(6))]


def rotation_of(rng: np.random.Generator, kind: Any, dim: int, batch: int, length: int,
                needs_positions: bool = False) -> tuple[dict[str, TensorDesc], dict[str, Any]]:
    """Tensors and attributes of a rotation."""
    tensors: dict[str, TensorDesc] = {}
    attrs: dict[str, Any] = {}
    rotary = dim
    if dim % 2 or rng.random() < 0.3:
        rotary = attrs["rotary_dim"] = 2 * int(rng.integers(1, dim // 2 + 1))
    if rng.random() < 0.4:
        attrs["interleaved"] = True
    if needs_positions or rng.random() < 0.6:
        shape = (batch, length) if rng.random() < 0.6 or needs_positions else (length,)
        tensors["positions"] = TensorDesc.packed(S32 if rng.random() < 0.6 else S64, shape)
    if rng.random() < 0.4:
        lead = (batch, length) if "positions" not in tensors and rng.random() < 0.5 else (length + int(rng.integers(0, 9)),)
        table = TensorDesc.packed(kind if rng.random() < 0.5 else F32, (*lead, rotary // 2 if rng.random() < 0.6 else rotary))
        tensors |= {"cos": table, "sin": table}
    else:
        attrs["base"] = float(rng.choice([100.0, 10000.0, 500000.0]))
        attrs["scaling"] = scaling_of(rng, rotary // 2)
    return tensors, attrs


def _draw(rng: np.random.Generator, size: str) -> Problem:
    most = 5 if size == "tiny" else 60
    kind = (F16, BF16, BF16, F32, F64)[int(rng.integers(5))]
    batch, heads, length = (int(rng.integers(1, most)) for _ in range(3))
    dim = int(rng.choice([8, 16, 32, 64, 128])) if rng.random() < 0.8 else int(rng.integers(2, 40))
    shape = (batch, heads, length, dim)
    order = (0, 2, 1, 3) if rng.random() < 0.5 else (0, 1, 2, 3)
    roomy = (batch, heads + 2, length, dim + (8 if rng.random() < 0.3 else 0)) if rng.random() < 0.3 else shape
    x = TensorDesc(kind, shape, packed_strides(roomy, order))
    if rng.random() < 0.1:
        x = TensorDesc(kind, (batch, heads, length, dim), packed_strides(shape, (0, 1, 3, 2)))
    if rng.random() < 0.1 and batch == 1:
        x = TensorDesc(kind, shape[1:], x.strides[1:])
    tensors, attrs = rotation_of(rng, kind, dim, batch, length)
    if rng.random() < 0.3:
        attrs["inverse"] = True
    if rng.random() < 0.5:
        tensors["y"] = x
    return OPS["rope"].make(tensors | {"x": x}, attrs, Policy())


def positions(op: str, rng: np.random.Generator, problem: Problem) -> Any:
    """Near ones, or all that float32 angles would get wrong; of tables what they hold, and rows beyond."""
    shape = problem.desc("positions").shape
    if problem.has("cos"):
        return rng.integers(0, problem.desc("cos").shape[0] + (1 if rng.random() < 0.2 else 0), shape)
    return rng.integers(0, int(rng.choice([10, 5000, 1_000_000, 2_000_000_000])), shape)


def _table(name: str, rng: np.random.Generator, problem: Problem) -> Any:
    return rng.uniform(-1, 1, problem.desc(name).shape)


SAMPLES: dict[str, Sampler] = {"rope": _draw}
FILLS: dict[tuple[str, str], Fill] = {("rope", "positions"): partial(positions, "rope"), ("rope", "cos"): partial(_table, "cos"),
                                      ("rope", "sin"): partial(_table, "sin")}
CASES: dict[str, tuple[str, ...]] = {
    "rope": (
        "rope x=bf16[2,3,5,64]nchw", "rope x=f32[2,3,5,8]nchw interleaved=True inverse=True positions=s32[2,5]",
        "rope x=f16[3,4,24]nchw rotary_dim=16 cos=f32[9,8] sin=f32[9,8] positions=s64[4]",
        "rope x=bf16[1,2,3,16]nchw cos=bf16[1,3,16] sin=bf16[1,3,16] inverse=True",
        "rope x=f64[1,1,4,7]nchw rotary_dim=4 scaling=\"(('type','linear'),('factor',2.0))\"",
        "rope x=bf16[1,2,3,32]nchw base=500000.0 scaling=\"(('type','llama3'),('factor',8.0),('low_freq_factor',1.0),"
        "('high_freq_factor',4.0),('original_max_position_embeddings',8192.0))\" positions=s32[1,3]",
        "rope x=f32[0,2,3,16]nchw",
    ),
}
