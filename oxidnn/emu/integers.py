"""Integer operations that NumPy lacks: pure functions on arrays, and makers of such functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from oxidnn.emu.floats import F64, I32, I64, U32, U64
from oxidnn.emu.memory import Array

Fn = Callable[..., Array]


def const(value: int, dtype: np.dtype) -> Array:
    return np.array([value & ((1 << 8 * dtype.itemsize) - 1)], U64).astype(f"u{dtype.itemsize}").view(dtype)


def wide_mul(dtype: np.dtype) -> tuple[Fn, np.dtype]:
    wider = np.dtype(f"{dtype.kind}{dtype.itemsize * 2}")
    return (lambda a, b: a.astype(wider) * b.astype(wider)), wider


def mul_hi(dtype: np.dtype) -> Fn:
    if dtype.itemsize < 8:
        product, wider = wide_mul(dtype)
        bits = const(dtype.itemsize * 8, wider)
        return lambda a, b: (product(a, b) >> bits).astype(dtype)

    def unsigned(a: Array, b: Array) -> Array:
        mask, half = const(0xFFFFFFFF, U64), const(32, U64)
        al, ah, bl, bh = a & mask, a >> half, b & mask, b >> half
        middle = ah * bl + ((al * bl) >> half)
        other = al * bh + (middle & mask)
        return ah * bh + (middle >> half) + (other >> half)

    if dtype == U64:
        return unsigned

    def signed(a: Array, b: Array) -> Array:
        high = unsigned(a.view(U64), b.view(U64)).view(I64)
        return high - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)

    return signed


def divide(a: Array, b: Array) -> Array:
    """Toward zero; x / 0 has all bits set."""
    zero = b == 0
    if zero.any():
        b = np.where(zero, const(1, b.dtype), b)
    q = a // b
    if a.dtype.kind == "i":
        q = q + ((q * b != a) & ((a < 0) != (b < 0)))
    return np.where(zero, const(-1, q.dtype), q) if zero.any() else q.astype(a.dtype, copy=False)


def remainder(a: Array, b: Array) -> Array:
    """With the sign of a; x % 0 is x."""
    safe = np.where(b == 0, const(1, b.dtype), b) if (b == 0).any() else b
    return np.where(b == 0, a, a - divide(a, safe) * safe) if safe is not b else a - divide(a, safe) * safe


def bit_length(x: Array) -> Array:
    """Bits up to the highest set one, as int64."""
    if x.dtype.itemsize == 8:
        high = (x >> const(32, U64)).astype(U32)
        return np.where(high != 0, bit_length(high) + 32, bit_length((x & const(0xFFFFFFFF, U64)).astype(U32)))
    return np.frexp(x.astype(F64))[1].astype(I64)


def count_bits(x: Array) -> Array:
    """Set bits, as uint32."""
    size = x.dtype.itemsize
    return _ONES.take(np.ascontiguousarray(x).view(np.uint8).reshape(-1, size)).sum(axis=1, dtype=U32)


_ONES = np.array([i.bit_count() for i in range(256)], np.uint8)
_REVERSED = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], np.uint8)


def reverse_bits(x: Array) -> Array:
    size = x.dtype.itemsize
    octets = _REVERSED.take(np.ascontiguousarray(x).view(np.uint8).reshape(-1, size))[:, ::-1]
    return np.ascontiguousarray(octets).view(x.dtype).reshape(-1)


def find_bit(dtype: np.dtype, shift_amount: bool) -> Fn:
    unsigned = np.dtype(f"u{dtype.itemsize}")
    top = dtype.itemsize * 8 - 1

    def find(x: Array) -> Array:
        bits = np.where(x < 0, ~x, x).view(unsigned) if dtype.kind == "i" else x
        at = bit_length(bits) - 1
        return np.where(at < 0, -1, top - at if shift_amount else at).astype(I32).view(U32)

    return find


def extract_bits(dtype: np.dtype) -> Fn:
    def extract(a: Array, b: Array, c: Array) -> Array:
        position, length = (b & const(0xFF, U32)).astype(I64), (c & const(0xFF, U32)).astype(I64)
        if dtype.kind == "i":
            value = a.astype(I64) >> np.minimum(position, 63)
            unused = 64 - np.minimum(length, 64)
            return np.where(length == 0, 0, (value << np.minimum(unused, 63)) >> np.minimum(unused, 63)).astype(dtype)
        value = np.where(position > 63, const(0, U64), a.astype(U64) >> np.minimum(position, 63).astype(U64))
        return (value & low_mask(length)).astype(dtype)

    return extract


def low_mask(length: Array) -> Array:
    """2**length - 1 as uint64, for length up to 64 and beyond."""
    ones = const(-1, U64)
    return np.where(length <= 0, const(0, U64), ones >> (64 - np.clip(length, 1, 64)).astype(U64))


def insert_bits(dtype: np.dtype) -> Fn:
    def insert(a: Array, b: Array, c: Array, d: Array) -> Array:
        position, length = (c & const(0xFF, U32)).astype(I64), (d & const(0xFF, U32)).astype(I64)
        shift = np.minimum(position, 63).astype(U64)
        mask = np.where(position > 63, const(0, U64), low_mask(length) << shift)
        return ((b.astype(U64) & ~mask) | ((a.astype(U64) << shift) & mask)).astype(dtype)

    return insert


def funnel(direction: str, mode: str) -> Fn:
    def shift(a: Array, b: Array, c: Array) -> Array:
        amount = (c & const(31, U32) if mode == "wrap" else np.minimum(c, const(32, U32))).astype(U64)
        both = (b.astype(U64) << const(32, U64)) | a.astype(U64)
        if direction == "l":
            return ((both << amount) >> const(32, U64)).astype(U32)
        return (both >> amount).astype(U32)

    return shift


def two_inputs(table: int) -> Fn | bool:
    """The function of (b, c) with truth table `table` (bit 2b + c); a bool where constant."""
    table_of: dict[int, Any] = {
        0: False, 15: True,
        0b0001: lambda b, c: ~(b | c), 0b0010: lambda b, c: ~b & c, 0b0011: lambda b, c: ~b,
        0b0100: lambda b, c: b & ~c, 0b0101: lambda b, c: ~c, 0b0110: lambda b, c: b ^ c,
        0b0111: lambda b, c: ~(b & c), 0b1000: lambda b, c: b & c, 0b1001: lambda b, c: ~(b ^ c),
        0b1010: lambda b, c: c, 0b1011: lambda b, c: ~b | c, 0b1100: lambda b, c: b, 0b1101: lambda b, c: b | ~c,
        0b1110: lambda b, c: b | c,
    }  # fmt: skip
    return table_of[table]


def lop3(table: int) -> Fn:
    """Any function of three bits: bit 4a + 2b + c of `table`, by Shannon expansion over a."""
    high, low = table >> 4, table & 15
    one, zero = two_inputs(high), two_inputs(low)

    def value(fn: Any, b: Array, c: Array) -> Any:
        return fn(b, c) if callable(fn) else const(-1 if fn else 0, U32)

    if high == low:
        return lambda a, b, c: value(one, b, c) | (a & const(0, U32))
    if high == low ^ 15:
        return lambda a, b, c: a ^ value(zero, b, c)
    if zero is False:
        return lambda a, b, c: a & value(one, b, c)
    if one is True:
        return lambda a, b, c: a | value(zero, b, c)
    return lambda a, b, c: (a & value(one, b, c)) | (~a & value(zero, b, c))


PRMT_MODES = {
    "f4e": lambda n: [n, n + 1, n + 2, n + 3],
    "b4e": lambda n: [n, (n - 1) & 7, (n - 2) & 7, (n - 3) & 7],
    "rc8": lambda n: [n] * 4,
    "ecl": lambda n: [n, max(n, 1), max(n, 2), 3],
    "ecr": lambda n: [0, min(n, 1), min(n, 2), n],
    "rc16": lambda n: [0, 1, 0, 1] if n in (0, 2) and n == 0 else [2, 3, 2, 3],
}


def prmt(mode: str | None) -> Fn:
    def permute(a: Array, b: Array, c: Array) -> Array:
        both = (b.astype(U64) << const(32, U64)) | a.astype(U64)
        out: Any = const(0, U32)
        if mode is None:
            selectors = [(c >> const(4 * i, U32)) & const(15, U32) for i in range(4)]
        else:
            low = c & const(3, U32)
            table = np.array([PRMT_MODES[mode](n) if mode != "rc16" else ([0, 1] * 2 if n % 2 == 0 else [2, 3] * 2)
                              for n in range(4)], U32)
            selectors = [table[:, i].take(low) for i in range(4)]
        for i, selector in enumerate(selectors):
            octet = (both >> ((selector & const(7, U32)) << const(3, U32)).astype(U64)).astype(U32) & const(0xFF, U32)
            if mode is None and (selector > 7).any():
                spread = (octet >> const(7, U32)) * const(0xFF, U32)
                octet = np.where(selector > 7, spread, octet)
            out = out | (octet << const(8 * i, U32))
        return out

    return permute


def dot_product(a_type: str, b_type: str, halves: str | None) -> Fn:
    """dp4a (four bytes by four bytes) or, with halves lo/hi, dp2a (two 16-bit by two bytes)."""

    def dot(a: Array, b: Array, c: Array) -> Array:
        right = b.view(np.dtype("i1" if b_type[0] == "s" else "u1")).reshape(-1, 4).astype(I64)
        if halves is None:
            left = a.view(np.dtype("i1" if a_type[0] == "s" else "u1")).reshape(-1, 4).astype(I64)
        else:
            left = a.view(np.dtype("i2" if a_type[0] == "s" else "u2")).reshape(-1, 2).astype(I64)
            right = right[:, :2] if halves == "lo" else right[:, 2:]
        return ((left * right).sum(-1) + c.view(I32)).astype(U32)

    return dot


def add_saturated(a: Array, b: Array, sign: int = 1) -> Array:
    return np.clip(a.astype(I64) + sign * b.astype(I64), -(1 << 31), (1 << 31) - 1).astype(I32)
