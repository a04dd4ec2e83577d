"""The handle's attention, with what goes around it: rotary positions, caches of keys, projections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from ..dispatch.session import hashable
from ..errors import expected
from ..ops.checks import check_number
from .calls import CALLS, draw_of
from .device import OnDevice


class AttentionOps(OnDevice):
    """Methods of DnnHandle."""

    def attention(self, q: Any, k: Any, v: Any, *, scale: float | None = None, causal: str | None = None,
                  window: tuple[int | None, int | None] | None = None, mask: Any = None, bias: Any = None, alibi: Any = None,
                  score: Any = None, softcap: float | None = None, sinks: Any = None, dropout: float = 0, seed: int | None = None,
                  offset: int = 0, lengths_q: Any = None, lengths_kv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
                  block_mask: Any = None, block_size: int | tuple[int, int] | None = None, scale_q: Any = None, scale_k: Any = None,
                  scale_v: Any = None, scale_out: Any = None, out_dtype: Any = None, return_lse: bool = False,
                  operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None,
                  out: Any = None, stream: Any = None) -> Any:
        """softmax(E(scale * q k^T)) v over the keys that each query sees: (B, H, L, E); with return_lse also the logarithm of the sum.

        q (B, H, L, D), k (B, G, M, D), v (B, G, M, E), any strides, or without the batch; f64, f32, f16 or bf16 alike; D and E up to 512;
        G divides H: query head h takes head h // (H / G) of k and v. lse (B, H, L) is f32 (f64 of f64), natural logarithm. scale: default
        1 / sqrt(D).

        causal: "top_left" (query i sees keys up to i) or "bottom_right" (up to i + M - L). window: (left, right) keys to either side, None
        for no limit. A query that sees nothing gives 0 and -inf.
        softcap: c * tanh(s / c). bias: broadcasts to (B, H, L, M), added. alibi (H,) or (B, H): times the distance, subtracted. score: an
        expression over score, b, h, i, j, p (the query's place among the keys), `operands` that broadcast to (B, H, L, M) and `scalars`.
        mask: bool (False: not visible) or floats, added last. sinks (H,): logits of a key without a value. All in this order; -inf alone
        masks. dropout: chance that a weight is left out; seed, offset: see `dropout`.
        lengths_q, lengths_kv (B,) int32: how many queries and keys each batch has. cu_seqlens_q, cu_seqlens_kv (N + 1,) int32: where the
        sequences that lie side by side in q (H, T, D) begin, and the last one ends. All four stay on the device.
        block_mask: bool or uint8, broadcasts to (B, H, ceil(L / m), ceil(M / n)) along batch and heads; block_size = (m, n), multiples of
        64, or one number for both: where it is False no query of the block sees any key of it, and tiles of it are skipped.
        q, k, v in float8_e4m3fn or float8_e5m2: scale_q, scale_k, scale_v (one f32, (H,) or (B, H) of the tensor's heads, above 0) multiply
        them. out_dtype: bfloat16 by default, float16, float32 or the 8-bit floats, which scale_out divides.
        FlashAttention: Dao, 2023; online softmax: Milakov and Gimelshein, 2018.
        """
        _check_window("attention", window)
        draw = _dropout_draw("attention", dropout, seed, offset)
        attrs = (scale, causal, window, score, softcap, dropout if draw else None, block_size, return_lse, out_dtype)
        arrays = (q, k, v, mask, bias, alibi, sinks, lengths_q, lengths_kv, cu_seqlens_q, cu_seqlens_kv, block_mask,
                  scale_q, scale_k, scale_v, scale_out)
        return self._session.run(CALLS["attention"], arrays, attrs, out, stream, _numbers("attention", scalars, draw), operands)

    def attention_backward(self, d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, scale: float | None = None,
                           causal: str | None = None, window: tuple[int | None, int | None] | None = None, mask: Any = None,
                           bias: Any = None, alibi: Any = None, score: Any = None, softcap: float | None = None, sinks: Any = None,
                           dropout: float = 0, seed: int | None = None, offset: int = 0, lengths_q: Any = None, lengths_kv: Any = None,
                           cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, block_mask: Any = None,
                           block_size: int | tuple[int, int] | None = None, score_gradients: Sequence[str] | str | None = None,
                           operands: Mapping[str, Any] | None = None,
                           scalars: Mapping[str, float] | None = None, gradients: Any = None, stream: Any = None) -> Any:
        """(dq, dk, dv), then dbias with a bias, then dsinks with sinks, then those of the tensors of the scores' expression that
        score_gradients names ("alibi" too): the gradients of `attention` from its result and lse.

        The other arguments as they were. gradients: a tuple of arrays to write instead of new ones. Rows without a visible key, whose lse
        is -inf, have gradients of 0.
        """
        _check_window("attention_backward", window)
        draw = _dropout_draw("attention_backward", dropout, seed, offset)
        arrays = (d_out, q, k, v, out, lse, mask, bias, alibi, sinks, lengths_q, lengths_kv, cu_seqlens_q, cu_seqlens_kv, block_mask)
        attrs = (scale, causal, window, score, softcap, dropout if draw else None, block_size, score_gradients)
        numbers = _numbers("attention_backward", scalars, draw)
        return self._session.run(CALLS["attention_backward"], arrays, attrs, gradients, stream, numbers, operands)

    def paged_attention(self, q: Any, k_cache: Any, v_cache: Any, page_table: Any, lengths_kv: Any, *, scale: float | None = None,
                        causal: str | None = None, window: tuple[int | None, int | None] | None = None, softcap: float | None = None,
                        alibi: Any = None, sinks: Any = None, lengths_q: Any = None, cu_seqlens_q: Any = None, k_scale: Any = None,
                        v_scale: Any = None, num_splits: int | None = None, return_lse: bool = False, out: Any = None,
                        stream: Any = None) -> Any:
        """`attention` of keys and values that lie in pages: key j of sequence b is k_cache[page_table[b, j // page], :, j % page].

        q (B, H, L, D), f16 or bf16; k_cache (P, G, page, D), v_cache (P, G, page, E), any strides (so of pages (page, heads, dim) a view
        with these dimensions swapped), of q's type or e4m3, e5m2 or s8; D and E up to 256. page_table (B, N), lengths_kv (B,) int32, on
        the device; what they do not name is never used. L: query rows, 1 in decoding, more of a draft or a prompt; lengths_q (B,): how
        many each sequence has; or cu_seqlens_q (B + 1,): where they begin in q (H, T, D). k_scale, v_scale: f32, that broadcast to
        (P, G, page), what values of the cache are multiplied by. num_splits: CTAs that deal out a sequence's keys (default: chosen).
        The rest as `attention`.
        vLLM's paged attention: Kwon et al., 2023; Flash-Decoding: Dao et al., 2023.
        """
        _check_window("paged_attention", window)
        arrays = (q, k_cache, v_cache, page_table, lengths_kv, alibi, sinks, lengths_q, cu_seqlens_q, k_scale, v_scale)
        return self._session.run(CALLS["paged_attention"], arrays, (scale, causal, window, softcap, num_splits, return_lse), out, stream)

    def rope(self, x: Any, cos: Any = None, sin: Any = None, *, positions: Any = None, base: float | None = None,
             rotary_dim: int | None = None, interleaved: bool = False, scaling: Mapping[str, Any] | None = None, inverse: bool = False,
             out: Any = None, stream: Any = None) -> Any:
        """Rotary position embedding of x (B, H, L, D) or (H, L, D), any strides; out may be x.

        The first rotary_dim (default D) elements of a row are turned by pairs, i with i + rotary_dim / 2, or interleaved 2 i with 2 i + 1:
        (a, b) becomes (a cos - b sin, b cos + a sin) of the angle position * base^(-2 i / rotary_dim). positions (B, L) or (L,), int32 or
        int64: default 0, 1, ... base: default 10000. Angles are reduced in float64, whatever x's type is.
        cos, sin (M, rotary_dim / 2) or (B, L, rotary_dim / 2): tables instead; of rotary_dim columns, one for each element of a pair.
        scaling: a mapping, with "type" ("rope_type") "linear" (factor), "llama3" (factor, low_freq_factor, high_freq_factor,
        original_max_position_embeddings), "yarn" (factor, original_max_position_embeddings, beta_fast, beta_slow, attention_factor) or
        "longrope" (factors; attention_factor, or factor and original_max_position_embeddings). inverse: see `rope_backward`.
        RoPE: Su et al., 2021; YaRN: Peng et al., 2023; LongRoPE: Ding et al., 2024.
        """
        attrs = (base, rotary_dim, interleaved, _scaling("rope", scaling), inverse)
        return self._session.run(CALLS["rope"], (x, cos, sin, positions), attrs, out, stream)

    def rope_backward(self, dy: Any, cos: Any = None, sin: Any = None, *, positions: Any = None, base: float | None = None,
                      rotary_dim: int | None = None, interleaved: bool = False, scaling: Mapping[str, Any] | None = None, out: Any = None,
                      stream: Any = None) -> Any:
        """dx of `rope` with the same arguments: the transposed rotation, which turns back."""
        return self.rope(dy, cos, sin, positions=positions, base=base, rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling,
                         inverse=True, out=out, stream=stream)

    def kv_cache_append(self, k: Any, v: Any, k_cache: Any, v_cache: Any, *, slots: Any = None, positions: Any = None,
                        page_table: Any = None, q: Any = None, rope: bool = False, cos: Any = None, sin: Any = None,
                        base: float | None = None, rotary_dim: int | None = None, interleaved: bool = False,
                        scaling: Mapping[str, Any] | None = None, k_scale: Any = None, v_scale: Any = None, q_out: Any = None,
                        stream: Any = None) -> Any:
        """Writes k (B, G, L, D) and v (B, G, L, E) to their tokens' places in the caches (P, G, page, D) and (P, G, page, E), any strides;
        returns (k_cache, v_cache), with a q also q_out.

        slots (B, L): page * page size + key. Or positions (B, L): key p % page of page_table[b, p // page] (B, N), without a table key p of
        page b. int32 or int64. Tokens of negative or too large ones are left out; no two may have the same. Rows without a batch:
        (G, T, D), (T,). Caches of k's type, or e4m3, e5m2 or int8 (to nearest even, saturated) of values divided by k_scale and v_scale,
        f32, that broadcast to (P, G, page). rope: keys and queries q (B, H, L, D) are turned first, as `rope` does by positions; the
        queries go to q_out, default q itself.
        """
        arrays = (k, v, slots, positions, page_table, q, cos, sin, k_scale, v_scale)
        out = (k_cache, v_cache) if q is None else (k_cache, v_cache, q if q_out is None else q_out)
        attrs = (rope, base, rotary_dim, interleaved, _scaling("kv_cache_append", scaling))
        return self._session.run(CALLS["kv_cache_append"], arrays, attrs, out, stream)

    def merge_attention_states(self, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, stream: Any = None) -> Any:
        """(out, lse) of attention over two sets of keys, from its results (B, H, L, E) and logarithms (B, H, L) over each: what a prefix
        that sequences share leaves is made once (cascade). A state whose lse is -inf has no weight, whatever it holds; out may be
        (out_a, lse)."""
        return self._session.run(CALLS["merge_attention_states"], (out_a, lse_a, out_b, lse_b), (), out, stream)

    def multi_head_attention(self, query: Any, key: Any, value: Any, w_q: Any, w_k: Any, w_v: Any, w_out: Any, *, num_heads: int,
                             bias_q: Any = None, bias_k: Any = None, bias_v: Any = None, bias_out: Any = None, residual: Any = None,
                             mask: Any = None, lengths_q: Any = None, lengths_kv: Any = None, scale: float | None = None,
                             causal: str | None = None, window: tuple[int | None, int | None] | None = None, dropout: float = 0,
                             seed: int | None = None, offset: int = 0, return_saved: bool = False, out: Any = None,
                             stream: Any = None) -> Any:
        """The classic layer: `attention` of the heads of query w_q' + bias_q, key w_k' + bias_k and value w_v' + bias_v, their results side
        by side times w_out', plus bias_out and residual: (B, L, O); with return_saved also q, k, v, context and lse, which
        `multi_head_attention_backward` takes.

        query (B, L, E), key (B, M, F), value (B, M, G), any strides (so lengths first in memory as transposed views); w_q (H*D, E), w_k
        (I*D, F), w_v (I*V, G), w_out (O, H*V), H being num_heads and I a divisor of it: pieces of a packed weight will do. One type, f16,
        bf16, f32 or f64; biases any float type. mask, lengths_q, lengths_kv, scale, causal, window and dropout (of weights; seed, offset:
        see `dropout`) are those of `attention`: a mask of bool is True where a query sees a key.
        Vaswani et al., 2017.
        """
        _check_window("multi_head_attention", window)
        draw = _dropout_draw("multi_head_attention", dropout, seed, offset)
        arrays = (query, key, value, w_q, w_k, w_v, w_out, bias_q, bias_k, bias_v, bias_out, residual, mask, lengths_q, lengths_kv)
        attrs = (num_heads, scale, causal, window, dropout if draw else None, return_saved)
        return self._session.run(CALLS["multi_head_attention"], arrays, attrs, out, stream, draw)

    def multi_head_attention_backward(self, d_out: Any, query: Any, key: Any, value: Any, w_q: Any, w_k: Any, w_v: Any, w_out: Any, q: Any,
                                      k: Any, v: Any, context: Any, lse: Any, *, num_heads: int, mask: Any = None, lengths_q: Any = None,
                                      lengths_kv: Any = None, scale: float | None = None, causal: str | None = None,
                                      window: tuple[int | None, int | None] | None = None, dropout: float = 0, seed: int | None = None,
                                      offset: int = 0, bias_gradients: bool = False, gradients: Any = None, stream: Any = None) -> Any:
        """(d_query, d_key, d_value, dw_q, dw_k, dw_v, dw_out), under bias_gradients also dbias_q, dbias_k, dbias_v, dbias_out: the
        gradients of `multi_head_attention`, the same bits on every run.

        q, k, v, context, lse: what it returned under return_saved; the other arguments as they were. gradients: a tuple of arrays to write
        instead of new ones; those of weights and biases may be float32.
        """
        _check_window("multi_head_attention_backward", window)
        draw = _dropout_draw("multi_head_attention_backward", dropout, seed, offset)
        arrays = (d_out, query, key, value, w_q, w_k, w_v, w_out, q, k, v, context, lse, mask, lengths_q, lengths_kv)
        attrs = (num_heads, scale, causal, window, dropout if draw else None, bias_gradients)
        return self._session.run(CALLS["multi_head_attention_backward"], arrays, attrs, gradients, stream, draw)


def _check_window(op: str, window: Any) -> None:
    """Refuses True and False, which a key would take for 1 and 0."""
    if isinstance(window, (tuple, list)) and any(isinstance(w, bool) for w in window):
        raise expected(op, "window", repr(window), "(left, right): keys on either side, each None or an integer in 0 to 2^30")


def _numbers(op: str, scalars: Any, draw: Mapping[str, int]) -> dict[str, Any]:
    if scalars is not None and not isinstance(scalars, Mapping):
        raise expected(op, "scalars", repr(scalars), "a mapping from names to numbers")
    return {**(scalars or {}), **draw}


def _dropout_draw(op: str, dropout: Any, seed: int | None, offset: int) -> dict[str, int]:
    """The numbers that name the draw of weights, both checked; none without dropout."""
    if isinstance(dropout, Real) and not dropout:
        return {}
    if not 0 <= check_number(op, "dropout", dropout) <= 1:
        raise expected(op, "dropout", dropout, "a number in [0, 1]")
    return draw_of(op, seed, offset)


def _scaling(op: str, given: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...] | None:
    """The mapping as pairs, "type" first, which may be called "rope_type"; those without a value left out."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise expected(op, "scaling", repr(given), "a mapping, with the key 'type'")
    pairs = {("type" if n == "rope_type" else n): hashable(value, op, "scaling") for n, value in given.items() if value is not None}
    return tuple(sorted(pairs.items(), key=lambda pair: (pair[0] != "type", pair[0])))
