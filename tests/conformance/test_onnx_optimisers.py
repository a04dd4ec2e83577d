"""The ONNX node tests of Adam, Momentum and Adagrad (ai.onnx.preview.training)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")

OPS = ("Adam", "Momentum", "Adagrad")
TESTS = node_tests(OPS)


def test_all_are_found() -> None:
    assert len(TESTS) >= 7 and {t.model.graph.node[0].op_type for t in TESTS} == set(OPS)


@pytest.mark.parametrize("case", TESTS, ids=lambda t: t.name)
def test_node(case: Any) -> None:
    h, node = oxidnn.DnnHandle("emu:sm_80"), case.model.graph.node[0]
    a = {x.name: onnx.helper.get_attribute_value(x) for x in node.attribute}
    for (rate, count, *arrays), outputs in case.data_sets:
        lists = {"Adam": 4, "Momentum": 3, "Adagrad": 3}[node.op_type]
        n = len(arrays) // lists
        given = [[np.array(x) for x in arrays[i * n:(i + 1) * n]] for i in range(lists)]
        params, grads, *state = given
        rate, count = float(rate), int(count)
        decay = a.get("norm_coefficient", 0.0)
        if node.op_type == "Adam":
            # ONNX adds epsilon to the root before the bias is corrected, and corrects none at step 0.
            betas = (a.get("alpha", 0.9), a.get("beta", 0.999))
            root = (1 - betas[1] ** count) ** 0.5 if count else 1.0
            first = 1 - betas[0] ** count if count else 1.0
            at = max(count, 1)
            scale = (1 - betas[0] ** at) / (1 - betas[1] ** at) ** 0.5 * root / first
            eps = a.get("epsilon", 1e-6) / (1 - betas[1] ** at) ** 0.5
            h.adam_step(params, grads, *state, step=at, lr=rate * scale, betas=betas, eps=eps, weight_decay=decay)
            post = a.get("norm_coefficient_post", 0.0)
            params = [p * np.float32(1 - post) for p in params]
        elif node.op_type == "Momentum":
            beta = a["beta"] if count else 1.0
            h.sgd_step(params, grads, *state, lr=rate, momentum=a["alpha"], dampening=1 - beta if a["mode"] == b"standard" else 0.0,
                       weight_decay=decay, nesterov=a["mode"] == b"nesterov")
            assert beta == 1 or a["mode"] == b"standard"
        else:
            h.adagrad_step(params, grads, *state, step=count + 1, lr=rate, lr_decay=a.get("decay_factor", 0.0), eps=a.get("epsilon", 1e-6),
                           weight_decay=decay)
        for got, want in zip([x for xs in (params, *state) for x in xs], outputs, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
