"""The cubin store: nothing damaged or foreign is ever returned, nothing about the disk ever fails a run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from oxidnn import report
from oxidnn.errors import OxidnnWarning
from oxidnn.runtime import cubin_store
from oxidnn.runtime.cubin_store import CubinStore, cache_directories, write_atomically

KEY, OTHER = "ab" + "0" * 62, "ab" + "1" * 62
FACTS = {"name": "k", "arch": "sm_80", "assembler": "nvjitlink 13.5", "registers": 8}
CUBIN = bytes(range(256)) * 4 + b"\n\0\n"


@pytest.fixture
def store(tmp_path: Path) -> CubinStore:
    return CubinStore((tmp_path,), "rw")


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_said", set())


def path_of(tmp_path: Path, key: str = KEY) -> Path:
    return tmp_path / "cubins" / key[:2] / key


def test_round_trip_and_miss(store: CubinStore) -> None:
    assert store.get(KEY) is None
    assert store.put(KEY, FACTS, CUBIN)
    assert store.get(KEY) == (FACTS, CUBIN)
    assert store.get(OTHER) is None


def test_every_truncation_is_a_miss(store: CubinStore, tmp_path: Path) -> None:
    store.put(KEY, FACTS, CUBIN)
    whole = path_of(tmp_path).read_bytes()
    for length in [*range(0, 200), *range(200, len(whole), 37), len(whole) - 1]:
        path_of(tmp_path).write_bytes(whole[:length])
        assert store.get(KEY) is None, length
    path_of(tmp_path).write_bytes(whole + b"\0")
    assert store.get(KEY) is None


def test_every_flipped_byte_is_a_miss(store: CubinStore, tmp_path: Path) -> None:
    store.put(KEY, FACTS, CUBIN)
    whole = path_of(tmp_path).read_bytes()
    for at in range(len(whole)):
        path_of(tmp_path).write_bytes(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
        assert store.get(KEY) is None, at


def test_an_entry_under_another_key_is_a_miss(store: CubinStore, tmp_path: Path) -> None:
    store.put(KEY, FACTS, CUBIN)
    path_of(tmp_path, OTHER).write_bytes(path_of(tmp_path).read_bytes())
    assert store.get(OTHER) is None and store.get(KEY) == (FACTS, CUBIN)


def test_a_bad_entry_is_replaced(store: CubinStore, tmp_path: Path) -> None:
    path_of(tmp_path).parent.mkdir(parents=True)
    path_of(tmp_path).write_bytes(b"garbage")
    assert store.get(KEY) is None and not path_of(tmp_path).exists()
    assert store.put(KEY, FACTS, CUBIN) and store.get(KEY) == (FACTS, CUBIN)


def test_a_directory_in_the_entrys_place_is_a_miss(store: CubinStore, tmp_path: Path) -> None:
    path_of(tmp_path).mkdir(parents=True)
    assert store.get(KEY) is None
    with pytest.warns(OxidnnWarning, match="cannot be written"):
        assert not store.put(KEY, FACTS, CUBIN)


def test_modes(tmp_path: Path) -> None:
    CubinStore((tmp_path,), "rw").put(KEY, FACTS, CUBIN)
    before = path_of(tmp_path).stat().st_mtime_ns
    read_only, off = CubinStore((tmp_path,), "ro"), CubinStore((tmp_path,), "off")
    assert read_only.get(KEY) == (FACTS, CUBIN) and off.get(KEY) is None
    assert not read_only.put(OTHER, FACTS, CUBIN) and not off.put(OTHER, FACTS, CUBIN)
    assert path_of(tmp_path).stat().st_mtime_ns == before and not path_of(tmp_path, OTHER).exists()
    path_of(tmp_path).write_bytes(b"garbage")
    assert read_only.get(KEY) is None and path_of(tmp_path).exists()


def test_unwritable_directory_warns_once_and_works_on(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    store = CubinStore((blocker / "cache",), "rw")
    with pytest.warns(OxidnnWarning, match="OXIDNN_CACHE_DIR"):
        assert not store.put(KEY, FACTS, CUBIN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not store.put(OTHER, FACTS, CUBIN) and store.get(KEY) is None
        assert store.entries() == [] and store.total_bytes() == 0 and store.clear() == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_full_or_read_only_disk_leaves_no_debris(code: int, store: CubinStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cubin_store.os, "fsync", refuse)
    with pytest.warns(OxidnnWarning):
        assert not store.put(KEY, FACTS, CUBIN)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_no_fsync_on_a_network_file_system_is_no_failure(store: CubinStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(_: int) -> None:
        raise OSError(errno.EINVAL, "fsync")

    monkeypatch.setattr(cubin_store.os, "fsync", unsupported)
    assert store.put(KEY, FACTS, CUBIN) and store.get(KEY) == (FACTS, CUBIN)


def test_first_writable_of_several_directories(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    shared, own = tmp_path / "shared", tmp_path / "own"
    CubinStore((shared,), "rw").put(OTHER, FACTS, CUBIN)
    store = CubinStore((blocker / "x", own, shared), "rw")
    assert store.put(KEY, FACTS, CUBIN) and path_of(own).exists()
    assert store.get(OTHER) == (FACTS, CUBIN)


def test_directories_of_the_switch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OXIDNN_CACHE_DIR", f"{tmp_path / 'a'}{os.pathsep}{tmp_path / 'b'}")
    assert cache_directories() == (tmp_path / "a", tmp_path / "b")
    monkeypatch.delenv("OXIDNN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform.startswith("linux"):
        assert cache_directories() == (tmp_path / "xdg" / "oxidnn",)


def test_prune_removes_the_least_recently_used(store: CubinStore, tmp_path: Path) -> None:
    keys = [f"{i:02x}" + "0" * 62 for i in range(5)]
    for age, key in enumerate(keys):
        store.put(key, FACTS, CUBIN)
        os.utime(path_of(tmp_path, key), (1000 + age, 1000 + age))
    store.get(keys[0])  # using an entry makes it young again
    entry = store.total_bytes() // 5
    assert [e.path.name for e in store.entries()] == [*keys[1:], keys[0]]
    assert store.prune(2 * entry) == 3 * entry
    assert {e.path.name for e in store.entries()} == {keys[4], keys[0]}
    assert store.clear() == 2 * entry and store.entries() == []


def test_prune_removes_files_dead_processes_left(store: CubinStore, tmp_path: Path) -> None:
    store.put(KEY, FACTS, CUBIN)
    dead, live = path_of(tmp_path).parent / ".x.tmp", path_of(tmp_path).parent / ".y.tmp"
    dead.write_bytes(b"half")
    live.write_bytes(b"half")
    os.utime(dead, (time.time() - 7200,) * 2)
    store.prune(1 << 30)
    assert not dead.exists() and live.exists() and store.get(KEY) is not None
    assert len(store.entries()) == 1


def test_the_soft_limit_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(8):
        CubinStore((tmp_path,), "rw").put(f"{i:02x}" + "0" * 62, FACTS, CUBIN)
    total = CubinStore((tmp_path,), "rw").total_bytes()
    monkeypatch.setattr(cubin_store, "SOFT_LIMIT_BYTES", total // 2)
    store = CubinStore((tmp_path,), "rw")
    store.put("ff" + "0" * 62, FACTS, CUBIN)
    assert store.total_bytes() <= total // 2 and store.get("ff" + "0" * 62) is not None


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "f", b"old")

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "replace")

    monkeypatch.setattr(cubin_store.os, "replace", refuse)
    with pytest.raises(OSError):
        write_atomically(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


_WRITER = """
import random, sys
from pathlib import Path
from oxidnn.runtime.cubin_store import CubinStore
seed, root = int(sys.argv[1]), Path(sys.argv[2])
rng = random.Random(seed)
store = CubinStore((root,), "rw")
seen = 0
for step in range(300):
    i = rng.randrange(6)
    key = f"{i:02x}" + "0" * 62
    cubin = bytes([i]) * (20000 + i)
    action = rng.randrange(8)
    if action == 0:
        store.prune(60000)
    elif action == 1 and seed == 0:
        path = root / "cubins" / key[:2] / key
        if path.exists():
            path.write_bytes(path.read_bytes()[: rng.randrange(20000)])
    elif action < 5:
        assert store.put(key, {"i": i}, cubin)
    else:
        found = store.get(key)
        assert found is None or found == ({"i": i}, cubin), (i, found[0], len(found[1]))
        seen += found is not None
print(seen)
"""


def test_many_processes_share_a_store(tmp_path: Path) -> None:
    """Writers, readers, pruners and one vandal: a hit is always the right cubin, and nothing raises."""
    writers = [subprocess.Popen([sys.executable, "-W", "error", "-c", _WRITER, str(i), str(tmp_path)], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True) for i in range(4)]
    hits = 0
    for writer in writers:
        out, err = writer.communicate(timeout=120)
        assert writer.returncode == 0, err
        hits += int(out)
    assert hits > 20
    assert not list(tmp_path.rglob("*.tmp"))
