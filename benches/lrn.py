"""Local response and divisive normalisation and fractional max pooling against torch: verified on poisoned outputs, then timed interleaved.

    python benches/lrn.py [--configs] [--workers 14 --compile 3] [--repeats 9] [--seconds S] [--json out.json]

Needs a CUDA device and torch. Columns: see moving.py. torch normalises by an average pool over a padded copy of squares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from moving import Case, add_options, against, matching, operands, run
from verify import Tensors

from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case

NORMALISED = ((128, 96, 55, 55), (128, 256, 27, 27), (32, 64, 56, 56))  # AlexNet's two, GoogLeNet's
DIVIDED = (32, 64, 112, 112)
POOLED = ((32, 64, 112, 112), (64, 256, 28, 28))
ALPHA, SIZE = 1e-2, 5


def normalised(t: Tensors) -> torch.Tensor:
    return F.local_response_norm(t["x"], SIZE, ALPHA, 0.75, 1.0)


def divided(t: Tensors) -> torch.Tensor:
    return t["x"] * (1 + F.avg_pool2d(t["x"].square(), SIZE, 1, SIZE // 2)).rsqrt()


def pooled(size: tuple[int, ...]) -> Callable[[Tensors], tuple[torch.Tensor, torch.Tensor]]:
    return lambda t: F.fractional_max_pool2d(t["x"], 2, output_size=size, return_indices=True, _random_samples=t["samples"])


def pool_tensors(problem: Problem) -> Tensors:
    """Operands, and for a gradient x and its samples; the indices are torch's."""
    t = operands(problem)
    if problem.has("dx"):
        last = torch.channels_last if problem.desc("dx").strides[1] == 1 else torch.contiguous_format
        t["x"] = torch.randn(t["dx"].shape, device="cuda").to(t["dx"].dtype).contiguous(memory_format=last)
        t["samples"] = torch.empty(*t["dx"].shape[:2], 2, dtype=t["dx"].dtype, device="cuda")
    t["samples"].copy_(torch.rand(t["samples"].shape, device="cuda").clamp_(max=0.99))
    if problem.has("dx"):
        t["indices"].copy_(pooled(tuple(t["dy"].shape[2:]))(t)[1])
    return t


def judge_pool(case: Case, t: Tensors) -> Callable[[], float]:
    """In torch's own type: samples of another would choose other windows. Gradients by their indices, as torch adds up in that type."""
    if case.leaves:
        dx = torch.zeros(t["dx"].shape, dtype=torch.float64, device="cuda").flatten(2)
        dx.scatter_add_(2, t["indices"].flatten(2), t["dy"].double().flatten(2))
        return against({"dx": dx.view(t["dx"].shape)}, t)
    return against({"y": case.call(t)()[0].double()}, t)


def cases_of(options: argparse.Namespace) -> list[Case]:
    found = []
    for kind, layout in (("bf16", "nhwc"), ("bf16", "nchw"), ("f32", "nchw"), ("f32", "nhwc")):
        for shape in NORMALISED:
            t, label = f"{kind}{list(shape)}{layout}".replace(" ", ""), f"{shape[2]}_{shape[1]} {kind} {layout}"
            for op, tensors in (("lrn", f"x={t}"), ("lrn_backward", f"dy={t} x={t}")):
                problem = parse_case(f"{op} {tensors} size={SIZE} alpha={ALPHA}")
                found.append(Case(label, problem, operands, normalised, ("x",) if problem.has("dy") else ()))
    for kind, layout in (("f32", "nchw"), ("bf16", "nchw"), ("bf16", "nhwc")):
        t = f"{kind}{list(DIVIDED)}{layout}".replace(" ", "")
        for op, tensors in (("divisive_norm", f"x={t}"), ("divisive_norm_backward", f"dy={t} x={t}")):
            problem = parse_case(f"{op} {tensors} size={SIZE}")
            found.append(Case(f"{DIVIDED[2]}_{DIVIDED[1]} {kind} {layout}", problem, operands, divided,
                              ("x",) if problem.has("dy") else ()))
    for kind, layout in (("f16", "nchw"), ("f32", "nchw"), ("f32", "nhwc")):
        for n, c, h, w in POOLED:
            p, q = int(h * 0.7), int(w * 0.7)
            label, x, y = f"{h}_{c} {kind} {layout}", f"{kind}[{n},{c},{h},{w}]{layout}", f"{kind}[{n},{c},{p},{q}]{layout}"
            more = f"indices={y.replace(kind, 's64')} window=2 output_size=({p},{q})"
            for line in (f"fractional_max_pool x={x} samples={kind}[{n},{c},2] y={y}", f"fractional_max_pool_backward dy={y} dx={x}"):
                problem = parse_case(f"{line} {more}")
                found.append(Case(label, problem, pool_tensors, pooled((p, q)), ("x",) if problem.has("dy") else (), judge_pool))
    return matching(found, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    run(cases_of, parser.parse_args())
