"""Local response normalisation: a thread walks over a run of channels, with all channels that its windows reach in registers.

Where the channels lie side by side, the run is moved as a pack; else neighbouring threads have neighbouring positions. Windows within
channels: a thread an element, or a strip of them along the second last dimension, whose windows share the sums of rows; the gradient in
two launches, each a walk over windows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ..codegen.pointwise import parse
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import dtype
from ..ops.base import Problem
from ..ops.lrn import LrnProblem
from ..tensor import TensorDesc, packed_strides
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, WorkspaceArg, refuse
from .collapse import collapse
from .digits import DigitConsts, Digits

THREADS = 128
MAX_SIZE = {"f32": 33, "f64": 17}  # all channels that a run's windows reach are held in registers
MAX_LOADS = 64  # of a strip's rows, which are unrolled
PACK = 4  # elements along the last dimension, or channels
MAX_PACKED = 5  # windows of packs: they need no more than the packs beside their own, and not too many registers
_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class LrnConsts:
    """run: channels of a thread. before, after: of a window, around its own. packed: runs are moved whole."""

    dtype: str
    compute: str
    run: int
    before: int
    after: int
    packed: bool
    backward: bool
    digits: DigitConsts

    @property
    def sums_from(self) -> int:
        """The first channel, from the run's own on, whose window is summed; sums_to: behind the last."""
        return -self.after if self.backward else 0

    @property
    def sums_to(self) -> int:
        return self.run + (self.before if self.backward else 0)

    @property
    def reach_from(self) -> int:
        """The first channel read, from the run's own on; reach_to: behind the last."""
        return self.sums_from - self.before

    @property
    def reach_to(self) -> int:
        return self.sums_to + self.after

    def power(self, result: str, base: str, exponent: str) -> str:
        return _power(self.compute, result, base, exponent)


@dataclass(frozen=True, slots=True)
class WithinConsts:
    """stage: "y", "shares" or "dx": see the template. walked: type of what the windows run over. means: windows are of x - means.
    strip: elements of a thread along the second last dimension. along: and along the last one, where they move in packs. vector: channels
    that do. beside: what windows run over lies side by side along the last dimension.
    """

    dtype: str
    compute: str
    walked: str
    stage: str
    before: int
    after: int
    rank: int
    digits: DigitConsts
    means: bool
    strip: int = 1
    beside: bool = False
    along: int = 1
    vector: int = 1

    def power(self, result: str, base: str, exponent: str) -> str:
        return _power(self.compute, result, base, exponent)


def _power(compute: str, result: str, base: str, exponent: str) -> str:
    """The PTX of base^exponent, base > 0."""
    if compute == "f64":
        return parse("pow(b, e)").lower({"b": base, "e": exponent}, [result], "f64")
    return (f"    lg2.approx.f32 {result}, {base};\n    mul.rn.f32 {result}, {result}, {exponent};\n"
            f"    ex2.approx.f32 {result}, {result};\n")


class LrnEngine(Engine):
    """Both directions across channels, any layout."""

    id = "lrn.channels"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, LrnProblem)
        if problem.within:
            return refuse("the windows lie within channels")
        x = problem.desc("x")
        most = MAX_SIZE[_compute(problem)]
        if problem.size > most:
            return refuse(f"windows of {problem.size} channels (at most {most})")
        if prod(x.shape[1:]) >= _LIMIT:
            return refuse(f"one image has {prod(x.shape[1:])} elements (at most {_LIMIT - 1})")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, LrnProblem)
        runs = [r for r in (8, 4, 16, 2) if problem.size <= 17 or r <= 4]
        if problem.desc("x").dtype.name == "f64":
            runs = [r for r in runs if r <= 4]
        found = [EngineConfig.of(run=r, packed=int(_packs(problem, r))) for r in runs]
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, LrnProblem)
        run, x = config["run"], problem.desc("x")
        scattered = x.strides[1] == 1 and x.shape[1] > 1 and not config["packed"]
        again = 1 + 0.15 * (problem.size - 1) * (2 if problem.is_backward else 1) / run + (0.5 if scattered else 0) + 0.01 * run
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * 0.9) * again

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, LrnProblem)
        if problem.is_empty:
            return Build(())
        run, x = config["run"], problem.desc("x")
        compute = _compute(problem)
        descs = {o.name: o.desc for o in problem.operands}
        rows = {name: tuple(s * d.dtype.num_bytes for s in d.strides) for name, d in descs.items()}
        main = "dx" if problem.is_backward else "y"
        extents, strides = collapse(x.shape[2:], [row[2:] for row in rows.values()])
        chunks = -(-x.shape[1] // run)
        per_image = chunks * prod(extents)
        images = max(1, min(x.shape[0], (_LIMIT - 1) // per_image))
        wide = any(abs(s) * run >= _LIMIT for row in rows.values() for s in row)
        steps = []
        for begin in range(0, x.shape[0], images):
            moves = {name: (rows[name][0], rows[name][1] * run, *inner) for name, inner in zip(rows, strides, strict=True)}
            names = ("n", "chunk", *(f"s{i}" for i in range(len(extents))))
            digits = Digits(names, (min(images, x.shape[0] - begin), chunks, *extents), moves).ordered_for(main)
            consts = LrnConsts(x.dtype.name, compute, run, problem.before, problem.size - 1 - problem.before, bool(config["packed"]),
                               problem.is_backward, digits.consts(wide))
            args = [Arg(f"ptr_{n}", "u64", TensorArg(n, begin * rows[n][0])) for n in descs]
            args += [Arg("num_threads", "u32", digits.size), *digits.args(wide), Arg("channels", "u32", x.shape[1])]
            args += [Arg(f"channel_{n}", "s64" if wide else "s32", rows[n][1]) for n in descs]
            factor = problem.factor
            numbers = {"factor": factor, "k": problem.k, "exponent": -problem.beta}
            if problem.is_backward:
                numbers |= {"steeper": -problem.beta - 1, "slope": -2 * factor * problem.beta}
            args += [Arg(name, compute, value) for name, value in numbers.items()]
            target, grid = Target.for_arch(device.arch), -(-digits.size // THREADS)
            steps.append(Step.of("lrn/channels", problem.op, target, THREADS, args, consts, grid, suffix=f"{consts.dtype}_r{run}"))
        return Build(tuple(steps))


class WithinEngine(Engine):
    """Both directions within channels, any layout."""

    id = "lrn.within"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, LrnProblem)
        if not problem.within:
            return refuse("the windows run across channels")
        x = problem.desc("x")
        if prod(x.shape[1:]) >= _LIMIT or max(x.shape) + problem.size >= _LIMIT:
            return refuse(f"one image has {prod(x.shape[1:])} elements (at most {_LIMIT - 1})")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, LrnProblem)
        rank = problem.desc("x").rank
        strips = [n for n in (8, 4) if rank > 3 and (n + problem.size - 1) * problem.size <= MAX_LOADS]
        found = [EngineConfig.of(strip=n, along=1, vec=1) for n in (*strips, 1)]
        if rank == 4 and _compute(problem) == "f32" and problem.size <= (MAX_PACKED if problem.has("means") else MAX_PACKED + 2):
            if self._has_packs(problem):
                found += [EngineConfig.of(strip=n, along=PACK, vec=1) for n in (4, 2)]
            if problem.size <= MAX_PACKED and _packs(problem, PACK):
                found += [EngineConfig.of(strip=n, along=1, vec=PACK) for n in ((2,) if problem.has("means") else (4, 2))]
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, LrnProblem)
        strip, pack = config["strip"], config["along"] * config["vec"]
        x, rows = problem.desc("x"), strip + problem.size - 1
        share = rows / (strip * problem.size) / (2 if pack == 1 else 3) if strip > 1 else 1.0  # of the loads; unrolled
        if strip == 8 and (problem.is_backward or x.dtype.num_bytes == 2):
            share *= 1.3  # too many registers, as measured on an H200
        used = x.shape[-2] / (-(-x.shape[-2] // strip) * strip) if strip > 1 and x.shape[-2] else 1.0
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * 0.5) + problem.flops * share / used / (device.fma_tflops * 1e5)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, LrnProblem)
        if problem.is_empty:
            return Build(())
        places: dict[str, tuple[TensorDesc, TensorArg | WorkspaceArg]] = {o.name: (o.desc, TensorArg(o.name)) for o in problem.operands}
        before, after = problem.before, problem.size - 1 - problem.before
        powers = {"k": problem.k, "exponent": -problem.beta}
        means, dmeans = (("means",), ("dmeans",)) if problem.has("means") else ((), ())
        if not problem.is_backward:
            steps = self._steps(problem, config, device, "y", ("x", *means, "y"), places, (before, after),
                                {"factor": problem.factor} | powers)
            return Build(tuple(steps))
        scratch, dx = Scratch(), problem.desc("dx")
        kind = dtype(_compute(problem))
        order = tuple(sorted(range(dx.rank), key=lambda i: abs(dx.strides[i]), reverse=True))
        dense = TensorDesc(kind, dx.shape, packed_strides(dx.shape, order))
        for name in ("share", "own"):
            places[name] = dense, scratch.take(dense.num_bytes)
        steps = self._steps(problem, config, device, "shares", ("x", *means, "dy", "own", "share"), places, (before, after),
                            {"factor": problem.factor, "steeper": -problem.beta - 1} | powers)
        steps += self._steps(problem, config, device, "dx", ("share", "x", *means, *dmeans, "own", "dx"), places, (after, before),
                             {"factor": -2 * problem.factor * problem.beta})
        return Build(tuple(steps), scratch.num_bytes)

    @staticmethod
    def _steps(problem: LrnProblem, config: EngineConfig, device: DeviceInfo, stage: str, names: tuple[str, ...],
               places: dict[str, tuple[TensorDesc, TensorArg | WorkspaceArg]], window: tuple[int, int],
               numbers: dict[str, float]) -> list[Step]:
        """The launches of a stage over the operands `names`, the walked one first, what is written last."""
        x, compute, strip, along = problem.desc("x"), _compute(problem), config["strip"], config["along"]
        vector = config["vec"]
        rows = {n: tuple(s * places[n][0].dtype.num_bytes for s in places[n][0].strides) for n in names}
        images = max(1, min(x.shape[0], (_LIMIT - 1) // prod(x.shape[1:])))
        wide = any(abs(s) * strip * along * vector >= _LIMIT for row in rows.values() for s in row)
        moves, extents = rows, x.shape[1:]
        if strip > 1:
            moves = {n: (row[0], row[1] * vector, *row[2:-2], row[-2] * strip, row[-1] * along) for n, row in rows.items()}
            extents = (extents[0] // vector, *extents[1:-2], -(-extents[-2] // strip), extents[-1] // along)
        walked = (names[0], "means") if stage != "dx" and problem.has("means") else names[:1]
        beside = all(places[n][0].strides[-1] == 1 for n in walked)
        steps = []
        for begin in range(0, x.shape[0], images):
            digits = Digits(("n", "c", *(f"i{a}" for a in range(x.rank - 2))), (min(images, x.shape[0] - begin), *extents), moves)
            digits = digits.ordered_for(names[-1])
            consts = WithinConsts(x.dtype.name, compute, places[names[0]][0].dtype.name, stage, *window, x.rank - 2, digits.consts(wide),
                                  problem.has("means"), strip, strip > 1 and beside, along, vector)
            args = []
            for name in names:
                place = places[name][1]
                args.append(Arg(f"ptr_{name}", "u64", replace(place, byte_offset=place.byte_offset + begin * rows[name][0])))
            args += [Arg("num_threads", "u32", digits.size), *digits.args(wide)]
            args += [Arg(f"extent{a}", "u32", extent) for a, extent in enumerate(x.shape[2:])]
            args += [Arg(f"step_{n}", "s64" if wide else "s32", rows[n][-2]) for n in names if strip > 1]
            args += [Arg(name, compute, value) for name, value in numbers.items()]
            steps.append(Step.of("lrn/within", problem.op, Target.for_arch(device.arch), THREADS, args, consts, -(-digits.size // THREADS),
                                 min_ctas_per_sm=1 if strip == 1 or compute != "f32" else 4 if vector == 1 else 3,
                                 suffix=f"{stage}_{consts.dtype}_s{strip}a{along}v{vector}"))
        return steps

    @staticmethod
    def _has_packs(problem: LrnProblem) -> bool:
        """Whether rows fall into whole packs in every operand: what lies in the workspace is as the gradient."""
        x, used = problem.desc("x"), [o.desc for o in problem.operands]
        if x.shape[-1] % PACK:
            return False
        if problem.is_backward and abs(problem.desc("dx").strides[-1]) != 1:
            return False
        return all(d.strides[-1] == 1 and d.align % (PACK * d.dtype.num_bytes) == 0
                   and all(s % PACK == 0 for s, extent in zip(d.strides[:-1], d.shape, strict=False) if extent > 1) for d in used)


def _compute(problem: LrnProblem) -> str:
    return "f64" if problem.desc("x").dtype.name == "f64" else "f32"


def _packs(problem: LrnProblem, run: int) -> bool:
    """True if every operand's runs of channels lie side by side, aligned."""
    def fits(d: TensorDesc) -> bool:
        piece = min(16, run * d.dtype.num_bytes)
        others = [s * d.dtype.num_bytes for i, (n, s) in enumerate(zip(d.shape, d.strides, strict=True)) if i != 1 and n > 1]
        return d.shape[1] % run == 0 and d.strides[1] == 1 and d.align >= piece and all(s % piece == 0 for s in others)

    size = problem.desc("x").dtype.num_bytes
    return (size >= 4 or run * size <= 16) and all(fits(o.desc) for o in problem.operands)


ENGINES: dict[str, tuple[Engine, ...]] = {op: (LrnEngine(), WithinEngine()) for op in ("lrn", "lrn_backward")}
ENGINES |= {op: (WithinEngine(),) for op in ("divisive_norm", "divisive_norm_backward")}
