"""Elementwise losses: every row, reduction and attribute; weights that broadcast; integer targets; every layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import dtype
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.elementwise_loss import LOSSES, REDUCTIONS
from ...tensor import TensorDesc
from . import Fill, Sampler
from .pointwise import FLOATS, _shape, view

_SIGNS = ("hinge", "squared_hinge", "soft_margin", "hinge_embedding", "margin_ranking")
_NUMBERS = {"beta": (0.0, 0.5, 1.0), "delta": (0.5, 1.0), "margin": (0.0, 0.5, 1.0), "eps": (1e-3, 1e-6)}


def _loss(op: str, rng: np.random.Generator, size: str) -> Problem:
    name, kind, shape = str(rng.choice(list(LOSSES))), dtype(str(rng.choice(FLOATS))), _shape(rng, size)
    row = LOSSES[name]
    attrs: dict[str, Any] = {"name": name, "reduction": str(rng.choice(REDUCTIONS))}
    attrs |= {a: float(rng.choice(_NUMBERS[a])) for a in row.numbers if rng.random() < 0.6}
    attrs |= {a: bool(rng.random() < 0.5) for a in row.attributes if a not in row.numbers}

    def other() -> Any:
        return kind if rng.random() < 0.7 else dtype(str(rng.choice(FLOATS)))

    def part() -> tuple[int, ...]:
        return tuple(1 if rng.random() < 0.4 else n for n in shape)[int(rng.integers(0, len(shape) + 1)):]

    tensors = {"x": view(rng, kind, shape)}
    target = dtype(str(rng.choice(["s8", "s32", "s64"]))) if name in _SIGNS and rng.random() < 0.4 else other()
    tensors["target"] = view(rng, target, shape)
    if "x2" in row.roles:
        tensors["x2"] = view(rng, other(), shape)
    if "var" in row.roles:
        tensors["var"] = view(rng, other(), shape if rng.random() < 0.6 else part())
    if rng.random() < 0.4:
        tensors["weight"] = view(rng, other(), part())
    if name == "bce_with_logits" and rng.random() < 0.5:
        tensors["pos_weight"] = view(rng, other(), part())
    if op == "loss_backward":
        if rng.random() < 0.6:
            tensors["d_loss"] = view(rng, other(), shape if attrs["reduction"] == "none" else ())
        if rng.random() < 0.5:
            tensors["dx"] = view(rng, kind, shape, True)
    elif attrs["reduction"] == "none" and rng.random() < 0.5:
        tensors["loss"] = view(rng, kind, shape, True)
    return OPS[op].make(tensors, attrs, Policy())


def _dot(rng: np.random.Generator, size: str) -> Problem:
    kinds = [dtype(str(k)) for k in rng.choice(FLOATS, 3)]
    if rng.random() < 0.6:
        kinds = [kinds[0]] * 3
    shape = _shape(rng, size)
    tensors = {"x": view(rng, kinds[0], shape), "x2": view(rng, kinds[1], shape)}
    if rng.random() < 0.5:
        tensors["y"] = TensorDesc.packed(kinds[2], ())
    return OPS["dot"].make(tensors, {}, Policy())


def _name(problem: Problem) -> str:
    return str(dict(problem.attrs)["name"])


def _x(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    shape, name = problem.desc("x").shape, _name(problem)
    positive = name == "bce" or (name == "poisson_nll" and not dict(problem.attrs).get("log_input", True))
    return rng.uniform(0.05, 0.95, shape) if positive else rng.standard_normal(shape) * 2


def _target(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    shape, name = problem.desc("target").shape, _name(problem)
    if name in _SIGNS:
        return rng.choice([-1.0, 1.0], shape)
    if name in ("bce", "bce_with_logits") or (name == "kl_div" and not dict(problem.attrs).get("log_target")):
        return np.clip(rng.uniform(-0.2, 1.2, shape), 0, 1)
    if name == "poisson_nll":
        return rng.integers(0, 6, shape).astype(float)
    return rng.standard_normal(shape)


def _positive(name: str, rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.uniform(0.2, 2.0, problem.desc(name).shape)


SAMPLES: dict[str, Sampler] = {op: partial(_loss, op) for op in ("loss", "loss_backward")}
FILLS: dict[tuple[str, str], Fill] = {}
for _op in tuple(SAMPLES):
    FILLS |= {(_op, "x"): _x, (_op, "target"): _target} | {(_op, n): partial(_positive, n) for n in ("var", "weight", "pos_weight")}
SAMPLES["dot"] = _dot
CASES: dict[str, tuple[str, ...]] = {
    "dot": ("dot x=f32[20003] x2=f32[20003]", "dot x=bf16[2,8,3,5]nhwc x2=bf16[2,8,3,5]nchw", "dot x=f64[9] x2=f32[9]",
            "dot x=f16[0,3] x2=f16[0,3]"),
    "loss": (
        *(f"loss x=f32[5,37]nchw target=f32[5,37]nchw {'x2=f32[5,37]nchw ' if n == 'margin_ranking' else ''}"
          f"{'var=f32[5,1]nchw ' if n == 'gaussian_nll' else ''}name={n}" for n in LOSSES),
        "loss x=f16[3,1001]nchw target=f16[3,1001]nchw name=mse", "loss x=bf16[70000]nchw target=bf16[70000]nchw name=l1 reduction=sum",
        "loss x=f32[0,4]nchw target=f32[0,4]nchw name=mse", "loss x=f32[0,4]nchw target=f32[0,4]nchw name=mse reduction=sum",
        "loss x=f32[]nchw target=f32[]nchw name=mse", "loss x=f64[2,5,3]nhwc target=f64[2,5,3]nchw name=kl_div reduction=batchmean",
        "loss x=f16[4,9]nchw target=f16[4,9]nchw pos_weight=f32[9]nchw weight=f32[4,1]nchw name=bce_with_logits",
        "loss x=f16[4,9]nchw target=f16[4,9]nchw name=huber reduction=none",
    ),
    "loss_backward": (
        *(f"loss_backward x=f32[5,37]nchw target=f32[5,37]nchw {'x2=f32[5,37]nchw ' if n == 'margin_ranking' else ''}"
          f"{'var=f32[5,37]nchw ' if n == 'gaussian_nll' else ''}name={n}" for n in LOSSES),
        "loss_backward x=f16[4,9]nchw target=f16[4,9]nchw weight=f32[4,1]nchw pos_weight=f32[9]nchw name=bce_with_logits",
        "loss_backward x=f16[4,9]nchw target=f16[4,9]nchw d_loss=f16[4,9]nchw name=huber reduction=none",
        "loss_backward x=bf16[2,8,3,3]nhwc target=bf16[2,8,3,3]nhwc d_loss=f32[]nchw name=mse",
    ),
}
