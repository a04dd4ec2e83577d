"""Resize in float64: a dense matrix per dimension, in fractions from the definitions, tap by tap; gradients multiply by its transpose."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil, floor, prod

import numpy as np

from ...dtypes import F32, F64
from ...ops.base import Problem
from ...ops.resize import ResizeProblem
from . import Expected, Reference


def _coordinate(rule: str, o: int, extent: int, outputs: int, scale: Fraction) -> Fraction:
    half = Fraction(1, 2)
    if rule == "asymmetric":
        return o / scale
    if rule == "align_corners":
        return Fraction(0) if outputs == 1 or scale * extent <= 1 else Fraction(o * (extent - 1)) / (scale * extent - 1)
    if rule == "pytorch_half_pixel" and outputs == 1:
        return Fraction(0)
    place = (o + half) / scale - half
    if rule == "half_pixel_symmetric":
        place += Fraction(extent, 2) * (1 - outputs / (scale * extent))
    return place


def _rounded(rule: str, s: Fraction) -> int:
    half = Fraction(1, 2)
    return {"floor": floor(s), "ceil": ceil(s), "round_prefer_floor": ceil(s - half), "round_prefer_ceil": floor(s + half)}[rule]


def keys(u: Fraction, a: Fraction) -> Fraction:
    """Keys' cubic convolution kernel."""
    u = abs(u)
    if u <= 1:
        return (a + 2) * u**3 - (a + 3) * u**2 + 1
    return a * u**3 - 5 * a * u**2 + 8 * a * u - 4 * a if u < 2 else Fraction(0)


def matrix(problem: ResizeProblem, dimension: int) -> np.ndarray:
    """[outputs, extent]: the weight of each element in each output."""
    axis = problem.axes[dimension]
    extent, outputs = axis.extent, axis.outputs
    weights = np.zeros((outputs, extent))
    scale = problem.scales[dimension] if problem.scales else Fraction(outputs, extent)
    for o in range(outputs):
        if problem.mode == "area":
            low, high = o * extent // outputs, -(-(o + 1) * extent // outputs)
            weights[o, low:high] = 1 / (high - low)
            continue
        s = _coordinate(problem.coordinates, o, extent, outputs, scale)
        if problem.mode == "nearest":
            weights[o, min(max(_rounded(problem.rounding, s), 0), extent - 1)] = 1
            continue
        widening = max(1 / scale, Fraction(1)) if problem.antialias else Fraction(1)
        reach = 2 * widening + 1
        taps = range(floor(s - reach), ceil(s + reach) + 1)
        if problem.excludes_outside:
            taps = range(max(taps.start, 0), min(taps.stop, extent))
        values = []
        for q in taps:
            u = (q - s) / widening
            values.append(max(Fraction(0), 1 - abs(u)) if problem.mode == "linear" else keys(u, Fraction(problem.coefficient)))
        total = sum(values) if problem.antialias or problem.excludes_outside else 1
        sums: dict[int, Fraction] = {}
        for q, value in zip(taps, values, strict=True):
            place = min(max(q, 0), extent - 1)
            sums[place] = sums.get(place, Fraction(0)) + value
        for place, value in sums.items():
            weights[o, place] = value / total
    return weights


def _apply(matrices: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    for dimension, m in enumerate(matrices):
        x = np.moveaxis(np.tensordot(m, x, (1, 2 + dimension)), 0, 2 + dimension)
    return x


def _run(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, ResizeProblem)
    (source,), (target,) = problem.inputs, problem.outputs
    if problem.is_empty:
        return {target.name: Expected(np.zeros(target.desc.shape))}
    matrices = [matrix(problem, d) for d in range(len(problem.axes))]
    if problem.is_backward:
        matrices = [m.T for m in matrices]
    x = inputs[source.name]
    terms = prod(int((m != 0).sum(1).max()) for m in matrices)
    magnitude = _apply([np.abs(m) for m in matrices], np.abs(x))
    # besides the sum, each of the weights is rounded
    accumulate = F64 if source.desc.dtype is F64 else F32
    return {target.name: Expected(_apply(matrices, x), magnitude, terms + 3, accumulate)}


REFERENCES: dict[str, Reference] = {"resize": _run, "resize_backward": _run}
