"""GEMMs of few rows with big weights (decode) against cuBLAS: every config verified on poisoned outputs, then timed interleaved.

    python benches/decode_gemm.py [--rows 1,16,64,128] [--layouts nk,kn] [--shapes N4096_K7168,...] [--kind bf16|f16|e4m3|s8] [--gate]
                                  [--configs N] [--flush zero|read|chain] [--repeats 15] [--all] [--seconds S] [--json out.json]

Needs a CUDA device and torch. Weights lie as (n, k) (transpose_b, nn.Linear) or (k, n). A row a case: cuBLAS, our fastest config and
the untuned choice, with TB/s of weights. Times are medians in microseconds, work queued ahead, L2 flushed before each run: by zeroing
256 MB, which leaves L2 full of lines that must be written back while weights come, or by reading them, as another layer would. "chain"
times 12 launches in a row, as of a model's layers, each with weights of its own, and gives the time of one. --gate: silu(x W) * x V of
weights of n columns in all; cuBLAS has silu and the product after it. 8-bit floats have one scale each; cuBLAS takes at least 16 rows of
them, 32 of integers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from conv_mma import FLUSH_BYTES, make_tensors, worst_error
from matmul_wgmma import reference, torch_call
from matmul_wgmma import worst_error as narrow_error
from stamp import stamp
from verify import Tensors, complain, fastest, verify

from oxidnn.dispatch.registry import engines_for
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.cuda_backend import CudaBackend

LAYERS = 12
DEFAULTS = ("N4096_K7168", "N7168_K2048", "N24576_K1536", "N6144_K4096")
SHAPES = {name: tuple(int(x[1:]) for x in name.split("_")) for name in (*DEFAULTS, "N28672_K4096")}


def case(m: int, n: int, k: int, kind: str, layout: str, gate: bool) -> str:
    weights = f"{kind}[{n},{k}] transpose_b=True" if layout == "nk" else f"{kind}[{k},{n}]"
    more = " scale_a=f32[1] scale_b=f32[1]" if kind == "e4m3" else ""
    return f"gemm a={kind}[{m},{k}] b={weights}{more}{' gate=silu' if gate else ''}"


def library_call(problem: Problem, tensors: Tensors) -> Callable[[], Any]:
    """cuBLAS, with as many rows as it needs; of a gate what follows too."""
    fewest = {"e4m3": 16, "s8": 32}.get(problem.desc("a").dtype.name, 1)
    a, m = tensors["a"], problem.m  # type: ignore[attr-defined]
    if m < fewest:
        a = torch.cat([a.view(torch.uint8), torch.zeros(fewest - m, a.shape[1], dtype=torch.uint8, device="cuda")]).view(a.dtype)
    product = torch_call(problem, {**tensors, "a": a, **({"d": tensors["a"]} if problem.gate else {})})  # type: ignore[attr-defined]
    if not problem.gate:  # type: ignore[attr-defined]
        return product

    def gated() -> torch.Tensor:
        z, up = product()[:m].chunk(2, -1)
        return torch.nn.functional.silu(z) * up

    return gated


def expected(problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and magnitudes."""
    if not problem.gate:  # type: ignore[attr-defined]
        return reference(problem, tensors)
    wide = {name: t.float() for name, t in tensors.items()}
    bare = {**wide, "d": wide["a"]}
    (z, up), magnitude = torch_call(problem, bare)().chunk(2, -1), torch_call(problem, {n: t.abs() for n, t in bare.items()})()
    return torch.nn.functional.silu(z) * up, magnitude.chunk(2, -1)[0] * up.abs() + magnitude.chunk(2, -1)[1] * z.abs()


def time_chains(chains: list[list[Callable[[], Any]]], repeats: int) -> list[list[float]]:
    """Microseconds of a launch of each chain, interleaved, behind a kernel that spins while the host enqueues."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[list[float]] = [[] for _ in chains]
    for _ in range(repeats + 1):
        for chain, own in zip(chains, times, strict=True):
            torch.cuda._sleep(1_500_000)
            begin.record()
            for call in chain:
                call()
            end.record()
            end.synchronize()
            own.append(begin.elapsed_time(end) * 1000 / len(chain))
    return [own[1:] for own in times]


def time_calls(calls: list[Callable[[], Any]], repeats: int, flush: str) -> list[list[float]]:
    """Microseconds of each call, interleaved, each behind a flush of L2 and a kernel that spins while the host enqueues."""
    buffer = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(repeats):
        for call, own in zip(calls, times, strict=True):
            buffer.zero_() if flush == "zero" else buffer.sum()
            torch.cuda._sleep(300_000)
            begin.record()
            call()
            end.record()
            end.synchronize()
            own.append(begin.elapsed_time(end) * 1000)
    return times


def measure(backend: CudaBackend, m: int, shape: str, layout: str, options: argparse.Namespace) -> dict[str, Any]:
    n, k = SHAPES[shape]
    problem = parse_case(case(m, n, k, options.kind, layout, options.gate))
    choices = []
    for engine in engines_for("gemm"):
        if engine.algorithm.name in ("direct", "simt") or not engine.check_support(problem, backend.info):  # type: ignore[attr-defined]
            continue
        limit = options.configs if engine.algorithm.name.startswith("skinny") else min(options.configs or 4, 4)  # type: ignore[attr-defined]
        choices += [(engine, c) for c in engine.configs(problem, backend.info)[: limit or None]]
    tensors = make_tensors(problem, torch.Generator("cuda").manual_seed(1))  # type: ignore[arg-type]
    for name in ("scale_a", "scale_b"):
        if name in tensors:
            tensors[name].fill_(0.25)
    want, magnitude = expected(problem, tensors)
    judge = worst_error if options.kind in ("bf16", "f16") else narrow_error
    rows, ran = verify(backend, problem, choices, tensors, lambda: judge(tensors["d"], want, magnitude, problem))  # type: ignore[arg-type]
    torch.cuda.synchronize()
    if options.flush == "chain":
        stream, layers = backend.default_stream(), [tensors["b"], *(tensors["b"].clone() for _ in range(LAYERS - 1))]
        scratch = torch.empty(max((plan.workspace_bytes for _, plan, _ in ran), default=0) + 1, dtype=torch.uint8, device="cuda")

        def layer_call(plan: Any, weights: torch.Tensor) -> Callable[[], None]:
            pointers = [(weights if o.name == "b" else tensors[o.name]).data_ptr() for o in problem.operands]
            return lambda: plan.execute(pointers, scratch.data_ptr(), stream)

        chains: list[list[Callable[[], Any]]] = [[layer_call(plan, w) for w in layers] for _, plan, _ in ran]
        times = time_chains([*chains, [library_call(problem, {**tensors, "b": w}) for w in layers]], options.repeats)
    else:
        times = time_calls([*(call for _, _, call in ran), library_call(problem, tensors)], options.repeats, options.flush)
    for (row, _, _), own in zip(ran, times, strict=False):
        row["us"] = statistics.median(own)
    default = min((r for r in rows if "us" in r), key=lambda r: r["estimate_us"], default={})
    return {"case": f"M{m}_{shape}_{layout}", "weight_bytes": tensors["b"].nbytes, "library_us": statistics.median(times[-1]),
            "best": fastest(rows), "default": default, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,16,64,128")
    parser.add_argument("--layouts", default="nk,kn")
    parser.add_argument("--shapes", default=",".join(DEFAULTS))
    parser.add_argument("--kind", default="bf16", choices=("bf16", "f16", "e4m3", "s8"))
    parser.add_argument("--gate", action="store_true")
    parser.add_argument("--configs", type=int, default=0, help="only the first N of an engine by estimate; 0 for all")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--flush", default="zero", choices=("zero", "read", "chain"))
    parser.add_argument("--all", action="store_true", help="print every config")
    parser.add_argument("--seconds", type=float, default=0, help="start no case after so many seconds; 0 for no limit")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    begin = time.perf_counter()
    backend = CudaBackend(0)
    results = []
    print(f"{'case':22} {'cuBLAS':>7} {'TB/s':>5} {'ours':>7} {'TB/s':>5} {'ratio':>5} {'default':>7}  config")
    for layout in options.layouts.split(","):
        for m in map(int, options.rows.split(",")):
            for shape in options.shapes.split(","):
                if options.seconds and time.perf_counter() - begin > options.seconds:
                    print(f"M{m}_{shape}_{layout}: not run")
                    continue
                r = measure(backend, m, shape, layout, options)
                torch.cuda.empty_cache()
                results.append(r)
                complain("gemm", r["case"], r["rows"])
                for row in r["rows"]:
                    if options.all and "us" in row:
                        print(f"    {row['engine']} {row['config']}: {row['us']:.1f} us, estimated {row['estimate_us']:.1f}")
                best, tb = r["best"], r["weight_bytes"] / 1e6
                if best is None:
                    print(f"{r['case']:22} {r['library_us']:7.1f}  no right config")
                    continue
                print(f"{r['case']:22} {r['library_us']:7.1f} {tb / r['library_us']:5.2f} {best['us']:7.1f} {tb / best['us']:5.2f} "
                      f"{r['library_us'] / best['us']:5.2f} {r['default'].get('us', float('nan')):7.1f}  {best['engine']} {best['config']}",
                      flush=True)
    done = [r for r in results if r["best"]]
    if done:
        ratio = math.exp(statistics.fmean(math.log(r["library_us"] / r["best"]["us"]) for r in done))
        regret = math.exp(statistics.fmean(math.log(r["default"]["us"] / r["best"]["us"]) for r in done)) - 1
        speed = math.exp(statistics.fmean(math.log(r["weight_bytes"] / r["best"]["us"] / 1e6) for r in done))
        print(f"geometric means over {len(done)}: {ratio:.2f}x of cuBLAS, {speed:.2f} TB/s of weights, "
              f"regret of the untuned choice {regret:.0%}")
    if options.json:
        record = {"stamp": stamp(), "device": backend.info.name, "options": vars(options), "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
