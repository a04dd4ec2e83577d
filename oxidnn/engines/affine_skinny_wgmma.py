"""Products of a tall operand with up to 128 columns (decode) on wgmma: weights stream through a ring that fills shared memory; sm_90a.

The tall operand is the side of wgmma that takes 64 rows, whichever side of D it is; k is dealt out to the CTAs of a cluster where rows are
too few to fill the device, and added up through distributed shared memory: one launch, no workspace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..codegen.spec import Target as PtxTarget
from ..device import DeviceInfo
from . import affine_tiling as tiling
from .affine import AffineMatmul, IndexSpace, Source
from .affine_tma import SPAN_BYTES, Boxes, BoxesConsts, plan_boxes, walk_linear
from .affine_wgmma_sm90 import promotions
from .base import Arg, Build, EngineConfig, Step, Support, TensorArg, TensorMapArg, refuse

MAX_COLUMNS = 128
MAX_TABLE_BYTES = 48 * 1024  # of factors
MAX_STAGES = 24
AHEAD = 3  # stages of weights fetched before the launch before has ended: more delay what that one still waits for
BARRIER_BYTES = 8
GROUP_ROWS = 64  # of a warpgroup
FP8 = {"e4m3", "e5m2"}
INTEGERS = {"s8", "u8"}


class Staged(NamedTuple):
    """How sums lie in shared memory, rows of weights for "m": inner, the contiguous direction, and words from one line to the next."""

    inner: str
    pitch: int


@dataclass(frozen=True, slots=True)
class ScaleConsts:
    """A block scale: its factors of the tile's sums, in shared memory in lines of `width`, a line a stage, from byte `at` behind the
    barriers. step: rows of weights, or columns, from a factor to the next, 0 if there is one alone."""

    name: str
    row_digits: int
    width: int
    step: int
    at: int


@dataclass(frozen=True, slots=True)
class SkinnyWgmmaConsts:
    """Consts of matmul/skinny_wgmma_sm90. kind, kind_b: of weights and columns; side: "m" | "n", the side of D the weights make; tile_m:
    rows of weights, those of both sums of a gate; promotes: sums of a stage are added up outside the tensor cores; scale_rows,
    scale_columns: factors of these; table_bytes: of them all.

    splits: CTAs of a cluster that deal out k. epilogue: of a panel, 64 rows of a warpgroup, or of two that have the sums of a gate; share:
    the part of it that each CTA of the cluster writes. ahead: stages of weights that a launch has L2 fetch until the one before has ended.
    """

    kind: str
    kind_b: str
    side: str
    tile_m: int
    tile_n: int
    promotes: bool
    stages: int
    splits: int
    ahead: int
    batch_digits: int
    a: BoxesConsts
    b: BoxesConsts
    up: BoxesConsts | None
    scale_rows: ScaleConsts | None
    scale_columns: ScaleConsts | None
    table_bytes: int
    epilogue: tiling.EpilogueConsts
    share: tiling.EpilogueConsts

    @property
    def other(self) -> str:
        return "n" if self.side == "m" else "m"

    @property
    def warpgroups(self) -> int:
        return self.tile_m // GROUP_ROWS

    @property
    def sums(self) -> int:
        """Of an element of D: warpgroups that share a panel."""
        return 2 if self.up is not None else 1

    @property
    def tile_rows(self) -> int:
        """Of D."""
        return self.tile_m // self.sums

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + self.tile_n) * SPAN_BYTES

    @property
    def barriers_at(self) -> int:
        return max(self.stages * self.stage_bytes, self.warpgroups // self.sums * self.epilogue.smem_bytes)

    @property
    def smem_bytes(self) -> int:
        return self.table_at + self.table_bytes

    @property
    def tile_k(self) -> int:
        return SPAN_BYTES // {"f16": 2, "bf16": 2, "tf32": 4}.get(self.kind, 1)

    @property
    def product(self) -> str:
        return "b32" if self.kind in INTEGERS else "f32"

    @property
    def acc(self) -> list[str]:
        return [f"%acc{i}" for i in range(self.tile_n // 2)]

    @property
    def products(self) -> list[str]:
        return [f"%product{i}" for i in range(self.tile_n // 2)] if self.promotes else self.acc

    @property
    def scales(self) -> list[ScaleConsts]:
        return [s for s in (self.scale_rows, self.scale_columns) if s is not None]

    def factors(self, scale: ScaleConsts) -> int:
        """Of a thread: of its two rows, or of its columns."""
        return 1 if scale.step != 1 else 2 if scale is self.scale_rows else self.tile_n // 4

    @property
    def table_at(self) -> int:
        return self.barriers_at + 2 * BARRIER_BYTES * self.stages

    @property
    def transposes(self) -> str:
        return f"{int(self.a.major == 'row')}, 0" if self.kind in ("f16", "bf16") else ""

    @property
    def staged(self) -> Staged:
        return Staged("m" if self.epilogue.inner == self.side else "n", self.epilogue.pitch)

    @staticmethod
    def fixed_bits(x: BoxesConsts) -> str:
        """A descriptor but for its address: 128-byte swizzle, 1024 bytes between groups of 8 lines; of lines along rows one chunk."""
        return f"0x{1 << 62 | 1024 >> 4 << 32 | (1 if x.major == 'k' else x.chunk_bytes >> 4) << 16:016X}"

    @staticmethod
    def step_units(x: BoxesConsts) -> int:
        """Descriptor units (16 bytes) from one k step of 32 bytes to the next."""
        return 32 >> 4 if x.major == "k" else 16 * SPAN_BYTES >> 4


class Operands(NamedTuple):
    """digits: of the outputs; boxes of the weights, of the columns, and of the weights of a gate's other sum."""

    digits: tiling.Digits
    a: Boxes
    b: Boxes
    up: Boxes | None


def _scales(am: AffineMatmul) -> tuple[tuple[Source, IndexSpace] | None, tuple[Source, IndexSpace] | None]:
    """The block scales of the weights and of the columns, each with its rows."""
    a = (am.scale_a, am.m) if am.scale_a is not None else None
    b = (am.scale_b, am.n) if am.scale_b is not None else None
    return (b, a) if _side(am) == "n" else (a, b)


def _why_not_scaled(am: AffineMatmul, d: tiling.Digits) -> str:
    """Why the kernel cannot apply the block scales to the sums of its stages; empty if it can."""
    for scale in (am.scale_a, am.scale_b):
        if scale is None:
            continue
        if any(scale.k_strides) and (len(am.k.extents) != 2 or am.k.extents[1] != _tile_k(am) or scale.k_strides[1]):
            return f"{scale.name} changes within {_tile_k(am)} of k"
        if any(scale.batch_strides) and d.batch != am.batch.extents:
            return f"the batch of {scale.name} is not that of the operands"
    if _tables(am, GROUP_ROWS, 1)[1] > MAX_TABLE_BYTES:
        return f"factors of {am.k.size} k's take more than {MAX_TABLE_BYTES} bytes of shared memory"
    return ""


def _tables(am: AffineMatmul, rows: int, splits: int) -> tuple[list[ScaleConsts | None], int]:
    """The block scales of tiles of `rows` rows of weights, and bytes of their factors for a CTA's part of k."""
    found: list[ScaleConsts | None] = []
    k_tiles = -(-am.k.size // _tile_k(am))
    lines, num_bytes = -(-k_tiles // splits), 0
    for i, scale in enumerate(_scales(am)):
        if scale is None:
            found.append(None)
            continue
        extents, (strides,) = tiling.merge(scale[1].extents, [scale[0].row_strides])
        # Rows of a warpgroup are alike where the innermost digit does not matter.
        step = 0 if not any(strides) else GROUP_ROWS if i == 0 and not strides[-1] and extents[-1] % GROUP_ROWS == 0 else 1
        count = rows if i == 0 else _columns(am)
        width = 1 << (-(-count // step) - 1).bit_length() if step else 1
        found.append(ScaleConsts(scale[0].name, len(extents), width, step, num_bytes))
        num_bytes += -(-4 * width * lines // 16) * 16
    return found, num_bytes


@dataclass(frozen=True, slots=True)
class _Plan:
    consts: SkinnyWgmmaConsts
    operands: Operands
    row_tiles: int
    k_tiles: int
    k_tiles_per_split: int


def _side(am: AffineMatmul) -> str:
    """The side of D that the weights make: the longer one, of a gate the one that has two sums."""
    return "n" if am.up is not None or am.n.size >= am.m.size else "m"


def _sizes(am: AffineMatmul) -> tuple[int, int]:
    """Rows of D that the weights make, columns."""
    return (am.n.size, am.m.size) if _side(am) == "n" else (am.m.size, am.n.size)


def _columns(am: AffineMatmul) -> int:
    return max(8, 1 << (_sizes(am)[1] - 1).bit_length())


def _tile_k(am: AffineMatmul) -> int:
    return SPAN_BYTES // am.a.dtype.num_bytes


@lru_cache(maxsize=256)
def _operands(am: AffineMatmul, rows: int) -> Operands | str:
    """Of tiles of `rows` of D, or why tensor maps cannot fetch them."""
    plain = replace(am, up=None)
    d = tiling.merged_digits(plain)
    weights, columns = (d.b, d.a) if _side(am) == "n" else (d.a, d.b)
    if len(d.k) > 1 or len(d.a.rows) > 1 or len(d.b.rows) > 1 or d.a.bounds or d.b.bounds:
        return "skinny_wgmma takes plain matrices: one digit of rows, one of columns, one of k, no padding"
    if columns.k_strides[-1] != 1 and d.k != (1,):
        return "skinny_wgmma takes columns that lie along k"
    walk = walk_linear(d.k, _tile_k(am))
    a, b = plan_boxes(weights, d, walk, rows), plan_boxes(columns, d, walk, _columns(am))
    up = a if am.up is None else plan_boxes(tiling.merged_digits(replace(plain, b=am.up)).b, d, walk, rows)
    unscaled = _why_not_scaled(am, d)
    if unscaled:
        return f"skinny_wgmma: {unscaled}"
    for found in (a, b, up):
        if isinstance(found, str):
            return f"skinny_wgmma: {found}"
    assert isinstance(a, Boxes) and isinstance(b, Boxes) and isinstance(up, Boxes)
    if b.major != "k" or a.offsets or b.offsets:
        return "skinny_wgmma takes columns that lie along k"
    return Operands(tiling.merged_digits(am), a, b, up if am.up is not None else None)


def _epilogue(d: tiling.Digits, am: AffineMatmul, rows: int, columns: int, threads: int, is_added: bool) -> tiling.EpilogueConsts:
    """Of rows of weights by columns. Lines are apart so that words of a warp's sums spread over the banks, but where all words between
    are added up over a cluster."""
    side = _side(am)
    tile_m, tile_n = (columns, rows) if side == "n" else (rows, columns)
    e = tiling.plan_epilogue(d, am, tile_m, tile_n, threads, tiling.needs_wide(d), False)
    return replace(e, pitch=e.tile_inner * (2 if e.is_gated else 1) + (0 if is_added else 4 if e.inner == side else 8))


@lru_cache(maxsize=512)
def _plan(am: AffineMatmul, config: EngineConfig) -> _Plan:
    tile_m, tile_n, splits, sums = config["rows"], _columns(am), config["splits"], 2 if am.up is not None else 1
    operands = _operands(am, tile_m // sums)
    assert not isinstance(operands, str), operands
    d, a, b, up = operands
    whole = _epilogue(d, am, GROUP_ROWS * sums, tile_n, 128 * sums, splits > 1)
    share = (GROUP_ROWS * sums, tile_n // splits) if whole.inner == _side(am) else (GROUP_ROWS // splits, tile_n)
    kinds = [x.source.dtype.name if x.source.dtype.name != "f32" else "tf32" for x in ((d.b, d.a) if _side(am) == "n" else (d.a, d.b))]
    scales, table_bytes = _tables(am, tile_m, splits)
    consts = SkinnyWgmmaConsts(
        kinds[0], kinds[1], _side(am), tile_m, tile_n, dict(config.knobs).get("promotes", False), config["stages"], splits,
        min(config["stages"], AHEAD), len(d.batch), a.consts("a", tile_m // sums, 0), b.consts("b", tile_n, tile_m * SPAN_BYTES),
        up.consts("up", tile_m // sums, tile_m // sums * SPAN_BYTES) if up is not None else None, scales[0], scales[1],
        table_bytes, whole, _epilogue(d, am, share[0], share[1], 128 * sums, splits > 1))
    k_tiles = -(-am.k.size // consts.tile_k)
    return _Plan(consts, operands, -(-_sizes(am)[0] // consts.tile_rows), k_tiles, -(-k_tiles // splits))


class SkinnyWgmmaMatmul:
    """Products with at most 128 rows or columns on one side, on Hopper's asynchronous tensor cores: pairs of f16, bf16 or f32 (rounded to
    tf32), 8-bit floats in any mix, 8-bit integers."""

    name = "skinny_wgmma"
    is_deterministic = True
    sums_coarsely = True
    takes_aux = True
    takes_gates = True
    takes_scales = True

    def check(self, am: AffineMatmul, device: DeviceInfo) -> Support:
        """sm_90a; the shorter side (with a gate the rows) at most 128 and along k; operands that tensor maps can fetch."""
        if device.arch != "sm_90a":
            return refuse(f"{self.name} needs sm_90a, the device is {device.arch}")
        kinds = {am.a.dtype.name, am.b.dtype.name}
        is_float = am.acc.name == "f32" and (kinds <= FP8 or len(kinds) == 1 and kinds <= {"f16", "bf16", "f32"})
        is_scaled = am.scale_a is not None or am.scale_b is not None
        if not is_float and not (am.acc.name == ("f32" if is_scaled else "s32") and kinds <= INTEGERS):
            return refuse(f"{self.name} multiplies f16, bf16 or f32 pairs and 8-bit floats in f32, 8-bit integers in s32, not "
                          f"{am.a.dtype} x {am.b.dtype} in {am.acc}")
        if kinds == {"f32"} and am.math not in ("tf32", "fast"):
            return refuse(f'{self.name} rounds f32 to tf32, which math="{am.math}" does not allow (math="tf32" or "fast" does)')
        if _sizes(am)[1] > MAX_COLUMNS:
            return refuse(f"{self.name} takes at most {MAX_COLUMNS} columns, the shorter side is {_sizes(am)[1]}")
        common = tiling.check_common(am, device)
        if not common or tiling.empty_build(am) is not None:
            return common
        found = _operands(am, GROUP_ROWS)
        return refuse(found) if isinstance(found, str) else common

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Legal configs, the fastest by estimate first."""
        return _sorted_configs(am, device)

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        plan = _plan(am, config)
        c = plan.consts
        ctas = plan.row_tiles * am.batch.size * c.splits
        if device.is_emulated:  # there a warpgroup's multiplication has no speed of its own: a tile costs what its threads cost
            return 1000.0 * ctas * (plan.k_tiles_per_split + 20.0) * c.warpgroups
        return _estimate_us(am, plan, ctas, device)

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        empty = tiling.empty_build(am)
        if empty is not None:
            return empty
        plan = _plan(am, config)
        c = plan.consts
        ctas = plan.row_tiles * am.batch.size * c.splits
        overlaps = dict(config.knobs).get("overlaps", _overlaps(am, plan, ctas, device))
        kinds = (c.kind if c.kind_b == c.kind else f"{c.kind}_{c.kind_b}") + ("_promoted" if c.promotes else "")
        suffix = f"{kinds}_{c.a.major}_{c.tile_m}x{c.tile_n}"
        mixes_integers = c.kind in INTEGERS and c.kind != c.kind_b
        target = PtxTarget.for_arch(device.arch, (8, 4) if mixes_integers else (8, 0))
        return Build((Step.of("matmul/skinny_wgmma_sm90", op, target, 128 * c.warpgroups + 32,
                              _arguments(am, plan), c, ctas, dynamic_smem=c.smem_bytes, cluster=c.splits, follows=overlaps,
                              suffix=suffix),), workspace_offset)


def _per_sm(c: SkinnyWgmmaConsts, device: DeviceInfo) -> int:
    return max(1, min(device.smem_per_sm // (c.smem_bytes + 1024), 2048 // (128 * c.warpgroups + 32)))


def _overlaps(am: AffineMatmul, plan: _Plan, ctas: int, device: DeviceInfo) -> bool:
    """Whether the launch may start while the one before ends, and let the next do so.

    That saves about 1.3 us, but its CTAs then take what places are free, and do not lie evenly on the SMs unless they fill them. As
    measured in chains on an H200, up to 10 % of the time is lost with 64 or 96 CTAs, or with 192 where 264 or 396 find room; few CTAs,
    which are slow for other reasons, and several rounds of them lose nothing.
    """
    places = _per_sm(plan.consts, device) * device.num_sms
    if ctas > device.num_sms:
        return ctas > places or ctas >= 0.9 * places
    free = 1 - ctas / device.num_sms
    return free >= 0.57 or free * _estimate_us(am, plan, ctas, device) < 7.2


def _estimate_us(am: AffineMatmul, plan: _Plan, ctas: int, device: DeviceInfo) -> float:
    """The slowest of memory, L2, what an SM can take in, the products, and stages in turn; a start, and the exchange of parts of k.

    Fitted to 1950 timings on an H100 and an H200 (four matrices of bf16, also as 8-bit floats, integers, f32 and gates; 1 to 128 columns):
    the first choice is 1.5 % slower than the best in the mean.
    """
    c = plan.consts
    per_sm = _per_sm(c, device)
    depth = max(min(c.stages, plan.k_tiles_per_split) - 0.5, 0.5)  # stages under way: one is being used up half of the time
    weights = am.batch.size * _sizes(am)[0] * c.sums * am.k.size * am.a.dtype.num_bytes
    brought = weights * (1 + c.tile_n / c.tile_m)
    in_flight = min(per_sm * device.num_sms, ctas) * depth * c.tile_m * SPAN_BYTES
    # A ring that leaves no room for a second CTA takes longer to start, and to end.
    memory_us = weights / (device.bandwidth_gbs * 0.975e3) * max(1.0, 48e3 * device.num_sms / in_flight) ** 0.4
    memory_us *= 1.04 if per_sm == 1 else 1.0
    l2_us = brought / (device.num_sms * 77e3)
    taken_us = brought / (min(device.num_sms, ctas) * 126e3)
    clocks = 0.9 * c.tile_m * max(c.tile_n, 32) / 32 * (2.2 if c.promotes else 1.0)
    multiply_us = -(-ctas // device.num_sms) * plan.k_tiles_per_split * clocks / 1620
    # A stage takes the latency of memory, as many at a time as the ring holds; or that of its products, and of sums that leave the tensor
    # cores.
    stage_us = 0.1 + (0.09 * c.tile_n / 64 if c.promotes else 0.0)
    in_turn_us = -(-ctas // (per_sm * device.num_sms)) * plan.k_tiles_per_split * max(1.1 / depth, stage_us)
    if c.promotes:
        # CTAs on an SM add up their sums one after the other, and each of several begins and ends.
        in_turns = -(-ctas // device.num_sms)
        stage_us *= (1.38 if _scales(am)[1] is not None or _scales(am)[0] is not None else 1.0) * (1 + 0.17 * (c.warpgroups - 1))
        in_turn_us = max(in_turn_us, in_turns * plan.k_tiles_per_split * stage_us + 2.5 * (in_turns - 1))
    exchange_us = 0.94 * (c.splits.bit_length() - 1) + c.tile_m * c.tile_n * 4 / 23e3 if c.splits > 1 else 0.0
    few_us = 1.0 if c.warpgroups > 1 and c.tile_n >= 64 else 0.0  # more of a tile waits for its first and last stage
    return 4.9 + max(memory_us, l2_us, taken_us, multiply_us, in_turn_us) + exchange_us + few_us


def _arguments(am: AffineMatmul, plan: _Plan) -> list[Arg]:
    c, d = plan.consts, plan.operands.digits
    t = tiling.Arguments(c.epilogue.wide)
    weights, columns = (am.b, am.a) if c.side == "n" else (am.a, am.b)
    operands = [(plan.operands.a, weights, c.a), (plan.operands.b, columns, c.b)]
    if plan.operands.up is not None and am.up is not None and c.up is not None:
        operands.append((plan.operands.up, am.up, c.up))
    for boxes, source, loader in operands:
        t.add(loader.map, "tensor_map", TensorMapArg(source.name, boxes.map, boxes.byte_offset))
    t.add("row_tiles", "u32", plan.row_tiles)
    t.divisor("row_tiles", plan.row_tiles)
    t.add("k_tiles", "u32", plan.k_tiles)
    t.add("k_tiles_per_split", "u32", plan.k_tiles_per_split)
    t.space("batch", d.batch)
    for boxes, _, loader in operands:
        for shape, total in zip(loader.coordinates, boxes.coordinates, strict=True):
            coefficients = dict(total.terms)
            t.add(f"{shape.stem}_base", "s32", total.base)
            for digit, is_one in (*shape.row_terms, *shape.k_terms):
                if not is_one:
                    t.add(f"{shape.stem}_{digit}", "s32", coefficients[digit])
    for scale in filter(None, _scales(am)):
        source, rows = scale
        extents, (strides,) = tiling.merge(rows.extents, [source.row_strides])
        t.add(f"ptr_{source.name}", "u64", TensorArg(source.name, source.base * source.dtype.num_bytes))
        t.add(f"{source.name}_k", "s32", source.k_strides[0] if any(source.k_strides) else 0)
        t.add(f"{source.name}_row_last", "u32", rows.size - 1)
        t.space(f"{source.name}_row", extents)
        t.weights(f"{source.name}_r", strides)
        t.weights(f"{source.name}_b", source.batch_strides if any(source.batch_strides) else (0,) * len(d.batch))
    tiling._target_arguments(t, am, d, c.epilogue)
    return t.args


SKINNY_WGMMA = SkinnyWgmmaMatmul()


@lru_cache(maxsize=256)
def _sorted_configs(am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return tuple(sorted(_candidates(am, device), key=lambda c: SKINNY_WGMMA.estimate(am, c, device)))


def _candidates(am: AffineMatmul, device: DeviceInfo) -> Iterator[EngineConfig]:
    k_tiles, columns = -(-am.k.size // _tile_k(am)), _columns(am)
    sums = 2 if am.up is not None else 1
    size = _sizes(am)[0] * sums
    for rows in (64, 128, 192, 256) if sums == 1 else (128, 256):
        if rows > 64 * sums and (rows >= 2 * size or isinstance(_operands(am, rows // sums), str)):
            continue
        for promotes in promotions(am):
            # Threads share 65536 registers; beside sums and factors they need 48.
            scaled = _scales(am)[1]
            factors = columns // 4 if scaled is not None and any(scaled[0].row_strides) else 0
            if columns // 2 * (2 if promotes else 1) + factors + 48 > min(65536 // (2 * rows + 32), 255):
                continue
            for splits in (1, 2, 4, 8) if am.acc.is_float else (1,):
                per_split = -(-k_tiles // splits)
                ctas = -(-size // rows) * am.batch.size * splits
                # Larger clusters than pairs find no room on many SMs at once.
                most = device.num_sms // (1 if splits == 2 else 2)
                if splits > 1 and ((splits - 1) * per_split >= k_tiles or ctas > most or splits * 2 * sums > columns):
                    continue
                depths, table_bytes = set(), _tables(am, rows, splits)[1]
                if table_bytes > MAX_TABLE_BYTES:
                    continue
                for per_sm in (1, 2, 3):
                    room = min(device.smem_per_cta, device.smem_per_sm // per_sm - 1024) - 2 * BARRIER_BYTES * MAX_STAGES - table_bytes
                    depths.add(min(MAX_STAGES, per_split, room // ((rows + columns) * SPAN_BYTES)))
                for stages in sorted(depths, reverse=True)[: 1 if device.is_emulated else None]:
                    stages = min(stages, 4) if device.is_emulated else stages  # a long ring hides nothing there
                    knobs = {"promotes": promotes} if am.a.dtype.name in FP8 or promotes else {}
                    config = EngineConfig.of(rows=rows, stages=stages, splits=splits, **knobs)
                    # A stage is freed while the next is multiplied.
                    if (stages > 1 or per_split == 1) and _plan(am, config).consts.smem_bytes <= device.smem_per_cta:
                        yield config
