"""Random and fixed GEMMs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dtypes import BF16, E4M3, E5M2, F16, F32, F64, S8, S32, U8
from ...ops import OPS, Policy, Problem
from ...ops.gemm import BLOCK, GATES
from ...tensor import TensorDesc
from .conv import draw_epilogue
from .tensors import random_desc


def sample(rng: np.random.Generator, size: str) -> Problem:
    return sample_scaled(rng, size) if rng.random() < 0.25 else sample_floats(rng, size)


def sample_scaled(rng: np.random.Generator, size: str) -> Problem:
    """8-bit inputs, scales of every granularity, gates."""
    top = 18 if size == "tiny" else 40
    m, n, k = (int(rng.integers(1, top + 1)) for _ in range(3))
    is_float = rng.random() < 0.25
    kinds = ((F32, F64, F16, BF16)[int(rng.integers(4))],) if is_float else ((E4M3, E5M2), (S8, U8))[int(rng.integers(2))]
    gate = GATES[int(rng.integers(len(GATES)))] if rng.random() < 0.3 else None
    has_blocks = not is_float and gate is None and rng.random() < 0.5
    if has_blocks:  # a block and some, or two
        k = int(rng.choice((k, BLOCK, BLOCK + k, 2 * BLOCK)))
        n, m = (int(v) for v in rng.choice(((n, m), (BLOCK + 3, 3), (3, BLOCK + 3))))
    if gate:
        n = 2 * (-(-n // 8) * 8 if rng.random() < 0.6 else n)  # in eights both sums fit a tile
    batch = [2] if rng.random() < 0.2 else []
    attrs: dict[str, Any] = {name: bool(rng.random() < 0.4) for name in ("transpose_a", "transpose_b")}
    tensors = {}
    shape: tuple[int, ...]
    for name, shape in (("a", (k, m) if attrs["transpose_a"] else (m, k)), ("b", (n, k) if attrs["transpose_b"] else (k, n))):
        own = batch if rng.random() < 0.6 else []
        tensors[name] = random_desc(rng, kinds[int(rng.integers(len(kinds)))], (*own, *shape))
    blocks = -(-k // BLOCK)
    for name, rows, is_a in (("scale_a", m, True), ("scale_b", n, False)):
        draw = rng.random()
        if draw < 0.25:
            continue
        shape = ((), (1,), (rows,))[int(rng.integers(3))]
        if has_blocks and draw < 0.75:
            grid = (int(rng.choice((1, rows, -(-rows // BLOCK)))), int(rng.choice((1, blocks))))
            shape = (*tensors[name[-1]].shape[:-2], *(grid if is_a else grid[::-1]))
        tensors[name] = random_desc(rng, F32, shape)
    shape = (*(batch if any(len(tensors[x].shape) > 2 for x in "ab") else ()), m, n // 2 if gate else n)
    if gate is not None:
        attrs["gate"] = gate
        if rng.random() < 0.5:
            tensors["bias"] = random_desc(rng, F32, (n,))
    elif rng.random() < 0.6:
        draw_epilogue(rng, tensors, attrs, shape, -1)
    out = (F32, F16, BF16)[int(rng.integers(3))]
    if gate and kinds[-1] is U8 and out is F16:  # products of sums of integers leave its range
        out = F32
    if kinds[-1] is U8 and tensors.keys() == {"a", "b"} and "epilogue" not in attrs and gate is None:
        out = S32
    tensors["d"] = random_desc(rng, out, shape, is_output=True)
    if rng.random() < 0.2 and out is not S32:
        attrs["alpha"] = 0.5
    if gate is None and out is not S32 and "epilogue" not in attrs and rng.random() < 0.2:
        attrs["epilogue"] = "relu(t := acc * 2), t" if "bias" not in tensors and "residual" not in tensors else None
        if attrs["epilogue"] and rng.random() < 0.5:
            tensors["aux"] = random_desc(rng, F32, shape, is_output=True)
    return OPS["gemm"].make(tensors, attrs, Policy())


def sample_floats(rng: np.random.Generator, size: str) -> Problem:
    top = 18 if size == "tiny" else 40
    m, n, k = (int(rng.integers(1, top + 1)) for _ in range(3))
    is_dense = rng.random() < 0.25  # what tensor cores and bulk copies want: 16-bit, packed, extents in eights
    if is_dense:
        m, n, k = (8 * int(rng.integers(1, 9)) for _ in range(3))
    elif rng.random() < 0.05:
        m, n, k = ((0, n, k), (m, 0, k), (m, n, 0))[int(rng.integers(3))]
    batch = [int(rng.integers(1, 4)) for _ in range(int(rng.choice((0, 1, 2), p=(0.6, 0.3, 0.1))))]
    attrs: dict[str, Any] = {"transpose_a": bool(rng.random() < 0.4), "transpose_b": bool(rng.random() < 0.4)}
    kind = (F16, BF16)[int(rng.integers(2))] if is_dense else (F32, F64, F16, BF16)[int(rng.integers(4))]
    out_kind = (F32, F64, F16, BF16)[int(rng.integers(4))] if rng.random() < 0.2 else kind

    def own_batch() -> list[int]:
        """The batch, or less of it: some dimensions 1, leading ones left out."""
        own = [1 if rng.random() < 0.3 else e for e in batch]
        return own[int(rng.integers(len(own) + 1)):] if rng.random() < 0.3 else own

    def draw(rows: int, columns: int) -> TensorDesc:
        shape = (*own_batch(), rows, columns)
        return TensorDesc.packed(kind, shape) if is_dense else random_desc(rng, kind, shape)

    tensors = {"a": draw(*((k, m) if attrs["transpose_a"] else (m, k))), "b": draw(*((n, k) if attrs["transpose_b"] else (k, n)))}
    shape = (*np.broadcast_shapes(tensors["a"].shape[:-2], tensors["b"].shape[:-2]), m, n)
    tensors["d"] = random_desc(rng, out_kind, shape, is_output=True)
    if rng.random() < 0.3:
        attrs["alpha"] = float(rng.choice((0.5, -2.0, 0.0)))
    if rng.random() < 0.3:
        attrs["beta"] = float(rng.choice((1.0, 0.25)))
        tensors["c"] = tensors["d"] if rng.random() < 0.3 else random_desc(rng, kind, shape if rng.random() < 0.7 else (m, 1))
    draw_epilogue(rng, tensors, attrs, shape, -1, tensors["d"])
    return OPS["gemm"].make(tensors, attrs, Policy())


SAMPLES = {"gemm": sample}  # of the floats alone: sample_floats
CASES = {"gemm": (
    "gemm a=f32[5,7] b=f32[7,3]",
    "gemm a=bf16[2,17,33] b=bf16[33,9] bias=f32[9] epilogue=bias_relu",
    "gemm a=f16[3,1,4,5] b=f16[2,5,6] d=f32[3,2,4,6]",
    "gemm a=f64[6,5] b=f64[4,6] transpose_a=True transpose_b=True alpha=0.5 beta=2.0 c=f64[5,4]",
    "gemm a=f32[4,0] b=f32[0,3] bias=f32[3]",
    "gemm a=f32[0,4] b=f32[4,3]",
    "gemm a=f16[9,8]@2 b=f16[8,8](9,1)@2 d=f16[9,8](11,1)@2",
    "gemm a=f32[65537,1] b=f32[1,2]",
    "gemm a=f32[65537,1,2] b=f32[65537,2,1]",
    "gemm a=f16[3,4,16](0,16,1) b=f16[3,16,8] d=f16[3,4,8]",  # batches that all read one matrix
    "gemm a=bf16[2,3,4,16] b=bf16[2,3,16,8](384,0,8,1) c=bf16[2,3,4,8](0,0,8,1) beta=1.0",
    # 8-bit floats in any mix and every scale; rows and columns beyond whole blocks; an empty sum.
    "gemm a=e4m3[9,40] b=e5m2[7,40] transpose_b=True d=f32[9,7] scale_a=f32[1] scale_b=f32[1]",
    "gemm a=e5m2[2,9,40] b=e4m3[40,7] d=f16[2,9,7] bias=f32[7] scale_a=f32[9] scale_b=f32[7] epilogue=bias_relu",
    "gemm a=e4m3[130,300] b=e4m3[300,150] d=f32[130,150] scale_a=f32[130,3] scale_b=f32[3,2]",
    "gemm a=e4m3[3,300] b=e4m3[150,300] transpose_b=True scale_a=f32[3,3](1,4) scale_b=f32[3,150]",
    "gemm a=e4m3[2,130,256] b=e4m3[256,40] scale_a=f32[2,2,2] scale_b=f32[1] out_dtype=f16",
    "gemm a=e4m3[9,0] b=e4m3[0,7] bias=f32[7] scale_a=f32[9,1] scale_b=f32[1,7]",
    # Integers: exact, or scaled.
    "gemm a=u8[9,40] b=s8[7,40] transpose_b=True",
    "gemm a=s8[9,300] b=s8[300,7] scale_a=f32[9] scale_b=f32[7] d=f16[9,7]",
    "gemm a=s8[9,300] b=s8[300,7] scale_a=f32[9,3] scale_b=f32[3,1]",
    "gemm a=s8[9,48] b=u8[16,48] transpose_b=True bias=s32[16] scale_a=f32[9] scale_b=f32[16] epilogue='relu(acc + bias)' d=f16[9,16]",
    "gemm a=u8[2,9,32] b=s8[32,16] residual=s32[2,9,16]",
    # Gates; second outputs.
    "gemm a=bf16[9,40] b=bf16[40,14] gate=silu bias=f32[14]",
    "gemm a=s8[3,9,40] b=s8[3,40,14] gate=identity scale_a=f32[1] scale_b=f32[3,1,14] alpha=0.5",
    "gemm a=f16[9,40] b=f16[40,14] bias=f32[14] epilogue='relu(t := acc + bias), t' aux=f32[9,14]",
    "gemm a=bf16[9,40] b=bf16[48,40] transpose_b=True gate=gelu bias=f32[48] d=f32[9,24](1,9)",
    "gemm a=f32[33,300] b=f32[300,80] gate=sigmoid alpha=-1.0",
    "gemm a=f32[33,300] b=f32[300,24] epilogue='gelu(t := acc), t' d=f16[33,24] aux=f32[33,24](1,40)",
)}
