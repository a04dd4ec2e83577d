"""Multi-head attention through the handle: the formulas of the classic layer in float64, gradients by differences, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oxidnn import DnnHandle, InvalidArgument

WEIGHTS = {"w_q": (12, 10), "w_k": (12, 7), "w_v": (6, 9), "w_out": (5, 6)}  # 3 heads of 4, values of 2


@pytest.fixture(scope="module")
def h() -> DnnHandle:
    return DnnHandle("emu:sm_80")


def layer(x: dict[str, Any], heads: int, seen: np.ndarray | None = None) -> np.ndarray:
    """As torch.nn.MultiheadAttention: packed projections, heads side by side, softmax(q k' / sqrt(dim))."""
    q, k, v = (x[s] @ x[f"w_{n}"].T + x[f"bias_{n}"] for n, s in (("q", "query"), ("k", "key"), ("v", "value")))
    found = []
    for part in range(heads):
        q_own, k_own, v_own = (a[..., part * a.shape[2] // heads:(part + 1) * a.shape[2] // heads] for a in (q, k, v))
        s = q_own @ k_own.swapaxes(1, 2) / np.sqrt(q_own.shape[2])
        s = s if seen is None else np.where(seen, s, -np.inf)
        e = np.exp(s - s.max(2, keepdims=True))
        found.append(e / e.sum(2, keepdims=True) @ v_own)
    return np.concatenate(found, axis=2) @ x["w_out"].T + x["bias_out"] + x["residual"]


def draw(batch: int = 2, length: int = 3, keys: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shapes = {"query": (batch, length, 10), "key": (batch, keys, 7), "value": (batch, keys, 9), **WEIGHTS, "residual": (batch, length, 5)}
    shapes |= {f"bias{n.removeprefix('w')}": s[:1] for n, s in WEIGHTS.items()}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("attrs", [{}, {"causal": "top_left"}, {"mask": np.array([True, False, True, True])}])
def test_the_classic_layer(h: DnnHandle, attrs: dict[str, Any]) -> None:
    x = draw()
    seen = np.tril(np.ones((3, 4), bool)) if "causal" in attrs else attrs.get("mask")
    want = layer(x, 3, seen)
    np.testing.assert_allclose(h.multi_head_attention(**x, num_heads=3, **attrs), want, rtol=1e-11, atol=1e-11)
    first: dict[str, Any] = {n: np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1) if a.ndim == 3 else a for n, a in x.items()}
    np.testing.assert_allclose(h.multi_head_attention(**first, num_heads=3, **attrs), want, rtol=1e-11, atol=1e-11)


def test_pieces_of_a_packed_weight(h: DnnHandle) -> None:
    """Self-attention by views of one weight (3 E, E), as torch keeps it; f16 within its roundings."""
    rng = np.random.default_rng(2)
    x, packed, w_out = (rng.standard_normal(s) / 4 for s in ((2, 5, 16), (48, 16), (16, 16)))
    given: dict[str, Any] = {"query": x, "key": x, "value": x, "w_out": w_out} | {
        f"w_{n}": packed[16 * i:16 * i + 16] for i, n in enumerate("qkv")}
    none = {f"bias_{n}": np.zeros(()) for n in ("q", "k", "v", "out")} | {"residual": np.zeros(())}
    for kind, tolerance in ((np.float64, 1e-11), (np.float16, 2e-3)):
        halves = {n: a.astype(kind) for n, a in given.items()}
        want = layer({n: a.astype(np.float64) for n, a in halves.items()} | none, 4)
        np.testing.assert_allclose(h.multi_head_attention(**halves, num_heads=4), want, atol=tolerance)


def test_gradients_are_slopes(h: DnnHandle) -> None:
    """Of sum(out * d_out) by every argument, along a direction of each."""
    x = draw()
    rng = np.random.default_rng(3)
    mask = np.array([[True, True, False, True], [True] * 4, [False, True, True, True]])
    attrs: dict[str, Any] = {"num_heads": 3, "mask": mask, "scale": 0.4}
    out, *saved = h.multi_head_attention(**x, **attrs, return_saved=True)
    d_out = rng.standard_normal(out.shape)
    inputs = {n: x[n] for n in ("query", "key", "value", *WEIGHTS)}
    gradients = h.multi_head_attention_backward(d_out, *inputs.values(), *saved, **attrs, bias_gradients=True)
    names = [*inputs, *(f"bias_{n}" for n in ("q", "k", "v", "out"))]
    for name, gradient in zip(names, gradients, strict=True):
        direction, step = rng.standard_normal(x[name].shape), 1e-5
        ends = [(h.multi_head_attention(**(x | {name: x[name] + sign * step * direction}), **attrs) * d_out).sum() for sign in (1, -1)]
        assert gradient.shape == x[name].shape
        np.testing.assert_allclose((gradient * direction).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-7, atol=1e-8, err_msg=name)


def test_dropout_is_replayed(h: DnnHandle) -> None:
    x = draw()
    attrs: dict[str, Any] = {"num_heads": 3, "dropout": 0.4, "seed": 7, "offset": 3}
    out, *saved = h.multi_head_attention(**x, **attrs, return_saved=True)
    assert np.abs(out - h.multi_head_attention(**x, num_heads=3)).max() > 1e-3
    d_out = np.random.default_rng(4).standard_normal(out.shape)
    inputs = {n: x[n] for n in ("query", "key", "value", *WEIGHTS)}
    d_value = h.multi_head_attention_backward(d_out, *inputs.values(), *saved, **attrs)[2]
    direction = np.random.default_rng(5).standard_normal(x["value"].shape)  # the result is linear in it
    moved = h.multi_head_attention(**(x | {"value": x["value"] + direction}), **attrs)
    np.testing.assert_allclose((d_value * direction).sum(), ((moved - out) * d_out).sum(), rtol=1e-9)


@pytest.mark.parametrize(("change", "words"), [
    ({"num_heads": 5}, "rows of w_q"), ({"num_heads": 0}, "num_heads"), ({"w_k": np.zeros((8, 7))}, "rows of w_k"),
    ({"w_v": np.zeros((7, 9))}, "rows of w_v"), ({"w_out": np.zeros((5, 7))}, "shape of w_out"),
    ({"key": np.zeros((1, 4, 7))}, "shape of key"),
    ({"value": np.zeros((2, 3, 9))}, "shape of value"), ({"w_q": np.zeros((12, 10), np.float32)}, "type of w_q"),
    ({"bias_v": np.zeros(5)}, "shape of bias_v"), ({"mask": np.ones((2, 3, 3, 5), bool)}, "multi_head_attention: shape of mask"),
    ({"query": np.zeros((3, 10))}, "rank of query"), ({"causal": "yes"}, "multi_head_attention: causal"), ({"window": (True, 1)}, "window"),
    ({"residual": np.zeros((2, 3, 4))}, "shape of residual"), ({"dropout": 2}, "dropout is 2"), ({"dropout": -0.1}, "dropout is -0.1"),
    ({"dropout": np.nan}, "dropout is nan"), ({"dropout": "x"}, "dropout is 'x'"), ({"dropout": 0.5}, "multi_head_attention: seed"),
])
def test_refusals(h: DnnHandle, change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        h.multi_head_attention(**(draw() | {"num_heads": 3} | change))
