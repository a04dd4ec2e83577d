"""Random numbers by counting (Philox 4x32-10): dropout, uniform and normal tensors, Bernoulli draws.

    dropout x=f16[8,64] p=0.1                                       y: where(u >= p, x / (1 - p), 0)
    dropout_backward dy=f16[8,64] p=0.1                             dx: the same of dy; the mask is drawn again, not stored
    random shape=(8,64) distribution=normal parameters=(0.0,1.0)    y: low and high of uniform, mean and deviation of normal
    bernoulli probability=f32[8,64]                                 y: 1 where u < probability

The scalars seed and offset (64 bits each) come with every call. Element i of a tensor, counted in the order of its dimensions however it
lies in memory, takes word i % 4 of what the counter (i // 4, offset) gives under the key `seed`: the numbers depend on nothing else.
u = (word >> 8) / 2^24 lies in [0, 1), and is the same for every type. Normal numbers are Box and Muller's of words 0, 1 and 2, 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import dtypes
from ..codegen.pointwise import Expression, parse
from ..dtypes import DType
from ..errors import InvalidArgument, expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem, Scalar
from .checks import FLOATS, canonical, check_choice, check_extents, check_number, check_output, describe, operand, output
from .pointwise import MAX_RANK, STORED, PointwiseProblem, like

SOURCES = ("uniform", "radius", "angle")  # operands that are no tensors: numbers drawn for the element (ptx_templates/lib/philox.ptx.j2)
DISTRIBUTIONS = {
    "uniform": "scalar(first) + scalar(second) * uniform",
    "normal": "scalar(first) + scalar(second) * (normal_radius(radius) * cos_turn(angle))",
}
DRAW = (Scalar("seed", "u64"), Scalar("offset", "u64"))


@dataclass(frozen=True)
class RandomProblem(PointwiseProblem):
    """A pointwise problem whose expression takes SOURCES besides its operands."""

    @property
    def is_brief(self) -> bool:
        """Numbers are the same in every type, up to its rounding."""
        return False


def _problem(op: str, expression: str | Expression, operands: tuple[Operand, ...], attrs: list[tuple[str, Any]], policy: Policy,
             **values: float) -> RandomProblem:
    is_double = any(o.desc.dtype.name == "f64" for o in operands)
    shape = operands[-1].desc.shape
    if len(shape) > MAX_RANK:
        raise expected(op, "rank", len(shape), f"at most {MAX_RANK}")
    return RandomProblem(op, operands, tuple(attrs), DRAW, policy=policy, expression=parse(expression), shape=shape,
                         compute="f64" if is_double else "f32", values=tuple(values.items()))


def _dropout(op: str, source: str, result: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    """p: chance of a zero, in [0, 1]; what is kept is divided by 1 - p. At p = 1 all is zero."""
    x = operand(op, source, tensors, FLOATS)
    p = check_number(op, "p", attrs.get("p", 0.5))
    if not 0.0 <= p <= 1.0:
        raise expected(op, "p", p, "a number in [0, 1]")
    y = output(op, result, tensors, (x.dtype,), x.shape, x)
    chance = float(np.float32(p))  # what every compute type compares with
    operands = (Operand(source, x), Operand(result, y, True))
    return _problem(op, f"where(uniform >= scalar(p), {source} * scalar(scale), 0)", operands, [("p", p)] if p != 0.5 else [], policy,
                    p=chance, scale=1.0 / (1.0 - chance) if chance < 1.0 else 0.0)


def make_dropout(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    return _dropout("dropout", "x", "y", tensors, attrs, policy)


def make_dropout_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    return _dropout("dropout_backward", "dy", "dx", tensors, attrs, policy)


def _result_type(op: str, value: Any, allowed: tuple[str, ...]) -> DType:
    kind = dtypes.dtype(value)
    if kind.name not in allowed:
        raise expected(op, "dtype", kind, ", ".join(allowed))
    return kind


def make_random(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    """shape, or y. distribution: a key of DISTRIBUTIONS. parameters: (low, high) or (mean, deviation). dtype: a float type."""
    op = "random"
    for name in tensors:
        if name != "y":
            raise InvalidArgument(f"{op}: {name!r} is no tensor of this op (it takes none and gives y). {describe(tensors)}")
    distribution = check_choice(op, "distribution", attrs.get("distribution", "uniform"), tuple(DISTRIBUTIONS))
    parameters = attrs.get("parameters", (0.0, 1.0))
    if not isinstance(parameters, (tuple, list)) or len(parameters) != 2:
        raise expected(op, "parameters", repr(parameters), "two numbers: low and high, or mean and standard deviation")
    first, second = (check_number(op, "parameters", v, dtypes.F32) for v in parameters)
    if (first > second) if distribution == "uniform" else second < 0:
        raise expected(op, "parameters", (first, second), "low <= high" if distribution == "uniform" else "a standard deviation >= 0")
    if "shape" not in attrs and "y" not in tensors:
        raise expected(op, "shape", "missing", "the shape of the result")
    shape = check_extents(op, "shape", attrs["shape"], range(MAX_RANK + 1)) if "shape" in attrs else tensors["y"].shape
    floats = tuple(t.name for t in FLOATS)
    kind = _result_type(op, attrs["dtype"] if "dtype" in attrs else tensors["y"].dtype if "y" in tensors else dtypes.F32, floats)
    y = output(op, "y", tensors, (kind,), shape, TensorDesc.packed(kind, shape))
    normal: list[tuple[str, Any]] = [("shape", shape)]
    normal += [("distribution", distribution)] if distribution != "uniform" else []
    normal += [("parameters", (first, second))] if (first, second) != (0.0, 1.0) else []
    normal += [("dtype", kind.name)] if kind is not dtypes.F32 else []
    width = second - first if distribution == "uniform" else second
    return _problem(op, DISTRIBUTIONS[distribution], (Operand("y", y, True),), normal, policy, first=first, second=width)


def make_bernoulli(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    """probability: of a one, in [0, 1]; NaN gives 0. dtype: of y, by default that of probability."""
    op = "bernoulli"
    probability = operand(op, "probability", tensors, FLOATS)
    kind = _result_type(op, attrs["dtype"] if "dtype" in attrs else tensors.get("y", probability).dtype, STORED)
    shape = probability.shape
    y = tensors["y"] if "y" in tensors else canonical(like(probability, kind))
    check_output(op, "y", y, shape, tensors, (kind,))
    operands = (Operand("probability", probability), Operand("y", y, True))
    attributes: list[tuple[str, Any]] = [("dtype", kind.name)] if kind != probability.dtype else []
    return _problem(op, "where(uniform < probability, 1, 0)", operands, attributes, policy)


_RANDOM_ATTRS = (("shape", None), ("distribution", "uniform"), ("parameters", (0.0, 1.0)), ("dtype", None))
DEFINITIONS = (
    OpDef("dropout", ("x",), ("y",), make_dropout, attrs=(("p", 0.5),)),
    OpDef("dropout_backward", ("dy",), ("dx",), make_dropout_backward, attrs=(("p", 0.5),)),
    OpDef("random", (), ("y",), make_random, attrs=_RANDOM_ATTRS),
    OpDef("bernoulli", ("probability",), ("y",), make_bernoulli, attrs=(("dtype", None),)),
)
