"""The ONNX node tests of Hardmax, LpNormalization, MeanVarianceNormalization and MaxUnpool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oxidnn

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")
Attrs = dict[str, Any]


def hardmax(h: oxidnn.DnnHandle, attrs: Attrs, x: np.ndarray) -> Any:
    return h.hardmax(x, attrs.get("axis", -1))


def lp_normalization(h: oxidnn.DnnHandle, attrs: Attrs, x: np.ndarray) -> Any:
    return h.normalize(x, p=attrs.get("p", 2), axes=attrs.get("axis", -1), eps=1e-30)


def mean_variance_normalization(h: oxidnn.DnnHandle, attrs: Attrs, x: np.ndarray) -> Any:
    return h.layer_norm(x, axes=attrs.get("axes", (0, 2, 3)), eps=1e-18)


def max_unpool(h: oxidnn.DnnHandle, attrs: Attrs, x: np.ndarray, indices: np.ndarray, shape: np.ndarray | None = None) -> Any:
    """ONNX's indices count over the whole tensor that pooling makes of x's windows; a larger output has the same places."""
    window = attrs["kernel_shape"]
    rank = len(window)
    stride, pads = attrs.get("strides", [1] * rank), attrs.get("pads", [0] * 2 * rank)
    sizes = zip(x.shape[2:], stride, window, pads[:rank], pads[rank:], strict=True)
    pooled = [(n - 1) * s - low - high + k for n, s, k, low, high in sizes]
    places = np.unravel_index(indices % int(np.prod(pooled)), pooled)
    extents = pooled if shape is None else shape.tolist()[2:]
    return h.max_unpool(x, np.ravel_multi_index(places, extents), extents)


RUN: dict[str, Callable[..., Any]] = {"Hardmax": hardmax, "LpNormalization": lp_normalization,
                                      "MeanVarianceNormalization": mean_variance_normalization, "MaxUnpool": max_unpool}
TESTS = node_tests(RUN)


def test_all_are_found() -> None:
    assert len(TESTS) >= 12 and {t.model.graph.node[0].op_type for t in TESTS} == set(RUN)


@pytest.mark.parametrize("case", TESTS, ids=lambda t: t.name)
def test_node(case: Any) -> None:
    h, node = oxidnn.DnnHandle("emu:sm_80"), case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for inputs, outputs in case.data_sets:
        got, want = np.asarray(RUN[node.op_type](h, attrs, *(np.asarray(i) for i in inputs))), np.asarray(outputs[0])
        assert got.shape == want.shape
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=1e-5, atol=1e-6)
