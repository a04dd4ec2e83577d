"""Data races in global memory between CTAs: two CTAs touch the same bytes with plain accesses, one of them writes.

CTAs of a launch always count as concurrent. Atomics (and relaxed, volatile, acquire and release accesses) are exempt,
and order CTAs: what a CTA did before a fence and an atomic is known to the CTAs that fence after an atomic of their
own that came later. A CTA is one agent; order inside it is not checked here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu.access import Access
from oxidnn.emu.checkers.race import granule_of
from oxidnn.emu.memory import Allocation, Array, Fault

if TYPE_CHECKING:
    from oxidnn.emu.bulk import Issue
    from oxidnn.emu.machine import Launch, State

MANY = -1


class GlobalRace:
    def __init__(self, launch: Launch) -> None:
        self.granule = granule_of([op.info["access"].width for op in launch.program.ops if "access" in op.info])
        self.tables: dict[int, tuple[Allocation, Array, Array, Array, Array]] = {}
        grid = launch.grid
        self.total = grid[0] * grid[1] * grid[2]
        self.published = np.zeros(self.total + 1, np.bool_)  # CTAs whose work before a fence an atomic announced
        self.fenced: set[int] = set()
        self.heard: dict[int, Array] = {}
        self.known: dict[int, Array] = {}

    def _tables(self, allocation: Allocation) -> tuple[Allocation, Array, Array, Array, Array]:
        found = self.tables.get(id(allocation))
        if found is None:
            n = len(allocation.views[1]) // self.granule + 1
            # last writer and reader as CTA number + 1 (0: none), and the pc of each
            writer, reader, writer_pc, reader_pc = (np.zeros(n, np.int32) for _ in range(4))
            found = self.tables[id(allocation)] = (allocation, writer, reader, writer_pc, reader_pc)
        return found

    def _ctas(self, S: State, idx: Array | None) -> Array:
        return (S.cta if idx is None else S.cta.take(idx)) + (S.first_cta + 1)

    def fence(self, S: State, idx: Array | None) -> None:
        for cta in np.unique(self._ctas(S, idx)).tolist():
            self.fenced.add(cta)
            if cta in self.heard:
                known = self.known.setdefault(cta, np.zeros(self.total + 1, np.bool_))
                known |= self.heard[cta]

    def _synchronise(self, S: State, access: Access, idx: Array | None) -> None:
        release, acquire = "release" in access.order, "acquire" in access.order
        ctas = np.unique(self._ctas(S, idx)).tolist()
        for cta in ctas:
            if release or cta in self.fenced:
                self.published[cta] = True
                if cta in self.known:
                    self.published |= self.known[cta]
        if not self.published.any():
            return
        snapshot = self.published.copy()
        for cta in ctas:
            self.heard[cta] = snapshot
            if acquire:
                self.known[cta] = self.known.get(cta, snapshot) | snapshot

    def access(self, S: State, allocation: Allocation, index: Array, access: Access, idx: Array | None) -> None:
        if access.sync:
            self._synchronise(S, access, idx)
            return
        if not allocation.writable:
            return
        _, writer, reader, writer_pc, reader_pc = self._tables(allocation)
        cta = self._ctas(S, idx).astype(np.int32)
        n = len(cta)
        if len(index) != n:
            index = np.broadcast_to(index, (n,))
        width, size = access.width, self.granule
        per = max(1, width // size)
        if per > 1:
            cells = (index[:, None] * per + np.arange(per)).reshape(-1)
            cta = np.repeat(cta, per)
        else:
            cells = index * width // size if width < size else index
        w = writer.take(cells)
        clash = (w != 0) & (w != cta)
        if clash.any():
            self._judge(S, allocation, access, cells, cta, w, writer_pc, clash, per, "write", idx)
        if access.kind == "read":
            r = reader.take(cells)
            mark = np.where((r == 0) | (r == cta), cta, MANY).astype(np.int32)
            reader[cells] = mark
            lost = reader.take(cells) != mark
            if lost.any():
                reader[cells[lost]] = MANY
            reader_pc[cells] = S.pc
            return
        r = reader.take(cells)
        clash = (r != 0) & (r != cta)
        if clash.any():
            self._judge(S, allocation, access, cells, cta, r, reader_pc, clash, per, "read", idx)
        writer[cells] = cta
        writer_pc[cells] = S.pc
        lost = writer.take(cells) != cta
        if lost.any():
            self._judge(S, allocation, access, cells, cta, writer.take(cells), writer_pc, lost, per, "write", idx)

    def copy(self, issue: Issue, allocation: Allocation, starts: Array, count: int, kind: str) -> None:
        """A bulk or tensor copy touches `count` bytes from each of the offsets `starts` from the allocation's origin."""
        size = self.granule
        if count % size or np.count_nonzero(starts % size):
            cells = np.unique((starts[:, None] + np.arange(count)) // size)
        else:
            cells = (starts[:, None] // size + np.arange(count // size)).reshape(-1)
        position = np.full(len(cells), issue.position)
        self.access(issue.S, allocation, cells, Access(0, self.granule, "read" if kind == "read" else "write"), position)

    def _judge(
        self, S: State, allocation: Allocation, access: Access, cells: Array, cta: Array, other: Array, pcs: Any,
        clash: Array, per: int, what: str, idx: Array | None,
    ) -> None:  # fmt: skip
        """Report the first clash that no synchronisation has ordered."""
        for at in np.flatnonzero(clash).tolist():
            known = self.known.get(int(cta[at]))
            if known is not None and (other[at] == MANY or known[int(other[at])]):
                continue
            address = allocation.origin + int(cells[at]) * self.granule
            ins = S.program.ops[int(pcs[cells[at]])].ins
            who = "several CTAs" if other[at] == MANY else f"CTA number {int(other[at]) - 1}"
            raise Fault(
                "race",
                f"{'reads' if access.kind == 'read' else 'writes'} {address:#x} ({S.memory.describe(address)}) while the "
                f"{what} by {who} at line {ins.line} ({ins.text}) is not ordered with it",
                np.array([at // per]),
                idx,
            )
