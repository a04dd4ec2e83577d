"""Convolutions on mma.sync against cuDNN: every config verified on poisoned outputs, then timed interleaved with cuDNN.

    python benches/conv_mma.py [--network resnet50] [--match 3x3] [--batch 128] [--directions fprop,dgrad,wgrad] [--configs N]
                               [--repeats 15] [--kind bf16] [--math ieee|tf32] [--json conv_mma.json]

Needs a CUDA device and torch with cuDNN. A row a convolution: cuDNN's time, our fastest config's and the untuned choice's, ratios to
cuDNN, and TFLOP/s. Times are medians in microseconds, L2 flushed before each run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from stamp import stamp

from oxidnn.codegen.render import render
from oxidnn.dtypes import F32
from oxidnn.engines.affine_mma_sm80 import MMA_SM80
from oxidnn.engines.affine_simt import SIMT
from oxidnn.engines.base import ScalarArg, TensorArg, WorkspaceArg
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops.base import Policy
from oxidnn.ops.conv import ConvProblem
from oxidnn.runtime.cuda_backend import CudaBackend
from oxidnn.testing.cases import layer_counts, layer_name
from oxidnn.testing.compare import tolerance_for

FLUSH_BYTES = 256 << 20
TORCH_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def make_tensors(problem: ConvProblem, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Inputs of standard normal values, outputs of NaN, each with the strides of its description."""
    tensors = {}
    for operand in problem.operands:
        desc = operand.desc
        storage = torch.empty_strided(desc.shape, desc.strides, dtype=TORCH_TYPES[desc.dtype.name], device="cuda")
        values = torch.full(desc.shape, float("nan"), device="cuda") if operand.is_output else \
            torch.randn(desc.shape, device="cuda", generator=generator)
        tensors[operand.name] = storage.copy_(values)
    return tensors


def torch_call(problem: ConvProblem, tensors: dict[str, torch.Tensor]) -> Any:
    """The same convolution by torch, a callable without arguments."""
    stride, dilation = list(problem.stride), list(problem.dilation)
    padding = [before for before, _ in problem.padding]
    if problem.direction == "fprop":
        x, w = tensors["x"], tensors["w"]
        return lambda: torch.conv2d(x, w, None, stride, padding, dilation, problem.groups)
    dy = tensors["dy"]
    which = 0 if problem.direction == "dgrad" else 1
    mask = [which == 0, which == 1, False]
    x, w = (tensors.get(name) for name in ("x", "w"))
    x = tensors["dx"] if x is None else x
    w = tensors["dw"] if w is None else w
    backward = torch.ops.aten.convolution_backward
    return lambda: backward(dy, x, w, None, stride, padding, dilation, False, [0, 0], problem.groups, mask)[which]


def reference(problem: ConvProblem, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in f32, and the sum of absolute terms behind each element."""
    exact = {name: t.float() for name, t in tensors.items()}
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        return torch_call(problem, exact)(), torch_call(problem, {name: t.abs() for name, t in exact.items()})()


def bind(backend: CudaBackend, engine: MatmulEngine, problem: ConvProblem, config: Any, tensors: dict[str, torch.Tensor],
         scratch: torch.Tensor) -> Any:
    """The launches of one config, as a callable without arguments."""
    launches = []
    for step in engine.build_steps(problem, config, backend.info).steps:
        values = []
        for arg in step.args:
            if isinstance(arg, TensorArg):
                values.append(tensors[arg.name].data_ptr() + arg.byte_offset)
            elif isinstance(arg, WorkspaceArg):
                values.append(scratch.data_ptr() + arg.byte_offset)
            else:
                assert not isinstance(arg, ScalarArg)
                values.append(arg)
        launches.append(backend.load(render(step.spec), step.spec).bind(step.grid, values))
    stream = backend.default_stream()

    def run() -> None:
        for launch in launches:
            launch.launch(stream)

    return run


def worst_error(got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor, problem: ConvProblem) -> float:
    """Error over tolerance, the largest; infinite where a poisoned element was left."""
    output = problem.outputs[0].desc
    terms = problem.flops // (2 * output.numel)
    law = tolerance_for(output.dtype, accumulate=F32, terms=terms)
    # The reference is itself an f32 sum: its own error is within the accumulated part, hence the factor 2.
    unit = 2.0**-10 if output.dtype.name == "f32" and problem.policy.math == "tf32" else 0.0
    allowed = law.absolute + law.relative * want.abs() + (2 * law.accumulated + unit) * magnitude
    ratio = (got.float() - want).abs() / allowed
    return float("inf") if bool(torch.isnan(ratio).any()) else float(ratio.max())


def measure(backend: CudaBackend, problem: ConvProblem, label: str, options: argparse.Namespace) -> dict[str, Any]:
    algorithm = SIMT if options.kind == "f32" and options.math == "ieee" else MMA_SM80
    engine = MatmulEngine(problem.op, algorithm)
    tensors = make_tensors(problem, torch.Generator("cuda").manual_seed(1))
    output = tensors[problem.outputs[0].name]
    want, magnitude = reference(problem, tensors)
    theirs = torch_call(problem, tensors)
    configs = engine.configs(problem, backend.info)[: options.configs or None]
    builds = [engine.build_steps(problem, c, backend.info) for c in configs]
    scratch = torch.empty(max(1, *(b.workspace_bytes for b in builds)), dtype=torch.uint8, device="cuda")
    rows: list[dict[str, Any]] = []
    calls = []
    for config in configs:
        row: dict[str, Any] = {"config": config.name, "estimate_us": engine.estimate(problem, config, backend.info)}
        try:
            output.fill_(float("nan"))
            scratch.fill_(0xFF)
            torch.cuda.synchronize()
            call = bind(backend, engine, problem, config, tensors, scratch)
            call()
            backend.synchronize(backend.default_stream())
            row["error"] = worst_error(output, want, magnitude, problem)
            calls.append(call)
        except Exception as error:  # a config that cannot be assembled or launched is reported, not fatal
            row["failure"] = f"{type(error).__name__}: {error}"[:400]
        rows.append(row)
    torch.cuda.synchronize()
    times = backend.time_launches([*calls, theirs], backend.default_stream(), options.repeats, FLUSH_BYTES)
    timed = iter(times)
    for row in rows:
        if "failure" not in row:
            row["us"] = statistics.median(next(timed))
    cudnn_us = statistics.median(times[-1])
    right = [r for r in rows if r.get("error", float("inf")) <= 1.0]
    best = min(right, key=lambda r: r["us"]) if right else None
    return {"case": label, "op": problem.op, "flops": problem.flops, "cudnn_us": cudnn_us, "best": best, "default": rows[0], "rows": rows,
            "wrong": len(rows) - len(right)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--match", default="3x3", help="only layers whose filter is so named (RxS); empty for all")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--directions", default="fprop,dgrad,wgrad")
    parser.add_argument("--configs", type=int, default=0, help="only the first N by estimate; 0 for all")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--kind", default="bf16", choices=sorted(TORCH_TYPES))
    parser.add_argument("--math", default="ieee", choices=("ieee", "tf32"))
    parser.add_argument("--json", default="")
    options = parser.parse_args()

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    backend = CudaBackend(0)
    results = []
    for direction in options.directions.split(","):
        problems = layer_counts(options.network, options.batch, options.kind, "nhwc", (direction,), Policy(math=options.math))
        for problem in problems:
            assert isinstance(problem, ConvProblem)
            label = layer_name(problem)
            if options.match and f"_{options.match}s" not in label:
                continue
            results.append(measure(backend, problem, label, options))
            torch.cuda.empty_cache()
            print(f"measured {direction} {label}", file=sys.stderr, flush=True)
    if options.json:
        record = {"stamp": stamp(), "device": backend.info.name, "options": vars(options), "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1))

    for result in results:
        for row in result["rows"]:
            if row.get("error", 2.0) > 1.0:
                print(f"WRONG {result['op']} {result['case']} {row['config']}: {row.get('failure', row.get('error'))}")
    print(f"{backend.info.name}, {options.kind} {options.math} N={options.batch}; us (median of {options.repeats})")
    print(f"{'op':11} {'layer':18} {'cudnn':>7} {'ours':>7} {'ratio':>5} {'TF/s':>5} {'default':>7} {'regret':>6} {'wrong':>5}  config")
    for r in results:
        best, first = r["best"], r["default"].get("us", float("nan"))
        if best is None:
            print(f"{r['op']:11} {r['case']:18} {r['cudnn_us']:7.1f}  no right config")
            continue
        us = best["us"]
        print(f"{r['op']:11} {r['case']:18} {r['cudnn_us']:7.1f} {us:7.1f} {r['cudnn_us'] / us:5.2f} {r['flops'] / us / 1e6:5.0f} "
              f"{first:7.1f} {first / us - 1:6.0%} {r['wrong']:5d}  {best['config']}")
    for op in sorted({r["op"] for r in results}):
        ratios = [r["cudnn_us"] / r["best"]["us"] for r in results if r["op"] == op and r["best"]]
        if ratios:
            print(f"{op}: geometric mean {float(np.exp(np.mean(np.log(ratios)))):.2f}x of cuDNN over {len(ratios)} layers")


if __name__ == "__main__":
    main()
