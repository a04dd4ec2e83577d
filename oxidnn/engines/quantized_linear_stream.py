"""Linear layers of quantised weights and at most 16 rows of x: boxes of 16 rows of codes stream through rings of the warps' own by tensor
copies, become 16-bit numbers on their way to mma.sync, exactly; scales multiply the f32 sums of their groups. sm_90 up.

x stays in shared memory. A team of warps deals out k of a tile of 16 rows and takes tiles in turn; its copies run ahead across tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from ..codegen.spec import Target as PtxTarget
from ..codegen.spec import TensorMapSpec
from ..device import DeviceInfo
from ..dtypes import F16
from ..ops.base import Problem
from ..ops.quantized_linear import NF4, NIBBLES, QuantizedLinearProblem
from . import affine_tiling as tiling
from .affine import AffineMatmul
from .base import Build, Engine, EngineConfig, Step, Support, TensorArg, TensorMapArg, refuse
from .digits import ceil_div
from .quantized_linear_loops import add_factors, check_vectors, lower, with_columns_ordered

MAX_ROWS = 16
TILE = 16  # rows of W
BOX_BYTES = 128  # of a row that a box has
TABLE_COPIES = 32  # of the pairs of nf4 numbers: a bank for each lane
# Warps of a team, teams, CTAs of an SM.
_SHAPES = ((4, 4, 1), (4, 2, 2), (8, 2, 1), (8, 1, 2), (16, 1, 1), (2, 8, 1), (1, 16, 1), (2, 4, 2), (4, 2, 1), (8, 1, 1), (4, 1, 2),
           (4, 1, 4))
_RINGS = ((1, 2), (1, 3), (1, 4), (1, 6), (2, 2), (2, 3), (2, 4), (4, 2), (4, 3))  # boxes, stages


@dataclass(frozen=True, slots=True)
class FactorConsts:
    """Factors of a row and a round: `count` of `size` bytes, per_load side by side at a time."""

    count: int
    size: int
    per_load: int

    @property
    def loads(self) -> int:
        return self.count // self.per_load

    @property
    def load_registers(self) -> int:
        return max(1, self.per_load * self.size // 4)

    @property
    def registers(self) -> int:
        return self.loads * self.load_registers

    @property
    def ptx(self) -> str:
        num_bytes = self.per_load * self.size
        return {1: "u8", 2: "u16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}[num_bytes]

    def place(self, factor: int) -> tuple[int, int]:
        """(register, byte in there) of a factor."""
        byte = factor % self.per_load * self.size
        return factor // self.per_load * self.load_registers + byte // 4, byte % 4


NO_FACTORS = FactorConsts(1, 1, 1)


@dataclass(frozen=True, slots=True)
class QuantizedStreamConsts:
    """Consts of quantized_linear/stream_sm90. dtype: of x; bits: of a code; columns: rows of x, `areas` of them there; warps: of a team;
    splits: that deal out k, whose sums a second launch adds; boxes: of a stage, along k; lane_bytes: of a row that a lane reads at once;
    flush_blocks: blocks of 8 numbers of a lane of which a group's sums are made; group_size: 0 where scales do not change along k;
    scale_group, zero_group: bytes from a group's to the next; scales, zeros: of a row and a stage; zero: PTX type of zero points, ""
    without; staged: columns whose sums meet in shared memory; bare: codes are multiplied as they are, of one row (a warp's lanes have the x
    of a group's sums); unroll: pieces of x that a thread loads before it stores any."""

    kind: str
    dtype: str
    bits: int
    columns: int
    areas: int
    warps: int
    teams: int
    splits: int
    boxes: int
    stages: int
    lane_bytes: int
    flush_blocks: int
    group_size: int
    scale_group: int
    zero_group: int
    scales: FactorConsts
    zeros: FactorConsts
    zero: str
    scale: str
    table: tuple[float, ...]
    epilogue: tiling.EpilogueConsts
    epilogue_threads: int
    staged: int
    bare: bool
    unroll: int
    native_fp8: bool = True

    @property
    def grouped(self) -> bool:
        return self.group_size > 0

    @property
    def exchanges(self) -> bool:
        """Codes come out of a word as numbers 0 and 4, 1 and 5, ..."""
        return self.kind in ("s4", "u4")

    @property
    def tiles_c(self) -> int:
        return self.columns // 8

    @property
    def chunk_bytes(self) -> int:
        """Of a row and a stage."""
        return self.boxes * BOX_BYTES

    @property
    def chunk_k(self) -> int:
        return self.chunk_bytes * 8 // self.bits

    @property
    def step_k(self) -> int:
        """From a warp's stage to its next."""
        return self.warps * self.chunk_k

    @property
    def segments(self) -> int:
        """Loads of a lane that make up a box's row."""
        return BOX_BYTES // (4 * self.lane_bytes)

    @property
    def segment_blocks(self) -> int:
        return self.lane_bytes // self.bits

    @property
    def rotation(self) -> int:
        """Row i of mma.sync and of its upper half is row i of the tile's eight, its bits rotated so that lanes that read together meet
        different banks."""
        return {16: 1, 8: 2, 4: 0}[self.lane_bytes]

    @property
    def box_bytes(self) -> int:
        return TILE * BOX_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.boxes * self.box_bytes

    @property
    def copies(self) -> int:
        return TABLE_COPIES

    @property
    def table_pitch(self) -> int:
        return 4 * TABLE_COPIES

    @property
    def slab_bytes(self) -> int:
        """Of a warp's sums."""
        return self.epilogue.smem_bytes

    @property
    def pitches(self) -> tuple[int, int]:
        """Words of shared memory from one row (of W) to the next, and from one column, in the staged sums."""
        return (1, self.epilogue.pitch) if self.epilogue.inner == "n" else (self.epilogue.pitch, 1)

    @property
    def table_at(self) -> int:
        """Shared memory: rings of all warps, the table of pairs, sums (of each team two sets of its warps'), barriers, x."""
        return self.teams * self.warps * self.stages * self.stage_bytes

    @property
    def sums_at(self) -> int:
        return self.table_at + (256 * self.table_pitch if self.kind == "nf4" else 0)

    @property
    def barriers_at(self) -> int:
        return self.sums_at + 2 * self.teams * self.warps * self.slab_bytes

    @property
    def x_at(self) -> int:
        return ceil_div(self.barriers_at + 8 * self.teams * self.warps * self.stages, 128) * 128

    @property
    def unit_k(self) -> int:
        """k's whose sums are scaled together."""
        return 32 * self.flush_blocks

    @property
    def begin_factor(self) -> float:
        """Of the sum of x over them, where the sum of unsigned codes begins: times the row's zero point, if it has one."""
        return -(2.0**-24) * (1 if self.zero else 8 if self.kind == "s4" else 0)

    def group_of(self, block: int) -> int:
        """Of a block of a stage."""
        return block * 32 // self.group_size

    def sums(self, stem: str, j: int) -> list[str]:
        return [f"%{stem}{4 * j + e}" for e in range(4)]


@dataclass(frozen=True, slots=True)
class _Plan:
    consts: QuantizedStreamConsts
    am: AffineMatmul
    digits: tiling.Digits
    tiles: int
    rounds: int  # of a warp, for a tile
    ctas: int  # of a split
    per_sm: int

    @property
    def padded_k(self) -> int:
        return self.rounds * self.consts.step_k

    @property
    def x_pitch(self) -> int:
        """Bytes from one row of x to the next: half a turn through the banks."""
        return 2 * self.padded_k + 64

    @property
    def smem_bytes(self) -> int:
        c = self.consts
        return c.x_at + c.areas * self.x_pitch + (self.padded_k // c.unit_k * 4 if c.bare else 0)

    @property
    def grid(self) -> tiling.Grid:
        """Of partial sums, by split."""
        c, inner = self.consts, self.consts.epilogue.inner
        sizes = {"m": c.columns, "n": TILE * self.tiles}
        return tiling.Grid(1, self.tiles, 1, c.splits, 0, 0, 1, padded_inner=sizes[inner],
                           outer_size={"m": self.am.m.size, "n": self.am.n.size}["m" if inner == "n" else "n"])

    @property
    def turns(self) -> int:
        """Tiles of the busiest team."""
        return ceil_div(self.tiles, self.ctas * self.consts.teams)


@lru_cache(maxsize=1024)
def _plan(p: QuantizedLinearProblem, config: EngineConfig, device: DeviceInfo) -> _Plan:
    am = lower(p)
    d = tiling.merged_digits(am)
    bits, columns = 4 if p.kind in NIBBLES else 8, 8 if p.rows <= 8 else 16
    warps, teams, per_sm, splits, boxes = (config[name] for name in ("warps", "teams", "ctas", "splits", "boxes"))
    staged = 1 << (p.rows - 1).bit_length()
    threads = min(32 * warps, TILE * staged)
    epilogue = tiling.plan_epilogue(d, am, staged, TILE, threads, tiling.needs_wide(d), splits > 1)
    epilogue = replace(epilogue, pitch=epilogue.tile_inner)  # no gaps: all words of a slab are added
    has_zero, grouped = p.has("zero_point"), p.groups > 1
    chunk_k = boxes * BOX_BYTES * 8 // bits
    groups = max(1, chunk_k // p.group_size) if grouped else 1
    unit_k, step_k = min(chunk_k, p.group_size), warps * chunk_k
    rounds = ceil_div(p.k, step_k * splits)
    consts = QuantizedStreamConsts(
        p.kind, p.desc("x").dtype.name, bits, columns, p.rows, warps, teams, splits, boxes, config["stages"], _lane_bytes(p),
        unit_k // 32, p.group_size if grouped else 0,
        p.grid_strides("scale")[1] * p.desc("scale").dtype.num_bytes, p.grid_strides("zero_point")[1] if has_zero else 0,
        _factors(p, "scale", groups) if grouped else NO_FACTORS, _factors(p, "zero_point", groups) if has_zero else NO_FACTORS,
        p.desc("zero_point").dtype.name if has_zero else "", p.desc("scale").dtype.name,
        tuple(map(float, NF4)) if p.kind == "nf4" else (), epilogue, threads, staged,
        grouped and p.kind in ("s4", "u4") and p.rows == splits == 1 and p.desc("x").dtype is F16 and unit_k <= 256,
        min(2 if p.rows == 1 else 8, ceil_div(p.rows * rounds * step_k // 8, 32 * warps * teams)))
    tiles = ceil_div(p.n, TILE)
    places = max(1, per_sm * device.num_sms // splits)
    return _Plan(consts, am, d, tiles, rounds, min(tiles, places), per_sm)


def _factors(p: QuantizedLinearProblem, name: str, count: int) -> FactorConsts:
    """How `count` factors of a row are loaded, of which every load begins at a multiple of its bytes and ends within the row."""
    desc = p.desc(name)
    size = desc.dtype.num_bytes
    row, group = p.grid_strides(name)
    per_load = 1
    while group == 1 and per_load * 2 * size <= 16:
        wider = per_load * 2
        if count % wider or p.groups % wider or (p.n > 1 and row % wider) or desc.align % (wider * size):
            break
        per_load = wider
    return FactorConsts(count, size, per_load)


def _lane_bytes(p: QuantizedLinearProblem) -> int:
    """16, or less where a quad would load numbers of several groups together."""
    bits = 4 if p.kind in NIBBLES else 8
    if p.groups == 1:
        return 16
    return next(n for n in (16, 8, 4) if p.group_size % (4 * n * 8 // bits) == 0)


class QuantizedLinearStream(Engine):
    """f16 and bf16 x of at most 16 rows that fit in shared memory."""

    id = "quantized_linear.stream_sm90"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        """Codes by tensor copies along k: rows at multiples of 16 bytes; groups that stages are made of, or that are made of stages."""
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        if not device.at_least(9):
            return refuse(f"tensor copies need compute capability 9.0, the device has {device.capability[0]}.{device.capability[1]}")
        if p.rows > MAX_ROWS:
            return refuse(f"the stream takes at most {MAX_ROWS} rows of x, not {p.rows}")
        support = check_vectors(p, "stream")
        if not support:
            return support
        w = p.desc("w")
        if p.n > 1 and w.strides[0] < 0:
            return refuse(f"the stream copies rows in the order of memory; w is {w}")
        if max(p.n, p.k, p.n * p.groups) >= 2**31 - 2**20:
            return refuse(f"weights of {p.n} x {p.k} are too many for a launch")
        common = tiling.check_common(lower(p), device)
        if not common or self.configs(p, device):
            return common
        return refuse(f"{p.rows} rows of x of {p.k} do not fit in shared memory, or no stage has whole groups of {p.group_size}")

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Legal configs, the fastest by estimate first."""
        assert isinstance(problem, QuantizedLinearProblem)
        return _sorted_configs(problem, device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        plan = _plan(p, config, device)
        c = plan.consts
        if device.is_emulated:
            warps = plan.ctas * c.warps * c.teams
            plain = plan.turns * (plan.rounds * (200 + 60 * c.chunk_k // 32) + 300) + 900
            return plain * (4.0 * -(-warps // 512) + 0.064 * warps)
        return (3.0 if p.has("permutation") else 0.0) + _estimate_us(p, plan, device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        plan = _plan(p, config, device)
        c = plan.consts
        suffix = f"{c.kind}_{c.dtype}_{c.columns}{'_grouped' if c.grouped else ''}{'_zero' if c.zero else ''}"
        step = Step.of("quantized_linear/stream_sm90", p.op, PtxTarget.for_arch(device.arch, (8, 0)), 32 * c.warps * c.teams,
                       _arguments(p, plan), c, plan.ctas * c.splits, dynamic_smem=plan.smem_bytes, min_ctas_per_sm=plan.per_sm,
                       follows=True, suffix=suffix)
        if c.splits == 1:
            return with_columns_ordered(p, step, device)
        grid = plan.grid
        adds = tiling.reduce_step(p.op, plan.am, plan.digits, grid, c.epilogue, step.spec.target, c.epilogue.wide, 0)
        return Build((step, adds), grid.splits * grid.outer_size * grid.padded_inner * 4)


def _estimate_us(p: QuantizedLinearProblem, plan: _Plan, device: DeviceInfo) -> float:
    """The codes at the memory's speed, slower where few bytes are under way, and what the busiest SM issues and reads from shared memory,
    of which the longer shows almost alone; x, the first copies, a second launch. Fitted to timings on an H200 (four matrices; one, eight
    and sixteen rows; s4, nf4, s8, e4m3)."""
    c = plan.consts
    busiest = ceil_div(plan.ctas * c.splits, device.num_sms)  # CTAs of an SM
    warps = c.warps * c.teams * min(plan.per_sm, busiest)
    memory_us = (p.desc("w").num_bytes + p.desc("scale").num_bytes) / (device.bandwidth_gbs * 1.1e3)
    memory_us *= max(1.0, 40e3 / (warps * (c.stages - 1) * c.stage_bytes)) ** 0.08
    # Instructions of a warp for a block of 32 k, and times that it reads shared memory.
    numbers: float = {"s4": 20, "u4": 20, "nf4": 26, "s8": 20, "e4m3": 14}[c.kind] - 8 * c.bare
    numbers += {"s8": 32, "e4m3": 24}.get(c.kind, 6) if c.dtype == "bf16" else 0
    block = numbers + 3 * c.tiles_c + 1 + (4 * c.tiles_c + 6) / c.flush_blocks * c.grouped
    reads = (8 if c.kind == "nf4" else 0) + c.bits / 2 + c.tiles_c * (1 if c.areas == 1 else 4)
    blocks = plan.turns * plan.rounds * c.chunk_k / 32  # of a warp
    instructions = blocks * block + plan.turns * (plan.rounds * (40 + 15 * c.boxes) + 230)
    all_warps = busiest * c.teams * c.warps
    waves = busiest / min(busiest, plan.per_sm)
    issue_us = max(0.24 * all_warps, 2.8 * waves, 36 * waves / (c.teams * c.warps)) * instructions / 1700
    busy_us = (memory_us**6 + (issue_us + 0.67 * all_warps * blocks * reads / 1700) ** 6) ** (1 / 6)
    x_us = busiest * c.areas * plan.padded_k / 29e3
    return 5.1 + busy_us + x_us + warps * (0.05 + 0.025 * (c.stages - 1) * c.boxes) + 1.8 * (c.splits > 1) + 0.02 * c.teams


def _arguments(p: QuantizedLinearProblem, plan: _Plan) -> list:
    c, d = plan.consts, plan.digits
    w = p.desc("w")
    t = tiling.Arguments(c.epilogue.wide)
    stride = w.strides[0] if p.n > 1 else -(-w.shape[1] // 16) * 16
    boxes = TensorMapSpec("u8", (w.shape[1], p.n), (stride,), (BOX_BYTES, TILE), swizzle=BOX_BYTES)
    t.add("map_w", "tensor_map", TensorMapArg("w", boxes))
    t.add("tiles", "u32", plan.tiles)
    t.add("rounds", "u32", plan.rounds)
    t.add("num_ctas", "u32", plan.ctas)
    t.add("ptr_x", "u64", TensorArg("x"))
    t.add("x_row_bytes", "s64", d.a.row_strides[0] * 2)
    t.add("k_size", "u32", p.k)
    t.add("pieces", "u32", plan.padded_k // 8)
    t.divisor("pieces", plan.padded_k // 8)
    t.add("x_pitch", "u32", plan.x_pitch)
    t.add("w_size", "u32", p.n)
    add_factors(t, p, c.grouped, c.zero, any_group=False)
    if c.splits > 1:
        tiling._partial_arguments(t, plan.grid, plan.am, c.epilogue, 0)
    else:
        tiling._target_arguments(t, plan.am, d, c.epilogue)
    return t.args


STREAM = QuantizedLinearStream()


@lru_cache(maxsize=256)
def _sorted_configs(p: QuantizedLinearProblem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return tuple(sorted(_candidates(p, device), key=lambda c: STREAM.estimate(p, c, device)))


def _candidates(p: QuantizedLinearProblem, device: DeviceInfo) -> Iterator[EngineConfig]:
    bits = 4 if p.kind in NIBBLES else 8
    rings = ((1, 3), (2, 2)) if device.is_emulated else _RINGS
    for (warps, teams, ctas), (boxes, stages), splits in product(_SHAPES, rings, (1, 2, 3, 4)):
        chunk_k = boxes * BOX_BYTES * 8 // bits
        if p.groups > 1 and chunk_k % p.group_size and p.group_size % chunk_k:
            continue
        if splits > 1 and (p.rows <= 4 or p.k < 2048 * splits or p.has("permutation")):
            continue
        if warps * boxes > 4 and warps * chunk_k * splits >= 2 * p.k:
            continue
        config = EngineConfig.of(warps=warps, teams=teams, ctas=ctas, splits=splits, boxes=boxes, stages=stages)
        plan = _plan(p, config, device)
        if teams > 1 and plan.ctas * (teams - 1) >= plan.tiles:  # teams without work
            continue
        if plan.smem_bytes <= min(device.smem_per_cta, device.smem_per_sm // ctas - 1024):
            yield config


ENGINES: dict[str, tuple[Engine, ...]] = {"quantized_linear": (STREAM,)}
