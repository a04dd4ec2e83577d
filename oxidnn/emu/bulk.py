"""The tensor memory accelerator: bulk and tensor copies between global and shared memory, and st.async / red.async.

A copy is done when it is issued, thread by thread; its bytes in shared memory count as PENDING until the phase of the
mbarrier it signals is complete. Copies out of shared memory belong to the bulk groups of their thread.

A box in shared memory is rows of 16-byte chunks: dense, or, swizzled, one row per span (gaps stay untouched) with the
address bits 4-6 ^= bits 7-9 (128-byte span), 4-5 ^= 7-8 (64), 4 ^= 7 (32).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from oxidnn.emu import atomics, floats, ldst
from oxidnn.emu.access import RANK_SHIFT, Access, mark_ready, split, unwritten_shared, window_index
from oxidnn.emu.decode import DTYPE, RAWINT, Core, Decoder, Source
from oxidnn.emu.floats import F16, U16
from oxidnn.emu.mbarrier import place_of
from oxidnn.emu.memory import MARKS, PENDING, RAW, READY, SHARED_BASE, SHARED_WINDOW, Allocation, Array, Fault, all_ready
from oxidnn.emu.tensor_map import TensorMap
from oxidnn.ptx import nodes

if TYPE_CHECKING:
    from oxidnn.emu.machine import State

_decode_map = lru_cache(maxsize=256)(TensorMap.decode)
_MASK = {0: 0, 32: 1, 64: 3, 128: 7}


@lru_cache(maxsize=1024)
def box_units(start: int, rows: int, inner: int, span: int) -> Array:
    """16-byte units of a box's image at unit `start` (absolute): (rows, inner / 16)."""
    pitch = span or inner
    units = start + np.arange(rows)[:, None] * (pitch >> 4) + np.arange(inner >> 4)[None, :]
    units ^= (units >> 3) & _MASK[span]
    units.flags.writeable = False
    return units


class Groups:
    """The bulk groups of every thread: copies out of shared memory, by slot."""

    def __init__(self, S: State) -> None:
        self.committed = np.zeros(S.N0, np.int64)
        self.read = np.zeros(S.N0, np.int64)  # groups whose shared memory is known to be read
        self.last = np.zeros(S.N0, np.int64)  # the group of the last copy, plus one

    def issue(self, slot: int) -> None:
        self.last[slot] = self.committed[slot] + 1

    def commit(self, S: State, idx: Any) -> None:
        slots = S.slot if idx is None else S.slot.take(idx)
        self.committed[slots] += 1
        if S.race is not None:
            S.race.commit_bulk(idx)

    def wait(self, S: State, idx: Any, allowed: int, is_read: bool) -> None:
        slots = S.slot if idx is None else S.slot.take(idx)
        self.read[slots] = np.maximum(self.read[slots], self.committed[slots] - allowed)
        if S.race is not None:
            S.race.wait_bulk(idx, allowed, is_read)

    def exited(self, S: State, gone: Array) -> None:
        left = self.last[gone] > self.read[gone]
        if left.any():
            raise Fault("async", "exits while its bulk copies may still read shared memory (cp.async.bulk.wait_group.read 0 comes first)",
                        np.array([0]), S.positions(gone[left][:1]))  # fmt: skip


class Issue:
    """One thread's copy: where it runs, for the memory and the checkers."""

    __slots__ = ("S", "position", "slot", "cta", "lane")

    def __init__(self, S: State, position: int, lane: int) -> None:
        self.S, self.position, self.lane = S, position, lane
        self.slot = int(S.slot[position])
        self.cta = int(S.cta[position])

    def fault(self, checker: str, message: str) -> Fault:
        return Fault(checker, message, np.array([0]), np.array([self.position]))

    def shared(self, address: int, align: int, what: str) -> tuple[int, int]:
        """(CTA of the batch, offset in its window) of a shared, shared::cluster or generic address."""
        if address >= SHARED_WINDOW:
            address -= SHARED_WINDOW
        rank = address >> RANK_SHIFT & 0xFF
        offset = (address & (1 << RANK_SHIFT) - 1) - SHARED_BASE
        if offset & (align - 1):
            raise self.fault("align", f"{what} {address:#x} is not a multiple of {align} bytes")
        cta = self.cta
        if rank:
            if rank > self.S.cluster_size:
                raise self.fault("bounds", f"{what} {address:#x} names rank {rank - 1} of a cluster of {self.S.cluster_size}")
            cta = cta - cta % self.S.cluster_size + rank - 1
        return cta, offset

    def window(self, cta: int, units: Array, what: str) -> Array:
        """Units of the window as units of the batch's shared memory, checked."""
        low, high = int(units.min()), int(units.max())
        size = self.S.shared.size
        if low < 0 or high * 16 + 16 > size:
            raise self.fault("bounds", f"{what} (shared offsets {low * 16 + SHARED_BASE:#x} to {high * 16 + 16 + SHARED_BASE:#x}) "
                                       f"leaves the {size} bytes of shared memory")  # fmt: skip
        if not self.S.alive.reshape(self.S.ctas, -1)[cta].any():
            raise self.fault("bounds", f"{what} is in CTA {self.S.cta_name(cta)}, which has exited")
        return units + cta * (self.S.shared.stride >> 4)

    def barrier(self, address: int, cta: int | None = None) -> int:
        owner, offset = self.shared(address, 8, "mbarrier")
        owner = owner if cta is None else cta
        if not 0 <= offset <= self.S.shared.size - 8:
            raise self.fault("bounds", f"the mbarrier at {address:#x} is outside of shared memory")
        index = np.array([owner * (self.S.shared.stride >> 3) + (offset >> 3)])
        try:
            flat = int(self.S.mbarriers.find(index)[0])
        except Fault as fault:
            raise self.fault(fault.checker, fault.message) from None
        if self.S.race is not None:
            self.S.race.signalled(self, index)
        return flat

    def land(self, cta: int, units: Array, data: Array, flat: int) -> None:
        """Write 16-byte units of shared memory on behalf of the barrier `flat`, and count them on it."""
        S = self.S
        index = self.window(cta, units, "the destination").reshape(-1)
        if S.race is not None:
            S.race.copy(self, index, "write", flat)
        S.shared.views[16][index] = data
        if S.shared.shadow is not None:
            S.shared.shadow[16][index] = MARKS[PENDING][16]
            S.mbarriers.land(S, flat, index)
        S.counters.tma_loaded += 16 * len(index)

    def fetch(self, cta: int, units: Array) -> Array:
        """Read 16-byte units of shared memory."""
        S = self.S
        index = self.window(cta, units, "the source").reshape(-1)
        if S.shared.shadow is not None and not all_ready(S.shared.shadow, index, 16):
            try:
                unwritten_shared(S, index, 16)
            except Fault as fault:
                raise self.fault(fault.checker, fault.message) from None
        if S.race is not None:
            S.race.copy(self, index, "read", None)
        return S.shared.views[16].take(index)

    def allocation(self, address: int, num_bytes: int, writes: bool) -> Allocation:
        found = self.S.memory.find(address, num_bytes)
        if found is None or address < found.start:
            inside = self.S.memory.find(address, 1) is not None
            at = address + num_bytes - 1 if inside else address
            raise self.fault("bounds", f"{num_bytes} bytes at {address:#x} are in no allocation: {self.S.memory.describe(at)}")
        if writes and not found.writable:
            raise self.fault("bounds", f"writes to read-only memory: {found}")
        return found

    def region(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: str, by_thread: bool = False
    ) -> tuple[Allocation, Array, Array | None]:
        """(allocation, strided bytes, strided shadow or None) of a box of global memory; the last axis is of single bytes. by_thread: the
        thread itself accesses it, not its copy."""
        S = self.S
        extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        found = self.allocation(address, extent, kind != "read")
        start = address - found.origin
        shadow = None
        if found.shadow is not None:
            shadow = as_strided(found.shadow[1][start:], shape, strides)
            if kind != "write" and S.uninit and bool((shadow != READY).any()):
                first = np.unravel_index(int(np.argmax(shadow != READY)), shape)
                at = address + sum(int(i) * s for i, s in zip(first, strides, strict=True))
                raise self.fault("uninit", f"the copy reads bytes at {at:#x} that nothing wrote: {S.memory.describe(at)}")
        if S.global_race is not None:
            starts = np.full(1, start, np.int64)
            for n, s in zip(shape[:-1], strides[:-1], strict=True):
                starts = (starts[:, None] + np.arange(n) * s).reshape(-1)
            S.global_race.copy(self, found, starts, shape[-1], kind, by_thread)
        return found, as_strided(found.views[1][start:], shape, strides), shadow


# -- decoding


class Coordinates:
    """A tensor operand [map, {c0, c1, ...}]."""

    def __init__(self, d: Decoder, operand: nodes.Operand, rank: int) -> None:
        if not isinstance(operand, nodes.Addr) or not isinstance(operand.base, nodes.Reg) or len(operand.coordinates) != rank:
            d.refuse(f"{operand} is no tensor operand of {rank} coordinates")
        assert isinstance(operand, nodes.Addr) and isinstance(operand.base, nodes.Reg)
        self.base = d.reg_source(operand.base, np.dtype(np.uint64))
        self.values = [d.src(c, "s32") for c in operand.coordinates]
        self.rank = rank

    def take(self, S: State, idx: Any) -> tuple[Array, list[Array]]:
        return self.base.take(S, idx), [v.take(S, idx) for v in self.values]


def tensor_map_at(issue: Issue, address: int, rank: int, im2col: bool) -> TensorMap:
    if address & 63:
        raise issue.fault("align", f"the tensor map at {address:#x} is not 64-byte aligned")
    try:
        raw = issue.S.memory.view(address, 128).tobytes()
    except ValueError as error:
        raise issue.fault("bounds", f"no tensor map: {error}") from None
    try:
        found = _decode_map(raw)
    except Fault as fault:
        raise issue.fault(fault.checker, fault.message) from None
    if len(found.dims) != rank:
        raise issue.fault("bounds", f"the tensor map has rank {len(found.dims)}, the instruction {rank}")
    if (found.corners is not None) != im2col:
        raise issue.fault("bounds", f"the tensor map is {'im2col' if found.corners else 'tiled'}, the instruction is not")
    return found


def _at(values: Array, lane: int) -> int:
    return int(values[lane if values.size > 1 else 0])


def each(S: State, idx: Any) -> list[Issue]:
    positions = range(S.N) if idx is None else idx.tolist()
    return [Issue(S, position, lane) for lane, position in enumerate(positions)]


# -- boxes


def image_shape(m: TensorMap) -> tuple[int, int]:
    """(rows, bytes per row) of the box in shared memory."""
    if m.corners is not None:
        return m.box[1], m.box[0] * m.size
    rows = 1
    for extent, step in zip(m.box[1:], m.element_strides[1:], strict=True):
        rows *= -(-extent // step)
    return rows, m.box[0] * m.size


def fill(m: TensorMap, rows: int, inner: int) -> Array:
    image = np.zeros((rows, inner), np.uint8)
    if m.fills_nan:
        image[:] = np.tile(np.frombuffer(b"\xf7\x7f", np.uint8), inner // 2)
    return image


def tile_region(m: TensorMap, coordinates: list[int], whole_chunks: bool) -> tuple[list[slice], int, tuple[int, ...], tuple[int, ...]]:
    """The part of a tiled box inside the tensor: (slices of the image, outermost first, the last in bytes; address; shape; byte
    strides). An empty part has a 0 in its shape. Stores clip the innermost dimension to whole 16-byte chunks."""
    slices, shape, strides, address = [], [], [], m.address
    for axis in range(len(m.dims) - 1, -1, -1):
        extent, c = m.dims[axis], coordinates[axis]
        step = 1 if axis == 0 else m.element_strides[axis]
        count = -(-m.box[axis] // step)
        low = max(0, -(c // step)) if c < 0 else 0
        high = min(count, -(-(extent - c) // step)) if extent > c else 0
        high = max(high, low)
        if axis:
            slices.append(slice(low, high))
            shape.append(high - low)
            strides.append(m.strides[axis - 1] * step)
            address += (c + low * step) * m.strides[axis - 1]
        else:
            end = high * m.size
            if whole_chunks:
                end = min(-(-end // 16) * 16, count * m.size)
            slices.append(slice(low * m.size, end))
            shape.append(end - low * m.size)
            strides.append(1)
            address += (c + low) * m.size
    return slices, address, tuple(shape), tuple(strides)


def pixels(issue: Issue, m: TensorMap, coordinates: list[int], offsets: list[int]) -> tuple[Array, Array]:
    """(byte offsets of every pixel's channel 0 from the tensor's address, whether it lies inside) of an im2col box."""
    assert m.corners is not None
    lower, upper = m.corners
    spatial = len(lower)
    index, total = 0, 1
    counts = []
    for x in range(spatial):
        extent, step, base = m.dims[1 + x], m.element_strides[1 + x], coordinates[1 + x]
        last = extent - 1 + upper[x]
        if not lower[x] <= base <= last:
            raise issue.fault("bounds", f"im2col base coordinate {'WHD'[x]} is {base}, outside of the bounding box {lower[x]} to {last}")
        if (base - lower[x]) % step:
            raise issue.fault("bounds", f"im2col base coordinate {'WHD'[x]} is {base}, no multiple of the stride {step} from {lower[x]}")
        count = (last - lower[x]) // step + 1
        index += (base - lower[x]) // step * total
        total *= count
        counts.append(count)
    linear = index + np.arange(m.box[1])
    image = coordinates[-1] + linear // total
    inside = (image >= 0) & (image < m.dims[-1])
    place = image * m.strides[-1]
    rest = linear % total
    for x in range(spatial):
        at = lower[x] + rest % counts[x] * m.element_strides[1 + x] + offsets[x]
        rest = rest // counts[x]
        inside &= (at >= 0) & (at < m.dims[1 + x])
        place = place + at * m.strides[x]
    return place, inside


def load_image(issue: Issue, m: TensorMap, coordinates: list[int], offsets: list[int] | None) -> Array:
    """The box as (rows, bytes): what lies outside of the tensor is filled."""
    check_start(issue, m, coordinates)
    rows, inner = image_shape(m)
    image = fill(m, rows, inner)
    if m.corners is None:
        slices, address, shape, strides = tile_region(m, coordinates, False)
        if 0 not in shape:
            counts = [-(-e // s) for e, s in zip(m.box[:0:-1], m.element_strides[:0:-1], strict=True)]
            _, source, _ = issue.region(address, shape, strides, "read")
            part = source
            if m.dtype == "tf32":
                part = round_tf32(np.ascontiguousarray(source))
            image.reshape(*counts, inner)[tuple(slices)] = part
        return image
    place, inside = pixels(issue, m, coordinates, offsets or [0] * (len(m.dims) - 2))
    c = coordinates[0]
    low, high = max(0, -c), min(m.box[0], m.dims[0] - c)
    on = np.flatnonzero(inside)
    if high > low and len(on):
        first, count = (c + low) * m.size, (high - low) * m.size
        least, most = int(place[on].min()), int(place[on].max())
        found = issue.allocation(m.address + least + first, most - least + count, False)
        start = m.address + first - found.origin + place[on]
        bytes_ = start[:, None] + np.arange(count)
        S = issue.S
        if found.shadow is not None and S.uninit and bool((found.shadow[1].take(bytes_) != READY).any()):
            raise issue.fault("uninit", f"the copy reads bytes that nothing wrote: {found}")
        if S.global_race is not None:
            S.global_race.copy(issue, found, start, count, "read", False)
        part = found.views[1].take(bytes_)
        image[on, low * m.size : high * m.size] = round_tf32(part) if m.dtype == "tf32" else part
    return image


def round_tf32(raw: Array) -> Array:
    """f32 bytes to the nearest tf32, ties to even; NaN becomes 7FFFE000."""
    x = raw.reshape(-1).view(np.uint32) if raw.flags.c_contiguous else np.ascontiguousarray(raw).reshape(-1).view(np.uint32)
    nan = (x & np.uint32(0x7FFFFFFF)) > 0x7F800000
    finite = (x & np.uint32(0x7F800000)) != 0x7F800000
    rounded = np.where(finite, x + np.uint32(0xFFF) + ((x >> np.uint32(13)) & np.uint32(1)), x) & np.uint32(0xFFFFE000)
    return np.where(nan, np.uint32(0x7FFFE000), rounded).astype(np.uint32).view(np.uint8).reshape(raw.shape)


REDUCED = {**{t: t for t in ("u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16")}, "f32_ftz": "f32"}
LANE = {"f16": F16, "bf16": U16}


def combine(issue: Issue, operation: str, type_: str, flushes: bool, old: Array, new: Array) -> Array:
    """`old` (operation) `new` on raw bytes of elements of `type_`."""
    if operation in ("min", "max") and type_ in ("f32", "f64"):
        raise issue.fault("bounds", f"a reduction by {operation} of .{type_} is not supported by the hardware")
    if operation == "add" and type_ == "s64":
        type_ = "u64"
    dtype = LANE.get(type_, DTYPE[type_])
    fn, _ = atomics.update(operation, type_, flushes)
    a, b = (np.ascontiguousarray(x).reshape(-1).view(dtype) for x in (old, new))
    new = np.ascontiguousarray(fn(a, b, b)).astype(dtype, copy=False)
    return (floats.canonical(new) if type_ == "f32" else new).view(np.uint8).reshape(old.shape)


def check_start(issue: Issue, m: TensorMap, coordinates: list[int]) -> None:
    """An H100 faults on a box that begins between the 16-byte chunks of a row."""
    if coordinates[0] * m.size % 16:
        raise issue.fault("align", f"the box begins {coordinates[0] * m.size} bytes into the rows of the tensor, not a multiple of 16")


def store_image(issue: Issue, m: TensorMap, coordinates: list[int], image: Array, operation: str | None) -> None:
    """Write the part of a box that lies inside the tensor."""
    if any(c < 0 for c in coordinates):
        raise issue.fault("bounds", f"a tensor store at the negative coordinates {coordinates}")
    check_start(issue, m, coordinates)
    S = issue.S
    if m.corners is None:
        slices, address, shape, strides = tile_region(m, coordinates, True)
        if 0 in shape:
            return
        counts = [-(-e // s) for e, s in zip(m.box[:0:-1], m.element_strides[:0:-1], strict=True)]
        part = image.reshape(*counts, image.shape[1])[tuple(slices)]
        found, target, shadow = issue.region(address, shape, strides, "atomic" if operation else "write")
        if operation:
            part = combine(issue, operation, REDUCED[m.dtype], m.dtype == "f32_ftz", target, part)
        target[...] = part
        if shadow is not None:
            shadow[...] = READY
        S.counters.tma_stored += part.size
        return
    if any(v for corner in m.corners for v in corner):
        raise issue.fault("bounds", "im2col_no_offs stores need a map with zero corners")
    place, inside = pixels(issue, m, coordinates, [0] * (len(m.dims) - 2))
    c = coordinates[0]
    high = min(m.box[0], m.dims[0] - c)
    if high <= 0:
        return
    count = min(-(-high * m.size // 16) * 16, m.box[0] * m.size)
    for row in np.flatnonzero(inside).tolist():
        part = image[row, :count]
        _, target, shadow = issue.region(m.address + int(place[row]) + c * m.size, (count,), (1,), "atomic" if operation else "write")
        target[...] = combine(issue, operation, REDUCED[m.dtype], m.dtype == "f32_ftz", target, part) if operation else part
        if shadow is not None:
            shadow[...] = READY
        S.counters.tma_stored += count


# -- instructions


def bulk(d: Decoder, ins: nodes.Instruction) -> Core:
    """cp.async.bulk..., cp.reduce.async.bulk...: ins.modifiers hold ("async", "bulk", ...) or ("reduce", "async", "bulk", ...)."""
    mods = list(ins.modifiers)
    reduces = mods[0] == "reduce"
    rest = mods[3:] if reduces else mods[2:]
    if rest == ["commit_group"]:
        return lambda S, idx: S.bulk_groups.commit(S, idx)
    if rest[:1] == ["wait_group"]:
        (count,) = ins.operands
        if not isinstance(count, nodes.Imm):
            d.refuse("the group count must be an immediate")
        assert isinstance(count, nodes.Imm)
        allowed = int(count.value)
        is_read = "read" in rest
        return lambda S, idx: S.bulk_groups.wait(S, idx, allowed, is_read)
    operands = list(ins.operands)
    if any("cache_hint" in m for m in rest):
        ldst.policy(d, (operands.pop(),))
    if rest[:1] == ["prefetch"]:
        return prefetch(d, operands, rest)
    if "tensor" in rest:
        rank = int(next(m for m in rest if re.fullmatch(r"[1-5]d", m))[0])
        if "bulk_group" in rest:
            operation = next(m for m in rest if m in atomics.UFUNCS or m in ("inc", "dec")) if reduces else None
            return tensor_store(d, operands, rank, "im2col_no_offs" in rest, operation)
        return tensor_load(d, operands, rank, "im2col" in rest, "multicast::cluster" in rest)
    return bulk_copy(d, operands, rest, reduces)


def prefetch(d: Decoder, operands: list[nodes.Operand], rest: list[str]) -> Core:
    if "tensor" in rest:
        rank = int(next(m for m in rest if re.fullmatch(r"[1-5]d", m))[0])
        tensor = Coordinates(d, operands[0], rank)
        offsets = [d.src(x, "b16") for x in d.items(operands[1])] if len(operands) > 1 else []
        im2col = bool(offsets)

        def check(S: State, idx: Any) -> None:
            maps, coordinates = tensor.take(S, idx)
            for issue in each(S, idx):
                m = tensor_map_at(issue, _at(maps, issue.lane), rank, im2col)
                if im2col:
                    pixels(issue, m, [_at(c, issue.lane) for c in coordinates], [0] * (rank - 2))

        return check
    d.address(operands[0], "global")
    d.src(operands[1], "u32")
    return ldst.no_effect(d, d.op.ins)


def shared_operand(d: Decoder, operand: nodes.Operand) -> tuple[Source, int]:
    return d.address(operand, "shared")


def multicast_targets(issue: Issue, mask: int) -> list[int]:
    size = issue.S.cluster_size
    if mask == 0 or mask >> size:
        raise issue.fault("bounds", f"multicast mask {mask:#x} names CTAs outside of the cluster of {size}")
    first = issue.cta - issue.cta % size
    return [first + r for r in range(size) if mask >> r & 1]


def tensor_load(d: Decoder, operands: list[nodes.Operand], rank: int, im2col: bool, multicast: bool) -> Core:
    to, to_offset = shared_operand(d, operands[0])
    tensor = Coordinates(d, operands[1], rank)
    bar, bar_offset = shared_operand(d, operands[2])
    offsets = [d.src(x, "b16") for x in d.items(operands[3])] if im2col else []
    mask = d.src(operands[-1], "b16") if multicast else None

    def run(S: State, idx: Any) -> None:
        maps, coordinates = tensor.take(S, idx)
        targets, bars = to.take(S, idx), bar.take(S, idx)
        extra = [o.take(S, idx) for o in offsets]
        masks = mask.take(S, idx) if mask is not None else None
        for issue in each(S, idx):
            lane = issue.lane
            m = tensor_map_at(issue, _at(maps, lane), rank, im2col)
            image = load_image(issue, m, [_at(c, lane) for c in coordinates], [_at(o, lane) for o in extra] if im2col else None)
            address = _at(targets, lane) + to_offset
            cta, offset = issue.shared(address, 128, "the destination")
            rows, inner = image.shape
            units = box_units(offset >> 4, rows, inner, m.swizzle)
            data = image.reshape(-1).view(RAW[16])
            ctas = [cta] if masks is None else multicast_targets(issue, _at(masks, lane))
            barrier = _at(bars, lane) + bar_offset
            landed = [(issue.barrier(barrier, None if masks is None else target), target) for target in ctas]
            for flat, target in landed:
                issue.land(target, units, data, flat)
            S.mbarriers.bytes_came(S, np.array([flat for flat, _ in landed]), np.full(len(landed), image.size))

    return run


def tensor_store(d: Decoder, operands: list[nodes.Operand], rank: int, im2col: bool, operation: str | None) -> Core:
    tensor = Coordinates(d, operands[0], rank)
    source, source_offset = shared_operand(d, operands[1])

    def run(S: State, idx: Any) -> None:
        maps, coordinates = tensor.take(S, idx)
        sources = source.take(S, idx)
        for issue in each(S, idx):
            lane = issue.lane
            m = tensor_map_at(issue, _at(maps, lane), rank, im2col)
            cta, offset = issue.shared(_at(sources, lane) + source_offset, 128, "the source")
            rows, inner = image_shape(m)
            units = box_units(offset >> 4, rows, inner, m.swizzle)
            image = issue.fetch(cta, units).view(np.uint8).reshape(rows, inner)
            store_image(issue, m, [_at(c, lane) for c in coordinates], image, operation)
            S.bulk_groups.issue(issue.slot)

    return run


def bulk_copy(d: Decoder, operands: list[nodes.Operand], rest: list[str], reduces: bool) -> Core:
    """The copies of contiguous bytes, in four directions."""
    spaces = [m for m in rest if m in ("global", "shared::cta", "shared::cluster")]
    out, into = spaces[0], spaces[1]
    multicast = "multicast::cluster" in rest
    type_ = rest[-1]
    operation = next((m for m in rest if m in (*atomics.UFUNCS, "inc", "dec")), None) if reduces else None
    flushes = False
    to, to_offset = d.address(operands[0], "global" if out == "global" else "shared")
    source, source_offset = d.address(operands[1], "global" if into == "global" else "shared")
    size = d.src(operands[2], "u32")
    signals = out != "global"
    bar, bar_offset = shared_operand(d, operands[3]) if signals else (None, 0)
    mask = d.src(operands[-1], "b16") if multicast else None

    def run(S: State, idx: Any) -> None:
        targets, sources, sizes = to.take(S, idx), source.take(S, idx), size.take(S, idx)
        bars = bar.take(S, idx) if bar is not None else None
        masks = mask.take(S, idx) if mask is not None else None
        for issue in each(S, idx):
            lane = issue.lane
            count = _at(sizes, lane)
            where, start = _at(targets, lane) + to_offset, _at(sources, lane) + source_offset
            if count % 16:
                raise issue.fault("align", f"the size {count} is not a multiple of 16 bytes")
            for name, address in (("the destination", where), ("the source", start)):
                if address % 16:
                    raise issue.fault("align", f"{name} {address:#x} is not a multiple of 16 bytes")
            data = np.zeros(0, RAW[16])
            if count and into == "global":
                _, raw, _ = issue.region(start, (count,), (1,), "read")
                data = np.ascontiguousarray(raw).view(RAW[16])
            elif count:
                cta, offset = issue.shared(start, 16, "the source")
                data = issue.fetch(cta, (offset >> 4) + np.arange(count >> 4))
            if not signals:
                if count:
                    _, target, shadow = issue.region(where, (count,), (1,), "atomic" if operation else "write")
                    raw = data.view(np.uint8)
                    target[...] = combine(issue, operation, type_, flushes, target, raw) if operation else raw
                    if shadow is not None:
                        shadow[...] = READY
                    S.counters.tma_stored += count
                S.bulk_groups.issue(issue.slot)
                continue
            assert bars is not None
            cta, offset = issue.shared(where, 16, "the destination")
            ctas = [cta] if masks is None else multicast_targets(issue, _at(masks, lane))
            units = (offset >> 4) + np.arange(count >> 4)
            barrier = _at(bars, lane) + bar_offset
            landed = [(issue.barrier(barrier, None if masks is None else owner), owner) for owner in ctas]
            for flat, owner in landed:
                if not count:
                    continue
                if operation:
                    old = S.shared.views[16].take(issue.window(owner, units, "the destination")).view(np.uint8)
                    issue.land(owner, units, combine(issue, operation, type_, False, old, data.view(np.uint8)).view(RAW[16]), flat)
                else:
                    issue.land(owner, units, data, flat)
            if S.race is not None and into != "global":
                for flat, _ in landed:
                    S.race.lent(issue, flat)
            S.mbarriers.bytes_came(S, np.array([flat for flat, _ in landed]), np.full(len(landed), count))

    return run


def tensormap(d: Decoder, ins: nodes.Instruction) -> Core:
    """tensormap.replace patches a map in memory; tensormap.cp_fenceproxy publishes one from shared to global memory."""
    mods = ins.modifiers
    space = "shared" if any(m.startswith("shared") for m in mods) else "global" if "global" in mods else "generic"
    if mods[0] == "cp_fenceproxy":
        d.op.kind, d.op.info["all"] = "warp", True
        to, to_offset = d.address(ins.operands[0], "global")
        source, source_offset = d.address(ins.operands[1], "shared")

        def publish(S: State, idx: Any) -> None:
            targets, sources = to.take(S, idx), source.take(S, idx)
            for issue in each(S, idx)[::32]:  # one copy for a warp
                cta, offset = issue.shared(_at(sources, issue.lane) + source_offset, 64, "the source")
                index = issue.window(cta, (offset >> 4) + np.arange(8), "the source")
                if S.race is not None:
                    S.race.access(S, index, _CHUNK_READ, np.full(8, issue.position))
                _, target, shadow = issue.region(_at(targets, issue.lane) + to_offset, (128,), (1,), "write", True)
                target[...] = S.shared.views[16].take(index).view(np.uint8)
                if shadow is not None:
                    shadow[...] = READY

        return publish
    if mods[0] != "replace":
        d.refuse("unknown tensormap instruction")
    field = mods[2]
    base, base_offset = d.address(ins.operands[0], space)
    place = ins.operands[1] if len(ins.operands) == 3 else nodes.Imm(0)
    assert isinstance(place, nodes.Imm)
    value = d.src(ins.operands[-1], mods[-1])

    def replace(S: State, idx: Any) -> None:
        bases, values = base.take(S, idx), value.take(S, idx)
        for issue in each(S, idx):
            address, new = _at(bases, issue.lane) + base_offset, _at(values, issue.lane)
            if space == "shared" or address >= SHARED_WINDOW:
                cta, offset = issue.shared(address, 64, "the tensor map")
                index = issue.window(cta, (offset >> 4) + np.arange(8), "the tensor map")
                if S.race is not None:
                    S.race.access(S, index, _CHUNK_WRITE, np.full(8, issue.position))
                raw = S.shared.views[1][int(index[0]) * 16 : int(index[0]) * 16 + 128]
            else:
                _, raw, _ = issue.region(address, (128,), (1,), "atomic", True)
            TensorMap.replace(raw, field, int(place.value), new)

    return replace


_CHUNK_READ, _CHUNK_WRITE = Access(0, 16, "read"), Access(0, 16, "write")
BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {"tensormap": tensormap}


def async_store(d: Decoder, ins: nodes.Instruction) -> Core:
    """st.async and red.async: elements into another CTA's shared memory, counted on an mbarrier there."""
    *mods, type_ = ins.modifiers
    length = next((int(m[1]) for m in mods if m in ("v2", "v4")), 1)
    operation = next((m for m in mods if m in (*atomics.UFUNCS, "inc", "dec")), None) if ins.opcode == "red" else None
    base, offset = d.address(ins.operands[0], "shared")
    values = [d.src(x, type_) for x in d.items(ins.operands[1])]
    if len(values) != length:
        d.refuse(f"{len(values)} values for {length} elements")
    place = place_of(d, ins.operands[2], ["shared::cluster"])
    each_bytes = DTYPE[type_].itemsize
    width = each_bytes * length
    access = Access(offset, width, "write")
    d.op.info["access"] = access
    plan = atomics.update(operation, type_, False) if operation else None

    def run(S: State, idx: Any) -> None:
        n = S.lanes(idx)
        local, offsets = split(S, base.take(S, idx), idx)
        index = np.broadcast_to(window_index(S, local, access, S.shared, offsets, "shared"), (n,))
        signalled = place(S, idx)
        if S.race is not None:
            S.race.will_signal(signalled, idx)
        flat = S.mbarriers.find(signalled)
        if S.race is not None:
            S.race.stored(index, width, flat, idx)
        if plan is not None:
            b = values[0].take(S, idx)
            atomics.read_modify_write(S.shared.views[width].view(DTYPE[type_]), index, b, b, plan[0], plan[1], False)
        else:
            raw = np.empty((n, length), RAWINT[each_bytes])
            for i, value in enumerate(values):
                raw[:, i] = value.take(S, idx).view(raw.dtype)
            S.shared.views[width][index] = raw.view(RAW[width]).reshape(-1)
        if S.shared.shadow is not None:
            mark_ready(S.shared.shadow, index, width)
        S.counters.shared_written += width * n
        S.mbarriers.bytes_came(S, flat, np.full(n, width))

    return run

