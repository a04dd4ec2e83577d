"""Normalisation by channel: batch, group and instance normalisation, with gradients; batch normalisation over several devices.

    batch_norm x=bf16[8,64,28,28]nhwc gamma=f32[64] beta=f32[64] running_mean=f32[64] running_var=f32[64] training=True momentum=0.1
    group_norm x=bf16[8,64,28,28]nhwc gamma=f32[64] groups=32 eps=1e-05 epilogue="silu(acc)"

x is (N, C, spatial), of any layout. A statistic is of a channel over N and the spatial dimensions (batch), or of a sample's C / groups
neighbouring channels over the spatial dimensions (group; instance: groups = C). y = epilogue((x - mean) / sqrt(var + eps) * gamma + beta)
with the biased variance; gamma and beta are (C,), eps stands inside the root. `residual` is added after that, before what an epilogue
does: "relu(acc + residual)". out_dtype (also 8 bits) and scale_y (y holds result / scale_y) are layer_norm's. Arithmetic is f32 (f64 for
f64 tensors); the variance is of differences from the mean. Statistics of no elements are 0, rstd too. A NaN reaches the values of its own
statistic alone. For statistics of each position too, over N alone, give batch_norm x as (N, C * positions).

batch_norm, training: also new_running_mean = (1 - momentum) running_mean + momentum mean, and new_running_var likewise with the unbiased
variance; one value a channel is refused, no values leave the running statistics as they were. Not training: mean and variance are the
running ones. return_stats: also mean and rstd = 1 / sqrt(var + eps), (C,) or (N, groups), in the type of the arithmetic. return_mask: also
a bit per element, set unless y <= 0: what the gradient of a relu needs. Bit e % 8 of byte e // 8 is that of channel e, where the channels
lie innermost: (N, C / 8, spatial) bytes; else that of spatial position e: (N, C, positions / 8).

Gradients take x, the statistics, and, where a relu ended the epilogue, `mask` or `y`; return_residual gives the gradient before
normalisation's own, that of `residual`. With gamma they give dgamma and dbeta. training=False: the statistics were constants.

Over several devices: batch_norm_stats gives (count, mean, m2 = sum of squared differences) of one device's share, batch_norm_gather makes
mean and rstd of all shares', batch_norm_apply normalises with them; batch_norm_backward_reduce gives the share's sums of the gradient and
of its product with (x - mean) rstd, which are to be summed, and batch_norm_backward_apply takes those sums and the whole count to dx.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from ..codegen.pointwise import Expression
from ..dtypes import F32, F64, U8, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import canonical, check_bool, check_dtype, check_integer, check_number, check_output, check_shape, describe
from .epilogue import accumulator_of, operands_of, resolve_scaled, result_kind, scalars_of

EPS = 1e-5
MOMENTUM = 0.1
_ROLES = ("x", "gamma", "beta", "running_mean", "running_var", "mean", "rstd", "y", "mask", "new_running_mean", "new_running_var")


@dataclass(frozen=True)
class ChannelNormProblem(Problem):
    """shape: x's; of batch_norm_gather (shares, channels). groups: statistics a sample, 0 where they are of the whole batch.
    is_training: the statistics are x's own. epilogue: over "acc" and the operands epilogue_operands, to y."""

    shape: tuple[int, ...] = ()
    groups: int = 0
    eps: float = EPS
    momentum: float = MOMENTUM
    is_training: bool = True
    epilogue: Expression | None = None

    @property
    def channels(self) -> int:
        return self.shape[1]

    @property
    def batches(self) -> int:
        """Samples with statistics of their own."""
        return self.shape[0] if self.groups else 1

    @property
    def row_axes(self) -> tuple[int, ...]:
        """The dimensions a channel's statistic runs over."""
        return tuple(i for i in range(len(self.shape)) if i != 1 and (i or not self.groups))

    @property
    def rows(self) -> int:
        """Values of one channel in a batch."""
        return prod(self.shape[i] for i in self.row_axes)

    @property
    def width(self) -> int:
        """Channels of a statistic."""
        return self.channels // self.groups if self.groups else 1

    @property
    def epilogue_operands(self) -> tuple[str, ...]:
        return tuple(n for n in self.epilogue.args if n != "acc") if self.epilogue is not None else ()

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Every element is read, for the last time, by the thread that writes it."""
        pairs = [("y", "x"), ("y", "residual"), ("dx", "dy"), ("dx", "x"), ("d_residual", "dy"), ("new_running_mean", "running_mean"),
                 ("new_running_var", "running_var")]
        outputs = {o.name for o in self.outputs}
        return tuple((a, b) for a, b in pairs if a in outputs and b not in outputs and self.has(b))

    @property
    def flops(self) -> int:
        return 8 * prod(self.shape)


def channels_innermost(x: TensorDesc) -> bool:
    """Whether neighbouring channels lie closer to each other than neighbouring positions: what masks are packed along."""
    steps = [abs(s) for n, s in zip(x.shape[2:], x.strides[2:], strict=True) if n > 1]
    return not steps or (x.shape[1] > 1 and abs(x.strides[1]) < min(steps))


def mask_desc(x: TensorDesc) -> TensorDesc:
    if channels_innermost(x):
        return canonical(TensorDesc.packed(U8, (x.shape[0], x.shape[1] // 8, *x.shape[2:]), "nhwc"))
    return TensorDesc.packed(U8, (*x.shape[:2], prod(x.shape[2:]) // 8))


def _like(desc: TensorDesc) -> TensorDesc:
    is_last = desc.is_packed("nhwc") and not desc.is_packed("nchw")
    return TensorDesc.packed(desc.dtype, desc.shape, "nhwc" if is_last else "nchw")


def _input(op: str, name: str, tensors: Mapping[str, TensorDesc], shape: tuple[int, ...], *allowed: DType) -> Operand:
    desc = tensors[name]
    check_dtype(op, name, desc, tensors, *((allowed,) if allowed else ()))
    check_shape(op, name, desc, shape, tensors)
    return Operand(name, desc)


def _output(op: str, name: str, tensors: Mapping[str, TensorDesc], like: TensorDesc) -> Operand:
    desc = tensors.get(name, like)
    check_output(op, name, desc, like.shape, tensors, (like.dtype,))
    return Operand(name, desc, True)


def _x(op: str, tensors: Mapping[str, TensorDesc]) -> TensorDesc:
    x = tensors["x"]
    check_dtype(op, "x", x, tensors)
    if x.rank < 2:
        raise expected(op, "shape of x", list(x.shape), "(N, C) or (N, C, spatial)", describe(tensors))
    return x


def _groups(op: str, x: TensorDesc, attrs: Mapping[str, Any], tensors: Mapping[str, TensorDesc]) -> int:
    """Statistics a sample; 0 for statistics of the batch."""
    if op.startswith("batch_norm"):
        return 0
    channels = x.shape[1]
    if op.startswith("instance_norm"):
        return max(channels, 1)
    if "groups" not in attrs:
        raise expected(op, "groups", "missing", "an integer", describe(tensors))
    groups = check_integer(op, "groups", attrs["groups"], 1)
    if channels % groups:
        raise expected(op, "groups", groups, f"a divisor of the {channels} channels", describe(tensors))
    return groups


def _stats(x: TensorDesc, groups: int) -> TensorDesc:
    channels = x.shape[1]
    return TensorDesc.packed(accumulator_of(x.dtype), (x.shape[0], min(groups, channels)) if groups else (channels,))


def _positive(op: str, name: str, attrs: Mapping[str, Any], default: float, x: TensorDesc) -> float:
    value = check_number(op, name, attrs.get(name, default), accumulator_of(x.dtype))
    if not value >= 0:
        raise expected(op, name, repr(value), "a number that is not negative")
    return value


def _flag(op: str, name: str, attrs: Mapping[str, Any], default: bool = False) -> bool:
    return check_bool(op, name, attrs.get(name, default))


def _needs_several(op: str, shape: Sequence[int], axes: Sequence[int], tensors: Mapping[str, TensorDesc]) -> None:
    if prod(shape[i] for i in axes) == 1:
        what = "spatial position" if op == "instance_norm" else "value a channel"
        raise expected(op, "shape of x", list(shape), f"more than one {what} to take statistics of", describe(tensors))


def _mask(op: str, x: TensorDesc, tensors: Mapping[str, TensorDesc]) -> TensorDesc:
    extent, along = (x.shape[1], "channels") if channels_innermost(x) else (prod(x.shape[2:]), "spatial positions")
    if extent % 8:
        raise expected(op, "mask", f"for {extent} {along}", "a multiple of 8 of them (or use y instead)", describe(tensors))
    return mask_desc(x)


def _make(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ChannelNormProblem:
    x = _x(op, tensors)
    groups, accumulator, channels = _groups(op, x, attrs, tensors), accumulator_of(x.dtype), (x.shape[1],)
    eps, momentum = _positive(op, "eps", attrs, EPS, x), _positive(op, "momentum", attrs, MOMENTUM, x)
    is_training = op in ("group_norm", "instance_norm")
    if op == "batch_norm":
        if "training" not in attrs:
            raise expected(op, "training", "missing", "True or False")
        is_training = _flag(op, "training", attrs)
    return_stats, return_mask = _flag(op, "return_stats", attrs), _flag(op, "return_mask", attrs)
    operands = [Operand("x", x)]
    operands += [_input(op, n, tensors, channels) for n in ("gamma", "beta") if n in tensors]
    running = [_input(op, n, tensors, channels) for n in ("running_mean", "running_var") if n in tensors]
    if len(running) == 1 or (op == "batch_norm" and not is_training and not running):
        missing = "running_var" if "running_mean" in tensors else "running_mean"
        raise expected(op, missing, "missing", "both running statistics" + (" or neither" if is_training else " unless training"),
                       describe(tensors))
    operands += running
    if op == "batch_norm_apply":
        stats = _stats(x, groups)
        operands += [_input(op, n, tensors, stats.shape, stats.dtype) for n in ("mean", "rstd")]
    if is_training and op != "group_norm":
        _needs_several(op, x.shape, range(2, x.rank) if groups else (0, *range(2, x.rank)), tensors)
    if return_stats and not is_training:
        raise expected(op, "return_stats", True, "False unless training: the statistics are given", describe(tensors))
    epilogue, written = resolve_scaled(op, attrs.get("epilogue"), tensors, _ROLES)
    operands += operands_of(op, epilogue, tensors, x.shape, 1)
    kind, model = result_kind(op, tensors, attrs, x), _like(x)
    operands.append(_output(op, "y", tensors, TensorDesc(kind, model.shape, model.strides, model.align)))
    if return_stats:
        operands += [_output(op, n, tensors, _stats(x, groups)) for n in ("mean", "rstd")]
    if return_mask:
        operands.append(_output(op, "mask", tensors, _mask(op, x, tensors)))
    if op == "batch_norm" and is_training:
        operands += [_output(op, f"new_{o.name}", tensors, TensorDesc.packed(o.desc.dtype, channels)) for o in running]
    normal: list[tuple[str, Any]] = []
    if op == "group_norm":
        normal.append(("groups", groups))
    if op == "batch_norm":
        normal.append(("training", is_training))
        if momentum != MOMENTUM:
            normal.append(("momentum", momentum))
    if eps != EPS:
        normal.append(("eps", eps))
    if written is not None:
        normal.append(("epilogue", written))
    if kind is not x.dtype:
        normal.append(("out_dtype", kind.name))
    normal += [(n, True) for n, value in (("return_stats", return_stats), ("return_mask", return_mask)) if value]
    return ChannelNormProblem(op, tuple(operands), tuple(normal), scalars_of(op, epilogue, accumulator.ptx), policy=policy, shape=x.shape,
                              groups=groups, eps=eps, momentum=momentum, is_training=is_training, epilogue=epilogue)


def _make_stats(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ChannelNormProblem:
    x = _x(op, tensors)
    stats = _stats(x, 0)
    outputs = [_output(op, "count", tensors, TensorDesc.packed(stats.dtype, (1,)))]
    outputs += [_output(op, n, tensors, stats) for n in ("mean", "m2")]
    return ChannelNormProblem(op, (Operand("x", x), *outputs), (), policy=policy, shape=x.shape)


def _make_gather(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ChannelNormProblem:
    means = tensors["means"]
    check_dtype(op, "means", means, tensors, (F32, F64))
    if means.rank != 2:
        raise expected(op, "shape of means", list(means.shape), "(shares, C)", describe(tensors))
    eps, momentum = _positive(op, "eps", attrs, EPS, means), _positive(op, "momentum", attrs, MOMENTUM, means)
    channels = means.shape[1:]
    operands = [_input(op, "counts", tensors, means.shape[:1], means.dtype), Operand("means", means),
                _input(op, "m2s", tensors, means.shape, means.dtype)]
    running = [_input(op, n, tensors, channels) for n in ("running_mean", "running_var") if n in tensors]
    if len(running) == 1:
        missing = "running_var" if "running_mean" in tensors else "running_mean"
        raise expected(op, missing, "missing", "both running statistics or neither", describe(tensors))
    operands += running
    operands += [_output(op, n, tensors, TensorDesc.packed(means.dtype, channels)) for n in ("mean", "rstd")]
    operands += [_output(op, f"new_{o.name}", tensors, TensorDesc.packed(o.desc.dtype, channels)) for o in running]
    normal = [(n, v) for n, v, default in (("momentum", momentum, MOMENTUM), ("eps", eps, EPS)) if v != default]
    return ChannelNormProblem(op, tuple(operands), tuple(normal), policy=policy, shape=means.shape, eps=eps, momentum=momentum)


def _make_backward(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ChannelNormProblem:
    x = _x(op, tensors)
    groups, channels = _groups(op, x, attrs, tensors), (x.shape[1],)
    is_training, return_residual = _flag(op, "training", attrs, True), _flag(op, "return_residual", attrs)
    stats = _stats(x, groups)
    operands = [_input(op, "dy", tensors, x.shape, x.dtype), Operand("x", x)]
    operands += [_input(op, n, tensors, stats.shape, stats.dtype) for n in ("mean", "rstd")]
    if "gamma" in tensors:
        operands.append(_input(op, "gamma", tensors, channels))
    if "mask" in tensors and "y" in tensors:
        raise expected(op, "y", "given", "either mask or y", describe(tensors))
    if "mask" in tensors:
        operands.append(_input(op, "mask", tensors, _mask(op, x, tensors).shape, U8))
    if "y" in tensors:
        operands.append(_input(op, "y", tensors, x.shape))
    sums = TensorDesc.packed(stats.dtype, channels)
    if op == "batch_norm_backward_reduce":
        operands += [_output(op, n, tensors, sums) for n in ("sum_dy", "sum_dy_xhat")]
    else:
        if op == "batch_norm_backward_apply":
            operands += [_input(op, n, tensors, channels, stats.dtype) for n in ("sum_dy", "sum_dy_xhat")]
            operands.append(_input(op, "count", tensors, (1,), stats.dtype))
        operands.append(_output(op, "dx", tensors, _like(x)))
        if "gamma" in tensors and op != "batch_norm_backward_apply":
            parameters = TensorDesc.packed(tensors["gamma"].dtype, channels)
            operands += [_output(op, n, tensors, parameters) for n in ("dgamma", "dbeta")]
        if return_residual:
            operands.append(_output(op, "d_residual", tensors, _like(x)))
    normal: list[tuple[str, Any]] = [("groups", groups)] if op == "group_norm_backward" else []
    normal += [("training", False)] if not is_training else []
    normal += [("return_residual", True)] if return_residual else []
    return ChannelNormProblem(op, tuple(operands), tuple(normal), policy=policy, shape=x.shape, groups=groups, is_training=is_training)


_AFFINE = ("gamma", "beta")
_RUNNING = ("running_mean", "running_var")
_FORWARD = (("eps", EPS), ("epilogue", None), ("return_stats", False), ("return_mask", False), ("out_dtype", None))
_GRADIENT = (("dy", "x", "mean", "rstd", "gamma", "mask", "y"), ("dx", "dgamma", "dbeta", "d_residual"))
_GIVEN = ("gamma", "mask", "y")
_OPTIONAL = (*_AFFINE, "residual", "scale_y")
_STATS = ("y", "mean", "rstd", "mask")


def _row(op: str, build: Any, inputs: tuple[str, ...], outputs: tuple[str, ...], optional: tuple[str, ...] = (),
         attrs: tuple[tuple[str, Any], ...] = ()) -> OpDef:
    return OpDef(op, inputs, outputs, partial(build, op), optional, attrs)


DEFINITIONS: tuple[OpDef, ...] = (
    _row("batch_norm", _make, ("x", *_AFFINE, *_RUNNING, "residual", "scale_y"), (*_STATS, "new_running_mean", "new_running_var"),
         (*_OPTIONAL, *_RUNNING), (("training", None), ("momentum", MOMENTUM), *_FORWARD)),
    _row("batch_norm_apply", _make, ("x", "mean", "rstd", *_AFFINE, "residual", "scale_y"), ("y", "mask"), _OPTIONAL,
         (("epilogue", None), ("return_mask", False), ("out_dtype", None))),
    _row("group_norm", _make, ("x", *_OPTIONAL), _STATS, _OPTIONAL, (("groups", None), *_FORWARD)),
    _row("instance_norm", _make, ("x", *_OPTIONAL), _STATS, _OPTIONAL, _FORWARD),
    _row("batch_norm_backward", _make_backward, *_GRADIENT, _GIVEN, (("training", True), ("return_residual", False))),
    _row("group_norm_backward", _make_backward, *_GRADIENT, _GIVEN, (("groups", None), ("return_residual", False))),
    _row("instance_norm_backward", _make_backward, *_GRADIENT, _GIVEN, (("return_residual", False),)),
    _row("batch_norm_stats", _make_stats, ("x",), ("count", "mean", "m2")),
    _row("batch_norm_gather", _make_gather, ("counts", "means", "m2s", *_RUNNING), ("mean", "rstd", "new_running_mean", "new_running_var"),
         _RUNNING, (("momentum", MOMENTUM), ("eps", EPS))),
    _row("batch_norm_backward_reduce", _make_backward, ("dy", "x", "mean", "rstd", "mask", "y"), ("sum_dy", "sum_dy_xhat"),
         ("mask", "y")),
    _row("batch_norm_backward_apply", _make_backward, ("dy", "x", "mean", "rstd", "gamma", "mask", "y", "sum_dy", "sum_dy_xhat", "count"),
         ("dx", "d_residual"), _GIVEN, (("return_residual", False),)),
)
