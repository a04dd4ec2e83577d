"""The handle's convolutions, of one to three spatial dimensions by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..codegen.pointwise import acc, arg
from ..ops.checks import check_number
from ..ops.epilogue import activation_gradient, activation_of, batch_norm_epilogue
from .calls import CALLS, CONV, shape_of
from .device import OnDevice


class ConvOps(OnDevice):
    """Methods of DnnHandle."""

    def conv(self, x: Any, w: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
             epilogue: Any = None, residual: Any = None, flip: bool = False, scale_x: Any = None, scale_w: Any = None, scale_y: Any = None,
             zero_x: Any = None, zero_w: Any = None, zero_y: Any = None, out_dtype: Any = None, saturate: bool = True,
             prologue: Any = None, return_stats: bool = False, return_amax: bool = False, operands: Mapping[str, Any] | None = None,
             scalars: Mapping[str, float] | None = None, out: Any = None, stream: Any = None) -> Any:
        """y[n,k,p] = epilogue(sum over c, r of x[n,c,p*stride - padding + r*dilation] * w[k,c,r]): cross-correlation.

        x (N, C, spatial), w (K, C/groups, spatial), bias (K,), residual of y's shape. padding: int, one per dimension, (low, high)
        pairs, "same" (PyTorch's; also "same_upper"), "same_lower" or "valid". epilogue: an expression over acc, bias, residual and
        `operands` ("relu", "bias_relu", "relu(acc * scale + bias)"); bias alone is added. scalars: values of its scalar(name)s. flip:
        true convolution (taps reversed). out_dtype: of y, by default x's type; of floats also e4m3, e5m2 and s8, which
        saturate ("acc * scale").

        An epilogue of two outputs, e.g. "relu(t := acc + bias), t", gives both. return_stats: then also the count (1,), mean and sum of
        squares about it (C,), f32 or of f64 f64, of each channel of y as it is stored, the same bits on every run: what `batch_norm_stats`
        gives of y and `batch_norm_gather` takes. return_amax (not of integers nor f64): then, last, the largest size of what y's elements
        were before scale_y and rounding, () f32, NaN if one was: what `delayed_scale` takes. prologue: an expression over x and
        `operands`, vectors (C,), that is summed in the place of x, rounded to its type or not: "relu(x * scale + shift)"; padding stays
        zero.

        Of 8-bit types x and w are e4m3 and e5m2 (y in bf16 by default, also in floats and in these types), or s8 and u8, in any mix: sums
        are exact (modulo 2^32) and y is s32 where nothing is done to them, else f32 by default. scale_x (one element), scale_w (one, or
        (K,)), f32, multiply x and w. zero_x, zero_w, of their types, are taken from integers; padding stands for x's zero point. An s32
        bias is added to the sum before scales and epilogue, which cannot name it. scale_y, zero_y (one element): y is a type of 8 bits,
        round(result / scale_y) + zero_y, saturated, or of integers modulo 256 with saturate=False (results below 2^24).

        Of infinities only the engines of plain sums make infinities. Winograd (f32, 3x3) makes NaN of outputs that see one; FFT (f32, 4
        taps along an axis and more) of its whole tile, of whose norm its errors are fractions; block_diagonal (16 bits) of all the
        groups that it merges; depthwise engines of 16 bits on tensor cores of up to 8 neighbouring channels, or (band) of places up to 7
        beside it. `explain` says who is chosen.
        """
        attrs = (stride, padding, dilation, groups, epilogue, flip)
        is_plain = scale_x is scale_w is scale_y is zero_x is zero_w is zero_y is out_dtype is prologue is None
        if is_plain and saturate and not return_stats and not return_amax:
            return self._session.run(CONV, (x, w, bias, residual), attrs, out, stream, scalars, operands)
        arrays = (x, w, bias, residual, scale_x, scale_w, scale_y, zero_x, zero_w, zero_y)
        more = (out_dtype, saturate, prologue, return_stats, return_amax)
        return self._session.run(CALLS["conv_fprop"], arrays, (*attrs, *more), out, stream, scalars, operands)

    def conv_batch_norm(self, x: Any, w: Any, running_mean: Any, running_var: Any, gamma: Any = None, beta: Any = None, *,
                        eps: float = 1e-5, activation: str | None = "relu", residual: Any = None, stride: Any = 1, padding: Any = 0,
                        dilation: Any = 1, groups: int = 1, out_dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
        """activation((conv(x, w) - running_mean) / sqrt(running_var + eps) * gamma + beta + residual), the inference of convolution, batch
        norm and activation, in one launch: statistics, gamma and beta (K,), residual of y's shape; activation: None, the name of a function
        ("relu", "relu6", "silu", "hard_swish") or an expression over x. The rest as of `conv`."""
        eps = check_number("conv_batch_norm", "eps", eps)
        operands = {n: a for n, a in (("running_mean", running_mean), ("running_var", running_var), ("gamma", gamma), ("beta", beta))
                    if a is not None}
        epilogue = batch_norm_epilogue("conv_batch_norm", eps, activation, (*operands, *(("residual",) if residual is not None else ())))
        return self.conv(x, w, residual=residual, stride=stride, padding=padding, dilation=dilation, groups=groups, epilogue=epilogue,
                         out_dtype=out_dtype, operands=operands, out=out, stream=stream)

    def depthwise_separable_conv(self, x: Any, depthwise: Any, pointwise: Any, depthwise_norm: Sequence[Any] | None = None,
                                 pointwise_norm: Sequence[Any] | None = None, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
                                 depthwise_activation: str | None = "relu", pointwise_activation: str | None = "relu", eps: float = 1e-5,
                                 residual: Any = None, out: Any = None, stream: Any = None) -> Any:
        """A depthwise convolution (filters (C * m, 1, spatial) with any multiplier m) and a pointwise one (K, C * m, 1...), each with what
        follows it in the same launch: batch norm by (running_mean, running_var, gamma, beta), if given, then its activation; the residual
        is added before the last one."""
        def one(x: Any, w: Any, norm: Sequence[Any] | None, activation: str | None, **more: Any) -> Any:
            if norm is not None:
                return self.conv_batch_norm(x, w, *norm, eps=eps, activation=activation, stream=stream, **more)
            name = "depthwise_separable_conv"
            value = acc if more.get("residual") is None else acc + arg("residual")
            return self.conv(x, w, epilogue=value if activation is None else activation_of(name, activation).substitute({"x": value}),
                             stream=stream, **more)

        between = one(x, depthwise, depthwise_norm, depthwise_activation, stride=stride, padding=padding, dilation=dilation,
                      groups=self._session.checked_view("depthwise_separable_conv", "x", x).desc.shape[1])
        return one(between, pointwise, pointwise_norm, pointwise_activation, residual=residual, out=out)

    def conv_dgrad(self, dy: Any, w: Any, x_shape: Sequence[int], *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
                   epilogue: Any = None, flip: bool = False, scale_dy: Any = None, scale_w: Any = None, scale_dx: Any = None,
                   out_dtype: Any = None, saturate: bool = True, operands: Mapping[str, Any] | None = None,
                   scalars: Mapping[str, float] | None = None, out: Any = None, stream: Any = None) -> Any:
        """dx of shape x_shape: the gradient of `conv` with respect to x; epilogue: over acc, `operands` and `scalars`. Of 8-bit types as
        `conv`, scale_w being one element or (C,)."""
        attrs = (shape_of(x_shape), stride, padding, dilation, groups, epilogue, flip, out_dtype, saturate)
        return self._session.run(CALLS["conv_dgrad"], (dy, w, scale_dy, scale_w, scale_dx), attrs, out, stream, scalars, operands)

    def conv_dgrad_activation(self, dy: Any, w: Any, saved: Any, activation: str, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
                              groups: int = 1, flip: bool = False, out_dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
        """The gradient of conv(activation(saved), w) with respect to saved, in one launch: dgrad times the activation's derivative.
        activation: "relu", "silu", "gelu", ..., or an expression over x. Of relu, saved may be the activation's result."""
        name = "conv_dgrad_activation"
        shape = self._session.checked_view(name, "saved", saved).desc.shape
        return self.conv_dgrad(dy, w, shape, stride=stride, padding=padding, dilation=dilation, groups=groups, flip=flip,
                               epilogue=activation_gradient(name, activation), out_dtype=out_dtype, operands={"saved": saved}, out=out,
                               stream=stream)

    def conv_wgrad(self, x: Any, dy: Any, w_shape: Sequence[int], *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
                   flip: bool = False, scale_x: Any = None, scale_dy: Any = None, out_dtype: Any = None, prologue: Any = None,
                   return_bias_grad: bool = False, operands: Mapping[str, Any] | None = None, out: Any = None, stream: Any = None) -> Any:
        """dw of shape w_shape: the gradient of `conv` with respect to w; with return_bias_grad also db (K,), of dw's type, as
        `conv_bgrad`. prologue: the forward's. Of 8-bit types as `conv`, scales being single elements."""
        attrs = (shape_of(w_shape), stride, padding, dilation, groups, flip, out_dtype, prologue, return_bias_grad)
        return self._session.run(CALLS["conv_wgrad"], (x, dy, scale_x, scale_dy), attrs, out, stream, None, operands)

    def conv_bgrad(self, dy: Any, *, out: Any = None, stream: Any = None) -> Any:
        """db (K,): dy summed over everything but channels."""
        return self._session.run(CALLS["conv_bgrad"], (dy,), (), out, stream)

    def conv_transpose(self, x: Any, w: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
                       dilation: Any = 1, groups: int = 1, epilogue: Any = None, flip: bool = False, scale_x: Any = None,
                       scale_w: Any = None, scale_y: Any = None, zero_y: Any = None, out_dtype: Any = None, saturate: bool = True,
                       return_stats: bool = False, return_amax: bool = False, operands: Mapping[str, Any] | None = None,
                       scalars: Mapping[str, float] | None = None, out: Any = None, stream: Any = None) -> Any:
        """Transposed convolution: x (N, C, spatial), w (C, K/groups, spatial), y of extent (L-1)*stride - 2*padding + dilation*(r-1) + 1 +
        output_padding; PyTorch's conventions. The rest as of `conv`."""
        attrs = (stride, padding, dilation, groups, output_padding, epilogue, flip, out_dtype, saturate, return_stats, return_amax)
        arrays = (x, w, bias, scale_x, scale_w, scale_y, zero_y)
        return self._session.run(CALLS["conv_transpose"], arrays, attrs, out, stream, scalars, operands)

    def conv_transpose_dgrad(self, dy: Any, w: Any, x_shape: Sequence[int], *, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
                             dilation: Any = 1, groups: int = 1, epilogue: Any = None, flip: bool = False, scale_dy: Any = None,
                             scale_w: Any = None, scale_dx: Any = None, out_dtype: Any = None, saturate: bool = True,
                             operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None, out: Any = None,
                             stream: Any = None) -> Any:
        """dx of shape x_shape: the gradient of `conv_transpose` with respect to x. Of 8-bit types as `conv`."""
        attrs = (shape_of(x_shape), stride, padding, dilation, groups, output_padding, epilogue, flip, out_dtype, saturate)
        return self._session.run(CALLS["conv_transpose_dgrad"], (dy, w, scale_dy, scale_w, scale_dx), attrs, out, stream, scalars, operands)

    def conv_transpose_wgrad(self, x: Any, dy: Any, w_shape: Sequence[int], *, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
                             dilation: Any = 1, groups: int = 1, flip: bool = False, scale_x: Any = None, scale_dy: Any = None,
                             out_dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
        """dw of shape w_shape: the gradient of `conv_transpose` with respect to w. 8-bit types as of `conv_wgrad`."""
        attrs = (shape_of(w_shape), stride, padding, dilation, groups, output_padding, flip, out_dtype)
        return self._session.run(CALLS["conv_transpose_wgrad"], (x, dy, scale_x, scale_dy), attrs, out, stream)

    def deform_conv(self, x: Any, offset: Any, w: Any, bias: Any = None, *, mask: Any = None, stride: Any = 1, padding: Any = 0,
                    dilation: Any = 1, groups: int = 1, out: Any = None, stream: Any = None) -> Any:
        """Deformable convolution of x (N, C, H, W): tap r of position p reads x at p*stride - padding + r*dilation + its own offset, linear
        between pixels, 0 outside, and times its mask where there is one (DCNv2). torchvision's and ONNX's conventions.

        offset (N, 2*D*R*S, P, Q): along H, along W, of each tap in turn; mask (N, D*R*S, P, Q); D groups of channels have offsets of their
        own. w (K, C/groups, R, S), bias (K,). offset and mask: of x's type, or f32. Workspace: C*R*S*P*Q elements an image.
        """
        return self._session.run(CALLS["deform_conv"], (x, offset, w, mask, bias), (stride, padding, dilation, groups), out, stream)

    def deform_conv_backward(self, dy: Any, x: Any, offset: Any, w: Any, *, mask: Any = None, stride: Any = 1, padding: Any = 0,
                             dilation: Any = 1, groups: int = 1, bias_gradient: bool = False, out: Any = None, stream: Any = None) -> Any:
        """(dx, doffset, dw), then dmask with a mask, then dbias under bias_gradient: the gradients of `deform_conv`, the same bits on every
        run. Where an offset is a whole number its gradient is that of a slightly larger one."""
        attrs = (stride, padding, dilation, groups, bias_gradient)
        return self._session.run(CALLS["deform_conv_backward"], (dy, x, offset, w, mask), attrs, out, stream)

    def causal_conv1d(self, x: Any, w: Any, bias: Any = None, *, state: Any = None, activation: str | None = None,
                      return_state: bool = False, out: Any = None, stream: Any = None) -> Any:
        """y[b, d, l] = activation(bias[d] + sum over k of w[d, k] * x[b, d, l - (W - 1) + k]): every channel by taps of its own past.

        x (B, D, L), either dimension innermost; w (D, W), W from 2 to 16; bias (D,); state (B, D, W-1): the elements before the first, the
        oldest first (default zeros). activation: None or "silu". return_state: (y, final_state), the state that the next part begins with.
        w, bias and states: of x's type, or f32.
        """
        return self._session.run(CALLS["causal_conv1d"], (x, w, bias, state), (activation, return_state), out, stream)

    def causal_conv1d_update(self, x: Any, state: Any, w: Any, bias: Any = None, *, activation: str | None = None, out: Any = None,
                             stream: Any = None) -> Any:
        """(y, new_state): `causal_conv1d` of the next element x (B, D), or the next few (B, D, L), L up to 16. out=(y, state) updates the
        state in place."""
        return self._session.run(CALLS["causal_conv1d_update"], (x, state, w, bias), (activation,), out, stream)

    def causal_conv1d_backward(self, dy: Any, x: Any, w: Any, bias: Any = None, *, state: Any = None, d_final_state: Any = None,
                               activation: str | None = None, out: Any = None, stream: Any = None) -> Any:
        """(dx, dw), then dbias with a bias, then dstate with a state: the gradients of `causal_conv1d`, the same bits on every run."""
        return self._session.run(CALLS["causal_conv1d_backward"], (dy, x, w, bias, state, d_final_state), (activation,), out, stream)

    def conv_reorder(self, w: Any, *, use: str = "fprop", out: Any = None, stream: Any = None) -> Any:
        """Filters in the order that tensor-core loops want, for weights used many times: of w's shape and type, the order in its strides.

        use: "fprop" (K, taps, channels innermost: for `conv` and conv_transpose_dgrad) or "dgrad" (C, taps, filters innermost: for
        conv_dgrad and `conv_transpose`). A gap up to a multiple of 16 bytes follows the innermost dimension. Every convolution takes the
        result as it takes w; 8-bit ones run on tensor cores with it.
        """
        return self._session.run(CALLS["conv_reorder"], (w,), (use,), out, stream)
