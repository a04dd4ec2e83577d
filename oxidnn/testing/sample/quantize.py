"""Quantisation: every kind and scaling, odd sizes, views, zero blocks, numbers between two codes and what is no number."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import E4M3, F32, S64, U8
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.quantize import FORMATS, KINDS, WIDE, ZERO_POINTS, Kind, QuantizeProblem, scales_of
from ...tensor import TensorDesc
from . import Fill, Sampler
from .tensors import random_desc

_SCALINGS: tuple[Any, ...] = ("tensor", "channel", "token", ("group", 4), ("group", 16), ("group", 128), ("block", (4, 8)),
                              ("block", (16, 32)), "mxfp8", "mxfp4", "nvfp4")


def _draw_rounding(rng: np.random.Generator, kind: Kind, attrs: dict[str, Any], tensors: dict[str, TensorDesc]) -> None:
    if kind.name != "nf4" and rng.random() < 0.2:
        attrs["rounding"] = "stochastic"
        if rng.random() < 0.4:
            tensors["state"] = TensorDesc.packed(S64, (2,))


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    rank = int(rng.integers(1, 4))
    shape = [int(n) for n in rng.integers(1, 6 if size == "tiny" else 30, rank)]
    shape[-1] = int(rng.choice([1, 8, 16, 33, 64, 96, 130]) if size == "tiny" else rng.choice([5, 77, 128, 1001, 4096, 20000]))
    if rank > 1 and rng.random() < 0.04:
        shape[0] = 0
    scaling = _SCALINGS[int(rng.integers(len(_SCALINGS)))]
    if rank < 2 and isinstance(scaling, tuple) and scaling[0] == "block":
        scaling = "token"
    kind = KINDS[str(rng.choice({"mxfp8": ["e4m3", "e5m2"], "mxfp4": ["e2m1"], "nvfp4": ["e2m1"]}.get(scaling, list(KINDS))))]
    attrs: dict[str, Any] = {"kind": kind.name, "scaling": scaling}
    if scaling in ("channel", "token", *FORMATS) and rng.random() < 0.4 or scaling == ("group", 4):
        attrs["axis"] = int(rng.integers(rank))
    if scaling in ("mxfp8", "mxfp4", "nvfp4") and "axis" not in attrs and rank > 1 and rng.random() < 0.3:
        attrs["layout"] = "128x4"
    wide = WIDE[int(rng.integers(3))]
    tensors = {"x": random_desc(rng, wide, shape)}
    if op == "dynamic_quantize":
        if kind.is_integer and not isinstance(scaling, str) or kind.is_integer and scaling in ("tensor", "channel", "token"):
            attrs["asymmetric"] = bool(rng.random() < 0.5)
        if scaling == "nvfp4":
            if rng.random() < 0.5:
                tensors["global_scale"] = random_desc(rng, F32, ())
            else:
                attrs["find_global"] = bool(rng.random() < 0.5)
        _draw_rounding(rng, kind, attrs, tensors)
        return OPS[op].make(tensors, {n: v for n, v in attrs.items() if v is not False}, Policy())
    scales = scales_of(op, scaling, tuple(shape), attrs)
    is_plain = op in ("quantize", "dequantize") and rng.random() < 0.1
    if is_plain:
        attrs = {"kind": kind.name}
    else:
        stored = {"e8m0": U8, "e4m3": E4M3}.get(scales.format) or WIDE[int(rng.integers(3))]
        tensors["scale"] = (TensorDesc.packed(stored, scales.shape) if scales.swizzled else random_desc(rng, stored, scales.shape))
        if kind.is_integer and rng.random() < 0.5:
            tensors["zero_point"] = random_desc(rng, ZERO_POINTS[int(rng.integers(len(ZERO_POINTS)))], scales.shape)
        if scaling == "nvfp4" and rng.random() < 0.5:
            tensors["global_scale"] = random_desc(rng, F32, (1,))
    if op == "dequantize":
        codes = (*shape[:-1], -(-shape[-1] // 2)) if kind.is_packed else shape
        tensors["x"] = random_desc(rng, kind.storage, codes)
        attrs |= {"dtype": wide.name} | ({"size": shape[-1]} if kind.is_packed else {})
    if op == "quantize":
        if kind.name not in ("nf4", "e2m1") and rng.random() < 0.2:
            attrs["saturate"] = False
        _draw_rounding(rng, kind, attrs, tensors)
    if op == "fake_quantize_backward":
        tensors["dy"] = random_desc(rng, wide, shape)
    return OPS[op].make(tensors, attrs, Policy())


def _spread(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Of every size; some halfway between two codes, zero blocks, and now and then what is no finite number."""
    desc = problem.desc("x")
    x = rng.standard_normal(desc.shape) * 2.0 ** rng.integers(-3, 4, desc.shape)
    x = np.where(rng.random(desc.shape) < 0.3, np.round(x * 4) / 4, x)
    if desc.rank > 1 and rng.random() < 0.5:
        x[rng.integers(desc.shape[0]) if desc.shape[0] else slice(0)] = 0
    x = np.where(rng.random(desc.shape) < 0.02, rng.choice([-0.0, 1e-7, 6e4, -6e4, 300.0]), x)
    if rng.random() < 0.2:
        x = np.where(rng.random(desc.shape) < 0.02, rng.choice([np.nan, np.inf, -np.inf]), x)
    return x


def _codes(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    desc = problem.desc("x")
    raw = rng.integers(0, 256, desc.shape, np.uint8)
    return raw.view(desc.dtype.numpy).astype(np.float64) if desc.dtype.is_float else raw.view(desc.dtype.numpy)


def _scales(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    desc = problem.desc("scale")
    if desc.dtype is U8:
        return rng.choice([*range(120, 132), 0, 254, 255], desc.shape, p=[*[0.08] * 12, 0.02, 0.01, 0.01])
    scale = 2.0 ** rng.uniform(-4, 2, desc.shape)
    if rng.random() < 0.3:
        scale = np.where(rng.random(desc.shape) < 0.1, rng.choice([0.0, 0.5, 1.0]), scale)
    if desc.dtype is F32 and rng.random() < 0.2:
        scale = np.where(rng.random(desc.shape) < 0.3, rng.choice([1e-30, 1e-40, 1e30, 3e38, -0.5]), scale)
    return scale


def _zeros(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    assert isinstance(problem, QuantizeProblem)
    desc = problem.desc("zero_point")
    return rng.integers(0 if desc.dtype.kind == "uint" or problem.kind.low == 0 else -8, 8, desc.shape)


def _global(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return 2.0 ** rng.uniform(-3, 1, problem.desc("global_scale").shape)


_OPS = ("quantize", "dynamic_quantize", "dequantize", "fake_quantize", "fake_quantize_backward")
SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in _OPS}
FILLS: dict[tuple[str, str], Fill] = {
    **{(op, "x"): _spread for op in _OPS}, ("dequantize", "x"): _codes, **{(op, "scale"): _scales for op in _OPS},
    **{(op, "zero_point"): _zeros for op in _OPS}, **{(op, "global_scale"): _global for op in _OPS}}
CASES: dict[str, tuple[str, ...]] = {
    "quantize": (
        "quantize x=f32[3,33]nchw kind=s4 scale=f32[3]nchw", "quantize x=bf16[4,64]nchw kind=e4m3 scale=f32[]nchw",
        "quantize x=f16[2,3,5,5]nhwc kind=u8 scale=f32[3]nchw zero_point=u8[3]nchw axis=1", "quantize x=f32[5,16]nchw kind=nf4",
        "quantize x=f32[4,48]nchw kind=e2m1 scale=e4m3[4,3]nchw global_scale=f32[1]nchw scaling=nvfp4",
        "quantize x=bf16[3,40]nchw kind=e5m2 scale=u8[3,2]nchw scaling=mxfp8 saturate=False", "quantize x=f32[0,4]nchw kind=s8",
        "quantize x=f32[7,24]nchw kind=s8 scale=f32[24]nchw axis=1 rounding=stochastic", "quantize x=f32[]nchw kind=e4m3",
        "quantize x=bf16[4,32]nchw kind=e2m1 state=s64[2]nchw rounding=stochastic",
        "quantize x=f16[6,9](20,2) kind=u4 scale=f32[6,9]nchw zero_point=u8[6,9]nchw", "quantize x=f32[4,1]nchw kind=s4",
        'quantize x=f32[3,40]nchw kind=s4 scale=f32[3,3]nchw scaling="(\'group\',16)" rounding=stochastic'),
    "dynamic_quantize": (
        'dynamic_quantize x=bf16[5,256]nchw kind=e4m3 scaling="(\'group\',128)"',
        "dynamic_quantize x=f32[3,100]nchw kind=s8 scaling=token",
        "dynamic_quantize x=bf16[3,40]nchw state=s64[2]nchw kind=e4m3 scaling=token rounding=stochastic",
        "dynamic_quantize x=f16[33,96]nchw kind=e2m1 scaling=mxfp4 layout=128x4",
        "dynamic_quantize x=f32[0,4]nchw kind=s8 scaling=tensor",
        "dynamic_quantize x=bf16[4,64]nchw kind=e2m1 scaling=nvfp4 find_global=True",
        "dynamic_quantize x=f32[4,0]nchw kind=s8 scaling=token",
        "dynamic_quantize x=f16[3,40]nchw global_scale=f32[1]nchw kind=e2m1 scaling=nvfp4",
        "dynamic_quantize x=f32[5,70]nchw kind=u8 scaling=tensor asymmetric=True",
        'dynamic_quantize x=f32[40,70]nchw kind=e4m3 scaling="(\'block\',(16,32))"',
        "dynamic_quantize x=f32[2,4,5]nchw kind=s8 scaling=channel axis=1",
        'dynamic_quantize x=f32[64,6]nchw kind=u4 scaling="(\'group\',32)" axis=0 asymmetric=True',
        'dynamic_quantize x=bf16[3,130]nchw kind=nf4 scaling="(\'group\',64)"',
        "dynamic_quantize x=f32[2,9000]nchw kind=e4m3 scaling=token",
        "dynamic_quantize x=bf16[70,33]nchw kind=e2m1 scaling=mxfp4 axis=0",
        "dynamic_quantize x=f32[2,40,6]nchw kind=e2m1 scaling=nvfp4 axis=1 find_global=True",
        "dynamic_quantize x=f32[0,32]nchw kind=e2m1 scaling=nvfp4 find_global=True",
        "dynamic_quantize x=f16[5,1]nchw global_scale=f32[1]nchw kind=e2m1 scaling=nvfp4",
        'dynamic_quantize x=f32[3,5,33]nchw state=s64[2]nchw kind=s4 scaling="(\'group\',2)" axis=1 rounding=stochastic',
        'dynamic_quantize x=f32[5,7]nchw kind=u4 scaling="(\'block\',(2,1))" asymmetric=True',
        'dynamic_quantize x=f32[5,1]nchw kind=nf4 scaling="(\'block\',(2,2))"'),
    "dequantize": (
        "dequantize x=u8[3,17]nchw kind=s4 size=33 scale=f32[3]nchw", "dequantize x=e4m3[4,64]nchw scale=bf16[4,2]nchw dtype=bf16",
        "dequantize x=u8[4,24]nchw scale=e4m3[4,3]nchw global_scale=f32[]nchw scaling=nvfp4 dtype=f16", "dequantize x=s8[0,3]nchw",
        "dequantize x=u8[33,48]nchw scale=u8[128,4]nchw scaling=mxfp4 layout=128x4", "dequantize x=u8[5,8]nchw kind=nf4 scale=f32[]nchw",
        "dequantize x=u8[4,6]nchw scale=f32[6]nchw zero_point=u8[6]nchw axis=1", "dequantize x=u8[4,64]nchw kind=nf4 scale=f32[4,2]nchw"),
    "fake_quantize": (
        "fake_quantize x=f32[3,64]nchw kind=s4 scale=f32[3,4]nchw", "fake_quantize x=bf16[3,32]nchw kind=nf4 scale=f32[3]nchw",
        "fake_quantize x=f16[4,6]nchw kind=u8 scale=f32[6]nchw zero_point=f32[6]nchw axis=1",
        "fake_quantize x=f32[3,33]nchw kind=e2m1 scale=u8[3,2]nchw scaling=mxfp4",
        "fake_quantize x=f32[3,32]nchw kind=e2m1 scale=e4m3[3,2]nchw global_scale=f32[1]nchw scaling=nvfp4"),
    "fake_quantize_backward": (
        "fake_quantize_backward dy=f32[3,64]nchw x=f32[3,64]nchw kind=s4 scale=f32[3,4]nchw",
        "fake_quantize_backward dy=bf16[5,24]nchw x=bf16[5,24]nchw kind=e4m3 scale=f32[]nchw",
        "fake_quantize_backward dy=f32[3,32]nchw x=f32[3,32]nchw kind=e2m1 scale=e4m3[3,2]nchw global_scale=f32[]nchw scaling=nvfp4",
        "fake_quantize_backward dy=f16[4,7]nchw x=f16[4,7]nchw kind=u8 scale=f32[7]nchw zero_point=s32[7]nchw axis=1"),
}
