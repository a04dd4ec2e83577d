"""Convolution of 1, 2 or 3 spatial dimensions (by rank): forward, its gradients, and the transposed convolution with its gradients.

All six relate an image (N, C, spatial), a filter (K, C/groups, spatial) and a result (N, K, spatial) by the one equation

    result[n, k, p] = sum over c, r of image[n, c, p * stride - pad_lo + r * dilation] * filter[k, c, r]

and differ in which of the three is computed ("fprop": the result, "dgrad": the image, "wgrad": the filter) and in their names.

What may go with it: an expression over the image before the sum ("prologue"), whose padding stays zero; one over the sum ("epilogue"), of
one or two outputs; moments of the output's channels as it is stored, or the sums of dy's channels beside a filter's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from typing import Any

from ..codegen import pointwise as expr
from ..codegen.pointwise import Expression
from ..dtypes import F32, F64, S32, U8, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import (
    FLOATS,
    canonical,
    check_bool,
    check_dtype,
    check_expression,
    check_extents,
    check_integers,
    check_output,
    check_reach,
    check_shape,
    describe,
)
from .epilogue import NARROW, accumulator_of, default_epilogue, operands_of, resolve, scalars_of
from .gemm import FP8, INT8, made_output, out_types

STATS = ("stats_count", "stats_mean", "stats_m2")  # of the output's channels: as batch_norm_stats gives and batch_norm_gather takes them
AMAX = "amax"  # of the output's elements before they are divided by its scale and rounded
IMAGE = "x"  # the image's element in a prologue


@dataclass(frozen=True, kw_only=True)
class ConvProblem(Problem):
    """`image`, `filter`, `result` are the operands' names; padding is (before, after) per spatial dimension.

    flip: taps are read backwards (a convolution in the mathematical sense instead of a correlation). epilogue: over "acc" and operand
    names; its second output, if it has one, is "aux". prologue: what is summed in the image's place, over "x" and the names of operands,
    vectors over the image's channels; padding is zero all the same.

    Of 8-bit inputs: what is written is rounded, and saturated (or, of integers, taken modulo 256), from

        epilogue((sum + addend) * scale_1 * scale_2) / scale_out + zero_out,

    the sum being over elements less their zero point; where the image is padded it has none to add. "amax" is the largest size of
    epilogue(...), before it is divided and rounded.
    """

    direction: str  # "fprop" | "dgrad" | "wgrad"
    image: str
    filter: str
    result: str
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    flip: bool
    epilogue: Expression | None = None
    prologue: Expression | None = None
    scales: tuple[str, ...] = ()  # the operands, of those with which the inputs are multiplied
    scale_out: str = ""
    zero_out: str = ""
    addend: str = ""  # the operand of integers, along the output's channels, that is added to the sum
    saturate: bool = True

    @property
    def alone(self) -> ConvProblem:
        """Without its by-products: moments, sums of dy's channels."""
        others = (*STATS, *(("db",) if self.direction == "wgrad" else ()))
        operands = tuple(o for o in self.operands if not (o.is_output and o.name in others))
        if len(operands) == len(self.operands):
            return self
        return replace(self, operands=operands, attrs=tuple((n, v) for n, v in self.attrs if n not in ("return_stats", "return_bias_grad")))

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """The residual's element is read by the thread that then writes the output's."""
        return ((self.outputs[0].name, "residual"),) if self.has("residual") else ()

    @property
    def spatial(self) -> int:
        return len(self.stride)

    @property
    def flops(self) -> int:
        return 2 * self.desc(self.result).numel * prod(self.desc(self.filter).shape[1:])


def quotient(x: Expression, y: Expression) -> Expression:
    """x / y, itself where it is a number of f32 (ties of what is rounded afterwards are), by a reciprocal that is found once a thread where
    y is an operand that stays: a division is a dozen instructions and a branch an element. The remainder, which a fused multiplication
    gives exactly, corrects the product (Markstein, IBM J. Res. Dev. 34, 1990). y beyond 2^64 or below 2^-64 is scaled first.

    `divide` of quantize/codes.ptx.j2 is the same method for codes, and stays apart: it branches where scales are far and bounds numbers,
    which an expression cannot, and corrects twice, for the nearest number whatever the quotient; ties need one correction. Either in the
    other's place would change bits or add instructions."""
    size = expr.apply("abs", y)
    factor = expr.where(size < 2.0**-64, 2.0**64, expr.where(size > 2.0**64, 2.0**-64, 1.0))  # the reciprocal is a normal number
    x, y = x * factor, y * factor
    reciprocal = expr.apply("reciprocal", y)
    first = x * reciprocal
    rest = expr.apply("fma", first, -y, x)
    corrected = expr.apply("fma", rest, reciprocal, first)
    return expr.where(expr.apply("abs", rest) < inf, corrected, first)  # infinities and NaN leave no remainder


def value_of(p: ConvProblem, is_rounded: bool = True) -> Expression | None:
    """What is written, as an expression over "acc", the sum with its addend; None for that itself. The conversion to the output's type
    rounds and saturates. Of a problem with an amax a second output is what that is taken of. is_rounded: otherwise a result of integers is
    left as it is before rounding."""
    value = expr.acc
    for name in p.scales:
        value = value * expr.arg(name)
    if p.epilogue is not None:
        value = p.epilogue.substitute({"acc": value})
    if value.num_outputs > 1:
        return value
    before = value
    if p.scale_out:
        value = quotient(value, expr.arg(p.scale_out))
    if is_rounded and (p.zero_out or not p.saturate):
        value = expr.round(value)
    if p.zero_out:
        value = value + expr.arg(p.zero_out)
    if not p.saturate:
        low = 0.0 if p.outputs[0].desc.dtype is U8 else 128.0
        value = value - 256.0 * expr.apply("floor", (value + low) * (1 / 256)) if is_rounded else value
    if p.has(AMAX) and is_rounded:
        return Expression("tuple", (value, before))
    return None if value == expr.acc else value


_WINDOW: tuple[tuple[str, Any], ...] = (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the six ops: the roles of its tensors and which one is the output."""

    op: str
    direction: str
    image: str
    filter: str
    result: str
    inputs: tuple[str, ...]  # in argument order
    is_transposed: bool = False

    @property
    def output(self) -> str:
        return {"fprop": self.result, "dgrad": self.image, "wgrad": self.filter}[self.direction]

    @property
    def attrs(self) -> tuple[tuple[str, Any], ...]:
        pairs: tuple[tuple[str, Any], ...] = ((self.shape_attribute, None),) if self.shape_attribute else ()
        pairs += _WINDOW
        pairs += (("output_padding", 0),) if self.is_transposed else ()
        pairs += () if self.direction == "wgrad" else (("epilogue", None),)
        pairs = (*pairs, ("flip", False), ("out_dtype", None), *(() if self.direction == "wgrad" else (("saturate", True),)))
        pairs += (("prologue", None),) if self.op in ("conv_fprop", "conv_wgrad") else ()
        pairs += (("return_stats", False), ("return_amax", False)) if self.op in ("conv_fprop", "conv_transpose") else ()
        return pairs + ((("return_bias_grad", False),) if self.op == "conv_wgrad" else ())

    @property
    def outputs(self) -> tuple[str, ...]:
        """All that there may be."""
        names: tuple[str, ...] = (self.output,) if self.direction == "wgrad" else (self.output, "aux")
        names += (*STATS, AMAX) if self.op in ("conv_fprop", "conv_transpose") else ()
        return names + (("db",) if self.op == "conv_wgrad" else ())

    @property
    def scales(self) -> tuple[str, str]:
        return f"scale_{self.inputs[0]}", f"scale_{self.inputs[1]}"

    @property
    def scale_out(self) -> str:
        return "" if self.direction == "wgrad" else f"scale_{self.output}"

    @property
    def zeros(self) -> tuple[str, ...]:
        return {"conv_fprop": ("zero_x", "zero_w", "zero_y"), "conv_transpose": ("zero_y",)}.get(self.op, ())

    @property
    def quantisers(self) -> tuple[str, ...]:
        """The tensors that only 8-bit types have: scales, then zero points."""
        return (*self.scales, *((self.scale_out,) if self.scale_out else ()), *self.zeros)

    @property
    def shape_attribute(self) -> str:
        """The attribute that names the output's shape, "" if the inputs decide it; only a transposed dgrad may leave it out."""
        return {"conv_fprop": "", "conv_transpose": ""}.get(self.op, "w_shape" if self.direction == "wgrad" else "x_shape")


_KINDS = (
    _Kind("conv_fprop", "fprop", "x", "w", "y", ("x", "w")),
    _Kind("conv_dgrad", "dgrad", "dx", "w", "dy", ("dy", "w")),
    _Kind("conv_wgrad", "wgrad", "x", "dw", "dy", ("x", "dy")),
    _Kind("conv_transpose", "dgrad", "y", "w", "x", ("x", "w"), True),
    _Kind("conv_transpose_dgrad", "fprop", "dy", "w", "dx", ("dy", "w"), True),
    _Kind("conv_transpose_wgrad", "wgrad", "dy", "dw", "x", ("x", "dy"), True),
)


CONVOLUTIONS = tuple(kind.op for kind in _KINDS)


def read_padding(op: str, value: Any, same_total: Sequence[int] | None, spatial: int, context: str) -> tuple[tuple[int, int], ...]:
    if isinstance(value, str) and value == "valid":
        return ((0, 0),) * spatial
    if isinstance(value, str) and value in ("same", "same_upper", "same_lower") and same_total is not None:
        small_first = value != "same_lower"
        return tuple((t // 2, t - t // 2) if small_first else (t - t // 2, t // 2) for t in same_total)
    if isinstance(value, (tuple, list)) and len(value) == spatial and all(isinstance(v, (tuple, list)) and len(v) == 2 for v in value):
        return tuple((lo, hi) for lo, hi in (check_integers(op, "padding", tuple(v), 2, 0, context) for v in value))
    if isinstance(value, str):
        raise expected(op, "padding", repr(value), "integers, ((before, after), ...), 'same' (the longer part "
                                                   "behind, as 'same_upper'), 'same_lower' or 'valid'", context)
    return tuple((v, v) for v in check_integers(op, "padding", value, spatial, 0, context))


def short(values: tuple[Any, ...]) -> Any:
    """The shortest way to write one value per dimension: pairs of equals as one integer, equal integers as one."""
    if all(isinstance(v, tuple) and v[0] == v[1] for v in values):
        values = tuple(v[0] for v in values)
    return values[0] if not isinstance(values[0], tuple) and len(set(values)) == 1 else values


def preferred_layout(*inputs: TensorDesc) -> str:
    """"nhwc" if the first input that is packed in one layout only is channels last, else "nchw": the layout of inferred outputs."""
    for desc in inputs:
        if desc.is_packed("nhwc") != desc.is_packed("nchw"):
            return "nhwc" if desc.is_packed("nhwc") else "nchw"
    return "nchw"


def _make(kind: _Kind, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ConvProblem:
    op = kind.op
    context = describe(tensors)
    roles = (*kind.inputs, *kind.outputs)
    first, second = (tensors[name] for name in kind.inputs)
    rank, spatial = first.rank, first.rank - 2
    for name in kind.inputs:
        desc = tensors[name]
        if not 3 <= desc.rank <= 5 or desc.rank != rank:
            raise expected(op, f"rank of {name}", desc.rank, "3, 4 or 5 (1, 2 or 3 spatial dimensions), the same for all", context)
        check_dtype(op, name, desc, tensors, (*FLOATS, *FP8, *INT8))
        check_reach(op, name, desc, context)
    mates = next((group for group in (FP8, INT8) if first.dtype in group), (first.dtype,))
    if second.dtype not in mates:
        allowed = " or ".join(t.name for t in mates) if len(mates) > 1 else str(first.dtype)
        raise expected(op, f"type of {kind.inputs[1]}", second.dtype, f"{allowed}, the type of {kind.inputs[0]}", context)

    stride = check_integers(op, "stride", attrs.get("stride", 1), spatial, 1, context)
    dilation = check_integers(op, "dilation", attrs.get("dilation", 1), spatial, 1, context)
    groups = check_integers(op, "groups", attrs.get("groups", 1), 1, 1, context)[0]
    flip = check_bool(op, "flip", attrs.get("flip", False), context)
    output_padding = check_integers(op, "output_padding", attrs.get("output_padding", 0), spatial, 0, context)
    if any(o >= max(s, d) for o, s, d in zip(output_padding, stride, dilation, strict=True) if o):
        raise expected(op, "output_padding", list(output_padding), f"less than stride {list(stride)} or dilation {list(dilation)}", context)

    # Shapes of image, filter and result: two are given, the third is inferred, or named by an attribute or the output itself.
    shapes = {name: tensors[name].shape for name in kind.inputs}
    shape_attr = kind.shape_attribute
    if shape_attr:
        if shape_attr in attrs:
            shapes[kind.output] = check_extents(op, shape_attr, attrs[shape_attr], (rank,), context)
        elif kind.output in tensors and tensors[kind.output].rank == rank:
            shapes[kind.output] = tensors[kind.output].shape
        elif kind.direction != "fprop":
            raise expected(op, shape_attr, "missing", f"the shape of {kind.output}, {rank} integers", context)

    taps = shapes[kind.filter][2:]
    if any(r < 1 for r in taps):
        raise expected(op, f"spatial shape of {kind.filter}", list(taps), "extents of at least 1", context)
    reach = tuple((r - 1) * d + 1 for r, d in zip(taps, dilation, strict=True))  # extent of a dilated filter
    if kind.image in shapes:
        positions = [-(-n // s) for n, s in zip(shapes[kind.image][2:], stride, strict=True)]
        extents = shapes[kind.image][2:]
    else:
        positions = list(shapes[kind.result][2:])
        extents = tuple(p * s for p, s in zip(positions, stride, strict=True))
    same = [max((p - 1) * s + e + o - n, 0) for p, s, e, o, n in zip(positions, stride, reach, output_padding, extents, strict=True)]
    padding = read_padding(op, attrs.get("padding", 0), same, spatial, context)

    k_filter, c_filter = shapes[kind.filter][:2]
    if k_filter % groups:
        raise expected(op, "groups", groups, f"a divisor of the {k_filter} filters of {kind.filter}", context)
    if kind.image not in shapes:
        n = shapes[kind.result][0]
        extents = tuple((p - 1) * s - lo - hi + e + o for p, s, (lo, hi), e, o in
                        zip(shapes[kind.result][2:], stride, padding, reach, output_padding, strict=True))
        if any(e < 1 for e in extents):
            raise expected(op, "padding", padding, f"a padding that leaves {kind.image} an extent of at least 1 (spatial shape would be "
                           f"{list(extents)})", context)
        shapes[kind.image] = (n, c_filter * groups, *extents)
    image = shapes[kind.image]
    if c_filter * groups != image[1]:
        raise expected(op, f"channels of {kind.filter} times groups", f"{c_filter} * {groups}", f"{image[1]}, the channels of {kind.image}",
                       context)
    windows = [n + lo + hi - e - o for n, (lo, hi), e, o in zip(image[2:], padding, reach, output_padding, strict=True)]
    if any(v < 0 for v in windows):
        raise expected(op, f"spatial shape of {kind.filter}", f"{list(taps)} (with dilation {list(reach)})", "at most the padded extent "
                       f"{[n + lo + hi for n, (lo, hi) in zip(image[2:], padding, strict=True)]} of {kind.image}", context)
    result = (image[0], k_filter, *(v // s + 1 for v, s in zip(windows, stride, strict=True)))
    if kind.result not in shapes:
        shapes[kind.result] = result
    if shapes[kind.result] != result:
        raise expected(op, f"shape of {kind.result}", list(shapes[kind.result]), list(result), context)

    quantisers = {name: tensors[name] for name in kind.quantisers if name in tensors}
    addend = "bias" if first.dtype in INT8 and "bias" in tensors and tensors["bias"].dtype is S32 else ""
    prologue = check_expression(op, "prologue", attrs["prologue"]) if attrs.get("prologue") is not None else None
    over_image = _prologue_operands(kind, prologue, tensors, image[1])
    apart = {*quantisers, addend, *(o.name for o in over_image)}
    others = {name: desc for name, desc in tensors.items() if name not in apart}
    if kind.direction == "wgrad":
        resolve(op, None, others, roles)
        epilogue, extra = None, []
    else:
        epilogue = resolve(op, attrs.get("epilogue"), others, (*roles, *quantisers, *((addend,) if addend else ())),
                           1 if quantisers or addend else 2)
        extra = operands_of(op, epilogue, others, shapes[kind.output], 1, (*FLOATS, S32, *INT8) if first.dtype in INT8 else FLOATS)
    if addend:
        check_shape(op, addend, tensors[addend], (shapes[kind.output][1],), tensors)
        extra.insert(0, Operand(addend, tensors[addend]))
    is_plain = epilogue is None and not any(name in quantisers for name in (*kind.scales, kind.scale_out))
    allowed_out = out_types(first.dtype, not is_plain)
    if mates != (first.dtype,):
        allowed_out = (first.dtype, *mates) if kind.scale_out in quantisers else (*allowed_out, *mates)
    elif kind.direction != "wgrad":
        allowed_out = (*allowed_out, *NARROW)
    output = made_output(op, kind.output, "out_dtype", tensors, attrs.get("out_dtype"), allowed_out, shapes[kind.output])
    if kind.output not in tensors:
        output = TensorDesc.packed(output.dtype, shapes[kind.output], preferred_layout(first, second))
        check_reach(op, kind.output, output, context)
    saturate = check_bool(op, "saturate", attrs.get("saturate", True), context)
    if not saturate and not (output.dtype in INT8 and kind.scale_out in quantisers):
        raise expected(op, "saturate", False, f"True, but for results in s8 or u8 with {kind.scale_out}", context)
    _check_quantisers(kind, quantisers, output, shapes[kind.output][1], tensors)

    by_products = _by_products(kind, epilogue, output, shapes, tensors, attrs, preferred_layout(first, second))
    kept: list[tuple[str, Any]] = [("stride", short(stride)), ("padding", short(padding)), ("dilation", short(dilation)),
                                   ("groups", groups), ("flip", flip), ("output_padding", short(output_padding)), ("saturate", saturate)]
    defaults = dict((*_WINDOW, ("flip", False), ("output_padding", 0), ("saturate", True)))
    kept = [(name, value) for name, value in kept if value != defaults[name]]
    if epilogue is not None and epilogue != default_epilogue(others):
        kept.append(("epilogue", epilogue))
    if prologue is not None:
        kept.append(("prologue", prologue))
    kept += [(name, True) for name in ("return_stats", "return_amax", "return_bias_grad") if attrs.get(name)]
    operands = (*(Operand(name, tensors[name]) for name in kind.inputs), *extra, *(Operand(n, d) for n, d in quantisers.items()),
                *over_image, Operand(kind.output, output, True), *by_products)
    scalars = scalars_of(op, epilogue, accumulator_of(first.dtype).ptx, quantisers)
    return ConvProblem(op, operands, tuple(kept), scalars, policy=policy, direction=kind.direction, image=kind.image, filter=kind.filter,
                       result=kind.result, stride=stride, padding=padding, dilation=dilation, groups=groups, flip=flip,
                       epilogue=epilogue, prologue=prologue, scales=tuple(n for n in kind.scales if n in quantisers),
                       scale_out=kind.scale_out if kind.scale_out in quantisers else "",
                       zero_out="zero_y" if "zero_y" in quantisers else "", addend=addend, saturate=saturate)


def _prologue_operands(kind: _Kind, prologue: Expression | None, tensors: Mapping[str, TensorDesc], channels: int) -> list[Operand]:
    """The tensors of a prologue, vectors over the image's channels or of one element."""
    if prologue is None:
        return []
    op, context = kind.op, describe(tensors)
    if prologue.num_outputs > 1 or prologue.scalars or IMAGE not in prologue.args:
        allowed = f"an expression of one output over {IMAGE} and vectors over its channels"
        raise expected(op, "prologue", str(prologue), allowed, context)
    check_dtype(op, kind.image, tensors[kind.image], tensors)
    names = [n for n in prologue.args if n != IMAGE]
    for name in names:
        if name in (*kind.inputs, *kind.outputs, *kind.quantisers, "bias", "residual"):
            raise expected(op, "prologue", f"{prologue}, which names {name}", "names of its own", context)
        if name not in tensors:
            raise expected(op, "prologue", f"{prologue}, whose {name} is missing", f"{name}=a tensor", context)
        check_dtype(op, name, tensors[name], tensors)
        if tensors[name].shape not in ((channels,), (1,)):
            allowed = f"{[channels]}, the channels of {kind.image}, or [1]"
            raise expected(op, f"shape of {name}", list(tensors[name].shape), allowed, context)
    return [Operand(n, tensors[n]) for n in names]


def _by_products(kind: _Kind, epilogue: Expression | None, output: TensorDesc, shapes: Mapping[str, tuple[int, ...]],
                 tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], layout: str) -> list[Operand]:
    """The outputs beside the first."""
    op, context = kind.op, describe(tensors)
    shape, accumulator = shapes[kind.output], accumulator_of(output.dtype)

    def made(name: str, of: DType, shape: tuple[int, ...], allowed: Sequence[DType], layout: str = "nchw") -> Operand:
        desc = tensors.get(name, canonical(TensorDesc.packed(of, shape, layout)))
        check_output(op, name, desc, shape, tensors, allowed)
        return Operand(name, desc, True)

    found = []
    if epilogue is not None and epilogue.num_outputs == 2:
        found.append(made("aux", output.dtype if output.dtype in FLOATS else F32, shape, FLOATS, layout))
    if check_bool(op, "return_stats", attrs.get("return_stats", False), context):
        if output.dtype not in FLOATS:
            raise expected(op, "return_stats", True, f"False of {kind.output} in {output.dtype}", context)
        found += [made(name, accumulator, (1,) if name == STATS[0] else shape[1:2], (accumulator,)) for name in STATS]
    if check_bool(op, "return_amax", attrs.get("return_amax", False), context):
        of = tensors[kind.inputs[0]].dtype
        if of in INT8 or of is F64 or (epilogue is not None and epilogue.num_outputs > 1):
            allowed = f"False of {kind.inputs[0]} in {of} (True of e4m3, e5m2, f16, bf16, f32) and beside a second output"
            raise expected(op, "return_amax", True, allowed, context)
        found.append(made(AMAX, F32, (), (F32,)))
    if check_bool(op, "return_bias_grad", attrs.get("return_bias_grad", False), context):
        check_dtype(op, kind.result, tensors[kind.result], tensors)
        found.append(made("db", output.dtype if output.dtype in FLOATS else F32, shapes[kind.result][1:2], FLOATS))
    for name in kind.outputs[1:]:
        if name in tensors and all(o.name != name for o in found):
            need = {"aux": "an epilogue of two outputs", "db": "return_bias_grad", AMAX: "return_amax"}.get(name, "return_stats")
            raise expected(op, name, "given", f"{need}, for it", context)
    return found


def _check_quantisers(kind: _Kind, given: Mapping[str, TensorDesc], output: TensorDesc, channels: int,
                      tensors: Mapping[str, TensorDesc]) -> None:
    """scale_x, zero_x and those of the output are single elements; those of the second input may be vectors along the output's channels."""
    op = kind.op
    for name, desc in given.items():
        of = name.partition("_")[2]
        is_second = of == kind.inputs[1] and kind.direction != "wgrad"
        if tensors[kind.inputs[0]].dtype not in (*FP8, *INT8):
            allowed = f"8-bit inputs ({kind.inputs[0]} is {tensors[kind.inputs[0]].dtype}; an epilogue may scale it)"
            raise expected(op, name, "given", allowed, describe(tensors))
        if desc.rank > 1 or desc.numel != 1 and not (is_second and desc.shape == (channels,)):
            raise expected(op, f"shape of {name}", list(desc.shape), f"[1] or [{channels}]" if is_second else "[1]", describe(tensors))
        if name.startswith("zero_"):
            kinds = (output.dtype,) if of == kind.output else (tensors[of].dtype,)
            check_dtype(op, name, desc, tensors, kinds if kinds[0] in INT8 else INT8)
        else:
            check_dtype(op, name, desc, tensors, (F32,))
    if "zero_y" in given and (kind.scale_out not in given or output.dtype not in INT8):
        allowed = f"{kind.scale_out} and a result in s8 or u8"
        raise expected(op, "zero_y", f"given, of a result in {output.dtype}", allowed, describe(tensors))


def _definition(kind: _Kind) -> OpDef:
    optional = {"conv_fprop": ("bias", "residual"), "conv_transpose": ("bias",)}.get(kind.op, ())
    optional = (*optional, *kind.quantisers)
    return OpDef(kind.op, (*kind.inputs, *optional), kind.outputs, partial(_make, kind), optional, kind.attrs)


def _make_bgrad(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    """db[k] = sum over n and the spatial dimensions of dy[n, k, ...]."""
    op = "conv_bgrad"
    dy = tensors["dy"]
    if not 3 <= dy.rank <= 5:
        raise expected(op, "rank of dy", dy.rank, "3, 4 or 5 (1, 2 or 3 spatial dimensions)", describe(tensors))
    check_dtype(op, "dy", dy, tensors)
    db = tensors.get("db", TensorDesc.packed(dy.dtype, (dy.shape[1],)))
    check_output(op, "db", db, (dy.shape[1],), tensors)
    return Problem(op, (Operand("dy", dy), Operand("db", db, True)), policy=policy)


DEFINITIONS = (*(_definition(kind) for kind in _KINDS), OpDef("conv_bgrad", ("dy",), ("db",), _make_bgrad))
