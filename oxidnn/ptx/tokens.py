"""The lexical level of PTX: comments, identifiers, literals, type widths and special registers."""

from __future__ import annotations

import re
import struct

from oxidnn.ptx.nodes import Imm

# Bytes of every type that a register, variable or parameter may have.
TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1,
    "b16": 2, "u16": 2, "s16": 2, "f16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8,
    "b128": 16,
}  # fmt: skip

IDENTIFIER = r"[A-Za-z_$][\w$]*"
REGISTER = r"%[A-Za-z_$][\w$]*"

_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LEADING = re.compile(r"\s*(?://(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/)", re.DOTALL)
_INTEGER = re.compile(r"(-?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0([0-7]+)|([1-9]\d*|0))U?")
_BITS = re.compile(r"0([fF])([0-9a-fA-F]{8})|0([dD])([0-9a-fA-F]{16})")
_DECIMAL = re.compile(r"-?(?:\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)")

_VECTORS = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
_SCALARS_32 = (
    "laneid", "warpid", "nwarpid", "smid", "nsmid", "clock", "clock_hi", "cluster_ctarank", "cluster_nctarank",
    "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge", "dynamic_smem_size",
    "total_smem_size", "aggr_smem_size", "globaltimer_lo", "globaltimer_hi", "reserved_smem_offset_begin",
    "reserved_smem_offset_end", "reserved_smem_offset_cap",
    *(f"envreg{i}" for i in range(32)), *(f"pm{i}" for i in range(8)),
)  # fmt: skip
_SCALARS_64 = ("clock64", "globaltimer", "gridid", "current_graph_exec", *(f"pm{i}_64" for i in range(8)))

#: Readable special registers and their type, components written out: `%tid.x` -> "u32".
SPECIAL_REGISTERS: dict[str, str] = {
    **{f"%{name}.{axis}": "u32" for name in _VECTORS for axis in "xyz"},
    **{f"%{name}": "u32" for name in _SCALARS_32},
    **{f"%{name}": "u64" for name in _SCALARS_64},
    "%is_explicit_cluster": "pred",
}

#: Names no declaration may take: ptxas lets a scalar one silently shadow the special register.
RESERVED_REGISTERS = frozenset(name.split(".")[0] for name in SPECIAL_REGISTERS)


def strip_comments(text: str) -> str:
    """`text` with every comment replaced by the line ends it contains, so that line numbers stay true."""
    if "/" not in text:
        return text

    def replacement(match: re.Match[str]) -> str:
        found = match.group()
        return found if found[0] == '"' else "\n" * found.count("\n") or " "

    return _COMMENT.sub(replacement, text)


def leading_comments(text: str) -> tuple[str, ...]:
    """The comment lines before the first directive, without their marks."""
    lines: list[str] = []
    position = 0
    while match := _LEADING.match(text, position):
        found = match["line"] if match["line"] is not None else match["block"]
        lines += [part.strip() for part in found.split("\n")]
        position = match.end()
    return tuple(lines)


def literal(text: str) -> Imm | None:
    """The immediate that `text` spells, or None: decimal, hex, binary, octal, 0f/0d bit patterns, decimal floats."""
    if match := _INTEGER.fullmatch(text):
        sign, hexadecimal, binary, octal, decimal = match.groups()
        if hexadecimal:
            magnitude = int(hexadecimal, 16)
        elif binary:
            magnitude = int(binary, 2)
        elif octal:
            magnitude = int(octal, 8)
        else:
            magnitude = int(decimal)
        return Imm(-magnitude if sign else magnitude, None, text)
    if match := _BITS.fullmatch(text):
        if match[1]:
            bits = int(match[2], 16)
            return Imm(struct.unpack("<f", struct.pack("<I", bits))[0], bits, text)
        bits = int(match[4], 16)
        return Imm(struct.unpack("<d", struct.pack("<Q", bits))[0], bits, text)
    if _DECIMAL.fullmatch(text):
        return Imm(float(text), None, text)
    if text == "WARP_SZ":
        return Imm(32, None, text)
    return None
