"""Convolutions of few channels on wgmma, sm_90a: strips of the image in shared memory, operands from registers.

A tensor copy needs 16 bytes of channels; an image of 3 has 6. But taps along a row and their channels are one run of neighbouring
elements, so a strip of whole image rows is brought as it lies, and each thread takes the pairs of k that wgmma wants of its rows
straight from it. The filter, rearranged to the same order of k, stays in shared memory. What the copies of one output row's windows
share is read from memory once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ..codegen.spec import Target as PtxTarget
from ..codegen.spec import TensorMapSpec
from ..device import DeviceInfo
from . import affine_tiling as tiling
from .affine import AffineMatmul, Bound, MatmulGroup, Source
from .affine_stream_sm90 import leaves_first
from .affine_wgmma_sm90 import BARRIER_BYTES, MAX_REGISTERS, PANEL, SMEM_BYTES, RingConsts, epilogue_lines, plan_epilogue
from .base import Arg, Build, EngineConfig, Step, Support, TensorArg, TensorMapArg, refuse

HALF = 8  # k elements of a half of wgmma's 16, each half in one row of the image
MAX_UNIT = 64
SPAN_K = 64  # k elements of a panel of the filter: 128 bytes
MAX_TILE_N = 128
MAX_TILE_N_OF_THREE = 96  # columns for which three warpgroups have the registers
MAX_POSITIONS = 512  # of a tile
MAX_BOX = 256
STEPS_AT_ONCE = 12  # of 4 registers each
STAGING_SLOTS = 2
MAX_LINES = 3000


@dataclass(frozen=True, slots=True)
class StripConsts:
    """Consts of matmul/strip_sm90. k is walked in halves of 8, row_halves of them in each of the taps' rows; the run of a row
    begins `shift` elements into them. Bytes of a strip: row_bytes from a row to the next, first_byte where the run of position 0
    begins (rounded down to 4), step_bytes from a position of a row to the next, step_rows strip rows from a row of positions to the
    next. columns: of D, of which tile_n are multiplied; in_lines: D's rows lie end to end, so 64 of them are stored as lines of 128 bytes
    whatever their length, else in panels of 64 columns."""

    ring: RingConsts
    kind: str
    tile_n: int
    columns: int
    in_lines: bool
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
    def slot_bytes(self) -> int:
        """Of the two that a warpgroup stages its results in."""
        return PANEL * 2 * (self.columns if self.in_lines else PANEL)

    @property
    def panels(self) -> list[tuple[int, int]]:
        """Accumulators of a thread of each 64 columns: first, last + 1."""
        return [(first, min(first + PANEL // 2, self.tile_n // 2)) for first in range(0, self.tile_n // 2, PANEL // 2)]

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
class Strips:
    """How windows lie in an image: positions (image, row, column), runs of neighbouring elements in `tap_rows` rows.

    map: the image by (unit elements, units of a row, row, image), but for its box. Strips begin at row first_row + tile row *
    step_rows and at unit first_unit; the run of position 0 begins `lead` elements into it, those of further positions `step` apart.
    """

    map: TensorMapSpec
    byte_offset: int
    images: int
    rows: int
    columns: int
    tap_rows: int
    run: int
    step: int
    step_rows: int
    first_row: int
    first_unit: int
    lead: int

    @property
    def unit(self) -> int:
        return self.map.dims[0]

    def units(self, elements: int) -> int:
        """Units of a strip's row, of which a position takes `elements` from where its run begins."""
        return -(-(self.lead + (self.columns - 1) * self.step + elements) // self.unit)

    def strip_rows(self, tile_rows: int) -> int:
        return (tile_rows - 1) * self.step_rows + self.tap_rows

    def boxed(self, units: int, tile_rows: int) -> TensorMapSpec:
        return replace(self.map, box=(self.unit, units, self.strip_rows(tile_rows), 1))


def plan_strips(x: Source, positions: tuple[int, ...], position_strides: tuple[int, ...], taps: tuple[int, ...],
                tap_strides: tuple[int, ...], bounds: Sequence[Bound]) -> Strips | str:
    """Strips of a two-dimensional convolution whose taps along a row and channels are neighbours, or why there are none.

    bounds: with row_coefs of the positions and k_coefs of the taps.
    """
    size = x.dtype.num_bytes
    if len(positions) not in (2, 3) or len(taps) not in (2, 3):
        return "strips are of positions (image, row, column) and taps (row, run) or (row, column, channel)"
    missing = 3 - len(positions)
    images, rows, columns = (1,) * missing + positions
    image_stride, row_stride, step = (0,) * missing + position_strides
    bounds = [replace(b, row_coefs=(0,) * missing + b.row_coefs) for b in bounds]
    tap_rows, channels = taps[0], taps[-1] if len(taps) == 3 else 1
    run = prod(taps[1:])
    if tap_strides[-1] != 1 or (len(taps) == 3 and tap_strides[1] != channels):
        return "taps along a row and channels are no run of neighbours"
    pitch = tap_strides[0]
    if pitch <= 0 or row_stride <= 0 or row_stride % pitch or step <= 0:
        return "rows of positions are no whole rows apart"
    across, along = (next((b for b in bounds if b.row_coefs[digit]), None) for digit in (1, 2))
    if any(b not in (across, along) for b in bounds) or across is along is not None:
        return "a bound ties more than one position to one tap"
    step_rows = row_stride // pitch
    if across and (across.row_coefs != (0, step_rows, 0) or across.k_coefs != (1,) + (0,) * (len(taps) - 1)):
        return "rows of taps are not neighbours"
    if along and (along.row_coefs[:2] != (0, 0) or along.row_coefs[2] * channels != step or along.k_coefs not in ((0, 1), (0, 1, 0))):
        return "taps along a row are not neighbours"
    first_row = across.offset if across else 0
    first = along.offset * channels if along else 0
    height = across.extent if across else (rows - 1) * step_rows + tap_rows
    width = along.extent * channels if along else (columns - 1) * step + run
    base = x.base - first_row * pitch - first
    unit = MAX_UNIT
    while unit > HALF and width % unit:
        unit //= 2
    if width % unit or pitch * size % 16 or image_stride * size % 16 or base * size % 16 or base < 0 or x.align % 16:
        return f"image rows of {width} elements, {pitch} apart, are no multiples of 16 bytes"
    if columns > 2**15 or (missing and image_stride):
        return "its rows are too long"
    map_ = TensorMapSpec(x.dtype.name, (unit, width // unit, height, images),
                         (unit * size, pitch * size, image_stride * size if images > 1 else 16), ())
    return Strips(map_, base * size, images, rows, columns, tap_rows, run, step, step_rows, first_row, first // unit, first % unit)


@dataclass(frozen=True, slots=True)
class _Plan:
    consts: StripConsts
    digits: tiling.Digits
    strips: Strips
    tile_rows: int
    map: TensorMapSpec
    stored: TensorMapSpec

    @property
    def row_tiles(self) -> int:
        return self.strips.rows // self.tile_rows

    @property
    def num_tiles(self) -> int:
        return self.strips.images * self.row_tiles


@lru_cache(maxsize=256)
def _plan(am: AffineMatmul, tile_rows: int = 0) -> _Plan | str:
    """Strips for m's positions in tiles of so many rows (0: the most that fit), or why there are none."""
    size, d = am.a.dtype.num_bytes, am.d
    if len(am.n.extents) != 1 or am.batch.size != 1:
        return "there are groups, or several digits of n"
    s = plan_strips(am.a, am.m.extents, am.a.row_strides, am.k.extents, am.a.k_strides, am.a.bounds)
    if isinstance(s, str):
        return f"{am.a.name}: {s}"
    if am.b.k_strides[1:] != am.a.k_strides[1:]:
        return f"{am.b.name}: taps along a row and channels are no run of neighbours"
    if s.step % 2:
        return "positions are not an even number of elements apart"
    packed = (s.rows * s.columns * am.n.size, s.columns * am.n.size, am.n.size)
    if d.m_strides != packed[3 - len(am.m.extents):] or d.n_strides not in ((1,), (0,)) or any(any(t.m_strides) for t in am.operands):
        return "D is not packed, channels last, or an operand of the epilogue changes along m"
    if am.n.size * size % 16 or d.base * size % 16 or d.align % 16 or d.dtype.num_bytes != 2 or am.n.size > MAX_TILE_N:
        return f"D is of up to {MAX_TILE_N} channels of 16 bits, their bytes a multiple of 16"

    in_lines = am.n.size % PANEL > 0 and s.columns * am.n.size % PANEL == 0
    tile_n = _aligned(am.n.size, 16 if in_lines else PANEL)
    warpgroups = 3 if tile_n <= MAX_TILE_N_OF_THREE else 2
    shift = s.lead % 2
    row_halves = -(-(s.run + shift) // HALF)
    units = s.units(row_halves * HALF - shift)
    row_bytes = units * s.unit * size
    steps = -(-s.tap_rows * row_halves // 2)
    filter_bytes = -(-steps * 2 * HALF // SPAN_K) * tile_n * 128
    staging_bytes = warpgroups * STAGING_SLOTS * PANEL * 2 * (am.n.size if in_lines else PANEL)
    free = SMEM_BYTES - filter_bytes - staging_bytes - 2 * BARRIER_BYTES * 4 * warpgroups - 1024  # the filters begin at a multiple of 1024
    # Least padding of blocks, then the fewest rows read again.
    choices = [r for r in range(1, s.rows + 1) if s.rows % r == 0 and r * s.columns <= max(MAX_POSITIONS, s.columns)
               and s.strip_rows(r) <= MAX_BOX and free // _aligned(s.strip_rows(r) * row_bytes, 128) >= warpgroups]
    if not choices or units > MAX_BOX or tile_rows and tile_rows not in choices:
        return "a strip does not fit shared memory or a box"
    tile_rows = tile_rows or min(choices, key=lambda r: (round(_aligned(r * s.columns, PANEL) / (r * s.columns), 2), -r))
    copied = s.strip_rows(tile_rows) * row_bytes
    stage_bytes = _aligned(copied, 128)
    stages = warpgroups * min(4, free // stage_bytes // warpgroups)
    merged = tiling.merged_digits(am)
    accumulators = tile_n // 2 + 4 * min(steps, STEPS_AT_ONCE)
    epilogue = plan_epilogue(merged, am, tiling.needs_wide(merged), False, MAX_REGISTERS[warpgroups] - accumulators)
    if epilogue_lines(am) * tile_n // 2 > MAX_LINES:
        return "its epilogue is too long to apply to all accumulators of a thread"
    filter_at = _aligned(stages * stage_bytes, 1024)
    staging_at = filter_at + filter_bytes
    positions = tile_rows * s.columns
    ring = RingConsts(stages, stage_bytes, staging_at + staging_bytes, 1)
    consts = StripConsts(ring, am.a.dtype.name, tile_n, am.n.size, in_lines, warpgroups, positions, -(-positions // PANEL), s.tap_rows,
                         s.run, shift, row_halves, row_bytes, (s.lead - shift) * size, s.step * size, s.step_rows, copied, filter_at,
                         staging_at, epilogue)
    line, lines = (PANEL, positions * am.n.size // PANEL) if in_lines else (am.n.size, positions)
    stored = TensorMapSpec(d.dtype.name, (line, lines, s.images * (s.rows // tile_rows)), (line * size, positions * am.n.size * size),
                           (PANEL, am.n.size if in_lines else PANEL, 1), swizzle=128)
    return _Plan(consts, merged, s, tile_rows, s.boxed(units, tile_rows), stored)


def _aligned(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def _check(name: str, plan_of: Callable[[AffineMatmul], object], am: AffineMatmul | MatmulGroup, device: DeviceInfo) -> Support:
    """What both kernels need; plan_of gives the reason if it finds no plan."""
    if isinstance(am, MatmulGroup):
        return refuse(f"{name} takes a single product")
    halves = tiling.check_halves_sm90(name, am, device)
    if not halves:
        return halves
    common = tiling.check_common(am, device)
    if not common or tiling.empty_build(am) is not None:
        return common
    if am.k.size == 0:
        return refuse(f"{name} needs a sum of at least one term")
    plan = plan_of(am)
    return refuse(f"{name}: {plan}") if isinstance(plan, str) else common


def _tile_arguments(t: tiling.Arguments, s: Strips, tile_rows: int, num_ctas: int) -> None:
    """What finds a tile (whole rows of positions) and its strip."""
    row_tiles = s.rows // tile_rows
    t.add("num_tiles", "u32", s.images * row_tiles)
    t.add("num_ctas", "u32", num_ctas)
    t.add("row_tiles", "u32", row_tiles)
    t.divisor("row_tiles", row_tiles)
    t.add("strip_rows", "u32", tile_rows * s.step_rows)
    t.add("first_row", "s32", s.first_row)
    t.add("first_unit", "s32", s.first_unit)


class StripSm90Matmul:
    """16-bit convolutions of few channels, forward, on Hopper's asynchronous tensor cores."""

    name = "strip_sm90"
    is_deterministic = True

    def check(self, am: AffineMatmul | MatmulGroup, device: DeviceInfo) -> Support:
        """sm_90a; f16 or bf16; windows whose taps along a row and channels are neighbours (see _plan)."""
        return _check(self.name, _plan, am, device)

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Tiles of fewer and fewer rows; the fastest by estimate first."""
        plan = _plan(am)
        assert not isinstance(plan, str), plan
        every = (EngineConfig.of(tile_rows=r) for r in range(plan.tile_rows, 0, -1) if plan.strips.rows % r == 0)
        return tuple(sorted(every, key=lambda c: self.estimate(am, c, device)))

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        """Blocks of 64 positions over the SMs, at the time their products and shared memory accesses take, over the traffic."""
        plan = _plan(am, config["tile_rows"])
        assert not isinstance(plan, str), plan
        c = plan.consts
        clocks = c.blocks * (1.3 * c.steps * max(32, c.tile_n // 2) + 16 * c.steps + 1.5 * c.tile_n)
        # A warpgroup by itself waits for its loads and stores.
        alone = -(-plan.num_tiles // (device.num_sms * c.warpgroups)) * c.blocks * (c.steps * 60 + 500)
        compute_us = max(plan.num_tiles * clocks / device.num_sms, alone) / 1620
        num_bytes = 2 * (tiling.source_elements(am.a, am.m, am.k, am.batch) + am.m.size * am.n.size)
        # SMs that have a tile more are at memory alone; a tile costs a little, and more where the next one does not come meanwhile.
        rounds = -(-plan.num_tiles // device.num_sms)
        memory_us = num_bytes / (device.bandwidth_gbs * 0.95e3) * rounds * device.num_sms / plan.num_tiles
        waits_us = rounds * {1: 0.4, 2: 0.1}.get(c.ring.stages // c.warpgroups, 0.02)
        if device.is_emulated:
            return 1000.0 * plan.num_tiles * c.blocks * c.steps
        return max(compute_us, memory_us) + 0.1 * min(compute_us, memory_us) + waits_us + 6

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        """One persistent CTA per SM."""
        empty = tiling.empty_build(am)
        if empty is not None:
            return empty
        plan = _plan(am, config["tile_rows"])
        assert not isinstance(plan, str), plan
        c = plan.consts
        num_ctas = min(plan.num_tiles, device.num_sms)
        t = tiling.Arguments(c.epilogue.wide)
        _tile_arguments(t, plan.strips, plan.tile_rows, num_ctas)
        t.add("columns", "u32", plan.strips.columns)
        t.divisor("columns", plan.strips.columns)
        t.add("ptr_b", "u64", TensorArg(am.b.name, am.b.base * am.b.dtype.num_bytes))
        t.add("b_n", "s32", am.b.row_strides[0])
        t.add("b_row", "s32", am.b.k_strides[0])
        tiling._target_arguments(t, am, plan.digits, c.epilogue)
        maps = [Arg("map_a", "tensor_map", TensorMapArg(am.a.name, plan.map, plan.strips.byte_offset)),
                Arg("map_d", "tensor_map", TensorMapArg(am.d.name, plan.stored, am.d.base * am.d.dtype.num_bytes))]
        smem = c.ring.barriers_at + 2 * BARRIER_BYTES * c.ring.stages
        return Build((Step.of("matmul/strip_sm90", op, PtxTarget.for_arch(device.arch, (8, 0)), 128 * (1 + c.warpgroups), maps + t.args, c,
                              num_ctas, dynamic_smem=smem, suffix=f"{c.kind}_{c.tap_rows}x{c.run}x{c.tile_n}"),))


# ---- The filter's gradient ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StripGradientConsts:
    """Consts of matmul/strip_gradient_sm90. A stage: panels of 64 filters of the result's gradient, [row][padded column][64 filters] each,
    then the strip. Warpgroup w multiplies elements 64 w and up of (tap rows, run); bytes of a strip as in StripConsts. streams: lines
    leave L2 first."""

    ring: RingConsts
    kind: str
    tile_n: int
    tile_rows: int
    columns: int
    taps: int
    run: int
    row_bytes: int
    first_byte: int
    step_bytes: int
    step_rows: int
    copied_bytes: int
    streams: bool = False

    @property
    def padded_columns(self) -> int:
        """Columns in whole products; the gradients of those beyond the last are zero."""
        return _aligned(self.columns, 16)

    @property
    def panel_bytes(self) -> int:
        return self.tile_rows * self.padded_columns * PANEL * 2

    def outside(self, half: int) -> list[int]:
        """For each of the four pairs of a half of a row's last product the bits of positions beyond the last column."""
        first = self.columns - self.padded_columns + 16 - 8 * half  # of them, within the half
        return [sum(0xFFFF << 16 * e for e in range(2) if 2 * pair + e >= first) for pair in range(4)]

    @property
    def panels(self) -> int:
        return -(-self.tile_n // PANEL)

    @property
    def tail(self) -> int:
        """Filters of the last panel, of which nobody reads more; 0: all panels are full."""
        return self.tile_n % PANEL

    @property
    def gradient_bytes(self) -> int:
        """That copies bring of the result's gradients."""
        return self.panel_bytes // PANEL * self.tile_n

    @property
    def batches(self) -> list[list[int]]:
        """Products of 16 positions of a row whose operands are in registers at a time."""
        steps = self.padded_columns // 16
        return [list(range(first, min(first + STEPS_AT_ONCE, steps))) for first in range(0, steps, STEPS_AT_ONCE)]


@dataclass(frozen=True, slots=True)
class _GradientPlan:
    consts: StripGradientConsts
    digits: tiling.Digits
    epilogue: tiling.EpilogueConsts
    strips: Strips
    map: TensorMapSpec
    gradients: TensorMapSpec

    @property
    def num_tiles(self) -> int:
        return self.strips.images * (self.strips.rows // self.consts.tile_rows)

    def grid(self, am: AffineMatmul, splits: int) -> tiling.Grid:
        sizes = {"m": am.m.size, "n": am.n.size}
        return tiling.Grid(1, 1, 1, splits, 1, 1, 1, _aligned(sizes[self.epilogue.inner], 4), sizes[self.epilogue.outer])


@lru_cache(maxsize=256)
def _gradient_plan(am: AffineMatmul) -> _GradientPlan | str:
    """Strips for k's positions: m are filters, n taps and channels; or why there are none."""
    size, y = am.a.dtype.num_bytes, am.a
    if len(am.m.extents) != 1 or am.batch.size != 1:
        return "there are groups, or several digits of m"
    swapped = [Bound(b.k_coefs, b.row_coefs, b.offset, b.extent) for b in am.b.bounds]
    s = plan_strips(am.b, am.k.extents, am.b.k_strides, am.n.extents, am.b.row_strides, swapped)
    if isinstance(s, str):
        return f"{am.b.name}: {s}"
    filters, taps = am.m.size, am.n.size
    packed = (s.rows * s.columns * filters, s.columns * filters, filters)
    if y.bounds or y.row_strides not in ((1,), (0,)) or y.k_strides != packed[3 - len(am.k.extents):]:
        return f"{y.name} is not packed, channels last"
    if filters * size % 16 or y.base * size % 16 or y.align % 16 or filters > MAX_TILE_N or taps > 3 * PANEL:
        return f"{filters} filters of {taps} elements are no multiple of 8 up to {MAX_TILE_N}, of up to {3 * PANEL} elements"
    tile_n = _aligned(filters, 8)
    panels = -(-filters // PANEL)
    padded_columns = _aligned(s.columns, 16)
    units = s.units((padded_columns - s.columns) * s.step + s.run)
    row_bytes = units * s.unit * size

    def stage(tile_rows: int) -> int:
        return _aligned(s.strip_rows(tile_rows) * row_bytes + tile_rows * padded_columns * panels * PANEL * size, 1024)

    free = SMEM_BYTES - 2 * BARRIER_BYTES * 8
    choices = [r for r in range(1, s.rows + 1) if s.rows % r == 0 and s.strip_rows(r) <= MAX_BOX and free // stage(r) >= 2]
    if not choices or max(units, padded_columns) > MAX_BOX:
        return "a strip does not fit shared memory or a box"
    tile_rows = max(choices, key=lambda r: (min(3, free // stage(r)), r))
    stages = min(8, free // stage(tile_rows))
    ring = RingConsts(stages, stage(tile_rows), stages * stage(tile_rows), -(-taps // PANEL))
    merged = tiling.merged_digits(am)
    epilogue = tiling.plan_epilogue(merged, am, PANEL, PANEL, 128, tiling.needs_wide(merged), True)
    consts = StripGradientConsts(ring, y.dtype.name, tile_n, tile_rows, s.columns, taps, s.run, row_bytes,
                                 s.lead * size, s.step * size, s.step_rows, s.strip_rows(tile_rows) * row_bytes)
    gradients = TensorMapSpec(y.dtype.name, (filters, s.columns, s.rows, s.images), tuple(size * stride for stride in reversed(packed)),
                              (min(PANEL, tile_n), padded_columns, tile_rows, 1), swizzle=128)
    return _GradientPlan(consts, merged, epilogue, s, s.boxed(units, tile_rows), gradients)


class StripGradientSm90Matmul:
    """The filter's gradient of 16-bit convolutions of few channels: every CTA sums its own tiles, a second launch sums the CTAs."""

    name = "strip_gradient_sm90"
    is_deterministic = True

    def check(self, am: AffineMatmul | MatmulGroup, device: DeviceInfo) -> Support:
        """sm_90a; f16 or bf16; windows whose taps along a row and channels are neighbours (see _gradient_plan)."""
        return _check(self.name, _gradient_plan, am, device)

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        return (EngineConfig(),)

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        """Products of 16 positions at the time their operands' way through shared memory takes, over the traffic, and the sum."""
        plan = _gradient_plan(am)
        assert not isinstance(plan, str), plan
        c = plan.consts
        clocks = c.tile_rows * c.padded_columns / 16 * c.ring.consumers * max(1.3 * (32 + c.tile_n / 4), 150 / c.ring.consumers)
        compute_us = -(-plan.num_tiles * clocks // device.num_sms) / 1620
        num_bytes = 2 * (tiling.source_elements(am.a, am.m, am.k, am.batch) + tiling.source_elements(am.b, am.n, am.k, am.batch))
        memory_us = num_bytes / (device.bandwidth_gbs * 1e3)
        if device.is_emulated:
            return 1000.0 * plan.num_tiles * c.tile_rows * c.padded_columns / 16
        return max(compute_us, memory_us) + 0.2 * min(compute_us, memory_us) + 11

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        """One persistent CTA per SM, then the sum of their parts in a fixed order."""
        empty = tiling.empty_build(am)
        if empty is not None:
            return empty
        plan = _gradient_plan(am)
        assert not isinstance(plan, str), plan
        read = sum(x.dtype.num_bytes * tiling.source_elements(x, rows, am.k, am.batch) for x, rows in ((am.a, am.m), (am.b, am.n)))
        c = replace(plan.consts, streams=leaves_first(read, 0, device))
        num_ctas = min(plan.num_tiles, device.num_sms)
        grid = plan.grid(am, num_ctas)
        t = tiling.Arguments(False)
        _tile_arguments(t, plan.strips, c.tile_rows, num_ctas)
        tiling._partial_arguments(t, grid, am, plan.epilogue, workspace_offset)
        maps = [Arg("map_a", "tensor_map", TensorMapArg(am.b.name, plan.map, plan.strips.byte_offset)),
                Arg("map_b", "tensor_map", TensorMapArg(am.a.name, plan.gradients, am.a.base * am.a.dtype.num_bytes))]
        if c.tail and c.panels > 1:
            narrow = replace(plan.gradients, box=(c.tail, *plan.gradients.box[1:]))
            maps.append(Arg("map_b_tail", "tensor_map", TensorMapArg(am.a.name, narrow, am.a.base * am.a.dtype.num_bytes)))
        target = PtxTarget.for_arch(device.arch, (8, 0))
        smem = c.ring.barriers_at + 2 * BARRIER_BYTES * c.ring.stages
        step = Step.of("matmul/strip_gradient_sm90", op, target, 128 * (1 + c.ring.consumers), maps + t.args, c, num_ctas,
                       dynamic_smem=smem, suffix=f"{c.kind}_{c.taps}x{c.tile_n}")
        reduce = tiling.reduce_step(op, am, plan.digits, grid, plan.epilogue, target, plan.epilogue.wide, workspace_offset)
        return Build((step, reduce), workspace_offset + num_ctas * grid.outer_size * grid.padded_inner * am.acc.num_bytes)


STRIP_SM90 = StripSm90Matmul()
STRIP_GRADIENT_SM90 = StripGradientSm90Matmul()
