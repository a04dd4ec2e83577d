"""Attention on FMA units: every type, every head dimension, every layout. A CTA has a tile of scores in registers, 16 x 16 threads, and
multiplies through shared memory in the compute type. Deterministic: nothing is added up by atomics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..codegen import elementary
from ..codegen.environment import f32_literal, f64_literal
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.attention import AttentionProblem
from ..ops.base import Problem
from .attention_scores import ScoreConsts, arguments, score_consts
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Step, Support, TensorArg, refuse

_THREADS = 256
_LIMIT = 2**31
_RESIDENT_BYTES = 72 * 1024  # shared memory up to which rows stay there: three CTAs on an SM of 228 KB


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
    """reg_rows, reg_columns: scores of a thread. is_resident: the rows' operand stays in shared memory, all of `resident_dim`."""

    scores: ScoreConsts
    operands: tuple[TileOperand, ...]
    compute: str
    reg_rows: int
    reg_columns: int
    resident_dim: int = 0
    has_lse: bool = False

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

    @property
    def is_resident(self) -> bool:
        return self.resident_dim > 0

    @property
    def row_pitch(self) -> int:
        return -(-self.resident_dim // self.chunk) * self.chunk * self.size + 16 if self.is_resident else self.pitch

    @property
    def weight_pitch(self) -> int:
        return self.columns * self.size + 16

    @property
    def stage_offset(self) -> int:
        return self.rows * self.weight_pitch

    @property
    def rows_offset(self) -> int:
        """Of the rows' chunk within the stage: behind the columns' chunk, if it stays there behind the wide tile, too."""
        wide = self.columns * self.wide * self.size
        return max(wide, self.columns * self.pitch) if self.is_resident else self.columns * self.pitch

    @property
    def smem_bytes(self) -> int:
        return self.stage_offset + max(self.columns * self.wide * self.size, self.rows_offset + self.rows * self.row_pitch)

    @property
    def one(self) -> str:
        return self.literal(1.0)

    def literal(self, value: float) -> str:
        return f64_literal(value) if self.compute == "f64" else f32_literal(value)

    def operand(self, name: str) -> TileOperand:
        return next(x for x in self.operands if x.name == name)

    def elements(self, stem: str) -> list[tuple[str, int, int]]:
        return [(f"{stem}{i * self.reg_columns + j}", i, 16 * j) for i in range(self.reg_rows) for j in range(self.reg_columns)]

    def rows_of(self, stem: str) -> list[str]:
        return [f"{stem}{i}" for i in range(self.reg_rows)]

    def row_registers(self, stem: str, i: int) -> list[str]:
        return [f"{stem}{i * self.reg_columns + j}" for j in range(self.reg_columns)]

    def pack(self, stem: str, i: int) -> str:
        return "{" + ", ".join(f"{stem}{i * self.unit + e}" for e in range(self.unit)) + "}"

    def parts(self, dim: int) -> int:
        return -(-dim // self.wide)

    def accumulators(self, dim: int) -> int:
        return self.parts(dim) * self.reg_rows * self.unit

    def part_registers(self, stem: str, part: int) -> list[str]:
        """Of a part of `wide` columns, a row after the other."""
        count = self.reg_rows * self.unit
        return [f"{stem}{part * count + k}" for k in range(count)]

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
    size, vec = desc.dtype.num_bytes, 16 // desc.dtype.num_bytes
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
        return tuple(EngineConfig.of(reg_rows=r) for r in _row_choices(problem, problem.dim_v))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, AttentionProblem)
        return _estimate(problem, config["reg_rows"], device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, AttentionProblem)
        p = problem
        if p.is_empty:
            return Build(())
        names = ("q", "k", "v", "out", *(("lse",) if p.has("lse") else ()))
        compute = p.accumulator.name

        def consts_of(resident: int) -> PlainConsts:
            return PlainConsts(score_consts(p), tuple(_operand(p, n) for n in names), compute, config["reg_rows"], _columns(p), resident,
                               p.has("lse"))

        consts = consts_of(p.dim_qk)
        if consts.smem_bytes > min(_RESIDENT_BYTES, device.smem_per_cta):
            consts = consts_of(0)
        tiles = _tiles(p, "q", consts.rows)
        args = [*arguments(p), *_operand_args(p, names), Arg("num_tiles", "u32", tiles), Arg("tile_heads", "u32", p.heads)]
        grid = tiles * p.heads * (1 if p.is_varlen else p.batch)
        step = Step.of("attention/plain", p.op, Target.for_arch(device.arch), _THREADS, args, consts, grid,
                       dynamic_smem=consts.smem_bytes, suffix=_suffix(p))
        return Build((step,))


def _suffix(p: AttentionProblem) -> str:
    return f"{p.desc('q').dtype.name}_{p.dim_qk}_{p.dim_v}"


def _columns(p: AttentionProblem) -> int:
    """Columns of a thread: of 4-byte elements 64 a tile, of 8-byte ones 32."""
    return 4 if p.accumulator.num_bytes == 4 else 2


def _row_choices(p: AttentionProblem, dim: int) -> Iterator[int]:
    """Rows of a thread, such that at most 128 registers sum up results of `dim` columns."""
    size = p.accumulator.num_bytes
    wide = 256 // size
    words = -(-dim // wide) * (16 // size) * (size // 4)  # of one row
    most = 128 // words
    yield 4 if most >= 4 else 2 if most >= 2 else 1
    if size == 4 and words * 8 <= 64 and p.expression is None and not p.dropout:
        yield 8


def _check(p: AttentionProblem) -> Support:
    if max(p.len_q, p.len_kv) >= 2**29:
        return refuse(f"{max(p.len_q, p.len_kv)} queries or keys (fewer than 2^29)")
    tiles = sum(_tiles(p, which, 16) for which in ("q", "kv"))
    if tiles * p.heads * p.batch >= _LIMIT:
        return refuse(f"more than {_LIMIT} tiles")
    return SUPPORTED


def _estimate(p: AttentionProblem, rows: int, device: DeviceInfo) -> float:
    rate = device.fma_tflops * 1e6 * (0.5 if p.accumulator.num_bytes == 8 else 1.0)
    if device.is_emulated:
        tiles = _tiles(p, "q", 16 * rows) * p.heads * p.batch * max(1, p.len_kv // 64)
        return 2e4 + 2e3 * tiles
    waves = _tiles(p, "q", 16 * rows) * p.heads * (1 if p.is_varlen else p.batch) / (2 * device.num_sms)
    fill = max(1.0, -(-waves // 1) / max(waves, 1e-9))
    return 5.0 + fill * p.flops / (rate * (0.42 if rows >= 8 else 0.38)) + p.num_bytes / (device.bandwidth_gbs * 1e3)


ENGINES: dict[str, tuple[Engine, ...]] = {"attention": (PlainAttention(),)}
