"""Products of a tall dense matrix with a small one at the speed of memory, sm_90a: pointwise convolutions of few channels.

Rows of A and of D lie end to end, so a block of rows is one run of bytes each, which bulk copies bring and take away whatever the number
of channels. Tensor copies of the wgmma loop want 128 bytes of k and 64 columns at a time and part the lines of narrower rows. Each warp
streams blocks of its own and multiplies with mma.sync; the small matrix stays in shared memory or registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from ..codegen.spec import Target as PtxTarget
from ..device import DeviceInfo
from . import affine_tiling as tiling
from .affine import AffineMatmul
from .base import Arg, Build, EngineConfig, ScalarArg, Step, Support, TensorArg, WorkspaceArg, refuse

SMEM_BYTES = 232448  # of a CTA
MAX_B_BYTES = 98304
MAX_STAGES = 8
MAX_CHUNK = 18  # column tiles that a warp multiplies at a time
MAX_FRAGMENTS = 96  # registers of B
SLICE = 16  # rows of mma.sync
OUTS = 2  # blocks of results, so that one is sent while the next is made
WARPS = (16, 12, 8, 4)
BLOCK_SLICES = (1, 2, 4)
REGISTERS = {16: 128, 12: 168, 8: 255, 4: 255}  # of a thread, by warps


@dataclass(frozen=True, slots=True)
class StreamConsts:
    """Consts of matmul/stream_sm90. rows: of a block; b_major: "k" | "row", along which B is contiguous; chunk: column tiles of 8 that
    are multiplied at a time; is_resident: B's fragments stay in registers; operands_at: of the epilogue, n f32 numbers each."""

    kind: str
    k: int
    n: int
    b_major: str
    rows: int
    warps: int
    stages: int
    chunk: int
    is_resident: bool
    streams: bool  # lines of A leave L2 first
    epilogue: tiling.EpilogueConsts

    @property
    def steps(self) -> int:
        """k steps of 16, the last of 8 where k is no multiple."""
        return -(-self.k // 16)

    @property
    def tiles(self) -> int:
        return self.n // 8

    @property
    def fragments(self) -> int:
        return self.k // 8 * self.tiles

    def fragment(self, tile: int, step: int) -> int:
        """First register of a tile's fragments, of which a step of 16 has two."""
        return 2 * step * self.tiles + tile * (2 if step < self.k // 16 else 1)

    @property
    def b_lines(self) -> int:
        return self.n if self.b_major == "k" else self.k

    @property
    def b_line(self) -> int:
        """Elements of a line."""
        return self.k if self.b_major == "k" else self.n

    @property
    def b_pitch(self) -> int:
        """Bytes from a line to the next: an odd number of 16, so that eight lines lie in different banks."""
        return (self.b_line // 8 | 1) * 16

    @property
    def operands_at(self) -> int:
        return self.b_lines * self.b_pitch

    @property
    def barriers_at(self) -> int:
        return -(-(self.operands_at + 4 * self.n * (len(self.epilogue.targets) - 1)) // 128) * 128

    @property
    def rings_at(self) -> int:
        return -(-(self.barriers_at + self.warps * self.barrier_pitch) // 128) * 128

    @property
    def barrier_pitch(self) -> int:
        """Bytes of a warp's barriers."""
        return -(-self.stages // 2) * 16

    @property
    def slot_bytes(self) -> int:
        return self.rows * self.k * 2

    @property
    def out_bytes(self) -> int:
        return self.rows * self.n * 2

    @property
    def warp_bytes(self) -> int:
        return self.stages * self.slot_bytes + OUTS * self.out_bytes

    @property
    def smem_bytes(self) -> int:
        return self.rings_at + self.warps * self.warp_bytes


def _ways(elements: int) -> int:
    """How many of eight rows of so many elements, end to end, begin in one bank of shared memory."""
    return max(1, 8 * gcd(2 * elements, 128) // 128)


def leaves_first(read: int, written: int, device: DeviceInfo) -> bool:
    """Whether lines that are read, once each, should leave L2 before those that lie there: they then displace each other, not dirty lines,
    which must be written back first. In what is much larger than L2 the hint costs more than that.

    Measured 2026-11-28, H200, after zeroing: filter gradients that read 37 to 154 MB take 6 to 10 % less time, 360 MB 2 % more; forward,
    k > n, 0 to 5 % less. After a flush by reading it makes no difference. Gradients by strips, 2026-11-29: 116 MB 4 to 5 % less.
    """
    return written < read <= 4 * device.l2_bytes


@lru_cache(maxsize=256)
def _layout(am: AffineMatmul) -> tuple[tiling.Digits, str] | str:
    """(digits, how B lies), or why the engine does not take the matmul."""
    d = tiling.merged_digits(am)
    k, n = am.k.size, am.n.size
    if am.batch.size > 1 or len(d.k) > 1 or len(d.a.rows) > 1 or len(d.b.rows) > 1 or d.a.bounds or d.b.bounds:
        return "stream_sm90 takes one pair of plain matrices"
    if k % 8 or n % 8:
        return f"stream_sm90 takes multiples of 8 terms and columns, not {k} and {n}"
    if d.a.k_strides[0] != 1 or d.a.row_strides[0] != k or am.a.base * 2 % 16 or am.a.align % 16:
        return f"the rows of {am.a.name} do not lie end to end from a multiple of 16 bytes on"
    out = d.targets[0]
    if len(d.out_m) > 1 or len(d.out_n) > 1 or out.n_strides[0] != 1 or out.m_strides[0] != n or out.base * 2 % 16 or out.align % 16:
        return f"the rows of {out.name} do not lie end to end from a multiple of 16 bytes on"
    for t in d.targets[1:]:
        if any(t.m_strides):
            return f"{t.name} changes along the rows"
    along = [major for major, own, other in (("k", d.b.k_strides[0], d.b.row_strides[0]), ("row", d.b.row_strides[0], d.b.k_strides[0]))
             if own == 1 and other > 0 and other % 8 == 0]
    if not along or am.b.base * 2 % 16 or am.b.align % 16:
        return f"{am.b.name} does not lie in lines of whole 16 bytes"
    if k * n * 2 > MAX_B_BYTES:
        return f"{am.b.name} has {k * n * 2} bytes; {MAX_B_BYTES} find room"
    return d, along[0]


@lru_cache(maxsize=1024)
def _consts(am: AffineMatmul, config: EngineConfig) -> StreamConsts:
    layout = _layout(am)
    assert not isinstance(layout, str), layout
    d, major = layout
    epilogue = tiling.plan_epilogue(d, am, SLICE, 64, 32, False, False)
    tiles = am.n.size // 8
    chunk = -(-tiles // -(-tiles // MAX_CHUNK))
    is_resident = chunk == tiles and am.k.size // 8 * tiles <= min(MAX_FRAGMENTS, REGISTERS[config["warps"]] - 52 - 4 * chunk)
    return StreamConsts(am.a.dtype.name, am.k.size, am.n.size, major, SLICE * config["slices"], config["warps"], config["stages"], chunk,
                        is_resident, config["streams"], epilogue)


class StreamSm90Matmul:
    """f16 and bf16 products of dense rows with a matrix of at most 96 KB; f32 accumulators, results of the same type."""

    name = "stream_sm90"
    is_deterministic = True

    def check(self, am: AffineMatmul, device: DeviceInfo) -> Support:
        """sm_90a; both operands and D f16, or all bf16; k and n multiples of 8; rows of A and D end to end; epilogue operands that change
        along n only."""
        halves = tiling.check_halves_sm90(self.name, am, device)
        if not halves:
            return halves
        if am.d.dtype != am.a.dtype:
            return refuse(f"stream_sm90 takes and gives f16 or bf16 alone, not {am.d.dtype} of {am.a.dtype}")
        if am.m.size == 0 or am.n.size == 0 or am.batch.size == 0 or am.k.size == 0:
            return refuse("stream_sm90 needs terms and results")
        common = tiling.check_common(am, device)
        if not common:
            return common
        layout = _layout(am)
        if isinstance(layout, str):
            return refuse(layout)
        return common if self.configs(am, device) else refuse(f"blocks of {am.k.size} + {am.n.size} elements a row find no room")

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Legal configs, the fastest by estimate first."""
        return _sorted_configs(am, device)

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        c = _consts(am, config)
        blocks = -(-am.m.size // c.rows)
        if device.is_emulated:  # an instruction costs about 4 us per batch of 16384 threads
            return 4.0 * (60 + 8 * c.steps * c.tiles) * c.rows / SLICE * -(-blocks // (device.num_sms * c.warps)) + 2000
        # A block: fragments of A and B and results through shared memory, products at mma.sync's rate.
        shared = c.rows * (c.k * _ways(c.k) + c.n * _ways(c.n)) * 2 / 128 + (0 if c.is_resident else c.rows / SLICE * c.k * c.n * 2 / 128)
        products = c.rows * c.k * c.n * 2 / 2440
        rounds = -(-blocks // (device.num_sms * c.warps))
        clocks = rounds * (c.warps * max(shared, products) + 900)
        memory_us = am.m.size * (c.k + c.n) * 2 / (device.bandwidth_gbs * 0.93e3)
        in_flight = c.warps * min(c.stages, rounds) * c.slot_bytes
        starved = max(1.0, 24000 * c.k / (c.k + c.n) / max(1, in_flight)) ** 0.5 if rounds > 1 else 1.0
        compute_us = clocks / 1620
        return max(compute_us, memory_us * starved) + 0.15 * min(compute_us, memory_us) + 4.8 + c.k * c.n * 2 / 60e3

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        layout = _layout(am)
        assert not isinstance(layout, str), layout
        d, major = layout
        c = _consts(am, config)
        blocks = -(-am.m.size // c.rows)
        line = d.b.row_strides[0] if major == "k" else d.b.k_strides[0]
        args = [Arg("ptr_a", "u64", TensorArg(am.a.name, am.a.base * 2)), Arg("ptr_b", "u64", TensorArg(am.b.name, am.b.base * 2)),
                Arg("ptr_d", "u64", TensorArg(am.d.name, am.d.base * 2)), Arg("m_size", "u32", am.m.size), Arg("num_blocks", "u32", blocks),
                Arg("b_line_bytes", "u32", line * 2)]
        for consts, t in zip(c.epilogue.targets[1:], d.targets[1:], strict=True):
            args += [Arg(f"ptr_{consts.prefix}", "u64", TensorArg(t.name, t.base * t.dtype.num_bytes)),
                     Arg(f"{consts.prefix}_step", "u64", t.n_strides[0] % (1 << 64))]
        args += [Arg(f"scalar_{name}", "f32", ScalarArg(name)) for name in c.epilogue.scalars]
        num_ctas = min(-(-blocks // c.warps), device.num_sms)
        return Build((Step.of("matmul/stream_sm90", op, PtxTarget.for_arch(device.arch, (8, 0)), 32 * c.warps, args, c, num_ctas,
                              dynamic_smem=c.smem_bytes, suffix=f"{c.kind}_{c.k}x{c.n}"),), workspace_offset)


STREAM_SM90 = StreamSm90Matmul()


@lru_cache(maxsize=256)
def _sorted_configs(am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return tuple(sorted(_candidates(am, device), key=lambda c: STREAM_SM90.estimate(am, c, device)))


def _candidates(am: AffineMatmul, device: DeviceInfo) -> Iterator[EngineConfig]:
    streams = leaves_first(2 * am.m.size * am.k.size, 2 * am.m.size * am.n.size, device)
    for warps in WARPS:
        for slices in BLOCK_SLICES:
            fitting = [s for s in range(2, MAX_STAGES + 1)
                       if _consts(am, EngineConfig.of(warps=warps, slices=slices, stages=s, streams=streams)).smem_bytes <= SMEM_BYTES]
            if fitting:
                yield EngineConfig.of(warps=warps, slices=slices, stages=fitting[-1], streams=streams)


# ---- Sums over a long k of small matrices: filter gradients ------------------------------------------------

MAX_ACCUMULATORS = 160  # of a lane
MAX_ELEMENTS = 49152  # of D
SHORT_RING_BYTES = 49152  # under way in an SM, which memory needs to keep its pace
MAX_SHORT_STAGES = 16


@dataclass(frozen=True, slots=True)
class StreamGradientConsts:
    """Consts of matmul/stream_gradient_sm90. u_side: "a" | "b", the side of D that makes tiles of 16, the other one tiles of 8; groups x
    sharers warps: groups deal out the tiles of 16, sharers the k; slices of 16 k of a block for each sharer; stride_u, stride_v: of D's
    partial sums."""

    kind: str
    m: int
    n: int
    u_side: str
    groups: int
    sharers: int
    slices: int
    stages: int
    stride_u: int
    stride_v: int
    streams: bool  # lines of A and B leave L2 first

    @property
    def u(self) -> int:
        return self.m if self.u_side == "a" else self.n

    @property
    def v(self) -> int:
        return self.n if self.u_side == "a" else self.m

    @property
    def warps(self) -> int:
        """That multiply."""
        return self.groups * self.sharers

    @property
    def rows(self) -> int:
        """Lines of k of a block."""
        return SLICE * self.sharers * self.slices

    @property
    def group_tiles(self) -> int:
        return self.u // SLICE // self.groups

    @property
    def tiles_v(self) -> int:
        return self.v // 8

    @property
    def a_bytes(self) -> int:
        return self.rows * self.m * 2

    @property
    def b_bytes(self) -> int:
        return self.rows * self.n * 2

    @property
    def stage_bytes(self) -> int:
        return self.a_bytes + self.b_bytes

    @property
    def elements(self) -> int:
        return self.m * self.n

    @property
    def barriers_at(self) -> int:
        """Behind the ring, and behind the sums that take its place."""
        return -(-max(self.stages * self.stage_bytes, 4 * self.sharers * self.elements) // 128) * 128

    @property
    def smem_bytes(self) -> int:
        return self.barriers_at + 16 * self.stages


@lru_cache(maxsize=256)
def _gradient_layout(am: AffineMatmul) -> tuple[tiling.Digits, str] | str:
    """(digits, the side of D that makes tiles of 16), or why the engine does not take the matmul."""
    d = tiling.merged_digits(am)
    if am.batch.size > 1 or len(d.k) > 1 or len(d.a.rows) > 1 or len(d.b.rows) > 1 or d.a.bounds or d.b.bounds:
        return "stream_gradient_sm90 takes one pair of plain matrices"
    for x in (d.a, d.b):
        if x.rows[0] % 8 or x.row_strides[0] != 1 or x.k_strides[0] != x.rows[0] or x.source.base * 2 % 16 or x.source.align % 16:
            return f"the lines of {x.source.name} are no multiples of 8 elements that lie end to end from a multiple of 16 bytes on"
    sides = sorted((side for side, x in (("a", d.a), ("b", d.b)) if x.rows[0] % SLICE == 0), key=lambda side: -(
        am.m.size if side == "a" else am.n.size))
    if not sides:
        return f"neither {am.m.size} nor {am.n.size} is a multiple of 16"
    if am.m.size * am.n.size > MAX_ELEMENTS:
        return f"{am.m.size} x {am.n.size} sums are more than {MAX_ELEMENTS}"
    return d, sides[0]


@lru_cache(maxsize=1024)
def _gradient_consts(am: AffineMatmul, config: EngineConfig) -> StreamGradientConsts:
    layout = _gradient_layout(am)
    assert not isinstance(layout, str), layout
    d, u_side = layout
    strides = {"m": am.n.size, "n": 1} if tiling.inner_direction(d) == "n" else {"m": 1, "n": am.m.size}
    stride_u, stride_v = (strides["m"], strides["n"]) if u_side == "a" else (strides["n"], strides["m"])
    return StreamGradientConsts(am.a.dtype.name, am.m.size, am.n.size, u_side, config["groups"], config["sharers"], config["slices"],
                                config["stages"], stride_u, stride_v, config["streams"])


class StreamGradientSm90Matmul:
    """f16 and bf16 products of two dense matrices along their long side, f32 accumulators."""

    name = "stream_gradient_sm90"
    is_deterministic = True

    def check(self, am: AffineMatmul, device: DeviceInfo) -> Support:
        """sm_90a; both operands f16 or both bf16, their lines at each k end to end, multiples of 8 long, one of 16; D small."""
        halves = tiling.check_halves_sm90(self.name, am, device)
        if not halves:
            return halves
        if am.m.size == 0 or am.n.size == 0 or am.batch.size == 0 or am.k.size == 0:
            return refuse(f"{self.name} needs terms and results")
        common = tiling.check_common(am, device)
        if not common:
            return common
        layout = _gradient_layout(am)
        if isinstance(layout, str):
            return refuse(layout)
        return common if self.configs(am, device) else refuse(f"{am.m.size} x {am.n.size} sums find no room in the registers of a CTA")

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Legal configs, the fastest by estimate first."""
        return _sorted_gradient_configs(am, device)

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        c = _gradient_consts(am, config)
        blocks = -(-am.k.size // c.rows)
        rounds = -(-blocks // device.num_sms)
        if device.is_emulated:
            return 4.0 * rounds * (40 + 10 * c.slices * c.group_tiles * c.tiles_v) + 3000
        # A block: its lines through shared memory, those of v once a group, some banks twice or more; products at mma.sync's rate.
        shared = c.rows * (c.u * _ways(c.u) + c.groups * c.v * _ways(c.v)) * 2 / 128
        products = c.rows * c.elements * 2 / (2440 if c.warps > 4 else 2000)
        # Besides, the ring fills before the first product; each sharer's sums go through shared memory, and those of all CTAs through L2.
        # Fitted to 50 timings on an H200 (filter gradients of EfficientNet-B0, N=128): off by 3 %, the first choice at most 1 % slower.
        memory_us = am.k.size * (c.m + c.n) * 2 / (device.bandwidth_gbs * 0.985e3)
        compute_us = rounds * (max(shared, products) + 120) / 1620
        ring_bytes = c.stages * c.stage_bytes
        starved = max(1.0, 32000 / (ring_bytes - c.stage_bytes)) ** 0.5 if rounds > c.stages else 1.0  # a stage is being used up
        partial_us = 1.76 * min(blocks, device.num_sms) * c.elements * 4 / (device.bandwidth_gbs * 1e3)
        return (max(compute_us, memory_us * starved) + 0.05 * min(compute_us, memory_us) + 7.7 + partial_us + ring_bytes / 83e3
                + c.sharers * c.elements * 4 / 91e3 + 0.043 * c.warps)

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        """One persistent CTA per SM, then the sum of their parts in a fixed order."""
        layout = _gradient_layout(am)
        assert not isinstance(layout, str), layout
        d = layout[0]
        c = _gradient_consts(am, config)
        blocks = -(-am.k.size // c.rows)
        num_ctas = min(blocks, device.num_sms)
        inner = tiling.inner_direction(d)
        sizes = {"m": am.m.size, "n": am.n.size}
        grid = tiling.Grid(1, 1, 1, num_ctas, blocks, -(-blocks // num_ctas), 1, sizes[inner], sizes["m" if inner == "n" else "n"])
        wide = num_ctas * c.elements > tiling.INT32_MAX or tiling.needs_wide(d)
        epilogue = tiling.plan_epilogue(d, am, SLICE, 64, 32, wide, True)
        args = [Arg("ptr_a", "u64", TensorArg(am.a.name, am.a.base * 2)), Arg("ptr_b", "u64", TensorArg(am.b.name, am.b.base * 2)),
                Arg("ptr_d", "u64", WorkspaceArg(workspace_offset)), Arg("k_size", "u32", am.k.size), Arg("num_blocks", "u32", blocks)]
        target = PtxTarget.for_arch(device.arch, (8, 0))
        step = Step.of("matmul/stream_gradient_sm90", op, target, 32 * (c.warps + 1), args, c, num_ctas, dynamic_smem=c.smem_bytes,
                       suffix=f"{c.kind}_{c.m}x{c.n}")
        reduce = tiling.reduce_step(op, am, d, grid, epilogue, target, wide, workspace_offset)
        return Build((step, reduce), workspace_offset + num_ctas * c.elements * 4)


STREAM_GRADIENT_SM90 = StreamGradientSm90Matmul()


@lru_cache(maxsize=256)
def _sorted_gradient_configs(am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return tuple(sorted(_gradient_candidates(am, device), key=lambda c: STREAM_GRADIENT_SM90.estimate(am, c, device)))


def _gradient_candidates(am: AffineMatmul, device: DeviceInfo) -> Iterator[EngineConfig]:
    streams = leaves_first(2 * am.k.size * (am.m.size + am.n.size), 0, device)
    layout = _gradient_layout(am)
    assert not isinstance(layout, str), layout
    u, v = (am.m.size, am.n.size) if layout[1] == "a" else (am.n.size, am.m.size)
    tiles = u // SLICE
    for groups in (g for g in range(1, 17) if tiles % g == 0):
        accumulators = tiles // groups * (v // 8) * 4
        for sharers in (1, 2, 4, 8, 16):
            warps = groups * sharers
            if not 4 <= warps <= 16:
                continue
            # Each quarter of an SM has 512 registers a lane for its warps, of which one more brings the blocks.
            registers = min(255, 512 // -(-(warps + 1) // 4) // 8 * 8)
            if accumulators > MAX_ACCUMULATORS or accumulators + v // 4 + 40 > registers:
                continue
            for slices in (1, 2, 4):
                knobs = {"groups": groups, "sharers": sharers, "slices": slices, "streams": streams}
                stage_bytes = _gradient_consts(am, EngineConfig.of(**knobs, stages=0)).stage_bytes
                for stages in sorted({min(MAX_STAGES, SMEM_BYTES // stage_bytes), min(MAX_SHORT_STAGES, SHORT_RING_BYTES // stage_bytes)}):
                    config = EngineConfig.of(**knobs, stages=stages)
                    if stages > 1 and _gradient_consts(am, config).smem_bytes <= SMEM_BYTES:
                        yield config
