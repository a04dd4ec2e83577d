"""What consts of memory-bound kernels know of an expression applied to single elements."""

from __future__ import annotations

from collections.abc import Sequence

from ..codegen.pointwise import Expression


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
