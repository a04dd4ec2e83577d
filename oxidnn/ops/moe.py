"""Mixtures of experts: assignments sorted by expert, rows moved there and back, and whole layers of gated experts.

    moe_permute x=bf16[T,H] ids=s32[T,K] experts=E                                      xs, order, inverse, counts
    moe_unpermute ys=bf16[T*K,H] inverse=s32[T,K] weights=f32[T,K]                      y
    moe_unpermute_backward dy ys inverse weights                                        dys, dweights
    moe x=bf16[T,H] ids=s32[T,K] weights=f32[T,K] w_gate_up=bf16[E,2*I,H] w_down=bf16[E,H,I]        y
    moe_backward dy x ids weights w_gate_up w_down                                      dx, dweights, dw_gate_up, dw_down
    moe_exchanged x=bf16[R,H] counts=s32[S,E] w_gate_up w_down                          y
    moe_quantized x ids weights w_gate_up=e4m3[E,2*I,H] scale_gate_up=f32[E,2*I/128,H/128] w_down scale_down block=(128,128)        y

Assignment a = t * K + k is that of token t to expert ids[t, k]. Sorted by expert, and within an expert by a, it is row `inverse[t, k]` of
xs, and order[row] = a; counts[e]: rows of expert e, which begin where those of the experts before it end. An id outside of
[first_expert, first_expert + experts) is no expert here: its rows come last, of which inverse and order hold the complements (~row, ~a).

    y[t] = sum over k of weights[t, k] * (act(x[t] Wg^T) * (x[t] Wu^T)) Wd^T        Wg, Wu: the halves of w_gate_up[e]; Wd: w_down[e]

Sums over k are in f32 (f64 of f64), in a fixed order. What lies between is rounded to x's type, as separate layers would have it.
moe_exchanged: rows that came from S sources, those of a source sorted by expert, counts[s, e] of each; y has its rows in the same places,
and zeros beyond the last. Weights are the sources' to apply.
moe_quantized: matrices of e4m3, s8, or 4-bit integers (s4, in u8, two to a byte along the last dimension, the first in the low half); a
number is q * scale of its block of block[0] rows and block[1] columns, rounded to x's type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ..codegen import pointwise as expr
from ..codegen.pointwise import Expression
from ..dtypes import BF16, BOOL, E4M3, F16, F32, F64, S8, S32, S64, TABLE, U8, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, MAX_EXTENT, check_choice, check_integer, check_integers, check_reach, check_shape, describe, operand, output
from .gemm import GATES

MAX_TOPK = 32
MAX_EXPERTS = 4096
IDS = (S32, S64)


@dataclass(frozen=True, kw_only=True)
class MoeProblem(Problem):
    """tokens, topk: of the assignments (of moe_exchanged rows, and 1); hidden: columns of x; experts: here; inter: of an expert, 0 where
    rows are only moved; first: the id of the first expert here."""

    tokens: int
    topk: int
    hidden: int
    experts: int
    inter: int = 0
    first: int = 0
    activation: str = "silu"
    block: tuple[int, int] = (1, 128)

    @property
    def rows(self) -> int:
        return self.tokens * self.topk

    @property
    def kind(self) -> DType:
        """Of the rows."""
        return self.inputs[0].desc.dtype

    @property
    def accumulator(self) -> DType:
        return F64 if self.kind is F64 else F32

    @property
    def gate(self) -> Expression:
        """An expert's middle over "g" and "u", the halves of what its first matrix makes."""
        g = expr.arg("g")
        return (g if self.activation == "identity" else expr.apply(self.activation, g)) * expr.arg("u")

    @property
    def used(self) -> int:
        """Experts that may have rows."""
        return min(self.experts, self.rows)

    @property
    def flops(self) -> int:
        return 6 * self.rows * self.hidden * self.inter * (3 if self.op.endswith("backward") else 1) or self.rows * self.hidden

    @property
    def num_bytes(self) -> int:
        """Weights of experts that may have rows, and everything else, once."""
        weights = [o.desc for o in self.operands if o.name in ("w_gate_up", "w_down")]
        rest = sum(o.desc.num_bytes for o in self.operands if o.name not in ("w_gate_up", "w_down"))
        return rest + sum(d.num_bytes * self.used // max(1, self.experts) for d in weights)


def _rank2(op: str, name: str, tensors: Mapping[str, TensorDesc], allowed: tuple[DType, ...],
           shape: tuple[int, ...] | None = None) -> TensorDesc:
    desc = operand(op, name, tensors, allowed, shape)
    if desc.rank != 2:
        raise expected(op, f"rank of {name}", desc.rank, 2, describe(tensors))
    check_reach(op, name, desc, describe(tensors))
    return desc


def _assignments(op: str, name: str, tensors: Mapping[str, TensorDesc], allowed: tuple[DType, ...], tokens: int | None) -> TensorDesc:
    """ids, or the like: (tokens, topk)."""
    desc = _rank2(op, name, tensors, allowed)
    check_integer(op, f"columns of {name}", desc.shape[1], 1, MAX_TOPK, describe(tensors))
    if tokens is not None and desc.shape[0] != tokens:
        raise expected(op, f"rows of {name}", desc.shape[0], f"{tokens}, as x has", describe(tensors))
    check_integer(op, f"size of {name}", desc.numel, 0, MAX_EXTENT // 2, describe(tensors))
    return desc


def _first(op: str, attrs: Mapping[str, Any], experts: int) -> tuple[int, list[tuple[str, Any]]]:
    first = check_integer(op, "first_expert", attrs.get("first_expert", 0), 0, MAX_EXTENT - experts)
    return first, [("first_expert", first)] if first else []


def make_permute(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MoeProblem:
    """xs of any type but bool: rows are only moved."""
    op = "moe_permute"
    x = _rank2(op, "x", tensors, tuple(t for t in TABLE if t is not BOOL))
    ids = _assignments(op, "ids", tensors, IDS, x.shape[0])
    if "experts" not in attrs:
        raise expected(op, "experts", "missing", "how many there are", describe(tensors))
    experts = check_integer(op, "experts", attrs["experts"], 1, MAX_EXPERTS)
    first, normal = _first(op, attrs, experts)
    shapes = {"xs": (x.dtype, (ids.numel, x.shape[1])), "order": (S32, (ids.numel,)), "inverse": (S32, ids.shape),
              "counts": (S32, (experts,))}
    outputs = [Operand(n, output(op, n, tensors, (kind,), shape, x), True) for n, (kind, shape) in shapes.items()]
    return MoeProblem(op, (Operand("x", x), Operand("ids", ids), *outputs), (("experts", experts), *normal), policy=policy,
                      tokens=ids.shape[0], topk=ids.shape[1], hidden=x.shape[1], experts=experts, first=first)


def _unpermuted(op: str, tensors: Mapping[str, TensorDesc], hidden_of: str) -> tuple[TensorDesc, TensorDesc, list[Operand]]:
    """(ys, inverse, weights if given)."""
    ys = _rank2(op, "ys", tensors, FLOATS)
    inverse = _assignments(op, "inverse", tensors, (S32,), None)
    if ys.shape[0] != inverse.numel:
        raise expected(op, "rows of ys", ys.shape[0], f"{inverse.numel}, one for each element of inverse", describe(tensors))
    exact = F64 if ys.dtype is F64 else F32
    weights = [Operand("weights", _rank2(op, "weights", tensors, (exact,), inverse.shape))] if "weights" in tensors else []
    return ys, inverse, weights


def make_unpermute(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MoeProblem:
    """Without weights rows are added as they are: the gradient of moe_permute."""
    op = "moe_unpermute"
    ys, inverse, weights = _unpermuted(op, tensors, "ys")
    tokens, topk = inverse.shape
    y = output(op, "y", tensors, (ys.dtype,), (tokens, ys.shape[1]), ys)
    return MoeProblem(op, (Operand("ys", ys), Operand("inverse", inverse), *weights, Operand("y", y, True)), policy=policy,
                      tokens=tokens, topk=topk, hidden=ys.shape[1], experts=0)


def make_unpermute_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MoeProblem:
    """dys is 0 in rows of no expert, and dweights where there is none."""
    op = "moe_unpermute_backward"
    ys, inverse, weights = _unpermuted(op, tensors, "ys")
    if not weights:
        raise expected(op, "weights", "missing", "a tensor", describe(tensors))
    tokens, topk = inverse.shape
    dy = _rank2(op, "dy", tensors, (ys.dtype,), (tokens, ys.shape[1]))
    dys = output(op, "dys", tensors, (ys.dtype,), ys.shape, ys)
    dweights = output(op, "dweights", tensors, (weights[0].desc.dtype,), inverse.shape, inverse)
    return MoeProblem(op, (Operand("dy", dy), Operand("ys", ys), Operand("inverse", inverse), *weights, Operand("dys", dys, True),
                           Operand("dweights", dweights, True)), policy=policy, tokens=tokens, topk=topk, hidden=ys.shape[1], experts=0)


def _experts(op: str, tensors: Mapping[str, TensorDesc], kind: DType, hidden: int) -> tuple[TensorDesc, TensorDesc]:
    """Both matrices, of one type."""
    context = describe(tensors)
    w_gate_up, w_down = (operand(op, n, tensors, (kind,)) for n in ("w_gate_up", "w_down"))
    for name, desc in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        if desc.rank != 3:
            raise expected(op, f"rank of {name}", desc.rank, 3, context)
        check_reach(op, name, desc, context)
    experts, both, _ = w_gate_up.shape
    check_integer(op, "experts (first extent of w_gate_up)", experts, 1, MAX_EXPERTS, context)
    if both % 2 or w_gate_up.shape[2] != hidden:
        raise expected(op, "shape of w_gate_up", list(w_gate_up.shape), ["experts", "2 * inter", hidden], context)
    if w_down.shape != (experts, hidden, both // 2):
        raise expected(op, "shape of w_down", list(w_down.shape), [experts, hidden, both // 2], context)
    return w_gate_up, w_down


def _activation(op: str, attrs: Mapping[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    activation = check_choice(op, "activation", attrs.get("activation", "silu"), GATES)
    return activation, [("activation", activation)] if activation != "silu" else []


def _layer(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MoeProblem:
    x = _rank2(op, "x", tensors, FLOATS)
    tokens, hidden = x.shape
    ids = _assignments(op, "ids", tensors, IDS, tokens)
    exact = F64 if x.dtype is F64 else F32
    weights = _rank2(op, "weights", tensors, (exact,), ids.shape)
    w_gate_up, w_down = _experts(op, tensors, x.dtype, hidden)
    experts, inter = w_down.shape[0], w_down.shape[2]
    activation, normal = _activation(op, attrs)
    first, more = _first(op, attrs, experts)
    operands = [Operand("x", x), Operand("ids", ids), Operand("weights", weights), Operand("w_gate_up", w_gate_up),
                Operand("w_down", w_down)]
    if op == "moe":
        operands.append(Operand("y", output(op, "y", tensors, (x.dtype,), x.shape, x), True))
    else:
        operands.insert(0, Operand("dy", _rank2(op, "dy", tensors, (x.dtype,), x.shape)))
        for name, desc in (("dx", x), ("dweights", weights), ("dw_gate_up", w_gate_up), ("dw_down", w_down)):
            operands.append(Operand(name, output(op, name, tensors, (desc.dtype,), desc.shape, desc), True))
    return MoeProblem(op, tuple(operands), (*normal, *more), policy=policy, tokens=tokens, topk=ids.shape[1], hidden=hidden,
                      experts=experts, inter=inter, first=first, activation=activation)


def make_moe(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MoeProblem:
    return _layer("moe", tensors, attrs, policy)


def make_moe_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MoeProblem:
    return _layer("moe_backward", tensors, attrs, policy)


def make_quantized(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MoeProblem:
    op, context = "moe_quantized", describe(tensors)
    x = _rank2(op, "x", tensors, (F32, F16, BF16))
    tokens, hidden = x.shape
    ids = _assignments(op, "ids", tensors, IDS, tokens)
    weights = _rank2(op, "weights", tensors, (F32,), ids.shape)
    w_gate_up = operand(op, "w_gate_up", tensors, (E4M3, S8, U8))
    w_down = operand(op, "w_down", tensors, (w_gate_up.dtype,))
    packs = 2 if w_gate_up.dtype is U8 else 1
    if w_gate_up.rank != 3 or w_gate_up.shape[1] % 2 or w_gate_up.shape[2] != -(-hidden // packs):
        raise expected(op, "shape of w_gate_up", list(w_gate_up.shape), ["experts", "2 * inter", -(-hidden // packs)], context)
    experts, both, _ = w_gate_up.shape
    check_integer(op, "experts (first extent of w_gate_up)", experts, 1, MAX_EXPERTS, context)
    check_shape(op, "w_down", w_down, (experts, hidden, -(-(both // 2) // packs)), tensors)
    rows, columns = check_integers(op, "block", attrs.get("block", (1, 128)), 2, 1, context)
    operands = [Operand("x", x), Operand("ids", ids), Operand("weights", weights)]
    for name, desc, extents in (("gate_up", w_gate_up, (both, hidden)), ("down", w_down, (hidden, both // 2))):
        shape = (experts, -(-extents[0] // rows), -(-extents[1] // columns))
        check_reach(op, f"w_{name}", desc, context)
        operands += [Operand(f"w_{name}", desc), Operand(f"scale_{name}", operand(op, f"scale_{name}", tensors, (F32, F16, BF16), shape))]
    activation, normal = _activation(op, attrs)
    first, more = _first(op, attrs, experts)
    normal += [("block", (rows, columns))] if (rows, columns) != (1, 128) else []
    operands.append(Operand("y", output(op, "y", tensors, (x.dtype,), x.shape, x), True))
    return MoeProblem(op, tuple(operands), (*normal, *more), policy=policy, tokens=tokens, topk=ids.shape[1], hidden=hidden,
                      experts=experts, inter=both // 2, first=first, activation=activation, block=(rows, columns))


def make_exchanged(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MoeProblem:
    op = "moe_exchanged"
    x = _rank2(op, "x", tensors, FLOATS)
    w_gate_up, w_down = _experts(op, tensors, x.dtype, x.shape[1])
    experts, _, inter = w_down.shape
    counts = _rank2(op, "counts", tensors, IDS)
    if counts.shape[1] != experts or prod(counts.shape) > MAX_EXTENT:
        raise expected(op, "shape of counts", list(counts.shape), ["sources", experts], describe(tensors))
    check_integer(op, "sources (rows of counts)", counts.shape[0], 1, context=describe(tensors))
    check_integer(op, "rows of x", x.shape[0], 0, MAX_EXTENT // 2, describe(tensors))
    activation, normal = _activation(op, attrs)
    y = output(op, "y", tensors, (x.dtype,), x.shape, x)
    return MoeProblem(op, (Operand("x", x), Operand("counts", counts), Operand("w_gate_up", w_gate_up), Operand("w_down", w_down),
                           Operand("y", y, True)), tuple(normal), policy=policy, tokens=x.shape[0], topk=1, hidden=x.shape[1],
                      experts=experts, inter=inter, activation=activation)


_LAYER = ("x", "ids", "weights", "w_gate_up", "w_down")
_ATTRS = (("activation", "silu"), ("first_expert", 0))
DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("moe_permute", ("x", "ids"), ("xs", "order", "inverse", "counts"), make_permute, attrs=(("experts", None), ("first_expert", 0))),
    OpDef("moe_unpermute", ("ys", "inverse", "weights"), ("y",), make_unpermute, ("weights",)),
    OpDef("moe_unpermute_backward", ("dy", "ys", "inverse", "weights"), ("dys", "dweights"), make_unpermute_backward),
    OpDef("moe", _LAYER, ("y",), make_moe, attrs=_ATTRS),
    OpDef("moe_backward", ("dy", *_LAYER), ("dx", "dweights", "dw_gate_up", "dw_down"), make_moe_backward, attrs=_ATTRS),
    OpDef("moe_quantized", ("x", "ids", "weights", "w_gate_up", "scale_gate_up", "w_down", "scale_down"), ("y",), make_quantized,
          attrs=(("activation", "silu"), ("block", (1, 128)), ("first_expert", 0))),
    OpDef("moe_exchanged", ("x", "counts", "w_gate_up", "w_down"), ("y",), make_exchanged, attrs=(("activation", "silu"),)),
)
