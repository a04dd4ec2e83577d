"""CTC: repeated labels, empty targets and sequences, targets that fit exactly or not at all, lengths and labels out of range."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import dtype
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.ctc import CtcProblem
from . import Fill, Sampler
from .pointwise import view


def _ctc(op: str, rng: np.random.Generator, size: str) -> Problem:
    is_tiny = size == "tiny"
    kind = dtype(str(rng.choice(["f32", "f32", "f64", "f16", "bf16"])))
    frames, classes = int(rng.integers(1, 12 if is_tiny else 80)), int(rng.choice([2, 3, 7, 33]))
    sequences = int(rng.integers(1, 5 if is_tiny else 20))
    labels = int(rng.integers(0, 9)) if rng.random() < 0.8 else int(rng.choice([33, 64, 70, 140]))
    if labels > 30:
        frames = int(rng.choice([labels + 3, 4, 40])) if is_tiny else 2 * labels
        sequences = 1 if is_tiny else sequences
    integer = [dtype(str(rng.choice(["s64", "s64", "s32"]))) for _ in range(3)]
    is_flat = rng.random() < 0.4
    tensors = {"log_probs": view(rng, kind, (frames, sequences, classes)),
               "targets": view(rng, integer[0], (sequences * labels,) if is_flat else (sequences, labels)),
               "input_lengths": view(rng, integer[1], (sequences,)), "target_lengths": view(rng, integer[2], (sequences,))}
    attrs: dict[str, Any] = {"reduction": str(rng.choice(["none", "mean", "sum"])), "zero_infinity": bool(rng.random() < 0.5)}
    attrs["blank"] = int(rng.integers(classes)) if rng.random() < 0.5 else 0
    if op == "ctc_loss":
        attrs["return_gradient"] = bool(rng.random() < 0.3)
    elif rng.random() < 0.6:
        tensors["d_loss"] = view(rng, kind, (sequences,) if attrs["reduction"] == "none" else ())
    if attrs.get("return_gradient", True) and rng.random() < 0.5:
        tensors["d_logits"] = view(rng, kind, (frames, sequences, classes), True)
    return OPS[op].make(tensors, attrs, Policy())


def _log_probs(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    x = rng.standard_normal(problem.desc("log_probs").shape) * 2
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _targets(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Classes but the blank, half of them repeated; now and then one that is no label."""
    assert isinstance(problem, CtcProblem)
    shape = problem.desc("targets").shape
    labels = rng.integers(0, problem.classes - 1, shape)
    labels += labels >= problem.blank
    for i in range(1, shape[-1]):
        labels[..., i] = np.where(rng.random(shape[:-1]) < 0.4, labels[..., i - 1], labels[..., i])
    if labels.size and rng.random() < 0.15:
        labels.flat[int(rng.integers(labels.size))] = int(rng.choice([-1, problem.classes, problem.blank]))
    return labels


def _input_lengths(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    assert isinstance(problem, CtcProblem)
    lengths = np.where(rng.random(problem.sequences) < 0.5, problem.frames, rng.integers(0, problem.frames + 1, problem.sequences))
    if lengths.size and rng.random() < 0.1:
        lengths[int(rng.integers(lengths.size))] = int(rng.choice([-1, problem.frames + 1]))
    return lengths


def _target_lengths(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Also longer than what is left of the labels (the last sequences of a flat target), and longer than any alignment."""
    assert isinstance(problem, CtcProblem)
    shape = problem.desc("targets").shape
    most = shape[-1] if len(shape) == 2 else shape[0] // max(problem.sequences, 1)
    likely = min(most, max(1, problem.frames * 2 // 3))
    lengths = np.where(rng.random(problem.sequences) < 0.7, rng.integers(0, likely + 1, problem.sequences), most)
    if lengths.size and rng.random() < 0.1:
        lengths[-1] = int(rng.choice([-1, shape[-1] + 1]))
    return lengths


SAMPLES: dict[str, Sampler] = {op: partial(_ctc, op) for op in ("ctc_loss", "ctc_loss_backward")}
FILLS: dict[tuple[str, str], Fill] = {
    (op, name): fill for op in SAMPLES
    for name, fill in (("log_probs", _log_probs), ("targets", _targets), ("input_lengths", _input_lengths),
                       ("target_lengths", _target_lengths))}
_LINES = (
    "log_probs=f32[9,3,5]nchw targets=s64[3,4]nchw input_lengths=s64[3]nchw target_lengths=s64[3]nchw",
    "log_probs=f64[8,2,4](12,4,1) targets=s32[6]nchw input_lengths=s32[2]nchw target_lengths=s64[2]nchw blank=3 reduction=none",
    "log_probs=f32[150,1,6]nchw targets=s64[1,70]nchw input_lengths=s64[1]nchw target_lengths=s64[1]nchw reduction=sum",
    "log_probs=bf16[12,2,300]nchw targets=s64[2,5]nchw input_lengths=s64[2]nchw target_lengths=s64[2]nchw zero_infinity=True",
    "log_probs=f32[0,2,3]nchw targets=s64[2,0]nchw input_lengths=s64[2]nchw target_lengths=s64[2]nchw",
)
CASES: dict[str, tuple[str, ...]] = {
    "ctc_loss": (*(f"ctc_loss {line}" for line in _LINES), f"ctc_loss {_LINES[0]} return_gradient=True",
                 "ctc_loss log_probs=f32[4,0,3]nchw targets=s64[0,2]nchw input_lengths=s64[0]nchw target_lengths=s64[0]nchw",
                 "ctc_loss log_probs=f32[4,0,3]nchw targets=s64[0]nchw input_lengths=s64[0]nchw target_lengths=s64[0]nchw reduction=sum"),
    "ctc_loss_backward": tuple(f"ctc_loss_backward {line}" for line in _LINES),
}
