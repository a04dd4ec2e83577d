"""The ONNX node tests of Col2Im; unfolding and folding are each other's gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.errors import InvalidArgument

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


@pytest.mark.parametrize("case", node_tests(("Col2Im",)), ids=lambda t: t.name)
def test_node(case: Any, h: oxidnn.DnnHandle) -> None:
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in case.model.graph.node[0].attribute}
    for (x, image, block), outputs in case.data_sets:
        rank = len(image)
        pads = attrs.get("pads", [0] * 2 * rank)
        y = h.fold(np.asarray(x), tuple(map(int, image)), tuple(map(int, block)), stride=tuple(attrs.get("strides", (1,) * rank)),
                   padding=tuple(zip(pads[:rank], pads[rank:], strict=True)), dilation=tuple(attrs.get("dilations", (1,) * rank)))
        np.testing.assert_allclose(y, outputs[0], rtol=1e-6)


def test_unfold_and_fold_are_transposes(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(0)
    window = {"stride": (2, 1), "padding": ((1, 0), (2, 1)), "dilation": (1, 2)}
    x = rng.integers(-4, 5, (2, 3, 7, 6)).astype(np.float32)
    columns = h.unfold(x, (3, 2), **window)
    dy = rng.integers(-4, 5, columns.shape).astype(np.float32)
    assert (columns * dy).sum() == (x * h.fold(dy, (7, 6), (3, 2), **window)).sum()
    rows = h.im2col(x, (3, 2), order="rsc", **window)
    assert (rows.reshape(2, -1, 6, 3).transpose(0, 3, 2, 1).reshape(columns.shape) == columns).all()
    assert (h.col2im(rows, (7, 6), (3, 2), order="rsc", **window) == h.fold(columns, (7, 6), (3, 2), **window)).all()


def test_im2col_and_a_product_are_a_convolution(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((2, 3, 5, 6)).astype(np.float32), rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    rows = h.im2col(x, 3, padding=1)
    y = (rows @ w.reshape(4, -1).T).swapaxes(1, 2).reshape(2, 4, 5, 6)
    np.testing.assert_allclose(y, h.conv(x, w, padding=1), atol=1e-5)


def test_bad_arguments(h: oxidnn.DnnHandle) -> None:
    x, columns = np.zeros((1, 2, 4, 4), np.float32), np.zeros((1, 18, 4), np.float32)
    for call, words in ((lambda: h.unfold(x, 5), "at most the padded extent"), (lambda: h.unfold(x, 0), "kernel is 0"),
                        (lambda: h.unfold(x[0, 0], 1), "rank of x"), (lambda: h.unfold(x, (1, 1, 1)), "kernel is"),
                        (lambda: h.fold(columns, (4, 4), 2), "multiple of 4"), (lambda: h.fold(columns, (5, 4), 3), "positions in x is 4"),
                        (lambda: h.fold(columns, 4, (3, 3)), "kernel"), (lambda: h.im2col(x, 1, order="src"), "order"),
                        (lambda: h.fold(columns.astype(np.int32), (4, 4), 3), "type of x")):
        with pytest.raises(InvalidArgument, match=words):
            call()
