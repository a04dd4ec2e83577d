"""Row-wise engines of layer and RMS normalisation: a row belongs to one thread, a part of a warp, a warp or a CTA."""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.fastdiv import magic
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F32, F64
from ..ops.base import Problem
from ..ops.epilogue import align_shape, align_strides
from ..ops.norm import NormProblem
from ..tensor import TensorDesc
from .base import Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .reduce_tree import reduction_steps
from .rows import RowConsts, RowEngine, Rows

_THREADS = 128


@dataclass(frozen=True, slots=True)
class NormConsts:
    rows: RowConsts
    is_rms: bool


class NormEngine(RowEngine):
    """Forward. A row that fits in registers is read once."""

    id = "norm.row"
    held_operands = ("x", "residual")
    live_elements = 16

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, NormProblem)
        shape, channel = problem.shape, problem.axes[-1]
        full = {n: problem.desc(n) for n in ("x", "y", "residual", "sum") if problem.has(n)}
        for name in problem.epilogue_operands:
            desc = problem.desc(name)
            assert problem.epilogue is not None
            aligned = align_shape(problem.op, name, desc.shape, shape, channel, problem.epilogue.axis(name))
            full[name] = TensorDesc(desc.dtype, shape, align_strides(desc, aligned, channel), desc.align)
        statistics = {n: problem.desc(n) for n in ("mean", "rstd") if problem.has(n)}
        return Rows.of(shape, problem.axes, full, statistics, {n: problem.desc(n) for n in ("gamma", "beta") if problem.has(n)})

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, NormProblem)
        if problem.is_empty:
            return Build(())
        rows = self.rows(problem)
        consts = NormConsts(self.row_consts(rows, config, 1 if problem.is_rms else 3, problem.epilogue, ("y",)), problem.is_rms)
        eps = Arg("eps", consts.rows.compute, problem.eps)
        return Build((self.row_step("rowwise/norm", consts, problem.op, rows, config, device, [eps]),))


class NormBackwardEngine(RowEngine):
    """dx by rows; dgamma and dbeta by columns in two stages, in a fixed order: sums over groups of rows, then over the groups."""

    id = "norm_backward.row"
    held_operands = ("dy", "x")
    held = 2

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, NormProblem)
        statistics = {n: problem.desc(n) for n in ("mean", "rstd") if problem.has(n)}
        gamma = {"gamma": problem.desc("gamma")} if problem.has("gamma") else {}
        return Rows.of(problem.shape, problem.axes, {n: problem.desc(n) for n in ("dy", "x", "dx")}, statistics, gamma)

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, NormProblem)
        support = super().check_support(problem, device)
        if support and problem.columns >= 2**30:  # a thread's number, up to columns plus a CTA, stays below 2^31
            return refuse(f"{problem.columns} columns (at most {2**30 - 1})")
        return support

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, NormProblem)
        if problem.is_empty:
            return Build(())
        rows, scratch = self.rows(problem), Scratch()
        # dx last: it may lie where dy or x does
        steps = self._parameter_steps(problem, config, device, scratch) if problem.has("gamma") else []
        if problem.desc("dx").numel:
            consts = NormConsts(self.row_consts(rows, config, 2), problem.is_rms)
            steps.append(self.row_step("rowwise/norm_backward", consts, problem.op, rows, config, device))
        return Build(tuple(steps), scratch.num_bytes)

    def _parameter_steps(self, problem: NormProblem, config: EngineConfig, device: DeviceInfo, scratch: Scratch) -> list[Step]:
        statistics = {n: problem.desc(n) for n in ("mean", "rstd") if problem.has(n)}
        rows = Rows.of(problem.shape, problem.axes, {n: problem.desc(n) for n in ("dy", "x")}, statistics)
        consts = NormConsts(self.row_consts(rows, EngineConfig.of(home="memory", lanes=1, vec=config["vec"]), 0), problem.is_rms)
        r, digits, columns = consts.rows, rows.row_digits, rows.column_digits
        packs = columns.size // r.vector
        # Threads for every SM, but some rows for each to sum.
        groups = max(1, min(device.num_sms * 1024 // packs, -(-digits.size // 8)))
        kind = F64 if r.compute == "f64" else F32
        size = groups * columns.size * kind.num_bytes
        sums = {o.name: scratch.take(size) for o in problem.outputs if o.name != "dx"}
        multiplier, shift = magic(packs)
        args = [Arg(f"ptr_{o.name}", "u64", o.value) for o in rows.operands]
        args += [Arg(f"ptr_{name}", "u64", value) for name, value in sums.items()]
        args += [Arg(name, "u32", value) for name, value in (
            ("num_rows", digits.size), ("num_columns", columns.size), ("num_packs", packs), ("num_groups", groups),
            ("multiplier", multiplier), ("shift", shift))]
        args += [*digits.args(r.digits.wide), *columns.args(r.digits.wide)]
        steps = [Step.of("rowwise/norm_parameters", problem.op, Target.for_arch(device.arch), _THREADS, args, consts,
                         -(-packs * groups // _THREADS), min_ctas_per_sm=4, suffix=f"{rows.dtype.name}_v{r.vector}")]
        partial = TensorDesc(kind, (groups, *(problem.shape[a] for a in problem.axes)), (columns.size, *rows.column_steps))
        for name, value in sums.items():
            steps += reduction_steps(problem.op, (partial, value), (problem.desc(name), TensorArg(name)), (0,), "sum", device, scratch)
        return steps


ENGINES: dict[str, tuple[Engine, ...]] = {
    "layer_norm": (NormEngine(),),
    "rms_norm": (NormEngine(),),
    "layer_norm_backward": (NormBackwardEngine(),),
    "rms_norm_backward": (NormBackwardEngine(),),
}
