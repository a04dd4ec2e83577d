"""Softmax and its kin, vector norms, norms of 8 bits, unpooling: verified against float64 on poisoned outputs, timed beside PyTorch.

    python benches/softmax_norms.py [--match W] [--configs all] [--workers 8] [--repeats 9] [--json out.json]

Needs a CUDA device and torch. Bytes that must move: every operand once. Columns: see moving.py. Gumbel softmax is verified by its rows'
sums here, by its values in tests/; sparsemax's peer sorts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import moving
import torch
import torch.nn.functional as F
from moving import Case, Forward, add_options, against, matching, operands, run
from verify import Tensors

from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case

moving.TORCH_TYPES["e4m3"] = torch.float8_e4m3fn
ROWS, SCORES = "bf16[16384,4096]", "bf16[8,16,1024,1024]"
QUANTUM = {"e4m3": 448.0, "s8": 127.0}


def softmax(scale: float = 1.0, diagonal: int | None = None) -> Forward:
    def forward(t: Tensors) -> Any:
        z = t["x"] * scale if scale != 1 else t["x"]
        if "mask" in t:
            z = z.masked_fill(~t["mask"], float("-inf")) if t["mask"].dtype is torch.bool else z + t["mask"]
        if diagonal is not None:
            seen = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril(diagonal)
            z = z.masked_fill(~seen, float("-inf"))
        return z.softmax(-1)

    return forward


def sparsemax(t: Tensors) -> Any:
    z = t["x"].sort(-1, descending=True).values
    sums, k = z.cumsum(-1), torch.arange(1, z.shape[-1] + 1, device=z.device)
    support = (1 + k * z > sums).sum(-1, keepdim=True)
    return (t["x"] - (sums.gather(-1, support - 1) - 1) / support).clamp(min=0)


def rms_norm(kind: str, is_dynamic: bool) -> Forward:
    def forward(t: Tensors) -> Any:
        y = F.rms_norm(t["x"], t["x"].shape[-1:], t["gamma"], 1e-5)
        scale = y.abs().amax(-1, keepdim=True).float() / QUANTUM[kind] if is_dynamic else t["scale_y"]
        q = (y / scale).clamp(-QUANTUM[kind], QUANTUM[kind])
        return (q.to(torch.float8_e4m3fn) if kind == "e4m3" else q.round().to(torch.int8)), scale

    return forward


def norm_of_p(p: float) -> Forward:
    return lambda t: t["x"] / (t["x"].abs().pow(p).mean(-1, keepdim=True) + 1e-5).pow(1 / p) * t["gamma"]


def make(problem: Problem) -> Tensors:
    t = operands(problem)
    for name in ("g", "scale_y"):
        if name in t:
            t[name].uniform_(0.02, 0.1)
    if "mask" in t and t["mask"].dtype is torch.bool:
        t["mask"].bernoulli_(0.7)
        t["mask"][..., 0] = True
    if problem.op == "max_unpool":  # as pooling of 2 x 2 windows gives them
        n = t["x"].shape[-1]
        first = 2 * torch.arange(n, device="cuda")
        t["indices"].copy_(first[:, None] * 2 * n + first + torch.randint(0, 2, t["x"].shape, device="cuda"))
    return t


def judge(case: Case, t: Tensors) -> Callable[[], float]:
    problem = case.problem
    if problem.op == "gumbel_softmax":
        return lambda: float((t["soft" if "soft" in t else "y"].float().sum(-1) - 1).abs().max() * 2**7)
    kind = problem.outputs[0].desc.dtype.name
    if kind not in QUANTUM:
        return against(case.reference(t), t)
    wide = F.rms_norm(t["x"].double(), t["x"].shape[-1:], t["gamma"].double(), 1e-5)

    def error() -> float:
        scale = (t["row_scale"][:, None] if "row_scale" in t else t["scale_y"]).double()
        limited = wide.clamp(-QUANTUM[kind] * scale, QUANTUM[kind] * scale)
        allowed = wide.abs() / 16 + scale / 512 if kind == "e4m3" else scale * 0.501
        return float(((t["y"].double() * scale - limited).abs() / (1.01 * allowed + 1e-6)).nan_to_num(float("inf")).max())

    return error


_CASES: tuple[tuple[str, str, Forward, tuple[str, ...]], ...] = (
    ("16384x4096", f"softmax x={ROWS}", softmax(), ()), ("scaled", f"softmax x={ROWS} scale=0.125", softmax(0.125), ()),
    ("masked", f"softmax x={SCORES} mask=bool[1024,1024] scale=0.125", softmax(0.125), ()),
    ("added mask", f"softmax x={SCORES} mask=bf16[8,1,1024,1024]", softmax(), ()),
    ("causal", f"softmax x={SCORES} diagonal=0 scale=0.125", softmax(0.125, 0), ()),
    ("masked 65536", "softmax x=bf16[2048,65536] mask=bool[65536]", softmax(), ()),
    ("16384x4096", f"gumbel_softmax x={ROWS}", lambda t: F.gumbel_softmax(t["x"]), ()),
    ("hard", f"gumbel_softmax x={ROWS} hard=True", lambda t: F.gumbel_softmax(t["x"], hard=True), ()),
    ("16384x4096", f"sparsemax x={ROWS}", sparsemax, ()), ("2048x65536", "sparsemax x=bf16[2048,65536]", sparsemax, ()),
    ("16384x4096", f"normalize x={ROWS}", lambda t: F.normalize(t["x"], dim=-1), ()),
    ("16384x4096", f"normalize_backward dy={ROWS} x={ROWS}", lambda t: F.normalize(t["x"], dim=-1), ("x",)),
    ("scale norm", f"normalize x={ROWS} g=bf16[1] eps=1e-05", lambda t: t["g"] * F.normalize(t["x"], dim=-1, eps=1e-5), ()),
    ("scale norm", f"normalize_backward dy={ROWS} x={ROWS} g=bf16[1] eps=1e-05",
     lambda t: t["g"] * F.normalize(t["x"], dim=-1, eps=1e-5), ("x", "g")),
    ("weight norm", "normalize x=f32[4096,1024,3,3] g=f32[4096,1,1,1] axes=(1,2,3) eps=0.0",
     lambda t: torch._weight_norm(t["x"], t["g"], 0), ()),
    ("weight norm", "normalize_backward dy=f32[4096,1024,3,3] x=f32[4096,1024,3,3] g=f32[4096,1,1,1] axes=(1,2,3) eps=0.0",
     lambda t: torch._weight_norm(t["x"], t["g"], 0), ("x", "g")),
    ("p=3", f"power_norm x={ROWS} gamma=bf16[4096] p=3.0", norm_of_p(3.0), ()),
    ("e4m3", f"rms_norm x={ROWS} gamma=bf16[4096] scale_y=f32[1] out_dtype=e4m3", rms_norm("e4m3", False), ()),
    ("e4m3 by rows", f"rms_norm x={ROWS} gamma=bf16[4096] out_dtype=e4m3 return_scale=True", rms_norm("e4m3", True), ()),
    ("s8 by rows", f"rms_norm x={ROWS} gamma=bf16[4096] out_dtype=s8 return_scale=True", rms_norm("s8", True), ()),
    ("56_64", "max_unpool x=bf16[32,64,56,56] indices=s64[32,64,56,56] output_size=(112,112)",
     lambda t: F.max_unpool2d(t["x"], t["indices"], 2), ()),
)


def cases_of(options: argparse.Namespace) -> list[Case]:
    return matching([Case(label, parse_case(line), make, forward, leaves, judge) for label, line, forward, leaves in _CASES], options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, compile_some=0)
    run(cases_of, parser.parse_args())
