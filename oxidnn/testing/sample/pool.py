"""Pooling problems: every mode and attribute, plain, channels-last, strided and misaligned tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, F64, S8, S32, S64, U8, DType
from ...errors import InvalidArgument
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.pool import PoolProblem, UnpoolProblem
from ...tensor import TensorDesc, layout_order, packed_strides
from . import Fill, Sampler


def view(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...]) -> TensorDesc:
    """A tensor that lies densely, channels last, with gaps, in another order of dimensions, or at an odd address."""
    kind = rng.choice(["nchw", "nhwc", "gaps", "permuted", "misaligned"], p=[0.3, 0.35, 0.12, 0.12, 0.11])
    if kind in ("nchw", "nhwc"):
        return TensorDesc.packed(dtype, shape, str(kind))
    order = layout_order("nhwc" if rng.random() < 0.5 else "nchw", len(shape))
    if kind == "permuted":
        order = tuple(int(i) for i in rng.permutation(len(shape)))
    if kind == "gaps":
        padded = tuple(n + int(rng.integers(0, 3)) for n in shape)
        return TensorDesc(dtype, shape, packed_strides(padded, order))
    strides = packed_strides(shape, order)
    return TensorDesc(dtype, shape, strides, dtype.num_bytes if kind == "misaligned" else 16)


def _attrs(rng: np.random.Generator, mode: str, rank: int, limit: int) -> dict[str, Any]:
    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(v) for v in rng.integers(low, high + 1, rank))

    window = each(1, limit)
    attrs: dict[str, Any] = {"window": window, "ceil_mode": bool(rng.random() < 0.4)}
    if rng.random() < 0.7:
        attrs["stride"] = each(1, 3)
    if rng.random() < 0.3:
        attrs["dilation"] = each(1, 2)
    draw = rng.random()
    if draw < 0.5:
        attrs["padding"] = tuple(int(rng.integers(0, k // 2 + 1)) for k in window)
    elif draw < 0.7:
        attrs["padding"] = tuple((int(rng.integers(0, k // 2 + 1)), int(rng.integers(0, k // 2 + 1))) for k in window)
    elif draw < 0.8:
        attrs["padding"] = str(rng.choice(["same_upper", "same_lower", "valid"]))
    if mode == "avg":
        attrs["count_include_pad"] = bool(rng.random() < 0.5)
        if rng.random() < 0.25:
            attrs["divisor_override"] = int(rng.integers(1, 12))
    return attrs


def _draw(name: str, mode: str, variant: str, rng: np.random.Generator, size: str) -> Problem:
    is_backward = name.endswith("_backward")
    floats = (F32, F32, F16, BF16, F64)
    while True:
        rank = int(rng.integers(1, 4))
        top = {"tiny": (0, 14, 8, 5), "small": (0, 40, 24, 12)}[size][rank]
        shape = (int(rng.integers(1, 4)), int(rng.choice([1, 3, 4, 8, 16, 5])), *(int(v) for v in rng.integers(1, top + 1, rank)))
        if rng.random() < 0.04:
            shape = (0, *shape[1:])
        kinds = floats if is_backward or mode != "max" or variant == "fractional" else (*floats, S8, U8, S32)
        dtype = kinds[int(rng.integers(len(kinds)))]
        attrs: dict[str, Any] = {}
        if variant == "window":
            attrs = _attrs(rng, mode, rank, {1: 5, 2: 4, 3: 3}[rank])
            if mode == "lp":
                attrs["norm"] = float(rng.choice([1.0, 2.0] if dtype is F64 else [1.0, 2.0, 3.0, 1.5]))
        elif variant == "adaptive":
            attrs["output_size"] = 1 if rng.random() < 0.2 else tuple(int(v) for v in rng.integers(1, 8, rank))
        if variant == "fractional":
            attrs["window"] = window = tuple(int(v) for v in rng.integers(1, 4, rank))
            attrs["output_size"] = tuple(int(rng.integers(1, max(2, n - k + 2))) for n, k in zip(shape[2:], window, strict=True))
        tensors: dict[str, TensorDesc] = {}
        try:
            forward = OPS[name.removesuffix("_backward")]
            given = {"x": view(rng, dtype, shape)}
            if variant == "fractional":
                kind = F64 if dtype is F64 else dtype if rng.random() < 0.5 else F32
                given["samples"] = view(rng, kind, (*shape[:2], rank))
            plan = forward.make(given, attrs, Policy())
            if not is_backward:
                tensors |= given | {"x": plan.desc("x")}
                if variant != "global" and mode == "max" and rng.random() < 0.6:
                    attrs["return_indices"] = True
                    tensors["indices"] = view(rng, S32 if rng.random() < 0.2 else S64, plan.desc("y").shape)
                if rng.random() < 0.5:
                    tensors["y"] = view(rng, dtype, plan.desc("y").shape)
                return OPS[name].make(tensors, attrs, Policy())
            tensors["dy"] = view(rng, dtype, plan.desc("y").shape)
            if rng.random() < 0.5:
                tensors["dx"] = view(rng, dtype, shape)
            if mode == "max" and (variant == "fractional" or rng.random() < 0.7):
                tensors["indices"] = view(rng, S64, plan.desc("y").shape)
            elif mode == "max":
                tensors["x"] = plan.desc("x")
            if mode == "lp":
                tensors |= {"x": plan.desc("x"), "y": view(rng, dtype, plan.desc("y").shape)}
            return OPS[name].make(tensors, attrs | {"x_shape": shape}, Policy())
        except InvalidArgument:  # e.g. a window larger than the input: draw again
            continue


def _unpool(name: str, rng: np.random.Generator, size: str) -> Problem:
    rank = int(rng.integers(1, 4))
    top = {"tiny": (0, 30, 8, 5), "small": (0, 60, 24, 12)}[size][rank]
    images = (int(rng.integers(1, 4)) if rng.random() > 0.04 else 0, int(rng.choice([1, 3, 8])))
    shape, far = ((*images, *(int(v) for v in rng.integers(1, n + 1, rank))) for n in (top, top + 3))
    is_backward = name.endswith("_backward")
    kinds = (F32, F16, BF16, F64) if is_backward else (F32, F16, BF16, F64, S8, S32)
    kind = kinds[int(rng.integers(len(kinds)))]
    tensors = {"dy" if is_backward else "x": view(rng, kind, far if is_backward else shape)}
    tensors["indices"] = view(rng, S32 if rng.random() < 0.3 else S64, shape)
    if rng.random() < 0.5:
        tensors["dx" if is_backward else "y"] = view(rng, kind, shape if is_backward else far)
    return OPS[name].make(tensors, {} if is_backward else {"output_size": far[2:]}, Policy())


def _places(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Places of the output, many of them twice; here and there one outside."""
    assert isinstance(problem, UnpoolProblem)
    count, shape = int(np.prod(problem.far.shape[2:])), problem.desc("indices").shape
    return np.where(rng.random(shape) < 0.05, rng.choice([-1, count, -(2**31), 2**31 - 1], shape), rng.integers(0, count, shape))


def _indices(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Indices a forward pass could have given: of each window's elements, any one."""
    from ..reference.pool import tap_table

    assert isinstance(problem, PoolProblem)
    shape = problem.desc("indices").shape
    if problem.op.startswith("fractional"):
        kind = np.float64 if problem.desc("dy").dtype is F64 else np.float32
        tables = [tap_table(problem, rng.random(len(problem.axes)).astype(kind))[0] for _ in range(shape[0] * shape[1])]
        picks = [t[np.arange(len(t)), rng.integers(0, t.shape[1], len(t))] for t in tables]
        return np.array(picks, np.int64).reshape(shape)
    flat, _ = tap_table(problem)
    scores = np.where(flat >= 0, rng.random((shape[0], shape[1], *flat.shape)), -1.0)
    best = scores.argmax(-1)[..., None]
    return np.take_along_axis(np.broadcast_to(flat, scores.shape), best, -1).reshape(shape)


def _special_values(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Normal values with ties; in every third problem also NaN and infinities."""
    desc = problem.desc("x")
    if not desc.dtype.is_float:
        low, high = (0, 255) if desc.dtype is U8 else (-128, 127)
        return rng.integers(low, high + 1, desc.shape)
    values = np.round(rng.standard_normal(desc.shape) * 4) / 4
    if rng.random() < 1 / 3:
        values = np.where(rng.random(desc.shape) < 0.1, np.nan, values)
        values = np.where(rng.random(desc.shape) < 0.2, -np.inf, values)
    return values


def _unread_values(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Normal values; in every third problem here and there NaN, in a window or in none."""
    values = rng.standard_normal(problem.desc("x").shape)
    return np.where(rng.random(values.shape) < 0.1, np.nan, values) if rng.random() < 1 / 3 else values


def _samples(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Numbers in [0, 1) that half precision does not round to 1; here and there exactly 0."""
    values = np.minimum(rng.random(problem.desc("samples").shape), 0.99)
    return np.where(rng.random(values.shape) < 0.1, 0.0, values)


def _norms(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Norms of windows: positive, here and there 0."""
    shape = problem.desc("y").shape
    return np.where(rng.random(shape) < 0.1, 0.0, rng.uniform(0.5, 2.0, shape))


_KINDS = {"max_pool": ("max", "window"), "avg_pool": ("avg", "window"), "lp_pool": ("lp", "window"),
          "adaptive_max_pool": ("max", "adaptive"), "adaptive_avg_pool": ("avg", "adaptive"),
          "fractional_max_pool": ("max", "fractional"), "global_max_pool": ("max", "global"), "global_avg_pool": ("avg", "global")}
SAMPLES: dict[str, Sampler] = {n + s: partial(_draw, n + s, *kind) for n, kind in _KINDS.items() for s in ("", "_backward")}
SAMPLES |= {n: partial(_unpool, n) for n in ("max_unpool", "max_unpool_backward")}

FILLS: dict[tuple[str, str], Fill] = {(n, "x"): _special_values for n, (mode, _) in _KINDS.items() if mode == "max"}
FILLS |= {(n + "_backward", "x"): _special_values for n, (mode, _) in _KINDS.items() if mode == "max"}
FILLS |= {(n + "_backward", "indices"): _indices for n, (mode, _) in _KINDS.items() if mode == "max"}
FILLS |= {(n, "indices"): _places for n in ("max_unpool", "max_unpool_backward")}
FILLS |= {("lp_pool_backward", "y"): _norms, ("lp_pool_backward", "x"): _unread_values, ("fractional_max_pool", "samples"): _samples}

CASES: dict[str, tuple[str, ...]] = {
    "max_pool": (
        "max_pool x=f32[1,1,5]nchw window=1 stride=3 ceil_mode=True return_indices=True",
        "max_pool x=f32[2,3,6]nchw window=2 stride=2 return_indices=True",
        "max_pool x=f16[2,16,7,9]nhwc window=3 stride=2 padding=1 return_indices=True",
        "max_pool x=bf16[2,5,7,9]nhwc window=3 stride=2 padding=1",
        "max_pool x=bf16[2,24,9,9]nhwc window=3 stride=2 padding=1 ceil_mode=True",
        "max_pool x=f64[1,3,5,6,4]nchw window=(2,3,2) stride=1 padding=(1,1,0) return_indices=True",
        "max_pool x=s8[1,32,6,6]nhwc window=2",
        "max_pool x=f32[1,2,9,9]nchw window=3 dilation=2 stride=1 padding=1 return_indices=True",
        "max_pool x=f32[0,3,8,8]nchw window=2",
    ),
    "max_pool_backward": (
        "max_pool_backward dy=f32[2,3,4,4]nchw indices=s64[2,3,4,4]nchw window=3 stride=2 padding=1 x_shape=(2,3,8,8)",
        "max_pool_backward dy=bf16[2,16,4,4]nhwc indices=s64[2,16,4,4]nhwc window=3 stride=2 padding=1 x_shape=(2,16,8,8)",
        "max_pool_backward dy=f16[1,3,7,7]nchw x=f16[1,3,8,8]nchw window=2 stride=1",
        "max_pool_backward dy=f64[1,2,5]nchw indices=s64[1,2,5]nchw window=3 dilation=2 stride=1 x_shape=(1,2,9)",
    ),
    "avg_pool": (
        "avg_pool x=f32[1,1,5]nchw window=3 stride=3 ceil_mode=True",
        "avg_pool x=f32[1,1,5]nchw window=3 stride=3 ceil_mode=True divisor_override=10 count_include_pad=False",
        "avg_pool x=bf16[2,16,7,9]nhwc window=3 stride=2 padding=1",
        "avg_pool x=f16[2,8,7,9]nhwc window=3 stride=2 padding=1 count_include_pad=False ceil_mode=True",
        "avg_pool x=f64[1,3,5,6,4]nchw window=(2,3,2) stride=1 padding=((1,0),(1,1),(0,0))",
        "avg_pool x=f32[2,3,40]nchw window=37 stride=1",
    ),
    "avg_pool_backward": (
        "avg_pool_backward dy=f32[2,3,4,4]nchw window=3 stride=2 padding=1 x_shape=(2,3,8,8)",
        "avg_pool_backward dy=bf16[2,16,4,4]nhwc window=3 stride=2 padding=1 count_include_pad=False x_shape=(2,16,8,8)",
        "avg_pool_backward dy=f64[1,2,4]nchw window=2 dilation=3 stride=2 padding=1 x_shape=(1,2,9)",
    ),
    "lp_pool": ("lp_pool x=f32[2,3,8,8]nchw window=2", "lp_pool x=f16[2,8,8,8]nhwc window=3 stride=2 padding=1 norm=3.0"),
    "lp_pool_backward": ("lp_pool_backward dy=f32[2,3,4,4]nchw x=f32[2,3,8,8]nchw y=f32[2,3,4,4]nchw window=2",),
    "adaptive_max_pool": ("adaptive_max_pool x=f32[2,3,7,10]nchw output_size=(3,4) return_indices=True",),
    "adaptive_max_pool_backward": (
        "adaptive_max_pool_backward dy=f32[2,3,3,4]nchw indices=s64[2,3,3,4]nchw output_size=(3,4) x_shape=(2,3,7,10)",),
    "adaptive_avg_pool": ("adaptive_avg_pool x=f32[1,1,5]nchw output_size=3", "adaptive_avg_pool x=bf16[2,8,7,5]nhwc output_size=(3,7)"),
    "adaptive_avg_pool_backward": ("adaptive_avg_pool_backward dy=f32[1,1,3]nchw output_size=3 x_shape=(1,1,5)",),
    "fractional_max_pool": (
        "fractional_max_pool x=f32[2,3,11,8]nchw samples=f32[2,3,2] window=(2,3) output_size=(5,4) return_indices=True",
        "fractional_max_pool x=bf16[1,8,9,7,6]nhwc samples=bf16[1,8,3] window=2 output_size=(5,3,4)",
        "fractional_max_pool x=f64[1,2,40] samples=f64[1,2,1] window=3 output_size=38 return_indices=True",
        "fractional_max_pool x=f16[1,2,3,3] samples=f32[1,2,2] window=3 output_size=1"),
    "fractional_max_pool_backward": (
        "fractional_max_pool_backward dy=f32[2,3,5,4] indices=s64[2,3,5,4] window=(2,3) output_size=(5,4) x_shape=(2,3,11,8)",
        "fractional_max_pool_backward dy=bf16[1,8,5,3,4]nhwc indices=s64[1,8,5,3,4]nhwc window=2 output_size=(5,3,4) x_shape=(1,8,9,7,6)"),
    "max_unpool": ("max_unpool x=f32[2,3,4]nchw indices=s64[2,3,4]nchw output_size=(9,)",
                   "max_unpool x=bf16[2,8,5,4]nhwc indices=s64[2,8,5,4]nhwc output_size=(10,9)",
                   "max_unpool x=s8[1,2,3,2,4]nchw indices=s32[1,2,3,2,4]nchw output_size=(6,5,8)",
                   "max_unpool x=f64[2,1,40]nchw indices=s64[2,1,40]nchw output_size=(7,)",
                   "max_unpool x=f32[0,3,4]nchw indices=s64[0,3,4]nchw output_size=(9,)"),
    "max_unpool_backward": ("max_unpool_backward dy=f32[2,3,9]nchw indices=s64[2,3,4]nchw",
                            "max_unpool_backward dy=f16[2,8,10,9]nhwc indices=s32[2,8,5,4]nchw",
                            "max_unpool_backward dy=f64[1,2,6,5,8]nchw indices=s64[1,2,3,2,4]nchw"),
    "global_max_pool": ("global_max_pool x=f32[2,3,7,7]nchw", "global_max_pool x=bf16[1,2,80,80]nchw"),
    "global_max_pool_backward": ("global_max_pool_backward dy=f32[2,3,1,1]nchw x=f32[2,3,7,7]nchw",),
    "global_avg_pool": ("global_avg_pool x=bf16[2,16,7,7]nhwc", "global_avg_pool x=f32[2,3,5,5,5]nchw",
                        "global_avg_pool x=f16[1,2,64,96]nchw", "global_avg_pool x=f64[1,1,100,70]nchw"),
    "global_avg_pool_backward": ("global_avg_pool_backward dy=bf16[2,16,1,1]nchw x_shape=(2,16,7,7)",),
}
