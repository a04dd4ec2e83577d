"""Counters of a launch, free of cycles: what was executed and moved, and what a checker measured."""

from __future__ import annotations

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
    products: int = 0  # multiply-adds of wgmma
    bank_accesses: int = 0  # warp-wide shared accesses seen by the bank checker
    bank_conflicts: int = 0  # extra shared-memory wavefronts
    conflicts_by_line: dict[int, int] = field(default_factory=dict)
    executions: dict[int, int] = field(default_factory=dict)  # PTX line -> steps, when profiling
