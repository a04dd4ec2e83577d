"""The machine: runs the grid of a Program.

A batch of CTAs runs in lock step: a register is one array over all N threads of the batch. Threads stand in groups,
one per program counter; the group with the lowest pc runs until it reaches the pc of another group, where the two
merge (reconvergence). `idx` is the sorted int64 positions of a group's threads, or None when it holds all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu import asynccopy, barrier, bulk, cluster, floats, mbarrier, shuffle, wgmma
from oxidnn.emu.access import Place
from oxidnn.emu.checkers import observer
from oxidnn.emu.checkers.race import reader_agents, shared_granule
from oxidnn.emu.decode import DTYPE, Op, Source
from oxidnn.emu.memory import SHARED_BASE, Array, Fault, GlobalMemory, Window
from oxidnn.emu.special import special_register
from oxidnn.emu.trace import Counters
from oxidnn.errors import EmulatorFault

if TYPE_CHECKING:
    from oxidnn.emu.program import Program

BATCH_THREADS = 16384
BATCH_SHARED_BYTES = 32 << 20
BATCH_RACE_BYTES = 64 << 20
SPIN_SLICE = 512  # backward branches after which another group gets its turn
NEVER = 1 << 30

# Registers are arrays of about 100 KB that come and go. glibc would give each one back to the system and fault its
# pages in again; freeing one large block teaches it to keep memory of up to that size.
np.empty(16 << 20, np.uint8)


@dataclass
class Launch:
    """One launch: the grid cut into batches of whole clusters."""

    program: Program
    memory: GlobalMemory
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    enabled: frozenset[str]
    params: bytes
    tensor_core: str
    step_limit: int
    follows: bool = False  # the launch before it may still run
    counters: Counters = field(default_factory=Counters)
    steps_left: int = 0
    bound: list[tuple[int, Array]] = field(default_factory=list)
    global_race: Any = None

    def run(self, random: np.random.Generator | None) -> None:
        program = self.program
        self.steps_left = self.step_limit
        self.counters.lines = program.lines
        addresses = program.variable_addresses(self.memory)
        block = np.frombuffer(bytearray(self.params), np.uint8)
        pointer = None
        if program.decoder.takes_param_address:
            aligned = np.zeros(len(block) + 128, np.uint8)
            start = -aligned.ctypes.data % 128
            block = aligned[start : start + len(block)]
            block[:] = np.frombuffer(self.params, np.uint8)
            pointer = self.memory.register(block, f"parameters of {program.name}", writable=False)
        for slot in program.slots:
            if slot.kind == "param":
                dtype = DTYPE[slot.type]
                value = block[slot.offset : slot.offset + dtype.itemsize].copy().view(dtype)
                self.bound.append((slot.index, value))
            elif slot.kind == "param address":
                assert pointer is not None
                self.bound.append((slot.index, np.array([pointer + slot.offset], np.uint64)))
            elif slot.kind == "variable":
                self.bound.append((slot.index, np.array([addresses[slot.name] + slot.offset], np.uint64)))
        per_cta = self.threads[0] * self.threads[1] * self.threads[2]
        cluster_size = self.cluster[0] * self.cluster[1] * self.cluster[2]
        total = self.grid[0] * self.grid[1] * self.grid[2]
        shared = program.dynamic_offset + self.dynamic_smem if self.dynamic_smem else program.static_shared
        wide = max(1, BATCH_THREADS // per_cta)
        if shared:
            wide = min(wide, max(1, BATCH_SHARED_BYTES // shared))
        if shared and "race" in self.enabled:  # the race checker keeps a time per 4 bytes and agent
            agents = reader_agents(program, per_cta) * cluster_size
            wide = min(wide, max(1, BATCH_RACE_BYTES // (shared * (agents + 3) * 4 // shared_granule(program))))
        wide = max(cluster_size, wide // cluster_size * cluster_size)
        if "race" in self.enabled:
            self.global_race = observer("global_race", self)
        else:
            self.memory.touched = None
        has_waited = not self.follows or self.global_race is None or not total
        try:
            for first in range(0, total, wide):
                count = min(wide, total - first)
                state = State(self, first, count, shared)
                state.run(random)
                self.counters.batches += 1
                if state.waited is not None and self.global_race is not None:
                    has_waited |= bool(state.waited.any())
                    self.global_race.lets_start_early |= not state.waited.reshape(count, -1).any(axis=1).all()
        finally:
            if pointer is not None:
                self.memory.unregister(pointer)
            self.memory.settle()
            if self.global_race is not None:
                self.global_race.tables.clear()  # which know the states, and these the launch
        if self.global_race is not None and not self.global_race.lets_start_early:
            self.memory.touched = self.global_race.own  # the launches before have ended before that behind starts
        if not has_waited:
            raise EmulatorFault(f"[race] {program.name} ends without griddepcontrol.wait: the launch behind it may meet the one before it")


    def cta_name(self, linear: int) -> str:
        """'(x,y,z)' of a CTA of the grid, numbered as `State.coordinates` counts."""
        (gx, gy, _), (cx, cy, cz) = self.grid, self.cluster
        size, nx, ny = cx * cy * cz, gx // cx, gy // cy
        cluster, rank = divmod(linear, size)
        return (f"({cluster % nx * cx + rank % cx},{cluster // nx % ny * cy + rank // cx % cy},"
                f"{cluster // (nx * ny) * cz + rank // (cx * cy)})")


class State:
    """One batch of CTAs in execution."""

    def __init__(self, launch: Launch, first: int, count: int, shared: int) -> None:
        self.launch = launch
        self.program = program = launch.program
        self.memory = launch.memory
        self.counters = launch.counters
        self.first_cta = first
        self.ctas = count
        tx, ty, tz = launch.threads
        self.T = T = tx * ty * tz
        self.N = self.N0 = N = T * count
        self.warps_per_cta = (T + 31) // 32
        self.uninit = "uninit" in launch.enabled
        self.strict_barrier = "barrier" in launch.enabled
        self.async_checks = "async" in launch.enabled
        self.exact_mma = launch.tensor_core == "exact"
        self.cluster_size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        self.pc = 0
        self.undef: dict[int, Array] = {}
        self.busy: set[int] = set()  # registers that a wgmma in flight uses
        self.ready: dict[int, Array | None] = {}
        self.sync_wait: dict[int, Array] = {}
        self.parked: dict[int, Array] = {}  # threads that wait for an event: pc to try again, positions
        self.barriers: dict[int, barrier.Waiting] = {}
        self.live = N
        self.partial = False  # a live CTA has exited threads
        self.alive = np.ones(N, np.bool_)  # by slot
        self.whole = T % 32 == 0  # every warp is complete and in order
        pattern = program.pattern
        self.slot: Array = pattern(("slot", N), lambda: np.arange(N, dtype=np.int64))
        self.thread: Array = pattern(("thread", T, count), lambda: np.tile(np.arange(T, dtype=np.int64), count))
        self.cta: Array = pattern(("cta", T, count), lambda: np.repeat(np.arange(count, dtype=np.int64), T))
        self.warp: Array = pattern(("warp", T, count), lambda: self.cta * self.warps_per_cta + (self.thread >> 5))
        self.lane: Array = pattern(("lane", T, count), lambda: self.thread & 31)
        self.shared = Window(count, shared, SHARED_BASE, self.uninit)
        stride = self.shared.stride
        self.shared_offset: Array = (
            pattern(("offset", T, count, stride), lambda: self.cta * stride) if count > 1 else np.zeros(1, np.int64)
        )
        self.local = Window(N, program.local_size, 0, self.uninit) if program.local_size else Window(0, 0, 0, False)
        self.copies = asynccopy.Queue(N)
        self.registers: wgmma.Registers | None = None
        if program.is_async:
            self.mbarriers = mbarrier.Table(self)
            self.bulk_groups = bulk.Groups(self)
            self.products = wgmma.Products(self)
            self.cluster_barrier = cluster.ClusterBarrier(self)
        self.race = observer("race", self) if "race" in launch.enabled else None
        self.bank = observer("bank", self) if "bank" in launch.enabled else None
        self.global_race = launch.global_race
        # by slot: has waited for the launch before; None: that one has ended
        self.waited = np.zeros(N, np.bool_) if launch.follows and launch.global_race is not None else None
        self.R: list[Any] = list(program.template)
        for index, value in launch.bound:
            self.R[index] = value
        self.varying: list[int] = []
        for slot in program.slots:
            if slot.kind == "special":
                value = special_register(self, slot.name, DTYPE[slot.type])
                self.R[slot.index] = value
                if value.size > 1:
                    self.varying.append(slot.index)
        self.places: dict[int, Place] = {}
        self.fragments: dict[Any, tuple[tuple[Array, ...], Array]] = {}  # dense mma operands of registers
        self.guards: dict[tuple[int, bool], tuple[Any, Array, int, Array | None]] = {}
        self.checked = bytearray(len(program.ops))  # instructions all of whose registers something has written
        self.barrier_rounds = 0

    # -- places and times

    def coordinates(self) -> tuple[Array, Array, Array, Array]:
        """ctaid x, y, z and the rank in the cluster, per CTA of the batch."""
        gx, gy, _ = self.launch.grid
        cx, cy, cz = self.launch.cluster
        size = cx * cy * cz
        linear = np.arange(self.first_cta, self.first_cta + self.ctas, dtype=np.int64)
        cluster, rank = linear // size, linear % size
        nx, ny = gx // cx, gy // cy
        x = cluster % nx * cx + rank % cx
        y = cluster // nx % ny * cy + rank // cx % cy
        z = cluster // (nx * ny) * cz + rank // (cx * cy)
        return x, y, z, rank

    def ticks(self) -> int:
        return self.counters.steps * 4

    # -- registers

    def positions(self, slots: Array) -> Array:
        """Where the threads `slots` (sorted, alive) stand now."""
        return slots if self.N == self.N0 else np.searchsorted(self.slot, slots).clip(max=self.N - 1)

    def lanes(self, idx: Array | None) -> int:
        return self.N if idx is None else len(idx)

    def set(self, slot: int, idx: Array | None, value: Array) -> None:
        if idx is None:
            self.R[slot] = value
            if self.undef:
                self.undef.pop(slot, None)
        else:
            self.put(slot, idx, value)

    def put(self, slot: int, idx: Array, value: Array) -> None:
        """Masked write; in place where the register already has an array of its own."""
        old = self.R[slot]
        if old is None:
            new = np.zeros(self.N, value.dtype)
            if self.uninit:
                if self.mask is not None:
                    undefined = ~self.mask
                else:
                    undefined = np.ones(self.N, np.bool_)
                    undefined[idx] = False
                new[idx] = value
                self.R[slot] = new
                self.undef[slot] = undefined
                return
        elif old.size != self.N or self.N == 1:
            new = np.empty(self.N, old.dtype)
            new[:] = old
        elif old.dtype == np.bool_:
            new = old.copy()  # guards are cached by the identity of their array
        else:
            new = old
        new[idx] = value
        self.R[slot] = new
        self.places.pop(slot, None)
        if self.fragments:
            self.fragments.clear()
        if self.undef:
            mask = self.undef.get(slot)
            if mask is not None:
                mask[idx] = False
                if not mask.any():
                    del self.undef[slot]

    def merge(self, slot: int, mask: Array, old: Any) -> None:
        """After a full-width computation: keep `old` where `mask` is false."""
        new = self.R[slot]
        if old is None:
            if self.uninit:
                if new.size != self.N:
                    new = np.broadcast_to(new, (self.N,)).copy()
                self.undef[slot] = ~mask
            self.R[slot] = new
            return
        self.R[slot] = floats.select(mask, new, old)
        if self.undef:
            undefined = self.undef.get(slot)
            if undefined is not None:
                undefined &= ~mask
                if not undefined.any():
                    del self.undef[slot]

    # -- groups

    def add(self, pc: int, idx: Array | None) -> None:
        """Put a group at `pc`, merged with the one that stands there."""
        if pc in self.ready:
            other = self.ready[pc]
            assert other is not None and idx is not None
            idx = np.concatenate((other, idx))
            idx.sort()
            if len(idx) == self.N:
                idx = None
        elif idx is not None and len(idx) == self.N:
            idx = None
        self.ready[pc] = idx

    def park(self, pc: int, idx: Array | None) -> None:
        """Let threads wait until an event wakes them; they then execute the instruction at `pc` again."""
        idx = np.arange(self.N, dtype=np.int64) if idx is None else idx
        if pc in self.parked:
            idx = np.sort(np.concatenate((self.parked[pc], idx)))
        self.parked[pc] = idx

    def wake(self) -> None:
        """An event has happened: all parked threads look again."""
        parked = list(self.parked.items())
        self.parked.clear()
        for pc, idx in parked:
            self.add(pc, idx)

    def compact(self, idx: Array) -> None:
        """Shrink the register file to the threads `idx`, the only ones left."""
        if self.race is not None:
            self.race.flush()
        R = self.R
        for slot in self.program.slots:
            if slot.kind in ("register", "special"):
                value = R[slot.index]
                if value is not None and value.size == self.N and self.N > 1:
                    R[slot.index] = value.take(idx)
        for slot_index, mask in list(self.undef.items()):
            left = mask.take(idx)
            if left.any():
                self.undef[slot_index] = left
            else:
                del self.undef[slot_index]
        self.slot, self.thread, self.cta = self.slot.take(idx), self.thread.take(idx), self.cta.take(idx)
        self.warp, self.lane = self.warp.take(idx), self.lane.take(idx)
        if self.shared_offset.size > 1:
            self.shared_offset = self.shared_offset.take(idx)
        self.N = len(idx)
        if self.N == 1 and self.shared_offset.size != 1:
            self.shared_offset = self.shared_offset[:1]
        self.guards.clear()
        self.places.clear()
        self.fragments.clear()
        self.whole = self.N % 32 == 0 and bool((self.lane.reshape(-1, 32) == np.arange(32)).all())
        self.partial = self.N % self.T != 0 or bool((self.thread.reshape(-1, self.T) != np.arange(self.T)).any())

    # -- execution

    def run(self, random: np.random.Generator | None) -> None:
        ops = self.program.ops
        if not ops:
            return
        self.ready = {0: None}
        current: Array | None = None
        try:
            pick = _lowest_pc(self) if random is None else _random_schedule(self, random)
            while True:
                if not self.ready:
                    if self.live == 0:
                        break
                    self.deadlock()
                pc, current, budget = pick()
                if current is not None and len(current) == self.live and self.N > self.live:
                    self.compact(current)
                    current = None
                self._run_group(pc, current, budget)
            if self.race is not None:
                self.race.finish()
                self.R.clear()
                self.places.clear()
                self.guards.clear()
                self.fragments.clear()
                self.shared = self.local = Window(0, 0, 0, False)
        except Fault as fault:
            raise self.report(fault) from None
        finally:
            self.race = self.bank = None  # they know the state: its arrays would wait for the garbage collector

    def _run_group(self, pc: int, idx: Array | None, budget: int) -> None:
        """Run one group until it merges, parks, ends or has used its budget of blocks."""
        code, ends, ready, counters = self.program.code, self.program.end_of_block, self.ready, self.counters
        blocks = counters.blocks
        last = len(code)
        lowest = budget >= NEVER
        self.group = idx
        while True:
            if pc >= last:
                self._exit(pc, idx)  # running off the end is ret
                return
            end = ends[pc]
            merges = False
            if ready:
                for other in ready:
                    if pc < other <= end:
                        end, merges = other, True
            if not lowest and end - pc > budget:
                end, merges = pc + budget, True
            count = end - pc
            if count:
                counters.steps += count
                lanes = self.N if idx is None else len(idx)
                counters.instructions += count * lanes
                blocks[pc, end] = blocks.get((pc, end), 0) + lanes
                if self.undef or self.busy or self.checked.find(0, pc, end) >= 0:
                    self._run_checked(pc, end, idx)
                else:
                    for p in range(pc, end):
                        self.pc = p
                        code[p](self, idx)
            pc = end
            if merges:
                self.add(pc, idx)
                return
            if pc >= last:
                continue
            self.pc = pc
            self.group = idx
            counters.steps += 1
            lanes = self.N if idx is None else len(idx)
            counters.instructions += lanes
            blocks[pc, pc + 1] = blocks.get((pc, pc + 1), 0) + lanes
            self.launch.steps_left -= 1
            if self.launch.steps_left < 0:
                raise Fault("deadlock", f"more than {self.launch.step_limit} control transfers: an endless loop?")
            went = self._control(pc, idx)
            if went is None:
                return
            new_pc, idx = went
            self.group = idx
            if self.ready:
                if not lowest:
                    budget -= count + 1
                    if budget <= 0 or new_pc in self.ready:
                        self.add(new_pc, idx)
                        return
                elif new_pc in self.ready or min(self.ready) < new_pc:
                    self.add(new_pc, idx)
                    return
                elif new_pc <= pc:
                    self.spins += 1
                    if self.spins > SPIN_SLICE:
                        self.spins = 0
                        self.rotate = True
                        self.add(new_pc, idx)
                        return
            if idx is not None and len(idx) == self.live and self.N > self.live:
                self.compact(idx)
                idx = self.group = None
            pc = new_pc

    mask: Array | None = None  # of a predicated instruction that runs for some of all the threads
    spins = 0
    rotate = False
    group: Array | None = None

    def _run_checked(self, pc: int, end: int, idx: Array | None) -> None:
        """The same as the fast loop, looking for reads of registers that nothing wrote.

        A register that no thread has written is found when an instruction runs for the first time in a batch; one that only
        some threads have written stands in `undef`, and instructions that touch it are checked each time.
        """
        ops, code, touched, undef, busy = self.program.ops, self.program.code, self.program.touched, self.undef, self.busy
        checked = self.checked
        for p in range(pc, end):
            self.pc = p
            if busy and not touched[p].isdisjoint(busy):
                self.products.check(self, ops[p], idx)
            if checked[p] and (not undef or touched[p].isdisjoint(undef)):
                code[p](self, idx)
                continue
            op = ops[p]
            mask = None
            wide = idx is None
            if op.guard is not None:
                self._check_reads((op.guard.slot,), idx, None, op)
                mask, count = self.guard_mask(op.guard, idx)
                wide = wide and count == self.N
                if count == 0:
                    continue
            if op.reads:
                self._check_reads(op.reads, idx, mask, op)
            code[p](self, idx)
            checked[p] = 1
            if undef and wide:
                for slot in op.writes:
                    undef.pop(slot, None)

    def guard_mask(self, guard: Source, idx: Array | None) -> tuple[Array | None, int]:
        """Mask of the lanes of `idx` whose guard holds (None: all of them), and their number."""
        n = self.lanes(idx)
        p = self.R[guard.slot]
        if p.size == 1 and self.N > 1:
            return None, n if bool(p[0]) != guard.inverted else 0
        if idx is not None:
            p = p.take(idx)
            mask = ~p if guard.inverted else p
            count = int(np.count_nonzero(mask))
        else:
            key = (guard.slot, guard.inverted)
            known = self.guards.get(key)
            if known is None or known[0] is not p:
                mask = ~p if guard.inverted else p
                known = self.guards[key] = (p, mask, int(np.count_nonzero(mask)), None)
            _, mask, count, _ = known
        return (None if count == n else mask), count

    def active(self, guard: Source, idx: Array | None) -> Array | None:
        """Positions of the threads of `idx` whose guard holds; None for all threads of the batch."""
        p = guard.take(self, idx)
        if p.size == 1 and self.lanes(idx) != 1:
            return (idx if bool(p[0]) else np.zeros(0, np.int64))
        on = np.flatnonzero(p)
        if len(on) == len(p):
            return idx
        return on if idx is None else idx.take(on)

    def _check_reads(self, reads: Sequence[int], idx: Array | None, mask: Array | None, op: Op) -> None:
        """Fault if one of the lanes of `idx` (where `mask`) reads a register that it has not written."""
        for slot in reads:
            if self.R[slot] is None:
                name = self.program.slots[slot].name
                if self.uninit:
                    raise Fault("uninit", f"register {name} is read before anything wrote it")
                self.R[slot] = np.zeros(1, DTYPE[self.program.slots[slot].type])
            elif self.undef and slot in self.undef:
                bad = self.undef[slot] if idx is None else self.undef[slot].take(idx)
                if mask is not None:
                    bad = bad & mask
                if op.lenient and "select" in op.info:
                    chosen, yes, no = op.info["select"]
                    if slot in (yes.slot, no.slot) and self.R[chosen.slot] is not None:  # a guard is no alternative
                        p = chosen.take(self, idx)
                        bad = bad & ((p if slot == yes.slot else np.False_) | (~p if slot == no.slot else np.False_))
                if np.count_nonzero(bad):
                    lanes = np.flatnonzero(bad)
                    name = self.program.slots[slot].name
                    positions = lanes if idx is None else idx.take(lanes)
                    raise Fault("uninit", f"register {name} is read by a thread that never wrote it", np.array([0]), positions)

    def _control(self, pc: int, idx: Array | None) -> tuple[int, Array | None] | None:
        op = self.program.ops[pc]
        guard = op.guard
        if self.uninit and (op.reads or guard is not None):
            if guard is not None and (self.R[guard.slot] is None or self.undef):
                self._check_reads((guard.slot,), idx, None, op)
        if op.kind == "branch":
            if guard is None:
                return op.target, idx
            p = guard.get(self)
            if p.size == 1 and self.N > 1:
                return (op.target if p[0] else pc + 1), idx
            if idx is not None:
                p = p.take(idx)
            taken = int(np.count_nonzero(p))
            if taken == len(p):
                return op.target, idx
            if taken == 0:
                return pc + 1, idx
            on, off = np.flatnonzero(p), np.flatnonzero(~p)
            if idx is not None:
                on, off = idx.take(on), idx.take(off)
            self.add(op.target, on)
            self.add(pc + 1, off)
            return None
        if guard is not None:
            active = self.active(guard, idx)
            if active is not idx:
                assert active is not None
                if len(active) == 0:
                    return pc + 1, idx
                rest = np.setdiff1d(np.arange(self.N) if idx is None else idx, active, assume_unique=True)
                self.add(pc + 1, rest)
                idx = active
                self.group = idx
        if op.reads and (self.undef or not self.checked[pc]):
            self._check_reads(op.reads, idx, None, op)
            if not self.undef:
                self.checked[pc] = 1
        if op.kind == "exit":
            self._exit(pc, idx)
            return None
        if op.kind == "trap":
            raise Fault("trap", "the kernel executed trap")
        if self.busy and op.kind != "warpgroup" and not self.program.touched[pc].isdisjoint(self.busy):
            self.products.check(self, op, idx)
        if op.kind in ("warp", "warpgroup"):
            chosen = idx
            if op.kind == "warpgroup":
                chosen = wgmma.complete_warpgroups(self, pc, idx)
            elif idx is not None or not self.whole or op.info.get("mask") is not None:
                chosen = shuffle.complete_warps(self, op, pc, idx)
            if chosen is not None and len(chosen) == 0:
                return None
            self.group = chosen
            self.program.code[pc](self, chosen)
            if self.undef and chosen is None:
                for slot in op.writes:
                    self.undef.pop(slot, None)
            return pc + 1, chosen
        return self.program.code[pc](self, idx)

    def _exit(self, pc: int, idx: Array | None) -> None:
        gone = self.slot if idx is None else self.slot.take(idx)
        if self.sync_wait:
            self.alive[gone] = False
            shuffle.abandoned(self)
        self.alive[gone] = False
        self.live -= len(gone)
        if self.race is not None and self.cluster_size > 1:
            ctas = np.unique(gone // self.T)
            self.race.exited(ctas[~self.alive.reshape(self.ctas, -1)[ctas].any(axis=1)])
        if self.async_checks and self.program.is_async:
            self.bulk_groups.exited(self, gone)
            self.products.exited(self, gone)
        if self.live:
            if self.program.is_async:
                self.cluster_barrier.exited(self, gone)
            self.partial = True
            if self.barriers and not self.strict_barrier:
                barrier.recheck(self)

    # -- faults

    def shared_name(self, offset: int) -> str:
        """' (byte 12 of tile)' for a shared address."""
        at = offset - SHARED_BASE
        for start, size, name in reversed(self.program.shared_names):
            if start <= at < start + size:
                return f" (byte {at - start} of {name})"
        return ""

    def deadlock(self) -> None:
        lines = []
        for number, waiting in sorted(self.barriers.items()):
            for text in waiting.describe(self, number):
                lines.append(text)
        for pc, idx in sorted(self.parked.items()):
            ins, describe = self.program.ops[pc].ins, self.program.ops[pc].info.get("describe")
            why = f", {describe(self, idx)}" if describe else ""
            lines.append(f"{self.describe_threads(idx)} at {self.program.where(ins.line)} ({ins.text}){why}")
        for pc, idx in sorted(self.sync_wait.items()):
            ins = self.program.ops[pc].ins
            where = self.describe_threads(idx)
            lines.append(f"{where} at {self.program.where(ins.line)} ({ins.text}), for the other lanes that must take part")
        waiting_for = "; ".join(lines[:12]) or "nobody waits, yet nobody can run"
        pcs = [w.groups[0][0] - 1 for w in self.barriers.values() if w.groups] + list(self.parked) + list(self.sync_wait)
        self.pc = pcs[0] if pcs else self.pc
        gone = self.N0 - self.live
        note = f" ({gone} threads of this batch have exited)" if gone else ""
        self.group = None
        raise Fault("barrier", f"deadlock{note}: waiting are {waiting_for}", None, self._first_waiting())

    def _first_waiting(self) -> Array | None:
        for waiting in self.barriers.values():
            if waiting.groups:
                return self.positions(waiting.groups[0][1][:1])
        for idx in (*self.parked.values(), *self.sync_wait.values()):
            return idx[:1]
        return None

    def describe_threads(self, positions: Array) -> str:
        """'CTA (0,0,0) threads 0-31, 64' for some positions (of the first CTA among them)."""
        cta = self.cta.take(positions)
        threads = self.thread.take(positions[cta == cta[0]])
        cuts = np.flatnonzero(np.diff(threads) != 1)
        starts, ends = threads[np.r_[0, cuts + 1]], threads[np.r_[cuts, len(threads) - 1]]
        spans = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        more = len(np.unique(cta)) - 1
        tail = f" (and {more} more CTAs)" if more else ""
        return f"CTA {self.cta_name(int(cta[0]))} threads {', '.join(spans[:6])}{', ...' if len(spans) > 6 else ''}{tail}"

    def cta_name(self, local: int) -> str:
        return self.launch.cta_name(self.first_cta + local)

    def report(self, fault: Fault) -> EmulatorFault:
        """The exception of a fault: checker, kernel, PTX line and text, CTA and thread."""
        op = self.program.ops[min(self.pc, len(self.program.ops) - 1)]
        positions = fault.positions if fault.positions is not None else self.group
        lane = int(fault.lanes[0]) if fault.lanes is not None and len(fault.lanes) else 0
        at = lane if positions is None else int(positions[min(lane, len(positions) - 1)])
        cta, thread = int(self.cta[at]), int(self.thread[at])
        tx, ty, _ = self.launch.threads
        place = f"({thread % tx},{thread // tx % ty},{thread // (tx * ty)})"
        origin = self.program.source_map(op.ins.line) if self.program.source_map else ""
        others = f" and {len(fault.lanes) - 1} more threads" if fault.lanes is not None and len(fault.lanes) > 1 else ""
        text = (
            f"[{fault.checker}] {fault.message}\n"
            f"  kernel {self.program.name}, PTX line {op.ins.line}: {op.ins.text}\n"
            f"  CTA {self.cta_name(cta)}, thread {place}, warp {thread >> 5}, lane {thread & 31}{others}"
            + (f"\n  from {origin}" if origin else "")
        )
        error = EmulatorFault(text)
        for name, value in {
            "checker": fault.checker, "kernel": self.program.name, "line": op.ins.line, "text": op.ins.text,
            "cta": self.cta_name(cta), "thread": thread, "detail": fault.message,
        }.items():  # fmt: skip
            setattr(error, name, value)
        return error


def _lowest_pc(S: State) -> Callable[[], tuple[int, Array | None, int]]:
    """The lowest pc first; after many backward branches with others waiting, another group gets a slice."""
    turn = 0

    def pick() -> tuple[int, Array | None, int]:
        nonlocal turn
        if S.rotate and len(S.ready) > 1:
            S.rotate = False
            turn += 1
            order = sorted(S.ready)
            pc = order[1:][turn % (len(order) - 1)]
            return pc, S.ready.pop(pc), SPIN_SLICE
        pc = min(S.ready)
        return pc, S.ready.pop(pc), NEVER

    return pick


def _random_schedule(S: State, random: np.random.Generator) -> Callable[[], tuple[int, Array | None, int]]:
    """A random group, or a random part of its warps, for a random number of instructions."""

    def pick() -> tuple[int, Array | None, int]:
        order = sorted(S.ready)
        pc = order[int(random.integers(len(order)))]
        idx = S.ready.pop(pc)
        budget = int(random.integers(1, 24))
        if random.random() < 0.5:
            warps = S.warp if idx is None else S.warp.take(idx)  # sorted
            if warps[0] != warps[-1]:
                chosen = random.random(int(warps[-1]) + 1) < random.random()
                picked = chosen.take(warps)
                if 0 < np.count_nonzero(picked) < len(picked):
                    positions = np.arange(S.N) if idx is None else idx
                    S.add(pc, positions[~picked])
                    idx = positions[picked]
        return pc, idx, budget

    return pick
