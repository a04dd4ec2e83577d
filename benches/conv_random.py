"""Random convolutions against float64 on the device: of each engine, op and type how many problems, how many failures, the worst error.

    python benches/conv_random.py [--problems 15] [--engines 2] [--seconds 120] [--workers 16] [--device cuda:0] [--json FILE]

--problems: of each of the six ops in each of twelve types and arithmetics (1080 in all), drawn as the tests draw them: strides, dilation,
groups, asymmetric padding, odd channels, gaps, misaligned views, epilogues, scales, zero points, by-products. --engines: of those that
take a problem, those with the fewest first. Outputs, gaps and workspace are poisoned before each run. Errors are over what is allowed
(testing/compare.py), so 1 is the most. What --seconds cut off is counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from stamp import stamp

from oxidnn.dispatch.registry import ENGINES
from oxidnn.handle import open_backend
from oxidnn.ops.base import Policy
from oxidnn.ops.case import format_case
from oxidnn.ops.conv import CONVOLUTIONS
from oxidnn.runtime.backend import Backend
from oxidnn.testing.harness import run_problem
from oxidnn.testing.sample import SAMPLES

# Type of the first input, and the arithmetic allowed where it is f32.
KINDS = (("f32", "ieee"), ("f32", "tf32"), ("f32", "tf32x3"), ("f32", "bf16x3"), ("f32", "fast"), ("f16", ""), ("bf16", ""),
         ("f64", ""), ("s8", ""), ("u8", ""), ("e4m3", ""), ("e5m2", ""))
PARTS = 3  # of an op and type, for different workers
Row = dict[str, Any]


@cache
def opened(device: str) -> Backend:
    """One of a worker."""
    return open_backend(device)


def run_part(op: str, kind: str, math: str, part: int, count: int, engines: int, device: str, until: float) -> list[Row]:
    """`count` problems that are not empty, each by `engines` of its engines: a row a run, or one of what was left out."""
    backend = opened(device)
    rng = np.random.default_rng(zlib.crc32(f"{op} {kind} {math} {part}".encode()))
    ran: Counter[str] = Counter()
    rows: list[Row] = []
    done = 0
    while done < count:
        if time.time() > until:
            return [*rows, {"left_out": count - done}]
        problem = SAMPLES[op](rng, "small")
        if problem.inputs[0].desc.dtype.name != kind or problem.is_empty:
            continue
        problem = replace(problem, policy=Policy(math=math)) if math else problem
        takers = sorted((e for e in ENGINES[op] if e.check_support(problem, backend.info)), key=lambda e: ran[e.id])[:engines]
        for engine in takers:
            configs = engine.configs(problem, backend.info)
            row: Row = {"engine": engine.id.split(".")[1], "op": op, "type": f"{kind} {math}".strip(), "problem": f"{part}.{done}"}
            try:
                row["error"] = run_problem(backend, problem, engine, configs[done % len(configs)], seed=done, aliases=done % 4 == 0).worst
            except Exception as error:
                row |= {"case": format_case(problem), "failure": f"{type(error).__name__}: {error}"[:500]}
            rows.append(row)
            ran[engine.id] += 1
        done += 1
    return rows


def table_of(rows: list[Row]) -> list[Row]:
    cells: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["op"], row["engine"], row["type"]), []).append(row)
    return [{"op": op, "engine": engine, "type": kind, "problems": len(found), "failures": sum("failure" in r for r in found),
             "worst": max((r["error"] for r in found if "error" in r), default=None)}
            for (op, engine, kind), found in sorted(cells.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=15)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    until = time.time() + options.seconds
    counts = [len(range(part, options.problems, PARTS)) for part in range(PARTS)]
    jobs = [(op, kind, math, part, counts[part], options.engines, options.device, until)
            for part in range(PARTS) for op in CONVOLUTIONS for kind, math in KINDS if counts[part]]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        found = [row for rows in pool.map(run_part, *zip(*jobs, strict=True)) for row in rows]
    left_out = sum(row["left_out"] for row in found if "left_out" in row)
    runs = [row for row in found if "left_out" not in row]
    table = table_of(runs)
    problems = len({(r["op"], r["type"], r["problem"]) for r in runs})
    failures = [r for r in runs if "failure" in r]
    names = sorted({r["engine"] for r in table})
    print(f"{problems} problems, {len(runs)} runs of {len(names)} engines, {len(failures)} failures, {left_out} left out")
    for engine in names:
        own = [r for r in table if r["engine"] == engine]
        count, failed = (sum(r[name] for r in own) for name in ("problems", "failures"))
        print(f"{engine:24} {count:5} runs, {len(own):3} of op and type, {failed} failures, "
              f"worst {max((r['worst'] or 0.0 for r in own), default=0.0):.3f}")
    for row in failures[:20]:
        print(f"FAILED {row['engine']}: {row['case']}\n  {row['failure']}")
    if options.json:
        record = {"bench": "conv_random", "options": vars(options), **stamp(), "problems": problems, "runs": len(runs),
                  "left_out": left_out, "failures": failures, "results": table}
        Path(options.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
