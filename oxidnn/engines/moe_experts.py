"""Layers of experts as a sort, grouped GEMMs and a weighted sum: any types, any counts."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import log2
from typing import Any

from ..device import DeviceInfo
from ..dtypes import S32
from ..ops import OPS
from ..ops.base import Policy, Problem
from ..ops.moe import MoeProblem
from ..tensor import TensorDesc
from . import composition, matmul
from .base import SUPPORTED, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, WorkspaceArg
from .composition import Place, Product
from .moe_rows import Held, combine_step, dequantize_step, expand_step, gate_gradient_step, held, index, packed, scatter_step, sort_steps

_TRIED = 2  # configs of each engine that takes a product


@lru_cache(maxsize=512)
def _choices(product: Product, op: str, policy: Policy, device: DeviceInfo) -> tuple[tuple[float, Problem, Engine, EngineConfig], ...]:
    """The most promising ways to compute a grouped product, the fastest by estimate first."""
    problem = OPS[op].make(dict(product[0]), dict(product[1]), policy)
    if problem.is_empty:
        return ((0.0, problem, matmul.ENGINES[op][-1], EngineConfig()),)
    takers = [e for e in matmul.ENGINES[op] if (e.is_deterministic or not policy.deterministic) and e.check_support(problem, device)]
    tiled = [e for e in takers if e is not matmul.ENGINES[op][-1]] or takers  # the direct engine for what no other takes
    found = [(e.estimate(problem, c, device), problem, e, c) for e in tiled for c in e.configs(problem, device)[:_TRIED]]
    return tuple(sorted(found, key=lambda choice: choice[0])[:2 * _TRIED])


class _Experts(Engine):
    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        return SUPPORTED

    def products(self, p: MoeProblem) -> dict[str, tuple[str, Product]]:
        """The grouped products by name: op, operands and attributes."""
        raise NotImplementedError

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Which choice of each product: the first of all, and each other one beside the first of the others."""
        assert isinstance(problem, MoeProblem)
        if problem.rows == 0:
            return (EngineConfig(),)
        products = self.products(problem)
        counts = {name: len(_choices(made, op, problem.policy, device)) for name, (op, made) in products.items()}
        found = [dict.fromkeys(products, 0)] + [dict.fromkeys(products, 0) | {n: i} for n, c in counts.items() for i in range(1, c)]
        return tuple(sorted((EngineConfig.of(**f) for f in found), key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, MoeProblem)
        if p.rows == 0:
            return 5.0
        total = sum(_choices(made, op, p.policy, device)[config[name]][0] for name, (op, made) in self.products(p).items())
        moved_bytes = (p.tokens + 3 * p.rows) * p.hidden * p.kind.num_bytes * (2 if p.op.endswith("backward") else 1)
        # Of few rows an expert the loops are slower than they say, of many faster, but for long runs (H200).
        each = p.rows / max(1, min(p.experts, p.rows))
        total *= (0.78 + 0.11 * log2(max(total / 1000, 1.0))) * (1 + 1.8 / each**0.7)
        return total + 14.0 + moved_bytes / (device.bandwidth_gbs * 800)

    def build_products(self, p: MoeProblem, config: EngineConfig, device: DeviceInfo) -> tuple[dict[str, Build], int]:
        """The products' steps, and the most workspace one takes."""
        builds = {}
        for name, (op, made) in self.products(p).items():
            _, problem, engine, chosen = _choices(made, op, p.policy, device)[config[name] if p.rows else 0]
            builds[name] = Build(()) if problem.is_empty else engine.build_steps(problem, chosen, device)
        return builds, max(b.workspace_bytes for b in builds.values())


def _grouped(a: TensorDesc, b: TensorDesc, d: TensorDesc, experts: int, **attrs: Any) -> Product:
    sizes = TensorDesc.packed(S32, (experts,))
    return (("a", a), ("b", b), ("group_sizes", sizes), ("d", d)), tuple(attrs.items())


def moved(build: Build, workspace: WorkspaceArg, **places: Place) -> list[Step]:
    """A product's steps; those of the Hopper loop get ready while the launch before them ends."""
    return [replace(step, spec=replace(step.spec, follows=True)) if step.spec.template == "matmul/wgmma_sm90" else step
            for step in composition.moved(build, workspace, **places)]


def _take(scratch: Scratch, desc: TensorDesc) -> WorkspaceArg:
    return scratch.take(desc.shape[0] * desc.strides[0] * desc.dtype.num_bytes)


def _sorted_rows(p: MoeProblem) -> tuple[TensorDesc, TensorDesc]:
    """Rows of hidden and of inter columns, by expert."""
    x = p.inputs[0].desc
    return packed(x, p.rows, p.hidden), packed(x, p.rows, p.inter)


def working(p: MoeProblem, device: DeviceInfo, scratch: Scratch, steps: list[Step]) -> tuple[Held, Held, Held, Held]:
    """(ids, order, inverse, counts): what is sorted, and where the result goes; ids of rows that were exchanged are made first."""
    order, counts = (Held(TensorDesc.packed(S32, (n,)), scratch.take(4 * n)) for n in (p.rows, p.experts))
    inverse = Held(index(p.tokens, p.topk), scratch.take(4 * p.rows))
    if p.has("ids"):
        return held(p, "ids"), order, inverse, counts
    ids = Held(index(p.rows), scratch.take(4 * p.rows))
    steps.append(expand_step(p, held(p, "counts"), ids.place, device))
    return ids, order, inverse, counts


class Moe(_Experts):
    """moe and moe_exchanged: sort, rows to their experts, the first product with its gate, the second, the weighted sum."""

    def __init__(self, op: str) -> None:
        self.id = f"{op}.grouped"  # type: ignore[misc]

    def products(self, p: MoeProblem) -> dict[str, tuple[str, Product]]:
        (xs, h), (w_gate_up, w_down) = _sorted_rows(p), self.matrices(p)
        return {"up": ("grouped_gemm", _grouped(xs, w_gate_up, h, p.experts, transpose_b=True, gate=p.activation)),
                "down": ("grouped_gemm", _grouped(h, w_down, xs, p.experts, transpose_b=True))}

    def matrices(self, p: MoeProblem) -> tuple[TensorDesc, TensorDesc]:
        return p.desc("w_gate_up"), p.desc("w_down")

    def placed(self, p: MoeProblem, counts: Held, device: DeviceInfo, scratch: Scratch, steps: list[Step]) -> tuple[Place, Place]:
        """Where both matrices are."""
        return TensorArg("w_gate_up"), TensorArg("w_down")

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, MoeProblem)
        if p.is_empty:
            return Build(())
        scratch, (xs, h), steps = Scratch(), _sorted_rows(p), list[Step]()
        ids, order, inverse, counts = working(p, device, scratch, steps)
        rows, middle = _take(scratch, xs), _take(scratch, h)
        steps += sort_steps(p, ids, order, inverse, counts, device, scratch)
        steps.append(scatter_step(p, held(p, "x"), inverse, Held(xs, rows), device))
        builds, most = self.build_products(p, config, device)
        workspace = scratch.take(most)
        up, down = self.placed(p, counts, device, scratch, steps)
        steps += moved(builds["up"], workspace, a=rows, b=up, group_sizes=counts.place, d=middle)
        steps += moved(builds["down"], workspace, a=middle, b=down, group_sizes=counts.place, d=rows)
        weights = held(p, "weights") if p.has("weights") else None
        steps.append(combine_step(p, Held(xs, rows), inverse, weights, held(p, "y"), device))
        return Build(tuple(steps), scratch.num_bytes)


class MoeQuantized(Moe):
    """Matrices of 8-bit floats or integers: the numbers of experts that have rows go to the workspace, which has room for all."""

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, MoeProblem)
        numbers, p = 3 * problem.used * problem.hidden * problem.inter, problem
        code = 0.5 if p.desc("w_down").dtype.name == "u8" else 1.0
        return super().estimate(problem, config, device) + 5.0 + numbers * (code + p.kind.num_bytes) / (device.bandwidth_gbs * 800)

    def matrices(self, p: MoeProblem) -> tuple[TensorDesc, TensorDesc]:
        return tuple(_matrix(p, *shape) for shape in ((2 * p.inter, p.hidden), (p.hidden, p.inter)))  # type: ignore[return-value]

    def placed(self, p: MoeProblem, counts: Held, device: DeviceInfo, scratch: Scratch, steps: list[Step]) -> tuple[Place, Place]:
        places = []
        for name, desc in zip(("gate_up", "down"), self.matrices(p), strict=True):
            places.append(scratch.take(p.experts * desc.strides[0] * p.kind.num_bytes))
            if desc.numel:
                steps.append(dequantize_step(p, name, counts.place, Held(desc, places[-1]), device))
        return places[0], places[1]


def _matrix(p: MoeProblem, rows: int, columns: int) -> TensorDesc:
    """Of every expert, rows from multiples of 16 bytes on."""
    pitch = packed(p.desc("x"), 1, columns).strides[0]
    return TensorDesc(p.kind, (p.experts, rows, columns), (max(rows, 1) * pitch, pitch, 1))


class MoeBackward(_Experts):
    """The experts' middle is computed again. dh is the gradient of the middle but for the routing weight:
    dh = dy Wd, of sorted rows; dweights = dh . h; dWd = dy^T (w h); dz from w dh; dx = sum of dz W_gate_up; dW_gate_up = dz^T x."""

    id = "moe_backward.grouped"

    def products(self, p: MoeProblem) -> dict[str, tuple[str, Product]]:
        xs, h = _sorted_rows(p)
        z, e = packed(xs, p.rows, 2 * p.inter), p.experts
        up, down = p.desc("w_gate_up"), p.desc("w_down")
        return {"up": ("grouped_gemm", _grouped(xs, up, z, e, transpose_b=True)), "down": ("grouped_gemm", _grouped(xs, down, h, e)),
                "dx": ("grouped_gemm", _grouped(z, up, xs, e)),
                "dw_gate_up": ("grouped_gemm_wgrad", _grouped(z, xs, p.desc("dw_gate_up"), e)),
                "dw_down": ("grouped_gemm_wgrad", _grouped(xs, h, p.desc("dw_down"), e))}

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, MoeProblem)
        if p.is_empty:
            return Build(())
        scratch, (xs, h), steps = Scratch(), _sorted_rows(p), list[Step]()
        z = packed(xs, p.rows, 2 * p.inter)
        ids, order, inverse, counts = working(p, device, scratch, steps)
        rows, upstream = (_take(scratch, xs) for _ in range(2))
        made, dmade = (_take(scratch, z) for _ in range(2))
        dh, scaled = (_take(scratch, h) for _ in range(2))
        steps += sort_steps(p, ids, order, inverse, counts, device, scratch)
        builds, most = self.build_products(p, config, device)
        workspace = scratch.take(most)
        sizes = counts.place
        if p.rows:
            steps += [scatter_step(p, held(p, "x"), inverse, Held(xs, rows), device),
                      scatter_step(p, held(p, "dy"), inverse, Held(xs, upstream), device)]
            steps += moved(builds["up"], workspace, a=rows, b=TensorArg("w_gate_up"), group_sizes=sizes, d=made)
            steps += moved(builds["down"], workspace, a=upstream, b=TensorArg("w_down"), group_sizes=sizes, d=dh)
            weights, dweights = held(p, "weights"), held(p, "dweights")
            steps.append(gate_gradient_step(p, Held(z, made), Held(h, dh), scaled, dmade, order.place, weights, dweights, device))
        steps += moved(builds["dw_down"], workspace, a=upstream, b=scaled, group_sizes=sizes, d=TensorArg("dw_down"))
        steps += moved(builds["dw_gate_up"], workspace, a=dmade, b=rows, group_sizes=sizes, d=TensorArg("dw_gate_up"))
        if p.rows:
            steps += moved(builds["dx"], workspace, a=dmade, b=TensorArg("w_gate_up"), group_sizes=sizes, d=rows)
            steps.append(combine_step(p, Held(xs, rows), inverse, None, held(p, "dx"), device))
        return Build(tuple(steps), scratch.num_bytes)


ENGINES: dict[str, tuple[Engine, ...]] = {"moe": (Moe("moe"),), "moe_exchanged": (Moe("moe_exchanged"),), "moe_backward": (MoeBackward(),),
                                          "moe_quantized": (MoeQuantized("moe_quantized"),)}
