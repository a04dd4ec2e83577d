"""Grouped GEMM: rows sorted by group, a matrix a group (mixture of experts). How many rows each group has is known on the device only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..codegen import pointwise as expr
from ..codegen.pointwise import Expression
from ..dtypes import F32, F64, S32, S64, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_bool, check_choice, check_dtype, check_reach, check_shape, describe
from .gemm import FP8, GATES, INT8, made_output, out_types


@dataclass(frozen=True, kw_only=True)
class GroupedGemmProblem(Problem):
    """grouped_gemm: d[r] = a[r] @ b[g] for the rows r of group g. a: (rows, k); b: (groups, k, n), or (groups, n, k) if transpose_b;
    d: (rows, n), with a gate (rows, n / 2): gate(z[:, :n/2]) * z[:, n/2:] of z = a[r] @ b[g].
    grouped_gemm_wgrad: d[g] = a[rows of g]^T @ b[rows of g]. a: (rows, m); b: (rows, n); d: (groups, m, n).

    group_sizes: (groups,) of s32 or s64, rows of each group, groups in turn from row 0 on; with is_cumulative the row where each ends.
    Whatever it holds, groups take the rows there are: a size below 0 counts as 0. Rows of no group give zeros, and enter no sum.
    """

    groups: int
    rows: int
    m: int  # of wgrad, else `rows`
    n: int
    k: int  # of wgrad `rows`
    transpose_b: bool
    is_cumulative: bool
    gate: str | None = None

    @property
    def is_wgrad(self) -> bool:
        return self.op.endswith("_wgrad")

    @property
    def epilogue(self) -> Expression | None:
        """What is written, over "acc" and, with a gate, "up"."""
        if self.gate is None:
            return None
        return (expr.acc if self.gate == "identity" else expr.apply(self.gate, expr.acc)) * expr.arg("up")

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def accumulator(self) -> DType:
        """Exact 32-bit integers (modulo 2^32) of 8-bit integers."""
        kind = self.desc("a").dtype
        return S32 if kind in INT8 else F64 if kind is F64 else F32


def _make(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> GroupedGemmProblem:
    context, is_wgrad = describe(tensors), op.endswith("_wgrad")
    a, b, sizes = (tensors[name] for name in ("a", "b", "group_sizes"))
    for name, desc, rank in (("a", a, 2), ("b", b, 2 if is_wgrad else 3), ("group_sizes", sizes, 1)):
        if desc.rank != rank:
            raise expected(op, f"rank of {name}", desc.rank, rank, context)
        check_reach(op, name, desc, context)
    for name, desc in (("a", a), ("b", b)):
        check_dtype(op, name, desc, tensors, (*FLOATS, *FP8, *INT8))
    check_dtype(op, "group_sizes", sizes, tensors, (S32, S64))
    mates = next((group for group in (FP8, INT8) if a.dtype in group), (a.dtype,))
    if b.dtype not in mates:
        raise expected(op, "type of b", b.dtype, " or ".join(t.name for t in mates) + f", as a is {a.dtype}", context)
    flags = {name: check_bool(op, name, attrs.get(name, False), context) for name in ("transpose_b", "cumulative")}
    groups, rows = sizes.shape[0], a.shape[0]
    if is_wgrad:
        (m, n), k = (a.shape[1], b.shape[1]), rows
        check_shape(op, "b", b, (rows, n), tensors)
        shape: tuple[int, ...] = (groups, m, n)
    else:
        m, k = rows, a.shape[1]
        n = b.shape[1 if flags["transpose_b"] else 2]
        check_shape(op, "b", b, (groups, n, k) if flags["transpose_b"] else (groups, k, n), tensors)
        shape = (rows, n)
    gate = check_choice(op, "gate", attrs["gate"], GATES) if attrs.get("gate") is not None else None
    if gate is not None:
        if n % 2:
            raise expected(op, "columns of b", n, "an even number with a gate: its columns, then those it is multiplied with", context)
        shape = (rows, n // 2)
    d = made_output(op, "d", "out_dtype", tensors, attrs.get("out_dtype"), out_types(a.dtype, gate is not None), shape)
    kept: list[tuple[str, Any]] = [(name, True) for name, value in flags.items() if value]
    kept += [("gate", gate)] if gate is not None else []
    operands = (Operand("a", a), Operand("b", b), Operand("group_sizes", sizes), Operand("d", d, True))
    return GroupedGemmProblem(op, operands, tuple(kept), policy=policy, groups=groups, rows=rows, m=m, n=n, k=k,
                              transpose_b=flags["transpose_b"], is_cumulative=flags["cumulative"], gate=gate)


def _forward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> GroupedGemmProblem:
    return _make("grouped_gemm", tensors, attrs, policy)


def _wgrad(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> GroupedGemmProblem:
    return _make("grouped_gemm_wgrad", tensors, attrs, policy)


DEFINITIONS = (
    OpDef("grouped_gemm", ("a", "b", "group_sizes"), ("d",), _forward, (),
          (("transpose_b", False), ("cumulative", False), ("gate", None), ("out_dtype", None))),
    OpDef("grouped_gemm_wgrad", ("a", "b", "group_sizes"), ("d",), _wgrad, (), (("cumulative", False), ("out_dtype", None))),
)
