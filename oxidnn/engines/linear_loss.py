"""Linear layer and cross-entropy by chunks of the logits, which a GEMM writes into the workspace.

By rows: the kernels of cross-entropy take a chunk's losses and turn it in place into the gradient of the logits, and GEMMs make of that the
chunk's dx and its part of dw, which is summed over the chunks in the type of sums: three products, and as much memory as dw takes in f32.
By columns: a pass over rows leaves the rows' losses and the logarithms of their sums; then logits are made again, some classes of all rows,
whose gradients give those classes' dw at once, and a part of dx: four products, and as much memory as dx takes in f32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..device import DeviceInfo
from ..dtypes import F64
from ..ops import OPS
from ..ops.base import Policy, Problem
from ..ops.linear_loss import LinearCrossEntropyProblem
from ..ops.loss import CrossEntropyProblem
from ..tensor import TensorDesc
from .base import (
    SUPPORTED,
    Arg,
    ArgValue,
    Build,
    Engine,
    EngineConfig,
    Scratch,
    Step,
    Support,
    TensorArg,
    WorkspaceArg,
    refuse,
)
from .composition import Place, Product, moved, piece, product, relocated, shifted
from .loss_row import CrossEntropyBackwardEngine, CrossEntropyEngine
from .reduce_tree import reduction_steps
from .rows import RowConsts, Rows, power_of_two

CHUNK_BYTES = 64 << 20, 128 << 20
MODEST_BYTES = 512 << 20  # workspaces that no one minds, whatever the logits take
_LEAST = 128  # rows or columns of a chunk
_LIMIT = 2**31
def even(extent: int, most: int) -> int:
    """Chunks of about equal size, as few as fit, of a multiple of _LEAST."""
    most = max(_LEAST, most // _LEAST * _LEAST)
    chunks = max(1, -(-extent // most))
    each = -(-extent // chunks)
    return each if chunks == 1 else min(most, -(-each // _LEAST) * _LEAST)


def room(p: LinearCrossEntropyProblem, sums: str) -> int:
    """Bytes of a chunk: an eighth of the logits within CHUNK_BYTES, or a quarter of what the sums over chunks take."""
    least, most = CHUNK_BYTES
    return max(min(max(least, _logits_bytes(p, p.rows) // 8), most), sums_of(p, sums).num_bytes // 4 if p.has_gradients else 0)


def most_bytes(p: LinearCrossEntropyProblem) -> int:
    """What chunks of rows may take with the sums over them."""
    return max(_logits_bytes(p, p.rows) * 4 // 5, MODEST_BYTES)


def room_of_rows(p: LinearCrossEntropyProblem) -> int:
    """Bytes of a chunk of rows. With gradients each chunk reads and writes the sums again, so that all modest logits are one chunk, and of
    others, within `most_bytes`, a quarter."""
    logits = _logits_bytes(p, p.rows)
    if not p.has_gradients or logits <= MODEST_BYTES:
        return logits if p.has_gradients else room(p, "dw")
    sums = 0 if p.desc("dw").dtype is p.accumulator else sums_of(p, "dw").num_bytes
    return max(room(p, "dw"), min(logits // 4, most_bytes(p) - sums))


def halves(knob: str, size: int) -> tuple[EngineConfig, ...]:
    return tuple(EngineConfig.of(**{knob: n}) for n in dict.fromkeys(max(1, -(-size // k)) for k in (1, 2, 4)))


def sums_of(p: LinearCrossEntropyProblem, name: str) -> TensorDesc:
    """dw or dx while chunks add to it: itself, if it has the type of sums."""
    desc = p.desc(name)
    return desc if desc.dtype is p.accumulator else TensorDesc.packed(p.accumulator, desc.shape)


class LinearLossRows(Engine):
    """Chunks of rows. Workspace: a chunk's logits (see `room_of_rows`), what the GEMMs take, and for gradients in several chunks dw in the
    type of sums, unless dw has that type itself."""

    id = "linear_loss.rows"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, LinearCrossEntropyProblem)
        if max(problem.rows, problem.classes) >= _LIMIT:
            return refuse(f"{problem.rows} rows of {problem.classes} classes (at most {_LIMIT - 1} of each)")
        if problem.has_gradients and problem.desc("dw").dtype is not problem.accumulator:
            first = self.configs(problem, device)[0]
            own, other = (e.build_steps(problem, e.configs(problem, device)[0], device).workspace_bytes for e in (self, COLUMNS))
            if first["rows"] < problem.rows and own - own // 16 > most_bytes(problem) and other < own:
                return refuse(f"{own >> 20} MiB of workspace for logits of {_logits_bytes(problem, problem.rows) >> 20} MiB: {COLUMNS.id} "
                              f"takes {other >> 20} MiB")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, LinearCrossEntropyProblem)
        found = halves("rows", even(problem.rows, room_of_rows(problem) // max(_logits_bytes(problem, 1), 1)))
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, LinearCrossEntropyProblem)
        count = min(config["rows"], p.rows)
        chunks = -(-p.rows // max(count, 1))
        total = 5.0
        for operands, attrs in self._products(p, count, is_first=True, is_last=chunks <= 1).values():
            total += chunks * product(operands, attrs, _policy(p), device)[1]
        traffic = p.rows * p.classes * p.desc("x").dtype.num_bytes * (4 if p.has_gradients else 1)
        if p.has_gradients and chunks > 1:
            traffic += 2 * chunks * p.desc("w").numel * p.accumulator.num_bytes
        return total + traffic / (device.bandwidth_gbs * 800)

    def _products(self, p: LinearCrossEntropyProblem, count: int, first: int = 0, is_first: bool = True,
                  is_last: bool = True) -> dict[str, Product]:
        """(operands, attributes) of a chunk's GEMMs, by what they write."""
        x, _ = piece(p.desc("x"), 0, first, count)
        logits = _logits(p, count)
        found: dict[str, Product] = {"logits": _logits_product(p, first, count)}
        if p.has_gradients:
            dx, _ = piece(p.desc("dx"), 0, first, count)
            found["dx"] = ((("a", logits), ("b", p.desc("w")), ("d", dx)), ())
            total = sums_of(p, "dw")
            d = p.desc("dw") if is_last else total
            c = () if is_first else (("c", total),)
            found["dw"] = ((("a", logits), ("b", x), *c, ("d", d)), (("transpose_a", True), *((("beta", 1.0),) if c else ())))
        return found

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, LinearCrossEntropyProblem)
        if p.is_empty:
            return Build(())
        scratch, kind, rows = Scratch(), p.accumulator, config["rows"]
        firsts = range(0, p.rows, rows) if p.rows else range(1)
        chunks = [(first, min(rows, p.rows - first)) for first in firsts]
        place: Place = scratch.take(_logits_bytes(p, min(rows, p.rows)))
        total: Place = TensorArg("dw")
        if p.has_gradients and len(chunks) > 1 and p.desc("dw").dtype is not kind:
            total = scratch.take(sums_of(p, "dw").num_bytes)
        plans = []
        for first, count in chunks:
            wanted = self._products(p, count, first, first == 0, first + count == p.rows)
            plans.append({name: product(operands, attrs, _policy(p), device)[0] for name, (operands, attrs) in wanted.items()})
        workspace = scratch.take(max(build.workspace_bytes for builds in plans for build in builds.values()))

        sums, backward = _Sums(p, place, device, scratch), CrossEntropyBackwardEngine()
        steps = [*sums.divisor]
        bias_parts: Place = TensorArg("dbias")
        if p.has("dbias") and len(chunks) > 1:
            bias_parts = scratch.take(len(chunks) * p.classes * kind.num_bytes)

        for k, ((first, count), builds) in enumerate(zip(chunks, plans, strict=True)):
            x_place = TensorArg("x", piece(p.desc("x"), 0, first, count)[1])
            if count:
                steps += moved(builds["logits"], workspace, a=x_place, b=TensorArg("w"), bias=TensorArg("bias"), d=place)
                if p.has("loss"):
                    steps.append(sums.loss_step(first, count))
                if p.has_gradients:
                    part = _cross_entropy(p, first, count, "cross_entropy_backward")
                    step = backward.gradient_step(part, backward.configs(part, device)[0], device, sums.given, sums.gradient_reduction)
                    steps.append(relocated(step, sums.places(first, count)))
            if p.has_gradients:
                is_last = first + count == p.rows
                dx_place = TensorArg("dx", piece(p.desc("dx"), 0, first, count)[1])
                steps += moved(builds["dx"], workspace, a=place, b=TensorArg("w"), d=dx_place)
                steps += moved(builds["dw"], workspace, a=place, b=x_place, c=total, d=TensorArg("dw") if is_last else total)
            if p.has("dbias"):
                target = p.desc("dbias") if len(chunks) == 1 else TensorDesc.packed(kind, (p.classes,))
                at = shifted(bias_parts, k * p.classes * kind.num_bytes)
                steps += reduction_steps(p.op, (_logits(p, count), place), (target, at), (0,), "sum", device, scratch)
        if p.has("dbias") and len(chunks) > 1:
            source = TensorDesc.packed(kind, (len(chunks), p.classes))
            steps += reduction_steps(p.op, (source, bias_parts), (p.desc("dbias"), TensorArg("dbias")), (0,), "sum", device, scratch)
        return Build((*steps, *sums.levels), scratch.num_bytes)


class _Sums:
    """What the rows' losses and gradients are summed and divided by.

    levels: the steps that make one loss of the rows'. divisor: those that sum the targets' weights, and given: where gradients find that.
    """

    def __init__(self, p: LinearCrossEntropyProblem, place: Place, device: DeviceInfo, scratch: Scratch) -> None:
        self.p, self.place, self.device, self.forward = p, place, device, CrossEntropyEngine()
        whole = _cross_entropy(p, 0, p.rows)
        self.parts: list[Arg] = []
        self.loss_reduction, self.gradient_reduction = "", ""
        self.levels: list[Step] = []  # of a loss
        self.divisor: list[Step] = []
        self.given: list[Arg] = []
        if p.has("loss"):
            loss = (p.desc("loss"), TensorArg("loss"))
            self.parts, self.loss_reduction, self.levels = self.forward.totals(whole, loss, device, scratch)
        else:  # where losses go that nobody asks for
            self.parts, self.loss_reduction = [Arg("ptr_losses", "u64", scratch.take(p.rows * p.accumulator.num_bytes))], "plain"
        if p.has_gradients and p.reduction == "mean" and p.rows:
            steps, at = CrossEntropyBackwardEngine().divisor_steps(whole, device, scratch)
            self.divisor = [relocated(step, self.places(0, p.rows)) for step in steps]
            self.given, self.gradient_reduction = [Arg("ptr_sums", "u64", at)], "weighted"

    def places(self, first: int, count: int) -> dict[str, Place]:
        """Where cross-entropy finds the operands of a chunk of rows."""
        places: dict[str, Place] = {"logits": self.place, "d_logits": self.place, "weight": TensorArg("weight")}
        for name in ("target", "loss", "d_loss"):
            if self.p.has(name):
                desc = self.p.desc(name)
                places[name] = TensorArg(name, piece(desc, 0, first, count)[1] if desc.rank else 0)
        return places

    def loss_step(self, first: int, count: int, lse: WorkspaceArg | None = None) -> Step:
        """The losses of a chunk of rows whose logits are there, and the logarithms of the rows' sums."""
        part = _cross_entropy(self.p, first, count)
        size = self.p.accumulator.num_bytes
        own = [replace(a, value=shifted(a.value, first * size)) for a in self.parts]
        at = shifted(lse, first * size) if lse is not None else None
        config = self.forward.configs(part, self.device)[0]
        return relocated(self.forward.loss_step(part, config, self.device, own, self.loss_reduction, at), self.places(first, count))


@dataclass(frozen=True, slots=True)
class ColumnsConsts:
    """share: what smoothing leaves each class of weight 1. is_mean: the gradient is divided."""

    rows: RowConsts
    smoothing: float
    share: float
    is_mean: bool


class LinearLossColumns(Engine):
    """Chunks of columns. Workspace: a chunk's logits (see `room`), what the GEMMs take, and with several chunks dx in the type of sums,
    unless dx has that type itself."""

    id = "linear_loss.columns"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, LinearCrossEntropyProblem)
        if not problem.has_gradients or not problem.rows:
            return refuse("a loss alone, or no rows, is for chunks of rows")
        if max(problem.rows, problem.classes) >= _LIMIT:
            return refuse(f"{problem.rows} rows of {problem.classes} classes (at most {_LIMIT - 1} of each)")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, LinearCrossEntropyProblem)
        column = problem.rows * problem.desc("x").dtype.num_bytes
        found = halves("columns", even(problem.classes, room(problem, "dx") // max(column, 1)))
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, LinearCrossEntropyProblem)
        count = config["columns"]
        chunks, again = -(-p.classes // count), -(-p.rows // self._rows(p, count))
        total = 5.0 + again * product(*_logits_product(p, 0, min(p.rows, self._rows(p, count))), _policy(p), device)[1]
        for operands, attrs in self._products(p, 0, min(count, p.classes), is_last=chunks <= 1).values():
            total += chunks * product(operands, attrs, _policy(p), device)[1]
        traffic = p.rows * p.classes * p.desc("x").dtype.num_bytes * 4
        if chunks > 1:
            traffic += 2 * chunks * p.desc("x").numel * p.accumulator.num_bytes
        return total + traffic / (device.bandwidth_gbs * 800)

    @staticmethod
    def _rows(p: LinearCrossEntropyProblem, columns: int) -> int:
        """Rows of the first pass, whose logits take the room of a chunk of columns."""
        return max(1, min(p.rows, even(p.rows, p.rows * columns // _pitch(p))))

    @staticmethod
    def _part(p: LinearCrossEntropyProblem, count: int) -> TensorDesc:
        """The logits of some classes."""
        unit = 16 // p.desc("x").dtype.num_bytes
        return TensorDesc(p.desc("x").dtype, (p.rows, count), (-(-count // unit) * unit, 1))

    def _products(self, p: LinearCrossEntropyProblem, first: int, count: int, is_last: bool) -> dict[str, Product]:
        x, part = p.desc("x"), self._part(p, count)
        w, _ = piece(p.desc("w"), 0, first, count)
        dw, _ = piece(p.desc("dw"), 0, first, count)
        bias = (("bias", piece(p.desc("bias"), 0, first, count)[0]),) if p.has("bias") else ()
        total = sums_of(p, "dx")
        c, beta = ((), ()) if first == 0 else ((("c", total),), (("beta", 1.0),))
        return {"logits": ((("a", x), ("b", w), *bias, ("d", part)), (("transpose_b", True),)),
                "dx": ((("a", part), ("b", w), *c, ("d", p.desc("dx") if is_last else total)), beta),
                "dw": ((("a", part), ("b", x), ("d", dw)), (("transpose_a", True),))}

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, LinearCrossEntropyProblem)
        if p.is_empty:
            return Build(())
        scratch, kind, columns, rows = Scratch(), p.accumulator, config["columns"], self._rows(p, config["columns"])
        row_chunks = [(first, min(rows, p.rows - first)) for first in range(0, p.rows, rows)]
        chunks = [(first, min(columns, p.classes - first)) for first in range(0, p.classes, columns)]
        part = self._part(p, min(columns, p.classes))
        place = scratch.take(max(part.strides[0] * p.rows * part.dtype.num_bytes, _logits_bytes(p, min(rows, p.rows))))
        total: Place = TensorArg("dx")
        if len(chunks) > 1 and p.desc("dx").dtype is not kind:
            total = scratch.take(sums_of(p, "dx").num_bytes)
        first_plans = [product(*_logits_product(p, first, count), _policy(p), device)[0] for first, count in row_chunks]
        plans = [{name: product(*wanted, _policy(p), device)[0]
                  for name, wanted in self._products(p, first, count, first + count == p.classes).items()} for first, count in chunks]
        workspace = scratch.take(max(b.workspace_bytes for b in (*first_plans, *(b for builds in plans for b in builds.values()))))
        lse = scratch.take(p.rows * kind.num_bytes)

        # losses, and the logarithms of the rows' sums
        steps: list[Step] = []
        sums = _Sums(p, place, device, scratch)
        for (first, count), build in zip(row_chunks, first_plans, strict=True):
            x_place = TensorArg("x", piece(p.desc("x"), 0, first, count)[1])
            steps += moved(build, workspace, a=x_place, b=TensorArg("w"), bias=TensorArg("bias"), d=place)
            steps.append(sums.loss_step(first, count, lse))
        steps += sums.divisor
        extra = [Arg("ignore_index", "s64", p.ignore_index), Arg("num_classes", "s64", p.classes), Arg("ptr_lse", "u64", lse), *sums.given]
        if p.has("weight"):
            weight = p.desc("weight")
            step = weight.strides[0] * weight.dtype.num_bytes
            extra += [Arg("ptr_weights", "u64", TensorArg("weight")), Arg("stride_weights", "s64", step)]
            if p.smoothing:
                mean = scratch.take(kind.num_bytes)
                source = (weight, TensorArg("weight"))
                steps += reduction_steps(p.op, source, (TensorDesc.packed(kind, ()), mean), (0,), "mean", device, scratch)
                extra.append(Arg("ptr_mean_weight", "u64", mean))

        for (first, count), builds in zip(chunks, plans, strict=True):
            w_place = TensorArg("w", piece(p.desc("w"), 0, first, count)[1])
            places = {n: TensorArg(n, piece(p.desc(n), 0, first, count)[1]) for n in ("bias", "dbias", "weight") if p.has(n)}
            dw_place = TensorArg("dw", piece(p.desc("dw"), 0, first, count)[1])
            steps += moved(builds["logits"], workspace, a=TensorArg("x"), b=w_place, bias=places.get("bias", w_place), d=place)
            steps.append(self._gradient_step(p, first, count, place, places.get("weight"), device, extra))
            is_last = first + count == p.classes
            steps += moved(builds["dx"], workspace, a=place, b=w_place, c=total, d=TensorArg("dx") if is_last else total)
            steps += moved(builds["dw"], workspace, a=place, b=TensorArg("x"), d=dw_place)
            if p.has("dbias"):
                target = (piece(p.desc("dbias"), 0, first, count)[0], places["dbias"])
                steps += reduction_steps(p.op, (self._part(p, count), place), target, (0,), "sum", device, scratch)
        return Build((*steps, *sums.levels), scratch.num_bytes)

    def _gradient_step(self, p: LinearCrossEntropyProblem, first: int, count: int, place: Place, weight: Place | None, device: DeviceInfo,
                       extra: list[Arg]) -> Step:
        """The chunk's logits turn into their gradients."""
        values: dict[str, ArgValue] = {"logits": place}
        if weight is not None:
            values["weight"] = weight
        per_row = {n: p.desc(n) for n in ("target", "d_loss") if p.has(n)}
        per_column = {"weight": piece(p.desc("weight"), 0, first, count)[0]} if weight is not None else {}
        rows = Rows.of((p.rows, count), (1,), {"logits": self._part(p, count)}, per_row, per_column, values)
        vector = 1 if p.accumulator is F64 else rows.vector()  # its exponentials take many registers
        lanes = min(256, power_of_two(-(-count // (4 * vector))))
        config = EngineConfig.of(home="memory", lanes=lanes, vec=vector, threads=max(lanes, 128))
        if 32 < lanes < 128:
            config = EngineConfig.of(home="memory", lanes=lanes, vec=vector, threads=lanes)
        engine = CrossEntropyBackwardEngine()
        consts = ColumnsConsts(engine.row_consts(rows, config, 1), p.smoothing, p.smoothing / p.classes, p.reduction == "mean")
        own = [*extra, Arg("first_class", "s64", first)]
        return engine.row_step("rowwise/cross_entropy_columns", consts, p.op, rows, config, device, own)


def _policy(p: LinearCrossEntropyProblem) -> Policy:
    return replace(p.policy, workspace_limit=None)


def _pitch(p: LinearCrossEntropyProblem) -> int:
    """Elements from row to row of the logits: rows begin at multiples of 16 bytes."""
    unit = 16 // p.desc("x").dtype.num_bytes
    return -(-p.classes // unit) * unit


def _logits_bytes(p: LinearCrossEntropyProblem, count: int) -> int:
    return count * _pitch(p) * p.desc("x").dtype.num_bytes


def _logits_product(p: LinearCrossEntropyProblem, first: int, count: int) -> Product:
    bias = (("bias", p.desc("bias")),) if p.has("bias") else ()
    return (("a", piece(p.desc("x"), 0, first, count)[0]), ("b", p.desc("w")), *bias, ("d", _logits(p, count))), (("transpose_b", True),)


def _logits(p: LinearCrossEntropyProblem, count: int) -> TensorDesc:
    return TensorDesc(p.desc("x").dtype, (count, p.classes), (_pitch(p), 1))


def _cross_entropy(p: LinearCrossEntropyProblem, first: int, count: int, op: str = "cross_entropy") -> CrossEntropyProblem:
    """The cross-entropy of a chunk's rows."""
    logits = _logits(p, count)
    tensors = {"logits": logits, "target": piece(p.desc("target"), 0, first, count)[0]}
    tensors |= {"weight": p.desc("weight")} if p.has("weight") else {}
    if op == "cross_entropy_backward":
        tensors["d_logits"] = logits
    for name in ("d_loss",) if op == "cross_entropy_backward" else ("loss",):
        if p.has(name):
            desc = p.desc(name)
            tensors[name] = piece(desc, 0, first, count)[0] if desc.rank else desc
    attrs = {"reduction": p.reduction, "label_smoothing": p.smoothing, "ignore_index": p.ignore_index}
    if op == "cross_entropy" and not p.has("loss"):
        attrs["reduction"] = "sum"
    problem = OPS[op].make(tensors, attrs, p.policy)
    assert isinstance(problem, CrossEntropyProblem)
    return problem


COLUMNS = LinearLossColumns()
ENGINES: dict[str, tuple[Engine, ...]] = {
    op: (LinearLossRows(), COLUMNS) for op in ("linear_cross_entropy", "linear_cross_entropy_backward")}
