"""Epilogues as problems see them: the expression over a matmul's result, and how its tensors broadcast over the output."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..codegen import pointwise as expr
from ..codegen.pointwise import Expression
from ..dtypes import E4M3, E5M2, F32, F64, S8, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import Operand, Scalar
from .checks import FLOATS, check_dtype, check_expression, check_type, describe

TYPES = FLOATS  # of every operand of convolution and GEMM
NARROW = (E4M3, E5M2, S8)  # that results of norms may have too


def default_epilogue(given: Collection[str]) -> Expression | None:
    """acc plus bias (a vector over channels) and residual, where given; None for plain acc."""
    expression = expr.acc
    if "bias" in given:
        expression = expression + expr.arg("bias", axis="c")
    if "residual" in given:
        expression = expression + expr.arg("residual")
    return None if expression == expr.acc else expression


def resolve(op: str, epilogue: str | Expression | None, tensors: Mapping[str, TensorDesc], roles: Sequence[str],
            max_outputs: int = 1) -> Expression | None:
    """The Expression of the attribute `epilogue`, or the default; None for plain acc.

    Checks that its tensors are there and that none is left over. `roles` are the op's own tensors, which it cannot name.
    """
    given = [name for name in tensors if name not in roles]
    expression = default_epilogue(given) if epilogue is None else check_expression(op, "epilogue", epilogue)
    if expression is not None and expression.num_outputs > max_outputs:
        allowed = "one output" if max_outputs == 1 else f"at most {max_outputs} outputs"
        raise expected(op, "epilogue", f"an expression of {expression.num_outputs} outputs", allowed, describe(tensors))
    named = [name for name in expression.args if name != "acc"] if expression is not None else []
    for name in named:
        if name in roles:
            raise expected(op, "epilogue", f"{expression}, which names {name}", f"names other than {', '.join(roles)}", describe(tensors))
        if name not in given:
            raise expected(op, "epilogue", f"{expression}, whose {name} is missing", f"{name} among the operands", describe(tensors))
    for name in given:
        if name not in named:
            raise expected(op, name, "given", f"an epilogue that uses it (epilogue is {expression})", describe(tensors))
    return None if expression == expr.acc else expression


def resolve_scaled(op: str, given: str | Expression | None, tensors: Mapping[str, TensorDesc],
                   roles: Sequence[str]) -> tuple[Expression | None, Expression | None]:
    """(the epilogue, as `resolve`, divided by the operand scale_y of one element, where that is given; the part of it that a case has to
    name, None where it is the default)."""
    default = default_epilogue([n for n in tensors if n not in (*roles, "scale_y")])
    written = default if given is None else check_expression(op, "epilogue", given)
    if "scale_y" in tensors:
        scale = tensors["scale_y"]
        if scale.numel != 1 or scale.rank > 1:
            raise expected(op, "shape of scale_y", list(scale.shape), "[1]", describe(tensors))
        given = (expr.acc if written is None else written) / expr.arg("scale_y")
    return resolve(op, given, tensors, roles), None if written in (expr.acc, default) else written


def result_kind(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], x: TensorDesc) -> DType:
    """The type of y: that of the attribute out_dtype, of y if it is given, or of x."""
    given = attrs.get("out_dtype")
    kind = check_type(op, "out_dtype", given) if given is not None else tensors.get("y", x).dtype
    if kind not in (*TYPES, *NARROW):
        raise expected(op, "out_dtype" if given is not None else "type of y", kind, ", ".join(t.name for t in (*TYPES, *NARROW)))
    return kind


@lru_cache(maxsize=256)
def activation_gradient(op: str, activation: str, saved: str = "saved") -> Expression:
    """acc times the derivative of an activation at the element of `saved`, a tensor of the output's shape."""
    return activation_of(op, activation).differentiate("x").substitute({"dy": expr.acc, "x": expr.arg(saved)})


@lru_cache(maxsize=256)
def batch_norm_epilogue(op: str, eps: float, activation: str | None, given: tuple[str, ...]) -> Expression:
    """activation((acc - mean) / sqrt(variance + eps) * gamma + beta + residual), vectors over channels; of these those that are given."""
    value = (expr.acc - expr.arg("running_mean", axis="c")) * expr.apply("rsqrt", expr.arg("running_var", axis="c") + eps)
    value = value * expr.arg("gamma", axis="c") if "gamma" in given else value
    value = value + expr.arg("beta", axis="c") if "beta" in given else value
    value = value + expr.arg("residual") if "residual" in given else value
    return value if activation is None else activation_of(op, activation).substitute({"x": value})


def activation_of(op: str, text: str) -> Expression:
    """An activation, as the name of a function or an expression over x."""
    expression = check_expression(op, "activation", text if not isinstance(text, str) or "(" in text else f"{text}(x)")
    if expression.args != ("x",) or expression.num_outputs > 1 or expression.scalars:
        raise expected(op, "activation", repr(text), "the name of a function of one number, or an expression over x")
    return expression


def scalars_of(op: str, expression: Expression | None, compute: str, taken: Collection[str] = ()) -> tuple[Scalar, ...]:
    """The numbers that an expression takes with each call, in the type it computes in, by its name in PTX. taken: what kernels write into
    the expression by name. Raises InvalidArgument for a scalar of the same name as a tensor: they would be one register."""
    if expression is None:
        return ()
    for name in expression.scalars:
        if name in expression.args or name in taken:
            raise expected(op, f"scalar {name}", f"named as a tensor of {expression}", "a name of its own")
    return tuple(Scalar(name, compute) for name in expression.scalars)


def accumulator_of(kind: DType) -> DType:
    """The type in which convolution and GEMM of inputs of type `kind` sum, and their epilogue computes."""
    return F64 if kind is F64 else F32


def align_shape(op: str, name: str, shape: tuple[int, ...], out: tuple[int, ...], channel_axis: int,
                axis: str | None = None) -> tuple[int, ...]:
    """`shape` of an epilogue tensor with the rank of the output `out`, each extent equal to the output's or 1.

    A vector, and any tensor the expression declares with axis "c", lies along the channels; others broadcast as in NumPy.
    """
    channels = out[channel_axis]
    if len(shape) == 1 and shape[0] in (channels, 1):
        return tuple(shape[0] if i == channel_axis % len(out) else 1 for i in range(len(out)))
    aligned = (1,) * (len(out) - len(shape)) + shape
    if axis == "c" or len(aligned) != len(out) or any(n not in (1, want) for n, want in zip(aligned, out, strict=True)):
        allowed = [channels] if axis == "c" or len(shape) == 1 else f"{[channels]} or broadcastable to {list(out)}"
        raise expected(op, f"shape of {name}", list(shape), allowed, f"Output {list(out)}.")
    return aligned


def align_strides(desc: TensorDesc, aligned: tuple[int, ...], channel_axis: int) -> tuple[int, ...]:
    """Element strides over the output's axes of an operand whose align_shape is `aligned`: 0 where it broadcasts."""
    rank = len(aligned)
    if desc.rank == 1:
        strides = tuple(desc.strides[0] if i == channel_axis % rank else 0 for i in range(rank))
    else:
        strides = (0,) * (rank - desc.rank) + desc.strides
    return tuple(0 if n == 1 else s for n, s in zip(aligned, strides, strict=True))


def operands_of(op: str, expression: Expression | None, tensors: Mapping[str, TensorDesc], out: tuple[int, ...],
                channel_axis: int, allowed: Sequence[DType] = TYPES) -> list[Operand]:
    """The epilogue's tensors in argument order (bias and residual first), checked against the output's shape."""
    if expression is None:
        return []
    names = [name for name in expression.args if name in tensors]
    names.sort(key=lambda name: ("bias", "residual").index(name) if name in ("bias", "residual") else 2)
    for name in names:
        check_dtype(op, name, tensors[name], tensors, allowed)
        align_shape(op, name, tensors[name].shape, out, channel_axis, expression.axis(name))
    return [Operand(name, tensors[name]) for name in names]
