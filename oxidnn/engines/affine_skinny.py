"""Products of a tall operand with a few columns (decode): weights stream once from memory at its speed, mma.sync does the sums; sm_80 up.

The tall operand ("weights") fills the 16-row side of mma.sync, the narrow one ("columns", at most 64) the 8-column side. The warps of a
CTA share its rows and deal out k, each with a ring of copies of its own, so no barrier stands in the loop; their sums meet in shared
memory, in order. Where rows are too few to fill the device, CTAs of a cluster deal out k too and add through distributed shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

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
    the weights make; rows x columns: the tile; splits: CTAs of a cluster that deal out k."""

    kind: str
    major: str
    side: str
    rows: int
    columns: int
    warps: int
    stages: int
    splits: int
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
    def weight_bytes(self) -> int:
        """Of a warp's stage."""
        return self.rows * STEP_K * 2

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
    steps: int  # of a warp


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
    consts = SkinnyConsts(am.a.dtype.name, major, side, rows, count, config["warps"], config["stages"], config["splits"], len(d.batch),
                          epilogue, threads)
    steps = -(-am.k.size // (STEP_K * consts.warps * consts.splits))
    return _Plan(consts, d, -(-weights.rows[0] // rows), steps)


def _registers_needed(c: SkinnyConsts) -> int:
    return c.tiles_r * c.tiles_c * 4 + 8 * c.tiles_r + 4 * c.tiles_c + 2 * (2 * c.tiles_r + c.tiles_c) + 30


class SkinnyMmaMatmul:
    """f16 and bf16 products with at most 64 rows or columns on one side, f32 accumulators."""

    name = "skinny_mma"
    is_deterministic = True

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
            plain = plan.steps * (60 + 3 * (c.weight_copies + 2 * c.tiles_c) + mmas) + 900
            return plain * (4.0 * -(-warps // 512) + 0.064 * warps) + mmas * plan.steps * warps * 0.2
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
    """Launch and first loads, then the traffic: weights from memory, columns once per row tile from L2, slower with few bytes in flight."""
    c = plan.consts
    per_sm = max(1, min(device.smem_per_sm // (c.smem_bytes + 1024), 2048 // (32 * c.warps),
                        65536 // (32 * c.warps * (_registers_needed(c) + 8))))
    resident = min(per_sm * device.num_sms, ctas)
    in_flight = resident * c.warps * min(c.stages - 1, plan.steps) * c.weight_bytes
    weights = am.batch.size * max(am.m.size, am.n.size) * am.k.size * 2
    used_columns = min(am.m.size, am.n.size)
    traffic = weights * (1 + used_columns / c.rows)
    memory_us = weights / (device.bandwidth_gbs * 1e3 * min(1.0, in_flight / 4e6))
    l2_us = traffic / (device.bandwidth_gbs * 1.8e3)
    waves = ctas / resident
    return 3.5 + max(memory_us, l2_us) + 0.25 * min(memory_us, l2_us) + 0.4 * (waves - 1) + (0.8 if c.splits > 1 else 0.0)


def _arguments(am: AffineMatmul, plan: _Plan) -> list[Arg]:
    c, d = plan.consts, plan.digits
    weights, columns = (d.b, d.a) if c.side == "n" else (d.a, d.b)
    t = tiling.Arguments(c.epilogue.wide)
    t.add("row_tiles", "u32", plan.row_tiles)
    t.divisor("row_tiles", plan.row_tiles)
    t.space("batch", d.batch)
    t.add("steps", "u32", plan.steps)
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
                for stages in _depths(am, rows, warps, splits, device, steps):
                    yield EngineConfig.of(rows=rows, warps=warps, stages=stages, splits=splits)


def _depths(am: AffineMatmul, rows: int, warps: int, splits: int, device: DeviceInfo, steps: int) -> Any:
    """Depths of the rings that leave room for one, two or three CTAs on an SM."""
    depths = set()
    consts = _plan(am, EngineConfig.of(rows=rows, warps=warps, stages=2, splits=splits)).consts
    if _registers_needed(consts) > MAX_REGISTERS_FOR[32 * warps] - 16:
        return ()
    if device.is_emulated:
        return (2,) if consts.smem_bytes <= device.smem_per_cta else ()
    for per_sm in (1, 2, 3):
        room = min(device.smem_per_cta, device.smem_per_sm // per_sm - 1024)
        depth = min(room // (warps * consts.stage_bytes), MAX_STAGES, steps + 1)
        if depth >= 2 and warps * max(consts.slab_bytes, depth * consts.stage_bytes) <= room:
            depths.add(depth)
    return tuple(sorted(depths))
