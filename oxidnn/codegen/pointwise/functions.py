"""The function table: every function's NumPy reference, PTX or expansion, derivative and error bound; and a builder of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import InvalidArgument
from .. import elementary as el
from .expression import COMPUTE_TYPES, INTEGER_TYPES, TABLE, Expression, Function, Lowering, Value, apply, const, times


def _row(name: str, arity: int, numpy: Callable[..., Any], **columns: Any) -> None:
    TABLE[name] = Function(name, arity, numpy, **columns)


def _plain(instruction: str, integer: str = "", rounding: str = "") -> dict[str, Lowering]:
    """One instruction in each compute type; `integer` names the integer form where there is one. Of numbers without sign neg wraps, and
    abs is the number."""
    def form(text: str) -> Lowering:
        return lambda e, *operands: e(text, *operands)

    rows = {t: form(f"{instruction}{rounding}.{t}") for t in ("f32", "f64")}
    without_sign = {"neg": "neg.s64", "abs": "mov.b64"}.get(integer, f"{integer}.u64")
    return rows | ({"s32": form(f"{integer}.s32"), "s64": form(f"{integer}.s64"), "u64": form(without_sign)} if integer else {})


def _both(f32: Lowering, f64: Lowering) -> dict[str, Lowering]:
    return {"f32": f32, "f64": f64}


def _each(make: Callable[[str], Lowering]) -> dict[str, Lowering]:
    return {t: make(t) for t in ("f32", "f64")}


def _every(write: Callable[..., str]) -> dict[str, Lowering]:
    """write(e, *operands, t) in every compute type."""
    def form(t: str) -> Lowering:
        return lambda e, *operands: write(e, *operands, t)

    return {t: form(t) for t in COMPUTE_TYPES}


def _compare(relation: str) -> dict[str, Lowering]:
    return _every(lambda e, a, b, t: e(f"setp.{'neu' if relation == 'ne' and t[0] == 'f' else relation}.{t}", a, b))


def _cvt(mode: str) -> dict[str, Lowering]:
    return _each(lambda t: lambda e, x: e(f"cvt.{mode}.{t}.{t}", x))


def _vectorised(f: Callable[[float], float]) -> Callable[[Any], np.ndarray]:
    return np.vectorize(f, otypes=[np.float64])


_erf, _erfc = _vectorised(math.erf), _vectorised(math.erfc)
_ZERO = const(0)
SQRT_HALF = math.sqrt(0.5)
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805
GELU_K, GELU_C = math.sqrt(2 / math.pi), 0.044715


def _sigmoid(x: Any) -> Any:
    t = np.exp(-np.abs(x))
    return np.where(np.less(x, 0), t, 1.0) / (1 + t)


def _softplus(x: Any) -> Any:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _mish(x: Any) -> Any:
    t = np.exp(np.minimum(x, 40.0))
    return x * (t * (t + 2) / (t * (t + 2) + 2))


def _normcdf(x: Any) -> np.ndarray:
    """erfc(t) / 2, t = -x / sqrt(2); what rounding t lost is a relative error 2 t lost of the tail, put back here."""
    x = np.asarray(x, np.float64)
    t = -x * SQRT_HALF
    lost = np.asarray(-x.astype(np.longdouble) * np.sqrt(np.longdouble(0.5)) - t, np.float64)
    return 0.5 * _erfc(t) * np.exp(np.where((t > 0) & (t < 40), -2 * t * lost, 0.0))


def _near_overflow(a: Expression, value: Expression) -> Expression:
    """`value`, or e^a / 2 without overflow where a is large."""
    root = _f("exp", 0.5 * a)
    return where(a > 80, 0.5 * root * root, value)


def _sinh(a: Expression) -> Expression:
    """sinh of a >= 0 from t = e^a - 1: (t + t/(1 + t)) / 2."""
    t = _f("expm1", a)
    return _near_overflow(a, 0.5 * t + 0.5 * (t / (t + 1)))


def _cosh(a: Expression) -> Expression:
    t = _f("exp", a)
    return _near_overflow(a, 0.5 * t + 0.5 / t)


def _asinh(a: Expression) -> Expression:
    """asinh of a >= 0; beyond 1e9 it is log(2a)."""
    return where(a < 1e9, _f("log1p", a + a * a / (1 + _f("sqrt", a * a + 1))), _f("log", a) + el.LN2)


def _acosh(t: Expression) -> Expression:
    """acosh(1 + t); beyond 1e30 it is log(2t)."""
    return where(t < 1e30, _f("log1p", t + _f("sqrt", t) * _f("sqrt", t + 2)), _f("log", t) + el.LN2)


def _gelu_tanh_slope(x: Expression) -> Expression:
    """Of |x| <= 40, beyond which nothing changes, so that no square overflows."""
    square = x * x
    s = _f("sigmoid", x * (2 * GELU_K + (2 * GELU_K * GELU_C) * square))
    return s + x * (s * (1 - s)) * (2 * GELU_K + (6 * GELU_K * GELU_C) * square)


def _hypot(a: Expression, b: Expression) -> Expression:
    """sqrt(a^2 + b^2) of a, b >= 0 without overflow between; infinite if either is."""
    big, small = _f("fmax", a, b), _f("fmin", a, b)
    ratio = where(big > 0, where(_f("isinf", big), 0, small / big), 0)
    size = big * _f("sqrt", ratio * ratio + 1)
    return where(_f("isinf", big), big, where(_f("isnan", a) | _f("isnan", b), a + b, size))


def _atan2(a: Expression, b: Expression) -> Expression:
    """The angle of the point (b, a): atan|a/b| mirrored into its quadrant."""
    ratio = where(_f("isinf", a) & _f("isinf", b), 1, where(_f("eq", a, 0) & _f("eq", b, 0), 0, _f("abs", a / b)))
    angle = _f("atan", ratio)
    mirrored = _f("copysign", where(_f("copysign", 1, b) < 0, math.pi - angle, angle), a)
    return where(_f("isnan", a) | _f("isnan", b), a + b, mirrored)


def _mod(x: Any, y: Any) -> Any:
    return np.mod(x, y)


def _zeta_minus_1(k: int) -> float:
    """Of the first terms, and the integral with two corrections for the rest."""
    n = 200.0
    rest = [n ** (1 - k) / (k - 1), n**-k / 2, k * n ** (-k - 1) / 12, -k * (k + 1) * (k + 2) * n ** (-k - 3) / 720]
    return math.fsum([*(i**-k for i in range(2, 200)), *rest])


_EULER = 0.5772156649015329
_LGAMMA_AT_2 = [1 - _EULER] + [(-1) ** k * _zeta_minus_1(k) / k for k in range(2, 60)]


@_vectorised
def _lgamma(x: float) -> float:
    """The series at 2 beside the zeros 1 and 2, which math.lgamma does not keep."""
    if 0.5 <= x <= 2.5:
        z = x - 1 if x < 1.5 else x - 2
        value = z * math.fsum(c * z**i for i, c in enumerate(_LGAMMA_AT_2))
        return value - math.log1p(z) if x < 1.5 else value
    try:
        return math.lgamma(x)
    except (ValueError, OverflowError):
        return math.inf


def _sinc(x: Any) -> Any:
    x = np.asarray(x, np.float64)
    turn = x - 2 * np.rint(x / 2)  # exact; sin(pi x) has the period 2
    part = np.where(np.abs(turn) > 0.5, np.copysign(1 - np.abs(turn), turn), turn)
    return np.where(x == 0, 1.0, np.where(np.isinf(x), 0.0, np.sin(np.pi * part) / (np.pi * x)))


@_vectorised
def _digamma(x: float) -> float:
    """Moved up to 24 and beyond, where the asymptotic series of four terms holds; below 0 by reflection."""
    if x == 0:
        return -math.copysign(math.inf, x)
    if not x > -math.inf or x < 0 and x == math.floor(x):
        return math.nan
    if x < 0:
        turn = x - float(np.rint(x))
        return float(_digamma(1 - x)) - math.pi / math.tan(math.pi * turn)
    terms = []
    while x < 24:
        terms.append(-1 / x)
        x += 1
    z = 1 / (x * x)
    return math.fsum([math.log(x), -0.5 / x, -z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z / 132)))), *terms])


@_vectorised
def _trigamma(x: float) -> float:
    if not x > -math.inf:
        return math.nan
    if x <= 0:
        turn = x - float(np.rint(x))
        return math.inf if turn == 0 else (r := math.pi / math.sin(math.pi * turn)) * r - float(_trigamma(1 - x))
    terms = []
    while x < 24:
        terms.append(1 / x * (1 / x) if x > 1e-300 else math.inf)
        x += 1
    z = 1 / x / x
    return math.fsum([1 / x, z / 2, z / x * (1 / 6 - z * (1 / 30 - z * (1 / 42 - z * (1 / 30 - z * 5 / 66)))), *terms])


def _no_gradient(g: Expression, node: Expression, *operands: Expression) -> tuple[Expression | None, ...]:
    raise InvalidArgument(f"differentiate: {node.op} has no derivative here.")


@_vectorised
def _erfinv(x: float) -> float:
    """Newton's steps on erf, beyond 1/2 on erfc, whose argument 1 - x is exact there."""
    if not math.fabs(x) < 1:
        return math.copysign(math.inf, x) if math.fabs(x) == 1 else math.nan
    a = math.fabs(x)
    w = -math.log((1 - a) * (1 + a))
    y = math.sqrt(w) if w > 6 else a * (0.8862 + 0.13 * w)
    for _ in range(60):
        error = math.erf(y) - a if a < 0.5 else (1 - a) - math.erfc(y)
        step = error * math.exp(y * y) * math.sqrt(math.pi) / 2
        y -= step
        if math.fabs(step) <= 1e-16 * y:
            break
    return math.copysign(y, x) if a > 1e-8 else x * math.sqrt(math.pi) / 2


def _ldexp(x: Any, n: Any) -> Any:
    whole = np.clip(np.nan_to_num(np.asarray(n, np.float64)), -5000, 5000).astype(np.int32)
    return np.where(np.isnan(n), np.nan, np.ldexp(np.asarray(x, np.float64), whole))


def _quantile(u: Any, first: Any, step: Callable[[float], Any], proper: Any) -> Any:
    """See elementary._quantile_f64."""
    u, first, proper = np.broadcast_arrays(u, first, proper)
    events, chance, total, k = np.zeros(u.shape), np.array(first, np.float64), np.array(first, np.float64), 0
    while k < el.MOST_EVENTS and (more := proper & (total <= u)).any():
        k += 1
        chance = chance * step(k)
        total, events = np.where(more, total + chance, total), np.where(more, k, events)
    return np.where(proper, events, np.nan)


def _poisson_quantile(u: Any, rate: Any) -> Any:
    proper = (np.asarray(rate) >= 0) & (np.asarray(rate) <= 700) & (np.asarray(u) >= 0) & (np.asarray(u) < 1)
    return _quantile(u, np.exp(-np.asarray(rate, np.float64)), lambda k: np.asarray(rate, np.float64) / k, proper)


def _binomial_quantile(u: Any, n: Any, p: Any) -> Any:
    u, n, p = (np.asarray(v, np.float64) for v in (u, n, p))
    power = n * np.log1p(-p)
    proper = (n >= 0) & (power >= -700) & (p >= 0) & (p <= 0.5) & (u >= 0) & (u < 1)
    return np.minimum(_quantile(u, np.exp(power), lambda k: (n + 1 - k) / k * (p / (1 - p)), proper), n)


def _counted(count: Callable[[int, int], int]) -> Callable[[Any, Any], Any]:
    """count(the lowest `bits` bits, bits) of every element; bits 0: 64."""
    def one(value: Any, bits: Any) -> int:
        width = int(bits) or 64
        return count(int(value) % (1 << width), width)

    return np.vectorize(one, otypes=[np.int64])


def _bits(name: str) -> dict[str, Lowering]:
    def form(t: str) -> Lowering:
        return lambda e, *operands: e(f"{name}.b{t[1:]}", *operands)

    return {t: form(t) for t in INTEGER_TYPES}


def _shift(left: bool) -> dict[str, Lowering]:
    """The amount is taken as 32 bits; PTX clamps it to the width."""
    def form(t: str) -> Lowering:
        name = f"shl.b{t[1:]}" if left else f"shr.{t}"
        return lambda e, a, n: e(name, a, n if t == "s32" else e(f"cvt.u32.{t}", e(f"min.{t}", n, 64)))

    return {t: form(t) for t in INTEGER_TYPES}


def _count(name: str) -> dict[str, Lowering]:
    """popc, clz or ctz of the lowest bits of a register, as many as the second operand, a literal, says."""
    def form(t: str) -> Lowering:
        width = int(t[1:])

        def lower(e: el.Emitter, a: str, number: str) -> str:
            if not number.isdecimal() or int(number) > width:
                raise InvalidArgument(f"expression: the number of bits is {number} (expected an integer from 0 to {width}).")
            bits = int(number) or width
            if name == "popc":
                a = e(f"and.b{width}", a, (1 << bits) - 1) if bits < width else a
            else:  # the bits at the upper end, and a one behind the last for clz to find
                a = e(f"brev.b{width}", a) if name == "ctz" else e(f"shl.b{width}", a, width - bits)
                a = e(f"or.b{width}", a, 1 << (width - bits - 1)) if bits < width else a
            found = e(f"{'popc' if name == 'popc' else 'clz'}.b{width}", a, to="b32")
            return found if t == "s32" else e(f"cvt.{t}.{t[0]}32", found)

        return lower

    return {t: form(t) for t in INTEGER_TYPES}


def where(condition: Value, a: Value, b: Value) -> Expression:
    """a where the condition holds (is not 0), else b."""
    return apply("where", condition, a, b)


def _function(name: str) -> Callable[..., Expression]:
    def build(*operands: Value) -> Expression:
        return apply(name, *operands)

    build.__name__ = build.__qualname__ = name
    return build


def _f(name: str, *operands: Value) -> Expression:
    return apply(name, *operands)


# Arithmetic and comparison.
_row("add", 2, np.add, lower=_plain("add", "add", ".rn"), gradient=lambda g, y, a, b: (g, g))
_row("sub", 2, np.subtract, lower=_plain("sub", "sub", ".rn"), gradient=lambda g, y, a, b: (g, -g))
_row("mul", 2, np.multiply, lower=_plain("mul", "mul.lo", ".rn"), gradient=lambda g, y, a, b: (times(g, b), times(g, a)))
_row("div", 2, np.true_divide, lower=_plain("div", "", ".rn"), gradient=lambda g, y, a, b: (g / b, -(g * y / b)))
_row("mod", 2, _mod, lower={t: el.modulo(t) for t in COMPUTE_TYPES}, gradient=lambda g, y, a, b: (g, -(g * _f("floor", a / b))),
     doc="the sign of the divisor, as NumPy")
_row("pow", 2, np.power, lower=_each(el.power), ulp=1, ulp64=1500, doc="f64: relative error 2^-52 (1 + |y log x|)",
     gradient=lambda g, y, a, b: (g * (b * _f("pow", a, b - 1)), g * (y * _f("log", a))))
_row("neg", 1, np.negative, lower=_plain("neg", "neg"), gradient=lambda g, y, x: (-g,))
_row("abs", 1, np.abs, lower=_plain("abs", "abs"), gradient=lambda g, y, x: (times(g, _f("sign", x)),))
_row("maximum", 2, np.maximum, lower=_every(el.maximum), doc="NaN if either is",
     gradient=lambda g, y, a, b: (where(_f("ge", a, b), g, 0), where(_f("lt", a, b), g, 0)))
_row("minimum", 2, np.minimum, lower=_every(el.minimum), doc="NaN if either is",
     gradient=lambda g, y, a, b: (where(_f("le", a, b), g, 0), where(_f("gt", a, b), g, 0)))
_row("fmax", 2, np.fmax, lower=_plain("max", "max"), doc="the other one if one is NaN",
     gradient=lambda g, y, a, b: (where(_f("ge", a, b) | _f("isnan", b), g, 0), where(_f("lt", a, b) | _f("isnan", a), g, 0)))
_row("fmin", 2, np.fmin, lower=_plain("min", "min"), doc="the other one if one is NaN",
     gradient=lambda g, y, a, b: (where(_f("le", a, b) | _f("isnan", b), g, 0), where(_f("gt", a, b) | _f("isnan", a), g, 0)))
for _name, _numpy in {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                      "ge": np.greater_equal}.items():
    _row(_name, 2, _numpy, lower=_compare(_name), is_condition=True)
_row("logical_and", 2, np.logical_and, lower=_every(lambda e, a, b, t: e("and.pred", a, b)), is_condition=True, takes_conditions=True)
_row("logical_or", 2, np.logical_or, lower=_every(lambda e, a, b, t: e("or.pred", a, b)), is_condition=True, takes_conditions=True)
_row("logical_xor", 2, np.logical_xor, lower=_every(lambda e, a, b, t: e("xor.pred", a, b)), is_condition=True, takes_conditions=True)
_row("logical_not", 1, np.logical_not, lower=_every(lambda e, a, t: e("not.pred", a)), is_condition=True, takes_conditions=True)
_row("isnan", 1, np.isnan, lower=_each(lambda t: lambda e, x: e(f"setp.nan.{t}", x, x)), is_condition=True)
_row("isinf", 1, np.isinf, lower=_each(lambda t: lambda e, x: e(f"setp.eq.{t}", e(f"abs.{t}", x), el.INF)), is_condition=True)
_row("where", 3, lambda c, a, b: np.where(np.not_equal(c, 0), a, b), lower=_every(el.select),
     gradient=lambda g, y, c, a, b: (None, where(c, g, 0), where(c, 0, g)))
_row("sign", 1, np.sign, expand=lambda x: where(x > 0, 1, where(x < 0, -1, where(_f("eq", x, 0), 0, x))), gradient=lambda g, y, x: (None,))
_row("clamp", 3, lambda x, lo, hi: np.minimum(np.maximum(x, lo), hi), expand=lambda x, lo, hi: _f("minimum", _f("maximum", x, lo), hi),
     gradient=lambda g, y, x, lo, hi: (where(_f("ge", x, lo) & _f("le", x, hi), g, 0), where(x < lo, g, 0), where(x > hi, g, 0)))

# Rounding.
_row("floor", 1, np.floor, lower=_cvt("rmi"))
_row("ceil", 1, np.ceil, lower=_cvt("rpi"))
_row("round", 1, np.rint, lower=_cvt("rni"), doc="halves to even")
_row("trunc", 1, np.trunc, lower=_cvt("rzi"))

# Powers, exponentials, logarithms.
_row("square", 1, np.square, expand=lambda x: x * x, gradient=lambda g, y, x: (g * (2 * x),))
_row("reciprocal", 1, lambda x: 1.0 / np.asarray(x), lower=_plain("rcp", "", ".rn"), gradient=lambda g, y, x: (-(g * (y * y)),))
_row("sqrt", 1, np.sqrt, lower=_plain("sqrt", "", ".rn"), gradient=lambda g, y, x: (g * 0.5 / y,))
_row("rsqrt", 1, lambda x: 1.0 / np.sqrt(x), ulp=2, ulp64=1,
     lower=_both(lambda e, x: e("rsqrt.approx.f32", x), lambda e, x: e("rcp.rn.f64", e("sqrt.rn.f64", x))),
     gradient=lambda g, y, x: (g * (-0.5 * (y * y * y)),))
_row("exp", 1, np.exp, lower=_both(el.exp_f32, el.exp_f64), ulp=3, ulp64=2, gradient=lambda g, y, x: (g * y,))
_row("exp2", 1, np.exp2, ulp=3, ulp64=2, gradient=lambda g, y, x: (g * (y * el.LN2),),
     lower=_both(lambda e, x: e("ex2.approx.f32", x), el.exp2_f64))
_row("expm1", 1, np.expm1, lower=_both(el.expm1_f32, el.expm1_f64), ulp=2, ulp64=2, gradient=lambda g, y, x: (g * _f("exp", x),))
_row("log", 1, np.log, lower=_both(el.log_f32, el.log_f64), ulp=2, ulp64=2, gradient=lambda g, y, x: (g / x,))
_row("log2", 1, np.log2, lower=_both(el.log2_f32, el.log2_f64), ulp=3, ulp64=3, gradient=lambda g, y, x: (g / (x * el.LN2),))
_row("log10", 1, np.log10, expand=lambda x: _f("log", x) * (1 / math.log(10)))
_row("log1p", 1, np.log1p, lower=_both(el.log1p_f32, el.log1p_f64), ulp=2, ulp64=2, gradient=lambda g, y, x: (g / (1 + x),))
_row("sin", 1, np.sin, lower=_each(lambda t: el.sine(t, 0)), ulp=2, ulp64=2, doc="NaN beyond |x| = 2^50",
     gradient=lambda g, y, x: (g * _f("cos", x),))
_row("cos", 1, np.cos, lower=_each(lambda t: el.sine(t, 1)), ulp=2, ulp64=2, doc="NaN beyond |x| = 2^50",
     gradient=lambda g, y, x: (-(g * _f("sin", x)),))
_row("cos_turn", 1, lambda x: np.sin(2 * np.pi * (0.25 - np.abs(x - np.rint(x)))), lower=_each(el.cos_turn), ulp=3, ulp64=4,
     doc="cos(2 pi x)", gradient=lambda g, y, x: (g * (2 * np.pi * _f("cos_turn", x + 0.25)),))
_row("normal_radius", 1, lambda x: np.sqrt(-2 * np.log(x)), ulp=4, ulp64=2, doc="sqrt(-2 log x): Box and Muller's",
     lower=_both(lambda e, x: e("sqrt.approx.ftz.f32", e("mul.rn.f32", -2.0, el.log_f32(e, x))),
                 lambda e, x: e("sqrt.rn.f64", e("mul.rn.f64", -2.0, el.log_f64(e, x)))),
     gradient=lambda g, y, x: (-(g / (x * y)),))
_row("tan", 1, np.tan, expand=lambda x: _f("sin", x) / _f("cos", x), doc="NaN beyond |x| = 2^50",
     gradient=lambda g, y, x: (g * (1 + y * y),))
_row("erf", 1, _erf, lower=_both(el.erf_f32, el.erf_f64), ulp=2, ulp64=3,
     gradient=lambda g, y, x: (g * (2 / math.sqrt(math.pi) * _f("exp", -(x * x))),))
_row("erfc", 1, _erfc, lower=_each(el.erfc), ulp=8, ulp64=8,
     gradient=lambda g, y, x: (g * (-2 / math.sqrt(math.pi) * _f("exp", -(x * x))),))
_row("normcdf", 1, _normcdf, lower=_each(el.normcdf), ulp=8, ulp64=8,
     gradient=lambda g, y, x: (g * (1 / math.sqrt(2 * math.pi) * _f("exp", -0.5 * (x * x))),),
     doc="distribution function of the standard normal")
_row("atan", 1, np.arctan, lower=_each(el.arctan), ulp=3, ulp64=3, gradient=lambda g, y, x: (g / (1 + x * x),))
_row("asin", 1, np.arcsin, lower=_each(el.arcsin), ulp=3, ulp64=3, gradient=lambda g, y, x: (g * _f("rsqrt", (1 - x) * (1 + x)),))
_row("acos", 1, np.arccos, lower=_each(el.arccos), ulp=3, ulp64=3, gradient=lambda g, y, x: (-(g * _f("rsqrt", (1 - x) * (1 + x))),))
_row("atan2", 2, np.arctan2, expand=_atan2,
     gradient=lambda g, y, a, b: (g * b / (a * a + b * b), -(g * a / (a * a + b * b))))
_row("sinh", 1, np.sinh,
     expand=lambda x: _f("copysign", _sinh(_f("abs", x)), x), gradient=lambda g, y, x: (g * _f("cosh", x),))
_row("cosh", 1, np.cosh, expand=lambda x: _cosh(_f("abs", x)),
     gradient=lambda g, y, x: (g * _f("sinh", x),))
_row("asinh", 1, np.arcsinh, expand=lambda x: _f("copysign", _asinh(_f("abs", x)), x),
     gradient=lambda g, y, x: (g / _f("hypot", x, 1),))
_row("acosh", 1, np.arccosh, expand=lambda x: _acosh(x - 1), gradient=lambda g, y, x: (g * _f("rsqrt", x - 1) * _f("rsqrt", x + 1),))
_row("atanh", 1, np.arctanh, expand=lambda x: _f("copysign", (lambda a: 0.5 * _f("log1p", 2 * a / (1 - a)))(_f("abs", x)), x),
     gradient=lambda g, y, x: (g / ((1 - x) * (1 + x)),))

# Further arithmetic.
_row("copysign", 2, np.copysign, lower=_each(lambda t: lambda e, a, b: e(f"copysign.{t}", b, a)),
     doc="the size of the first, the sign of the second", gradient=lambda g, y, a, b: (where(_f("eq", y, a), g, -g), None))
_row("hypot", 2, np.hypot, expand=lambda a, b: _hypot(_f("abs", a), _f("abs", b)), gradient=lambda g, y, a, b: (g * a / y, g * b / y))
_row("cube", 1, lambda x: x * x * x, expand=lambda x: x * x * x)
_row("frac", 1, lambda x: x - np.trunc(x), expand=lambda x: x - _f("trunc", x), gradient=lambda g, y, x: (g,))
_row("step", 2, lambda x, v: np.where(np.greater(x, 0), 1, np.where(np.less(x, 0), 0, v)), defaults=(0.0,),
     expand=lambda x, v: where(x > 0, 1, where(x < 0, 0, v)), gradient=lambda g, y, x, v: (None, where(_f("eq", x, 0), g, 0)),
     doc="Heaviside; the second operand is its value at 0")
_row("lerp", 3, lambda a, b, w: a + w * (b - a), expand=lambda a, b, w: a + w * (b - a))
_row("fma", 3, lambda a, b, c: a * b + c, gradient=lambda g, y, a, b, c: (times(g, b), times(g, a), g), doc="f32: rounded once",
     lower=_plain("", "mad.lo") | _both(lambda e, a, b, c: e("fma.rn.f32", a, b, c),
                                        lambda e, a, b, c: e("add.rn.f64", e("mul.rn.f64", a, b), c)))
_row("addcmul", 4, lambda x, a, b, v: x + v * a * b, defaults=(1.0,), expand=lambda x, a, b, v: x + times(v, a * b))
_row("addcdiv", 4, lambda x, a, b, v: x + v * a / b, defaults=(1.0,), expand=lambda x, a, b, v: x + times(v, a / b))

_row("fmod", 2, np.fmod, lower={t: el.fmod(t) for t in COMPUTE_TYPES}, gradient=lambda g, y, a, b: (g, -(g * _f("trunc", a / b))),
     doc="the sign of the dividend, as C")
_row("floor_divide", 2, np.floor_divide, lower={t: el.floor_divide(t) for t in COMPUTE_TYPES},
     doc="the quotient that goes with mod; integers: undefined by 0; f64: while |x/y| < 2^53")
_row("xlogy", 2, lambda a, b: np.where(np.equal(a, 0) & ~np.isnan(b), 0, a * np.log(b)),
     expand=lambda a, b: where(_f("eq", a, 0) & ~_f("isnan", b), 0, a * _f("log", b)),
     gradient=lambda g, y, a, b: (where(_f("eq", a, 0) & (b <= 0), 0, g * _f("log", b)), where(_f("eq", a, 0), 0, g * a / b)))
_row("nextafter", 2, np.nextafter, lower=_each(el.nextafter), ulp=2, gradient=lambda g, y, a, b: (g, None),
     doc="the neighbour of the first in the compute type")
_row("ldexp", 2, _ldexp, lower=_each(el.ldexp), gradient=lambda g, y, x, n: (_f("ldexp", g, n), None), doc="x 2^n, n truncated")
_row("cbrt", 1, np.cbrt, lower=_each(el.cbrt), ulp=2, ulp64=2, gradient=lambda g, y, x: (g / (3 * (y * y)),))
_row("sinc", 1, _sinc,
     expand=lambda x: where(_f("eq", x, 0), 1, where(_f("isinf", x), 0, _f("cos_turn", 0.5 * x - 0.25) / (math.pi * x))),
     gradient=lambda g, y, x: (where(_f("eq", x, 0), 0, g * (_f("cos_turn", 0.5 * x) - y) / x),), doc="sin(pi x) / (pi x)")
_row("lgamma", 1, _lgamma, lower=_each(el.lgamma), ulp=2, ulp64=16, gradient=lambda g, y, x: (g * _f("digamma", x),),
     doc="log|Gamma(x)|; its zeros below 0 keep an absolute error of 2^-50 of the terms that cancel")
_row("digamma", 1, _digamma, lower=_each(el.digamma), ulp=2, ulp64=64, doc="zeros keep an absolute error, of 2^-50",
     gradient=lambda g, y, x: (g * _f("trigamma", x),))
_row("trigamma", 1, _trigamma, lower=_each(el.trigamma), ulp=2, ulp64=64, gradient=_no_gradient, doc="no derivative")
_row("erfinv", 1, _erfinv, lower=_each(el.erfinv), ulp=4, ulp64=6,
     gradient=lambda g, y, x: (g * (math.sqrt(math.pi) / 2 * _f("exp", y * y)),))

_row("poisson_quantile", 2, _poisson_quantile, lower=_each(el.poisson_quantile),
     doc="the smallest k that the chance of at most k events exceeds the first; rates to 700")
_row("binomial_quantile", 3, _binomial_quantile, lower=_each(el.binomial_quantile),
     doc="of u, n trials and their chance, at most 1/2; (1 - p)^n at least e^-700")

# Bits of integers. A shift by the width or more leaves nothing, or the sign.
_row("bitwise_and", 2, np.bitwise_and, lower=_bits("and"))
_row("bitwise_or", 2, np.bitwise_or, lower=_bits("or"))
_row("bitwise_xor", 2, np.bitwise_xor, lower=_bits("xor"))
_row("bitwise_not", 1, np.bitwise_not, lower=_bits("not"))
_row("left_shift", 2, np.left_shift, lower=_shift(True))
_row("right_shift", 2, np.right_shift, lower=_shift(False), doc="of a signed number: the sign moves in")
_row("popcount", 2, _counted(lambda v, n: v.bit_count()), lower=_count("popc"), defaults=(0.0,),
     doc="bits that are set, of so many (default: the operands' type's)")
_row("clz", 2, _counted(lambda v, n: n - v.bit_length()), lower=_count("clz"), defaults=(0.0,), doc="zeros before the first one")
_row("ctz", 2, _counted(lambda v, n: (v & -v).bit_length() - 1 if v else n), lower=_count("ctz"), defaults=(0.0,),
     doc="zeros behind the last one")

# Activations.
_row("relu", 1, lambda x: np.maximum(x, 0), expand=lambda x: _f("maximum", x, 0), gradient=lambda g, y, x: (where(x > 0, g, 0),))
_row("relu6", 1, lambda x: np.minimum(np.maximum(x, 0), 6), expand=lambda x: _f("clamp", x, 0, 6),
     gradient=lambda g, y, x: (where((x > 0) & (x < 6), g, 0),))
_row("clipped_relu", 4, lambda x, high, low, slope: np.minimum(np.where(np.greater(x, low) | np.equal(slope, 0), np.maximum(x, low),
                                                                           low + slope * (np.minimum(x, low) - low)), high),
     defaults=(6.0, 0.0, 0.0), doc="between low and high; the slope below low",
     expand=lambda x, high, low, slope: _f("minimum", _f("maximum", x, low) if slope is _ZERO else
                                           where(x > low, x, low + slope * (x - low)), high),
     gradient=lambda g, y, x, high, low, slope: (where(x < high, where(x > low, g, times(g, slope)), 0), where(x < high, 0, g),
                                                 where(x > low, 0, g * (1 - slope)), where(x > low, 0, g * (x - low))))
_row("leaky_relu", 2, lambda x, a: np.where(np.greater(x, 0), x, a * x), defaults=(0.01,), expand=lambda x, a: where(x > 0, x, a * x),
     doc="slope below 0; with a per-channel operand as slope it is PReLU")
_row("elu", 2, lambda x, a: np.where(np.greater(x, 0), x, a * np.expm1(np.minimum(x, 0))), defaults=(1.0,),
     expand=lambda x, a: where(x > 0, x, a * _f("expm1", x)),
     gradient=lambda g, y, x, a: (where(x > 0, g, g * (a * _f("exp", x))), where(x > 0, 0, g * _f("expm1", x))))
_row("celu", 2, lambda x, a: np.where(np.greater(x, 0), x, a * np.expm1(np.minimum(x, 0) / a)), defaults=(1.0,),
     expand=lambda x, a: where(x > 0, x, a * _f("expm1", x / a)),
     gradient=lambda g, y, x, a: (where(x > 0, g, g * _f("exp", x / a)),
                                  where(x > 0, 0, g * (_f("expm1", x / a) - x / a * _f("exp", x / a)))))
_row("selu", 1, lambda x: SELU_SCALE * np.where(np.greater(x, 0), x, SELU_ALPHA * np.expm1(np.minimum(x, 0))),
     expand=lambda x: where(x > 0, SELU_SCALE * x, (SELU_SCALE * SELU_ALPHA) * _f("expm1", x)),
     gradient=lambda g, y, x: (where(x > 0, SELU_SCALE * g, g * ((SELU_SCALE * SELU_ALPHA) * _f("exp", x))),))
_row("sigmoid", 1, _sigmoid, lower=_both(el.sigmoid_f32, el.sigmoid_f64), ulp=5, ulp64=4, gradient=lambda g, y, x: (g * (y * (1 - y)),))
_row("logsigmoid", 1, lambda x: -_softplus(-np.asarray(x)), expand=lambda x: -_f("softplus", -x),
     gradient=lambda g, y, x: (g * _f("sigmoid", -x),))
_row("hard_sigmoid", 3, lambda x, a, b: np.minimum(np.maximum(a * x + b, 0), 1), defaults=(1 / 6, 0.5),
     expand=lambda x, a, b: _f("clamp", a * x + b, 0, 1),
     gradient=lambda g, y, x, a, b: tuple(where((y > 0) & (y < 1), d, 0) for d in (g * a, g * x, g)))
_row("tanh", 1, np.tanh, lower=_both(el.tanh_f32, el.tanh_f64), ulp=3, ulp64=3, gradient=lambda g, y, x: (g * (1 - y * y),))
_row("hard_tanh", 3, lambda x, lo, hi: np.minimum(np.maximum(x, lo), hi), defaults=(-1.0, 1.0),
     expand=lambda x, lo, hi: _f("clamp", x, lo, hi),
     gradient=lambda g, y, x, lo, hi: (where((x > lo) & (x < hi), g, 0), where(x <= lo, g, 0), where(x >= hi, g, 0)))
_row("silu", 1, lambda x: x * _sigmoid(x), expand=lambda x: x * _f("sigmoid", x))
_row("hard_swish", 1, lambda x: x * np.minimum(np.maximum(x / 6 + 0.5, 0), 1), expand=lambda x: x * _f("hard_sigmoid", x))
_row("mish", 1, _mish,
     expand=lambda x: (lambda n: x * (n / (n + 2)))((lambda t: t * (t + 2))(_f("exp", _f("minimum", x, 40)))))
_row("softplus", 1, _softplus, expand=lambda x: _f("maximum", x, 0) + _f("log1p", _f("exp", -_f("abs", x))),
     gradient=lambda g, y, x: (g * _f("sigmoid", x),))
_row("softsign", 1, lambda x: x / (1 + np.abs(x)), expand=lambda x: x / (1 + _f("abs", x)),
     gradient=lambda g, y, x: (g * _f("reciprocal", _f("square", 1 + _f("abs", x))),))
_row("gelu", 1, lambda x: x * _normcdf(x), expand=lambda x: x * _f("normcdf", x))
_row("gelu_tanh", 1, lambda x: x * _sigmoid(2 * GELU_K * (x + GELU_C * x**3)),
     expand=lambda x: x * _f("sigmoid", x * (2 * GELU_K + (2 * GELU_K * GELU_C) * (x * x))),
     gradient=lambda g, y, x: (times(g, _gelu_tanh_slope(_f("clamp", x, -40, 40))),))
_row("quick_gelu", 1, lambda x: x * _sigmoid(1.702 * x), expand=lambda x: x * _f("sigmoid", 1.702 * x))
_row("hard_shrink", 2, lambda x, w: np.where(np.abs(x) > w, x, 0), defaults=(0.5,), expand=lambda x, w: where(_f("abs", x) > w, x, 0))
_row("soft_shrink", 2, lambda x, w: np.where(np.greater(x, w), x - w, np.where(np.less(x, -w), x + w, 0)), defaults=(0.5,),
     expand=lambda x, w: where(x > w, x - w, where(x < -w, x + w, 0)))
_row("tanh_shrink", 1, lambda x: x - np.tanh(x), expand=lambda x: x - _f("tanh", x))
_row("threshold", 3, lambda x, t, v: np.where(np.greater(x, t), x, v), expand=lambda x, t, v: where(x > t, x, v))
_row("swish", 2, lambda x, b: x * _sigmoid(b * x), defaults=(1.0,), expand=lambda x, b: x * _f("sigmoid", b * x))
_row("logit", 1, lambda x: np.log(x / (1 - x)), expand=lambda x: _f("log", x / (1 - x)))

_BUILDERS = (
    "neg sign relu relu6 leaky_relu elu celu selu clamp sigmoid logsigmoid hard_sigmoid tanh hard_tanh silu hard_swish mish softplus "
    "softsign gelu gelu_tanh quick_gelu swish hard_shrink soft_shrink tanh_shrink threshold logit exp exp2 expm1 log log2 log10 "
    "log1p sqrt rsqrt reciprocal square sin cos tan erf erfc normcdf floor ceil trunc maximum minimum fmax fmin add sub mul div mod "
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf atan asin acos atan2 sinh cosh asinh acosh atanh "
    "copysign hypot cube frac step lerp fmod floor_divide xlogy nextafter ldexp cbrt sinc lgamma digamma trigamma erfinv bitwise_and "
    "bitwise_or bitwise_xor bitwise_not left_shift right_shift popcount clz ctz fma addcmul addcdiv clipped_relu").split()
(neg, sign, relu, relu6, leaky_relu, elu, celu, selu, clamp, sigmoid, logsigmoid, hard_sigmoid, tanh, hard_tanh, silu, hard_swish, mish,
 softplus, softsign, gelu, gelu_tanh, quick_gelu, swish, hard_shrink, soft_shrink, tanh_shrink, threshold, logit, exp, exp2, expm1, log,
 log2, log10, log1p, sqrt, rsqrt, reciprocal, square, sin, cos, tan, erf, erfc, normcdf, floor, ceil, trunc, maximum, minimum, fmax,
 fmin, add, sub, mul, div, mod, eq, ne, lt, le, gt, ge, logical_and, logical_or, logical_xor, logical_not, isnan, isinf, atan, asin,
 acos, atan2, sinh, cosh, asinh, acosh, atanh, copysign, hypot, cube, frac, step, lerp, fmod, floor_divide, xlogy, nextafter, ldexp,
 cbrt, sinc, lgamma, digamma, trigamma, erfinv, bitwise_and, bitwise_or, bitwise_xor,
 bitwise_not, left_shift, right_shift, popcount, clz, ctz, fma, addcmul, addcdiv, clipped_relu) = map(_function, _BUILDERS)
abs, round, pow = map(_function, ("abs", "round", "pow"))  # noqa: A001 - as in NumPy, the names are those of the functions
__all__ = [*_BUILDERS, "abs", "round", "pow", "where"]
