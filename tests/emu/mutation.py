"""Broken versions of kernels: an edit of a kernel's text, and what has to become of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from oxidnn.errors import EmulatorFault, NumericsError, PtxError

SCHEDULES: tuple[Any, ...] = ("lowest_pc", ("random", 1), ("random", 2))
FOUND = (EmulatorFault, PtxError, NumericsError)


@dataclass(frozen=True)
class Mutant:
    """`before` becomes `after` in the text of `kernel`. report: what the fault must say; "wrong...": a wrong result will do."""

    kernel: str
    name: str
    before: str
    after: str
    report: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}"

    def text(self, kernel: str) -> str:
        assert self.before in kernel, f"{self}: the kernel has no {self.before!r}"
        return kernel.replace(self.before, self.after)

    def diagnose(self, run: Callable[[], tuple[np.ndarray, np.ndarray]]) -> None:
        """Run the broken kernel, which gives a result and the right one: it is found as it must be."""
        try:
            got, want = run()
        except EmulatorFault as fault:
            text = str(fault)
            assert self.report.startswith("wrong") or re.search(self.report, text), f"{self}: {text}\nis not {self.report}"
            assert re.search(r"kernel \w+, PTX line \d+", text) and re.search(r"CTA \(\d+,\d+,\d+\), thread \(", text), text
            return
        assert self.report.startswith("wrong"), f"{self}: not diagnosed"
        assert not np.array_equal(got, want), f"{self}: neither diagnosed nor wrong"


def mutants(rows: Iterable[tuple[str, str, str, str, str]]) -> list[Mutant]:
    return [Mutant(*row) for row in rows]


def fate(runs: Iterable[Callable[[], Any]]) -> str:
    """The name of what the first of the runs that finds something raises, else "survived"."""
    for run in runs:
        try:
            run()
        except FOUND as found:
            return type(found).__name__
    return "survived"
