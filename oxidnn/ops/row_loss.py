"""Losses of rows (the last dimension) and their gradients: rows of LOSSES, expressions over sums along the row.

    row_loss x=f16[8,64] x2=f16[8,64] target=s64[8] name=cosine_embedding margin=0.2     loss
    row_loss x=f16[8,64] x2=f16[8,64] x3=f16[8,64] name=triplet_margin                   loss
    row_loss x=f16[8,64] target=s64[8] weight=f32[64] name=multi_margin p=2              loss
    row_loss x=f16[8,64] target=s64[8,64] name=multilabel_margin                         loss
    row_loss x=f16[8,64] target=u8[8,64] weight=f32[64] name=multilabel_soft_margin      loss
    row_loss_backward ... d_loss=f16[]                                                   dx, dx2, dx3

"mean" divides by the number of rows; over none it is NaN, "sum" is 0. Formulas and defaults are those of PyTorch's functions. Sums are
made in f32 (f64 for f64), in a fixed order. A target class outside the row (multi_margin; multilabel_margin before the first negative
one, which ends its list) reads no memory: the loss and gradients of its row are NaN.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """terms: what is summed along a row, by the exponent `p` (the first is the default). finish: the loss from the sums s0, s1, ... and
    target; margin, eps and classes (the row's length) are operands of both that become constants.

    target: "" none, "row" a number a row, "class" a class a row, "full" a number an element, "classes" a list of classes a row. Terms of a
    class are also over `own`, the target's element, and `hit`, 1 there and 0 elsewhere; their finish over `weight`, that of the class.
    slopes: a class's terms differentiated by x, where that is no target.
    """

    tensors: tuple[str, ...]
    terms: Mapping[int, str]
    finish: Mapping[int, str]
    target: str = ""
    margin: float = 0.0
    eps: float = 0.0
    takes_weight: bool = False
    slopes: Mapping[int, str] = field(default_factory=dict)

    @property
    def p(self) -> int:
        return next(iter(self.terms))


_HINGE = "relu(margin - own + x)"
_COSINE = "(c := s0 / (sqrt(s1 + eps) * sqrt(s2 + eps)))"
LOSSES = {
    "cosine_embedding": RowLoss(("x", "x2"), {2: "x * x2, x * x, x2 * x2"},
                                {2: f"where(target == 1, 1 - {_COSINE}, 0) + where(target == -1, relu(c - margin), 0)"}, "row", eps=1e-12),
    "triplet_margin": RowLoss(TENSORS, {2: "square(x - x2 + eps), square(x - x3 + eps)", 1: "abs(x - x2 + eps), abs(x - x3 + eps)"},
                              {1: "relu(s0 - s1 + margin)", 2: "relu(sqrt(s0) - sqrt(s1) + margin)"}, margin=1.0, eps=1e-6),
    "multi_margin": RowLoss(("x",), {1: f"where(hit == 1, 0, {_HINGE})", 2: f"where(hit == 1, 0, square({_HINGE}))"},
                            dict.fromkeys((1, 2), "weight * s0 / classes"), "class", margin=1.0, takes_weight=True,
                            slopes={1: "where(hit == 1, 0, where(margin - own + x > 0, 1, 0))", 2: f"where(hit == 1, 0, 2 * {_HINGE})"}),
    "multilabel_margin": RowLoss(("x",), {1: "0"}, {1: "0"}, "classes"),  # engines.multilabel has it
    "multilabel_soft_margin": RowLoss(("x",), {1: "weight * (target * softplus(-x) + (1 - target) * softplus(x))"}, {1: "s0 / classes"},
                                      "full", takes_weight=True),
}


@dataclass(frozen=True)
class RowLossProblem(Problem):
    """terms: the sums, over x, x2, x3, and what RowLoss says. finish: the loss, over s0, s1, ... and target. slope: see RowLoss.slopes; it
    is the last sum of a gradient."""

    terms: Expression = None  # type: ignore[assignment]
    finish: Expression = None  # type: ignore[assignment]
    reduction: str = "mean"
    slope: Expression | None = None

    @property
    def row(self) -> RowLoss:
        return LOSSES[dict(self.attrs)["name"]]

    @property
    def rows(self) -> int:
        return prod(self.desc("x").shape[:-1])

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(n for n in TENSORS if self.has(n))

    @property
    def sum_gradients(self) -> Expression:
        """dy times the derivative of the loss by each sum."""
        return Expression("tuple", tuple(self.finish.differentiate(s) for s in sorted(self.finish.args) if re.fullmatch(r"s\d", s)))

    @property
    def gradients(self) -> Expression:
        """The gradient by each tensor, over the tensors and g0, g1, ..., the gradients by the sums."""
        if self.slope is not None:  # the target's element lessens every other's term
            return Expression("tuple", (parse("g0 * where(hit == 1, -s1, slope)").substitute({"slope": self.slope}),))
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
    for other in ("x2", "x3", "target", "weight"):
        wanted = other in row.tensors
        if other in ("target", "weight"):
            wanted = row.target != "" if other == "target" else row.takes_weight and other in tensors
        if (other in tensors) != wanted:
            given, article = ("missing", "a") if wanted else ("given", "no")
            raise expected(op, other, given, f"{article} tensor for {name}", describe(tensors))
        if wanted and other == "target":
            kinds = (dtypes.S64, dtypes.S32) if row.target in ("class", "classes") else _STORED
            operands.append(Operand(other, operand(op, other, tensors, kinds, rows if row.target in ("row", "class") else x.shape)))
        elif wanted and other == "weight":
            operands.append(Operand(other, operand(op, other, tensors, FLOATS, x.shape[-1:])))
        elif wanted:
            operands.append(Operand(other, operand(op, other, tensors, (x.dtype,), x.shape)))
    reduction = check_choice(op, "reduction", attrs.get("reduction", "mean"), ("mean", "none", "sum"))
    p = attrs.get("p", row.p)
    if isinstance(p, bool) or p not in row.terms:
        raise expected(op, "p", repr(p), " or ".join(map(str, row.terms)))
    margin = check_number(op, "margin", attrs.get("margin", row.margin), dtypes.F32)
    eps = check_number(op, "eps", attrs.get("eps", row.eps), dtypes.F32)
    words = {w for text in (*row.terms.values(), *row.finish.values()) for w in re.findall(r"\w+", text)}
    for key, value in (("margin", margin), ("eps", eps)):
        if value != getattr(row, key) and key not in words:
            raise expected(op, key, value, f"none for {name}")
    if eps < 0:
        raise expected(op, "eps", eps, "a number >= 0")
    normal: list[tuple[str, Any]] = [("name", name)]
    normal += [("reduction", reduction)] if reduction != "mean" else []
    normal += [("margin", margin)] if margin != row.margin else []
    normal += [("eps", eps)] if eps != row.eps else []
    normal += [("p", int(p))] if p != row.p else []
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
    numbers = {"margin": const(margin), "eps": const(eps), "classes": const(x.shape[-1])}
    if row.target == "full" and "weight" not in tensors:
        numbers["weight"] = const(1)
    terms, slope = parse(row.terms[p]).substitute(numbers), None
    if op == "row_loss_backward" and row.slopes:
        slope = parse(row.slopes[p]).substitute(numbers)
        terms = Expression("tuple", (terms, slope))
    return RowLossProblem(op, tuple(operands), tuple(normal), policy=policy, terms=terms, finish=parse(row.finish[p]).substitute(numbers),
                          reduction=reduction, slope=slope)


def make_loss(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    return _make("row_loss", tensors, attrs, policy)


def make_loss_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    return _make("row_loss_backward", tensors, attrs, policy)


_INPUTS = (*TENSORS, "target", "weight")
_ATTRS = (("name", None), ("reduction", "mean"), ("margin", None), ("eps", None), ("p", None))
DEFINITIONS = (
    OpDef("row_loss", _INPUTS, ("loss",), make_loss, optional=_INPUTS[1:], attrs=_ATTRS),
    OpDef("row_loss_backward", (*_INPUTS, "d_loss"), ("dx", "dx2", "dx3"), make_loss_backward, optional=(*_INPUTS[1:], "d_loss"),
          attrs=_ATTRS),
)
