"""Layout and shape ops by NumPy's own functions; gradients add up by the indices that the forward makes of numbered elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...codegen.pointwise import round_to
from ...dtypes import F32, F64, DType
from ...ops.base import Problem
from ...ops.layout import LayoutProblem
from . import Expected, Reference

_NUMPY_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def cast(x: np.ndarray, kind: DType, saturate: bool) -> np.ndarray:
    """The values as `kind` holds them, floats but those of 8 bits not yet rounded."""
    if kind.is_float:
        return x.astype(np.float64) if kind.num_bytes > 1 else round_to(x.astype(np.float64), kind.name, saturate)
    if kind.kind == "bool":
        return x != 0
    if x.dtype.kind != "f":
        return x.astype(kind.numpy)
    info = np.iinfo(kind.numpy)
    whole = np.trunc(np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf))
    high, low = whole >= float(info.max), whole <= float(info.min)
    inside = np.where(high | low, 0.0, whole).astype(kind.numpy)
    return np.where(high, np.array(info.max, kind.numpy), np.where(low, np.array(info.min, kind.numpy), inside))


def _slice(attrs: Mapping[str, Any], rank: int) -> tuple[slice, ...]:
    axes = attrs.get("axes", tuple(range(rank)))
    found = [slice(None)] * rank
    columns = [attrs.get(name, (None,) * len(axes)) for name in ("starts", "stops", "steps")]
    for axis, start, stop, step in zip(axes, *columns, strict=True):
        found[axis] = slice(start, stop, step)
    return tuple(found)


def _pad(x: np.ndarray, attrs: Mapping[str, Any], rank: int) -> np.ndarray:
    padding = attrs.get("padding", ((0, 0),) * rank)
    mode = attrs.get("mode", "constant")
    grown = [(max(low, 0), max(high, 0)) for low, high in padding]
    options = {"constant_values": np.float64(attrs["value"]) if x.dtype.kind == "f" else attrs["value"]} if "value" in attrs else {}
    y = np.pad(x, grown, _NUMPY_MODES[mode], **options) if rank else x  # type: ignore[call-overload]
    return y[tuple(slice(max(-low, 0), n - max(-high, 0)) for n, (low, high) in zip(y.shape, padding, strict=True))]


def _roll(x: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    axes = attrs.get("axes")
    if axes is None:
        return np.roll(x, attrs.get("shifts", 0))
    return np.roll(x, attrs.get("shifts", (0,) * len(axes)), axes) if axes else x


def _fill(problem: LayoutProblem) -> np.ndarray:
    attrs, kind = dict(problem.attrs), problem.desc("y").dtype
    value = attrs.get("value", 0)
    return np.full(problem.desc("y").shape, np.float64(value) if kind.is_float else value, np.float64 if kind.is_float else kind.numpy)


def _transposed(problem: LayoutProblem, dy: np.ndarray, places: np.ndarray) -> dict[str, Expected]:
    """dx of a forward that puts the element places[o] of x (numbered) at o."""
    dx = problem.desc("dx")
    total, magnitude = np.zeros(dx.numel), np.zeros(dx.numel)
    np.add.at(total, places.ravel(), dy.ravel())
    np.add.at(magnitude, places.ravel(), np.abs(dy).ravel())
    terms = int(np.bincount(places.ravel(), minlength=1).max()) if places.size else 1
    accumulate = F64 if dx.dtype is F64 else F32
    return {"dx": Expected(total.reshape(dx.shape), magnitude.reshape(dx.shape), terms, accumulate)}


def _scaled(problem: LayoutProblem, inputs: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    y = problem.desc("y").dtype
    if problem.alpha == 1.0 and not problem.has("c"):
        return {"y": Expected(cast(inputs["x"], y, problem.saturate))}
    want = problem.alpha * inputs["x"].astype(np.float64)
    magnitude = np.abs(want)
    if problem.has("c"):
        want = want + problem.beta * inputs["c"].astype(np.float64)
        magnitude = magnitude + np.abs(problem.beta * inputs["c"].astype(np.float64))
    wide = any(o.desc.dtype.name == "f64" or (not o.desc.dtype.is_float and o.desc.dtype.bits >= 32) for o in problem.operands)
    return {"y": Expected(cast(want, y, problem.saturate), magnitude, 4, F64 if wide else F32)}


def _split(problem: LayoutProblem, inputs: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    attrs = dict(problem.attrs)
    parts = np.split(inputs["x"], np.cumsum(attrs["sizes"])[:-1], attrs.get("axis", 0))
    return {o.name: Expected(part) for o, part in zip(problem.outputs, parts, strict=True)}


def _run(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, LayoutProblem)
    op, attrs = problem.op, dict(problem.attrs)
    if op in ("transform", "cast"):
        return _scaled(problem, inputs)
    if op == "meshgrid":
        grids = np.meshgrid(*(inputs[o.name] for o in problem.inputs), indexing=attrs.get("indexing", "ij"))
        return {o.name: Expected(grid) for o, grid in zip(problem.outputs, grids, strict=True)}
    if op == "split":
        return _split(problem, inputs)
    if op == "fill":
        return {"y": Expected(_fill(problem))}
    if op == "concat":
        return {"y": Expected(np.concatenate([inputs[o.name] for o in problem.inputs], attrs.get("axis", 0)))}
    if op.endswith("_backward"):
        dy, shape = inputs["dy"], problem.desc("dx").shape
        numbers = np.arange(problem.desc("dx").numel).reshape(shape)
        if op == "slice_backward":
            dx: Any = np.zeros(shape, dy.dtype)
            dx[_slice(attrs, len(shape))] = dy
            return {"dx": Expected(dx)}
        if op == "tile_backward":
            return _transposed(problem, dy, np.tile(numbers, attrs.get("repeats", ())))
        if attrs.get("mode", "constant") != "constant":
            return _transposed(problem, dy, _pad(numbers, attrs, dy.ndim))
        back = tuple((-low, -high) for low, high in attrs.get("padding", ((0, 0),) * dy.ndim))
        return {"dx": Expected(_pad(dy, {"padding": back}, dy.ndim))}
    x = inputs["x"]
    forward: dict[str, Callable[[], Any]] = {
        "permute": lambda: np.transpose(x, attrs.get("dims")), "broadcast_to": lambda: np.broadcast_to(x, attrs["shape"]),
        "flip": lambda: np.flip(x, attrs.get("axes")), "roll": lambda: _roll(x, attrs), "slice": lambda: x[_slice(attrs, x.ndim)],
        "tile": lambda: np.tile(x, attrs.get("repeats", ())), "triu": lambda: np.triu(x, attrs.get("diagonal", 0)),
        "tril": lambda: np.tril(x, attrs.get("diagonal", 0)), "pad": lambda: _pad(x, attrs, x.ndim),
    }
    return {"y": Expected(np.asarray(forward[op]()))}


_OPS = ("permute", "transform", "cast", "broadcast_to", "flip", "roll", "slice", "slice_backward", "tile", "tile_backward", "triu", "tril",
        "pad", "pad_backward", "concat", "split", "fill", "meshgrid")
REFERENCES: dict[str, Reference] = {op: _run for op in _OPS}
