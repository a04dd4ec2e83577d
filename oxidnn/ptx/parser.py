"""PTX text to nodes: a hand-written scanner, one regular expression per statement.

Whatever is not understood raises PtxError with the line number and the line's text.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from typing import NoReturn

from oxidnn.errors import PtxError
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
from oxidnn.ptx.tokens import (
    IDENTIFIER,
    REGISTER,
    RESERVED_REGISTERS,
    TYPE_BYTES,
    leading_comments,
    literal,
    strip_comments,
)  # fmt: skip

_STATEMENT = re.compile(
    rf"""\s*(?:
    (?P<open>\{{) | (?P<close>\}})
  | (?P<label>{IDENTIFIER})\s*:(?!:)
  | (?P<instruction>(?:@(?P<not>!?)\s*(?P<guard>{REGISTER})\s*)?
        (?P<opcode>[a-z][a-z0-9_]*)(?P<modifiers>(?:\.\w+(?:::\w+)*)*)(?P<operands>[^;]*));
  | (?P<location>\.(?:loc|file)\b[^\n]*)
  | (?P<declaration>\.[^;]*);
  )""",
    re.VERBOSE,
)
_PIECE = re.compile(r"\s*(\[[^\]]*\]|\{[^{}]*\}|[^,\[\]{}]+?)\s*(?:,|$)")
_REGISTER = re.compile(rf"(!?)({REGISTER}(?:\.[xyzw])?|_)")
_SYMBOL = re.compile(rf"({IDENTIFIER})(?:\s*\+\s*(-?\s*\w+))?")
_ADDRESS = re.compile(rf"\s*({REGISTER}|{IDENTIFIER}|\w+)\s*(?:\+\s*(-?\s*\w+))?\s*(?:,\s*(\{{.*\}})\s*)?", re.DOTALL)
_RANGE = re.compile(rf"({REGISTER})(?:\s*<\s*(\d+)\s*>)?")
_SPACE = re.compile(r"\s+")

_HEADER = re.compile(
    r"""\s*(?:
    \.version\s+(?P<major>\d+)\.(?P<minor>\d+)
  | \.target\s+(?P<target>\w+)(?P<options>(?:\s*,\s*\w+)*)
  | \.address_size\s+(?P<address_size>\d+)
  | (?P<location>\.(?:loc|file)\b[^\n]*)
  | (?P<entry>(?:\.(?:visible|weak)\s+)?\.entry\s+(?P<name>[A-Za-z_$%][\w$]*)\s*(?:\((?P<params>[^)]*)\))?)
  | (?P<variable>\.[^;]*;)
  )""",
    re.VERBOSE,
)
_DIRECTIVE = re.compile(
    r"""\s*(?:
    (?P<open>\{)
  | \.(?P<name>maxntid|reqntid|minnctapersm|maxnctapersm|maxnreg|reqnctapercluster|maxclusterrank|explicitcluster
        |blocksareclusters|noreturn)\b\s*(?P<values>\d+(?:\s*,\s*\d+)*)?
  | \.pragma\s+"(?P<pragma>[^"\n]*)"\s*;
  )""",
    re.VERBOSE,
)
_DIRECTIVE_VALUES = {  # how many numbers each takes
    "maxntid": (1, 3), "reqntid": (1, 3), "reqnctapercluster": (1, 3), "minnctapersm": (1, 1), "maxnctapersm": (1, 1),
    "maxnreg": (1, 1), "maxclusterrank": (1, 1), "explicitcluster": (0, 0), "blocksareclusters": (0, 0),
    "noreturn": (0, 0),
}  # fmt: skip
_PARAM = re.compile(
    r"""\s*\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+
    (?P<pointer>\.ptr\s+(?:\.(?P<space>global|shared|const|local)\s+)?(?:\.align\s+(?P<pointer_align>\d+)\s+)?)?
    (?P<name>[A-Za-z_$%][\w$]*)\s*(?:\[\s*(?P<count>\w+)\s*\])?\s*""",
    re.VERBOSE,
)
_VARIABLE = re.compile(
    r"""(?P<linkage>(?:\.(?:extern|visible|weak)\s+)*)\.(?P<space>shared|global|const|local)(?:::cta)?\s+
    (?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?P<declarators>.*)""",
    re.VERBOSE | re.DOTALL,
)
_DECLARATOR = re.compile(
    rf"\s*(?P<name>{IDENTIFIER})\s*(?P<dimensions>(?:\[\s*\w*\s*\]\s*)*)(?:=\s*(?P<initial>\{{.*\}}|[^,]+))?\s*(?:,|$)",
    re.DOTALL,
)
_PRAGMA = re.compile(r'\.pragma\s+"([^"\n]*)"\s*')

_REGISTER_TYPES = frozenset({"pred", *TYPE_BYTES})


def parse(text: str) -> Module:
    """The module that `text` spells.

    Errors: PtxError naming the line for unknown syntax, for a register that shadows a special register, and for a
    register, label or variable defined twice in one scope (a plain name inside a `%name<count>` range included).
    """
    return _Parser(text).module()


def instruction(text: str, line: int) -> Instruction:
    """The one instruction that `text` spells, as if it stood on `line`. PtxError if it is not one."""
    parser = _Parser(text)
    match = _STATEMENT.fullmatch(parser.text.strip())
    if match is None or not match["instruction"]:
        parser.fail(1, "not one instruction")
    return parser.instruction(match, line)


class _Parser:
    def __init__(self, text: str) -> None:
        self.source = text
        self.text = strip_comments(text)
        self.position = 0
        self.line = 1  # line of self.counted
        self.counted = 0
        self.operands: dict[str, Operand] = {}
        self.heads: dict[str, tuple[str, ...]] = {}

    # -- positions and errors

    def line_at(self, position: int) -> int:
        """The line of `position`; positions only ever grow, so each line end is counted once."""
        if position < self.counted:
            return 1 + self.text.count("\n", 0, position)
        self.line += self.text.count("\n", self.counted, position)
        self.counted = position
        return self.line

    def fail(self, line: int, why: str) -> NoReturn:
        lines = self.source.split("\n")
        shown = lines[line - 1].strip() if line <= len(lines) else ""
        raise PtxError(f"line {line}: {why}: {shown}")

    def fail_here(self, why: str) -> NoReturn:
        rest = self.text[self.position :]
        start = self.position + len(rest) - len(rest.lstrip())
        self.fail(self.line_at(min(start, len(self.text.rstrip()))), why)

    def start_of(self, match: re.Match[str], group: str) -> int:
        return self.line_at(match.start(group))

    # -- module level

    def module(self) -> Module:
        version: tuple[int, int] | None = None
        target: str | None = None
        options: tuple[str, ...] = ()
        address_size = 64
        variables: list[VarDecl] = []
        entries: list[Entry] = []
        names: dict[str, int] = {}
        end = len(self.text.rstrip())
        while self.position < end:
            match = _HEADER.match(self.text, self.position)
            if not match:
                self.fail_here("not a directive, variable or entry")
            start = self.position
            self.position = match.end()
            if match["major"]:
                version = (int(match["major"]), int(match["minor"]))
            elif match["target"]:
                target = match["target"]
                options = tuple(part.strip() for part in match["options"].split(",") if part.strip())
            elif match["address_size"]:
                address_size = int(match["address_size"])
                if address_size != 64:
                    self.fail(self.start_of(match, "address_size"), "address size is not 64")
            elif match["location"]:
                pass
            elif match["entry"]:
                line = self.start_of(match, "entry")
                self.declare(names, match["name"], line, "entry")
                entries.append(self.entry(match, line, dict(names)))
            else:
                line = self.start_of(match, "variable")
                if match["variable"].startswith((".visible .func", ".func", ".extern .func", ".reg", ".param")):
                    self.fail(line, "only entries and variables may stand at module level")
                for variable in self.variable(match["variable"][:-1], line):
                    self.declare(names, variable.name, line, "variable")
                    variables.append(variable)
            assert self.position > start
        if version is None:
            self.fail(1, "no .version directive")
        if target is None:
            self.fail(1, "no .target directive")
        return Module(
            version, target, address_size, tuple(variables), tuple(entries), leading_comments(self.source), options
        )

    def declare(self, names: dict[str, int], name: str, line: int, kind: str) -> None:
        if name in names:
            self.fail(line, f"duplicate definition of {kind} {name!r} (first on line {names[name]})")
        names[name] = line

    def variable(self, text: str, line: int) -> list[VarDecl]:
        match = _VARIABLE.fullmatch(text.strip())
        if not match:
            self.fail(line, "not a variable declaration")
        kind = match["type"]
        if kind not in TYPE_BYTES:
            self.fail(line, f"unknown variable type .{kind}")
        size = TYPE_BYTES[kind]
        align = int(match["align"]) if match["align"] else size
        if align & (align - 1) or align == 0:
            self.fail(line, f"alignment {align} is not a power of two")
        is_extern = ".extern" in match["linkage"]
        found: list[VarDecl] = []
        declarators = match["declarators"]
        position = 0
        while position < len(declarators):
            part = _DECLARATOR.match(declarators, position)
            if not part:
                self.fail(line, "not a variable declaration")
            count = 1
            for dimension in re.findall(r"\[\s*(\w*)\s*\]", part["dimensions"]):
                count *= self.integer(dimension, line) if dimension else 0
            initial: tuple[int | float, ...] = ()
            if part["initial"]:
                initial = self.initial(part["initial"], kind, line)
                if count == 0:
                    count = len(initial)
            if len(initial) > count:
                self.fail(line, f"{len(initial)} initial values for {count} elements")
            if count == 0 and not is_extern:
                self.fail(line, f"variable {part['name']!r} has no size and is not .extern")
            found.append(VarDecl(match["space"], kind, part["name"], align, count * size, is_extern, line, initial))
            position = part.end()
        if not found:
            self.fail(line, "not a variable declaration")
        return found

    def initial(self, text: str, kind: str, line: int) -> tuple[int | float, ...]:
        values: list[int | float] = []
        for part in text.replace("{", " ").replace("}", " ").split(","):
            value = literal(part.strip())
            if value is None:
                self.fail(line, f"initial value {part.strip()!r} is not a number")
            # A .f32 variable holds the literal rounded to its type.
            single = kind == "f32" and isinstance(value.value, float)
            values.append(struct.unpack("<f", struct.pack("<f", value.value))[0] if single else value.value)
        return tuple(values)

    def integer(self, text: str, line: int) -> int:
        value = literal(_SPACE.sub("", text))
        if value is None or not isinstance(value.value, int):
            self.fail(line, f"{text!r} is not an integer")
        return value.value

    # -- entries

    def entry(self, head: re.Match[str], line: int, names: dict[str, int]) -> Entry:
        params: list[ParamDecl] = []
        if head["params"] and head["params"].strip():
            position = head.start("params")
            for part in head["params"].split(","):
                at = self.line_at(position + len(part) - len(part.lstrip()))
                param = self.param(part, at)
                self.declare(names, param.name, at, "parameter")
                params.append(param)
                position += len(part) + 1
        directives: list[tuple[str, tuple[int, ...]]] = []
        pragmas: list[str] = []
        while True:
            match = _DIRECTIVE.match(self.text, self.position)
            if not match:
                self.fail_here("not a performance directive or the body of an entry")
            self.position = match.end()
            if match["open"]:
                break
            if match["pragma"] is not None:
                pragmas.append(match["pragma"])
                continue
            name = match["name"]
            values = tuple(int(part) for part in (match["values"] or "").split(",") if part)
            least, most = _DIRECTIVE_VALUES[name]
            if not least <= len(values) <= most:
                self.fail(self.start_of(match, "name"), f".{name} takes {least} to {most} numbers, not {len(values)}")
            directives.append((name, values + (1,) * (3 - len(values)) if most == 3 else values))
        body = self.body(names, line)
        return Entry(head["name"], tuple(params), tuple(directives), body, line, tuple(pragmas))

    def param(self, text: str, line: int) -> ParamDecl:
        match = _PARAM.fullmatch(text)
        if not match or match["type"] not in TYPE_BYTES:
            self.fail(line, "not a parameter")
        size = TYPE_BYTES[match["type"]]
        count = self.integer(match["count"], line) if match["count"] else 1
        pointer = (match["space"] or "") if match["pointer"] else None
        pointer_align = int(match["pointer_align"] or 0)
        align = int(match["align"] or size)
        return ParamDecl(match["type"], match["name"], size * count, align, line, pointer, pointer_align)

    # -- statements

    def body(self, names: dict[str, int], opened: int) -> tuple[Statement, ...]:
        """The statements up to the closing brace; `names` holds what this scope defines (parameters at the top)."""
        statements: list[Statement] = []
        append = statements.append
        text = self.text
        while True:
            match = _STATEMENT.match(text, self.position)
            if match is None:
                if not text[self.position :].strip():
                    self.fail(opened, "the brace opened here is never closed")
                self.fail_here("syntax error, perhaps a missing ';'")
            self.position = match.end()
            kind = match.lastgroup
            if match["instruction"]:
                line = self.line_at(match.start("instruction"))
                append(self.instruction(match, line))
            elif match["label"]:
                line = self.line_at(match.start("label"))
                self.declare(names, match["label"], line, "label")
                append(Label(match["label"], line))
            elif match["declaration"]:
                line = self.line_at(match.start("declaration"))
                self.declaration(match["declaration"], line, names, statements)
            elif match["location"]:
                continue
            elif kind == "open":
                line = self.line_at(match.start("open"))
                append(Scope(self.body({}, line), line))
            else:
                return tuple(statements)

    def declaration(self, text: str, line: int, names: dict[str, int], statements: list[Statement]) -> None:
        head = text.split(None, 1)[0]
        if head == ".reg":
            statements.append(self.registers(text, line, names))
        elif head == ".pragma":
            match = _PRAGMA.fullmatch(text)
            last = statements[-1] if statements else None
            if not match or not isinstance(last, Label):
                self.fail(line, "a .pragma inside a body must follow a label directly")
            statements[-1] = dataclasses.replace(last, pragma=match[1])
        else:
            for variable in self.variable(text, line):
                self.declare(names, variable.name, line, "variable")
                statements.append(variable)

    def registers(self, text: str, line: int, names: dict[str, int]) -> RegDecl:
        parts = text.split(None, 2)
        if len(parts) != 3 or parts[1][0] != "." or parts[1][1:] not in _REGISTER_TYPES:
            self.fail(line, "not a register declaration")
        found: list[tuple[str, int | None]] = []
        for part in parts[2].split(","):
            match = _RANGE.fullmatch(part.strip())
            if not match:
                self.fail(line, f"register name {part.strip()!r} is not of the form %name or %name<count>")
            name, count = match[1], int(match[2]) if match[2] else None
            if name in RESERVED_REGISTERS:
                self.fail(line, f"register {name!r} shadows the special register of that name")
            found.append((name, count))
            for each in (name,) if count is None else (f"{name}{i}" for i in range(count)):
                if each in names:
                    self.declare(names, each, line, "register")
                if each in RESERVED_REGISTERS:
                    self.fail(line, f"register {each!r} shadows the special register of that name")
                names[each] = line
        return RegDecl(parts[1][1:], tuple(found), line)

    def instruction(self, match: re.Match[str], line: int) -> Instruction:
        modifiers = match["modifiers"]
        split = self.heads.get(modifiers)
        if split is None:
            split = self.heads[modifiers] = tuple(modifiers.split(".")[1:])
        guard = Reg(match["guard"], bool(match["not"])) if match["guard"] else None
        operands = self.operand_list(match["operands"].strip(), line)
        return Instruction(match["opcode"], split, operands, guard, line, " ".join(match["instruction"].split()) + ";")

    # -- operands

    def operand_list(self, text: str, line: int) -> tuple[Operand, ...]:
        if not text:
            return ()
        if "[" in text or "{" in text:
            pieces: list[str] = []
            position = 0
            while position < len(text):
                match = _PIECE.match(text, position)
                if not match:
                    self.fail(line, "cannot read the operands, perhaps a missing ';' or ','")
                pieces.append(match[1])
                position = match.end()
            if text[-1] == ",":
                self.fail(line, "an operand is missing after the last ','")
        else:
            pieces = text.split(",")
        cache = self.operands
        found = []
        for piece in pieces:
            operand = cache.get(piece)
            if operand is None:
                operand = cache[piece] = self.operand(piece.strip(), line)
            found.append(operand)
        return tuple(found)

    def operand(self, text: str, line: int) -> Operand:
        if not text:
            self.fail(line, "an operand is empty")
        if text[0] == "[":
            return self.address(text[1:-1], line)
        if text[0] == "{":
            return Vec(self.operand_list(text[1:-1].strip(), line))
        if match := _REGISTER.fullmatch(text):
            return Reg(match[2], bool(match[1]))
        if "|" in text:
            first, second = text.split("|", 1)
            return Pair(self.operand(first.strip(), line), self.operand(second.strip(), line))
        if (number := literal(text)) is not None:
            return number
        if match := _SYMBOL.fullmatch(text):
            return Sym(match[1], self.integer(match[2], line) if match[2] else 0)
        self.fail(line, f"cannot read the operand {text!r}, perhaps a missing ';' or ','")

    def address(self, text: str, line: int) -> Addr:
        match = _ADDRESS.fullmatch(text)
        if not match:
            self.fail(line, f"cannot read the address [{text.strip()}] (a negative offset is written [%base+-4])")
        name, number, vector = match.groups()
        base: Reg | Sym | Imm
        if name[0] == "%":
            base = Reg(name)
        elif (value := literal(name)) is not None:
            base = value
        elif re.fullmatch(IDENTIFIER, name):
            base = Sym(name)
        else:
            self.fail(line, f"cannot read the address [{text.strip()}]")
        offset = self.integer(number, line) if number else 0
        coordinates = self.operand_list(vector[1:-1].strip(), line) if vector else ()
        return Addr(base, offset, coordinates)
