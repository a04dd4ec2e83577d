"""Gradients of attention with mma.sync, f16 and bf16.

A CTA makes dK and dV of a tile of keys from all queries that see them, another kernel dQ of a tile of queries: scores are made twice,
nothing is added up between CTAs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import e, log2
from typing import ClassVar

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F32
from ..ops.attention import HALVES, AttentionProblem
from ..ops.base import Problem
from ..tensor import TensorDesc
from .attention_delta import delta_step, piece_of, row_bytes
from .attention_scores import ScoreConsts, arguments, score_consts
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, WorkspaceArg, refuse
from .reduce_tree import reduction_steps

_PARKED_BYTES = 32


@dataclass(frozen=True, slots=True)
class TileConsts:
    """Rows of a tensor in shared memory, in pieces of 16 bytes. width: elements of a row. lanes: neighbouring threads that copy a row.
    is_packed: pieces lie together and aligned in memory. offset: of the tile, within its stage if it passes."""

    name: str
    width: int
    lanes: int
    is_packed: bool
    offset: int = 0

    @property
    def chunks(self) -> int:
        """Pieces of a row, filled up with zeros to steps of mma.sync."""
        return -(-self.width // 16) * 2

    @property
    def pitch(self) -> int:
        return (self.chunks + 1) * 16

    @property
    def pieces(self) -> int:
        """Of a row, that a thread copies."""
        return -(-self.chunks // self.lanes)

    def passes(self, rows: int, threads: int) -> int:
        return -(-rows * self.lanes // threads)


@dataclass(frozen=True, slots=True)
class BiasConsts:
    """varies: along which of "bhij" the kernel's result does. own: along which a CTA has a place of its own: "i", too, where each tile of
    queries leaves a part. dtype: of the result. wrt: the tensor of the scores whose gradient it is."""

    varies: str
    own: str
    dtype: str
    wrt: str


@dataclass(frozen=True, slots=True)
class SumConsts:
    """dQ while CTAs add to it. tiles_m, units: 16 queries and 16 columns each, of a warp. warps_q: warps along the queries. has_vectors:
    four numbers are added at once."""

    tiles_m: int
    units: int
    warps_q: int
    has_vectors: bool

    @property
    def lane_bytes(self) -> int:
        """From lane to lane."""
        return 16 if self.has_vectors else 4


@dataclass(frozen=True, slots=True)
class BackwardConsts:
    """is_fast: scores are products times a scale above 0, which goes into the exponential's (after the mask) and the result's.
    is_keys: keys are held and queries pass. held, passing: the two tensors of each. results: what is written, and its accumulators.
    rows, columns: of a held and of a passing tile. tiles_m: 16 rows each of a warp. by_tiles: CTAs are counted heads first.
    bias: the kernel of its gradient, whose CTAs have a tile each of its extent. split: warps that share their rows. Where in shared memory
    numbers wait (parked_at), P and dS lie (weights_at, gradients_at), if other warps read them, and dS of every other tile (second_at).
    defers: a tile's part of dQ is made in the next round; loads_first: after loads are asked for, or before; finds_again: the thread's
    places in tiles are found anew for every tile: as the assembler finds registers."""

    score: ScoreConsts
    is_fast: bool
    kind: str
    is_keys: bool
    has_group: bool
    held: tuple[TileConsts, ...]
    passing: tuple[TileConsts, ...]
    results: tuple[tuple[TileConsts, str], ...]
    rows: int
    columns: int
    tiles_m: int
    stages_offset: int
    stage_bytes: int
    stats_offset: int
    by_tiles: bool
    bias: BiasConsts | None = None
    sums: SumConsts | None = None
    split: int = 1
    parked_at: int = 0
    weights_at: int = 0
    gradients_at: int = 0
    second_at: int = 0
    loads_first: bool = True
    defers: bool = False
    finds_again: bool = False

    log2_e: ClassVar[float] = log2(e)
    parked: ClassVar[tuple[str, ...]] = ("%tile_row", "%memory_row", "%own_head", "%memory_batch", "%rows_there")

    @property
    def own_columns(self) -> int:
        """Of a passing tile, that a warp has in the first products."""
        return self.columns // self.split

    @property
    def words_pitch(self) -> int:
        """Of P and dS in shared memory."""
        return 2 * self.columns + 16

    @property
    def turns(self) -> bool:
        """Tiles pass that do not all follow each other."""
        return self.has_group or self.sums is not None

    @property
    def start(self) -> str:
        """The column with which every head begins."""
        return "%passing_begin" if self.sums is None else "%start"

    @property
    def has_scores(self) -> bool:
        """Gradients of scores are wanted."""
        return self.bias is not None or any(acc == "acc_a" for _, acc in self.results)

    @property
    def has_values(self) -> bool:
        return any(acc == "acc_b" for _, acc in self.results)

    @property
    def value_chunks(self) -> int:
        return next(t.chunks for t, acc in self.results if acc == "acc_b")

    @property
    def mma(self) -> str:
        return f"m16n8k16.row.col.f32.{self.kind}.{self.kind}.f32"

    @staticmethod
    def names(stem: str, first: int, count: int) -> list[str]:
        return [f"%{stem}{i}" for i in range(first, first + count)]

    def four(self, stem: str, m: int, n: int, tiles_n: int) -> list[str]:
        return self.names(stem, (m * tiles_n + n) * 4, 4)

    def elements(self, stem: str, m: int, n: int, first: int | None = None) -> list[tuple[str, int, int]]:
        """The lane's elements of an m16n8 tile, for the macros of scores; first: number of their first register."""
        names = self.four(stem, m, n, self.own_columns // 8) if first is None else self.names(stem, first, 4)
        return [(name, 2 * m + i // 2, 8 * n + i % 2) for i, name in enumerate(names)]

    @property
    def all_elements(self) -> list[tuple[str, int, int]]:
        return [x for m in range(self.tiles_m) for n in range(self.own_columns // 8) for x in self.elements("s", m, n)]

    @property
    def rows_of(self) -> list[str]:
        return self.names("row", 0, 2 * self.tiles_m)

    @property
    def lows(self) -> list[str]:
        return self.names("low", 0, 2 * self.tiles_m)

    @property
    def limits(self) -> list[str]:
        return self.names("limit", 0, 2 * self.tiles_m)


def _is_fast(p: AttentionProblem) -> bool:
    return p.expression is None and not p.dropout and p.scale > 0  # -inf of a mask times another scale is no -inf


def _tile(p: AttentionProblem, name: str, offset: int = 0) -> TileConsts:
    desc = p.heads_of(name)
    chunks = -(-desc.shape[-1] // 16) * 2
    return TileConsts(name, desc.shape[-1], next(n for n in (8, 4, 2) if n <= chunks), piece_of(desc) == 8, offset)


def _tile_args(desc: TensorDesc, tile: TileConsts, threads: int, columns: int = 0) -> list[Arg]:
    """Bytes: batch, head, row (stride) and element steps; pass: to the thread's next row; pace: to the next tile that passes."""
    size, name = desc.dtype.num_bytes, tile.name
    batch, head, row, element = (s * size for s in desc.strides)
    args = [Arg(f"ptr_{name}", "u64", TensorArg(name)), Arg(f"batch_{name}", "s64", batch), Arg(f"head_{name}", "s64", head),
            Arg(f"stride_{name}", "s64", row), Arg(f"element_{name}", "s64", element),
            Arg(f"pass_{name}", "s64", row * (threads // tile.lanes))]
    return args + ([Arg(f"pace_{name}", "s64", row * columns)] if columns else [])


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a kernel's CTA."""

    warps: int
    tiles_m: int
    columns: int
    split: int = 1
    defers: int = 0

    @property
    def rows(self) -> int:
        return 16 * self.warps * self.tiles_m // self.split

    @property
    def words(self) -> int:
        """Bytes of P, or of dS, in shared memory."""
        return (2 * self.columns + 16) * self.rows

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.columns}w{self.warps}" + (f"s{self.split}" if self.split > 1 else "") + "d" * self.defers


def _layout(p: AttentionProblem, names: tuple[tuple[str, ...], tuple[str, ...]], is_keys: bool,
            shape: _Shape) -> tuple[tuple[TileConsts, ...], tuple[TileConsts, ...], int, int, int]:
    """(held, passing, where stages begin, bytes of a stage, where in a stage lse2 and delta lie)."""
    held, passing, at = [], [], 0
    for name in names[0]:
        held.append(_tile(p, name, at))
        at += held[-1].pitch * shape.rows
    stage = 0
    for name in names[1]:
        passing.append(_tile(p, name, stage))
        stage += passing[-1].pitch * shape.columns
    return tuple(held), tuple(passing), at, stage + (8 * shape.columns if is_keys else 0), stage


def _smem(p: AttentionProblem, device: DeviceInfo, outputs: tuple[str, ...], shape: _Shape, adds: bool = False) -> int:
    is_keys = "dq" not in outputs
    _, _, at, stage, _ = _layout(p, _operands(is_keys, outputs), is_keys, shape)
    words = shape.words * ((2 if shape.defers else 1 if adds else shape.split > 1) + (shape.split > 1))  # dS, of two tiles if deferred; P
    return max(at + 2 * stage + words, *(_tile(p, n).pitch * shape.rows for n in outputs)) + _PARKED_BYTES


def _sums(p: AttentionProblem, device: DeviceInfo, shape: _Shape) -> SumConsts:
    tiles_m = 2 if shape.columns >= 32 else 1
    warps_q = min(shape.warps, shape.columns // (16 * tiles_m))
    tiles_m = shape.columns // (16 * warps_q)
    units = -(-_tile(p, "q").chunks // 2 // (shape.warps // warps_q))
    return SumConsts(tiles_m, units, warps_q, device.at_least(9))


def _groups(p: AttentionProblem) -> int:
    """16 queries each, of a head: those of a sequence begin with a group."""
    return -(-p.len_q // 16) + (p.batch if p.is_varlen else 0)


# (warps, 16 rows each of a warp, columns, warps that share rows, whether dQ is deferred) by the longest row, the fastest first: of kernels
# that hold keys and of those that hold queries; of those that hold keys and add up dQ.
_SHAPES: dict[int, tuple[tuple[tuple[int, ...], ...], ...]] = {
    64: (((4, 2, 32), (8, 2, 32), (8, 1, 64)), ((4, 2, 64), (8, 2, 64), (8, 1, 64))),
    128: (((4, 1, 64), (8, 2, 64, 2), (8, 1, 64), (8, 1, 32)), ((4, 2, 32), (8, 2, 32), (8, 1, 64))),
    256: (((8, 1, 32), (4, 1, 32), (4, 1, 16)), ((8, 1, 32), (4, 1, 32), (4, 1, 16))),
}

_ADDING: dict[int, tuple[tuple[int, ...], ...]] = {
    64: ((4, 2, 32), (4, 2, 32, 1, 1), (4, 1, 64)),
    128: ((8, 2, 64, 2, 1), (8, 2, 64, 2), (8, 1, 32), (4, 1, 32)),
}


def _shapes(p: AttentionProblem, device: DeviceInfo, outputs: tuple[str, ...], adds: bool = False) -> list[_Shape]:
    """Those that fit, the fastest first."""
    is_keys = "dq" not in outputs
    wide = next(n for n in _SHAPES if max(p.dim_qk, p.dim_v) <= n)
    is_packed = all(_tile(p, n).is_packed for n in ("q", "k", "v", "d_out"))
    if p.expression is None and not p.dropout and is_packed:
        shapes = [_Shape(*s) for s in (_ADDING[wide] if adds else _SHAPES[wide][0 if is_keys else 1])]
        if adds and wide == 64 and (p.left is not None if p.heads == p.heads_kv else p.right is None):
            shapes = [s for s in shapes if s.defers]  # the others spill
        if p.is_varlen and is_keys and (wide > 64 or not device.at_least(9)):  # whose places take registers
            shapes = [_Shape(8, 1, 32), _Shape(4, 1, 32)]
    else:  # registers for expressions and addresses, and their text for every element
        shapes = [_Shape(warps, 1, 16 if p.expression is not None and (p.dropout or wide > 128) else 32) for warps in (8, 4)]
    shapes.append(_Shape(2, 1, 16))
    blocks = p.blocks[::-1] if is_keys else p.blocks
    if p.blocks[0]:  # a tile lies within a block of a mask
        shapes = [s for s in shapes if not blocks[0] % s.rows and not blocks[1] % s.columns]
    fits = [s for s in shapes if _smem(p, device, outputs, s, adds) <= device.smem_per_cta]
    chunks = [_tile(p, n).chunks for n in ("q", "v")]
    return [s for s in fits if s.split == 1 or not any(n % (2 * s.split) for n in chunks) and {"dk", "dv"} <= {*outputs}]


def _operands(is_keys: bool, outputs: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not is_keys:
        return ("q", "d_out"), ("k", "v")
    return ("k", "v") if "dk" in outputs else ("k",), ("q", "d_out")


def _keys_outputs(p: AttentionProblem) -> tuple[tuple[str, ...], ...]:
    """What each kernel that holds keys writes: where rows are long, registers do not hold dK and dV."""
    return (("dk", "dv"),) if max(p.dim_qk, p.dim_v) <= 128 else (("dk",), ("dv",))


def _kernel(p: AttentionProblem, device: DeviceInfo, outputs: tuple[str, ...], shape: _Shape, lse2: WorkspaceArg,
            delta: WorkspaceArg, sums: WorkspaceArg | None = None) -> Step:
    """outputs: of ("dk", "dv"), or ("dq",). sums: where parts of dQ are added to."""
    is_keys = "dq" not in outputs
    threads, smem = 32 * shape.warps, _smem(p, device, outputs, shape, sums is not None)
    held, passing, at, stage, stats = _layout(p, _operands(is_keys, outputs), is_keys, shape)
    results = tuple((_tile(p, n), "acc_b" if n == "dv" else "acc_a") for n in outputs)
    length, heads = (p.len_kv, p.heads_kv) if is_keys else (p.len_q, p.heads)
    by_tiles = p.left is not None or p.right is not None
    consts = BackwardConsts(score_consts(p), _is_fast(p), p.desc("q").dtype.name, is_keys, is_keys and p.heads > p.heads_kv, held, passing,
                            results, shape.rows, shape.columns, shape.tiles_m, at, stage, stats, by_tiles,
                            sums=_sums(p, device, shape) if sums is not None else None, split=shape.split,
                            parked_at=smem - _PARKED_BYTES, gradients_at=at + 2 * stage, weights_at=at + 2 * stage + shape.words,
                            second_at=at + 2 * stage + shape.words * (2 if shape.split > 1 else 1),
                            loads_first=not device.at_least(9) or p.heads > p.heads_kv or p.is_varlen or bool(score_consts(p).lengths)
                            or p.alignment == "top_left" and p.left is None, defers=bool(shape.defers),
                            finds_again=sums is None or shape.defers > 0 or p.heads > p.heads_kv and p.right is not None)
    tiles = -(-length // shape.rows) + (p.batch + 2 if p.is_varlen else 0)
    owners = heads * (1 if p.is_varlen else p.batch)
    pitch = p.len_q if sums is None else 16 * _groups(p)
    args = arguments(p)
    args += [Arg("own_heads", "u32", heads), Arg("tiles", "u32", tiles), Arg("owners", "u32", owners)]
    for tile in held:
        args += _tile_args(p.heads_of(tile.name), tile, threads)
    for tile in passing:
        args += _tile_args(p.heads_of(tile.name), tile, threads, shape.columns)
    for tile, _ in results:
        args += _tile_args(p.heads_of(tile.name), tile, threads)
    args += [Arg("ptr_lse2", "u64", lse2), Arg("delta_gap", "s64", delta.byte_offset - lse2.byte_offset),
             Arg("stats_head", "s64", pitch * 4), Arg("stats_pitch", "u32", pitch)]
    if sums is not None:
        args += [Arg("ptr_sums", "u64", sums), Arg("groups", "u32", _groups(p)), Arg("sums_head", "s64", _groups(p) * held[0].chunks * 512)]
    target = Target.for_arch(device.arch, (8, 1) if sums is not None and consts.sums and consts.sums.has_vectors else (7, 0))
    return Step.of("attention/backward_mma", p.op, target, threads, args, consts, tiles * owners,
                   dynamic_smem=smem,
                   suffix="_".join(outputs if sums is None else ("dq", *outputs)))


def _tensor_steps(p: AttentionProblem, wrt: str, device: DeviceInfo, shape: _Shape, lse2: WorkspaceArg, delta: WorkspaceArg, pitch: int,
                  scratch: Scratch) -> list[Step]:
    """The gradient of a bias or another tensor of the scores: at once, or in parts that a reduction adds up, where it has too few tiles for
    the device."""
    threads = 32 * shape.warps
    held, passing, at, stage, stats = _layout(p, (("q", "d_out"), ("k", "v")), False, shape)
    desc = p.desc(f"d{wrt}")
    target = TensorDesc(desc.dtype, p.score_shape(f"d{wrt}"), p.score_strides(f"d{wrt}"), desc.align)
    varies = own = "".join(a for a, n in zip("bhij", target.shape, strict=True) if n > 1)
    counts = {"b": p.batch, "h": p.heads, "i": -(-p.len_q // shape.rows), "j": -(-p.len_kv // shape.columns)}
    places = dict(zip("bhij", target.shape, strict=True))

    def grid() -> int:
        return math.prod(counts[a] for a in own)

    for axis in "bhi":
        if axis not in own and counts[axis] > 1 and grid() < 4 * device.num_sms:
            own += axis
            varies += axis if axis in "bh" else ""
            places[axis] = counts[axis]
    parts = TensorDesc.packed(F32, tuple(places[a] for a in "bhij"))
    is_whole = parts.shape == target.shape
    result, place = (target, TensorArg(f"d{wrt}")) if is_whole else (parts, scratch.take(parts.num_bytes))
    consts = BackwardConsts(score_consts(p), _is_fast(p), p.desc("q").dtype.name, False, False, held, passing, (), shape.rows,
                            shape.columns, shape.tiles_m, at, stage, stats, False, BiasConsts(varies, own, result.dtype.name, wrt))
    args = arguments(p)
    args += [Arg(f"count_{a}", "u32", n) for a, n in counts.items()]
    for tile in (*held, *passing):
        args += _tile_args(p.heads_of(tile.name), tile, threads)
    args += [Arg("ptr_lse2", "u64", lse2), Arg("delta_gap", "s64", delta.byte_offset - lse2.byte_offset),
             Arg("stats_pitch", "u32", pitch), Arg("ptr_dbias", "u64", place)]
    args += [Arg(f"dbias_{a}", "s64", s * result.dtype.num_bytes) for a, s in zip("bhij", result.strides, strict=True)]
    steps = [Step.of("attention/backward_mma_bias", p.op, Target.for_arch(device.arch), threads, args, consts, grid(),
                     dynamic_smem=max(at + stage, 4 * shape.warps * shape.columns), suffix=f"d{wrt}_{own}")]
    if not is_whole:
        axes = tuple(x for x in range(4) if parts.shape[x] != target.shape[x])
        kept = [x for x in range(4) if x not in axes]
        left = TensorDesc(desc.dtype, tuple(target.shape[x] for x in kept), tuple(target.strides[x] for x in kept), desc.align)
        steps += reduction_steps(p.op, (parts, place), (left, TensorArg(f"d{wrt}")), axes, "sum", device, scratch)
    return steps


@dataclass(frozen=True, slots=True)
class SinkConsts:
    """dtype: of the gradient; sinks: theirs."""

    dtype: str
    sinks: str

    log2_e: ClassVar[float] = log2(e)


def sink_step(p: AttentionProblem, device: DeviceInfo, lse2: WorkspaceArg, delta: WorkspaceArg, pitch: int) -> Step:
    """dsinks[h] = -sum over batches and queries of e^(sinks[h] - lse) * delta."""
    args = [Arg("rows", "u32", p.len_q), Arg("pitch", "u32", pitch), Arg("heads", "u32", p.heads),
            Arg("batches", "u32", p.heads_of("q").shape[0]),
            Arg("ptr_lse2", "u64", lse2), Arg("ptr_delta", "u64", delta)]
    for name in ("sinks", "dsinks"):
        desc = p.desc(name)
        args += [Arg(f"ptr_{name}", "u64", TensorArg(name)), Arg(f"step_{name}", "s64", desc.strides[0] * desc.dtype.num_bytes)]
    consts = SinkConsts(p.desc("dsinks").dtype.name, p.desc("sinks").dtype.name)
    return Step.of("attention/sink_gradient", p.op, Target.for_arch(device.arch), 512, args, consts, p.heads, suffix=consts.dtype)


def _microseconds(p: AttentionProblem, device: DeviceInfo, short: float, long: float) -> float:
    """short, long: of what the tensor cores can do, with rows of up to 64 and of up to 128 elements."""
    wide = max(p.dim_qk, p.dim_v)
    share = short if wide <= 64 else long if wide <= 128 else long / 2
    if p.expression is not None or p.dropout:
        share /= 2
    return p.flops / (share * device.tensor_tflops * 1e6)


class AttentionBackwardMma(Engine):
    """dK and dV of a tile of keys, then dQ of a tile of queries; seven products. Every sum has its order."""

    id = "attention_backward.mma"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        p = problem
        assert isinstance(p, AttentionProblem)
        if p.desc("q").dtype not in HALVES:
            return refuse(f"operands of type {p.desc('q').dtype.name} (f16 and bf16)")
        if not device.at_least(8):
            return refuse(f"needs sm_80, not {device.arch}")
        if max(p.dim_qk, p.dim_v) > 256:
            return refuse(f"rows of {max(p.dim_qk, p.dim_v)} elements (at most 256)")
        if max(p.len_q, p.len_kv) >= 2**29:
            return refuse(f"{max(p.len_q, p.len_kv)} queries or keys (less than 2^29)")
        tiles = max(p.len_q, p.len_kv) // 8 + 1
        if p.heads * (tiles + p.batch + 2 if p.is_varlen else tiles * p.batch) >= 2**31:
            return refuse(f"{p.heads} heads of {p.batch} sequences of up to {max(p.len_q, p.len_kv)} queries or keys")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """keys, queries: tiles of the kernels that hold them."""
        assert isinstance(problem, AttentionProblem)
        keys, queries = ([s.name for s in _shapes(problem, device, outputs)] for outputs in (_keys_outputs(problem)[0], ("dq",)))
        pairs = [(keys[min(i, len(keys) - 1)], queries[min(i, len(queries) - 1)]) for i in range(2)]
        return tuple(EngineConfig.of(keys=k, queries=q) for k, q in dict.fromkeys(pairs))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, AttentionProblem)
        return 20.0 + _microseconds(p, device, 0.36, 0.32)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, AttentionProblem)
        if p.is_empty:
            return Build(())
        scratch = Scratch()
        delta, lse2 = (scratch.take(row_bytes(p)) for _ in range(2))
        steps = [delta_step(p, device, delta, lse2)] if p.desc("lse").numel else []
        for outputs, knob in (*((o, "keys") for o in _keys_outputs(p)), (("dq",), "queries")):
            if any(p.desc(n).numel for n in outputs):
                shape = next(s for s in _shapes(p, device, outputs) if s.name == config[knob])
                steps.append(_kernel(p, device, outputs, shape, lse2, delta))
        steps += _others(p, device, lse2, delta, p.len_q, scratch)
        return Build(tuple(steps), scratch.num_bytes)


def _others(p: AttentionProblem, device: DeviceInfo, lse2: WorkspaceArg, delta: WorkspaceArg, pitch: int, scratch: Scratch) -> list[Step]:
    """Gradients of the bias and other tensors of the scores, and of the sinks."""
    steps = []
    for name in p.differentiated:
        if p.desc(f"d{name}").numel:
            steps += _tensor_steps(p, name, device, _Shape(4, 1, 32), lse2, delta, pitch, scratch)
    if p.has("sinks"):
        steps.append(sink_step(p, device, lse2, delta, pitch))
    return steps


class AttentionBackwardMmaAdding(AttentionBackwardMma):
    """dK and dV of a tile of keys, whose part of dQ is added to sums in the workspace; five products. Workspace: dQ in f32."""

    id = "attention_backward.mma_adding"
    is_deterministic = False

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        p = problem
        assert isinstance(p, AttentionProblem)
        found = super().check_support(p, device)
        if p.has("block_mask"):
            return refuse("a block_mask, whose tiles are not passed over here")
        if found and max(p.dim_qk, p.dim_v) > 128:
            return refuse(f"rows of {max(p.dim_qk, p.dim_v)} elements (at most 128)")
        return found

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """keys: tile of the kernel that holds them."""
        assert isinstance(problem, AttentionProblem)
        return tuple(EngineConfig.of(keys=s.name) for s in _shapes(problem, device, ("dk", "dv"), True)[:2])

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, AttentionProblem)
        return 25.0 + _microseconds(p, device, 0.42, 0.37)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, AttentionProblem)
        if p.is_empty:
            return Build(())
        scratch = Scratch()
        rows, width = 16 * _groups(p), _tile(p, "q").chunks * 8
        lines = p.heads_of("q").shape[0] * p.heads * rows
        delta, lse2, sums = (scratch.take(4 * lines * n) for n in (1, 1, width))
        steps = []
        if p.desc("lse").numel:
            steps.append(delta_step(p, device, delta, lse2, (sums, width), rows))
        if p.desc("dk").numel or p.desc("dv").numel:
            shape = next(s for s in _shapes(p, device, ("dk", "dv"), True) if s.name == config["keys"])
            steps.append(_kernel(p, device, ("dk", "dv"), shape, lse2, delta, sums))
        if p.desc("dq").numel:
            steps.append(_dq_step(p, device, sums))
        steps += _others(p, device, lse2, delta, rows, scratch)
        return Build(tuple(steps), scratch.num_bytes)


def _dq_step(p: AttentionProblem, device: DeviceInfo, sums: WorkspaceArg) -> Step:
    """dQ from its sums."""
    shape, tile = _Shape(4, 1, 16), _tile(p, "dq")
    consts = BackwardConsts(score_consts(p), _is_fast(p), p.desc("q").dtype.name, False, False, (), (), ((tile, "acc_a"),), shape.rows,
                            shape.columns, 1, 0, 0, 0, False, sums=_sums(p, device, shape))
    tiles = -(-p.len_q // shape.rows)
    args = [*arguments(p), *_tile_args(p.heads_of("dq"), tile, 32 * shape.warps), Arg("tiles", "u32", tiles), Arg("ptr_sums", "u64", sums),
            Arg("groups", "u32", _groups(p))]
    grid = (tiles + p.batch + 2) * p.heads if p.is_varlen else tiles * p.heads * p.batch
    return Step.of("attention/backward_mma_dq", p.op, Target.for_arch(device.arch), 32 * shape.warps, args, consts, grid,
                   dynamic_smem=tile.pitch * shape.rows, suffix="dq")


ENGINES: dict[str, tuple[Engine, ...]] = {"attention_backward": (AttentionBackwardMmaAdding(), AttentionBackwardMma())}
