"""The Hopper main loop: wgmma on operands that tensor copies (TMA) bring, one persistent warp-specialised CTA per SM; sm_90a."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ..codegen.spec import Target as PtxTarget
from ..codegen.spec import TensorMapSpec
from ..device import DeviceInfo
from . import affine_tiling as tiling
from .affine import AffineMatmul
from .affine_tma import CHUNK_ROWS, SPAN_BYTES, Boxes, BoxesConsts, Walk, plan_boxes, walk_linear, walk_taps
from .base import Arg, Build, EngineConfig, Step, Support, TensorMapArg, refuse

# (tile_m, tile_n); a warpgroup takes half of the rows.
TILES = ((128, 256), (256, 128), (128, 192), (128, 128), (256, 64), (128, 64))
CONSUMERS = 2
THREADS = 128 * (1 + CONSUMERS)
RING_BYTES = 196608  # four stages of the largest tiles
MAX_STAGES = 8
PANEL = 64  # rows and columns of D staged at a time by a warpgroup
MAX_DIRECT_LINES = 2000  # of an epilogue applied to all accumulators of a thread; longer ones loop over staged panels
PANEL_PITCH = 68  # f32 elements of a row of a general panel
BARRIER_BYTES = 8


@dataclass(frozen=True, slots=True)
class RingConsts:
    """Consts of skeleton/warp_specialized: bytes of a stage, where the barriers lie, and warpgroups that use stages up."""

    stages: int
    stage_bytes: int
    barriers_at: int
    consumers: int


@dataclass(frozen=True, slots=True)
class WgmmaConsts:
    """Consts of matmul/wgmma_sm90. kind: operand type of wgmma; is_direct: D is stored by tensor copies of rounded panels."""

    ring: RingConsts
    kind: str
    tile_m: int
    tile_n: int
    tile_k: int
    walk_digits: int
    batch_digits: int
    a: BoxesConsts
    b: BoxesConsts
    epilogue: tiling.EpilogueConsts
    is_direct: bool
    stored_batch_digits: tuple[int, ...]  # of D's map
    staging_at: int
    staging_bytes: int  # per warpgroup
    has_slices: bool
    is_split: bool
    has_n_tiles: bool

    @property
    def blocks_m(self) -> int:
        """Blocks of 64 rows a warpgroup multiplies."""
        return self.tile_m // (64 * CONSUMERS)

    @property
    def staging_panels(self) -> int:
        """Panels staged in turn, so that one is stored while the next is rounded; tiles hold a multiple of them."""
        return direct_panels(self.tile_m, self.tile_n)

    @property
    def transposes(self) -> str:
        return "" if self.kind == "tf32" else f"{int(self.a.major == 'row')}, {int(self.b.major == 'row')}"

    def acc(self, block: int) -> list[str]:
        count = self.tile_n // 2
        return [f"%acc{block * count + i}" for i in range(count)]

    @staticmethod
    def fixed_bits(x: BoxesConsts) -> str:
        """A descriptor but for its address: 128-byte swizzle, 1024 bytes between groups of 8 lines, chunk_bytes between chunks of rows."""
        leading = 1 if x.major == "k" else x.chunk_bytes >> 4
        return f"0x{1 << 62 | 1024 >> 4 << 32 | leading << 16:016X}"

    @staticmethod
    def step_units(x: BoxesConsts) -> int:
        """Descriptor units (16 bytes) from one k step of 32 bytes to the next: along the span, or 16 lines of 128 bytes on."""
        return 32 >> 4 if x.major == "k" else 16 * SPAN_BYTES >> 4


@dataclass(frozen=True, slots=True)
class _Plan:
    consts: WgmmaConsts
    d: tiling.Digits
    grid: tiling.Grid
    walk: Walk
    boxes: tuple[Boxes, Boxes]
    stored: TensorMapSpec | None


def plan_operands(d: tiling.Digits, tile: tuple[int, int, int]) -> tuple[Walk, Boxes, Boxes] | str:
    """A walk of k under which tensor maps can fetch both operands, or why there is none."""
    reason = ""
    for walk in dict.fromkeys((walk_taps(d.k, tile[2]), walk_linear(d.k, tile[2]))):
        a, b = plan_boxes(d.a, d, walk, tile[0]), plan_boxes(d.b, d, walk, tile[1])
        if isinstance(a, Boxes) and isinstance(b, Boxes):
            return walk, a, b
        reason = reason or next(x for x in (a, b) if isinstance(x, str))
    return reason


def stored_map(am: AffineMatmul, d: tiling.Digits) -> tuple[TensorMapSpec, tuple[int, ...]] | None:
    """The map that stores panels of D and the batch digits it has, if D is a 16-bit matrix along n and the operands only change along n."""
    out = d.targets[0]
    size = out.dtype.num_bytes
    if size != 2 or len(d.out_m) > 1 or len(d.out_n) > 1 or out.n_strides[0] not in ((1,) if am.n.size > 1 else (0, 1)):
        return None
    if any(any(t.m_strides) for t in d.targets[1:]):
        return None
    # A store clips rows exactly but columns to 16 bytes.
    if am.n.size * size % 16 or out.base * size % 16 or out.align % 16:
        return None
    digits = tuple(i for i, (e, s) in enumerate(zip(d.batch, out.batch_strides, strict=True)) if e > 1 and s)
    dims = (am.n.size, am.m.size, *(d.batch[i] for i in digits))
    strides = tuple(s * size for s in (out.m_strides[0] if am.m.size > 1 else am.n.size, *(out.batch_strides[i] for i in digits)))
    if len(dims) > 5 or any(s <= 0 or s % 16 for s in strides):
        return None
    return TensorMapSpec(out.dtype.name, dims, strides, (PANEL, PANEL, *(1 for _ in digits)), swizzle=SPAN_BYTES), digits


def plan_epilogue(d: tiling.Digits, am: AffineMatmul, wide: bool, is_split: bool, accumulators: int) -> tiling.EpilogueConsts:
    """The epilogue of a panel by one warpgroup: in short vectors, where the tile's other accumulators leave few registers."""
    epilogue = tiling.plan_epilogue(d, am, PANEL, PANEL, 128, wide, is_split)
    vec = min(epilogue.vec, 4 if len(am.operands) < 2 else 2) if accumulators > 64 else epilogue.vec
    targets = epilogue.targets if is_split else tuple(tiling._target_consts(i, t, d, epilogue.inner, vec) for i, t in enumerate(d.targets))
    inner_threads = PANEL // vec
    return replace(epilogue, pitch=PANEL_PITCH, vec=vec, inner_threads=inner_threads, outer_step=128 // inner_threads, unroll=1,
                   targets=targets)


@lru_cache(maxsize=256)
def epilogue_lines(am: AffineMatmul) -> int:
    """Lines of PTX that the epilogue of one element takes."""
    if am.epilogue is None:
        return 0
    inputs = {name: f"%{name}" for name in ("acc", *am.epilogue.args, *am.epilogue.scalars)}
    return am.epilogue.lower(inputs, ["%acc"], "f32").count("\n") + 1


def direct_panels(tile_m: int, tile_n: int) -> int:
    panels = tile_m * tile_n // (CONSUMERS * PANEL * PANEL)
    return min(panels, 2 if panels % 2 == 0 else 3)


def stages_of(tile_m: int, tile_n: int) -> int:
    return min(MAX_STAGES, RING_BYTES // ((tile_m + tile_n) * SPAN_BYTES))


def plan_grid(am: AffineMatmul, tile: tuple[int, int, int], split_k: int, inner: str, k_tiles: int) -> tiling.Grid:
    grid = tiling.plan_grid(am, tile, 1, inner)
    per_split = -(-k_tiles // min(split_k, k_tiles))
    return replace(grid, k_tiles=k_tiles, k_tiles_per_split=per_split, splits=-(-k_tiles // per_split))


@lru_cache(maxsize=256)
def _plan(am: AffineMatmul, config: EngineConfig) -> _Plan | str:
    d = tiling.merged_digits(am)
    size = am.a.dtype.num_bytes
    tile_m, tile_n, tile_k = tile = config["tile_m"], config["tile_n"], SPAN_BYTES // size
    operands = plan_operands(d, tile)
    if isinstance(operands, str):
        return operands
    walk, a, b = operands
    inner = tiling.inner_direction(d)
    grid = plan_grid(am, tile, config["split_k"], inner, walk.k_tiles)
    is_split = grid.splits > 1
    wide = tiling.needs_wide(d) or grid.partial_elements > tiling.INT32_MAX
    epilogue = plan_epilogue(d, am, wide, is_split, tile_m * tile_n // (CONSUMERS * 128))
    stored = None if is_split or epilogue_lines(am) * (tile_m * tile_n // (CONSUMERS * 128)) > MAX_DIRECT_LINES else stored_map(am, d)
    stage_bytes = (tile_m + tile_n) * SPAN_BYTES
    staging_bytes = direct_panels(tile_m, tile_n) * PANEL * PANEL * 2 if stored else epilogue.smem_bytes
    stages = config["stages"]
    staging_at = stages * stage_bytes
    ring = RingConsts(stages, stage_bytes, staging_at + CONSUMERS * staging_bytes, CONSUMERS)
    consts = WgmmaConsts(ring, "tf32" if size == 4 else am.a.dtype.name, tile_m, tile_n, tile_k, len(walk.extents), len(d.batch),
                         a.consts("a", tile_m, 0), b.consts("b", tile_n, tile_m * SPAN_BYTES), epilogue, stored is not None,
                         stored[1] if stored else (), staging_at, staging_bytes, grid.slices > 1, is_split, grid.n_tiles > 1)
    return _Plan(consts, d, grid, walk, (a, b), stored[0] if stored else None)


def _arguments(am: AffineMatmul, plan: _Plan, num_ctas: int, workspace_offset: int) -> list[Arg]:
    consts, grid = plan.consts, plan.grid
    t = tiling.Arguments(consts.epilogue.wide)
    for boxes, source, loader in zip(plan.boxes, (am.a, am.b), (consts.a, consts.b), strict=True):
        t.add(loader.map, "tensor_map", TensorMapArg(source.name, boxes.map, boxes.byte_offset))
    if plan.stored is not None:
        t.add("map_d", "tensor_map", TensorMapArg(am.d.name, plan.stored, am.d.base * am.d.dtype.num_bytes))
    t.add("num_tiles", "u32", grid.ctas)
    t.add("num_ctas", "u32", num_ctas)
    if grid.n_tiles > 1:
        t.add("group_m", "u32", grid.group_m)
        t.add("group_tail", "u32", grid.group_tail)
        t.add("last_group", "u32", grid.last_group)
        t.add("group_tiles", "u32", grid.group_m * grid.n_tiles)
        for stem, value in (("group_tiles", grid.group_m * grid.n_tiles), ("group_m", grid.group_m), ("group_tail", grid.group_tail)):
            t.divisor(stem, value)
    if grid.slices > 1:
        t.add("tiles", "u32", grid.m_tiles * grid.n_tiles)
        t.divisor("tiles", grid.m_tiles * grid.n_tiles)
    if grid.splits > 1:
        t.add("batch_size", "u32", am.batch.size)
        t.divisor("batch_size", am.batch.size)
    t.add("k_tiles", "u32", grid.k_tiles)
    t.add("k_tiles_per_split", "u32", grid.k_tiles_per_split)
    t.space("walk", plan.walk.extents)
    for i, step in enumerate(tiling.mixed_radix(consts.tile_k, plan.walk.extents)):
        t.add(f"walk_inc{i}", "u32", step)
    t.space("batch", plan.d.batch)
    for boxes, loader in zip(plan.boxes, (consts.a, consts.b), strict=True):
        t.space(f"{loader.name}_row", boxes.rows)
        if loader.chunks > 1:
            rows = am.m.size if loader.name == "a" else am.n.size
            t.add(f"{loader.name}_row_last", "u32", (rows - 1) // CHUNK_ROWS * CHUNK_ROWS)
        for shapes, sums in ((loader.coordinates, boxes.coordinates), (loader.offsets, boxes.offsets)):
            for shape, total in zip(shapes, sums, strict=True):
                t.add(f"{shape.stem}_base", "s32", total.base)
                for digit, coefficient in total.terms:
                    if coefficient != 1:
                        t.add(f"{shape.stem}_{digit}", "s32", coefficient)
    if grid.splits > 1:
        tiling._partial_arguments(t, grid, am, consts.epilogue, workspace_offset)
    else:
        tiling._target_arguments(t, am, plan.d, consts.epilogue)
    return t.args


class WgmmaSm90Matmul:
    """f16 and bf16 matmuls, and f32 ones that may round their operands to tf32, on Hopper's asynchronous tensor cores."""

    name = "wgmma_sm90"
    is_deterministic = True

    def check(self, am: AffineMatmul, device: DeviceInfo) -> Support:
        """sm_90a; operand pairs as of mma_sm80; operands that tensor maps can fetch (affine_tma.plan_boxes); D of any float type."""
        if device.arch != "sm_90a":
            return refuse(f"wgmma_sm90 needs sm_90a, the device is {device.arch}")
        kinds = {am.a.dtype.name, am.b.dtype.name}
        if len(kinds) != 1 or not kinds <= {"f16", "bf16", "f32"} or am.acc.name != "f32":
            return refuse(f"wgmma_sm90 multiplies f16, bf16 or f32 pairs in f32, not {am.a.dtype} x {am.b.dtype} in {am.acc}")
        if kinds == {"f32"} and am.math not in ("tf32", "fast"):
            return refuse(f'wgmma_sm90 rounds f32 to tf32, which math="{am.math}" does not allow (math="tf32" or "fast" does)')
        if am.k.size == 0:
            return refuse("wgmma_sm90 needs a sum of at least one term")
        common = tiling.check_common(am, device)
        if not common or tiling.empty_build(am) is not None:
            return common
        plan = _plan(am, EngineConfig.of(tile_m=128, tile_n=64, stages=4, split_k=1))
        return refuse(f"wgmma_sm90: {plan}") if isinstance(plan, str) else common

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Legal configs, the fastest by estimate first."""
        return _sorted_configs(am, device)

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        """Rounds of tiles over the SMs at the rate measured for the tile's shape, plus an epilogue each that the next loads overlap."""
        plan = _plan(am, config)
        if isinstance(plan, str):
            return float("inf")
        grid, c = plan.grid, plan.consts
        rounds = -(-grid.ctas // device.num_sms)
        # wgmma multiplies 4096 flop per clock and SM in 16-bit types; half of that in tf32.
        area = c.tile_m * c.tile_n
        clocks_per_k_tile = max(area * 2 * 64 / 4096 * (1.0 if c.tile_n > 64 else 1.1), (c.tile_m + c.tile_n) * SPAN_BYTES / 52)
        epilogue_clocks = 900 + area / (18 if c.is_direct else 9)
        clock_mhz = 1550.0
        compute_us = rounds * (grid.k_tiles_per_split * clocks_per_k_tile + epilogue_clocks) / clock_mhz
        out_bytes = am.batch.size * am.m.size * am.n.size * am.d.dtype.num_bytes * (1 + len(am.operands) * 0.5)
        unique = am.a.dtype.num_bytes * (tiling.source_elements(am.a, am.m, am.k, am.batch) +
                                         tiling.source_elements(am.b, am.n, am.k, am.batch))
        partial_bytes = 2.0 * grid.partial_elements * am.acc.num_bytes
        memory_us = (unique + out_bytes) / (device.bandwidth_gbs * 1e3)
        total = max(compute_us, memory_us) + 3.0
        if grid.splits > 1:
            total += 2.5 + partial_bytes / (device.bandwidth_gbs * 1.5e3)
        if device.is_emulated:  # there a warpgroup's multiplication has no speed of its own: a tile costs what its threads cost
            return 1000.0 * (grid.ctas * (grid.k_tiles_per_split + 20.0))
        return total

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        """The kernel and, where k is split, the sum of the parts. workspace_bytes counts from 0, workspace_offset included."""
        empty = tiling.empty_build(am)
        if empty is not None:
            return empty
        plan = _plan(am, config)
        assert not isinstance(plan, str), plan
        c, grid = plan.consts, plan.grid
        target = PtxTarget.for_arch(device.arch, (8, 0))
        num_ctas = min(grid.ctas, device.num_sms)
        smem = c.ring.barriers_at + 2 * BARRIER_BYTES * c.ring.stages
        step = Step.of("matmul/wgmma_sm90", op, target, THREADS, _arguments(am, plan, num_ctas, workspace_offset), c, num_ctas,
                       dynamic_smem=smem, suffix=f"{c.kind}_{c.tile_m}x{c.tile_n}x{c.tile_k}")
        if grid.splits == 1:
            return Build((step,))
        reduce = tiling.reduce_step(op, am, plan.d, grid, c.epilogue, target, c.epilogue.wide, workspace_offset)
        return Build((step, reduce), workspace_offset + grid.partial_elements * am.acc.num_bytes)


WGMMA_SM90 = WgmmaSm90Matmul()


@lru_cache(maxsize=256)
def _sorted_configs(am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return tuple(sorted(_candidates(am, device), key=lambda c: WGMMA_SM90.estimate(am, c, device)))


def _candidates(am: AffineMatmul, device: DeviceInfo) -> Iterator[EngineConfig]:
    for tile_m, tile_n in TILES:
        if (tile_m > 128 and tile_m >= 2 * am.m.size) or (tile_n > 64 and tile_n >= 2 * am.n.size):
            continue  # more than half of the tile would be empty
        config = EngineConfig.of(tile_m=tile_m, tile_n=tile_n, stages=stages_of(tile_m, tile_n), split_k=1)
        plan = _plan(am, config)
        if isinstance(plan, str):
            continue
        splits = {1}
        for waves in (1, 2, 3):
            split = min(waves * device.num_sms // plan.grid.ctas, plan.grid.k_tiles // 4)
            if split > 1:
                grid = plan_grid(am, (tile_m, tile_n, plan.consts.tile_k), split, "n", plan.grid.k_tiles)
                if grid.partial_elements < 2**31:
                    splits.add(grid.splits)
        for split_k in sorted(splits):
            yield EngineConfig.of(tile_m=tile_m, tile_n=tile_n, stages=stages_of(tile_m, tile_n), split_k=split_k)
