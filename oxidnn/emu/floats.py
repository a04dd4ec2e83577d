"""Floating-point arithmetic as the hardware rounds it: pure functions on arrays.

NumPy's own f32 and f64 operations are IEEE and used as they are. What is here is what NumPy lacks: fused
multiply-add, directed rounding, bf16, flush-to-zero, PTX minimum and maximum, and the canonical NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
U16, U32, U64 = np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.uint64)
I32, I64 = np.dtype(np.int32), np.dtype(np.int64)

Array = NDArray[Any]

_BITS: dict[int, np.dtype[Any]] = {2: U16, 4: U32, 8: U64}
_NAN: dict[int, Array] = {2: np.array([0x7FFF], U16), 4: np.array([0x7FFFFFFF], U32), 8: np.array([0x7FF8000000000000], U64)}
_TIE_SHIFT = np.array([35], I64)
_TIE = np.array([-(1 << 63)], I64)
_NOTHING = np.array([0], U32)
count_nonzero = np.count_nonzero  # an order of magnitude less overhead than ndarray.any
_EXPONENT: dict[int, Array] = {2: np.array([0x7C00], U16), 4: np.array([0x7F800000], U32), 8: np.array([0x7FF0000000000000], U64)}
_SIGN: dict[int, Array] = {2: np.array([0x8000], U16), 4: np.array([0x80000000], U32), 8: np.array([0x8000000000000000], U64)}


def select(mask: Array, a: Array, b: Array) -> Array:
    """np.where(mask, a, b) for equal dtypes. On many lanes of 4 or 8 bytes, bit arithmetic is faster: it has no branches."""
    size = a.dtype.itemsize
    if mask.size < 1024 or size not in (4, 8):
        return np.where(mask, a, b)
    bits = _BITS[size]
    m = mask.astype(bits)
    np.negative(m, out=m)
    m &= a.view(bits) ^ b.view(bits)
    m ^= b.view(bits)
    return m.view(a.dtype)


def canonical(x: Array) -> Array:
    """`x` with every NaN replaced by the hardware's (0x7FFFFFFF in f32)."""
    nan = x != x
    if count_nonzero(nan):
        bits = x.view(_BITS[x.dtype.itemsize]).copy()
        bits[nan] = _NAN[x.dtype.itemsize]
        return bits.view(x.dtype)
    return x


def flush(x: Array) -> Array:
    """Subnormals become zero of the same sign (.ftz)."""
    size = x.dtype.itemsize
    bits = x.view(_BITS[size])
    small = (bits & _EXPONENT[size]) == 0
    if not count_nonzero(small):
        return x
    return np.where(small, bits & _SIGN[size], bits).view(x.dtype)


def saturate(x: Array) -> Array:
    """Clamp to [0, 1]; NaN becomes +0 (.sat)."""
    zero, one = np.zeros(1, x.dtype), np.ones(1, x.dtype)
    return np.fmin(np.fmax(x, zero), one) + zero


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """s = RN(a + b) and the exact error e, so that a + b = s + e."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def odd_sum(a: Array, b: Array) -> Array:
    """a + b in f64 rounded to odd: a later rounding to at most 51 bits is then the correct rounding of the sum."""
    s, e = two_sum(a, b)
    fix = (e != 0) & ((s.view(I64) & 1) == 0) & np.isfinite(s)
    if not fix.any():
        return s
    return np.where(fix, np.nextafter(s, np.where(e > 0, np.inf, -np.inf)), s)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in f32, rounded once.

    The f64 product is exact and the f64 sum nearly so; rounding it again to f32 is wrong only where the sum lies
    exactly half way between two f32 values (its low 29 bits are 100...0), or among the subnormals. Those few lanes
    are redone with the sum rounded to odd.
    """
    p = a.astype(F64) * b.astype(F64)
    s = p + c.astype(F64)
    r = s.astype(F32)
    redo = (s.view(I64) << _TIE_SHIFT) == _TIE
    low = (r.view(U32) & _EXPONENT[4]) == _NOTHING  # zeros and subnormals
    if count_nonzero(low):
        low &= s != 0
    if count_nonzero(redo) or count_nonzero(low):
        at = np.flatnonzero(redo | low)
        c64 = c.astype(F64)
        r[at] = odd_sum(p.take(at) if p.size > 1 else p, c64.take(at) if c64.size > 1 else c64).astype(F32)
    return r


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    p = a * b
    split = float((1 << 27) + 1)
    ta, tb = split * a, split * b
    ah, bh = ta - (ta - a), tb - (tb - b)
    al, bl = a - ah, b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def fma64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in f64, rounded once (Boldo and Melquiond: the low parts are added with rounding to odd)."""
    a, b, c = np.broadcast_arrays(a, b, c)
    result = a * b + c
    plain = np.isfinite(result)
    low, high = 2.0**-900, 2.0**900
    magnitude = np.maximum(np.abs(a), np.abs(b))
    easy = plain & (magnitude < 2.0**480) & (np.abs(c) < high)
    easy &= ((np.abs(a * b) > low) | (a == 0) | (b == 0)) & ((np.abs(result) > 2.0**-960) | (a == 0) | (b == 0))
    uh, ul = _two_product(np.where(easy, a, 0.0), np.where(easy, b, 0.0))
    th, tl = two_sum(np.where(easy, c, 0.0), ul)
    vh, vl = two_sum(uh, th)
    result = np.where(easy & (a != 0) & (b != 0), vh + odd_sum(tl, vl), result)
    hard = np.flatnonzero(~easy & plain)
    if len(hard):
        from fractions import Fraction

        result = result.copy()
        for i in hard:
            exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
            if exact != 0:
                try:
                    result[i] = exact.numerator / exact.denominator
                except OverflowError:
                    result[i] = np.inf if exact > 0 else -np.inf
    return result


def round_f64(x: Array, dtype: np.dtype, mode: str) -> Array:
    """f64 (rounded to odd where inexact) to f32 or f16 in rounding mode rn, rz, rm or rp."""
    r = x.astype(dtype)
    if mode == "rn":
        return r
    back = r.astype(F64)
    bits = r.view(_BITS[dtype.itemsize])
    negative = np.signbit(r)
    if mode == "rz":
        step = -(np.abs(back) > np.abs(x)).astype(np.int64)
    elif mode == "rm":
        step = np.where(back > x, np.where(negative, 1, -1), 0)
    else:
        step = np.where(back < x, np.where(negative, -1, 1), 0)
    return (bits.astype(np.int64) + step).astype(bits.dtype).view(dtype)


def _split64(x: Array) -> Array:
    return x.astype(F64)


def directed(operation: str, mode: str) -> Callable[..., Array]:
    """f32 add, sub, mul, fma, div, sqrt or rcp in rounding mode rz, rm or rp."""

    def exact_zero(sum_: Array, a: Array, b: Array) -> Array:
        # x + (-x) is +0, but -0 when rounding down
        if mode == "rm":
            return np.where((sum_ == 0) & (a != 0), -0.0, np.where((sum_ == 0) & (np.signbit(a) | np.signbit(b)), -0.0, sum_))
        return sum_

    def add(a: Array, b: Array) -> Array:
        x, y = _split64(a), _split64(b)
        return round_f64(exact_zero(odd_sum(x, y), x, y), F32, mode)

    def fma(a: Array, b: Array, c: Array) -> Array:
        x, y = _split64(a) * _split64(b), _split64(c)
        return round_f64(exact_zero(odd_sum(x, y), x, y), F32, mode)

    def mul(a: Array, b: Array) -> Array:
        return round_f64(_split64(a) * _split64(b), F32, mode)

    def div(a: Array, b: Array) -> Array:
        x, y = _split64(a), _split64(b)
        q = x / y
        # the f64 quotient may have rounded onto an f32 value: q is exact iff q * y == x, judged by the remainder
        product, error = _two_product(q, y)
        rest = (x - product) - error
        fix = np.isfinite(q) & np.isfinite(y) & (rest != 0) & ((q.view(I64) & 1) == 0) & (y != 0)
        toward = np.where((rest > 0) == (y > 0), np.inf, -np.inf)
        return canonical(round_f64(np.where(fix, np.nextafter(q, toward), q), F32, mode))

    def sqrt(a: Array) -> Array:
        x = _split64(a)
        q = np.sqrt(x)
        product, error = _two_product(q, q)
        rest = (x - product) - error
        fix = np.isfinite(q) & (rest != 0) & ((q.view(I64) & 1) == 0)
        return canonical(round_f64(np.where(fix, np.nextafter(q, np.where(rest > 0, np.inf, 0.0)), q), F32, mode))

    table: dict[str, Callable[..., Array]] = {
        "add": add,
        "sub": lambda a, b: add(a, -b),
        "mul": mul,
        "fma": fma,
        "div": div,
        "rcp": lambda a: div(np.ones(1, F32), a),
        "sqrt": sqrt,
    }
    return table[operation]


def ptx_max(a: Array, b: Array) -> Array:
    """Maximum that prefers numbers over NaN and +0 over -0."""
    r: Array = np.fmax(a, b)
    same = a == b
    if count_nonzero(same):
        bits = _BITS[r.dtype.itemsize]
        joined: Array = np.where(same, a.view(bits) & b.view(bits), r.view(bits))
        r = joined.view(r.dtype)
    return canonical(r)


def ptx_min(a: Array, b: Array) -> Array:
    """Minimum that prefers numbers over NaN and -0 over +0."""
    r: Array = np.fmin(a, b)
    same = a == b
    if count_nonzero(same):
        bits = _BITS[r.dtype.itemsize]
        joined: Array = np.where(same, a.view(bits) | b.view(bits), r.view(bits))
        r = joined.view(r.dtype)
    return canonical(r)


def nan_max(a: Array, b: Array) -> Array:
    """Maximum that propagates NaN (max.NaN)."""
    return canonical(np.where((a != a) | (b != b), np.array(np.nan, a.dtype), ptx_max(a, b)))


def nan_min(a: Array, b: Array) -> Array:
    """Minimum that propagates NaN (min.NaN)."""
    return canonical(np.where((a != a) | (b != b), np.array(np.nan, a.dtype), ptx_min(a, b)))


def directed64(operation: str, mode: str) -> Callable[..., Array]:
    """f64 add, sub, mul, fma, div, sqrt or rcp rounded toward zero, down or up: by exact rationals, lane by lane."""
    from fractions import Fraction

    def judge(nearest: float, sign: int) -> float:
        """`nearest` moved by the sign of (exact - nearest)."""
        if sign == 0:
            return nearest
        if mode == "rm" or (mode == "rz" and nearest > 0):
            return float(np.nextafter(nearest, -np.inf)) if sign < 0 else nearest
        return float(np.nextafter(nearest, np.inf)) if sign > 0 else nearest

    def lane(values: tuple[float, ...], nearest: float) -> float:
        if not all(np.isfinite(v) for v in values) or np.isnan(nearest):
            return nearest
        x = [Fraction(v) for v in values]
        if operation == "sqrt":
            rest = x[0] - Fraction(nearest) ** 2
            return judge(nearest, (rest > 0) - (rest < 0))
        if operation in ("div", "rcp"):
            numerator, denominator = (Fraction(1), x[0]) if operation == "rcp" else (x[0], x[1])
            if denominator == 0:
                return nearest
            value = numerator / denominator
        else:
            value = {"add": lambda: x[0] + x[1], "sub": lambda: x[0] - x[1], "mul": lambda: x[0] * x[1],
                     "fma": lambda: x[0] * x[1] + x[2]}[operation]()  # fmt: skip
        if value == 0:
            if operation in ("add", "sub", "fma") and mode == "rm" and not all(v == 0 for v in x):
                return -0.0
            return nearest
        if np.isinf(nearest):
            return judge(nearest, -1 if value > 0 else 1)
        return judge(nearest, (value > Fraction(nearest)) - (value < Fraction(nearest)))

    near: dict[str, Callable[..., Array]] = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fma64, "div": np.divide, "sqrt": np.sqrt,
        "rcp": lambda a: 1.0 / a,
    }  # fmt: skip

    def run(*xs: Array) -> Array:
        full = np.broadcast_arrays(*xs)
        nearest = near[operation](*full)
        return np.array([lane(tuple(float(x[i]) for x in full), float(nearest[i])) for i in range(len(nearest))], F64)

    return run


# -- bf16, held as uint16


def bf16_to_f32(x: Array) -> Array:
    return (x.astype(U32) << np.array([16], U32)).view(F32)


def f32_to_bf16(x: Array, mode: str = "rn") -> Array:
    """Round to nearest even (rn), toward zero (rz), down (rm) or up (rp); NaN becomes 0x7FFF."""
    bits = x.view(U32)
    sixteen = np.array([16], U32)
    if mode == "rn":
        rounded = (bits + np.array([0x7FFF], U32) + ((bits >> sixteen) & np.array([1], U32))) >> sixteen
    else:
        rounded = bits >> sixteen
        if mode != "rz":  # away from zero by one where that is the direction
            away = ((bits & np.array([0xFFFF], U32)) != 0) & (np.signbit(x) == (mode == "rm"))
            rounded = rounded + (away & np.isfinite(x)).astype(U32)
    nan = x != x
    if count_nonzero(nan):
        rounded = np.where(nan, np.array([0x7FFF], U32), rounded)
    return rounded.astype(U16)


def f64_to_odd_f32(x: Array) -> Array:
    """f64 to f32 rounded to odd, so that rounding it further to bf16 or f16 is correct."""
    r = x.astype(F32)
    back = r.astype(F64)
    bits = r.view(U32) - (np.abs(back) > np.abs(x)).astype(U32)
    inexact = (back != x) & (x == x)
    return (bits | inexact.astype(U32)).view(F32)


def fma_bf16(a: Array, b: Array, c: Array) -> Array:
    """a * b + c on bf16 codes, rounded once."""
    p = bf16_to_f32(a).astype(F64) * bf16_to_f32(b).astype(F64)
    return f32_to_bf16(f64_to_odd_f32(odd_sum(p, bf16_to_f32(c).astype(F64))))


def fma_f16(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in f16, rounded once."""
    return odd_sum(a.astype(F64) * b.astype(F64), c.astype(F64)).astype(F16)
