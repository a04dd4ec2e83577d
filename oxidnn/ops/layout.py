"""Layout and shape ops: the elements of one tensor in the places of another.

    permute x=f32[2,3,4] dims=(2,0,1)            y
    transform x=bf16[8,64,7,7]nchw y=bf16[8,64,7,7]nhwc alpha=0.5      y = alpha * x + beta * c, in any type and layout
    cast x=f32[8,9] dtype=s8                     y
    broadcast_to, flip, roll, slice, tile, triu, tril, pad x=...       y
    concat x0=... x1=... axis=1                  y;     split x=... sizes=(3,5) axis=1      y0, y1, ...: each other's gradient
    meshgrid x0=... x1=... indexing=xy           y0, y1, ...
    fill shape=(3,5) value=1.5 dtype=f16         y
    pad_backward, slice_backward, tile_backward dy=...                 dx: the exact transpose of the forward

All that changes no type moves bits, of any type. Conversions: floats to nearest even; floats to integers toward zero, saturating, NaN as
0; integers to narrower ones modulo 2^bits; anything but zero is True; to 8-bit floats saturating, unless saturate is False. Sums
(pad_backward, tile_backward) accumulate in f32, of f64 in f64.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from .. import dtypes
from ..dtypes import DType
from ..errors import InvalidArgument, expected
from ..tensor import TensorDesc, layout_order, packed_strides
from .base import OpDef, Operand, Policy, Problem
from .checks import (
    FLOATS,
    MAX_EXTENT,
    canonical,
    check_bool,
    check_choice,
    check_extents,
    check_integer,
    check_number,
    check_output,
    check_reach,
    check_type,
    describe,
    is_integer,
    operand,
    output,
)
from .pointwise import STORED as CONVERTED
from .pointwise import like
from .reduce import normalize_axes

MAX_RANK = 8
MAX_PARTS = 32  # inputs of concat, outputs of split
TEXTS = ("inf", "-inf", "nan", "-0.0")  # numbers that are given as text
MODES = ("constant", "reflect", "replicate", "circular")
_ALL = dtypes.TABLE
_CONVERTED = tuple(dtypes.dtype(name) for name in (*CONVERTED, "u64"))


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of a target's index space. Strides in elements.

    The element at o takes the source's at rule(o + shift):
    "same"; "inside": outside [0, size) there is none; "clamp" to [0, size); "wrap" modulo size; "reflect" about the first and the last
    element, over and over; "every": o + shift = s * step for s in [0, size), elsewhere there is none.
    Of sums it is the other way round: the element at o adds up the source's at all s in [0, size) that the rule, with [0, extent) in the
    place of [0, size), sends to o.
    mask: coefficient of o in the mask, see LayoutProblem.
    """

    extent: int
    target: int
    source: int
    rule: str = "same"
    shift: int = 0
    size: int = 0
    step: int = 1
    mask: int = 0
    third: int = 0  # stride of the operand c


@dataclass(frozen=True, slots=True)
class Part:
    """A copy from one tensor (None: of the value alone) into one; first elements' offsets in elements."""

    source: str | None
    target: str
    axes: tuple[Axis, ...]
    source_offset: int = 0
    target_offset: int = 0


@dataclass(frozen=True)
class LayoutProblem(Problem):
    """parts: the copies. value: where the source has no element, a number or the text of one. diagonal: an element is kept where the sum
    of mask * o and it is not negative, else there is `value`; None keeps all. sums: elements add up what the axes' rules send to them.
    saturate: 8-bit floats take their largest number for what is beyond it, not an infinity or NaN."""

    parts: tuple[Part, ...] = ()
    value: float | str = 0.0
    diagonal: int | None = None
    alpha: float = 1.0
    beta: float = 0.0
    sums: bool = False
    saturate: bool = True

    @property
    def flops(self) -> int:
        return sum(o.desc.numel for o in self.inputs) if self.sums else 0

    @property
    def num_bytes(self) -> int:
        written = sum(o.desc.num_bytes for o in self.outputs)
        read = 0
        for part in self.parts:
            if part.source is not None:  # what is not read, or read again, does not count
                used = prod(a.extent if a.source or self.sums else 1 for a in part.axes)
                read += min(self.desc(part.source).numel, used if not self.sums else 2**63) * self.desc(part.source).dtype.num_bytes
        return written + read + (self.desc("c").num_bytes if self.has("c") else 0)


def bits_of(value: float | str, kind: DType) -> int:
    """The bit pattern of a number in a storage type."""
    number = np.asarray(float(value) if kind.is_float else int(value))
    if kind.name == "bf16":
        number = number.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        stored = number.astype(kind.numpy)
    return int(stored.reshape(1).view(f"u{kind.num_bytes}")[0])


def _check_value(op: str, value: Any, kind: DType) -> float | str:
    """A number that the type holds; infinities, NaN and -0.0 as text, which tells them from others wherever attributes are compared."""
    if isinstance(value, str) and value in TEXTS:
        value = float(value)
    number = check_number(op, "value", value, signed_zero=True)
    if kind.is_float:
        return str(number) if str(number) in TEXTS else number
    low, high = (0, int(kind.max)) if kind.kind in ("uint", "bool") else (-int(kind.max) - 1, int(kind.max))
    if not np.isfinite(number) or int(value) != value or not low <= int(value) <= high:
        raise expected(op, "value", repr(value), f"an integer of {kind}, from {low} to {high}")
    return int(value)


def _rank_checked(op: str, name: str, x: TensorDesc) -> TensorDesc:
    if x.rank > MAX_RANK:
        raise expected(op, f"rank of {name}", x.rank, f"at most {MAX_RANK}")
    return x


def _input(op: str, name: str, tensors: Mapping[str, TensorDesc], allowed: Sequence[DType] = _ALL) -> TensorDesc:
    x = _rank_checked(op, name, operand(op, name, tensors, allowed))
    check_reach(op, name, x, describe(tensors))
    return x


def _per_axis(op: str, name: str, value: Any, rank: int, least: int = -MAX_EXTENT) -> tuple[int, ...]:
    """An integer for all of `rank` dimensions, or one each."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * rank
    if len(values) != rank or not all(is_integer(v, least, MAX_EXTENT) for v in values):
        raise expected(op, name, repr(value), f"an integer of at least {least}, or {rank} of them")
    return tuple(operator.index(v) for v in values)


def _problem(op: str, operands: Sequence[Operand], normal: Mapping[str, Any], policy: Policy, parts: Sequence[Part],
             **fields: Any) -> LayoutProblem:
    return LayoutProblem(op, tuple(operands), tuple(normal.items()), policy=policy, parts=tuple(parts), **fields)


def _single(op: str, x: TensorDesc, y: TensorDesc, axes: Sequence[Axis], normal: Mapping[str, Any], policy: Policy, offset: int = 0,
            names: tuple[str, str] = ("x", "y"), **fields: Any) -> LayoutProblem:
    operands = (Operand(names[0], x), Operand(names[1], y, True))
    return _problem(op, operands, normal, policy, (Part(names[0], names[1], tuple(axes), offset),), **fields)


def _same(shape: Sequence[int], target: Sequence[int], source: Sequence[int]) -> tuple[Axis, ...]:
    return tuple(Axis(n, t, s) for n, t, s in zip(shape, target, source, strict=True))


# Strided copies ---------------------------------------------------------------------------------------------------------------------

def make_permute(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """dims: of x, in the order of y; by default reversed (NumPy's transpose). y is dense in its own order unless it is given."""
    op = "permute"
    x = _input(op, "x", tensors)
    dims = attrs.get("dims", tuple(reversed(range(x.rank))))
    found = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
    if not all(is_integer(d, -x.rank, x.rank - 1) for d in found) or sorted(int(d) % x.rank for d in found) != list(range(x.rank)):
        raise expected(op, "dims", repr(dims), f"every dimension of {list(x.shape)} once")
    found = tuple(int(d) % x.rank for d in found)
    shape = tuple(x.shape[d] for d in found)
    y = output(op, "y", tensors, (x.dtype,), shape, TensorDesc.packed(x.dtype, shape))
    normal = {} if found == tuple(reversed(range(x.rank))) else {"dims": found}
    return _single(op, x, y, _same(shape, y.strides, [x.strides[d] for d in found]), normal, policy)


def _convert(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """dtype: of y, by default that of x (or of the y given). transform: layout "nchw" or "nhwc" of y, by default that of x; alpha, beta."""
    given = attrs.get("dtype")
    x = _input(op, "x", tensors)
    kind = check_type(op, "dtype", given) if given is not None else tensors.get("y", x).dtype
    alpha = check_number(op, "alpha", attrs.get("alpha", 1.0), dtypes.F32)
    beta = check_number(op, "beta", attrs.get("beta", 0.0), dtypes.F32)
    c = _input(op, "c", tensors, _CONVERTED) if "c" in tensors else None
    if (c is None) != (beta == 0.0):
        raise expected(op, "beta", beta, "another number than 0 with c, and none without it")
    if kind != x.dtype or alpha != 1.0 or c is not None:
        for name, found in (("x", x.dtype), ("y", kind)):
            if found not in _CONVERTED:
                raise expected(op, f"type of {name}", found, " or ".join(t.name for t in _CONVERTED), describe(tensors))
    if c is not None and c.shape != x.shape:
        raise expected(op, "shape of c", list(c.shape), f"{list(x.shape)}, that of x")
    normal: dict[str, Any] = {}
    if kind != x.dtype:
        normal["dtype"] = kind.name
    saturate = check_bool(op, "saturate", attrs.get("saturate", True))
    if not saturate:
        if kind not in (dtypes.E4M3, dtypes.E5M2):
            raise expected(op, "saturate", False, f"True, but for conversions to e4m3 or e5m2 (not {kind})")
        normal["saturate"] = False
    layout = attrs.get("layout")
    model = canonical(like(x, kind))
    if layout is not None:
        check_choice(op, "layout", layout, ("nchw", "nhwc"))
        normal["layout"] = layout
        model = canonical(TensorDesc(kind, x.shape, packed_strides(x.shape, layout_order(layout, x.rank))))
    if alpha != 1.0:
        normal["alpha"] = alpha
    if c is not None:
        normal["beta"] = beta
    y = tensors.get("y", model)
    check_output(op, "y", y, x.shape, tensors, (kind,))
    third = c.strides if c is not None else (0,) * x.rank
    axes = tuple(Axis(n, t, s, third=u) for n, t, s, u in zip(x.shape, y.strides, x.strides, third, strict=True))
    operands = [Operand("x", x), *([Operand("c", c)] if c is not None else []), Operand("y", y, True)]
    return _problem(op, operands, normal, policy, (Part("x", "y", axes),), alpha=alpha, beta=beta, saturate=saturate)


def make_broadcast_to(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """shape: of y, to which x broadcasts as NumPy's."""
    op = "broadcast_to"
    x = _input(op, "x", tensors)
    if "shape" not in attrs:
        raise expected(op, "shape", "missing", "a shape that x broadcasts to")
    shape = check_extents(op, "shape", attrs["shape"], range(x.rank, MAX_RANK + 1))
    lead = len(shape) - x.rank
    if any(n not in (1, m) for n, m in zip(x.shape, shape[lead:], strict=True)):
        raise expected(op, "shape", list(shape), f"a shape that {list(x.shape)} broadcasts to")
    strides = (0,) * lead + tuple(0 if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True))
    y = output(op, "y", tensors, (x.dtype,), shape, TensorDesc.packed(x.dtype, shape))
    return _single(op, x, y, _same(shape, y.strides, strides), {"shape": shape}, policy)


def make_flip(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """axes: those whose order is reversed, by default all."""
    op = "flip"
    x = _input(op, "x", tensors)
    axes = normalize_axes(op, attrs.get("axes"), x.rank)
    y = output(op, "y", tensors, (x.dtype,), x.shape, x)
    strides = [-s if i in axes else s for i, s in enumerate(x.strides)]
    offset = sum((x.shape[i] - 1) * x.strides[i] for i in axes) if x.numel else 0
    normal = {} if axes == tuple(range(x.rank)) else {"axes": axes}
    return _single(op, x, y, _same(x.shape, y.strides, strides), normal, policy, offset)


def _slices(op: str, shape: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[int, int, int]]]:
    """The attributes of a slice, and (first, number, step) of each dimension."""
    rank = len(shape)
    axes = attrs.get("axes", tuple(range(rank)))
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    if not all(is_integer(a, -rank, rank - 1) for a in axes) or len({int(a) % rank for a in axes}) != len(axes):
        raise expected(op, "axes", repr(attrs.get("axes")), f"different integers in [{-rank}, {rank})")
    axes = tuple(int(a) % rank for a in axes)
    normal: dict[str, Any] = {}
    columns = []
    for name in ("starts", "stops", "steps"):
        values = attrs.get(name, (None,) * len(axes))
        values = tuple(values) if isinstance(values, (tuple, list)) else (values,) * len(axes)
        are_integers = all(v is None or is_integer(v, -(2**63), 2**63 - 1) for v in values)
        if len(values) != len(axes) or not are_integers or (name == "steps" and 0 in values):
            what = "an integer" if name != "steps" else "an integer other than 0"
            raise expected(op, name, repr(attrs.get(name)), f"{what} or None, or one each of {len(axes)} dimensions")
        values = tuple(v if v is None else operator.index(v) for v in values)
        if any(v is not None for v in values):
            normal[name] = values
        columns.append(values)
    if normal and axes != tuple(range(rank)):
        normal["axes"] = axes
    found = [(0, n, 1) for n in shape]
    for a, start, stop, step in zip(axes, *columns, strict=True):
        indices = range(*slice(start, stop, step).indices(shape[a]))
        found[a] = (indices.start, len(indices), indices.step if len(indices) > 1 else 1)
    return normal, found


def make_slice(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """starts, stops, steps: as Python's slices of the dimensions `axes` (by default all), None for what is left out."""
    op = "slice"
    x = _input(op, "x", tensors)
    normal, found = _slices(op, x.shape, attrs)
    shape = tuple(count for _, count, _ in found)
    y = output(op, "y", tensors, (x.dtype,), shape, x)
    offset = sum(first * s for (first, _, _), s in zip(found, x.strides, strict=True)) if y.numel else 0
    strides = [s * step for (_, _, step), s in zip(found, x.strides, strict=True)]
    return _single(op, x, y, _same(shape, y.strides, strides), normal, policy, offset)


def make_slice_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """dx of shape x_shape: dy where the slice takes from, 0 elsewhere."""
    op = "slice_backward"
    dy = _input(op, "dy", tensors)
    if "x_shape" not in attrs and "dx" not in tensors:
        raise expected(op, "x_shape", "missing", "the shape of x")
    x_shape = check_extents(op, "x_shape", attrs.get("x_shape", tensors["dx"].shape if "dx" in tensors else ()), range(MAX_RANK + 1))
    normal, found = _slices(op, x_shape, attrs)
    shape = tuple(count for _, count, _ in found)
    if dy.shape != shape:
        raise expected(op, "shape of dy", list(dy.shape), f"{list(shape)}, of that slice of {list(x_shape)}")
    dx = output(op, "dx", tensors, (dy.dtype,), x_shape, dy)
    axes, offset = [], 0
    for n, t, s, (first, count, step) in zip(x_shape, dx.strides, dy.strides, found, strict=True):
        if step < 0:  # the same elements from the last on
            first, step, offset, s = first + (count - 1) * step, -step, offset + max(count - 1, 0) * s, -s
        rule = "same" if (first, count, step) == (0, n, 1) else "inside" if step == 1 else "every"
        axes.append(Axis(n, t, s, rule, -first if rule != "same" else 0, count if rule != "same" else 0, step))
    return _single(op, dy, dx, axes, {"x_shape": x_shape} | normal, policy, offset, ("dy", "dx"))


def _repeats(op: str, value: Any) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(values) > MAX_RANK or not all(is_integer(v, 0, MAX_EXTENT) for v in values):
        raise expected(op, "repeats", repr(value), f"a non-negative integer, or at most {MAX_RANK} of them")
    return tuple(operator.index(v) for v in values)


def make_tile(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """repeats: copies along each of the last dimensions; of more than x has, y has as many (NumPy's tile)."""
    op = "tile"
    x = _input(op, "x", tensors)
    given = _repeats(op, attrs.get("repeats", ()))
    rank = max(x.rank, len(given))
    repeats = (1,) * (rank - len(given)) + given
    own = (1,) * (rank - x.rank) + x.shape
    strides = (0,) * (rank - x.rank) + x.strides
    shape = tuple(n * r for n, r in zip(own, repeats, strict=True))
    y = output(op, "y", tensors, (x.dtype,), shape, x if rank == x.rank else TensorDesc.packed(x.dtype, shape))
    axes = [axis for n, r, t, s in zip(own, repeats, y.strides, strides, strict=True) for axis in (Axis(r, n * t, 0), Axis(n, t, s))]
    normal = {} if not given else {"repeats": given}
    return _single(op, x, y, axes, normal, policy)


def make_tile_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """dx: the sum of the copies. x_shape: by default what `repeats` divide dy's into."""
    op = "tile_backward"
    dy = _input(op, "dy", tensors, FLOATS)
    given = _repeats(op, attrs.get("repeats", ()))
    if len(given) > dy.rank:
        raise expected(op, "repeats", given, f"at most {dy.rank} numbers, dy's rank")
    repeats = (1,) * (dy.rank - len(given)) + given
    if "x_shape" in attrs:
        x_shape = check_extents(op, "x_shape", attrs["x_shape"], range(dy.rank + 1))
    elif 0 in repeats or any(n % r for n, r in zip(dy.shape, repeats, strict=True)):
        raise expected(op, "x_shape", "missing", f"the shape of x, which {list(repeats)} do not divide {list(dy.shape)} into")
    else:
        x_shape = tuple(n // r for n, r in zip(dy.shape, repeats, strict=True))
    own = (1,) * (dy.rank - len(x_shape)) + x_shape
    want = tuple(n * r for n, r in zip(own, repeats, strict=True))
    if dy.shape != want:
        raise expected(op, "shape of dy", list(dy.shape), f"{list(want)}, {list(repeats)} times {list(x_shape)}")
    dx = output(op, "dx", tensors, (dy.dtype,), x_shape, dy if dy.rank == len(x_shape) else TensorDesc.packed(dy.dtype, x_shape))
    strides = (0,) * (dy.rank - len(x_shape)) + dx.strides
    axes = [Axis(n, t, s, "wrap", 0, n * r) for n, r, t, s in zip(own, repeats, strides, dy.strides, strict=True)]
    normal: dict[str, Any] = {} if not given else {"repeats": given}
    if "x_shape" in attrs:
        normal["x_shape"] = x_shape
    return _single(op, dy, dx, axes, normal, policy, 0, ("dy", "dx"), sums=True)


# Copies by rule ---------------------------------------------------------------------------------------------------------------------

def make_roll(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """shifts: how far elements move along each of `axes`; without axes the elements in their order, from row to row."""
    op = "roll"
    x = _input(op, "x", tensors)
    shifts = attrs.get("shifts", 0)
    axes = attrs.get("axes")
    normal: dict[str, Any] = {}
    if axes is None:
        shift = check_integer(op, "shifts", shifts[0] if isinstance(shifts, (tuple, list)) and len(shifts) == 1 else shifts, -MAX_EXTENT)
        y = output(op, "y", tensors, (x.dtype,), x.shape, TensorDesc.packed(x.dtype, x.shape))
        if shift:
            normal["shifts"] = shift
        operands = (Operand("x", x), Operand("y", y, True))
        return _problem(op, operands, normal, policy, tuple(_rolled_rows(x, y, shift % x.numel)) if x.numel else ())
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    if not all(is_integer(a, -x.rank, x.rank - 1) for a in axes):
        raise expected(op, "axes", repr(attrs["axes"]), f"integers in [{-x.rank}, {x.rank}) or None")
    moved = _per_axis(op, "shifts", shifts, len(axes))
    total = [0] * x.rank
    for a, shift in zip(axes, moved, strict=True):  # an axis given twice moves twice, as NumPy's
        total[int(a) % x.rank] += shift
    y = output(op, "y", tensors, (x.dtype,), x.shape, x)
    normal |= {"shifts": moved} if any(moved) else {}
    normal["axes"] = tuple(int(a) % x.rank for a in axes)
    return _single(op, x, y, [_rolled(n, t, s, k) for n, t, s, k in zip(x.shape, y.strides, x.strides, total, strict=True)], normal, policy)


def _rolled_rows(x: TensorDesc, y: TensorDesc, shift: int) -> Iterator[Part]:
    """The copies that move all elements on by `shift` in their order, wherever rows lie: what a row pushes over its end begins the next."""
    dims: list[tuple[int, int, int]] = []  # (extent, stride in y, stride in x), rows that follow one another in both merged
    for n, t, s in zip(x.shape, y.strides, x.strides, strict=True):
        if dims and (dims[-1][1], dims[-1][2]) == (t * n, s * n):
            dims[-1] = dims[-1][0] * n, t, s
        elif n > 1 or not dims:
            dims.append((n, t, s))
    if len(dims) <= 1 and x.numel <= MAX_EXTENT:
        n, t, s = dims[0] if dims else (1, 1, 1)
        yield Part("x", "y", (_rolled(n, t, s, shift),))
        return

    def moved(at: int, shift: int) -> Iterator[tuple[tuple[Axis, ...], int, int]]:
        """(axes, offset in x, offset in y) of the dimensions up to `at`, innermost last, of elements moved by `shift`."""
        if at < 0:
            yield (), 0, 0
            return
        n, t, s = dims[at]
        rows, rest = divmod(shift, n)
        pieces = ((n - rest, 0, rest, rows), (rest, n - rest, 0, rows + 1))  # (number, first in x, first in y, shift of the rows)
        for count, source, target, carried in pieces:
            if count:
                for axes, x_at, y_at in moved(at - 1, carried):
                    yield (*axes, Axis(count, t, s)), x_at + source * s, y_at + target * t

    for axes, x_at, y_at in moved(len(dims) - 1, shift):
        yield Part("x", "y", axes, x_at, y_at)


def _rolled(extent: int, target: int, source: int, shift: int) -> Axis:
    back = -shift % extent if extent else 0
    return Axis(extent, target, source, "wrap", back, extent) if back else Axis(extent, target, source)


def _triangle(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """diagonal: of the last two dimensions, above the main one if positive. triu keeps it and what is above, tril and what is below."""
    x = _input(op, "x", tensors)
    if x.rank < 2:
        raise expected(op, "rank of x", x.rank, f"2 to {MAX_RANK}")
    diagonal = check_integer(op, "diagonal", attrs.get("diagonal", 0), -MAX_EXTENT)
    y = output(op, "y", tensors, (x.dtype,), x.shape, x)
    sign = 1 if op == "triu" else -1  # sign * (column - row - diagonal) >= 0
    masks = (0,) * (x.rank - 2) + (-sign, sign)
    axes = [Axis(n, t, s, mask=m) for n, t, s, m in zip(x.shape, y.strides, x.strides, masks, strict=True)]
    return _single(op, x, y, axes, {"diagonal": diagonal} if diagonal else {}, policy, diagonal=-sign * diagonal)


def _padding(op: str, value: Any, rank: int) -> tuple[tuple[int, int], ...]:
    """(low, high) of each dimension: an integer for all, or one entry a dimension, an integer or a pair."""
    entries = tuple(value) if isinstance(value, (tuple, list)) else (value,) * rank
    pairs = []
    for entry in entries:
        pair = tuple(entry) if isinstance(entry, (tuple, list)) else (entry, entry)
        if len(pair) != 2 or not all(is_integer(p, -MAX_EXTENT, MAX_EXTENT) for p in pair):
            raise expected(op, "padding", repr(value), f"an integer, or {rank} integers or (low, high) pairs")
        pairs.append((operator.index(pair[0]), operator.index(pair[1])))
    if len(pairs) != rank:
        raise expected(op, "padding", repr(value), f"an integer, or {rank} integers or (low, high) pairs, one each dimension")
    return tuple(pairs)


def _normal_padding(padding: tuple[tuple[int, int], ...], mode: str) -> dict[str, Any]:
    normal: dict[str, Any] = {}
    if any(pair != (0, 0) for pair in padding):
        normal["padding"] = padding
    if mode != "constant":
        normal["mode"] = mode
    return normal


_RULES = {"constant": "inside", "reflect": "reflect", "replicate": "clamp", "circular": "wrap"}


def _padded_axis(op: str, n: int, low: int, high: int, mode: str, target: int, source: int) -> Axis:
    if (low, high) == (0, 0):
        return Axis(n, target, source)
    if n == 0 and mode != "constant" and n + low + high > 0:
        raise expected(op, "shape of x", n, f"at least one element along a dimension that {mode} padding extends")
    rule = "clamp" if mode == "reflect" and n == 1 else _RULES[mode]
    return Axis(n + low + high, target, source, rule, -low, n)


def make_pad(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """padding: elements before and after each dimension, negative ones cut off. mode: "constant" (value), "reflect" about the edge element,
    "replicate" the edge element, "circular"; of any width, as NumPy's reflect, edge and wrap."""
    op = "pad"
    x = _input(op, "x", tensors)
    padding = _padding(op, attrs.get("padding", 0), x.rank)
    mode = check_choice(op, "mode", attrs.get("mode", "constant"), MODES)
    value = _check_value(op, attrs.get("value", 0.0 if x.dtype.is_float else 0), x.dtype)
    if value != 0 and mode != "constant":
        raise expected(op, "value", value, f"none with mode {mode}")
    shape = tuple(n + low + high for n, (low, high) in zip(x.shape, padding, strict=True))
    if any(n < 0 for n in shape) or any(n > MAX_EXTENT for n in shape):
        raise expected(op, "padding", padding, f"one that leaves extents of 0 to {MAX_EXTENT} of {list(x.shape)}")
    y = output(op, "y", tensors, (x.dtype,), shape, x)
    axes = [_padded_axis(op, n, low, high, mode, t, s)
            for n, (low, high), t, s in zip(x.shape, padding, y.strides, x.strides, strict=True)]
    normal = _normal_padding(padding, mode)
    if value != 0:
        normal["value"] = value
    return _single(op, x, y, axes, normal, policy, value=value)


def make_pad_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """dx: every element of dy added to the element of x that it is a copy of."""
    op = "pad_backward"
    mode = check_choice(op, "mode", attrs.get("mode", "constant"), MODES)
    dy = _input(op, "dy", tensors, _ALL if mode == "constant" else FLOATS)
    padding = _padding(op, attrs.get("padding", 0), dy.rank)
    x_shape = tuple(n - low - high for n, (low, high) in zip(dy.shape, padding, strict=True))
    if any(n < 0 or n > MAX_EXTENT for n in x_shape):
        raise expected(op, "padding", padding, f"one that leads to the shape {list(dy.shape)} of dy")
    dx = output(op, "dx", tensors, (dy.dtype,), x_shape, dy)
    normal = _normal_padding(padding, mode)
    rows = list(zip(x_shape, padding, dx.strides, dy.strides, strict=True))
    if mode == "constant":
        back = [_padded_axis(op, n + low + high, -low, -high, mode, t, s) for n, (low, high), t, s in rows]
        return _single(op, dy, dx, back, normal, policy, 0, ("dy", "dx"))
    axes = []
    for n, (low, high), t, s in rows:
        forward = _padded_axis(op, n, low, high, mode, s, t)
        axes.append(Axis(n, t, s, forward.rule, forward.shift, n + low + high if forward.rule != "same" else 0))
    return _single(op, dy, dx, axes, normal, policy, 0, ("dy", "dx"), sums=True)


# Several parts ----------------------------------------------------------------------------------------------------------------------

def _axis(op: str, value: Any, rank: int) -> int:
    if not is_integer(value, -rank, rank - 1):
        raise expected(op, "axis", repr(value), f"an integer in [{-rank}, {rank})")
    return int(value) % rank


def make_concat(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """axis: along which the inputs x0, x1, ... lie side by side in y."""
    op = "concat"
    names = [n for n in CONCAT_INPUTS if n in tensors]
    if names != list(CONCAT_INPUTS[:len(names)]):
        raise expected(op, CONCAT_INPUTS[len(names) - 1], "missing", f"inputs without a gap; given: {', '.join(names)}")
    first = _input(op, "x0", tensors)
    if first.rank == 0:
        raise expected(op, "rank of x0", 0, f"1 to {MAX_RANK}")
    axis = _axis(op, attrs.get("axis", 0), first.rank)
    total = 0
    for name in names:
        x = _input(op, name, tensors, (first.dtype,))
        if x.rank != first.rank or any(n != m for i, (n, m) in enumerate(zip(x.shape, first.shape, strict=True)) if i != axis):
            raise expected(op, f"shape of {name}", list(x.shape), f"that of x0 but for dimension {axis}", describe(tensors))
        total += x.shape[axis]
    shape = (*first.shape[:axis], total, *first.shape[axis + 1:])
    y = output(op, "y", tensors, (first.dtype,), shape, first)
    parts, at = [], 0
    for name in names:
        x = tensors[name]
        if x.numel:
            parts.append(Part(name, "y", _same(x.shape, y.strides, x.strides), 0, at * y.strides[axis]))
        at += x.shape[axis]
    operands = [*(Operand(n, tensors[n]) for n in names), Operand("y", y, True)]
    return _problem(op, operands, {"axis": axis} if axis else {}, policy, parts)


def make_meshgrid(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """indexing: "ij", input k along dimension k of every output; "xy", the first two dimensions change places."""
    op = "meshgrid"
    names = [n for n in CONCAT_INPUTS[:MAX_RANK] if n in tensors]
    if names != list(CONCAT_INPUTS[:len(names)]):
        raise expected(op, CONCAT_INPUTS[len(names) - 1], "missing", f"inputs without a gap; given: {', '.join(names)}")
    xs = [_input(op, name, tensors) for name in names]
    for name, x in zip(names, xs, strict=True):
        if x.rank != 1:
            raise expected(op, f"rank of {name}", x.rank, "1")
    indexing = check_choice(op, "indexing", attrs.get("indexing", "ij"), ("ij", "xy"))
    places = list(range(len(xs)))
    if indexing == "xy":
        places[:2] = reversed(places[:2])
    shape = tuple(xs[k].shape[0] for k in places)
    for name in SPLIT_OUTPUTS[len(xs):]:
        if name in tensors:
            raise expected(op, name, "given", f"{len(xs)} outputs, one for each input")
    operands, parts = [Operand(n, x) for n, x in zip(names, xs, strict=True)], []
    for k, (name, x) in enumerate(zip(names, xs, strict=True)):
        y = output(op, SPLIT_OUTPUTS[k], tensors, (x.dtype,), shape, TensorDesc.packed(x.dtype, shape))
        operands.append(Operand(SPLIT_OUTPUTS[k], y, True))
        if y.numel:
            sources = [x.strides[0] if place == k else 0 for place in places]
            parts.append(Part(name, SPLIT_OUTPUTS[k], _same(shape, y.strides, sources)))
    return _problem(op, operands, {"indexing": indexing} if indexing != "ij" else {}, policy, parts)


def make_split(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """sizes: extents of y0, y1, ... along axis, together that of x; one number: pieces of so many, the last what is left."""
    op = "split"
    x = _input(op, "x", tensors)
    if x.rank == 0:
        raise expected(op, "rank of x", 0, f"1 to {MAX_RANK}")
    axis = _axis(op, attrs.get("axis", 0), x.rank)
    extent = x.shape[axis]
    sizes: Any = attrs.get("sizes")
    if is_integer(sizes, 1, MAX_EXTENT):
        size = operator.index(sizes)
        sizes = tuple(min(size, extent - begin) for begin in range(0, max(extent, 1), size)) if extent <= size * MAX_PARTS else ()
    if (not isinstance(sizes, (tuple, list)) or not 1 <= len(sizes) <= MAX_PARTS or not all(is_integer(n, 0, MAX_EXTENT) for n in sizes)
            or sum(map(operator.index, sizes)) != extent):
        raise expected(op, "sizes", repr(attrs.get("sizes")), f"1 to {MAX_PARTS} extents that add up to {extent}, or one to divide it by")
    sizes = tuple(operator.index(n) for n in sizes)
    for name in SPLIT_OUTPUTS[len(sizes):]:
        if name in tensors:
            raise expected(op, name, "given", f"{len(sizes)} outputs, by the sizes {sizes}")
    operands, parts, at = [Operand("x", x)], [], 0
    for name, size in zip(SPLIT_OUTPUTS, sizes, strict=False):
        shape = (*x.shape[:axis], size, *x.shape[axis + 1:])
        y = output(op, name, tensors, (x.dtype,), shape, x)
        operands.append(Operand(name, y, True))
        if y.numel:
            parts.append(Part("x", name, _same(shape, y.strides, x.strides), at * x.strides[axis]))
        at += size
    return _problem(op, operands, {"sizes": sizes} | ({"axis": axis} if axis else {}), policy, parts)


def make_fill(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    """shape and dtype (f32), or y. value: that every element gets."""
    op = "fill"
    for name in tensors:
        if name != "y":
            raise InvalidArgument(f"{op}: {name!r} is no tensor of this op (it takes none and gives y). {describe(tensors)}")
    if "shape" not in attrs and "y" not in tensors:
        raise expected(op, "shape", "missing", "the shape of the result")
    shape = check_extents(op, "shape", attrs["shape"], range(MAX_RANK + 1)) if "shape" in attrs else tensors["y"].shape
    kind = check_type(op, "dtype", attrs["dtype"]) if "dtype" in attrs else tensors["y"].dtype if "y" in tensors else dtypes.F32
    y = output(op, "y", tensors, (kind,), shape, TensorDesc.packed(kind, shape))
    _rank_checked(op, "y", y)
    value = _check_value(op, attrs.get("value", 0), kind)
    normal: dict[str, Any] = {"shape": shape}
    if value != 0:
        normal["value"] = value
    if kind is not dtypes.F32:
        normal["dtype"] = kind.name
    part = Part(None, "y", _same(shape, y.strides, (0,) * len(shape)))
    return _problem(op, (Operand("y", y, True),), normal, policy, (part,), value=value)


CONCAT_INPUTS = tuple(f"x{i}" for i in range(MAX_PARTS))
SPLIT_OUTPUTS = tuple(f"y{i}" for i in range(MAX_PARTS))
_SLICE: tuple[tuple[str, Any], ...] = (("starts", None), ("stops", None), ("steps", None), ("axes", None))
_PAD: tuple[tuple[str, Any], ...] = (("padding", 0), ("mode", "constant"))


def _def(op: str, build: Callable[..., Problem], *attrs: tuple[str, Any], gradient: bool = False) -> OpDef:
    return OpDef(op, ("dy",) if gradient else ("x",), ("dx",) if gradient else ("y",), build, attrs=attrs)


DEFINITIONS: tuple[OpDef, ...] = (
    _def("permute", make_permute, ("dims", None)),
    OpDef("transform", ("x", "c"), ("y",), partial(_convert, "transform"), optional=("c",),
          attrs=(("dtype", None), ("layout", None), ("alpha", 1.0), ("beta", 0.0), ("saturate", True))),
    _def("cast", partial(_convert, "cast"), ("dtype", None), ("saturate", True)),
    _def("broadcast_to", make_broadcast_to, ("shape", None)),
    _def("flip", make_flip, ("axes", None)),
    _def("roll", make_roll, ("shifts", 0), ("axes", None)),
    _def("slice", make_slice, *_SLICE),
    _def("slice_backward", make_slice_backward, *_SLICE, ("x_shape", None), gradient=True),
    _def("tile", make_tile, ("repeats", ())),
    _def("tile_backward", make_tile_backward, ("repeats", ()), ("x_shape", None), gradient=True),
    _def("triu", partial(_triangle, "triu"), ("diagonal", 0)),
    _def("tril", partial(_triangle, "tril"), ("diagonal", 0)),
    _def("pad", make_pad, *_PAD, ("value", 0)),
    _def("pad_backward", make_pad_backward, *_PAD, gradient=True),
    OpDef("concat", CONCAT_INPUTS, ("y",), make_concat, optional=CONCAT_INPUTS[1:], attrs=(("axis", 0),)),
    OpDef("meshgrid", CONCAT_INPUTS[:MAX_RANK], SPLIT_OUTPUTS[:MAX_RANK], make_meshgrid, optional=CONCAT_INPUTS[1:MAX_RANK],
          attrs=(("indexing", "ij"),)),
    OpDef("split", ("x",), SPLIT_OUTPUTS, make_split, attrs=(("sizes", None), ("axis", 0))),
    OpDef("fill", (), ("y",), make_fill, attrs=(("shape", None), ("value", 0), ("dtype", None))),
)
