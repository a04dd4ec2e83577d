"""Resize: every spatial dimension of (N, C, spatial) tensors sampled at other places, and its gradient, the exact transpose.

Output o of a dimension of I elements and O outputs lies at s(o) of the input, with ratio = 1 / scale, or I / O where no scale is given:

    half_pixel             (o + 1/2) ratio - 1/2
    pytorch_half_pixel     the same, but 0 where O = 1
    half_pixel_symmetric   the same + I / 2 (1 - O / (scale I)): the middles coincide where scale I is no integer
    asymmetric             o ratio
    align_corners          o (I - 1) / (scale I - 1), 0 where O = 1; as a flag (PyTorch's) o (I - 1) / (O - 1), whatever the scale

nearest takes the element at s(o), rounded; linear weighs elements by 1 - |u|, cubic by Keys' polynomial of |u| < 2, u the distance from
s(o); area averages the elements floor(o I / O) <= i < ceil((o + 1) I / O). With antialias, u is the distance over max(ratio, 1) and the
weights are divided by their sum. Elements outside count as the nearest one inside, or not at all (exclude_outside).
All of this is rational, and places are kept as fractions: no rounding ever picks a neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import lcm, prod
from typing import Any

import numpy as np

from ..dtypes import F64
from ..errors import InvalidArgument, expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import (
    FLOATS,
    MAX_EXTENT,
    check_bool,
    check_choice,
    check_extents,
    check_integers,
    check_number,
    check_reach,
    operand,
    output,
)

ALIASES = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic", "nearest-exact": "nearest_exact"}
MODES = ("nearest", "nearest_exact", "linear", "cubic", "area")
COORDINATES = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "asymmetric", "align_corners")
ROUNDINGS = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
_MOST = 2**62  # of the numerators in 64-bit arithmetic


@dataclass(frozen=True, slots=True)
class Axis:
    """The taps along one dimension, in whole numbers: output o reads the taps q

        floor((step * o + low) / denominator) <= q <= floor((step * o + high) / denominator)

    each weighed by the filter at |q * denominator - (step * o + shift)| / radius.
    """

    extent: int
    outputs: int
    step: int
    shift: int
    denominator: int
    low: int
    high: int
    radius: int


@dataclass(frozen=True)
class ResizeProblem(Problem):
    """mode: "nearest" | "linear" | "cubic" | "area". scales: one a dimension, () where sizes alone say all."""

    mode: str = "nearest"
    axes: tuple[Axis, ...] = ()
    coordinates: str = "half_pixel"
    rounding: str = "floor"
    scales: tuple[Fraction, ...] = ()
    antialias: bool = False
    excludes_outside: bool = False
    coefficient: float = -0.75

    @property
    def is_backward(self) -> bool:
        return self.op.endswith("_backward")

    @property
    def is_normalised(self) -> bool:
        """Whether weights are divided by their sum."""
        return self.mode == "area" or self.antialias or self.excludes_outside

    @property
    def flops(self) -> int:
        taps = prod((a.high - a.low) // a.denominator + 1 for a in self.axes)
        return 2 * taps * self.desc("dy" if self.is_backward else "y").numel


def simplest_fraction(value: float) -> Fraction:
    """A fraction of small terms that rounds to `value`, in f32 if f32 holds it: 3/5 for 0.6, whichever type it went through."""
    kind = np.float32 if float(np.float32(value)) == value else np.float64
    for bits in range(53):
        found = Fraction(value).limit_denominator(1 << bits)
        if kind(float(found)) == value:
            return found
    return Fraction(value)


def _place(coordinates: str, extent: int, outputs: int, scale: Fraction | None) -> tuple[Fraction, Fraction]:
    """(a, b) of s(o) = a o + b."""
    ratio = 1 / scale if scale else Fraction(extent, outputs)
    length = scale * extent if scale else Fraction(outputs)
    half, nowhere = Fraction(1, 2), (Fraction(0), Fraction(0))
    if coordinates == "align_corners":
        return nowhere if outputs == 1 or length <= 1 else (Fraction(extent - 1) / (length - 1), Fraction(0))
    if coordinates == "asymmetric":
        return ratio, Fraction(0)
    if coordinates == "pytorch_half_pixel" and outputs == 1:
        return nowhere
    middle = extent * half * (1 - outputs / length) if coordinates == "half_pixel_symmetric" else 0
    return ratio, ratio * half - half + middle


def _axis(mode: str, coordinates: str, rounding: str, antialias: bool, extent: int, outputs: int, scale: Fraction | None) -> Axis:
    if mode == "area":
        return Axis(extent, outputs, extent, 0, outputs, 0, extent - 1, 1)
    a, b = _place(coordinates, extent, outputs, scale)
    widening = max(Fraction(1), 1 / scale if scale else Fraction(extent, outputs)) if antialias else Fraction(1)
    denominator = lcm(a.denominator, b.denominator, widening.denominator, 2)
    step, shift = int(a * denominator), int(b * denominator)
    if mode == "nearest":
        # ceil(p / d) = floor((p + d - 1) / d); round_prefer_floor is ceil(s - 1/2), round_prefer_ceil floor(s + 1/2)
        half = denominator // 2
        more = {"floor": 0, "ceil": denominator - 1, "round_prefer_floor": half - 1, "round_prefer_ceil": half}[rounding]
        return Axis(extent, outputs, step, shift, denominator, shift + more, shift + more, denominator)
    # taps with |q - s| < support: from floor(s - support) + 1 to ceil(s + support) - 1
    radius = int(widening * denominator)
    support = radius * (1 if mode == "linear" else 2)
    return Axis(extent, outputs, step, shift, denominator, shift - support + denominator, shift + support - 1, radius)


def _geometry(op: str, x_shape: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of the problem, normalised attributes)."""
    if len(x_shape) not in (3, 4, 5):
        raise expected(op, "shape of x", x_shape, "(N, C, spatial) with 1 to 3 spatial dimensions")
    extents = x_shape[2:]
    if min(extents) < 1:
        raise expected(op, "x", f"of spatial extents {extents}", "no empty spatial dimension")
    rank = len(extents)
    normal: dict[str, Any] = {}
    mode = attrs.get("mode", "nearest")
    mode = check_choice(op, "mode", ALIASES.get(mode, mode) if isinstance(mode, str) else mode, MODES)
    is_exact, antialias = mode == "nearest_exact", check_bool(op, "antialias", attrs.get("antialias", False))
    if antialias and mode not in ("linear", "cubic"):
        raise expected(op, "antialias", True, "False, or mode linear or cubic", f"mode is {mode!r}.")

    size, scales = attrs.get("size"), attrs.get("scales")
    fractions: tuple[Fraction, ...] = ()
    if size is None and scales is None:
        raise expected(op, "size", None, f"an integer >= 1 or {rank} of them, or scales")
    if scales is not None:
        values = tuple(scales) if isinstance(scales, (tuple, list)) else (scales,) * rank
        if len(values) != rank:
            raise expected(op, "scales", values, f"a positive number or {rank} of them")
        values = tuple(check_number(op, "scales", v, F64) for v in values)
        if not all(v > 0 for v in values):
            raise expected(op, "scales", values, f"a positive number or {rank} of them")
        if mode == "area":
            raise expected(op, "scales", values, "None for mode area, which goes by size")
        fractions = tuple(map(simplest_fraction, values))
        normal["scales"] = values
    if size is not None:
        size = normal["size"] = check_integers(op, "size", size, rank, 1)
    else:
        size = tuple(math.floor(e * f) for e, f in zip(extents, fractions, strict=True))
        if not all(1 <= s <= MAX_EXTENT for s in size):
            raise expected(op, "scales", normal["scales"], f"outputs of 1 to {MAX_EXTENT} elements", f"The spatial extents are {extents}.")
    if mode != "nearest":
        normal["mode"] = mode

    default = {"nearest": "asymmetric", "area": "asymmetric"}.get(mode, "half_pixel")
    coordinates = check_choice(op, "coordinates", attrs.get("coordinates", default), COORDINATES)
    if check_bool(op, "align_corners", attrs.get("align_corners", False)):
        if "coordinates" in attrs and coordinates != "align_corners":
            raise expected(op, "align_corners", True, "False, or no other coordinates", f"coordinates is {coordinates!r}.")
        coordinates, fractions = "align_corners", ()
        if scales is not None:
            normal["align_corners"] = True
    if coordinates != default:
        if mode in ("area", "nearest_exact") or antialias:
            what = "mode " + mode if mode in ("area", "nearest_exact") else "antialias"
            raise expected(op, "coordinates", repr(coordinates), f"{default!r} for {what}")
        if "align_corners" not in normal:
            normal["coordinates"] = coordinates
    rounding = check_choice(op, "rounding", attrs.get("rounding", "floor"), ROUNDINGS)
    if rounding != "floor":
        if mode != "nearest":
            raise expected(op, "rounding", repr(rounding), "'floor' (the default), or mode nearest", f"mode is {mode!r}.")
        normal["rounding"] = rounding
    if is_exact:
        rounding = "round_prefer_ceil"
    if antialias:
        normal["antialias"] = True
    coefficient = check_number(op, "cubic_coefficient", attrs.get("cubic_coefficient", -0.75), F64)
    if abs(coefficient) > 16:
        raise expected(op, "cubic_coefficient", coefficient, "a number from -16 to 16 (usual: -0.75, -0.5)")
    if coefficient != -0.75:
        normal["cubic_coefficient"] = coefficient
    excludes = check_bool(op, "exclude_outside", attrs.get("exclude_outside", antialias))
    if excludes != antialias:
        if mode not in ("linear", "cubic"):
            raise expected(op, "exclude_outside", True, "False, or mode linear or cubic", f"mode is {mode!r}.")
        normal["exclude_outside"] = excludes

    mode = "nearest" if is_exact else mode
    axes = tuple(_axis(mode, coordinates, rounding, antialias, e, o, fractions[i] if fractions else None)
                 for i, (e, o) in enumerate(zip(extents, size, strict=True)))
    for i, a in enumerate(axes):
        reach = a.step * a.outputs + abs(a.shift) + 3 * a.radius + 3 * a.denominator
        if max(reach, a.denominator * (a.extent + 2 + reach // a.denominator)) >= _MOST:
            raise expected(op, f"scales[{i}]" if fractions else f"size[{i}]", float(fractions[i]) if fractions else a.outputs,
                           "a ratio whose terms fit 64-bit arithmetic", f"The extent is {a.extent}.")
        first, last = (a.high // a.denominator), (a.step * (a.outputs - 1) + a.low) // a.denominator
        if excludes and (first < 0 or last >= a.extent):
            raise InvalidArgument(f"{op}: exclude_outside is True, and along spatial dimension {i} an output reads no element "
                                  f"(expected sizes and scales that keep every output within {a.extent} elements).")
    fields = {"mode": mode, "axes": axes, "coordinates": coordinates, "rounding": rounding, "scales": fractions, "antialias": antialias,
              "excludes_outside": excludes, "coefficient": coefficient}
    return fields, normal


def _make_forward(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ResizeProblem:
    x = operand(op, "x", tensors, FLOATS)
    check_reach(op, "x", x)
    fields, normal = _geometry(op, x.shape, attrs)
    shape = (*x.shape[:2], *(a.outputs for a in fields["axes"]))
    operands = (Operand("x", x), Operand("y", output(op, "y", tensors, (x.dtype,), shape, x), True))
    return ResizeProblem(op, operands, tuple(normal.items()), policy=policy, **fields)


def _make_backward(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ResizeProblem:
    """dx of dy's type and layout."""
    dy = operand(op, "dy", tensors, FLOATS)
    check_reach(op, "dy", dy)
    x_shape = attrs.get("x_shape", tensors["dx"].shape if "dx" in tensors else None)
    if x_shape is None:
        raise expected(op, "x_shape", None, "the shape of the resized tensor")
    x_shape = check_extents(op, "x_shape", x_shape, (3, 4, 5))
    if attrs.get("size") is None and attrs.get("scales") is None:
        attrs = {**attrs, "size": dy.shape[2:]}
    fields, normal = _geometry(op, x_shape, attrs)
    normal["x_shape"] = x_shape
    shape = (*x_shape[:2], *(a.outputs for a in fields["axes"]))
    if dy.shape != shape:
        raise expected(op, "shape of dy", dy.shape, shape, f"x is {x_shape}.")
    operands = (Operand("dy", dy), Operand("dx", output(op, "dx", tensors, (dy.dtype,), x_shape, dy), True))
    return ResizeProblem(op, operands, tuple(normal.items()), policy=policy, **fields)


_ATTRS: tuple[tuple[str, Any], ...] = (
    ("size", None), ("mode", "nearest"), ("scales", None), ("align_corners", False), ("coordinates", None), ("rounding", "floor"),
    ("antialias", False), ("cubic_coefficient", -0.75), ("exclude_outside", None))

DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("resize", ("x",), ("y",), partial(_make_forward, "resize"), attrs=_ATTRS),
    OpDef("resize_backward", ("dy",), ("dx",), partial(_make_backward, "resize_backward"), attrs=(*_ATTRS, ("x_shape", None))),
)
