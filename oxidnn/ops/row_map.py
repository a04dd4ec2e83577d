"""Maps of rows: every element by a formula of its own value and of sums along its row, which some dimensions of the tensor make up.

    normalize x=f16[8,64] axes=(1,) p=2.0 eps=1e-12                y = x / max(|x|_p, eps)
    normalize x=f32[64,32,3,3] g=f32[64] axes=(1,2,3) eps=0.0      y = g x / |x|: weight normalisation, with |x| as return_norm
    normalize x=bf16[8,64] g=f32[1]                                y = g x / max(|x|, eps): ScaleNorm
    normalize_backward dy=... x=... g=...                          dx, dg
    power_norm x=f16[8,64] gamma=f16[64] p=3.0                     y = x / (mean of |x|^p + eps)^(1/p) * gamma + beta
    power_norm_backward dy=... x=... rstd=f32[8] gamma=f16[64]     dx, dgamma
    sparsemax x=f32[8,64] axis=1                                   y = max(x - t, 0), with t such that the row sums to 1
    sparsemax_backward dy=... y=...                                dx

|x|_p = (sum of |x|^p)^(1/p). g has a value a row (the shape of x without `axes`, or with extents of 1 there) or one for all. References:
weight normalisation, Salimans and Kingma, NeurIPS 2016; ScaleNorm, Nguyen and Salazar, IWSLT 2019; sparsemax, Martins and Astudillo, ICML
2016. power_norm generalises the root mean square (p = 2) as the quadratic mean of PowerNorm (Shen et al., ICML 2020) by its exponent; its
statistics are those of a row, not running ones. Arithmetic is f32 (f64 for f64); sums of powers beyond its range give 0 or NaN.

Rows of sparsemax with a NaN, with +inf or of -inf alone are NaN; -inf beside numbers gives 0. Its gradient is that of the projection's
face: dx = dy - mean of dy over the elements with y > 0, there, and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..codegen.pointwise import Expression, parse
from ..dtypes import F32
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy
from .checks import FLOATS, check_bool, check_number, describe, is_integer, operand, output
from .epilogue import accumulator_of
from .rows import RowProblem, axes_attribute, row_axes, row_shape

NORMALIZE_EPS, POWER_EPS = 1e-12, 1e-5
Attrs = list[tuple[str, Any]]


@dataclass(frozen=True)
class RowMapProblem(RowProblem):
    """terms: what is summed along a row; finish: the row's numbers r0, r1, ... from the sums s0, s1, ...; elements: the outputs. All are
    over operands too, finish over those with a value a row alone, and over `numbers`; `n` is the count of columns. row_outputs: operands
    that r0, r1, ... go to."""

    terms: Expression = None  # type: ignore[assignment]
    finish: Expression = None  # type: ignore[assignment]
    elements: Expression = None  # type: ignore[assignment]
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)
    row_outputs: tuple[str, ...] = ()

    @property
    def full(self) -> tuple[Operand, ...]:
        """Operands with an element of every row and column."""
        return tuple(o for o in self.operands if o.name in ("x", "dy", "y", "dx"))

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Every element is read, for the last time, by the thread that writes it."""
        return tuple((self.outputs[0].name, o.name) for o in self.full if not o.is_output)


def _rows(op: str, x: TensorDesc, attrs: Mapping[str, Any], tensors: Mapping[str, TensorDesc]) -> tuple[tuple[int, ...], Attrs]:
    """(axes, the attribute as a case has it)."""
    axes = row_axes(op, x, attrs, tensors)
    return axes, axes_attribute(axes, x)


def _positive(op: str, name: str, attrs: Mapping[str, Any], default: float, or_zero: bool = False) -> tuple[float, Attrs]:
    value = check_number(op, name, attrs.get(name, default), F32)
    if value < 0 or (value == 0 and not or_zero):
        raise expected(op, name, repr(value), "a number that is not negative" if or_zero else "a number above 0")
    return value, [(name, value)] if value != default else []


def _power(p: float, x: str) -> str:
    """|x|^p."""
    return {1.0: f"abs({x})", 2.0: f"{x} * {x}"}.get(p, f"pow(abs({x}), {p!r})")


def _root(p: float, x: str) -> str:
    return {1.0: f"({x})", 2.0: f"sqrt({x})"}.get(p, f"pow({x}, {1 / p!r})")


def _slope(p: float) -> str:
    """The derivative of |x|^p / p."""
    return {1.0: "sign(x)", 2.0: "x"}.get(p, f"where(x == 0, 0, copysign(pow(abs(x), {p - 1!r}), x))")


def _gain(op: str, tensors: Mapping[str, TensorDesc], shape: tuple[int, ...], axes: tuple[int, ...]) -> list[Operand]:
    if "g" not in tensors:
        return []
    g = operand(op, "g", tensors, FLOATS)
    kept, ones = row_shape(shape, axes), tuple(1 if i in axes else n for i, n in enumerate(shape))
    if g.shape not in (kept, ones, (), (1,)):
        raise expected(op, "shape of g", list(g.shape), f"{list(kept)}, {list(ones)} or [1]", describe(tensors))
    return [Operand("g", g)]


def per_row(problem: RowMapProblem, name: str) -> TensorDesc:
    """An operand with a value a row, or one for all, as one of the rows' shape, or of rank 0."""
    desc = problem.desc(name)
    if desc.shape == row_shape(problem.shape, problem.axes):
        return desc
    if desc.numel == 1 and prod(row_shape(problem.shape, problem.axes)) != 1:
        return TensorDesc(desc.dtype, (), (), desc.align)
    strides = desc.strides if desc.rank == len(problem.shape) else (0,) * len(problem.shape)
    return TensorDesc(desc.dtype, row_shape(problem.shape, problem.axes), tuple(strides[i] for i in problem.kept), desc.align)


def _normalize(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> RowMapProblem:
    op = "normalize"
    x = operand(op, "x", tensors, FLOATS)
    axes, normal = _rows(op, x, attrs, tensors)
    p, more = _positive(op, "p", attrs, 2.0)
    eps, also = _positive(op, "eps", attrs, NORMALIZE_EPS, True)
    returns = check_bool(op, "return_norm", attrs.get("return_norm", False))
    operands = [Operand("x", x), *_gain(op, tensors, x.shape, axes), Operand("y", output(op, "y", tensors, (x.dtype,), x.shape, x), True)]
    if returns:
        shape = row_shape(x.shape, axes)
        norm = output(op, "norm", tensors, (accumulator_of(x.dtype),), shape, TensorDesc.packed(x.dtype, shape))
        operands.append(Operand("norm", norm, True))
        also.append(("return_norm", True))
    size = "maximum(r0, eps)"
    return RowMapProblem(op, tuple(operands), tuple(normal + more + also), policy=policy, axes=axes, terms=parse(_power(p, "x")),
                         finish=parse(_root(p, "s0")), elements=parse(f"x / {size} * g" if "g" in tensors else f"x / {size}"),
                         numbers={"eps": eps}, row_outputs=("norm",) if returns else ())


def _normalize_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> RowMapProblem:
    op = "normalize_backward"
    dy = operand(op, "dy", tensors, FLOATS)
    x = operand(op, "x", tensors, (dy.dtype,), dy.shape)
    axes, normal = _rows(op, x, attrs, tensors)
    p, more = _positive(op, "p", attrs, 2.0)
    eps, also = _positive(op, "eps", attrs, NORMALIZE_EPS, True)
    gain = _gain(op, tensors, x.shape, axes)
    operands = [Operand("dy", dy), Operand("x", x), *gain, Operand("dx", output(op, "dx", tensors, (x.dtype,), x.shape, x), True)]
    if gain:
        g = gain[0].desc
        operands.append(Operand("dg", output(op, "dg", tensors, (g.dtype,), g.shape, g), True))
    # y = g x / m, m = max(norm, eps): dx = g / m dy - g (sum of dy x) / m^2 dnorm/dx, the latter while norm >= eps;
    # dnorm/dx = slope / norm^(p-1)
    gained = "g" if gain else "1"
    norm = f"(n0 := {_root(p, 's0')})"
    over = {1.0: "1", 2.0: "n0"}.get(p, f"pow(n0, {p - 1!r})")
    finish = f"s1 / (m := maximum({norm}, eps)), {gained} / m, where(n0 < eps, 0, {gained} * s1 / m / m / {over})"
    return RowMapProblem(op, tuple(operands), tuple(normal + more + also), policy=policy, axes=axes,
                         terms=parse(f"{_power(p, 'x')}, dy * x"), finish=parse(finish), elements=parse(f"r1 * dy - r2 * {_slope(p)}"),
                         numbers={"eps": eps}, row_outputs=("dg",) if gain else ())


def _parameter(op: str, name: str, tensors: Mapping[str, TensorDesc], shape: tuple[int, ...], axes: tuple[int, ...]) -> list[Operand]:
    return [Operand(name, operand(op, name, tensors, FLOATS, tuple(shape[a] for a in axes)))] if name in tensors else []


def _power_norm(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> RowMapProblem:
    op = "power_norm"
    x = operand(op, "x", tensors, FLOATS)
    axes, normal = _rows(op, x, attrs, tensors)
    p, more = _positive(op, "p", attrs, 2.0)
    eps, also = _positive(op, "eps", attrs, POWER_EPS, True)
    returns = check_bool(op, "return_stats", attrs.get("return_stats", False))
    parameters = [o for n in ("gamma", "beta") for o in _parameter(op, n, tensors, x.shape, axes)]
    operands = [Operand("x", x), *parameters, Operand("y", output(op, "y", tensors, (x.dtype,), x.shape, x), True)]
    if returns:
        shape = row_shape(x.shape, axes)
        rstd = output(op, "rstd", tensors, (accumulator_of(x.dtype),), shape, TensorDesc.packed(x.dtype, shape))
        operands.append(Operand("rstd", rstd, True))
        also.append(("return_stats", True))
    text = "x * r0" + "".join(" * gamma" if o.name == "gamma" else " + beta" for o in parameters)
    return RowMapProblem(op, tuple(operands), tuple(normal + more + also), policy=policy, axes=axes, terms=parse(_power(p, "x")),
                         finish=parse(f"1 / {_root(p, 's0 / n + eps')}"), elements=parse(text), numbers={"eps": eps},
                         row_outputs=("rstd",) if returns else ())


def _power_norm_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> RowMapProblem:
    op = "power_norm_backward"
    dy = operand(op, "dy", tensors, FLOATS)
    x = operand(op, "x", tensors, (dy.dtype,), dy.shape)
    axes, normal = _rows(op, x, attrs, tensors)
    p, more = _positive(op, "p", attrs, 2.0)
    rstd = operand(op, "rstd", tensors, (accumulator_of(x.dtype),), row_shape(x.shape, axes))
    gamma = _parameter(op, "gamma", tensors, x.shape, axes)
    operands = [Operand("dy", dy), Operand("x", x), Operand("rstd", rstd), *gamma,
                Operand("dx", output(op, "dx", tensors, (x.dtype,), x.shape, x), True)]
    if gamma:
        desc = gamma[0].desc
        operands.append(Operand("dgamma", output(op, "dgamma", tensors, (desc.dtype,), desc.shape, desc), True))
    # r = (mean of |x|^p + eps)^(-1/p): dr/dx = -r^(p+1) slope / n, and z = x r
    g = "dy * gamma" if gamma else "dy"
    power = {1.0: "rstd * rstd", 2.0: "rstd * rstd * rstd"}.get(p, f"pow(rstd, {p + 1!r})")
    return RowMapProblem(op, tuple(operands), tuple(normal + more), policy=policy, axes=axes, terms=parse(f"{g} * x"),
                         finish=parse(f"s0 * ({power}) / n"), elements=parse(f"{g} * rstd - r0 * {_slope(p)}"))


def _axis(op: str, x: TensorDesc, attrs: Mapping[str, Any], tensors: Mapping[str, TensorDesc]) -> tuple[tuple[int, ...], Attrs]:
    axis = attrs.get("axis", -1)
    if not is_integer(axis, -x.rank, x.rank - 1):
        raise expected(op, "axis", axis, f"an integer in [{-x.rank}, {x.rank})", describe(tensors))
    axis = int(axis) % x.rank
    return (axis,), [("axis", axis)] if axis != x.rank - 1 else []


def _sparsemax(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> RowMapProblem:
    op = "sparsemax"
    x = operand(op, "x", tensors, FLOATS)
    axes, normal = _axis(op, x, attrs, tensors)
    operands = (Operand("x", x), Operand("y", output(op, "y", tensors, (x.dtype,), x.shape, x), True))
    return RowMapProblem(op, operands, tuple(normal), policy=policy, axes=axes)


def _sparsemax_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> RowMapProblem:
    op = "sparsemax_backward"
    dy = operand(op, "dy", tensors, FLOATS)
    y = operand(op, "y", tensors, (dy.dtype,), dy.shape)
    axes, normal = _axis(op, dy, attrs, tensors)
    operands = (Operand("dy", dy), Operand("y", y), Operand("dx", output(op, "dx", tensors, (dy.dtype,), dy.shape, dy), True))
    # not (y <= 0): a row of NaN has a gradient of NaN
    return RowMapProblem(op, operands, tuple(normal), policy=policy, axes=axes, terms=parse("where(y <= 0, 0, dy), where(y <= 0, 0, 1)"),
                         finish=parse("s0 / s1"), elements=parse("where(y <= 0, 0, dy - r0 + where(y > 0, 0, y))"))


_ATTRS = (("p", 2.0), ("axes", -1), ("eps", NORMALIZE_EPS))
_POWER = (("p", 2.0), ("eps", POWER_EPS), ("axes", -1))
DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("normalize", ("x", "g"), ("y", "norm"), _normalize, ("g",), (*_ATTRS, ("return_norm", False))),
    OpDef("normalize_backward", ("dy", "x", "g"), ("dx", "dg"), _normalize_backward, ("g",), _ATTRS),
    OpDef("power_norm", ("x", "gamma", "beta"), ("y", "rstd"), _power_norm, ("gamma", "beta"), (*_POWER, ("return_stats", False))),
    OpDef("power_norm_backward", ("dy", "x", "rstd", "gamma"), ("dx", "dgamma"), _power_norm_backward, ("gamma",), (_POWER[0], _POWER[2])),
    OpDef("sparsemax", ("x",), ("y",), _sparsemax, attrs=(("axis", -1),)),
    OpDef("sparsemax_backward", ("dy", "y"), ("dx",), _sparsemax_backward, attrs=(("axis", -1),)),
)
