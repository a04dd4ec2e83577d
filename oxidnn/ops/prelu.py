"""PReLU: a slope below 0 that is learnt, one for all or one a channel (dimension 1).

    prelu x=f16[8,64,7,7] slope=f32[64]                         y: x where x > 0, else slope * x
    prelu_backward dy=f16[8,64,7,7] x=f16[8,64,7,7] slope=f32[64]    dx, dslope
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import dtypes
from ..codegen.pointwise import parse
from ..dtypes import DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_reach, describe, operand, output
from .pointwise import MAX_RANK, PointwiseProblem, pointwise_problem


@dataclass(frozen=True)
class PreluGradientProblem(Problem):
    """elements: dx, and every element's share of dslope in the type that those are summed in, over dy, x and slope."""

    elements: PointwiseProblem = None  # type: ignore[assignment]

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        return ("dx", "dy"), ("dx", "x")

    @property
    def accumulate(self) -> DType:
        return dtypes.F64 if any(o.desc.dtype is dtypes.F64 for o in self.operands) else dtypes.F32

    @property
    def axes(self) -> tuple[int, ...]:
        """Those that dslope sums over."""
        rank = self.desc("x").rank
        return tuple(a for a in range(rank) if a != 1 or self.desc("slope").numel == 1)


def _checked(op: str, tensors: Mapping[str, TensorDesc]) -> tuple[TensorDesc, TensorDesc, str]:
    """(x, slope, how an expression names the slope)."""
    x, slope = (operand(op, name, tensors, FLOATS) for name in ("x", "slope"))
    check_reach(op, "x", x)
    if x.rank > MAX_RANK:
        raise expected(op, "rank of x", x.rank, f"at most {MAX_RANK}")
    allowed = ((1,), (x.shape[1],)) if x.rank > 1 else ((1,),)
    if slope.shape not in allowed:
        raise expected(op, "shape of slope", list(slope.shape), " or ".join(str(list(s)) for s in allowed), describe(tensors))
    return x, slope, "slope[c]" if x.rank > 1 else "slope"


def make_prelu(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> PointwiseProblem:
    """y has the type of x unless it is given."""
    _, _, slope = _checked("prelu", tensors)
    expression = parse(f"where(x > 0, x, {slope} * x)")
    return pointwise_problem("prelu", expression, ("x", "slope"), tensors, (), ("y",), None, policy, default="x")


def make_prelu_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> PreluGradientProblem:
    """dx in the type of x, dslope in that of slope, unless they are given. x = 0 counts as below 0."""
    op = "prelu_backward"
    x, slope, name = _checked(op, tensors)
    dy = operand(op, "dy", tensors, FLOATS, x.shape)
    dx = output(op, "dx", tensors, (x.dtype, *FLOATS), x.shape, x)
    dslope = output(op, "dslope", tensors, (slope.dtype, *FLOATS), slope.shape, slope)
    every = (dy, x, slope, dx, dslope)
    kind = dtypes.F64 if any(d.dtype is dtypes.F64 for d in every) else dtypes.F32
    share = TensorDesc(kind, x.shape, TensorDesc.packed(kind, x.shape).strides)
    expression = parse(f"where(x > 0, dy, dy * {name}), where(x > 0, 0, dy * x)")
    seen = {"dy": dy, "x": x, "slope": slope, "dx": dx, "share": share}
    elements = pointwise_problem(op, expression, expression.args, seen, (), ("dx", "share"), None, Policy())
    operands = (Operand("dy", dy), Operand("x", x), Operand("slope", slope), Operand("dx", dx, True), Operand("dslope", dslope, True))
    return PreluGradientProblem(op, operands, (), policy=policy, elements=elements)


DEFINITIONS = (
    OpDef("prelu", ("x", "slope"), ("y",), make_prelu),
    OpDef("prelu_backward", ("dy", "x", "slope"), ("dx", "dslope"), make_prelu_backward),
)
