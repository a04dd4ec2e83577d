"""The handle's norms of rows, channels, groups and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import expected
from ..ops.checks import check_integer
from .calls import CALLS
from .device import OnDevice


class NormOps(OnDevice):
    """Methods of DnnHandle."""

    def layer_norm(self, x: Any, gamma: Any = None, beta: Any = None, *, eps: float = 1e-5, axes: Any = -1, residual: Any = None,
                   epilogue: Any = None, return_stats: bool = False, return_sum: bool = False, out_dtype: Any = None, scale_y: Any = None,
                   return_scale: bool = False, zero_centered: bool = False, operands: Mapping[str, Any] | None = None,
                   scalars: Mapping[str, float] | None = None, out: Any = None, stream: Any = None) -> Any:
        """epilogue((h - mean) / sqrt(variance + eps) * gamma + beta) of h = x + residual, mean and biased variance over `axes`.

        gamma, beta of the axes' shape, or such as (N, 1, C), their own in each sample; residual of x's. Returns y; then, with return_stats,
        mean and rstd (x's shape without the axes, f32, or f64 for f64 tensors) and, with return_sum, h. out may be x, or of y and h
        (x, residual). epilogue: over acc, `operands` and `scalars`. zero_centered: times gamma + 1.

        out_dtype: y's type, also "e4m3", "e5m2" and "s8", which saturate; y is rounded from f32 (f64) in the same launch. scale_y (one
        element): y holds result / scale_y. return_scale (of those three types): last also a scale for each row, of mean's shape and
        type, max|result| / (448, 57344 or 127), 1 where all are 0; y holds result / that. A row with a result that is not finite has NaN.
        """
        attrs = (eps, axes, epilogue, return_stats, return_sum, out_dtype, return_scale, zero_centered)
        return self._session.run(CALLS["layer_norm"], (x, gamma, beta, residual, scale_y), attrs, out, stream, scalars, operands)

    def layer_norm_backward(self, dy: Any, x: Any, mean: Any, rstd: Any, gamma: Any = None, beta: Any = None, *, axes: Any = -1,
                            epilogue: Any = None, zero_centered: bool = False, out: Any = None, stream: Any = None) -> Any:
        """dx; with gamma (dx, dgamma, dbeta), the same bits on every run. x: what was normalised (the forward's h), with its statistics.

        epilogue: the forward's, if it was an activation of acc alone ("relu", "silu(acc)"); beta: the forward's, for its sake.
        """
        arrays, attrs = (dy, x, mean, rstd, gamma, beta), (axes, epilogue, zero_centered)
        return self._session.run(CALLS["layer_norm_backward"], arrays, attrs, out, stream)

    def rms_norm(self, x: Any, gamma: Any = None, beta: Any = None, *, eps: float = 1e-5, axes: Any = -1, residual: Any = None,
                 epilogue: Any = None, return_stats: bool = False, return_sum: bool = False, out_dtype: Any = None, scale_y: Any = None,
                 return_scale: bool = False, zero_centered: bool = False, operands: Mapping[str, Any] | None = None,
                 scalars: Mapping[str, float] | None = None, out: Any = None, stream: Any = None) -> Any:
        """epilogue(h / sqrt(mean of h^2 + eps) * gamma + beta) of h = x + residual: `layer_norm` about 0; return_stats adds rstd alone."""
        attrs = (eps, axes, epilogue, return_stats, return_sum, out_dtype, return_scale, zero_centered)
        return self._session.run(CALLS["rms_norm"], (x, gamma, beta, residual, scale_y), attrs, out, stream, scalars, operands)

    def rms_norm_backward(self, dy: Any, x: Any, rstd: Any, gamma: Any = None, beta: Any = None, *, axes: Any = -1, epilogue: Any = None,
                          zero_centered: bool = False, out: Any = None, stream: Any = None) -> Any:
        """dx; with gamma (dx, dgamma), with beta beside it dbeta, too. The rest as of `layer_norm_backward`."""
        return self._session.run(CALLS["rms_norm_backward"], (dy, x, rstd, gamma, beta), (axes, epilogue, zero_centered), out, stream)

    def batch_norm(self, x: Any, gamma: Any = None, beta: Any = None, running_mean: Any = None, running_var: Any = None, *, training: bool,
                   momentum: float = 0.1, eps: float = 1e-5, residual: Any = None, epilogue: Any = None, return_stats: bool = False,
                   return_mask: bool = False, out_dtype: Any = None, scale_y: Any = None, operands: Mapping[str, Any] | None = None,
                   scalars: Mapping[str, float] | None = None, out: Any = None, stream: Any = None) -> Any:
        """epilogue((x - mean) / sqrt(variance + eps) * gamma + beta) of x (N, C, spatial), with statistics of each channel, all else (C,).

        training: mean and biased variance are x's, and the running statistics, if given, are updated in place: running = (1 - momentum)
        running + momentum * (mean, or unbiased variance). Else they are the running ones. residual, of x's shape, is added before
        what epilogue does ("relu(acc + residual)"). Returns y; then, with return_stats, mean and rstd (f32, or f64 for f64 tensors);
        then, with return_mask, the bits for the gradient of a relu. out_dtype, scale_y: as of `layer_norm`. out: those, without the
        running statistics. Where arrays cannot be written (jax), the new running statistics follow as further results.
        """
        call, attrs = CALLS["batch_norm"], (training, momentum, eps, epilogue, return_stats, return_mask, out_dtype)
        arrays = (x, gamma, beta, running_mean, running_var, residual, scale_y)
        if not training or running_mean is None or running_var is None:
            return self._session.run(call, arrays, attrs, out, stream, scalars, operands)
        if out is None:
            extra = operands if isinstance(operands, Mapping) else {}
            names, given = (*call.tensors, *extra), (*arrays, *extra.values())
            prepared = self._session.prepared(call, names, self._session.raw(call, names, given)[1], given, attrs, (), None, stream)
            if prepared.frame.finish is not None:
                return self._session.run(call, arrays, attrs, None, stream, scalars, operands)
            out = tuple(make() for make in prepared.make_outputs[:-2])
        results = self._session.run(call, arrays, attrs, (*(out if isinstance(out, tuple) else (out,)), running_mean, running_var), stream,
                                    scalars, operands)
        return results[0] if len(results) == 3 else results[:-2]

    def batch_norm_backward(self, dy: Any, x: Any, mean: Any, rstd: Any, gamma: Any = None, mask: Any = None, y: Any = None, *,
                            training: bool = True, return_residual: bool = False, out: Any = None, stream: Any = None) -> Any:
        """dx; with gamma (dx, dgamma, dbeta); then, with return_residual, the gradient of `residual`. The same bits on every run.

        mean, rstd: the forward's. mask or y, where a relu ended the forward's epilogue: the forward's bits, or its result.
        training=False: the statistics were the running ones, rstd = 1 / sqrt(running_var + eps).
        """
        attrs = (training, return_residual)
        return self._session.run(CALLS["batch_norm_backward"], (dy, x, mean, rstd, gamma, mask, y), attrs, out, stream)

    def batch_norm_stats(self, x: Any, *, out: Any = None, stream: Any = None) -> Any:
        """(count (1,), mean (C,), m2 (C,)) of one device's share of a batch; m2 = sum of (x - mean)^2. In f32, or f64 for f64 tensors."""
        return self._session.run(CALLS["batch_norm_stats"], (x,), (), out, stream)

    def batch_norm_gather(self, counts: Any, means: Any, m2s: Any, running_mean: Any = None, running_var: Any = None, *,
                          momentum: float = 0.1, eps: float = 1e-5, out: Any = None, stream: Any = None) -> Any:
        """(mean, rstd) of all shares, (C,), from their counts (shares,), means and m2s (shares, C); a share may be empty. With running
        statistics also the new ones, which may go into the old ones by `out`."""
        arrays = (counts, means, m2s, running_mean, running_var)
        return self._session.run(CALLS["batch_norm_gather"], arrays, (momentum, eps), out, stream)

    def batch_norm_apply(self, x: Any, mean: Any, rstd: Any, gamma: Any = None, beta: Any = None, *, residual: Any = None,
                         epilogue: Any = None, return_mask: bool = False, out_dtype: Any = None, scale_y: Any = None,
                         operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None, out: Any = None,
                         stream: Any = None) -> Any:
        """epilogue((x - mean) * rstd * gamma + beta): `batch_norm` with given statistics."""
        arrays = (x, mean, rstd, gamma, beta, residual, scale_y)
        return self._session.run(CALLS["batch_norm_apply"], arrays, (epilogue, return_mask, out_dtype), out, stream, scalars, operands)

    def batch_norm_backward_reduce(self, dy: Any, x: Any, mean: Any, rstd: Any, mask: Any = None, y: Any = None, *, out: Any = None,
                                   stream: Any = None) -> Any:
        """(sum of dy, sum of dy (x - mean) rstd), (C,), of one device's share: to be summed over the devices (dbeta, dgamma)."""
        return self._session.run(CALLS["batch_norm_backward_reduce"], (dy, x, mean, rstd, mask, y), (), out, stream)

    def batch_norm_backward_apply(self, dy: Any, x: Any, mean: Any, rstd: Any, sum_dy: Any, sum_dy_xhat: Any, count: Any,
                                  gamma: Any = None, mask: Any = None, y: Any = None, *, return_residual: bool = False, out: Any = None,
                                  stream: Any = None) -> Any:
        """dx of one device's share, from the sums over all devices and the count (1,) of values of a channel on all of them."""
        arrays = (dy, x, mean, rstd, gamma, mask, y, sum_dy, sum_dy_xhat, count)
        return self._session.run(CALLS["batch_norm_backward_apply"], arrays, (return_residual,), out, stream)

    def group_norm(self, x: Any, groups: int, gamma: Any = None, beta: Any = None, *, eps: float = 1e-5, residual: Any = None,
                   epilogue: Any = None, return_stats: bool = False, return_mask: bool = False, out_dtype: Any = None,
                   scale_y: Any = None, operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None,
                   out: Any = None, stream: Any = None) -> Any:
        """`batch_norm` with statistics of each sample's groups of C / groups channels: mean and rstd are (N, groups)."""
        attrs = (groups, eps, epilogue, return_stats, return_mask, out_dtype)
        return self._session.run(CALLS["group_norm"], (x, gamma, beta, residual, scale_y), attrs, out, stream, scalars, operands)

    def group_norm_backward(self, dy: Any, x: Any, mean: Any, rstd: Any, groups: int, gamma: Any = None, mask: Any = None, y: Any = None, *,
                            return_residual: bool = False, out: Any = None, stream: Any = None) -> Any:
        """As `batch_norm_backward`."""
        attrs = (groups, return_residual)
        return self._session.run(CALLS["group_norm_backward"], (dy, x, mean, rstd, gamma, mask, y), attrs, out, stream)

    def instance_norm(self, x: Any, gamma: Any = None, beta: Any = None, *, eps: float = 1e-5, residual: Any = None, epilogue: Any = None,
                      return_stats: bool = False, return_mask: bool = False, out_dtype: Any = None, scale_y: Any = None,
                      operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None, out: Any = None,
                      stream: Any = None) -> Any:
        """`group_norm` with a group a channel: mean and rstd are (N, C)."""
        attrs = (eps, epilogue, return_stats, return_mask, out_dtype)
        return self._session.run(CALLS["instance_norm"], (x, gamma, beta, residual, scale_y), attrs, out, stream, scalars, operands)

    def instance_norm_backward(self, dy: Any, x: Any, mean: Any, rstd: Any, gamma: Any = None, mask: Any = None, y: Any = None, *,
                               return_residual: bool = False, out: Any = None, stream: Any = None) -> Any:
        """As `batch_norm_backward`."""
        return self._session.run(CALLS["instance_norm_backward"], (dy, x, mean, rstd, gamma, mask, y), (return_residual,), out, stream)

    def normalize(self, x: Any, *, p: float = 2.0, axes: Any = -1, g: Any = None, eps: float = 1e-12, return_norm: bool = False,
                  out: Any = None, stream: Any = None) -> Any:
        """g * x / max(|x|_p, eps) with |x|_p = (sum of |x|^p)^(1/p) over `axes`, p > 0; with return_norm also |x|_p (f32, of f64 f64).

        g: a value for each slice (x's shape without the axes, or with extents of 1 there), one for all, or None.
        """
        return self._session.run(CALLS["normalize"], (x, g), (p, axes, eps, return_norm), out, stream)

    def normalize_backward(self, dy: Any, x: Any, g: Any = None, *, p: float = 2.0, axes: Any = -1, eps: float = 1e-12, out: Any = None,
                           stream: Any = None) -> Any:
        """dx; with g (dx, dg), dg of g's shape and type, the same bits on every run."""
        return self._session.run(CALLS["normalize_backward"], (dy, x, g), (p, axes, eps), out, stream)

    def scale_norm(self, x: Any, g: Any, *, eps: float = 1e-5, out: Any = None, stream: Any = None) -> Any:
        """ScaleNorm: `normalize` along the last dimension with one g for all (Nguyen and Salazar, 2019)."""
        return self._session.run(CALLS["normalize"], (x, g), (2.0, -1, eps, False), out, stream)

    def scale_norm_backward(self, dy: Any, x: Any, g: Any, *, eps: float = 1e-5, out: Any = None, stream: Any = None) -> Any:
        """(dx, dg)."""
        return self._session.run(CALLS["normalize_backward"], (dy, x, g), (2.0, -1, eps), out, stream)

    def weight_norm(self, v: Any, g: Any, dim: int | None = 0, *, return_norm: bool = False, out: Any = None, stream: Any = None) -> Any:
        """w = g v / |v|, norms over all dimensions but `dim` (None: over all), and with return_norm those (Salimans and Kingma, 2016).

        g: (extent of dim,), or of v's rank with extents of 1 elsewhere, or one number for dim None. A slice of zeros gives NaN.
        """
        return self._session.run(CALLS["normalize"], (v, g), (2.0, _all_but("weight_norm", v, dim), 0.0, return_norm), out, stream)

    def weight_norm_backward(self, dw: Any, v: Any, g: Any, dim: int | None = 0, *, out: Any = None, stream: Any = None) -> Any:
        """(dv, dg)."""
        attrs = (2.0, _all_but("weight_norm_backward", v, dim), 0.0)
        return self._session.run(CALLS["normalize_backward"], (dw, v, g), attrs, out, stream)

    def spectral_norm(self, w: Any, u: Any, v: Any, dim: int = 0, *, iterations: int = 1, eps: float = 1e-12, out: Any = None,
                      stream: Any = None) -> Any:
        """(w / sigma, sigma, new u, new v), sigma the largest singular value of w as a matrix of rows `dim`, by power iterations from u
        and v (f32, of f64 f64; (extent of dim,) and (the others' product,)). iterations=0: (w / sigma, sigma), as they are.

        The new vectors may go into the old ones by `out`. Of a step v comes first, as in Miyato et al., ICLR 2018.
        """
        return self._session.run(CALLS["spectral_norm"], (w, u, v), (dim, iterations, eps), out, stream)

    def spectral_norm_backward(self, dy: Any, w: Any, u: Any, v: Any, sigma: Any, dim: int = 0, *, out: Any = None,
                               stream: Any = None) -> Any:
        """dw, with the forward's sigma and its new u and v as constants."""
        return self._session.run(CALLS["spectral_norm_backward"], (dy, w, u, v, sigma), (dim,), out, stream)

    def power_norm(self, x: Any, gamma: Any = None, beta: Any = None, *, p: float = 2.0, eps: float = 1e-5, axes: Any = -1,
                   return_stats: bool = False, out: Any = None, stream: Any = None) -> Any:
        """x * r * gamma + beta with r = (mean of |x|^p + eps)^(-1/p) over `axes`, p > 0; with return_stats also r. p = 2 is `rms_norm`."""
        return self._session.run(CALLS["power_norm"], (x, gamma, beta), (p, eps, axes, return_stats), out, stream)

    def power_norm_backward(self, dy: Any, x: Any, rstd: Any, gamma: Any = None, *, p: float = 2.0, axes: Any = -1, out: Any = None,
                            stream: Any = None) -> Any:
        """dx; with gamma (dx, dgamma), the same bits on every run. rstd: the forward's r. (dbeta is the sum of dy over the rows.)"""
        return self._session.run(CALLS["power_norm_backward"], (dy, x, rstd, gamma), (p, axes), out, stream)

    def lrn(self, x: Any, size: int = 5, *, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0, within: bool = False, out: Any = None,
            stream: Any = None) -> Any:
        """Local response normalisation across channels: x[c] / (k + alpha / size * sum of x^2 over `size` channels around c)^beta.

        The window reaches from (size - 1) // 2 channels before to size // 2 behind, as ONNX's and cuDNN's. size: at most 33 (f64: 17).
        within: the window lies within the channel, along each spatial dimension, and alpha is divided by size^dimensions.
        """
        return self._session.run(CALLS["lrn"], (x,), (size, alpha, beta, k, within), out, stream)

    def lrn_backward(self, dy: Any, x: Any, size: int = 5, *, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0,
                     within: bool = False, out: Any = None, stream: Any = None) -> Any:
        """dx of `lrn`."""
        return self._session.run(CALLS["lrn_backward"], (dy, x), (size, alpha, beta, k, within), out, stream)

    def divisive_norm(self, x: Any, means: Any = None, size: int = 5, *, alpha: float = 1.0, beta: float = 0.5, k: float = 1.0,
                      out: Any = None, stream: Any = None) -> Any:
        """x / (k + alpha / size^dimensions * sum of (x - means)^2 over the window around each element of a channel)^beta.

        x (N, C, 1 to 3 spatial dimensions); means, of x's shape and type: what stands for the mean around each element (an average pool or
        a blur of x), or None for 0. The form of cuDNN's DivisiveNormalization.
        """
        return self._session.run(CALLS["divisive_norm"], (x, means), (size, alpha, beta, k), out, stream)

    def divisive_norm_backward(self, dy: Any, x: Any, means: Any = None, size: int = 5, *, alpha: float = 1.0, beta: float = 0.5,
                               k: float = 1.0, out: Any = None, stream: Any = None) -> Any:
        """dx; with means (dx, dmeans)."""
        return self._session.run(CALLS["divisive_norm_backward"], (dy, x, means), (size, alpha, beta, k), out, stream)


def _all_but(op: str, v: Any, dim: int | None) -> tuple[int, ...]:
    """The dimensions of v but `dim`."""
    rank = len(v.shape)
    if dim is None:
        return tuple(range(rank))
    dim = check_integer(op, "dim", dim, -rank, rank - 1) % rank
    if rank < 2:
        raise expected(op, "v", f"of {rank} dimensions", "two or more, or dim=None")
    return tuple(i for i in range(rank) if i != dim)
