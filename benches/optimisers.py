"""Optimiser steps over the parameters of ResNet-50 against torch's foreach and fused forms: verified against torch, then timed interleaved.

    python benches/optimisers.py [--repeats 20] [--quick] [--json out.json]

Needs a CUDA device and torch. A row a case: GPU microseconds of a step (medians, interleaved, queued ahead), TB/s by the bytes that
must move, host microseconds of a warm call, and the same of torch: its foreach and its fused optimiser. The lists exceed L2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from moving import median_us
from stamp import stamp

import oxidnn


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The 161 parameters of ResNet-50: convolutions, scales and shifts of batch norm, the last linear layer."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            out = 4 * width
            for filters in ((width, channels, 1, 1), (width, width, 3, 3), (out, width, 1, 1)):
                shapes += [filters, (filters[0],), (filters[0],)]
            if block == 0:
                shapes += [(out, channels, 1, 1), (out,), (out,)]
            channels = out
    return [*shapes, (1000, 2048), (1000,)]


def host_us(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="Adam and the norm in f32 only")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    h, shapes = oxidnn.DnnHandle(), resnet50_shapes()
    count = sum(torch.Size(s).numel() for s in shapes)
    print(stamp(), f"{len(shapes)} tensors, {count} elements")

    def lists(kind: torch.dtype = torch.float32, scale: float = 1.0) -> list[torch.Tensor]:
        return [torch.randn(s, device="cuda").mul_(scale).to(kind) for s in shapes]

    def zeros() -> list[torch.Tensor]:
        return [torch.zeros(s, device="cuda") for s in shapes]

    def check(name: str, mine: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float = 2e-5) -> None:
        worst = max(float((a.double() - b.double()).abs().max()) for a, b in zip(mine, theirs, strict=True))
        assert worst < tolerance, f"{name}: differs from torch by {worst}"

    def theirs(name: str, params: list[torch.Tensor], grads: list[torch.Tensor], **more: Any) -> Callable[[], Any]:
        leaves = [torch.nn.Parameter(p) for p in params]
        for leaf, g in zip(leaves, grads, strict=True):
            leaf.grad = g
        optimiser = getattr(torch.optim, name)(leaves, lr=1e-3, **more)
        return optimiser.step

    rows: list[tuple[str, int, Callable[[], Any], dict[str, Callable[[], Any]]]] = []
    grads = lists()
    a, b, c = lists(), None, None
    b, c = [x.clone() for x in a], [x.clone() for x in a]
    m, v = zeros(), zeros()
    step = [0]

    def adam() -> None:
        step[0] += 1
        h.adam_step(a, grads, m, v, step=step[0])

    foreach, fused = theirs("Adam", b, grads, foreach=True), theirs("Adam", c, grads, fused=True)
    for run in (adam, foreach, fused):
        for _ in range(3):
            run()
    check("Adam", a, b)
    rows.append(("adam f32", 28, adam, {"foreach": foreach, "fused": fused}))
    rows.append(("grad_norm f32", 4, lambda: h.grad_norm(grads), {"foreach": lambda: torch.nn.utils.get_total_norm(grads, foreach=True)}))
    assert abs(float(h.grad_norm(grads)) / float(torch.nn.utils.get_total_norm(grads)) - 1) < 1e-5
    if not options.quick:
        sa, sb, buffers = [x.clone() for x in a], [x.clone() for x in a], zeros()
        first = [True]

        def sgd() -> None:
            h.sgd_step(sa, grads, buffers, lr=1e-3, momentum=0.9, weight_decay=1e-4, first=first[0])
            first[0] = False

        sgd_foreach = theirs("SGD", sb, grads, momentum=0.9, weight_decay=1e-4, foreach=True)
        sgd_fused = theirs("SGD", [x.clone() for x in sb], grads, momentum=0.9, weight_decay=1e-4, fused=True)
        for run in (sgd, sgd_foreach, sgd_fused):
            for _ in range(2):
                run()
        check("SGD", sa, sb)
        rows.append(("sgd momentum f32", 20, sgd, {"foreach": sgd_foreach, "fused": sgd_fused}))
        half, half_grads, masters, hm, hv = lists(torch.bfloat16), lists(torch.bfloat16), lists(), zeros(), zeros()
        rows.append(("adam bf16, f32 masters", 2 + 2 + 3 * 8, lambda: h.adam_step(half, half_grads, hm, hv, step=5, masters=masters), {}))
        wa, wm, wv = lists(), zeros(), zeros()
        rows.append(("lamb f32", 40, lambda: h.lamb_step(wa, grads, wm, wv, step=5), {}))
        clipped = lists(scale=1e-3)
        leaves = [torch.nn.Parameter(g.clone()) for g in clipped]
        for leaf, g in zip(leaves, clipped, strict=True):
            leaf.grad = g.clone()
        rows.append(("clip_grad_norm f32", 12, lambda: h.clip_grad_norm(clipped, 1e9),
                     {"foreach": lambda: torch.nn.utils.clip_grad_norm_(leaves, 1e9, foreach=True)}))
        scale, found = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
        other = [g.clone() for g in grads]
        rows.append(("unscale_grads f32", 8, lambda: h.unscale_grads(grads, scale, found),
                     {"foreach": lambda: torch._amp_foreach_non_finite_check_and_unscale_(other, found, scale)}))
    print(f"{'case':24} {'us':>8} {'TB/s':>6} {'host us':>8}   torch: us (x of ours), host us")
    results: list[dict[str, Any]] = []
    for name, bytes_each, run, others in rows:
        for call in (run, *others.values()):
            for _ in range(3):
                call()
        ours, *torch_us = median_us(h._session.backend, [run, *others.values()], options.repeats)
        result: dict[str, Any] = {"case": name, "bytes": bytes_each * count, "us": ours, "host_us": host_us(run, options.repeats)}
        line = f"{name:24} {ours:8.1f} {bytes_each * count / ours * 1e-6:6.2f} {result['host_us']:8.1f}  "
        for (label, call), us in zip(others.items(), torch_us, strict=True):
            host = host_us(call, options.repeats)
            result |= {f"{label}_us": us, f"{label}_host_us": host}
            line += f" {label} {us:.1f} ({us / ours:.2f}x), {host:.1f};"
        print(line, flush=True)
        results.append(result)
    if options.json:
        record = {"stamp": stamp(), "tensors": len(shapes), "elements": count, "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
