"""Spectral normalisation: a weight over its largest singular value, which power iterations find.

    spectral_norm w=f32[64,32,3,3] u=f32[64] v=f32[288] dim=0 iterations=1         y, sigma, new_u, new_v
    spectral_norm_backward dy=f32[64,32,3,3] w=f32[64,32,3,3] u=f32[64] v=f32[288] sigma=f32[]      dw

W is w with `dim` as its rows and the other dimensions, in order, as its columns. `iterations` times v = W'u / max(|W'u|, eps) and
u = Wv / max(|Wv|, eps); sigma = u'Wv, y = w / sigma. Without iterations u and v stay, and there are no new ones. u, v and sigma are of
the type of the arithmetic, f32 (f64 for f64). The gradient takes u and v (the new ones) for constants: dw = dy / sigma -
(sum of dy w) / sigma^2 uv'. All sums are made in a fixed order. Miyato, Kataoka, Koyama and Yoshida, ICLR 2018.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ..dtypes import F32
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_integer, check_number, describe, is_integer, operand, output
from .epilogue import accumulator_of

EPS = 1e-12
MAX_ITERATIONS = 100


@dataclass(frozen=True)
class SpectralNormProblem(Problem):
    """dim: the dimension that makes rows."""

    dim: int = 0
    iterations: int = 1
    eps: float = EPS

    @property
    def axes(self) -> tuple[int, ...]:
        """The dimensions that make columns."""
        return tuple(i for i in range(self.desc("w").rank) if i != self.dim)

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Vectors are read before new ones are written, elements by the thread that writes them, and not again."""
        pairs = (("dw", "dy"), ("dw", "w")) if self.has("dw") else (("y", "w"), ("new_u", "u"), ("new_v", "v"))
        return tuple((a, b) for a, b in pairs if self.has(a))

    @property
    def flops(self) -> int:
        return self.desc("w").numel * (1 + 4 * max(self.iterations, 1))


def _weight(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any]) -> tuple[TensorDesc, int, list[tuple[str, Any]]]:
    w = operand(op, "w", tensors, FLOATS)
    if w.rank < 2 or not w.numel:
        raise expected(op, "shape of w", list(w.shape), "two dimensions or more, none of them empty", describe(tensors))
    dim = attrs.get("dim", 0)
    if not is_integer(dim, -w.rank, w.rank - 1):
        raise expected(op, "dim", dim, f"an integer in [{-w.rank}, {w.rank})", describe(tensors))
    dim = int(dim) % w.rank
    return w, dim, [("dim", dim)] if dim else []


def _vectors(op: str, tensors: Mapping[str, TensorDesc], w: TensorDesc, dim: int) -> list[Operand]:
    kind, rows = (accumulator_of(w.dtype),), w.shape[dim]
    return [Operand("u", operand(op, "u", tensors, kind, (rows,))), Operand("v", operand(op, "v", tensors, kind, (prod(w.shape) // rows,)))]


def make_spectral_norm(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> SpectralNormProblem:
    op = "spectral_norm"
    w, dim, normal = _weight(op, tensors, attrs)
    iterations = check_integer(op, "iterations", attrs.get("iterations", 1), 0, MAX_ITERATIONS)
    eps = check_number(op, "eps", attrs.get("eps", EPS), F32)
    if not eps > 0:
        raise expected(op, "eps", repr(eps), "a number above 0")
    vectors, kind = _vectors(op, tensors, w, dim), accumulator_of(w.dtype)
    operands = [Operand("w", w), *vectors, Operand("y", output(op, "y", tensors, (w.dtype,), w.shape, w), True)]
    operands.append(Operand("sigma", output(op, "sigma", tensors, (kind,), (), TensorDesc.packed(kind, ())), True))
    if iterations:
        operands += [Operand(f"new_{o.name}", output(op, f"new_{o.name}", tensors, (kind,), o.desc.shape, o.desc), True) for o in vectors]
    normal += [(n, v) for n, v, default in (("iterations", iterations, 1), ("eps", eps, EPS)) if v != default]
    return SpectralNormProblem(op, tuple(operands), tuple(normal), policy=policy, dim=dim, iterations=iterations, eps=eps)


def make_spectral_norm_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> SpectralNormProblem:
    op = "spectral_norm_backward"
    w, dim, normal = _weight(op, tensors, attrs)
    operands = [Operand("dy", operand(op, "dy", tensors, (w.dtype,), w.shape)), Operand("w", w), *_vectors(op, tensors, w, dim)]
    operands.append(Operand("sigma", operand(op, "sigma", tensors, (accumulator_of(w.dtype),), ())))
    operands.append(Operand("dw", output(op, "dw", tensors, (w.dtype,), w.shape, w), True))
    return SpectralNormProblem(op, tuple(operands), tuple(normal), policy=policy, dim=dim)


DEFINITIONS = (
    OpDef("spectral_norm", ("w", "u", "v"), ("y", "sigma", "new_u", "new_v"), make_spectral_norm,
          attrs=(("dim", 0), ("iterations", 1), ("eps", EPS))),
    OpDef("spectral_norm_backward", ("dy", "w", "u", "v", "sigma"), ("dw",), make_spectral_norm_backward, attrs=(("dim", 0),)),
)
