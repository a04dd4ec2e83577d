"""Routing of mixtures of experts in float64, token by token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import F32
from ...ops.base import Problem
from ...ops.moe_route import MoeRouteProblem
from . import Expected, Reference

Inputs = Mapping[str, np.ndarray]
_TINY = 1e-20  # added to sums of sigmoids
_APPROXIMATE = 4e-6  # of e^x in f32, for x down to some tens below 0


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _softmax(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        powers = np.exp(x - x.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)


def _lse(x: np.ndarray) -> np.ndarray:
    most = x.max(-1)
    return np.log(np.exp(x - most[..., None]).sum(-1)) + most


def _chosen(p: MoeRouteProblem, choice: np.ndarray) -> np.ndarray:
    """The top_k of each token, of its best groups; the lower index first among equals."""
    choice = np.where(np.isnan(choice), -np.inf, choice)
    if p.groups > 1:
        grouped = np.sort(choice.reshape(p.tokens, p.groups, p.experts // p.groups), -1)[..., ::-1]
        group_score = grouped[..., 0] + (grouped[..., 1] if p.group_score == "top2" and grouped.shape[-1] > 1 else 0)
        kept = np.argsort(-group_score, -1, kind="stable")[:, : p.top_groups]
        is_kept = np.zeros((p.tokens, p.groups), bool)
        np.put_along_axis(is_kept, kept, True, 1)
        left_out = ~np.repeat(is_kept, p.experts // p.groups, -1)
        return np.lexsort((np.broadcast_to(np.arange(p.experts), choice.shape), -choice, left_out))[:, : p.topk]
    return np.argsort(-choice, -1, kind="stable")[:, : p.topk]


def _weights(p: MoeRouteProblem, logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Of the experts `ids`, before any is dropped."""
    chosen = np.take_along_axis(logits, ids, 1)
    if p.scoring == "sigmoid":
        weights = _sigmoid(chosen)
        return p.scaling_factor * (weights / (weights.sum(-1, keepdims=True) + _TINY) if p.renormalize else weights)
    return p.scaling_factor * (_softmax(chosen) if p.renormalize else np.take_along_axis(_softmax(logits), ids, 1))


def _error(p: MoeRouteProblem, logits: np.ndarray) -> float:
    """Relative, of scores: of exponentials, of differences of logits, and of sums."""
    most = float(np.abs(logits).max(initial=0))
    return 4 * _APPROXIMATE + (8 + 2 * most + p.experts**0.5) * F32.epsilon


def route(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, MoeRouteProblem)
    logits = inputs["logits"]
    choice = logits
    if not p.chooses_by_logits:
        choice = (_sigmoid(logits) if p.scoring == "sigmoid" else _softmax(logits)) + inputs.get("bias", 0.0)
    ids = _chosen(p, choice)
    weights = _weights(p, logits, ids)
    counts = np.bincount(ids.reshape(-1), minlength=p.experts)
    if p.capacity is not None:
        earlier = (np.cumsum(np.eye(p.experts, dtype=np.int64)[ids.reshape(-1)], 0) - 1)[np.arange(ids.size), ids.reshape(-1)]
        is_dropped = (earlier >= p.capacity).reshape(ids.shape)
        ids, weights = np.where(is_dropped, ~ids, ids), np.where(is_dropped, 0.0, weights)
    return {"ids": Expected(ids), "weights": Expected(weights, slack=_error(p, logits) * np.abs(weights)), "counts": Expected(counts)}


def route_backward(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, MoeRouteProblem)
    logits, ids = inputs["logits"], inputs["ids"].astype(np.int64)
    dweights = np.where(ids < 0, 0.0, inputs["dweights"]) * p.scaling_factor
    ids = np.where(ids < 0, ~ids, ids)
    chosen = np.take_along_axis(logits, ids, 1)
    dlogits, size = np.zeros(logits.shape), np.zeros(logits.shape)
    if p.scoring == "softmax":
        parts = _softmax(chosen) if p.renormalize else np.take_along_axis(_softmax(logits), ids, 1)
        mean, mean_size = (parts * dweights).sum(-1, keepdims=True), (parts * np.abs(dweights)).sum(-1, keepdims=True)
        if not p.renormalize:
            dlogits, size = -_softmax(logits) * mean, _softmax(logits) * mean_size
        grads = parts * (dweights - (mean if p.renormalize else 0.0))
        sizes = parts * (np.abs(dweights) + mean_size)
    else:
        scores = _sigmoid(chosen)
        total = scores.sum(-1, keepdims=True) + _TINY if p.renormalize else 1.0
        mean = (scores / total * dweights).sum(-1, keepdims=True) if p.renormalize else 0.0
        mean_size = (scores / total * np.abs(dweights)).sum(-1, keepdims=True) if p.renormalize else 0.0
        grads = (dweights - mean) / total * scores * (1 - scores)
        sizes = (np.abs(dweights) + mean_size) / total * scores
    for k in range(p.topk):
        at = (np.arange(p.tokens), ids[:, k])
        np.add.at(dlogits, at, grads[:, k])
        np.add.at(size, at, sizes[:, k])
    return {"dlogits": Expected(dlogits, terms=0, accumulate=F32, slack=4 * _error(p, logits) * size)}


def _shares(p: MoeRouteProblem, logits: np.ndarray) -> np.ndarray:
    if p.scoring == "softmax":
        return _softmax(logits)
    scores = _sigmoid(logits)
    return scores / (scores.sum(-1, keepdims=True) + _TINY)


def losses(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, MoeRouteProblem)
    if p.tokens == 0:
        return {"balance": Expected(np.zeros(())), "z": Expected(np.zeros(()))}
    logits, counts = inputs["logits"], inputs["counts"].astype(np.float64)
    shares = _shares(p, logits).mean(0)
    balance = p.experts * (counts / max(1.0, counts.sum()) * shares).sum()
    lse = _lse(logits)
    error = 4 * _error(p, logits) + F32.epsilon * p.tokens**0.5
    return {"balance": Expected(balance, slack=np.asarray(error * np.abs(balance))),
            "z": Expected((lse**2).mean(), slack=np.asarray(error * (np.abs(lse) * (1 + np.abs(lse))).mean()))}


def losses_backward(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, MoeRouteProblem)
    logits, counts = inputs["logits"], inputs["counts"].astype(np.float64)
    g = float(inputs["dbalance"]) * p.experts / max(1, p.tokens) * counts / max(1.0, counts.sum())
    shares, softmax = _shares(p, logits), _softmax(logits)
    mean = (shares * g).sum(-1, keepdims=True)
    balance, size = shares * (g - mean), shares * (np.abs(g) + np.abs(mean))
    if p.scoring == "sigmoid":
        balance = balance * (1 - _sigmoid(logits))
    lse = _lse(logits)[:, None]
    z = 2 * float(inputs["dz"]) / max(1, p.tokens) * lse * softmax
    z_size = 2 * abs(float(inputs["dz"])) / max(1, p.tokens) * (1 + np.abs(lse)) * softmax
    return {"dlogits": Expected(balance + z, terms=0, accumulate=F32, slack=4 * _error(p, logits) * (size + z_size))}


REFERENCES: dict[str, Reference] = {"moe_route": route, "moe_route_backward": route_backward, "moe_losses": losses,
                                    "moe_losses_backward": losses_backward}
