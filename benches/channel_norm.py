"""Batch and group normalisation against eager and compiled PyTorch: verified against float64 on poisoned outputs, then timed interleaved.

    python benches/channel_norm.py [--match backward] [--more] [--configs] [--parts] [--compile 'batch_norm 112'] [--repeats 9]
                                   [--seconds S] [--json out.json]

Needs a CUDA device and torch. Shapes: benches/cases/shapes/memory_bound.json, bf16 channels last with f32 parameters; --more adds fused
forms, f32, channels first, odd and small sizes. TB/s count 2 reads + 1 write for batch norm, 4 + 1 for its gradient, 1 + 1 for group
norm, 2 + 1 for its gradient; more where more tensors take part. A row a case: our untuned choice (with --configs also the best config), its
ratio to a copy at 3.03 TB/s, and how many times as fast as PyTorch. --parts: also each launch alone. Times are medians in microseconds, L2
flushed before each run. --compile: parts of the cases' names, "all", or empty. --seconds: start no case after so long.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from memory_bound import TORCH_TYPES, add_options, against_torch, run
from verify import Tensors

from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.cuda_backend import CudaBackend
from oxidnn.testing.cases import shapes_file

EPS = 1e-5


def case_of(op: str, n: int, c: int, spatial: tuple[int, ...], groups: int = 0, kind: str = "bf16", layout: str = "nhwc",
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


def cases(more: bool) -> list[tuple[str, str]]:
    table = json.loads(shapes_file("memory_bound").read_text(encoding="utf-8"))
    found = []
    for op in ("batch_norm", "batch_norm_backward"):
        found += [(f"{e['H']}_{e['C']}", case_of(op, e["N"], e["C"], (e["H"], e["W"]))) for e in table["batchnorm_nhwc"]]
    for op in ("group_norm", "group_norm_backward"):
        found += [(f"{e['H']}_{e['C']}", case_of(op, e["N"], e["C"], (e["H"], e["W"]), e["G"])) for e in table["groupnorm_nhwc"]]
    if more:
        for op in ("batch_norm", "batch_norm_backward"):
            found += [
                ("56_256 fused", case_of(op, 128, 256, (56, 56), is_fused=True)),
                ("28_512 f32", case_of(op, 64, 512, (28, 28), kind="f32")),
                ("56_256 nchw", case_of(op, 64, 256, (56, 56), layout="nchw")),
                ("7_512 nchw", case_of(op, 128, 512, (7, 7), layout="nchw")),
                ("75_3", case_of(op, 33, 3, (75, 75))), ("31_72", case_of(op, 17, 72, (31, 33))),
                ("14_256 n1", case_of(op, 1, 256, (14, 14))), ("16_64 3d", case_of(op, 8, 64, (16, 32, 32)))]
        for op in ("group_norm", "group_norm_backward"):
            found += [("64_320 nchw", case_of(op, 16, 320, (64, 64), 32, layout="nchw")), ("64_320 n1", case_of(op, 1, 320, (64, 64), 32)),
                      ("33_96 f32", case_of(op, 7, 96, (33, 33), 8, kind="f32")), ("128_128", case_of(op, 8, 128, (128, 128), 32))]
        found.append(("56_256", case_of("instance_norm", 16, 256, (56, 56))))
    return found


def counted_bytes(problem: Problem) -> int:
    """See the module: x (and dy) once more than they must move, for statistics of the batch."""
    again = [n for n in ("x", "dy") if problem.has(n)] if problem.op.startswith("batch_norm") else []
    return problem.num_bytes + sum(problem.desc(n).num_bytes for n in again)


def forward_of(problem: Problem) -> Callable[[Tensors], torch.Tensor]:
    op = problem.op.removesuffix("_backward")

    def normalised(t: Tensors) -> torch.Tensor:
        if op == "batch_norm":
            return F.batch_norm(t["x"], t.get("running_mean"), t.get("running_var"), t["gamma"], t["beta"], True, 0.1, EPS)
        if op == "group_norm":
            return F.group_norm(t["x"], problem.groups, t["gamma"].to(t["x"].dtype), t["beta"].to(t["x"].dtype), EPS)  # type: ignore[attr-defined]
        return F.instance_norm(t["x"], None, None, t["gamma"].to(t["x"].dtype), t["beta"].to(t["x"].dtype), eps=EPS)

    is_fused = problem.has("mask")
    return lambda t: F.relu(normalised(t) + t["residual"]) if is_fused else normalised(t)


def make_tensors(problem: Problem) -> Tensors:
    """Operands (outputs of NaN), and what torch needs besides."""
    generator = torch.Generator("cuda").manual_seed(1)
    tensors: Tensors = {}
    for operand in problem.operands:
        desc = operand.desc
        kind = torch.uint8 if desc.dtype.name == "u8" else TORCH_TYPES[desc.dtype.name]
        storage = torch.empty_strided(desc.shape, desc.strides, dtype=kind, device="cuda")
        if operand.is_output:
            storage.fill_(255 if kind is torch.uint8 else float("nan"))
        elif kind is not torch.uint8:
            storage.copy_(torch.randn(desc.shape, device="cuda", generator=generator))
        if operand.name == "running_var":
            storage.uniform_(0.5, 2.0, generator=generator)
        tensors[operand.name] = storage
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


def call_of(problem: Problem, tensors: Tensors, compile_it: bool = False) -> Callable[[], Any]:
    """torch's call, which for gradients runs the backward alone."""
    function = forward_of(problem)
    if compile_it:
        torch._dynamo.reset()
        function = torch.compile(function, dynamic=False)
    if not problem.op.endswith("_backward"):
        return lambda: function(tensors)
    names = [n for n in ("x", "gamma", "beta", "residual") if n in tensors]
    leaves = {n: tensors[n].detach().requires_grad_() for n in names}
    y = function(tensors | leaves)
    return lambda: torch.autograd.grad(y, list(leaves.values()), tensors["dy"], retain_graph=True)


def reference(problem: Problem, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Outputs in float64."""
    outputs = {o.name for o in problem.outputs}
    wide = {n: t.double() for n, t in tensors.items() if n not in outputs and t.is_floating_point()}
    result = call_of(problem, wide)()
    if problem.op.endswith("_backward"):
        return dict(zip(("dx", "dgamma", "dbeta", "d_residual"), result, strict=False))
    return {"y": result} | ({f"new_{n}": wide[n] for n in ("running_mean", "running_var")} if "running_mean" in wide else {})


def measure(backend: CudaBackend, problem: Problem, label: str, options: argparse.Namespace) -> dict[str, Any]:
    tensors = make_tensors(problem)
    return against_torch(backend, problem, label, options, tensors, reference(problem, tensors), call_of, counted_bytes(problem))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="", help="only cases whose op and name hold this")
    parser.add_argument("--more", action="store_true")
    add_options(parser)
    options = parser.parse_args()

    torch.backends.cudnn.benchmark = True
    problems = [(label, parse_case(line)) for label, line in cases(options.more)]
    run(CudaBackend(0), [(label, p) for label, p in problems if options.match in f"{p.op} {label}"], measure, options)


if __name__ == "__main__":
    main()
