"""Maps of rows: sums along a row, what follows from them, and the row once more; sparsemax, which looks for its threshold."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..codegen.pointwise import Expression
from ..device import DeviceInfo
from ..dtypes import F32, F64
from ..ops.base import Problem
from ..ops.norm import NormProblem
from ..ops.row_map import RowMapProblem, per_row
from ..tensor import TensorDesc
from .base import Arg, ArgValue, Build, Engine, EngineConfig, Scratch, Step, TensorArg
from .norm_row import NormBackwardEngine
from .reduce_tree import reduction_steps
from .rows import RowConsts, RowEngine, Rows

_COLUMN_OPERANDS = ("gamma", "beta")


@dataclass(frozen=True, slots=True)
class RowMapConsts:
    """terms, finish, elements: RowMapProblem's. inputs: operands with an element of every row and column; parameters: with one a column;
    values: with one a row; outputs: of elements; row_outputs: of finish, as far as they go to memory; numbers: of finish and elements."""

    rows: RowConsts
    terms: Expression
    finish: Expression
    elements: Expression
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    values: tuple[str, ...]
    outputs: tuple[str, ...]
    row_outputs: tuple[str, ...]
    numbers: tuple[str, ...]

    def takes(self, name: str, *expressions: Expression) -> bool:
        return any(name in e.args for e in expressions)

    def _lower(self, expression: Expression, element: int, place: int, results: list[str]) -> str:
        names = {n: f"%{n}_{element}" for n in self.inputs} | {n: f"%{n}_{place}" for n in self.parameters}
        names |= {n: f"%{n}" for n in (*self.values, *self.numbers)}
        names |= {f"{stem}{k}": f"%{stem}{k}" for stem, e in (("s", self.terms), ("r", self.finish)) for k in range(e.num_outputs)}
        return expression.lower(names, results, self.rows.compute)

    def lower_terms(self, element: int, place: int) -> str:
        return self._lower(self.terms, element, place, [f"%term{k}" for k in range(self.terms.num_outputs)])

    def lower_finish(self) -> str:
        return self._lower(self.finish, 0, 0, [f"%r{k}" for k in range(self.finish.num_outputs)])

    def lower_elements(self, element: int, place: int) -> str:
        return self._lower(self.elements, element, place, [f"%{n}_{place}" for n in self.outputs])


class RowMapEngine(RowEngine):
    """Any map of one tensor's rows but sparsemax. Sums over rows that follow are made in a fixed order."""

    id = "row_map.row"
    live_elements = 16

    def rows(self, problem: Problem, values: dict[str, ArgValue] | None = None) -> Rows:
        """values: where operands lie in the workspace."""
        assert isinstance(problem, RowMapProblem)
        columns = {n: problem.desc(n) for n in _COLUMN_OPERANDS if problem.has(n)}
        single = {n: per_row(problem, n) for n in ("g", "rstd", "norm", "dg") if problem.has(n)}
        for name in values or {}:  # in the type of the arithmetic, a value a row
            kind = F64 if problem.inputs[0].desc.dtype is F64 else F32
            single[name] = TensorDesc.packed(kind, tuple(problem.shape[i] for i in problem.kept))
        return Rows.of(problem.shape, problem.axes, {o.name: o.desc for o in problem.full}, single, columns, values)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, RowMapProblem)
        if problem.is_empty:
            return Build(())
        scratch, after, values = Scratch(), list[Step](), dict[str, ArgValue]()
        count, kind = prod(problem.shape[i] for i in problem.kept), F64 if problem.inputs[0].desc.dtype is F64 else F32
        if problem.has("dg") and problem.desc("dg").numel == 1 and count != 1:  # of all rows
            values["dg"] = scratch.take(count * kind.num_bytes)
            target = TensorDesc(problem.desc("dg").dtype, (), (), problem.desc("dg").align), TensorArg("dg")
            after += reduction_steps(problem.op, (TensorDesc.packed(kind, (count,)), values["dg"]), target, (0,), "sum", device, scratch)
        before = self._parameter_steps(problem, config, device, scratch) if problem.has("dgamma") else []
        steps = [self.map_step(problem, self.rows(problem, values), config, device)] if problem.full[0].desc.numel else []
        return Build((*before, *steps, *after), scratch.num_bytes)

    def map_step(self, problem: RowMapProblem, rows: Rows, config: EngineConfig, device: DeviceInfo) -> Step:
        r = self.row_consts(rows, config, problem.terms.num_outputs)
        names = [o.name for o in rows.operands]
        numbers = {**problem.numbers, "n": float(problem.columns)}
        numbers = {n: v for n, v in numbers.items() if n in problem.finish.args + problem.elements.args}
        consts = RowMapConsts(r, problem.terms, problem.finish, problem.elements,
                              tuple(o.name for o in problem.full if not o.is_output), tuple(n for n in _COLUMN_OPERANDS if n in names),
                              tuple(n for n in ("g", "rstd") if n in names and n not in problem.row_outputs),
                              tuple(o.name for o in problem.full if o.is_output), problem.row_outputs, tuple(numbers))
        extra = [Arg(f"number_{n}", r.compute, v) for n, v in numbers.items()]
        return self.row_step("rowwise/row_map", consts, problem.op, rows, config, device, extra)

    @staticmethod
    def _parameter_steps(problem: RowMapProblem, config: EngineConfig, device: DeviceInfo, scratch: Scratch) -> list[Step]:
        """dgamma = sum over the rows of dy x rstd, as RMS normalisation's."""
        operands = tuple(o for o in problem.operands if o.name != "dx")
        same = NormProblem("rms_norm_backward", operands, policy=problem.policy, axes=problem.axes)
        return NormBackwardEngine()._parameter_steps(same, config, device, scratch)


class RowMapBackwardEngine(RowMapEngine):
    """Of two tensors' rows."""

    id = "row_map_backward.row"
    held_operands = ("dy", "x")
    held = 2


class SparsemaxBackwardEngine(RowMapBackwardEngine):
    id = "sparsemax_backward.row"
    held_operands = ("dy", "y")


@dataclass(frozen=True, slots=True)
class SparsemaxConsts:
    rows: RowConsts


class SparsemaxEngine(RowMapEngine):
    """Michelot's iterations: the threshold of the elements above it, until no more fall below. The row is held, if it fits."""

    id = "sparsemax.row"

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Without clusters: their exchanges serve once. A long row is held by a CTA that has an SM to itself: it is read over and over."""
        found = [c for c in super().configs(problem, device) if dict(c.knobs).get("cluster", 1) == 1]
        rows = self.rows(problem)
        vector, columns = rows.vector(), rows.column_digits.size
        pack, x = vector * rows.dtype.num_bytes, rows.operands[0]
        if (found[0]["home"] == "memory" and device.at_least(8) and pack in (4, 8, 16) and rows.moves_packs(x, vector)
                and -(-columns // (512 * vector)) * 512 * pack <= device.smem_per_cta - 4096):
            found.insert(0, EngineConfig.of(home="shared", lanes=512, vec=vector, threads=512, cluster=1))
        return tuple(found)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, RowMapProblem)
        if problem.is_empty:
            return Build(())
        rows = self.rows(problem)
        consts = SparsemaxConsts(self.row_consts(rows, config, 3))
        return Build((self.row_step("rowwise/sparsemax", consts, problem.op, rows, config, device),))


ENGINES: dict[str, tuple[Engine, ...]] = {
    "normalize": (RowMapEngine(),), "normalize_backward": (RowMapBackwardEngine(),), "power_norm": (RowMapEngine(),),
    "power_norm_backward": (RowMapBackwardEngine(),), "sparsemax": (SparsemaxEngine(),), "sparsemax_backward": (SparsemaxBackwardEngine(),),
}
