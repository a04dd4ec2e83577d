"""The handle's softmax-like functions of rows and its losses."""

from __future__ import annotations

from typing import Any

from .calls import CALLS, draw_of
from .device import OnDevice


class LossOps(OnDevice):
    """Methods of DnnHandle."""

    def softmax(self, x: Any, axis: int = -1, *, mask: Any = None, scale: float = 1.0, diagonal: int | None = None, log: bool = False,
                out_dtype: Any = None, return_lse: bool = False, out: Any = None, stream: Any = None) -> Any:
        """exp(z) over its sum along `axis`, or the logarithm of it, for z = scale * x; stable for any finite logits. In one launch.

        x: f64, f32, f16 or bf16; y of its shape and type. mask, of a shape that broadcasts to x's: bool, elements count where it is true;
        or of any float type, added to z. diagonal: along the last axis alone element j of line i counts where j - i <= diagonal (0:
        causal). A row without an element that counts gives zeros (log: -inf). scale: a number, e.g. 1 / sqrt(head size), 1 / temperature.
        out_dtype: y's type, also "e4m3", "e5m2" or "s8". return_lse: (y, lse), log of the sum of exp(z), f32 (f64 for f64), without `axis`.
        """
        return self._session.run(CALLS["softmax"], (x, mask), (axis, log, scale, diagonal, out_dtype, return_lse), out, stream)

    def softmin(self, x: Any, axis: int = -1, *, mask: Any = None, diagonal: int | None = None, log: bool = False, out: Any = None,
                stream: Any = None) -> Any:
        """`softmax` of -x; its gradient is softmax_backward with scale=-1."""
        return self._session.run(CALLS["softmax"], (x, mask), (axis, log, -1.0, diagonal, None, False), out, stream)

    def softmax_backward(self, dy: Any, y: Any, axis: int = -1, *, scale: float = 1.0, log: bool = False, masked: bool = False,
                         out: Any = None, stream: Any = None) -> Any:
        """dx, from the result of `softmax` with the same axis, scale and log (or from `soft` of gumbel_softmax, scale = 1 / temperature).

        masked: elements whose logarithm is -inf were masked: they get 0 and their dy counts nowhere (without log that is so anyway, as
        long as dy is finite). The gradient of an added mask is dx at scale 1, summed over the dimensions that broadcast.
        """
        return self._session.run(CALLS["softmax_backward"], (dy, y), (axis, log, scale, masked), out, stream)

    def gumbel_softmax(self, x: Any, axis: int = -1, *, temperature: float = 1.0, hard: bool = False, mask: Any = None, seed: int,
                       offset: int = 0, out: Any = None, stream: Any = None) -> Any:
        """softmax((x + g) / temperature) for Gumbel noise g, whose numbers depend on seed, offset (see `dropout`) and place alone.

        hard: (y, soft), where y is 1 at the largest element of each row and 0 elsewhere. The gradient of either is
        softmax_backward(dy, soft, scale=1 / temperature) (straight through). mask: as of `softmax`. Jang, Gu and Poole, ICLR 2017.
        """
        draw = draw_of("gumbel_softmax", seed, offset)
        return self._session.run(CALLS["gumbel_softmax"], (x, mask), (axis, temperature, hard), out, stream, draw)

    def hardmax(self, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """1 at the largest element along `axis`, the first of equals, 0 elsewhere; rows with NaN or +inf are NaN."""
        return self._session.run(CALLS["hardmax"], (x,), (axis,), out, stream)

    def sparsemax(self, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """The point of the simplex nearest to x along `axis`: max(x - t, 0) with t such that the sum is 1; mostly zeros where x is spread.

        Of any length, without sorting; rows with NaN or +inf, or of -inf alone, are NaN. Martins and Astudillo, ICML 2016.
        """
        return self._session.run(CALLS["sparsemax"], (x,), (axis,), out, stream)

    def sparsemax_backward(self, dy: Any, y: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """dx from the result: dy less its mean over the elements with y > 0, there, and 0 elsewhere."""
        return self._session.run(CALLS["sparsemax_backward"], (dy, y), (axis,), out, stream)

    def sinkhorn(self, x: Any, *, iterations: int = 20, eps: float = 1e-6, out: Any = None, stream: Any = None) -> Any:
        """exp(x) of (..., n, n), n up to 8, its columns and rows divided by their sums + eps in turns: in the end rows sum to 1, columns
        nearly (Sinkhorn and Knopp), as the residual mixing of manifold-constrained hyper-connections (Xie et al., 2025) takes it."""
        return self._session.run(CALLS["sinkhorn"], (x,), (iterations, eps), out, stream)

    def sinkhorn_backward(self, dy: Any, x: Any, *, iterations: int = 20, eps: float = 1e-6, out: Any = None, stream: Any = None) -> Any:
        """dx, through all iterations."""
        return self._session.run(CALLS["sinkhorn_backward"], (dy, x), (iterations, eps), out, stream)

    def cross_entropy(self, logits: Any, target: Any, *, reduction: str = "mean", label_smoothing: float = 0.0, ignore_index: int = -100,
                      weight: Any = None, out: Any = None, stream: Any = None) -> Any:
        """Softmax cross-entropy over dimension 1 of logits; target holds class indices, or probabilities of logits' shape.

        weight (C,) per class; reduction "none", "mean" (over the weights of the targets) or "sum". A target out of range reads nothing and
        makes its loss, and any sum or mean with it, NaN.
        """
        return self._session.run(CALLS["cross_entropy"], (logits, target, weight), (reduction, label_smoothing, ignore_index), out, stream)

    def cross_entropy_backward(self, logits: Any, target: Any, *, d_loss: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
                               ignore_index: int = -100, weight: Any = None, out: Any = None, stream: Any = None) -> Any:
        """d_logits, for an upstream gradient d_loss of the loss's shape (default 1)."""
        attrs = (reduction, label_smoothing, ignore_index)
        return self._session.run(CALLS["cross_entropy_backward"], (logits, target, weight, d_loss), attrs, out, stream)

    def nll(self, logits: Any, target: Any, *, reduction: str = "mean", ignore_index: int = -100, weight: Any = None, out: Any = None,
            stream: Any = None) -> Any:
        """Negative log-likelihood: `cross_entropy` of class indices, of logits that are logarithms of probabilities (softmax(log=True))."""
        return self._session.run(CALLS["nll"], (logits, target, weight), (reduction, ignore_index), out, stream)

    def nll_backward(self, logits: Any, target: Any, *, d_loss: Any = None, reduction: str = "mean", ignore_index: int = -100,
                     weight: Any = None, out: Any = None, stream: Any = None) -> Any:
        """d_logits of `nll`, for an upstream gradient d_loss of the loss's shape (default 1)."""
        return self._session.run(CALLS["nll_backward"], (logits, target, weight, d_loss), (reduction, ignore_index), out, stream)

    def loss(self, x: Any, target: Any, name: str, *, x2: Any = None, var: Any = None, weight: Any = None, pos_weight: Any = None,
             reduction: str = "mean", beta: float | None = None, delta: float | None = None, margin: float | None = None,
             eps: float | None = None, log_input: bool = True, log_target: bool = False, full: bool = False, out: Any = None,
             stream: Any = None) -> Any:
        """An elementwise loss by name, with PyTorch's formula and defaults.

        name: "mse", "l1", "smooth_l1" (beta), "huber" (delta), "bce", "bce_with_logits" (pos_weight), "kl_div" (log_target),
        "poisson_nll" (log_input, full, eps), "gaussian_nll" (var, full, eps), "hinge", "squared_hinge", "hinge_embedding" (margin),
        "soft_margin", "margin_ranking" (x2, margin). target, x2: of x's shape; var, weight, pos_weight broadcast to it; weight multiplies
        each element. reduction: "none", "mean" (over the elements), "sum", "batchmean" (the sum over x.shape[0]).
        """
        arrays = (x, target, x2, var, weight, pos_weight)
        attrs = (name, reduction, beta, delta, margin, eps, log_input, log_target, full)
        return self._session.run(CALLS["loss"], arrays, attrs, out, stream)

    def loss_backward(self, x: Any, target: Any, name: str, *, d_loss: Any = None, x2: Any = None, var: Any = None, weight: Any = None,
                      pos_weight: Any = None, reduction: str = "mean", beta: float | None = None, delta: float | None = None,
                      margin: float | None = None, eps: float | None = None, log_input: bool = True, log_target: bool = False,
                      full: bool = False, out: Any = None, stream: Any = None) -> Any:
        """dx of `loss`, for an upstream gradient d_loss of the loss's shape (default 1); (dx, dx2) of margin_ranking, (dx, dvar) of
        gaussian_nll with a var of x's shape."""
        arrays = (x, target, x2, var, weight, pos_weight, d_loss)
        attrs = (name, reduction, beta, delta, margin, eps, log_input, log_target, full)
        return self._session.run(CALLS["loss_backward"], arrays, attrs, out, stream)

    def row_loss(self, x: Any, x2: Any = None, x3: Any = None, target: Any = None, *, name: str, weight: Any = None,
                 reduction: str = "mean", margin: float | None = None, eps: float | None = None, p: int | None = None, out: Any = None,
                 stream: Any = None) -> Any:
        """A loss of rows (the last dimension) by name, with PyTorch's formula and defaults.

        name: "cosine_embedding" of x, x2 and a target of 1 or -1 a row; "triplet_margin" of x (anchor), x2 (positive), x3 (negative), with
        the norm of p = 2 or 1; "multi_margin" of x and a target class a row, with p = 1 or 2 and a weight (C,) per class;
        "multilabel_margin" of x and a target of x's shape, a row's classes before the first negative number; "multilabel_soft_margin" of x
        and a target of x's shape that is 1 at a row's classes and 0 elsewhere, with a weight (C,). reduction: "none", "mean" (over the
        rows), "sum". A class out of range makes its row's results NaN.
        """
        return self._session.run(CALLS["row_loss"], (x, x2, x3, target, weight), (name, reduction, margin, eps, p), out, stream)

    def row_loss_backward(self, x: Any, x2: Any = None, x3: Any = None, target: Any = None, *, name: str, weight: Any = None,
                          d_loss: Any = None, reduction: str = "mean", margin: float | None = None, eps: float | None = None,
                          p: int | None = None, out: Any = None, stream: Any = None) -> Any:
        """dx, (dx, dx2) or (dx, dx2, dx3) of `row_loss`, for an upstream gradient d_loss of the loss's shape (default 1)."""
        arrays = (x, x2, x3, target, weight, d_loss)
        return self._session.run(CALLS["row_loss_backward"], arrays, (name, reduction, margin, eps, p), out, stream)

    def ctc_loss(self, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *, blank: int = 0, reduction: str = "mean",
                 zero_infinity: bool = False, return_gradient: bool = False, out: Any = None, stream: Any = None) -> Any:
        """Connectionist temporal classification, as PyTorch's ctc_loss. return_gradient: (loss, d_logits), for an upstream gradient of 1.

        log_probs (T, N, C): logarithms of probabilities (softmax(log=True)). targets: labels (N, S), or one after another in one
        dimension. input_lengths, target_lengths (N,): integers, in memory of the device. reduction: "none", "mean" (of each loss over its
        target's length), "sum". A target that cannot be aligned has the loss inf and a gradient of NaN, or 0 under zero_infinity. Lengths
        and labels out of range read nothing and make that sequence's results NaN.
        """
        attrs = (blank, reduction, zero_infinity, return_gradient)
        return self._session.run(CALLS["ctc_loss"], (log_probs, targets, input_lengths, target_lengths), attrs, out, stream)

    def ctc_loss_backward(self, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *, d_loss: Any = None,
                          blank: int = 0, reduction: str = "mean", zero_infinity: bool = False, out: Any = None, stream: Any = None) -> Any:
        """d_logits of `ctc_loss`: the gradient by logits of which log_probs are the log-softmax, for an upstream gradient d_loss of the
        loss's shape (default 1). The same bits on every run."""
        arrays = (log_probs, targets, input_lengths, target_lengths, d_loss)
        return self._session.run(CALLS["ctc_loss_backward"], arrays, (blank, reduction, zero_infinity), out, stream)

    def linear_cross_entropy(self, x: Any, w: Any, target: Any, bias: Any = None, *, reduction: str = "mean", label_smoothing: float = 0.0,
                             ignore_index: int = -100, weight: Any = None, return_gradients: bool = False, out: Any = None,
                             stream: Any = None) -> Any:
        """`cross_entropy` of the logits x @ w^T + bias, of which only some rows are in memory at a time.

        x (N, H), w (V, H), bias (V,), target (N,) of class indices; the rest as of `cross_entropy`. return_gradients: (loss, dx, dw), and
        dbias with a bias, for an upstream gradient of 1. Sums are made in f32 (f64 for f64) and rounded once; every output may be given in
        that type. Workspace of the loss: an eighth of the logits, at least 64 and at most 128 MiB. With gradients all of the logits up to
        512 MiB; of more a quarter at a time, and dw while it is summed, if it is not given in the type of sums. Where that is more than
        four fifths of the logits, chunks of columns take about what the loss takes, or dx in the type of sums and a quarter, and four
        matrix products for three; a workspace_limit leads to them, too.
        """
        attrs = (reduction, label_smoothing, ignore_index, return_gradients)
        return self._session.run(CALLS["linear_cross_entropy"], (x, w, target, bias, weight), attrs, out, stream)

    def linear_cross_entropy_backward(self, x: Any, w: Any, target: Any, bias: Any = None, *, d_loss: Any = None, reduction: str = "mean",
                                      label_smoothing: float = 0.0, ignore_index: int = -100, weight: Any = None, out: Any = None,
                                      stream: Any = None) -> Any:
        """(dx, dw), and dbias with a bias, of `linear_cross_entropy`, for an upstream gradient d_loss of the loss's shape (default 1)."""
        attrs = (reduction, label_smoothing, ignore_index)
        return self._session.run(CALLS["linear_cross_entropy_backward"], (x, w, target, bias, weight, d_loss), attrs, out, stream)
