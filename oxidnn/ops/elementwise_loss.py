"""Losses with one formula an element, and their gradients: rows of LOSSES, each an expression over x, target and further operands.

    loss x=f16[8,64] target=f16[8,64] name=huber reduction=mean delta=0.5        loss
    loss_backward x=... target=... d_loss=f16[] name=huber delta=0.5             dx, and dx2 or dvar where the loss has x2 or var
    dot x=f16[8,64] x2=f16[8,64]                                                 y, the sum of x * x2

target and x2 have the shape of x; weight, pos_weight and var broadcast to it. weight multiplies each element. "mean" divides by the number
of elements, "batchmean" by x.shape[0]: over nothing they are NaN, "sum" is 0. Formulas and defaults follow PyTorch's functions of
these names. f16 and bf16 are computed, and summed, in f32, and in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .. import dtypes
from ..codegen.pointwise import Expression, arg, parse, scalar, times
from ..dtypes import DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, canonical, check_bool, check_choice, check_dtype, check_number, check_shape, describe, operand, output
from .pointwise import MAX_RANK, STORED, PointwiseProblem, like

REDUCTIONS = ("mean", "none", "sum", "batchmean")
FLAGS = {"log_input": True, "log_target": False, "full": False}
NUMBERS = ("beta", "delta", "margin", "eps")
GRADIENTS = {"x": "dx", "x2": "dx2", "var": "dvar"}
_STORED = tuple(dtypes.dtype(name) for name in STORED)
_D = "(d := x - target)"


@dataclass(frozen=True)
class Loss:
    """text: the loss of an element. numbers: the scalars in it, with their defaults. roles: operands besides x and target.
    flags: attribute -> the text where it is not at its default. full: what is added under full=True. gradients: "dy" times the derivative
    by an operand where `differentiate` would give another one (at ends of domains)."""

    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    full: str = ""
    gradients: Mapping[str, str] = field(default_factory=dict)

    @property
    def attributes(self) -> tuple[str, ...]:
        return (*self.numbers, *self.flags, *(("full",) if self.full else ()))

    @property
    def wrt(self) -> tuple[str, ...]:
        return ("x", *(r for r in self.roles if r in GRADIENTS))


_STIRLING = f"where(target > 1, target * log(target) - target + 0.5 * log({2 * math.pi!r} * target), 0)"
_VAR = "maximum(var, scalar(eps))"
LOSSES: dict[str, Loss] = {
    "mse": Loss("square(x - target)"),
    "l1": Loss("abs(x - target)"),
    "smooth_l1": Loss(f"where(abs({_D}) < scalar(beta), 0.5 * d * d / scalar(beta), abs(d) - 0.5 * scalar(beta))", {"beta": 1.0},
                      gradients={"x": f"dy * where(abs({_D}) < scalar(beta), d / scalar(beta), sign(d))"}),
    "huber": Loss(f"where(abs({_D}) <= scalar(delta), 0.5 * d * d, scalar(delta) * (abs(d) - 0.5 * scalar(delta)))", {"delta": 1.0},
                  gradients={"x": "dy * clamp(x - target, -scalar(delta), scalar(delta))"}),
    # Logarithms end at -100, as PyTorch's.
    "bce": Loss("-(target * maximum(log(x), -100) + (1 - target) * maximum(log1p(-x), -100))",
                gradients={"x": "dy * (x - target) / maximum((1 - x) * x, 1e-12)"}),
    "bce_with_logits": Loss("(1 - target) * softplus(x) + target * softplus(-x)"),
    "kl_div": Loss("where(target == 0, 0, target * log(target)) - target * x", flags={"log_target": "exp(target) * (target - x)"}),
    "poisson_nll": Loss("exp(x) - target * x", {"eps": 1e-8}, flags={"log_input": "x - target * log(x + scalar(eps))"}, full=_STIRLING),
    # The gradient passes a variance below eps as if it were eps.
    "gaussian_nll": Loss(f"0.5 * (log((v := {_VAR})) + square(x - target) / v)", {"eps": 1e-6}, ("var",),
                         full=repr(0.5 * math.log(2 * math.pi)),
                         gradients={"var": f"dy * 0.5 * (1 - square(x - target) / (v := {_VAR})) / v"}),
    "hinge": Loss("relu(scalar(margin) - target * x)", {"margin": 1.0}),
    "squared_hinge": Loss("square(relu(scalar(margin) - target * x))", {"margin": 1.0}),
    "soft_margin": Loss("softplus(-target * x)"),
    "hinge_embedding": Loss("where(target != -1, x, 0) + where(target != 1, relu(scalar(margin) - x), 0)", {"margin": 1.0}),
    "margin_ranking": Loss("relu(scalar(margin) - target * (x - x2))", {"margin": 0.0}, ("x2",)),
}


@dataclass(frozen=True)
class LossProblem(PointwiseProblem):
    """reduction: one of REDUCTIONS. The gradient is a plain pointwise problem. brief: of elements whose sum is rounded to 16 bits."""

    reduction: str = "mean"
    brief: bool = False

    @property
    def is_brief(self) -> bool:
        return self.brief or super().is_brief

    @property
    def divisor(self) -> float:
        """What the sum of the elements' losses is divided by."""
        x = self.desc("x")
        return float({"mean": x.numel, "batchmean": x.shape[0] if x.rank else 1}.get(self.reduction, 1))

    @property
    def is_reduced(self) -> bool:
        return self.op in ("loss", "dot") and self.reduction != "none"

    @property
    def elements(self) -> PointwiseProblem:
        """The problem of a reduced loss before it is reduced: every element's loss, in the compute type."""
        losses = canonical(like(self.desc("x"), dtypes.dtype(self.compute)))
        return replace(self, operands=(*self.inputs, Operand("loss", losses, True)), reduction="none", brief=self.is_brief)


def _row(op: str, attrs: Mapping[str, Any]) -> tuple[Loss, Expression, dict[str, float], list[tuple[str, Any]]]:
    """The row, its expression, the values of its scalars and the attributes as they were given."""
    name = check_choice(op, "name", attrs.get("name"), tuple(LOSSES))
    row = LOSSES[name]
    normal: list[tuple[str, Any]] = [("name", name)]
    text, numbers = row.text, dict(row.numbers)
    for key in NUMBERS:
        value = check_number(op, key, attrs[key], dtypes.F32) if key in attrs else None
        if value is not None and key not in numbers:
            raise expected(op, key, value, f"none for {name} (it takes {', '.join(row.attributes) or 'no attribute of its own'})")
        if value is not None and value != numbers[key]:
            numbers[key] = value
            normal.append((key, value))
    for key, least, text_of in (("beta", 0.0, ">= 0"), ("delta", 5e-324, "> 0"), ("eps", 0.0, ">= 0")):
        if numbers.get(key, least) < least:
            raise expected(op, key, numbers[key], f"a number {text_of}")
    for key, default in FLAGS.items():
        value = check_bool(op, key, attrs.get(key, default))
        if value != default:
            if key not in row.attributes:
                raise expected(op, key, value, f"{default} for {name}")
            text = f"{text} + {row.full}" if key == "full" else row.flags[key]
            normal.append((key, value))
    return row, parse(text), numbers, normal


def _make(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LossProblem:
    x = operand(op, "x", tensors, FLOATS)
    if x.rank > MAX_RANK:
        raise expected(op, "rank of x", x.rank, f"at most {MAX_RANK}")
    row, expression, numbers, normal = _row(op, attrs)
    roles = [*row.roles, *(("pos_weight",) if "pos_weight" in tensors and attrs["name"] == "bce_with_logits" else ())]
    for name in ("x2", "var", "pos_weight"):
        if (name in tensors) != (name in roles):
            given, article = ("given", "no") if name in tensors else ("missing", "a")
            raise expected(op, name, given, f"{article} tensor for {attrs['name']}", describe(tensors))
    reduction = check_choice(op, "reduction", attrs.get("reduction", "mean"), REDUCTIONS)
    normal += [("reduction", reduction)] if reduction != "mean" else []
    names = [n for n in ("x", "target", "x2", "var", "weight", "pos_weight") if n in tensors]
    for name in names[1:]:
        desc = tensors[name]
        check_dtype(op, name, desc, tensors, _STORED if name == "target" else FLOATS)
        if name in ("target", "x2"):
            check_shape(op, name, desc, x.shape, tensors)
        elif desc.rank > x.rank or any(n not in (1, own) for n, own in zip(desc.shape[::-1], x.shape[::-1], strict=False)):
            raise expected(op, f"shape of {name}", list(desc.shape), f"one that broadcasts to {list(x.shape)}", describe(tensors))
    operands = [Operand(n, tensors[n]) for n in names]
    if "pos_weight" in roles:
        expression = parse("(1 - target) * softplus(x) + pos_weight * target * softplus(-x)")
    weight = arg("weight") if "weight" in tensors else 1
    if op == "loss":
        expression = times(expression, weight)
        shape = x.shape if reduction == "none" else ()
        loss = output(op, "loss", tensors, (x.dtype,), shape, x if shape else TensorDesc.packed(x.dtype, shape))
        operands.append(Operand("loss", loss, True))
    else:
        upstream = times(scalar("share"), weight) if reduction in ("mean", "batchmean") else weight
        if "d_loss" in tensors:
            operands.append(Operand("d_loss", operand(op, "d_loss", tensors, FLOATS, x.shape if reduction == "none" else ())))
            upstream = times(arg("d_loss"), upstream)
        gradients = []
        for name in row.wrt:
            text = row.gradients.get(name)
            gradient = parse(text) if text else expression.differentiate(name)
            if name != "var" or tensors["var"].shape == x.shape:
                gradients.append(gradient.substitute({"dy": upstream if isinstance(upstream, Expression) else parse(str(upstream))}))
                desc = output(op, GRADIENTS[name], tensors, (tensors[name].dtype,), x.shape, tensors[name])
                operands.append(Operand(GRADIENTS[name], desc, True))
        expression = gradients[0] if len(gradients) == 1 else Expression("tuple", tuple(gradients))
    for name in GRADIENTS.values():
        if name in tensors and all(o.name != name for o in operands):
            raise expected(op, name, "given", f"no tensor for {attrs['name']}" + (" with a var that broadcasts" if name == "dvar" else ""))
    compute: DType = dtypes.F64 if any(o.desc.dtype is dtypes.F64 for o in operands) else dtypes.F32
    problem = LossProblem(op, tuple(operands), tuple(normal), policy=policy, expression=expression, shape=x.shape, compute=compute.name,
                          reduction=reduction)
    if "share" in expression.scalars:
        numbers["share"] = 1.0 / max(problem.divisor, 1.0)  # of nothing there is no gradient
    values = tuple((n, float(compute.numpy.type(np.float64(numbers[n])))) for n in expression.scalars)
    return replace(problem, values=values)


def make_loss(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    return _make("loss", tensors, attrs, policy)


def make_loss_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    """The gradients by x and, where the loss has them, x2 or var (of x's shape), for the upstream gradient d_loss (default 1)."""
    return _make("loss_backward", tensors, attrs, policy)


def make_dot(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LossProblem:
    """The sum over all elements of their products; y has the type of x unless it is given."""
    op = "dot"
    x = operand(op, "x", tensors, FLOATS)
    if x.rank > MAX_RANK:
        raise expected(op, "rank of x", x.rank, f"at most {MAX_RANK}")
    x2 = operand(op, "x2", tensors, FLOATS, x.shape)
    y = output(op, "y", tensors, (x.dtype, *FLOATS), (), TensorDesc.packed(x.dtype, ()))
    compute = dtypes.F64 if dtypes.F64 in (x.dtype, x2.dtype, y.dtype) else dtypes.F32
    operands = (Operand("x", x), Operand("x2", x2), Operand("y", y, True))
    return LossProblem(op, operands, (), policy=policy, expression=parse("x * x2"), shape=x.shape, compute=compute.name, reduction="sum")


_ATTRS = (("name", None), ("reduction", "mean"), *((n, None) for n in NUMBERS), *FLAGS.items())
_INPUTS = ("x", "target", "x2", "var", "weight", "pos_weight")
DEFINITIONS = (
    OpDef("loss", _INPUTS, ("loss",), make_loss, optional=_INPUTS[2:], attrs=_ATTRS),
    OpDef("loss_backward", (*_INPUTS, "d_loss"), tuple(GRADIENTS.values()), make_loss_backward, optional=(*_INPUTS[2:], "d_loss"),
          attrs=_ATTRS),
    OpDef("dot", ("x", "x2"), ("y",), make_dot),
)
