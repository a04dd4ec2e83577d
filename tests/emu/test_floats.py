"""Floating-point instructions: exact rationals, IEEE references, and results recorded on an H100."""

# ruff: noqa: E501 (lines of PTX)

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from oxidnn.errors import PtxError
from tests.emu.running import apply, floats32, integers, same

VECTORS = Path(__file__).parent / "vectors"
BF16 = ml_dtypes.bfloat16


def exact(x: float, y: float, z: float, precision: int, least: int, mode: str) -> float:
    """x * y + z rounded once to `precision` bits with subnormal unit 2**least."""
    if not all(math.isfinite(v) for v in (x, y, z)):
        with np.errstate(all="ignore"):
            return float(np.float64(x) * np.float64(y) + np.float64(z))
    value = Fraction(x) * Fraction(y) + Fraction(z)
    if value == 0:
        with np.errstate(all="ignore"):
            plain = np.float64(x) * np.float64(y) + np.float64(z)
        if mode == "rm" and not (x * y == 0 and z == 0):
            return -0.0
        if mode == "rm" and (math.copysign(1, np.float64(x) * np.float64(y)) < 0 or math.copysign(1, z) < 0):
            return -0.0
        return float(plain)
    magnitude = abs(value)
    e = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** e > magnitude:
        e -= 1
    unit = Fraction(2) ** max(e - precision + 1, least)
    scaled = value / unit
    floor = scaled.numerator // scaled.denominator
    rest = scaled - floor
    if mode == "rn":
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor % 2 == 1)
    else:
        up = rest > 0 and (mode == "rp" or (mode == "rz" and value < 0))
    result = (floor + up) * unit
    if result == 0:
        return math.copysign(0.0, value)
    return float(result)


def limit(value: float, largest: float, mode: str) -> float:
    if math.isnan(value) or abs(value) <= largest or math.isinf(value):
        return value
    stays = mode == "rz" or (mode == "rm" and value > 0) or (mode == "rp" and value < 0)
    return math.copysign(largest if stays else math.inf, value)


def near_ties(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a * b + c just beside the middle between two f32 values."""
    a = (1 + rng.integers(0, 2**12, n) / 2**12).astype(np.float32)
    b = (1 + rng.integers(0, 2**12, n) / 2**12).astype(np.float32)
    product = a.astype(np.float64) * b
    c = np.where(rng.random(n) < 0.5, np.ldexp(1.0, rng.integers(-70, -24, n)), -np.ldexp(1.0, rng.integers(-70, -24, n)))
    scale = np.ldexp(1.0, rng.integers(-130, 60, n) // 2)
    tie = (product.astype(np.float32).astype(np.float64) != product) | True
    assert tie.all()
    return (a * scale).astype(np.float32), (b * scale).astype(np.float32), (c * scale * scale).astype(np.float32)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fma_f32_is_rounded_once(mode: str) -> None:
    rng = np.random.default_rng(1)
    sets = [near_ties(rng, 1500), tuple(floats32(rng, 1500) for _ in range(3))]
    a, b, c = (np.concatenate(x) for x in zip(*sets, strict=True))
    # a product whose last bit is exactly half a unit of the sum, with c far below: the tie that double rounding gets wrong
    a = np.concatenate((a, np.float32([1 + 2**-12, 1 + 2**-12, 2**-75 * 1.5, 2**-100])))
    b = np.concatenate((b, np.float32([1 + 2**-12, 1 + 2**-12, 2**-75, 2**-49])))
    c = np.concatenate((c, np.float32([2**-60, -(2**-60), 2**-149, 2**-140])))
    got = apply(f"fma.{mode}.f32 %d, %a0, %a1, %a2;", [a, b, c], np.float32)
    expected = [limit(exact(float(x), float(y), float(z), 24, -149, mode), float(np.finfo(np.float32).max), mode)
                for x, y, z in zip(a, b, c, strict=True)]  # fmt: skip
    with np.errstate(over="ignore"):
        same(got, np.array(expected, np.float64).astype(np.float32))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_add_mul_f32_modes(mode: str) -> None:
    rng = np.random.default_rng(2)
    a, b = floats32(rng, 1500), floats32(rng, 1500)
    b[:300] = (a[:300] * np.float32(1e-7)).astype(np.float32)
    largest = float(np.finfo(np.float32).max)
    with np.errstate(all="ignore"):
        for text, y, z in ((f"add.{mode}.f32 %d, %a0, %a1;", None, b), (f"mul.{mode}.f32 %d, %a0, %a1;", b, None)):
            z = np.where(a * y == 0, a * y, np.float32(-0.0)) if z is None else z  # (+0) + (-0) is no product
            expected = [
                limit(exact(float(p), 1.0 if y is None else float(y[i]), float(z[i]), 24, -149, mode),
                      largest, mode) for i, p in enumerate(a)]  # fmt: skip
            same(apply(text, [a, b], np.float32), np.array(expected).astype(np.float32))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_div_sqrt_rcp_f32_modes(mode: str) -> None:
    rng = np.random.default_rng(3)
    a, b = floats32(rng, 800), floats32(rng, 800)
    a[:200] = rng.integers(-999, 999, 200)
    b[:200] = 2.0 ** rng.integers(-20, 20, 200)

    def ordered(x: np.float32) -> np.float32:
        return np.nextafter(x, np.float32(np.inf))

    def check(got: np.ndarray, value: list[tuple[Fraction, int] | None]) -> None:
        for g, v in zip(got, value, strict=True):
            if v is None:
                continue
            q, power = v
            below = Fraction(float(g)) ** power
            if g == 0 or not np.isfinite(g):
                continue
            up, down = Fraction(float(np.nextafter(g, np.float32(np.inf)))), Fraction(float(np.nextafter(g, np.float32(-np.inf))))
            sign = 1 if g > 0 or power == 1 else -1
            if mode == "rn":
                middle_up, middle_down = (Fraction(float(g)) + up) / 2, (Fraction(float(g)) + down) / 2
                assert (middle_down**power - q) * sign <= 0 <= (middle_up**power - q) * sign
            elif mode == "rm" or (mode == "rz" and g > 0):
                assert below <= q < up**power
            else:
                assert down**power < q <= below

    finite = np.isfinite(a) & np.isfinite(b) & (a != 0) & (b != 0)
    with np.errstate(all="ignore"):
        inside = finite & (np.abs(a.astype(float) / b) < 1e38) & (np.abs(a.astype(float) / b) > 1e-37)
    check(apply(f"div.{mode}.f32 %d, %a0, %a1;", [a, b], np.float32),
          [(Fraction(float(x)) / Fraction(float(y)), 1) if k else None for x, y, k in zip(a, b, inside, strict=True)])  # fmt: skip
    plain = np.abs(np.where(finite, a, 1)).astype(np.float32)
    check(apply(f"sqrt.{mode}.f32 %d, %a0;", [plain], np.float32), [(Fraction(float(x)), 2) for x in plain])
    some = np.where(finite & (np.abs(a) > 1e-37) & (np.abs(a) < 1e37), a, 3).astype(np.float32)
    check(apply(f"rcp.{mode}.f32 %d, %a0;", [some], np.float32), [(1 / Fraction(float(x)), 1) for x in some])


def test_fma_f64_is_rounded_once() -> None:
    rng = np.random.default_rng(4)
    n = 600
    a, b = rng.standard_normal(n), rng.standard_normal(n)
    c = -(a * b) * rng.choice([1.0, 1 + 2**-52, 1e-17, 2.0**-53, 0.5], n)
    a[:40] *= 1e-200
    b[:40] *= 1e-120
    a[40:60] = 2.0**600
    c[60:80] = 0.0
    got = apply("fma.rn.f64 %d, %a0, %a1, %a2;", [a, b, c], np.float64)
    same(got, [exact(float(x), float(y), float(z), 53, -1074, "rn") for x, y, z in zip(a, b, c, strict=True)])


def half_values(rng: np.random.Generator, n: int, kind: str) -> np.ndarray:
    codes = rng.integers(0, 2**16, n).astype(np.uint16)
    exponent = 10 if kind == "f16" else 7
    codes[: n // 2] = (codes[: n // 2] & 0x83FF) | (rng.integers(12, 18, n // 2) << exponent).astype(np.uint16) if kind == "f16" \
        else (codes[: n // 2] & 0x807F) | (rng.integers(120, 134, n // 2) << exponent).astype(np.uint16)  # fmt: skip
    return codes


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("packed", [False, True])
def test_half_precision_arithmetic(kind: str, packed: bool) -> None:
    rng = np.random.default_rng(5)
    n = 2000
    a, b, c = (half_values(rng, n, kind) for _ in range(3))
    wide = [x.view(np.float16 if kind == "f16" else BF16).astype(np.float64) for x in (a, b, c)]
    precision, least, largest = (11, -24, 65504.0) if kind == "f16" else (8, -133, float(ml_dtypes.finfo(BF16).max))
    as_words = [x.view(np.uint32) for x in (a, b, c)] if packed else [a, b, c]
    suffix = kind + ("x2" if packed else "")
    result = np.uint32 if packed else np.uint16
    for name, pick in (("add", (0, None, 1)), ("mul", (0, 1, None)), ("fma", (0, 1, 2))):
        text = f"{name}.rn.{suffix} %d, " + ", ".join(f"%a{i}" for i in range(3 if name == "fma" else 2)) + ";"
        got = apply(text, as_words, result).view(np.uint16)
        x = wide[pick[0]]
        y = np.ones(n) if pick[1] is None else wide[pick[1]]
        z = np.full(n, -0.0) if pick[2] is None else wide[pick[2]]
        expected = np.array([exact(float(p), float(q), float(r), precision, least, "rn") for p, q, r in zip(x, y, z, strict=True)])
        expected = np.where(np.abs(expected) > largest, np.copysign(np.inf, expected), expected)
        with np.errstate(all="ignore"):
            codes = expected.astype(np.float16 if kind == "f16" else BF16).view(np.uint16)
        nan = np.isnan(expected)
        assert (got[nan] == 0x7FFF).all()
        same(got[~nan], codes[~nan])


def test_minimum_and_maximum() -> None:
    rng = np.random.default_rng(6)
    a, b = floats32(rng, 3000), floats32(rng, 3000)

    def pick(x: float, y: float, largest: bool, propagate: bool) -> float:
        if math.isnan(x) or math.isnan(y):
            return math.nan if propagate or (math.isnan(x) and math.isnan(y)) else y if math.isnan(x) else x
        if x == y == 0:
            signs = [math.copysign(1, x), math.copysign(1, y)]
            return math.copysign(0.0, max(signs) if largest else min(signs))
        return max(x, y) if largest else min(x, y)

    for name, largest in (("max", True), ("min", False)):
        for suffix, propagate in (("", False), (".NaN", True)):
            got = apply(f"{name}{suffix}.f32 %d, %a0, %a1;", [a, b], np.float32)
            same(got, np.array([pick(float(x), float(y), largest, propagate) for x, y in zip(a, b, strict=True)], np.float32))
            assert (got[np.isnan(got)].view(np.uint32) == 0x7FFFFFFF).all()
        got = apply(f"{name}.xorsign.abs.f32 %d, %a0, %a1;", [a, b], np.float32)
        ok = ~(np.isnan(a) | np.isnan(b))
        limit_ = (np.maximum if largest else np.minimum)(np.abs(a), np.abs(b))
        same(got[ok], np.where(np.signbit(a) ^ np.signbit(b), -limit_, limit_)[ok])


def test_flush_to_zero_and_saturation() -> None:
    rng = np.random.default_rng(7)
    a, b = floats32(rng, 2000), floats32(rng, 2000)
    a[:200] *= np.float32(1e-38)
    b[:200] *= np.float32(1e-38)

    def flush(x: np.ndarray) -> np.ndarray:
        return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)

    with np.errstate(all="ignore"):
        same(apply("add.ftz.f32 %d, %a0, %a1;", [a, b], np.float32), flush(flush(a) + flush(b)))
        same(apply("mul.ftz.f32 %d, %a0, %a1;", [a, b], np.float32), flush(flush(a) * flush(b)))
        same(apply("mul.f32 %d, %a0, %a1;", [a, b], np.float32), a * b)
        r = a + b
        same(apply("add.sat.f32 %d, %a0, %a1;", [a, b], np.float32), np.where(np.isnan(r), 0, np.clip(r, 0, 1)) + np.float32(0))


def test_comparisons_with_nan() -> None:
    rng = np.random.default_rng(8)
    a, b = floats32(rng, 2000), floats32(rng, 2000)
    b[::5] = a[::5]
    unordered = np.isnan(a) | np.isnan(b)
    with np.errstate(invalid="ignore"):
        base = {"eq": a == b, "ne": (a != b) & ~unordered, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    for name, value in base.items():
        for suffix, expected in (("", value), ("u", value | unordered)):
            text = f"setp.{name}{suffix}.f32 %p0, %a0, %a1; selp.b32 %d, 1, 0, %p0;"
            same(apply(text, [a, b], np.uint32), expected)
    same(apply("setp.nan.f32 %p0, %a0, %a1; selp.b32 %d, 1, 0, %p0;", [a, b], np.uint32), unordered)
    for name, fn in {"finite": np.isfinite, "infinite": np.isinf, "notanumber": np.isnan}.items():
        same(apply(f"testp.{name}.f32 %p0, %a0; selp.b32 %d, 1, 0, %p0;", [a], np.uint32), fn(a))
    same(apply("copysign.f32 %d, %a0, %a1;", [a, b], np.float32), np.copysign(b, a))


# -- results recorded on an H100


def ulps(got: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Distance in representable f32 values."""
    def key(x: np.ndarray) -> np.ndarray:
        bits = x.view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return np.abs(key(got) - key(reference))


# the documented worst error of the hardware, in ulps, plus the half that rounding our exact result adds
APPROXIMATE = {
    "ex2.approx.f32": 3, "ex2.approx.ftz.f32": 3, "lg2.approx.f32": None, "lg2.approx.ftz.f32": None,
    "rcp.approx.f32": 1, "rcp.approx.ftz.f32": 1, "rsqrt.approx.f32": 2, "rsqrt.approx.ftz.f32": 2,
    "sqrt.approx.f32": 1, "sqrt.approx.ftz.f32": 1, "rcp.rn.f32": 0, "sqrt.rn.f32": 0,
    "tanh.approx.f32": 2**8, "sin.approx.f32": None, "cos.approx.f32": None,
}  # fmt: skip


@pytest.mark.parametrize("name", APPROXIMATE)
def test_functions_against_silicon(name: str) -> None:
    recorded = np.load(VECTORS / "vec_approx.npz")
    x = recorded["x"].view(np.float32)
    hardware = recorded[name].view(np.float32)
    got = apply(f"{name} %d, %a0;", [x], np.float32)
    nan = np.isnan(hardware)
    assert (np.isnan(got) == nan).all()
    assert (got[nan].view(np.uint32) == 0x7FFFFFFF).all()
    special = ~nan & ((hardware == 0) | np.isinf(hardware))
    x64 = x.astype(np.float64)
    with np.errstate(all="ignore"):
        if name.startswith(("sin", "cos")):
            inside = ~nan & (np.abs(x) <= 2 * math.pi)
            assert np.abs(got[inside] - hardware[inside]).max() <= 2.0**-20.5 + 2.0**-25
            far = ~nan & (np.abs(x) <= 100 * math.pi)
            assert np.abs(got[far] - hardware[far]).max() <= 2.0**-14.7 + 2.0**-25
            return
        same(got[special & np.isinf(hardware)], hardware[special & np.isinf(hardware)])
        rest = ~nan & np.isfinite(hardware)
        if name.startswith("lg2"):
            near = rest & (x64 >= 0.5) & (x64 <= 2)
            assert np.abs(got[near].astype(float) - hardware[near]).max() <= 2.0**-22.15 + 2.0**-25
            away = rest & ~near
            assert ulps(got[away], hardware[away]).max() <= 2  # one of the hardware, and its rounding
        elif name == "tanh.approx.f32":
            relative = np.abs(got[rest].astype(float) - hardware[rest]) / np.maximum(np.abs(hardware[rest]), 1e-45)
            assert relative.max() <= 2.0**-16.5
        else:
            assert ulps(got[rest], hardware[rest]).max() <= APPROXIMATE[name]


@pytest.mark.parametrize("name", ["ex2.approx.f16x2", "ex2.approx.ftz.bf16x2", "tanh.approx.f16x2", "tanh.approx.bf16x2"])
def test_half_functions_against_silicon(name: str) -> None:
    codes = np.arange(65536, dtype=np.uint16)
    hardware = np.load(VECTORS / "vec_approx.npz")[name]
    got = apply(f"{name} %d, %a0;", [codes.view(np.uint32)], np.uint32).view(np.uint16)
    kind = BF16 if "bf16" in name else np.float16
    a, b = got.view(kind).astype(np.float64), hardware.view(kind).astype(np.float64)
    assert (np.isnan(a) == np.isnan(b)).all()
    finite = np.isfinite(b)
    assert (a[~finite & ~np.isnan(b)] == b[~finite & ~np.isnan(b)]).all()
    relative = np.abs(a[finite] - b[finite]) / np.maximum(np.abs(b[finite]), 2.0**-14 if kind is np.float16 else 2.0**-126)
    assert relative.max() <= 2.0 ** (-7 if kind is BF16 else -10) * 1.01


CONVERSIONS = [
    "cvt.rn.bf16x2.f32", "cvt.rn.satfinite.bf16x2.f32", "cvt.rn.relu.bf16x2.f32", "cvt.rn.f16x2.f32",
    "cvt.rn.satfinite.f16x2.f32", "cvt.rn.relu.f16x2.f32", "cvt.rn.satfinite.e4m3x2.f32",
    "cvt.rn.satfinite.e5m2x2.f32", "cvt.rn.satfinite.relu.e4m3x2.f32", "cvt.rn.satfinite.relu.e5m2x2.f32",
    "cvt.rn.tf32.f32", "cvt.rna.tf32.f32", "cvt.rna.satfinite.tf32.f32", "cvt.rni.s32.f32", "cvt.rzi.s32.f32",
    "cvt.rni.sat.s8.f32", "cvt.rni.sat.u8.f32",
]  # fmt: skip


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_against_silicon(name: str) -> None:
    recorded = np.load(VECTORS / "vec_cvt.npz")
    x = recorded["x"].view(np.float32)
    hardware = recorded[name]
    if "x2" in name:
        target = "%h0" if name.split(".")[-2][0] == "e" else "%r0"
        widen = f"cvt.u32.u16 %d, {target};" if target == "%h0" else f"mov.b32 %d, {target};"
        got = apply(f"{name} {target}, %a0, %a0; {widen}", [x], np.uint32)
        same(got, hardware)
    elif "tf32" in name:
        same(apply(f"{name} %d, %a0;", [x], np.uint32), hardware)
    else:
        same(apply(f"{name} %d, %a0;", [x], np.int32), hardware)


@pytest.mark.parametrize("name", [
    "cvt.rn.satfinite.e4m3x2.f16x2", "cvt.rn.satfinite.e5m2x2.f16x2", "cvt.rn.satfinite.relu.e4m3x2.f16x2"])  # fmt: skip
def test_f16_to_fp8_against_silicon(name: str) -> None:
    codes = np.arange(65536, dtype=np.uint16)
    got = apply(f"{name} %d, %a0;", [codes.view(np.uint32)], np.uint16).view(np.uint8)
    same(got, np.load(VECTORS / "vec_cvt.npz")[name])


@pytest.mark.parametrize("name", ["cvt.rn.f16x2.e4m3x2", "cvt.rn.f16x2.e5m2x2"])
def test_fp8_to_f16_against_silicon(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    got = apply(f"{name} %d, %a0;", [codes.view(np.uint16)], np.uint32).view(np.uint16)
    same(got, np.load(VECTORS / "vec_cvt.npz")[name])


# -- other conversions


@pytest.mark.parametrize("source", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("target", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_conversions(source: str, target: str) -> None:
    rng = np.random.default_rng(9)
    names = {"u": "u", "s": "i"}
    a = integers(rng, f"{names[source[0]]}{int(source[1:]) // 8}", 300)
    out = np.dtype(f"{names[target[0]]}{int(target[1:]) // 8}")
    same(apply(f"cvt.{target}.{source} %d, %a0;", [a], out), a.astype(out))
    info, given = np.iinfo(out), np.iinfo(a.dtype)
    if info.min <= given.min and given.max <= info.max:
        with pytest.raises(PtxError, match=r"unknown modifier"):  # nothing to saturate: no such instruction
            apply(f"cvt.sat.{target}.{source} %d, %a0;", [a], out)
        return
    same(apply(f"cvt.sat.{target}.{source} %d, %a0;", [a], out), [min(max(int(x), info.min), info.max) for x in a])


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_integer_saturates(mode: str) -> None:
    rng = np.random.default_rng(10)
    x = floats32(rng, 1500)
    x[:500] = (rng.standard_normal(500) * 3e9).astype(np.float32)
    x[500:800] = rng.integers(-600, 600, 300) / 2
    fn = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    for target in ("u8", "s8", "s16", "u32", "s32", "u64", "s64"):
        out = np.dtype(f"{'u' if target[0] == 'u' else 'i'}{int(target[1:]) // 8}")
        info = np.iinfo(out)
        expected = []
        for v in x.tolist():
            if math.isnan(v):
                expected.append(0 if out.itemsize < 8 else 1 << 63 if target[0] == "u" else -1 << 63)
            elif math.isinf(v):
                expected.append(info.max if v > 0 else info.min)
            else:
                expected.append(min(max(fn(v), info.min), info.max))
        same(apply(f"cvt.{mode}.{target}.f32 %d, %a0;", [x], out), expected)


def test_integer_to_float_rounds_to_nearest() -> None:
    rng = np.random.default_rng(11)
    for source, dtype in (("u32", np.uint32), ("s32", np.int32), ("u64", np.uint64), ("s64", np.int64), ("s8", np.int8)):
        a = integers(rng, dtype)
        expected = [np.float32(exact(float(Fraction(int(v)) / 2**40) if abs(int(v)) < 2**53 else 0.0, 2.0**40, 0.0, 24, -149, "rn"))
                    if abs(int(v)) < 2**53 else np.float32(int(v)) for v in a]  # fmt: skip
        same(apply(f"cvt.rn.f32.{source} %d, %a0;", [a], np.float32), np.array(expected, np.float32))


def test_float_to_float_conversions() -> None:
    rng = np.random.default_rng(12)
    x = floats32(rng, 2000)
    with np.errstate(all="ignore"):
        same(apply("cvt.f64.f32 %d, %a0;", [x], np.float64), x.astype(np.float64))
        wide = rng.standard_normal(2000) * np.exp2(rng.integers(-150, 130, 2000))
        same(apply("cvt.rn.f32.f64 %d, %a0;", [wide], np.float32), wide.astype(np.float32))
        for mode in ("rz", "rm", "rp"):
            expected = [limit(exact(float(v), 1.0, -0.0 if v else float(v), 24, -149, mode), float(np.finfo(np.float32).max), mode) for v in wide]
            same(apply(f"cvt.{mode}.f32.f64 %d, %a0;", [wide], np.float32), np.array(expected).astype(np.float32))
        same(apply("cvt.rn.f16.f32 %h0, %a0; mov.b16 %d, %h0;", [x], np.uint16).view(np.float16), x.astype(np.float16))
        half = np.arange(65536, dtype=np.uint16)
        same(apply("cvt.f32.f16 %d, %a0;", [half], np.float32), half.view(np.float16).astype(np.float32))
        same(apply("cvt.f32.bf16 %d, %a0;", [half], np.float32), half.view(BF16).astype(np.float32))
        for mode, fn in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
            same(apply(f"cvt.{mode}.f32.f32 %d, %a0;", [x], np.float32), fn(x))
        same(apply("cvt.sat.f32.f32 %d, %a0;", [x], np.float32), np.where(np.isnan(x), 0, np.clip(x, 0, 1)) + np.float32(0))


def test_bf16_rounding_is_to_nearest_even() -> None:
    x = (np.arange(1 << 16, dtype=np.uint32) * 65537 + 0x3F000000).view(np.float32)
    x[:6] = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x7F800001], np.uint32).view(np.float32)
    got = apply("cvt.rn.bf16.f32 %d, %a0;", [x], np.uint16)
    assert got[:6].tolist() == [0x3F80, 0x3F82, 0x3F80, 0x3F81, 0x7F80, 0x7FFF]
    finite = ~np.isnan(x)
    same(got[finite], x.astype(BF16).view(np.uint16)[finite])


def test_wide_registers_in_conversions() -> None:
    rng = np.random.default_rng(13)
    a = integers(rng, np.uint32)
    same(apply("cvt.s32.s8 %d, %a0;", [a], np.int32), a.astype(np.int8).astype(np.int32))
    same(apply("cvt.u16.u32 %h0, %a0; cvt.u32.u16 %d, %h0;", [a], np.uint32), a & 0xFFFF)
    same(apply("cvt.pack.sat.s8.s32.b32 %d, %a0, %a1, %a2;", [a.view(np.int32), a.view(np.int32)[::-1].copy(), a], np.uint32),
         (a << np.uint32(16)) | (np.clip(a.view(np.int32), -128, 127).astype(np.uint8).astype(np.uint32) << np.uint32(8))
         | np.clip(a.view(np.int32)[::-1], -128, 127).astype(np.uint8))  # fmt: skip


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_f64_modes(mode: str) -> None:
    rng = np.random.default_rng(15)
    a, b, c = (rng.standard_normal(150) * np.exp2(rng.integers(-60, 60, 150)) for _ in range(3))
    b[:20], c[:10] = a[:20], 0.0
    with np.errstate(all="ignore"):
        for name, parts in (("add", (a, np.ones(150), b)), ("mul", (a, b, np.zeros(150))), ("fma", (a, b, c))):
            text = f"{name}.{mode}.f64 %d, %a0, %a1{', %a2' if name == 'fma' else ''};"
            got = apply(text, [a, b, c], np.float64)
            same(got, [exact(float(x), float(y), float(z), 53, -1074, mode) for x, y, z in zip(*parts, strict=True)])
    q = apply(f"div.{mode}.f64 %d, %a0, %a1;", [a, b], np.float64)
    for x, y, z in zip(a, b, q, strict=True):
        value = Fraction(float(x)) / Fraction(float(y))
        toward = {"rz": 0.0, "rm": np.inf, "rp": -np.inf}[mode]  # the next value on the far side lies beyond
        away = np.nextafter(z, np.copysign(np.inf, z) if mode == "rz" else toward)
        inside = abs(Fraction(float(z))) <= abs(value) < abs(Fraction(float(away))) if mode == "rz" else (
            Fraction(float(z)) <= value < Fraction(float(away)) if mode == "rm" else Fraction(float(away)) < value <= Fraction(float(z)))
        assert inside


@pytest.mark.parametrize("instruction", ["add.rn.f32 %d, %a0, %a1;", "sub.f32 %d, %a0, %a1;", "mul.rn.f32 %d, %a0, %a1;",
                                         "fma.rn.f32 %d, %a0, %a1, %a1;", "mad.rn.f32 %d, %a1, %a0, %a0;", "add.ftz.f32 %d, %a1, %a0;"])
def test_a_nan_of_f32_arithmetic_is_the_hardware_s(instruction: str) -> None:
    """Whatever the payloads of the operands, and where none of them is NaN."""
    payloads = np.array([0x7FC00001, 0xFFC00000, 0x7F800001, 0xFF812345], np.uint32).view(np.float32)
    got = apply(instruction, [payloads, np.ones(4, np.float32)], np.float32)
    assert (got.view(np.uint32) == 0x7FFFFFFF).all()
    if "mul" not in instruction:
        with np.errstate(invalid="ignore"):
            opposite = np.float32(np.inf) * np.array([1, -1], np.float32)
            other = opposite if "sub" in instruction else -opposite
            got = apply("sub.f32 %d, %a0, %a1;" if "sub" in instruction else "add.f32 %d, %a0, %a1;", [opposite, other], np.float32)
        assert (got.view(np.uint32) == 0x7FFFFFFF).all()
