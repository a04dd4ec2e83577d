"""Row-wise engines of layer and RMS normalisation: a row belongs to one thread, a part of a warp, a warp, a CTA or a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ..codegen.fastdiv import magic
from ..codegen.pointwise import Expression, acc
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F32, F64
from ..ops.base import Problem
from ..ops.epilogue import align_shape, align_strides
from ..ops.norm import NormProblem
from ..tensor import TensorDesc, packed_strides
from .base import Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, WorkspaceArg, refuse
from .collapse import by_stride
from .digits import Digits
from .reduce_tree import reduction_steps
from .rows import LIMIT, RowConsts, RowEngine, Rows, behind_stages, power_of_two, resident_groups, ring_target

_THREADS = 128
_RING_PACKS = 4  # of a row a thread has at most, whose sums are held in registers


class SlopeConsts:
    """Base of consts with a `slope`: see NormConsts."""

    __slots__ = ()
    rows: RowConsts
    slope: Expression | None

    def take_slope(self, g: str, before: str) -> str:
        """PTX: g = g times the epilogue's derivative at `before`."""
        assert self.slope is not None
        return self.slope.lower({"dy": g, "acc": before}, [g], self.rows.compute)


@dataclass(frozen=True, slots=True)
class NormConsts(SlopeConsts):
    """is_split: of a gradient whose rows are read again, one launch leaves the rows' sums, and the one that sums columns writes dx.
    largest: the number that a row's largest result shall become; 0: results go out as they are. slope: dy times the derivative of the
    forward's epilogue, over "dy" and "acc". sums: the gradients of parameters. zero_centered: gamma + 1 is meant. per_sample: parameters
    differ from sample to sample, which are runs of rows."""

    rows: RowConsts
    is_rms: bool
    is_split: bool = False
    largest: float = 0.0
    slope: Expression | None = None
    sums: tuple[str, ...] = ()
    zero_centered: bool = False
    per_sample: bool = False


class NormEngine(RowEngine):
    """Forward. A row that fits in registers is read once."""

    id = "norm.row"
    held_operands = ("x", "residual")
    live_elements = 16

    def takes_skew(self, problem: Problem) -> bool:
        return problem.desc("y").dtype is problem.desc("x").dtype

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Rows of 1024 halves go better to two warps than to one: 2 % on an H200."""
        assert isinstance(problem, NormProblem)
        found = super().configs(problem, device)
        first = found[0]
        pairs = [c for c in found if (first["home"], first["lanes"]) == (c["home"], 32) == ("registers", 32)
                 and c["lanes"] == c["threads"] == 64 and c["vec"] == first["vec"] and problem.columns == 128 * c["vec"]]
        found = (*pairs, *(c for c in found if c not in pairs))
        rings, least = self._ring_configs(problem, device), LIMIT if problem.is_rms else 32768
        return self.with_rings(found, rings, self.rows(problem), device, least, 32, 2)

    def _ring_configs(self, problem: NormProblem, device: DeviceInfo) -> list[EngineConfig]:
        rows = self.rows(problem)
        if any(o.name not in ("x", "y", "mean", "rstd", "gamma", "beta") for o in rows.operands) or problem.epilogue is not None:
            return []
        if any(problem.is_spread(n) for n in ("gamma", "beta") if problem.has(n)) or problem.is_empty:
            return []
        return self.behind_configs(rows, 4, device)

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, NormProblem)
        shape, channel = problem.shape, problem.axes[-1]
        full = {n: problem.desc(n) for n in ("x", "y", "residual", "sum") if problem.has(n)}
        spread, columns = _split_parameters(problem, ("gamma", "beta"))
        for name in problem.epilogue_operands:
            if name == "scale_y":  # one number, which _epilogue leaves out
                continue
            desc = problem.desc(name)
            assert problem.epilogue is not None
            aligned = align_shape(problem.op, name, desc.shape, shape, channel, problem.epilogue.axis(name))
            full[name] = TensorDesc(desc.dtype, shape, align_strides(desc, aligned, channel), desc.align)
        statistics = {n: problem.desc(n) for n in ("mean", "rstd", "row_scale") if problem.has(n)}
        if problem.has("scale_y"):
            statistics["scale_y"] = TensorDesc(problem.desc("scale_y").dtype, (), (), problem.desc("scale_y").align)
        return Rows.of(shape, problem.axes, full | spread, statistics, columns)

    @staticmethod
    def _epilogue(problem: NormProblem) -> Expression | None:
        """Without the division by scale_y, which the template does by its reciprocal."""
        if problem.epilogue is None or not problem.has("scale_y"):
            return problem.epilogue
        divided = problem.epilogue.operands[0]
        return None if divided == acc else divided

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, NormProblem)
        if problem.is_empty:
            return Build(())
        rows = self.rows(problem)
        if config["home"] == "ring":
            r = self.ring_consts(rows, config, 1 if problem.is_rms else 3)
            stages, eps = behind_stages(r.shared, config, r.pack_bytes, device), Arg("eps", r.compute, problem.eps)
            ring = RingConsts(r, problem.is_rms, stages, (), problem.zero_centered, False, None, behind=config["behind"],
                              lead=config["lead"])
            return Build((self.ring_step("rowwise/norm_ring", ring, problem.op, rows, config, device, [eps]),))
        slots, largest = 1 if problem.is_rms else 3, problem.desc("y").dtype.max if problem.has("row_scale") else 0.0
        r = self.row_consts(rows, config, slots + (2 if largest else 0), self._epilogue(problem), ("y",))
        consts = NormConsts(r, problem.is_rms, largest=largest, zero_centered=problem.zero_centered)
        eps = Arg("eps", consts.rows.compute, problem.eps)
        return Build((self.row_step("rowwise/norm", consts, problem.op, rows, config, device, [eps]),))


@dataclass(frozen=True, slots=True)
class RingConsts(SlopeConsts):
    """stages: of the ring, at least 2. sums, zero_centered, slope: see NormConsts. shares_gamma: gamma lies in shared memory.
    segmented: a CTA's rows begin in several ways. behind, lead: see RingTemplateConsts."""

    rows: RowConsts
    is_rms: bool
    stages: int
    sums: tuple[str, ...]
    zero_centered: bool
    shares_gamma: bool
    slope: Expression | None
    segmented: bool = False
    behind: int = 0
    lead: int = 0


def _sums(problem: NormProblem) -> tuple[str, ...]:
    return tuple(n for n in ("dgamma", "dbeta") if problem.has(n))


def _slope(problem: NormProblem) -> Expression | None:
    return problem.epilogue.differentiate("acc") if problem.epilogue is not None else None


def _consts(problem: NormProblem, rows: RowConsts) -> NormConsts:
    """Of a gradient."""
    return NormConsts(rows, problem.is_rms, slope=_slope(problem), sums=_sums(problem), zero_centered=problem.zero_centered)


def _split_parameters(problem: NormProblem, names: tuple[str, ...]) -> tuple[dict[str, TensorDesc], dict[str, TensorDesc]]:
    """Those that may differ from row to row, over all of x's dimensions, and those with a value a column."""
    found = {n: problem.desc(n) for n in names if problem.has(n)}
    spread = {n: TensorDesc(d.dtype, problem.shape, tuple(0 if m == 1 else s for m, s in zip(d.shape, d.strides, strict=True)), d.align)
              for n, d in found.items() if problem.is_spread(n)}
    return spread, {n: d for n, d in found.items() if n not in spread}


@dataclass(frozen=True)
class SampleRows(Rows):
    """Rows of one sample after those of another. samples: the dimensions that count samples."""

    samples: tuple[int, ...] = ()

    @cached_property
    def row_digits(self) -> Digits:
        others = [i for i in range(len(self.shape)) if i not in self.axes and i not in self.samples]
        order = by_stride([self.shape[i] for i in others], [self.operands[0].strides[i] for i in others])
        dims = [*self.samples, *(others[i] for i in order)]
        strides = {o.name: tuple(o.strides[i] for i in dims) for o in self.operands if o.has_rows}
        return Digits(tuple(f"d{i}" for i in dims), tuple(self.shape[i] for i in dims), strides).collapsed("r")


def _gradient_rows(problem: NormProblem, names: tuple[str, ...], takes_parameters: bool) -> Rows:
    """The rows of a gradient's operands `names`, its statistics and, if so, the parameters that dx takes."""
    wanted = ("gamma", "beta") if problem.epilogue is not None else ("gamma",)
    spread, columns = _split_parameters(problem, wanted) if takes_parameters else ({}, {})
    statistics = {n: problem.desc(n) for n in ("mean", "rstd") if problem.has(n)}
    rows = Rows.of(problem.shape, problem.axes, {n: problem.desc(n) for n in names} | spread, statistics, columns)
    return SampleRows(rows.shape, rows.axes, rows.operands, problem.samples) if problem.is_spread("gamma") else rows


class NormBackwardEngine(RowEngine):
    """dx by rows; dgamma and dbeta by columns in two stages, in a fixed order: sums over groups of rows, then over the groups."""

    id = "norm_backward.row"
    held_operands = ("dy", "x")
    held = 2

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, NormProblem)
        return _gradient_rows(problem, ("dy", "x", "dx"), True)

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, NormProblem)
        support = super().check_support(problem, device)
        if support and problem.columns >= 2**30:  # a thread's number, up to columns plus a CTA, stays below 2^31
            return refuse(f"{problem.columns} columns (at most {2**30 - 1})")
        return support

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, NormProblem)
        found = (*self._ring_configs(problem, device, True), *self._ring_configs(problem, device), *super().configs(problem, device))
        least = LIMIT if problem.is_rms else 131072
        return self.with_rings(found, self._behind_configs(problem, device), self.rows(problem), device, least, 0)

    def _behind_configs(self, problem: NormProblem, device: DeviceInfo) -> list[EngineConfig]:
        """As rings, of rows a CTA or cluster has one of at a time."""
        rings = [c for c in self._ring_configs(problem, device) if c["lanes"] == c["threads"]]
        if not rings:
            return []
        rows = self.rows(problem)
        most = max(-(-rows.column_digits.size // (c["vec"] * c["lanes"] * c["cluster"])) for c in rings)
        # by the registers of a CTA of one warp more
        return [c for c in self.behind_configs(rows, min(most, 2), device, most) if c["behind"] == 1]

    def _ring_configs(self, problem: NormProblem, device: DeviceInfo, is_skewed: bool = False) -> list[EngineConfig]:
        """dx and the sums in one pass over the rows: each thread has at most _RING_PACKS packs of a row. is_skewed: of rows that begin
        between packs."""
        rows = self.rows(problem)
        if not problem.has("gamma") or problem.is_spread("gamma") or problem.desc("dx").numel == 0:
            return []
        if is_skewed and problem.epilogue is not None:  # its registers
            return []
        vector = rows.skewed_vector() if is_skewed else rows.vector()
        held = [o for o in rows.operands if o.name in self.held_operands]
        if is_skewed and (not vector or len(rows.row_digits.extents) > 1 or not rows.holds_skew(held, vector)):
            return []
        pack = rows.dtype.num_bytes * vector
        if not device.at_least(8) or pack not in (4, 8, 16):  # cp.async
            return []
        if len(rows.column_digits.extents) > 1 or not (is_skewed or all(rows.moves_packs(o, vector) for o in held)):
            return []
        home = "skewed_ring" if is_skewed else "ring"
        packs, count = -(-(rows.column_digits.size + is_skewed * (vector - 1)) // vector), rows.row_digits.size
        is_narrow = problem.desc("gamma").dtype.num_bytes <= rows.dtype.num_bytes
        # what the registers of 4 packs hold
        is_narrow = is_narrow and problem.epilogue is None and not (problem.has("dbeta") and (problem.is_rms or problem.zero_centered))
        most = _RING_PACKS - (is_skewed and not problem.is_rms) if is_narrow else _RING_PACKS // 2
        found = []
        if packs <= 32 * most and not is_skewed:
            lanes = power_of_two(-(-packs // most))
            found = [EngineConfig.of(home="ring", lanes=n, vec=vector, threads=256, cluster=1)
                     for n in dict.fromkeys((min(32, 2 * lanes), lanes))]
        if packs > 32:
            wide = []
            for threads in (256, 512) if device.at_least(9, 0) or not is_skewed else (256,):  # for sm_80 they would spill
                for cluster in (1, 2, 4, 8) if device.at_least(9, 0) and count * 8 < LIMIT else (1,):
                    if -(-packs // (threads * cluster)) <= most and packs >= threads * cluster // (4 if is_skewed else 2):
                        wide.append(EngineConfig.of(home=home, lanes=threads, vec=vector, threads=threads, cluster=cluster))
                        break
            # Measured on an H100: one CTA, then two, then eight, and four last; of one CTA the 512 threads, if each has several packs.
            found += sorted(wide, key=lambda c: ((1, 2, 8, 4).index(c["cluster"]), packs >= 1024 and c["threads"] == 256))
        return [c for c in found if self._stages(problem, rows, c, device) >= 2]

    @staticmethod
    def _shares_gamma(problem: NormProblem, config: EngineConfig) -> bool:
        """Whether gamma lies in shared memory behind the ring: the registers of two columns' sums leave no room."""
        return config["home"] == "skewed_ring" and not problem.is_rms

    @classmethod
    def _stages(cls, problem: NormProblem, rows: Rows, config: EngineConfig, device: DeviceInfo) -> int:
        """Of a ring that leaves room for 512 threads on an SM."""
        lanes, threads, vector = config["lanes"] * config["cluster"], config["threads"], config["vec"]
        is_skewed = config["home"] == "skewed_ring"
        packs = -(-(rows.column_digits.size + is_skewed * (vector - 1)) // (lanes * vector)) * threads  # of a row and a CTA
        if "behind" in dict(config.knobs):
            return behind_stages(packs // threads, config, vector * rows.dtype.num_bytes * 2, device)
        stage, gamma = packs * vector * rows.dtype.num_bytes * 2, cls._shares_gamma(problem, config) * 16 * packs
        return min(3, ((device.smem_per_cta - 8192) * threads // 512 - gamma) // stage)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, NormProblem)
        if problem.is_empty:
            return Build(())
        rows, scratch = self.rows(problem), Scratch()
        if config["home"] in ("ring", "skewed_ring"):
            steps = self._ring_steps(problem, rows, config, device, scratch)
            return Build(tuple(steps), scratch.num_bytes)
        # dx last, or by the thread that read dy and x there: it may lie where they do
        consts = _consts(problem, self.row_consts(rows, config, 2))
        if not consts.rows.is_held and problem.has("gamma") and problem.desc("dx").numel:
            kind = F64 if consts.rows.compute == "f64" else F32
            row_sums = Arg("ptr_row_sums", "u64", scratch.take(2 * rows.row_digits.size * kind.num_bytes))
            sums = self.row_step("rowwise/norm_backward", replace(consts, is_split=True), problem.op, rows, config, device, [row_sums])
            return Build((sums, *self._parameter_steps(problem, config, device, scratch, row_sums)), scratch.num_bytes)
        steps = self._parameter_steps(problem, config, device, scratch) if problem.has("gamma") else []
        if problem.desc("dx").numel:
            steps.append(self.row_step("rowwise/norm_backward", consts, problem.op, rows, config, device))
        return Build(tuple(steps), scratch.num_bytes)

    def _ring_steps(self, problem: NormProblem, rows: Rows, config: EngineConfig, device: DeviceInfo, scratch: Scratch) -> list[Step]:
        threads, cluster, stages = config["threads"], config["cluster"], self._stages(problem, rows, config, device)
        is_skewed = config["home"] == "skewed_ring"
        knobs = dict(config.knobs)
        held = EngineConfig.of(**{**knobs, "home": "skewed" if is_skewed else "shared"})
        consts = RingConsts(self.row_consts(rows, held, 2), problem.is_rms, stages, _sums(problem), problem.zero_centered,
                            self._shares_gamma(problem, config), _slope(problem), behind=knobs.get("behind", 0), lead=knobs.get("lead", 0))
        r, digits, columns = consts.rows, rows.row_digits, rows.column_digits
        together = max(1, threads // config["lanes"])  # rows a CTA has in hand
        groups = resident_groups(device, threads, cluster)
        groups = max(1, min(groups, -(-digits.size // (4 * together))))  # few rows each would make the sums dear
        ctas, segments, row_step, segmented = groups, groups, groups * together, False
        if is_skewed:  # the rows in the order of their classes, in segments of rows that are skewed alike
            row_step = rows.period
            class_rows = -(-digits.size // row_step)
            each = groups // row_step  # CTAs of a class, if none has two: what is left over idles
            if segmented := groups % row_step * 8 > groups:
                cta_rows = -(-class_rows * row_step // groups)
                ctas = -(-class_rows * row_step // cta_rows)
            else:
                cta_rows = -(-class_rows // each)
                class_rows, ctas = cta_rows * each, row_step * each
            segments = ctas + (row_step - 1) * segmented
        consts = replace(consts, segmented=segmented)
        kind = F64 if r.compute == "f64" else F32
        sums = {o.name: scratch.take(segments * columns.size * kind.num_bytes) for o in problem.outputs if o.name != "dx"}
        args = [Arg(f"ptr_{o.name}", "u64", o.value) for o in rows.operands]
        args += [Arg(f"ptr_{name}", "u64", value) for name, value in sums.items()]
        args += [Arg("num_rows", "u32", digits.size), Arg("num_columns", "u32", columns.size), Arg("row_step", "u32", row_step)]
        args += [Arg("class_rows", "u32", class_rows), Arg("cta_rows", "u32", cta_rows)] if is_skewed else []
        args += [*digits.args(r.digits.wide), *columns.args(r.digits.wide)]
        shares = self._shares_gamma(problem, config)
        smem = (2 * stages + shares) * r.shared * threads * r.pack_bytes  # the ring, and gamma
        resident = 512 if device.at_least(9, 0) or not is_skewed else 256
        target = ring_target(consts, device)
        first = Step.of("rowwise/norm_backward_ring", problem.op, target, threads + consts.lead, args, consts, ctas * cluster,
                        min_ctas_per_sm=max(1, resident // threads), dynamic_smem=smem, cluster=cluster,
                        suffix=f"{rows.dtype.name}_l{r.lanes}_v{r.vector}_s{r.shared}")
        return [first, self._sum_step(problem, sums, segments, device)]

    def _sum_step(self, problem: NormProblem, sums: dict[str, WorkspaceArg], groups: int, device: DeviceInfo) -> Step:
        """The second stage: sums over the groups, for each column."""
        rows = Rows.of(problem.shape, problem.axes, {"dy": problem.desc("dy")}, {}, {n: problem.desc(n) for n in sums})
        consts = NormConsts(self.row_consts(rows, EngineConfig.of(home="memory", lanes=1, vec=1), 0), problem.is_rms, sums=tuple(sums))
        r, columns = consts.rows, rows.column_digits
        args = [Arg(f"ptr_{name}_sums", "u64", value) for name, value in sums.items()]
        args += [Arg(f"ptr_{name}", "u64", TensorArg(name)) for name in sums]
        args += [Arg("num_columns", "u32", columns.size), Arg("num_groups", "u32", groups), *columns.args(r.digits.wide)]
        return Step.of("rowwise/norm_parameter_sums", problem.op, Target.for_arch(device.arch), 512, args, consts,
                       (-(-columns.size // 32), len(sums), 1), follows=device.at_least(9, 0), suffix=r.dtype("dgamma"))

    def _parameter_steps(self, problem: NormProblem, config: EngineConfig, device: DeviceInfo, scratch: Scratch,
                         row_sums: Arg | None = None) -> list[Step]:
        """row_sums: where the rows' sums are, if the launch shall write dx."""
        takes = row_sums is not None or problem.epilogue is not None
        rows = _gradient_rows(problem, ("dy", "x", "dx") if row_sums else ("dy", "x"), takes)
        row_consts = self.row_consts(rows, EngineConfig.of(home="memory", lanes=1, vec=config["vec"]), 0)
        consts = replace(_consts(problem, row_consts), is_split=row_sums is not None, per_sample=problem.is_spread("gamma"))
        r, digits, columns = consts.rows, rows.row_digits, rows.column_digits
        packs, extents = columns.size // r.vector, tuple(problem.shape[i] for i in problem.samples)
        count = prod(extents)
        # Threads for every SM, but some rows for each to sum; as many for each sample.
        groups = max(1, min(device.num_sms * 1024 // (packs * count), -(-digits.size // (8 * count))))
        kind = F64 if r.compute == "f64" else F32
        size = count * groups * columns.size * kind.num_bytes
        sums = {o.name: scratch.take(size) for o in problem.outputs if o.name != "dx"}
        multiplier, shift = magic(packs)
        args = [Arg(f"ptr_{o.name}", "u64", o.value) for o in rows.operands] + ([row_sums] if row_sums else [])
        args += [Arg(f"ptr_{name}", "u64", value) for name, value in sums.items()]
        args += [Arg(name, "u32", value) for name, value in (
            ("num_rows", digits.size), ("num_columns", columns.size), ("num_packs", packs), ("num_groups", count * groups),
            ("multiplier", multiplier), ("shift", shift))]
        if consts.per_sample:
            multiplier, shift = magic(groups)
            args += [Arg(name, "u32", value) for name, value in (
                ("sample_rows", digits.size // count), ("sample_groups", groups), ("sample_multiplier", multiplier),
                ("sample_shift", shift))]
        args += [*digits.args(r.digits.wide), *columns.args(r.digits.wide)]
        steps = [Step.of("rowwise/norm_parameters", problem.op, Target.for_arch(device.arch), _THREADS, args, consts,
                         -(-packs * count * groups // _THREADS), min_ctas_per_sm=8 if row_sums and problem.epilogue is None else 4,
                         suffix=f"{rows.dtype.name}_v{r.vector}")]
        own = tuple(problem.shape[a] for a in problem.axes)
        of_samples = tuple(s * groups * columns.size for s in packed_strides(extents))
        partial = TensorDesc(kind, (*extents, groups, *own), (*of_samples, columns.size, *rows.column_steps))
        for name, value in sums.items():
            target = problem.desc(name)
            if consts.per_sample:
                dims = (*problem.samples, *problem.axes)
                target = TensorDesc(target.dtype, (*extents, *own), tuple(target.strides[i] for i in dims), target.align)
            steps += reduction_steps(problem.op, (partial, value), (target, TensorArg(name)), (len(extents),), "sum", device, scratch)
        return steps


ENGINES: dict[str, tuple[Engine, ...]] = {
    "layer_norm": (NormEngine(),),
    "rms_norm": (NormEngine(),),
    "layer_norm_backward": (NormBackwardEngine(),),
    "rms_norm_backward": (NormBackwardEngine(),),
}
