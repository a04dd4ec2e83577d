"""Convolution in float64: windows of the padded image times the filter; its gradients by windows and by scattering. Of 8-bit integers the
sums are exact, modulo 2^32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from ...dtypes import F32, F64
from ...ops.base import Problem
from ...ops.conv import AMAX, IMAGE, STATS, ConvProblem, value_of
from ...ops.epilogue import accumulator_of
from ...ops.gemm import FP8, INT8
from ..compare import accumulated_error
from . import Expected
from .epilogue import finish, narrowed, product_error
from .gemm import tensor_core_error
from .pointwise import error_bound

WINOGRAD_GROWTH = 40  # what F(4 x 4, 3 x 3) may err, in ulps of the largest sum of magnitudes
FFT_GROWTH = 6  # what Fourier transforms may err, in ulps of the sums of products of norms


def _windows(image: np.ndarray, p: ConvProblem, taps: tuple[int, ...], positions: tuple[int, ...]) -> np.ndarray:
    """(N, groups, C / groups, number of positions, number of taps): what each position sees of the padded image."""
    padded = np.pad(image, ((0, 0), (0, 0), *p.padding))
    steps = padded.strides
    shape = (*image.shape[:2], *positions, *taps)
    strides = (*steps[:2], *(s * u for s, u in zip(steps[2:], p.stride, strict=True)),
               *(s * d for s, d in zip(steps[2:], p.dilation, strict=True)))
    view = np.lib.stride_tricks.as_strided(padded, shape, strides)
    n, c = image.shape[:2]
    return view.reshape(n, p.groups, c // p.groups, prod(positions), prod(taps))


def _flip(filter: np.ndarray, p: ConvProblem) -> np.ndarray:
    return np.flip(filter, tuple(range(2, filter.ndim))) if p.flip else filter


def _fprop(p: ConvProblem, image: np.ndarray, filter: np.ndarray) -> np.ndarray:
    out = p.desc(p.result).shape
    windows = _windows(image, p, filter.shape[2:], out[2:])
    weights = _flip(filter, p).reshape(p.groups, filter.shape[0] // p.groups, filter.shape[1], prod(filter.shape[2:]))
    return np.einsum("ngcpr,gkcr->ngkp", windows, weights, optimize=True).reshape(out)


def _dgrad(p: ConvProblem, result: np.ndarray, filter: np.ndarray) -> np.ndarray:
    """Every tap adds its product into the padded image; the padding is then cut off."""
    shape = p.desc(p.image).shape
    n, groups, weights = shape[0], p.groups, _flip(filter, p)
    positions, per_group, channels = result.shape[2:], filter.shape[0] // p.groups, filter.shape[1]
    padded = np.zeros((n, shape[1], *(e + lo + hi for e, (lo, hi) in zip(shape[2:], p.padding, strict=True))))
    grouped = result.reshape(n, groups, per_group, prod(positions))
    for tap in np.ndindex(*filter.shape[2:]):
        weight = weights[(slice(None), slice(None), *tap)].reshape(groups, per_group, channels)
        product = np.einsum("ngkp,gkc->ngcp", grouped, weight, optimize=True).reshape(n, shape[1], *positions)
        where = tuple(slice(t * d, t * d + (q - 1) * s + 1, s) for t, d, q, s in zip(tap, p.dilation, positions, p.stride, strict=True))
        padded[(slice(None), slice(None), *where)] += product
    return padded[(slice(None), slice(None), *(slice(lo, lo + e) for e, (lo, _) in zip(shape[2:], p.padding, strict=True)))]


def _wgrad(p: ConvProblem, image: np.ndarray, result: np.ndarray) -> np.ndarray:
    shape = p.desc(p.filter).shape
    windows = _windows(image, p, shape[2:], result.shape[2:])
    grouped = result.reshape(result.shape[0], p.groups, shape[0] // p.groups, prod(result.shape[2:]))
    return _flip(np.einsum("ngkp,ngcpr->gkcr", grouped, windows, optimize=True).reshape(shape), p)


def _products_of_norms(p: ConvProblem, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Per image and channel (of wgrad: filter and channel) of the output: the bound of Cauchy and Schwarz on its sums."""
    norms = [np.sqrt((a * a).sum(axis=tuple(range(2, a.ndim)))) for a in (first, second)]
    filter = p.desc(p.filter).shape

    def by_groups(a: np.ndarray, is_filter: bool) -> np.ndarray:
        shape = (p.groups, filter[0] // p.groups, filter[1]) if is_filter else (a.shape[0], p.groups, a.shape[1] // p.groups)
        return a.reshape(shape)

    terms = {"fprop": "ngc,gkc->ngk", "dgrad": "ngk,gkc->ngc", "wgrad": "ngc,ngk->gkc"}[p.direction]
    sums = np.einsum(terms, by_groups(norms[0], False), by_groups(norms[1], p.direction != "wgrad"))
    shape = p.outputs[0].desc.shape
    return sums.reshape(*shape[:2], *(1 for _ in shape[2:]))


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, ConvProblem)
    filter, result = p.desc(p.filter).shape, p.desc(p.result).shape
    operands, compute, terms = {
        "fprop": ((p.image, p.filter), _fprop, prod(filter[1:])),
        "dgrad": ((p.result, p.filter), _dgrad, filter[0] // p.groups * prod(filter[2:])),
        "wgrad": ((p.image, p.result), _wgrad, result[0] * prod(result[2:])),
    }[p.direction]
    first, second = (inputs[name] for name in operands)
    if p.inputs[0].desc.dtype in INT8:
        return {p.outputs[0].name: _of_integers(p, inputs, scalars, compute(p, *(_centred(p, inputs, name) for name in operands)))}
    first, moved = _through_prologue(p, first, inputs)
    acc, magnitude = compute(p, first, second), compute(p, np.abs(first), np.abs(second))
    slack = product_error(p) * magnitude + (compute(p, moved, np.abs(second)) if p.prologue is not None else 0.0)

    def expect(slack: np.ndarray, name: str = p.outputs[0].name) -> Expected:
        found = finish(p, value_of(p), acc, magnitude, slack, terms, inputs, scalars, 1, int(name == "aux"))
        return narrowed(p, found, name)

    found = expect(slack)
    beside = {"aux": expect(slack, "aux")} if p.has("aux") else {}
    if p.has(STATS[0]):
        beside |= _moments(p, found)

    def largest_size(slack: np.ndarray) -> Expected:
        return _largest(finish(p, value_of(p), acc, magnitude, slack, terms, inputs, scalars, 1, 1))

    if p.has(AMAX):
        beside[AMAX] = largest_size(slack)
    if p.direction == "wgrad" and p.has("db"):
        beside |= bgrad(p, {"dy": inputs[p.result]}, scalars)

    def coarse(slack: np.ndarray) -> tuple[Expected, dict[str, Expected]]:
        wide = expect(slack)
        moments = _moments(p, wide) if p.has(STATS[0]) else {}
        moments |= {AMAX: largest_size(slack)} if p.has(AMAX) else {}
        return replace(found, coarse_slack=wide.slack), {n: replace(e, coarse_slack=moments[n].slack if n in moments else None)
                                                         for n, e in beside.items()}

    if p.inputs[0].desc.dtype in FP8:
        found, beside = coarse(slack + tensor_core_error(terms, p.policy.math) * magnitude)
        return {p.outputs[0].name: found} | beside
    if all(r == 3 for r in filter[2:]) and magnitude.size:
        # Winograd's transforms spread what a tile's largest sums err over the tile, here: over the image.
        largest = magnitude.max(axis=tuple(range(2, magnitude.ndim)), keepdims=True)
        found, beside = coarse(slack + WINOGRAD_GROWTH * p.inputs[0].desc.dtype.epsilon * largest)
    elif all(s == 1 for s in (*p.stride, *p.dilation)) and magnitude.size:
        # Points of Fourier transforms err by norms of whole tiles, here: of the image.
        found, beside = coarse(slack + FFT_GROWTH * p.inputs[0].desc.dtype.epsilon * _products_of_norms(p, first, second))
    return {p.outputs[0].name: found} | beside


def _through_prologue(p: ConvProblem, image: np.ndarray, inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What is summed in the image's place, and how far off it may be: rounded to the image's type, or not."""
    if p.prologue is None:
        return image, np.zeros(())
    arrays = {n: inputs[n].reshape(len(inputs[n]), *(1,) * (image.ndim - 2)) for n in p.prologue.args if n != IMAGE} | {IMAGE: image}
    kind = p.desc(p.image).dtype
    with np.errstate(all="ignore"):
        made = np.broadcast_to(p.prologue.evaluate(arrays)[0], image.shape)
        off = 2 * error_bound(p.prologue, arrays, {}, accumulator_of(kind).name)[0] + kind.epsilon * np.abs(made) + kind.smallest
    return made, np.broadcast_to(off, image.shape)


def _largest(result: Expected) -> Expected:
    """The largest size of what errs as its elements may: NaN if one is."""
    want = np.abs(np.asarray(result.want, np.float64))
    off = None if result.slack is None else np.asarray(np.max(result.slack, initial=0.0))
    return Expected(np.asarray(want.max(initial=0.0)), None, 0, result.accumulate, slack=off)


def _moments(p: ConvProblem, result: Expected) -> dict[str, Expected]:
    """Count, mean and squares about it of each channel, of elements that err as they may."""
    out = p.outputs[0].desc.dtype
    want = np.asarray(result.want, np.float64)
    kind, axes = accumulator_of(out), (0, *range(2, want.ndim))
    with np.errstate(all="ignore"):
        off = accumulated_error(result.accumulate or kind, result.terms) * (np.abs(want) if result.magnitude is None else result.magnitude)
        off = off + (0.0 if result.slack is None else result.slack) + out.epsilon * np.abs(want) + out.smallest
        n = want.size // max(1, want.shape[1])
        mean = want.sum(axes) / max(n, 1)
        d = want - mean.reshape(1, -1, *(1,) * (want.ndim - 2))
        mean_off = off.sum(axes) / max(n, 1)
        each = off + mean_off.reshape(1, -1, *(1,) * (want.ndim - 2))
        widest = np.abs(d).max(axes, initial=0.0) if n else np.zeros_like(mean)
        m2_off = (2 * np.abs(d) * each + each**2).sum(axes) + accumulated_error(kind, max(n, 1)) * 4 * n * widest**2
    return {STATS[0]: Expected(np.array([float(n)])),
            STATS[1]: Expected(mean, np.abs(want).sum(axes) / max(n, 1), max(n, 1), kind, slack=mean_off),
            STATS[2]: Expected((d**2).sum(axes), None, max(n, 1), kind, slack=m2_off)}


def _centred(p: ConvProblem, inputs: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Integers less their zero point, which padding then is: zeros."""
    values, zero = inputs[name].astype(np.int64), f"zero_{name}"
    if p.has(zero):
        values = values - inputs[zero].astype(np.int64).reshape(-1, *(1,) * (values.ndim - 1))
    return values


def _of_integers(p: ConvProblem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float], acc: np.ndarray) -> Expected:
    exact = np.asarray(acc, np.int64)
    if p.addend:
        exact = exact + inputs[p.addend].astype(np.int64).reshape(-1, *(1,) * (acc.ndim - 2))
    exact = exact.astype(np.int32)
    value, out = value_of(p, is_rounded=False), p.outputs[0].desc.dtype
    if value is None and not out.is_float:
        return Expected(exact if out.bits == 32 else np.clip(exact, -out.max - 1 if out.kind == "int" else 0, out.max))
    floats = {n: a.astype(np.float64) for n, a in inputs.items()}
    acc = exact.astype(np.float64)
    # Roundings: of the sum to f32, and of each factor.
    found = finish(p, value, acc, np.abs(acc), None, 4, floats, scalars, 1)
    if not p.saturate:
        low = 0 if out.kind == "uint" else 128
        return Expected((np.rint(found.want).astype(np.int64) + low) % 256 - low)
    return narrowed(p, found, p.outputs[0].name)


def bgrad(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    dy = inputs["dy"]
    axes = (0, *range(2, dy.ndim))
    accumulate = F64 if problem.desc("dy").dtype is F64 else F32
    return {"db": Expected(dy.sum(axes), np.abs(dy).sum(axes), max(1, dy.size // max(1, dy.shape[1])), accumulate)}


REFERENCES = {op: reference for op in ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_transpose", "conv_transpose_dgrad",
                                       "conv_transpose_wgrad")} | {"conv_bgrad": bgrad}
