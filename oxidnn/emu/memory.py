"""The memory of the emulated device.

Global memory *is* host memory: an emulated address is the real host address, so arrays of the caller take part without
a copy. Every access is checked against the table of allocations before it touches memory; that check is always on,
since it is what keeps the process safe.

Each allocation carries flat NumPy views of element width 1, 2, 4, 8 and 16 bytes over its bytes; an access of lanes
is one `take` on the view of its width. The views start at the 16-byte boundary at or below the first byte (`origin`).
Shadow bytes, one per byte: 0 never written, PENDING the target of a cp.async in flight, READY written.
"""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

RED_ZONE = 4096
SHARED_BASE = 1024  # the first kilobyte of a CTA's shared window belongs to the system, as on sm_90
SHARED_WINDOW = 1 << 56  # where the shared window lies in the generic address space (above every host address)
LOCAL_WINDOW = 1 << 57

READY = 0xFF
PENDING = 0x01

WIDTHS = (1, 2, 4, 8, 16)
SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
# 16-byte accesses travel as complex128: moved, never computed with.
RAW: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype(np.complex128),
}
ALL_ONES = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF, 8: (1 << 64) - 1, 16: (1 << 64) - 1}

Array = NDArray

# One element of every width with all bytes READY or PENDING, to be scattered into shadow bytes.
MARKS: dict[int, dict[int, Array]] = {
    state: {width: np.full(width, state, np.uint8).view(RAW[width]) for width in WIDTHS} for state in (READY, PENDING)
}


class Fault(Exception):
    """A checker's finding inside an instruction; `lanes` indexes the executing lanes, the machine adds the rest."""

    def __init__(self, checker: str, message: str, lanes: Array | None = None, positions: Array | None = None) -> None:
        super().__init__(message)
        self.checker = checker
        self.message = message
        self.lanes = lanes
        self.positions = positions


def views_of(raw: Array) -> dict[int, Array]:
    """Views of every access width over `raw` (uint8, start 16-byte aligned, length a multiple of 16)."""
    return {width: raw.view(RAW[width]) for width in WIDTHS}


def all_ready(shadow: dict[int, Array], index: Array, width: int) -> bool:
    """Whether every byte of the accesses is written."""
    found = shadow[width].take(index)
    if width == 16:
        found = found.view(np.uint64)
    return int(np.minimum.reduce(found)) == ALL_ONES[width]


def not_ready(shadow: dict[int, Array], index: Array, width: int) -> tuple[Array, bool]:
    """The lanes whose access touches an unwritten byte, and whether the first of them waits for a cp.async."""
    states = shadow[1].reshape(-1, width).take(index, axis=0)
    lanes = np.flatnonzero((states != READY).any(axis=1))
    return lanes, bool(len(lanes)) and bool((states[lanes[0]] == PENDING).any())


def host_view(address: int, num_bytes: int) -> Array:
    """uint8 view of `num_bytes` bytes of this process at `address`."""
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8)  # type: ignore[call-overload]


@dataclass(eq=False)
class Allocation:
    """A legal range of global memory; `bounds[w]` is the largest legal offset from `origin` of an access of w bytes."""

    name: str
    start: int
    size: int
    writable: bool
    owner: object  # keeps the memory alive
    origin: int = 0
    lead: int = 0
    views: dict[int, Array] = field(default_factory=dict)
    shadow: dict[int, Array] | None = None  # None: every byte is written
    bounds: dict[int, int] = field(default_factory=dict)
    alive: bool = True

    def __post_init__(self) -> None:
        self.origin = self.start & ~15
        self.lead = self.start - self.origin
        length = (self.lead + self.size + 15) & ~15
        if isinstance(self.owner, np.ndarray) and self.owner.dtype == np.uint8 and self.owner.flags.owndata and self.size:
            first = self.origin - self.owner.ctypes.data
            raw = self.owner[first : first + length] if 0 <= first <= len(self.owner) - length else None
        else:
            raw = None
        if raw is None:
            raw = host_view(self.origin, length) if self.size else np.zeros(0, np.uint8)
        self.views = views_of(raw)
        self.bounds = {width: self.lead + self.size - width for width in WIDTHS}

    @property
    def end(self) -> int:
        return self.start + self.size

    def forget(self) -> None:
        """Make the range illegal, caches of instructions included."""
        self.alive = False
        self.bounds = dict.fromkeys(WIDTHS, -1)

    def settle(self) -> None:
        """Drop the shadow once every byte is written."""
        if self.shadow is not None and bool(
            (self.shadow[1][self.lead : self.lead + self.size] == READY).all()
        ):
            self.shadow = None

    def __str__(self) -> str:
        return f"{self.name!r} [{self.start:#x}, {self.end:#x}), {self.size} bytes"


class GlobalMemory:
    """The table of allocations of one emulated device."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._table: list[Allocation] = []
        self._longest = 0
        self._freed: list[Allocation] = []
        self.bytes_allocated = 0
        # What the last launch, and those that it need not have waited for, have touched, and what of it they wrote, from the first byte to
        # behind the last. None: nobody has looked
        self.touched: dict[Allocation, tuple[tuple[int, int], tuple[int, int]]] | None = None

    def alloc(self, num_bytes: int, name: str = "buffer", initialised: bool = False, writable: bool = True) -> int:
        """Address (256-byte aligned) of `num_bytes` fresh bytes between red zones; counts as unwritten unless
        `initialised`, kernels may write it if `writable`. Fresh bytes hold 0xFF (NaN in every floating type)."""
        if num_bytes < 0:
            raise ValueError(f"alloc: num_bytes is {num_bytes} (expected >= 0)")
        backing = np.empty(num_bytes + 2 * RED_ZONE + 256, np.uint8)
        start = (backing.ctypes.data + RED_ZONE + 255) & ~255
        offset = start - backing.ctypes.data
        backing[offset : offset + num_bytes] = 0 if initialised else 0xFF
        allocation = Allocation(name, start, num_bytes, writable, backing)
        if not initialised and num_bytes:
            allocation.shadow = views_of(_aligned_zeros(len(allocation.views[1])))
        self._insert(allocation)
        self.bytes_allocated += num_bytes
        return start

    def register(self, array: Array, name: str = "array", writable: bool = True) -> int:
        """Address of the caller's `array` (zero copy). Its extent becomes legal to read, and to write if `writable`
        and the array itself is; all of it counts as written."""
        low, high = _extent(array)
        allocation = Allocation(name, low, high - low, writable and array.flags.writeable, array)
        self._insert(allocation)
        return array.ctypes.data

    def _insert(self, allocation: Allocation) -> None:
        at = bisect.bisect_right(self._starts, allocation.start)
        self._starts.insert(at, allocation.start)
        self._table.insert(at, allocation)
        self._longest = max(self._longest, allocation.size)

    def _remove(self, pointer: int) -> Allocation:
        for at in range(bisect.bisect_right(self._starts, pointer) - 1, -1, -1):
            allocation = self._table[at]
            if allocation.start <= pointer < max(allocation.end, allocation.start + 1):
                del self._starts[at], self._table[at]
                allocation.forget()
                return allocation
        raise ValueError(f"{pointer:#x} is no live allocation ({self.describe(pointer)})")

    def unregister(self, pointer: int) -> None:
        """Forget the array registered at `pointer`."""
        self._remove(pointer).owner = None

    def free(self, pointer: int) -> None:
        """Release the allocation at `pointer`; later accesses are reported as use after free."""
        allocation = self._remove(pointer)
        self.bytes_allocated -= allocation.size
        allocation.owner = None
        allocation.views = {}
        self._freed = [*self._freed[-63:], allocation]

    def at(self, pointer: int) -> Allocation:
        """The live allocation that holds `pointer`; ValueError if none."""
        found = self.find(pointer, 0)
        if found is None:
            raise ValueError(f"{pointer:#x} lies in no allocation ({self.describe(pointer)})")
        return found

    def view(self, pointer: int, num_bytes: int) -> Array:
        """uint8 view of `num_bytes` bytes at `pointer`."""
        allocation = self.at(pointer)
        if pointer + num_bytes > allocation.end:
            raise ValueError(f"{num_bytes} bytes at {pointer:#x} leave {allocation}")
        offset = pointer - allocation.origin
        return allocation.views[1][offset : offset + num_bytes]

    def mark_initialised(self, pointer: int, num_bytes: int) -> None:
        """Count the bytes as written (after the host wrote them)."""
        allocation = self.at(pointer)
        if allocation.shadow is not None:
            offset = pointer - allocation.origin
            allocation.shadow[1][offset : offset + num_bytes] = READY
            allocation.settle()

    def mark_uninitialised(self, pointer: int, num_bytes: int) -> None:
        """Count the bytes as never written."""
        allocation = self.at(pointer)
        if allocation.shadow is None:
            raw = _aligned_zeros(len(allocation.views[1]))
            raw[:] = READY
            allocation.shadow = views_of(raw)
        offset = pointer - allocation.origin
        allocation.shadow[1][offset : offset + num_bytes] = 0

    def settle(self) -> None:
        """Drop shadows that have become all written."""
        for allocation in self._table:
            if allocation.shadow is not None:
                allocation.settle()

    def find(self, address: int, width: int) -> Allocation | None:
        """The allocation that holds [address, address + width), or None. Registered arrays may overlap."""
        at = bisect.bisect_right(self._starts, address) - 1
        while at >= 0:
            allocation = self._table[at]
            if address + width <= allocation.end:
                return allocation
            if address - allocation.start > self._longest:
                return None
            at -= 1
        return None

    def describe(self, address: int) -> str:
        """Where `address` lies relative to the nearest allocation."""
        for allocation in reversed(self._freed):
            if allocation.start <= address < allocation.end and self.find(address, 1) is None:
                return f"use after free: {address - allocation.start} bytes into the freed {allocation}"
        best: tuple[int, str] | None = None
        for allocation in self._table:
            if allocation.start <= address < allocation.end:
                return f"{address - allocation.start} bytes into {allocation}"
            if address < allocation.start:
                near = (allocation.start - address, f"{allocation.start - address} bytes before {allocation}")
            else:
                near = (address - allocation.end, f"{address - allocation.end} bytes past the end of {allocation}")
            if best is None or near[0] < best[0]:
                best = near
        return best[1] if best else "there is no allocation at all"


def _extent(array: Array) -> tuple[int, int]:
    """First byte and one past the last byte of an array with any strides."""
    low = high = array.ctypes.data
    if array.size:
        for length, stride in zip(array.shape, array.strides, strict=True):
            if stride < 0:
                low += (length - 1) * stride
            else:
                high += (length - 1) * stride
        high += array.itemsize
    return low, high


def align_up(value: int, to: int) -> int:
    return (value + to - 1) // to * to


def _aligned_zeros(num_bytes: int) -> Array:
    backing = np.zeros(num_bytes + 16, np.uint8)
    offset = -backing.ctypes.data % 16
    return backing[offset : offset + num_bytes]


class Window:
    """Shared or local memory of a batch: `count` windows of `size` bytes each, laid out one after the other."""

    def __init__(self, count: int, size: int, base: int, track: bool) -> None:
        self.size = size
        self.base = base
        self.stride = (size + 15) & ~15
        raw = _aligned_zeros(count * self.stride)
        raw[:] = 0xFF
        self.views = views_of(raw)
        self.shadow: dict[int, Array] | None = None
        if track and size:
            self.shadow = views_of(_aligned_zeros(count * self.stride))
            self.shadow[1].reshape(count, self.stride)[:, size:] = READY  # the padding
        self.pending = 0  # cp.async copies in flight

    def settle(self) -> None:
        """Drop the shadow once every byte of every window is written."""
        if self.shadow is not None and not self.pending:
            if int(self.shadow[8].min() if self.shadow[8].size else ALL_ONES[8]) == ALL_ONES[8]:
                self.shadow = None
