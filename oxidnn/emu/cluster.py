"""Thread block clusters: addresses of another CTA's shared memory, and the barrier of a cluster.

A shared::cluster address is a shared address with the rank of its CTA, plus one, in bits 24 up; without a rank it
means the executing CTA. The CTAs of a cluster lie side by side in a batch, so that they advance together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu.access import RANK_SHIFT
from oxidnn.emu.decode import DTYPE, Core, Decoder
from oxidnn.emu.memory import Array, Fault
from oxidnn.ptx import nodes

if TYPE_CHECKING:
    from oxidnn.emu.machine import State

_OFFSET = (1 << RANK_SHIFT) - 1


def mapa(d: Decoder, ins: nodes.Instruction) -> Core:
    """mapa: the address of the same variable in the CTA of a given rank."""
    type_ = ins.modifiers[-1]
    dst, a, rank = ins.operands
    dtype = DTYPE[type_]
    is_generic = "shared::cluster" not in ins.modifiers
    keep = dtype.type(~(0xFF << RANK_SHIFT) & ((1 << 8 * dtype.itemsize) - 1) if is_generic else _OFFSET)

    def fn(x: Array, r: Array) -> Array:
        return (x & keep) | ((r.astype(dtype) + dtype.type(1)) << dtype.type(RANK_SHIFT))

    return d.emit(fn, dst, dtype, [d.src(a, type_), d.src(rank, "u32")])


def getctarank(d: Decoder, ins: nodes.Instruction) -> Core:
    dst, a = ins.operands
    slot, stored = d.dst(dst, "u32")
    source = d.src(a, ins.modifiers[-1])

    def run(S: State, idx: Any) -> None:
        x = source.take(S, idx)
        rank = (x >> x.dtype.type(RANK_SHIFT)).astype(np.int64) & 0xFF
        own = (S.cta if idx is None else S.cta.take(idx)) % S.cluster_size
        S.set(slot, idx, np.where(rank == 0, own, rank - 1).astype(np.uint32).view(stored))

    return run


class ClusterBarrier:
    """barrier.cluster of every cluster of a batch."""

    def __init__(self, S: State) -> None:
        clusters = S.ctas // S.cluster_size
        self.arrived = np.zeros(clusters, np.int64)
        self.phase = np.zeros(clusters, np.int64)
        self.since = np.full(S.N0, -1, np.int64)  # by slot: the phase a thread has arrived in, -1 for none

    def arrive(self, S: State, idx: Any, releases: bool) -> None:
        slots = S.slot if idx is None else S.slot.take(idx)
        cluster = (S.cta if idx is None else S.cta.take(idx)) // S.cluster_size
        twice = self.since.take(slots) >= 0
        if twice.any():
            raise Fault("barrier", "arrives at the cluster barrier again without a wait", np.flatnonzero(twice))
        self.since[slots] = self.phase.take(cluster)
        self.arrived += np.bincount(cluster, minlength=len(self.arrived))
        if S.race is not None:
            S.race.cluster_arrive(idx, releases)
        self.complete(S)

    def complete(self, S: State) -> None:
        """Threads that have exited do not count."""
        living = np.count_nonzero(S.alive.reshape(len(self.arrived), -1), axis=1)
        done = (self.arrived >= living) & (self.arrived > 0)
        if done.any():
            self.phase[done] += 1
            self.arrived[done] = 0
            if S.race is not None:
                S.race.cluster_done(np.flatnonzero(done))
            if S.parked:
                S.wake()

    def exited(self, S: State, slots: Array) -> None:
        """A thread that arrived and exits without a wait no longer counts as arrived either."""
        cluster = slots // (S.T * S.cluster_size)
        gone = self.since.take(slots) == self.phase.take(cluster)
        self.arrived -= np.bincount(cluster[gone], minlength=len(self.arrived))
        self.complete(S)


def barrier_cluster(d: Decoder, ins: nodes.Instruction) -> Core:
    mods = [m for m in ins.modifiers if m not in ("cluster", "aligned")]
    if mods[0] == "arrive":
        releases = "relaxed" not in mods
        return lambda S, idx: S.cluster_barrier.arrive(S, idx, releases)
    if mods[0] != "wait":
        d.refuse("unknown cluster barrier")
    d.op.kind = "wait"

    def wait(S: State, idx: Any) -> tuple[int, Any] | None:
        barrier = S.cluster_barrier
        positions = np.arange(S.N, dtype=np.int64) if idx is None else idx
        slots = S.slot.take(positions)
        since = barrier.since.take(slots)
        if (since < 0).any():
            raise Fault("barrier", "waits at the cluster barrier without having arrived", np.flatnonzero(since < 0))
        done = barrier.phase.take(S.cta.take(positions) // S.cluster_size) > since
        on = positions if done.all() else positions[done]
        if len(on):
            barrier.since[S.slot.take(on)] = -1
            if S.race is not None:
                S.race.cluster_wait(on)
        if len(on) == len(positions):
            return S.pc + 1, idx
        S.park(S.pc, positions[~done])
        if len(on):
            S.add(S.pc + 1, on)
        return None

    def describe(S: State, positions: Array) -> str:
        cluster = int(S.cta[positions[0]]) // S.cluster_size
        living = int(np.count_nonzero(S.alive.reshape(len(S.cluster_barrier.arrived), -1)[cluster]))
        return f"{int(S.cluster_barrier.arrived[cluster])} of {living} threads of the cluster have arrived"

    d.op.info["describe"] = describe
    return wait  # type: ignore[return-value]


BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {"mapa": mapa, "getctarank": getctarank}
