"""Appending to a cache: rows at their tokens' places; everything else stays what it was."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import F32
from ...ops.base import Problem
from ...ops.kv_cache import KvCacheAppendProblem
from . import Expected, Reference
from .rope import angle_slack, rotated, turns


def _places(p: KvCacheAppendProblem, inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(page, key within it) of every token (batch, length); page -1 for none."""
    batch, _, length, _ = p.heads_of("k").shape
    pages, _, page, _ = p.desc("k_cache").shape
    where = np.broadcast_to(inputs["slots" if p.place == "slots" else "positions"], (batch, length)).astype(np.int64)
    which, key = where // max(1, page), where % max(1, page)
    if p.place == "pages":
        table = inputs["page_table"].astype(np.int64)
        inside = (where >= 0) & (which < table.shape[1])
        which = np.take_along_axis(np.pad(table, ((0, 0), (0, 1)), constant_values=-1), np.where(inside, which, table.shape[1]), 1)
    elif p.place == "rows":
        which, key = np.where((where >= 0) & (where < page), np.arange(batch)[:, None], -1), where
    return np.where((where >= 0) & (which >= 0) & (which < pages), which, -1), key


def _append(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, KvCacheAppendProblem)
    which, key = _places(p, inputs)
    at, r = which >= 0, p.rotation
    found = {}
    for name, target in (("k", "k_cache"), ("v", "v_cache"), ("q", "q_out")):
        if not p.has(name):
            continue
        rows = inputs[name].reshape(p.heads_of(name).shape)
        size, slack = np.zeros(rows.shape), np.zeros(rows.shape)
        if r is not None and name != "v":
            slack = angle_slack(r, inputs, rows, p.compute)
            rows, size = rotated(r, rows, *turns(r, inputs, rows.shape[0], rows.shape[2]))
        desc = p.desc(target)
        if name == "q":
            found[target] = Expected(rows.reshape(desc.shape), size.reshape(desc.shape), 2, p.compute, slack=slack.reshape(desc.shape))
            continue
        want, sizes, slacks, written = (np.zeros(desc.shape, kind) for kind in (float, float, float, bool))
        place = (which[at], slice(None), key[at])
        scale = np.ones(desc.shape[:3])
        if p.has(f"{name}_scale"):
            scale = np.broadcast_to(inputs[f"{name}_scale"], desc.shape[:3])
        scale = scale[place][..., None]
        for array, value in ((want, rows), (sizes, size), (slacks, slack)):
            array[place] = value.transpose(0, 2, 1, 3)[at] / scale
        written[place] = True
        if desc.dtype.is_float:
            want = np.clip(want, -desc.dtype.max, desc.dtype.max) if desc.dtype.num_bytes == 1 else want
        else:
            slacks = slacks + 4 * F32.epsilon * (np.abs(want) + sizes)
            want = np.clip(want, -128, 127)
        found[target] = Expected(want, sizes + np.abs(want), 2, p.compute, slack=slacks, written=written)
    return found


REFERENCES: dict[str, Reference] = {"kv_cache_append": _append}
