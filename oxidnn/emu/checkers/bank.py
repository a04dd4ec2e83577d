"""Bank conflicts of shared memory: a measurement, not a fault.

A warp's access is served in phases: 32 lanes for up to 4 bytes, 16 for 8, 8 for 16 (and 8 rows for a matrix of
ldmatrix). A phase takes as many wavefronts as its busiest column of banks has different words.
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
