"""Problems of attention by a covering design: every two values of any two factors that an engine takes together meet in some row.

A row says what the kernels' text depends on; `draw` makes any number of problems of it, which differ in extents, strides and numbers.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from oxidnn.device import DeviceInfo
from oxidnn.dtypes import BF16, BOOL, E4M3, F16, F32, F64, S32, U8, DType
from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.errors import OxidnnError
from oxidnn.ops import OPS
from oxidnn.ops.base import Policy, Problem
from oxidnn.ops.case import format_case
from oxidnn.runtime.backend import Backend
from oxidnn.tensor import TensorDesc, packed_strides
from oxidnn.testing.harness import run_problem

Row = dict[str, str]
KINDS: dict[str, DType] = {"bf16": BF16, "f16": F16, "f32": F32, "f64": F64, "e4m3": E4M3}
DIMS = {"32": 32, "64": 64, "80": 80, "128": 128, "192": 192, "256": 256, "33": 33, "320": 320}
FACTORS: dict[str, tuple[str, ...]] = {
    "dtype": ("bf16", "f16", "f32", "f64", "e4m3"),
    "dim": tuple(DIMS),
    "dim_v": ("same", "64", "48", "19"),
    "length": ("one", "few", "equal", "other", "long"),
    "heads": ("equal", "grouped", "one"),
    "causal": ("no", "top_left", "bottom_right"),
    "window": ("no", "left", "right", "both"),
    "mask": ("no", "bool", "keys", "float"),
    "bias": ("no", "full", "row"),
    "score": ("no", "softcap", "alibi", "expression", "hides"),
    "blocks": ("no", "64", "128x64"),
    "sinks": ("no", "yes"),
    "dropout": ("no", "yes"),
    "lengths": ("no", "keys", "both", "side_by_side"),
    "strides": ("packed", "lengths_first", "packed_qkv", "gaps", "misaligned"),
    "extra": ("no", "yes"),  # lse as a result; gradients of tensors of the score
}


def _makes_a_problem(op: str, row: Row) -> bool:
    if row["lengths"] == "side_by_side" and (row["mask"], row["bias"], row["blocks"]) != ("no", "no", "no"):
        return False
    return row["dtype"] != "e4m3" or op == "attention" and row["strides"] != "misaligned"


def pairs_in(row: Row) -> set[tuple[str, str, str, str]]:
    """(factor, value, factor, value)."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(FACTORS, 2)}


def covering(engine: Engine, op: str, device: DeviceInfo, pool: int = 3000, seed: int = 0) -> tuple[list[Row], int]:
    """Rows that the engine takes in which every two values meet that meet in any of a pool of random rows that it takes; how many pairs.

    Features are off as often as their row says, from always to seldom: some engines take few of them at once.
    """
    rng = np.random.default_rng(seed)
    taken: list[tuple[Row, set[tuple[str, str, str, str]]]] = []
    for _ in range(pool):
        density = rng.choice([0.1, 0.25, 0.5, 0.8])
        row = {name: str(rng.choice(values)) for name, values in FACTORS.items()}
        row |= {name: values[0] for name, values in FACTORS.items() if values[0] == "no" and rng.random() > density}
        if _makes_a_problem(op, row) and engine.check_support(draw(op, row, rng), device):
            taken.append((row, pairs_in(row)))
    left = set().union(*(pairs for _, pairs in taken))
    count, rows = len(left), []
    while left:
        row, pairs = max(taken, key=lambda one: len(one[1] & left))
        rows.append(row)
        left -= pairs
    return rows, count


def _lies(rng: np.random.Generator, kind: DType, shape: tuple[int, ...], strides: str) -> TensorDesc:
    """(batch, heads, length, dim)."""
    batch, heads, length, dim = shape
    if strides == "packed":
        return TensorDesc.packed(kind, shape)
    roomy = (max(1, batch), max(1, heads) + 2 * (strides == "packed_qkv"), max(1, length), dim + (8 if strides == "gaps" else 0))
    order = (2, 0, 1, 3) if strides == "lengths_first" else (0, 2, 1, 3)
    align = kind.num_bytes if strides == "misaligned" and kind is not F64 else 16
    return TensorDesc(kind, shape, packed_strides(roomy, order), align)


def draw(op: str, row: Row, rng: np.random.Generator, most: int = 160) -> Problem:
    """A problem of the row with at most about `most` queries and keys, 3 times that of "long" ones."""
    kind, dim, is_backward = KINDS[row["dtype"]], DIMS[row["dim"]], op == "attention_backward"
    exact, plain = F64 if kind is F64 else F32, BF16 if kind is E4M3 else kind
    dim_v = dim if row["dim_v"] == "same" else int(row["dim_v"])
    batch = int(rng.integers(1, 3))
    group = {"equal": 1, "grouped": 3, "one": 4}[row["heads"]]
    heads_kv = 1 if row["heads"] == "one" else int(rng.integers(1, 3))
    heads = heads_kv * group
    most = most if dim <= 128 else most // 2
    keys = int(rng.integers(1, most))
    length = {"one": 1, "few": int(rng.integers(2, 9)), "equal": keys, "other": int(rng.integers(1, most)), "long": keys}[row["length"]]
    if row["length"] in ("one", "few"):
        keys = int(rng.integers(1, 4 * most))
    if row["length"] == "long":
        length, keys, batch, heads, heads_kv = 2 * most + int(rng.integers(most)), 2 * most + int(rng.integers(most)), 1, group, 1
    is_varlen = row["lengths"] == "side_by_side"
    sequences = int(rng.integers(1, 5)) if is_varlen else batch
    batch = 1 if is_varlen else batch
    shapes = {"q": (batch, heads, length, dim), "k": (batch, heads_kv, keys, dim), "v": (batch, heads_kv, keys, dim_v)}
    if is_backward:
        shapes |= {"d_out": (batch, heads, length, dim_v), "out": (batch, heads, length, dim_v)}
    tensors = {n: _lies(rng, kind, s, row["strides"]) for n, s in shapes.items()}
    if is_backward:
        tensors["lse"] = TensorDesc.packed(exact, (batch, heads, length))
    attrs: dict[str, Any] = {}
    full = (sequences, heads, 1, 1) if is_varlen else (batch, heads, length, keys)
    if row["causal"] != "no":
        attrs["causal"] = row["causal"]
    if row["window"] != "no":
        left, right = (int(rng.integers(0, max(2, keys // 2))) for _ in range(2))
        attrs["window"] = {"left": (left, None), "right": (None, right), "both": (left, right)}[row["window"]]
    if row["mask"] != "no":
        shape = {"bool": full[int(rng.integers(0, 3)):], "keys": (sequences, 1, 1, keys), "float": (1, heads, length, keys)}[row["mask"]]
        tensors["mask"] = TensorDesc.packed(plain if row["mask"] == "float" else BOOL if rng.random() < 0.7 else U8, shape)
    if row["bias"] != "no":
        tensors["bias"] = TensorDesc.packed(plain if row["bias"] == "full" else exact, full if row["bias"] == "full" else (heads, 1, keys))
    if row["score"] == "softcap":
        attrs["softcap"] = 10.0
    elif row["score"] == "alibi":
        tensors["alibi"] = TensorDesc.packed(F32, (heads,))
    elif row["score"] == "expression":
        attrs["score"], tensors["slope"] = "score - 0.05 * slope * abs(j - p)", TensorDesc.packed(F32, (heads, 1, 1))
    elif row["score"] == "hides":
        attrs["score"] = "where(eq(floor(i / 3), floor(j / 5)), score, where(j < 2, score * 0.5, -inf))"
    if row["blocks"] != "no":
        blocks = (64, 64) if row["blocks"] == "64" else (128, 64)
        attrs["block_size"] = blocks
        tensors["block_mask"] = TensorDesc.packed(BOOL, (1, heads, -(-length // blocks[0]), -(-keys // blocks[1])))
    if row["sinks"] == "yes":
        tensors["sinks"] = TensorDesc.packed(exact, (heads,))
    if row["dropout"] == "yes":
        attrs["dropout"] = 0.3
    if is_varlen:
        tensors |= {n: TensorDesc.packed(S32, (sequences + 1,)) for n in ("cu_seqlens_q", "cu_seqlens_kv")}
    elif row["lengths"] != "no":
        tensors |= {n: TensorDesc.packed(S32, (batch,)) for n in ("lengths_kv", "lengths_q")[:1 + (row["lengths"] == "both")]}
    if kind is E4M3:
        tensors |= {n: TensorDesc.packed(F32, (1,)) for n in ("scale_q", "scale_k", "scale_v")}
    if row["extra"] == "yes":
        differentiable = [n for n in ("alibi", "slope") if n in tensors]
        if not is_backward:
            attrs["return_lse"] = True
        elif differentiable:
            attrs["score_gradients"] = tuple(differentiable)
    return OPS[op].make(tensors, attrs, Policy())


def _text_of(config: EngineConfig) -> tuple[tuple[str, Any], ...]:
    """What of a config shapes kernels."""
    return tuple((name, value > 1 if name == "splits" else value) for name, value in config.knobs)


def run_row(backend: Backend, op: str, engine: Engine, row: Row, at: int, draws: int, most: int = 160) -> tuple[int, list[str]]:
    """`draws` problems of the row, the `at`-th, that the engine takes, by one config, as far as they have the same: (problems run,
    failures)."""
    first: EngineConfig | None = None
    count, failures = 0, []
    for number in range(5 * draws):
        problem = draw(op, row, np.random.default_rng([number, at]), most)
        if count == draws or problem.is_empty or not engine.check_support(problem, backend.info):
            continue
        configs = engine.configs(problem, backend.info)
        config = next((c for c in configs if first is not None and _text_of(c) == _text_of(first)), configs[at % len(configs)])
        first = first or config
        count += 1
        try:
            run_problem(backend, problem, engine, config, seed=1000 * at + number)
        except OxidnnError as error:
            failures.append(f"{engine.id} {config.name} seed {1000 * at + number}: {format_case(problem)}: {type(error).__name__}: {error}")
    return count, failures
