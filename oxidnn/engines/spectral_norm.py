"""Spectral normalisation: products of the weight with a vector and norms of vectors are maps of rows, the rest is pointwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..codegen.pointwise import parse
from ..device import DeviceInfo
from ..dtypes import F32, F64, DType
from ..ops.base import Operand, Problem
from ..ops.pointwise import PointwiseProblem
from ..ops.spectral_norm import SpectralNormProblem
from ..tensor import TensorDesc, packed_strides
from .base import SUPPORTED, Arg, ArgValue, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .pointwise_map import map_step, max_vec
from .reduce_tree import reduction_steps
from .row_map import RowMapConsts
from .rows import LIMIT, RowEngine, Rows

_NOTHING = parse("0")


class _Pass(RowEngine):
    """Threads for one pass over rows that are known."""

    held_operands = ()

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def rows(self, problem: Problem) -> Rows:
        return self._rows

    def reads_once(self, problem: Problem) -> bool:
        return True


def _kind(problem: SpectralNormProblem) -> DType:
    return F64 if problem.desc("w").dtype is F64 else F32


def _step(problem: SpectralNormProblem, rows: Rows, terms: str, finish: str, elements: str, device: DeviceInfo,
          row_outputs: Sequence[str] = ()) -> Step:
    """A map of rows. Operands are told apart by where they have elements; the last that has them everywhere is the output of `elements`,
    if there are such."""
    engine = _Pass(rows)
    config = engine.configs(problem, device)[0]
    full = [o.name for o in rows.operands if o.has_rows and o.has_columns]
    outputs = (full.pop(),) if elements else ()
    parsed = parse(terms)
    r = engine.row_consts(rows, config, parsed.num_outputs)
    numbers = {"eps": problem.eps} if "eps" in finish + elements else {}
    consts = RowMapConsts(r, parsed, parse(finish), parse(elements) if elements else _NOTHING, tuple(full),
                          tuple(o.name for o in rows.operands if not o.has_rows), (), outputs, tuple(row_outputs), tuple(numbers))
    return engine.row_step("rowwise/row_map", consts, problem.op, rows, config, device,
                           [Arg(f"number_{n}", r.compute, v) for n, v in numbers.items()])


class SpectralNormEngine(Engine):
    """Forward: two launches a half iteration, and one for y. Backward: three."""

    id = "spectral_norm.rows"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        count = problem.desc("w").numel
        return refuse(f"a weight of {count} elements (at most {LIMIT - 1})") if count >= LIMIT else SUPPORTED

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, SpectralNormProblem)
        reads = 2 + 2 * problem.iterations
        return 3.0 * reads + reads * problem.desc("w").num_bytes / (device.bandwidth_gbs * 800)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, SpectralNormProblem)
        scratch = Scratch()
        steps = self._gradient(problem, device, scratch) if problem.has("dw") else self._forward(problem, device, scratch)
        return Build(tuple(steps), scratch.num_bytes)

    def _forward(self, problem: SpectralNormProblem, device: DeviceInfo, scratch: Scratch) -> list[Step]:
        kind, sizes = _kind(problem), {n: problem.desc(n).shape[0] for n in "uv"}
        product = {n: scratch.take(size * kind.num_bytes) for n, size in sizes.items()}  # W v for u, W' u for v
        place: dict[str, ArgValue] = {n: TensorArg(n) for n in "uv"}
        steps: list[Step] = []
        for _ in range(problem.iterations):
            for target, source in (("v", "u"), ("u", "v")):
                steps += [self._product(problem, target, source, place[source], product[target], device),
                          self._normalize(problem, target, product[target], device)]
                place[target] = TensorArg(f"new_{target}")
        if not problem.iterations:
            steps.append(self._product(problem, "u", "v", place["v"], product["u"], device))
            vectors = {"x": TensorDesc.packed(kind, (sizes["u"],)), "u": problem.desc("u")}
            rows = Rows.of((sizes["u"],), (0,), vectors, {"sigma": TensorDesc.packed(kind, ())}, values={"x": product["u"]})
            steps.append(_step(problem, rows, "x * u", "s0", "", device, ("sigma",)))
        return [*steps, self._pointwise(problem, "w / sigma", {"w": problem.desc("w"), "sigma": problem.desc("sigma")}, "y", device)]

    @staticmethod
    def _product(problem: SpectralNormProblem, target: str, source: str, place: ArgValue, result: ArgValue, device: DeviceInfo) -> Step:
        """W v, or W' u: sums along what `source` has."""
        w, kind = problem.desc("w"), _kind(problem)
        axes = problem.axes if source == "v" else (problem.dim,)
        kept = tuple(w.shape[i] for i in range(w.rank) if i not in axes)
        name = f"new_{source}" if place == TensorArg(f"new_{source}") else source
        vector, extents = problem.desc(name), tuple(w.shape[i] for i in axes)
        spread = TensorDesc(kind, extents, tuple(s * vector.strides[0] for s in packed_strides(extents)), vector.align)
        rows = Rows.of(w.shape, axes, {"w": w}, {"product": TensorDesc.packed(kind, kept)}, {source: spread},
                       {"product": result, source: place})
        return _step(problem, rows, f"w * {source}", "s0", "", device, ("product",))

    @staticmethod
    def _normalize(problem: SpectralNormProblem, target: str, product: ArgValue, device: DeviceInfo) -> Step:
        """The new vector; sigma = u'(W v) with u = W v / max(|W v|, eps)."""
        new, kind = problem.desc(f"new_{target}"), _kind(problem)
        full = {"x": TensorDesc.packed(kind, new.shape), "y": new}
        sigma = {"sigma": TensorDesc.packed(kind, ())} if target == "u" else {}
        rows = Rows.of(new.shape, (0,), full, sigma, values={"x": product, "y": TensorArg(f"new_{target}")})
        return _step(problem, rows, "x * x", "s0 / (m := maximum(sqrt(s0), eps)), m", "x / r1", device, tuple(sigma))

    def _gradient(self, problem: SpectralNormProblem, device: DeviceInfo, scratch: Scratch) -> list[Step]:
        w, kind = problem.desc("w"), _kind(problem)
        count = w.shape[problem.dim]
        sums, total = scratch.take(count * kind.num_bytes), scratch.take(kind.num_bytes)
        rows = Rows.of(w.shape, problem.axes, {"w": w, "dy": problem.desc("dy")}, {"sums": TensorDesc.packed(kind, (count,))},
                       values={"sums": sums})
        steps = [_step(problem, rows, "dy * w", "s0", "", device, ("sums",))]
        one = TensorDesc.packed(kind, ())
        steps += reduction_steps(problem.op, (TensorDesc.packed(kind, (count,)), sums), (one, total), (0,), "sum", device, scratch)
        u, v, along = problem.desc("u"), problem.desc("v"), range(w.rank)
        strides = dict(zip(problem.axes, packed_strides(tuple(w.shape[i] for i in problem.axes)), strict=True))
        spread_u = TensorDesc(kind, tuple(w.shape[i] if i == problem.dim else 1 for i in along), tuple(u.strides[0] for _ in along),
                              u.align)
        spread_v = TensorDesc(kind, tuple(1 if i == problem.dim else w.shape[i] for i in along),
                              tuple(strides.get(i, 1) * v.strides[0] for i in along), v.align)
        operands = {"dy": problem.desc("dy"), "sigma": one, "total": one, "u": spread_u, "v": spread_v}
        last = self._pointwise(problem, "(dy - total / sigma * (u * v)) / sigma", operands, "dw", device)
        return [*steps, replace(last, args=tuple(total if a == TensorArg("total") else a for a in last.args))]

    @staticmethod
    def _pointwise(problem: SpectralNormProblem, text: str, descs: dict[str, TensorDesc], result: str, device: DeviceInfo) -> Step:
        """Over operands of these names, wherever the problem has them."""
        expression = parse(text)
        operands = (*(Operand(n, descs[n]) for n in expression.args), Operand(result, problem.desc(result), True))
        elements = PointwiseProblem(problem.op, operands, expression=expression, shape=problem.desc(result).shape,
                                    compute="f64" if _kind(problem) is F64 else "f32")
        return map_step(elements, max_vec(elements), device)


ENGINES: dict[str, tuple[Engine, ...]] = {op: (SpectralNormEngine(),) for op in ("spectral_norm", "spectral_norm_backward")}
