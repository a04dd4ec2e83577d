"""Products of a tall operand with up to 128 columns (decode) on wgmma: weights stream through a ring that fills shared memory; sm_90a.

The tall operand is the side of wgmma that takes 64 rows, whichever side of D it is; k is dealt out to the CTAs of a cluster where rows are
too few to fill the device, and added up through distributed shared memory: one launch, no workspace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..codegen.spec import Target as PtxTarget
from ..device import DeviceInfo
from . import affine_tiling as tiling
from .affine import AffineMatmul
from .affine_tma import SPAN_BYTES, Boxes, BoxesConsts, plan_boxes, walk_linear
from .affine_turned import turned
from .base import Arg, Build, EngineConfig, Step, Support, TensorMapArg, refuse

MAX_COLUMNS = 128
TILE_K = 64
MAX_STAGES = 24
BARRIER_BYTES = 8
GROUP_ROWS = 64  # of a warpgroup


@dataclass(frozen=True, slots=True)
class SkinnyWgmmaConsts:
    """Consts of matmul/skinny_wgmma_sm90. splits: CTAs of a cluster that deal out k. epilogue: of a warpgroup's 64 rows; share: the part of
    them that each CTA of the cluster writes. Of a launch that may start before the one before it has ended: ahead, stages of weights that
    it has L2 fetch until then; is_late, whether it lets the next one start once its own loads are under way rather than at once."""

    kind: str
    tile_m: int
    tile_n: int
    stages: int
    splits: int
    ahead: int
    is_late: bool
    batch_digits: int
    a: BoxesConsts
    b: BoxesConsts
    epilogue: tiling.EpilogueConsts
    share: tiling.EpilogueConsts

    @property
    def tile_k(self) -> int:
        return TILE_K

    @property
    def warpgroups(self) -> int:
        return self.tile_m // GROUP_ROWS

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + self.tile_n) * SPAN_BYTES

    @property
    def barriers_at(self) -> int:
        return max(self.stages * self.stage_bytes, self.warpgroups * self.epilogue.smem_bytes)

    @property
    def smem_bytes(self) -> int:
        return self.barriers_at + 2 * BARRIER_BYTES * self.stages

    @property
    def acc(self) -> list[str]:
        return [f"%acc{i}" for i in range(self.tile_n // 2)]

    @property
    def transposes(self) -> str:
        return f"{int(self.a.major == 'row')}, 0"

    @staticmethod
    def fixed_bits(x: BoxesConsts) -> str:
        """A descriptor but for its address: 128-byte swizzle, 1024 bytes between groups of 8 lines; of lines along rows one chunk."""
        return f"0x{1 << 62 | 1024 >> 4 << 32 | (1 if x.major == 'k' else x.chunk_bytes >> 4) << 16:016X}"

    @staticmethod
    def step_units(x: BoxesConsts) -> int:
        """Descriptor units (16 bytes) from one k step of 16 to the next."""
        return 32 >> 4 if x.major == "k" else 16 * SPAN_BYTES >> 4


@dataclass(frozen=True, slots=True)
class _Plan:
    am: AffineMatmul  # with the weights as A
    consts: SkinnyWgmmaConsts
    digits: tiling.Digits
    boxes: tuple[Boxes, Boxes]
    m_tiles: int
    k_tiles: int
    k_tiles_per_split: int


def _upright(am: AffineMatmul) -> AffineMatmul:
    """The weights, the longer operand, as A."""
    return turned(am) if am.n.size >= am.m.size else am


def _columns(am: AffineMatmul) -> int:
    return max(8, 1 << (min(am.m.size, am.n.size) - 1).bit_length())


@lru_cache(maxsize=256)
def _operands(am: AffineMatmul, tile_m: int) -> tuple[tiling.Digits, Boxes, Boxes] | str:
    """(digits, boxes of the weights, of the columns) of an upright matmul, or why tensor maps cannot fetch them."""
    d = tiling.merged_digits(am)
    if len(d.k) > 1 or len(d.a.rows) > 1 or len(d.b.rows) > 1 or d.a.bounds or d.b.bounds:
        return "skinny_wgmma takes plain matrices: one digit of rows, one of columns, one of k, no padding"
    if d.b.k_strides[-1] != 1 and d.k != (1,):
        return "skinny_wgmma takes columns that lie along k"
    walk = walk_linear(d.k, TILE_K)
    a, b = plan_boxes(d.a, d, walk, tile_m), plan_boxes(d.b, d, walk, _columns(am))
    if isinstance(a, str) or isinstance(b, str):
        return f"skinny_wgmma: {a if isinstance(a, str) else b}"
    if b.major != "k" or a.offsets or b.offsets:
        return "skinny_wgmma takes columns that lie along k"
    return d, a, b


@lru_cache(maxsize=512)
def _plan(am: AffineMatmul, config: EngineConfig) -> _Plan:
    am = _upright(am)
    tile_m, tile_n, splits = config["rows"], _columns(am), config["splits"]
    found = _operands(am, tile_m)
    assert not isinstance(found, str), found
    d, a, b = found
    wide = tiling.needs_wide(d)
    whole = tiling.plan_epilogue(d, am, GROUP_ROWS, tile_n, 128, wide, False)
    rows_m, rows_n = (GROUP_ROWS // splits, tile_n) if whole.inner == "n" else (GROUP_ROWS, tile_n // splits)
    share = tiling.plan_epilogue(d, am, rows_m, rows_n, 128, wide, False)
    knobs = dict(config.knobs)
    consts = SkinnyWgmmaConsts(am.a.dtype.name, tile_m, tile_n, config["stages"], splits, knobs.get("ahead", 0),
                               knobs.get("overlaps") == "late", len(d.batch), a.consts("a", tile_m, 0),
                               b.consts("b", tile_n, tile_m * SPAN_BYTES), whole, share)
    k_tiles = -(-am.k.size // TILE_K)
    return _Plan(am, consts, d, (a, b), -(-am.m.size // tile_m), k_tiles, -(-k_tiles // splits))


class SkinnyWgmmaMatmul:
    """f16 and bf16 products with at most 128 rows or columns on one side, f32 accumulators, on Hopper's asynchronous tensor cores."""

    name = "skinny_wgmma"
    is_deterministic = True
    takes_aux = True

    def check(self, am: AffineMatmul, device: DeviceInfo) -> Support:
        """sm_90a; both operands f16 or both bf16; the shorter side at most 128 and along k; operands that tensor maps can fetch."""
        halves = tiling.check_halves_sm90(self.name, am, device)
        if not halves:
            return halves
        if min(am.m.size, am.n.size) > MAX_COLUMNS:
            return refuse(f"skinny_wgmma takes at most {MAX_COLUMNS} columns, the shorter side is {min(am.m.size, am.n.size)}")
        common = tiling.check_common(am, device)
        if not common or tiling.empty_build(am) is not None:
            return common
        found = _operands(_upright(am), GROUP_ROWS)
        return refuse(found) if isinstance(found, str) else common

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Legal configs, the fastest by estimate first."""
        return _sorted_configs(am, device)

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        plan = _plan(am, config)
        c = plan.consts
        ctas = plan.m_tiles * am.batch.size * c.splits
        if device.is_emulated:  # there a warpgroup's multiplication has no speed of its own: a tile costs what its threads cost
            return 1000.0 * ctas * (plan.k_tiles_per_split + 20.0) * c.warpgroups
        return _estimate_us(plan, ctas, device)

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        empty = tiling.empty_build(am)
        if empty is not None:
            return empty
        plan = _plan(am, config)
        c = plan.consts
        suffix = f"{c.kind}_{c.a.major}_{c.tile_m}x{c.tile_n}"
        return Build((Step.of("matmul/skinny_wgmma_sm90", op, PtxTarget.for_arch(device.arch, (8, 0)), 128 * c.warpgroups + 32,
                              _arguments(plan), c, plan.m_tiles * am.batch.size * c.splits, dynamic_smem=c.smem_bytes, cluster=c.splits,
                              follows=bool(dict(config.knobs).get("overlaps")), suffix=suffix),), workspace_offset)


def _estimate_us(plan: _Plan, ctas: int, device: DeviceInfo) -> float:
    """The slowest of memory, L2, what an SM can take in, and the products; a start, and the exchange of parts of k.

    Fitted to 185 timings on an H100 (four matrices of 29 to 75 MB, 1 to 128 columns).
    """
    c, am = plan.consts, plan.am
    per_sm = max(1, min(device.smem_per_sm // (c.smem_bytes + 1024), 2048 // (128 * c.warpgroups + 32)))
    sms = min(device.num_sms, ctas)
    in_flight = min(per_sm * device.num_sms, ctas) * min(c.stages, plan.k_tiles_per_split) * c.tile_m * SPAN_BYTES
    weights = am.batch.size * am.m.size * am.k.size * 2
    # A ring that leaves no room for a second CTA takes longer to start, and to end.
    memory_us = weights / (device.bandwidth_gbs * 0.96e3) * max(1.0, 40e3 * device.num_sms / in_flight) ** 0.5
    memory_us *= 1.03 if per_sm == 1 else 1.0
    l2_us = weights * (1 + c.tile_n / c.tile_m) / (device.bandwidth_gbs * 2.65e3)
    taken_us = weights * (1 + c.tile_n / c.tile_m) / sms / 118e3
    clocks = c.tile_m * max(c.tile_n, 32) * TILE_K / 2048
    multiply_us = -(-ctas // device.num_sms) * plan.k_tiles_per_split * clocks / 1620
    places = device.num_sms * (per_sm if ctas > per_sm * device.num_sms else 1)  # filled in turn
    rounds = -(-ctas // places) * places / ctas
    uneven_us = 0.05 * memory_us * min(rounds - 1, 1.0)
    exchange_us = 0.5 * (c.splits.bit_length() - 1) + c.tile_m * c.tile_n * 4 / 16e3 if c.splits > 1 else 0.0
    few_us = 1.5 if c.warpgroups > 1 and c.tile_n >= 64 else 0.0  # more of a tile waits for its first and last stage
    return 4.1 + max(memory_us, l2_us, taken_us, multiply_us) + uneven_us + exchange_us + few_us


def _arguments(plan: _Plan) -> list[Arg]:
    c, d, am = plan.consts, plan.digits, plan.am
    t = tiling.Arguments(c.epilogue.wide)
    for boxes, source, loader in zip(plan.boxes, (am.a, am.b), (c.a, c.b), strict=True):
        t.add(loader.map, "tensor_map", TensorMapArg(source.name, boxes.map, boxes.byte_offset))
    t.add("m_tiles", "u32", plan.m_tiles)
    t.divisor("m_tiles", plan.m_tiles)
    t.add("k_tiles", "u32", plan.k_tiles)
    t.add("k_tiles_per_split", "u32", plan.k_tiles_per_split)
    t.space("batch", d.batch)
    for boxes, loader in zip(plan.boxes, (c.a, c.b), strict=True):
        for shape, total in zip(loader.coordinates, boxes.coordinates, strict=True):
            coefficients = dict(total.terms)
            t.add(f"{shape.stem}_base", "s32", total.base)
            for digit, is_one in (*shape.row_terms, *shape.k_terms):
                if not is_one:
                    t.add(f"{shape.stem}_{digit}", "s32", coefficients[digit])
    tiling._target_arguments(t, am, d, c.epilogue)
    return t.args


SKINNY_WGMMA = SkinnyWgmmaMatmul()


@lru_cache(maxsize=256)
def _sorted_configs(am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return tuple(sorted(_candidates(am, device), key=lambda c: SKINNY_WGMMA.estimate(am, c, device)))


def _candidates(am: AffineMatmul, device: DeviceInfo) -> Iterator[EngineConfig]:
    up = _upright(am)
    k_tiles, columns = -(-am.k.size // TILE_K), _columns(am)
    for rows in (64, 128, 192, 256):
        if rows > 64 and (rows >= 2 * up.m.size or isinstance(_operands(up, rows), str)):
            continue
        for splits in (1, 2, 4, 8):
            per_split = -(-k_tiles // splits)
            ctas = -(-up.m.size // rows) * am.batch.size * splits
            # Larger clusters than pairs find no room on many SMs at once.
            most = device.num_sms // (1 if splits == 2 else 2)
            if splits > 1 and ((splits - 1) * per_split >= k_tiles or ctas > most or splits * 2 > columns):
                continue
            depths = set()
            for per_sm in (1, 2, 3):
                room = min(device.smem_per_cta, device.smem_per_sm // per_sm - 1024) - 2 * BARRIER_BYTES * MAX_STAGES
                depths.add(min(MAX_STAGES, per_split, room // ((rows + columns) * SPAN_BYTES)))
            for stages in sorted(depths, reverse=True)[: 1 if device.is_emulated else None]:
                stages = min(stages, 4) if device.is_emulated else stages  # a long ring hides nothing there
                config = EngineConfig.of(rows=rows, stages=stages, splits=splits)
                # A stage is freed while the next is multiplied.
                if (stages > 1 or per_split == 1) and _plan(am, config).consts.smem_bytes <= device.smem_per_cta:
                    yield config
