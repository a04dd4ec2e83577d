"""Every convolution of the benchmark shapes in three directions against cuDNN: the untuned choice and the best of a few candidates.

    python benches/conv_shapes.py [--networks resnet50,efficientnet_b0,vgg16,convnext_tiny,further] [--match ""]
                                  [--directions fprop,dgrad,wgrad] [--batch 128] [--kind bf16] [--math ieee] [--layout nhwc]
                                  [--candidates 3] [--repeats 5] [--workers 16] [--seconds 150] [--json conv_shapes.json]

Needs a CUDA device and torch with cuDNN, whose search is on. Of f32 TF32 is off but with --math tf32. `further`: convolutions in one and
three dimensions, of many groups, and transposed ones. Candidates are the untuned choice, then the first config of each engine estimated
within 1.6 of it, then the next by estimate; worker processes assemble all of them first. Every result is compared with cuDNN's on
poisoned outputs. Times are medians in microseconds, both sides interleaved, L2 flushed before each run. What --seconds cut off is listed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from conv_mma import FLUSH_BYTES, TORCH_TYPES
from stamp import stamp
from verify import fastest, verify

from oxidnn.codegen.render import Source
from oxidnn.device import DeviceInfo
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import EngineConfig
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.ops.conv import ConvProblem
from oxidnn.runtime.assembler import cubin_for
from oxidnn.runtime.cuda_backend import CudaBackend
from oxidnn.testing.cases import layer_counts, layer_name

NETWORKS = ("resnet50", "efficientnet_b0", "vgg16", "convnext_tiny", "further")
# (name, image, filter, result, attributes); of transposed ones the "image" is what is convolved.
FURTHER = (
    ("1d_80-384_k3_3000", "16,80,3000", "384,80,3", "16,384,3000", "padding=1", False),
    ("1d_384-384_k3s2_3000", "16,384,3000", "384,384,3", "16,384,1500", "padding=1 stride=2", False),
    ("3d_32-64_k3_64", "4,32,64,64,64", "64,32,3,3,3", "4,64,64,64,64", "padding=1", False),
    ("t_512-256_k4s2_16", "64,512,16,16", "512,256,4,4", "64,256,32,32", "padding=1 stride=2", True),
    ("t_256-128_k4s2_32", "64,256,32,32", "256,128,4,4", "64,128,64,64", "padding=1 stride=2", True),
    ("t_128-64_k4s2_64", "64,128,64,64", "128,64,4,4", "64,64,128,128", "padding=1 stride=2", True),
    ("t_1024-512_k2s2_8", "64,1024,8,8", "1024,512,2,2", "64,512,16,16", "stride=2", True),
    ("g32_128-128_k3_56", "32,128,56,56", "128,4,3,3", "32,128,56,56", "padding=1 groups=32", False),  # ResNeXt-50
    ("g32_256-256_k3_28", "32,256,28,28", "256,8,3,3", "32,256,28,28", "padding=1 groups=32", False),
    ("g32_512-512_k3_14", "32,512,14,14", "512,16,3,3", "32,512,14,14", "padding=1 groups=32", False),
    ("g32_1024-1024_k3_7", "32,1024,7,7", "1024,32,3,3", "32,1024,7,7", "padding=1 groups=32", False),
    ("t_64-3_k4s2_128", "64,64,128,128", "64,3,4,4", "64,3,256,256", "padding=1 stride=2", True),
)
NEAR = 1.6

Choices = list[tuple[str, EngineConfig, float]]


def further(kind: str, layout: str) -> Iterator[tuple[str, str, Problem]]:
    """(name, direction, problem)."""
    for name, image, taps, result, attributes, is_transposed in FURTHER:
        op = "conv_transpose" if is_transposed else "conv_fprop"
        stem = "conv_transpose_" if is_transposed else "conv_"
        x, w, y = (f"{kind}[{shape}]{layout}" for shape in (image, taps, result))
        yield name, "fprop", parse_case(f"{op} x={x} w={w} y={y} {attributes}")
        yield name, "dgrad", parse_case(f"{stem}dgrad dy={y} w={w} dx={x} {attributes}")
        yield name, "wgrad", parse_case(f"{stem}wgrad x={x} dy={y} dw={w} {attributes}")


def problems(options: argparse.Namespace) -> list[tuple[str, str, Problem]]:
    found = []
    for network in options.networks.split(","):
        if network == "further":
            found += list(further(options.kind, options.layout))
            continue
        layers = [(d, p) for d in ("fprop", "dgrad", "wgrad")
                  for p in layer_counts(network, options.batch, options.kind, options.layout, (d,))]
        found += [(f"{network}/{layer_name(p)}", d, p) for d, p in layers if isinstance(p, ConvProblem)]
    found = [(name, d, replace(p, policy=replace(p.policy, math=options.math))) for name, d, p in found]
    directions = options.directions.split(",")
    return [f for f in found if f[1] in directions and any(part in f[0] for part in options.match.split(","))]


def device_info() -> DeviceInfo:
    return CudaBackend(0).info


def prepare(problem: Problem, info: DeviceInfo, count: int) -> Choices:
    """The candidates, assembled into the cubin store."""
    every = sorted(((e.id, c, e.estimate(problem, c, info)) for e in ENGINES[problem.op]
                    if e.check_support(problem, info) and (e.is_deterministic or not problem.policy.deterministic)
                    for c in e.configs(problem, info)), key=lambda choice: choice[2])
    firsts: dict[str, tuple[str, EngineConfig, float]] = {}
    for choice in every:
        if choice[2] <= NEAR * every[0][2]:
            firsts.setdefault(choice[0], choice)
    chosen = list(firsts.values())
    chosen = (chosen + [c for c in every if c not in chosen])[:count]
    engines = {e.id: e for e in ENGINES[problem.op]}
    for engine, config, _ in chosen:
        for step in engines[engine].build_steps(problem, config, info).steps:
            cubin_for(Source(step.spec), info.arch, step.spec.symbol)
    return chosen


def tensors_of(problem: Problem, generator: torch.Generator) -> dict[str, torch.Tensor]:
    found = {}
    for operand in problem.operands:
        storage = torch.empty_strided(operand.desc.shape, operand.desc.strides, dtype=TORCH_TYPES[operand.desc.dtype.name], device="cuda")
        found[operand.name] = storage if operand.is_output else storage.normal_(generator=generator)
    return found


def library_call(problem: Problem, tensors: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    """cuDNN by torch on the same memory; of one dimension as images of one row, which is channels last to torch."""
    assert isinstance(problem, ConvProblem)
    p = problem
    flat = p.spatial == 1
    views = {n: t.unsqueeze(2) if flat else t for n, t in tensors.items()}
    stride, dilation = ([1] * flat + list(values) for values in (p.stride, p.dilation))
    padding = [0] * flat + [before for before, _ in p.padding]
    is_transposed = p.op.startswith("conv_transpose")
    rest = (stride, padding, dilation, is_transposed, [0] * len(stride), p.groups)
    if p.op in ("conv_fprop", "conv_transpose"):
        return lambda: torch.ops.aten.convolution(views["x"], views["w"], None, *rest)
    which = 0 if p.op.endswith("dgrad") else 1
    x, w = (views.get(name, views.get("d" + name)) for name in ("x", "w"))
    mask = [which == 0, which == 1, False]
    return lambda: torch.ops.aten.convolution_backward(views["dy"], x, w, None, *rest, mask)[which]


def disagreement(got: torch.Tensor, want: torch.Tensor, math: str = "ieee") -> float:
    """Difference over what two roundings and another order allow, the largest; infinite where a poisoned element was left. Of f32 the
    order counts for more: cuDNN's own gradients of filters are 1e-4 of the largest from a plain sum's; so it does in sums of millions. In
    tf32 they are 4e-3 of the root mean square from one, ours 1.5e-3."""
    want = want.float().reshape(got.shape)
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-16}[got.dtype]
    allowed = 2.1 * unit * want.abs() + (2.0**-7 if math == "tf32" else 2.0**-9) * want.square().mean().sqrt()
    ratio = (got.float() - want).abs_() / allowed
    return float("inf") if bool(torch.isnan(ratio).any()) else float(ratio.max())


def measure(backend: CudaBackend, problem: Problem, choices: Choices, repeats: int) -> dict[str, Any]:
    tensors = tensors_of(problem, torch.Generator("cuda").manual_seed(1))
    theirs = library_call(problem, tensors)
    want = theirs()
    output = tensors[problem.outputs[0].name]
    engines = {e.id: e for e in ENGINES[problem.op]}
    rows, ran = verify(backend, problem, [(engines[e], c) for e, c, _ in choices], tensors,
                       lambda: disagreement(output, want, problem.policy.math))
    calls: list[Callable[[], Any]] = [*(call for _, _, call in ran), theirs]
    times = backend.time_launches(calls, backend.default_stream(), repeats, FLUSH_BYTES)
    for (row, _, _), own in zip(ran, times, strict=False):
        row["us"] = statistics.median(own)
    flops = problem.flops  # type: ignore[attr-defined]
    return {"op": problem.op, "library_us": statistics.median(times[-1]), "flops": flops, "bytes": problem.num_bytes,
            "first": rows[0], "best": fastest(rows), "rows": rows}


def show(results: list[dict[str, Any]], directions: list[str]) -> None:
    """A line a layer: of each direction cuDNN's time, the untuned choice's, and what the untuned and the best are of cuDNN."""
    print(f"{'layer':34}" + "".join(f" | {d:>6} {'untuned':>7} {'x':>5} {'best x':>6}" for d in directions))
    by_case: dict[str, dict[str, Any]] = {}
    for r in results:
        by_case.setdefault(r["case"], {})[r["direction"]] = r
    for case, found in by_case.items():
        cells = []
        for d in directions:
            r: dict[str, Any] | None = found.get(d)
            if r is None or r["best"] is None or "us" not in r["first"]:
                cells.append(f" | {'':6} {'':7} {'-':>5} {'-':>6}")
                continue
            library, first, best = r["library_us"], r["first"]["us"], r["best"]["us"]
            cells.append(f" | {library:6.1f} {first:7.1f} {library / first:5.2f} {library / best:6.2f}")
        print(f"{case:34}" + "".join(cells))
    for network in dict.fromkeys(r["case"].partition("/")[0] if "/" in r["case"] else "further" for r in results):
        for kind in ("grouped", "dense"):
            parts = []
            for d in directions:
                timed = [r for r in results if r["direction"] == d and r["best"] and "us" in r["first"]
                         and (r["case"].partition("/")[0] if "/" in r["case"] else "further") == network
                         and (r["groups"] > 1) == (kind == "grouped")]
                if timed:
                    means = [math.exp(statistics.fmean(math.log(r["library_us"] / r[which]["us"]) for r in timed))
                             for which in ("first", "best")]
                    parts.append(f"{d} {means[0]:.2f} (best {means[1]:.2f}, {len(timed)} layers)")
            if parts:
                print(f"{network} {kind}, of cuDNN: " + ", ".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--match", default="", help="only layers whose name has one of these in it, by commas")
    parser.add_argument("--directions", default="fprop,dgrad,wgrad")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--kind", default="bf16", choices=("bf16", "f16", "f32"))
    parser.add_argument("--math", default="ieee", choices=("ieee", "tf32"), help="of f32, on both sides")
    parser.add_argument("--layout", default="nhwc", choices=("nhwc", "nchw"))
    parser.add_argument("--candidates", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--json", default="")
    options = parser.parse_args()

    begin = time.monotonic()
    cases = problems(options)
    results: list[dict[str, Any]] = []
    left_out = []
    # Forked before this process has a context of its own.
    with ProcessPoolExecutor(options.workers, mp_context=get_context("fork")) as pool:
        info = pool.submit(device_info).result()
        prepared: list[Future[Choices]] = [pool.submit(prepare, p, info, options.candidates) for _, _, p in cases]
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = options.math == "tf32"
        backend = CudaBackend(0)
        ready = [f.result() for f in prepared]  # nothing is timed while the host's cores assemble
    print(f"{sum(map(len, ready))} candidates of {len(cases)} convolutions assembled in {time.monotonic() - begin:.0f} s", flush=True)
    for (case, direction, problem), choices in zip(cases, ready, strict=True):
        if time.monotonic() - begin > options.seconds:
            left_out.append(f"{case} {direction}")
            continue
        result = {"case": case, "direction": direction, "groups": problem.groups}  # type: ignore[attr-defined]
        results.append(result | measure(backend, problem, choices, options.repeats))
        for row in results[-1]["rows"]:
            if row.get("error", 2.0) > 1.0:
                print(f"WRONG {case} {direction} {row['engine']} {row['config']}: {row.get('failure', row.get('error'))}", flush=True)
        torch.cuda.empty_cache()
    if options.json:
        record = {"stamp": stamp(), "device": backend.info.name, "options": vars(options), "left_out": left_out, "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1))
    show(results, options.directions.split(","))
    if left_out:
        print(f"left out after {options.seconds:.0f} s: {', '.join(left_out)}")
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
