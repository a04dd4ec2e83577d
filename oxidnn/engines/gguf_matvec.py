"""Products of GGUF matrices with a few rows of x on mma.sync: codes as exact f16, scales applied to f32 sums; blocks stream through shared
memory once. Where the part of x does not fit there, or rows of W are few, CTAs share k in panels whose sums a second launch adds in order.
More rows of x than fragments have columns for are multiplied in launches one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd, log2

from ..codegen.spec import Target, TensorMapSpec
from ..device import DeviceInfo
from ..dtypes import F16, F32
from ..ops.base import Problem
from ..ops.gguf import GgufMatvecProblem
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, TensorMapArg, WorkspaceArg, refuse
from .composition import moved, piece
from .digits import ceil_div
from .gguf_formats import FORMAT_CONSTS, FormatConsts, half_pair, phase_of

TILE = 16  # rows of W
MAX_PANELS = 16
_LIMIT = 2**31
_COMBINE_THREADS = 128
# of a lane, a weight, with one row of x in chunks of 512, as the disassembly counts them: all, or, if these are more, twice those of the
# ALU's pipe, half as wide; of codebooks what timings come to, whose entries meet in banks
_INSTRUCTIONS = {"Q4_0": 1.8, "Q4_1": 1.5, "Q5_0": 3.3, "Q5_1": 3.2, "Q8_0": 2.2, "Q2_K": 1.8, "Q3_K": 2.8, "Q4_K": 1.9,
                 "Q5_K": 2.7, "Q6_K": 2.8, "Q8_K": 1.8, "IQ1_S": 3.4, "IQ1_M": 4.1, "IQ2_XXS": 3.3, "IQ2_XS": 3.9, "IQ2_S": 4.6,
                 "IQ3_XXS": 3.3, "IQ3_S": 4.5, "IQ4_NL": 2.2, "IQ4_XS": 2.2, "TQ1_0": 2.5, "TQ2_0": 1.5, "MXFP4": 2.4, "NVFP4": 2.7}
_SHAPES = ((4, 1, 2), (4, 2, 1), (8, 1, 1), (4, 4, 1), (8, 1, 2), (4, 2, 2), (8, 2, 1),
           (4, 1, 1))  # warps of a team, teams, CTAs of an SM
_RINGS = ((1, 2), (2, 2), (4, 2), (1, 4), (2, 3))  # chunks of 256 elements, stages


@dataclass(frozen=True, slots=True)
class MatvecConsts:
    """warps: of a team, which shares tiles. rows: of x that a CTA multiplies. parts: f16 numbers of one of x. run: blocks that code is
    written for, loops of them make a chunk. by_map: chunks come as boxes of a tensor map. phase: what the addresses of chunks are multiples
    of (4, 2, 1). pieces: of 16 bytes that a row's chunk may touch; has_skew: it may begin within one. slot_areas: every expert of a row has
    an x of its own. scales_x: rows of x are multiplied by powers of two. moves_x: four numbers of x lie together, aligned. begins_within:
    the first block may lie within 16 bytes that begin before it. quads: fours of elements of x that a thread loads before it uses any;
    holds_x: these are all it takes."""

    format: FormatConsts
    rows: int
    parts: int
    warps: int
    teams: int
    stages: int
    run: int
    loops: int
    by_map: bool
    phase: int
    has_skew: bool
    pieces: int
    x_dtype: str
    y_dtype: str
    id_dtype: str
    weight_dtype: str
    slot_areas: bool
    areas: int
    scales_x: bool
    moves_x: bool
    begins_within: bool
    quads: int
    holds_x: bool

    @property
    def area_sets(self) -> int:
        """Sets of warps that take rows of x in turn."""
        return _area_sets(self.areas, self.warps, self.teams)

    @property
    def multiplies(self) -> bool:
        return True

    @property
    def elements(self) -> tuple[int, ...]:
        """Of a lane's fragment of sums, those that count: of a single column the first of either row."""
        return (0, 2) if self.columns == 1 else (0, 1, 2, 3)

    @property
    def columns(self) -> int:
        return self.rows * self.parts

    @property
    def spreads(self) -> bool:
        """The columns of one row of x are eight groups of 32 of k, side by side."""
        return self.columns == 1 and self.format.chain <= 2

    @property
    def quad_words(self) -> int:
        """Of four elements of x in memory."""
        return 4 if self.x_dtype == "f32" else 2

    @property
    def tiles(self) -> int:
        """n8 tiles of columns."""
        return ceil_div(self.columns, 8)

    @property
    def folded(self) -> int:
        """The part of the sums' unit, as a power of two, that the reciprocals for rows of x hold: 2^14 keeps them numbers of f32."""
        return min(14, int(log2(self.format.unit))) if self.scales_x else 0

    @property
    def unit(self) -> float:
        """The rest."""
        return self.format.unit / 2**self.folded

    @property
    def chunk_bytes(self) -> int:
        return self.loops * self.run * self.format.num_bytes

    @property
    def chunk_size(self) -> int:
        return self.loops * self.run * self.format.size

    @property
    def follows_rows(self) -> bool:
        """Where a lane's rows begin within 16 bytes is its own."""
        return self.has_skew and not self.by_map

    @property
    def barrier_bytes(self) -> int:
        return ceil_div(8 * self.warps * self.teams * self.stages, 16) * 16 if self.by_map else 0

    @property
    def row_pitch(self) -> int:
        """An odd number of pieces: eight rows' words lie in different banks."""
        return 16 * (self.pieces | 1)

    @property
    def stage_bytes(self) -> int:
        return TILE * self.row_pitch

    @property
    def units(self) -> int:
        """Eights of groups that share minima, of a run."""
        return self.run * self.format.size // (128 * self.format.group)

    @property
    def block_units(self) -> int:
        return self.format.steps // (8 * self.format.group)

    @property
    def scale_bytes(self) -> int:
        return ceil_div(8 * self.areas, 16) * 16

    def pair(self, value: float) -> str:
        return half_pair(value)

    def sums(self, tile: int) -> list[str]:
        return [f"%sum{4 * tile + e}" for e in range(4)]

    def numbers(self, tile: int) -> list[str]:
        """Of x, two steps'."""
        return [f"%x_of{4 * tile + e}" for e in range(4)]

    def held(self, quad: int) -> list[str]:
        return [f"%held{self.quad_words * quad + e}" for e in range(self.quad_words)]

    def accumulators(self, tile: int) -> list[str]:
        return [f"%acc{4 * tile + e}" for e in range(4)]


@dataclass(frozen=True, slots=True)
class CombineConsts:
    dtype: str


@dataclass(frozen=True, slots=True)
class _Layout:
    """Bytes of shared memory from one column of x (of sums) to the next, and where the areas of the CTA begin."""

    x_pitch: int
    sums_pitch: int
    sums_begin: int
    partials_begin: int
    ring_begin: int
    num_bytes: int


def _layout(c: MatvecConsts, panel_chunks: int) -> _Layout:
    columns = c.areas * c.parts
    x_pitch = 2 * panel_chunks * c.chunk_size + 64  # 16 bytes a lane: two columns' four in different banks
    sums_pitch = ceil_div(panel_chunks * c.loops * c.units * 32, 128) * 128 + 32 if c.format.has_sums else 0
    sums = c.format.table_bytes + c.scale_bytes + c.barrier_bytes + columns * x_pitch
    partials = sums + columns * sums_pitch
    ring = ceil_div(partials + 2 * c.teams * c.warps * c.columns * 64, 128) * 128
    return _Layout(x_pitch, sums_pitch, sums, partials, ring, ring + c.teams * c.warps * c.stages * c.stage_bytes)


def _consts(p: GgufMatvecProblem, config: EngineConfig) -> MatvecConsts:
    f, blocks, x = FORMAT_CONSTS[p.format], p.desc("blocks"), p.desc("x")
    chunk, by_map = config["chunk"], config["loads"] == "map"
    # one run's code takes a chunk in turns; runs begin at whole words
    run = f.run * (2 if chunk > 1 and f.run * f.num_bytes % 4 else 1)
    loops = f.run * chunk // run
    chunk_bytes = loops * run * f.num_bytes
    steps = [s for s, n in zip(blocks.strides[:-1], blocks.shape[:-1], strict=True) if n > 1]
    together = gcd(16, blocks.align, chunk_bytes, *steps)
    phase = phase_of(f, blocks, chunk_bytes)
    slot_areas = p.num_ids > 0 and x.rank == 3
    is_indexed = p.has("ids")
    size = x.dtype.num_bytes
    moves_x = (x.strides[-1] == 1 and x.align % (4 * size) == 0
               and all(s % 4 == 0 for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1))
    rows = 1 if is_indexed else p.rows
    areas = p.num_ids if slot_areas else rows
    sets = _area_sets(areas, config["warps"], config["teams"])
    chunk_size = loops * run * f.size
    quads = ceil_div(_panel_chunks(p, chunk_size, config) * chunk_size // 4 * sets, 32 * config["warps"] * config["teams"])
    # registers hold more of few warps, and of short numbers
    most = 8 if x.dtype is F32 and config["warps"] * config["teams"] * config["ctas"] > 8 else 16
    return MatvecConsts(f, rows, 3 if x.dtype is F32 else 1, config["warps"], config["teams"], config["stages"], run, loops, by_map, phase,
                        together < 16, ceil_div(chunk_bytes + 16 - together + 4 * (phase == 1), 16), x.dtype.name,
                        "f32" if config["panels"] > 1 else p.desc("y").dtype.name, p.desc("ids").dtype.name if is_indexed else "",
                        p.desc("weights").dtype.name if p.has("weights") else "", slot_areas, areas,
                        x.dtype is not F16 or f.has_sums, moves_x, blocks.align < 16, max(1, min(quads, most)),
                        quads <= most and areas <= sets)


def _area_sets(areas: int, warps: int, teams: int) -> int:
    """A power of two."""
    return min(1 << (areas.bit_length() - 1), warps * (teams & -teams))


def _panel_chunks(p: GgufMatvecProblem, chunk_size: int, config: EngineConfig) -> int:
    return max(ceil_div(ceil_div(p.k, chunk_size), config["panels"]), 1)


def _map_fault(p: GgufMatvecProblem, device: DeviceInfo) -> str:
    """Why blocks cannot come by a tensor map; empty if they can."""
    blocks = p.desc("blocks")
    if not device.at_least(9):
        return "tensor maps need compute capability 9.0"
    steps = [s for s, n in zip(blocks.strides[:-1], blocks.shape[:-1], strict=True) if n > 1]
    if blocks.align % 16 or blocks.shape[-1] % 16 or any(s % 16 or not 0 < s < 2**40 for s in steps):
        return "rows of blocks must begin at multiples of 16 bytes"
    return "" if blocks.shape[-1] else "rows are empty"


def _map(p: GgufMatvecProblem, c: MatvecConsts) -> TensorMapSpec:
    """Boxes of 16 rows and a chunk, in words."""
    blocks = p.desc("blocks")
    extents = tuple(reversed(blocks.shape[:-1]))
    step = blocks.shape[-1]
    strides = []
    for stride, extent in zip(reversed(blocks.strides[:-1]), extents, strict=True):
        step = stride if extent > 1 else step
        strides.append(step)
        step *= extent
    return TensorMapSpec("u32", (blocks.shape[-1] // 4, *extents), tuple(strides),
                         (c.row_pitch // 4, TILE, *(1 for _ in extents[1:])))


@dataclass(frozen=True, slots=True)
class _Plan:
    consts: MatvecConsts
    layout: _Layout
    num_chunks: int
    panels: int
    panel_chunks: int
    tile_ctas: int
    per_sm: int

    @property
    def rounds(self) -> int:
        return ceil_div(self.panel_chunks, self.consts.warps)


@lru_cache(maxsize=1024)
def _plan(p: GgufMatvecProblem, config: EngineConfig, device: DeviceInfo) -> _Plan:
    c = _consts(p, config)
    num_chunks = ceil_div(p.k, c.chunk_size)
    panel_chunks = _panel_chunks(p, c.chunk_size, config)
    panels = max(ceil_div(num_chunks, panel_chunks), 1)
    per_sm = config["ctas"]
    places = per_sm * device.num_sms // (panels * (p.rows if p.has("ids") else 1))
    return _Plan(c, _layout(c, panel_chunks), num_chunks, panels, panel_chunks, max(1, min(ceil_div(p.n, TILE * c.teams), places)), per_sm)


def _fits(p: GgufMatvecProblem, config: EngineConfig, device: DeviceInfo) -> bool:
    return _plan(p, config, device).layout.num_bytes <= min(device.smem_per_cta, device.smem_per_sm // config["ctas"] - 1024)


@lru_cache(maxsize=256)
def _launches(p: GgufMatvecProblem) -> tuple[tuple[GgufMatvecProblem, int, int], ...]:
    """The rows of x that a launch takes as problems of their own, and where their x and y begin, in bytes."""
    most = 8 if p.desc("x").dtype is F32 else 16
    if p.has("ids") or p.rows <= most:
        return ((p, 0, 0),)
    size = ceil_div(p.rows, ceil_div(p.rows, most))
    found = []
    for first in range(0, p.rows, size):
        (x, x_at), (y, y_at) = (piece(p.desc(name), 0, first, min(size, p.rows - first)) for name in ("x", "y"))
        operands = tuple(replace(o, desc={"x": x, "y": y}.get(o.name, o.desc)) for o in p.operands)
        found.append((replace(p, operands=operands), x_at, y_at))
    return tuple(found)


@lru_cache(maxsize=256)
def _configs(p: GgufMatvecProblem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return tuple(sorted(_candidates(p, device), key=lambda c: _estimate(p, c, device)))


def _candidates(p: GgufMatvecProblem, device: DeviceInfo) -> Iterator[EngineConfig]:
    loads = "copies" if _map_fault(p, device) else "map"
    few = 2 * ceil_div(p.n, TILE) * (p.rows if p.has("ids") else 1) <= device.num_sms  # tiles that leave SMs without work
    for (warps, teams, ctas), (chunk, stages) in product(_SHAPES[:3] if device.is_emulated else _SHAPES, _RINGS):
        def config(panels: int, *shape: int) -> EngineConfig:
            warps, teams, ctas, stages, chunk = shape
            return EngineConfig.of(loads=loads, warps=warps, teams=teams, ctas=ctas, stages=stages, chunk=chunk, panels=panels)

        shape = (warps, teams, ctas, stages, chunk)
        if _consts(p, config(1, *shape)).row_pitch > 1024:  # 256 words, a box's most
            continue
        least = next((n for n in range(1, MAX_PANELS + 1) if _fits(p, config(n, *shape), device)), 0)
        if not least:
            continue
        even = 1 << (least - 1).bit_length()
        for panels in {least, even, *((min(2 * even, MAX_PANELS),) if least > 1 else ()), *((2, 4) if few or device.is_emulated else ())}:
            made = config(panels, *shape)
            if panels == least or panels > least and _plan(p, made, device).num_chunks >= 2 * panels * warps:
                yield made


def _estimate(p: GgufMatvecProblem, config: EngineConfig, device: DeviceInfo) -> float:
    """The blocks at the memory's speed and what an SM issues, of which the longer shows most; SMs without work, few bytes under way.

    Fitted to timings on an H200 (16384 x 16384, 8192 x 28672, 4096 x 4096 and others; one to 19 rows): 14 % from them on average."""
    plan = _plan(p, config, device)
    c = plan.consts
    warps = c.warps * c.teams * plan.per_sm
    work = ceil_div(p.n, TILE) * max(plan.num_chunks, 1) * (p.rows if p.has("ids") else 1)  # chunks of all tiles
    ctas = plan.tile_ctas * plan.panels * (p.rows if p.has("ids") else 1)
    turns = ceil_div(ceil_div(p.n, TILE), plan.tile_ctas * c.teams)
    uneven = ceil_div(ctas, device.num_sms) * c.teams * turns * plan.rounds * c.warps * device.num_sms / work
    under_way = warps * min(c.stages - 1, turns * plan.rounds) * c.stage_bytes
    memory_us = p.num_bytes / (device.bandwidth_gbs * 1.12e3) * uneven * max(1.0, 32e3 / max(under_way, 1)) ** 0.5 * (1 + 0.2 / c.warps)
    weights = p.n * p.k * max(p.num_ids, 1) * (p.rows if p.has("ids") else 1)
    instructions = _INSTRUCTIONS[p.format] + 128 / c.chunk_size - 0.25 + 0.5 * (c.phase < 4) + (not c.by_map)
    instructions += 0.4 * (c.columns > 1) + 0.3 * (c.tiles - 1)
    issue_us = weights * instructions / (32 * 4 * device.num_sms * 1.7e3 * _issued(warps)) * uneven
    busy_us = (memory_us**3 + issue_us**3) ** (1 / 3)
    numbers = c.areas * c.parts * plan.panel_chunks * c.chunk_size
    x_us = numbers * plan.per_sm / 40e3 + numbers / (32 * c.warps * c.teams) / 160 + 0.3 * c.format.has_sums
    chunks_us = 0.2 * turns + 0.3 * c.chunk_size / 256 + 0.1 * c.stages
    return (3.1 if device.at_least(9) else 4.1) + x_us + busy_us + chunks_us + (2.4 + 0.2 * plan.panels if plan.panels > 1 else 0.0)


def _issued(warps: int) -> float:
    """Of the instructions that an SM can issue, with so many warps."""
    return 0.6 if warps < 8 else 0.75 if warps < 16 else 0.83 if warps == 16 else 0.76


class GgufMatvec(Engine):
    id = "gguf.matvec_mma"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, GgufMatvecProblem)
        if not device.at_least(8):
            return refuse(f"mma.sync of 16 k needs compute capability 8.0, the device has {device.capability[0]}.{device.capability[1]}")
        blocks = problem.desc("blocks")
        if blocks.shape[-1] >= _LIMIT // 2 or problem.k >= _LIMIT:
            return refuse(f"rows of {blocks.shape[-1]} bytes (less than {_LIMIT // 2})")
        if problem.is_empty:
            return SUPPORTED
        if not _configs(_launches(problem)[0][0], device):
            return refuse(f"x of {problem.k} columns does not fit in shared memory in {MAX_PANELS} parts")
        ctas = problem.rows * MAX_PANELS * ceil_div(problem.n, TILE)
        return refuse(f"{ctas} tiles of rows and panels (at most {_LIMIT - 1})") if ctas >= _LIMIT else SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, GgufMatvecProblem)
        return (EngineConfig(),) if problem.is_empty else _configs(_launches(problem)[0][0], device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, GgufMatvecProblem)
        return 0.0 if problem.is_empty else sum(_estimate(part, config, device) for part, _, _ in _launches(problem))

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, GgufMatvecProblem)
        if p.is_empty:
            return Build(())
        steps: list[Step] = []
        builds = [(self._launch(part, config, device), x_at, y_at) for part, x_at, y_at in _launches(p)]
        for build, x_at, y_at in builds:
            steps += moved(build, WorkspaceArg(), blocks=TensorArg("blocks"), x=TensorArg("x", x_at), y=TensorArg("y", y_at),
                           **{name: TensorArg(name) for name in ("ids", "weights")})
        return Build(tuple(steps), max(build.workspace_bytes for build, _, _ in builds))

    def _launch(self, p: GgufMatvecProblem, config: EngineConfig, device: DeviceInfo) -> Build:
        plan, scratch = _plan(p, config, device), Scratch()
        c, y = plan.consts, p.desc("y")
        follows = bool(dict(config.knobs).get("overlaps", device.at_least(9)))
        target = Target.for_arch(device.arch, (8, 0) if c.by_map else (7, 8) if follows else (7, 4))
        size = y.dtype.num_bytes
        y_strides = (y.strides[-2] if y.rank == 2 else 0, y.strides[-1])
        out = [Arg("ptr_y", "u64", TensorArg("y")), Arg("y_row_step", "s64", y_strides[0] * size),
               Arg("y_step", "s64", y_strides[1] * size), Arg("y_panel_step", "s64", 0)]
        combine: tuple[Step, ...] = ()
        if plan.panels > 1:
            sums = scratch.take(4 * plan.panels * p.rows * p.n)
            args = [Arg("ptr_sums", "u64", sums), *out[:3], Arg("n", "u32", p.n), Arg("count", "u32", p.rows * p.n),
                    Arg("panels", "u32", plan.panels)]
            combine = (Step.of("gguf/combine", p.op, target, _COMBINE_THREADS, args, CombineConsts(y.dtype.name),
                               ceil_div(p.rows * p.n, _COMBINE_THREADS), follows=follows, suffix=y.dtype.name),)
            out = [Arg("ptr_y", "u64", sums), Arg("y_row_step", "s64", 4 * p.n), Arg("y_step", "s64", 4),
                   Arg("y_panel_step", "s64", 4 * p.rows * p.n)]
        grid = plan.tile_ctas * plan.panels * (p.rows if p.has("ids") else 1)
        # leave no room for a CTA more: those of the launch after would fill SMs that end first with two
        alone = device.smem_per_sm // (plan.per_sm + 1) - 1023 if follows else 0
        step = Step.of("gguf/matvec", p.op, target, 32 * c.warps * c.teams, [*_arguments(p, plan), *out], c, grid,
                       dynamic_smem=max(plan.layout.num_bytes, alone), min_ctas_per_sm=plan.per_sm, follows=follows,
                       suffix=f"{p.format.lower()}_{c.x_dtype}_{c.rows}_{config.name}")
        return Build((step, *combine), scratch.num_bytes)


def _arguments(p: GgufMatvecProblem, plan: _Plan) -> list[Arg]:
    blocks, x, layout = p.desc("blocks"), p.desc("x"), plan.layout
    x_size = x.dtype.num_bytes
    is_indexed = p.has("ids")
    x_row, x_area = (x.strides[0], x.strides[1] if x.rank == 3 else 0) if is_indexed else (0, x.strides[0] if x.rank == 2 else 0)
    if plan.consts.by_map:
        args = [Arg("map_blocks", "tensor_map", TensorMapArg("blocks", _map(p, plan.consts)))]
    else:
        args = [Arg("ptr_blocks", "u64", TensorArg("blocks")), Arg("row_step", "s64", blocks.strides[-2])]
        args += [Arg("expert_step", "s64", blocks.strides[0])] if is_indexed else []
    args += [Arg("row_bytes", "u32", blocks.shape[-1]), Arg("n", "u32", p.n), Arg("k", "u32", p.k),
            Arg("tiles", "u32", ceil_div(p.n, TILE)), Arg("tile_ctas", "u32", plan.tile_ctas), Arg("num_chunks", "u32", plan.num_chunks),
            Arg("panels", "u32", plan.panels), Arg("panel_chunks", "u32", plan.panel_chunks), Arg("ptr_x", "u64", TensorArg("x")),
            Arg("x_row_step", "s64", x_row * x_size), Arg("x_area_step", "s64", x_area * x_size),
            Arg("x_step", "s64", x.strides[-1] * x_size), Arg("areas", "u32", plan.consts.areas), Arg("x_pitch", "u32", layout.x_pitch),
            Arg("sums_pitch", "u32", layout.sums_pitch), Arg("sums_begin", "u32", layout.sums_begin),
            Arg("partials_begin", "u32", layout.partials_begin), Arg("ring_begin", "u32", layout.ring_begin)]
    if is_indexed:
        args += [Arg("num_experts", "u32", blocks.shape[0]), Arg("slots", "u32", p.num_ids)]
        for name, stem in (("ids", "id"), ("weights", "weight")):
            if p.has(name):
                desc = p.desc(name)
                steps = [s * desc.dtype.num_bytes for s in (desc.strides[0], desc.strides[1] if desc.rank == 2 else 0)]
                args += [Arg(f"ptr_{name}", "u64", TensorArg(name)), Arg(f"{stem}_row_step", "s64", steps[0]),
                         Arg(f"{stem}_slot_step", "s64", steps[1])]
    return args


ENGINES: dict[str, tuple[Engine, ...]] = {"gguf_matvec": (GgufMatvec(),)}
