"""The windows of an image written out as columns, and columns added up into an image: each is the other's gradient.

    unfold x=f32[N,C,H,W] kernel=(R,S)                        y[n, (c, r, s), l] = x[n, c, p * stride - before + r * dilation, ...]
    fold x=f32[N,C R S,L] output_size=(H,W) kernel=(R,S)      y[n, c, h, w] = sum of all x[n, (c, r, s), l] that lie at (h, w)
    im2col x=... kernel=(R,S) order=rsc                       y[n, l, (r, s, c)]: rows of a matrix product, a window each
    col2im x=f32[N,L,R S C] output_size=(H,W) kernel=(R,S)    y: the sum, as fold's

l counts positions, the last dimension fastest; of 1 to 3 dimensions. order: how the elements of a window follow one another, "crs" channels
first or "rsc" channels last, as filters lie. Unfolding moves bits of any type, zeros where windows reach beyond the image; sums are made in
f32, of f64 in f64, in the order of the taps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from .. import dtypes
from ..errors import expected
from ..tensor import TensorDesc, packed_strides
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_choice, check_extents, check_integers, check_reach, describe, operand, output
from .conv import read_padding, short

ORDERS = ("crs", "rsc")


@dataclass(frozen=True, kw_only=True)
class UnfoldProblem(Problem):
    """image, columns: the operands' names. positions: how many windows along each dimension. padding: (before, after) of each.
    has_rows: columns are (N, positions, elements), else (N, elements, positions)."""

    image: str
    columns: str
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    positions: tuple[int, ...]
    has_rows: bool
    order: str

    @property
    def sums(self) -> bool:
        return self.outputs[0].name == self.image

    @property
    def flops(self) -> int:
        return self.desc(self.columns).numel if self.sums else 0

    @property
    def column_strides(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """Of columns, in elements: along images, channels, taps and positions."""
        s, channels = self.desc(self.columns).strides, self.desc(self.image).shape[1]
        element, position = (s[2], s[1]) if self.has_rows else (s[1], s[2])
        in_window = packed_strides((channels, *self.kernel) if self.order == "crs" else (*self.kernel, channels))
        channel, taps = (in_window[0], in_window[1:]) if self.order == "crs" else (in_window[-1], in_window[:-1])
        return (s[0], channel * element, tuple(t * element for t in taps),
                tuple(p * position for p in packed_strides(self.positions)))


def positions_of(op: str, extents: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], padding: Any,
                 dilation: tuple[int, ...], context: str) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """How many windows there are along each dimension of an image, and the padding in numbers."""
    reach = [(r - 1) * d + 1 for r, d in zip(kernel, dilation, strict=True)]
    same = [max((-(-n // s) - 1) * s + e - n, 0) for n, s, e in zip(extents, stride, reach, strict=True)]
    pads = read_padding(op, padding, same, len(extents), context)
    room = [n + lo + hi - e for n, (lo, hi), e in zip(extents, pads, reach, strict=True)]
    if any(v < 0 for v in room):
        raise expected(op, "kernel", f"{list(kernel)} (with dilation {reach})",
                       f"at most the padded extent {[n + lo + hi for n, (lo, hi) in zip(extents, pads, strict=True)]}", context)
    return tuple(v // s + 1 for v, s in zip(room, stride, strict=True)), pads


def _make(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> UnfoldProblem:
    context = describe(tensors)
    sums, has_rows = op in ("fold", "col2im"), op in ("im2col", "col2im")
    x = operand(op, "x", tensors, FLOATS if sums else dtypes.TABLE)
    check_reach(op, "x", x, context)
    if x.rank not in ((3,) if sums else (3, 4, 5)):
        allowed = "3: (N, " + ("positions, elements)" if has_rows else "elements, positions)") if sums else "3, 4 or 5: (N, C, spatial)"
        raise expected(op, "rank of x", x.rank, allowed, context)
    if sums:
        if "output_size" not in attrs:
            raise expected(op, "output_size", "missing", "the spatial extents of y, 1 to 3 integers", context)
        size = attrs["output_size"]
        extents = check_extents(op, "output_size", size if isinstance(size, (tuple, list)) else (size,), (1, 2, 3), context)
    else:
        extents = x.shape[2:]
    if "kernel" not in attrs:
        raise expected(op, "kernel", "missing", f"an integer of at least 1, or {len(extents)} of them", context)
    rank = len(extents)
    kernel, stride, dilation = (check_integers(op, name, attrs.get(name, 1), rank, 1, context) for name in ("kernel", "stride", "dilation"))
    order = check_choice(op, "order", attrs.get("order", "crs"), ORDERS) if has_rows else "crs"
    positions, padding = positions_of(op, extents, kernel, stride, attrs.get("padding", 0), dilation, context)
    length, taps = prod(positions), prod(kernel)
    normal: dict[str, Any] = {"output_size": short(extents) if rank == 1 else extents} if sums else {}
    normal["kernel"] = short(kernel)
    window = (("stride", short(stride)), ("padding", short(padding)), ("dilation", short(dilation)))
    normal |= {name: value for name, value in window if value != _DEFAULTS[name]}
    normal |= {"order": order} if order != "crs" else {}
    if sums:
        elements, found = (x.shape[2], x.shape[1]) if has_rows else (x.shape[1], x.shape[2])
        if elements % taps:
            raise expected(op, "elements of a window in x", elements, f"a multiple of {taps}, those of kernel {list(kernel)}", context)
        if found != length:
            raise expected(op, "positions in x", found, f"{length} = {' * '.join(map(str, positions))}, those of output_size", context)
        shape = (x.shape[0], elements // taps, *extents)
        y = output(op, "y", tensors, (x.dtype,), shape, TensorDesc.packed(x.dtype, shape, "nhwc" if order == "rsc" else "nchw"))
    else:
        shape = (x.shape[0], length, x.shape[1] * taps) if has_rows else (x.shape[0], x.shape[1] * taps, length)
        y = output(op, "y", tensors, (x.dtype,), shape, TensorDesc.packed(x.dtype, shape))
    image, columns = ("y", "x") if sums else ("x", "y")
    return UnfoldProblem(op, (Operand("x", x), Operand("y", y, True)), tuple(normal.items()), policy=policy, image=image, columns=columns,
                         kernel=kernel, stride=stride, padding=padding, dilation=dilation, positions=positions, has_rows=has_rows,
                         order=order)


_WINDOW: tuple[tuple[str, Any], ...] = (("kernel", None), ("stride", 1), ("padding", 0), ("dilation", 1))

_DEFAULTS = dict(_WINDOW)
_SIZE: tuple[tuple[str, Any], ...] = (("output_size", None),)
_ORDER: tuple[tuple[str, Any], ...] = (("order", "crs"),)

DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("unfold", ("x",), ("y",), partial(_make, "unfold"), attrs=_WINDOW),
    OpDef("fold", ("x",), ("y",), partial(_make, "fold"), attrs=_SIZE + _WINDOW),
    OpDef("im2col", ("x",), ("y",), partial(_make, "im2col"), attrs=_WINDOW + _ORDER),
    OpDef("col2im", ("x",), ("y",), partial(_make, "col2im"), attrs=_SIZE + _WINDOW + _ORDER),
)
