"""Attributes of wrong kind or size are refused before anything is built, naming the argument, its value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from oxidnn.codegen.pointwise import parse
from oxidnn.engines.matmul import _Axis, _parts
from oxidnn.errors import InvalidArgument
from oxidnn.ops import OPS
from oxidnn.ops.base import Policy, Problem
from oxidnn.ops.case import parse_tensor
from oxidnn.ops.pool import Axis

HUGE = 10**30
CONV = {"x": "f32[2,4,8,8]", "w": "f32[4,4,3,3]"}
IMAGE = {"x": "f32[2,4,8,8]"}
WINDOW = {"window": 2}
ROWS = {"x": "f32[3,8]"}
PROBABILITIES = {"logits": "f32[3,5]", "target": "s64[3]"}
MATRICES = {"a": "f32[2,3]", "b": "f32[3,4]"}


def make(op: str, tensors: dict[str, str], attrs: dict[str, Any]) -> Problem:
    return OPS[op].make({n: parse_tensor(t) for n, t in tensors.items()}, attrs, Policy())


# (op, tensors, attributes, what the message says)
REFUSED: list[tuple[str, dict[str, str], dict[str, Any], str]] = [
    *(("conv_transpose", CONV, {name: value}, f"{name} is " + re.escape(repr(value))) for name in ("stride", "dilation", "padding")
      for value in (HUGE, 2**31, 1.5, "x", [[1]], True)),
    ("conv_transpose", CONV, {"stride": 2**30}, "shape of y is .*extents <= 2147483647"),
    ("conv_fprop", CONV, {"padding": ((0, HUGE), (0, 0))}, "padding is"), ("conv_fprop", CONV, {"padding": np.ones(2)}, "padding is"),
    *(("conv_fprop", CONV, {"flip": value}, "flip is .*True or False") for value in ("x", 1, [], np.ones(2))),
    *(("conv_fprop", CONV, {"groups": value}, "groups is") for value in (HUGE, "x", [])),
    *(("conv_fprop", CONV, {"epilogue": value}, "epilogue is .*text") for value in ({}, [], 3)),
    ("conv_fprop", {"x": "f32[1,1,3000000000](1,1,1)", "w": "f32[1,1,3]"}, {}, "shape of x is .*extents <= 2147483647"),
    ("conv_fprop", {"x": f"f32[2,1,8]({2**62},8,1)", "w": "f32[1,1,3]"}, {}, "shape of x is .*byte offsets below 2\\^63"),
    *(("conv_dgrad", {"dy": "f32[2,4,6,6]", "w": "f32[4,4,3,3]"}, {"x_shape": v}, "x_shape is")
      for v in (3, "x", (1, 2), None, (2, 4, HUGE, 8), (2, 4, None, 8))),
    *(("conv_wgrad", {"x": "f32[2,4,8,8]", "dy": "f32[2,4,6,6]"}, {"w_shape": v}, "w_shape is") for v in (3, "x", (4, 4, 3.0, 3), None)),
    *((f"{mode}_pool_backward", {"dy": "f32[2,4,4,4]"} | (IMAGE if mode == "max" else {}), {"x_shape": v, **WINDOW}, "x_shape is")
      for mode in ("max", "avg") for v in (3, "x", (2, 4, "a", 8), (2, 4, -1, 8), (2, 4, HUGE, 8))),
    ("avg_pool_backward", {"dy": "f32[2,4,4,4]"}, {"x_shape": None, **WINDOW}, "x_shape is None"),
    *(("max_pool", IMAGE, {**WINDOW, name: v}, f"{name} is") for name in ("stride", "dilation", "padding")
      for v in (HUGE, "x", 1.5, True, [[1]])),
    *(("max_pool", IMAGE, {"window": v}, "window is") for v in (HUGE, "x", [], True)),
    *(("max_pool", IMAGE, {**WINDOW, name: v}, f"{name} is .*True or False") for name in ("ceil_mode", "return_indices")
      for v in ("x", 1, [1])),
    *(("avg_pool", IMAGE, {**WINDOW, "count_include_pad": v}, "count_include_pad is .*True or False") for v in ("no", 0, [])),
    *(("avg_pool", IMAGE, {**WINDOW, "divisor_override": v}, "divisor_override is") for v in (0, HUGE, "x", 1.5)),
    *(("lp_pool", IMAGE, {**WINDOW, "norm": v}, "norm is") for v in ("x", b"1", [1], 0, np.inf, np.nan, 1e300, True)),
    *((op, IMAGE, {"output_size": v}, "output_size is") for op in ("adaptive_avg_pool", "adaptive_max_pool")
      for v in (99999999999999999999, 2**31, "x", (3, 3, 3), 0)),
    ("adaptive_avg_pool", IMAGE, {"output_size": 2**31 - 1}, "shape of y is .*byte offsets"),
    *(("activation", ROWS, {"name": "leaky_relu", "parameters": v}, "parameters is") for v in ("x", [[1]], b"1", {})),
    *(("reduce", ROWS, {"op": "var", "correction": v}, "correction is") for v in ("x", [], 1.5, HUGE)),
    *(("reduce", ROWS, {"keepdims": v}, "keepdims is .*True or False") for v in ("x", 1, [0])),
    *(("reduce", ROWS, {"op": v}, "op is") for v in ([], 3, "median")),
    *(("reduce", ROWS, {"axes": v}, "axes is") for v in ("x", 1.0, True, HUGE)),
    *(("pointwise", ROWS, {"expression": v}, "expression is .*text") for v in ([1], {}, 3)),
    *(("cross_entropy", PROBABILITIES, {"ignore_index": v}, "ignore_index is") for v in (-HUGE, 2**63, "x", 1.0, True)),
    *(("cross_entropy", PROBABILITIES, {"label_smoothing": v}, "label_smoothing is") for v in ("x", np.nan, 2, [])),
    *(("cross_entropy", PROBABILITIES, {"reduction": v}, "reduction is") for v in ("x", np.ones(2), 1)),
    *(("softmax", ROWS, {"log": v}, "log is .*True or False") for v in (1, "x", [])), ("softmax", ROWS, {"axis": "x"}, "axis is"),
    *((op, ROWS, {"eps": v}, "eps is") for op in ("layer_norm", "rms_norm") for v in (np.inf, np.nan, -1, "x", [], 1e300, 10**400)),
    *(("layer_norm", ROWS, {name: v}, f"{name} is .*True or False") for name in ("return_stats", "return_sum")
      for v in (1, "x", np.ones(2))),
    *(("gemm", MATRICES, {"alpha": v}, "alpha is") for v in (b"1", "x", [], 1e300, np.inf, np.nan, True, 1j)),
    *(("gemm", MATRICES, {"transpose_a": v}, "transpose_a is .*True or False") for v in (1, "x", np.ones(2))),
]


@pytest.mark.parametrize(("op", "tensors", "attrs", "match"), REFUSED, ids=lambda v: re.sub(r"\W+", "-", str(v))[:40])
def test_refused(op: str, tensors: dict[str, str], attrs: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{op}: {match}") as caught:
        make(op, tensors, attrs)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize("source", [[1], {}, 3, None, "x + \0"])
def test_what_is_no_expression_is_refused(source: Any) -> None:
    with pytest.raises(InvalidArgument, match="^expression: "):
        parse(source)


def test_numpy_scalars_are_taken() -> None:
    one, two, yes = np.int64(1), np.int32(2), np.bool_(True)
    assert make("conv_fprop", CONV, {"padding": one, "stride": (two, two), "flip": yes}) == make(
        "conv_fprop", CONV, {"padding": 1, "stride": 2, "flip": True})
    assert make("max_pool", IMAGE, {"window": two, "ceil_mode": yes}) == make("max_pool", IMAGE, {"window": 2, "ceil_mode": True})
    assert make("gemm", MATRICES, {"alpha": np.float32(0.5)}) == make("gemm", MATRICES, {"alpha": 0.5})
    assert make("reduce", ROWS, {"axes": (one,), "keepdims": yes}) == make("reduce", ROWS, {"axes": 1, "keepdims": True})


def test_bins_of_adaptive_pools_by_counting() -> None:
    for length in range(1, 25):
        for count in range(1, 25):
            sizes = [-(-(o + 1) * length // count) - o * length // count for o in range(count)]
            axis = make("adaptive_avg_pool", {"x": f"f32[1,1,{length}]"}, {"output_size": count}).axes[0]  # type: ignore[attr-defined]
            assert axis.window == max(sizes)
            starts = [o * length // count for o in range(count)]
            sharing = max(sum(s <= i < s + n for s, n in zip(starts, sizes, strict=True)) for i in range(length))
            assert Axis(length, count, axis.window, adaptive=True).max_sharing == sharing


def test_empty_windows_by_counting() -> None:
    for length, window, stride, dilation, low in np.ndindex(5, 3, 4, 7, 9):
        attrs = {"window": window + 1, "stride": stride + 1, "dilation": dilation + 1, "padding": ((low, low),)}
        extent, reach = length + 1, dilation * window + window + 1
        outputs = (extent + 2 * low - reach) // (stride + 1) + 1 if extent + 2 * low >= reach else 0
        taps = [[o * (stride + 1) - low + k * (dilation + 1) for k in range(window + 1)] for o in range(outputs)]
        is_legal = outputs > 0 and all(any(0 <= t < extent for t in row) for row in taps)
        try:
            make("max_pool", {"x": f"f32[1,1,{extent}]"}, attrs)
            assert is_legal, attrs
        except InvalidArgument:
            assert not is_legal, attrs


def coordinates(axis: _Axis) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Every image coordinate that the parts write, with the taps they add up there."""
    for part in _parts(axis):
        for index in np.ndindex(*(extent for extent, _ in part.m)):
            i = part.first + sum(j * step for j, (_, step) in zip(index, part.m, strict=True))
            positions = [(part.position + index[0] - t * part.tap_back, part.tap_first + t * part.tap_step) for t in range(part.taps)]
            yield i, tuple(sorted(r for p, r in positions if 0 <= p < axis.positions))


def test_parts_of_a_transposed_convolution_by_counting() -> None:
    for taps, step, dilation, pad, rest in np.ndindex(4, 6, 4, 3, 3):
        taps, step, dilation, positions = taps + 1, step + 1, dilation + 1, 3
        image = (positions - 1) * step + (taps - 1) * dilation + 1 - 2 * pad + rest
        axis = _Axis(image, taps, positions, step, pad, dilation, 1, 1, 0, 1)
        if image < 1 or any(p.is_disjoint for p in _parts(axis)):
            continue
        reached = range(0, positions * step, step)
        want = [(i, tuple(r for r in range(taps) if i + pad - r * dilation in reached)) for i in range(image)]
        assert sorted(coordinates(axis)) == want, axis


def test_a_long_stride_is_split_without_counting_its_classes() -> None:
    axis = _Axis(2**31 - 1, 3, 2, 2**31 - 4, 0, 1, 1, 1, 0, 1)
    assert [(p.first, p.m) for p in _parts(axis)] == [
        (0, ((2, 2**31 - 4),)), (1, ((2, 2**31 - 4),)), (2, ((2, 2**31 - 4),)), (3, ((1, 2**31 - 4), (2**31 - 7, 1)))]
