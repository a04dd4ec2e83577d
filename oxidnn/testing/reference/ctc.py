"""CTC in float64 from its definition: sums over the lattice of a target with blanks between its labels, forwards and backwards."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import F32, F64
from ...ops.base import Problem
from ...ops.ctc import CtcProblem
from . import Expected


def _lattice(log_probs: np.ndarray, labels: np.ndarray, blank: int) -> tuple[float, np.ndarray]:
    """(logarithm of the probability of all alignments, expected occurrences (T, C)) of one sequence with at least a frame."""
    states = np.full(2 * len(labels) + 1, blank)
    states[1::2] = labels
    skips = np.zeros(len(states), bool)
    skips[3::2] = labels[1:] != labels[:-1]
    frames = log_probs[:, states]
    before, after = np.full(frames.shape, -np.inf), np.full(frames.shape, -np.inf)
    before[0, :2], after[-1, -2:] = frames[0, :2], 0.0
    for t in range(1, len(frames)):
        b = before[t - 1]
        one, two = np.append(-np.inf, b[:-1]), np.where(skips, np.append([-np.inf] * 2, b)[:len(b)], -np.inf)
        before[t] = frames[t] + np.logaddexp(np.logaddexp(b, one), two)
    for t in range(len(frames) - 2, -1, -1):
        a = after[t + 1] + frames[t + 1]
        one = np.append(a[1:], -np.inf)
        two = np.append(np.where(skips, a, -np.inf)[2:], [-np.inf] * 2)[:len(a)]
        after[t] = np.logaddexp(np.logaddexp(a, one), two)
    total = np.logaddexp.reduce(before[-1, -2:])
    expected = np.zeros(log_probs.shape)
    np.add.at(expected.T, states, np.exp(before + after - total).T)
    return float(total), expected


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    """Errors: a rounding of the sum of logarithms in every frame, which a gradient meets as a relative one. In f32 sums are counted from
    the largest of their frame, and few that matter are smaller than it by more than 100."""
    p = problem
    assert isinstance(p, CtcProblem)
    log_probs, targets = inputs["log_probs"], inputs["targets"]
    lengths, label_counts = inputs["input_lengths"].astype(np.int64), inputs["target_lengths"].astype(np.int64)
    acc = F64 if p.desc("log_probs").dtype is F64 else F32
    approximate = 1e-14 if acc is F64 else 4e-7
    losses = np.zeros(p.sequences)
    gradient, sizes = np.zeros(log_probs.shape), np.zeros(log_probs.shape)
    offset = 0
    for n, (frames, count) in enumerate(zip(lengths, label_counts, strict=True)):
        given = targets[offset:] if targets.ndim == 1 else targets[n]
        offset += int(count)
        if not (0 <= frames <= p.frames and 0 <= count <= len(given)):
            losses[n], gradient[:frames if 0 <= frames <= p.frames else None, n] = np.nan, np.nan
            continue
        labels = given[:count]
        is_wrong = bool(((labels < 0) | (labels >= p.classes) | (labels == p.blank)).any())
        repeats = int((labels[1:] == labels[:-1]).sum())
        if frames == 0 or count > p.most_labels:  # whatever the labels are
            losses[n], gradient[:frames, n] = np.inf if count else 0.0, np.nan
        elif is_wrong or frames < count + repeats:
            losses[n], gradient[:frames, n] = np.nan if is_wrong else np.inf, np.nan
        else:
            with np.errstate(all="ignore"):
                total, expected = _lattice(log_probs[:frames, n], labels, p.blank)
            losses[n] = -total
            probability = np.exp(log_probs[:frames, n])
            gradient[:frames, n] = probability - expected
            sizes[:frames, n] = probability * 4 + expected * (2 * (abs(total) if acc is F64 else min(abs(total), 100.0)) + 4)
        if p.zero_infinity and np.isinf(losses[n]):
            losses[n], gradient[:, n] = 0.0, 0.0
    divisors = np.maximum(label_counts, 1) if p.reduction == "mean" else np.ones(p.sequences)
    expected_of = {}
    if p.has("loss"):
        values = losses / divisors
        with np.errstate(all="ignore"):
            loss = values if p.reduction == "none" else values.sum() / (np.float64(p.sequences) if p.reduction == "mean" else 1)
            size = np.nan_to_num(np.abs(values) + 2, posinf=0.0)
            size = size if p.reduction == "none" else size.sum() / max(p.sequences if p.reduction == "mean" else 1, 1)
        expected_of["loss"] = Expected(np.asarray(loss), np.asarray(size), p.frames + p.sequences + 4, acc, approximate)
    if p.has("d_logits"):
        upstream = np.broadcast_to(inputs.get("d_loss", np.ones(())), (p.sequences,)) / divisors
        upstream = (upstream / max(p.sequences, 1) if p.reduction == "mean" else upstream)[:, None]
        with np.errstate(all="ignore"):
            want = np.where(gradient == 0, 0.0, upstream * gradient)
        expected_of["d_logits"] = Expected(want, np.abs(upstream) * sizes, p.frames + 4, acc, approximate)
    return expected_of


REFERENCES = {"ctc_loss": reference, "ctc_loss_backward": reference}
