"""The ONNX node tests of DepthToSpace and SpaceToDepth; shuffles undo each other, and refuse what does not divide."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.errors import InvalidArgument

onnx = pytest.importorskip("onnx")


def node_tests() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    return [t for t in found if len(t.model.graph.node) == 1 and t.model.graph.node[0].op_type in ("DepthToSpace", "SpaceToDepth")]


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


@pytest.mark.parametrize("case", node_tests(), ids=lambda t: t.name)
def test_node(case: Any, h: oxidnn.DnnHandle) -> None:
    node = case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    order = attrs.get("mode", b"DCR").decode().lower()
    run = h.pixel_shuffle if node.op_type == "DepthToSpace" else h.pixel_unshuffle
    for inputs, outputs in case.data_sets:
        np.testing.assert_array_equal(run(np.asarray(inputs[0]), attrs["blocksize"], order=order), outputs[0])


@pytest.mark.parametrize("order", ["crd", "dcr"])
def test_each_undoes_the_other(h: oxidnn.DnnHandle, order: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 18, 3, 5)).astype(np.float32)
    assert (h.pixel_unshuffle(h.pixel_shuffle(x, 3, order=order), 3, order=order) == x).all()
    assert (h.channel_shuffle(h.channel_shuffle(x, 3), 6) == x).all()
    assert h.channel_shuffle(np.arange(6, dtype=np.int32)[None], 2).tolist() == [[0, 3, 1, 4, 2, 5]]


def test_what_does_not_divide_is_refused(h: oxidnn.DnnHandle) -> None:
    x = np.zeros((1, 6, 4, 4), np.float32)
    for call, words in ((lambda: h.pixel_shuffle(x, 2), "channels of x is 6"), (lambda: h.pixel_unshuffle(x, 3), "multiples of factor=3"),
                        (lambda: h.channel_shuffle(x, 4), "groups=4"), (lambda: h.pixel_shuffle(x, 0), "factor"),
                        (lambda: h.pixel_shuffle(x, 1, order="x"), "order")):
        with pytest.raises(InvalidArgument, match=words):
            call()
