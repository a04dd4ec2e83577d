"""Matrices in the block formats of GGUF files: dequantise, and multiply with rows, best a few.

    gguf_dequantize blocks=u8[64,144] format=Q4_K dtype=f16                 y (f16, [64,256])
    gguf_matvec blocks=u8[512,2304] x=f16[1,4096] format=Q4_K               y (f16, [1,512])
    gguf_matvec blocks=u8[8,512,2304] x=f16[3,4096] ids=s32[3,2] weights=f32[3,2] format=Q4_K       y (f16, [3,512])

blocks: bytes as they lie in the file, (..., bytes of a row), the last dimension contiguous; a row is a whole number of blocks. Numbers are
scale * code, or scale * code - minimum, in f32, rounded once to the result's type.

gguf_matvec: y[r] = W x[r] of W (n, k) for rows of x, f32, f16 or bf16, or for one row without its dimension. With ids, W is
(experts, n, k), and y[r] is the sum over j, in order, of weights[r, j] * W[ids[r, j]] x[r] (weights: 1 if none are given) or, of x
(rows, j, k), of x[r, j]; an id beyond the experts adds nothing. ids (rows,) or (rows, j), j up to 16. Of more than 8 rows, without ids,
W may be rounded to x's type first; numbers beyond that type are infinite then. Else codes are multiplied exactly: rows of x are taken as
f16 with a power of two of their own (of f32 in three parts of 11 bits), products are added in f32 on tensor cores and scaled in f32; the
sum of a group keeps 20 bits of what its largest x makes. Minima, and what the codes of Q3_K and Q6_K have as bias, are multiplied with
sums of x of 22 bits: an error of 2^-22 of the largest number of the block, times the sum of |x|. What is
below 2^-38 of the largest number of a row of x may be lost. The product is finite in y, too, while the
sizes of the numbers of a row of W add up to less than 2^126, of Q8_K 2^112 (other formats do not come near); beyond y may be infinite or
NaN, and MXFP4's scales of e = 255 count as infinite. Of f16 x each block of MXFP4 may add an error of 2^-135. NaN and infinities make
their row of y NaN or infinite.

The layouts of blocks, and the values of the codebooks (oxidnn/data/gguf_grids.npz: bytes of a grid's entries, those of IQ1 plus 1), are
facts of the format, as ggml (ggml-quants.h, ggml-common.h) and the `gguf` package state them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..dtypes import BF16, F16, F32, S32, S64, U8
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import check_choice, check_dtype, check_integer, check_reach, check_shape, check_type, describe, operand, output

FORMATS: dict[str, tuple[int, int]] = {  # elements and bytes of a block
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "Q8_K": (256, 292),
    "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82), "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}
WIDE = (F32, F16, BF16)
EXACT_ROWS = 8
MAX_IDS = 16
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@cache
def grid(name: str) -> np.ndarray:
    """(entries, numbers of an entry) u8: the codebook "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s" or "iq1_s" (numbers plus 1)."""
    with np.load(Path(__file__).parents[1] / "data" / "gguf_grids.npz") as file:
        return file[name]


@dataclass(frozen=True)
class GgufProblem(Problem):
    format: str = ""

    @property
    def block_size(self) -> int:
        """Elements of a block."""
        return FORMATS[self.format][0]

    @property
    def block_bytes(self) -> int:
        return FORMATS[self.format][1]

    @property
    def num_blocks(self) -> int:
        """Of a row."""
        return self.desc("blocks").shape[-1] // self.block_bytes

    @property
    def k(self) -> int:
        """Elements of a row."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True)
class GgufMatvecProblem(GgufProblem):
    @property
    def n(self) -> int:
        return self.desc("blocks").shape[-2]

    @property
    def rows(self) -> int:
        """Of y."""
        return prod(self.desc("y").shape[:-1])

    @property
    def num_ids(self) -> int:
        """Experts that a row of y adds; 0 without ids."""
        if not self.has("ids"):
            return 0
        shape = self.desc("ids").shape
        return shape[1] if len(shape) == 2 else 1

    @property
    def flops(self) -> int:
        return 2 * self.rows * max(self.num_ids, 1) * self.n * self.k

    @property
    def num_bytes(self) -> int:
        """Each expert is read once for each row that asks for it, at most all of them."""
        blocks = self.desc("blocks")
        taken = min(self.rows * self.num_ids, blocks.shape[0]) if self.has("ids") else 1
        weights = taken * self.n * blocks.shape[-1]
        return weights + sum(o.desc.num_bytes for o in self.operands if o.name != "blocks")


def _blocks(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], ranks: tuple[int, int]) -> tuple[TensorDesc, str]:
    if "format" not in attrs:
        raise expected(op, "format", "missing", ", ".join(FORMATS))
    name = check_choice(op, "format", attrs["format"].upper() if isinstance(attrs["format"], str) else attrs["format"], tuple(FORMATS))
    blocks = operand(op, "blocks", tensors, (U8,))
    check_reach(op, "blocks", blocks, describe(tensors))
    if not ranks[0] <= blocks.rank <= ranks[1]:
        allowed = f"{ranks[0]}" if ranks[0] == ranks[1] else f"{ranks[0]} to {ranks[1]}"
        raise expected(op, "rank of blocks", blocks.rank, allowed, describe(tensors))
    size = FORMATS[name][1]
    if blocks.shape[-1] % size:
        raise expected(op, "last dimension of blocks", blocks.shape[-1], f"a multiple of {size} bytes, the blocks of {name}",
                       describe(tensors))
    if blocks.strides[-1] != 1 and blocks.shape[-1] > 1:
        raise expected(op, "last stride of blocks", blocks.strides[-1], "1", describe(tensors))
    if any(s < 0 for s, n in zip(blocks.strides, blocks.shape, strict=True) if n > 1):
        raise expected(op, "strides of blocks", list(blocks.strides), "none below 0", describe(tensors))
    return blocks, name


def make_dequantize(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> GgufProblem:
    op = "gguf_dequantize"
    blocks, name = _blocks(op, tensors, attrs, (1, 8))
    given = check_type(op, "dtype", attrs["dtype"]) if "dtype" in attrs else tensors["y"].dtype if "y" in tensors else F32
    if given not in WIDE:
        raise expected(op, "dtype", given, ", ".join(t.name for t in WIDE))
    size, num_bytes = FORMATS[name]
    shape = (*blocks.shape[:-1], blocks.shape[-1] // num_bytes * size)
    y = output(op, "y", tensors, (given,), shape, TensorDesc.packed(given, shape))
    normal = (("format", name), *((("dtype", given.name),) if given is not F32 else ()))
    return GgufProblem(op, (Operand("blocks", blocks), Operand("y", y, True)), normal, policy=policy, format=name)


def make_matvec(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> GgufMatvecProblem:
    op, context = "gguf_matvec", describe(tensors)
    has_ids = "ids" in tensors
    blocks, name = _blocks(op, tensors, attrs, (3, 3) if has_ids else (2, 2))
    x = operand(op, "x", tensors, WIDE)
    check_reach(op, "x", x, context)
    size, num_bytes = FORMATS[name]
    n, k = blocks.shape[-2], blocks.shape[-1] // num_bytes * size
    operands = [Operand("blocks", blocks), Operand("x", x)]
    if has_ids:
        check_integer(op, "experts (first extent of blocks)", blocks.shape[0], 1, context=context)
        ids = operand(op, "ids", tensors, (S32, S64))
        if ids.rank not in (1, 2):
            raise expected(op, "rank of ids", ids.rank, "1 or 2", context)
        if ids.rank == 2 and not 1 <= ids.shape[1] <= MAX_IDS:
            raise expected(op, "ids of a row", ids.shape[1], f"1 to {MAX_IDS}", context)
        rows: tuple[int, ...] = (ids.shape[0],)
        check_shape(op, "x", x, (*ids.shape, k) if x.rank == 3 and ids.rank == 2 else (*rows, k), tensors)
        operands.append(Operand("ids", ids))
        if "weights" in tensors:
            weights = operand(op, "weights", tensors, (F32, F16, BF16), ids.shape)
            operands.append(Operand("weights", weights))
    else:
        if "weights" in tensors:
            raise expected(op, "weights", "given", "none without ids", context)
        rows = x.shape[:-1]
        if x.rank not in (1, 2):
            raise expected(op, "shape of x", list(x.shape), "(k,) or (rows, k)", context)
        check_shape(op, "x", x, (*rows, k), tensors)
    given = check_type(op, "out_dtype", attrs["out_dtype"]) if "out_dtype" in attrs else tensors["y"].dtype if "y" in tensors else x.dtype
    if given not in WIDE:
        raise expected(op, "out_dtype", given, ", ".join(t.name for t in WIDE))
    y = output(op, "y", tensors, (given,), (*rows, n), TensorDesc.packed(given, (*rows, n)))
    check_dtype(op, "y", y, tensors, WIDE)
    operands.append(Operand("y", y, True))
    normal = (("format", name), *((("out_dtype", given.name),) if given is not x.dtype else ()))
    return GgufMatvecProblem(op, tuple(operands), normal, policy=policy, format=name)


DEFINITIONS = (
    OpDef("gguf_dequantize", ("blocks",), ("y",), make_dequantize, attrs=(("format", None), ("dtype", None))),
    OpDef("gguf_matvec", ("blocks", "x", "ids", "weights"), ("y",), make_matvec, ("ids", "weights"),
          (("format", None), ("out_dtype", None))),
)
