"""Digits: a linear index split into mixed-radix digits, and how far each digit moves each operand. Pairs with lib/digits.ptx.j2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..codegen.fastdiv import magic
from .base import Arg
from .collapse import by_stride, collapse


@dataclass(frozen=True, slots=True)
class DigitConsts:
    """What a template needs to know: the digits' names, most significant first, and whether byte strides need 64 bits."""

    names: tuple[str, ...]
    wide: bool


@dataclass(frozen=True)
class Digits:
    """names and extents of the digits, most significant first; strides: operand -> bytes per step of each digit."""

    names: tuple[str, ...]
    extents: tuple[int, ...]
    strides: Mapping[str, tuple[int, ...]]

    @property
    def size(self) -> int:
        count = 1
        for extent in self.extents:
            count *= extent
        return count

    def consts(self, wide: bool = False) -> DigitConsts:
        return DigitConsts(self.names, wide or any(abs(s) >= 2**31 for row in self.strides.values() for s in row))

    def args(self, wide: bool) -> list[Arg]:
        """extent, multiplier and shift of each digit but the first (whose extent nothing needs), then the strides."""
        args = []
        for name, extent in zip(self.names[1:], self.extents[1:], strict=True):
            multiplier, shift = magic(extent)
            args += [Arg(f"extent_{name}", "u32", extent), Arg(f"multiplier_{name}", "u32", multiplier), Arg(f"shift_{name}", "u32", shift)]
        for operand, row in self.strides.items():
            args += [Arg(f"stride_{operand}_{name}", "s64" if wide else "s32", s) for name, s in zip(self.names, row, strict=True)]
        return args

    def ordered_for(self, operand: str) -> Digits:
        """The same digits with the ones in which `operand` moves least last, so that neighbouring indices are neighbours in memory."""
        order = by_stride(self.extents, self.strides[operand])
        return Digits(tuple(self.names[i] for i in order), tuple(self.extents[i] for i in order),
                      {name: tuple(r[i] for i in order) for name, r in self.strides.items()})

    def collapsed(self, stem: str = "r") -> Digits:
        """Fewer digits (at least one), renamed <stem>0, <stem>1, ...: extents of 1 dropped, neighbours merged where all operands step
        evenly across them."""
        extents, rows = collapse(self.extents, list(self.strides.values()))
        if not extents:
            extents, rows = (1,), ((0,),) * len(self.strides)
        return Digits(tuple(f"{stem}{i}" for i in range(len(extents))), extents, dict(zip(self.strides, rows, strict=True)))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least one that is not below n."""
    return 1 << max(n - 1, 0).bit_length()
