"""Row-wise engines: softmax, its gradient, cross-entropy. A row belongs to one thread, a part of a warp, a warp, a CTA or a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ..device import DeviceInfo
from ..dtypes import F32, F64
from ..ops.base import Problem
from ..ops.loss import CrossEntropyProblem, SoftmaxProblem
from ..tensor import TensorDesc
from .base import Arg, Build, Engine, EngineConfig, Scratch, Step, TensorArg, WorkspaceArg
from .reduce_tree import Located, reduction_steps, state_steps
from .rows import RowConsts, RowEngine, Rows


@dataclass(frozen=True, slots=True)
class SoftmaxConsts:
    rows: RowConsts
    is_log: bool


class SoftmaxEngine(RowEngine):
    """Softmax and log-softmax over any dimension."""

    id = "softmax.row"

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, SoftmaxProblem)
        return Rows.of(problem.desc("x").shape, (problem.axis,), {n: problem.desc(n) for n in ("x", "y")})

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, SoftmaxProblem)
        if problem.is_empty:
            return Build(())
        rows = self.rows(problem)
        consts = SoftmaxConsts(self.row_consts(rows, config, 2), problem.is_log)
        return Build((self.row_step("rowwise/softmax", consts, problem.op, rows, config, device),))


class SoftmaxBackwardEngine(RowEngine):
    """The gradient of softmax from its result."""

    id = "softmax_backward.row"
    held_operands = ("dy", "y")
    held = 2

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, SoftmaxProblem)
        return Rows.of(problem.desc("dy").shape, (problem.axis,), {n: problem.desc(n) for n in ("dy", "y", "dx")})

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, SoftmaxProblem)
        if problem.is_empty:
            return Build(())
        rows = self.rows(problem)
        consts = SoftmaxConsts(self.row_consts(rows, config, 1), problem.is_log)
        return Build((self.row_step("rowwise/softmax_backward", consts, problem.op, rows, config, device),))


@dataclass(frozen=True, slots=True)
class CrossEntropyConsts:
    """reduction: "" writes each row's loss; "plain", "counted" and "weighted" leave it to be summed (counted: divided by the rows,
    weighted: by the targets' weights); the gradient is divided alike."""

    rows: RowConsts
    smoothing: float
    is_probability: bool
    reduction: str = ""
    is_log: bool = False  # logits hold logarithms of probabilities
    keeps_lse: bool = False  # the logarithms of the rows' sums go to the workspace, too


class _CrossEntropyEngine(RowEngine):
    held_operands: ClassVar[tuple[str, ...]] = ("logits",)
    row_operands: ClassVar[tuple[str, ...]] = ()  # besides logits: operands with a row of classes
    value_operands: ClassVar[tuple[str, ...]] = ()  # operands with a value a row

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, CrossEntropyProblem)
        full = ("logits", *(("target",) if problem.is_probability else ()), *self.row_operands)
        values = [n for n in self.value_operands if problem.has(n) and n not in full]
        if problem.reduction != "none":
            values = [n for n in values if n != "loss"]  # summed by further steps
        weight = {"weight": problem.desc("weight")} if problem.has("weight") else {}
        return Rows.of(problem.desc("logits").shape, (1,), {n: problem.desc(n) for n in full}, {n: problem.desc(n) for n in values}, weight)

    def consts(self, problem: CrossEntropyProblem, rows: Rows, config: EngineConfig, slots: int, reduction: str) -> CrossEntropyConsts:
        return CrossEntropyConsts(self.row_consts(rows, config, slots), problem.smoothing, problem.is_probability, reduction,
                                  problem.is_log)

    @staticmethod
    def extra(problem: CrossEntropyProblem) -> list[Arg]:
        return [] if problem.is_probability else [Arg("ignore_index", "s64", problem.ignore_index)]


class CrossEntropyEngine(_CrossEntropyEngine):
    """Losses of rows; for "mean" and "sum" further steps sum them in a fixed order."""

    id = "cross_entropy.row"
    value_operands = ("target", "loss")

    def reads_once(self, problem: Problem) -> bool:
        assert isinstance(problem, CrossEntropyProblem)
        return not problem.is_probability and not problem.smoothing

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, CrossEntropyProblem)
        if problem.is_empty:
            return Build(())
        scratch = Scratch()
        extra, reduction, levels = self.totals(problem, (problem.desc("loss"), TensorArg("loss")), device, scratch)
        steps = [self.loss_step(problem, config, device, extra, reduction)] if problem.rows else []
        return Build((*steps, *levels), scratch.num_bytes)

    def loss_step(self, problem: CrossEntropyProblem, config: EngineConfig, device: DeviceInfo, extra: Sequence[Arg],
                  reduction: str, lse: WorkspaceArg | None = None) -> Step:
        """The rows' losses; extra, reduction: of `totals`. lse: where the logarithms of the rows' sums go."""
        rows = self.rows(problem)
        consts = replace(self.consts(problem, rows, config, 4, reduction), keeps_lse=lse is not None)
        extra = [*self.extra(problem), *extra, *([Arg("ptr_lse", "u64", lse)] if lse is not None else [])]
        return self.row_step("rowwise/cross_entropy", consts, problem.op, rows, config, device, extra)

    def totals(self, problem: CrossEntropyProblem, loss: Located, device: DeviceInfo,
               scratch: Scratch) -> tuple[list[Arg], str, list[Step]]:
        """How rows' losses become one: where the first row leaves its part, CrossEntropyConsts.reduction, the steps that sum."""
        count, kind = problem.rows, F64 if problem.desc("logits").dtype is F64 else F32
        if problem.reduction == "none":
            return [], "", []
        losses = scratch.take(count * kind.num_bytes)
        extra = [Arg("ptr_losses", "u64", losses)]
        if problem.reduction == "mean" and not problem.is_probability:
            weights = scratch.take(count * kind.num_bytes)
            levels = state_steps(problem.op, [losses, weights], count, loss, "weighted_mean", kind.name, device, scratch)
            return [*extra, Arg("ptr_weights", "u64", weights)], "weighted", levels
        levels = reduction_steps(problem.op, (TensorDesc.packed(kind, (count,)), losses), loss, (0,), problem.reduction, device, scratch)
        return extra, "counted" if problem.reduction == "mean" else "plain", levels


class CrossEntropyBackwardEngine(_CrossEntropyEngine):
    """d_logits, softmax recomputed. A mean over class indices first sums the targets' weights, in a fixed order."""

    id = "cross_entropy_backward.row"
    most_threads = 256
    row_operands = ("d_logits",)
    value_operands = ("target", "d_loss")

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, CrossEntropyProblem)
        if problem.is_empty:
            return Build(())
        scratch = Scratch()
        if problem.reduction != "mean" or problem.is_probability:
            reduction = "counted" if problem.reduction == "mean" else ""
            return Build((self.gradient_step(problem, config, device, (), reduction),))
        steps, divisor = self.divisor_steps(problem, device, scratch)
        step = self.gradient_step(problem, config, device, [Arg("ptr_divisor", "u64", divisor)], "weighted")
        return Build((*steps, step), scratch.num_bytes)

    def gradient_step(self, problem: CrossEntropyProblem, config: EngineConfig, device: DeviceInfo, extra: Sequence[Arg],
                      reduction: str) -> Step:
        rows = self.rows(problem)
        consts = self.consts(problem, rows, config, 3, reduction)
        return self.row_step("rowwise/cross_entropy_backward", consts, problem.op, rows, config, device, [*self.extra(problem), *extra])

    def divisor_steps(self, problem: CrossEntropyProblem, device: DeviceInfo, scratch: Scratch) -> tuple[list[Step], WorkspaceArg]:
        """The steps that sum the weights of the targets that are not ignored, and where the sum is."""
        kind = F64 if problem.desc("logits").dtype is F64 else F32
        weights, divisor = scratch.take(problem.rows * kind.num_bytes), scratch.take(kind.num_bytes)
        step = self._weight_step(problem, device, [*self.extra(problem), Arg("ptr_weights", "u64", weights)])
        source, target = (TensorDesc.packed(kind, (problem.rows,)), weights), (TensorDesc.packed(kind, ()), divisor)
        return [step, *reduction_steps(problem.op, source, target, (0,), "sum", device, scratch)], divisor

    def _weight_step(self, problem: CrossEntropyProblem, device: DeviceInfo, extra: list[Arg]) -> Step:
        weight = {"weight": problem.desc("weight")} if problem.has("weight") else {}
        rows = Rows.of(problem.desc("logits").shape, (1,), {"logits": problem.desc("logits")}, {"target": problem.desc("target")}, weight)
        config = EngineConfig.of(lanes=1, vec=1, threads=128)
        return self.row_step("rowwise/target_weight", self.consts(problem, rows, config, 0, ""), problem.op, rows, config, device, extra)


class NllEngine(CrossEntropyEngine):
    """Reads one element a row."""

    id = "nll.row"

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        return (EngineConfig.of(lanes=1, vec=1, threads=128),)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, CrossEntropyProblem)
        return 5.0 + problem.rows * 64.0 / (device.bandwidth_gbs * 1e3)


class NllBackwardEngine(CrossEntropyBackwardEngine):
    """Writes -weight at each target, 0 elsewhere."""

    id = "nll_backward.row"

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        return tuple(c for c in super().configs(problem, device) if c["home"] != "shared")  # there is no row to hold


ENGINES: dict[str, tuple[Engine, ...]] = {
    "softmax": (SoftmaxEngine(),),
    "softmax_backward": (SoftmaxBackwardEngine(),),
    "cross_entropy": (CrossEntropyEngine(),),
    "cross_entropy_backward": (CrossEntropyBackwardEngine(),),
    "nll": (NllEngine(),),
    "nll_backward": (NllBackwardEngine(),),
}
