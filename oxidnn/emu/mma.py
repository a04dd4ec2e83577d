"""mma.sync and the matrix moves: ldmatrix, stmatrix, movmatrix.

One rule gives every fragment (lane = 4g + q, w elements per register, register r, element e in it):
    A  row g + 8 (r mod M/8), column w q + e + 4 w (r div M/8)        B  row (of K) w q + e + 4 w r, column g
    C  32 or 64 bits per element: row g + 8 (i div 2), column 2 q + i mod 2;  f16: row g + 8 r, column 2 q + e
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu import tensor_core
from oxidnn.emu.access import Access, mark_ready, unwritten_shared, window_index
from oxidnn.emu.decode import DTYPE, Core, Decoder
from oxidnn.emu.floats import F64, I64, U32
from oxidnn.emu.memory import SHARED_WINDOW, Array, all_ready
from oxidnn.emu.shuffle import Warps
from oxidnn.ptx import nodes

if TYPE_CHECKING:
    from oxidnn.emu.machine import State

OPERAND_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "e4m3": 8, "e5m2": 8, "f64": 64}
SHAPES = {
    "f16": {(16, 8, 8), (16, 8, 16)}, "bf16": {(16, 8, 8), (16, 8, 16)}, "tf32": {(16, 8, 4), (16, 8, 8)},
    **dict.fromkeys(("s8", "u8"), {(8, 8, 16), (16, 8, 16), (16, 8, 32)}),
    **dict.fromkeys(("s4", "u4"), {(8, 8, 32), (16, 8, 32), (16, 8, 64)}), "e4m3": {(16, 8, 32), (16, 8, 16)},
    "e5m2": {(16, 8, 32), (16, 8, 16)}, "f64": {(8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16)},
}  # fmt: skip
RESULTS = {
    "f16": {"f16", "f32"}, "bf16": {"f32"}, "tf32": {"f32"}, **dict.fromkeys(("s8", "u8", "s4", "u4"), {"s32"}), "e4m3": {"f32", "f16"},
    "e5m2": {"f32", "f16"}, "f64": {"f64"},
}  # fmt: skip


def fragment_a(registers: Array, m: int) -> Array:
    """(registers, warps, 32, w) to (warps, M, K)."""
    n, warps, _, w = registers.shape
    t = registers.reshape(n // (m // 8), m // 8, warps, 8, 4, w).transpose(2, 1, 3, 0, 4, 5)
    return np.ascontiguousarray(t).reshape(warps, m, -1)


def fragment_b(registers: Array) -> Array:
    """(registers, warps, 32, w) to (warps, N, K)."""
    n, warps, _, w = registers.shape
    t = registers.reshape(n, warps, 8, 4, w).transpose(1, 2, 0, 3, 4)
    return np.ascontiguousarray(t).reshape(warps, 8, -1)


def fragment_c(registers: Array, m: int) -> Array:
    """(registers, warps, 32, elements per register) to (warps, M, 8)."""
    n, warps, _, e = registers.shape
    if e == 1:
        t = registers.reshape(m // 8, 2, warps, 8, 4).transpose(2, 0, 3, 4, 1)
    else:
        t = registers.reshape(n, warps, 8, 4, 2).transpose(1, 0, 2, 3, 4)
    return np.ascontiguousarray(t).reshape(warps, m, 8)


def registers_d(d: Array, packed: bool) -> Array:
    """(warps, M, 8) back to (registers, warps, 32) or, packed, (registers, warps, 32, 2)."""
    warps, m, _ = d.shape
    if packed:
        return np.ascontiguousarray(d.reshape(warps, m // 8, 8, 4, 2).transpose(1, 0, 2, 3, 4))
    t = d.reshape(warps, m // 8, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    return np.ascontiguousarray(t).reshape(m // 4, warps, 32)


def stacked(S: State, warps: Warps, sources: list[Any], idx: Array | None, element: np.dtype | None) -> Array:
    """Registers as (registers, warps, 32, elements); nibbles, the lowest first, as uint8."""
    first = sources[0].get(S).dtype
    out = np.empty((len(sources), warps.count, 32), first)
    for i, source in enumerate(sources):
        out[i] = warps.spread(source.take(S, idx))
    if element is None:
        octets = out.view(np.uint8)
        return np.stack((octets & 15, octets >> 4), axis=-1).reshape(len(sources), warps.count, 32, 8)
    return out.view(element).reshape(len(sources), warps.count, 32, -1)


def mma(d: Decoder, ins: nodes.Instruction) -> Core:
    mods = list(ins.modifiers)
    shape = next((m for m in mods if re.fullmatch(r"m\d+n\d+k\d+", m)), None)
    if mods[:2] != ["sync", "aligned"] or shape is None:
        d.refuse("only mma.sync.aligned of a shape")
    assert shape is not None
    m, n, k = (int(x) for x in re.findall(r"\d+", shape))
    types = mods[-4:]
    rest = [x for x in mods[2:-4] if x != shape]
    if rest[:2] != ["row", "col"] or set(rest[2:]) - {"satfinite", "kind::f8f6f4"}:
        d.refuse(f"unknown modifiers {rest}")
    result, a_type, b_type, c_type = types
    if a_type not in SHAPES or b_type not in SHAPES or OPERAND_BITS[a_type] != OPERAND_BITS[b_type]:
        d.refuse(f"operands .{a_type} and .{b_type}")
    if (m, n, k) not in SHAPES[a_type] or result not in RESULTS[a_type] or c_type != result:
        d.refuse(f"{shape} of .{result}.{a_type}.{b_type}.{c_type}")
    saturates = "satfinite" in rest
    bits = OPERAND_BITS[a_type]
    w = max(1, 32 // bits)
    register = "b64" if a_type == "f64" else "b32"
    count = k // (4 * w)
    packed = result == "f16"
    sizes = (m // 8 * (1 if packed else 2), m // 8 * count, count, m // 8 * (1 if packed else 2))
    operands = [d.items(x) for x in ins.operands]
    if len(operands) != 4 or tuple(len(x) for x in operands) != sizes:
        d.refuse(f"register counts {tuple(len(x) for x in operands)} (expected {sizes})")
    accumulator = {"f32": "f32", "f16": "b32", "s32": "s32", "f64": "f64"}[result]
    a = [d.src(x, register) for x in operands[1]]
    b = [d.src(x, register) for x in operands[2]]
    c = [d.src(x, accumulator) for x in operands[3]]
    targets = [d.dst(x, accumulator) for x in operands[0]]
    element = np.dtype(f"u{bits // 8}") if bits >= 8 else None  # None: nibbles
    c_element = np.dtype(np.float16) if packed else DTYPE[accumulator]
    d.op.kind = "warp"

    keys = [(role, type_, tuple(x.slot for x in sources)) for role, type_, sources in
            (("a", a_type, a), ("b", b_type, b), ("c", result, c))]  # fmt: skip
    result_key = ("c", result, tuple(slot for slot, _ in targets))

    def operand(S: State, key: Any, sources: list[Any], make: Callable[[], Array], idx: Array | None) -> Array:
        """The dense fragment of some registers, made again only when one of them has changed."""
        if idx is not None:
            return make()
        R = S.R
        known = S.fragments.get(key)
        if known is not None and all(R[s.slot] is x for s, x in zip(sources, known[0], strict=True)):
            return known[1]
        found = make()
        S.fragments[key] = (tuple(R[s.slot] for s in sources), found)
        return found

    def run(S: State, idx: Array | None) -> None:
        warps = Warps(S, idx)
        S.counters.products += warps.count * m * 8 * k

        def make_a() -> Array:
            return tensor_core.decode(fragment_a(stacked(S, warps, a, idx, element), m), a_type)

        def make_b() -> Array:
            return tensor_core.decode(fragment_b(stacked(S, warps, b, idx, element)), b_type)

        def make_c() -> Array:
            return fragment_c(stacked(S, warps, c, idx, c_element), m)

        A = operand(S, keys[0], a, make_a, idx)
        B = operand(S, keys[1], b, make_b, idx)
        C = operand(S, keys[2], c, make_c, idx)
        if result == "s32":
            total = (A @ B.transpose(0, 2, 1)).astype(I64) + C
            D = np.clip(total, -(1 << 31), (1 << 31) - 1).astype(np.int32) if saturates else total.astype(np.int32)
        elif result == "f64":
            D = C
            for i in range(k):  # a chain of fused multiply-adds in order of k
                x = np.broadcast_to(A[:, :, None, i], C.shape).reshape(-1)
                y = np.broadcast_to(B[:, None, :, i], C.shape).reshape(-1)
                D = tensor_core.floats.fma64(x, y, D.reshape(-1)).reshape(C.shape)
        else:
            D = tensor_core.multiply(A, B, C.astype(F64), (a_type, b_type), result, S.exact_mma)
        out = registers_d(D, packed)
        for i, (slot, stored) in enumerate(targets):
            if slot >= 0:
                row = out[i].view(U32).reshape(-1) if packed else out[i].reshape(-1)
                row = row if warps.flat is None else row.take(warps.flat)
                S.set(slot, idx, row.view(stored))
        if idx is None and min(result_key[2]) >= 0:
            S.fragments[result_key] = (tuple(S.R[slot] for slot, _ in targets), D)

    return run


# -- matrix moves


def _rows(S: State, idx: Array | None, warps: Warps, base: Any, access: Access, matrices: int) -> tuple[Array, Array]:
    """16-byte indices (warps * matrices * 8) of the rows whose addresses lanes 0 to 8 matrices - 1 give, and the
    positions of those lanes."""
    a = base.take(S, idx)
    if a.dtype == np.uint64 and int(a.max()) >= SHARED_WINDOW:
        a = a - np.uint64(SHARED_WINDOW)
    used = 8 * matrices
    addresses = np.ascontiguousarray(warps.spread(a)[:, :used]).reshape(-1)
    positions = np.arange(S.N, dtype=np.int64) if idx is None else idx
    lanes = np.ascontiguousarray(warps.spread(positions)[:, :used]).reshape(-1)
    offsets = S.shared_offset
    index = window_index(S, addresses, access, S.shared, offsets if offsets.size == 1 else offsets.take(lanes), "shared")
    return index, lanes


def _matrix_form(d: Decoder, ins: nodes.Instruction) -> tuple[int, bool]:
    mods = set(ins.modifiers)
    count = {"x1": 1, "x2": 2, "x4": 4}[next(m for m in ins.modifiers if m in ("x1", "x2", "x4"))]
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"}
    if mods - known or not {"sync", "aligned", "m8n8", "b16"} <= mods:
        d.refuse("unknown form")
    return count, "trans" in mods


def ldmatrix(d: Decoder, ins: nodes.Instruction) -> Core:
    count, transposed = _matrix_form(d, ins)
    targets = [d.dst(x, "b32") for x in d.items(ins.operands[0])]
    if len(targets) != count:
        d.refuse(f"{len(targets)} registers for {count} matrices")
    base, offset = d.address(ins.operands[1], "shared")
    access = Access(offset, 16, "read")
    d.op.kind = "warp"

    def run(S: State, idx: Array | None) -> None:
        warps = Warps(S, idx)
        index, lanes = _rows(S, idx, warps, base, access, count)
        S.group = lanes  # faults count in rows
        if S.shared.shadow is not None and not all_ready(S.shared.shadow, index, 16):
            unwritten_shared(S, index, 16)
        if S.race is not None:
            S.race.access(S, index, access, lanes)
        if S.bank is not None:
            S.bank.rows(S, index, count)
        S.counters.shared_read += 16 * len(index)
        data = S.shared.views[16].take(index)
        if transposed:
            square = data.view(np.uint16).reshape(warps.count, count, 8, 8).transpose(1, 0, 3, 2)
            out = np.ascontiguousarray(square).view(U32).reshape(count, warps.count, 32)
        else:
            out = np.ascontiguousarray(data.view(U32).reshape(warps.count, count, 32).transpose(1, 0, 2))
        for i, (slot, stored) in enumerate(targets):
            if slot >= 0:
                row = out[i].reshape(-1)
                S.set(slot, idx, (row if warps.flat is None else row.take(warps.flat)).view(stored))

    return run


def stmatrix(d: Decoder, ins: nodes.Instruction) -> Core:
    count, transposed = _matrix_form(d, ins)
    base, offset = d.address(ins.operands[0], "shared")
    sources = [d.src(x, "b32") for x in d.items(ins.operands[1])]
    if len(sources) != count:
        d.refuse(f"{len(sources)} registers for {count} matrices")
    access = Access(offset, 16, "write")
    d.op.kind = "warp"

    def run(S: State, idx: Array | None) -> None:
        warps = Warps(S, idx)
        index, lanes = _rows(S, idx, warps, base, access, count)
        S.group = lanes
        words = np.empty((warps.count, count, 32), U32)
        for i, source in enumerate(sources):
            words[:, i] = warps.spread(source.take(S, idx))
        if transposed:
            halves = words.view(np.uint16).reshape(warps.count, count, 8, 8).transpose(0, 1, 3, 2)
            words = np.ascontiguousarray(halves).view(U32)
        if S.race is not None:
            S.race.access(S, index, access, lanes)
        if S.bank is not None:
            S.bank.rows(S, index, count)
        S.counters.shared_written += 16 * len(index)
        S.shared.views[16][index] = words.reshape(-1).view(np.complex128)
        if S.shared.shadow is not None:
            mark_ready(S.shared.shadow, index, 16)

    return run


def movmatrix(d: Decoder, ins: nodes.Instruction) -> Core:
    if ins.modifiers != ("sync", "aligned", "m8n8", "trans", "b16"):
        d.refuse("unknown form")
    slot, stored = d.dst(ins.operands[0], "b32")
    source = d.src(ins.operands[1], "b32")
    d.op.kind = "warp"

    def run(S: State, idx: Array | None) -> None:
        warps = Warps(S, idx)
        x = np.ascontiguousarray(warps.spread(source.take(S, idx)))
        t = np.ascontiguousarray(x.view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)).view(U32).reshape(-1, 32)
        S.set(slot, idx, warps.collect(t).view(stored))

    return run


BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {
    "mma": mma, "ldmatrix": ldmatrix, "stmatrix": stmatrix, "movmatrix": movmatrix,
}  # fmt: skip
