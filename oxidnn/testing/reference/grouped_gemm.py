"""Grouped GEMM in float64, group by group; sums of integers exactly, modulo 2^32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...dtypes import S32
from ...ops.base import Problem
from ...ops.grouped_gemm import GroupedGemmProblem
from . import Expected
from .epilogue import product_error
from .gemm import FP8, gated, tensor_core_error


def bounds_of(p: GroupedGemmProblem, sizes: np.ndarray) -> list[tuple[int, int]]:
    """(first row, end) of each group."""
    bounds, end = [], 0
    for size in (int(s) for s in sizes):
        begin, end = end, min(max(end, size) if p.is_cumulative else end + max(0, size), p.rows)
        bounds.append((begin, end))
    return bounds


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, GroupedGemmProblem)
    is_integer = p.accumulator is S32
    a, b = (inputs[name].astype(np.int64) if is_integer else inputs[name] for name in ("a", "b"))
    acc = np.zeros((p.groups, p.m, p.n) if p.is_wgrad else (p.rows, p.n), np.int64 if is_integer else np.float64)
    magnitude = np.zeros(acc.shape)
    for g, (begin, end) in enumerate(bounds_of(p, inputs["group_sizes"])):
        place = g if p.is_wgrad else slice(begin, end)
        left = a[begin:end].T if p.is_wgrad else a[begin:end]
        right = b[begin:end] if p.is_wgrad else b[g].T if p.transpose_b else b[g]
        acc[place], magnitude[place] = left @ right, np.abs(left) @ np.abs(right)
    terms, error = p.k + 4, product_error(p)
    if is_integer:
        acc = acc.astype(np.int32)
        if p.gate is None:
            return {"d": Expected(acc.astype(np.float64) if p.desc("d").dtype.is_float else acc)}
        acc, magnitude, terms = acc.astype(np.float64), np.abs(acc), 4

    def expect(relative: float) -> Expected:
        if p.gate is not None:
            return gated(p, p.gate, inputs, acc, magnitude, relative * magnitude, terms)
        return Expected(acc, magnitude, terms, p.accumulator, slack=relative * magnitude)

    found = expect(error)
    if p.desc("a").dtype in FP8:
        found = replace(found, coarse_slack=expect(error + tensor_core_error(p.k, p.policy.math)).slack)
    return {"d": found}


REFERENCES = {"grouped_gemm": reference, "grouped_gemm_wgrad": reference}
