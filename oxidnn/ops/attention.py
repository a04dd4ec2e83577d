"""Scaled dot-product attention and its gradients.

    attention q=bf16[B,H,L,D] k=bf16[B,G,M,D] v=bf16[B,G,M,E]         out (B, H, L, E), and lse (B, H, L) under return_lse
    attention_backward d_out q k v out lse                            dq, dk, dv, then dbias with a bias, dsinks with sinks, and d<name>
                                                                      of each tensor of the expression that score_gradients names

For each batch b, head h of H and query i of L, over the keys j of M of the head h // (H / G) of G:

    s[j]   = E(scale * sum over d of q[i, d] * k[j, d])         E: the scores' expression, see below
    lse    = log(sum over the visible j of e^s[j], + e^sinks[h])
    out[e] = sum over the visible j of e^(s[j] - lse) * v[j, e]

A row that sees no key gives 0 and lse -inf (with a sink: the sink), and takes no part in any gradient. Only -inf masks: other scores are
numbers, however small. What lies in keys and values that nobody sees is never used, be it NaN; but for gradients of f16 and bf16, where
a mask or an expression, and not lengths, the causal limit or the window, hides it. A value that is not finite and that some queries see can
make NaN of others in the engines of tensor cores (f16, bf16, 8 bits), where weights of 0 multiply it; numbers of keys cannot.

Visible are, with p = i + M - L under the alignment "bottom_right" and p = i under "top_left", the keys p - left <= j <= p + right of
window = (left, right), where None is no limit; causal=alignment means right = 0 besides. A window without causal counts from the bottom
right. lengths_q and lengths_kv (B,), int32, on the device: how many queries and keys of each batch there are; L and M above are then these.

cu_seqlens_q, cu_seqlens_kv (N + 1,), int32, on the device: sequences of several lengths side by side, q (1, H, T, D) or (H, T, D);
sequence n has the queries cu_seqlens_q[n] up to cu_seqlens_q[n + 1], and i, j, b, L, M count within it (b = n). Tensors of the expression
may then change along b and h only.

E, in this order: softcap: c * tanh(s / c). bias: added; (B, H, L, M) or what broadcasts to it. alibi (H,) or (B, H): alibi * |p - j|
subtracted. score: an expression over the operands score, b, h, i, j, p (all as numbers) and further tensors that broadcast to
(B, H, L, M). mask: added if it is of a float type, and where it is False (of bool or u8: 0) a key is not visible.

block_mask (B, H, ceil(L / m), ceil(M / n)) or what broadcasts to it along b and h, bool or u8, on the device: where it is False (0) no
query of a block of m queries sees any key of the block of n keys; block_size = (m, n), multiples of 64. Tiles of such blocks are not
computed.

q, k and v of 8-bit floats, forward only: each counts times its scale, scale_q, scale_k and scale_v (f32, above 0, on the device): one
number, (H,) or (B, H) of the tensor's own heads; 1 if it is not given. out_dtype: of the result, bf16 by default; a result of 8-bit
floats is divided by scale_out, as scale_q is shaped, and saturates. Weights may be rounded to e4m3 before they meet v, by 2^-4
of each or 2^-18 of the row's largest; for lse they are summed before.

dropout: chance that a weight is 0 where the others are divided by 1 - dropout; weight (b, h, i, j) is that which `dropout` of seed and
offset leaves of a tensor (B, H, L, M'), M' being M rounded up to a multiple of 4 (of several lengths: (N, H, T, T') of both totals).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from ..codegen import pointwise as expr
from ..codegen.pointwise import Expression
from ..dtypes import BF16, BOOL, E4M3, E5M2, F16, F32, F64, S32, U8, DType
from ..errors import expected
from ..tensor import TensorDesc, packed_strides
from .base import OpDef, Operand, Policy, Problem, Scalar
from .checks import (
    FLOATS,
    canonical,
    check_bool,
    check_choice,
    check_dtype,
    check_expression,
    check_number,
    check_output,
    check_reach,
    check_type,
    describe,
    is_integer,
    operand,
)
from .epilogue import scalars_of

ALIGNMENTS = ("top_left", "bottom_right")
INDICES = ("b", "h", "i", "j", "p")  # operands of an expression that are no tensors
MAX_DIM = 512
MIN_SOFTCAP = 1e-30  # scores are divided by it
DRAW = (Scalar("seed", "u64"), Scalar("offset", "u64"))
HALVES = (F16, BF16)
FP8 = (E4M3, E5M2)
SCALES = ("scale_q", "scale_k", "scale_v", "scale_out")
BLOCK = 64  # extents of blocks of a mask are multiples of it
_ROLES = ("d_out", "q", "k", "v", "out", "lse", "sinks", "block_mask", *SCALES, "lengths_q", "lengths_kv", "cu_seqlens_q", "cu_seqlens_kv")
_RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")


@dataclass(frozen=True, kw_only=True)
class AttentionProblem(Problem):
    """expression: E over "score", INDICES and tensors, None if it is the score itself. left, right: of the window, None if open.
    dropout: as a float32, 0 if none. blocks: (queries, keys) of a block of the block mask."""

    scale: float = 1.0
    expression: Expression | None = None
    alignment: str = "bottom_right"
    left: int | None = None
    right: int | None = None
    dropout: float = 0.0
    blocks: tuple[int, int] = (0, 0)

    @property
    def is_fp8(self) -> bool:
        return self.desc("q").dtype in FP8

    @property
    def is_backward(self) -> bool:
        return self.op == "attention_backward"

    @property
    def is_varlen(self) -> bool:
        return self.has("cu_seqlens_q")

    def heads_of(self, name: str) -> TensorDesc:
        """The operand as (batch, heads, length, dim), lse without the last."""
        desc = self.desc(name)
        rank = 3 if name == "lse" else 4
        return desc if desc.rank == rank else TensorDesc(desc.dtype, (1, *desc.shape), (0, *desc.strides), desc.align)

    @property
    def batch(self) -> int:
        """Sequences: of the batch, or those that lie side by side."""
        return self.desc("cu_seqlens_q").shape[0] - 1 if self.is_varlen else self.heads_of("q").shape[0]

    @property
    def heads(self) -> int:
        return self.heads_of("q").shape[1]

    @property
    def heads_kv(self) -> int:
        return self.heads_of("k").shape[1]

    @property
    def len_q(self) -> int:
        """Of all sequences together, where they lie side by side."""
        return self.heads_of("q").shape[2]

    @property
    def len_kv(self) -> int:
        return self.heads_of("k").shape[2]

    @property
    def dim_qk(self) -> int:
        return self.heads_of("q").shape[3]

    @property
    def dim_v(self) -> int:
        return self.heads_of("v").shape[3]

    @property
    def accumulator(self) -> DType:
        return F64 if self.desc("q").dtype is F64 else F32

    @property
    def score_tensors(self) -> tuple[str, ...]:
        """Names of the tensors of the expression."""
        return tuple(n for n in self.expression.args if n != "score" and n not in INDICES) if self.expression is not None else ()

    def score_strides(self, name: str) -> tuple[int, int, int, int]:
        """Element strides over (b, h, i, j) of a tensor of the expression, or of its gradient: 0 where it broadcasts."""
        desc = self.desc(name)
        shape, strides = _aligned(name, desc, self.heads)
        b, h, i, j = (0 if n == 1 else s for n, s in zip(shape, strides, strict=True))
        return b, h, i, j

    def score_shape(self, name: str) -> tuple[int, int, int, int]:
        """Extents over (b, h, i, j) of a tensor of the expression, or of its gradient: 1 where it broadcasts."""
        b, h, i, j = _aligned(name, self.desc(name), self.heads)[0]
        return b, h, i, j

    @property
    def differentiated(self) -> tuple[str, ...]:
        """Tensors of the expression whose gradients are results, the bias among them."""
        return tuple(n for n in self.score_tensors if self.is_backward and self.has(f"d{n}"))

    def head_strides(self, name: str) -> tuple[int, int]:
        """Element strides over (batch, head) of a scale: 0 where one number serves all."""
        desc = self.desc(name)
        fill = 2 - desc.rank
        b, h = (0 if n == 1 else s for n, s in zip((1,) * fill + desc.shape, (0,) * fill + desc.strides, strict=True))
        return b, h

    def block_strides(self) -> tuple[int, int, int, int]:
        """Strides of the block mask over (batch, head, block of queries, block of keys)."""
        desc = self.desc("block_mask")
        fill = 4 - desc.rank
        b, h, i, j = (0 if n == 1 else s for n, s in zip((1,) * fill + desc.shape, (0,) * fill + desc.strides, strict=True))
        return b, h, i, j

    @property
    def dropout_pitch(self) -> int:
        return -(-self.len_kv // 4) * 4

    @property
    def flops(self) -> int:
        """Of the products, counting what lies beyond a causal limit as half of all."""
        pairs = self.heads * self.len_q * self.len_kv * (1 if self.is_varlen else self.batch)
        products = 3 * self.dim_qk + 2 * self.dim_v if self.is_backward else self.dim_qk + self.dim_v
        return 2 * pairs * products // (2 if self.right == 0 else 1)


def _aligned(name: str, desc: TensorDesc, heads: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides over (b, h, i, j): a vector of alibi, (H,) or (B, H), lies along heads, others broadcast as in NumPy."""
    if name in ("alibi", "dalibi") and desc.rank <= 2:
        return ((1,) * (2 - desc.rank) + desc.shape + (1, 1)), ((0,) * (2 - desc.rank) + desc.strides + (0, 0))
    fill = (4 - desc.rank)
    return (1,) * fill + desc.shape, (0,) * fill + desc.strides


@lru_cache(maxsize=256)
def _expression(given: tuple[str, ...], mask_is_float: bool, softcap: float, score: Expression | None) -> Expression | None:
    value = expr.arg("score")
    if softcap:
        value = softcap * expr.apply("tanh", value * (1.0 / softcap))
    if "bias" in given:
        value = value + expr.arg("bias")
    if "alibi" in given:
        value = value - expr.arg("alibi") * abs(expr.arg("p") - expr.arg("j"))
    if score is not None:
        value = score.substitute({"score": value})
    if "mask" in given:
        mask = expr.arg("mask")
        # where a mask of floats is -inf no sum is taken: a key that nobody sees may be NaN
        hides = expr.apply("eq", mask, -math.inf)
        value = expr.where(hides, -math.inf, value + mask) if mask_is_float else expr.where(mask, value, -math.inf)
    return None if value == expr.arg("score") else value


def _like(dtype: DType, shape: tuple[int, ...], like: TensorDesc) -> TensorDesc:
    """A dense tensor whose dimensions but the last, which is innermost, lie in memory as those of `like` do."""
    outer = range(len(shape) - 1)
    if not shape or like.rank < len(shape) or any(like.strides[a] <= 0 and like.shape[a] > 1 for a in outer):
        return TensorDesc.packed(dtype, shape)
    order = sorted(outer, key=lambda a: (-like.strides[a] if like.shape[a] > 1 else -math.inf, a))
    return canonical(TensorDesc(dtype, shape, packed_strides(shape, (*order, len(shape) - 1))))


def _window(op: str, attrs: Mapping[str, Any], context: str) -> tuple[str, int | None, int | None, list[tuple[str, Any]]]:
    """(alignment, left, right, the attributes as they are written)."""
    causal, window = attrs.get("causal"), attrs.get("window")
    normal: list[tuple[str, Any]] = []
    alignment = "bottom_right"
    if causal is not None:
        alignment = check_choice(op, "causal", causal, ALIGNMENTS)
        normal.append(("causal", alignment))
    left = right = None
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2 or not all(w is None or is_integer(w, 0, 2**30) for w in window):
            raise expected(op, "window", repr(window), "(left, right): keys on either side, each None or an integer in 0 to 2^30",
                           context)
        left, right = (None if w is None else int(w) for w in window)
        if (left, right) != (None, None):
            normal.append(("window", (left, right)))
    return alignment, left, 0 if causal is not None else right, normal


def _check_lengths(op: str, tensors: Mapping[str, TensorDesc], batch: int, context: str) -> None:
    side_by_side = [n for n in ("cu_seqlens_q", "cu_seqlens_kv") if n in tensors]
    if len(side_by_side) == 1:
        other = "cu_seqlens_kv" if side_by_side[0] == "cu_seqlens_q" else "cu_seqlens_q"
        raise expected(op, other, "missing", f"a tensor beside {side_by_side[0]}", context)
    for name in ("lengths_q", "lengths_kv"):
        if name in tensors:
            if side_by_side:
                raise expected(op, name, "given", "no tensor beside cu_seqlens_q: it has the lengths", context)
            operand(op, name, tensors, (S32,), (batch,))
    if side_by_side:
        starts = operand(op, "cu_seqlens_q", tensors, (S32,))
        if starts.rank != 1 or starts.shape[0] < 2:
            raise expected(op, "shape of cu_seqlens_q", list(starts.shape), "(N + 1,) for N sequences, at least one", context)
        operand(op, "cu_seqlens_kv", tensors, (S32,), starts.shape)


def _check_blocks(op: str, tensors: Mapping[str, TensorDesc], given: Any, shape: tuple[int, ...],
                  context: str) -> tuple[tuple[int, int], list[Operand], list[tuple[str, Any]]]:
    """(extents of a block, the operand, the attributes as they are written)."""
    if "block_mask" not in tensors:
        if given is not None:
            raise expected(op, "block_size", repr(given), "a block_mask beside it", context)
        return (0, 0), [], []
    if "cu_seqlens_q" in tensors:
        raise expected(op, "block_mask", "given", "none beside cu_seqlens_q", context)
    pair = (given, given) if is_integer(given, BLOCK, 2**30) else given
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(is_integer(n, BLOCK, 2**30) and n % BLOCK == 0 for n in pair):
        raise expected(op, "block_size", repr(given), f"(queries, keys) of a block, or one number for both: multiples of {BLOCK}", context)
    blocks = int(pair[0]), int(pair[1])
    desc = operand(op, "block_mask", tensors, (BOOL, U8))
    full = (*shape[:2], -(-shape[2] // blocks[0]), -(-shape[3] // blocks[1]))
    aligned = (1,) * (4 - desc.rank) + desc.shape
    if len(aligned) != 4 or aligned[2:] != full[2:] or any(n not in (1, m) for n, m in zip(aligned[:2], full[:2], strict=True)):
        raise expected(op, "shape of block_mask", list(desc.shape), f"{list(full)}, where the first two may be 1 or missing", context)
    return blocks, [Operand("block_mask", desc)], [("block_size", blocks)]


def _check_scales(op: str, tensors: Mapping[str, TensorDesc], out: DType, batch: int, heads: Mapping[str, int],
                  context: str) -> list[Operand]:
    scales = []
    for name in SCALES:
        if name not in tensors:
            continue
        kind = out if name == "scale_out" else tensors["q"].dtype
        if kind not in FP8:
            what = "a result of 8-bit floats" if name == "scale_out" else "q, k and v of 8-bit floats"
            raise expected(op, name, "given", f"{what} beside it", context)
        desc = operand(op, name, tensors, (F32,))
        full = (batch, heads["k" if name in ("scale_k", "scale_v") else "q"])
        if desc.rank > 2 or any(n not in (1, m) for n, m in zip((1,) * (2 - desc.rank) + desc.shape, full, strict=True)):
            raise expected(op, f"shape of {name}", list(desc.shape), f"what broadcasts to {list(full)}, batches and heads", context)
        scales.append(Operand(name, desc))
    return scales


def _check_gradients(op: str, given: Any, named: list[str], context: str) -> tuple[str, ...]:
    if given is None:
        return ()
    wanted = tuple(given.split(",")) if isinstance(given, str) else tuple(given) if isinstance(given, (tuple, list)) else None
    allowed = [n for n in named if n not in ("bias", "mask") and f"d{n}" not in (*named, *_ROLES, *_RESULTS)]
    if wanted is None or len(set(wanted)) != len(wanted) or not all(n in allowed for n in wanted):
        names = ", ".join(allowed) or "there are none"
        raise expected(op, "score_gradients", repr(given), f"tensors of the scores, in a tuple or with commas between ({names})", context)
    return wanted


def _make(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> AttentionProblem:
    context = describe(tensors)
    is_backward = op == "attention_backward"
    q = operand(op, "q", tensors, FLOATS if is_backward else (*FLOATS, *FP8))
    if q.rank not in (3, 4):
        raise expected(op, "rank of q", q.rank, "4: (batch, heads, length, dim), or 3 without the batch", context)
    k, v = (operand(op, name, tensors, FP8 if q.dtype in FP8 else (q.dtype,)) for name in ("k", "v"))
    for name, desc in (("k", k), ("v", v)):
        if desc.rank != q.rank:
            raise expected(op, f"rank of {name}", desc.rank, f"{q.rank} as q has", context)
    *lead, heads, length, dim = q.shape
    heads_kv, keys = k.shape[-3:-1]
    if not 1 <= dim <= MAX_DIM:
        raise expected(op, "last dimension of q", dim, f"1 to {MAX_DIM}", context)
    if k.shape != (*lead, heads_kv, keys, dim):
        raise expected(op, "shape of k", list(k.shape), [*lead, "heads", "length", dim], context)
    if v.shape[:-1] != k.shape[:-1] or not 1 <= v.shape[-1] <= MAX_DIM:
        raise expected(op, "shape of v", list(v.shape), [*k.shape[:-1], f"1 to {MAX_DIM}"], context)
    if heads_kv == 0 and heads or heads_kv and heads % heads_kv:
        raise expected(op, "heads of q", heads, f"a multiple of the {heads_kv} heads of k and v", context)
    is_varlen = "cu_seqlens_q" in tensors
    batch = lead[0] if lead else 1
    if is_varlen and batch != 1:
        raise expected(op, "batch of q", batch, "1: sequences side by side lie along the length", context)
    _check_lengths(op, tensors, batch, context)
    alignment, left, right, normal = _window(op, attrs, context)

    scale = attrs.get("scale")
    number = check_number(op, "scale", 1.0 / math.sqrt(dim) if scale is None else scale, F64 if q.dtype is F64 else F32, context)
    normal += [("scale", number)] if scale is not None else []
    softcap = check_number(op, "softcap", attrs.get("softcap", 0.0), F32, context)
    if softcap and softcap < MIN_SOFTCAP:
        raise expected(op, "softcap", softcap, f"0 (none), or at least {MIN_SOFTCAP}", context)
    normal += [("softcap", softcap)] if softcap else []
    score = attrs.get("score")
    score = None if score is None else check_expression(op, "score", score)
    if score is not None and (score.num_outputs != 1 or "score" not in score.args):
        raise expected(op, "score", str(score), "an expression of one output over the operand score", context)
    normal += [("score", score)] if score is not None else []
    dropout = check_number(op, "dropout", attrs.get("dropout", 0.0), None, context)
    if not 0.0 <= dropout <= 1.0:
        raise expected(op, "dropout", dropout, "a number in [0, 1]", context)
    normal += [("dropout", dropout)] if dropout else []

    added = tuple(n for n in ("bias", "alibi", "mask") if n in tensors)
    mask_is_float = "mask" in tensors and tensors["mask"].dtype not in (BOOL, U8)
    expression = _expression(added, mask_is_float, softcap, score)
    named = [n for n in expression.args if n != "score" and n not in INDICES] if expression is not None else []
    wanted = _check_gradients(op, attrs.get("score_gradients"), named, context)
    others = [n for n in tensors if n not in _ROLES and n not in _RESULTS and n not in [f"d{w}" for w in wanted]]
    for name in named:
        if name not in tensors or name in _ROLES:
            raise expected(op, "score", f"{score}, whose {name} is missing", f"{name} among the operands, and none of {', '.join(_ROLES)}",
                           context)
    if is_backward and "dy" in named:
        raise expected(op, "score", f"{score}, which names dy", "other names: dy is what its derivative is multiplied by", context)
    for name in others:
        if name not in named:
            raise expected(op, name, "given", f"a score that uses it (score is {score})", context)
    shape = (tensors["cu_seqlens_q"].shape[0] - 1 if is_varlen else batch, heads, length, keys)
    for name in named:
        desc = tensors[name]
        check_dtype(op, name, desc, tensors, (BOOL, U8, *FLOATS) if name == "mask" else FLOATS)
        aligned = _aligned(name, desc, heads)[0]
        fixed = shape[:2] + ((1, 1) if is_varlen else shape[2:])
        if len(aligned) != 4 or any(n not in (1, m) for n, m in zip(aligned, fixed, strict=True)):
            raise expected(op, f"shape of {name}", list(desc.shape), f"what broadcasts to {list(fixed)}" + (
                ": beside cu_seqlens_q tensors change along sequences and heads only" if is_varlen else ""), context)
    given = dict.fromkeys(named) | ({"sinks": None} if "sinks" in tensors else {})
    if "sinks" in tensors:
        half = (q.dtype,) if q.dtype not in FP8 else HALVES
        operand(op, "sinks", tensors, tuple(dict.fromkeys((F32, *half, F64 if q.dtype is F64 else F32))), (heads,))
    out_shape, lse_shape = (*lead, heads, length, v.shape[-1]), (*lead, heads, length)
    exact = F64 if q.dtype is F64 else F32
    operands = [Operand("q", q), Operand("k", k), Operand("v", v)]
    if is_backward:
        saved = [operand(op, n, tensors, (q.dtype,), out_shape) for n in ("d_out", "out")]
        lse = operand(op, "lse", tensors, (exact,), lse_shape)
        operands = [Operand("d_out", saved[0]), *operands, Operand("out", saved[1]), Operand("lse", lse)]
    blocks, masks, written = _check_blocks(op, tensors, attrs.get("block_size"), shape, context)
    normal += written
    order = ("mask", "bias", "alibi", "sinks", "lengths_q", "lengths_kv", "cu_seqlens_q", "cu_seqlens_kv")
    operands += [Operand(n, tensors[n]) for n in order if n in tensors]
    operands += [*masks, *(Operand(n, tensors[n]) for n in given if n not in order)]

    def result(name: str, allowed: tuple[DType, ...], want: tuple[int, ...], like: TensorDesc) -> Operand:
        if name in tensors:
            check_output(op, name, tensors[name], want, tensors, allowed)
            return Operand(name, tensors[name], True)
        return Operand(name, _like(allowed[0], want, like), True)

    if is_backward:
        operands += [result(f"d{n}", (q.dtype,), tensors[n].shape, tensors[n]) for n in ("q", "k", "v")]
        operands += [result(f"d{n}", tuple(dict.fromkeys((tensors[n].dtype, exact))), tensors[n].shape, tensors[n])
                     for n in ("bias", "sinks") if n in tensors]
        operands += [result(f"d{n}", tuple(dict.fromkeys((tensors[n].dtype, exact))), tensors[n].shape, tensors[n]) for n in wanted]
        normal += [("score_gradients", ",".join(wanted))] if wanted else []
    else:
        allowed: tuple[DType, ...] = (q.dtype,)
        if q.dtype in FP8:
            allowed = (BF16, F16, F32, *FP8)
            kind = attrs.get("out_dtype")
            if kind is not None:
                if check_type(op, "out_dtype", kind) not in allowed:
                    raise expected(op, "out_dtype", repr(kind), ", ".join(map(str, allowed)), context)
                allowed = (check_type(op, "out_dtype", kind),)
        elif attrs.get("out_dtype") is not None and check_type(op, "out_dtype", attrs["out_dtype"]) is not q.dtype:
            raise expected(op, "out_dtype", repr(attrs["out_dtype"]), f"{q.dtype} as q has", context)
        written_out = result("out", allowed, out_shape, q)
        if written_out.desc.dtype not in (q.dtype, BF16) or q.dtype in FP8 and written_out.desc.dtype is q.dtype:
            normal.append(("out_dtype", str(written_out.desc.dtype)))
        operands += _check_scales(op, tensors, written_out.desc.dtype, batch, {"q": heads, "k": heads_kv}, context)
        operands.append(written_out)
        if check_bool(op, "return_lse", attrs.get("return_lse", False)) or "lse" in tensors:
            operands.append(result("lse", (exact,), lse_shape, TensorDesc.packed(exact, lse_shape)))
            normal.append(("return_lse", True))
    for o in operands:
        check_reach(op, o.name, o.desc, context)
    scalars = scalars_of(op, expression, exact.ptx, ("dy",) if is_backward else ())
    for scalar in scalars:
        if scalar.name in [drawn.name for drawn in DRAW]:
            raise expected(op, f"scalar {scalar.name}", "given", "names other than seed and offset, which are of dropout's draw", context)
    return AttentionProblem(op, tuple(operands), tuple(normal), scalars + (DRAW if dropout else ()), policy=policy, scale=number,
                            expression=expression, alignment=alignment, left=left, right=right, dropout=dropout, blocks=blocks)


_OPTIONAL = ("mask", "bias", "alibi", "sinks", "lengths_q", "lengths_kv", "cu_seqlens_q", "cu_seqlens_kv", "block_mask")
_ATTRS: tuple[tuple[str, Any], ...] = (("scale", None), ("causal", None), ("window", None), ("score", None), ("softcap", None),
                                       ("dropout", None), ("block_size", None))
DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("attention", ("q", "k", "v", *_OPTIONAL, *SCALES), ("out", "lse"), partial(_make, "attention"), (*_OPTIONAL, *SCALES),
          (*_ATTRS, ("return_lse", False), ("out_dtype", None))),
    OpDef("attention_backward", ("d_out", "q", "k", "v", "out", "lse", *_OPTIONAL), ("dq", "dk", "dv", "dbias", "dsinks"),
          partial(_make, "attention_backward"), _OPTIONAL, (*_ATTRS, ("score_gradients", None))),
)
