"""Multi-head attention as GEMMs around the attention of heads, each by the engine of the smallest estimate.

Rows of a batch and of all batches are one dimension where strides let them be; elsewhere a GEMM takes the batches one by one, and what is
summed over rows is copied first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.multi_head_attention import MASKS, SOURCES, MultiHeadAttentionProblem
from ..tensor import TensorDesc
from . import (
    attention_backward_mma,
    attention_backward_wgmma,
    attention_decode,
    attention_mma_sm80,
    attention_plain,
    attention_wgmma_sm90,
    matmul,
)
from .base import SUPPORTED, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .composition import COPIES, Place, cheapest, moved
from .reduce_tree import reduction_steps

_MODULES = (attention_decode, attention_backward_wgmma, attention_backward_mma, attention_wgmma_sm90, attention_mma_sm80, attention_plain)
ATTENTION: dict[str, tuple[Engine, ...]] = {op: tuple(e for m in _MODULES for e in m.ENGINES.get(op, ()))
                                            for op in ("attention", "attention_backward")}
Located = tuple[TensorDesc, Place]


def flat_rows(desc: TensorDesc) -> TensorDesc | None:
    """(batch * length, features) of (batch, length, features), None where strides forbid it."""
    batch, length, width = desc.shape
    first, row, column = desc.strides
    if batch > 1 and length > 1 and first != length * row:
        return None
    return TensorDesc(desc.dtype, (batch * length, width), (row if length > 1 else first, column), desc.align)


class _Composition:
    """Steps that share one piece of workspace, and what they are estimated to take."""

    def __init__(self, p: MultiHeadAttentionProblem, device: DeviceInfo) -> None:
        self.p, self.device, self.scratch = p, device, Scratch()
        self.policy = replace(p.policy, deterministic=True, workspace_limit=None)
        self.parts: list[tuple[Build, dict[str, Place]] | list[Step]] = []
        self.estimate = 2.0
        self._copies: dict[Place, Located] = {}

    def build(self) -> Build:
        builds = [part[0] for part in self.parts if isinstance(part, tuple)]
        workspace = self.scratch.take(max((b.workspace_bytes for b in builds), default=0))
        steps = [s for part in self.parts for s in (moved(part[0], workspace, **part[1]) if isinstance(part, tuple) else part)]
        return Build(tuple(steps), self.scratch.num_bytes)

    def at(self, name: str) -> Located:
        """An operand of the problem, or room for it as a value in between."""
        desc = self.p.flat(name)
        return desc, TensorArg(name) if self.p.has(name) else self.scratch.take(desc.num_bytes)

    def own(self, name: str) -> Located:
        return self.p.desc(name), TensorArg(name)

    def run(self, op: str, operands: Mapping[str, Located], attrs: tuple[tuple[str, Any], ...], engines: tuple[Engine, ...]) -> None:
        described = tuple((name, desc) for name, (desc, _) in operands.items())
        build, estimate = cheapest(op, described, attrs, self.policy, self.device, engines)
        self.parts.append((build, {name: place for name, (_, place) in operands.items()}))
        self.estimate += estimate

    def times(self, a: Located, w: Located, d: Located, transposed: bool, **more: Located) -> None:
        """d = a w' (transposed) or a w, plus bias and c; all but w and the bias have rows of batches."""
        rows = {"a": a, "d": d, **{n: located for n, located in more.items() if n == "c"}}
        plain = {name: (flat_rows(desc), place) for name, (desc, place) in rows.items()}
        operands = rows if any(desc is None for desc, _ in plain.values()) else {n: (desc, at) for n, (desc, at) in plain.items() if desc}
        attrs: tuple[tuple[str, Any], ...] = (("transpose_b", True),) if transposed else ()
        beside = {"bias": more["bias"]} if "bias" in more else {}
        self.run("gemm", {"a": operands["a"], "b": w, **operands, **beside}, attrs + ((("beta", 1.0),) if "c" in more else ()),
                 matmul.ENGINES["gemm"])

    def sum_products(self, a: Located, b: Located, d: Located) -> None:
        """d = a' b, over all rows of all batches."""
        self.run("gemm", {"a": self._flat(a), "b": self._flat(b), "d": d}, (("transpose_a", True),), matmul.ENGINES["gemm"])

    def sum_rows(self, a: Located, d: Located) -> None:
        self.parts.append(reduction_steps(self.p.op, a, d, (0, 1), "sum", self.device, self.scratch))
        self.estimate += 3.0 + a[0].num_bytes / (self.device.bandwidth_gbs * 800)

    def _flat(self, located: Located) -> Located:
        desc, place = located
        found = flat_rows(desc)
        if found is not None:
            return found, place
        if place not in self._copies:
            packed = TensorDesc.packed(desc.dtype, desc.shape)
            copy = self.scratch.take(packed.num_bytes)
            self.run("transform", {"x": located, "y": (packed, copy)}, (), COPIES)
            self._copies[place] = packed, copy
        desc, place = self._copies[place]
        return TensorDesc.packed(desc.dtype, (desc.shape[0] * desc.shape[1], desc.shape[2])), place

    def attend(self, places: Mapping[str, Place]) -> None:
        inner = self.p.inner
        places = {**places, **{n: TensorArg(n) for n in (*MASKS, "lse") if inner.has(n)}}
        self.run(inner.op, {o.name: (o.desc, places[o.name]) for o in inner.operands}, inner.attrs, ATTENTION[inner.op])


@lru_cache(maxsize=64)
def _composed(p: MultiHeadAttentionProblem, device: DeviceInfo) -> tuple[Build, float]:
    c = _Composition(p, device)
    if not p.is_empty:
        (_backward if p.is_backward else _forward)(c)
    return c.build(), c.estimate


def _forward(c: _Composition) -> None:
    def bias(name: str) -> dict[str, Located]:
        return {"bias": c.own(name)} if c.p.has(name) else {}

    parts = {name: c.at(name) for name in (*SOURCES, "context")}
    for name, source in SOURCES.items():
        c.times(c.own(source), c.own(f"w_{name}"), parts[name], True, **bias(f"bias_{name}"))
    c.attend({**{n: parts[n][1] for n in SOURCES}, "out": parts["context"][1]})
    more = {"c": c.own("residual")} if c.p.has("residual") else {}
    c.times(parts["context"], c.own("w_out"), c.own("out"), True, **bias("bias_out"), **more)


def _backward(c: _Composition) -> None:
    d_out, d_context = c.own("d_out"), c.at("d_context")
    parts = {f"d{name}": c.at(f"d{name}") for name in SOURCES}
    c.times(d_out, c.own("w_out"), d_context, False)
    c.sum_products(d_out, c.own("context"), c.own("dw_out"))
    c.attend({"d_out": d_context[1], "out": TensorArg("context"), **{n: TensorArg(n) for n in SOURCES},
              **{n: place for n, (_, place) in parts.items()}})
    for name, source in SOURCES.items():
        c.times(parts[f"d{name}"], c.own(f"w_{name}"), c.own(f"d_{source}"), False)
        c.sum_products(parts[f"d{name}"], c.own(source), c.own(f"dw_{name}"))
    if c.p.has("dbias_q"):
        for name in SOURCES:
            c.sum_rows(parts[f"d{name}"], c.own(f"dbias_{name}"))
        c.sum_rows(d_out, c.own("dbias_out"))


class MultiHeadAttention(Engine):
    """Workspace: what lies between the products and is not saved, and what these take."""

    id = "multi_head_attention.apart"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, MultiHeadAttentionProblem)
        inner = problem.inner
        refusals = [e.check_support(inner, device) for e in ATTENTION[inner.op]]
        return SUPPORTED if inner.is_empty or any(refusals) else refuse(f"attention: {refusals[-1].reason}")

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, MultiHeadAttentionProblem)
        return _composed(problem, device)[1]

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, MultiHeadAttentionProblem)
        return _composed(problem, device)[0]


ENGINES: dict[str, tuple[Engine, ...]] = {op: (MultiHeadAttention(),) for op in ("multi_head_attention", "multi_head_attention_backward")}
