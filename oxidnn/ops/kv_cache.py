"""Appending to a cache of keys and values.

    kv_cache_append k=bf16[B,G,L,D] v=bf16[B,G,L,E] slots=s64[B,L] k_cache=bf16[P,G,page,D] v_cache=bf16[P,G,page,E]
    kv_cache_append k v positions=s32[B,L] page_table=s32[B,N] k_cache v_cache          of pages that a table names
    kv_cache_append k v positions=s32[B,L] k_cache=bf16[B,G,M,D] v_cache                a page a sequence
                                                                                        k_cache, v_cache, and q_out with a q

Writes the rows k[b, :, l] and v[b, :, l] to their tokens' places, and nothing else: slot s is key s % page of page s // page; a position
p is key p % page of page page_table[b, p // page], or key p of page b. Tokens whose slot or position is negative or beyond the cache, or
whose entry of the table is no page, are left out. Two tokens must not have one place. k (G, T, D) and slots (T,) are a batch of one.

Caches are of k's type, or e4m3, e5m2 or s8 (rounded to nearest even, saturated); values are divided by k_scale and v_scale, f32, that
broadcast to (P, G, page), as `paged_attention` multiplies them. rope=True: keys, and the queries q (B, H, L, D), which then go to q_out,
are turned before as `rope` does with the same attributes, by positions, which slots may stand beside. q_out may lie exactly where q does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import F32, F64, S32, S64, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, canonical, check_bool, check_output, check_reach, describe, operand
from .paged_attention import NARROW, check_scale
from .pointwise import like
from .rope import ATTRS, Rotation, check_rotation


@dataclass(frozen=True, kw_only=True)
class KvCacheAppendProblem(Problem):
    """rotation: of keys and queries, None if they are not turned. place: how a token's is found: "slots", "pages" or "rows"."""

    rotation: Rotation | None
    place: str

    def heads_of(self, name: str) -> TensorDesc:
        """As (batch, heads, length, dim)."""
        desc = self.desc(name)
        return desc if desc.rank == 4 else TensorDesc(desc.dtype, (1, *desc.shape), (0, *desc.strides), desc.align)

    def scale_strides(self, name: str) -> tuple[int, int, int]:
        """Element strides of k_scale or v_scale over (pages, heads, keys of a page): 0 where it broadcasts."""
        desc = self.desc(name)
        page, head, key = (0,) * (3 - desc.rank) + tuple(0 if n == 1 else s for n, s in zip(desc.shape, desc.strides, strict=True))
        return page, head, key

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        return (("q_out", "q"),) if self.has("q") else ()

    @property
    def compute(self) -> DType:
        return F64 if self.desc("k").dtype is F64 else F32

    @property
    def num_bytes(self) -> int:
        """What is appended, read and written."""
        rows = [self.desc(n) for n in ("k", "v", "q") if self.has(n)]
        return sum(d.num_bytes for d in rows) + sum(self.heads_of(n).numel * self.desc(f"{n}_cache").dtype.num_bytes for n in ("k", "v"))

    @property
    def flops(self) -> int:
        return self.desc("k").numel


def _make(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> KvCacheAppendProblem:
    op, context = "kv_cache_append", describe(tensors)
    k = operand(op, "k", tensors, FLOATS)
    v = operand(op, "v", tensors, (k.dtype,))
    if k.rank not in (3, 4):
        raise expected(op, "rank of k", k.rank, "4: (batch, heads, length, dim), or 3 without the batch", context)
    if v.rank != k.rank or v.shape[:-1] != k.shape[:-1]:
        raise expected(op, "shape of v", list(v.shape), [*k.shape[:-1], "dim"], context)
    *lead, heads, length, dim = k.shape
    batch = lead[0] if lead else 1
    slots = tensors.get("slots")
    if slots is not None:
        allowed = ((batch, length),) if lead else ((1, length), (length,))
        if operand(op, "slots", tensors, (S32, S64)).shape not in allowed:
            raise expected(op, "shape of slots", list(slots.shape), " or ".join(str(list(s)) for s in allowed), context)
        if "page_table" in tensors:
            raise expected(op, "page_table", "given", "none beside slots", context)
    elif "positions" not in tensors:
        raise expected(op, "slots", "missing", "slots, or positions", context)
    if "positions" in tensors and operand(op, "positions", tensors, (S32, S64)).shape not in ((batch, length), (length,)):
        raise expected(op, "shape of positions", list(tensors["positions"].shape), f"[{batch}, {length}] or [{length}]", context)
    caches: dict[str, TensorDesc] = {}
    for name, rows in (("k_cache", k), ("v_cache", v)):
        cache = tensors.get(name, TensorDesc.packed(rows.dtype, (batch, heads, length, rows.shape[-1])))
        first = caches.get("k_cache", cache)
        if cache.rank != 4 or cache.shape != (first.shape[0], heads, first.shape[2], rows.shape[-1]) or cache.shape[2] < 1 and length:
            raise expected(op, f"shape of {name}", list(cache.shape), ["pages", heads, "keys of a page", rows.shape[-1]], context)
        check_output(op, name, cache, cache.shape, tensors, (k.dtype, *NARROW))
        if cache.dtype is not first.dtype:
            raise expected(op, f"type of {name}", cache.dtype, f"{first.dtype} as k_cache has", context)
        caches[name] = cache
    pages, _, page, _ = caches["k_cache"].shape
    place = "slots" if slots is not None else "pages" if "page_table" in tensors else "rows"
    if place == "pages":
        table = operand(op, "page_table", tensors, (S32,))
        if table.rank != 2 or table.shape[0] != batch:
            raise expected(op, "shape of page_table", list(table.shape), [batch, "pages of a sequence"], context)
    if place == "rows" and pages != batch:
        raise expected(op, "pages of k_cache", pages, f"{batch}, one a sequence, without page_table and slots", context)
    for name in ("k_scale", "v_scale"):
        if name in tensors:
            check_scale(op, name, tensors, (pages, heads, page))
    normal: list[tuple[str, Any]] = []
    rotation = None
    given = [n for n in ("q", "cos", "sin", "q_out") if n in tensors] + [n for n, _ in ATTRS if attrs.get(n)]
    if check_bool(op, "rope", attrs.get("rope", False), context):
        if "positions" not in tensors:
            raise expected(op, "positions", "missing", "a tensor, by which keys are turned", context)
        rotation, normal = check_rotation(op, tensors, attrs, dim, k.dtype, batch, length)
        normal.insert(0, ("rope", True))
    elif given:
        raise expected(op, given[0], "given", "rope=True, which alone takes it", context)
    operands = [Operand(n, tensors[n]) for n in _INPUTS if n in tensors]
    operands += [Operand(n, d, True) for n, d in caches.items()]
    if "q" in tensors:
        q = operand(op, "q", tensors, (k.dtype,))
        if q.rank != k.rank or (*q.shape[:-3], *q.shape[-2:]) != (*lead, length, dim):
            raise expected(op, "shape of q", list(q.shape), [*lead, "heads", length, dim], context)
        if "q_out" in tensors:
            check_output(op, "q_out", tensors["q_out"], q.shape, tensors, (q.dtype,))
        operands.append(Operand("q_out", tensors.get("q_out", canonical(like(q, q.dtype))), True))
    for o in operands:
        check_reach(op, o.name, o.desc, context)
    return KvCacheAppendProblem(op, tuple(operands), tuple(normal), policy=policy, rotation=rotation, place=place)


_OPTIONAL = ("slots", "positions", "page_table", "q", "cos", "sin", "k_scale", "v_scale")
_INPUTS = ("k", "v", *_OPTIONAL)
DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("kv_cache_append", _INPUTS, ("k_cache", "v_cache", "q_out"), _make, _OPTIONAL, (("rope", False), *ATTRS)),
)
