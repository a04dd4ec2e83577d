"""Linear layers of quantised weights: y = epilogue(x @ W.T), W[n, k] = (w[n, k] - zero_point[n, k / group]) * scale[n, k / group].

    quantized_linear x=bf16[16,4096] w=u8[11008,2048] scale=f16[11008,32] kind=s4                   y (bf16, [16,11008])
    quantized_linear x=f16[2,7,64] w=s8[24,64] scale=f32[24] bias=f16[24] kind=s8                   y (f16, [2,7,24])
    repack_gptq qweight=s32[512,11008] qzeros=s32[32,1376] scales=f16[32,11008]                     w, scale, zero_point of kind u4
    repack_awq qweight=s32[4096,1376] qzeros=s32[32,1376] scales=f16[32,11008]                      the same

kind: "s4" (-8 to 7), "u4" (0 to 15), "nf4" (the 16 quantiles of QLoRA, -1 to 1), two to a byte along k, the first in the low half; "s8",
"e4m3", one a byte. scale: one element, (n,), or (n, groups) of groups of group_size neighbours along k. zero_point: whole numbers of
scale's shape; those of s4 and u4 lie in -64 to 64.

Products take q - zero_point exactly and scale the sums in f32, or take (q - zero_point) * scale rounded to x's type, by the engine; the
numbers of nf4 are rounded to x's type either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codegen.pointwise import Expression
from ..dtypes import BF16, E4M3, F16, F32, S8, S32, U8
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import check_choice, check_dtype, check_integer, check_reach, check_shape, describe, operand, output
from .epilogue import default_epilogue, operands_of, resolve, scalars_of
from .gemm import made_output

KINDS = {"s4": U8, "u4": U8, "nf4": U8, "s8": S8, "e4m3": E4M3}
NIBBLES = ("s4", "u4", "nf4")
ACTIVATIONS = (F16, BF16, F32)
ROLES = ("x", "w", "scale", "zero_point", "permutation", "y")
NF4_GROUP = 64
# Quantiles of a normal distribution, scaled to -1 to 1 (Dettmers et al., QLoRA, appendix E).
NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
                -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
                0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32)


@dataclass(frozen=True, kw_only=True)
class QuantizedLinearProblem(Problem):
    """x: (..., k); w: (n, k), two numbers a byte: (n, ceil(k / 2)); y: (..., n). groups: along k, 1 where a row has one scale.
    permutation (s32, k): term j of the sum is x[..., permutation[j]] * W[n, j]; indices outside of x are undefined behaviour's: they are
    clamped to it. epilogue: over "acc"."""

    kind: str
    n: int
    k: int
    group_size: int
    epilogue: Expression | None

    @property
    def groups(self) -> int:
        return max(1, -(-self.k // self.group_size))

    @property
    def flops(self) -> int:
        return 2 * self.desc("y").numel * self.k

    @property
    def rows(self) -> int:
        return self.desc("y").numel // max(1, self.n)

    def grid_strides(self, name: str) -> tuple[int, int]:
        """Element strides of scale or zero_point along n and along groups, 0 where one element stands for all."""
        desc = self.desc(name)
        if desc.rank == 2:
            return desc.strides[0] if desc.shape[0] > 1 else 0, desc.strides[1] if desc.shape[1] > 1 else 0
        return desc.strides[0] if desc.rank and desc.shape[0] > 1 else 0, 0


def _group_size(tensors: Mapping[str, TensorDesc], given: Any, kind: str, n: int, k: int) -> int:
    """Of the scale as it was given."""
    op, context, scale = "quantized_linear", describe(tensors), tensors["scale"]
    whole = max(k, 1)
    groups = scale.shape[1] if scale.rank == 2 else 1
    if given is not None:
        size = check_integer(op, "group_size", given, 1, context=context)
    elif scale.rank < 2 or groups == 1:
        size = whole
    elif kind == "nf4":
        size = NF4_GROUP
    elif k % max(groups, 1) == 0 and groups:
        size = k // groups
    else:
        raise expected(op, "group_size", "missing", f"a number of k's, of which {groups} groups have {k}", context)
    size = min(size, whole)
    count = max(1, -(-k // size))
    shapes = {(), (1,), (n,), (n, 1)} if count == 1 else {(n, count)}
    if scale.shape not in shapes:
        allowed = f"{[n, count]}, groups of {size}" if count > 1 else f"one element, {[n]} or {[n, 1]}"
        raise expected(op, "shape of scale", list(scale.shape), allowed, context)
    return size


def _make(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> QuantizedLinearProblem:
    op, context = "quantized_linear", describe(tensors)
    kind = check_choice(op, "kind", attrs.get("kind"), tuple(KINDS))
    x, w = operand(op, "x", tensors, ACTIVATIONS), operand(op, "w", tensors, (KINDS[kind],))
    if x.rank < 2:
        raise expected(op, "rank of x", x.rank, "at least 2", context)
    if w.rank != 2:
        raise expected(op, "rank of w", w.rank, 2, context)
    k, n = x.shape[-1], w.shape[0]
    columns = -(-k // 2) if kind in NIBBLES else k
    if w.shape[1] != columns:
        raise expected(op, "shape of w", list(w.shape), f"{[n, columns]} of {k} {kind}, as x has", context)
    scale = operand(op, "scale", tensors, (F32, F16, BF16))
    size = _group_size(tensors, attrs.get("group_size"), kind, n, k)
    zero = tensors.get("zero_point")
    if zero is not None:
        if kind in ("nf4", "e4m3"):
            raise expected(op, "zero_point", "given", f"none for {kind}", context)
        check_dtype(op, "zero_point", zero, tensors, (S8,) if kind == "s8" else (U8, S8))
        check_shape(op, "zero_point", zero, scale.shape, tensors)
    order = tensors.get("permutation")
    if order is not None:
        check_dtype(op, "permutation", order, tensors, (S32,))
        check_shape(op, "permutation", order, (k,), tensors)
    for name, desc in tensors.items():
        check_reach(op, name, desc, context)
    shape = (*x.shape[:-1], n)
    epilogue = resolve(op, attrs.get("epilogue"), tensors, ROLES)
    extra = operands_of(op, epilogue, tensors, shape, -1)
    y = made_output(op, "y", "out_dtype", tensors, attrs.get("out_dtype"), (x.dtype, *(t for t in ACTIVATIONS if t is not x.dtype)), shape)
    kept: list[tuple[str, Any]] = [("kind", kind)]
    if attrs.get("group_size") is not None:
        kept.append(("group_size", int(attrs["group_size"])))
    if epilogue is not None and epilogue != default_epilogue([name for name in tensors if name not in ROLES]):
        kept.append(("epilogue", epilogue))
    operands = [Operand("x", x), Operand("w", w), Operand("scale", scale)]
    operands += [Operand(name, desc) for name, desc in (("zero_point", zero), ("permutation", order)) if desc is not None]
    scalars = scalars_of(op, epilogue, F32.ptx, ("scale",))
    return QuantizedLinearProblem(op, (*operands, *extra, Operand("y", y, True)), tuple(kept), scalars, policy=policy, kind=kind, n=n, k=k,
                                  group_size=size, epilogue=epilogue)


# ---- Layouts of other tools ------------------------------------------------------------------------------------------------------

PER_WORD = 8  # numbers of four bits in 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbouring columns the four bits from 4 i on hold


@dataclass(frozen=True, kw_only=True)
class RepackProblem(Problem):
    """repack_gptq: qweight (k / 8, n), eight neighbours along k to a word, the first lowest; repack_awq: (k, n / 8), eight along n in
    AWQ_ORDER. qzeros: (groups, n / 8), eight along n, in order or in AWQ_ORDER. scales: (groups, n).
    w: u8 (n, k / 2); scale: (n, groups) of scales' type; zero_point: u8 (n, groups), what qzeros holds plus zero_offset.
    permutation (repack_gptq; s32, k): row j of W is the given row permutation[j]."""

    n: int
    k: int
    groups: int
    zero_offset: int

    @property
    def is_awq(self) -> bool:
        return self.op == "repack_awq"


def _make_repack(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> RepackProblem:
    context = describe(tensors)
    words = operand(op, "qweight", tensors, (S32,))
    zeros, scales = operand(op, "qzeros", tensors, (S32,)), operand(op, "scales", tensors, (F16, BF16, F32))
    for name, desc in (("qweight", words), ("scales", scales)):
        if desc.rank != 2:
            raise expected(op, f"rank of {name}", desc.rank, 2, context)
    k, n = (words.shape[0], words.shape[1] * PER_WORD) if op == "repack_awq" else (words.shape[0] * PER_WORD, words.shape[1])
    groups = scales.shape[0]
    check_shape(op, "scales", scales, (groups, n), tensors)
    check_shape(op, "qzeros", zeros, (groups, -(-n // PER_WORD)), tensors)
    if k % 2:
        raise expected(op, "rows of qweight", k, "an even number", context)
    offset = check_integer(op, "zero_offset", attrs.get("zero_offset", 0 if op == "repack_awq" else 1), 0, 1, context)
    order = tensors.get("permutation")
    if order is not None:
        check_dtype(op, "permutation", order, tensors, (S32,))
        check_shape(op, "permutation", order, (k,), tensors)
    for name, desc in tensors.items():
        check_reach(op, name, desc, context)
    w = output(op, "w", tensors, (U8,), (n, k // 2), TensorDesc.packed(U8, (n, k // 2)))
    scale = output(op, "scale", tensors, (scales.dtype,), (n, groups), TensorDesc.packed(scales.dtype, (n, groups)))
    zero = output(op, "zero_point", tensors, (U8,), (n, groups), TensorDesc.packed(U8, (n, groups)))
    kept = (("zero_offset", offset),) if "zero_offset" in attrs and offset != (op == "repack_gptq") else ()
    operands = [Operand("qweight", words), Operand("qzeros", zeros), Operand("scales", scales)]
    operands += [Operand("permutation", order)] if order is not None else []
    outputs = (Operand("w", w, True), Operand("scale", scale, True), Operand("zero_point", zero, True))
    return RepackProblem(op, (*operands, *outputs), kept, policy=policy, n=n, k=k, groups=groups, zero_offset=offset)


def make_gptq(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> RepackProblem:
    return _make_repack("repack_gptq", tensors, attrs, policy)


def make_awq(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> RepackProblem:
    return _make_repack("repack_awq", tensors, attrs, policy)




_PACKED = ("w", "scale", "zero_point")
DEFINITIONS = (
    OpDef("quantized_linear", ("x", "w", "scale", "zero_point", "bias", "permutation"), ("y",), _make,
          ("zero_point", "bias", "permutation"), (("kind", None), ("group_size", None), ("epilogue", None), ("out_dtype", None))),
    OpDef("repack_gptq", ("qweight", "qzeros", "scales", "permutation"), _PACKED, make_gptq, ("permutation",), (("zero_offset", None),)),
    OpDef("repack_awq", ("qweight", "qzeros", "scales"), _PACKED, make_awq, (), (("zero_offset", None),)),
)
