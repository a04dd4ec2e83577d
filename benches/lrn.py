"""Local response normalisation and fractional max pooling against torch: verified on poisoned outputs, then timed interleaved.

    python benches/lrn.py [--configs] [--compile ''] [--repeats 9] [--seconds S] [--json out.json]

Needs a CUDA device and torch. The columns are those of memory_bound.py. torch normalises by an average pool over a padded copy of squares.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from memory_bound import add_options, against_torch, make_tensors, run
from verify import Tensors

from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.cuda_backend import CudaBackend

NORMALISED = ((128, 96, 55, 55), (128, 256, 27, 27), (32, 64, 56, 56))  # AlexNet's two, GoogLeNet's
POOLED = ((32, 64, 112, 112), (64, 256, 28, 28))
ALPHA, SIZE = 1e-2, 5


def cases() -> Iterator[tuple[str, Problem]]:
    for kind, layout in (("bf16", "nhwc"), ("bf16", "nchw"), ("f32", "nchw"), ("f32", "nhwc")):
        for shape in NORMALISED:
            t = f"{kind}{list(shape)}{layout}".replace(" ", "")
            for op, tensors in (("lrn", f"x={t}"), ("lrn_backward", f"dy={t} x={t}")):
                yield f"{shape[2]}_{shape[1]} {kind} {layout}", parse_case(f"{op} {tensors} size={SIZE} alpha={ALPHA}")
    for kind, layout in (("f16", "nchw"), ("f32", "nchw"), ("f32", "nhwc")):
        for n, c, h, w in POOLED:
            sizes = int(h * 0.7), int(w * 0.7)
            label, x = f"{h}_{c} {kind} {layout}", f"{kind}[{n},{c},{h},{w}]{layout}"
            y = f"{kind}[{n},{c},{sizes[0]},{sizes[1]}]{layout}"
            attrs = f"window=2 output_size=({sizes[0]},{sizes[1]})"
            yield label, parse_case(f"fractional_max_pool x={x} samples={kind}[{n},{c},2] y={y} indices={y.replace(kind, 's64')} {attrs}")
            yield label, parse_case(f"fractional_max_pool_backward dy={y} indices={y.replace(kind, 's64')} dx={x} {attrs}")


def forward(problem: Problem, t: Tensors) -> Any:
    if problem.op.startswith("lrn"):
        return F.local_response_norm(t["x"], SIZE, ALPHA, 0.75, 1.0)
    size = problem.desc("dy" if "dy" in t else "y").shape[2:]
    return F.fractional_max_pool2d(t["x"], 2, output_size=size, return_indices=True, _random_samples=t["samples"])


def call_of(problem: Problem, t: Tensors, compile_it: bool = False) -> Callable[[], Any]:
    """torch's call, which for gradients runs the backward alone."""
    function = torch.compile(forward, dynamic=False) if compile_it else forward
    if not problem.op.endswith("_backward"):
        return lambda: function(problem, t)
    leaf = t["x"].detach().requires_grad_()
    y = function(problem, t | {"x": leaf})
    y = y if isinstance(y, torch.Tensor) else y[0]
    return lambda: torch.autograd.grad(y, (leaf,), t["dy"], retain_graph=True)


def measure(backend: CudaBackend, problem: Problem, label: str, options: argparse.Namespace) -> dict[str, Any]:
    t = make_tensors(problem, 1)
    names = [o.name for o in problem.outputs]
    if "pool" in problem.op:
        shape = problem.desc("dx" if "dy" in t else "x").shape
        t["samples"] = torch.rand(*shape[:2], 2, device="cuda").clamp_(max=0.99).to(t["dy" if "dy" in t else "x"].dtype)
        if "dy" in t:
            last = torch.channels_last if problem.desc("dx").strides[1] == 1 else torch.contiguous_format
            t["x"] = torch.randn(shape, device="cuda").to(t["dy"].dtype).contiguous(memory_format=last)
            t["indices"].copy_(forward(problem, t)[1])
    wide = {n: v.double() if v.is_floating_point() and n not in names and "pool" not in problem.op else v for n, v in t.items()}
    found = call_of(problem, wide)()
    want = {n: v.double() for n, v in zip(names, found if isinstance(found, tuple) else (found,), strict=False) if n != "indices"}
    return against_torch(backend, problem, label, options, t, want, call_of, problem.num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    run(CudaBackend(), cases(), measure, parser.parse_args())


if __name__ == "__main__":
    main()
