"""What serves decoding, through the handle, on the emulator: caches that grow, rotary positions, paged attention."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from oxidnn import DnnHandle
from oxidnn.errors import InvalidArgument


@pytest.fixture(scope="module")
def h() -> DnnHandle:
    return DnnHandle("emu:sm_80")


def softmax(s: np.ndarray) -> np.ndarray:
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_pages_of_either_layout_give_what_attention_gives(h: DnnHandle) -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 1, 32)).astype(np.float16)
    pages = rng.standard_normal((2, 6, 8, 2, 32)).astype(np.float16)  # (page, keys, heads, dim)
    table, lengths = np.array([[3, 1, 0], [5, 2, 4]], np.int32), np.array([20, 9], np.int32)
    k, v = pages.transpose(0, 1, 3, 2, 4)
    out, lse = h.paged_attention(q, k, v, table, lengths, return_lse=True)
    again = h.paged_attention(q, np.ascontiguousarray(k), np.ascontiguousarray(v), table, lengths, num_splits=2)
    np.testing.assert_allclose(again.astype(float), out.astype(float), rtol=2e-3, atol=1e-4)
    for b, n in enumerate(lengths):
        keys, values = (np.concatenate(list(c[table[b]]), axis=1)[:, :n].repeat(2, axis=0).astype(float) for c in (k, v))
        s = np.einsum("hid,hjd->hij", q[b].astype(float), keys) / np.sqrt(32)
        np.testing.assert_allclose(out[b], softmax(s) @ values, rtol=4e-3, atol=2e-3)
        np.testing.assert_allclose(lse[b], np.log(np.exp(s).sum(-1)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("change", "words"), [
    ({"page_table": np.zeros((3, 3), np.int32)}, "shape of page_table"), ({"lengths_kv": np.zeros(2, np.int64)}, "type of lengths_kv"),
    ({"v_cache": np.zeros((6, 2, 4, 32), np.float16)}, "shape of v_cache"), ({"k_scale": np.zeros(3, np.float32)}, "shape of k_scale"),
    ({"num_splits": 0}, "num_splits"), ({"softcap": -1.0}, "softcap"), ({"q": np.zeros((2, 3, 1, 32), np.float16)}, "heads of q"),
])
def test_refusals_of_paged_attention(h: DnnHandle, change: dict[str, object], words: str) -> None:
    cache = np.zeros((6, 2, 8, 32), np.float16)
    given = {"q": np.zeros((2, 4, 1, 32), np.float16), "k_cache": cache, "v_cache": cache, "page_table": np.zeros((2, 3), np.int32),
             "lengths_kv": np.zeros(2, np.int32)} | change
    with pytest.raises(InvalidArgument, match=words):
        h.paged_attention(**given)


@pytest.mark.parametrize("cached", ["float16", "float8_e4m3fn", "int8"])
def test_steps_of_decoding(h: DnnHandle, cached: str) -> None:
    """Keys turned and appended step by step, by slots and by positions, attend as all at once do."""
    rng = np.random.default_rng(1)
    batch, steps, page = 2, 11, 4
    q, k, v = (rng.standard_normal((batch, heads, steps, 16)).astype(np.float16) for heads in (4, 2, 2))
    table = rng.permutation(8)[:6].reshape(2, 3).astype(np.int32)
    kind = np.dtype(getattr(ml_dtypes, cached, cached))
    caches = [np.zeros((8, page, 2, 16), kind).transpose(0, 2, 1, 3) for _ in range(2)]
    scales = {} if cached == "float16" else {"k_scale": np.full(1, 1 / 32, np.float32), "v_scale": np.full((2, 1), 1 / 32, np.float32)}
    for step in range(0, steps, 2):  # two tokens at a time, of the last one only the first
        at = np.tile(np.arange(step, step + 2, dtype=np.int32), (batch, 1))
        at[:, 1:] = np.where(at[:, 1:] < steps, at[:, 1:], -1)
        new = [np.pad(a[:, :, step:step + 2], ((0, 0), (0, 0), (0, 2 - a[:, :, step:step + 2].shape[2]), (0, 0))) for a in (q, k, v)]
        slots = np.where(at < 0, -1, np.take_along_axis(table, np.maximum(at, 0) // page, 1) * page + at % page).astype(np.int64)
        place = {"slots": slots} if step % 4 else {"page_table": table}
        *written, turned = h.kv_cache_append(new[1], new[2], *caches, positions=at, q=new[0], rope=True, **place, **scales)
        assert all(a is b for a, b in zip(written, caches, strict=True)) and turned is new[0]
        length = np.full(batch, min(step + 2, steps), np.int32)
        rows = 2 if step + 2 <= steps else 1
        out = h.paged_attention(np.ascontiguousarray(turned[:, :, :rows]), *caches, table, length, causal="bottom_right", **scales)
        keys, queries = (h.rope(a.astype(np.float64)) for a in (k, q))
        s = np.einsum("bhid,bhjd->bhij", queries[:, :, step:step + rows], keys[:, :, :step + rows].repeat(2, 1)) / 4
        s = np.where(np.arange(step + rows) <= np.arange(step, step + rows)[:, None], s, -np.inf)
        want = softmax(s) @ v[:, :, :step + rows].repeat(2, 1).astype(float)
        np.testing.assert_allclose(out.astype(float), want, atol={"float16": 6e-3, "int8": 0.05}.get(cached, 0.2))


@pytest.mark.parametrize(("change", "words"), [
    ({}, "slots"), ({"slots": np.zeros((2, 2), np.int32)}, "shape of slots"), ({"slots": np.zeros((1, 3), np.float32)}, "type of slots"),
    ({"positions": np.zeros((1, 3), np.int32)}, "pages of k_cache"), ({"slots": np.zeros((1, 3), np.int32), "rope": True}, "positions"),
    ({"slots": np.zeros((1, 3), np.int32), "base": 100.0}, "base"),
    ({"slots": np.zeros((1, 3), np.int32), "v_cache": np.zeros((4, 2, 8, 8), np.float16)}, "shape of v_cache"),
])
def test_refusals_of_appending(h: DnnHandle, change: dict[str, object], words: str) -> None:
    rows, cache = np.zeros((1, 2, 3, 16), np.float16), np.zeros((4, 2, 8, 16), np.float16)
    given = {"k": rows, "v": rows, "k_cache": cache, "v_cache": cache.copy()} | change
    with pytest.raises(InvalidArgument, match=words):
        h.kv_cache_append(**given)


def test_appending_with_scales_of_every_key(h: DnnHandle) -> None:
    """k_scale of the caches' (pages, heads, page), which the rows' shapes say nothing of; a number for all of v."""
    rng = np.random.default_rng(5)
    k, v = (rng.integers(-9, 10, (2, 2, 3, 16)).astype(np.float32) for _ in range(2))
    scale = 2.0 ** rng.integers(-2, 1, (7, 2, 4)).astype(np.float32)
    places = rng.permutation(7 * 4)[:6].astype(np.int32)
    caches = np.zeros((7, 2, 4, 16), np.int8), np.zeros((7, 2, 4, 16), np.int8)
    h.kv_cache_append(k, v, *caches, slots=places.reshape(2, 3), k_scale=scale, v_scale=np.full(1, 0.5, np.float32))
    want_k, want_v = np.zeros_like(caches[0]), np.zeros_like(caches[1])
    for token, place in enumerate(places):
        b, i, page, key = token // 3, token % 3, place // 4, place % 4
        want_k[page, :, key], want_v[page, :, key] = k[b, :, i] / scale[page, :, key, None], v[b, :, i] / 0.5
    np.testing.assert_array_equal(caches[0], want_k)
    np.testing.assert_array_equal(caches[1], want_v)
    with pytest.raises(InvalidArgument, match="shape of k_scale"):
        h.kv_cache_append(k, v, *caches, slots=places.reshape(2, 3), k_scale=scale[:, :, :3])


def test_a_shared_prefix_and_own_keys(h: DnnHandle) -> None:
    """Merged states are attention over all keys; a state without keys may hold anything."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((2, 4, n, 16)).astype(np.float32) for n in (3, 9, 9))
    want, want_lse = h.attention(q, k, v, return_lse=True)
    (out_a, lse_a), (out_b, lse_b) = (h.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 5), slice(5, 9)))
    out, lse = h.merge_attention_states(out_a, lse_a, out_b, lse_b)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-6)
    nothing, none = np.full_like(want, np.nan), np.full_like(want_lse, -np.inf)
    out, lse = h.merge_attention_states(nothing, none, want, want_lse)
    np.testing.assert_allclose(out, want, rtol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    out, lse = h.merge_attention_states(nothing, none, nothing, none)
    assert not out.any() and np.isneginf(lse).all()


def test_errors_name_what_results_are_given_by() -> None:
    h = DnnHandle("emu:sm_80")
    q, at = np.zeros((1, 1, 4, 8), np.float32), np.zeros((1, 4), np.int32)
    out, lse = h.attention(q, q, q, window=(1, 2), return_lse=True)
    for gradients in (q.copy(), (q.copy(), q.copy()), (q.copy(), q.copy(), 3)):
        with pytest.raises(InvalidArgument, match="attention_backward: gradients"):
            h.attention_backward(q, q, q, q, out, lse, gradients=gradients)
    for name, caches in (("k_cache", (None, q.copy())), ("v_cache", (q.copy(), None))):
        with pytest.raises(InvalidArgument, match=f"kv_cache_append: {name}"):
            h.kv_cache_append(q, q, *caches, positions=at)
    with pytest.raises(InvalidArgument, match="window"):
        h.attention(q, q, q, window=(True, 2), return_lse=True)  # after a plan for (1, 2), which is equal
