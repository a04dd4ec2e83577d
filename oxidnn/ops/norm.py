"""Layer normalisation and RMS normalisation over any dimensions, with gradients.

    layer_norm x=bf16[8,512,768]nchw gamma=f32[768] beta=f32[768] residual=... axes=(2,) eps=1e-05 epilogue="relu(acc)"
    rms_norm x=bf16[512,4096] gamma=bf16[4096] out_dtype=e4m3 return_scale=True

h = x + residual (if given); y = epilogue((h - mean(h)) / sqrt(var(h) + eps) * gamma + beta), mean and biased variance over `axes`; RMS
normalisation takes the mean for 0. Arithmetic is f32 (f64 for f64 tensors), h is not rounded in between, eps stands inside the root. The
variance is that of the differences from the mean, so it is as exact for a row far from zero as for one about zero; a value whose square
f32 cannot hold (above about 1e19) makes y 0 or NaN. return_stats: also mean and rstd = 1 / sqrt(var + eps), of x's shape without `axes`,
in the type of the arithmetic. return_sum: also h. In an epilogue a vector lies along the last of `axes`. zero_centered: gamma + 1 takes
the place of gamma. gamma and beta have the shape of `axes`, or x's rank, with x's extents in the axes and 1 or x's extents elsewhere:
values of each sample, as adaptive layer normalisation takes them (zero_centered, with one scale and shift an image).
out_dtype: y's type, of f64, f32, f16, bf16, e4m3, e5m2 and s8: to nearest even, the last three saturating (NaN is 0 in s8). scale_y (one
element): y holds result / scale_y. return_scale (of those three): also row_scale, of the statistics' shape and type,
= max|result| of the row / the type's largest number (448, 57344, 127), 1 where all are 0, NaN where one is no finite number; y holds
result / row_scale. All in the one launch.

The gradients take x (h, where there was a residual) and the statistics; with gamma they give dgamma and, for layer_norm or with beta,
dbeta too. epilogue: the forward's, of "acc" alone (an activation): what it was given is found again from x, gamma and beta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..codegen.pointwise import Expression, acc
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy
from .checks import check_bool, check_dtype, check_expression, check_number, check_output, describe
from .epilogue import NARROW, accumulator_of, operands_of, resolve_scaled, result_kind, scalars_of
from .rows import RowProblem, axes_attribute, row_axes, row_shape

EPS = 1e-5
_ROLES = ("x", "gamma", "beta", "residual", "y", "mean", "rstd", "sum", "row_scale")


@dataclass(frozen=True)
class NormProblem(RowProblem):
    """epilogue: over "acc" and the operands epilogue_operands, to y; of a gradient, of "acc" alone."""

    eps: float = EPS
    epilogue: Expression | None = None
    zero_centered: bool = False

    @property
    def is_rms(self) -> bool:
        return self.op.startswith("rms_norm")

    def is_spread(self, name: str) -> bool:
        """Whether a parameter has x's rank: its values may differ from row to row."""
        return self.has(name) and self.desc(name).shape != tuple(self.shape[a] for a in self.axes)

    @property
    def samples(self) -> tuple[int, ...]:
        """The dimensions along which gamma differs from row to row."""
        return tuple(i for i in self.kept if self.is_spread("gamma") and self.desc("gamma").shape[i] > 1)

    @property
    def epilogue_operands(self) -> tuple[str, ...]:
        return tuple(n for n in self.epilogue.args if n != "acc") if self.epilogue is not None else ()

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Every element is read, for the last time, by the thread that writes it."""
        full = [n for n in ("x", "residual", "dy") if self.has(n)]
        return tuple((o.name, n) for o in self.outputs if o.name in (self.outputs[0].name, "sum") for n in full)


def _like(desc: TensorDesc) -> TensorDesc:
    """A dense tensor of desc's type, shape and, as far as it has one, layout."""
    is_last = desc.is_packed("nhwc") and not desc.is_packed("nchw")
    return TensorDesc.packed(desc.dtype, desc.shape, "nhwc" if is_last else "nchw")


def _same(op: str, name: str, tensors: Mapping[str, TensorDesc], like: TensorDesc) -> TensorDesc:
    """The input `name`, of like's type and shape."""
    desc = tensors[name]
    check_dtype(op, name, desc, tensors, (like.dtype,))
    if desc.shape != like.shape:
        raise expected(op, f"shape of {name}", list(desc.shape), list(like.shape), describe(tensors))
    return desc


def _output(op: str, name: str, tensors: Mapping[str, TensorDesc], like: TensorDesc) -> Operand:
    desc = tensors.get(name, _like(like))
    check_output(op, name, desc, like.shape, tensors, (like.dtype,))
    return Operand(name, desc, True)


def _parameter(op: str, name: str, tensors: Mapping[str, TensorDesc], x: TensorDesc, axes: tuple[int, ...]) -> TensorDesc:
    """Of the axes' shape, or of x's rank with extents of 1 in some of the other dimensions."""
    desc, shape = tensors[name], tuple(x.shape[a] for a in axes)
    check_dtype(op, name, desc, tensors)
    is_spread = desc.rank == x.rank and all(n == m or n == 1 and i not in axes
                                            for i, (n, m) in enumerate(zip(desc.shape, x.shape, strict=True)))
    if desc.shape != shape and not is_spread:
        ones = [n if i in axes else 1 for i, n in enumerate(x.shape)]
        allowed = f"{list(shape)}, or such as {ones}"
        raise expected(op, f"shape of {name}", list(desc.shape), allowed, f"axes are {axes}; {describe(tensors)}")
    return desc


def _make(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> NormProblem:
    x = tensors["x"]
    check_dtype(op, "x", x, tensors)
    axes = row_axes(op, x, attrs, tensors)
    accumulator = accumulator_of(x.dtype)
    eps = check_number(op, "eps", attrs.get("eps", EPS), accumulator)
    if not eps >= 0:
        raise expected(op, "eps", repr(eps), "a number that is not negative")
    flags = {name: check_bool(op, name, attrs.get(name, False)) for name in ("return_stats", "return_sum", "return_scale", "zero_centered")}
    operands = [Operand("x", x)]
    operands += [Operand(n, _parameter(op, n, tensors, x, axes)) for n in ("gamma", "beta") if n in tensors]
    if "residual" in tensors:
        operands.append(Operand("residual", _same(op, "residual", tensors, x)))
    epilogue, written = resolve_scaled(op, attrs.get("epilogue"), tensors, _ROLES)
    operands += operands_of(op, epilogue, tensors, x.shape, axes[-1])
    kind, model = result_kind(op, tensors, attrs, x), _like(x)
    operands.append(_output(op, "y", tensors, TensorDesc(kind, model.shape, model.strides, model.align)))
    stats = TensorDesc.packed(accumulator, row_shape(x.shape, axes))
    if flags["return_stats"]:
        operands += [_output(op, n, tensors, stats) for n in (("rstd",) if op == "rms_norm" else ("mean", "rstd"))]
    if flags["return_sum"]:
        operands.append(_output(op, "sum", tensors, x))
    if flags["return_scale"]:
        if kind not in NARROW:
            raise expected(op, "return_scale", True, f"False for y of {kind} (it is for {', '.join(t.name for t in NARROW)})")
        operands.append(_output(op, "row_scale", tensors, stats))
    normal = axes_attribute(axes, x) + ([("out_dtype", kind.name)] if kind is not x.dtype else [])
    if eps != EPS:
        normal.append(("eps", eps))
    if written is not None:
        normal.append(("epilogue", written))
    normal += [(name, True) for name, value in flags.items() if value]
    return NormProblem(op, tuple(operands), tuple(normal), scalars_of(op, epilogue, accumulator.ptx), policy=policy, axes=axes, eps=eps,
                       epilogue=epilogue, zero_centered=_is_zero_centered(op, flags["zero_centered"], tensors))


def _is_zero_centered(op: str, flag: bool, tensors: Mapping[str, TensorDesc]) -> bool:
    if flag and "gamma" not in tensors:
        raise expected(op, "zero_centered", True, "False without gamma", describe(tensors))
    return flag


def _activation(op: str, attrs: Mapping[str, Any], tensors: Mapping[str, TensorDesc]) -> tuple[Expression | None, Expression | None]:
    """(what the forward's epilogue was, if it was more than acc; as a case names it)."""
    given = attrs.get("epilogue")
    written = None if given is None else check_expression(op, "epilogue", given)
    if written is None or written == acc:
        return None, None
    if written.args != ("acc",) or written.scalars or written.num_outputs != 1:
        raise expected(op, "epilogue", str(written), "an activation of acc alone, such as 'silu(acc)'", describe(tensors))
    return written, written


def _make_backward(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> NormProblem:
    is_rms = op == "rms_norm_backward"
    statistics = ("rstd",) if is_rms else ("mean", "rstd")
    x = tensors["x"]
    check_dtype(op, "x", x, tensors)
    axes = row_axes(op, x, attrs, tensors)
    stats = TensorDesc.packed(accumulator_of(x.dtype), row_shape(x.shape, axes))
    zero_centered = _is_zero_centered(op, check_bool(op, "zero_centered", attrs.get("zero_centered", False)), tensors)
    epilogue, written = _activation(op, attrs, tensors)
    operands = [Operand("dy", _same(op, "dy", tensors, x)), Operand("x", x)]
    operands += [Operand(n, _same(op, n, tensors, stats)) for n in statistics]
    outputs = [_output(op, "dx", tensors, x)]
    for name in tensors:
        if name not in (*_ROLES, "dy", "dx", "dgamma", "dbeta"):
            raise expected(op, name, "given", "no operand of the epilogue, which is of acc alone", describe(tensors))
    if "beta" in tensors and not ("gamma" in tensors and (is_rms or epilogue is not None)):
        raise expected(op, "beta", "given", "gamma beside it, and an epilogue" if not is_rms else "gamma beside it", describe(tensors))
    if "gamma" in tensors:
        gamma = _parameter(op, "gamma", tensors, x, axes)
        operands.append(Operand("gamma", gamma))
        outputs.append(_output(op, "dgamma", tensors, gamma))
        beta = _parameter(op, "beta", tensors, x, axes) if "beta" in tensors else None
        if beta is not None:
            if beta.shape != gamma.shape:
                raise expected(op, "shape of beta", list(beta.shape), f"{list(gamma.shape)}, as gamma", describe(tensors))
            operands.append(Operand("beta", beta))
        if beta is not None or not is_rms:
            outputs.append(_output(op, "dbeta", tensors, beta or gamma))
    normal = axes_attribute(axes, x) + ([("epilogue", written)] if written is not None else [])
    normal += [("zero_centered", True)] if zero_centered else []
    return NormProblem(op, (*operands, *outputs), tuple(normal), policy=policy, axes=axes, epilogue=epilogue, zero_centered=zero_centered)


_INPUTS = ("x", "gamma", "beta", "residual", "scale_y")
_OPTIONAL = _INPUTS[1:]
_ATTRS = (("eps", EPS), ("axes", -1), ("epilogue", None), ("return_stats", False), ("return_sum", False), ("out_dtype", None),
          ("return_scale", False), ("zero_centered", False))
_BACKWARD = (("axes", -1), ("epilogue", None), ("zero_centered", False))
DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("layer_norm", _INPUTS, ("y", "mean", "rstd", "sum", "row_scale"), partial(_make, "layer_norm"), _OPTIONAL, _ATTRS),
    OpDef("rms_norm", _INPUTS, ("y", "rstd", "sum", "row_scale"), partial(_make, "rms_norm"), _OPTIONAL, _ATTRS),
    OpDef("layer_norm_backward", ("dy", "x", "mean", "rstd", "gamma", "beta"), ("dx", "dgamma", "dbeta"),
          partial(_make_backward, "layer_norm_backward"), ("gamma", "beta"), _BACKWARD),
    OpDef("rms_norm_backward", ("dy", "x", "rstd", "gamma", "beta"), ("dx", "dgamma", "dbeta"),
          partial(_make_backward, "rms_norm_backward"), ("gamma", "beta"), _BACKWARD),
)
