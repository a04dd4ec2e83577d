"""Linear layers of quantised weights, and weights in the layouts of other tools."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...ops.base import Problem
from ...ops.quantized_linear import AWQ_ORDER, NF4, NIBBLES, PER_WORD, QuantizedLinearProblem, RepackProblem
from . import Expected, Reference
from .epilogue import finish


def numbers(w: np.ndarray, kind: str, k: int) -> np.ndarray:
    """(n, k) numbers of weights as they are stored."""
    if kind not in NIBBLES:
        return w.astype(np.float64)
    codes = w.astype(np.int64)
    codes = np.stack([codes & 15, codes >> 4], -1).reshape(w.shape[0], 2 * w.shape[1])[:, :k]
    return NF4[codes].astype(np.float64) if kind == "nf4" else (np.where(codes > 7, codes - 16, codes) if kind == "s4" else codes)


def dequantized(p: QuantizedLinearProblem, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """W in float64."""
    group = np.arange(p.k) // p.group_size

    def spread(name: str) -> np.ndarray:
        values = inputs[name].astype(np.float64)
        values = values.reshape(-1, 1) if values.ndim < 2 else values
        return values[:, group] if values.shape[1] > 1 else values

    q = numbers(inputs["w"], p.kind, p.k)
    return (q - (spread("zero_point") if p.has("zero_point") else 0.0)) * spread("scale")


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, QuantizedLinearProblem)
    x, w = inputs["x"], dequantized(p, inputs)
    if p.has("permutation"):
        x = x[..., inputs["permutation"].astype(np.int64)]
    acc, magnitude = x @ w.T, np.abs(x) @ np.abs(w).T
    # The plain computation rounds W to x's type: each term errs by up to half an epsilon of itself, independently.
    kind = p.desc("x").dtype
    rounded = 2 * kind.epsilon * np.sqrt(np.square(x) @ np.square(w).T) + kind.smallest * np.abs(x).sum(-1, keepdims=True)
    return {"y": finish(p, p.epilogue, acc, magnitude, rounded, p.k + 4, inputs, scalars, -1)}


def _nibbles(words: np.ndarray) -> np.ndarray:
    """(rows, columns, 8) numbers of four bits in words, the lowest first."""
    return words.astype(np.int64)[..., None] >> 4 * np.arange(PER_WORD) & 15


def _along_n(words: np.ndarray, n: int, is_awq: bool) -> np.ndarray:
    """(rows, n) numbers that lie eight along n to a word."""
    found = _nibbles(words)
    if is_awq:
        found = found[..., np.argsort(AWQ_ORDER)]
    return found.reshape(words.shape[0], PER_WORD * words.shape[1])[:, :n]


def repack(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, RepackProblem)
    words = inputs["qweight"]
    codes = _along_n(words, p.n, True) if p.is_awq else _nibbles(words).transpose(0, 2, 1).reshape(p.k, p.n)
    if p.has("permutation"):
        codes = codes[inputs["permutation"].astype(np.int64)]
    codes = codes.T
    zeros = _along_n(inputs["qzeros"], p.n, p.is_awq).T + p.zero_offset
    return {"w": Expected(codes[:, 0::2] + 16 * codes[:, 1::2]), "scale": Expected(inputs["scales"].T.astype(np.float64)),
            "zero_point": Expected(zeros)}


REFERENCES: dict[str, Reference] = {"quantized_linear": reference, "repack_gptq": repack, "repack_awq": repack}
