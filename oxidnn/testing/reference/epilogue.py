"""What an epilogue makes of a matmul's float64 result, its magnitude and its output's tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...dtypes import F32, F64
from ...ops.base import Problem
from ...ops.epilogue import align_shape
from . import Expected


def finish(problem: Problem, epilogue: Any, acc: np.ndarray, magnitude: np.ndarray, terms: int, inputs: Mapping[str, np.ndarray],
           scalars: Mapping[str, float], channel_axis: int) -> Expected:
    """The expected output: epilogue(acc, operands). `magnitude` of acc grows by the epilogue's slope and by its operands."""
    accumulate = F64 if problem.operands[0].desc.dtype is F64 else F32
    if epilogue is None:
        return Expected(acc, magnitude, max(terms, 1), accumulate)
    arrays = {name: inputs[name].reshape(align_shape(problem.op, name, inputs[name].shape, acc.shape, channel_axis, epilogue.axis(name)))
              for name in epilogue.args if name != "acc"}

    def apply(values: np.ndarray) -> np.ndarray:
        return np.broadcast_to(epilogue.evaluate({"acc": values, **arrays}, scalars)[0], acc.shape)

    with np.errstate(all="ignore"):
        want = apply(acc)
        step = magnitude * 2.0**-20 + 1e-30
        slope = np.maximum(np.abs(apply(acc + step) - want), np.abs(apply(acc - step) - want)) / step
    spread = slope * (magnitude + np.abs(acc)) + np.abs(want)
    for array in arrays.values():
        spread = spread + np.abs(array)
    return Expected(want, spread, max(terms, 1), accumulate, 2.0**-20 if accumulate is F32 else 2.0**-48)
