"""Pooling in float64 (integers exactly), from tables of tap positions; gradients scatter, so they share nothing with a gather."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from ...dtypes import F32, F64, DType
from ...ops.base import Problem
from ...ops.pool import Axis, PoolProblem, UnpoolProblem
from . import Expected, Reference


def _starts(axis: Axis, sample: Any, kind: type[np.floating]) -> list[int]:
    """Where fractional windows begin, in the arithmetic of `kind`."""
    if axis.outputs == 1:
        return [axis.extent - axis.window]
    step, s = kind(axis.extent - axis.window) / kind(axis.outputs - 1), kind(sample)
    return [int((kind(o) + s) * step) - int(s * step) for o in range(axis.outputs - 1)] + [axis.extent - axis.window]


def _positions(axis: Axis, starts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(taps, counted): the input position of each tap of each output, -1 outside the input; and whether it lies in the padded extent."""
    taps = np.full((axis.outputs, axis.window), -1)
    counted = np.zeros((axis.outputs, axis.window), bool)
    for o in range(axis.outputs):
        if axis.fractional:
            places = list(range(starts[o], starts[o] + axis.window))
        elif axis.adaptive:
            places = list(range(o * axis.extent // axis.outputs, -(-(o + 1) * axis.extent // axis.outputs)))
        else:
            places = [o * axis.stride - axis.low + k * axis.dilation for k in range(axis.window)]
        for k, place in enumerate(places):
            counted[o, k] = place < axis.extent + axis.high
            if 0 <= place < axis.extent:
                taps[o, k] = place
    return taps, counted


def tap_table(problem: PoolProblem, samples: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(flat, counts): flat input position of every tap of every output [outputs, taps], -1 outside; the divisor of every output.

    samples: of one image and channel, for fractional windows (None: 0).
    """
    kind = np.float64 if problem.operands[0].desc.dtype is F64 else np.float32
    flat = np.zeros((1, 1), np.int64)
    counted = np.ones((1, 1), bool)
    for i, axis in enumerate(problem.axes):
        at = 1 - i if len(problem.axes) == 2 else i  # in two dimensions the last one's sample comes first
        starts = _starts(axis, np.float64(0.0) if samples is None else samples[at], kind) if axis.fractional else []
        taps, inside = _positions(axis, starts)
        joined = np.where((flat[:, None, :, None] < 0) | (taps[None, :, None, :] < 0), -1,
                          flat[:, None, :, None] * axis.extent + taps[None, :, None, :])
        flat = joined.reshape(-1, flat.shape[1] * taps.shape[1])
        counted = (counted[:, None, :, None] & inside[None, :, None, :]).reshape(flat.shape)
    if problem.divisor is not None:
        return flat, np.full(len(flat), float(problem.divisor))
    return flat, (counted if problem.count_include_pad else flat >= 0).sum(1).astype(np.float64)


def _accumulator(problem: PoolProblem) -> DType:
    return F64 if problem.operands[0].desc.dtype is F64 else F32


def _approximate(problem: PoolProblem) -> float:
    return 4e-6 if problem.mode == "lp" and problem.norm not in (1.0, 2.0) else 0.0


def _argmax(values: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """Flat positions of the maxima of `values` [images, outputs, taps]: the first of equals, the last NaN where there is one."""
    inside = flat >= 0
    is_nan = np.isnan(values) & inside if values.dtype.kind == "f" else np.zeros(values.shape, bool)
    lowest = -np.inf if values.dtype.kind == "f" else np.iinfo(values.dtype).min
    ranked = np.where(inside & ~is_nan, values, lowest)
    best = np.where(inside, ranked == ranked.max(-1, keepdims=True), False).argmax(-1)
    last_nan = values.shape[-1] - 1 - is_nan[..., ::-1].argmax(-1)
    return np.take_along_axis(np.broadcast_to(flat, values.shape), np.where(is_nan.any(-1), last_nan, best)[..., None], -1)[..., 0]


def forward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, PoolProblem)
    x, y_shape = inputs["x"], problem.desc("y").shape
    flat, counts = tap_table(problem)
    if problem.is_empty:
        return {o.name: Expected(np.zeros(o.desc.shape)) for o in problem.outputs}
    images = x.reshape(-1, prod(x.shape[2:]))
    if x.dtype.kind in "iu":
        images = images.astype(np.int64)
    results, magnitudes, picks = [], [], []
    samples = inputs["samples"].reshape(len(images), -1) if problem.has("samples") else None
    for i, image in enumerate(images):  # one at a time, so that memory stays small
        if samples is not None:
            flat, _ = tap_table(problem, samples[i])
        taps = image[flat]
        if problem.mode == "max":
            pick = _argmax(taps[None], flat)[0]
            picks.append(pick)
            results.append(image[pick])
            continue
        taps = np.where(flat >= 0, taps, 0.0)
        if problem.mode == "avg":
            results.append(taps.sum(1) / counts)
            magnitudes.append(np.abs(taps).sum(1) / np.abs(counts))
        else:
            results.append((np.abs(taps) ** problem.norm).sum(1) ** (1 / problem.norm))
    expected = {"y": Expected(np.stack(results).reshape(y_shape), np.stack(magnitudes).reshape(y_shape) if magnitudes else None,
                              flat.shape[1] if problem.mode != "max" else 1, _accumulator(problem), _approximate(problem))}
    if problem.has("indices"):
        expected["indices"] = Expected(np.stack(picks).reshape(y_shape))
    return expected


def backward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, PoolProblem)
    x_shape = problem.desc("dx").shape
    if problem.is_empty:
        return {"dx": Expected(np.zeros(x_shape))}
    flat, counts = tap_table(problem)
    dy = inputs["dy"].reshape(-1, len(flat))
    dx, magnitude = np.zeros((2, len(dy), prod(x_shape[2:])))
    x = inputs["x"].reshape(dx.shape) if "x" in inputs else None
    for i, gradient in enumerate(dy):
        if problem.mode == "max":
            pick = inputs["indices"].reshape(dy.shape)[i] if x is None else _argmax(x[i][flat][None], flat)[0]
            np.add.at(dx[i], pick, gradient)
            np.add.at(magnitude[i], pick, np.abs(gradient))
            continue
        if problem.mode == "avg":
            share = np.broadcast_to((gradient / counts)[:, None], flat.shape)
        else:
            y = inputs["y"].reshape(dy.shape)[i]
            with np.errstate(divide="ignore", invalid="ignore"):
                factor = np.where(y == 0, 0.0, y ** (1 - problem.norm)) if problem.norm != 1 else np.ones_like(y)
            assert x is not None
            with np.errstate(divide="ignore", invalid="ignore"):
                slope = np.where(x[i] == 0, 0.0, np.sign(x[i]) * np.abs(x[i]) ** (problem.norm - 1))
            share = (gradient * factor)[:, None] * slope[flat]
        np.add.at(dx[i], flat[flat >= 0], share[flat >= 0])
        np.add.at(magnitude[i], flat[flat >= 0], np.abs(share[flat >= 0]))
    return {"dx": Expected(dx.reshape(x_shape), magnitude.reshape(x_shape), prod(a.max_sharing for a in problem.axes) + 2,
                           _accumulator(problem), _approximate(problem))}


def unpool(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    """One element after another, so that the last one stays."""
    assert isinstance(problem, UnpoolProblem)
    x, shape = inputs["x"], problem.desc("y").shape
    y = np.zeros((prod(shape[:2]), prod(shape[2:])), x.dtype)
    if not x.size:
        return {"y": Expected(y.reshape(shape))}
    for image, values, places in zip(y, x.reshape(len(y), -1), inputs["indices"].reshape(len(y), -1), strict=True):
        for value, place in zip(values, places, strict=True):
            if 0 <= place < len(image):
                image[place] = value
    return {"y": Expected(y.reshape(shape))}


def unpool_backward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, UnpoolProblem)
    dy, indices = inputs["dy"], inputs["indices"].astype(np.int64)
    count = prod(dy.shape[2:])
    if not count or not indices.size:
        return {"dx": Expected(np.zeros(indices.shape))}
    flat, places = dy.reshape(prod(dy.shape[:2]), count), indices.reshape(prod(dy.shape[:2]), -1)
    inside = (places >= 0) & (places < count)
    return {"dx": Expected(np.where(inside, np.take_along_axis(flat, np.where(inside, places, 0), 1), 0.0).reshape(indices.shape))}


_NAMES = ("max_pool", "avg_pool", "lp_pool", "adaptive_max_pool", "adaptive_avg_pool", "fractional_max_pool",
          "global_max_pool", "global_avg_pool")
REFERENCES: dict[str, Reference] = {n: forward for n in _NAMES} | {n + "_backward": backward for n in _NAMES}
REFERENCES |= {"max_unpool": unpool, "max_unpool_backward": unpool_backward}
