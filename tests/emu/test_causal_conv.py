"""Causal convolution in parts and step by step is that of the whole; gradients against finite differences; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.errors import InvalidArgument


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


def given(rng: np.random.Generator, length: int, kind: Any = np.float32) -> tuple[np.ndarray, ...]:
    return tuple(rng.standard_normal(shape).astype(kind) for shape in ((2, 6, length), (6, 4), (6,)))


def test_parts_and_steps_are_the_whole(h: oxidnn.DnnHandle) -> None:
    x, w, bias = given(np.random.default_rng(0), 23)
    whole = h.causal_conv1d(x, w, bias, activation="silu")
    first, state = h.causal_conv1d(x[..., :2], w, bias, activation="silu", return_state=True)
    second, state = h.causal_conv1d(x[..., 2:13], w, bias, state=state, activation="silu", return_state=True)
    third, state = h.causal_conv1d_update(x[..., 13:16], state, w, bias, activation="silu")
    steps = []
    for position in range(16, 23):
        y = np.empty((2, 6), np.float32)
        h.causal_conv1d_update(np.ascontiguousarray(x[..., position]), state, w, bias, activation="silu", out=(y, state))
        steps.append(y)
    np.testing.assert_array_equal(np.concatenate([first, second, third, np.stack(steps, -1)], -1), whole)
    np.testing.assert_array_equal(state, x[..., -3:])


def test_it_is_a_padded_depthwise_convolution(h: oxidnn.DnnHandle) -> None:
    x, w, bias = given(np.random.default_rng(1), 17)
    y = h.conv(x, w[:, None], bias, padding=((3, 0),), groups=6)
    np.testing.assert_allclose(h.causal_conv1d(x, w, bias), y, atol=1e-5)
    last = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)  # (B, L, D) in memory
    np.testing.assert_array_equal(h.causal_conv1d(last, w, bias), h.causal_conv1d(x, w, bias))


@pytest.mark.parametrize("is_last", [False, True])
def test_gradients_are_those_of_finite_differences(h: oxidnn.DnnHandle, is_last: bool) -> None:
    rng = np.random.default_rng(2)
    x, w, bias = given(rng, 11, np.float64)
    if is_last:
        x = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    inputs = {"x": x, "w": w, "bias": bias, "state": rng.standard_normal((2, 6, 3))}
    dy, d_final = rng.standard_normal(x.shape), rng.standard_normal((2, 6, 3))

    def loss(inputs: dict[str, np.ndarray]) -> float:
        y, final = h.causal_conv1d(inputs["x"], inputs["w"], inputs["bias"], state=inputs["state"], activation="silu", return_state=True)
        return float((y * dy).sum() + (final * d_final).sum())

    found = h.causal_conv1d_backward(dy, x, w, bias, state=inputs["state"], d_final_state=d_final, activation="silu")
    for name, gradient in zip(("x", "w", "bias", "state"), found, strict=True):
        for _ in range(10):
            at = tuple(int(rng.integers(n)) for n in inputs[name].shape)
            sides = []
            for sign in (1, -1):
                moved = {**inputs, name: inputs[name].copy(order="K")}
                moved[name][at] += sign * 1e-6
                sides.append(loss(moved))
            assert abs((sides[0] - sides[1]) / 2e-6 - gradient[at]) < 1e-7 * max(1.0, abs(gradient[at])) + 1e-8, (name, at)


def test_bad_arguments(h: oxidnn.DnnHandle) -> None:
    x, w, bias = given(np.random.default_rng(3), 5)
    state = np.zeros((2, 6, 3), np.float32)
    for call, words in ((lambda: h.causal_conv1d(x, w[:5]), "shape of w"), (lambda: h.causal_conv1d(x, w[:, :1]), "width W of 2"),
                        (lambda: h.causal_conv1d(x, w, bias[:3]), "shape of bias"), (lambda: h.causal_conv1d(x[0], w), "rank of x"),
                        (lambda: h.causal_conv1d(x, w, state=state[..., :2]), "shape of state"),
                        (lambda: h.causal_conv1d(x, w, activation="relu"), "activation"),
                        (lambda: h.causal_conv1d(x, w.astype(np.float16)), "type of w"),
                        (lambda: h.causal_conv1d_update(np.zeros((2, 6, 17), np.float32), state, w), "length of x"),
                        (lambda: h.causal_conv1d_backward(x[..., 1:], x, w), "shape of dy")):
        with pytest.raises(InvalidArgument, match=words):
            call()
