"""The nodes of an expression, what builds them, and what a function of the table has to say of itself.

TABLE has one row a function (see functions.py, which fills it): name, PTX per compute type or an expansion into other functions, NumPy
reference, derivative, error bound.
"""

from __future__ import annotations

import difflib
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ... import dtypes
from ...errors import InvalidArgument

COMPUTE_TYPES = ("f32", "f64", "s32", "s64", "u64")
INTEGER_TYPES = ("s32", "s64", "u64")
HOISTED = ("div", "reciprocal", "sqrt", "where")  # of operands that stay: branches in machine code, and choices of several instructions
CHANNEL_NAMES = ("bias", "scale", "shift")  # per-channel where the text also names acc
COMMON = {
    "bias": "acc + bias[c]", "residual": "acc + residual",
    **{f"bias_{f}": f"{f}(acc + bias[c])" for f in ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")},
    "bias_residual": "acc + bias[c] + residual", "bias_residual_relu": "relu(acc + bias[c] + residual)",
    "residual_relu": "relu(acc + residual)", "scale_bias": "acc * scale[c] + bias[c]", "scale_bias_relu": "relu(acc * scale[c] + bias[c])",
    "scale_bias_residual_relu": "relu(acc * scale[c] + bias[c] + residual)", "identity": "acc",
}
Lowering = Callable[..., str]


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
        from .text import parse

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
        from .text import written

        return written(self)

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

    def hoisted(self, still: Collection[str]) -> tuple[Expression, tuple[tuple[str, Expression], ...]]:
        """The expression with quotients, roots and choices of the operands `still` alone as operands of their own, and these by name: what
        the assembler makes branches of and so finds anew wherever it stands, and what takes several instructions."""
        parts: dict[Expression, str] = {}
        done: dict[Expression, Expression] = {}
        are_still: set[Expression] = set()
        for node in self.nodes():
            if node.op in ("const", "scalar") or (node.op == "arg" and node.value[0] in still):
                are_still.add(node)
            elif node.operands and node.op != "tuple" and all(o in are_still for o in node.operands):
                are_still.add(node)
                if node.op in HOISTED and any(n.op == "arg" for n in node.nodes()):
                    done[node] = Expression("arg", (), (parts.setdefault(node, f"still{len(parts)}"), None))
                    continue
            done[node] = Expression(node.op, tuple(done[o] for o in node.operands), node.value) if node.operands else node
        return done[self], tuple((name, node) for node, name in parts.items() if name in done[self].args)

    def expanded(self) -> Expression:
        """The same with every composite function written out in the functions that have PTX of their own."""
        return _expand(self)

    def lower(self, registers: Mapping[str, str], results: Sequence[str], compute: str = "f32", brief: bool = False) -> str:
        """A PTX scope that reads `registers` (by operand and scalar name, in the compute type) and writes `results`, one an output.

        compute: one of COMPUTE_TYPES. Conditions are written as 1 or 0. Results may be registers that are also read. brief: see
        elementary.Emitter.
        Raises InvalidArgument if a register is missing or a function has no form in the compute type.
        """
        from .lowering import lower

        return lower(self, registers, results, compute, brief)

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
                    values[node] = TABLE[node.op].numpy(*_alike([_as_number(values[o]) for o in node.operands]))
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


def _alike(values: list[Any]) -> list[Any]:
    """Counts and truth values beside 64 bits without sign, in that type: NumPy would take them together for floats."""
    if not any(getattr(v, "dtype", None) == np.uint64 for v in values):
        return values
    return [v.astype(np.uint64) if getattr(v, "dtype", None) == np.int64 else v for v in values]


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
    if name not in CASTS:
        raise InvalidArgument(f"cast: dtype is {name} (expected one of {', '.join(CASTS)}).")
    return Expression("cast", (as_expression(value),), name)


def apply(name: str, *operands: Value) -> Expression:
    """The function `name` of TABLE of its operands; missing trailing parameters take their defaults."""
    row = TABLE.get(name)
    if row is None:
        raise InvalidArgument(unknown(name))
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


def unknown(name: str) -> str:
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


# Casts ----------------------------------------------------------------------------------------------------------------------------

CASTS = ("f64", "f32", "f16", "bf16", "e4m3", "e5m2", "s8", "u8", "s16", "u16", "s32", "u32", "bool")


def _to_odd(values: np.ndarray) -> np.ndarray:
    """float64 in float32, what it cannot hold as the neighbour whose last bit is 1: rounded on from there as if at once."""
    near = values.astype(np.float32)
    chopped = np.where(np.abs(near) > np.abs(values), np.nextafter(near, np.float32(0)), near)
    return np.where(near == values, near, (chopped.view(np.uint32) | 1).view(np.float32)) if values.ndim else _to_odd(values[None])[0]


def round_to(values: Any, name: str, saturate: bool = True) -> Any:
    """`values` rounded to the storage type `name`, to nearest even; integers saturate and NaN becomes 0. Integers stay as they are kept.

    saturate: of 8-bit floats, infinities too; else what is beyond is an infinity (e5m2) or NaN (e4m3)."""
    kind = dtypes.dtype(name)
    values = np.asarray(values)
    if kind.kind == "bool":
        return (values != 0).astype(np.int64)
    if kind.is_float:
        wide = values.astype(np.float32) if name == "bf16" else values
        if kind.num_bytes == 1:
            wide = _to_odd(np.clip(wide, -kind.max, kind.max) if saturate else wide)
        return wide.astype(kind.numpy).astype(np.float64)
    low, high = (0, kind.max) if kind.kind == "uint" else (-kind.max - 1, kind.max)
    if values.dtype.kind == "f":
        return np.clip(np.rint(np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)), low, high)
    return np.clip(values, low, high)

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

