"""Instructions that sm_75 lacks, out of those it has: rounding to bf16, and minima and maxima that keep NaN."""

from __future__ import annotations

import re

_SCRATCH = ".reg .pred %p_tu; .reg .b32 %tu<4>; .reg .f32 %ftu;"


def _extremum(name: str, guard: str, operands: list[str]) -> str:
    dst, a, b = operands
    return (f"{name.replace('.NaN', '')} %ftu, {a}, {b}; setp.nan.f32 %p_tu, {a}, {b}; "
            f"{guard}selp.f32 {dst}, 0f7FFFFFFF, %ftu, %p_tu;")


def _bf16_bits(to: str, source: str) -> str:
    """to = round to nearest even(source) >> 16, by the carry of 0x7FFF plus the lowest bit kept; NaN becomes 0x7FFF."""
    return (f"mov.b32 %tu0, {source}; bfe.u32 %tu1, %tu0, 16, 1; add.u32 %tu0, %tu0, %tu1; add.u32 %tu0, %tu0, 0x7FFF; "
            f"shr.u32 {to}, %tu0, 16; setp.nan.f32 %p_tu, {source}, {source}; selp.b32 {to}, 0x7FFF, {to}, %p_tu;")


def _round(name: str, guard: str, operands: list[str]) -> str:
    dst, source = operands
    return f"{_bf16_bits('%tu2', source)} {guard}cvt.u16.u32 {dst}, %tu2;"


def _round_pair(name: str, guard: str, operands: list[str]) -> str:
    dst, high, low = operands
    return f"{_bf16_bits('%tu2', high)} {_bf16_bits('%tu3', low)} {guard}prmt.b32 {dst}, %tu3, %tu2, 0x5410;"


_SUBSTITUTES = {"max.NaN.f32": _extremum, "min.NaN.f32": _extremum, "cvt.rn.bf16.f32": _round, "cvt.rn.bf16x2.f32": _round_pair}
_PATTERN = re.compile(r"((?:@!?%\w+\s+)?)(" + "|".join(map(re.escape, _SUBSTITUTES)) + r")\s+([^;]+);")


def lower(text: str) -> str:
    """`text` with those instructions substituted; the same results bit for bit."""

    def substitute(found: re.Match[str]) -> str:
        guard, name, operands = found.groups()
        body = _SUBSTITUTES[name](name, guard, [o.strip() for o in operands.split(",")])
        return f"{{ {_SCRATCH} {body} }}"

    return _PATTERN.sub(substitute, text)
