"""Gated linear units: the halves a, b of a tensor along an axis, one through a function, times the other.

    glu x=bf16[64,512] name=swiglu axis=-1              y of half the extent
    glu_backward dy=bf16[64,256] x=bf16[64,512] name=swiglu     dx

name: "glu" a * sigmoid(b), as PyTorch's; "swiglu" silu(a) * b; "geglu" gelu(a) * b; "geglu_tanh"; "reglu" relu(a) * b; "bilinear" a * b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..codegen.pointwise import outputs, parse
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy
from .checks import FLOATS, canonical, check_choice, check_output, check_reach, check_shape, is_integer, operand
from .pointwise import PointwiseProblem, View, like, pointwise_problem

UNITS = {"glu": "a * sigmoid(b)", "swiglu": "silu(a) * b", "geglu": "gelu(a) * b", "geglu_tanh": "gelu_tanh(a) * b", "reglu": "relu(a) * b",
         "bilinear": "a * b"}


def _halves(op: str, name: str, desc: TensorDesc, axis: int) -> tuple[tuple[TensorDesc, int], tuple[TensorDesc, int]]:
    """(description, offset of the first element) of each half."""
    half, stride = desc.shape[axis] // 2, desc.strides[axis]
    shape = (*desc.shape[:axis], half, *desc.shape[axis + 1:])
    moved = half * stride * desc.dtype.num_bytes
    align = math.gcd(desc.align, moved) if moved else desc.align
    return (TensorDesc(desc.dtype, shape, desc.strides, desc.align), 0), (TensorDesc(desc.dtype, shape, desc.strides, align), half * stride)


def _checked(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any]) -> tuple[TensorDesc, int, tuple[tuple[str, Any], ...]]:
    """(x, axis, normalised attributes)."""
    x = operand(op, "x", tensors, FLOATS)
    check_reach(op, "x", x)
    name = check_choice(op, "name", attrs.get("name", "glu"), tuple(UNITS))
    axis = attrs.get("axis", -1)
    if not is_integer(axis, -x.rank, x.rank - 1):
        raise expected(op, "axis", repr(axis), f"an integer in [{-x.rank}, {x.rank})")
    axis = int(axis) % x.rank
    if x.shape[axis] % 2:
        raise expected(op, f"extent of x along axis {axis}", x.shape[axis], "an even number")
    normal: list[tuple[str, Any]] = [("name", name)] if name != "glu" else []
    if axis != x.rank - 1:
        normal.append(("axis", axis))
    return x, axis, tuple(normal)


def make_glu(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> PointwiseProblem:
    """y has the type of x unless it is given."""
    x, axis, normal = _checked("glu", tensors, attrs)
    (a, _), (b, offset) = _halves("glu", "x", x, axis)
    expression = parse(UNITS[attrs.get("name", "glu")])
    seen = {"a": a, "b": b} | ({"y": tensors["y"]} if "y" in tensors else {"y": canonical(like(a, x.dtype))})
    problem = pointwise_problem("glu", expression, ("a", "b"), seen, normal, ("y",), None, policy, default="a")
    y = problem.outputs[0]
    views = (View(Operand("a", a), "x"), View(Operand("b", b), "x", offset), View(y, "y"))
    return replace(problem, operands=(Operand("x", x), y), views=views)


def make_glu_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> PointwiseProblem:
    """dx, in the type of x unless it is given."""
    op = "glu_backward"
    x, axis, normal = _checked(op, tensors, attrs)
    (a, _), (b, offset) = _halves(op, "x", x, axis)
    dy = operand(op, "dy", tensors, FLOATS, a.shape)
    forward = parse(UNITS[attrs.get("name", "glu")])
    gradients = outputs(forward.differentiate("a"), forward.differentiate("b"))
    dx = tensors.get("dx", canonical(like(x, x.dtype)))
    check_shape(op, "dx", dx, x.shape, tensors)
    check_output(op, "dx", dx, x.shape, tensors)
    (da, _), (db, dx_offset) = _halves(op, "dx", dx, axis)
    seen = {"dy": dy, "a": a, "b": b, "da": da, "db": db}
    problem = pointwise_problem(op, gradients, ("dy", "a", "b"), seen, normal, ("da", "db"), None, policy, default="a")
    views = (View(Operand("dy", dy), "dy"), View(Operand("a", a), "x"), View(Operand("b", b), "x", offset),
             View(Operand("da", da, True), "dx"), View(Operand("db", db, True), "dx", dx_offset))
    return replace(problem, operands=(Operand("dy", dy), Operand("x", x), Operand("dx", dx, True)), views=views)


_ATTRS: tuple[tuple[str, Any], ...] = (("axis", -1), ("name", "glu"))
DEFINITIONS = (
    OpDef("glu", ("x",), ("y",), make_glu, attrs=_ATTRS),
    OpDef("glu_backward", ("dy", "x"), ("dx",), make_glu_backward, attrs=_ATTRS),
)
