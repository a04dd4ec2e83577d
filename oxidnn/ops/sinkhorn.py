"""Sinkhorn's iterations: matrices whose rows and columns sum to 1 from any (..., n, n), as hyper-connections mix their streams with.

    sinkhorn x=f32[8,64,4,4] iterations=20 eps=1e-06               y
    sinkhorn_backward dy=f32[8,64,4,4] x=f32[8,64,4,4]             dx

M = e^(x - the largest of each column); then, `iterations` times, each column is divided by its sum + eps, and each row by its sum + eps:
rows sum to 1 up to eps, columns the more closely the more iterations. n is at most 8 (of f64 5). Arithmetic is f32 (f64 for f64). The
gradient is that of the iterations themselves, which are run again; what is subtracted from a column counts as constant. References:
Sinkhorn and Knopp, 1967; manifold-constrained hyper-connections, Xie et al., 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import F32, F64
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_integer, check_number, describe, operand, output

ITERATIONS, EPS = 20, 1e-6
MAX_ITERATIONS = 1000


@dataclass(frozen=True)
class SinkhornProblem(Problem):
    iterations: int = ITERATIONS
    eps: float = EPS

    @property
    def size(self) -> int:
        """Rows of a matrix."""
        return self.desc("x").shape[-1]

    @property
    def count(self) -> int:
        """Matrices."""
        return self.desc("x").numel // max(self.size**2, 1)

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """A thread reads a matrix before it writes it."""
        return tuple((self.outputs[0].name, o.name) for o in self.inputs)

    @property
    def flops(self) -> int:
        return self.desc("x").numel * (4 + 4 * self.iterations)


def _make(op: str, first: str, result: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> SinkhornProblem:
    x = operand(op, "x", tensors, FLOATS)
    most = 5 if x.dtype is F64 else 8
    if x.rank < 2 or x.shape[-1] != x.shape[-2] or not 1 <= x.shape[-1] <= most:
        raise expected(op, "shape of x", list(x.shape), f"(..., n, n) with n from 1 to {most} ({x.dtype})", describe(tensors))
    iterations = check_integer(op, "iterations", attrs.get("iterations", ITERATIONS), 0, MAX_ITERATIONS)
    eps = check_number(op, "eps", attrs.get("eps", EPS), F64 if x.dtype is F64 else F32)
    if eps < 0:
        raise expected(op, "eps", repr(eps), "a number that is not negative")
    operands = [Operand("dy", operand(op, "dy", tensors, (x.dtype,), x.shape))] if first == "dy" else []
    operands += [Operand("x", x), Operand(result, output(op, result, tensors, (x.dtype,), x.shape, x), True)]
    normal = [(n, v) for n, v, default in (("iterations", iterations, ITERATIONS), ("eps", eps, EPS)) if v != default]
    return SinkhornProblem(op, tuple(operands), tuple(normal), policy=policy, iterations=iterations, eps=eps)


def make_sinkhorn(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> SinkhornProblem:
    return _make("sinkhorn", "x", "y", tensors, attrs, policy)


def make_sinkhorn_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> SinkhornProblem:
    return _make("sinkhorn_backward", "dy", "dx", tensors, attrs, policy)


_ATTRS = (("iterations", ITERATIONS), ("eps", EPS))
DEFINITIONS = (
    OpDef("sinkhorn", ("x",), ("y",), make_sinkhorn, attrs=_ATTRS),
    OpDef("sinkhorn_backward", ("dy", "x"), ("dx",), make_sinkhorn_backward, attrs=_ATTRS),
)
