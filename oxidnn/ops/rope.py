"""Rotary position embedding, and its gradient.

    rope x=bf16[B,H,L,D] cos=f32[M,R/2] sin=f32[M,R/2] positions=s32[B,L] rotary_dim=R                y, of x's shape and type

The first R of the D elements of each row (all, unless rotary_dim says) make R / 2 pairs: element i with i + R / 2, or interleaved 2 i with
2 i + 1. Pair i of a row at position p is turned by the angle p * f[i]: (a, b) -> (a cos - b sin, b cos + a sin). The rest is copied.
p: positions (B, L) or (L,), s32 or s64, else the row's index in L. f[i] = base^(-2 i / R), after `scaling`. Angles are reduced in
float64: they are right to the last bits of float32 for positions to 2^31 - 1.

cos, sin, of x's type or f32, instead of f: (M, R / 2), row p; without positions also (B, L, R / 2), a row of their own. With R columns the
two elements of a pair have their own: (a cos[i] - b sin[i], b cos[i + R / 2] + a sin[i + R / 2]). Rows beyond M are taken as the last one.

scaling: pairs (name, value), "type" among them:
    linear     factor: f / factor
    llama3     factor, low_freq_factor, high_freq_factor, original_max_position_embeddings
    yarn       factor, original_max_position_embeddings, beta_fast (32), beta_slow (1), attention_factor (0.1 ln factor + 1)
    longrope   factors (R / 2 of them): f[i] / factors[i]; attention_factor, or factor and original_max_position_embeddings, of which it
               is sqrt(1 + ln factor / ln original)
The attention factor multiplies cos and sin.

inverse: the transpose, which is the gradient (and, but for attention factors, what undoes the rotation). y may lie exactly where x does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import F32, F64, S32, S64, DType
from ..errors import InvalidArgument, expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, canonical, check_bool, check_integer, check_number, check_output, check_reach, describe, operand
from .pointwise import like

MAX_ROTARY = 512


@dataclass(frozen=True, slots=True)
class Rotation:
    """pairs: R / 2. frequencies: radians per position of each pair, () where tables are given. magnitude: of cos and sin."""

    pairs: int
    interleaved: bool
    inverse: bool
    frequencies: tuple[float, ...]
    magnitude: float


@dataclass(frozen=True, kw_only=True)
class RopeProblem(Problem):
    rotation: Rotation

    def heads_of(self, name: str) -> TensorDesc:
        """x or y as (batch, heads, length, dim)."""
        desc = self.desc(name)
        return desc if desc.rank == 4 else TensorDesc(desc.dtype, (1, *desc.shape), (0, *desc.strides), desc.align)

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        return (("y", "x"),)

    @property
    def compute(self) -> DType:
        return F64 if self.desc("x").dtype is F64 else F32


def frequencies(op: str, pairs: int, base: float, scaling: Any, context: str = "") -> tuple[tuple[float, ...], float]:
    """(radians per position of each pair, what cos and sin are multiplied by)."""
    try:
        found, magnitude = _scaled(op, pairs, base, scaling, context)
    except InvalidArgument:
        raise
    except (OverflowError, ZeroDivisionError, ValueError):  # of infinities, logarithms of 1 and roots of negatives
        found, magnitude = (), math.nan
    if not all(map(math.isfinite, (*found, magnitude))):
        raise expected(op, "scaling", repr(scaling), "numbers of which finite frequencies come", context)
    return found, magnitude


def _scaled(op: str, pairs: int, base: float, scaling: Any, context: str) -> tuple[tuple[float, ...], float]:
    plain = tuple(base ** (-i / pairs) for i in range(pairs))
    if scaling is None:
        return plain, 1.0
    if not isinstance(scaling, tuple) or not all(isinstance(s, tuple) and len(s) == 2 and isinstance(s[0], str) for s in scaling):
        raise expected(op, "scaling", repr(scaling), "pairs (name, value), or a mapping", context)
    given = dict(scaling)
    kind = given.pop("type", None)
    taken: set[str] = set()

    def number(name: str, default: float | None = None) -> float:
        taken.add(name)
        value = given.get(name, default)
        if value is None:
            raise expected(op, f"scaling {name}", "missing", f"a number, for the type {kind!r}", context)
        found = check_number(op, f"scaling {name}", value, F64, context)
        if found <= 0:
            raise expected(op, f"scaling {name}", value, "a number above 0", context)
        return found

    original = "original_max_position_embeddings"
    magnitude = 1.0
    if kind == "linear":
        factor = number("factor")
        result = tuple(f / factor for f in plain)
    elif kind == "llama3":
        factor, low, high, length = number("factor"), number("low_freq_factor"), number("high_freq_factor"), number(original)

        def bent(f: float) -> float:
            turns = length * f / (2 * math.pi)  # of the original length
            if turns < low or turns > high or high == low:
                return f / factor if turns < low else f
            share = (turns - low) / (high - low)
            return (1 - share) * f / factor + share * f

        result = tuple(map(bent, plain))
    elif kind == "yarn":
        factor, length = number("factor"), number(original)
        fast, slow = number("beta_fast", 32.0), number("beta_slow", 1.0)
        magnitude = number("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)

        def place(turns: float) -> float:
            return pairs * math.log(length / (turns * 2 * math.pi)) / math.log(base)

        first, last = max(math.floor(place(fast)), 0), min(math.ceil(place(slow)), 2 * pairs - 1)
        width = last - first if last != first else 0.001
        share = [1 - min(max((i - first) / width, 0.0), 1.0) for i in range(pairs)]
        result = tuple(f / factor * (1 - s) + f * s for f, s in zip(plain, share, strict=True))
    elif kind == "longrope":
        taken.add("factors")
        factors = given.get("factors")
        if not isinstance(factors, tuple) or len(factors) != pairs:
            raise expected(op, "scaling factors", repr(factors), f"{pairs} numbers, one a pair", context)
        parts = [check_number(op, "scaling factors", v, F64, context) for v in factors]
        if not all(v > 0 for v in parts):
            raise expected(op, "scaling factors", repr(factors), "numbers above 0", context)
        result = tuple(f / v for f, v in zip(plain, parts, strict=True))
        if "attention_factor" in given or "factor" not in given:
            magnitude = number("attention_factor", 1.0)
        else:
            factor, length = number("factor"), number(original)
            magnitude = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    else:
        raise expected(op, "scaling type", repr(kind), "'linear', 'llama3', 'yarn' or 'longrope'", context)
    unknown = sorted(set(given) - taken)
    if unknown:
        raise expected(op, "scaling", f"with {unknown[0]}", f"{', '.join(sorted(taken))} for the type {kind!r}", context)
    return result, magnitude


def _in_floats(value: Any) -> Any:
    """Checked pairs of `scaling` with every number a Python float: equal ones are one case."""
    if isinstance(value, tuple):
        return tuple(map(_in_floats, value))
    return value if isinstance(value, str) else float(value)


def check_rotation(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], dim: int, kind: DType, batch: int,
                   length: int) -> tuple[Rotation, list[tuple[str, Any]]]:
    """The rotation of rows of `dim` elements, its tables and positions checked; the attributes as they are written."""
    context = describe(tensors)
    normal: list[tuple[str, Any]] = []
    rotary = dim
    if attrs.get("rotary_dim") is not None:
        rotary = check_integer(op, "rotary_dim", attrs["rotary_dim"], 2, min(dim, MAX_ROTARY), context)
        normal.append(("rotary_dim", rotary))
    if rotary % 2 or not 2 <= rotary <= MAX_ROTARY:
        raise expected(op, "rotary_dim", rotary, f"an even number of 2 to {MAX_ROTARY}", context)
    interleaved, inverse = (check_bool(op, name, attrs.get(name, False), context) for name in ("interleaved", "inverse"))
    normal += [(name, True) for name, flag in (("interleaved", interleaved), ("inverse", inverse)) if flag]
    tables = [n for n in ("cos", "sin") if n in tensors]
    if len(tables) == 1:
        raise expected(op, "sin" if tables == ["cos"] else "cos", "missing", f"a tensor beside {tables[0]}", context)
    if "positions" in tensors:
        positions = operand(op, "positions", tensors, (S32, S64))
        if positions.shape not in ((batch, length), (length,)):
            raise expected(op, "shape of positions", list(positions.shape), f"[{batch}, {length}] or [{length}]", context)
    if not tables:
        base = check_number(op, "base", attrs.get("base", 10000.0), F64, context)
        if base <= 1:
            raise expected(op, "base", base, "a number above 1", context)
        normal += [("base", base)] if base != 10000.0 else []
        scaling = attrs.get("scaling")
        found, magnitude = frequencies(op, rotary // 2, base, scaling, context)
        normal += [("scaling", _in_floats(scaling))] if scaling is not None else []
        return Rotation(rotary // 2, interleaved, inverse, found, magnitude), normal
    for name in ("base", "scaling"):
        if attrs.get(name) is not None:
            raise expected(op, name, repr(attrs[name]), "none beside cos and sin", context)
    for name in tables:
        table = operand(op, name, tensors, tuple(dict.fromkeys((kind, F32))), tensors["cos"].shape)
        own = table.rank == 3 and "positions" not in tensors and table.shape[:2] == (batch, length)
        enough = table.rank == 2 and table.shape[0] >= (1 if "positions" in tensors else length)
        if not (own or enough) or table.shape[-1] not in (rotary // 2, rotary):
            raise expected(op, f"shape of {name}", list(table.shape), f"(positions, {rotary // 2} or {rotary}), as many as are looked up, "
                           f"or ({batch}, {length}, {rotary // 2} or {rotary}) without positions", context)
        if table.dtype is not tensors["cos"].dtype:
            raise expected(op, f"type of {name}", table.dtype, f"{tensors['cos'].dtype} as cos has", context)
    return Rotation(rotary // 2, interleaved, inverse, (), 1.0), normal


def _make(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> RopeProblem:
    op, context = "rope", describe(tensors)
    x = operand(op, "x", tensors, FLOATS)
    if x.rank not in (3, 4):
        raise expected(op, "rank of x", x.rank, "4: (batch, heads, length, dim), or 3 without the batch", context)
    if x.shape[-1] < 2:
        raise expected(op, "last dimension of x", x.shape[-1], "at least 2", context)
    batch = x.shape[0] if x.rank == 4 else 1
    rotation, normal = check_rotation(op, tensors, attrs, x.shape[-1], x.dtype, batch, x.shape[-2])
    if "y" in tensors:
        check_output(op, "y", tensors["y"], x.shape, tensors, (x.dtype,))
    operands = [Operand(n, tensors[n]) for n in ("x", "cos", "sin", "positions") if n in tensors]
    operands.append(Operand("y", tensors.get("y", canonical(like(x, x.dtype))), True))
    for o in operands:
        check_reach(op, o.name, o.desc, context)
    return RopeProblem(op, tuple(operands), tuple(normal), policy=policy, rotation=rotation)


ATTRS: tuple[tuple[str, Any], ...] = (("base", None), ("rotary_dim", None), ("interleaved", False), ("scaling", None))
DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("rope", ("x", "cos", "sin", "positions"), ("y",), _make, ("cos", "sin", "positions"), (*ATTRS, ("inverse", False))),
)
