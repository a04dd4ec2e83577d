"""Engine: how a problem can be computed. Stateless; knows templates and arithmetic, never a device or a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..codegen.spec import KernelSpec, Param, Target, TensorMapSpec
from ..device import DeviceInfo
from ..ops.base import Problem


@dataclass(frozen=True, slots=True)
class Support:
    """Whether an engine takes a problem; a refusal carries its reason in words."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


SUPPORTED = Support(True)


def refuse(reason: str) -> Support:
    return Support(False, reason)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The knobs of an engine, e.g. (("tile_m", 128), ("stages", 4)); `name` is stable and stands in the tuning database."""

    knobs: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, key: str) -> Any:
        for name, value in self.knobs:
            if name == key:
                return value
        raise KeyError(key)

    @property
    def name(self) -> str:
        return "_".join(f"{k}{v}" for k, v in self.knobs) or "default"

    @staticmethod
    def of(**knobs: Any) -> EngineConfig:
        return EngineConfig(tuple(knobs.items()))


# What an argument of a kernel launch may be, besides a plain number fixed when the plan is built.
@dataclass(frozen=True, slots=True)
class TensorArg:
    """The address of the operand `name`, plus a byte offset."""

    name: str
    byte_offset: int = 0


@dataclass(frozen=True, slots=True)
class TensorMapArg:
    """A tensor map over the operand `name`, starting `byte_offset` bytes after its address."""

    name: str
    map: TensorMapSpec
    byte_offset: int = 0


@dataclass(frozen=True, slots=True)
class WorkspaceArg:
    """An address within the plan's workspace (256-byte aligned)."""

    byte_offset: int = 0


@dataclass(frozen=True, slots=True)
class WorkspaceMapArg:
    """A tensor map over the plan's workspace, from `byte_offset` on."""

    map: TensorMapSpec
    byte_offset: int = 0


class Scratch:
    """The workspace of a plan while its launches are written: every piece has its own bytes, from a multiple of 256 on."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def take(self, num_bytes: int) -> WorkspaceArg:
        """A piece of at least `num_bytes` (and one) bytes."""
        piece = WorkspaceArg(self.num_bytes)
        self.num_bytes += max(1, -(-num_bytes // 256)) * 256
        return piece


@dataclass(frozen=True, slots=True)
class ScalarArg:
    """The problem's scalar `name`, in the type that the problem gives it."""

    name: str


@dataclass(frozen=True, slots=True)
class TableArg:
    """A table of numbers and addresses, in one parameter of a table's type."""

    items: tuple[TensorArg | WorkspaceArg | int, ...]


ArgValue = TensorArg | TensorMapArg | WorkspaceArg | WorkspaceMapArg | ScalarArg | TableArg | int | float


def constant_of(arg: ArgValue) -> int | float | TensorMapSpec | tuple[int, ...]:
    """What a launch is bound with before its addresses are known: the number itself, a map without address, 0 for what comes later."""
    if isinstance(arg, TableArg):
        return tuple(item if isinstance(item, int) else 0 for item in arg.items)
    return arg if isinstance(arg, (int, float)) else arg.map if isinstance(arg, (TensorMapArg, WorkspaceMapArg)) else 0


@dataclass(frozen=True, slots=True)
class Arg:
    """One kernel parameter together with its value: the single table that makes Param, packing and binding agree."""

    name: str
    type: str
    value: ArgValue


@dataclass(frozen=True, slots=True)
class Step:
    """One launch: the kernel, the grid in CTAs (x carries unbounded extents) and the arguments in parameter order."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    args: tuple[ArgValue, ...]

    @staticmethod
    def of(template: str, op: str, target: Target, threads: int, args: Sequence[Arg], consts: Any, grid: int | tuple[int, int, int],
           **spec: Any) -> Step:
        kernel = KernelSpec(template, op, target, threads, tuple(Param(a.name, a.type) for a in args), consts, **spec)
        return Step(kernel, (grid, 1, 1) if isinstance(grid, int) else grid, tuple(a.value for a in args))


@dataclass(frozen=True, slots=True)
class Build:
    """The steps of a problem under one config, in order, on one stream; scratch bytes they share."""

    steps: tuple[Step, ...]
    workspace_bytes: int = 0


class Engine:
    """Base of all engines. `id` is stable: the tuning database and OXIDNN_ENGINES name it."""

    id: ClassVar[str] = ""
    is_deterministic: ClassVar[bool] = True
    sums_coarsely: ClassVar[bool] = False  # in ways a reference knows: 8-bit floats in tensor cores (13 bits), Winograd, FFT

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        """SUPPORTED, or a refusal with the reason; cheap, never raises for a valid problem."""
        raise NotImplementedError

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Legal configs, the smallest estimate first; only called for supported problems, never empty."""
        return (EngineConfig(),)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Expected microseconds, comparable between engines."""
        raise NotImplementedError

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        """Pure: the same arguments give the same Build. An empty problem may give no steps at all only if no output has elements."""
        raise NotImplementedError

