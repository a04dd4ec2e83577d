"""Nodes to PTX text, such that `same(parse(print_module(module)), module)`."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

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
from oxidnn.ptx.tokens import TYPE_BYTES


def print_module(module: Module) -> str:
    """The module as PTX."""
    return "\n".join(_module(module)) + "\n"


def same(first: object, second: object) -> bool:
    """Whether two nodes (or tuples of nodes) agree in everything but line numbers and source texts."""
    if type(first) is not type(second):
        return False
    if isinstance(first, tuple):
        assert isinstance(second, tuple)
        return len(first) == len(second) and all(map(same, first, second))
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first) if field.name not in ("line", "text")]
        return all(same(getattr(first, name), getattr(second, name)) for name in names)
    return first == second or first != first and second != second  # a NaN is the same as a NaN


def _module(module: Module) -> Iterator[str]:
    yield from (f"// {comment}".rstrip() for comment in module.comments)
    yield f".version {module.version[0]}.{module.version[1]}"
    yield f".target {', '.join((module.target, *module.target_options))}"
    yield f".address_size {module.address_size}"
    for variable in module.variables:
        yield _variable(variable)
    for entry in module.entries:
        yield ""
        yield from _entry(entry)


def _entry(entry: Entry) -> Iterator[str]:
    yield f".visible .entry {entry.name}("
    yield ",\n".join(f"    {_param(param)}" for param in entry.params)
    yield ")"
    for name, values in entry.directives:
        yield f".{name} {', '.join(map(str, values))}".rstrip()
    for pragma in entry.pragmas:
        yield f'.pragma "{pragma}";'
    yield "{"
    yield from _body(entry.body, "    ")
    yield "}"


def _param(param: ParamDecl) -> str:
    size = TYPE_BYTES[param.type]
    align = f".align {param.align} " if param.align != size else ""
    pointer = ""
    if param.pointer is not None:
        pointer = ".ptr " + (f".{param.pointer} " if param.pointer else "")
        pointer += f".align {param.pointer_align} " if param.pointer_align else ""
    count = f"[{param.size_bytes // size}]" if param.size_bytes != size else ""
    return f".param {align}.{param.type} {pointer}{param.name}{count}"


def _variable(variable: VarDecl) -> str:
    size = TYPE_BYTES[variable.type]
    linkage = ".extern " if variable.is_extern else ""
    count = variable.size_bytes // size
    shown = "[]" if count == 0 else f"[{count}]" if count > 1 else ""
    initial = ""
    if variable.initial:
        values = ", ".join(_initial(variable.type, value) for value in variable.initial)
        initial = f" = {{{values}}}" if shown else f" = {values}"
    return f"{linkage}.{variable.space} .align {variable.align} .{variable.type} {variable.name}{shown}{initial};"


def _initial(kind: str, value: int | float) -> str:
    if isinstance(value, int):
        return str(value)
    if kind == "f32":
        return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"
    return f"0d{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def _body(body: tuple[Statement, ...], indent: str) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, Instruction):
            yield f"{indent}{instruction_text(statement)}"
        elif isinstance(statement, Label):
            yield f"{indent[:-4]}{statement.name}:"
            if statement.pragma:
                yield f'{indent}.pragma "{statement.pragma}";'
        elif isinstance(statement, RegDecl):
            names = ", ".join(name if count is None else f"{name}<{count}>" for name, count in statement.names)
            yield f"{indent}.reg .{statement.type} {names};"
        elif isinstance(statement, VarDecl):
            yield f"{indent}{_variable(statement)}"
        elif isinstance(statement, Scope):
            yield f"{indent}{{"
            yield from _body(statement.body, indent + "    ")
            yield f"{indent}}}"


def instruction_text(instruction: Instruction) -> str:
    """One instruction with its guard and semicolon."""
    guard = ""
    if instruction.guard is not None:
        guard = f"@{'!' if instruction.guard.negated else ''}{instruction.guard.name} "
    operands = ", ".join(operand_text(operand) for operand in instruction.operands)
    return f"{guard}{instruction.name} {operands}".rstrip() + ";"


def operand_text(operand: Operand) -> str:
    if isinstance(operand, Reg):
        return f"!{operand.name}" if operand.negated else operand.name
    if isinstance(operand, Imm):
        return operand.text or _literal(operand)
    if isinstance(operand, Sym):
        return operand.name + (f"+{operand.offset}" if operand.offset else "")
    if isinstance(operand, Vec):
        return "{" + ", ".join(operand_text(item) for item in operand.items) + "}"
    if isinstance(operand, Pair):
        return f"{operand_text(operand.first)}|{operand_text(operand.second)}"
    assert isinstance(operand, Addr)
    inner = operand_text(operand.base) + (f"+{operand.offset}" if operand.offset else "")
    if operand.coordinates:
        inner += ", {" + ", ".join(operand_text(item) for item in operand.coordinates) + "}"
    return f"[{inner}]"


def _literal(operand: Imm) -> str:
    """An immediate that no source text came with: built by a program rather than parsed."""
    if isinstance(operand.value, int):
        return str(operand.value)
    return f"0d{struct.unpack('<Q', struct.pack('<d', operand.value))[0]:016X}"
