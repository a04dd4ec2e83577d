"""Switches: the table, where values come from, and the verbose lines they turn on."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from oxidnn import report, switches
from oxidnn.errors import InvalidArgument, OxidnnWarning

PACKAGE = Path(switches.__file__).parent


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in switches.TABLE:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", sorted(switches.TABLE))
def test_default_environment_and_source(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    default = switches.TABLE[name].default
    assert switches.get(name) == default and switches.source(name) == "default"
    words = switches.TABLE[name].words
    value = words[-1] if words else "something"
    monkeypatch.setenv(name, value)
    assert switches.get(name) == value and switches.source(name) == "environment"
    if words:
        monkeypatch.setenv(name, "something")
        with pytest.raises(InvalidArgument, match=f"{name}: 'something'"):
            switches.get(name)
    monkeypatch.setenv(name, "")  # set to nothing is not set
    assert switches.get(name) == default and switches.source(name) == "default"


def test_an_unknown_switch_is_a_programming_error() -> None:
    with pytest.raises(KeyError):
        switches.get("OXIDNN_NO_SUCH")


def test_every_switch_is_in_the_table_and_used() -> None:
    named: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for name in re.findall(r"OXIDNN_[A-Z_]+", path.read_text(encoding="utf-8")):
            named.setdefault(name, set()).add(path.name)
    assert set(named) - {"OXIDNN_NO_SUCH"} == set(switches.TABLE)
    reading = re.compile(r"switches\.(?:get|source)\(\"(OXIDNN_\w+)\"\)")
    read = {name for path in PACKAGE.rglob("*.py") for name in reading.findall(path.read_text(encoding="utf-8"))}
    assert set(switches.TABLE) - read == set(), "switches that nothing reads"


def test_verbose_lines_go_to_stderr_by_topic(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report.line("plan", "silent")
    monkeypatch.setenv("OXIDNN_VERBOSE", "tune, plan")
    report.line("plan", "a", 3)
    report.line("cache", "not asked for")
    assert capsys.readouterr().err == "oxidnn,plan,a,3\n"
    monkeypatch.setenv("OXIDNN_VERBOSE", "all")
    report.line("cache", "b")
    assert capsys.readouterr().err == "oxidnn,cache,b\n"


def test_verbose_lines_go_to_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.csv"
    monkeypatch.setenv("OXIDNN_VERBOSE", "all")
    monkeypatch.setenv("OXIDNN_LOG", str(log))
    report.line("plan", "first")
    report.line("plan", "second")
    assert log.read_text() == "oxidnn,plan,first\noxidnn,plan,second\n" and capsys.readouterr().err == ""


def test_a_cause_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_said", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            report.warn_once("cause", "said")
        report.warn_once("other", "said too")
    assert [str(w.message) for w in caught if issubclass(w.category, OxidnnWarning)] == ["said", "said too"]
