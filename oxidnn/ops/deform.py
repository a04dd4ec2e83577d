"""Deformable convolution of two dimensions (DCN, and DCNv2 with a mask): every tap of every position has an offset of its own.

    deform_conv x=f32[N,C,H,W] offset=f32[N,2 D R S,P,Q] w=f32[K,C/g,R,S] mask=f32[N,D R S,P,Q] bias=f32[K]
        y[n, k, p, q] = bias[k] + sum over c, r, s of w[k, c, r, s] * mask * x[n, c, (p, q) * stride - before + (r, s) * dilation + offset]
    deform_conv_backward dy x offset w mask      dx, doffset, dw, and dmask with a mask, dbias under bias_gradient

x between its elements is linear along both dimensions, and 0 outside. The D offset groups share the channels evenly; their offsets are
those of channel (d R S + r S + s) * 2, along H, and the next, along W; masks are those of channel d R S + r S + s, as torchvision's and
ONNX's. Where an offset is a whole number its gradient is that of a slightly larger one. An offset that is NaN makes its products NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ..dtypes import F32, F64, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_bool, check_integer, check_integers, check_reach, describe, operand, output
from .conv import preferred_layout, short
from .unfold import positions_of


@dataclass(frozen=True, kw_only=True)
class DeformProblem(Problem):
    """kernel, stride, dilation, padding (before, after) and positions: along H and W."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    positions: tuple[int, ...]
    groups: int
    offset_groups: int

    @property
    def is_backward(self) -> bool:
        return self.has("dx")

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    @property
    def accumulator(self) -> DType:
        return F64 if self.desc("x").dtype is F64 else F32

    @property
    def flops(self) -> int:
        images, channels = self.desc("x").shape[:2]
        columns = images * channels * self.taps * prod(self.positions)
        return columns * (2 * self.desc("w").shape[0] // self.groups * (2 if self.is_backward else 1) + (30 if self.is_backward else 8))


def _make(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> DeformProblem:
    context = describe(tensors)
    x = operand(op, "x", tensors, FLOATS)
    if x.rank != 4:
        raise expected(op, "rank of x", x.rank, "4: (N, C, H, W)", context)
    w = operand(op, "w", tensors, (x.dtype,))
    groups = check_integer(op, "groups", attrs.get("groups", 1), 1)
    n, channels = x.shape[:2]
    if w.rank != 4 or w.shape[1] * groups != channels or w.shape[0] % groups or not all(w.shape[2:]):
        raise expected(op, "shape of w", list(w.shape), f"(K, {channels}/{groups}, R, S), K and {channels} multiples of groups={groups}",
                       context)
    kernel = w.shape[2:]
    stride, dilation = (check_integers(op, name, attrs.get(name, 1), 2, 1, context) for name in ("stride", "dilation"))
    positions, padding = positions_of(op, x.shape[2:], kernel, stride, attrs.get("padding", 0), dilation, context)
    kinds = tuple(dict.fromkeys((x.dtype, F64 if x.dtype is F64 else F32)))
    offset, taps = operand(op, "offset", tensors, kinds), prod(kernel)
    of_group = 2 * taps
    offset_groups = offset.shape[1] // of_group if offset.rank == 4 else 0
    if offset_groups < 1 or offset.shape != (n, offset_groups * of_group, *positions) or channels % offset_groups:
        raise expected(op, "shape of offset", list(offset.shape), f"({n}, D * {of_group}, {positions[0]}, {positions[1]}) for some D that "
                       f"divides the {channels} channels", context)
    operands = [Operand("x", x), Operand("offset", offset), Operand("w", w)]
    if "mask" in tensors:
        operands.append(Operand("mask", operand(op, "mask", tensors, kinds, (n, offset_groups * taps, *positions))))
    y_shape = (n, w.shape[0], *positions)
    window = {"stride": short(stride), "padding": short(padding), "dilation": short(dilation), "groups": groups}
    normal: list[tuple[str, Any]] = [(name, v) for name, v in window.items() if v != dict(_ATTRS)[name]]
    if op == "deform_conv":
        if "bias" in tensors:
            operands.append(Operand("bias", operand(op, "bias", tensors, FLOATS, (w.shape[0],))))
        like = TensorDesc.packed(x.dtype, y_shape, preferred_layout(x, w))
        results = [Operand("y", output(op, "y", tensors, (x.dtype,), y_shape, like), True)]
    else:
        operands.insert(0, Operand("dy", operand(op, "dy", tensors, (x.dtype,), y_shape)))
        if check_bool(op, "bias_gradient", attrs.get("bias_gradient", False)):
            normal.append(("bias_gradient", True))
        sources = {"dx": "x", "doffset": "offset", "dw": "w"} | ({"dmask": "mask"} if "mask" in tensors else {})
        results = [Operand(name, output(op, name, tensors, (tensors[of].dtype,), tensors[of].shape, tensors[of]), True)
                   for name, of in sources.items()]
        if ("bias_gradient", True) in normal:
            shape = (w.shape[0],)
            results.append(Operand("dbias", output(op, "dbias", tensors, kinds, shape, TensorDesc.packed(x.dtype, shape)), True))
        for name in set(GRADIENTS) & set(tensors) - {r.name for r in results}:
            raise expected(op, name, "given", "no tensor without the mask it is of, or bias_gradient=True", context)
    for o in (*operands, *results):
        check_reach(op, o.name, o.desc, context)
    return DeformProblem(op, (*operands, *results), tuple(normal), policy=policy, kernel=kernel, stride=stride, padding=padding,
                         dilation=dilation, positions=positions, groups=groups, offset_groups=offset_groups)


def make_forward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> DeformProblem:
    return _make("deform_conv", tensors, attrs, policy)


def make_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> DeformProblem:
    return _make("deform_conv_backward", tensors, attrs, policy)


_ATTRS: tuple[tuple[str, Any], ...] = (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))
GRADIENTS = ("dx", "doffset", "dw", "dmask", "dbias")

DEFINITIONS = (
    OpDef("deform_conv", ("x", "offset", "w", "mask", "bias"), ("y",), make_forward, ("mask", "bias"), _ATTRS),
    OpDef("deform_conv_backward", ("dy", "x", "offset", "w", "mask"), GRADIENTS, make_backward, ("mask",),
          (*_ATTRS, ("bias_gradient", False))),
)
