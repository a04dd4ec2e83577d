"""Attention over a cache of keys and values that lies in pages.

    paged_attention q=bf16[B,H,L,D] k_cache=bf16[P,G,page,D] v_cache=bf16[P,G,page,E] page_table=s32[B,N] lengths_kv=s32[B]
                                                                                              out (B, H, L, E), and lse under return_lse

As `attention` of the keys and values that the table names: key j of sequence b is k_cache[page_table[b, j // page], :, j % page], and
there are lengths_kv[b] of them, N * page at most. Neither entries of the table nor slots beyond a length are used, whatever they hold.
Shapes are logical: "NHD" pages (page, heads, dim) and "HND" pages (heads, page, dim) differ by strides alone. L is the number of query
rows: 1 in decoding, more of a prompt or a draft; lengths_q (B,) says how many of them there are; or cu_seqlens_q (B + 1,) where the
sequences of queries lie side by side in q (H, T, D).

Caches are of q's type, or e4m3, e5m2 or s8. k_scale and v_scale, f32, that broadcast to (P, G, page), are what their values are multiplied
by; weights (times v_scale, where it differs between keys) have the range of f16 beside f16 queries and caches of 8 bits.
num_splits: among how many CTAs the keys of a tile are dealt out (default: chosen).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import BF16, E4M3, E5M2, F16, F32, S8, S32
from ..errors import expected
from ..tensor import TensorDesc
from . import attention
from .attention import AttentionProblem
from .base import OpDef, Operand, Policy
from .checks import check_bool, check_integer, check_number, check_output, check_reach, describe, operand

MAX_DIM = 256
MAX_SPLITS = 128
NARROW = (E4M3, E5M2, S8)  # types of caches besides q's


@dataclass(frozen=True, kw_only=True)
class PagedAttentionProblem(AttentionProblem):
    """num_splits: as given, 0 if not."""

    num_splits: int = 0

    def heads_of(self, name: str) -> TensorDesc:
        """As of attention; "k" and "v": the cache, (pages, heads, keys of a page, dim)."""
        return self.desc(f"{name}_cache") if name in ("k", "v") else super().heads_of(name)

    @property
    def page_size(self) -> int:
        return self.desc("k_cache").shape[2]

    @property
    def len_kv(self) -> int:
        """What the table has room for."""
        return self.desc("page_table").shape[1] * self.page_size

    def scale_strides(self, name: str) -> tuple[int, int, int]:
        """Element strides of k_scale or v_scale over (pages, heads, keys of a page): 0 where it broadcasts."""
        desc = self.desc(name)
        page, head, key = (0,) * (3 - desc.rank) + tuple(0 if n == 1 else s for n, s in zip(desc.shape, desc.strides, strict=True))
        return page, head, key

    @property
    def num_bytes(self) -> int:
        """As if all that the tables have room for were used."""
        pages = self.desc("page_table").numel
        caches = sum(d.num_bytes // max(1, d.shape[0]) * pages for d in (self.desc("k_cache"), self.desc("v_cache")))
        return caches + sum(o.desc.num_bytes for o in self.operands if o.name not in ("k_cache", "v_cache"))


def check_scale(op: str, name: str, tensors: Mapping[str, TensorDesc], shape: tuple[int, ...]) -> TensorDesc:
    """f32, and broadcasts to shape."""
    scale = operand(op, name, tensors, (F32,))
    if scale.rank > 3 or any(n not in (1, m) for n, m in zip(scale.shape[::-1], shape[::-1], strict=False)):
        raise expected(op, f"shape of {name}", list(scale.shape), f"what broadcasts to {list(shape)}: pages, heads, keys of a page",
                       describe(tensors))
    return scale


def _make(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> PagedAttentionProblem:
    op, context = "paged_attention", describe(tensors)
    q = operand(op, "q", tensors, (F16, BF16))
    is_varlen = "cu_seqlens_q" in tensors
    if q.rank != 4 and not (is_varlen and q.rank == 3):
        raise expected(op, "rank of q", q.rank, "4: (batch, heads, length, dim), or 3 without the batch beside cu_seqlens_q", context)
    k, v = (operand(op, name, tensors, (q.dtype, *NARROW)) for name in ("k_cache", "v_cache"))
    if k.rank != 4:
        raise expected(op, "rank of k_cache", k.rank, "4: (pages, heads, keys of a page, dim)", context)
    *lead, heads, length, dim = q.shape
    pages, heads_kv, page = k.shape[:3]
    if not 1 <= dim <= MAX_DIM:
        raise expected(op, "last dimension of q", dim, f"1 to {MAX_DIM}", context)
    if k.shape[3] != dim or page < 1:
        raise expected(op, "shape of k_cache", list(k.shape), ["pages", "heads", "keys of a page, at least 1", dim], context)
    if v.rank != 4 or v.shape[:3] != k.shape[:3] or not 1 <= v.shape[3] <= MAX_DIM:
        raise expected(op, "shape of v_cache", list(v.shape), [*k.shape[:3], f"1 to {MAX_DIM}"], context)
    if v.dtype is not k.dtype:
        raise expected(op, "type of v_cache", v.dtype, f"{k.dtype} as k_cache has", context)
    if heads_kv == 0 and heads or heads_kv and heads % heads_kv:
        raise expected(op, "heads of q", heads, f"a multiple of the {heads_kv} heads of k_cache", context)
    batch = lead[0] if lead else 1
    if is_varlen:
        if batch != 1:
            raise expected(op, "batch of q", batch, "1: sequences side by side lie along the length", context)
        starts = operand(op, "cu_seqlens_q", tensors, (S32,))
        if starts.rank != 1 or starts.shape[0] < 2 or "lengths_q" in tensors:
            raise expected(op, "shape of cu_seqlens_q", list(starts.shape), "(N + 1,) for N sequences, at least one, without lengths_q",
                           context)
        batch = starts.shape[0] - 1
    table = operand(op, "page_table", tensors, (S32,))
    if table.rank != 2 or table.shape[0] != batch:
        raise expected(op, "shape of page_table", list(table.shape), [batch, "pages of a sequence"], context)
    if table.numel and not pages:
        raise expected(op, "shape of k_cache", list(k.shape), "pages that the table may name", context)
    if table.shape[1] * page >= 2**29:
        raise expected(op, "keys of a sequence", table.shape[1] * page, f"less than {2**29}", context)
    for name in ("lengths_kv", *(("lengths_q",) if "lengths_q" in tensors else ())):
        operand(op, name, tensors, (S32,), (batch,))

    alignment, left, right, normal = attention._window(op, attrs, context)
    scale = attrs.get("scale")
    number = check_number(op, "scale", 1.0 / math.sqrt(dim) if scale is None else scale, F32, context)
    normal += [("scale", number)] if scale is not None else []
    softcap = check_number(op, "softcap", attrs.get("softcap", 0.0), F32, context)
    if softcap and softcap < attention.MIN_SOFTCAP:
        raise expected(op, "softcap", softcap, f"0 (none), or at least {attention.MIN_SOFTCAP}", context)
    normal += [("softcap", softcap)] if softcap else []
    splits = attrs.get("num_splits")
    if splits is not None:
        splits = check_integer(op, "num_splits", splits, 1, MAX_SPLITS, context)
        normal.append(("num_splits", splits))
    if "alibi" in tensors and operand(op, "alibi", tensors, (F32, q.dtype)).shape not in ((heads,), (batch, heads)):
        raise expected(op, "shape of alibi", list(tensors["alibi"].shape), f"({heads},) or ({batch}, {heads})", context)
    if "sinks" in tensors:
        operand(op, "sinks", tensors, (F32, q.dtype), (heads,))
    for name in ("k_scale", "v_scale"):
        if name in tensors:
            check_scale(op, name, tensors, (pages, heads_kv, page))
    operands = [Operand(n, tensors[n]) for n in _INPUTS if n in tensors]
    out_shape, lse_shape = (*lead, heads, length, v.shape[3]), (*lead, heads, length)
    for name, shape, kind in (("out", out_shape, q.dtype), ("lse", lse_shape, F32)):
        if name == "lse" and not check_bool(op, "return_lse", attrs.get("return_lse", False)) and name not in tensors:
            continue
        if name in tensors:
            check_output(op, name, tensors[name], shape, tensors, (kind,))
        like = attention._like(kind, shape, q) if name == "out" else TensorDesc.packed(kind, shape)
        operands.append(Operand(name, tensors.get(name, like), True))
        normal += [("return_lse", True)] if name == "lse" else []
    for o in operands:
        check_reach(op, o.name, o.desc, context)
    expression = attention._expression(("alibi",) if "alibi" in tensors else (), False, softcap, None)
    return PagedAttentionProblem(op, tuple(operands), tuple(normal), policy=policy, scale=number, expression=expression,
                                 alignment=alignment, left=left, right=right, num_splits=splits or 0)


_OPTIONAL = ("alibi", "sinks", "lengths_q", "cu_seqlens_q", "k_scale", "v_scale")
_INPUTS = ("q", "k_cache", "v_cache", "page_table", "lengths_kv", *_OPTIONAL)
DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("paged_attention", _INPUTS, ("out", "lse"), _make, _OPTIONAL,
          (("scale", None), ("causal", None), ("window", None), ("softcap", None), ("num_splits", None), ("return_lse", False))),
)
