"""Scales by their last steps, and quantised once more."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import F32
from ...ops.base import Problem
from ...ops.quantize import KINDS
from ...ops.quantize_scales import DelayedScaleProblem, DoubleProblem
from . import Expected, Reference
from .quantize import codes_of, numbers_of


def delayed_scale(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, DelayedScaleProblem)
    history = np.concatenate([inputs["amax"][None], inputs["history"][:-1]]).astype(np.float32)
    amax = history.max(0) if problem.takes_all else history[0]
    with np.errstate(all="ignore"):
        found = amax * np.float32(2.0**problem.margin) / np.float32(KINDS[problem.kind].largest)
        known = (found > 0) & np.isfinite(found)
    return {"new_history": Expected(history), "new_scale": Expected(np.where(known, found, inputs["scale"]))}


def double_quantize(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, DoubleProblem)
    x = inputs["x"]
    most = np.abs(x).max()
    flat = (x - x.mean()).reshape(-1)
    groups = np.pad(flat, (0, -len(flat) % problem.group)).reshape(-1, problem.group)
    scale = np.abs(groups).max(1) / 448
    scale = np.where(scale == 0, 1.0, scale)
    numbers = groups / scale[:, None]
    y = numbers_of("e4m3")[codes_of(numbers.astype(np.float32), KINDS["e4m3"])].reshape(-1)[: x.size].reshape(x.shape)
    near = 2.0**-20 * most  # of the mean, and what of it is left in differences
    slack = (near / scale)[:, None] * np.ones(problem.group) * 2
    return {"y": Expected(y, slack=slack.reshape(-1)[: x.size].reshape(x.shape)),
            "offset": Expected(x.mean(), np.abs(x).mean(), x.size, F32),
            "scale": Expected(scale, slack=np.full(scale.shape, near))}


def double_dequantize(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, DoubleProblem)
    x = inputs["x"]
    scale = inputs["scale"].repeat(problem.group)[: x.size].reshape(x.shape)
    return {"y": Expected(x * scale + inputs["offset"], np.abs(x * scale) + np.abs(inputs["offset"]), 2, F32)}


REFERENCES: dict[str, Reference] = {"delayed_scale": delayed_scale, "double_quantize": double_quantize,
                                    "double_dequantize": double_dequantize}
