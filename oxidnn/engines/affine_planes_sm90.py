"""Convolutions whose filter stays in shared memory, on wgmma, sm_90a: each pixel is brought once and multiplied by several taps at a time.

A warpgroup takes 64 positions. In three dimensions these are a column: a block of 8 x 8 positions at all depths. It walks the image's
planes; of each it gets the patch under the block and all taps, and multiplies it by the taps of all depths at once. So a product has as
many blocks of columns as the filter has planes, and each block's sums belong to another plane of results. With each step one of these is
complete, and the sums of the others move one block on. A loop that fetches a tile for each tap brings every pixel 27 times, and 32 columns
to a product leave a third of the tensor cores' time unused. In two dimensions the planes are rows, and a block 64 positions of a row.

A sequence is walked in blocks of 64 positions. What counts there is that channels are cut off once: of 80 channels a loop of k tiles of 64
brings a second tile of 16 with each tap, whose rows, cut off, take longer than their products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ..codegen.spec import Target as PtxTarget
from ..codegen.spec import TensorMapSpec
from ..device import DeviceInfo
from . import affine_tiling as tiling
from .affine import AffineMatmul, Bound, IndexSpace, MatmulGroup, Source
from .affine_strip_sm90 import _aligned, _check
from .affine_tma import BLOCK, MAX_BOX, MAX_PIXELS, SPAN_BYTES, _MapBuilder
from .affine_tma import Sum as BoxSum
from .affine_wgmma_sm90 import BARRIER_BYTES, MAX_REGISTERS, PANEL, SMEM_BYTES, RingConsts, epilogue_lines, plan_epilogue
from .base import Arg, Build, EngineConfig, Step, Support, TensorMapArg

WARPGROUPS = 2  # that multiply, each a column
TILES_N = (192, 128, 64, 32, 16)
MAX_COLUMNS = 192  # of a product: 96 accumulators a thread
MAX_PRODUCTS = 200  # in the text of the kernel
MAX_STAGES = 8
SEGMENTS = (1, 2, 3, 4, 6, 8, 16)
MAX_LINES = 3000
PANEL_BYTES = PANEL * SPAN_BYTES
SWIZZLES = {128: 1, 64: 2, 32: 3}  # of a descriptor, by span


@dataclass(frozen=True, slots=True)
class PlanesConsts:
    """Consts of matmul/planes_sm90. A stage holds the patches of all warpgroups, `chunks` of `span` bytes of channels each; the filter lies
    as [tap of a plane][chunk][plane of taps][columns or, "row" major, channels] with lines of span or (row) tile_n * 2 bytes.

    taps: for each tap of a plane, as the filter lies, the first pixel under it in a patch. turns: for each plane of the filter, as it lies,
    at which step it meets a plane of results, whose sums are complete with step depth - 1.
    """

    ring: RingConsts
    kind: str
    tile_n: int
    span: int
    chunks: int
    channels: int
    block: tuple[int, int]  # rows and columns of positions
    patch_h: int
    patch_w: int
    taps: tuple[int, ...]
    taps_w: int
    turns: tuple[int, ...]
    major: str  # of the filter
    warpgroups: int
    filter_at: int
    staging_at: int
    epilogue: tiling.EpilogueConsts

    @property
    def depth(self) -> int:
        return len(self.turns)

    @property
    def columns(self) -> int:
        """Of a product."""
        return self.depth * self.tile_n

    @property
    def chunk_elements(self) -> int:
        return self.span // 2

    @property
    def patch_bytes(self) -> int:
        return _aligned(self.patch_h * self.patch_w * self.span, 128)

    @property
    def panel_bytes(self) -> int:
        """Of the filter: of a tap of a plane and a chunk."""
        return self.columns * self.span

    @property
    def copied_bytes(self) -> int:
        """Of a stage."""
        return self.warpgroups * self.chunks * self.patch_h * self.patch_w * self.span

    @property
    def filter_bytes(self) -> int:
        return len(self.taps) * self.chunks * self.panel_bytes

    @property
    def span_b(self) -> int:
        return self.span if self.major == "k" else 2 * self.tile_n

    @property
    def bits_a(self) -> str:
        """A descriptor but for its address: between groups of 8 lines a patch row, or 8 lines of one."""
        lines = self.patch_w if self.block[0] > 1 else 8
        return f"0x{SWIZZLES[self.span] << 62 | (lines * self.span >> 4) << 32 | 1 << 16:016X}"

    @property
    def bits_b(self) -> str:
        """8 lines between groups; of "row" major, a plane's lines between chunks of columns."""
        leading = 1 if self.major == "k" else self.chunk_elements * self.span_b >> 4
        return f"0x{SWIZZLES[self.span_b] << 62 | (8 * self.span_b >> 4) << 32 | leading << 16:016X}"

    @property
    def products(self) -> list[tuple[int, int]]:
        """Of a step of the walk: descriptor units from the first line of a patch and of the filter."""
        found = []
        for i, pixel in enumerate(self.taps):
            for chunk in range(self.chunks):
                left = self.channels - chunk * self.chunk_elements
                for k in range(min(self.span // 32, -(-left // 16))):
                    a = pixel * self.span + chunk * self.patch_bytes + 32 * k
                    b = (i * self.chunks + chunk) * self.panel_bytes + k * (32 if self.major == "k" else 16 * self.span_b)
                    found.append((a >> 4, b >> 4))
        return found

    @property
    def panels(self) -> int:
        """Of 64 columns that complete sums make."""
        return -(-self.tile_n // PANEL)

    @property
    def slots(self) -> int:
        """Panels that a warpgroup stages in turn."""
        return min(2, self.panels)

    def sums(self, turn: int) -> list[str]:
        """Accumulators of the plane of results that is `turn` steps further on."""
        count = self.tile_n // 2
        return [f"%acc{self.turns.index(turn) * count + i}" for i in range(count)]

    @property
    def accumulators(self) -> list[str]:
        return [f"%acc{i}" for i in range(self.columns // 2)]


@dataclass(frozen=True, slots=True)
class Planes:
    """How planes lie in an image: positions (image, plane, row, column), taps (plane, row, column, channel), unit steps.

    first: plane, row and column under position 0 and its lowest tap; steps: from a tap to the next.
    """

    map: TensorMapSpec  # (channel, column, row, plane, image), but for its box
    byte_offset: int
    positions: tuple[int, int, int, int]
    taps: tuple[int, int, int]
    block: tuple[int, int]
    first: tuple[int, int, int]
    steps: tuple[int, int, int]

    @property
    def blocks(self) -> tuple[int, int, int]:
        return (self.positions[0], -(-self.positions[2] // self.block[0]), -(-self.positions[3] // self.block[1]))

    @property
    def patch(self) -> tuple[int, int]:
        rows, columns = (size + abs(step) * (taps - 1)
                         for size, step, taps in zip(self.block, self.steps[1:], self.taps[1:], strict=True))
        return rows, columns


def as_volume(am: AffineMatmul) -> AffineMatmul | None:
    """The same with all digits of m (image, plane, row, column) and of k (plane, row, column, channel), if it is a convolution: digits of
    one element put back, taps of a row and channels parted where no bound did. Rows of two dimensions are planes of one row."""
    if not am.m.extents or not am.k.extents or len(am.n.extents) != 1:
        return None
    count, channels, parts = len(am.m.extents), am.a.row_strides[-1], am.k.extents[-1:]
    if am.a.k_strides[-1] == 1 and channels > 0 and am.k.extents[-1] > channels and am.k.extents[-1] % channels == 0:
        parts = (am.k.extents[-1] // channels, channels)
    dims = len(am.k.extents) + len(parts) - 2
    if not 1 <= dims <= 3 or count - dims not in (0, 1):
        return None

    def m(values: tuple[int, ...], one: int) -> tuple[int, ...]:
        values = (one,) * (dims + 1 - count) + values
        return (values[0], *(values[1:-1] if dims > 1 else (one,)), *((one,) if dims < 3 else ()), values[-1])

    def k(values: tuple[int, ...], one: int) -> tuple[int, ...]:
        values = (*values[:-1], *((values[-1] * channels, values[-1]) if len(parts) > 1 else values[-1:]))
        return (*(values[:-2] if dims > 1 else (one,)), *((one,) if dims < 3 else ()), *values[-2:])

    def whole(x: Source, row: bool) -> Source:
        bounds = tuple(replace(b, row_coefs=m(b.row_coefs, 0) if row else b.row_coefs, k_coefs=k(b.k_coefs, 0)) for b in x.bounds)
        return replace(x, row_strides=m(x.row_strides, 1) if row else x.row_strides, k_strides=k(x.k_strides, 1), bounds=bounds)

    targets = [replace(t, m_strides=m(t.m_strides, 0)) for t in (am.d, *am.operands)]
    taps = (*am.k.extents[:-1], *parts)
    terms = IndexSpace((*(taps[:-2] if dims > 1 else (1,)), *((1,) if dims < 3 else ()), *taps[-2:]))
    return replace(am, m=IndexSpace(m(am.m.extents, 1)), k=terms, a=whole(am.a, True), b=whole(am.b, False), d=targets[0],
                   operands=tuple(targets[1:]))


def plan_planes(x: Source, positions: tuple[int, ...], taps: tuple[int, ...]) -> Planes | str:
    """Planes of a unit-stride operand of positions (image, plane, row, column) and taps (plane, row, column, channel), or why there are
    none."""
    if x.k_strides[3] != 1 or x.align % 16:
        return "its channels are not contiguous or not aligned to 16 bytes"
    if prod(taps[:3]) == 1:
        return "a single tap: there is nothing to share"
    extents, first, steps, base, found = [], [], [], x.base, 0
    for i in range(3):
        digit, stride, length = i + 1, x.row_strides[i + 1], positions[i + 1]
        step = x.k_strides[i] // max(1, stride)
        lowest, span = min(0, step * (taps[i] - 1)), abs(step) * (taps[i] - 1)
        bound: Bound | None = next((b for b in x.bounds if b.row_coefs[digit]), None)
        if step == 0 or x.k_strides[i] != step * stride:
            return "a tap's stride does not fit its position's"
        if bound is None:
            bound = Bound((), (), -lowest, length + span)
        elif (bound.row_coefs != tuple(int(j == digit) for j in range(4))
              or bound.k_coefs != tuple(step * (j == i) for j in range(4))):
            return "its steps are not 1, or a bound ties more than one position to one tap"
        else:
            found += 1
        base -= bound.offset * stride
        extents.append(bound.extent)
        first.append(bound.offset + lowest)
        steps.append(step)
    if found != len(x.bounds):
        return "a bound is of no position"
    if abs(steps[0]) != 1:
        return "taps of neighbouring planes are not neighbours"
    build = _MapBuilder(x.dtype.num_bytes)
    build.add(taps[3], 1, 0, BoxSum())
    for extent, stride in ((extents[2], x.row_strides[3]), (extents[1], x.row_strides[2]), (extents[0], x.row_strides[1]),
                           (positions[0], x.row_strides[0])):
        build.add(extent, stride, 1, BoxSum())
    fault = build.fault(base)
    if fault or base < 0:
        return fault or "its first element lies before the operand's"
    planes = Planes(build.finish(x.dtype.name), base * x.dtype.num_bytes,
                    (positions[0], positions[1], positions[2], positions[3]), (taps[0], taps[1], taps[2]),
                    (BLOCK, BLOCK) if positions[2] * taps[1] > 1 else (1, PANEL),
                    (first[0], first[1], first[2]), (steps[0], steps[1], steps[2]))
    if max(planes.patch) > MAX_BOX or prod(planes.patch) > MAX_PIXELS:
        return f"a patch of {planes.patch[0]} x {planes.patch[1]} is too large"
    return planes


@dataclass(frozen=True, slots=True)
class _Plan:
    consts: PlanesConsts
    digits: tiling.Digits
    planes: Planes
    image: TensorMapSpec
    filter: TensorMapSpec
    filter_offset: int
    stored: TensorMapSpec

    @property
    def groups(self) -> int:
        """Of columns, one for each warpgroup."""
        return -(-prod(self.planes.blocks) // WARPGROUPS)

    def n_tiles(self, am: AffineMatmul) -> int:
        return -(-am.n.size // self.consts.tile_n)

    def segment_planes(self, segments: int) -> int:
        return -(-self.planes.positions[1] // segments)

    def tiles(self, segments: int) -> int:
        return self.groups * -(-self.planes.positions[1] // self.segment_planes(segments))

    def tile_step(self, am: AffineMatmul, segments: int, device: DeviceInfo) -> int:
        """CTAs that share the tiles of some columns of D."""
        return min(self.tiles(segments), max(1, device.num_sms // self.n_tiles(am)))


@lru_cache(maxsize=256)
def _plan(am: AffineMatmul, tile_n: int = 0) -> _Plan | str:
    """Planes for a tile of so many columns (0: the widest that there is), or why there are none."""
    if not tile_n:
        plans = [_plan(am, n) for n in TILES_N]
        return next((p for p in plans if isinstance(p, _Plan)), plans[0])
    volume = as_volume(am)
    if volume is None or am.batch.size != 1:
        return "it has groups, or is no convolution"
    merged = tiling.merged_digits(am)
    am = volume
    size, d, w = am.a.dtype.num_bytes, am.d, am.b
    planes = plan_planes(am.a, am.m.extents, am.k.extents)
    if isinstance(planes, str):
        return f"{am.a.name}: {planes}"
    *taps, channels = am.k.extents
    depth = taps[0]
    if depth * tile_n > MAX_COLUMNS:
        return f"{depth} planes of {tile_n} columns are more than {MAX_COLUMNS}"
    if (tile_n > 16 and tile_n >= 2 * am.n.size) or any(any(t.m_strides) for t in am.operands):
        return "half of a tile is empty, or an operand of the epilogue changes along m"
    span = next(s for s in (32, 64, 128) if s == 128 or channels * size <= s)
    chunks = -(-channels * size // span)
    if w.bounds or w.align % 16:
        return f"{w.name} is not aligned to 16 bytes"
    # The filter: (line, line of the other kind, plane, row, column of taps); what is walked backwards lies turned round.
    major = "k" if w.k_strides[3] == 1 else "row"
    if major == "row" and tile_n > PANEL:
        return f"of {w.name}, contiguous along its columns, {PANEL} lie in a line"
    if major == "row" and w.row_strides[0] != 1:
        return f"{w.name} is contiguous neither along its channels nor along its columns"
    build, base = _MapBuilder(size), w.base
    lines = ((channels, 1, span // size), (am.n.size, w.row_strides[0], tile_n))
    if major == "row":
        lines = ((am.n.size, 1, tile_n), (channels, w.k_strides[3], span // size))
    for extent, stride, box in lines:
        build.add(extent, stride, box, BoxSum())
    for i, (extent, stride) in enumerate(zip(taps, w.k_strides, strict=False)):
        base += min(0, stride * (extent - 1))
        build.add(extent, abs(stride), extent if i == 0 else 1, BoxSum())
    fault = build.fault(base)
    if fault:
        return f"{w.name}: {fault}"
    turned = [stride < 0 for stride in w.k_strides]
    span_b = span if major == "k" else tile_n * size
    filter_map = replace(build.finish(am.b.dtype.name), swizzle=span_b)

    def place(i: int, tap: int) -> int:
        """Steps from the lowest tap to the one that lies there in the filter."""
        tap = taps[i] - 1 - tap if turned[i] else tap
        return abs(planes.steps[i]) * (tap if planes.steps[i] > 0 else taps[i] - 1 - tap)

    patch_h, patch_w = planes.patch
    pixels = tuple(place(1, row) * patch_w + place(2, column) for row in range(taps[1]) for column in range(taps[2]))
    turns = tuple(place(0, plane) for plane in range(depth))
    build = _MapBuilder(d.dtype.num_bytes)
    build.add(am.n.size, 1, min(tile_n, PANEL), BoxSum())
    for extent, stride, box in zip(reversed(planes.positions), reversed(d.m_strides), (*reversed(planes.block), 1, 1), strict=True):
        build.add(extent, stride, box, BoxSum())
    fault = build.fault(d.base)
    if fault or d.dtype.num_bytes != 2 or not d.dtype.is_float or d.n_strides not in ((1,), (0,)) or am.n.size * 2 % 16 or d.align % 16:
        return "D is not of 16 bits, channels last, all strides multiples of 16 bytes"
    stored = replace(build.finish(d.dtype.name), swizzle=SPAN_BYTES)
    epilogue = plan_epilogue(merged, am, tiling.needs_wide(merged), False, MAX_REGISTERS[WARPGROUPS] - depth * tile_n // 2)
    if epilogue_lines(am) * tile_n // 2 > MAX_LINES:
        return "its epilogue is too long to apply to all accumulators of a thread"
    ring = RingConsts(0, 0, 0, WARPGROUPS)
    consts = PlanesConsts(ring, am.a.dtype.name, tile_n, span, chunks, channels, planes.block, patch_h, patch_w, pixels,
                          taps[2], turns, major, WARPGROUPS, 0, 0, epilogue)
    if len(consts.products) > MAX_PRODUCTS:
        return f"{len(consts.products)} products a plane are too many to unroll"
    stage_bytes = WARPGROUPS * chunks * consts.patch_bytes
    staging_bytes = WARPGROUPS * consts.slots * PANEL_BYTES
    fixed = consts.filter_bytes + staging_bytes + BARRIER_BYTES * (2 * MAX_STAGES + 1) + 2048  # the filter and panels begin at 1024
    stages = min(MAX_STAGES, (SMEM_BYTES - fixed) // stage_bytes)
    if stages < 2:
        return f"a filter of {consts.filter_bytes} bytes leaves too little shared memory"
    filter_at = _aligned(stages * stage_bytes, 1024)
    staging_at = _aligned(filter_at + consts.filter_bytes, 1024)
    ring = replace(ring, stages=stages, stage_bytes=stage_bytes, barriers_at=staging_at + staging_bytes)
    consts = replace(consts, ring=ring, filter_at=filter_at, staging_at=staging_at)
    image = replace(planes.map, box=(span // size, patch_w, patch_h, 1, 1), swizzle=span)
    return _Plan(consts, merged, planes, image, filter_map, base * size, stored)


class PlanesSm90Matmul:
    """16-bit convolutions, forward and the image's gradient, of unit strides and filters that fit shared memory."""

    name = "planes_sm90"
    is_deterministic = True

    def check(self, am: AffineMatmul | MatmulGroup, device: DeviceInfo) -> Support:
        """sm_90a; f16 or bf16, channels last; unit strides and several taps (see _plan)."""
        return _check(self.name, _plan, am, device)

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Columns of a tile, and segments of the depth while there are fewer tiles than SMs; the fastest by estimate first."""
        if tiling.empty_build(am) is not None:
            return (EngineConfig(),)
        return tuple(sorted(self._candidates(am, device), key=lambda c: self.estimate(am, c, device)))

    def _candidates(self, am: AffineMatmul, device: DeviceInfo) -> Iterator[EngineConfig]:
        for tile_n in TILES_N:
            plan = _plan(am, tile_n)
            if isinstance(plan, str):
                continue
            seen = set()
            for segments in SEGMENTS:
                planes = plan.segment_planes(segments)
                if segments > 1 and (planes in seen or planes < plan.consts.depth
                                     or plan.tiles(segments // 2) * plan.n_tiles(am) >= 8 * device.num_sms):
                    continue
                seen.add(planes)
                yield EngineConfig.of(tile_n=tile_n, segments=segments)

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        """Rounds of tiles over the SMs at the time their products take, over the traffic; the filter comes first. Off by 5 % from what 121
        configs of 42 layers took on an H200 (2026-11-28)."""
        if tiling.empty_build(am) is not None:
            return 0.0
        plan = _plan(am, config["tile_n"])
        assert not isinstance(plan, str), plan
        c, segments = plan.consts, config["segments"]
        step = plan.tile_step(am, segments, device)
        steps = plan.segment_planes(segments) + c.depth - 1
        if device.is_emulated:
            return 1000.0 * plan.tiles(segments) * plan.n_tiles(am) * steps
        # A product of 64 x columns takes as many clocks as half its columns, or as its operands' way from shared memory.
        clocks = len(c.products) * max(c.columns / 2, (14 if c.columns > 32 else 18) + c.columns / 4) + len(c.products)
        # A line that ends within the box takes 7.
        lines = c.warpgroups * c.patch_h * c.patch_w * (c.channels * 2 // c.span * c.span / 62 + 7 * (c.channels * 2 % c.span > 0))
        plane = max(c.warpgroups * clocks, clocks + 330 + 8.5 * c.tile_n, lines)
        rounds = -(-plan.tiles(segments) // step) * -(-plan.n_tiles(am) // max(1, device.num_sms // step))
        compute_us = (rounds * (steps * plane + 200) + 1500 + c.filter_bytes / 40) / 1660
        num_bytes = 2 * (tiling.source_elements(am.a, am.m, am.k, am.batch) + am.m.size * am.n.size)
        memory_us = num_bytes / (device.bandwidth_gbs * 0.95e3)
        return max(compute_us, memory_us) + 0.1 * min(compute_us, memory_us) + 5

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        """Persistent CTAs, each with the filter of some columns of D."""
        empty = tiling.empty_build(am)
        if empty is not None:
            return empty
        plan = _plan(am, config["tile_n"])
        assert not isinstance(plan, str), plan
        c, planes, segments = plan.consts, plan.planes, config["segments"]
        step = plan.tile_step(am, segments, device)
        t = tiling.Arguments(c.epilogue.wide)
        t.add("num_tiles", "u32", plan.tiles(segments))
        t.add("tile_step", "u32", step)
        t.divisor("tile_step", step)
        t.add("groups", "u32", plan.groups)
        t.divisor("groups", plan.groups)
        t.space("block", planes.blocks)
        t.add("planes", "u32", planes.positions[1])
        t.add("segment_planes", "u32", plan.segment_planes(segments))
        t.add("image_planes", "u32", planes.map.dims[3])
        for name, value in zip(("plane", "row", "column"), planes.first, strict=True):
            t.add(f"first_{name}", "s32", value)
        tiling._target_arguments(t, am, plan.digits, c.epilogue)
        maps = [Arg("map_a", "tensor_map", TensorMapArg(am.a.name, plan.image, planes.byte_offset)),
                Arg("map_b", "tensor_map", TensorMapArg(am.b.name, plan.filter, plan.filter_offset)),
                Arg("map_d", "tensor_map", TensorMapArg(am.d.name, plan.stored, am.d.base * am.d.dtype.num_bytes))]
        smem = c.ring.barriers_at + BARRIER_BYTES * (2 * c.ring.stages + 1)
        return Build((Step.of("matmul/planes_sm90", op, PtxTarget.for_arch(device.arch, (8, 0)), 128 * (1 + c.warpgroups), maps + t.args, c,
                              step * plan.n_tiles(am), dynamic_smem=smem, suffix=f"{c.kind}_{c.depth}x{len(c.taps)}x{c.tile_n}"),))


PLANES_SM90 = PlanesSm90Matmul()
