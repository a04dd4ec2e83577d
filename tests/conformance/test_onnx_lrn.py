"""The ONNX node tests of LRN, channels first and last."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")

TESTS = node_tests(("LRN",))


def test_all_are_found() -> None:
    assert len(TESTS) >= 2


@pytest.mark.parametrize("case", TESTS, ids=lambda t: t.name)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_node(case: Any, layout: str) -> None:
    h, node = oxidnn.DnnHandle("emu:sm_80"), case.model.graph.node[0]
    a = {x.name: onnx.helper.get_attribute_value(x) for x in node.attribute}
    for (x,), (want,) in case.data_sets:
        if layout == "nhwc":
            x = np.ascontiguousarray(np.moveaxis(x, 1, -1))
            x = np.moveaxis(x, -1, 1)
        got = h.lrn(x, a["size"], alpha=a.get("alpha", 1e-4), beta=a.get("beta", 0.75), k=a.get("bias", 1.0))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
