"""What all attention kernels share: which keys a query sees, how a product becomes a score, which weights are dropped.

`ScoreConsts` shape the text of ptx_templates/attention/scores.ptx.j2, `arguments` are the parameters that its macros read. Sequences count
from 0: a kernel adds %first_q and %first_kv to find its rows in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..codegen.environment import f32_literal, f64_literal
from ..codegen.pointwise import Expression
from ..ops.attention import INDICES, SCALES, AttentionProblem
from ..tensor import TensorDesc
from .base import Arg, ScalarArg, TensorArg


@dataclass(frozen=True, slots=True)
class ScoreTensor:
    """A tensor of the scores' expression. varies: along which of "bhij". is_packed: neighbouring keys are neighbours in memory. pairs:
    those from an even one on lie there as one aligned number, and are both of the tensor."""

    name: str
    dtype: str
    size: int
    varies: str
    is_packed: bool
    pairs: bool


@dataclass(frozen=True, slots=True)
class ScoreConsts:
    """expression: over "score", INDICES, tensors and scalars, or None: scores are products times the scale. compute: "f32" or "f64".
    has_left, has_right: limits of the window. is_top_left: keys and queries are counted from the first (else %shift = M - L).
    lengths: of "q", "kv" that lie in memory. is_varlen: sequences side by side. sinks: their type, or "". counts_exactly: numbers of
    queries and keys, and sums of them, have no rounding errors in `compute`. scales: of 8-bit operands, that there are. blocks: (queries,
    keys) of a block of the block mask, block_axes: along which of "bhij" it changes."""

    expression: Expression | None
    tensors: tuple[ScoreTensor, ...]
    scalars: tuple[str, ...]
    compute: str
    is_brief: bool
    has_left: bool
    has_right: bool
    is_top_left: bool
    lengths: tuple[str, ...]
    is_varlen: bool
    has_dropout: bool
    sinks: str
    counts_exactly: bool
    scales: tuple[str, ...] = ()
    blocks: tuple[int, int] = (0, 0)
    block_axes: str = ""

    @property
    def moving(self) -> tuple[ScoreTensor, ...]:
        """Tensors that change along queries or keys."""
        return tuple(t for t in self.tensors if set(t.varies) & set("ij"))

    def literal(self, value: float) -> str:
        return f64_literal(value) if self.compute == "f64" else f32_literal(value)

    @staticmethod
    def fragment(names: Sequence[str]) -> list[tuple[str, int, int]]:
        """The elements that a lane has of an m16n8 accumulator or several side by side: rows lane / 4 and 8 further, columns from
        2 * (lane % 4) on."""
        return [(name, i // 2 % 2, 8 * (i // 4) + i % 2) for i, name in enumerate(names)]

    @staticmethod
    def shares_words(elements: Sequence[tuple[str, int, int]], place: int, flipped: bool) -> bool:
        """Whether the element is the second of two neighbouring keys of a query, the first an even one, as `fragment` has them."""
        _, r, k = elements[place]
        return not flipped and place > 0 and k % 2 == 1 and elements[place - 1][1:] == (r, k - 1)

    @property
    def uses(self) -> tuple[str, ...]:
        """Operands of the expression that are no tensors and not the score."""
        return tuple(n for n in self.expression.args if n in INDICES) if self.expression is not None else ()

    def lower(self, inputs: dict[str, str], result: str) -> str:
        """PTX: result = E(inputs)."""
        assert self.expression is not None
        return self.expression.lower(inputs, [result], self.compute, self.is_brief)

    def lower_slope(self, wrt: str, inputs: dict[str, str], result: str) -> str:
        """PTX: result = dE / d wrt."""
        assert self.expression is not None
        one = "0d3FF0000000000000" if self.compute == "f64" else "0f3F800000"
        return self.expression.differentiate(wrt).lower({**inputs, "dy": one}, [result], self.compute, self.is_brief)


def _has_pairs(desc: TensorDesc, strides: tuple[int, ...]) -> bool:
    is_even = strides[3] == 1 and desc.shape[-1] % 2 == 0 and all(s % 2 == 0 for s in strides[:3])
    return is_even and desc.align % (2 * desc.dtype.num_bytes) == 0


def score_consts(p: AttentionProblem) -> ScoreConsts:
    tensors = []
    for name in p.score_tensors:
        strides, kind = p.score_strides(name), p.desc(name).dtype
        tensors.append(ScoreTensor(name, kind.name, kind.num_bytes, "".join(a for a, s in zip("bhij", strides, strict=True) if s),
                                   strides[3] == 1, _has_pairs(p.desc(name), strides)))
    lengths = tuple(n for n in ("q", "kv") if p.has(f"lengths_{n}"))
    return ScoreConsts(p.expression, tuple(tensors), p.expression.scalars if p.expression is not None else (), p.accumulator.name,
                       p.desc("q").dtype.num_bytes <= 2, p.left is not None, p.right is not None, p.alignment == "top_left", lengths,
                       p.is_varlen, p.dropout > 0, p.desc("sinks").dtype.name if p.has("sinks") else "",
                       p.len_q + p.len_kv + 1024 < 2**24, tuple(n for n in SCALES if p.has(n)), p.blocks,
                       "".join(a for a, s in zip("bhij", p.block_strides(), strict=True) if s) if p.has("block_mask") else "")


def arguments(p: AttentionProblem) -> list[Arg]:
    """The parameters that `open_scores` of the template reads."""
    number = p.accumulator.ptx
    args = [Arg("len_q", "u32", p.len_q), Arg("len_kv", "u32", p.len_kv), Arg("num_heads", "u32", p.heads),
            Arg("group", "u32", p.heads // max(1, p.heads_kv)), Arg("scale", number, p.scale)]
    args += [Arg("left", "s32", p.left)] if p.left is not None else []
    args += [Arg("right", "s32", p.right)] if p.right is not None else []
    for name in ("lengths_q", "lengths_kv", "cu_seqlens_q", "cu_seqlens_kv"):
        if p.has(name):
            args += [Arg(f"ptr_{name}", "u64", TensorArg(name)), Arg(f"step_{name}", "s64", p.desc(name).strides[0] * 4)]
    args += [Arg("num_sequences", "u32", p.batch)] if p.is_varlen else []
    if p.has("sinks"):
        sinks = p.desc("sinks")
        args += [Arg("ptr_sinks", "u64", TensorArg("sinks")), Arg("step_sinks", "s64", sinks.strides[0] * sinks.dtype.num_bytes)]
    for name in SCALES:
        if p.has(name):
            args += [Arg(f"ptr_{name}", "u64", TensorArg(name)),
                     *(Arg(f"{name}_{axis}", "s64", 4 * s) for axis, s in zip("bh", p.head_strides(name), strict=True))]
    if p.has("block_mask"):
        args.append(Arg("ptr_block_mask", "u64", TensorArg("block_mask")))
        args += [Arg(f"block_mask_{axis}", "s64", s) for axis, s in zip("bhij", p.block_strides(), strict=True) if s]
    for t in score_consts(p).tensors:
        args.append(Arg(f"ptr_{t.name}", "u64", TensorArg(t.name)))
        args += [Arg(f"{t.name}_{axis}", "s64", s * t.size) for axis, s in zip("bhij", p.score_strides(t.name), strict=True) if s]
    args += [Arg(f"scalar_{s.name}", s.type, ScalarArg(s.name)) for s in p.scalars if s.name not in ("seed", "offset")]
    if p.dropout:
        kept = 1.0 - p.dropout
        args += [Arg(n, "u64", ScalarArg(n)) for n in ("seed", "offset")]
        args += [Arg("dropout", "f32", p.dropout), Arg("kept", number, 1.0 / kept if kept > 0 else 0.0),
                 Arg("dropout_pitch", "u32", p.dropout_pitch)]
    return args
