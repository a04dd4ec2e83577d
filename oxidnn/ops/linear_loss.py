"""Softmax cross-entropy of a linear layer, logits = x @ w^T + bias, whose logits are never in memory all at once.

    linear_cross_entropy x=bf16[N,H] w=bf16[V,H] target=s64[N]                    loss (and dx, dw, dbias under return_gradients)
    linear_cross_entropy_backward ... d_loss=f32[]                                dx, dw, and dbias with a bias

Rows, reductions, weight, ignore_index, label_smoothing and targets out of range are those of cross_entropy. Sums are made in f32 (f64 for
f64), also those of dw over all rows; logits and their gradients are rounded to the type of x, as between layers. Gradients may be given in
the type of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import F32, F64, S32, S64, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_bool, check_choice, check_integer, check_number, describe, operand, output

_INPUTS = ("x", "w", "target", "bias", "weight")
GRADIENTS = {"x": "dx", "w": "dw", "bias": "dbias"}


@dataclass(frozen=True)
class LinearCrossEntropyProblem(Problem):
    """rows, features, classes: extents of x (rows, features) and w (classes, features)."""

    reduction: str = "mean"
    smoothing: float = 0.0
    ignore_index: int = -100

    @property
    def rows(self) -> int:
        return self.desc("x").shape[0]

    @property
    def features(self) -> int:
        return self.desc("x").shape[1]

    @property
    def classes(self) -> int:
        return self.desc("w").shape[0]

    @property
    def accumulator(self) -> DType:
        return F64 if self.desc("x").dtype is F64 else F32

    @property
    def has_gradients(self) -> bool:
        return self.has("dx")

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.features * self.classes * (3 if self.has_gradients else 1)


def _make(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LinearCrossEntropyProblem:
    context = describe(tensors)
    x = operand(op, "x", tensors, FLOATS)
    if x.rank != 2:
        raise expected(op, "shape of x", list(x.shape), "(rows, features)", context)
    w = operand(op, "w", tensors, (x.dtype,))
    if w.rank != 2 or w.shape[0] < 1 or w.shape[1] != x.shape[1]:
        raise expected(op, "shape of w", list(w.shape), f"(classes, {x.shape[1]}) with at least one class", context)
    rows, classes, kind = x.shape[0], w.shape[0], F64 if x.dtype is F64 else F32
    operands = [Operand("x", x), Operand("w", w), Operand("target", operand(op, "target", tensors, (S64, S32), (rows,)))]
    operands += [Operand(n, operand(op, n, tensors, FLOATS, (classes,))) for n in ("bias", "weight") if n in tensors]
    reduction = check_choice(op, "reduction", attrs.get("reduction", "mean"), ("none", "mean", "sum"))
    smoothing = check_number(op, "label_smoothing", attrs.get("label_smoothing", 0.0))
    if not 0.0 <= smoothing <= 1.0:
        raise expected(op, "label_smoothing", smoothing, "a number in [0, 1]")
    ignore_index = check_integer(op, "ignore_index", attrs.get("ignore_index", -100), -(2**63), 2**63 - 1)
    wants_loss = op == "linear_cross_entropy"
    wants_gradients = not wants_loss or check_bool(op, "return_gradients", attrs.get("return_gradients", False))
    normal: list[tuple[str, Any]] = [("reduction", reduction)] if reduction != "mean" else []
    normal += [("label_smoothing", smoothing)] if smoothing else []
    normal += [("ignore_index", ignore_index)] if ignore_index != -100 else []
    normal += [("return_gradients", True)] if wants_loss and wants_gradients else []
    loss_shape = (rows,) if reduction == "none" else ()
    if "d_loss" in tensors:
        operands.append(Operand("d_loss", operand(op, "d_loss", tensors, FLOATS, loss_shape)))
    if wants_loss:
        loss = output(op, "loss", tensors, tuple(dict.fromkeys((x.dtype, kind))), loss_shape, TensorDesc.packed(x.dtype, loss_shape))
        operands.append(Operand("loss", loss, True))
    for name, gradient in GRADIENTS.items():
        if wants_gradients and name in tensors:
            source = tensors[name]
            allowed = tuple(dict.fromkeys((source.dtype, kind)))
            operands.append(Operand(gradient, output(op, gradient, tensors, allowed, source.shape, source), True))
        elif gradient in tensors:
            raise expected(op, gradient, "given", "no tensor without return_gradients=True and the input it is the gradient by", context)
    return LinearCrossEntropyProblem(op, tuple(operands), tuple(normal), policy=policy, reduction=reduction, smoothing=smoothing,
                                     ignore_index=ignore_index)


def make_loss(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LinearCrossEntropyProblem:
    return _make("linear_cross_entropy", tensors, attrs, policy)


def make_loss_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LinearCrossEntropyProblem:
    return _make("linear_cross_entropy_backward", tensors, attrs, policy)


_ATTRS = (("reduction", "mean"), ("label_smoothing", 0.0), ("ignore_index", -100))
DEFINITIONS = (
    OpDef("linear_cross_entropy", _INPUTS, ("loss", *GRADIENTS.values()), make_loss, optional=("bias", "weight"),
          attrs=(*_ATTRS, ("return_gradients", False))),
    OpDef("linear_cross_entropy_backward", (*_INPUTS, "d_loss"), tuple(GRADIENTS.values()), make_loss_backward,
          optional=("bias", "weight", "d_loss"), attrs=_ATTRS),
)
