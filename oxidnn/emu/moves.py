"""Comparison, selection, moves and address conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from oxidnn.emu import floats
from oxidnn.emu.alu import FLOAT, Fn, split
from oxidnn.emu.decode import CLOCKS, DTYPE, Core, Decoder
from oxidnn.emu.floats import F16, F32, U16, U64
from oxidnn.emu.integers import const
from oxidnn.emu.memory import LOCAL_WINDOW, SHARED_WINDOW, Array
from oxidnn.ptx import nodes

# -- comparison and selection

COMPARE_INTEGER: dict[str, Fn] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
COMPARE_FLOAT: dict[str, Fn] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": np.not_equal, "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip
COMBINE: dict[str, Fn] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(d: Decoder, ins: nodes.Instruction, type_: str, mods: list[str]) -> tuple[Fn, str | None]:
    """The comparison on arrays of DTYPE[type_] and the boolean operator, if any."""
    name, *rest = mods
    combine = None
    for mod in rest:
        if mod in COMBINE:
            combine = mod
        elif mod != "ftz":
            d.refuse(f"unknown modifier .{mod}")
    table = COMPARE_FLOAT if type_ in FLOAT else COMPARE_INTEGER
    if name not in table:
        d.refuse(f"unknown comparison .{name}")
    fn = table[name]
    if type_ == "f16":
        inner = fn
        fn = lambda a, b: inner(a.astype(F32), b.astype(F32))  # noqa: E731
    elif type_ == "bf16":
        inner = fn
        fn = lambda a, b: inner(floats.bf16_to_f32(a), floats.bf16_to_f32(b))  # noqa: E731
    elif "ftz" in rest:
        inner = fn
        fn = lambda a, b: inner(floats.flush(a), floats.flush(b))  # noqa: E731
    return fn, combine


def widened(type_: str) -> Fn:
    """Words of f16x2 or bf16x2 as (n, 2) f32."""
    if type_ == "f16x2":
        return lambda x: x.view(F16).astype(F32).reshape(-1, 2)
    return lambda x: floats.bf16_to_f32(x.view(U16)).reshape(-1, 2)


def setp(d: Decoder, ins: nodes.Instruction) -> Core:
    *mods, type_ = ins.modifiers
    first, a, b, *extra = ins.operands
    pair = isinstance(first, nodes.Pair)
    p, q = (first.first, first.second) if isinstance(first, nodes.Pair) else (first, None)
    if type_ in ("f16x2", "bf16x2"):
        return setp_halves(d, ins, p, q)
    fn, combine = comparison(d, ins, type_, mods)
    sources = [d.src(a, type_), d.src(b, type_)]
    if combine:
        sources.append(d.src(extra[0], "pred"))
    if not pair:
        if combine is None:
            return d.emit(fn, p, DTYPE["pred"], sources)
        join = COMBINE[combine]
        return d.emit(lambda x, y, c: join(fn(x, y), c), p, DTYPE["pred"], sources)
    assert q is not None
    p_slot, q_slot = d.dst(p, "pred")[0], d.dst(q, "pred")[0]
    d.op.pure = True

    def run(S: Any, idx: Any) -> None:
        x, y, *c = (s.take(S, idx) for s in sources)
        t = fn(x, y)
        yes, no = t, ~t
        if combine:
            yes, no = COMBINE[combine](yes, c[0]), COMBINE[combine](no, c[0])
        if p_slot >= 0:
            S.set(p_slot, idx, yes)
        if q_slot >= 0:
            S.set(q_slot, idx, no)

    return run


def setp_halves(d: Decoder, ins: nodes.Instruction, p: Any, q: Any) -> Core:
    *mods, type_ = ins.modifiers
    fn, combine = comparison(d, ins, type_, mods)
    sources = [d.src(x, type_) for x in ins.operands[1:3]]
    if combine:
        sources.append(d.src(ins.operands[3], "pred"))
    p_slot, q_slot = d.dst(p, "pred")[0], d.dst(q, "pred")[0] if q is not None else -1
    d.op.pure = True
    widen = widened(type_)

    def run(S: Any, idx: Any) -> None:
        x, y, *c = (s.take(S, idx) for s in sources)
        t = fn(widen(x), widen(y))
        for slot, column in ((p_slot, 0), (q_slot, 1)):
            if slot < 0:
                continue
            value = t[:, column].copy()
            S.set(slot, idx, COMBINE[combine](value, c[0]) if combine else value)

    return run


def set_(d: Decoder, ins: nodes.Instruction) -> Core:
    *mods, to, type_ = ins.modifiers
    dst, a, b, *extra = ins.operands
    fn, combine = comparison(d, ins, type_, mods)
    sources = [d.src(a, type_), d.src(b, type_)]
    if combine:
        sources.append(d.src(extra[0], "pred"))
    dtype = DTYPE[to]
    one = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}.get(to, -1)
    size = 2 if to.endswith("x2") else dtype.itemsize
    yes, no = const(one, np.dtype(f"u{size}")), const(0, np.dtype(f"u{size}"))
    if to.endswith("x2") != type_.endswith("x2"):
        d.refuse(f"set from .{type_} to .{to}")
    if type_.endswith("x2"):
        inner, halves = fn, widened(type_)
        fn = lambda x, y: inner(halves(x), halves(y))  # noqa: E731

    def render(t: Array) -> Array:
        return np.ascontiguousarray(np.where(t, yes, no)).view(dtype).reshape(-1)

    if combine:
        join = COMBINE[combine]
        return d.emit(lambda x, y, c: render(join(fn(x, y), c[:, None] if to.endswith("x2") else c)), dst, dtype, sources)
    return d.emit(lambda x, y: render(fn(x, y)), dst, dtype, sources)


def selp(d: Decoder, ins: nodes.Instruction) -> Core:
    type_, _ = split(d, ins, set())
    dst, a, b, c = ins.operands
    sources = [d.src(c, "pred"), d.src(a, type_), d.src(b, type_)]
    d.op.lenient = True
    d.op.info["select"] = sources
    return d.emit(floats.select, dst, DTYPE[type_], sources)


def slct(d: Decoder, ins: nodes.Instruction) -> Core:
    type_, by = [m for m in ins.modifiers if m != "ftz"]
    dst, a, b, c = ins.operands
    sources = [d.src(c, by), d.src(a, type_), d.src(b, type_)]
    return d.emit(lambda n, x, y: floats.select(n >= 0, x, y), dst, DTYPE[type_], sources)


# -- moves


def mov(d: Decoder, ins: nodes.Instruction) -> Core:
    type_ = ins.modifiers[-1]
    dst, a = ins.operands
    if isinstance(a, nodes.Reg) and a.name in CLOCKS:
        return clock(d, dst, a.name)
    if type_ == "b128" and (isinstance(a, nodes.Vec) or isinstance(dst, nodes.Vec)):
        return move_128(d, dst, a)
    if isinstance(a, nodes.Vec):
        return pack(d, dst, a, type_)
    if isinstance(dst, nodes.Vec):
        return unpack(d, dst, a, type_)
    dtype = DTYPE[type_]
    return d.emit(copy, dst, dtype, [d.src(a, type_)])


def copy(x: Array) -> Array:
    # masked writes are in place, so no two registers may share an array; uniform arrays are never written in place
    return x if x.size == 1 else x.copy()


def clock(d: Decoder, dst: nodes.Operand, name: str) -> Core:
    kind = CLOCKS[name]
    slot, stored = d.dst(dst, kind)
    high = name.endswith("_hi")

    def run(S: Any, idx: Any) -> None:
        ticks = S.ticks()
        S.set(slot, idx, np.array([ticks >> 32 if high else ticks & ((1 << 8 * stored.itemsize) - 1)], U64).astype(stored))

    return run


def move_128(d: Decoder, dst: nodes.Operand, a: nodes.Operand) -> Core:
    """mov.b128 between a 128-bit register and two 64-bit ones."""
    if isinstance(a, nodes.Vec):
        sources = [d.src(x, "b64") for x in a.items]

        def join(low: Array, high: Array) -> Array:
            out = np.empty((max(len(low), len(high)), 2), U64)
            out[:, 0], out[:, 1] = low, high
            return out.view(np.complex128).reshape(-1)

        return d.emit(join, dst, DTYPE["b128"], sources)
    source = d.src(a, "b128")
    slots = [d.dst(x, "b64") for x in d.items(dst)]
    d.op.pure = True

    def run(S: Any, idx: Any) -> None:
        parts = source.take(S, idx).view(U64).reshape(-1, 2)
        for i, (slot, stored) in enumerate(slots):
            if slot >= 0:
                S.set(slot, idx, parts[:, i].copy().view(stored))

    return run


def pack(d: Decoder, dst: nodes.Operand, vector: nodes.Vec, type_: str) -> Core:
    """mov.b32 d, {lo, hi}: the first element is the least significant."""
    total = DTYPE[type_]
    each = np.dtype(f"u{total.itemsize // len(vector.items)}")
    sources = [d.src(x, f"b{each.itemsize * 8}") for x in vector.items]
    if each.itemsize == 4:

        def two(lo: Array, hi: Array) -> Array:
            return lo.astype(U64) | (hi.astype(U64) << const(32, U64))

        return d.emit(two, dst, U64, sources)

    def join(*parts: Array) -> Array:
        out = np.empty((max(len(p) for p in parts), len(parts)), each)
        for i, part in enumerate(parts):
            out[:, i] = part
        return out.view(total).reshape(-1)

    return d.emit(join, dst, total, sources)


def unpack(d: Decoder, vector: nodes.Vec, a: nodes.Operand, type_: str) -> Core:
    total = DTYPE[type_]
    each = np.dtype(f"u{total.itemsize // len(vector.items)}")
    source = d.src(a, type_, np.dtype(f"u{total.itemsize}"))
    slots = [d.dst(x, f"b{each.itemsize * 8}") for x in vector.items]
    d.op.pure = True

    def run(S: Any, idx: Any) -> None:
        parts = source.take(S, idx).view(each).reshape(-1, len(slots))
        for i, (slot, stored) in enumerate(slots):
            if slot >= 0:
                S.set(slot, idx, parts[:, i].copy().view(stored))

    return run


def cvta(d: Decoder, ins: nodes.Instruction) -> Core:
    """cvta{.to}.space: shared and local live in windows of the generic space, global and param are the identity."""
    to = "to" in ins.modifiers
    space = next(m for m in ins.modifiers if m not in ("to", "u64", "u32")).split("::")[0]
    dst, a = ins.operands
    if ins.modifiers[-1] != "u64":
        d.refuse("addresses have 64 bits")
    source = d.src(a, "u64")
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0)
    if space not in ("global", "const", "param", "shared", "local"):
        d.refuse(f"unknown space .{space}")
    if window == 0:
        return d.emit(copy, dst, U64, [source])
    offset = const(-window if to else window, U64)
    return d.emit(lambda x: x + offset, dst, U64, [source])


def isspacep(d: Decoder, ins: nodes.Instruction) -> Core:
    space = ins.modifiers[0].split("::")[0]
    dst, a = ins.operands

    def fn(x: Array) -> Array:
        local, shared = x >= const(LOCAL_WINDOW, U64), x >= const(SHARED_WINDOW, U64)
        return {"local": local, "shared": shared & ~local}.get(space, ~shared)

    return d.emit(fn, dst, DTYPE["pred"], [d.src(a, "u64")])


BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {
    "setp": setp, "set": set_, "selp": selp, "slct": slct, "mov": mov, "cvta": cvta, "isspacep": isspacep,
}  # fmt: skip
