"""Linear layers of quantised weights and few rows of x (decode): weights stream once from memory as they are stored, become 16-bit
numbers in registers, exactly, and are multiplied by mma.sync; scales multiply the f32 sums of their groups. sm_80 up.

The loop of skinny_mma: weights on the 16-row side, at most 64 rows of x on the 8-column side; the warps of a CTA share its rows and deal
out k, each with a ring of its own; where rows are too few to fill the device, CTAs of a cluster deal out k too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ..codegen.spec import Target as PtxTarget
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.quantized_linear import NF4, NIBBLES, QuantizedLinearProblem
from . import affine_tiling as tiling
from .affine import AffineMatmul
from .base import Build, Engine, EngineConfig, Step, Support, TensorArg, refuse
from .quantized_linear_loops import add_factors, check_vectors, lower, with_columns_ordered

MAX_COLUMNS = 64
BLOCK_K = 32  # numbers of a row that a quad of lanes takes at a time, 8 each
MAX_STAGES = 10
MAX_REGISTERS_FOR = {128: 255, 256: 255, 512: 128}  # by threads
TABLE_COPIES = 16  # of the pairs of nf4 numbers, so that few lanes meet in a bank
UNROLL = 8


@dataclass(frozen=True, slots=True)
class QuantizedSkinnyConsts:
    """Consts of quantized_linear/skinny. dtype: of x; bits: of a code; rows x columns: the tile; blocks: of 32 k in a step; flush_blocks:
    of which a group's sums are made, or parts of a group; grouped: scales change along k; zero: PTX type of zero points, "" without."""

    kind: str
    dtype: str
    bits: int
    rows: int
    columns: int
    warps: int
    stages: int
    splits: int
    blocks: int
    flush_blocks: int
    grouped: bool
    zero: str
    scale: str
    native_fp8: bool
    table: tuple[float, ...]
    epilogue: tiling.EpilogueConsts
    epilogue_threads: int
    unroll: int = UNROLL

    @property
    def exchanges(self) -> bool:
        """Codes come out of a word as numbers 0 and 4, 1 and 5, ..."""
        return self.kind in ("s4", "u4")

    @property
    def step_k(self) -> int:
        return BLOCK_K * self.blocks

    @property
    def round_k(self) -> int:
        """From a warp's step to its next."""
        return self.step_k * self.warps * self.splits

    @property
    def row_bytes(self) -> int:
        """Of a step of W."""
        return self.step_k * self.bits // 8

    @property
    def row_chunks(self) -> int:
        return self.row_bytes // 16

    @property
    def chunk_k(self) -> int:
        return 128 // self.bits

    @property
    def block_chunks(self) -> int:
        return BLOCK_K * self.bits // 128

    @property
    def phase_shift(self) -> int:
        """Rows side by side in 128 bytes have one phase."""
        return (128 // self.row_bytes).bit_length() - 1

    @property
    def phase_mask(self) -> int:
        return self.row_chunks // self.block_chunks - 1

    @property
    def tiles_r(self) -> int:
        return self.rows // 16

    @property
    def tiles_c(self) -> int:
        return self.columns // 8

    @property
    def depth(self) -> int:
        """Steps under way while one is multiplied."""
        return self.stages - 1

    @property
    def weight_copies(self) -> int:
        return self.rows * self.row_chunks // 32

    @property
    def weight_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + self.columns * self.step_k * 2

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def copies(self) -> int:
        return TABLE_COPIES

    @property
    def table_pitch(self) -> int:
        return 4 * TABLE_COPIES

    @property
    def table_bytes(self) -> int:
        return 256 * self.table_pitch if self.kind == "nf4" else 0

    @property
    def slab_bytes(self) -> int:
        """Of a warp's sums."""
        return self.epilogue.smem_bytes

    @property
    def slab_words(self) -> int:
        return self.slab_bytes // 4

    @property
    def pitches(self) -> tuple[int, int]:
        """Words of shared memory from one row (of W) to the next, and from one column, in the staged sums."""
        return (1, self.epilogue.pitch) if self.epilogue.inner == "n" else (self.epilogue.pitch, 1)

    @property
    def factor_bytes(self) -> int:
        """Of a scale in shared memory."""
        return 4

    def smem_bytes(self, groups: int) -> int:
        factors = 4 * self.rows * groups * (int(self.grouped) + (self.zero != ""))
        return max(self.warps * self.ring_bytes + self.table_bytes + factors, self.warps * self.slab_bytes)

    def sums(self, stem: str, i: int, j: int) -> list[str]:
        first = (i * self.tiles_c + j) * 4
        return [f"%{stem}{first + e}" for e in range(4)]


@dataclass(frozen=True, slots=True)
class _Plan:
    consts: QuantizedSkinnyConsts
    am: AffineMatmul
    digits: tiling.Digits
    row_tiles: int
    rounds: int  # of a warp's loop


@lru_cache(maxsize=512)
def _plan(p: QuantizedLinearProblem, config: EngineConfig, device: DeviceInfo) -> _Plan:
    am = lower(p)
    d = tiling.merged_digits(am)
    rows, columns = config["rows"], max(8, 1 << (p.rows - 1).bit_length())
    bits, blocks = 4 if p.kind in NIBBLES else 8, config["blocks"]
    threads = min(32 * config["warps"], rows * columns)
    epilogue = tiling.plan_epilogue(d, am, columns, rows, threads, tiling.needs_wide(d), False)
    epilogue = replace(epilogue, pitch=epilogue.tile_inner)  # no gaps: all words of a slab are added
    consts = QuantizedSkinnyConsts(
        p.kind, p.desc("x").dtype.name, bits, rows, columns, config["warps"], config["stages"], config["splits"], blocks,
        min(blocks, max(1, p.group_size // BLOCK_K)), p.groups > 1, p.desc("zero_point").dtype.name if p.has("zero_point") else "",
        p.desc("scale").dtype.name, device.at_least(9, 0), tuple(map(float, NF4)) if p.kind == "nf4" else (), epilogue, threads)
    return _Plan(consts, am, d, -(-p.n // rows), max(1, -(-p.k // consts.round_k)))


def _registers_needed(c: QuantizedSkinnyConsts) -> int:
    sums = c.tiles_r * c.tiles_c * 4 * (2 if c.grouped else 1)
    return sums + 10 * c.tiles_r + 8 * c.tiles_c + 2 * (c.weight_copies + c.tiles_c) + c.blocks + 44


class QuantizedLinearSkinny(Engine):
    """f16 and bf16 x of at most 64 rows."""

    id = "quantized_linear.skinny"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        """Codes and x in 16-byte vectors along k; groups of a multiple of 32."""
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        if not device.at_least(8):
            return refuse(f"the skinny loop needs compute capability 8.0, the device has {device.capability[0]}.{device.capability[1]}")
        if p.rows > MAX_COLUMNS:
            return refuse(f"the skinny loop takes at most {MAX_COLUMNS} rows of x, not {p.rows}")
        support = check_vectors(p, "skinny")
        if not support:
            return support
        if max(p.n, p.k, p.n * p.groups) >= 2**31 - 4096:
            return refuse(f"weights of {p.n} x {p.k} are too many for a launch")
        common = tiling.check_common(lower(p), device)
        return common if not common or self.configs(p, device) else refuse("no tile's factors fit in shared memory")

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Legal configs, the fastest by estimate first."""
        assert isinstance(problem, QuantizedLinearProblem)
        return _sorted_configs(problem, device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        plan = _plan(p, config, device)
        c = plan.consts
        ctas = plan.row_tiles * c.splits
        extra = 3.0 if p.has("permutation") else 0.0
        if device.is_emulated:  # an instruction costs about 4 us per batch of 16384 threads and 2 ns per thread, an mma 0.2 us per warp
            warps, mmas = ctas * c.warps, 2 * c.tiles_r * c.tiles_c * c.blocks
            plain = plan.rounds * (60 + 60 * c.tiles_r * c.blocks + 10 * c.tiles_c * c.blocks) + 900
            return plain * (4.0 * -(-warps // 512) + 0.064 * warps) + mmas * plan.rounds * warps * 0.2
        return extra + _estimate_us(p, plan, ctas, device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        plan = _plan(p, config, device)
        c = plan.consts
        target = PtxTarget.for_arch(device.arch, (7, 8) if c.splits > 1 or (c.kind == "e4m3" and c.native_fp8) else (7, 4))
        suffix = f"{c.kind}_{c.dtype}_{c.rows}x{c.columns}{'_grouped' if c.grouped else ''}{'_zero' if c.zero else ''}"
        step = Step.of("quantized_linear/skinny", p.op, target, 32 * c.warps, _arguments(p, plan), c, plan.row_tiles * c.splits,
                       dynamic_smem=c.smem_bytes(p.groups), cluster=c.splits, suffix=suffix)
        return with_columns_ordered(p, step, device)


def _estimate_us(p: QuantizedLinearProblem, plan: _Plan, ctas: int, device: DeviceInfo) -> float:
    """The slowest of memory, L2 and instructions, once launched; more where few bytes are in flight, rings are deep (their copies come
    before anything is multiplied) or a cluster adds. Fitted to timings on an H200."""
    c = plan.consts
    per_sm = max(1, min(device.smem_per_sm // (c.smem_bytes(p.groups) + 1024), 2048 // (32 * c.warps),
                        65536 // (32 * c.warps * (_registers_needed(c) + 8))))
    resident = min(per_sm * device.num_sms, ctas)
    weights = p.desc("w").num_bytes + p.desc("scale").num_bytes
    in_flight = resident * c.warps * min(c.depth, plan.rounds) * c.weight_bytes
    memory_us = weights / (device.bandwidth_gbs * 1e3) * max(1.0, 40e3 * device.num_sms / in_flight) ** 0.7
    l2_us = (weights + p.n * p.k * 2 * c.columns / c.rows) / (device.num_sms * 38e3)
    # Instructions of a block of 32 k, by warp; four are issued a clock.
    numbers = {"s4": 13, "u4": 13, "nf4": 36, "s8": 12 if c.dtype == "f16" else 28, "e4m3": 12 if c.dtype == "f16" else 28}[c.kind]
    block = 2 * c.tiles_r * numbers + c.tiles_c * (6 + 4 * c.exchanges) + 2 * c.tiles_r * c.tiles_c * 2 + 3 * c.weight_copies / c.blocks + 6
    block += (4 * c.tiles_r * c.tiles_c + 10) / c.flush_blocks if c.grouped else 0.0
    # The SM with most CTAs.
    per_warp = plan.rounds * c.blocks * block
    busiest = -(-ctas // device.num_sms)
    issue_us = busiest * c.warps * per_warp / 4 / 0.7 / 1700
    busy_us = (max(memory_us, l2_us, issue_us) + 0.3 * min(memory_us, issue_us)) * (1 + 0.05 * (c.stages - 2)) * c.splits**0.4
    return 6.5 + busy_us + 0.03 * c.warps


def _arguments(p: QuantizedLinearProblem, plan: _Plan) -> list:
    c, d = plan.consts, plan.digits
    w = p.desc("w")
    t = tiling.Arguments(c.epilogue.wide)
    t.add("rounds", "u32", plan.rounds)
    t.add("k_size", "u32", p.k)
    t.add("ptr_w", "u64", TensorArg("w"))
    t.add("w_size", "u32", p.n)
    t.add("w_row_bytes", "s64", w.strides[0])
    t.add("ptr_x", "u64", TensorArg("x"))
    t.add("x_size", "u32", d.a.rows[0])
    t.add("x_row_bytes", "s64", d.a.row_strides[0] * 2)
    add_factors(t, p, c.grouped, c.zero)
    tiling._target_arguments(t, plan.am, d, c.epilogue)
    return t.args


SKINNY = QuantizedLinearSkinny()


@lru_cache(maxsize=256)
def _sorted_configs(p: QuantizedLinearProblem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return tuple(sorted(_candidates(p, device), key=lambda c: SKINNY.estimate(p, c, device)))


def _candidates(p: QuantizedLinearProblem, device: DeviceInfo) -> Iterator[EngineConfig]:
    for rows in (16, 32, 64):
        if rows > 16 and rows >= 2 * p.n:
            continue
        for blocks in (4, 2) if p.kind in NIBBLES else (2, 1):
            step = BLOCK_K * blocks
            if p.groups > 1 and (p.group_size % step and step % p.group_size):
                continue
            if rows * blocks * BLOCK_K * (4 if p.kind in NIBBLES else 8) // 128 < 32:  # a copy for each lane
                continue
            steps = -(-p.k // step)
            for warps in (4, 8):
                if warps > 4 and warps >= 2 * steps:
                    continue
                for splits in (1, 2, 4) if device.at_least(9) else (1,):
                    if splits > 1 and (warps * splits > steps or -(-p.n // rows) * splits > 8 * device.num_sms):
                        continue
                    for stages in _depths(p, rows, blocks, warps, splits, device, -(-steps // (warps * splits))):
                        yield EngineConfig.of(rows=rows, blocks=blocks, warps=warps, stages=stages, splits=splits)


def _depths(p: QuantizedLinearProblem, rows: int, blocks: int, warps: int, splits: int, device: DeviceInfo, steps: int) -> tuple[int, ...]:
    """Stages of rings that leave room for one, two or three CTAs an SM, as deep as there are steps."""
    def fits(stages: int, per_sm: int) -> bool:
        config = EngineConfig.of(rows=rows, blocks=blocks, warps=warps, stages=stages, splits=splits)
        c = _plan(p, config, device).consts
        room = min(device.smem_per_cta, device.smem_per_sm // per_sm - 1024)
        return _registers_needed(c) <= MAX_REGISTERS_FOR[32 * warps] and c.smem_bytes(p.groups) <= room

    if device.is_emulated:
        return (2,) if fits(2, 1) else ()
    deepest = min(MAX_STAGES, steps + 1)
    return tuple(sorted({next((s for s in range(deepest, 1, -1) if fits(s, per_sm)), 0) for per_sm in (1, 2, 3, 4)} - {0}))


ENGINES: dict[str, tuple[Engine, ...]] = {"quantized_linear": (SKINNY,)}
