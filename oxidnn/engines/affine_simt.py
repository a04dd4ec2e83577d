"""The tiled main loop on ordinary FMA units: f32 and f64 with IEEE arithmetic, on every architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..codegen.spec import Target as PtxTarget
from ..device import DeviceInfo
from . import affine_tiling as tiling
from .affine import AffineMatmul
from .base import Build, EngineConfig, Support, refuse

NO_SWIZZLE = (0, 0, 0)
SHAPES = {  # (threads_m, threads_n, reg_m, reg_n, tile_k, stages): a short ring where shared memory is filled by few large tiles
    "f32": ((8, 16, 16, 8, 16, 2), (16, 16, 8, 16, 16, 2), (16, 8, 8, 16, 16, 2),
            (16, 8, 8, 16, 8, 4), (8, 16, 16, 8, 8, 4), (16, 16, 8, 16, 8, 4), (16, 16, 16, 8, 8, 4),
            (16, 8, 8, 8, 16, 2), (16, 16, 8, 8, 16, 2), (16, 8, 8, 8, 32, 2), (16, 16, 8, 8, 8, 2), (16, 16, 4, 4, 16, 3),
            (16, 8, 4, 4, 16, 3), (32, 4, 4, 4, 16, 3), (32, 4, 4, 2, 16, 3), (4, 32, 4, 4, 16, 3)),
    "f64": ((16, 16, 4, 4, 8, 3), (16, 8, 4, 4, 8, 3), (32, 4, 4, 4, 8, 3)),
}

NARROW = 16  # rows (or columns) of a product that reads a matrix once: tiles of few of them, whole lines of 128 bytes along k
NARROW_SHAPES = ((2, 64, 2, 4, 32, 3), (2, 64, 2, 2, 32, 4), (2, 64, 4, 2, 32, 4), (4, 32, 4, 4, 32, 4))


def shapes_for(am: AffineMatmul) -> tuple[tuple[int, ...], ...]:
    """Of SHAPES' form, those for few rows or columns where there are few."""
    shapes = SHAPES[am.acc.name]
    if am.acc.name == "f32" and am.n.size > am.m.size <= NARROW:
        shapes = (*NARROW_SHAPES, *shapes)
    if am.acc.name == "f32" and am.m.size >= am.n.size <= NARROW:
        shapes = (*((n, m, rn, rm, k, stages) for m, n, rm, rn, k, stages in NARROW_SHAPES), *shapes)
    return shapes


@dataclass(frozen=True, slots=True)
class SimtConsts(tiling.TiledConsts):
    """Consts of matmul/tiled_simt. k_vec: k's per fragment load of a k-major operand; width_x: rows per fragment load of a
    row-major one; lanes_n: lanes of a warp along n; columns: those of a thread whose fragments are loaded together."""

    threads_m: int
    threads_n: int
    reg_m: int
    reg_n: int
    compute: str
    k_vec: int
    width_a: int
    width_b: int

    @property
    def lanes_n(self) -> int:
        return min(self.threads_n, 8 if self.threads_m >= 4 else 32 // self.threads_m)

    @property
    def columns(self) -> int:
        return min(self.reg_n, 8)

    @property
    def copy_parts(self) -> int:
        """Parts in which the copies of a k tile are issued, one before each k step: all at once they stand before the fragment loads of
        every warp, as 192 copies of 4 bytes a CTA seem to have done for a fifth of a k tile (H200). Of two stages none comes in the last
        step."""
        steps = self.tile_k // self.k_vec
        return max(1, min(4, steps - (self.stages == 2))) if self.a.is_async and self.b.is_async else 1

    @property
    def acc_pitch_m(self) -> int:
        return self.epilogue.pitch if self.epilogue.inner == "n" else 1

    @property
    def acc_pitch_n(self) -> int:
        return self.epilogue.pitch if self.epilogue.inner == "m" else 1

    @staticmethod
    def row_of(loader: tiling.LoaderConsts, i: int, threads: int, width: int) -> int:
        """Row of the i-th register of thread 0: rows are dealt one by one (major "k") or `width` at a time (major "row")."""
        return i * threads if loader.stored == "k" else i // width * width * threads + i % width


@lru_cache(maxsize=256)
def _plan(am: AffineMatmul, config: EngineConfig, has_cp_async: bool) -> tuple[SimtConsts, tiling.Digits, tiling.Grid]:
    d = tiling.merged_digits(am)
    wide = tiling.needs_wide(d)
    size = am.acc.num_bytes
    threads_m, threads_n, reg_m, reg_n, tile_k = (config[k] for k in ("threads_m", "threads_n", "reg_m", "reg_n", "tile_k"))
    tile_m, tile_n, threads = threads_m * reg_m, threads_n * reg_n, threads_m * threads_n
    loaders = []
    offset = 0
    for name, x, rows in (("a", d.a, tile_m), ("b", d.b, tile_n)):
        vector = tiling.best_vector(x, d.k, d.batch)
        stored = vector.major
        if vector.major == "k" and dict(config.knobs).get("transposes") and size >= 4 and rows * tile_k >= threads:
            vector, stored = tiling.Vector("k", 1, "transposed"), "row"
        # Lines along k get 16 bytes of padding: their pitch is an odd number of 16-byte columns, and rows spread over the banks; so do k's
        # of transposed ones.
        pitch = tile_k * size + 16 if stored == "k" else rows * size + (16 if vector.major == "k" else 0)
        loaders.append(tiling.plan_loader(name, x, d, vector, rows, tile_k, threads, offset, pitch, NO_SWIZZLE, has_cp_async, wide, stored))
        offset += pitch * (rows if stored == "k" else tile_k)
    loaders = list(tiling.share_k(*loaders))
    grid = tiling.plan_grid(am, (tile_m, tile_n, tile_k), config["split_k"], tiling.inner_direction(d))
    epilogue = tiling.plan_epilogue(d, am, tile_m, tile_n, threads, wide, grid.splits > 1)
    width = 16 // size
    consts = SimtConsts(
        tile_m, tile_n, tile_k, config["stages"], offset, loaders[0], loaders[1], epilogue, has_slices=grid.slices > 1,
        is_split=grid.splits > 1, has_n_tiles=grid.n_tiles > 1, ragged=tiling.RaggedConsts.of(am),
        threads_m=threads_m, threads_n=threads_n, reg_m=reg_m, reg_n=reg_n, compute=am.acc.ptx,
        k_vec=dict(config.knobs).get("k_vec", width), width_a=min(reg_m, width), width_b=min(reg_n, width))
    return consts, d, grid


def registers_needed(c: SimtConsts) -> int:
    """About how many 32-bit registers the kernel cannot do without."""
    words = 2 if c.compute == "f64" else 1
    fragments = sum((c.k_vec if x.stored == "k" else 1) * min(count, 8) for x, count in ((c.a, c.reg_m), (c.b, c.reg_n)))
    total = words * (c.reg_m * c.reg_n + fragments) + 24
    total += c.a.registers + c.b.registers
    return total


class SimtMatmul:
    """f32 and f64 matmuls with IEEE FMA in ascending k (per split)."""

    name = "simt"
    is_deterministic = True
    takes_ragged = True
    takes_gates = True
    takes_aux = True
    takes_amax = True
    takes_prologue = True

    def check(self, am: AffineMatmul, device: DeviceInfo) -> Support:
        """f32 or f64 operands with an accumulator of their type; D and epilogue operands of any float type."""
        if not am.a.dtype == am.b.dtype == am.acc or am.acc.name not in ("f32", "f64"):
            return refuse(f"simt multiplies f32 or f64 in their own precision, not {am.a.dtype} x {am.b.dtype} in {am.acc}")
        return tiling.check_common(am, device)

    def moments_block(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> int:
        """Rows of D whose moments a tile writes beside it, if asked to; 0 where it cannot."""
        is_whole = config["split_k"] == 1 and tiling.may_make_moments(am)
        return int(config["threads_m"] * config["reg_m"]) if is_whole else 0

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        found = self._candidates(am, device)
        return tuple(sorted(found, key=lambda c: self.estimate(am, c, device)))

    def _candidates(self, am: AffineMatmul, device: DeviceInfo) -> Iterator[EngineConfig]:
        for threads_m, threads_n, reg_m, reg_n, tile_k, stages in shapes_for(am):
            if device.is_emulated:
                stages = 2  # a longer ring hides nothing there
            tile = (threads_m * reg_m, threads_n * reg_n, tile_k)
            if am.up is not None and tile[1] % (2 * tiling.GATE_COLUMNS):
                continue  # a tile of one sum alone
            knobs = {"threads_m": threads_m, "threads_n": threads_n, "reg_m": reg_m, "reg_n": reg_n, "tile_k": tile_k, "stages": stages}
            # Transposed only where there are many results a thread: it takes four times the copies.
            for more in ({}, {"transposes": 1}) if reg_m * reg_n == 128 else ({},):
                consts, _, _ = _plan(am, EngineConfig.of(**knobs, split_k=1, **more), device.at_least(8))
                if more and "k" not in (consts.a.major, consts.b.major):
                    continue
                limit = 225 if reg_m * reg_n * tile_k > 1024 else 262  # largest needs without spills; long k tiles take more besides
                if more and not device.at_least(9):
                    limit = 207
                if consts.smem_bytes > device.smem_per_cta or registers_needed(consts) > limit:
                    continue
                if consts.epilogue.inner_threads * consts.epilogue.vec < consts.epilogue.tile_inner:
                    continue  # D's lines in the tile are longer than what all threads write at a time
                for split_k in tiling.split_choices(am, tile, threads_m * threads_n, device):
                    yield EngineConfig.of(**knobs, split_k=split_k, **more)

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        tile = (config["threads_m"] * config["reg_m"], config["threads_n"] * config["reg_n"], config["tile_k"])
        grid = tiling.plan_grid(am, tile, config["split_k"])
        if device.is_emulated:
            return self._emulated_us(am, config, tile, grid)
        consts, _, _ = _plan(am, config, device.at_least(8))
        f64_rate = 1 / 2 if device.capability in ((8, 0), (9, 0)) else 1 / 64
        rate = device.fma_tflops * 1e6 / device.num_sms * (f64_rate if am.acc.name == "f64" else 1.0)
        reuse = config["reg_m"] * config["reg_n"] / (config["reg_m"] + config["reg_n"])  # FMAs per fragment element
        # Measured on an H200, GEMM 4096 of operands that lie along rows. A tile of 8 k's is short for its barrier.
        if reuse >= 4.0:
            efficiency = 0.7 if reuse == 4.0 and tile[2] == 8 else 0.86 if tile[2] == 8 else 0.88
            efficiency -= 0.09 if reuse == 4.0 and tile[1] > 64 else 0.0
        else:
            efficiency = 0.63 if reuse == 2.0 else 0.35
        if "k" in (consts.a.stored, consts.b.stored):
            efficiency *= 0.885
        # Copies of 4 bytes, as transposed elements come, are four times as many.
        efficiency /= 1 + 8.5 * sum(1 / rows for x, rows in ((consts.a, tile[1]), (consts.b, tile[0])) if x.stored != x.major)
        threads = config["threads_m"] * config["threads_n"]
        is_large = config["reg_m"] * config["reg_n"] >= 64  # all registers of a thread
        ctas_per_sm = max(1, 256 // threads) if is_large else 2
        total = tiling.estimate_us(am, grid, tile, rate, ctas_per_sm, device, efficiency, in_turns=is_large)
        if am.acc.name == "f32" and min(am.m.size, am.n.size) <= NARROW:
            long = am.b if am.n.size > am.m.size else am.a
            if tile[2] < 32 and long.k_strides[-1:] == (1,):  # half a line at a time (H200: 51 us for 35)
                total *= 1.35
            total += 0.002 * total * min(tile[0], tile[1])  # what is not there is loaded and multiplied too
        return total

    @staticmethod
    def _emulated_us(am: AffineMatmul, config: EngineConfig, tile: tuple[int, int, int], grid: tiling.Grid) -> float:
        """In the emulator an instruction costs about 4 us per batch of 16384 threads, and 2 ns per thread."""
        threads = grid.ctas * config["threads_m"] * config["threads_n"]
        regs = config["reg_m"] * config["reg_n"]
        per_tile = tile[2] * (regs + (config["reg_m"] + config["reg_n"]) / 4) + 120
        instructions = per_tile * (grid.k_tiles_per_split + config["stages"] - 1) + 500 + 60 * regs
        return instructions * (4.0 * -(-threads // 16384) + 0.002 * threads) + (grid.splits * 60.0 + 2000.0 if grid.splits > 1 else 0.0)

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        empty = tiling.empty_build(am)
        if empty is not None:
            return empty
        consts, d, grid = _plan(am, config, device.at_least(8))
        return tiling.tiled_build("matmul/tiled_simt", op, am, consts, d, grid, consts.threads_m * consts.threads_n,
                                  PtxTarget.for_arch(device.arch), am.acc.name, workspace_offset)


SIMT = SimtMatmul()
