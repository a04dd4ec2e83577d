"""Results of attention over two sets of keys, made one over both (a prefix that sequences share, and their own keys).

    merge_attention_states out_a=bf16[B,H,L,E] lse_a=f32[B,H,L] out_b=bf16[B,H,L,E] lse_b=f32[B,H,L]        out, lse

    lse = log(e^lse_a + e^lse_b),  out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b

A state whose lse is -inf has no weight, whatever its result holds; of two such, out is 0 and lse -inf. Without the batch likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import F32, F64, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, canonical, check_output, check_reach, describe, operand
from .pointwise import like


@dataclass(frozen=True)
class AttentionStatesProblem(Problem):
    @property
    def accumulator(self) -> DType:
        return F64 if self.desc("out_a").dtype is F64 else F32

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        return ("out", "out_a"), ("out", "out_b")


def _make(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> AttentionStatesProblem:
    op, context = "merge_attention_states", describe(tensors)
    a = operand(op, "out_a", tensors, FLOATS)
    if a.rank not in (3, 4):
        raise expected(op, "rank of out_a", a.rank, "4: (batch, heads, length, dim), or 3 without the batch", context)
    exact = F64 if a.dtype is F64 else F32
    operands = [Operand("out_a", a), Operand("lse_a", operand(op, "lse_a", tensors, (exact,), a.shape[:-1])),
                Operand("out_b", operand(op, "out_b", tensors, (a.dtype,), a.shape)),
                Operand("lse_b", operand(op, "lse_b", tensors, (exact,), a.shape[:-1]))]
    for name, shape, kind in (("out", a.shape, a.dtype), ("lse", a.shape[:-1], exact)):
        if name in tensors:
            check_output(op, name, tensors[name], shape, tensors, (kind,))
        default = canonical(like(a, kind)) if name == "out" else TensorDesc.packed(kind, shape)
        operands.append(Operand(name, tensors.get(name, default), True))
    for o in operands:
        check_reach(op, o.name, o.desc, context)
    return AttentionStatesProblem(op, tuple(operands), policy=policy)


DEFINITIONS: tuple[OpDef, ...] = (OpDef("merge_attention_states", ("out_a", "lse_a", "out_b", "lse_b"), ("out", "lse"), _make),)
