"""Scans along one axis.

    cumsum x=f16[8,1000] axis=-1 reverse=True exclusive=True      y: of each element what it and those before it (behind it) give together
    cumprod, logcumsumexp x=...                                    y
    cummax, cummin x=...                                           y, indices (along the axis)
    cumprod_backward dy=... x=...; cummax_backward dy=... indices=... (of cummin, too); logcumsumexp_backward dy=... x=... y=...      dx

The gradient of cumsum is cumsum the other way. reverse: from the end on. exclusive: without the element itself, which gives 0, 1 or -inf
first. f16, bf16 and f32 accumulate in f32, f64 in f64, integers exactly modulo 2^64, or 2^32 where y has 32 bits: as PyTorch, y is of the
type of x, of integers s64, unless dtype says otherwise. Among equals cummax and cummin give the last index in the order of the scan, and
NaN wins (the last one's index). The order of operations depends on shapes alone: results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from .. import dtypes
from ..dtypes import F32, F64, S32, S64, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_bool, check_reach, describe, is_integer, operand, output
from .reduce import STORED

MAX_RANK = 8
_STORED = tuple(dtypes.dtype(name) for name in STORED)


@dataclass(frozen=True)
class ScanProblem(Problem):
    """axis: non-negative. reverse and exclusive: of the forward. The first operand has the shape of all."""

    axis: int = 0
    reverse: bool = False
    exclusive: bool = False

    @property
    def is_backward(self) -> bool:
        return self.op.endswith("_backward")

    @property
    def extent(self) -> int:
        """Elements along the axis."""
        return self.operands[0].desc.shape[self.axis]


def _direction(op: str, x: TensorDesc, attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes that all scans have: normalised, and as fields."""
    if not 1 <= x.rank <= MAX_RANK:
        raise expected(op, "rank", x.rank, f"1 to {MAX_RANK}")
    axis = attrs.get("axis", -1)
    if not is_integer(axis, -x.rank, x.rank - 1):
        raise expected(op, "axis", repr(axis), f"an integer in [{-x.rank}, {x.rank})")
    fields: dict[str, Any] = {"axis": int(axis) % x.rank}
    normal: dict[str, Any] = {} if fields["axis"] == x.rank - 1 else dict(fields)
    for name in ("reverse", "exclusive"):
        fields[name] = check_bool(op, name, attrs.get(name, False))
        if fields[name]:
            normal[name] = True
    return normal, fields


def _checked(op: str, name: str, tensors: Mapping[str, TensorDesc], allowed: tuple[DType, ...],
             shape: tuple[int, ...] | None = None) -> TensorDesc:
    x = operand(op, name, tensors, allowed, shape)
    check_reach(op, name, x, describe(tensors))
    return x


def _result_types(op: str, x: DType, given: Any) -> tuple[DType, ...]:
    """The types that y may have, the default first."""
    if given is not None:
        kind = dtypes.dtype(given)
        allowed = FLOATS if x.is_float else (S64, S32, *FLOATS)
        if kind not in allowed:
            raise expected(op, "dtype", kind, " or ".join(t.name for t in allowed), f"x is of {x}.")
        return (kind,)
    return (x,) if x.is_float else (S64,)


def _make_sum(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ScanProblem:
    """axis (-1), reverse, exclusive; dtype: of y, for integers s64 (default), s32 or a float."""
    x = _checked(op, "x", tensors, FLOATS if op == "logcumsumexp" else _STORED)
    normal, fields = _direction(op, x, attrs)
    given = attrs.get("dtype")
    if given is None and "y" in tensors and op != "logcumsumexp":
        given = tensors["y"].dtype
    kinds = _result_types(op, x.dtype, given)
    y = output(op, "y", tensors, kinds, x.shape, x)
    if kinds[0] is not _result_types(op, x.dtype, None)[0]:
        normal["dtype"] = kinds[0].name
    return ScanProblem(op, (Operand("x", x), Operand("y", y, True)), tuple(normal.items()), policy=policy, **fields)


def _make_extreme(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ScanProblem:
    """axis (-1), reverse. indices: s64, or s32 if they are given so."""
    x = _checked(op, "x", tensors, _STORED)
    normal, fields = _direction(op, x, attrs)
    y = output(op, "y", tensors, (x.dtype,), x.shape, x)
    indices = output(op, "indices", tensors, (S64, S32), x.shape, x)
    operands = (Operand("x", x), Operand("y", y, True), Operand("indices", indices, True))
    return ScanProblem(op, operands, tuple(normal.items()), policy=policy, **fields)


def _make_backward(op: str, saved: tuple[str, ...], tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any],
                   policy: Policy) -> ScanProblem:
    """axis, reverse and exclusive as the forward's. dx is of the type of x, of cummax and cummin of dy."""
    dy = _checked(op, "dy", tensors, FLOATS)
    operands = [Operand("dy", dy)]
    for name in saved:
        operands.append(Operand(name, _checked(op, name, tensors, (S64, S32) if name == "indices" else FLOATS, dy.shape)))
    normal, fields = _direction(op, dy, attrs)
    kind = tensors["x"].dtype if "x" in saved else dy.dtype
    operands.append(Operand("dx", output(op, "dx", tensors, (kind,), dy.shape, dy), True))
    return ScanProblem(op, tuple(operands), tuple(normal.items()), policy=policy, **fields)


def compute_type(problem: ScanProblem) -> str:
    """"f32", "f64", "s32" or "s64": the type of the accumulators."""
    kinds = [o.desc.dtype for o in problem.operands if o.name != "indices"]
    if problem.op in ("cummax", "cummin"):
        x = kinds[0]
        return "f64" if x is F64 else "f32" if x.is_float else "s64" if x.bits == 64 or x.name == "u32" else "s32"
    if any(k.is_float for k in kinds):
        exact = all(k is not F64 and (k.is_float or k.bits < 32) for k in kinds)
        return F32.name if exact else F64.name
    return "s32" if kinds[-1] is S32 else "s64"


_AXIS: tuple[tuple[str, Any], ...] = (("axis", -1), ("reverse", False))
_EXCLUSIVE: tuple[tuple[str, Any], ...] = (("exclusive", False),)
DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("cumsum", ("x",), ("y",), partial(_make_sum, "cumsum"), attrs=(*_AXIS, *_EXCLUSIVE, ("dtype", None))),
    OpDef("cumprod", ("x",), ("y",), partial(_make_sum, "cumprod"), attrs=(*_AXIS, *_EXCLUSIVE, ("dtype", None))),
    OpDef("logcumsumexp", ("x",), ("y",), partial(_make_sum, "logcumsumexp"), attrs=(*_AXIS, *_EXCLUSIVE)),
    OpDef("cummax", ("x",), ("y", "indices"), partial(_make_extreme, "cummax"), attrs=_AXIS),
    OpDef("cummin", ("x",), ("y", "indices"), partial(_make_extreme, "cummin"), attrs=_AXIS),
    OpDef("cumprod_backward", ("dy", "x"), ("dx",), partial(_make_backward, "cumprod_backward", ("x",)), attrs=(*_AXIS, *_EXCLUSIVE)),
    OpDef("cummax_backward", ("dy", "indices"), ("dx",), partial(_make_backward, "cummax_backward", ("indices",)), attrs=_AXIS),
    OpDef("logcumsumexp_backward", ("dy", "x", "y"), ("dx",), partial(_make_backward, "logcumsumexp_backward", ("x", "y")),
          attrs=(*_AXIS, *_EXCLUSIVE)),
)
