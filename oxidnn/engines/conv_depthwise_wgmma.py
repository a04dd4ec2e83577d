"""The filter's gradient of a depthwise convolution on wgmma, sm_90a: all taps of 8 channels are one product over positions.

dw(r, s, c) = sum of dy(p, q, c) * x(p + r, q + s, c). A line of shared memory holds the 8 channels of a pixel. An operand whose rows lie
along a line takes 8 of them wherever the descriptor points, so the 64 rows of A are 8 channels at 8 neighbouring pixels: the taps across.
Likewise the columns of B are 8 channels of dy in as many rows as there are taps down. Of the result the blocks (tap across, tap down) have
the taps' sums on their diagonals: 1 of 8 products is of use, as in conv_depthwise_mma, but no fragment is loaded and no register holds one.

The tensor cores fetch 8 lines at a time, 128 bytes, and twice as slowly where these are not aligned to that. So 8 neighbouring lines are
the same pixel of 8 slices of the image and of several images, and a tap, across or down, is a multiple of 8 lines away.

Zeros off the diagonal meet the other channels of a group: an infinity or a NaN becomes a NaN in all 8 channels there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F32
from ..ops.base import Problem
from ..ops.conv import ConvProblem
from ..tensor import TensorDesc, packed_strides
from .affine_tiling import Arguments
from .base import SUPPORTED, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .conv_depthwise import Axis, Depthwise, lower_any
from .conv_depthwise_mma import as_products
from .digits import ceil_div
from .reduce_tree import reduction_steps

TAPS = 8  # across, of a product of 64 rows
SLICES = 8
LINE = 16  # bytes
MAX_DOWN = 11  # taps: 44 sums a thread, of 80 registers
MAX_PRODUCTS = 128  # of a stage, in the text of the kernel
MAX_LINES = 96  # that a thread copies, likewise
MAX_STAGES = 8
SMEM_BYTES = 232448
PRODUCERS = 8  # warps
BATCHES = {4: 12, 2: 20, 1: 20}  # lines that a thread holds, by groups
PRODUCT_CLOCKS = 68  # of 64 x 56; fewer columns take hardly less


@dataclass(frozen=True, slots=True)
class Slot:
    """Rows that warps copy: warp w row first + w of `rows`, of x or dy with `extent` pixels in rows and columns: `columns` pixels from the
    tile's on, to lines from `line` on, `pitch` pixels a row."""

    name: str
    first: int
    rows: int
    extent: tuple[int, int]
    columns: int
    line: int
    pitch: int


@dataclass(frozen=True, slots=True)
class WgmmaDepthwiseConsts:
    """Consts of conv/depthwise_wgmma_wgrad_sm90. groups: of 8 channels, each a warpgroup's. A tile is `rows` rows and `columns` columns of
    positions in each of 8 slices: of `images` images, one below the other in each. A stage holds for each group the pixels of x under
    the tile and its taps across, then those of dy in the rows that these meet."""

    kind: str
    groups: int
    down: Axis
    across: Axis
    images: int
    rows: int
    columns: int
    stages: int
    flip: bool

    @property
    def slices(self) -> int:
        """Of an image."""
        return SLICES // self.images

    @property
    def x_columns(self) -> int:
        return self.columns + (TAPS - 1) * self.across.dilation

    @property
    def dy_rows(self) -> int:
        return self.rows + (self.down.taps - 1) * self.down.dilation

    @property
    def lead(self) -> int:
        """Rows of dy that the first row of x meets before its own."""
        return (self.down.taps - 1) * self.down.dilation - self.down.low

    @property
    def x_lines(self) -> int:
        return self.rows * self.x_columns * SLICES

    @property
    def group_bytes(self) -> int:
        return (self.x_lines + self.dy_rows * self.columns * SLICES) * LINE

    @property
    def stage_bytes(self) -> int:
        return self.groups * self.group_bytes

    @property
    def products(self) -> list[tuple[int, int]]:
        """First lines of two columns of positions of all slices, in x and dy."""
        return [((row * self.x_columns + q) * SLICES, (row * self.columns + q) * SLICES)
                for row in range(self.rows) for q in range(0, self.columns, 2)]

    @property
    def producers(self) -> int:
        return PRODUCERS

    @property
    def batch(self) -> int:
        return BATCHES[self.groups]

    @property
    def pixels(self) -> int:
        """Of each slice that a warp copies at a time, all groups of them."""
        return 32 // SLICES // self.groups

    @property
    def slots(self) -> tuple[Slot, ...]:
        a, d = self.across, self.down
        loaded = self.columns + (a.taps - 1) * a.dilation
        x = [Slot("x", i, self.rows, (d.source, a.source), loaded, 0, self.x_columns) for i in range(0, self.rows, PRODUCERS)]
        return (*x, *(Slot("dy", i, self.dy_rows, (d.target, a.target), self.columns, self.x_lines, self.columns)
                      for i in range(0, self.dy_rows, PRODUCERS)))

    @property
    def batches(self) -> list[list[tuple[int, int, bool]]]:
        """Of lines that a thread loads before it stores them: (slot, step of so many pixels, does the row end within it)."""
        lines = []
        for i, slot in enumerate(self.slots):
            lines += [(i, step, (step + 1) * self.pixels > slot.columns) for step in range(ceil_div(slot.columns, self.pixels))]
        return [lines[i : i + self.batch] for i in range(0, len(lines), self.batch)]

    @property
    def smem_bytes(self) -> int:
        return self.stages * self.stage_bytes + 16 * self.stages

    @property
    def width(self) -> int:
        """Columns of a product."""
        return 8 * self.down.taps

    @property
    def bits(self) -> tuple[str, str]:
        """Descriptors of x and dy but for their addresses: 8 lines between halves of k; between chunks of rows a tap."""
        x, dy = (f"0x{lines * SLICES << 32 | SLICES << 16:016X}" for lines in (self.across.dilation, self.down.dilation * self.columns))
        return x, dy

    @property
    def sums(self) -> list[str]:
        return [f"%sum{i}" for i in range(self.width // 2)]


def _consts(d: Depthwise, groups: int, images: int, rows: int, columns: int, flip: bool) -> WgmmaDepthwiseConsts | None:
    c = WgmmaDepthwiseConsts(d.source.dtype.name, groups, d.rows, d.columns, images, rows, columns, 0, flip)
    stages = min(MAX_STAGES, (SMEM_BYTES - 16 * MAX_STAGES) // c.stage_bytes)
    fields = SLICES * max(c.across.dilation, c.down.dilation * columns)
    if stages < 2 or len(c.products) > MAX_PRODUCTS or sum(map(len, c.batches)) > MAX_LINES or fields >= 1 << 14:
        return None
    return replace(c, stages=stages)


@lru_cache(maxsize=256)
def _lower(p: ConvProblem) -> Depthwise | str:
    d = lower_any(p)
    d = d if isinstance(d, str) else as_products(d)
    if isinstance(d, str):
        return d
    if d.source.rank != 4:
        return f"{d.source.rank - 2} dimensions (2 are supported)"
    if (d.rows.stride, d.columns.stride) != (1, 1):
        return f"stride {(d.rows.stride, d.columns.stride)} (1 is supported)"
    if d.columns.taps > TAPS or d.rows.taps > MAX_DOWN:
        return f"{d.rows.taps} x {d.columns.taps} taps (at most {MAX_DOWN} x {TAPS})"
    if any(s < 0 or s * x.dtype.num_bytes >= 2**31 for x in (d.source, d.target) for s in x.strides[1:]):
        return "a stride of rows or columns is negative or too large"
    return d


class WgmmaDepthwiseEngine(Engine):
    """The filter's gradient where groups have one channel and one filter each, of unit stride, 16-bit types and channels last."""

    def __init__(self, op: str) -> None:
        self.id = f"{op}.depthwise_wgmma_sm90"  # type: ignore[misc]
        self.op = op

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        if device.arch != "sm_90a":
            return refuse(f"depthwise_wgmma_sm90 needs sm_90a, the device is {device.arch}")
        d = _lower(problem)
        if isinstance(d, str):
            return refuse(f"depthwise_wgmma_sm90: {d}")
        if problem.desc(problem.result).numel == 0 or problem.desc(problem.image).numel == 0:
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        if problem.epilogue is not None:
            return refuse("depthwise_wgmma_sm90 takes no epilogue")
        if not self._configs(problem, d):
            return refuse("depthwise_wgmma_sm90: rows do not fit shared memory")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ConvProblem)
        d = _lower(problem)
        assert isinstance(d, Depthwise)
        return tuple(sorted(self._configs(problem, d), key=lambda c: self.estimate(problem, c, device)))

    @staticmethod
    def _configs(problem: ConvProblem, d: Depthwise) -> list[EngineConfig]:
        """Groups of channels of a CTA, images of a stage, rows and columns of a tile."""
        count, height, width = d.channels // 8, d.rows.source, d.columns.target
        found = []
        for groups in (4, 2) if count > 1 else (1,):  # pieces of 16 bytes would be half sectors
            for images in (1, 2, 4, 8):
                for rows in dict.fromkeys(ceil_div(ceil_div(height, SLICES // images), parts) for parts in (1, 2, 3, 4, 8)):
                    for columns in dict.fromkeys(2 * ceil_div(ceil_div(width, parts), 2) for parts in (1, 2, 3, 4, 6, 8, 16)):
                        if images < 2 * d.images and _consts(d, groups, images, rows, columns, problem.flip):
                            found.append(EngineConfig.of(groups=groups, images=images, rows=rows, columns=columns))
        return found

    @staticmethod
    def _tiles(d: Depthwise, c: WgmmaDepthwiseConsts) -> tuple[int, int, int]:
        """Blocks of images, and tiles of each along rows and columns."""
        return ceil_div(d.images, c.images), ceil_div(d.rows.source, c.slices * c.rows), ceil_div(d.columns.target, c.columns)

    def _parts(self, d: Depthwise, c: WgmmaDepthwiseConsts, device: DeviceInfo) -> tuple[int, int]:
        """CTAs that share the tiles of a chunk of channels, and tiles of each."""
        units, chunks = prod(self._tiles(d, c)), ceil_div(d.channels // 8, c.groups)
        rounds = ceil_div(units, min(units, max(1, device.num_sms // chunks)))
        return ceil_div(units, rounds), rounds

    @staticmethod
    def _consts_of(problem: ConvProblem, d: Depthwise, config: EngineConfig) -> WgmmaDepthwiseConsts:
        c = _consts(d, config["groups"], config["images"], config["rows"], config["columns"], problem.flip)
        assert c is not None
        return c

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Tiles at the time that their products or their copies take, over the traffic."""
        assert isinstance(problem, ConvProblem)
        d = _lower(problem)
        assert isinstance(d, Depthwise)
        c = self._consts_of(problem, d, config)
        parts, rounds = self._parts(d, c, device)
        chunks, lines = ceil_div(d.channels // 8, c.groups), sum(map(len, c.batches))
        if device.is_emulated:
            return 50.0 * parts * rounds * chunks * (len(c.products) + lines)
        products = c.groups * len(c.products) * max(PRODUCT_CLOCKS, c.width / 2) + 150
        copies = max(18 * PRODUCERS * lines, 1300 * len(c.batches))
        compute_us = ceil_div(parts * chunks, device.num_sms) * (rounds * max(products, copies) + copies + 2000) / 1650
        bytes_us = problem.num_bytes / (device.bandwidth_gbs * 0.838e3 * (1.0 if chunks == 1 else 0.85 if c.groups == 4 else 0.75))
        return max(compute_us, bytes_us) + 0.1 * min(compute_us, bytes_us) + 9

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        if problem.is_empty:
            return Build(())
        p, d = problem, _lower(problem)
        assert isinstance(d, Depthwise)
        c = self._consts_of(p, d, config)
        parts, _ = self._parts(d, c, device)
        blocks, row_tiles, column_tiles = self._tiles(d, c)
        chunks = ceil_div(d.channels // 8, c.groups)
        taps, desc = d.rows.taps * d.columns.taps, d.filter
        scratch = Scratch()
        partial = scratch.take(parts * d.channels * taps * 4)
        t = Arguments(False)
        t.add("ptr_x", "u64", TensorArg(d.names[0]))
        t.add("ptr_dy", "u64", TensorArg(d.names[1]))
        t.add("ptr_partial", "u64", partial)
        for name, x in (("x", d.source), ("dy", d.target)):
            size = x.dtype.num_bytes
            t.add(f"{name}_image", "s64", x.strides[0] * size)
            t.add(f"{name}_row", "s32", x.strides[2] * size)
            t.add(f"{name}_column", "s32", x.strides[3] * size)
        t.add("num_images", "u32", d.images)
        t.add("num_units", "u32", blocks * row_tiles * column_tiles)
        t.add("parts", "u32", parts)
        for name, value in (("image_tiles", row_tiles * column_tiles), ("column_tiles", column_tiles)):
            t.add(name, "u32", value)
            t.divisor(name, value)
        t.add("chunks", "u32", chunks)
        t.divisor("chunks", chunks)
        t.add("channel_groups", "u32", d.channels // 8)
        target, threads = Target.for_arch(device.arch, (8, 0)), 128 * c.groups + 32 * PRODUCERS
        step = Step.of("conv/depthwise_wgmma_wgrad_sm90", self.op, target, threads, t.args, c, parts * chunks, dynamic_smem=c.smem_bytes,
                       suffix=f"{c.kind}_{d.rows.taps}x{d.columns.taps}_g{c.groups}_{c.images}x{c.rows}x{c.columns}")
        whole = TensorDesc(F32, (parts, *desc.shape), (d.channels * taps, taps, taps, *packed_strides(desc.shape[2:])))
        sums = reduction_steps(p.op, (whole, partial), (desc, TensorArg(d.names[2])), (0,), "sum", device, scratch)
        return Build((step, *sums), scratch.num_bytes)


_OPS = ("conv_wgrad", "conv_transpose_wgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (WgmmaDepthwiseEngine(op),) for op in _OPS}
