"""Attention through the handle: what is masked and what is not, alignments, sequences side by side, heads, views, gradients by differences,
scores as expressions, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oxidnn


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


def normal(*shape: int, seed: int = 0, dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray | None = None, scale: float | None = None) -> np.ndarray:
    """In float64; 0 where nothing is seen. Heads of k and v serve a group of q's."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(a, group, 1) for a in (k, v))
    s = q @ k.swapaxes(2, 3) * (1 / np.sqrt(q.shape[3]) if scale is None else scale)
    s = s if seen is None else np.where(seen, s, -np.inf)
    top = s.max(3, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(3, keepdims=True)
    return e / np.where(total > 0, total, 1) @ v


def test_a_row_that_sees_nothing_is_zero(h: oxidnn.DnnHandle) -> None:
    q, k, v = np.ones((1, 1, 2, 4)), np.ones((1, 1, 3, 4)), np.arange(12.0).reshape(1, 1, 3, 4)
    mask = np.array([[True, True, False], [False, False, False]])
    out, lse = h.attention(q, k, v, mask=mask, return_lse=True)
    np.testing.assert_allclose(out[0, 0], [[2, 3, 4, 5], [0, 0, 0, 0]], rtol=1e-13)
    assert lse[0, 0, 1] == -np.inf and lse[0, 0, 0] == pytest.approx(2 + np.log(2), rel=1e-13)
    gradients = h.attention_backward(np.ones_like(out), q, k, v, out, lse, mask=mask)
    assert all(np.isfinite(g).all() for g in gradients)
    assert (gradients[0][0, 0, 1] == 0).all() and (gradients[1][0, 0, 2] == 0).all() and (gradients[2][0, 0, 2] == 0).all()


def test_alignments_are_named(h: oxidnn.DnnHandle) -> None:
    """Of two queries and five keys, top left sees 1 and 2, bottom right 4 and 5: the mean of so many values."""
    q, k, v = np.zeros((1, 1, 2, 8), np.float32), normal(1, 1, 5, 8, dtype=np.float32), np.eye(5, 8, dtype=np.float32)[None, None]
    for alignment, counts in (("top_left", (1, 2)), ("bottom_right", (4, 5))):
        out = h.attention(q, k, v, causal=alignment)
        np.testing.assert_allclose(out[0, 0], [[1 / n] * n + [0] * (8 - n) for n in counts], rtol=1e-6)
    assert (h.attention(v, q, q, causal="bottom_right")[0, 0, :3] == 0).all(), "queries before the first key"
    with pytest.raises(oxidnn.InvalidArgument, match="causal"):
        h.attention(q, k, v, causal=True)  # type: ignore[arg-type]


def test_only_minus_infinity_masks(h: oxidnn.DnnHandle) -> None:
    v = normal(1, 1, 70, 4, dtype=np.float32)
    out = h.attention(np.full((1, 1, 1, 1), -6e4, np.float32), np.ones((1, 1, 70, 1), np.float32), v, scale=1.0)
    np.testing.assert_allclose(out[0, 0, 0], v[0, 0].mean(0), rtol=1e-5, atol=1e-6)
    k = np.array([2000.0, 2001.0], np.float32).reshape(1, 1, 2, 1)
    out = h.attention(np.ones((1, 1, 1, 1), np.float32), k, np.eye(2, dtype=np.float32)[None, None], scale=1.0)
    np.testing.assert_allclose(out[0, 0, 0], [1 / (1 + np.e), np.e / (1 + np.e)], rtol=1e-6)
    bias = np.array([-1e38, 0, -np.inf], np.float32)
    one = np.ones((1, 1, 1, 1), np.float32)
    out = h.attention(one, one.repeat(3, 2), np.eye(3, dtype=np.float32)[None, None], bias=bias)
    np.testing.assert_array_equal(out[0, 0, 0], [0, 1, 0])


@pytest.mark.parametrize("how", ["bool", "float", "lengths", "causal"])
def test_what_is_not_seen_may_be_nan(h: oxidnn.DnnHandle, how: str) -> None:
    """The rows that do not see a key of NaN, and all gradients but those of the rows that do."""
    q, k, v, d_out = normal(2, 2, 6, 8), normal(2, 1, 9, 8, seed=1), normal(2, 1, 9, 8, seed=2), normal(2, 2, 6, 8, seed=3)
    seen = np.ones((2, 1, 6, 9), bool)
    given: dict[str, Any] = {}
    if how == "lengths":
        given["lengths_kv"] = ints(7, 0)
        seen = np.broadcast_to(np.arange(9) < given["lengths_kv"][:, None, None, None], seen.shape)
    elif how == "causal":
        given["causal"] = "top_left"
        seen = np.broadcast_to(np.tri(6, 9, dtype=bool), seen.shape)
    else:
        seen[0, :, :, [2, 8]] = False
        given["mask"] = seen if how == "bool" else np.where(seen, 0.0, -np.inf)
    unseen = ~np.asarray(seen.any((1, 2)))
    clean = k.copy(), v.copy()
    for a in (k, v):
        a[np.broadcast_to(unseen[:, None], a.shape[:3])] = np.nan
    out, lse = h.attention(q, k, v, return_lse=True, **given)
    np.testing.assert_allclose(out, attention(q, *clean, seen), rtol=1e-11, atol=1e-13)
    want = h.attention_backward(d_out, q, *clean, out, lse, **given)
    for got, expected in zip(h.attention_backward(d_out, q, k, v, out, lse, **given), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    if how in ("bool", "float"):  # a query that sees nothing takes no part
        seen[0, :, 3] = False
        given["mask"] = seen if how == "bool" else np.where(seen, 0.0, -np.inf)
        q[0, :, 3] = d_out[0, :, 3] = 0
        out, lse = h.attention(q, k, v, return_lse=True, **given)
        want = h.attention_backward(d_out, q, k, v, out, lse, **given)
        q[0, :, 3] = d_out[0, :, 3] = np.nan
        np.testing.assert_array_equal(h.attention(q, k, v, **given), out)
        for got, expected in zip(h.attention_backward(d_out, q, k, v, out, lse, **given), want, strict=True):
            np.testing.assert_array_equal(got, expected)
    if how == "causal":  # seen by the last row alone
        v[0, 0, 5] = np.nan
        np.testing.assert_allclose(h.attention(q, k, v, **given)[:, :, :5], attention(q, *clean, seen)[:, :, :5], rtol=1e-11, atol=1e-13)


def test_sequences_side_by_side_with_empty_ones(h: oxidnn.DnnHandle) -> None:
    """cu_q [0, 3, 3, 7], cu_k [0, 4, 6, 6]: queries 3 to 6 have no key, keys 4 and 5 no query."""
    cu_q, cu_k = ints(0, 3, 3, 7), ints(0, 4, 6, 6)
    q, k, v, d_out = (normal(2, n, 32, seed=s, dtype=np.float32) for s, n in enumerate((7, 6, 6, 7)))
    out, lse = h.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_k, return_lse=True)
    np.testing.assert_allclose(out[:, :3], attention(q[None, :, :3], k[None, :, :4], v[None, :, :4])[0], rtol=2e-5, atol=1e-6)
    assert (out[:, 3:] == 0).all() and (lse[:, 3:] == -np.inf).all() and np.isfinite(lse[:, :3]).all()
    dq, dk, dv = h.attention_backward(d_out, q, k, v, out, lse, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_k)
    assert (dq[:, 3:] == 0).all() and (dk[:, 4:] == 0).all() and (dv[:, 4:] == 0).all()
    alone = h.attention_backward(*(np.ascontiguousarray(a) for a in (d_out[:, :3], q[:, :3], k[:, :4], v[:, :4], out[:, :3], lse[:, :3])))
    for got, want in zip((dq[:, :3], dk[:, :4], dv[:, :4]), alone, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_queries_of_one_token_and_tokens_of_no_sequence(h: oxidnn.DnnHandle) -> None:
    q, k, v = (normal(1, 1, n, 16, seed=s) for s, n in enumerate((5, 9, 9)))
    out, lse = h.attention(q, k, v, cu_seqlens_q=ints(1, 2, 3), cu_seqlens_kv=ints(0, 5, 8), causal="bottom_right",
                           return_lse=True)
    for n, keys in enumerate((slice(0, 5), slice(5, 8))):
        np.testing.assert_allclose(out[:, :, 1 + n], attention(q[:, :, 1 + n:2 + n], k[:, :, keys], v[:, :, keys])[:, :, 0], rtol=1e-12)
    assert (out[:, :, [0, 3, 4]] == 0).all() and (lse[:, :, [0, 3, 4]] == -np.inf).all()
    d_out = normal(1, 1, 5, 16, seed=3)
    d_out[:, :, [0, 3, 4]] = k[:, :, 8] = v[:, :, 8] = np.nan
    dq, dk, dv = h.attention_backward(d_out, q, k, v, out, lse, causal="bottom_right", cu_seqlens_q=ints(1, 2, 3),
                                      cu_seqlens_kv=ints(0, 5, 8))
    assert (dq[:, :, [0, 3, 4]] == 0).all() and (dk[:, :, 8] == 0).all() and (dv[:, :, 8] == 0).all()
    assert all((a != 0).any() and np.isfinite(a).all() for a in (dq[:, :, 1:3], dk[:, :, :8], dv[:, :, :8]))


def test_gathered_keys_with_unused_ones_of_nan(h: oxidnn.DnnHandle) -> None:
    """17 of two pages of 16 keys, and a request of none."""
    q, k, v = normal(2, 4, 1, 16), normal(2, 2, 32, 16, seed=1), normal(2, 2, 32, 16, seed=2)
    want = attention(q[:1], k[:1, :, :17], v[:1, :, :17])
    k[0, :, 17:] = v[0, :, 17:] = k[1] = v[1] = np.nan
    out = h.attention(q, k, v, lengths_kv=ints(17, 0))
    np.testing.assert_allclose(out[:1], want, rtol=1e-12)
    assert (out[1] == 0).all()


def test_heads_of_a_group_share_keys(h: oxidnn.DnnHandle) -> None:
    q, k, v = (normal(1, heads, n, 16, seed=s, dtype=np.float32) for s, (heads, n) in enumerate(((8, 3), (2, 5), (2, 5))))
    out = h.attention(q, k, v)
    for head in range(8):
        alone = attention(q[:, head:head + 1], k[:, head // 4:head // 4 + 1], v[:, head // 4:head // 4 + 1])
        np.testing.assert_allclose(out[:, head:head + 1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dim", "dim_v"), [(40, 40), (72, 72), (80, 80), (96, 96), (112, 112), (160, 160), (192, 128), (256, 256), (1, 5)])
def test_head_dims(h: oxidnn.DnnHandle, dim: int, dim_v: int) -> None:
    shapes = (1, 2, 4, dim), (1, 1, 6, dim), (1, 1, 6, dim_v)
    q, k, v = (normal(*shape, seed=s, dtype=np.float16) for s, shape in enumerate(shapes))
    np.testing.assert_allclose(h.attention(q, k, v), attention(q, k, v), rtol=3e-3, atol=3e-3)


def test_views(h: oxidnn.DnnHandle) -> None:
    """q, k and v of one packed array, one head or batch repeated by a stride of 0, values transposed, results of another layout."""
    packed = normal(2, 5, 3, 2, 8, dtype=np.float32)
    q, k, v = (packed[:, :, n].swapaxes(1, 2) for n in range(3))
    want = attention(q, k, v)
    np.testing.assert_allclose(h.attention(q, k, v), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(h.attention(q[0], k[0], v[0]), want[0], rtol=1e-5, atol=1e-6)
    out = np.empty((2, 5, 2, 8), np.float32)
    h.attention(q, k, v, out=out.swapaxes(1, 2))
    np.testing.assert_allclose(out.swapaxes(1, 2), want, rtol=1e-5, atol=1e-6)
    one = np.broadcast_to(k[:1, :1], (2, 2, 5, 8))
    turned = np.ascontiguousarray(v.swapaxes(2, 3)).swapaxes(2, 3)
    np.testing.assert_allclose(h.attention(q, one, turned), attention(q, one, v), rtol=1e-5, atol=1e-6)


SCORES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "bias": lambda: {"bias": normal(1, 2, 4, 6, seed=8), "causal": "bottom_right"},
    "bias of heads and keys": lambda: {"bias": normal(2, 1, 6, seed=8), "softcap": 3.0},
    "sinks": lambda: {"sinks": normal(2, seed=9), "window": (3, 1)},
    "bias of keys, sinks": lambda: {"bias": normal(6, seed=8), "sinks": normal(2, seed=9)},
    "score": lambda: {"score": "score * scalar(gain) + slope * (j - p)", "operands": {"slope": normal(2, 1, 1, seed=8)},
                      "scalars": {"gain": 0.7}},
    "dropout": lambda: {"dropout": 0.3, "seed": 5, "alibi": np.array([0.5, 0.25], np.float32)},
}


@pytest.mark.parametrize("name", SCORES)
def test_gradients_are_differences(h: oxidnn.DnnHandle, name: str) -> None:
    """<d_out, f(x + t u) - f(x - t u)> / 2t = <dx, u> in every argument."""
    q, k, v, d_out = normal(2, 2, 4, 8), normal(2, 1, 6, 8, seed=1), normal(2, 1, 6, 5, seed=2), normal(2, 2, 4, 5, seed=3)
    more, t = SCORES[name](), 1e-5
    out, lse = h.attention(q, k, v, return_lse=True, **more)
    found = h.attention_backward(d_out, q, k, v, out, lse, **more)
    wanted = [n for n in ("bias", "sinks") if n in more]
    assert len(found) == 3 + len(wanted)
    for i, (x, gradient) in enumerate(zip((q, k, v, *(more[n] for n in wanted)), found, strict=True)):
        assert gradient.shape == x.shape
        u = normal(*x.shape, seed=20 + i)
        ends = []
        for sign in (1, -1):
            moved = [q, k, v, *(more[n] for n in wanted)]
            moved[i] = x + sign * t * u
            ends.append(h.attention(*moved[:3], **{**more, **dict(zip(wanted, moved[3:], strict=True))}))
        assert np.vdot(d_out, ends[0] - ends[1]) / (2 * t) == pytest.approx(np.vdot(gradient, u), rel=1e-6, abs=1e-8), i


def test_gradients_into_given_arrays(h: oxidnn.DnnHandle) -> None:
    q, k, v, d_out = (normal(1, 2, 5, 8, seed=s, dtype=np.float32) for s in range(4))
    out, lse = h.attention(q, k, v, return_lse=True)
    want = h.attention_backward(d_out, q, k, v, out, lse)
    packed = np.full((1, 5, 3, 2, 8), np.nan, np.float32)
    h.attention_backward(d_out, q, k, v, out, lse, gradients=tuple(packed[:, :, n].swapaxes(1, 2) for n in range(3)))
    for n in range(3):
        np.testing.assert_array_equal(packed[:, :, n].swapaxes(1, 2), want[n])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(arch: str, scale: float) -> None:
    """Causal halves as in float64: -inf of a mask times such a scale would be no -inf."""
    h = oxidnn.DnnHandle(f"emu:{arch}")
    q, k, v, d_out = (normal(1, 1, 70, 64, seed=s, dtype=np.float16) for s in range(4))
    halves, doubles = (q, k, v, d_out), tuple(a.astype(np.float64) for a in (q, k, v, d_out))
    found = []
    for q, k, v, d_out in (halves, doubles):
        out, lse = h.attention(q, k, v, scale=scale, causal="top_left", return_lse=True)
        found.append((out, *h.attention_backward(d_out, q, k, v, out, lse, scale=scale, causal="top_left")))
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("left", [30, 31])
def test_dropout_where_a_window_begins_at_an_odd_key(h: oxidnn.DnnHandle, left: int) -> None:
    """Halves agree with float64: neighbours from an even key on share a draw."""
    arrays = tuple(normal(1, 2, n, 64, seed=s, dtype=np.float16) for s, n in enumerate((2, 34, 34, 2)))
    bias = normal(2, 1, seed=4, dtype=np.float16)
    found = []
    for dtype in (np.float16, np.float64):
        q, k, v, d_out = (a.astype(dtype) for a in arrays)
        given: dict[str, Any] = {"bias": bias.astype(dtype), "window": (left, 15), "dropout": 0.3, "seed": 3}
        out, lse = h.attention(q, k, v, return_lse=True, **given)
        found.append((out, *h.attention_backward(d_out, q, k, v, out, lse, **given)))
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)


def test_the_gradient_of_a_bias_of_one_number(h: oxidnn.DnnHandle) -> None:
    q, k, v, d_out = (normal(1, 1, 3, 8, seed=s) for s in range(4))
    out, lse = h.attention(q, k, v, bias=np.array(0.5), return_lse=True)
    d_bias = h.attention_backward(d_out, q, k, v, out, lse, bias=np.array(0.5))[3]
    assert d_bias.shape == () and abs(d_bias) < 1e-12


def test_dropout_depends_on_its_seed(h: oxidnn.DnnHandle) -> None:
    q, k, v = (normal(1, 1, 3, 8, seed=s, dtype=np.float32) for s in range(3))
    first, again, other = (h.attention(q, k, v, dropout=0.5, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (h.attention(q, k, v, dropout=1.0, seed=1) == 0).all()


def test_errors_name_the_argument(h: oxidnn.DnnHandle) -> None:
    q, k = normal(1, 4, 5, 8), normal(1, 2, 6, 8)
    lengths, starts = ints(3), ints(0, 5)
    wrong: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("rank of q", lambda: h.attention(q[0, 0], k, k)), ("rank of v", lambda: h.attention(q, k, k[0])),
        ("type of k", lambda: h.attention(q, k.astype(np.float32), k)), ("shape of k", lambda: h.attention(q, k[..., :7], k)),
        ("shape of v", lambda: h.attention(q, k, k[:, :, :5])), ("heads of q", lambda: h.attention(q[:, :3], k, k)),
        ("last dimension of q", lambda: h.attention(*(np.ones((1, 1, 2, 513)),) * 3)),
        ("window", lambda: h.attention(q, k, k, window=(-1, 0))), ("window", lambda: h.attention(q, k, k, window=3)),  # type: ignore[arg-type]
        ("softcap", lambda: h.attention(q, k, k, softcap=-1.0)), ("dropout", lambda: h.attention(q, k, k, dropout=1.5, seed=1)),
        ("softcap", lambda: h.attention(q, k, k, softcap=1e-40)), ("scalars", lambda: h.attention(q, k, k, scalars=[1.0])),
        ("dropout", lambda: h.attention(q, k, k, dropout=ints(1, 2), seed=1)),  # type: ignore[arg-type]
        *(("scaling", lambda given=given: h.rope(q, scaling=given)) for given in (
            {"type": "longrope", "factors": [1] * 4, "factor": 4, "original_max_position_embeddings": 1},
            {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1e308, "beta_fast": 1e-300},
            {"type": "linear", "factor": 1e-320})),
        ("scale", lambda: h.attention(q, k, k, scale=np.nan)), ("shape of mask", lambda: h.attention(q, k, k, mask=np.ones((5, 5), bool))),
        ("type of mask", lambda: h.attention(q, k, k, mask=np.ones((5, 6), np.int32))),
        ("shape of bias", lambda: h.attention(q, k, k, bias=normal(3, 5, 6))),
        ("shape of sinks", lambda: h.attention(q, k, k, sinks=normal(2))),
        ("score", lambda: h.attention(q, k, k, score="score + slope")),
        ("slope", lambda: h.attention(q, k, k, operands={"slope": normal(1)})),
        ("lengths_kv", lambda: h.attention(q, k, k, lengths_kv=np.ones(1, np.int64))),
        ("lengths_q", lambda: h.attention(q, k, k, lengths_q=ints(1, 2))),
        ("cu_seqlens_kv", lambda: h.attention(q, k, k, cu_seqlens_q=starts)),
        ("lengths_q", lambda: h.attention(q, k, k, cu_seqlens_q=starts, cu_seqlens_kv=starts, lengths_q=lengths)),
        ("shape of lse", lambda: h.attention_backward(q, q, k, k, q, normal(1, 4, 6))),
        ("d_out", lambda: h.attention_backward(k, q, k, k, q, normal(1, 4, 5))),
    )  # fmt: skip
    for name, call in wrong:
        with pytest.raises(oxidnn.InvalidArgument, match=name):
            call()
