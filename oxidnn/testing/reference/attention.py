"""Attention in float64, sequence by sequence, with all weights in memory; gradients by the formulas of `ops.attention`.

The backward pass is a function of d_out, q, k, v, out and lse as they are given, whether or not these belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...dtypes import E4M3, F16, F64
from ...ops.attention import FP8, AttentionProblem
from ...ops.base import Problem
from . import Expected, Reference
from .random import sources


@dataclass
class _Sequence:
    """rows: slices of (batch, queries, keys). s: scores (H, L, M), -inf where nothing is visible; off: what they may err;
    slope, slope_off: of the score by the product without the scale, and what it may err; kept: factors of dropout; values: operands of the
    expression."""

    at: int
    rows: slice
    keys: slice
    s: np.ndarray
    off: np.ndarray
    slope: np.ndarray
    slope_off: np.ndarray
    kept: np.ndarray
    values: dict[str, np.ndarray]


def _heads(p: AttentionProblem, name: str, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """(batch, H, L, D), times its scale: keys and values of each query's head; lse (batch, H, L)."""
    array = inputs[name].reshape(p.heads_of(name).shape)
    if p.has(f"scale_{name}"):
        scale = inputs[f"scale_{name}"]
        array = array * scale.reshape((1,) * (2 - scale.ndim) + scale.shape + (1, 1))
    return np.repeat(array, p.heads // max(1, p.heads_kv), axis=1) if name in ("k", "v") else array


def _bounds(p: AttentionProblem, inputs: Mapping[str, np.ndarray]) -> Iterator[tuple[int, int, slice, slice]]:
    """(sequence, batch, queries, keys)."""
    for n in range(p.batch):
        spans = []
        for which, total in (("q", p.len_q), ("kv", p.len_kv)):
            begin, end = 0, total
            if p.is_varlen:
                begin, end = (int(v) for v in inputs[f"cu_seqlens_{which}"][n:n + 2])
            elif p.has(f"lengths_{which}"):
                end = int(inputs[f"lengths_{which}"][n])
            begin = min(max(begin, 0), total)
            spans.append(slice(begin, min(max(end, begin), total)))
        yield n, 0 if p.is_varlen else n, spans[0], spans[1]


def _aligned(p: AttentionProblem, name: str, array: np.ndarray) -> np.ndarray:
    """A tensor of the expression with the dimensions (b, h, i, j)."""
    if name == "alibi" and array.ndim <= 2:
        return array.reshape((1,) * (2 - array.ndim) + array.shape + (1, 1))
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _sequences(p: AttentionProblem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> Iterator[_Sequence]:
    q, k = _heads(p, "q", inputs), _heads(p, "k", inputs)
    eps = p.accumulator.epsilon
    approximate = 1e-13 if p.accumulator is F64 else 2e-3 if p.desc("q").dtype.num_bytes <= 2 else 1e-5
    for n, b, rows, keys in _bounds(p, inputs):
        i, j = np.arange(rows.stop - rows.start), np.arange(keys.stop - keys.start)
        shift = 0 if p.alignment == "top_left" else len(j) - len(i)
        with np.errstate(all="ignore"):
            product = np.einsum("hid,hjd->hij", q[b, :, rows], k[b, :, keys])
            size = np.einsum("hid,hjd->hij", np.abs(q[b, :, rows]), np.abs(k[b, :, keys])) * abs(p.scale)
        score = product * p.scale
        # Tensor cores keep 13 bits behind the largest of 32 products of 8-bit floats.
        off = (2.0**-10 if p.is_fp8 else 4 * eps * p.dim_qk**0.5) * size + 4 * eps * np.abs(score)
        slope, slope_off = np.ones(score.shape), np.zeros(score.shape)
        values: dict[str, np.ndarray] = {}
        if p.expression is not None:
            values = {"score": score, "b": np.full((1, 1, 1), float(n)), "h": np.arange(p.heads, dtype=float)[:, None, None],
                      "i": i[None, :, None].astype(float), "j": j[None, None, :].astype(float),
                      "p": (i + shift)[None, :, None].astype(float)}
            for name in p.score_tensors:
                t = _aligned(p, name, inputs[name])
                t = t[n if t.shape[0] > 1 else 0]
                t = t[:, rows] if t.shape[1] > 1 else t
                values[name] = t[:, :, keys] if t.shape[2] > 1 else t
            with np.errstate(all="ignore"):
                slope = p.expression.differentiate("score").evaluate({**values, "dy": np.ones((1, 1, 1))}, scalars)[0]
                slope = np.broadcast_to(slope, score.shape)
                score = np.broadcast_to(p.expression.evaluate(values, scalars)[0], score.shape).astype(np.float64)
                parts = np.abs(np.where(np.isfinite(score), score, 0))
                for name in p.score_tensors:
                    parts = parts + np.where(np.isfinite(values[name]), np.abs(values[name]), 0)
                tail = p.expression != p.expression.expanded() or "tanh" in str(p.expression) or "exp" in str(p.expression)
                off = off * (1 + np.abs(slope)) + (approximate if tail else 8 * eps) * (1 + parts)
                slope_off = (approximate if tail else 8 * eps) * (1 + np.abs(slope))
        seen = np.ones((len(i), len(j)), bool)
        if p.right is not None:
            seen &= j[None] <= i[:, None] + shift + p.right
        if p.left is not None:
            seen &= j[None] >= i[:, None] + shift - p.left
        score = np.where(seen[None] & _blocks_seen(p, inputs, n, len(i), len(j)), score, -np.inf)
        kept = np.ones(score.shape)
        if p.dropout:
            pitch = p.dropout_pitch
            drawn = sources((p.batch * p.heads * p.len_q * pitch,), int(scalars["seed"]), int(scalars["offset"]))["uniform"]
            drawn = drawn.reshape(p.batch, p.heads, p.len_q, pitch)[n, :, :len(i), :len(j)]
            kept = np.where(drawn >= np.float32(p.dropout), 1 / (1 - p.dropout) if p.dropout < 1 else 0.0, 0.0)
        dead = np.isneginf(score)
        yield _Sequence(n, rows, keys, score, np.where(dead, 0, off), np.where(dead, 0, slope), np.where(dead, 0, slope_off), kept, values)


def _blocks_seen(p: AttentionProblem, inputs: Mapping[str, np.ndarray], at: int, queries: int, keys: int) -> np.ndarray:
    """(1 or H, queries, keys): where the block mask lets a query see a key."""
    if not p.has("block_mask"):
        return np.ones((1, 1, 1), bool)
    mask = inputs["block_mask"] != 0
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = mask[at if mask.shape[0] > 1 else 0]
    return mask[:, np.arange(queries) // p.blocks[0]][:, :, np.arange(keys) // p.blocks[1]]


def _rounding(p: AttentionProblem) -> float:
    """What weights may err, relatively: they are rounded to q's type (e4m3 of 8-bit floats) before the second product, and exponentials are
    approximate."""
    kind = p.desc("q").dtype
    if p.is_fp8:
        return E4M3.epsilon / 2 + 1e-3  # and sums of 128 keys in tensor cores
    return 1e-14 if kind is F64 else kind.epsilon + 4e-6


def _grain(p: AttentionProblem) -> float:
    """What rounding to q's type errs at most where numbers are too small for it; of 8-bit floats the largest are 2^8."""
    return 2.0**-25 if p.desc("q").dtype is F16 else E4M3.smallest / 2 * 2.0**-8 if p.is_fp8 else 0.0


def _forward(p: AttentionProblem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    v = _heads(p, "v", inputs)
    shape = p.heads_of("out").shape
    out, size, slack = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    lse, lse_slack = np.full(shape[:3], -np.inf), np.zeros(shape[:3])
    sinks = inputs["sinks"][:, None] if p.has("sinks") else np.full((p.heads, 1), -np.inf)
    lse = np.where(True, sinks[None], lse) if p.has("sinks") else lse
    eps = p.accumulator.epsilon
    for part in _sequences(p, inputs, scalars):
        b = 0 if p.is_varlen else part.at
        values = v[b, :, part.keys]
        with np.errstate(all="ignore"):
            top = np.maximum(part.s.max(2, initial=-np.inf), sinks)
            base = np.where(np.isneginf(top), 0, top)
            e = np.where(np.isneginf(part.s), 0, np.exp(part.s - base[..., None]))
            total = e.sum(2) + np.exp(sinks - base)
            w = e / np.where(total > 0, total, 1)[..., None]
            seen = np.any(w > 0, axis=1)
            clean = np.where(seen[..., None], values, 0)  # what nobody sees counts for nothing
            mean = (w * part.off).sum(2)
            dropped = w * part.kept
            out[b, :, part.rows] = np.einsum("hij,hjd->hid", dropped, clean)
            size[b, :, part.rows] = np.einsum("hij,hjd->hid", dropped, np.abs(clean))
            off = dropped * (part.off + mean[..., None] + _rounding(p))
            if p.is_fp8:
                off = off + np.where(e > 0, _grain(p) * part.kept / np.where(total > 0, total, 1)[..., None], 0)
            slack[b, :, part.rows] = np.einsum("hij,hjd->hid", off, np.abs(clean))
            if p.is_fp8 and not p.has("lse"):  # the sum may be that of rounded weights, too
                slack[b, :, part.rows] += off.sum(2)[..., None] * np.abs(out[b, :, part.rows])
            lse[b, :, part.rows] = np.log(total) + np.where(np.isneginf(top), 0, top)
            lse_slack[b, :, part.rows] = mean + 8 * eps * (1 + np.abs(base)) + _log_slack(p)
    if p.has("scale_out"):
        scale = inputs["scale_out"]
        out, size, slack = (a / scale.reshape((1,) * (2 - scale.ndim) + scale.shape + (1, 1)) for a in (out, size, slack))
    if p.desc("out").dtype in FP8:  # saturates
        out = np.clip(out, -p.desc("out").dtype.max, p.desc("out").dtype.max)
    found = {"out": Expected(out.reshape(p.desc("out").shape), size.reshape(p.desc("out").shape), max(1, p.len_kv), p.accumulator,
                             slack=slack.reshape(p.desc("out").shape))}
    if p.has("lse"):
        found["lse"] = Expected(lse.reshape(p.desc("lse").shape), None, 1, p.accumulator, slack=lse_slack.reshape(p.desc("lse").shape))
    return found


def _log_slack(p: AttentionProblem) -> float:
    """Sums of approximate exponentials, and their logarithm."""
    return 1e-13 if p.accumulator is F64 else 8e-6


def _backward(p: AttentionProblem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    q, k, v, d_out, out, lse = (_heads(p, name, inputs) for name in ("q", "k", "v", "d_out", "out", "lse"))
    group = p.heads // max(1, p.heads_kv)
    eps, u = p.accumulator.epsilon, _rounding(p)
    wide = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    # value, magnitude, slack
    sums: dict[str, list[np.ndarray]] = {name: [np.zeros(shape) for _ in range(3)] for name, shape in wide.items()}
    for name in p.differentiated:
        sums[f"d{name}"] = [np.zeros((p.batch, p.heads, 1, 1) if p.is_varlen else (p.batch, p.heads, p.len_q, p.len_kv)) for _ in range(3)]
    sinks: list[np.ndarray] = [np.zeros((p.batch, p.heads)) for _ in range(3)]
    for part in _sequences(p, inputs, scalars):
        b = 0 if p.is_varlen else part.at
        mine, keys = (b, slice(None), part.rows), (b, slice(None), part.keys)
        row_lse = lse[mine][..., None]
        with np.errstate(all="ignore"):
            w = np.where(np.isneginf(part.s) | np.isneginf(row_lse), 0, np.exp(part.s - row_lse))
            relative = part.off + u + 8 * eps * np.where(np.isfinite(row_lse), np.abs(row_lse), 0)
            k_seen, v_seen = (np.where(np.any(w > 0, axis=1)[..., None], a[keys], 0) for a in (k, v))
            dp = np.einsum("hid,hjd->hij", d_out[mine], v_seen) * part.kept
            dp_size = np.einsum("hid,hjd->hij", np.abs(d_out[mine]), np.abs(v_seen)) * part.kept
            delta = (d_out[mine] * out[mine]).sum(2)[..., None]
            delta_size = np.abs(d_out[mine] * out[mine]).sum(2)[..., None]
            de = w * (dp - delta)
            de_off = np.abs(de) * (relative + u) + w * 4 * eps * p.dim_v**0.5 * (dp_size + delta_size)
            ds = de * part.slope * p.scale
            ds_off = (de_off * np.abs(part.slope) + np.abs(de) * part.slope_off + np.abs(de * part.slope) * u) * abs(p.scale)
            grain = _grain(p) * (w > 0)
            ds_off = ds_off + grain * max(1.0, abs(p.scale))
            dropped = w * part.kept
            for name, weights, off, other, place, sum_of in (
                    ("dq", ds, ds_off, k_seen, mine, "hij,hjd->hid"), ("dk", ds, ds_off, q[mine], keys, "hij,hid->hjd"),
                    ("dv", dropped, dropped * (relative + u) + grain, d_out[mine], keys, "hij,hid->hjd")):
                sums[name][0][place] += np.einsum(sum_of, weights, other)
                sums[name][1][place] += np.einsum(sum_of, np.abs(weights), np.abs(other))
                sums[name][2][place] += np.einsum(sum_of, off, np.abs(other))
            for tensor in p.differentiated:
                assert p.expression is not None
                slope = p.expression.differentiate(tensor).evaluate({**part.values, "dy": np.ones((1, 1, 1))}, scalars)[0]
                slope = np.where(np.isneginf(part.s), 0, slope)
                bias_off = (de_off + np.abs(de) * part.slope_off) * np.abs(slope)
                if tensor != "bias":
                    bias_off = bias_off + np.abs(de) * (part.off + part.slope_off)
                for total, term in zip(sums[f"d{tensor}"], (de * slope, np.abs(de * slope), bias_off), strict=True):
                    if p.is_varlen:
                        total[part.at, :, 0, 0] += term.sum((1, 2))
                    else:
                        total[part.at, :, part.rows, part.keys] += term
            if p.has("sinks"):
                weight = np.where(np.isneginf(row_lse), 0, np.exp(inputs["sinks"][:, None, None] - row_lse))
                size = np.abs(weight) * delta_size
                slack = size * (u + 8 * eps * (p.dim_v**0.5 + np.abs(row_lse)))
                for total, term in zip(sinks, (-weight * delta, size, slack), strict=True):
                    total[part.at] += np.where(np.isneginf(row_lse), 0, term).sum((1, 2))
    found = {}
    for name, arrays in sums.items():
        shape, terms = p.desc(name).shape, p.len_kv if name == "dq" else p.len_q * group
        if name[1:] in p.differentiated:
            aligned = _aligned(p, name[1:], inputs[name[1:]]).shape
            arrays = [a.sum(tuple(x for x, n in enumerate(a.shape) if aligned[x] == 1 and n != 1), keepdims=True) for a in arrays]
            terms = max(1, p.batch * p.heads * p.len_q * p.len_kv // max(1, int(np.prod(aligned))))
        elif name != "dq":
            arrays = [a.reshape(a.shape[0], p.heads_kv, group, *a.shape[2:]).sum(2) for a in arrays]
        value, size, slack = (a.reshape(shape) for a in arrays)
        found[name] = Expected(value, size, max(1, terms), p.accumulator, slack=slack)
    if p.has("sinks"):
        value, size, slack = (a.sum(0) for a in sinks)
        found["dsinks"] = Expected(value, size, max(1, p.batch * p.len_q), p.accumulator, slack=slack)
    return found


def _attention(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, AttentionProblem)
    return (_backward if problem.is_backward else _forward)(problem, inputs, scalars)


REFERENCES: dict[str, Reference] = {"attention": _attention, "attention_backward": _attention}
