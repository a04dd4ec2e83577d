"""Mixtures of experts: ids that repeat, lie outside, leave experts without rows; counts of exchanged rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, E4M3, F16, F32, F64, S8, S32, S64, U8
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.gemm import GATES
from ...ops.moe import MoeProblem
from ...tensor import TensorDesc
from . import Fill, Sampler
from .tensors import random_desc

_SIZED = ("moe_permute", "moe_unpermute", "moe_unpermute_backward")


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    most = 8 if size == "tiny" else 40
    kind = (F16, BF16, F32, F64)[int(rng.integers(4))]
    tokens, topk, experts = int(rng.integers(1, most)), int(rng.choice([1, 2, 3, 8])), int(rng.choice([1, 2, 4, 5, 40]))
    is_dense = bool(rng.random() < 0.5)  # what tensor cores and bulk copies want
    hidden, inter = (8 * int(n) for n in rng.integers(1, 5 if size == "tiny" else 9, 2)) if is_dense else rng.integers(1, 20, 2)
    if rng.random() < 0.05:
        tokens = 0
    if op not in _SIZED:
        topk, experts = min(topk, 3), min(experts, 5)

    def tensor(kind: Any, *shape: Any) -> TensorDesc:
        return TensorDesc.packed(kind, tuple(map(int, shape))) if is_dense else random_desc(rng, kind, shape)

    attrs: dict[str, Any] = {}
    exact, ids_kind = F64 if kind is F64 else F32, (S32, S64)[int(rng.integers(2))]
    ids, weights = tensor(ids_kind, tokens, topk), tensor(exact, tokens, topk)
    if op == "moe_permute":
        moved = (kind, E4M3, S8, S64)[int(rng.integers(4))]
        tensors = {"x": tensor(moved, tokens, hidden), "ids": ids}
        attrs = {"experts": experts, "first_expert": int(rng.choice([0, 0, 2]))}
    elif op in _SIZED:
        tensors = {"ys": tensor(kind, tokens * topk, hidden), "inverse": random_desc(rng, S32, (tokens, topk), is_output=True)}
        if op.endswith("backward") or rng.random() < 0.7:
            tensors["weights"] = weights
        if op.endswith("backward"):
            tensors = {"dy": tensor(kind, tokens, hidden)} | tensors
    else:
        tensors = {"x": tensor(kind, tokens, hidden), "ids": ids, "weights": weights}
        attrs = {"activation": GATES[int(rng.integers(len(GATES)))]} if rng.random() < 0.5 else {}
        if op == "moe_exchanged":
            tensors = {"x": tensors["x"], "counts": tensor(ids_kind, int(rng.integers(1, 4)), experts)}
        elif rng.random() < 0.3:
            attrs["first_expert"] = 2
        if op == "moe_quantized":
            return _draw_quantized(rng, tensors, attrs, experts, int(hidden), int(inter))
        if op == "moe_backward":
            tensors = {"dy": tensor(kind, tokens, hidden)} | tensors
        tensors |= {"w_gate_up": tensor(kind, experts, 2 * inter, hidden), "w_down": tensor(kind, experts, hidden, inter)}
    problem = OPS[op].make(tensors, attrs, Policy())
    for o in problem.outputs if rng.random() < 0.4 else ():
        tensors[o.name] = o.desc if is_dense else random_desc(rng, o.desc.dtype, o.desc.shape, is_output=True)
    return OPS[op].make(tensors, attrs, Policy())


def _draw_quantized(rng: np.random.Generator, tensors: dict[str, TensorDesc], attrs: dict[str, Any], experts: int, hidden: int,
                    inter: int) -> Problem:
    if tensors["x"].dtype is F64:
        tensors = {n: TensorDesc(F32, d.shape, d.strides) if d.dtype is F64 else d for n, d in tensors.items()}
    codes, scale = (E4M3, S8, U8)[int(rng.integers(3))], (F32, F16, BF16)[int(rng.integers(3))]
    rows, columns = ((1, 128), (128, 128), (4, 16), (1, 3))[int(rng.integers(4))]
    for name, shape in (("gate_up", (2 * inter, hidden)), ("down", (hidden, inter))):
        held = (experts, shape[0], -(-shape[1] // 2) if codes is U8 else shape[1])
        tensors[f"w_{name}"] = random_desc(rng, codes, held)
        tensors[f"scale_{name}"] = random_desc(rng, scale, (experts, -(-shape[0] // rows), -(-shape[1] // columns)))
    return OPS["moe_quantized"].make(tensors, attrs | {"block": (rows, columns)}, Policy())


def _codes(rng: np.random.Generator, problem: Problem, name: str) -> np.ndarray:
    desc = problem.desc(name)
    return rng.standard_normal(desc.shape) if desc.dtype is E4M3 else rng.integers(-128 if desc.dtype is S8 else 0, 128, desc.shape)


def _scale(rng: np.random.Generator, problem: Problem, name: str) -> np.ndarray:
    size = {"e4m3": 1.0, "s8": 64.0, "u8": 4.0}[problem.desc(name.replace("scale", "w")).dtype.name]
    return rng.uniform(0.5, 1.0, problem.desc(name).shape) / size


def _ids(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Each token's experts, mostly different ones of those here; a few of elsewhere, or none."""
    assert isinstance(problem, MoeProblem)
    p = problem
    all_experts = p.first + p.experts + 2
    ids = np.stack([rng.permutation(max(all_experts, p.topk))[: p.topk] for _ in range(p.tokens)]) if p.tokens else np.zeros((0, p.topk))
    ids = np.where(rng.random(ids.shape) < 0.1, -1, ids)
    return np.minimum(ids, p.first) if rng.random() < 0.1 else ids  # one expert has nearly all


def _inverse(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """A permutation whose last rows are of no expert."""
    assert isinstance(problem, MoeProblem)
    rows = rng.permutation(problem.rows)
    kept = problem.rows if rng.random() < 0.5 else int(rng.integers(0, problem.rows + 1))
    return np.where(rows < kept, rows, ~rows).reshape(problem.tokens, problem.topk)


def _counts(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Mostly of all rows, else of fewer or more, some below 0."""
    assert isinstance(problem, MoeProblem)
    shape = problem.desc("counts").shape
    cuts = np.sort(rng.integers(0, problem.tokens + 1, shape[0] * shape[1]))
    cuts[-1] = problem.tokens
    counts = np.diff(cuts, prepend=0).reshape(shape)
    return counts if rng.random() < 0.7 else counts + rng.integers(-1, 2, shape)


SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in (*_SIZED, "moe", "moe_backward", "moe_exchanged", "moe_quantized")}
FILLS: dict[tuple[str, str], Fill] = {(op, "ids"): _ids for op in ("moe_permute", "moe", "moe_backward", "moe_quantized")}
FILLS |= {("moe_quantized", f"{kind}_{name}"): partial(fill, name=f"{kind}_{name}") for kind, fill in (("w", _codes), ("scale", _scale))
          for name in ("gate_up", "down")}
FILLS |= {(op, "inverse"): _inverse for op in ("moe_unpermute", "moe_unpermute_backward")}
FILLS[("moe_exchanged", "counts")] = _counts
_EXPERTS = "w_gate_up=bf16[4,32,24] w_down=bf16[4,24,16]"
CASES: dict[str, tuple[str, ...]] = {
    "moe_permute": ("moe_permute x=bf16[9,40] ids=s32[9,2] experts=4", "moe_permute x=f32[0,40] ids=s64[0,2] experts=4",
                    "moe_permute x=e4m3[7,5] ids=s64[7,3] experts=300 first_expert=2",
                    "moe_permute x=f16[9000,8] ids=s32[9000,1] experts=5"),
    "moe_unpermute": ("moe_unpermute ys=bf16[18,40] inverse=s32[9,2] weights=f32[9,2]", "moe_unpermute ys=f64[9,7] inverse=s32[3,3]",
                      "moe_unpermute ys=f16[64,24] inverse=s32[2,32] weights=f32[2,32]"),
    "moe_unpermute_backward": ("moe_unpermute_backward dy=bf16[9,300] ys=bf16[18,300] inverse=s32[9,2] weights=f32[9,2]",),
    "moe": (f"moe x=bf16[9,24] ids=s32[9,2] weights=f32[9,2] {_EXPERTS}", f"moe x=bf16[0,24] ids=s32[0,2] weights=f32[0,2] {_EXPERTS}",
            f"moe x=bf16[1,24] ids=s64[1,3] weights=f32[1,3] {_EXPERTS} activation=gelu",
            "moe x=f32[5,3] ids=s32[5,2] weights=f32[5,2] w_gate_up=f32[3,10,3] w_down=f32[3,3,5] first_expert=1"),
    "moe_backward": (f"moe_backward dy=bf16[9,24] x=bf16[9,24] ids=s32[9,2] weights=f32[9,2] {_EXPERTS}",
                     f"moe_backward dy=bf16[0,24] x=bf16[0,24] ids=s32[0,2] weights=f32[0,2] {_EXPERTS}"),
    "moe_quantized": ("moe_quantized x=bf16[9,24] ids=s32[9,2] weights=f32[9,2] w_gate_up=u8[4,32,12] scale_gate_up=f16[4,32,2] "
                      "w_down=u8[4,24,8] scale_down=f16[4,24,1] block=(1,16)",
                      "moe_quantized x=f16[9,24] ids=s32[9,2] weights=f32[9,2] w_gate_up=e4m3[4,32,24] scale_gate_up=f32[4,1,1] "
                      "w_down=e4m3[4,24,16] scale_down=f32[4,1,1] block=(128,128)"),
    "moe_exchanged": (f"moe_exchanged x=bf16[21,24] counts=s32[2,4] {_EXPERTS}",),
}
