"""The ONNX node tests of convolutions: plain, transposed, of integers, and quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oxidnn

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")
Attrs = dict[str, Any]


def window(attrs: Attrs, spatial: int) -> dict[str, Any]:
    """stride, dilation, padding and groups of ONNX's attributes."""
    auto = attrs.get("auto_pad", b"NOTSET").decode().lower()
    pads = attrs.get("pads", [0] * 2 * spatial)
    pairs = tuple(zip(pads[:spatial], pads[spatial:], strict=True))
    return {"stride": tuple(attrs.get("strides", [1] * spatial)), "dilation": tuple(attrs.get("dilations", [1] * spatial)),
            "padding": pairs if auto == "notset" else auto, "groups": attrs.get("group", 1)}


def element(array: np.ndarray | None) -> np.ndarray | None:
    """A scale or zero point as a vector."""
    return None if array is None else np.atleast_1d(array)


def conv(h: oxidnn.DnnHandle, attrs: Attrs, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> Any:
    return h.conv(x, w, bias, **window(attrs, x.ndim - 2))


def conv_transpose(h: oxidnn.DnnHandle, attrs: Attrs, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> Any:
    """output_shape: the padding follows from it; what no padding takes away is added behind."""
    spatial = x.ndim - 2
    kept = window(attrs, spatial)
    more = list(attrs.get("output_padding", [0] * spatial))
    if "output_shape" in attrs:
        reach = [(r - 1) * d + 1 for r, d in zip(w.shape[2:], kept["dilation"], strict=True)]
        full = [(n - 1) * s + r + o for n, s, r, o in zip(x.shape[2:], kept["stride"], reach, more, strict=True)]
        total = [f - n for f, n in zip(full, attrs["output_shape"], strict=True)]
        more = [o + max(0, -t) for o, t in zip(more, total, strict=True)]
        kept["padding"] = tuple((max(0, t) - max(0, t) // 2, max(0, t) // 2) for t in total)
    return h.conv_transpose(x, w, bias, output_padding=tuple(more), **kept)


def conv_integer(h: oxidnn.DnnHandle, attrs: Attrs, x: np.ndarray, w: np.ndarray, zero_x: Any = None, zero_w: Any = None) -> Any:
    return h.conv(x, w, zero_x=element(zero_x), zero_w=element(zero_w), **window(attrs, x.ndim - 2))


def qlinear_conv(h: oxidnn.DnnHandle, attrs: Attrs, x: np.ndarray, scale_x: Any, zero_x: Any, w: np.ndarray, scale_w: Any, zero_w: Any,
                 scale_y: Any, zero_y: Any, bias: np.ndarray | None = None) -> Any:
    return h.conv(x, w, bias, scale_x=element(scale_x), scale_w=element(scale_w), scale_y=element(scale_y), zero_x=element(zero_x),
                  zero_w=element(zero_w), zero_y=element(zero_y), out_dtype=zero_y.dtype, **window(attrs, x.ndim - 2))


RUN: dict[str, Callable[..., Any]] = {
    "Conv": conv, "ConvTranspose": conv_transpose, "ConvInteger": conv_integer, "QLinearConv": qlinear_conv,
}
TESTS = node_tests(RUN)


def test_all_are_found() -> None:
    assert {t.model.graph.node[0].op_type for t in TESTS} == set(RUN) and len(TESTS) >= 20


@pytest.mark.parametrize("case", TESTS, ids=lambda t: t.name)
def test_node(case: Any) -> None:
    h, node = oxidnn.DnnHandle("emu:sm_80"), case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for inputs, outputs in case.data_sets:
        got, want = np.asarray(RUN[node.op_type](h, attrs, *map(np.asarray, inputs))), np.asarray(outputs[0])
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if want.dtype.kind in "iu":
            np.testing.assert_array_equal(got, want)
        else:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# The standard's node tests of integers are few: the same rules on random problems, against ONNX's own evaluation of them.


@pytest.mark.parametrize("seed", range(12))
def test_random_integers_against_onnx(seed: int) -> None:
    from onnx.reference import ReferenceEvaluator

    rng = np.random.default_rng(seed)
    x_kind, w_kind = (np.uint8, np.int8)[seed % 2], (np.int8, np.uint8)[seed // 2 % 2]
    n, c, k = (int(rng.integers(1, 5)) for _ in range(3))
    x = rng.integers(np.iinfo(x_kind).min, np.iinfo(x_kind).max, (n, c, 6, 5), x_kind, endpoint=True)
    w = rng.integers(np.iinfo(w_kind).min, np.iinfo(w_kind).max, (k, c, 3, 2), w_kind, endpoint=True)
    zero_x, zero_w = rng.integers(0, 100, (), x_kind), rng.integers(0, 100, (), w_kind)
    attrs = {"pads": [1, 0, 2, 1], "strides": [2, 1]}
    names = ["x", "w", "zero_x", "zero_w"]
    node = onnx.helper.make_node("ConvInteger", names, ["y"], **attrs)
    values = dict(zip(names, (x, w, zero_x, zero_w), strict=True))
    infos = [onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), None) for name, a in values.items()]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", infos, [onnx.helper.make_tensor_value_info(
        "y", onnx.TensorProto.INT32, None)]))
    (want,) = ReferenceEvaluator(model).run(None, values)
    got = conv_integer(oxidnn.DnnHandle("emu:sm_80"), attrs, x, w, zero_x, zero_w)
    np.testing.assert_array_equal(np.asarray(got), want)
