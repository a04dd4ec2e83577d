"""Row-wise engines: softmax, its gradient, and softmax cross-entropy. A row belongs to one thread, a part of a warp, a warp or a CTA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any, ClassVar

from ..codegen import elementary
from ..codegen.environment import f32_literal, f64_literal
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import DType
from ..ops.base import Problem
from ..ops.loss import CrossEntropyProblem, SoftmaxProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Step, Support, TensorArg, WorkspaceArg, refuse
from .digits import DigitConsts, Digits

_LIMIT = 2**31
_RESIDENT_BYTES = 128  # most a thread holds of rows in registers, in the compute type
_SUM_CHUNK = 4096  # values a CTA sums


@dataclass(frozen=True, slots=True)
class RowConsts:
    """What row-wise templates read. lanes: threads a row; chunks: packs of `vector` columns a thread holds, 0 to reload the row.

    reduction: "" writes each row's loss; "plain", "counted" and "weighted" leave it to be summed (counted: divided by the rows,
    weighted: by the targets' weights).
    """

    dtype: str
    compute: str
    digits: DigitConsts
    lanes: int
    vector: int
    chunks: int
    slots: int = 0
    is_log: bool = False
    reduction: str = ""
    smoothing: float = 0.0
    is_probability: bool = False
    target_dtype: str = ""
    weight_dtype: str = ""
    d_loss_dtype: str = ""

    inf: ClassVar[float] = inf
    nan: ClassVar[float] = nan

    @property
    def compute_bytes(self) -> int:
        return 8 if self.compute == "f64" else 4

    def names(self, prefix: str, base: int) -> list[str]:
        """The registers of one pack."""
        return [f"{prefix}{base + i}" for i in range(self.vector)]

    def literal(self, value: float) -> str:
        return f64_literal(value) if self.compute == "f64" else f32_literal(value)

    def elementary(self, function: str, dst: str, src: str) -> str:
        """A scope that sets dst to "exp" or "log" of src, accurate to the compute type."""
        emit = elementary.Emitter("%ef_")
        result = getattr(elementary, f"{function}_{self.compute}")(emit, src)
        lines = [*emit.declarations(), *emit.lines, f"mov.{self.compute} {dst}, {result};"]
        return "\n".join(["    {", *("        " + line for line in lines), "    }"])


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


@dataclass(frozen=True)
class _Rows:
    """Where rows lie: `axis` is the column dimension of the operands that have one, None for those with a value a row."""

    descs: dict[str, TensorDesc]
    axis: int
    full: tuple[str, ...]  # operands with the column dimension

    @property
    def shape(self) -> tuple[int, ...]:
        return self.descs[self.full[0]].shape

    @property
    def columns(self) -> int:
        return self.shape[self.axis]

    @property
    def digits(self) -> Digits:
        extents = self.shape[: self.axis] + self.shape[self.axis + 1:]
        strides = {}
        for name, desc in self.descs.items():
            row = tuple(s * desc.dtype.num_bytes for s in desc.strides)
            if name in self.full:
                row = row[: self.axis] + row[self.axis + 1:]
            elif not row:
                row = (0,) * len(extents)  # one value for all rows
            strides[name] = row
        return Digits(tuple(f"d{i}" for i in range(len(extents))), extents, strides)

    def step(self, name: str) -> int:
        desc = self.descs[name]
        return desc.strides[self.axis] * desc.dtype.num_bytes

    def vector(self) -> int:
        """The longest pack of columns (at most 16 bytes) with which every operand can be moved."""
        first = self.descs[self.full[0]]
        vector = 16 // first.dtype.num_bytes
        while vector > 1 and not all(self._takes(self.descs[n], vector) for n in self.full):
            vector //= 2
        return vector

    def _takes(self, desc: TensorDesc, vector: int) -> bool:
        piece = min(16, vector * desc.dtype.num_bytes)
        others = [s for i, s in enumerate(desc.strides) if i != self.axis and desc.shape[i] > 1]
        return (desc.strides[self.axis] == 1 and self.columns % vector == 0 and desc.align >= piece
                and all(s * desc.dtype.num_bytes % piece == 0 for s in others))


def _compute(kind: DType) -> str:
    return "f64" if kind.name == "f64" else "f32"


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class _RowEngine(Engine):
    """What the row-wise engines share: how threads are dealt to rows, and the arguments that follow."""

    held: ClassVar[int] = 1  # row operands a thread holds in registers

    def rows(self, problem: Problem) -> _Rows:
        raise NotImplementedError

    def resident(self, kind: DType) -> int:
        """The most elements of a row a thread holds in registers."""
        return _RESIDENT_BYTES // (8 if _compute(kind) == "f64" else 4) // self.held

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        rows = self.rows(problem)
        if rows.digits.size >= _LIMIT or rows.columns >= _LIMIT:
            return refuse(f"{rows.digits.size} rows of {rows.columns} columns (at most {_LIMIT - 1} of each)")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Threads side by side along the columns where those lie together, else along the rows."""
        rows = self.rows(problem)
        first = rows.descs[rows.full[0]]
        vector = rows.vector()
        packs = -(-rows.columns // vector)
        resident = self.resident(first.dtype)
        within_warp = EngineConfig.of(lanes=min(32, _power_of_two(packs)), vec=vector, threads=128)
        if first.strides[rows.axis] != 1 and rows.columns > 1 and rows.digits.size >= 32:
            return (EngineConfig.of(lanes=1, vec=1, threads=128), within_warp)
        whole = [EngineConfig.of(lanes=t, vec=vector, threads=t) for t in (128, 256, 512)]
        if rows.columns <= 32 * min(resident, 16):
            return (within_warp, whole[0])
        fitting = [c for c in whole if rows.columns <= c["lanes"] * resident] or [whole[2], whole[1]]
        return (*fitting, within_warp)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        efficiency = 0.85 if config["vec"] * problem.operands[0].desc.dtype.num_bytes == 16 else 0.5
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * efficiency) + problem.flops / (device.fma_tflops * 1e5)

    def row_step(self, template: str, problem: Problem, config: EngineConfig, device: DeviceInfo, rows: _Rows, addresses: dict[str, Any],
                 slots: int, extra: Sequence[Arg] = (), weight: TensorDesc | None = None, **fields: Any) -> Step:
        """One launch over all rows. addresses: operand -> argument value; extra: arguments of this template alone."""
        kind = rows.descs[rows.full[0]].dtype
        lanes, vector, threads = config["lanes"], config["vec"], config["threads"]
        per_thread = -(-rows.columns // (lanes * vector))
        chunks = per_thread if per_thread * vector <= self.resident(kind) else 0
        digits = rows.digits.ordered_for(rows.full[0]).collapsed()
        steps = {name: rows.step(name) for name in rows.full}
        if weight is not None:
            steps["weight"] = weight.strides[0] * weight.dtype.num_bytes
        shape = digits.consts(any(abs(s) >= _LIMIT for s in steps.values()))
        wide = "s64" if shape.wide else "s32"
        args = [Arg(f"ptr_{name}", "u64", addresses[name]) for name in rows.descs]
        args += [Arg("num_rows", "u32", digits.size), Arg("num_columns", "u32", rows.columns)]
        args += digits.args(shape.wide)
        args += [Arg(f"step_{name}", wide, step) for name, step in steps.items()]
        consts = RowConsts(kind.name, _compute(kind), shape, lanes, vector, chunks, slots, weight_dtype=weight.dtype.name if weight else "",
                           **fields)
        return Step.of(template, problem.op, Target.for_arch(device.arch), threads, [*args, *extra], consts,
                       -(-digits.size * lanes // threads), min_ctas_per_sm=max(1, 512 // threads),
                       suffix=f"{kind.name}_l{lanes}_v{vector}_c{chunks}")


class SoftmaxEngine(_RowEngine):
    """Softmax and log-softmax over any dimension."""

    id = "softmax.row"

    def rows(self, problem: Problem) -> _Rows:
        assert isinstance(problem, SoftmaxProblem)
        return _Rows({n: problem.desc(n) for n in ("x", "y")}, problem.axis, ("x", "y"))

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, SoftmaxProblem)
        if problem.is_empty:
            return Build(())
        step = self.row_step("rowwise/softmax", problem, config, device, self.rows(problem), {n: TensorArg(n) for n in ("x", "y")}, 2,
                             is_log=problem.is_log)
        return Build((step,))


class SoftmaxBackwardEngine(_RowEngine):
    """The gradient of softmax from its result."""

    id = "softmax_backward.row"
    held = 2

    def rows(self, problem: Problem) -> _Rows:
        assert isinstance(problem, SoftmaxProblem)
        names = ("dy", "y", "dx")
        return _Rows({n: problem.desc(n) for n in names}, problem.axis, names)

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


class _CrossEntropyEngine(_RowEngine):
    row_operands: ClassVar[tuple[str, ...]] = ()  # besides logits: operands with a row of classes
    value_operands: ClassVar[tuple[str, ...]] = ()  # operands with a value a row

    def rows(self, problem: Problem) -> _Rows:
        assert isinstance(problem, CrossEntropyProblem)
        full = ("logits", *(("target",) if problem.is_probability else ()), *self.row_operands)
        values = tuple(n for n in self.value_operands if problem.has(n))
        if problem.is_probability:
            values = tuple(n for n in values if n != "target")
        return _Rows({n: problem.desc(n) for n in (*full, *values)}, 1, full)

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

    def rows(self, problem: Problem) -> _Rows:
        rows = super().rows(problem)
        assert isinstance(problem, CrossEntropyProblem)
        if problem.reduction != "none":
            return _Rows({n: d for n, d in rows.descs.items() if n != "loss"}, rows.axis, rows.full)
        return rows

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, CrossEntropyProblem)
        if problem.is_empty:
            return Build(())
        rows = self.rows(problem)
        kind = problem.desc("logits").dtype
        size = 8 if _compute(kind) == "f64" else 4
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
            levels, free = _sum_steps(problem, device, _compute(kind), problem.rows, sources, free, TensorArg("loss"),
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
        compute = _compute(problem.desc("logits").dtype)
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
            weights = _Rows({n: rows.descs[n] for n in ("logits", "target")}, 1, ("logits",))
            steps.append(self.row_step("rowwise/target_weight", problem, EngineConfig.of(lanes=1, vec=1, threads=128), device, weights,
                                       {n: TensorArg(n) for n in ("logits", "target")}, 0,
                                       [*extra, Arg("ptr_weights", "u64", WorkspaceArg(0))], **fields))
            levels, free = _sum_steps(problem, device, compute, problem.rows, [0], free + 256, WorkspaceArg(free), compute, "")
            extra.append(Arg("ptr_divisor", "u64", WorkspaceArg(_padded(problem.rows * size))))
            steps += levels
        d_loss = problem.desc("d_loss").dtype.name if problem.has("d_loss") else ""
        steps.append(self.row_step("rowwise/cross_entropy_backward", problem, config, device, rows, {n: TensorArg(n) for n in rows.descs}, 3,
                                   extra, reduction=reduction, d_loss_dtype=d_loss, **fields))
        return Build(tuple(steps), free)


ENGINES: dict[str, tuple[Engine, ...]] = {
    "softmax": (SoftmaxEngine(),),
    "softmax_backward": (SoftmaxBackwardEngine(),),
    "cross_entropy": (CrossEntropyEngine(),),
    "cross_entropy_backward": (CrossEntropyBackwardEngine(),),
}
