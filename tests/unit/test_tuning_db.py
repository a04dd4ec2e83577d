"""The tuning database: keys, who wins, many processes and threads, and files that cannot be used."""

from __future__ import annotations

import json
import multiprocessing
import os
import sqlite3
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from oxidnn import report
from oxidnn.dispatch import tuning_db
from oxidnn.dispatch.tuning_db import Measurement, TuningDb
from oxidnn.errors import InvalidArgument, OxidnnWarning
from oxidnn.ops.base import Policy

from .fakes import INFO, FakeEngine, double, double_op  # noqa: F401

FAST, SLOW = Measurement("double.fast", "variant0", 3.0), Measurement("double.slow", "variant1", 7.0)


@pytest.fixture(autouse=True)
def _engines(double_op, monkeypatch):  # type: ignore[no-untyped-def]  # noqa: F811
    double_op(FakeEngine("double.fast", "right"), FakeEngine("double.slow", "right"))
    monkeypatch.setattr(report, "_said", set())


def db_at(path: Path | None, *shipped: Path) -> TuningDb:
    return TuningDb(path, shipped)


def test_lookup_gives_the_fastest_and_survives_reopening(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tuning.sqlite"
    db = db_at(path)
    assert db.lookup(double(), INFO) is None and db.measurements(double(), INFO) == {}
    failed = Measurement("double.fast", "variant2", None, "wrong")
    db.record(double(), INFO, [SLOW, Measurement("double.fast", "variant1", 4.0), FAST, failed])
    db.close()
    row = db_at(path).lookup(double(), INFO)
    assert row is not None and (row.engine, row.config, row.us) == ("double.fast", "variant0", 3.0)
    assert db_at(path).measurements(double(), INFO) == {"double.fast": 3.0, "double.slow": 7.0}
    assert [r.reason for r in db_at(path).entries()] == ["", "", "", "wrong"]


def test_equal_times_are_ordered_by_name_whatever_the_order_of_recording() -> None:
    tied = [Measurement("double.fast", f"variant{i}", 3.0) for i in range(4)]
    for order in (tied, tied[::-1]):
        db = db_at(None)
        db.record(double(), INFO, order)
        assert [r.config for r in db.rows(double(), INFO)] == ["variant0", "variant1", "variant2", "variant3"]


@pytest.mark.parametrize("problem, info", [
    (double(65), INFO), (double(policy=Policy(deterministic=True)), INFO), (double(policy=Policy(math="tf32")), INFO),
    (double(policy=Policy(workspace_limit=0)), INFO), (double(), replace(INFO, name="Other GPU")), (double(), replace(INFO, num_sms=8)),
])
def test_everything_in_the_key_separates_rows(problem, info) -> None:  # type: ignore[no-untyped-def]
    db = TuningDb(None, ())
    db.record(double(), INFO, [FAST])
    assert db.lookup(problem, info) is None
    db.record(problem, info, [SLOW])
    first, second = db.lookup(double(), INFO), db.lookup(problem, info)
    assert first is not None and second is not None and (first.us, second.us) == (3.0, 7.0)


def test_a_new_engine_makes_rows_old_and_prune_removes_them(double_op) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    db = TuningDb(None, ())
    db.record(double(), INFO, [FAST])
    db.record(double(5), INFO, [SLOW])
    assert db.prune() == 0
    double_op(FakeEngine("double.fast", "right"), FakeEngine("double.slow", "right"), FakeEngine("double.newest", "right"))
    assert db.lookup(double(), INFO) is None
    db.record(double(), INFO, [FAST])
    assert db.prune() == 2
    assert [r.problem for r in db.entries()] == ["double x=f32[64]nchw y=f32[64]nchw"]


def test_recording_replaces_the_engine_but_not_the_others() -> None:
    db = TuningDb(None, ())
    db.record(double(), INFO, [Measurement("double.fast", "gone", 1.0), SLOW])
    db.record(double(), INFO, [FAST])
    assert {(r.engine, r.config) for r in db.entries()} == {("double.fast", "variant0"), ("double.slow", "variant1")}


def test_user_wins_over_shipped_and_shipped_is_not_written(tmp_path: Path) -> None:
    shipped = tmp_path / "shipped.sqlite"
    source = TuningDb(None, ())
    source.record(double(), INFO, [FAST])
    source.record(double(3), INFO, [FAST])
    assert source.export(shipped) == 2
    before = shipped.read_bytes()
    db = db_at(tmp_path / "user.sqlite", shipped)
    db.record(double(), INFO, [SLOW])
    rows = db.rows(double(), INFO)
    assert [r.us for r in rows] == [7.0, 3.0]
    only_shipped = db.lookup(double(3), INFO)
    assert only_shipped is not None and only_shipped.us == 3.0
    assert db.clear() == 1 and shipped.read_bytes() == before
    assert not list(tmp_path.glob("shipped.sqlite-*"))


@pytest.mark.parametrize("suffix", ["json", "sqlite"])
@pytest.mark.parametrize("prefer, us", [("newer", 5.0), ("faster", 3.0), ("theirs", 5.0), ("ours", 3.0)])
def test_export_import_merge(tmp_path: Path, suffix: str, prefer: str, us: float) -> None:
    mine, theirs = db_at(tmp_path / "mine.sqlite"), TuningDb(None, ())
    mine.record(double(), INFO, [FAST])
    theirs.record(double(), INFO, [replace(FAST, us=5.0)])
    theirs.record(double(9), INFO, [SLOW])
    file = tmp_path / f"out.{suffix}"
    assert theirs.export(file) == 2
    assert mine.import_(file, prefer) == (2 if us == 5.0 else 1)
    row, other = mine.lookup(double(), INFO), mine.lookup(double(9), INFO)
    assert row is not None and row.us == us
    assert other is not None and other.us == 7.0


def test_import_refuses_what_is_no_database(tmp_path: Path) -> None:
    for name, content in (("a.sqlite", b"not a database at all" * 100), ("b.json", b"[{\"us\": 1}]"), ("c.json", b"{")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidArgument, match=name):
            TuningDb(None, ()).import_(tmp_path / name)
    with pytest.raises(InvalidArgument, match="absent"):
        TuningDb(None, ()).import_(tmp_path / "absent.sqlite")
    with pytest.raises(InvalidArgument, match="prefer is 'best'"):
        TuningDb(None, ()).merge([], "best")
    with pytest.raises(InvalidArgument, match="cannot be written"):
        TuningDb(None, ()).export(tmp_path / "no" / "such" / "dir.sqlite")


def _write_newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {tuning_db.SCHEMA_VERSION + 1}")


def _write_damaged(path: Path, first: int) -> None:
    db = db_at(path)
    for n in range(300):
        db.record(double(n), INFO, [FAST])
    db.close()
    data = path.read_bytes()
    assert len(data) > 8 * 4096
    path.write_bytes(data[: first * 4096] + b"\xa5" * (len(data) - first * 4096))


@pytest.mark.parametrize("spoil", [
    lambda p: p.write_bytes(b"garbage " * 1000), _write_newer, lambda p: _write_damaged(p, 1), lambda p: _write_damaged(p, 4),
    lambda p: p.mkdir(),
], ids=["garbage", "newer", "damaged root", "damaged leaves", "directory"])
@pytest.mark.parametrize("as_shipped", [False, True])
def test_unusable_file_warns_once_and_the_rest_works(tmp_path: Path, spoil, as_shipped: bool) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "tuning.sqlite"
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    db = db_at(tmp_path / "user.sqlite", path) if as_shipped else db_at(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        db.lookup(double(), INFO)
        db.record(double(1000), INFO, [FAST])
        row = db.lookup(double(1000), INFO)
        db.lookup(double(7), INFO)
    assert row is not None and row.us == 3.0
    said = [w for w in caught if issubclass(w.category, OxidnnWarning)]
    assert len(said) == 1 and str(path) in str(said[0].message), [str(w.message) for w in said]
    if before is not None:
        assert path.read_bytes() == before


def test_unwritable_place_degrades_to_memory(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    db = db_at(blocked / "tuning.sqlite")
    with pytest.warns(OxidnnWarning, match="stay in memory"):
        db.record(double(), INFO, [FAST])
    row = db.lookup(double(), INFO)
    assert row is not None and row.us == 3.0


def test_a_database_that_turns_read_only_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    db = db_at(path)
    db.record(double(), INFO, [FAST])
    db._open()[0].execute("PRAGMA query_only = 1")  # what a file system remounted read-only looks like to SQLite
    with pytest.warns(OxidnnWarning, match="cannot be used"):
        db.record(double(8), INFO, [SLOW])
    first, second = db.lookup(double(), INFO), db.lookup(double(8), INFO)
    assert first is not None and second is not None and (first.us, second.us) == (3.0, 7.0)


def test_open_follows_the_switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_db, "SHIPPED_DIRECTORY", tmp_path / "none")
    first, second = tmp_path / "a", tmp_path / "b"
    monkeypatch.setenv("OXIDNN_CACHE_DIR", f"{first}{os.pathsep}{second}")
    TuningDb(second / tuning_db.FILE_NAME, ()).record(double(), INFO, [FAST])
    db = TuningDb.open()
    assert db.user_path == first / tuning_db.FILE_NAME
    assert db.lookup(double(), INFO) is not None  # the second directory is read
    assert not first.exists() or db.entries() == []
    monkeypatch.setenv("OXIDNN_CACHE", "ro")
    readonly = TuningDb.open(second)
    readonly.record(double(4), INFO, [SLOW])
    assert readonly.lookup(double(), INFO) is not None and readonly.lookup(double(4), INFO) is not None
    assert TuningDb.open(second).lookup(double(4), INFO) is None
    monkeypatch.setenv("OXIDNN_CACHE", "off")
    assert TuningDb.open(second).lookup(double(), INFO) is None


def test_nothing_is_opened_before_the_first_use(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tuning.sqlite"
    TuningDb(path, ())
    assert not path.parent.exists()


def test_fatal_candidates_are_remembered_by_this_version_only(monkeypatch: pytest.MonkeyPatch) -> None:
    db = TuningDb(None, ())
    db.record(double(), INFO, [FAST, Measurement("double.slow", "variant0", None, "LaunchError: dead", is_fatal=True)])
    assert db.fatal(double(), INFO) == {("double.slow", "variant0")}
    assert db.fatal(double(2), INFO) == set()
    monkeypatch.setattr(tuning_db, "__version__", "99.0")
    assert db.fatal(double(), INFO) == set()


def _worker(path: str, first: int, queue) -> None:  # type: ignore[no-untyped-def]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        db = TuningDb(path, ())
        for n in range(first, first + 25):
            db.record(double(n), INFO, [FAST, SLOW])
        queue.put([str(w.message) for w in caught])


def test_many_processes_and_threads_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_worker, args=(str(path), 100 * i, queue)) for i in range(4)]
    for worker in workers:
        worker.start()
    messages = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert messages == [[], [], [], []]
    db = db_at(path)
    threads = [threading.Thread(target=lambda i=i: [db.record(double(1000 * i + n), INFO, [FAST]) for n in range(10)]) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(db.entries()) == 4 * 25 * 2 + 40


def test_a_forked_child_uses_its_own_connection(tmp_path: Path) -> None:
    db = db_at(tmp_path / "tuning.sqlite")
    db.record(double(), INFO, [FAST])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child() -> None:
        row = db.lookup(double(), INFO)
        db.record(double(2), INFO, [SLOW])
        queue.put(row.us if row else None)

    process = context.Process(target=child)
    with db._lock:  # a thread of the parent may hold the lock at the fork
        process.start()
    assert queue.get(timeout=30) == 3.0
    process.join(30)
    row = db.lookup(double(2), INFO)
    assert process.exitcode == 0 and row is not None and row.us == 7.0


def test_exported_json_is_readable(tmp_path: Path) -> None:
    db = TuningDb(None, ())
    db.record(double(), INFO, [FAST])
    db.export(tmp_path / "out.json")
    (entry,) = json.loads((tmp_path / "out.json").read_text())
    assert entry["gpu"] == "Fake GPU" and entry["num_sms"] == 7 and entry["problem"] == "double x=f32[64]nchw y=f32[64]nchw"
    assert entry["policy"] == "deterministic=0 math=ieee workspace=none"


def test_a_directory_that_is_hidden_is_worked_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the home of another user is, which HOME may still name."""
    hidden = tmp_path / "home" / "cache"
    stat = os.stat

    def refuse(path, *args, **kwargs):  # type: ignore[no-untyped-def]
        if str(path).startswith(str(hidden)):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "lstat", refuse)
    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(tmp_path).startswith(str(path)) and path != hidden.parent)
    with pytest.warns(OxidnnWarning, match="cannot be used"):
        db = TuningDb.open(hidden)
        db.record(double(), INFO, [FAST])
    assert db.lookup(double(), INFO) is not None
    monkeypatch.setenv("OXIDNN_CACHE_DIR", os.pathsep.join([str(hidden), str(tmp_path / "other")]))
    assert TuningDb.open() is not None


def test_a_file_that_another_process_holds_delays_no_first_call(tmp_path: Path) -> None:
    """Looking up and remembering give up soon; what was measured waits longer, and is kept in memory where that was in vain."""
    path = tmp_path / "tuning.sqlite"
    db = db_at(path)
    db.record(double(), INFO, [FAST])
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    holder.execute("DELETE FROM choice")
    start = time.monotonic()
    with pytest.warns(OxidnnWarning, match="locked"):
        db.remember("inputs", "code", "choice")
    assert db.recall("inputs") == "choice"
    assert time.monotonic() - start < 5
    row = db.lookup(double(), INFO)
    assert row is not None and row.us == 3.0
    holder.execute("ROLLBACK")
    holder.close()
