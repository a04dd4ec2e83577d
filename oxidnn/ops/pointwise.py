"""Pointwise ops: an expression over broadcast tensors, and activations forward and backward as expressions of the same table.

    pointwise expression="relu(x * scale[c] + bias[c])" x=... scale=... bias=...      y (see output_names_of)
    activation name="gelu" x=...                 y
    activation_backward name="gelu" dy=... x=... dx

Operands broadcast as NumPy's; a per-channel operand has shape (C,) and lies along dimension 1. An output may lie exactly where an input
of the same description lies. Types mix freely. Arithmetic is f64 if any
operand is, exact integers if all operands are integers and the expression has an integer form, else f32. Results saturate where their
type is narrower than the arithmetic; shifts and counts of bits are of the type that the operands combine to, as NumPy's. u64 beside
integers without sign computes modulo 2^64; beside integers with sign, as NumPy has it, in f64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import dtypes
from ..codegen.pointwise import TABLE, Expression, apply, arg, const, parse
from ..dtypes import BOOL, DType, dtype
from ..errors import InvalidArgument, expected
from ..tensor import TensorDesc, packed_strides
from .base import OpDef, Operand, Policy, Problem
from .checks import canonical, check_bool, check_expression, check_number, check_output, check_type
from .epilogue import scalars_of

STORED = ("f64", "f32", "f16", "bf16", "e4m3", "e5m2", "s8", "u8", "s16", "u16", "s32", "u32", "s64", "bool")
MAX_INPUTS = 8
MAX_RANK = 8


@dataclass(frozen=True, slots=True)
class View:
    """What an expression's operand is a part of: the tensor of that name, from the element at `offset` on."""

    operand: Operand
    tensor: str
    offset: int = 0


@dataclass(frozen=True)
class PointwiseProblem(Problem):
    """expression: over the operands' names. shape: of the outputs. compute: "f32", "f64", "s32", "s64" or "u64". values: scalars of the
    expression that the problem fixes; the others are given with each call. saturate: 8-bit floats take their largest number for what is
    beyond it, not an infinity or NaN. views: of the expression's operands and results, where they are not the problem's.
    """

    expression: Expression = None  # type: ignore[assignment]
    shape: tuple[int, ...] = ()
    compute: str = "f32"
    values: tuple[tuple[str, float], ...] = ()
    saturate: bool = True
    views: tuple[View, ...] = ()

    @property
    def seen(self) -> tuple[View, ...]:
        """The expression's operands, then its results."""
        return self.views or tuple(View(o, o.name) for o in self.operands)

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Every element is read by the thread that writes it, before it does."""
        return tuple((o.name, i.name) for o in self.outputs for i in self.inputs)

    @property
    def is_brief(self) -> bool:
        """Whether f32 results are rounded to 16 bits, so that functions may err by elementary.BRIEF_ULP units before."""
        return self.compute == "f32" and all(o.desc.dtype.is_float and o.desc.dtype.num_bytes == 2 for o in self.outputs)

    def strides(self, operand: Operand) -> tuple[int, ...]:
        """Element strides of `operand` along the output's dimensions; 0 where it is broadcast."""
        rank = len(self.shape)
        if not operand.is_output and self.expression.axis(operand.name) == "c":
            return tuple(operand.desc.strides[0] if i == 1 and operand.desc.shape[0] > 1 else 0 for i in range(rank))
        lead = rank - operand.desc.rank
        return (0,) * lead + tuple(0 if n == 1 else s for n, s in zip(operand.desc.shape, operand.desc.strides, strict=True))

    @property
    def flops(self) -> int:
        numel = 1
        for n in self.shape:
            numel *= n
        return numel * sum(1 for n in self.expression.nodes() if n.operands)


def promote(kinds: list[DType]) -> DType:
    """The type that float operands combine to (f16 with bf16: f32); integers as NumPy's among themselves, bool last."""
    floats = {k.name for k in kinds if k.is_float}
    if floats:
        return dtypes.F64 if "f64" in floats else dtypes.F32 if len(floats) > 1 else dtype(floats.pop())
    if not kinds:
        return dtypes.F32
    return dtype(np.result_type(*(k.numpy for k in kinds)))


def has_integer_form(expression: Expression) -> bool:
    try:
        expression.lower({n: "%r" for n in expression.args + expression.scalars}, ["%r"] * expression.num_outputs, "s64")
    except InvalidArgument:
        return False
    return not expression.scalars


def _within(expression: Expression, kind: DType, width: int) -> Expression:
    """The expression over integers of type `kind` with what its width decides written out, in arithmetic of `width` bits.

    Shifts wrap, and bits beyond the type do not count."""
    bits = 1 if kind.kind == "bool" else kind.bits
    ones, half = const(2.0**bits - 1), const(2.0 ** (bits - 1))  # where they are used at most 2^32
    done: dict[Expression, Expression] = {}
    for node in expression.nodes():
        operands = tuple(done[o] for o in node.operands)
        if node.op in ("popcount", "clz", "ctz") and operands[1] == const(0):
            operands = operands[0], const(bits)
        made = Expression(node.op, operands, node.value) if operands else node
        if node.op == "bitwise_not" and kind.kind != "int" and bits < width:
            made = apply("bitwise_xor", operands[0], ones)
        if node.op == "left_shift" and bits < width:
            made = apply("bitwise_and", made, ones)
            if kind.kind == "int":  # the upper half stands for the negative numbers
                made = apply("bitwise_xor", made, half) - half
        done[node] = made
    return done[expression]


def like(desc: TensorDesc, kind: DType) -> TensorDesc:
    """A dense tensor of the shape of `desc` whose dimensions lie in memory in the order of its strides, broadcast ones outermost."""
    order = tuple(sorted(range(desc.rank), key=lambda i: (desc.strides[i] != 0 and desc.shape[i] > 1, -abs(desc.strides[i]), i)))
    varying = [i for i in range(desc.rank) if desc.shape[i] > 1]
    if any(desc.strides[i] == 0 for i in varying):
        order = tuple(range(desc.rank))
    else:  # dimensions of size 1 keep their place in the plain order
        order = tuple(i for i in order if desc.shape[i] <= 1) + tuple(i for i in order if desc.shape[i] > 1)
    return TensorDesc(kind, desc.shape, packed_strides(desc.shape, order))


def output_names_of(expression: Expression) -> tuple[str, ...]:
    """"y", or "y0", "y1", ... for several; "out" in place of "y" where the expression has operands of these names."""
    count = expression.num_outputs
    for stem in ("y", "out"):
        names = (stem,) if count == 1 else tuple(f"{stem}{i}" for i in range(count))
        if not set(names) & set(expression.args):
            return names
    raise expected("pointwise", "expression", f"one over {', '.join(expression.args)}", "operands not named like the outputs (y or out)")


def _broadcast(op: str, expression: Expression, tensors: Mapping[str, TensorDesc]) -> tuple[int, ...]:
    full = [tensors[n] for n in expression.args if expression.axis(n) is None]
    try:
        shape = tuple(int(n) for n in np.broadcast_shapes(*(d.shape for d in full)))
    except ValueError:
        shapes = ", ".join(f"{n} {list(tensors[n].shape)}" for n in expression.args)
        raise InvalidArgument(f"{op}: the operands' shapes do not broadcast together: {shapes}.") from None
    for name in expression.args:
        if expression.axis(name) == "c":
            if len(shape) < 2:
                raise expected(op, name, "per-channel", "operands of rank 2 or more beside it", f"The output's shape is {list(shape)}.")
            if tensors[name].shape not in ((shape[1],), (1,)):
                raise expected(op, f"shape of {name}", list(tensors[name].shape), f"[{shape[1]}], the channels of {list(shape)}")
    if len(shape) > MAX_RANK:
        raise expected(op, "rank", len(shape), f"at most {MAX_RANK}")
    return shape


def pointwise_problem(op: str, expression: Expression, names: tuple[str, ...], tensors: Mapping[str, TensorDesc],
                      attrs: tuple[tuple[str, Any], ...], output_names: tuple[str, ...], kinds: Any, policy: Policy,
                      default: str | None = None, saturate: bool = True) -> PointwiseProblem:
    """The problem of an expression over the operands `names`, checked. kinds: types of the outputs, or None: as their expressions say, or
    the type of the operand `default`."""
    for name in names:
        if name not in tensors:
            raise expected(op, name, "missing", f"a tensor for each of {', '.join(names)}")
    for name in tensors:
        if name not in names and name not in output_names:
            raise expected(op, name, "given", f"operands {', '.join(names)} and outputs {', '.join(output_names)}")
    if len(names) > MAX_INPUTS:
        raise expected(op, "expression", f"one of {len(names)} tensors", f"at most {MAX_INPUTS}")
    shape = _broadcast(op, expression, tensors)
    inputs = [tensors[n].dtype for n in names]
    integers = bool(inputs) and not any(k.is_float for k in inputs) and has_integer_form(expression)
    chosen: list[DType] = []
    for i, node in enumerate(expression.outputs):
        if kinds is not None:
            chosen.append(dtype(kinds[i]))
        elif node.is_condition:
            chosen.append(BOOL)
        elif node.op == "cast":
            chosen.append(dtype(node.value))
        elif default is not None:
            chosen.append(tensors[default].dtype)
        else:
            chosen.append(promote(inputs) if integers or any(k.is_float for k in inputs) else dtypes.F32)
    model = next((tensors[n] for n in names if tensors[n].shape == shape and expression.axis(n) is None), None)
    outputs = []
    for name, kind in zip(output_names, chosen, strict=True):
        desc = tensors.get(name) or (canonical(like(model, kind)) if model is not None else TensorDesc.packed(kind, shape))
        check_output(op, name, desc, shape, tensors, dtypes.TABLE)
        if kinds is not None and desc.dtype != kind:
            raise expected(op, f"type of {name}", desc.dtype, kind)
        outputs.append(Operand(name, desc, True))
    every = [*inputs, *(o.desc.dtype for o in outputs)]
    has_u64 = any(k.name == "u64" for k in inputs)
    if any(k.name == "f64" for k in every) or has_u64 and any(k.kind == "int" for k in inputs):
        compute = "f64"
    elif integers and not any(o.desc.dtype.is_float for o in outputs):
        constants = [node.value for node in expression.nodes() if node.op == "const"]
        is_wide = any(k.bits == 64 or k.name == "u32" for k in every) or any(not -(2**31) <= c < 2**31 for c in constants)
        compute = "u64" if has_u64 else "s64" if is_wide else "s32"
        least, most = (0, 2**64) if has_u64 else (-(2**63), 2**63)
        for constant in constants:
            if not least <= constant < most:
                holder = "u64" if has_u64 else "s64"
                raise expected(op, "expression", f"one with the constant {constant:.17g} over integers", f"constants that {holder} holds")
    else:
        compute = "f32"
    if compute[0] != "f":
        expression = _within(expression, promote(inputs), int(compute[1:]))
    if compute[0] == "f":  # names what has no form before anything is built
        expression.lower({n: "%r" for n in expression.args + expression.scalars}, ["%r"] * expression.num_outputs, compute)
    operands = tuple(Operand(n, tensors[n]) for n in names) + tuple(outputs)
    scalars = scalars_of(op, expression, compute)  # an expression with any computes in floats
    return PointwiseProblem(op, operands, attrs, scalars, expression=expression, shape=shape, compute=compute, saturate=saturate,
                            policy=policy)


def make_pointwise(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> PointwiseProblem:
    """expression: text or Expression. dtype: output type, or a tuple of one each; default: the inputs' promoted type, bool for conditions,
    the type of an outermost cast. saturate: see PointwiseProblem."""
    if "expression" not in attrs:
        raise expected("pointwise", "expression", "missing", "an expression such as 'relu(x + y)'")
    expression = check_expression("pointwise", "expression", attrs["expression"])
    count = expression.num_outputs
    output_names = output_names_of(expression)
    kinds = attrs.get("dtype")
    normal: list[tuple[str, Any]] = [("expression", expression)]
    if kinds is not None:
        kinds = tuple(check_type("pointwise", "dtype", k).name for k in (kinds if isinstance(kinds, (tuple, list)) else (kinds,) * count))
        if len(kinds) != count:
            raise expected("pointwise", "dtype", kinds, f"{count} types, one an output")
        normal.append(("dtype", kinds[0] if count == 1 else kinds))
    saturate = check_bool("pointwise", "saturate", attrs.get("saturate", True))
    if not saturate:
        normal.append(("saturate", False))
    return pointwise_problem("pointwise", expression, expression.args, tensors, tuple(normal), output_names, kinds, policy,
                             saturate=saturate)


def activation_expression(op: str, attrs: Mapping[str, Any]) -> tuple[Expression, tuple[tuple[str, Any], ...]]:
    """The expression over "x" of the attributes `name` (a function of one tensor) and `parameters` (its numbers), and the attributes."""
    name = attrs.get("name")
    row = TABLE.get(name) if isinstance(name, str) else None
    if row is None or row.is_condition or row.arity - len(row.defaults) > 1 and name not in ("clamp", "threshold"):
        if row is None and isinstance(name, str):
            parse(name + "(x)")  # names near matches
        raise expected(op, "name", repr(name), "a function of one tensor, e.g. 'relu' or 'gelu'")
    parameters = attrs.get("parameters", ())
    parameters = tuple(parameters) if isinstance(parameters, (tuple, list)) else (parameters,)
    parameters = tuple(check_number(op, "parameters", p, signed_zero=True) for p in parameters)
    normal: list[tuple[str, Any]] = [("name", name)]
    if parameters:
        normal.append(("parameters", parameters))
    return apply(row.name, arg("x"), *parameters), tuple(normal)


def make_activation(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> PointwiseProblem:
    """name: a function of the table. parameters: its numbers, e.g. the slope of leaky_relu. y has the type of x unless it is given."""
    expression, normal = activation_expression("activation", attrs)
    return pointwise_problem("activation", expression, ("x",), tensors, normal, ("y",), None, policy, default="x")


def make_activation_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> PointwiseProblem:
    """dx = dy * derivative at x, in the type of x unless dx is given."""
    expression, normal = activation_expression("activation_backward", attrs)
    for name in ("dy", "x"):
        if name not in tensors:
            raise expected("activation_backward", name, "missing", "tensors dy and x")
    if tensors["dy"].shape != tensors["x"].shape:
        raise expected("activation_backward", "shape of dy", list(tensors["dy"].shape), f"{list(tensors['x'].shape)}, the shape of x")
    gradient = expression.differentiate("x")
    for name in ("dy", "x"):  # a gradient that does not need x (or dy) still takes the operand
        if name not in gradient.args:
            gradient = apply("where", apply("eq", arg(name), arg(name)), gradient, gradient)
    return pointwise_problem("activation_backward", gradient, ("dy", "x"), tensors, normal, ("dx",), None, policy, default="x")


_ACTIVATION_ATTRS = (("name", None), ("parameters", ()))
DEFINITIONS = (
    OpDef("pointwise", (), ("y",), make_pointwise,  # the expression names the operands
          attrs=(("expression", None), ("dtype", None), ("saturate", True))),
    OpDef("activation", ("x",), ("y",), make_activation, attrs=_ACTIVATION_ATTRS),
    OpDef("activation_backward", ("dy", "x"), ("dx",), make_activation_backward, attrs=_ACTIVATION_ATTRS),
)
