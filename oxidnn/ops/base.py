"""Problem: what is to be computed, without a word on how. Frozen, hashable, printable in the case grammar."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..tensor import TensorDesc


@dataclass(frozen=True, slots=True)
class Policy:
    """What the caller allows; part of every key.

    math: f32 arithmetic of convolution and GEMM: "ieee" | "tf32" | "tf32x3" | "bf16x3" | "fast" (any, and lossy algorithms too).
    workspace_limit: most bytes of scratch memory a plan may take; None is no limit.
    """

    deterministic: bool = False
    math: str = "ieee"
    workspace_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a problem by its role name ("x", "w", "y", ...). Outputs are written in full, never read."""

    name: str
    desc: TensorDesc
    is_output: bool = False


@dataclass(frozen=True)
class Problem:
    """Base of all problems: the operands in argument order (inputs first), and the policy."""

    op: ClassVar[str] = ""
    operands: tuple[Operand, ...]
    policy: Policy = field(default=Policy(), kw_only=True)

    def desc(self, name: str) -> TensorDesc:
        """The description of the operand `name`; KeyError if the problem has none."""
        for operand in self.operands:
            if operand.name == name:
                return operand.desc
        raise KeyError(name)

    def has(self, name: str) -> bool:
        return any(o.name == name for o in self.operands)

    @property
    def inputs(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.operands if not o.is_output)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.operands if o.is_output)

    @property
    def flops(self) -> int:
        """Floating point operations (a multiply-add is two)."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """Bytes that must move at least once."""
        return sum(o.desc.num_bytes for o in self.operands)

    def case(self) -> str:
        """The problem in the case grammar: what `oxidnn repro` and the tuning database understand."""
        raise NotImplementedError
