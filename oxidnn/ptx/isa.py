"""The instruction table: which forms exist, what their operands are, what they need, and what they do to memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from oxidnn.errors import PtxError
from oxidnn.ptx.forms import FORMS, MACROS, MODIFIER_GATES
from oxidnn.ptx.nodes import Addr, Imm, Instruction, Operand, Pair, Reg, Sym, Vec
from oxidnn.ptx.tokens import RESERVED_REGISTERS, SPECIAL_REGISTERS, TYPE_BYTES

__all__ = [
    "Effect", "Form", "Gate", "Kind", "OperandForm", "RESERVED_REGISTERS", "SPECIAL_REGISTERS", "TARGET_VERSIONS",
    "agrees", "forms", "lookup", "type_bytes",
]  # fmt: skip

#: First PTX version that knows a target.
TARGET_VERSIONS: dict[str, tuple[int, int]] = {
    "sm_80": (7, 0), "sm_86": (7, 1), "sm_87": (7, 4), "sm_88": (9, 0), "sm_89": (7, 8),
    "sm_90": (7, 8), "sm_90a": (8, 0),
    "sm_100": (8, 6), "sm_100a": (8, 6), "sm_100f": (8, 8), "sm_103": (8, 8), "sm_103a": (8, 8), "sm_103f": (8, 8),
    "sm_110": (9, 0), "sm_110a": (9, 0), "sm_110f": (9, 0),
    "sm_120": (8, 7), "sm_120a": (8, 7), "sm_120f": (8, 8), "sm_121": (8, 8), "sm_121a": (8, 8), "sm_121f": (8, 8),
}  # fmt: skip

_PACKED_BYTES = {
    "bf16": 2, "f16x2": 4, "bf16x2": 4, "u16x2": 4, "s16x2": 4, "f32x2": 8, "tf32": 4, "x8": 1, "x16": 2, "x32": 4,
}  # fmt: skip
# Types that only registers of untyped bits hold; xN is what the table calls exactly .bN.
_EXACT = {
    "bf16": "b16", "bf16x2": "b32", "f32x2": "b64", "tf32": "b32", "u16x2": "b32", "s16x2": "b32",
    "x8": "b8", "x16": "b16", "x32": "b32",
}  # fmt: skip
_INTEGERS = frozenset({"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"})


def type_bytes(name: str) -> int:
    """Bytes of one value of an instruction type (`bf16x2` is 4)."""
    return TYPE_BYTES.get(name) or _PACKED_BYTES[name]


@cache
def agrees(kind: str, register: str, wide: bool = False) -> bool:
    """Whether a register declared as `.register` may hold an operand of instruction type `kind`, as ptxas judges it.

    Untyped bits agree with everything of their size, integers with integers, floats with their own type only.
    `wide` (ld, st, cvt) also takes wider registers: any wider one for bits, wider integers or bits for integers,
    wider bits for floats.
    """
    if kind == "pred" or register == "pred":
        return kind == register
    if kind in _EXACT:
        return register == _EXACT[kind]
    need, have = type_bytes(kind), type_bytes(register)
    if have != need and not (wide and have > need):
        return False
    if kind[0] == "b" or register[0] == "b":
        return True
    if kind == "f16x2":
        return register == "f16x2"
    if kind in _INTEGERS:
        return register in _INTEGERS or register == "f16x2"  # ptxas treats .f16x2 registers as 32 untyped bits
    return register == kind


@dataclass(frozen=True, slots=True)
class Gate:
    """One way to satisfy a form: PTX version and target (`89+`, `90a`, `100f`)."""

    version: tuple[int, int]
    target: str

    def admits(self, version: tuple[int, int], target: str) -> bool:
        """Whether a module of that `.version` and `.target` (`sm_90a`) passes."""
        match = re.fullmatch(r"sm_(\d+)([af]?)", target)
        if not match or version < self.version:
            return False
        number, suffix = int(match[1]), match[2]
        wanted = int(self.target[:-1])
        if self.target[-1] == "+":
            return number >= wanted
        if self.target[-1] == "a":
            return number == wanted and suffix == "a"
        # A family is a major architecture: members at or above the one named.
        return number // 10 == wanted // 10 and number >= wanted and suffix in ("a", "f")

    def __str__(self) -> str:
        where = f"sm_{self.target[:-1]} or later" if self.target[-1] == "+" else f"sm_{self.target}"
        return f".version {self.version[0]}.{self.version[1]} and {where}"


Completion = Literal["group", "bulk_group", "wgmma_group", "mbarrier", "tcgen05"]
Collective = Literal["warp", "warpgroup", "cta", "cluster"]
KindName = Literal["register", "predicate", "immediate", "vector", "pack", "address", "symbol", "label", "sink"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One thing an operand may be."""

    name: KindName
    type: str = ""  # of the register, the vector's elements, or what a pack makes up
    count: int = 1  # elements of a vector
    immediate: bool = False  # a literal may stand instead of the register
    wide: bool = False  # the register may be wider than the type
    values: tuple[int, ...] | range | None = None  # an immediate is one of these
    space: str = ""  # of an address ("generic" where the instruction names none) or of a variable ("" is any)
    coordinates: int = 0  # of a tensor address
    descriptor: bool = False  # the register describes a matrix in shared memory
    version: tuple[int, int] = (0, 0)

    def fits(self, operand: Operand) -> bool:
        """Whether the operand has this shape; register types are for the validator."""
        if self.name == "register":
            return isinstance(operand, Reg) and operand.name != "_" or self.immediate and isinstance(operand, Imm)
        if self.name == "predicate":
            return isinstance(operand, Reg) and operand.name != "_" or self.immediate and isinstance(operand, Imm)
        if self.name == "immediate":
            return isinstance(operand, Imm) and (self.values is None or operand.value in self.values)
        if self.name == "vector":
            return isinstance(operand, Vec) and len(operand.items) == self.count
        if self.name == "pack":
            return isinstance(operand, Vec) and len(operand.items) in (2, 4)
        if self.name == "address":
            return isinstance(operand, Addr) and len(operand.coordinates) == self.coordinates
        if self.name == "sink":
            return operand == Reg("_")
        return isinstance(operand, Sym)

    def __str__(self) -> str:
        if self.name in ("register", "vector", "pack"):
            inner = f".{self.type.replace('x', 'b')}" if self.type[0] == "x" else f".{self.type}"
            if self.name == "vector":
                return f"a vector of {self.count} {inner}"
            if self.name == "pack":
                return f"a vector that makes up {inner}"
            return f"{inner} register or immediate" if self.immediate else f"{inner} register"
        if self.name == "immediate":
            if isinstance(self.values, range):
                return f"an immediate in {self.values.start}..{self.values.stop - 1}"
            return "an immediate" + (f" of {list(self.values)}" if self.values else "")
        if self.name == "address":
            tail = f" with {self.coordinates} coordinates" if self.coordinates else ""
            return f"a {self.space} address{tail}"
        return {"sink": "the sink _", "predicate": "a predicate", "symbol": "a variable", "label": "a label"}[self.name]


@dataclass(frozen=True, slots=True)
class OperandForm:
    role: Literal["read", "write", "update"]
    kinds: tuple[Kind, ...]
    sink: bool = False  # `_` may stand instead
    predicate: Literal["", "optional", "required"] = ""  # `d|p`: a predicate beside it

    def fits(self, operand: Operand) -> bool:
        if isinstance(operand, Pair):
            return self.predicate != "" and self._fits(operand.first) and isinstance(operand.second, Reg)
        return self.predicate != "required" and self._fits(operand)

    def _fits(self, operand: Operand) -> bool:
        if self.sink and operand == Reg("_"):
            return True
        return any(kind.fits(operand) for kind in self.kinds)

    def __str__(self) -> str:
        beside = " with |predicate" if self.predicate == "required" else ""
        return " or ".join(str(kind) for kind in self.kinds) + beside


@dataclass(frozen=True, slots=True)
class Effect:
    """What one operand makes the instruction do to memory, for each executing thread.

    `bytes` is None where operand `bytes_operand` says it, or, if that is None too, a tensor map or descriptor does.
    `asynchronous` effects happen after the instruction; see Form.completion for when.
    """

    operand: int
    space: str
    access: Literal["read", "write", "atomic", "hint"]
    bytes: int | None
    bytes_operand: int | None
    asynchronous: bool
    proxy: Literal["generic", "async"]


@dataclass(frozen=True, slots=True)
class Form:
    """One resolved instruction form."""

    opcode: str
    modifiers: tuple[str, ...]
    row: str  # the modifier pattern of the table's row
    bindings: Mapping[str, str]  # named choices that were made: T the type, S the space, V .v4, order, scope, op, ...
    operands: tuple[OperandForm, ...]
    effects: tuple[Effect, ...]
    gates: tuple[tuple[Gate, ...], ...]  # of every group at least one must admit the module
    collective: Collective | None  # which threads execute it together
    aligned: bool  # all threads of the warp must execute the same instruction
    completion: Completion | None  # what asynchronous effects end in


_ACCESS: dict[str, Literal["read", "write", "atomic", "hint"]] = {"r": "read", "w": "write", "a": "atomic", "h": "hint"}


@dataclass(frozen=True, slots=True)
class _Token:
    name: str  # binding, or ""
    choices: frozenset[str]
    same_as: str  # `B:=A`
    unlike: str  # `S:!=D:...`
    optional: bool


class _Row:
    """One line of the table, its modifier pattern split; operands are resolved for a choice of modifiers."""

    def __init__(self, line: str) -> None:
        columns = [part.strip() for part in line.split(";")]
        self.pattern = columns[0]
        self.opcode, *words = self.pattern.split()
        self.tokens = tuple(self._token(word) for word in words)
        self.operand_text = columns[1] if len(columns) > 1 else ""
        self.gate_text = (columns[2] if len(columns) > 2 else "") or "7.0@80+"
        self.gates = tuple(_gate(part) for part in self.gate_text.split())
        # 16 bytes are the widest access of a thread before sm_100.
        self.widest = 32 if "100+" in self.gate_text else 16

    @staticmethod
    def _token(word: str) -> _Token:
        optional = word.endswith("?")
        name, separator, choices = word.rstrip("?").partition(":")
        if not separator or choices.startswith(":"):  # `shared::cta` is no binding
            name, choices = "", word.rstrip("?")
        if choices.startswith("="):
            return _Token(name, frozenset(), choices[1:], "", optional)
        unlike = ""
        if choices.startswith("!="):
            unlike, choices = choices[2:].split(":", 1)
        words: set[str] = set()
        for choice in choices.split("|"):
            words.update(MACROS[choice[1:]].split("|") if choice[0] == "@" else (choice,))
        return _Token(name, frozenset(words), "", unlike, optional)

    def match(self, modifiers: tuple[str, ...]) -> tuple[dict[str, str] | None, int, set[str]]:
        """The bindings, or None with how far the modifiers went and what might have stood there."""
        bindings: dict[str, str] = {}
        position = 0
        wanted: set[str] = set()
        for token in self.tokens:
            choices = {bindings[token.same_as]} if token.same_as else token.choices
            if token.unlike:
                choices = choices - {bindings[token.unlike]}
            if position < len(modifiers) and modifiers[position] in choices:
                if token.name:
                    bindings[token.name] = modifiers[position]
                position += 1
                wanted = set()
            else:
                wanted |= choices
                if not token.optional:
                    return None, position, wanted
        if position < len(modifiers):
            return None, position, wanted
        if "V" in bindings and "T" in bindings and type_bytes(bindings["T"]) * _number(bindings["V"]) > self.widest:
            return None, position, set()
        return bindings, position, wanted

    def resolve(self, bindings: dict[str, str]) -> tuple[list[OperandForm], list[bool], list[Effect]]:
        """The operands, which of them may be left out, and the effects."""
        operands: list[OperandForm] = []
        optional: list[bool] = []
        effects: list[Effect] = []
        for text in filter(None, (part.strip() for part in self.operand_text.split(","))):
            if ">" in text:
                condition, text = text.split(">")
                name, _, value = condition.partition("=")
                if name not in bindings or value and bindings[name] != value:
                    continue
            optional.append(text.endswith("?"))
            text = text.rstrip("?") if not text.startswith("[") else text
            role: Literal["read", "write", "update"] = "read"
            if text[0] in "=+":
                role = "write" if text[0] == "=" else "update"
                text = text[1:]
            predicate: Literal["", "optional", "required"] = ""
            if text.endswith(("|p", "&p")):
                predicate = "optional" if text[-2] == "|" else "required"
                text = text[:-2]
            sink = text.endswith("_") and text != "_"
            if sink:
                text = text[:-1]
            kinds = []
            for part in text.split("/") if text[0] != "{" or "}/" in text else [text]:
                kind, effect = self._kind(part, bindings, role, len(operands))
                kinds.append(kind)
                if effect:
                    effects.append(effect)
            operands.append(OperandForm(role, tuple(kinds), sink, predicate))
        return operands, optional, effects

    def _kind(self, text: str, bindings: dict[str, str], role: str, index: int) -> tuple[Kind, Effect | None]:
        text, _, since = text.partition("^")
        version = _version(since) if since else (0, 0)
        literal = role == "read" and not text.endswith("!")
        text = text.rstrip("!")
        if text == "_":
            return Kind("sink"), None
        if text == "p":
            return Kind("predicate", "pred", immediate=literal, version=version), None
        if text == "label":
            return Kind("label"), None
        if text == "sym":
            return Kind("symbol", space=bindings.get("S", "")), None
        if text == "pack":
            return Kind("pack", bindings["T"], immediate=literal), None
        if text == "desc":
            return Kind("register", "u64", descriptor=True), Effect(index, "shared", "read", None, None, True, "async")
        if text[0] == "#":
            return Kind("immediate", values=_values(text[1:])), None
        if text[0] == "[":
            return self._address(text[1:-1].split(), bindings, index)
        if text[0] == "{":
            count_text, element = text[1:-1].split(":")
            kind = bindings.get(element, element)
            wide = self.opcode in ("ld", "ldu") or self.opcode == "st" and not self.pattern.startswith("st async")
            if count_text == "V" and "V" not in bindings:
                return Kind("register", kind, immediate=literal, wide=wide), None
            return Kind("vector", kind, _count(count_text, bindings), literal, wide), None
        wide = text.endswith("~")
        text = text.rstrip("~")
        if text[0] == "2" and text[1:] in bindings:
            half = bindings[text[1:]]
            return Kind("register", f"{half[0]}{2 * int(half[1:])}", immediate=literal), None
        return Kind("register", bindings.get(text, text), immediate=literal, wide=wide, version=version), None

    def _address(self, words: list[str], bindings: dict[str, str], index: int) -> tuple[Kind, Effect]:
        coordinates = 0
        if words[0] == "tensor":
            coordinates = _number(bindings[words[1]])
            words = words[2:]
        space = words[0]
        if space == "S":
            space = bindings.get("S", "generic")
        size = words[2]
        amount: int | None = None
        operand: int | None = None
        if size[0] == "#":
            operand = int(size[1:])
        elif size in bindings:
            amount = type_bytes(bindings[size])
        elif size == "T*V":
            amount = type_bytes(bindings["T"]) * _number(bindings.get("V", "1"))
        elif size != "?":
            amount = int(size)
        how = words[3] if len(words) > 3 else ""
        proxy: Literal["generic", "async"] = "async" if how == "async" else "generic"
        effect = Effect(index, space, _ACCESS[words[1]], amount, operand, how != "", proxy)
        return Kind("address", space=space, coordinates=coordinates), effect


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _gate(text: str) -> Gate:
    version, target = text.split("@")
    return Gate(_version(version), target)


def _number(text: str) -> int:
    """The number in a modifier: N of m64nNk16, otherwise the first one (`v4`, `x2`, `3d`)."""
    match = re.search(r"n(\d+)k", text) or re.search(r"(\d+)", text)
    assert match, text
    return int(match[1])


def _count(text: str, bindings: dict[str, str]) -> int:
    """`4`, `V`, `N/2`, `2*N`, `D-2`."""
    if text.isdigit():
        return int(text)
    match = re.fullmatch(r"(?:(\d+)\*)?([A-Z])(?:([/-])(\d+))?", text)
    assert match, text
    number = _number(bindings[match[2]]) * int(match[1] or 1)
    if match[3] == "/":
        return number // int(match[4])
    return number - int(match[4] or 0)


def _values(text: str) -> tuple[int, ...] | range | None:
    if not text:
        return None
    if ".." in text:
        first, last = text.split("..")
        return range(int(first), int(last) + 1)
    return tuple(int(part) for part in text.split("|"))


@cache
def _rows() -> dict[str, tuple[_Row, ...]]:
    found: dict[str, list[_Row]] = {}
    for line in FORMS.splitlines():
        if line and not line.startswith("#"):
            row = _Row(line)
            found.setdefault(row.opcode, []).append(row)
    return {opcode: tuple(rows) for opcode, rows in found.items()}


def _collective(opcode: str, modifiers: tuple[str, ...]) -> Collective | None:
    if opcode in ("bar", "barrier"):
        return "warp" if "warp" in modifiers else "cluster" if "cluster" in modifiers else "cta"
    if opcode in ("wgmma", "setmaxnreg"):
        return "warpgroup"
    return "warp" if "sync" in modifiers else None


def _completion(row: _Row, bindings: dict[str, str]) -> Completion | None:
    if "done" in bindings:
        return "bulk_group" if bindings["done"] == "bulk_group" else "mbarrier"
    if row.pattern.startswith("wgmma mma_async"):
        return "wgmma_group"
    if row.opcode == "tcgen05":
        return "tcgen05"
    return "group" if "queued" in row.operand_text else None


@lru_cache(maxsize=4096)
def _candidates(opcode: str, modifiers: tuple[str, ...]) -> tuple[tuple[_Row, dict[str, str]], ...]:
    """The rows that the name matches; PtxError names the modifier that none of them knows."""
    rows = _rows().get(opcode)
    if rows is None:
        raise PtxError(f"unknown instruction {opcode!r}")
    found = []
    furthest, wanted = -1, set[str]()
    for row in rows:
        bindings, position, missing = row.match(modifiers)
        if bindings is not None:
            found.append((row, bindings))
        elif position > furthest:
            furthest, wanted = position, set(missing)
        elif position == furthest:
            wanted |= missing
    if found:
        return tuple(found)
    allowed = ", ".join(f".{name}" for name in sorted(wanted)[:24]) or "nothing"
    name = ".".join((opcode, *modifiers))
    if furthest < len(modifiers):
        raise PtxError(f"unknown modifier .{modifiers[furthest]} in {name} (allowed there: {allowed})")
    raise PtxError(f"{name} lacks a modifier (one of {allowed})")


@lru_cache(maxsize=8192)
def _forms(opcode: str, modifiers: tuple[str, ...], count: int) -> tuple[Form, ...]:
    """Every form of that name that takes `count` operands."""
    found = []
    for row, bindings in _candidates(opcode, modifiers):
        operands, optional, effects = row.resolve(bindings)
        spare = len(operands) - count
        if spare < 0 or spare > sum(optional):
            continue
        # Operands that may be left out are filled from the left, so the last ones go.
        for index in reversed(range(len(operands))):
            if spare and optional[index]:
                del operands[index]
                spare -= 1
        present = set(modifiers)
        gates = [row.gates]
        gates += [(_gate(text),) for names, text in MODIFIER_GATES.items() if present.issuperset(names.split())]
        found.append(
            Form(
                opcode, modifiers, row.pattern, bindings, tuple(operands), tuple(effects), tuple(gates),
                _collective(opcode, modifiers),
                "aligned" in modifiers or opcode == "bar" and "warp" not in modifiers,
                _completion(row, bindings),
            )
        )  # fmt: skip
    return tuple(found)


def forms(opcode: str, modifiers: tuple[str, ...]) -> tuple[Form, ...]:
    """Every form the table holds under that name, with each possible number of operands. PtxError if there is none."""
    counts = sorted({n for row, bindings in _candidates(opcode, modifiers) for n in _counts(row, bindings)})
    return tuple(form for count in counts for form in _forms(opcode, modifiers, count))


def _counts(row: _Row, bindings: dict[str, str]) -> range:
    operands, optional, _ = row.resolve(bindings)
    return range(len(operands) - sum(optional), len(operands) + 1)


def lookup(instruction: Instruction) -> Form:
    """The form of an instruction, chosen by its name and the shape of its operands (register types are not looked at).

    Errors: PtxError naming the line and the instruction, modifier or operand that no row of the table has.
    """
    operands = instruction.operands
    try:
        found = _forms(instruction.opcode, instruction.modifiers, len(operands))
        for form in found:
            for wanted, operand in zip(form.operands, operands, strict=True):
                if not wanted.fits(operand):
                    break
            else:
                return form
        if not found:
            counts = {
                n
                for row, bindings in _candidates(instruction.opcode, instruction.modifiers)
                for n in _counts(row, bindings)
            }
            allowed = " or ".join(str(count) for count in sorted(counts))
            raise PtxError(f"{instruction.name} takes {allowed} operands, not {len(operands)}")
        for index, (wanted, operand) in enumerate(zip(found[0].operands, operands, strict=True)):
            if not wanted.fits(operand):
                raise PtxError(f"operand {index} of {instruction.name} is not {wanted}")
        raise AssertionError("a form that fits was passed over")
    except PtxError as error:
        raise PtxError(f"line {instruction.line}: {error}: {instruction.text}") from None
