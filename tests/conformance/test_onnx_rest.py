"""The ONNX node tests of operators that are one call, or a few: gates, crops, fills, ranges, normalisation of vectors, unpooling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oxidnn

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")
Attrs = dict[str, Any]


def swiglu(h: oxidnn.DnnHandle, attrs: Attrs, a: np.ndarray, b: np.ndarray) -> Any:
    if "alpha" in attrs:
        return h.pointwise("swish(a, scalar(alpha)) * b", a, b, alpha=attrs["alpha"])
    return h.swiglu(np.concatenate([a, b], -1))


def center_crop_pad(h: oxidnn.DnnHandle, attrs: Attrs, x: np.ndarray, shape: np.ndarray) -> Any:
    """Of what is odd the larger part is cut off, or added, at the end."""
    axes = [a % x.ndim for a in attrs.get("axes", range(x.ndim))]
    pairs = [(0, 0)] * x.ndim
    for axis, wanted in zip(axes, shape.tolist(), strict=True):
        grown = wanted - x.shape[axis]
        low = grown // 2 if grown > 0 else -(-grown // 2)
        pairs[axis] = low, grown - low
    return h.pad(x, pairs)


def constant_of_shape(h: oxidnn.DnnHandle, attrs: Attrs, shape: np.ndarray) -> Any:
    value = onnx.numpy_helper.to_array(attrs["value"])
    return h.fill(tuple(shape.tolist()), value.item(), value.dtype).numpy()


def eye_like(h: oxidnn.DnnHandle, attrs: Attrs, x: np.ndarray) -> Any:
    kind = onnx.helper.tensor_dtype_to_np_dtype(attrs["dtype"]) if "dtype" in attrs else x.dtype
    k = attrs.get("k", 0)
    return h.triu(h.tril(h.fill(value=1, out=np.empty(x.shape, kind)), k), k)


def mean_variance(h: oxidnn.DnnHandle, attrs: Attrs, x: np.ndarray) -> Any:
    assert attrs.get("axes", [0, 2, 3]) == [0, 2, 3]
    return h.batch_norm(x, training=True, eps=1e-9)  # (x - mean) / (deviation + 1e-9), up to the last digits


def arange(h: oxidnn.DnnHandle, attrs: Attrs, start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> Any:
    count = max(0, int(np.ceil((float(limit) - float(start)) / float(delta))))
    steps = h.fill(value=delta.item(), out=np.empty(count, start.dtype))
    return h.pointwise("x + start", h.cumsum(steps, exclusive=True, dtype=start.dtype), start.reshape(1), dtype=start.dtype)


def lp_normalization(h: oxidnn.DnnHandle, attrs: Attrs, x: np.ndarray) -> Any:
    return h.normalize(x, p=float(attrs.get("p", 2)), axes=attrs.get("axis", -1))


def max_unpool(h: oxidnn.DnnHandle, attrs: Attrs, x: np.ndarray, indices: np.ndarray, shape: np.ndarray | None = None) -> Any:
    """ONNX's indices are of the tensor that the windows cover, whatever shape is asked for: the rest is filled behind."""
    window, stride = attrs["kernel_shape"], attrs.get("strides", [1] * (x.ndim - 2))
    size = [(n - 1) * s + k for n, s, k in zip(x.shape[2:], stride, window, strict=True)]
    y = h.max_unpool(x, indices % int(np.prod(size)), tuple(size))
    return y if shape is None else h.pad(y, [(0, wanted - n) for wanted, n in zip(shape.tolist(), y.shape, strict=True)])


RUN: dict[str, Callable[..., Any]] = {
    "SwiGLU": swiglu, "CenterCropPad": center_crop_pad, "ConstantOfShape": constant_of_shape, "EyeLike": eye_like,
    "MeanVarianceNormalization": mean_variance, "Range": arange, "LpNormalization": lp_normalization, "MaxUnpool": max_unpool,
    "Hardmax": lambda h, attrs, x: h.hardmax(x, attrs.get("axis", -1)),
    "Binarizer": lambda h, attrs, x: h.pointwise("x > scalar(t)", x, dtype=x.dtype, t=attrs["threshold"]),
    "Identity": lambda h, attrs, x: h.transform(x),
}  # fmt: skip
LEFT = {name: "of no single tensor" for name in ("test_identity_sequence", "test_identity_opt")}
FOUND = node_tests(RUN)
TESTS = [t for t in FOUND if t.name not in LEFT]
DRAWS = node_tests(("Bernoulli",))


def test_all_are_found() -> None:
    assert {t.model.graph.node[0].op_type for t in TESTS} == set(RUN) and len(TESTS) >= 35 and len(DRAWS) >= 3


@pytest.mark.parametrize("case", TESTS, ids=lambda t: t.name)
def test_node(case: Any) -> None:
    h, node = oxidnn.DnnHandle("emu:sm_80"), case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for inputs, outputs in case.data_sets:
        got, want = np.asarray(RUN[node.op_type](h, attrs, *map(np.asarray, inputs))), np.asarray(outputs[0])
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        rtol = 1e-5 if want.dtype.itemsize > 2 else 4e-3
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("case", DRAWS, ids=lambda t: t.name)
def test_bernoulli(case: Any) -> None:
    """The standard leaves the generator open: types and shapes are the case's, and many draws of its chances have their means."""
    h, node = oxidnn.DnnHandle("emu:sm_80"), case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for inputs, outputs in case.data_sets:
        chance, want = np.asarray(inputs[0]), np.asarray(outputs[0])
        assert "dtype" not in attrs or onnx.helper.tensor_dtype_to_np_dtype(attrs["dtype"]) == want.dtype
        got = h.bernoulli(chance, dtype=want.dtype, seed=int(attrs.get("seed", 1)))
        assert (got.shape, got.dtype) == (want.shape, want.dtype) and set(np.unique(got)) <= {0, 1}
        many = h.bernoulli(np.broadcast_to(chance, (2000, *chance.shape)), seed=7)
        assert (np.abs(many.mean(0) - chance) < 5 * np.sqrt(chance * (1 - chance) / 2000) + 1e-6).all()
