"""The frozen nodes a PTX module parses into. Every node keeps its source line (1-based)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reg:
    """A register operand (`%r3`, `%tid.x`); `name` keeps the leading percent sign and any `.x` component."""

    name: str
    negated: bool = False  # `!%p` as an operand, `@!%p` as a guard


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate: an int, or a float with the width its literal gives (`0f3F800000`, `0d...`, decimal)."""

    value: int | float
    bits: int | None = None  # the bit pattern of 0f/0d literals
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sym:
    """A symbol used as a value: the name of a shared, global, local or param variable, or a label."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Addr:
    """`[base + offset]`, or a tensor address `[base, {c0, c1}]` with coordinates (and im2col offsets)."""

    base: Reg | Sym | Imm
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Vec:
    """`{a, b, ...}`; an element may be the sink `_` (a Reg of that name)."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`: a destination with a predicate beside it, as of shfl.sync and setp."""

    first: Operand
    second: Operand


Operand = Reg | Imm | Sym | Addr | Vec | Pair


@dataclass(frozen=True, slots=True)
class Instruction:
    """`@%p opcode.mod.mod a, b, c;` with `modifiers` in written order (types included), all without their dot."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | None
    line: int
    text: str

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True, slots=True)
class Label:
    name: str
    line: int
    pragma: str = ""  # a `.pragma "nounroll";` that follows the label directly


@dataclass(frozen=True, slots=True)
class RegDecl:
    """`.reg .f32 %acc<8>, %x;`: (name, count), where count None means the plain name."""

    type: str
    names: tuple[tuple[str, int | None], ...]
    line: int


@dataclass(frozen=True, slots=True)
class VarDecl:
    """`.shared .align 16 .b8 tile[1024];` in any state space; size_bytes 0 means `.extern ... []`."""

    space: str
    type: str
    name: str
    align: int
    size_bytes: int
    is_extern: bool
    line: int
    initial: tuple[int | float, ...] = ()


@dataclass(frozen=True, slots=True)
class ParamDecl:
    """`.param .u64 ptr_x` or `.param .align 64 .b8 map_a[128]`."""

    type: str
    name: str
    size_bytes: int
    align: int
    line: int
    pointer: str | None = None  # `.ptr .global`: the state space pointed to ("" is generic); None is no `.ptr`
    pointer_align: int = 0  # alignment promised for what `.ptr` points to; 0 is unstated


@dataclass(frozen=True, slots=True)
class Scope:
    """`{ ... }`: registers and labels inside are local to it."""

    body: tuple[Statement, ...]
    line: int


Statement = Instruction | Label | RegDecl | VarDecl | Scope


@dataclass(frozen=True, slots=True)
class Entry:
    """A `.entry`: parameters, performance directives (`maxntid` -> (256, 1, 1), ...) and the body."""

    name: str
    params: tuple[ParamDecl, ...]
    directives: tuple[tuple[str, tuple[int, ...]], ...]
    body: tuple[Statement, ...]
    line: int
    pragmas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Module:
    version: tuple[int, int]
    target: str
    address_size: int
    variables: tuple[VarDecl, ...]
    entries: tuple[Entry, ...]
    comments: tuple[str, ...] = ()  # the leading comment lines, where the spec is written
    target_options: tuple[str, ...] = ()  # `.target sm_90a, debug`: what follows the architecture
