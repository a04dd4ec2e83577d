"""Attention of 8-bit floats against ours of bf16 and cuDNN's of bf16 (torch's scaled_dot_product_attention) in one run.

    python benches/attention_fp8.py [--dims 64,128,256] [--lengths 1024,4096,16384] [--candidates 2] [--repeats 5] [--workers 16]
                                    [--seconds 60] [--json attention_fp8.json]

e4m3 with a scale for each tensor, results in bf16; 16,384 tokens, heads times head dimension 2048, as they are and causal. TFLOP/s count
4 * B * H * S * S * D, half of it where causal. Candidates are those of the fp8 engine with the least estimates, the first is the untuned
choice. The norm of the difference from cuDNN's result on the same, exactly represented, inputs is shown beside that of the result: it is
what rounding the weights to e4m3 costs (0.026 of independent normal values). Times are medians in microseconds, all sides interleaved, L2
flushed before each run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from attention import TOKENS, WIDTH
from conv_mma import FLUSH_BYTES
from conv_shapes import Choices, device_info, prepare
from stamp import stamp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from verify import fastest, verify

from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.cuda_backend import CudaBackend

MOST_ERROR = 0.04  # of the result's norm


def problem_of(kind: str, dim: int, length: int, more: str) -> Problem:
    heads = f"{kind}[{TOKENS // length},{WIDTH // dim},{length},{dim}]nchw"
    scales = "scale_q=f32[1] scale_k=f32[1] scale_v=f32[1]" if kind == "e4m3" else ""
    return parse_case(f"attention q={heads} k={heads} v={heads} {more} {scales}")


def measure(backend: CudaBackend, dim: int, length: int, more: str, narrow: Choices, wide: Choices, repeats: int) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (TOKENS // length, WIDTH // dim, length, dim)
    of_8 = {n: torch.empty(shape, device="cuda").normal_(generator=generator).to(torch.float8_e4m3fn) for n in "qkv"}
    of_16 = {n: t.to(torch.bfloat16) for n, t in of_8.items()}
    for tensors in (of_8, of_16):
        tensors["out"] = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    of_8 |= {f"scale_{n}": torch.ones(1, device="cuda") for n in "qkv"}

    def theirs() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(of_16["q"], of_16["k"], of_16["v"], is_causal=bool(more))

    want = theirs().float()

    def error(out: torch.Tensor) -> float:
        found = float((out.float() - want).norm() / want.norm())
        return found / MOST_ERROR if math.isfinite(found) else math.inf

    engines = {e.id: e for e in ENGINES["attention"]}
    rows, calls = [], []
    for kind, tensors, choices in (("e4m3", of_8, narrow), ("bf16", of_16, wide)):
        found, ran = verify(backend, problem_of(kind, dim, length, more), [(engines[e], c) for e, c, _ in choices], tensors,
                            lambda out=tensors["out"]: error(out))  # type: ignore[misc]
        rows.append(found)
        calls += ran
    times = backend.time_launches([*(call for _, _, call in calls), theirs], backend.default_stream(), repeats, FLUSH_BYTES)
    for (row, _, _), own in zip(calls, times, strict=False):
        row["us"] = statistics.median(own)
    flops = 4 * math.prod(shape) * length * (0.5 if more else 1.0)
    return {"case": f"B{shape[0]} H{shape[1]} S{length} D{dim} {more or 'full'}", "flops": flops, "first": rows[0][0],
            "best": fastest(rows[0]), "bf16": rows[1][0], "cudnn_us": statistics.median(times[-1]), "rows": rows}


def show(results: list[dict[str, Any]]) -> None:
    print(f"{'case':36} {'us':>8} {'TFLOP/s':>8} {'error':>6} | {'bf16':>8} {'x':>5} | {'cuDNN':>8} {'x':>5} | {'best us':>8} | config")
    for r in results:
        us, bf16, best = r["first"].get("us", math.nan), r["bf16"].get("us", math.nan), (r["best"] or {}).get("us", math.nan)
        print(f"{r['case']:36} {us:8.1f} {r['flops'] / us / 1e6:8.0f} {r['first'].get('error', math.nan) * MOST_ERROR:6.3f} | {bf16:8.1f} "
              f"{bf16 / us:5.2f} | {r['cudnn_us']:8.1f} {r['cudnn_us'] / us:5.2f} | {best:8.1f} | {r['first']['config']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--candidates", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    begin = time.monotonic()
    wanted = [(dim, length, more) for dim in map(int, options.dims.split(",")) for length in map(int, options.lengths.split(","))
              for more in ("", "causal=top_left")]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("fork")) as pool:
        info = pool.submit(device_info).result()
        sides = (("e4m3", options.candidates), ("bf16", 1))
        futures = [[pool.submit(prepare, problem_of(kind, *case), info, count) for kind, count in sides] for case in wanted]
        backend = CudaBackend(0)
        ready = [[f.result() for f in pair] for pair in futures]  # nothing is timed while the host's cores assemble
    results = []
    for case, (narrow, wide) in zip(wanted, ready, strict=True):
        if time.monotonic() - begin < options.seconds:
            results.append(measure(backend, *case, narrow, wide, options.repeats))
            torch.cuda.empty_cache()
    show(results)
    if options.json:
        record = {"stamp": stamp(), "device": backend.info.name, "options": vars(options), "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1))
    print(f"{len(results)} of {len(wanted)} cases, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
