"""Gradients of attention with wgmma (sm_90a): CTAs of 128 keys walk the queries that see them; dq is added up in f32 in the workspace.

dk and dv are the same bits every time; dq is added in the order in which CTAs come by, or made by a launch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..codegen.spec import KernelSpec, Param, Target
from ..device import DeviceInfo
from ..dtypes import BF16, F16
from ..ops.attention import AttentionProblem
from ..ops.base import Problem
from ..tensor import TensorDesc
from .attention_backward_mma import sink_step
from .attention_delta import delta_step
from .attention_maps import head_map, map_fault
from .attention_scores import ScoreConsts, arguments, score_consts
from .base import (
    SUPPORTED,
    Arg,
    Build,
    Engine,
    EngineConfig,
    Scratch,
    Step,
    Support,
    TensorArg,
    TensorMapArg,
    WorkspaceArg,
    refuse,
)
from .digits import ceil_div

KEYS, QUERIES, THREADS = 128, 64, 256
_LIMIT = 2**29


class Panels:
    """What both kernels say of their tiles: panels are 64 columns, lines of 128 bytes."""

    __slots__ = ()
    dim_qk: int
    dim_v: int

    @property
    def panels_qk(self) -> int:
        return ceil_div(self.dim_qk, 64)

    @property
    def panels_v(self) -> int:
        return ceil_div(self.dim_v, 64)

    def panels_of(self, name: str) -> int:
        """Of a row of an operand."""
        return self.panels_qk if name in ("q", "k") else self.panels_v

    def panels_in(self, names: list[str]) -> int:
        return sum(self.panels_of(name) for name in names)

    @property
    def fixed(self) -> str:
        """A descriptor but for its address: 128-byte swizzle, 1024 bytes between groups of 8 lines, 64 lines between panels."""
        return f"0x{1 << 62 | 1024 >> 4 << 32 | 64 * 128 >> 4 << 16:016X}"

    @staticmethod
    def names(stem: str, count: int) -> list[str]:
        return [f"{stem}{i}" for i in range(count)]


@dataclass(frozen=True, slots=True)
class BackwardConsts(Panels):
    """Shared memory: keys, values, stages of the ring, dS twice, 256 bytes each of lse2 and delta a stage, barriers.

    has_dq: dq is added up in the workspace.
    """

    scores: ScoreConsts
    kind: str
    dim_qk: int
    dim_v: int
    stages: int
    has_dq: bool

    @property
    def stages_at(self) -> int:
        return (self.panels_qk + self.panels_v) * KEYS * 128

    @property
    def stage_bytes(self) -> int:
        return (self.panels_qk + self.panels_v) * QUERIES * 128

    @property
    def ds_at(self) -> int:
        return self.stages_at + self.stages * self.stage_bytes

    @property
    def rows_at(self) -> int:
        return self.ds_at + 2 * KEYS * 128 * self.has_dq

    @property
    def barriers_at(self) -> int:
        return self.rows_at + self.stages * 512

    @property
    def smem_bytes(self) -> int:
        return self.barriers_at + 8 * len(self.barrier_counts)

    @property
    def barrier_counts(self) -> list[int]:
        """Arrivals: of copies on a stage, or on keys and values; of threads done with a stage; of threads that wrote dS; of warpgroups
        done with it."""
        return [1] * (self.stages + 1) + [THREADS] * self.stages + [THREADS] * 2 + [2] * 2

    @property
    def holds(self) -> bool:
        """Keys and values stay in registers."""
        return max(self.dim_qk, self.dim_v) <= 64

    @staticmethod
    def own_params(spec: KernelSpec) -> list[Param]:
        """Those that the macros of scores do not load."""
        return [p for p in spec.params if p.name in ("ptr_lse2", "ptr_delta", "ptr_dq_sum")]


@dataclass(frozen=True, slots=True)
class QueriesConsts(Panels):
    """Shared memory: queries and d_out of 64 rows a warpgroup, stages of 64 keys and values, barriers."""

    scores: ScoreConsts
    kind: str
    dim_qk: int
    dim_v: int
    warpgroups: int
    stages: int

    @property
    def holds(self) -> bool:
        """Queries and d_out stay in registers: three warpgroups have too few."""
        return self.warpgroups == 2

    @property
    def stages_at(self) -> int:
        return (self.panels_qk + self.panels_v) * 64 * self.warpgroups * 128

    @property
    def stage_bytes(self) -> int:
        return (self.panels_qk + self.panels_v) * 64 * 128

    @property
    def barriers_at(self) -> int:
        return self.stages_at + self.stages * self.stage_bytes

    @property
    def smem_bytes(self) -> int:
        return self.barriers_at + 8 * len(self.barrier_counts)

    @property
    def barrier_counts(self) -> list[int]:
        """Arrivals: of copies on a stage, or on queries; of warpgroups done with a stage."""
        return [1] * (self.stages + 1) + [self.warpgroups] * self.stages

    @staticmethod
    def own_params(spec: KernelSpec) -> list[Param]:
        return [p for p in spec.params if p.name in ("ptr_lse2", "ptr_delta")]


@dataclass(frozen=True, slots=True)
class WideConsts(Panels):
    """Shared memory: 64 keys and values, rings of queries and of d_out (64 rows a slot), 256 bytes each of lse2 and delta, barriers."""

    scores: ScoreConsts
    kind: str
    dim_qk: int
    dim_v: int
    query_slots: int

    @property
    def queries_at(self) -> int:
        return (self.panels_qk + self.panels_v) * 8192

    @property
    def d_out_at(self) -> int:
        return self.queries_at + self.query_slots * self.panels_qk * 8192

    @property
    def rows_at(self) -> int:
        return self.d_out_at + 2 * self.panels_v * 8192

    @property
    def barriers_at(self) -> int:
        return self.rows_at + 512 * self.query_slots

    @property
    def smem_bytes(self) -> int:
        return self.barriers_at + 8 * len(self.barrier_counts)

    @property
    def barrier_counts(self) -> list[int]:
        """Arrivals: of copies on a slot of queries, of threads done with it; of d_out, of warpgroups; of copies on keys and values."""
        return [1] * self.query_slots + [THREADS] * self.query_slots + [1, 1, 2, 2, 1]

    @staticmethod
    def own_params(spec: KernelSpec) -> list[Param]:
        return [p for p in spec.params if p.name in ("ptr_lse2", "ptr_delta")]


@dataclass(frozen=True, slots=True)
class WideQueriesConsts(Panels):
    """Shared memory: 64 queries and d_out, three slots of 64 keys, two of values, six barriers."""

    scores: ScoreConsts
    kind: str
    dim_qk: int
    dim_v: int

    @property
    def keys_at(self) -> int:
        return (self.panels_qk + self.panels_v) * 8192

    @property
    def values_at(self) -> int:
        return self.keys_at + 3 * self.panels_qk * 8192

    @property
    def barriers_at(self) -> int:
        return self.values_at + 2 * self.panels_v * 8192

    @property
    def smem_bytes(self) -> int:
        return self.barriers_at + 8 * len(self.barrier_counts)

    @property
    def barrier_counts(self) -> list[int]:
        """Arrivals: of copies on three slots of keys, two of values, on queries."""
        return [1] * 6

    own_params = staticmethod(QueriesConsts.own_params)


def _strides(name: str, desc: TensorDesc) -> list[Arg]:
    """Bytes from one batch, head and row to the next."""
    return [Arg(f"{name}_{axis}", "s64", s * desc.dtype.num_bytes) for axis, s in zip("bhl", desc.strides[:3], strict=True)]


def _has_lengths(p: AttentionProblem) -> bool:
    return p.has("lengths_q") or p.has("lengths_kv")


def _seen_keys(p: AttentionProblem) -> tuple[int, int]:
    """(begin, end) of the keys that some query sees by the limits of the window."""
    shift = 0 if p.alignment == "top_left" else p.len_kv - p.len_q
    begin = 0 if p.left is None else max(0, shift - p.left)
    return begin, p.len_kv if p.right is None else max(0, min(p.len_kv, p.len_q + shift + p.right))


def _map_arg(p: AttentionProblem, name: str, rows: int) -> Arg:
    """Boxes of `rows` rows; of keys and values those behind the last that is seen are zero."""
    length = max(1, _seen_keys(p)[1]) if name in ("k", "v") and not _has_lengths(p) else None
    return Arg(f"map_{name}", "tensor_map", TensorMapArg(name, head_map(p.heads_of(name), rows, length)))


class WgmmaBackwardEngine(Engine):
    """f16 and bf16, head dimensions that are multiples of 8 up to 128; causal limits, windows, sinks, lengths in memory."""

    id = "attention_backward.wgmma_sm90"
    is_deterministic = False
    dims: ClassVar[tuple[int, int]] = (0, 128)  # of the larger head dimension: beyond, up to
    takes_lengths: ClassVar[bool] = True

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        p = problem
        assert isinstance(p, AttentionProblem)
        if device.arch != "sm_90a":
            return refuse(f"wgmma needs sm_90a, the device is {device.arch}")
        if p.has("block_mask"):
            return refuse("a block_mask, whose tiles are not passed over here")
        if p.desc("q").dtype not in (F16, BF16):
            return refuse(f"wgmma takes f16 and bf16, q is {p.desc('q').dtype}")
        least, most = self.dims
        if not least < max(p.dim_qk, p.dim_v) <= most or p.dim_qk % 8 or p.dim_v % 8:
            return refuse(f"head dimensions are {p.dim_qk} and {p.dim_v}, not multiples of 8 beyond {least} and up to {most}")
        if p.expression is not None or p.dropout or p.is_varlen:
            return refuse("scores are changed, weights dropped, or sequences lie side by side")
        if _has_lengths(p) and (not self.takes_lengths or p.left is not None):
            return refuse("lengths lie in memory, which goes by one launch, and without a left limit")
        if not p.scale > 0:
            return refuse(f"the scale is {p.scale}: a mask's -inf is multiplied by it, which must be above 0")
        if max(p.len_q, p.len_kv) >= _LIMIT or p.batch * p.heads * (p.len_q + 64) >= 2**31:
            return refuse("there are too many rows for 32-bit arithmetic")
        if max(p.batch, p.heads) >= 2**16:
            return refuse(f"there are {p.batch} batches and {p.heads} heads, of which a grid has at most 65535 each")
        if p.is_empty or not p.batch * p.heads * p.len_q * p.len_kv:
            return refuse("there are no queries or no keys")
        if not _has_lengths(p) and _seen_keys(p)[0] > 0:
            return refuse("nobody sees the first keys, and what lies there must not count")
        for name in ("q", "k", "v", "d_out", "dq", "dk", "dv"):
            fault = map_fault(p.heads_of(name))
            if fault:
                return refuse(f"{name} {fault}")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        return (EngineConfig.of(stages=4),)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, AttentionProblem)
        rows = p.batch * p.heads * p.len_q
        moved = rows * ceil_div(p.dim_qk, 64) * 64 * 10 / (device.bandwidth_gbs * 1e3)
        return 12.0 + moved + p.flops / (device.num_sms * 4.6e6)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, AttentionProblem)
        scratch = Scratch()
        consts = BackwardConsts(score_consts(p), p.desc("q").dtype.name, p.dim_qk, p.dim_v, config["stages"], True)
        pitch = _pitch(p)
        rows = p.batch * p.heads * pitch
        lse2, delta = scratch.take(4 * rows), scratch.take(4 * rows)
        sums = scratch.take(256 * consts.panels_qk * rows)
        rounded = Step.of("attention/dq_rounded", p.op, Target.for_arch(device.arch), 256, [
            Arg("ptr_dq_sum", "u64", sums), Arg("query_pitch", "u64", pitch), Arg("ptr_dq", "u64", TensorArg("dq")),
            *_strides("dq", p.heads_of("dq")), Arg("len_q", "u32", p.len_q), Arg("num_heads", "u32", p.heads),
            Arg("scale", "f32", p.scale)], consts, (pitch // 64, p.heads, p.batch), suffix=_suffix(p))
        return Build((delta_step(p, device, delta, lse2, (sums, 64 * consts.panels_qk), pitch),
                      _keys_step(p, device, consts, lse2, delta, [Arg("ptr_dq_sum", "u64", sums)]), rounded,
                      *_sink_steps(p, device, lse2, delta)), scratch.num_bytes)


class ApartBackwardEngine(WgmmaBackwardEngine):
    """dq by a launch of its own, which makes the scores once more: seven products for five, but no sums in memory, and the same bits."""

    id = "attention_backward.wgmma_apart_sm90"
    is_deterministic = True
    takes_lengths = False

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        p = problem
        assert isinstance(p, AttentionProblem)
        # Of three warpgroups, threads have 168 registers.
        return (EngineConfig.of(warpgroups=2 if max(p.dim_qk, p.dim_v) > 64 else 3, stages=5, key_stages=4),)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, AttentionProblem)
        return 10.0 + 1.4 * p.flops / (device.num_sms * 4.2e6)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, AttentionProblem)
        scratch = Scratch()
        consts = BackwardConsts(score_consts(p), p.desc("q").dtype.name, p.dim_qk, p.dim_v, config["key_stages"], False)
        pitch = _pitch(p)
        rows = p.batch * p.heads * pitch
        lse2, delta = scratch.take(4 * rows), scratch.take(4 * rows)
        own = _queries_consts(p, config["warpgroups"], config["stages"])
        tile = 64 * own.warpgroups
        bits, grid = _grid(p, device, ceil_div(p.len_q, tile), p.heads)
        queries = Step.of("attention/backward_queries_sm90", p.op, Target.for_arch(device.arch, (8, 1)), 128 * own.warpgroups, [
            *(_map_arg(p, n, tile if n in ("q", "d_out") else 64) for n in ("q", "k", "v", "d_out")),
            Arg("ptr_lse2", "u64", lse2), Arg("ptr_delta", "u64", delta), Arg("query_pitch", "u64", pitch),
            _map_arg(p, "dq", 64), *arguments(p), bits], own, grid, dynamic_smem=own.smem_bytes, suffix=_suffix(p))
        return Build((delta_step(p, device, delta, lse2, None, pitch), _keys_step(p, device, consts, lse2, delta, []), queries,
                      *_sink_steps(p, device, lse2, delta)), scratch.num_bytes)


class WideBackwardEngine(WgmmaBackwardEngine):
    """Head dimensions beyond 128: dk and dv by a warpgroup each, dq by a launch of its own: eight products for five."""

    id = "attention_backward.wgmma_wide_sm90"
    is_deterministic = True
    takes_lengths = False
    dims = (128, 256)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        return (EngineConfig.of(slots=3),)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, AttentionProblem)
        return 10.0 + 1.6 * p.flops / (device.num_sms * 4.2e6)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, AttentionProblem)
        scratch = Scratch()
        shape = (score_consts(p), p.desc("q").dtype.name, p.dim_qk, p.dim_v)
        pitch = _pitch(p)
        rows = p.batch * p.heads * pitch
        lse2, delta = scratch.take(4 * rows), scratch.take(4 * rows)
        args = [*(_map_arg(p, n, 64) for n in ("q", "k", "v", "d_out")), Arg("ptr_lse2", "u64", lse2),
                Arg("ptr_delta", "u64", delta), Arg("query_pitch", "u64", pitch), *arguments(p)]
        keys, queries = WideConsts(*shape, config["slots"]), WideQueriesConsts(*shape)
        target = Target.for_arch(device.arch, (8, 0))
        bits, grid = _grid(p, device, ceil_div(p.len_q, 64), p.heads)
        key_bits, key_grid = _grid(p, device, ceil_div(p.len_kv, 64), p.heads_kv)
        return Build((
            delta_step(p, device, delta, lse2, None, pitch),
            Step.of("attention/backward_wide_sm90", p.op, target, THREADS, [*args, _map_arg(p, "dk", 64), _map_arg(p, "dv", 64), key_bits],
                    keys, key_grid, dynamic_smem=keys.smem_bytes, suffix=_suffix(p)),
            Step.of("attention/backward_queries_wide_sm90", p.op, target, THREADS, [*args, _map_arg(p, "dq", 64), bits], queries,
                    grid, dynamic_smem=queries.smem_bytes, suffix=_suffix(p)),
            *_sink_steps(p, device, lse2, delta)), scratch.num_bytes)


def _pitch(p: AttentionProblem) -> int:
    """Rows of a head in the workspace."""
    return ceil_div(p.len_q, QUERIES) * QUERIES


def _suffix(p: AttentionProblem) -> str:
    return f"{p.desc('q').dtype.name}_{p.dim_qk}_{p.dim_v}"


def _sink_steps(p: AttentionProblem, device: DeviceInfo, lse2: WorkspaceArg, delta: WorkspaceArg) -> tuple[Step, ...]:
    return (sink_step(p, device, lse2, delta, _pitch(p)),) if p.has("sinks") else ()


def _grid(p: AttentionProblem, device: DeviceInfo, tiles: int, heads: int) -> tuple[Arg, tuple[int, int, int]]:
    """Bits of a head's number that count within x, and the grid: where tiles differ in work, those of as many heads as fill the device
    come in the order of their work."""
    bits = 0
    while p.right is not None and heads % (2 << bits) == 0 and tiles << bits + 1 <= device.num_sms:
        bits += 1
    return Arg("head_bits", "u32", bits), (tiles << bits, heads >> bits, p.batch)


def _queries_consts(p: AttentionProblem, warpgroups: int, stages: int) -> QueriesConsts:
    return QueriesConsts(score_consts(p), p.desc("q").dtype.name, p.dim_qk, p.dim_v, warpgroups, stages)


def _keys_step(p: AttentionProblem, device: DeviceInfo, consts: BackwardConsts, lse2: WorkspaceArg, delta: WorkspaceArg,
               more: list[Arg]) -> Step:
    """dk and dv, and with more arguments dq."""
    bits, grid = _grid(p, device, ceil_div(p.len_kv, KEYS), p.heads_kv)
    return Step.of("attention/backward_sm90", p.op, Target.for_arch(device.arch, (8, 1)), THREADS, [
        *(_map_arg(p, n, QUERIES if n in ("q", "d_out") else KEYS) for n in ("q", "k", "v", "d_out")),
        Arg("ptr_lse2", "u64", lse2), Arg("ptr_delta", "u64", delta), Arg("query_pitch", "u64", _pitch(p)), *more,
        _map_arg(p, "dk", 64), _map_arg(p, "dv", 64), *arguments(p), bits], consts, grid, dynamic_smem=consts.smem_bytes, suffix=_suffix(p))


ENGINES: dict[str, tuple[Engine, ...]] = {
    "attention_backward": (WgmmaBackwardEngine(), ApartBackwardEngine(), WideBackwardEngine())}
