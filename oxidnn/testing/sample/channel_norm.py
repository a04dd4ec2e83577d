"""Batch, group and instance norm: ranks 2 to 5, channels from 1 to some hundred in any layout, every optional tensor and attribute."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from ...dtypes import BF16, E4M3, E5M2, F16, F32, F64, S8, U8
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.channel_norm import channels_innermost, mask_desc
from ...ops.checks import canonical
from ...ops.epilogue import accumulator_of
from ...tensor import TensorDesc
from . import Fill, Sampler
from .tensors import random_desc

_FLOATS = (F32, F16, BF16, F64)
# Epilogues and their tensors: "c" a vector over the channels, "y" of y's shape, "1" one element.
_EPILOGUES: tuple[tuple[str | None, dict[str, str]], ...] = (
    (None, {"residual": "y"}), ("relu(acc)", {}), ("relu(acc + residual)", {"residual": "y"}), ("silu(acc)", {}),
    ("acc * scale + bias", {"scale": "c", "bias": "c"}), ("acc * scalar(strength) + offset", {"offset": "1"}),
)
_CHANNELS = (1, 2, 3, 5, 8, 16, 24, 32, 40, 64)


def _draw(name: str, rng: np.random.Generator, size: str) -> Problem:
    kind = _FLOATS[int(rng.integers(len(_FLOATS)))]
    accumulator = accumulator_of(kind)
    channels = int(rng.choice(_CHANNELS if size == "tiny" else (*_CHANNELS, 96, 257, 320)))
    rank = int(rng.integers(2, 6))
    shape = [int(rng.integers(1, 5)), channels, *(int(v) for v in rng.integers(1, {3: 70, 4: 12, 5: 5}.get(rank, 2), max(rank - 2, 0)))]
    if size != "tiny":
        shape[0] = int(rng.integers(1, 40))
    if rng.random() < 0.04:
        shape[0] = 0
    if name in ("batch_norm", "instance_norm") and prod(shape) == shape[0] * channels and (name[0] == "i" or shape[0] == 1):
        shape = [max(shape[0], 2), channels, 3]

    is_plain = name in ("group_norm_backward", "instance_norm_backward") and rng.random() < 0.3  # as a cluster holds it: channels last
    if is_plain:
        kind = (F32, F16, BF16)[int(rng.integers(3))]
        accumulator, channels = F32, int(rng.choice([c for c in _CHANNELS if c % 8 == 0]))
        shape[1] = channels

    def draw(extents: Any, dtype: Any = kind, is_output: bool = False) -> Any:
        return random_desc(rng, dtype, extents, is_output=is_output)

    def parameter() -> Any:
        return draw([channels], kind if rng.random() < 0.4 else F32)

    attrs: dict[str, Any] = {}
    if name.startswith("group_norm"):
        attrs["groups"] = int(rng.choice([g for g in range(1, channels + 1) if channels % g == 0]))
    stats = [channels] if name.startswith("batch") else [shape[0], attrs.get("groups", channels)]
    if name == "batch_norm_gather":
        shares, dtype = int(rng.integers(1, 9)), F32 if rng.random() < 0.7 else F64
        tensors = {"counts": draw([shares], dtype), "means": draw([shares, channels], dtype), "m2s": draw([shares, channels], dtype)}
        tensors |= {n: draw([channels], F32) for n in ("running_mean", "running_var")} if rng.random() < 0.5 else {}
        return OPS[name].make(tensors, {"momentum": 0.25, "eps": 1e-3}, Policy())
    x = canonical(draw(shape))
    if is_plain:
        x = canonical(TensorDesc.packed(kind, tuple(shape), "nhwc"))
    wants_mask = rng.random() < 0.4 and not is_plain
    if wants_mask and (channels if channels_innermost(x) else prod(shape[2:])) % 8:
        wants_mask = False
    if name.endswith(("backward", "backward_reduce", "backward_apply")):
        tensors = {"dy": x if is_plain else draw(shape), "x": x} | {n: draw(stats, accumulator) for n in ("mean", "rstd")}
        if name != "batch_norm_backward_reduce":
            tensors |= {"gamma": parameter()} if rng.random() < 0.6 else {}
            attrs["return_residual"] = bool(rng.random() < 0.3) and not is_plain
        if wants_mask:
            mask = mask_desc(x)
            tensors["mask"] = mask if rng.random() < 0.5 else draw(mask.shape, U8)
        elif rng.random() < 0.4 and not is_plain:
            tensors["y"] = draw(shape, kind if rng.random() < 0.7 else F32)
        if name == "batch_norm_backward_apply":
            tensors |= {n: draw([channels], accumulator) for n in ("sum_dy", "sum_dy_xhat")} | {"count": draw([1], accumulator)}
        if name == "batch_norm_backward" and rng.random() < 0.2:
            attrs["training"] = False
        if name != "batch_norm_backward_reduce" and rng.random() < 0.4 and not is_plain:
            tensors["dx"] = draw(shape, is_output=True)
        return OPS[name].make(tensors, attrs, Policy())
    tensors = {"x": x}
    if name == "batch_norm_stats":
        return OPS[name].make(tensors, {}, Policy())
    tensors |= {n: parameter() for n in ("gamma", "beta") if rng.random() < 0.6}
    if name == "batch_norm_apply":
        tensors |= {n: draw([channels], accumulator) for n in ("mean", "rstd")}
    else:
        attrs["eps"] = float(rng.choice([1e-5, 1e-3, 0.1]))
    if name == "batch_norm":
        attrs |= {"training": bool(rng.random() < 0.7), "momentum": float(rng.choice([0.1, 0.3]))}
        if not attrs["training"] or rng.random() < 0.6:
            tensors |= {n: draw([channels], F32 if rng.random() < 0.7 else kind) for n in ("running_mean", "running_var")}
    if name != "batch_norm_apply" and attrs.get("training", True):
        attrs["return_stats"] = bool(rng.random() < 0.4)
    if wants_mask:  # with an offset: a value that is 0 but for rounding has no sign
        tensors["beta"] = parameter()
        attrs["return_mask"] = True
    if rng.random() < 0.5 or wants_mask:
        epilogue, operands = _EPILOGUES[1 if wants_mask else int(rng.integers(len(_EPILOGUES)))]
        extents = {"c": [channels], "y": shape, "1": [1] * len(shape)}
        tensors |= {n: draw(extents[e], F32 if rng.random() < 0.5 else kind) for n, e in operands.items()}
        attrs |= {"epilogue": epilogue} if epilogue else {}
    result = kind
    if rng.random() < 0.25:
        result = (E4M3, E5M2, S8, F32, BF16)[int(rng.integers(5))]
        attrs["out_dtype"] = result.name
    if rng.random() < 0.15:
        tensors["scale_y"] = draw([1], F32)
    if rng.random() < 0.4:
        tensors["y"] = draw(shape, result, True)
    return OPS[name].make(tensors, attrs, Policy())


def _offset(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Values about zero or, in some problems, far from it; some constant."""
    scale, offset = float(rng.choice([1.0, 1.0, 0.01, 30.0])), float(rng.choice([0.0, 0.0, 3.0, -100.0]))
    x = rng.standard_normal(problem.desc("x").shape) * scale + offset
    return np.full_like(x, float(rng.choice([0.7, 3.3, -33.3]))) if rng.random() < 0.1 and not problem.has("mask") else x


def _uniform(name: str, low: float, high: float) -> Fill:
    return lambda rng, problem: rng.uniform(low, high, problem.desc(name).shape)


def _integers(name: str, low: int, high: int) -> Fill:
    return lambda rng, problem: rng.integers(low, high, problem.desc(name).shape)


def _counts(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Values of each share; one share may have none."""
    counts = rng.integers(2, 50, problem.desc("counts").shape)
    if len(counts) > 1 and rng.random() < 0.4:
        counts[int(rng.integers(len(counts)))] = 0
    return counts


_FORWARD = ("batch_norm", "batch_norm_apply", "group_norm", "instance_norm", "batch_norm_stats")
_BACKWARD = ("batch_norm_backward", "group_norm_backward", "instance_norm_backward", "batch_norm_backward_reduce",
             "batch_norm_backward_apply")
SAMPLES: dict[str, Sampler] = {n: partial(_draw, n) for n in (*_FORWARD, *_BACKWARD, "batch_norm_gather")}
FILLS: dict[tuple[str, str], Fill] = {(n, "x"): _offset for n in _FORWARD}
FILLS |= {(n, "rstd"): _uniform("rstd", 0.3, 2.0) for n in (*_BACKWARD, "batch_norm_apply")}
FILLS |= {(n, "mask"): _integers("mask", 0, 256) for n in _BACKWARD}
FILLS |= {(n, "running_var"): _uniform("running_var", 0.2, 3.0) for n in ("batch_norm", "batch_norm_gather")}
FILLS |= {(n, "scale_y"): _uniform("scale_y", 0.02, 2.0) for n in _FORWARD}
FILLS |= {("batch_norm_gather", "counts"): _counts, ("batch_norm_gather", "m2s"): _uniform("m2s", 0.0, 60.0),
          ("batch_norm_backward_apply", "count"): _uniform("count", 20.0, 60.0)}

_X = ("f32[3,5,7]nchw", "bf16[2,64,5,7]nhwc", "f16[2,16,4,8]nchw", "f64[3,6,2,3,2]nhwc", "f32[9,33]nchw", "bf16[1,320,20,20]nhwc",
      "f32[2,3,40,50]nchw", "f16[2,12,9,9](972,1,108,12)", "bf16[4,8,12](1,48,4)", "f32[70,1,5]nchw", "bf16[2,24,6,6]nhwc@2",
      "f16[5,16,7,7]nchw")
CASES: dict[str, tuple[str, ...]] = {
    "batch_norm": tuple(f"batch_norm x={x} training=True return_stats=True" for x in _X) + (
        "batch_norm x=bf16[3,16,6,6]nhwc gamma=f32[16] beta=f32[16] running_mean=f32[16] running_var=f32[16] training=True momentum=0.3",
        "batch_norm x=bf16[3,16,6,6]nhwc gamma=f32[16] beta=f32[16] residual=bf16[3,16,6,6]nhwc training=True return_mask=True "
        "epilogue='relu(acc + residual)'",
        "batch_norm x=f16[3,4,4,6]nchw gamma=f16[4] beta=f16[4] training=True return_mask=True epilogue='relu(acc)'",
        "batch_norm x=f16[5,4,8,7](336,8,1,1680) beta=f16[4] training=True return_mask=True epilogue='relu(acc)'",
        "batch_norm x=f32[2,8,3,3]nhwc beta=f32[8] training=True return_mask=True epilogue='relu(acc)'",
        "batch_norm x=f32[2,8,5]nchw running_mean=f32[8] running_var=f32[8] training=False eps=0.001",
        "batch_norm x=bf16[2,64,9]nhwc gamma=bf16[64] beta=bf16[64] running_mean=f32[64] running_var=f32[64] training=False "
        "epilogue='relu(acc)'",
        "batch_norm x=bf16[9,16,7]nchw gamma=f32[16] beta=bf16[16] residual=bf16[9,16,7]nchw running_mean=f32[16] running_var=f32[16] "
        "training=True return_stats=True epilogue='relu(acc + residual)'",
        "batch_norm x=f32[0,8,5]nchw running_mean=f32[8] running_var=f32[8] training=True return_stats=True",
        "batch_norm x=f32[4,0,5]nchw running_mean=f32[0] running_var=f32[0] training=True",
    ),
    "group_norm": tuple(f"group_norm x={x} groups={g} return_stats=True"
                        for x, g in zip(_X, (5, 32, 4, 2, 11, 32, 1, 6, 2, 1, 3, 4), strict=True)) + (
        "group_norm x=bf16[2,64,6,6]nhwc gamma=f32[64] beta=f32[64] groups=4 epilogue='silu(acc)'",
        "group_norm x=f32[2,6,4,4]nchw gamma=f32[6] beta=f32[6] residual=f32[2,6,4,4]nchw groups=3 eps=0.1",
        "group_norm x=f32[0,6,4]nchw gamma=f32[6] groups=3", "group_norm x=f32[2,6]nchw groups=6",
    ),
    "instance_norm": ("instance_norm x=bf16[2,64,6,6]nhwc gamma=f32[64] beta=f32[64] return_stats=True",
                      "instance_norm x=f32[3,5,33]nchw", "instance_norm x=f64[2,3,4,5,2]nhwc gamma=f64[3]"),
    "batch_norm_apply": ("batch_norm_apply x=bf16[2,64,6,6]nhwc mean=f32[64] rstd=f32[64] gamma=f32[64] beta=f32[64]",
                         "batch_norm_apply x=f32[3,5,33]nchw mean=f32[5] rstd=f32[5] epilogue='relu(acc)'"),
    "batch_norm_stats": tuple(f"batch_norm_stats x={x}" for x in (*_X, "f32[0,5,3]nchw", "f32[1,5]nchw")),
    "batch_norm_gather": ("batch_norm_gather counts=f32[4] means=f32[4,33] m2s=f32[4,33] running_mean=f32[33] running_var=f32[33]",
                          "batch_norm_gather counts=f64[300] means=f64[300,3] m2s=f64[300,3] eps=0.1"),
    "batch_norm_backward": tuple(
        f"batch_norm_backward dy={x} x={x} mean={a}[{c}] rstd={a}[{c}] gamma=f32[{c}]" for x in _X
        for a, c in [("f64" if x[:3] == "f64" else "f32", x.split("[")[1].split(",")[1].split("]")[0])]) + (
        "batch_norm_backward dy=bf16[3,16,6,6]nhwc x=bf16[3,16,6,6]nhwc mean=f32[16] rstd=f32[16] gamma=f32[16] mask=u8[3,2,6,6]nhwc "
        "return_residual=True",
        "batch_norm_backward dy=f32[3,4,4,6]nchw x=f32[3,4,4,6]nchw mean=f32[4] rstd=f32[4] mask=u8[3,4,3]nchw",
        "batch_norm_backward dy=bf16[5,4,8,7]nhwc x=bf16[5,4,8,7](336,8,1,1680) mean=f32[4] rstd=f32[4] mask=u8[5,4,7](1,40,5)",
        "batch_norm_backward dy=f32[3,4,5,5]nchw x=f32[3,4,5,5]nhwc mean=f32[4] rstd=f32[4] gamma=f32[4] y=f32[3,4,5,5]nchw",
        "batch_norm_backward dy=bf16[9,16,3,5]nchw x=bf16[9,16,3,5]nchw mean=f32[16] rstd=f32[16] gamma=bf16[16] y=bf16[9,16,3,5]nchw "
        "return_residual=True",
        "batch_norm_backward dy=f32[3,4,5]nchw x=f32[3,4,5]nchw mean=f32[4] rstd=f32[4] gamma=f32[4] training=False",
        "batch_norm_backward dy=f32[3,4,5]nchw x=f32[3,4,5]nchw mean=f32[4] rstd=f32[4] training=False",
        "batch_norm_backward dy=f32[0,4,5]nchw x=f32[0,4,5]nchw mean=f32[4] rstd=f32[4] gamma=f32[4]",
    ),
    "group_norm_backward": ("group_norm_backward dy=bf16[2,64,6,6]nhwc x=bf16[2,64,6,6]nhwc mean=f32[2,4] rstd=f32[2,4] gamma=f32[64] "
                            "groups=4",
                            "group_norm_backward dy=f32[3,6,5]nchw x=f32[3,6,5]nchw mean=f32[3,3] rstd=f32[3,3] gamma=f16[6] groups=3",
                            "group_norm_backward dy=f16[3,6,5]nhwc x=f16[3,6,5]nhwc mean=f32[3,1] rstd=f32[3,1] groups=1",
                            "group_norm_backward dy=f32[0,6,5]nchw x=f32[0,6,5]nchw mean=f32[0,3] rstd=f32[0,3] gamma=f32[6] groups=3"),
    "instance_norm_backward": (
        "instance_norm_backward dy=bf16[2,64,6,6]nhwc x=bf16[2,64,6,6]nhwc mean=f32[2,64] rstd=f32[2,64] gamma=f32[64]",
        "instance_norm_backward dy=f64[3,5,33]nchw x=f64[3,5,33]nchw mean=f64[3,5] rstd=f64[3,5]"),
    "batch_norm_backward_reduce": (
        "batch_norm_backward_reduce dy=bf16[2,64,6,6]nhwc x=bf16[2,64,6,6]nhwc mean=f32[64] rstd=f32[64]",
        "batch_norm_backward_reduce dy=f32[3,5,33]nchw x=f32[3,5,33]nchw mean=f32[5] rstd=f32[5] y=f32[3,5,33]nchw"),
    "batch_norm_backward_apply": (
        "batch_norm_backward_apply dy=bf16[2,64,6,6]nhwc x=bf16[2,64,6,6]nhwc mean=f32[64] rstd=f32[64] gamma=f32[64] sum_dy=f32[64] "
        "sum_dy_xhat=f32[64] count=f32[1]",),
}
