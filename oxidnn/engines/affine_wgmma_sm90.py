"""The Hopper main loop: wgmma on operands that tensor copies (TMA) bring, one persistent warp-specialised CTA per SM; sm_90a."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod
from typing import Any

from ..codegen.spec import Target as PtxTarget
from ..codegen.spec import TensorMapSpec
from ..device import DeviceInfo
from ..dtypes import F64
from . import affine_tiling as tiling
from .affine import AffineMatmul, IndexSpace, MatmulGroup
from .affine_group import beyond, joint_boxes, joint_digits, members_of, with_products
from .affine_tma import (
    BLOCK,
    CHUNK_ROWS,
    SPAN_BYTES,
    Boxes,
    BoxesConsts,
    Halo,
    HaloConsts,
    Walk,
    plan_boxes,
    plan_halo,
    walk_linear,
    walk_taps,
)
from .base import Arg, Build, EngineConfig, Step, Support, TensorArg, TensorMapArg, WorkspaceArg, refuse

# (tile_m, tile_n). Cooperating warpgroups share the rows (three take 192, of which often just enough tiles for all SMs fit a matrix that
# makes too many of 128), in ping-pong each takes a tile.
TILES = {"coop": ((128, 256), (256, 128), (192, 256), (128, 192), (192, 192), (192, 128), (128, 128), (256, 64), (128, 64)),
         "pingpong": ((128, 128), (64, 256), (64, 192), (64, 128), (64, 64))}
SMALL_TILES = ((64, 192), (64, 128), (64, 64))  # for matrices that make few tiles: one warpgroup multiplies, and there may be no next tile
HALO_TILES = {"coop": ((128, 256), (256, 128), (256, 64)), "pingpong": ((128, 128), (256, 64))}
HALO_SLOTS = 2
SMEM_BYTES = 232448  # of a CTA, all in all
MAX_STAGES = 8
MAX_PREFETCHED_TILES = 264  # two rounds of the largest devices
MAX_SKIPPED_PANEL_BYTES = 3 << 19
MIN_PREFETCHED_BYTES = 16 << 20
MAX_REPEATED_BYTES = 16 << 20
MIN_STREAMED_BYTES = 8 << 20
MAX_KEPT_BYTES = 100 << 10  # of B: 147 KB leave three stages, which lost what was won
MIN_KEPT_STAGES = 5
MAX_WRITTEN_BYTES = 24 << 20  # beside windows that leave L2 first: more displaces dirty lines anyway
# Rows of tiles in a group of the raster. The tiles of a round of 132 SMs are then 11 x 12: of 2, 4, 6, 8, 11, 12 and 16 rows the best or
# within 2 % of it wherever measured (H200, 4096 to 8192, all tiles, bf16 and e4m3; others cost up to 8 %).
GROUP_M = 11
PANEL = 64  # rows and columns of D staged at a time by a warpgroup; direct panels of 32 bits have 32 columns
MAX_DIRECT_LINES = 2000  # of an epilogue applied to all accumulators of a thread; longer ones loop over staged panels
PANEL_PITCH = 68  # f32 elements of a row of a general panel
MERGED_REGISTERS = {1: 255, 2: 255, 3: 168}  # where they fill the ring too
MAX_REGISTERS = {2: 168, 3: 128}  # of a thread, by multiplying warpgroups
BARRIER_BYTES = 8
MAX_PARAM_BYTES = 4096
MAX_EARLY = 16  # elements of the epilogue's operands that a thread holds while a tile is multiplied
LOADING_REGISTERS = 40  # beside accumulators, for operands of an epilogue that are loaded ahead
MOMENT_CLOCKS = 250  # of a panel
MOMENT_REGISTERS = 40  # beside accumulators, for moments of a panel
PROMOTING_REGISTERS = 40  # beside accumulators and the sums of a k tile
FP8 = ("e4m3", "e5m2")
INTEGERS = ("s8", "u8")
MAX_PARTS = 3  # of a tile, about, where k tiles are dealt out: one CTA adds them all
MAX_PART_TILES = 512  # of k: in longer runs power is the bound, and an SM without a tile costs nothing
MAX_MEMBERS = 8  # of a group; a number of a member is one of as many instructions


@dataclass(frozen=True, slots=True)
class RingConsts:
    """Consts of skeleton/warp_specialized: bytes of a stage, where the barriers lie, and warpgroups of a CTA that use a stage up.

    ctas: of a cluster, which send parts of their stages to each other and so must all have used a stage up.
    """

    stages: int
    stage_bytes: int
    barriers_at: int
    consumers: int
    ctas: int = 1
    is_merged: bool = False  # a thread that uses stages up fills them too
    copied_bytes: int = 0  # of a stage, if less than all: rows that no operand has are not brought


@dataclass(frozen=True, slots=True)
class ScaleConsts:
    """A block scale: factors of the sums of a k tile, of a thread's rows of A ("scale_a"), or of the columns of a tile ("scale_b")."""

    name: str
    row_digits: int

    def count(self, c: WgmmaConsts) -> int:
        """Factors of a thread: of two rows, or one."""
        return 2 if self.name == "scale_a" else 1


@dataclass(frozen=True, slots=True)
class WgmmaConsts:
    """Consts of matmul/wgmma_sm90. kind: operand type of wgmma (A's); is_direct: D is stored by tensor copies of rounded panels.

    A direct panel has 64 rows of 128 bytes, of 8-bit types 64, swizzled.
    """

    ring: RingConsts
    kind: str
    kind_b: str  # B's, where it is another
    product: str  # PTX type of the sums in the tensor cores
    promotes: bool  # sums of a k tile are added up outside the tensor cores, in f32
    tile_m: int
    tile_n: int
    tile_k: int
    walk_digits: int
    walks_taps: bool  # k tiles go through taps first and then through channels, in digits (channels / tile_k, taps...)
    batch_digits: int
    a: BoxesConsts
    b: BoxesConsts
    epilogue: tiling.EpilogueConsts
    warpgroups: int  # that multiply
    is_ping_pong: bool
    is_direct: bool
    stores_positions: bool  # D's map steps through several digits of m
    stored_batch_digits: tuple[int, ...]  # of D's map
    staging_at: int
    staging_bytes: int  # per warpgroup
    has_slices: bool
    is_split: bool
    has_n_tiles: bool
    members: int  # matmuls of the launch
    prefetches: bool  # boxes start on their way to L2 a round of the ring before they are loaded
    streamed: tuple[str, ...]  # operands whose lines leave L2 first
    scales: tuple[ScaleConsts, ...]
    halo: HaloConsts | None  # A comes in patches, a slot for all taps of 64 channels; stages hold B alone
    defers: bool  # a tile is rounded and stays in registers; its panels are stored while the next is multiplied
    lead: int  # k tiles that the first of two cooperating warpgroups multiplies before the second begins; 0: they begin together
    streams: int  # CTAs that the k tiles of all tiles are dealt out to; 0: tiles are
    # (name, type) of parameters that differ between members: those that find a tile, fetch operands, and write D.
    tile_params: tuple[tuple[str, str], ...] = ()
    load_params: tuple[tuple[str, str], ...] = ()
    target_params: tuple[tuple[str, str], ...] = ()
    ragged: tiling.RaggedConsts | None = None
    absent: tuple[tuple[int, int], ...] = ()  # (offset, bytes) of a stage's lines that no box brings
    kept: int = 0  # tiles of k of B, all there are, that stay in shared memory: a CTA's tiles are all of one column; stages hold A alone
    own_k: int = 0  # k's of the first k tile that the second does not repeat; 0: none are repeated, the last tile ends beyond k
    skips: bool = False  # of groups' last tiles, warpgroups whose rows all lie beyond the group multiply nothing

    @property
    def steps(self) -> list[tuple[int, bool]]:
        """k steps of 32 bytes in the order of their products, and whether the first k tile's sums begin anew there: sums of repeated k's
        come first and are dropped."""
        size = 4 if self.kind == "tf32" else 2 if self.kind in ("f16", "bf16") else 1
        own = self.own_k * size // 32
        return [(step, step in (3, own - 1)) for step in (3, 2, 1, 0)] if own else [(step, step == 0) for step in range(4)]

    @property
    def table_at(self) -> int:
        """Of the groups: behind the barriers."""
        return self.ring.barriers_at + 2 * BARRIER_BYTES * self.ring.stages

    @property
    def blocks_m(self) -> int:
        """Blocks of 64 rows a warpgroup multiplies."""
        return self.tile_m // (64 * self.ring.consumers)

    @property
    def panel_columns(self) -> int:
        """Columns of sums that make a panel: with a gate, a direct one of 64 columns of D is made of 128."""
        return 2 * PANEL if self.is_direct and self.epilogue.is_gated else PANEL

    @staticmethod
    def gates(acc: Sequence[str]) -> list[str]:
        """Of sums in turn, those of 8 columns of a gate and of the 8 that it gates, the former; apply_gate puts D's values there."""
        return [name for i, name in enumerate(acc) if i % 8 < 4]

    @property
    def staging_panels(self) -> int:
        """Panels staged in turn, so that one is stored while the next is rounded; tiles hold a multiple of them."""
        return direct_panels(self.tile_m, self.tile_n * PANEL // self.panel_columns, self.ring.consumers, self.kept > 0)

    @property
    def pending_panels(self) -> int:
        """Panels of a tile of a warpgroup whose stores are put off."""
        return self.blocks_m * self.tile_n // 64

    @property
    def loads_early(self) -> bool:
        """Operands of the epilogue, which change along n only, are loaded when a tile begins: two columns of a panel by each lane."""
        operands = self.epilogue.targets[1:]
        columns = sum(t.access != "broadcast" for t in operands)
        return self.is_direct and bool(operands) and columns * self.tile_n // 32 <= MAX_EARLY

    @property
    def finishes(self) -> bool:
        """Whether sums are anything but stored: integers are added, they become floats, an expression is applied."""
        e = self.epilogue
        return e.expression is not None or bool(e.addend) or e.acc != e.compute

    def packed(self, panel: int) -> list[str]:
        return [f"%packed{16 * panel + i}" for i in range(16)]

    @property
    def transposes(self) -> str:
        return f"{int(self.a.major == 'row')}, {int(self.b.major == 'row')}" if self.kind in ("f16", "bf16") else ""

    def acc(self, block: int) -> list[str]:
        count = self.tile_n // 2
        return [f"%acc{block * count + i}" for i in range(count)]

    @property
    def products(self) -> list[str]:
        return [f"%product{i}" for i in range(self.tile_n // 2)]

    def fixed_bits(self, x: BoxesConsts) -> str:
        """A descriptor but for its address: 128-byte swizzle, 1024 bytes (a row of a patch) between groups of 8 lines, chunk_bytes
        between chunks of rows."""
        leading = 1 if x.major == "k" else x.chunk_bytes >> 4
        group_bytes = self.halo.patch_w * SPAN_BYTES if self.halo is not None and x.name == "a" else 1024
        return f"0x{1 << 62 | group_bytes >> 4 << 32 | leading << 16:016X}"

    @staticmethod
    def step_units(x: BoxesConsts) -> int:
        """Descriptor units (16 bytes) from one k step of 32 bytes to the next: along the span, or 16 lines of 128 bytes on."""
        return 32 >> 4 if x.major == "k" else 16 * SPAN_BYTES >> 4


@dataclass(frozen=True, slots=True)
class _Member:
    """A matmul of the launch. first_tile: number of the tiles of the members before."""

    am: AffineMatmul
    d: tiling.Digits
    grid: tiling.Grid
    first_tile: int
    walk: Walk
    boxes: tuple[Boxes | Halo, Boxes]
    stored: StoredMap | None


@dataclass(frozen=True, slots=True)
class _Plan:
    consts: WgmmaConsts
    members: tuple[_Member, ...]

    @property
    def num_tiles(self) -> int:
        """Tiles, or pairs of them that share an operand; of k tiles dealt out, two parts a CTA."""
        return 2 * self.consts.streams or self.members[-1].first_tile + self.members[-1].grid.ctas


def plan_operands(d: tiling.Digits, tile: tuple[int, int, int]) -> tuple[Walk, Boxes, Boxes] | str:
    """The shortest walk of k under which tensor maps can fetch both operands, tile[0] rows of A and tile[1] of B, or why there is none."""
    reasons: list[str] = []
    for walk in sorted(dict.fromkeys((walk_taps(d.k, tile[2]), walk_linear(d.k, tile[2]))), key=lambda walk: walk.k_tiles):
        a, b = plan_boxes(d.a, d, walk, tile[0]), plan_boxes(d.b, d, walk, tile[1])
        if isinstance(a, Boxes) and isinstance(b, Boxes):
            return walk, a, b
        reasons.append(next(x for x in (a, b) if isinstance(x, str)))
    return "; or ".join(dict.fromkeys(reasons))


def box_rows(x: tiling.Operand, tile_rows: int, is_alone: bool) -> int:
    """Rows of a tile's boxes: in groups of 8 no more than there are, for a row that lies beyond costs some 7 clocks (H200, e4m3: 128x64
    tiles take 12.2 us with 128 rows of A and 18.6 with 64). What then stands in the tile makes results that are not stored."""
    return min(tile_rows, -(-x.rows[0] // 8) * 8) if is_alone and len(x.rows) == 1 and x.rows[0] else tile_rows


def own_k(am: AffineMatmul, d: tiling.Digits, walk: Walk, boxes: Sequence[Boxes], size: int) -> int:
    """WgmmaConsts.own_k. A row that k cuts off within its box costs a tensor copy some 3 to 7 clocks (H200, 16896 x 256: k = 504 takes
    14.0 us, 512 takes 13.1), so the second k tile begins early and all boxes are whole.

    Measured on an H200: 1x1 layers on 14x14 and 7x7 0 to 5 % faster; larger ones, bound by memory, up to 37 % slower. Where rows begin at
    whole lines of L2 all boxes would part lines instead.
    """
    if size * sum(tiling.source_elements(x, rows, am.k, am.batch) for x, rows in ((am.a, am.m), (am.b, am.n))) > MAX_REPEATED_BYTES:
        return 0
    own = am.k.size % walk.tile_k
    if own == 0 or am.k.size < walk.tile_k or own * size % 32 or len(d.k) > 1 or not walk.is_linear:
        return 0
    if any(any(bound.k_coefs) for x in (d.a, d.b) for bound in x.bounds):
        return 0
    lines = [x.row_strides for x, box in zip((d.a, d.b), boxes, strict=True) if box.major == "k"]
    return 0 if any(all(stride * size % SPAN_BYTES == 0 for stride in strides) for strides in lines) else own


@dataclass(frozen=True, slots=True)
class StoredMap:
    """The map that stores panels of D, the batch digits it has, and whether it has or steps through several digits of m."""

    map: TensorMapSpec
    batch_digits: tuple[int, ...]
    has_positions: bool


def stored_map(am: AffineMatmul, d: tiling.Digits, has_blocks: bool = False) -> StoredMap | None:
    """If D is of up to 32 bits, contiguous along n (in parts of whole panels), and the operands only change along n. has_blocks: panels are
    blocks of positions."""
    out = d.targets[0]
    size = out.dtype.num_bytes
    if size > 4 or (out.dtype.name == "s32" and am.epilogue is not None) or (size == 1 and am.ragged is not None):
        return None
    columns = min(PANEL, SPAN_BYTES // size)
    width = am.n.size
    if len(d.out_n) > 1:
        # Columns in parts, as of windows that tile an image: one long line of the map, of which a panel has 64 within one part.
        width = 1 + sum((e - 1) * s for e, s in zip(d.out_n, out.n_strides, strict=True))
        is_apart = min(out.n_strides) > 0 and out.n_strides[0] * d.out_n[0] >= width  # columns beyond the last lie beyond the line
        if not is_apart or d.out_n[-1] % columns or am.operands or am.up is not None or has_blocks or tiling.needs_wide(d):
            return None
    if out.n_strides[-1] not in ((1,) if am.n.size > 1 else (0, 1)):
        return None
    if any(any(t.m_strides) for t in d.targets[1:]):
        return None
    # A store clips rows exactly but columns to 16 bytes.
    if am.n.size * size % 16 or out.base * size % 16 or out.align % 16:
        return None
    digits = tuple(i for i, (e, s) in enumerate(zip(d.batch, out.batch_strides, strict=True)) if e > 1 and s)
    has_positions = len(d.out_m) > 1 or has_blocks
    out_m, m_strides = (am.m.extents, am.d.m_strides) if has_blocks else (d.out_m, out.m_strides)
    dims = (width, *reversed(out_m), *(d.batch[i] for i in digits))
    # A dimension of one element is never stepped over: any legal stride will do.
    steps = (*reversed(m_strides), *(out.batch_strides[i] for i in digits))
    strides = tuple(size * (s if e > 1 else am.n.size) for e, s in zip(dims[1:], steps, strict=True))
    if len(dims) > 5 or (has_positions and digits) or any(s <= 0 or s % 16 for s in strides):
        return None
    span, kind = columns * size, "u8" if size == 1 else out.dtype.name
    if not has_positions:
        box = (columns, PANEL, *(1 for _ in digits))
        return StoredMap(TensorMapSpec(kind, dims, strides, box, swizzle=span), digits, False)
    if has_blocks:
        return StoredMap(TensorMapSpec(kind, dims, strides, (columns, BLOCK, BLOCK, 1), swizzle=span), digits, True)
    still = (0,) * (len(dims) - 2)
    return StoredMap(TensorMapSpec(kind, dims, strides, (columns, PANEL), swizzle=span, element_strides=(1,) * len(dims),
                                   corners=(still, still)), digits, True)


def plan_epilogue(d: tiling.Digits, am: AffineMatmul, wide: bool, is_split: bool, spare_registers: int) -> tiling.EpilogueConsts:
    """The epilogue of a panel by one warpgroup: in short vectors, where the tile's accumulators leave few registers."""
    epilogue = tiling.plan_epilogue(d, am, PANEL, PANEL, 128, wide, is_split)
    is_light = len(am.operands) < 2 and not any(any(t.m_strides) for t in am.operands)
    vec = min(epilogue.vec, 4 if is_light else 2) if spare_registers < 96 else epilogue.vec
    targets = epilogue.targets if is_split else tuple(tiling._target_consts(i, t, d, epilogue.inner, vec) for i, t in enumerate(d.targets))
    if epilogue.loads_ahead and spare_registers >= LOADING_REGISTERS:
        return replace(epilogue, pitch=PANEL_PITCH)
    inner_threads = epilogue.tile_inner // vec
    return replace(epilogue, pitch=PANEL_PITCH, vec=vec, inner_threads=inner_threads, outer_step=128 // inner_threads, unroll=1,
                   targets=targets, loads_ahead=False)


@lru_cache(maxsize=256)
def epilogue_lines(am: AffineMatmul) -> int:
    """Lines of PTX that the epilogue of one element takes."""
    if am.epilogue is None:
        return 0
    still = [o.name for o in am.operands if not any((*o.m_strides, *o.n_strides, *o.batch_strides))]
    epilogue, _ = am.epilogue.hoisted(still)
    inputs = {name: f"%{name}" for name in ("acc", *epilogue.args, *epilogue.scalars)}
    return epilogue.lower(inputs, ["%acc", "%before"][:am.epilogue.num_outputs], "f32").count("\n") + 1


def stores_panels(am: AffineMatmul, tile_n: int, accumulators: int) -> bool:
    """Whether a thread makes D of its accumulators alone: one result, of not too many lines; with a gate, whole panels of 16 bits."""
    if am.up is not None and (tile_n % (2 * PANEL) or am.d.dtype.num_bytes != 2 or am.operands):
        return False
    return am.aux is None and epilogue_lines(am) * accumulators // (1 if am.up is None else 2) <= MAX_DIRECT_LINES


def direct_panels(tile_m: int, tile_n: int, consumers: int, keeps: bool = False) -> int:
    panels = tile_m * tile_n // (consumers * PANEL * PANEL)
    return min(panels, 2 if panels % 2 == 0 else 1 if keeps else 3)


def plan_scales(am: AffineMatmul, d: tiling.Digits, tile_n: int) -> tuple[ScaleConsts, ...] | str:
    """The block scales, or why a kernel cannot apply them to the sums of its k tiles."""
    scales = []
    for scale, rows in ((am.scale_a, am.m.extents), (am.scale_b, am.n.extents)):
        if scale is None:
            continue
        extents, (strides,) = tiling.merge(rows, [scale.row_strides])
        if scale is am.scale_b and strides[-1] or (scale is am.scale_b and len(extents) > 1 and extents[-1] % tile_n):
            return f"{scale.name} changes among the {tile_n} columns of a tile"
        if any(scale.k_strides) and (len(am.k.extents) != 2 or am.k.extents[1] != SPAN_BYTES or scale.k_strides[1]):
            return f"{scale.name} changes within {SPAN_BYTES} of k"
        if any(scale.batch_strides) and d.batch != am.batch.extents:
            return f"the batch of {scale.name} is not that of the operands"
        scales.append(ScaleConsts(scale.name, len(extents)))
    return tuple(scales)


def shares_of(config: EngineConfig) -> str:
    """"b" where two CTAs each bring half of B for both, or nothing."""
    return dict(config.knobs).get("shares", "")


def defers_of(config: EngineConfig) -> bool:
    """Whether a tile is stored while the next is multiplied, by threads that fill the ring, too: others have too few registers."""
    return dict(config.knobs).get("defers", False)


def keeps_of(config: EngineConfig) -> bool:
    """Whether a CTA keeps the B of its one column of tiles."""
    return dict(config.knobs).get("keeps", False)


def streams_of(config: EngineConfig) -> int:
    """CTAs that the k tiles of all tiles are dealt out to; 0: tiles are."""
    return dict(config.knobs).get("streams", 0)


def min_k_tiles(grid: tiling.Grid) -> int:
    """Tiles of k of the part of a sum that has the fewest."""
    return grid.k_tiles - (grid.splits - 1) * grid.k_tiles_per_split


def promotes_of(config: EngineConfig) -> bool:
    """Whether sums of a k tile are added up outside the tensor cores: a knob of 8-bit types alone."""
    return dict(config.knobs).get("promotes", False)


def warpgroups_of(schedule: str, tile_m: int) -> int:
    """Warpgroups that multiply: in ping-pong two, cooperating as many as share the rows in blocks of 64, two if they can."""
    return 3 if schedule == "coop" and tile_m % 128 else 2


def stages_of(schedule: str, tile_m: int, tile_n: int) -> int:
    """Stages that fit beside the staged panels."""
    warpgroups = warpgroups_of(schedule, tile_m)
    panels = direct_panels(tile_m, tile_n, 1 if schedule == "pingpong" else warpgroups)
    staging_bytes = max(panels * PANEL * PANEL * 2, PANEL * PANEL_PITCH * 4)
    return min(MAX_STAGES, (SMEM_BYTES - warpgroups * staging_bytes - 2 * BARRIER_BYTES * MAX_STAGES) // ((tile_m + tile_n) * SPAN_BYTES))


def kept_stages(schedule: str, tile_m: int, tile_n: int, k_tiles: int) -> int:
    """Stages of A that fit beside the staged panels and all of a column's B."""
    warpgroups = warpgroups_of(schedule, tile_m)
    panels = direct_panels(tile_m, tile_n, 1 if schedule == "pingpong" else warpgroups, True)
    staging_bytes = max(panels * PANEL * PANEL * 2, PANEL * PANEL_PITCH * 4)
    free = SMEM_BYTES - warpgroups * staging_bytes - k_tiles * tile_n * SPAN_BYTES - 2 * BARRIER_BYTES * (MAX_STAGES + 1)
    return min(MAX_STAGES, free // (tile_m * SPAN_BYTES))


def prefetches(am: AffineMatmul, grid: tiling.Grid, walk: Walk, stages: int, a: Boxes | Halo) -> bool:
    """Where many CTAs share what memory must still bring: long sums of few tiles, four or more to a row and to a column, of rows that lie
    along k.

    Measured 2026-11-28, H100: 1x1 2048->512 on 7x7 takes 24.5 us instead of 29.2; where less is shared, or sums are short, it costs 1 to
    25 %. H200: 13.0 us instead of 12.3 where memory brings 8 MB in all (the same layer, N=32), 29.6 instead of 25.0 in its filter gradient.
    """
    num_bytes = am.a.dtype.num_bytes * (tiling.source_elements(am.a, am.m, am.k, am.batch)
                                        + tiling.source_elements(am.b, am.n, am.k, am.batch))
    if isinstance(a, Halo) or a.major != "k" or num_bytes < MIN_PREFETCHED_BYTES:
        return False
    is_long = grid.k_tiles >= 4 * stages and grid.splits == 1
    is_shared = min(grid.m_tiles, grid.n_tiles) >= 4 and grid.ctas <= MAX_PREFETCHED_TILES
    return len(walk.extents) == 1 and walk.is_linear and is_long and is_shared


def skips(c: WgmmaConsts, am: AffineMatmul, walk: Walk) -> bool:
    """Warpgroups may skip groups' last tiles where B's panels under way stay in L2 although those tiles run ahead of the group's others.

    Measured 2026-11-29, H200, mixtures of experts, 8192 tokens, with this and before it: 512 rows an expert, 32 k tiles 1206 and 1260 us;
    256 rows, 112 k tiles (3.5 MB a panel) 16.2 and 11.6 ms.
    """
    is_of_rows = am.ragged is not None and am.ragged.side == "m"
    may = is_of_rows and c.warpgroups > 1 and not (c.is_ping_pong or c.promotes or c.ring.is_merged)
    return may and c.tile_n * SPAN_BYTES * walk.k_tiles <= MAX_SKIPPED_PANEL_BYTES


def streamed(am: AffineMatmul, grid: tiling.Grid, walk: Walk, boxes: Sequence[Boxes | Halo]) -> tuple[str, ...]:
    """The operands that are large and read once, in whole lines: in L2 their lines make room for each other, not for others' (results that
    the next kernel reads, dirty lines that would have to be written back first).

    Measured 2026-11-28, H100: 1x1 1024->256 on 14x14 takes 32.7 us instead of 38.3 with tiles of 64x256; read by two tiles, or in boxes
    that part lines (144 channels), it costs up to 36 %. Windows that tile an image, 2026-11-29, H200: 28x28 192-384 2x2, read by two or
    three tiles, forward 28.2 instead of 29.6 to 31.1, filter gradient 30.2 to 30.7 instead of 31.6; 56x56, of which 38 MB are written,
    forward 36.7 instead of 36.0.
    """
    size, readers = am.a.dtype.num_bytes, 1
    operands = [("a", am.a, am.m, grid.n_tiles, boxes[0]), ("b", am.b, am.n, grid.m_tiles, boxes[1])]
    if len(walk.extents) > 1:
        written = am.m.size * am.n.size * am.d.dtype.num_bytes if grid.splits == 1 else 0
        has_taps = {"a": not walk.is_linear, "b": isinstance(boxes[1], Boxes) and len(boxes[1].rows) > 1}
        operands = [o for o in operands if has_taps[o[0]] and isinstance(o[4], Boxes) and o[4].map.corners is not None
                    and written <= MAX_WRITTEN_BYTES and tiling.source_elements(o[1], o[2], am.k, am.batch) == o[2].size * am.k.size]
        readers = 3
    return tuple(name for name, x, rows, tiles, box in operands
                 if tiles <= readers and box.map.dims[0] * size % SPAN_BYTES == 0
                 and size * tiling.source_elements(x, rows, am.k, am.batch) >= MIN_STREAMED_BYTES)


def plan_grid(am: AffineMatmul, tile: tuple[int, int, int], split_k: int, inner: str, k_tiles: int, group: int = 0) -> tiling.Grid:
    """group: m tiles that the raster goes through before the next n tile; by default as measured to be the fastest."""
    grid = tiling.plan_grid(am, tile, 1, inner)
    grid = replace(grid, group_m=min(group or GROUP_M, grid.m_tiles))
    per_split = -(-k_tiles // min(split_k, k_tiles))
    return replace(grid, k_tiles=k_tiles, k_tiles_per_split=per_split, splits=-(-k_tiles // per_split))


@lru_cache(maxsize=256)
def _plan(am: AffineMatmul | MatmulGroup, config: EngineConfig) -> _Plan | str:
    are_products = [part.k.size > 0 for part in members_of(am)]
    tile_k = SPAN_BYTES // members_of(am)[0].a.dtype.num_bytes
    parts = with_products(tuple(by_groups(part) for part in members_of(am)), tile_k)
    if isinstance(parts, str):
        return parts
    digits = joint_digits(parts)
    if isinstance(digits, str):
        return digits
    first = parts[0]
    is_ping_pong = config["schedule"] == "pingpong"
    warpgroups = warpgroups_of(config["schedule"], config["tile_m"])
    consumers = 1 if is_ping_pong else warpgroups  # of a tile
    size = first.a.dtype.num_bytes
    tile_m, tile_n = config["tile_m"], config["tile_n"]
    shares = shares_of(config)
    is_alone = len(parts) == 1 and first.ragged is None and not shares
    rows_n = tile_n // (2 if shares else 1)  # that a CTA brings
    a: tuple[Boxes | Halo, ...]
    b: tuple[Boxes, ...]
    if config["loader"] == "halo":
        if len(parts) > 1:
            return "patches are of one part only"
        walks = [walk_taps(digits[0].k, tile_k)]
        patches, boxes_b = plan_halo(digits[0].a, digits[0], walks[0]), plan_boxes(digits[0].b, digits[0], walks[0], tile_n)
        if isinstance(patches, str) or isinstance(boxes_b, str):
            return patches if isinstance(patches, str) else str(boxes_b)
        halo: HaloConsts | None = patches.consts(HALO_SLOTS, config["stages"] * tile_n * SPAN_BYTES, tile_m)
        a, b = (patches,), (boxes_b,)
        a_consts = BoxesConsts("a", "k", 1, 0, 0, 0, (), ())  # a line of k a pixel
        b_consts = boxes_b.consts("b", tile_n, 0)
    else:
        walks, operands = [], []
        for d in digits:
            found = plan_operands(d, (box_rows(d.a, tile_m, is_alone), box_rows(d.b, rows_n, is_alone), tile_k))
            if isinstance(found, str):
                return found
            walks.append(found[0])
            operands.append(found[1:])
        if len({walk.is_linear for walk in walks}) > 1:
            return "its parts walk k in different ways"
        joint_a, joint_b = (joint_boxes(boxes) for boxes in zip(*operands, strict=True))
        if isinstance(joint_a, str) or isinstance(joint_b, str):
            return joint_a if isinstance(joint_a, str) else str(joint_b)
        halo = None
        a, b = (tuple(boxes if has_products else beyond(boxes) for boxes, has_products in zip(joint, are_products, strict=True))
                for joint in (joint_a, joint_b))
        a_consts, b_consts = joint_a[0].consts("a", tile_m, 0, joint_a[1:]), b[0].consts("b", rows_n, tile_m * SPAN_BYTES, b[1:])
    if shares:
        is_plain = all(isinstance(x, Boxes) and len(x.rows) == 1 and x.map.corners is None for x in (*a, *b))
        if not is_plain or len(parts) > 1:
            return "only plain matrices are shared"
        if b[0].major == "row" and rows_n % CHUNK_ROWS:
            return "halves of its tiles are no whole panels"
        b_consts = replace(b_consts, shared_rows=rows_n)
    keeps = keeps_of(config)
    if keeps:
        if {"shares", "lead", "defers", "streams"} & set(dict(config.knobs)) or not is_alone or halo is not None or promotes_of(config):
            return "B stays in plain loops of one product alone"
        if prod(b[0].map.box) * b_consts.chunks != tile_n * tile_k:
            return "boxes of B that stay are whole"
        b_consts = replace(b_consts, smem_offset=config["stages"] * tile_m * SPAN_BYTES)
    inner = tiling.inner_direction(digits[0])
    pair = (tile_m * (2 if shares else 1), tile_n, tile_k)  # tiles of CTAs that share, one below the other
    grids = [plan_grid(part, pair, config["split_k"], inner, walk.k_tiles, 1 if keeps else dict(config.knobs).get("group", 0))
             for part, walk in zip(parts, walks, strict=True)]
    if halo is not None and isinstance(a[0], Halo):
        m_tiles = -(-a[0].num_blocks // halo.blocks)
        grids = [replace(grids[0], m_tiles=m_tiles, group_m=min(8, m_tiles))]
    ragged = first.ragged
    if ragged is not None:
        plain = not (shares or {"lead", "defers"} & set(dict(config.knobs)))
        if halo is not None or not plain or ragged.count == 0:
            return "groups are of plain boxes, and at least one"
        if (a_consts.major, b_consts.major if ragged.side == "k" else "row") != (("k", "row") if ragged.side == "m" else ("row", "row")):
            return f"groups of {'rows lie along k' if ragged.side == 'm' else 'terms lie along rows, of both operands'}"
        if ragged.side == "m":
            grids = [replace(grids[0], batch=1)]
        else:
            k_tiles = -(-first.k.size // ragged.count // tile_k) + 1  # of a group, about
            grids = [replace(grids[0], k_tiles=k_tiles, k_tiles_per_split=k_tiles)]
    streams = streams_of(config)
    if streams:
        forms = {"shares", "lead", "defers"} & set(dict(config.knobs))
        if forms or is_ping_pong or halo is not None or len(parts) > 1 or ragged is not None or not first.acc.is_float:
            return "k tiles are dealt out of plain tiles by cooperating warpgroups, of float sums"
        if warpgroups == 3 and tile_n > 128:
            return "three warpgroups with 96 accumulators a thread have no registers left for parts of others"
        if grids[0].splits > 1 or not 1 < streams < 2**16 or grids[0].ctas >= streams or first.k.size == 0:
            return f"{grids[0].ctas} tiles in {grids[0].splits} parts for {streams} CTAs"
    is_split = grids[0].splits > 1
    if keeps and (is_split or grids[0].slices > 1):
        return "B stays where it is one matrix, whose sums have one part"
    wide = any(tiling.needs_wide(d) or grid.partial_elements > tiling.INT32_MAX for d, grid in zip(digits, grids, strict=True))
    accumulators = tile_m * tile_n // (consumers * 128)
    promotes, defers = promotes_of(config), defers_of(config)
    is_merged = defers or (warpgroups == 3 and (promotes or accumulators > 96))
    if is_merged and (is_ping_pong or halo is not None or len(parts) > 1 or ragged is not None or streams or keeps):
        return "only plain loops of cooperating warpgroups fill stages themselves"
    spare_registers = (MERGED_REGISTERS if is_merged else MAX_REGISTERS)[warpgroups] - accumulators
    scales = plan_scales(first, digits[0], tile_n)
    if isinstance(scales, str):
        return scales
    lead = dict(config.knobs).get("lead", 0)
    if lead and (promotes or defers or is_ping_pong or warpgroups != 2 or lead > min_k_tiles(grids[0])):
        return "one of two warpgroups that cooperate leads, by no more than a sum has"
    if promotes and (defers or tile_n // 2 < accumulators or accumulators + PROMOTING_REGISTERS > spare_registers):
        return f"{accumulators} accumulators and as many sums of a k tile leave too few registers"
    epilogues = {plan_epilogue(d, part, wide, is_split, spare_registers) for d, part in zip(digits, parts, strict=True)}
    if len(epilogues) > 1:
        return "its parts are written in different ways"
    epilogue = epilogues.pop()
    stored = [None if is_split or not stores_panels(part, tile_n, accumulators) else stored_map(part, d, halo is not None)
              for part, d in zip(parts, digits, strict=True)]
    if len({(x.batch_digits, x.has_positions) if x else None for x in stored}) > 1:
        stored = [None for _ in stored]
    if accumulators > 64 and not is_split and len(parts) > 1 and parts[0].operands:
        return "the numbers of a group and an epilogue's operands leave too few registers beside 96 accumulators a thread"
    if spare_registers < 64 and not is_split and any(t.dtype is F64 or x is None for part, x in zip(parts, stored, strict=True)
                                                     for t in (*part.operands, *((part.aux,) if part.aux is not None else ()))):
        return "a staged epilogue, or one with f64, leaves too few registers beside the accumulators of this tile"
    if halo is not None and first.amax:
        return "blocks of positions reach beyond the results whose largest size is found"
    if halo is not None and stored[0] is None:
        return "blocks of positions are stored by tensor copies of panels only"
    if defers:
        if stored[0] is None or first.d.dtype.num_bytes != 2 or first.up is not None:
            return "stores are put off of cooperating warpgroups that store 16-bit panels by tensor copies"
        if accumulators // 2 > spare_registers - 48:
            return f"{accumulators} accumulators and a rounded tile leave too few registers"
        if min_k_tiles(grids[0]) < accumulators // 32:
            return "a tile has fewer tiles of k than panels to store meanwhile"
    kept = walks[0].k_tiles if keeps else 0
    stage_bytes = (tile_m if halo is None else 0) * SPAN_BYTES + (0 if keeps else tile_n * SPAN_BYTES)
    panels = direct_panels(tile_m, tile_n if first.up is None else tile_n // 2, consumers, keeps)
    staging_bytes = panels * PANEL * PANEL * 2 if stored[0] else epilogue.smem_bytes
    stages = config["stages"]
    staging_at = stages * stage_bytes + (-(-halo.slots * halo.slot_bytes // 1024) * 1024 if halo is not None else 0)
    staging_at += kept * tile_n * SPAN_BYTES
    absent = []
    brought = () if halo is not None or shares else ((a[0], a_consts, tile_m), *(() if keeps else ((b[0], b_consts, tile_n),)))
    for x, loader, rows in brought:
        missing = rows * SPAN_BYTES - loader.chunks * prod(x.map.box) * size
        if missing:
            absent.append((loader.smem_offset + rows * SPAN_BYTES - missing, missing))
    ring = RingConsts(stages, stage_bytes, staging_at + warpgroups * staging_bytes, consumers, 2 if shares else 1, is_merged,
                      stage_bytes - sum(missing for _, missing in absent) if absent else 0)
    kind, kind_b = ("tf32" if size == 4 else x.dtype.name for x in (first.a, first.b))
    consts = WgmmaConsts(ring, kind, kind_b, "s32" if kind in INTEGERS else "f32", promotes, tile_m, tile_n, tile_k, len(walks[0].extents),
                         not walks[0].is_linear,
                         len(digits[0].batch), a_consts, b_consts, epilogue, warpgroups, is_ping_pong,
                         stored[0] is not None, bool(stored[0] and stored[0].has_positions),
                         stored[0].batch_digits if stored[0] else (), staging_at, staging_bytes, grids[0].slices > 1, is_split,
                         grids[0].n_tiles > 1, len(parts),
                         not (shares or is_merged or keeps) and prefetches(first, grids[0], walks[0], stages, a[0]),
                         streamed(first, grids[0], walks[0], (a[0], b[0])) if halo is None else (), scales, halo, defers,
                         lead, streams)
    own = 0
    if is_alone and not (promotes or scales or is_split or streams or keeps) and isinstance(a[0], Boxes):
        own = own_k(first, digits[0], walks[0], (a[0], b[0]), size)
    consts = replace(consts, absent=tuple(absent), kept=kept, own_k=own, ragged=tiling.RaggedConsts.of(first),
                     skips=skips(consts, first, walks[0]), streamed=() if ragged is not None else consts.streamed,
                     prefetches=consts.prefetches and ragged is None)
    if keeps and consts.table_at + BARRIER_BYTES > SMEM_BYTES:
        return f"{kept} tiles of k of B leave too little shared memory"
    if consts.table_at + _table_bytes(first) > SMEM_BYTES:
        return f"a table of {ragged.count if ragged else 0} groups leaves too little shared memory"
    members: list[_Member] = []
    for part, d, grid, walk, boxes, map_ in zip(parts, digits, grids, walks, zip(a, b, strict=True), stored, strict=True):
        first_tile = members[-1].first_tile + members[-1].grid.ctas if members else 0
        members.append(_Member(part, d, grid, first_tile, walk, boxes, map_))
    plan = _Plan(consts, tuple(members))
    tiles, loads, targets = (_varying(sections) for sections in zip(*(_sections(m, consts, 0) for m in members), strict=True))
    plan = replace(plan, consts=replace(consts, tile_params=tiles, load_params=loads, target_params=targets))
    if plan.num_tiles >= tiling.INT32_MAX or len(parts) > 1 and _param_bytes(_arguments(plan, 1, 0)) > MAX_PARAM_BYTES:
        return "its parts have more tiles or parameters than a launch takes"
    return plan


def by_groups(am: AffineMatmul) -> AffineMatmul:
    """Groups of rows as a batch over which only B changes, of which a tile has one element."""
    r = am.ragged
    if r is None or r.side == "k":
        return am
    return replace(am, batch=IndexSpace((r.count,)), a=replace(am.a, batch_strides=(0,)), b=replace(am.b, batch_strides=(r.b_stride,)),
                   d=replace(am.d, batch_strides=(0,)))


def _flags_bytes(c: WgmmaConsts) -> int:
    """Of a flag for each CTA and warpgroup, in whole lines."""
    return -(-4 * c.streams * c.ring.consumers // 256) * 256


def _table_bytes(am: AffineMatmul) -> int:
    return 8 * (am.ragged.count + 2) if am.ragged is not None else 0


def _varying(sections: Sequence[Sequence[Arg]]) -> tuple[tuple[str, str], ...]:
    """(name, type) of the arguments whose values differ between members."""
    return tuple((args[0].name, args[0].type) for args in zip(*sections, strict=True) if any(a.value != args[0].value for a in args))


def _param_bytes(args: Sequence[Arg]) -> int:
    return sum(128 if a.type == "tensor_map" else 8 if a.type in ("u64", "s64", "f64") else 4 for a in args) + 8


def _arguments(plan: _Plan, tile_step: int, workspace_offset: int) -> list[Arg]:
    """tile_step: CTAs, or clusters of them, that take tiles in turn.

    What is common to all members under its own name, else <name>_member<i>. Tensor maps come first: they are aligned to 64 bytes.
    """
    args = [Arg("num_tiles", "u32", plan.num_tiles), Arg("tile_step", "u32", tile_step)]
    c = plan.consts
    members = [sum(_sections(m, c, workspace_offset), []) for m in plan.members]
    varying = {name for name, _ in (*c.tile_params, *c.load_params, *c.target_params)}
    for alike in zip(*members, strict=True):
        name = alike[0].name
        args += [replace(a, name=f"{name}_member{i}") for i, a in enumerate(alike)] if name in varying else alike[:1]
    return sorted(args, key=lambda a: a.type != "tensor_map")


def _sections(m: _Member, consts: WgmmaConsts, workspace_offset: int) -> tuple[list[Arg], list[Arg], list[Arg]]:
    """A member's arguments: those that find a tile, those that fetch operands, those that write D."""
    am, grid, wide = m.am, m.grid, consts.epilogue.wide
    t = tiling.Arguments(wide)
    if consts.members > 1:
        t.add("first_tile", "u32", m.first_tile)
    if consts.has_n_tiles:
        t.add("group_m", "u32", grid.group_m)
        t.add("group_tail", "u32", grid.group_tail)
        t.add("last_group", "u32", grid.last_group)
        t.add("group_tiles", "u32", grid.group_m * grid.n_tiles)
        for stem, value in (("group_tiles", grid.group_m * grid.n_tiles), ("group_m", grid.group_m), ("group_tail", grid.group_tail)):
            t.divisor(stem, value)
    if consts.has_slices:
        t.add("tiles", "u32", grid.m_tiles * grid.n_tiles)
        t.divisor("tiles", grid.m_tiles * grid.n_tiles)
    if consts.is_split:
        t.add("batch_size", "u32", am.batch.size)
        t.divisor("batch_size", am.batch.size)
    t.add("k_tiles", "u32", grid.k_tiles)
    if consts.streams:
        units = grid.ctas * grid.k_tiles
        t.divisor("k_tiles", grid.k_tiles)
        t.add("units", "u32", units)
        t.add("units_last", "u32", units - 1)
        t.add("part_units", "u32", -(-units // consts.streams))
        t.divisor("part_units", -(-units // consts.streams))
        t.add("ptr_flags", "u64", WorkspaceArg(workspace_offset))
        t.add("ptr_parts", "u64", WorkspaceArg(workspace_offset + _flags_bytes(consts)))
    else:
        t.add("k_tiles_per_split", "u32", grid.k_tiles_per_split)
    t.space("batch", m.d.batch)
    if am.ragged is not None:
        t.args += [a for a in tiling.ragged_arguments(am, t.offset_type) if a.name != "groups_b"]
        t.add("n_tiles", "u32", grid.n_tiles)
    for scale, space in ((am.scale_a, am.m), (am.scale_b, am.n)):
        if scale is not None:
            extents, (strides,) = tiling.merge(space.extents, [scale.row_strides])
            has_batch = any(scale.batch_strides)
            t.add(f"ptr_{scale.name}", "u64", TensorArg(scale.name, scale.base * scale.dtype.num_bytes))
            t.add(f"{scale.name}_k", "s32", scale.k_strides[0] if any(scale.k_strides) else 0)
            t.add(f"{scale.name}_row_last", "u32", space.size - 1)
            t.space(f"{scale.name}_row", extents)
            t.weights(f"{scale.name}_r", strides)
            t.weights(f"{scale.name}_b", scale.batch_strides if has_batch else (0,) * len(m.d.batch))
    tiles = t.args
    t = tiling.Arguments(wide)
    if consts.walks_taps:
        t.space("walk", (m.walk.extents[-1] // consts.tile_k, *m.walk.extents[:-1]))
        t.add("walk_channels", "u32", m.walk.extents[-1])
    else:
        t.space("walk", m.walk.extents)
        for i, step in enumerate(tiling.mixed_radix(consts.tile_k, m.walk.extents)):
            t.add(f"walk_inc{i}", "u32", step)
    for boxes, source, loader in zip(m.boxes, (am.a, am.b), (consts.a, consts.b), strict=True):
        t.add(loader.map, "tensor_map", TensorMapArg(source.name, boxes.map, boxes.byte_offset))
        if isinstance(boxes, Halo):
            t.add("patch_y", "s32", boxes.first[0])
            t.add("patch_x", "s32", boxes.first[1])
            continue
        t.space(f"{loader.name}_row", boxes.rows)
        if loader.chunks > 1:
            rows = am.m.size if loader.name == "a" else am.n.size
            t.add(f"{loader.name}_row_last", "u32", (rows - 1) // CHUNK_ROWS * CHUNK_ROWS)
        for shapes, sums in ((loader.coordinates, boxes.coordinates), (loader.offsets, boxes.offsets)):
            for shape, total in zip(shapes, sums, strict=True):
                coefficients = dict(total.terms)
                t.add(f"{shape.stem}_base", "s32", total.base)
                for digit, is_one in (*shape.row_terms, *shape.k_terms):
                    if not is_one:
                        t.add(f"{shape.stem}_{digit}", "s32", coefficients[digit])
    loads = t.args
    t = tiling.Arguments(wide)
    if isinstance(m.boxes[0], Halo):
        t.space("block", m.boxes[0].blocks)
    if m.stored is not None:
        t.add("map_d", "tensor_map", TensorMapArg(am.d.name, m.stored.map, am.d.base * am.d.dtype.num_bytes))
    if grid.splits > 1:
        tiling._partial_arguments(t, grid, am, consts.epilogue, workspace_offset)
    else:
        tiling._target_arguments(t, am, m.d, consts.epilogue)
    return tiles, loads, t.args


class WgmmaSm90Matmul:
    """f16 and bf16 matmuls, and f32 ones that may round their operands to tf32, on Hopper's asynchronous tensor cores."""

    name = "wgmma_sm90"
    is_deterministic = True
    sums_coarsely = True
    takes_groups = True
    takes_scales = True
    takes_ragged = True
    takes_gates = True
    takes_aux = True
    takes_addend = True
    takes_amax = True

    def check(self, am: AffineMatmul | MatmulGroup, device: DeviceInfo) -> Support:
        """sm_90a; operand pairs as of mma_sm80; operands that tensor maps can fetch (affine_tma.plan_boxes); D of any float type.
        A group: all its members, in one launch."""
        if device.arch != "sm_90a":
            return refuse(f"wgmma_sm90 needs sm_90a, the device is {device.arch}")
        parts = members_of(am)
        for part in parts:
            kinds = {part.a.dtype.name, part.b.dtype.name}
            is_float = part.acc.name == "f32" and (kinds <= set(FP8) or len(kinds) == 1 and kinds <= {"f16", "bf16", "f32"})
            has_scales = part.scale_a is not None or part.scale_b is not None
            if has_scales and len(parts) > 1:
                return refuse("wgmma_sm90: block scales are of one part only")
            if not is_float and not (part.acc.name == ("f32" if has_scales else "s32") and kinds <= set(INTEGERS)):
                return refuse("wgmma_sm90 multiplies f16, bf16 or f32 pairs and 8-bit floats in f32, 8-bit integers in s32, not "
                              f"{part.a.dtype} x {part.b.dtype} in {part.acc}")
            if kinds == {"f32"} and part.math not in ("tf32", "fast"):
                return refuse(f'wgmma_sm90 rounds f32 to tf32, which math="{part.math}" does not allow (math="tf32" or "fast" does)')
            if parts[0].k.size == 0:
                return refuse("wgmma_sm90 needs a sum of at least one term")
            common = tiling.check_common(part, device)
            if not common or tiling.empty_build(part) is not None:
                return common
        if len(parts) > MAX_MEMBERS:
            return refuse(f"wgmma_sm90: {len(parts)} parts are more than {MAX_MEMBERS}")
        plan = _plan(am, _config(parts[0], "coop", "boxes", 128, 64, 4, 1, promotions(parts[0])[0]))
        return refuse(f"wgmma_sm90: {plan}") if isinstance(plan, str) else common

    def moments_block(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> int:
        """Rows of D whose moments are written beside it, if asked to: those of a panel; 0 where none are."""
        is_whole = config["split_k"] == 1 and not (defers_of(config) or streams_of(config))
        is_whole &= config["loader"] == "boxes" or not any(e % BLOCK for e in am.m.extents[1:])  # blocks of positions that are all D's
        warpgroups = warpgroups_of(config["schedule"], config["tile_m"])
        accumulators = config["tile_m"] * config["tile_n"] // (128 * (1 if config["schedule"] == "pingpong" else warpgroups))
        has_room = MAX_REGISTERS[warpgroups] - accumulators >= MOMENT_REGISTERS
        has_room &= config["schedule"] == "coop" or accumulators < 128 or config["tile_m"] == 64  # two blocks of 128 in turn spill 12 bytes
        return PANEL if is_whole and has_room and tiling.may_make_moments(am) else 0

    def configs(self, am: AffineMatmul | MatmulGroup, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Legal configs, the fastest by estimate first."""
        return _sorted_configs(am, device)

    def estimate(self, am: AffineMatmul | MatmulGroup, config: EngineConfig, device: DeviceInfo) -> float:
        """Rounds of tiles over the SMs at the slower of multiplying and loading, and what of the epilogues stays in sight, over the traffic
        of the whole.

        Constants fitted to 2500 timings on an H100 and an H200 (layers of ResNet-50 and EfficientNet-B0, N = 1, 32 and 128; GEMM 1024 to
        8192 and of language models, bf16, tf32, e4m3): from 4096 on GEMM is off by 2 % and the first choice 0.1 % slower than the best;
        layers are off by 9 %, their first choice is 1 % slower.
        """
        plan = _plan(am, config)
        if isinstance(plan, str):
            return float("inf")
        c, first, grid = plan.consts, plan.members[0].am, plan.members[0].grid
        num_ctas = grid.ctas * c.ring.ctas
        # wgmma multiplies 4096 flop per clock and SM in 16-bit types, half of that in tf32, twice in 8-bit types: 128 bytes of k take the
        # same time. Sums that leave the tensor cores hold them up:
        area = c.tile_m * c.tile_n
        multiply_clocks = area * 2 * 64 / 4096
        if c.promotes:
            # two warpgroups do not quite hide what one does with its sums, and less so with factors.
            multiply_clocks *= (1.17 if c.warpgroups == 3 else 1.19) if c.scales else (1.04 if c.warpgroups == 3 else 1.06)
        rows_bytes = min(c.tile_m, first.m.size) * SPAN_BYTES if c.halo is None else c.halo.slot_bytes / c.halo.taps
        is_grouped = first.ragged is not None and first.ragged.side == "m"
        # Large matrices beyond half a millisecond are bound by power: SMs slow down, L2 does not, and idle SMs leave others their share.
        is_large = first.ragged is None and is_wide(plan) and min(first.m.size, first.n.size) >= 4096
        is_long = is_large and num_ctas * grid.k_tiles_per_split * multiply_clocks > 8e5 * device.num_sms
        # Bytes L2 brings a clock. Tiles of several groups share less in it (256 experts, 64k rows: 128x128 took twice as long as 128x256).
        has_taps = len(plan.members[0].walk.extents) > 1 and num_ctas > device.num_sms
        rate = 50 if first.ragged is not None else 62 if has_taps else 67.5
        if is_large:
            rate = 65 if is_long else 61
        # An im2col map brings a pixel in 3.5 clocks at best.
        pixels = sum(rows for x, rows in zip(plan.members[0].boxes, (min(c.tile_m, first.m.size), c.tile_n), strict=True)
                     if isinstance(x, Boxes) and x.map.corners is not None)
        # A row whose k ends within the box takes 7; half a line as much as a pixel (64 channels of 8 bits, 56x56: 24 to 26 us of 256x64).
        half = pixels and first.a.dtype.num_bytes * plan.members[0].d.k[-1] == SPAN_BYTES // 2
        cut_rows = sum(rows for x, rows in zip(plan.members[0].boxes, (min(c.tile_m, first.m.size), c.tile_n), strict=True)
                       if isinstance(x, Boxes) and x.major == "k" and x.map.dims[0] * first.a.dtype.num_bytes < SPAN_BYTES)
        columns = 0 if c.kept else c.tile_n - sum(b for at, b in c.absent if at >= c.tile_m * SPAN_BYTES) // SPAN_BYTES  # that are brought
        # So does one that lies beyond the last column, of which the last tile of a row has some: with a tile an SM all wait for that.
        beyond = grid.n_tiles * c.tile_n - tiling.columns_of(first) if grid.n_tiles > 1 and c.b.major == "k" and not c.kept else 0
        beyond_clocks = 5.1 * beyond / (1 if num_ctas <= device.num_sms else grid.n_tiles)
        load_clocks = max((rows_bytes + columns * SPAN_BYTES) / rate + beyond_clocks, 3.5 * pixels, (3.5 if half else 7.0) * cut_rows)
        # So, nearly, do the rows of a tap's last box where channels end within it (80 of them, 3 taps: 36.4 us; products take 17), and as
        # pixels those of which half a line is left (96 of them, 28x28, N=128: 45 to 46 us in tiles of 192 and 256 rows).
        end = plan.members[0].d.k[-1] * first.a.dtype.num_bytes
        if not plan.members[0].walk.is_linear and end > SPAN_BYTES and end % SPAN_BYTES:
            last_rows = sum(rows for x, rows in zip(plan.members[0].boxes, (min(c.tile_m, first.m.size), c.tile_n), strict=True)
                            if isinstance(x, Boxes) and x.major == "k")
            each = 5.0 if end % SPAN_BYTES < SPAN_BYTES // 2 else 3.5
            load_clocks += max(0.0, each * last_rows - load_clocks) / -(-end // SPAN_BYTES)
        # And the lines of filters that lie along their columns, where these end within a box: after the pixels (the gradient of the same
        # layer: 57, 64, 80 us in tiles of 256, 192 and 128 rows).
        filters = plan.members[0].boxes[1]
        if pixels and isinstance(filters, Boxes) and filters.major == "row" and filters.rows[-1] % CHUNK_ROWS:
            whole = (c.b.chunks - 1) * c.tile_k * SPAN_BYTES / rate
            load_clocks += max(0.0, 3.5 * pixels + whole + 7.0 * c.tile_k - load_clocks) / grid.n_tiles
        if c.halo is not None and c.is_ping_pong and c.tile_m == 128 and end % SPAN_BYTES:
            multiply_clocks *= 1.2  # 68 and 69 us measured, forward and gradient of that layer; the cause is not known
        # Of an epilogue, a part is hidden by the products of the next tile; in ping-pong all, while it and a tile's products take less than
        # those of two tiles: one warpgroup alone does it, in twice the time.
        in_turns = c.is_ping_pong and num_ctas > device.num_sms
        epilogue_clocks = 770 + area / 7.1 if in_turns else 430 + area / 15.6
        # Moments: what three layers took longer (H200).
        epilogue_clocks += MOMENT_CLOCKS * area / (PANEL * PANEL * c.ring.consumers) if first.moments else 0.0
        between = 0.42 if c.defers else 0.48 if c.lead else 1.0
        products = [m.grid.k_tiles_per_split * max(multiply_clocks, load_clocks, 280) for m in plan.members]
        clocks = [max(p, (p + epilogue_clocks) / 2) if in_turns else p + between * epilogue_clocks for p in products]
        # Tiles of members come in turn, so only their sum is rounded up: to tiles of the last, lightest member.
        rounds = sum(m.grid.ctas * c.ring.ctas * t for m, t in zip(plan.members, clocks, strict=True)) / (device.num_sms * clocks[-1])
        rounds = 0.3 * ceil(rounds) + 0.7 * rounds if is_long else ceil(rounds)
        begin_clocks = 390.0 if c.ring.is_merged else 0.0  # filling the ring before the first product
        begin_clocks += 600 if c.ring.ctas > 1 else 0  # two CTAs wait for each other's stages
        meet_us = 0.0
        if c.streams:
            # As many k tiles each; a part is left, those before the end of a tile are added, at 45 bytes a clock; 4 us until all have met.
            clocks = [-(-grid.ctas * grid.k_tiles // c.streams) * max(multiply_clocks, load_clocks, 280)]
            products, rounds = clocks, 1
            meet_us = ((1 + -(-c.streams // grid.ctas)) * area * 4 / 45 + 7000) / 1620
        last_clocks = products[-1] + epilogue_clocks
        compute_us = ((rounds - 1) * clocks[-1] + last_clocks + begin_clocks) / (1400 if is_long else 1620)
        used = min(1.0, first.m.size / first.batch.size) if is_grouped else 1  # groups that may have rows
        elements = sum((1 if is_grouped else m.am.batch.size) * m.am.m.size * m.am.n.size for m in plan.members)
        # Boxes of 128 bytes part the lines of rows that are no multiple of that: what is read comes slower, and short rows are written so.
        size = first.a.dtype.num_bytes
        parted = [1.13 if isinstance(x, Boxes) and x.map.dims[0] * size % SPAN_BYTES else 1.0 for x in plan.members[0].boxes]
        read = first.a.dtype.num_bytes * (
            parted[0] * max(tiling.source_elements(m.am.a, m.am.m, m.am.k, m.am.batch) for m in plan.members)
            + parted[1] * sum(tiling.source_elements(m.am.b, m.am.n, m.am.k, m.am.batch) for m in plan.members) * used
            * (2 if first.up is not None else 1))
        read += elements * sum(t.dtype.num_bytes for t in first.operands if any(t.m_strides))
        written = 0.0 if grid.splits > 1 else elements * first.d.dtype.num_bytes
        row_bytes = first.n.size * first.d.dtype.num_bytes
        if written > 0.25 * device.l2_bytes and row_bytes < 4 * SPAN_BYTES and row_bytes % SPAN_BYTES:
            written *= 1.6
        if row_bytes % SPAN_BYTES:  # tiles then end within lines (80->480 on 14x14: 15.7 us with four tiles to a row, 13.3 with two)
            written *= 1 + 0.15 * (grid.n_tiles - 1)
        # Reads come at less than the speed of a copy, writes partly stay in L2.
        memory_us = (read / 0.96 + written / 1.06) / (device.bandwidth_gbs * 1e3)
        # Of products with few rows hardly anything but the weights' way from memory shows.
        beside = 0.0 if 32 < first.m.size <= 128 and first.n.size >= 1024 else 0.33
        if c.defers and compute_us < memory_us:  # stores that wait for memory are not hidden by being put off
            compute_us = min(memory_us, compute_us + rounds * (1 - between) * epilogue_clocks / 1620)
        total = max(compute_us, memory_us) + beside * min(compute_us, memory_us) + meet_us + 4.4
        if c.tile_m == 192 and c.tile_n == 256 and num_ctas <= device.num_sms and grid.k_tiles >= 12:
            total *= 0.95  # one tile an SM, rows from L2 once: 25.5 us where this says 27.1 (1x1 1024->256 on 14x14, H200)
        if c.kept:
            # Loads hide, and stores that wait for memory: off by 3 % of what is best of ten layers (H200: pointwise ones of 14x14 to 56x56,
            # gradients of windows that tile an image), which small tiles are, since at the end nothing hides the last.
            total = max(memory_us + 3.5 + 3e-8 * written, compute_us) + 0.5 * last_clocks / 1620 + 4.4
        if grid.splits > 1:
            total += 2.4 + 2.0 * grid.partial_elements * first.acc.num_bytes / (device.bandwidth_gbs * 1.22e3)
        if device.is_emulated:  # there a warpgroup's multiplication has no speed of its own: a tile costs what its threads cost
            return 1000.0 * sum(m.grid.ctas * (m.grid.k_tiles_per_split + 20.0) for m in plan.members)
        return total

    def build(self, op: str, am: AffineMatmul | MatmulGroup, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        """The kernel and, where k is split, the sum of the parts. workspace_bytes counts from 0, workspace_offset included."""
        if isinstance(am, AffineMatmul):
            empty = tiling.empty_build(am)
            if empty is not None:
                return empty
        plan = _plan(am, config)
        assert not isinstance(plan, str), plan
        c, m = plan.consts, plan.members[0]
        target = PtxTarget.for_arch(device.arch, (8, 4) if c.product == "s32" and c.kind != c.kind_b else (8, 0))
        tile_step = c.streams or min(plan.num_tiles, max(1, device.num_sms // c.ring.ctas))
        if c.kept:  # a CTA stays in its column of tiles, the raster's inner direction
            tile_step = min(plan.num_tiles, max(1, device.num_sms // m.grid.n_tiles) * m.grid.n_tiles)
        num_ctas = tile_step * c.ring.ctas
        smem = c.ring.barriers_at + 2 * BARRIER_BYTES * (c.ring.stages + (c.halo.slots if c.halo is not None else 0))
        smem += BARRIER_BYTES if c.kept else 0
        smem += _table_bytes(m.am)
        kinds = (c.kind if c.kind_b == c.kind else f"{c.kind}_{c.kind_b}") + ("_promoted" if c.promotes else "")
        suffix = f"{kinds}_{c.tile_m}x{c.tile_n}x{c.tile_k}{'_pingpong' if c.is_ping_pong else ''}{'_halo' if c.halo is not None else ''}"
        suffix += "_shares_b" if c.ring.ctas > 1 else "_keeps_b" if c.kept else ""
        args = _arguments(plan, tile_step, workspace_offset)
        step = Step.of("matmul/wgmma_sm90", op, target, 128 * (c.warpgroups + (not c.ring.is_merged)), args, c, num_ctas, dynamic_smem=smem,
                       cluster=c.ring.ctas, suffix=suffix + ("_streams" if c.streams else ""), follows=c.streams > 0)
        if c.streams:
            num_flags = c.streams * c.ring.consumers
            flags = [Arg("ptr_flags", "u64", WorkspaceArg(workspace_offset)), Arg("num_flags", "u32", num_flags)]
            clear = Step.of("matmul/clear_flags", op, target, 128, flags, None, -(-num_flags // 128))
            return Build((clear, step), workspace_offset + _flags_bytes(c) + c.streams * c.tile_m * c.tile_n * 4)
        if not c.is_split:
            return Build((step,))
        reduce = tiling.reduce_step(op, m.am, m.d, m.grid, c.epilogue, target, c.epilogue.wide, workspace_offset)
        return Build((step, reduce), workspace_offset + m.grid.partial_elements * m.am.acc.num_bytes)


WGMMA_SM90 = WgmmaSm90Matmul()


@lru_cache(maxsize=256)
def _sorted_configs(am: AffineMatmul | MatmulGroup, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    # Of tiles that take as long the ones of a single warpgroup come first: 64x128 is 5 to 18 % faster than 128x64 in GEMM 1024 (H200).
    return tuple(sorted(_candidates(am, device), key=lambda c: (WGMMA_SM90.estimate(am, c, device), c["schedule"] == "coop")))


def _config(am: AffineMatmul, schedule: str, loader: str, tile_m: int, tile_n: int, stages: int, split_k: int, promotes: bool
            ) -> EngineConfig:
    knobs = {"promotes": promotes} if am.a.dtype.name in FP8 or promotes else {}
    return EngineConfig.of(schedule=schedule, loader=loader, tile_m=tile_m, tile_n=tile_n, stages=stages, split_k=split_k, **knobs)


def promotions(am: AffineMatmul) -> tuple[bool, ...]:
    """Whether sums may, or must, leave the tensor cores every k tile. Those with block scales must.

    Of 8-bit floats these keep 13 bits: sums of 128 err by up to 5e-4 of their magnitude, which is what such types can have and cuBLAS
    gives by default. Longer ones lose ever more (13 % of 8192 positive terms): only math="fast" allows them.
    """
    if am.scale_a is not None or am.scale_b is not None:
        return (True,)
    if am.a.dtype.name not in FP8:
        return (False,)
    return (True, False) if am.math == "fast" or am.k.size <= SPAN_BYTES else (True,)


def _candidates(am: AffineMatmul | MatmulGroup, device: DeviceInfo) -> Iterator[EngineConfig]:
    parts = members_of(am)
    choices = [(name, s, m, n, promotes) for promotes in promotions(parts[0]) for name, choices in (("boxes", TILES), ("halo", HALO_TILES))
               for s, tiles in choices.items() for m, n in tiles]
    for loader, schedule, tile_m, tile_n, promotes in choices:
        if (tile_m > 128 and tile_m >= 2 * parts[0].m.size) or (tile_n > 64 and tile_n >= 2 * parts[0].n.size):
            continue  # more than half of the tile would be empty
        stages = stages_of(schedule, tile_m, tile_n) if loader == "boxes" else halo_stages(am, schedule, tile_m, tile_n)
        config = _config(parts[0], schedule, loader, tile_m, tile_n, stages, 1, promotes)
        plan = _plan(am, config) if stages else ""
        if isinstance(plan, str) and parts[0].ragged is not None:  # room for the table of groups
            stages -= 1
            config = _config(parts[0], schedule, loader, tile_m, tile_n, stages, 1, promotes)
            plan = _plan(am, config) if stages > 1 else ""
        if isinstance(plan, str):
            continue
        if tile_m == 192 and tile_n > 128 and (not plan.consts.is_direct or parts[0].epilogue is not None or len(parts) > 1):
            continue  # 32 or 40 registers beside the accumulators
        if tile_m * tile_n == 192 * 256:  # ... of those who fill the ring, too: no windows, no sum of parts
            if all(isinstance(x, Boxes) and len(x.rows) == 1 and x.map.corners is None for x in plan.members[0].boxes):
                yield config
            continue
        whole = plan.members[0].grid
        is_low = (tile_m, tile_n) in SMALL_TILES or tile_m == 64 and parts[0].m.size <= 64  # two would multiply nothing but padding
        if schedule == "coop" or is_low or plan.num_tiles > device.num_sms:  # else there is no next tile to multiply under an epilogue
            yield config
        yield from _forms(am, config, plan, device)
        splits = set()
        # Partial sums are added as floats.
        may_split = len(parts) == 1 and parts[0].ragged is None and parts[0].up is None and loader == "boxes" and parts[0].acc.is_float
        for waves in (1, 2, 3) if may_split and (schedule == "coop" or is_low and tile_n <= 128) else ():
            split = min(waves * device.num_sms // whole.ctas, whole.k_tiles // 4)
            if split > 1:
                grid = plan_grid(parts[0], (tile_m, tile_n, plan.consts.tile_k), split, "n", whole.k_tiles)
                if grid.partial_elements < 2**31:
                    splits.add(grid.splits)
        for split_k in sorted(splits - {1}):
            yield _config(parts[0], schedule, loader, tile_m, tile_n, stages, split_k, promotes)
        if may_split and schedule == "coop" and device.num_sms // MAX_PARTS <= whole.ctas < device.num_sms:
            form = EngineConfig.of(**dict(config.knobs), streams=device.num_sms)
            if not isinstance(_plan(am, form), str) and 4 <= whole.ctas * whole.k_tiles // device.num_sms <= MAX_PART_TILES:
                yield form


def _forms(am: AffineMatmul | MatmulGroup, config: EngineConfig, plan: _Plan, device: DeviceInfo) -> Iterator[EngineConfig]:
    """The config in other forms. Stores put off, where there is a next tile to multiply meanwhile; of wide matrices, B shared by two CTAs,
    or one warpgroup a k tile ahead of the other; a small B that stays."""
    if config["loader"] != "boxes":
        return
    forms: list[dict[str, Any]] = [{"defers": True}] if plan.num_tiles > device.num_sms else []
    if is_wide(plan) and config["schedule"] == "coop" and plan.consts.tile_m * plan.consts.tile_n >= 128 * 128:
        forms += [{"shares": "b"}, {"lead": 1}]
    k_tiles = plan.members[0].walk.k_tiles
    stages = kept_stages(config["schedule"], config["tile_m"], config["tile_n"], k_tiles)
    if stages >= MIN_KEPT_STAGES and plan.num_tiles > 4 * device.num_sms and may_keep(plan, k_tiles):
        forms.append({"stages": stages, "keeps": True})
    for knobs in forms:
        form = EngineConfig.of(**{**dict(config.knobs), **knobs})
        if not isinstance(_plan(am, form), str):
            yield form


def may_keep(plan: _Plan, k_tiles: int) -> bool:
    """Whether a column's B is small, rows of A and D are whole lines of L2, and the tile is one in which keeping B was seen to pay: rows of
    64 in ping-pong cost up to 12 % more than others, windows brought by maps that step through positions 1 to 5."""
    c, (first, boxes) = plan.consts, (plan.members[0].am, plan.members[0].boxes[0])
    if k_tiles * c.tile_n * SPAN_BYTES > MAX_KEPT_BYTES or c.is_ping_pong and c.tile_m == 64 and c.tile_n < 192:
        return False
    is_whole = first.k.size * first.a.dtype.num_bytes % SPAN_BYTES == 0 and first.n.size * first.d.dtype.num_bytes % SPAN_BYTES == 0
    return c.is_direct and is_whole and isinstance(boxes, Boxes) and boxes.map.corners is None


def is_wide(plan: _Plan) -> bool:
    """Whether both operands are plain and of many tiles."""
    first = plan.members[0]
    return plan.consts.halo is None and len(first.walk.extents) == 1 and min(first.am.m.size, first.am.n.size) >= 2048


def halo_stages(am: AffineMatmul | MatmulGroup, schedule: str, tile_m: int, tile_n: int) -> int:
    """Stages of B that fit beside the patches; 0 if fewer than two do, or if there are no patches."""
    plan = _plan(am, EngineConfig.of(schedule=schedule, loader="halo", tile_m=tile_m, tile_n=tile_n, stages=0, split_k=1))
    if isinstance(plan, str):
        return 0
    free = SMEM_BYTES - plan.consts.ring.barriers_at - 2 * BARRIER_BYTES * (MAX_STAGES + HALO_SLOTS)
    stages = min(MAX_STAGES, free // (tile_n * SPAN_BYTES))
    return stages if stages > 1 else 0
