"""The tuning database: what was measured for which problem on which GPU. Shipped files are read-only; the user's file wins over them.

A row's key is (GPU name, SM count, engine-set version, problem, policy); its value is one engine config with its time, or the reason
why the candidate failed. The engine-set version hashes the ids of the op's engines, so a new engine makes its op's rows old.

The user's file also keeps what was chosen (`recall`, `remember`): choosing is a pure function, and enumerating configs takes
milliseconds that a second process need not spend.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

from .. import __version__, report, switches
from ..device import DeviceInfo
from ..errors import InvalidArgument
from ..ops.base import Problem
from ..ops.case import format_case
from ..runtime.cubin_store import cache_directories
from .registry import ENGINES

SCHEMA_VERSION = 2
FILE_NAME = "tuning.sqlite"
SHIPPED_DIRECTORY = Path(__file__).resolve().parent.parent / "data" / "tuned"
PATIENCE_S = 10.0  # of making the file and of storing what was measured, while another process writes
BRIEF_S = 0.5  # of looking up and remembering, which a first call waits for and can do without
CHOICES_KEPT_S = 30 * 86400.0  # those of another state of the code go after this time

_CREATE = """CREATE TABLE IF NOT EXISTS measurement (
    gpu TEXT NOT NULL, num_sms INTEGER NOT NULL, engine_set TEXT NOT NULL, problem TEXT NOT NULL, policy TEXT NOT NULL,
    engine TEXT NOT NULL, config TEXT NOT NULL, us REAL, reason TEXT NOT NULL, version TEXT NOT NULL, measured_at REAL NOT NULL,
    PRIMARY KEY (gpu, num_sms, engine_set, problem, policy, engine, config)) WITHOUT ROWID"""
_CREATE_CHOICE = """CREATE TABLE IF NOT EXISTS choice (
    inputs TEXT PRIMARY KEY, code TEXT NOT NULL, choice TEXT NOT NULL, made_at REAL NOT NULL) WITHOUT ROWID"""
_KEY = "gpu = ? AND num_sms = ? AND engine_set = ? AND problem = ? AND policy = ?"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One candidate's result: its median microseconds, or None and the reason it may not win.

    is_fatal: the failure left the device unusable; the candidate is not tried again by the same version of oxidnn.
    """

    engine: str
    config: str
    us: float | None
    reason: str = ""
    is_fatal: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A stored measurement with its key. us is None for a failed candidate; measured_at is seconds since the epoch."""

    gpu: str
    num_sms: int
    engine_set: str
    problem: str
    policy: str
    engine: str
    config: str
    us: float | None
    reason: str
    version: str
    measured_at: float

    @property
    def key(self) -> tuple[str, int, str, str, str]:
        return self.gpu, self.num_sms, self.engine_set, self.problem, self.policy


_COLUMNS = ", ".join(f.name for f in fields(Row))
_INSERT = f"INSERT OR REPLACE INTO measurement ({_COLUMNS}) VALUES ({', '.join('?' * len(fields(Row)))})"


def engine_set_version(op: str) -> str:
    """Hash of the ids of all registered engines of `op`, whatever OXIDNN_ENGINES leaves of them."""
    return hashlib.sha256("\n".join(sorted(e.id for e in ENGINES.get(op, ()))).encode()).hexdigest()[:16]


def key_of(problem: Problem, info: DeviceInfo) -> tuple[str, int, str, str, str]:
    """The key columns of `problem` on `info`; addresses are not part of it, alignment is."""
    policy = problem.policy
    limit = "none" if policy.workspace_limit is None else policy.workspace_limit
    text = f"deterministic={int(policy.deterministic)} math={policy.math} workspace={limit}"
    return info.name, info.num_sms, engine_set_version(problem.op), format_case(problem), text


def _checksum(inputs: str, choice: str) -> str:
    return hashlib.sha256(f"{inputs} {choice}".encode()).hexdigest()[:16]


def _shipped() -> list[Path]:
    return sorted(SHIPPED_DIRECTORY.glob("*.sqlite"))


def _is_writable(directory: Path) -> bool:
    """True if the directory, or the one it would be made in, can be written; False too where it is hidden, as another user's home is."""
    while not os.path.lexists(directory) and directory != directory.parent:
        directory = directory.parent
    return os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)


class _Unreadable(Exception):
    """A file that is no tuning database, or one of a newer schema."""


def _wait_for_locks(connection: sqlite3.Connection, seconds: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {int(1000 * seconds)}")


def _connect(path: Path | None) -> sqlite3.Connection:
    """A writable connection on a checked schema; path None is a private database in memory. Raises sqlite3.Error, OSError, _Unreadable."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path or ":memory:", timeout=BRIEF_S, check_same_thread=False, isolation_level=None)
    try:
        if _checked_version(connection) < SCHEMA_VERSION:
            _wait_for_locks(connection, PATIENCE_S)
            if path is not None and not _is_on_network(path):
                connection.execute("PRAGMA journal_mode = WAL")  # needs shared memory, which network file systems do not give
            connection.execute("BEGIN IMMEDIATE")  # two processes may create the file at once
            connection.execute(_CREATE)
            connection.execute(_CREATE_CHOICE)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
            _wait_for_locks(connection, BRIEF_S)
        connection.execute("SELECT 1 FROM measurement LIMIT 1").fetchone()
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_readonly(path: Path) -> sqlite3.Connection:
    """A read-only connection on a checked schema, also where the directory cannot be written. Raises sqlite3.Error, _Unreadable."""
    for mode in ("mode=ro", "mode=ro&immutable=1"):  # a file in WAL mode needs files beside it unless nobody can change it
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=BRIEF_S, check_same_thread=False,
                                     isolation_level=None)
        try:
            _checked_version(connection)
            connection.execute("SELECT 1 FROM measurement LIMIT 1").fetchone()
            return connection
        except BaseException as error:
            connection.close()
            if "immutable" in mode or not isinstance(error, sqlite3.OperationalError):
                raise
    raise AssertionError("unreachable")


def _checked_version(connection: sqlite3.Connection) -> int:
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if found > SCHEMA_VERSION:
        raise _Unreadable(f"is of schema version {found}, newer than {SCHEMA_VERSION} of this oxidnn")
    return found


def _is_on_network(path: Path) -> bool:
    """True if /proc/mounts says that `path` lies on a network file system (False where there is no such file)."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    target = str(path.resolve())
    above = [m for m in mounts if len(m) > 2 and (target + "/").startswith(m[1].rstrip("/") + "/")]
    best = max(above, key=lambda m: len(m[1]), default=None)
    return best is not None and best[2].startswith(("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "fuse.sshfs"))


class TuningDb:
    """The user's database over the shipped ones; opened at the first use.

    user_path: an SQLite file, made when missing; None keeps everything in memory. shipped: read-only files (default: those in the
    package). A file that is corrupt, of a newer version or not writable is warned of once; then the database works without it.
    Concurrency: safe for many threads and processes (WAL, busy timeout), and after a fork.
    """

    def __init__(self, user_path: str | os.PathLike[str] | None, shipped: Sequence[str | os.PathLike[str]] | None = None) -> None:
        self.user_path = None if user_path is None else Path(user_path)
        self._shipped = None if shipped is None else [Path(p) for p in shipped]
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._layers: list[sqlite3.Connection] = []  # the first is written to; earlier ones win
        self._inherited: list[sqlite3.Connection] = []

    @classmethod
    def open(cls, cache_dir: str | os.PathLike[str] | None = None) -> TuningDb:
        """The database beside the cubins: in cache_dir, else in the first writable cache directory (the others are read too).

        OXIDNN_CACHE=ro never writes it, off neither reads nor writes it.
        """
        directories = [Path(cache_dir)] if cache_dir is not None else list(cache_directories())
        mode = switches.get("OXIDNN_CACHE")
        if mode == "off":
            return cls(None)
        user = None if mode == "ro" else next((d for d in directories if _is_writable(d)), directories[0])
        readable = [d / FILE_NAME for d in directories if d != user and os.path.isfile(d / FILE_NAME)]
        return cls(None if user is None else user / FILE_NAME, [*readable, *_shipped()])

    # Opening and failing

    def _open(self) -> list[sqlite3.Connection]:
        if self._pid != os.getpid():  # a connection must not be used, nor closed, across a fork
            self._inherited += self._layers
            self._layers, self._pid = [], os.getpid()
        if not self._layers:
            self._layers = [*self._open_user(), *self._open_shipped()]
        return self._layers

    def _open_user(self) -> Iterator[sqlite3.Connection]:
        if self.user_path is None:
            yield _connect(None)
            return
        try:
            yield _connect(self.user_path)
        except (sqlite3.Error, OSError, _Unreadable) as error:
            self._warn(self.user_path, error)
            yield _connect(None)
            if isinstance(error, (sqlite3.OperationalError, OSError)):  # not writable, maybe still readable
                try:
                    yield _connect_readonly(self.user_path)
                except (sqlite3.Error, OSError, _Unreadable):
                    pass

    def _open_shipped(self) -> Iterator[sqlite3.Connection]:
        for path in self._shipped if self._shipped is not None else _shipped():
            try:
                yield _connect_readonly(path)
            except (sqlite3.Error, OSError, _Unreadable) as error:
                self._warn(path, error)

    @staticmethod
    def _warn(path: Path, error: Exception) -> None:
        report.warn_once(f"tuning-db:{path}", f"tuning database {path} cannot be used ({error}): working without it, "
                         "new measurements stay in memory.")

    @contextmanager
    def _lock_after_fork(self) -> Iterator[None]:
        if self._pid != os.getpid():
            self._lock = threading.RLock()  # the parent's may have been held by a thread that the child does not have
        with self._lock:
            yield

    def _select(self, layer: sqlite3.Connection, where: str, values: Sequence[Any] = ()) -> list[Row]:
        try:
            return [Row(*r) for r in layer.execute(f"SELECT {_COLUMNS} FROM measurement WHERE {where}", values)]
        except sqlite3.Error as error:  # damaged pages show only when read
            self._drop(layer, error)
            return []

    def _drop(self, layer: sqlite3.Connection, error: Exception) -> None:
        """Goes on without a layer that fails; a memory layer takes the place of the written one."""
        self._warn(Path(layer.execute("PRAGMA database_list").fetchone()[2]), error)
        at = self._layers.index(layer)
        self._layers[at:at + 1] = [_connect(None)] if at == 0 else []
        layer.close()

    def _write(self, statements: Sequence[tuple[str, Sequence[Any]]], patience: float = PATIENCE_S) -> int:
        """Runs the statements in one transaction on the written layer; rows changed. On failure, on a memory layer put in front."""
        with self._lock_after_fork():
            for attempt in range(2):
                layer = self._open()[0]
                try:
                    _wait_for_locks(layer, patience)
                    layer.execute("BEGIN IMMEDIATE")
                    changed = sum(layer.execute(text, values).rowcount for text, values in statements)
                    layer.execute("COMMIT")
                    _wait_for_locks(layer, BRIEF_S)
                    return changed
                except sqlite3.Error as error:
                    if attempt:
                        raise
                    try:
                        layer.execute("ROLLBACK")
                    except sqlite3.Error:
                        pass
                    self._warn(self.user_path or Path("memory"), error)
                    self._layers.insert(0, _connect(None))
        raise AssertionError("unreachable")

    def close(self) -> None:
        with self._lock_after_fork():
            if self._pid == os.getpid():
                for layer in self._layers:
                    layer.close()
                self._layers = []

    # Looking up

    def rows(self, problem: Problem, info: DeviceInfo) -> list[Row]:
        """All measured candidates of the problem on this GPU, the user's before the shipped, each fastest first."""
        key = key_of(problem, info)
        with self._lock_after_fork():
            where = _KEY + " AND typeof(us) = 'real' ORDER BY us, engine, config"
            return [row for layer in list(self._open()) for row in self._select(layer, where, key)]

    def lookup(self, problem: Problem, info: DeviceInfo) -> Row | None:
        """The fastest measured candidate, or None if the problem was not measured on this GPU with this set of engines."""
        return next(iter(self.rows(problem, info)), None)

    def measurements(self, problem: Problem, info: DeviceInfo) -> dict[str, float]:
        """The best microseconds of every measured engine."""
        best: dict[str, float] = {}
        for row in self.rows(problem, info):
            if row.us is not None:
                best.setdefault(row.engine, row.us)
        return best

    def fatal(self, problem: Problem, info: DeviceInfo) -> set[tuple[str, str]]:
        """(engine, config) of candidates that left the device unusable under this version of oxidnn."""
        where, values = _KEY + " AND reason LIKE 'fatal: %' AND version = ?", (*key_of(problem, info), __version__)
        with self._lock_after_fork():
            rows = [r for layer in list(self._open()) for r in self._select(layer, where, values)]
        return {(r.engine, r.config) for r in rows}

    def entries(self, *, gpu: str | None = None, op: str | None = None) -> list[Row]:
        """The user's rows, failures included, by key and time; of one GPU name or op only if asked."""
        with self._lock_after_fork():
            rows = self._select(self._open()[0], "1 ORDER BY gpu, problem, policy, us IS NULL, us")
        return [r for r in rows if gpu in (None, r.gpu) and op in (None, r.problem.split(" ", 1)[0])]

    # What was chosen

    def recall(self, inputs: str) -> str | None:
        """The choice remembered for these inputs (a digest of all that it depends on), or None; trusted only after its checksum."""
        with self._lock_after_fork():
            try:
                found = self._open()[0].execute("SELECT choice FROM choice WHERE inputs = ?", (inputs,)).fetchone()
            except sqlite3.Error:  # a damaged page: it is chosen anew
                return None
        checksum, _, choice = str(found[0]).partition(" ") if found is not None else ("", "", "")
        return choice if checksum == _checksum(inputs, choice) else None

    def remember(self, inputs: str, code: str, choice: str) -> None:
        """Keeps a choice made by the code of digest `code`; old ones of other code go."""
        now = time.time()
        self._write([("DELETE FROM choice WHERE code != ? AND made_at < ?", (code, now - CHOICES_KEPT_S)),
                     ("INSERT OR REPLACE INTO choice VALUES (?, ?, ?, ?)", (inputs, code, f"{_checksum(inputs, choice)} {choice}", now))],
                    patience=BRIEF_S)

    # Writing

    def record(self, problem: Problem, info: DeviceInfo, results: Iterable[Measurement], *, replace: bool = True) -> None:
        """Stores the results. replace: all earlier rows of the engines they name go; other engines' rows stay."""
        key, now = key_of(problem, info), time.time()
        rows = [Row(*key, m.engine, m.config, m.us, ("fatal: " if m.is_fatal else "") + m.reason, __version__, now) for m in results]
        engines = sorted({r.engine for r in rows})
        if rows:
            self._write([(f"DELETE FROM measurement WHERE {_KEY} AND engine = ?", (*key, e)) for e in engines if replace]
                        + [(_INSERT, astuple(r)) for r in rows])

    def merge(self, rows: Iterable[Row], prefer: str = "newer") -> int:
        """Takes over rows; those present already are kept or replaced by `prefer`: "newer", "faster", "theirs" or "ours". Rows written."""
        better = {"newer": "excluded.measured_at > measurement.measured_at", "theirs": "1", "ours": "0",
                  "faster": "excluded.us < ifnull(measurement.us, 9e99)"}.get(prefer)
        if better is None:
            raise InvalidArgument(f"merge: prefer is {prefer!r} (expected 'newer', 'faster', 'theirs' or 'ours').")
        values = ", ".join(f"{c} = excluded.{c}" for c in ("us", "reason", "version", "measured_at"))
        insert = _INSERT.replace("INSERT OR REPLACE", "INSERT")
        return self._write([(f"{insert} ON CONFLICT DO UPDATE SET {values} WHERE {better}", astuple(r)) for r in rows])

    def import_(self, path: str | os.PathLike[str], prefer: str = "newer") -> int:
        """Merges a file that `export` wrote; the number of rows written. Raises InvalidArgument if it is none."""
        path = Path(path)
        try:
            if path.suffix == ".json":
                rows = [Row(**r) for r in json.loads(path.read_text(encoding="utf-8"))]
            else:
                connection = _connect_readonly(path)
                try:
                    rows = [Row(*r) for r in connection.execute(f"SELECT {_COLUMNS} FROM measurement")]
                finally:
                    connection.close()
        except (sqlite3.Error, OSError, _Unreadable, ValueError, TypeError) as error:
            raise InvalidArgument(f"import: {path} is no tuning database ({error}).") from error
        return self.merge(rows, prefer)

    def export(self, path: str | os.PathLike[str]) -> int:
        """Writes the user's rows to `path`: JSON by the suffix .json, else an SQLite file fit to be shipped. The number of rows."""
        path, rows = Path(path), self.entries()
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            if path.suffix == ".json":
                part.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n", encoding="utf-8")
            else:
                connection = sqlite3.connect(part, isolation_level=None)
                try:
                    connection.execute(_CREATE)
                    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                    connection.execute("BEGIN")
                    connection.executemany(_INSERT, [astuple(r) for r in rows])
                    connection.execute("COMMIT")
                finally:
                    connection.close()
            os.replace(part, path)
        except (OSError, sqlite3.Error) as error:
            raise InvalidArgument(f"export: {path} cannot be written ({error}).") from error
        finally:
            part.unlink(missing_ok=True)
        return len(rows)

    def prune(self) -> int:
        """Deletes the user's rows that no lookup can reach: their engine is gone or their engine set is old. Rows deleted."""
        known = {op: (engine_set_version(op), {e.id for e in engines}) for op, engines in ENGINES.items()}
        stale = []
        for row in self.entries():
            version, engines = known.get(row.problem.split(" ", 1)[0], ("", set()))
            if row.engine_set != version or row.engine not in engines:
                stale.append(row)
        delete = f"DELETE FROM measurement WHERE {_KEY} AND engine = ? AND config = ?"
        return self._write([(delete, (*r.key, r.engine, r.config)) for r in stale])

    def clear(self) -> int:
        """Deletes all of the user's rows, and what was chosen. Measurements deleted."""
        self._write([("DELETE FROM choice", ())])
        return self._write([("DELETE FROM measurement", ())])
