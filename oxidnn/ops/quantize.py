"""Quantisation: numbers as codes of 8 or 4 bits times scales, and back. A dequantised number is (code - zero_point) * scale.

    quantize x=bf16[64,512] kind=s8 scale=f32[64] zero_point=s8[64]         y: with scales as they are given; without any, a rounding
    dynamic_quantize x=bf16[64,512] kind=e4m3 scaling=("group",128)         y, scale (f32, [64,4])
    dynamic_quantize x=f32[64,512] kind=u8 scaling=token asymmetric=True    y, scale (f32, [64]), zero_point (u8, [64])
    dynamic_quantize x=bf16[64,512] kind=e2m1 scaling=nvfp4 layout=128x4    y (u8, [64,256]), scale (e4m3, [128,32])
    dequantize x=u8[64,256] kind=s4 scale=f32[64,4] dtype=bf16              y
    fake_quantize x=f32[64,512] kind=s4 scale=f32[64,16]                    y: dequantize(quantize(x)); gradient: dy, or 0 where clipped

kind: "e4m3", "e5m2", "s8", "u8", and of four bits, two to a byte along the last dimension in u8 (see nibbles.py), "s4", "u4", "e2m1" (FP4)
and "nf4" (QLoRA's sixteen quantiles of the normal distribution). scaling says which elements share a scale, of n along `axis`:

    "tensor"          all                                   scale []
    "channel"         those of an index of `axis` (0)       scale [n]
    "token"           those along `axis` (-1)               scale: x's shape without that dimension
    ("group", g)      g along `axis` (-1)                   scale: x's shape, with ceil(n / g)
    ("block", (r, c)) r by c of the last two dimensions     scale: x's shape, with their ceil(n / r) and ceil(n / c)
    "mxfp8", "mxfp4"  32 along `axis`                       scale u8, as of a group: e of the power of two 2^(e - 127), NaN for 255
    "nvfp4"           16 along `axis`                       scale e4m3, as of a group, which a global scale in f32 multiplies

Without it a scale of one element is the tensor's; one of rank 1 with `axis` given the channels'; one of x's shape without the last
dimension the tokens'; one of x's rank has extents that divide x's. layout "128x4" (mx, nvfp4, along the last dimension): scales in the
order that tensor cores of Blackwell read them: rows padded to 128, columns to 4, tiles of 128 by 4, in one the scale of (row, column) at
row % 32 * 16 + row // 32 * 4 + column; what pads is 0.

How scales are found, in f32, amax the largest size: amax / the kind's largest number (448, 57344, 127, 255, 7, 15, 6, 1), and 1 where that
is 0; asymmetric (s8, u8, s4, u4): (high - low) / (2^bits - 1), where low <= 0 <= high are the least and the largest, or 1, and
zero_point = round(clamp(least code - low / scale)); mx: 2^(floor(log2 amax) - that of the largest number), at least 2^-127 (code 0,
where all are 0); nvfp4: e4m3(amax / (6 * global)), by whose product with global in f32 elements are divided; all codes are 0 where it is
0. Where a number is no finite one, or high - low is beyond f32, the scale is NaN.
Elements: x / scale, correctly rounded to f32 (nvfp4: the exact product of x and the scale's inverse in f32), then to the nearest code, of
two the even one (nf4: the lower); integers plus zero_point, which is itself within their range.
What is beyond saturates; saturate=False: NaN (e4m3), an infinity (e5m2), the lowest bits (integers, as of two's complement; of an
infinity the zero point). NaN is NaN, of e2m1 6, of nf4 -1, of integers the zero point. rounding="stochastic": one of the two codes
around, the nearer the likelier (Philox, see random.py; all but nf4). Dequantised: the code less zero_point, times the scale, in f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import BF16, E4M3, E5M2, F16, F32, S8, S32, S64, U8, U64, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import check_bool, check_choice, check_integer, check_output, check_reach, check_type, describe, is_integer, operand, output
from .random import DRAW

WIDE = (F32, F16, BF16)
ZERO_POINTS = (S8, U8, S32, F32, F16, BF16)
FORMATS = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}  # elements of a scale
MAX_RANK = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """What codes stand for. largest: the number of the largest size that scales aim at. low, high: of integers. exponent: of largest."""

    name: str
    storage: DType
    bits: int
    largest: float
    low: int = 0
    high: int = 0
    exponent: int = 0

    @property
    def is_integer(self) -> bool:
        return self.high > 0

    @property
    def is_packed(self) -> bool:
        return self.bits == 4


KINDS = {k.name: k for k in (
    Kind("e4m3", E4M3, 8, 448.0, exponent=8), Kind("e5m2", E5M2, 8, 57344.0, exponent=15), Kind("s8", S8, 8, 127.0, -128, 127),
    Kind("u8", U8, 8, 255.0, 0, 255), Kind("s4", U8, 4, 7.0, -8, 7), Kind("u4", U8, 4, 15.0, 0, 15), Kind("nf4", U8, 4, 1.0),
    Kind("e2m1", U8, 4, 6.0, exponent=2))}


@dataclass(frozen=True)
class QuantizeProblem(Problem):
    """shape: of the numbers. blocks: how many of them along each dimension share a scale; () without scales. scale_dims: the dimensions of
    numbers that those of scales go along. scale_format: "f32" for plain numbers of any float type, "e8m0", "e4m3". swizzled: their layout
    is 128x4."""

    kind: Kind = KINDS["e4m3"]
    shape: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    scale_dims: tuple[int, ...] = ()
    scale_format: str = "f32"
    swizzled: bool = False
    saturate: bool = True
    stochastic: bool = False
    asymmetric: bool = False

    @property
    def wide(self) -> str:
        """The operand of numbers (the other one is of codes)."""
        return "y" if self.op == "dequantize" else "x"

    @property
    def codes(self) -> str | None:
        """The operand of codes; None where numbers stay numbers."""
        return {"dequantize": "x", "quantize": "y", "dynamic_quantize": "y"}.get(self.op)

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        return (("y", "x"),) if self.op == "fake_quantize" else (("dx", "dy"),) if self.op == "fake_quantize_backward" else ()

    @property
    def flops(self) -> int:
        return 4 * self.desc(self.wide).numel


@dataclass(frozen=True, slots=True)
class Scales:
    """How scales lie over numbers: blocks and dims as of QuantizeProblem, the shape of the tensor of scales, the attributes that say so."""

    blocks: tuple[int, ...]
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    attrs: tuple[tuple[str, Any], ...]
    format: str = "f32"
    swizzled: bool = False


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _axis(op: str, attrs: Mapping[str, Any], rank: int, default: int) -> int:
    if rank == 0:
        raise expected(op, "rank of x", 0, "1 or more, for this scaling")
    return check_integer(op, "axis", attrs.get("axis", default), -rank, rank - 1) % rank


def _sizes(op: str, scaling: Any, count: int) -> tuple[int, ...]:
    given = scaling[1] if count > 1 else (scaling[1],)
    if not isinstance(given, (tuple, list)) or len(given) != count or not all(is_integer(v, 1, 2**31 - 1) for v in given):
        raise expected(op, "scaling", repr(scaling), f"sizes of 1 to {2**31 - 1}, such as ('group', 128) and ('block', (128, 128))")
    return tuple(int(v) for v in given)


def scales_of(op: str, scaling: Any, shape: tuple[int, ...], attrs: Mapping[str, Any]) -> Scales:
    """The meaning of the attributes scaling, axis and layout. Raises InvalidArgument."""
    rank = len(shape)
    every = tuple(range(rank))
    layout = check_choice(op, "layout", attrs.get("layout", "plain"), ("plain", "128x4"))
    name = scaling[0] if isinstance(scaling, (tuple, list)) and len(scaling) == 2 else scaling
    known = ("tensor", "channel", "token", *FORMATS)
    if not isinstance(name, str) or name not in (("group", "block") if name is not scaling else known):
        raise expected(op, "scaling", repr(scaling), f"{', '.join(map(repr, known))}, ('group', g) or ('block', (r, c))")
    if layout != "plain" and name not in FORMATS:
        raise expected(op, "layout", repr(layout), f"'plain' for scaling {scaling!r}")
    written: list[tuple[str, Any]] = [("scaling", name if name is scaling else (name, scaling[1]))]
    if name == "tensor":
        return Scales(shape, (), (), (("scaling", name),))
    if name == "block":
        rows, columns = _sizes(op, scaling, 2)
        if rank < 2:
            raise expected(op, "rank of x", rank, "2 or more, for blocks")
        blocks = (*(1,) * (rank - 2), rows, columns)
        return Scales(_bounded(blocks, shape), every, _counts(shape, blocks), (("scaling", ("block", (rows, columns))),))
    axis = _axis(op, attrs, rank, 0 if name == "channel" else -1)
    if axis != (0 if name == "channel" else rank - 1):
        written.append(("axis", axis))
    if name == "channel":
        return Scales(tuple(1 if i == axis else n for i, n in enumerate(shape)), (axis,), (shape[axis],), tuple(written))
    if name == "token":
        others = tuple(i for i in every if i != axis)
        return Scales(tuple(n if i == axis else 1 for i, n in enumerate(shape)), others, tuple(shape[i] for i in others), tuple(written))
    size = FORMATS[name] if name in FORMATS else _sizes(op, scaling, 1)[0]
    if name == "group":
        written[0] = ("scaling", ("group", size))
    blocks = tuple(size if i == axis else 1 for i in range(rank))
    counts = _counts(shape, blocks)
    if layout != "plain":
        if axis != rank - 1 or rank < 2:
            raise expected(op, "layout", repr(layout), "'plain' unless axis is the last of two dimensions or more")
        written.append(("layout", layout))
        counts = (*counts[:-2], _ceil_div(shape[-2], 128) * 128, _ceil_div(counts[-1], 4) * 4)
    kind = {"mxfp8": "e8m0", "mxfp4": "e8m0", "nvfp4": "e4m3"}.get(name, "f32")
    return Scales(blocks if layout != "plain" else _bounded(blocks, shape), every, counts, tuple(written), kind, layout != "plain")


def _counts(shape: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_ceil_div(n, b) for n, b in zip(shape, blocks, strict=True))


def _bounded(blocks: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(b, max(n, 1)) for b, n in zip(blocks, shape, strict=True))


def _inferred(op: str, scale: TensorDesc, shape: tuple[int, ...], attrs: Mapping[str, Any], context: str) -> Scales:
    """From the shape of scales that are given without `scaling`."""
    rank = len(shape)
    if scale.numel == 1 and scale.rank <= 1 and "axis" not in attrs:
        return Scales(shape, (), scale.shape, ())
    if scale.rank == 1 and "axis" in attrs:
        axis = _axis(op, attrs, rank, 0)
        return Scales(tuple(1 if i == axis else n for i, n in enumerate(shape)), (axis,), (shape[axis],), (("axis", axis),))
    if "axis" not in attrs and rank and scale.shape == shape[:-1]:
        return Scales((*(1,) * (rank - 1), shape[-1]), tuple(range(rank - 1)), scale.shape, ())
    if "axis" not in attrs and scale.rank == rank and all(m == n or m and n % m == 0 for n, m in zip(shape, scale.shape, strict=True)):
        return Scales(tuple(max(1, n // max(m, 1)) for n, m in zip(shape, scale.shape, strict=True)), tuple(range(rank)),
                      scale.shape, ())
    raise expected(op, "shape of scale", list(scale.shape),
                   f"[], {list(shape[:-1])}, extents that divide {list(shape)}, [n] with axis=, or any that scaling= says", context)


def _kind(op: str, attrs: Mapping[str, Any], default: str | None) -> Kind:
    if "kind" not in attrs and default is None:
        raise expected(op, "kind", "missing", ", ".join(map(repr, KINDS)))
    return KINDS[check_choice(op, "kind", attrs.get("kind", default), tuple(KINDS))]


def _packed_shape(kind: Kind, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], _ceil_div(shape[-1], 2)) if kind.is_packed else shape


def _check_kind(op: str, kind: Kind, scaling: Any, scales: Scales | None, shape: tuple[int, ...]) -> None:
    if not kind.is_packed and len(shape) <= MAX_RANK or kind.is_packed and 1 <= len(shape) <= MAX_RANK:
        pass
    else:
        raise expected(op, "rank of x", len(shape), f"{int(kind.is_packed)} to {MAX_RANK}")
    if scaling in ("mxfp4", "nvfp4") and kind.name != "e2m1" or scaling == "mxfp8" and kind.name not in ("e4m3", "e5m2"):
        raise expected(op, "kind", repr(kind.name), "'e4m3' or 'e5m2'" if scaling == "mxfp8" else "'e2m1'", f"scaling is {scaling!r}")
    if scales is not None and kind.is_packed and 1 < scales.blocks[-1] < shape[-1] and scales.blocks[-1] % 2:
        name, got = ("shape of scale", list(scales.shape)) if scaling is None else ("scaling", repr(scaling))
        columns = f"here {scales.blocks[-1]} of {shape[-1]}"
        raise expected(op, name, got, f"an even number of columns a scale, {columns}, for {kind.name}, two to a byte")


def _given_scales(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], shape: tuple[int, ...]) -> Scales | None:
    """Of the operand scale, with zero_point and global_scale checked; None without scales."""
    context = describe(tensors)
    if "scale" not in tensors:
        for name in ("scaling", "axis"):
            if name in attrs:
                raise expected(op, name, repr(attrs[name]), "None without a scale", context)
        for name in ("zero_point", "global_scale"):
            if name in tensors:
                raise expected(op, name, "given", "a scale beside it", context)
        return None
    scale, scaling = tensors["scale"], attrs.get("scaling")
    scales = _inferred(op, scale, shape, attrs, context) if scaling is None else scales_of(op, scaling, shape, attrs)
    allowed = {"e8m0": (U8,), "e4m3": (E4M3,), "f32": WIDE}[scales.format]
    operand(op, "scale", tensors, allowed)
    lead = scales.shape if scaling != "tensor" or scale.rank == 0 else (1,)
    if scale.shape != lead:
        raise expected(op, "shape of scale", list(scale.shape), list(lead), context)
    check_reach(op, "scale", scale, context)
    if scales.swizzled and scale.numel and scale.strides[-2:] != (scale.shape[-1], 1):
        raise expected(op, "strides of scale", list(scale.strides), "dense rows, in layout 128x4", context)
    if "zero_point" in tensors:
        operand(op, "zero_point", tensors, ZERO_POINTS, scale.shape)
    if "global_scale" in tensors:
        _global_scale(op, tensors, scales)
    return scales


def _global_scale(op: str, tensors: Mapping[str, TensorDesc], scales: Scales) -> None:
    desc = operand(op, "global_scale", tensors, (F32,))
    if scales.format != "e4m3":
        raise expected(op, "global_scale", "given", "scaling='nvfp4' beside it", describe(tensors))
    if desc.numel != 1 or desc.rank > 1:
        raise expected(op, "shape of global_scale", list(desc.shape), "[] or [1]", describe(tensors))


def _inputs(tensors: Mapping[str, TensorDesc], *names: str) -> tuple[Operand, ...]:
    return tuple(Operand(n, tensors[n]) for n in names if n in tensors)


def _check_zero_point(op: str, kind: Kind, tensors: Mapping[str, TensorDesc]) -> None:
    if "zero_point" in tensors and not kind.is_integer:
        raise expected(op, "zero_point", "given", f"none for {kind.name}, or an integer kind", describe(tensors))


def _rounding(op: str, kind: Kind, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any]) -> bool:
    stochastic = check_choice(op, "rounding", attrs.get("rounding", "even"), ("even", "stochastic")) == "stochastic"
    if stochastic and kind.name == "nf4":
        raise expected(op, "rounding", "'stochastic'", "'even' for nf4")
    if "state" in tensors:
        state = operand(op, "state", tensors, (S64, U64), (2,))
        if not stochastic or state.strides != (1,):
            raise expected(op, "state", state, "dense, beside rounding='stochastic'", describe(tensors))
    return stochastic


def _normal(kind: Kind, scales: Scales | None, **values: Any) -> tuple[tuple[str, Any], ...]:
    return (("kind", kind.name), *(scales.attrs if scales is not None else ()), *((n, v) for n, v in values.items() if v is not None))


def _held(scales: Scales | None) -> dict[str, Any]:
    """The fields of a problem that say how its scales lie."""
    if scales is None:
        return {}
    return {"blocks": scales.blocks, "scale_dims": scales.dims, "scale_format": scales.format, "swizzled": scales.swizzled}


def _saturate(op: str, kind: Kind, attrs: Mapping[str, Any]) -> bool:
    saturate = check_bool(op, "saturate", attrs.get("saturate", True))
    if not saturate and kind.name in ("e2m1", "nf4"):
        raise expected(op, "saturate", False, f"True for {kind.name}, which holds nothing beyond its numbers")
    return saturate


def make_quantize(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> QuantizeProblem:
    op = "quantize"
    x = operand(op, "x", tensors, WIDE)
    check_reach(op, "x", x, describe(tensors))
    kind = _kind(op, attrs, None)
    scales = _given_scales(op, tensors, attrs, x.shape)
    _check_kind(op, kind, attrs.get("scaling"), scales, x.shape)
    _check_zero_point(op, kind, tensors)
    saturate, stochastic = _saturate(op, kind, attrs), _rounding(op, kind, tensors, attrs)
    y = output(op, "y", tensors, (kind.storage,), _packed_shape(kind, x.shape), x)
    normal = _normal(kind, scales, saturate=None if saturate else False, rounding="stochastic" if stochastic else None)
    operands = (*_inputs(tensors, "x", "scale", "zero_point", "global_scale", "state"), Operand("y", y, True))
    return QuantizeProblem(op, operands, normal, DRAW if stochastic and "state" not in tensors else (), policy=policy, kind=kind,
                           shape=x.shape, saturate=saturate, stochastic=stochastic, **_held(scales))


def make_dynamic(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> QuantizeProblem:
    """scaling: needed. find_global (nvfp4): also the output found_global = amax of all / (6 * 448), or 1, in place of global_scale."""
    op = "dynamic_quantize"
    x = operand(op, "x", tensors, WIDE)
    check_reach(op, "x", x, describe(tensors))
    kind = _kind(op, attrs, None)
    if "scaling" not in attrs:
        raise expected(op, "scaling", "missing", "'tensor', 'channel', 'token', ('group', g), ...")
    scales = scales_of(op, attrs["scaling"], x.shape, attrs)
    _check_kind(op, kind, attrs["scaling"], scales, x.shape)
    asymmetric = check_bool(op, "asymmetric", attrs.get("asymmetric", False))
    if asymmetric and (not kind.is_integer or scales.format != "f32"):
        name = "asymmetric (of quantize zero_point='compute')"
        raise expected(op, name, True, f"False for {kind.name} and scaling {attrs['scaling']!r}")
    find_global = check_bool(op, "find_global", attrs.get("find_global", False))
    if find_global and (scales.format != "e4m3" or "global_scale" in tensors):
        name = "find_global (of quantize global_scale='compute')"
        raise expected(op, name, True, "False but for nvfp4 without a global_scale", describe(tensors))
    if "global_scale" in tensors:
        _global_scale(op, tensors, scales)
    stochastic = _rounding(op, kind, tensors, attrs)
    outputs = [Operand("y", output(op, "y", tensors, (kind.storage,), _packed_shape(kind, x.shape), x), True)]
    stored = {"f32": F32, "e8m0": U8, "e4m3": E4M3}[scales.format]

    def of_scales(name: str, kind: DType, shape: tuple[int, ...]) -> None:
        outputs.append(Operand(name, output(op, name, tensors, (kind,), shape, TensorDesc.packed(kind, shape)), True))

    of_scales("scale", stored, scales.shape)
    if scales.swizzled and outputs[-1].desc.numel and outputs[-1].desc.strides[-2:] != (scales.shape[-1], 1):
        raise expected(op, "strides of scale", list(outputs[-1].desc.strides), "dense rows, in layout 128x4", describe(tensors))
    if asymmetric:
        of_scales("zero_point", S8 if kind.low else U8, scales.shape)
    if find_global:
        of_scales("found_global", F32, ())
    normal = _normal(kind, scales, asymmetric=asymmetric or None, find_global=find_global or None,
                     rounding="stochastic" if stochastic else None)
    operands = (*_inputs(tensors, "x", "global_scale", "state"), *outputs)
    return QuantizeProblem(op, operands, normal, DRAW if stochastic and "state" not in tensors else (), policy=policy, kind=kind,
                           shape=x.shape, stochastic=stochastic, asymmetric=asymmetric, **_held(scales))


def make_dequantize(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> QuantizeProblem:
    """kind: by default the type of x, e2m1 for scaling of fp4. size: of the last dimension of packed codes, default twice x's, or one less.
    dtype: of y, f32, f16 or bf16."""
    op = "dequantize"
    x = operand(op, "x", tensors, tuple({k.storage for k in KINDS.values()}))
    check_reach(op, "x", x, describe(tensors))
    kind = _kind(op, attrs, "e2m1" if attrs.get("scaling") in ("mxfp4", "nvfp4") else x.dtype.name)
    if x.dtype is not kind.storage:
        raise expected(op, "type of x", x.dtype, f"{kind.storage} for {kind.name}", describe(tensors))
    if kind.is_packed and x.rank == 0:
        raise expected(op, "rank of x", 0, f"1 to {MAX_RANK}, for {kind.name}")
    shape = x.shape
    size = None
    if kind.is_packed:
        most = 2 * x.shape[-1]
        size = check_integer(op, "size", attrs.get("size", most), max(0, most - 1), most, describe(tensors))
        shape = (*x.shape[:-1], size)
    elif "size" in attrs:
        raise expected(op, "size", attrs["size"], f"none for {kind.name}", describe(tensors))
    scales = _given_scales(op, tensors, attrs, shape)
    _check_kind(op, kind, attrs.get("scaling"), scales, shape)
    _check_zero_point(op, kind, tensors)
    result = check_type(op, "dtype", attrs["dtype"]) if "dtype" in attrs else tensors["y"].dtype if "y" in tensors else F32
    if result not in WIDE:
        raise expected(op, "dtype", result, ", ".join(t.name for t in WIDE))
    y = output(op, "y", tensors, (result,), shape, x)
    normal = _normal(kind, scales, size=None if size in (None, 2 * x.shape[-1]) else size, dtype=None if result is F32 else result.name)
    operands = (*_inputs(tensors, "x", "scale", "zero_point", "global_scale"), Operand("y", y, True))
    return QuantizeProblem(op, operands, normal, policy=policy, kind=kind, shape=shape, **_held(scales))


def make_fake(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> QuantizeProblem:
    return _fake("fake_quantize", "y", tensors, attrs, policy)


def make_fake_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> QuantizeProblem:
    return _fake("fake_quantize_backward", "dx", tensors, attrs, policy)


def _fake(op: str, result: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> QuantizeProblem:
    x = operand(op, "x", tensors, WIDE)
    check_reach(op, "x", x, describe(tensors))
    if result == "dx":
        operand(op, "dy", tensors, (x.dtype,), x.shape)
    kind = _kind(op, attrs, None)
    scales = _given_scales(op, tensors, attrs, x.shape)
    if len(x.shape) > MAX_RANK:
        raise expected(op, "rank of x", x.rank, f"at most {MAX_RANK}")
    if scales is None:
        raise expected(op, "scale", "missing", "a tensor", describe(tensors))
    _check_zero_point(op, kind, tensors)
    y = output(op, result, tensors, (x.dtype,), x.shape, x)
    check_output(op, result, y, x.shape, tensors, (x.dtype,))
    operands = (*_inputs(tensors, "dy", "x", "scale", "zero_point", "global_scale"), Operand(result, y, True))
    return QuantizeProblem(op, operands, _normal(kind, scales), policy=policy, kind=kind, shape=x.shape, **_held(scales))


_SCALES = ("scale", "zero_point", "global_scale")
_WHERE: tuple[tuple[str, Any], ...] = (("scaling", None), ("axis", None), ("layout", "plain"))
DEFINITIONS = (
    OpDef("quantize", ("x", *_SCALES, "state"), ("y",), make_quantize, (*_SCALES, "state"),
          (("kind", None), *_WHERE, ("saturate", True), ("rounding", "even"))),
    OpDef("dynamic_quantize", ("x", "global_scale", "state"), ("y", "scale", "zero_point", "found_global"), make_dynamic,
          ("global_scale", "state"), (("kind", None), *_WHERE, ("asymmetric", False), ("find_global", False), ("rounding", "even"))),
    OpDef("dequantize", ("x", *_SCALES), ("y",), make_dequantize, _SCALES,
          (("kind", None), *_WHERE, ("size", None), ("dtype", None))),
    OpDef("fake_quantize", ("x", *_SCALES), ("y",), make_fake, _SCALES, (("kind", None), *_WHERE)),
    OpDef("fake_quantize_backward", ("dy", "x", *_SCALES), ("dx",), make_fake_backward, _SCALES, (("kind", None), *_WHERE)),
)
