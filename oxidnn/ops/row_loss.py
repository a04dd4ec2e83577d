"""Losses of rows (the last dimension) and their gradients: rows of LOSSES, expressions over sums along the row.

    row_loss x=f16[8,64] x2=f16[8,64] target=s64[8] name=cosine_embedding margin=0.2     loss
    row_loss x=f16[8,64] x2=f16[8,64] x3=f16[8,64] name=triplet_margin                   loss
    row_loss_backward ... d_loss=f16[]                                                   dx, dx2, dx3

"mean" divides by the number of rows; over none it is NaN, "sum" is 0. Formulas and defaults are those of PyTorch's functions. Sums are
made in f32 (f64 for f64), in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from .. import dtypes
from ..codegen.pointwise import Expression, const, parse, plus
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_choice, check_number, describe, operand, output
from .pointwise import STORED

TENSORS = ("x", "x2", "x3")
_STORED = tuple(dtypes.dtype(name) for name in STORED)


@dataclass(frozen=True)
class RowLoss:
    """terms: what is summed along a row, by the exponent `p`. finish: the loss from the sums s0, s1, ... and target; margin and eps are
    operands of both that become constants."""

    tensors: tuple[str, ...]
    terms: Mapping[int, str]
    finish: Mapping[int, str]
    has_target: bool = False
    margin: float = 0.0
    eps: float = 0.0


_COSINE = "(c := s0 / (sqrt(s1 + eps) * sqrt(s2 + eps)))"
LOSSES = {
    "cosine_embedding": RowLoss(("x", "x2"), {2: "x * x2, x * x, x2 * x2"},
                                {2: f"where(target == 1, 1 - {_COSINE}, 0) + where(target == -1, relu(c - margin), 0)"}, True, eps=1e-12),
    "triplet_margin": RowLoss(TENSORS, {1: "abs(x - x2 + eps), abs(x - x3 + eps)", 2: "square(x - x2 + eps), square(x - x3 + eps)"},
                              {1: "relu(s0 - s1 + margin)", 2: "relu(sqrt(s0) - sqrt(s1) + margin)"}, margin=1.0, eps=1e-6),
}


@dataclass(frozen=True)
class RowLossProblem(Problem):
    """terms: the sums, over x, x2, x3. finish: the loss, over s0, s1, ... and target."""

    terms: Expression = None  # type: ignore[assignment]
    finish: Expression = None  # type: ignore[assignment]
    reduction: str = "mean"

    @property
    def rows(self) -> int:
        return prod(self.desc("x").shape[:-1])

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(n for n in TENSORS if self.has(n))

    @property
    def sum_gradients(self) -> Expression:
        """dy times the derivative of the loss by each sum."""
        return Expression("tuple", tuple(self.finish.differentiate(f"s{k}") for k in range(self.terms.num_outputs)))

    @property
    def gradients(self) -> Expression:
        """The gradient by each tensor, over the tensors and g0, g1, ..., the gradients by the sums."""
        found = []
        for name in self.tensors:
            total: Expression = const(0)
            for k, term in enumerate(self.terms.outputs):
                if name in term.args:
                    total = plus(total, term.differentiate(name).substitute({"dy": parse(f"g{k}")}))
            found.append(total)
        return Expression("tuple", tuple(found))

    @property
    def flops(self) -> int:
        return 8 * self.desc("x").numel


def _make(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> RowLossProblem:
    name = check_choice(op, "name", attrs.get("name"), tuple(LOSSES))
    row = LOSSES[name]
    x = operand(op, "x", tensors, FLOATS)
    if x.rank < 1 or x.shape[-1] < 1:
        raise expected(op, "shape of x", list(x.shape), "(rows..., D) with D >= 1")
    rows = x.shape[:-1]
    operands = [Operand("x", x)]
    for other in ("x2", "x3", "target"):
        wanted = row.has_target if other == "target" else other in row.tensors
        if (other in tensors) != wanted:
            given, article = ("missing", "a") if wanted else ("given", "no")
            raise expected(op, other, given, f"{article} tensor for {name}", describe(tensors))
        if wanted and other == "target":
            operands.append(Operand(other, operand(op, other, tensors, _STORED, rows)))
        elif wanted:
            operands.append(Operand(other, operand(op, other, tensors, (x.dtype,), x.shape)))
    reduction = check_choice(op, "reduction", attrs.get("reduction", "mean"), ("mean", "none", "sum"))
    p = attrs.get("p", 2)
    if isinstance(p, bool) or p not in row.terms:
        raise expected(op, "p", repr(p), " or ".join(map(str, row.terms)))
    margin = check_number(op, "margin", attrs.get("margin", row.margin), dtypes.F32)
    eps = check_number(op, "eps", attrs.get("eps", row.eps), dtypes.F32)
    if eps < 0:
        raise expected(op, "eps", eps, "a number >= 0")
    normal: list[tuple[str, Any]] = [("name", name)]
    normal += [("reduction", reduction)] if reduction != "mean" else []
    normal += [("margin", margin)] if margin != row.margin else []
    normal += [("eps", eps)] if eps != row.eps else []
    normal += [("p", int(p))] if p != 2 else []
    loss_shape = rows if reduction == "none" else ()
    if op == "row_loss":
        loss = output(op, "loss", tensors, (x.dtype,), loss_shape, TensorDesc.packed(x.dtype, loss_shape))
        operands.append(Operand("loss", loss, True))
    else:
        if "d_loss" in tensors:
            operands.append(Operand("d_loss", operand(op, "d_loss", tensors, FLOATS, loss_shape)))
        operands += [Operand(f"d{n}", output(op, f"d{n}", tensors, (x.dtype,), x.shape, tensors[n]), True) for n in row.tensors]
        if "dx3" in tensors and "x3" not in row.tensors:
            raise expected(op, "dx3", "given", f"no tensor for {name}", describe(tensors))
    numbers = {"margin": const(margin), "eps": const(eps)}
    return RowLossProblem(op, tuple(operands), tuple(normal), policy=policy, terms=parse(row.terms[p]).substitute(numbers),
                          finish=parse(row.finish[p]).substitute(numbers), reduction=reduction)


def make_loss(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    return _make("row_loss", tensors, attrs, policy)


def make_loss_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    return _make("row_loss_backward", tensors, attrs, policy)


_ATTRS = (("name", None), ("reduction", "mean"), ("margin", None), ("eps", None), ("p", 2))
DEFINITIONS = (
    OpDef("row_loss", (*TENSORS, "target"), ("loss",), make_loss, optional=("x2", "x3", "target"), attrs=_ATTRS),
    OpDef("row_loss_backward", (*TENSORS, "target", "d_loss"), ("dx", "dx2", "dx3"), make_loss_backward,
          optional=("x2", "x3", "target", "d_loss"), attrs=_ATTRS),
)
