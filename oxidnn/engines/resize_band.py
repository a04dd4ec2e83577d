"""Resize: along each dimension outputs are sums over a band of taps; a thread applies the bands of a block of outputs to a pack of
channels.

Where a block advances by whole elements (ratios of small numbers), bands are the same for every block: weights are numbers in the text.
Else a first launch writes where taps lie and their weights into the workspace. Gradients apply the transposed bands: gathered, so without
atomics and in one order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, prod

import numpy as np

from ..codegen.fastdiv import magic
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.resize import Axis, ResizeProblem
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, WorkspaceArg, refuse
from .collapse import by_stride
from .digits import DigitConsts, Digits, ceil_div
from .pool_window import byte_strides, compute_type, shifted, vector_limit

_LIMIT = 2**31
_MOST_EXAMINED = 1 << 20  # outputs of a dimension whose taps are looked at one by one
_MOST_EDGE = 64  # elements at either end of a dimension for which the transposed bands are compared
_MOST_NUMBERS = 256  # weights of one dimension that stand in the text
# The assembler moves loads of unrolled taps together, and keeps what each row of taps loads again, so registers bound what is unrolled.
_UNROLL = 2400  # instructions of unrolled taps
_LOADS = {False: 96, True: 112}  # words they load; of halves, without weights of a table
_HELD = 16  # places, or weights, of one dimension in registers
_TABLE_THREADS = 128

# (output within the block; weight: None if the table has it, three if the first and the last block have weights of their own; whether
# infinities may meet the weight: no block weighs the tap by 0, unless its place stands for another tap's)
Reader = tuple[int, float | tuple[float, ...] | None, bool]


@dataclass(frozen=True, slots=True)
class Filter:
    """kind: "box" | "linear" | "cubic". is_normalised: weights are divided by their sum. is_transposed: taps are outputs, positions
    elements."""

    kind: str
    coefficient: float
    is_normalised: bool
    excludes_outside: bool
    is_transposed: bool

    @staticmethod
    def of(problem: ResizeProblem) -> Filter:
        kind = {"nearest": "box", "area": "box"}.get(problem.mode, problem.mode)
        return Filter(kind, problem.coefficient, problem.is_normalised, problem.excludes_outside, problem.is_backward)

    def value(self, axis: Axis, o: int, q: int) -> Fraction:
        """The weight of tap q in output o before any normalisation."""
        u = Fraction(abs(q * axis.denominator - axis.step * o - axis.shift), axis.radius)
        if self.kind == "box":
            return Fraction(1)
        if self.kind == "linear":
            return max(Fraction(0), 1 - u)
        a = Fraction(self.coefficient)
        return (1 - u) * (1 + u - (a + 2) * u * u) if u <= 1 else a * (u - 1) * (2 - u) ** 2 if u < 2 else Fraction(0)


@dataclass(frozen=True, slots=True)
class TableConsts:
    """compute: type of the weights. axes: dimensions, one a ctaid.y. filter: "box" | "linear" | "cubic"."""

    compute: str
    axes: tuple[int, ...]
    is_transposed: bool
    filter: str
    is_normalised: bool
    excludes_outside: bool
    coefficient: float


@dataclass(frozen=True, slots=True)
class LoopConsts:
    """The loop over the taps of dimension `axis`, for `block` neighbouring outputs.

    places: how to find where tap k of a block lies: "even" (block * advance + origin + k), "divided" (the one tap of a nearest element),
    "table". taps: of each tap its readers. round: taps of one turn of the loop; 0 if all are unrolled. has_weights: the table's.
    has_ends: the first and the last block have weights of their own.
    holds_places, holds_weights: in registers, from before all loops. is_ragged: the last block has fewer outputs.
    """

    axis: int
    block: int
    span: int
    places: str
    advance: int
    origin: int
    taps: tuple[tuple[Reader, ...], ...]
    round: int
    has_weights: bool
    has_ends: bool
    holds_places: bool
    holds_weights: bool
    is_ragged: bool


@dataclass(frozen=True, slots=True)
class BandConsts:
    """loops: from the outermost on; the first and the last have blocks. packs: outputs of the last loop's block that one store takes.
    has_fences: loads of a row of taps stay behind the row before, or there would be too many at once. prefetches: a row is loaded while
    the one before is summed."""

    dtype: str
    compute: str
    loops: tuple[LoopConsts, ...]
    digits: DigitConsts
    vector: int
    packs: tuple[tuple[int, ...], ...]
    has_fences: bool
    prefetches: bool


@dataclass(frozen=True, slots=True)
class Bands:
    """The bands of one dimension; see LoopConsts."""

    span: int
    places: str
    taps: tuple[tuple[Reader, ...], ...]
    advance: int = 0
    origin: int = 0

    @property
    def has_weights(self) -> bool:
        return any(weight is None for readers in self.taps for _, weight, _ in readers)

    @property
    def has_ends(self) -> bool:
        return any(isinstance(weight, tuple) for readers in self.taps for _, weight, _ in readers)


# The only dimension of (N, C, L) tensors lies within one of a single element.
_SINGLE = Axis(1, 1, 1, 0, 1, 0, 0, 1)


def _count(axis: Axis, is_transposed: bool) -> tuple[int, int]:
    """(positions, taps that there are)."""
    return (axis.extent, axis.outputs) if is_transposed else (axis.outputs, axis.extent)


def _bounds(axis: Axis, at: int, is_transposed: bool) -> tuple[int, int]:
    """(first, last) tap of a position, which may lie outside."""
    if not is_transposed:
        return (axis.step * at + axis.low) // axis.denominator, (axis.step * at + axis.high) // axis.denominator
    # Element i is read by o from ceil((i denominator - high) / step) to ceil(((i + 1) denominator - low) / step) - 1.
    return -((axis.high - at * axis.denominator) // axis.step), -((axis.low - (at + 1) * axis.denominator) // axis.step) - 1


def _period(axis: Axis, is_transposed: bool) -> int:
    """How many positions on the bands repeat, moved by whole taps."""
    a, b = (axis.denominator, axis.step) if is_transposed else (axis.step, axis.denominator)
    return b // gcd(a, b)


@lru_cache(maxsize=8192)
def _row(axis: Axis, f: Filter, o: int) -> dict[int, Fraction]:
    """The weights of the elements in output o."""
    low, high = _bounds(axis, o, False)
    if f.excludes_outside:
        low, high = max(low, 0), min(high, axis.extent - 1)
    total = Fraction(1)
    if f.is_normalised:
        total = sum((f.value(axis, o, q) for q in range(low, high + 1)), Fraction(0))
    row: dict[int, Fraction] = {}
    for q in range(low, high + 1):
        place = min(max(q, 0), axis.extent - 1)
        row[place] = row.get(place, Fraction(0)) + f.value(axis, o, q) / total
    return row


@lru_cache(maxsize=8192)
def _far_from_the_ends(axis: Axis, f: Filter, o: int, q: int) -> Fraction:
    """The weight of tap q in output o, were there more elements on either side."""
    value = f.value(axis, o, q)
    if value and f.is_normalised:
        low, high = _bounds(axis, o, False)
        value /= sum(f.value(axis, o, i) for i in range(low, high + 1))
    return value


@lru_cache(maxsize=512)
def _even(axis: Axis, block: int, f: Filter) -> Bands | None:
    """The bands of all blocks, if they are the same, at least between the first and the last."""
    if axis.step == 0 or block % _period(axis, f.is_transposed) or axis.step > _LIMIT or axis.denominator > _LIMIT:
        return None
    if (axis.high - axis.low) // axis.denominator > _MOST_NUMBERS:
        return None
    count, taps = _count(axis, f.is_transposed)
    bounds = [_bounds(axis, r, f.is_transposed) for r in range(block)]
    origin = bounds[0][0]
    span = max(1, max(high for _, high in bounds) - origin + 1)
    advance = _bounds(axis, block, f.is_transposed)[0] - origin
    blocks = ceil_div(count, block)
    if span * block > _MOST_NUMBERS or abs(origin) + span + advance * blocks >= _LIMIT // 2:
        return None

    def between(position: int, tap: int) -> Fraction:
        return _far_from_the_ends(axis, f, *((tap, position) if f.is_transposed else (position, tap)))

    def at_an_end(position: int, tap: int) -> Fraction:
        """0 for a tap that is not there."""
        if not (0 <= tap < taps and 0 <= position < count):
            return Fraction(0)
        return _row(axis, f, tap).get(position, Fraction(0)) if f.is_transposed else _row(axis, f, position).get(tap, Fraction(0))

    begin = (blocks - 1) * block
    is_same = _is_even_at_the_ends(axis, f, between) if f.is_transposed else not f.excludes_outside or _lies_inside(axis, f, 0, count - 1)
    if not is_same and (blocks < 2 or not _lies_inside(axis, f, block, begin - 1)):
        return None
    if f.is_transposed and (origin > 0 or _bounds(axis, count - 1, True)[1] < taps - 1):
        return None  # an end is read by outputs beyond its band

    def may_be_infinite(r: int, tap: int, weights: list[Fraction]) -> bool:
        """Whether the weight 0 of a tap that is not there meets an element that the output reads anyway."""
        first, last = at_an_end(r, 0), at_an_end(begin + r, taps - 1)
        return all(weights) or (weights[0] != 0 and (weights[1] != 0 or (tap < 0 and first != 0))
                                and (weights[2] != 0 or begin + r >= count or (tap + advance * (blocks - 1) >= taps and last != 0)))

    found = []
    for k in range(span):
        readers: list[Reader] = []
        for r, (low, high) in enumerate(bounds):
            if not low <= origin + k <= high:
                continue
            weights = [between(r, origin + k)]
            if not is_same:
                weights += [at_an_end(r, origin + k), at_an_end(begin + r, origin + k + advance * (blocks - 1))]
            if any(weights):
                numbers = tuple(map(float, weights))
                readers.append((r, numbers[0] if len(set(numbers)) == 1 else numbers, may_be_infinite(r, origin + k, weights)))
        found.append(tuple(readers))
    return Bands(span, "even", tuple(found), advance, origin)


def _lies_inside(axis: Axis, f: Filter, first: int, last: int) -> bool:
    """Whether the bands of the positions first to last, and what those read that they read, lie inside."""
    if first > last:
        return True
    count, taps = _count(axis, f.is_transposed)
    low, high = _bounds(axis, first, f.is_transposed)[0], _bounds(axis, last, f.is_transposed)[1]
    if low < 0 or high >= taps:
        return False
    if not f.is_transposed:
        return True
    return first > 0 and last < count - 1 and (not f.excludes_outside or (_bounds(axis, low, False)[0] >= 0
                                                                            and _bounds(axis, high, False)[1] < axis.extent))


def _is_even_at_the_ends(axis: Axis, f: Filter, weight: Callable[[int, int], Fraction]) -> bool:
    """Whether clamping taps to those that there are gives the elements at the ends what the outputs read of them."""
    if f.excludes_outside:
        return False
    for elements in (range(axis.extent), range(axis.extent - 1, -1, -1)):
        for n, element in enumerate(elements):
            first, last = _bounds(axis, element, True)
            if n and first >= 0 and last < axis.outputs:
                break
            if n == _MOST_EDGE or last - first > _MOST_NUMBERS or (element == 0 and first > 0) or (
                    element == axis.extent - 1 and last < axis.outputs - 1):
                return False
            clamped: dict[int, Fraction] = {}
            for o in range(first, last + 1):
                place = min(max(o, 0), axis.outputs - 1)
                clamped[place] = clamped.get(place, Fraction(0)) + weight(element, o)
            reading = {o: _row(axis, f, o).get(element, Fraction(0)) for o in range(max(0, first), min(axis.outputs, last + 1))}
            if {o: w for o, w in clamped.items() if w} != {o: w for o, w in reading.items() if w}:
                return False
    return True


def _longest(axis: Axis, block: int, is_transposed: bool) -> int:
    """A bound of the span, from the slopes alone."""
    if not is_transposed:
        # floor(x + d) - floor(x) <= ceil(d)
        return ceil_div(axis.step * (block - 1) + axis.high - axis.low, axis.denominator) + 1
    if axis.step == 0:
        return axis.outputs
    inner = ceil_div(block * axis.denominator + axis.high - axis.low, axis.step) + 1
    return inner + max(0, _bounds(axis, 0, True)[0]) + max(0, axis.outputs - 1 - _bounds(axis, axis.extent - 1, True)[1])


@lru_cache(maxsize=512)
def _listed(axis: Axis, block: int, f: Filter) -> Bands:
    """Bands that the table holds: where they begin and which outputs may read a tap, over all blocks."""
    count, taps = _count(axis, f.is_transposed)
    if count > _MOST_EXAMINED or (f.is_transposed and axis.step == 0):
        span = _longest(axis, block, f.is_transposed)
        return Bands(span, "table", (tuple((r, None, False) for r in range(block)),) * span)
    at = np.arange(count, dtype=np.int64)
    if f.is_transposed:
        low, high = -((axis.high - at * axis.denominator) // axis.step), -((axis.low - (at + 1) * axis.denominator) // axis.step) - 1
        low[0], high[-1] = min(low[0], 0), max(high[-1], taps - 1)  # the ends also stand for all that lies outside
        # A tap outside has weight 0, and its place is the nearest tap inside. The window of the same element holds that one too, so adding
        # it is harmless, unless the window lies outside altogether.
        is_certain = bool((high >= 0).all() and (low < taps).all())
    else:
        low, high = (axis.step * at + axis.low) // axis.denominator, (axis.step * at + axis.high) // axis.denominator
        is_certain = not f.excludes_outside or bool(low[0] >= 0 and high[-1] < taps)
    if f.kind == "cubic":  # 0 one element away from the middle, and by other coefficients anywhere
        base = axis.step * np.arange(axis.outputs if axis.outputs <= _MOST_EXAMINED else 0, dtype=np.int64) + axis.shift
        is_certain = is_certain and f.coefficient < 0 and len(base) > 0 and not (((base + axis.radius) % axis.denominator == 0)
                                                                             | ((base - axis.radius) % axis.denominator == 0)).any()
    first = low[::block].repeat(block)[:count]
    low, high = low - first, high - first
    span = max(1, int(high.max()) + 1)
    if span > 64:  # a loop takes them all alike
        return Bands(span, "table", (tuple((r, None, False) for r in range(block)),) * span)
    ranges = [(int(low[r::block].min()), int(low[r::block].max()), int(high[r::block].min()), int(high[r::block].max()))
              for r in range(min(block, count))]
    taps_of = tuple(tuple((r, None, is_certain and b <= k <= c) for r, (a, b, c, d) in enumerate(ranges) if a <= k <= d)
                    for k in range(span))
    return Bands(span, "table", taps_of)


def _divides(axis: Axis) -> bool:
    return 0 <= axis.step and axis.step * axis.outputs + abs(axis.low) < _LIMIT and axis.denominator < _LIMIT


def bands_of(axis: Axis, block: int, f: Filter, is_nearest: bool, is_unrolled: bool = True) -> Bands:
    """is_unrolled: False for bands that a loop takes, from a table."""
    if is_unrolled:
        found = _even(axis, block, f)
        if found is not None:
            return found
        if is_nearest and block == 1 and not f.is_transposed:
            return Bands(1, "divided" if _divides(axis) else "table", (((0, 1.0, True),),))
    return _listed(axis, block, f)


class BandEngine(Engine):
    """All modes, both directions, any layout."""

    id = "resize.band"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ResizeProblem)
        largest = max(prod(o.desc.shape[1:]) for o in problem.operands)
        if largest >= _LIMIT:
            return refuse(f"one image has {largest} elements (at most {_LIMIT - 1})")
        if problem.is_empty:
            return SUPPORTED
        entries = max(_entries(axis, 1, problem) for axis in problem.axes)
        if entries >= _LIMIT:
            return refuse(f"the weights of one dimension are {entries} (at most {_LIMIT - 1})")
        if not self.configs(problem, device):
            return refuse(f"its tables need more than workspace_limit={problem.policy.workspace_limit} bytes")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ResizeProblem)
        vector = vector_limit([o.desc for o in problem.operands])
        order = _order(problem)
        first, last = (_axis(problem, order[0]), _axis(problem, order[-1]))
        widths = [vector, vector // 2, 1] if vector > 2 else [vector, 1]
        most = {"f32": 64, "f64": 16}[_compute(problem)]  # sums that registers hold
        found = []
        for v in dict.fromkeys(widths):
            for rows in _blocks(first, problem):
                for across in _blocks(last, problem):
                    if rows * across * v <= most and rows * across <= 32:
                        found.append(EngineConfig.of(vec=v, rows=rows, across=across))
        limit = problem.policy.workspace_limit
        # the table's weights are loaded by blocks of powers of two
        found = [c for c in found if all(loop.block in (1, 2, 4, 8) or not loop.has_weights for loop in _loops(problem, c))
                 and (limit is None or self._scratch(problem, c)[1] <= limit)
                 and all(_entries(_axis(problem, a), b, problem) < _LIMIT for a, b in zip(order, _block_of(order, c), strict=True))]
        return tuple(sorted(found, key=lambda c: self.estimate(problem, c, device))[:16])

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Microseconds: the launches, the bytes, and the slower of what is executed and what L1 delivers. Fitted to an H100."""
        assert isinstance(problem, ResizeProblem)
        source, target, vector = problem.inputs[0].desc, problem.outputs[0].desc, config["vec"]
        loops, size = _loops(problem, config), problem.outputs[0].desc.dtype.num_bytes
        rows, across = loops[0].block, loops[-1].block
        threads = target.shape[0] * (target.shape[1] // vector) * prod(ceil_div(_axis_count(problem, loop.axis), loop.block)
            for loop in loops)
        warps = min(48, 4 * (512 // max(32, 30 + int(0.8 * _live_words(loops, vector, size)))), max(threads, 1) / (32 * device.num_sms))
        # lines of 128 bytes that a warp's accesses touch: neighbours take packs of channels, or else blocks
        count, taps = _count(_axis(problem, loops[-1].axis), problem.is_backward)
        is_dense = source.strides[1] == 1 and source.shape[1] > 1
        stores = rows if not is_dense else rows * across
        step, width = (vector, vector) if is_dense else (across * taps / count, across)
        lines = prod(loop.span for loop in loops) * min(32.0, max(1.0, step * size / 4)) + stores * max(1.0, width * size / 4)
        instructions = 60 + _instructions(loops, vector) + 4 * stores + rows * across * vector / 2
        clock = device.num_sms * 1.75e3  # clocks of all SMs in a microsecond
        executed = threads * instructions / (clock * 128 * min(1.0, 0.6 + 0.015 * warps))
        # a turn of a loop waits for its loads
        executed *= (1.3 if any(loop.round for loop in loops[:-1]) else 1) * (4 if loops[-1].round else 1)
        moved = problem.num_bytes / (device.bandwidth_gbs * 1e3 * 0.8) * (1 + 2 / max(warps, 1))
        return 1.0 + 1.5 * any(loop.places == "table" for loop in loops) + float(
            (moved**3 + max(executed, 3 * threads / 32 * lines / clock) ** 3) ** (1 / 3))

    def _scratch(self, problem: ResizeProblem, config: EngineConfig) -> tuple[dict[int, tuple[WorkspaceArg, WorkspaceArg]], int]:
        """Where each dimension's table of places and of weights lies, and the bytes of all."""
        scratch, tables = Scratch(), {}
        for loop in _loops(problem, config):
            if loop.places == "table":
                blocks = ceil_div(_axis_count(problem, loop.axis), loop.block)
                tables[loop.axis] = (scratch.take(4 * blocks * loop.span),
                                     scratch.take((8 if _compute(problem) == "f64" else 4) * blocks * loop.block * loop.span))
        return tables, scratch.num_bytes

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ResizeProblem)
        if problem.is_empty:
            return Build(())
        tables, num_bytes = self._scratch(problem, config)
        loops = _loops(problem, config)
        steps = [self._table_step(problem, loops, device, tables)] if tables else []
        return Build((*steps, *self._band_steps(problem, config, loops, device, tables)), num_bytes)

    def _table_step(self, problem: ResizeProblem, loops: tuple[LoopConsts, ...], device: DeviceInfo,
                    tables: dict[int, tuple[WorkspaceArg, WorkspaceArg]]) -> Step:
        args: list[Arg] = []
        most = 0
        for loop in loops:
            if loop.axis not in tables:
                continue
            a, axis, (places, weights) = loop.axis, _axis(problem, loop.axis), tables[loop.axis]
            entries = ceil_div(_axis_count(problem, a), loop.block) * loop.block * loop.span
            most = max(most, entries)
            args += [Arg(f"ptr_places{a}", "u64", places), Arg(f"ptr_weights{a}", "u64", weights), Arg(f"entries{a}", "u32", entries),
                     Arg(f"span{a}", "u32", loop.span), Arg(f"block{a}", "u32", loop.block), Arg(f"extent{a}", "s64", axis.extent),
                     Arg(f"outputs{a}", "s64", axis.outputs)]
            args += [Arg(f"{name}{a}", "s64", getattr(axis, name)) for name in ("step", "shift", "denominator", "low", "high", "radius")]
        f, axes = Filter.of(problem), tuple(loop.axis for loop in loops if loop.axis in tables)
        consts = TableConsts(_compute(problem), axes, f.is_transposed, f.kind, f.is_normalised, f.excludes_outside, f.coefficient)
        return Step.of("resize/table", problem.op, Target.for_arch(device.arch), _TABLE_THREADS, args, consts,
                       (ceil_div(most, _TABLE_THREADS), len(axes), 1), suffix=f"{problem.mode}_{consts.compute}")

    def _band_steps(self, problem: ResizeProblem, config: EngineConfig, loops: tuple[LoopConsts, ...], device: DeviceInfo,
                    tables: dict[int, tuple[WorkspaceArg, WorkspaceArg]]) -> list[Step]:
        source, target = problem.inputs[0].desc, problem.outputs[0].desc
        vector, rank = config["vec"], len(loops)
        order = tuple(loop.axis for loop in loops)
        counts = {a: _axis_count(problem, a) for a in order}
        blocks = {loop.axis: loop.block for loop in loops}
        missing = (0,) * (rank - len(problem.axes))
        source_row, target_row = (*byte_strides(source), *missing), (*byte_strides(target), *missing)
        wide = any(abs(s) >= _LIMIT for s in (*source_row, *target_row, source_row[1] * vector, target_row[1] * vector,
                                              *(target_row[2 + a] * blocks[a] for a in order)))
        across, size = loops[-1].block, target.dtype.num_bytes
        piece = min(16, across * size)
        end = order[-1]
        is_row = (vector == 1 and across in (2, 4, 8) and target_row[2 + end] == size and counts[end] % across == 0
                  and target.align >= piece
                  and all(s % piece == 0 or n == 1 for i, (s, n) in enumerate(zip(byte_strides(target), target.shape, strict=True))
                          if i != 2 + end))
        packs = (tuple(range(across)),) if is_row else tuple((s,) for s in range(across))
        extents = (target.shape[1] // vector, *(ceil_div(counts[a], blocks[a]) for a in range(rank)))
        images = max(1, min(target.shape[0], (_LIMIT - 1) // max(prod(extents), 1)))
        source_name, target_name = problem.inputs[0].name, problem.outputs[0].name
        names = ("n", "c", *(f"o{a}" for a in range(rank)))
        can_follow = Target.for_arch(device.arch).capability >= (9, 0)
        steps: list[Step] = []
        for begin in range(0, target.shape[0], images):
            strides = {"x": (source_row[0], source_row[1] * vector, *(0,) * rank),
                       "y": (target_row[0], target_row[1] * vector, *(target_row[2 + a] * blocks[a] for a in range(rank)))}
            digits = Digits(names, (min(images, target.shape[0] - begin), *extents), strides).ordered_for("y")
            args = [Arg("ptr_x", "u64", shifted(TensorArg(source_name), begin * source_row[0])),
                    Arg("ptr_y", "u64", shifted(TensorArg(target_name), begin * target_row[0])), Arg("num_threads", "u32", digits.size)]
            args += digits.args(wide)
            for loop in loops:
                a, axis = loop.axis, _axis(problem, loop.axis)
                args.append(Arg(f"stride_x{a}", "s64" if wide else "s32", source_row[2 + a]))
                if loop.places == "table":
                    args.append(Arg(f"ptr_places{a}", "u64", tables[a][0]))
                    if loop.has_weights:
                        args.append(Arg(f"ptr_weights{a}", "u64", tables[a][1]))
                else:
                    args.append(Arg(f"last{a}", "s32", _count(axis, problem.is_backward)[1] - 1))
                if loop.has_ends:
                    args.append(Arg(f"last_block{a}", "u32", ceil_div(counts[a], loop.block) - 1))
                if loop.places == "divided":
                    multiplier, shift = magic(axis.denominator)
                    args += [Arg(f"step{a}", "s32", axis.step), Arg(f"low{a}", "s32", axis.low),
                             Arg(f"denominator{a}", "u32", axis.denominator), Arg(f"multiplier{a}", "u32", multiplier),
                             Arg(f"shift{a}", "u32", shift)]
            for name, loop in (("first", loops[0]), ("last", loops[-1])):
                args += [Arg(f"outputs_{name}", "s32", counts[loop.axis]), Arg(f"stride_{name}", "s64", target_row[2 + loop.axis])]
            live = _live_words(loops, vector, size)
            many = _unrolled_loads(loops) >= 56 and not _has_fences(loops, size)
            ctas = 2 if size == 8 or live > 140 else 3 if live > 85 or many else 4
            consts = BandConsts(source.dtype.name, _compute(problem), loops, digits.consts(wide), vector, packs,
                                _has_fences(loops, size), _prefetches(loops, size))
            threads = 128
            steps.append(Step.of("resize/band", problem.op, Target.for_arch(device.arch), threads, args, consts,
                                 ceil_div(digits.size, threads), min_ctas_per_sm=ctas,
                                 follows=bool(tables) and can_follow and not steps,
                                 suffix=f"{consts.dtype}_v{vector}_b{loops[0].block}x{across}"))
        return steps


def _compute(problem: ResizeProblem) -> str:
    return compute_type(problem.inputs[0].desc.dtype)


def _order(problem: ResizeProblem) -> tuple[int, ...]:
    """The dimensions as the loops take them: the output's densest innermost; there are at least two."""
    target, rank = problem.outputs[0].desc, len(problem.axes)
    if rank == 1:
        return 1, 0
    return tuple(by_stride(target.shape[2:], target.strides[2:]))


def _axis(problem: ResizeProblem, a: int) -> Axis:
    return problem.axes[a] if a < len(problem.axes) else _SINGLE


def _axis_count(problem: ResizeProblem, a: int) -> int:
    return _count(_axis(problem, a), problem.is_backward)[0]


def _blocks(axis: Axis, problem: ResizeProblem) -> tuple[int, ...]:
    """How many outputs a thread may take along a dimension: powers of two, and multiples of the period of the bands; where small
    ones need no table of weights, those that need none."""
    count = _count(axis, problem.is_backward)[0]
    period = _period(axis, problem.is_backward) if axis.step else 1
    found = sorted(b for b in {1, 2, 4, 8} | {period * n for n in (1, 2, 4, 8) if period * n <= 8} if b < 2 * count)
    known = [b for b in found if not bands_of(axis, b, Filter.of(problem), problem.mode == "nearest").has_weights]
    return tuple(known if known and known[0] <= 2 else found)


def _block_of(order: tuple[int, ...], config: EngineConfig) -> tuple[int, ...]:
    return config["rows"], *(1,) * (len(order) - 2), config["across"]


def _entries(axis: Axis, block: int, problem: ResizeProblem) -> int:
    """The weights of one dimension, were they all in a table."""
    return ceil_div(_count(axis, problem.is_backward)[0], block) * block * (_listed(axis, block, Filter.of(problem)).span + 4)


def _instructions(loops: tuple[LoopConsts, ...], vector: int) -> float:
    """What a thread executes in all taps."""
    total = 0.0
    for d in range(len(loops) - 1, -1, -1):
        loop = loops[d]
        width = vector * (loops[-1].block if d == 0 else 1)
        readers = sum(map(len, loop.taps)) / max(1, len(loop.taps)) * loop.span
        body = 6 + vector if d == len(loops) - 1 else total  # a load, the address and conversions
        used = sum(bool(t) for t in loop.taps) / max(1, len(loop.taps)) * loop.span
        total = used * (body + (0 if loop.holds_places else 3) + (2 if loop.has_weights and not loop.holds_weights else 0))
        total += readers * width if d in (0, len(loops) - 1) else 0
    return total


def _unrolled_loads(loops: tuple[LoopConsts, ...]) -> int:
    return prod(loop.round or loop.span for loop in loops)


def _has_fences(loops: tuple[LoopConsts, ...], size: int) -> bool:
    return size == 2 and _unrolled_loads(loops) >= 56 and any(loop.has_ends for loop in loops)


def _prefetches(loops: tuple[LoopConsts, ...], size: int) -> bool:
    return len(loops) == 2 and size < 8 and loops[0].round == 1 and not loops[1].round


def _live_words(loops: tuple[LoopConsts, ...], vector: int, size: int) -> int:
    """What registers hold at once: sums, places and weights, half of what is loaded and of the addresses."""
    held = loops[-1].span + sum(loop.span * loop.block for loop in loops if loop.holds_weights)
    words = max(1, vector * size // 4)
    if _prefetches(loops, size):
        loaded = loops[-1].span * (words + 2)
    elif _has_fences(loops, size):
        loaded = _unrolled_loads(loops) * (words + 1) // 6 + 2 * loops[0].block - 5
    else:
        loaded = _unrolled_loads(loops) * (words + 1) // 2
    return (loops[0].block + 1) * loops[-1].block * vector * (2 if size == 8 else 1) + loaded + held


@lru_cache(maxsize=4096)
def _loops_of(axes: tuple[tuple[int, Axis, int], ...], f: Filter, is_nearest: bool, vector: int, size: int) -> tuple[LoopConsts, ...]:
    """axes: (index, axis, block) from the outermost loop on. size: bytes of an element."""
    loops: tuple[LoopConsts, ...] = ()
    loads = words = 2 if size == 8 else 1
    for d in range(len(axes) - 1, -1, -1):
        a, axis, block = axes[d]
        own = f if axis is not _SINGLE else Filter("box", 0.0, False, False, f.is_transposed)
        is_ragged = _count(axis, f.is_transposed)[0] % block != 0
        bands = bands_of(axis, block, own, is_nearest)
        weights = bands.span * block * words if bands.has_weights else 0
        loop = LoopConsts(a, block, bands.span, bands.places, bands.advance, bands.origin, bands.taps, 0, weights > 0,
                          bands.has_ends, d > 0 and bands.span <= _HELD, d > 0 and 0 < weights <= _HELD, is_ragged)
        most = _LOADS[size == 2 and not any(one.has_weights for one in (loop, *loops))]
        if (_instructions((loop, *loops), vector) > _UNROLL or loads * bands.span > most or (d > 0 and weights > 2 * _HELD)
                or any(inner.has_weights and not inner.holds_weights and not inner.round for inner in loops)):
            bands = bands_of(axis, block, own, is_nearest, False)
            turn = max(1, min(4, bands.span, int(300 / max(1.0, _instructions(loops, vector))), _LOADS[False] // loads))
            if loops and d == 0 and len(axes) == 2 and not loops[0].round and size < 8:
                turn = 1
            span = ceil_div(bands.span, turn) * turn
            taps = (tuple((r, None, False) for r in range(block)),) * turn
            loop = LoopConsts(a, block, span, "table", 0, 0, taps, turn, True, False, False, False, is_ragged)
        loads *= loop.round or loop.span
        loops = (loop, *loops)
    return loops


def _loops(problem: ResizeProblem, config: EngineConfig) -> tuple[LoopConsts, ...]:
    order = _order(problem)
    axes = tuple((a, _axis(problem, a), b) for a, b in zip(order, _block_of(order, config), strict=True))
    return _loops_of(axes, Filter.of(problem), problem.mode == "nearest", config["vec"],
                     problem.inputs[0].desc.dtype.num_bytes)


_BAND = BandEngine()
ENGINES: dict[str, tuple[Engine, ...]] = {"resize": (_BAND,), "resize_backward": (_BAND,)}
