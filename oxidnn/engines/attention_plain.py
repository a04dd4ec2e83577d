"""Attention on FMA units: every type, every head dimension, every layout. A CTA has a tile of scores in registers, 16 x 16 threads, and
multiplies through shared memory in the compute type. Deterministic: nothing is added up by atomics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..codegen import elementary
from ..codegen.environment import f32_literal, f64_literal
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F32
from ..ops.attention import AttentionProblem
from ..ops.base import Problem
from ..tensor import TensorDesc
from .attention_scores import ScoreConsts, arguments, score_consts
from .base import SUPPORTED, Arg, ArgValue, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .reduce_tree import reduction_steps

_THREADS = 256
_LIMIT = 2**31
_TALL_BYTES, _LARGE_BYTES = 98 * 1024, 194 * 1024  # shared memory of tiles of 128 x 64, of 128 x 128 scores
_RESIDENT_BYTES = 100 * 1024  # shared memory up to which rows stay there: two CTAs on an SM of 228 KB


@dataclass(frozen=True, slots=True)
class TileOperand:
    """An operand of rows: vec elements along the last dimension are moved at once; dim: its extent, 0 of one number a row."""

    name: str
    dtype: str
    vec: int
    dim: int

    def registers(self, stem: str) -> list[str]:
        return [f"{stem}{i}" for i in range(self.vec)]


@dataclass(frozen=True, slots=True)
class PlainConsts:
    """reg_rows, reg_columns: scores of a thread. residents: operands whose rows stay in shared memory.
    is_flipped: rows are keys. is_async: what is multiplied next is copied meanwhile, into a second slot. sums: along which of "bhij" the
    gradient (of the type `gradient`) of the tensor `wrt` of the expression is added up."""

    scores: ScoreConsts
    operands: tuple[TileOperand, ...]
    compute: str
    reg_rows: int
    reg_columns: int
    residents: tuple[str, ...] = ()
    has_lse: bool = False
    is_flipped: bool = False
    is_async: bool = False
    sums: str = ""
    gradient: str = ""
    wrt: str = ""

    @property
    def size(self) -> int:
        return 8 if self.compute == "f64" else 4

    @property
    def unit(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.size

    @property
    def rows(self) -> int:
        return 16 * self.reg_rows

    @property
    def columns(self) -> int:
        return 16 * self.reg_columns

    @property
    def chunk(self) -> int:
        """Elements of a row that are multiplied between two barriers."""
        return 128 // self.size

    @property
    def wide(self) -> int:
        """Columns of a product with weights between two barriers."""
        return 16 * self.unit

    @property
    def pitch(self) -> int:
        """16 bytes beyond the chunk: neighbouring rows lie in other banks."""
        return self.chunk * self.size + 16

    def row_pitch(self, x: TileOperand) -> int:
        """Of the rows' operand: all of its columns if it stays, or a chunk."""
        return -(-x.dim // self.chunk) * self.chunk * self.size + 16 if x.name in self.residents else self.pitch

    @property
    def weight_pitch(self) -> int:
        return self.columns * self.size + 16

    @property
    def stage_offset(self) -> int:
        return self.rows * self.weight_pitch

    @property
    def slot_bytes(self) -> int:
        """What is staged at a time: a chunk of columns, with one of rows where these do not stay, or a wide tile."""
        rows = 0 if self.residents else self.rows * self.pitch
        span = max(self.span_of(x.dim, 0) for x in self.operands)
        return max(self.columns * span * self.wide * self.size, self.columns * self.pitch + rows)

    @property
    def slots_bytes(self) -> int:
        return self.slot_bytes * (2 if self.is_async else 1)

    def rows_offset(self, x: TileOperand) -> int:
        """Of the rows' operand within the stage: behind the columns' chunk, or behind all slots and what stays before it."""
        if x.name not in self.residents:
            return self.columns * self.pitch
        before = self.residents[:self.residents.index(x.name)]
        return self.slots_bytes + self.rows * sum(self.row_pitch(self.operand(name)) for name in before)

    @property
    def smem_bytes(self) -> int:
        stay = sum(self.row_pitch(self.operand(name)) for name in self.residents)
        return self.stage_offset + self.slots_bytes + self.rows * stay

    @property
    def one(self) -> str:
        return self.literal(1.0)

    def literal(self, value: float) -> str:
        return f64_literal(value) if self.compute == "f64" else f32_literal(value)

    def operand(self, name: str) -> TileOperand:
        return next(x for x in self.operands if x.name == name)

    def elements(self, stem: str) -> list[tuple[str, int, int]]:
        return [(f"{stem}{i * self.reg_columns + j}", i, 16 * j) for i in range(self.reg_rows) for j in range(self.reg_columns)]

    @staticmethod
    def numbered(stem: str, count: int) -> list[str]:
        return [f"{stem}{k}" for k in range(count)]

    def rows_of(self, stem: str) -> list[str]:
        return self.numbered(stem, self.reg_rows)

    def row_registers(self, stem: str, i: int) -> list[str]:
        return [f"{stem}{i * self.reg_columns + j}" for j in range(self.reg_columns)]

    def pack(self, stem: str, i: int) -> str:
        return "{" + ", ".join(f"{stem}{i * self.unit + e}" for e in range(self.unit)) + "}"

    @property
    def span(self) -> int:
        """Parts of `wide` columns that are multiplied together, so that a weight is read for twice as many products."""
        return 2

    def span_of(self, dim: int, part: int) -> int:
        return min(self.span, self.parts(dim) - part)

    def parts(self, dim: int) -> int:
        return -(-dim // self.wide)

    def accumulators(self, dim: int) -> int:
        return self.parts(dim) * self.reg_rows * self.unit

    def part_registers(self, stem: str, part: int) -> list[str]:
        """Of a part of `wide` columns, a row after the other."""
        count = self.reg_rows * self.unit
        return [f"{stem}{part * count + k}" for k in range(count)]

    def span_registers(self, stem: str, part: int, span: int) -> list[str]:
        """Of `span` parts together, a row after the other."""
        parts = [self.part_registers(stem, part + g) for g in range(span)]
        return [name for i in range(self.reg_rows) for names in parts for name in names[i * self.unit:(i + 1) * self.unit]]

    def slot_registers(self, stem: str, dim: int, i: int) -> list[str]:
        """Of a row, all parts."""
        return [name for part in range(self.parts(dim)) for name in self.part_registers(stem, part)[i * self.unit:(i + 1) * self.unit]]

    def exponential(self, register: str) -> str:
        if self.compute == "f32":
            return (f"    mul.rn.f32 {register}, {register}, {f32_literal(elementary.LOG2E)};\n"
                    f"    ex2.approx.ftz.f32 {register}, {register};")
        return self._function("exp_f64", register)

    def logarithm(self, register: str) -> str:
        return self._function(f"log_{self.compute}", register)

    def _function(self, name: str, register: str) -> str:
        emit = elementary.Emitter("%ef_")
        result = getattr(elementary, name)(emit, register)
        lines = [*emit.declarations(), *emit.lines, f"mov.{self.compute} {register}, {result};"]
        return "\n".join(["    {", *("        " + line for line in lines), "    }"])


def _operand(p: AttentionProblem, name: str) -> TileOperand:
    desc = p.heads_of(name)
    if name == "lse":
        return TileOperand(name, desc.dtype.name, 1, 0)
    *outer, last = desc.strides
    size, vec = desc.dtype.num_bytes, 16 // p.accumulator.num_bytes
    steps = [s for n, s in zip(desc.shape, outer, strict=False) if n > 1]
    while vec > 1 and (last != 1 or desc.shape[3] % vec or desc.align < vec * size or any(s % vec for s in steps)):
        vec //= 2
    return TileOperand(name, desc.dtype.name, vec, desc.shape[3])


def _operand_args(p: AttentionProblem, names: tuple[str, ...]) -> list[Arg]:
    args = []
    for name in names:
        desc = p.heads_of(name)
        args.append(Arg(f"ptr_{name}", "u64", TensorArg(name)))
        axes = "bhi" if name == "lse" else "bhid"
        args += [Arg(f"{name}_{axis}", "s64", s * desc.dtype.num_bytes) for axis, s in zip(axes, desc.strides, strict=True)]
    return args


def _tiles(p: AttentionProblem, which: str, rows: int) -> int:
    """Tiles of a head: of all sequences together where they lie side by side, and of the tokens before and behind them."""
    length = p.len_q if which == "q" else p.len_kv
    return length // rows + p.batch + 2 if p.is_varlen else -(-length // rows)


class PlainAttention(Engine):
    """softmax(E(q k^T)) v in one launch."""

    id = "attention.plain"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, AttentionProblem)
        return _check(problem)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, AttentionProblem)
        p, columns = problem, _columns(problem)
        shapes = [(r, columns) for r in _row_choices(p, device, p.dim_v)]
        # A tile lies within a block of a mask.
        shapes = [(r, n) for r, n in shapes if not p.blocks[0] % (16 * r)] if p.blocks[0] else shapes
        is_large = p.len_q > 64 < p.len_kv and p.dim_v <= 128 and not p.blocks[0]
        if (8, columns) in shapes and device.smem_per_cta >= _LARGE_BYTES and is_large:
            shapes.append((8, 8))
        found = [EngineConfig.of(reg_rows=r, reg_columns=n) for r, n in shapes]
        return tuple(sorted(found, key=lambda c: self.estimate(p, c, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, AttentionProblem)
        return _estimate(problem, config["reg_rows"], config["reg_columns"], device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, AttentionProblem)
        p = problem
        if p.is_empty:
            return Build(())
        names = ("q", "k", "v", "out", *(("lse",) if p.has("lse") else ()))
        c = _consts(p, device, names, config["reg_rows"], config["reg_columns"], residents=("q",), has_lse=p.has("lse"))
        # 128 registers a thread, or fewer, let two CTAs share an SM.
        if c.smem_bytes > min(_RESIDENT_BYTES if c.rows <= 64 and p.dim_v <= 64 else _LIMIT, device.smem_per_cta):
            c = replace(c, residents=())
        more, grid = _tile_args(p, "q", c.rows)
        return Build((_step("attention/plain", p, device, [*arguments(p), *_operand_args(p, names), *more], c, grid, ""),))


def _columns(p: AttentionProblem) -> int:
    """Columns of a thread: of 4-byte elements 64 a tile, of 8-byte ones 32."""
    return 4 if p.accumulator.num_bytes == 4 else 2


def _row_choices(p: AttentionProblem, device: DeviceInfo, *dims: int) -> Iterator[int]:
    """Rows of a thread, such that at most 128 registers sum up results of so many columns; fewer where scores take long texts."""
    size = p.accumulator.num_bytes
    wide = 256 // size
    words = sum(-(-dim // wide) for dim in dims) * (16 // size) * (size // 4)  # of one row
    heavy = (p.expression is not None) + (p.dropout > 0)
    is_long = heavy == 2 or heavy and device.capability < (8, 0)  # before sm_80 the assembler needs more registers for as much
    most = 2 if is_long and p.is_backward or heavy and sum(dims) > 256 else 4
    if p.len_q <= 32 and not p.is_backward:
        most = 1 if p.len_q <= 16 else 2
    yield max(r for r in (1, 2, 4) if r == 1 or r <= min(most, (128 if size == 4 or r < 4 else 96) // words))
    room = 64 if p.is_backward or p.desc("q").dtype is not F32 else 128
    is_short = not heavy and most == 4 and not (p.is_varlen and p.is_backward)  # texts that leave registers for 8 rows
    if size == 4 and words * 8 <= room and is_short and device.smem_per_cta >= _TALL_BYTES:
        yield 8


def _check(p: AttentionProblem) -> Support:
    if max(p.len_q, p.len_kv) >= 2**29:
        return refuse(f"{max(p.len_q, p.len_kv)} queries or keys (fewer than 2^29)")
    tiles = sum(_tiles(p, which, 16) for which in ("q", "kv"))
    if tiles * p.heads * (1 if p.is_varlen else p.batch) >= _LIMIT:
        return refuse(f"more than {_LIMIT} tiles")
    return SUPPORTED


def _estimate(p: AttentionProblem, rows: int, columns: int, device: DeviceInfo) -> float:
    ctas = _tiles(p, "q", 16 * rows) * p.heads * (1 if p.is_varlen else p.batch)
    if device.is_emulated:
        # An instruction costs about 4 us, and 0.5 us for each CTA that executes it.
        instructions = max(1, p.len_kv // (16 * columns)) * rows * columns * (p.dim_qk + p.dim_v + 64)
        return (2e3 + instructions) * (4.0 + 0.5 * ctas)
    rate = device.fma_tflops * 1e6 * (0.5 if p.accumulator.num_bytes == 8 else 1.0)
    # Measured on an H200, f32: what of the FMA units' rate is reached, all SMs at work.
    efficiency = 0.62 if columns >= 8 else 0.57 if rows >= 8 else 0.5
    waves = ctas / device.num_sms
    return 5.0 + max(1.0, math.ceil(waves) / max(waves, 1e-9)) * p.flops / (rate * efficiency) + p.num_bytes / (device.bandwidth_gbs * 1e3)


class PlainAttentionGradient(Engine):
    """dq with the sums that the others need, then dk and dv, then dbias and dsinks."""

    id = "attention_backward.plain"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, AttentionProblem)
        return _check(problem)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, AttentionProblem)
        blocks = problem.blocks
        queries = [r for r in _row_choices(problem, device, problem.dim_qk) if not blocks[0] % (16 * r)]
        keys = [r for r in _row_choices(problem, device, problem.dim_qk, problem.dim_v) if not blocks[1] % (16 * r)]
        found = [EngineConfig.of(query_rows=queries[min(n, len(queries) - 1)], key_rows=keys[min(n, len(keys) - 1)])
                 for n in range(max(len(queries), len(keys)))]
        return tuple(sorted(found, key=lambda c: self.estimate(problem, c, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, AttentionProblem)
        return 15.0 + (1.4 + 0.6 * len(problem.differentiated)) * _estimate(problem, config["query_rows"], _columns(problem), device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, AttentionProblem)
        p, scratch = problem, Scratch()
        if p.is_empty:
            return Build(())
        batch = 1 if p.is_varlen else p.batch
        rows = TensorDesc.packed(p.accumulator, (batch, p.heads, p.len_q))
        delta, terms = scratch.take(rows.num_bytes), scratch.take(rows.num_bytes if p.has("sinks") else 0)
        shared = [*arguments(p), Arg("workspace_delta", "u64", delta)]
        steps = []
        if p.desc("dq").numel:
            more = [Arg("workspace_terms", "u64", terms)] if p.has("sinks") else []
            names: tuple[str, ...] = ("q", "k", "v", "d_out", "out", "lse", "dq")
            steps.append(_gradient_step(p, "q", names, [*shared, *more], device, config["query_rows"]))
        if p.desc("dk").numel:
            names = ("q", "k", "v", "d_out", "lse", "dk", "dv")
            steps.append(_gradient_step(p, "kv", names, shared, device, config["key_rows"]))
        for name in p.differentiated:
            if p.desc(f"d{name}").numel:
                steps += _tensor_steps(p, name, shared, device, scratch)
        if p.has("sinks") and p.desc("dsinks").numel:
            steps += reduction_steps(p.op, (rows, terms), (p.desc("dsinks"), TensorArg("dsinks")), (0, 2), "sum", device, scratch)
        return Build(tuple(steps), scratch.num_bytes)


def _consts(p: AttentionProblem, device: DeviceInfo, names: tuple[str, ...], reg_rows: int, reg_columns: int,
            **more: Any) -> PlainConsts:
    operands = tuple(_operand(p, n) for n in names)
    is_async = device.at_least(8) and p.desc("q").dtype is p.accumulator  # copies convert nothing
    return PlainConsts(score_consts(p), operands, p.accumulator.name, reg_rows, reg_columns, is_async=is_async, **more)


def _step(template: str, p: AttentionProblem, device: DeviceInfo, args: list[Arg], consts: PlainConsts, grid: int, suffix: str) -> Step:
    return Step.of(template, p.op, Target.for_arch(device.arch), _THREADS, args, consts, grid, dynamic_smem=consts.smem_bytes,
                   suffix=f"{p.desc('q').dtype.name}_{p.dim_qk}_{p.dim_v}{suffix}")


def _tile_args(p: AttentionProblem, which: str, rows: int) -> tuple[list[Arg], int]:
    """What locate_tile reads, and the CTAs."""
    heads, tiles = p.heads if which == "q" else p.heads_kv, _tiles(p, which, rows)
    return [Arg("num_tiles", "u32", tiles), Arg("tile_heads", "u32", heads)], tiles * heads * (1 if p.is_varlen else p.batch)


def _gradient_step(p: AttentionProblem, which: str, names: tuple[str, ...], args: list[Arg], device: DeviceInfo,
                   reg_rows: int) -> Step:
    """dq of tiles of queries, or dk and dv of tiles of keys."""
    c = _consts(p, device, names, reg_rows, _columns(p), residents=("q", "d_out") if which == "q" else ("k", "v"), is_flipped=which == "kv")
    c = c if c.smem_bytes <= device.smem_per_cta else replace(c, residents=())
    more, grid = _tile_args(p, which, c.rows)
    return _step("attention/plain_gradient", p, device, [*args, *_operand_args(p, names), *more], c, grid, f"_{which}")


def _tensor_steps(p: AttentionProblem, wrt: str, args: list[Arg], device: DeviceInfo, scratch: Scratch) -> list[Step]:
    """The gradient of a tensor of the scores. One that broadcasts along queries gets few CTAs: each takes some tiles of queries, and their
    sums are added up afterwards."""
    result = f"d{wrt}"
    names, desc = ("q", "k", "v", "d_out", "lse"), p.desc(result)
    b, h, rows, keys = shape = p.score_shape(result)
    sums = "".join(axis for axis, n in zip("bhij", shape, strict=True) if n == 1)
    c = _consts(p, device, names, 4, _columns(p), sums=sums, gradient=desc.dtype.name, wrt=wrt)
    row_tiles, key_tiles = -(-rows // c.rows), -(-keys // c.columns)
    if "i" in sums:
        row_tiles = min(-(-p.len_q // c.rows), -(-2 * device.num_sms // (b * h * key_tiles))) or 1
    is_split = "i" in sums and row_tiles > 1
    target, strides = (desc, TensorArg(result)), p.score_strides(result)
    parts = TensorDesc.packed(p.accumulator, (row_tiles, *desc.shape))
    place: ArgValue = target[1]
    if is_split:
        place, desc = scratch.take(parts.num_bytes), TensorDesc.packed(p.accumulator, desc.shape)
        strides = (h * rows * keys, rows * keys, keys, 1)  # those of extents of 1 meet no index but 0
        c = replace(c, gradient=desc.dtype.name)
    more = [Arg("ptr_gradient", "u64", place), Arg("num_batches", "u32", p.batch), Arg("gradient_heads", "u32", h),
            Arg("row_tiles", "u32", row_tiles), Arg("key_tiles", "u32", key_tiles), Arg("gradient_rows", "u32", rows),
            Arg("gradient_keys", "u32", keys), Arg("part_bytes", "s64", desc.num_bytes if is_split else 0)]
    more += [Arg(f"gradient_{axis}", "s64", s * desc.dtype.num_bytes) for axis, s in zip("bhij", strides, strict=True)]
    grid = b * h * row_tiles * key_tiles
    step = _step("attention/plain_bias", p, device, [*args, *_operand_args(p, names), *more], c, grid, f"_{wrt}_{sums}")
    return [step, *(reduction_steps(p.op, (parts, place), target, (0,), "sum", device, scratch) if is_split else ())]


ENGINES: dict[str, tuple[Engine, ...]] = {"attention": (PlainAttention(),), "attention_backward": (PlainAttentionGradient(),)}
