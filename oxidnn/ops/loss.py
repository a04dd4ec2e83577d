"""Softmax and its kin, softmax cross-entropy and negative log-likelihood over one dimension of a tensor, with gradients.

    softmax x=f16[8,12,64,64] mask=bool[64,64] scale=0.125 diagonal=0     y = softmax(z) along `axis`, or its logarithm (log)
    gumbel_softmax x=f32[8,64] temperature=0.5 hard=True                  y, soft
    hardmax x=f32[8,64]                                                   y
    softmax_backward dy=f16[8,64] y=f16[8,64] scale=0.125                 dx

The logits z = scale * x, with `mask`, which broadcasts to x's shape: a mask of bool keeps the elements where it is true, one of floats is
added. diagonal: element j of the last dimension, which must be `axis`, is kept in line i of the one before where j - i <= diagonal (0:
causal). What is not kept counts as -inf: its y is 0 (its logarithm -inf) whatever x holds there. Where a row has a mask or a diagonal and
every logit is -inf, y is 0 everywhere; without either it is NaN. A NaN among the logits kept makes its row NaN. out_dtype: y's type, of
the float types, e4m3, e5m2 and s8. return_lse: also lse, the logarithm of the sum of e^z of each row (-inf of an empty one), of x's shape
without `axis`, in the type of the arithmetic.

gumbel_softmax (Jang, Gu and Poole, ICLR 2017; Maddison, Mnih and Teh, ICLR 2017): softmax of (x + g) / temperature, with g = -log(-log u)
for the uniform u (at least 2^-25) that dropout would compare at the same place under the scalars seed and offset: the same numbers in
every layout, type and launch. hard: y is 1 at the largest logit, the first of equals, else 0, and soft the softmax; the straight-through
gradient is softmax_backward of (dy, soft) with scale 1 / temperature. hardmax: as hard, without noise. Rows with NaN or +inf are NaN.

softmax_backward: dx = scale * y (dy - sum of dy y), of the logarithm scale * (dy - e^y sum of dy). masked: elements where the logarithm y
is -inf are constants: their dx is 0 and their dy counts nowhere. An added mask's gradient is dx without scale, summed over what broadcasts.

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

import numpy as np

from ..dtypes import BOOL, F32, F64, S32, S64, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, MAX_EXTENT, check_bool, check_choice, check_integer, check_number, describe, is_integer, operand, output
from .epilogue import accumulator_of, result_kind
from .random import DRAW


@dataclass(frozen=True)
class SoftmaxProblem(Problem):
    """axis: the dimension that is normalised, not negative. is_log: log-softmax. scale: of the logits. diagonal: the last one kept, if not
    all are. is_hard: the result is 1 at the largest logit. is_random: Gumbel noise is added. masked: see softmax_backward."""

    axis: int = 0
    is_log: bool = False
    scale: float = 1.0
    diagonal: int | None = None
    is_hard: bool = False
    is_random: bool = False
    masked: bool = False

    @property
    def is_masked(self) -> bool:
        """Whether a row may be empty."""
        return self.has("mask") or self.diagonal is not None

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Every element is read, for the last time, by the thread that writes it."""
        if self.has("soft"):
            return ()
        return tuple((self.outputs[0].name, n) for n in ("x", "dy", "y") if n in [o.name for o in self.inputs])

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


def _mask(op: str, tensors: Mapping[str, TensorDesc], shape: tuple[int, ...]) -> list[Operand]:
    """The mask, if there is one."""
    if "mask" not in tensors:
        return []
    mask = operand(op, "mask", tensors, (BOOL, *FLOATS))
    if mask.rank > len(shape) or any(n not in (1, want) for n, want in zip(mask.shape[::-1], shape[::-1], strict=False)):
        raise expected(op, "shape of mask", list(mask.shape), f"one that broadcasts to {list(shape)}", describe(tensors))
    return [Operand("mask", mask)]


def _scale(op: str, attrs: Mapping[str, Any], kind: DType) -> tuple[float, tuple[tuple[str, Any], ...]]:
    scale = check_number(op, "scale", attrs.get("scale", 1.0), F64 if kind is F64 else F32)
    return scale, (("scale", scale),) if scale != 1 else ()


def _make_softmax(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> SoftmaxProblem:
    x = operand("softmax", "x", tensors, FLOATS)
    axis, is_log, normal = _softmax_attrs("softmax", x.shape, attrs)
    scale, more = _scale("softmax", attrs, x.dtype)
    diagonal = attrs.get("diagonal")
    if diagonal is not None:
        diagonal = check_integer("softmax", "diagonal", diagonal, -MAX_EXTENT)
        if x.rank < 2 or axis != x.rank - 1:
            raise expected("softmax", "diagonal", diagonal, "None where axis is not the last of two dimensions or more", describe(tensors))
        more += (("diagonal", diagonal),)
    kind = result_kind("softmax", tensors, attrs, x)
    more += (("out_dtype", kind.name),) if kind is not x.dtype else ()
    operands = [Operand("x", x), *_mask("softmax", tensors, x.shape),
                Operand("y", output("softmax", "y", tensors, (kind,), x.shape, x), True)]
    if check_bool("softmax", "return_lse", attrs.get("return_lse", False)):
        more += (("return_lse", True),)
        shape = x.shape[:axis] + x.shape[axis + 1:]
        lse = output("softmax", "lse", tensors, (accumulator_of(x.dtype),), shape, TensorDesc.packed(x.dtype, shape))
        operands.append(Operand("lse", lse, True))
    return SoftmaxProblem("softmax", tuple(operands), normal + more, policy=policy, axis=axis, is_log=is_log, scale=scale,
                          diagonal=diagonal)


def _make_softmax_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> SoftmaxProblem:
    op = "softmax_backward"
    dy = operand(op, "dy", tensors, FLOATS)
    axis, is_log, normal = _softmax_attrs(op, dy.shape, attrs)
    scale, more = _scale(op, attrs, dy.dtype)
    masked = check_bool(op, "masked", attrs.get("masked", False))
    y = operand(op, "y", tensors, (dy.dtype,), dy.shape)
    operands = (Operand("dy", dy), Operand("y", y), Operand("dx", output(op, "dx", tensors, (dy.dtype,), dy.shape, dy), True))
    return SoftmaxProblem(op, operands, normal + more + ((("masked", True),) if masked else ()), policy=policy, axis=axis, is_log=is_log,
                          scale=scale, masked=masked)


def _make_gumbel(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> SoftmaxProblem:
    op = "gumbel_softmax"
    x = operand(op, "x", tensors, FLOATS)
    axis, _, normal = _softmax_attrs(op, x.shape, attrs)
    temperature = check_number(op, "temperature", attrs.get("temperature", 1.0), F32)
    if not temperature >= float(np.finfo(np.float32).tiny):
        raise expected(op, "temperature", repr(temperature), "a number above 0 (at least 1.2e-38)")
    is_hard = check_bool(op, "hard", attrs.get("hard", False))
    operands = [Operand("x", x), *_mask(op, tensors, x.shape)]
    operands += [Operand(n, output(op, n, tensors, (x.dtype,), x.shape, x), True) for n in (("y", "soft") if is_hard else ("y",))]
    normal += ((("temperature", temperature),) if temperature != 1 else ()) + ((("hard", True),) if is_hard else ())
    return SoftmaxProblem(op, tuple(operands), normal, DRAW, policy=policy, axis=axis, scale=1 / temperature, is_hard=is_hard,
                          is_random=True)


def _make_hardmax(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> SoftmaxProblem:
    x = operand("hardmax", "x", tensors, FLOATS)
    axis, _, normal = _softmax_attrs("hardmax", x.shape, attrs)
    operands = (Operand("x", x), Operand("y", output("hardmax", "y", tensors, (x.dtype,), x.shape, x), True))
    return SoftmaxProblem("hardmax", operands, normal, policy=policy, axis=axis, is_hard=True)


_SOFTMAX_ATTRS = (("axis", -1), ("log", False), ("scale", 1.0))
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
    OpDef("softmax", ("x", "mask"), ("y", "lse"), _make_softmax, ("mask",),
          attrs=(*_SOFTMAX_ATTRS, ("diagonal", None), ("out_dtype", None), ("return_lse", False))),
    OpDef("softmax_backward", ("dy", "y"), ("dx",), _make_softmax_backward, attrs=(*_SOFTMAX_ATTRS, ("masked", False))),
    OpDef("gumbel_softmax", ("x", "mask"), ("y", "soft"), _make_gumbel, ("mask",),
          attrs=(("axis", -1), ("temperature", 1.0), ("hard", False))),
    OpDef("hardmax", ("x",), ("y",), _make_hardmax, attrs=(("axis", -1),)),
    OpDef("cross_entropy", ("logits", "target", "weight"), ("loss",), _make_loss, optional=("weight",), attrs=_LOSS_ATTRS),
    OpDef("cross_entropy_backward", ("logits", "target", "weight", "d_loss"), ("d_logits",), _make_loss_backward,
          optional=("weight", "d_loss"), attrs=_LOSS_ATTRS),
    OpDef("nll", ("logits", "target", "weight"), ("loss",), _make_nll, optional=("weight",), attrs=_NLL_ATTRS),
    OpDef("nll_backward", ("logits", "target", "weight", "d_loss"), ("d_logits",), _make_nll_backward, optional=("weight", "d_loss"),
          attrs=_NLL_ATTRS),
)
