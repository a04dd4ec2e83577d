"""wgmma: products of a warpgroup (128 threads) on tiles in shared memory, asynchronous in commit groups.

A product is computed when it is issued. The accumulators live in a dense array until a wait retires the group; only
then do the registers hold them. Until then nobody may touch these registers, nor write the registers of A.

Descriptor fields, bits: 0-13 start >> 4, 16-29 leading (LBO) and 32-45 stride offset (SBO) >> 4, 49-51 base offset,
62-63 swizzle. The 16-byte unit of row r, k chunk c (K-major), or of k row k, element chunk m (MN-major; s = span):

    K-major   swizzled  start + r/8 SBO + r%8 s + 16 c             none  start + r/8 SBO + 16 (r%8) + c LBO
    MN-major  swizzled  start + m/(s/16) LBO + k/8 SBO + k%8 s + 16 (m % (s/16))
              none      start + m SBO + k/8 LBO + 16 (k%8)
    swizzle   address bits 4-6 ^= bits 7-9 (128), 4-5 ^= 7-8 (64), 4 ^= 7 (32), after subtracting the base offset from bits 7-9
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu import floats, tensor_core
from oxidnn.emu.access import unwritten_shared
from oxidnn.emu.decode import Core, Decoder
from oxidnn.emu.floats import F16, F64, I64
from oxidnn.emu.memory import SHARED_BASE, Array, Fault, all_ready
from oxidnn.ptx import nodes

if TYPE_CHECKING:
    from oxidnn.emu.machine import Op, State

GROUP = 128
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
SPAN = {0: 0, 1: 128, 2: 64, 3: 32}
SWIZZLE_MASK = {0: 0, 128: 7, 64: 3, 32: 1}


@lru_cache(maxsize=4096)
def descriptor_units(descriptor: int, rows: int, mn_major: bool) -> Array:
    """16-byte units, counted from the start of the CTA's window: (rows, 2) K-major, (16, rows / 8) MN-major."""
    start = (descriptor & 0x3FFF) << 4
    leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    base, span = descriptor >> 49 & 7, SPAN[descriptor >> 62 & 3]
    if mn_major:
        k, m = np.arange(16)[:, None], np.arange(rows // 8)[None, :]
        if span:
            per = span // 16
            address = start + m // per * leading + k // 8 * stride + k % 8 * span + m % per * 16
        else:
            address = start + m * stride + k // 8 * leading + k % 8 * 16
    else:
        r, c = np.arange(rows)[:, None], np.arange(2)[None, :]
        address = start + r // 8 * stride + (r % 8 * span + c * 16 if span else r % 8 * 16 + c * leading)
    if span:
        address = address ^ (((address >> 7) - base) & SWIZZLE_MASK[span]) << 4
    units = (address - SHARED_BASE) >> 4
    units.flags.writeable = False
    return units


class Accumulator:
    """The accumulators in one set of registers, for all warps of a batch; row 16 w + ... of a warpgroup is warp w's."""

    def __init__(self, slots: tuple[int, ...], warps: int, n: int, dtype: np.dtype) -> None:
        self.slots = slots
        self.dense = np.zeros((warps, 16, n), dtype)
        self.valid = np.zeros(warps, np.bool_)  # in flight: the dense array holds them, not the registers
        self.group = np.zeros(warps, np.int64)  # commit group of the last product


class Products:
    """What the warpgroups of a batch have in flight; arrays are by warp of the batch."""

    def __init__(self, S: State) -> None:
        self.warps = S.ctas * S.warps_per_cta
        self.committed = np.zeros(self.warps, np.int64)
        self.is_fenced = np.zeros(self.warps, np.bool_)
        self.accumulators: dict[tuple[int, ...], Accumulator] = {}
        self.reading: dict[int, Array] = {}  # slot of an A register -> commit group that reads it, plus one
        self.dirty: dict[int, Array] = {}  # slot -> warps that have written it since their last wgmma.fence

    def touch(self, S: State, slots: tuple[int, ...], idx: Any) -> None:
        """Other instructions have written these registers: a fence must come before the next product uses them."""
        warps = S.warp if idx is None else S.warp.take(idx)
        for slot in slots:
            mask = self.dirty.get(slot)
            if mask is None:
                mask = self.dirty[slot] = np.zeros(self.warps, np.bool_)
            mask[warps] = True

    def refresh(self, S: State) -> None:
        busy = {slot for acc in self.accumulators.values() if acc.valid.any() for slot in acc.slots}
        busy.update(slot for slot, groups in self.reading.items() if groups.any())
        S.busy = busy

    def check(self, S: State, op: Op, idx: Any) -> None:
        """Fault if `op` touches a register that a product in flight writes, or writes one that it reads."""
        if op.guard is not None:
            mask, count = S.guard_mask(op.guard, idx)
            if count == 0:
                return
            if mask is not None:
                idx = np.flatnonzero(mask) if idx is None else idx[mask]
        warps = S.warp if idx is None else S.warp.take(idx)
        for acc in self.accumulators.values():
            if not acc.valid.any():
                continue
            for slot in (*op.reads, *op.writes):
                if slot in acc.slots and acc.valid.take(warps).any():
                    lanes = np.flatnonzero(acc.valid.take(warps))
                    verb = "read" if slot in op.reads else "written"
                    raise Fault("async", f"register {S.program.slots[slot].name} is {verb} while a wgmma in flight accumulates into it "
                                         "(wgmma.wait_group comes first)", np.array([0]),
                                lanes if idx is None else idx[lanes])  # fmt: skip
        for slot in op.writes:
            groups = self.reading.get(slot)
            if groups is not None and groups.take(warps).any():
                lanes = np.flatnonzero(groups.take(warps))
                raise Fault("async", f"register {S.program.slots[slot].name} is written while a wgmma in flight reads it as A "
                                     "(wgmma.wait_group comes first)", np.array([0]), lanes if idx is None else idx[lanes])  # fmt: skip

    def exited(self, S: State, gone: Array) -> None:
        """Fault if threads (slots) exit with products in flight."""
        warps = np.unique(gone // S.T * S.warps_per_cta + gone % S.T // 32)
        if any(acc.valid[warps].any() for acc in self.accumulators.values()):
            raise Fault("async", "exits while a wgmma is in flight (wgmma.wait_group 0 comes first)")


def complete_warpgroups(S: State, pc: int, idx: Any) -> Any:
    """The lanes of `idx` whose warpgroup is complete, joined by those parked here before; the rest is parked."""
    parked = S.sync_wait.pop(pc, None)
    if parked is not None:
        idx = np.concatenate((parked, np.arange(S.N) if idx is None else idx))
        idx.sort()
    positions = np.arange(S.N) if idx is None else idx
    group = S.cta.take(positions) * (-(-S.T // GROUP)) + S.thread.take(positions) // GROUP
    whole = np.bincount(group).take(group) == GROUP
    if whole.all():
        return None if len(positions) == S.N else positions
    S.sync_wait[pc] = positions[~whole]
    return positions[whole]


def rows_of(registers: Array, element: int) -> Array:
    """A fragment as (registers, warps, 32, element) to (warps, 16, columns): register 2j + h holds row g + 8h, columns
    (4j + q) * element and up."""
    n, warps = registers.shape[:2]
    t = registers.reshape(n // 2, 2, warps, 8, 4, element)
    return np.ascontiguousarray(t.transpose(2, 1, 3, 0, 4, 5)).reshape(warps, 16, -1)


def fragments_of(rows: Array, element: int) -> Array:
    """The inverse: (warps, 16, columns) to (registers, warps * 32, element)."""
    warps, _, columns = rows.shape
    t = rows.reshape(warps, 2, 8, columns // (4 * element), 4, element).transpose(3, 1, 0, 2, 4, 5)
    return np.ascontiguousarray(t).reshape(columns // (2 * element), warps * 32, element)


class Form:
    """Shape and types of one wgmma.mma_async."""

    def __init__(self, n: int, k: int, result: str, a_type: str, b_type: str) -> None:
        self.n, self.k, self.result, self.a_type, self.b_type = n, k, result, a_type, b_type
        self.packed = result == "f16"
        self.dtype: np.dtype = np.dtype({"f32": "f4", "f16": "f2", "s32": "i4"}[result])

    def load(self, S: State, slots: tuple[int, ...], idx: Any, warps: int) -> Array:
        """Accumulators from registers: (warps, 16, n)."""
        raw = np.empty((len(slots), warps * 32), np.uint32)
        for i, slot in enumerate(slots):
            value = S.R[slot]
            raw[i] = (value if idx is None or value.size == 1 else value.take(idx)).view(np.uint32)
        if self.packed:
            return rows_of(raw.view(F16).reshape(len(slots), warps, 32, 2), 2)
        # registers 4j + 2h + e: two of them make an element pair
        pairs = raw.reshape(len(slots) // 2, 2, warps, 32).transpose(0, 2, 3, 1)
        return rows_of(np.ascontiguousarray(pairs).view(self.dtype), 2)

    def store(self, S: State, slots: tuple[int, ...], rows: Array, idx: Any) -> None:
        fragments = fragments_of(rows, 2)
        if self.packed:
            values = list(fragments.view(np.uint32)[..., 0])
        else:
            values = [fragments[i // 2, :, i % 2] for i in range(len(slots))]
        for slot, value in zip(slots, values, strict=True):
            stored = S.program.slots[slot].type
            value = np.ascontiguousarray(value).view(np.uint32)
            S.set(slot, idx, value.view(np.float32) if stored == "f32" else value.view(np.int32) if stored == "s32" else value.copy())


def multiply(form: Form, a: Array, b: Array, c: Array, exact: bool, saturates: bool) -> Array:
    """(groups, 64, n) = a (groups, 64, k) times b (groups, n, k) transposed, plus c; in the result's dtype."""
    if form.result == "s32":
        total = (a @ b.transpose(0, 2, 1)).astype(I64) + c
        return np.clip(total, -(1 << 31), (1 << 31) - 1).astype(np.int32) if saturates else total.astype(np.int32)
    is_fp8 = form.a_type in tensor_core.FP8
    types = (form.a_type, form.b_type)
    if exact:
        fraction, kept = (13, 13) if is_fp8 else (25, 23)
        return tensor_core.truncated(a, b, c.astype(F64), types, form.result, fraction, kept)
    d = a @ b.transpose(0, 2, 1) + c
    if is_fp8 and form.result == "f32":  # the accumulator keeps 13 fraction bits; dropping the rest shows unpromoted sums
        d = (d.view(I64) & ~((1 << 39) - 1)).view(F64)
    return floats.canonical(d.astype(form.dtype))


def operand(
    S: State, form: Form, type_: str, descriptors: Array, ctas: Array, rows: int, mn_major: bool, what: str
) -> tuple[Array, list[Any]]:
    """The operand of every warpgroup as float64 (groups, rows, k), and its units for the checkers."""
    per = S.shared.stride >> 4
    limit = S.shared.size >> 4
    dtype = np.dtype(f"u{BITS[type_] // 8}")
    out = np.empty((len(ctas), rows, form.k), F64)
    used: list[Any] = []
    distinct, inverse = np.unique(descriptors, return_inverse=True)
    for i, descriptor in enumerate(distinct.tolist()):
        members = np.flatnonzero(inverse == i)
        units = descriptor_units(descriptor, rows, mn_major)
        if int(units.min()) < 0 or int(units.max()) >= limit:
            raise Fault("bounds", f"the tile of {what} (descriptor {descriptor:#x}) leaves the {S.shared.size} bytes of shared memory",
                        members * GROUP)  # fmt: skip
        index = (ctas[members, None] * per + units.reshape(-1)).reshape(-1)
        of_warp: Array | None = None
        if what == "A":  # rows 16 w to 16 w + 15 are warp w's
            of_warp = np.broadcast_to(np.arange(8) // 2 if mn_major else np.arange(64)[:, None] // 16, units.shape).reshape(-1)
        used.append((members, index, of_warp))
        if S.shared.shadow is not None and not all_ready(S.shared.shadow, index, 16):
            unwritten_shared(S, index, 16, np.repeat(members * GROUP, units.size))
        codes = S.shared.views[16].take(index).view(dtype)
        if mn_major:
            tile = codes.reshape(len(members), 16, rows).transpose(0, 2, 1)
        else:
            tile = codes.reshape(len(members), rows, form.k)
        out[members] = tensor_core.decode(np.ascontiguousarray(tile), type_)
    return out, used


def uniform(S: State, source: Any, idx: Any, what: str) -> Array:
    """One value per warpgroup; Fault where its threads differ."""
    value = source.take(S, idx)
    n = S.lanes(idx)
    if value.size == 1:
        return np.broadcast_to(value, (n // GROUP,))
    table = value.reshape(-1, GROUP)
    differs = table != table[:, :1]
    if differs.any():
        raise Fault("async", f"{what} differs between the threads of a warpgroup", np.flatnonzero(differs.reshape(-1)))
    return np.ascontiguousarray(table[:, 0])


def mma_async(d: Decoder, ins: nodes.Instruction) -> Core:
    mods = [m for m in ins.modifiers[1:] if m not in ("sync", "aligned")]
    saturates = "satfinite" in mods
    if saturates:
        mods.remove("satfinite")
    match = re.fullmatch(r"m64n(\d+)k(\d+)", mods[0])
    if match is None or len(mods) != 4:
        d.refuse("unknown form")
    assert match is not None
    n, k = int(match[1]), int(match[2])
    result, a_type, b_type = mods[1:]
    if a_type not in BITS or b_type not in BITS or k * BITS[a_type] != 256 or result not in ("f32", "f16", "s32"):
        d.refuse(f"m64n{n}k{k} of .{result}.{a_type}.{b_type}")
    form = Form(n, k, result, a_type, b_type)
    operands = list(ins.operands)
    targets = [d.dst(x, None)[0] for x in d.items(operands[0])]
    slots = tuple(targets)
    if len(slots) != n // (4 if form.packed else 2):
        d.refuse(f"{len(slots)} accumulator registers (expected {n // (4 if form.packed else 2)})")
    d.op.writes.clear()  # the registers change when the product retires
    in_registers = isinstance(operands[1], nodes.Vec)
    a_registers = [d.src(x, "b32") for x in d.items(operands[1])] if in_registers else []
    a_descriptor = None if in_registers else d.src(operands[1], "b64")
    b_descriptor = d.src(operands[2], "b64")
    scale = d.src(operands[3], "pred")
    rest = [int(x.value) for x in operands[4:] if isinstance(x, nodes.Imm)]
    signs = rest[:2] if result != "s32" else [1, 1]
    major = rest[2:] if len(rest) > 2 else []
    a_mn = bool(major[0]) if major and not in_registers else False
    b_mn = bool(major[-1]) if major else False
    d.op.kind = "warpgroup"
    d.op.info["accumulators"], d.op.info["a registers"] = slots, tuple(s.slot for s in a_registers)
    name = ins.opcode

    def run(S: State, idx: Any) -> None:
        P = S.products
        lanes = S.lanes(idx)
        warps = np.ascontiguousarray((S.warp if idx is None else S.warp.take(idx))[::32])
        ctas = (S.cta if idx is None else S.cta.take(idx))[::GROUP]
        groups = lanes // GROUP
        if S.async_checks:
            _check_fences(S, P, warps, slots, [s.slot for s in a_registers])
        accumulates = uniform(S, scale, idx, "scale-d")
        acc = P.accumulators.get(slots)
        if acc is None:
            acc = P.accumulators[slots] = Accumulator(slots, P.warps, n, form.dtype)
        for other in P.accumulators.values():
            if other is not acc and other.valid[warps].any() and not set(other.slots).isdisjoint(slots):
                raise Fault("async", "the accumulators are also those of a wgmma of another shape that is in flight")
        # accumulators that are not in flight come from the registers
        stale = ~acc.valid[warps]
        if stale.any() and accumulates.any():
            needs = stale & np.repeat(accumulates, 4)
            if needs.any():
                _check_written(S, slots, idx, needs)
                acc.dense[warps[needs]] = form.load(S, slots, idx, len(warps))[needs]
        C = acc.dense[warps].reshape(groups, 64, n)
        if not accumulates.all():
            C[~accumulates] = 0
        used: list[Any] = []
        if in_registers:
            raw = np.stack([np.broadcast_to(s.take(S, idx), (lanes,)) for s in a_registers])
            element = 32 // BITS[a_type]
            codes = raw.view(np.dtype(f"u{BITS[a_type] // 8}")).reshape(4, len(warps), 32, element)
            A = tensor_core.decode(rows_of(codes, element), a_type).reshape(groups, 64, k)
        else:
            assert a_descriptor is not None
            A, used = operand(S, form, a_type, uniform(S, a_descriptor, idx, "the descriptor of A"), ctas, 64, a_mn, "A")
        B, more = operand(S, form, b_type, uniform(S, b_descriptor, idx, "the descriptor of B"), ctas, n, b_mn, "B")
        if signs[0] * signs[1] < 0:
            A = -A
        if S.race is not None:
            S.race.products_read(S, warps, [*used, *more], idx)
        D = multiply(form, A, B, C, S.exact_mma, saturates)
        acc.dense[warps] = D.reshape(len(warps), 16, n)
        acc.valid[warps] = True
        acc.group[warps] = P.committed[warps]
        S.busy.update(slots)
        for source in a_registers:
            reading = P.reading.get(source.slot)
            if reading is None:
                reading = P.reading[source.slot] = np.zeros(P.warps, np.int64)
            reading[warps] = P.committed[warps] + 1
            S.busy.add(source.slot)
        S.counters.products += groups * 64 * n * k

    assert name == "wgmma"
    return run


def _check_fences(S: State, P: Products, warps: Array, slots: tuple[int, ...], a_slots: list[int]) -> None:
    if not P.is_fenced[warps].all():
        raise Fault("async", "no wgmma.fence before the first wgmma", np.flatnonzero(~P.is_fenced[warps]) * 32)
    if P.dirty:
        for slot in (*slots, *a_slots):
            dirty = P.dirty.get(slot)
            if dirty is not None and dirty[warps].any():
                raise Fault("async", f"register {S.program.slots[slot].name} was written after the last wgmma.fence",
                            np.flatnonzero(dirty[warps]) * 32)  # fmt: skip


def _check_written(S: State, slots: tuple[int, ...], idx: Any, needs: Array) -> None:
    for slot in slots:
        name = S.program.slots[slot].name
        if S.R[slot] is None:
            if S.uninit:
                raise Fault("uninit", f"accumulator {name} is added to before anything wrote it", np.flatnonzero(needs) * 32)
            S.R[slot] = np.zeros(1, np.uint32 if S.program.slots[slot].type[0] == "b" else np.float32)
        elif S.uninit and slot in S.undef:
            bad = S.undef[slot] if idx is None else S.undef[slot].take(idx)
            bad = bad & np.repeat(needs, 32)
            if bad.any():
                raise Fault("uninit", f"accumulator {name} is added to before this thread wrote it", np.flatnonzero(bad))


def _warps(S: State, idx: Any) -> Array:
    return np.ascontiguousarray((S.warp if idx is None else S.warp.take(idx))[::32])


def fence(S: State, idx: Any) -> None:
    P = S.products
    warps = _warps(S, idx)
    P.is_fenced[warps] = True
    for mask in P.dirty.values():
        mask[warps] = False


def commit(S: State, idx: Any) -> None:
    warps = _warps(S, idx)
    S.products.committed[warps] += 1
    if S.race is not None:
        S.race.commit_products(warps)


def wait_group(allowed: int) -> Core:
    def run(S: State, idx: Any) -> None:
        P = S.products
        warps = _warps(S, idx)
        limit = P.committed[warps] - allowed
        if S.race is not None:
            S.race.wait_products(warps, limit)
        for slot, groups in P.reading.items():
            found = groups[warps]
            P.reading[slot][warps] = np.where(found <= limit, 0, found)
        positions = np.arange(S.N, dtype=np.int64) if idx is None else idx
        for acc in P.accumulators.values():
            done = acc.valid[warps] & (acc.group[warps] < limit)
            if not done.any():
                continue
            mine = warps[done]
            lanes = positions if done.all() else positions.reshape(-1, 32)[done].reshape(-1)
            form = Form(acc.dense.shape[2], 0, {"f": "f32", "e": "f16", "i": "s32"}[acc.dense.dtype.char], "", "")
            acc.valid[mine] = False
            form.store(S, acc.slots, acc.dense[mine], None if len(lanes) == S.N else lanes)
        P.refresh(S)

    return run


def wgmma(d: Decoder, ins: nodes.Instruction) -> Core:
    name = ins.modifiers[0]
    if name == "mma_async":
        return mma_async(d, ins)
    d.op.kind = "warp"
    d.op.info["all"] = True
    if name == "fence":
        return fence
    if name == "commit_group":
        return commit
    if name == "wait_group":
        (count,) = ins.operands
        assert isinstance(count, nodes.Imm)
        return wait_group(int(count.value))
    return d.refuse("unknown wgmma")


class Registers:
    """Registers per thread of every warp of a batch: setmaxnreg moves them between the warps of a CTA.

    A CTA has what its warps get at entry: 65536 / (threads * CTAs per SM) each, in steps of 8, or .maxnreg.
    """

    def __init__(self, S: State) -> None:
        bounds = {name: values[0] for name, values in S.program.entry.directives if values}
        entry = min(65536 // (S.T * bounds.get("minnctapersm", 1)) // 8 * 8, 256, bounds.get("maxnreg", 256))
        self.held = np.full(S.ctas * S.warps_per_cta, entry, np.int64)
        self.pool = 65536 // bounds.get("minnctapersm", 1) // 32  # in warps' worth of one register each


def setmaxnreg(d: Decoder, ins: nodes.Instruction) -> Core:
    (operand,) = ins.operands
    wanted = int(operand.value) if isinstance(operand, nodes.Imm) else 0
    if not 24 <= wanted <= 256 or wanted % 8:
        d.refuse(f"{wanted} registers (expected a multiple of 8 from 24 to 256)")
    grows = ins.modifiers[0] == "inc"
    d.op.kind = "wait"

    def run(S: State, idx: Any) -> tuple[int, Any] | None:
        if S.registers is None:
            S.registers = Registers(S)
        held = S.registers.held
        positions = np.arange(S.N, dtype=np.int64) if idx is None else idx
        of_thread = S.warp.take(positions)
        warps = np.unique(of_thread)
        waiting: list[int] = []
        per_cta = S.warps_per_cta
        for warp in warps.tolist():
            if held[warp] >= wanted if grows else held[warp] <= wanted:
                continue
            cta = warp // per_cta
            total = int(held[cta * per_cta : (cta + 1) * per_cta].sum()) - int(held[warp]) + wanted
            if grows and total > S.registers.pool:
                waiting.append(warp)
            else:
                held[warp] = wanted
        if not grows:
            S.wake()
        if not waiting:
            return S.pc + 1, idx
        waits = np.isin(of_thread, waiting)
        S.park(S.pc, positions[waits])
        if not waits.all():
            S.add(S.pc + 1, positions[~waits])
        return None

    def describe(S: State, positions: Array) -> str:
        cta = int(S.cta[positions[0]])
        assert S.registers is not None
        held = S.registers.held[cta * S.warps_per_cta : (cta + 1) * S.warps_per_cta]
        return f"the CTA's warps hold {int(held.sum()) * 32} registers of {S.registers.pool * 32}"

    d.op.info["describe"] = describe
    return run  # type: ignore[return-value]


BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {"wgmma": wgmma, "setmaxnreg": setmaxnreg}
