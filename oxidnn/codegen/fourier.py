"""Discrete Fourier transforms of a line of points as straight-line code: sums and fused multiply-adds, each register written once.

X[k] = sum_j x[j] w^(jk), w = exp(-2 pi i / n), by Cooley and Tukey's recursion in time: halves while n is even, then its odd
primes. A butterfly a +- w b is six fused multiply-adds, since w b = c (b + i t b) where t is the smaller part of w over the larger,
c (Linzer and Feig 1993); its constants are computed in float64 and rounded once. What is known to be zero is not computed, nor is
what no output needs; a transform of real points takes half the work of complex ones, as its second half is the conjugate of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import cos, pi, sin
from typing import Any

import numpy as np

Value = tuple[int, int] | None  # (sign, register); None is zero
Point = tuple[Value, Value]  # real and imaginary part
_ZERO: Point = (None, None)


@dataclass(frozen=True, slots=True)
class Line:
    """target = a + b ("add"), a - b ("sub"), factor * a ("mul"), factor * a + b ("fma"), -a ("neg"), a ("copy") or 0 ("zero")."""

    op: str
    target: int
    a: int = 0
    b: int = 0
    factor: float = 0.0


@dataclass(frozen=True, slots=True)
class Program:
    """Inputs lie in registers 0 to inputs - 1, outputs in `outputs`, each in its own; points as real and imaginary part in turn.
    count: of registers."""

    inputs: int
    lines: tuple[Line, ...]
    outputs: tuple[int, ...]
    count: int

    def run(self, inputs: np.ndarray) -> np.ndarray:
        """(inputs, ...) -> (outputs, ...) in float64: what the code computes but for rounding."""
        held: dict[int, Any] = {i: np.asarray(inputs[i], np.float64) for i in range(self.inputs)}
        for x in self.lines:
            a, b = held.get(x.a, 0.0), held.get(x.b, 0.0)
            held[x.target] = {"add": a + b, "sub": a - b, "mul": a * x.factor, "fma": a * x.factor + b, "neg": -a, "copy": a,
                              "zero": 0 * a}[x.op]
        return np.array([held[i] for i in self.outputs])


def root(k: int, n: int) -> tuple[float, float]:
    """(cos, sin) of 2 pi k / n, exact where they are 0, 1 or -1."""
    k %= n
    if 4 * k % n == 0:
        return ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0))[4 * k // n]
    return cos(2 * pi * k / n), sin(2 * pi * k / n)


class _Code:
    def __init__(self, inputs: int) -> None:
        self.inputs, self.lines, self.count = inputs, list[Line](), inputs

    def emit(self, op: str, a: int = 0, b: int = 0, factor: float = 0.0) -> int:
        self.lines.append(Line(op, self.count, a, b, factor))
        self.count += 1
        return self.count - 1

    def add(self, x: Value, y: Value) -> Value:
        if x is None or y is None:
            return y if x is None else x
        (s, a), (t, b) = x, y
        if s == t:
            return s, self.emit("add", a, b)
        return 1, self.emit("sub", a, b) if s > 0 else self.emit("sub", b, a)

    def fma(self, factor: float, x: Value, y: Value) -> Value:
        """factor * x + y."""
        factor = float(np.float32(factor))
        if x is None or factor == 0:
            return y
        if abs(factor) == 1:
            return self.add(x if factor > 0 else negative(x), y)
        if y is None:
            return 1, self.emit("mul", x[1], factor=factor * x[0])
        return y[0], self.emit("fma", x[1], y[1], factor * x[0] * y[0])

    def plus(self, x: Point, y: Point) -> Point:
        return self.add(x[0], y[0]), self.add(x[1], y[1])

    def minus(self, x: Point, y: Point) -> Point:
        return self.plus(x, (negative(y[0]), negative(y[1])))

    def turned(self, w: tuple[float, float], b: Point) -> tuple[float, Point]:
        """(c, u) with w * b = c * u, c the larger part of w."""
        (c, s), (re, im) = w, b
        if abs(c) >= abs(s):
            return c, (self.fma(-s / c, im, re), self.fma(s / c, re, im))
        return s, (self.fma(c / s, re, negative(im)), self.fma(c / s, im, re))

    def times(self, w: tuple[float, float], b: Point) -> Point:
        c, u = self.turned(w, b)
        return self.fma(c, u[0], None), self.fma(c, u[1], None)

    def butterfly(self, a: Point, b: Point, w: tuple[float, float]) -> tuple[Point, Point]:
        """a + w b and a - w b."""
        c, u = self.turned(w, b)
        return ((self.fma(c, u[0], a[0]), self.fma(c, u[1], a[1])), (self.fma(-c, u[0], a[0]), self.fma(-c, u[1], a[1])))

    def transform(self, x: Sequence[Point], sign: int) -> list[Point]:
        """sum_j x[j] exp(sign * 2 pi i jk / n) for all k."""
        n = len(x)
        if n == 1:
            return list(x)
        p = next(q for q in range(2, n + 1) if n % q == 0)
        m = n // p
        parts = [self.transform(x[q::p], sign) for q in range(p)]
        out = [_ZERO] * n
        for k in range(m):
            if p == 2:
                c, s = root(k, n)
                out[k], out[k + m] = self.butterfly(parts[0][k], parts[1][k], (c, sign * s))
                continue
            first, terms = parts[0][k], []
            for q in range(1, p):
                c, s = root(q * k, n)
                terms.append(self.times((c, sign * s), parts[q][k]))
            sums = [self.plus(terms[q], terms[p - 2 - q]) for q in range(p // 2)]
            differences = [self.minus(terms[q], terms[p - 2 - q]) for q in range(p // 2)]
            for line in range(p // 2 + 1):
                even, odd = first, _ZERO
                for q in range(p // 2):
                    c, s = root((q + 1) * line, p)
                    even = self.fma(c, sums[q][0], even[0]), self.fma(c, sums[q][1], even[1])
                    odd = (self.fma(-sign * s, differences[q][1], odd[0]), self.fma(sign * s, differences[q][0], odd[1]))
                out[k + m * line] = self.plus(even, odd)
                if line:
                    out[k + m * (p - line)] = self.minus(even, odd)
        return out

    def real_transform(self, x: Sequence[Value]) -> list[Point]:
        """Points 0 to n // 2 of the transform of real points."""
        n = len(x)
        if n % 2:
            return self.transform([(v, None) for v in x], -1)[:n // 2 + 1]
        m = n // 2
        even, odd = self.real_transform(x[0::2]), self.real_transform(x[1::2])
        out = [_ZERO] * (m + 1)
        for k in range(m // 2 + 1):
            c, s = root(k, n)
            out[k], far = self.butterfly(even[k], odd[k], (c, -s))
            if k != m - k:
                out[m - k] = far[0], negative(far[1])
        return out

    def real_inverse(self, x: Sequence[Point], n: int) -> list[Value]:
        """The n real points, times n, whose transform begins with x, n // 2 + 1 points."""
        if n % 2:
            rest = [(re, negative(im)) for re, im in x[:0:-1]]
            return [point[0] for point in self.transform([*x, *rest], 1)]
        m = n // 2
        even, odd = [], []
        for k in range(m // 2 + 1):
            far = x[m - k][0], negative(x[m - k][1])
            even.append(self.plus(x[k], far))
            odd.append(self.times(root(k, n), self.minus(x[k], far)))
        halves = self.real_inverse(even, m), self.real_inverse(odd, m)
        return [halves[j % 2][j // 2] for j in range(n)]

    def program(self, outputs: Sequence[Value]) -> Program:
        """The lines that `outputs` need, registers numbered anew."""
        ends = list[int]()
        for v in outputs:
            end = self.emit("zero") if v is None else v[1] if v[0] > 0 else self.emit("neg", v[1])
            ends.append(self.emit("copy", end) if end in ends else end)
        needed, kept = set(ends), []
        for line in reversed(self.lines):
            if line.target in needed:
                kept.append(line)
                needed |= {line.a} if line.op in ("mul", "neg", "copy") else set() if line.op == "zero" else {line.a, line.b}
        number = {i: i for i in range(self.inputs)}
        lines = []
        for line in reversed(kept):
            number[line.target] = len(number)
            lines.append(Line(line.op, number[line.target], number.get(line.a, 0), number.get(line.b, 0), line.factor))
        return Program(self.inputs, tuple(lines), tuple(number[i] for i in ends), len(number))


def negative(x: Value) -> Value:
    return None if x is None else (-x[0], x[1])


def _given(count: int, n: int) -> list[Point]:
    return [((1, 2 * i), (1, 2 * i + 1)) if i < count else _ZERO for i in range(n)]


def _flat(points: Sequence[Point]) -> list[Value]:
    return [part for point in points for part in point]


@lru_cache(maxsize=64)
def forward(n: int, given: int) -> Program:
    """Complex points, of which the first `given` are not zero, into all n of their transform."""
    code = _Code(2 * given)
    return code.program(_flat(code.transform(_given(given, n), -1)))


@lru_cache(maxsize=64)
def inverse(n: int, kept: int) -> Program:
    """n points of a transform into the first `kept` complex points, times n."""
    code = _Code(2 * n)
    return code.program(_flat(code.transform(_given(n, n), 1)[:kept]))


@lru_cache(maxsize=64)
def real_forward(n: int, given: int) -> Program:
    """Real points, of which the first `given` are not zero, into points 0 to n // 2 of their transform."""
    code = _Code(given)
    return code.program(_flat(code.real_transform([(1, i) if i < given else None for i in range(n)])))


@lru_cache(maxsize=64)
def real_inverse(n: int, kept: int) -> Program:
    """Points 0 to n // 2 of a transform into the first `kept` real points, times n."""
    code = _Code(2 * (n // 2 + 1))
    return code.program(code.real_inverse(_given(n // 2 + 1, n // 2 + 1), n)[:kept])
