"""Windows of images of 1 to 3 dimensions: every type, layout, order, stride, dilation and padding; more taps than are unrolled."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, F64, TABLE
from ...ops import OPS
from ...ops.base import Policy, Problem
from . import Sampler
from .tensors import random_desc


def draw_window(rng: np.random.Generator, rank: int, is_tiny: bool) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """Attributes of a window, extents of an image that holds one, and how many positions there are."""
    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(v) for v in rng.integers(low, high + 1, rank))

    kernel = each(1, 4 if rank < 3 else 3)
    if rng.random() < 0.1:
        kernel = (int(rng.integers(17, 21)), *kernel[1:]) if rng.random() < 0.5 else (*kernel[:-1], int(rng.integers(17, 21)))
    stride = each(1, 3) if rng.random() < 0.6 else (1,) * rank
    dilation = each(1, 3) if rng.random() < 0.3 else (1,) * rank
    padding = tuple(zip(each(0, 2), each(0, 2), strict=True)) if rng.random() < 0.6 else ((0, 0),) * rank
    reach = [(r - 1) * d + 1 for r, d in zip(kernel, dilation, strict=True)]
    top = {1: 30, 2: 7, 3: 3}[rank] if is_tiny else {1: 300, 2: 30, 3: 8}[rank]
    extents = tuple(max(1, e - lo - hi) + int(rng.integers(0, top)) for e, (lo, hi) in zip(reach, padding, strict=True))
    positions = tuple((n + lo + hi - e) // u + 1 for n, (lo, hi), e, u in zip(extents, padding, reach, stride, strict=True))
    return {"kernel": kernel, "stride": stride, "dilation": dilation, "padding": padding}, extents, positions


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    sums, has_rows = op in ("fold", "col2im"), op in ("im2col", "col2im")
    rank = int(rng.choice((1, 2, 3), p=(0.3, 0.5, 0.2)))
    attrs, extents, positions = draw_window(rng, rank, size == "tiny")
    channels = int(rng.integers(1, 6)) if rng.random() < 0.5 else int(rng.choice((8, 16, 24)))
    n = 0 if rng.random() < 0.04 else int(rng.integers(1, 4))
    kind = (F32, F32, F16, BF16, F64)[int(rng.integers(5))] if sums else TABLE[int(rng.integers(len(TABLE)))]
    length, elements = prod(positions), channels * prod(attrs["kernel"])
    columns = (n, length, elements) if has_rows else (n, elements, length)
    if has_rows and rng.random() < 0.5:
        attrs["order"] = "rsc"
    if sums:
        attrs["output_size"] = extents
    shapes = (columns, (n, channels, *extents)) if sums else ((n, channels, *extents), columns)
    is_dense = rng.random() < 0.3
    tensors = {"x": random_desc(rng, kind, shapes[0], is_dense=is_dense and not sums)}
    if rng.random() < 0.6:
        tensors["y"] = random_desc(rng, kind, shapes[1], is_output=True, is_dense=is_dense and sums)
    return OPS[op].make(tensors, attrs, Policy())


_OPS = ("unfold", "fold", "im2col", "col2im")
SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in _OPS}
CASES: dict[str, tuple[str, ...]] = {
    "unfold": ("unfold x=f32[2,3,7,6]nchw kernel=3 padding=1", "unfold x=bf16[1,5,9]nchw kernel=4 stride=2 padding=((1,2),)",
               "unfold x=u8[1,2,4,5,6]nhwc kernel=(2,3,1) dilation=(1,2,1)", "unfold x=e4m3[1,3,5,5]nchw kernel=2 padding=((0,1),(1,0))",
               "unfold x=f32[0,3,7,6]nchw kernel=3", "unfold x=f32[1,2,2,3]nchw kernel=5 padding=2",
               "unfold x=f64[70000,1,4]nchw kernel=2"),
    "fold": ("fold x=f32[2,27,42]nchw output_size=(7,6) kernel=3 padding=1",
             "fold x=f16[1,8,5]nchw output_size=10 kernel=4 stride=2 padding=1",
             "fold x=bf16[1,2,1000]nchw output_size=(40,25) kernel=1",
             "fold x=f64[1,12,2]nchw output_size=(9,4) kernel=(4,3) stride=(5,2)"),
    "im2col": ("im2col x=bf16[2,16,6,6]nhwc kernel=3 padding=1 order=rsc", "im2col x=s8[1,3,6,5]nchw kernel=(3,2)",
               "im2col x=f32[1,4,5,5]nhwc kernel=3 stride=2 padding=1 order=rsc"),
    "col2im": ("col2im x=bf16[2,36,144]nchw output_size=(6,6) kernel=3 padding=1 order=rsc",
               "col2im x=f32[1,16,18]nchw output_size=(6,5) kernel=(3,2)",
               "col2im x=f16[1,4,72]nchw output_size=(4,4) kernel=3 stride=2 padding=1 order=rsc y=f16[1,8,4,4]nhwc"),
}
