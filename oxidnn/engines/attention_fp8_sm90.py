"""Attention of 8-bit floats on Hopper, forward: products by wgmma, tiles by tensor copies, warpgroups in turns; sm_90a.

wgmma wants the second product's operand with its keys side by side: a launch before turns the values (attention/transpose_values), puts
16 keys in the order in which a lane holds their weights, and clears those that nobody sees. It moves each value twice, where the products
use it as often as there are queries in a group. Tensor cores keep 13 bits of a sum of products of 8-bit floats, so that sums over many
keys would lose much: each tile of keys is summed by itself, in the registers of its scores, and added up in f32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, inf, log, log2, prod
from math import e as euler
from typing import ClassVar

from ..codegen.spec import Target, TensorMapSpec
from ..device import DeviceInfo
from ..ops.attention import FP8, AttentionProblem
from ..ops.base import Problem
from ..tensor import TensorDesc
from .affine_wgmma_sm90 import SMEM_BYTES
from .attention_maps import map_fault
from .attention_scores import ScoreConsts, arguments, score_consts
from .attention_walk import head_tiles, walk
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, TensorMapArg, WorkspaceMapArg, refuse

ROWS = 64  # of a warpgroup
BARRIER_BYTES = 8
REGISTERS = {1: 255, 2: 255, 3: 168, 4: 128}  # of a thread, by warpgroups
OTHER_REGISTERS = 16  # beside scores, weights and results
SEARCH_REGISTERS = 12  # where sequences lie side by side
PANEL = 128  # keys of a box of values
MAX_DIM = 256
MAX_SUMMED_DIM = 128  # columns beside which sums of weights find room
MAX_LENGTH = 2**29
TURNED = 128  # keys, and columns, of a CTA that turns values
TURN_THREADS = 256
MAX_LINES = 5950  # of the kernel's text, as estimated
# (warpgroups, keys of a tile, columns of the results that are summed at a time), the preferred ones first.
TILES = ((4, 128, 64), (3, 128, 128), (3, 128, 64), (3, 160, 64), (3, 192, 64), (3, 96, 64), (2, 256, 128), (2, 224, 128),
         (2, 192, 128), (2, 160, 128), (2, 128, 128), (2, 128, 64), (2, 64, 64), (1, 128, 128), (1, 128, 64), (1, 64, 64), (1, 32, 32))


@dataclass(frozen=True, slots=True)
class Fp8Consts:
    """Consts of attention/forward_fp8_sm90. keys: of a tile; chunk: columns of the results that are summed at a time.

    Shared memory: queries of each warpgroup, `stages` tiles of keys, in panels of row_bytes columns, as many of values, in panels of 128
    keys; barriers.
    """

    scores: ScoreConsts
    kind_q: str
    kind_k: str
    kind_v: str
    kind_out: str
    warpgroups: int
    keys: int
    chunk: int
    stages: int
    dim_qk: int
    dim_v: int
    has_scores: bool
    has_lse: bool

    inf: ClassVar[float] = inf
    log2e: ClassVar[float] = log2(euler)
    ln2: ClassVar[float] = log(2.0)

    @property
    def in_turns(self) -> bool:
        """Warpgroups issue their scores one after the other."""
        return self.warpgroups > 1

    @property
    def bare_scores(self) -> ScoreConsts:
        """As far as lengths go."""
        return replace(self.scores, expression=None, tensors=(), scalars=(), sinks="", scales=())

    @property
    def lines(self) -> int:
        """About: of the kernel's text."""
        s, each = self.scores, 0
        if s.expression is not None:
            inputs = {name: f"%{name}" for name in s.expression.args} | {name: f"%{name}" for name in s.scalars}
            each = 7 + s.lower(inputs, "%score").count("\n") + 16 * len(s.moving)
        return 1300 + (9 + each) * self.keys // 2 + 5 * self.out_columns

    @property
    def rows(self) -> int:
        return ROWS * self.warpgroups

    @property
    def row_bytes(self) -> int:
        """Of queries and keys in a panel: the swizzle's span."""
        return 64 if self.dim_qk <= 64 else 128

    @property
    def panels_qk(self) -> int:
        return ceil(self.dim_qk / self.row_bytes)

    @property
    def panels_v(self) -> int:
        return ceil(self.keys / PANEL)

    @property
    def steps_qk(self) -> int:
        return ceil(self.dim_qk / 32)

    @property
    def panel_steps(self) -> int:
        return self.row_bytes // 32

    @property
    def out_columns(self) -> int:
        """Of the results' registers: neighbouring lanes exchange 16 columns at a time."""
        return ceil(self.dim_v / 16) * 16 if self.exchanges else self.dim_v

    @property
    def exchanges(self) -> bool:
        return self.kind_out in ("f16", "bf16")

    @property
    def out_bytes(self) -> int:
        return {"f32": 4, "f16": 2, "bf16": 2}.get(self.kind_out, 1)

    @property
    def chunks(self) -> int:
        return ceil(self.dim_v / self.chunk)

    @property
    def chunk_sets(self) -> int:
        """Chunks that the scores' registers hold."""
        return min(2, self.keys // self.chunk, self.chunks)

    @property
    def sum_rows(self) -> int:
        """Rows of ones and zeros behind the columns of values, by which tensor cores sum up the weights; 0 where these are summed as they
        were before they are rounded, which lse needs."""
        return 8 if not self.has_lse and self.dim_v <= MAX_SUMMED_DIM else 0

    def chunk_columns(self, chunk: int) -> int:
        return self.chunk if chunk + 1 < self.chunks else self.dim_v - chunk * self.chunk + self.sum_rows

    def chunk_names(self, chunk: int) -> list[str]:
        first = chunk % self.chunk_sets * (self.chunk + self.sum_rows) // 2
        return [f"%part{first + i}" for i in range(self.chunk_columns(chunk) // 2)]

    @property
    def query_bytes(self) -> int:
        """Of a warpgroup."""
        return self.panels_qk * ROWS * self.row_bytes

    def panel_bytes(self, which: str) -> int:
        return self.keys * self.row_bytes if which == "k" else (self.dim_v + self.sum_rows) * PANEL

    def box_bytes(self, which: str) -> int:
        """What tensor copies bring to a stage."""
        return self.stage_bytes(which) - (self.panels_v * self.sum_rows * PANEL if which == "v" else 0)

    def stage_bytes(self, which: str) -> int:
        return (self.panels_qk if which == "k" else self.panels_v) * self.panel_bytes(which)

    @property
    def keys_at(self) -> int:
        return self.warpgroups * self.query_bytes

    @property
    def values_at(self) -> int:
        return self.keys_at + self.stages * self.stage_bytes("k")

    @property
    def barriers_at(self) -> int:
        return self.values_at + self.stages * self.stage_bytes("v")

    def barrier_at(self, which: str, state: str) -> int:
        """From the barriers of the queries on: a full and an empty one for each stage."""
        place = ("k", "v").index(which) * 2 + ("full", "empty").index(state)
        return BARRIER_BYTES * (self.warpgroups + place * self.stages)

    @property
    def smem_bytes(self) -> int:
        return self.barriers_at + BARRIER_BYTES * (self.warpgroups + 4 * self.stages)

    @property
    def registers(self) -> int:
        """About: of a thread."""
        tensors = sum(22 if t in self.scores.moving else 4 for t in self.scores.tensors)
        others = OTHER_REGISTERS + SEARCH_REGISTERS * self.scores.is_varlen
        return self.keys // 2 + self.keys // 8 + self.out_columns // 2 + others + tensors

    @property
    def descriptor_qk(self) -> str:
        """But for the address: swizzle of row_bytes, 8 rows between groups."""
        return f"0x{(1 if self.row_bytes == 128 else 2) << 62 | self.row_bytes // 2 << 32 | 1 << 16:016X}"

    @property
    def descriptor_v(self) -> str:
        """Rows of columns, 128 keys each: 128-byte swizzle, 1024 bytes between groups of 8 rows."""
        return f"0x{1 << 62 | 64 << 32 | 1 << 16:016X}"

    def names(self, which: str) -> list[str]:
        count = {"score": self.keys // 2, "weight": self.keys // 8, "out": self.out_columns // 2}[which]
        return [f"%{which}{i}" for i in range(count)]


@dataclass(frozen=True, slots=True)
class TransposeConsts:
    """Consts of attention/transpose_values. keys: of a tile, where sequences lie side by side: each begins and ends with one."""

    scores: ScoreConsts
    dim_v: int
    keys: int


def _step_clocks(c: Fp8Consts) -> float:
    """Of all warpgroups together, fitted to measured steps (notes: attention-fp8): what a warpgroup waits for, its products, and all
    warpgroups' exponentials."""
    products = c.keys * (c.steps_qk / 2 + c.dim_v / 64)
    work = ROWS * c.keys / 16 * (1 + 0.2 * len(c.scores.tensors) + 0.5 * c.has_scores)
    return 880 + 1.08 * products + 0.915 * c.warpgroups * work - 40 * (c.chunk_sets > 1)


def _pitch(p: AttentionProblem, keys: int) -> int:
    """Bytes of a row of turned values. Sequences side by side each begin and end with a tile of keys."""
    return (-(-p.len_kv // keys) + p.batch + 1) * keys if p.is_varlen else -(-p.len_kv // 16) * 16


class AttentionFp8Engine(Engine):
    """Up to D = E = 256; queries, keys and values of either type."""

    id = "attention.fp8_sm90"
    sums_coarsely = True

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, AttentionProblem)
        p = problem
        if device.arch != "sm_90a":
            return refuse(f"{self.id} needs sm_90a")
        if p.desc("q").dtype not in FP8:
            return refuse(f"q is of {p.desc('q').dtype}; 8-bit floats are taken")
        if max(p.dim_qk, p.dim_v) > MAX_DIM or p.dim_v % 16:
            return refuse(f"dimensions {p.dim_qk} and {p.dim_v}: at most {MAX_DIM}, that of v a multiple of 16")
        if p.has("mask"):
            return refuse("a mask may hide keys that hold NaN, which products with weights of 0 would keep")
        for name, given in (("block_mask", p.has("block_mask")), ("dropout", p.dropout > 0)):
            if given:
                return refuse(f"{name} is given")
        if max(p.len_q, p.len_kv) >= MAX_LENGTH or (p.len_kv == 0 and not p.is_empty):
            return refuse(f"lengths {p.len_q} and {p.len_kv}: 1 to 2^29 - 1")
        out_unit = {1: 2, 2: 8, 4: 8}[p.desc("out").dtype.num_bytes]
        for name, unit in (("q", 16), ("k", 16), ("v", 16), ("out", out_unit)):
            fault = map_fault(p.heads_of(name), unit)
            if fault:
                return refuse(f"{name} {fault}")
        if not any(self._candidates(p)):
            return refuse("the scores' text is too long")
        tiles = max(prod(head_tiles(p, ROWS)), p.heads_kv * (p.batch + 2) * (-(-p.len_kv // TURNED) + 1) * 2)
        if tiles >= 2**31:
            return refuse("2^31 tiles or more")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, AttentionProblem)
        return tuple(sorted(self._candidates(problem), key=lambda c: self.estimate(problem, c, device)))

    def _candidates(self, p: AttentionProblem) -> Iterator[EngineConfig]:
        for warpgroups, keys, chunk in TILES:
            if chunk > max(64, p.dim_v) or chunk > keys or p.is_varlen and keys != TURNED:
                continue
            for stages in (4, 3, 2):
                config = EngineConfig.of(warpgroups=warpgroups, keys=keys, chunk=chunk, stages=stages)
                c = consts(p, config)
                if c.smem_bytes <= SMEM_BYTES and c.lines <= MAX_LINES and c.registers <= REGISTERS[warpgroups]:
                    yield config
                    break

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """The largest share of tiles that a CTA gets, what memory adds, and the launch before, which turns the values."""
        assert isinstance(problem, AttentionProblem)
        p, c = problem, consts(problem, config)
        if device.is_emulated or p.is_empty:
            return 1000.0 * prod(head_tiles(p, c.rows)) * -(-p.len_kv // c.keys)
        _, time = walk(p, c.rows, c.keys, _step_clocks(c), device)
        turning = 3 + 2 * p.heads_of("v").numel / (device.bandwidth_gbs * 700)
        return turning + max(time, p.num_bytes / (device.bandwidth_gbs * 850)) + 5

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, AttentionProblem)
        p, scratch = problem, Scratch()
        if p.is_empty:
            return Build(())
        c = consts(p, config)
        pitch, batch = _pitch(p, c.keys), p.heads_of("v").shape[0]
        values = scratch.take(batch * p.heads_kv * p.dim_v * pitch)
        pairs, q_tiles = head_tiles(p, c.rows)
        run, _ = walk(p, c.rows, c.keys, _step_clocks(c), device)
        turned = TensorMapSpec("u8", (pitch, p.dim_v, p.heads_kv, batch),
                               (pitch, pitch * p.dim_v, pitch * p.dim_v * p.heads_kv), (PANEL, p.dim_v, 1, 1), swizzle=128)
        args = [Arg("map_q", "tensor_map", TensorMapArg("q", _map(p.heads_of("q"), c.row_bytes, ROWS))),
                Arg("map_k", "tensor_map", TensorMapArg("k", _map(p.heads_of("k"), c.row_bytes, c.keys))),
                Arg("map_v", "tensor_map", WorkspaceMapArg(turned, values.byte_offset))]
        divisors = {"run": run, "run_tiles": run * q_tiles, "num_heads": p.heads, "group": p.heads // p.heads_kv}
        for name, divisor in divisors.items():
            shift = (divisor - 1).bit_length()
            args += [Arg(f"{name}_multiplier", "u32", -(-(1 << (31 + shift)) // divisor)), Arg(f"{name}_shift", "u32", shift)]
        args += [Arg("run", "u32", run), Arg("run_tiles", "u32", run * q_tiles), Arg("q_tiles", "u32", q_tiles),
                 Arg("num_tiles", "u32", pairs * q_tiles)]
        for name in ("out", "lse") if c.has_lse else ("out",):
            desc = p.heads_of(name)
            args.append(Arg(f"ptr_{name}", "u64", TensorArg(name)))
            args += [Arg(f"{name}_{axis}", "s64", s * desc.dtype.num_bytes) for axis, s in zip("bhl", desc.strides, strict=False)]
        grid = min(device.num_sms, pairs * q_tiles)
        step = Step.of("attention/forward_fp8_sm90", p.op, Target.for_arch(device.arch, (8, 0)), 128 * c.warpgroups, args + arguments(p), c,
                       grid, dynamic_smem=c.smem_bytes, suffix=f"{c.kind_q}_{c.dim_qk}x{c.dim_v}_{c.rows}x{c.keys}",
                       max_registers=REGISTERS[c.warpgroups], follows=True)
        return Build((_turning(p, c, Arg("workspace_values", "u64", values), pitch, device), step), scratch.num_bytes)


def _turning(p: AttentionProblem, c: Fp8Consts, place: Arg, pitch: int, device: DeviceInfo) -> Step:
    """The launch that turns the values."""
    tiles, strips = -(-p.len_kv // TURNED) + (p.batch + 2 if p.is_varlen else 0), -(-p.dim_v // TURNED)
    v = p.heads_of("v")
    args = [Arg("ptr_v", "u64", TensorArg("v")), *(Arg(f"v_{axis}", "s64", s) for axis, s in zip("bhl", v.strides, strict=False)), place,
            Arg("pitch", "u32", pitch), Arg("key_tiles", "u32", tiles), Arg("strips", "u32", strips), Arg("heads_kv", "u32", p.heads_kv)]
    return Step.of("attention/transpose_values", p.op, Target.for_arch(device.arch), TURN_THREADS, args + arguments(p),
                   TransposeConsts(c.bare_scores, p.dim_v, c.keys if p.is_varlen else 0), tiles * strips * p.heads_kv * v.shape[0],
                   suffix=f"{p.dim_v}")


def _map(desc: TensorDesc, columns: int, rows: int) -> TensorMapSpec:
    """(column, row, head, batch), zeros outside of the tensor."""
    last, *outer = reversed(desc.shape)
    # A dimension of one element is never stepped over: any legal stride will do.
    strides = tuple(s if n > 1 else 16 for n, s in zip(outer, tuple(reversed(desc.strides))[1:], strict=True))
    return TensorMapSpec("u8", (last, *outer), strides, (columns, rows, 1, 1), swizzle=columns)


def consts(p: AttentionProblem, config: EngineConfig) -> Fp8Consts:
    has_scores = p.expression is not None or not p.scale > 0
    kind_q, kind_k, kind_v, kind_out = (p.desc(n).dtype.name for n in ("q", "k", "v", "out"))
    warpgroups, keys, chunk, stages = (config[n] for n in ("warpgroups", "keys", "chunk", "stages"))
    return Fp8Consts(score_consts(p), kind_q, kind_k, kind_v, kind_out, warpgroups, keys, chunk, stages, p.dim_qk, p.dim_v,
                     has_scores, p.has("lse"))


ENGINES: dict[str, tuple[Engine, ...]] = {"attention": (AttentionFp8Engine(),)}
