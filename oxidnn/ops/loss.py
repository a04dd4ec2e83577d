"""Softmax, log-softmax, softmax cross-entropy and negative log-likelihood over one dimension of a tensor, with gradients.

Cross-entropy follows PyTorch's CrossEntropyLoss: logits (N, C, spatial); target holds class indices (N, spatial), or probabilities of
logits' shape. "mean" divides by the summed weights of the targets that are not ignored (by the number of rows for probabilities), so the
mean over nothing is NaN. A target outside [0, C) that is not ignore_index reads no memory: its loss, its gradient, and any sum or mean
that holds it are NaN. nll is the same of logits that are logarithms of probabilities already (of class indices, without smoothing).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ..dtypes import F32, F64, S32, S64
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_bool, check_choice, check_integer, check_number, is_integer, operand, output


@dataclass(frozen=True)
class SoftmaxProblem(Problem):
    """axis: the dimension that is normalised, not negative. is_log: log-softmax."""

    axis: int = 0
    is_log: bool = False

    @property
    def flops(self) -> int:
        return 8 * self.outputs[0].desc.numel


@dataclass(frozen=True)
class CrossEntropyProblem(Problem):
    """The classes are dimension 1 of logits. is_probability: target holds probabilities instead of class indices."""

    reduction: str = "mean"
    smoothing: float = 0.0
    ignore_index: int = -100
    is_probability: bool = False

    @property
    def is_log(self) -> bool:
        """logits hold logarithms of probabilities."""
        return self.op.startswith("nll")

    @property
    def rows(self) -> int:
        shape = self.desc("logits").shape
        return shape[0] * prod(shape[2:])

    @property
    def flops(self) -> int:
        return 8 * self.desc("logits").numel


def _softmax_attrs(op: str, shape: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[int, bool, tuple[tuple[str, Any], ...]]:
    axis, is_log = attrs.get("axis", -1), check_bool(op, "log", attrs.get("log", False))
    rank = len(shape)
    if not is_integer(axis, -rank, rank - 1):
        raise expected(op, "axis", axis, f"an integer in [{-rank}, {rank})", f"The tensor is {shape}.")
    axis = int(axis) % rank
    normal: tuple[tuple[str, Any], ...] = (("axis", axis),) if axis != rank - 1 else ()
    return axis, is_log, normal + ((("log", True),) if is_log else ())


def _make_softmax(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> SoftmaxProblem:
    x = operand("softmax", "x", tensors, FLOATS)
    axis, is_log, normal = _softmax_attrs("softmax", x.shape, attrs)
    operands = (Operand("x", x), Operand("y", output("softmax", "y", tensors, (x.dtype,), x.shape, x), True))
    return SoftmaxProblem("softmax", operands, normal, policy=policy, axis=axis, is_log=is_log)


def _make_softmax_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> SoftmaxProblem:
    op = "softmax_backward"
    dy = operand(op, "dy", tensors, FLOATS)
    axis, is_log, normal = _softmax_attrs(op, dy.shape, attrs)
    y = operand(op, "y", tensors, (dy.dtype,), dy.shape)
    operands = (Operand("dy", dy), Operand("y", y), Operand("dx", output(op, "dx", tensors, (dy.dtype,), dy.shape, dy), True))
    return SoftmaxProblem(op, operands, normal, policy=policy, axis=axis, is_log=is_log)


_SOFTMAX_ATTRS = (("axis", -1), ("log", False))
_LOSS_ATTRS = (("reduction", "mean"), ("label_smoothing", 0.0), ("ignore_index", -100))


def _make_cross_entropy(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> CrossEntropyProblem:
    logits = operand(op, "logits", tensors, FLOATS)
    if logits.rank < 2 or logits.shape[1] < 1:
        raise expected(op, "logits' shape", logits.shape, "(N, C, spatial...) with C >= 1")
    rows = (logits.shape[0], *logits.shape[2:])
    target = tensors.get("target")
    is_probability = target is not None and target.dtype.is_float and not op.startswith("nll")
    target = operand(op, "target", tensors, FLOATS if is_probability else (S64, S32), logits.shape if is_probability else rows)
    reduction = check_choice(op, "reduction", attrs.get("reduction", "mean"), ("none", "mean", "sum"))
    smoothing = check_number(op, "label_smoothing", attrs.get("label_smoothing", 0.0))
    if not 0.0 <= smoothing <= 1.0:
        raise expected(op, "label_smoothing", smoothing, "a number in [0, 1]")
    ignore_index = check_integer(op, "ignore_index", attrs.get("ignore_index", -100), -(2**63), 2**63 - 1)
    normal: list[tuple[str, Any]] = []
    if reduction != "mean":
        normal.append(("reduction", reduction))
    if smoothing:
        normal.append(("label_smoothing", smoothing))
    if ignore_index != -100:
        normal.append(("ignore_index", ignore_index))
    operands = [Operand("logits", logits), Operand("target", target)]
    if "weight" in tensors:
        operands.append(Operand("weight", operand(op, "weight", tensors, FLOATS, (logits.shape[1],))))
    loss_shape = rows if reduction == "none" else ()
    if not op.endswith("_backward"):
        kinds = tuple(dict.fromkeys((logits.dtype, F64 if logits.dtype is F64 else F32)))
        loss = output(op, "loss", tensors, kinds, loss_shape, TensorDesc.packed(logits.dtype, loss_shape))
        operands.append(Operand("loss", loss, True))
    else:
        if "d_loss" in tensors:
            operands.append(Operand("d_loss", operand(op, "d_loss", tensors, FLOATS, loss_shape)))
        operands.append(Operand("d_logits", output(op, "d_logits", tensors, (logits.dtype,), logits.shape, logits), True))
    return CrossEntropyProblem(op, tuple(operands), tuple(normal), policy=policy, reduction=reduction, smoothing=smoothing,
                               ignore_index=ignore_index, is_probability=is_probability)


def _make_loss(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> CrossEntropyProblem:
    return _make_cross_entropy("cross_entropy", tensors, attrs, policy)


def _make_loss_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> CrossEntropyProblem:
    return _make_cross_entropy("cross_entropy_backward", tensors, attrs, policy)


def _make_nll(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> CrossEntropyProblem:
    return _make_cross_entropy("nll", tensors, attrs, policy)


def _make_nll_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> CrossEntropyProblem:
    return _make_cross_entropy("nll_backward", tensors, attrs, policy)


_NLL_ATTRS = (("reduction", "mean"), ("ignore_index", -100))
DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("softmax", ("x",), ("y",), _make_softmax, attrs=_SOFTMAX_ATTRS),
    OpDef("softmax_backward", ("dy", "y"), ("dx",), _make_softmax_backward, attrs=_SOFTMAX_ATTRS),
    OpDef("cross_entropy", ("logits", "target", "weight"), ("loss",), _make_loss, optional=("weight",), attrs=_LOSS_ATTRS),
    OpDef("cross_entropy_backward", ("logits", "target", "weight", "d_loss"), ("d_logits",), _make_loss_backward,
          optional=("weight", "d_loss"), attrs=_LOSS_ATTRS),
    OpDef("nll", ("logits", "target", "weight"), ("loss",), _make_nll, optional=("weight",), attrs=_NLL_ATTRS),
    OpDef("nll_backward", ("logits", "target", "weight", "d_loss"), ("d_logits",), _make_nll_backward, optional=("weight", "d_loss"),
          attrs=_NLL_ATTRS),
)
