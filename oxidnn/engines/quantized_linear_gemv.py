"""Linear layers of quantised weights and at most 32 rows of x: codes and scales come from memory straight into registers, several steps
ahead, become 16-bit numbers, exactly, and are multiplied by mma.sync; scales multiply the f32 sums of their groups. sm_80 up.

Nothing passes through shared memory but the sums of a CTA's warps that deal out k.
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
from .base import Arg, Build, Engine, EngineConfig, Step, Support, TensorArg, refuse
from .quantized_linear_loops import NO_FACTORS, FactorConsts, check_vectors, factors_of, lane_bytes_of, lower, with_columns_ordered

MAX_ROWS = 32
MAX_REGISTERS_FOR = {128: 255, 256: 255, 512: 128}  # by threads
TABLE_COPIES = 32  # of the pairs of nf4 numbers: a bank for each lane


@dataclass(frozen=True, slots=True)
class QuantizedGemvConsts:
    """Consts of quantized_linear/gemv. dtype: of x; bits: of a code; columns: rows of x; row_warps, k_warps: that share the rows of W, that
    deal out k; depth: steps under way; streams: codes leave L2 first; lane_bytes: of a row that a lane loads at once; flush_blocks: blocks
    of 8 numbers of a lane of which a group's sums are made, or parts of a group; group_size: 0 where scales do not change along k;
    scale_group, zero_group: bytes from a group's to the next; scales, zeros: of a row and a round; zero: PTX type of zero points, ""
    without; whole: k has whole steps."""

    kind: str
    dtype: str
    bits: int
    tiles_r: int
    columns: int
    row_warps: int
    k_warps: int
    depth: int
    streams: bool
    lane_bytes: int
    flush_blocks: int
    group_size: int
    scale_group: int
    zero_group: int
    scales: FactorConsts
    zeros: FactorConsts
    zero: str
    scale: str
    whole: bool
    native_fp8: bool
    table: tuple[float, ...]
    epilogue: tiling.EpilogueConsts
    epilogue_threads: int

    @property
    def pairs(self) -> list[tuple[int, ...]]:
        """Sets of registers that are loaded together."""
        return [tuple(range(first, min(first + 2, self.depth))) for first in range(0, self.depth, 2)]

    @property
    def grouped(self) -> bool:
        return self.group_size > 0

    @property
    def round_groups(self) -> int:
        return self.round_k // self.group_size

    def group_of(self, step: int, unit: int) -> int:
        """Of a unit of a step of the round."""
        return (step * self.step_k + unit * self.step_k // self.units) // self.group_size

    @property
    def rows(self) -> int:
        return 16 * self.tiles_r * self.row_warps

    @property
    def warps(self) -> int:
        return self.row_warps * self.k_warps

    @property
    def tiles_c(self) -> int:
        return self.columns // 8

    @property
    def row_count(self) -> int:
        """Rows of a lane."""
        return 2 * self.tiles_r

    @property
    def exchanges(self) -> bool:
        """Codes come out of a word as numbers 0 and 4, 1 and 5, ..."""
        return self.kind in ("s4", "u4")

    @property
    def blocks(self) -> int:
        """Of 8 numbers of a lane, 32 of its quad, in a step."""
        return 16 // self.bits

    @property
    def step_k(self) -> int:
        return 32 * self.blocks

    @property
    def round_k(self) -> int:
        """Of a warp."""
        return self.step_k * self.depth

    @property
    def segments(self) -> int:
        return 16 // self.lane_bytes

    @property
    def segment_k(self) -> int:
        return self.step_k // self.segments

    @property
    def segment_blocks(self) -> int:
        return self.blocks // self.segments

    @property
    def lane_k(self) -> int:
        """Of a segment."""
        return self.lane_bytes * 8 // self.bits

    @property
    def units(self) -> int:
        """Scales of a row in a step."""
        return self.blocks // self.flush_blocks if self.grouped else 1

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
    def slab_words(self) -> int:
        return self.slab_bytes // 4

    @property
    def pitches(self) -> tuple[int, int]:
        """Words of shared memory from one row (of W) to the next, and from one column, in the staged sums."""
        return (1, self.epilogue.pitch) if self.epilogue.inner == "n" else (self.epilogue.pitch, 1)

    @property
    def smem_bytes(self) -> int:
        return max(self.k_warps * self.slab_bytes, 256 * self.table_pitch if self.kind == "nf4" else 0)

    def sums(self, stem: str, i: int, j: int) -> list[str]:
        return [f"%{stem}{4 * (i * self.tiles_c + j) + e}" for e in range(4)]

    def fragment_x(self, block: int, j: int) -> list[str]:
        return [f"%frag_x{4 * (block * self.tiles_c + j) + e}" for e in range(4)]


@dataclass(frozen=True, slots=True)
class _Plan:
    consts: QuantizedGemvConsts
    am: AffineMatmul
    digits: tiling.Digits
    row_tiles: int
    rounds: int


@lru_cache(maxsize=512)
def _plan(p: QuantizedLinearProblem, config: EngineConfig, device: DeviceInfo) -> _Plan:
    am = lower(p)
    d = tiling.merged_digits(am)
    bits, rows, row_warps = 4 if p.kind in NIBBLES else 8, config["rows"], config["row_warps"]
    columns = max(8, 1 << (p.rows - 1).bit_length())
    threads = min(32 * config["warps"], rows * columns)
    epilogue = tiling.plan_epilogue(d, am, columns, rows, threads, tiling.needs_wide(d), False)
    epilogue = replace(epilogue, pitch=epilogue.tile_inner)  # no gaps: all words of a slab are added
    has_zero = p.has("zero_point")
    step, groups = 512 // bits, max(1, config["depth"] * (512 // bits) // p.group_size)
    scales = factors_of(p, "scale", groups) if p.groups > 1 else NO_FACTORS
    consts = QuantizedGemvConsts(
        p.kind, p.desc("x").dtype.name, bits, rows // row_warps // 16, columns, row_warps,
        config["warps"] // row_warps, config["depth"], config["streams"], lane_bytes_of(p),
        min(16 // bits, max(1, p.group_size // 32)), p.group_size if p.groups > 1 else 0,
        p.grid_strides("scale")[1] * p.desc("scale").dtype.num_bytes, p.grid_strides("zero_point")[1] if has_zero else 0, scales,
        factors_of(p, "zero_point", groups) if has_zero and p.groups > 1 else NO_FACTORS,
        p.desc("zero_point").dtype.name if has_zero else "", p.desc("scale").dtype.name, p.k % step == 0,
        device.at_least(9, 0), tuple(map(float, NF4)) if p.kind == "nf4" else (), epilogue, threads)
    return _Plan(consts, am, d, -(-p.n // rows), -(-p.k // (consts.round_k * consts.k_warps)))


def _registers_needed(c: QuantizedGemvConsts) -> int:
    factors = 2 * c.row_count * ((c.scales.registers if c.grouped else 0) + (c.zeros.registers if c.zero else 0))
    pointers = 2 * c.row_count * (1 + (1 if c.grouped else 0) + (1 if c.zero and c.grouped else 0))
    return 4 * c.row_count * c.depth + factors + pointers + 4 * c.blocks * c.tiles_c + 14 * c.tiles_r\
        + 4 * c.tiles_r * c.tiles_c * (2 if c.grouped else 1) + 2 * c.tiles_c + (14 if c.kind == "nf4" else 2)


def _ctas_per_sm(c: QuantizedGemvConsts) -> int:
    """As many as their registers allow, which the assembler is held to: it would load all of x ahead."""
    return max(1, min(2048, 65536 // (_registers_needed(c) + 8)) // (32 * c.warps))


class QuantizedLinearGemv(Engine):
    """f16 and bf16 x of at most 32 rows."""

    id = "quantized_linear.gemv"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        """Codes and x in 16-byte vectors along k; groups of 32, 64 or 128 (8-bit codes: 32 or 64), or of a few times that."""
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        if not device.at_least(8):
            return refuse(f"the gemv loop needs compute capability 8.0, the device has {device.capability[0]}.{device.capability[1]}")
        if p.rows > MAX_ROWS:
            return refuse(f"the gemv loop takes at most {MAX_ROWS} rows of x, not {p.rows}")
        support = check_vectors(p, "gemv")
        if not support:
            return support
        if max(p.n, p.k, p.n * p.groups) >= 2**31 - 2**20:
            return refuse(f"weights of {p.n} x {p.k} are too many for a launch")
        common = tiling.check_common(lower(p), device)
        if not common or self.configs(p, device):
            return common
        return refuse(f"groups of {p.group_size}, of which no round has a whole number")

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
            warps = plan.row_tiles * c.warps
            plain = plan.rounds * c.depth * (60 + 60 * c.tiles_r * c.blocks) + 900
            return plain * (4.0 * -(-warps // 512) + 0.064 * warps)
        return (3.0 if p.has("permutation") else 0.0) + _estimate_us(p, plan, device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        plan = _plan(p, config, device)
        c = plan.consts
        follows = device.at_least(9)
        target = PtxTarget.for_arch(device.arch, (7, 8) if follows or (c.kind == "e4m3" and c.native_fp8) else (7, 4))
        suffix = f"{c.kind}_{c.dtype}_{c.rows}{'_grouped' if c.grouped else ''}{'_zero' if c.zero else ''}"
        step = Step.of("quantized_linear/gemv", p.op, target, 32 * c.warps, _arguments(p, plan), c, plan.row_tiles,
                       dynamic_smem=c.smem_bytes, follows=follows, min_ctas_per_sm=_ctas_per_sm(c), suffix=suffix)
        return with_columns_ordered(p, step, device)


def _estimate_us(p: QuantizedLinearProblem, plan: _Plan, device: DeviceInfo) -> float:
    """A start; memory, slower where few bytes are under way; the steps of a warp in turn, for each round of CTAs. Fitted to timings on an
    H200 (four matrices of s4, s8 and e4m3)."""
    c = plan.consts
    per_sm = max(1, min(_ctas_per_sm(c), device.smem_per_sm // (c.smem_bytes + 1024)))
    resident = min(per_sm * device.num_sms, plan.row_tiles)
    waves = -(-plan.row_tiles // (per_sm * device.num_sms))
    num_bytes = p.desc("w").num_bytes + p.desc("scale").num_bytes
    in_flight = resident * c.k_warps * c.depth * c.rows * 64
    starved = max(1.0, min(num_bytes, 15.6e3 * device.num_sms) / in_flight)
    memory_us = 1.42 * num_bytes / (device.bandwidth_gbs * 1e3) * starved**0.57
    # Instructions of a block of 8 numbers of a lane, by warp.
    numbers: float = {"s4": 10, "u4": 10, "nf4": 18, "s8": 10 if c.dtype == "f16" else 26, "e4m3": 12 if c.dtype == "f16" else 28}[c.kind]
    block: float = c.row_count * numbers + c.tiles_c * (2 * c.tiles_r * 2 + 4 + 4 * c.exchanges)
    block += (4 * c.tiles_r * c.tiles_c + 8) / c.flush_blocks * c.grouped
    instructions = c.blocks * block + 6 * c.row_count
    l2_us = (num_bytes + plan.row_tiles * p.rows * p.k * 2) / (device.num_sms * 38e3)
    return 5.3 + max(memory_us, l2_us) + waves * (0.4 + plan.rounds * c.depth * instructions / 870)


def _arguments(p: QuantizedLinearProblem, plan: _Plan) -> list[Arg]:
    c, d = plan.consts, plan.digits
    t = tiling.Arguments(c.epilogue.wide)
    t.add("rounds", "u32", plan.rounds)
    t.add("k_size", "u32", p.k)
    t.add("ptr_w", "u64", TensorArg("w"))
    t.add("w_size", "u32", p.n)
    t.add("w_row_bytes", "s64", p.desc("w").strides[0])
    t.add("ptr_x", "u64", TensorArg("x"))
    t.add("x_size", "u32", d.a.rows[0])
    t.add("x_row_bytes", "s64", d.a.row_strides[0] * 2)
    for name, operand, wanted in (("scale", "scale", c.grouped), ("zero", "zero_point", c.zero)):
        if wanted:
            t.add(f"ptr_{name}", "u64", TensorArg(operand))
            t.add(f"{name}_row", "s64", p.grid_strides(operand)[0] * p.desc(operand).dtype.num_bytes)
    tiling._target_arguments(t, plan.am, d, c.epilogue)
    return t.args


GEMV = QuantizedLinearGemv()


@lru_cache(maxsize=256)
def _sorted_configs(p: QuantizedLinearProblem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return tuple(sorted(_candidates(p, device), key=lambda c: GEMV.estimate(p, c, device)))


def _candidates(p: QuantizedLinearProblem, device: DeviceInfo) -> Iterator[EngineConfig]:
    step = 128 if p.kind in NIBBLES else 64
    steps = -(-p.k // step)
    few = p.rows <= 8
    for rows, row_warps, warps in ((16, 1, 4), (16, 1, 8), (16, 1, 16), (32, 1, 4), (32, 1, 8), (32, 1, 16)) if few else (
            (32, 1, 4), (32, 1, 8), (64, 1, 4), (64, 2, 8), (64, 2, 4), (128, 4, 8), (128, 4, 4), (128, 2, 4)):
        k_warps = warps // row_warps
        if (rows > 16 and rows >= 2 * p.n) or (k_warps > 4 and k_warps >= 2 * steps):
            continue
        if p.groups > 1 and p.group_size % step and step % p.group_size:
            continue
        own = -(-steps // k_warps)  # steps of a warp
        for depth in (1, 2, 3, 4, 6, 8):
            if p.groups > 1 and step * depth % p.group_size:
                continue
            if (depth > own or -(-own // depth) * depth - own > own // 8) and depth > 1:
                continue
            for streams in (True, False):
                config = EngineConfig.of(rows=rows, row_warps=row_warps, warps=warps, depth=depth, streams=streams)
                if _registers_needed(_plan(p, config, device).consts) <= MAX_REGISTERS_FOR[32 * warps]:
                    yield config


ENGINES: dict[str, tuple[Engine, ...]] = {"quantized_linear": (GEMV,)}
