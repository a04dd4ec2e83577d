"""Linear layers of quantised weights on wgmma: rows of W come as they are stored, become 16-bit numbers in registers, where wgmma takes its
first operand from, and meet rows of x in shared memory; one CTA a tile, a warp brings both by tensor copies; sm_90a."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from ..codegen.spec import Target as PtxTarget
from ..codegen.spec import TensorMapSpec
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.quantized_linear import NF4, NIBBLES, QuantizedLinearProblem
from . import affine_tiling as tiling
from .affine import AffineMatmul
from .base import Arg, Build, Engine, EngineConfig, Step, Support, TensorMapArg, refuse
from .quantized_linear_loops import add_factors, check_vectors, lower, with_columns_ordered, x_desc
from .quantized_linear_skinny import UNROLL
from .quantized_linear_stream import TABLE_COPIES

SPAN_K = 64  # 128 bytes of a row of x
MAX_STAGES = 12
BARRIER_BYTES = 8
# Registers of a thread, by warpgroups: 255, 168 and 96, of those that fill their ring 255, 255 and 128; estimates exceed them by some 13.
MAX_REGISTERS = {1: 255, 2: 175, 4: 108}
MAX_OWN_REGISTERS = {1: 255, 2: 255, 4: 140}


@dataclass(frozen=True, slots=True)
class QuantizedWgmmaConsts:
    """Consts of quantized_linear/wgmma_sm90. dtype: of x; bits: of a code; columns: rows of x; row_groups, k_groups: warpgroups that share
    the rows of W, that deal out stages; splits: CTAs of a cluster that deal out k; spans: of 64 k in a turn of the loop, stage_spans of
    them in a stage; scaling: "sums" of `unit` spans, "numbers", each of them, or "none"; parts: of a span that have a scale of their own;
    zero: PTX type of zero points, "" without; streams: codes leave L2 first."""

    kind: str
    dtype: str
    bits: int
    columns: int
    row_groups: int
    k_groups: int
    splits: int
    spans: int
    stage_spans: int
    stages: int
    scaling: str
    unit: int
    parts: int
    grouped: bool
    zero: str
    scale: str
    table: tuple[float, ...]
    streams: bool
    epilogue: tiling.EpilogueConsts
    epilogue_threads: int
    unroll: int = UNROLL

    @property
    def rows(self) -> int:
        return 64 * self.row_groups

    @property
    def warpgroups(self) -> int:
        return self.row_groups * self.k_groups

    @property
    def tile_k(self) -> int:
        return SPAN_K * self.spans

    @property
    def is_merged(self) -> bool:
        """A thread that multiplies fills the ring too: with a warp more, threads of two warpgroups would have 168 registers."""
        return self.stage_spans < self.spans

    @property
    def stage_count(self) -> int:
        """Stages of a turn of the loop."""
        return self.spans // self.stage_spans

    @property
    def row_bytes(self) -> int:
        """Of codes of a stage."""
        return SPAN_K * self.stage_spans * self.bits // 8

    @property
    def phase_shift(self) -> int:
        """Rows side by side in 128 bytes have one phase of the swizzle."""
        return (128 // self.row_bytes).bit_length() - 1

    @property
    def phase_mask(self) -> int:
        return self.row_bytes // 16 - 1

    @property
    def x_bytes(self) -> int:
        """Of a stage; its codes follow."""
        return self.stage_spans * self.columns * 128

    @property
    def stage_bytes(self) -> int:
        return self.x_bytes + self.rows * self.row_bytes

    @property
    def barriers_at(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def table_at(self) -> int:
        return -(-(self.barriers_at + 2 * BARRIER_BYTES * self.stages) // 128) * 128

    @property
    def copies(self) -> int:
        return TABLE_COPIES

    @property
    def table_pitch(self) -> int:
        return 4 * TABLE_COPIES

    @property
    def factors_at(self) -> int:
        return self.table_at + (256 * self.table_pitch if self.kind == "nf4" else 0)

    @property
    def slab_bytes(self) -> int:
        return self.epilogue.smem_bytes

    @property
    def vectors_at_once(self) -> int:
        """Of four sums that a thread adds."""
        return min(4, max(1, self.slab_bytes // 16 // (128 * self.warpgroups)))

    @property
    def fixed_bits(self) -> str:
        """A descriptor of x but for its address: 128-byte swizzle, 1024 bytes between groups of 8 lines."""
        return f"0x{1 << 62 | 1024 >> 4 << 32 | 1 << 16:016X}"

    @property
    def factor_bytes(self) -> int:
        """Of a scale in shared memory: f32, or x's type where it multiplies numbers."""
        return 2 if self.scaling == "numbers" else 4

    def smem_bytes(self, groups: int) -> int:
        factors = self.rows * groups * (self.factor_bytes * int(self.grouped) + 4 * (self.zero != ""))
        return max(self.factors_at + factors, self.k_groups * self.slab_bytes)

    def names(self, stem: str, first: int = 0) -> list[str]:
        return [f"%{stem}{first + i}" for i in range(self.columns // 2)]

    def part_of(self, span: int) -> list[str]:
        """Where the products of a span of a turn are summed: units of sums that leave the tensor cores take turns."""
        return self.names("part", span // self.unit % 2 * self.columns // 2) if self.scaling == "sums" else self.names("acc")

    def scale_of(self, span: int) -> list[str]:
        first = span // self.unit % 2 * 2
        return [f"%scale{first}", f"%scale{first + 1}"]


@dataclass(frozen=True, slots=True)
class _Plan:
    consts: QuantizedWgmmaConsts
    am: AffineMatmul
    digits: tiling.Digits
    row_tiles: int
    column_tiles: int
    k_tiles: int  # of a CTA

    @property
    def ctas(self) -> int:
        return self.row_tiles * self.column_tiles * self.consts.splits


@lru_cache(maxsize=256)
def turned(p: QuantizedLinearProblem) -> AffineMatmul:
    """The matmul whose rows are those of W."""
    am = lower(p)
    targets = [replace(t, m_strides=t.n_strides, n_strides=t.m_strides) for t in (am.d, *am.operands)]
    return replace(am, m=am.n, n=am.m, a=am.b, b=am.a, d=targets[0], operands=tuple(targets[1:]))


@lru_cache(maxsize=512)
def _plan(p: QuantizedLinearProblem, config: EngineConfig) -> _Plan:
    am = turned(p)
    d = tiling.merged_digits(am)
    columns, row_groups, k_groups, spans = (config[name] for name in ("columns", "row_groups", "k_groups", "spans"))
    splits = config["splits"]
    is_merged = config["filler"] == "own"
    rows, warpgroups = 64 * row_groups, row_groups * k_groups
    threads = min(128 * warpgroups, rows * columns)
    epilogue = tiling.plan_epilogue(d, am, rows, columns, threads, tiling.needs_wide(d), False)
    if k_groups * splits > 1:
        epilogue = replace(epilogue, pitch=epilogue.tile_inner)  # no gaps: all words of a slab are added
    scaling = config["scaling"] if p.groups > 1 else "none"
    unit = min(spans // 2, p.group_size // SPAN_K) if scaling == "sums" else 1
    row_tiles, column_tiles, k_tiles = -(-p.n // rows), -(-p.rows // columns), -(-p.k // (SPAN_K * spans * splits))
    consts = QuantizedWgmmaConsts(
        p.kind, p.desc("x").dtype.name, 4 if p.kind in NIBBLES else 8, columns, row_groups, k_groups, splits,
        spans, spans // 2 if is_merged else spans, config["stages"], scaling,
        unit, 2 if p.groups > 1 and p.group_size % SPAN_K else 1, p.groups > 1,
        p.desc("zero_point").dtype.name if p.has("zero_point") else "",
        p.desc("scale").dtype.name, tuple(map(float, NF4)) if p.kind == "nf4" else (), column_tiles == 1, epilogue, threads)
    return _Plan(consts, am, d, row_tiles, column_tiles, k_tiles)


def _threads(c: QuantizedWgmmaConsts) -> int:
    return 128 * c.warpgroups + (0 if c.is_merged else 32)


def _registers_needed(c: QuantizedWgmmaConsts) -> int:
    return int(c.columns / 2 * (2.6 if c.scaling == "sums" else 1)) + 32 + 50


class QuantizedLinearWgmma(Engine):
    """f16 and bf16 x of any number of rows. Where scales change along k and tiles are wide, numbers are scaled and rounded to x's type."""

    id = "quantized_linear.wgmma_sm90"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        """Codes and x by tensor copies along k: rows at multiples of 16 bytes; groups of a multiple of 32."""
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        if device.arch != "sm_90a":
            return refuse(f"the wgmma loop needs sm_90a, the device is {device.arch}")
        support = check_vectors(p, "wgmma")
        if not support:
            return support
        w = p.desc("w")
        if tiling.merged_digits(lower(p)).a.row_strides[0] < 0 or (p.n > 1 and w.strides[0] < 0):
            return refuse(f"the wgmma loop copies rows in the order of memory; x is {x_desc(p)}, w {w}")
        if p.groups > 1 and p.group_size % SPAN_K and p.group_size != 32:
            return refuse(f"groups of {p.group_size}; the wgmma loop takes 32 and multiples of {SPAN_K}")
        if max(p.n, p.k, p.n * p.groups, p.rows) >= 2**31 - 4096 or -(-p.n // 64) * -(-p.rows // 8) >= 2**31:
            return refuse(f"weights of {p.n} x {p.k} and {p.rows} rows of x are too many for a launch")
        common = tiling.check_common(turned(p), device)
        return common if not common or self.configs(p, device) else refuse("no tile's factors fit in shared memory")

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Legal configs, the fastest by estimate first."""
        assert isinstance(problem, QuantizedLinearProblem)
        return _sorted_configs(problem, device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        plan = _plan(p, config)
        c = plan.consts
        if device.is_emulated:
            warps = plan.ctas * c.warpgroups * 4
            plain = plan.k_tiles * (100 + 150 * c.spans) / c.k_groups + 1500
            return plain * (4.0 * -(-warps // 512) + 0.064 * warps)
        return (3.0 if p.has("permutation") else 0.0) + _estimate_us(p, plan, device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        plan = _plan(p, config)
        c = plan.consts
        suffix = f"{c.kind}_{c.dtype}_{c.rows}x{c.columns}_{c.scaling}{'_zero' if c.zero else ''}"
        follows = bool(dict(config.knobs).get("overlaps", not device.is_emulated and _overlaps(p, plan, device)))
        step = Step.of("quantized_linear/wgmma_sm90", p.op, PtxTarget.for_arch(device.arch, (8, 0)), _threads(c),
                       _arguments(p, plan), c, plan.ctas, dynamic_smem=c.smem_bytes(p.groups), cluster=c.splits, follows=follows,
                       suffix=suffix)
        return with_columns_ordered(p, step, device)


def _per_sm(p: QuantizedLinearProblem, c: QuantizedWgmmaConsts, device: DeviceInfo) -> int:
    return max(1, min(device.smem_per_sm // (c.smem_bytes(p.groups) + 1024), 2048 // _threads(c),
                      65536 // (128 * -(-_threads(c) // 128) * _registers_needed(c))))  # four warps at a time get registers


def _overlaps(p: QuantizedLinearProblem, plan: _Plan, device: DeviceInfo) -> bool:
    """Whether the launch may start while the one before ends, and let the next do so: by the rule found for affine_skinny_wgmma."""
    ctas = plan.ctas
    places = _per_sm(p, plan.consts, device) * device.num_sms
    if ctas > device.num_sms:
        return ctas > places or ctas >= 0.9 * places
    free = 1 - ctas / device.num_sms
    return free >= 0.57 or free * _estimate_us(p, plan, device) < 7.2


def _estimate_us(p: QuantizedLinearProblem, plan: _Plan, device: DeviceInfo) -> float:
    """Up to 64 columns memory, and the tensor cores and the making of numbers, which hardly overlap, or the latency of the latter; of
    more columns the tensor cores. A start, ends, factors. Fitted to timings on an H200 (four matrices, four kinds)."""
    c, ctas = plan.consts, plan.ctas
    per_sm = _per_sm(p, c, device)
    busiest, rounds = -(-ctas // device.num_sms), -(-ctas // (per_sm * device.num_sms))
    weights = p.desc("w").num_bytes + p.desc("scale").num_bytes
    in_flight = min(ctas, per_sm * device.num_sms) * (c.stages - 0.5) * c.rows * c.row_bytes / device.num_sms
    memory_us = weights / (device.bandwidth_gbs * 1.15e3) * max(1.0, 32e3 / in_flight) ** 0.2
    memory_us += (plan.row_tiles * p.rows * p.k * 2 + (plan.column_tiles - 1) * weights) / device.num_sms / 100e3
    steps = p.k / 16 / c.splits / c.k_groups  # of a warpgroup
    tile = c.rows * c.columns / 1e3
    if c.columns > 64:
        stall = 1.0 if c.scaling != "numbers" else 1.4 if c.kind == "nf4" else 1.2
        compute_us = busiest * c.warpgroups * steps * c.columns / 2 * stall * (1.0 if c.row_groups > 1 and c.columns > 128 else 1.1) / 1550
        end_us = 2.0 * (c.splits > 1) + 0.6e-3 * p.groups * c.rows * c.grouped
        return 4.0 + max(compute_us, memory_us) + rounds * (1.0 + tile / 16) + end_us
    # Clocks of 16 k of a warpgroup: of the tensor cores, and of the making of numbers
    tensor = {8: 13.5, 16: 15, 32: 18, 64: 24}[c.columns]
    numbers: float = {"s4": 16, "u4": 16, "nf4": 31, "s8": 20, "e4m3": 16}[c.kind] + (8 if c.dtype == "bf16" else 0)
    numbers += {"sums": 1.8 * (c.columns / 8 + 4) / c.unit, "numbers": 6 + 3 * c.parts, "none": 0}[c.scaling]
    shared_us = busiest * c.warpgroups * steps * (numbers**1.2 + tensor**1.2) ** (1 / 1.2) / 1700
    compute_us = max(shared_us, rounds * steps * (2.5 * numbers + 17) / 1700)
    busy_us = (compute_us**2.6 + memory_us**2.6) ** (1 / 2.6) * (1.03 if c.bits == 4 and c.spans == 2 else 1.0)
    end_us = 0.2 * (c.splits > 1) + 0.5 * (c.k_groups > 1) + 0.06e-3 * p.groups * c.rows * c.factor_bytes * c.grouped
    return 6.0 + busy_us + 0.4 * (rounds - 1) + 0.15 * tile + end_us


def _arguments(p: QuantizedLinearProblem, plan: _Plan) -> list[Arg]:
    c, d = plan.consts, plan.digits
    w, x = p.desc("w"), x_desc(p)
    t = tiling.Arguments(c.epilogue.wide)
    w_stride = w.strides[0] if p.n > 1 else -(-w.shape[1] // 16) * 16
    x_stride = (d.b.row_strides[0] if p.rows > 1 else p.k) * 2
    map_w = TensorMapSpec("u8", (w.shape[1], p.n), (w_stride,), (c.row_bytes, c.rows), swizzle=c.row_bytes)
    map_x = TensorMapSpec(x.dtype.name, (p.k, p.rows), (x_stride,), (SPAN_K, c.columns), swizzle=128)
    t.add("map_w", "tensor_map", TensorMapArg("w", map_w))
    t.add("map_x", "tensor_map", TensorMapArg("x", map_x))
    t.add("row_tiles", "u32", plan.row_tiles)
    t.divisor("row_tiles", plan.row_tiles)
    t.add("k_tiles", "u32", plan.k_tiles)
    if c.grouped or c.zero:
        t.add("w_size", "u32", p.n)
    add_factors(t, p, c.grouped, c.zero)
    tiling._target_arguments(t, plan.am, d, c.epilogue)
    return t.args


WGMMA = QuantizedLinearWgmma()


@lru_cache(maxsize=256)
def _sorted_configs(p: QuantizedLinearProblem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return tuple(sorted(_candidates(p, device), key=lambda c: WGMMA.estimate(p, c, device)))


def _candidates(p: QuantizedLinearProblem, device: DeviceInfo) -> Iterator[EngineConfig]:
    needed = max(8, 1 << (p.rows - 1).bit_length())
    for columns in ((needed,) if needed <= 64 else (64, 128) if needed == 128 else (64, 128, 256)):
        for row_groups, k_groups in ((1, 1), (1, 2), (1, 4), (2, 1), (4, 1)):
            if (row_groups > 1 and p.n <= 32 * row_groups) or (k_groups > 1 and columns > 128):
                continue
            if row_groups * k_groups == 4 and columns > 64 or row_groups == 4 and p.kind not in NIBBLES:
                continue
            for spans in (4, 2) if p.kind in NIBBLES else (2,):
                for filler, scaling, splits in product(_fillers(columns, row_groups, spans), _scalings(p, columns, spans), (1, 2)):
                    k_tiles = -(-p.k // (SPAN_K * spans * splits))
                    tiles = -(-p.n // (64 * row_groups)) * -(-p.rows // columns)
                    if k_groups * splits > 1 and (k_groups > k_tiles or (splits > 1 and tiles > device.num_sms)):
                        continue
                    knobs = {"columns": columns, "row_groups": row_groups, "k_groups": k_groups, "splits": splits, "spans": spans,
                             "scaling": scaling, "filler": filler}
                    for stages in _depths(p, device, k_tiles, **knobs):
                        yield EngineConfig.of(**knobs, stages=stages)


def _fillers(columns: int, row_groups: int, spans: int) -> tuple[str, ...]:
    """A warp, or one of those that multiply where each thread needs the more registers that there are without it."""
    if columns > 64:
        return ("warp", "own") if row_groups == 2 and spans == 2 else ("warp",)
    return ("own",) if row_groups == 4 and columns > 16 else ("warp",)


def _scalings(p: QuantizedLinearProblem, columns: int, spans: int) -> tuple[str, ...]:
    if p.groups == 1:
        return ("none",)
    unit = min(spans // 2, p.group_size // SPAN_K)
    can_sum = p.group_size % SPAN_K == 0 and spans % (2 * unit) == 0 and p.group_size % (SPAN_K * unit) == 0
    return ("sums", "numbers") if can_sum and columns <= 64 else ("numbers",)


def _depths(p: QuantizedLinearProblem, device: DeviceInfo, k_tiles: int, **knobs: int | str) -> tuple[int, ...]:
    """Stages of rings that leave room for one or two CTAs an SM, no deeper than there are stages."""
    def fits(stages: int, per_sm: int) -> bool:
        c = _plan(p, EngineConfig.of(**knobs, stages=stages)).consts
        room = min(device.smem_per_cta, device.smem_per_sm // per_sm - 1024)
        most = (MAX_OWN_REGISTERS if c.is_merged else MAX_REGISTERS)[c.warpgroups]
        return c.smem_bytes(p.groups) <= room and _registers_needed(c) <= most

    least = 3 if knobs["filler"] == "own" else 1 + int(knobs["k_groups"])
    if device.is_emulated:
        return (least,) if fits(least, 1) else ()
    deepest = max(least, min(MAX_STAGES, k_tiles * (2 if knobs["filler"] == "own" else 1)))
    return tuple(sorted({next((s for s in range(deepest, least - 1, -1) if fits(s, per_sm)), 0) for per_sm in (1, 2)} - {0}))


ENGINES: dict[str, tuple[Engine, ...]] = {"quantized_linear": (WGMMA,)}
