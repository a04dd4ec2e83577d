"""Counters of a launch, free of cycles: what was executed and moved, and what a checker measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Sums over all threads of a launch. Bytes are counted per lane; a uniform shared or local access counts once."""

    instructions: int = 0  # executed, per thread
    steps: int = 0  # executed by the machine: one step covers all threads of a group
    batches: int = 0
    global_read: int = 0
    global_written: int = 0
    shared_read: int = 0
    shared_written: int = 0
    atomics: int = 0
    tma_loaded: int = 0  # bytes of bulk and tensor copies into shared memory
    tma_stored: int = 0  # and out of it
    products: int = 0  # multiply-adds of mma.sync and wgmma
    bank_accesses: int = 0  # warp-wide shared accesses seen by the bank checker
    bank_conflicts: int = 0  # extra shared-memory wavefronts
    global_sectors: int = 0  # 32-byte sectors that warps touch per load or store, seen by the bank checker
    uncoalesced_sectors: int = 0  # those beyond what the bytes accessed would fill
    conflicts_by_line: dict[int, int] = field(default_factory=dict)
    sectors_by_line: dict[int, int] = field(default_factory=dict)  # uncoalesced ones
    blocks: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)  # [first, end) of program counters -> threads
    lines: Sequence[tuple[int, str]] = field(default=(), repr=False)  # PTX line and text of every program counter

    @property
    def executions(self) -> dict[int, int]:
        """PTX line -> how often its instructions were executed, summed over threads; predicated ones count where they do nothing, too."""
        found: dict[int, int] = {}
        for (first, end), threads in self.blocks.items():
            for line, _ in self.lines[first:end]:
                found[line] = found.get(line, 0) + threads
        return found

    def summary(self) -> dict[str, int]:
        """The counters that are single numbers, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}

    def profile(self) -> list[tuple[int, int, int, int, str]]:
        """(PTX line, executions, extra shared-memory wavefronts, uncoalesced sectors, text), most executed first."""
        texts, conflicts, sectors = dict(self.lines), self.conflicts_by_line, self.sectors_by_line
        rows = ((line, count, conflicts.get(line, 0), sectors.get(line, 0), texts[line]) for line, count in self.executions.items())
        return sorted(rows, key=lambda row: (-row[1], row[0]))
