"""GEMMs of few rows with big weights (decode) against cuBLAS: every config verified on poisoned outputs, then timed interleaved.

    python benches/decode_gemm.py [--rows 1,16,64,128] [--layouts nk,kn] [--shapes N4096_K7168,...] [--kind bf16] [--configs N]
                                  [--flush zero|read] [--repeats 15] [--all] [--seconds S] [--json out.json]

Needs a CUDA device and torch. Weights lie as (n, k) (transpose_b, nn.Linear) or (k, n). A row a case: cuBLAS, our fastest config and
the untuned choice, with TB/s of weights. Times are medians in microseconds, work queued ahead, L2 flushed before each run: by zeroing
256 MB, which leaves L2 full of lines that must be written back while weights come, or by reading them, as another layer would.
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
from stamp import stamp
from verify import complain, fastest, verify

from oxidnn.dispatch.registry import engines_for
from oxidnn.ops.case import parse_case
from oxidnn.runtime.cuda_backend import CudaBackend

SHAPES = {"N4096_K7168": (4096, 7168), "N7168_K2048": (7168, 2048), "N24576_K1536": (24576, 1536), "N6144_K4096": (6144, 4096)}


def case(m: int, n: int, k: int, kind: str, layout: str) -> str:
    weights = f"{kind}[{n},{k}] transpose_b=True" if layout == "nk" else f"{kind}[{k},{n}]"
    return f"gemm a={kind}[{m},{k}] b={weights}"


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
    problem = parse_case(case(m, n, k, options.kind, layout))
    choices = []
    for engine in engines_for("gemm"):
        if engine.algorithm.name in ("direct", "simt") or not engine.check_support(problem, backend.info):  # type: ignore[attr-defined]
            continue
        limit = options.configs if engine.algorithm.name.startswith("skinny") else min(options.configs or 4, 4)  # type: ignore[attr-defined]
        choices += [(engine, c) for c in engine.configs(problem, backend.info)[: limit or None]]
    tensors = make_tensors(problem, torch.Generator("cuda").manual_seed(1))  # type: ignore[arg-type]
    want, magnitude = reference(problem, tensors)
    rows, ran = verify(backend, problem, choices, tensors,
                       lambda: worst_error(tensors["d"], want, magnitude, problem))  # type: ignore[arg-type]
    torch.cuda.synchronize()
    times = time_calls([*(call for _, _, call in ran), torch_call(problem, tensors)], options.repeats, options.flush)
    for (row, _, _), own in zip(ran, times, strict=False):
        row["us"] = statistics.median(own)
    default = min((r for r in rows if "us" in r), key=lambda r: r["estimate_us"], default={})
    return {"case": f"M{m}_{shape}_{layout}", "weight_bytes": 2 * n * k, "library_us": statistics.median(times[-1]),
            "best": fastest(rows), "default": default, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,16,64,128")
    parser.add_argument("--layouts", default="nk,kn")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--kind", default="bf16", choices=("bf16", "f16"))
    parser.add_argument("--configs", type=int, default=0, help="only the first N of an engine by estimate; 0 for all")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--flush", default="zero", choices=("zero", "read"))
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
