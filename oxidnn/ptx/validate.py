"""What can be told about a module without running it: names, types, gates, address spaces, alignment, pairing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from oxidnn.errors import PtxError
from oxidnn.ptx.isa import SPECIAL_REGISTERS, TARGET_VERSIONS, Effect, Form, Gate, Kind, agrees, lookup, type_bytes
from oxidnn.ptx.nodes import (
    Addr,
    Entry,
    Imm,
    Instruction,
    Label,
    Module,
    Operand,
    Pair,
    ParamDecl,
    Reg,
    RegDecl,
    Scope,
    Statement,
    Sym,
    VarDecl,
    Vec,
)  # fmt: skip

_SINK = Reg("_")
# Spaces whose addresses may be 32 bits.
_NARROW_SPACES = ("shared", "shared::cta", "shared::cluster", "tmem", "param", "const", "local")
_STATIC_SHARED_LIMIT = 48 * 1024  # before sm_90; ptxas refuses more

_DIRECTIVE_GATES = {
    "reqnctapercluster": Gate((7, 8), "90+"),
    "maxclusterrank": Gate((7, 8), "90+"),
    "explicitcluster": Gate((7, 8), "90+"),
    "blocksareclusters": Gate((9, 0), "90+"),
}

# What asynchronous work needs somewhere in the same entry: the ending, the instructions of which one must be there.
_ENDINGS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "group": [
        ("a commit and a wait", ("cp.async.wait_all", "cp.async.mbarrier.arrive", "cp.async.commit_group")),
        ("a wait", ("cp.async.wait_all", "cp.async.wait_group", "cp.async.mbarrier.arrive")),
    ],
    "bulk_group": [
        ("a commit", ("cp.async.bulk.commit_group",)),
        ("a wait", ("cp.async.bulk.wait_group",)),
    ],
    "wgmma_group": [
        ("a fence", ("wgmma.fence",)),
        ("a commit", ("wgmma.commit_group",)),
        ("a wait", ("wgmma.wait_group",)),
    ],
}


def validate(module: Module) -> list[str]:
    """Check a parsed module; the returned notes name declared things that nothing uses.

    Errors: one PtxError that lists every problem, each with its line: registers that are undeclared or of the wrong
    type for the instruction's row, missing labels, forms that the module's .version or .target lacks, symbols used in
    the wrong state space, constant offsets that break the access's alignment or leave the variable, immediates that
    do not fit, barriers and other .aligned instructions but bar.arrive under a guard (`barrier.sync` without .aligned
    is the way to say that divergence is meant), and asynchronous copies or wgmma that no commit and wait follow.
    """
    problems: list[tuple[int, str]] = []
    notes: list[tuple[int, str]] = []
    known = TARGET_VERSIONS.get(module.target)
    if known is None:
        problems.append((1, f"unknown target {module.target} (known: {', '.join(TARGET_VERSIONS)})"))
    elif module.version < known:
        problems.append((1, f".target {module.target} needs .version {known[0]}.{known[1]} or later"))
    variables: dict[str, VarDecl | ParamDecl] = {variable.name: variable for variable in module.variables}
    for entry in module.entries:
        _EntryCheck(module, entry, variables, problems, notes).run()
    if problems:
        raise PtxError("\n".join(f"line {line}: {text}" for line, text in sorted(dict.fromkeys(problems))))
    return [f"line {line}: {text}" for line, text in sorted(notes)]


@dataclass
class _Names:
    """What a scope sees."""

    registers: dict[str, str]  # name -> type
    variables: dict[str, VarDecl | ParamDecl]
    labels: frozenset[str]
    declared: list[tuple[str, int | None, int]] = field(default_factory=list)  # (name, count, line) of this scope


class _EntryCheck:
    def __init__(
        self,
        module: Module,
        entry: Entry,
        variables: dict[str, VarDecl | ParamDecl],
        problems: list[tuple[int, str]],
        notes: list[tuple[int, str]],
    ) -> None:
        self.module = module
        self.entry = entry
        self.variables = variables
        self.problems = problems
        self.notes = notes
        self.used: set[str] = set()
        self.names: dict[str, int] = {}  # "opcode.modifiers" -> first line
        self.completions: dict[str, tuple[int, str]] = {}
        self.instruction: Instruction
        self.scope: _Names
        self.admitted: dict[int, bool] = {}

    # -- the entry

    def run(self) -> None:
        entry = self.entry
        visible = {**self.variables, **{param.name: param for param in entry.params}}
        self._statements(entry.body, _Names({}, visible, frozenset()))
        self._endings()
        self._directives()
        self._shared_size()
        for param in entry.params:
            if param.name not in self.used:
                self.notes.append((param.line, f"parameter {param.name} is never used"))

    def _statements(self, body: tuple[Statement, ...], outer: _Names) -> None:
        scope = _Names(
            dict(outer.registers),
            dict(outer.variables),
            outer.labels | {statement.name for statement in body if isinstance(statement, Label)},
        )
        # Names used outside this scope are put aside, so that the notes below speak of this scope's own.
        outside, self.used = self.used, set()
        for statement in body:
            if isinstance(statement, Instruction):
                self.scope = scope
                self._instruction(statement)
            elif isinstance(statement, RegDecl):
                for name, count in statement.names:
                    scope.declared.append((name, count, statement.line))
                    for each in (name,) if count is None else (f"{name}{i}" for i in range(count)):
                        scope.registers[each] = statement.type
            elif isinstance(statement, VarDecl):
                scope.variables[statement.name] = statement
                scope.declared.append((statement.name, None, statement.line))
            elif isinstance(statement, Label):
                scope.declared.append((statement.name, None, statement.line))
            elif isinstance(statement, Scope):
                self._statements(statement.body, scope)
        for name, count, line in scope.declared:
            own = {name} if count is None else {f"{name}{i}" for i in range(count)}
            if not own & self.used:
                shown = name if count is None else f"{name}<{count}>"
                self.notes.append((line, f"{shown} is never used"))
            self.used -= own
        self.used |= outside

    def problem(self, text: str) -> None:
        self.problems.append((self.instruction.line, f"{text}: {self.instruction.text}"))

    # -- one instruction

    def _instruction(self, instruction: Instruction) -> None:
        self.instruction = instruction
        guard = instruction.guard
        if guard is not None:
            self._register(guard, "pred")
        try:
            form = lookup(instruction)
        except PtxError as error:
            line, _, text = str(error).partition(": ")
            self.problems.append((int(line.removeprefix("line ")), text))
            return
        self.names.setdefault(instruction.name, instruction.line)
        if form.completion is not None:
            self.completions.setdefault(form.completion, (instruction.line, instruction.text))
        self._gates(form)
        # bar.arrive counts warps and does not wait, so a guard that is uniform in each warp is harmless there.
        if guard is not None and form.aligned and instruction.name not in ("bar.arrive", "bar.cta.arrive"):
            what = "branch around it" if form.opcode != "bar" else "branch around it, or write barrier without .aligned"
            self.problem(f"{instruction.name} under a guard: all threads must execute it together ({what})")
        for index, (wanted, operand) in enumerate(zip(form.operands, instruction.operands, strict=True)):
            if isinstance(operand, Pair):
                self._register(operand.second, "pred") if operand.second != _SINK else None
                operand = operand.first
            if operand == _SINK:
                continue
            kind = self._choose(wanted.kinds, operand)
            if kind is None:
                self.problem(f"operand {index} is not {wanted}")
                continue
            if kind.version > self.module.version:
                self.problem(f"operand {index} as {kind} needs .version {kind.version[0]}.{kind.version[1]}")
            effects = [effect for effect in form.effects if effect.operand == index]
            self._operand(kind, operand, wanted.role != "read", effects[0] if effects else None)
        self._bulk_size(form)
        if form.opcode in ("bar", "barrier") and form.collective == "cta":
            self._barrier(form)

    def _choose(self, kinds: tuple[Kind, ...], operand: Operand) -> Kind | None:
        """The kind an operand is meant to be; between a predicate and a number its declared type decides."""
        fitting = [kind for kind in kinds if kind.fits(operand)]
        if len(fitting) > 1 and isinstance(operand, Reg):
            is_predicate = self.scope.registers.get(operand.name) == "pred"
            fitting = [kind for kind in fitting if (kind.type == "pred") == is_predicate] or fitting
        return fitting[0] if fitting else None

    def _gates(self, form: Form) -> None:
        admitted = self.admitted.get(id(form))
        if admitted is None:
            admitted = all(
                any(gate.admits(self.module.version, self.module.target) for gate in group) for group in form.gates
            )
            self.admitted[id(form)] = admitted
        if not admitted:
            for group in form.gates:
                if not any(gate.admits(self.module.version, self.module.target) for gate in group):
                    major, minor = self.module.version
                    needs = ", or ".join(str(gate) for gate in group)
                    self.problem(f"needs {needs}; the module has .version {major}.{minor} and {self.module.target}")

    # -- operands

    def _operand(self, kind: Kind, operand: Operand, written: bool, effect: Effect | None) -> None:
        if isinstance(operand, Imm):
            if kind.name in ("register", "predicate"):
                self._immediate(operand, kind.type)
        elif isinstance(operand, Reg):
            self._register(operand, kind.type, kind.wide, written)
        elif isinstance(operand, Vec):
            self._vector(kind, operand, written)
        elif isinstance(operand, Addr):
            self._address(kind, operand, effect)
        elif isinstance(operand, Sym):
            self._symbol(kind, operand)

    def _register(self, operand: Operand, kind: str, wide: bool = False, written: bool = False) -> None:
        assert isinstance(operand, Reg)
        name = operand.name
        declared = self.scope.registers.get(name)
        if declared is None:
            self._special(name, kind, written)
            return
        self.used.add(name)
        if operand.negated and kind != "pred":
            self.problem(f"only a predicate can be negated, {name} is .{declared}")
        elif not agrees(kind, declared, wide):
            shown = kind.replace("x", "b") if kind[0] == "x" else kind
            self.problem(f"register {name} is .{declared}, which .{shown} does not take")

    def _special(self, name: str, kind: str, written: bool) -> None:
        declared = SPECIAL_REGISTERS.get(name)
        if declared is None:
            if f"{name}.x" in SPECIAL_REGISTERS:
                self.problem(f"special register {name} lacks a component (.x, .y or .z)")
            else:
                self.problem(f"register {name} is not declared")
        elif written:
            self.problem(f"special register {name} cannot be written")
        elif self.instruction.opcode not in ("mov", "cvt"):
            self.problem(f"special register {name} can be read by mov and cvt only")
        elif not agrees(kind, declared):
            self.problem(f"special register {name} is .{declared}, which .{kind} does not take")

    def _immediate(self, operand: Imm, kind: str) -> None:
        value = operand.value
        if kind in ("f32", "f64"):
            if isinstance(value, int):
                self.problem(f"{operand.text} is an integer where .{kind} wants a float (write {operand.text}.0)")
            return
        if kind in ("f16", "bf16", "f16x2", "bf16x2", "f32x2", "tf32", "x8", "x16", "x32", "b128", "u16x2", "s16x2"):
            self.problem(f".{kind} takes no immediate")
            return
        if kind == "pred":
            if isinstance(value, float):
                self.problem(f"{operand.text} is not a truth value")
            return
        bits = 8 * type_bytes(kind)
        if isinstance(value, float):
            width = 32 if operand.bits is not None and operand.text[1] in "fF" else 64
            if kind[0] != "b" or width != bits:
                self.problem(f"{operand.text} is a float where .{kind} stands")
        elif not -(1 << (bits - 1)) <= value < 1 << bits:
            self.problem(f"{operand.text} does not fit into {bits} bits")

    def _vector(self, kind: Kind, operand: Vec, written: bool) -> None:
        element = kind.type
        if kind.name == "pack":
            total = type_bytes(kind.type)
            if total % len(operand.items):
                self.problem(f"{len(operand.items)} elements do not make up .{kind.type}")
                return
            element = f"b{8 * total // len(operand.items)}"
        widths = set()
        for item in operand.items:
            if item == _SINK:
                if not written:
                    self.problem("the sink _ cannot be read")
            elif isinstance(item, Reg):
                self._register(item, element, kind.wide, written)
                if item.name in self.scope.registers and self.scope.registers[item.name] != "pred":
                    widths.add(type_bytes(self.scope.registers[item.name]))
            elif isinstance(item, Imm) and not written and (kind.immediate or kind.name == "pack"):
                self._immediate(item, "b32" if element == "x32" else element)
            else:
                self.problem(f"a vector element is not a .{element} register")
        if len(widths) > 1:
            self.problem("the elements of the vector differ in width")

    def _address(self, kind: Kind, operand: Addr, effect: Effect | None) -> None:
        base = operand.base
        narrow = kind.space in _NARROW_SPACES
        if isinstance(base, Reg):
            declared = self.scope.registers.get(base.name)
            if declared is None:
                self.problem(f"register {base.name} is not declared")
            else:
                self.used.add(base.name)
                if not (agrees("u64", declared) or narrow and agrees("u32", declared)):
                    allowed = "32- or 64-bit" if narrow else "64-bit"
                    self.problem(f"register {base.name} is .{declared}; a {kind.space} address is a {allowed} integer")
        elif isinstance(base, Imm):
            if kind.space != "local":
                self.problem(f"an immediate address is not allowed in {kind.space} space")
        else:
            self._variable_address(kind, base.name, operand, effect)
        for coordinate in operand.coordinates:
            if isinstance(coordinate, Reg):
                self._register(coordinate, "s32")
            elif isinstance(coordinate, Imm):
                self._immediate(coordinate, "s32")
            else:
                self.problem("a coordinate is not a .s32 register or immediate")

    def _variable_address(self, kind: Kind, name: str, operand: Addr, effect: Effect | None) -> None:
        variable = self.scope.variables.get(name)
        if variable is None:
            self.problem(f"{name} is not a variable or parameter")
            return
        self.used.add(name)
        space = _space(variable)
        wanted = kind.space.split("::")[0]
        if kind.coordinates or not (wanted == space or wanted == "generic" and space in ("global", "shared", "local")):
            self.problem(f"{name} is in {space} space, the instruction addresses {kind.space}")
            return
        if effect is None or effect.access == "hint":
            return
        size = effect.bytes
        if size is None and effect.bytes_operand is not None:
            amount = self.instruction.operands[effect.bytes_operand]
            size = amount.value if isinstance(amount, Imm) and isinstance(amount.value, int) else None
        if size is None:
            return
        # Bulk copies want 16 bytes whatever their size; other accesses their own size.
        align = 16 if effect.bytes_operand is not None and effect.proxy == "async" else size
        if align & (align - 1) == 0 and align:
            if operand.offset % align:
                self.problem(f"offset {operand.offset} of {name} is not a multiple of the {align} bytes accessed")
            elif variable.align < align:
                self.problem(f"{name} is aligned to {variable.align} bytes, the access needs {align}")
        known = variable.size_bytes
        if known and not 0 <= operand.offset <= known - size:
            self.problem(f"bytes {operand.offset}..{operand.offset + size - 1} lie outside {name} ({known} bytes)")

    def _symbol(self, kind: Kind, operand: Sym) -> None:
        if kind.name == "label":
            self.used.add(operand.name)
            if operand.name not in self.scope.labels:
                self.problem(f"label {operand.name} does not exist in this scope or one around it")
            return
        variable = self.scope.variables.get(operand.name)
        if variable is None:
            self.problem(f"{operand.name} is not a variable or parameter")
            return
        self.used.add(operand.name)
        space = _space(variable)
        if kind.space and kind.space.split("::")[0] != space:
            self.problem(f"{operand.name} is in {space} space, the instruction wants {kind.space}")
        if space != "shared" and self.instruction.opcode == "mov":
            bits = 8 * type_bytes(self.instruction.modifiers[-1])
            if bits != 64:
                self.problem(f"the address of {operand.name} in {space} space does not fit into {bits} bits")

    def _bulk_size(self, form: Form) -> None:
        for effect in form.effects:
            if effect.proxy == "async" and effect.bytes_operand is not None:
                amount = self.instruction.operands[effect.bytes_operand]
                if isinstance(amount, Imm) and amount.value % 16:
                    self.problem(f"{amount.text} bytes are not a multiple of 16")
                return

    def _barrier(self, form: Form) -> None:
        # arrive and sync: number, threads; red: destination, number, threads (if there are four operands), predicate.
        operands = self.instruction.operands
        if "red" in form.modifiers:
            operands = operands[1:-1]
        number = operands[0]
        if isinstance(number, Imm) and not 0 <= number.value <= 15:
            self.problem(f"barrier number {number.text} is outside 0..15")
        threads = operands[1] if len(operands) > 1 else None
        if isinstance(threads, Imm) and (threads.value <= 0 or threads.value % 32):
            self.problem(f"the number of threads {threads.text} is not a positive multiple of 32")

    # -- the entry as a whole

    def _present(self, prefixes: tuple[str, ...]) -> bool:
        return any(name == prefix or name.startswith(prefix + ".") for name in self.names for prefix in prefixes)

    def _endings(self) -> None:
        for completion, (line, text) in self.completions.items():
            for what, prefixes in _ENDINGS.get(completion, []):
                if not self._present(prefixes):
                    self.problems.append((line, f"{what} is missing in the entry ({' or '.join(prefixes)}): {text}"))

    def _directives(self) -> None:
        names = {name for name, _ in self.entry.directives}
        for name in sorted(names):
            gate = _DIRECTIVE_GATES.get(name)
            if gate and not gate.admits(self.module.version, self.module.target):
                self.problems.append((self.entry.line, f".{name} needs {gate}"))
        bounded = "maxnreg" in names or "minnctapersm" in names and names & {"maxntid", "reqntid"}
        for name, line in self.names.items():
            if name.startswith("setmaxnreg") and not bounded:
                text = "setmaxnreg is ignored unless .maxnreg, or .maxntid with .minnctapersm, bounds the registers"
                self.problems.append((line, text))
                break

    def _shared_size(self) -> None:
        total = 0
        for variable in (*self.module.variables, *_shared_variables(self.entry.body)):
            if variable.space == "shared":
                total = -(-total // variable.align) * variable.align + variable.size_bytes
        if total > _STATIC_SHARED_LIMIT and not Gate((7, 8), "90+").admits((9, 9), self.module.target):
            text = f"{total} bytes of static .shared exceed {_STATIC_SHARED_LIMIT} (use .extern .shared)"
            self.problems.append((self.entry.line, text))


def _space(variable: VarDecl | ParamDecl) -> str:
    return variable.space if isinstance(variable, VarDecl) else "param"


def _shared_variables(body: tuple[Statement, ...]) -> Iterator[VarDecl]:
    for statement in body:
        if isinstance(statement, VarDecl):
            yield statement
        elif isinstance(statement, Scope):
            yield from _shared_variables(statement.body)
