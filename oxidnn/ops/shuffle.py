"""Elements moved between channels and space, of any type: copies of six dimensions.

    pixel_shuffle x=f32[N,C r r,H,W] factor=r      y[n, c, h r + i, w r + j] = x[n, (c r + i) r + j, h, w]
                                                   order "dcr": x[n, (i r + j) C + c, h, w]
    pixel_unshuffle x=f32[N,C,H r,W r] factor=r    the way back, and pixel_shuffle's gradient
    channel_shuffle x=f32[N,g C,...] groups=g      y[n, c g + k] = x[n, k C + c]; its gradient is that of groups C
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from .. import dtypes
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy
from .checks import check_choice, check_integer, check_reach, describe, operand, output
from .layout import MAX_RANK, Axis, LayoutProblem, Part

ORDERS = ("crd", "dcr")


def _input(op: str, tensors: Mapping[str, TensorDesc], ranks: range) -> TensorDesc:
    x = operand(op, "x", tensors, dtypes.TABLE)
    if x.rank not in ranks:
        raise expected(op, "rank of x", x.rank, f"{ranks.start}" + (f" to {ranks.stop - 1}" if len(ranks) > 1 else ""), describe(tensors))
    check_reach(op, "x", x, describe(tensors))
    return x


def _copy(op: str, x: TensorDesc, y: TensorDesc, normal: Mapping[str, Any], policy: Policy, axes: tuple[Axis, ...]) -> LayoutProblem:
    operands = (Operand("x", x), Operand("y", y, True))
    return LayoutProblem(op, operands, tuple(normal.items()), policy=policy, parts=(Part("x", "y", axes),))


def _pixels(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """factor: neighbours along each spatial dimension. order: whether the channel ("crd") or the place ("dcr") is the outer digit of the
    many channels."""
    x = _input(op, tensors, range(4, 5))
    if "factor" not in attrs:
        raise expected(op, "factor", "missing", "an integer of at least 1")
    r = check_integer(op, "factor", attrs["factor"], 1)
    order = check_choice(op, "order", attrs.get("order", "crd"), ORDERS)
    normal = {"factor": r} | ({} if order == "crd" else {"order": order})
    n, c, h, w = x.shape
    to_space = op == "pixel_shuffle"
    if to_space and c % (r * r):
        raise expected(op, "channels of x", c, f"a multiple of {r * r}, factor * factor")
    if not to_space and (h % r or w % r):
        raise expected(op, "spatial extents of x", [h, w], f"multiples of factor={r}")
    few, height, width = (c // (r * r), h, w) if to_space else (c, h // r, w // r)
    shape = (n, few, height * r, width * r) if to_space else (n, few * r * r, height, width)
    y = output(op, "y", tensors, (x.dtype,), shape, TensorDesc(x.dtype, shape, _strides_like(x, shape)))
    deep, wide = (x, y) if to_space else (y, x)
    # the digits n, c, h, i, w, j in the tensor of many channels and in the one of many pixels
    channel, row, column = (r * r, r, 1) if order == "crd" else (1, r * few, few)
    s, t = deep.strides, wide.strides
    in_deep = (s[0], s[1] * channel, s[2], s[1] * row, s[3], s[1] * column)
    in_wide = (t[0], t[1], t[2] * r, t[2], t[3] * r, t[3])
    extents = (n, few, height, r, width, r)
    target, source = (in_wide, in_deep) if to_space else (in_deep, in_wide)
    return _copy(op, x, y, normal, policy, tuple(Axis(e, a, b) for e, a, b in zip(extents, target, source, strict=True)))


def _strides_like(x: TensorDesc, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dense, channels last if x is."""
    layout = "nhwc" if x.is_packed("nhwc") and not x.is_packed("nchw") else "nchw"
    return TensorDesc.packed(x.dtype, shape, layout).strides


def _make_channel_shuffle(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """groups: of channels, dealt out one by one."""
    op = "channel_shuffle"
    x = _input(op, tensors, range(2, MAX_RANK))
    if "groups" not in attrs:
        raise expected(op, "groups", "missing", "an integer of at least 1")
    groups = check_integer(op, "groups", attrs["groups"], 1)
    if x.shape[1] % groups:
        raise expected(op, "channels of x", x.shape[1], f"a multiple of groups={groups}")
    y = output(op, "y", tensors, (x.dtype,), x.shape, x)
    each = x.shape[1] // groups
    axes = [Axis(n, t, s) for n, t, s in zip(x.shape, y.strides, x.strides, strict=True)]
    axes[1:2] = [Axis(each, y.strides[1] * groups, x.strides[1]), Axis(groups, y.strides[1], x.strides[1] * each)]
    return _copy(op, x, y, {"groups": groups}, policy, tuple(axes))


_PIXELS: tuple[tuple[str, Any], ...] = (("factor", None), ("order", "crd"))

DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("pixel_shuffle", ("x",), ("y",), partial(_pixels, "pixel_shuffle"), attrs=_PIXELS),
    OpDef("pixel_unshuffle", ("x",), ("y",), partial(_pixels, "pixel_unshuffle"), attrs=_PIXELS),
    OpDef("channel_shuffle", ("x",), ("y",), _make_channel_shuffle, attrs=(("groups", None),)),
)
