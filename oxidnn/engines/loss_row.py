"""Row-wise engines: softmax, its gradient, and softmax cross-entropy. A row belongs to one thread, a part of a warp, a warp or a CTA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..codegen.environment import f32_literal, f64_literal
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.loss import CrossEntropyProblem, SoftmaxProblem
from .base import Arg, Build, Engine, EngineConfig, Step, TensorArg, WorkspaceArg
from .rows import RowEngine, Rows, compute_type

_SUM_CHUNK = 4096  # values a CTA sums


@dataclass(frozen=True, slots=True)
class SumConsts:
    """One level of the sum over rows; see rowwise/loss_sum."""

    dtype: str
    compute: str
    arrays: int
    chunk: int
    is_last: bool
    divide: str = ""

    @property
    def compute_bytes(self) -> int:
        return 8 if self.compute == "f64" else 4

    @property
    def zero(self) -> str:
        return f64_literal(0.0) if self.compute == "f64" else f32_literal(0.0)


class SoftmaxEngine(RowEngine):
    """Softmax and log-softmax over any dimension."""

    id = "softmax.row"

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, SoftmaxProblem)
        return Rows({n: problem.desc(n) for n in ("x", "y")}, problem.axis, ("x", "y"))

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, SoftmaxProblem)
        if problem.is_empty:
            return Build(())
        step = self.row_step("rowwise/softmax", problem, config, device, self.rows(problem), {n: TensorArg(n) for n in ("x", "y")}, 2,
                             is_log=problem.is_log)
        return Build((step,))


class SoftmaxBackwardEngine(RowEngine):
    """The gradient of softmax from its result."""

    id = "softmax_backward.row"
    held = 2

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, SoftmaxProblem)
        names = ("dy", "y", "dx")
        return Rows({n: problem.desc(n) for n in names}, problem.axis, names)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, SoftmaxProblem)
        if problem.is_empty:
            return Build(())
        step = self.row_step("rowwise/softmax_backward", problem, config, device, self.rows(problem),
                             {n: TensorArg(n) for n in ("dy", "y", "dx")}, 1, is_log=problem.is_log)
        return Build((step,))


def _sum_steps(problem: CrossEntropyProblem, device: DeviceInfo, compute: str, count: int, sources: list[int], free: int, result: Any,
               result_dtype: str, divide: str) -> tuple[list[Step], int]:
    """Levels that sum `count` values of each array at workspace offsets `sources` into `result`; (steps, end of the workspace)."""
    size = 8 if compute == "f64" else 4
    steps: list[Step] = []
    target = Target.for_arch(device.arch)
    rows = problem.rows
    while count > _SUM_CHUNK:
        ctas = -(-count // _SUM_CHUNK)
        results = [free + i * _padded(ctas * size) for i in range(len(sources))]
        free = results[-1] + _padded(ctas * size)
        args = [Arg("count", "u32", count)]
        args += [Arg(f"ptr_in{i}", "u64", WorkspaceArg(s)) for i, s in enumerate(sources)]
        args += [Arg(f"ptr_out{i}", "u64", WorkspaceArg(s)) for i, s in enumerate(results)]
        steps.append(Step.of("rowwise/loss_sum", problem.op, target, 256, args,
                             SumConsts(result_dtype, compute, len(sources), _SUM_CHUNK, False), ctas, suffix="partial"))
        count, sources = ctas, results
    threads = 256
    chunk = max(1, -(-count // threads)) * threads
    args = [Arg("count", "u32", count), *(Arg(f"ptr_in{i}", "u64", WorkspaceArg(s)) for i, s in enumerate(sources)),
            Arg("ptr_result", "u64", result), Arg("num_rows", "u32", rows)]
    steps.append(Step.of("rowwise/loss_sum", problem.op, target, threads, args,
                         SumConsts(result_dtype, compute, len(sources), chunk, True, divide), 1, suffix="last"))
    return steps, free


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256


class _CrossEntropyEngine(RowEngine):
    row_operands: ClassVar[tuple[str, ...]] = ()  # besides logits: operands with a row of classes
    value_operands: ClassVar[tuple[str, ...]] = ()  # operands with a value a row

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, CrossEntropyProblem)
        full = ("logits", *(("target",) if problem.is_probability else ()), *self.row_operands)
        values = tuple(n for n in self.value_operands if problem.has(n))
        if problem.is_probability:
            values = tuple(n for n in values if n != "target")
        return Rows({n: problem.desc(n) for n in (*full, *values)}, 1, full)

    @staticmethod
    def fields(problem: CrossEntropyProblem) -> dict[str, Any]:
        weight = problem.desc("weight") if problem.has("weight") else None
        return {"smoothing": problem.smoothing, "is_probability": problem.is_probability,
                "target_dtype": problem.desc("target").dtype.name, "weight": weight}

    @staticmethod
    def extra(problem: CrossEntropyProblem) -> list[Arg]:
        args = [] if problem.is_probability else [Arg("ignore_index", "s64", problem.ignore_index)]
        return args + ([Arg("ptr_weight", "u64", TensorArg("weight"))] if problem.has("weight") else [])


class CrossEntropyEngine(_CrossEntropyEngine):
    """Losses of rows; for "mean" and "sum" a second step sums them in a fixed order."""

    id = "cross_entropy.row"
    value_operands = ("target", "loss")

    def rows(self, problem: Problem) -> Rows:
        rows = super().rows(problem)
        assert isinstance(problem, CrossEntropyProblem)
        if problem.reduction != "none":
            return Rows({n: d for n, d in rows.descs.items() if n != "loss"}, rows.axis, rows.full)
        return rows

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, CrossEntropyProblem)
        if problem.is_empty:
            return Build(())
        rows = self.rows(problem)
        kind = problem.desc("logits").dtype
        size = 8 if compute_type(kind) == "f64" else 4
        extra = self.extra(problem)
        reduction, sources, divide = "", [], ""
        free = 0
        if problem.reduction != "none":
            block = _padded(max(problem.rows, 1) * size)
            reduction, sources, free = "plain", [0], block
            extra.append(Arg("ptr_losses", "u64", WorkspaceArg(0)))
            if problem.reduction == "mean" and problem.is_probability:
                reduction, divide = "counted", "rows"
            elif problem.reduction == "mean":
                reduction, divide, sources, free = "weighted", "sum", [0, block], 2 * block
                extra.append(Arg("ptr_weights", "u64", WorkspaceArg(block)))
        steps: list[Step] = []
        if problem.rows:
            addresses = {n: TensorArg(n) for n in rows.descs}
            steps.append(self.row_step("rowwise/cross_entropy", problem, config, device, rows, addresses, 4, extra, reduction=reduction,
                                       **self.fields(problem)))
        if problem.reduction != "none":
            levels, free = _sum_steps(problem, device, compute_type(kind), problem.rows, sources, free, TensorArg("loss"),
                                      problem.desc("loss").dtype.name, divide)
            steps += levels
        return Build(tuple(steps), free)


class CrossEntropyBackwardEngine(_CrossEntropyEngine):
    """d_logits, softmax recomputed. A mean over class indices first sums the targets' weights, in a fixed order."""

    id = "cross_entropy_backward.row"
    row_operands = ("d_logits",)
    value_operands = ("target", "d_loss")

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, CrossEntropyProblem)
        if problem.is_empty:
            return Build(())
        rows = self.rows(problem)
        compute = compute_type(problem.desc("logits").dtype)
        fields, extra = self.fields(problem), self.extra(problem)
        steps: list[Step] = []
        free = 0
        reduction = ""
        if problem.reduction == "mean" and problem.is_probability:
            reduction = "counted"
        elif problem.reduction == "mean":
            reduction = "weighted"
            size = 8 if compute == "f64" else 4
            free = _padded(problem.rows * size)
            weights = Rows({n: rows.descs[n] for n in ("logits", "target")}, 1, ("logits",))
            steps.append(self.row_step("rowwise/target_weight", problem, EngineConfig.of(lanes=1, vec=1, threads=128), device, weights,
                                       {n: TensorArg(n) for n in ("logits", "target")}, 0,
                                       [*extra, Arg("ptr_weights", "u64", WorkspaceArg(0))], **fields))
            levels, free = _sum_steps(problem, device, compute, problem.rows, [0], free + 256, WorkspaceArg(free), compute, "")
            extra.append(Arg("ptr_divisor", "u64", WorkspaceArg(_padded(problem.rows * size))))
            steps += levels
        d_loss = problem.desc("d_loss").dtype.name if problem.has("d_loss") else ""
        addresses = {n: TensorArg(n) for n in rows.descs}
        steps.append(self.row_step("rowwise/cross_entropy_backward", problem, config, device, rows, addresses, 3, extra,
                                   reduction=reduction, d_loss_dtype=d_loss, **fields))
        return Build(tuple(steps), free)


ENGINES: dict[str, tuple[Engine, ...]] = {
    "softmax": (SoftmaxEngine(),),
    "softmax_backward": (SoftmaxBackwardEngine(),),
    "cross_entropy": (CrossEntropyEngine(),),
    "cross_entropy_backward": (CrossEntropyBackwardEngine(),),
}
