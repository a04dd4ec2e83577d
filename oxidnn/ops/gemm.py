"""GEMM: d = epilogue(alpha * op(a) @ op(b) + beta * c), with leading batch dimensions that broadcast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codegen.pointwise import Expression
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import check_bool, check_dtype, check_number, check_output, describe
from .epilogue import accumulator_of, align_shape, default_epilogue, operands_of, resolve, scalars_of


@dataclass(frozen=True, kw_only=True)
class GemmProblem(Problem):
    """a: (batch..., m, k) or transposed (batch..., k, m); b: (batch..., k, n) or (batch..., n, k); d: (batch..., m, n).

    `epilogue` is over "acc", the value of alpha * a @ b + beta * c.
    """

    transpose_a: bool
    transpose_b: bool
    alpha: float
    beta: float
    m: int
    n: int
    k: int
    epilogue: Expression | None = None

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        return tuple(("d", name) for name in ("c", "residual") if self.has(name))

    @property
    def flops(self) -> int:
        return 2 * self.desc("d").numel * self.k


_ATTRS = (("transpose_a", False), ("transpose_b", False), ("alpha", 1.0), ("beta", 0.0), ("epilogue", None))


def _make(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> GemmProblem:
    op, context = "gemm", describe(tensors)
    a, b = tensors["a"], tensors["b"]
    for name, desc in (("a", a), ("b", b)):
        if desc.rank < 2:
            raise expected(op, f"rank of {name}", desc.rank, "at least 2", context)
        check_dtype(op, name, desc, tensors)
    if a.dtype != b.dtype:
        raise expected(op, "type of b", b.dtype, f"{a.dtype}, the type of a", context)
    flags = {name: check_bool(op, name, attrs.get(name, False), context) for name in ("transpose_a", "transpose_b")}
    factors = {name: check_number(op, name, attrs.get(name, default), accumulator_of(a.dtype), context)
               for name, default in (("alpha", 1.0), ("beta", 0.0))}
    m, k = a.shape[-2:][::-1] if flags["transpose_a"] else a.shape[-2:]
    k_of_b, n = b.shape[-2:][::-1] if flags["transpose_b"] else b.shape[-2:]
    if k != k_of_b:
        raise expected(op, "inner extent of b", k_of_b, f"{k}, the inner extent of a", context)
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise expected(op, "batch shape of b", list(b.shape[:-2]), f"broadcastable with {list(a.shape[:-2])}, that of a", context) from None
    shape = (*(int(e) for e in batch), m, n)
    if "d" in tensors:
        d = tensors["d"]
        check_output(op, "d", d, shape, tensors)
    else:
        d = TensorDesc.packed(a.dtype, shape)
    c = tensors.get("c")
    if c is not None:
        check_dtype(op, "c", c, tensors)
        align_shape(op, "c", c.shape, shape, -1)
    elif factors["beta"]:
        raise expected(op, "beta", factors["beta"], "0 unless c is given", context)
    others = {name: desc for name, desc in tensors.items() if name != "c"}
    epilogue = resolve(op, attrs.get("epilogue"), others, ("a", "b", "d"))
    extra = operands_of(op, epilogue, others, shape, -1)

    kept: list[tuple[str, Any]] = [(name, True) for name, value in flags.items() if value]
    kept += [(name, factors[name]) for name, default in (("alpha", 1.0), ("beta", 0.0)) if factors[name] != default]
    if epilogue is not None and epilogue != default_epilogue(others):
        kept.append(("epilogue", epilogue))
    operands = [Operand("a", a), Operand("b", b), *extra]
    if c is not None:
        operands.append(Operand("c", c))
    return GemmProblem(op, (*operands, Operand("d", d, True)), tuple(kept), scalars_of(epilogue, accumulator_of(a.dtype)), policy=policy,
                       transpose_a=flags["transpose_a"], transpose_b=flags["transpose_b"], alpha=factors["alpha"],
                       beta=factors["beta"], m=m, n=n, k=k, epilogue=epilogue)


DEFINITIONS = (OpDef("gemm", ("a", "b", "bias", "c"), ("d",), _make, ("bias", "c"), _ATTRS),)
