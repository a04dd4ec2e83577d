"""Layout and shape problems: every type and layout, gaps, reversed and misaligned tensors, rules inside and far outside of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...dtypes import TABLE, DType, dtype
from ...errors import InvalidArgument
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.layout import MAX_PARTS, MAX_RANK, MODES
from ...tensor import TensorDesc
from . import Sampler
from .pointwise import FLOATS, INTEGERS, view

Shape = tuple[int, ...]
NUMBERS = (*FLOATS, *INTEGERS, "bool", "u64", "e4m3", "e5m2")


def _shape(rng: np.random.Generator, size: str, least: int = 0, most: int = 5) -> Shape:
    rank = int(rng.integers(least, most + 1))
    limit = ({0: 1, 1: 300, 2: 40, 3: 14, 4: 7, 5: 5} if size == "tiny" else {0: 1, 1: 70000, 2: 400, 3: 50, 4: 24, 5: 12})[rank]
    shape = [int(rng.integers(1, limit + 1)) for _ in range(rank)]
    if rank and rng.random() < 0.4:
        shape[int(rng.integers(rank))] = int(rng.choice([8, 16, 32, 64]))
    if rank and rng.random() < 0.03:
        shape[int(rng.integers(rank))] = 0
    return tuple(shape)


def _kind(rng: np.random.Generator) -> DType:
    return TABLE[int(rng.integers(len(TABLE)))]


def _made(op: str, rng: np.random.Generator, tensors: dict[str, TensorDesc], attrs: dict[str, Any], result: str = "y") -> Problem:
    problem = OPS[op].make(tensors, attrs, Policy())
    if rng.random() < 0.5:
        y = problem.desc(result)
        problem = OPS[op].make(tensors | {result: view(rng, y.dtype, y.shape, True)}, attrs, Policy())
    return problem


def _permute(rng: np.random.Generator, size: str) -> Problem:
    shape = _shape(rng, size)
    attrs = {} if rng.random() < 0.3 else {"dims": tuple(int(d) for d in rng.permutation(len(shape)))}
    return _made("permute", rng, {"x": view(rng, _kind(rng), shape)}, attrs)


def _transform(rng: np.random.Generator, size: str) -> Problem:
    shape = _shape(rng, size)
    kinds = [dtype(str(rng.choice(NUMBERS))) for _ in range(3)]
    attrs: dict[str, Any] = {"dtype": kinds[1].name}
    tensors = {"x": view(rng, kinds[0], shape)}
    if rng.random() < 0.6:
        attrs["alpha"] = float(rng.choice([0.5, 2.0, -1.0]))
    if rng.random() < 0.4:
        attrs["beta"], tensors["c"] = float(rng.choice([1.0, 0.25])), view(rng, kinds[2], shape)
    if rng.random() < 0.3:
        attrs["layout"] = str(rng.choice(["nchw", "nhwc"]))
    return _made("transform", rng, tensors, attrs)


def _cast(rng: np.random.Generator, size: str) -> Problem:
    attrs = {"dtype": str(rng.choice(NUMBERS))}
    return _made("cast", rng, {"x": view(rng, dtype(str(rng.choice(NUMBERS))), _shape(rng, size))}, attrs)


def _broadcast_to(rng: np.random.Generator, size: str) -> Problem:
    shape = _shape(rng, size)
    own = tuple(1 if rng.random() < 0.4 else n for n in shape)[int(rng.integers(0, len(shape) + 1)):]
    return _made("broadcast_to", rng, {"x": view(rng, _kind(rng), own)}, {"shape": shape})


def _axes(rng: np.random.Generator, rank: int) -> Shape:
    return tuple(int(a) for a in np.flatnonzero(rng.random(rank) < 0.6))


def _flip(rng: np.random.Generator, size: str) -> Problem:
    shape = _shape(rng, size)
    attrs = {} if rng.random() < 0.3 else {"axes": _axes(rng, len(shape))}
    return _made("flip", rng, {"x": view(rng, _kind(rng), shape)}, attrs)


def _roll(rng: np.random.Generator, size: str) -> Problem:
    shape = _shape(rng, size)
    axes = _axes(rng, len(shape))
    if rng.random() < 0.2:
        return _made("roll", rng, {"x": view(rng, _kind(rng), shape)}, {"shifts": int(rng.integers(-50, 50))})
    shifts = tuple(int(s) for s in rng.integers(-70, 70, len(axes)))
    return _made("roll", rng, {"x": view(rng, _kind(rng), shape)}, {"shifts": shifts, "axes": axes})


def _slices(rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    axes = _axes(rng, len(shape)) if rng.random() < 0.5 else tuple(range(len(shape)))
    rows: dict[str, list[int | None]] = {"starts": [], "stops": [], "steps": []}
    for a in axes:
        n = shape[a]
        step = int(rng.choice([1, 1, 1, 2, 3, -1, -2]))
        start, stop = (None if rng.random() < 0.3 else int(rng.integers(-n - 1, n + 2)) for _ in range(2))
        for name, value in zip(rows, (start, stop, step), strict=True):
            rows[name].append(value)
    return {name: tuple(values) for name, values in rows.items()} | {"axes": axes}


def _slice(rng: np.random.Generator, size: str) -> Problem:
    shape = _shape(rng, size)
    return _made("slice", rng, {"x": view(rng, _kind(rng), shape)}, _slices(rng, shape))


def _slice_backward(rng: np.random.Generator, size: str) -> Problem:
    shape, kind = _shape(rng, size), _kind(rng)
    attrs = _slices(rng, shape)
    y = OPS["slice"].make({"x": TensorDesc.packed(kind, shape)}, attrs, Policy()).desc("y")
    return _made("slice_backward", rng, {"dy": view(rng, kind, y.shape)}, attrs | {"x_shape": shape}, "dx")


def _repeats(rng: np.random.Generator, rank: int) -> Any:
    if rng.random() < 0.2:
        return int(rng.integers(0, 4))
    return tuple(int(r) for r in rng.choice([1, 1, 2, 3], int(rng.integers(0, min(rank + 2, 6)))))


def _tile(rng: np.random.Generator, size: str) -> Problem:
    shape = _shape(rng, size, most=4)
    return _made("tile", rng, {"x": view(rng, _kind(rng), shape)}, {"repeats": _repeats(rng, len(shape))})


def _tile_backward(rng: np.random.Generator, size: str) -> Problem:
    shape, kind = _shape(rng, size, most=4), dtype(str(rng.choice(FLOATS)))
    attrs = {"repeats": _repeats(rng, len(shape))}
    y = OPS["tile"].make({"x": TensorDesc.packed(kind, shape)}, attrs, Policy()).desc("y")
    return _made("tile_backward", rng, {"dy": view(rng, kind, y.shape)}, attrs | {"x_shape": shape}, "dx")


def _triangle(op: str, rng: np.random.Generator, size: str) -> Problem:
    shape = _shape(rng, size, least=2)
    return _made(op, rng, {"x": view(rng, _kind(rng), shape)}, {"diagonal": int(rng.integers(-9, 10))})


def _padding(rng: np.random.Generator, shape: Shape) -> tuple[tuple[int, int], ...]:
    pairs = []
    for n in shape:
        draw = rng.random()
        if draw < 0.3:
            pairs.append((0, 0))
        elif draw < 0.4:
            pairs.append((-int(rng.integers(0, n // 2 + 1)), int(rng.integers(0, 4))))
        elif draw < 0.5:
            pairs.append((8, 16))
        else:
            most = 2 * n + 2 if draw > 0.9 else max(n, 1)  # beyond one period
            pairs.append((int(rng.integers(0, min(most, 20))), int(rng.integers(0, min(most, 20)))))
    return tuple(pairs)


def _pad(rng: np.random.Generator, size: str) -> Problem:
    while True:
        shape, kind = _shape(rng, size, most=4), _kind(rng)
        attrs: dict[str, Any] = {"padding": _padding(rng, shape), "mode": str(rng.choice(MODES))}
        if attrs["mode"] == "constant" and rng.random() < 0.6:
            attrs["value"] = 1 if not kind.is_float else float(rng.choice([1.5, -2.0]))
            if kind.is_float and kind.name != "e4m3" and rng.random() < 0.3:
                attrs["value"] = "-inf"
        try:
            return _made("pad", rng, {"x": view(rng, kind, shape)}, attrs)
        except InvalidArgument:  # e.g. nothing to reflect: draw again
            continue


def _pad_backward(rng: np.random.Generator, size: str) -> Problem:
    while True:
        shape, mode = _shape(rng, size, most=4), str(rng.choice(MODES))
        kind = dtype(str(rng.choice(FLOATS)))
        attrs: dict[str, Any] = {"padding": _padding(rng, shape), "mode": mode}
        try:
            y = OPS["pad"].make({"x": TensorDesc.packed(kind, shape)}, attrs, Policy()).desc("y")
            return _made("pad_backward", rng, {"dy": view(rng, kind, y.shape)}, attrs, "dx")
        except InvalidArgument:
            continue


def _cut(rng: np.random.Generator, size: str) -> tuple[Shape, int, tuple[int, ...]]:
    """A shape, an axis, and sizes along it."""
    shape = _shape(rng, size, least=1, most=4)
    axis = int(rng.integers(len(shape)))
    cuts = sorted(int(c) for c in rng.integers(0, shape[axis] + 1, int(rng.choice([0, 1, 2, 4, 20]))))
    if rng.random() < 0.4:
        cuts = [c // 8 * 8 for c in cuts]
    edges = [0, *cuts, shape[axis]]
    return shape, axis, tuple(b - a for a, b in zip(edges[:-1], edges[1:], strict=True))


def _concat(rng: np.random.Generator, size: str) -> Problem:
    (shape, axis, sizes), kind = _cut(rng, size), _kind(rng)
    tensors = {f"x{i}": view(rng, kind, (*shape[:axis], n, *shape[axis + 1:])) for i, n in enumerate(sizes)}
    return _made("concat", rng, tensors, {"axis": axis - len(shape) if rng.random() < 0.3 else axis})


def _split(rng: np.random.Generator, size: str) -> Problem:
    (shape, axis, sizes), kind = _cut(rng, size), _kind(rng)
    return _made("split", rng, {"x": view(rng, kind, shape)}, {"axis": axis, "sizes": sizes}, "y0")


def _meshgrid(rng: np.random.Generator, size: str) -> Problem:
    count = int(rng.integers(1, 5))
    most = {1: 500, 2: 60, 3: 14, 4: 6}[count] * (1 if size == "tiny" else 4)
    kinds = [_kind(rng)] * count if rng.random() < 0.5 else [_kind(rng) for _ in range(count)]
    least = 0 if rng.random() < 0.05 else 1
    tensors = {f"x{i}": view(rng, kind, (int(rng.integers(least, most)),)) for i, kind in enumerate(kinds)}
    return _made("meshgrid", rng, tensors, {"indexing": str(rng.choice(["ij", "xy"]))}, "y0")


def _fill(rng: np.random.Generator, size: str) -> Problem:
    shape, kind = _shape(rng, size), _kind(rng)
    value = float(rng.choice([0.5, -3.0])) if kind.is_float else 1
    if rng.random() < 0.5:
        return OPS["fill"].make({"y": view(rng, kind, shape, True)}, {"value": value}, Policy())
    return OPS["fill"].make({}, {"shape": shape, "dtype": kind.name, "value": value}, Policy())


_DRAWS: dict[str, Callable[[np.random.Generator, str], Problem]] = {
    "permute": _permute, "transform": _transform, "cast": _cast, "broadcast_to": _broadcast_to, "flip": _flip, "roll": _roll,
    "slice": _slice,
    "slice_backward": _slice_backward, "tile": _tile, "tile_backward": _tile_backward, "triu": partial(_triangle, "triu"),
    "tril": partial(_triangle, "tril"), "pad": _pad, "pad_backward": _pad_backward, "concat": _concat, "split": _split, "fill": _fill,
    "meshgrid": _meshgrid,
}
SAMPLES: dict[str, Sampler] = dict(_DRAWS)
_MANY = " ".join(f"x{i}=u8[1,{1 + i % 3}]" for i in range(MAX_PARTS))
CASES: dict[str, tuple[str, ...]] = {
    "permute": ("permute x=bf16[70,136]nchw", "permute x=f32[37,50]nchw", "permute x=u8[130,260]nchw", "permute x=f64[19,34]nchw",
                "permute x=f16[2,3,40,24]nchw dims=(0,2,3,1)", "permute x=bf16[4,6,3,32]nchw dims=(0,2,1,3)", "permute x=s64[]",
                "permute x=f32[0,3]nchw", "permute x=e4m3[33,47]nchw"),
    "transform": ("transform x=bf16[2,16,5,7]nchw layout=nhwc", "transform x=f32[2,16,5,7]nhwc y=f16[2,16,5,7]nchw dtype=f16 alpha=0.5",
                  "transform x=f32[9,40]nchw c=bf16[9,40](1,9) alpha=2.0 beta=0.25",
                  "transform x=bf16[2,16,5,7]nchw layout=nhwc dtype=e4m3 alpha=100.0",
                  "transform x=e5m2[40,33]nchw y=f16[40,33](1,40) dtype=f16",
                  "transform x=u8[3,64]nchw c=f16[3,64]nchw dtype=bool beta=2.0", "transform x=s8[64]nchw c=f64[64]nchw beta=0.5",
                  "transform x=f32[19,40]nchw c=e4m3[19,40]nchw dtype=e5m2 beta=2.0 saturate=False"),
    "cast": ("cast x=f32[1000003]nchw dtype=bf16", "cast x=s64[9,33]nchw dtype=s8", "cast x=f32[2,8,3,5]nhwc dtype=u8",
             "cast x=f16[7,5]nchw dtype=bool", "cast x=u64[31]nchw dtype=f32", "cast x=f64[12]nchw@8 dtype=bf16",
             "cast x=bool[3,4] dtype=f64", "cast x=f32[3,65]nchw dtype=e4m3", "cast x=bf16[64,3]nchw dtype=e5m2 saturate=False",
             "cast x=e4m3[5,40]nchw dtype=f16", "cast x=e5m2[33]nchw@1 dtype=e4m3 saturate=False", "cast x=f64[77]nchw dtype=e4m3",
             "cast x=s32[77]nchw dtype=e5m2", "cast x=e4m3[2,16,5]nhwc dtype=s8"),
    "broadcast_to": ("broadcast_to x=f32[5,1]nchw shape=(3,5,8)", "broadcast_to x=u8[] shape=(33,)"),
    "flip": ("flip x=f16[5,40]nchw axes=(1,)", "flip x=f32[3,4,8]nchw axes=(0,1)", "flip x=s16[7]nchw"),
    "roll": ("roll x=f32[7,9]nchw shifts=11", "roll x=f16[7,40]nchw shifts=(-3,5) axes=(0,1)",
             "roll x=u8[6,16]nchw shifts=(2,2) axes=(0,0)",
             "roll x=f64[5]nchw", "roll x=f32[3,5,7,2]nhwc shifts=-64", "roll x=u8[4,6](1,9) y=u8[4,6](7,1) shifts=13"),
    "slice": ("slice x=f32[7,40]nchw starts=(1,8) stops=(None,32)", "slice x=f16[9,30]nchw starts=(None,None) steps=(-2,3)",
              "slice x=bf16[9]nchw", "slice x=s32[4,5]nchw starts=3 stops=3 axes=(1,)"),
    "slice_backward": ("slice_backward dy=f32[6,24]nchw x_shape=(7,40) starts=(1,8) stops=(None,32)",
                       "slice_backward dy=f16[5,10]nchw x_shape=(9,30) steps=(-2,3)", "slice_backward dy=f32[3,4]nchw x_shape=(3,4)"),
    "tile": ("tile x=f32[3,8]nchw repeats=(2,3)", "tile x=bf16[5]nchw repeats=(2,1,3)", "tile x=u8[2,3]nchw repeats=0",
             "tile x=f16[4,5]nchw"),
    "tile_backward": ("tile_backward dy=f32[6,24]nchw repeats=(2,3)", "tile_backward dy=f16[2,1,15]nchw repeats=(2,1,3) x_shape=(5,)",
                      "tile_backward dy=f32[2,0]nchw repeats=0 x_shape=(2,3)", "tile_backward dy=f64[4,5]nchw"),
    "triu": ("triu x=f32[2,9,16]nchw", "triu x=bf16[24,17]nchw diagonal=-3", "triu x=f16[16,24](1,16) diagonal=4"),
    "tril": ("tril x=f32[2,9,16]nchw", "tril x=u8[24,17]nchw diagonal=5", "tril x=s64[16,24](1,16) diagonal=-2"),
    "pad": ("pad x=f32[2,3,5,6]nchw padding=((0,0),(0,0),(1,1),(2,1)) value=1.5",
            "pad x=bf16[2,16,5,6]nhwc padding=((0,0),(0,0),(1,1),(1,1))",
            "pad x=f16[3,40]nchw padding=((0,0),(8,16)) value=-inf", "pad x=f32[4,33]nchw padding=((3,2),(31,32)) mode=reflect",
            "pad x=s8[4,33]nchw padding=((9,9),(70,3)) mode=reflect", "pad x=bf16[5,9]nchw padding=2 mode=replicate",
            "pad x=f64[3,7]nchw padding=((2,2),(-1,5)) mode=circular", "pad x=f32[2,6]nchw padding=((5,7),(0,25)) mode=circular",
            "pad x=f32[0,3]nchw padding=((1,1),(0,0))", "pad x=f32[7]nchw"),
    "pad_backward": ("pad_backward dy=f32[2,3,7,9]nchw padding=((0,0),(0,0),(1,1),(2,1))",
                     "pad_backward dy=f32[9,96]nchw padding=((3,2),(31,32)) mode=reflect",
                     "pad_backward dy=bf16[2,16,7,8]nhwc padding=((0,0),(0,0),(1,1),(1,1)) mode=reflect",
                     "pad_backward dy=f16[22,106]nchw padding=((9,9),(70,3)) mode=reflect",
                     "pad_backward dy=bf16[9,13]nchw padding=2 mode=replicate",
                     "pad_backward dy=f64[7,11]nchw padding=((2,2),(-1,5)) mode=circular", "pad_backward dy=f32[7]nchw"),
    "concat": ("concat x0=f32[3,8]nchw x1=f32[3,16]nchw x2=f32[3,0]nchw axis=1", "concat x0=bf16[2,3,5]nchw x1=bf16[2,7,5](35,1,7) axis=1",
               "concat x0=f16[4]nchw", f"concat {_MANY} axis=1"),
    "meshgrid": ("meshgrid x0=f32[7] x1=s64[9]", "meshgrid x0=bf16[5]nchw x1=bf16[16]nchw x2=bf16[8](2) indexing=xy", "meshgrid x0=u8[33]",
                 "meshgrid " + " ".join(f"x{i}=f16[{1 + i % 3}]" for i in range(MAX_RANK))),
    "split": ("split x=f32[3,24]nchw sizes=(8,0,16) axis=1", "split x=bf16[7,5]nchw sizes=3", "split x=u8[64]nchw sizes=2"),
    "fill": ("fill shape=(3,77) value=1.5", "fill y=f32[2,5]nchw", "fill y=bf16[2,8,3,3]nhwc value=-inf",
             "fill shape=() dtype=s64 value=-7",
             "fill y=u8[5,9](20,2) value=255", "fill shape=(1003,) dtype=bool value=1"),
}
