"""Row-wise engines: softmax and its kin, cross-entropy, gradients. A row has one thread, a part of a warp, a warp, a CTA or a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ..codegen.pointwise import Expression, parse
from ..device import DeviceInfo
from ..dtypes import BOOL, F32, F64, U8
from ..ops.base import Problem
from ..ops.loss import CrossEntropyProblem, SoftmaxProblem
from ..tensor import TensorDesc, packed_strides
from .base import Arg, ArgValue, Build, Engine, EngineConfig, ScalarArg, Scratch, Step, Support, TensorArg, WorkspaceArg, refuse
from .reduce_tree import Located, reduction_steps, state_steps
from .rows import RowConsts, RowEngine, Rows, behind_stages


@dataclass(frozen=True, slots=True)
class NoiseConsts:
    """What the macro random_numbers of lib/philox.ptx.j2 reads. index: that of the address registers, %address<index>_<i>, and how they are
    made: "pack" (of the first element of a pack of neighbours) or "each"."""

    @dataclass(frozen=True, slots=True)
    class Index:
        index: int
        mode: str

    index: Index
    vec: int
    compute: str
    shares_words: bool
    sources: tuple[str, ...] = ("uniform",)


@dataclass(frozen=True, slots=True)
class SoftmaxConsts:
    """logits: of x, mask, seen (whether the diagonal keeps the element), noise and scale; None: x. is_masked: a row may be empty. stages,
    behind, lead: of a ring."""

    rows: RowConsts
    is_log: bool
    logits: Expression | None = None
    noise: NoiseConsts | None = None
    is_masked: bool = False
    is_hard: bool = False
    is_scaled: bool = False
    stages: int = 0
    behind: int = 0
    lead: int = 0

    def takes(self, name: str) -> bool:
        return self.logits is not None and name in self.logits.args

    @property
    def settles(self) -> bool:
        """Whether logits are x or -inf, so that they take its place in shared memory and the mask is read once."""
        exact = self.logits is not None and self.noise is None and not self.logits.scalars
        return exact and self.rows.shared > 0 and (not self.takes("mask") or self.rows.dtype("mask") == "bool")

    def lower_logits(self, x: str, element: int) -> str:
        """PTX: register x = the logit, of what the macro take_logits sets beside it."""
        assert self.logits is not None
        names = {"x": x, "noise": f"%uniform_{element}"} | {n: f"%{n}_{element}" for n in ("mask", "seen")}
        return self.logits.lower(names | {"scale": "%scale_of_x"}, [x], self.rows.compute)


def _logits(problem: SoftmaxProblem) -> Expression | None:
    text = "x + noise" if problem.is_random else "x"
    if problem.scale != 1:
        text = f"({text}) * scalar(scale)"
    if problem.has("mask"):
        text = f"where(mask, {text}, -inf)" if problem.desc("mask").dtype is BOOL else f"{text} + mask"
    if problem.diagonal is not None:
        text = f"where(seen, {text}, -inf)"
    return parse(text) if text != "x" else None


class SoftmaxEngine(RowEngine):
    """Softmax and its kin over any dimension, in one launch."""

    id = "softmax.row"

    def takes_skew(self, problem: Problem) -> bool:
        assert isinstance(problem, SoftmaxProblem)
        same = problem.desc("y").dtype is problem.desc("x").dtype
        return _logits(problem) is None and not problem.is_hard and same

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, SoftmaxProblem)
        shape, kept = problem.desc("x").shape, [i for i in range(problem.desc("x").rank) if i != problem.axis]
        full = {n: problem.desc(n) for n in ("x", "y", "soft") if problem.has(n)}
        if problem.has("mask"):
            mask = problem.desc("mask")
            strides = tuple(0 if n == 1 else s for n, s in zip(mask.shape, mask.strides, strict=True))
            full["mask"] = TensorDesc(mask.dtype, shape, (0,) * (len(shape) - mask.rank) + strides, mask.align)
        # operands at address 0, of bytes: their addresses are numbers of the row
        numbers = {}
        if problem.is_random:  # of its first element, in the order of the dimensions
            numbers["element"] = packed_strides(shape)
        if problem.diagonal is not None:  # of its line
            numbers["line"] = tuple(int(i == len(shape) - 2) for i in range(len(shape)))
        extents = tuple(shape[i] for i in kept)
        descs = {n: TensorDesc(U8, extents, tuple(s[i] for i in kept)) for n, s in numbers.items()}
        values: dict[str, ArgValue] = dict.fromkeys(descs, 0)
        descs |= {"lse": problem.desc("lse")} if problem.has("lse") else {}
        return Rows.of(shape, (problem.axis,), full, descs, values=values)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, SoftmaxProblem)
        rows = self.rows(problem)
        stays = _logits(problem) is None and not problem.is_masked and [o.name for o in rows.operands] == ["x", "y"]
        rings = self.behind_configs(rows, 4, device) if stays and not problem.is_hard else []
        return self.with_rings(super().configs(problem, device), rings, rows, device, 65536, 32, 2)

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, SoftmaxProblem)
        columns = self.rows(problem).column_digits.size
        if problem.is_hard and problem.desc("x").dtype is not F64 and columns > 2**24:
            return refuse(f"{columns} columns (hard: at most {2**24}, which f32 tells apart)")
        return super().check_support(problem, device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, SoftmaxProblem)
        if problem.is_empty:
            return Build(())
        rows = self.rows(problem)
        if config["home"] == "ring":
            r = self.ring_consts(rows, config, 2)
            stages = behind_stages(r.shared, config, r.pack_bytes, device)
            ring = SoftmaxConsts(r, problem.is_log, stages=stages, behind=config["behind"], lead=config["lead"])
            return Build((self.ring_step("rowwise/softmax_ring", ring, problem.op, rows, config, device),))
        r, logits = self.row_consts(rows, config, 3 if problem.is_hard else 2), _logits(problem)
        shape, noise, extra = problem.desc("x").shape, None, list[Arg]()
        if logits is not None and logits.scalars:
            extra.append(Arg("scale", r.compute, problem.scale))
        if problem.is_random:
            step = packed_strides(shape)[problem.axis]
            shares = step == 1 and r.vector % 4 == 0 and shape[problem.axis] % 4 == 0
            noise = NoiseConsts(NoiseConsts.Index(0, "pack" if shares else "each"), r.vector, r.compute, shares)
            extra += [Arg("element_step", "u64", step), *(Arg(s.name, "u64", ScalarArg(s.name)) for s in problem.scalars)]
        if problem.diagonal is not None:
            r = replace(r, is_whole=False)  # packs beyond the diagonal are not read
            extra.append(Arg("diagonal", "s32", problem.diagonal))
        consts = SoftmaxConsts(r, problem.is_log, logits, noise, problem.is_masked, problem.is_hard)
        return Build((self.row_step("rowwise/softmax", consts, problem.op, rows, config, device, extra),))


class GumbelSoftmaxEngine(SoftmaxEngine):
    """Holds half as much in registers: those that make random numbers are in use beside it."""

    id = "gumbel_softmax.row"
    held = 2
    live_elements = 16


class SoftmaxBackwardEngine(RowEngine):
    """The gradient of softmax from its result."""

    id = "softmax_backward.row"
    held_operands = ("dy", "y")
    held = 2

    def takes_skew(self, problem: Problem) -> bool:
        return True

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, SoftmaxProblem)
        return Rows.of(problem.desc("dy").shape, (problem.axis,), {n: problem.desc(n) for n in ("dy", "y", "dx")})

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, SoftmaxProblem)
        if problem.is_empty:
            return Build(())
        rows = self.rows(problem)
        consts = SoftmaxConsts(self.row_consts(rows, config, 1), problem.is_log, is_masked=problem.masked and problem.is_log,
                               is_scaled=problem.scale != 1)
        extra = [Arg("scale", consts.rows.compute, problem.scale)] if consts.is_scaled else []
        return Build((self.row_step("rowwise/softmax_backward", consts, problem.op, rows, config, device, extra),))


@dataclass(frozen=True, slots=True)
class CrossEntropyConsts:
    """reduction: "" writes each row's loss; "plain", "counted" and "weighted" leave it to be summed (counted: divided by the rows,
    weighted: by the targets' weights); the gradient is divided alike."""

    rows: RowConsts
    smoothing: float
    is_probability: bool
    reduction: str = ""
    is_log: bool = False  # logits hold logarithms of probabilities
    sums: int = 1  # numbers that add up to the divisor of "weighted"
    stages: int = 0  # of a ring
    behind: int = 0
    lead: int = 0
    keeps_lse: bool = False  # the logarithms of the rows' sums go to the workspace, too


class _CrossEntropyEngine(RowEngine):
    held_operands: ClassVar[tuple[str, ...]] = ("logits",)
    row_operands: ClassVar[tuple[str, ...]] = ()  # besides logits: operands with a row of classes
    value_operands: ClassVar[tuple[str, ...]] = ()  # operands with a value a row

    def takes_skew(self, problem: Problem) -> bool:
        assert isinstance(problem, CrossEntropyProblem)
        return not problem.is_probability and not problem.smoothing and not problem.is_log

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
        consts = replace(consts, rows=replace(consts.rows, streams=problem.num_bytes > device.l2_bytes and device.at_least(8, 0)))
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
        levels = reduction_steps(problem.op, (TensorDesc.packed(kind, (count,)), losses), loss, (0,), problem.reduction, device, scratch,
                                 follows=True)
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
        sums, weights = self._weight_step(problem, device, scratch)
        step = self.gradient_step(problem, config, device, [Arg("ptr_sums", "u64", weights[1])], "weighted", weights[0].shape[0],
                                  device.at_least(9, 0))
        return Build((sums, step), scratch.num_bytes)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, CrossEntropyProblem)
        rows, stays = self.rows(problem), not problem.is_probability and not problem.smoothing and not problem.is_log
        rings = self.behind_configs(rows, 4, device) if stays else []
        return self.with_rings(super().configs(problem, device), rings, rows, device, 16384, 32)

    def gradient_step(self, problem: CrossEntropyProblem, config: EngineConfig, device: DeviceInfo, extra: Sequence[Arg],
                      reduction: str, sums: int = 1, follows: bool = False) -> Step:
        """sums: how many numbers, at ptr_sums, add up to the divisor of "weighted"; follows: the launch before leaves them."""
        rows = self.rows(problem)
        extra = [*self.extra(problem), *extra]
        if config["home"] == "ring":
            r = self.ring_consts(rows, config, 2)
            stages = behind_stages(r.shared, config, r.pack_bytes, device)
            consts = CrossEntropyConsts(r, problem.smoothing, False, reduction, sums=sums, stages=stages, behind=config["behind"],
                                        lead=config["lead"])
            step = self.ring_step("rowwise/cross_entropy_backward_ring", consts, problem.op, rows, config, device, extra)
        else:
            consts = replace(self.consts(problem, rows, config, 3, reduction), sums=sums)
            step = self.row_step("rowwise/cross_entropy_backward", consts, problem.op, rows, config, device, extra)
        return replace(step, spec=replace(step.spec, follows=follows))

    def divisor_steps(self, problem: CrossEntropyProblem, device: DeviceInfo, scratch: Scratch) -> tuple[list[Step], WorkspaceArg]:
        """The steps that sum the weights of the targets that are not ignored, and where the one sum is."""
        step, parts = self._weight_step(problem, device, scratch)
        if parts[0].numel == 1:
            return [step], parts[1]
        divisor = scratch.take(parts[0].dtype.num_bytes)
        target = (TensorDesc.packed(parts[0].dtype, ()), divisor)
        return [step, *reduction_steps(problem.op, parts, target, (0,), "sum", device, scratch, follows=True)], divisor

    def _weight_step(self, problem: CrossEntropyProblem, device: DeviceInfo,
                     scratch: Scratch) -> tuple[Step, tuple[TensorDesc, WorkspaceArg]]:
        """The launch that sums the targets' weights, and its sums, one a CTA: 32 or 128, or one for a CTA's rows."""
        kind, threads = F64 if problem.desc("logits").dtype is F64 else F32, 512
        weight = {"weight": problem.desc("weight")} if problem.has("weight") else {}
        rows = Rows.of(problem.desc("logits").shape, (1,), {"logits": problem.desc("logits")}, {"target": problem.desc("target")}, weight)
        config = EngineConfig.of(lanes=1, vec=1, threads=threads)
        sums = 1 if problem.rows <= threads else 32 if problem.rows <= 128 * threads else 128
        parts = scratch.take(sums * kind.num_bytes)
        step = self.row_step("rowwise/target_weight", self.consts(problem, rows, config, 0, ""), problem.op, rows, config, device,
                             [*self.extra(problem), Arg("ptr_sums", "u64", parts)])
        return replace(step, grid=(sums, 1, 1)), (TensorDesc.packed(kind, (sums,)), parts)


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
    "gumbel_softmax": (GumbelSoftmaxEngine(),),
    "hardmax": (SoftmaxEngine(),),
    "softmax_backward": (SoftmaxBackwardEngine(),),
    "cross_entropy": (CrossEntropyEngine(),),
    "cross_entropy_backward": (CrossEntropyBackwardEngine(),),
    "nll": (NllEngine(),),
    "nll_backward": (NllBackwardEngine(),),
}
