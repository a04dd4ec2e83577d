"""README's tables out of records: the newest of each bench, ratios, and what is slower than a peer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[2] / "benches" / "report.py"


@pytest.fixture(scope="module")
def report() -> Any:
    if not PATH.exists():
        pytest.skip("no benches beside the tests")
    spec = importlib.util.spec_from_file_location("report", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(op: str, case: str, us: float, **more: Any) -> dict[str, Any]:
    return {"op": op, "case": case, "bytes": 4_000_000, "default": {"us": us}, "copy_us": 2.0, "eager_us": 4.0, **more}


def record(when: str, *rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    stamp = {"card": "a card", "date": when[:10]} | ({"time": when} if len(when) > 10 else {})
    return {"stamp": stamp, "options": {}, "results": list(rows), **more}


def test_a_table_of_ratios(report: Any) -> None:
    rows = (row("softmax", "1x2", 2.0, compiled_us=1.0), row("softmax", "3x4", 8.0), row("reduce", "odd", 4.0, is_further=True))
    found = record("2026-11-28", *rows, copy_tbs=4.0)
    assert report.memory_table([found]).splitlines()[0].startswith("| op | cases | of 4.00 TB/s |")
    assert report.memory_table([found]).splitlines()[2:] == [
        "| softmax | 2 | 0.25 | 0.50 | 1.00x | 0.50x (3x4) | 2.00x (1x2) | 0.50x (1) | 0.50x (1x2) |"]
    assert report.memory_table([found], True).splitlines()[2:] == [
        "| reduce | 1 | 0.25 | 0.50 | 1.00x | 1.00x (odd) | 1.00x (odd) | - | - |"]
    assert report.losses([found]) == "softmax 1x2 0.50x of compiled; softmax 3x4 0.50x of eager"
    assert report.memory_table([record("2026-11-28", rows[0])], True) == ""


def test_the_newest_record_of_each_bench(report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for name, content in (("2026-11-27_h200_moving", record("2026-11-27T23:00:00+00:00", row("a", "x", 1.0))),
                          ("2026-11-28_h100_moving", record("2026-11-28", row("b", "x", 1.0))),
                          ("2026-11-28_h200_moving", record("2026-11-28T07:00:00+00:00", row("c", "x", 1.0))),
                          ("2026-11-28_h200_host_time", {"stamp": {"date": "2026-11-28"}, "us": 1.0}),
                          ("2026-11-28_h200_list", [1, 2])):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert {n: r["results"][0]["op"] for n, r in report.newest("").items()} == {"moving": "c"}
    assert report.newest("h100")["moving"]["results"][0]["op"] == "b"


def test_every_record_that_has_a_table_is_printed(report: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["report.py"])
    report.main()
    text = capsys.readouterr().out
    assert all(r["path"] in text for r in report.newest("").values()) and "GEMM bf16 against cuBLAS" in text
