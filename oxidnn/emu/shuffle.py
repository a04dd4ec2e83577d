"""Collectives of a warp on plain values: shfl, vote, match, redux, activemask, elect; and which warps are complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu.decode import DTYPE, Core, Decoder
from oxidnn.emu.memory import Array, Fault
from oxidnn.ptx import nodes

if TYPE_CHECKING:
    from oxidnn.emu.machine import Op, State

LANES = np.arange(32, dtype=np.int64)
BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).astype(np.uint32)
FULL = 0xFFFFFFFF


class Warps:
    """The executing lanes as a dense [warp, lane] matrix."""

    def __init__(self, S: State, idx: Array | None) -> None:
        self.flat: Array | None = None
        self.active: Array | None = None  # None: every lane
        if idx is None and S.whole:
            self.count = S.N // 32
            return
        warp = S.warp if idx is None else S.warp.take(idx)
        lane = S.lane if idx is None else S.lane.take(idx)
        cuts = np.flatnonzero(warp[1:] != warp[:-1]) + 1
        rank = np.zeros(len(warp), np.int64)
        rank[cuts] = 1
        rank = np.cumsum(rank)
        self.count = int(rank[-1]) + 1
        if self.count * 32 == len(warp):
            return
        self.flat = rank * 32 + lane
        active = np.zeros(self.count * 32, np.bool_)
        active[self.flat] = True
        self.active = active.reshape(-1, 32)

    def spread(self, value: Array) -> Array:
        """(N,) or uniform (1,) to (warps, 32); absent lanes are zero."""
        if value.size == 1:
            return np.broadcast_to(value, (self.count, 32))
        if self.flat is None:
            return value.reshape(-1, 32)
        out = np.zeros(self.count * 32, value.dtype)
        out[self.flat] = value
        return out.reshape(-1, 32)

    def collect(self, matrix: Array) -> Array:
        """(warps, 32), or (warps, 1) to be broadcast, back to one value per executing lane."""
        if matrix.shape[1] == 1:
            matrix = np.repeat(matrix, 32, axis=1)
        flat = np.ascontiguousarray(matrix).reshape(-1)
        return flat if self.flat is None else flat.take(self.flat)

    def bits(self, p: Array) -> Array:
        """(warps, 32) booleans to one uint32 per warp."""
        return np.packbits(np.ascontiguousarray(p), axis=1, bitorder="little").view(np.uint32)

    def active_bits(self) -> Array:
        if self.active is None:
            return np.full((self.count, 1), FULL, np.uint32)
        return self.bits(self.active)


def complete_warps(S: State, op: Op, pc: int, idx: Array | None) -> Array | None:
    """The lanes of `idx` whose warps are complete, joined by those parked here before; the rest is parked.

    Complete: every lane that the member mask names is here. Instructions without a mask need all 32 lanes.
    """
    parked = S.sync_wait.pop(pc, None)
    if parked is not None:
        idx = np.concatenate((parked, np.arange(S.N) if idx is None else idx))
        idx.sort()
        S.group = idx
    positions = np.arange(S.N) if idx is None else idx
    warp, lane = S.warp.take(positions), S.lane.take(positions)
    bits = BITS.take(lane)
    starts = np.flatnonzero(np.r_[True, warp[1:] != warp[:-1]])
    present = np.bitwise_or.reduceat(bits, starts)
    sizes = np.diff(np.r_[starts, len(warp)])
    present = np.repeat(present, sizes)
    source = op.info.get("mask")
    ragged = S.T % 32
    exist = np.full(len(warp), FULL, np.uint32)
    if ragged:
        exist[warp % S.warps_per_cta == S.warps_per_cta - 1] = (1 << ragged) - 1
    if source is not None:
        mask = np.broadcast_to(source.take(S, idx), (len(positions),))
        outside = np.flatnonzero((mask & bits) == 0)
        if len(outside):
            raise Fault("barrier", f"lane is not in its own member mask {int(mask[outside[0]]):#010x}", outside, positions)
        need = mask & exist
    elif op.info.get("all"):
        need = exist
    else:
        if ragged and (exist != FULL).any():
            raise Fault("barrier", "the instruction needs a whole warp, this one has fewer than 32 threads",
                        np.flatnonzero(exist != FULL), positions)  # fmt: skip
        need = exist
    ok = (present & need) == need
    if ok.all():
        return None if len(positions) == S.N else positions
    waiting = positions[~ok]
    _check_alive(S, pc, waiting, need[~ok])
    S.sync_wait[pc] = waiting
    return positions[ok]


def _check_alive(S: State, pc: int, positions: Array, need: Array) -> None:
    alive = np.zeros((S.ctas * S.warps_per_cta) * 32, np.bool_)
    slots = np.flatnonzero(S.alive)
    alive[slots // S.T * S.warps_per_cta * 32 + slots % S.T] = True
    living = np.packbits(alive.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32)[:, 0]
    dead = need & ~living.take(S.warp.take(positions))
    lanes = np.flatnonzero(dead)
    if len(lanes):
        S.pc = pc
        gone = int(dead[lanes[0]])
        names = ", ".join(str(i) for i in range(32) if gone >> i & 1)
        raise Fault("barrier", f"waits for lanes that have exited: {names}", lanes, positions)


def abandoned(S: State) -> None:
    """Threads have exited: fault if somebody waits for them."""
    for pc, positions in S.sync_wait.items():
        op = S.program.ops[pc]
        source = op.info.get("mask")
        if source is None:
            need = np.full(len(positions), FULL, np.uint32)
            if S.T % 32:
                need[S.warp.take(positions) % S.warps_per_cta == S.warps_per_cta - 1] = (1 << S.T % 32) - 1
        else:
            need = np.broadcast_to(source.take(S, positions), (len(positions),))
        _check_alive(S, pc, positions, need)


def member_mask(d: Decoder, operand: nodes.Operand) -> Any:
    """Decode a member mask; the full one needs no run-time check."""
    source = d.src(operand, "b32")
    if isinstance(operand, nodes.Imm) and int(operand.value) & FULL == FULL:
        d.op.info["all"] = True
    else:
        d.op.info["mask"] = source
    d.op.kind = "warp"
    return source


def shfl(d: Decoder, ins: nodes.Instruction) -> Core:
    if len(ins.modifiers) != 3 or ins.modifiers[0] != "sync" or ins.modifiers[2] != "b32":
        d.refuse("only shfl.sync.mode.b32")
    mode = ins.modifiers[1]
    if mode not in ("up", "down", "bfly", "idx"):
        d.refuse(f"unknown mode .{mode}")
    target, a, b, c, mask = ins.operands
    p_slot = -1
    if isinstance(target, nodes.Pair):
        p_slot, _ = d.dst(target.second, "pred")
        target = target.first
    slot, stored = d.dst(target, "b32")
    value, delta, limits = d.src(a, "b32"), d.src(b, "b32"), d.src(c, "b32")
    member_mask(d, mask)

    def run(S: State, idx: Array | None) -> None:
        warps = Warps(S, idx)
        x, n, clamp = value.take(S, idx), delta.take(S, idx), limits.take(S, idx)
        uniform = n.size == 1 and clamp.size == 1
        bval = (n if uniform else warps.spread(n)).astype(np.int64) & 31
        c64 = (clamp if uniform else warps.spread(clamp)).astype(np.int64)
        cval, segment = c64 & 31, c64 >> 8 & 31
        top = (LANES & segment) | (cval & ~segment)
        if mode == "up":
            j = LANES - bval
            valid = j >= top
        elif mode == "down":
            j = LANES + bval
            valid = j <= top
        elif mode == "bfly":
            j = LANES ^ bval
            valid = j <= top
        else:
            j = (LANES & segment) | (bval & ~segment)
            valid = j <= top
        j = np.where(valid, j, LANES)
        if warps.active is not None:
            from_ = np.broadcast_to(j, (warps.count, 32))
            asleep = ~np.take_along_axis(warps.active, from_, axis=1) & warps.active
            if asleep.any():
                lanes = np.flatnonzero(warps.collect(asleep))
                raise Fault("barrier", f"reads the register of lane {int(warps.collect(from_)[lanes[0]])}, which does not take part", lanes)
        if slot >= 0:
            if x.size == 1:
                S.set(slot, idx, x.view(stored))
            else:
                matrix = warps.spread(x)
                found = matrix.take(j, axis=1) if uniform else np.take_along_axis(matrix, np.broadcast_to(j, matrix.shape), axis=1)
                S.set(slot, idx, warps.collect(found).view(stored))
        if p_slot >= 0:
            S.set(p_slot, idx, warps.collect(np.broadcast_to(valid, (warps.count, 32))))

    return run


def _masks(S: State, warps: Warps, source: Any, idx: Array | None) -> Array:
    m = source.take(S, idx)
    return m.reshape(1, 1) if m.size == 1 else warps.spread(m)


def vote(d: Decoder, ins: nodes.Instruction) -> Core:
    if ins.modifiers[0] != "sync":
        d.refuse("vote needs .sync")
    mode = ins.modifiers[1]
    dst, a, mask = ins.operands
    source = d.src(a, "pred")
    slot, stored = d.dst(dst, "b32" if mode == "ballot" else "pred")
    members = member_mask(d, mask)
    if mode not in ("any", "all", "uni", "ballot"):
        d.refuse(f"unknown vote .{mode}")

    def run(S: State, idx: Array | None) -> None:
        warps = Warps(S, idx)
        p = warps.spread(source.take(S, idx))
        if warps.active is not None:
            p = p & warps.active
        yes, here, named = warps.bits(p), warps.active_bits(), _masks(S, warps, members, idx)
        no = ~yes & here & named
        yes = yes & named
        if mode == "ballot":
            result = yes
        elif mode == "any":
            result = yes != 0
        elif mode == "all":
            result = no == 0
        else:
            result = (yes == 0) | (no == 0)
        if slot >= 0:
            S.set(slot, idx, warps.collect(result).view(stored))

    return run


def match(d: Decoder, ins: nodes.Instruction) -> Core:
    mode, _, type_ = (ins.modifiers[0], ins.modifiers[1], ins.modifiers[2]) if ins.modifiers[1] == "sync" else (
        ins.modifiers[1], "sync", ins.modifiers[2])  # fmt: skip
    target, a, mask = ins.operands
    p_slot = -1
    if isinstance(target, nodes.Pair):
        p_slot, _ = d.dst(target.second, "pred")
        target = target.first
    slot, stored = d.dst(target, "b32")
    source = d.src(a, type_)
    members = member_mask(d, mask)

    def run(S: State, idx: Array | None) -> None:
        warps = Warps(S, idx)
        x = warps.spread(source.take(S, idx))
        named = np.broadcast_to(_masks(S, warps, members, idx) & warps.active_bits(), (warps.count, 32))
        same = x[:, :, None] == x[:, None, :]
        bits = np.packbits(same, axis=2, bitorder="little").view(np.uint32)[:, :, 0] & named
        if mode == "all":
            agree = bits == named
            bits = np.where(agree, named, np.uint32(0))
            if p_slot >= 0:
                S.set(p_slot, idx, warps.collect(agree))
        if slot >= 0:
            S.set(slot, idx, warps.collect(bits).view(stored))

    return run


def redux(d: Decoder, ins: nodes.Instruction) -> Core:
    mods = [m for m in ins.modifiers if m != "sync"]
    operation, type_ = mods[0], mods[-1]
    if len(mods) != 2 or type_ not in ("u32", "s32", "b32"):
        d.refuse("unknown redux")
    fn: Any = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[operation]  # fmt: skip
    dtype = DTYPE[type_]
    info = np.iinfo(dtype)
    neutral = {"min": info.max, "max": info.min, "and": -1 if dtype.kind == "i" else info.max}.get(operation, 0)
    dst, a, mask = ins.operands
    slot, stored = d.dst(dst, type_)
    source = d.src(a, type_)
    members = member_mask(d, mask)

    def run(S: State, idx: Array | None) -> None:
        warps = Warps(S, idx)
        x = warps.spread(source.take(S, idx))
        named = np.broadcast_to(_masks(S, warps, members, idx) & warps.active_bits(), (warps.count, 32))
        out = np.zeros((warps.count, 32), dtype)
        for one in np.unique(named).tolist():
            member = (BITS & np.uint32(one)) != 0
            value = fn.reduce(np.where(member, x, np.array(neutral, dtype)), axis=1, dtype=dtype)
            out = np.where((named == np.uint32(one)) & member, value[:, None], out)
        if slot >= 0:
            S.set(slot, idx, warps.collect(out).view(stored))

    return run


def activemask(d: Decoder, ins: nodes.Instruction) -> Core:
    (dst,) = ins.operands
    slot, stored = d.dst(dst, "b32")

    def run(S: State, idx: Array | None) -> None:
        warps = Warps(S, idx)
        S.set(slot, idx, warps.collect(warps.active_bits()).view(stored))

    return run


def elect(d: Decoder, ins: nodes.Instruction) -> Core:
    """elect.sync d|p, mask: the lowest lane of the mask leads."""
    target, mask = ins.operands
    if not isinstance(target, nodes.Pair):
        d.refuse("elect.sync needs d|p")
    assert isinstance(target, nodes.Pair)
    slot, stored = d.dst(target.first, "b32")
    p_slot, _ = d.dst(target.second, "pred")
    members = member_mask(d, mask)

    def run(S: State, idx: Array | None) -> None:
        warps = Warps(S, idx)
        named = np.broadcast_to(_masks(S, warps, members, idx) & warps.active_bits(), (warps.count, 32)).astype(np.int64)
        leader = np.log2((named & -named).astype(np.float64)).astype(np.int64)
        if slot >= 0:
            S.set(slot, idx, warps.collect(leader.astype(np.uint32)).view(stored))
        if p_slot >= 0:
            S.set(p_slot, idx, warps.collect(leader == LANES))

    return run


BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {
    "shfl": shfl, "vote": vote, "match": match, "redux": redux, "activemask": activemask, "elect": elect,
}  # fmt: skip
