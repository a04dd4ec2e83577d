"""Tensor-core arithmetic on dense fragments: D = A x B^T + C for matrices A (w, M, K), B (w, N, K), C (w, M, N).

`fast` sums in float64 and rounds once: exact wherever the products and sums fit f32, else within the error of one
rounding per instruction. `exact` follows the hardware bit for bit (recorded results in tests/emu/vectors):

    E = max over k of e(a_k) + e(b_k), and e(c)      exponents of the operands, subnormals at the type's minimum
    S = sum_k trunc(a_k b_k / 2^(E-F)) + trunc(c / 2^(E-F))                      F = 25, truncation toward zero
    f32 result: S truncated to 24 significant bits; f16 result: S rounded to nearest even

fp8 of mma.sync on sm_90 is emulated by the hardware with two f16 instructions and one addition.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from oxidnn.emu import floats
from oxidnn.emu.floats import F16, F32, F64, I64
from oxidnn.emu.memory import Array

FP8: dict[str, Any] = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MINIMUM_EXPONENT = {"bf16": -126, "f16": -14, "tf32": -126, "e4m3": -6, "e5m2": -14}
_CHUNK = 32  # matrices at a time in exact mode: the products of a chunk stay in the cache


def decode(codes: Array, type_: str) -> Array:
    """Raw codes (uint8, uint16, uint32 or uint64 by type) to float64."""
    if type_ == "bf16":
        return floats.bf16_to_f32(codes).astype(F64)
    if type_ == "f16":
        return codes.view(F16).astype(F64)
    if type_ == "tf32":
        return (codes & np.uint32(0xFFFFE000)).view(F32).astype(F64)
    if type_ == "s8":
        return codes.view(np.int8).astype(F64)
    if type_ in ("u8", "u4"):
        return codes.astype(F64)
    if type_ == "s4":
        return ((codes ^ 8).astype(np.int8) - np.int8(8)).astype(F64)
    if type_ == "f64":
        return codes.view(F64)
    return codes.view(FP8[type_]).astype(F64)


def multiply(a: Array, b: Array, c: Array, types: tuple[str, str], result: str, exact: bool) -> Array:
    """float64 operands; `result` is f32 or f16. Returns an array of that dtype."""
    if not exact:
        d = a @ b.transpose(0, 2, 1) + c
        return floats.canonical(d.astype(F32 if result == "f32" else F16))
    if types[0] in FP8:
        even = np.arange(a.shape[-1]) % 4 < 2
        zero = np.zeros_like(c)
        t = truncated(a[..., even], b[..., even], zero, ("f16", "f16"), "f32")
        t = truncated(a[..., ~even], b[..., ~even], t.astype(F64), ("f16", "f16"), "f32")
        return floats.canonical((t + c.astype(F32)).astype(F32 if result == "f32" else F16))
    return truncated(a, b, c, types, result)


def exponents(x: Array, least: int) -> Array:
    """floor(log2 |x|), at least `least`; far below everything for zero."""
    e = ((x.view(I64) >> 52) & 0x7FF) - 1023
    return np.where(x == 0, -5000, np.maximum(e, least)).astype(np.int32)


def truncated(
    a: Array, b: Array, c: Array, types: tuple[str, str], result: str, fraction: int = 25, kept: int = 23
) -> Array:
    """The hardware's sum; `kept` fraction bits survive in an f32 result."""
    dtype = F32 if result == "f32" else F16
    out = np.empty(c.shape, dtype)
    for at in range(0, len(a), _CHUNK):
        part = slice(at, at + _CHUNK)
        x, y, z = (np.ascontiguousarray(v[part]) for v in (a, b, c))
        out[part] = _truncated(x, y, z, types, dtype, fraction, kept)
    return out


def _truncated(
    a: Array, b: Array, c: Array, types: tuple[str, str], dtype: np.dtype, fraction: int, kept: int
) -> Array:
    ea, eb = exponents(a, MINIMUM_EXPONENT[types[0]]), exponents(b, MINIMUM_EXPONENT[types[1]])
    e = (ea[:, :, None, :] + eb[:, None, :, :]).max(-1)
    e = np.maximum(np.maximum(e, exponents(c, -126 if dtype == F32 else -14)), -600).astype(I64)
    scale = ((1023 + fraction - e) << 52).view(F64)  # 2^(F - E)
    unit = ((1023 - fraction + e) << 52).view(F64)
    products = a[:, :, None, :] * b[:, None, :, :]
    plain = bool(np.isfinite(products).all() and np.isfinite(c).all())
    sums = None if plain else products.sum(-1) + c
    products *= scale[..., None]
    np.trunc(products, out=products)
    s = products.sum(-1) + np.trunc(c * scale)
    if dtype == F32:
        # drop the bits of the float64 significand beyond `kept` fraction bits: truncation toward zero
        s = (s.view(I64) & ~((1 << (52 - kept)) - 1)).view(F64)
    d = (s * unit).astype(dtype)
    if sums is not None:
        d = np.where(np.isfinite(sums), d, sums.astype(dtype))
    return floats.canonical(d) + np.zeros(1, dtype)  # -0 from cancelled terms is +0
