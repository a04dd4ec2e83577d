"""Workspaces: grown in stream order, apart for threads and for captured graphs."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict

import pytest

from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.runtime.memory import Workspace

MB = 1 << 20


class RecordingBlock:
    def __init__(self, device: RecordingDevice, ptr: int, num_bytes: int, stream: int) -> None:
        self.device, self.ptr, self.num_bytes, self.stream = device, ptr, num_bytes, stream

    def free(self) -> None:
        self.device.events.append(("free", self.ptr, self.stream))


class RecordingDevice:
    """Hands out addresses and writes down what was asked, in order; `captures` says which streams are being captured."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []
        self.captures: dict[int, int] = defaultdict(int)
        self.next = 1 << 20

    def allocate(self, num_bytes: int, stream: int) -> RecordingBlock:
        self.next += num_bytes + -num_bytes % 256
        self.events.append(("allocate", self.next, stream))
        return RecordingBlock(self, self.next, num_bytes, stream)

    def capture_id(self, stream: int) -> int:
        return self.captures[stream]


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice()


@pytest.fixture
def workspace(device: RecordingDevice) -> Workspace:
    return Workspace(device)  # type: ignore[arg-type]


def test_nothing_is_allocated_for_nothing(device: RecordingDevice, workspace: Workspace) -> None:
    assert workspace.take(0, 7) == 0 and device.events == []


def test_reused_until_it_must_grow(device: RecordingDevice, workspace: Workspace) -> None:
    first = workspace.take(MB, 7)
    assert workspace.take(10, 7) == first and workspace.take(2 * MB, 7) == first and len(device.events) == 1
    second = workspace.take(3 * MB, 7)
    assert second != first
    assert device.events[1:] == [("free", first, 7), ("allocate", second, 7)]  # in the order of the stream, before it is reused
    assert workspace.take(MB, 7) == second and workspace.num_bytes >= 3 * MB


def test_streams_do_not_share(device: RecordingDevice, workspace: Workspace) -> None:
    assert workspace.take(MB, 7) != workspace.take(MB, 8)


def test_threads_on_one_stream_do_not_share(workspace: Workspace) -> None:
    found: list[int] = []
    together = threading.Barrier(4)

    def work() -> None:
        together.wait()
        found.append(workspace.take(MB, 7))
        together.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 4


def test_a_captured_graph_keeps_blocks_of_its_own(device: RecordingDevice, workspace: Workspace) -> None:
    eager = workspace.take(MB, 7)
    device.captures[7] = 41
    first = workspace.take(MB, 7)
    second = workspace.take(5 * MB, 7)
    assert len({eager, first, second}) == 3 and workspace.take(MB, 7) == second
    device.captures[7] = 42
    other = workspace.take(MB, 7)
    device.captures[7] = 0
    assert other not in (eager, first, second) and workspace.take(MB, 7) == eager
    workspace.take(9 * MB, 7)
    assert [e for e in device.events if e[0] == "free"] == [("free", eager, 7)]  # what graphs refer to stays
    workspace.close()
    assert {e[1] for e in device.events if e[0] == "free"} == {e[1] for e in device.events if e[0] == "allocate"}
    assert workspace.num_bytes == 0


def test_on_the_emulated_device_the_old_block_is_gone() -> None:
    backend = EmulatedBackend("sm_80")
    workspace = Workspace(backend)
    first = workspace.take(100, 0)
    assert first % 256 == 0
    second = workspace.take(5 * MB, 0)
    backend.fill(second, 1, 5 * MB, 0)
    with pytest.raises(ValueError):
        backend.fill(first, 1, 100, 0)
    workspace.close()
    assert backend.memory.bytes_allocated == 0


def test_dropped_it_gives_back_all_but_what_graphs_may_replay(device: RecordingDevice) -> None:
    workspace = Workspace(device)  # type: ignore[arg-type]
    plain = [workspace.take(MB, stream) for stream in (7, 8)]
    device.captures[9] = 1
    workspace.take(MB, 9)
    del workspace
    gc.collect()
    assert [e for e in device.events if e[0] == "free"] == [("free", ptr, stream) for ptr, stream in zip(plain, (7, 8), strict=True)]
