"""Resize: along each dimension outputs are sums over a band of taps. One launch writes every dimension's bands (first tap, weights) into
the workspace, the next applies them: a thread `block` outputs of a pack of channels. Gradients apply the transposed bands: gathered, so
without atomics and in one order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.resize import Axis, ResizeProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, WorkspaceArg, refuse
from .digits import DigitConsts, Digits
from .pool_window import byte_strides, compute_type, shifted, vector_limit

_LIMIT = 2**31
# The assembler hoists all loads of unrolled taps, so registers bound how many elements (and their weights) those may load.
_UNROLL = {"f32": 64, "f64": 32}
_HELD = 4  # the most weights of one dimension that registers hold
_BLOCKS = (8, 4, 1)
_MOST_EXAMINED = 1 << 20  # outputs of a dimension whose taps are looked at one by one
_TABLE_THREADS = 128


@dataclass(frozen=True, slots=True)
class TableConsts:
    """compute: type of the weights. rank: dimensions, one a ctaid.y. filter: "box" | "linear" | "cubic"."""

    compute: str
    rank: int
    is_transposed: bool
    filter: str
    is_normalised: bool
    excludes_outside: bool
    coefficient: float


@dataclass(frozen=True, slots=True)
class BandConsts:
    """spans: taps of each dimension. order: dimensions from the outermost loop on; of the first, a thread computes `block` outputs.

    is_unrolled, is_held: per loop, whether it is unrolled and whether its weights are loaded before all loops. is_copy: every output is
    one element. sharing: of each tap of the outermost loop, the outputs of the block that may read it (all, if it is not unrolled).
    is_ragged: the last block has fewer outputs. is_row: the outputs of a block lie side by side in memory.
    """

    dtype: str
    compute: str
    spans: tuple[int, ...]
    order: tuple[int, ...]
    digits: DigitConsts
    vector: int
    block: int
    is_unrolled: tuple[bool, ...]
    is_held: tuple[bool, ...]
    is_copy: bool
    sharing: tuple[tuple[int, ...], ...]
    is_ragged: bool
    is_row: bool


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@lru_cache(maxsize=512)
def touches(axis: Axis, block: int, is_transposed: bool) -> tuple[tuple[int, int], ...]:
    """Of each of `block` neighbouring outputs, the (first, last) tap that it may read, over all blocks, counted from where the band begins:
    at the first tap of the block's first output, or before, so that it ends inside. Transposed: outputs are elements, and taps the outputs
    that read them."""
    count, taps = (axis.extent, axis.outputs) if is_transposed else (axis.outputs, axis.extent)
    if count > _MOST_EXAMINED:
        return ((0, _longest(axis, block, is_transposed) - 1),) * block
    at = np.arange(count, dtype=np.int64)
    if is_transposed:
        # Element i is read by o from ceil((i denominator - high) / step) to ceil(((i + 1) denominator - low) / step) - 1; the first and
        # the last element also stand for all that lies outside.
        step = max(axis.step, 1)
        low = np.where(at == 0, 0, -((axis.high - at * axis.denominator) // step)) if axis.step else np.zeros_like(at)
        high = -((axis.low - (at + 1) * axis.denominator) // step) - 1 if axis.step else np.full_like(at, taps - 1)
        high = np.where(at == count - 1, taps - 1, high)
    else:
        low, high = ((axis.step * at + bound) // axis.denominator for bound in (axis.low, axis.high))
    low, high = low.clip(0, taps - 1), high.clip(0, taps - 1)
    first = low[::block].repeat(block)[:count]
    first = np.minimum(first, taps - 1 - (high - first).max())  # every band lies inside
    low, high = low - first, high - first
    return tuple((max(0, int(low[r::block].min())), int(high[r::block].max())) if r < count else (0, 0) for r in range(block))


def span(axis: Axis, block: int, is_transposed: bool) -> int:
    """The most taps that `block` neighbouring outputs read, from the first tap of the first one."""
    return max(last for _, last in touches(axis, block, is_transposed)) + 1


def _longest(axis: Axis, block: int, is_transposed: bool) -> int:
    """A bound of `span`, from the slopes alone."""
    if not is_transposed:
        # floor(x + d) - floor(x) <= ceil(d)
        return min(axis.extent, _ceil(axis.step * (block - 1) + axis.high - axis.low, axis.denominator) + 1)
    if axis.step == 0 or axis.extent <= block:
        return axis.outputs
    last_block = (axis.extent - 1) // block * block
    inner = _ceil(block * axis.denominator + axis.high - axis.low, axis.step)
    head = _ceil(block * axis.denominator - axis.low, axis.step)
    tail = axis.outputs - max(0, _ceil(last_block * axis.denominator - axis.high, axis.step))
    return max(1, min(axis.outputs, max(inner, head, tail)))


class BandEngine(Engine):
    """All modes, both directions, any layout; packs of channels where they lie together, else blocks along the densest dimension."""

    id = "resize.band"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ResizeProblem)
        largest = max(prod(o.desc.shape[1:]) for o in problem.operands)
        if largest >= _LIMIT:
            return refuse(f"one image has {largest} elements (at most {_LIMIT - 1})")
        if problem.is_empty:
            return SUPPORTED
        limit = problem.policy.workspace_limit
        entries = max(self._entries(problem, a, 1) for a in range(len(problem.axes)))
        if entries >= _LIMIT:
            return refuse(f"the weights of one dimension are {entries} (at most {_LIMIT - 1})")
        if limit is not None and not self._within(problem, device):
            return refuse(f"its tables need more than workspace_limit={limit} bytes")
        return SUPPORTED

    def _within(self, problem: ResizeProblem, device: DeviceInfo) -> bool:
        return bool(self.configs(problem, device))

    @staticmethod
    def _operands(problem: ResizeProblem) -> tuple[TensorDesc, TensorDesc]:
        return problem.inputs[0].desc, problem.outputs[0].desc

    @staticmethod
    def _along(problem: ResizeProblem, vector: int) -> int:
        """The dimension along which a thread's outputs lie: the densest for single channels, the first for packs."""
        target = problem.outputs[0].desc
        rank = len(problem.axes)
        if vector > 1 or (target.strides[1] == 1 and target.shape[1] > 1):
            return 0
        return min(range(rank), key=lambda a: (target.shape[2 + a] == 1, abs(target.strides[2 + a]), -a))

    @staticmethod
    def _entries(problem: ResizeProblem, a: int, block: int) -> int:
        outputs = problem.outputs[0].desc.shape[2 + a]
        return _ceil(outputs, block) * block * span(problem.axes[a], block, problem.is_backward)

    def _table_bytes(self, problem: ResizeProblem, config: EngineConfig) -> int:
        along, size = self._along(problem, config["vec"]), 8 if self._compute(problem) == "f64" else 4
        scratch = Scratch()
        for a in range(len(problem.axes)):
            block = config["block"] if a == along else 1
            scratch.take(4 * _ceil(problem.outputs[0].desc.shape[2 + a], block))
            scratch.take(size * self._entries(problem, a, block))
        return scratch.num_bytes

    @staticmethod
    def _compute(problem: ResizeProblem) -> str:
        return compute_type(problem.inputs[0].desc.dtype)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ResizeProblem)
        vector = vector_limit([o.desc for o in problem.operands])
        found = [EngineConfig.of(vec=v, block=b, threads=t) for v in dict.fromkeys((vector, 1)) for b in _BLOCKS for t in (128, 256)]
        limit = problem.policy.workspace_limit
        found = [c for c in found if self._entries(problem, self._along(problem, c["vec"]), c["block"]) < _LIMIT
                 and (limit is None or self._table_bytes(problem, c) <= limit)]
        return tuple(sorted(found, key=lambda c: self.estimate(problem, c, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Microseconds: two launches, and the slower of the bytes and of what the threads execute."""
        assert isinstance(problem, ResizeProblem)
        target = problem.outputs[0].desc
        vector, block = config["vec"], config["block"]
        along = self._along(problem, vector)
        spans = [span(a, block if i == along else 1, problem.is_backward) for i, a in enumerate(problem.axes)]
        threads = target.numel / vector / min(block, target.shape[2 + along])
        inner = prod(spans) // spans[along]
        instructions = 60 + spans[along] * (3 * block + 4 + block * vector + inner * (6 + 3 * vector)) + block * (4 + 2 * vector)
        rate = device.num_sms * min(1.0, max(threads, 1) / (device.num_sms * 512)) * 64 * 1.5e3  # a microsecond
        return 6.0 + max(problem.num_bytes / (device.bandwidth_gbs * 1e3 * 0.85), threads * instructions / rate) + config["threads"] * 1e-4

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ResizeProblem)
        if problem.is_empty:
            return Build(())
        scratch = Scratch()
        tables: list[tuple[WorkspaceArg, WorkspaceArg]] = []
        along, size = self._along(problem, config["vec"]), 8 if self._compute(problem) == "f64" else 4
        for a in range(len(problem.axes)):
            block = config["block"] if a == along else 1
            outputs = problem.outputs[0].desc.shape[2 + a]
            tables.append((scratch.take(4 * _ceil(outputs, block)), scratch.take(size * self._entries(problem, a, block))))
        steps = [self._table_step(problem, config, device, tables), *self._band_steps(problem, config, device, tables)]
        return Build(tuple(steps), scratch.num_bytes)

    def _table_step(self, problem: ResizeProblem, config: EngineConfig, device: DeviceInfo,
                    tables: list[tuple[WorkspaceArg, WorkspaceArg]]) -> Step:
        along = self._along(problem, config["vec"])
        args: list[Arg] = []
        most = 0
        for a, (axis, (firsts, weights)) in enumerate(zip(problem.axes, tables, strict=True)):
            block = config["block"] if a == along else 1
            entries = self._entries(problem, a, block)
            most = max(most, entries)
            args += [Arg(f"ptr_firsts{a}", "u64", firsts), Arg(f"ptr_weights{a}", "u64", weights), Arg(f"entries{a}", "u32", entries),
                     Arg(f"span{a}", "u32", span(axis, block, problem.is_backward)), Arg(f"block{a}", "u32", block),
                     Arg(f"extent{a}", "s64", axis.extent), Arg(f"outputs{a}", "s64", axis.outputs)]
            args += [Arg(f"{name}{a}", "s64", getattr(axis, name)) for name in ("step", "shift", "denominator", "low", "high", "radius")]
        kind = {"nearest": "box", "area": "box"}.get(problem.mode, problem.mode)
        consts = TableConsts(self._compute(problem), len(problem.axes), problem.is_backward, kind, problem.is_normalised,
                             problem.excludes_outside, problem.coefficient)
        return Step.of("resize/table", problem.op, Target.for_arch(device.arch), _TABLE_THREADS, args, consts,
                       (_ceil(most, _TABLE_THREADS), len(problem.axes), 1), suffix=f"{problem.mode}_{consts.compute}")

    def _band_steps(self, problem: ResizeProblem, config: EngineConfig, device: DeviceInfo,
                    tables: list[tuple[WorkspaceArg, WorkspaceArg]]) -> list[Step]:
        source, target = self._operands(problem)
        vector, block, threads = config["vec"], config["block"], config["threads"]
        rank, along = len(problem.axes), self._along(problem, config["vec"])
        blocks = [block if a == along else 1 for a in range(rank)]
        spans = tuple(span(axis, b, problem.is_backward) for axis, b in zip(problem.axes, blocks, strict=True))
        order = (along, *(a for a in range(rank) if a != along))
        loops = [spans[a] for a in order]
        read = touches(problem.axes[along], block, problem.is_backward)
        sharing = tuple(tuple(r for r, (low, high) in enumerate(read) if low <= k <= high) for k in range(spans[along]))
        compute = self._compute(problem)
        is_unrolled = tuple(prod(loops[d:]) * max(vector, 2) <= _UNROLL[compute] and loops[d] <= 16 for d in range(rank))
        is_held = tuple(d > 0 and is_unrolled[d] and loops[d] <= _HELD for d in range(rank))
        if not is_unrolled[0]:
            sharing = (tuple(range(block)),)
        source_row, target_row = byte_strides(source), byte_strides(target)
        wide = any(abs(s) >= _LIMIT for s in (*source_row, *target_row, source_row[1] * vector, target_row[1] * vector,
                                              *(s * block for s in target_row[2:])))
        outputs = target.shape[2:]
        size = target.dtype.num_bytes
        piece = min(16, block * size)
        is_row = (vector == 1 and block > 1 and target.strides[2 + along] == 1 and outputs[along] % block == 0 and target.align >= piece
                  and all(s % piece == 0 or n == 1 for i, (s, n) in enumerate(zip(target_row, target.shape, strict=True))
                          if i != 2 + along))
        extents = (target.shape[1] // vector, *(_ceil(n, b) for n, b in zip(outputs, blocks, strict=True)))
        images = max(1, min(target.shape[0], (_LIMIT - 1) // max(prod(extents), 1)))
        source_name, target_name = problem.inputs[0].name, problem.outputs[0].name
        names = ("n", "c", *(f"o{a}" for a in range(rank)))
        steps = []
        for begin in range(0, target.shape[0], images):
            strides = {"x": (source_row[0], source_row[1] * vector, *(0,) * rank),
                       "y": (target_row[0], target_row[1] * vector, *(s * b for s, b in zip(target_row[2:], blocks, strict=True)))}
            digits = Digits(names, (min(images, target.shape[0] - begin), *extents), strides).ordered_for("y")
            args = [Arg("ptr_x", "u64", shifted(TensorArg(source_name), begin * source_row[0])),
                    Arg("ptr_y", "u64", shifted(TensorArg(target_name), begin * target_row[0])), Arg("num_threads", "u32", digits.size)]
            args += digits.args(wide)
            for a, (firsts, weights) in enumerate(tables):
                args += [Arg(f"ptr_firsts{a}", "u64", firsts), Arg(f"ptr_weights{a}", "u64", weights),
                         Arg(f"stride_x{a}", "s64" if wide else "s32", source_row[2 + a])]
            args += [Arg("outputs", "s32", outputs[along]), Arg("stride_block", "s64", target_row[2 + along])]
            consts = BandConsts(source.dtype.name, self._compute(problem), spans, order, digits.consts(wide), vector, block, is_unrolled,
                                is_held, prod(spans) == 1 and block == 1 and not problem.is_backward, sharing,
                                outputs[along] % block != 0, is_row)
            steps.append(Step.of("resize/band", problem.op, Target.for_arch(device.arch), threads, args, consts,
                                 _ceil(digits.size, threads), min_ctas_per_sm=512 // threads,
                                 suffix=f"{consts.dtype}_v{vector}_b{block}"))
        return steps


_BAND = BandEngine()
ENGINES: dict[str, tuple[Engine, ...]] = {"resize": (_BAND,), "resize_backward": (_BAND,)}
