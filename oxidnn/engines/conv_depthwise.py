"""Depthwise convolution in one or two dimensions: bytes and FMAs, not a matrix product.

A thread has a pack of neighbouring channels (or one, of any layout) and a tile of neighbouring columns, holds its channels' taps in
registers and walks down a strip of rows. Every row of the source is loaded once and added to all rows of the target that it meets, which
are under way in registers. The filter's gradient walks likewise: rows of dy are under way, and the taps are what is summed.

A step reads `per_step` rows of the source (fprop: the stride, dgrad: 1) and completes a group of `per_group` rows of the target (fprop:
1, dgrad: the stride). With positions of dgrad counted from the padding's begin, tap r of position p of dy meets row stride * p + r *
dilation, which is row (r * dilation) % stride of group p + r * dilation // stride.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

from ..codegen.fastdiv import magic
from ..codegen.pointwise import Expression
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import BF16, F16, F32
from ..ops.base import Problem
from ..ops.conv import ConvProblem
from ..tensor import TensorDesc, packed_strides
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, ScalarArg, Scratch, Step, Support, TensorArg, refuse
from .digits import DigitConsts, Digits, ceil_div, power_of_two
from .element_epilogue import ElementEpilogue, OperandConsts, operand_over
from .reduce_tree import reduction_steps

_THREADS = 128
_LIMIT = 2**31
_MAX_REGISTERS = {"fprop": 236, "dgrad": 236, "wgrad": 232}  # by the estimate of `_registers`, of 255
_MAX_PRODUCTS = 4200  # FMAs of a loop's body, all unrolled
_SLOTS_PER_US = 0.52 * 1750  # instructions of a scheduler, as measured


@dataclass(frozen=True, slots=True)
class Meeting:
    """Along rows: row `source` of a step meets tap `tap` in row `target` of the group that began `lag` steps before. Along columns: column
    `source` of the thread's meets tap `tap` in its column `target`; no lag."""

    source: int
    tap: int
    target: int
    lag: int = 0


@dataclass(frozen=True, slots=True)
class Axis:
    """taps, stride, dilation, low padding and both extents of a dimension; how a walk or a tile goes over it."""

    taps: int
    stride: int
    dilation: int
    low: int
    source: int
    target: int
    is_gradient: bool  # of the source: the target's rows lie `stride` apart

    @property
    def per_step(self) -> int:
        return 1 if self.is_gradient else self.stride

    @property
    def per_group(self) -> int:
        return self.stride if self.is_gradient else 1

    @property
    def lags(self) -> int:
        """Groups under way at a time."""
        return (self.taps - 1) * self.dilation // self.stride + 1

    @property
    def groups(self) -> int:
        return (self.target - 1 + self.low) // self.stride - self.low // self.stride + 1 if self.is_gradient else self.target

    @property
    def first_source(self) -> int:
        return self.low // self.stride - (self.lags - 1) if self.is_gradient else -self.low

    @property
    def first_target(self) -> int:
        return self.low // self.stride * self.stride - self.low if self.is_gradient else 0

    @property
    def steps(self) -> tuple[Meeting, ...]:
        """What a step does, for a walk along this axis."""
        offsets = [divmod(r * self.dilation, self.stride) for r in range(self.taps)]
        if self.is_gradient:
            return tuple(Meeting(0, r, f, self.lags - 1 - lead) for r, (lead, f) in enumerate(offsets))
        return tuple(Meeting(e, r, 0, lag) for r, (lag, e) in enumerate(offsets))

    def tile(self, groups: int) -> tuple[Meeting, ...]:
        """What a tile of `groups` groups does."""
        found = []
        for q in range(groups):
            for r in range(self.taps):
                lead, f = divmod(r * self.dilation, self.stride)
                if self.is_gradient:
                    found.append(Meeting(q - lead + self.lags - 1, r, q * self.stride + f))
                else:
                    found.append(Meeting(q * self.stride + r * self.dilation, r, q))
        return tuple(found)


POINT = Axis(1, 1, 1, 0, 1, 1, False)  # a dimension that is not there


@dataclass(frozen=True, slots=True)
class DepthwiseConsts(ElementEpilogue):
    """rows, columns: what a step and a tile do. tile: columns of the target; depth: steps whose loads are under way.

    source_column, target_column: bytes of a column; source_tile, target_tile: the first tile's first column, and columns from tile to tile.
    taps_bytes: of the filter's axes (channel, row, column), or () where a pack's taps lie densely, in words of taps_align bytes.
    """

    source: str
    target: str
    filter: str
    vector: int
    rows: Axis
    steps: tuple[Meeting, ...]
    columns: tuple[Meeting, ...]
    taps_across: int
    tile: int
    depth: int
    digits: DigitConsts
    source_column: int
    target_column: int
    source_tile: tuple[int, int]
    target_tile: tuple[int, int]
    taps_bytes: tuple[int, ...]
    taps_align: int
    flip: bool
    operands: tuple[OperandConsts, ...] = ()
    epilogue: Expression | None = None
    compute: str = "f32"
    packs: int = 0  # of a CTA, in the filter's gradient
    multiplier: int = 1  # filters of a channel

    @property
    def num_taps(self) -> int:
        return self.rows.taps * self.taps_across

    @property
    def unroll(self) -> int:
        """Steps of the loop's body: every group and every load of one has registers of its own."""
        return self.rows.lags * self.depth // gcd(self.rows.lags, self.depth)

    @property
    def source_rows(self) -> tuple[int, ...]:
        return tuple(sorted({m.source for m in self.steps}))

    @property
    def source_columns(self) -> tuple[int, ...]:
        return tuple(sorted({m.source for m in self.columns}))

    def tap(self, row: int, column: int) -> int:
        """The number of a tap in the filter."""
        at = row * self.taps_across + column
        return self.num_taps - 1 - at if self.flip else at


@dataclass(frozen=True)
class Depthwise:
    """A problem as walks: its tensors with byte strides (image, channel, row, column), the axes, channels."""

    kind: str  # "fprop" | "dgrad" | "wgrad"
    channels: int
    images: int
    rows: Axis
    columns: Axis
    source: TensorDesc
    target: TensorDesc  # of wgrad: dy
    filter: TensorDesc
    names: tuple[str, str, str]
    depth: Axis = POINT
    multiplier: int = 1  # filters of a channel

    @property
    def filters(self) -> int:
        return self.channels * self.multiplier

    @property
    def has_planes(self) -> bool:
        """Whether columns, not channels, lie innermost."""
        return self.channels > 1 and self.source.strides[1] > self.source.strides[-1]

    @property
    def is_row(self) -> bool:
        """Whether the one dimension goes across."""
        return self.source.rank == 3 and self.has_planes


def byte_strides(desc: TensorDesc, is_row: bool = False) -> tuple[int, int, int, int]:
    """Byte strides along images, channels, rows and columns; 0 of a dimension that is not there: columns, or rows where it `is_row`."""
    strides = [s * desc.dtype.num_bytes for s in desc.strides]
    if desc.rank == 3:
        strides.insert(2 if is_row else 3, 0)
    return tuple(strides)  # type: ignore[return-value]


def lower(p: ConvProblem) -> Depthwise | str:
    if p.spatial > 2:
        return f"{p.spatial} spatial dimensions (at most 2; depthwise_tma_sm90, the direct engine and im2col take 3)"
    return lower_any(p)


@lru_cache(maxsize=256)
def lower_any(p: ConvProblem) -> Depthwise | str:
    image, filter, result = p.desc(p.image), p.desc(p.filter), p.desc(p.result)
    multiplier = filter.shape[0] // p.groups
    if p.groups != image.shape[1] or filter.shape[0] != p.groups * multiplier or filter.shape[1] != 1:
        return (f"{p.groups} groups of {image.shape[1]} channels and {filter.shape[0]} filters: groups of one channel are supported "
                "(direct and im2col take others)")
    if multiplier != 1 and p.direction == "dgrad":
        return f"dgrad of {multiplier} filters a channel (1 is supported; direct and im2col take others)"
    for desc, name in ((image, p.image), (filter, p.filter), (result, p.result)):
        if desc.dtype not in (F32, F16, BF16):
            return f"{name} is {desc.dtype} (f32, f16 and bf16 are supported; the direct engine takes all)"
    for desc, name in ((image, p.image), (result, p.result)):
        if any(s < 0 for s in desc.strides):
            return f"{name} has negative strides (the direct engine takes any)"
    is_gradient = p.direction == "dgrad"
    names = (p.result, p.image, p.filter) if is_gradient else (p.image, p.result, p.filter)
    source, target = p.desc(names[0]), p.desc(names[1])
    axes = [Axis(r, p.stride[i], p.dilation[i], p.padding[i][0], source.shape[2 + i], target.shape[2 + i], is_gradient)
            for i, r in enumerate(filter.shape[2:])]
    if any(a.low + a.source + a.target * a.stride + a.taps * a.dilation >= _LIMIT for a in axes):
        return "a coordinate exceeds 31 bits"
    depth, rows, columns = (POINT, axes[0], POINT) if len(axes) == 1 else (POINT, *axes)[-3:]
    d = Depthwise(p.direction, image.shape[1], image.shape[0], rows, columns, source, target, filter, names, depth, multiplier)
    return replace(d, rows=POINT, columns=d.rows) if d.is_row else d


def _registers(d: Depthwise, vector: int, tile: int, depth: int, operands: int = 0) -> int:
    """About what the kernel needs: taps, groups under way, a row as values, rows still being loaded, an epilogue's operands."""
    rows, columns = len({m.source for m in d.rows.steps}), len({m.source for m in d.columns.tile(tile)})
    under_way = d.rows.lags * d.rows.per_group * tile * d.columns.per_group * vector
    words = depth * rows * columns * ceil_div(vector * d.source.dtype.num_bytes, 4)
    if d.kind == "wgrad":
        words += depth * tile * ceil_div(vector * d.target.dtype.num_bytes, 4) + (rows - 1) * columns * vector
    written = d.rows.per_group * tile * d.columns.per_group * vector  # whose operands are all loaded at a time
    return d.rows.taps * d.columns.taps * vector + under_way + columns * vector + words + operands * (written + 2) + 36


def _packs(d: Depthwise) -> Iterator[int]:
    """Vector widths, widest first, that every tensor is aligned to. Lone channels of 16 bits only where there are no packs."""
    found = [v for v in (8, 4, 2) if d.channels % v == 0 and d.multiplier == 1 and v * d.source.dtype.num_bytes <= 16
             and all(_takes_packs(x, v) for x in (d.source, d.target))]
    yield from found
    if not found or all(x.dtype is F32 for x in (d.source, d.target, d.filter)):
        yield 1


def _takes_packs(desc: TensorDesc, vector: int) -> bool:
    """Whether channels lie innermost and each pack is aligned to its size, or to 16 bytes if it is larger."""
    unit = min(16, vector * desc.dtype.num_bytes)
    size = desc.dtype.num_bytes
    if desc.strides[1] != 1 or desc.align % unit:
        return False
    return all(s * size % unit == 0 for i, s in enumerate(desc.strides) if i != 1 and desc.shape[i] > 1)


class DepthwiseEngine(Engine):
    """All three directions of a convolution whose groups have one channel and one filter each."""

    def __init__(self, op: str) -> None:
        self.id = f"{op}.depthwise"  # type: ignore[misc]
        self.op = op

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        d = lower(problem)
        if isinstance(d, str):
            return refuse(f"depthwise: {d}")
        if problem.desc(problem.result).numel == 0 or problem.desc(problem.image).numel == 0:
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        if not self._configs(problem, d, device):
            return refuse(f"depthwise: packs of channels are not aligned, or {d.rows.taps} x {d.columns.taps} taps do not fit registers")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ConvProblem)
        d = lower(problem)
        assert isinstance(d, Depthwise)
        return tuple(sorted(self._configs(problem, d, device), key=lambda c: self.estimate(problem, c, device)))

    def _configs(self, problem: ConvProblem, d: Depthwise, device: DeviceInfo) -> list[EngineConfig]:
        found = []
        operands = sum(o.desc.rank > 1 for o in problem.inputs if o.name not in d.names)
        for vector in _packs(d):
            for tile in (8, 7, 4, 2, 1):
                if tile > 1 and tile >= 2 * d.columns.groups:
                    continue
                across = d.columns.tile(tile)
                body = len(d.rows.steps) * len(across) * vector * d.rows.lags
                if tile * d.columns.per_group > 16:
                    continue
                for depth in (1, 2):
                    rounds = depth // gcd(d.rows.lags, depth)  # of all groups under way, in a loop's body
                    needed = _registers(d, vector, tile, depth, operands)
                    # Operands are loaded, and strided columns read, with addresses and predicates of their own.
                    most = _MAX_REGISTERS[d.kind] - (40 if d.kind == "wgrad" and (d.columns.stride > 1 or d.source.dtype is F32) else 0)
                    most = min(most, 170) if operands else most
                    if body * rounds > _MAX_PRODUCTS or needed > most or (operands and depth > 1):
                        continue
                    for strip in self._strips(d):
                        if self._threads(d, vector, tile, strip) < _LIMIT:
                            found.append(EngineConfig.of(vec=vector, tile=tile, strip=strip, depth=depth))
        return found

    @staticmethod
    def _strips(d: Depthwise) -> list[int]:
        """Groups of a strip: all, a half, a quarter, ... of them."""
        strips = [ceil_div(d.rows.groups, parts) for parts in (1, 2, 4, 8, 16, 64, 256, 1024, 4096)]
        return [s for s in dict.fromkeys(strips) if s >= min(4, d.rows.groups)]

    @staticmethod
    def _threads(d: Depthwise, vector: int, tile: int, strip: int) -> int:
        return d.images * ceil_div(d.rows.groups, strip) * ceil_div(d.columns.groups, tile) * (d.filters // vector)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """The largest of: a scheduler's instructions, bytes at three quarters of the bandwidth, bytes under way over 0.9 us of latency."""
        assert isinstance(problem, ConvProblem)
        d = lower(problem)
        assert isinstance(d, Depthwise)
        vector, tile, strip, depth = (config[k] for k in ("vec", "tile", "strip", "depth"))
        rows, across = d.rows.steps, d.columns.tile(tile)
        loads = len({m.source for m in rows}) * len({m.source for m in across}) + (tile if d.kind == "wgrad" else 0)
        slots = (len(rows) * len(across) * vector + loads * (3 + vector) + 12
                 + (0 if d.kind == "wgrad" else d.rows.per_group * tile * d.columns.per_group * (3 + 1.5 * vector)))
        strips = ceil_div(d.rows.groups, strip)
        # rows that a strip reads; those beyond the source cost little
        steps = min(strip + d.rows.lags - 1, ceil_div(d.rows.source, d.rows.per_step) / strips + (d.rows.lags - 1) * (1 - 1 / strips))
        threads = self._threads(d, vector, tile, strip)
        thread_slots = steps * slots + 60 + d.rows.taps * d.columns.taps * vector * 1.5
        if device.is_emulated:
            return (4.0 * ceil_div(threads, 16384) + 0.002 * threads) * thread_slots
        warps = min(48, 65536 // (32 * 8 * ceil_div(_registers(d, vector, tile, depth), 8)) // 4 * 4)
        resident = device.num_sms * warps * 32
        rounds = max(1.0, (threads / resident + ceil_div(threads, resident)) / 2)
        per_scheduler = min(warps, ceil_div(threads, device.num_sms * 32)) / 4
        compute_us = rounds * max(per_scheduler, 1.0) * thread_slots / _SLOTS_PER_US
        reread = steps * strips * d.rows.per_step / d.rows.source
        bytes_us = (problem.num_bytes + (reread - 1) * d.source.num_bytes * 0.3) / (device.bandwidth_gbs * 0.75e3)
        if vector == 1:  # a warp's elements lie `tile` columns apart, or alone in their sectors
            lines = max(1.0, tile * d.source.dtype.num_bytes / 4) if d.has_planes else 2.0
            stored = 0 if d.kind == "wgrad" else d.rows.per_group * tile * d.columns.per_group
            bytes_us = max(1.3 * bytes_us, threads / 32 * steps * (loads + stored) * lines / device.num_sms / 1750)
        under_way = min(resident, threads) * loads * vector * d.source.dtype.num_bytes * depth
        latency_us = d.source.num_bytes * reread / under_way * 0.9
        summed_us = compute_us * 0.25 + 4 if d.kind == "wgrad" else 0.0
        # what neighbouring threads store lies in sectors of their own (a row alone is stored at once)
        parted = {1: 1.0, 2: 1.0, 4: 1.3}.get(tile, 2.3) if d.has_planes and d.kind != "wgrad" and d.rows.taps > 1 else 1.0
        return parted * max(compute_us, bytes_us, latency_us) + 0.15 * min(compute_us, bytes_us) + 6 + steps * 0.05 + summed_us

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        if problem.is_empty:
            return Build(())
        d = lower(problem)
        assert isinstance(d, Depthwise)
        return self._sum_taps(problem, d, config, device) if d.kind == "wgrad" else self._walk(problem, d, config, device)

    def _walk(self, p: ConvProblem, d: Depthwise, config: EngineConfig, device: DeviceInfo) -> Build:
        vector, tile, strip = config["vec"], config["tile"], config["strip"]
        source, target = (byte_strides(x, d.is_row) for x in (d.source, d.target))
        moved = (d.rows.per_group * strip, d.columns.per_group * tile)  # rows and columns of the target from strip to strip, tile to tile
        strides = {"source": digit_strides(source, (d.rows.per_step * strip, d.columns.per_step * tile), vector),
                   "target": digit_strides(target, moved, vector)}
        begin = d.rows.first_target - (d.rows.lags - 1) * d.rows.per_group  # where the first step's group ends
        args = [Arg("ptr_source", "u64", TensorArg(d.names[0], d.rows.first_source * source[2] + d.columns.first_source * source[3])),
                Arg("ptr_target", "u64", TensorArg(d.names[1], begin * target[2] + d.columns.first_target * target[3])),
                Arg("ptr_filter", "u64", TensorArg(d.names[2]))]
        rows = [Arg("row_source", "s64", source[2]), Arg("row_target", "s64", target[2])]
        operands = []
        for name in (n for n in (p.epilogue.args if p.epilogue is not None else ()) if n != "acc"):
            operand, row = operand_over(p, p.epilogue, name, d.target.shape, vector)
            if d.is_row:
                operand, row = replace(operand, column_bytes=row[2]), (row[0], row[1], 0, row[2])
            operands.append(operand)
            strides[name] = digit_strides(row, moved, vector)
            args.append(Arg(f"ptr_{name}", "u64", TensorArg(name, begin * row[2] + d.columns.first_target * row[3])))
            rows += [Arg(f"row_{name}", "s64", row[2])] if operand.walks else []
        names = ["n", "strip", "tile", "pack"]
        extents = [d.images, ceil_div(d.rows.groups, strip), ceil_div(d.columns.groups, tile), d.filters // vector]
        if d.multiplier > 1:
            names[3:], extents[3:] = ["channel", "filter"], [d.channels, d.multiplier]
            strides = {name: (*row[:3], *((row[3], 0) if name == "source" else (d.multiplier * row[3], row[3])))
                       for name, row in strides.items()}
        order = [0, *range(3, len(names)), 1, 2] if d.has_planes else [*range(len(names))]  # neighbouring threads: columns, else channels
        digits = Digits(tuple(names[i] for i in order), tuple(extents[i] for i in order),
                        {name: tuple(row[i] for i in order) for name, row in strides.items()})
        consts = self._consts(p, d, config, digits.consts(), tuple(operands))
        args += [Arg("num_threads", "u32", digits.size), Arg("num_steps", "u32", strip + d.rows.lags - 1),
                 *self._extents(d, strip), Arg("first_target_row", "s32", d.rows.first_target), *rows, *digits.args(consts.digits.wide)]
        args += [Arg(f"scalar_{n}", "f32", ScalarArg(n)) for n in consts.epilogue_scalars]
        step = Step.of("conv/depthwise", self.op, Target.for_arch(device.arch), _THREADS, args, consts, ceil_div(digits.size, _THREADS),
                       suffix=f"{consts.source}_{d.rows.taps}x{d.columns.taps}_v{vector}_t{tile}")
        return Build((step,))

    @staticmethod
    def _extents(d: Depthwise, strip: int) -> list[Arg]:
        values = {"strip_source": d.rows.per_step * strip, "strip_target": d.rows.per_group * strip, "source_rows": d.rows.source,
                  "source_columns": d.columns.source, "target_rows": d.rows.target, "target_columns": d.columns.target,
                  "first_source_row": d.rows.first_source}
        return [Arg(name, "s32", value) for name, value in values.items()]

    def _consts(self, p: ConvProblem, d: Depthwise, config: EngineConfig, digits: DigitConsts, operands: tuple[OperandConsts, ...] = (),
                packs: int = 0) -> DepthwiseConsts:
        vector, tile, desc = config["vec"], config["tile"], d.filter
        size, taps = desc.dtype.num_bytes, desc.shape[2:]
        strides = tuple(s * size for s in (desc.strides[0], *desc.strides[2:]))
        is_dense = all(n == 1 or s == want * size for n, s, want in
                       zip((2, *taps), strides, (prod(taps), *packed_strides(taps)), strict=True))
        align = gcd(16, vector * prod(taps) * size, desc.align)
        apart = (strides[0], 0, strides[1]) if d.is_row else (*strides, 0)[:3]
        return DepthwiseConsts(
            d.source.dtype.name, d.target.dtype.name, desc.dtype.name, vector, d.rows, d.rows.steps, d.columns.tile(tile), d.columns.taps,
            tile * d.columns.per_group, config["depth"], digits, byte_strides(d.source, d.is_row)[3],
            byte_strides(d.target, d.is_row)[3],
            (d.columns.first_source, d.columns.per_step * tile), (d.columns.first_target, d.columns.per_group * tile),
            () if is_dense and align >= 4 else apart, align, p.flip, operands, p.epilogue, packs=packs, multiplier=d.multiplier)

    def _sum_taps(self, p: ConvProblem, d: Depthwise, config: EngineConfig, device: DeviceInfo) -> Build:
        vector, tile, strip = config["vec"], config["tile"], config["strip"]
        source, target = (byte_strides(x, d.is_row) for x in (d.source, d.target))
        taps, count = d.rows.taps * d.columns.taps, d.filters // vector
        items = d.images * ceil_div(d.rows.groups, strip) * ceil_div(d.columns.groups, tile)
        widest = max(1, _THREADS // power_of_two(items)) if d.has_planes else 32
        packs = next(n for n in (32, 16, 8, 4, 2, 1) if n <= min(count, widest) and (count % n == 0 or n <= 8 or count > 4 * n))
        walkers, chunks = _THREADS // packs, ceil_div(count, packs)
        extents = (d.images, ceil_div(d.rows.groups, strip), ceil_div(d.columns.groups, tile))
        digits = Digits(("n", "strip", "tile"), extents,
                        {"source": digit_strides(source, (d.rows.per_step * strip, d.columns.per_step * tile), vector)[:3],
                         "target": digit_strides(target, (strip, tile), vector)[:3]})
        resident = device.num_sms * max(1, 65536 // (_registers(d, vector, tile, config["depth"]) * _THREADS))
        groups = max(1, min(ceil_div(resident, chunks), ceil_div(digits.size, walkers)))
        consts = self._consts(p, d, config, digits.consts(), packs=packs)
        scratch = Scratch()
        partial = scratch.take(groups * d.filters * taps * 4)
        multiplier, shift = magic(chunks)
        counts = {"num_items": digits.size, "item_step": groups * walkers, "num_packs": count, "chunks": chunks,
                  "chunks_multiplier": multiplier, "chunks_shift": shift, "num_steps": strip + d.rows.lags - 1}
        args = [Arg("ptr_source", "u64", TensorArg(d.names[0], d.rows.first_source * source[2] + d.columns.first_source * source[3])),
                Arg("ptr_target", "u64", TensorArg(d.names[1])), Arg("ptr_partial", "u64", partial),
                *(Arg(name, "u32", value) for name, value in counts.items()), *self._extents(d, strip),
                Arg("pack_source", "u64", vector * source[1]), Arg("pack_target", "u64", vector * target[1]),
                Arg("row_source", "s64", source[2]), Arg("row_target", "s64", target[2]), *digits.args(consts.digits.wide)]
        first = Step.of("conv/depthwise_wgrad", self.op, Target.for_arch(device.arch), _THREADS, args, consts, groups * chunks,
                        suffix=f"{consts.source}_{d.rows.taps}x{d.columns.taps}_v{vector}_t{tile}")
        shape = d.filter.shape
        whole = TensorDesc(F32, (groups, *shape), (d.filters * taps, taps, taps, *packed_strides(shape[2:])))
        steps = reduction_steps(p.op, (whole, partial), (d.filter, TensorArg(d.names[2])), (0,), "sum", device, scratch, follows=True)
        return Build((first, *steps), scratch.num_bytes)


def digit_strides(row: Sequence[int], moved: tuple[int, int], vector: int) -> tuple[int, ...]:
    """Byte strides of the digits image, strip, tile and pack. row: of images, channels, rows and columns."""
    n, c, h, w = row
    return n, moved[0] * h, moved[1] * w, vector * c


_OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_transpose", "conv_transpose_dgrad", "conv_transpose_wgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (DepthwiseEngine(op),) for op in _OPS}
