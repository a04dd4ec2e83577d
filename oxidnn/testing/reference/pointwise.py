"""Expressions in float64 or integers, with a bound of the kernel's error carried through every node of the DAG."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from ...codegen.elementary import BRIEF_ULP
from ...codegen.pointwise import TABLE, Expression, apply, arg, round_to
from ...dtypes import dtype
from ...ops.base import Problem
from ...ops.pointwise import PointwiseProblem
from . import Expected


@cache
def _partials(name: str) -> tuple[Expression | None, ...]:
    """The derivatives of a function by its operands, over operand0, operand1, ... and dy."""
    row = TABLE[name]
    node = apply(name, *(arg(f"operand{i}") for i in range(row.arity)))
    return tuple(row.gradients(arg("dy"), node))


def error_bound(expression: Expression, arrays: Mapping[str, Any], scalars: Mapping[str, float], compute: str,
                brief: bool = False) -> list[np.ndarray]:
    """Absolute error of each output when every function errs by its row's bound (if brief, at least by BRIEF_ULP where it is no single
    instruction): first-order, in the arithmetic of `compute`."""
    body = expression.expanded()
    values = body.node_values(arrays, scalars)
    epsilon, tiny = dtype(compute).epsilon, dtype(compute).smallest
    errors: dict[Expression, Any] = {}
    with np.errstate(all="ignore"):
        for node in body.nodes():
            value = np.asarray(values.get(node, 0.0), np.float64)
            if node.op == "const":
                errors[node] = epsilon / 2 * np.abs(value) if np.float32(value) != value else 0.0
            elif node.op in ("arg", "scalar"):
                errors[node] = 0.0
            elif node.op == "cast":
                kind, before = dtype(node.value), errors[node.operands[0]]
                errors[node] = np.where(np.asarray(before) > 0, before + (kind.epsilon * np.abs(value) if kind.is_float else 1.0), 0.0)
            elif node.op in TABLE:
                row = TABLE[node.op]
                if row.is_condition:
                    errors[node] = 0.0
                    continue
                names = {f"operand{i}": values[o] for i, o in enumerate(node.operands)} | {"dy": 1.0}
                ulp = row.ulp if compute == "f32" else row.ulp64
                if brief and ulp > 0.5:
                    ulp = max(ulp, BRIEF_ULP)
                total: Any = ulp * epsilon * np.abs(value)
                exact = row.ulp <= 0.5 and node.op in ("neg", "abs", "maximum", "minimum", "fmax", "fmin", "where")
                total = 0.0 if exact else total + tiny
                for operand, partial in zip(node.operands, _partials(node.op), strict=True):
                    if partial is not None and np.any(np.asarray(errors[operand]) > 0):
                        slope = np.abs(np.asarray(partial.evaluate(names)[0], np.float64))
                        total = total + np.nan_to_num(slope * errors[operand], nan=0.0)
                    elif partial is None and node.op in ("floor", "ceil", "round", "trunc"):
                        total = np.where(np.asarray(errors[operand]) > 0, 1.0, 0.0)
                errors[node] = total
    return [np.asarray(errors[o], np.float64) for o in body.outputs]


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, PointwiseProblem)
    return {o.name: found for o, found in zip(problem.outputs, expected_values(problem, inputs, scalars), strict=True)}


def expected_values(problem: PointwiseProblem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> list[Expected]:
    """The expression's results of arrays by its operands' names, rounded and saturated where their type is an integer; the bound of the
    error is their slack."""
    expression, rank = problem.expression, len(problem.shape)
    arrays = {}
    scalars = {**scalars, **dict(problem.values)}
    for name in expression.args:
        values = inputs[name]
        if problem.compute[0] == "f":
            values = values.astype(np.float64)
        elif values.dtype.kind in "ub":
            values = values.astype(np.uint64 if problem.compute == "u64" else np.int64)
        if expression.axis(name) == "c":
            values = values.reshape((1, -1) + (1,) * (rank - 2))
        arrays[name] = values
    results = expression.evaluate(arrays, scalars)
    floating = problem.compute[0] == "f"
    bounds: list[Any] = error_bound(expression, arrays, scalars, problem.compute, problem.is_brief) if floating else [None] * len(results)
    expected = []
    targets = [v.operand for v in problem.seen if v.operand.is_output]
    for operand, result, bound in zip(targets, results, bounds, strict=True):
        kind = operand.desc.dtype
        want = np.broadcast_to(result, problem.shape)
        if not kind.is_float:
            expected.append(Expected(np.asarray(want if kind.bits == 64 and want.dtype.kind in "iu" else np.rint(want) if kind.bits == 64
                                                else round_to(want, kind.name))))
            continue
        accumulate = dtype(problem.compute) if floating else None
        slack = np.broadcast_to(bound, problem.shape) if floating else None
        if kind.num_bytes == 1:
            want = round_to(want, kind.name, problem.saturate)
        expected.append(Expected(want.astype(np.float64), terms=0, accumulate=accumulate, slack=slack))
    return expected


REFERENCES = {"pointwise": reference, "activation": reference, "activation_backward": reference}
