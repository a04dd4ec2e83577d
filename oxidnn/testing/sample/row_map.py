"""Maps of rows: rows of one to some thousand columns, one or several axes anywhere, any layout, every attribute."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.epilogue import accumulator_of
from ...ops.row_map import RowMapProblem
from . import Fill, Sampler
from .rows import draw_rows


def _draw(name: str, rng: np.random.Generator, size: str) -> Problem:
    is_sparsemax, is_backward = name.startswith("sparsemax"), name.endswith("_backward")
    rows = draw_rows(rng, size, 1 if is_sparsemax else 3)
    if is_sparsemax:
        attrs: dict[str, Any] = {"axis": rows.axes[0] - (0 if rng.random() < 0.5 else len(rows.shape))}
        tensors = {n: rows.tensor() for n in (("dy", "y") if is_backward else ("x",))}
    else:
        attrs = {"axes": rows.axes_attribute, "p": float(rng.choice([2, 2, 1, 3, 1.5]))}
        tensors = {n: rows.tensor() for n in (("dy", "x") if is_backward else ("x",))}
    if name.startswith("normalize"):
        attrs["eps"] = float(rng.choice([1e-12, 0.0, 0.5]))
        if rng.random() < 0.7:
            ones = [1 if i in rows.axes else n for i, n in enumerate(rows.shape)]
            tensors["g"] = rows.tensor((rows.rows_shape, ones, [1], [])[int(rng.integers(4))], rows.parameter_kind)
        if not is_backward:
            attrs["return_norm"] = bool(rng.random() < 0.4)
    if name == "power_norm":
        attrs |= {"eps": float(rng.choice([1e-5, 0.1])), "return_stats": bool(rng.random() < 0.4)}
        tensors |= {n: rows.tensor(rows.columns_shape, rows.parameter_kind) for n in ("gamma", "beta") if rng.random() < 0.5}
    if name == "power_norm_backward":
        tensors["rstd"] = rows.tensor(rows.rows_shape, accumulator_of(rows.kind))
        if rng.random() < 0.7:
            tensors["gamma"] = rows.tensor(rows.columns_shape, rows.parameter_kind)
    if rng.random() < 0.5:
        tensors["dx" if is_backward else "y"] = rows.tensor(is_output=True)
    return OPS[name].make(tensors, attrs, Policy())


def _away(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """No element near 0, about which roots of sums have no derivative."""
    shape = problem.desc("x").shape
    return rng.choice([-1.0, 1.0], shape) * rng.uniform(0.25, 2.0, shape)


def _positive(name: str, rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.uniform(0.3, 2.0, problem.desc(name).shape)


def _peaks(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Rows whose support is one element, some, or all of them; with ties."""
    x = rng.standard_normal(problem.desc("x").shape) * float(rng.choice([0.01, 0.3, 3.0])) + float(rng.choice([0.0, 100.0]))
    return np.round(x * 4) / 4 if rng.random() < 0.3 else x


def _face(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Zeros beside probabilities; at least one of those in a row."""
    assert isinstance(problem, RowMapProblem)
    y = np.where(rng.random(problem.desc("y").shape) < 0.6, 0.0, rng.uniform(0.1, 1.0, problem.desc("y").shape))
    if y.size:
        np.moveaxis(y, problem.axes[0], 0)[0] = 0.25
    return y


_NAMES = ("normalize", "normalize_backward", "power_norm", "power_norm_backward", "sparsemax", "sparsemax_backward")
SAMPLES: dict[str, Sampler] = {n: partial(_draw, n) for n in _NAMES}
FILLS: dict[tuple[str, str], Fill] = {(n, "x"): _away for n in _NAMES[:4]}
FILLS |= {("power_norm_backward", "rstd"): partial(_positive, "rstd"), ("sparsemax", "x"): _peaks, ("sparsemax_backward", "y"): _face}
CASES: dict[str, tuple[str, ...]] = {
    "normalize": (
        "normalize x=f32[2,70]nchw", "normalize x=bf16[3,1024]nchw p=1.0 return_norm=True",
        "normalize x=f16[4,777]nchw g=f32[1]nchw eps=1e-05",
        "normalize x=f32[64,3,3,3]nchw g=f32[64,1,1,1]nchw axes=(1,2,3) eps=0.0 return_norm=True", "normalize x=f64[2,9001]nchw p=3.0",
        "normalize x=f32[5,8,6]nchw g=f32[5,6]nchw axes=(1,)", "normalize x=f32[0,4]nchw g=f32[1]nchw", "normalize x=f32[2,20000]nchw",
        "normalize x=bf16[2,16,5,7]nhwc axes=(1,)",
    ),
    "normalize_backward": tuple(f"normalize_backward dy={x} x={x} {rest}" for x, rest in (
        ("f32[2,70]nchw", ""), ("bf16[3,1024]nchw", "p=1.0"), ("f16[40,77]nchw", "g=f32[1]nchw eps=1e-05"),
        ("f32[64,3,3,3]nchw", "g=f32[64,1,1,1]nchw axes=(1,2,3) eps=0.0"), ("f64[2,9001]nchw", "p=3.0 g=f64[2]nchw"),
        ("f32[0,4]nchw", "g=f32[1]nchw"), ("f16[1,17000]nchw", "g=f16[]nchw"),
    )),
    "power_norm": (
        "power_norm x=f32[2,70]nchw gamma=f32[70]nchw beta=f32[70]nchw p=3.0", "power_norm x=bf16[3,1024]nchw gamma=bf16[1024]nchw p=1.0",
        "power_norm x=f16[5,777]nchw return_stats=True", "power_norm x=f64[2,9001]nchw beta=f64[9001]nchw p=1.5 return_stats=True",
        "power_norm x=f32[2,16,5,7]nhwc gamma=f32[16]nchw axes=(1,) p=4.0", "power_norm x=f32[0,4]nchw",
    ),
    "power_norm_backward": tuple(f"power_norm_backward dy={x} x={x} rstd={r} {rest}" for x, r, rest in (
        ("f32[2,70]nchw", "f32[2]nchw", "gamma=f32[70]nchw p=3.0"), ("bf16[70,128]nchw", "f32[70]nchw", "gamma=f32[128]nchw p=1.0"),
        ("f64[9,33]nchw", "f64[9]nchw", ""), ("f16[1,17000]nchw", "f32[1]nchw", "gamma=f16[17000]nchw p=1.5"),
        ("f32[3,4,40]nchw", "f32[4]nchw", "axes=(0,2) gamma=f32[3,40]nchw"), ("f32[0,9]nchw", "f32[0]nchw", "gamma=f32[9]nchw"),
    )),
    "sparsemax": (
        "sparsemax x=f32[2,70]nchw", "sparsemax x=bf16[3,1024]nchw", "sparsemax x=f16[5,777]nchw", "sparsemax x=f64[2,9001]nchw",
        "sparsemax x=f32[5,1]nchw", "sparsemax x=f32[2,7,3]nchw axis=1", "sparsemax x=f32[2,20000]nchw", "sparsemax x=f32[0,10]nchw",
        "sparsemax x=f32[37,10]nchw",
    ),
    "sparsemax_backward": (
        "sparsemax_backward dy=f32[2,70]nchw y=f32[2,70]nchw", "sparsemax_backward dy=bf16[3,1024]nchw y=bf16[3,1024]nchw",
        "sparsemax_backward dy=f64[2,7,3]nchw y=f64[2,7,3]nchw axis=1", "sparsemax_backward dy=f16[1,9000]nchw y=f16[1,9000]nchw",
    ),
}
