"""What an epilogue makes of a matmul's float64 result, and how far the errors of the sum may move it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...dtypes import F32
from ...ops.base import Problem
from ...ops.epilogue import accumulator_of, align_shape
from ..compare import accumulated_error
from . import Expected
from .pointwise import error_bound

# Error of a product of two f32 numbers as a part of it, by what the policy's `math` allows to be done to them. tf32 rounds each to 11
# bits. The x3 forms split each into a leading part and the rounded rest, and leave out the product of the rests: three times the square of
# the part's unit, which is 2^-11 of tf32 and 2^-8 of bf16.
PRODUCT_ERROR = {"ieee": 0.0, "tf32": 2 * 2.0**-11, "tf32x3": 3 * 2.0**-22, "bf16x3": 3 * 2.0**-16, "fast": 2 * 2.0**-11}


def product_error(problem: Problem) -> float:
    """What the policy lets every product of convolution and GEMM err, as a part of its magnitude."""
    return PRODUCT_ERROR[problem.policy.math] if problem.operands[0].desc.dtype is F32 else 0.0


def narrowed(problem: Problem, result: Expected, name: str = "y") -> Expected:
    """The result in a type of 8 bits, which saturates: its own tolerance counts before rounding."""
    kind, accumulator = problem.desc(name).dtype, accumulator_of(problem.operands[0].desc.dtype)
    if kind.num_bytes > 1:
        return result
    want = np.asarray(result.want, np.float64)
    with np.errstate(all="ignore"):
        error = accumulated_error(accumulator, result.terms) * (np.abs(want) if result.magnitude is None else result.magnitude)
        error = error + (0.0 if result.slack is None else result.slack) + 4 * accumulator.epsilon * np.abs(want)
        want = np.clip(want, 0 if kind.kind == "uint" else -kind.max - (kind.kind == "int"), kind.max)
        return Expected(want if kind.is_float else np.nan_to_num(want, nan=0.0), terms=0, slack=error)


def finish(problem: Problem, epilogue: Any, acc: np.ndarray, magnitude: np.ndarray, slack: np.ndarray | None, terms: int,
           inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float], channel_axis: int, index: int = 0) -> Expected:
    """The expected output: epilogue(acc, operands), its output number `index`.

    Its slack: what the epilogue makes of acc at both ends of acc's own tolerance (functions of acc are taken to be monotonic that
    closely), and the bound of the epilogue's own arithmetic.
    """
    accumulate = accumulator_of(problem.operands[0].desc.dtype)
    if epilogue is None:
        return Expected(acc, magnitude, max(terms, 1), accumulate, slack=slack)
    arrays = {name: inputs[name].reshape(align_shape(problem.op, name, inputs[name].shape, acc.shape, channel_axis, epilogue.axis(name)))
              for name in epilogue.args if name != "acc"}

    def apply(values: np.ndarray) -> np.ndarray:
        return np.broadcast_to(epilogue.evaluate({"acc": values, **arrays}, scalars)[index], acc.shape)

    with np.errstate(all="ignore"):
        reach = accumulated_error(accumulate, max(terms, 1)) * magnitude + (0.0 if slack is None else slack)
        want = apply(acc)
        moved = np.fmax(np.abs(apply(acc + reach) - want), np.abs(apply(acc - reach) - want))
        own = error_bound(epilogue, {"acc": acc, **arrays}, scalars, accumulate.name)[index]
        total = np.nan_to_num(moved, nan=0.0) + 2 * own
    return Expected(want, None, 0, accumulate, slack=total)
