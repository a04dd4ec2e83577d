"""Problem: what is to be computed, without a word on how. Frozen, hashable, printable in the case grammar (case.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidArgument, expected
from ..tensor import TensorDesc
from .checks import canonical, describe

MATH = ("ieee", "tf32", "tf32x3", "bf16x3", "fast")


@dataclass(frozen=True, slots=True)
class Policy:
    """What the caller allows; part of every key.

    math: f32 arithmetic of convolution and GEMM: "ieee" | "tf32" | "tf32x3" | "bf16x3" | "fast" (any, and lossy algorithms too).
    "tf32" and "fast" round factors to types whose largest number is smaller: from 3.39e38 on they may count as infinite. Where factors are
    taken in parts ("tf32x3", "bf16x3") infinities, NaN and the largest numbers give what IEEE arithmetic gives.
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


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number given with each call, as a kernel's parameter of `type`: "f32" | "f64" | "u32" | "s32" | "u64" | "s64"."""

    name: str
    type: str = "f32"


@dataclass(frozen=True)
class Problem:
    """Base of all problems.

    operands: inputs in argument order, then outputs. attrs: the attributes as the caller could have written them, normalised
    (defaults left out, sequences as tuples, expressions as Expression), so that `op`, `operands`, `attrs` make the case.
    scalars: the numbers given with each call; those of expressions have the type of the arithmetic. Families subclass it with their
    derived geometry.
    """

    op: str
    operands: tuple[Operand, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    scalars: tuple[Scalar, ...] = ()
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
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """(output, input) pairs: the output's memory may be exactly the input's (same address, type, shape, strides)."""
        return ()

    @property
    def is_empty(self) -> bool:
        """True if no output has an element: nothing is launched."""
        return all(o.desc.numel == 0 for o in self.outputs)

    @property
    def flops(self) -> int:
        """Floating point operations (a multiply-add is two)."""
        return max((o.desc.numel for o in self.operands), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes that must move at least once."""
        return sum(o.desc.num_bytes for o in self.operands)


# build(tensors, attrs, policy): checks values (raises InvalidArgument naming the argument), infers the outputs that `tensors` does not
# hold, and returns the problem. `tensors` maps role names to canonical descriptions; absent optional inputs are left out.
BuildProblem = Callable[[Mapping[str, TensorDesc], Mapping[str, Any], Policy], Problem]


@dataclass(frozen=True, slots=True)
class OpDef:
    """An op's row: its name, the roles of its inputs in argument order, its outputs, how its problem is built, the inputs that may be
    absent, and its attributes with their defaults (None: left out, or to be given).

    An op that takes an epilogue, a prologue or a score, and one without inputs of its own, take the tensors that its expression names as
    well.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    build: BuildProblem
    optional: tuple[str, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()

    @property
    def takes_more_tensors(self) -> bool:
        return not self.inputs or any(name in ("epilogue", "prologue", "score") for name, _ in self.attrs)

    def make(self, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
        """The problem. Raises InvalidArgument naming the argument that is missing, unknown or wrong. An attribute None is left out."""
        known = [name for name, _ in self.attrs]
        for name in attrs:
            if name not in known:
                raise InvalidArgument(f"{self.name}: {name!r} is no attribute (known: {', '.join(known) or 'none'}).")
        tensors = {name: canonical(desc) for name, desc in tensors.items()}
        for name in self.inputs:
            if name not in tensors and name not in self.optional:
                raise expected(self.name, name, "missing", "a tensor", describe(tensors))
        for name in tensors:
            if not (self.takes_more_tensors or name in self.inputs or name in self.outputs):
                raise InvalidArgument(f"{self.name}: {name!r} is no tensor of this op (it takes {', '.join(self.inputs)} and gives "
                                      f"{', '.join(self.outputs)}). {describe(tensors)}")
        return self.build(tensors, {name: value for name, value in attrs.items() if value is not None}, policy)
