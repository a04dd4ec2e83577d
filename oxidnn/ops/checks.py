"""Checks of arguments that all families share. Every message names the op, the argument, what it is and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..dtypes import BF16, F16, F32, F64, DType
from ..errors import expected
from ..tensor import TensorDesc

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
    """The operands' types, shapes and layouts: the tail of every message."""
    return "; ".join(f"{name}: {desc}" for name, desc in tensors.items()) + "."


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
    is_last = like.is_packed("nhwc") and not like.is_packed("nchw") and not last.is_packed("nchw")
    return last if is_last else TensorDesc.packed(allowed[0], shape)
