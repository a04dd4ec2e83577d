"""Linear layer and cross-entropy by chunks of rows: a GEMM writes a chunk's logits into the workspace, the kernels of cross-entropy take
its losses and turn it in place into the gradient of the logits, and GEMMs make of that the chunk's dx and its part of dw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import Any

from ..device import DeviceInfo
from ..ops import OPS
from ..ops.base import Policy, Problem
from ..ops.linear_loss import LinearCrossEntropyProblem
from ..ops.loss import CrossEntropyProblem
from ..tensor import TensorDesc
from . import matmul
from .base import (
    SUPPORTED,
    Arg,
    Build,
    Engine,
    EngineConfig,
    Scratch,
    Step,
    Support,
    TensorArg,
    TensorMapArg,
    WorkspaceArg,
    WorkspaceMapArg,
    refuse,
)
from .loss_row import CrossEntropyBackwardEngine, CrossEntropyEngine
from .reduce_tree import reduction_steps

CHUNK_BYTES = 128 << 20  # of logits, at most, or a quarter of what the sums of dw take (or _LEAST_ROWS rows)
_LEAST_ROWS = 128
_LIMIT = 2**31
Place = TensorArg | WorkspaceArg


def relocated(step: Step, places: Mapping[str, Place], workspace: WorkspaceArg | None = None) -> Step:
    """A step of another problem with that problem's operands at `places`, and its workspace where ours has room for it."""
    def move(value: Any) -> Any:
        if isinstance(value, TensorMapArg):
            place = places[value.name]
            offset = place.byte_offset + value.byte_offset
            return TensorMapArg(place.name, value.map, offset) if isinstance(place, TensorArg) else WorkspaceMapArg(value.map, offset)
        if isinstance(value, TensorArg):
            return shifted(places[value.name], value.byte_offset)
        return shifted(value, workspace.byte_offset) if isinstance(value, WorkspaceArg) and workspace is not None else value

    return replace(step, args=tuple(move(value) for value in step.args))


def moved(build: Build, workspace: WorkspaceArg, **places: Place) -> list[Step]:
    return [relocated(step, places, workspace) for step in build.steps]


def shifted(place: Any, num_bytes: int) -> Any:
    return replace(place, byte_offset=place.byte_offset + num_bytes)


def piece(desc: TensorDesc, axis: int, first: int, count: int) -> tuple[TensorDesc, int]:
    """`count` indices of a dimension from `first` on, and how many bytes further on they begin."""
    offset = first * desc.strides[axis] * desc.dtype.num_bytes
    shape = (*desc.shape[:axis], count, *desc.shape[axis + 1:])
    return TensorDesc(desc.dtype, shape, desc.strides, gcd(desc.align, offset)), offset


@lru_cache(maxsize=256)
def product(operands: tuple[tuple[str, TensorDesc], ...], attrs: tuple[tuple[str, Any], ...], policy: Policy,
            device: DeviceInfo) -> tuple[Build, float]:
    """The steps of a GEMM by the engine of the smallest estimate, and that estimate."""
    problem = OPS["gemm"].make(dict(operands), dict(attrs), policy)
    if problem.is_empty:
        return Build(()), 0.0
    engines = [e for e in matmul.ENGINES["gemm"] if e.check_support(problem, device)]
    choices = [(e.estimate(problem, config, device), e, config) for e in engines for config in e.configs(problem, device)[:1]]
    estimate, engine, config = min(choices, key=lambda choice: choice[0])
    return engine.build_steps(problem, config, device), estimate


class LinearLossRows(Engine):
    """Chunks of rows. Workspace: the logits of `rows` rows (see CHUNK_BYTES), what the GEMMs take, and for gradients in several chunks dw
    in the type of sums, unless dw has that type itself."""

    id = "linear_loss.rows"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, LinearCrossEntropyProblem)
        if max(problem.rows, problem.classes) >= _LIMIT:
            return refuse(f"{problem.rows} rows of {problem.classes} classes (at most {_LIMIT - 1} of each)")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Chunks of about equal size, as few as fit; and smaller ones."""
        assert isinstance(problem, LinearCrossEntropyProblem)
        num_bytes = max(CHUNK_BYTES, self._total(problem).num_bytes // 4 if problem.has_gradients else 0)
        fit = max(_LEAST_ROWS, num_bytes // (_pitch(problem) * problem.desc("x").dtype.num_bytes) // _LEAST_ROWS * _LEAST_ROWS)
        chunks = max(1, -(-problem.rows // fit))
        each = -(-problem.rows // chunks)
        rows = each if chunks == 1 else min(fit, -(-each // _LEAST_ROWS) * _LEAST_ROWS)
        return tuple(EngineConfig.of(rows=n) for n in dict.fromkeys(max(1, -(-rows // k)) for k in (1, 2, 4)))

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
                  is_last: bool = True) -> dict[str, tuple[tuple[tuple[str, TensorDesc], ...], tuple[tuple[str, Any], ...]]]:
        """(operands, attributes) of a chunk's GEMMs, by what they write."""
        x, _ = piece(p.desc("x"), 0, first, count)
        logits = _logits(p, count)
        bias = (("bias", p.desc("bias")),) if p.has("bias") else ()
        found: dict[str, tuple[Any, Any]] = {"logits": ((("a", x), ("b", p.desc("w")), *bias, ("d", logits)), (("transpose_b", True),))}
        if p.has_gradients:
            dx, _ = piece(p.desc("dx"), 0, first, count)
            found["dx"] = ((("a", logits), ("b", p.desc("w")), ("d", dx)), ())
            total = self._total(p)
            d = p.desc("dw") if is_last else total
            c = () if is_first else (("c", total),)
            found["dw"] = ((("a", logits), ("b", x), *c, ("d", d)), (("transpose_a", True), *((("beta", 1.0),) if c else ())))
        return found

    @staticmethod
    def _total(p: LinearCrossEntropyProblem) -> TensorDesc:
        """dw while chunks add to it."""
        dw = p.desc("dw")
        return dw if dw.dtype is p.accumulator else TensorDesc.packed(p.accumulator, dw.shape)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, LinearCrossEntropyProblem)
        if p.is_empty:
            return Build(())
        scratch, kind, rows = Scratch(), p.accumulator, config["rows"]
        firsts = range(0, p.rows, rows) if p.rows else range(1)
        chunks = [(first, min(rows, p.rows - first)) for first in firsts]
        place: Place = scratch.take(_logits(p, min(rows, p.rows)).num_bytes)
        total: Place = TensorArg("dw")
        if p.has_gradients and len(chunks) > 1 and p.desc("dw").dtype is not kind:
            total = scratch.take(self._total(p).num_bytes)
        plans = []
        for first, count in chunks:
            wanted = self._products(p, count, first, first == 0, first + count == p.rows)
            plans.append({name: product(operands, attrs, _policy(p), device)[0] for name, (operands, attrs) in wanted.items()})
        workspace = scratch.take(max(build.workspace_bytes for builds in plans for build in builds.values()))

        whole = _cross_entropy(p, 0, p.rows)
        forward, backward = CrossEntropyEngine(), CrossEntropyBackwardEngine()
        steps: list[Step] = []
        sums: list[Arg] = []
        loss_reduction, gradient_reduction, levels = "", "", list[Step]()
        if p.has("loss"):
            sums, loss_reduction, levels = forward.totals(whole, (p.desc("loss"), TensorArg("loss")), device, scratch)
        divisor: list[Arg] = []
        if p.has_gradients and p.reduction == "mean" and p.rows:
            made, at = backward.divisor_steps(whole, device, scratch)
            steps += [relocated(s, {"logits": place, "target": TensorArg("target"), "weight": TensorArg("weight")}) for s in made]
            divisor, gradient_reduction = [Arg("ptr_divisor", "u64", at)], "weighted"
        bias_parts: Place = TensorArg("dbias")
        if p.has("dbias") and len(chunks) > 1:
            bias_parts = scratch.take(len(chunks) * p.classes * kind.num_bytes)

        for k, ((first, count), builds) in enumerate(zip(chunks, plans, strict=True)):
            x_place = TensorArg("x", piece(p.desc("x"), 0, first, count)[1])

            if count:
                steps += moved(builds["logits"], workspace, a=x_place, b=TensorArg("w"), bias=TensorArg("bias"), d=place)
                rows_of = {"logits": place, "d_logits": place, "target": TensorArg("target", piece(p.desc("target"), 0, first, count)[1]),
                           "weight": TensorArg("weight")}
                for name in ("loss", "d_loss"):
                    if p.has(name):
                        desc = p.desc(name)
                        rows_of[name] = TensorArg(name, piece(desc, 0, first, count)[1] if desc.rank else 0)
                part = _cross_entropy(p, first, count)
                if p.has("loss"):
                    own = [replace(a, value=shifted(a.value, first * kind.num_bytes)) for a in sums]
                    best = forward.configs(part, device)[0]
                    steps.append(relocated(forward.loss_step(part, best, device, own, loss_reduction), rows_of))
                if p.has_gradients:
                    part = _cross_entropy(p, first, count, "cross_entropy_backward")
                    best = backward.configs(part, device)[0]
                    steps.append(relocated(backward.gradient_step(part, best, device, divisor, gradient_reduction), rows_of))
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
        return Build((*steps, *levels), scratch.num_bytes)


def _policy(p: LinearCrossEntropyProblem) -> Policy:
    return replace(p.policy, workspace_limit=None)


def _pitch(p: LinearCrossEntropyProblem) -> int:
    """Elements from row to row of the logits: rows begin at multiples of 16 bytes."""
    unit = 16 // p.desc("x").dtype.num_bytes
    return -(-p.classes // unit) * unit


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
    problem = OPS[op].make(tensors, attrs, p.policy)
    assert isinstance(problem, CrossEntropyProblem)
    return problem


ENGINES: dict[str, tuple[Engine, ...]] = {op: (LinearLossRows(),) for op in ("linear_cross_entropy", "linear_cross_entropy_backward")}
