"""Filters as the tensor-core loops want them: an explicit reorder, once, of weights that are then used many times.

    conv_reorder w=s8[64,3,7,7]nchw                   packed   K, taps, channels innermost: for conv (and conv_transpose's input gradient)
    conv_reorder w=s8[64,24,3,3]nchw use=dgrad        packed   C, taps, filters innermost: for conv_dgrad, conv_transpose

The result has w's shape and type; the order is in its strides. The innermost dimension is followed by a gap up to a multiple of 16 bytes,
which tensor copies need and nothing reads: the 3 channels of a tap in s8 begin 16 bytes after those of the tap before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy
from .checks import FLOATS, canonical, check_choice, check_dtype, check_output, check_reach, describe
from .gemm import FP8, INT8
from .layout import Axis, LayoutProblem, Part

_USES = ("fprop", "dgrad")
_ALIGN = 16  # bytes


def packed_filter(w: TensorDesc, use: str = "fprop") -> TensorDesc:
    """Filters of w's shape and type in the order that `use` asks for."""
    outer, inner = (0, 1) if use == "fprop" else (1, 0)
    elements = _ALIGN // w.dtype.num_bytes
    strides, step = [0] * w.rank, -(-max(w.shape[inner], 1) // elements) * elements
    strides[inner] = 1
    for axis in (*reversed(range(2, w.rank)), outer):
        strides[axis] = step
        step *= max(w.shape[axis], 1)
    return canonical(TensorDesc(w.dtype, w.shape, tuple(strides)))


def _make(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LayoutProblem:
    op, w = "conv_reorder", tensors["w"]
    if not 3 <= w.rank <= 5:
        raise expected(op, "rank of w", w.rank, "3, 4 or 5 (1, 2 or 3 spatial dimensions)", describe(tensors))
    check_dtype(op, "w", w, tensors, (*FLOATS, *FP8, *INT8))
    check_reach(op, "w", w, describe(tensors))
    use = check_choice(op, "use", attrs.get("use", "fprop"), _USES)
    packed = tensors.get("packed", packed_filter(w, use))
    check_output(op, "packed", packed, w.shape, tensors, (w.dtype,))
    axes = tuple(Axis(n, t, s) for n, t, s in zip(w.shape, packed.strides, w.strides, strict=True))
    return LayoutProblem(op, (Operand("w", w), Operand("packed", packed, True)), (("use", use),) if use != "fprop" else (), policy=policy,
                         parts=(Part("w", "packed", axes),))


DEFINITIONS = (OpDef("conv_reorder", ("w",), ("packed",), _make, (), (("use", "fprop"),)),)
