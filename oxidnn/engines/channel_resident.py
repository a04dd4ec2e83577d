"""Group, instance and small batch normalisation in one launch, and the gradient of the first two, for channels that lie innermost: x (and
dy) is read once and held by a cluster, in registers or shared memory.

A cluster has the rows of one sample and a tile of whole groups; its CTAs deal out the rows and exchange moments through distributed
shared memory. Pairs with ptx_templates/channelwise/resident*.ptx.j2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from math import gcd, lcm
from typing import ClassVar

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F64
from ..ops.base import Problem
from ..ops.channel_norm import ChannelNormProblem
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, refuse
from .channel_stats import ChannelNormEngine, Cut, TileConsts, Vector, magic_args

_MAX_PACKS = 8  # of 16 bytes that a thread holds
_CLUSTERS = (1, 2, 4, 8)
_MAX_THREADS = 640
_MAX_LANES = 64
_LARGE = 30 << 20  # bytes from where on more of the device's bandwidth is reached
_SMALL = 4 << 20  # bytes up to which registers hold all as fast as shared memory
_MAX_SHARED = 32  # packs of a thread in shared memory


@dataclass(frozen=True, slots=True)
class ResidentConsts:
    """lanes: packs of a tile's rows; slots: rows a CTA has at once; packs: rows a thread holds; cluster: CTAs that share the rows. width:
    channels of a group; groups: those of a tile; parts: runs of one group in a pack, with cuts_packs found at run time; reach: packs that
    a group may touch. statistics: outputs beside y. is_shared: x lies in shared memory, of which a loop takes `unroll` packs a round.
    reads_once: what x occupies of the L2 is the first to go. running: running statistics, old and new, each with its type."""

    tile: TileConsts
    x_dtype: str
    width: int
    lanes: int
    slots: int
    packs: int
    cluster: int
    groups: int
    parts: int
    cuts_packs: bool
    reach: int
    statistics: tuple[str, ...]
    is_shared: bool = False
    unroll: int = 4
    reads_once: bool = False
    running: tuple[tuple[str, str], ...] = ()

    def dtype(self, name: str) -> str:
        return dict(self.running)[name]

    def guard_none(self, element: int) -> str:
        return ""

    def guard_first(self, element: int) -> str:
        return f"@!%p_second{element} "

    def guard_second(self, element: int) -> str:
        return f"@%p_second{element} "


class ResidentEngine(ChannelNormEngine):
    """What both directions share: clusters that hold a sample's tile, whose channels lie innermost, in packs of 16 bytes."""

    moved: ClassVar[tuple[str, ...]]  # operands of x's type, moved in packs

    def check_layout(self, problem: ChannelNormProblem, device: DeviceInfo, refusal: str) -> Support:
        """refusal: why the problem is none for these engines, if it is so."""
        if Target.for_arch(device.arch).capability < (9, 0):
            return refuse(f"needs sm_90 (clusters), not {device.arch}")
        if refusal:
            return refuse(refusal)
        x, space = problem.desc("x"), self.space(problem)
        assert space is not None
        vector = space.vector("column")
        if x.dtype is F64 or space.along() != "column" or vector * x.dtype.num_bytes != 16 or any(
                problem.desc(n).dtype is not x.dtype or not space.moves_packs(n, "column", vector) for n in self.moved):
            return refuse("needs f32, f16 or bf16 channels innermost in memory, in packs of 16 bytes")
        return SUPPORTED

    @staticmethod
    def lanes_of(problem: ChannelNormProblem, vector: int) -> Iterator[int]:
        """Packs side by side of tiles that cut no group."""
        least = lcm(problem.width, vector)
        for tiles in range(1, problem.channels // least + 1):
            if problem.channels % (tiles * least) == 0 and tiles * least // vector <= _MAX_LANES:
                yield tiles * least // vector


class ChannelNormResident(ResidentEngine):
    """Forward, for samples whose rows of a tile fit the registers of at most eight CTAs."""

    id = "channel_norm.resident"
    moved = ("x",)

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ChannelNormProblem)
        has_values = problem.is_training and problem.rows * problem.channels
        fits = self.check_layout(problem, device, "" if has_values else "the statistics are given, or there are no values")
        if not fits:
            return fits
        vector = 16 // problem.desc("x").dtype.num_bytes
        if problem.width < vector and vector % problem.width:
            return refuse(f"groups of {problem.width} channels divide no pack of {vector}")
        support = super().check_support(problem, device)
        if support and not any(self._shapes(problem, vector)) and not self._shared_shapes(problem, vector, device):
            return refuse(f"{problem.rows} rows a {'sample' if problem.groups else 'batch'} are more than a cluster holds")
        return support

    def _shapes(self, problem: ChannelNormProblem, vector: int) -> Iterator[dict[str, int]]:
        """lanes, slots, packs and cluster of the ways to deal out a sample."""
        for lanes in self.lanes_of(problem, vector):
            for slots in (1 << i for i in range(10)):
                if not 64 <= lanes * slots <= _MAX_THREADS or lanes * slots % 32:
                    continue
                for cluster in _CLUSTERS:
                    share = -(-problem.rows // cluster)
                    packs = -(-share // slots)
                    if packs <= _MAX_PACKS:
                        yield {"lanes": lanes, "slots": slots, "packs": packs, "cluster": cluster}
                    if packs <= _MAX_PACKS // 2:  # few registers, so that more CTAs run at once
                        break

    def _shared_shapes(self, problem: ChannelNormProblem, vector: int, device: DeviceInfo) -> list[dict[str, int]]:
        """The same for x in shared memory, as measured: few waves, then long runs of memory, then many threads."""
        found = []
        for lanes in self.lanes_of(problem, vector):
            if lanes < min(10 if problem.groups else 4, problem.channels // vector):
                continue
            for cluster in _CLUSTERS:
                share, step = -(-problem.rows // cluster), 32 // gcd(lanes, 32)
                # of powers of two, and as many as leave few threads without rows
                fitting = {-(-share // (packs * step)) * step for packs in range(4, _MAX_SHARED + 1, 4)}
                for slots in sorted({1 << i for i in range(10)} | fitting):
                    if not 192 <= lanes * slots <= _MAX_THREADS or lanes * slots % 32 or slots > 128:
                        continue
                    packs = -(-share // (4 * slots)) * 4
                    num_bytes = packs * lanes * slots * 16
                    room = device.smem_per_cta - lanes * slots * 8 * max(2, vector // problem.width) - 4096
                    together = min(room // num_bytes, 768 // (lanes * slots))  # CTAs an SM
                    if packs > _MAX_SHARED or not together or num_bytes < room // 6:
                        continue
                    parts = max(1, device.num_sms // 16)  # of the device, within which a cluster lies
                    clusters = max(1, device.num_sms // parts * together // cluster * parts)
                    units = problem.batches * problem.channels // (lanes * vector)
                    idle = packs * slots * cluster * 8 // problem.rows  # eighths, of threads without rows
                    found.append((-(-units // clusters), idle, cluster, -min(lanes, 10), -lanes * slots, together,
                                  {"lanes": lanes, "slots": slots, "packs": packs, "cluster": cluster}))
        found.sort(key=lambda f: f[:-2])
        # by turns: of several CTAs an SM, and of any number
        several, alone = ([shape for *_, together, shape in found if (together > 1) == wanted] for wanted in (True, False))
        turns = [shape for pair in zip_longest(several, alone) for shape in pair if shape]
        return turns

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ChannelNormProblem)
        space = self.space(problem)
        assert space is not None
        vector = space.vector("column")

        def cost(shape: dict[str, int]) -> float:
            """Threads without rows, short runs of memory, exchanges, and too few CTAs; weighed as an H100 does at 10 to 40 MB."""
            idle = shape["packs"] * shape["slots"] * shape["cluster"] / problem.rows
            run = 1.0 + 1.5 / shape["lanes"]
            ctas = problem.batches * problem.channels // (shape["lanes"] * vector) * shape["cluster"]
            alone = 0.15 * (shape["lanes"] * shape["slots"] > _MAX_THREADS // 2)  # on its SM: nothing loads while it exchanges
            alone -= 0.06 * (shape["packs"] <= _MAX_PACKS // 2)
            return idle * run + alone + 0.08 * (shape["cluster"].bit_length() - 1) + max(0.0, 2.0 * device.num_sms / ctas - 1) * 0.1

        shapes = sorted(self._shapes(problem, vector), key=cost)
        held = [EngineConfig.of(along="column", vec=vector, unroll=1, **s) for s in shapes[:6]]
        shared = [EngineConfig.of(along="column", vec=vector, unroll=1, home="shared", **s)
                  for s in self._shared_shapes(problem, vector, device)[:6]]
        if not problem.groups:
            held.sort(key=lambda c: abs(c["lanes"] - 4))
            shared.sort(key=lambda c: -min(c["lanes"], 8))
        once = [EngineConfig.of(**dict(c.knobs), once=True) for c in shared[:3]]
        if problem.num_bytes <= _SMALL:
            return (*held, *shared, *once)
        # What L2 holds as a whole, but only just, had better leave it first: as measured on an H200.
        first = once[:1] if problem.groups and _LARGE < problem.num_bytes <= device.l2_bytes else []
        return (*first, *shared, *(c for c in once if c not in first), *held)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, ChannelNormProblem)
        is_shared, is_small = dict(config.knobs).get("home") == "shared", problem.num_bytes <= _SMALL
        reached = 0.7 if problem.num_bytes > _LARGE else 0.64 if is_small else 0.6  # of the device's bandwidth
        reached *= 1.15 / (1 + 1.5 / min(max(1, problem.channels // config["vec"]), 10))  # short runs of memory
        reached *= 0.95 if is_shared == is_small else 1.0
        if not problem.groups:  # as measured on an H200: better than three launches at 10 to 20 MB
            return 10.5 if problem.num_bytes <= _SMALL else max(13.0, 6.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * 0.37))
        return 4.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * reached)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ChannelNormProblem)
        if problem.is_empty:
            return Build(())
        space = self.space(problem)
        assert space is not None
        names = ["x", "y", *(["mask"] if problem.has("mask") else []), *problem.epilogue_operands]
        vectors = {n: Vector.of(problem, n) for n in ("gamma", "beta") if problem.has(n)}
        tile, args = self.tile_over(problem, space, names, vectors, config, epilogue=problem.epilogue)
        lanes, slots, cluster, vector, width = config["lanes"], config["slots"], config["cluster"], config["vec"], problem.width
        cuts = width > vector and width % vector != 0
        groups = lanes * vector // width
        reach = max((g * width + width - 1) // vector - g * width // vector + 1 for g in range(groups))
        parts = 2 if cuts else max(1, vector // width)
        statistics = tuple(n for n in ("mean", "rstd") if problem.has(n))
        running = tuple(n for n in ("running_mean", "running_var", "new_running_mean", "new_running_var") if problem.has(n))
        is_shared = dict(config.knobs).get("home") == "shared"
        consts = ResidentConsts(tile, problem.desc("x").dtype.name, width, lanes, slots, config["packs"], cluster, groups, parts, cuts,
                                reach, statistics, is_shared, reads_once=dict(config.knobs).get("once", False),
                                running=tuple((n, problem.desc(n).dtype.name) for n in running))
        tiles = problem.channels // (lanes * vector)
        args += [Arg("num_tiles", "u32", tiles), *magic_args("tiles", tiles), Arg("num_rows", "u32", problem.rows),
                 Arg("chunk_length", "u32", -(-problem.rows // cluster)), Arg("eps", "f32", problem.eps)]
        args += [Arg("keep", "f32", 1 - problem.momentum), Arg("momentum", "f32", problem.momentum)] if running else []
        for name in (*statistics, *running):
            v = Vector.of(problem, name)
            args += [Arg(f"ptr_{name}", "u64", v.value), Arg(f"stride_{name}_b", "s64", v.strides[0]),
                     Arg(f"stride_{name}_g", "s64", v.strides[1])]
        suffix = f"{consts.x_dtype}_w{width}_l{lanes}_{'s' if is_shared else 'p'}{config['packs']}_c{cluster}"
        ctas = 3 if config["packs"] <= _MAX_PACKS // 2 and lanes * slots <= 256 else 1
        num_bytes = config["packs"] * lanes * slots * 16
        if is_shared:
            ctas = min(device.smem_per_cta // num_bytes, 768 // (lanes * slots))
        return Build((Step.of("channelwise/resident", problem.op, Target.for_arch(device.arch), lanes * slots, args, consts,
                              problem.batches * tiles * cluster, cluster=cluster, suffix=suffix,
                              min_ctas_per_sm=max(1, ctas), dynamic_smem=num_bytes if is_shared else 0),))


@dataclass(frozen=True, slots=True)
class ResidentGradientConsts:
    """As ResidentConsts. has_sums: partial sums for the gradients of gamma and beta are left."""

    tile: TileConsts
    dtype: str
    width: int
    lanes: int
    slots: int
    packs: int
    cluster: int
    groups: int
    has_sums: bool
    unroll: int = 4
    reads_once: bool = False


class ChannelNormResidentBackward(ResidentEngine):
    """Gradients, for samples whose dy and x of a tile fit eight CTAs' shared memory; one more launch sums for gamma and beta."""

    id = "channel_norm_backward.resident"
    moved = ("x", "dy", "dx")

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ChannelNormProblem)
        has_values = problem.groups and problem.rows * problem.channels and problem.is_training and problem.desc("dx").numel
        no_values = "" if has_values else "the statistics are not a sample's, or there are no values"
        has_relu = any(problem.has(n) for n in ("mask", "y", "d_residual"))
        fits = self.check_layout(problem, device, no_values or ("no relu behind it" if has_relu else ""))
        if not fits:
            return fits
        vector = 16 // problem.desc("x").dtype.num_bytes
        if problem.width > _MAX_LANES * vector:
            return refuse(f"groups of {problem.width} channels are more than a tile has")
        support = super().check_support(problem, device)
        if support and not self._shapes(problem, vector, device):
            return refuse(f"{problem.rows} rows a sample are more than a cluster holds")
        return support

    def _shapes(self, problem: ChannelNormProblem, vector: int, device: DeviceInfo) -> list[dict[str, int]]:
        """Few waves, several CTAs an SM, runs of 160 bytes; then few threads, each with more in hand."""
        found = []
        for lanes in self.lanes_of(problem, vector):
            for slots in (1 << i for i in range(10)):
                if not 64 <= lanes * slots <= _MAX_THREADS or lanes * slots % 32:
                    continue
                for cluster in _CLUSTERS:
                    share = -(-problem.rows // cluster)
                    packs = -(-share // (4 * slots)) * 4
                    num_bytes = self._shared_bytes(lanes * slots, packs, vector)
                    together = min((device.smem_per_sm - 6144) // (num_bytes + 2048), 640 // (lanes * slots))
                    if packs > _MAX_SHARED // 2 or not together:
                        continue
                    parts = max(1, device.num_sms // 16)  # of the device, within which a cluster lies
                    clusters = max(1, device.num_sms // parts * together // cluster * parts)
                    units = problem.batches * problem.channels // (lanes * vector)
                    waves = max(units / clusters, 1.0) * packs * slots / share  # threads without rows
                    found.append((waves * (1.0 if together > 1 else 1.1) * (1 + 1.5 / min(lanes, 10)), lanes * slots, cluster,
                                  {"lanes": lanes, "slots": slots, "packs": packs, "cluster": cluster}))
        return [shape for *_, shape in sorted(found, key=lambda f: f[:-1])]

    @staticmethod
    def _shared_bytes(threads: int, packs: int, vector: int) -> int:
        """Of dy and x, and of a thread's sums."""
        return 2 * 16 * packs * threads + 2 * 4 * vector * threads

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ChannelNormProblem)
        space = self.space(problem)
        assert space is not None
        vector = space.vector("column")
        found = [EngineConfig.of(along="column", vec=vector, unroll=1, **s) for s in self._shapes(problem, vector, device)[:5]]
        once = [EngineConfig.of(**dict(c.knobs), once=True) for c in found[:2]]
        return (*once[::-1], *found) if problem.num_bytes <= 2 * device.l2_bytes else (*found, *once)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 5.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * 0.54)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ChannelNormProblem)
        if problem.is_empty:
            return Build(())
        space, scratch = self.space(problem), Scratch()
        assert space is not None
        vectors = {n: Vector.of(problem, n) for n in ("mean", "rstd", "gamma") if problem.has(n)}
        tile, args = self.tile_over(problem, space, ["dy", "x", "dx"], vectors, config)
        lanes, slots, packs, cluster, vector = (config[n] for n in ("lanes", "slots", "packs", "cluster", "vec"))
        sums = {n: Vector.of(problem, n) for n in ("dgamma", "dbeta") if problem.has(n)}
        consts = ResidentGradientConsts(tile, problem.desc("x").dtype.name, problem.width, lanes, slots, packs, cluster,
                                        lanes * vector // problem.width, bool(sums),
                                        reads_once=dict(config.knobs).get("once", False))
        tiles = problem.channels // (lanes * vector)
        args += [Arg("num_tiles", "u32", tiles), *magic_args("tiles", tiles), Arg("num_rows", "u32", problem.rows),
                 Arg("chunk_length", "u32", -(-problem.rows // cluster))]
        partials = self.partials(problem, Cut(problem.rows, 1, cluster), scratch, ("sums", "products")) if sums else {}
        args += [Arg(f"ptr_partial_{n}", "u64", partials[f"{n}s"].value) for n in ("sum", "product") if sums]
        threads, num_bytes = lanes * slots, self._shared_bytes(lanes * slots, packs, vector)
        together = max(1, min((device.smem_per_sm - 6144) // (num_bytes + 2048), 640 // threads))
        steps = [Step.of("channelwise/resident_gradient", problem.op, Target.for_arch(device.arch), threads, args, consts,
                         problem.batches * tiles * cluster, cluster=cluster, min_ctas_per_sm=together, dynamic_smem=num_bytes,
                         suffix=f"{consts.dtype}_w{problem.width}_l{lanes}_p{packs}_c{cluster}")]
        if sums:
            total = [Arg("total", "f32", float(problem.rows * problem.width))]
            steps.append(self.combine_step("channelwise/gradient_combine", problem, partials, cluster * problem.batches, 1, 1, {}, sums,
                                           device, total, "_parameters", follows=True))
        return Build(tuple(steps), scratch.num_bytes)


_FORWARD = dict.fromkeys(("group_norm", "instance_norm", "batch_norm"), (ChannelNormResident(),))
_BACKWARD = dict.fromkeys(("group_norm_backward", "instance_norm_backward"), (ChannelNormResidentBackward(),))
ENGINES: dict[str, tuple[Engine, ...]] = {**_FORWARD, **_BACKWARD}
