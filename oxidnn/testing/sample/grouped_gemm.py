"""Random and fixed grouped GEMMs."""

from __future__ import annotations

import numpy as np

from ...dtypes import BF16, E4M3, E5M2, F16, F32, F64, S8, S32, S64, U8
from ...ops import OPS, Policy, Problem
from ...ops.gemm import GATES
from ...ops.grouped_gemm import GroupedGemmProblem
from ...tensor import TensorDesc
from .tensors import random_desc


def group_sizes(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Random sizes, some of them 0; mostly of all rows, else of less, or of more than there are."""
    assert isinstance(problem, GroupedGemmProblem)
    cuts = np.sort(rng.integers(0, problem.rows + 1, problem.groups))
    if problem.groups and rng.random() < 0.7:
        cuts[-1] = problem.rows
    if rng.random() < 0.1:
        cuts += problem.rows // 2
    return cuts if problem.is_cumulative else np.diff(cuts, prepend=0)


def draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    top = 18 if size == "tiny" else 40
    rows, k, n = (int(rng.integers(1, top + 1)) for _ in range(3))
    groups = int(rng.integers(1, 5)) if rng.random() < 0.9 else 37  # more than a warp has lanes
    is_dense = rng.random() < 0.25  # what tensor cores and bulk copies want
    kinds = ((F16,), (BF16,), (F32,), (F64,), (E4M3, E5M2), (S8, U8))[int(rng.integers(2 if is_dense else 6))]
    if is_dense:
        rows, k, n = rows * int(rng.integers(1, 5)), 8 * int(rng.integers(1, 9)), 8 * int(rng.integers(1, 9))
    elif rng.random() < 0.1:
        rows, k, n, groups = ((0, k, n, groups), (rows, 0, n, groups), (rows, k, n, 0))[int(rng.integers(3))]

    def tensor(shape: tuple[int, ...]) -> TensorDesc:
        kind = kinds[int(rng.integers(len(kinds)))]
        return TensorDesc.packed(kind, shape) if is_dense else random_desc(rng, kind, shape)

    shape: tuple[int, ...]
    attrs: dict[str, object] = {"cumulative": bool(rng.random() < 0.3)}
    sizes = random_desc(rng, (S32, S64)[int(rng.integers(2))], (groups,))
    if op.endswith("_wgrad"):
        tensors, shape = {"a": tensor((rows, k)), "b": tensor((rows, n))}, (groups, k, n)
    else:
        attrs["transpose_b"] = bool(rng.random() < 0.5)
        tensors = {"a": tensor((rows, k)), "b": tensor((groups, n, k) if attrs["transpose_b"] else (groups, k, n))}
        shape = (rows, n)
        if rng.random() < 0.3:
            n = 2 * (-(-n // 8) * 8 if rng.random() < 0.6 else n)  # in eights both sums fit a tile
            shape = (rows, n // 2)
            attrs["gate"] = GATES[int(rng.integers(len(GATES)))]
            tensors["b"] = tensor((groups, n, k) if attrs["transpose_b"] else (groups, k, n))
    tensors["group_sizes"] = TensorDesc.packed(sizes.dtype, sizes.shape) if groups and sizes.strides == (0,) else sizes
    problem = OPS[op].make(tensors, attrs, Policy())
    out = problem.desc("d").dtype if rng.random() < 0.7 else (F32, F16, BF16)[int(rng.integers(3))]
    tensors["d"] = TensorDesc.packed(out, shape) if is_dense else random_desc(rng, out, shape, is_output=True)
    return OPS[op].make(tensors, attrs, Policy())


SAMPLES = {op: (lambda rng, size, op=op: draw(op, rng, size)) for op in ("grouped_gemm", "grouped_gemm_wgrad")}
FILLS = {(op, "group_sizes"): group_sizes for op in SAMPLES}
CASES = {
    "grouped_gemm": (
        "grouped_gemm a=f32[7,5] b=f32[3,5,4] group_sizes=s32[3]",
        "grouped_gemm a=bf16[70,40] b=bf16[5,24,40] group_sizes=s64[5] transpose_b=True cumulative=True d=f32[70,24]",
        "grouped_gemm a=f16[9,8](1,12) b=f16[2,8,16] group_sizes=s32[2](3) d=f16[9,16](1,10)",
        "grouped_gemm a=f64[6,5] b=f64[40,5,4] group_sizes=s32[40]",
        "grouped_gemm a=e4m3[9,40] b=e5m2[3,7,40] group_sizes=s32[3] transpose_b=True",
        "grouped_gemm a=u8[9,40] b=s8[3,7,40] group_sizes=s32[3] transpose_b=True",
        "grouped_gemm a=s8[9,5] b=s8[3,5,7] group_sizes=s32[3] out_dtype=f16",
        "grouped_gemm a=bf16[33,40] b=bf16[3,48,40] group_sizes=s32[3] transpose_b=True gate=silu",
        "grouped_gemm a=s8[9,5] b=s8[3,5,14] group_sizes=s32[3] gate=relu",
        "grouped_gemm a=f32[5,4] b=f32[0,4,3] group_sizes=s32[0]",
        "grouped_gemm a=f32[0,4] b=f32[2,4,3] group_sizes=s32[2]",
        "grouped_gemm a=f32[5,0] b=f32[2,0,3] group_sizes=s32[2]",
    ),
    "grouped_gemm_wgrad": (
        "grouped_gemm_wgrad a=f32[7,5] b=f32[7,4] group_sizes=s32[3]",
        "grouped_gemm_wgrad a=bf16[70,40] b=bf16[70,24] group_sizes=s64[5] cumulative=True d=f32[5,40,24]",
        "grouped_gemm_wgrad a=f16[9,8](1,12) b=f16[9,16] group_sizes=s32[2](3) d=f16[2,8,16](128,1,8)",
        "grouped_gemm_wgrad a=f64[6,5] b=f64[6,4] group_sizes=s32[40]",
        "grouped_gemm_wgrad a=e4m3[70,8] b=e5m2[70,7] group_sizes=s32[1]",
        "grouped_gemm_wgrad a=s8[40,5] b=u8[40,7] group_sizes=s32[3]",
        "grouped_gemm_wgrad a=f32[0,4] b=f32[0,3] group_sizes=s32[2]",
        "grouped_gemm_wgrad a=f32[1,4] b=f32[1,3] group_sizes=s32[2]",
        "grouped_gemm_wgrad a=f32[5,4] b=f32[5,3] group_sizes=s32[0]",
    ),
}
