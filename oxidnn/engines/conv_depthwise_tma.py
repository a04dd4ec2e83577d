"""Depthwise convolution of 16-bit types by tensor copies, sm_90a: the products of conv_depthwise_mma, fed and emptied by TMA.

Rows of the source come as boxes, padding included, and rows of the target leave as such, so that warps do little but ldmatrix and
products; one thread sends, across strips. Lines of a stage are swizzled. Columns of a stride of two are parted into even and odd ones,
so that what an ldmatrix reads lies in neighbouring lines. In the filter's gradient the single tap at the end of an odd row of taps is
met by two rows of dy at a time.

Zeros off the diagonal meet the other channels of a group: an infinity or a NaN becomes a NaN in all 8 channels there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, ClassVar

from ..codegen.fastdiv import magic
from ..codegen.pointwise import Expression
from ..codegen.spec import Target, TensorMapSpec
from ..device import DeviceInfo
from ..dtypes import F32
from ..ops.base import Problem
from ..ops.conv import ConvProblem
from ..ops.epilogue import align_shape
from ..tensor import TensorDesc, packed_strides
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, ScalarArg, Scratch, Step, Support, TensorArg, TensorMapArg, refuse
from .conv_depthwise import POINT, Axis, Depthwise, Meeting, lower_any
from .conv_depthwise_mma import as_products
from .digits import DigitConsts, Digits, ceil_div
from .element_epilogue import ElementEpilogue, OperandConsts, operand_over
from .reduce_tree import reduction_steps

_GROUPS = (8, 6, 4)
_SMEM_BYTES = 227 << 10
_MAX_STAGES = 8
# Of a quarter SM: a product (of the filter's gradient), what a warp's row and each of its tiles cost besides; the same of a warp alone; a
# step without rows, an item; what warps in numbers that four quarters do not share evenly cost.
_PRODUCT_CLOCKS, _SUM_CLOCKS, _ROW_CLOCKS, _TILE_CLOCKS = 5.67, 6.84, 32, 16
_ALONE_CLOCKS, _LATENCY_CLOCKS, _TILE_LATENCY_CLOCKS, _IDLE_CLOCKS, _ITEM_CLOCKS, _UNEVEN = 11.1, 215, 44, 346, 111, 1.055
_MAX_BOX = 256
_MAX_STRIDE = 2**40


@dataclass(frozen=True, slots=True)
class Product:
    """Of the filter's gradient: two taps (row, column), or one, and how many steps ago the rows of dy were read that they meet; `source`
    and `column`: the row of the step and the first tap column whose pixels are read."""

    taps: tuple[tuple[int, int], ...]
    lags: tuple[int, ...]
    source: int
    column: int


@dataclass(frozen=True, slots=True)
class TmaDepthwiseConsts(ElementEpilogue):
    """groups: of 8 channels, and warps. A tile is two blocks of 8 neighbouring pixels of the target; `tiles` of them, of `segments` images
    with `blocks` each. width: columns of the source in a box, of `halves` those of one parity. A line is a pixel of a stage.
    frees: warps free stages, not the CTA.

    Rows of taps are those of all slices of depth, and so are the rows of a step. taps_bytes: of the filter's axes (channel, slice, row,
    column). operand_images: byte strides of the operands' images.
    """

    kind: str
    target: str
    depth: Axis
    is_deep: bool
    rows: Axis
    steps: tuple[Meeting, ...]
    taps: int
    stride: int
    dilation: int
    low: int
    groups: int
    tiles: int
    segments: int
    halves: bool
    stages: int
    digits: DigitConsts
    taps_bytes: tuple[int, int, int, int]
    flip: bool
    sums_taps: bool
    frees: bool
    operands: tuple[OperandConsts, ...] = ()
    operand_images: tuple[int, ...] = ()
    epilogue: Expression | None = None
    compute: str = "f32"

    @property
    def pitch(self) -> int:
        return 128 if self.groups > 4 else 64

    @property
    def blocks(self) -> int:
        return 2 * self.tiles // self.segments

    @property
    def source_rows(self) -> int:
        return len({m.source for m in self.steps})

    @property
    def step_rows(self) -> int:
        """Of a slice."""
        return self.source_rows // self.depth.taps

    @property
    def tap_rows(self) -> int:
        return self.depth.taps * self.rows.taps

    def coordinates(self, channel: str, column: str, row: str, depth: str, image: str) -> list[str]:
        """Of a box."""
        return [channel, column, row, *([depth] if self.is_deep else []), image]

    @property
    def width(self) -> int:
        columns = (8 * self.blocks - 1) * self.stride + (self.taps - 1) * self.dilation + 1
        return (columns + self.odd + 1) // 2 if self.halves else columns

    @property
    def odd(self) -> int:
        """Whether a tile begins in an odd column, of halves."""
        return self.low % 2 if self.halves else 0

    @property
    def parity_lines(self) -> int:
        return ceil_div(self.segments * self.source_rows * self.width, 8) * 8

    @property
    def source_lines(self) -> int:
        return self.parity_lines * (2 if self.halves else 1)

    @property
    def source_bytes(self) -> int:
        """That copies bring for a step."""
        return 16 * self.groups * self.segments * self.source_rows * self.width * (2 if self.halves else 1)

    @property
    def target_bytes(self) -> int:
        return 16 * self.groups * 16 * self.tiles

    @property
    def target_at(self) -> int:
        return self.source_lines * self.pitch

    @property
    def stage_bytes(self) -> int:
        lines = self.source_lines + (16 * self.tiles if self.sums_taps else 0)
        return ceil_div(lines * self.pitch, 1024) * 1024

    @property
    def out_at(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def out_bytes(self) -> int:
        return 0 if self.sums_taps else 16 * self.tiles * self.pitch

    @property
    def barriers_at(self) -> int:
        return self.out_at + 2 * self.out_bytes

    @property
    def scrap_at(self) -> int:
        """A word of each thread, of the filter's gradient."""
        return self.barriers_at + 16 * self.stages

    @property
    def sent_at(self) -> int:
        """What the sending thread keeps: which box is next."""
        return ceil_div(self.scrap_at + (128 * self.groups if self.sums_taps else 0), 16) * 16

    @property
    def smem_bytes(self) -> int:
        return self.sent_at + 64

    @property
    def first_box(self) -> int:
        """The box column that the first tile's begins with."""
        return -self.low // 2 if self.halves else -self.low

    @property
    def tile_boxes(self) -> int:
        """Box columns from tile to tile."""
        return 8 * self.blocks * (1 if self.halves else self.stride)

    @property
    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """Taps across, two by two."""
        return tuple(tuple(range(s, min(s + 2, self.taps))) for s in range(0, self.taps, 2))

    def line_of(self, block: int, row: int, tap: int) -> int:
        """The line under pixel 0 of a block (of all segments') and a column of taps, in a row of the step."""
        segment, position = divmod(block, self.blocks)
        row += segment * self.source_rows
        column = position * 8 * self.stride + tap * self.dilation + self.odd
        return column % 2 * self.parity_lines + row * self.width + column // 2 if self.halves else row * self.width + column

    @property
    def lane_lines(self) -> int:
        """Lines from a pixel of a block to the next."""
        return 1 if self.halves else self.stride

    @property
    def block_lines(self) -> int:
        return self.line_of(1, 0, 0) - self.line_of(0, 0, 0)

    @property
    def tap_lines(self) -> int:
        return self.line_of(0, 0, 1) - self.line_of(0, 0, 0)

    def _residues(self, taps: int) -> tuple[int, ...]:
        return tuple(sorted({self.line_of(2 * a, e, pair[0]) % 8 for a in range(self.tiles) for e in range(self.source_rows)
                             for pair in self.pairs if len(pair) >= taps}))

    @property
    def residues(self) -> tuple[int, ...]:
        """Of 8, of the lines that ldmatrix begins with; of the filter's gradient but for single taps."""
        return self._residues(2 if self.sums_taps else 1)

    @property
    def single_residues(self) -> tuple[int, ...]:
        only = [p[0] for p in self.pairs if len(p) == 1]
        return tuple(sorted({self.line_of(2 * a, e, s) % 8 for a in range(self.tiles) for e in range(self.source_rows) for s in only}))

    @property
    def products(self) -> tuple[Product, ...]:
        found = []
        for pair in self.pairs:
            s = pair[0]
            for e in range(self.source_rows):
                meetings = [m for m in self.steps if m.source == e]
                if len(pair) == 2:
                    found += [Product(((m.tap, s), (m.tap, s + 1)), (m.lag,), e, s) for m in meetings]
                else:
                    twos = [meetings[i : i + 2] for i in range(0, len(meetings), 2)]
                    found += [Product(tuple((m.tap, s) for m in two), tuple(m.lag for m in two), e, s) for two in twos]
        return tuple(found)

    def products_of(self, row: int, column: int) -> list[tuple[int, tuple[int, ...]]]:
        return [(i, p.lags) for i, p in enumerate(self.products) if p.source == row and p.column == column]

    def tap(self, row: int, column: int) -> int:
        at = row * self.taps + column
        return self.tap_rows * self.taps - 1 - at if self.flip else at

    def tap_bytes(self, row: int, column: int) -> int:
        """From a channel's first tap to this one, which is read backwards with `flip`."""
        row, s = divmod(self.tap(row, column), self.taps)
        z, r = divmod(row, self.rows.taps)
        return z * self.taps_bytes[1] + r * self.taps_bytes[2] + s * self.taps_bytes[3]


def _shape(d: Depthwise, groups: int, tiles: int, segments: int, stages: int = 2,
           frees: bool = False) -> TmaDepthwiseConsts:
    """The consts as far as they say how much memory is needed."""
    c, is_deep = d.columns, d.source.rank == 5
    # Two taps side by side must lie equally far apart in the halves, wherever they begin; tensor maps have five dimensions.
    halves = c.stride == 2 and c.dilation == 1 and c.source % 2 == 0 and not is_deep
    rows = len({m.source for m in d.rows.steps})
    steps = tuple(Meeting(z * rows + m.source, z * d.rows.taps + m.tap, m.target, m.lag) for z in range(d.depth.taps) for m in d.rows.steps)
    return TmaDepthwiseConsts(d.source.dtype.name, d.target.dtype.name, d.depth, is_deep, d.rows, steps, c.taps, c.stride, c.dilation,
                              c.low, groups, tiles, segments, halves, stages, DigitConsts((), False), (0, 0, 0, 0), False,
                              d.kind == "wgrad", frees)


def _registers(p: ConvProblem, d: Depthwise, c: TmaDepthwiseConsts) -> int:
    if c.sums_taps:
        return min(4 * len(c.products) + 2 * d.rows.lags * c.tiles + 52, 168 if c.tiles <= 2 else 255)
    operands = sum(o.desc.rank > 1 for o in p.inputs if o.name not in d.names)
    held = c.tap_rows * c.taps + 4 * d.rows.lags * c.tiles
    return held + held // 6 + 2 * len(c.residues) + 14 + (6 if c.halves else 0) + 16 * operands


def lower_to_boxes(p: ConvProblem) -> Depthwise | str:
    """As products with diagonals; of one dimension tiles lie along it, and a row is all there is."""
    d = lower_any(p)
    d = d if isinstance(d, str) else as_products(d)
    return d if isinstance(d, str) or p.spatial > 1 else replace(d, rows=POINT, columns=d.rows)


def why_no_maps(d: Depthwise) -> str:
    """"" where tensor maps take source and target."""
    for x in (d.source, d.target):
        extents = [n for i, n in enumerate(x.shape) if i != 1]
        strides = [s * x.dtype.num_bytes for i, s in enumerate(x.strides) if i != 1]
        if any(n > 1 and not 0 < s < _MAX_STRIDE for n, s in zip(extents, strides, strict=True)) or max(x.shape) >= 2**31:
            return "a stride is zero or too large for a tensor map"
    return ""


def tensor_map(x: TensorDesc, box: tuple[int, ...], pitch: int, halves: bool = False) -> TensorMapSpec:
    """By (channel, column, row, depth if any, image), of halves by (channel, parity, column // 2, row, image)."""
    images, channels, *spatial = x.shape
    n, _, *steps = (s * x.dtype.num_bytes if extent > 1 else 16 for s, extent in zip(x.strides, x.shape, strict=True))
    if x.rank == 3:
        spatial, steps = [1, *spatial], [16, *steps]
    dims, strides = [*spatial[::-1], images], [*steps[::-1], n]
    if halves:
        dims, strides = [2, dims[0] // 2, *dims[1:]], [strides[0], 2 * strides[0], *strides[1:]]
    return TensorMapSpec(x.dtype.name, (channels, *dims), tuple(strides), box, swizzle=pitch)


@lru_cache(maxsize=256)
def _lower(p: ConvProblem) -> Depthwise | str:
    d = lower_to_boxes(p)
    if isinstance(d, str):
        return d
    if d.depth.dilation > 1:
        return f"dilation {d.depth.dilation} of depth (1 is supported)"
    for name in (n for n in (p.epilogue.args if p.epilogue is not None and p.spatial == 3 else ()) if n != "acc"):
        assert p.epilogue is not None
        over = align_shape(p.op, name, p.desc(name).shape, d.target.shape, 1, p.epilogue.axis(name))
        if any(n > 1 for i, n in enumerate(over) if i != 1):
            return f"{name} goes over positions of three dimensions (vectors of channels are supported)"
    return why_no_maps(d) or d


def lower_to_unit_steps(p: ConvProblem) -> Depthwise | str:
    """The problem in one or two dimensions, of stride and dilation 1, without an epilogue, or why it is no such one."""
    d = lower_to_boxes(p)
    if isinstance(d, str):
        return d
    if d.source.rank == 5:
        return "3 dimensions (1 and 2 are supported)"
    if {d.rows.stride, d.columns.stride, d.rows.dilation, d.columns.dilation} != {1}:
        return f"stride {(d.rows.stride, d.columns.stride)}, dilation {(d.rows.dilation, d.columns.dilation)} (1 is supported)"
    if p.epilogue is not None:
        return "it has an epilogue"
    return why_no_maps(d) or d


class UnitStepsEngine(Engine):
    """Of groups of one channel and one filter each, unit stride, 16-bit types and channels last: CTAs share items, blocks of images by
    strips of rows by tiles of columns, of chunks of channels."""

    name: ClassVar[str]

    def __init__(self, op: str) -> None:
        self.id = f"{op}.{self.name}"  # type: ignore[misc]
        self.op = op

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        if device.arch != "sm_90a":
            return refuse(f"{self.name} needs sm_90a, the device is {device.arch}")
        d = self._lower(problem)
        if isinstance(d, str):
            return refuse(f"{self.name}: {d}")
        if problem.desc(problem.result).numel == 0 or problem.desc(problem.image).numel == 0:
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        if next(self._configs(problem, d), None) is None:
            return refuse(f"{self.name}: {self._why_none(d)}")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ConvProblem)
        d = self._lower(problem)
        assert isinstance(d, Depthwise)
        return tuple(sorted(self._configs(problem, d), key=lambda c: self.estimate(problem, c, device)))

    @staticmethod
    def _lower(p: ConvProblem) -> Depthwise | str:
        raise NotImplementedError

    def _configs(self, p: ConvProblem, d: Depthwise) -> Iterator[EngineConfig]:
        raise NotImplementedError

    @staticmethod
    def _why_none(d: Depthwise) -> str:
        """Why a problem that it could take has no config."""
        raise NotImplementedError

    def _items(self, d: Depthwise, config: EngineConfig) -> tuple[int, int, int]:
        """Blocks of images, strips of rows, tiles of columns."""
        raise NotImplementedError

    def _shares(self, d: Depthwise, config: EngineConfig, device: DeviceInfo) -> tuple[int, int, int]:
        """Chunks of channels, CTAs that share one, and items of each at most."""
        items, chunks = prod(self._items(d, config)), ceil_div(d.channels // 8, config["groups"])
        rounds = ceil_div(items, max(1, min(items, device.num_sms // chunks)))
        return chunks, ceil_div(items, rounds), rounds

    @staticmethod
    def _share_args(d: Depthwise, items: int, chunks: int, parts: int) -> list[Arg]:
        """What a CTA finds its channels and items by."""
        multiplier, shift = magic(chunks)
        return [Arg(name, "u32", value) for name, value in (
            ("num_items", items), ("parts", parts), ("chunks", chunks), ("chunks_multiplier", multiplier), ("chunks_shift", shift),
            ("channel_groups", d.channels // 8))]


class TmaDepthwiseEngine(Engine):
    """All three directions of a convolution whose groups have one channel and one filter each; dgrad of unit stride."""

    def __init__(self, op: str) -> None:
        self.id = f"{op}.depthwise_tma_sm90"  # type: ignore[misc]
        self.op = op

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        if device.arch != "sm_90a":
            return refuse(f"depthwise_tma_sm90 needs sm_90a, the device is {device.arch}")
        d = _lower(problem)
        if isinstance(d, str):
            return refuse(f"depthwise_tma_sm90: {d}")
        if problem.desc(problem.result).numel == 0 or problem.desc(problem.image).numel == 0:
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        if not self._configs(problem, d, device):
            return refuse("depthwise_tma_sm90: rows do not fit shared memory or the boxes of tensor copies")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ConvProblem)
        d = _lower(problem)
        assert isinstance(d, Depthwise)
        return tuple(sorted(self._configs(problem, d, device), key=lambda c: self.estimate(problem, c, device)))

    def _configs(self, problem: ConvProblem, d: Depthwise, device: DeviceInfo) -> list[EngineConfig]:
        """groups: those that waste fewest channels; tiles across, or over images where one is narrower than a tile."""
        count, width = d.channels // 8, d.columns.target
        # Pieces of pixels that begin amid sectors of memory take twice the time.
        even = [g for g in _GROUPS if 10 * (-count % g) <= count] or sorted(_GROUPS, key=lambda g: -count % g)[:1]
        groups = dict.fromkeys([count] * (count <= 8) + [g for g in even if g <= count])
        blocks = ceil_div(width, 8)
        shapes = [(1, 2), (2, 4), (4, 8), (1, 1)] if blocks == 1 else [(1, 1), (2, 2), (4, 4)] if blocks == 2 else [(1, 1), (2, 1), (4, 1)]
        if blocks > 2 and blocks % 2:  # no tile of two blocks is cut
            shapes += [(2, 4)]
        found = []
        for g in groups:
            for tiles, segments in shapes:
                if segments > (1 if d.source.rank == 5 else d.images) or (segments == 1 and 16 * (tiles - 1) >= width):
                    continue
                c = _shape(d, g, tiles, segments)
                if c.width > _MAX_BOX or _registers(problem, d, c) > 235:
                    continue
                per_sm, stages = self._fit(problem, d, c, device)
                if not stages:
                    continue
                strips = [ceil_div(d.rows.groups, parts) for parts in (1, 2, 4, 8)]
                for strip in dict.fromkeys(s for s in strips if s >= min(7, d.rows.groups)):
                    found += [EngineConfig.of(groups=g, tiles=tiles, segments=segments, strip=strip, stages=stages, frees=frees)
                              for frees in ((False, True) if d.kind == "wgrad" else (False,))]
        return found

    @staticmethod
    def _fit(p: ConvProblem, d: Depthwise, c: TmaDepthwiseConsts, device: DeviceInfo) -> tuple[int, int]:
        """CTAs of an SM and stages of each: as many CTAs as registers allow, if four stages fit."""
        registers = 8 * ceil_div(min(_registers(p, d, c), 255), 8)
        most = max(1, min(16384 // (32 * registers) * 4 // c.groups, 64 // c.groups, 16))  # a quarter's warps have a quarter's registers
        for per_sm in range(most, 0, -1):
            room = min(_SMEM_BYTES, device.smem_per_sm // per_sm - 1024) - 2 * c.out_bytes - 16 * _MAX_STAGES - 128 * c.groups - 80
            stages = min(_MAX_STAGES, room // c.stage_bytes)
            if stages >= (4 if per_sm > 1 else 2):
                return per_sm, stages
        return 1, 0

    def _consts_of(self, d: Depthwise, config: EngineConfig) -> TmaDepthwiseConsts:
        return _shape(d, config["groups"], config["tiles"], config["segments"], config["stages"], config["frees"])

    def _items(self, d: Depthwise, config: EngineConfig) -> tuple[int, ...]:
        """Blocks of images, slices if there are any, strips and columns of tiles."""
        per_tile = 16 * config["tiles"] // config["segments"]
        return (ceil_div(d.images, config["segments"]), *([d.depth.target] if d.source.rank == 5 else []),
                ceil_div(d.rows.groups, config["strip"]), ceil_div(d.columns.target, per_tile))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Rows of products, by a quarter SM's warps or by one alone, over the traffic; fitted to 570 timings on an H200, off by 9 %."""
        assert isinstance(problem, ConvProblem)
        d = _lower(problem)
        assert isinstance(d, Depthwise)
        groups, tiles, strip = config["groups"], config["tiles"], config["strip"]
        c = self._consts_of(d, config)
        items, chunks = prod(self._items(d, config)), ceil_div(d.channels // 8, groups)
        strips = ceil_div(d.rows.groups, strip)
        rows = min(strip + d.rows.lags - 1, ceil_div(d.rows.source, d.rows.per_step) / strips + (d.rows.lags - 1) * (1 - 1 / strips))
        products = tiles * (len(c.products) if c.sums_taps else c.tap_rows * ceil_div(d.columns.taps, 2))
        if device.is_emulated:
            return 20.0 * items * chunks * rows * products + c.frees
        per_sm, _ = self._fit(problem, d, c, device)
        count, rounds = self._rounds(items, chunks, device.num_sms * per_sm)
        warps = min(per_sm, ceil_div(count * chunks, device.num_sms)) * groups / 4 * (_UNEVEN if groups % 4 else 1)
        busy = (products * (_SUM_CLOCKS if c.sums_taps else _PRODUCT_CLOCKS) + _ROW_CLOCKS + _TILE_CLOCKS * tiles) * warps
        alone = products * _ALONE_CLOCKS + _LATENCY_CLOCKS + _TILE_LATENCY_CLOCKS * tiles
        idle = strip + d.rows.lags - 1 - rows
        compute_us = rounds * (rows * max(busy, alone) + idle * _IDLE_CLOCKS + _ITEM_CLOCKS) / 1750
        # pieces of 64 bytes of a pixel come by parts of lines
        speed = (0.838e3 if d.columns.stride == 1 else 0.798e3) * (0.85 if c.pitch == 64 and chunks > 1 else 1.0)
        bytes_us = problem.num_bytes / (device.bandwidth_gbs * speed)
        # 49 taps of small maps gain where warps free stages one by one (27.5 to 23.7, 37.4 to 34.5 us); elsewhere 1 to 3 % either way.
        apart_us = 0.0 if not c.frees else -2.5 if d.columns.taps >= 7 and strip <= 14 else 0.5
        return max(compute_us, bytes_us) + 0.115 * min(compute_us, bytes_us) + 7.6 + (3.2 if c.sums_taps else 0) + apart_us

    @staticmethod
    def _rounds(items: int, chunks: int, resident: int) -> tuple[int, int]:
        """CTAs of a chunk, and rounds of items until all are done: as many as find room, or so many more that the last ones begin where
        others, with an item less, have ended."""
        fewer = max(1, min(resident // chunks, items))
        rounds = ceil_div(items, fewer)
        more = min(ceil_div(resident, chunks), items)
        longest = max(ceil_div(items, more), 2 * (items // more) if more * chunks > resident else 0)
        return (more, longest) if longest < rounds else (ceil_div(items, rounds), rounds)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        if problem.is_empty:
            return Build(())
        p, d = problem, _lower(problem)
        assert isinstance(d, Depthwise)
        groups, segments, strip, is_sum = config["groups"], config["segments"], config["strip"], d.kind == "wgrad"
        shape = self._consts_of(d, config)
        depth, source_depth = ((1,), (shape.depth.taps,)) if shape.is_deep else ((), ())
        source_box = (8 * groups, *([1] if shape.halves else []), shape.width, shape.step_rows, *source_depth, segments)
        target_box = (8 * groups, 8 * shape.blocks, 1, *depth, segments)
        maps = [Arg("map_source", "tensor_map", TensorMapArg(d.names[0], tensor_map(d.source, source_box, shape.pitch, shape.halves))),
                Arg("map_target", "tensor_map", TensorMapArg(d.names[1], tensor_map(d.target, target_box, shape.pitch)))]
        args: list[Arg] = []
        operands, rows, strides = [], [], {}
        for name in (n for n in (p.epilogue.args if p.epilogue is not None else ()) if n != "acc"):
            # of three dimensions none goes over positions
            operand, (image, _, down, across) = operand_over(p, p.epilogue, name, d.target.shape, 2)
            if p.spatial == 1:
                operand, down, across = replace(operand, column_bytes=down), 0, down
            operands.append((operand, image))
            strides[name] = (segments * image, *([0] if shape.is_deep else []), down * strip, across * 8 * shape.blocks)
            args.append(Arg(f"ptr_{name}", "u64", TensorArg(name)))
            rows.append(Arg(f"row_{name}", "s64", down))
        digits = Digits(("n", *(["depth"] if shape.is_deep else []), "strip", "tile"), self._items(d, config), strides)
        size, desc = d.filter.dtype.num_bytes, d.filter
        channel, *steps = (s * size for s in (desc.strides[0], *desc.strides[2:]))
        slice_bytes, row_bytes, column_bytes = (0, 0, *steps)[-3:]
        consts = replace(shape, digits=digits.consts(), taps_bytes=(channel, slice_bytes, row_bytes, column_bytes),
                         flip=p.flip != (d.kind == "dgrad"), operands=tuple(o for o, _ in operands),
                         operand_images=tuple(n for _, n in operands), epilogue=p.epilogue)
        chunks = ceil_div(d.channels // 8, groups)
        per_sm, _ = self._fit(p, d, shape, device)
        count, _ = self._rounds(digits.size, chunks, device.num_sms * per_sm)
        multiplier, shift = magic(chunks)
        values: dict[str, tuple[str, Any]] = {
            "num_items": ("u32", digits.size), "num_groups": ("u32", count), "chunks": ("u32", chunks),
            "chunks_multiplier": ("u32", multiplier), "chunks_shift": ("u32", shift), "channel_groups": ("u32", d.channels // 8),
            "images": ("u32", d.images), "strip": ("s32", strip), "source_rows": ("s32", d.rows.source),
            "target_rows": ("s32", d.rows.target), "target_columns": ("s32", d.columns.target)}
        scratch = Scratch()
        taps = shape.tap_rows * d.columns.taps
        partial = scratch.take(count * d.channels * taps * 4) if is_sum else TensorArg(d.names[2])
        args = [*maps, Arg("ptr_partial" if is_sum else "ptr_filter", "u64", partial), *args]
        args += [Arg(n, t, v) for n, (t, v) in values.items()] + rows + digits.args(consts.digits.wide)
        args += [Arg(f"scalar_{n}", "f32", ScalarArg(n)) for n in consts.epilogue_scalars]
        first = Step.of("conv/depthwise_tma_wgrad_sm90" if is_sum else "conv/depthwise_tma_sm90", self.op,
                        Target.for_arch(device.arch, (8, 0)), 32 * groups, args, consts, count * chunks, dynamic_smem=consts.smem_bytes,
                        min_ctas_per_sm=per_sm,
                        suffix=f"{consts.kind}_{shape.tap_rows}x{d.columns.taps}_g{groups}_t{config['tiles']}_{segments}")
        if not is_sum:
            return Build((first,))
        whole = TensorDesc(F32, (count, *desc.shape), (d.channels * taps, taps, taps, *packed_strides(desc.shape[2:])))
        assert not isinstance(partial, TensorArg)
        sums = reduction_steps(p.op, (whole, partial), (desc, TensorArg(d.names[2])), (0,), "sum", device, scratch, follows=True)
        return Build((first, *sums), scratch.num_bytes)


_OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_transpose", "conv_transpose_dgrad", "conv_transpose_wgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (TmaDepthwiseEngine(op),) for op in _OPS}
