"""bar / barrier.cta: sync, arrive, red; bar.warp.sync. Barriers are counted per CTA and barrier number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu import cluster
from oxidnn.emu.decode import DTYPE, Core, Decoder, Source
from oxidnn.emu.memory import Array, Fault
from oxidnn.ptx import nodes

if TYPE_CHECKING:
    from oxidnn.emu.machine import State

Next = tuple[int, Any] | None


class Waiting:
    """One barrier number over all CTAs of the batch."""

    def __init__(self, ctas: int) -> None:
        self.arrived = np.zeros(ctas, np.int64)
        self.expected = np.zeros(ctas, np.int64)  # -1: all threads of the CTA
        self.true = np.zeros(ctas, np.int64)  # threads whose bar.red predicate holds
        self.total = np.zeros(ctas, np.int64)
        # (pc to go on at, slots, they wait (else bar.arrive), destination of bar.red, aligned). Slots, since those that
        # only arrive may exit, and the positions of the others move, before the barrier completes.
        self.groups: list[tuple[int, Array, bool, Any, bool]] = []

    def goal(self, S: State) -> Array:
        return np.where(self.expected < 0, everybody(S), self.expected)

    def describe(self, S: State, number: int) -> list[str]:
        goal = self.goal(S)
        texts = []
        for pc, slots, waits, _, _ in self.groups:
            if not waits:
                continue
            ins = S.program.ops[pc - 1].ins
            positions = S.positions(slots)
            cta = int(slots[0]) // S.T
            texts.append(
                f"{S.describe_threads(positions)} at {S.program.where(ins.line)} ({ins.text}), barrier {number} has "
                f"{int(self.arrived[cta])} of {int(goal[cta])} threads"
            )
        return texts


def everybody(S: State) -> Array:
    """Threads per CTA that a barrier without a count waits for: all of them, or (not strict) the live ones."""
    if S.strict_barrier:
        return np.full(S.ctas, S.T, np.int64)
    return np.count_nonzero(S.alive.reshape(S.ctas, S.T), axis=1)


def arrive(S: State, idx: Array | None, number: int, count: int | None, waits: bool, red: Any, aligned: bool) -> Next:
    pc = S.pc
    waiting = S.barriers.get(number)
    if idx is None and waiting is None and not S.partial and red is None and waits:
        if count is None or count == (S.T + 31) // 32 * 32:
            if S.race is not None:
                S.race.barrier_all()
            _settle(S)
            return pc + 1, None
    positions = np.arange(S.N) if idx is None else idx
    if waiting is None:
        waiting = S.barriers[number] = Waiting(S.ctas)
    cta = S.cta.take(positions)
    arrivals = np.bincount(cta, minlength=S.ctas)
    if count is not None and S.T % 32:  # barriers with a count count whole warps: the ragged one as 32
        arrivals += np.bincount(cta[S.thread.take(positions) == S.T - 1], minlength=S.ctas) * (32 - S.T % 32)
    here = arrivals > 0
    wanted = -1 if count is None else count
    other = here & (waiting.arrived > 0) & (waiting.expected != wanted)
    if other.any():
        seen = int(waiting.expected[other][0])
        raise Fault("barrier", f"barrier {number} is used with count {count or S.T} while others wait with {seen if seen > 0 else S.T}")
    waiting.expected[here] = wanted
    waiting.arrived += arrivals
    if red is not None:
        slot, kind, source = red
        p = np.broadcast_to(source.take(S, idx), (len(positions),))
        waiting.true += np.bincount(cta[p], minlength=S.ctas)
        waiting.total += np.bincount(cta, minlength=S.ctas)
    if S.race is not None:
        S.race.arrive(("bar", number), positions)
    waiting.groups.append((pc + 1, S.slot.take(positions), waits, None if red is None else red[:2], aligned))
    _release(S, number, waiting)
    if not waits:
        return pc + 1, idx
    return None


def _settle(S: State) -> None:
    S.barrier_rounds += 1
    if S.shared.shadow is not None and S.barrier_rounds & (S.barrier_rounds - 1) == 0:
        S.shared.settle()


def _release(S: State, number: int, waiting: Waiting) -> None:
    goal = waiting.goal(S)
    done = (waiting.arrived >= goal) & (waiting.arrived > 0)
    if not done.any():
        return
    over = done & (waiting.arrived > goal)
    if over.any():
        cta = int(np.flatnonzero(over)[0])
        raise Fault(
            "barrier",
            f"{int(waiting.arrived[cta])} threads arrive at barrier {number}, which waits for {int(goal[cta])}",
        )
    if S.strict_barrier:
        _check_divergence(S, number, waiting, done)
    left: list[tuple[int, Array, bool, Any, bool]] = []
    for pc, slots, waits, red, aligned in waiting.groups:
        of = slots // S.T
        free = done.take(of)
        if waits and free.any():
            go = S.positions(slots[free])
            if S.race is not None:
                S.race.leave(("bar", number), go)
            if red is not None:
                slot, kind = red
                true, total = waiting.true.take(of[free]), waiting.total.take(of[free])
                value: Array = {"popc": true.astype(np.uint32), "and": true == total, "or": true > 0}[kind]
                stored = DTYPE[S.program.slots[slot].type]
                S.put(slot, go, value if value.dtype == stored else value.view(stored))
            S.add(pc, go)
        if not free.all():
            left.append((pc, slots[~free], waits, red, aligned))
    waiting.groups = left
    for array in (waiting.arrived, waiting.expected, waiting.true, waiting.total):
        array[done] = 0
    if not waiting.arrived.any():
        del S.barriers[number]
    _settle(S)


def _check_divergence(S: State, number: int, waiting: Waiting, done: Array) -> None:
    """bar.sync is aligned: all threads of a warp must execute the same bar instruction. (A warp may arrive and then sync.)"""
    groups = [(pc, slots[done.take(slots // S.T)]) for pc, slots, waits, _, aligned in waiting.groups if aligned and waits]
    if len({pc for pc, _ in groups}) < 2:
        return
    where = np.concatenate([slots for _, slots in groups])
    pcs = np.concatenate([np.full(len(slots), pc) for pc, slots in groups])
    order = np.argsort(where)
    where, pcs = where[order], pcs[order]
    warp = where // S.T * S.warps_per_cta + where % S.T // 32
    mixed = np.flatnonzero((warp[1:] == warp[:-1]) & (pcs[1:] != pcs[:-1]))
    if len(mixed):
        at = int(mixed[0])
        first, second = S.program.ops[int(pcs[at]) - 1].ins, S.program.ops[int(pcs[at + 1]) - 1].ins
        raise Fault(
            "barrier",
            f"divergent barrier {number}: threads of one warp wait at {S.program.where(first.line)} ({first.text}) and at "
            f"{S.program.where(second.line)} ({second.text})",
            np.array([0]),
            S.positions(where[at : at + 1]),
        )


def recheck(S: State) -> None:
    """Threads have exited: barriers that count the live threads may now be complete."""
    for number, waiting in list(S.barriers.items()):
        _release(S, number, waiting)


def bar(d: Decoder, ins: nodes.Instruction) -> Core:
    mods = [m for m in ins.modifiers if m not in ("cta",)]
    if mods and mods[0] == "warp":
        return _bar_warp(d, ins)
    if mods and mods[0] == "cluster":
        return cluster.barrier_cluster(d, ins)
    aligned = ins.opcode == "bar" or "aligned" in mods
    mods = [m for m in mods if m != "aligned"]
    operands = list(ins.operands)
    red: Any = None
    if mods[0] == "red":
        kind, type_ = mods[1], mods[2]
        if kind not in ("popc", "and", "or") or type_ != ("u32" if kind == "popc" else "pred"):
            d.refuse("unknown bar.red")
        slot, _ = d.dst(operands.pop(0), type_)
        red = (slot, kind, d.src(operands.pop(), "pred"))
    elif mods not in (["sync"], ["arrive"]):
        d.refuse("unknown barrier")
    waits = mods[0] != "arrive"
    if not 1 <= len(operands) <= 2 or (not waits and len(operands) != 2):
        d.refuse("wrong number of operands")
    number = d.src(operands[0], "u32")
    count = d.src(operands[1], "u32") if len(operands) == 2 else None
    for operand, limit in zip(operands, (15, 1024), strict=False):
        if isinstance(operand, nodes.Imm) and not 0 <= int(operand.value) <= limit:
            d.refuse(f"{operand.value} is out of range (0 to {limit})")
    d.op.kind = "barrier"

    def run(S: State, idx: Array | None) -> Next:
        return _dispatch(S, idx, number, count, waits, red, aligned)

    return run  # type: ignore[return-value]


def _dispatch(
    S: State, idx: Array | None, number: Source, count: Source | None, waits: bool, red: Any, aligned: bool
) -> Next:
    numbers = number.take(S, idx)
    counts = count.take(S, idx) if count is not None else None
    if counts is not None:
        bad = (counts == 0) | (counts % np.uint32(32) != 0) | (counts > 1024)
        if bad.any():
            raise Fault("barrier", f"the count {int(counts[bad][0])} is not a multiple of 32 up to 1024", np.flatnonzero(bad))
    if len(numbers) == 1 and (counts is None or len(counts) == 1):
        return arrive(S, idx, int(numbers[0]), None if counts is None else int(counts[0]), waits, red, aligned)
    # numbers or counts differ between threads: one arrival for each pair
    positions = np.arange(S.N) if idx is None else idx
    each = np.broadcast_to(numbers.astype(np.int64), (len(positions),))
    per = np.broadcast_to(np.int64(-1) if counts is None else counts.astype(np.int64), (len(positions),))
    pairs = each * 4096 + per
    for pair in np.unique(pairs).tolist():
        part = positions[pairs == pair]
        limit = None if counts is None else int(per[pairs == pair][0])
        if arrive(S, part, int(each[pairs == pair][0]), limit, waits, red, aligned) is not None:
            S.add(S.pc + 1, part)
    return None


def _bar_warp(d: Decoder, ins: nodes.Instruction) -> Core:
    d.op.kind = "warp"
    (mask,) = ins.operands
    if not (isinstance(mask, nodes.Imm) and int(mask.value) & 0xFFFFFFFF == 0xFFFFFFFF):
        d.op.info["mask"] = d.src(mask, "b32")
    else:
        d.op.info["all"] = True

    def run(S: State, idx: Array | None) -> None:
        if S.race is not None:
            S.race.warp_sync(idx)

    return run


BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {"bar": bar, "barrier": bar}
