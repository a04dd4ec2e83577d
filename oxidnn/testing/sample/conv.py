"""Random and fixed convolutions of all six kinds, and of the bias gradient."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...dtypes import BF16, E4M3, E5M2, F16, F32, F64, S8, S32, U8, DType
from ...ops import OPS, Policy, Problem
from ...ops.conv_reorder import packed_filter
from ...tensor import TensorDesc
from .tensors import random_desc

# Epilogue and the shapes of its tensors: "c" a vector over channels, "y" the output's shape, "1" an extent of 1 everywhere.
EPILOGUES: tuple[tuple[str | None, dict[str, str]], ...] = (
    (None, {}), (None, {}), (None, {"bias": "c"}), (None, {"bias": "c", "residual": "y"}), ("relu(acc)", {}),
    ("bias_relu", {"bias": "c"}), ("bias_residual_relu", {"bias": "c", "residual": "y"}),
    ("relu(acc * scale + bias)", {"scale": "c", "bias": "c"}), ("acc * mask", {"mask": "y"}), ("acc * 0.5 + offset", {"offset": "1"}),
)
_LIMITS = {"tiny": 20_000, "small": 4_000_000}


def draw_epilogue(rng: np.random.Generator, tensors: dict[str, Any], attrs: dict[str, Any], shape: tuple[int, ...],
                  channel_axis: int, output: TensorDesc | None = None) -> None:
    """Adds an epilogue and its tensors over an output of `shape`; some of them lie as `output` does, so that it may be in their place."""
    text, operands = EPILOGUES[int(rng.integers(len(EPILOGUES)))]
    if text:
        attrs["epilogue"] = text
    for name, kind in operands.items():
        extents = (shape[channel_axis],) if kind == "c" else shape if kind == "y" else (1,) * len(shape)
        if kind == "y" and output is not None and rng.random() < 0.4:
            tensors[name] = output
            continue
        tensors[name] = random_desc(rng, (F32, F64, F16, BF16)[int(rng.choice(4, p=(0.5, 0.1, 0.2, 0.2)))], extents)


def _draw(rng: np.random.Generator, op: str, size: str) -> Problem | None:
    def upto(limit: int) -> int:
        return int(rng.integers(1, limit + 1))

    spatial = int(rng.choice((1, 2, 3), p=(0.25, 0.6, 0.15)))
    is_tiny = size == "tiny"
    groups = upto(3) if rng.random() < 0.35 else 1
    channels, filters = (upto(5), upto(5)) if is_tiny else (upto(40), upto(40))
    is_dense = rng.random() < 0.25  # what tensor cores and bulk copies want: 16-bit, channels last, channels in eights
    if is_dense:
        channels, filters = (int(rng.choice((8, 16, 24, 64))) for _ in range(2))
        if rng.random() < 0.4:  # the first layer of a network
            channels, groups = upto(4), 1
    is_depthwise = not is_dense and spatial < 3 and rng.random() < 0.2
    if is_depthwise:
        channels, filters, groups = 1, 1, int(rng.choice((4, 6, 8, 24) if is_tiny else (6, 16, 40, 96)))
    is_inner = is_depthwise and rng.random() < 0.3  # an inner layer of half precision, nothing beside it: for tensor cores
    n = 0 if rng.random() < 0.03 else upto(2 if is_tiny else 4)
    if rng.random() < 0.02 and not is_dense:
        channels = 0
    taps = [upto(3 if is_tiny else 5) for _ in range(spatial)]
    stride = [upto(3) if rng.random() < 0.5 else 1 for _ in range(spatial)]
    dilation = [upto(3) if rng.random() < 0.25 else 1 for _ in range(spatial)]
    padding = [(int(rng.integers(0, 3)), int(rng.integers(0, 3))) if rng.random() < 0.6 else (0, 0) for _ in range(spatial)]
    extents = [upto((8 if is_tiny else 40) if spatial < 3 else (5 if is_tiny else 12)) for _ in range(spatial)]
    if rng.random() < 0.1:  # windows that tile the image: patches
        taps, dilation, padding = list(stride), [1] * spatial, [(0, 0)] * spatial
        extents = [s * upto(3) for s in stride]
    elif is_dense and rng.random() < 0.3:  # an inner layer: as many positions as pixels, in eights
        stride, groups, extents = [1] * spatial, 1, [8 * upto(2) for _ in range(spatial)]
        taps = [int(rng.choice((1, 2, 3, 3, 3))) for _ in range(spatial)]
        before = [upto((r - 1) * d + 1) - 1 for r, d in zip(taps, dilation, strict=True)]
        padding = [(lo, (r - 1) * d - lo) for lo, r, d in zip(before, taps, dilation, strict=True)]
    if is_inner:
        stride, dilation, groups = [1] * spatial, [1] * spatial, -(-groups // 8) * 8
    policy = Policy()
    if spatial < 3 and not is_depthwise and rng.random() < 0.2:  # what fast algorithms take: 3 x 3, and maps of whole blocks of 8
        policy = Policy(math="fast") if rng.random() < 0.4 else policy
        if rng.random() < 0.5:
            is_dense, channels, filters = True, *(int(rng.choice((8, 16, 64))) for _ in range(2))
        taps, stride, dilation, groups, padding = [3] * spatial, [1] * spatial, [1] * spatial, 1, [(1, 1)] * spatial
        extents = [8 * upto(1 if is_tiny else 3) - int(rng.integers(2)) * (not is_dense) for _ in range(spatial)]
    elif spatial < 3 and not is_depthwise and not is_dense and rng.random() < 0.15:  # large filters, that overlap the border in any way
        policy = Policy(math="fast") if rng.random() < 0.7 else policy
        channels, filters, stride, dilation = min(channels, 3), min(filters, 3), [1] * spatial, [1] * spatial
        taps = [int(rng.integers(1 if spatial > 1 else 4, (10 if is_tiny else 20) if spatial > 1 else (24 if is_tiny else 120)))
                for _ in range(spatial)]
        padding = [(int(rng.integers(0, r + 1)), int(rng.integers(0, r + 1))) for r in taps]
        extents = [upto(2 * r + 8) for r in taps]
    if spatial == 3 and rng.random() < 0.4:  # an inner layer of a volume
        is_dense, groups, stride, extents = True, 1, [1] * 3, [int(rng.integers(2, 7)) for _ in range(3)]
        (channels, filters), taps = (int(rng.choice((8, 16, 24))) for _ in range(2)), [int(rng.integers(2, 4)) for _ in range(3)]
    attrs: dict[str, Any] = {"stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation), "groups": groups,
                             "flip": bool(rng.random() < 0.15)}
    if rng.random() < 0.08:
        attrs["padding"] = ("same_upper", "same_lower", "valid")[int(rng.integers(3))]
        lo_hi = [max((-(-e // s) - 1) * s + (r - 1) * d + 1 - e, 0) if attrs["padding"] != "valid" else 0
                 for e, s, r, d in zip(extents, stride, taps, dilation, strict=True)]
        padding = [(t, 0) for t in lo_hi]
    is_dense |= is_depthwise
    halves_only = not is_depthwise or is_inner
    kind = (F16, BF16, F32)[int(rng.integers(2 if halves_only else 3))] if is_dense else (F32, F64, F16, BF16)[int(rng.integers(4))]
    if is_dense and not is_depthwise and rng.random() < 0.1:
        kind, policy = F32, policy if policy.math == "fast" else Policy(math="tf32")
    out_kind = (F32, F64, F16, BF16)[int(rng.integers(4))] if not is_inner and rng.random() < 0.2 else kind
    room = [e + lo + hi - (r - 1) * d - 1 for e, (lo, hi), r, d in zip(extents, padding, taps, dilation, strict=True)]
    if any(v < 0 for v in room):
        return None
    result_shape = (n, filters * groups, *(v // s + 1 for v, s in zip(room, stride, strict=True)))
    image_shape, filter_shape = (n, channels * groups, *extents), (filters * groups, channels, *taps)
    if prod(result_shape) * prod(filter_shape[1:]) > _LIMITS[size] * (20 if is_dense and is_tiny else 1):
        return None
    definition = OPS[op]
    roles = {"conv_fprop": ("x", "w", "y"), "conv_dgrad": ("dx", "w", "dy"), "conv_wgrad": ("x", "dw", "dy"),
             "conv_transpose": ("y", "w", "x"), "conv_transpose_dgrad": ("dy", "w", "dx"), "conv_transpose_wgrad": ("dy", "dw", "x")}[op]
    shapes = dict(zip(roles, (image_shape, filter_shape, result_shape), strict=True))
    output = definition.outputs[0]
    if "transpose" in op:
        if attrs["padding"] in ("same_upper", "same_lower"):
            return None
        attrs["output_padding"] = tuple(v % s for v, s in zip(room, stride, strict=True))
        if channels == 0:
            return None
    kinds = ((kind,), (E4M3, E5M2), (S8, U8))[0 if is_inner else int(rng.choice(3, p=(0.7, 0.1, 0.2)))]
    tensors = {name: random_desc(rng, kinds[int(rng.integers(len(kinds)))], shapes[name], is_dense=is_dense)
               for name in definition.inputs if name in shapes}
    if is_dense and not is_depthwise and "w" in tensors and rng.random() < 0.05:  # filters as frameworks hold them
        tensors["w"] = TensorDesc.packed(tensors["w"].dtype, shapes["w"])
    if len(kinds) > 1:
        if "w" in tensors and rng.random() < (0.8 if is_dense else 0.2):  # as tensor cores want them
            tensors["w"] = packed_filter(tensors["w"], "dgrad" if op in ("conv_dgrad", "conv_transpose") else "fprop")
        return _draw_quantised(rng, op, kinds, tensors, shapes[output], attrs, is_dense)
    tensors[output] = random_desc(rng, out_kind, shapes[output], is_output=True, is_dense=is_dense)
    if not op.endswith("wgrad") and not is_inner:
        draw_epilogue(rng, tensors, attrs, shapes[output], 1, tensors[output])
    if not is_inner:
        _draw_fusions(rng, op, tensors, attrs, image_shape[1])
    return definition.make(tensors, attrs, policy)


PROLOGUES = ("relu(x * gain + shift)", "x * gain", "silu(x) + shift", "relu(x)", "x - 0.5")


def _draw_fusions(rng: np.random.Generator, op: str, tensors: dict[str, TensorDesc], attrs: dict[str, Any], channels: int) -> None:
    """What goes with some convolutions: results in 8 bits, second outputs, moments, sums of dy's channels, expressions over the image."""
    output, allowed = OPS[op].outputs[0], dict(OPS[op].attrs)
    if "epilogue" in allowed and "epilogue" not in attrs and not {"bias", "residual"} & set(tensors) and rng.random() < 0.15:
        attrs["epilogue"] = ("relu(acc), acc", "relu(t := acc * 2), t + 1", "acc * 4")[int(rng.integers(3))]
        if attrs["epilogue"] == "acc * 4":
            desc = tensors[output]
            tensors[output] = TensorDesc((E4M3, E5M2, S8)[int(rng.integers(3))], desc.shape, desc.strides, desc.align)
    if tensors[output].dtype.num_bytes > 1 and rng.random() < 0.15:
        attrs |= {name: True for name in ("return_stats", "return_bias_grad") if name in allowed}
    if "prologue" in allowed and rng.random() < 0.15:
        attrs["prologue"] = PROLOGUES[int(rng.integers(len(PROLOGUES)))]
        for name in ("gain", "shift"):
            if name in attrs["prologue"]:
                tensors[name] = random_desc(rng, (F32, F16, BF16, F64)[int(rng.integers(4))], (channels,) if rng.random() < 0.8 else (1,))
    has_two = "," in str(attrs.get("epilogue", "")) or tensors[OPS[op].inputs[0]].dtype is F64
    if "return_amax" in allowed and not has_two and rng.random() < 0.08:
        attrs["return_amax"] = True


def _draw_quantised(rng: np.random.Generator, op: str, kinds: tuple[DType, ...], tensors: dict[str, TensorDesc], shape: tuple[int, ...],
                    attrs: dict[str, Any], is_dense: bool) -> Problem:
    """8-bit inputs: scales, zero points, an epilogue, and results of every type that these allow."""
    definition = OPS[op]
    first, second = (name for name in definition.inputs if name in tensors)
    output, channels = definition.outputs[0], shape[1]

    def vector(is_long: bool) -> tuple[int, ...]:
        return (channels,) if is_long and rng.random() < 0.6 else (1,)

    names = {name: vector(name[6:] == second and not op.endswith("wgrad")) for name in definition.optional if name.startswith("scale_")}
    scaled = {name: TensorDesc.packed(F32, extents) for name, extents in names.items() if rng.random() < 0.5}
    is_integer, has_zeros = S8 in kinds, S8 in kinds and rng.random() < 0.5
    if is_integer:
        for name in ("zero_x", "zero_w") if has_zeros else ():
            if name in definition.optional and rng.random() < 0.6:
                scaled[name] = TensorDesc.packed(tensors[name[5:]].dtype, vector(name == "zero_w"))
        if "bias" in definition.optional and rng.random() < 0.4:
            scaled["bias"] = TensorDesc.packed(S32, (channels,))
        elif "epilogue" in dict(definition.attrs) and any(n.startswith("scale_") for n in scaled):
            draw_epilogue(rng, scaled, attrs, shape, 1)
    elif not op.endswith("wgrad"):
        draw_epilogue(rng, scaled, attrs, shape, 1)
    if f"scale_{output}" in scaled:
        out = kinds[int(rng.integers(len(kinds)))]
        if has_zeros and "zero_y" in definition.optional and rng.random() < 0.6:
            scaled["zero_y"] = TensorDesc.packed(out, (1,))
    elif is_integer and not any(n.startswith("scale_") for n in scaled):
        out = (S32, S32, F32, S8, U8)[int(rng.integers(5))]
    else:
        out = (F32, F16, BF16, kinds[0])[int(rng.integers(4))]
    if not is_integer and "return_amax" in dict(definition.attrs) and rng.random() < 0.3:
        attrs["return_amax"] = True
    tensors = tensors | scaled | {output: random_desc(rng, out, shape, is_output=True, is_dense=is_dense)}
    return definition.make(tensors, attrs, Policy())


def _sampler(op: str) -> Any:
    def sample(rng: np.random.Generator, size: str) -> Problem:
        while True:
            problem = _draw(rng, op, size)
            if problem is not None:
                return problem

    return sample


def sample_bgrad(rng: np.random.Generator, size: str) -> Problem:
    top = 6 if size == "tiny" else 40
    rank = int(rng.choice((3, 4, 5), p=(0.25, 0.6, 0.15)))
    shape = [int(rng.integers(1, (top if rank < 5 else 5) + 1)) for _ in range(rank)]
    if rng.random() < 0.05:
        shape[0] = 0
    kind = (F32, F64, F16, BF16)[int(rng.integers(4))]
    out = (F32, kind)[int(rng.integers(2))]
    tensors = {"dy": random_desc(rng, kind, shape), "db": random_desc(rng, out, shape[1:2], is_output=True)}
    return OPS["conv_bgrad"].make(tensors, {}, Policy())


def _channel_tails() -> tuple[str, ...]:
    """Channels and filters that are no multiple of any vector, forward and both gradients, both layouts."""
    lines = []
    for c, k, kind, layout in ((1, 7, "f16", "nchw"), (3, 1, "bf16", "nhwc"), (5, 7, "f32", "nchw"), (13, 17, "bf16", "nhwc"),
                               (5, 7, "f16", "nhwc")):
        x, w, y = f"{kind}[1,{c},5,6]{layout}", f"{kind}[{k},{c},3,3]{layout}", f"{kind}[1,{k},5,6]{layout}"
        lines += [f"conv_fprop x={x} w={w} y={y} padding=1", f"conv_dgrad dy={y} w={w} dx={x} padding=1",
                  f"conv_wgrad x={x} dy={y} dw={w} padding=1"]
    return tuple(lines)


_ALL = (
    *_channel_tails(),
    # Padding of a dilated filter, even filters, uneven padding; a filter larger than the image but not than the padded one.
    "conv_fprop x=f32[1,1,9,9] w=f32[1,1,5,5] padding=4 dilation=2",
    "conv_fprop x=f32[1,1,2,2] w=f32[1,1,2,2] padding='((0,1),(1,0))'",
    "conv_fprop x=f32[1,2,7,6] w=f32[3,2,4,2] padding=same_upper stride=2",
    "conv_fprop x=f16[1,2,7,6] w=f16[3,2,4,2] padding=same_lower stride=2",
    "conv_fprop x=f32[1,2,2,3] w=f32[2,2,5,5] padding=2",
    # Transposed with output padding; stride with dilation; windows that tile; strides with taps that never meet.
    "conv_transpose x=f32[1,1,2,2] w=f32[1,1,3,3] stride=2 padding=1 output_padding=1",
    "conv_transpose x=f16[2,4,3,3]nhwc w=f16[4,3,2,2] stride=2 bias=f32[3]",
    "conv_transpose x=f32[1,2,4] w=f32[2,3,3] stride=4 dilation=2 output_padding=3",
    "conv_dgrad dy=f32[2,3,3,3] w=f32[3,2,1,1] x_shape=(2,2,8,7) stride=(3,3) padding=0",
    "conv_dgrad dy=bf16[1,8,2,2]nhwc w=bf16[8,3,4,4]nhwc x_shape=(1,3,8,8) stride=4",
    # Nothing in, zeros or nothing out.
    "conv_fprop x=f32[0,3,4,4] w=f32[2,3,3,3]",
    "conv_wgrad x=f32[0,3,4,4] dy=f32[0,2,2,2] w_shape=(2,3,3,3)",
    "conv_fprop x=f32[2,0,4,4] w=f32[3,0,3,3] bias=f32[3]",
    "conv_dgrad dy=f32[1,0,2,2] w=f32[0,2,3,3] x_shape=(1,2,4,4)",
    # Three dimensions channels last; depthwise in half precision; many images (no grid axis but x is that long).
    "conv_fprop x=f32[2,3,4,4,4]nhwc w=f32[4,3,3,3,3] padding=1",
    "conv_fprop x=f16[1,16,6,6] w=f16[16,1,3,3] padding=1 groups=16",
    "conv_fprop x=f32[65537,1,4] w=f32[1,1,2]",
    "conv_wgrad x=f32[5003,1,3] dy=f32[5003,1,2] w_shape=(1,1,2)",
    # 8 bits: exact sums of mixed signs, zero points that padding stands for, requantised results; floats with scales; an empty sum.
    "conv_fprop x=u8[2,5,6,7] w=s8[7,5,3,3] padding=1",
    "conv_fprop x=s8[2,16,6,7]nhwc w=s8[24,16,3,3]nhwc padding=1 stride=2 scale_x=f32[1] scale_w=f32[24] bias=f32[24] out_dtype=f16",
    "conv_fprop x=u8[1,32,6,6]nhwc w=s8[16,32,3,3]nhwc y=u8[1,16,6,6]nhwc padding=1 scale_x=f32[1] scale_w=f32[16] scale_y=f32[1] "
    "zero_x=u8[1] zero_y=u8[1] bias=s32[16]",
    "conv_fprop x=u8[2,3,7,5] w=u8[4,3,3,2] padding=((1,0),(2,1)) zero_x=u8[1] zero_w=u8[4]",
    "conv_fprop x=s8[2,4,9] w=s8[6,2,3] groups=2 dilation=2 padding=2 scale_x=f32[1] scale_w=f32[1] scale_y=f32[1] zero_w=s8[6] "
    "epilogue='relu(acc)'",
    "conv_fprop x=u8[2,0,4,4] w=s8[3,0,3,3] zero_x=u8[1] zero_w=s8[1] bias=s32[3]",
    "conv_fprop x=e4m3[1,16,5,5]nhwc w=e5m2[8,16,3,3]nhwc padding=1 scale_x=f32[1] scale_w=f32[8]",
    "conv_fprop x=e4m3[1,16,5,5]nhwc w=e4m3[8,16,3,3]nhwc y=e4m3[1,8,5,5]nhwc padding=1 scale_x=f32[1] scale_w=f32[1] scale_y=f32[1]",
    "conv_dgrad dy=e5m2[1,16,5,5]nhwc w=e4m3[16,8,3,3] x_shape=(1,8,10,10) padding=1 stride=2 scale_dy=f32[1] scale_w=f32[8]",
    "conv_wgrad x=e4m3[2,8,5,5]nhwc dy=e5m2[2,16,5,5]nhwc w_shape=(16,8,3,3) padding=1 scale_x=f32[1] scale_dy=f32[1] out_dtype=f32",
    "conv_transpose x=s8[1,8,3,3]nhwc w=s8[8,4,3,3] stride=2 scale_x=f32[1] scale_w=f32[4] scale_y=f32[1] zero_y=s8[1] bias=s32[4]",
    # What goes with a convolution: second outputs, results in 8 bits, moments, sums of dy's channels, expressions over the image.
    'conv_fprop x=f16[2,8,6,7]nhwc w=f16[16,8,3,3]nhwc padding=1 bias=f32[16] epilogue="relu(t := acc + bias[c]), t" return_stats=True',
    'conv_fprop x=f32[3,5,7] w=f32[4,5,3] y=s8[3,4,5] gain=f32[1] epilogue="acc * gain"',
    'conv_fprop x=bf16[2,8,5,6]nhwc w=bf16[8,8,3,3]nhwc padding=2 gain=f32[8] shift=bf16[8] prologue="relu(x * gain + shift)"',
    'conv_fprop x=f32[0,3,4,4] w=f32[2,3,3,3] return_stats=True',
    'conv_dgrad dy=bf16[1,8,3,4]nhwc w=bf16[8,16,3,3]nhwc x_shape=(1,16,6,7) stride=2 padding=1 saved=bf16[1,16,6,7]nhwc '
    'epilogue="where(saved > 0, acc, 0), acc"',
    'conv_transpose x=f32[2,3,4,4] w=f32[3,2,3,3] stride=2 epilogue="silu(acc), acc" return_stats=True',
    'conv_transpose_dgrad dy=f16[1,4,5] w=f16[3,4,2] x_shape=(1,3,4) epilogue="acc * 2, relu(acc)"',
    'conv_wgrad x=f32[2,6,5,5] dy=f32[2,4,5,5] w_shape=(4,3,3,3) padding=1 groups=2 gain=f32[6] prologue="silu(x * gain)" '
    'return_bias_grad=True',
    # Addresses that no vector load likes.
    "conv_fprop x=bf16[1,8,5,5]nhwc@2 w=bf16[8,8,3,3]nhwc@4 y=bf16[1,8,5,5]nhwc@2 padding=1",
    "conv_fprop x=f16[1,8,5,5](225,1,45,9) w=f16[8,8,1,1] y=f16[1,8,5,5](225,1,45,9)@2",
)

def _scale_fill(name: str, low: float, high: float) -> Any:
    def fill(rng: np.random.Generator, problem: Problem) -> np.ndarray:
        return rng.uniform(low, high, problem.desc(name).shape)

    return fill


_OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_transpose", "conv_transpose_dgrad", "conv_transpose_wgrad")
SAMPLES = {op: _sampler(op) for op in _OPS} | {"conv_bgrad": sample_bgrad}
CASES = {op: tuple(line for line in _ALL if line.split()[0] == op) for op in _OPS} | {
    "conv_bgrad": ("conv_bgrad dy=bf16[2,5,3,4]nhwc db=f32[5]", "conv_bgrad dy=f32[0,3,2,2]")}
# Scales of the inputs are such that products stay in the range of 8-bit results, whose own scale is around 1.
FILLS = {(op, name): _scale_fill(name, *((0.5, 2.0) if name == f"scale_{OPS[op].outputs[0]}" else (0.05, 0.4)))
         for op in _OPS for name in OPS[op].optional if name.startswith("scale_")}
