"""atom and red. Lanes that meet at one address take turns in lane order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu import access as access_
from oxidnn.emu import alu, floats, ldst
from oxidnn.emu.access import Access
from oxidnn.emu.decode import DTYPE, Core, Decoder
from oxidnn.emu.floats import F16, U16, U32
from oxidnn.emu.memory import Array, Fault, all_ready
from oxidnn.ptx import nodes

if TYPE_CHECKING:
    from oxidnn.emu.machine import State

Fn = Callable[[Array, Array, Array], Array]  # (old, operand, second operand) -> new

UFUNCS: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


def update(operation: str, type_: str, flushes: bool) -> tuple[Fn, Any]:
    """The function of an atomic, and the ufunc that does the same, if there is one."""
    dtype = DTYPE[type_]
    if operation == "exch":
        return lambda old, b, c: b, None
    if operation == "cas":
        return lambda old, b, c: np.where(old == b, c, old), None
    if operation == "inc":
        return lambda old, b, c: np.where(old >= b, np.array(0, dtype), old + np.array(1, dtype)), None
    if operation == "dec":
        return lambda old, b, c: np.where((old == 0) | (old > b), b, old - np.array(1, dtype)), None
    if type_ in ("f16", "f16x2", "bf16", "bf16x2"):
        base: Any = {"add": np.add, "min": floats.ptx_min, "max": floats.ptx_max}[operation]
        lifted = alu.narrow(base, type_)
        return lambda old, b, c: lifted(old, b), None
    if dtype.kind == "f":
        if operation == "add":
            if flushes:
                return lambda old, b, c: floats.flush(floats.flush(old) + floats.flush(b)), None
            return lambda old, b, c: old + b, np.add
        extreme = {"min": floats.ptx_min, "max": floats.ptx_max}[operation]
        return lambda old, b, c: extreme(old, b), None
    fn = UFUNCS[operation]
    return lambda old, b, c: fn(old, b), fn


def turns(index: Array) -> Iterator[Array]:
    """Lanes in rounds, so that no round has two lanes at one address; lane order within an address."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    if first.all():
        yield np.arange(len(index))
        return
    starts = np.flatnonzero(first)
    rank = np.arange(len(index)) - np.repeat(starts, np.diff(np.r_[starts, len(index)]))
    by_rank = np.argsort(rank, kind="stable")
    sizes = np.bincount(rank)
    at = 0
    for size in sizes:
        yield order[by_rank[at : at + size]]
        at += size


def read_modify_write(view: Array, index: Array, b: Array, c: Array, fn: Fn, ufunc: Any, wants_old: bool) -> Array:
    """Apply `fn` at the elements `index` of `view`, lane after lane; the old value that each lane saw."""
    n = len(index)
    b = np.broadcast_to(b, (n,))
    c = np.broadcast_to(c, (n,))
    if not wants_old and ufunc is not None:
        ufunc.at(view, index, b)
        return b
    if ufunc is not None and n > 64:
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        if len(starts) * 16 < n:  # few addresses, many lanes each: running results per address
            old = np.empty(n, view.dtype)
            for start, end in zip(starts.tolist(), [*starts[1:].tolist(), n], strict=True):
                lanes = order[start:end]
                chain = np.concatenate((view[ordered[start : start + 1]], b[lanes]))
                running = ufunc.accumulate(chain, dtype=view.dtype)
                old[lanes] = running[:-1]
                view[ordered[start]] = running[-1]
            return old
    old = np.empty(n, view.dtype)
    for lanes in turns(index):
        at = index[lanes]
        before = view.take(at)
        old[lanes] = before
        view[at] = fn(before, b[lanes], c[lanes])
    return old


def elements(S: State, space: str, a: Array, access: Access, idx: Array | None) -> Iterator[tuple[Any, Array, Array | None]]:
    """(memory views, element index per lane, lanes or None for all) of an address operand, checked."""
    width = access.width
    if space == "generic":
        for part, lanes, addresses, where in access_.by_window(S, a, idx):
            for views, index, inner in elements(S, part, addresses, access, where):
                yield views, index, inner if lanes is None else lanes if inner is None else lanes[inner]
        return
    if space in ("shared", "cluster"):
        if space == "cluster":
            a, offsets = access_.split(S, a, idx)
        else:
            offsets = access_.own_offsets(S, idx)
        index = access_.window_index(S, a, access, S.shared, offsets, "shared")
        if S.shared.shadow is not None and not all_ready(S.shared.shadow, index, width):
            access_.unwritten_shared(S, index, width)
        if S.race is not None:
            S.race.access(S, index, access, idx)
        yield S.shared.views, index, None
        return
    if space != "global":
        raise Fault("bounds", f"atomics on {space} memory")
    located = access_.locate(S, a, access)
    parts: list[tuple[Any, Array, Array | None]] = []
    if located is not None:
        parts.append((access.allocation, located, None))
    else:
        addresses = a + np.array([access.offset & ((1 << 64) - 1)], np.uint64)
        for allocation, lanes in access_.partition(S, addresses, width):
            parts.append((allocation, access_.element_index(addresses[lanes], allocation, width), lanes))
    for allocation, index, lanes in parts:
        if not allocation.writable:
            raise Fault("bounds", f"writes to read-only memory: {allocation}", lanes)
        if allocation.shadow is not None and S.uninit:
            access_.check_written(S, allocation, index, width)
        if S.global_race is not None:
            where = idx if lanes is None or len(a) == 1 else access_.subset(idx, lanes)
            S.global_race.access(S, allocation, index, access, where)
        yield allocation.views, index, lanes


def atomic(d: Decoder, ins: nodes.Instruction) -> Core:
    *mods, type_ = ins.modifiers
    space, operation, length, keeps = "generic", None, 1, False
    for mod in mods:
        head = mod.split("::")[0]
        if mod in ("global", "shared", "shared::cta", "shared::cluster"):
            space = "cluster" if mod == "shared::cluster" else head
        elif mod in ("v2", "v4", "v8"):
            length = int(mod[1])
        elif mod == "noftz":
            keeps = True
        elif mod in ldst.IGNORED or head in ("L1", "L2"):
            continue
        elif mod in (*UFUNCS, "exch", "cas", "inc", "dec") and operation is None:
            operation = mod
        else:
            d.refuse(f"unknown modifier .{mod}")
    if operation is None or type_ not in DTYPE:
        d.refuse("no operation")
    assert operation is not None
    operands = list(ins.operands)
    target = operands.pop(0) if ins.opcode == "atom" else None
    base, offset = d.address(operands.pop(0), space)
    values = [[d.src(x, type_) for x in d.items(operands.pop(0))]]
    if operation == "cas":
        values.append([d.src(x, type_) for x in d.items(operands.pop(0))])
    if any(len(v) != length for v in values):
        d.refuse(f"{len(values[0])} values for {length} elements")
    for policy in operands:
        d.src(policy, "b64")
    targets = [d.dst(x, type_) for x in d.items(target)] if target is not None else []
    dtype = DTYPE[type_]
    if type_ in ("f16", "bf16"):
        dtype = F16 if type_ == "f16" else U16
    elif type_ in ("f16x2", "bf16x2"):
        dtype = U32
    width = dtype.itemsize
    order = ldst.ordering(("relaxed", *mods))
    accesses = [Access(offset + i * width, width, "atomic", order) for i in range(length)]
    wants_old = any(slot >= 0 for slot, _ in targets)
    d.op.info["access"] = accesses[0]
    plans = {flushes: update(operation, type_, flushes) for flushes in (False, True)}
    flush_global = type_ == "f32" and not keeps  # f32 addition in global memory flushes, in shared memory it does not

    def run(S: State, idx: Array | None) -> None:
        n = S.lanes(idx)
        a = base.take(S, idx)
        if a.size != n:
            a = np.broadcast_to(a, (n,)).copy()
        S.counters.atomics += n
        if length > 1 and (a + np.uint64(offset) & np.uint64(width * length - 1)).any():
            access_.misaligned(a + np.uint64(offset), width * length, S)
        for i, access in enumerate(accesses):
            b = values[0][i].take(S, idx)
            c = values[-1][i].take(S, idx)
            old = np.empty(n, dtype)
            for views, index, lanes in elements(S, space, a, access, idx):
                is_global = views is not S.shared.views
                fn, ufunc = plans[flush_global and is_global]
                view = views[width].view(dtype)
                if lanes is None:
                    old = read_modify_write(view, index, b, c, fn, ufunc, wants_old)
                else:
                    part = [x if x.size == 1 else x[lanes] for x in (b, c)]
                    old[lanes] = read_modify_write(view, index, part[0], part[1], fn, ufunc, wants_old)
            if wants_old and targets[i][0] >= 0:
                S.set(targets[i][0], idx, old.view(targets[i][1]))

    return run


BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {"atom": atomic, "red": atomic}
