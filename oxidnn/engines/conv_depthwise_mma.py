"""Depthwise convolution of 16-bit types on tensor cores (mma.sync, sm_80 and later): products with diagonal matrices.

Of a product of pixels (16) x (two taps of 8 channels) with (two taps of 8 channels) x channels (8), whose second factor holds the taps on
its diagonals, an eighth is of use; it is still more than FMAs do, as a fragment of pixels serves all rows of taps. A CTA has as many warps
as groups of 8 channels and walks down a strip of rows, which come through a ring of stages in shared memory; rows of the target under
way lie in accumulators. In the filter's gradient pixels are what is summed over, and the diagonals of what comes out are kept.

Zeros off the diagonal meet the other channels of a group: an infinity or a NaN becomes a NaN in all 8 channels there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from ..codegen.fastdiv import magic
from ..codegen.pointwise import Expression
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import BF16, F16, F32
from ..ops.base import Problem
from ..ops.conv import ConvProblem
from ..tensor import TensorDesc, packed_strides
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, ScalarArg, Scratch, Step, Support, TensorArg, refuse
from .conv_depthwise import Axis, Depthwise, Meeting, byte_strides, digit_strides, lower
from .digits import DigitConsts, Digits, ceil_div
from .element_epilogue import ElementEpilogue, OperandConsts, operand_over
from .reduce_tree import reduction_steps

_LIMIT = 2**31
_MOST_PRODUCTS = 28  # of a row: taps down times pairs of taps across, whose fragments stay in registers
_SMEM_BYTES = 48 << 10
_STAGES = (4, 3, 2)
# Of a quarter SM: a product, what a row of a tile costs besides, and both where a warp is alone.
_PRODUCT_CLOCKS, _ROW_CLOCKS, _ALONE_CLOCKS, _LATENCY_CLOCKS = 7.0, 60, 12.0, 400


@dataclass(frozen=True, slots=True)
class MmaDepthwiseConsts(ElementEpilogue):
    """groups: of 8 channels, and warps. A tile is two blocks of 8 neighbouring pixels of the target; `tiles` of them, of `segments` images
    with `blocks` each. width: pixels of the source that a segment's blocks meet.

    taps_bytes: of the filter's axes (channel, row, column). operand_images: byte strides of the operands' images.
    """

    kind: str
    target: str
    rows: Axis
    steps: tuple[Meeting, ...]
    taps: int
    stride: int
    dilation: int
    groups: int
    tiles: int
    segments: int
    width: int
    stages: int
    digits: DigitConsts
    first_column: int
    target_column: int
    taps_bytes: tuple[int, int, int]
    flip: bool
    sums_taps: bool = False
    operands: tuple[OperandConsts, ...] = ()
    operand_images: tuple[int, ...] = ()
    epilogue: Expression | None = None
    compute: str = "f32"

    @property
    def pitch(self) -> int:
        """Bytes of a pixel in shared memory: an odd number of chunks of 16, so that 8 neighbours lie in different banks."""
        return (self.groups | 1) * 16

    @property
    def blocks(self) -> int:
        return 2 * self.tiles // self.segments

    @property
    def source_rows(self) -> int:
        return len({m.source for m in self.steps})

    @property
    def source_pixels(self) -> int:
        return self.source_rows * self.segments * self.width

    @property
    def target_pixels(self) -> int:
        return 16 * self.tiles

    @property
    def stage_bytes(self) -> int:
        return self.pitch * (self.source_pixels + (self.target_pixels if self.sums_taps else 0))

    @property
    def out_bytes(self) -> int:
        return 0 if self.sums_taps else self.pitch * self.target_pixels

    @property
    def scrap_at(self) -> int:
        """A word of each thread, of the filter's gradient."""
        return self.stages * self.stage_bytes + 2 * self.out_bytes

    @property
    def smem_bytes(self) -> int:
        return self.scrap_at + (128 * self.groups if self.sums_taps else 0)

    @property
    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """Taps across, two by two."""
        return tuple(tuple(range(s, min(s + 2, self.taps))) for s in range(0, self.taps, 2))

    def block_offset(self, block: int, of_source: bool = True) -> int:
        """Pixels from the begin of a stage to those of block 0, 1, ... of all."""
        segment, position = divmod(block, self.blocks)
        return segment * self.width + position * 8 * self.stride if of_source else block * 8

    @property
    def tap_rows(self) -> int:
        return self.rows.taps

    def tap(self, row: int, column: int) -> int:
        at = row * self.taps + column
        return self.rows.taps * self.taps - 1 - at if self.flip else at

    def tap_bytes(self, row: int, column: int) -> int:
        """From a channel's first tap to this one, which is read backwards with `flip`."""
        r, s = divmod(self.tap(row, column), self.taps)
        return r * self.taps_bytes[1] + s * self.taps_bytes[2]


def _unit(axis: Axis) -> Axis:
    """The gradient of unit stride as a convolution with the taps read backwards."""
    return replace(axis, low=(axis.taps - 1) * axis.dilation - axis.low, is_gradient=False)


@lru_cache(maxsize=256)
def lower_to_products(p: ConvProblem) -> Depthwise | str:
    d = lower(p)
    return d if isinstance(d, str) else as_products(d)


def as_products(d: Depthwise) -> Depthwise | str:
    """The gradient of unit stride as a convolution, or why products with diagonals do not serve."""
    if d.multiplier != 1:
        return f"{d.multiplier} filters a channel (1 is supported)"
    if any(x.dtype not in (F16, BF16) for x in (d.source, d.target)) or d.source.dtype != d.filter.dtype:
        return f"types are {d.source.dtype}, {d.filter.dtype} and {d.target.dtype} (f16 and bf16 are supported)"
    if d.kind == "wgrad" and d.target.dtype != d.source.dtype:
        return f"{d.names[1]} is {d.target.dtype} and {d.names[0]} {d.source.dtype}: one type is supported"
    if d.kind == "dgrad":
        strides = (d.depth.stride, d.rows.stride, d.columns.stride)
        if strides != (1, 1, 1):
            return f"dgrad of stride {strides} (1 is supported)"
        d = replace(d, depth=_unit(d.depth), rows=_unit(d.rows), columns=_unit(d.columns))
    if d.channels % 8:
        return f"{d.channels} channels are no multiple of 8"
    for name, x in zip(d.names, (d.source, d.target), strict=False):
        if x.strides[1] != 1 and d.channels > 1:
            return f"channels of {name} must lie innermost"
        if x.align % 16 or any(s % 8 for i, s in enumerate(x.strides) if i != 1 and x.shape[i] > 1):
            return f"pixels of {name} are not aligned to 16 bytes"
    if any(s < 0 for s in d.filter.strides) or any(x.strides[0] * x.dtype.num_bytes >= _LIMIT for x in (d.source, d.target)):
        return "a stride of the filter is negative, or one of images too large"
    rows = {m.source for m in d.rows.steps}
    if rows != set(range(len(rows))):
        return f"stride {d.rows.stride} with dilation {d.rows.dilation} skips rows"
    if d.depth.taps * d.rows.taps * ceil_div(d.columns.taps, 2) > _MOST_PRODUCTS or d.rows.lags > 16:
        return f"{d.depth.taps} x {d.rows.taps} x {d.columns.taps} taps (at most {_MOST_PRODUCTS} pairs)"
    return d


class MmaDepthwiseEngine(Engine):
    """All three directions of a convolution whose groups have one channel and one filter each; dgrad of unit stride."""

    def __init__(self, op: str) -> None:
        self.id = f"{op}.depthwise_mma_sm80"  # type: ignore[misc]
        self.op = op

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        if not device.at_least(8):
            return refuse(f"depthwise_mma_sm80 needs sm_80, the device is {device.arch}")
        d = lower_to_products(problem)
        if isinstance(d, str):
            return refuse(f"depthwise_mma_sm80: {d}")
        if problem.desc(problem.result).numel == 0 or problem.desc(problem.image).numel == 0:
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        if not self._configs(problem, d):
            return refuse("depthwise_mma_sm80: rows do not fit shared memory")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ConvProblem)
        d = lower_to_products(problem)
        assert isinstance(d, Depthwise)
        return tuple(sorted(self._configs(problem, d), key=lambda c: self.estimate(problem, c, device)))

    def _configs(self, problem: ConvProblem, d: Depthwise) -> list[EngineConfig]:
        """groups: those that waste fewest channels; tiles across, or over images where one is narrower than a tile."""
        count = d.channels // 8
        even = [g for g in (8, 6, 5, 4, 3, 2, 1) if count % g == 0][:1]
        groups = dict.fromkeys((*even, *(g for g in (8, 4) if g <= count)))
        shapes = [(1, 1), (2, 1)] if d.columns.target > 8 else [(1, 2), (2, 4), (1, 1)]
        found = []
        for g in groups:
            for tiles, segments in shapes:
                if tiles == 2 and d.kind == "wgrad" and d.rows.lags * 4 + d.rows.taps * ceil_div(d.columns.taps, 2) * 4 > 150:
                    continue
                if (segments > 1 and d.images < segments) or (segments == 1 and 16 * (tiles - 1) >= d.columns.target):
                    continue
                stages = next((s for s in _STAGES if self._shape(d, g, tiles, segments, s).smem_bytes <= _SMEM_BYTES), 0)
                if not stages:
                    continue
                strips = [ceil_div(d.rows.groups, parts) for parts in (1, 2, 4, 8)]
                for strip in dict.fromkeys(s for s in strips if s >= min(7, d.rows.groups)):
                    found.append(EngineConfig.of(groups=g, tiles=tiles, segments=segments, strip=strip, stages=stages))
        return found

    def _shape(self, d: Depthwise, groups: int, tiles: int, segments: int, stages: int) -> MmaDepthwiseConsts:
        """The consts as far as they say how much memory is needed."""
        c = d.columns
        width = (16 * tiles // segments - 1) * c.stride + (c.taps - 1) * c.dilation + 1
        return MmaDepthwiseConsts(d.source.dtype.name, d.target.dtype.name, d.rows, d.rows.steps, c.taps, c.stride, c.dilation, groups,
                                  tiles, segments, width, stages, DigitConsts((), False), -c.low, 0, (0, 0, 0), False, d.kind == "wgrad")

    def _items(self, d: Depthwise, config: EngineConfig) -> tuple[int, int, int]:
        """Blocks of images, strips and columns of tiles."""
        per_tile = 16 * config["tiles"] // config["segments"]
        return ceil_div(d.images, config["segments"]), ceil_div(d.rows.groups, config["strip"]), ceil_div(d.columns.target, per_tile)

    def _per_sm(self, p: ConvProblem, d: Depthwise, config: EngineConfig, device: DeviceInfo) -> int:
        """CTAs that run at a time on an SM, if the assembler keeps to the registers that are needed."""
        c = self._shape(d, config["groups"], config["tiles"], config["segments"], config["stages"])
        if c.sums_taps:
            registers = 4 * d.rows.taps * len(c.pairs) + 2 * d.rows.lags * c.tiles
        else:
            registers = d.rows.taps * c.taps + 4 * d.rows.lags * c.tiles
            registers += 48 if any(o.desc.rank > 1 for o in p.inputs if o.name not in d.names) else 0
        warps = 65536 // (32 * 8 * ceil_div(min(registers + 30 + 14 * c.tiles + 10 * ceil_div(c.source_pixels, 32), 255), 8))
        return max(1, min(warps // (4 * ceil_div(c.groups, 4)), device.smem_per_sm // (c.smem_bytes + 1024), 48 // c.groups))

    def _resident(self, p: ConvProblem, d: Depthwise, config: EngineConfig, device: DeviceInfo) -> int:
        return device.num_sms * self._per_sm(p, d, config, device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Products at 6.5 clocks of a quarter SM and what a row costs besides, over the traffic; by measurements on an H200."""
        assert isinstance(problem, ConvProblem)
        d = lower_to_products(problem)
        assert isinstance(d, Depthwise)
        groups, tiles, strip = config["groups"], config["tiles"], config["strip"]
        items, chunks = prod(self._items(d, config)), ceil_div(d.channels // 8, groups)
        pairs = ceil_div(d.columns.taps, 2)
        strips = ceil_div(d.rows.groups, strip)
        rows = min(strip + d.rows.lags - 1, ceil_div(d.rows.source, d.rows.per_step) / strips + (d.rows.lags - 1) * (1 - 1 / strips))
        if device.is_emulated:
            return 20.0 * items * chunks * rows * d.rows.taps * pairs * tiles
        per_sm = self._per_sm(problem, d, config, device)
        resident = per_sm * device.num_sms
        # A row of a CTA alone takes its latency; those of all CTAs of an SM its quarters' products.
        products = d.rows.taps * pairs * tiles
        busy = (products * _PRODUCT_CLOCKS + _ROW_CLOCKS * tiles) * groups * min(per_sm, ceil_div(items * chunks, device.num_sms)) / 4
        busy *= 1.35 if d.columns.stride > 1 else 1.0  # pixels share banks
        alone = products * _ALONE_CLOCKS + _LATENCY_CLOCKS
        walks = items * chunks / resident
        rounds = max(1.0, (walks + ceil_div(items * chunks, resident)) / 2)
        compute_us = rounds * (rows * max(busy, alone) + (strip + d.rows.lags - 1 - rows) * 150 + 900) / 1750
        bytes_us = problem.num_bytes / (device.bandwidth_gbs * (0.78e3 if d.columns.stride == 1 else 0.6e3))
        whole_us = max(compute_us, bytes_us) + 0.15 * min(compute_us, bytes_us) + 6.5
        return 1.15 * whole_us + 3 if d.kind == "wgrad" else whole_us

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        if problem.is_empty:
            return Build(())
        p, d = problem, lower_to_products(problem)
        assert isinstance(d, Depthwise)
        groups, tiles, segments, strip = (config[k] for k in ("groups", "tiles", "segments", "strip"))
        source, target, is_sum = byte_strides(d.source), byte_strides(d.target), d.kind == "wgrad"
        across = 16 * tiles // segments
        moved = (strip, across)
        strides = {"source": digit_strides(source, (d.rows.stride * strip, d.columns.stride * across), 1)[:3],
                   "target": digit_strides(target, moved, 1)[:3]}
        strides = {n: (segments * s[0], *s[1:]) for n, s in strides.items()}
        args = [Arg("ptr_source", "u64", TensorArg(d.names[0], -d.rows.low * source[2] - d.columns.low * source[3])),
                Arg("ptr_target", "u64", TensorArg(d.names[1]))]
        operands, rows = [], []
        for name in (n for n in (p.epilogue.args if p.epilogue is not None else ()) if n != "acc"):
            operand, row = operand_over(p, p.epilogue, name, d.target.shape, 2)
            operands.append((operand, row[0]))
            strides[name] = (segments * row[0], row[2] * strip, row[3] * across)
            args.append(Arg(f"ptr_{name}", "u64", TensorArg(name)))
            rows.append(Arg(f"row_{name}", "s64", row[2]))
        extents = self._items(d, config)
        digits = Digits(("n", "strip", "tile"), extents, strides)
        size, desc = d.filter.dtype.num_bytes, d.filter
        taps_bytes = tuple(s * size for s in (desc.strides[0], *desc.strides[2:], 0))
        shape = self._shape(d, groups, tiles, segments, config["stages"])
        consts = replace(shape, digits=digits.consts(), target_column=target[3], taps_bytes=(taps_bytes[0], taps_bytes[1], taps_bytes[2]),
                         flip=p.flip != (d.kind == "dgrad"), operands=tuple(o for o, _ in operands),
                         operand_images=tuple(n for _, n in operands), epilogue=p.epilogue)
        chunks = ceil_div(d.channels // 8, groups)
        count = max(1, min(ceil_div(self._resident(p, d, config, device), chunks), digits.size))
        multiplier, shift = magic(chunks)
        values: dict[str, tuple[str, Any]] = {
            "num_items": ("u32", digits.size), "num_groups": ("u32", count), "chunks": ("u32", chunks),
            "chunks_multiplier": ("u32", multiplier), "chunks_shift": ("u32", shift), "num_steps": ("u32", strip + d.rows.lags - 1),
            "channel_groups": ("u32", d.channels // 8), "images": ("u32", d.images), "strip": ("s32", strip),
            "source_rows": ("s32", d.rows.source), "source_columns": ("s32", d.columns.source), "target_rows": ("s32", d.rows.target),
            "target_columns": ("s32", d.columns.target), "image_source": ("s64", source[0]), "row_source": ("s64", source[2]),
            "column_source": ("s64", source[3]), "image_target": ("s64", target[0]), "row_target": ("s64", target[2])}
        scratch = Scratch()
        taps = d.rows.taps * d.columns.taps
        partial = scratch.take(count * d.channels * taps * 4) if is_sum else TensorArg(d.names[2])
        args += [Arg("ptr_partial" if is_sum else "ptr_filter", "u64", partial)]
        args += [Arg(n, t, v) for n, (t, v) in values.items()] + rows + digits.args(consts.digits.wide)
        args += [Arg(f"scalar_{n}", "f32", ScalarArg(n)) for n in consts.epilogue_scalars]
        first = Step.of("conv/depthwise_mma_wgrad" if is_sum else "conv/depthwise_mma", self.op, Target.for_arch(device.arch), 32 * groups,
                        args, consts, count * chunks, min_ctas_per_sm=self._per_sm(p, d, config, device),
                        suffix=f"{consts.kind}_{d.rows.taps}x{d.columns.taps}_g{groups}_t{tiles}")
        if not is_sum:
            return Build((first,))
        whole = TensorDesc(F32, (count, *desc.shape), (d.channels * taps, taps, taps, *packed_strides(desc.shape[2:])))
        assert not isinstance(partial, TensorArg)
        steps = reduction_steps(p.op, (whole, partial), (desc, TensorArg(d.names[2])), (0,), "sum", device, scratch, follows=True)
        return Build((first, *steps), scratch.num_bytes)


_OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_transpose", "conv_transpose_dgrad", "conv_transpose_wgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (MmaDepthwiseEngine(op),) for op in _OPS}
