"""Linear layers of quantised weights: every kind, groups, zero points, permutations, layouts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, S8, S32, U8
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.quantized_linear import KINDS, NIBBLES
from ...tensor import TensorDesc
from . import Fill, Sampler
from .conv import draw_epilogue
from .tensors import random_desc


def _pick(rng: np.random.Generator, values: tuple[Any, ...]) -> Any:
    return values[int(rng.integers(len(values)))]


def sample(rng: np.random.Generator, size: str) -> Problem:
    kind = _pick(rng, tuple(KINDS))
    is_dense = rng.random() < 0.6  # what tensor cores want: 16-bit, packed, extents in 32
    rows, n = int(rng.integers(1, 9 if size == "tiny" else 40)), int(rng.integers(1, 25 if size == "tiny" else 80))
    k = 32 * int(rng.integers(1, 7)) if is_dense else int(rng.integers(0, 90))
    if is_dense:
        n = 8 * (-(-n // 8))
    x_kind = _pick(rng, (F16, BF16) if is_dense else (F16, BF16, F32))
    group = _pick(rng, (None, 32, 64, 128) if is_dense else (None, None, 16, 20, 32))
    attrs: dict[str, Any] = {"kind": kind}
    columns = -(-k // 2) if kind in NIBBLES else k

    def draw(kind: Any, shape: tuple[int, ...]) -> TensorDesc:
        return TensorDesc.packed(kind, shape) if is_dense else random_desc(rng, kind, shape)

    batch = (2,) if rng.random() < 0.2 else ()
    tensors = {"x": draw(x_kind, (*batch, rows, k)), "w": draw(KINDS[kind], (n, columns))}
    groups = -(-k // group) if group is not None and k else 1
    if groups > 1:
        attrs["group_size"] = group
    grid = (n, groups) if groups > 1 else _pick(rng, ((), (1,), (n,), (n, 1)))
    tensors["scale"] = draw(_pick(rng, (F32, F16, BF16)), grid)
    if kind in ("s4", "u4", "s8") and rng.random() < 0.5:
        tensors["zero_point"] = draw(S8 if kind == "s8" else _pick(rng, (U8, S8)), grid)
    if rng.random() < 0.2:
        tensors["permutation"] = TensorDesc.packed(S32, (k,))
    y_kind = x_kind if rng.random() < 0.7 else _pick(rng, (F32, F16, BF16))
    tensors["y"] = random_desc(rng, y_kind, (*batch, rows, n), is_output=True)
    if rng.random() < 0.6:
        more: dict[str, Any] = {}
        chosen: dict[str, Any] = {}
        draw_epilogue(rng, more, chosen, (*batch, rows, n), -1)
        if "scale" not in more:  # that of the weights
            tensors, attrs = tensors | more, attrs | chosen
    return OPS["quantized_linear"].make(tensors, attrs, Policy())


def _repack(op: str, rng: np.random.Generator, size: str) -> Problem:
    k, n, groups = 8 * int(rng.integers(1, 12)), 8 * int(rng.integers(1, 8)), int(rng.integers(1, 4))
    if op == "repack_gptq" and rng.random() < 0.4:
        n += int(rng.integers(0, 8))
    words = (k, n // 8) if op == "repack_awq" else (k // 8, n)
    tensors = {"qweight": random_desc(rng, S32, words), "qzeros": random_desc(rng, S32, (groups, -(-n // 8))),
               "scales": random_desc(rng, _pick(rng, (F16, BF16, F32)), (groups, n))}
    if op == "repack_gptq" and rng.random() < 0.4:
        tensors["permutation"] = TensorDesc.packed(S32, (k,))
    attrs = {"zero_offset": int(rng.integers(2))} if rng.random() < 0.3 else {}
    if rng.random() < 0.3:
        tensors["w"] = random_desc(rng, U8, (n, k // 2), is_output=True)
    return OPS[op].make(tensors, attrs, Policy())


def _order(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.permutation(problem.desc("permutation").shape[0])


def _codes(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Bytes of all values; of e4m3 numbers."""
    desc = problem.desc("w")
    if desc.dtype.is_float:
        return rng.standard_normal(desc.shape) * rng.choice([1e-3, 1.0, 50.0], desc.shape)
    return rng.integers(-128 if desc.dtype is S8 else 0, 128 if desc.dtype is S8 else 256, desc.shape)


def _scales(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return np.exp2(rng.uniform(-6, 0, problem.desc("scale").shape)) * rng.choice([-1, 1], problem.desc("scale").shape)


def _zeros(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    low, high = (-128, 128) if dict(problem.attrs)["kind"] == "s8" else (0 if problem.desc("zero_point").dtype is U8 else -9, 18)
    return rng.integers(low, high, problem.desc("zero_point").shape)


def _words(name: str, rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.integers(-2**31, 2**31, problem.desc(name).shape)


SAMPLES: dict[str, Sampler] = {"quantized_linear": sample, **{op: partial(_repack, op) for op in ("repack_gptq", "repack_awq")}}
FILLS: dict[tuple[str, str], Fill] = {
    ("quantized_linear", "w"): _codes, ("quantized_linear", "scale"): _scales, ("quantized_linear", "zero_point"): _zeros,
    ("quantized_linear", "permutation"): _order, ("repack_gptq", "permutation"): _order,
    **{(op, name): partial(_words, name) for op in ("repack_gptq", "repack_awq") for name in ("qweight", "qzeros")}}
CASES: dict[str, tuple[str, ...]] = {
    "quantized_linear": (
        "quantized_linear x=f16[1,256] w=u8[24,128] scale=f16[24,2] kind=s4 group_size=128",
        "quantized_linear x=bf16[5,192] w=u8[40,96] scale=f32[40,6] zero_point=u8[40,6] kind=u4",
        "quantized_linear x=bf16[3,128] w=u8[16,64] scale=f32[16,2] bias=f32[16] kind=nf4",
        "quantized_linear x=f16[9,96] w=s8[24,96] scale=f32[24] zero_point=s8[24] kind=s8 epilogue='relu(acc)' out_dtype=f32",
        "quantized_linear x=bf16[2,3,64] w=e4m3[8,64] scale=f32[1] kind=e4m3",
        "quantized_linear x=f32[3,37] w=u8[5,19] scale=f32[5,3] kind=s4 group_size=16",
        "quantized_linear x=f16[3,33](40,1) w=u8[5,17](1,5) scale=f16[5,2] zero_point=s8[5,2] permutation=s32[33] kind=u4 group_size=20",
        "quantized_linear x=f16[0,32] w=u8[8,16] scale=f32[8] kind=s4",
        "quantized_linear x=f16[3,0] w=u8[8,0] scale=f32[8] bias=f16[8] kind=s4",
        "quantized_linear x=bf16[4,64] w=u8[0,32] scale=f32[0] kind=u4",
    ),
    "repack_gptq": ("repack_gptq qweight=s32[8,24] qzeros=s32[2,3] scales=f16[2,24]",
                    "repack_gptq qweight=s32[4,11] qzeros=s32[1,2] scales=f32[1,11] permutation=s32[32] zero_offset=0",
                    "repack_gptq qweight=s32[0,16] qzeros=s32[1,2] scales=f16[1,16]"),
    "repack_awq": ("repack_awq qweight=s32[64,3] qzeros=s32[2,3] scales=f16[2,24]",
                   "repack_awq qweight=s32[16,2](1,16) qzeros=s32[1,2] scales=bf16[1,16]"),
}
