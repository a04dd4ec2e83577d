"""CTC and cross-entropy of a linear layer against PyTorch: verified, then timed; memory beside it.

    python benches/losses.py [--only ctc|linear] [--configs] [--repeats 5] [--json out.json]

Needs a CUDA device and torch. CTC: GPU microseconds of the loss and of the gradient beside torch's own kernels (its backward keeps what
the forward stored; ours makes it again) and, where torch hands it to cuDNN (labels of at most 256 on the CPU, blank 0), both together.
Linear: milliseconds of the loss, and of the loss with its gradients, beside F.cross_entropy(F.linear(x, w), target) and its backward, bf16;
MiB beyond x, w and the gradients; relative errors against f32. --configs: every engine and config as well. Medians, L2-cold, interleaved,
queued ahead.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from moving import median_us
from stamp import stamp

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.dispatch.select import build_plan, choose
from oxidnn.interchange import as_view
from oxidnn.ops import OPS, Policy
from oxidnn.ops.base import Problem

CTC = ((150, 64, 40, 30), (400, 32, 1000, 100), (1000, 16, 80, 250), (100, 256, 5000, 20), (2048, 4, 64, 1000))  # T, N, C, S
LINEAR = ((8192, 4096, 32000), (2048, 4096, 32000), (8192, 2048, 128256))  # rows, features, classes
MIB = 2**20


def peak(run: Callable[[], Any]) -> float:
    """MiB beyond what was there before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def timed(h: oxidnn.DnnHandle, calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    return dict(zip(calls, median_us(h._session.backend, list(calls.values()), repeats), strict=True))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def problem_of(op: str, attrs: dict[str, Any], **tensors: torch.Tensor) -> Problem:
    return OPS[op].make({n: as_view(t).desc for n, t in tensors.items()}, attrs, Policy())


def every_config(h: oxidnn.DnnHandle, problem: Problem, tensors: dict[str, torch.Tensor], repeats: int) -> list[dict[str, Any]]:
    """Times and workspaces of all configs, also of engines that leave the problem to others."""
    backend, found = h._session.backend, []
    pointers = [tensors[o.name].data_ptr() for o in problem.operands]
    for engine in ENGINES[problem.op]:
        for config in engine.configs(problem, backend.info):
            plan = build_plan(problem, engine, config, backend)
            scratch = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
            us = median_us(backend, [partial(plan.execute, pointers, scratch.data_ptr(), backend.default_stream())], repeats)[0]
            row = {"engine": engine.id, "config": config.name, "us": us, "workspace_mib": plan.workspace_bytes / MIB,
                   "estimate_us": engine.estimate(problem, config, backend.info),
                   "reason": engine.check_support(problem, backend.info).reason}
            print(f"      {engine.id} {config.name}: {us:.0f} us (estimate {row['estimate_us']:.0f}), {row['workspace_mib']:.0f} MiB, "
                  f"{len(plan.build.steps)} launches {row['reason']}", flush=True)
            found.append(row)
    return found


def ctc(h: oxidnn.DnnHandle, shape: tuple[int, ...], repeats: int, configs: bool) -> dict[str, Any]:
    frames, sequences, classes, labels = shape
    g = torch.Generator(device="cuda").manual_seed(1)
    logits = torch.randn(frames, sequences, classes, device="cuda", generator=g)
    log_probs = logits.log_softmax(-1).requires_grad_()
    targets = torch.randint(1, classes, (sequences, labels), device="cuda", generator=g)
    lengths = torch.full((sequences,), frames, device="cuda")
    counts = torch.randint(labels // 2, labels + 1, (sequences,), device="cuda", generator=g)
    host = (lengths.cpu(), counts.cpu())
    given = (log_probs.detach(), targets, lengths, counts)

    def both(log_probs: torch.Tensor, targets: torch.Tensor, lengths: Any, counts: Any) -> None:
        log_probs.grad = None
        F.ctc_loss(log_probs, targets, lengths, counts).backward()

    exact = logits.double().log_softmax(-1).requires_grad_()
    want = F.ctc_loss(exact, targets, *host)
    want.backward()
    both(log_probs, targets, *host)
    loss, gradient = h.ctc_loss(*given, return_gradient=True)
    again = h.ctc_loss(*given, return_gradient=True)
    assert exact.grad is not None and log_probs.grad is not None and torch.equal(gradient, again[1]), "not the same bits"
    row: dict[str, Any] = {"shape": shape, "loss_error": abs(float(loss) / float(want) - 1), "error": relative(gradient, exact.grad),
                           "torch_error": relative(log_probs.grad, exact.grad)}
    assert row["loss_error"] < 1e-4 and row["error"] < 1e-3, row
    plain = log_probs.detach()
    calls: dict[str, Callable[[], Any]] = {
        "loss_us": lambda: h.ctc_loss(*given), "gradient_us": lambda: h.ctc_loss_backward(*given),
        "both_us": lambda: h.ctc_loss(*given, return_gradient=True), "torch_loss_us": lambda: F.ctc_loss(plain, targets, *host),
        "torch_both_us": lambda: both(log_probs, targets, *host)}
    if labels <= 256:
        flat = torch.cat([t[:n] for t, n in zip(targets, host[1], strict=True)]).int()
        short = (flat, lengths.int(), counts.int())  # 32 bits, one beside the other, all on the device: what cuDNN's takes
        calls["cudnn_both_us"] = lambda: both(log_probs, *short)
    row |= timed(h, calls, repeats)
    print(f"ctc T={frames} N={sequences} C={classes} S={labels}: loss {row['loss_us']:.0f} us (torch {row['torch_loss_us']:.0f}), "
          f"gradient {row['gradient_us']:.0f}, both {row['both_us']:.0f} (torch {row['torch_both_us']:.0f}, "
          f"cuDNN {row.get('cudnn_both_us', 0):.0f}); error {row['error']:.1e} (torch {row['torch_error']:.1e})", flush=True)
    if configs:
        names = ("log_probs", "targets", "input_lengths", "target_lengths")
        tensors = dict(zip(names, given, strict=True))
        problem = problem_of("ctc_loss", {}, **tensors)
        row["configs"] = every_config(h, problem, tensors | {"loss": torch.empty((), device="cuda")}, repeats)
    return row


def linear(h: oxidnn.DnnHandle, shape: tuple[int, ...], repeats: int, configs: bool) -> dict[str, Any]:
    rows, features, classes = shape
    g = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(rows, features, device="cuda", generator=g).bfloat16().requires_grad_()
    w = (torch.randn(classes, features, device="cuda", generator=g) * features**-0.5).bfloat16().requires_grad_()
    target = torch.randint(0, classes, (rows,), device="cuda", generator=g)
    given = (x.detach(), w.detach(), target)

    def step() -> torch.Tensor:
        x.grad = w.grad = None
        loss = F.cross_entropy(F.linear(x, w), target)
        loss.backward()
        return loss.detach()

    def theirs() -> None:
        with torch.no_grad():
            F.cross_entropy(F.linear(x, w), target)

    gradients = (rows + classes) * features * 2 / MIB
    row: dict[str, Any] = {"shape": shape, "logits_mib": rows * classes * 2 / MIB}
    x.grad = w.grad = None
    row["torch_mib"] = peak(step) - gradients
    torch_loss = step()
    assert x.grad is not None and w.grad is not None
    torch_gradients = (x.grad.clone(), w.grad.clone())
    loss, dx, dw = h.linear_cross_entropy(*given, return_gradients=True)
    again = h.linear_cross_entropy(*given, return_gradients=True)
    assert torch.equal(dx, again[1]) and torch.equal(dw, again[2]), "not the same bits"
    del again
    wide = torch.empty(classes, features, device="cuda")
    spare = (torch.empty_like(loss), torch.empty_like(dx), wide)
    calls: dict[str, Callable[[], Any]] = {
        "torch_loss_ms": theirs, "torch_step_ms": step, "loss_ms": lambda: h.linear_cross_entropy(*given),
        "step_ms": lambda: h.linear_cross_entropy(*given, return_gradients=True),
        "step_f32_dw_ms": lambda: h.linear_cross_entropy(*given, return_gradients=True, out=spare)}
    row |= {name: us / 1e3 for name, us in timed(h, calls, repeats).items()}
    f32 = [t.float().requires_grad_() for t in given[:2]]
    for first in range(0, rows, 1024):  # torch in f32, some rows at a time
        part = F.cross_entropy(F.linear(f32[0][first:first + 1024], f32[1]), target[first:first + 1024], reduction="sum") / rows
        part.backward()
    errors = [relative(a, b.grad) for a, b in zip((dx, dw, *torch_gradients), f32 * 2, strict=True)]
    row |= dict(zip(("dx_error", "dw_error", "torch_dx_error", "torch_dw_error"), errors, strict=True))
    assert max(errors[:2]) < 0.01 and abs(float(loss) - float(torch_loss)) < 0.05, row
    del f32, part
    problem = problem_of("linear_cross_entropy", {"return_gradients": True}, x=given[0], w=given[1], target=target)
    engine, config, _ = choose(problem, h._session.backend.info, None)
    row["engine"], row["workspace_mib"] = engine.id, engine.build_steps(problem, config, h._session.backend.info).workspace_bytes / MIB
    print(f"linear {rows}x{features}, {classes} classes: loss {row['loss_ms']:.2f} ms (torch {row['torch_loss_ms']:.2f}); with gradients "
          f"{row['step_ms']:.2f} ({engine.id}; with dw in f32 {row['step_f32_dw_ms']:.2f}; torch {row['torch_step_ms']:.2f}); workspace "
          f"{row['workspace_mib']:.0f} MiB (torch {row['torch_mib']:.0f}, logits {row['logits_mib']:.0f}); errors of dx, dw "
          f"{errors[0]:.1e}, {errors[1]:.1e} (torch {errors[2]:.1e}, {errors[3]:.1e})", flush=True)
    if configs:
        tensors = {"x": given[0], "w": given[1], "target": target, "loss": loss, "dx": dx, "dw": dw}
        row["configs"] = every_config(h, problem, tensors, repeats)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("ctc", "linear"))
    parser.add_argument("--configs", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    h = oxidnn.DnnHandle(tune="off")
    record: dict[str, Any] = {**stamp(), "unit": "us of the GPU, medians", "ctc": [], "linear": []}
    for name, run, shapes in (("ctc", ctc, CTC), ("linear", linear, LINEAR)):
        if options.only not in (None, name):
            continue
        for shape in shapes:
            try:
                record[name].append(run(h, shape, options.repeats, options.configs))
            except Exception as error:
                print(f"FAILED {name} {shape}: {type(error).__name__}: {error}"[:600], flush=True)
                record[name].append({"shape": shape, "failure": str(error)[:600]})
            gc.collect()
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
