"""Losses of rows: sums along a row, what follows from them, and for gradients the row once more. Lists of classes have an engine apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..codegen.pointwise import Expression
from ..device import DeviceInfo
from ..dtypes import F32, F64
from ..ops.base import Problem
from ..ops.row_loss import RowLossProblem
from ..tensor import TensorDesc
from .base import Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .reduce_tree import reduction_steps
from .rows import RowConsts, RowEngine, Rows, power_of_two


@dataclass(frozen=True, slots=True)
class RowLossConsts:
    """terms, finish, gradients: expressions, see ptx_templates/rowwise/row_loss. inputs: operands of terms with an element a column.
    outputs: the gradients' operands; none: the loss. target: RowLoss.target."""

    rows: RowConsts
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    terms: Expression
    finish: Expression
    gradients: Expression | None = None
    to_workspace: bool = False
    target: str = ""

    def _names(self, element: int) -> dict[str, str]:
        names = {"target": "%target", "dy": "%dy", "weight": "%own_weight", "own": "%own", "hit": f"%hit{element % self.rows.vector}"}
        names |= {n: f"%{n}_{element}" for n in self.inputs}
        return names | {f"{stem}{k}": f"%{stem}{k}" for stem in "sg" for k in range(self.terms.num_outputs)}

    def lower(self, expression: Expression, element: int, stem: str) -> str:
        """PTX of an expression over an element, the sums, target and dy, into stem0, stem1, ..."""
        return expression.lower(self._names(element), [f"{stem}{k}" for k in range(expression.num_outputs)], self.rows.compute)

    def lower_gradients(self, element: int, place: int) -> str:
        assert self.gradients is not None
        return self.gradients.lower(self._names(element), [f"%{n}_{place}" for n in self.outputs], self.rows.compute)


def rows_of(problem: RowLossProblem) -> Rows:
    full = [*problem.tensors, *(o.name for o in problem.outputs if o.name != "loss")]
    values = ["d_loss"] + (["loss"] if problem.reduction == "none" else [])
    (full if problem.row.target in ("full", "classes") else values).append("target")
    shape = problem.desc("x").shape
    descs, columns, one_each = ({n: problem.desc(n) for n in names if problem.has(n)} for names in (full, ["weight"], values))
    return Rows.of(shape, (len(shape) - 1,), descs, one_each, columns)


class RowLossEngine(RowEngine):
    """Any loss of rows and its gradient, but for those of lists of classes."""

    id = "row_loss.row"
    held_operands = ("x", "x2", "x3")
    held = 3

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, RowLossProblem)
        if problem.row.target == "classes":
            return refuse("lists of classes are for the engine that counts them")
        return super().check_support(problem, device)

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, RowLossProblem)
        return rows_of(problem)

    def rows_step(self, problem: RowLossProblem, config: EngineConfig, device: DeviceInfo, extra: list[Arg], to_workspace: bool) -> Step:
        """The launch over all rows: their gradients, or their losses."""
        rows, is_gradient = self.rows(problem), problem.op == "row_loss_backward"
        outputs = tuple(o.name for o in problem.outputs) if is_gradient else ()
        inputs = (*problem.tensors, *(n for n in ("target", "weight") if problem.row.target == "full" and problem.has(n)))
        consts = RowLossConsts(self.row_consts(rows, config, problem.terms.num_outputs), inputs, outputs, problem.terms,
                               problem.sum_gradients if is_gradient else problem.finish, problem.gradients if is_gradient else None,
                               to_workspace, problem.row.target)
        return self.row_step("rowwise/row_loss", consts, problem.op, rows, config, device, extra)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, RowLossProblem)
        if problem.is_empty:
            return Build(())
        scratch, extra, levels = Scratch(), list[Arg](), list[Step]()
        kind = F64 if problem.desc("x").dtype is F64 else F32
        is_gradient, is_reduced = problem.op == "row_loss_backward", problem.reduction != "none"
        if is_gradient:
            extra.append(Arg("share", kind.name, 1.0 / problem.rows if problem.reduction == "mean" else 1.0))
        elif is_reduced:
            losses = scratch.take(problem.rows * kind.num_bytes)
            extra.append(Arg("ptr_losses", "u64", losses))
            source, target = (TensorDesc.packed(kind, (problem.rows,)), losses), (problem.desc("loss"), TensorArg("loss"))
            levels = reduction_steps(problem.op, source, target, (0,), problem.reduction, device, scratch, follows=True)
        steps = [self.rows_step(problem, config, device, extra, is_reduced and not is_gradient)] if problem.rows else []
        return Build((*steps, *levels), scratch.num_bytes)


@dataclass(frozen=True, slots=True)
class MultilabelConsts:
    """operands: those with an element a column."""

    rows: RowConsts
    operands: tuple[str, ...]
    is_gradient: bool
    to_workspace: bool


class MultilabelEngine(RowLossEngine):
    """Losses of lists of classes: a CTA a row, a thread some classes at a time, each against every entry of the list."""

    id = "row_loss.multilabel"
    live_elements = 8

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, RowLossProblem)
        if problem.row.target != "classes":
            return refuse("no list of classes")
        needed = self._shared_bytes(problem, 512)
        if needed > device.smem_per_cta - 2048:
            return refuse(f"rows of {problem.desc('x').shape[-1]} classes take {needed} bytes of shared memory (of {device.smem_per_cta})")
        return RowEngine.check_support(self, problem, device)

    @staticmethod
    def _shared_bytes(problem: RowLossProblem, threads: int) -> int:
        """A word for each class, and for each thread an entry of the list."""
        x = problem.desc("x")
        return -(-4 * x.shape[-1] // 16) * 16 + threads * (12 if x.dtype is F64 else 8)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        vector = self.rows(problem).vector()
        each = max(vector, self.live_elements)
        most = max(64, min(512, power_of_two(-(-problem.desc("x").shape[-1] // each))))
        few = max(64, most // 2)
        # As measured on an H200: small CTAs take their short rows twice, and more of them wait for memory at once.
        widths = dict.fromkeys((few, most) if most <= 128 else (most, few))
        return tuple(EngineConfig.of(home="memory", lanes=n, vec=v, threads=n) for v in dict.fromkeys((vector, 1)) for n in widths)

    def rows_step(self, problem: RowLossProblem, config: EngineConfig, device: DeviceInfo, extra: list[Arg], to_workspace: bool) -> Step:
        rows, is_gradient = self.rows(problem), problem.op == "row_loss_backward"
        operands = ("x", "target", *(("dx",) if is_gradient else ()))
        consts = MultilabelConsts(self.row_consts(rows, config, 0), operands, is_gradient, to_workspace)
        step = self.row_step("rowwise/multilabel_margin", consts, problem.op, rows, config, device, extra)
        smem = self._shared_bytes(problem, config["threads"])
        return replace(step, spec=replace(step.spec, dynamic_smem=smem, min_ctas_per_sm=max(1, 512 // config["threads"])))


ENGINES: dict[str, tuple[Engine, ...]] = {op: (RowLossEngine(), MultilabelEngine()) for op in ("row_loss", "row_loss_backward")}
