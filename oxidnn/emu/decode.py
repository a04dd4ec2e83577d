"""Decoding: a ptx.Module entry becomes register slots and one Python closure per instruction.

Every operand is a slot of the register file `S.R` (a list of arrays): declared registers, special registers, and
constants alike. A value is an array of shape (N,) over the N threads of the batch, or (1,) where all threads agree.
Arrays are stored in the dtype of the declared type and viewed as the type of the instruction.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidnn.emu.memory import LOCAL_WINDOW, SHARED_BASE, SHARED_WINDOW, Array, Fault
from oxidnn.errors import PtxError
from oxidnn.ptx import nodes

if TYPE_CHECKING:
    from oxidnn.emu.machine import State

Core = Callable[["State", Any], None]

DTYPE: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "pred": np.bool_,
        "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
        "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": np.uint16,
        "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "f16x2": np.uint32,
        "bf16x2": np.uint32, "tf32": np.uint32, "u16x2": np.uint32, "s16x2": np.uint32,
        "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
        "e4m3x2": np.uint16, "e5m2x2": np.uint16, "b128": np.complex128,
    }.items()
}  # fmt: skip

RAWINT: dict[int, np.dtype] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}

SPECIAL: dict[str, str] = {
    **{f"%{name}.{axis}": "u32" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"},
    **{f"%{name}.{axis}": "u32" for axis in "xyz"
       for name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")},
    **dict.fromkeys(
        ("%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%lanemask_eq", "%lanemask_le", "%lanemask_lt",
         "%lanemask_ge", "%lanemask_gt", "%cluster_ctarank", "%cluster_nctarank", "%total_smem_size",
         "%dynamic_smem_size", "%aggr_smem_size", "%pm0", "%pm1", "%pm2", "%pm3"), "u32"),
    **dict.fromkeys(("%gridid",), "u64"),
    "%is_explicit_cluster": "pred",
}  # fmt: skip
CLOCKS = {"%clock": "u32", "%clock_hi": "u32", "%clock64": "u64", "%globaltimer": "u64", "%globaltimer_lo": "u32",
          "%globaltimer_hi": "u32"}  # fmt: skip


@dataclass(slots=True)
class Slot:
    """One entry of the register file."""

    index: int
    kind: str  # register, special, constant, param, variable
    name: str
    type: str
    value: Array | None = None  # of constants
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """How an instruction reads an operand: slot, view dtype (None: as stored), inverted predicate."""

    slot: int
    view: np.dtype | None = None
    inverted: bool = False

    def get(self, S: State) -> Array:
        value = S.R[self.slot]
        if self.view is not None:
            value = value.view(self.view)
        return ~value if self.inverted else value

    def take(self, S: State, idx: Array | None) -> Array:
        """The value for the lanes `idx`: shape (len(idx),), or (1,) when uniform."""
        value = self.get(S)
        return value if idx is None or value.size == 1 else value.take(idx)


@dataclass(slots=True)
class Op:
    """A decoded instruction."""

    ins: nodes.Instruction
    pc: int
    kind: str = "op"  # op: runs for a set of lanes; warp: needs whole warps; branch, exit, barrier, ...: control
    core: Any = None
    pure: bool = False  # no effect but its destinations: may run for all lanes and be merged
    lenient: bool = False  # reads of undefined lanes are the instruction's own business (selp)
    reads: list[int] = field(default_factory=list)  # slots of declared registers
    writes: list[int] = field(default_factory=list)
    guard: Source | None = None
    target: int = -1
    info: dict[str, Any] = field(default_factory=dict)


class Scope:
    """A lexical scope: register ranges, names and labels of one `{ }`."""

    def __init__(self, parent: Scope | None) -> None:
        self.parent = parent
        self.names: dict[str, Any] = {}

    def lookup(self, name: str) -> Any:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None


@dataclass(frozen=True, slots=True)
class Variable:
    space: str
    name: str
    address: int  # offset in its space; of global and const variables, bound at launch
    decl: nodes.VarDecl | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    offset: int
    decl: nodes.ParamDecl


class Decoder:
    """Decodes one instruction at a time; collects what it reads and writes."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self._special: dict[str, int] = {}
        self._constants: dict[tuple[bytes, str], int] = {}
        self._bound: dict[tuple[str, str, int, str], int] = {}
        self.scope = Scope(None)
        self.op = Op(nodes.Instruction("", (), (), None, 0, ""), 0)
        self.takes_param_address = False
        self.carry_slot = -1

    # -- slots

    def _new(self, kind: str, name: str, type_: str, value: Array | None = None, offset: int = 0) -> int:
        self.slots.append(Slot(len(self.slots), kind, name, type_, value, offset))
        return len(self.slots) - 1

    def declare(self, decl: nodes.RegDecl) -> None:
        if decl.type not in DTYPE:
            raise PtxError(f"line {decl.line}: register type .{decl.type} is not emulated")
        for name, count in decl.names:
            for each in (name,) if count is None else (f"{name}{i}" for i in range(count)):
                self.scope.names[each] = (decl.type,)  # gets its slot on first use

    def carry(self) -> int:
        if self.carry_slot < 0:
            self.carry_slot = self._new("register", "CC.CF", "u32")
        return self.carry_slot

    def register(self, name: str) -> Slot:
        scope: Scope | None = self.scope
        while scope is not None:
            entry = scope.names.get(name)
            if entry is not None:
                if isinstance(entry, tuple):
                    entry = scope.names[name] = self.slots[self._new("register", name, entry[0])]
                if not isinstance(entry, Slot):
                    self.refuse(f"{name} is no register")
                return entry
            scope = scope.parent
        type_ = SPECIAL.get(name)
        if type_ is None:
            raise self.refusal(f"register {name} is not declared")
        if name not in self._special:
            self._special[name] = self._new("special", name, type_)
        return self.slots[self._special[name]]

    def constant(self, value: Array) -> int:
        value = np.ascontiguousarray(value).reshape(1)
        key = (value.tobytes(), value.dtype.str)
        if key not in self._constants:
            self._constants[key] = self._new("constant", str(value[0]), "", value)
        return self._constants[key]

    def bound(self, kind: str, name: str, offset: int, type_: str) -> int:
        """A uniform slot whose value is known at launch: a parameter, or the address of a variable."""
        key = (kind, name, offset, type_)
        if key not in self._bound:
            self._bound[key] = self._new(kind, name, type_, None, offset)
        return self._bound[key]

    # -- operands

    def refusal(self, why: str) -> PtxError:
        return PtxError(f"line {self.op.ins.line}: the emulator cannot run this: {why}: {self.op.ins.text}")

    def refuse(self, why: str) -> Any:
        raise self.refusal(why)

    def reg_source(self, reg: nodes.Reg, dtype: np.dtype | None) -> Source:
        slot = self.register(reg.name)
        if slot.kind == "register":
            self.op.reads.append(slot.index)
        stored = DTYPE[slot.type]
        if dtype is None or stored == dtype:
            return Source(slot.index, None, reg.negated)
        if stored.itemsize != dtype.itemsize or (stored == np.bool_) != (dtype == np.bool_):
            self.refuse(f"register {reg.name} is .{slot.type}, the instruction takes {dtype.itemsize * 8} bits")
        return Source(slot.index, dtype, reg.negated)

    def src(self, operand: nodes.Operand, type_: str, dtype: np.dtype | None = None) -> Source:
        """Read `operand` as `type_` (or as `dtype` where an instruction computes in another)."""
        dtype = DTYPE[type_] if dtype is None else dtype
        if isinstance(operand, nodes.Reg):
            return self.reg_source(operand, dtype)
        if isinstance(operand, nodes.Imm):
            return Source(self.constant(self.immediate(operand, type_, dtype)))
        if isinstance(operand, nodes.Sym):
            return self.symbol(operand, dtype)
        return self.refuse(f"operand {operand} is not a value")

    def immediate(self, imm: nodes.Imm, type_: str, dtype: np.dtype) -> Array:
        if dtype == np.bool_:
            return np.array([bool(imm.value)])
        if type_ in ("f16", "bf16", "f16x2", "bf16x2") and isinstance(imm.value, float):
            self.refuse("a floating literal cannot be a 16-bit operand")
        if dtype.kind == "f":
            if imm.bits is not None and isinstance(imm.value, float):
                literal_bits = 32 if imm.text[:2].lower() == "0f" else 64
                raw = np.array([imm.bits], np.uint32 if literal_bits == 32 else np.uint64)
                value = raw.view(np.float32 if literal_bits == 32 else np.float64)
                return value if value.dtype == dtype else value.astype(dtype)
            if isinstance(imm.value, int) and dtype == np.float16:
                return np.array([imm.value & 0xFFFF], np.uint16).view(np.float16)
            return np.array([imm.value], np.float64).astype(dtype)
        if isinstance(imm.value, float):
            bits = imm.bits
            if bits is None:
                kind = "<f" if dtype.itemsize == 4 else "<d"
                bits = int.from_bytes(struct.pack(kind, imm.value), "little")
            return np.array([bits & ((1 << dtype.itemsize * 8) - 1)], np.uint64).astype(RAWINT[dtype.itemsize]).view(
                dtype
            )
        mask = (1 << dtype.itemsize * 8) - 1
        return np.array([imm.value & mask], np.uint64).astype(RAWINT[dtype.itemsize]).view(dtype)

    def symbol(self, sym: nodes.Sym, dtype: np.dtype) -> Source:
        if sym.name == "WARP_SZ":
            return Source(self.constant(np.array([32]).astype(dtype)))
        entry = self.scope.lookup(sym.name)
        kind = {4: "u32", 8: "u64"}.get(dtype.itemsize)
        if kind is None:
            self.refuse(f"the address of {sym.name} does not fit")
        if isinstance(entry, Parameter):
            self.takes_param_address = True
            found = Source(self.bound("param address", entry.name, entry.offset + sym.offset, "u64"))
        elif isinstance(entry, Variable):
            if entry.space in ("shared", "local"):
                base = SHARED_BASE if entry.space == "shared" else 0
                return Source(self.constant(np.array([base + entry.address + sym.offset], np.uint64).astype(dtype)))
            found = Source(self.bound("variable", entry.name, sym.offset, "u64"))
        else:
            self.refuse(f"{sym.name} is not defined")
        if dtype.itemsize != 8:
            self.refuse(f"the address of {sym.name} has 64 bits")
        return Source(found.slot, None if dtype == np.uint64 else dtype)

    def dst(self, operand: nodes.Operand, type_: str | None, dtype: np.dtype | None = None) -> tuple[int, np.dtype]:
        """Slot and storage dtype of a destination; slot -1 is the sink `_`."""
        if isinstance(operand, nodes.Reg):
            if operand.name == "_":
                return -1, DTYPE[type_] if type_ else np.dtype(np.uint32)
            slot = self.register(operand.name)
            if slot.kind != "register":
                self.refuse(f"{operand.name} cannot be written")
            self.op.writes.append(slot.index)
            stored = DTYPE[slot.type]
            wanted = dtype if dtype is not None else DTYPE[type_] if type_ else stored
            if stored.itemsize != wanted.itemsize or (stored == np.bool_) != (wanted == np.bool_):
                self.refuse(f"register {operand.name} is .{slot.type}, the result has {wanted.itemsize * 8} bits")
            return slot.index, stored
        return self.refuse(f"{operand} is not a register")

    def items(self, operand: nodes.Operand) -> tuple[nodes.Operand, ...]:
        return operand.items if isinstance(operand, nodes.Vec) else (operand,)

    def address(self, operand: nodes.Operand, space: str) -> tuple[Source, int]:
        """Base and byte offset of `[base + offset]`."""
        if not isinstance(operand, nodes.Addr) or operand.coordinates:
            self.refuse(f"{operand} is no address")
        assert isinstance(operand, nodes.Addr)
        base = operand.base
        if isinstance(base, nodes.Reg):
            slot = self.register(base.name)
            if DTYPE[slot.type].itemsize not in (4, 8) or (space in ("global", "generic") and slot.type[1:] != "64"):
                self.refuse(f"register {base.name} (.{slot.type}) cannot be an address in .{space}")
            dtype = np.dtype(np.uint32 if DTYPE[slot.type].itemsize == 4 else np.uint64)
            return self.reg_source(base, dtype), operand.offset
        if isinstance(base, nodes.Imm):
            return Source(self.constant(np.array([int(base.value)], np.uint64))), operand.offset
        entry = self.scope.lookup(base.name)
        space = "shared" if space == "cluster" else space
        if space in ("generic", "shared", "local") and isinstance(entry, Variable) and entry.space in ("shared", "local"):
            window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}[entry.space] if space == "generic" else 0
            local = (SHARED_BASE if entry.space == "shared" else 0) + entry.address + base.offset
            return Source(self.constant(np.array([window + local], np.uint64))), operand.offset
        return self.symbol(base, np.dtype(np.uint64)), operand.offset

    # -- closures

    def emit(
        self,
        fn: Callable[..., Array],
        dst: nodes.Operand,
        result: np.dtype,
        sources: Sequence[Source],
    ) -> Core:
        """dst = fn(*sources), where fn returns an array of dtype `result`; a pure instruction."""
        self.op.pure = True
        slot, stored = self.dst(dst, None, result)
        if slot < 0:
            return lambda S, idx: None
        return emit_slot(fn, slot, stored, result, sources)


def emit_slot(
    fn: Callable[..., Array], slot: int, stored: np.dtype, result: np.dtype, sources: Sequence[Source]
) -> Core:
    kinds = tuple(("v" if s.view is not None else "") + ("n" if s.inverted else "") for s in sources)
    make = _factory(kinds, stored != result)
    arguments: list[Any] = []
    for s in sources:
        arguments += (s.slot, s.view)
    return make(fn, slot, stored, *arguments)




@cache
def _factory(kinds: tuple[str, ...], viewed: bool) -> Callable[..., Core]:
    """A maker of closures for one shape of instruction, so that operand access costs no calls."""

    def read(i: int) -> str:
        text = f"R[s{i}]"
        if "v" in kinds[i]:
            text += f".view(v{i})"
        return "~" + text if "n" in kinds[i] else text

    count = range(len(kinds))
    result = ".view(vd)" if viewed else ""
    lines = [
        "def make(fn, d, vd, " + ", ".join(f"s{i}, v{i}" for i in count) + "):",
        "    def run(S, idx):",
        "        R = S.R",
        "        if idx is None:",
        f"            R[d] = fn({', '.join(read(i) for i in count)}){result}",
        "            return",
    ]
    for i in count:
        lines += [f"        x{i} = {read(i)}", f"        if x{i}.size != 1: x{i} = x{i}.take(idx)"]
    lines += [f"        S.put(d, idx, fn({', '.join(f'x{i}' for i in count)}){result})", "    return run", ""]
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    return names["make"]


def guarded(op: Op) -> Core:
    """The core of a predicated instruction."""
    core, guard, writes, pure = op.core, op.guard, tuple(dict.fromkeys(op.writes)), op.pure
    assert guard is not None
    slot, inverted = guard.slot, guard.inverted
    key = (slot, inverted)

    def run(S: State, idx: Array | None) -> None:
        R = S.R
        p = R[slot]
        if p.size == 1 and S.N > 1:
            if bool(p[0]) != inverted:
                core(S, idx)
            return
        if idx is not None:
            mask = p.take(idx)
            some = idx.take(np.flatnonzero(~mask if inverted else mask))
            if len(some):
                inside(S, idx if len(some) == len(idx) else some)
            return
        known = S.guards.get(key)
        if known is None or known[0] is not p:
            S.guard_mask(guard, None)
            known = S.guards[key]
        _, mask, count, sub = known
        if count == 0:
            return
        if count == S.N:
            core(S, None)
            return
        if pure and count * 4 > S.N:
            olds = [R[w] for w in writes]
            core(S, None)
            for w, old in zip(writes, olds, strict=True):
                S.merge(w, mask, old)
            return
        if sub is None:
            sub = np.flatnonzero(mask)
            S.guards[key] = (p, mask, count, sub)
        S.mask = mask
        inside(S, sub)
        S.mask = None

    def inside(S: State, sub: Array) -> None:
        try:
            core(S, sub)
        except Fault as fault:
            if fault.positions is None:
                fault.positions = sub
            raise

    return run
