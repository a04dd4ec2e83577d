"""Steps over lists in float64: every tensor by itself, with NumPy's sums."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...codegen.pointwise import Expression
from ...dtypes import dtype
from ...ops.base import Problem
from ...ops.foreach import ForeachProblem
from . import Expected
from .pointwise import error_bound

SUM_ERROR = 1e-5  # relative, of what is reduced in f32 and of what is made of it


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, ForeachProblem)
    kind = dtype(problem.compute)
    single = {name: inputs[name].reshape(()).astype(np.float64) for name in problem.shared}
    tensors = [{role: inputs[f"{role}_{i}"].astype(np.float64) for role in problem.input_roles} for i in range(problem.count)]

    def value(expression: Expression, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.asarray(expression.evaluate({**arrays, **single}, scalars)[0], np.float64)

    results: list[dict[str, np.ndarray]] = [{} for _ in tensors]
    if problem.reduced:
        parts = []
        for arrays in tensors:
            shape = arrays[problem.input_roles[0]].shape
            values = {name: np.broadcast_to(value(e, arrays), shape) for name, _, e in problem.reduced}
            with np.errstate(all="ignore"):
                parts.append({name: values[name].sum() if how == "add" else np.fmax.reduce(values[name], axis=None, initial=0.0)
                              for name, how, _ in problem.reduced})
        if not problem.per_tensor:
            with np.errstate(all="ignore"):
                total = {n: (np.sum if how == "add" else np.max)([p[n] for p in parts]) for n, how, _ in problem.reduced}
            parts = [total] * len(parts)
        results = [{name: value(e, part) for name, e in problem.results} for part in parts]
    expected: dict[str, Expected] = {}
    for i, arrays in enumerate(tensors):
        known = {**arrays, **single, **results[i]}
        for role, e in problem.updates:
            shape = problem.descs[f"{role}_{i}"].shape
            want = np.broadcast_to(np.asarray(e.evaluate(known, scalars)[0], np.float64), shape)
            slack = np.broadcast_to(np.nan_to_num(error_bound(e, known, scalars, problem.compute)[0]), shape)
            if kind.name == "f64":
                slack = 2 * slack  # `want` is computed in float64 too and errs as much
            if set(results[i]) & set(e.args):
                moved = {name: v * (1 + (SUM_ERROR if problem.compute == "f32" else 1e-12)) for name, v in results[i].items()}
                with np.errstate(all="ignore"):
                    slack = slack + np.nan_to_num(np.abs(np.asarray(e.evaluate(known | moved, scalars)[0]) - want))
            expected[f"{role}_{i}"] = Expected(want, terms=0, accumulate=kind, slack=slack)
    for name, _ in problem.results:
        if name in problem.descs:
            want = results[0][name].reshape(problem.descs[name].shape)
            error = SUM_ERROR if problem.compute == "f32" else 1e-12
            expected[name] = Expected(want, accumulate=kind, approximate=error if name == "norm" else 0.0)
    return expected


_NAMES = ("sgd_step", "adam_step", "adagrad_step", "rmsprop_step", "lion_step", "lamb_step", "grad_norm", "clip_grad_norm", "unscale_grads",
          "foreach")
REFERENCES = dict.fromkeys(_NAMES, reference)
