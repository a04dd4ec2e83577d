"""Attention by mma.sync, f16 and bf16, from sm_80 on: scores and weights in registers, keys and values through a ring in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import log
from typing import ClassVar

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import BF16, F16
from ..ops.attention import AttentionProblem
from ..ops.base import Problem
from ..tensor import TensorDesc
from .attention_scores import ScoreConsts, arguments, score_consts
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Step, Support, TensorArg, refuse

MAX_LENGTH = 2**29
MMA_CLOCKS = {(8, 0): 8, (9, 0): 6, (10, 0): 6}  # of m16n8k16 on a quarter of an SM; others with f32 accumulators: 32
COLUMNS = (256, 128, 64)  # of the output that 16 rows of registers hold, at most


@dataclass(frozen=True, slots=True)
class TileConsts:
    """A tile in shared memory, lines of `columns` elements, of which memory has `dim`; `threads` copy it in pieces of 16 bytes.
    vec: elements that memory moves at once: 8, or fewer, or one by one. swizzled: see the template.
    split: whether the CTA has only some of the columns of memory."""

    name: str
    rows: int
    columns: int
    dim: int
    vec: int
    threads: int
    swizzled: bool = False
    split: bool = False

    @property
    def pitch(self) -> int:
        """Bytes from line to line."""
        return -(-self.columns // 64) * 128 if self.swizzled else 16 * (self.columns // 8 | 1)

    @property
    def across(self) -> int:
        """Threads along a line; so few that lines go by eights where they are swizzled."""
        chunks = self.columns // 8
        return min(32, chunks & -chunks, self.threads // 8 if self.swizzled else 32)

    @property
    def columns_of_thread(self) -> int:
        return self.columns // 8 // self.across

    def flip(self, column: int) -> int:
        """Which bits of a thread's first chunk are others in its chunk `column`, which may not be added, as lines are swizzled."""
        return self.across * column % 8 if self.swizzled else 0

    @property
    def flips(self) -> list[int]:
        return sorted({self.flip(i) for i in range(self.columns_of_thread)} - {0})

    @property
    def down(self) -> int:
        """Lines that are copied at a time."""
        return self.threads // self.across

    @property
    def row_steps(self) -> int:
        return max(1, self.rows // self.down)

    @property
    def leaves_threads(self) -> bool:
        return self.down > self.rows

    @property
    def is_ragged(self) -> bool:
        return self.dim % self.columns > 0


@dataclass(frozen=True, slots=True)
class AttentionMmaConsts:
    """tiles_m: groups of 16 rows of a warp. slots: of the ring. keeps_q: in registers. splits: parts of the output's columns, a CTA each.
    mixes: weights are computed between products. folds_scale: exponentials take products as they are. descends: the last queries come
    first, as they have most keys."""

    dtype: str
    scores: ScoreConsts
    warps: int
    tiles_m: int
    tile_n: int
    slots: int
    mixes: bool
    keeps_q: bool
    q: TileConsts
    k: TileConsts
    v: TileConsts
    out: TileConsts
    splits: int
    has_lse: bool
    folds_scale: bool
    descends: bool

    log2_e: ClassVar[float] = 1 / log(2)
    ln_2: ClassVar[float] = log(2)
    minus_inf: ClassVar[str] = "0fFF800000"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def warp_m(self) -> int:
        return 16 * self.tiles_m

    @property
    def tile_m(self) -> int:
        return self.warps * self.warp_m

    @property
    def joint(self) -> bool:
        """Keys and values are awaited together."""
        return self.slots == 4

    @property
    def can_hide(self) -> bool:
        """There may be keys between seen ones that nobody sees: their values must not be used."""
        return self.scores.expression is not None

    @property
    def row_slots(self) -> int:
        """Rows of a lane."""
        return 2 * self.tiles_m

    @property
    def rows(self) -> list[str]:
        return self.names("row")

    def names(self, stem: str) -> list[str]:
        return [f"%{stem}{r}" for r in range(self.row_slots)]

    @property
    def form(self) -> str:
        return f"m16n8k16.row.col.f32.{self.dtype}.{self.dtype}.f32"

    @property
    def score_count(self) -> int:
        return self.tiles_m * self.tile_n // 2

    @property
    def acc_count(self) -> int:
        return self.tiles_m * self.v.columns // 2

    @property
    def q_registers(self) -> int:
        return 4 * self.tiles_m * (self.q.columns // 16 if self.keeps_q else 3)

    def q_at(self, m: int, step: int) -> int:
        return 4 * ((step if self.keeps_q else step % 3) * self.tiles_m + m)

    @staticmethod
    def some(stem: str, first: int, count: int) -> list[str]:
        return [f"%{stem}{first + i}" for i in range(count)]

    def score(self, m: int, n8: int) -> list[str]:
        return self.some("s", 4 * (m * self.tile_n // 8 + n8), 4)

    def acc(self, m: int, n8: int) -> list[str]:
        return self.some("acc", 4 * (m * self.v.columns // 8 + n8), 4)

    @property
    def elements(self) -> list[tuple[str, int, int]]:
        """Scores of a lane as the macros of scores take them."""
        found = []
        for m in range(self.tiles_m):
            names = [name for n8 in range(self.tile_n // 8) for name in self.score(m, n8)]
            found += [(name, 2 * m + r, k) for name, r, k in ScoreConsts.fragment(names)]
        return found

    def scores_of(self, slot: int) -> list[str]:
        return [name for name, r, _ in self.elements if r == slot]

    def slot_of(self, pair: int) -> int:
        """The row of two neighbouring scores."""
        return pair // 2 // (self.tile_n // 8) * 2 + pair % 2

    def pairs_of(self, step: int) -> list[int]:
        """Pairs of scores of the 16 keys of `step`."""
        return [(m * self.tile_n // 8 + 2 * step) * 2 + i for m in range(self.tiles_m) for i in range(4)]

    def share(self, step: int, part: int, parts: int) -> list[int]:
        """The part of them that is computed between some products of the step before."""
        pairs = self.pairs_of(step)
        return pairs[len(pairs) * part // parts:len(pairs) * (part + 1) // parts] if part >= 0 else []

    def acc_of(self, slot: int) -> list[int]:
        count = self.acc_count // self.tiles_m
        return [slot // 2 * count + i for i in range(count) if i // 2 % 2 == slot % 2]

    @property
    def ring_offset(self) -> int:
        return self.tile_m * self.q.pitch

    @property
    def slot_bytes(self) -> int:
        return self.tile_n * max(self.k.pitch, self.v.pitch)

    @property
    def flag_offset(self) -> int:
        return max(self.ring_offset + self.slots * self.slot_bytes, self.tile_m * self.out.pitch)

    @property
    def smem_bytes(self) -> int:
        return self.flag_offset + 16 * self.can_hide


def _vec(desc: TensorDesc) -> int:
    """Elements of a row that can be moved at once, wherever it begins."""
    if desc.strides[-1] != 1 and desc.shape[-1] > 1:
        return 1
    for vec in (8, 4, 2):
        steps = [s for n, s in zip(desc.shape[:-1], desc.strides[:-1], strict=True) if n > 1]
        if desc.align >= 2 * vec and all(s % vec == 0 for s in steps):
            return vec
    return 1


def _padded(dim: int) -> int:
    return -(-dim // 16) * 16


def _consts(p: AttentionProblem, config: EngineConfig) -> AttentionMmaConsts:
    warps, tiles_m, tile_n = config["warps"], config["rows"] // 16, config["tile_n"]
    tile_m, threads = 16 * warps * tiles_m, 32 * warps
    scores, out = score_consts(p), p.heads_of("out")
    splits = -(-_padded(p.dim_v) // (config["columns"] // tiles_m))
    part = _padded(-(-p.dim_v // splits))
    out_vec = next(v for v in (8, 4, 2, 1) if v <= _vec(out) and p.dim_v % v == 0)
    columns = _padded(p.dim_qk)
    q, k = (TileConsts(n, rows, columns, p.dim_qk, _vec(p.heads_of(n)), threads, config["swizzle"] > 0)
            for n, rows in (("q", tile_m), ("k", tile_n)))
    v = TileConsts("v", tile_n, part, p.dim_v, _vec(p.heads_of("v")), threads, config["swizzle"] > 0, splits > 1)
    keeps_q = tiles_m * (tile_n + part + q.columns // 2) // 2 <= (183 if _limit(config) > 200 else 128)
    return AttentionMmaConsts(p.desc("q").dtype.name, scores, warps, tiles_m, tile_n, config["slots"],
                              config["mix"] > 0 and not p.dropout, keeps_q, q, k, v,
                              TileConsts("out", 16 * tiles_m, part, p.dim_v, out_vec, 32, False, splits > 1), splits, p.has("lse"),
                              scores.expression is None and p.scale > 0, p.right is not None and p.left is None)


# (warps, rows of a warp, keys of a tile, slots of the ring, CTAs of an SM)
SHAPES = (*((4, 32, tile_n, slots, ctas) for tile_n in (32, 64) for slots in (2, 3, 4) for ctas in (1, 2, 3)), (4, 32, 128, 4, 2),
          *((4, 16, tile_n, slots, ctas) for tile_n in (16, 32, 64) for slots in (2, 4) for ctas in (1, 2, 3)),
          *((2, rows, tile_n, slots, ctas) for rows in (32, 16) for tile_n in (32, 64) for slots in (2, 4) for ctas in (2, 4)),
          *((8, 16, tile_n, 2, 1) for tile_n in (32, 64)))
MAX_CONFIGS = 24
LATENCY = {2: 700, 3: 300, 4: 0}  # clocks in which a CTA alone waits for a tile of keys and values, by slots


def _limit(config: EngineConfig) -> int:
    """Registers of a thread."""
    return min(255, 65536 // (32 * config["warps"] * config["ctas"]) // 8 * 8)


def _registers(c: AttentionMmaConsts, device: DeviceInfo, limit: int) -> int:
    """With fewer than these a thread was seen to spill, or might: what scores take is not foreseen exactly. Before sm_90 a division calls a
    function, across which much is saved."""
    scores, is_hopper = c.scores, device.at_least(9)
    others = (32 if is_hopper else 44) + 24 * (min(c.q.vec, c.k.vec, c.v.vec) < 8) + 8 * (c.splits > 1)
    if scores.expression is not None:
        others += 38 if is_hopper else 110 if "/" in str(scores.expression) else 100
        others += 8 * scores.has_left + 4 * len(scores.tensors) + 30 * len(scores.moving)
    others += 84 * scores.has_dropout
    others += (12 if limit < 200 else 4) * c.q.swizzled
    return c.acc_count + c.score_count + (c.q_registers if c.keeps_q else 16) + others


@lru_cache(maxsize=256)
def _candidates(p: AttentionProblem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    if device.is_emulated:
        shapes: Sequence[tuple[int, ...]] = ((1, 16, 16, 2, 1), (2, 16, 32, 3, 1), (1, 32, 32, 4, 1))
    else:
        shapes = SHAPES
    found, fallback = [], []
    can_swizzle = max(p.dim_qk, p.dim_v) > 32
    for (warps, rows, tile_n, slots, ctas), columns, swizzle in product(shapes, COLUMNS, (0, 1) if can_swizzle else (0,)):
        if columns != COLUMNS[0] and _padded(p.dim_v) * rows <= columns * 16:
            continue
        if swizzle and warps == 1:  # too few to copy eight lines of 128 bytes at a time
            continue
        config = EngineConfig.of(warps=warps, rows=rows, tile_n=tile_n, slots=slots, ctas=ctas, columns=columns, swizzle=swizzle,
                                 mix=int(slots == 4 and tile_n >= 64 and p.dim_qk <= 64))
        c = _consts(p, config)
        if p.blocks[0] and (p.blocks[0] % c.tile_m or p.blocks[1] % tile_n):
            continue  # a tile lies within a block of a mask
        if c.smem_bytes > min(device.smem_per_cta, device.smem_per_sm // ctas - 1024):
            continue
        if (p.expression is not None or p.dropout) and c.score_count > 32:
            continue
        if _registers(c, device, _limit(config)) <= _limit(config):
            found.append(config)
        elif ctas <= 2 and c.score_count <= 8:
            fallback.append(config)
    if not found:  # no shape is known to do without spills
        return tuple(fallback[-1:])
    return tuple(sorted(found, key=lambda config: AttentionMma.clocks(p, config, device))[:MAX_CONFIGS])


class AttentionMma(Engine):
    """Forward. Columns of the output beyond 256 (128 for 32 rows a warp) are another CTA's, which has the scores of its own."""

    id = "attention.mma_sm80"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, AttentionProblem)
        if problem.desc("q").dtype not in (F16, BF16):
            return refuse(f"q is {problem.desc('q').dtype} (f16 and bf16)")
        if not device.at_least(8):
            return refuse(f"{device.arch} (sm_80 and later)")
        if max(problem.len_q, problem.len_kv) >= MAX_LENGTH:
            return refuse(f"{max(problem.len_q, problem.len_kv)} queries or keys (fewer than {MAX_LENGTH})")
        if problem.is_empty:
            return SUPPORTED
        if not _candidates(problem, device):
            return refuse(f"{problem.dim_qk} and {problem.dim_v} columns do not fit into {device.smem_per_cta} bytes of shared memory")
        if _tiles(problem, 16) * _pairs(problem) * 16 >= 2**31:
            return refuse("more tiles of queries than a grid has CTAs")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, AttentionProblem)
        return (EngineConfig(),) if problem.is_empty else _candidates(problem, device)

    @staticmethod
    def clocks(p: AttentionProblem, config: EngineConfig, device: DeviceInfo) -> float:
        """Of an SM, until all is done. The terms fit what configs of 64 and 128 columns took on an H200."""
        c = _consts(p, config)
        if device.is_emulated:
            return float(c.tile_n * c.tile_m * c.splits)
        # Of a warp and a tile of keys: products, and ldmatrix and copies, which all warps of the SM share.
        steps, groups = c.q.columns // 16, c.v.columns // 16
        products = MMA_CLOCKS.get(device.capability, 32) * c.tiles_m * (steps + groups) * c.tile_n // 8
        fragments = (steps + groups) * c.tile_n // 16 + (0 if c.keeps_q else steps * c.tiles_m)
        # Copies to lines that do not begin at multiples of 128 bytes take twice the time.
        shared = 16 * fragments + c.tile_n * (c.k.columns + c.v.columns) / (16 if c.k.swizzled else 8) / c.warps
        each = 6 + (12 + 8 * len(c.scores.moving) if c.scores.expression is not None else 0) + 28 * c.scores.has_dropout
        body = 1.12 * max(products, shared) + each * c.score_count + 70 + 40 * (c.slots == 2)
        body -= 1.4 * c.tile_n if c.mixes else 15 * c.joint
        body *= 1.06 if c.warps == 2 else 1.0  # keys are copied for fewer queries
        body += 30 * c.tile_n / 32 * sum(x.vec < 8 for x in (c.k, c.v))
        # Tiles of keys of a CTA, on average and of the longest.
        keys = p.len_kv // p.batch if p.is_varlen else p.len_kv
        most = float(max(1, -(-keys // c.tile_n)))
        if p.left is not None and p.right is not None:
            most = min(most, (p.left + p.right + c.tile_m) / c.tile_n + 1)
        average = (most + 1 + c.tile_m / c.tile_n) / 2 if p.right is not None and p.left is None else most
        ctas = -(-p.len_q // c.tile_m) * _pairs(p) * c.splits
        places = device.num_sms * config["ctas"]
        together = min(config["ctas"], -(-ctas // device.num_sms))
        warps = together * c.warps / 4
        busy = body * (1 + 0.03 * max(0.0, 3 - warps) + 0.15 * (together == 1))
        rest = 100 + 0.17 * c.tile_m * max(c.q.columns, c.v.columns)
        alone = most * (1.3 * max(products, shared) + 2 * each * c.score_count + 250 + LATENCY[c.slots]) + 2 * rest + 1500
        rounds = ctas / places
        if average == most:
            rounds = 0.5 * (rounds + -(-ctas // places)) if ctas > places else 1.0
        return max(alone, rounds * config["ctas"] * (c.warps / 4 * busy * average + rest) if ctas > places else
                   together * (c.warps / 4 * busy * most + rest))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, AttentionProblem)
        if problem.is_empty:
            return 1.0
        products = self.clocks(problem, config, device) / (1650 if device.capability in MMA_CLOCKS else 2300)
        return max(products, problem.num_bytes / (device.bandwidth_gbs * 850)) + 3.0

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, AttentionProblem)
        p = problem
        if p.is_empty:
            return Build(())
        c = _consts(p, config)
        tiles, pairs = _tiles(p, c.tile_m), _pairs(p) * c.splits
        args = arguments(p)
        for name in ("q", "k", "v", "out", "lse"):
            if p.has(name):
                desc = p.heads_of(name)
                args.append(Arg(f"ptr_{name}", "u64", TensorArg(name)))
                args += [Arg(f"{name}_{axis}", "s64", s * desc.dtype.num_bytes) for axis, s in zip("bhld", desc.strides, strict=False)]
        args += [Arg("num_tiles", "u32", tiles), Arg("num_pairs", "u32", pairs), Arg("section_pairs", "u32", _section(p, c, device))]
        step = Step.of("attention/forward_mma", p.op, Target.for_arch(device.arch), c.threads, args, c, tiles * pairs,
                       dynamic_smem=c.smem_bytes, min_ctas_per_sm=config["ctas"],
                       suffix=f"{c.dtype}_{p.dim_qk}_{p.dim_v}_{config.name}")
        return Build((step,))


def _tiles(p: AttentionProblem, tile_m: int) -> int:
    """Tiles of queries of a head."""
    return -(-p.len_q // tile_m) + (p.batch + 2 if p.is_varlen else 0)


def _pairs(p: AttentionProblem) -> int:
    """Heads of all batches."""
    return p.heads * (1 if p.is_varlen else p.batch)


def _section(p: AttentionProblem, c: AttentionMmaConsts, device: DeviceInfo) -> int:
    """Heads (and parts of columns) whose tiles are taken by turns: their keys and values fill half of the L2 cache."""
    group = p.heads // p.heads_kv * c.splits
    bytes_of_group = 2 * max(1, p.len_kv) * (p.dim_qk + p.dim_v)
    return min(_pairs(p) * c.splits, group * max(1, device.l2_bytes // 2 // bytes_of_group))


ENGINES: dict[str, tuple[Engine, ...]] = {"attention": (AttentionMma(),)}
