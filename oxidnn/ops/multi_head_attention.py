"""Classic multi-head attention: projections of queries, keys and values, attention by heads, the projection of its result; and gradients.

    multi_head_attention query=bf16[B,L,E] key=bf16[B,M,F] value=bf16[B,M,G] w_q=bf16[H*D,E] w_k=bf16[I*D,F] w_v=bf16[I*V,G]
        w_out=bf16[O,H*V] num_heads=H          out (B, L, O), and under return_saved q, k, v, context, lse, which gradients take
    multi_head_attention_backward d_out query key value w_q w_k w_v w_out q k v context lse num_heads=H
                                               d_query, d_key, d_value, dw_q, dw_k, dw_v, dw_out, and under bias_gradients dbias_q,
                                               dbias_k, dbias_v, dbias_out

q = query w_q' + bias_q (B, L, H*D), k = key w_k' + bias_k (B, M, I*D), v = value w_v' + bias_v (B, M, I*V); context (B, L, H*V) is
`attention` of their heads, head h being columns h*D to h*D + D - 1; out = context w_out' + bias_out + residual. There may be fewer heads I
of keys and values. mask, lengths_q, lengths_kv, scale, causal, window and dropout are those of `attention` (so a query sees a key where a
mask of bool is True). All biases may be absent. Sums are made in f32 (f64 for f64); q, k, v, context and their gradients are rounded to the
type of query, as between layers. Where an array is several of query, key and value, its gradient is the sum of theirs; that of a residual
is d_out. Vaswani et al., 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..dtypes import F32, F64, DType
from ..errors import InvalidArgument, expected
from ..tensor import TensorDesc
from . import attention
from .attention import AttentionProblem
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_bool, check_integer, check_output, check_reach, describe, operand

SOURCES = {"q": "query", "k": "key", "v": "value"}
MASKS = ("mask", "lengths_q", "lengths_kv")
SAVED = ("q", "k", "v", "context", "lse")
_WEIGHTS = ("w_q", "w_k", "w_v", "w_out")
_BIASES = ("bias_q", "bias_k", "bias_v", "bias_out")
_ATTENTION = ("scale", "causal", "window", "dropout")


@dataclass(frozen=True, kw_only=True)
class MultiHeadAttentionProblem(Problem):
    """inner: the attention of the heads, or its gradients; its q, k, v, out and gradients lie as those of the problem do, packed if it has
    none."""

    inner: AttentionProblem

    @property
    def is_backward(self) -> bool:
        return self.has("d_out")

    @property
    def accumulator(self) -> DType:
        return self.inner.accumulator

    def flat(self, name: str) -> TensorDesc:
        """q, k, v, context or a gradient of them: (batch, length, heads * dim)."""
        return self.desc(name) if self.has(name) else _packed(self.inner.heads_of({"context": "out", "d_context": "d_out"}.get(name, name)))

    @property
    def flops(self) -> int:
        rows = {"q": self.desc("query"), "k": self.desc("key"), "v": self.desc("value")}
        products = sum(d.shape[0] * d.shape[1] * self.desc(f"w_{n}").numel for n, d in rows.items())
        products += rows["q"].shape[0] * rows["q"].shape[1] * self.desc("w_out").numel
        return 2 * products * (2 if self.is_backward else 1) + self.inner.flops


def heads(desc: TensorDesc, count: int) -> TensorDesc:
    """(batch, count, length, dim) of (batch, length, count * dim)."""
    batch, length, width = desc.shape
    first, row, column = desc.strides
    return TensorDesc(desc.dtype, (batch, count, length, width // count), (first, width // count * column, row, column), desc.align)


def _packed(desc: TensorDesc) -> TensorDesc:
    batch, count, length, dim = desc.shape
    return TensorDesc.packed(desc.dtype, (batch, length, count * dim))


def _make(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MultiHeadAttentionProblem:
    context, is_backward = describe(tensors), op.endswith("_backward")
    query = operand(op, "query", tensors, FLOATS)
    if query.rank != 3:
        raise expected(op, "rank of query", query.rank, "3: (batch, length, features)", context)
    kind, exact = query.dtype, F64 if query.dtype is F64 else F32
    batch, length, _ = query.shape
    key = operand(op, "key", tensors, (kind,))
    if key.rank != 3 or key.shape[0] != batch:
        raise expected(op, "shape of key", list(key.shape), [batch, "length", "features"], context)
    value = operand(op, "value", tensors, (kind,))
    if value.rank != 3 or value.shape[:2] != key.shape[:2]:
        raise expected(op, "shape of value", list(value.shape), [*key.shape[:2], "features"], context)
    count = check_integer(op, "num_heads", attrs.get("num_heads"), 1, 2**20, context)
    rows: dict[str, int] = {}
    for name, width in (("w_q", query.shape[2]), ("w_k", key.shape[2]), ("w_v", value.shape[2])):
        w = operand(op, name, tensors, (kind,))
        if w.rank != 2 or w.shape[1] != width or not w.shape[0]:
            raise expected(op, f"shape of {name}", list(w.shape), ["rows, at least 1", width], context)
        rows[name] = w.shape[0]
    if rows["w_q"] % count:
        raise expected(op, "rows of w_q", rows["w_q"], f"a multiple of the {count} heads", context)
    dim = rows["w_q"] // count
    if rows["w_k"] % dim or count % (rows["w_k"] // dim):
        raise expected(op, "rows of w_k", rows["w_k"], f"{dim} for each head, of which there are {count} or a divisor", context)
    count_kv = rows["w_k"] // dim
    if rows["w_v"] % count_kv:
        raise expected(op, "rows of w_v", rows["w_v"], f"a multiple of the {count_kv} heads of keys", context)
    width = count * (rows["w_v"] // count_kv)
    w_out = operand(op, "w_out", tensors, (kind,))
    if w_out.rank != 2 or w_out.shape[1] != width:
        raise expected(op, "shape of w_out", list(w_out.shape), ["features", width], context)
    rows["w_out"] = w_out.shape[0]
    operands = [Operand(n, tensors[n]) for n in ("query", "key", "value", *_WEIGHTS)]
    for name, weight in zip(_BIASES, _WEIGHTS, strict=True):
        if name in tensors:
            operands.append(Operand(name, operand(op, name, tensors, FLOATS, (rows[weight],))))
    out_shape = (batch, length, rows["w_out"])
    if "residual" in tensors:
        operands.append(Operand("residual", operand(op, "residual", tensors, (kind,), out_shape)))
    shapes = {"q": (batch, length, rows["w_q"]), "k": (batch, key.shape[1], rows["w_k"]), "v": (batch, key.shape[1], rows["w_v"]),
              "context": (batch, length, width), "lse": (batch, count, length)}
    saves = not is_backward and check_bool(op, "return_saved", attrs.get("return_saved", False))
    outputs = [] if is_backward else [_result(op, "out", tensors, kind, out_shape)]
    if is_backward:
        operands = [Operand("d_out", operand(op, "d_out", tensors, (kind,), out_shape)), *operands]
        operands += [Operand(n, operand(op, n, tensors, (exact if n == "lse" else kind,), shapes[n])) for n in SAVED]
        outputs = [_result(op, f"d_{n}", tensors, kind, tensors[n].shape) for n in SOURCES.values()]
        outputs += [_result(op, f"d{n}", tensors, kind, tensors[n].shape, exact) for n in _WEIGHTS]
    elif saves:
        outputs += [_result(op, n, tensors, exact if n == "lse" else kind, shapes[n]) for n in SAVED]
    adds = is_backward and check_bool(op, "bias_gradients", attrs.get("bias_gradients", False))
    if adds:
        outputs += [_result(op, f"d{n}", tensors, kind, (rows[weight],), exact) for n, weight in zip(_BIASES, _WEIGHTS, strict=True)]
    known = [o.name for o in (*operands, *outputs)]
    for name in tensors:
        if name not in known and name not in MASKS:
            raise expected(op, name, "given", "no array without return_saved or bias_gradients", context)
    operands += [Operand(n, tensors[n]) for n in MASKS if n in tensors]
    inner = _inner(op, {o.name: o.desc for o in (*operands, *outputs)}, attrs, policy, shapes, (count, count_kv))
    written = [("num_heads", count), *((n, v) for n, v in inner.attrs if n in _ATTENTION)]
    written += [("return_saved", True)] if saves else []
    written += [("bias_gradients", True)] if adds else []
    return MultiHeadAttentionProblem(op, (*operands, *outputs), tuple(written), inner.scalars, policy=policy, inner=inner)


def _result(op: str, name: str, tensors: Mapping[str, TensorDesc], kind: DType, shape: tuple[int, ...],
            wide: DType | None = None) -> Operand:
    """An output as it is given, packed otherwise."""
    if name in tensors:
        check_output(op, name, tensors[name], shape, tensors, tuple(dict.fromkeys((kind, wide or kind))))
        return Operand(name, tensors[name], True)
    desc = TensorDesc.packed(kind, shape)
    check_reach(op, name, desc, describe(tensors))
    return Operand(name, desc, True)


def _inner(op: str, own: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy, shapes: Mapping[str, tuple[int, ...]],
           counts: tuple[int, int]) -> AttentionProblem:
    """The attention of the heads. Its gradients are the same bits on every run, whatever else the policy allows."""
    is_backward, kind = op.endswith("_backward"), own["query"].dtype

    def view(name: str, count: int) -> TensorDesc:
        return heads(own.get(name, TensorDesc.packed(kind, shapes[name])), count)

    tensors = {n: view(n, counts[n != "q"]) for n in SOURCES} | {"out": view("context", counts[0])} | {n: own[n] for n in MASKS if n in own}
    if "lse" in own:
        tensors["lse"] = own["lse"]
    if is_backward:
        tensors |= {name: heads(TensorDesc.packed(kind, shapes[of]), counts[of in "kv"])
                    for name, of in (("d_out", "context"), ("dq", "q"), ("dk", "k"), ("dv", "v"))}
    inner = "attention_backward" if is_backward else "attention"
    given = {n: attrs[n] for n in _ATTENTION if n in attrs}
    row = next(d for d in attention.DEFINITIONS if d.name == inner)
    try:
        problem = row.make(tensors, given, replace(policy, deterministic=True, workspace_limit=None))
    except InvalidArgument as error:
        raise InvalidArgument(f"{op}{str(error).removeprefix(inner)}") from None
    assert isinstance(problem, AttentionProblem)
    return problem


_INPUTS = ("query", "key", "value", *_WEIGHTS)
_ATTRS: tuple[tuple[str, Any], ...] = (("num_heads", None), *((n, None) for n in _ATTENTION))
_OPTIONAL = (*_BIASES, "residual", *MASKS)
DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("multi_head_attention", (*_INPUTS, *_OPTIONAL), ("out", *SAVED), partial(_make, "multi_head_attention"), _OPTIONAL,
          (*_ATTRS, ("return_saved", False))),
    OpDef("multi_head_attention_backward", ("d_out", *_INPUTS, *SAVED, *MASKS),
          (*(f"d_{n}" for n in SOURCES.values()), *(f"d{n}" for n in _WEIGHTS), *(f"d{n}" for n in _BIASES)),
          partial(_make, "multi_head_attention_backward"), MASKS, (*_ATTRS, ("bias_gradients", False))),
)
