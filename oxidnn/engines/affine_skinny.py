"""Products of a tall operand with a few columns (decode): weights stream once from memory at its speed, mma.sync does the sums; sm_80 up.

The tall operand ("weights") fills the 16-row side of mma.sync, the narrow one ("columns", at most 64) the 8-column side. The warps of a
CTA share its rows and deal out k, each with a ring of copies of its own, so no barrier stands in the loop; their sums meet in shared
memory, in order. Where rows are too few to fill the device, CTAs of a cluster deal out k too and add through distributed shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ..codegen.spec import Target as PtxTarget
from ..device import DeviceInfo
from . import affine_tiling as tiling
from .affine import AffineMatmul
from .base import Arg, Build, EngineConfig, Step, Support, TensorArg, refuse

MAX_COLUMNS = 64
STEP_K = 64  # of a warp: 128 bytes of a row of weights
CHUNK = 8  # elements of 16 bytes
MAX_STAGES = 12
MAX_REGISTERS_FOR = {128: 255, 256: 255, 512: 128}  # by threads


@dataclass(frozen=True, slots=True)
class SkinnyConsts:
    """Consts of matmul/skinny_mma. major: "k" | "row", the direction along which weights are contiguous; side: "m" | "n", the side of D
    the weights make; rows x columns: the tile; stages: of a warp's ring; splits: CTAs of a cluster that deal out k; in_registers: weights
    are loaded into registers, past L1, only the columns through the ring."""

    kind: str
    major: str
    side: str
    rows: int
    columns: int
    warps: int
    stages: int
    splits: int
    in_registers: bool
    batch_digits: int
    epilogue: tiling.EpilogueConsts
    epilogue_threads: int

    @property
    def step_k(self) -> int:
        return STEP_K

    @property
    def tiles_r(self) -> int:
        """m16 tiles of weights."""
        return self.rows // 16

    @property
    def tiles_c(self) -> int:
        """n8 tiles of columns."""
        return self.columns // 8

    @property
    def depth(self) -> int:
        """Steps under way while one is multiplied."""
        return self.stages - 1

    @property
    def weight_bytes(self) -> int:
        """Of a warp's stage."""
        return 0 if self.in_registers else self.rows * STEP_K * 2

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + self.columns * STEP_K * 2

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def slab_bytes(self) -> int:
        """Of a warp's sums."""
        return self.epilogue.smem_bytes

    @property
    def smem_bytes(self) -> int:
        return self.warps * max(self.ring_bytes, self.slab_bytes)

    @property
    def slab_words(self) -> int:
        return self.slab_bytes // 4

    @property
    def weight_copies(self) -> int:
        """16-byte copies of weights that a lane makes in a step."""
        return self.rows * STEP_K // CHUNK // 32

    @property
    def weight_pointers(self) -> int:
        """Addresses a lane keeps: of its rows where weights lie along k, else of each copy."""
        return 2 * self.tiles_r if self.major == "k" else self.weight_copies

    def fragment(self, set_: int, half: int) -> int:
        """First register of the fragments of half a step; of a set of them if weights are loaded into registers."""
        return (set_ * (STEP_K // 32) + half) * self.tiles_r * 8 if self.in_registers else 0

    @property
    def row_chunks(self) -> int:
        return self.rows // CHUNK

    @property
    def pitches(self) -> tuple[int, int]:
        """Words of shared memory from one row (of weights) to the next, and from one column, in the staged sums."""
        return (1, self.epilogue.pitch) if self.epilogue.inner == self.side else (self.epilogue.pitch, 1)

    def acc(self, i: int, j: int) -> list[str]:
        first = (i * self.tiles_c + j) * 4
        return [f"%acc{first + e}" for e in range(4)]


@dataclass(frozen=True, slots=True)
class _Plan:
    consts: SkinnyConsts
    digits: tiling.Digits
    row_tiles: int
    rounds: int  # of a warp's loop


def _side(am: AffineMatmul) -> str:
    """The side of D that the weights make: the longer one."""
    return "n" if am.n.size >= am.m.size else "m"


@lru_cache(maxsize=256)
def _operands(am: AffineMatmul) -> tuple[tiling.Digits, tiling.Operand, tiling.Operand, str] | str:
    """(digits, weights, columns, how the weights lie), or why the engine does not take them."""
    d = tiling.merged_digits(am)
    weights, columns = (d.b, d.a) if _side(am) == "n" else (d.a, d.b)
    count = columns.rows[0] if len(columns.rows) == 1 else 0
    if count > MAX_COLUMNS or len(columns.rows) > 1:
        return f"skinny_mma takes one dimension of at most {MAX_COLUMNS} columns, not {min(am.m.size, am.n.size)} in {len(columns.rows)}"
    if len(weights.rows) > 1 or len(d.k) > 1 or d.a.bounds or d.b.bounds:
        return "skinny_mma takes plain matrices: one digit of rows, one of k, no padding"
    along_k = tiling.widest_vector(columns, d.k, d.batch, "k")
    if along_k.width < CHUNK:
        return f"skinny_mma loads columns in 16 bytes along k ({along_k.reason})"
    k, row = (tiling.widest_vector(weights, d.k, d.batch, major) for major in ("k", "row"))
    if max(k.width, row.width) < CHUNK:
        return f"skinny_mma loads weights in 16 bytes along k ({k.reason}) or along rows ({row.reason})"
    return d, weights, columns, "k" if k.width >= CHUNK else "row"


@lru_cache(maxsize=512)
def _plan(am: AffineMatmul, config: EngineConfig) -> _Plan:
    found = _operands(am)
    assert not isinstance(found, str), found
    d, weights, columns, major = found
    side, rows = _side(am), config["rows"]
    count = max(8, 1 << (columns.rows[0] - 1).bit_length())
    tile_m, tile_n = (rows, count) if side == "m" else (count, rows)
    threads = min(32 * config["warps"], rows * count)
    epilogue = tiling.plan_epilogue(d, am, tile_m, tile_n, threads, tiling.needs_wide(d), False)
    epilogue = replace(epilogue, pitch=epilogue.tile_inner)  # no gaps: all words of a slab are added
    consts = SkinnyConsts(am.a.dtype.name, major, side, rows, count, config["warps"], config["stages"], config["splits"],
                          config["weights"] == "registers", len(d.batch), epilogue, threads)
    steps_a_round = consts.depth if consts.in_registers else 1
    rounds = -(-am.k.size // (STEP_K * consts.warps * consts.splits * steps_a_round))
    return _Plan(consts, d, -(-weights.rows[0] // rows), rounds)


def _registers_needed(c: SkinnyConsts) -> int:
    # Sets are copied while they wait for their loads.
    fragments = 8 * c.tiles_r * (c.depth * STEP_K // 32 * 7 // 4 if c.in_registers else 1)
    return c.tiles_r * c.tiles_c * 4 + fragments + 4 * c.tiles_c + 2 * (2 * c.tiles_r + c.tiles_c) + 30


class SkinnyMmaMatmul:
    """f16 and bf16 products with at most 64 rows or columns on one side, f32 accumulators."""

    name = "skinny_mma"
    is_deterministic = True
    takes_aux = True

    def check(self, am: AffineMatmul, device: DeviceInfo) -> Support:
        """Both operands f16 or both bf16; the shorter side at most 64; 16-byte vectors along k of the narrow operand, along either
        direction of the other."""
        if not device.at_least(8):
            return refuse(f"skinny_mma needs compute capability 8.0, the device has {device.capability[0]}.{device.capability[1]}")
        kinds = {am.a.dtype.name, am.b.dtype.name}
        if len(kinds) != 1 or not kinds <= {"f16", "bf16"} or am.acc.name != "f32":
            return refuse(f"skinny_mma multiplies f16 or bf16 pairs in f32, not {am.a.dtype} x {am.b.dtype} in {am.acc}")
        if min(am.m.size, am.n.size) > MAX_COLUMNS:
            return refuse(f"skinny_mma takes at most {MAX_COLUMNS} columns, the shorter side is {min(am.m.size, am.n.size)}")
        common = tiling.check_common(am, device)
        if not common or tiling.empty_build(am) is not None:
            return common
        found = _operands(am)
        return refuse(found) if isinstance(found, str) else common

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Legal configs, the fastest by estimate first."""
        return _sorted_configs(am, device)

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        plan = _plan(am, config)
        c = plan.consts
        ctas = plan.row_tiles * am.batch.size * c.splits
        if device.is_emulated:  # an instruction costs about 4 us per batch of 16384 threads and 2 ns per thread, an mma 0.2 us per warp
            warps = ctas * c.warps
            mmas = c.tiles_r * c.tiles_c * STEP_K // 16
            plain = plan.rounds * (60 + 3 * (c.weight_copies + 2 * c.tiles_c) + mmas) + 900
            return plain * (4.0 * -(-warps // 512) + 0.064 * warps) + mmas * plan.rounds * warps * 0.2
        return _estimate_us(am, plan, ctas, device)

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        empty = tiling.empty_build(am)
        if empty is not None:
            return empty
        plan = _plan(am, config)
        c = plan.consts
        target = PtxTarget.for_arch(device.arch, (7, 8) if c.splits > 1 else (7, 4))
        suffix = f"{c.kind}_{c.major}_{c.rows}x{c.columns}"
        return Build((Step.of("matmul/skinny_mma", op, target, 32 * c.warps, _arguments(am, plan), c,
                              plan.row_tiles * am.batch.size * c.splits, dynamic_smem=c.smem_bytes, cluster=c.splits, suffix=suffix),),
                     workspace_offset)


def _estimate_us(am: AffineMatmul, plan: _Plan, ctas: int, device: DeviceInfo) -> float:
    """The weights at the memory's speed, once launched; more where few bytes are in flight, columns outweigh rows or a cluster adds.

    Fitted to timings on an H100 (four shapes of weights of 29 to 75 MB, 1 to 64 columns, either way the weights lie).
    """
    c = plan.consts
    per_sm = max(1, min(device.smem_per_sm // (c.smem_bytes + 1024), 2048 // (32 * c.warps),
                        65536 // (32 * c.warps * (_registers_needed(c) + 8))))
    resident = min(per_sm * device.num_sms, ctas)
    in_flight = resident * c.warps * min(c.depth, -(-am.k.size // (STEP_K * c.warps * c.splits))) * c.rows * STEP_K * 2
    weights = am.batch.size * max(am.m.size, am.n.size) * am.k.size * 2
    memory_us = weights / (device.bandwidth_gbs * 1e3)
    share = in_flight / (64e3 * device.num_sms)
    starved = max(1.0, 1 / share) ** 0.5 + 0.02 * max(0.0, share - 1.2)
    l2_us = weights * (1 + min(am.m.size, am.n.size) / c.rows) / (device.num_sms * 38e3)
    # Lines of 128 bytes of each k want 64 rows, if they make tiles enough; lines along k want more CTAs of fewer rows.
    best_rows = (32,) if c.major == "k" else (64,) if ctas * c.rows >= 128 * device.num_sms * c.splits else (32, 64)
    unfit = 0.0 if c.rows in best_rows else 0.03 if c.major == "k" and c.rows == 16 else 0.1 if c.rows > 16 else 0.2
    return (5.0 + max(memory_us * starved, l2_us) + 0.1 * min(memory_us, l2_us) + unfit * memory_us
            + 1.5 * (c.splits.bit_length() - 1) + 0.03 * c.warps)


def _arguments(am: AffineMatmul, plan: _Plan) -> list[Arg]:
    c, d = plan.consts, plan.digits
    weights, columns = (d.b, d.a) if c.side == "n" else (d.a, d.b)
    t = tiling.Arguments(c.epilogue.wide)
    t.add("row_tiles", "u32", plan.row_tiles)
    t.divisor("row_tiles", plan.row_tiles)
    t.space("batch", d.batch)
    t.add("rounds", "u32", plan.rounds)
    t.add("k_size", "u32", am.k.size)
    for name, x in (("w", weights), ("x", columns)):
        size = x.source.dtype.num_bytes
        t.add(f"ptr_{name}", "u64", TensorArg(x.source.name, x.source.base * size))
        t.add(f"{name}_size", "u32", x.rows[0])
        t.add(f"{name}_row_bytes", "s64", x.row_strides[0] * size)
        t.add(f"{name}_k_bytes", "s64", x.k_strides[0] * size)
        for i, stride in enumerate(x.batch_strides):
            t.add(f"{name}_batch_bytes{i}", "s64", stride * size)
    tiling._target_arguments(t, am, d, c.epilogue)
    return t.args


SKINNY_MMA = SkinnyMmaMatmul()


@lru_cache(maxsize=256)
def _sorted_configs(am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return tuple(sorted(_candidates(am, device), key=lambda c: SKINNY_MMA.estimate(am, c, device)))


def _candidates(am: AffineMatmul, device: DeviceInfo) -> Iterator[EngineConfig]:
    long = max(am.m.size, am.n.size)
    k_steps = -(-am.k.size // STEP_K)
    for rows in (16, 32, 64):
        if rows > 16 and rows >= 2 * long:
            continue
        for warps in (4, 8, 16):
            if warps > 4 and warps >= 2 * k_steps:
                continue
            for splits in (1, 2, 4) if device.at_least(9) else (1,):
                if splits > 1 and (warps * splits > k_steps or -(-long // rows) * am.batch.size * splits > 8 * device.num_sms):
                    continue
                steps = -(-k_steps // (warps * splits))
                for weights in ("registers", "ring"):
                    for stages in _depths(am, rows, warps, splits, weights, device, steps):
                        yield EngineConfig.of(rows=rows, warps=warps, stages=stages, splits=splits, weights=weights)


def _depths(am: AffineMatmul, rows: int, warps: int, splits: int, weights: str, device: DeviceInfo, steps: int) -> tuple[int, ...]:
    """Stages of the rings that leave room for one, two or three CTAs on an SM; in registers those that waste few steps."""
    def consts(stages: int) -> SkinnyConsts:
        return _plan(am, EngineConfig.of(rows=rows, warps=warps, stages=stages, splits=splits, weights=weights)).consts

    def fits(stages: int, per_sm: int) -> bool:
        c = consts(stages)
        room = min(device.smem_per_cta, device.smem_per_sm // per_sm - 1024)
        return _registers_needed(c) <= MAX_REGISTERS_FOR[32 * warps] - 24 and c.smem_bytes <= room

    if weights == "registers":
        if consts(2).major != "k" or consts(2).columns > 32:
            return ()
        depths = {d for d in (2, 3, 4, 5, 6, 7, 8) if d <= steps and -(-steps // d) * d - steps <= steps // 8 and fits(d + 1, 1)}
        return tuple(d + 1 for d in (sorted(depths)[:1] if device.is_emulated else sorted(depths)[-2:]))
    if device.is_emulated:
        return (2,) if fits(2, 1) else ()
    return tuple(sorted({next((s for s in range(min(MAX_STAGES, steps + 1), 1, -1) if fits(s, per_sm)), 0) for per_sm in (1, 2, 3)} - {0}))
