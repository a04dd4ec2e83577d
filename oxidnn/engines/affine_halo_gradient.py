"""The gradient of a small filter on wgmma, sm_90a, with patches: the image's pixels under a block of positions and all taps come once.

The filter's gradient sums dy(position, filter) * x(position + tap, channel) over positions. Loops that fetch a tile of x for each tap
bring every pixel as often as there are taps, and the same dy for each tile of them: L2 is then the bound (3x3 with 64 channels: 96 KB of
boxes for 64 positions). Here a stage holds 64 positions of dy and the patch of x beneath them, 21 KB, and a CTA multiplies all taps: a tap
is a place in the patch, and as the taps of a row are a pixel apart they are chunks of one product's columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod

from ..codegen.spec import Target as PtxTarget
from ..codegen.spec import TensorMapSpec
from ..device import DeviceInfo
from . import affine_tiling as tiling
from .affine import AffineMatmul, Bound, MatmulGroup
from .affine_tma import BLOCK, SPAN_BYTES, Halo, _MapBuilder, map_dtype, plan_halo, walk_taps
from .affine_tma import Sum as BoxSum
from .affine_wgmma_sm90 import BARRIER_BYTES, MAX_STAGES, PANEL, SMEM_BYTES, RingConsts
from .base import Arg, Build, EngineConfig, Step, Support, TensorMapArg, refuse

POSITIONS = BLOCK * BLOCK  # of a stage
MAX_SUMS = {1: 128, 2: 128, 3: 96}  # a thread, by warpgroups: rows of taps
WAVES = (1, 2)


@dataclass(frozen=True, slots=True)
class HaloGradientConsts:
    """Consts of matmul/halo_gradient_sm90. Warpgroup w multiplies 64 filters with the taps of row w, 64 channels each; a stage: dy of 8 x 8
    positions, then the patch. step_w: pixels from a tap to the next; step_h: patch rows from a row of taps to the next."""

    ring: RingConsts
    kind: str
    taps_w: int
    step_w: int
    step_h: int
    patch_h: int
    patch_w: int
    pairs: bool  # two columns lie side by side in the partial sums
    late: tuple[str, ...] = ()  # parameters that place the sums

    @property
    def tile_n(self) -> int:
        return PANEL * self.taps_w

    @property
    def sums(self) -> list[str]:
        return [f"%acc{i}" for i in range(self.tile_n // 2)]

    @property
    def dy_bytes(self) -> int:
        return POSITIONS * SPAN_BYTES

    @property
    def patch_bytes(self) -> int:
        return self.patch_h * self.patch_w * SPAN_BYTES

    @property
    def bits_a(self) -> str:
        """A descriptor but for its address: 128-byte swizzle, 8 positions between groups of lines."""
        return f"0x{1 << 62 | (BLOCK * SPAN_BYTES >> 4) << 32 | 1 << 16:016X}"

    @property
    def bits_b(self) -> str:
        """A patch row between groups of 8 lines, a tap's pixels between chunks of columns."""
        return f"0x{1 << 62 | (self.patch_w * SPAN_BYTES >> 4) << 32 | (self.step_w * SPAN_BYTES >> 4) << 16:016X}"

    @property
    def tap_row_bytes(self) -> int:
        return self.step_h * self.patch_w * SPAN_BYTES

    @property
    def step_units(self) -> tuple[int, int]:
        """Descriptor units from 16 positions to the next, two rows of a block, in dy and in a patch."""
        return 2 * BLOCK * SPAN_BYTES >> 4, 2 * self.patch_w * SPAN_BYTES >> 4


@dataclass(frozen=True, slots=True)
class _Plan:
    consts: HaloGradientConsts
    digits: tiling.Digits
    epilogue: tiling.EpilogueConsts
    halo: Halo
    gradients: TensorMapSpec
    channels: int

    def tiles(self, am: AffineMatmul) -> tuple[int, int]:
        """Of filters, of channels."""
        return -(-am.m.size // PANEL), -(-self.channels // PANEL)

    def grid(self, am: AffineMatmul, splits: int) -> tiling.Grid:
        sizes = {"m": am.m.size, "n": am.n.size}
        inner = self.epilogue.inner
        return tiling.Grid(1, 1, 1, splits, 1, 1, 1, -(-sizes[inner] // 4) * 4, sizes[self.epilogue.outer])


@lru_cache(maxsize=256)
def _plan(am: AffineMatmul) -> _Plan | str:
    """Patches of the image, or why there are none."""
    d = tiling.merged_digits(am)
    x, y, size = d.b, d.a, am.a.dtype.num_bytes
    if size != 2 or am.a.dtype != am.b.dtype:
        return "patches are of 16-bit types"
    if len(d.k) != 3 or len(x.rows) != 3 or d.batch != (1,) or len(y.rows) != 1 or y.bounds or am.ragged is not None:
        return "(image, row, column) lie along k, (tap row, tap column, channel) along n, filters along m, no batch"
    # As in a forward convolution, but that rows and k have changed places.
    swapped = replace(x, rows=d.k, row_strides=x.k_strides, k_strides=x.row_strides,
                      bounds=tuple(Bound(b.k_coefs, b.row_coefs, b.offset, b.extent) for b in x.bounds))
    halo = plan_halo(swapped, replace(d, k=x.rows, b=swapped), walk_taps(x.rows, PANEL))
    if isinstance(halo, str):
        return halo
    (taps_h, taps_w), (step_h, step_w) = halo.taps, halo.dilation
    if d.k[1] % BLOCK or d.k[2] % BLOCK:  # pixels under positions beside the last would be multiplied by zeros, and may be infinite
        return f"{d.k[1]} x {d.k[2]} positions are no whole blocks of {BLOCK} x {BLOCK}"
    if min(step_h, step_w) < 1 or taps_h not in MAX_SUMS or PANEL * taps_w // 2 > MAX_SUMS[taps_h]:
        return f"a filter of {taps_h} x {taps_w}: three warpgroups have room for three taps each, two for four"
    if y.row_strides[0] != 1 or y.source.align % 16:
        return f"the filters of {y.source.name} are not contiguous or not aligned to 16 bytes"
    build = _MapBuilder(size)
    for extent, stride, box in ((am.m.size, 1, PANEL), (d.k[2], y.k_strides[2], BLOCK), (d.k[1], y.k_strides[1], BLOCK),
                                (d.k[0], y.k_strides[0], 1)):
        build.add(extent, stride, box, BoxSum())
    fault = build.fault(y.source.base)
    if fault:
        return f"{y.source.name}: {fault}"
    patch_h, patch_w = halo.map.box[2], halo.map.box[1]
    stage_bytes = -(-(POSITIONS + patch_h * patch_w) * SPAN_BYTES // 1024) * 1024
    stages = min(MAX_STAGES, (SMEM_BYTES - 2 * BARRIER_BYTES * MAX_STAGES) // stage_bytes)
    if stages < 2:
        return f"a patch of {patch_h} x {patch_w} pixels leaves too little shared memory"
    epilogue = tiling.plan_epilogue(d, am, PANEL, PANEL, 128, tiling.needs_wide(d), True)
    ring = RingConsts(stages, stage_bytes, stages * stage_bytes, taps_h)
    pairs = epilogue.inner == "n" and x.rows[2] % 2 == 0
    consts = HaloGradientConsts(ring, am.a.dtype.name, taps_w, step_w, step_h, patch_h, patch_w, pairs)
    return _Plan(consts, d, epilogue, halo, build.finish(map_dtype(y)), x.rows[2])


class HaloGradientSm90Matmul:
    """The filter's gradient of unit-stride 16-bit convolutions with small filters: CTAs sum parts of the positions, a second launch the
    parts."""

    name = "halo_gradient_sm90"
    is_deterministic = True

    def check(self, am: AffineMatmul | MatmulGroup, device: DeviceInfo) -> Support:
        """sm_90a; f16 or bf16, channels last; up to 3 rows of taps; rows and columns of positions in multiples of 8."""
        if isinstance(am, MatmulGroup):
            return refuse(f"{self.name} takes one part only")
        support = tiling.check_halves_sm90(self.name, am, device)
        common = support and tiling.check_common(am, device)
        if not common or tiling.empty_build(am) is not None:
            return common
        if am.k.size == 0:
            return refuse(f"{self.name} needs a sum of at least one term")
        plan = _plan(am)
        return refuse(f"{self.name}: {plan}") if isinstance(plan, str) else common

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Numbers of parts that make one or two rounds of CTAs, all stages that fit; the fastest by estimate first."""
        if tiling.empty_build(am) is not None:
            return (EngineConfig(),)
        return tuple(sorted(self._candidates(am, device), key=lambda c: self.estimate(am, c, device)))

    def _candidates(self, am: AffineMatmul, device: DeviceInfo) -> Iterator[EngineConfig]:
        plan = _plan(am)
        assert not isinstance(plan, str), plan
        blocks, tiles = plan.halo.num_blocks, prod(plan.tiles(am))
        parts = {max(1, min(waves * device.num_sms // tiles, blocks)) for waves in WAVES}
        for splits in sorted({-(-blocks // -(-blocks // p)) for p in parts}):
            yield EngineConfig.of(splits=splits, stages=plan.consts.ring.stages)

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        """Rounds of CTAs at the time their products take, over the traffic, and the sum of the parts. Within 6 % of what 3x3 layers of 64
        to 256 channels took on an H200 (2026-11-28)."""
        if tiling.empty_build(am) is not None:
            return 0.0
        plan = _plan(am)
        assert not isinstance(plan, str), plan
        c, splits = plan.consts, config["splits"]
        per_split = -(-plan.halo.num_blocks // splits)
        num_ctas = splits * prod(plan.tiles(am))
        if device.is_emulated:
            return 1000.0 * num_ctas * (per_split * c.ring.consumers + 20)
        clocks = per_split * max(2 * c.tile_n * c.ring.consumers, c.ring.stage_bytes / 60, 280)
        rounds = ceil(num_ctas / device.num_sms)
        compute_us = rounds * (clocks + 3500) / 1650
        num_bytes = 2 * (tiling.source_elements(am.a, am.m, am.k, am.batch) + tiling.source_elements(am.b, am.n, am.k, am.batch))
        memory_us = num_bytes / (device.bandwidth_gbs * 0.96e3)
        partial_bytes = 8.0 * splits * am.m.size * am.n.size
        return max(compute_us, memory_us) + 0.1 * min(compute_us, memory_us) + 6.8 + partial_bytes / (device.bandwidth_gbs * 1.22e3)

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        """A CTA for each tile and part, then the sum of the parts in a fixed order."""
        empty = tiling.empty_build(am)
        if empty is not None:
            return empty
        plan = _plan(am)
        assert not isinstance(plan, str), plan
        halo, splits, stages = plan.halo, config["splits"], config["stages"]
        ring = replace(plan.consts.ring, stages=stages, barriers_at=stages * plan.consts.ring.stage_bytes)
        m_tiles, c_tiles = plan.tiles(am)
        grid = plan.grid(am, splits)
        t = tiling.Arguments(False)
        t.add("num_blocks", "u32", halo.num_blocks)
        t.add("part_blocks", "u32", -(-halo.num_blocks // splits))
        for name, value in (("tiles", m_tiles * c_tiles), ("c_tiles", c_tiles), ("image_blocks", prod(halo.blocks[1:])),
                            ("row_blocks", halo.blocks[2])):
            t.add(name, "u32", value)
            t.divisor(name, value)
        t.add("patch_y", "s32", halo.first[0])
        t.add("patch_x", "s32", halo.first[1])
        loads = len(t.args)
        t.add("channels", "u32", plan.channels)
        tiling._partial_arguments(t, grid, am, plan.epilogue, workspace_offset)
        c = replace(plan.consts, ring=ring, late=tuple(a.name for a in t.args[loads:]))
        maps = [Arg("map_a", "tensor_map", TensorMapArg(am.a.name, plan.gradients, am.a.base * am.a.dtype.num_bytes)),
                Arg("map_b", "tensor_map", TensorMapArg(am.b.name, halo.map, halo.byte_offset))]
        target = PtxTarget.for_arch(device.arch, (8, 0))
        smem = c.ring.barriers_at + 2 * BARRIER_BYTES * c.ring.stages
        step = Step.of("matmul/halo_gradient_sm90", op, target, 128 * (1 + c.ring.consumers), maps + t.args, c, splits * m_tiles * c_tiles,
                       dynamic_smem=smem, suffix=f"{c.kind}_{c.ring.consumers}x{c.taps_w}")
        reduce = tiling.reduce_step(op, am, plan.digits, grid, plan.epilogue, target, plan.epilogue.wide, workspace_offset)
        return Build((step, reduce), workspace_offset + splits * grid.outer_size * grid.padded_inner * am.acc.num_bytes)


HALO_GRADIENT_SM90 = HaloGradientSm90Matmul()
