"""Activations and their gradients far from zero: limits, never NaN, in every float type."""

from __future__ import annotations

import numpy as np
import pytest

import oxidnn
from oxidnn.dtypes import dtype

# what the gradient tends to above and below
LIMITS = {
    "relu": (1, 0), "relu6": (0, 0), "clipped_relu": (0, 0), "leaky_relu": (1, 0.01), "elu": (1, 0), "celu": (1, 0),
    "selu": (1.0507009873554805, 0), "sigmoid": (0, 0), "logsigmoid": (0, 1), "hard_sigmoid": (0, 0), "tanh": (0, 0), "hard_tanh": (0, 0),
    "silu": (1, 0), "hard_swish": (1, 0), "mish": (1, 0), "softplus": (1, 0), "softsign": (0, 0), "gelu": (1, 0), "gelu_tanh": (1, 0),
    "quick_gelu": (1, 0), "swish": (1, 0), "hard_shrink": (1, 1), "soft_shrink": (1, 1), "tanh_shrink": (1, 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("name", LIMITS)
def test_gradients_reach_their_limits(h: oxidnn.DnnHandle, name: str, kind: str) -> None:
    t = dtype(kind)
    sizes = np.array([1000, 1e4, 6e4, min(1e10, t.max), min(1e30, t.max), t.max / 2, t.max])
    x = np.concatenate([sizes, -sizes]).astype(np.float64).astype(np.float32 if kind == "bf16" else t.numpy).astype(t.numpy)
    y = h.activation(x, name).astype(np.float64)
    assert not np.isnan(y).any()
    dx = h.activation_backward(np.ones_like(x), x, name).astype(np.float64)
    want = np.repeat(LIMITS[name], len(sizes))
    np.testing.assert_allclose(dx, want, rtol=2 * t.epsilon, atol=2e-6)


@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_values_beyond_where_exponentials_overflow(h: oxidnn.DnnHandle, kind: str) -> None:
    x = np.array([12, 30, 100, 500, -12, -30, -100, -500], dtype(kind).numpy)
    for name in ("softplus", "gelu", "gelu_tanh", "silu", "mish", "relu", "hard_swish", "quick_gelu", "logsigmoid"):
        y = h.activation(x, name).astype(np.float64)
        positive = np.where(x > 0, x, 0) if name != "logsigmoid" else np.where(x < 0, x, 0)
        np.testing.assert_allclose(y, positive, rtol=2e-3 if kind == "f16" else 1e-6, atol=2e-4, err_msg=name)
    assert h.activation(np.array([12], np.float16), "softplus")[0] == 12
    for name, value in (("softplus", 30), ("gelu_tanh", 100)):
        assert h.activation(np.array([value], np.float32), name)[0] == value


def test_infinities_have_the_values_of_the_limits(h: oxidnn.DnnHandle) -> None:
    x = np.array([np.inf, -np.inf], np.float32)
    for name, want in {
        "relu": (np.inf, 0), "sigmoid": (1, 0), "tanh": (1, -1), "softplus": (np.inf, 0), "elu": (np.inf, -1), "relu6": (6, 0),
        "hard_sigmoid": (1, 0), "logsigmoid": (0, -np.inf), "clipped_relu": (6, 0), "hard_tanh": (1, -1),
    }.items():  # fmt: skip
        np.testing.assert_array_equal(h.activation(x, name), np.array(want, np.float32), err_msg=name)
