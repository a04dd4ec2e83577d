"""GGUF blocks of random bytes whose scales are numbers of moderate size, rows of x, experts; strides, odd addresses, every format."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dtypes import F16, F32, S32, S64, U8
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.gguf import FORMATS, WIDE, GgufMatvecProblem, GgufProblem
from ...tensor import TensorDesc
from . import Fill, Sampler
from .tensors import random_desc

_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,),
           "TQ2_0": (64,), "MXFP4": (), "NVFP4": (), "Q8_K": (), "IQ1_M": ()}  # where f16 scales lie, else at 0


def moderate(name: str, blocks: np.ndarray) -> np.ndarray:
    """Random blocks with scales from 2^-12 to 2^-8 and of either sign, where a format has f16 ones; products stay numbers of f16."""
    size = FORMATS[name][1]
    b = np.array(blocks, np.uint8).reshape(*blocks.shape[:-1], blocks.shape[-1] // size, size)
    for at in _HALVES.get(name, (0,)):
        b[..., at + 1] = 0x0C + b[..., at + 1] % 0x14 + (b[..., at + 1] & 0x80)
    if name == "MXFP4":
        b[..., 0] = 122 + b[..., 0] % 8
    elif name == "NVFP4":
        b[..., :4] %= 0x58
    elif name == "Q8_K":
        b[..., 3] = 0x38 + (b[..., 3] & 0x81)
    elif name == "IQ1_M":
        b[..., 55] = 0x10 + (b[..., 55] & 0x8F)
    return b.reshape(blocks.shape)


def _bytes(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    assert isinstance(problem, GgufProblem)
    return moderate(problem.format, rng.integers(0, 256, problem.desc("blocks").shape).astype(np.uint8))


def _ids(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Experts, some of them several times, some that do not exist."""
    experts = problem.desc("blocks").shape[0]
    return rng.integers(-1, experts + 1, problem.desc("ids").shape)


def _blocks(rng: np.random.Generator, shape: tuple[int, ...]) -> TensorDesc:
    """Packed, or with gaps of any number of bytes between rows; at any address."""
    strides, step = [1], shape[-1]
    for extent in reversed(shape[:-1]):
        step += int(rng.choice([0, 0, 0, 4, 16, 3])) if len(strides) == 1 or rng.random() < 0.3 else 0
        strides.append(step)
        step *= max(extent, 1)
    return TensorDesc(U8, shape, tuple(reversed(strides)), int(rng.choice([16, 16, 8, 4, 2, 1])))


def _format(rng: np.random.Generator) -> str:
    return str(rng.choice(list(FORMATS)))


def draw_dequantize(rng: np.random.Generator, size: str) -> Problem:
    name = _format(rng)
    elements, num_bytes = FORMATS[name]
    shape = [int(n) for n in rng.integers(1, 4, int(rng.integers(0, 3)))]
    count = int(rng.integers(1, 8)) * (4 if size != "tiny" else 1)
    if rng.random() < 0.05:
        shape, count = [2], 0
    kind = WIDE[int(rng.integers(3))]
    tensors = {"blocks": _blocks(rng, (*shape, count * num_bytes))}
    if rng.random() < 0.5:
        tensors["y"] = random_desc(rng, kind, (*shape, count * elements), is_output=True)
    return OPS["gguf_dequantize"].make(tensors, {"format": name, "dtype": kind.name}, Policy())


def draw_matvec(rng: np.random.Generator, size: str) -> Problem:
    name = _format(rng)
    elements, num_bytes = FORMATS[name]
    n, count = int(rng.integers(1, 40)), int(rng.integers(1, 12 if elements < 256 else 4)) * (3 if size != "tiny" else 1)
    rows = int(rng.integers(1, 9)) if rng.random() < 0.8 else int(rng.integers(9, 40))
    if rng.random() < 0.3:  # rows of pieces of 16 bytes
        count = next((c for c in range(1, 9) if c * num_bytes % 16 == 0 and (elements < 256 or c <= 4)), count)
    if rng.random() < 0.06:
        n, count, rows = ((0, count, rows), (n, 0, rows), (n, count, 0))[int(rng.integers(3))]
    kind, out = WIDE[int(rng.integers(3))], WIDE[int(rng.integers(3))]
    k = count * elements
    attrs: dict[str, Any] = {"format": name, "out_dtype": out.name}
    if rng.random() < 0.35:
        experts, rows, slots = int(rng.integers(1, 5)), min(rows, 3), int(rng.integers(1, 4))
        id_shape = (rows, slots) if slots > 1 or rng.random() < 0.5 else (rows,)
        tensors = {"blocks": _blocks(rng, (experts, n, count * num_bytes)),
                   "x": random_desc(rng, kind, (*id_shape, k) if len(id_shape) == 2 and rng.random() < 0.5 else (rows, k)),
                   "ids": random_desc(rng, (S32, S64)[int(rng.integers(2))], id_shape)}
        if rng.random() < 0.6:
            tensors["weights"] = random_desc(rng, (F32, F16)[int(rng.integers(2))], id_shape)
        y_shape: tuple[int, ...] = (rows, n)
    else:
        x_shape = (k,) if rows == 1 and rng.random() < 0.5 else (rows, k)
        tensors = {"blocks": _blocks(rng, (n, count * num_bytes)), "x": random_desc(rng, kind, x_shape)}
        y_shape = (*x_shape[:-1], n)
    if rng.random() < 0.5:
        tensors["y"] = random_desc(rng, out, y_shape, is_output=True)
    problem = OPS["gguf_matvec"].make(tensors, attrs, Policy())
    assert isinstance(problem, GgufMatvecProblem)
    return problem


SAMPLES: dict[str, Sampler] = {"gguf_dequantize": draw_dequantize, "gguf_matvec": draw_matvec}
FILLS: dict[tuple[str, str], Fill] = {("gguf_dequantize", "blocks"): _bytes, ("gguf_matvec", "blocks"): _bytes,
                                      ("gguf_matvec", "ids"): _ids}
CASES: dict[str, tuple[str, ...]] = {
    "gguf_dequantize": ("gguf_dequantize blocks=u8[3,90]nchw format=Q4_0", "gguf_dequantize blocks=u8[210]nchw format=Q6_K dtype=bf16",
                        "gguf_dequantize blocks=u8[2,3,110](400,117,1)@1 format=Q3_K dtype=f16",
                        "gguf_dequantize blocks=u8[0,18]nchw format=IQ4_NL", "gguf_dequantize blocks=u8[2,0]nchw format=MXFP4",
                        "gguf_dequantize blocks=u8[2,51]nchw format=MXFP4"),
    "gguf_matvec": ("gguf_matvec blocks=u8[17,432]nchw x=f16[1,768]nchw format=Q4_K",
                    "gguf_matvec blocks=u8[33,54]nchw x=f32[96]nchw format=Q4_0",
                    "gguf_matvec blocks=u8[5,210](211,1)@1 x=bf16[8,256]nchw format=Q6_K",
                    "gguf_matvec blocks=u8[4,17,176]nchw x=f32[2,256]nchw ids=s32[2,3]nchw weights=f32[2,3]nchw format=Q5_K",
                    "gguf_matvec blocks=u8[3,18,110]nchw x=f16[2,2,256]nchw ids=s64[2,2]nchw format=IQ3_S out_dtype=f32",
                    "gguf_matvec blocks=u8[0,18]nchw x=f16[1,32]nchw format=Q4_0",
                    "gguf_matvec blocks=u8[4,0]nchw x=f16[2,0]nchw format=Q8_0",
                    "gguf_matvec blocks=u8[4,34]nchw x=f16[0,32]nchw format=Q8_0",
                    "gguf_matvec blocks=u8[24,144]nchw x=bf16[19,256]nchw format=Q4_K",
                    "gguf_matvec blocks=u8[17,90]nchw x=f32[17,160]nchw format=Q4_0 out_dtype=bf16"),
}
