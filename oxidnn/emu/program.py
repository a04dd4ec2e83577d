"""A ptx.Module entry decoded once, and the arguments of its launches."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from oxidnn.emu import alu, asynccopy, atomics, barrier, bulk, cluster, convert, ldst, mbarrier, mma, moves, shuffle, wgmma
from oxidnn.emu.checkers import expand
from oxidnn.emu.decode import DTYPE, Core, Decoder, Op, Parameter, Scope, Slot, Variable, guarded
from oxidnn.emu.machine import Launch
from oxidnn.emu.memory import Array, GlobalMemory, align_up
from oxidnn.emu.trace import Counters
from oxidnn.errors import PtxError
from oxidnn.ptx import nodes
from oxidnn.ptx.isa import lookup
from oxidnn.ptx.parser import instruction

BUILDERS: dict[str, Callable[[Decoder, nodes.Instruction], Core]] = {
    **alu.BUILDERS, **moves.BUILDERS, **convert.BUILDERS, **ldst.BUILDERS, **shuffle.BUILDERS, **mma.BUILDERS,
    **asynccopy.BUILDERS, **atomics.BUILDERS, **barrier.BUILDERS, **mbarrier.BUILDERS, **cluster.BUILDERS, **wgmma.BUILDERS,
    **bulk.BUILDERS,
}  # fmt: skip


def _builder(ins: nodes.Instruction) -> Callable[[Decoder, nodes.Instruction], Core] | None:
    if ins.opcode in ("st", "red") and "async" in ins.modifiers:
        return bulk.async_store
    return BUILDERS.get(ins.opcode)


def load(module: nodes.Module, entry: str | None = None) -> Program:
    """Decode `entry` (the only one if None). PtxError for whatever the emulator does not know, before anything runs."""
    names = [e.name for e in module.entries]
    if entry is None:
        if len(names) != 1:
            raise PtxError(f"the module has the entries {', '.join(names) or '(none)'}: name one")
        return Program(module, module.entries[0])
    for candidate in module.entries:
        if candidate.name == entry:
            return Program(module, candidate)
    raise PtxError(f"no entry {entry!r} in the module (it has {', '.join(names) or 'none'})")


class Program:
    """A decoded kernel. `source_map`, if set, maps a PTX line to the text of its origin for fault messages."""

    def __init__(self, module: nodes.Module, entry: nodes.Entry) -> None:
        self.name = entry.name
        self.module = module
        self.entry = entry
        self.source_map: Callable[[int], str] | None = None
        self.ops: list[Op] = []
        self.variables: list[Variable] = []  # .global and .const
        self.shared_names: list[tuple[int, int, str]] = []  # offset, size, name
        self.static_shared = 0
        self.local_size = 0
        self._dynamic: list[nodes.VarDecl] = []
        self._bound_variables: dict[int, tuple[Any, dict[str, int]]] = {}
        self._patterns: dict[tuple[Any, ...], Array] = {}
        self.decoder = Decoder()
        self._declare(module, entry)
        self._decode(entry)
        self._survey()

    def _survey(self) -> None:
        """What a launch asks of all instructions together."""
        self.slots: list[Slot] = list(self.decoder.slots)  # kernels edited from this one add to the decoder's
        self.names = frozenset(f"{op.ins.opcode} {m}" for op in self.ops for m in ("", *op.ins.modifiers))
        self.is_async = not self.names.isdisjoint(
            ("wgmma ", "mbarrier ", "mapa ", "cp bulk", "st async", "red async", "barrier cluster"))
        self.has_copies = any(op.ins.opcode == "cp" and "bulk" not in op.ins.modifiers for op in self.ops)
        self.has_bulk_groups = "cp bulk_group" in self.names
        self.has_products = "wgmma " in self.names
        self.code: list[Core] = self._watched_products() if self.has_products else [op.core for op in self.ops]
        self.end_of_block = [0] * (len(self.ops) + 1)
        end = len(self.ops)
        self.end_of_block[end] = end
        for pc in range(len(self.ops) - 1, -1, -1):
            if self.ops[pc].kind != "op":
                end = pc
            self.end_of_block[pc] = end
        self.template: list[Any] = [slot.value for slot in self.slots]
        self.lines = [(op.ins.line, op.ins.text) for op in self.ops]
        self.touched = [frozenset((*op.reads, *op.writes, *((op.guard.slot,) if op.guard else ()))) for op in self.ops]

    # -- decoding

    def _declare(self, module: nodes.Module, entry: nodes.Entry) -> None:
        scope = self.decoder.scope
        for variable in module.variables:
            self._variable(variable, scope)
        offset = 0
        for param in entry.params:
            offset = align_up(offset, max(1, param.align))
            scope.names[param.name] = Parameter(param.name, offset, param)
            offset += param.size_bytes
        self.param_bytes = offset

    def _variable(self, decl: nodes.VarDecl, scope: Scope) -> None:
        if decl.space == "shared":
            if decl.is_extern and decl.size_bytes == 0:
                self._dynamic.append(decl)
                scope.names[decl.name] = Variable("dynamic", decl.name, 0, decl)
                return
            at = align_up(self.static_shared, max(1, decl.align))
            self.static_shared = at + decl.size_bytes
            self.shared_names.append((at, decl.size_bytes, decl.name))
            scope.names[decl.name] = Variable("shared", decl.name, at, decl)
        elif decl.space == "local":
            at = align_up(self.local_size, max(1, decl.align))
            self.local_size = at + decl.size_bytes
            scope.names[decl.name] = Variable("local", decl.name, at, decl)
        elif decl.space in ("global", "const"):
            if decl.is_extern:
                raise PtxError(f"line {decl.line}: extern variable {decl.name} cannot be resolved")
            variable = Variable(decl.space, decl.name, 0, decl)
            self.variables.append(variable)
            scope.names[decl.name] = variable
        else:
            raise PtxError(f"line {decl.line}: variables in .{decl.space} are not emulated")

    def _decode(self, entry: nodes.Entry) -> None:
        flat: list[tuple[nodes.Instruction, Scope]] = []
        labels: dict[int, int] = {}  # id of a Label node -> pc
        top = self.decoder.scope
        self._flatten(entry.body, top, flat, labels)
        # The dynamic array follows the static ones at the next multiple of 16, whatever alignment it declares: so an H100 places it for
        # what nvJitLink assembles. Only a kernel without static arrays gets the alignment of the window's first free kilobyte.
        self.dynamic_offset = align_up(self.static_shared, 16)
        self._place_dynamic(top, entry.body)
        self._scopes = [scope for _, scope in flat]
        self._labels = labels
        for pc, (ins, scope) in enumerate(flat):
            self.ops.append(self._build(pc, ins, scope))
        for op in self.ops:
            self._shorten(op)

    def _flatten(self, body: Sequence[nodes.Statement], scope: Scope, flat: list[tuple[nodes.Instruction, Scope]],
                 labels: dict[int, int]) -> None:
        # A method, for a local function that calls itself is a cycle, and the whole program would wait for the garbage collector.
        for statement in body:
            if isinstance(statement, nodes.RegDecl):
                self.decoder.scope = scope
                self.decoder.declare(statement)
            elif isinstance(statement, nodes.VarDecl):
                self._variable(statement, scope)
            elif isinstance(statement, nodes.Label):
                scope.names[statement.name] = statement
                labels[id(statement)] = len(flat)
            elif isinstance(statement, nodes.Scope):
                self._flatten(statement.body, Scope(scope), flat, labels)
            else:
                flat.append((statement, scope))

    def _shorten(self, op: Op) -> None:
        """A jump to ret is a ret: the rest of the batch then closes ranks at once (the usual tail guard)."""
        if op.kind == "branch":
            target = self.ops[op.target] if op.target < len(self.ops) else None
            if target is None or (target.kind == "exit" and target.guard is None):
                op.kind = "exit"

    def _place_dynamic(self, scope: Scope, body: Any) -> None:
        for decl in self._dynamic:
            self.shared_names.append((self.dynamic_offset, 1 << 30, decl.name))
        self._dynamic_placed = {decl.name: Variable("shared", decl.name, self.dynamic_offset, decl) for decl in self._dynamic}
        for name, variable in self._dynamic_placed.items():
            scope.names[name] = variable

    def _build(self, pc: int, ins: nodes.Instruction, scope: Scope) -> Op:
        lookup(ins)  # refuses what is no PTX; the builders refuse what is not emulated
        d = self.decoder
        d.scope = scope
        op = d.op = Op(ins, pc)
        if ins.guard is not None:
            op.guard = d.reg_source(ins.guard, DTYPE["pred"])
            op.reads.clear()
        name = ins.opcode
        if name == "bra":
            (target,) = ins.operands
            label = scope.lookup(target.name) if isinstance(target, nodes.Sym) else None
            if not isinstance(label, nodes.Label):
                d.refuse(f"no label {getattr(target, 'name', target)}")
            op.kind, op.target = "branch", self._labels[id(label)]
        elif name in ("exit", "ret"):
            op.kind = "exit"
        elif name in ("trap", "brkpt"):
            op.kind = "trap"
        elif (builder := _builder(ins)) is not None:
            try:
                op.core = builder(d, ins)
            except PtxError:
                raise
            except (KeyError, ValueError, AttributeError, IndexError, TypeError, StopIteration) as error:
                raise PtxError(f"line {ins.line}: the emulator cannot run this ({error!r}): {ins.text}") from error
        else:
            d.refuse("unknown instruction")
        if op.kind == "op" and op.guard is not None:
            op.core = guarded(op)
        return op

    def _watched_products(self) -> list[Core]:
        """Instructions that write registers of wgmma say so: a wgmma.fence must follow."""
        used: set[int] = set()
        for op in self.ops:
            used.update(op.info.get("accumulators", ()), op.info.get("a registers", ()))
        cores = []
        for op in self.ops:
            slots = tuple(used.intersection(op.writes))
            cores.append(_touching(op.core, slots) if slots and op.kind != "warpgroup" else op.core)
        return cores

    def edited(self, line: int, text: str) -> Program:
        """The kernel with `text`, one instruction or nothing, in place of the one instruction of a line; all others are shared.

        Raises PtxError where it takes more than decoding that instruction, and where `load` would.
        """
        pcs = [pc for pc, op in enumerate(self.ops) if op.ins.line == line]
        if len(pcs) != 1:
            raise PtxError(f"line {line} holds {len(pcs)} instructions")
        (pc,) = pcs
        program = copy.copy(self)
        if text:
            op = self._build(pc, instruction(text, line), self._scopes[pc])
            self._shorten(op)
        else:
            op = Op(nodes.Instruction("", (), (), None, line, ""), pc, core=lambda S, idx: None)
        if "exit" in (op.kind, self.ops[pc].kind) and op.kind != self.ops[pc].kind:
            raise PtxError(f"line {line}: jumps to it may become exits, or were")
        program.ops = [*self.ops[:pc], op, *self.ops[pc + 1 :]]
        program._survey()
        return program

    def where(self, line: int) -> str:
        """'line 12', and where that line comes from if a source map is set."""
        origin = self.source_map(line) if self.source_map is not None else ""
        return f"line {line}" + (f" from {origin}" if origin else "")

    # -- launching

    def launch(
        self,
        memory: GlobalMemory,
        grid: Sequence[int],
        threads: Sequence[int],
        args: Sequence[Any],
        dynamic_smem: int = 0,
        cluster: Sequence[int] = (1, 1, 1),
        checkers: str | Sequence[str] = "basic",
        schedule: str | tuple[str, int] = "lowest_pc",
        tensor_core: str = "fast",
        step_limit: int = 1 << 26,
        follows: bool = False,
    ) -> Counters:
        """Run the grid to its end.

        grid, threads, cluster: three numbers each (missing ones are 1). args: one Python int, float or bytes per
        .param in order. dynamic_smem: bytes of the extern shared array.
        checkers: names out of bounds, align, uninit, race, barrier, bank; "basic" is bounds, align, uninit, barrier;
        "all" adds race. (bounds and align are always on: they keep this process safe.)
        schedule: "lowest_pc", or ("random", seed), which interleaves warps at random.
        tensor_core: "fast" sums products in float64 and rounds once; "exact" truncates as the hardware does, bit for
        bit. follows: the launch before this one in the stream may still run, until a thread waits for it (griddepcontrol.wait); the race
        checker refuses what touches before what that launch writes, or writes what it touches (anything, if that launch was not looked at).
        EmulatorFault: a checker fired.
        """
        grid3, threads3, cluster3 = _triple(grid, "grid"), _triple(threads, "threads"), _triple(cluster, "cluster")
        self._check_launch(grid3, threads3, cluster3)
        enabled = expand(checkers)
        params = self._params(args)
        launch = Launch(self, memory, grid3, threads3, cluster3, dynamic_smem, enabled, params, tensor_core, step_limit, follows)
        random = None
        if schedule != "lowest_pc":
            if not isinstance(schedule, tuple) or schedule[0] != "random":
                raise ValueError(f"launch: schedule is {schedule!r} (expected 'lowest_pc' or ('random', seed))")
            random = np.random.default_rng(schedule[1])
        with np.errstate(all="ignore"):
            launch.run(random)
        return launch.counters

    def _check_launch(self, grid: tuple[int, ...], threads: tuple[int, ...], cluster: tuple[int, ...]) -> None:
        count = threads[0] * threads[1] * threads[2]
        if not 1 <= count <= 1024:
            raise ValueError(f"launch: threads is {threads} (expected a product of 1 to 1024)")
        if any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise ValueError(f"launch: grid {grid} is not a multiple of the cluster {cluster}")
        for name, values in self.entry.directives:
            if name == "reqntid" and tuple(values) != threads:
                raise ValueError(f"launch: threads is {threads} (expected .reqntid {tuple(values)})")
            if name == "maxntid" and count > values[0] * values[1] * values[2]:
                raise ValueError(f"launch: threads is {threads} (expected at most .maxntid {tuple(values)})")
            if name == "reqnctapercluster" and tuple(values) != cluster:
                raise ValueError(f"launch: cluster is {cluster} (expected .reqnctapercluster {tuple(values)})")

    def _params(self, args: Sequence[Any]) -> bytes:
        if len(args) != len(self.entry.params):
            raise ValueError(f"launch: args has {len(args)} values (expected {len(self.entry.params)} for {self.name})")
        block = bytearray(align_up(max(self.param_bytes, 1), 16))
        at = 0
        for param, value in zip(self.entry.params, args, strict=True):
            at = align_up(at, max(1, param.align))
            block[at : at + param.size_bytes] = _pack(param, value)
            at += param.size_bytes
        return bytes(block)

    def variable_addresses(self, memory: GlobalMemory) -> dict[str, int]:
        """Addresses of the .global and .const variables; allocated and set at the first launch on `memory`."""
        if not self.variables:
            return {}
        known = self._bound_variables.get(id(memory))
        if known is None or known[0] is not memory:
            addresses: dict[str, int] = {}
            for variable in self.variables:
                decl = variable.decl
                assert decl is not None
                pointer = memory.alloc(max(decl.size_bytes, 1), f"{decl.space} variable {decl.name}", initialised=True,
                                       writable=decl.space != "const")
                if decl.initial:
                    dtype = DTYPE[decl.type]
                    values = np.array([_initial(v, dtype) for v in decl.initial], dtype)
                    memory.view(pointer, values.nbytes)[:] = values.view(np.uint8)
                addresses[decl.name] = pointer
            known = self._bound_variables[id(memory)] = (memory, addresses)
        return known[1]

    def pattern(self, key: tuple[Any, ...], make: Callable[[], Array]) -> Array:
        """A read-only array that depends on the launch shape alone, kept from launch to launch."""
        found = self._patterns.get(key)
        if found is None:
            if len(self._patterns) > 256:
                self._patterns.clear()
            found = self._patterns[key] = make()
        return found


def _touching(core: Core, slots: tuple[int, ...]) -> Core:
    def run(S: Any, idx: Any) -> Any:
        result = core(S, idx)  # type: ignore[func-returns-value]
        S.products.touch(S, slots, idx)
        return result

    return run


def _initial(value: int | float, dtype: np.dtype) -> Any:
    if dtype.kind in "ui" and isinstance(value, int):
        return np.array([value & ((1 << 8 * dtype.itemsize) - 1)], np.uint64).astype(f"u{dtype.itemsize}").view(dtype)[0]
    return value


def _triple(values: Sequence[int] | int, name: str) -> tuple[int, int, int]:
    if isinstance(values, int):
        values = (values,)
    full = (*values, 1, 1, 1)[:3]
    if len(values) > 3 or any(int(v) != v or v < 1 for v in full):
        raise ValueError(f"launch: {name} is {tuple(values)} (expected up to three positive integers)")
    return (int(full[0]), int(full[1]), int(full[2]))


def _pack(param: nodes.ParamDecl, value: Any) -> bytes:
    size = param.size_bytes
    if isinstance(value, (bytes, bytearray, memoryview)):
        if len(value) != size:
            raise ValueError(f"launch: argument {param.name} has {len(value)} bytes (expected {size})")
        return bytes(value)
    kind = param.type
    if kind in ("f32", "f64", "f16"):
        return struct.pack({"f32": "<f", "f64": "<d", "f16": "<e"}[kind], float(value))
    if isinstance(value, (float, np.floating)):
        raise ValueError(f"launch: argument {param.name} is {value!r} (expected an int for .{kind})")
    number = int(value)
    if not -(1 << 8 * size - 1) <= number < 1 << 8 * size:
        raise ValueError(f"launch: argument {param.name} is {number} (expected {8 * size} bits)")
    return (number & ((1 << 8 * size) - 1)).to_bytes(size, "little")
