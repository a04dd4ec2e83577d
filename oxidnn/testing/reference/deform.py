"""Deformable convolution in float64: all samples by their four corners, products by einsum, the gradient of x by scattering."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import F32, F64
from ...ops.base import Problem
from ...ops.deform import DeformProblem
from . import Expected, Reference
from .epilogue import product_error


class _Samples:
    """Of every sample (n, offset group, tap, p, q): how far it lies behind its first corner, its four corners' places, weights and slopes.

    Zeros for corners outside. value: (n, c, tap, p, q) of an image, by corners.
    """

    def __init__(self, p: DeformProblem, offset: np.ndarray) -> None:
        n, c, self.height, self.width = p.desc("x").shape
        groups, (r, s), (height, width) = p.offset_groups, p.kernel, p.positions
        offset = offset.reshape(n, groups, r * s, 2, height, width)
        whole = np.floor(np.clip(np.nan_to_num(offset, nan=-1e9), -2.0**28, 2.0**28)).astype(np.int64)
        self.part = np.clip(offset, -2.0**28, 2.0**28) - whole
        tap = np.indices((r, s)).reshape(2, -1)
        at = np.indices((height, width))
        first = [at[i][None] * p.stride[i] - p.padding[i][0] + tap[i][:, None, None] * p.dilation[i] for i in range(2)]
        y, x = (first[i][None, None] + whole[:, :, :, i] for i in range(2))
        fy, fx = self.part[:, :, :, 0], self.part[:, :, :, 1]
        self.corners = []
        for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
            inside = (y + dy >= 0) & (y + dy < self.height) & (x + dx >= 0) & (x + dx < self.width)
            place = np.clip(y + dy, 0, max(self.height - 1, 0)) * self.width + np.clip(x + dx, 0, max(self.width - 1, 0))
            by_y, by_x = (fy if dy else 1 - fy), (fx if dx else 1 - fx)
            self.corners.append((inside, place, by_y * by_x, (1 if dy else -1) * by_x, (1 if dx else -1) * by_y))
        self.shape, self.channels = (n, groups, r * s, height, width), c

    def seen(self, x: np.ndarray) -> list[np.ndarray]:
        """x at each corner: (n, offset group, channels of it, tap, p, q)."""
        n, groups, taps, height, width = self.shape
        flat = x.reshape(n, groups, self.channels // groups, self.height * self.width)
        found, length = [], taps * height * width
        for inside, place, *_ in self.corners:
            if not flat.shape[3]:
                found.append(np.zeros((*flat.shape[:3], taps, height, width)))
                continue
            taken = np.take_along_axis(flat, np.broadcast_to(place.reshape(n, groups, 1, length), (*flat.shape[:3], length)), 3)
            found.append(np.where(inside[:, :, None], taken.reshape(*flat.shape[:3], taps, height, width), 0.0))
        return found


def _columns(weights: np.ndarray, p: DeformProblem) -> np.ndarray:
    """(n, group, channels of a group, taps, positions)."""
    n, c = p.desc("x").shape[:2]
    return weights.reshape(n, p.groups, c // p.groups, p.taps, p.positions[0] * p.positions[1])


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, DeformProblem)
    x, w, offset = inputs["x"], inputs["w"], inputs["offset"]
    accumulate, stored = p.accumulator, p.desc("x").dtype.epsilon
    n, groups, taps, height, width = (p.desc("x").shape[0], p.offset_groups, p.taps, *p.positions)
    mask = inputs["mask"].reshape(n, groups, taps, height, width) if p.has("mask") else np.ones((n, groups, taps, height, width))
    samples = _Samples(p, offset)
    seen = samples.seen(x)

    def weighed(values: list[np.ndarray], index: int, size: bool = False) -> np.ndarray:
        """The sum over corners by weight (2) or slope (3, 4)."""
        total = np.zeros(values[0].shape)
        for corner, value in zip(samples.corners, values, strict=True):
            factor = corner[index][:, :, None]
            total += np.abs(factor) * np.abs(value) if size else factor * value
        return total

    filters = w.reshape(p.groups, w.shape[0] // p.groups, w.shape[1], taps)
    of_mask = mask[:, :, None]
    column, column_size = weighed(seen, 2) * of_mask, weighed(seen, 2, True) * np.abs(of_mask)
    # a column is rounded to its type; weights err by some roundings, where they are small too
    column_error = stored * np.abs(column) + 8 * accumulate.epsilon * sum(map(np.abs, seen)) * np.abs(of_mask)
    extra = product_error(p)

    if not p.is_backward:
        def product(filters: np.ndarray, columns: np.ndarray) -> np.ndarray:
            return np.einsum("gkct,ngctl->ngkl", filters, _columns(columns, p), optimize=True).reshape(n, w.shape[0], height, width)

        y, size = product(filters, column), product(np.abs(filters), column_size)
        slack = product(np.abs(filters), column_error) + extra * size
        if p.has("bias"):
            bias = inputs["bias"][None, :, None, None]
            y, size = y + bias, size + np.abs(bias)
        return {"y": Expected(y, size, max(w.shape[1] * taps, 1), accumulate, slack=slack)}

    dy = inputs["dy"].reshape(n, p.groups, w.shape[0] // p.groups, height * width)
    grouped = seen[0].shape

    def columns_gradient(filters: np.ndarray, dy: np.ndarray) -> np.ndarray:
        return np.einsum("gkct,ngkl->ngctl", filters, dy, optimize=True).reshape(grouped)

    d_column, d_size = columns_gradient(filters, dy), columns_gradient(np.abs(filters), np.abs(dy))
    per_group = filters.shape[1]
    d_error = stored * np.abs(d_column) + (2 * accumulate.epsilon * max(per_group, 1) ** 0.5 + extra) * d_size
    channels = max(grouped[2], 1)
    found: dict[str, Expected] = {}

    # dx: every sample adds its share to its corners
    def scattered(values: np.ndarray, of_mask: np.ndarray, is_flat: bool = False) -> np.ndarray:
        total = np.zeros((n, groups, grouped[2], samples.height * samples.width))
        for inside, place, weight, *_ in samples.corners:
            weight = np.ones_like(weight) if is_flat else weight
            share = np.where(inside[:, :, None], values * (weight * of_mask)[:, :, None], 0.0)
            for i in range(n):
                for g in range(groups):
                    for c in range(grouped[2]):
                        np.add.at(total[i, g, c], place[i, g].reshape(-1), share[i, g, c].reshape(-1))
        return total.reshape(p.desc("x").shape)

    sizes = scattered(np.abs(d_column), np.abs(mask))
    slack = scattered(d_error, np.abs(mask)) + 8 * accumulate.epsilon * sizes
    # a weight errs by a rounding of the number 1, also where it is small
    slack += 4 * accumulate.epsilon * scattered(np.abs(d_column), np.abs(mask), True)
    found["dx"] = Expected(scattered(d_column, mask), sizes, 4 * taps, accumulate, slack=slack)

    gradients, magnitudes, errors = [], [], []
    for index in (3, 4):
        slope, slope_size = weighed(seen, index), weighed(seen, index, True)
        rounding = 8 * accumulate.epsilon * sum(map(np.abs, seen))
        gradients.append((d_column * slope).sum(2) * mask)
        magnitudes.append((np.abs(d_column) * slope_size).sum(2) * np.abs(mask))
        errors.append((d_error * slope_size + np.abs(d_column) * rounding).sum(2) * np.abs(mask))
    shape = p.desc("offset").shape
    pair = [np.stack(part, 3).reshape(shape) for part in (gradients, magnitudes, errors)]
    found["doffset"] = Expected(pair[0], pair[1], channels, accumulate, slack=pair[2])
    if p.has("mask"):
        bare, bare_size = weighed(seen, 2), weighed(seen, 2, True)
        error = (d_error * bare_size + np.abs(d_column) * 8 * accumulate.epsilon * sum(map(np.abs, seen))).sum(2)
        shape = p.desc("mask").shape
        found["dmask"] = Expected((d_column * bare).sum(2).reshape(shape), (np.abs(d_column) * bare_size).sum(2).reshape(shape), channels,
                                  accumulate, slack=error.reshape(shape))

    def filter_gradient(dy: np.ndarray, columns: np.ndarray) -> np.ndarray:
        return np.einsum("ngkl,ngctl->gkct", dy, _columns(columns, p), optimize=True).reshape(w.shape)

    size = filter_gradient(np.abs(dy), column_size)
    found["dw"] = Expected(filter_gradient(dy, column), size, max(n * height * width, 1), accumulate,
                           slack=filter_gradient(np.abs(dy), column_error) + extra * size)
    if p.has("dbias"):
        whole = inputs["dy"]
        found["dbias"] = Expected(whole.sum((0, 2, 3)), np.abs(whole).sum((0, 2, 3)), max(n * height * width, 1),
                                  F64 if whole.dtype == np.float64 and p.desc("x").dtype is F64 else F32)
    return found


REFERENCES: dict[str, Reference] = {"deform_conv": reference, "deform_conv_backward": reference}
