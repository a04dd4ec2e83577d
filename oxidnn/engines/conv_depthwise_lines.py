"""Depthwise convolution on wgmma whose second factor is lines of the source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ..codegen.fastdiv import magic
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.conv import ConvProblem
from .base import Arg, Build, Engine, EngineConfig, Step, TensorArg, TensorMapArg
from .conv_depthwise import Axis, Depthwise
from .conv_depthwise_wgmma import _MAX_STAGES, _SMEM_BYTES, LINE, WgmmaWalkEngine, _lower, _map
from .digits import DigitConsts, Digits, ceil_div


@dataclass(frozen=True, slots=True)
class LinesConsts:
    """Consts of conv/depthwise_lines_sm90."""

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
    def octets(self) -> int:
        return self.images * self.blocks

    @property
    def octet_runs(self) -> list[list[int]]:
        """What an stmatrix stores: 4, 2 or 1."""
        runs, at = [], 0
        for size in (4, 2, 1):
            while self.octets - at >= size:
                runs.append(list(range(at, at + size)))
                at += size
        return runs

    @property
    def width(self) -> int:
        """Of a row of the source that a tile's taps meet."""
        return 8 * self.blocks + 2 * self.pairs - 1

    @property
    def image_lines(self) -> int:
        """From an image's first line to the next one's. Octets lie equally far apart: those of several images of several octets as if the
        images were neighbours, which they may be where the zeros beside one serve the other."""
        return self.width if self.blocks == 1 else 8 * self.blocks

    @property
    def is_even(self) -> bool:
        a = self.across
        return self.images == 1 or self.blocks == 1 or (self.image_lines - a.low >= a.source
                                                        and a.target + a.taps - 2 < self.image_lines + a.low)

    @property
    def lines(self) -> int:
        return (self.images - 1) * self.image_lines + self.width

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
        return ceil_div(8 * self.octets * self.pitch, 1024) * 1024

    @property
    def tables_at(self) -> int:
        return self.out_at + self.outs * self.out_bytes

    @property
    def chunks(self) -> int:
        """Of a column of taps: eight from each of the first R on."""
        return self.down.taps + 7

    @property
    def table_bytes(self) -> int:
        return 2 * self.pairs * self.chunks * 128

    @property
    def table_bits(self) -> str:
        return f"0x{8 << 32 | 8 * self.chunks << 16:016X}"

    @property
    def line_bits(self) -> str:
        return f"0x{(self.image_lines if self.blocks == 1 else 8) << 32 | 1 << 16:016X}"

    @property
    def lines_at(self) -> int:
        return self.tables_at + self.groups * self.table_bytes

    @property
    def lines_bytes(self) -> int:
        return self.lines * LINE

    @property
    def barriers_at(self) -> int:
        return self.lines_at + 2 * self.groups * self.lines_bytes

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
        return 4 * self.octets + 4 * ceil_div(self.lines, 128) + 22


class LinesEngine(WgmmaWalkEngine):
    """The convolution and the image's gradient."""

    def __init__(self, op: str) -> None:
        self.id = f"{op}.depthwise_lines_sm90"  # type: ignore[misc]
        self.op = op

    def _configs(self, p: ConvProblem, d: Depthwise) -> Iterator[EngineConfig]:
        width = ceil_div(d.columns.target, 8)
        full = ceil_div(width, ceil_div(width, 8))
        for g in self._groups(d):
            for blocks in dict.fromkeys((full, 1)):
                for images in (1, 2, 4, 8, 16):
                    shape = _consts(p, d, g, images, blocks, 2, 2)
                    if images > max(d.images, 1) or not 4 <= shape.octets <= 16 or not shape.is_even:
                        continue
                    for ctas in (1, 2):
                        if shape.registers > 16384 // (32 * ceil_div(ctas * (4 * g + 2), 4)) // 8 * 8:
                            continue
                        room = _SMEM_BYTES if ctas == 1 else (228 << 10) // ctas - 1024
                        for outs in (2, 3):
                            fits = [s for s in range(3, _MAX_STAGES + 1) if _consts(p, d, g, images, blocks, s, outs).smem_bytes <= room]
                            for stages in sorted({max(fits), min(max(fits), 6)}) if fits else ():
                                for strip in dict.fromkeys((d.rows.target, ceil_div(d.rows.target, 2))):
                                    yield EngineConfig.of(groups=g, images=images, blocks=blocks, strip=strip, stages=stages, outs=outs,
                                                          ctas=ctas)

    def _parts(self, d: Depthwise, config: EngineConfig, device: DeviceInfo) -> tuple[int, int]:
        items, chunks = prod(self._items(d, config)), ceil_div(d.channels // 8, config["groups"])
        rounds = ceil_div(items, max(1, min(items, device.num_sms * config["ctas"] // chunks)))
        return ceil_div(items, rounds), rounds

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        if problem.is_empty:
            return Build(())
        p, d = problem, _lower(problem)
        assert isinstance(d, Depthwise)
        groups = config["groups"]
        c = _consts(p, d, groups, config["images"], config["blocks"], config["stages"], config["outs"])
        digits = Digits(c.digits.names, self._items(d, config), {})
        parts, _ = self._parts(d, config, device)
        chunks = ceil_div(d.channels // 8, groups)
        multiplier, shift = magic(chunks)
        args = [Arg("map_source", "tensor_map", TensorMapArg(d.names[0], _map(d.source, (8 * groups, c.width, 1, c.images), c.pitch))),
                Arg("map_target", "tensor_map", TensorMapArg(d.names[1], _map(d.target, (8 * groups, 8 * c.blocks, 1, c.images), c.pitch))),
                Arg("ptr_filter", "u64", TensorArg(d.names[2]))]
        args += [Arg(name, kind, value) for name, kind, value in (
            ("num_items", "u32", digits.size), ("parts", "u32", parts), ("chunks", "u32", chunks), ("chunks_multiplier", "u32", multiplier),
            ("chunks_shift", "u32", shift), ("channel_groups", "u32", d.channels // 8), ("strip", "s32", config["strip"]),
            ("source_rows", "s32", d.rows.source), ("target_rows", "s32", d.rows.target))]
        args += digits.args(c.digits.wide)
        return Build((Step.of("conv/depthwise_lines_sm90", self.op, Target.for_arch(device.arch, (8, 0)), c.threads, args, c,
                              parts * chunks, dynamic_smem=c.smem_bytes, min_ctas_per_sm=config["ctas"],
                              suffix=f"{c.kind}_{d.rows.taps}x{d.columns.taps}_g{groups}_b{c.blocks}_{c.images}"),))


def _consts(p: ConvProblem, d: Depthwise, groups: int, images: int, blocks: int, stages: int, outs: int) -> LinesConsts:
    size, (channel, _, *steps) = d.filter.dtype.num_bytes, d.filter.strides
    row, column = (0, *(s * size for s in steps))[-2:]
    return LinesConsts(d.source.dtype.name, d.target.dtype.name, d.rows, d.columns, groups, images, blocks, stages, outs,
                       (channel * size, row, column), p.flip != (d.kind == "dgrad"))


_WALKS = ("conv_fprop", "conv_dgrad", "conv_transpose", "conv_transpose_dgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (LinesEngine(op),) for op in _WALKS}
