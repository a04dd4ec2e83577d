"""Attention: heads in groups, lengths that differ, every mask and score, sequences side by side, layouts, types."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, BOOL, E4M3, E5M2, F16, F32, F64, S32, U8, DType
from ...ops import OPS
from ...ops.attention import AttentionProblem
from ...ops.base import Policy, Problem
from ...tensor import TensorDesc, packed_strides
from . import Fill, Sampler

_SCORES = ("score + 0.125 * cos(i - j)", "where(i >= j, score, score * 0.5)", "score * (1 + 0.5 * sin(h)) - 0.01 * abs(p - j)",
           "score + slope * (j - p)", "where(eq(floor(i / 3), floor(j / 3)), score, -inf)")


def _heads_desc(rng: np.random.Generator, kind: DType, shape: tuple[int, ...], is_output: bool = False) -> TensorDesc:
    """(B, H, L, D): as it is, as (B, L, H, D) in memory, within a wider row, or (inputs) one head for all."""
    draw = rng.random()
    order = (0, 2, 1, 3) if draw < 0.6 else (0, 1, 2, 3)
    roomy = list(shape)
    if draw > 0.85:
        roomy[3] += int(rng.integers(1, 9))
    if 0.45 < draw < 0.6:
        roomy[1] += 2  # heads of a packed qkv
    strides = list(packed_strides(tuple(max(1, n) for n in roomy), order))
    if not is_output and draw > 0.95:
        strides[1] = 0
    align = int(rng.choice([a for a in (2, 4, 8) if a >= kind.num_bytes])) if rng.random() < 0.1 and kind is not F64 else 16
    return TensorDesc(kind, shape, tuple(strides), align)


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    is_tiny, is_backward = size == "tiny", op == "attention_backward"
    is_fp8 = not is_backward and rng.random() < 0.12
    kind = E4M3 if is_fp8 else (F16, BF16, BF16, F32, F64)[int(rng.integers(5))]
    most = 20 if is_tiny else 300
    batch = 0 if rng.random() < 0.02 else int(rng.integers(1, 3))
    groups, group = int(rng.integers(1, 3)), int(rng.choice([1, 1, 2, 3]))
    length, keys = (int(rng.integers(1, most)) for _ in range(2))
    keys = 0 if rng.random() < 0.03 else keys
    dim = int(rng.choice([8, 16, 24] if is_tiny else [32, 64, 64, 128, 40, 72, 80, 96, 112, 192, 256])) if rng.random() < 0.8 else int(
        rng.integers(1, 20 if is_tiny else 300))
    dim_v = dim if rng.random() < 0.8 else int(rng.integers(1, 20 if is_tiny else 260))
    rare = 1.0
    if is_tiny and rng.random() < 0.08:  # wide rows, a few of them, and seldom with more than that
        rare = 0.25
        dim = dim_v = 8 * int(rng.integers(17, 33))
        length, keys = min(length, 6), min(keys, 6)
    if is_fp8 and rng.random() < 0.7:  # as tensor copies have them
        dim, dim_v = -(-dim // 16) * 16, -(-dim_v // 16) * 16
    is_varlen = rng.random() < 0.2 * rare and batch > 0
    batch = 1 if is_varlen else batch
    sequences = int(rng.integers(1, 5)) if is_varlen else batch
    heads = groups * group
    shapes = {"q": (batch, heads, length, dim), "k": (batch, groups, keys, dim), "v": (batch, groups, keys, dim_v)}
    if is_backward:
        shapes |= {"d_out": (batch, heads, length, dim_v), "out": (batch, heads, length, dim_v)}
    tensors = {n: _heads_desc(rng, E5M2 if is_fp8 and rng.random() < 0.2 else kind, s) for n, s in shapes.items()}
    exact, plain = F64 if kind is F64 else F32, BF16 if is_fp8 else kind
    if is_backward:
        tensors["lse"] = TensorDesc.packed(exact, (batch, heads, length))
    attrs: dict[str, Any] = {}
    if rng.random() < 0.4:
        attrs["causal"] = str(rng.choice(["top_left", "bottom_right"]))
    if rng.random() < 0.25:
        attrs["window"] = tuple(None if rng.random() < 0.3 else int(rng.integers(0, 12)) for _ in range(2))
    if rng.random() < 0.2:
        attrs["scale"] = float(rng.choice([0.5, 0.25, 0.07])) * (1.0 if dim <= 24 else 0.25)  # f16 has to hold the gradients
    if rng.random() < 0.2 * rare:
        attrs["softcap"] = float(rng.choice([2.0, 10.0]))
    if rng.random() < 0.15 * rare:
        attrs["dropout"] = float(rng.choice([0.1, 0.5]))
    if rng.random() < 0.2 * rare:
        attrs["score"] = str(rng.choice(_SCORES))
        if "slope" in attrs["score"]:
            tensors["slope"] = TensorDesc.packed(F32, (heads, 1, 1))
    full = (sequences, heads, 1, 1) if is_varlen else (sequences, heads, length, keys)

    def some() -> tuple[int, ...]:
        shape = tuple(1 if rng.random() < 0.35 else n for n in full)
        return shape[int(rng.integers(0, 3)):]

    if rng.random() < 0.2 * rare:
        tensors["bias"] = TensorDesc.packed(plain if rng.random() < 0.6 else exact, some())
    if rng.random() < 0.2 * rare and not is_varlen:
        tensors["mask"] = TensorDesc.packed(BOOL if rng.random() < 0.7 else plain, some())
    if rng.random() < 0.12 * rare:
        tensors["alibi"] = TensorDesc.packed(F32, (heads,) if rng.random() < 0.6 else (sequences, heads))
    if rng.random() < 0.15 * rare:
        tensors["sinks"] = TensorDesc.packed(exact, (heads,))
    if is_varlen:
        tensors |= {n: TensorDesc.packed(S32, (sequences + 1,)) for n in ("cu_seqlens_q", "cu_seqlens_kv")}
    elif rng.random() < 0.2 * rare:
        tensors |= {n: TensorDesc.packed(S32, (batch,)) for n in ("lengths_q", "lengths_kv") if rng.random() < 0.7}
    if rng.random() < 0.1 * rare and not is_varlen:
        blocks = tuple(int(rng.choice([64, 64, 128, 192])) for _ in range(2))
        attrs["block_size"] = blocks
        leading = tuple(1 if rng.random() < 0.4 else n for n in full[:2])[int(rng.integers(0, 3)):]
        shape = (*leading, -(-length // blocks[0]), -(-keys // blocks[1]))
        tensors["block_mask"] = TensorDesc.packed(BOOL if rng.random() < 0.6 else U8, shape)
    if not is_backward and rng.random() < 0.6:
        attrs["return_lse"] = True
    if is_fp8:
        for name, count in (("scale_q", heads), ("scale_k", groups), ("scale_v", groups), ("scale_out", heads)):
            if rng.random() < (0.3 if name == "scale_out" else 0.7):
                shape = ((1,), (count,), (batch, count))[int(rng.integers(3))]
                tensors[name] = TensorDesc.packed(F32, shape)
        kinds = ("e4m3", "e5m2") if "scale_out" in tensors else ("bf16", "f16", "f32", "e4m3")
        attrs["out_dtype"] = str(rng.choice(kinds))
    differentiable = [n for n in ("alibi", "slope") if n in tensors]
    if is_backward and differentiable and rng.random() < 0.6:
        attrs["score_gradients"] = tuple(differentiable)
    problem = OPS[op].make(tensors, attrs, Policy())
    if rng.random() < 0.3:
        outs = {o.name: _heads_desc(rng, o.desc.dtype, o.desc.shape, True) for o in problem.outputs if o.name in ("out", "dq", "dk", "dv")}
        problem = OPS[op].make(tensors | outs, attrs, Policy())
    return problem


def _lse(rng: np.random.Generator, problem: Problem) -> Any:
    """Near that of scores about 0; some rows saw nothing."""
    assert isinstance(problem, AttentionProblem)
    values = np.log(max(1, problem.len_kv)) + 0.3 * rng.standard_normal(problem.desc("lse").shape)
    return np.where(rng.random(values.shape) < 0.05, -np.inf, values)


def _starts(which: str, rng: np.random.Generator, problem: Problem) -> Any:
    assert isinstance(problem, AttentionProblem)
    total = problem.len_q if which == "q" else problem.len_kv
    last = total if rng.random() < 0.7 else int(rng.integers(0, total + 1))
    inner = np.sort(rng.integers(0, last + 1, problem.batch - 1))
    return np.concatenate([[0], inner, [last]])


def _lengths(which: str, rng: np.random.Generator, problem: Problem) -> Any:
    assert isinstance(problem, AttentionProblem)
    return rng.integers(0, (problem.len_q if which == "q" else problem.len_kv) + 1, problem.batch)


def _mask(rng: np.random.Generator, problem: Problem) -> Any:
    desc = problem.desc("mask")
    seen = rng.random(desc.shape) < 0.7
    if desc.rank > 1:
        seen &= rng.random((*desc.shape[:-1], 1)) < 0.9
    return seen if desc.dtype is BOOL else np.where(seen, rng.standard_normal(desc.shape), -np.inf)


def _blocks(rng: np.random.Generator, problem: Problem) -> Any:
    return rng.random(problem.desc("block_mask").shape) < 0.7


def _scales(name: str, rng: np.random.Generator, problem: Problem) -> Any:
    return rng.uniform(0.5, 2.0, problem.desc(name).shape)


def _slopes(name: str, rng: np.random.Generator, problem: Problem) -> Any:
    """Such that weights of far keys do not overflow."""
    return 0.3 * rng.random(problem.desc(name).shape)


SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in ("attention", "attention_backward")}
FILLS: dict[tuple[str, str], Fill] = {("attention_backward", "lse"): _lse}
for _op in SAMPLES:
    FILLS[_op, "mask"] = _mask
    FILLS[_op, "block_mask"] = _blocks
    for _name in ("scale_q", "scale_k", "scale_v", "scale_out"):
        FILLS[_op, _name] = partial(_scales, _name)
    for _name in ("alibi", "slope"):
        FILLS[_op, _name] = partial(_slopes, _name)
    for _which in ("q", "kv"):
        FILLS[_op, f"cu_seqlens_{_which}"] = partial(_starts, _which)
        FILLS[_op, f"lengths_{_which}"] = partial(_lengths, _which)
_QKV = "q=bf16[1,4,17,16]nchw k=bf16[1,2,23,16]nchw v=bf16[1,2,23,16]nchw"
CASES: dict[str, tuple[str, ...]] = {
    "attention": (
        f"attention {_QKV} causal=bottom_right return_lse=True",
        f"attention {_QKV} causal=top_left window=(5,None) alibi=f32[4]",
        "attention q=f32[2,2,5,8]nchw k=f32[2,2,7,8]nchw v=f32[2,2,7,3]nchw softcap=4.0 return_lse=True",
        "attention q=f16[1,2,9,40]nchw k=f16[1,2,11,40]nchw v=f16[1,2,11,24]nchw bias=f16[2,9,11] mask=bool[1,1,9,11] return_lse=True",
        "attention q=f64[1,1,6,4]nchw k=f64[1,1,6,4]nchw v=f64[1,1,6,4]nchw window=(1,1) sinks=f64[1] return_lse=True",
        "attention q=bf16[1,2,7,32]nchw k=bf16[1,1,6,32]nchw v=bf16[1,1,6,32]nchw cu_seqlens_q=s32[4] cu_seqlens_kv=s32[4] return_lse=True",
        f"attention {_QKV} dropout=0.25", f"attention {_QKV} score='score - 0.1 * abs(p - j)' lengths_kv=s32[1] lengths_q=s32[1]",
        "attention q=bf16[1,2,5,16]nchw k=bf16[1,2,0,16]nchw v=bf16[1,2,0,16]nchw return_lse=True",
        "attention q=bf16[1,1,70,136]nchw k=bf16[1,1,66,136]nchw v=bf16[1,1,66,200]nchw causal=bottom_right",
        "attention q=e4m3[1,4,17,32]nchw k=e4m3[1,2,23,32]nchw v=e5m2[1,2,23,32]nchw scale_q=f32[1] scale_k=f32[2] scale_v=f32[1,2] "
        "causal=bottom_right return_lse=True",
        "attention q=e4m3[1,2,70,16]nchw k=e4m3[1,2,70,16]nchw v=e4m3[1,2,70,16]nchw out_dtype=e4m3 scale_out=f32[2] sinks=f32[2]",
        "attention q=bf16[1,2,70,16]nchw k=bf16[1,1,200,16]nchw v=bf16[1,1,200,16]nchw block_mask=bool[2,2,4] block_size=64 window=(90,9)",
        "attention q=f32[1,1,3,40]nchw k=f32[1,1,66,40]nchw v=f32[1,1,66,300]nchw return_lse=True",
    ),
    "attention_backward": tuple(
        f"attention_backward d_out=bf16[1,4,17,16]nchw {_QKV} out=bf16[1,4,17,16]nchw lse=f32[1,4,17] {more}"
        for more in ("", "causal=bottom_right", "window=(4,2) sinks=f32[4]", "bias=bf16[4,17,23] softcap=5.0", "dropout=0.25",
                     "lengths_kv=s32[1] lengths_q=s32[1] score='score * 0.5'")) + (
        "attention_backward d_out=f32[2,2,5,3]nchw q=f32[2,2,5,8]nchw k=f32[2,2,7,8]nchw v=f32[2,2,7,3]nchw out=f32[2,2,5,3]nchw "
        "lse=f32[2,2,5] bias=f32[1,1,7]",
        "attention_backward d_out=bf16[1,2,7,32]nchw q=bf16[1,2,7,32]nchw k=bf16[1,1,6,32]nchw v=bf16[1,1,6,32]nchw out=bf16[1,2,7,32]nchw "
        "lse=f32[1,2,7] cu_seqlens_q=s32[4] cu_seqlens_kv=s32[4] causal=bottom_right",
        "attention_backward d_out=bf16[1,1,5,200]nchw q=bf16[1,1,5,136]nchw k=bf16[1,1,66,136]nchw v=bf16[1,1,66,200]nchw "
        "out=bf16[1,1,5,200]nchw lse=f32[1,1,5]",
        "attention_backward d_out=f32[1,1,70,160]nchw q=f32[1,1,70,40]nchw k=f32[1,1,6,40]nchw v=f32[1,1,6,160]nchw "
        "out=f32[1,1,70,160]nchw lse=f32[1,1,70] bias=f32[6]",
        "attention_backward d_out=f16[1,2,70,16]nchw q=f16[1,2,70,16]nchw k=f16[1,1,150,16]nchw v=f16[1,1,150,16]nchw "
        "out=f16[1,2,70,16]nchw lse=f32[1,2,70] block_mask=u8[1,2,2] block_size=(64,128) causal=bottom_right",
        "attention_backward d_out=bf16[1,2,9,16]nchw q=bf16[1,2,9,16]nchw k=bf16[1,2,8,16]nchw v=bf16[1,2,8,16]nchw "
        "out=bf16[1,2,9,16]nchw lse=f32[1,2,9] alibi=f32[2] "
        "score='score * a + tanh(t) * i' a=f32[2,1,1] t=bf16[8] score_gradients=alibi,t,a",
    ),
}
