"""The ONNX node tests of NegativeLogLikelihoodLoss, SoftmaxCrossEntropyLoss and Dropout.

Dropout in training mode draws from a generator of its own, which the standard leaves open: there only what its ratio and mask mean is
checked, on the case's own shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")

OPS = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", "Dropout")
TESTS = node_tests(OPS)


def losses(h: oxidnn.DnnHandle, node: Any, attrs: dict[str, Any], x: np.ndarray, target: np.ndarray, *weight: np.ndarray) -> list[Any]:
    given = {"reduction": attrs.get("reduction", b"mean").decode(), "weight": weight[0] if weight else None}
    if "ignore_index" in attrs:
        given["ignore_index"] = attrs["ignore_index"]
    if node.op_type == "NegativeLogLikelihoodLoss":
        return [h.nll(x, target, **given)]
    return [h.cross_entropy(x, target, **given), *([h.softmax(x, 1, log=True)] if len(node.output) > 1 else [])]


def test_all_are_found() -> None:
    assert len(TESTS) >= 50 and {t.model.graph.node[0].op_type for t in TESTS} == set(OPS)


@pytest.mark.parametrize("case", TESTS, ids=lambda t: t.name)
def test_node(case: Any) -> None:
    h, node = oxidnn.DnnHandle("emu:sm_80"), case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for inputs, outputs in case.data_sets:
        if node.op_type != "Dropout":
            for got, want in zip(losses(h, node, attrs, *inputs), outputs, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
            continue
        x, ratio = inputs[0], float(inputs[1]) if len(inputs) > 1 else attrs.get("ratio", 0.5)
        is_training = len(inputs) > 2 and bool(inputs[2])
        y = h.dropout(x, ratio if is_training else 0.0, seed=attrs.get("seed", 0))
        if not is_training or ratio == 0:
            np.testing.assert_array_equal(y, outputs[0])
        else:
            np.testing.assert_allclose(y[y != 0], (x / (1 - ratio))[y != 0], rtol=1e-6)
            assert abs((y == 0).mean() - ratio) < 5 * (ratio * (1 - ratio) / x.size) ** 0.5
