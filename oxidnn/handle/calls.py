"""The signatures of calls: the keys under which a handle's plans are found, and how arguments become them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from numbers import Real
from typing import Any

from ..codegen.pointwise import Expression, parse
from ..dispatch.session import Call, hashable
from ..errors import InvalidArgument, expected
from ..ops import OPS
from ..ops.case import near
from ..ops.checks import check_integer
from ..ops.layout import CONCAT_INPUTS, MAX_PARTS, MAX_RANK
from ..ops.pointwise import output_names_of

# The signatures of the methods are the ops' rows; pointwise's are its expressions', steps over lists have their own.
CALLS: dict[str, Call] = {op: Call(op, row.inputs, row.attrs) for op, row in OPS.items() if row.outputs and op != "pointwise"}
for _op, _given_as in {"attention_backward": ("gradients",), "multi_head_attention_backward": ("gradients",),
                       "kv_cache_append": ("k_cache", "v_cache", "q_out")}.items():
    CALLS[_op] = replace(CALLS[_op], given_as=_given_as)
# Its results are its caches: their shapes come from the arrays given for them, never from the inputs.
CALLS["kv_cache_append"] = replace(CALLS["kv_cache_append"], outputs=OPS["kv_cache_append"].outputs)
# The short key of convolutions of floats.
CONV = Call("conv_fprop", CALLS["conv_fprop"].tensors[:4], CALLS["conv_fprop"].attrs[:6])


def signature(op: str, arrays: tuple[Any, ...], attrs: Mapping[str, Any]) -> tuple[Call, tuple[Any, ...], tuple[Any, ...]]:
    """(call, arrays padded with None, attribute values in the call's order); array arguments may stand among the keywords too."""
    attrs = dict(attrs)
    if not isinstance(op, str):
        raise expected("plan and explain", "op", repr(op), "the name of an op, then arrays")
    if op == "pointwise" and arrays:
        call, attrs["expression"] = pointwise_call(hashable(arrays[0], "pointwise", "expression"))
        arrays = arrays[1:]
    elif op in CALLS:
        is_short = op == "conv_fprop" and len(arrays) <= len(CONV.tensors) and attrs.keys() <= {*CONV.tensors, *dict(CONV.attrs)}
        call = CONV if is_short else CALLS[op]
    elif op in OPS:
        raise InvalidArgument(f"{op} takes lists of arrays (expected a call of h.{op}, which keeps its plans itself).")
    else:
        raise InvalidArgument(f"{op!r} is no op{near(op, (*CALLS, 'pointwise'))}.")
    if len(arrays) > len(call.tensors):
        raise expected(op, "arrays", f"{len(arrays)} of them", f"at most {len(call.tensors)}: {', '.join(call.tensors)}")
    for name, array in zip(call.tensors, arrays, strict=False):
        if isinstance(array, (str, Real)):
            known = ", ".join(n for n, _ in call.attrs) or "it has none"
            raise expected(op, name, repr(array), f"an array; attributes go by name: {known}")
    padded = tuple(arrays[i] if i < len(arrays) else attrs.pop(name, None) for i, name in enumerate(call.tensors))
    values = tuple(attrs.pop(name, default) for name, default in call.attrs)
    if attrs:
        raise expected(op, "arguments", sorted(attrs), f"{', '.join(call.tensors)}, {', '.join(n for n, _ in call.attrs)}")
    return call, padded, values


@lru_cache(maxsize=MAX_PARTS)
def concat_call(count: int) -> Call:
    """The signature of `concat` with that many arrays."""
    return Call("concat", CONCAT_INPUTS[:count], (("axis", 0),))


@lru_cache(maxsize=MAX_RANK)
def meshgrid_call(count: int) -> Call:
    """The signature of `meshgrid` of that many arrays."""
    return Call("meshgrid", CONCAT_INPUTS[:count], OPS["meshgrid"].attrs, OPS["meshgrid"].outputs[:count])


@lru_cache(maxsize=1024)
def pointwise_call(expression: Any) -> tuple[Call, Expression]:
    """The signature of `pointwise` with this expression, and the expression parsed."""
    parsed = parse(expression)
    return Call("pointwise", parsed.args, OPS["pointwise"].attrs, output_names_of(parsed)), parsed


def shape_of(value: Any) -> Any:
    """A shape as a tuple; what is none is left for the op to refuse."""
    try:
        return tuple(value)
    except TypeError:
        return value


def draw_of(op: str, seed: int | None, offset: int, state: Any = None) -> dict[str, int]:
    """The numbers that name a draw, checked; none where they lie in memory."""
    if state is not None:
        if seed is not None or offset != 0:
            raise expected(op, "seed and offset", (seed, offset), "none beside state")
        return {}
    return {"seed": check_integer(op, "seed", seed, 0, 2**64 - 1), "offset": check_integer(op, "offset", offset, 0, 2**64 - 1)}
