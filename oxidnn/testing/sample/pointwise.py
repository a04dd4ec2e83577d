"""Pointwise problems: expressions of every kind over broadcast, strided, negative-stride and misaligned tensors of mixed types."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...codegen.pointwise import TABLE, parse
from ...dtypes import DType, dtype
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...tensor import TensorDesc, layout_order, packed_strides
from . import Fill, Sampler

FLOATS = ("f32", "f16", "bf16", "f64")
INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64")
WITHOUT_SIGN = ("u8", "u16", "u32", "u64", "u64", "bool")  # what u64 computes with
EXPRESSIONS = (
    "x", "x + y", "x * y - z", "relu(x + y)", "x * scale[c] + bias[c]", "gelu(x + bias[c])", "where(x > y, x, z * 0.5)", "silu(x) * y",
    "maximum(x, y)", "x / (1 + abs(y))", "(x - y) ** 2", "exp(x) - exp(y)", "cast(x, bf16) + y", "tanh(x) * sigmoid(y)",
    "x * scalar(alpha) + y",
    "w - scalar(lr) * (v := scalar(momentum) * m + g), v", "x < y", "x + y, x - y, x * y", "clamp(x, -1, 1) + leaky_relu(y, 0.2)",
    "erf(x) + log1p(abs(y))", "a + b + c0 + d + e + f + g + h",
)
INTEGER_EXPRESSIONS = ("x + y", "x * y - z", "maximum(x, minimum(y, z))", "where(x > y, x, -y)", "x >= y", "abs(x - y)", "relu(x) + y",
                       "bitwise_or(left_shift(x, 3), right_shift(y, 2))", "popcount(x) + bitwise_not(y)")
ACTIVATIONS = tuple(n for n, f in TABLE.items() if f.arity - len(f.defaults) == 1 and not f.is_condition and not f.is_of_integers
                    and n not in ("lgamma", "digamma", "trigamma", "tan", "logit", "log", "log2", "log10", "sqrt", "rsqrt",
                                  "reciprocal", "floor", "ceil", "round", "trunc"))
SMOOTH = tuple(n for n in ACTIVATIONS if n not in ("sign",))


def view(rng: np.random.Generator, kind: DType, shape: tuple[int, ...], is_output: bool = False) -> TensorDesc:
    """A tensor of `shape`: dense, channels last, with gaps, permuted, a negative stride, misaligned, or (inputs) repeated by stride 0."""
    kinds = ["dense", "channels_last", "gaps", "permuted", "negative", "misaligned", "repeated"]
    choice = rng.choice(kinds, p=[0.4, 0.15, 0.1, 0.1, 0.08, 0.1, 0.07])
    order = tuple(range(len(shape)))
    align = 16
    if choice == "channels_last":
        order = layout_order("channels_last", len(shape))
    elif choice == "permuted":
        order = tuple(int(i) for i in rng.permutation(len(shape)))
    elif choice == "misaligned":
        align = kind.num_bytes * int(rng.choice([1, 2])) if kind.num_bytes < 8 else 8
    extents = tuple(n + int(rng.integers(1, 3)) for n in shape) if choice == "gaps" else shape
    strides = list(packed_strides(extents, order))
    if choice == "negative" and shape:
        axis = int(rng.integers(len(shape)))
        strides[axis] = -strides[axis]
    if choice == "repeated" and shape and not is_output:
        strides[int(rng.integers(len(shape)))] = 0
    return TensorDesc(kind, shape, tuple(strides), min(16, align))


def _shape(rng: np.random.Generator, size: str, least: int = 0) -> tuple[int, ...]:
    rank = int(rng.integers(least, 6))
    limit = {0: 1, 1: 700, 2: 40, 3: 14, 4: 8, 5: 5}[rank] if size == "tiny" else {0: 1, 1: 70000, 2: 500, 3: 60, 4: 33, 5: 14}[rank]
    shape = [int(rng.integers(1, limit + 1)) for _ in range(rank)]
    if rank and rng.random() < 0.3:
        shape[-1] = max(8, shape[-1] // 8 * 8)
    if rank and rng.random() < 0.03:
        shape[int(rng.integers(rank))] = 0
    return tuple(shape)


def sample_pointwise(rng: np.random.Generator, size: str) -> Problem:
    integers = rng.random() < 0.2
    expression = parse(str(rng.choice(INTEGER_EXPRESSIONS if integers else EXPRESSIONS)))
    channels = any(expression.axis(n) == "c" for n in expression.args)
    shape = _shape(rng, size, 2 if channels else 0)
    kinds = (WITHOUT_SIGN if rng.random() < 0.25 else INTEGERS) if integers else FLOATS
    first = rng.choice(kinds)
    full = [n for n in expression.args if expression.axis(n) is None]
    tensors: dict[str, TensorDesc] = {}
    for name in expression.args:
        kind = dtype(str(first if rng.random() < 0.7 else rng.choice(kinds)))
        if expression.axis(name) == "c":
            tensors[name] = view(rng, kind, (shape[1],))
            continue
        own = shape
        if name != full[0] and rng.random() < 0.35:  # broadcast: leading dimensions left out, others of size 1
            own = tuple(1 if rng.random() < 0.4 else n for n in shape)[int(rng.integers(0, len(shape) + 1)):]
        tensors[name] = view(rng, kind, own)
    attrs: dict[str, Any] = {"expression": expression}
    if not integers and rng.random() < 0.3 and not any(o.is_condition for o in expression.outputs):
        attrs["dtype"] = str(rng.choice((*FLOATS, "e4m3", "e5m2")))
    problem = OPS["pointwise"].make(tensors, attrs, Policy())
    draw = rng.random()
    if draw < 0.6:
        for o in problem.outputs:  # anywhere, or as an input of its type lies, so that it may be in its place
            like = [i.desc for i in problem.inputs if i.desc.dtype == o.desc.dtype and i.desc.shape == o.desc.shape and i.desc.is_injective]
            tensors[o.name] = like[0] if like and draw < 0.3 else view(rng, o.desc.dtype, o.desc.shape, True)
        problem = OPS["pointwise"].make(tensors, attrs, Policy())
    return problem


def sample_activation(rng: np.random.Generator, size: str) -> Problem:
    kind = dtype(str(rng.choice(FLOATS)))
    return OPS["activation"].make({"x": view(rng, kind, _shape(rng, size))}, {"name": str(rng.choice(ACTIVATIONS))}, Policy())


def sample_activation_backward(rng: np.random.Generator, size: str) -> Problem:
    kind = dtype(str(rng.choice(FLOATS)))
    shape = _shape(rng, size)
    tensors = {"dy": view(rng, kind, shape), "x": view(rng, kind, shape)}
    return OPS["activation_backward"].make(tensors, {"name": str(rng.choice(SMOOTH))}, Policy())


SAMPLES: dict[str, Sampler] = {"pointwise": sample_pointwise, "activation": sample_activation,
                               "activation_backward": sample_activation_backward}
CASES: dict[str, tuple[str, ...]] = {
    "pointwise": (
        'pointwise x=f32[3,5,7,7]nchw bias=f32[5]nchw expression="relu(x + bias[c])"',
        'pointwise x=bf16[2,16,4,4]nhwc bias=f32[16]nchw r=bf16[2,16,4,4]nhwc expression="gelu(x + bias[c]) + r"',
        'pointwise x=f16[1000]nchw y=f32[1]nchw expression="x * y" dtype=f16',
        'pointwise x=s8[33,9]nchw y=s8[9]nchw expression="x * y" dtype=s32',
        'pointwise x=u64[33,9]nchw y=u8[9]nchw expression="x * y - x, x > y, x % (y + 1)"',
        'pointwise x=f32[6,10](1,6) y=f32[6,10]nchw expression="x - y"',
        'pointwise x=f32[]nchw expression="exp(x)"',
        'pointwise x=f32[0,4]nchw expression="x + 1"',
        'pointwise w=f32[513]nchw m=f32[513]nchw g=f16[513]nchw expression="w - scalar(lr) * (v := 0.9 * m + g), v" dtype=f32',
        'pointwise x=e4m3[2,64,3,3]nhwc scale=f32[64]nchw y=e5m2[2,64,3,3]nhwc expression="x * scale[c] + y" dtype=bf16',
        'pointwise x=f16[5,33]nchw s=f32[1]nchw expression="x * s * 300, cast(x, e4m3) + cast(s, e5m2)" '
        'dtype="(\'e4m3\',\'f32\')" saturate=False',
    ),
    "activation": ("activation x=e4m3[7,33]nchw name=gelu",
                   "activation x=f16[7,33]nchw name=gelu", 'activation x=f32[65]nchw@4 name=leaky_relu parameters=(0.2,)'),
    "activation_backward": ("activation_backward dy=f16[7,33]nchw x=f16[7,33]nchw name=gelu",),
}
FILLS: dict[tuple[str, str], Fill] = {}
