"""Convolutions of few channels on wgmma, sm_90a: strips of the image in shared memory, operands from registers.

A tensor copy needs 16 bytes of channels; an image of 3 has 6. But taps along a row and their channels are one run of neighbouring
elements, so a strip of whole image rows is brought as it lies, and each thread takes the pairs of k that wgmma wants of its rows
straight from it. The filter, rearranged to the same order of k, stays in shared memory. What the copies of one output row's windows
share is read from memory once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..codegen.spec import Target as PtxTarget
from ..codegen.spec import TensorMapSpec
from ..device import DeviceInfo
from . import affine_tiling as tiling
from .affine import AffineMatmul, Bound, MatmulGroup
from .affine_wgmma_sm90 import BARRIER_BYTES, MAX_REGISTERS, PANEL, SMEM_BYTES, RingConsts, epilogue_lines, plan_epilogue
from .base import Arg, Build, EngineConfig, Step, Support, TensorArg, TensorMapArg, refuse

HALF = 8  # k elements of a half of wgmma's 16, each half in one row of the image
SPAN_K = 64  # k elements of a panel of the filter: 128 bytes
MAX_TILE_N = 128
MAX_POSITIONS = 512  # of a tile
MAX_BOX = 256
STEPS_AT_ONCE = 12  # of 4 registers each
STAGING_PANELS = 2
MAX_LINES = 3000


@dataclass(frozen=True, slots=True)
class StripConsts:
    """Consts of matmul/strip_sm90. k is walked in halves of 8, row_halves of them in each of the taps' rows; the run of a row
    begins `shift` elements into them. Bytes of a strip: row_bytes from a row to the next, first_byte where the run of position 0
    begins (rounded down to 4), step_bytes from a position of a row to the next, step_rows strip rows from a row of positions to the
    next."""

    ring: RingConsts
    kind: str
    tile_n: int
    warpgroups: int  # that multiply, each its own tiles
    positions: int  # of a tile
    blocks: int  # of 64 positions
    tap_rows: int
    run: int
    shift: int
    row_halves: int
    row_bytes: int
    first_byte: int
    step_bytes: int
    step_rows: int
    copied_bytes: int  # of a strip, without what aligns stages
    filter_at: int
    staging_at: int
    epilogue: tiling.EpilogueConsts

    @property
    def steps(self) -> int:
        """Products of 16 elements of k."""
        return -(-self.tap_rows * self.row_halves // 2)

    @property
    def batches(self) -> list[list[int]]:
        """Steps whose operands are in registers at a time."""
        return [list(range(first, min(first + STEPS_AT_ONCE, self.steps))) for first in range(0, self.steps, STEPS_AT_ONCE)]

    @property
    def filter_panels(self) -> int:
        return -(-self.steps * 2 * HALF // SPAN_K)

    def half_offset(self, half: int) -> int | None:
        """Bytes from the run of a position to a half of k; None for the one that only fills up the last step."""
        row, at = divmod(half, self.row_halves)
        return row * self.row_bytes + at * 2 * HALF if row < self.tap_rows else None

    def outside(self, half: int) -> list[int]:
        """For each of the four pairs of a half the bits of elements that are no part of the run."""
        first = half % self.row_halves * HALF - self.shift
        return [sum(0xFFFF << 16 * e for e in range(2) if not 0 <= first + 2 * pair + e < self.run) for pair in range(4)]

    @property
    def masked(self) -> list[int]:
        """Halves of a row with elements outside of the run."""
        return [h for h in range(self.row_halves) if any(self.outside(h))]


@dataclass(frozen=True, slots=True)
class _Plan:
    consts: StripConsts
    digits: tiling.Digits
    strips: TensorMapSpec
    byte_offset: int
    stored: TensorMapSpec
    row_tiles: int  # of an image
    images: int
    row_positions: int
    first_row: int  # of the strip of the first tile
    first_chunk: int

    @property
    def num_tiles(self) -> int:
        return self.images * self.row_tiles


def _bound_of(bounds: tuple[Bound, ...], digit: int) -> Bound | None:
    return next((b for b in bounds if b.row_coefs[digit]), None)


@lru_cache(maxsize=256)
def _plan(am: AffineMatmul) -> _Plan | str:
    """The strips of a two-dimensional convolution whose taps along a row and channels are neighbours, or why there are none."""
    size, d = am.a.dtype.num_bytes, am.d
    if len(am.m.extents) not in (2, 3) or len(am.k.extents) not in (2, 3) or len(am.n.extents) != 1 or am.batch.size != 1:
        return "strips are of (image, row, column) along m, (tap row, run) or (tap row, tap column, channel) along k, no groups"
    missing = 3 - len(am.m.extents)
    images, rows, columns = (1,) * missing + am.m.extents
    image_stride, row_stride, step = (0,) * missing + am.a.row_strides
    bounds = tuple(Bound((0,) * missing + b.row_coefs, b.k_coefs, b.offset, b.extent) for b in am.a.bounds)
    tap_rows, channels = am.k.extents[0], am.k.extents[-1] if len(am.k.extents) == 3 else 1
    run = am.k.size // tap_rows
    for x in (am.a, am.b):
        if x.k_strides[-1] != 1 or (len(am.k.extents) == 3 and x.k_strides[1] != channels):
            return f"{x.name}: taps along a row and channels are no run of neighbours"
    pitch = am.a.k_strides[0]
    if pitch <= 0 or row_stride <= 0 or row_stride % pitch or step <= 0 or step % 2 or (missing and image_stride):
        return "rows of positions are no whole rows apart, or positions not an even number of elements"
    across, along = _bound_of(bounds, 1), _bound_of(bounds, 2)
    if any(b not in (across, along) for b in bounds) or across is along is not None:
        return "a bound ties more than one position to one tap"
    step_rows = row_stride // pitch
    if across and (across.row_coefs != (0, step_rows, 0) or across.k_coefs != (1,) + (0,) * (len(am.k.extents) - 1)):
        return "rows of taps are not neighbours"
    if along and (along.row_coefs[:2] != (0, 0) or along.row_coefs[2] * channels != step or along.k_coefs not in ((0, 1), (0, 1, 0))):
        return "taps along a row are not neighbours"
    first_row = across.offset if across else 0
    first = along.offset * channels if along else 0
    height = across.extent if across else (rows - 1) * step_rows + tap_rows
    width = along.extent * channels if along else (columns - 1) * step + run
    base = am.a.base - first_row * pitch - first
    unit = 64
    while unit > HALF and width % unit:
        unit //= 2
    if width % unit or pitch * size % 16 or image_stride * size % 16 or base * size % 16 or base < 0 or am.a.align % 16:
        return f"image rows of {width} elements, {pitch} apart, are no multiples of 16 bytes"
    if (d.m_strides[-1] != am.n.size or d.n_strides not in ((1,), (0,)) or any(any(t.m_strides) for t in am.operands)
            or (*((rows * columns * am.n.size,) * (1 - missing)), columns * am.n.size, am.n.size) != d.m_strides):
        return "D is not packed, channels last, or an operand of the epilogue changes along m"
    if am.n.size * size % 16 or d.base * size % 16 or d.align % 16 or d.dtype.num_bytes != 2 or am.n.size > MAX_TILE_N:
        return f"D is of up to {MAX_TILE_N} channels of 16 bits, their bytes a multiple of 16"

    tile_n = PANEL if am.n.size <= PANEL else MAX_TILE_N
    warpgroups = 3 if tile_n == PANEL else 2
    first_chunk = first // unit
    lead = first - first_chunk * unit
    shift = lead % 2
    row_halves = -(-(run + shift) // HALF)
    chunks = -(-(lead - shift + (columns - 1) * step + row_halves * HALF) // unit)
    steps = -(-tap_rows * row_halves // 2)
    filter_bytes = -(-steps * 2 * HALF // SPAN_K) * tile_n * 128
    staging_bytes = warpgroups * STAGING_PANELS * PANEL * PANEL * 2
    free = SMEM_BYTES - filter_bytes - staging_bytes - 2 * BARRIER_BYTES * 4 * warpgroups

    def strip(tile_rows: int) -> tuple[int, int]:
        copied = ((tile_rows - 1) * step_rows + tap_rows) * chunks * unit * size
        return copied, -(-copied // 128) * 128

    def is_possible(tile_rows: int) -> bool:
        return (rows % tile_rows == 0 and tile_rows * columns <= max(MAX_POSITIONS, columns) and free // strip(tile_rows)[1] >= warpgroups
                and (tile_rows - 1) * step_rows + tap_rows <= MAX_BOX)

    choices = [r for r in range(1, rows + 1) if r * columns <= max(MAX_POSITIONS, columns) and is_possible(r)]
    if not choices or chunks > MAX_BOX or columns > 2**15:
        return "a strip does not fit shared memory or a box"
    # Least padding of blocks, then the fewest rows read again.
    tile_rows = min(choices, key=lambda r: (round(-(-r * columns // PANEL) * PANEL / (r * columns), 2), -r))
    copied, stage_bytes = strip(tile_rows)
    stages = warpgroups * min(4, free // stage_bytes // warpgroups)
    stages_bytes = -(-stages * stage_bytes // 1024) * 1024
    merged = tiling.merged_digits(am)
    accumulators = tile_n // 2 + 4 * min(steps, STEPS_AT_ONCE)
    epilogue = plan_epilogue(merged, am, tiling.needs_wide(merged), False, MAX_REGISTERS[warpgroups] - accumulators)
    if epilogue_lines(am) * tile_n // 2 > MAX_LINES:
        return "its epilogue is too long to apply to all accumulators of a thread"
    filter_at, staging_at = stages_bytes, stages_bytes + filter_bytes
    ring = RingConsts(stages, stage_bytes, staging_at + staging_bytes, 1)
    consts = StripConsts(ring, am.a.dtype.name, tile_n, warpgroups, tile_rows * columns, -(-tile_rows * columns // PANEL), tap_rows, run,
                         shift, row_halves, chunks * unit * size, (lead - shift) * size, step * size, step_rows, copied, filter_at,
                         staging_at, epilogue)
    strips = TensorMapSpec(am.a.dtype.name, (unit, width // unit, height, images),
                           (unit * size, pitch * size, image_stride * size if images > 1 else 16),
                           (unit, chunks, (tile_rows - 1) * step_rows + tap_rows, 1))
    row_tiles = rows // tile_rows
    stored = TensorMapSpec(d.dtype.name, (am.n.size, tile_rows * columns, images * row_tiles),
                           (am.n.size * size, tile_rows * columns * am.n.size * size), (PANEL, PANEL, 1), swizzle=128)
    return _Plan(consts, merged, strips, base * size, stored, row_tiles, images, columns, first_row, first_chunk)


class StripSm90Matmul:
    """16-bit convolutions of few channels, forward, on Hopper's asynchronous tensor cores."""

    name = "strip_sm90"
    is_deterministic = True

    def check(self, am: AffineMatmul | MatmulGroup, device: DeviceInfo) -> Support:
        """sm_90a; f16 or bf16; windows whose taps along a row and channels are neighbours (see _plan)."""
        if device.arch != "sm_90a":
            return refuse(f"strip_sm90 needs sm_90a, the device is {device.arch}")
        if isinstance(am, MatmulGroup) or not am.a.dtype.name == am.b.dtype.name in ("f16", "bf16") or am.acc.name != "f32":
            return refuse("strip_sm90 multiplies f16 or bf16 pairs in f32")
        common = tiling.check_common(am, device)
        if not common or tiling.empty_build(am) is not None:
            return common
        if am.k.size == 0:
            return refuse("strip_sm90 needs a sum of at least one term")
        plan = _plan(am)
        return refuse(f"strip_sm90: {plan}") if isinstance(plan, str) else common

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        return (EngineConfig(),)

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        """Blocks of 64 positions over the SMs, at the time their products and shared memory accesses take, over the traffic."""
        plan = _plan(am)
        assert not isinstance(plan, str), plan
        c = plan.consts
        clocks = c.blocks * (1.3 * c.steps * max(32, c.tile_n // 2) + 16 * c.steps + 1.5 * c.tile_n)
        compute_us = -(-plan.num_tiles * clocks // device.num_sms) / 1620
        num_bytes = 2 * (tiling.source_elements(am.a, am.m, am.k, am.batch) + am.m.size * am.n.size)
        memory_us = num_bytes / (device.bandwidth_gbs * 1e3)
        if device.is_emulated:
            return 1000.0 * plan.num_tiles * c.blocks * c.steps
        return max(compute_us, memory_us) + 0.33 * min(compute_us, memory_us) + 5

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        """One persistent CTA per SM."""
        empty = tiling.empty_build(am)
        if empty is not None:
            return empty
        plan = _plan(am)
        assert not isinstance(plan, str), plan
        c = plan.consts
        num_ctas = min(plan.num_tiles, device.num_sms)
        t = tiling.Arguments(c.epilogue.wide)
        t.add("num_tiles", "u32", plan.num_tiles)
        t.add("num_ctas", "u32", num_ctas)
        t.add("row_tiles", "u32", plan.row_tiles)
        t.divisor("row_tiles", plan.row_tiles)
        t.add("columns", "u32", plan.row_positions)
        t.divisor("columns", plan.row_positions)
        t.add("strip_rows", "u32", c.positions // plan.row_positions * c.step_rows)
        t.add("first_row", "s32", plan.first_row)
        t.add("first_chunk", "s32", plan.first_chunk)
        t.add("ptr_b", "u64", TensorArg(am.b.name, am.b.base * am.b.dtype.num_bytes))
        t.add("b_n", "s32", am.b.row_strides[0])
        t.add("b_row", "s32", am.b.k_strides[0])
        tiling._target_arguments(t, am, plan.digits, c.epilogue)
        maps = [Arg("map_a", "tensor_map", TensorMapArg(am.a.name, plan.strips, plan.byte_offset)),
                Arg("map_d", "tensor_map", TensorMapArg(am.d.name, plan.stored, am.d.base * am.d.dtype.num_bytes))]
        smem = c.ring.barriers_at + 2 * BARRIER_BYTES * c.ring.stages
        return Build((Step.of("matmul/strip_sm90", op, PtxTarget.for_arch(device.arch, (8, 0)), 128 * (1 + c.warpgroups), maps + t.args, c,
                              num_ctas, dynamic_smem=smem, suffix=f"{c.kind}_{c.tap_rows}x{c.run}x{c.tile_n}"),))


STRIP_SM90 = StripSm90Matmul()
