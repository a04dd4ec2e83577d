"""Checks of arguments that all families share. Every message names the op, the argument, what it is and what is allowed."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from ..codegen.pointwise import Expression, parse
from ..dtypes import BF16, F16, F32, F64, TABLE, DType, dtype
from ..errors import InvalidArgument, expected
from ..tensor import TensorDesc

MAX_EXTENT = 2**31 - 1  # of a dimension, and of the numbers that shape windows: index arithmetic is 32 bits wide
MAX_OFFSET = 2**63 - 1  # of a byte of a tensor from its first element's address
FLOATS = (F64, F32, F16, BF16)  # the float types that every op takes


def canonical(desc: TensorDesc) -> TensorDesc:
    """The same tensor with the strides that mean nothing (of extents of 1, of empty tensors) as dense tensors have them."""
    for layout in ("nchw", "nhwc"):
        if desc.is_packed(layout):
            return TensorDesc(desc.dtype, desc.shape, TensorDesc.packed(desc.dtype, desc.shape, layout).strides, desc.align)
    strides, step = list(desc.strides), 1
    for axis in reversed(range(desc.rank)):
        if desc.shape[axis] == 1:
            strides[axis] = step
        step = abs(strides[axis]) * desc.shape[axis]
    return TensorDesc(desc.dtype, desc.shape, tuple(strides), desc.align)


def describe(tensors: Mapping[str, TensorDesc]) -> str:
    """The operands' types, shapes and layouts: the tail of every message; "" if there are none yet."""
    return "; ".join(f"{name}: {desc}" for name, desc in tensors.items()) + "." if tensors else ""


def check_bool(op: str, name: str, value: Any, context: str = "") -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise expected(op, name, repr(value), "True or False", context)
    return bool(value)


def check_choice(op: str, name: str, value: Any, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise expected(op, name, repr(value), ", ".join(map(repr, choices)))
    return value


def check_number(op: str, name: str, value: Any, compute: DType | None = None, context: str = "", signed_zero: bool = False) -> float:
    """A real number; with `compute`, a finite one that this type can hold. -0.0 counts as 0.0, which keys of plans do not tell from it,
    but for `signed_zero`."""
    if not isinstance(value, Real) or isinstance(value, (bool, np.bool_)):
        raise expected(op, name, repr(value), "a number", context)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    most = float(np.finfo(np.float32 if compute is F32 else np.float64).max)
    if compute is not None and not abs(number) <= most:
        raise expected(op, name, repr(value), f"a finite number of {compute}", context)
    return number if signed_zero else number + 0.0


def is_integer(value: Any, least: int, most: int) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return False
    try:
        return least <= operator.index(value) <= most
    except TypeError:
        return False


def check_integer(op: str, name: str, value: Any, least: int, most: int = MAX_EXTENT, context: str = "") -> int:
    if not is_integer(value, least, most):
        raise expected(op, name, repr(value), f"an integer of at least {least} and at most {most}", context)
    return operator.index(value)


def check_integers(op: str, name: str, value: Any, count: int, least: int, context: str = "") -> tuple[int, ...]:
    """`count` integers, given as one for all or as a sequence of them."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * count
    if len(values) != count or not all(is_integer(v, least, MAX_EXTENT) for v in values):
        number = f", or {count} of them" if count > 1 else ""
        raise expected(op, name, repr(value), f"an integer of at least {least} and at most {MAX_EXTENT}{number}", context)
    return tuple(operator.index(v) for v in values)


def check_extents(op: str, name: str, value: Any, ranks: Sequence[int], context: str = "") -> tuple[int, ...]:
    """A shape given as an attribute."""
    if not isinstance(value, (tuple, list)) or len(value) not in ranks or not all(is_integer(v, 0, MAX_EXTENT) for v in value):
        counts = " or ".join(map(str, ranks))
        raise expected(op, name, repr(value), f"{counts} non-negative integers of at most {MAX_EXTENT}", context)
    return tuple(operator.index(v) for v in value)


def check_reach(op: str, name: str, desc: TensorDesc, context: str = "") -> None:
    """The tensor's extents and byte offsets fit the index arithmetic."""
    if desc.numel and max(desc.shape, default=0) > MAX_EXTENT:
        raise expected(op, f"shape of {name}", list(desc.shape), f"extents <= {MAX_EXTENT}", context)
    low, high = desc.offset_range
    if max(-low, high) > MAX_OFFSET // max(desc.dtype.num_bytes, 1) - 1:
        raise expected(op, f"shape of {name}", f"{list(desc.shape)} with strides {list(desc.strides)}", "byte offsets below 2^63", context)


def check_expression(op: str, name: str, value: Any) -> Expression:
    if not isinstance(value, (str, Expression)):
        raise expected(op, name, repr(value), "text such as 'relu(x + y)', or an Expression")
    return parse(value)


def check_type(op: str, name: str, value: Any) -> DType:
    """The type that an attribute names."""
    try:
        return dtype(value)
    except (InvalidArgument, TypeError):  # TypeError: a value without a hash
        raise expected(op, name, repr(value), f"a type: {', '.join(t.name for t in TABLE)}") from None


def check_dtype(op: str, name: str, desc: TensorDesc, tensors: Mapping[str, TensorDesc], allowed: Sequence[DType] = FLOATS) -> None:
    if desc.dtype not in allowed:
        raise expected(op, f"type of {name}", desc.dtype, " or ".join(t.name for t in allowed), describe(tensors))


def check_shape(op: str, name: str, desc: TensorDesc, shape: tuple[int, ...], tensors: Mapping[str, TensorDesc]) -> None:
    if desc.shape != shape:
        raise expected(op, f"shape of {name}", list(desc.shape), list(shape), describe(tensors))


def check_output(op: str, name: str, desc: TensorDesc, shape: tuple[int, ...], tensors: Mapping[str, TensorDesc],
                 allowed: Sequence[DType] = FLOATS) -> None:
    """The output given by the caller has the shape asked for, a type we write, and no two elements in one place."""
    check_shape(op, name, desc, shape, tensors)
    check_dtype(op, name, desc, tensors, allowed)
    check_reach(op, name, desc, describe(tensors))
    if not desc.is_injective:
        raise expected(op, f"strides of {name}", list(desc.strides), "an output whose elements do not overlap", describe(tensors))


def operand(op: str, name: str, tensors: Mapping[str, TensorDesc], allowed: Sequence[DType],
            shape: tuple[int, ...] | None = None) -> TensorDesc:
    """The input `name`, of an allowed type and of `shape`."""
    if name not in tensors:
        raise expected(op, name, "missing", "a tensor", describe(tensors))
    desc = tensors[name]
    check_dtype(op, name, desc, tensors, allowed)
    if shape is not None:
        check_shape(op, name, desc, shape, tensors)
    return desc


def output(op: str, name: str, tensors: Mapping[str, TensorDesc], allowed: Sequence[DType], shape: tuple[int, ...],
           like: TensorDesc) -> TensorDesc:
    """The given output, checked, or a packed one of the first allowed type in `like`'s layout (channels last or first)."""
    if name in tensors:
        check_output(op, name, tensors[name], shape, tensors, allowed)
        return tensors[name]
    last = TensorDesc.packed(allowed[0], shape, "nhwc")
    check_reach(op, name, last, describe(tensors))
    is_last = like.is_packed("nhwc") and not like.is_packed("nchw") and not last.is_packed("nchw")
    return last if is_last else TensorDesc.packed(allowed[0], shape)
