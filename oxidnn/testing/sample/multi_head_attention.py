"""Multi-head attention: sources of different widths, fewer heads of keys, biases, masks, lengths, views, what backward takes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, BOOL, F16, F32, F64, S32
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.multi_head_attention import MultiHeadAttentionProblem
from ...tensor import TensorDesc, packed_strides
from . import Fill, Sampler
from .pointwise import view


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    is_backward, is_tiny = op.endswith("_backward"), size == "tiny"
    kind = (F16, BF16, F32, F64)[int(rng.integers(4))]
    most = 9 if is_tiny else 130
    batch, groups, group = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.choice([1, 1, 2]))
    length, keys = int(rng.integers(1, most)), int(rng.integers(1, most))
    unit = 8 if rng.random() < 0.6 else 1
    widths = [unit * int(rng.integers(1, (24 if is_tiny else 200) // unit)) for _ in range(4)]
    dim, dim_v = ((int(rng.integers(1, 10)), int(rng.integers(1, 10))) if rng.random() < 0.3 else (8, 8) if is_tiny else (64, 32))
    count = groups * group
    rows = (count * dim, groups * dim, groups * dim_v, widths[3])

    def rows_of(shape: tuple[int, ...], is_output: bool = False) -> TensorDesc:
        """As it is, lengths first in memory, or (inputs) any view."""
        draw = rng.random()
        if draw < 0.2 and not is_output:
            return view(rng, kind, shape)
        return TensorDesc.packed(kind, shape) if draw < 0.7 else TensorDesc(kind, shape, packed_strides(shape, (1, 0, 2)), 16)

    tensors = {"query": rows_of((batch, length, widths[0])), "key": rows_of((batch, keys, widths[1])),
               "value": rows_of((batch, keys, widths[2]))}
    for name, height, width in zip(("w_q", "w_k", "w_v", "w_out"), rows, (*widths[:3], count * dim_v), strict=True):
        tensors[name] = view(rng, kind, (height, width)) if rng.random() < 0.3 else TensorDesc.packed(kind, (height, width))
    attrs: dict[str, Any] = {"num_heads": count}
    if is_backward:
        shapes = {"q": (batch, length, rows[0]), "k": (batch, keys, rows[1]), "v": (batch, keys, rows[2]),
                  "context": (batch, length, count * dim_v)}
        tensors |= {n: rows_of(s) for n, s in shapes.items()} | {"d_out": rows_of((batch, length, rows[3]))}
        tensors["lse"] = TensorDesc.packed(F64 if kind is F64 else F32, (batch, count, length))
        attrs["bias_gradients"] = bool(rng.random() < 0.5)
    else:
        if rng.random() < 0.5:
            wide = F64 if kind is F64 else F32
            tensors |= {f"bias_{n}": TensorDesc.packed(kind if rng.random() < 0.7 else wide, (r,))
                        for n, r in zip(("q", "k", "v", "out"), rows, strict=True) if rng.random() < 0.9}
        if rng.random() < 0.3:
            tensors["residual"] = rows_of((batch, length, rows[3]))
        attrs["return_saved"] = bool(rng.random() < 0.5)
    if rng.random() < 0.3:
        attrs["causal"] = str(rng.choice(["top_left", "bottom_right"]))
    if rng.random() < 0.2:
        attrs["window"] = (int(rng.integers(0, 6)), None)
    if rng.random() < 0.2:
        attrs["scale"] = 0.25
    if rng.random() < 0.2:
        attrs["dropout"] = 0.3
    if rng.random() < 0.3:
        full = (batch, count, length, keys)
        shape = tuple(1 if rng.random() < 0.4 else n for n in full)[int(rng.integers(0, 3)):]
        tensors["mask"] = TensorDesc.packed(BOOL if rng.random() < 0.6 else kind, shape)
    if rng.random() < 0.2:
        tensors |= {n: TensorDesc.packed(S32, (batch,)) for n in ("lengths_q", "lengths_kv") if rng.random() < 0.7}
    problem = OPS[op].make(tensors, attrs, Policy())
    if rng.random() < 0.3:
        outs = {o.name: rows_of(o.desc.shape, True) for o in problem.outputs if o.desc.rank == 3 and o.name != "lse"}
        problem = OPS[op].make(tensors | outs, attrs, Policy())
    return problem


def _over_width(name: str, rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Products of which are about 1."""
    shape = problem.desc(name).shape
    return rng.standard_normal(shape) / max(1, shape[-1]) ** 0.5


def _lse(rng: np.random.Generator, problem: Problem) -> Any:
    """Near that of scores about 0; some rows saw nothing."""
    assert isinstance(problem, MultiHeadAttentionProblem)
    values = np.log(max(1, problem.inner.len_kv)) + 0.3 * rng.standard_normal(problem.desc("lse").shape)
    return np.where(rng.random(values.shape) < 0.05, -np.inf, values)


def _lengths(which: str, rng: np.random.Generator, problem: Problem) -> Any:
    assert isinstance(problem, MultiHeadAttentionProblem)
    return rng.integers(0, (problem.inner.len_q if which == "q" else problem.inner.len_kv) + 1, problem.inner.batch)


def _mask(rng: np.random.Generator, problem: Problem) -> Any:
    desc = problem.desc("mask")
    seen = rng.random(desc.shape) < 0.7
    return seen if desc.dtype is BOOL else np.where(seen, rng.standard_normal(desc.shape), -np.inf)


_OPS = ("multi_head_attention", "multi_head_attention_backward")
SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in _OPS}
FILLS: dict[tuple[str, str], Fill] = {(op, name): partial(_over_width, name) for op in _OPS for name in ("w_q", "w_k", "w_v", "w_out")}
FILLS |= {(op, "mask"): _mask for op in _OPS} | {(_OPS[1], "lse"): _lse}
FILLS |= {(op, f"lengths_{which}"): partial(_lengths, which) for op in _OPS for which in ("q", "kv")}
_LINES = (
    "query=bf16[2,5,24]nchw key=bf16[2,7,16]nchw value=bf16[2,7,24]nchw w_q=bf16[32,24]nchw w_k=bf16[16,16]nchw w_v=bf16[16,24]nchw "
    "w_out=bf16[24,32]nchw{} num_heads=4",
    "query=f32[2,3,5](5,10,1) key=f32[2,4,6](6,12,1) value=f32[2,4,6](6,12,1) w_q=f32[9,5]nchw w_k=f32[9,6]nchw w_v=f32[6,6]nchw "
    "w_out=f32[7,6]nchw{} mask=bool[2,1,1,4]nchw num_heads=3 causal=bottom_right",
)
_SAVED = (" d_out=bf16[2,5,24]nchw q=bf16[2,5,32]nchw k=bf16[2,7,16]nchw v=bf16[2,7,16]nchw context=bf16[2,5,32]nchw lse=f32[2,4,5]nchw",
          " d_out=f32[2,3,7](7,14,1) q=f32[2,3,9]nchw k=f32[2,4,9]nchw v=f32[2,4,6]nchw context=f32[2,3,6]nchw lse=f32[2,3,3]nchw")
_EMPTY = ("query=f16[2,{},8]nchw key=f16[2,{},8]nchw value=f16[2,{},8]nchw w_q=f16[8,8]nchw w_k=f16[8,8]nchw w_v=f16[8,8]nchw "
          "w_out=f16[8,8]nchw{} num_heads=1")
CASES: dict[str, tuple[str, ...]] = {
    _OPS[0]: (*(f"{_OPS[0]} {line.format('')}" for line in _LINES),
              f"{_OPS[0]} {_LINES[0].format(' bias_q=bf16[32]nchw bias_out=f32[24]nchw residual=bf16[2,5,24]nchw')} return_saved=True",
              *(f"{_OPS[0]} {_EMPTY.format(n, m, m, '')}" for n, m in ((0, 3), (3, 0)))),
    _OPS[1]: (*(f"{_OPS[1]} {line.format(saved)} bias_gradients=True" for line, saved in zip(_LINES, _SAVED, strict=True)),
              *(f"{_OPS[1]} " + _EMPTY.format(n, m, m, f" d_out=f16[2,{n},8]nchw q=f16[2,{n},8]nchw k=f16[2,{m},8]nchw v=f16[2,{m},8]nchw "
                                                       f"context=f16[2,{n},8]nchw lse=f32[2,1,{n}]nchw") for n, m in ((0, 3), (3, 0)))),
}
