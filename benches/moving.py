"""What the benches of ops that move memory share: each case against a copy of as many bytes and torch's call, all timed interleaved."""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from conv_mma import FLUSH_BYTES
from stamp import stamp
from verify import Tensors, complain, fastest, verify

from oxidnn.dispatch.registry import engines_for
from oxidnn.dispatch.select import choose
from oxidnn.ops.base import Problem
from oxidnn.runtime.cuda_backend import CudaBackend

Case = tuple[str, Callable[[], dict[str, Any]]]  # label, what measures it


def against_copy(backend: CudaBackend, label: str, line: str, problem: Problem, tensors: Tensors, error_of: Callable[[], float],
                 peer: Callable[[], Any], with_configs: bool, repeats: int) -> dict[str, Any]:
    """The untuned choice (with_configs: all candidates), verified, beside the copy and `peer`: a row of the record."""
    first = choose(problem, backend.info, None)[:2]
    choices = [first]
    if with_configs:
        choices += [(e, c) for e in engines_for(problem.op) if e.check_support(problem, backend.info)
                    for c in e.configs(problem, backend.info) if (e, c) != first]
    rows, ran = verify(backend, problem, choices, tensors, error_of)
    halves = [torch.empty(max(1, problem.num_bytes // 2), dtype=torch.uint8, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    calls = [*(call for _, _, call in ran), lambda: halves[1].copy_(halves[0]), peer]
    times = [statistics.median(t) for t in backend.time_launches(calls, backend.default_stream(), repeats, FLUSH_BYTES)]
    for (row, _, _), us in zip(ran, times, strict=False):
        row["us"] = us
    return {"case": label, "line": line, "bytes": problem.num_bytes, "rows": rows, "default": rows[0], "copy_us": times[-2],
            "torch_us": times[-1], "best": fastest(rows), "with_configs": with_configs}


def run(backend: CudaBackend, cases: Iterable[Case], options: argparse.Namespace) -> None:
    """Measures the cases, prints a line for each, and writes the record."""
    begin = time.monotonic()
    print(f"{backend.info.name}, median of {options.repeats}")
    print(f"{'case':40} {'us':>8} {'TB/s':>5} {'/copy':>6} {'torch x':>8} {'regret':>6}  config")
    results, left = [], []
    for label, measure in cases:
        if time.monotonic() - begin > options.seconds:
            left.append(label)
            continue
        try:
            r = measure()
        except Exception as error:  # one case less
            print(f"FAILED {label}: {type(error).__name__}: {error}"[:400], flush=True)
            continue
        gc.collect()
        torch.cuda.empty_cache()
        results.append(r)
        complain(r["line"].split()[0], label, r["rows"])
        for row in r["rows"] if r.pop("with_configs") else ():
            if "us" in row:
                print(f"    {row['engine']} {row['config']}: {row['us']:.1f} us, {r['bytes'] / row['us'] / 1e6:.2f} TB/s")
        chosen, best = r["default"], r["best"]
        us = chosen.get("us", math.nan)
        print(f"{label:40} {us:8.1f} {r['bytes'] / us / 1e6:5.2f} {r['copy_us'] / us:6.2f} {r['torch_us'] / us:8.2f} "
              f"{us / best['us'] - 1 if best else math.nan:6.0%}  {chosen['engine']} {chosen['config']}"
              + (f" (best {best['engine']} {best['config']})" if best and best is not chosen else ""), flush=True)
    if left:
        print(f"no time for {len(left)}: {', '.join(left)}")
    if options.json:
        record = {"stamp": stamp(), "device": backend.info.name, "options": vars(options), "seconds": time.monotonic() - begin,
                  "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1, default=str))
