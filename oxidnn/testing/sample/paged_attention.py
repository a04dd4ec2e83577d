"""Attention over paged caches: pages of any size and layout, lengths that differ, narrow types with scales, several query rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, E4M3, E5M2, F16, F32, S8, S32, DType
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.paged_attention import PagedAttentionProblem
from ...tensor import TensorDesc, packed_strides
from . import Fill, Sampler


def cache_desc(rng: np.random.Generator, kind: DType, shape: tuple[int, ...]) -> TensorDesc:
    """(pages, heads, keys, dim): "HND", "NHD", or one half of pages that hold both keys and values."""
    draw = rng.random()
    order = (0, 1, 2, 3) if draw < 0.4 else (0, 2, 1, 3)
    strides = list(packed_strides(shape, order))
    if draw > 0.8:
        strides[0] *= 2
    return TensorDesc(kind, shape, tuple(strides))


def _draw(rng: np.random.Generator, size: str) -> Problem:
    is_tiny = size == "tiny"
    kind = (F16, BF16)[int(rng.integers(2))]
    cached = (kind, kind, E4M3, E5M2, S8)[int(rng.integers(5))]
    batch, groups, group = int(rng.integers(1, 4)), int(rng.integers(1, 3)), int(rng.choice([1, 1, 2, 3, 4]))
    page = int(rng.choice([1, 3, 4, 8, 16, 16, 32, 64]))
    most = 60 if is_tiny else 3000
    pages = max(1, int(rng.integers(0, most)) // page)
    length = 1 if rng.random() < 0.5 else int(rng.integers(1, 8 if is_tiny else 100))
    dim = int(rng.choice([16, 32, 48] if is_tiny else [64, 128, 128, 96, 256])) if rng.random() < 0.8 else int(rng.integers(1, 40))
    dim_v = dim if rng.random() < 0.8 else int(rng.integers(1, 40))
    total = pages * batch + int(rng.integers(0, 3))
    heads = groups * group
    is_varlen = rng.random() < 0.2
    tensors = {
        "q": TensorDesc.packed(kind, (heads, length, dim) if is_varlen else (batch, heads, length, dim)),
        "k_cache": cache_desc(rng, cached, (total, groups, page, dim)), "v_cache": cache_desc(rng, cached, (total, groups, page, dim_v)),
        "page_table": TensorDesc.packed(S32, (batch, pages)), "lengths_kv": TensorDesc.packed(S32, (batch,)),
    }
    if rng.random() < 0.5 and not is_varlen:
        tensors["q"] = TensorDesc(kind, (batch, heads, length, dim), packed_strides((batch, heads, length, dim), (0, 2, 1, 3)))
    attrs: dict[str, Any] = {}
    if rng.random() < 0.5:
        attrs["causal"] = str(rng.choice(["top_left", "bottom_right"]))
    if rng.random() < 0.2:
        attrs["window"] = (int(rng.integers(0, 20)), None)
    if rng.random() < 0.2:
        attrs["scale"] = 0.25
    if rng.random() < 0.2:
        attrs["softcap"] = 5.0
    if rng.random() < 0.15:
        tensors["alibi"] = TensorDesc.packed(F32, (heads,) if rng.random() < 0.6 else (batch, heads))
    if rng.random() < 0.2:
        tensors["sinks"] = TensorDesc.packed(F32, (heads,))
    if is_varlen:
        tensors["cu_seqlens_q"] = TensorDesc.packed(S32, (batch + 1,))
    elif rng.random() < 0.2:
        tensors["lengths_q"] = TensorDesc.packed(S32, (batch,))
    for name in ("k_scale", "v_scale"):
        if cached is not kind and rng.random() < 0.8:
            full = (total, groups, page)
            tensors[name] = TensorDesc.packed(F32, ((), (1,), (groups, 1), full, (total, 1, page))[int(rng.integers(5))])
    if rng.random() < 0.3 and not is_varlen:
        attrs["num_splits"] = int(rng.integers(1, 5))
    if rng.random() < 0.6:
        attrs["return_lse"] = True
    return OPS["paged_attention"].make(tensors, attrs, Policy())


def _table(rng: np.random.Generator, problem: Problem) -> Any:
    return rng.integers(0, max(1, problem.desc("k_cache").shape[0]), problem.desc("page_table").shape)


def _lengths(which: str, rng: np.random.Generator, problem: Problem) -> Any:
    assert isinstance(problem, PagedAttentionProblem)
    return rng.integers(0, (problem.len_q if which == "q" else problem.len_kv) + 1, problem.batch)


def _starts(rng: np.random.Generator, problem: Problem) -> Any:
    assert isinstance(problem, PagedAttentionProblem)
    return np.sort(rng.integers(0, problem.len_q + 1, problem.batch + 1))


def _narrow(name: str, rng: np.random.Generator, problem: Problem) -> Any:
    desc = problem.desc(name)
    values = rng.standard_normal(desc.shape)
    return np.clip(np.rint(40 * values), -127, 127) if desc.dtype is S8 else values


def _scale(name: str, rng: np.random.Generator, problem: Problem) -> Any:
    size = 1 / 40 if problem.desc("k_cache").dtype is S8 else 1.0
    return size * rng.uniform(0.5, 1.5, problem.desc(name).shape)


_OP = "paged_attention"
SAMPLES: dict[str, Sampler] = {_OP: _draw}
FILLS: dict[tuple[str, str], Fill] = {(_OP, "page_table"): _table, (_OP, "cu_seqlens_q"): _starts}
FILLS |= {(_OP, f"lengths_{which}"): partial(_lengths, which) for which in ("q", "kv")}
FILLS |= {(_OP, name): partial(_narrow, name) for name in ("k_cache", "v_cache")}
FILLS |= {(_OP, name): partial(_scale, name) for name in ("k_scale", "v_scale")}
_PAGES = "page_table=s32[2,3] lengths_kv=s32[2]"
CASES: dict[str, tuple[str, ...]] = {
    _OP: (
        f"paged_attention q=bf16[2,4,1,32]nchw k_cache=bf16[7,2,16,32]nchw v_cache=bf16[7,2,16,32]nchw {_PAGES} return_lse=True",
        f"paged_attention q=f16[2,4,3,24]nchw k_cache=f16[7,2,5,24](480,24,48,1) v_cache=f16[7,2,5,16](160,16,32,1) {_PAGES} "
        "causal=bottom_right num_splits=2",
        f"paged_attention q=bf16[2,4,1,48]nchw k_cache=e4m3[7,1,16,48]nchw v_cache=e4m3[7,1,16,48]nchw {_PAGES} k_scale=f32[1] "
        "v_scale=f32[1,1]",
        f"paged_attention q=f16[2,2,2,16]nchw k_cache=s8[7,2,8,16]nchw v_cache=s8[7,2,8,20]nchw {_PAGES} k_scale=f32[7,2,8] "
        "v_scale=f32[7,2,8] sinks=f32[2] return_lse=True",
        f"paged_attention q=bf16[2,4,1,256]nchw k_cache=e4m3[7,2,16,256]nchw v_cache=e4m3[7,2,16,256]nchw {_PAGES} return_lse=True",
    ),
}
