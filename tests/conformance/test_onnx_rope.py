"""The ONNX node tests of RotaryEmbedding; faults of precision and pairing that other libraries had; gradients."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import oxidnn
from oxidnn.errors import InvalidArgument

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


@pytest.mark.parametrize("case", node_tests(("RotaryEmbedding",)), ids=lambda t: t.name)
def test_node(case: Any, h: oxidnn.DnnHandle) -> None:
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in case.model.graph.node[0].attribute}
    for inputs, outputs in case.data_sets:
        x, cos, sin, *positions = (np.asarray(a) for a in inputs)
        rows = x
        if x.ndim == 3:  # (batch, length, heads * dim)
            rows = x.reshape(*x.shape[:2], attrs["num_heads"], -1).transpose(0, 2, 1, 3)
        y = h.rope(rows, cos, sin, positions=positions[0] if positions else None, rotary_dim=attrs.get("rotary_embedding_dim") or None,
                   interleaved=bool(attrs.get("interleaved", 0)))
        y = y.transpose(0, 2, 1, 3).reshape(x.shape) if x.ndim == 3 else y
        np.testing.assert_allclose(y, outputs[0], rtol=1e-5, atol=1e-6)


def test_pairs_are_halves_or_neighbours(h: oxidnn.DnnHandle) -> None:
    x, at = np.array([[[[1, 0, 0, 0]]]], np.float32), np.array([1], np.int32)
    np.testing.assert_allclose(h.rope(x, positions=at)[0, 0, 0], [0.540302, 0, 0.841471, 0], atol=1e-6)
    np.testing.assert_allclose(h.rope(x, positions=at, interleaved=True)[0, 0, 0], [0.540302, 0.841471, 0, 0], atol=1e-6)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_far_positions_keep_their_angles(h: oxidnn.DnnHandle, kind: Any) -> None:
    """float32 angles are 0.06 off at a million, those of 16 bits anything."""
    at = np.array([[999_999, 1_000_000, 123_457, 2**31 - 1]], np.int32)
    x = np.zeros((1, 1, 4, 64), kind)
    x[..., :32] = 1
    y = h.rope(x, positions=at)[0, 0].astype(float)
    angle = at[0][:, None].astype(np.longdouble) * np.longdouble(10000) ** (-np.arange(32) / np.longdouble(32))
    eps = max(float(ml_dtypes.finfo(kind).eps), 1e-6 if kind != np.float64 else 2e-6)  # f64: that of 2^31 * 2^-53
    np.testing.assert_allclose(y[:, :32], np.cos(angle).astype(float), atol=eps)
    np.testing.assert_allclose(y[:, 32:], np.sin(angle).astype(float), atol=eps)


def test_halves_of_a_table_may_differ_and_gradients_transpose(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((2, 3, 5, 16)) for _ in range(2))
    cos, sin = (rng.standard_normal((5, 12)) for _ in range(2))
    for interleaved in (False, True):
        more = {"rotary_dim": 12, "interleaved": interleaved}
        y = h.rope(x, cos, sin, **more)
        first, second = (slice(0, 12, 2), slice(1, 12, 2)) if interleaved else (slice(0, 6), slice(6, 12))
        np.testing.assert_allclose(y[..., first], x[..., first] * cos[:, :6] - x[..., second] * sin[:, :6])
        np.testing.assert_allclose(y[..., second], x[..., second] * cos[:, 6:] + x[..., first] * sin[:, 6:])
        np.testing.assert_allclose((h.rope_backward(dy, cos, sin, **more) * x).sum(), (dy * y).sum())
    back = h.rope_backward(h.rope(x, base=500.0), base=500.0)
    np.testing.assert_allclose(back, x, atol=1e-12)


def test_in_place_and_scaled(h: oxidnn.DnnHandle) -> None:
    x = np.random.default_rng(1).standard_normal((1, 2, 6, 32)).astype(np.float32)
    want = h.rope(x, positions=np.arange(6, dtype=np.int64) * 4)
    linear = h.rope(x, positions=np.arange(6, dtype=np.int32) * 16, scaling={"rope_type": "linear", "factor": 4})
    np.testing.assert_allclose(linear, want, atol=1e-6)
    yarn = {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64, "attention_factor": 2.0}
    np.testing.assert_allclose(h.rope(x, positions=np.arange(6) * 4, scaling=yarn), 2 * want, atol=2e-6)
    kept = x
    assert h.rope(x, positions=np.arange(6, dtype=np.int64) * 4, out=x) is kept
    np.testing.assert_array_equal(x, want)


def test_scalings() -> None:
    """By hand, after the published formulas, for dim 8 and base 10000."""
    from oxidnn.ops.rope import frequencies

    length = ("original_max_position_embeddings", 64)
    bounds = ("low_freq_factor", 1), ("high_freq_factor", 4)
    llama, one = frequencies("rope", 4, 10000.0, (("type", "llama3"), ("factor", 8), *bounds, length))
    assert one == 1.0
    np.testing.assert_allclose(llama, [1.0, 0.1 * (1 / 8 + 7 / 8 * (64 * 0.1 / (2 * np.pi) - 1) / 3), 0.01 / 8, 0.001 / 8])
    yarn, magnitude = frequencies("rope", 4, 10000.0, (("type", "yarn"), ("factor", 4), length))
    np.testing.assert_allclose(magnitude, 0.1 * np.log(4) + 1)
    # of 32 turns and of 1: dimensions floor(-0.497) = 0 (at least) and ceil(1.008) = 2
    np.testing.assert_allclose(yarn, [1.0, 0.1 * (0.5 + 0.5 / 4), 0.01 / 4, 0.001 / 4])


@pytest.mark.parametrize(("more", "words"), [
    ({"rotary_dim": 3}, "rotary_dim"), ({"rotary_dim": 18}, "rotary_dim"), ({"cos": np.zeros((4, 8), np.float32)}, "sin"),
    ({"scaling": {"type": "ntk", "factor": 2}}, "scaling type"), ({"scaling": {"type": "linear"}}, "scaling factor"),
    ({"scaling": {"type": "linear", "factor": 2, "extra": 1}}, "extra"), ({"positions": np.zeros(4, np.float32)}, "type of positions"),
    ({"positions": np.zeros((2, 5), np.int32)}, "shape of positions"), ({"base": 0.5}, "base"),
    ({"cos": np.zeros((3, 8), np.float32), "sin": np.zeros((3, 8), np.float32)}, "shape of cos"), ({"scaling": 2.0}, "scaling"),
])
def test_refusals(h: oxidnn.DnnHandle, more: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        h.rope(np.zeros((2, 1, 4, 16), np.float32), **more)
