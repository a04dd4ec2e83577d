"""mbarrier: barriers in shared memory that count arrivals and bytes.

A phase completes when no arrival is pending and the bytes expected equal the bytes come (`tx`, which may go negative
when copies come before they are announced); the barrier then waits for its full count again. Their state is kept
beside shared memory, by CTA and column; a column is one 8-byte address in every CTA's window.

A wait that fails says so once; the thread that comes back to the instruction, while no phase of any barrier has
completed in between, is parked until one does. So a kernel that ignores the answer is found out, and one that polls
costs nothing. With the race checker on, the first try fails too where the phase is complete but nothing the thread has
waited for implies it: it might have come earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu.access import Access, mark_ready, own_offsets, split, window_index
from oxidnn.emu.decode import Core, Decoder, Source
from oxidnn.emu.memory import SHARED_BASE, SHARED_WINDOW, Array, Fault
from oxidnn.ptx import nodes

if TYPE_CHECKING:
    from oxidnn.emu.machine import State

COUNT_LIMIT = (1 << 20) - 1
PHASE_SHIFT = 24  # of the opaque state that arrive returns: phase number above the pending count


class Table:
    """All mbarriers of a batch. `flat` numbers a barrier: CTA * capacity + column."""

    def __init__(self, S: State) -> None:
        self.per_window = S.shared.stride >> 3
        self.column = np.full(max(self.per_window, 1), -1, np.int64)
        self.places: list[int] = []  # of a column: its 8-byte index in the window
        self.capacity = 0
        self.ctas = S.ctas
        self.live, self.count, self.pending, self.tx, self.phase, self.seen = (np.zeros(0, np.int64) for _ in range(6))
        self.failed: dict[int, Array] = {}  # pc of a wait -> by slot: barrier << 32 | phase of the last try that failed
        self.events = 0  # phases that have completed
        self.noticed = np.zeros(S.N0, np.int64)  # by slot: events at the thread's last try that failed
        self.waits_on = np.full(S.N0, -1, np.int64)  # by slot: the barrier a parked thread waits for, and since which phase
        self.waits_since = np.zeros(S.N0, np.int64)
        self.landing: dict[int, list[Array]] = {}  # 16-byte units of copies that count in the present phase

    def _grow(self, S: State) -> None:
        old, new = self.capacity, max(16, 2 * self.capacity)
        for name in ("live", "count", "pending", "tx", "phase", "seen"):
            wide = np.zeros((self.ctas, new), np.int64)
            wide[:, :old] = getattr(self, name).reshape(self.ctas, old)
            setattr(self, name, wide.reshape(-1))
        self.landing = {flat // old * new + flat % old: units for flat, units in self.landing.items()} if old else {}
        waiting = self.waits_on >= 0
        if old:
            self.waits_on[waiting] = self.waits_on[waiting] // old * new + self.waits_on[waiting] % old
        self.capacity = new
        if S.race is not None:
            S.race.more_barriers(old, new)

    def name(self, S: State, flat: int) -> str:
        offset = self.places[flat % self.capacity] * 8 + SHARED_BASE
        return f"mbarrier {offset:#x}{S.shared_name(offset)} of CTA {S.cta_name(flat // self.capacity)}"

    def describe(self, S: State, flat: int) -> str:
        count, pending, tx = int(self.count[flat]), int(self.pending[flat]), int(self.tx[flat])
        text = f"{self.name(S, flat)}: phase {int(self.phase[flat])} has {count - pending} of {count} arrivals"
        if tx > 0:
            text += f" and lacks {tx} of the bytes expected"
        elif tx < 0:
            text += f" and {-tx} bytes more than expected"
        return text

    def find(self, index: Array) -> Array:
        """The barriers at 8-byte indices over all windows; Fault where none was initialised."""
        column = self.column.take(index % self.per_window)
        flat = index // self.per_window * self.capacity + column
        bad = column < 0
        if not bad.any():
            bad = self.live.take(flat) == 0
        if bad.any():
            lanes = np.flatnonzero(bad)
            offset = int(index[lanes[0]]) % self.per_window * 8 + SHARED_BASE
            raise Fault("barrier", f"no mbarrier was initialised at shared address {offset:#x}", lanes)
        return flat

    def init(self, S: State, index: Array, counts: Array) -> None:
        bad = (counts < 1) | (counts > COUNT_LIMIT)
        if bad.any():
            raise Fault("barrier", f"mbarrier count {int(counts[bad][0])} (expected 1 to {COUNT_LIMIT})", np.flatnonzero(bad))
        for place in np.unique(index % self.per_window).tolist():
            if self.column[place] < 0:
                if len(self.places) == self.capacity:
                    self._grow(S)
                self.column[place] = len(self.places)
                self.places.append(place)
        flat = index // self.per_window * self.capacity + self.column.take(index % self.per_window)
        again = self.live.take(flat) != 0
        if again.any() and S.strict_barrier:
            lanes = np.flatnonzero(again)
            raise Fault("barrier", f"{self.name(S, int(flat[lanes[0]]))} is initialised while it lives (mbarrier.inval comes first)", lanes)
        self.live[flat] = 1
        self.count[flat] = self.pending[flat] = counts
        self.tx[flat] = self.phase[flat] = self.seen[flat] = 0

    def inval(self, S: State, index: Array) -> None:
        self.live[self.find(index)] = 0

    def arrive(self, S: State, flat: Array, number: Array, bytes_: Array | None, drop: bool = False, no_complete: bool = False) -> Array:
        """Arrivals of the lanes; the opaque states (phase and pending count before)."""
        state = (self.phase.take(flat) << PHASE_SHIFT) | self.pending.take(flat)
        if bytes_ is not None:
            self.expect(S, flat, bytes_)
        if len(flat) == 1:
            barriers, arrivals, first = flat, number, np.zeros(1, np.int64)
        else:
            barriers, first, inverse = np.unique(flat, return_index=True, return_inverse=True)
            arrivals = np.bincount(inverse, weights=number, minlength=len(barriers)).astype(np.int64)
        pending = self.pending.take(barriers)
        over = arrivals > pending
        if over.any():
            at = int(np.flatnonzero(over)[0])
            raise Fault("barrier", f"too many arrivals: {int(arrivals[at])} at once, {int(pending[at])} are pending. "
                                   f"{self.describe(S, int(barriers[at]))}", first[over])  # fmt: skip
        self.pending[barriers] = pending - arrivals
        if drop:
            self.count[barriers] -= arrivals
        if no_complete and (self.pending.take(barriers) == 0).any():
            raise Fault("barrier", "arrive.noComplete completes the phase", first)
        self._complete(S, barriers)
        return state

    def expect(self, S: State, flat: Array, bytes_: Array) -> None:
        np.add.at(self.tx, flat, bytes_)
        if int(np.abs(self.tx.take(flat)).max()) > COUNT_LIMIT:
            raise Fault("barrier", f"the bytes of a phase exceed {COUNT_LIMIT}. {self.describe(S, int(flat[0]))}")

    def bytes_came(self, S: State, flat: Array, bytes_: Array) -> None:
        """complete_tx."""
        np.add.at(self.tx, flat, -bytes_)
        self._complete(S, np.unique(flat) if len(flat) > 1 else flat)

    def _complete(self, S: State, barriers: Array) -> None:
        done = (self.pending.take(barriers) == 0) & (self.tx.take(barriers) == 0)
        if not done.any():
            return
        flats = barriers[done]
        phase = self.phase.take(flats)
        if S.strict_barrier:
            unseen = (phase > 0) & (self.seen.take(flats) < phase)
            if unseen.any():
                flat = int(flats[np.flatnonzero(unseen)[0]])
                raise Fault("barrier", f"phase {int(self.phase[flat])} completes although nobody has waited for the one before: wrong "
                                       f"arrival count, or a wait is missing. {self.name(S, flat)}")  # fmt: skip
        self.phase[flats] = phase + 1
        self.events += 1
        self.pending[flats] = self.count.take(flats)
        for flat in flats.tolist():
            for units in self.landing.pop(flat, ()):
                S.shared.pending -= 1
                if S.shared.shadow is not None:
                    mark_ready(S.shared.shadow, units, 16)
        if S.race is not None:
            S.race.phase_done(flats)
        if S.parked:
            S.wake()

    def land(self, S: State, flat: int, units: Array) -> None:
        """A copy has written these 16-byte units; they may be read once the phase is complete."""
        if S.shared.shadow is not None:
            S.shared.pending += 1
            self.landing.setdefault(flat, []).append(units)


def place_of(d: Decoder, operand: nodes.Operand, mods: tuple[str, ...] | list[str]) -> Callable[[State, Any], Array]:
    """Decode the address of a barrier: a function to the 8-byte index per lane, over all windows of the batch."""
    spaces = [m for m in mods if m.startswith("shared")]
    is_generic, is_remote = not spaces, bool(spaces) and spaces[0] == "shared::cluster"
    base, offset = d.address(operand, "generic" if is_generic else "shared")
    access = Access(offset, 8, "read")
    known = d.op.info.setdefault("mbarrier", access)

    def place(S: State, idx: Any) -> Array:
        a = base.take(S, idx)
        if is_generic:
            if int(a.min()) < SHARED_WINDOW:
                raise Fault("bounds", "a generic address outside shared memory", np.flatnonzero(a < np.uint64(SHARED_WINDOW)))
            a = a - np.uint64(SHARED_WINDOW)
        if is_remote or is_generic:
            a, offsets = split(S, a, idx)
        else:
            offsets = own_offsets(S, idx)
        index = window_index(S, a, known, S.shared, offsets, "shared")
        n = S.lanes(idx)
        return index if len(index) == n else np.broadcast_to(index, (n,))

    return place


def _full(source: Source | None, S: State, idx: Any, default: int) -> Array:
    n = S.lanes(idx)
    if source is None:
        return np.full(n, default, np.int64)
    return np.broadcast_to(source.take(S, idx).astype(np.int64), (n,))


def _used(S: State, index: Array, access: Access, idx: Any) -> None:
    if S.race is not None:
        S.race.access(S, index, access, idx)


_READ = Access(0, 8, "read")
_WRITE = Access(0, 8, "write")


def mbarrier(d: Decoder, ins: nodes.Instruction) -> Core:
    mods = ins.modifiers
    name = mods[0]
    known = {"parity", "expect_tx", "noComplete", "release", "relaxed", "acquire", "cta", "cluster", "shared", "shared::cta",
             "shared::cluster", "b64"}  # fmt: skip
    if set(mods[1:]) - known:
        d.refuse(f"unknown modifier .{sorted(set(mods[1:]) - known)[0]}")
    operands = list(ins.operands)
    if name == "pending_count":
        return d.emit(lambda x: (x & np.uint64((1 << PHASE_SHIFT) - 1)).astype(np.uint32), operands[0], np.dtype(np.uint32),
                      [d.src(operands[1], "b64")])  # fmt: skip
    if name in ("test_wait", "try_wait"):
        return wait(d, operands, mods)
    slot, stored = -1, np.dtype(np.uint64)
    if name in ("arrive", "arrive_drop"):
        slot, stored = d.dst(operands.pop(0), "b64")
    place = place_of(d, operands.pop(0), mods)
    value = d.src(operands.pop(0), "u32") if operands else None
    if operands:
        d.refuse("too many operands")
    releases = "relaxed" not in mods

    def init(S: State, idx: Any) -> None:
        index = place(S, idx)
        _used(S, index, _WRITE, idx)
        S.mbarriers.init(S, index, _full(value, S, idx, 0))
        if S.shared.shadow is not None:
            mark_ready(S.shared.shadow, index, 8)

    def inval(S: State, idx: Any) -> None:
        index = place(S, idx)
        _used(S, index, _WRITE, idx)
        S.mbarriers.inval(S, index)

    def arrive(S: State, idx: Any) -> None:
        index = place(S, idx)
        _used(S, index, _READ, idx)
        flat = S.mbarriers.find(index)
        if S.race is not None and releases:
            S.race.release_to(flat, idx)
        if "expect_tx" in mods:
            number, bytes_ = np.ones(len(flat), np.int64), _full(value, S, idx, 0)
        else:
            number, bytes_ = _full(value, S, idx, 1), None
        state = S.mbarriers.arrive(S, flat, number, bytes_, name == "arrive_drop", "noComplete" in mods)
        if slot >= 0:
            S.set(slot, idx, state.astype(np.uint64).view(stored))

    def change_tx(S: State, idx: Any) -> None:
        index = place(S, idx)
        _used(S, index, _READ, idx)
        flat = S.mbarriers.find(index)
        if name == "expect_tx":
            S.mbarriers.expect(S, flat, _full(value, S, idx, 0))
        else:
            S.mbarriers.bytes_came(S, flat, _full(value, S, idx, 0))

    return {"init": init, "inval": inval, "arrive": arrive, "arrive_drop": arrive, "expect_tx": change_tx, "complete_tx": change_tx}[name]


def wait(d: Decoder, operands: list[nodes.Operand], mods: tuple[str, ...]) -> Core:
    by_parity = "parity" in mods
    p_slot, _ = d.dst(operands[0], "pred")
    place = place_of(d, operands[1], mods)
    which = d.src(operands[2], "u32" if by_parity else "b64")
    if len(operands) > 3:
        d.src(operands[3], "u32")  # the time to suspend, a hint
    acquires = "relaxed" not in mods
    d.op.kind = "wait"

    def run(S: State, idx: Any) -> tuple[int, Any] | None:
        pc, table = S.pc, S.mbarriers
        positions = np.arange(S.N, dtype=np.int64) if idx is None else idx
        index = place(S, idx)
        _used(S, index, _READ, idx)
        flat = table.find(index)
        phase = table.phase.take(flat)
        wanted = np.broadcast_to(which.take(S, idx).astype(np.int64), phase.shape)
        if by_parity:
            done = (phase & 1) != (wanted & 1)
        else:
            done = phase > wanted >> PHASE_SHIFT
            late = phase > (wanted >> PHASE_SHIFT) + 1
            if late.any():
                raise Fault("barrier", "waits for a phase that is not the present or the one before", np.flatnonzero(late))
        slots = S.slot if idx is None else S.slot.take(idx)
        failed = table.failed.get(pc)
        if failed is None:
            failed = table.failed[pc] = np.full(S.N0, -1, np.int64)
        key = flat << 32 | phase
        before = failed.take(slots) == key
        complete = done
        if S.race is not None and done.any():
            done = done & (before | S.race.knows(flat, positions))
        everybody = bool(done.all())
        if everybody or done.any():
            on = slice(None) if everybody else np.flatnonzero(done)
            table.seen[flat[on]] = np.maximum(table.seen[flat[on]], phase[on])
            table.waits_on[slots[on]] = -1
            failed[slots[on]] = -1
            if S.race is not None and acquires:
                S.race.acquire_from(flat[on], positions[on])
            if everybody:
                S.set(p_slot, idx, np.ones(len(flat), np.bool_))
                return pc + 1, idx
        lost = ~complete & (table.waits_on.take(slots) == flat) & (phase >= table.waits_since.take(slots) + 2)
        if by_parity and lost.any():
            lanes = np.flatnonzero(lost)
            raise Fault("barrier", f"lost wake-up: two phases have completed since this thread began to wait, and parity aliases. "
                                   f"{table.describe(S, int(flat[lanes[0]]))}", lanes)  # fmt: skip
        parks = ~complete & before & (table.noticed.take(slots) == table.events)
        failed[slots[~done]] = key[~done]
        table.noticed[slots[~done]] = np.where(complete[~done], -1, table.events)  # where complete, the next try succeeds
        if parks.any():
            on = np.flatnonzero(parks)
            fresh = on[table.waits_on.take(slots[on]) != flat[on]]
            table.waits_on[slots[fresh]] = flat[fresh]
            table.waits_since[slots[fresh]] = phase[fresh]
            S.park(pc, positions[on])
            if len(on) == len(flat):
                return None
        stay = np.flatnonzero(~parks)
        sub = positions[stay]
        S.set(p_slot, None if len(sub) == S.N else sub, done[stay])
        if len(stay) == len(flat):
            return pc + 1, idx
        S.add(pc + 1, sub)
        return None

    def describe(S: State, positions: Array) -> str:
        flat = S.mbarriers.waits_on.take(S.slot.take(positions[:1]))
        return S.mbarriers.describe(S, int(flat[0])) if flat[0] >= 0 else ""

    d.op.info["describe"] = describe
    return run  # type: ignore[return-value]


def copies_arrive(d: Decoder, ins: nodes.Instruction) -> Core:
    """cp.async.mbarrier.arrive: the barrier learns when the thread's copies so far are done. Here they are."""
    place = place_of(d, ins.operands[0], ins.modifiers)
    counts = "noinc" in ins.modifiers  # else the pending count is raised first, and the arrival takes it back

    def run(S: State, idx: Any) -> None:
        index = place(S, idx)
        _used(S, index, _READ, idx)
        flat = S.mbarriers.find(index)
        if S.race is not None:
            S.race.release_to(flat, idx, with_copies=True)
        S.copies.settle(S, idx)
        if counts:
            S.mbarriers.arrive(S, flat, np.ones(len(flat), np.int64), None)

    return run


BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {"mbarrier": mbarrier}
