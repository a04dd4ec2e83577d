"""Tensor maps over the heads of attention's operands: what its wgmma kernels fetch queries, keys and values by."""

from __future__ import annotations

from ..codegen.spec import TensorMapSpec
from ..tensor import TensorDesc

MAX_STRIDE = 1 << 40  # bytes, of a tensor map
PANEL, ROW_BYTES = 64, 128  # columns of a box, and the bytes of its rows


def head_map(desc: TensorDesc, rows: int, length: int | None = None) -> TensorMapSpec:
    """(column, row, head, batch), in boxes of 64 columns by `rows`; zeros outside of the tensor, and from row `length` on."""
    size = desc.dtype.num_bytes
    columns, *outer = reversed(desc.shape)
    # A dimension of one element is never stepped over: any legal stride will do.
    strides = tuple(s * size if n > 1 else 16 for n, s in zip(outer, tuple(reversed(desc.strides))[1:], strict=True))
    outer[0] = outer[0] if length is None else length
    return TensorMapSpec(desc.dtype.name, (columns, *outer), strides, (PANEL, rows, 1, 1), swizzle=ROW_BYTES)


def map_fault(desc: TensorDesc, unit: int = 16) -> str:
    """Why a tensor (batch, heads, rows, columns) cannot be moved `unit` bytes at a time; empty if it can."""
    size = desc.dtype.num_bytes
    if desc.align % unit:
        return f"is aligned to {desc.align} bytes, not to {unit}"
    if desc.strides[-1] != 1 and desc.shape[-1] > 1:
        return "has columns that are not contiguous"
    for extent, stride in zip(desc.shape[:-1], desc.strides[:-1], strict=True):
        if extent > 1 and (stride * size % unit or not 0 < stride * size < MAX_STRIDE):
            return f"has a stride of {stride * size} bytes, no positive multiple of {unit}"
    return ""
