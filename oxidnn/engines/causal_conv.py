"""Causal depthwise convolution: a thread has a pack of channels and a segment of neighbouring positions, and slides its taps over them.

Where positions lie innermost neighbouring threads have neighbouring segments, else neighbouring channels. For gradients a warp goes over
segments likewise, or a thread walks down a strip of positions; what it sums for the filter goes to the workspace, and a tree adds it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from ..codegen.pointwise import Expression
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import dtype
from ..ops.base import Problem
from ..ops.causal_conv import MAX_UPDATE, CausalConvProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .digits import DigitConsts, Digits, ceil_div, power_of_two
from .reduce_tree import reduction_steps

THREADS = 128
_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class CausalConsts:
    """types: of the operands by name. vector: channels of a pack. segment: positions, no fewer than width - 1 unless it is all of the
    sequence (the gradient's walk: width of them, again and again). along: neighbouring threads have neighbouring segments. dense: the
    sequences whose positions lie innermost; packed: those moved in packs of them; dealt: the result, if positions are
    dealt out to the lanes before they are stored. is_whole: segments fill the sequence. length: of the
    sequence, if it is one segment, else 0. ahead: the walk loads rows ahead. blocks: the filter and states, where they lie in one
    piece for a pack of channels."""

    types: tuple[tuple[str, str], ...]
    compute: str
    width: int
    vector: int
    segment: int
    along: bool
    dense: tuple[str, ...]
    packed: tuple[str, ...]
    dealt: tuple[str, ...]
    is_whole: bool
    length: int
    ahead: bool
    blocks: tuple[str, ...]
    activation: Expression | None
    is_brief: bool
    final: str
    digits: DigitConsts

    def type_of(self, name: str) -> str:
        return dict(self.types).get(name, "")

    def activate(self, acc: str) -> str:
        """PTX: acc = activation(acc)."""
        assert self.activation is not None
        return self.activation.lower({"x": acc}, [acc], self.compute, self.is_brief)

    def pull_back(self, acc: str, gradient: str) -> str:
        """PTX: gradient *= the activation's derivative at acc."""
        assert self.activation is not None
        return self.activation.differentiate("x").lower({"x": acc, "dy": gradient}, [gradient], self.compute, self.is_brief)


class CausalConvEngine(Engine):
    """Forward, a step of decoding, and gradients; any layout."""

    id = "causal_conv1d.walk"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        p = problem
        assert isinstance(p, CausalConvProblem)
        x = p.sequences["x"]
        if x.shape[0] * x.shape[1] * (ceil_div(x.shape[2], 8) + 32) >= _LIMIT or x.shape[2] >= _LIMIT - 64:
            return refuse(f"{x.shape[0]} x {x.shape[1]} sequences of {x.shape[2]} elements are more than 2^31 segments of 8")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        p = problem
        assert isinstance(p, CausalConvProblem)
        x = p.sequences["x"]
        least = max(4, power_of_two(p.width - 1))
        segments = [s for s in (8, 16, 4) if s >= least] or [least]
        if not p.is_backward and 1 <= x.shape[2] <= MAX_UPDATE:
            segments = [x.shape[2]]
        found = []
        for vector in _packs(p):
            if p.is_backward and not _is_along(p):
                found += [EngineConfig.of(vec=vector, seg=p.width)] if vector * p.width <= 32 or vector == 1 else []
                continue
            fitting = [s for s in segments if vector * (s + 2 * p.width) <= 256] or segments[-1:]
            found += [EngineConfig.of(vec=vector, seg=s) for s in fitting]
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, CausalConvProblem)
        x, vector, segment = p.sequences["x"], config["vec"], config["seg"]
        if p.final and segment == x.shape[2]:  # states take as long as the rest
            cost = 1.1 if _is_block(p.desc(p.final), vector) else 1.3 + 0.5 * log2(vector)
        elif not _is_along(p):  # packs of 8 bytes do best
            cost = 1.3 + 0.1 * abs(log2(vector * x.dtype.num_bytes / 8)) + 0.01 * segment
        elif x.shape[2] % segment == 0 and _in_packs(x, segment):
            cost = 1.15 + 0.1 * abs(log2(segment * x.dtype.num_bytes / 32))
        else:
            cost = 1.7 + 0.2 * abs(log2(segment / 8))
        return 3.0 + p.num_bytes / (device.bandwidth_gbs * 1e3) * cost * (1.4 if p.is_backward else 1.0)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, CausalConvProblem)
        if p.is_empty:
            return Build(())
        sequences, vector, segment, along = p.sequences, config["vec"], config["seg"], _is_along(p)
        batch, channels, length = sequences["x"].shape
        kind = p.accumulator
        segments = max(1, ceil_div(length, segment))
        # A thread's segments lie side by side, or (along) a warp's length apart.
        lanes = 32 if along else 1
        result = "dx" if p.is_backward else "y"
        aligned = length % segment == 0 and _in_packs(sequences[result], segment)
        known = length if segments == 1 and length == segment and not p.is_backward else 0
        dealt = (result,) if along and not known and sequences[result].strides[2] == 1 and not aligned else ()
        packs, rounds = channels // vector, 1
        if p.is_backward:
            wanted = 2048 * device.num_sms if not device.is_emulated else 64
            strips = max(1, min(ceil_div(segments, lanes), wanted // max(1, batch * packs * lanes)))
            rounds = ceil_div(segments, lanes * strips)
            strips = ceil_div(segments, lanes * rounds)
        else:
            lanes = lanes if dealt else 1
            strips = ceil_div(segments, lanes)
        names = ("b", "c", "strip", *(("lane",) if lanes > 1 else ())) if along else ("b", "strip", "c")
        counts = {"b": batch, "c": packs, "strip": strips, "lane": lanes}
        digits = Digits(names, tuple(counts[n] for n in names), {})
        blocks = tuple(n for n in ("w", "state", p.final) if n and p.has(n) and _is_block(p.desc(n), vector))
        ahead = kind.name == "f32" and (vector > 1 or p.desc("x").dtype.name == "f32")
        is_whole = length > 0 and length % segment == 0 and not dealt
        dense = tuple(n for n, d in sequences.items() if d.strides[2] == 1 and vector == 1)
        packed = tuple(n for n in dense if is_whole and _in_packs(sequences[n], segment))
        consts = CausalConsts(tuple((o.name, o.desc.dtype.name) for o in p.operands), kind.name, p.width, vector, segment, along, dense,
                              packed, dealt, is_whole, known, ahead, blocks, p.activation, p.desc("x").dtype.num_bytes == 2, p.final,
                              digits.consts())
        args = [Arg("num_threads", "u32", digits.size), Arg("length", "u32", length)]
        states = [n for n in ("state", p.final, "d_final_state", "dstate") if n and p.has(n)]
        steps_of = dict(sequences) | {n: p.desc(n) for n in states}
        for name, desc in steps_of.items():
            args.append(Arg(f"ptr_{name}", "u64", TensorArg(name)))
            args += [Arg(f"{name}_{axis}", "s64", s * desc.dtype.num_bytes) for axis, s in zip("bcl", desc.strides, strict=True)]
        for name in ("w", "bias"):
            if p.has(name):
                desc = p.desc(name)
                args.append(Arg(f"ptr_{name}", "u64", TensorArg(name)))
                args += [Arg(f"{name}_{axis}", "s64", s * desc.dtype.num_bytes) for axis, s in zip("ck", desc.strides, strict=False)]
        scratch = Scratch()
        steps: list[Step] = []
        row = p.width + 1
        if p.is_backward:
            partial = scratch.take(batch * strips * channels * row * kind.num_bytes)
            args += [Arg("ptr_partial", "u64", partial), Arg("rounds", "u32", rounds), Arg("strips", "u32", strips),
                     Arg("channels", "u32", channels)]
        if digits.size:
            args += digits.args(False)
            template = ("conv/causal_gradient" if along else "conv/causal_gradient_walk") if p.is_backward else "conv/causal"
            steps.append(Step.of(template, p.op, Target.for_arch(device.arch), THREADS, args, consts, ceil_div(digits.size, THREADS),
                                 suffix=f"{p.desc('x').dtype.name}_w{p.width}_v{vector}_s{segment}"))
        if p.is_backward:
            parts = batch * strips
            taps = TensorDesc(dtype(kind.name), (parts, channels, p.width), (channels * row, row, 1))
            steps += reduction_steps(p.op, (taps, partial), (p.desc("dw"), TensorArg("dw")), (0,), "sum", device, scratch)
            if p.has("dbias"):
                sums = TensorDesc(dtype(kind.name), (parts, channels), (channels * row, row))
                at = type(partial)(partial.byte_offset + p.width * kind.num_bytes)
                steps += reduction_steps(p.op, (sums, at), (p.desc("dbias"), TensorArg("dbias")), (0,), "sum", device, scratch)
        return Build(tuple(steps), scratch.num_bytes)


def _is_along(p: CausalConvProblem) -> bool:
    x = p.sequences["x"]
    return abs(x.strides[2]) < abs(x.strides[1]) and x.shape[2] > 1


def _in_packs(desc: TensorDesc, count: int) -> bool:
    """Whether runs of `count` positions, as they follow one another, are aligned."""
    size = desc.dtype.num_bytes
    unit = min(16, count * size)
    return desc.align % unit == 0 and all(s * size % unit == 0 for s, n in zip(desc.strides[:2], desc.shape[:2], strict=True) if n > 1)


def _is_block(desc: TensorDesc, vector: int) -> bool:
    """Whether what packs of channels have of (..., D, elements) lies densely, aligned."""
    *rows, count = desc.shape
    taken = vector * count * desc.dtype.num_bytes
    piece = min(16, taken)
    return (desc.strides[-2:] == (count, 1) and (taken % 16 == 0 or taken in (2, 4, 8)) and desc.align % piece == 0
            and (len(rows) == 1 or rows[0] == 1 or desc.strides[0] * desc.dtype.num_bytes % piece == 0))


def _packs(p: CausalConvProblem) -> list[int]:
    """Channels that a thread may take, most first."""
    sequences: Mapping[str, TensorDesc] = p.sequences
    if _is_along(p):
        return [1]
    found = []
    for vector in (8, 4, 2):
        fits = sequences["x"].shape[1] % vector == 0
        for desc in sequences.values():
            size = desc.dtype.num_bytes
            unit = vector * size
            fits = fits and desc.strides[1] == 1 and unit <= 16 and desc.align % unit == 0
            fits = fits and all(desc.strides[i] * size % unit == 0 for i in (0, 2) if desc.shape[i] > 1)
        found += [vector] if fits else []
    return [*found, 1]


ENGINES: dict[str, tuple[Engine, ...]] = {
    op: (CausalConvEngine(),) for op in ("causal_conv1d", "causal_conv1d_update", "causal_conv1d_backward")}
