"""The ONNX node tests of reductions, softmax, poolings and norms of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oxidnn

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")

REDUCTIONS = {"ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "max", "ReduceMin": "min", "ReduceProd": "prod",
              "ReduceL1": "norm1", "ReduceL2": "norm2", "ReduceLogSumExp": "logsumexp", "ReduceLogSum": "sum", "ReduceSumSquare": "sum",
              "ArgMax": "argmax", "ArgMin": "argmin"}  # fmt: skip
Attrs = dict[str, Any]


def reduction(h: oxidnn.DnnHandle, node: Any, attrs: Attrs, x: np.ndarray, axes: np.ndarray | None = None) -> list[Any]:
    chosen = attrs.get("axes", None if axes is None or not axes.size else axes.tolist())
    if node.op_type.startswith("Arg"):
        chosen = [attrs.get("axis", 0)]
    if chosen is None and attrs.get("noop_with_empty_axes"):
        return [x]
    if attrs.get("select_last_index"):
        axis, keepdims = chosen[0], bool(attrs.get("keepdims", 1))
        return [h.pointwise(f"{x.shape[axis] - 1} - x", h.reduce(h.flip(x, axis), REDUCTIONS[node.op_type], axis, keepdims))]
    if node.op_type == "ReduceSumSquare":
        x = h.pointwise("x * x", x)
    y = h.reduce(x, REDUCTIONS[node.op_type], chosen, bool(attrs.get("keepdims", 1)))
    return [h.pointwise("log(x)", y) if node.op_type == "ReduceLogSum" else y]


def softmax(h: oxidnn.DnnHandle, node: Any, attrs: Attrs, x: np.ndarray) -> list[Any]:
    return [h.softmax(x, attrs.get("axis", -1), log=node.op_type == "LogSoftmax")]


def padding(attrs: Attrs, x: np.ndarray) -> Any:
    """Of a pooling: pairs, from pads or auto_pad."""
    rank, mode = x.ndim - 2, attrs.get("auto_pad", b"NOTSET")
    window, stride = attrs["kernel_shape"], attrs.get("strides", [1] * rank)
    dilation = attrs.get("dilations", [1] * rank)
    if mode in (b"NOTSET", b"VALID"):
        pads = attrs.get("pads", [0] * 2 * rank)
        return list(zip(pads[:rank], pads[rank:], strict=True))
    totals = [max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0) for n, s, k, d in zip(x.shape[2:], stride, window, dilation, strict=True)]
    return [(t // 2, t - t // 2) if mode == b"SAME_UPPER" else (t - t // 2, t // 2) for t in totals]


def pooling(h: oxidnn.DnnHandle, node: Any, attrs: Attrs, x: np.ndarray) -> list[Any]:
    window = attrs["kernel_shape"]
    given = {"stride": attrs.get("strides", [1] * len(window)), "padding": padding(attrs, x), "dilation": attrs.get("dilations", 1),
             "ceil_mode": bool(attrs.get("ceil_mode", 0))}
    if node.op_type == "MaxPool":
        if len(node.output) == 1:
            return [h.max_pool(x, window, **given)]
        y, indices = h.max_pool(x, window, return_indices=True, **given)
        flat = np.asarray(indices).reshape(-1, *y.shape[2:])  # ONNX counts over the whole tensor
        if attrs.get("storage_order"):  # down the columns
            flat = flat % x.shape[3] * x.shape[2] + flat // x.shape[3]
        return [y, (flat + np.arange(len(flat)).reshape(-1, *[1] * len(window)) * int(np.prod(x.shape[2:]))).reshape(y.shape)]
    if node.op_type == "AveragePool":
        return [h.avg_pool(x, window, count_include_pad=bool(attrs.get("count_include_pad", 0)), **given)]
    return [h.lp_pool(x, window, norm=float(attrs.get("p", 2)), **given)]


def global_pooling(h: oxidnn.DnnHandle, node: Any, attrs: Attrs, x: np.ndarray) -> list[Any]:
    return [h.global_max_pool(x) if node.op_type == "GlobalMaxPool" else h.global_avg_pool(x)]


def row_norm(h: oxidnn.DnnHandle, node: Any, attrs: Attrs, x: np.ndarray, *parameters: np.ndarray) -> list[Any]:
    first = attrs.get("axis", -1) % x.ndim
    given = {"axes": list(range(first, x.ndim)), "eps": attrs.get("epsilon", 1e-5)}
    shaped = [np.ascontiguousarray(np.broadcast_to(p, x.shape[first:])) for p in parameters]
    if node.op_type == "RMSNormalization":
        return [h.rms_norm(x, *shaped, **given)]
    y, mean, rstd = h.layer_norm(x, *shaped, return_stats=True, **given)
    kept = x.shape[:first] + (1,) * (x.ndim - first)
    return [y, np.asarray(mean).reshape(kept), np.asarray(rstd).reshape(kept)][: len(node.output)]


RUN: dict[str, Callable[..., list[Any]]] = {
    **dict.fromkeys(REDUCTIONS, reduction), **dict.fromkeys(("Softmax", "LogSoftmax"), softmax),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), pooling), **dict.fromkeys(("GlobalMaxPool", "GlobalAveragePool"), global_pooling),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), row_norm)}  # fmt: skip
LEFT = {**dict.fromkeys(("test_reduce_max_empty_set", "test_reduce_min_empty_set", "test_reduce_max_empty_set_bool"),
                        "the extremum of nothing is refused, as NumPy does")}  # fmt: skip
FOUND = node_tests(RUN)
TESTS = [t for t in FOUND if t.name not in LEFT]


def test_all_are_found() -> None:
    assert {t.model.graph.node[0].op_type for t in TESTS} == set(RUN) and len(TESTS) >= 200 and set(LEFT) <= {t.name for t in FOUND}


@pytest.mark.parametrize("case", TESTS, ids=lambda t: t.name)
def test_node(case: Any) -> None:
    h, node = oxidnn.DnnHandle("emu:sm_80"), case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for inputs, outputs in case.data_sets:
        for got, want in zip(RUN[node.op_type](h, node, attrs, *(np.asarray(i) for i in inputs)), outputs, strict=True):
            got, want = np.asarray(got), np.asarray(want)
            assert got.shape == want.shape
            atol = 1e-4 if case.name.endswith("starts_on_pad") else 1e-5  # that one's values are given with four digits
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=1e-5, atol=atol)
