"""Convolution of 1, 2 or 3 spatial dimensions (by rank): forward, its gradients, and the transposed convolution with its gradients.

All six relate an image (N, C, spatial), a filter (K, C/groups, spatial) and a result (N, K, spatial) by the one equation

    result[n, k, p] = sum over c, r of image[n, c, p * stride - pad_lo + r * dilation] * filter[k, c, r]

and differ in which of the three is computed ("fprop": the result, "dgrad": the image, "wgrad": the filter) and in their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from ..codegen.pointwise import Expression
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import check_bool, check_dtype, check_extents, check_integers, check_output, check_reach, describe
from .epilogue import accumulator_of, default_epilogue, operands_of, resolve, scalars_of


@dataclass(frozen=True, kw_only=True)
class ConvProblem(Problem):
    """`image`, `filter`, `result` are the operands' names; padding is (before, after) per spatial dimension.

    flip: taps are read backwards (a convolution in the mathematical sense instead of a correlation).
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
    epilogue: Expression | None = None  # over "acc" and operand names

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
        return (*pairs, ("flip", False))

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


def read_padding(op: str, value: Any, same_total: Sequence[int] | None, spatial: int, context: str) -> tuple[tuple[int, int], ...]:
    if isinstance(value, str) and value == "valid":
        return ((0, 0),) * spatial
    if isinstance(value, str) and value in ("same_upper", "same_lower") and same_total is not None:
        small_first = value == "same_upper"
        return tuple((t // 2, t - t // 2) if small_first else (t - t // 2, t // 2) for t in same_total)
    if isinstance(value, (tuple, list)) and len(value) == spatial and all(isinstance(v, (tuple, list)) and len(v) == 2 for v in value):
        return tuple((lo, hi) for lo, hi in (check_integers(op, "padding", tuple(v), 2, 0, context) for v in value))
    if isinstance(value, str):
        raise expected(op, "padding", repr(value), "integers, ((before, after), ...), 'same_upper', 'same_lower' or 'valid'", context)
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
    roles = (*kind.inputs, kind.output)
    first, second = (tensors[name] for name in kind.inputs)
    rank, spatial = first.rank, first.rank - 2
    for name in kind.inputs:
        desc = tensors[name]
        if not 3 <= desc.rank <= 5 or desc.rank != rank:
            raise expected(op, f"rank of {name}", desc.rank, "3, 4 or 5 (1, 2 or 3 spatial dimensions), the same for all", context)
        check_dtype(op, name, desc, tensors)
        check_reach(op, name, desc, context)
    if second.dtype != first.dtype:
        raise expected(op, f"type of {kind.inputs[1]}", second.dtype, f"{first.dtype}, the type of {kind.inputs[0]}", context)

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

    if kind.output in tensors:
        output = tensors[kind.output]
        check_output(op, kind.output, output, shapes[kind.output], tensors)
    else:
        output = TensorDesc.packed(first.dtype, shapes[kind.output], preferred_layout(first, second))
        check_reach(op, kind.output, output, context)
    if kind.direction == "wgrad":
        epilogue, extra = None, []
    else:
        epilogue = resolve(op, attrs.get("epilogue"), tensors, roles)
        extra = operands_of(op, epilogue, tensors, shapes[kind.output], 1)

    kept: list[tuple[str, Any]] = [("stride", short(stride)), ("padding", short(padding)), ("dilation", short(dilation)),
                                   ("groups", groups), ("flip", flip), ("output_padding", short(output_padding))]
    defaults = dict((*_WINDOW, ("flip", False), ("output_padding", 0)))
    kept = [(name, value) for name, value in kept if value != defaults[name]]
    if epilogue is not None and epilogue != default_epilogue(tensors):
        kept.append(("epilogue", epilogue))
    operands = (*(Operand(name, tensors[name]) for name in kind.inputs), *extra, Operand(kind.output, output, True))
    return ConvProblem(op, operands, tuple(kept), scalars_of(epilogue, accumulator_of(first.dtype)), policy=policy,
                       direction=kind.direction, image=kind.image, filter=kind.filter, result=kind.result, stride=stride,
                       padding=padding, dilation=dilation, groups=groups, flip=flip, epilogue=epilogue)


def _definition(kind: _Kind) -> OpDef:
    optional = {"conv_fprop": ("bias", "residual"), "conv_transpose": ("bias",)}.get(kind.op, ())
    return OpDef(kind.op, (*kind.inputs, *optional), (kind.output,), partial(_make, kind), optional, kind.attrs)


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
