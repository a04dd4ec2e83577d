"""Pooling: the maximum, the average or the p-norm of windows over the spatial dimensions of (N, C, spatial) tensors, and gradients.

Along one dimension, window o covers the taps o * stride - low + k * dilation, 0 <= k < window, that lie inside the input; adaptive
pooling instead covers [floor(o * L / O), ceil((o + 1) * L / O)); fractional pooling covers `window` elements from
int((o + s) * a) - int(s * a) on, a = (L - window) / (O - 1), the last window the last ones, for a sample s in [0, 1) of each image, channel
and dimension. Every window must hold at least one element, so no result is undefined.
max_unpool puts the elements of x where indices (flat over the spatial extent of y, as max pooling's) say, zeros elsewhere: where several
say the same, the last element in the order of x's dimensions stays, on every run. Its gradient is dy at the indices, as PyTorch's: an
element that another one overwrote gets it, too. An index that is no place of y writes nothing, and its gradient is 0.
NaN propagates, and the maximum of -inf is -inf. Indices are flat over the spatial extent, as PyTorch's: the first maximum, or the last NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import gcd, prod
from typing import Any

from ..dtypes import F64, S8, S16, S32, S64, U8, U16, DType
from ..errors import InvalidArgument, expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import (
    FLOATS,
    MAX_EXTENT,
    check_bool,
    check_extents,
    check_integer,
    check_integers,
    check_number,
    check_reach,
    is_integer,
    operand,
    output,
)
from .epilogue import accumulator_of

INTEGERS = (S8, U8, S16, U16, S32)


@dataclass(frozen=True, slots=True)
class Axis:
    """The windows along one spatial dimension of `extent` elements. `window` of an adaptive axis is the largest bin."""

    extent: int
    outputs: int
    window: int
    stride: int = 1
    dilation: int = 1
    low: int = 0  # padding before the first element
    high: int = 0  # padding after the last one: counted by averages that include padding
    adaptive: bool = False
    fractional: bool = False

    @property
    def max_sharing(self) -> int:
        """The most outputs whose windows span one element (for dilated windows, whether they hit it or not; for fractional ones, whatever
        the sample)."""
        if self.fractional:  # ceil((e + 1) / a) - floor((e - window) / a) + 1 at most: see pool/axis.ptx.j2
            return 1 if self.outputs == 1 else (self.window + 1) * (self.outputs - 1) // (self.extent - self.window) + 3
        if not self.adaptive:
            return (self.window - 1) * self.dilation // self.stride + 1
        return _largest_bin(self.outputs, self.extent)


@dataclass(frozen=True)
class PoolProblem(Problem):
    """mode: "max" | "avg" | "lp". axes: one per spatial dimension. divisor: None counts the window's elements. norm: p of "lp"."""

    mode: str = "max"
    axes: tuple[Axis, ...] = ()
    count_include_pad: bool = True
    divisor: int | None = None
    norm: float = 2.0

    @property
    def is_backward(self) -> bool:
        return self.op.endswith("_backward")

    @property
    def x_shape(self) -> tuple[int, ...]:
        outer = self.desc("dx" if self.is_backward else "x").shape[:2]
        return (*outer, *(a.extent for a in self.axes))

    @property
    def flops(self) -> int:
        shape = self.desc("dy" if self.is_backward else "y").shape
        return prod(shape) * prod(a.window for a in self.axes)


@dataclass(frozen=True)
class UnpoolProblem(Problem):
    """The elements of x (or dx) and their places in y (or dy)."""

    @property
    def near(self) -> TensorDesc:
        return self.desc("dx" if self.has("dx") else "x")

    @property
    def far(self) -> TensorDesc:
        return self.desc("dy" if self.has("dy") else "y")

    @property
    def flops(self) -> int:
        return 0


def _unpooled(op: str, shape: tuple[int, ...], given: Any) -> tuple[int, ...]:
    """The shape of y, of `shape`'s images."""
    if len(shape) not in (3, 4, 5):
        raise expected(op, "shape of x", list(shape), "(N, C, spatial) with 1 to 3 spatial dimensions")
    if given is None:
        raise expected(op, "output_size", None, f"{len(shape) - 2} extents")
    return (*shape[:2], *check_extents(op, "output_size", given, (len(shape) - 2,)))


def _make_unpool(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> UnpoolProblem:
    op = "max_unpool"
    x = operand(op, "x", tensors, FLOATS + INTEGERS)
    indices = operand(op, "indices", tensors, (S64, S32), x.shape)
    shape = _unpooled(op, x.shape, attrs.get("output_size"))
    operands = (Operand("x", x), Operand("indices", indices), Operand("y", output(op, "y", tensors, (x.dtype,), shape, x), True))
    return UnpoolProblem(op, operands, (("output_size", shape[2:]),), policy=policy)


def _make_unpool_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> UnpoolProblem:
    op = "max_unpool_backward"
    dy = operand(op, "dy", tensors, FLOATS)
    indices = operand(op, "indices", tensors, (S64, S32))
    if dy.rank not in (3, 4, 5) or indices.rank != dy.rank or indices.shape[:2] != dy.shape[:2]:
        raise expected(op, "shape of indices", list(indices.shape), f"{list(dy.shape[:2])} and spatial extents, as dy's {list(dy.shape)}")
    dx = Operand("dx", output(op, "dx", tensors, (dy.dtype,), indices.shape, dy), True)
    return UnpoolProblem(op, (Operand("dy", dy), Operand("indices", indices), dx), policy=policy)


def _largest_bin(length: int, count: int) -> int:
    """max over o of ceil((o + 1) length / count) - floor(o length / count), length > 0.

    With length / count = l / p in lowest terms and r = o l mod p, which takes every value below p, bin o holds ceil((r + l) / p).
    """
    g = gcd(length, count)
    return -(-(count // g - 1 + length // g) // (count // g))


def _padding(op: str, value: Any, extents: tuple[int, ...], window: tuple[int, ...], stride: tuple[int, ...],
             dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    rank = len(extents)
    if isinstance(value, str) and value == "valid":
        return ((0, 0),) * rank
    if isinstance(value, str) and value in ("same", "same_upper", "same_lower"):
        pairs = []
        for length, k, s, d in zip(extents, window, stride, dilation, strict=True):
            total = max((-(-length // s) - 1) * s + d * (k - 1) + 1 - length, 0)
            small = total // 2
            pairs.append((total - small, small) if value == "same_lower" else (small, total - small))
        return tuple(pairs)
    if isinstance(value, (tuple, list)) and len(value) == rank and all(
            isinstance(v, (tuple, list)) and len(v) == 2 and all(is_integer(e, 0, MAX_EXTENT) for e in v) for v in value):
        return tuple((int(v[0]), int(v[1])) for v in value)
    if isinstance(value, str):
        raise expected(op, "padding", repr(value), "an integer >= 0, one or a (low, high) pair per dimension, 'same' (the "
                                                   "longer part behind, as 'same_upper'), 'same_lower' or 'valid'")
    return tuple((v, v) for v in check_integers(op, "padding", value, rank, 0))


def _window_axes(op: str, extents: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[tuple[Axis, ...], dict[str, Any]]:
    """The axes of windowed pooling, and the normalised attributes that say so."""
    rank = len(extents)
    if attrs.get("window") is None:
        raise expected(op, "window", None, f"an integer >= 1 or {rank} of them")
    window = check_integers(op, "window", attrs["window"], rank, 1)
    stride = window if attrs.get("stride") is None else check_integers(op, "stride", attrs["stride"], rank, 1)
    dilation = check_integers(op, "dilation", attrs.get("dilation", 1), rank, 1)
    ceil_mode = check_bool(op, "ceil_mode", attrs.get("ceil_mode", False))
    pads = _padding(op, attrs.get("padding", 0), extents, window, stride, dilation)
    axes = []
    for i, (length, k, s, d, (low, high)) in enumerate(zip(extents, window, stride, dilation, pads, strict=True)):
        slack = length + low + high - (d * (k - 1) + 1)
        outputs = (slack + (s - 1 if ceil_mode else 0)) // s + 1
        if ceil_mode and (outputs - 1) * s >= length + low:  # a window must start inside the input or the left padding
            outputs -= 1
        if outputs < 1:
            raise expected(op, f"window[{i}]", k, f"at most the padded extent {length + low + high} over dilation {d}")
        _check_windows(op, i, Axis(length, outputs, k, s, d, low, high))
        axes.append(Axis(length, outputs, k, s, d, low, high))
    normal: dict[str, Any] = {"window": window}
    if stride != window:
        normal["stride"] = stride
    if any(p != (0, 0) for p in pads):
        normal["padding"] = tuple(p[0] for p in pads) if all(p[0] == p[1] for p in pads) else pads
    if any(d != 1 for d in dilation):
        normal["dilation"] = dilation
    if ceil_mode:
        normal["ceil_mode"] = True
    return tuple(axes), normal


def _check_windows(op: str, i: int, axis: Axis) -> None:
    """Raises unless every window holds an element. Starts ascend, so those left of the input and the last one decide.

    The first skips the most taps; where the next tap falls repeats, and it falls inside any input as long as the dilation.
    """
    period = axis.dilation // gcd(axis.stride, axis.dilation) if axis.extent < axis.dilation else 1
    before = min(axis.outputs, -(-axis.low // axis.stride), period)
    for o in chain(range(before), (axis.outputs - 1,)):
        start = o * axis.stride - axis.low
        skipped = -(-max(-start, 0) // axis.dilation)
        if skipped >= axis.window or start + skipped * axis.dilation >= axis.extent:
            raise InvalidArgument(
                f"{op}: padding is ({axis.low}, {axis.high}) along spatial dimension {i}, so that window {o} (extent {axis.extent}, "
                f"window {axis.window}, stride {axis.stride}, dilation {axis.dilation}) holds no element (expected less padding).")


def _adaptive_axes(op: str, extents: tuple[int, ...], output_size: Any) -> tuple[tuple[Axis, ...], tuple[int, ...]]:
    rank = len(extents)
    if isinstance(output_size, (tuple, list)) and len(output_size) == rank:
        output_size = tuple(e if o is None else o for o, e in zip(output_size, extents, strict=True))
    outputs = check_integers(op, "output_size", output_size, rank, 1)
    axes = []
    for length, count in zip(extents, outputs, strict=True):
        if length < 1:
            raise expected(op, "x", f"of spatial extents {extents}", "no empty spatial dimension")
        if length % count == 0:  # plain windows: cheaper, and the same thing
            axes.append(Axis(length, count, length // count, length // count))
        else:
            axes.append(Axis(length, count, _largest_bin(length, count), adaptive=True))
    return tuple(axes), outputs


def _fractional_axes(op: str, extents: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[tuple[Axis, ...], dict[str, Any]]:
    found = {}
    ratios = attrs.get("output_ratio")
    if ratios is not None:
        if attrs.get("output_size") is not None:
            raise expected(op, "output_ratio", ratios, "None beside output_size")
        ratios = ratios if isinstance(ratios, (tuple, list)) else (ratios,) * len(extents)
        if len(ratios) != len(extents):
            raise expected(op, "output_ratio", tuple(ratios), f"a number between 0 and 1, or {len(extents)} of them")
        numbers = [check_number(op, "output_ratio", r, F64) for r in ratios]
        if not all(0 < r < 1 for r in numbers):
            raise expected(op, "output_ratio", tuple(numbers), "numbers between 0 and 1")
        attrs = {**attrs, "output_size": tuple(int(n * r) for n, r in zip(extents, numbers, strict=True))}
    for name in ("window", "output_size"):
        if attrs.get(name) is None:
            raise expected(op, name, None, f"an integer >= 1 or {len(extents)} of them")
        found[name] = check_integers(op, name, attrs[name], len(extents), 1)
    for i, (length, k, o) in enumerate(zip(extents, found["window"], found["output_size"], strict=True)):
        if o + k - 1 > length:
            raise expected(op, f"output_size[{i}]", o, f"at most {length - k + 1}, so that windows of {k} in {length} elements begin apart")
    return tuple(Axis(length, o, k, fractional=True) for length, k, o in zip(extents, *found.values(), strict=True)), found


def _geometry(op: str, variant: str, x_shape: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[tuple[Axis, ...], dict[str, Any]]:
    if len(x_shape) not in (3, 4, 5):
        raise expected(op, "shape of x", x_shape, "(N, C, spatial) with 1 to 3 spatial dimensions")
    extents = tuple(x_shape[2:])
    if variant == "window":
        return _window_axes(op, extents, attrs)
    if variant == "global":
        return _adaptive_axes(op, extents, 1)[0], {}
    if variant == "fractional":
        return _fractional_axes(op, extents, attrs)
    if attrs.get("output_size") is None:
        raise expected(op, "output_size", None, f"an integer >= 1 or {len(extents)} of them")
    axes, output_size = _adaptive_axes(op, extents, attrs["output_size"])
    return axes, {"output_size": output_size}


_WINDOW_ATTRS = (("window", None), ("stride", None), ("padding", 0), ("dilation", 1), ("ceil_mode", False))


def _attrs(mode: str, variant: str) -> tuple[tuple[str, Any], ...]:
    if variant == "window":
        own = {"max": (), "avg": (("count_include_pad", True), ("divisor_override", None)), "lp": (("norm", 2.0),)}[mode]
        return (*_WINDOW_ATTRS, *own)
    if variant == "fractional":
        return (("window", None), ("output_size", None), ("output_ratio", None))
    return (("output_size", None),) if variant == "adaptive" else ()


def _mode_fields(op: str, mode: str, dtype: DType, attrs: Mapping[str, Any], normal: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"mode": mode}
    if mode == "avg":
        divisor = attrs.get("divisor_override")
        if divisor is not None:
            divisor = check_integer(op, "divisor_override", divisor, -MAX_EXTENT)
            if divisor == 0:
                raise expected(op, "divisor_override", divisor, "None or an integer other than 0")
        if not check_bool(op, "count_include_pad", attrs.get("count_include_pad", True)):
            fields["count_include_pad"] = normal["count_include_pad"] = False
        if divisor is not None:
            fields["divisor"] = normal["divisor_override"] = divisor
    if mode == "lp":
        norm = check_number(op, "norm", attrs.get("norm", 2.0), accumulator_of(dtype))
        if not norm > 0 or (dtype is F64 and norm not in (1.0, 2.0)):
            raise expected(op, "norm", norm, "a positive finite number (1 or 2 for f64)")
        fields["norm"] = norm
        if norm != 2.0:
            normal["norm"] = norm
    return fields


def _make_forward(op: str, mode: str, variant: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any],
                  policy: Policy) -> PoolProblem:
    can_index = mode == "max" and variant != "global"
    x = operand(op, "x", tensors, FLOATS + INTEGERS if mode == "max" and variant != "fractional" else FLOATS)
    check_reach(op, "x", x)
    axes, normal = _geometry(op, variant, x.shape, attrs)
    shape = (*x.shape[:2], *(a.outputs for a in axes))
    fields = _mode_fields(op, mode, x.dtype, attrs, normal)
    operands = [Operand("x", x)]
    if variant == "fractional":
        samples = operand(op, "samples", tensors, FLOATS, (*x.shape[:2], len(axes)))
        check_reach(op, "samples", samples)
        operands.append(Operand("samples", samples))
    operands += [Operand("y", output(op, "y", tensors, (x.dtype,), shape, x), True)]
    if can_index and (check_bool(op, "return_indices", attrs.get("return_indices", False)) or "indices" in tensors):
        normal["return_indices"] = True
        operands.append(Operand("indices", output(op, "indices", tensors, (S64, S32), shape, x), True))
    return PoolProblem(op, tuple(operands), tuple(normal.items()), policy=policy, axes=axes, **fields)


def _make_backward(op: str, mode: str, variant: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any],
                   policy: Policy) -> PoolProblem:
    """max: indices, or x to find them again; lp: x and y; the others dy alone. The gradient has dy's type and layout."""
    dy = operand(op, "dy", tensors, FLOATS)
    x_shape = attrs.get("x_shape")
    if x_shape is None:
        x_shape = next((tensors[n].shape for n in ("x", "dx") if n in tensors), None)
    if x_shape is None:
        raise expected(op, "x_shape", None, "the shape of the pooled tensor")
    x_shape = check_extents(op, "x_shape", x_shape, (3, 4, 5))
    axes, normal = _geometry(op, variant, x_shape, attrs)
    normal["x_shape"] = x_shape
    shape = (*x_shape[:2], *(a.outputs for a in axes))
    if dy.shape != shape:
        raise expected(op, "shape of dy", dy.shape, shape, f"x is {x_shape}.")
    fields = _mode_fields(op, mode, dy.dtype, attrs, normal)
    operands = [Operand("dy", dy)]
    if mode == "max":
        if "indices" in tensors:
            operands.append(Operand("indices", operand(op, "indices", tensors, (S64, S32), shape)))
        else:
            operands.append(Operand("x", operand(op, "x", tensors, (dy.dtype,), x_shape)))
    if mode == "lp":
        operands.append(Operand("x", operand(op, "x", tensors, (dy.dtype,), x_shape)))
        operands.append(Operand("y", operand(op, "y", tensors, (dy.dtype,), shape)))
    operands.append(Operand("dx", output(op, "dx", tensors, (dy.dtype,), x_shape, dy), True))
    return PoolProblem(op, tuple(operands), tuple(normal.items()), policy=policy, axes=axes, **fields)


def _definitions(name: str, mode: str, variant: str) -> tuple[OpDef, OpDef]:
    saved = {"max": ("indices", "x"), "avg": (), "lp": ("x", "y")}[mode]
    can_index = mode == "max" and variant != "global"
    attrs, x_shape = _attrs(mode, variant), (("x_shape", None),)
    if variant == "fractional":
        saved = ("indices",)  # they cannot be found again without the samples
    return (OpDef(name, ("x", "samples") if variant == "fractional" else ("x",), ("y", "indices") if can_index else ("y",),
                  partial(_make_forward, name, mode, variant), attrs=(*attrs, ("return_indices", False)) if can_index else attrs),
            OpDef(name + "_backward", ("dy", *saved), ("dx",), partial(_make_backward, name + "_backward", mode, variant),
                  optional=saved if mode == "max" and variant != "fractional" else (), attrs=(*attrs, *x_shape)))


DEFINITIONS: tuple[OpDef, ...] = (
    *_definitions("max_pool", "max", "window"),
    *_definitions("avg_pool", "avg", "window"),
    *_definitions("lp_pool", "lp", "window"),
    *_definitions("adaptive_max_pool", "max", "adaptive"),
    *_definitions("adaptive_avg_pool", "avg", "adaptive"),
    *_definitions("fractional_max_pool", "max", "fractional"),
    *_definitions("global_max_pool", "max", "global"),
    *_definitions("global_avg_pool", "avg", "global"),
    OpDef("max_unpool", ("x", "indices"), ("y",), _make_unpool, attrs=(("output_size", None),)),
    OpDef("max_unpool_backward", ("dy", "indices"), ("dx",), _make_unpool_backward),
)
