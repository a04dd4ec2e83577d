"""Losses of rows: sums along a row, what follows from them, and for gradients the row once more."""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.pointwise import Expression
from ..device import DeviceInfo
from ..dtypes import F32, F64
from ..ops.base import Problem
from ..ops.row_loss import RowLossProblem
from ..tensor import TensorDesc
from .base import Arg, Build, Engine, EngineConfig, Scratch, Step, TensorArg
from .reduce_tree import reduction_steps
from .rows import RowConsts, RowEngine, Rows


@dataclass(frozen=True, slots=True)
class RowLossConsts:
    """terms, finish, gradients: expressions, see ptx_templates/rowwise/row_loss. outputs: the gradients' operands; none: the loss."""

    rows: RowConsts
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    terms: Expression
    finish: Expression
    gradients: Expression | None = None
    to_workspace: bool = False

    def _names(self, element: int) -> dict[str, str]:
        names = {n: f"%{n}_{element}" for n in self.inputs} | {"target": "%target", "dy": "%dy"}
        return names | {f"{stem}{k}": f"%{stem}{k}" for stem in "sg" for k in range(self.terms.num_outputs)}

    def lower(self, expression: Expression, element: int, stem: str) -> str:
        """PTX of an expression over an element, the sums, target and dy, into stem (one output) or stem0, stem1, ..."""
        count = expression.num_outputs
        return expression.lower(self._names(element), [stem] if count == 1 else [f"{stem}{k}" for k in range(count)], self.rows.compute)

    def lower_gradients(self, element: int, place: int) -> str:
        assert self.gradients is not None
        return self.gradients.lower(self._names(element), [f"%{n}_{place}" for n in self.outputs], self.rows.compute)


class RowLossEngine(RowEngine):
    """Any loss of rows and its gradient."""

    id = "row_loss.row"
    held_operands = ("x", "x2", "x3")
    held = 3

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, RowLossProblem)
        full = (*problem.tensors, *(o.name for o in problem.outputs if o.name != "loss"))
        values = ["target", "d_loss"] + (["loss"] if problem.reduction == "none" else [])
        shape = problem.desc("x").shape
        return Rows.of(shape, (len(shape) - 1,), {n: problem.desc(n) for n in full}, {n: problem.desc(n) for n in values if problem.has(n)})

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, RowLossProblem)
        if problem.is_empty:
            return Build(())
        rows, scratch, extra, levels = self.rows(problem), Scratch(), list[Arg](), list[Step]()
        kind = F64 if problem.desc("x").dtype is F64 else F32
        is_gradient, is_reduced = problem.op == "row_loss_backward", problem.reduction != "none"
        if is_gradient:
            extra.append(Arg("share", kind.name, 1.0 / problem.rows if problem.reduction == "mean" else 1.0))
        elif is_reduced:
            losses = scratch.take(problem.rows * kind.num_bytes)
            extra.append(Arg("ptr_losses", "u64", losses))
            source, target = (TensorDesc.packed(kind, (problem.rows,)), losses), (problem.desc("loss"), TensorArg("loss"))
            levels = reduction_steps(problem.op, source, target, (0,), problem.reduction, device, scratch)
        steps = []
        if problem.rows:
            outputs = tuple(o.name for o in problem.outputs) if is_gradient else ()
            consts = RowLossConsts(self.row_consts(rows, config, problem.terms.num_outputs), problem.tensors, outputs, problem.terms,
                                   problem.sum_gradients if is_gradient else problem.finish, problem.gradients if is_gradient else None,
                                   is_reduced and not is_gradient)
            steps.append(self.row_step("rowwise/row_loss", consts, problem.op, rows, config, device, extra))
        return Build((*steps, *levels), scratch.num_bytes)


ENGINES: dict[str, tuple[Engine, ...]] = {op: (RowLossEngine(),) for op in ("row_loss", "row_loss_backward")}
