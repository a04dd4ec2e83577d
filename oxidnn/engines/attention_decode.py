"""Attention of few queries (decoding): keys and values stream once, of one tensor or of pages of a cache; mma.sync, sm_80 up. They come by
cp.async, or on sm_90 by tensor copies, which one lane of a team issues.

The heads of a group and their queries are the 16 rows of mma.sync. Teams of warps, and CTAs (splits), deal out the keys of a tile; where
there are several splits, a second launch adds up what they leave in the workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from ..codegen.fastdiv import magic
from ..codegen.spec import Target, TensorMapSpec
from ..device import DeviceInfo
from ..dtypes import BF16, F16
from ..ops.attention import AttentionProblem
from ..ops.base import Problem
from ..ops.paged_attention import MAX_SPLITS, PagedAttentionProblem
from ..tensor import TensorDesc
from .attention_maps import ROW_BYTES, map_fault
from .attention_scores import ScoreConsts, arguments, score_consts
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, TensorMapArg, refuse
from .composition import Place, piece, relocated
from .digits import ceil_div, power_of_two

MAX_DIM = 256
MAX_ROWS = 64  # of a tile
COMBINE_THREADS = 64
_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class DecodeConsts:
    """kind, kind_kv: types of q and of keys and values. keys: of a team's step. team: warps, of 16 rows each. q_words: q is loaded by twos.
    piecewise: of "k", "v" what is copied by 16 bytes. page: keys of a page, 0 without pages. k_scale, v_scale: "", "head" or "key": what
    they change along. tile_queries: of a tile, of sequences side by side, 0 without. vec: neighbouring columns of the result a thread has,
    out_packed: and stores at once. hints: copies ask for 256 bytes (where keys are many times what L2 holds), tensor copies for lines that
    leave L2 first (where they are not). parks_q: queries wait in shared memory, for want of registers. shared_params: how many parameters
    are the scores'. boxes: a step is brought by tensor copies, as panels of 128 bytes of each key, which the hardware swizzles."""

    score: ScoreConsts
    kind: str
    kind_kv: str
    dim_qk: int
    dim_v: int
    keys: int
    team: int
    warps: int
    stages: int
    is_split: bool
    q_words: bool
    piecewise: tuple[str, ...]
    page: int
    k_scale: str
    v_scale: str
    tile_queries: int
    vec: int
    out_packed: bool
    has_lse: bool
    hints: bool
    parks_q: bool
    shared_params: int
    boxes: bool

    @property
    def teams(self) -> int:
        return self.warps // self.team

    @property
    def is_narrow(self) -> bool:
        """Keys and values have 8 bits."""
        return self.size_kv == 1

    @property
    def math(self) -> str:
        """Type of the factors of products. All numbers of 8 bits are f16, and queries are once their rows are scaled."""
        return "f16" if self.is_narrow else self.kind

    @property
    def size_kv(self) -> int:
        return 2 if self.kind_kv == self.kind else 1

    def dim(self, name: str) -> int:
        return self.dim_qk if name == "k" else self.dim_v

    def padded_dim(self, name: str) -> int:
        """Two pieces of 16 bytes are the least that ldmatrix takes."""
        unit = 32 // self.size_kv
        return ceil_div(self.dim(name), unit) * unit

    def pieces(self, name: str) -> int:
        return self.dim(name) * self.size_kv // 16

    def padded_pieces(self, name: str) -> int:
        return self.padded_dim(name) * self.size_kv // 16

    def pitch(self, name: str) -> int:
        """Bytes of a row in shared memory: an odd number of pieces, so that eight rows lie in different banks; of a panel's row."""
        return ROW_BYTES if self.boxes else (self.padded_pieces(name) + 1) * 16

    def panels(self, name: str) -> int:
        return ceil_div(self.dim(name) * self.size_kv, ROW_BYTES)

    def is_whole(self, name: str) -> bool:
        """One box has all panels."""
        return self.dim(name) * self.size_kv % ROW_BYTES == 0

    def step_bytes(self, name: str) -> int:
        return self.keys * self.pitch(name) * (self.panels(name) if self.boxes else 1)

    def row_lanes(self, name: str) -> int:
        """Lanes that copy a row; a pass of the team has no more rows than a step."""
        return max(power_of_two(self.padded_pieces(name)), 32 * self.team // self.keys)

    def pass_rows(self, name: str) -> int:
        return 32 * self.team // self.row_lanes(name)

    def passes(self, name: str) -> int:
        return self.keys // self.pass_rows(name)

    def in_pieces(self, name: str) -> bool:
        return name in self.piecewise

    def is_sparse(self, name: str) -> bool:
        """Some lanes have no piece of a row."""
        return self.padded_pieces(name) < self.row_lanes(name)

    def has_gap(self, name: str) -> bool:
        return self.pieces(name) < self.row_lanes(name)

    def offset(self, name: str) -> int:
        """Of a stage."""
        return 0 if name == "k" else self.step_bytes("k")

    def scale_of(self, name: str) -> str:
        return self.k_scale if name == "k" else self.v_scale

    def scale_offset(self, name: str) -> int:
        first = self.step_bytes("k") + self.step_bytes("v")
        return first if name == "k" else first + 4 * self.keys

    @property
    def stage_bytes(self) -> int:
        scales = 8 * self.keys if "key" in (self.k_scale, self.v_scale) else 0
        return self.step_bytes("k") + self.step_bytes("v") + scales

    @property
    def ring_bytes(self) -> int:
        """Of a team."""
        return self.stages * self.stage_bytes

    @property
    def sum_pitch(self) -> int:
        return 8 * self.tiles_v + 8

    @property
    def query_offset(self) -> int:
        return ceil_div(max(self.teams * self.ring_bytes, self.warps * 16 * (4 * self.sum_pitch + 8)), 16) * 16

    @property
    def barrier_offset(self) -> int:
        """[team][stage]: the stage's bytes are there."""
        return self.query_offset + (self.team * self.steps_qk * 512 if self.parks_q else 0)

    @property
    def smem_bytes(self) -> int:
        return self.barrier_offset + (8 * self.teams * self.stages if self.boxes else 0)

    @property
    def steps_qk(self) -> int:
        """Products of 16 dimensions."""
        return ceil_div(self.dim_qk, 16) if self.is_narrow else self.padded_dim("k") // 16

    @property
    def pieces_qk(self) -> int:
        """ldmatrix of four matrices along the dimension of keys."""
        return self.padded_pieces("k") // 2

    @property
    def pieces_v(self) -> int:
        return self.padded_pieces("v") // 2

    @property
    def tiles_v(self) -> int:
        """n8 tiles of the result."""
        return 2 * ceil_div(self.dim_v, 16)

    @property
    def frag_words(self) -> int:
        return 8 if self.is_narrow else 4

    @property
    def lane_dims(self) -> int:
        """Neighbouring dimensions of q from one lane of a quad to the next, and from one half of a product's slots to the other."""
        return 4 if self.is_narrow else 2

    @property
    def half_dims(self) -> int:
        return 2 if self.is_narrow else 8

    @property
    def quads(self) -> int:
        return self.dim_v // self.vec

    @property
    def is_by_head(self) -> bool:
        """Scores change along heads by more than their products."""
        return "h" in self.score.uses or any("h" in t.varies for t in self.score.tensors)


@dataclass(frozen=True, slots=True)
class CombineConsts:
    """rows: of a tile. unroll: splits whose parts are loaded at once. The rest as DecodeConsts have it."""

    score: ScoreConsts
    kind: str
    rows: int
    quads: int
    vec: int
    unroll: int
    out_packed: bool
    has_lse: bool
    v_scale: str


def _bytes(desc: TensorDesc) -> tuple[int, ...]:
    return tuple(s * desc.dtype.num_bytes for s in desc.strides)


def _team(rows: int) -> int:
    return min(MAX_ROWS // 16, power_of_two(ceil_div(max(1, rows), 16)))


def _in_pieces(desc: TensorDesc) -> bool:
    """Rows begin at multiples of 16 bytes, and hold a multiple of 16."""
    size = desc.dtype.num_bytes
    return (desc.align >= 16 and desc.strides[-1] == 1 and desc.shape[-1] * size % 16 == 0
            and all(s * size % 16 == 0 for n, s in zip(desc.shape[:-1], desc.strides[:-1], strict=True) if n > 1))


def _packs(desc: TensorDesc, count: int) -> bool:
    """`count` neighbours of the last dimension can be moved at once."""
    size = desc.dtype.num_bytes
    return (desc.strides[-1] == 1 and desc.shape[-1] % count == 0 and desc.align >= min(16, count * size)
            and all(s % count == 0 for n, s in zip(desc.shape[:-1], desc.strides[:-1], strict=True) if n > 1))


def _divisor(name: str, value: int) -> list[Arg]:
    multiplier, shift = magic(max(1, value))
    return [Arg(f"{name}_mul", "u32", multiplier), Arg(f"{name}_shr", "u32", shift)]


def _named(prefix: str, names: Sequence[str], strides: Sequence[int]) -> list[Arg]:
    return [Arg(f"{prefix}_{name}_bytes", "s64", stride) for name, stride in zip(names, strides, strict=True)]


def _consts(p: AttentionProblem, config: EngineConfig, device: DeviceInfo, boxes: bool) -> DecodeConsts:
    q, k, v, out = (p.heads_of(n) for n in ("q", "k", "v", "out"))
    rows = p.len_q * (p.heads // p.heads_kv)
    vec = next(n for n in (4, 2, 1) if p.dim_v % n == 0)
    is_large = p.batch * p.heads_kv * p.len_kv * (p.dim_qk * k.dtype.num_bytes + p.dim_v * v.dtype.num_bytes) > 4 * device.l2_bytes
    hints = not is_large if boxes else is_large and rows <= MAX_ROWS
    score, page, scales, tile_queries = score_consts(p), 0, ("", ""), 0
    if isinstance(p, PagedAttentionProblem):
        score = replace(score, is_varlen=False, lengths=("kv", *(("q",) if p.has("lengths_q") else ())))
        page, scales = p.page_size, (_scale_of(p, "k_scale"), _scale_of(p, "v_scale"))
        tile_queries = 16 * config["team"] // (p.heads // p.heads_kv) if p.is_varlen else 0
    return DecodeConsts(
        score, q.dtype.name, k.dtype.name, p.dim_qk, p.dim_v, config["keys"], config["team"], config["warps"], config["stages"],
        config["splits"] > 1, _packs(q, 2), tuple(n for n, d in (("k", k), ("v", v)) if _in_pieces(d)), page, *scales, tile_queries, vec,
        _packs(out, vec), p.has("lse"), hints, max(p.dim_qk, p.dim_v) > (192 if device.at_least(9) else 96), len(arguments(p)), boxes)


def _scale_of(p: PagedAttentionProblem, name: str) -> str:
    if not p.has(name):
        return ""
    page, _, key = p.scale_strides(name)
    return "key" if page or key else "head"


@lru_cache(maxsize=256)
def _parts(p: AttentionProblem, device: DeviceInfo) -> tuple[tuple[AttentionProblem, dict[str, Place]], ...]:
    """The problem by columns of values, and where each part's operands lie. Before sm_90 there are no registers for the sums of them all:
    the assembler takes more for the same text."""
    values, is_narrow = "v_cache" if isinstance(p, PagedAttentionProblem) else "v", p.heads_of("v").dtype is not p.desc("q").dtype
    columns = 64 if is_narrow and max(p.dim_qk, p.dim_v) > 128 else 128
    if device.at_least(9) or max(p.dim_qk, p.dim_v) <= (128 if is_narrow else 160):
        columns = p.dim_v
    found = []
    for first in range(0, p.dim_v, columns):
        operands = []
        places: dict[str, Place] = {}
        for o in p.operands:
            desc, offset = o.desc, 0
            if o.name in (values, "out"):
                desc, offset = piece(desc, desc.rank - 1, first, min(columns, p.dim_v - first))
            if o.name != "lse" or not first:
                operands.append(replace(o, desc=desc))
                places[o.name] = TensorArg(o.name, offset)
        found.append((replace(p, operands=tuple(operands)), places))
    return tuple(found)


def _sequences(p: AttentionProblem) -> int:
    """That have tiles of their own."""
    return 1 if p.is_varlen else p.batch


def _tiles(p: AttentionProblem, team: int) -> int:
    """Of rows, for a head of keys; of sequences side by side all there may be, with those of no sequence."""
    group = p.heads // max(1, p.heads_kv)
    if p.is_varlen:
        return ceil_div(p.len_q, max(1, 16 * team // group)) + p.batch + 2
    return ceil_div(max(1, p.len_q * group), 16 * team)


def _fits(p: AttentionProblem, config: EngineConfig, device: DeviceInfo, per_sm: int, boxes: bool) -> bool:
    c = _consts(p, config, device, boxes)
    return c.smem_bytes <= min(device.smem_per_cta, device.smem_per_sm // per_sm - 1024)


@lru_cache(maxsize=512)
def _configs(p: AttentionProblem, device: DeviceInfo, boxes: bool) -> tuple[EngineConfig, ...]:
    group = p.heads // p.heads_kv
    team = max(_team(ceil_div(p.len_q, p.batch) * group), _team(group)) if p.is_varlen else _team(p.len_q * group)
    units = _sequences(p) * p.heads_kv * _tiles(p, team)
    found: list[EngineConfig] = []
    for keys, warps, per_sm in ((32, 4, 1), (16, 4, 2), (16, 8, 1), (32, 4, 2), (16, 4, 1), (16, 2, 1)):
        if (warps == 2 or per_sm == 1 and (keys, warps) == (16, 4)) and found:  # these for want of shared memory alone
            continue
        if warps < team or keys > 16 and max(p.dim_qk, p.dim_v) > (128 if device.at_least(9) and p.op == "attention" else 96):  # registers
            continue
        shape = {"keys": keys, "team": team, "warps": warps}
        is_short = device.is_emulated and _fits(p, EngineConfig.of(**shape, stages=3, splits=1), device, 1, boxes)
        depths = (3,) if is_short else (6, 5, 4, 3, 2)
        stages = next((s for s in depths if _fits(p, EngineConfig.of(**shape, stages=s, splits=1), device, per_sm, boxes)), 0)
        if not stages or boxes and isinstance(p, PagedAttentionProblem) and p.page_size % keys:
            continue
        rounds = ceil_div(max(1, p.len_kv), keys * (warps // team))
        slots = device.num_sms * per_sm
        wanted = {1} | {max(1, slots * k // units) for k in (1, 2, 4)} | {max(1, device.num_sms // units), ceil_div(rounds, 4)}
        if device.is_emulated:
            wanted = {1, 3} if rounds > 1 else {1, 2}
        if isinstance(p, PagedAttentionProblem) and (p.num_splits or p.is_varlen):
            wanted = {1 if p.is_varlen else p.num_splits}
            found.append(EngineConfig.of(**shape, stages=stages, splits=max(wanted)))
            continue
        for splits in sorted(w for w in wanted if w == 1 or device.is_emulated or w <= min(MAX_SPLITS, ceil_div(rounds, 2))):
            found.append(EngineConfig.of(**shape, stages=stages, splits=splits))
    return tuple(sorted(dict.fromkeys(found), key=lambda config: _estimate(p, config, device, boxes)))


def _estimate(p: AttentionProblem, config: EngineConfig, device: DeviceInfo, boxes: bool) -> float:
    units = _sequences(p) * p.heads_kv * _tiles(p, config["team"])
    ctas = units * config["splits"]
    rounds = ceil_div(ceil_div(max(1, p.len_kv), config["keys"]), config["splits"] * (config["warps"] // config["team"]))
    if device.is_emulated:
        return ctas * config["warps"] * (300 + 400 * rounds) * 1e-2
    key_bytes = p.dim_qk * p.heads_of("k").dtype.num_bytes + p.dim_v * p.heads_of("v").dtype.num_bytes
    each = rounds * config["keys"] * (config["warps"] // config["team"]) * key_bytes
    c = _consts(p, config, device, boxes)
    per_sm = max(1, min(device.smem_per_sm // (c.smem_bytes + 1024), 2048 // (32 * c.warps)))
    # An SM takes in 1.7 times its share of the memory's bandwidth; CTAs beyond those that find room begin when others have ended.
    share = device.bandwidth_gbs * 1e3 / device.num_sms
    busiest = ceil_div(ctas, device.num_sms) * each / (1.7 * share)
    waves = ceil_div(ctas, per_sm * device.num_sms)
    mean = units * p.len_kv * key_bytes / (device.bandwidth_gbs * 1e3)
    parts = 0.0
    if config["splits"] > 1:
        parts = 2.0 + 0.03 * config["splits"] + 8 * ctas * c.team * 16 * (p.dim_v + 2) / (device.bandwidth_gbs * 1e3)
    # A step of 16 keys takes a warp so long, whatever the memory does; longer where bytes are widened.
    chain = waves * rounds * (0.72 if c.is_narrow else 0.5) * (config["keys"] / 16) ** 0.9
    fixed = 6.0 + 0.5 * waves + 0.1 * config["warps"] + 0.01 * config["keys"]
    if not boxes:
        return fixed + max(busiest, mean, chain) + parts
    if not c.is_narrow:  # eight warps of small steps are the best arrangement where one CTA fills an SM
        fixed += 1.0 - 0.15 * config["warps"]
    return 0.93 * (fixed + max(busiest, mean, chain) + parts) - 1.0


class DecodeAttention(Engine):
    """One launch, or two where the keys of a tile are dealt out to several CTAs; as many for each part of the columns of wide values."""

    id = "attention.decode"
    boxes: ClassVar[bool] = False

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, AttentionProblem)
        rows = problem.len_q * (problem.heads // max(1, problem.heads_kv))
        if problem.op == "attention" and problem.is_varlen:
            return refuse("no sequences side by side")
        if problem.op == "attention" and rows > MAX_ROWS:
            return refuse(f"at most {MAX_ROWS} rows of queries and heads of a group, not {rows}")
        return _support(problem, device)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, AttentionProblem)
        if problem.is_empty:
            return (EngineConfig.of(keys=16, team=1, warps=4, stages=2, splits=1),)
        return _configs(_parts(problem, device)[0][0], device, self.boxes)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, AttentionProblem)
        return 1.0 if problem.is_empty else sum(_estimate(part, config, device, self.boxes) for part, _ in _parts(problem, device))

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, AttentionProblem)
        if problem.is_empty:
            return Build(())
        builds = [(_build(part, config, device, self.boxes), places) for part, places in _parts(problem, device)]
        return Build(tuple(relocated(s, places) for b, places in builds for s in b.steps), max(b.workspace_bytes for b, _ in builds))


class DecodeAttentionBoxes(DecodeAttention):
    """The same by tensor copies."""

    id = "attention.decode_sm90"
    boxes = True

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, AttentionProblem)
        if not device.at_least(9):
            return refuse(f"needs compute capability 9.0, the device has {device.capability[0]}.{device.capability[1]}")
        if not (support := super().check_support(problem, device)):
            return support
        for name in ("k", "v"):
            desc = problem.heads_of(name)
            if fault := f"is empty: {desc}" if not desc.numel else map_fault(desc):
                return refuse(f"{name} {fault}")
        if isinstance(problem, PagedAttentionProblem):
            if problem.page_size % 16:
                return refuse(f"pages of a multiple of 16 keys, not {problem.page_size}")
            if "key" in (_scale_of(problem, "k_scale"), _scale_of(problem, "v_scale")):
                return refuse("no scales that change from key to key")
        return SUPPORTED


def _support(p: AttentionProblem, device: DeviceInfo) -> Support:
    q, k, v = (p.heads_of(n) for n in ("q", "k", "v"))
    if not device.at_least(8):
        return refuse(f"needs compute capability 8.0, the device has {device.capability[0]}.{device.capability[1]}")
    if p.has("block_mask"):
        return refuse("a block_mask, whose tiles are not passed over here")
    if q.dtype not in (F16, BF16):
        return refuse(f"multiplies f16 or bf16, not {q.dtype}")
    if max(p.dim_qk, p.dim_v) > MAX_DIM:
        return refuse(f"dimensions of at most {MAX_DIM}, not {max(p.dim_qk, p.dim_v)}")
    group = p.heads // max(1, p.heads_kv)
    if p.is_varlen and group > MAX_ROWS:
        return refuse(f"groups of at most {MAX_ROWS} heads, not {group}")
    if p.dropout:
        return refuse("no dropout")
    if p.len_kv >= 2**29:
        return refuse(f"at most {2**29} keys, not {p.len_kv}")
    if any(abs(s) >= _LIMIT for d in (k, v) for s in _bytes(d)[0 if isinstance(p, PagedAttentionProblem) else 2:]):
        return refuse("keys lie 2^31 bytes and more apart")
    if _sequences(p) * max(1, p.heads_kv) * _tiles(p, 1) * MAX_SPLITS * MAX_ROWS >= _LIMIT:
        return refuse(f"{p.batch} x {p.heads_kv} sequences are too many")
    return SUPPORTED


def _build(p: AttentionProblem, config: EngineConfig, device: DeviceInfo, boxes: bool) -> Build:
    c, scratch = _consts(p, config, device, boxes), Scratch()
    rows, group = 16 * c.team, p.heads // p.heads_kv
    num_rows, splits = p.len_q * group, config["splits"]
    row_tiles = _tiles(p, c.team)
    units = _sequences(p) * p.heads_kv * row_tiles

    def lying(name: str) -> tuple[int, ...]:  # sequences side by side have one place along the batch
        strides = _bytes(p.heads_of(name))
        return (0, *strides[1:]) if p.is_varlen else strides

    outputs = [Arg("ptr_out", "u64", TensorArg("out")), *_named("out", ("batch", "head", "row", "dim"), lying("out"))]
    if c.has_lse:
        outputs += [Arg("ptr_lse", "u64", TensorArg("lse")), *_named("lse", ("batch", "head", "row"), lying("lse"))]
    args = arguments(p)
    args += [Arg("ptr_q", "u64", TensorArg("q")), *_named("q", ("batch", "head", "row", "dim"), lying("q"))]
    for name in ("k", "v"):
        operand = f"{name}_cache" if c.page else name
        if boxes:
            args.append(Arg(f"map_{name}", "tensor_map", TensorMapArg(operand, _map(p.heads_of(name), c.keys, c.is_whole(name)))))
            continue
        first, head, key, dim = _bytes(p.heads_of(name))
        args += [Arg(f"ptr_{name}", "u64", TensorArg(operand)),
                 Arg(f"{name}_page_bytes", "s32", first) if c.page else Arg(f"{name}_batch_bytes", "s64", first),
                 Arg(f"{name}_head_bytes", "s64", head), Arg(f"{name}_key_bytes", "s32", key), Arg(f"{name}_dim_bytes", "s32", dim)]
    scales = _paged_arguments(p, c, args) if isinstance(p, PagedAttentionProblem) else []
    counts = {"splits": splits, "row_tiles": row_tiles, "heads_kv": p.heads_kv}
    grid = [a for name, n in counts.items() for a in (Arg(name, "u32", n), *_divisor(name, n))] + _divisor("group", group)
    args += [*grid, Arg("num_rows", "u32", num_rows), Arg("sharers", "u32", splits * c.teams), *_divisor("sharers", splits * c.teams)]
    version = (8, 0) if boxes else (7, 8) if c.is_split and device.at_least(9) else (7, 4)
    if c.is_narrow and device.at_least(8, 9):
        version = max(version, (8, 1))  # conversions of 8-bit floats
    target = Target.for_arch(device.arch, version)
    suffix = f"{c.kind}_{c.kind_kv}_{c.dim_qk}x{c.dim_v}"
    parts: list[Arg] = []
    if c.is_split:
        count = units * splits * rows
        parts = [Arg("ptr_parts", "u64", scratch.take(count * p.dim_v * 4)), Arg("ptr_pairs", "u64", scratch.take(count * 8))]
    main = Step.of("attention/decode", p.op, target, 32 * c.warps, args + (parts or outputs), c, units * splits, dynamic_smem=c.smem_bytes,
                   suffix=suffix)
    if not c.is_split:
        return Build((main,))
    items = p.batch * p.heads * p.len_q * c.quads
    combine = CombineConsts(c.score, c.kind, rows, c.quads, c.vec, min(16, power_of_two(splits)), c.out_packed, c.has_lse, c.v_scale)
    more = [*parts, *outputs, *grid, Arg("group", "u32", group), Arg("heads", "u32", p.heads), *_divisor("heads", p.heads),
            Arg("queries", "u32", p.len_q), *_divisor("queries", p.len_q), Arg("num_items", "u32", items)]
    more += scales
    more += [a for a in arguments(p) if a.name in ("ptr_sinks", "step_sinks")]
    add = Step.of("attention/decode_combine", p.op, target, COMBINE_THREADS, more, combine, ceil_div(items, COMBINE_THREADS),
                  follows=device.at_least(9), suffix=suffix)
    return Build((main, add), scratch.num_bytes)


def _map(desc: TensorDesc, keys: int, is_whole: bool) -> TensorMapSpec:
    """(column, key, panel, head, batch or page) in boxes of all panels of `keys` keys, or (column, key, head, batch or page) in those of
    one panel."""
    size = desc.dtype.num_bytes
    columns = ROW_BYTES // size
    # A dimension of one element is never stepped over: any legal stride will do.
    batch, head, key = (s * size if n > 1 else ROW_BYTES for n, s in zip(desc.shape[:-1], desc.strides[:-1], strict=True))
    dims, strides, box = (desc.shape[2], desc.shape[1], desc.shape[0]), (key, head, batch), (columns, keys, 1, 1)
    kind = desc.dtype.name if size == 2 else "u8"
    if not is_whole:
        return TensorMapSpec(kind, (desc.shape[3], *dims), strides, box, swizzle=ROW_BYTES)
    panels = desc.shape[3] // columns
    return TensorMapSpec(kind, (columns, dims[0], panels, *dims[1:]), (strides[0], ROW_BYTES, *strides[1:]), (columns, keys, panels, 1, 1),
                         swizzle=ROW_BYTES)


def _paged_arguments(p: PagedAttentionProblem, c: DecodeConsts, args: list[Arg]) -> list[Arg]:
    """Adds those of pages and scales; returns what rows are finished with."""
    batch, step = _bytes(p.desc("page_table"))
    args += [Arg("ptr_page_table", "u64", TensorArg("page_table")), Arg("table_batch_bytes", "s64", batch),
             Arg("table_step_bytes", "s32", step), Arg("last_page", "s32", p.desc("k_cache").shape[0] - 1)]
    scale: dict[str, list[Arg]] = {"k": [], "v": []}
    for name, found in scale.items():
        if c.scale_of(name):
            page, head, key = (4 * s for s in p.scale_strides(f"{name}_scale"))
            found += [Arg(f"ptr_{name}_scale", "u64", TensorArg(f"{name}_scale")), Arg(f"{name}_scale_head_bytes", "s64", head)]
            args += [*found, Arg(f"{name}_scale_page_bytes", "s32", page), Arg(f"{name}_scale_key_bytes", "s32", key)]
    return scale["v"] if c.v_scale == "head" else []


ENGINES: dict[str, tuple[Engine, ...]] = {op: (DecodeAttention(), DecodeAttentionBoxes()) for op in ("attention", "paged_attention")}
