"""Attention on Hopper, forward, f16 and bf16: products by wgmma, tiles by tensor copies, warpgroups in turns; sm_90a.

A CTA has 64 queries for each of its warpgroups; they share tiles of keys and values. What limits it are registers (the scores of a
tile, its weights and the results, all of 64 rows, lie in those of a warpgroup) and exponentials, of which an SM makes 16 a clock: with
D = 64 they take as long as the products, so that three warpgroups are needed to keep the tensor cores busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, inf, log, log2, prod
from math import e as euler
from typing import ClassVar

from ..codegen import pointwise as expr
from ..codegen.spec import Target, TensorMapSpec
from ..device import DeviceInfo
from ..dtypes import BF16, F16
from ..ops.attention import AttentionProblem
from ..ops.base import Problem
from ..tensor import TensorDesc
from .affine_wgmma_sm90 import SMEM_BYTES
from .attention_maps import PANEL, ROW_BYTES, head_map, map_fault
from .attention_scores import ScoreConsts, arguments, score_consts
from .attention_walk import head_tiles, walk
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Step, Support, TensorArg, TensorMapArg, refuse

ROWS = 64  # of a warpgroup
BARRIER_BYTES = 8
REGISTERS = {1: 255, 2: 255, 3: 168, 4: 128}  # of a thread, by warpgroups of an SM
CTA_BYTES = 1024  # of shared memory that a CTA takes beside its own, where an SM has several
OTHER_REGISTERS = 30  # beside scores, weights and results
SEQUENCE_REGISTERS = 6  # where sequences have lengths of their own
SEARCH_REGISTERS = 32  # where they lie side by side
DROPOUT_REGISTERS = 50  # too many beside those of three warpgroups
MAX_LINES = 5950  # of the kernel's text, as estimated
MAX_LONG_KEYS = 64  # of a tile whose scores' text is longer
MAX_DIM = 256
TILE_CLOCKS = 1800  # between tiles
MAX_SOFTCAP = 1024
MAX_LENGTH = 2**29
# (warpgroups, keys of a tile, CTAs of an SM), the preferred ones first.
TILES = ((3, 128, 1), (2, 176, 1), (2, 160, 1), (2, 128, 1), (3, 96, 1), (3, 80, 1), (2, 96, 1), (2, 80, 1), (2, 64, 1), (3, 64, 1),
         (4, 80, 1), (4, 64, 1), (2, 80, 2), (2, 64, 2), (1, 128, 1), (1, 64, 1), (2, 32, 1), (1, 32, 1))


@dataclass(frozen=True, slots=True)
class ForwardConsts:
    """Consts of attention/forward_sm90. keys: of a tile.

    Shared memory: queries of each warpgroup, `stages` tiles of keys, as many of values, all in panels of 64 columns; barriers.
    """

    scores: ScoreConsts
    kind: str
    warpgroups: int
    keys: int
    stages: int
    dim_qk: int
    dim_v: int
    ctas: int  # of an SM
    softcap: bool  # the scores' only expression, by one exponential and one reciprocal
    has_scores: bool
    has_lse: bool
    clears: bool  # values that no query sees may lie in the tiles

    inf: ClassVar[float] = inf
    log2e: ClassVar[float] = log2(euler)
    ln2: ClassVar[float] = log(2.0)

    @property
    def waits_late(self) -> bool:
        """Products with values are waited for behind the exponentials, not before them: so many are still to come."""
        return self.dim_v > 128

    @property
    def in_turns(self) -> bool:
        """Warpgroups issue their products one after the other."""
        return self.warpgroups > 1

    @property
    def bare_scores(self) -> ScoreConsts:
        """As far as lengths go."""
        return replace(self.scores, expression=None, tensors=(), scalars=(), has_dropout=False, sinks="")

    @property
    def overlaps(self) -> bool:
        """Whether a warpgroup's products run under its own scores, whose text then stands twice: where that is short enough."""
        s = self.scores
        lines = 72 * s.has_dropout + 4 * self.softcap
        if s.expression is not None:
            inputs = {name: f"%{name}" for name in s.expression.args} | {name: f"%{name}" for name in s.scalars}
            lines += 7 + s.lower(inputs, "%score").count("\n") + 16 * len(s.moving)
        others = 2250 + 7 * self.keys + 5 * self.out_columns + 1000 * s.is_varlen + 250 * self.clears
        return others + lines * self.keys <= MAX_LINES

    @property
    def most_registers(self) -> int:
        """Of a thread."""
        return REGISTERS[self.warpgroups * self.ctas]

    @property
    def fits(self) -> bool:
        return self.smem_bytes <= SMEM_BYTES // self.ctas - CTA_BYTES * (self.ctas - 1) and self.registers <= self.most_registers

    @property
    def rows(self) -> int:
        return ROWS * self.warpgroups

    @property
    def panels_qk(self) -> int:
        return ceil(self.dim_qk / PANEL)

    @property
    def panels_v(self) -> int:
        return ceil(self.dim_v / PANEL)

    @property
    def steps_qk(self) -> int:
        return ceil(self.dim_qk / 16)

    @property
    def out_columns(self) -> int:
        """Of the results' registers: four lanes exchange 32 columns at a time."""
        return ceil(self.dim_v / 32) * 32

    @property
    def query_bytes(self) -> int:
        """Of a warpgroup."""
        return self.panels_qk * ROWS * ROW_BYTES

    def stage_bytes(self, which: str) -> int:
        return (self.panels_qk if which == "k" else self.panels_v) * self.keys * ROW_BYTES

    @property
    def keys_at(self) -> int:
        return self.warpgroups * self.query_bytes

    @property
    def values_at(self) -> int:
        return self.keys_at + self.stages * self.stage_bytes("k")

    @property
    def barriers_at(self) -> int:
        return self.values_at + self.stages * self.stage_bytes("v")

    @property
    def results_at(self) -> int:
        """Behind the barriers: 16 rows of a panel for each warp, where there is room."""
        return self.barriers_at + -(-self._barrier_bytes // 128) * 128

    @property
    def stages_results(self) -> bool:
        return self.results_at + self.warpgroups * ROWS * ROW_BYTES <= SMEM_BYTES // self.ctas - CTA_BYTES * (self.ctas - 1)

    @property
    def _barrier_bytes(self) -> int:
        return BARRIER_BYTES * (self.warpgroups + 2 * self.stages)

    def barrier_at(self, which: str) -> int:
        """From the barriers of the queries on: one for each stage."""
        return BARRIER_BYTES * (self.warpgroups + ("k", "v").index(which) * self.stages)

    @property
    def smem_bytes(self) -> int:
        return self.results_at + self.warpgroups * ROWS * ROW_BYTES if self.stages_results else self.barriers_at + self._barrier_bytes

    @property
    def registers(self) -> int:
        """About: of a thread."""
        s = self.scores
        others = OTHER_REGISTERS + SEQUENCE_REGISTERS * self.clears + SEARCH_REGISTERS * s.is_varlen + DROPOUT_REGISTERS * s.has_dropout
        return self.keys // 2 + self.keys // 4 + self.out_columns // 2 + others + sum(22 if t in s.moving else 4 for t in s.tensors)

    @property
    def descriptor_qk(self) -> str:
        """But for the address: 128-byte swizzle, 1024 bytes between groups of 8 rows."""
        return f"0x{1 << 62 | 64 << 32 | 1 << 16:016X}"

    @property
    def descriptor_v(self) -> str:
        """Columns are contiguous: a panel between chunks of 64 columns, 1024 bytes between groups of 8 keys."""
        return f"0x{1 << 62 | 64 << 32 | self.keys * ROW_BYTES // 16 << 16:016X}"

    def names(self, which: str) -> list[str]:
        count = {"score": self.keys // 2, "weight": self.keys // 4, "out": self.out_columns // 2}[which]
        return [f"%{which}{i}" for i in range(count)]


def _step_clocks(c: ForwardConsts) -> float:
    """Of all warpgroups together, between one warpgroup's own way through a step and what all of them share: products, instructions and the
    turns; fitted to measured times (notes: attention-forward)."""
    s = c.scores
    products = c.keys * (8 * c.steps_qk + c.dim_v / 2) / 16
    elements = ROWS * c.keys / 16
    more = 1.5 * c.has_scores + 3 * c.softcap + 0.5 * len(s.tensors) + 6 * s.has_dropout
    own = products * (1 if c.overlaps else 1.4) + elements * (1.4 + more) + 1.3 * c.out_columns + 500
    shared = c.warpgroups * c.ctas * (0.77 * products + elements * (0.6 + 0.45 * more) + 105 + 25 * c.ctas)
    return float((own**6 + shared**6) ** (1 / 6))


class AttentionWgmmaEngine(Engine):
    """Up to D = E = 256, every kind of score."""

    id = "attention.wgmma_sm90"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, AttentionProblem)
        p = problem
        if device.arch != "sm_90a":
            return refuse(f"{self.id} needs sm_90a")
        if p.desc("q").dtype not in (F16, BF16):
            return refuse(f"q is of {p.desc('q').dtype}; f16 and bf16 are taken")
        if max(p.dim_qk, p.dim_v) > MAX_DIM or p.dim_v % 8:
            return refuse(f"dimensions {p.dim_qk} and {p.dim_v}: at most {MAX_DIM}, that of v a multiple of 8")
        if p.has("block_mask"):
            return refuse("a block_mask, whose tiles are not passed over here")
        if p.has("mask"):
            return refuse("a mask may hide keys that hold NaN, which products with weights of 0 would keep")
        if max(p.len_q, p.len_kv) >= MAX_LENGTH or (p.len_kv == 0 and not p.is_empty):
            return refuse(f"lengths {p.len_q} and {p.len_kv}: 1 to 2^29 - 1")
        for name in ("q", "k", "v", "out"):
            fault = map_fault(p.heads_of(name))
            if fault:
                return refuse(f"{name} {fault}")
        if prod(head_tiles(p, ROWS)) >= 2**31:
            return refuse("2^31 tiles or more")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, AttentionProblem)
        return tuple(sorted(self._candidates(problem), key=lambda c: self.estimate(problem, c, device)))

    def _candidates(self, p: AttentionProblem) -> Iterator[EngineConfig]:
        for warpgroups, keys, ctas in TILES:
            if warpgroups * ctas > 2 and p.dropout:
                continue
            for stages in (3, 2) if warpgroups * ctas > 2 else (2,):
                config = EngineConfig.of(warpgroups=warpgroups, keys=keys, stages=stages, ctas=ctas)
                c = consts(p, config)
                if c.fits:
                    if c.overlaps or keys <= MAX_LONG_KEYS:
                        yield config
                    break

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """The largest share of tiles that a CTA gets, and what memory adds."""
        assert isinstance(problem, AttentionProblem)
        p, c = problem, consts(problem, config)
        tiles = prod(head_tiles(p, c.rows))
        if device.is_emulated:
            return 1000.0 * tiles * -(-p.len_kv // c.keys)
        _, time = walk(p, c.rows, c.keys, _step_clocks(c), replace(device, num_sms=device.num_sms * c.ctas), TILE_CLOCKS)
        return max(time, p.num_bytes / (device.bandwidth_gbs * 850)) + 5

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, AttentionProblem)
        p = problem
        if p.is_empty:
            return Build(())
        c = consts(p, config)
        q, k, v, out = (p.heads_of(n) for n in ("q", "k", "v", "out"))
        pairs, q_tiles = head_tiles(p, c.rows)
        group = p.heads // p.heads_kv
        ctas = device.num_sms * c.ctas
        run, _ = walk(p, c.rows, c.keys, _step_clocks(c), replace(device, num_sms=ctas), TILE_CLOCKS)
        maps = (("q", q, ROWS), ("k", k, c.keys), ("v", v, c.keys))
        args = [Arg(f"map_{n}", "tensor_map", TensorMapArg(n, panels_map(desc, rows))) for n, desc, rows in maps]
        divisors = {"run": run, "run_tiles": run * q_tiles, "num_heads": p.heads, "group": group}
        for name, divisor in divisors.items():
            shift = (divisor - 1).bit_length()
            args += [Arg(f"{name}_multiplier", "u32", -(-(1 << (31 + shift)) // divisor)), Arg(f"{name}_shift", "u32", shift)]
        args += [Arg("run", "u32", run), Arg("run_tiles", "u32", run * q_tiles), Arg("q_tiles", "u32", q_tiles),
                 Arg("num_tiles", "u32", pairs * q_tiles)]
        cap = softcap_of(p)
        args.append(Arg("factor", "f32", log2(euler) * (2 * cap if cap else 1.0 if c.has_scores else p.scale)))
        if cap:
            args += [Arg("cap_rate", "f32", 2 * log2(euler) * p.scale / cap), Arg("cap_bits", "f32", cap * log2(euler))]
        for name in ("out", "lse") if c.has_lse else ("out",):
            desc = p.heads_of(name)
            args.append(Arg(f"ptr_{name}", "u64", TensorArg(name)))
            args += [Arg(f"{name}_{axis}", "s64", s * desc.dtype.num_bytes) for axis, s in zip("bhl", desc.strides, strict=False)]
        grid = min(ctas, pairs * q_tiles)
        step = Step.of("attention/forward_sm90", p.op, Target.for_arch(device.arch, (8, 0)), 128 * c.warpgroups, args + arguments(p), c,
                       grid, dynamic_smem=c.smem_bytes, suffix=f"{c.kind}_{c.dim_qk}x{c.dim_v}_{c.rows}x{c.keys}",
                       min_ctas_per_sm=c.ctas, max_registers=c.most_registers)
        return Build((step,))


def panels_map(desc: TensorDesc, rows: int) -> TensorMapSpec:
    """head_map; where panels of 64 columns fill the rows, (column of a panel, row, panel, head, batch) in boxes of all panels."""
    found = head_map(desc, rows)
    panels, rest = divmod(desc.shape[-1], PANEL)
    if rest:
        return found
    (_, *shape), (row_stride, *strides), (_, _, *box) = found.dims, found.strides, found.box
    return replace(found, dims=(PANEL, shape[0], panels, *shape[1:]), strides=(row_stride, ROW_BYTES, *strides),
                   box=(PANEL, rows, panels, *box))


def _clears(p: AttentionProblem) -> bool:
    """Whether there may be keys that no query sees: others than those beyond the tensor, which come as zeros."""
    if p.is_varlen or p.has("lengths_q") or p.has("lengths_kv"):
        return True
    shift = 0 if p.alignment == "top_left" else p.len_kv - p.len_q
    return (p.right is not None and p.len_q + shift + p.right < p.len_kv) or (p.left is not None and shift - p.left > 0)


def softcap_of(p: AttentionProblem) -> float:
    """The cap where that is all that makes a score of a product, and so small that the absolute error of a quick tanh does not matter;
    else 0."""
    e = p.expression
    if e is None or e.op != "mul" or e.operands[0].op != "const":
        return 0.0
    cap = float(e.operands[0].value)
    return cap if 0 < cap <= MAX_SOFTCAP and e is cap * expr.apply("tanh", expr.arg("score") * (1.0 / cap)) else 0.0


def consts(p: AttentionProblem, config: EngineConfig) -> ForwardConsts:
    has_cap = softcap_of(p) > 0
    scores = replace(score_consts(p), expression=None) if has_cap else score_consts(p)
    has_scores = not has_cap and (p.expression is not None or not p.scale > 0)
    return ForwardConsts(scores, p.desc("q").dtype.name, config["warpgroups"], config["keys"], config["stages"], p.dim_qk, p.dim_v,
                         config["ctas"], has_cap, has_scores, p.has("lse"), _clears(p))


ENGINES: dict[str, tuple[Engine, ...]] = {"attention": (AttentionWgmmaEngine(),)}
