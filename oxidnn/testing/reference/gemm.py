"""GEMM in float64; sums of integers exactly, modulo 2^32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...codegen import pointwise as expr
from ...dtypes import F32
from ...ops.base import Problem
from ...ops.gemm import BLOCK, FP8, INT8, Blocks, GemmProblem, scale_shape
from ..compare import accumulated_error
from . import Expected
from .epilogue import finish, product_error
from .pointwise import error_bound


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, GemmProblem)
    a = inputs["a"].swapaxes(-1, -2) if p.transpose_a else inputs["a"]
    b = inputs["b"].swapaxes(-1, -2) if p.transpose_b else inputs["b"]
    if not p.alpha:  # they are not read, as in BLAS
        a, b = np.zeros_like(a), np.zeros_like(b)
    scale_a, scale_b = _scale(p, inputs, "scale_a", p.blocks_a), _scale(p, inputs, "scale_b", p.blocks_b)
    is_integer = p.desc("a").dtype in INT8
    # Roundings of a finished sum: by each plain scale, alpha, beta and from an integer; of a term: by each block scale.
    terms, per_term = p.k + 4, F32.epsilon * p.is_block_scaled
    if is_integer:
        a, b = a.astype(np.int64), b.astype(np.int64)
    if is_integer and not p.is_block_scaled:
        exact = (a @ b).astype(np.int32)
        if not p.desc("d").dtype.is_float:
            return {"d": Expected(exact)}
        acc, terms = exact * scale_a * scale_b, 4
        magnitude = np.abs(acc)
    else:
        a, b = a * scale_a, b * scale_b
        acc, magnitude = a @ b, np.abs(a) @ np.abs(b)
    acc, magnitude = p.alpha * acc, abs(p.alpha) * magnitude
    products, error = magnitude, product_error(p) + per_term
    if p.beta:
        acc, magnitude = acc + p.beta * inputs["c"], magnitude + abs(p.beta) * np.abs(inputs["c"])

    def expect(relative: float) -> dict[str, Expected]:
        slack = relative * products
        if p.gate is not None:
            return {"d": gated(p, p.gate, inputs, acc, magnitude, slack, terms)}
        return {o.name: finish(p, p.epilogue, acc, magnitude, slack, terms, inputs, scalars, -1, i) for i, o in enumerate(p.outputs)}

    expected = expect(error)
    if p.desc("a").dtype not in FP8:
        return expected
    coarse = expect(error + tensor_core_error(p.k, p.policy.math))
    return {name: replace(e, coarse_slack=coarse[name].slack) for name, e in expected.items()}


def tensor_core_error(k: int, math: str) -> float:
    """Twice what sums of 8-bit floats in Hopper's tensor cores err by, as a part of their magnitude: 13 bits are kept every 32 terms. Sums
    of 128 terms measure 5e-4; math="fast" lets all of k be summed so."""
    return 2.0**-12 * max(4, -(-k // 32) if math == "fast" else 0)


def _scale(p: GemmProblem, inputs: Mapping[str, np.ndarray], name: str, blocks: Blocks | None) -> np.ndarray:
    """The scale for every element of op(a) or op(b), or what broadcasts to it; ones without."""
    if blocks is None:
        return np.ones((1, 1))
    is_a = name == "scale_a"
    scale = inputs[name].reshape(scale_shape(p.desc(name), is_a))
    rows, row_axis, k_axis = (p.m, -2, -1) if is_a else (p.n, -1, -2)
    if blocks.rows == BLOCK:
        scale = scale.repeat(BLOCK, row_axis).take(np.arange(rows), row_axis)
    return scale.repeat(BLOCK, k_axis).take(np.arange(p.k), k_axis) if blocks.k else scale


def gated(p: Problem, name: str, inputs: Mapping[str, np.ndarray], acc: np.ndarray, magnitude: np.ndarray, slack: np.ndarray,
          terms: int) -> Expected:
    """gate(z[:n/2]) * z[n/2:]. Its slack: what becomes of both halves of z at the ends of their tolerance, and the gate's own bound."""
    if p.has("bias"):
        acc, magnitude = acc + inputs["bias"], magnitude + np.abs(inputs["bias"])
    reach = accumulated_error(F32, max(terms, 1)) * magnitude + slack
    z, up = np.split(acc, 2, -1)
    reach_z, reach_up = np.split(reach, 2, -1)
    inner = expr.arg("z")
    gate = (inner if name == "identity" else expr.apply(name, inner)) * expr.arg("up")

    def apply(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray(gate.evaluate({"z": x, "up": y}, {})[0])

    want = apply(z, up)
    ends = [np.abs(apply(z + s * reach_z, up + t * reach_up) - want) for s in (-1, 1) for t in (-1, 1)]
    compute = "f64" if p.desc("a").dtype.name == "f64" else "f32"
    own = error_bound(gate, {"z": z, "up": up}, {}, compute)[0]
    return Expected(want, None, 0, F32, slack=np.maximum.reduce(ends) + 2 * own)


REFERENCES = {"gemm": reference}
