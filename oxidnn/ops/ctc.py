"""Connectionist temporal classification: the loss of label sequences over all their alignments with frames, and its gradient.

    ctc_loss log_probs=f32[50,16,20] targets=s64[16,30] input_lengths=s64[16] target_lengths=s64[16]      loss (and d_logits)
    ctc_loss_backward ... d_loss=f32[]                                                                    d_logits

log_probs (T, N, C) are logarithms of probabilities, such as softmax(log=True) gives. targets hold classes other than the blank: (N, S), of
which row n begins with target_lengths[n] labels, or all labels one after another, (sum of target_lengths,). Formulas and reductions follow
PyTorch's CTCLoss: "mean" divides each loss by its target's length (at least 1), then takes the mean over the batch.

A target that no alignment of its frames spells has the loss inf, and a gradient of NaN; under zero_infinity both are 0. So has a target of
an empty sequence, unless it is empty, too: then the loss is 0. Lengths outside [0, T] and [0, S], and labels that are no class or are the
blank, read no memory: that sequence's loss and gradient are NaN (labels are not looked at where there are more than T, or no frames).

d_logits is the gradient by logits of which log_probs are the log-softmax: e^log_probs minus what alignments expect of each class. The
log-softmax's own gradient maps it to itself, so it may be passed on as the gradient by log_probs, as PyTorch does. It is 0 beyond a
sequence's frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import S32, S64
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_bool, check_choice, check_integer, describe, operand, output

_INPUTS = ("log_probs", "targets", "input_lengths", "target_lengths")


@dataclass(frozen=True)
class CtcProblem(Problem):
    """blank: the class of no label. frames, sequences, classes: the shape of log_probs."""

    blank: int = 0
    reduction: str = "mean"
    zero_infinity: bool = False

    @property
    def frames(self) -> int:
        return self.desc("log_probs").shape[0]

    @property
    def sequences(self) -> int:
        return self.desc("log_probs").shape[1]

    @property
    def classes(self) -> int:
        return self.desc("log_probs").shape[2]

    @property
    def most_labels(self) -> int:
        """Of a target that can be aligned."""
        return min(self.frames, self.desc("targets").shape[-1])

    @property
    def flops(self) -> int:
        return 24 * self.frames * self.sequences * (self.most_labels + 1) * len(self.outputs)


def _make(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> CtcProblem:
    log_probs = operand(op, "log_probs", tensors, FLOATS)
    if log_probs.rank != 3 or log_probs.shape[2] < 1:
        raise expected(op, "shape of log_probs", list(log_probs.shape), "(T, N, C) with C >= 1", describe(tensors))
    sequences, classes = log_probs.shape[1:]
    targets = operand(op, "targets", tensors, (S64, S32))
    if targets.rank not in (1, 2) or (targets.rank == 2 and targets.shape[0] != sequences):
        raise expected(op, "shape of targets", list(targets.shape), f"({sequences}, S), or (sum of target_lengths,)", describe(tensors))
    lengths = [Operand(n, operand(op, n, tensors, (S64, S32), (sequences,))) for n in _INPUTS[2:]]
    blank = check_integer(op, "blank", attrs.get("blank", 0), 0, classes - 1)
    reduction = check_choice(op, "reduction", attrs.get("reduction", "mean"), ("mean", "none", "sum"))
    zero_infinity = check_bool(op, "zero_infinity", attrs.get("zero_infinity", False))
    wants_loss = op == "ctc_loss"
    wants_gradient = not wants_loss or check_bool(op, "return_gradient", attrs.get("return_gradient", False))
    normal: list[tuple[str, Any]] = [("blank", blank)] if blank else []
    normal += [("reduction", reduction)] if reduction != "mean" else []
    normal += [("zero_infinity", True)] if zero_infinity else []
    normal += [("return_gradient", True)] if wants_loss and wants_gradient else []
    operands = [Operand("log_probs", log_probs), Operand("targets", targets), *lengths]
    loss_shape = (sequences,) if reduction == "none" else ()
    if "d_loss" in tensors:
        operands.append(Operand("d_loss", operand(op, "d_loss", tensors, FLOATS, loss_shape)))
    if wants_loss:
        loss = output(op, "loss", tensors, (log_probs.dtype,), loss_shape, TensorDesc.packed(log_probs.dtype, loss_shape))
        operands.append(Operand("loss", loss, True))
    if wants_gradient:
        operands.append(Operand("d_logits", output(op, "d_logits", tensors, (log_probs.dtype,), log_probs.shape, log_probs), True))
    elif "d_logits" in tensors:
        raise expected(op, "d_logits", "given", "no tensor without return_gradient=True", describe(tensors))
    return CtcProblem(op, tuple(operands), tuple(normal), policy=policy, blank=blank, reduction=reduction, zero_infinity=zero_infinity)


def make_loss(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> CtcProblem:
    return _make("ctc_loss", tensors, attrs, policy)


def make_loss_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> CtcProblem:
    return _make("ctc_loss_backward", tensors, attrs, policy)


_ATTRS = (("blank", 0), ("reduction", "mean"), ("zero_infinity", False))
DEFINITIONS = (
    OpDef("ctc_loss", _INPUTS, ("loss", "d_logits"), make_loss, attrs=(*_ATTRS, ("return_gradient", False))),
    OpDef("ctc_loss_backward", (*_INPUTS, "d_loss"), ("d_logits",), make_loss_backward, optional=("d_loss",), attrs=_ATTRS),
)
