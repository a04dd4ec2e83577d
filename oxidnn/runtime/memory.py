"""Scratch memory of plans: one growing block per stream and thread, and blocks of their own for captured graphs."""

from __future__ import annotations

import threading
import weakref

from .backend import Allocation, Backend

_GRANULE = 2 << 20


class Workspace:
    """The scratch memory of one handle.

    A block is shared by all plans run on one stream from one thread: the stream orders them. Two threads that enqueue on one stream
    interleave their kernels, so each has its own. A captured graph is replayed later, on any stream, beside whatever runs then:
    it gets blocks no one else uses, kept until `close`. A workspace nobody holds any more gives back all but those.

    Concurrency: safe for threads.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._blocks: dict[tuple[int, int], Allocation] = {}
        self._captured: dict[int, list[Allocation]] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _give_back, self._blocks).atexit = False  # the process takes its memory with it

    def take(self, num_bytes: int, stream: int) -> int:
        """Address (256-byte aligned) of at least `num_bytes` bytes, whose contents are arbitrary, for work enqueued on `stream` next.

        Grows by giving the old block back in the order of the stream. Raises LaunchError when the device has no memory left.
        """
        if num_bytes == 0:
            return 0
        capture = self._backend.capture_id(stream)
        if capture:
            return self._take_captured(num_bytes, stream, capture)
        key = (stream, threading.get_ident())
        block = self._blocks.get(key)
        if block is None or block.num_bytes < num_bytes:
            if block is not None:
                del self._blocks[key]
                block.free()
            block = self._blocks[key] = self._backend.allocate(num_bytes + -num_bytes % _GRANULE, stream)
        return block.ptr

    def _take_captured(self, num_bytes: int, stream: int, capture: int) -> int:
        with self._lock:
            blocks = self._captured.setdefault(capture, [])
            if not blocks or blocks[-1].num_bytes < num_bytes:  # kernels captured before keep the smaller block
                blocks.append(self._backend.allocate(num_bytes + -num_bytes % _GRANULE, stream))
            return blocks[-1].ptr

    @property
    def num_bytes(self) -> int:
        """Bytes held at present."""
        with self._lock:
            return sum(b.num_bytes for b in (*self._blocks.copy().values(), *(b for bs in self._captured.values() for b in bs)))

    def close(self) -> None:
        """Gives everything back; graphs captured with this workspace must not be replayed any more."""
        with self._lock:
            _give_back(self._blocks)
            for block in (b for blocks in self._captured.values() for b in blocks):
                block.free()
            self._captured.clear()


def _give_back(blocks: dict[tuple[int, int], Allocation]) -> None:
    for block in blocks.values():
        block.free()
    blocks.clear()
