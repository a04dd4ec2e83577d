"""Multi-head attention in float64: projections, and the reference of attention between them, whose inputs err as roundings let them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...ops.base import Problem
from ...ops.multi_head_attention import MASKS, SOURCES, MultiHeadAttentionProblem
from ..compare import accumulated_error
from . import Expected, Reference
from .attention import REFERENCES as ATTENTION
from .attention import _sequences
from .epilogue import product_error

Erring = tuple[np.ndarray, np.ndarray]  # a value, and what it may err


def _split(a: np.ndarray, count: int) -> np.ndarray:
    """(batch, heads, length, dim) of (batch, length, heads * dim)."""
    batch, length, width = a.shape
    return a.reshape(batch, length, count, width // count).swapaxes(1, 2)


def _join(a: np.ndarray) -> np.ndarray:
    batch, count, length, dim = a.shape
    return a.swapaxes(1, 2).reshape(batch, length, count * dim)


def _product(p: MultiHeadAttentionProblem, a: Erring, w: np.ndarray, added: np.ndarray | float = 0.0) -> Expected:
    """a w' and what is added to it."""
    value, error = a
    size = np.abs(value) @ np.abs(w).T + np.abs(added)
    return Expected(value @ w.T + added, size, w.shape[1] + 1, p.accumulator, slack=error @ np.abs(w).T + product_error(p) * size)


def _stored(p: MultiHeadAttentionProblem, e: Expected) -> Erring:
    """As it is stored between products, in the type of query."""
    kind = p.desc("query").dtype
    assert e.magnitude is not None and e.slack is not None
    error = e.slack + accumulated_error(p.accumulator, e.terms) * e.magnitude + kind.epsilon * np.abs(e.want) + kind.smallest
    return e.want, error


def _over_rows(p: MultiHeadAttentionProblem, a: Erring, b: np.ndarray | None = None) -> Expected:
    """a' b over all rows of all batches; without b the sum of a."""
    value, error = (x.reshape(-1, x.shape[2]) for x in a)
    if b is None:
        return Expected(value.sum(0), np.abs(value).sum(0), max(1, len(value)), p.accumulator, slack=error.sum(0))
    b = b.reshape(-1, b.shape[2])
    size = np.abs(value).T @ np.abs(b)
    return Expected(value.T @ b, size, max(1, len(value)), p.accumulator, slack=error.T @ np.abs(b) + product_error(p) * size)


def _forward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, MultiHeadAttentionProblem)
    inner, found = p.inner, {}
    values: dict[str, np.ndarray] = {n: inputs[n] for n in MASKS if n in inputs}
    errors: dict[str, np.ndarray] = {}
    for name, source in SOURCES.items():
        found[name] = _product(p, (inputs[source], np.zeros(inputs[source].shape)), inputs[f"w_{name}"], inputs.get(f"bias_{name}", 0.0))
        value, error = _stored(p, found[name])
        count = inner.heads if name == "q" else inner.heads_kv
        values[name], errors[name] = _split(value, count), _split(error, count)
    attended = ATTENTION["attention"](inner, values, scalars)
    out = attended["out"]
    assert out.magnitude is not None and out.slack is not None
    # Scores err by at most so much, weights by twice that part of them; what values err counts by their weights.
    q, off_q = values["q"], errors["q"]
    k, off_k = (np.repeat(a["k"], inner.heads // inner.heads_kv, 1) for a in (values, errors))
    moved = (off_q @ np.abs(k).swapaxes(2, 3) + (np.abs(q) + off_q) @ off_k.swapaxes(2, 3)) * abs(inner.scale)
    moved = moved.max(3, initial=0.0)
    carried = ATTENTION["attention"](inner, values | {"v": errors["v"]}, scalars)["out"].want
    slack = out.slack + 2 * moved[..., None] * out.magnitude * (1 + 2 * moved[..., None]) + carried
    found["context"] = Expected(_join(out.want), _join(out.magnitude), out.terms, p.accumulator, slack=_join(slack))
    if p.has("lse"):
        lse = attended["lse"]
        assert lse.slack is not None
        found["lse"] = Expected(lse.want, None, 1, p.accumulator, slack=lse.slack + moved)
    added = inputs.get("bias_out", 0.0) + inputs.get("residual", np.zeros(p.desc("out").shape))
    found["out"] = _product(p, _stored(p, found["context"]), inputs["w_out"], added)
    return {o.name: found[o.name] for o in p.outputs}


def _backward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, MultiHeadAttentionProblem)
    inner, d_out = p.inner, inputs["d_out"]
    none = np.zeros(d_out.shape)
    found = {"dw_out": _over_rows(p, (d_out, none), inputs["context"])}
    d_context = _stored(p, _product(p, (d_out, none), inputs["w_out"].T))
    group = inner.heads // inner.heads_kv
    values = {n: _split(inputs[n], inner.heads if n == "q" else inner.heads_kv) for n in SOURCES}
    values |= {"out": _split(inputs["context"], inner.heads), "lse": inputs["lse"], "d_out": _split(d_context[0], inner.heads)}
    values |= {n: inputs[n] for n in MASKS if n in inputs}
    attended, error = ATTENTION["attention_backward"](inner, values, scalars), _split(d_context[1], inner.heads)
    # Gradients are linear in d_out, whose error these carry.
    q, k, v = values["q"], *(np.repeat(values[n], group, 1) for n in "kv")
    carried: dict[str, np.ndarray] = {"dq": np.zeros(q.shape), "dk": np.zeros(k.shape), "dv": np.zeros(v.shape)}
    for part in _sequences(inner, values, scalars):
        b, rows, keys = part.at, part.rows, part.keys
        lse = values["lse"][b, :, rows, None]
        with np.errstate(all="ignore"):
            w = np.where(np.isneginf(part.s) | np.isneginf(lse), 0, np.exp(part.s - lse))
        off = error[b, :, rows]
        delta = (off * np.abs(values["out"][b, :, rows])).sum(2)[..., None]
        ds = w * (off @ np.abs(v[b, :, keys]).swapaxes(1, 2) * part.kept + delta) * abs(inner.scale)
        carried["dq"][b, :, rows] += ds @ np.abs(k[b, :, keys])
        carried["dk"][b, :, keys] += ds.swapaxes(1, 2) @ np.abs(q[b, :, rows])
        carried["dv"][b, :, keys] += (w * part.kept).swapaxes(1, 2) @ off
    parts: dict[str, Erring] = {}
    for name, source in SOURCES.items():
        e, more = attended[f"d{name}"], carried[f"d{name}"]
        each = 1 if name == "q" else group
        more = more.reshape(len(more), more.shape[1] // each, each, *more.shape[2:]).sum(2)
        assert e.magnitude is not None and e.slack is not None
        parts[name] = _stored(p, Expected(_join(e.want), _join(e.magnitude), e.terms, p.accumulator, slack=_join(e.slack + more)))
        found[f"d_{source}"] = _product(p, parts[name], inputs[f"w_{name}"].T)
        found[f"dw_{name}"] = _over_rows(p, parts[name], inputs[source])
        found[f"dbias_{name}"] = _over_rows(p, parts[name])
    found["dbias_out"] = _over_rows(p, (d_out, none))
    return {o.name: found[o.name] for o in p.outputs}


REFERENCES: dict[str, Reference] = {"multi_head_attention": _forward, "multi_head_attention_backward": _backward}
