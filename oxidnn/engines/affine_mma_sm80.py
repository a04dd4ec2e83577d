"""The tiled main loop on tensor cores through mma.sync: f16 and bf16, and f32 as tf32 or in two parts by request; f16 from sm_75 on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ..codegen.spec import Target as PtxTarget
from ..device import DeviceInfo
from ..dtypes import F32
from . import affine_tiling as tiling
from .affine import AffineMatmul, Source
from .base import Build, EngineConfig, Support, refuse

FP8, INT8 = ("e4m3", "e5m2"), ("s8", "u8")
EIGHT_BITS = (*FP8, *INT8)

# (tile_m, tile_n, tile_k in bytes, warps_m, warps_n, stages, where the next stage is awaited)
SHAPES = (
    (128, 128, 64, 2, 2, 4, "late"),
    (128, 128, 64, 2, 2, 5, "early"),
    (128, 128, 64, 2, 4, 4, "late"),
    (128, 128, 128, 2, 4, 3, "late"),
    (128, 128, 128, 2, 2, 3, "late"),
    (128, 256, 64, 2, 4, 4, "late"),
    (128, 256, 64, 2, 4, 4, "early"),
    (128, 256, 128, 2, 4, 3, "late"),
    (256, 128, 128, 4, 2, 3, "late"),
    (256, 128, 64, 4, 2, 4, "late"),
    (256, 128, 64, 4, 2, 4, "early"),
    (64, 128, 64, 2, 2, 4, "late"),
    (64, 128, 64, 2, 2, 5, "early"),
    (64, 128, 128, 2, 2, 3, "late"),
    (128, 64, 64, 2, 2, 4, "late"),
    (128, 64, 64, 2, 2, 5, "early"),
    (128, 64, 128, 2, 2, 3, "late"),
    (256, 64, 64, 4, 1, 4, "late"),
    (256, 64, 64, 4, 1, 5, "early"),
    (64, 64, 64, 2, 2, 4, "late"),
    (64, 64, 64, 2, 2, 5, "early"),
    (64, 64, 128, 2, 2, 3, "late"),
    (128, 64, 128, 4, 2, 3, "late"),
    (128, 32, 64, 4, 1, 4, "late"),
    (64, 32, 128, 2, 2, 3, "late"),
    (64, 32, 64, 2, 1, 4, "late"),
    (64, 32, 64, 2, 2, 4, "late"),
    (128, 16, 64, 4, 1, 4, "late"),
    (32, 64, 64, 1, 2, 4, "late"),
)
# Of products too small to fill the device, whose k is dealt out to the CTAs of a cluster: long rings, as memory's latency is what counts.
CLUSTER_SHAPES = (
    (64, 64, 128, 2, 2, 6, "late"),
    (64, 32, 128, 2, 2, 8, "late"),
    (32, 64, 128, 1, 4, 8, "late"),
    (128, 64, 128, 4, 2, 5, "late"),
)


@dataclass(frozen=True, slots=True)
class MmaConsts(tiling.TiledConsts):
    """Consts of matmul/tiled_mma_sm80.

    kind: "f16" | "bf16" | "tf32" | "s8" | "u8" | "e4m3" | "e5m2", or of f32 in two parts each "tf32x3" | "bf16x3"; kind_b: that of B.
    lines: 32-byte pieces of a line along k in one k step; k_steps: k steps in a k tile (even); sync_step: the one before which the next
    stage is awaited; has_k16: the mma of 16-bit types takes 16 k's, not 8; promotes: k tiles are summed outside the tensor cores, which
    truncate. cluster: CTAs that deal out the k of a tile, each of which then adds up and writes its share of the tile. passes: a CTA
    takes one tile after the other, and writes each in so many shares while the next one's first stages fill (0: it takes one tile).
    """

    kind: str
    kind_b: str
    warps_m: int
    warps_n: int
    lines: int
    k_steps: int
    sync_step: int
    has_rn_tf32: bool
    has_k16: bool
    promotes: bool
    cluster: int
    share: tiling.EpilogueConsts
    passes: int

    @property
    def parked(self) -> tuple[str, ...]:
        """What tells a tile's place waits in shared memory while the tile is multiplied, where the parts of f32 take the registers."""
        if not self.has_parts or self.passes or self.ragged is not None:
            return ()
        return ("%tile_m", "%tile_n", "%batch", "%split", "%k_begin", "%num_k_tiles",
                *(f"%batch_digit{i}" for i in range(self.a.batch_digits)))

    @property
    def parked_at(self) -> int:
        return max(self.stages * self.stage_bytes, self.epilogue.smem_bytes)

    @property
    def smem_bytes(self) -> int:
        ring = self.stages * self.stage_bytes
        return ring + self.share.smem_bytes if self.passes else self.parked_at + 4 * len(self.parked)

    @property
    def warp_m(self) -> int:
        return self.tile_m // self.warps_m

    @property
    def warp_n(self) -> int:
        return self.tile_n // self.warps_n

    @property
    def copy_parts(self) -> int:
        """Parts in which the copies of a k tile are issued: one a k step, so that nvJitLink's scheduler need not hold back fragment loads,
        which pass no copy (H200: 0.978 of the time over 36 pairs).

        Of two stages the next one has to be complete before the last k step; loads through registers go at once.
        """
        return self.k_steps if self.a.is_async and self.b.is_async and self.stages > 2 else 1

    @property
    def pending(self) -> int:
        """Groups of copies that may be under way at the barrier: stages that neither it nor the k tile being multiplied needs."""
        return self.stages - (2 if self.sync_step and self.copy_parts == 1 else 3)

    @property
    def has_parts(self) -> bool:
        return self.kind.endswith("x3")

    @property
    def mma(self) -> str:
        """Shape and types of the instruction."""
        a, b = self.kind.removesuffix("x3"), self.kind_b.removesuffix("x3")
        k = 32 if a in EIGHT_BITS else 8 if a == "tf32" or not self.has_k16 else 16
        return f"m16n8k{k}.row.col.{self.epilogue.acc}.{a}.{b}.{self.epilogue.acc}"

    def frag_a(self, buffer: int, line: int = 0) -> list[str]:
        """Registers of A's fragments, [m16 tile][4], of a line of the k step in `buffer`."""
        count = self.warp_m // 16 * 4
        return [f"%frag_a{(buffer * self.lines + line) * count + i}" for i in range(count)]

    def frag_b(self, buffer: int, line: int = 0) -> list[str]:
        """Registers of B's fragments, [n8 tile][2]."""
        count = self.warp_n // 8 * 2
        return [f"%frag_b{(buffer * self.lines + line) * count + i}" for i in range(count)]

    def part(self, name: str) -> list[str]:
        """Registers of "big_a", "small_a", "big_b" or "small_b", in the order of fragments of one line."""
        return [f"%{name}{i}" for i in range(self.warp_m // 4 if name.endswith("a") else self.warp_n // 4)]

    def part_units(self, buffer: int) -> list[tuple[str, str, list[str]]]:
        """(big, small, whole) registers of what is parted at a time: a register of fragments, or of bf16 a pair."""
        units: list[tuple[str, str, list[str]]] = []
        for x, fragments, count in (("a", self.frag_a, 4), ("b", self.frag_b, 2)):
            big, small = self.part(f"big_{x}"), self.part(f"small_{x}")
            if self.lines == 1:
                units += [(b, s, [whole]) for b, s, whole in zip(big, small, fragments(buffer), strict=True)]
                continue
            # Lane q of four holds k = q and q + 4 of each line of 8. Taken for the neighbours 2q and 2q + 1 they permute k, for both
            # operands alike: of a tile's `count` registers of a line the upper half lies 4 k's beyond the lower.
            half = count // 2
            for tile in range(0, len(big), count):
                for line in range(2):
                    whole = fragments(buffer, line)[tile:tile + count]
                    units += [(big[tile + line * half + h], small[tile + line * half + h], [whole[h], whole[h + half]])
                              for h in range(half)]
        return units

    def products(self, buffer: int, is_careful: bool) -> list[tuple[list[str], list[str]]]:
        """The fragments of A and B to multiply; with care those of the leading parts first, which alone may hold infinities."""
        if not self.has_parts:
            return [(self.frag_a(buffer), self.frag_b(buffer))]
        pairs = [("small_a", "big_b"), ("big_a", "small_b"), ("big_a", "big_b")]
        return [(self.part(a), self.part(b)) for a, b in (pairs[2:] + pairs[:2] if is_careful else pairs)]

    def acc(self, i: int, j: int) -> list[str]:
        first = (i * (self.warp_n // 8) + j) * 4
        return [f"%acc{first + e}" for e in range(4)]


def swizzle_for(size: int, major: str, pitch: int) -> tuple[int, int, int]:
    """(left, right, mask) of phase(line): eight lines that one ldmatrix phase touches fall into eight 16-byte columns of the banks.

    32-bit elements in lines along rows are read word by word, 4 lines (k) by 8 rows (2 chunks) at a time: there phases step by 2.
    """
    if size == 4 and major == "row":
        return 1, 0, 7
    return {32: (0, 2, 1), 64: (0, 1, 3)}.get(pitch, (0, 0, 7))


def _kind(x: Source, math: str) -> str:
    return x.dtype.name if x.dtype is not F32 else "tf32" if math == "fast" else math


def cluster_of(config: EngineConfig) -> int:
    """CTAs of a cluster that deal out the k of a tile; 1: parts of k, if any, are added by a launch of its own."""
    return config["split_k"] if dict(config.knobs).get("joins") == "cluster" else 1


def passes_of(config: EngineConfig) -> int:
    """In how many shares a tile is written by a CTA that takes several in turn; 0: it takes one."""
    return dict(config.knobs).get("passes", 0)


@lru_cache(maxsize=256)
def _plan(am: AffineMatmul, config: EngineConfig, capability: tuple[int, int]) -> tuple[MmaConsts, tiling.Digits, tiling.Grid]:
    d = tiling.merged_digits(am)
    wide = tiling.needs_wide(d)
    size = am.a.dtype.num_bytes
    tile_m, tile_n, tile_k, warps_m, warps_n, stages = (config[k] for k in ("tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "stages"))
    threads = 32 * warps_m * warps_n
    loaders, offset = [], 0
    for name, x, rows in (("a", d.a, tile_m), ("b", d.b, tile_n)):
        vector = tiling.best_vector(x, d.k, d.batch) if size > 1 else tiling.widest_vector(x, d.k, d.batch, "k")
        if size == 4 and rows < 32 and vector.major == "row":
            vector = tiling.widest_vector(x, d.k, d.batch, "k")  # lines of less than 128 bytes cannot be swizzled by words
        pitch = (tile_k if vector.major == "k" else rows) * size
        swizzle = swizzle_for(size, vector.major, pitch)
        loaders.append(tiling.plan_loader(name, x, d, vector, rows, tile_k, threads, offset, pitch, swizzle, capability >= (8, 0), wide))
        offset += rows * tile_k * size
    loaders = list(tiling.share_k(*loaders))
    stage_bytes = -(-offset // 1024) * 1024
    inner = tiling.inner_direction(d)
    grid = tiling.plan_grid(am, (tile_m, tile_n, tile_k), config["split_k"], inner)
    cluster = cluster_of(config)
    if cluster > 1:
        grid = replace(grid, splits=1)  # k tiles beyond the last, if parts of k are uneven, are zeros
    epilogue = tiling.plan_epilogue(d, am, tile_m, tile_n, threads, wide, grid.splits > 1)
    passes = min(passes_of(config), warps_m if inner == "n" else warps_n)  # a warp's lines lie within one share
    shares = max(cluster, passes)
    rows_m, rows_n = (tile_m // shares, tile_n) if inner == "n" else (tile_m, tile_n // shares)
    share = tiling.plan_epilogue(d, am, rows_m, rows_n, threads, wide, grid.splits > 1)
    flips = inner == "n" and share.vec == 8 and am.up is None and not am.moments
    epilogue, share = replace(epilogue, flips=flips), replace(share, flips=flips)
    kind, kind_b = _kind(am.a, am.math), _kind(am.b, am.math)
    lines = 2 if kind == "bf16x3" else 1
    k_steps = tile_k * size // (32 * lines)
    assert k_steps % 2 == 0, f"{k_steps} k steps in a tile: fragments take turns between two buffers"
    consts = MmaConsts(
        tile_m, tile_n, tile_k, stages, stage_bytes, loaders[0], loaders[1], epilogue, has_slices=grid.slices > 1,
        is_split=grid.splits > 1, has_n_tiles=grid.n_tiles > 1, ragged=tiling.RaggedConsts.of(am),
        kind=kind, kind_b=kind_b, warps_m=warps_m, warps_n=warps_n, lines=lines, k_steps=k_steps,
        sync_step=k_steps - 1 if config["sync"] == "late" else 0, has_rn_tf32=capability >= (9, 0),
        has_k16=capability >= (8, 0), promotes=kind in ("tf32x3", *FP8), cluster=cluster, share=share,
        passes=passes)
    return consts, d, grid


@lru_cache(maxsize=256)
def _vector_widths(am: AffineMatmul) -> tuple[int, int]:
    """Elements that a load of A and of B may take."""
    d = tiling.merged_digits(am)
    a, b = (tiling.best_vector(x, d.k, d.batch).width for x in (d.a, d.b))
    return a, b


def registers_needed(c: MmaConsts) -> int:
    """About how many registers the kernel takes; the assembler spills where this exceeds what a thread may have."""
    acc, frag = c.warp_m * c.warp_n // 32, (c.warp_m + c.warp_n) // 4
    # A step's fragments in two buffers; or as read, of the next step, beside the parts of this one.
    total = acc * (2 if c.promotes else 1) + frag * (2 + c.lines if c.has_parts else 2) + (24 if c.ragged is None else 34)
    total += c.a.registers + c.b.registers
    return total


# Fitted to an H200's times of 18 GEMMs and 3x3 convolutions, by which alone they are judged: the logarithms deviate by 0.11.
ALONE = 0.75  # of the rate that two warps a scheduler reach, with one
# Microseconds of a tile before its loop, in a CTA of its own and in one that takes tiles in turn, and after, of 256 x 128.
START_US, TURN_US, WRITE_US = 2.5, 1.5, 2.0
HOPPER_BANDWIDTH = 1.1  # of L2, relative to that of memory, where estimate_us supposes 1.8
PAIRING = 0.5
MMA_CLOCKS = 6  # of a scheduler, by an mma of 4096 flop in 16 bits, at the rate of mma.sync


def issue_clocks(c: MmaConsts) -> tuple[float, float]:
    """Clocks for which a warp keeps its scheduler a k tile: with products, and with all else."""
    steps = c.k_steps * c.lines
    mmas = c.k_steps * (c.warp_m // 16) * (c.warp_n // 8) * (3 if c.has_parts else 1)
    other = 16.0 + (c.warp_m * c.warp_n // 32 if c.promotes else 0)
    for x, rows in ((c.a, c.warp_m), (c.b, c.warp_n)):
        other += steps * (rows // 16 * (1 if x.size < 4 or x.major == "k" else 5) + 1)  # fragments
        bounds = 1 if x.taps else 2 * len(x.bounds)
        other += x.row_positions * x.k_positions * ((3 if x.has_pointers else 4) + bounds)
        own = 3 * x.k_digits - 2 if x.k_name == x.name else 0
        other += x.k_positions * (own + x.k_digits + (2 if x.has_pointers else 0) + (3 if x.taps else len(x.bounds)))
    fragments = (c.warp_m + c.warp_n) // 4
    other += c.k_steps * {"tf32": fragments, "tf32x3": 2 * fragments, "bf16x3": 6 * fragments}.get(c.kind, 0)
    return MMA_CLOCKS * mmas, other


class MmaSm80Matmul:
    """f16 and bf16 matmuls, and f32 ones that may round their operands to tf32 or part them (x3), with f32 accumulators.

    In the x3 forms infinite operands take part in the products of leading parts alone: what infinity leaves over has no value.
    """

    name = "mma_sm80"
    is_deterministic = True
    takes_ragged = True
    takes_gates = True
    takes_aux = True
    takes_prologue = True
    takes_addend = True
    takes_amax = True

    def check(self, am: AffineMatmul, device: DeviceInfo) -> Support:
        """Both operands f16, both bf16, both f32 with any math but "ieee", 8-bit floats (sm_89) or 8-bit integers that lie along k in
        fours; D and epilogue operands of any float type, D of integers s32 too. sm_75: f16."""
        if not device.at_least(7, 5):
            return refuse(f"mma_sm80 needs compute capability 7.5, the device has {device.capability[0]}.{device.capability[1]}")
        kinds = {am.a.dtype.name, am.b.dtype.name}
        is_8_bit, acc = kinds <= set(FP8) or kinds <= set(INT8), "s32" if kinds <= set(INT8) else "f32"
        if not is_8_bit and (len(kinds) != 1 or not kinds <= {"f16", "bf16", "f32"}) or am.acc.name != acc:
            return refuse(f"mma_sm80 takes pairs of f16, bf16, f32, fp8 or 8-bit integers, not {am.a.dtype} x {am.b.dtype} in {am.acc}")
        if kinds == {"f32"} and am.math == "ieee":
            return refuse('mma_sm80 rounds parts of f32, which math="ieee" does not allow ("tf32", "tf32x3", "bf16x3" and "fast" do)')
        needed = (8, 9) if kinds <= set(FP8) else (7, 5) if kinds == {"f16"} else (8, 0)
        if not device.at_least(*needed):
            return refuse(f"mma_sm80 of {am.a.dtype} needs sm_{needed[0]}{needed[1]}, the device is {device.arch}")
        common = tiling.check_common(am, device)
        if common and is_8_bit:
            d = tiling.merged_digits(am)
            for x in (d.a, d.b):
                vector = tiling.widest_vector(x, d.k, d.batch, "k")
                if vector.width < 4:
                    return refuse(f"mma_sm80 takes 8-bit operands that lie along k in fours; {x.source.name}: {vector.reason}")
        return common

    def moments_block(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> int:
        """Rows of D whose moments a tile writes beside it, if asked to; 0 where it cannot."""
        is_whole = config["split_k"] == 1 and not passes_of(config) and tiling.may_make_moments(am)
        return int(config["tile_m"]) if is_whole else 0

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Legal configs, the fastest by estimate first."""
        return tuple(dict.fromkeys(_sorted_configs(am, device)))  # in the emulator shapes of one tile are alike

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        tile = (config["tile_m"], config["tile_n"], config["tile_k"])
        size = am.a.dtype.num_bytes
        threads = 32 * config["warps_m"] * config["warps_n"]
        grid = tiling.plan_grid(am, tile, config["split_k"])
        if device.is_emulated:
            return self._emulated_us(config, tile, grid, size)
        consts, _, _ = _plan(am, config, device.capability)
        # mma.sync issues at most 2720 of wgmma's 4096 flop per clock and SM on Hopper; elsewhere it is the full rate.
        peak = device.tensor_tflops * (0.66 if device.capability[0] == 9 else 0.95) * (1 if consts.kind == "bf16x3" else 2 / size)
        registers = min(255, 48 + registers_needed(consts))
        ctas_per_sm = max(1, min(device.smem_per_sm // (consts.smem_bytes + 1024), 65536 // (registers * threads), 2048 // threads))
        # As if nothing else overlapped with products: fits what an H200 took, the reason is not established.
        mma_clocks, other_clocks = issue_clocks(consts)
        warps = min(ctas_per_sm, -(-grid.ctas * cluster_of(config) // device.num_sms)) * threads // 32
        busy = min(1.0, ALONE + (1 - ALONE) * (warps - 4) / 4)
        efficiency = busy * mma_clocks / (3 if consts.has_parts else 1) / (mma_clocks + other_clocks)
        # Loads of less than 16 bytes: 7 to 17 clocks of an SM a warp (measured at 2 bytes: the 7x7 filter of 3 channels).
        short = sum(rows / width for rows, width in zip(tile[:2], _vector_widths(am), strict=True) if width * size < 16)
        load_us = grid.ctas * grid.k_tiles_per_split * tile[2] * short / 32 * 12 / device.num_sms / 1620
        joined = cluster_of(config) > 1  # by an exchange in the cluster instead of a launch
        if joined:
            grid = replace(grid, padded_inner=0)
        memory_us = 0.0
        if device.capability[0] == 9:
            # Copies by threads bring two thirds of memory's speed, less than half where rows part lines (pointwise layers of 16 to 240
            # channels, H100: 0.22 to 0.76).
            runs = [(am.k.extents if x.k_strides[-1:] == (1,) else rows.extents or (1,))[-1]
                    for x, rows in ((am.a, am.m), (am.b, am.n))]
            matrices = 2 if am.up is not None else 1
            num_bytes = size * (tiling.source_elements(am.a, am.m, am.k, am.batch)
                                + matrices * tiling.source_elements(am.b, am.n, am.k, am.batch))
            num_bytes += am.m.size * am.n.size * am.batch.size * sum(t.dtype.num_bytes for t in (am.d, *am.operands)
                                                                     if t is am.d or any(t.m_strides))
            speed = 0.45 if any(run * size % 128 for run in runs) else 0.65
            memory_us = num_bytes / (device.bandwidth_gbs * speed * 1e3) + 4.8
            device = replace(device, bandwidth_gbs=device.bandwidth_gbs * HOPPER_BANDWIDTH)
        start = (TURN_US if consts.passes else START_US) + WRITE_US * tile[0] * tile[1] / 32768
        start += 0.012 * tile[0] / consts.epilogue.moment_groups if am.moments else 0.0  # a thread's share of a column, supposed
        # 392 tiles in turn for 264 places, two an SM, take 1.25 to 1.36 of the time of three rounds (H200): the last ones meet on some SMs.
        # Where each has a CTA of its own that happens too, but not as a rule.
        in_turns = consts.passes > 0
        total = tiling.estimate_us(am, grid, tile, peak * 1e6 / device.num_sms, ctas_per_sm, device, efficiency, start, in_turns)
        slower = 1.4 if am.prologue is not None else 1.0  # 1.2 to 1.65 in three layers on an H200
        return slower * max(load_us + 4, total + 0.7 * joined, memory_us)

    @staticmethod
    def _emulated_us(config: EngineConfig, tile: tuple[int, int, int], grid: tiling.Grid, size: int) -> float:
        """In the emulator an instruction costs about 4 us per batch of 16384 threads and 2 ns per thread, an mma 0.2 us per warp."""
        warps = grid.ctas * config["warps_m"] * config["warps_n"]
        steps = tile[2] * size // 32
        mmas = steps * (tile[0] // config["warps_m"] // 16) * (tile[1] // config["warps_n"] // 8)
        plain = (grid.k_tiles_per_split + config["stages"] - 1) * (200 + mmas) + 900
        split_us = grid.splits * 60.0 + 2000.0 if grid.splits > 1 else 0.0
        return plain * (4.0 * -(-warps // 512) + 0.064 * warps) + mmas * grid.k_tiles_per_split * warps * 0.2 + split_us

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        empty = tiling.empty_build(am)
        if empty is not None:
            return empty
        consts, d, grid = _plan(am, config, device.capability)
        target = PtxTarget.for_arch(device.arch, _ptx_version(consts))
        threads = 32 * consts.warps_m * consts.warps_n
        per_sm = max(1, min(device.smem_per_sm // (consts.smem_bytes + 1024), 256 // threads))  # of 255 registers a thread
        return tiling.tiled_build("matmul/tiled_mma_sm80", op, am, consts, d, grid, threads, target, consts.kind, workspace_offset,
                                  consts.cluster, device.num_sms * per_sm if consts.passes else 0)


def _ptx_version(c: MmaConsts) -> tuple[int, int]:
    return (8, 4) if c.kind in FP8 else (7, 8) if c.cluster > 1 or c.kind.startswith("tf32") and c.has_rn_tf32 else (7, 0)


MMA_SM80 = MmaSm80Matmul()


MAX_CONFIGS = 64


@lru_cache(maxsize=256)
def _sorted_configs(am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    found = [config for config, fits in _candidates(am, device) if fits]
    # Where no shape is known to do without spills, the smallest has to.
    found = found or [config for config, _ in _candidates(am, device) if config["tile_m"] * config["tile_n"] <= 2048]
    return tuple(sorted(found, key=lambda c: MMA_SM80.estimate(am, c, device))[:MAX_CONFIGS])


def passes_in_turn(am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> int:
    """The fewest shares in which CTAs that take large tiles in turn may write them, with as many on an SM as registers allow; 0 where
    that gains nothing, as every tile has a CTA of its own in the first round, or where an epilogue's operands take its registers."""
    threads = 32 * config["warps_m"] * config["warps_n"]
    is_small = 64 * threads > config["tile_m"] * config["tile_n"]
    if device.is_emulated or not device.at_least(8) or am.ragged is not None or is_small:
        return 0
    if am.up is not None or am.operands or am.aux is not None or am.math.endswith("x3"):
        return 0
    per_sm = max(1, 256 // threads)
    for passes in (1, 2, 4):
        consts, _, grid = _plan(am, EngineConfig.of(**dict(config.knobs), passes=passes), device.capability)
        if grid.ctas <= device.num_sms * per_sm or consts.passes < passes:
            return 0
        if consts.smem_bytes + 1024 <= device.smem_per_sm // per_sm:
            return passes
    return 0


def register_limit(am: AffineMatmul, device: DeviceInfo) -> int:
    """The largest registers_needed that assembles without spills. Rounding to tf32 takes temporaries, more where NaN has to be kept by
    hand; f32 in parts has a second loop, with care."""
    if am.a.dtype.name in FP8:
        return 200 if device.capability[0] == 9 else 217  # Hopper converts to f16
    if am.a.dtype.num_bytes != 4:
        return 260
    return {"tf32x3": 180, "bf16x3": 244}.get(am.math, 250 if device.at_least(9) else 232)


def _candidates(am: AffineMatmul, device: DeviceInfo) -> Iterator[tuple[EngineConfig, bool]]:
    """Configs that the device's shared memory takes, and whether their registers fit too."""
    size, limit = am.a.dtype.num_bytes, register_limit(am, device)
    for tile_m, tile_n, k_bytes, warps_m, warps_n, stages, sync in SHAPES:
        if am.math == "bf16x3" and size == 4 and k_bytes == 64:
            continue  # a single k step, and fragments take turns between two buffers
        tile = (tile_m, tile_n, k_bytes // size)
        if device.is_emulated:
            stages, sync = 2, "late"  # a long ring hides nothing there and costs its filling
        staging = tile_m * tile_n * 4 + 32 * max(tile_m, tile_n)
        if max(stages * (tile_m + tile_n) * k_bytes, staging) > device.smem_per_cta:
            continue
        if (tile_m >= 2 * am.m.size and tile_m > 64) or (tile_n >= 2 * tiling.columns_of(am) and tile_n > 32):
            continue  # more than half of the tile would be empty
        knobs = {"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile[2], "warps_m": warps_m, "warps_n": warps_n, "stages": stages,
                 "sync": sync}
        consts, _, _ = _plan(am, EngineConfig.of(**knobs, split_k=1), device.capability)
        fits = registers_needed(consts) <= limit
        # Sums of integers are not split: the sum of parts is of floats.
        for split_k in tiling.split_choices(am, tile, 32 * warps_m * warps_n, device) if am.acc is F32 else (1,):
            config = EngineConfig.of(**knobs, split_k=split_k)
            yield config, fits
            if passes := passes_in_turn(am, config, device):
                yield EngineConfig.of(**dict(config.knobs), passes=passes), fits
    if device.is_emulated or not device.at_least(9) or am.acc is not F32 or am.ragged is not None or am.up is not None:
        return
    for tile_m, tile_n, k_bytes, warps_m, warps_n, stages, sync in CLUSTER_SHAPES:
        tile = (tile_m, tile_n, k_bytes // size)
        whole = tiling.plan_grid(am, tile, 1)
        for cluster in (2, 4, 8):
            if whole.ctas * cluster > 2 * device.num_sms or whole.k_tiles < 2 * cluster:
                continue
            config = EngineConfig.of(tile_m=tile_m, tile_n=tile_n, tile_k=tile[2], warps_m=warps_m, warps_n=warps_n, stages=stages,
                                     sync=sync, split_k=cluster, joins="cluster")
            yield config, registers_needed(_plan(am, config, device.capability)[0]) <= limit
