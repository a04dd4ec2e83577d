"""Quantisation with given scales and dequantisation: a thread has up to sixteen neighbours, and divides by the one scale they share.
Numbers are written 16 bytes a thread, so that a warp's are side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.quantize import Kind, QuantizeProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, ArgValue, Build, Engine, EngineConfig, ScalarArg, Step, Support, TensorArg, refuse
from .digits import DigitConsts, Digits, ceil_div
from .quantize_space import NF4, Space, halved, known_shifts, moves_packs, near_operands, nf4_cells

THREADS = 256
_STORE_BYTES = 16  # of a thread's neighbours, which those of its neighbours follow: parts of sectors are written at half the pace
LIMIT = 2**31
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class QuantizeMapConsts:
    """op: of the problem. vec: numbers a pack. vector: they lie together, aligned, and are all there; else they are guarded and their
    steps are parameters. packs: a thread's. wide: the type of numbers. scale, zero_type: the types of scales ("e8m0": codes of powers of
    two) and zero points, "" without; *_each: one an element. bounds: names of the indices compared with an extent; run: that of the
    pack's. shares_words: a pack begins at a multiple of four of the order of elements. is_backward: the first CTA takes the last packs."""

    op: str
    kind: Kind
    vec: int
    vector: bool
    wide: str
    digits: DigitConsts
    scale: str
    scale_each: bool
    zero_type: str
    zero_each: bool
    has_global: bool
    saturate: bool
    stochastic: bool
    shares_words: bool
    bounds: tuple[str, ...]
    run: str
    shifts: tuple[tuple[str, int], ...]
    near: tuple[str, ...]
    packs: int = 1
    is_backward: bool = False

    nf4_numbers: ClassVar[tuple[float, ...]] = NF4

    @property
    def nf4_cells(self) -> tuple[tuple[float, int], ...]:
        return nf4_cells()

    @property
    def zero(self) -> bool:
        return bool(self.zero_type)

    @property
    def num_words(self) -> int:
        return max(1, self.vec * self.kind.bits // 32)

    @property
    def operands(self) -> tuple[str, ...]:
        """What has an address a thread."""
        names = {"quantize": ("x", "y"), "dequantize": ("x", "y"), "fake_quantize": ("x", "y"),
                 "fake_quantize_backward": ("x", "dy", "dx")}[self.op]
        return (*names, *(["scale"] if self.scale else []), *(["zero_point"] if self.zero else []))


@dataclass(frozen=True)
class Walk:
    """vec numbers a thread along the last of the digits."""

    digits: Digits  # in half bytes, the last one of packs
    vec: int
    vector: bool
    steps: dict[str, int]  # half bytes from one number to the next
    bounds: tuple[tuple[str, int], ...]
    run: str


def walk_of(problem: QuantizeProblem, space: Space, most: int) -> Walk:
    """The digits of a thread's numbers, at most `most` of them."""
    kind, codes = problem.kind, problem.codes
    tensors = {o.name: o.desc for o in problem.operands if o.desc.shape == problem.shape or o.name == codes}
    for name in ("scale", "zero_point", "global_scale", "state"):
        tensors.pop(name, None)
    scales = {n: problem.desc(n) for n in ("scale", "zero_point") if problem.has(n)}
    packed = kind.is_packed and codes is not None
    if packed or problem.swizzled:  # the last dimension's last digit stays last, as codes of four bits lie along it
        own = max(i for i, d in enumerate(space.digits) if d.dim == len(problem.shape) - 1)
        lead = [d for i, d in enumerate(space.digits) if i != own]
        order = space.rows(lead, tensors, scales, "scale" if problem.swizzled else problem.wide)
        rows = space.rows([*(lead[int(n[1:])] for n in order.names), space.digits[own]], tensors, scales)
    else:
        rows = space.rows(space.digits, tensors, scales, problem.wide)
    rows = rows.collapsed("d")
    if packed and problem.shape[-1] == 1 and not problem.swizzled:  # bytes lie along the last dimension, even of one number
        halves = {codes: 1, "index": 2}
        rows = Digits((*rows.names, "last"), (*rows.extents, 1), {n: (*row, halves.get(n, 0)) for n, row in rows.strides.items()})
    steps = {n: row[-1] for n, row in rows.strides.items()}
    width = rows.extents[-1]
    ragged = [(f"at{dim}", problem.shape[dim]) for dim in space.ragged]
    run = next((n for n, _ in ragged if steps[n]), "")
    for vec in (v for v in (16, 8, 4, 2) if v <= most):
        whole = width % vec == 0 and all(bound % vec == 0 for n, bound in ragged if n == run)
        if whole and all(_moves(tensors[n], rows, n, steps[n], vec, kind, n == codes) for n in tensors):
            return Walk(_packs(rows, vec), vec, True, steps, tuple(ragged), run)
    vec = 2 if packed else 1
    if not run:
        run, rows = "run", Digits(rows.names, rows.extents, {**rows.strides, "run": (0,) * (len(rows.extents) - 1) + (2,)})
        ragged.append((run, width))
        steps["run"] = 2
    return Walk(_packs(rows, vec), vec, False, steps, tuple(ragged), run)


def _moves(desc: TensorDesc, rows: Digits, name: str, step: int, vec: int, kind: Kind, is_codes: bool) -> bool:
    halves = kind.bits // 4 if is_codes else 2 * desc.dtype.num_bytes
    return moves_packs(desc, rows.strides[name][:-1], rows.extents[:-1], step, vec * halves, halves)


def _packs(rows: Digits, vec: int) -> Digits:
    return Digits(rows.names, (*rows.extents[:-1], ceil_div(rows.extents[-1], vec)),
                  {n: (*row[:-1], row[-1] * vec) for n, row in rows.strides.items()})


class QuantizeMap(Engine):
    id = "quantize.map"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, QuantizeProblem)
        if device.capability < MIN_CAPABILITY:
            return refuse("needs sm_80")
        threads = self._walk(problem, 16).digits.size
        return SUPPORTED if threads < LIMIT else refuse(f"{threads} packs of numbers (at most {LIMIT - 1})")

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, QuantizeProblem)
        best = self._walk(problem, 8 if problem.op == "quantize" else _STORE_BYTES // problem.desc(problem.wide).dtype.num_bytes)
        if not _takes_packs(problem, best):
            return (EngineConfig.of(vec=best.vec, packs=1),)
        found = [EngineConfig.of(vec=best.vec, packs=packs) for packs in ((1, 2, 4) if best.vec == 8 else (1, 2, 4, 8))]
        fills = best.digits.size >= 2 * THREADS * 8 * device.num_sms  # as many threads as there is room for, with two packs each
        wanted = 2 if fills else 1
        found = sorted(found, key=lambda config: (config["packs"] != wanted, config["packs"]))
        if problem.op != "quantize" or self._walk(problem, 16).vec < 16:
            return tuple(found)
        # neighbours share the work on their scale, and 16 codes are written as one
        wider = EngineConfig.of(vec=16, packs=1)
        return (wider, *found) if fills else (*found, wider)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, QuantizeProblem)
        pace = 1.1 if self._walk(problem, config["vec"]).vector else 4.0
        return 2.0 + pace * problem.num_bytes / (device.bandwidth_gbs * 1e3)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, QuantizeProblem)
        return Build(()) if problem.is_empty else Build((map_step(problem, self._walk(problem, config["vec"]), device, config["packs"]),))

    def _walk(self, problem: QuantizeProblem, most: int) -> Walk:
        return walk_of(problem, Space.of(problem, problem.desc("scale") if problem.has("scale") else None), most)


def target_of(device: DeviceInfo) -> Target:
    """Conversions of 8-bit floats came with PTX 7.8."""
    return Target.for_arch(device.arch, (7, 8) if device.capability >= (9, 0) else (7, 0))


def _takes_packs(problem: QuantizeProblem, walk: Walk) -> bool:
    """Whether a thread may have several packs: none is compared with an extent, and no other thread's is read after it was written."""
    if not walk.vector or walk.bounds or problem.stochastic or problem.aliases:
        return False
    return not (problem.has("scale") and walk.steps["scale"] or problem.has("zero_point") and walk.steps["zero_point"])


def map_step(problem: QuantizeProblem, walk: Walk, device: DeviceInfo, packs: int = 1, is_backward: bool = False,
             follows: bool = False) -> Step:
    rows = halved(walk.digits).collapsed("d")
    zero = problem.desc("zero_point").dtype.name if problem.has("zero_point") else ""
    scale = ""
    if problem.has("scale"):
        scale = problem.scale_format if problem.scale_format != "f32" else problem.desc("scale").dtype.name
    needed = {n for n, _ in walk.bounds} | ({"index"} if problem.stochastic else set())
    strides = {n: row for n, row in rows.strides.items() if problem.has(n) or n in needed}
    rows = Digits(rows.names, rows.extents, strides)
    shares = walk.vector and walk.vec % 4 == 0 and walk.steps["index"] == 2 and all(s % 4 == 0 for s in rows.strides.get("index", ()))
    consts = QuantizeMapConsts(problem.op, problem.kind, walk.vec, walk.vector, problem.desc(problem.wide).dtype.name, rows.consts(), scale,
                               bool(scale and walk.steps["scale"]), zero, bool(zero and walk.steps["zero_point"]),
                               problem.has("global_scale"), problem.saturate, problem.stochastic, shares,
                               tuple(n for n, _ in walk.bounds), walk.run,
                               tuple(known_shifts(rows).items()), near_operands(rows), packs, is_backward)
    values: dict[str, ArgValue] = {n: TensorArg(n) if problem.has(n) else 0 for n in strides}
    args = [Arg(f"ptr_{n}", "u64", value) for n, value in values.items()]
    if consts.has_global:
        args.append(Arg("ptr_global", "u64", TensorArg("global_scale")))
    if problem.stochastic:
        args += [Arg("ptr_state", "u64", TensorArg("state"))] if problem.has("state") else [Arg(n, "u64", ScalarArg(n))
                                                                                            for n in ("seed", "offset")]
    args += [Arg("num_threads", "u32", rows.size), *rows.args(consts.digits.wide)]
    args += [Arg(f"bound_{n}", "u32", bound) for n, bound in walk.bounds]
    each = {"scale": consts.scale_each, "zero_point": consts.zero_each}
    names = [n for n in consts.operands if not walk.vector or each.get(n)]
    args += [Arg(f"step_{n}", "s64", walk.steps[n] * (2 if problem.kind.is_packed and n == problem.codes else 1) // 2) for n in names]
    if problem.stochastic and not consts.shares_words:
        args.append(Arg("step_index", "s64", walk.steps["index"] // 2))
    return Step.of("quantize/map", problem.op, target_of(device), THREADS, args, consts, ceil_div(rows.size, THREADS * packs),
                   follows=follows, suffix=f"{problem.kind.name}_{consts.wide}")


ENGINES: dict[str, tuple[Engine, ...]] = {op: (QuantizeMap(),) for op in ("quantize", "dequantize", "fake_quantize",
                                                                         "fake_quantize_backward")}
