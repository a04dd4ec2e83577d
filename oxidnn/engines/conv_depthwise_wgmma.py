"""Depthwise convolutions and their gradients on wgmma, sm_90a: 8 channels a product, of which the diagonals of blocks of 8 x 8 are of use.

The convolution and the image's gradient (WgmmaWalkEngine): rows of a product are 64 positions of a row of the source, which is read once;
k is (two taps across, channel), columns are (row of the target under way, channel), of tables of diagonals that hold the taps down.

The filter's gradient (WgmmaDepthwiseEngine): all taps of 8 channels are one product over positions.
dw(r, s, c) = sum over x's positions (y, p + s) of dy(y - r, p, c) * x(y, p + s, c), paddings aside. Of a product of 64 x (8 taps across)
columns, rows are (tap down, channel) of dy and columns (tap across, channel) of x; the sums lie on the diagonals of its blocks of 8 x 8:
1 of 8 products is of use, as in conv_depthwise_mma, at a tenth of the instructions.

A step is two rows of x. Both tensors come as boxes of whole pixels (padding is what lies outside), each row once: rows of dy are read by
the warp of the first two taps down when they come, by the next a step later, and so on, so that a row stays in its ring for as many steps
as there are warps. Each warp keeps the last of them in registers: a step's rows of A are ldmatrix of two new rows. Of x a warpgroup
moves its 8 channels into lines of 16 bytes, a pixel each, which an operand without swizzle takes from wherever its descriptor points:
columns of B for neighbouring taps begin a line apart.

Zeros off the diagonal meet the other channels of a group: an infinity or a NaN becomes a NaN in all 8 channels there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F32
from ..ops.base import Problem
from ..ops.conv import ConvProblem
from ..tensor import TensorDesc, packed_strides
from .base import Arg, Build, Engine, EngineConfig, Scratch, Step, TensorArg, TensorMapArg
from .conv_depthwise import Axis, Depthwise
from .conv_depthwise_tma import UnitStepsEngine, lower_to_unit_steps, tensor_map
from .digits import DigitConsts, Digits, ceil_div
from .reduce_tree import reduction_steps

LINE = 16  # bytes: 8 channels of a pixel
ROWS = 2  # of a step
_MAX_DOWN = 7  # taps: 8 blocks of rows, of which a warp has two
_MAX_ACROSS = 8
_MAX_STAGES = 16
_OUTS = 3  # rows of the target under way to memory
_SMEM_BYTES = 227 << 10
# Clocks of an SM: a product and each of its columns; a step of a warpgroup alone, an item, besides.
_PRODUCT_CLOCKS, _COLUMN_CLOCKS, _STEP_CLOCKS, _ITEM_CLOCKS = 15.2, 0.354, 407, 220

Octet = tuple[int, int, int]  # image, row, block of 8 columns of a step


@dataclass(frozen=True, slots=True)
class WgmmaDepthwiseConsts:
    """Consts of conv/depthwise_wgmma_wgrad_sm90. groups: of 8 channels, each a warpgroup's. A tile is `blocks` of 8 neighbouring columns
    of dy, of `images`. stages: of two rows of dy."""

    kind: str
    down: Axis
    across: Axis
    groups: int
    images: int
    blocks: int
    stages: int
    flip: bool
    digits: DigitConsts = DigitConsts(("n", "strip", "tile"), False)

    @property
    def pitch(self) -> int:
        """Of a pixel in a stage; lines are swizzled over as much."""
        return 128 if self.groups > 4 else 64

    @property
    def warps(self) -> int:
        """Of a warpgroup, that have taps; an even number of taps leaves the last one without its first, so that no row before is missed."""
        return self.down.taps // 2 + 1

    @property
    def width(self) -> int:
        """Of a row of x: what a tile's taps meet."""
        return 8 * self.blocks + self.across.taps - 1

    @property
    def pixels(self) -> int:
        return self.images * ROWS * self.width

    @property
    def octets(self) -> tuple[Octet, ...]:
        return tuple((i, e, b) for i in range(self.images) for e in range(ROWS) for b in range(self.blocks))

    @property
    def products(self) -> tuple[tuple[Octet, Octet], ...]:
        """Two octets are a product's k: neighbours; the last of an odd row with the one below."""
        pairs: list[tuple[Octet, Octet]] = []
        for i in range(self.images):
            pairs += [((i, e, b), (i, e, b + 1)) for e in range(ROWS) for b in range(0, self.blocks - 1, 2)]
            if self.blocks % 2:
                pairs.append(((i, 0, self.blocks - 1), (i, 1, self.blocks - 1)))
        return tuple(pairs)

    def line_of(self, octet: Octet) -> int:
        image, row, block = octet
        return (image * ROWS + row) * self.width + 8 * block

    def bits_of(self, product: tuple[Octet, Octet]) -> int:
        """What a descriptor has besides the place of the first line: lines between halves of k, and the product's first line."""
        first, second = map(self.line_of, product)
        return (second - first) << 16 | first

    @property
    def source_stages(self) -> int:
        """Of x, which need no longer stay than until they are lines: as many as are under way of dy."""
        return self.stages - self.warps + 1

    @property
    def source_box_bytes(self) -> int:
        return self.pixels * self.groups * LINE

    @property
    def target_box_bytes(self) -> int:
        return 8 * len(self.octets) * self.groups * LINE

    @property
    def source_bytes(self) -> int:
        return ceil_div(self.pixels * self.pitch, 1024) * 1024

    @property
    def target_bytes(self) -> int:
        return ceil_div(8 * len(self.octets) * self.pitch, 1024) * 1024

    @property
    def lines_bytes(self) -> int:
        """Of a warpgroup's buffer of lines, of which it has two. They lie first: memcheck takes an operand for as many bytes in a row as it
        has elements, where neighbouring taps share lines here, and would see the last ones end beyond the memory."""
        return self.pixels * LINE

    @property
    def barriers_at(self) -> int:
        """Of x, full ones and then empty ones; so those of dy."""
        return 2 * self.groups * self.lines_bytes

    @property
    def target_barriers_at(self) -> int:
        return self.barriers_at + 16 * self.source_stages

    @property
    def zero_at(self) -> int:
        """A word that is zero."""
        return self.target_barriers_at + 16 * self.stages

    @property
    def source_at(self) -> int:
        return ceil_div(self.zero_at + 16, 1024) * 1024

    @property
    def target_at(self) -> int:
        return self.source_at + self.source_stages * self.source_bytes

    @property
    def smem_bytes(self) -> int:
        return self.target_at + self.stages * self.target_bytes

    @property
    def threads(self) -> int:
        return 128 * self.groups + 32

    @property
    def columns(self) -> int:
        return 8 * self.across.taps

    @property
    def registers(self) -> int:
        """About what a thread needs."""
        return self.columns // 2 + 4 * self.images * self.blocks + 5 * ceil_div(self.pixels, 128) + 22


@dataclass(frozen=True, slots=True)
class WgmmaWalkConsts:
    """Consts of conv/depthwise_wgmma_sm90. groups, images, blocks as above; stages: of a row of the source; outs: of one of the target.
    taps_bytes: of the filter's axes (channel, row, column)."""

    kind: str
    target: str
    down: Axis
    across: Axis
    groups: int
    images: int
    blocks: int
    stages: int
    outs: int
    taps_bytes: tuple[int, int, int]
    flip: bool
    digits: DigitConsts = DigitConsts(("n", "strip", "tile"), False)

    @property
    def pitch(self) -> int:
        return 128 if self.groups > 4 else 64

    @property
    def pairs(self) -> int:
        """Of taps across; what is beyond the last tap meets zeros."""
        return ceil_div(self.across.taps, 2)

    @property
    def width(self) -> int:
        return 8 * self.blocks + 2 * self.pairs - 1

    @property
    def box_bytes(self) -> int:
        return self.images * self.width * self.groups * LINE

    @property
    def stage_bytes(self) -> int:
        return ceil_div(self.images * self.width * self.pitch, 1024) * 1024

    @property
    def out_at(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def out_bytes(self) -> int:
        return 64 * self.pitch

    @property
    def tables_at(self) -> int:
        return self.out_at + self.outs * self.out_bytes

    @property
    def table_bytes(self) -> int:
        return 2 * self.pairs * (2 * self.down.taps - 1) * 128

    @property
    def table_bits(self) -> str:
        """A descriptor's strides: between blocks of columns a chunk, between halves of k a column of taps."""
        return f"0x{8 << 32 | 8 * (2 * self.down.taps - 1) << 16:016X}"

    @property
    def barriers_at(self) -> int:
        return self.tables_at + self.groups * self.table_bytes

    @property
    def out_barriers_at(self) -> int:
        return self.barriers_at + 16 * self.stages

    @property
    def smem_bytes(self) -> int:
        return self.out_barriers_at + 16 * self.outs

    @property
    def threads(self) -> int:
        return 128 * self.groups + 64

    @property
    def registers(self) -> int:
        return 4 * self.down.taps + 4 * self.pairs + 28


def _registers(groups: int) -> int:
    """That a thread may have: warps, those that copy included, lie in four quarters of 16384."""
    return 16384 // (32 * (groups + 1)) // 8 * 8


def _tile(d: Depthwise, groups: int, images: int, blocks: int, stages: int, flip: bool) -> WgmmaDepthwiseConsts:
    return WgmmaDepthwiseConsts(d.source.dtype.name, d.rows, d.columns, groups, images, blocks, stages, flip)


@lru_cache(maxsize=256)
def _lower(p: ConvProblem) -> Depthwise | str:
    d = lower_to_unit_steps(p)
    if not isinstance(d, str) and (d.columns.taps > _MAX_ACROSS or d.rows.taps > _MAX_DOWN):
        return f"{d.rows.taps} x {d.columns.taps} taps (at most {_MAX_DOWN} x {_MAX_ACROSS})"
    return d


class _WgmmaEngine(UnitStepsEngine):
    name = "depthwise_wgmma_sm90"
    _lower = staticmethod(_lower)

    @staticmethod
    def _why_none(d: Depthwise) -> str:
        return f"no tile of {d.rows.taps} x {d.columns.taps} taps and rows of {d.columns.target} fits the registers"

    @staticmethod
    def _groups(d: Depthwise) -> list[int]:
        """Of a CTA: pieces of a pixel of whole sectors, which waste few channels."""
        count = d.channels // 8
        return [g for g in (6, 4) if g <= count and 10 * (-count % g) <= count] or [min(4, count)]

    def _items(self, d: Depthwise, config: EngineConfig) -> tuple[int, int, int]:
        """Blocks of images, strips of rows, tiles of columns."""
        rows = d.rows.source if d.kind == "wgrad" else d.rows.target
        return ceil_div(d.images, config["images"]), ceil_div(rows, config["strip"]), ceil_div(d.columns.target, 8 * config["blocks"])

    @staticmethod
    def _busy_us(c: WgmmaDepthwiseConsts | WgmmaWalkConsts, rounds: int, steps: float, products: float) -> float:
        """Of an SM, by steps of all warpgroups, or of one alone; products: clocks of a step's."""
        return rounds * (steps * max(c.groups * products, products + _STEP_CLOCKS) + _ITEM_CLOCKS) / 1750

    @staticmethod
    def _traffic_us(problem: Problem, c: WgmmaDepthwiseConsts | WgmmaWalkConsts, chunks: int, device: DeviceInfo) -> float:
        """Of memory; pieces of 64 bytes of a pixel come by parts of lines."""
        return problem.num_bytes / (device.bandwidth_gbs * 0.838e3 * (0.85 if c.pitch == 64 and chunks > 1 else 1.0))


class WgmmaDepthwiseEngine(_WgmmaEngine):
    """The filter's gradient."""

    def _configs(self, p: ConvProblem, d: Depthwise) -> Iterator[EngineConfig]:
        """blocks: a row if it is not too long; images: a step of some eight products."""
        width = ceil_div(d.columns.target, 8)
        least = d.rows.taps // 2 + 3  # stages: a step's, one that comes, one that goes
        for g in self._groups(d):
            for blocks in dict.fromkeys(ceil_div(width, tiles) for tiles in (1, 2, 4) if width > 4 * (tiles - 1)):
                for images in (1, 2, 4, 8):
                    shape = _tile(d, g, images, blocks, least, p.flip)
                    if images > d.images or blocks > 8 or len(shape.products) > 8 or shape.registers > _registers(g):
                        continue
                    fits = [s for s in range(least, _MAX_STAGES + 1) if _tile(d, g, images, blocks, s, p.flip).smem_bytes <= _SMEM_BYTES]
                    for stages in fits[-1:]:
                        for parts in (1, 2, 4):
                            strip = ceil_div(ceil_div(d.rows.source, ROWS), parts) * ROWS
                            if parts == 1 or strip >= 14:
                                yield EngineConfig.of(groups=g, images=images, blocks=blocks, strip=strip, stages=stages)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Steps of all warpgroups, or of one alone, over the traffic; fitted to 101 timings on an H200, off by 5 %."""
        assert isinstance(problem, ConvProblem)
        d = _lower(problem)
        assert isinstance(d, Depthwise)
        groups = config["groups"]
        c = _tile(d, groups, config["images"], config["blocks"], config["stages"], problem.flip)
        chunks, parts, rounds = self._shares(d, config, device)
        steps = ceil_div(min(config["strip"], d.rows.source), ROWS)
        if device.is_emulated:
            return 200.0 * parts * rounds * chunks * (steps + 3) * (groups * len(c.products) + 8) + config["stages"]
        products = len(c.products) * (_PRODUCT_CLOCKS + _COLUMN_CLOCKS * c.columns)
        compute_us, bytes_us = self._busy_us(c, rounds, steps, products), self._traffic_us(problem, c, chunks, device)
        # Filters of 5 x 5 and less took 5 to 30 % less by tensor copies.
        return (max(compute_us, bytes_us) + 0.175 * min(compute_us, bytes_us) + 11) * (1.0 if d.rows.taps >= 6 else 1.1)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        if problem.is_empty:
            return Build(())
        p, d = problem, _lower(problem)
        assert isinstance(d, Depthwise)
        groups = config["groups"]
        c = _tile(d, groups, config["images"], config["blocks"], config["stages"], p.flip)
        digits = Digits(c.digits.names, self._items(d, config), {})
        chunks, parts, _ = self._shares(d, config, device)
        taps, desc = d.rows.taps * d.columns.taps, d.filter
        scratch = Scratch()
        partial = scratch.take(parts * d.channels * taps * 4)
        x_map = tensor_map(d.source, (8 * groups, c.width, ROWS, c.images), c.pitch)
        dy_map = tensor_map(d.target, (8 * groups, 8 * c.blocks, ROWS, c.images), c.pitch)
        args = [Arg("map_x", "tensor_map", TensorMapArg(d.names[0], x_map)), Arg("map_dy", "tensor_map", TensorMapArg(d.names[1], dy_map)),
                Arg("ptr_partial", "u64", partial), *self._share_args(d, digits.size, chunks, parts),
                Arg("strip", "u32", config["strip"]), Arg("source_rows", "u32", d.rows.source), *digits.args(c.digits.wide)]
        step = Step.of("conv/depthwise_wgmma_wgrad_sm90", self.op, Target.for_arch(device.arch, (8, 0)), c.threads, args, c, parts * chunks,
                       dynamic_smem=c.smem_bytes, min_ctas_per_sm=1,
                       suffix=f"{c.kind}_{d.rows.taps}x{d.columns.taps}_g{groups}_b{c.blocks}_{c.images}")
        whole = TensorDesc(F32, (parts, *desc.shape), (d.channels * taps, taps, taps, *packed_strides(desc.shape[2:])))
        sums = reduction_steps(p.op, (whole, partial), (desc, TensorArg(d.names[2])), (0,), "sum", device, scratch, follows=True)
        return Build((step, *sums), scratch.num_bytes)


class WgmmaWalkEngine(_WgmmaEngine):
    """The convolution and the image's gradient."""

    def _configs(self, p: ConvProblem, d: Depthwise) -> Iterator[EngineConfig]:
        """blocks and images: 64 positions, as long a part of a row as there is."""
        width = ceil_div(d.columns.target, 8)
        blocks = ceil_div(width, ceil_div(width, 8))
        for g in self._groups(d):
            images = min(8 // blocks, d.images)
            if _walk(p, d, g, images, blocks, 3, _OUTS).registers > _registers(g):
                continue
            fits = [s for s in range(2, _MAX_STAGES + 1) if _walk(p, d, g, images, blocks, s, _OUTS).smem_bytes <= _SMEM_BYTES]
            for stages in fits[-1:]:
                for parts in (1, 2, 4):
                    strip = ceil_div(d.rows.target, parts)
                    if parts == 1 or strip >= 2 * d.rows.taps:
                        yield EngineConfig.of(groups=g, images=images, blocks=blocks, strip=strip, stages=stages)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Rows of all warpgroups, or of one alone, over the traffic; off by 6 % on an H200."""
        assert isinstance(problem, ConvProblem)
        d = _lower(problem)
        assert isinstance(d, Depthwise)
        groups = config["groups"]
        c = _walk(problem, d, groups, config["images"], config["blocks"], config["stages"], _OUTS)
        chunks, parts, rounds = self._shares(d, config, device)
        strips = ceil_div(d.rows.target, config["strip"])
        rows = min(config["strip"] + d.rows.taps - 1, d.rows.source / strips + (d.rows.taps - 1) * (1 - 1 / strips))
        if device.is_emulated:
            return 200.0 * parts * rounds * chunks * rows * (groups * c.pairs + 8) + config["stages"]
        products = c.pairs * (12 + 4 * d.rows.taps)
        compute_us, bytes_us = self._busy_us(c, rounds, rows, products), self._traffic_us(problem, c, chunks, device)
        # Filters of 5 x 5 and less take less by tensor copies.
        return (max(compute_us, bytes_us) + 0.115 * min(compute_us, bytes_us) + 9) * (1.0 if d.rows.taps >= 6 else 1.15)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        if problem.is_empty:
            return Build(())
        p, d = problem, _lower(problem)
        assert isinstance(d, Depthwise)
        groups = config["groups"]
        c = _walk(p, d, groups, config["images"], config["blocks"], config["stages"], _OUTS)
        digits = Digits(c.digits.names, self._items(d, config), {})
        chunks, parts, _ = self._shares(d, config, device)
        source_map = tensor_map(d.source, (8 * groups, c.width, 1, c.images), c.pitch)
        target_map = tensor_map(d.target, (8 * groups, 8 * c.blocks, 1, c.images), c.pitch)
        args = [Arg("map_source", "tensor_map", TensorMapArg(d.names[0], source_map)),
                Arg("map_target", "tensor_map", TensorMapArg(d.names[1], target_map)),
                Arg("ptr_filter", "u64", TensorArg(d.names[2])), *self._share_args(d, digits.size, chunks, parts),
                Arg("strip", "s32", config["strip"]), Arg("source_rows", "s32", d.rows.source), Arg("target_rows", "s32", d.rows.target),
                *digits.args(c.digits.wide)]
        return Build((Step.of("conv/depthwise_wgmma_sm90", self.op, Target.for_arch(device.arch, (8, 0)), c.threads, args, c,
                              parts * chunks, dynamic_smem=c.smem_bytes, min_ctas_per_sm=1,
                              suffix=f"{c.kind}_{d.rows.taps}x{d.columns.taps}_g{groups}_b{c.blocks}_{c.images}"),))


def _walk(p: ConvProblem, d: Depthwise, groups: int, images: int, blocks: int, stages: int, outs: int) -> WgmmaWalkConsts:
    size, (channel, _, *steps) = d.filter.dtype.num_bytes, d.filter.strides
    row, column = (0, *(s * size for s in steps))[-2:]
    return WgmmaWalkConsts(d.source.dtype.name, d.target.dtype.name, d.rows, d.columns, groups, images, blocks, stages, outs,
                           (channel * size, row, column), p.flip != (d.kind == "dgrad"))


_SUMS = ("conv_wgrad", "conv_transpose_wgrad")
_WALKS = ("conv_fprop", "conv_dgrad", "conv_transpose", "conv_transpose_dgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (WgmmaDepthwiseEngine(op),) for op in _SUMS} | {op: (WgmmaWalkEngine(op),) for op in _WALKS}
