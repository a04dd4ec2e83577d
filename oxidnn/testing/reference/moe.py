"""Mixtures of experts in float64, assignment by assignment. What lies between products is rounded to the rows' type; slack allows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...codegen import pointwise as expr
from ...dtypes import U8, DType
from ...ops.base import Problem
from ...ops.moe import MoeProblem
from ..compare import accumulated_error
from . import Expected, Reference
from .epilogue import error_bound, product_error

Inputs = Mapping[str, np.ndarray]


def buckets_of(p: MoeProblem, ids: np.ndarray) -> np.ndarray:
    """The expert here of each assignment, flat; `experts` where there is none."""
    own = ids.reshape(-1).astype(np.int64) - p.first
    return np.where((own >= 0) & (own < p.experts), own, p.experts)


def ids_of(p: MoeProblem, inputs: Inputs) -> np.ndarray:
    """(tokens, topk); of rows that were exchanged from the counts."""
    if "ids" in inputs:
        return inputs["ids"]
    counts = np.maximum(inputs["counts"].astype(np.int64), 0)
    ids = np.repeat(np.tile(np.arange(p.experts), counts.shape[0]), counts.reshape(-1))[: p.tokens]
    return np.concatenate([ids, np.full(p.tokens - len(ids), -1)]).reshape(p.tokens, 1)


def permute(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, MoeProblem)
    buckets = buckets_of(p, inputs["ids"])
    order = np.argsort(buckets, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    is_here = buckets < p.experts
    xs = inputs["x"][order // p.topk] if p.rows else np.zeros((0, p.hidden), inputs["x"].dtype)
    return {"xs": Expected(xs), "order": Expected(np.where(is_here[order], order, ~order)),
            "inverse": Expected(np.where(is_here, inverse, ~inverse).reshape(p.tokens, p.topk)),
            "counts": Expected(np.bincount(buckets, minlength=p.experts + 1)[: p.experts])}


def _places(p: MoeProblem, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the assignments, and which have an expert; both (tokens, topk)."""
    return np.where(inverse < 0, ~inverse, inverse), inverse >= 0


def unpermute(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, MoeProblem)
    rows, is_here = _places(p, inputs["inverse"])
    weights = np.where(is_here, inputs["weights"] if "weights" in inputs else 1.0, 0.0)
    terms = np.where(is_here[..., None], inputs["ys"][rows], 0.0) * weights[..., None]
    return {"y": Expected(terms.sum(1), np.abs(terms).sum(1), p.topk, p.accumulator)}


def unpermute_backward(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, MoeProblem)
    rows, is_here = _places(p, inputs["inverse"])
    dys = np.zeros(inputs["ys"].shape)
    dys[rows] = np.where(is_here, inputs["weights"], 0.0)[..., None] * inputs["dy"][:, None]
    terms = np.where(is_here[..., None], inputs["ys"][rows], 0.0) * inputs["dy"][:, None]
    return {"dys": Expected(dys, accumulate=p.accumulator),
            "dweights": Expected(terms.sum(-1), np.abs(terms).sum(-1), p.hidden + 1, p.accumulator)}


@dataclass(frozen=True, slots=True)
class _Value:
    """Numbers and how far off they may be."""

    value: np.ndarray
    reach: np.ndarray

    def rounded(self, kind: DType, more: float = 0.0) -> _Value:
        """To the type, with a relative error of `more` beside."""
        return _Value(self.value, self.reach + (kind.epsilon + more) * (np.abs(self.value) + self.reach) + kind.smallest)

    def scaled(self, by: np.ndarray) -> _Value:
        return _Value(self.value * by, self.reach * np.abs(by))


class _Layer:
    """The layer's values, a row an assignment."""

    def __init__(self, p: MoeProblem, inputs: Inputs) -> None:
        self.p, self.inputs = p, inputs
        self.bucket = buckets_of(p, ids_of(p, inputs))
        self.product_error = product_error(p)
        self.x = self.rows_of("x")
        self.weights = np.ones(p.rows) if "weights" not in inputs else inputs["weights"].reshape(-1)
        self.weights = np.where(self.bucket < p.experts, self.weights, 0.0)[:, None]
        self.z = self.multiply(self.x, inputs["w_gate_up"].transpose(0, 2, 1))

    def rows_of(self, name: str) -> _Value:
        value = np.repeat(self.inputs[name], self.p.topk, 0)
        return _Value(value, np.zeros(value.shape))

    def relative(self, terms: int) -> float:
        return accumulated_error(self.p.accumulator, terms + 4) + self.product_error

    def multiply(self, a: _Value, b: np.ndarray) -> _Value:
        """Each row by its expert's matrix (k, n); 0 of no expert."""
        value = np.zeros((self.p.rows, b.shape[2]))
        reach = np.zeros_like(value)
        for e in range(self.p.experts):
            rows = self.bucket == e
            size = np.abs(b[e])
            value[rows] = a.value[rows] @ b[e]
            reach[rows] = a.reach[rows] @ size + self.relative(b.shape[1]) * ((np.abs(a.value[rows]) + a.reach[rows]) @ size)
        return _Value(value, reach)

    def multiply_gradient(self, a: _Value, b: _Value) -> Expected:
        """Of each expert the sum over its rows of a^T b."""
        value = np.zeros((self.p.experts, a.value.shape[1], b.value.shape[1]))
        slack = np.zeros_like(value)
        for e in range(self.p.experts):
            rows = self.bucket == e
            left, right = np.abs(a.value[rows]), np.abs(b.value[rows])
            value[e] = a.value[rows].T @ b.value[rows]
            sums = self.relative(int(rows.sum())) * (left.T @ right)
            slack[e] = a.reach[rows].T @ (right + b.reach[rows]) + left.T @ b.reach[rows] + sums
        return Expected(value, terms=0, accumulate=self.p.accumulator, slack=slack)

    def of_middle(self, z: _Value, expression: expr.Expression) -> list[_Value]:
        """The expression's outputs over both halves of z."""
        (g, u), (reach_g, reach_u) = np.split(z.value, 2, -1), np.split(z.reach, 2, -1)
        one = {"dy": np.ones(g.shape)}
        want = expression.evaluate({"g": g, "u": u} | one, {})
        ends = [expression.evaluate({"g": g + s * reach_g, "u": u + t * reach_u} | one, {}) for s in (-1, 1) for t in (-1, 1)]
        compute = "f64" if self.p.accumulator.name == "f64" else "f32"
        own = error_bound(expression, {"g": g, "u": u} | one, {}, compute)
        return [_Value(np.asarray(w), np.maximum.reduce([np.abs(e[i] - w) for e in ends]) + 2 * own[i]) for i, w in enumerate(want)]

    def combine(self, rows: _Value) -> Expected:
        """Weighted sums over the assignments of a token."""
        p = self.p
        shape = (p.tokens, p.topk, rows.value.shape[1])
        size, reach = (np.abs(x).reshape(shape).sum(1) for x in (rows.value, rows.reach))
        return Expected(rows.value.reshape(shape).sum(1), size, p.topk, p.accumulator, slack=reach)


def forward(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, MoeProblem)
    layer = _Layer(p, inputs)
    (h,) = layer.of_middle(layer.z, p.gate)
    ys = layer.multiply(h.rounded(p.kind), inputs["w_down"].transpose(0, 2, 1)).rounded(p.kind)
    return {"y": layer.combine(ys.scaled(layer.weights))}


def quantized(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    """The layer of numbers as they are rounded: q * scale in f32, then to x's type."""
    p = problem
    assert isinstance(p, MoeProblem)
    numbers = dict(inputs)
    for name, columns in (("gate_up", p.hidden), ("down", p.inter)):
        codes = inputs[f"w_{name}"]
        if p.desc(f"w_{name}").dtype is U8:
            codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], -1)[..., :columns].astype(np.int64)
            codes = codes - 16 * (codes > 7)
        scale = inputs[f"scale_{name}"]
        for axis, size in ((1, p.block[0]), (2, p.block[1])):
            scale = scale.repeat(size, axis).take(range(codes.shape[axis]), axis)
        product = codes.astype(np.float32) * scale.astype(np.float32)
        numbers[f"w_{name}"] = product.astype(p.kind.numpy).astype(np.float64)
    return forward(p, numbers, scalars)


def backward(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, MoeProblem)
    layer = _Layer(p, inputs)
    dy = layer.rows_of("dy")
    z, dh = layer.z.rounded(p.kind), layer.multiply(dy, inputs["w_down"]).rounded(p.kind)
    (h,) = layer.of_middle(z, p.gate)
    slopes = layer.of_middle(z, expr.outputs(p.gate.differentiate("g"), p.gate.differentiate("u")))
    terms = np.abs(dh.value * h.value).sum(-1)
    reach = (dh.reach * (np.abs(h.value) + h.reach) + np.abs(dh.value) * h.reach).sum(-1) + layer.relative(p.inter) * terms
    dweights = Expected((dh.value * h.value).sum(-1).reshape(p.tokens, p.topk), terms=0, accumulate=p.accumulator,
                        slack=reach.reshape(p.tokens, p.topk))
    parts = [_Value(dh.value * s.value, dh.reach * (np.abs(s.value) + s.reach) + np.abs(dh.value) * s.reach) for s in slopes]
    dz = _Value(np.concatenate([x.value for x in parts], -1), np.concatenate([x.reach for x in parts], -1))
    dz = dz.scaled(layer.weights).rounded(p.kind, 4 * p.accumulator.epsilon)
    dx = layer.multiply(dz, inputs["w_gate_up"]).rounded(p.kind)
    return {"dx": layer.combine(dx), "dweights": dweights, "dw_gate_up": layer.multiply_gradient(dz, layer.x),
            "dw_down": layer.multiply_gradient(dy, h.scaled(layer.weights).rounded(p.kind))}


REFERENCES: dict[str, Reference] = {"moe_permute": permute, "moe_unpermute": unpermute, "moe_unpermute_backward": unpermute_backward,
                                    "moe": forward, "moe_exchanged": forward, "moe_quantized": quantized, "moe_backward": backward}
