"""Batch and group normalisation against eager and compiled PyTorch: verified against float64 on poisoned outputs, then timed interleaved.

    python benches/channel_norm.py [--match "backward 56"] [--more] [--configs] [--parts] [--workers 14 --compile 3] [--repeats 9]
                                   [--seconds S] [--json out.json]

Needs a CUDA device and torch. Shapes: benches/cases/shapes/memory_bound.json, bf16 channels last with f32 parameters; --more adds fused
forms, f32, channels first, odd and small sizes. Bytes: 2 reads + 1 write for batch norm, 4 + 1 for its gradient, 1 + 1 for group
norm, 2 + 1 for its gradient; more where more tensors take part. Columns: see moving.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from moving import Case, Forward, add_options, against, matching, operands, run
from verify import Tensors

from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.testing.cases import shapes_file

EPS = 1e-5


def line_of(op: str, n: int, c: int, spatial: tuple[int, ...], groups: int = 0, kind: str = "bf16", layout: str = "nhwc",
            is_fused: bool = False) -> str:
    """A line of the case grammar. is_fused: relu(normalised + residual), with the mask."""
    shape = ",".join(map(str, (n, c, *spatial)))
    x, vector = f"{kind}[{shape}]{layout}", f"f32[{c}]"
    stats = f"f32[{n},{groups}]" if groups else vector
    attrs = f" groups={groups}" if op.startswith("group") else ""
    if op.endswith("_backward"):
        line = f"{op} dy={x} x={x} mean={stats} rstd={stats} gamma={vector}{attrs}"
        return line + (f" mask=u8[{n},{c // 8},{','.join(map(str, spatial))}]nhwc return_residual=True" if is_fused else "")
    line = f"{op} x={x} gamma={vector} beta={vector}{attrs} return_stats=True"
    if op == "batch_norm":
        line += f" running_mean={vector} running_var={vector} training=True"
    return line + (f" residual={x} epilogue='relu(acc + residual)' return_mask=True" if is_fused else "")


def listed() -> list[Case]:
    """The shapes of the file."""
    table = json.loads(shapes_file("memory_bound").read_text(encoding="utf-8"))
    found = []
    for op in ("batch_norm", "batch_norm_backward"):
        found += [case_of(f"{e['H']}_{e['C']}", line_of(op, e["N"], e["C"], (e["H"], e["W"]))) for e in table["batchnorm_nhwc"]]
    for op in ("group_norm", "group_norm_backward"):
        found += [case_of(f"{e['H']}_{e['C']}", line_of(op, e["N"], e["C"], (e["H"], e["W"]), e["G"])) for e in table["groupnorm_nhwc"]]
    return found


def further() -> list[Case]:
    lines = (("28_512 f32", line_of("batch_norm", 64, 512, (28, 28), kind="f32")),
             ("56_256 nchw", line_of("batch_norm_backward", 64, 256, (56, 56), layout="nchw")),
             ("64_320 nchw", line_of("group_norm", 16, 320, (64, 64), 32, layout="nchw")),
             ("33_96 f32", line_of("group_norm_backward", 7, 96, (33, 33), 8, kind="f32")))
    return [case_of(label, line, True) for label, line in lines]


def more() -> list[Case]:
    found = []
    for op in ("batch_norm", "batch_norm_backward"):
        found += [
            ("56_256 fused", line_of(op, 128, 256, (56, 56), is_fused=True)),
            ("28_512 f32", line_of(op, 64, 512, (28, 28), kind="f32")),
            ("56_256 nchw", line_of(op, 64, 256, (56, 56), layout="nchw")),
            ("7_512 nchw", line_of(op, 128, 512, (7, 7), layout="nchw")),
            ("75_3", line_of(op, 33, 3, (75, 75))), ("31_72", line_of(op, 17, 72, (31, 33))),
            ("14_256 n1", line_of(op, 1, 256, (14, 14))), ("16_64 3d", line_of(op, 8, 64, (16, 32, 32)))]
    for op in ("group_norm", "group_norm_backward"):
        found += [("64_320 nchw", line_of(op, 16, 320, (64, 64), 32, layout="nchw")), ("64_320 n1", line_of(op, 1, 320, (64, 64), 32)),
                  ("33_96 f32", line_of(op, 7, 96, (33, 33), 8, kind="f32")), ("128_128", line_of(op, 8, 128, (128, 128), 32))]
    found.append(("56_256", line_of("instance_norm", 16, 256, (56, 56))))
    return [case_of(label, line, True) for label, line in found]


def case_of(label: str, line: str, is_further: bool = False) -> Case:
    problem = parse_case(line)
    leaves = ("x", "gamma", "beta", *(("residual",) if problem.has("mask") else ())) if problem.op.endswith("_backward") else ()
    return Case(label, problem, make_tensors, forward_of(problem), leaves, judge, counted_bytes(problem), is_further)


def counted_bytes(problem: Problem) -> int:
    """See the module: x (and dy) once more than they must move, for statistics of the batch."""
    again = [n for n in ("x", "dy") if problem.has(n)] if problem.op.startswith("batch_norm") else []
    return problem.num_bytes + sum(problem.desc(n).num_bytes for n in again)


def forward_of(problem: Problem) -> Forward:
    op = problem.op.removesuffix("_backward")

    def normalised(t: Tensors) -> torch.Tensor:
        if op == "batch_norm":
            return F.batch_norm(t["x"], t.get("running_mean"), t.get("running_var"), t["gamma"], t["beta"], True, 0.1, EPS)
        if op == "group_norm":
            return F.group_norm(t["x"], groups, t["gamma"].to(t["x"].dtype), t["beta"].to(t["x"].dtype), EPS)
        return F.instance_norm(t["x"], None, None, t["gamma"].to(t["x"].dtype), t["beta"].to(t["x"].dtype), eps=EPS)

    groups, is_fused = getattr(problem, "groups", 1), problem.has("mask")
    return lambda t: F.relu(normalised(t) + t["residual"]) if is_fused else normalised(t)


def make_tensors(problem: Problem) -> Tensors:
    """Operands, and what torch needs besides."""
    tensors, generator = operands(problem), torch.Generator("cuda").manual_seed(2)
    if "running_var" in tensors:
        tensors["running_var"].uniform_(0.5, 2.0, generator=generator)
    tensors.setdefault("beta", torch.zeros_like(tensors["gamma"]))
    if problem.op.endswith("_backward"):
        x = tensors["x"].double()
        n = x.shape[0]
        if problem.op.startswith("batch"):
            flat = x.movedim(1, 0).reshape(x.shape[1], -1)
        else:
            flat = x.reshape(n, tensors["mean"].shape[1], -1)
        mean = flat.mean(-1)
        tensors["mean"].copy_(mean)
        tensors["rstd"].copy_(((flat - mean[..., None]).square().mean(-1) + EPS).rsqrt())
        if problem.has("mask"):
            tensors["residual"] = torch.randn(x.shape, device="cuda", generator=generator).to(tensors["x"]).contiguous(
                memory_format=torch.channels_last)
            on = forward_of(problem)({k: v.double() for k, v in tensors.items() if v.is_floating_point()}) > 0
            weights = 2 ** torch.arange(8, device="cuda")
            bits = (on.movedim(1, -1).reshape(-1, 8) * weights).sum(1).to(torch.uint8)
            tensors["mask"].movedim(1, -1).copy_(bits.reshape(tensors["mask"].movedim(1, -1).shape))
    return tensors


def judge(case: Case, tensors: Tensors) -> Callable[[], float]:
    outputs = {o.name for o in case.problem.outputs}
    wide = {n: t.double() for n, t in tensors.items() if n not in outputs and t.is_floating_point()}
    result = case.call(wide)()
    if case.leaves:
        return against(dict(zip(("dx", "dgamma", "dbeta", "d_residual"), result, strict=False)), tensors)
    changed = {f"new_{n}": wide[n] for n in ("running_mean", "running_var") if n in wide}
    return against({"y": result} | changed, tensors)


def cases_of(options: argparse.Namespace) -> list[Case]:
    return matching(listed() + (more() if options.more else []), options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--more", action="store_true")
    add_options(parser, compile_some=3)
    run(cases_of, parser.parse_args())
