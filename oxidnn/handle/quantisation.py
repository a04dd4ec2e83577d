"""The handle's quantisation: codes of 8 and 4 bits, their scales, GGUF blocks."""

from __future__ import annotations

from typing import Any

from ..dispatch.session import hashable
from ..errors import expected
from .calls import CALLS, draw_of
from .device import OnDevice


class QuantisationOps(OnDevice):
    """Methods of DnnHandle."""

    def pack4(self, x: Any, kind: str = "s4", *, saturate: bool = True, out: Any = None, stream: Any = None) -> Any:
        """x, of a float type, s8, u8, s32, u32 or s64, as numbers of four bits, two to a byte along the last dimension, the first in the
        low half (uint8; an odd row ends with a half byte of 0). kind: "s4", "u4", which round as `cast` does, and "e2m1" (FP4, to nearest
        even, NaN as 6). saturate: else numbers beyond keep their lowest four bits (not of e2m1)."""
        return self._session.run(CALLS["pack4"], (x,), (kind, saturate), out, stream)

    def unpack4(self, x: Any, kind: str = "s4", *, size: int | None = None, dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
        """The numbers that `pack4` left in uint8, as `dtype` (default f32). size: how many a row has (default: two a byte)."""
        return self._session.run(CALLS["unpack4"], (x,), (kind, size, dtype), out, stream)

    def gguf_dequantize(self, blocks: Any, format: str, *, dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
        """The numbers of GGUF blocks, uint8 (..., bytes of a row, contiguous), as `dtype` (float32, float16 or bfloat16; default float32),
        (..., elements).

        format: "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K" to "Q6_K", "Q8_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS",
        "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4". float32 results have the bits of ggml's dequantisers.
        """
        return self._session.run(CALLS["gguf_dequantize"], (blocks,), (format, dtype), out, stream)

    def gguf_matvec(self, blocks: Any, x: Any, format: str, *, ids: Any = None, weights: Any = None, out_dtype: Any = None, out: Any = None,
                    stream: Any = None) -> Any:
        """y (rows, N) = x W^T of W (N, K), GGUF blocks as uint8 (N, bytes of a row), and x (rows, K) or (K,) of float32, float16 or
        bfloat16, added in float32; of type out_dtype (default: x's). Codes are multiplied exactly with up to 8 rows; with more W may be
        rounded to x's type first.

        ids (rows,) or (rows, J), int32 or int64: experts of blocks (E, N, bytes of a row). y[r] is the sum over j, in order, of
        weights[r, j] (1 if none are given) * x[r] W[ids[r, j]]^T; x may be (rows, J, K), one for each. J up to 16, any number
        of rows. An id that is no expert adds nothing; E at least 1. Finite products come out finite while the sizes of the numbers of a
        row of W add up to less than 2^126 (Q8_K: 2^112), and MXFP4's scales are below e = 255, which counts as infinite.
        """
        return self._session.run(CALLS["gguf_matvec"], (blocks, x, ids, weights), (format, out_dtype), out, stream)

    def quantize(self, x: Any, kind: str, scale: Any = None, *, axis: int | None = None, zero_point: Any = None, global_scale: Any = None,
                 scaling: Any = None, layout: str = "plain", saturate: bool = True, rounding: str = "even", seed: int | None = None,
                 offset: int = 0, state: Any = None, out: Any = None, stream: Any = None) -> Any:
        """The codes of x / scale + zero_point, to nearest even: with scales given, or none, the codes alone; with scales found on the way
        (codes, scale[, zero_point][, global scale]).

        x: f32, f16 or bf16. kind: "e4m3", "e5m2", "s8", "u8"; of four bits, two to a byte as of `pack4`, "s4", "u4", "nf4", "e2m1".
        scale: an array (see scaling), or how to find scales: "tensor", "channel" (axis, 0), "token" (one for what lies along axis, -1),
        ("group", 128) (along axis, -1), ("block", (128, 128)) of the last two dimensions, "mxfp8", "mxfp4" (32 along axis, powers of two as
        uint8 exponents), "nvfp4" (16, e4m3). Their shapes are x's with as many extents as there are scales; "token" leaves its
        dimension out, "channel" all others. scaling: the same words for an array, where its shape does not tell (groups that do
        not divide x, mx and nvfp4). zero_point: an array beside a scale; "compute" (integers): asymmetric. global_scale (nvfp4): an f32
        number by which scales are multiplied, or "compute". layout: of scales of mx and nvfp4, "plain" or "128x4" (Blackwell's order).
        saturate: what is beyond the largest number becomes it, else NaN (e4m3), an infinity (e5m2), the lowest bits (integers).
        rounding: "stochastic" draws by seed and offset, or state (see `dropout`). NaN, zero blocks, formulas: ops/quantize.py.
        """
        if isinstance(scale, (str, tuple, list)):
            if saturate is not True:
                raise expected("quantize", "saturate", saturate, "True where scales are found on the way")
            if scaling is not None:
                raise expected("quantize", "scaling", repr(scaling), f"None beside scale={scale!r}")
            finds_zero = _computes("quantize", "zero_point", zero_point)
            finds_global = _computes("quantize", "global_scale", global_scale)
            if zero_point is not None and not finds_zero:
                got = "an array" if hasattr(zero_point, "shape") else repr(zero_point)
                raise expected("quantize", "zero_point", got, "'compute', or None, where scales are found on the way")
            return self.dynamic_quantize(x, kind, scale, None if finds_global else global_scale, axis=axis, layout=layout,
                                         asymmetric=finds_zero, find_global=finds_global, rounding=rounding, seed=seed, offset=offset,
                                         state=state, out=out, stream=stream)
        draw = _stochastic("quantize", rounding, seed, offset, state)
        attrs = (kind, hashable(scaling, "quantize", "scaling"), axis, layout, saturate, rounding)
        return self._session.run(CALLS["quantize"], (x, scale, zero_point, global_scale, state), attrs, out, stream, draw)

    def dynamic_quantize(self, x: Any, kind: str, scaling: Any, global_scale: Any = None, *, axis: int | None = None, layout: str = "plain",
                         asymmetric: bool = False, find_global: bool = False, rounding: str = "even", seed: int | None = None,
                         offset: int = 0, state: Any = None, out: Any = None, stream: Any = None) -> Any:
        """(codes, scale[, zero_point][, global scale]): `quantize` with scales found on the way. asymmetric: zero points too, of integers;
        find_global: the global scale too, of nvfp4."""
        draw = _stochastic("dynamic_quantize", rounding, seed, offset, state)
        attrs = (kind, hashable(scaling, "dynamic_quantize", "scaling"), axis, layout, asymmetric, find_global, rounding)
        return self._session.run(CALLS["dynamic_quantize"], (x, global_scale, state), attrs, out, stream, draw)

    def dequantize(self, x: Any, scale: Any = None, zero_point: Any = None, *, kind: str | None = None, scaling: Any = None,
                   axis: int | None = None, global_scale: Any = None, layout: str = "plain", size: int | None = None, dtype: Any = None,
                   out: Any = None, stream: Any = None) -> Any:
        """(x - zero_point) * scale in f32, as `dtype` (f32, f16, bf16). kind: of the codes x, by default x's type, of fp4 scalings "e2m1".
        size: of the last dimension, where codes of four bits end in half a byte. scaling and axis: as given to `quantize`; without
        scaling, (rows,) scales are of rows (a token along the last axis, a channel of axis 0) and axis names the one that they belong to:
        scales of tokens along another axis need scaling="token". The rest as of `quantize`."""
        attrs = (kind, hashable(scaling, "dequantize", "scaling"), axis, layout, size, dtype)
        return self._session.run(CALLS["dequantize"], (x, scale, zero_point, global_scale), attrs, out, stream)

    def fake_quantize(self, x: Any, kind: str, scale: Any, zero_point: Any = None, *, scaling: Any = None, axis: int | None = None,
                      global_scale: Any = None, layout: str = "plain", out: Any = None, stream: Any = None) -> Any:
        """What `dequantize` makes of what `quantize` makes of x, of x's type."""
        attrs = (kind, hashable(scaling, "fake_quantize", "scaling"), axis, layout)
        return self._session.run(CALLS["fake_quantize"], (x, scale, zero_point, global_scale), attrs, out, stream)

    def fake_quantize_backward(self, dy: Any, x: Any, kind: str, scale: Any, zero_point: Any = None, *, scaling: Any = None,
                               axis: int | None = None, global_scale: Any = None, layout: str = "plain", out: Any = None,
                               stream: Any = None) -> Any:
        """dx, straight through: dy where x was within the range of the codes, 0 where it was clipped."""
        attrs = (kind, hashable(scaling, "fake_quantize_backward", "scaling"), axis, layout)
        return self._session.run(CALLS["fake_quantize_backward"], (dy, x, scale, zero_point, global_scale), attrs, out, stream)

    def delayed_scale(self, history: Any, amax: Any, scale: Any, *, kind: str = "e4m3", margin: int = 0, reduction: str = "max",
                      out: Any = None, stream: Any = None) -> Any:
        """(history, scale) after a step: amax ([] or (tensors,)), the largest size of this step's numbers (`reduce`, "amax"), goes before
        history ((steps,) or (steps, tensors), at most 1024), whose last leaves; scale = amax * 2^margin / the largest number of `kind`
        ("e4m3", "e5m2", "s8"), amax the largest of the history ("max") or this step's ("latest"); as it was where that is 0 or not finite.
        All f32; out may be (history, scale)."""
        return self._session.run(CALLS["delayed_scale"], (history, amax, scale), (kind, margin, reduction), out, stream)

    def double_quantize(self, x: Any, *, group: int = 256, out: Any = None, stream: Any = None) -> Any:
        """(codes, scale, offset) of the scales x of a quantisation (f32, dense): e4m3 codes of (x - offset) / scale, offset the mean of x,
        a scale (f32) for `group` numbers in the order of x. QLoRA's second quantisation of the scales of NF4."""
        return self._session.run(CALLS["double_quantize"], (x,), (group,), out, stream)

    def double_dequantize(self, x: Any, scale: Any, offset: Any, *, group: int = 256, out: Any = None, stream: Any = None) -> Any:
        """codes * scale + offset, f32: what `double_quantize` was given, rounded."""
        return self._session.run(CALLS["double_dequantize"], (x, scale, offset), (group,), out, stream)


def _stochastic(op: str, rounding: Any, seed: int | None, offset: int, state: Any) -> dict[str, int] | None:
    """The numbers of a draw, None where rounding draws none."""
    if rounding == "stochastic":
        return draw_of(op, seed, offset, state)
    if seed is not None or offset != 0:
        raise expected(op, "seed and offset", (seed, offset), "none unless rounding is 'stochastic'")
    return None


def _computes(op: str, name: str, value: Any) -> bool:
    """Whether `value`, an array or None else, is the word "compute"."""
    if isinstance(value, str) and value != "compute":
        raise expected(op, name, repr(value), "an array, None or 'compute'")
    return isinstance(value, str)
