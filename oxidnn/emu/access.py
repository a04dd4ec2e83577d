"""Checked access to global, shared, local and generic addresses: every load, store and atomic goes through here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu.decode import Source
from oxidnn.emu.memory import (
    LOCAL_WINDOW,
    MARKS,
    RAW,
    READY,
    SHARED_BASE,
    SHARED_WINDOW,
    SHIFT,
    Allocation,
    Array,
    Fault,
    Window,
    all_ready,
    not_ready,
)  # fmt: skip

if TYPE_CHECKING:
    from oxidnn.emu.machine import State

_SHIFTS = {width: np.array([shift], np.uint64) for width, shift in SHIFT.items()}
_SHIFTS_SIGNED = {width: np.array([shift], np.int64) for width, shift in SHIFT.items()}


RANK_SHIFT = 24  # of a shared::cluster address: from here the rank of its CTA, plus one


class Access:
    """One memory operand: byte offset and access width, with the allocation it met last."""

    __slots__ = ("offset", "width", "mask", "allocation", "bias", "shift", "kind", "sync", "order", "signed_shift",
                 "window_bias", "step", "is_read_only")  # fmt: skip

    def __init__(self, offset: int, width: int, kind: str, order: frozenset[str] | None = None) -> None:
        self.offset = offset
        self.width = width
        self.mask = width - 1
        self.kind = kind  # "read", "write", "atomic", "async write"
        self.order = order or frozenset()  # "acquire", "release"
        self.is_read_only = False  # ld.global.nc: of what nobody writes during the kernel
        self.sync = order is not None  # a strong access: does not race, and may synchronise
        self.shift = _SHIFTS[width]
        self.signed_shift = _SHIFTS_SIGNED[width]
        self.step = np.array([offset // width], np.int64)  # the offset in elements, where it is a multiple
        self.allocation: Allocation | None = None
        self.bias = np.zeros(1, np.uint64)
        self.window_bias = {
            (size, base): np.array([(offset - base) & ((1 << 8 * size) - 1)], f"u{size}")
            for size in (4, 8)
            for base in (0, SHARED_BASE)
        }

    def meet(self, allocation: Allocation) -> None:
        self.allocation = allocation
        self.bias = np.array([(self.offset - allocation.origin) & ((1 << 64) - 1)], np.uint64)


# -- remembered addresses


class Place:
    """What is known of the addresses in a register, so that `[%r+0]`, `[%r+4]`, ... are checked once.

    Valid while the register holds the same array; masked writes, which are in place, drop it (State.put).
    """

    __slots__ = ("array", "allocation", "offset", "high", "low", "bits", "elements")

    def __init__(self, array: Array, allocation: Allocation | None, offset: Array, high: int, bits: int) -> None:
        self.array = array
        self.allocation = allocation
        self.offset = offset  # int64 bytes from the origin, before the immediate offset
        self.high = high
        self.low = 0  # offsets count unsigned: an address below the origin makes `high` huge
        self.bits = bits
        self.elements: dict[int, Array] = {}

    def index(self, access: Access, idx: Array | None) -> Array | None:
        """Element index of the lanes; None where the alignment needs a closer look."""
        if (self.bits | access.offset) & access.mask:
            return None
        width = access.width
        found = self.elements.get(width)
        if found is None:
            found = self.elements[width] = self.offset >> access.signed_shift if width > 1 else self.offset
        if idx is not None:
            found = found.take(idx)
        return found + access.step if access.offset else found


def global_place(S: State, base: Source, access: Access) -> Place | None:
    """The place of a register with a lane-dependent address, if all lanes lie in one allocation; else None."""
    a = S.R[base.slot]
    place = S.places.get(base.slot)
    if place is None or place.array is not a:
        if a.size == 1:
            return None
        addresses = a if base.view is None else a.view(base.view)
        allocation = access.allocation
        for attempt in (0, 1):
            if attempt == 1:
                allocation = S.memory.find((int(addresses[0]) + access.offset) & ((1 << 64) - 1), access.width)
            if allocation is None or not allocation.alive:
                continue
            o = addresses - np.array([allocation.origin], np.uint64)
            high = int(np.maximum.reduce(o))
            if high + access.offset <= allocation.bounds[access.width]:
                bits = int(np.bitwise_or.reduce(o)) & 15
                place = Place(a, allocation, o.view(np.int64), high, bits)
                place.low = int(np.minimum.reduce(o)) if allocation.lead or access.offset < 0 else -1
                access.meet(allocation)
                break
        else:
            place = Place(a, None, addresses.view(np.int64), 0, 0)
        S.places[base.slot] = place
    allocation = place.allocation
    if allocation is None or place.high + access.offset > allocation.bounds[access.width]:
        return None
    if access.offset < 0 or allocation.lead:
        if place.low < 0:
            place.low = int(np.minimum.reduce(place.offset))
        if place.low + access.offset < allocation.lead:
            return None
    return place


def window_place(S: State, base: Source, access: Access, window: Window) -> Place | None:
    """The same for shared memory; the offset includes that of the lane's CTA."""
    a = S.R[base.slot]
    place = S.places.get(base.slot)
    if place is None or place.array is not a:
        if a.size == 1:
            return None
        addresses = a if base.view is None else a.view(base.view)
        o = addresses - np.array([window.base], addresses.dtype)
        high, bits = int(np.maximum.reduce(o)), int(np.bitwise_or.reduce(o)) & 15
        whole = o.astype(np.int64)
        place = Place(a, None, whole, high, bits)
        if access.offset < 0:
            place.low = int(np.minimum.reduce(o))
        else:
            place.low = -1
        if S.shared_offset.size > 1:
            whole += S.shared_offset
        S.places[base.slot] = place
    if place.high + access.offset > window.size - access.width:
        return None
    if access.offset < 0:
        if place.low < 0:
            addresses = a if base.view is None else a.view(base.view)
            place.low = int(np.minimum.reduce(addresses - np.array([window.base], addresses.dtype)))
        if place.low + access.offset < 0:
            return None
    return place


# -- global memory


def locate(S: State, a: Array, access: Access) -> Array | None:
    """Element index of every lane's address in `access.allocation`, or None if the lanes span several allocations.

    A legal access has offset = address - origin in [lead, lead + size - width], checked unsigned.
    """
    width = access.width
    for attempt in (0, 1):
        allocation = access.allocation
        if allocation is not None:
            o = a + access.bias
            if o.size == 1:
                low = high = bits = int(o[0])
            else:
                high = int(np.maximum.reduce(o))
                low = 0 if allocation.lead == 0 else int(np.minimum.reduce(o))
                bits = int(np.bitwise_or.reduce(o)) if width > 1 else 0
            if high <= allocation.bounds[width] and (allocation.lead == 0 or low >= allocation.lead):
                if width == 1:
                    return o.view(np.int64)
                if bits & access.mask:
                    misaligned(a + np.array([access.offset & ((1 << 64) - 1)], np.uint64), width, S)
                return (o >> access.shift).view(np.int64)
        if attempt == 0:
            first = (int(a[0]) + access.offset) & ((1 << 64) - 1)
            found = S.memory.find(first, width)
            if found is None or found is allocation:
                return None
            access.meet(found)
    return None


def misaligned(addresses: Array, width: int, S: State) -> None:
    lanes = np.flatnonzero(addresses & np.array(width - 1, addresses.dtype))
    raise Fault("align", f"address {int(addresses[lanes[0]]):#x} is not a multiple of {width} bytes", lanes)


def partition(S: State, addresses: Array, width: int) -> Iterator[tuple[Allocation, Array]]:
    """The lanes per allocation; Fault if one lies in none."""
    if int(np.bitwise_or.reduce(addresses)) & (width - 1):
        misaligned(addresses, width, S)
    found: dict[int, tuple[Allocation, list[int]]] = {}
    for position, address in enumerate(addresses.tolist()):
        allocation = S.memory.find(address, width)
        if allocation is None:
            lanes = np.array([i for i, x in enumerate(addresses.tolist()) if S.memory.find(x, width) is None])
            worst = int(addresses[lanes[0]])
            window = ""
            if worst < 1 << 32:
                window = " (a 32-bit value: perhaps a shared offset used as a generic or global address)"
            raise Fault(
                "bounds",
                f"{width} bytes at {worst:#x} are in no allocation: {S.memory.describe(worst)}{window}",
                lanes,
            )
        found.setdefault(id(allocation), (allocation, []))[1].append(position)
    for allocation, positions in found.values():
        yield allocation, np.array(positions)


def check_written(S: State, allocation: Allocation, index: Array, width: int) -> None:
    assert allocation.shadow is not None
    if not all_ready(allocation.shadow, index, width):
        lanes, _ = not_ready(allocation.shadow, index, width)
        address = allocation.origin + int(index[lanes[0]]) * width
        raise Fault("uninit", f"reads {width} bytes at {address:#x} that nothing wrote: {S.memory.describe(address)}", lanes)


def read_at(S: State, allocation: Allocation, index: Array, access: Access, idx: Array | None) -> Array:
    width = access.width
    if allocation.shadow is not None and S.uninit:
        check_written(S, allocation, index, width)
    if S.global_race is not None:
        S.global_race.access(S, allocation, index, access, idx)
    if S.bank is not None:
        S.bank.sectors(S, allocation.origin, index, width, idx)
    S.counters.global_read += width * S.lanes(idx)
    return allocation.views[width].take(index, mode="wrap")


def write_at(S: State, allocation: Allocation, index: Array, values: Array, access: Access, idx: Array | None) -> None:
    width = access.width
    if not allocation.writable:
        raise Fault("bounds", f"writes to read-only memory: {allocation}")
    if S.global_race is not None:
        S.global_race.access(S, allocation, index, access, idx)
    if S.bank is not None:
        S.bank.sectors(S, allocation.origin, index, width, idx)
    store(allocation.views[width], index, values)
    if S.race is not None and not access.sync and (lane := overwritten(allocation.views[width], index, values)) >= 0:
        address = allocation.origin + int(index[lane if len(index) > 1 else 0]) * width
        raise Fault("race", f"{OVERWRITTEN} {address:#x} ({S.memory.describe(address)})", np.array([lane]))
    if allocation.shadow is not None:
        mark_ready(allocation.shadow, index, width)


def gather_global(S: State, a: Array, access: Access, idx: Array | None) -> Array:
    """The raw elements at the lanes' addresses (uint64, one per lane or a single uniform one)."""
    index = locate(S, a, access)
    width = access.width
    if index is not None:
        assert access.allocation is not None
        return read_at(S, access.allocation, index, access, idx)
    addresses = a + np.array([access.offset & ((1 << 64) - 1)], np.uint64)
    out = np.empty(len(a), RAW[width])
    for allocation, lanes in partition(S, addresses, width):
        index = element_index(addresses[lanes], allocation, width)
        if allocation.shadow is not None and S.uninit:
            relane(check_written, lanes, S, allocation, index, width)
        if S.global_race is not None:
            relane(S.global_race.access, lanes, S, allocation, index, access, idx if len(a) == 1 else subset(idx, lanes))
        out[lanes] = allocation.views[width].take(index)
    S.counters.global_read += width * len(a)
    return out


def subset(idx: Array | None, lanes: Array) -> Array:
    return lanes if idx is None else idx[lanes]


def relane(fn: Callable[..., None], lanes: Array, *arguments: Any) -> None:
    try:
        fn(*arguments)
    except Fault as fault:
        if fault.lanes is not None:
            fault.lanes = lanes[fault.lanes]
        raise


def element_index(addresses: Array, allocation: Allocation, width: int) -> Array:
    return ((addresses - np.uint64(allocation.origin)) >> _SHIFTS[width]).view(np.int64)


def scatter_global(S: State, a: Array, values: Array, access: Access, idx: Array | None) -> None:
    """Store the raw `values`; lanes with equal addresses: the last wins."""
    index = locate(S, a, access)
    width = access.width
    S.counters.global_written += width * S.lanes(idx)
    if index is not None:
        assert access.allocation is not None
        write_at(S, access.allocation, index, values, access, idx)
        return
    addresses = a + np.array([access.offset & ((1 << 64) - 1)], np.uint64)
    for allocation, lanes in partition(S, addresses, width):
        index = element_index(addresses[lanes], allocation, width)
        if not allocation.writable:
            raise Fault("bounds", f"writes to read-only memory: {S.memory.describe(int(addresses[lanes[0]]))}", lanes)
        if S.global_race is not None:
            relane(S.global_race.access, lanes, S, allocation, index, access, idx if len(a) == 1 else subset(idx, lanes))
        store(allocation.views[width], index, values if len(values) == 1 or len(a) == 1 else values[lanes])
        if allocation.shadow is not None:
            mark_ready(allocation.shadow, index, width)


def store(view: Array, index: Array, values: Array) -> None:
    if len(index) == 1 and len(values) > 1:
        values = values[-1:]  # all lanes write one address: the last wins
    view[index] = values


OVERWRITTEN = "lanes of one store write different values to"


def overwritten(view: Array, index: Array, values: Array) -> int:
    """After a store: the first lane whose value another lane's has replaced, or -1."""
    if len(values) == 1:
        return -1
    kept = view.take(index)
    if kept.itemsize == 16:
        lost = (kept.view(np.uint64).reshape(-1, 2) != values.view(np.uint64).reshape(-1, 2)).any(axis=1)
    else:
        lost = kept != values
    return int(np.argmax(lost)) if np.count_nonzero(lost) else -1


def mark_ready(shadow: dict[int, Array], index: Array, width: int) -> None:
    shadow[width][index] = MARKS[READY][width]


# -- shared and local memory


def window_index(S: State, a: Array, access: Access, window: Window, offsets: Array, what: str) -> Array:
    """Element index of every lane in `window.views[width]`: (address - base + offset of the lane's window) / width."""
    width = access.width
    o = a + access.window_bias[a.dtype.itemsize, window.base]
    if o.size == 1:
        high = bits = int(o[0])
    else:
        high, bits = int(np.maximum.reduce(o)), int(np.bitwise_or.reduce(o))
    if bits & access.mask:
        misaligned(a + np.array([access.offset & ((1 << 32) - 1)], a.dtype), width, S)
    if high > window.size - width:
        outside(S, a, access, window, what)
    o = o.astype(np.int64)
    if window.stride and (offsets.size > 1 or offsets[0]):
        o = o + offsets
    return o >> access.signed_shift if width > 1 else o


def outside(S: State, a: Array, access: Access, window: Window, what: str) -> None:
    relative = a.astype(np.int64) + access.offset - window.base
    lanes = np.flatnonzero((relative < 0) | (relative > window.size - access.width))
    at = int(relative[lanes[0]])
    where = f"{at - window.size} bytes past the end" if at >= window.size else f"offset {at}"
    raise Fault(
        "bounds",
        f"{access.width} bytes at {what} address {int(a[lanes[0]]) + access.offset:#x} ({where}) leave the "
        f"{window.size} bytes of {what} memory",
        lanes,
    )


def gather_shared(S: State, a: Array, access: Access, idx: Array | None) -> Array:
    offsets = S.shared_offset
    index = window_index(S, a, access, S.shared, offsets if idx is None or offsets.size == 1 else offsets.take(idx), "shared")
    return read_shared(S, index, access, idx)


def read_shared(S: State, index: Array, access: Access, idx: Array | None) -> Array:
    width = access.width
    if S.shared.shadow is not None and not all_ready(S.shared.shadow, index, width):
        unwritten_shared(S, index, width)
    if S.race is not None:
        S.race.access(S, index, access, idx)
    if S.bank is not None:
        S.bank.access(S, index, access, idx)
    S.counters.shared_read += width * len(index)
    return S.shared.views[width].take(index, mode="wrap")


def unwritten_shared(S: State, index: Array, width: int, lanes_of: Array | None = None) -> None:
    assert S.shared.shadow is not None
    lanes, pending = not_ready(S.shared.shadow, index, width)
    at = int(index[lanes[0]]) * width
    offset = at % S.shared.stride + SHARED_BASE
    why = "the target of a cp.async that no wait has completed" if pending else "never written"
    if lanes_of is not None:
        lanes = lanes_of[lanes]
    raise Fault("uninit", f"reads {width} bytes at shared address {offset:#x}{S.shared_name(offset)}, {why}", lanes)


def scatter_shared(S: State, a: Array, values: Array, access: Access, idx: Array | None) -> None:
    offsets = S.shared_offset
    index = window_index(S, a, access, S.shared, offsets if idx is None or offsets.size == 1 else offsets.take(idx), "shared")
    write_shared(S, index, values, access, idx)


def write_shared(S: State, index: Array, values: Array, access: Access, idx: Array | None) -> None:
    width = access.width
    if S.race is not None:
        S.race.access(S, index, access, idx)
    if S.bank is not None:
        S.bank.access(S, index, access, idx)
    S.counters.shared_written += width * len(index)
    store(S.shared.views[width], index, values)
    if S.race is not None and not access.sync and (lane := overwritten(S.shared.views[width], index, values)) >= 0:
        offset = int(index[lane if len(index) > 1 else 0]) * width % S.shared.stride + SHARED_BASE
        raise Fault("race", f"{OVERWRITTEN} shared address {offset:#x}{S.shared_name(offset)}", np.array([lane]))
    if S.shared.shadow is not None:
        mark_ready(S.shared.shadow, index, width)


# -- shared memory of a cluster


def own_offsets(S: State, idx: Array | None) -> Array:
    """Where the window of each lane's CTA begins in the batch's shared memory."""
    offsets = S.shared_offset
    return offsets if idx is None or offsets.size == 1 else offsets.take(idx)


def split(S: State, a: Array, idx: Array | None) -> tuple[Array, Array]:
    """A shared::cluster address as (address within a window, where that window begins), per lane."""
    rank = (a >> a.dtype.type(RANK_SHIFT)).astype(np.int64) & 0xFF
    if not rank.any():
        return a, own_offsets(S, idx)
    size = S.cluster_size
    if int(rank.max()) > size:
        lanes = np.flatnonzero(rank > size)
        raise Fault("bounds", f"address {int(a[lanes[0]]):#x} names rank {int(rank[lanes[0]]) - 1} of a cluster of {size}", lanes)
    cta = S.cta if idx is None else S.cta.take(idx)
    target = np.where(rank == 0, cta, cta - cta % size + rank - 1)
    if S.live < S.N0:
        gone = ~S.alive.reshape(S.ctas, -1).any(axis=1).take(target)
        if gone.any():
            lanes = np.flatnonzero(gone)
            name = S.cta_name(int(target[lanes[0]]))
            raise Fault("bounds", f"address {int(a[lanes[0] if a.size > 1 else 0]):#x} is in CTA {name}, which has exited", lanes)
    return a & a.dtype.type((1 << RANK_SHIFT) - 1), target * S.shared.stride


def gather_cluster(S: State, a: Array, access: Access, idx: Array | None) -> Array:
    local, offsets = split(S, a, idx)
    return read_shared(S, window_index(S, local, access, S.shared, offsets, "shared"), access, idx)


def scatter_cluster(S: State, a: Array, values: Array, access: Access, idx: Array | None) -> None:
    local, offsets = split(S, a, idx)
    write_shared(S, window_index(S, local, access, S.shared, offsets, "shared"), values, access, idx)


def _local_index(S: State, a: Array, access: Access, idx: Array | None) -> Array:
    slots = S.slot if idx is None else S.slot.take(idx)
    return window_index(S, a, access, S.local, slots * S.local.stride, "local")


def gather_local(S: State, a: Array, access: Access, idx: Array | None) -> Array:
    index = _local_index(S, a, access, idx)
    if S.local.shadow is not None and not all_ready(S.local.shadow, index, access.width):
        lanes, _ = not_ready(S.local.shadow, index, access.width)
        raise Fault("uninit", f"reads {access.width} bytes of local memory that nothing wrote", lanes)
    return S.local.views[access.width].take(index)


def scatter_local(S: State, a: Array, values: Array, access: Access, idx: Array | None) -> None:
    index = _local_index(S, a, access, idx)
    S.local.views[access.width][index] = values
    if S.local.shadow is not None:
        mark_ready(S.local.shadow, index, access.width)


# -- generic addresses


def by_window(S: State, a: Array, idx: Array | None) -> Iterator[tuple[str, Array | None, Array, Array | None]]:
    """(space, lanes or None for all, addresses in that space, thread positions)."""
    top = int(a.max())
    if top < SHARED_WINDOW:
        yield "global", None, a, idx
        return
    shared = "cluster" if S.cluster_size > 1 else "shared"
    spaces = np.where(a >= np.uint64(LOCAL_WINDOW), 2, np.where(a >= np.uint64(SHARED_WINDOW), 1, 0))
    for code, space, window in ((0, "global", 0), (1, shared, SHARED_WINDOW), (2, "local", LOCAL_WINDOW)):
        lanes = np.flatnonzero(spaces == code)
        if len(lanes) == len(a):
            yield space, None, a - np.uint64(window), idx
            return
        if len(lanes):
            yield space, lanes, a[lanes] - np.uint64(window), lanes if idx is None else idx[lanes]


def gather_generic(S: State, a: Array, access: Access, idx: Array | None) -> Array:
    out = np.empty(len(a), RAW[access.width])
    for space, lanes, addresses, where in by_window(S, a, idx):
        if lanes is None:
            return GATHER[space](S, addresses, access, idx)
        out[lanes] = GATHER[space](S, addresses, access, where)
    return out


def scatter_generic(S: State, a: Array, values: Array, access: Access, idx: Array | None) -> None:
    for space, lanes, addresses, where in by_window(S, a, idx):
        part = values if lanes is None or len(values) == 1 else values[lanes]
        SCATTER[space](S, addresses, part, access, where)


GATHER: dict[str, Callable[..., Array]] = {
    "global": gather_global, "const": gather_global, "param": gather_global, "shared": gather_shared,
    "cluster": gather_cluster, "local": gather_local, "generic": gather_generic,
}  # fmt: skip
SCATTER: dict[str, Callable[..., None]] = {
    "global": scatter_global, "shared": scatter_shared, "cluster": scatter_cluster, "local": scatter_local, "generic": scatter_generic,
}  # fmt: skip


def loader(space: str, base: Source, access: Access) -> Callable[[State, Array | None], Array]:
    """The load of one operand, through the remembered place of its register where that helps."""
    gather = GATHER[space]
    take = base.take
    if space in ("global", "const"):

        def load_global(S: State, idx: Array | None) -> Array:
            place = global_place(S, base, access)
            if place is not None:
                index = place.index(access, idx)
                if index is not None:
                    assert place.allocation is not None
                    return read_at(S, place.allocation, index, access, idx)
            return gather(S, take(S, idx), access, idx)

        return load_global
    if space == "shared":

        def load_shared(S: State, idx: Array | None) -> Array:
            place = window_place(S, base, access, S.shared)
            if place is not None:
                index = place.index(access, idx)
                if index is not None:
                    return read_shared(S, index, access, idx)
            return gather(S, take(S, idx), access, idx)

        return load_shared
    return lambda S, idx: gather(S, take(S, idx), access, idx)


def storer(space: str, base: Source, access: Access) -> Callable[[State, Array, Array | None], None]:
    """The store of one operand; see loader."""
    scatter = SCATTER[space]
    take = base.take
    if space == "global":

        def store_global(S: State, values: Array, idx: Array | None) -> None:
            place = global_place(S, base, access)
            if place is not None:
                index = place.index(access, idx)
                if index is not None:
                    assert place.allocation is not None
                    S.counters.global_written += access.width * len(index)
                    write_at(S, place.allocation, index, values, access, idx)
                    return
            scatter(S, take(S, idx), values, access, idx)

        return store_global
    if space == "shared":

        def store_shared(S: State, values: Array, idx: Array | None) -> None:
            place = window_place(S, base, access, S.shared)
            if place is not None:
                index = place.index(access, idx)
                if index is not None:
                    write_shared(S, index, values, access, idx)
                    return
            scatter(S, take(S, idx), values, access, idx)

        return store_shared
    return lambda S, values, idx: scatter(S, take(S, idx), values, access, idx)
