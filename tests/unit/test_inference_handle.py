"""What serves decoding, through the handle, on the emulator: paged attention."""

from __future__ import annotations

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
