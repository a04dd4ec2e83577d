"""GEMM: d = epilogue(alpha * op(a) @ op(b) + beta * c), over broadcast batches; scaled 8-bit inputs; gated outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codegen import pointwise as expr
from ..codegen.pointwise import Expression
from ..dtypes import BF16, E4M3, E5M2, F32, F64, S8, S32, U8, DType, dtype
from ..errors import InvalidArgument, expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_bool, check_choice, check_dtype, check_number, check_output, describe
from .epilogue import accumulator_of, align_shape, default_epilogue, operands_of, resolve, scalars_of

FP8 = (E4M3, E5M2)
INT8 = (S8, U8)
BLOCK = 128  # rows, columns or k's that share a block scale
GATES = ("sigmoid", "silu", "gelu", "gelu_tanh", "relu", "tanh", "identity")
SCALES = ("scale_a", "scale_b")


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many rows (of a; columns of b) and how many k's share an element of a scale: 1, BLOCK, or 0 for all."""

    rows: int
    k: int

    @property
    def is_plain(self) -> bool:
        """A factor of the finished sum, of the tensor or of its row."""
        return self.k == 0 and self.rows != BLOCK


@dataclass(frozen=True, kw_only=True)
class GemmProblem(Problem):
    """a: (batch..., m, k) or transposed (batch..., k, m); b: (batch..., k, n) or (batch..., n, k); d: (batch..., m, n).

    `epilogue` is over "acc", the value of alpha * (a * scale_a) @ (b * scale_b) + beta * c; its second output, if it has one, is "aux".
    Its operands are floats, of 8-bit integers s32 too. As in BLAS, c is not read where beta is 0, nor a and b where alpha is.
    gate: d has n / 2 columns, gate(z[:, :n/2]) * z[:, n/2:] of z = alpha * (a * scale_a) @ (b * scale_b) + bias.
    blocks_a, blocks_b: of the scales, None without.
    """

    transpose_a: bool
    transpose_b: bool
    alpha: float
    beta: float
    m: int
    n: int
    k: int
    epilogue: Expression | None = None
    gate: str | None = None
    blocks_a: Blocks | None = None
    blocks_b: Blocks | None = None

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        return tuple(("d", name) for name in ("c", "residual") if self.has(name))

    @property
    def flops(self) -> int:
        return 2 * self.desc("d").numel * self.k * (2 if self.gate else 1)

    @property
    def is_block_scaled(self) -> bool:
        """A scale changes within the sum, or by blocks of rows."""
        return any(blocks is not None and not blocks.is_plain for blocks in (self.blocks_a, self.blocks_b))


_ATTRS = (("transpose_a", False), ("transpose_b", False), ("alpha", 1.0), ("beta", 0.0), ("epilogue", None), ("gate", None),
          ("out_dtype", None))


def scale_shape(desc: TensorDesc, is_a: bool) -> tuple[int, ...]:
    """(batch..., rows, k blocks) of scale_a, (batch..., k blocks, columns) of scale_b, of the scale as it was given: one element, a
    vector along the rows (columns), or a matrix."""
    if desc.rank >= 2:
        return desc.shape
    count = desc.numel
    return (count, 1) if is_a else (1, count)


def scale_strides(desc: TensorDesc, is_a: bool) -> tuple[int, ...]:
    """Element strides of scale_shape's axes, 0 where an extent is 1."""
    if desc.rank >= 2:
        return tuple(0 if n == 1 else s for n, s in zip(desc.shape, desc.strides, strict=True))
    step = desc.strides[0] if desc.rank and desc.numel > 1 else 0
    return (step, 0) if is_a else (0, step)


def _blocks(name: str, tensors: Mapping[str, TensorDesc], rows: int, k: int, batch: tuple[int, ...]) -> Blocks | None:
    """Blocks of the scale `name`, by its shape."""
    desc = tensors.get(name)
    if desc is None:
        return None
    is_a, context = name == "scale_a", describe(tensors)
    check_dtype("gemm", name, desc, tensors, (F32,))
    shape = scale_shape(desc, is_a)
    r, kb = shape[-2:] if is_a else shape[-2:][::-1]
    row_blocks, k_blocks = -(-rows // BLOCK), -(-k // BLOCK)
    try:
        fits = np.broadcast_shapes(shape[:-2], batch) == batch
    except ValueError:
        fits = False
    if r not in (1, rows, row_blocks) or kb not in (1, k_blocks) or not fits:
        grid = f"({rows} or {row_blocks}, {k_blocks})" if is_a else f"({k_blocks}, {rows} or {row_blocks})"
        rows_of = "rows of a" if is_a else "columns of b"
        raise expected("gemm", f"shape of {name}", list(desc.shape), f"one element, ({rows},) for the {rows_of}, or {grid} for blocks of "
                       f"{BLOCK}, batched at most as {name[-1]} is", context)
    return Blocks(0 if r == 1 else 1 if r == rows else BLOCK, 0 if kb == 1 else BLOCK)


def out_types(kind: DType, is_scaled: bool) -> tuple[DType, ...]:
    """Types d may have, the default first."""
    if kind in FP8:
        return (BF16, *(t for t in FLOATS if t is not BF16))
    if kind in INT8:
        return (F32, *(t for t in FLOATS if t is not F32)) if is_scaled else (S32, *FLOATS)
    return (kind, *(t for t in FLOATS if t is not kind))


def _make(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> GemmProblem:
    op, context = "gemm", describe(tensors)
    a, b = tensors["a"], tensors["b"]
    for name, desc in (("a", a), ("b", b)):
        if desc.rank < 2:
            raise expected(op, f"rank of {name}", desc.rank, "at least 2", context)
        check_dtype(op, name, desc, tensors, (*FLOATS, *FP8, *INT8))
    mates = next((group for group in (FP8, INT8) if a.dtype in group), (a.dtype,))
    if b.dtype not in mates:
        raise expected(op, "type of b", b.dtype, " or ".join(t.name for t in mates) + f", as a is {a.dtype}", context)
    flags = {name: check_bool(op, name, attrs.get(name, False), context) for name in ("transpose_a", "transpose_b")}
    factors = {name: check_number(op, name, attrs.get(name, default), accumulator_of(a.dtype), context)
               for name, default in (("alpha", 1.0), ("beta", 0.0))}
    m, k = a.shape[-2:][::-1] if flags["transpose_a"] else a.shape[-2:]
    k_of_b, n = b.shape[-2:][::-1] if flags["transpose_b"] else b.shape[-2:]
    if k != k_of_b:
        raise expected(op, "inner extent of b", k_of_b, f"{k}, the inner extent of a", context)
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise expected(op, "batch shape of b", list(b.shape[:-2]), f"broadcastable with {list(a.shape[:-2])}, that of a", context) from None
    blocks_a = _blocks("scale_a", tensors, m, k, a.shape[:-2])
    blocks_b = _blocks("scale_b", tensors, n, k, b.shape[:-2])
    blocks = (blocks_a, blocks_b)
    if any(x is not None and not x.is_plain for x in blocks) and a.dtype not in (*FP8, *INT8):
        raise expected(op, "type of a", a.dtype, f"{' or '.join(t.name for t in (*FP8, *INT8))} with block scales", context)
    gate = check_choice(op, "gate", attrs["gate"], GATES) if attrs.get("gate") is not None else None
    if gate is not None:
        _check_gate(n, factors["beta"], blocks, tensors, attrs)
    shape = (*(int(e) for e in batch), m, n // 2 if gate else n)

    others = {name: desc for name, desc in tensors.items() if name not in ("c", *SCALES)}
    roles = ("a", "b", "d", "aux")
    epilogue = None if gate else resolve(op, attrs.get("epilogue"), others, roles, max_outputs=2)
    extra = [Operand("bias", tensors["bias"])] if gate and "bias" in tensors else operands_of(
        op, epilogue, others, shape, -1, (*FLOATS, S32) if a.dtype in INT8 else FLOATS)
    is_plain = epilogue is None and gate is None and blocks == (None, None) and factors["alpha"] == 1.0 and not factors["beta"]
    allowed = out_types(a.dtype, not is_plain)
    d = made_output(op, "d", "out_dtype", tensors, attrs.get("out_dtype"), allowed, shape)
    outputs = [Operand("d", d, True)]
    if epilogue is not None and epilogue.num_outputs == 2:
        outputs.append(Operand("aux", made_output(op, "aux", "", tensors, None, (d.dtype, *FLOATS), shape), True))
    elif "aux" in tensors:
        raise expected(op, "aux", "given", "an epilogue of two outputs, of which it is the second", context)
    c = tensors.get("c")
    if c is not None:
        check_dtype(op, "c", c, tensors)
        align_shape(op, "c", c.shape, shape, -1)
    elif factors["beta"]:
        raise expected(op, "beta", factors["beta"], "0 unless c is given", context)

    kept: list[tuple[str, Any]] = [(name, True) for name, value in flags.items() if value]
    kept += [(name, factors[name]) for name, default in (("alpha", 1.0), ("beta", 0.0)) if factors[name] != default]
    if epilogue is not None and epilogue != default_epilogue([name for name in others if name not in roles]):
        kept.append(("epilogue", epilogue))
    if gate is not None:
        kept.append(("gate", gate))
    operands = [Operand("a", a), Operand("b", b), *extra]
    operands += [Operand(name, tensors[name]) for name in ("c", *SCALES) if name in tensors]
    scalars = scalars_of(op, epilogue, accumulator_of(a.dtype).ptx, [name for name in ("c", *SCALES) if name in tensors])
    return GemmProblem(op, (*operands, *outputs), tuple(kept), scalars, policy=policy,
                       transpose_a=flags["transpose_a"], transpose_b=flags["transpose_b"], alpha=factors["alpha"], beta=factors["beta"],
                       m=m, n=n, k=k, epilogue=epilogue, gate=gate, blocks_a=blocks_a, blocks_b=blocks_b)


def _check_gate(n: int, beta: float, blocks: tuple[Blocks | None, ...], tensors: Mapping[str, TensorDesc],
                attrs: Mapping[str, Any]) -> None:
    op, context = "gemm", describe(tensors)
    if n % 2:
        raise expected(op, "columns of b", n, "an even number with a gate: its columns, then those it is multiplied with", context)
    if any(x is not None and not x.is_plain for x in blocks):
        raise expected(op, "gate", repr(attrs["gate"]), "None with block scales", context)
    if beta or "c" in tensors:
        raise expected(op, "gate", repr(attrs["gate"]), "None with c", context)
    if attrs.get("epilogue") is not None:
        raise expected(op, "epilogue", str(attrs["epilogue"]), "None with a gate, which is the epilogue", context)
    for name, desc in tensors.items():
        if name == "bias":
            check_dtype(op, name, desc, tensors)
            if desc.shape != (n,):
                raise expected(op, "shape of bias", list(desc.shape), [n], context)
        elif name not in ("a", "b", "d", *SCALES):
            raise expected(op, name, "given", "only bias beside a gate", context)


def made_output(op: str, name: str, attribute: str, tensors: Mapping[str, TensorDesc], wanted: Any, allowed: tuple[DType, ...],
            shape: tuple[int, ...]) -> TensorDesc:
    """The output `name` as given, checked, or a packed one of the type `wanted`, else of the first allowed."""
    kind = allowed[0]
    if wanted is not None:
        try:
            kind = dtype(wanted)
        except InvalidArgument:
            raise expected(op, attribute, repr(wanted), " or ".join(t.name for t in allowed), describe(tensors)) from None
        if kind not in allowed or (name in tensors and tensors[name].dtype is not kind):
            given = f", the type of {name}" if name in tensors else ""
            raise expected(op, attribute, kind, " or ".join(t.name for t in allowed) + given, describe(tensors))
    if name in tensors:
        check_output(op, name, tensors[name], shape, tensors, allowed)
        return tensors[name]
    return TensorDesc.packed(kind, shape)


def value_of(p: GemmProblem) -> Expression | None:
    """What is written, as an expression over "acc", the bare sum: scales that are plain, alpha and beta * c under the epilogue; with a gate
    over "up" too, the sum for the column n / 2 further on, beside "bias_up" and "scale_b_up". None for the bare sum."""
    def scaled(sum_: Expression, suffix: str) -> Expression:
        for name, blocks in zip(SCALES, (p.blocks_a, p.blocks_b), strict=True):
            if blocks is not None and blocks.is_plain:
                sum_ = sum_ * expr.arg(name + (suffix if name == "scale_b" else ""))
        return sum_ if p.alpha == 1.0 else expr.const(p.alpha) * sum_

    value = scaled(expr.acc, "")
    if p.gate is not None:
        up = scaled(expr.arg("up"), "_up")
        if p.has("bias"):
            value, up = value + expr.arg("bias"), up + expr.arg("bias_up")
        return (value if p.gate == "identity" else expr.apply(p.gate, value)) * up
    if p.beta:
        value = value + (expr.arg("c") if p.beta == 1.0 else expr.const(p.beta) * expr.arg("c"))
    if p.epilogue is not None:
        return p.epilogue.substitute({"acc": value})
    return None if value == expr.acc else value


DEFINITIONS = (OpDef("gemm", ("a", "b", "bias", "c", *SCALES), ("d", "aux"), _make, ("bias", "c", *SCALES), _ATTRS),)


def accumulator(p: GemmProblem) -> DType:
    """The type of the sum: exact 32-bit integers (modulo 2^32) of 8-bit integers without block scales."""
    kind = p.desc("a").dtype
    return S32 if kind in INT8 and not p.is_block_scaled else F64 if kind is F64 else F32
