"""Norms: rows of one to some thousand columns, one or several axes anywhere, any layout, offsets, every attribute."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, E4M3, E5M2, F32, S8, dtype
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.epilogue import accumulator_of
from ...ops.norm import NormProblem
from . import Fill, Sampler
from .rows import draw_rows

# Epilogues and their tensors: "c" a vector along the last axis, "y" of y's shape, "1" one element.
_EPILOGUES: tuple[tuple[str, dict[str, str]], ...] = (
    ("relu(acc)", {}), ("gelu(acc * gate)", {"gate": "y"}), ("relu(acc * scale + bias)", {"scale": "c", "bias": "c"}),
    ("acc * scalar(strength) + offset", {"offset": "1"}),
)


# Activations whose gradients are drawn: smooth ones and one with a kink.
_ACTIVATIONS = ("silu(acc)", "relu(acc)", "gelu_tanh(acc * 2)")


def _draw(name: str, rng: np.random.Generator, size: str) -> Problem:
    rows = draw_rows(rng, size)
    attrs: dict[str, Any] = {"axes": rows.axes_attribute}
    is_rms = name.startswith("rms_norm")
    if name.endswith("_backward"):
        tensors = {n: rows.tensor() for n in ("dy", "x")}
        tensors |= {n: rows.tensor(rows.rows_shape, accumulator_of(rows.kind)) for n in (("rstd",) if is_rms else ("mean", "rstd"))}
        if rng.random() < 0.3:
            attrs["epilogue"] = _ACTIVATIONS[int(rng.integers(len(_ACTIVATIONS)))]
        if rng.random() < 0.7:
            own = rows.parameter_shape()
            tensors["gamma"] = rows.tensor(own, rows.parameter_kind)
            attrs["zero_centered"] = bool(rng.random() < 0.2)
            if (is_rms or "epilogue" in attrs) and rng.random() < 0.5:
                tensors["beta"] = rows.tensor(own, rows.parameter_kind)
        if rng.random() < 0.5:
            tensors["dx"] = rows.tensor(is_output=True)
        return OPS[name].make(tensors, attrs, Policy())
    tensors = {"x": rows.tensor()}
    tensors |= {n: rows.tensor(rows.parameter_shape(), rows.parameter_kind) for n in ("gamma", "beta") if rng.random() < 0.5}
    if rng.random() < 0.3:
        tensors["residual"] = rows.tensor()
    if rng.random() < 0.5:
        tensors["y"] = rows.tensor(is_output=True)
    if rng.random() < 0.3:
        attrs["epilogue"], operands = _EPILOGUES[int(rng.integers(len(_EPILOGUES)))]
        extents = {"c": rows.columns_shape[-1:], "y": rows.shape, "1": [1] * len(rows.shape)}
        tensors |= {n: rows.tensor(extents[e], F32 if rng.random() < 0.5 else rows.kind) for n, e in operands.items()}
    if rng.random() < 0.15:
        tensors["scale_y"] = rows.tensor([1], F32)
    attrs |= {"eps": float(rng.choice([1e-5, 1e-5, 1e-3, 0.1])), "return_stats": bool(rng.random() < 0.4)}
    attrs["return_sum"] = bool(rng.random() < 0.2)
    attrs["zero_centered"] = "gamma" in tensors and bool(rng.random() < 0.2)
    if rng.random() < 0.3:
        kinds = (E4M3, E5M2, S8, BF16, F32)
        attrs["out_dtype"] = kinds[int(rng.integers(5))].name
        if "y" in tensors:
            tensors["y"] = rows.tensor(dtype=dtype(attrs["out_dtype"]), is_output=True)
        attrs["return_scale"] = bool(attrs["out_dtype"] in ("e4m3", "e5m2", "s8") and rng.random() < 0.6)
    return OPS[name].make(tensors, attrs, Policy())


def _offset(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Rows about zero or, in some problems, far from it; some constant."""
    scale, offset = float(rng.choice([1.0, 1.0, 0.01, 30.0])), float(rng.choice([0.0, 0.0, 3.0, -100.0]))
    x = rng.standard_normal(problem.desc("x").shape) * scale + offset
    return np.full_like(x, float(rng.choice([0.7, 3.3, -33.3]))) if rng.random() < 0.1 else x


def _rstd(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    assert isinstance(problem, NormProblem)
    return rng.uniform(0.3, 2.0, problem.desc("rstd").shape)


def _scale(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.uniform(0.02, 2.0, 1)


_NAMES = ("layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward")
SAMPLES: dict[str, Sampler] = {n: partial(_draw, n) for n in _NAMES}
FILLS: dict[tuple[str, str], Fill] = {(n, "x"): _offset for n in ("layer_norm", "rms_norm")}
FILLS |= {(n, "scale_y"): _scale for n in ("layer_norm", "rms_norm")}
FILLS |= {(n, "rstd"): _rstd for n in ("layer_norm_backward", "rms_norm_backward")}


def _both(line: str) -> tuple[str, str]:
    """The same forward case for both norms."""
    return "layer_norm " + line, "rms_norm " + line


_FORWARD = tuple(_both(line) for line in (
    "x=f32[2,70]nchw gamma=f32[70]nchw beta=f32[70]nchw", "x=bf16[3,1024]nchw gamma=f32[1024]nchw return_stats=True",
    "x=f16[5,777]nchw gamma=f16[777]nchw beta=f16[777]nchw residual=f16[5,777]nchw return_sum=True return_stats=True",
    "x=f64[2,513]nchw", "x=f32[40,1]nchw return_stats=True", "x=f32[1,20000]nchw gamma=f32[20000]nchw return_stats=True",
    "x=bf16[1,40000]nchw residual=bf16[1,40000]nchw gamma=bf16[40000]nchw", "x=f64[1,9001]nchw return_stats=True",
    "x=f32[2,16,5,7]nhwc gamma=f32[16]nchw axes=(1,)", "x=f32[2,3,4,5]nchw gamma=f32[3,4,5]nchw beta=f32[3,4,5]nchw axes=(1,2,3)",
    "x=f16[2,8,3,5]nhwc gamma=f16[8,3,5]nchw axes=(1,2,3)", "x=f32[3,4,40]nchw axes=(0,2) gamma=f32[3,40]nchw",
    "x=bf16[2,9,64]nchw gamma=bf16[64]nchw epilogue='silu(acc) * gate' gate=bf16[2,9,64]nchw",
    "x=f64[3,20]nchw epilogue='acc * scalar(strength) + shift[c]' shift=f32[20]nchw", "x=f32[0,10]nchw return_stats=True",
    "x=bf16[5,1024]nchw gamma=f32[1024]nchw out_dtype=e4m3 return_scale=True", "x=f32[3,70]nchw out_dtype=s8 return_scale=True",
    "x=f16[2,9000]nchw residual=f16[2,9000]nchw out_dtype=e5m2 return_scale=True", "x=f32[2,20000]nchw out_dtype=s8 return_scale=True",
    "x=bf16[3,2,77]nchw out_dtype=e4m3 epilogue='silu(acc)' scale_y=f32[1]nchw", "x=f64[3,40]nchw out_dtype=s8 return_scale=True",
    "x=bf16[3,1024]nchw gamma=bf16[1024]nchw zero_centered=True epilogue='silu(acc)'",
    "x=f32[2,20000]nchw gamma=f32[20000]nchw beta=f32[20000]nchw zero_centered=True",
    "x=bf16[3,5,64]nchw gamma=bf16[3,1,64]nchw beta=bf16[3,1,64]nchw zero_centered=True",
    "x=f32[2,3,20000]nchw gamma=f32[2,1,20000]nchw zero_centered=True",
    "x=bf16[1024](1)@2 gamma=f32[1024]nchw", "x=f32[4,33](-40,1)", "x=f32[4,33](1,4)", "x=f32[3,8](0,1)", f"x=f32[3,1]({2**20},{2**31})",
))
CASES: dict[str, tuple[str, ...]] = {
    "layer_norm": (*(a for a, _ in _FORWARD), "layer_norm x=f32[1,7]nchw return_stats=True", "layer_norm x=f32[2,2100]nchw"),
    "rms_norm": tuple(b for _, b in _FORWARD),
    "layer_norm_backward": tuple(f"layer_norm_backward dy={x} x={x} mean={s} rstd={s} {rest}" for x, s, rest in (
        ("f32[2,70]nchw", "f32[2]nchw", "gamma=f32[70]nchw"), ("bf16[70,128]nchw", "f32[70]nchw", "gamma=f32[128]nchw"),
        ("f64[9,33]nchw", "f64[9]nchw", "gamma=f64[33]nchw"), ("f16[1,17000]nchw", "f32[1]nchw", "gamma=f16[17000]nchw"),
        ("f32[3,4,40]nchw", "f32[4]nchw", "axes=(0,2) gamma=f32[3,40]nchw"),
        ("f32[2,16,5,7]nhwc", "f32[2,5,7]nchw", "axes=(1,) gamma=f32[16]"),
        ("f16[40,8,3,5]nhwc", "f32[40]nchw", "axes=(1,2,3) gamma=f16[8,3,5]nchw"), ("f32[5,9]nchw", "f32[5]nchw", ""),
        ("f32[0,9]nchw", "f32[0]nchw", "gamma=f32[9]nchw"), (f"f32[3,1]({2**20},{2**31})", "f32[3]nchw", "gamma=f32[1]nchw"),
        ("f32[3000,3]nchw", "f32[3000]nchw", "gamma=f32[3]nchw"),
        ("bf16[70,1024]nchw", "f32[70]nchw", "gamma=bf16[1024]nchw zero_centered=True"),
        ("bf16[9,128]nchw", "f32[9]nchw", "gamma=f32[128]nchw beta=f32[128]nchw epilogue='relu(acc)'"),
        ("f32[3,20000]nchw", "f32[3]nchw", "gamma=f32[20000]nchw beta=f32[20000]nchw epilogue='gelu(acc)' zero_centered=True"),
        ("f32[5,33]nchw", "f32[5]nchw", "epilogue='relu(acc)'"),
        ("bf16[3,50,64]nchw", "f32[3,50]nchw", "gamma=bf16[3,1,64]nchw zero_centered=True"),
        ("f32[2,3,20000]nchw", "f32[2,3]nchw", "gamma=f32[2,1,20000]nchw beta=f32[2,1,20000]nchw epilogue='silu(acc)'"),
        ("f32[4,7,5,33]nchw", "f32[4,7,5]nchw", "gamma=f32[4,1,5,33]nchw"),
    )),
    "rms_norm_backward": tuple(f"rms_norm_backward dy={x} x={x} rstd={s} {rest}" for x, s, rest in (
        ("f32[2,70]nchw", "f32[2]nchw", "gamma=f32[70]nchw"), ("bf16[70,128]nchw", "f32[70]nchw", "gamma=bf16[128]nchw"),
        ("f64[9,33]nchw", "f64[9]nchw", "gamma=f64[33]nchw"), ("f16[1,17000]nchw", "f32[1]nchw", ""),
        ("bf16[40,1024]nchw", "f32[40]nchw", "gamma=bf16[1024]nchw beta=bf16[1024]nchw"),
        ("f16[7,1000]nchw", "f32[7]nchw", "gamma=f16[1000]nchw epilogue='silu(acc)' zero_centered=True"),
    )),
}
