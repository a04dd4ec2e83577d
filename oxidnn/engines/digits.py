"""Digits: a linear index split into mixed-radix digits, and how far each digit moves each operand. Pairs with lib/digits.ptx.j2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..codegen.fastdiv import magic
from .base import Arg


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
        row = self.strides[operand]
        order = sorted(range(len(row)), key=lambda i: (self.extents[i] > 1, abs(row[i])), reverse=True)
        return Digits(tuple(self.names[i] for i in order), tuple(self.extents[i] for i in order),
                      {name: tuple(r[i] for i in order) for name, r in self.strides.items()})

    def collapsed(self) -> Digits:
        """Fewer digits, renamed r0, r1, ...: extents of 1 dropped, neighbours merged where all operands step evenly across them."""
        extents: list[int] = []
        rows: dict[str, list[int]] = {name: [] for name in self.strides}
        for i, extent in enumerate(self.extents):
            if extent == 1:
                continue
            if extents and all(rows[n][-1] == r[i] * extent for n, r in self.strides.items()):
                extents[-1] *= extent
                for n, r in self.strides.items():
                    rows[n][-1] = r[i]
            else:
                extents.append(extent)
                for n, r in self.strides.items():
                    rows[n].append(r[i])
        if not extents:
            extents = [1]
            rows = {name: [0] for name in self.strides}
        return Digits(tuple(f"r{i}" for i in range(len(extents))), tuple(extents), {n: tuple(r) for n, r in rows.items()})
