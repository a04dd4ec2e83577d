"""Numbers of four bits: a thread packs eight neighbours of the last dimension, of 16 bits sixteen, so that it reads 32 bytes; unpacked, it
has no more than 16 bytes, so that a warp writes side by side."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import DType
from ..ops.base import Problem
from ..ops.nibbles import NibbleProblem
from ..ops.quantize import KINDS, Kind
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Step, Support, TensorArg, refuse
from .digits import DigitConsts, Digits, ceil_div

THREADS = 256
_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class NibbleConsts:
    """count: numbers of a thread. wide: the type of the unpacked numbers; compute: of the arithmetic on them. moves_wide, moves_bytes: a
    thread's numbers, its bytes, lie side by side, aligned, and are all there. Else wide_step and byte_step are bytes from one to the next,
    as parameters."""

    kind: Kind
    count: int
    saturate: bool
    wide: str
    compute: str
    packs: bool
    moves_wide: bool
    moves_bytes: bool
    digits: DigitConsts

    stochastic: ClassVar[bool] = False

    @property
    def halves(self) -> bool:
        """FP4 of two numbers of 16 bits at a time."""
        return self.kind.name == "e2m1" and self.wide in ("f16", "bf16") and self.moves_wide


@dataclass(frozen=True)
class Walk:
    """count numbers a thread along the last of the digits; moves_wide, moves_bytes: as of NibbleConsts."""

    digits: Digits
    count: int
    moves_wide: bool
    moves_bytes: bool


def walk_of(problem: NibbleProblem, count: int) -> Walk:
    wide, packed = problem.desc(problem.wide), problem.desc(problem.packed)
    columns, rank, size = wide.shape[-1], wide.rank, wide.dtype.num_bytes
    rows = {problem.wide: (*(s * size for s in wide.strides[:-1]), wide.strides[-1] * size * count),
            problem.packed: (*packed.strides[:-1], packed.strides[-1] * count // 2)}
    digits = Digits((*(f"d{i}" for i in range(rank - 1)), "pack"), (*wide.shape[:-1], ceil_div(columns, count)), rows)
    whole = columns % count == 0
    moves_wide = whole and wide.strides[-1] == 1 and _aligned(wide.align, rows[problem.wide], wide.shape, min(16, count * size))
    moves_bytes = whole and packed.strides[-1] == 1 and _aligned(packed.align, rows[problem.packed], wide.shape, count // 2)
    return Walk(digits.collapsed("d") if whole else digits, count, moves_wide, moves_bytes)


def counts_of(problem: NibbleProblem) -> tuple[int, ...]:
    """Numbers a thread, the fastest first."""
    size = problem.desc(problem.wide).dtype.num_bytes
    if problem.op == "unpack4":
        return (min(8, 16 // size),)
    more = walk_of(problem, 16)
    return (16, 8) if size == 2 and more.moves_wide and more.moves_bytes else (8,)


class NibbleEngine(Engine):
    id = "nibbles.map"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, NibbleProblem)
        shape = problem.desc(problem.wide).shape
        count = counts_of(problem)[-1]
        threads = prod(shape[:-1]) * ceil_div(shape[-1], count)
        return SUPPORTED if threads < _LIMIT else refuse(f"{threads} groups of {count} numbers (at most {_LIMIT - 1})")

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, NibbleProblem)
        return tuple(EngineConfig.of(count=count) for count in counts_of(problem))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * 0.8)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, NibbleProblem)
        if problem.is_empty:
            return Build(())
        wide, packed = problem.desc(problem.wide), problem.desc(problem.packed)
        walk = walk_of(problem, config["count"])
        digits = walk.digits
        consts = NibbleConsts(KINDS[problem.kind], walk.count, problem.saturate, wide.dtype.name, _compute(wide.dtype),
                              problem.op == "pack4", walk.moves_wide, walk.moves_bytes, digits.consts())
        args = [Arg(f"ptr_{n}", "u64", TensorArg(n)) for n in ("x", "y")]
        args += [Arg("num_threads", "u32", digits.size), *digits.args(consts.digits.wide), Arg("num_columns", "u32", wide.shape[-1]),
                 Arg("wide_step", "s64", wide.strides[-1] * wide.dtype.num_bytes), Arg("byte_step", "s64", packed.strides[-1])]
        return Build((Step.of("pointwise/nibbles", problem.op, Target.for_arch(device.arch), THREADS, args, consts,
                              ceil_div(digits.size, THREADS), suffix=f"{problem.kind}_{consts.wide}"),))


def _compute(kind: DType) -> str:
    if kind.is_float:
        return "f64" if kind.name == "f64" else "f32"
    return "s64" if kind.name in ("s64", "u32") else "s32"


def _aligned(align: int, strides: tuple[int, ...], shape: tuple[int, ...], piece: int) -> bool:
    return align % piece == 0 and all(s % piece == 0 for s, n in zip(strides, shape, strict=True) if n > 1)


ENGINES: dict[str, tuple[Engine, ...]] = {"pack4": (NibbleEngine(),), "unpack4": (NibbleEngine(),)}
