"""GGUF blocks by whole arrays in float64: every number is scale * code - minimum, exactly but for Q8_K, whose scale is any f32."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...dtypes import F32
from ...ops.base import Problem
from ...ops.gguf import E2M1_DOUBLED, EXACT_ROWS, FORMATS, IQ4_VALUES, GgufMatvecProblem, GgufProblem, grid
from . import Expected, Reference

Parts = tuple[np.ndarray, np.ndarray, np.ndarray | float]  # scales, codes, minima: each (blocks, elements), or (blocks, 1), or a number
_SUMS = 2.0**-21  # of sums of x in two parts of 11 bits


def _half(b: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(b[:, at : at + 2]).view(np.float16).astype(np.float64)


def _words(b: np.ndarray, at: int, count: int, kind: type) -> np.ndarray:
    return np.ascontiguousarray(b[:, at : at + count * np.dtype(kind).itemsize]).view(kind).astype(np.int64)


def _bytes(b: np.ndarray, at: int, count: int) -> np.ndarray:
    return b[:, at : at + count].astype(np.int64)


def _planes(packed: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Codes of `bits` bits: every run of bytes gives the codes in its lowest bits, then those of the next ones, up to the highest."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return (runs >> np.arange(0, 8, bits)[:, None] & (1 << bits) - 1).reshape(len(packed), -1)


def _spread(values: np.ndarray, size: int) -> np.ndarray:
    return np.repeat(values, size // values.shape[1], 1)


def _flags(packed: np.ndarray) -> np.ndarray:
    """Bits, the lowest first."""
    return (packed[..., None] >> np.arange(8) & 1).reshape(len(packed), -1)


def _high_flags(b: np.ndarray, at: int) -> np.ndarray:
    return _flags(_bytes(b, at, 4))


def _q2_k(b: np.ndarray) -> Parts:
    scales = _bytes(b, 0, 16)
    return _spread(_half(b, 80) * (scales & 15), 256), _planes(_bytes(b, 16, 64), 32, 2), _spread(_half(b, 82) * (scales >> 4), 256)


def _q3_k(b: np.ndarray) -> Parts:
    high = _planes(_bytes(b, 0, 32), 32, 1)
    scales = _planes(_bytes(b, 96, 8), 8, 4) + 16 * _planes(_bytes(b, 104, 4), 4, 2) - 32
    return _spread(_half(b, 108) * scales, 256), _planes(_bytes(b, 32, 64), 32, 2) + 4 * high - 4, 0.0


def _k_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and minima of six bits in the twelve bytes from byte 4 on."""
    low, mins, mixed = _bytes(b, 4, 4), _bytes(b, 8, 4), _bytes(b, 12, 4)
    scales = np.concatenate([low & 63, (mixed & 15) + (low >> 6) * 16], 1)
    return scales, np.concatenate([mins & 63, (mixed >> 4) + (mins >> 6) * 16], 1)


def _q45_k(b: np.ndarray, five: bool) -> Parts:
    scales, mins = _k_scales(b)
    codes = _planes(_bytes(b, 48 if five else 16, 128), 32, 4)
    if five:
        codes = codes + 16 * _planes(_bytes(b, 16, 32), 32, 1)
    return _spread(_half(b, 0) * scales, 256), codes, _spread(_half(b, 2) * mins, 256)


def _q6_k(b: np.ndarray) -> Parts:
    scales = _bytes(b, 192, 16).astype(np.int8)
    codes = _planes(_bytes(b, 0, 128), 64, 4) + 16 * _planes(_bytes(b, 128, 64), 32, 2) - 32
    return _spread(_half(b, 208) * scales, 256), codes, 0.0


def _ternary(packed: np.ndarray, trits: int) -> np.ndarray:
    """Numbers 0, 1, 2: the leading trits of bytes as fractions, all first ones first."""
    return np.concatenate([(packed * 3**n & 255) * 3 >> 8 for n in range(trits)], 1)


def _tq1_0(b: np.ndarray) -> Parts:
    codes = [_ternary(_bytes(b, 0, 32), 5), _ternary(_bytes(b, 32, 16), 5), _ternary(_bytes(b, 48, 4), 4)]
    return _half(b, 52), np.concatenate(codes, 1) - 1, 0.0


def _mxfp4(b: np.ndarray) -> Parts:
    return 2.0 ** (_bytes(b, 0, 1) - 128.0), np.array(E2M1_DOUBLED)[_planes(_bytes(b, 1, 16), 16, 4)], 0.0


def _nvfp4(b: np.ndarray) -> Parts:
    e = _bytes(b, 0, 4)
    exponent, fraction = e >> 3 & 15, e & 7
    scale = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0)) / 2
    return _spread(np.where(e == 0x7F, 0, scale), 64), np.array(E2M1_DOUBLED)[_planes(_bytes(b, 4, 32), 8, 4)], 0.0


def _signs(seven: np.ndarray) -> np.ndarray:
    """Eight signs of seven bits, the last of them such that an even number is negative."""
    bits = _flags(seven.reshape(-1, 1))[:, :7]
    return 1 - 2 * np.concatenate([bits, bits.sum(1, keepdims=True) % 2], 1).reshape(len(seven), -1)


def _iq2_xxs(b: np.ndarray) -> Parts:
    words = _words(b, 2, 16, np.uint32).reshape(-1, 8, 2)
    entries = (words[..., :1] >> np.arange(0, 32, 8) & 255).reshape(len(b), -1)
    signs = _signs((words[..., 1:] >> np.arange(0, 28, 7) & 127).reshape(len(b), -1))
    return _spread(_half(b, 0) * (2 * (words[..., 1] >> 28) + 1) / 8, 256), grid("iq2_xxs")[entries].reshape(len(b), -1) * signs, 0.0


def _nibble_scales(b: np.ndarray, at: int, count: int) -> np.ndarray:
    """Of every byte the low half first."""
    return 2 * _planes(_bytes(b, at, count), 1, 4) + 1


def _iq2_xs(b: np.ndarray) -> Parts:
    words = _words(b, 2, 32, np.uint16)
    codes = grid("iq2_xs")[words & 511].reshape(len(b), -1) * _signs(words >> 9)
    return _spread(_half(b, 0) * _nibble_scales(b, 66, 8) / 8, 256), codes, 0.0


def _iq2_s(b: np.ndarray) -> Parts:
    entries = _bytes(b, 2, 32) + 256 * _planes(_bytes(b, 66, 8), 1, 2)
    codes = grid("iq2_s")[entries].reshape(len(b), -1) * (1 - 2 * _flags(_bytes(b, 34, 32)))
    return _spread(_half(b, 0) * _nibble_scales(b, 74, 8) / 8, 256), codes, 0.0


def _iq3_xxs(b: np.ndarray) -> Parts:
    words = _words(b, 66, 8, np.uint32)
    signs = _signs((words[..., None] >> np.arange(0, 28, 7) & 127).reshape(len(b), -1))
    codes = grid("iq3_xxs")[_bytes(b, 2, 64)].reshape(len(b), -1) * signs
    return _spread(_half(b, 0) * (2 * (words >> 28) + 1) / 4, 256), codes, 0.0


def _iq3_s(b: np.ndarray) -> Parts:
    entries = _bytes(b, 2, 64) + 256 * _flags(_bytes(b, 66, 8))
    codes = grid("iq3_s")[entries].reshape(len(b), -1) * (1 - 2 * _flags(_bytes(b, 74, 32)))
    return _spread(_half(b, 0) * _nibble_scales(b, 106, 4), 256), codes, 0.0


def _iq1_s(b: np.ndarray) -> Parts:
    words = _words(b, 34, 8, np.uint16)
    entries = _bytes(b, 2, 32) + 256 * (words[..., None] >> np.arange(0, 12, 3) & 7).reshape(len(b), -1)
    codes = 8 * (grid("iq1_s")[entries].reshape(len(b), -1).astype(np.int64) - 1)
    return _spread(_half(b, 0) * (2 * (words >> 12 & 7) + 1) / 8, 256), codes + _spread(1 - 2 * (words >> 15), 256), 0.0


def _iq1_m(b: np.ndarray) -> Parts:
    words, high = _words(b, 48, 4, np.uint16), _planes(_bytes(b, 32, 16), 1, 4)
    d = ((words >> 12) << np.arange(0, 16, 4)).sum(1, keepdims=True).astype(np.uint16).view(np.float16).astype(np.float64)
    scales = (words[..., None] >> np.arange(0, 12, 3) & 7).reshape(len(b), -1)
    codes = 8 * (grid("iq1_s")[_bytes(b, 0, 32) + 256 * (high & 7)].reshape(len(b), -1).astype(np.int64) - 1)
    return _spread(d * (2 * scales + 1) / 8, 256), codes + _spread(1 - 2 * (high >> 3), 256), 0.0


def _iq4_xs(b: np.ndarray) -> Parts:
    scales = _planes(_bytes(b, 4, 4), 1, 4) + 16 * (_words(b, 2, 1, np.uint16) >> np.arange(0, 16, 2) & 3) - 32
    return _spread(_half(b, 0) * scales, 256), np.array(IQ4_VALUES)[_planes(_bytes(b, 8, 128), 16, 4)], 0.0


_DECODERS: dict[str, Callable[[np.ndarray], Parts]] = {
    "Q4_0": lambda b: (_half(b, 0), _planes(_bytes(b, 2, 16), 16, 4) - 8, 0.0),
    "Q4_1": lambda b: (_half(b, 0), _planes(_bytes(b, 4, 16), 16, 4), -_half(b, 2)),
    "Q5_0": lambda b: (_half(b, 0), _planes(_bytes(b, 6, 16), 16, 4) + 16 * _high_flags(b, 2) - 16, 0.0),
    "Q5_1": lambda b: (_half(b, 0), _planes(_bytes(b, 8, 16), 16, 4) + 16 * _high_flags(b, 4), -_half(b, 2)),
    "Q8_0": lambda b: (_half(b, 0), _bytes(b, 2, 32).astype(np.int8), 0.0),
    "Q8_K": lambda b: (np.ascontiguousarray(b[:, :4]).view(np.float32).astype(np.float64), _bytes(b, 4, 256).astype(np.int8), 0.0),
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": lambda b: _q45_k(b, False), "Q5_K": lambda b: _q45_k(b, True), "Q6_K": _q6_k,
    "IQ1_S": _iq1_s, "IQ1_M": _iq1_m, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s,
    "IQ4_NL": lambda b: (_half(b, 0), np.array(IQ4_VALUES)[_planes(_bytes(b, 2, 16), 16, 4)], 0.0), "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0, "TQ2_0": lambda b: (_half(b, 64), _planes(_bytes(b, 0, 64), 32, 2) - 1, 0.0), "MXFP4": _mxfp4, "NVFP4": _nvfp4,
}


def decode(name: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scale * code, minimum), each (..., elements) in float64: the numbers are their difference. blocks: u8 (..., bytes)."""
    size, num_bytes = FORMATS[name]
    shape = (*blocks.shape[:-1], blocks.shape[-1] // num_bytes * size)
    if blocks.size == 0:
        return np.zeros(shape), np.zeros(shape)
    with np.errstate(all="ignore"):
        scales, codes, minima = _DECODERS[name](np.ascontiguousarray(blocks).reshape(-1, num_bytes))
        products = scales * codes
    return products.reshape(shape), np.broadcast_to(minima, products.shape).reshape(shape)


def dequantize(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, GgufProblem)
    products, minima = decode(problem.format, inputs["blocks"])
    most = problem.desc("y").dtype.max
    with np.errstate(all="ignore"):
        want = products - minima
        return {"y": Expected(np.where(np.abs(want) > most * (1 + 2.0**-12), np.copysign(np.inf, want), want))}


def matvec(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, GgufMatvecProblem)
    y = p.desc("y")
    want, magnitude, slack = (np.zeros((p.rows, p.n)) for _ in range(3))
    for r in range(p.rows):
        ids = inputs["ids"].reshape(p.rows, -1)[r] if p.num_ids else np.zeros(1, np.int64)
        for j, e in enumerate(ids):
            if not 0 <= e < max(p.desc("blocks").shape[0] if p.num_ids else 1, 0):
                continue
            x = inputs["x"].reshape(p.rows, len(ids) if inputs["x"].ndim == 3 else 1, p.k)[r]
            x = x[j] if len(x) > 1 else x[0]
            products, minima = decode(p.format, inputs["blocks"][e] if p.num_ids else inputs["blocks"])
            factor = float(inputs["weights"].reshape(p.rows, -1)[r, j]) if p.has("weights") else 1.0
            want[r] += factor * ((products - minima) @ x)
            sizes = np.abs(products) + np.abs(minima)
            magnitude[r] += abs(factor) * (sizes @ np.abs(x))
            lost = 2.0**-38 * np.abs(x).max(initial=0.0)
            # minima, and what codes are above their numbers, are multiplied with sums of x
            most = (np.abs(minima) + np.abs(products)).max(-1, initial=0.0)
            slack[r] += abs(factor) * (_SUMS * most * np.abs(x).sum() + lost * sizes.sum(-1))
            if p.rows > EXACT_ROWS and not p.num_ids:  # W may be rounded to x's type
                kind = p.desc("x").dtype
                slack[r] += kind.epsilon * (np.abs(products - minima) @ np.abs(x)) + kind.smallest * np.abs(x).sum()
    result = Expected(want.reshape(y.shape), magnitude.reshape(y.shape), p.k * max(p.num_ids, 1) + 4, F32, slack=slack.reshape(y.shape))
    return {"y": result}


REFERENCES: dict[str, Reference] = {"gguf_dequantize": dequantize, "gguf_matvec": matvec}
