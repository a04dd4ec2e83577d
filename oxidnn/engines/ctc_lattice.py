"""CTC: the lattice of a sequence's alignments is walked frame by frame, by one CTA forwards and, for gradients, by another backwards.

Position 2i of the lattice is the blank before label i, 2i + 1 the label; a thread has `items` neighbouring pairs, and learns one number a
frame from the thread before it. The backward walk is the forward one of the reversed sequence. What each class expects of a frame is summed
by a further launch, a CTA a frame, along chains of equal labels: in one order, without atomics.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan

from ..codegen import elementary
from ..codegen.environment import f32_literal, f64_literal
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F32, F64
from ..ops.base import Problem
from ..ops.ctc import CtcProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, ArgValue, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .reduce_tree import reduction_steps
from .rows import power_of_two

_LIMIT = 2**31
_MOST_THREADS = {"f32": 512, "f64": 256}
_ITEMS = (1, 2, 4)
_GRADIENT_THREADS = 128


@dataclass(frozen=True, slots=True)
class CtcConsts:
    """dtype: of log_probs. compute: of the arithmetic; f32 logarithms are to the base 2. labels, frames_type, lengths: types of targets,
    input_lengths, target_lengths. ahead: frames loaded before they are needed. writes: what the walks leave: "loss", "losses" (to be
    reduced) and "lattice". share: d_loss is divided by the target's length and the number of sequences. gradient_of: type of d_loss, ""
    without."""

    dtype: str
    compute: str
    labels: str
    frames_type: str
    lengths: str
    items: int
    ahead: int
    is_concatenated: bool
    is_mean: bool
    zero_infinity: bool
    writes: tuple[str, ...] = ()
    gradient_of: str = ""

    @property
    def moves_offset(self) -> bool:
        """Whether numbers are counted from an offset that moves: f64 has digits enough."""
        return self.compute == "f32"

    @property
    def size(self) -> int:
        return 8 if self.compute == "f64" else 4

    def literal(self, value: float) -> str:
        return f64_literal(value) if self.compute == "f64" else f32_literal(value)

    @property
    def low(self) -> str:
        """The lowest finite number: in place of a maximum of -inf it keeps differences from being NaN."""
        return "0dFFEFFFFFFFFFFFFF" if self.compute == "f64" else "0fFF7FFFFF"

    @property
    def unit(self) -> str:
        """What a natural logarithm is multiplied with."""
        return self.literal(1.0 if self.compute == "f64" else elementary.LOG2E)

    @property
    def minus_back(self) -> str:
        """What makes a natural logarithm of a probability a loss again."""
        return self.literal(-1.0 if self.compute == "f64" else -elementary.LN2)

    @property
    def minus_inf(self) -> str:
        return self.literal(-inf)

    @property
    def inf(self) -> float:
        return inf

    @property
    def nan(self) -> str:
        return self.literal(nan)

    def power(self, dst: str, src: str) -> str:
        """dst = the number whose logarithm is src."""
        return f"    ex2.approx.ftz.f32 {dst}, {src};" if self.compute == "f32" else self._scope("exp", dst, src)

    def logarithm(self, dst: str, src: str) -> str:
        return f"    lg2.approx.ftz.f32 {dst}, {src};" if self.compute == "f32" else self._scope("log", dst, src)

    @staticmethod
    def _scope(function: str, dst: str, src: str) -> str:
        emit = elementary.Emitter("%ef_")
        result = getattr(elementary, f"{function}_f64")(emit, src)
        lines = [*emit.declarations(), *emit.lines, f"mov.f64 {dst}, {result};"]
        return "\n".join(["    {", *("        " + line for line in lines), "    }"])


def _most_threads(problem: Problem) -> int:
    return _MOST_THREADS["f64" if problem.desc("log_probs").dtype is F64 else "f32"]


def _byte_strides(desc: TensorDesc) -> tuple[int, ...]:
    return tuple(s * desc.dtype.num_bytes for s in desc.strides)


class CtcLattice(Engine):
    """Targets of up to 2,047 labels (1,023 in f64) that can be aligned. Workspace of gradients: 4 numbers of the arithmetic's type (f32, or
    f64 for f64) for each sequence, frame and label (counting one more)."""

    id = "ctc.lattice"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, CtcProblem)
        most = _most_threads(problem) * _ITEMS[-1] - 1
        if problem.most_labels > most:
            return refuse(f"targets of up to {problem.most_labels} labels (at most {most})")
        if problem.sequences * max(problem.frames, 1) >= _LIMIT:
            return refuse(f"{problem.sequences} sequences of {problem.frames} frames (at most {_LIMIT - 1} frames in all)")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, CtcProblem)
        found = []
        for items in _ITEMS:
            threads = max(32, power_of_two(-(-(problem.most_labels + 1) // items)))
            if threads <= _most_threads(problem):
                found.append(EngineConfig.of(items=items, threads=threads))
            if threads == 32:
                break
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """A frame takes the latency of two logarithms, of the exchange between warps, and of the items that follow one another."""
        assert isinstance(problem, CtcProblem)
        frame = 0.12 + 0.04 * config["items"] + (0.05 + 0.01 * config["threads"] / 32 if config["threads"] > 32 else 0.0)
        return 5.0 + problem.frames * frame * (4.0 if problem.desc("log_probs").dtype is F64 else 1.0)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, CtcProblem)
        if problem.is_empty:
            return Build(())
        p, scratch, target = problem, Scratch(), Target.for_arch(device.arch)
        log_probs, targets = p.desc("log_probs"), p.desc("targets")
        kind = F64 if log_probs.dtype is F64 else F32
        wants_loss, wants_gradient = p.has("loss"), p.has("d_logits")
        has_lattice = wants_gradient and p.desc("d_logits").numel > 0
        pitch, sequences, frames = p.most_labels + 1, p.sequences, p.frames
        cells = [scratch.take(sequences * frames * pitch * kind.num_bytes) for _ in range(4)] if has_lattice else []
        chains = [scratch.take(sequences * n * 8) for n in (pitch, 1, frames, frames)] if has_lattice else []
        levels: list[Step] = []
        loss: ArgValue = TensorArg("loss")
        if wants_loss and p.reduction != "none":
            loss = scratch.take(sequences * kind.num_bytes)
            source, result = (TensorDesc.packed(kind, (sequences,)), loss), (p.desc("loss"), TensorArg("loss"))
            levels = reduction_steps(p.op, source, result, (0,), p.reduction, device, scratch)
        if not sequences:
            return Build(tuple(levels), scratch.num_bytes)

        writes = (("loss" if p.reduction == "none" else "losses",) if wants_loss else ()) + (("lattice",) if has_lattice else ())
        consts = CtcConsts(log_probs.dtype.name, kind.name, targets.dtype.name, p.desc("input_lengths").dtype.name,
                           p.desc("target_lengths").dtype.name, config["items"], 2 if kind is F64 else 4, targets.rank == 1,
                           p.reduction == "mean", p.zero_infinity, writes, p.desc("d_loss").dtype.name if p.has("d_loss") else "")
        strides = {f"stride_{axis}": s for axis, s in zip("tnc", _byte_strides(log_probs), strict=True)}
        strides["stride_sequence"], strides["stride_label"] = (0,) * (2 - targets.rank) + _byte_strides(targets)
        strides["stride_frames"], = _byte_strides(p.desc("input_lengths"))
        strides["stride_lengths"], = _byte_strides(p.desc("target_lengths"))
        shared = [Arg("ptr_log_probs", "u64", TensorArg("log_probs")), Arg("ptr_targets", "u64", TensorArg("targets")),
                  Arg("ptr_input_lengths", "u64", TensorArg("input_lengths")),
                  Arg("ptr_target_lengths", "u64", TensorArg("target_lengths")),
                  *(Arg(name, "s64", value) for name, value in strides.items()),
                  Arg("num_frames", "u32", frames), Arg("num_labels", "u32", targets.shape[-1]), Arg("num_classes", "u32", p.classes),
                  Arg("blank", "u32", p.blank), Arg("pitch", "u32", pitch)]
        names = ("blanks_before", "labels_before", "blanks_after", "labels_after", "chains", "totals", "offsets_before", "offsets_after")
        lattice = [Arg(f"ptr_{n}", "u64", piece) for n, piece in zip(names, [*cells, *chains], strict=False)]
        steps = []
        if wants_loss or has_lattice:
            args = [*shared, *lattice]
            if wants_loss:
                step = _byte_strides(p.desc("loss"))[0] if p.reduction == "none" else kind.num_bytes
                args += [Arg("ptr_loss", "u64", loss), Arg("stride_loss", "s64", step)]
            steps.append(Step.of("ctc/lattice", p.op, target, config["threads"], args, consts, (sequences, 3 if has_lattice else 1, 1),
                                 suffix=f"{log_probs.dtype.name}_i{config['items']}"))
        if has_lattice:
            args = [*shared, *lattice, Arg("ptr_d_logits", "u64", TensorArg("d_logits"))]
            args += [Arg(f"stride_d_{axis}", "s64", s) for axis, s in zip("tnc", _byte_strides(p.desc("d_logits")), strict=True)]
            args.append(Arg("share", kind.name, 1.0 / sequences if p.reduction == "mean" else 1.0))
            if p.has("d_loss"):
                args += [Arg("ptr_d_loss", "u64", TensorArg("d_loss")), Arg("stride_d_loss", "s64", sum(_byte_strides(p.desc("d_loss"))))]
            threads = max(32, min(_GRADIENT_THREADS, power_of_two(max(p.classes, pitch))))
            steps.append(Step.of("ctc/gradient", p.op, target, threads, args, consts, sequences * frames,
                                 dynamic_smem=-(-pitch * kind.num_bytes // 16) * 16, suffix=log_probs.dtype.name))
        return Build((*steps, *levels), scratch.num_bytes)


ENGINES: dict[str, tuple[Engine, ...]] = {op: (CtcLattice(),) for op in ("ctc_loss", "ctc_loss_backward")}
