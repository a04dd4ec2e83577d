"""Notes on rows of the feature list tell the truth: every call, function and test that they name exists."""

from __future__ import annotations

import re
from pathlib import Path

from oxidnn.codegen.pointwise import TABLE
from oxidnn.handle import DnnHandle

ROOT = Path(__file__).resolve().parents[2]
NOTES = ("rows", "attention-rows")
LINES = [line for note in NOTES for line in (ROOT / f"notes/2026-11-28-{note}.md").read_text().splitlines() if line.startswith("- ")]
ROWS = {"FE": [4, 5, 9, 10, 12, 13], "PL": range(1, 14), "NM": range(1, 20), "SM": range(1, 6), "AC": range(1, 7), "EW": range(1, 24),
        "LS": range(1, 22), "RD": range(1, 12), "RZ": range(1, 6), "SC": range(1, 6), "SH": range(1, 11), "IM": [4],
        "AN": range(1, 32), "KV": range(1, 9), "RO": range(1, 6)}
FAULTS = (11, 12, 13, 14, 15, 16, 17, 18, 21, 22, 23, 28, 29, 30, 31, 32, 33, 36, 38)


def test_every_call_and_function_exists() -> None:
    names = {name for line in LINES for name in re.findall(r"`([^`]+)`", line)}
    assert len(names) > 200
    for name in names:
        if name.startswith("expr."):
            assert name.removeprefix("expr.") in TABLE, name
        else:
            assert callable(getattr(DnnHandle, name, None)), name


def test_every_row_says_what_serves_it() -> None:
    named: dict[str, list[str]] = {}
    for line in LINES:
        head = re.match(r"- ((?:[A-Z]{2}-\d+(?:, | to )?)+)", line)
        for family, first, last in re.findall(r"([A-Z]{2})-(\d+)(?: to [A-Z]{2}-(\d+))?", head[1] if head else ""):
            for number in range(int(first), int(last or first) + 1):
                named.setdefault(f"{family}-{number:02d}", []).append(line)
    assert set(named) == {f"{family}-{number:02d}" for family, numbers in ROWS.items() for number in numbers}
    for row, lines in named.items():
        assert any("`" in line or "not served" in line or "::" in line or ": see " in line or "the same two" in line or "as AC-04" in line
                   or "no kernel" in line or "out=x" in line for line in lines), row


def test_every_fault_names_tests_that_exist() -> None:
    faults = {int(line[3:5]): re.findall(r"(tests/\S+?\.py)::(\w+)", line) for line in LINES if re.match(r"- S\d\d ", line)}
    assert set(faults) == set(FAULTS)
    for fault, tests in faults.items():
        assert len(tests) >= 2, fault
    for path, name in {test for line in LINES for test in re.findall(r"(tests/\S+?\.py)::(\w+)", line)}:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
