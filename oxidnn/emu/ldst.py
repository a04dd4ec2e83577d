"""ld and st in every space, vectors included; hints and fences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu.access import GATHER, Access, loader, misaligned, storer
from oxidnn.emu.decode import DTYPE, Core, Decoder, Parameter, Source
from oxidnn.emu.memory import RAW, Array
from oxidnn.ptx import nodes

if TYPE_CHECKING:
    from oxidnn.emu.machine import State

SPACES = {"global", "shared", "local", "param", "const"}
# Orderings and cache hints: execution is sequentially consistent and there are no caches.
IGNORED = {
    "weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio", "sys", "gpu", "cta", "cluster", "ca", "cg",
    "cs", "lu", "cv", "wb", "wt", "nc",
}  # fmt: skip
SYNCHRONISING = {"relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"}


def ordering(modifiers: Iterable[str]) -> frozenset[str] | None:
    """What a strong access orders ("acquire", "release"), and "gpu" if that goes beyond its cluster; None for a weak one."""
    given = set(modifiers)
    strong = SYNCHRONISING & given
    if not strong:
        return None
    both = {"acquire", "release"}
    return frozenset((both if "acq_rel" in strong else strong & both) | (set() if given & {"cta", "cluster"} else {"gpu"}))


def memory_modifiers(d: Decoder, ins: nodes.Instruction) -> tuple[str, int, str, frozenset[str] | None]:
    """space ("generic" if none is written), vector length, type, ordering"""
    *mods, type_ = ins.modifiers
    space, length = "generic", 1
    for mod in mods:
        head = mod.split("::")[0]
        if head in SPACES:
            space = "cluster" if mod == "shared::cluster" else head
        elif mod in ("v2", "v4", "v8"):
            length = int(mod[1])
        elif mod not in IGNORED and head not in ("L1", "L2"):
            d.refuse(f"unknown modifier .{mod}")
    if type_ not in DTYPE or type_ == "pred":
        d.refuse(f"unknown type .{type_}")
    return space, length, type_, ordering(mods)


def policy(d: Decoder, operands: tuple[nodes.Operand, ...]) -> None:
    for operand in operands:  # an L2 cache policy: read and ignored
        d.src(operand, "b64")


def ld(d: Decoder, ins: nodes.Instruction) -> Core:
    space, length, type_, order = memory_modifiers(d, ins)
    dst, memory_operand, *rest = ins.operands
    policy(d, tuple(rest))
    each = DTYPE[type_]
    targets = d.items(dst)
    if len(targets) != length:
        d.refuse(f"{len(targets)} destinations for {length} elements")
    if (
        space == "param"
        and isinstance(memory_operand, nodes.Addr)
        and isinstance(memory_operand.base, nodes.Sym)
        and isinstance(d.scope.lookup(memory_operand.base.name), Parameter)
    ):
        return ld_param(d, targets, memory_operand, type_)
    base, offset = d.address(memory_operand, space)
    width = each.itemsize * length
    sinks = [_sink(d, t, each, type_) for t in targets]
    gather = GATHER[space]
    if width == 32:
        return ld_32_bytes(base, offset, each, sinks, gather)
    access = Access(offset, width, "read", order)
    access.is_read_only = "nc" in ins.modifiers
    d.op.info["access"] = access
    raw = np.dtype(f"u{each.itemsize}") if each.itemsize < 16 else each
    fetch = loader(space, base, access)

    if length == 1:
        slot, convert = sinks[0]

        def run(S: State, idx: Array | None) -> None:
            value = fetch(S, idx)
            if slot >= 0:
                S.set(slot, idx, convert(value))

        return run

    def run_vector(S: State, idx: Array | None) -> None:
        parts = fetch(S, idx).view(raw).reshape(-1, length)
        for i, (slot, convert) in enumerate(sinks):
            if slot >= 0:
                S.set(slot, idx, convert(parts[:, i].copy()))

    return run_vector


def ld_32_bytes(base: Source, offset: int, each: np.dtype, sinks: list[Any], gather: Callable[..., Array]) -> Core:
    accesses = [Access(offset, 16, "read"), Access(offset + 16, 16, "read")]
    raw = np.dtype(f"u{each.itemsize}")
    half = len(sinks) // 2

    def run(S: State, idx: Array | None) -> None:
        a = base.take(S, idx)
        if (a + np.uint64(offset & ((1 << 64) - 1)) & np.uint64(31)).any():
            misaligned(a + np.uint64(offset & ((1 << 64) - 1)), 32, S)
        found = [gather(S, a, access, idx).view(raw).reshape(-1, half) for access in accesses]
        for i, (slot, convert) in enumerate(sinks):
            if slot >= 0:
                S.set(slot, idx, convert(found[i // half][:, i % half].copy()))

    return run


def _sink(d: Decoder, target: nodes.Operand, each: np.dtype, type_: str) -> tuple[int, Callable[[Array], Array]]:
    """Slot of a loaded element and the conversion into it: a wider register is extended by sign or zero."""
    if not isinstance(target, nodes.Reg):
        d.refuse("the destination is no register")
    assert isinstance(target, nodes.Reg)
    if target.name == "_":
        return -1, lambda x: x
    stored = DTYPE[d.register(target.name).type]
    if stored.itemsize > each.itemsize:
        slot, _ = d.dst(target, None, stored)
        wide = np.dtype(f"{'i' if type_[0] == 's' else 'u'}{stored.itemsize}")
        bits = each if type_[0] == "s" else np.dtype(f"u{each.itemsize}")
        return slot, lambda x: x.view(bits).astype(wide).view(stored)
    slot, _ = d.dst(target, type_)
    return slot, lambda x: x.view(stored)


def ld_param(d: Decoder, targets: tuple[nodes.Operand, ...], memory_operand: nodes.Addr, type_: str) -> Core:
    assert isinstance(memory_operand.base, nodes.Sym)
    entry = d.scope.lookup(memory_operand.base.name)
    each = DTYPE[type_]
    moves = []
    for i, target in enumerate(targets):
        at = memory_operand.offset + memory_operand.base.offset + i * each.itemsize
        if not 0 <= at <= entry.decl.size_bytes - each.itemsize:
            d.refuse(f"reads {each.itemsize} bytes at {at} of parameter {entry.name} ({entry.decl.size_bytes} bytes)")
        source = d.bound("param", entry.name, entry.offset + at, type_)
        slot, convert = _sink(d, target, each, type_)
        moves.append((slot, source, convert))
    d.op.pure = True
    if len(moves) == 1:
        slot, source, convert = moves[0]

        def run(S: State, idx: Array | None) -> None:
            if slot >= 0:
                S.set(slot, idx, convert(S.R[source]))

        return run

    def run_vector(S: State, idx: Array | None) -> None:
        for slot, source, convert in moves:
            if slot >= 0:
                S.set(slot, idx, convert(S.R[source]))

    return run_vector


def stored_value(d: Decoder, operand: nodes.Operand, type_: str) -> Callable[[State, Any], Array]:
    """Fetch of a value to store as raw bits; a wider register is truncated."""
    each = DTYPE[type_]
    raw = np.dtype(f"u{each.itemsize}") if each.itemsize < 16 else each
    if isinstance(operand, nodes.Reg) and operand.name != "_":
        stored = DTYPE[d.register(operand.name).type]
        if stored.itemsize > each.itemsize:
            source = d.reg_source(operand, np.dtype(f"u{stored.itemsize}"))
            return lambda S, idx: source.take(S, idx).astype(raw)
    source = d.src(operand, type_)
    return lambda S, idx: source.take(S, idx).view(raw)


def st(d: Decoder, ins: nodes.Instruction) -> Core:
    space, length, type_, order = memory_modifiers(d, ins)
    if space in ("param", "const"):
        d.refuse(f"st.{space}")
    memory_operand, value, *rest = ins.operands
    policy(d, tuple(rest))
    base, offset = d.address(memory_operand, space)
    each = DTYPE[type_]
    elements = d.items(value)
    if len(elements) != length:
        d.refuse(f"{len(elements)} values for {length} elements")
    fetches = [stored_value(d, x, type_) for x in elements]
    width = each.itemsize * length
    raw = np.dtype(f"u{each.itemsize}") if each.itemsize < 16 else each
    if length == 1:
        access = Access(offset, width, "write", order)
        d.op.info["access"] = access
        fetch, put = fetches[0], storer(space, base, access)

        def run(S: State, idx: Array | None) -> None:
            put(S, fetch(S, idx), idx)

        return run
    chunks = [Access(offset + 16 * i, min(width, 16), "write", order) for i in range(max(1, width // 16))]
    d.op.info["access"] = chunks[0]
    per = length // len(chunks)
    puts = [storer(space, base, access) for access in chunks]

    def run_vector(S: State, idx: Array | None) -> None:
        for i, access in enumerate(chunks):
            parts = [fetch(S, idx) for fetch in fetches[i * per : (i + 1) * per]]
            out = np.empty((max(len(p) for p in parts), per), raw)
            for j, part in enumerate(parts):
                out[:, j] = part
            puts[i](S, out.view(RAW[access.width]).reshape(-1), idx)

    return run_vector


def no_effect(d: Decoder, ins: nodes.Instruction) -> Core:
    """Hints and fences: execution is sequentially consistent. Operands are decoded, so that mistakes show."""
    return lambda S, idx: None


def griddepcontrol(d: Decoder, ins: nodes.Instruction) -> Core:
    """Launches run one after the other; that a thread waited for the one before is for the race checker to know."""

    def wait(S: State, idx: Array | None) -> None:
        if S.waited is not None:
            S.waited[S.slot if idx is None else S.slot.take(idx)] = True

    def start_next(S: State, idx: Array | None) -> None:
        if S.waited is not None and S.global_race is not None:
            S.global_race.lets_start_early |= not S.waited[S.slot if idx is None else S.slot.take(idx)].all()

    return wait if "wait" in ins.modifiers else start_next


def fence(d: Decoder, ins: nodes.Instruction) -> Core:
    """membar and fence: execution is sequentially consistent; only the race checkers take note."""
    if "async" in ins.modifiers or "mbarrier_init" in ins.modifiers:

        def proxy_fence(S: State, idx: Array | None) -> None:
            if S.race is not None:
                S.race.proxy_fence(idx, "mbarrier_init" in ins.modifiers)

        return proxy_fence
    if "proxy" in "".join(ins.modifiers):
        return no_effect(d, ins)

    is_wide = not {"gpu", "gl", "sys"}.isdisjoint(ins.modifiers)

    def run(S: State, idx: Array | None) -> None:
        if S.race is not None:
            S.race.fence(idx, is_wide)

    return run


def createpolicy(d: Decoder, ins: nodes.Instruction) -> Core:
    """A cache policy is an opaque value without effect."""
    return d.emit(lambda x: x, ins.operands[0], np.dtype(np.uint64), [Source(d.constant(np.zeros(1, np.uint64)))])


BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {
    "ld": ld, "ldu": ld, "st": st, "createpolicy": createpolicy, "membar": fence, "fence": fence, "griddepcontrol": griddepcontrol,
    **dict.fromkeys(
        ("prefetch", "prefetchu", "applypriority", "discard", "nanosleep", "pmevent"), no_effect),
}  # fmt: skip
