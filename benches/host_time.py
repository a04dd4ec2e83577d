"""Host time of a call: warm and bound against torch, and the first convolution of a new process with an empty and a full cubin store.

    python benches/host_time.py --json host_time.json        # needs a GPU and torch
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from stamp import stamp

FIRST_CALL = """
import time, torch, oxidnn
x = torch.randn(8, 64, 28, 28, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
w = torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
torch.nn.functional.relu(x); torch.cuda.synchronize()
h = oxidnn.DnnHandle("cuda:0")
t0 = time.perf_counter(); h.conv(x, w, padding=1); torch.cuda.synchronize(); t1 = time.perf_counter()
h.conv(x, w, padding=1); torch.cuda.synchronize(); t2 = time.perf_counter()
print("FIRST", (t1 - t0) * 1e3, (t2 - t1) * 1e3)
"""


def per_call_us(run: Callable[[], Any], synchronize: Callable[[], None], calls: int = 300, rounds: int = 21) -> float:
    """Microseconds of host time per call: the queue is drained between rounds, so the device never blocks the host."""
    for _ in range(50):
        run()
    times = []
    for _ in range(rounds):
        synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(times)


def bare_launch(plan: Any) -> Callable[[int], None]:
    """The plan's one kernel launched with the arguments of its last call: what no call can go below."""
    (launch,) = plan.plan.launches
    return launch.launch


def warm() -> dict[str, float]:
    """Medians in microseconds, interleaved in one process."""
    import torch

    import oxidnn

    h = oxidnn.DnnHandle("cuda:0")
    x = torch.randn(1, 16, 8, 8, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    w = torch.randn(16, 16, 3, 3, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    y = h.conv(x, w, padding=1)
    plan, fresh_plan = h.plan("conv_fprop", x, w, padding=1), h.plan("conv_fprop", x, w, padding=1)
    turns = itertools.cycle([torch.empty_like(x) for _ in range(4)])  # inputs at changing addresses, as a network has them
    sync = torch.cuda.synchronize
    runs: dict[str, Callable[[], Any]] = {
        "oxidnn.conv": lambda: h.conv(x, w, padding=1),
        "torch.conv2d": lambda: torch.nn.functional.conv2d(x, w, padding=1),
        "oxidnn.conv out=": lambda: h.conv(x, w, padding=1, out=y),
        "oxidnn.conv turns": lambda: h.conv(next(turns), w, padding=1),
        "oxidnn.plan out=": lambda: plan(x, w, out=y),
        "oxidnn.plan": lambda: fresh_plan(x, w),
        "bare launch": partial(bare_launch(plan), 0),
        "oxidnn.activation": lambda: h.activation(x, "relu"),
        "torch.relu": lambda: torch.relu(x),
        "torch.add_": lambda: x.add_(0.0),
    }
    plan(x, w, out=y)
    with torch.no_grad():
        rounds = [{name: per_call_us(run, sync) for name, run in runs.items()} for _ in range(3)]
    return {name: statistics.median(r[name] for r in rounds) for name in runs}


def first_calls() -> dict[str, dict[str, Any]]:
    """Milliseconds of the first and second convolution of a new process, context and torch apart; the verbose line says where from."""
    result = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "OXIDNN_CACHE_DIR": cache, "OXIDNN_VERBOSE": "plan"}
        for name in ("empty store", "full store", "full store again"):
            done = subprocess.run([sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True, check=True)
            first, second = (float(f) for f in next(line for line in done.stdout.splitlines() if line.startswith("FIRST")).split()[1:])
            fields = [f for line in done.stderr.splitlines() if line.startswith("oxidnn,plan") for f in line.split(",")]
            origin = next((f for f in fields if f.startswith("cubin:")), "?")
            result[name] = {"first_ms": first, "second_ms": second, "origin": origin}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = {"stamp": stamp(), "warm_us": warm(), "first_call": first_calls()}
    for name, us in result["warm_us"].items():
        print(f"{name:20s} {us:8.2f} us")
    for name, row in result["first_call"].items():
        print(f"{name:20s} first {row['first_ms']:8.2f} ms, second {row['second_ms']:6.2f} ms, {row['origin']}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
