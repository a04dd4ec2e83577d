"""Arithmetic and logic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from oxidnn.emu import floats
from oxidnn.emu.decode import DTYPE, Core, Decoder, Source
from oxidnn.emu.floats import F16, F32, F64, I32, I64, U16, U32, U64
from oxidnn.emu.integers import (
    PRMT_MODES,
    add_saturated,
    bit_length,
    const,
    count_bits,
    divide,
    dot_product,
    extract_bits,
    find_bit,
    funnel,
    insert_bits,
    lop3,
    low_mask,
    mul_hi,
    prmt,
    remainder,
    reverse_bits,
    wide_mul,
)  # fmt: skip
from oxidnn.emu.memory import Array
from oxidnn.ptx import nodes

Fn = Callable[..., Array]

INTEGER = {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "b8", "b16", "b32", "b64"}
FLOAT = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f64"}
ROUNDING = {"rn", "rz", "rm", "rp"}


def split(decoder: Decoder, ins: nodes.Instruction, allowed: set[str]) -> tuple[str, set[str]]:
    """The type (last modifier) and the other modifiers, all of which must be in `allowed`."""
    if not ins.modifiers:
        decoder.refuse("no type")
    *rest, type_ = ins.modifiers
    unknown = set(rest) - allowed
    if unknown:
        decoder.refuse(f"unknown modifier .{sorted(unknown)[0]}")
    return type_, set(rest)


# -- lifting a function over the packed and the narrow floating types


def on_f16(fn: Fn) -> Fn:
    """A function on f32 arrays applied to f16 values. One operation in f32, then rounding, is correctly rounded."""
    return lambda *xs: floats.canonical(fn(*(x.astype(F32) for x in xs)).astype(F16))


def on_bf16(fn: Fn) -> Fn:
    """The same for bf16 codes (uint16)."""
    return lambda *xs: floats.f32_to_bf16(fn(*(floats.bf16_to_f32(x) for x in xs)))


def packed(fn: Fn, half: np.dtype) -> Fn:
    """A function on 16-bit arrays applied to both halves of 32-bit words."""

    def both(*xs: Array) -> Array:
        return np.ascontiguousarray(fn(*(x.view(half).reshape(-1, 2) for x in xs))).view(U32).reshape(-1)

    return both


def narrow(fn: Fn, type_: str) -> Fn:
    """Lift a function on f32 arrays to f16, bf16, f16x2 or bf16x2."""
    if type_ in ("f16", "f16x2"):
        lifted = on_f16(fn)
        return packed(lifted, F16) if type_ == "f16x2" else lifted
    lifted = on_bf16(fn)
    return packed(lifted, U16) if type_ == "bf16x2" else lifted


def dtype_of(type_: str) -> np.dtype:
    return DTYPE[type_]


# -- builders


def binary_arithmetic(d: Decoder, ins: nodes.Instruction) -> Core:
    """add, sub, mul, div, min, max, rem, and, or, xor"""
    name = ins.opcode
    type_ = ins.modifiers[-1]
    dst, a, b, *third = ins.operands
    if third and not (type_ == "f32" and name in ("min", "max") and len(third) == 1):
        d.refuse("too many operands")
    if type_ == "pred" and name in ("and", "or", "xor"):
        logical: Any = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[name]
        return d.emit(logical, dst, DTYPE["pred"], [d.src(a, "pred"), d.src(b, "pred")])
    if type_ in FLOAT:
        return float_binary(d, ins)
    if type_ in ("u16x2", "s16x2") and name in ("add", "min", "max"):
        half = np.dtype("u2" if type_[0] == "u" else "i2")
        lifted = packed({"add": np.add, "min": np.minimum, "max": np.maximum}[name], half)
        return d.emit(lifted, dst, U32, [d.src(a, type_), d.src(b, type_)])
    type_, mods = split(d, ins, {"lo", "hi", "wide", "sat", "cc", "relu"})
    if type_ not in INTEGER:
        d.refuse(f"unknown type .{type_}")
    dtype = DTYPE[type_]
    if "cc" in mods:
        return carry_arithmetic(d, ins)
    sources = [d.src(a, type_), d.src(b, type_)]
    result = dtype
    fn: Any
    if name == "mul":
        if "wide" in mods:
            fn, result = wide_mul(dtype)
        elif "hi" in mods:
            fn = mul_hi(dtype)
        elif "lo" in mods:
            fn = np.multiply
        else:
            d.refuse("mul needs .lo, .hi or .wide")
    elif "relu" in mods:
        if type_ != "s32" or name not in ("min", "max"):
            d.refuse(".relu needs min or max of .s32")
        smaller = np.minimum if name == "min" else np.maximum
        fn = lambda x, y: np.maximum(smaller(x, y), const(0, I32))  # noqa: E731
    elif "sat" in mods:
        if type_ != "s32" or name not in ("add", "sub"):
            d.refuse(".sat needs .s32")
        sign = 1 if name == "add" else -1
        fn = lambda x, y: add_saturated(x, y, sign)  # noqa: E731
    else:
        fn = {
            "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
            "or": np.bitwise_or, "xor": np.bitwise_xor, "div": divide, "rem": remainder,
        }[name]  # fmt: skip
    return d.emit(fn, dst, result, sources)


def wrap_float(fn: Fn, mods: set[str], flushes: bool = True) -> Fn:
    """Add .ftz (inputs and output) and .sat around a function on f32 arrays."""
    if "ftz" in mods:
        inner = fn
        fn = lambda *xs: floats.flush(inner(*(floats.flush(x) for x in xs)))  # noqa: E731
    if "sat" in mods:
        unclamped = fn
        fn = lambda *xs: floats.saturate(unclamped(*xs))  # noqa: E731
    if "relu" in mods:
        raw = fn
        fn = lambda *xs: floats.ptx_max(raw(*xs), np.zeros(1, F32))  # noqa: E731
    return fn


def canonical_of(fn: Fn) -> Fn:
    """`fn` with the hardware's NaN for any NaN it gives."""
    return lambda *xs: floats.canonical(fn(*xs))


def div_approx(a: Array, b: Array) -> Array:
    q = a / b
    large = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b) & np.isfinite(a)
    return np.where(large, np.copysign(np.float32(0), q), q) if large.any() else q


def float_binary(d: Decoder, ins: nodes.Instruction) -> Core:
    name = ins.opcode
    type_, mods = split(d, ins, {*ROUNDING, "ftz", "sat", "approx", "full", "NaN", "xorsign", "abs", "relu"})
    dst, *operands = ins.operands
    sources = [d.src(x, type_) for x in operands]
    mode = next(iter(mods & ROUNDING), "rn")
    if name in ("min", "max"):
        fn: Fn = {("min", False): floats.ptx_min, ("max", False): floats.ptx_max, ("min", True): floats.nan_min,
                  ("max", True): floats.nan_max}[name, "NaN" in mods]  # fmt: skip
        if "xorsign" in mods:
            inner = fn
            fn = lambda x, y: np.copysign(inner(np.abs(x), np.abs(y)), np.where(np.signbit(x) ^ np.signbit(y), -1.0, 1.0).astype(x.dtype))  # noqa: E731, E501
    elif name == "div" and ("approx" in mods or "full" in mods):
        fn = div_approx if "approx" in mods else np.divide
    elif mode != "rn":
        fn = floats.directed64(name, mode) if type_ == "f64" else floats.directed(name, mode)
    else:
        plain: dict[str, Fn] = {"add": np.add, "sub": np.subtract, "mul": np.multiply,
                                "div": lambda x, y: floats.canonical(np.divide(x, y))}
        fn = plain[name]
        if type_ == "f32" and name != "div":
            fn = canonical_of(fn)
    if len(operands) == 3:
        pair = fn
        fn = lambda x, y, z: pair(pair(x, y), z)  # noqa: E731
    if type_ == "f64":
        return d.emit(fn, dst, F64, sources)
    if type_ == "f32":
        return d.emit(wrap_float(fn, mods), dst, F32, sources)
    if "ftz" in mods and type_.startswith("f16"):
        return d.emit(flushed_f16(narrow(wrap_float(fn, mods - {"ftz"}), type_), type_), dst, DTYPE[type_], sources)
    return d.emit(narrow(wrap_float(fn, mods - {"ftz"}), type_), dst, DTYPE[type_], sources)


def flushed_f16(fn: Fn, type_: str) -> Fn:
    if type_ == "f16":
        return lambda *xs: floats.flush(fn(*(floats.flush(x) for x in xs)))
    both = lambda x: floats.flush(x.view(F16)).view(U32)  # noqa: E731
    return lambda *xs: both(fn(*(both(x) for x in xs)))


def multiply_add(d: Decoder, ins: nodes.Instruction) -> Core:
    """mad and fma"""
    type_ = ins.modifiers[-1]
    dst, a, b, c = ins.operands
    if type_ in FLOAT:
        type_, mods = split(d, ins, {*ROUNDING, "ftz", "sat", "relu"})
        sources = [d.src(x, type_) for x in (a, b, c)]
        mode = next(iter(mods & ROUNDING), "rn")
        if type_ == "f32":
            fn: Fn = canonical_of(floats.fma32) if mode == "rn" else floats.directed("fma", mode)
            return d.emit(wrap_float(fn, mods), dst, F32, sources)
        if type_ == "f64":
            return d.emit(floats.fma64 if mode == "rn" else floats.directed64("fma", mode), dst, F64, sources)
        if mode != "rn":
            d.refuse(f"fma .{mode} of .{type_}")
        half = F16 if type_.startswith("f16") else U16
        fn = floats.fma_f16 if half is F16 else floats.fma_bf16
        if mods & {"sat", "relu"}:
            fused, clamp = fn, narrow(wrap_float(lambda x: x, mods - {"ftz"}), "f16" if half is F16 else "bf16")
            fn = lambda x, y, z: clamp(fused(x, y, z))  # noqa: E731
        if half is F16:
            raw = fn
            fn = lambda x, y, z: floats.canonical(raw(x, y, z))  # noqa: E731
        fn = packed(fn, half) if type_.endswith("x2") else fn
        if "ftz" in mods:
            fn = flushed_f16(fn, type_)
        return d.emit(fn, dst, DTYPE[type_], sources)
    type_, mods = split(d, ins, {"lo", "hi", "wide", "sat", "cc"})
    dtype = DTYPE[type_]
    if "cc" in mods:
        return carry_arithmetic(d, ins)
    if "wide" in mods:
        product, wider = wide_mul(dtype)
        third = d.src(c, f"{type_[0]}{wider.itemsize * 8}")
        return d.emit(lambda x, y, z: product(x, y) + z, dst, wider, [d.src(a, type_), d.src(b, type_), third])
    sources = [d.src(x, type_) for x in (a, b, c)]
    if "hi" in mods:
        high = mul_hi(dtype)
        if "sat" in mods:
            return d.emit(lambda x, y, z: add_saturated(high(x, y), z), dst, dtype, sources)
        return d.emit(lambda x, y, z: high(x, y) + z, dst, dtype, sources)
    if "lo" not in mods:
        d.refuse("mad needs .lo, .hi or .wide")
    return d.emit(lambda x, y, z: x * y + z, dst, dtype, sources)


def mul24(d: Decoder, ins: nodes.Instruction) -> Core:
    type_, mods = split(d, ins, {"lo", "hi", "sat"})
    dtype, wide = DTYPE[type_], np.dtype("i8" if type_[0] == "s" else "u8")
    dst, *operands = ins.operands

    def low24(x: Array) -> Array:
        y = x.astype(wide) & const(0xFFFFFF, wide)
        return (y ^ const(1 << 23, wide)) - const(1 << 23, wide) if type_[0] == "s" else y

    shift = const(16 if "hi" in mods else 0, wide)

    def fn(x: Array, y: Array, *z: Array) -> Array:
        r = ((low24(x) * low24(y)) >> shift).astype(dtype)
        if "sat" in mods:
            return add_saturated(r, z[0])
        return r + z[0] if z else r

    return d.emit(fn, dst, dtype, [d.src(x, type_) for x in operands])


def carry_arithmetic(d: Decoder, ins: nodes.Instruction) -> Core:
    """add.cc, addc{.cc}, sub.cc, subc{.cc}, mad.cc, madc{.cc}: CC.CF is a hidden register."""
    type_, mods = split(d, ins, {"cc", "lo", "hi"})
    dtype = np.dtype(f"u{DTYPE[type_].itemsize}")
    name = ins.opcode
    dst, *operands = ins.operands
    sources = [d.src(x, type_) for x in operands]
    slot, stored = d.dst(dst, type_)
    carry = d.carry()
    takes, sets = name.endswith("c"), "cc" in mods
    if takes:
        d.op.reads.append(carry)
    if sets:
        d.op.writes.append(carry)
    d.op.pure = True
    high = mul_hi(DTYPE[type_])

    def run(S: Any, idx: Any) -> None:
        values = [s.take(S, idx) for s in sources]
        if name.startswith("mad"):
            product = high(values[0], values[1]) if "hi" in mods else values[0] * values[1]
            values = [product, values[2]]
        x, y = (v.view(dtype) for v in values)
        cf: Any = const(0, dtype)
        if takes:
            cf = S.R[carry]
            cf = (cf if idx is None or cf.size == 1 else cf.take(idx)).astype(dtype)
        if name.startswith("sub"):
            t = x - y
            r = t - cf
            out = (x < y) | (t < cf)
        else:
            t = x + y
            r = t + cf
            out = (t < x) | (r < t)
        S.set(slot, idx, r.view(stored))
        if sets:
            S.set(carry, idx, out.astype(U32))

    return run


def unary(d: Decoder, ins: nodes.Instruction) -> Core:
    """abs, neg, not, cnot, popc, clz, brev, bfind"""
    name = ins.opcode
    type_, mods = split(d, ins, {"ftz", "shiftamt"})
    dst, a = ins.operands
    if type_ == "pred":
        return d.emit(np.logical_not, dst, DTYPE["pred"], [d.src(a, "pred")])
    source = d.src(a, type_)
    dtype = DTYPE[type_]
    if type_ in FLOAT:
        if type_ in ("f32", "f64"):
            fn: Fn = {"abs": np.abs, "neg": np.negative}[name]
            return d.emit(wrap_float(fn, mods), dst, dtype, [source])
        bits = np.dtype("u2") if dtype.itemsize == 2 else U32
        sign = const(0x8000 if dtype.itemsize == 2 else 0x80008000, bits)
        if name == "abs":
            return d.emit(lambda x: (x.view(bits) & ~sign).view(dtype), dst, dtype, [source])
        return d.emit(lambda x: (x.view(bits) ^ sign).view(dtype), dst, dtype, [source])
    unsigned = np.dtype(f"u{dtype.itemsize}")
    width = dtype.itemsize * 8
    if name == "bfind":
        return d.emit(find_bit(dtype, "shiftamt" in mods), dst, U32, [source])
    if name == "clz":
        return d.emit(lambda x: (width - bit_length(x.view(unsigned))).astype(U32), dst, U32, [source])
    if name == "popc":
        return d.emit(count_bits, dst, U32, [source])
    whole: Any = {
        "abs": np.abs, "neg": np.negative, "not": np.invert, "cnot": lambda x: (x == 0).astype(dtype),
        "brev": reverse_bits,
    }[name]  # fmt: skip
    return d.emit(whole, dst, dtype, [source])


def shift(d: Decoder, ins: nodes.Instruction) -> Core:
    """shl, shr: amounts beyond the width give 0 (or the sign)."""
    type_, _ = split(d, ins, set())
    dtype = DTYPE[type_]
    width = dtype.itemsize * 8
    dst, a, b = ins.operands
    if isinstance(b, nodes.Imm):
        amount = Source(d.constant(const(min(int(b.value) & 0xFFFFFFFF, width if dtype.kind == "u" else width - 1), dtype)))
        fn: Fn = np.left_shift if ins.opcode == "shl" else np.right_shift
        if ins.opcode == "shl" and int(b.value) >= width:
            fn = lambda x, n: x & const(0, dtype)  # noqa: E731
        return d.emit(fn, dst, dtype, [d.src(a, type_), amount])
    most = const(width, U32)
    operation = np.left_shift if ins.opcode == "shl" else np.right_shift
    return d.emit(
        lambda x, n: operation(x, np.minimum(n, most).astype(dtype)), dst, dtype, [d.src(a, type_), d.src(b, "u32")]
    )


def bit_fields(d: Decoder, ins: nodes.Instruction) -> Core:
    type_, mods = split(d, ins, {"l", "r", "clamp", "wrap"})
    dtype = DTYPE[type_]
    dst, *rest = ins.operands
    name = ins.opcode
    if name == "bfe":
        sources = [d.src(rest[0], type_), d.src(rest[1], "u32"), d.src(rest[2], "u32")]
        return d.emit(extract_bits(dtype), dst, dtype, sources)
    if name == "bfi":
        sources = [d.src(rest[0], type_), d.src(rest[1], type_), d.src(rest[2], "u32"), d.src(rest[3], "u32")]
        return d.emit(insert_bits(dtype), dst, dtype, sources)
    fn = funnel("l" if "l" in mods else "r", "wrap" if "wrap" in mods else "clamp")
    return d.emit(fn, dst, U32, [d.src(x, "b32") for x in rest])


def logic3(d: Decoder, ins: nodes.Instruction) -> Core:
    join = None
    if ins.modifiers[-1] != "b32" or len(ins.modifiers) > 2:
        d.refuse("lop3 has .b32 only")
    if len(ins.modifiers) == 2:
        join = {"and": np.logical_and, "or": np.logical_or}[ins.modifiers[0]]
    dst, a, b, c, table, *extra = ins.operands
    if not isinstance(table, nodes.Imm):
        d.refuse("the lop3 table must be an immediate")
    assert isinstance(table, nodes.Imm)
    fn = lop3(int(table.value))
    sources = [d.src(x, "b32") for x in (a, b, c)]
    if join is None:
        return d.emit(fn, dst, U32, sources)
    if not isinstance(dst, nodes.Pair):
        d.refuse("lop3 with a boolean operator needs d|p")
    assert isinstance(dst, nodes.Pair)
    slot, stored = d.dst(dst.first, "b32")
    p_slot, _ = d.dst(dst.second, "pred")
    q = d.src(extra[0], "pred")
    d.op.pure = True

    def run(S: Any, idx: Any) -> None:
        value = fn(*(s.take(S, idx) for s in sources))
        holds = join(value != 0, q.take(S, idx))
        if slot >= 0:
            S.set(slot, idx, value.view(stored))
        if p_slot >= 0:
            S.set(p_slot, idx, holds)

    return run


def permute(d: Decoder, ins: nodes.Instruction) -> Core:
    if ins.modifiers[0] != "b32" or len(ins.modifiers) > 2:
        d.refuse("unknown prmt")
    mode = ins.modifiers[1] if len(ins.modifiers) == 2 else None
    if mode is not None and mode not in PRMT_MODES:
        d.refuse(f"unknown prmt mode .{mode}")
    dst, *rest = ins.operands
    return d.emit(prmt(mode), dst, U32, [d.src(x, "b32") for x in rest])


def find_nth(d: Decoder, ins: nodes.Instruction) -> Core:
    """fns.b32 d, mask, base, offset: the position of the offset-th set bit from base on, up or down."""
    dst, mask, base, offset = ins.operands

    def fn(m: Array, b: Array, n: Array) -> Array:
        m, b, n = np.broadcast_arrays(m, b, n)
        places = np.arange(32)
        bits = (m[:, None] >> places.astype(U32) & 1).astype(bool)
        start, count = b.astype(I64)[:, None], n.astype(I64)[:, None]
        up = bits & (places >= start)
        down = (bits & (places <= start))[:, ::-1]
        rank_up, rank_down = np.cumsum(up, axis=1), np.cumsum(down, axis=1)
        hit_up, hit_down = up & (rank_up == count), down & (rank_down == -count)
        found = np.where(count[:, 0] > 0, np.where(hit_up.any(1), hit_up.argmax(1), -1),
                         np.where(hit_down.any(1), 31 - hit_down.argmax(1), -1))  # fmt: skip
        here = (m >> np.minimum(b, const(31, U32)) & 1).astype(bool) & (b < 32)
        return np.where(n == 0, np.where(here, b.astype(I64), -1), found).astype(I32).view(U32)

    return d.emit(fn, dst, U32, [d.src(mask, "b32"), d.src(base, "b32"), d.src(offset, "s32")])


def dot(d: Decoder, ins: nodes.Instruction) -> Core:
    halves = next((m for m in ins.modifiers if m in ("lo", "hi")), None)
    a_type, b_type = (m for m in ins.modifiers if m not in ("lo", "hi"))
    dst, *rest = ins.operands
    fn = dot_product(a_type, b_type, halves)
    return d.emit(fn, dst, U32, [d.src(x, "b32") for x in rest])


def sad(d: Decoder, ins: nodes.Instruction) -> Core:
    type_, _ = split(d, ins, set())
    dst, *rest = ins.operands
    fn: Fn = lambda a, b, c: np.where(a > b, a - b, b - a) + c  # noqa: E731
    return d.emit(fn, dst, DTYPE[type_], [d.src(x, type_) for x in rest])


def bmsk(d: Decoder, ins: nodes.Instruction) -> Core:
    mode = ins.modifiers[0]
    dst, *rest = ins.operands

    def fn(a: Array, b: Array) -> Array:
        position, length = a.astype(I64), b.astype(I64)
        if mode == "wrap":
            position, length = position & 31, length & 31
        return np.where(position > 31, const(0, U64), low_mask(length) << np.minimum(position, 63).astype(U64)).astype(U32)

    return d.emit(fn, dst, U32, [d.src(x, "u32") for x in rest])


def szext(d: Decoder, ins: nodes.Instruction) -> Core:
    mode, type_ = ins.modifiers
    dst, *rest = ins.operands
    dtype = DTYPE[type_]

    def fn(a: Array, b: Array) -> Array:
        n = b.astype(I64) & 31 if mode == "wrap" else np.minimum(b.astype(I64), 32)
        unused = 64 - n
        moved = a.astype(I64) << np.minimum(unused, 63)
        if type_[0] == "u":
            moved = (moved.view(U64) >> np.minimum(unused, 63).astype(U64)).view(I64)
        else:
            moved = moved >> np.minimum(unused, 63)
        return np.where(n == 0, 0, moved).astype(dtype)

    return d.emit(fn, dst, dtype, [d.src(rest[0], type_), d.src(rest[1], "u32")])


# -- approximate functions: evaluated in f64, rounded once


def through_f64(fn: Fn) -> Fn:
    return lambda x: floats.canonical(fn(x.astype(F64)).astype(F32))


def _trig(fn: Fn) -> Fn:
    # the hardware flushes subnormal arguments with and without .ftz
    return lambda x: floats.canonical(fn(floats.flush(x).astype(F64)).astype(F32))


FUNCTIONS: dict[str, Fn] = {
    "ex2": through_f64(np.exp2),
    "lg2": through_f64(np.log2),
    "rsqrt": through_f64(lambda x: 1.0 / np.sqrt(x)),
    "tanh": through_f64(np.tanh),
    "sin": _trig(np.sin),
    "cos": _trig(np.cos),
    "sqrt": lambda x: floats.canonical(np.sqrt(x)),
    "rcp": lambda x: floats.canonical(np.ones(1, F32) / x),
}


def function(d: Decoder, ins: nodes.Instruction) -> Core:
    """ex2, lg2, rsqrt, tanh, sin, cos, sqrt, rcp"""
    name = ins.opcode
    type_, mods = split(d, ins, {"approx", "ftz", *ROUNDING})
    dst, a = ins.operands
    source = d.src(a, type_)
    mode = next(iter(mods & ROUNDING), "rn")
    if not mods & {"approx", *ROUNDING}:
        d.refuse("a rounding modifier or .approx is required")
    if type_ == "f64":
        double: dict[str, Any] = {"sqrt": np.sqrt, "rcp": lambda x: 1.0 / x, "rsqrt": lambda x: 1.0 / np.sqrt(x)}
        if name not in double:
            d.refuse(f"{name} of .f64")
        if mode != "rn":
            return d.emit(floats.directed64(name, mode), dst, F64, [source])
        return d.emit(double[name], dst, F64, [source])
    fn = FUNCTIONS[name] if mode == "rn" else floats.directed(name, mode)
    if type_ == "f32":
        return d.emit(wrap_float(fn, mods), dst, F32, [source])
    if type_ not in ("f16", "f16x2", "bf16", "bf16x2") or name not in ("ex2", "tanh"):
        d.refuse(f"{name} of .{type_}")
    if "ftz" in mods and type_.startswith("bf16"):
        fn = wrap_float(fn, {"ftz"})  # bf16 has the subnormals of f32
    lifted = narrow(fn, type_)
    if "ftz" in mods and type_.startswith("f16"):
        lifted = flushed_f16(lifted, type_)
    return d.emit(lifted, dst, DTYPE[type_], [source])


def testp(d: Decoder, ins: nodes.Instruction) -> Core:
    kind, type_ = ins.modifiers
    tiny = {"f32": 2.0**-126, "f64": 2.0**-1022}[type_]
    fn: Any = {
        "finite": np.isfinite, "infinite": np.isinf, "number": lambda x: x == x, "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < tiny),
    }[kind]  # fmt: skip
    return d.emit(fn, ins.operands[0], DTYPE["pred"], [d.src(ins.operands[1], type_)])


def copysign(d: Decoder, ins: nodes.Instruction) -> Core:
    type_ = ins.modifiers[-1]
    dst, a, b = ins.operands
    return d.emit(lambda x, y: np.copysign(y, x), dst, DTYPE[type_], [d.src(a, type_), d.src(b, type_)])


BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "rem", "min", "max", "and", "or", "xor"), binary_arithmetic),
    **dict.fromkeys(("mad", "fma"), multiply_add),
    **dict.fromkeys(("addc", "subc", "madc"), carry_arithmetic),
    **dict.fromkeys(("mul24", "mad24"), mul24),
    **dict.fromkeys(("abs", "neg", "not", "cnot", "popc", "clz", "brev", "bfind"), unary),
    **dict.fromkeys(("shl", "shr"), shift),
    **dict.fromkeys(("bfe", "bfi", "shf"), bit_fields),
    **dict.fromkeys(("ex2", "lg2", "rsqrt", "tanh", "sin", "cos", "sqrt", "rcp"), function),
    **dict.fromkeys(("dp4a", "dp2a"), dot),
    "fns": find_nth, "lop3": logic3, "prmt": permute, "sad": sad, "bmsk": bmsk, "szext": szext, "testp": testp, "copysign": copysign,
}  # fmt: skip
