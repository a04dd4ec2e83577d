"""The pointwise expression: a small DAG over tensor elements and call-time scalars that lowers to PTX wherever a kernel has a slot for it.

    e = relu(acc * arg("scale", axis="c") + arg("bias", axis="c"))      # or parse("relu(acc * scale + bias)")
    e.lower({"acc": "%acc", "scale": "%scale", "bias": "%bias"}, ["%acc"], "f32")

TABLE has one row a function: name, PTX per compute type or an expansion into other functions, NumPy reference, derivative, error bound.
Text form: Python syntax; `name[c]` is a per-channel operand (1-D, along dimension 1), `name[:]` a full one; a bare name is full, except
that `bias`, `scale` and `shift` are per-channel beside `acc`. `scalar(lr)` is a number given with each call; `a, b` are two outputs;
`(t := e)` names a part that is used again.
"""

from __future__ import annotations

import ast
import difflib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from .. import dtypes
from ..errors import InvalidArgument
from . import elementary as el
from .elementary import Emitter

COMPUTE_TYPES = ("f32", "f64", "s32", "s64")
CHANNEL_NAMES = ("bias", "scale", "shift")  # per-channel where the text also names acc
COMMON = {
    "bias": "acc + bias[c]", "residual": "acc + residual",
    **{f"bias_{f}": f"{f}(acc + bias[c])" for f in ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")},
    "bias_residual": "acc + bias[c] + residual", "bias_residual_relu": "relu(acc + bias[c] + residual)",
    "residual_relu": "relu(acc + residual)", "scale_bias": "acc * scale[c] + bias[c]", "scale_bias_relu": "relu(acc * scale[c] + bias[c])",
    "scale_bias_residual_relu": "relu(acc * scale[c] + bias[c] + residual)", "identity": "acc",
}


class Expression:
    """A frozen node; equal structure, equal object (as long as one lives), so that DAGs hash and compare in constant time.

    op: a row of TABLE, or "arg" (value: name, axis), "scalar" (value: name), "const" (value: float), "cast" (value: dtype name), "tuple".
    """

    __slots__ = ("__weakref__", "_hash", "op", "operands", "value")
    op: str
    operands: tuple[Expression, ...]
    value: Any
    _hash: int
    _interned: weakref.WeakValueDictionary[tuple[Any, ...], Expression] = weakref.WeakValueDictionary()

    def __new__(cls, op: str, operands: tuple[Expression, ...] = (), value: Any = None) -> Expression:
        key = (op, tuple(map(id, operands)), repr(value))
        found = cls._interned.get(key)
        if found is None:
            found = object.__new__(cls)
            object.__setattr__(found, "op", op)
            object.__setattr__(found, "operands", operands)
            object.__setattr__(found, "value", value)
            object.__setattr__(found, "_hash", hash((op, tuple(o._hash for o in operands), repr(value))))
            found = cls._interned.setdefault(key, found)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("an Expression is frozen")

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Expression):
            return NotImplemented
        return (self._hash, self.op, repr(self.value), self.operands) == (other._hash, other.op, repr(other.value), other.operands)

    def __reduce__(self) -> tuple[Any, ...]:
        return parse, (str(self),)

    def __add__(self, other: Value) -> Expression:
        return apply("add", self, other)

    def __radd__(self, other: Value) -> Expression:
        return apply("add", other, self)

    def __sub__(self, other: Value) -> Expression:
        return apply("sub", self, other)

    def __rsub__(self, other: Value) -> Expression:
        return apply("sub", other, self)

    def __mul__(self, other: Value) -> Expression:
        return apply("mul", self, other)

    def __rmul__(self, other: Value) -> Expression:
        return apply("mul", other, self)

    def __truediv__(self, other: Value) -> Expression:
        return apply("div", self, other)

    def __rtruediv__(self, other: Value) -> Expression:
        return apply("div", other, self)

    def __mod__(self, other: Value) -> Expression:
        return apply("mod", self, other)

    def __pow__(self, other: Value) -> Expression:
        return apply("pow", self, other)

    def __rpow__(self, other: Value) -> Expression:
        return apply("pow", other, self)

    def __neg__(self) -> Expression:
        return apply("neg", self)

    def __abs__(self) -> Expression:
        return apply("abs", self)

    def __lt__(self, other: Value) -> Expression:
        return apply("lt", self, other)

    def __le__(self, other: Value) -> Expression:
        return apply("le", self, other)

    def __gt__(self, other: Value) -> Expression:
        return apply("gt", self, other)

    def __ge__(self, other: Value) -> Expression:
        return apply("ge", self, other)

    def __and__(self, other: Value) -> Expression:
        return apply("logical_and", self, other)

    def __or__(self, other: Value) -> Expression:
        return apply("logical_or", self, other)

    def __invert__(self) -> Expression:
        return apply("logical_not", self)

    def __bool__(self) -> bool:
        raise TypeError("an Expression has no truth value; use where(condition, a, b)")

    @property
    def outputs(self) -> tuple[Expression, ...]:
        return self.operands if self.op == "tuple" else (self,)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    @property
    def is_condition(self) -> bool:
        """True if the value is a truth value (comparisons and logic)."""
        return self.op in TABLE and TABLE[self.op].is_condition

    def nodes(self) -> tuple[Expression, ...]:
        """Every distinct node, operands before users."""
        order: dict[Expression, None] = {}
        stack: list[tuple[Expression, bool]] = [(self, False)]
        while stack:
            node, ready = stack.pop()
            if ready:
                order[node] = None
            elif node not in order:
                stack.append((node, True))
                stack.extend((o, False) for o in reversed(node.operands))
        return tuple(order)

    @property
    def args(self) -> tuple[str, ...]:
        """Names of the tensor operands, in order of first use."""
        return tuple(dict.fromkeys(n.value[0] for n in self.nodes() if n.op == "arg"))

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the numbers given with each call, in order of first use."""
        return tuple(dict.fromkeys(n.value for n in self.nodes() if n.op == "scalar"))

    def axis(self, name: str) -> str | None:
        """"c" if the operand `name` is per-channel, None if it has every dimension; KeyError if there is no such operand."""
        for node in self.nodes():
            if node.op == "arg" and node.value[0] == name:
                return node.value[1]
        raise KeyError(name)

    def __str__(self) -> str:
        return _format(self)

    def __repr__(self) -> str:
        return f"Expression({str(self)!r})"

    def substitute(self, values: Mapping[str, Expression]) -> Expression:
        """The expression with operands replaced by name."""
        done: dict[Expression, Expression] = {}
        for node in self.nodes():
            if node.op == "arg" and node.value[0] in values:
                done[node] = values[node.value[0]]
            else:
                done[node] = Expression(node.op, tuple(done[o] for o in node.operands), node.value) if node.operands else node
        return done[self]

    def expanded(self) -> Expression:
        """The same with every composite function written out in the functions that have PTX of their own."""
        return _expand(self)

    def lower(self, registers: Mapping[str, str], results: Sequence[str], compute: str = "f32", brief: bool = False) -> str:
        """A PTX scope that reads `registers` (by operand and scalar name, in the compute type) and writes `results`, one an output.

        compute: "f32", "f64", "s32" or "s64". Conditions are written as 1 or 0. Results may be registers that are also read. brief: see
        elementary.Emitter.
        Raises InvalidArgument if a register is missing or a function has no form in the compute type.
        """
        return _lower(self, registers, results, compute, brief)

    def evaluate(self, arrays: Mapping[str, Any], scalars: Mapping[str, float] | None = None) -> tuple[np.ndarray, ...]:
        """The outputs by the NumPy references: float64 (or integer) arrays in, broadcast as NumPy does; conditions give bool arrays.

        A per-channel operand must already have a shape that broadcasts, e.g. (C, 1, 1). The references hold everywhere; kernels give NaN
        for sin, cos and tan beyond |x| = 2^50.
        """
        values = self.node_values(arrays, scalars or {})
        return tuple(np.asarray(values[o]) for o in self.outputs)

    def node_values(self, arrays: Mapping[str, Any], scalars: Mapping[str, float]) -> dict[Expression, Any]:
        """The value of every node, as `evaluate` computes them."""
        values: dict[Expression, Any] = {}
        with np.errstate(all="ignore"):
            for node in self.nodes():
                if node.op == "arg":
                    values[node] = np.asarray(arrays[node.value[0]])
                elif node.op == "scalar":
                    values[node] = scalars[node.value]
                elif node.op == "const":
                    values[node] = int(node.value) if node.value == int_or_nan(node.value) else node.value
                elif node.op == "cast":
                    values[node] = round_to(values[node.operands[0]], node.value)
                elif node.op != "tuple":
                    values[node] = TABLE[node.op].numpy(*(_as_number(values[o]) for o in node.operands))
        return values

    def differentiate(self, wrt: str = "x") -> Expression:
        """The gradient by the operand `wrt`: dy times the derivative, an expression over the same operands and the operand "dy".

        Needs one output. A function without a derivative (floor, comparisons, casts) counts as constant, a cast as the identity.
        """
        if self.num_outputs != 1:
            raise InvalidArgument(f"differentiate: the expression has {self.num_outputs} outputs (expected 1).")
        if wrt not in self.args:
            raise InvalidArgument(f"differentiate: wrt is {wrt!r} (expected one of {', '.join(self.args)}).")
        adjoints: dict[Expression, Expression] = {self: arg("dy")}
        result = const(0)
        for node in reversed(self.nodes()):
            adjoint = adjoints.get(node)
            if adjoint is None:
                continue
            if node.op == "arg":
                if node.value[0] == wrt:
                    result = plus(result, adjoint)
                continue
            if node.op == "cast":
                gradients: Sequence[Expression | None] = (adjoint,)
            elif node.op in TABLE:
                gradients = TABLE[node.op].gradients(adjoint, node)
            else:
                continue
            for operand, gradient in zip(node.operands, gradients, strict=False):
                if gradient is not None and operand.op != "const":
                    adjoints[operand] = plus(adjoints[operand], gradient) if operand in adjoints else gradient
        return result


Value = Expression | float | int


def _as_number(value: Any) -> Any:
    """Truth values as 1 and 0, as kernels keep them."""
    return value.astype(np.int64) if getattr(value, "dtype", None) == np.bool_ else value


def int_or_nan(value: float) -> float:
    """`value` truncated to an integer; NaN where it has none."""
    return float(int(value)) if math.isfinite(value) and (value != 0 or math.copysign(1, value) > 0) else math.nan


# Builders -------------------------------------------------------------------------------------------------------------------------

def arg(name: str, axis: str | None = None) -> Expression:
    """The element of the tensor operand `name`; axis="c": of a vector along dimension 1."""
    if not name.isidentifier():
        raise InvalidArgument(f"arg: name is {name!r} (expected an identifier).")
    if axis not in (None, "c"):
        raise InvalidArgument(f"arg: axis is {axis!r} (expected None or 'c').")
    return Expression("arg", (), (name, axis))


def scalar(name: str) -> Expression:
    """A number (f32) given with each call."""
    if not name.isidentifier():
        raise InvalidArgument(f"scalar: name is {name!r} (expected an identifier).")
    return Expression("scalar", (), name)


def const(value: float) -> Expression:
    """A number, held as float64. Raises InvalidArgument for an integer that float64 does not hold."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if isinstance(value, (int, np.integer)) and number != int(value):
        raise InvalidArgument(f"expression: the constant {value} is not exact in float64 (expected one that is, or a tensor).")
    return Expression("const", (), number)


acc = arg("acc")


def as_expression(value: Value) -> Expression:
    return value if isinstance(value, Expression) else const(value)


def outputs(*expressions: Value) -> Expression:
    """Several results of one expression, e.g. outputs(w - lr * v, v)."""
    flat = tuple(as_expression(e) for e in expressions)
    return flat[0] if len(flat) == 1 else Expression("tuple", flat)


def cast(value: Value, dtype: Any) -> Expression:
    """`value` rounded to what `dtype` can hold (to nearest even; integers saturate), in the compute type."""
    name = dtypes.dtype(dtype).name
    if name not in _CASTS:
        raise InvalidArgument(f"cast: dtype is {name} (expected one of {', '.join(_CASTS)}).")
    return Expression("cast", (as_expression(value),), name)


def apply(name: str, *operands: Value) -> Expression:
    """The function `name` of TABLE of its operands; missing trailing parameters take their defaults."""
    row = TABLE.get(name)
    if row is None:
        raise InvalidArgument(_unknown(name))
    given = [as_expression(o) for o in operands]
    if any(g.op == "tuple" for g in given):
        raise InvalidArgument(f"{name}: an operand has several outputs.")
    missing = row.arity - len(given)
    if missing < 0 or missing > len(row.defaults):
        allowed = f"{row.arity - len(row.defaults)} to {row.arity}" if row.defaults else str(row.arity)
        raise InvalidArgument(f"{name}: {len(given)} operands given (expected {allowed}).")
    given += [const(d) for d in row.defaults[len(row.defaults) - missing:]] if missing else []
    if all(g.op == "const" for g in given) and not row.is_condition:
        with np.errstate(all="ignore"):
            return const(float(row.numpy(*(g.value for g in given))))
    return Expression(name, tuple(given))


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, [*TABLE, *COMMON, "cast", "scalar", "arg"], 3, 0.5)
    return f"expression: {name!r} is no function (near: {', '.join(near) or 'none'}; {len(TABLE)} are known, see oxidnn.expr.TABLE)."


# Sums and products that drop neutral constants: derivatives stay short.
def plus(a: Value, b: Value) -> Expression:
    a, b = as_expression(a), as_expression(b)
    return b if a is const(0) else a if b is const(0) else a + b


def times(a: Value, b: Value) -> Expression:
    a, b = as_expression(a), as_expression(b)
    return b if a is const(1) else a if b is const(1) else a * b


# The table ------------------------------------------------------------------------------------------------------------------------

Lowering = Callable[..., str]


@dataclass(frozen=True)
class Function:
    """A row. `lower` maps a compute type to what writes the PTX; a composite has `expand` instead. `gradient` gives the adjoints of the
    operands from the result's adjoint g and the node; without it a composite is differentiated through its expansion, and a primitive
    counts as constant. `ulp`: bound of the f32 (f64: `ulp64`) result's error in units of its last place, over all arguments unless `doc`
    says otherwise; the error of a composite is what the errors of its expansion's functions lead to."""

    name: str
    arity: int
    numpy: Callable[..., Any]
    lower: Mapping[str, Lowering] = field(default_factory=dict)
    expand: Callable[..., Expression] | None = None
    gradient: Callable[..., tuple[Expression | None, ...]] | None = None
    ulp: float = 0.5
    ulp64: float = 0.5
    defaults: tuple[float, ...] = ()
    is_condition: bool = False
    takes_conditions: bool = False  # operands are truth values
    doc: str = ""

    @property
    def is_of_integers(self) -> bool:
        """True if it has a meaning for integers alone."""
        return self.expand is None and "f32" not in self.lower

    def gradients(self, g: Expression, node: Expression) -> Sequence[Expression | None]:
        if self.gradient is not None:
            return self.gradient(g, node, *node.operands)
        if self.expand is None:
            return (None,) * self.arity
        # Through the expansion, with the operands held as fresh operands so that each gets its own derivative.
        names = [f"operand{i}" for i in range(self.arity)]
        body = self.expand(*map(arg, names))
        back = dict(zip(names, node.operands, strict=True)) | {"dy": g}
        return [body.differentiate(n).substitute(back) if n in body.args else None for n in names]


TABLE: dict[str, Function] = {}


def _row(name: str, arity: int, numpy: Callable[..., Any], **columns: Any) -> None:
    TABLE[name] = Function(name, arity, numpy, **columns)


def _plain(instruction: str, integer: str = "", rounding: str = "") -> dict[str, Lowering]:
    """One instruction in each compute type; `integer` names the integer form where there is one."""
    def form(text: str) -> Lowering:
        return lambda e, *operands: e(text, *operands)

    rows = {t: form(f"{instruction}{rounding}.{t}") for t in ("f32", "f64")}
    return rows | ({t: form(f"{integer}.{t}") for t in ("s32", "s64")} if integer else {})


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


def _select(e: Emitter, condition: str, a: str, b: str, t: str) -> str:
    return e(f"selp.{t if t[0] == 'f' else 'b' + t[1:]}", a, b, condition)


def _cvt(mode: str) -> dict[str, Lowering]:
    return _each(lambda t: lambda e, x: e(f"cvt.{mode}.{t}.{t}", x))


def _vectorised(f: Callable[[float], float]) -> Callable[[Any], np.ndarray]:
    return np.vectorize(f, otypes=[np.float64])


_erf, _erfc = _vectorised(math.erf), _vectorised(math.erfc)
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


def _popcount(x: Any) -> Any:
    return np.vectorize(lambda v: (int(v) & 0xFFFFFFFFFFFFFFFF).bit_count(), otypes=[np.int64])(x)


def _bits(name: str) -> dict[str, Lowering]:
    def form(t: str) -> Lowering:
        return lambda e, *operands: e(f"{name}.b{t[1:]}", *operands)

    return {t: form(t) for t in ("s32", "s64")}


def _shift(instruction: str) -> dict[str, Lowering]:
    """The amount is taken as 32 bits; PTX clamps it to the width."""
    def form(t: str) -> Lowering:
        width = t[1:]
        return lambda e, a, n: e(f"{instruction}{width}", a, n if t == "s32" else e("cvt.u32.s64", e("min.s64", n, 64)))

    return {t: form(t) for t in ("s32", "s64")}


def _count(instruction: str) -> dict[str, Lowering]:
    return {"s32": lambda e, a: e(f"{instruction}.b32", a), "s64": lambda e, a: e("cvt.s64.s32", e(f"{instruction}.b64", a, to="b32"))}


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
     doc="the sign of the divisor, as NumPy; f64: while |x/y| < 2^100")
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
_row("where", 3, lambda c, a, b: np.where(np.not_equal(c, 0), a, b), lower=_every(_select),
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

_row("fmod", 2, np.fmod, lower={t: el.fmod(t) for t in COMPUTE_TYPES}, gradient=lambda g, y, a, b: (g, -(g * _f("trunc", a / b))),
     doc="the sign of the dividend, as C; f64: while |x/y| < 2^100")
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

# Bits of integers. A shift by the width or more leaves nothing, or the sign.
_row("bitwise_and", 2, np.bitwise_and, lower=_bits("and"))
_row("bitwise_or", 2, np.bitwise_or, lower=_bits("or"))
_row("bitwise_xor", 2, np.bitwise_xor, lower=_bits("xor"))
_row("bitwise_not", 1, np.bitwise_not, lower=_bits("not"))
_row("left_shift", 2, np.left_shift, lower=_shift("shl.b"))
_row("right_shift", 2, np.right_shift, lower=_shift("shr.s"), doc="of a signed number: the sign moves in")
_row("popcount", 1, _popcount, lower=_count("popc"), doc="bits set in 32 or 64; a negative narrow integer counts copies of its sign")

# Activations.
_row("relu", 1, lambda x: np.maximum(x, 0), expand=lambda x: _f("maximum", x, 0), gradient=lambda g, y, x: (where(x > 0, g, 0),))
_row("relu6", 1, lambda x: np.minimum(np.maximum(x, 0), 6), expand=lambda x: _f("clamp", x, 0, 6),
     gradient=lambda g, y, x: (where((x > 0) & (x < 6), g, 0),))
_row("leaky_relu", 2, lambda x, a: np.where(np.greater(x, 0), x, a * x), defaults=(0.01,), expand=lambda x, a: where(x > 0, x, a * x),
     doc="slope below 0; with a per-channel operand as slope it is PReLU")
_row("elu", 2, lambda x, a: np.where(np.greater(x, 0), x, a * np.expm1(np.minimum(x, 0))), defaults=(1.0,),
     expand=lambda x, a: where(x > 0, x, a * _f("expm1", x)),
     gradient=lambda g, y, x, a: (where(x > 0, g, g * (a * _f("exp", x))), where(x > 0, 0, g * _f("expm1", x))))
_row("celu", 2, lambda x, a: np.where(np.greater(x, 0), x, a * np.expm1(np.minimum(x, 0) / a)), defaults=(1.0,),
     expand=lambda x, a: where(x > 0, x, a * _f("expm1", x / a)))
_row("selu", 1, lambda x: SELU_SCALE * np.where(np.greater(x, 0), x, SELU_ALPHA * np.expm1(np.minimum(x, 0))),
     expand=lambda x: where(x > 0, SELU_SCALE * x, (SELU_SCALE * SELU_ALPHA) * _f("expm1", x)))
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
     expand=lambda x: x * _f("sigmoid", x * (2 * GELU_K + (2 * GELU_K * GELU_C) * (x * x))))
_row("quick_gelu", 1, lambda x: x * _sigmoid(1.702 * x), expand=lambda x: x * _f("sigmoid", 1.702 * x))
_row("hard_shrink", 2, lambda x, w: np.where(np.abs(x) > w, x, 0), defaults=(0.5,), expand=lambda x, w: where(_f("abs", x) > w, x, 0))
_row("soft_shrink", 2, lambda x, w: np.where(np.greater(x, w), x - w, np.where(np.less(x, -w), x + w, 0)), defaults=(0.5,),
     expand=lambda x, w: where(x > w, x - w, where(x < -w, x + w, 0)))
_row("tanh_shrink", 1, lambda x: x - np.tanh(x), expand=lambda x: x - _f("tanh", x))
_row("threshold", 3, lambda x, t, v: np.where(np.greater(x, t), x, v), expand=lambda x, t, v: where(x > t, x, v))
_row("swish", 2, lambda x, b: x * _sigmoid(b * x), defaults=(1.0,), expand=lambda x, b: x * _f("sigmoid", b * x))
_row("logit", 1, lambda x: np.log(x / (1 - x)), expand=lambda x: _f("log", x / (1 - x)))

(neg, sign, relu, relu6, leaky_relu, elu, celu, selu, clamp, sigmoid, logsigmoid, hard_sigmoid, tanh, hard_tanh, silu, hard_swish, mish,
 softplus, softsign, gelu, gelu_tanh, quick_gelu, swish, hard_shrink, soft_shrink, tanh_shrink, threshold, logit, exp, exp2, expm1, log,
 log2, log10, log1p, sqrt, rsqrt, reciprocal, square, sin, cos, tan, erf, erfc, normcdf, floor, ceil, trunc, maximum, minimum, fmax,
 fmin, add, sub, mul, div, mod, eq, ne, lt, le, gt, ge, logical_and, logical_or, logical_xor, logical_not, isnan, isinf, atan, asin,
 acos, atan2, sinh, cosh, asinh, acosh, atanh, copysign, hypot, cube, frac, step, lerp, fmod, floor_divide, xlogy, nextafter, ldexp,
 cbrt, sinc, lgamma, digamma, trigamma, erfinv, bitwise_and, bitwise_or, bitwise_xor,
 bitwise_not, left_shift, right_shift, popcount) = map(_function, (
    "neg sign relu relu6 leaky_relu elu celu selu clamp sigmoid logsigmoid hard_sigmoid tanh hard_tanh silu hard_swish mish softplus "
    "softsign gelu gelu_tanh quick_gelu swish hard_shrink soft_shrink tanh_shrink threshold logit exp exp2 expm1 log log2 log10 "
    "log1p sqrt rsqrt reciprocal square sin cos tan erf erfc normcdf floor ceil trunc maximum minimum fmax fmin add sub mul div mod "
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf atan asin acos atan2 sinh cosh asinh acosh atanh "
    "copysign hypot cube frac step lerp fmod floor_divide xlogy nextafter ldexp cbrt sinc lgamma digamma trigamma erfinv bitwise_and "
    "bitwise_or bitwise_xor bitwise_not left_shift right_shift popcount").split())
abs, round, pow = map(_function, ("abs", "round", "pow"))  # noqa: A001 - as in NumPy, the names are those of the functions


# Casts ----------------------------------------------------------------------------------------------------------------------------

_CASTS = ("f64", "f32", "f16", "bf16", "s8", "u8", "s16", "u16", "s32", "u32", "bool")


def round_to(values: Any, name: str) -> Any:
    """`values` rounded to the storage type `name`, to nearest even; integers saturate and NaN becomes 0. Integers stay as they are kept."""
    kind = dtypes.dtype(name)
    values = np.asarray(values)
    if kind.kind == "bool":
        return (values != 0).astype(np.int64)
    if kind.is_float:
        wide = values.astype(np.float32) if name == "bf16" else values
        return wide.astype(kind.numpy).astype(np.float64)
    low, high = (0, kind.max) if kind.kind == "uint" else (-kind.max - 1, kind.max)
    if values.dtype.kind == "f":
        return np.clip(np.rint(np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)), low, high)
    return np.clip(values, low, high)


def _lower_cast(e: Emitter, x: str, name: str, t: str) -> str:
    kind = dtypes.dtype(name)
    if kind.kind == "bool":
        is_set = e(f"setp.{'neu' if t[0] == 'f' else 'ne'}.{t}", x, 0.0)
        return _select(e, is_set, el.literal(1.0, t), el.literal(0.0, t), t)
    if t[0] == "s":
        if kind.is_float:
            raise InvalidArgument(f"expression: cast to {name} has no form in {t} arithmetic.")
        low, high = (0, kind.max) if kind.kind == "uint" else (-kind.max - 1, kind.max)
        if t == "s32" and kind.bits == 32:
            low, high = max(low, -(2**31)), 2**31 - 1
        return e(f"min.{t}", e(f"max.{t}", x, int(low)), int(high))
    if not kind.is_float:
        whole = e(f"cvt.rni.{kind.ptx}.{t}", x)
        source = ("s" if kind.kind == "int" else "u") + "32"
        return e(f"cvt.rn.{t}.{source}", whole)
    if name == "f64" or name == t:
        return x
    if name == "f32":
        return e("cvt.f64.f32", e("cvt.rn.f32.f64", x))
    if name == "f16":
        return e(f"cvt.{t}.f16", e(f"cvt.rn.f16.{t}", x))
    narrow = e("cvt.rn.f32.f64", x) if t == "f64" else x
    back = e("mov.b32", f"{{{e('mov.b16', 0)}, {e('cvt.rn.bf16.f32', narrow)}}}", to="f32")
    return e("cvt.f64.f32", back) if t == "f64" else back


# Lowering -------------------------------------------------------------------------------------------------------------------------

@lru_cache(maxsize=4096)
def _expand(expression: Expression) -> Expression:
    done: dict[Expression, Expression] = {}
    for node in expression.nodes():
        operands = tuple(done[o] for o in node.operands)
        row = TABLE.get(node.op)
        if node.op == "pow" and operands[1].op == "const" and operands[1].value in (1.0, 2.0, 3.0, 4.0):
            power = operands[0]
            for _ in range(int(operands[1].value) - 1):
                power = power * operands[0]
            done[node] = power
        elif row is not None and row.expand is not None:
            done[node] = _expand(row.expand(*operands))
        else:
            done[node] = Expression(node.op, operands, node.value) if operands else node
    return done[expression]


def _fused_products(body: Expression) -> dict[Expression, Expression]:
    """For each sum one of whose terms is a product used nowhere else: that product. The sum becomes one fma."""
    users: dict[Expression, int] = {}
    for node in body.nodes():
        for operand in node.operands:
            users[operand] = users.get(operand, 0) + 1
    sums = (n for n in body.nodes() if n.op == "add")
    return {n: p for n in sums for p in n.operands if p.op == "mul" and users[p] == 1 and p not in body.outputs}


def _lower(expression: Expression, registers: Mapping[str, str], results: Sequence[str], compute: str, brief: bool) -> str:
    if compute not in COMPUTE_TYPES:
        raise InvalidArgument(f"lower: compute is {compute!r} (expected one of {', '.join(COMPUTE_TYPES)}).")
    if len(results) != expression.num_outputs:
        raise InvalidArgument(f"lower: {len(results)} result registers for {expression.num_outputs} outputs.")
    e = Emitter(brief=brief)
    value: dict[Expression, str] = {}  # in the compute type
    truth: dict[Expression, str] = {}  # as predicate
    untyped = compute if compute[0] == "f" else "b" + compute[1:]

    def as_value(node: Expression) -> str:
        if node not in value:
            one, zero = el.literal(1.0, compute), el.literal(0.0, compute)
            value[node] = e(f"selp.{untyped}", one, zero, truth[node])
        return value[node]

    def as_truth(node: Expression) -> str:
        if node not in truth:
            truth[node] = e(f"setp.{'neu' if compute[0] == 'f' else 'ne'}.{compute}", value[node], 0.0)
        return truth[node]

    body = expression.expanded()
    fused = _fused_products(body) if compute[0] == "f" else {}
    skipped = set(fused.values())
    for node in body.nodes():
        if node in skipped:
            continue
        if node.op in ("arg", "scalar"):
            name = node.value if node.op == "scalar" else node.value[0]
            if name not in registers:
                raise InvalidArgument(f"lower: no register for {name!r} (given: {', '.join(registers) or 'none'}).")
            value[node] = registers[name]
        elif node.op == "const":
            if compute[0] == "s" and node.value != int_or_nan(node.value) and node.value != 0:
                raise InvalidArgument(f"expression: the constant {node.value} has no form in {compute} arithmetic.")
            value[node] = el.literal(node.value, compute)
        elif node.op == "cast":
            value[node] = _lower_cast(e, as_value(node.operands[0]), node.value, compute)
        elif node.op != "tuple":
            row = TABLE[node.op]
            write = row.lower.get(compute)
            if write is None:
                raise InvalidArgument(f"expression: {node.op} has no form in {compute} arithmetic (has: {', '.join(row.lower)}).")
            product = fused.get(node)
            if product is not None:  # a * b + c, the product used nowhere else
                a, b = map(as_value, product.operands)
                value[node] = e(f"fma.rn.{compute}", a, b, as_value(node.operands[1 - node.operands.index(product)]))
                continue
            takes_truth = (True,) * row.arity if row.takes_conditions else (node.op == "where",) + (False,) * (row.arity - 1)
            operands = [as_truth(o) if t else as_value(o) for o, t in zip(node.operands, takes_truth, strict=True)]
            (truth if row.is_condition else value)[node] = write(e, *operands)
    # All results are moved at the end, so that a result may be a register that was read; a move into an operand waits for a copy.
    finals = [as_value(o) for o in body.outputs]
    targets = set(results)
    finals = [e(f"mov.{untyped}", f) if f in targets and f != r and len(results) > 1 else f for f, r in zip(finals, results, strict=True)]
    moves = [f"mov.{untyped} {r}, {f};" for r, f in zip(results, finals, strict=True) if r != f]
    return "\n".join(["    {", *(f"        {line}" for line in (*e.declarations(), *e.lines, *moves)), "    }", ""])


# Text -----------------------------------------------------------------------------------------------------------------------------

_BINARY = {"add": ("+", 5), "sub": ("-", 5), "mul": ("*", 6), "div": ("/", 6), "mod": ("%", 6), "pow": ("**", 8)}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_BINARY_NODES = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Mod: "mod", ast.Pow: "pow", ast.BitAnd: "logical_and",
                 ast.BitOr: "logical_or", ast.BitXor: "logical_xor"}
_COMPARE_NODES = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}


@lru_cache(maxsize=4096)
def _format(expression: Expression) -> str:
    users: dict[Expression, int] = {}
    for node in expression.nodes():
        for operand in node.operands:
            users[operand] = users.get(operand, 0) + 1
    taken = set(expression.args) | set(expression.scalars)
    names: dict[Expression, str] = {}
    has_acc = "acc" in expression.args

    def constant(value: float) -> str:
        if not math.isfinite(value):
            return "nan" if value != value else "inf" if value > 0 else "-inf"
        return str(int(value)) if value == int_or_nan(value) and value < 1e15 and value > -1e15 else repr(value)

    def text(node: Expression, level: int) -> str:
        if node in names:
            return names[node]
        if node.operands and users.get(node, 0) > 1 and node.op != "tuple":
            name = f"t{len(names)}"
            while name in taken:
                name = "_" + name
            written = plain(node, 0)
            # Parts of `node` may have taken the number meanwhile.
            index = len(names)
            while (name := f"t{index}") in taken:
                index += 1
            taken.add(name)
            names[node] = name
            return f"({name} := {written})"
        return plain(node, level)

    def plain(node: Expression, level: int) -> str:
        if node.op == "arg":
            name, axis = node.value
            bare = "c" if has_acc and name in CHANNEL_NAMES else None
            return f"{name}[c]" if axis == "c" else f"{name}[:]" if bare == "c" else name
        if node.op == "scalar":
            return f"scalar({node.value})"
        if node.op == "const":
            written, precedence = constant(node.value), 7 if constant(node.value).startswith("-") else 10
        elif node.op == "tuple":
            return ", ".join(text(o, 1) for o in node.operands)
        elif node.op == "cast":
            return f"cast({text(node.operands[0], 1)}, {node.value})"
        elif node.op in _BINARY:
            sign, precedence = _BINARY[node.op]
            right = precedence if node.op == "pow" else precedence + 1
            left = precedence + 1 if node.op == "pow" else precedence
            written = f"{text(node.operands[0], left)} {sign} {text(node.operands[1], right)}"
        elif node.op in _COMPARE:
            precedence = 2
            written = f"{text(node.operands[0], 3)} {_COMPARE[node.op]} {text(node.operands[1], 3)}"
        elif node.op == "neg":
            precedence, written = 7, f"-{text(node.operands[0], 8)}"
        else:
            return f"{node.op}({', '.join(text(o, 1) for o in node.operands)})"
        return f"({written})" if precedence < level else written

    return text(expression, 0)


def parse(source: str | Expression | Any) -> Expression:
    """The expression of a text (module docstring), of a function's name ("gelu" is gelu(acc)), of a name in COMMON ("bias_relu"), or of
    a tuple of these, each an output.

    Raises InvalidArgument naming the part that is off, with near matches of an unknown function.
    """
    if isinstance(source, Expression):
        return source
    if isinstance(source, tuple) and source:
        return outputs(*map(parse, source))
    if not isinstance(source, str):
        raise InvalidArgument(f"expression: {source!r} is no expression (expected text or an Expression).")
    try:
        return _parse(source)
    except RecursionError:
        raise InvalidArgument(f"expression: {source[:40]!r}... nests too deeply (expected fewer operations within each other).") from None


@lru_cache(maxsize=4096)
def _parse(source: str) -> Expression:
    text = COMMON.get(source.strip(), source.strip())
    if text in TABLE:
        return apply(text, acc)
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise InvalidArgument(f"expression: {source!r} does not parse ({error.msg} at column {error.offset}).") from None
    except ValueError as error:  # a null character
        raise InvalidArgument(f"expression: {source!r} does not parse ({error}).") from None
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    word_alone = tree.id if isinstance(tree, ast.Name) and tree.id not in ("acc", "x", "inf", "nan") else ""
    if difflib.get_close_matches(word_alone, [*TABLE, *COMMON], 1, 0.75):
        raise InvalidArgument(_unknown(word_alone))
    channel = CHANNEL_NAMES if "acc" in names else ()
    bound: dict[str, Expression] = {}

    def build(node: ast.expr) -> Expression:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return const(node.value)
        if isinstance(node, ast.Name):
            if node.id in bound:
                return bound[node.id]
            if node.id in ("inf", "nan"):
                return const(float(node.id))
            return arg(node.id, "c" if node.id in channel else None)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            if isinstance(node.slice, ast.Name) and node.slice.id == "c":
                return arg(node.value.id, "c")
            if isinstance(node.slice, ast.Slice) and not (node.slice.lower or node.slice.upper or node.slice.step):
                return arg(node.value.id)
        if isinstance(node, ast.NamedExpr):
            bound[node.target.id] = build(node.value)
            return bound[node.target.id]
        if isinstance(node, ast.Tuple) and node.elts:
            return outputs(*map(build, node.elts))
        if isinstance(node, ast.UnaryOp):
            inner = build(node.operand)
            if isinstance(node.op, ast.USub):
                return const(-inner.value) if inner.op == "const" else -inner
            if isinstance(node.op, ast.UAdd):
                return inner
            return apply("logical_not", inner)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY_NODES:
            left = build(node.left)
            return apply(_BINARY_NODES[type(node.op)], left, build(node.right))
        if isinstance(node, ast.BoolOp):
            name = "logical_and" if isinstance(node.op, ast.And) else "logical_or"
            value = build(node.values[0])
            for other in node.values[1:]:
                value = apply(name, value, build(other))
            return value
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE_NODES:
            left = build(node.left)
            return apply(_COMPARE_NODES[type(node.ops[0])], left, build(node.comparators[0]))
        if isinstance(node, ast.IfExp):
            condition = build(node.test)
            return where(condition, build(node.body), build(node.orelse))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return call(node.func.id, node.args)
        raise InvalidArgument(f"expression: {ast.unparse(node)!r} has no meaning here (in {source!r}).")

    def word(node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        raise InvalidArgument(f"expression: {ast.unparse(node)!r} is no name (in {source!r}).")

    def call(name: str, operands: list[ast.expr]) -> Expression:
        if name == "scalar" and len(operands) == 1:
            return scalar(word(operands[0]))
        if name == "arg" and 1 <= len(operands) <= 2:
            return arg(word(operands[0]), word(operands[1]) if len(operands) == 2 else None)
        if name == "cast" and len(operands) == 2:
            return cast(build(operands[0]), word(operands[1]))
        return apply(name, *map(build, operands))

    return build(tree)
