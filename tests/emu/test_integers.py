"""Integer instructions against Python's unbounded integers."""

# ruff: noqa: E501 (lines of PTX)

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.emu.running import apply, integers, same

WIDTH = {"16": 2, "32": 4, "64": 8}


def dtype_of(type_: str) -> np.dtype:
    return np.dtype(f"{'i' if type_[0] == 's' else 'u'}{int(type_[1:]) // 8}")


def wrap(value: int, type_: str) -> int:
    bits = int(type_[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if type_[0] == "s" and value >> (bits - 1) else value


def quotient(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": quotient,
    "rem": lambda a, b: a - b * quotient(a, b),
}


@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str, type_: str) -> None:
    rng = np.random.default_rng(len(name) * 31 + int(type_[1:]))
    a, b = (integers(rng, dtype_of(type_)) for _ in range(2))
    if name in ("div", "rem"):
        b[b == 0] = 3
    got = apply(f"{name}.{type_} %d, %a0, %a1;", [a, b], dtype_of(type_))
    same(got, [wrap(BINARY[name](int(x), int(y)), type_) for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_mul_hi_wide_mad(type_: str) -> None:
    rng = np.random.default_rng(int(type_[1:]))
    bits, d = int(type_[1:]), dtype_of(type_)
    a, b, c = (integers(rng, d) for _ in range(3))
    pairs = [(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]
    same(apply(f"mul.hi.{type_} %d, %a0, %a1;", [a, b], d), [wrap((x * y) >> bits, type_) for x, y, _ in pairs])
    same(apply(f"mad.lo.{type_} %d, %a0, %a1, %a2;", [a, b, c], d), [wrap(x * y + z, type_) for x, y, z in pairs])
    same(apply(f"mad.hi.{type_} %d, %a0, %a1, %a2;", [a, b, c], d),
         [wrap(((x * y) >> bits) + z, type_) for x, y, z in pairs])  # fmt: skip
    if bits < 64:
        wide = f"{type_[0]}{2 * bits}"
        w = dtype_of(wide)
        z = integers(rng, w)
        same(apply(f"mul.wide.{type_} %d, %a0, %a1;", [a, b], w), [wrap(x * y, wide) for x, y, _ in pairs])
        same(apply(f"mad.wide.{type_} %d, %a0, %a1, %a2;", [a, b, z], w),
             [wrap(x * y + int(k), wide) for (x, y, _), k in zip(pairs, z, strict=True)])  # fmt: skip


@pytest.mark.parametrize("type_", ["b16", "b32", "b64"])
def test_logic_and_shifts(type_: str) -> None:
    rng = np.random.default_rng(7)
    bits = int(type_[1:])
    d = dtype_of(type_)
    a, b = integers(rng, d), integers(rng, d)
    full = (1 << bits) - 1
    for name, fn in {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}.items():
        same(apply(f"{name}.{type_} %d, %a0, %a1;", [a, b], d), [fn(int(x), int(y)) for x, y in zip(a, b, strict=True)])
    same(apply(f"not.{type_} %d, %a0;", [a], d), [int(x) ^ full for x in a])
    same(apply(f"cnot.{type_} %d, %a0;", [a], d), [int(x == 0) for x in a])
    n = integers(rng, np.uint32)
    n[::3] %= bits + 2
    same(apply(f"shl.{type_} %d, %a0, %a1;", [a, n], d),
         [int(x) << min(int(k), bits) & full for x, k in zip(a, n, strict=True)])  # fmt: skip
    same(apply(f"shr.{type_} %d, %a0, %a1;", [a, n], d), [int(x) >> min(int(k), bits) for x, k in zip(a, n, strict=True)])
    s = a.view(dtype_of("s" + type_[1:]))
    same(apply(f"shr.s{bits} %d, %a0, %a1;", [s, n], s.dtype), [int(x) >> min(int(k), bits) for x, k in zip(s, n, strict=True)])
    for k in (0, 1, bits - 1, bits, bits + 9):
        same(apply(f"shl.{type_} %d, %a0, {k};", [a], d), [int(x) << k & full for x in a])
        same(apply(f"shr.s{bits} %d, %a0, {k};", [s], s.dtype), [int(x) >> k for x in s])


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_and_fields(bits: int) -> None:
    rng = np.random.default_rng(bits)
    u, s = np.dtype(f"u{bits // 8}"), np.dtype(f"i{bits // 8}")
    a = integers(rng, u)
    top = bits - 1
    same(apply(f"popc.b{bits} %d, %a0;", [a], np.uint32), [int(x).bit_count() for x in a])
    same(apply(f"clz.b{bits} %d, %a0;", [a], np.uint32), [bits - int(x).bit_length() for x in a])
    same(apply(f"brev.b{bits} %d, %a0;", [a], u), [int(f"{int(x):0{bits}b}"[::-1], 2) for x in a])
    same(apply(f"bfind.u{bits} %d, %a0;", [a], np.uint32), [(int(x).bit_length() - 1) & 0xFFFFFFFF for x in a])
    signed = [int(x) if x >= 0 else ~int(x) for x in a.view(s)]
    same(apply(f"bfind.s{bits} %d, %a0;", [a.view(s)], np.uint32), [(x.bit_length() - 1) & 0xFFFFFFFF for x in signed])
    same(apply(f"bfind.shiftamt.u{bits} %d, %a0;", [a], np.uint32),
         [top - (int(x).bit_length() - 1) if x else 0xFFFFFFFF for x in a])  # fmt: skip
    position, length = rng.integers(0, bits + 8, len(a)).astype("u4"), rng.integers(0, bits + 8, len(a)).astype("u4")

    def field(x: int, p: int, n: int, sign: bool) -> int:
        last = x >> min(p + n - 1, top) & 1 if sign and n else 0
        return sum((x >> (p + i) & 1 if i < n and p + i <= top else last) << i for i in range(bits))

    for sign in (False, True):
        view = a.view(s) if sign else a
        got = apply(f"bfe.{'s' if sign else 'u'}{bits} %d, %a0, %a1, %a2;", [view, position, length], view.dtype)
        same(got.view(u), [field(int(x), int(p), int(n), sign) for x, p, n in zip(a, position, length, strict=True)])
    b = integers(rng, u)

    def inserted(x: int, y: int, p: int, n: int) -> int:
        mask = ((1 << n) - 1) << p & ((1 << bits) - 1)
        return y & ~mask | x << p & mask

    same(apply(f"bfi.b{bits} %d, %a0, %a1, %a2, %a3;", [a, b, position, length], u),
         [inserted(int(x), int(y), int(p), int(n)) for x, y, p, n in zip(a, b, position, length, strict=True)])  # fmt: skip


def test_lop3_has_every_table() -> None:
    rng = np.random.default_rng(3)
    a, b, c = (rng.integers(0, 2**32, 64, np.uint32) for _ in range(3))
    for table in range(256):
        expected = np.zeros(64, np.uint32)
        for bit in range(8):
            if table >> bit & 1:
                expected |= (a if bit & 4 else ~a) & (b if bit & 2 else ~b) & (c if bit & 1 else ~c)
        same(apply(f"lop3.b32 %d, %a0, %a1, %a2, {table};", [a, b, c], np.uint32), expected)


def test_prmt() -> None:
    rng = np.random.default_rng(4)
    a, b, c = (rng.integers(0, 2**32, 300, np.uint32) for _ in range(3))

    def generic(x: int, y: int, s: int) -> int:
        octets = [(y << 32 | x) >> 8 * i & 255 for i in range(8)]
        out = 0
        for i in range(4):
            n = s >> 4 * i & 15
            v = octets[n & 7]
            out |= (255 * (v >> 7) if n & 8 else v) << 8 * i
        return out

    same(apply("prmt.b32 %d, %a0, %a1, %a2;", [a, b, c], np.uint32),
         [generic(int(x), int(y), int(s)) for x, y, s in zip(a, b, c, strict=True)])  # fmt: skip
    tables = {
        "f4e": [0x3210, 0x4321, 0x5432, 0x6543], "b4e": [0x5670, 0x6701, 0x7012, 0x0123],
        "rc8": [0x0000, 0x1111, 0x2222, 0x3333], "ecl": [0x3210, 0x3211, 0x3222, 0x3333],
        "ecr": [0x0000, 0x1110, 0x2210, 0x3210], "rc16": [0x1010, 0x3232, 0x1010, 0x3232],
    }  # fmt: skip
    for mode, table in tables.items():
        same(apply(f"prmt.b32.{mode} %d, %a0, %a1, %a2;", [a, b, c], np.uint32),
             [generic(int(x), int(y), table[int(s) & 3]) for x, y, s in zip(a, b, c, strict=True)])  # fmt: skip


def test_funnel_shifts() -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.integers(0, 2**32, 300, np.uint32) for _ in range(2))
    c = rng.integers(0, 70, 300).astype(np.uint32)
    for mode in ("clamp", "wrap"):
        amounts = [min(int(k), 32) if mode == "clamp" else int(k) & 31 for k in c]
        both = [(int(y) << 32) | int(x) for x, y in zip(a, b, strict=True)]
        same(apply(f"shf.l.{mode}.b32 %d, %a0, %a1, %a2;", [a, b, c], np.uint32),
             [(v << k >> 32) & 0xFFFFFFFF for v, k in zip(both, amounts, strict=True)])  # fmt: skip
        same(apply(f"shf.r.{mode}.b32 %d, %a0, %a1, %a2;", [a, b, c], np.uint32),
             [(v >> k) & 0xFFFFFFFF for v, k in zip(both, amounts, strict=True)])  # fmt: skip


def test_dot_products() -> None:
    rng = np.random.default_rng(6)
    a, b, c = (rng.integers(0, 2**32, 300, np.uint32) for _ in range(3))
    for ta in "us":
        for tb in "us":
            left = a.view(f"{'i' if ta == 's' else 'u'}1").reshape(-1, 4).astype(np.int64)
            right = b.view(f"{'i' if tb == 's' else 'u'}1").reshape(-1, 4).astype(np.int64)
            expected = ((left * right).sum(1) + c.astype(np.int64)).astype(np.uint32)
            same(apply(f"dp4a.{ta}32.{tb}32 %d, %a0, %a1, %a2;", [a, b, c], np.uint32), expected)
            half = a.view(f"{'i' if ta == 's' else 'u'}2").reshape(-1, 2).astype(np.int64)
            for mode, part in (("lo", right[:, :2]), ("hi", right[:, 2:])):
                expected = ((half * part).sum(1) + c.astype(np.int64)).astype(np.uint32)
                same(apply(f"dp2a.{mode}.{ta}32.{tb}32 %d, %a0, %a1, %a2;", [a, b, c], np.uint32), expected)


def test_carry_chains_add_and_subtract_128_bits() -> None:
    rng = np.random.default_rng(8)
    a, b, c, d = (integers(rng, np.uint64) for _ in range(4))
    for sign, name in ((1, "add"), (-1, "sub")):
        wide = [((int(h) << 64 | int(x)) + sign * (int(k) << 64 | int(y))) % 2**128 for x, h, y, k in zip(a, b, c, d, strict=True)]
        low = apply(f"{name}.cc.u64 %d, %a0, %a2; {name}c.u64 %rd0, %a1, %a3;", [a, b, c, d], np.uint64)
        high = apply(f"{name}.cc.u64 %rd0, %a0, %a2; {name}c.u64 %d, %a1, %a3;", [a, b, c, d], np.uint64)
        same(low, [w & 2**64 - 1 for w in wide])
        same(high, [w >> 64 for w in wide])


def test_carry_chain_of_products() -> None:
    rng = np.random.default_rng(9)
    a, b, c = (integers(rng, np.uint32) for _ in range(3))
    text = "mad.lo.cc.u32 %r0, %a0, %a1, %a2; madc.hi.u32 %r1, %a0, %a1, 0; mov.b64 %d, {%r0, %r1};"
    same(apply(text, [a, b, c], np.uint64), [int(x) * int(y) + int(z) for x, y, z in zip(a, b, c, strict=True)])


def test_saturated_and_absolute() -> None:
    rng = np.random.default_rng(10)
    a, b = integers(rng, np.int32), integers(rng, np.int32)
    clamp = lambda v: max(-(2**31), min(2**31 - 1, v))  # noqa: E731
    same(apply("add.sat.s32 %d, %a0, %a1;", [a, b], np.int32), [clamp(int(x) + int(y)) for x, y in zip(a, b, strict=True)])
    same(apply("sub.sat.s32 %d, %a0, %a1;", [a, b], np.int32), [clamp(int(x) - int(y)) for x, y in zip(a, b, strict=True)])
    same(apply("abs.s32 %d, %a0;", [a], np.int32), [wrap(abs(int(x)), "s32") for x in a])
    same(apply("neg.s32 %d, %a0;", [a], np.int32), [wrap(-int(x), "s32") for x in a])
    same(apply("sad.s32 %d, %a0, %a1, 5;", [a, b], np.int32), [wrap(abs(int(x) - int(y)) + 5, "s32") for x, y in zip(a, b, strict=True)])


def test_24_bit_products() -> None:
    rng = np.random.default_rng(12)
    a, b = integers(rng, np.uint32), integers(rng, np.uint32)

    def low(x: int, sign: bool) -> int:
        x &= 0xFFFFFF
        return x - (1 << 24) if sign and x >> 23 else x

    for sign in (False, True):
        d = np.dtype(np.int32 if sign else np.uint32)
        t = "s32" if sign else "u32"
        products = [low(int(x), sign) * low(int(y), sign) for x, y in zip(a, b, strict=True)]
        same(apply(f"mul24.lo.{t} %d, %a0, %a1;", [a.view(d), b.view(d)], d), [wrap(p, t) for p in products])
        same(apply(f"mul24.hi.{t} %d, %a0, %a1;", [a.view(d), b.view(d)], d), [wrap(p >> 16, t) for p in products])


def test_comparisons_signed_and_unsigned() -> None:
    rng = np.random.default_rng(11)
    a, b = integers(rng, np.uint32), integers(rng, np.uint32)
    b[::4] = a[::4]
    names = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    for name, symbol in names.items():
        for type_, view in (("u32", np.uint32), ("s32", np.int32)):
            expected = eval(f"x {symbol} y", {"x": a.view(view), "y": b.view(view)})
            text = f"setp.{name}.{type_} %p0, %a0, %a1; selp.b32 %d, 1, 0, %p0;"
            same(apply(text, [a, b], np.uint32), expected)
    text = "setp.lt.and.u32 %p0|%p1, %a0, %a1, %p2; selp.b32 %d, 1, 0, %p0; selp.b32 %r0, 2, 0, %p1; or.b32 %d, %d, %r0;"
    got = apply("setp.ne.u32 %p2, %a1, 2; " + text, [a, b], np.uint32)
    same(got, np.where(b != 2, np.where(a < b, 1, 2), 0))
    same(apply("setp.gt.u32 %p0, %a0, 9; @!%p0 mov.b32 %d, 1; @%p0 mov.b32 %d, 2;", [a], np.uint32), np.where(a > 9, 2, 1))
    same(apply("set.lt.u32.u32 %d, %a0, %a1;", [a, b], np.uint32), np.where(a < b, 0xFFFFFFFF, 0))
    same(apply("slct.u32.s32 %d, %a0, %a1, %a2;", [a, b, a.view(np.int32)], np.uint32), np.where(a.view(np.int32) >= 0, a, b))


def test_moves_pack_and_unpack() -> None:
    rng = np.random.default_rng(13)
    a = integers(rng, np.uint32)
    same(apply("mov.b32 {%h0, %h1}, %a0; mov.b32 %d, {%h1, %h0};", [a], np.uint32), (a << 16) | (a >> 16))
    same(apply("mov.b32 %r0, %a0; mov.b64 %d, {%r0, %a0};", [a], np.uint64), a.astype(np.uint64) << 32 | a)
    same(apply("cvt.u64.u32 %rd0, %a0; shl.b64 %rd0, %rd0, 20; mov.b64 {%r0, %d}, %rd0;", [a], np.uint32), a >> 12)
    same(apply("mov.b32 %d, %a0; add.u32 %a0, %a0, 1;", [a], np.uint32), a)
    same(apply("mov.b32 %d, %a0; setp.gt.u32 %p0, %a0, 100; @%p0 mov.b32 %a0, 7; @%p0 add.u32 %d, %d, 1;", [a], np.uint32),
         np.where(a > 100, a + np.uint32(1), a))  # fmt: skip


def test_less_common_forms() -> None:
    rng = np.random.default_rng(14)
    a, b, c = (integers(rng, np.uint32) for _ in range(3))
    s = [x.view(np.int32) for x in (a, b)]
    same(apply("max.relu.s32 %d, %a0, %a1;", s, np.int32), np.maximum(np.maximum(*s), 0))
    same(apply("min.relu.s32 %d, %a0, %a1;", s, np.int32), np.maximum(np.minimum(*s), 0))
    text = "setp.lt.u32 %p1, %a0, %a1; lop3.and.b32 %r0|%p0, %a0, %a1, %a2, 0x80, %p1; selp.b32 %d, %r0, 7, %p0;"
    joined = a & b & c
    same(apply(text, [a, b, c], np.uint32), np.where((joined != 0) & (a < b), joined, 7))

    def nth(mask: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        places = [i for i in (range(base, 32) if offset > 0 else range(base, -1, -1)) if mask >> i & 1]
        return places[abs(offset) - 1] if len(places) >= abs(offset) else 0xFFFFFFFF

    base, offset = rng.integers(0, 32, len(a)).astype(np.uint32), rng.integers(-5, 6, len(a)).astype(np.int32)
    same(apply("fns.b32 %d, %a0, %a1, %a2;", [a, base, offset], np.uint32),
         [nth(int(m), int(x), int(n)) for m, x, n in zip(a, base, offset, strict=True)])  # fmt: skip
    same(apply("bmsk.clamp.b32 %d, %a0, 5;", [base], np.uint32), [(31 << int(x)) & 0xFFFFFFFF for x in base])
    same(apply("szext.clamp.s32 %d, %a0, 9;", [s[0]], np.int32), [((int(x) & 511) ^ 256) - 256 for x in a])
    for type_, low, high in (("s4", -8, 7), ("u2", 0, 3)):
        bits = int(type_[1:])
        expected = [(max(low, min(high, int(x))) & (1 << bits) - 1) << bits | max(low, min(high, int(y))) & (1 << bits) - 1 for x, y in zip(*s, strict=True)]
        same(apply(f"cvt.pack.sat.{type_}.s32.b32 %d, %a0, %a1, 0;", s, np.uint32), expected)
    same(apply("{ .reg .b128 %q; mov.b64 %rd0, {%a0, %a1}; mov.b128 %q, {%rd0, %rd1}; mov.b128 {%rd2, %rd3}, %q; mov.b64 {%r0, %d}, %rd2; }",
               [a, b], np.uint32, prologue="mov.b64 %rd1, 5;"), b)  # fmt: skip
    halves = [rng.integers(0, 2**16, 400).astype(np.uint16) for _ in range(2)]
    f = [h.view(np.float16) for h in halves]
    with np.errstate(invalid="ignore"):
        less = f[0] < f[1]
    words = [h.view(np.uint32) for h in halves]
    same(apply("set.lt.f16x2.f16x2 %d, %a0, %a1;", words, np.uint32).view(np.uint16), np.where(less, 0x3C00, 0))
    same(apply("setp.lt.f16x2 %p0|%p1, %a0, %a1; selp.b32 %r0, 1, 0, %p0; selp.b32 %d, 2, 0, %p1; or.b32 %d, %d, %r0;", words, np.uint32),
         less[0::2] + 2 * less[1::2])  # fmt: skip
