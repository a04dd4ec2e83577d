"""Grouped GEMMs of mixtures of experts, bf16, against torch._grouped_mm: every config verified on poisoned outputs, then timed interleaved.

    python benches/grouped_gemm.py [--models mixtral_8x7b,...] [--tokens 16,1024,...] [--directions up,down,dgrad,wgrad] [--configs N]
                                   [--repeats 9] [--seconds S] [--json out.json]

Needs a CUDA device and torch. Experts of random tokens, topk each; weights as nn.Linear has them, (experts, out, in). up: hidden -> inter,
down: inter -> hidden, dgrad and wgrad: of up. Sizes stay on the device on both sides. Times are medians in microseconds, work queued
ahead, L2 flushed before each run; TB/s: weights of experts that have tokens, and all rows, once.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from conv_mma import FLUSH_BYTES
from stamp import stamp
from verify import complain, fastest, verify

from oxidnn.dispatch.registry import engines_for
from oxidnn.ops.case import parse_case
from oxidnn.runtime.cuda_backend import CudaBackend

MODELS = {"mixtral_8x7b": (8, 2, 4096, 14336), "qwen3_30b_a3b": (128, 8, 2048, 768), "deepseek_v3": (256, 8, 7168, 2048),
          "gpt_oss_20b": (32, 4, 2880, 2880)}  # experts, topk, hidden, inter
CHECKED = 4  # groups compared in full


def case_line(direction: str, experts: int, rows: int, hidden: int, inter: int) -> str:
    sizes = f"group_sizes=s32[{experts}]"
    if direction == "wgrad":
        return f"grouped_gemm_wgrad a=bf16[{rows},{inter}] b=bf16[{rows},{hidden}] {sizes}"
    n, k = (hidden, inter) if direction == "down" else (inter, hidden)
    if direction == "dgrad":
        return f"grouped_gemm a=bf16[{rows},{n}] b=bf16[{experts},{n},{k}] {sizes}"
    return f"grouped_gemm a=bf16[{rows},{k}] b=bf16[{experts},{n},{k}] {sizes} transpose_b=True"


def torch_call(direction: str, tensors: dict[str, torch.Tensor], offsets: torch.Tensor) -> Callable[[], Any]:
    a, b = tensors["a"], tensors["b"]
    if direction == "wgrad":
        return lambda: torch._grouped_mm(a.t(), b, offs=offsets)
    right = b if direction == "dgrad" else b.transpose(1, 2)
    return lambda: torch._grouped_mm(a, right, offs=offsets)


def error_of(direction: str, tensors: dict[str, torch.Tensor], bounds: list[tuple[int, int]]) -> float:
    """Error of the largest groups over that of bf16 and of an f32 sum; infinite where a poisoned element was left anywhere."""
    a, b, d = tensors["a"], tensors["b"], tensors["d"]
    if bool(torch.isnan(d).any()):
        return math.inf
    worst = 0.0
    for g in sorted(range(len(bounds)), key=lambda g: bounds[g][0] - bounds[g][1])[:CHECKED]:
        begin, end = bounds[g]
        x = a[begin:end].float()
        if direction == "wgrad":
            x, y, got = x.t(), b[begin:end].float(), d[g].float()
        else:
            y, got = (b[g] if direction == "dgrad" else b[g].t()).float(), d[begin:end].float()
        if got.numel() == 0:
            continue
        want, magnitude = x @ y, x.abs() @ y.abs()
        allowed = 2.0**-8 * want.abs() + 4 * 2.0**-23 * math.sqrt(x.shape[1] + 1) * magnitude + 1e-30
        worst = max(worst, float(((got - want).abs() / allowed).max()))
    return worst


def cases(options: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    for tokens in map(int, options.tokens.split(",")):
        for model in options.models.split(","):
            for direction in options.directions.split(","):
                if tokens >= 128 or direction != "wgrad":
                    yield model, tokens, direction


def measure(backend: CudaBackend, model: str, tokens: int, direction: str, options: argparse.Namespace) -> dict[str, Any]:
    experts, topk, hidden, inter = MODELS[model]
    rows = tokens * topk
    problem = parse_case(case_line(direction, experts, rows, hidden, inter))
    generator = torch.Generator("cuda").manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for operand in problem.operands:
        if operand.name != "group_sizes":
            tensors[operand.name] = torch.empty(operand.desc.shape, dtype=torch.bfloat16, device="cuda")
            tensors[operand.name].normal_(generator=generator)
    chosen = torch.rand(tokens, experts, device="cuda", generator=generator).topk(topk, 1).indices
    sizes = torch.bincount(chosen.flatten(), minlength=experts).int()
    tensors["group_sizes"] = sizes
    offsets = sizes.cumsum(0).int()
    ends = offsets.tolist()
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    choices = [(e, c) for e in engines_for(problem.op) if e.check_support(problem, backend.info)
               and e.algorithm.name in ("wgmma_sm90", "mma_sm80")  # type: ignore[attr-defined]
               for c in e.configs(problem, backend.info)[: options.configs if "wgmma" in e.id else 1]]
    rows_, ran = verify(backend, problem, choices, tensors, lambda: error_of(direction, tensors, bounds))
    calls: list[Callable[[], Any]] = [call for _, _, call in ran]
    library: float | None = None
    try:
        theirs = torch_call(direction, tensors, offsets)
        theirs()
        calls.append(theirs)
    except Exception as error:
        print(f"torch refuses: {error}"[:200])
        theirs = None
    torch.cuda.synchronize()
    times = [statistics.median(t) for t in backend.time_launches(calls, backend.default_stream(), options.repeats, FLUSH_BYTES)]
    for (row, _, _), us in zip(ran, times, strict=False):
        row["us"] = us
    if theirs is not None:
        library = times[-1]
    used = int((sizes > 0).sum())
    moved = 2 * (used * hidden * inter + rows * (hidden + inter))
    default = min((r for r in rows_ if "us" in r), key=lambda r: r["estimate_us"], default={})
    return {"case": f"{model} {tokens} {direction}", "flops": problem.flops, "bytes": moved, "torch_us": library, "best": fastest(rows_),
            "default": default, "rows": rows_}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,16,128,1024,8192")
    parser.add_argument("--directions", default="up,down,dgrad,wgrad")
    parser.add_argument("--configs", type=int, default=6, help="only the first N of the Hopper loop by estimate")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--all", action="store_true", help="print every config")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after so many seconds")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    begin, backend, results = time.monotonic(), CudaBackend(0), []
    print(f"{'case':32} {'torch':>8} {'ours':>8} {'ratio':>5} {'TFLOP/s':>7} {'TB/s':>5} {'untuned':>8}  config")
    for model, tokens, direction in cases(options):
        if time.monotonic() - begin > options.seconds:
            print(f"{model} {tokens} {direction}: not run")
            continue
        try:
            r = measure(backend, model, tokens, direction, options)
        except Exception as error:  # one case less
            print(f"FAILED {model} {tokens} {direction}: {type(error).__name__}: {error}"[:400], flush=True)
            continue
        torch.cuda.empty_cache()
        results.append(r)
        complain("grouped_gemm", r["case"], r["rows"])
        for row in r["rows"]:
            if options.all and "us" in row:
                print(f"    {row['engine']} {row['config']}: {row['us']:.1f} us, estimated {row['estimate_us']:.1f}")
        best = r["best"]
        if best is None:
            print(f"{r['case']:32} no right config")
            continue
        theirs = r["torch_us"] or math.nan
        print(f"{r['case']:32} {theirs:8.1f} {best['us']:8.1f} {theirs / best['us']:5.2f} {r['flops'] / best['us'] / 1e6:7.1f} "
              f"{r['bytes'] / best['us'] / 1e6:5.2f} {r['default'].get('us', math.nan):8.1f}  {best['engine']} {best['config']}",
              flush=True)
    done = [r for r in results if r["best"] and r["torch_us"]]
    if done:
        ratio = math.exp(statistics.fmean(math.log(r["torch_us"] / r["best"]["us"]) for r in done))
        regret = math.exp(statistics.fmean(math.log(r["default"]["us"] / r["best"]["us"]) for r in done)) - 1
        print(f"geometric means over {len(done)}: {ratio:.2f}x of torch._grouped_mm, regret of the untuned choice {regret:.0%}")
    if options.json:
        record = {"stamp": stamp(), "device": backend.info.name, "options": vars(options), "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
