"""Data races in shared memory, by vector clocks.

Agents of a CTA: its warps, and each warp's queue of cp.async copies. `clock[cta, a, b]` is the latest time of agent b
that a knows of. Per granule of shared memory stands the last write (pc, agent, time) and the time of each agent's last
read. An access races with an earlier one of another agent whose time it does not know. Times advance at releases.

bar.sync joins the clocks of its threads; a wait for copies acquires what the queue had done by the commit of the
group. Atomics synchronise as the memory model has it: release = fence before (or .release), acquire = fence after (or
.acquire); one location stands for all of a CTA. Races inside a warp are not seen.

Most kernels read between barriers what was written before them. Reads are therefore only noted while nothing has been
written since the last barrier of all threads, and forgotten at the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu.access import Access
from oxidnn.emu.memory import SHARED_BASE, Array, Fault

if TYPE_CHECKING:
    from oxidnn.emu.machine import State

MANY = 1023  # state of a granule that several agents have read since its last write


def granule_of(widths: list[int]) -> int:
    """The size of what is tracked: the narrowest access, at most 4 bytes."""
    return min([4, *widths])


class SharedRace:
    def __init__(self, S: State) -> None:
        self.S = S
        self.warps = S.warps_per_cta
        self.agents = 2 * self.warps
        n, a = S.ctas, self.agents
        self.clock = np.zeros((n, a, a), np.int32)
        each = np.arange(a)
        self.clock[:, each, each] = 1
        program = S.program
        self.granule = granule_of([op.info["access"].width for op in program.ops if "access" in op.info])
        granules = n * S.shared.stride // self.granule
        self.writes = np.zeros(granules, np.int64)  # pc << 44 | atomic << 43 | agent << 32 | time
        self.reads = np.zeros(granules * a, np.int32)  # time of every agent's last read
        self.readers = np.zeros(granules, np.int32)  # pc << 10 | agent + 1, or MANY
        self.per_cta = max(1, S.shared.stride // self.granule)
        self.committed = np.zeros(n * self.warps, np.int64)  # copy groups of a warp
        self.released: dict[Any, Array] = {}
        self.fenced: Array | None = None  # (ctas, warps, agents): what the warp's last fence covered
        self.heard: Array | None = None  # (ctas, warps, agents): what the warp's atomics saw, acquired by a fence
        self.location = np.zeros((n, a), np.int32)
        self.noted: list[tuple[Array, Access, Array | None, int]] = []  # reads: index, access, positions, pc
        self.written = False  # something may have been written that not everybody knows of
        self.has_copies = False

    # -- order

    def _warps(self, positions: Array | None) -> tuple[Array, Array]:
        """(cta, warp of the CTA) of every warp among the threads."""
        S = self.S
        warp = S.warp if positions is None else S.warp.take(positions)
        warp = warp[np.r_[True, warp[1:] != warp[:-1]]]  # positions are sorted
        return warp // self.warps, warp % self.warps

    def barrier_all(self) -> None:
        """A barrier that all live threads of every CTA pass together."""
        w = self.warps
        if self.S.N == self.S.N0:
            self.clock[:, :w] = self.clock[:, :w].max(axis=1, keepdims=True)
            each = np.arange(w)
            self.clock[:, each, each] += 1
            self.noted.clear()
            self.written = self.has_copies
            return
        self.arrive("all", None)
        self.leave("all", None)

    def arrive(self, key: Any, positions: Array | None) -> None:
        """The warps release what they know to the barrier `key`."""
        self.flush()
        cta, warp = self._warps(positions)
        table = self.released.get(key)
        if table is None:
            table = self.released[key] = np.zeros((self.S.ctas, self.agents), np.int32)
        np.maximum.at(table, cta, self.clock[cta, warp])
        self.clock[cta, warp, warp] += 1

    def leave(self, key: Any, positions: Array | None) -> None:
        """The warps acquire what the barrier `key` has collected."""
        cta, warp = self._warps(positions)
        self.clock[cta, warp] = np.maximum(self.clock[cta, warp], self.released[key][cta])

    def warp_sync(self, idx: Array | None) -> None:
        """bar.warp.sync orders lanes of one warp, which are one agent here."""

    def commit_copies(self, S: State, idx: Array | None) -> None:
        cta, warp = self._warps(idx)
        self.committed[cta * self.warps + warp] += 1
        self.clock[cta, self.warps + warp, self.warps + warp] += 1

    def wait_copies(self, S: State, idx: Array | None, allowed: int | None) -> None:
        # group i (from 1) wrote at time i of the queue
        cta, warp = self._warps(idx)
        queue = self.warps + warp
        done = self.clock[cta, queue, queue] if allowed is None else self.committed[cta * self.warps + warp] - allowed
        self.clock[cta, warp, queue] = np.maximum(self.clock[cta, warp, queue], done)

    def fence(self, idx: Array | None) -> None:
        """A fence covers all before it for later releases, and acquires what atomics before it saw."""
        self.flush()
        cta, warp = self._warps(idx)
        if self.fenced is None or self.heard is None:
            self.fenced = np.zeros((self.S.ctas, self.warps, self.agents), np.int32)
            self.heard = np.zeros_like(self.fenced)
        self.clock[cta, warp] = np.maximum(self.clock[cta, warp], self.heard[cta, warp])
        self.fenced[cta, warp] = self.clock[cta, warp]
        self.clock[cta, warp, warp] += 1

    def _synchronise(self, access: Access, positions: Array | None) -> None:
        cta, warp = self._warps(positions)
        if "release" in access.order:
            np.maximum.at(self.location, cta, self.clock[cta, warp])
            self.clock[cta, warp, warp] += 1
        elif self.fenced is not None:
            np.maximum.at(self.location, cta, self.fenced[cta, warp])
        if "acquire" in access.order:
            self.clock[cta, warp] = np.maximum(self.clock[cta, warp], self.location[cta])
        elif self.heard is not None:
            self.heard[cta, warp] = np.maximum(self.heard[cta, warp], self.location[cta])

    # -- accesses

    def access(self, S: State, index: Array, access: Access, idx: Array | None) -> None:
        """Check and record an access of `access.width` bytes per lane at the elements `index`."""
        if access.kind == "read" and not access.sync:
            if not self.written and len(self.noted) < 512:
                self.noted.append((index, access, idx, S.pc))
                return
        else:
            self.written = True
            self.has_copies |= access.kind == "async write"
        if self.noted:
            self.flush()
        self._track(S, index, access, idx, S.pc)

    def flush(self) -> None:
        """Record the noted reads; needed before a write, and before clocks or positions change."""
        noted, self.noted = self.noted, []
        for index, access, idx, pc in noted:
            self._track(self.S, index, access, idx, pc)

    def _track(self, S: State, index: Array, access: Access, idx: Array | None, pc: int) -> None:
        positions = idx
        warp = S.warp if idx is None else S.warp.take(idx)
        if len(index) != len(warp):
            index = np.broadcast_to(index, (len(warp),))
        if access.sync:
            self._synchronise(access, positions)
        cta, agent = warp // self.warps, warp % self.warps
        if access.kind == "async write":
            queue = agent + self.warps
            c, w = self._warps(idx)
            q = w + self.warps
            own = self.clock[c, q, q]
            self.clock[c, q] = np.maximum(self.clock[c, q], self.clock[c, w])
            self.clock[c, q, q] = own
            agent = queue
        width, size = access.width, self.granule
        row = (cta * self.agents + agent) * self.agents
        if width > size:
            per = width // size
            cells = (index[:, None] * per + np.arange(per)).reshape(-1)
            agent, row = np.repeat(agent, per), np.repeat(row, per)
        else:
            per = 1
            cells = index if width == size else index * width // size
        clock = self.clock.reshape(-1)
        last = self.writes.take(cells)
        writer = last >> 32 & 0x7FF
        known = clock.take(row + writer)
        clash = ((last & 0xFFFFFFFF) > known) & (last != 0)
        kind = access.kind
        atomic = kind == "atomic" or access.sync
        if atomic:
            clash &= (last >> 43 & 1) == 0
        if np.count_nonzero(clash):
            at = int(np.flatnonzero(clash)[0])
            self._report(S, access, int(cells[at]), at // per, int(last[at]) >> 44, int(writer[at]), "write", positions)
        now = clock.take(row + agent)
        if kind == "read" and not atomic:
            self.reads[cells * self.agents + agent] = now
            seen = self.readers.take(cells) & MANY
            state = np.where((seen == 0) | (seen == agent + 1), agent + 1, MANY)
            mark = (np.int32(pc << 10) | state).astype(np.int32)
            self.readers[cells] = mark
            # lanes of several warps may have met at one granule in this very instruction
            lost = self.readers.take(cells) != mark
            if np.count_nonzero(lost):
                self.readers[cells[lost]] = pc << 10 | MANY
            return
        seen = self.readers.take(cells) & MANY
        if np.count_nonzero(seen):
            one = np.flatnonzero((seen > 0) & (seen < MANY))
            if len(one):
                other = seen[one] - 1
                late = self.reads.take(cells[one] * self.agents + other) > clock.take(row[one] + other)
                late &= other != agent[one]
                if np.count_nonzero(late):
                    k = int(np.flatnonzero(late)[0])
                    at = int(one[k])
                    self._report(S, access, int(cells[at]), at // per, int(self.readers[cells[at]]) >> 10, int(other[k]), "read", positions)
            many = np.flatnonzero(seen == MANY)
            if len(many):
                each = np.arange(self.agents)
                times = self.reads.take(cells[many, None] * self.agents + each)
                late2 = (times > clock.take(row[many, None] + each)) & (each != agent[many, None])
                if np.count_nonzero(late2):
                    rows, columns = np.nonzero(late2)
                    cell, agent2 = int(many[rows[0]]), int(columns[0])
                    self._report(S, access, int(cells[cell]), cell // per, int(self.readers[cells[cell]]) >> 10, agent2, "read", positions)
            self.readers[cells] = 0
        if kind == "read":
            return
        mark64 = (np.int64(pc) << 44) | (np.int64(atomic) << 43) | (agent.astype(np.int64) << 32) | now
        self.writes[cells] = mark64
        if not atomic:
            lost = self.writes.take(cells) != mark64
            if np.count_nonzero(lost):
                at = int(np.flatnonzero(lost)[0])
                rival = int(self.writes[cells[at]]) >> 32 & 0x7FF
                self._report(S, access, int(cells[at]), at // per, pc, rival, "write", positions)

    def _report(
        self, S: State, access: Access, cell: int, lane: int, pc: int, agent: int, what: str, positions: Array | None
    ) -> None:
        offset = cell % self.per_cta * self.granule + SHARED_BASE
        ins = S.program.ops[pc].ins
        who = f"warp {agent}" if agent < self.warps else f"a cp.async of warp {agent - self.warps}"
        verb = {"read": "reads", "write": "writes", "atomic": "updates", "async write": "copies to"}[access.kind]
        raise Fault(
            "race",
            f"{verb} shared address {offset:#x}{S.shared_name(offset)} while the {what} by {who} at line {ins.line} "
            f"({ins.text}) is not ordered before it",
            np.array([lane]),
            positions,
        )

    def finish(self) -> None:
        """Nothing is left to check at the end of a batch."""
