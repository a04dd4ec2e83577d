"""Bank conflicts of shared memory and uncoalesced accesses to global memory: a measurement, not a fault.

A warp's access is served in phases: 32 lanes for up to 4 bytes, 16 for 8, 8 for 16 (and 8 rows for a matrix of
ldmatrix). A phase takes as many wavefronts as its busiest column of banks has different words.

A warp's access to global memory moves whole sectors of 32 bytes; sectors beyond what its different bytes would fill
are uncoalesced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from oxidnn.emu.access import Access
from oxidnn.emu.memory import Array
from oxidnn.emu.shuffle import Warps

if TYPE_CHECKING:
    from oxidnn.emu.machine import State


class Banks:
    def __init__(self, S: State) -> None:
        self.counters = S.counters

    def access(self, S: State, index: Array, access: Access, idx: Array | None) -> None:
        warps = Warps(S, idx)
        unit = max(access.width, 4)
        units = warps.spread(index * access.width // unit + 1)
        if warps.active is not None:
            units = np.where(warps.active, units, 0)
        self._count(S, units.reshape(-1, min(32, 128 // unit)), 128 // unit)

    def rows(self, S: State, index: Array, matrices: int) -> None:
        """`index`: the 16-byte rows, eight for each matrix."""
        self._count(S, (index + 1).reshape(-1, 8), 8)

    def sectors(self, S: State, origin: int, index: Array, width: int, idx: Array | None) -> None:
        """`index`: elements of `width` bytes from `origin`, one per executing lane or one for all."""
        warps = Warps(S, idx)
        element = np.broadcast_to(warps.spread(index) + 1, (warps.count, 32))
        if warps.active is not None:
            element = np.where(warps.active, element, 0)
        ordered = np.sort(element, axis=1)
        first = ordered > 0
        first[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
        needed = -(-first.sum(axis=1) * width // 32)
        sector = np.where(first, (origin + (ordered - 1) * width) // 32, -1)
        sector.sort(axis=1)
        touched = sector >= 0
        touched[:, 1:] &= sector[:, 1:] != sector[:, :-1]
        count = touched.sum(axis=1)
        extra = int(np.maximum(count - needed, 0).sum())
        self.counters.global_sectors += int(count.sum())
        self.counters.uncoalesced_sectors += extra
        if extra:
            line = S.program.ops[S.pc].ins.line
            self.counters.sectors_by_line[line] = self.counters.sectors_by_line.get(line, 0) + extra

    def _count(self, S: State, phases: Array, columns: int) -> None:
        """`phases`: unit number + 1 per lane, 0 for no access."""
        ordered = np.sort(phases, axis=1)
        distinct = ordered > 0
        distinct[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
        phase, lane = np.nonzero(distinct)
        column = (ordered[phase, lane] - 1) % columns
        load = np.bincount(phase * columns + column, minlength=len(phases) * columns).reshape(-1, columns).max(axis=1)
        extra = int(np.maximum(load - 1, 0).sum())
        self.counters.bank_accesses += int((load > 0).sum())
        self.counters.bank_conflicts += extra
        if extra:
            line = S.program.ops[S.pc].ins.line
            self.counters.conflicts_by_line[line] = self.counters.conflicts_by_line.get(line, 0) + extra
