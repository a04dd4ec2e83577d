"""Products of a tall dense matrix with a small one at the speed of memory, sm_90a: pointwise convolutions of few channels.

Rows of A and of D lie end to end, so a block of rows is one run of bytes each, which bulk copies bring and take away whatever the number
of channels. Tensor copies of the wgmma loop want 128 bytes of k and 64 columns at a time and part the lines of narrower rows. Either
each warp streams blocks of its own and multiplies with mma.sync, or warpgroups take blocks of 64 rows in turn and multiply with
wgmma. The small matrix stays in shared memory or registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from ..codegen.spec import Target as PtxTarget
from ..codegen.spec import TensorMapSpec
from ..device import DeviceInfo
from . import affine_tiling as tiling
from .affine import AffineMatmul
from .affine_wgmma_sm90 import epilogue_lines
from .base import Arg, Build, EngineConfig, ScalarArg, Step, Support, TensorArg, TensorMapArg, WorkspaceArg, refuse

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


@lru_cache(maxsize=256)
def _layout(am: AffineMatmul, name: str = "stream_sm90") -> tuple[tiling.Digits, str] | str:
    """(digits, how B lies), or why an engine of that name does not take the matmul."""
    d = tiling.merged_digits(am)
    k, n = am.k.size, am.n.size
    if am.batch.size > 1 or len(d.k) > 1 or len(d.a.rows) > 1 or len(d.b.rows) > 1 or d.a.bounds or d.b.bounds:
        return f"{name} takes one pair of plain matrices"
    if k % 8 or n % 8:
        return f"{name} takes multiples of 8 terms and columns, not {k} and {n}"
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


def _check_rows(name: str, am: AffineMatmul, device: DeviceInfo) -> Support:
    """What both kernels that stream rows need, but for room."""
    halves = tiling.check_halves_sm90(name, am, device)
    if not halves:
        return halves
    if am.d.dtype != am.a.dtype:
        return refuse(f"{name} takes and gives f16 or bf16 alone, not {am.d.dtype} of {am.a.dtype}")
    if am.m.size == 0 or am.n.size == 0 or am.batch.size == 0 or am.k.size == 0:
        return refuse(f"{name} needs terms and results")
    common = tiling.check_common(am, device)
    layout = _layout(am, name) if common else ""
    return refuse(layout) if common and isinstance(layout, str) else common


def _epilogue_arguments(am: AffineMatmul, d: tiling.Digits, epilogue: tiling.EpilogueConsts) -> list[Arg]:
    args = []
    for consts, t in zip(epilogue.targets[1:], d.targets[1:], strict=True):
        args += [Arg(f"ptr_{consts.prefix}", "u64", TensorArg(t.name, t.base * t.dtype.num_bytes)),
                 Arg(f"{consts.prefix}_step", "u64", t.n_strides[0] % (1 << 64))]
    return args + [Arg(f"scalar_{name}", "f32", ScalarArg(name)) for name in epilogue.scalars]


class StreamSm90Matmul:
    """f16 and bf16 products of dense rows with a matrix of at most 96 KB; f32 accumulators, results of the same type."""

    name = "stream_sm90"
    is_deterministic = True

    def check(self, am: AffineMatmul, device: DeviceInfo) -> Support:
        """sm_90a; both operands and D f16, or all bf16; k and n multiples of 8; rows of A and D end to end; epilogue operands that change
        along n only."""
        common = _check_rows(self.name, am, device)
        if not common:
            return common
        if am.k.size * am.n.size * 2 > MAX_B_BYTES:
            return refuse(f"{am.b.name} has {am.k.size * am.n.size * 2} bytes; {MAX_B_BYTES} find room")
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
        args += _epilogue_arguments(am, d, c.epilogue)
        num_ctas = min(-(-blocks // c.warps), device.num_sms)
        return Build((Step.of("matmul/stream_sm90", op, PtxTarget.for_arch(device.arch, (8, 0)), 32 * c.warps, args, c, num_ctas,
                              dynamic_smem=c.smem_bytes, suffix=f"{c.kind}_{c.k}x{c.n}"),), workspace_offset)


STREAM_SM90 = StreamSm90Matmul()


@lru_cache(maxsize=256)
def _sorted_configs(am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return tuple(sorted(_candidates(am), key=lambda c: STREAM_SM90.estimate(am, c, device)))


def _candidates(am: AffineMatmul) -> Iterator[EngineConfig]:
    for warps in WARPS:
        for slices in BLOCK_SLICES:
            fitting = [s for s in range(2, MAX_STAGES + 1)
                       if _consts(am, EngineConfig.of(warps=warps, slices=slices, stages=s, streams=False)).smem_bytes <= SMEM_BYTES]
            if fitting:
                for streams in (False, True):
                    yield EngineConfig.of(warps=warps, slices=slices, stages=fitting[-1], streams=streams)


# ---- The same with warpgroups ------------------------------------------------------------------------------

BLOCK_ROWS = 64  # of wgmma
SPANS = (64, 32, 16)  # elements of a panel of B, of which a swizzle has 128, 64 or 32 bytes
MAX_BOX = 256
MAX_COLUMNS = {1: 256, 2: 160, 3: 96}  # multiplied at a time, by warpgroups
WARPGROUP_REGISTERS = {1: 255, 2: 168, 3: 128}  # of a thread: a quarter of an SM has 512 a lane for its warps
OTHER_REGISTERS = 40  # beside sums and fragments
MAX_SLOTS = 24
MAX_EPILOGUE_LINES = 4000


@dataclass(frozen=True, slots=True)
class StreamWgmmaConsts:
    """Consts of matmul/stream_wgmma_sm90. B lies in panels of `span` elements along the direction in which it is contiguous ("k" | "row":
    b_major), each of whole lines; slot_rows: rows of A of a stage of the ring; outs: blocks of results of a warp."""

    kind: str
    k: int
    n: int
    b_major: str
    span: int
    warpgroups: int
    slot_rows: int
    stages: int
    outs: int
    streams: bool  # lines of A leave L2 first
    epilogue: tiling.EpilogueConsts

    @property
    def steps(self) -> int:
        return -(-self.k // 16)

    @property
    def batch(self) -> int:
        """Steps whose fragments of A are in registers at a time: all, where these find room, so that their place is soon free again."""
        most = (WARPGROUP_REGISTERS[self.warpgroups] - OTHER_REGISTERS - self.chunk // 2) // 4
        return -(-self.steps // -(-self.steps // most))

    @property
    def batches(self) -> list[list[int]]:
        """Steps of 16 of k, of which those of a batch have their operands in registers."""
        return [list(range(first, min(first + self.batch, self.steps))) for first in range(0, self.steps, self.batch)]

    @property
    def chunk(self) -> int:
        """Columns that are multiplied at a time: whole panels, where these part the columns, and as many each time if that can be."""
        unit = 8 if self.b_major == "k" else self.span
        least, units = -(-self.n // MAX_COLUMNS[self.warpgroups]), -(-self.n // unit)
        parts = next((p for p in range(least, 2 * least + 1) if self.n % (p * unit) == 0), least)
        return min(self.n, -(-units // parts) * unit)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(first column, columns)"""
        return [(first, min(self.chunk, self.n - first)) for first in range(0, self.n, self.chunk)]

    @property
    def parts(self) -> int:
        return BLOCK_ROWS // self.slot_rows

    @property
    def span_bytes(self) -> int:
        return 2 * self.span

    @property
    def panels(self) -> int:
        return -(-(self.k if self.b_major == "k" else self.n) // self.span)

    @property
    def lines(self) -> int:
        """Of a panel: those beyond k are zero."""
        return self.n if self.b_major == "k" else 16 * self.steps

    @property
    def pieces(self) -> int:
        """Boxes of a panel."""
        return -(-self.lines // MAX_BOX)

    @property
    def box_lines(self) -> int:
        return -(-self.lines // (8 * self.pieces)) * 8

    @property
    def panel_bytes(self) -> int:
        return self.pieces * self.box_lines * self.span_bytes

    @property
    def b_bytes(self) -> int:
        return self.panels * self.panel_bytes

    @property
    def fixed_bits(self) -> str:
        """A descriptor but for its address: swizzle, 8 lines between groups of lines, a panel between panels along n."""
        leading = 1 if self.b_major == "k" else self.panel_bytes >> 4
        return f"0x{SPANS.index(self.span) + 1 << 62 | 8 * self.span_bytes >> 4 << 32 | leading << 16:016X}"

    def operand_units(self, column: int, step: int) -> int:
        """Descriptor units (16 bytes) to the columns from `column` on, at a step of k."""
        if self.b_major == "k":
            panel, within = divmod(16 * step, self.span)
            return (panel * self.panel_bytes + column * self.span_bytes + 2 * within) >> 4
        return (column // self.span * self.panel_bytes + 16 * step * self.span_bytes) >> 4

    @property
    def slot_bytes(self) -> int:
        return self.slot_rows * self.k * 2

    @property
    def ring_at(self) -> int:
        return -(-self.b_bytes // 128) * 128

    @property
    def out_bytes(self) -> int:
        """Of a warp's rows."""
        return SLICE * self.n * 2

    @property
    def outs_at(self) -> int:
        return self.ring_at + self.stages * self.slot_bytes

    @property
    def operands_at(self) -> int:
        return self.outs_at + 4 * self.warpgroups * self.outs * self.out_bytes

    @property
    def barriers_at(self) -> int:
        return -(-(self.operands_at + 4 * self.n * (len(self.epilogue.targets) - 1)) // 16) * 16

    @property
    def smem_bytes(self) -> int:
        return self.barriers_at + 16 * self.stages + 16


@lru_cache(maxsize=1024)
def _wgmma_consts(am: AffineMatmul, config: EngineConfig) -> StreamWgmmaConsts:
    layout = _layout(am)
    assert not isinstance(layout, str), layout
    d, major = layout
    along = am.k.size if major == "k" else am.n.size
    span = min(SPANS, key=lambda s: -(-along // s) * s)  # the widest of those that pad least
    epilogue = tiling.plan_epilogue(d, am, SLICE, 64, 32, False, False)
    return StreamWgmmaConsts(am.a.dtype.name, am.k.size, am.n.size, major, span, config["warpgroups"], config["rows"], config["stages"],
                             config["outs"], config["streams"], epilogue)


class StreamWgmmaSm90Matmul:
    """f16 and bf16 products of dense rows with a matrix that shared memory holds, on wgmma; f32 accumulators, results of the same type."""

    name = "stream_wgmma_sm90"
    is_deterministic = True

    def check(self, am: AffineMatmul, device: DeviceInfo) -> Support:
        """As StreamSm90Matmul.check; an epilogue that is not too long to apply to all sums of a thread."""
        common = _check_rows(self.name, am, device)
        if common and epilogue_lines(am) * am.n.size // 2 > MAX_EPILOGUE_LINES:
            return refuse(f"its epilogue is too long to apply to {am.n.size // 2} sums of a thread")
        return common if not common or self.configs(am, device) else refuse(
            f"{am.b.name} of {am.k.size} x {am.n.size} elements and blocks of {BLOCK_ROWS} rows find no room")

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Legal configs, the fastest by estimate first."""
        return _sorted_wgmma_configs(am, device)

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        c = _wgmma_consts(am, config)
        blocks = -(-am.m.size // BLOCK_ROWS)
        rounds = -(-blocks // device.num_sms)  # of an SM's blocks, which its warpgroups deal out
        if device.is_emulated:
            return 4.0 * (200 + 40 * c.steps * len(c.chunks)) * -(-rounds // c.warpgroups) + 3000
        # A block: A and D through shared memory, products; a warpgroup by itself waits for each.
        shared = BLOCK_ROWS * (c.k * _ways(c.k) * (len(c.chunks) if len(c.batches) > 1 else 1) + c.n * _ways(c.n)) * 2 / 128
        products = c.steps * sum(max(24, columns / 2) for _, columns in c.chunks)
        alone = -(-rounds // c.warpgroups) * (2 * shared + products + 60 * c.steps + 700)
        compute_us = max(alone, rounds * max(shared, products)) / 1620
        memory_us = am.m.size * (c.k + c.n) * 2 / (device.bandwidth_gbs * 0.93e3)
        in_flight = min(c.stages, rounds * c.parts) * c.slot_bytes
        starved = max(1.0, 40000 * c.k / (c.k + c.n) / in_flight) ** 0.5 if rounds > 1 else 1.0
        return max(compute_us, memory_us * starved) + 0.15 * min(compute_us, memory_us) + 4.8 + c.b_bytes / 60e3

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        layout = _layout(am)
        assert not isinstance(layout, str), layout
        d, major = layout
        c = _wgmma_consts(am, config)
        size = am.b.dtype.num_bytes
        blocks = -(-am.m.size // BLOCK_ROWS)
        line = d.b.row_strides[0] if major == "k" else d.b.k_strides[0]
        dims = (c.k, c.n) if major == "k" else (c.n, c.k)
        map_b = TensorMapSpec(c.kind, dims, (line * size,), (c.span, c.box_lines), swizzle=c.span_bytes)
        args = [Arg("map_b", "tensor_map", TensorMapArg(am.b.name, map_b, am.b.base * size)),
                Arg("ptr_a", "u64", TensorArg(am.a.name, am.a.base * size)), Arg("ptr_d", "u64", TensorArg(am.d.name, am.d.base * size)),
                Arg("m_size", "u32", am.m.size), Arg("num_blocks", "u32", blocks), *_epilogue_arguments(am, d, c.epilogue)]
        return Build((Step.of("matmul/stream_wgmma_sm90", op, PtxTarget.for_arch(device.arch, (8, 0)), 32 * (4 * c.warpgroups + 1), args, c,
                              min(blocks, device.num_sms), dynamic_smem=c.smem_bytes, suffix=f"{c.kind}_{c.k}x{c.n}"),), workspace_offset)


STREAM_WGMMA_SM90 = StreamWgmmaSm90Matmul()


@lru_cache(maxsize=256)
def _sorted_wgmma_configs(am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return tuple(sorted(_wgmma_candidates(am), key=lambda c: STREAM_WGMMA_SM90.estimate(am, c, device)))


def _wgmma_candidates(am: AffineMatmul) -> Iterator[EngineConfig]:
    for warpgroups in MAX_COLUMNS:
        for outs in (2, 1):
            for rows in (64, 32, 16):
                knobs = {"warpgroups": warpgroups, "rows": rows, "outs": outs}
                c = _wgmma_consts(am, EngineConfig.of(**knobs, stages=0, streams=False))
                stages = min(MAX_SLOTS, (SMEM_BYTES - c.smem_bytes) // (c.slot_bytes + 16))
                # What a stage held before belonged to the same warpgroup, which therefore knows that it has come: copies come in any
                # order, and a barrier tells a phase from the next one only. Smaller slots where larger ones leave no room for two blocks.
                if warpgroups > 1:
                    stages -= stages % (warpgroups * c.parts)
                if stages < warpgroups * c.parts or (rows > 16 and stages < 2 * c.parts):
                    continue
                for streams in (False, True):
                    yield EngineConfig.of(**knobs, stages=stages, streams=streams)
                break


# ---- Sums over a long k of small matrices: filter gradients ------------------------------------------------

MAX_ACCUMULATORS = 160  # of a lane
MAX_ELEMENTS = 49152  # of D
MAX_SHORT_STAGES = 24
SHORT_RING_BYTES = 114688  # of a ring beside which the CTAs that add the parts can wait


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
        memory_us = am.k.size * (c.m + c.n) * 2 / (device.bandwidth_gbs * 0.92e3)
        compute_us = (rounds * (max(shared, products) + 120) + c.stage_bytes / 30) / 1620
        starved = max(1.0, 28000 / (c.stages * c.stage_bytes)) ** 0.5 if rounds > c.stages else 1.0
        partial_us = 2.0 * min(blocks, device.num_sms) * c.elements * 4 / (device.bandwidth_gbs * 1.22e3)
        return max(compute_us, memory_us * starved) + 0.15 * min(compute_us, memory_us) + 8.0 + partial_us

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
    return tuple(sorted(_gradient_candidates(am), key=lambda c: STREAM_GRADIENT_SM90.estimate(am, c, device)))


def _gradient_candidates(am: AffineMatmul) -> Iterator[EngineConfig]:
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
                knobs = {"groups": groups, "sharers": sharers, "slices": slices}
                stage_bytes = _gradient_consts(am, EngineConfig.of(**knobs, stages=0, streams=False)).stage_bytes
                for stages in sorted({min(MAX_STAGES, SMEM_BYTES // stage_bytes), min(MAX_SHORT_STAGES, SHORT_RING_BYTES // stage_bytes)}):
                    c = _gradient_consts(am, EngineConfig.of(**knobs, stages=stages, streams=False))
                    if stages > 1 and c.smem_bytes <= SMEM_BYTES:
                        for streams in (False, True):
                            yield EngineConfig.of(**knobs, stages=stages, streams=streams)
