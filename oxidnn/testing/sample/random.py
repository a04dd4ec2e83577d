"""Problems that draw random numbers: every layout, so that packs are whole groups of four, parts of them and strangers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...dtypes import dtype
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...tensor import TensorDesc
from . import Fill, Sampler
from .pointwise import FLOATS, INTEGERS, _shape, view


def _dropout(op: str, source: str, result: str, rng: np.random.Generator, size: str) -> Problem:
    kind, shape = dtype(str(rng.choice(FLOATS))), _shape(rng, size)
    tensors = {source: view(rng, kind, shape)}
    if rng.random() < 0.5:
        like = tensors[source] if tensors[source].is_injective and rng.random() < 0.5 else view(rng, kind, shape, True)
        tensors[result] = like
    attrs: dict[str, Any] = {"p": float(rng.choice([0.0, 0.1, 0.5, 0.9, 1.0]))}
    if op == "dropout" and rng.random() < 0.3:
        attrs["return_mask"] = True
    return OPS[op].make(tensors, attrs, Policy())


def sample_random(rng: np.random.Generator, size: str) -> Problem:
    kind, shape = dtype(str(rng.choice(FLOATS))), _shape(rng, size)
    name = str(rng.choice(list(_PARAMETERS)))
    attrs: dict[str, Any] = {"distribution": name, "parameters": _PARAMETERS[name](rng)}
    if rng.random() < 0.5:
        return OPS["random"].make({"y": view(rng, kind, shape, True)}, attrs, Policy())
    return OPS["random"].make({}, attrs | {"shape": shape, "dtype": kind.name}, Policy())


_LOCATED = dict.fromkeys(("uniform", "normal", "log_normal", "gumbel", "logistic", "laplace", "cauchy"),
                         lambda rng: (float(rng.integers(-2, 1)), float(rng.integers(0, 3))))
_PARAMETERS: dict[str, Callable[[np.random.Generator], tuple[float, ...]]] = {
    **_LOCATED,
    "truncated_normal": lambda rng: (float(rng.integers(-1, 2)), float(rng.choice([0.5, 2])), -1.0, float(rng.choice([0, 3]))),
    "exponential": lambda rng: (float(rng.choice([0.5, 3])),), "geometric": lambda rng: (float(rng.choice([0.1, 0.7, 1])),),
    "poisson": lambda rng: (float(rng.choice([0, 0.3, 7, 60])),),
    "binomial": lambda rng: (float(rng.integers(0, 60)), float(rng.choice([0, 0.125, 0.5, 0.9, 1]))),
}


def _of_each(op: str, source: str, rng: np.random.Generator, size: str) -> Problem:
    kind, shape = dtype(str(rng.choice(FLOATS))), _shape(rng, size)
    result = dtype(str(rng.choice([*FLOATS, *INTEGERS, "bool"])))
    tensors = {source: view(rng, kind, shape)}
    if rng.random() < 0.5:
        return OPS[op].make(tensors | {"y": view(rng, result, shape, True)}, {}, Policy())
    return OPS[op].make(tensors, {"dtype": result.name}, Policy())


def _rrelu(op: str, rng: np.random.Generator, size: str) -> Problem:
    kind, shape = dtype(str(rng.choice(FLOATS))), _shape(rng, size)
    tensors = {name: view(rng, kind, shape) for name in (("x",) if op == "rrelu" else ("dy", "x"))}
    if rng.random() < 0.4:
        tensors["y" if op == "rrelu" else "dx"] = view(rng, kind, shape, True)
    return OPS[op].make(tensors, {} if rng.random() < 0.3 else {"lower": 0.0, "upper": float(rng.choice([0.0, 0.5]))}, Policy())


def _cast(rng: np.random.Generator, size: str) -> Problem:
    kind, shape = dtype(str(rng.choice(FLOATS))), _shape(rng, size)
    tensors = {"x": view(rng, kind, shape)}
    attrs: dict[str, Any] = {"dtype": str(rng.choice(["f32", "f16", "bf16", "e4m3", "e5m2", "s8", "u8", "s32"]))}
    if rng.random() < 0.4:
        tensors["y"] = view(rng, dtype(attrs["dtype"]), shape, True)
    if rng.random() < 0.2:
        attrs["saturate"] = False
    return OPS["cast_stochastic"].make(tensors, attrs, Policy())


def _wide(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Of every size that 16 bits hold, and whole numbers."""
    shape = problem.desc("x").shape
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-24, 10, shape)
    return np.where(rng.random(shape) < 0.1, np.round(x), x)


def _probability(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.uniform(0, 1, problem.desc("probability").shape).round(2)


def _rate(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.choice([0, 0.25, 1, 5.5, 30], problem.desc("rate").shape)


def _with_state(draw: Sampler, rng: np.random.Generator, size: str) -> Problem:
    """Now and then with seed and offset in memory."""
    problem = draw(rng, size)
    if rng.random() < 0.7:
        return problem
    state = TensorDesc(dtype(str(rng.choice(["s64", "u64"]))), (2,), (1,), int(rng.choice([8, 16])))
    return OPS[problem.op].make({o.name: o.desc for o in problem.operands} | {"state": state}, dict(problem.attrs), Policy())


_DRAWS: dict[str, Sampler] = {
    "dropout": partial(_dropout, "dropout", "x", "y"), "dropout_backward": partial(_dropout, "dropout_backward", "dy", "dx"),
    "random": sample_random, "bernoulli": partial(_of_each, "bernoulli", "probability"), "poisson": partial(_of_each, "poisson", "rate"),
    "cast_stochastic": _cast, "rrelu": partial(_rrelu, "rrelu"), "rrelu_backward": partial(_rrelu, "rrelu_backward"),
}
SAMPLES: dict[str, Sampler] = {op: partial(_with_state, draw) for op, draw in _DRAWS.items()}
FILLS: dict[tuple[str, str], Fill] = {("bernoulli", "probability"): _probability, ("poisson", "rate"): _rate,
                                      ("cast_stochastic", "x"): _wide}
FILLS |= {(op, "state"): lambda rng, problem: rng.integers(0, 2**63 - 1, 2) >> rng.integers(0, 63, 2) for op in _DRAWS}
CASES: dict[str, tuple[str, ...]] = {
    "rrelu": ("rrelu x=f16[7,40]nchw", "rrelu x=f32[33]nchw upper=0.5"),
    "rrelu_backward": ("rrelu_backward dy=bf16[2,8,3,5]nhwc x=bf16[2,8,3,5]nhwc", "rrelu_backward dy=f64[9] x=f64[9] lower=-0.5"),
    "cast_stochastic": ("cast_stochastic x=f32[7,33]nchw dtype=bf16", "cast_stochastic x=bf16[5,40]nchw dtype=e4m3",
                        "cast_stochastic x=f64[9]nchw dtype=f32", "cast_stochastic x=f16[2,8,3,5]nhwc dtype=s8",
                        "cast_stochastic x=f32[33]nchw dtype=e5m2 saturate=False state=u64[2]@8"),
    "poisson": ("poisson rate=f32[5,13]nchw", "poisson rate=f16[64]nchw dtype=s32"),
    "dropout": ("dropout x=f16[7,33]nchw p=0.1", "dropout x=bf16[5,24]nchw p=0.3 return_mask=True",
                "dropout x=f32[2,5,3,4]nhwc p=0.25", "dropout x=f64[9]nchw@8", "dropout x=f16[5,33]nchw state=s64[2]@8",
                "dropout x=bf16[0,4]nchw"),
    "dropout_backward": ("dropout_backward dy=bf16[7,40]nchw p=0.1", "dropout_backward dy=f32[6,10](1,6) p=1.0"),
    "random": ("random shape=(3,77)", "random y=f16[2,8,3,3]nhwc distribution=normal",
               "random shape=(1001,) distribution=normal parameters=(1.0,0.5) dtype=f64", "random shape=() parameters=(-1.0,1.0)",
               "random shape=(77,) distribution=binomial parameters=(40.0,0.75) dtype=s32",
               "random shape=(5,40) distribution=truncated_normal"),
    "bernoulli": ("bernoulli probability=f32[5,13]nchw dtype=bool", "bernoulli probability=f16[64]nchw"),
}
