"""Attention over a paged cache: the float64 reference of attention, sequence by sequence, of the keys and values that the table names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...dtypes import F16, F32
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.paged_attention import PagedAttentionProblem
from ...tensor import TensorDesc
from . import Expected, Reference
from .attention import REFERENCES as OF_ATTENTION


def _gathered(p: PagedAttentionProblem, name: str, inputs: Mapping[str, np.ndarray], n: int, count: int,
              scaled: bool = True) -> np.ndarray:
    """(heads, count, dim) of sequence n, multiplied by their scales."""
    cache = inputs[f"{name}_cache"]
    j = np.arange(count)
    pages, slots = np.clip(inputs["page_table"][n, j // p.page_size], 0, cache.shape[0] - 1), j % p.page_size
    rows = cache[pages, :, slots].astype(np.float64)
    if scaled and p.has(f"{name}_scale"):
        rows = rows * np.broadcast_to(inputs[f"{name}_scale"], cache.shape[:3])[pages, :, slots][..., None]
    return rows.transpose(1, 0, 2)


def _paged_attention(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, PagedAttentionProblem)
    kind, q = p.desc("q").dtype, inputs["q"].reshape(p.heads_of("q").shape)
    found: dict[str, Expected] = {}
    names = [o.name for o in p.outputs]
    sinks = inputs["sinks"][:, None] if p.has("sinks") else np.full((p.heads, 1), -np.inf)
    arrays = {"out": [np.zeros(p.heads_of("out").shape) for _ in range(3)], "lse": [np.zeros(q.shape[:3]) for _ in range(3)]}
    arrays["lse"][0][...] = sinks
    attrs = {n: v for n, v in p.attrs if n not in ("num_splits", "return_lse", "scale")} | {"scale": p.scale, "return_lse": True}
    for n in range(p.batch):
        begin, end = 0, p.len_q
        if p.is_varlen:
            begin, end = (min(max(int(v), 0), p.len_q) for v in inputs["cu_seqlens_q"][n:n + 2])
        elif p.has("lengths_q"):
            end = min(max(int(inputs["lengths_q"][n]), 0), p.len_q)
        count = min(max(int(inputs["lengths_kv"][n]), 0), p.len_kv)
        if end <= begin:
            continue
        place = (0 if p.is_varlen else n, slice(None), slice(begin, end))
        own = {"q": q[place][None], "k": _gathered(p, "k", inputs, n, count)[None], "v": _gathered(p, "v", inputs, n, count)[None]}
        tensors = {name: TensorDesc.packed(kind, a.shape) for name, a in own.items()}
        for name in ("alibi", "sinks"):
            if p.has(name):
                own[name] = inputs[name][n] if inputs[name].ndim == 2 else inputs[name]
                tensors[name] = TensorDesc.packed(F32, own[name].shape)
        each = OPS["attention"].make(tensors, attrs, Policy())
        part = OF_ATTENTION["attention"](each, own, {})
        if kind is F16 or p.desc("v_cache").dtype.num_bytes == 1:  # weights, times their values' scales, are f16, maybe subnormal
            raw = np.abs(_gathered(p, "v", inputs, n, count, False)).sum(1).repeat(p.heads // p.heads_kv, axis=0)
            size = np.abs(own["v"][0]).sum(1).repeat(p.heads // p.heads_kv, axis=0)
            arrays["out"][2][place] += F16.smallest * np.maximum(raw if p.has("v_scale") else 0, size)[:, None]
        for name in names:
            e = part[name]
            for array, value in zip(arrays[name], (e.want, e.magnitude, e.slack), strict=True):
                if value is not None:
                    array[place] = array[place] + value[0] if array is arrays[name][2] else value[0]
            found[name] = replace(e, terms=max(1, p.len_kv))
    result = {}
    for name in names:
        want, magnitude, slack = (a.reshape(p.desc(name).shape) for a in arrays[name])
        base = found.get(name, Expected(want, None, 1, F32))
        result[name] = replace(base, want=want, magnitude=None if base.magnitude is None else magnitude, slack=slack)
    return result


REFERENCES: dict[str, Reference] = {"paged_attention": _paged_attention}
