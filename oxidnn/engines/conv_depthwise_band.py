"""Depthwise convolutions and their gradients by bands, sm_90a: each channel is a product of its own, on tensor cores.

A row of a channel is cut into lines of 8 positions. A line and the next one, 16 positions, times a band of 16 x 8 (column n has the taps of
a row from n on) give 8 positions of the target: with 7 taps 7 of 16 products are of use, where products of all 8 channels of a chunk with
diagonals (conv_depthwise_mma, conv_depthwise_wgmma) have one of 8. Rows of A are 16 lines of a row, or of several images' rows.

The filter's gradient has no bands to multiply by but bands in what comes out: x's windows of 16 positions times dy's lines of 8, summed
over lines, make a matrix of 16 x 8 whose diagonals i - j are the taps.

Pixels lie in memory, lines are wanted: boxes of whole rows come by tensor copies, and ldmatrix.trans with stmatrix turns 8 pixels of 8
channels into a line of each channel; on the way back likewise. So channels never meet: an infinity or a NaN reaches the positions in whose
windows of 16 it lies (of the filter's gradient, all taps of its channel), where it becomes a NaN.
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

_LINES = 16  # of a product
_MAX_TAPS = 8  # across: at most one of taps k - n and k - n + 8 is there
_MAX_STAGES = 16
_SMEM_BYTES = 227 << 10
_GROUPS = {2: (4, 2), 4: (8, 6)}  # of 8 channels of a CTA, by channels of a warp
# Clocks of a step that waits for what it loads, and for each of a warp's rows of taps; of one that shared memory and products take, for
# each channel of all warps and each of its rows of taps; an item besides. Shares of memory's speed, by bytes of a pixel that a CTA takes.
_STEP_CLOCKS, _CHAIN_CLOCKS, _CHANNEL_CLOCKS, _TAP_CLOCKS, _ITEM_CLOCKS = 408, 12.6, 16.3, 1.56, 984
_SPEED = {128: 1.07, 64: 0.843, 32: 0.803}


@dataclass(frozen=True, slots=True)
class BandConsts:
    """Consts of conv/depthwise_band_sm90 and conv/depthwise_band_wgrad_sm90.

    groups: of 8 channels; own: channels of a warp. An item's row is `images` images' rows one after the other, `span` positions from each
    to the next, of which those beyond the tensor are zeros; target_span: the same of the target. column: from item to item. stages: of a
    row. taps_bytes: of the filter's axes (channel, row, column).
    """

    kind: str
    target: str
    sums_taps: bool
    down: Axis
    across: Axis
    groups: int
    own: int
    images: int
    span: int
    target_span: int
    column: int
    stages: int
    taps_bytes: tuple[int, int, int]
    flip: bool
    digits: DigitConsts = DigitConsts(("n", "strip", "tile"), False)

    @property
    def pitch(self) -> int:
        """Of a pixel in a stage; chunks of 16 bytes are swizzled over as much."""
        return 128 if self.groups > 4 else 64 if self.groups > 2 else 32

    @property
    def warps(self) -> int:
        return 8 * self.groups // self.own

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def turns(self) -> int:
        """Of a warp, of four lines of 8 channels at a time, from pixels to lines or back."""
        return self.own // 2

    @property
    def turn_lines(self) -> int:
        """From turn to turn."""
        return 32 // self.own

    @property
    def line_pitch(self) -> int:
        """From channel to channel: an odd number of lines, so that 8 channels' lie in all banks. The last one stays zero."""
        return (_LINES + 1) * 16

    @property
    def lines_bytes(self) -> int:
        return 8 * self.groups * self.line_pitch

    @property
    def source_box_bytes(self) -> int:
        return self.images * self.span * 16 * self.groups

    @property
    def target_box_bytes(self) -> int:
        return self.images * self.target_span * 16 * self.groups

    @property
    def row_bytes(self) -> int:
        """Of pixels, those of no image included."""
        return 8 * _LINES * self.pitch

    @property
    def stage_bytes(self) -> int:
        return self.row_bytes * (2 if self.sums_taps else 1)

    @property
    def none_at(self) -> tuple[int, ...]:
        """Where in a stage pixels of no image begin, which stay zero."""
        ends = (self.images * self.span, self.images * self.target_span)[: 2 if self.sums_taps else 1]
        return tuple(i * self.row_bytes + end * self.pitch for i, end in enumerate(ends))

    @property
    def outs(self) -> int:
        """Rows of the target as pixels: one that is made, one that leaves, one whose buffer the copy may read still."""
        return 3

    @property
    def out_at(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def lines_at(self) -> int:
        return self.out_at + (0 if self.sums_taps else self.outs * self.row_bytes)

    @property
    def made_at(self) -> int:
        """Lines of the target, in two buffers as those of the source."""
        return self.lines_at + 2 * self.lines_bytes

    @property
    def barriers_at(self) -> int:
        return self.made_at + 2 * self.lines_bytes

    @property
    def scrap_at(self) -> int:
        """A word of each thread, of the filter's gradient."""
        return self.barriers_at + 8 * self.stages

    @property
    def smem_bytes(self) -> int:
        """Of the filter's gradient the sums of all products fit, too."""
        return max(self.scrap_at + 4 * self.threads, 4096 * self.groups * self.down.taps) if self.sums_taps else self.scrap_at

    @property
    def registers(self) -> int:
        """About what a thread needs."""
        return self.own * (6 * self.down.taps + 10) + 24


def _across(d: Depthwise) -> tuple[int, int, int, int]:
    """images, span, target_span and column of BandConsts: as many images as a row of lines takes.

    Rows of the filter's gradient follow each other closely, since all images' are summed; else images begin with a line, of which none has
    windows in two of them, so that an infinity or a NaN stays in its image.
    """
    a, most = d.columns, 8 * _LINES
    lines = 8 * (ceil_div(a.target, 8) + 1)
    needed = a.target + a.taps - 1
    close = min(needed, max(a.source + a.low, needed - a.low, a.target))
    span = close if d.kind == "wgrad" else lines
    if span <= most:
        return min(most // span, d.images), span, span, a.target
    column = 8 * ceil_div(ceil_div(a.target, 8), ceil_div(lines // 8 - 1, _LINES - 1))
    return 1, column + 8, column, column


def _consts(p: ConvProblem, d: Depthwise, config: EngineConfig, stages: int = 0) -> BandConsts:
    size, (channel, _, *steps) = d.filter.dtype.num_bytes, d.filter.strides
    row, column = (0, *(s * size for s in steps))[-2:]
    return BandConsts(d.source.dtype.name, d.target.dtype.name, d.kind == "wgrad", d.rows, d.columns, config["groups"], config["own"],
                      *_across(d), stages or config["stages"], (channel * size, row, column), p.flip != (d.kind == "dgrad"))


@lru_cache(maxsize=256)
def _lower(p: ConvProblem) -> Depthwise | str:
    d = lower_to_unit_steps(p)
    if not isinstance(d, str) and d.columns.taps > _MAX_TAPS:
        return f"{d.columns.taps} taps across (at most {_MAX_TAPS})"
    return d


class BandDepthwiseEngine(UnitStepsEngine):
    """All three directions."""

    name = "depthwise_band_sm90"
    _lower = staticmethod(_lower)

    @staticmethod
    def _why_none(d: Depthwise) -> str:
        return f"{d.rows.taps} rows of taps do not fit the registers or shared memory"

    def _configs(self, p: ConvProblem, d: Depthwise) -> Iterator[EngineConfig]:
        """own and groups: chunks of channels as wide as registers allow."""
        count = d.channels // 8
        rows = d.rows.source if d.kind == "wgrad" else d.rows.target
        strips = [s for s in dict.fromkeys(ceil_div(rows, parts) for parts in (1, 2, 3, 4)) if s == rows or s >= 2 * (d.rows.taps - 1)]
        for own in _GROUPS:
            for groups in [g for g in _GROUPS[own] if g <= count and 10 * (-count % g) <= count] or [min(_GROUPS[own][-1], count)]:
                c = _consts(p, d, EngineConfig.of(groups=groups, own=own), 2)
                stages = min(_MAX_STAGES, (_SMEM_BYTES - c.smem_bytes - 8 * _MAX_STAGES) // c.stage_bytes + 2)
                if c.registers > min(255, 16384 // (32 * ceil_div(c.warps, 4)) // 8 * 8) or stages < 3:
                    continue
                for strip in strips:
                    yield EngineConfig.of(groups=groups, own=own, strip=strip, stages=stages)

    def _items(self, d: Depthwise, config: EngineConfig) -> tuple[int, int, int]:
        """Blocks of images, strips of rows, tiles of columns."""
        rows = d.rows.source if d.kind == "wgrad" else d.rows.target
        images, _, _, column = _across(d)
        return ceil_div(d.images, images), ceil_div(rows, config["strip"]), ceil_div(d.columns.target, column)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Steps of an SM over the traffic; fitted to 207 timings on an H200, off by 4 %."""
        assert isinstance(problem, ConvProblem)
        d = _lower(problem)
        assert isinstance(d, Depthwise)
        c = _consts(problem, d, config)
        chunks, parts, rounds = self._shares(d, config, device)
        strips, read = self._items(d, config)[1], d.rows.target if d.kind == "wgrad" else d.rows.source
        steps = 1 + min(config["strip"] + d.rows.taps - 1, read / strips + (d.rows.taps - 1) * (1 - 1 / strips))
        if device.is_emulated:
            return 20.0 * parts * rounds * chunks * steps * (c.own * c.warps * d.rows.taps + 8) + config["stages"]
        busy = 0.0 if c.sums_taps else c.warps * c.own * (_CHANNEL_CLOCKS + _TAP_CLOCKS * d.rows.taps)
        compute_us = rounds * (steps * max(_STEP_CLOCKS + _CHAIN_CLOCKS * c.own * d.rows.taps, busy) + _ITEM_CLOCKS) / 1750
        bytes_us = problem.num_bytes / (device.bandwidth_gbs * 0.838e3 * (_SPEED[c.pitch] if chunks > 1 else 1.0))
        us = max(compute_us, bytes_us) + 0.117 * min(compute_us, bytes_us) + (14.0 if c.sums_taps else 9.7)
        # Of small filters chunks of 64 bytes gain nothing over tensor copies, at best.
        return us if d.rows.taps >= 6 or c.groups > 4 else 1.06 * us

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        if problem.is_empty:
            return Build(())
        p, d = problem, _lower(problem)
        assert isinstance(d, Depthwise)
        c = _consts(p, d, config)
        digits = Digits(c.digits.names, self._items(d, config), {})
        chunks, parts, _ = self._shares(d, config, device)
        source_map = tensor_map(d.source, (8 * c.groups, c.span, 1, c.images), c.pitch)
        target_map = tensor_map(d.target, (8 * c.groups, c.target_span, 1, c.images), c.pitch)
        scratch, taps, desc = Scratch(), d.rows.taps * d.columns.taps, d.filter
        partial = scratch.take(parts * d.channels * taps * 4) if c.sums_taps else TensorArg(d.names[2])
        args = [Arg("map_source", "tensor_map", TensorMapArg(d.names[0], source_map)),
                Arg("map_target", "tensor_map", TensorMapArg(d.names[1], target_map)),
                Arg("ptr_partial" if c.sums_taps else "ptr_filter", "u64", partial), *self._share_args(d, digits.size, chunks, parts),
                Arg("strip", "s32", config["strip"]), Arg("source_rows", "s32", d.rows.source), Arg("target_rows", "s32", d.rows.target),
                *digits.args(c.digits.wide)]
        first = Step.of("conv/depthwise_band_wgrad_sm90" if c.sums_taps else "conv/depthwise_band_sm90", self.op,
                        Target.for_arch(device.arch, (8, 0)), c.threads, args, c, parts * chunks, dynamic_smem=c.smem_bytes,
                        min_ctas_per_sm=1,
                        suffix=f"{c.kind}_{d.rows.taps}x{d.columns.taps}_g{c.groups}_o{c.own}_{c.images}x{c.span}")
        if not c.sums_taps:
            return Build((first,))
        whole = TensorDesc(F32, (parts, *desc.shape), (d.channels * taps, taps, taps, *packed_strides(desc.shape[2:])))
        assert not isinstance(partial, TensorArg)
        sums = reduction_steps(p.op, (whole, partial), (desc, TensorArg(d.names[2])), (0,), "sum", device, scratch, follows=True)
        return Build((first, *sums), scratch.num_bytes)


_OPS = ("conv_fprop", "conv_dgrad", "conv_transpose", "conv_transpose_dgrad", "conv_wgrad", "conv_transpose_wgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (BandDepthwiseEngine(op),) for op in _OPS}
