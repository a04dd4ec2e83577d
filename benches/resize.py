"""Resizing against torch.nn.functional.interpolate: verified against float64 on poisoned outputs, then timed interleaved.

    python benches/resize.py [--kinds bf16] [--layouts nhwc,nchw] [--match "bicubic nhwc"] [--extents 150,150,257,257] [--configs]
                             [--repeats 9] [--seconds S] [--json out.json]

Needs a CUDA device and torch. Shapes: benches/cases/shapes/memory_bound.json, forward and backward, and reductions by area and with
antialias. A row a case: our untuned choice (with --configs also the best one), TB/s by the bytes that must move (input + output), its
ratio to a copy of as many bytes measured here, and how many times as fast as torch. Times are medians in microseconds, L2 flushed
before each run; both launches of ours count. --seconds: start no case after so long.
"""

from __future__ import annotations

import argparse
import gc
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
import torch.nn.functional as F
from conv_mma import FLUSH_BYTES, TORCH_TYPES
from memory_bound import worst_error
from stamp import stamp

from oxidnn.dispatch.registry import engines_for
from oxidnn.dispatch.select import choose
from oxidnn.ops.case import parse_case
from oxidnn.plan import Plan
from oxidnn.runtime.cuda_backend import CudaBackend
from oxidnn.testing.cases import shapes_file

# torch's mode -> ours, with what the two call differently
MODES = {"nearest": "nearest", "nearest-exact": "nearest_exact", "bilinear": "linear", "bicubic": "cubic", "area": "area"}
REDUCTIONS = ({"mode": "area"}, {"mode": "bilinear", "antialias": True}, {"mode": "bicubic", "antialias": True})


def cases_of(options: argparse.Namespace) -> list[tuple[str, str, dict[str, Any]]]:
    """(label, case line, torch's arguments)."""
    entries = json.loads(shapes_file("memory_bound").read_text(encoding="utf-8"))["resize"]
    small = {k: v for k, v in entries[0].items() if k != "mode"}
    if options.extents:
        grown = dict(zip(("H", "W", "OH", "OW"), map(int, options.extents.split(",")), strict=True))
        entries, small = [e | grown for e in entries], small | grown
    entries = [*entries, *(small | {"H": small["OH"], "W": small["OW"], "OH": small["H"], "OW": small["W"]} | r for r in REDUCTIONS)]
    found = []
    for kind in options.kinds.split(","):
        for layout in options.layouts.split(","):
            for entry in entries:
                n, c, h, w, p, q = (entry[d] for d in ("N", "C", "H", "W", "OH", "OW"))
                smooth = entry.get("antialias", False)
                words = f" mode={MODES[entry['mode']]}" + " antialias=True" * smooth
                words += " cubic_coefficient=-0.5" * (smooth and entry["mode"] == "bicubic")  # torch's with antialias
                arguments = {"size": (p, q), "mode": entry["mode"], "antialias": smooth}
                x, y = f"{kind}[{n},{c},{h},{w}]{layout}", f"{kind}[{n},{c},{p},{q}]{layout}"
                name = f"{entry['mode']}{'_aa' * smooth} {layout} {kind}"
                found.append((f"{name} forward", f"resize x={x} y={y} size=({p},{q}){words}", arguments))
                found.append((f"{name} backward", f"resize_backward dy={y} dx={x} x_shape=({n},{c},{h},{w}){words}", arguments))
    return [f for f in found if all(word in f[0] for word in options.match.split())]


def interpolation(arguments: dict[str, Any], shape: tuple[int, ...], source: torch.Tensor, is_backward: bool) -> Callable[[], torch.Tensor]:
    """torch's call; of a gradient, the backward alone."""
    if not is_backward:
        return lambda: F.interpolate(source, **arguments)
    last = source.is_contiguous(memory_format=torch.channels_last)
    leaf = torch.zeros(shape, dtype=source.dtype, device=source.device)
    leaf = leaf.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format).requires_grad_()
    y = F.interpolate(leaf, **arguments)
    return lambda: torch.autograd.grad(y, leaf, source, retain_graph=True)[0]


def measure(backend: CudaBackend, label: str, line: str, arguments: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    problem = parse_case(line)
    is_backward = problem.op.endswith("_backward")
    generator = torch.Generator("cuda").manual_seed(1)
    tensors = []
    for o in problem.operands:
        tensor = torch.empty_strided(o.desc.shape, o.desc.strides, dtype=TORCH_TYPES[o.desc.dtype.name], device="cuda")
        tensor.copy_(torch.randn(o.desc.shape, device="cuda", generator=generator))
        tensors.append(tensor)
    source, target = tensors
    want = interpolation(arguments, problem.outputs[0].desc.shape, source.double(), is_backward)()
    first = choose(problem, backend.info, None)[:2]
    choices = [first]
    if options.configs:
        choices += [(e, c) for e in engines_for(problem.op) for c in e.configs(problem, backend.info) if (e, c) != first]
    pointers, stream = [t.data_ptr() for t in tensors], backend.default_stream()
    rows: list[dict[str, Any]] = []
    calls: list[Callable[[], Any]] = []
    for engine, config in choices:
        row: dict[str, Any] = {"engine": engine.id, "config": config.name, "estimate_us": engine.estimate(problem, config, backend.info)}
        rows.append(row)
        try:
            plan = Plan(problem, engine, config, engine.build_steps(problem, config, backend.info), backend)
            scratch = torch.full((max(1, plan.workspace_bytes),), 0xFF, dtype=torch.uint8, device="cuda")
            target.fill_(float("nan"))
            torch.cuda.synchronize()

            def call(plan: Plan = plan, scratch: torch.Tensor = scratch) -> None:
                plan.execute(pointers, scratch.data_ptr(), stream)

            call()
            backend.synchronize(stream)
            row["error"] = worst_error(target, want)
            row["index"] = len(calls)
            calls.append(call)
        except Exception as error:  # a config that cannot be launched is reported, not fatal
            row["failure"] = f"{type(error).__name__}: {error}"[:400]
    del want
    halves = [torch.empty(max(1, problem.num_bytes // 2), dtype=torch.uint8, device="cuda") for _ in range(2)]
    peers = {"copy": lambda: halves[1].copy_(halves[0]),
             "torch": interpolation(arguments, problem.outputs[0].desc.shape, source, is_backward)}
    torch.cuda.synchronize()
    times = [statistics.median(t) for t in backend.time_launches([*calls, *peers.values()], stream, options.repeats, FLUSH_BYTES)]
    for row in rows:
        if "index" in row:
            row["us"] = times[row.pop("index")]
    right = [r for r in rows if r.get("error", math.inf) <= 1.0]
    return {"case": label, "line": line, "bytes": problem.num_bytes, "rows": rows, "default": rows[0], "copy_us": times[-2],
            "torch_us": times[-1], "best": min(right, key=lambda r: r["us"]) if right else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="bf16")
    parser.add_argument("--layouts", default="nhwc,nchw")
    parser.add_argument("--match", default="", help="words that a case's label holds, e.g. 'bicubic nhwc forward'")
    parser.add_argument("--extents", default="", help="H,W,OH,OW of the growing cases instead of those of the list; reductions go back")
    parser.add_argument("--configs", action="store_true", help="all configs, not the untuned choice alone")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--json", default="")
    options = parser.parse_args()

    begin, backend = time.monotonic(), CudaBackend(0)
    print(f"{backend.info.name}, median of {options.repeats}")
    print(f"{'case':34} {'us':>8} {'TB/s':>5} {'/copy':>6} {'torch x':>8} {'regret':>6}  config")
    results, left = [], []
    for label, line, arguments in cases_of(options):
        if time.monotonic() - begin > options.seconds:
            left.append(label)
            continue
        try:
            r = measure(backend, label, line, arguments, options)
        except Exception as error:  # one case less
            print(f"FAILED {label}: {type(error).__name__}: {error}"[:400], flush=True)
            continue
        gc.collect()
        torch.cuda.empty_cache()
        results.append(r)
        for row in r["rows"]:
            if row.get("error", 2.0) > 1.0:
                print(f"WRONG {label} {row['config']}: {row.get('failure', row.get('error'))}")
            elif options.configs:
                print(f"    {row['config']}: {row['us']:.1f} us, {r['bytes'] / row['us'] / 1e6:.2f} TB/s")
        us = r["default"].get("us", math.nan)
        regret = us / r["best"]["us"] - 1 if r["best"] else math.nan
        print(f"{label:34} {us:8.1f} {r['bytes'] / us / 1e6:5.2f} {r['copy_us'] / us:6.2f} {r['torch_us'] / us:8.2f} {regret:6.0%}  "
              f"{r['default']['config']}"
              + (f" (best {r['best']['config']})" if r["best"] and r["best"] is not r["default"] else ""), flush=True)
    if left:
        print(f"no time for {len(left)}: {', '.join(left)}")
    if options.json:
        record = {"stamp": stamp(), "device": backend.info.name, "options": vars(options), "seconds": time.monotonic() - begin,
                  "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
