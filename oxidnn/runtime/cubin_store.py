"""The cubin store: assembled kernels as files, shared by processes, trusted only after their checksum.

One entry a file, `DIRECTORY/cubins/<first two digits>/<key>`: a magic line, the SHA-256 of key and body, one line of JSON
(the resource report) and the cubin. Entries are published by rename, so readers never see half of one. Whatever cannot be
read, does not match its checksum or belongs to another key is a miss. A directory that cannot be written costs one warning.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import report, switches

MAGIC = b"oxidnn-cubin-1\n"
SOFT_LIMIT_BYTES = 2 << 30  # a process that adds entries prunes the store to three quarters of this when it is exceeded
_DIGEST = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored cubin: `used` is the time of its last use in seconds since the epoch."""

    path: Path
    name: str
    arch: str
    assembler: str
    num_bytes: int
    used: float


def cache_directories() -> tuple[Path, ...]:
    """Directories of OXIDNN_CACHE_DIR (a list separated as PATH is), or the user's cache directory."""
    chosen = switches.get("OXIDNN_CACHE_DIR")
    if chosen:
        return tuple(Path(p).expanduser() for p in chosen.split(os.pathsep) if p)
    import platformdirs

    return (Path(platformdirs.user_cache_dir("oxidnn", appauthor=False)),)


class CubinStore:
    """Cubins by key under one or more directories: read from all, written to the first that takes it.

    mode: "rw", "ro" (never writes) or "off" (never touches the disk). Concurrency: safe for threads and processes.
    """

    def __init__(self, directories: tuple[Path, ...] | None = None, mode: str | None = None) -> None:
        self.directories = cache_directories() if directories is None else directories
        self.mode = switches.get("OXIDNN_CACHE") if mode is None else mode
        self._has_checked_size = False

    def get(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """(report, cubin) of `key`, or None."""
        if self.mode == "off":
            return None
        for directory in self.directories:
            path = _path(directory, key)
            try:
                found = _decode(key, path.read_bytes())
            except OSError:
                continue
            if found is None:
                report.line("cache", "bad-entry", path)
                if self.mode == "rw":  # it would be read and refused for ever
                    with contextlib.suppress(OSError):
                        path.unlink()
                continue
            if self.mode == "rw":
                with contextlib.suppress(OSError):
                    os.utime(path)  # what pruning goes by
            return found
        return None

    def put(self, key: str, facts: dict[str, Any], cubin: bytes) -> bool:
        """Publishes an entry; False (and one warning a process) if no directory takes it."""
        if self.mode != "rw":
            return False
        data = _encode(key, facts, cubin)
        failure: OSError | None = None
        for directory in self.directories:
            try:
                write_atomically(_path(directory, key), data)
            except OSError as error:
                failure = error
                continue
            if not self._has_checked_size:
                self._has_checked_size = True
                if self.total_bytes() > SOFT_LIMIT_BYTES:
                    self.prune(SOFT_LIMIT_BYTES * 3 // 4)
            return True
        if failure is not None:
            where = os.pathsep.join(str(d) for d in self.directories)
            report.warn_once(
                f"cubin-store:{where}",
                f"the cubin store at {where} cannot be written ({failure.strerror or failure}): kernels are kept in memory only and "
                "assembled again by every process. Set OXIDNN_CACHE_DIR to a writable directory, or OXIDNN_CACHE=ro or off.")
        return False

    def entries(self) -> list[Entry]:
        """Every valid entry, least recently used first."""
        found = []
        for path in self._files():
            try:
                used, data = path.stat().st_mtime, path.read_bytes()
            except OSError:
                continue
            decoded = _decode(path.name, data)
            if decoded is not None:
                facts = decoded[0]
                found.append(Entry(path, str(facts.get("name", "")), str(facts.get("arch", "")), str(facts.get("assembler", "")),
                                   len(data), used))
        return sorted(found, key=lambda e: e.used)

    def total_bytes(self) -> int:
        """Bytes of all files of the store."""
        return sum(size for _, size, _ in self._sizes())

    def prune(self, max_bytes: int) -> int:
        """Removes least recently used files until at most `max_bytes` remain, and temporary files a dead process left; bytes freed."""
        freed = 0
        for directory in self.directories:
            for stale in (directory / "cubins").glob("*/.*.tmp"):
                with contextlib.suppress(OSError):
                    if time.time() - stale.stat().st_mtime > 3600:
                        stale.unlink()
        sizes = sorted(self._sizes())
        total = sum(size for _, size, _ in sizes)
        for _, size, path in sizes:
            if total <= max_bytes:
                break
            try:
                path.unlink()
            except OSError:
                continue
            total -= size
            freed += size
        return freed

    def clear(self) -> int:
        """Removes every entry; bytes freed."""
        return self.prune(0)

    def keep(self, file_name: str, text: str) -> Path:
        """Writes a text somebody may want to look at (a kernel the assembler refused): into the store, else a temporary directory."""
        if self.mode == "rw":
            for directory in self.directories:
                with contextlib.suppress(OSError):
                    path = directory / "failed" / file_name
                    write_atomically(path, text.encode())
                    return path
        path = Path(tempfile.mkdtemp(prefix="oxidnn-")) / file_name
        path.write_text(text, encoding="utf-8")
        return path

    def _files(self) -> list[Path]:
        found: list[Path] = []
        for directory in self.directories:
            with contextlib.suppress(OSError):
                found += [p for p in (directory / "cubins").glob("??/*") if not p.name.startswith(".")]
                found += [p for p in (directory / "failed").glob("*.ptx")]
        return found

    def _sizes(self) -> list[tuple[float, int, Path]]:
        sizes = []
        for path in self._files():
            with contextlib.suppress(OSError):
                status = path.stat()
                sizes.append((status.st_mtime, status.st_size, path))
        return sizes


def write_atomically(path: Path, data: bytes) -> None:
    """`data` under `path`, whole or not at all, whoever else writes it at the same time. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            try:
                os.fsync(file.fileno())
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no fsync
                    raise
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _path(directory: Path, key: str) -> Path:
    return directory / "cubins" / key[:2] / key


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\n" + body).hexdigest().encode()


def _encode(key: str, facts: dict[str, Any], cubin: bytes) -> bytes:
    body = json.dumps(facts, sort_keys=True).encode() + b"\n" + cubin
    return MAGIC + _digest(key, body) + b"\n" + body


def _decode(key: str, data: bytes) -> tuple[dict[str, Any], bytes] | None:
    start = len(MAGIC) + _DIGEST + 1
    body = data[start:]
    if not data.startswith(MAGIC) or data[len(MAGIC) : start] != _digest(key, body) + b"\n":
        return None
    line, _, cubin = body.partition(b"\n")
    return json.loads(line), cubin
