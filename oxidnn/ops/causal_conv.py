"""Causal depthwise convolution along sequences, as state-space models have it: every channel by a few taps of its own past.

    causal_conv1d x=bf16[B,D,L] w=bf16[D,W] bias state=bf16[B,D,W-1]      y, and final_state under return_state
        y[b, d, l] = activation(bias[d] + sum over k of w[d, k] * x[b, d, l - (W - 1) + k]), zeros, or `state`, before the first element
    causal_conv1d_update x=bf16[B,D] state=bf16[B,D,W-1] w bias           y, new_state (which may be in state's place): a step of decoding
    causal_conv1d_backward dy x w bias state d_final_state                dx, dw, and dbias with a bias, dstate with a state

Shapes are logical: sequences (B, L, D) in memory are (B, D, L) with D innermost, strides say so. A state holds the last W - 1 elements, the
oldest first. Sums are made in f32, of f64 in f64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..codegen.pointwise import Expression, parse
from ..dtypes import F32, F64, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_bool, check_choice, check_reach, describe, operand, output

MAX_WIDTH = 16
MAX_UPDATE = 16  # elements a step of decoding may take
ACTIVATIONS = ("none", "silu")


@dataclass(frozen=True, kw_only=True)
class CausalConvProblem(Problem):
    """activation: over "x", or None. final: the operand that the last elements go to, "" if none."""

    activation: Expression | None = None
    final: str = ""

    @property
    def is_backward(self) -> bool:
        return self.has("dx")

    @property
    def width(self) -> int:
        return self.desc("w").shape[1]

    @property
    def accumulator(self) -> DType:
        return F64 if self.desc("x").dtype is F64 else F32

    @property
    def sequences(self) -> dict[str, TensorDesc]:
        """The tensors of (B, D, L)."""
        names = ("dy", "x", "dx") if self.is_backward else ("x", "y")
        return {name: as_sequence(self.desc(name)) for name in names}

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        return (("new_state", "state"),) if self.op == "causal_conv1d_update" else ()

    @property
    def flops(self) -> int:
        return self.desc("x").numel * (2 * self.width + 4) * (3 if self.is_backward else 1)


def as_sequence(desc: TensorDesc) -> TensorDesc:
    """(B, D) as (B, D, 1)."""
    return desc if desc.rank == 3 else TensorDesc(desc.dtype, (*desc.shape, 1), (*desc.strides, 1), desc.align)


def _make(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> CausalConvProblem:
    context = describe(tensors)
    is_update, is_backward = op == "causal_conv1d_update", op == "causal_conv1d_backward"
    x = operand(op, "x", tensors, FLOATS)
    if x.rank != 3 and not (is_update and x.rank == 2):
        raise expected(op, "rank of x", x.rank, "2 or 3: (B, D) or (B, D, L)" if is_update else "3: (B, D, L)", context)
    if is_update and x.rank == 3 and not 1 <= x.shape[2] <= MAX_UPDATE:
        raise expected(op, "length of x", x.shape[2], f"1 to {MAX_UPDATE}; causal_conv1d takes longer ones", context)
    batch, channels = x.shape[:2]
    kinds = tuple(dict.fromkeys((x.dtype, F64 if x.dtype is F64 else F32)))
    w = operand(op, "w", tensors, kinds)
    if w.rank != 2 or w.shape[0] != channels or not 2 <= w.shape[1] <= MAX_WIDTH:
        raise expected(op, "shape of w", list(w.shape), f"({channels}, W) with a width W of 2 to {MAX_WIDTH}", context)
    past = (batch, channels, w.shape[1] - 1)
    shapes = {"bias": (channels,), "state": past, "d_final_state": past}
    operands = [Operand("x", x), Operand("w", w)]
    if is_backward:
        operands.insert(0, Operand("dy", operand(op, "dy", tensors, (x.dtype,), x.shape)))
    operands += [Operand(name, operand(op, name, tensors, kinds, shape)) for name, shape in shapes.items() if name in tensors]
    if is_update:
        operands.insert(1, next(o for o in operands if o.name == "state"))
        operands.pop()
    name = check_choice(op, "activation", attrs.get("activation", "none"), ACTIVATIONS)
    normal: list[tuple[str, Any]] = [("activation", name)] if name != "none" else []
    wants_state = op == "causal_conv1d" and check_bool(op, "return_state", attrs.get("return_state", False))
    normal += [("return_state", True)] if wants_state else []
    final = "new_state" if is_update else "final_state" if wants_state else ""
    like = tensors.get("state", TensorDesc.packed(x.dtype, past))
    results: dict[str, TensorDesc] = {}
    if is_backward:
        sources = {"dx": "x", "dw": "w", "dbias": "bias", "dstate": "state"}
        results = {n: output(op, n, tensors, tuple(dict.fromkeys((tensors[of].dtype, *kinds))) if n != "dx" else (x.dtype,),
                             tensors[of].shape, tensors[of]) for n, of in sources.items() if of in tensors}
    else:
        results["y"] = output(op, "y", tensors, (x.dtype,), x.shape, x)
        if final:
            results[final] = output(op, final, tensors, tuple(dict.fromkeys((like.dtype, *kinds))), past, like)
    for unexpected in ("final_state", "dbias", "dstate"):
        if unexpected in tensors and unexpected not in results:
            raise expected(op, unexpected, "given", "no tensor without return_state=True, or the input that it is the gradient by", context)
    operands += [Operand(n, desc, True) for n, desc in results.items()]
    for o in operands:
        check_reach(op, o.name, o.desc, context)
    return CausalConvProblem(op, tuple(operands), tuple(normal), policy=policy, final=final,
                             activation=parse("silu(x)") if name == "silu" else None)


_ATTRS: tuple[tuple[str, Any], ...] = (("activation", None),)
DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("causal_conv1d", ("x", "w", "bias", "state"), ("y", "final_state"), partial(_make, "causal_conv1d"), ("bias", "state"),
          (*_ATTRS, ("return_state", False))),
    OpDef("causal_conv1d_update", ("x", "state", "w", "bias"), ("y", "new_state"), partial(_make, "causal_conv1d_update"), ("bias",),
          _ATTRS),
    OpDef("causal_conv1d_backward", ("dy", "x", "w", "bias", "state", "d_final_state"), ("dx", "dw", "dbias", "dstate"),
          partial(_make, "causal_conv1d_backward"), ("bias", "state", "d_final_state"), _ATTRS),
)
