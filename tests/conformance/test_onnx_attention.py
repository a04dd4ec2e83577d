"""The ONNX node tests of Attention: caches are joined by concatenation; the products that some ask for beside the result, which attention
never has in memory, are calls of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")
Attrs = dict[str, Any]


def heads_of(x: np.ndarray, heads: int) -> np.ndarray:
    """(B, L, H * D) as (B, H, L, D), a view."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def products(h: oxidnn.DnnHandle, attrs: Attrs, q: np.ndarray, k: np.ndarray, bias: np.ndarray) -> Any:
    """What qk_matmul_output_mode names: 0 the scores, 1 under the softcap, 2 with the bias (-inf where nothing is seen), 3 the weights."""
    mode = attrs.get("qk_matmul_output_mode", 0)
    k = np.repeat(k, q.shape[1] // k.shape[1], 1)
    s = h.gemm(q, k, transpose_b=True, alpha=attrs.get("scale", q.shape[3] ** -0.5))
    if mode and "softcap" in attrs:
        s = h.pointwise("scalar(c) * tanh(s / scalar(c))", s, c=attrs["softcap"])
    if mode == 3:
        return h.softmax(s, mask=bias)
    return h.pointwise("a + b", s, bias) if mode == 2 else s


def attend(h: oxidnn.DnnHandle, attrs: Attrs, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """A query counts from the keys of the cache (from the length that is given less the queries), from 0 without one."""
    q, k, v, mask = inputs["Q"], inputs["K"], inputs["V"], inputs.get("attn_mask")
    is_flat = q.ndim == 3
    if is_flat:
        q, k, v = heads_of(q, attrs["q_num_heads"]), heads_of(k, attrs["kv_num_heads"]), heads_of(v, attrs["kv_num_heads"])
    past = 0
    if "past_key" in inputs:
        past = inputs["past_key"].shape[2]
        k, v = h.concat([inputs["past_key"], k], 2), h.concat([inputs["past_value"], v], 2)
    length, keys = q.shape[2], k.shape[2]
    if mask is not None and mask.shape[-1] < keys:
        rest = [(0, 0)] * (mask.ndim - 1) + [(0, keys - mask.shape[-1])]
        mask = np.asarray(h.pad(mask, rest, value=0 if mask.dtype == bool else -np.inf))
    given: dict[str, Any] = {"mask": mask, "softcap": attrs.get("softcap"), "scale": attrs.get("scale")}
    left, right = (w if w is not None and w >= 0 else None for w in (attrs.get(f"{side}_window_size") for side in ("left", "right")))
    given["window"] = (left, right)
    if "nonpad_kv_seqlen" in inputs:
        given["lengths_kv"] = inputs["nonpad_kv_seqlen"].astype(np.int32)
    if attrs.get("is_causal"):
        if "lengths_kv" in given or keys - length == past:
            given["causal"] = "bottom_right"
        elif not past:
            given["causal"] = "top_left"
        else:
            given["window"] = None
            given["score"] = "where(j <= i + scalar(past), where(j >= i + scalar(low), score, -inf), -inf)"
            given["scalars"] = {"past": past, "low": past - left if left is not None else -np.inf}
    else:
        assert (left, right) == (None, None) or keys == length
    out = np.asarray(h.attention(q, k, v, **given))
    i, j = np.arange(length)[:, None] + past, np.arange(keys)
    seen = (j <= i) if attrs.get("is_causal") else np.ones((length, keys), bool)
    seen = seen & (j >= i - left) if left is not None else seen
    bias = np.where(seen, 0, -np.inf).astype(q.dtype)
    if mask is not None:
        bias = bias + (np.where(mask, 0, -np.inf).astype(q.dtype) if mask.dtype == bool else mask)
    return {"Y": out.swapaxes(1, 2).reshape(inputs["Q"].shape[:2] + (-1,)) if is_flat else out, "present_key": k, "present_value": v,
            "qk_matmul_output": lambda: products(h, attrs, q, k, bias)}


SCORES = {  # what the graphs of FlexAttention compute
    "test_flexattention_score_mod": "score + scalar(bias)", "test_flexattention_soft_cap": "tanh(score / scalar(cap)) * scalar(cap)",
    "test_flexattention_causal_mask": "where(i >= j, score, -inf)", "test_flexattention_relative_positional": "score + (i - j)",
}  # fmt: skip
LEFT = {"test_flexattention_prob_mod": "weights are changed after the softmax, which is no argument of attention"}
TESTS = node_tests(("Attention",))
FLEXIBLE = [t for t in node_tests(("FlexAttention",)) if t.name not in LEFT]


def test_all_are_found() -> None:
    assert len(TESTS) >= 90 and {t.name for t in FLEXIBLE} > set(SCORES)


@pytest.mark.parametrize("case", FLEXIBLE, ids=lambda t: t.name)
def test_flexible_node(case: Any) -> None:
    h, node = oxidnn.DnnHandle("emu:sm_80"), case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    score = SCORES.get(case.name)
    assert ("score_mod" in attrs) == (score is not None) and "prob_mod" not in attrs
    numbers = {x.name: onnx.numpy_helper.to_array(x).item() for x in attrs["score_mod"].initializer if x.dims in ([], [1])} if score else {}
    for inputs, outputs in case.data_sets:
        scalars = {n: numbers[n] for n in ("bias", "cap") if n in numbers}
        got, want = h.attention(*inputs, scale=attrs.get("scale"), score=score, scalars=scalars), outputs[0]
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got, want, rtol=4e-3 if want.dtype == np.float16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("case", TESTS, ids=lambda t: t.name)
def test_node(case: Any) -> None:
    h, node = oxidnn.DnnHandle("emu:sm_80"), case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for inputs, outputs in case.data_sets:
        found = attend(h, attrs, dict(zip(filter(None, node.input), map(np.asarray, inputs), strict=True)))
        for name, wanted in zip(filter(None, node.output), outputs, strict=True):
            got, want = found[name], np.asarray(wanted)
            got = np.asarray(got() if callable(got) else got)
            assert (got.shape, got.dtype) == (want.shape, want.dtype), name
            rtol = 1e-5 if want.dtype.itemsize > 2 else 1e-2 if want.dtype.name == "bfloat16" else 4e-3
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=1e-6 if rtol < 1e-4 else rtol)
