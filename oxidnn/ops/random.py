"""Random numbers by counting (Philox 4x32-10): dropout, uniform and normal tensors, Bernoulli draws.

    dropout x=f16[8,64] p=0.1                                       y: where(u >= p, x / (1 - p), 0)
    dropout_backward dy=f16[8,64] p=0.1                             dx: the same of dy; the mask is drawn again, not stored
    rrelu x=f16[8,64] lower=0.1 upper=0.3                           y: a drawn slope below 0; rrelu_backward draws it again
    random shape=(8,64) distribution=normal parameters=(0.0,1.0)    y; see DISTRIBUTIONS
    bernoulli probability=f32[8,64]                                 y: 1 where u < probability
    poisson rate=f32[8,64]                                          y: events at that rate
    cast_stochastic x=f32[8,64] dtype=e4m3                          y: one of the two neighbours, the nearer the likelier

The scalars seed and offset (64 bits each) come with every call, or lie in memory: `state`, two integers of 64 bits. Element i of a
tensor, counted in the order of its dimensions however it lies in memory, takes word i % 4 of what the counter (i // 4, offset) gives under
the key `seed`: the numbers depend on nothing else.
u = (word >> 8) / 2^24 lies in [0, 1), and is the same for every type. Normal numbers are Box and Muller's of words 0, 1 and 2, 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import dtypes
from ..codegen.pointwise import Expression, parse
from ..dtypes import DType
from ..errors import InvalidArgument, expected
from ..tensor import TensorDesc
from .base import BuildProblem, OpDef, Operand, Policy, Problem, Scalar
from .checks import (
    FLOATS,
    canonical,
    check_bool,
    check_choice,
    check_extents,
    check_number,
    check_output,
    check_type,
    describe,
    operand,
    output,
)
from .pointwise import MAX_RANK, STORED, PointwiseProblem, like

SOURCES = ("uniform", "radius", "angle")  # operands that are no tensors: numbers drawn for the element (ptx_templates/lib/philox.ptx.j2)
_NORMAL = "scalar(first) + scalar(second) * (normal_radius(radius) * cos_turn(angle))"
_INSIDE = f"(u := uniform + {2.0**-25!r})"  # in (0, 1)


@dataclass(frozen=True)
class Distribution:
    """expression: over SOURCES and the scalars first, second, ..., which `numbers` makes of the parameters. parameters: their defaults.
    allowed: what they have to be, in words and as a test. counts: the results are whole numbers."""

    expression: str
    parameters: tuple[float, ...]
    allowed: str
    test: Callable[..., bool]
    numbers: Callable[..., tuple[float, ...]] = lambda *parameters: parameters
    counts: bool = False


def _truncated(mean: float, deviation: float, low: float, high: float) -> tuple[float, ...]:
    """2 Phi - 1 at the lower end, twice what lies between the ends, and the parameters."""
    ends = [math.erf((end - mean) / deviation / math.sqrt(2)) for end in (low, high)]
    return ends[0], ends[1] - ends[0], mean, deviation * math.sqrt(2), low, high


def _holds_enough(mean: float, deviation: float, low: float, high: float) -> bool:
    return deviation > 0 and low < high and _truncated(mean, deviation, low, high)[1] > 1 / 32


_LOCATED = "a location and a scale >= 0"
DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform": Distribution("scalar(first) + scalar(second) * uniform", (0.0, 1.0), "low <= high", lambda low, high: low <= high,
                            lambda low, high: (low, high - low)),
    "normal": Distribution(_NORMAL, (0.0, 1.0), "a mean and a standard deviation >= 0", lambda _, s: s >= 0),
    "log_normal": Distribution(f"exp({_NORMAL})", (0.0, 1.0), "mean and standard deviation >= 0 of the logarithm", lambda _, s: s >= 0),
    "truncated_normal": Distribution(
        "clamp(scalar(third) + scalar(fourth) * erfinv(scalar(first) + scalar(second) * uniform), scalar(fifth), scalar(sixth))",
        (0.0, 1.0, -2.0, 2.0), "a mean, a standard deviation > 0, and ends low < high with at least 1/64 of the normal's mass between",
        _holds_enough, _truncated),
    "exponential": Distribution("-log1p(-uniform) / scalar(first)", (1.0,), "a rate > 0", lambda rate: rate > 0),
    "gumbel": Distribution(f"scalar(first) - scalar(second) * log(-log({_INSIDE}))", (0.0, 1.0), _LOCATED, lambda _, s: s >= 0),
    "logistic": Distribution(f"scalar(first) + scalar(second) * (log({_INSIDE}) - log1p(-u))", (0.0, 1.0), _LOCATED, lambda _, s: s >= 0),
    "laplace": Distribution(f"scalar(first) - scalar(second) * copysign(log1p(-2 * abs((v := {_INSIDE} - 0.5))), v)", (0.0, 1.0), _LOCATED,
                            lambda _, s: s >= 0, lambda location, scale: (location, -scale)),
    "cauchy": Distribution(f"scalar(first) + scalar(second) * tan({math.pi!r} * ({_INSIDE} - 0.5))", (0.0, 1.0), _LOCATED,
                           lambda _, s: s >= 0),
    "geometric": Distribution("1 + floor(log1p(-uniform) / scalar(first))", (0.5,), "a chance in (0, 1]", lambda p: 0 < p <= 1,
                              lambda p: (math.log1p(-p) if p < 1 else -math.inf,), counts=True),
    "poisson": Distribution("poisson_quantile(uniform, scalar(first))", (1.0,), "a rate from 0 to 700", lambda rate: 0 <= rate <= 700,
                            counts=True),
    "binomial": Distribution("abs(scalar(third) - binomial_quantile(uniform, scalar(first), scalar(second)))", (1.0, 0.5),
                             "a whole number n of trials and their chance p, with min(p, 1 - p)^n beyond e^-700",
                             lambda n, p: n == int(n) >= 0 and 0 <= p <= 1 and n * math.log1p(-min(p, 1 - p)) > -700,
                             lambda n, p: (n, min(p, 1 - p), n if p > 0.5 else 0.0), counts=True),
}
_NAMES = ("first", "second", "third", "fourth", "fifth", "sixth")
DRAW = (Scalar("seed", "u64"), Scalar("offset", "u64"))


@dataclass(frozen=True)
class RandomProblem(PointwiseProblem):
    """A pointwise problem whose expression takes SOURCES besides its operands."""

    @property
    def is_brief(self) -> bool:
        """Numbers are the same in every type, up to its rounding."""
        return False


def _problem(op: str, expression: str | Expression, operands: tuple[Operand, ...], tensors: Mapping[str, TensorDesc],
             attrs: list[tuple[str, Any]], policy: Policy, **values: float) -> RandomProblem:
    is_double = any(o.desc.dtype.name == "f64" for o in operands)
    shape = operands[-1].desc.shape
    if len(shape) > MAX_RANK:
        raise expected(op, "rank", len(shape), f"at most {MAX_RANK}")
    if "state" in tensors:
        state = operand(op, "state", tensors, (dtypes.S64, dtypes.U64), (2,))
        if state.strides != (1,):
            raise expected(op, "strides of state", list(state.strides), "[1]")
        first = sum(not o.is_output for o in operands)
        operands = (*operands[:first], Operand("state", state), *operands[first:])
    return RandomProblem(op, operands, tuple(attrs), () if "state" in tensors else DRAW, policy=policy, expression=parse(expression),
                         shape=shape, compute="f64" if is_double else "f32", values=tuple(values.items()))


def _dropout(op: str, source: str, result: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    """p: chance of a zero, in [0, 1]; what is kept is divided by 1 - p. At p = 1 all is zero. return_mask: also what is kept, as bool."""
    x = operand(op, source, tensors, FLOATS)
    p = check_number(op, "p", attrs.get("p", 0.5))
    if not 0.0 <= p <= 1.0:
        raise expected(op, "p", p, "a number in [0, 1]")
    y = output(op, result, tensors, (x.dtype,), x.shape, x)
    outs = [Operand(result, y, True)]
    kept = check_bool(op, "return_mask", attrs.get("return_mask", False)) or "mask" in tensors
    if kept:
        outs.append(Operand("mask", output(op, "mask", tensors, (dtypes.BOOL,), x.shape, x), True))
    chance = float(np.float32(p))  # what every compute type compares with
    normal = ([("p", p)] if p != 0.5 else []) + ([("return_mask", True)] if kept else [])
    text = f"where((k := uniform >= scalar(p)), {source} * scalar(scale), 0)" + (", k" if kept else "")
    return _problem(op, text, (Operand(source, x), *outs), tensors, normal, policy, p=chance,
                    scale=1.0 / (1.0 - chance) if chance < 1.0 else 0.0)


def make_dropout(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    return _dropout("dropout", "x", "y", tensors, attrs, policy)


def make_dropout_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    return _dropout("dropout_backward", "dy", "dx", tensors, attrs, policy)


def _rrelu(op: str, names: tuple[str, ...], result: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any],
           policy: Policy) -> Problem:
    """lower, upper: between which the slope below 0 is drawn for each element."""
    x = operand(op, "x", tensors, FLOATS)
    given = {name: operand(op, name, tensors, FLOATS, x.shape) for name in names}
    lower, upper = (check_number(op, name, attrs.get(name, default), dtypes.F32) for name, default in _RRELU)
    if not lower <= upper:
        raise expected(op, "lower", lower, f"at most upper, {upper}")
    y = output(op, result, tensors, (x.dtype,), x.shape, x)
    operands = (*(Operand(name, desc) for name, desc in given.items()), Operand(result, y, True))
    normal = [(name, value) for (name, default), value in zip(_RRELU, (lower, upper), strict=True) if value != default]
    first = names[0]
    return _problem(op, f"where(x > 0, {first}, {first} * (scalar(lower) + scalar(width) * uniform))", operands, tensors, normal, policy,
                    lower=lower, width=upper - lower)


def make_rrelu(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    return _rrelu("rrelu", ("x",), "y", tensors, attrs, policy)


def make_rrelu_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    return _rrelu("rrelu_backward", ("dy", "x"), "dx", tensors, attrs, policy)


def _result_type(op: str, value: Any, allowed: tuple[str, ...]) -> DType:
    kind = check_type(op, "dtype", value)
    if kind.name not in allowed:
        raise expected(op, "dtype", kind, ", ".join(allowed))
    return kind


def make_random(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    """shape, or y. distribution: a key of DISTRIBUTIONS. parameters: its numbers. dtype: a float type, of counts an integer one, too."""
    op = "random"
    for name in tensors:
        if name not in ("y", "state"):
            raise InvalidArgument(f"{op}: {name!r} is no tensor of this op (it takes state and gives y). {describe(tensors)}")
    distribution = check_choice(op, "distribution", attrs.get("distribution", "uniform"), tuple(DISTRIBUTIONS))
    row = DISTRIBUTIONS[distribution]
    given = attrs.get("parameters", row.parameters)
    given = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    numbers = tuple(float(np.float32(check_number(op, "parameters", v, dtypes.F32))) for v in given)
    if len(numbers) != len(row.parameters) or not row.test(*numbers):
        raise expected(op, "parameters", given, f"{row.allowed}, for {distribution}")
    if "shape" not in attrs and "y" not in tensors:
        raise expected(op, "shape", "missing", "the shape of the result")
    shape = check_extents(op, "shape", attrs["shape"], range(MAX_RANK + 1)) if "shape" in attrs else tensors["y"].shape
    allowed = STORED if row.counts else tuple(t.name for t in FLOATS)
    kind = _result_type(op, attrs["dtype"] if "dtype" in attrs else tensors["y"].dtype if "y" in tensors else dtypes.F32, allowed)
    y = output(op, "y", tensors, (kind,), shape, TensorDesc.packed(kind, shape))
    normal: list[tuple[str, Any]] = [("shape", shape)]
    normal += [("distribution", distribution)] if distribution != "uniform" else []
    normal += [("parameters", numbers)] if numbers != row.parameters else []
    normal += [("dtype", kind.name)] if kind is not dtypes.F32 else []
    values = dict(zip(_NAMES, row.numbers(*numbers), strict=False))
    return _problem(op, row.expression, (Operand("y", y, True),), tensors, normal, policy, **values)


def _of_each(op: str, source: str, expression: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    """A draw for each element of `source`. dtype: of y, by default that of the source."""
    x = operand(op, source, tensors, FLOATS)
    kind = _result_type(op, attrs["dtype"] if "dtype" in attrs else tensors.get("y", x).dtype, STORED)
    y = tensors["y"] if "y" in tensors else canonical(like(x, kind))
    check_output(op, "y", y, x.shape, tensors, (kind,))
    attributes: list[tuple[str, Any]] = [("dtype", kind.name)] if kind != x.dtype else []
    return _problem(op, expression, (Operand(source, x), Operand("y", y, True)), tensors, attributes, policy)


def make_bernoulli(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    """probability: of a one, in [0, 1]; NaN gives 0."""
    return _of_each("bernoulli", "probability", "where(uniform < probability, 1, 0)", tensors, attrs, policy)


def make_poisson(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    """rate: from 0 to 700, beyond NaN (of integers 0)."""
    return _of_each("poisson", "rate", "poisson_quantile(uniform, rate)", tensors, attrs, policy)


def _one_of_two(kind: DType) -> str:
    """x as one of the numbers of `kind` around it, with a mean of x. y is the nearest and z the next one beyond x: 0.6 of y's spacing away,
    and rounded. What is beyond the largest number is left to the conversion."""
    if not kind.is_float:
        return "(f := floor(x)) + where(uniform < x - f, 1, 0)"
    near = f"(d := x - (y := cast(x, {kind.name})))"
    next_one = f"(z := cast(y + copysign(maximum(abs(y) * {0.6 * kind.epsilon!r}, {0.6 * kind.smallest!r}), d), {kind.name}))"
    return f"where(abs(x) >= {kind.max!r}, x, where(abs({near}) > uniform * abs({next_one} - y), z, y))"


def make_cast_stochastic(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    """dtype: of y, a float type of at most 32 bits or an integer type; default: that of x. saturate: as of cast."""
    op = "cast_stochastic"
    x = operand(op, "x", tensors, FLOATS)
    kind = _result_type(op, attrs["dtype"] if "dtype" in attrs else tensors.get("y", x).dtype, STORED[1:-1])
    y = tensors["y"] if "y" in tensors else canonical(like(x, kind))
    check_output(op, "y", y, x.shape, tensors, (kind,))
    saturate = check_bool(op, "saturate", attrs.get("saturate", True))
    normal: list[tuple[str, Any]] = [("dtype", kind.name)] if kind is not x.dtype else []
    normal += [] if saturate else [("saturate", False)]
    problem = _problem(op, _one_of_two(kind), (Operand("x", x), Operand("y", y, True)), tensors, normal, policy)
    return replace(problem, saturate=saturate)


_RRELU = (("lower", 1 / 8), ("upper", 1 / 3))
_RANDOM_ATTRS = (("shape", None), ("distribution", "uniform"), ("parameters", None), ("dtype", None))


def _def(op: str, inputs: tuple[str, ...], outputs: tuple[str, ...], build: BuildProblem, attrs: tuple[tuple[str, Any], ...]) -> OpDef:
    return OpDef(op, (*inputs, "state"), outputs, build, optional=("state",), attrs=attrs)


DEFINITIONS = (
    _def("dropout", ("x",), ("y", "mask"), make_dropout, (("p", 0.5), ("return_mask", False))),
    _def("dropout_backward", ("dy",), ("dx",), make_dropout_backward, (("p", 0.5),)),
    _def("random", (), ("y",), make_random, _RANDOM_ATTRS),
    _def("bernoulli", ("probability",), ("y",), make_bernoulli, (("dtype", None),)),
    _def("rrelu", ("x",), ("y",), make_rrelu, _RRELU),
    _def("rrelu_backward", ("dy", "x"), ("dx",), make_rrelu_backward, _RRELU),
    _def("poisson", ("rate",), ("y",), make_poisson, (("dtype", None),)),
    _def("cast_stochastic", ("x",), ("y",), make_cast_stochastic, (("dtype", None), ("saturate", True))),
)
