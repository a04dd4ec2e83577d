"""Reductions over any axes.

    reduce x=f16[8,64,7,7]nhwc op=sum axes=(0,2,3) keepdims=False       y
    reduce x=... op=max return_indices=True                             y, indices
    reduce_to x=f16[8,64,7,7] shape=(64,1,1)                            y: what a broadcast from that shape takes back
    trace x=f32[5,9,9] diagonal=-1                                      y
    reduce_backward dy=f16[64] x=f16[8,64,7,7]nhwc op=norm2 axes=(0,2,3)     dx; y, too, may be given

NaN propagates in max and min (NumPy's rule); argmax and argmin give the first of equals, the first NaN before all, as an index over the
reduced axes taken in the order of the tensor. Over no elements sum is 0, prod 1, any False, all True, mean and var NaN, logsumexp -inf;
max, min, amax, argmax and argmin raise. f16 and bf16 accumulate in f32, integers exactly. var and std merge moments, in f32 or, of f64 or
integers, in f64: a mean far from zero costs no digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from .. import dtypes
from ..dtypes import DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import (
    FLOATS,
    MAX_EXTENT,
    check_bool,
    check_choice,
    check_dtype,
    check_extents,
    check_integer,
    check_output,
    check_reach,
    describe,
    is_integer,
    operand,
    output,
)

STORED = ("f64", "f32", "f16", "bf16", "s8", "u8", "s16", "u16", "s32", "u32", "s64", "bool")
MAX_RANK = 8
KINDS = ("sum", "mean", "max", "min", "prod", "amax", "norm1", "norm2", "mul_no_zeros", "any", "all", "count_nonzero", "argmax",
         "argmin", "logsumexp", "var", "std")
NEED_ELEMENTS = ("max", "min", "amax", "argmax", "argmin")
FRACTIONAL = ("mean", "norm2", "logsumexp", "var", "std")  # of integers: a float
COUNTED = ("sum", "prod", "norm1", "mul_no_zeros")  # of integers: s64

# dx by the kind of reduction, and what the expression needs beside dy and x: y, what another reduction finds, how many elements attain y
# or are 0. `count` stands for the number of elements less the correction. The y of amax is compared with sizes.
GRADIENTS: dict[str, tuple[str, ...]] = {
    "sum": ("dy",), "mean": ("dy / count",), "norm1": ("dy * sign(x)",), "norm2": ("where(y == 0, 0, dy * x / y)", "y"),
    "logsumexp": ("dy * exp(x - y)", "y"),
    "max": ("where(x == y, dy / ties, 0)", "y", "ties"), "min": ("where(x == y, dy / ties, 0)", "y", "ties"),
    "amax": ("where(abs(x) == y, dy * sign(x) / ties, 0)", "y", "ties"), "mul_no_zeros": ("where(x == 0, 0, dy * y / x)", "y"),
    "prod": ("dy * where(zeros == 0, mul_no_zeros / x, where(logical_and(zeros == 1, x == 0), mul_no_zeros, 0))", "mul_no_zeros", "zeros"),
    "var": ("2 * dy * (x - mean) / count", "mean"), "std": ("where(y == 0, 0, dy * (x - mean) / (count * y))", "mean", "y"),
}  # fmt: skip

@dataclass(frozen=True)
class ReduceProblem(Problem):
    """kind: one of KINDS. axes: the reduced ones, ascending. correction: what var and std take from the number of elements. diagonal: of
    the last two dimensions, in whose place it is reduced."""

    kind: str = "sum"
    axes: tuple[int, ...] = ()
    keepdims: bool = False
    correction: int = 0
    diagonal: int | None = None

    @property
    def source(self) -> tuple[TensorDesc, int]:
        """What is reduced, and the offset of its first element in x."""
        x = self.desc("x")
        if self.diagonal is None:
            return x, 0
        *outer, rows, columns = x.shape
        *strides, down, right = x.strides
        count = max(0, min(rows + min(self.diagonal, 0), columns - max(self.diagonal, 0)))
        offset = (self.diagonal * right if self.diagonal > 0 else -self.diagonal * down) if count else 0
        align = math.gcd(x.align, offset * x.dtype.num_bytes) if offset else x.align
        return TensorDesc(x.dtype, (*outer, count), (*strides, down + right), align), offset

    @property
    def result(self) -> TensorDesc:
        """y, with the dimensions that x has before its own."""
        y, lead = self.desc("y"), self.desc("x").rank - self.desc("y").rank
        return TensorDesc(y.dtype, (1,) * lead + y.shape, (1,) * lead + y.strides, y.align) if self.op == "reduce_to" else y

    @property
    def num_reduced(self) -> int:
        """Elements behind each output."""
        return prod(self.source[0].shape[a] for a in self.axes)


@dataclass(frozen=True)
class ReduceGradientProblem(Problem):
    """kind, axes, correction: of the reduction. dy and y have the reduced dimensions with extent 1, or not at all."""

    kind: str = "sum"
    axes: tuple[int, ...] = ()
    correction: int = 0

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape of the reduction's result, reduced dimensions with extent 1."""
        return tuple(1 if a in self.axes else n for a, n in enumerate(self.desc("x").shape))

    @property
    def expression(self) -> str:
        """dx over dy, x and what the reduction finds."""
        count = prod(self.desc("x").shape[a] for a in self.axes)
        return GRADIENTS[self.kind][0].replace("count", str(max(count - self.correction, 0)))

    @property
    def missing(self) -> tuple[str, ...]:
        """What has to be found first."""
        return tuple(name for name in GRADIENTS[self.kind][1:] if not (name == "y" and self.has("y")))

    @property
    def accumulate(self) -> str:
        return "f64" if any(o.desc.dtype is dtypes.F64 for o in self.operands) else "f32"

    def kept_strides(self, desc: TensorDesc) -> tuple[int, ...]:
        """Strides along x's dimensions of a tensor of the result's shape, with or without the reduced ones."""
        own = iter(desc.strides)
        strides = [0 if a in self.axes and desc.rank < len(self.kept) else next(own) for a in range(len(self.kept))]
        return tuple(0 if n == 1 else s for n, s in zip(self.kept, strides, strict=True))


def default_dtype(kind: str, x: DType) -> DType:
    if kind in ("any", "all"):
        return dtypes.BOOL
    if kind in ("argmax", "argmin", "count_nonzero"):
        return dtypes.S64
    if x.is_float:
        return x
    return dtypes.F32 if kind in FRACTIONAL else dtypes.S64 if kind in COUNTED else x


def normalize_axes(op: str, axes: Any, rank: int) -> tuple[int, ...]:
    """Ascending, non-negative axes; None means all. Raises InvalidArgument for one out of range or given twice."""
    if axes is None:
        return tuple(range(rank))
    given = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    found = []
    for a in given:
        if not is_integer(a, -rank, rank - 1):
            raise expected(op, "axes", axes, f"integers in [{-rank}, {rank}) or None")
        found.append(int(a) % rank)
    if len(set(found)) != len(found):
        raise expected(op, "axes", axes, "different axes")
    return tuple(sorted(found))


def make_reduce(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ReduceProblem:
    """op: one of KINDS. axes: an int, a tuple or None (all). keepdims: reduced axes stay with size 1. correction: of var and std.
    return_indices: of max, min and amax also where the first such element is, as argmax has it."""
    x = tensors["x"]
    kind = check_choice("reduce", "op", attrs.get("op", "sum"), KINDS)
    if x.rank > MAX_RANK:
        raise expected("reduce", "rank of x", x.rank, f"at most {MAX_RANK}")
    axes = normalize_axes("reduce", attrs.get("axes"), x.rank)
    keepdims = check_bool("reduce", "keepdims", attrs.get("keepdims", False))
    correction = check_integer("reduce", "correction", attrs.get("correction", 0), -MAX_EXTENT)
    if correction and kind not in ("var", "std"):
        raise expected("reduce", "correction", correction, f"none for {kind}")
    shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes)
    y = tensors.get("y", TensorDesc.packed(default_dtype(kind, x.dtype), shape))
    stored = [dtypes.dtype(name) for name in STORED]
    check_dtype("reduce", "x", x, tensors, stored)
    check_output("reduce", "y", y, shape, tensors, stored)
    if kind in ("any", "all") and y.dtype.name != "bool":
        raise expected("reduce", "type of y", y.dtype, f"bool for {kind}")
    if kind in ("argmax", "argmin", "count_nonzero") and y.dtype.name not in ("s32", "s64", "u32"):
        raise expected("reduce", "type of y", y.dtype, f"s32, s64 or u32 for {kind}")
    if kind in FRACTIONAL and not y.dtype.is_float:
        raise expected("reduce", "type of y", y.dtype, f"a float type for {kind}")
    if kind in NEED_ELEMENTS and y.numel and x.numel == 0:
        raise expected("reduce", "shape of x", list(x.shape), f"at least one element behind each output of {kind}")
    normal: list[tuple[str, Any]] = [("op", kind), ("axes", axes)]
    if keepdims:
        normal.append(("keepdims", True))
    if correction:
        normal.append(("correction", correction))
    operands = [Operand("x", x), Operand("y", y, True)]
    if check_bool("reduce", "return_indices", attrs.get("return_indices", False)) or "indices" in tensors:
        if kind not in ("max", "min", "amax"):
            raise expected("reduce", "return_indices", True, f"False, but for max, min and amax (not {kind})")
        normal.append(("return_indices", True))
        operands.append(Operand("indices", output("reduce", "indices", tensors, (dtypes.S64, dtypes.S32, dtypes.U32), shape, y), True))
    return ReduceProblem("reduce", tuple(operands), tuple(normal), policy=policy, kind=kind, axes=axes, keepdims=keepdims,
                         correction=correction)


def make_reduce_to(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ReduceProblem:
    """shape: one that broadcasts to that of x; dimensions that it lacks, or has with extent 1, are reduced. op: sum, max, min or prod."""
    op, x = "reduce_to", tensors["x"]
    kind = check_choice(op, "op", attrs.get("op", "sum"), ("sum", "max", "min", "prod"))
    if "shape" not in attrs and "y" not in tensors:
        raise expected(op, "shape", "missing", "the shape of the result")
    shape = check_extents(op, "shape", attrs.get("shape", tensors["y"].shape if "y" in tensors else ()), range(x.rank + 1))
    lead = x.rank - len(shape)
    if any(n not in (1, m) for n, m in zip(shape, x.shape[lead:], strict=True)):
        raise expected(op, "shape", list(shape), f"a shape that broadcasts to {list(x.shape)}")
    axes = (*range(lead), *(lead + i for i, (n, m) in enumerate(zip(shape, x.shape[lead:], strict=True)) if n != m))
    stored = [dtypes.dtype(name) for name in STORED]
    check_dtype(op, "x", x, tensors, stored)
    y = tensors.get("y", TensorDesc.packed(default_dtype(kind, x.dtype), shape))
    check_output(op, "y", y, shape, tensors, stored)
    if kind in NEED_ELEMENTS and y.numel and x.numel == 0:
        raise expected(op, "shape of x", list(x.shape), f"at least one element behind each output of {kind}")
    normal: list[tuple[str, Any]] = [("shape", shape)] + ([("op", kind)] if kind != "sum" else [])
    return ReduceProblem(op, (Operand("x", x), Operand("y", y, True)), tuple(normal), policy=policy, kind=kind, axes=axes, keepdims=True)


def make_trace(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ReduceProblem:
    """diagonal: of the last two dimensions, above the main one if positive, whose sum is taken."""
    op, x = "trace", tensors["x"]
    if not 2 <= x.rank <= MAX_RANK:
        raise expected(op, "rank of x", x.rank, f"2 to {MAX_RANK}")
    diagonal = check_integer(op, "diagonal", attrs.get("diagonal", 0), -MAX_EXTENT)
    stored = [dtypes.dtype(name) for name in STORED]
    check_dtype(op, "x", x, tensors, stored)
    y = tensors.get("y", TensorDesc.packed(default_dtype("sum", x.dtype), x.shape[:-2]))
    check_output(op, "y", y, x.shape[:-2], tensors, stored)
    return ReduceProblem(op, (Operand("x", x), Operand("y", y, True)), (("diagonal", diagonal),) if diagonal else (), policy=policy,
                         kind="sum", axes=(x.rank - 2,), diagonal=diagonal)


def make_reduce_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ReduceGradientProblem:
    """dx in the shape and type of x. op, axes, correction: of the reduction. y: its result, which is found again where it is not given."""
    op = "reduce_backward"
    kind = check_choice(op, "op", attrs.get("op", "sum"), tuple(GRADIENTS))
    x, dy = operand(op, "x", tensors, FLOATS), operand(op, "dy", tensors, FLOATS)
    if x.rank > MAX_RANK:
        raise expected(op, "rank of x", x.rank, f"at most {MAX_RANK}")
    check_reach(op, "x", x)
    axes = normalize_axes(op, attrs.get("axes"), x.rank)
    correction = check_integer(op, "correction", attrs.get("correction", 0), 0)
    if correction and kind not in ("var", "std"):
        raise expected(op, "correction", correction, f"none for {kind}")
    shapes = tuple(1 if a in axes else n for a, n in enumerate(x.shape)), tuple(n for a, n in enumerate(x.shape) if a not in axes)
    y = operand(op, "y", tensors, FLOATS) if "y" in tensors else None
    for name, desc in (("dy", dy), *((("y", y),) if y is not None else ())):
        if desc.shape not in shapes:
            raise expected(op, f"shape of {name}", list(desc.shape), f"{list(shapes[0])}, also without those of 1", describe(tensors))
    dx = output(op, "dx", tensors, (x.dtype,), x.shape, x)
    normal: list[tuple[str, Any]] = [("op", kind), ("axes", axes)] + ([("correction", correction)] if correction else [])
    operands = [Operand("dy", dy), Operand("x", x), *([Operand("y", y)] if y is not None else []), Operand("dx", dx, True)]
    return ReduceGradientProblem(op, tuple(operands), tuple(normal), policy=policy, kind=kind, axes=axes, correction=correction)


DEFINITIONS = (OpDef("reduce", ("x",), ("y", "indices"), make_reduce,
                     attrs=(("op", "sum"), ("axes", None), ("keepdims", False), ("correction", 0), ("return_indices", False))),
               OpDef("reduce_to", ("x",), ("y",), make_reduce_to, attrs=(("shape", None), ("op", "sum"))),
               OpDef("trace", ("x",), ("y",), make_trace, attrs=(("diagonal", 0),)),
               OpDef("reduce_backward", ("dy", "x", "y"), ("dx",), make_reduce_backward, optional=("y",),
                     attrs=(("op", "sum"), ("axes", None), ("correction", 0))))
