"""Unfolding and folding, deformable and causal convolution against torch: verified on poisoned outputs, then timed interleaved.

    python benches/windows.py [--match "causal"] [--configs] [--workers 14] [--repeats 9] [--seconds S] [--json out.json]

Needs a CUDA device and torch, whose deformable convolution here is made of grid_sample and a product. Bytes: inputs + outputs. Columns: see
moving.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from moving import Case, Forward, add_options, matching, operands, run
from verify import Tensors

from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case


def deformable(problem: Problem) -> Tensors:
    """Masks in (0, 1), offsets about a pixel but never whole numbers, where slopes jump."""
    tensors = operands(problem)
    tensors["mask"].sigmoid_()
    tensors["offset"].copy_(0.25 + 0.5 * torch.randint(-4, 4, tensors["offset"].shape, device="cuda"))
    return tensors


def deform(t: Tensors) -> torch.Tensor:
    """A 3x3 deformable convolution of stride and padding 1, tap by tap."""
    x, offset, mask = t["x"], t["offset"], t["mask"]
    n, channels, h, w = x.shape
    rows, columns = torch.meshgrid(torch.arange(h, device="cuda"), torch.arange(w, device="cuda"), indexing="ij")
    seen = []
    for tap in range(9):
        at = rows - 1 + tap // 3 + offset[:, 2 * tap], columns - 1 + tap % 3 + offset[:, 2 * tap + 1]
        grid = torch.stack([(2 * at[1] + 1) / w - 1, (2 * at[0] + 1) / h - 1], -1).to(x.dtype)
        seen.append(F.grid_sample(x, grid, "bilinear", "zeros", False) * mask[:, tap:tap + 1])
    every = torch.stack(seen, 2).reshape(n, channels * 9, h * w)
    return (t["w"].reshape(t["w"].shape[0], -1) @ every).reshape(n, -1, h, w)


def judge(case: Case, tensors: Tensors) -> Callable[[], float]:
    """Columns are rounded to their type before they are summed: errors are small beside the result's root mean square, not each element."""
    want = case.reference(tensors)
    allowed = {n: 2.0**-5 if tensors[n].dtype is torch.bfloat16 else 2.0**-16 for n in want}
    return lambda: max(float((tensors[n].double() - w).abs().max() / (allowed[n] * w.square().mean().sqrt())) for n, w in want.items())


def causal(t: Tensors) -> torch.Tensor:
    return F.silu(F.conv1d(F.pad(t["x"], (3, 0)), t["w"][:, None], t["bias"], groups=t["w"].shape[0]))


def lines() -> list[tuple[str, Forward, tuple[str, ...]]]:
    found: list[tuple[str, Forward, tuple[str, ...]]] = []
    for kind in ("f32", "bf16"):
        found += [
            (f"unfold x={kind}[32,64,56,56] kernel=3 padding=1", lambda t: F.unfold(t["x"], 3, padding=1), ()),
            (f"unfold x={kind}[32,64,56,56]nhwc kernel=3 padding=1", lambda t: F.unfold(t["x"], 3, padding=1), ()),
            (f"unfold x={kind}[32,3,224,224] kernel=7 stride=2 padding=3", lambda t: F.unfold(t["x"], 7, padding=3, stride=2), ()),
            (f"im2col x={kind}[32,64,56,56] kernel=3 padding=1",
             lambda t: F.unfold(t["x"], 3, padding=1).transpose(1, 2).contiguous(), ()),
            (f"fold x={kind}[32,576,3136] output_size=(56,56) kernel=3 padding=1", lambda t: F.fold(t["x"], 56, 3, padding=1), ()),
            (f"fold x={kind}[32,1024,784] output_size=(56,56) kernel=4 stride=2 padding=1",
             lambda t: F.fold(t["x"], 56, 4, padding=1, stride=2), ()),
        ]
        for layout in ("nchw", "nhwc"):
            given = (f"x={kind}[8,256,56,56]{layout} offset={kind}[8,18,56,56] w={kind}[256,256,3,3]{layout} mask={kind}[8,9,56,56] "
                     "padding=1")
            found.append((f"deform_conv {given}", deform, ()))
            found.append((f"deform_conv_backward dy={kind}[8,256,56,56]{layout} {given}", deform, ("x", "offset", "w", "mask")))
            for length in (2048, 2047):
                given = f"x={kind}[8,4096,{length}]{layout} w={kind}[4096,4] bias={kind}[4096] activation=silu"
                found.append((f"causal_conv1d {given}", causal, ()))
                found.append((f"causal_conv1d_backward dy={kind}[8,4096,{length}]{layout} {given}", causal, ("x", "w", "bias")))
    return found


def cases_of(options: argparse.Namespace) -> list[Case]:
    cases = []
    for line, forward, leaves in lines():
        problem = parse_case(line)
        is_deformable = problem.op.startswith("deform")
        make = deformable if is_deformable else operands
        label = line.split(" ", 1)[1].split(" w=")[0]
        cases.append(Case(label, problem, make, forward, leaves, judge=judge if is_deformable else None))
    return matching(cases, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    run(cases_of, parser.parse_args())
