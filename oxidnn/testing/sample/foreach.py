"""Steps over lists of tensors: every optimiser with every option, types mixed within the lists, empty tensors, odd layouts."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, F64, DType
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.foreach import RULES
from ...tensor import TensorDesc, packed_strides
from . import Fill, Sampler

EXPRESSIONS = ("a + scalar(s) * b", "relu(a), a * b + c", "where(a > b, a, limit)", "a", "exp(a) * (1 / (1 + exp(limit)))")


def _view(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...]) -> TensorDesc:
    """A tensor that lies densely, in another order of dimensions, with gaps, or at an odd address."""
    draw = rng.random()
    order = tuple(range(len(shape)))
    if draw < 0.25:
        order = tuple(int(i) for i in rng.permutation(len(shape)))
    padded = tuple(n + int(rng.integers(0, 3)) for n in shape) if 0.25 < draw < 0.35 else shape
    return TensorDesc(dtype, shape, packed_strides(padded, order), dtype.num_bytes if draw > 0.8 else 16)


def _shapes(rng: np.random.Generator, size: str) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    for _ in range(int(rng.integers(1, 5 if size == "tiny" else 12))):
        rank, top = int(rng.integers(0, 5)), {"tiny": (1, 600, 20, 7, 5), "small": (1, 50000, 200, 40, 16)}[size]
        shapes.append(tuple(int(n) for n in rng.integers(1, top[rank] + 1, rank)))
    if rng.random() < 0.15:
        shapes.insert(int(rng.integers(len(shapes) + 1)), (0, 3))
    return shapes


def _one(rng: np.random.Generator, kind: DType = F32) -> TensorDesc:
    return TensorDesc.packed(kind, () if rng.random() < 0.5 else (1,))


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    rule, is_double = RULES[op], rng.random() < 0.15
    attrs: dict[str, Any] = {}
    for name, default in rule.attrs:
        if name == "norm_type":
            attrs[name] = float(rng.choice([1.0, 2.0, math.inf, 3.0]))
        elif rng.random() < 0.4:
            attrs[name] = not default
    if not attrs.get("momentum"):
        attrs.pop("nesterov", None)
        attrs.pop("first", None)
    roles = [*rule.lists, *(r for r in rule.optional if r != "momentum_buffer" and rng.random() < 0.4)]
    if op == "rmsprop_step" and rng.random() < 0.5 or attrs.get("momentum") and not attrs.get("first"):
        roles.append("momentum_buffer")
    if "master" in roles:
        roles.remove("param")
    tensors: dict[str, TensorDesc] = {}
    for i, shape in enumerate(_shapes(rng, size)):
        like = _view(rng, F32, shape)
        for role in roles:
            kind = (F32, F32, BF16, F16)[int(rng.integers(4))] if role in ("param", "grad") else F32
            kind = F64 if is_double and (role not in ("param", "grad") or role == roles[-1]) else kind
            align = max(like.align, kind.num_bytes)
            tensors[f"{role}_{i}"] = _view(rng, kind, shape) if rng.random() < 0.15 else TensorDesc(kind, shape, like.strides, align)
            if rng.random() < 0.1 and role not in ("exp_avg", "exp_avg_sq"):
                written = "new_" + role
                if role != "grad" or op in ("clip_grad_norm", "unscale_grads"):
                    tensors[f"{written}_{i}"] = _view(rng, kind, shape)
    for name in rule.shared:
        if rng.random() < 0.4:
            tensors[name] = _one(rng)
    return OPS[op].make(tensors, attrs, Policy())


def _draw_any(rng: np.random.Generator, size: str) -> Problem:
    expression = str(rng.choice(EXPRESSIONS))
    tensors: dict[str, TensorDesc] = {}
    for i, shape in enumerate(_shapes(rng, size)):
        for role in "abc":
            if role in expression.replace("relu", "").replace("scalar", ""):
                tensors[f"{role}_{i}"] = _view(rng, (F32, BF16, F16)[int(rng.integers(3))], shape)
    if "limit" in expression:
        tensors["limit"] = _one(rng, BF16)
    return OPS["foreach"].make(tensors, {"expression": expression}, Policy())


SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in RULES} | {"foreach": _draw_any}


def _shape(problem: Problem, name: str) -> tuple[int, ...]:
    return problem.desc(name).shape


def _positive(name: str, low: float, rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return low + rng.standard_normal(_shape(problem, name)) ** 2


def _half(name: str, rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return np.clip(rng.standard_normal(_shape(problem, name)) / 2, -1, 1)


def _overflowed(name: str, rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Gradients, in every second problem with NaN or an infinity here and there."""
    shape = _shape(problem, name)
    values = rng.standard_normal(shape)
    if rng.random() < 0.5:
        values = np.where(rng.random(shape) < 0.02, rng.choice([np.inf, -np.inf, np.nan]), values)
    return values


def _number(low: float, high: float, rng: np.random.Generator, problem: Problem) -> float:
    return float(rng.uniform(low, high))


def _log(rng: np.random.Generator, problem: Problem) -> float:
    return math.log(rng.uniform(0.8, 0.999))


def _element(values: tuple[float, ...], name: str, rng: np.random.Generator, problem: Problem) -> Any:
    """One of the values: of an operand of one element, or of a number given with a call."""
    value = float(rng.choice(values))
    return np.full(_shape(problem, name), value) if problem.has(name) else value


_RANGES = {"lr": (1e-3, 0.5), "eps": (1e-4, 1e-2), "weight_decay": (1e-3, 0.2), "rest1": (0.01, 0.3), "rest2": (0.001, 0.3),
           "beta1": (0.7, 0.99), "beta2": (0.8, 0.999), "alpha": (0.8, 0.99), "rest": (0.01, 0.2), "momentum": (0.5, 0.99),
           "undamped": (0.5, 1.0), "bias1": (0.1, 1.0), "bias2": (0.01, 1.0), "lr_decay": (0.0, 0.1)}
FILLS: dict[tuple[str, str], Fill] = {(op, name): partial(_number, *ends) for op in RULES for name, ends in _RANGES.items() if name != "lr"}
FILLS |= {(op, name): _log for op in RULES for name in ("log_beta1", "log_beta2")}
for _op in RULES:
    for _i in range(13):
        FILLS |= {(_op, f"{role}_{_i}"): partial(_positive, f"{role}_{_i}", low)
                  for role, low in (("exp_avg_sq", 0.0), ("max_exp_avg_sq", 0.0), ("state_sum", 0.0), ("square_avg", 2.0))}
        FILLS[_op, f"grad_avg_{_i}"] = partial(_half, f"grad_avg_{_i}")
        if "norm" in _op or _op == "unscale_grads":
            FILLS[_op, f"grad_{_i}"] = partial(_overflowed, f"grad_{_i}")
    for _name, _values in (("step", (1.0, 2.0, 7.0, 100.0)), ("grad_scale", (1.0, 64.0, 0.3)), ("found_inf", (0.0, 1.0)),
                           ("inv_scale", (1.0, 0.25, 0.7)), ("max_norm", (0.5, 3.0, 1e4))):
        FILLS[_op, _name] = partial(_element, _values, _name)


CASES: dict[str, tuple[str, ...]] = {
    "sgd_step": (
        "sgd_step param_0=f32[64,3] param_1=f32[7] grad_0=f32[64,3] grad_1=f32[7]",
        "sgd_step param_0=f16[64,3,3,3]nhwc grad_0=f16[64,3,3,3]nhwc momentum_buffer_0=f32[64,3,3,3]nhwc momentum=True nesterov=True "
        "decays=True",
        "sgd_step param_0=f32[5] grad_0=bf16[5] momentum=True first=True",
        "sgd_step param_0=f32[0] param_1=f32[3] grad_0=f32[0] grad_1=f32[3]",
    ),
    "adam_step": (
        "adam_step param_0=f32[3000] grad_0=f32[3000] exp_avg_0=f32[3000] exp_avg_sq_0=f32[3000] decoupled=True decays=True",
        "adam_step param_0=f32[33] grad_0=bf16[33] exp_avg_0=f32[33] exp_avg_sq_0=f32[33] max_exp_avg_sq_0=f32[33] step=f32[] lr=f32[1]",
        "adam_step grad_0=f16[9,8] grad_1=f16[4] exp_avg_0=f32[9,8] exp_avg_1=f32[4] exp_avg_sq_0=f32[9,8] exp_avg_sq_1=f32[4] "
        "master_0=f32[9,8] master_1=f32[4] grad_scale=f32[] found_inf=f32[]",
    ),
    "adagrad_step": ("adagrad_step param_0=f32[65] grad_0=f32[65] state_sum_0=f32[65] step=f32[]",),
    "rmsprop_step": ("rmsprop_step param_0=f32[65] grad_0=f32[65] square_avg_0=f32[65] grad_avg_0=f32[65] momentum_buffer_0=f32[65]",),
    "lion_step": ("lion_step param_0=bf16[65] grad_0=bf16[65] exp_avg_0=f32[65] decays=True",),
    "lamb_step": (
        "lamb_step param_0=f32[2500] param_1=f32[3,3] grad_0=f32[2500] grad_1=f16[3,3] exp_avg_0=f32[2500] exp_avg_1=f32[3,3] "
        "exp_avg_sq_0=f32[2500] exp_avg_sq_1=f32[3,3] decays=True found_inf=f32[]",
    ),
    "grad_norm": ("grad_norm grad_0=f32[5000] grad_1=bf16[7]", "grad_norm grad_0=f16[70] norm_type=inf", "grad_norm grad_0=f32[0]"),
    "clip_grad_norm": ("clip_grad_norm grad_0=f32[5000] grad_1=bf16[7]",
                       "clip_grad_norm grad_0=f32[4,4](1,4) norm_type=1.0 max_norm=f32[]"),
    "unscale_grads": ("unscale_grads grad_0=f16[500] grad_1=f32[8] inv_scale=f32[] found_inf=f32[1]",),
    "foreach": ('foreach a_0=f32[5] b_0=bf16[5] a_1=f16[300] b_1=f16[300] expression="a + scalar(s) * b"',),
}
