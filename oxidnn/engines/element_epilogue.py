"""What consts of memory-bound kernels know of an expression applied to single elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..codegen.pointwise import Expression
from ..ops.base import Problem
from ..ops.epilogue import align_shape, align_strides


class ElementEpilogue:
    """Base of consts with an `epilogue` over "acc", applied in the type `compute`."""

    __slots__ = ()
    compute: str
    epilogue: Expression | None

    @property
    def epilogue_operands(self) -> tuple[str, ...]:
        return tuple(name for name in self.epilogue.args if name != "acc") if self.epilogue is not None else ()

    @property
    def epilogue_scalars(self) -> tuple[str, ...]:
        return self.epilogue.scalars if self.epilogue is not None else ()

    def lower_epilogue(self, acc: str, element: int, results: Sequence[str]) -> str:
        """PTX: results = the epilogue of register acc, %arg_<name><element> and %scalar_<name>."""
        assert self.epilogue is not None
        registers = {"acc": acc} | {n: f"%arg_{n}{element}" for n in self.epilogue_operands}
        registers |= {n: f"%scalar_{n}" for n in self.epilogue_scalars}
        return self.epilogue.lower(registers, results, self.compute)


@dataclass(frozen=True, slots=True)
class OperandConsts:
    """An epilogue's tensor over packs of channels: read where it is used if it `walks` over images or positions, else once; in packs or
    an element at a time."""

    name: str
    dtype: str
    walks: bool
    in_packs: bool
    channel_bytes: int
    column_bytes: int


def operand_over(p: Problem, epilogue: Expression | None, name: str, shape: tuple[int, ...],
                 vector: int) -> tuple[OperandConsts, tuple[int, int, int, int]]:
    """The tensor `name` over an output of `shape` (images, channels, one or two spatial extents), and its byte strides along images,
    channels, rows and columns."""
    desc = p.desc(name)
    assert epilogue is not None
    aligned = align_shape(p.op, name, desc.shape, shape, 1, epilogue.axis(name))
    n, c, h, *w = (s * desc.dtype.num_bytes for s in align_strides(desc, aligned, 1))
    across = w[0] if w else 0
    unit = min(16, vector * desc.dtype.num_bytes)
    in_packs = c == desc.dtype.num_bytes and desc.align % unit == 0 and not any(s % unit for s in (n, h, across))
    return OperandConsts(name, desc.dtype.name, any((n, h, across)), in_packs, c, across), (n, c, h, across)
