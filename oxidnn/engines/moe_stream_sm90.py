"""Layers of experts for few tokens: two launches that stream the weights of the experts that are hit, and nothing else; sm_90a.

No sort and no copies of rows: an expert that any token goes to multiplies all of them, which costs nothing where weights come from memory,
and what is not a token's own is left out of its sum. Sums over experts stay in registers, in f32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import erfc
from typing import Any

from ..codegen.pointwise import Expression
from ..codegen.spec import Target, TensorMapSpec
from ..device import DeviceInfo
from ..dtypes import BF16, F16
from ..ops.base import Problem
from ..ops.moe import MoeProblem
from ..tensor import TensorDesc
from .affine_tiling import RaggedConsts
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
    WorkspaceMapArg,
    refuse,
)
from .composition import shifted
from .digits import ceil_div
from .moe_experts import working
from .moe_rows import WHOLE, Held, clear_step, combine_step, held, index, packed, scatter_step, sort_steps
from .rope import strides

MAX_TOKENS = 64
MAX_EXPERTS = 1024  # whose list is kept in shared memory
TILE_K = 64
ROWS = 64
MAX_STAGES = 24  # of codes twice as many
WIDE_COLUMNS = (96, 112, 128, 136, 144, 152, 160, 176, 184, 192)  # of two warpgroups
# Stages that are filled at once: 256 bytes of a row. Fewer than there are: the last is released once the next is multiplied.
BURST = 2
# Up to so many bytes of weights leave L2 first: what it holds and would write back stays (one token after 256 MB of zeros: Qwen3, 75 MB,
# 30.2 us for 33.9; gpt-oss, 199 MB, 65.3 for 68.5). More of them are 2 to 7 % faster without (from 704 MB on).
STREAMED_BYTES = 256 << 20
_BOX_BYTES = 2 * ROWS * TILE_K


@dataclass(frozen=True, slots=True)
class StreamConsts:
    """of: "up", "down" or "both". columns: tokens, of tile_n that wgmma takes; tiles: of 64 rows of weights (two: of two such blocks);
    k_tiles: of an expert's sum; middle_bytes, result_bytes: of a token's; splits: CTAs of a cluster that deal out k tiles; pitch: words
    from token to token of staged sums. ragged: rows are sorted by expert. warpgroups: that multiply, of the same tokens each two blocks of
    64 rows of its own. burst: stages that are filled at once. streamed: weights leave L2 first. ids: their type, where experts' rows are
    not counted before.
    codes: weights are "e4m3", "s8" or "s4", with scales of blocks of block[0] rows and block[1] columns, of type `scale`.
    scale_spans: bytes of the scales of 64 rows of both matrices, where they lie side by side."""

    kind: str
    ids: str
    of: str
    columns: int
    topk: int
    experts: int
    hidden: int
    inter: int
    stages: int
    splits: int = 1
    middle_bytes: int = 0
    result_bytes: int = 0
    gate: Expression | None = None
    ragged: RaggedConsts | None = None
    codes: str = ""
    scale: str = ""
    block: tuple[int, int] = (1, 1)
    scale_spans: tuple[int, int] = (0, 0)
    warpgroups: int = 1
    burst: int = 1
    streamed: bool = False

    pitch = ROWS + 4

    @property
    def two(self) -> bool:
        return self.of != "down" or self.ragged is not None

    @property
    def counted(self) -> bool:
        """CTAs take what is next by a counter, so that none waits for others."""
        return self.of == "both" or self.ragged is not None

    @property
    def starts_early(self) -> bool:
        """Weights come before the launch before has ended, which makes the tokens."""
        return self.of == "down"

    @property
    def threads(self) -> int:
        """With a warp that fetches."""
        return 128 * self.warpgroups + (0 if self.is_merged else 32)

    @property
    def is_merged(self) -> bool:
        """Of two warpgroups a thread fetches, too: a ninth warp would leave 168 registers of 255."""
        return self.warpgroups > 1

    @property
    def rows(self) -> int:
        """Of weights in a box."""
        return ROWS * self.warpgroups

    @property
    def acc(self) -> list[str]:
        return [f"%acc{i}" for i in range(self.tile_n // 2)]

    @property
    def ups(self) -> list[str]:
        return [f"%up{i}" for i in range(self.tile_n // 2)]

    @property
    def tile_n(self) -> int:
        return ceil_div(self.columns, 8) * 8

    @property
    def tiles(self) -> int:
        return self.up_tiles if self.of == "up" else self.down_tiles + (self.up_tiles if self.of == "both" else 0)

    @property
    def up_tiles(self) -> int:
        return ceil_div(self.inter, self.rows)

    @property
    def down_tiles(self) -> int:
        return ceil_div(self.hidden, self.rows * (2 if self.two else 1))

    @property
    def k_tiles(self) -> int:
        return self.down_k_tiles if self.of == "down" else self.up_k_tiles

    @property
    def up_k_tiles(self) -> int:
        return ceil_div(self.hidden, TILE_K)

    @property
    def down_k_tiles(self) -> int:
        return ceil_div(self.inter, TILE_K)

    @property
    def row_bytes(self) -> int:
        """Of a row of weights in a stage."""
        return TILE_K // 2 if self.codes == "s4" else TILE_K if self.codes else 2 * TILE_K

    @property
    def block_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def weight_bytes(self) -> int:
        return self.block_bytes * (2 if self.two else 1)

    @property
    def weight_rows(self) -> int:
        """Of a matrix."""
        return 2 * self.inter if self.of == "up" else self.hidden

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + 2 * TILE_K * self.tile_n

    @property
    def ring_bytes(self) -> int:
        return max(self.stages * self.stage_bytes, 0 if self.two else 4 * self.pitch * self.tile_n)

    @property
    def item_bytes(self) -> int:
        """Of what each stage is a part of."""
        return ceil_div(4 * self.stages, 16) * 16 if self.counted else 0

    @property
    def smem_bytes(self) -> int:
        """With barriers, and a word for each expert and its flag, or a pair of a table."""
        return self.ring_bytes + 16 * self.stages + self.item_bytes + 8 * self.experts + (32 if self.is_merged else 16)

    def lower_forward(self, gate: str, up: str, result: str) -> str:
        assert self.gate is not None
        return self.gate.lower({"g": gate, "u": up}, [result], "f32")


def _expected_hits(p: MoeProblem) -> float:
    """Experts that some of random tokens go to."""
    return p.experts * (1 - (1 - min(1.0, p.topk / p.experts)) ** p.tokens)


def _coded_us(items: float, c: StreamConsts, device: DeviceInfo, k_tiles: float) -> float:
    """Of products with codes, whose numbers a warp a quarter of an SM makes: of one CTA alone it waits for itself most of the time, up to
    three share an SM. Rounds of items of k_tiles stages over all CTAs (H200)."""
    def clocks(ctas: float) -> float:
        """Of a stage of each of the CTAs of an SM."""
        alone = (830.0 if c.two else 480.0) + 2.5 * c.tile_n
        return alone * max(1.0, ctas * (0.74 if ctas <= 2 else 0.7))

    share = _per_sm(c, device)
    rounds, rest = divmod(items, device.num_sms * share)
    total = rounds * clocks(share) + (clocks(rest / device.num_sms) if rest else 0.0)
    return total * k_tiles / 1.6e3


def _steps(desc: TensorDesc) -> tuple[int, ...]:
    """Bytes from one to the next, innermost first, of all dimensions but the last; those that mean nothing as maps want them."""
    steps = (s * desc.dtype.num_bytes for s in desc.strides[-2::-1])
    return tuple(16 * ceil_div(s, 16) if n == 1 else s for n, s in zip(desc.shape[-2::-1], steps, strict=True))


def _weights_map(desc: TensorDesc, c: StreamConsts) -> TensorMapSpec:
    experts, rows, columns = desc.shape
    size = desc.dtype.num_bytes
    return TensorMapSpec("u8" if c.codes else c.kind, (columns, rows, experts), _steps(desc),
                         (c.row_bytes // size, c.rows, 1), swizzle=c.row_bytes)


def _fits_map(desc: TensorDesc) -> bool:
    """Rows that begin at multiples of 16 bytes, elements side by side."""
    steps = [s for n, s in zip(desc.shape[:-1], desc.strides[:-1], strict=True) if n > 1]
    unit = 16 // desc.dtype.num_bytes
    return desc.align % 16 == 0 and (desc.strides[-1] == 1 or desc.shape[-1] == 1) and all(s > 0 and s % unit == 0 for s in steps)


def _fits_scales(p: MoeProblem) -> bool:
    """A stage of a row has one scale."""
    return not p.has("scale_down") or all(p.block[1] % TILE_K == 0 or p.block[1] >= n for n in (p.hidden, p.inter))


class MoeStream(Engine):
    """At most 64 tokens of f16 or bf16; of moe_quantized, whose numbers are made in registers."""

    def __init__(self, op: str) -> None:
        self.id = f"{op}.stream_sm90"  # type: ignore[misc]

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        p = problem
        assert isinstance(p, MoeProblem)
        if device.arch != "sm_90a":
            return refuse(f"it needs sm_90a, the device is {device.arch}")
        if p.kind not in (F16, BF16) or not 1 <= p.tokens <= MAX_TOKENS or p.experts > MAX_EXPERTS or not p.hidden or not p.inter:
            return refuse(f"1 to {MAX_TOKENS} tokens of f16 or bf16, at most {MAX_EXPERTS} experts")
        wrong = [n for n in ("x", "w_gate_up", "w_down") if not _fits_map(p.desc(n))]
        if wrong:
            return refuse(f"tensor maps need rows of {' and '.join(wrong)} that begin at multiples of 16 bytes")
        if not _fits_scales(p):
            return refuse(f"blocks of scales have a multiple of {TILE_K} columns, not {p.block[1]}")
        if ceil_div(p.hidden, ROWS) * 8 * max(p.hidden, p.inter) >= 2**31:
            return refuse("fewer columns")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """stages of both rings, as many as fill shared memory, or a part of it, and splits of the second product; or those of the ring that
        both products have (both), whose sums over experts are a launch of their own."""
        p = problem
        assert isinstance(p, MoeProblem)
        tiles, found = ceil_div(p.hidden, ROWS), []
        for share in (1, 2, 3) if p.has("scale_down") else (1, 2):  # numbers are made beside products of another CTA
            up, down, both = (self._stages(p, of, share, device) for of in ("up", "down", "both"))
            for splits in (1, 2, 4, 8):
                if splits == 1 or tiles * splits <= share * device.num_sms:
                    found.append(EngineConfig.of(up=up, down=down, splits=splits))
            found.append(EngineConfig.of(both=both))
        return tuple(sorted(dict.fromkeys(found), key=lambda config: self.estimate(problem, config, device)))

    @staticmethod
    def _stages(p: MoeProblem, of: str, share: int, device: DeviceInfo) -> int:
        room = min(device.smem_per_cta, device.smem_per_sm // share - 1024) - 40 * MAX_STAGES - 8 * p.experts - 16
        c = _consts(p, of, 1)
        most = min(room // c.stage_bytes, MAX_STAGES * (2 if c.codes else 1))
        return max(1, min(most, 4 if device.is_emulated else most))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, MoeProblem)
        weights = _weights_bytes(p, _consts(p, "up", 1))
        knobs, hits = dict(config.knobs), _expected_hits(p)
        stages = knobs["both" if "both" in knobs else "up"]
        columns = 1 + 0.004 * max(0, p.tokens - 16)
        memory_us = weights / (device.bandwidth_gbs * 1.03e3) * columns * (1.02 + 0.02 * (stages < 10))
        if p.has("scale_down"):
            if "both" in knobs:
                c = _consts(p, "both", knobs["both"])
                # The CTAs that come last may share an SM.
                made_us = _coded_us(hits * c.up_tiles, c, device, c.up_k_tiles)
                made_us += _coded_us(max(hits * c.down_tiles, device.num_sms * _per_sm(c, device)), c, device, c.down_k_tiles)
            else:
                up, down = _consts(p, "up", knobs["up"]), _consts(p, "down", knobs["down"])
                made_us = _coded_us(hits * up.tiles, up, device, up.k_tiles)
                made_us += _coded_us(down.tiles * knobs["splits"], down, device, hits * down.k_tiles / knobs["splits"])
            return 12.0 + max(memory_us, made_us) + 0.01 * stages
        if "both" in knobs:
            c = _consts(p, "both", knobs["both"])
            last_us = c.down_k_tiles * c.stage_bytes * device.num_sms / (device.bandwidth_gbs * 1e3)  # of an item
            return 17.5 + 0.965 * memory_us + 0.12 * last_us
        # A static deal of what comes at uneven speeds: the last CTA is late. Larger clusters than pairs do not all find room at once.
        ctas = ceil_div(p.hidden, ROWS) * knobs["splits"]
        share = min(1.0, ctas / (0.7 * device.num_sms))
        crowded = 1.0 if knobs["splits"] <= 2 else 1.35 if ctas > 0.9 * device.num_sms and knobs["down"] * _BOX_BYTES > 114e3 else 1.12
        total_us = memory_us * (2.04 + 1.08 * crowded / share**0.7) / 3
        return 11.0 + min(0.03 * memory_us, 6.0) + 0.5 * (knobs["splits"].bit_length() - 1) + total_us

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, MoeProblem)
        scratch, knobs, steps = Scratch(), dict(config.knobs), list[Step]()
        is_both, most = "both" in knobs, min(p.experts, p.rows)
        up = _consts(p, "both", knobs["both"]) if is_both else _consts(p, "up", knobs["up"])
        middle = scratch.take(most * p.tokens * up.middle_bytes)
        table = scratch.take(8 * most * p.tokens)
        target, x, kind = Target.for_arch(device.arch), p.desc("x"), p.kind.name
        ids = [*held(p, "ids").args("ids"), Arg("first_expert", "s64", p.first)]
        # Tokens are planes of the same rank as the middle of an expert.
        x_map = TensorMapSpec(kind, (p.hidden, p.tokens, 1), (*_steps(x), p.tokens * _steps(x)[0]), (TILE_K, p.tokens, 1), swizzle=128)
        middle_map = TensorMapSpec(kind, (p.inter, p.tokens, most), (up.middle_bytes, p.tokens * up.middle_bytes), (TILE_K, p.tokens, 1),
                                   swizzle=128)
        shared = [*ids, *held(p, "weights").args("weights"), Arg("ptr_middle", "u64", middle), Arg("ptr_table", "u64", table)]

        def launch(c: StreamConsts, args: list[Arg], num_ctas: int) -> None:
            steps.append(Step.of("moe/stream_sm90", p.op, target, c.threads, args, c, num_ctas, dynamic_smem=c.smem_bytes, cluster=c.splits,
                                 follows=True, suffix=f"{c.of}_{kind}_{c.tile_n}"))

        num_ctas = min(device.num_sms * _per_sm(up, device), most * up.tiles)
        if is_both:
            inverse = Held(index(p.tokens, p.topk), scratch.take(4 * p.rows))
            result = Held(packed(p.desc("x"), most * p.tokens, p.hidden), scratch.take(most * p.tokens * up.result_bytes))
            counters = scratch.take(4 + 4 * most)
            steps.append(clear_step(p.op, counters, 4, 1 + most, device))
            launch(up, [*_both_maps(p, up, TensorMapArg("x", x_map), WorkspaceMapArg(middle_map, middle.byte_offset)), *shared,
                        Arg("ptr_inverse", "u64", inverse.place), Arg("ptr_result", "u64", result.place),
                        Arg("ptr_counter", "u64", counters), Arg("ptr_done", "u64", shifted(counters, 4))], num_ctas)
            steps.append(combine_step(p, result, inverse, held(p, "weights"), held(p, "y"), device))
            return Build(tuple(steps), scratch.num_bytes)
        down = replace(_consts(p, "down", knobs["down"]), splits=knobs["splits"])
        launch(up, [Arg("map_weights", "tensor_map", TensorMapArg("w_gate_up", _weights_map(p.desc("w_gate_up"), up))),
                    Arg("map_tokens", "tensor_map", TensorMapArg("x", x_map)), *shared, Arg("num_ctas", "u32", num_ctas),
                    *_scale_args(p, "gate_up")], num_ctas)
        launch(down, [Arg("map_weights", "tensor_map", TensorMapArg("w_down", _weights_map(p.desc("w_down"), down))),
                      Arg("map_tokens", "tensor_map", WorkspaceMapArg(middle_map, middle.byte_offset)), *ids,
                      Arg("ptr_table", "u64", table), *_scale_args(p, "down"), *held(p, "y").args("y")], down.tiles * down.splits)
        return Build(tuple(steps), scratch.num_bytes)


def _both_maps(p: MoeProblem, c: StreamConsts, x: TensorMapArg | WorkspaceMapArg, middle: WorkspaceMapArg) -> list[Arg]:
    """And where scales are."""
    maps = [Arg(f"map_{n}", "tensor_map", TensorMapArg(f"w_{n}", _weights_map(p.desc(f"w_{n}"), c))) for n in ("gate_up", "down")]
    maps += [Arg("map_x", "tensor_map", x), Arg("map_middle", "tensor_map", middle)]
    for name in ("gate_up", "down") if c.codes else ():
        maps += _scale_args(p, name, f"scale_{name}")
    return maps


def _per_sm(c: StreamConsts, device: DeviceInfo) -> int:
    return max(1, device.smem_per_sm // (c.smem_bytes + 1024))


class MoeStreamSorted(Engine):
    """Rows sorted by expert: few of each, so that bringing weights takes most of the time, or as many as tiles of two warpgroups fit."""

    def __init__(self, op: str) -> None:
        self.id = f"{op}.stream_sorted_sm90"  # type: ignore[misc]

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        p = problem
        assert isinstance(p, MoeProblem)
        if device.arch != "sm_90a":
            return refuse(f"it needs sm_90a, the device is {device.arch}")
        if p.kind not in (F16, BF16) or not p.rows or p.experts > MAX_EXPERTS or not p.hidden or not p.inter:
            return refuse(f"f16 or bf16, at most {MAX_EXPERTS} experts")
        wrong = [n for n in ("w_gate_up", "w_down") if not _fits_map(p.desc(n))]
        if wrong:
            return refuse(f"tensor maps need rows of {' and '.join(wrong)} that begin at multiples of 16 bytes")
        if not _fits_scales(p):
            return refuse(f"blocks of scales have a multiple of {TILE_K} columns, not {p.block[1]}")
        if ceil_div(p.hidden + p.inter, ROWS) * (p.rows + p.experts) >= 2**31:
            return refuse("fewer rows or columns")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """columns: rows of an expert that a tile takes; stages of the ring of both products, or with two warpgroups of each one's."""
        p = problem
        assert isinstance(p, MoeProblem)
        found = []
        is_coded = p.has("scale_down")
        for columns in (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144) if is_coded else (8, 16, 24, 32, 48, 64, 80, 96):
            for share in (s for s, most in ((1, 144), (2, 32 if is_coded else 0), (3, 16 if is_coded else 0)) if columns <= most):
                both = self._stages(p, columns, share, device)
                if both >= 3 or device.is_emulated:
                    found.append(EngineConfig.of(columns=columns, both=both))
        for columns in () if is_coded else WIDE_COLUMNS:
            stages = self._stages(p, columns, 1, device, 2)
            if stages >= 3:  # a stage is released once the next one is multiplied
                found.append(EngineConfig.of(columns=columns, up=stages, down=stages))
        return tuple(sorted(dict.fromkeys(found), key=lambda config: self.estimate(problem, config, device)))

    @staticmethod
    def _stages(p: MoeProblem, columns: int, share: int, device: DeviceInfo, warpgroups: int = 1) -> int:
        room = min(device.smem_per_cta, device.smem_per_sm // share - 1024) - 40 * MAX_STAGES - 8 * p.experts - 16
        c = _sorted_consts(p, "both", columns, 1, warpgroups)
        most = min(room // c.stage_bytes, MAX_STAGES * (2 if c.codes else 1))
        return max(1, min(most, 3 if device.is_emulated else most))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Weights once from memory, again from L2 for every further tile of an expert's rows; rows from L2 with every block of weights."""
        p = problem
        assert isinstance(p, MoeProblem)
        hits, columns, is_wide = _expected_hits(p), config["columns"], "up" in dict(config.knobs)
        each = p.rows / hits
        # Of random experts: a tile more for each multiple of its rows that an expert's are above
        spread = (2 * max(each, 1.0)) ** 0.5
        tiles = hits * (1 + sum(0.5 * erfc((i * columns + 0.5 - each) / spread) for i in range(1, int(each * 2 / columns) + 3)))
        size = _sorted_consts(p, "up", columns, 1).row_bytes / TILE_K
        weights, stages = 3 * size * p.hidden * p.inter, 3 * p.hidden * p.inter / (2 * ROWS * TILE_K)
        # What further tiles want again is partly gone from L2.
        memory_us = (hits + 0.4 * (tiles - hits)) * weights / (device.bandwidth_gbs * 1.06e3)
        knobs = dict(config.knobs)
        memory_us *= 1 + 0.0006 * (columns - 16)  # rows of all weights' tiles come from L2
        memory_us *= 1.0 if knobs["both" if "both" in knobs else "up"] >= 7 else 1.015 if columns < 64 else 1.1
        l2_us = tiles * weights * (1 + columns / 128) / (device.num_sms * 75e3)
        multiply_us = tiles * stages / device.num_sms * (240.0 + 4.5 * columns) / 1.6e3
        if is_wide:
            multiply_us = tiles * stages / 2 / device.num_sms * (130.0 + 8.5 * columns) / 1.5e3 * 1.05
        if size < 2:
            c = _sorted_consts(p, "both", columns, knobs["both"])
            multiply_us = _coded_us(tiles * c.up_tiles, c, device, c.up_k_tiles)
            multiply_us += _coded_us(max(tiles * c.down_tiles, device.num_sms * _per_sm(c, device)), c, device, c.down_k_tiles)
        moved_us = (p.tokens + 3 * p.rows) * p.hidden * 2 / (device.bandwidth_gbs * 800)
        most_us = max(memory_us, l2_us, multiply_us)
        return 18.0 + most_us + min(0.12 * most_us, 18.0) + moved_us

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p, scratch, steps = problem, Scratch(), list[Step]()
        assert isinstance(p, MoeProblem)
        ids, order, inverse, counts = working(p, device, scratch, steps)
        xs_desc, middle_desc = packed(p.desc("x"), p.rows, p.hidden), packed(p.desc("x"), p.rows, p.inter)
        xs, middle = (Held(d, scratch.take(d.shape[0] * d.strides[0] * 2)) for d in (xs_desc, middle_desc))
        knobs, columns = dict(config.knobs), config["columns"]
        row_tiles = min(p.experts, p.rows) + p.rows // columns
        # Of both products in turn: a counter; tiles of weights that all rows have met; and those of each tile of rows.
        words = 2 + row_tiles if "both" in knobs else 2
        counters = scratch.take(4 * words)
        counts_itself = "both" in knobs and p.has("ids") and p.rows <= WHOLE
        steps += sort_steps(p, ids, order, inverse, counts, device, scratch, counters, words)
        steps.append(scatter_step(p, held(p, "x"), inverse, xs, device, lets_go=counts_itself))
        groups = [Arg("ptr_group_sizes", "u64", counts.place), Arg("groups_step", "s64", 4)]
        if counts_itself:
            groups = [*ids.args("ids"), Arg("first_expert", "s64", p.first)]
        groups += [Arg("groups_count", "u32", p.experts), Arg("groups_total", "u32", p.rows)]

        def rows_map(source: Held, c: StreamConsts) -> WorkspaceMapArg:
            assert isinstance(source.place, WorkspaceArg)
            rows = source.desc
            map_ = TensorMapSpec(p.kind.name, (rows.shape[1], rows.shape[0]), _steps(rows), (TILE_K, c.tile_n), swizzle=128)
            return WorkspaceMapArg(map_, source.place.byte_offset)

        def launch(c: StreamConsts, own: list[Arg]) -> Step:
            num_ctas = min(device.num_sms * _per_sm(c, device), row_tiles * c.tiles)
            own += groups if c.of == "both" else [*groups, Arg("num_ctas", "u32", num_ctas)]
            return Step.of("moe/stream_sorted_sm90", p.op, Target.for_arch(device.arch), c.threads, own, c, num_ctas,
                           dynamic_smem=c.smem_bytes, follows=True, suffix=f"{c.of}_{p.kind.name}_{c.tile_n}")

        result = xs
        if "both" in knobs:
            c = replace(_sorted_consts(p, "both", columns, knobs["both"]), ids=ids.desc.dtype.name if counts_itself else "", topk=p.topk)
            result = Held(xs_desc, scratch.take(xs_desc.shape[0] * xs_desc.strides[0] * 2))
            args = [*_both_maps(p, c, rows_map(xs, c), rows_map(middle, c)), Arg("ptr_counter", "u64", counters),
                    Arg("ptr_done", "u64", shifted(counters, 4))]
            for name, to in (("middle", middle), ("result", result)):
                args += [Arg(f"ptr_{name}", "u64", to.place), Arg(f"{name}_row_bytes", "s64", 2 * to.desc.strides[0])]
            steps.append(launch(c, args))
        else:
            for of, source, name, to in (("up", xs, "gate_up", middle), ("down", middle, "down", xs)):
                c = _sorted_consts(p, of, columns, knobs[of], 2)
                steps.append(launch(c, [
                    Arg("map_weights", "tensor_map", TensorMapArg(f"w_{name}", _weights_map(p.desc(f"w_{name}"), c))),
                    Arg("map_tokens", "tensor_map", rows_map(source, c)), Arg("ptr_result", "u64", to.place),
                    Arg("result_row_bytes", "s64", 2 * to.desc.strides[0]),
                    Arg("ptr_counter", "u64", shifted(counters, 4 if of == "down" else 0))]))
        weights_held = held(p, "weights") if p.has("weights") else None
        steps.append(combine_step(p, result, inverse, weights_held, held(p, "y"), device))
        return Build(tuple(steps), scratch.num_bytes)


def _sorted_consts(p: MoeProblem, of: str, columns: int, stages: int, warpgroups: int = 1) -> StreamConsts:
    return StreamConsts(p.kind.name, "", of, columns, 0, p.experts, p.hidden, p.inter, stages, gate=None if of == "down" else p.gate,
                        ragged=RaggedConsts("m", "s32", False), warpgroups=warpgroups,
                        burst=BURST if warpgroups == 1 and stages > BURST else 1, **_codes(p))


def _scale_args(p: MoeProblem, name: str, prefix: str = "scale") -> list[Arg]:
    if not p.has(f"scale_{name}"):
        return []
    scale = f"scale_{name}"
    return [Arg(f"ptr_{prefix}", "u64", TensorArg(scale)), *strides(prefix, ("expert", "row", "column"), p.desc(scale))]


def _consts(p: MoeProblem, of: str, stages: int) -> StreamConsts:
    c = StreamConsts(p.kind.name, p.desc("ids").dtype.name, of, p.tokens, p.topk, p.experts, p.hidden, p.inter, stages,
                     middle_bytes=2 * ceil_div(p.inter, 8) * 8, result_bytes=2 * ceil_div(p.hidden, 8) * 8,
                     gate=None if of == "down" else p.gate, burst=BURST if stages > BURST else 1, **_codes(p))
    return replace(c, streamed=_weights_bytes(p, c) <= STREAMED_BYTES)


def _weights_bytes(p: MoeProblem, c: StreamConsts) -> float:
    """Of experts that some of random tokens go to."""
    return 3 * _expected_hits(p) * p.hidden * p.inter * c.row_bytes / TILE_K


def _codes(p: MoeProblem) -> dict[str, Any]:
    if not p.has("scale_down"):
        return {}
    spans, step = [], p.block[0]
    for name in ("gate_up", "down"):
        scale = p.desc(f"scale_{name}")
        size = scale.dtype.num_bytes
        line = scale.shape[2] * size
        is_whole = p.inter % ROWS == 0 and p.hidden % (2 * ROWS) == 0 and (ROWS % step == 0 or step % ROWS == 0)
        is_packed = scale.strides[1:] == (scale.shape[2], 1) and scale.align % 16 == 0 and scale.strides[0] * size % 16 == line % 16 == 0
        spans.append(line * max(1, ROWS // step) if is_whole and is_packed else 0)
    kind = p.desc("w_down").dtype.name
    return {"codes": "s4" if kind == "u8" else kind, "scale": p.desc("scale_down").dtype.name, "block": p.block,
            "scale_spans": (spans[0], spans[1])}


ENGINES: dict[str, tuple[Engine, ...]] = {"moe": (MoeStream("moe"), MoeStreamSorted("moe")),
                                          "moe_quantized": (MoeStream("moe_quantized"), MoeStreamSorted("moe_quantized")),
                                          "moe_exchanged": (MoeStreamSorted("moe_exchanged"),)}
