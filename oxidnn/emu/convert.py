"""cvt in all its forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from oxidnn.emu import floats
from oxidnn.emu.decode import DTYPE, Core, Decoder, Source, emit_slot
from oxidnn.emu.floats import F16, F32, F64, I64, U16, U32
from oxidnn.emu.memory import Array
from oxidnn.ptx import nodes

Fn = Callable[[Array], Array]

NARROW = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2), "e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
    "e2m3": np.dtype(ml_dtypes.float6_e2m3fn), "e3m2": np.dtype(ml_dtypes.float6_e3m2fn),
}  # fmt: skip
NARROW_MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0}
NARROW_NAN = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x07, "e2m3": 0x1F, "e3m2": 0x1F}  # the largest value where a format has no NaN
BF16_MAX = float(np.array([0x7F7F], np.uint16).view(ml_dtypes.bfloat16)[0])
INTEGRAL: dict[str, Callable[..., Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
ROUNDING = ("rn", "rz", "rm", "rp", "rna")
FLOATS = ("f16", "bf16", "f32", "f64")
PACKED = {name + "x2": name for name in ("bf16", "f16", *NARROW, "ue8m0")}

# -- to and from the floating formats


def to_f32(type_: str) -> Fn:
    """Widen codes of f16, bf16, e4m3, e5m2, e2m1, e2m3, e3m2 or ue8m0 to f32 (exact); bits above a code are ignored."""
    if type_ == "bf16":
        return floats.bf16_to_f32
    if type_ == "f16":
        return lambda x: x.view(F16).astype(F32)
    if type_ in NARROW:
        dtype = NARROW[type_]
        mask = np.array([(1 << ml_dtypes.finfo(dtype).bits) - 1], np.uint8)
        return lambda x: (x & mask).view(dtype).astype(F32)
    if type_ == "ue8m0":
        return ue8m0_to_f32
    return lambda x: x


def ue8m0_to_f32(x: Array) -> Array:
    """2^(code - 127): an exponent of f32, but for 0, which is subnormal there; 0xFF is NaN."""
    bits = np.where(x == 0, np.array([0x00400000], U32), x.astype(U32) << np.array([23], U32))
    return np.where(x == 0xFF, np.array([0x7FFFFFFF], U32), bits).view(F32)


def f32_to_ue8m0(x: Array, mods: set[str]) -> Array:
    """Codes of |x| rounded down (rz) or up (rp) to a power of two, at least 2^-127; NaN is 0xFF.

    The sign is dropped. What exceeds 2^127 is 0xFE with .satfinite, else 0xFF; so are infinities.
    """
    bits = x.view(U32) & np.array([0x7FFFFFFF], U32)
    code = bits >> np.array([23], U32)
    if "rp" in mods:
        above = np.where(code == 0, bits > 0x00400000, (bits & np.array([0x7FFFFF], U32)) != 0)  # above 2^(code - 127)
        code = code + above
    code = np.minimum(code, 0xFE if "satfinite" in mods else 0xFF)
    return np.where(x != x, 0xFF, code).astype(np.uint8)


def quiet(x: Array) -> Array:
    """NaNs with the highest bit of their mantissas set."""
    nan = x != x
    if not nan.any():
        return x
    size = x.dtype.itemsize
    bits = x.view(f"u{size}")
    return np.where(nan, bits | np.array([{2: 0x200, 4: 0x400000, 8: 1 << 51}[size]], bits.dtype), bits).view(x.dtype)


def clamp_finite(x: Array, limit: float) -> Array:
    """Clamp to [-limit, limit]; NaN stays."""
    return np.clip(x, np.array(-limit, x.dtype), np.array(limit, x.dtype))


def relu(x: Array) -> Array:
    """max(x, +0); NaN stays."""
    return np.where(x <= 0, np.zeros(1, x.dtype), x)


def from_f32(type_: str, mods: set[str]) -> Fn:
    """f32 to codes of f16, bf16, e4m3, e5m2, e2m1, e2m3, e3m2 or ue8m0, with rounding, .satfinite and .relu."""
    if type_ == "ue8m0":
        return lambda x: f32_to_ue8m0(x, mods)
    limit = {"f16": 65504.0, "bf16": BF16_MAX, **NARROW_MAX}.get(type_)
    mode = next((m for m in ROUNDING if m in mods), "rn")

    def convert(x: Array) -> Array:
        if "relu" in mods:
            x = relu(x)
        if "satfinite" in mods and limit is not None:
            x = clamp_finite(x, limit)
        if type_ == "bf16":
            return floats.f32_to_bf16(x, mode)
        if type_ == "f16":
            if mode == "rn":
                return floats.canonical(x.astype(F16)).view(U16)
            return floats.canonical(floats.round_f64(x.astype(F64), F16, mode)).view(U16)
        codes = np.where(x != x, np.zeros(1, F32), x).astype(NARROW[type_]).view(np.uint8)
        return np.where(x != x, np.uint8(NARROW_NAN[type_]), codes)

    return convert


def to_tf32(mods: set[str]) -> Fn:
    """f32 to tf32: a bit pattern with 13 zero bits. As measured, rna leaves NaN patterns to truncation (some become
    infinite), and its .satfinite steps one unit down from every pattern with a full exponent."""

    def convert(x: Array) -> Array:
        if "relu" in mods:
            x = relu(x)
        bits = x.view(U32)
        mask = np.array([0xFFFFE000], U32)
        if "rna" in mods:
            exponent = np.array([0x7F800000], U32)
            out = np.where((bits & exponent) == exponent, bits, bits + np.array([0x1000], U32)) & mask
            if "satfinite" in mods:
                out = np.where((out & exponent) == exponent, out - np.array([0x2000], U32), out)
            return out
        if "rz" in mods:
            out = bits & mask
        else:
            out = (bits + np.array([0xFFF], U32) + ((bits >> np.array([13], U32)) & np.array([1], U32))) & mask
        if "satfinite" in mods:
            infinite = (out & np.array([0x7FFFFFFF], U32)) == 0x7F800000
            out = np.where(infinite, (bits & np.array([0x80000000], U32)) | np.array([0x7F7FE000], U32), out)
        return np.where(x != x, np.array([0x7FFFE000], U32), out)

    return convert


# -- between scalar types


def float_to_integer(source: np.dtype, target: np.dtype, mode: str) -> Fn:
    """Round to an integer, clamp to the target's range; NaN becomes 0; from f64, or to 64 bits, the highest bit alone."""
    info = np.iinfo(target)
    rounding = INTEGRAL[mode]
    of_nan: Array = np.zeros(1, target)
    if source == F64 or target.itemsize == 8:
        of_nan = np.array([1 << 8 * target.itemsize - 1], f"u{target.itemsize}").view(target)

    def convert(x: Array) -> Array:
        r = rounding(x.astype(F64))
        nan = r != r
        if nan.any():
            return np.where(nan, of_nan, convert(np.where(nan, 0.0, r)))
        if target.itemsize < 8:
            return np.clip(r, info.min, info.max).astype(I64).astype(target)
        top = 2.0**63 if target.kind == "i" else 2.0**64
        inside = (r < top) & (r >= float(info.min))
        whole = np.where(inside, r, 0.0)
        return np.where(inside, whole.astype(target), np.where(r >= top, np.array(info.max, target), np.array(info.min, target)))

    return convert


def to_odd_f64(x: Array) -> Array:
    """Integers to f64, rounded to odd: what rounds them further to fewer bits is right."""
    if x.dtype.itemsize < 8:
        return x.astype(F64)
    magnitude = np.where(x < 0, np.uint64(0) - x.view(np.uint64), x.view(np.uint64))
    low = magnitude & np.uint64(0x7FF)
    odd = np.where((magnitude >> np.uint64(53)) != 0, magnitude - low | (low != 0).astype(np.uint64) << np.uint64(11), magnitude)
    return np.where(x < 0, -odd.astype(F64), odd.astype(F64))


def integer_to_float(type_: str, mode: str) -> Fn:
    def convert(x: Array) -> Array:
        if type_ == "f64":
            return x.astype(F64)
        if mode != "rn":
            return floats.round_f64(to_odd_f64(x), DTYPE[type_], mode)
        if type_ == "f32":
            return x.astype(F32)
        if type_ == "f16":
            return x.astype(F64).astype(F16)
        return floats.f32_to_bf16(floats.f64_to_odd_f32(x.astype(F64)))

    return convert


def float_to_float(to: str, source: str, mods: set[str]) -> Fn:
    mode = next((m for m in ROUNDING if m in mods), "rn")
    integral = next((m for m in INTEGRAL if m in mods), None)
    keeps_nan = "f64" in (to, source)  # sign and payload

    def convert(x: Array) -> Array:
        x = floats.bf16_to_f32(x) if source == "bf16" else x
        if "ftz" in mods and x.dtype == F32:
            x = floats.canonical(floats.flush(x))
        if integral:
            x = INTEGRAL[integral](x)
        x = quiet(x) if keeps_nan else x
        if to == "f64":
            x = x.astype(F64)
        elif to == "f32":
            x = x.astype(F32) if mode == "rn" or x.dtype != F64 else floats.round_f64(x, F32, mode)
            x = floats.flush(x) if "ftz" in mods else x
        elif to == "f16" and source == "f16":
            pass
        elif x.dtype == F64:
            if to == "f16":
                x = floats.round_f64(x, F16, mode)
            else:
                narrow = quiet(x.astype(F32)).view(U32) >> np.array([16], U32)  # of NaNs
                x = np.where(x != x, narrow.astype(U16), from_f32(to, mods)(floats.f64_to_odd_f32(x)))
        else:
            x = from_f32(to, mods)(x.astype(F32)).view(DTYPE[to])
        if x.dtype.kind == "f":
            if (to, source) != ("f32", "bf16"):  # a shift: NaNs as they are
                x = quiet(x) if keeps_nan else floats.canonical(x)
            if "sat" in mods:
                x = floats.saturate(x)
        return x

    return convert


def integer_to_integer(target: np.dtype, saturates: bool) -> Fn:
    info = np.iinfo(target)

    def convert(x: Array) -> Array:
        if saturates:
            low = max(info.min, int(np.iinfo(x.dtype).min))
            high = min(info.max, int(np.iinfo(x.dtype).max))
            x = np.clip(x, np.array(low, x.dtype), np.array(high, x.dtype))
        return x.astype(target)

    return convert


def cvt(d: Decoder, ins: nodes.Instruction) -> Core:
    if "pack" in ins.modifiers:
        return pack_saturated(d, ins)
    *rest, to, source = ins.modifiers
    mods = set(rest)
    unknown = mods - {*ROUNDING, *INTEGRAL, "ftz", "sat", "satfinite", "relu"}
    if unknown:
        d.refuse(f"unknown modifier .{sorted(unknown)[0]}")
    if to in PACKED or source in PACKED:
        return cvt_packed(d, ins, to, source, mods)
    if to == "tf32":
        return d.emit(lambda x: to_tf32(mods)(x), ins.operands[0], U32, [d.src(ins.operands[1], "f32")])
    if to not in DTYPE or source not in DTYPE:
        d.refuse(f"cvt .{to}.{source}")
    target, origin = DTYPE[to], DTYPE[source]
    mode = next((m for m in ROUNDING if m in mods), "rn")
    integral = next((m for m in INTEGRAL if m in mods), None)
    fn: Fn
    if to in FLOATS and source in FLOATS:
        fn = float_to_float(to, source, mods)
    elif to in FLOATS:
        inner = integer_to_float(to, mode)
        fn = (lambda x: floats.saturate(inner(x))) if "sat" in mods else inner
    elif source in FLOATS:
        if integral is None:
            d.refuse("a conversion to an integer needs .rni, .rzi, .rmi or .rpi")
        assert integral is not None
        whole = float_to_integer(origin, target, integral)
        if source == "bf16":
            fn = lambda x: whole(floats.bf16_to_f32(x))  # noqa: E731
        elif "ftz" in mods:
            fn = lambda x: whole(floats.flush(x))  # noqa: E731
        else:
            fn = whole
    else:
        fn = integer_to_integer(target, "sat" in mods)
    return relaxed(d, fn, ins.operands[0], target, ins.operands[1], source)


def relaxed(d: Decoder, fn: Fn, dst: nodes.Operand, target: np.dtype, a: nodes.Operand, source: str) -> Core:
    """dst = fn(a) where the registers may be wider than the types: truncate before, extend by sign or zero after."""
    origin = DTYPE[source]
    value: Source
    if isinstance(a, nodes.Reg) and a.name != "_" and DTYPE[d.register(a.name).type].itemsize > origin.itemsize:
        wide = np.dtype(f"u{DTYPE[d.register(a.name).type].itemsize}")
        value = d.reg_source(a, wide)
        inner, narrow = fn, np.dtype(f"u{origin.itemsize}")
        fn = lambda x: inner(x.astype(narrow).view(origin))  # noqa: E731
    else:
        value = d.src(a, source)
    if not isinstance(dst, nodes.Reg):
        d.refuse("the destination is no register")
    assert isinstance(dst, nodes.Reg)
    d.op.pure = True
    if dst.name == "_":
        return lambda S, idx: None
    stored = DTYPE[d.register(dst.name).type]
    if stored.itemsize > target.itemsize:
        slot, _ = d.dst(dst, None, stored)
        bits = np.dtype(f"u{target.itemsize}") if target.kind == "f" else target
        wider = np.dtype(f"{'i' if target.kind == 'i' else 'u'}{stored.itemsize}")
        plain = fn
        return emit_slot(lambda x: plain(x).view(bits).astype(wider), slot, stored, wider, [value])
    slot, stored = d.dst(dst, None, target)
    return emit_slot(fn, slot, stored, target, [value])


def cvt_packed(d: Decoder, ins: nodes.Instruction, to: str, source: str, mods: set[str]) -> Core:
    dst, *operands = ins.operands
    if to not in PACKED or source not in (*PACKED, "f32"):
        d.refuse(f"cvt .{to}.{source}")
    narrow = from_f32(PACKED[to], mods)
    whole = packed_dtype(to)
    if source == "f32":
        if len(operands) != 2:
            d.refuse(f"cvt to .{to} from .f32 takes two sources")

        def join(high: Array, low: Array) -> Array:
            if "ftz" in mods:
                high, low = floats.flush(high), floats.flush(low)
            return pack(narrow(np.stack(np.broadcast_arrays(low, high), -1)), to)

        return d.emit(join, dst, whole, [d.src(x, "f32") for x in operands])
    wide, origin = to_f32(PACKED[source]), packed_dtype(source)
    return d.emit(lambda x: pack(narrow(wide(unpack(x, source))), to), dst, whole, [d.src(operands[0], f"b{8 * origin.itemsize}")])


def packed_dtype(type_: str) -> np.dtype:
    """Of the register that holds a pair."""
    return np.dtype({"f16x2": np.uint32, "bf16x2": np.uint32, "e2m1x2": np.uint8}.get(type_, np.uint16))


def pack(codes: Array, type_: str) -> Array:
    """Codes [n, 2], the lower first, to registers [n]."""
    if type_ == "e2m1x2":
        return codes[:, 0] | codes[:, 1] << np.uint8(4)
    return np.ascontiguousarray(codes).view(packed_dtype(type_)).reshape(-1)


def unpack(x: Array, type_: str) -> Array:
    """Registers [n] to codes [n, 2], the lower first."""
    if type_ == "e2m1x2":
        return np.stack((x, x >> np.uint8(4)), -1)
    return np.ascontiguousarray(x).view(f"u{packed_dtype(type_).itemsize // 2}").reshape(-1, 2)


def pack_saturated(d: Decoder, ins: nodes.Instruction) -> Core:
    """cvt.pack.sat.{u,s}{2,4,8,16}.s32{.b32} d, a, b{, c}: b lowest, then a, then the low bits of c."""
    target = next(m for m in ins.modifiers if m not in ("pack", "sat"))
    dst, *rest = ins.operands
    bits = int(target[1:])
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if target[0] == "s" else (0, (1 << bits) - 1)

    def fn(a: Array, b: Array, *c: Array) -> Any:
        mask = np.array([(1 << bits) - 1], I64)
        out = ((np.clip(a.astype(I64), low, high) & mask) << bits) | (np.clip(b.astype(I64), low, high) & mask)
        if c:
            out = out | (c[0].astype(I64) << (2 * bits))
        return out.astype(U32)

    sources = [d.src(rest[0], "s32"), d.src(rest[1], "s32"), *(d.src(x, "b32") for x in rest[2:])]
    return d.emit(fn, dst, U32, sources)


BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {"cvt": cvt}
