"""Quantisation by tables of all numbers a kind has: the nearest, of two the one of the even code. Scales in f32 as they are defined."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import ml_dtypes
import numpy as np

from ...dtypes import E4M3
from ...ops.base import Problem
from ...ops.quantize import Kind, QuantizeProblem
from . import Expected, Reference
from .random import sources

NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
                -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
                0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32)
_FLOATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}


@cache
def numbers_of(name: str) -> np.ndarray:
    """The number of every code, in float64."""
    if name == "nf4":
        return NF4.astype(np.float64)
    if name in _FLOATS:
        return np.arange(256 if name != "e2m1" else 16, dtype=np.uint8).view(_FLOATS[name]).astype(np.float64)
    bits = int(name[1:])
    codes = np.arange(2**bits, dtype=np.float64)
    return np.where((codes >= 2 ** (bits - 1)) & (name[0] == "s"), codes - 2**bits, codes)


def codes_of(v: np.ndarray, kind: Kind, zero: np.ndarray | float = 0, saturate: bool = True) -> np.ndarray:
    """The codes of quotients (float64 arrays of f32 numbers), as bits."""
    v = np.asarray(v, np.float64)
    if kind.is_integer:
        whole = np.nan_to_num(np.rint(v), nan=0.0)
        if saturate:
            whole = np.clip(whole + zero, kind.low, kind.high)
        else:  # numbers of f32 beyond 2^31 are multiples of 256
            whole = np.where(np.abs(whole) < 2.0**31, whole, 0) + zero
        return whole.astype(np.int64) & (2**kind.bits - 1)
    table = numbers_of(kind.name)
    if kind.name == "nf4":
        return np.where(np.isnan(v), 0, (v[..., None] > (table[1:] + table[:-1]) / 2).sum(-1))
    half = 2 ** (kind.bits - 1)
    sizes = table[:half][np.isfinite(table[:half])]
    top = len(sizes) - 1
    size = np.abs(v)
    above = np.minimum(np.searchsorted(sizes, size), top)
    below = np.maximum(above - 1, 0)
    with np.errstate(invalid="ignore"):
        down, up = size - sizes[below], sizes[above] - size
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    code = np.where(size >= sizes[top], top, code)
    if not saturate:
        beyond = sizes[top] + (sizes[top] - sizes[top - 1]) / 2
        code = np.where((size >= beyond) if top % 2 else (size > beyond), top + 1, code)
    code = code + half * np.signbit(v)
    return np.where(np.isnan(v), {"e2m1": 7}.get(kind.name, 0x7F), code)


def spread(values: np.ndarray, problem: QuantizeProblem) -> np.ndarray:
    """Scales (or zero points) by number: of the shape of numbers."""
    shape = problem.shape
    if problem.swizzled:
        values = plain_scales(values, shape, problem.blocks[-1])
    elif values.size == 1:
        return np.broadcast_to(values.reshape((1,) * len(shape)), shape)
    full = values.reshape([values.shape[problem.scale_dims.index(i)] if i in problem.scale_dims else 1 for i in range(len(shape))])
    for axis, block in enumerate(problem.blocks):
        if 1 < block and full.shape[axis] > 1:
            full = np.repeat(full, block, axis)
    return np.broadcast_to(full[tuple(slice(0, n) for n in shape)], shape)


def plain_scales(values: np.ndarray, shape: tuple[int, ...], block: int) -> np.ndarray:
    """Scales in the layout 128x4, unpadded, in rows and columns."""
    rows, columns = values.shape[-2:]
    tiles = values.reshape(*values.shape[:-2], rows // 128, columns // 4, 32, 4, 4)
    found = np.moveaxis(tiles, (-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1)).reshape(*values.shape[:-2], rows, columns)
    return found[..., : shape[-2], : -(-shape[-1] // block)]


def swizzled_scales(values: np.ndarray, stored: tuple[int, ...]) -> np.ndarray:
    """Scales in rows and columns as the layout 128x4 has them, padded with 0."""
    rows, columns = stored[-2:]
    pad = [(0, 0)] * (values.ndim - 2) + [(0, rows - values.shape[-2]), (0, columns - values.shape[-1])]
    tiles = np.pad(values, pad).reshape(*values.shape[:-2], rows // 128, 4, 32, columns // 4, 4)
    found = np.moveaxis(tiles, (-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1))
    return found.reshape(stored)


def _of_blocks(x: np.ndarray, problem: QuantizeProblem, reduction: np.ufunc) -> np.ndarray:
    """The reduction (with 0) over the numbers of each scale, of x's rank."""
    for axis, block in enumerate(problem.blocks):
        count = -(-x.shape[axis] // max(block, 1)) if axis in problem.scale_dims else 1
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, count * max(block, 1) - x.shape[axis])
        padded = np.pad(x, pad).reshape(*x.shape[:axis], count, max(block, 1), *x.shape[axis + 1:])
        x = reduction.reduce(padded, axis + 1, initial=0.0)
    return x


def scale_numbers(codes: np.ndarray, form: str) -> np.ndarray:
    """Scales as f32 numbers."""
    if form == "e8m0":
        return np.asarray(codes).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return codes.astype(np.float32)


def quotients(x: np.ndarray, scale: np.ndarray, form: str, rounded: bool = False) -> np.ndarray:
    """What is rounded to codes: f32 quotients; over e4m3 scales exact products with the inverse in f32, in f32 if `rounded`."""
    with np.errstate(all="ignore"):
        if form == "e8m0":  # a product with an exact power of two, rounded once
            return (x.astype(np.float64) / scale.astype(np.float64)).astype(np.float32)
        if form == "e4m3":
            found = x.astype(np.float64) * (np.float32(1) / scale).astype(np.float64)
            return np.where(scale == 0, 0, found.astype(np.float32) if rounded else found)
        return x.astype(np.float32) / scale


def _drawn(q: np.ndarray, problem: QuantizeProblem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> np.ndarray:
    """One of the numbers around, by chance."""
    seed, offset = (int(v) % 2**64 for v in inputs["state"]) if "state" in inputs else (int(scalars["seed"]), int(scalars["offset"]))
    u = sources(problem.shape, seed, offset)["uniform"]
    q = q.astype(np.float64)
    with np.errstate(all="ignore"):
        if problem.kind.is_integer:
            return np.floor(q) + (u < q - np.floor(q))
        sizes = numbers_of(problem.kind.name)[: 2 ** (problem.kind.bits - 1)]
        sizes = sizes[np.isfinite(sizes)]
        size = np.abs(q)
        low = np.clip(np.searchsorted(sizes, size, "right") - 1, 0, len(sizes) - 2)
        step = sizes[low + 1] - sizes[low]
        rounded = sizes[low] + step * (u < (size - sizes[low]) / step)
        return np.where(size < sizes[-1], np.copysign(rounded, q), q)


def _bytes(code: np.ndarray, kind: Kind) -> np.ndarray:
    """Codes as the operand of codes holds them, in the values of its type."""
    if kind.is_packed:
        code = np.pad(code, [(0, 0)] * (code.ndim - 1) + [(0, code.shape[-1] % 2)])
        return code[..., 0::2] + 16 * code[..., 1::2]
    return numbers_of(kind.name)[code]


def found_scales(x: np.ndarray, problem: QuantizeProblem, global_scale: np.float32) -> tuple[np.ndarray, np.ndarray | None]:
    """(scales as they are stored but for the layout, of x's rank; zero points)."""
    kind = problem.kind
    x = x.astype(np.float32)
    amax = _of_blocks(np.abs(x), problem, np.maximum).astype(np.float32)
    zero = None
    with np.errstate(all="ignore"):
        if problem.scale_format == "e8m0":
            exponent = np.where(amax > 0, np.frexp(amax)[1] - 1, -1000) - kind.exponent
            return np.where(np.isfinite(amax), np.maximum(exponent + 127, 0), 255).astype(np.uint8), None
        if problem.scale_format == "e4m3":
            wanted = amax / (np.float32(6) * global_scale)
            code = codes_of(np.where(amax == 0, 0, np.where(np.isfinite(amax), wanted, np.nan)), E4M3_KIND)
            return numbers_of("e4m3")[code], None
        if problem.asymmetric:
            low, high = _of_blocks(x, problem, np.minimum).astype(np.float32), _of_blocks(x, problem, np.maximum).astype(np.float32)
            scale = (high - low) / np.float32(2**kind.bits - 1)
            scale = np.where(scale == 0, np.float32(1), scale)
            zero = np.rint(np.clip(np.float32(kind.low) - low / scale, np.float32(kind.low), np.float32(kind.high)))
            finite = np.isfinite(low) & np.isfinite(high) & np.isfinite(scale)
            scale, zero = np.where(finite, scale, np.float32(np.nan)), np.where(finite, zero, 0)
        else:
            scale = amax / np.float32(kind.largest)
            scale = np.where(scale == 0, np.float32(1), scale)
            scale = np.where(np.isfinite(amax), scale, np.float32(np.nan))
    return scale.astype(np.float32), zero


E4M3_KIND = Kind("e4m3", E4M3, 8, 448.0, exponent=8)


def quantize(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, QuantizeProblem)
    q, zero = _given(problem, inputs)
    if problem.stochastic:
        q = _drawn(q, problem, inputs, scalars)
    return {"y": Expected(_bytes(codes_of(q, problem.kind, zero, problem.saturate), problem.kind))}


def _scale(problem: QuantizeProblem, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    scale = spread(scale_numbers(inputs["scale"], problem.scale_format), problem)
    if "global_scale" in inputs:
        scale = scale * inputs["global_scale"].astype(np.float32).reshape(())
    return scale


def _given(problem: QuantizeProblem, inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray | float]:
    """(x over the scales that are given, the zero points)."""
    x = inputs["x"].astype(np.float32)
    if "scale" not in inputs:
        return x, 0
    zero = np.rint(spread(inputs["zero_point"].astype(np.float64), problem)) if "zero_point" in inputs else 0
    return quotients(x, _scale(problem, inputs), problem.scale_format, problem.stochastic), zero


def dynamic_quantize(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, QuantizeProblem)
    x = inputs["x"].astype(np.float32)
    outputs: dict[str, Expected] = {}
    global_scale = np.float32(1)
    if "global_scale" in inputs:
        global_scale = np.float32(inputs["global_scale"].reshape(()))
    if problem.has("found_global"):
        with np.errstate(all="ignore"):
            amax = np.abs(x).max(initial=0.0).astype(np.float32)
            global_scale = amax / np.float32(2688)
            global_scale = np.float32(np.nan) if not np.isfinite(amax) else np.float32(1) if global_scale == 0 else global_scale
        outputs["found_global"] = Expected(np.asarray(global_scale))
    scale, zero = found_scales(x, problem, global_scale)
    stored = problem.desc("scale").shape
    full = scale.reshape([scale.shape[i] for i in problem.scale_dims])
    numbers = scale_numbers(scale, problem.scale_format)
    every = numbers
    for axis, block in enumerate(problem.blocks):
        every = np.repeat(every, max(block, 1), axis)
    every = every[tuple(slice(0, n) for n in problem.shape)]
    if problem.scale_format == "e4m3":
        every = every * global_scale
    q = quotients(x, every, problem.scale_format, problem.stochastic)
    if problem.stochastic:
        q = _drawn(q, problem, inputs, scalars)
    zeros: np.ndarray | float = 0
    if zero is not None:
        zeros = zero
        for axis, block in enumerate(problem.blocks):
            zeros = np.repeat(zeros, max(block, 1), axis)
        zeros = zeros[tuple(slice(0, n) for n in problem.shape)]
        outputs["zero_point"] = Expected(zero.reshape(stored))
    outputs["scale"] = Expected(swizzled_scales(full, stored) if problem.swizzled else full.reshape(stored))
    return outputs | {"y": Expected(_bytes(codes_of(q, problem.kind, zeros), problem.kind))}


def numbers(problem: QuantizeProblem, code: np.ndarray, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    found = numbers_of(problem.kind.name)[code].astype(np.float32)
    with np.errstate(all="ignore"):
        if "zero_point" in inputs:
            found = found - spread(inputs["zero_point"].astype(np.float32), problem)
        return found * _scale(problem, inputs) if "scale" in inputs else found


def dequantize(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, QuantizeProblem)
    x, kind = inputs["x"], problem.kind
    if kind.is_packed:
        code = x.astype(np.int64)
        code = np.stack([code & 15, code >> 4], -1).reshape(*x.shape[:-1], 2 * x.shape[-1])[..., : problem.shape[-1]]
    elif kind.is_integer:
        code = x.astype(np.int64) & 255
    else:
        code = codes_of(x, kind, saturate=False)
    return {"y": Expected(_rounded(numbers(problem, code, inputs), problem))}


def _rounded(values: np.ndarray, problem: QuantizeProblem) -> np.ndarray:
    """f32 results in the type of the output: what is beyond it is infinite."""
    with np.errstate(all="ignore"):
        return values.astype(problem.outputs[0].desc.dtype.numpy).astype(np.float64)


def fake_quantize(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, QuantizeProblem)
    q, zero = _given(problem, inputs)
    return {"y": Expected(_rounded(numbers(problem, codes_of(q, problem.kind, zero), inputs), problem))}


def fake_quantize_backward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, QuantizeProblem)
    q, zero = _given(problem, inputs)
    kind = problem.kind
    with np.errstate(all="ignore"):
        whole = np.rint(q) + zero
        inside = (whole >= kind.low) & (whole <= kind.high) if kind.is_integer else np.abs(q) <= kind.largest
    return {"dx": Expected(np.where(inside, inputs["dy"], 0.0))}


REFERENCES: dict[str, Reference] = {
    "quantize": quantize, "dynamic_quantize": dynamic_quantize, "dequantize": dequantize, "fake_quantize": fake_quantize,
    "fake_quantize_backward": fake_quantize_backward}
