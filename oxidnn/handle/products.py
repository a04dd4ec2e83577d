"""The handle's matrix products: dense, of groups, of quantised weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .calls import CALLS
from .device import OnDevice

_GEMM = CALLS["gemm"]


class ProductOps(OnDevice):
    """Methods of DnnHandle."""

    def gemm(self, a: Any, b: Any, bias: Any = None, *, transpose_a: bool = False, transpose_b: bool = False, alpha: float = 1.0,
             beta: float = 0.0, c: Any = None, epilogue: Any = None, scale_a: Any = None, scale_b: Any = None, gate: str | None = None,
             out_dtype: Any = None, operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None, out: Any = None,
             stream: Any = None) -> Any:
        """epilogue(alpha * op(a) @ op(b) + beta * c), with leading batch dimensions broadcast; bias (N,) along the last dimension.

        a and b: f64, f32, f16 or bf16 alike; e4m3 and e5m2 in any mix (default result bf16); s8 and u8 in any mix (result s32, exact
        modulo 2^32, unless something is done to it: then f32). scale_a, scale_b (f32) multiply a and b: one element, (M,) or (N,) of
        rows of op(a) and columns of op(b), or of 8-bit types a matrix of blocks of 128: (M or M/128, K/128) of op(a), (K/128, N or
        N/128) of op(b), rounded up. gate: "silu", "gelu", "sigmoid", ...: gate(z[..., :N/2]) * z[..., N/2:] of z = alpha * op(a) @ op(b)
        + bias. out_dtype: the result's type. An epilogue of two outputs, e.g. "relu(t := acc + bias), t", gives both.
        """
        attrs = (transpose_a, transpose_b, alpha, beta, epilogue, gate, out_dtype)
        return self._session.run(_GEMM, (a, b, bias, c, scale_a, scale_b), attrs, out, stream, scalars, operands)

    def grouped_gemm(self, a: Any, b: Any, group_sizes: Any, *, transpose_b: bool = False, cumulative: bool = False,
                     gate: str | None = None, out_dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
        """a[r] @ b[g] for each row r of group g: a (T, K), its rows sorted by group; b (G, K, N), or (G, N, K) with transpose_b. (T, N).

        group_sizes (G,), int32 or int64, stays on the device: rows of each group, 0 allowed; with cumulative=True the row where each group
        ends. Sizes below 0 count as 0, groups end with the rows of a, and rows of no group give zeros. Types and gates as of gemm. The
        gradient of a (without a gate) is grouped_gemm(dy, b, group_sizes, transpose_b=not transpose_b), that of b is grouped_gemm_wgrad.
        """
        return self._session.run(CALLS["grouped_gemm"], (a, b, group_sizes), (transpose_b, cumulative, gate, out_dtype), out, stream)

    def grouped_gemm_wgrad(self, a: Any, b: Any, group_sizes: Any, *, cumulative: bool = False, out_dtype: Any = None, out: Any = None,
                           stream: Any = None) -> Any:
        """a[rows of g].T @ b[rows of g] for each group g: a (T, M), b (T, N) -> (G, M, N); zeros for a group without rows. The gradient of
        grouped_gemm's b from (a, dy) as (G, K, N), from (dy, a) as (G, N, K)."""
        return self._session.run(CALLS["grouped_gemm_wgrad"], (a, b, group_sizes), (cumulative, out_dtype), out, stream)

    def quantized_linear(self, x: Any, w: Any, scale: Any, zero_point: Any = None, bias: Any = None, *, kind: str,
                         group_size: int | None = None, permutation: Any = None, epilogue: Any = None, out_dtype: Any = None,
                         operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None, out: Any = None,
                         stream: Any = None) -> Any:
        """x @ W.T + bias of quantised weights, W[n, k] = (w[n, k] - zero_point) * scale: x (..., K), f16, bf16 or f32 -> (..., N).

        kind: "s4", "u4", "nf4": w is u8 (N, K/2 rounded up), two numbers a byte, the first in the low half; "s8", "e4m3": w (N, K) of that
        type. scale (f32, f16, bf16): one element, (N,), or (N, groups) of group_size neighbours along K (default: K / groups, of nf4 64).
        zero_point: integers of scale's shape, u8 or s8 (s8 of kind "s8"; none of nf4 and e4m3), of 4-bit kinds from -64 to 64. permutation
        (s32, K): column j of W meets x[..., permutation[j]] (GPTQ's act-order). bias (N,); epilogue over "acc" as of `gemm`.
        An infinity in a single row of x may give NaN where a plain sum is infinite.
        Where x is to be of 8 bits too: q, s = quantize(x, kind, "token"), then gemm(q, w, transpose_b=True, scale_a=s, scale_b=scale).
        """
        attrs = (kind, group_size, epilogue, out_dtype)
        return self._session.run(CALLS["quantized_linear"], (x, w, scale, zero_point, bias, permutation), attrs, out, stream, scalars,
                                 operands)

    def repack_gptq(self, qweight: Any, qzeros: Any, scales: Any, permutation: Any = None, *, zero_offset: int | None = None,
                    out: Any = None, stream: Any = None) -> Any:
        """(w, scale, zero_point) for `quantized_linear` of kind "u4": GPTQ's 4-bit weights.

        qweight s32 (K/8, N), qzeros s32 (groups, N/8 rounded up), scales (groups, N). zero_offset: what is added to the zero points: 1
        (default; the format of AutoGPTQ) or 0 (its second version). permutation (s32, K), with act-order: g_idx's stable argsort, which
        `quantized_linear` then takes as well.
        """
        return self._session.run(CALLS["repack_gptq"], (qweight, qzeros, scales, permutation), (zero_offset,), out, stream)

    def repack_awq(self, qweight: Any, qzeros: Any, scales: Any, *, zero_offset: int | None = None, out: Any = None,
                   stream: Any = None) -> Any:
        """(w, scale, zero_point) for `quantized_linear` of kind "u4": AWQ's 4-bit weights, qweight s32 (K, N/8), qzeros s32 (groups, N/8),
        scales (groups, N). zero_offset: what is added to the zero points (default 0)."""
        return self._session.run(CALLS["repack_awq"], (qweight, qzeros, scales), (zero_offset,), out, stream)
