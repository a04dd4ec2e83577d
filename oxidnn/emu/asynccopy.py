"""cp.async: copies from global to shared memory in commit groups.

The bytes are moved at once, but count as PENDING until a wait completes their group: a read before that is a fault.
Groups are counted per thread. With neither shadow bytes nor race checking there is nothing to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu import bulk, mbarrier
from oxidnn.emu.access import (
    Access,
    gather_global,
    loader,
    mark_ready,
    misaligned,
    relane,
    store,
    window_index,
    window_place,
)  # fmt: skip
from oxidnn.emu.decode import Core, Decoder
from oxidnn.emu.ldst import policy
from oxidnn.emu.memory import MARKS, PENDING, RAW, Array, Fault
from oxidnn.ptx import nodes

if TYPE_CHECKING:
    from oxidnn.emu.machine import State

_EVERYTHING = 1 << 60


@dataclass
class Copy:
    slots: Array  # the threads that issued it
    group: Array  # their group number
    index: Array  # destination elements of `width` bytes
    width: int


class Queue:
    """The copies in flight of one batch; arrays are by slot, so that compaction does not matter."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.committed: Array | None = None
        self.copies: list[Copy] = []

    def groups(self) -> Array:
        if self.committed is None:
            self.committed = np.zeros(self.threads, np.int64)
        return self.committed

    def issue(self, S: State, idx: Array | None, index: Array, width: int) -> None:
        slots = S.slot if idx is None else S.slot.take(idx)
        if len(index) != len(slots):
            index = np.broadcast_to(index, (len(slots),))
        self.copies.append(Copy(slots, self.groups().take(slots), index, width))
        S.shared.pending += 1

    def commit(self, S: State, idx: Array | None) -> None:
        slots = S.slot if idx is None else S.slot.take(idx)
        self.groups()[slots] += 1
        if S.race is not None:
            S.race.commit_copies(S, idx)

    def wait(self, S: State, idx: Array | None, allowed: int | None) -> None:
        """Complete all but the last `allowed` groups of the threads; None: everything, uncommitted copies too."""
        self.settle(S, idx, allowed)
        if S.race is not None:
            S.race.wait_copies(S, idx, allowed)

    def settle(self, S: State, idx: Array | None, allowed: int | None = None) -> None:
        """The same for the memory alone."""
        if self.copies:
            slots = S.slot if idx is None else S.slot.take(idx)
            limit = np.full(self.threads, -1, np.int64)
            limit[slots] = _EVERYTHING if allowed is None else self.groups().take(slots) - allowed
            left = []
            for copy in self.copies:
                done = copy.group < limit.take(copy.slots)
                if not done.any():
                    left.append(copy)
                    continue
                finished = copy.index
                if not done.all():
                    finished = copy.index[done]
                    stay = ~done
                    left.append(Copy(copy.slots[stay], copy.group[stay], copy.index[stay], copy.width))
                else:
                    S.shared.pending -= 1
                if S.shared.shadow is not None:
                    mark_ready(S.shared.shadow, finished, copy.width)
            self.copies = left


def cp(d: Decoder, ins: nodes.Instruction) -> Core:
    mods = ins.modifiers
    if "bulk" in mods:
        return bulk.bulk(d, ins)
    if mods[:3] == ("async", "mbarrier", "arrive"):
        return mbarrier.copies_arrive(d, ins)
    if not mods or mods[0] != "async":
        d.refuse("unknown copy")
    if mods[1:] == ("commit_group",):
        return lambda S, idx: S.copies.commit(S, idx)
    if mods[1:] == ("wait_all",):
        return lambda S, idx: S.copies.wait(S, idx, None)
    if mods[1:] == ("wait_group",):
        (count,) = ins.operands
        if not isinstance(count, nodes.Imm):
            d.refuse("the group count must be an immediate")
        assert isinstance(count, nodes.Imm)
        allowed = int(count.value)
        return lambda S, idx: S.copies.wait(S, idx, allowed)
    if mods[1] in ("ca", "cg"):
        return copy_elements(d, ins)
    return d.refuse("unknown copy")


def copy_elements(d: Decoder, ins: nodes.Instruction) -> Core:
    known = {"ca", "cg", "shared", "shared::cta", "global", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"}
    unknown = set(ins.modifiers[1:]) - known
    if unknown:
        d.refuse(f"unknown modifier .{sorted(unknown)[0]}")
    to, source, size, *rest = ins.operands
    if not isinstance(size, nodes.Imm) or int(size.value) not in ((16,) if "cg" in ins.modifiers else (4, 8, 16)):
        d.refuse("the size must be 4, 8 or 16 (.cg: 16)")
    assert isinstance(size, nodes.Imm)
    width = int(size.value)
    to_base, to_offset = d.address(to, "shared")
    base, offset = d.address(source, "global")
    if "L2::cache_hint" in ins.modifiers:
        policy(d, (rest.pop(),))
    ignore: Any = None
    read: Any = None
    if rest:
        operand = rest[0]
        if isinstance(operand, nodes.Reg) and d.register(operand.name).type == "pred":
            ignore = d.src(operand, "pred")
        else:
            read = d.src(operand, "u32")
    target = Access(to_offset, width, "async write")
    whole = Access(offset, width, "read")
    octet = Access(offset, 1, "read")
    d.op.info["access"] = target
    raw = RAW[width]

    read_whole = loader("global", base, whole)

    def fetch(S: State, idx: Array | None, sizes: Array | None) -> Array:
        """The source bytes of every lane, zero beyond its size; nothing is read where the size is 0."""
        if sizes is None:
            return read_whole(S, idx)
        full = sizes == width
        if np.count_nonzero(full) == len(full):
            return read_whole(S, idx)
        if np.count_nonzero(sizes > width):
            raise Fault("bounds", f"src-size {int(sizes.max())} exceeds cp-size {width}", np.flatnonzero(sizes > width))
        n = S.lanes(idx)
        full, sizes = np.broadcast_to(full, (n,)), np.broadcast_to(sizes, (n,))
        out = np.zeros(n, raw)
        lanes = np.flatnonzero(full)
        if len(lanes):
            out[lanes] = _relane_value(read_whole, lanes, S, lanes if idx is None else idx.take(lanes))
        part = np.flatnonzero((sizes > 0) & ~full)
        if len(part):
            a = np.broadcast_to(base.take(S, idx), (n,))
            octets = out.view(np.uint8).reshape(n, width)
            starts = a[part] + np.uint64(offset & ((1 << 64) - 1))
            if (starts & np.uint64(width - 1)).any():
                relane(misaligned, part, starts, width, S)
            for byte in range(int(sizes[part].max())):
                lanes = part[sizes[part] > byte]
                where = lanes if idx is None else idx.take(lanes)
                octets[lanes, byte] = _relane_value(gather_global, lanes, S, a[lanes] + np.uint64(byte), octet, where)
        return out

    def run(S: State, idx: Array | None) -> None:
        sizes = None
        if read is not None:
            sizes = read.take(S, idx)
        elif ignore is not None:
            sizes = np.where(ignore.take(S, idx), np.uint32(0), np.uint32(width))
        values = fetch(S, idx, sizes)
        place = window_place(S, to_base, target, S.shared)
        index = place.index(target, idx) if place is not None else None
        if index is None:
            offsets = S.shared_offset
            offsets = offsets if idx is None or offsets.size == 1 else offsets.take(idx)
            index = window_index(S, to_base.take(S, idx), target, S.shared, offsets, "shared")
        if S.race is not None:
            S.race.access(S, index, target, idx)
        if S.bank is not None:
            S.bank.access(S, index, target, idx)
        S.counters.shared_written += width * len(index)
        store(S.shared.views[width], index, values)
        if S.shared.shadow is not None:
            S.shared.shadow[width][index] = MARKS[PENDING][width]
            S.copies.issue(S, idx, index, width)

    return run


def _relane_value(fn: Callable[..., Array], lanes: Array, *arguments: Any) -> Array:
    try:
        return fn(*arguments)
    except Fault as fault:
        if fault.lanes is not None:
            fault.lanes = lanes[fault.lanes]
        raise


BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {"cp": cp}
