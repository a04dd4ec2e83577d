"""Appending to caches: by slots, pages and rows, of any layout and type, turned or not, some tokens left out."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, E4M3, E5M2, F16, F32, F64, S8, S32, S64
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.kv_cache import KvCacheAppendProblem
from ...tensor import TensorDesc, packed_strides
from . import Fill, Sampler
from .paged_attention import cache_desc
from .rope import rotation_of

_OP = "kv_cache_append"


def _draw(rng: np.random.Generator, size: str) -> Problem:
    most = 5 if size == "tiny" else 30
    kind = (F16, BF16, BF16, F32, F64)[int(rng.integers(5))]
    cached = (kind, kind, E4M3, E5M2, S8)[int(rng.integers(5))]
    batch, heads, length = int(rng.integers(1, most)), int(rng.integers(1, 4)), int(rng.integers(1, most))
    dim = int(rng.choice([8, 16, 32, 64])) if rng.random() < 0.8 else int(rng.integers(2, 40))
    dim_v = dim if rng.random() < 0.8 else int(rng.integers(1, 40))
    place = str(rng.choice(["slots", "pages", "rows"]))
    page, each = int(rng.choice([1, 3, 8, 16])), int(rng.integers(1, 4))
    pages = batch if place == "rows" else batch * each + int(rng.integers(0, 3))
    if place == "rows":
        page = length + int(rng.integers(0, 9))
    order = (0, 2, 1, 3) if rng.random() < 0.6 else (0, 1, 2, 3)

    def rows(count: int, columns: int) -> TensorDesc:
        roomy = (batch, count + 2, length, columns) if rng.random() < 0.3 else (batch, count, length, columns)
        return TensorDesc(kind, (batch, count, length, columns), packed_strides(roomy, order))

    tensors = {"k": rows(heads, dim), "v": rows(heads, dim_v), "k_cache": cache_desc(rng, cached, (pages, heads, page, dim)),
               "v_cache": cache_desc(rng, cached, (pages, heads, page, dim_v))}
    attrs: dict[str, Any] = {}
    if rng.random() < 0.5:
        more, attrs = rotation_of(rng, kind, dim, batch, length, True)
        tensors |= more
        attrs["rope"] = True
        if rng.random() < 0.6:
            tensors["q"] = rows(heads * int(rng.integers(1, 4)), dim)
    integer = S32 if rng.random() < 0.5 else S64
    if place == "slots":
        tensors["slots"] = TensorDesc.packed(integer, (batch, length))
    else:
        tensors.setdefault("positions", TensorDesc.packed(integer, (batch, length)))
    if place == "pages":
        tensors["page_table"] = TensorDesc.packed(S32, (batch, each))
    for name in ("k_scale", "v_scale"):
        if rng.random() < (0.8 if cached is not kind else 0.1) and kind is not F64:
            full = (pages, heads, page)
            tensors[name] = TensorDesc.packed(F32, ((), (1,), (heads, 1), full, (pages, 1, page))[int(rng.integers(5))])
    return OPS[_OP].make(tensors, attrs, Policy())


def _slots(rng: np.random.Generator, problem: Problem) -> Any:
    """Places of their own; some tokens have none."""
    shape, cache = problem.desc("slots").shape, problem.desc("k_cache").shape
    count = int(np.prod(shape))
    places = rng.permutation(max(cache[0] * cache[2], count))[:count].reshape(shape)
    return np.where(rng.random(shape) < 0.2, -1, places)


def _positions(rng: np.random.Generator, problem: Problem) -> Any:
    """Different ones within a sequence; where slots say the place, any."""
    assert isinstance(problem, KvCacheAppendProblem)
    shape, room = problem.desc("positions").shape, problem.desc("k_cache").shape[2]
    if problem.place == "slots":
        return rng.integers(0, 1_000_000, shape)
    if problem.place == "pages":
        room *= problem.desc("page_table").shape[1]
    places = np.stack([rng.permutation(room + shape[-1])[:shape[-1]] for _ in range(shape[0] if len(shape) == 2 else 1)])
    return np.where(rng.random(places.shape) < 0.2, -1, places).reshape(shape)


def _table(rng: np.random.Generator, problem: Problem) -> Any:
    """Pages of their own; some entries are none."""
    shape, pages = problem.desc("page_table").shape, problem.desc("k_cache").shape[0]
    found = rng.permutation(pages)[:int(np.prod(shape))].reshape(shape)
    return np.where(rng.random(shape) < 0.1, rng.choice([-1, pages, 1 << 30], shape), found)


def _scale(rng: np.random.Generator, problem: Problem, name: str) -> Any:
    size = 1 / 40 if problem.desc("k_cache").dtype is S8 else 1.0
    return size * rng.uniform(0.5, 1.5, problem.desc(name).shape)


def _named(name: str, rng: np.random.Generator, problem: Problem) -> Any:
    return _scale(rng, problem, name) if name.endswith("scale") else rng.uniform(-1, 1, problem.desc(name).shape)


SAMPLES: dict[str, Sampler] = {_OP: _draw}
FILLS: dict[tuple[str, str], Fill] = {(_OP, "slots"): _slots, (_OP, "positions"): _positions, (_OP, "page_table"): _table}
FILLS |= {(_OP, name): partial(_named, name) for name in ("k_scale", "v_scale", "cos", "sin")}
_K = "k=bf16[2,2,3,16]nchw v=bf16[2,2,3,16]nchw"
CASES: dict[str, tuple[str, ...]] = {
    _OP: (
        f"{_OP} {_K} slots=s64[2,3] k_cache=bf16[5,2,4,16]nchw v_cache=bf16[5,2,4,16]nchw",
        f"{_OP} {_K} positions=s32[2,3] page_table=s32[2,2] k_cache=e4m3[5,2,4,16](128,16,32,1) v_cache=e4m3[5,2,4,16](128,16,32,1) "
        "k_scale=f32[2,1] v_scale=f32[2,1]",
        f"{_OP} {_K} positions=s32[2,3] q=bf16[2,6,3,16]nchw k_cache=bf16[2,2,9,16]nchw v_cache=bf16[2,2,9,16]nchw rope=True rotary_dim=8",
        f"{_OP} k=f16[2,7,16] v=f16[2,7,24] slots=s32[7] k_cache=s8[5,2,4,16]nchw v_cache=s8[5,2,4,24]nchw k_scale=f32[5,2,4] "
        "v_scale=f32[5,2,4]",
    ),
}
