"""The handle's mixtures of experts: routing, the layer, its pieces and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ops.checks import check_bool, check_integer, check_number
from .calls import CALLS
from .device import OnDevice


class ExpertOps(OnDevice):
    """Methods of DnnHandle."""

    def moe_route(self, logits: Any, bias: Any = None, *, top_k: int, scoring: str = "softmax", renormalize: bool = True,
                  scaling_factor: float = 1.0, groups: int = 1, top_groups: int | None = None, group_score: str = "top2",
                  capacity: int | None = None, out: Any = None, stream: Any = None) -> Any:
        """(ids (T, K) int32, weights (T, K) float32, counts (E,) int32) of logits (T, E), float32, float16 or bfloat16, at most 1024
        experts.

        The experts of a token are the top_k (at most 32) of score + bias (bias (E,) float32), the lower index first among equals, NaN
        last; scoring "softmax" or "sigmoid". groups, top_groups: only those of the top_groups best of so many groups of neighbours, of
        which group_score "top2" adds up the two best experts and "max" takes the best (DeepSeek-V3: scoring="sigmoid", bias, groups=8,
        top_groups=4, scaling_factor=2.5). weights: scores without bias, divided by their sum if renormalize, times scaling_factor.
        capacity: what comes, in the order of tokens, after so many assignments of an expert has weight 0 and the id ~id, which
        moe_permute and moe leave out. counts: assignments of each expert, those dropped counted; weights of the others stay as they are.
        """
        _check_routing("moe_route", renormalize, scaling_factor, top_k=top_k, groups=groups, top_groups=top_groups, capacity=capacity)
        attrs = (top_k, scoring, renormalize, scaling_factor, groups, top_groups, group_score, capacity)
        return self._session.run(CALLS["moe_route"], (logits, bias), attrs, out, stream)

    def moe_route_backward(self, dweights: Any, logits: Any, ids: Any, *, scoring: str = "softmax", renormalize: bool = True,
                           scaling_factor: float = 1.0, out: Any = None, stream: Any = None) -> Any:
        """dlogits (T, E) in the type of logits: the gradient of moe_route's weights; ids and attributes as of the forward."""
        _check_routing("moe_route_backward", renormalize, scaling_factor)
        return self._session.run(CALLS["moe_route_backward"], (dweights, logits, ids), (scoring, renormalize, scaling_factor), out, stream)

    def moe_losses(self, logits: Any, counts: Any, *, scoring: str = "softmax", out: Any = None, stream: Any = None) -> Any:
        """(balance, z), float32 numbers: E * sum over e of counts[e] / counts.sum() * mean over tokens of the share of e (softmax, or
        sigmoids divided by their sum), 1 where all are busy alike (Switch); and the mean of logsumexp(logits)^2. counts (E,) int32:
        moe_route's."""
        return self._session.run(CALLS["moe_losses"], (logits, counts), (scoring,), out, stream)

    def moe_losses_backward(self, dbalance: Any, dz: Any, logits: Any, counts: Any, *, scoring: str = "softmax", out: Any = None,
                            stream: Any = None) -> Any:
        """dlogits (T, E), in the type of logits, of `moe_losses`; dbalance and dz: float32 numbers on the device. counts has no
        gradient."""
        return self._session.run(CALLS["moe_losses_backward"], (dbalance, dz, logits, counts), (scoring,), out, stream)

    def moe_permute(self, x: Any, ids: Any, *, experts: int, first_expert: int = 0, out: Any = None, stream: Any = None) -> Any:
        """(xs, order, inverse, counts): the rows of x (T, H), of any type but bool, copied to the order of the experts that they go
        to, `ids` (T, K).

        Assignment t * K + k is row inverse[t, k] of xs (T * K, H), order[row] that assignment, counts[e] the rows of expert e; all int32.
        Rows of an expert keep their order. ids outside of [first_expert, first_expert + experts) are of no expert here: their rows come
        last, inverse and order hold the complements (~row, ~assignment). One device does it all: counts never visit the host. ids int32
        or int64, K at most 32, at most 4096 experts. The gradient of x is moe_unpermute(dxs, inverse), of all types of floats.
        """
        return self._session.run(CALLS["moe_permute"], (x, ids), (experts, first_expert), out, stream)

    def moe_unpermute(self, ys: Any, inverse: Any, weights: Any = None, *, out: Any = None, stream: Any = None) -> Any:
        """y (T, H): the sum over k, in turn and in f32 (f64), of weights[t, k] * ys[inverse[t, k]]; without weights plain sums. What is no
        row of ys (inverse below 0: of no expert) adds nothing. weights: float32, float64 beside float64."""
        return self._session.run(CALLS["moe_unpermute"], (ys, inverse, weights), (), out, stream)

    def moe_unpermute_backward(self, dy: Any, ys: Any, inverse: Any, weights: Any, *, out: Any = None, stream: Any = None) -> Any:
        """(dys, dweights) of `moe_unpermute`; 0 of no expert. inverse as moe_permute makes it: each row, or its complement, once. What is
        beyond the rows has dweights of 0; rows that inverse does not name are not written."""
        return self._session.run(CALLS["moe_unpermute_backward"], (dy, ys, inverse, weights), (), out, stream)

    def moe(self, x: Any, ids: Any, weights: Any, w_gate_up: Any, w_down: Any, *, activation: str = "silu", first_expert: int = 0,
            out: Any = None, stream: Any = None) -> Any:
        """y[t] = sum over k of weights[t, k] * (activation(x[t] Wg^T) * (x[t] Wu^T)) Wd^T with the matrices of expert ids[t, k].

        x (T, H); ids (T, K), int32 or int64; weights (T, K), float32 (float64 beside float64); w_gate_up (E, 2 * I, H), Wg above Wu; w_down
        (E, H, I), both of x's type. Any counts, an expert without rows or with all of them; always the same bits. What lies between the
        products is rounded to x's type. ids of no expert here (as of moe_permute) add nothing: with first_expert and a part of the
        experts on each device, results are added up over devices. activation: as the gates of gemm.
        """
        return self._session.run(CALLS["moe"], (x, ids, weights, w_gate_up, w_down), (activation, first_expert), out, stream)

    def moe_quantized(self, x: Any, ids: Any, weights: Any, w_gate_up: Any, scale_gate_up: Any, w_down: Any, scale_down: Any, *,
                      block: Any = (1, 128), activation: str = "silu", first_expert: int = 0, out: Any = None, stream: Any = None) -> Any:
        """`moe` with matrices of e4m3, int8, or signed 4-bit integers (uint8, two to a byte along the last dimension, the first in the low
        half): a number is q * scale of its block of block[0] rows by block[1] columns, rounded to x's type (float32, float16, bfloat16).

        scale_gate_up (E, ceil(2 * I / block[0]), ceil(H / block[1])), scale_down (E, ceil(H / block[0]), ceil(I / block[1])), float32,
        float16 or bfloat16; DeepSeek-V3: e4m3, block=(128, 128). On sm_90a, with blocks of 64 columns or a
        multiple, numbers are made where they are multiplied; else those of experts that have rows in the workspace, which has room for all.
        """
        arrays = (x, ids, weights, w_gate_up, scale_gate_up, w_down, scale_down)
        return self._session.run(CALLS["moe_quantized"], arrays, (activation, block, first_expert), out, stream)

    def moe_backward(self, dy: Any, x: Any, ids: Any, weights: Any, w_gate_up: Any, w_down: Any, *, activation: str = "silu",
                     first_expert: int = 0, out: Any = None, stream: Any = None) -> Any:
        """(dx, dweights, dw_gate_up, dw_down) of `moe`, which computes its middle again. 0 of experts without rows, and dweights of no
        expert."""
        return self._session.run(CALLS["moe_backward"], (dy, x, ids, weights, w_gate_up, w_down), (activation, first_expert), out, stream)

    def moe_exchanged(self, x: Any, counts: Any, w_gate_up: Any, w_down: Any, *, activation: str = "silu", out: Any = None,
                      stream: Any = None) -> Any:
        """The experts of one device of several (expert-parallel), on rows that an all-to-all brought: those of each source in turn, sorted
        by expert, counts[source, expert] of each (on the device, int32 or int64; below 0 is 0), of at least one source.

        y[r] = (activation(x[r] Wg^T) * (x[r] Wu^T)) Wd^T in the rows' places, to be sent back; zeros in rows beyond the last, so x may be
        a buffer for the most that can come. Sources make x with moe_permute and end with moe_unpermute, where routing weights enter.
        """
        return self._session.run(CALLS["moe_exchanged"], (x, counts, w_gate_up, w_down), (activation,), out, stream)


def _check_routing(op: str, renormalize: Any, scaling_factor: Any, **integers: Any) -> None:
    """Refuses True and False for numbers, and numbers for them: a key would not tell them apart."""
    check_bool(op, "renormalize", renormalize)
    check_number(op, "scaling_factor", scaling_factor)
    for name, value in integers.items():
        if isinstance(value, (bool, np.bool_)):
            check_integer(op, name, value, 0 if name == "capacity" else 1)
