"""The ONNX node tests of BatchNormalization, InstanceNormalization and GroupNormalization."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")

OPS = ("BatchNormalization", "InstanceNormalization", "GroupNormalization")
TESTS = node_tests(OPS)


def run(h: oxidnn.DnnHandle, op: str, attrs: dict[str, Any], x: np.ndarray, *rest: np.ndarray) -> tuple[np.ndarray, ...]:
    eps = attrs.get("epsilon", 1e-5)
    if op == "GroupNormalization":
        return (h.group_norm(x, attrs["num_groups"], *rest, eps=eps),)
    if op == "InstanceNormalization":
        return (h.instance_norm(x, *rest, eps=eps),)
    scale, bias, mean, var = rest
    if not attrs.get("training_mode"):
        return (h.batch_norm(x, scale, bias, mean, var, training=False, eps=eps),)
    # ONNX keeps the biased variance, PyTorch (and batch_norm) the unbiased one
    keep = attrs.get("momentum", 0.9)
    y = h.batch_norm(x, scale, bias, training=True, eps=eps)
    count, own, squares = h.batch_norm_stats(x)
    return y, mean * keep + own * (1 - keep), var * keep + squares / count * (1 - keep)


def test_all_are_found() -> None:
    assert len(TESTS) >= 8 and {t.model.graph.node[0].op_type for t in TESTS} == set(OPS)


@pytest.mark.parametrize("case", TESTS, ids=lambda t: t.name)
def test_node(case: Any) -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    node = case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for inputs, outputs in case.data_sets:
        for got, want in zip(run(h, node.op_type, attrs, *inputs), outputs, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
