"""Scales themselves: of tensors by their last steps (delayed scaling), and quantised once more (QLoRA's double quantisation).

    delayed_scale history=f32[16,8] amax=f32[8] scale=f32[8]        new_history, new_scale: of eight tensors, their last 16 steps
    double_quantize x=f32[4096,64]                                  y (e4m3, [4096,64]), scale (f32, [1024]), offset (f32, [])
    double_dequantize x=e4m3[4096,64] scale=f32[1024] offset=f32[]  y (f32)

delayed_scale: new_history is amax before all of history but its last; new_scale = amax * 2^margin / the kind's largest number (448, 57344,
127), amax the largest of new_history (reduction="max") or the newest ("latest"); scale where that is 0 or no finite number. Current
scaling is `dynamic_quantize` with scaling="tensor".
double_quantize: offset is the mean of x, added up in f64; y holds (x - offset) / scale, a scale for `group` elements in the order of x,
which lies dense. Differences are f32: one beyond it, of numbers of both signs, makes its scale NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import E4M3, F32
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import check_choice, check_integer, describe, operand, output

MAX_HISTORY = 1024
GROUP = 256


@dataclass(frozen=True)
class DelayedScaleProblem(Problem):
    kind: str = "e4m3"
    margin: int = 0
    takes_all: bool = True

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        return (("new_history", "history"), ("new_scale", "scale"))


@dataclass(frozen=True)
class DoubleProblem(Problem):
    """group: elements a scale."""

    group: int = GROUP


def make_delayed(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> DelayedScaleProblem:
    op = "delayed_scale"
    history = operand(op, "history", tensors, (F32,))
    if history.rank not in (1, 2) or not 1 <= history.shape[0] <= MAX_HISTORY:
        allowed = f"[steps] or [steps, tensors], 1 to {MAX_HISTORY} steps"
        raise expected(op, "shape of history", list(history.shape), allowed, describe(tensors))
    each = history.shape[1:]
    amax, scale = operand(op, "amax", tensors, (F32,), each), operand(op, "scale", tensors, (F32,), each)
    kind = check_choice(op, "kind", attrs.get("kind", "e4m3"), ("e4m3", "e5m2", "s8"))
    margin = check_integer(op, "margin", attrs.get("margin", 0), -64, 64)
    reduction = check_choice(op, "reduction", attrs.get("reduction", "max"), ("max", "latest"))
    outputs = (Operand("new_history", output(op, "new_history", tensors, (F32,), history.shape, history), True),
               Operand("new_scale", output(op, "new_scale", tensors, (F32,), each, scale), True))
    normal = [(n, v) for n, v, default in (("kind", kind, "e4m3"), ("margin", margin, 0), ("reduction", reduction, "max")) if v != default]
    return DelayedScaleProblem(op, (Operand("history", history), Operand("amax", amax), Operand("scale", scale), *outputs), tuple(normal),
                               policy=policy, kind=kind, margin=margin, takes_all=reduction == "max")


def _dense(op: str, name: str, desc: TensorDesc, tensors: Mapping[str, TensorDesc]) -> None:
    if not desc.is_packed():
        raise expected(op, f"strides of {name}", list(desc.strides), "a dense tensor in the order of its dimensions", describe(tensors))


def _group(op: str, attrs: Mapping[str, Any]) -> tuple[int, tuple[tuple[str, Any], ...]]:
    group = check_integer(op, "group", attrs.get("group", GROUP), 1)
    return group, (("group", group),) if group != GROUP else ()


def make_double(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> DoubleProblem:
    op = "double_quantize"
    x = operand(op, "x", tensors, (F32,))
    if x.numel == 0:
        raise expected(op, "shape of x", list(x.shape), "at least one element", describe(tensors))
    group, normal = _group(op, attrs)
    packed = TensorDesc.packed(F32, x.shape)
    outputs = (Operand("y", output(op, "y", tensors, (E4M3,), x.shape, packed), True),
               Operand("scale", output(op, "scale", tensors, (F32,), (-(-x.numel // group),), packed), True),
               Operand("offset", output(op, "offset", tensors, (F32,), (), packed), True))
    for o in (Operand("x", x), outputs[0]):
        _dense(op, o.name, o.desc, tensors)
    return DoubleProblem(op, (Operand("x", x), *outputs), normal, policy=policy, group=group)


def make_double_back(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> DoubleProblem:
    op = "double_dequantize"
    x = operand(op, "x", tensors, (E4M3,))
    group, normal = _group(op, attrs)
    scale, offset = operand(op, "scale", tensors, (F32,), (-(-x.numel // group),)), operand(op, "offset", tensors, (F32,), ())
    y = output(op, "y", tensors, (F32,), x.shape, TensorDesc.packed(F32, x.shape))
    for name, desc in (("x", x), ("y", y)):
        _dense(op, name, desc, tensors)
    operands = (Operand("x", x), Operand("scale", scale), Operand("offset", offset), Operand("y", y, True))
    return DoubleProblem(op, operands, normal, policy=policy, group=group)


DEFINITIONS = (
    OpDef("delayed_scale", ("history", "amax", "scale"), ("new_history", "new_scale"), make_delayed,
          attrs=(("kind", "e4m3"), ("margin", 0), ("reduction", "max"))),
    OpDef("double_quantize", ("x",), ("y", "scale", "offset"), make_double, attrs=(("group", GROUP),)),
    OpDef("double_dequantize", ("x", "scale", "offset"), ("y",), make_double_back, attrs=(("group", GROUP),)),
)
