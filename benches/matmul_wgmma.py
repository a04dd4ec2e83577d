"""GEMMs and convolutions on wgmma against cuBLAS and cuDNN: every config verified on poisoned outputs, then timed interleaved.

    python benches/matmul_wgmma.py [--ops gemm,conv_fprop,conv_dgrad,conv_wgrad] [--network resnet50] [--match 3x3] [--batch 128]
                                   [--sizes 1024,2048,4096x24576x1536] [--kind bf16|f16|f32|e4m3|e5m2|s8] [--layouts nt,nn,tn] [--configs N]
                                   [--repeats 15] [--mma] [--fused] [--depthwise] [--json out.json]

Needs an sm_90 device and torch. A row a problem: the library's time, our fastest config's and the untuned choice's, ratios to the
library, and TFLOP/s. A size is M, N and K, or MxNxK. f32 is rounded to tf32 on both sides. 8-bit floats have a row against each of
torch._scaled_mm's ways to sum: "ieee" (promoted, use_fast_accum=False) and "fast", and one of block scales (1x128, 128x128) against
torch's own where it takes them, else against the former with one scale; 8-bit integers are compared with torch._int_mm. Times are
medians in microseconds, L2 flushed before each run. --mma adds the mma.sync configs; --fused measures
relu(conv + bias) in one kernel against torch.relu(torch.conv2d(x, w, bias)).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from conv_mma import FLUSH_BYTES, TORCH_TYPES, make_tensors
from conv_mma import reference as conv_reference
from conv_mma import torch_call as conv_call
from conv_mma import worst_error as float_error
from stamp import stamp
from verify import complain, fastest, verify

from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops import OPS
from oxidnn.ops.base import Policy, Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.cuda_backend import CudaBackend
from oxidnn.tensor import TensorDesc
from oxidnn.testing.cases import layer_counts, layer_name

FP8 = ("e4m3", "e5m2")
TORCH_TYPES.update({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "s8": torch.int8, "s32": torch.int32})


def worst_error(got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor, problem: Problem) -> float:
    """As of floats, which tensor cores sum in 13 bits where they have 8 (testing/reference/gemm); 0 or infinity of integers."""
    if not got.is_floating_point():
        return 0.0 if bool((got.double() == want).all()) else float("inf")
    if problem.desc(problem.inputs[0].name).dtype.name not in FP8:
        return float_error(got, want, magnitude, problem)  # type: ignore[arg-type]
    part = 2.0**-12 * max(4, -(-problem.k // 32) if problem.policy.math == "fast" else 0)  # type: ignore[attr-defined]
    ratio = (got.float() - want).abs() / (2.0**-7 * want.abs() + part * magnitude)
    return float("inf") if bool(torch.isnan(ratio).any()) else float(ratio.max())


def takes_block_scales(a: torch.Tensor, b: torch.Tensor, tensors: dict[str, torch.Tensor], out_type: torch.dtype) -> bool:
    """Whether torch._scaled_mm multiplies by factors of 1x128 of a and 128x128 of b on this device."""
    try:
        torch._scaled_mm(a, b, *(tensors[name].mT.contiguous().mT for name in ("scale_a", "scale_b")), out_dtype=out_type)
    except (RuntimeError, ValueError):
        return False
    return True


def torch_call(problem: Problem, tensors: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    if problem.op != "gemm":
        if "bias" not in tensors:
            return conv_call(problem, tensors)  # type: ignore[arg-type]
        stride, padding, dilation = list(problem.stride), [before for before, _ in problem.padding], list(problem.dilation)  # type: ignore[attr-defined]
        x, w, bias, groups = tensors["x"], tensors["w"], tensors["bias"], problem.groups  # type: ignore[attr-defined]
        return lambda: torch.relu(torch.conv2d(x, w, bias, stride, padding, dilation, groups))
    a, b = tensors["a"], tensors["b"]
    a = a.mT if problem.transpose_a else a  # type: ignore[attr-defined]
    b = b.mT if problem.transpose_b else b  # type: ignore[attr-defined]
    if a.dtype == torch.int8:
        return lambda: torch._int_mm(a, b)
    if a.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        is_fast, out_type = problem.policy.math == "fast", tensors["d"].dtype
        if tensors["scale_a"].numel() > 1 and takes_block_scales(a, b, tensors, out_type):
            block_a, block_b = (tensors[name].mT.contiguous().mT for name in ("scale_a", "scale_b"))
            return lambda: torch._scaled_mm(a, b, block_a, block_b, out_dtype=out_type)
        scale_a, scale_b = (tensors[name].reshape(-1)[:1] for name in ("scale_a", "scale_b"))
        return lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out_type, use_fast_accum=is_fast)
    out = torch.empty(a.shape[:-1] + b.shape[-1:], dtype=tensors["d"].dtype, device="cuda")
    return lambda: torch.matmul(a, b, out=out)


def with_relu(problem: Problem) -> Problem:
    """A forward convolution with a bias and a relu in its epilogue."""
    x, w, y = (problem.desc(name) for name in ("x", "w", "y"))
    attrs = dict(problem.attrs) | {"epilogue": "relu(acc + bias[c])"}
    return OPS["conv_fprop"].make({"x": x, "w": w, "y": y, "bias": TensorDesc.packed(x.dtype, (w.shape[0],))}, attrs, problem.policy)


def reference(problem: Problem, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    if "bias" in tensors:
        wide = {name: t.float() for name, t in tensors.items()}
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
            return torch_call(problem, wide)(), torch_call(problem, {name: t.abs() for name, t in wide.items()})()
    if problem.op != "gemm":
        return conv_reference(problem, tensors)  # type: ignore[arg-type]
    wide = {name: t.float() if t.is_floating_point() else t.double() for name, t in tensors.items()}
    scale = wide["scale_a"].reshape(-1)[0] * wide["scale_b"].reshape(-1)[0] if "scale_a" in wide else 1.0  # all are alike
    return torch_call(problem, wide)() * scale, torch_call(problem, {name: t.abs() for name, t in wide.items()})() * scale


def measure(backend: CudaBackend, problem: Problem, label: str, options: argparse.Namespace) -> dict[str, Any] | None:
    ends = (".depthwise", ".depthwise_mma_sm80") if options.depthwise else ("_sm90", "mma_sm80") if options.mma else ("_sm90",)
    engines = [e for e in ENGINES[problem.op] if e.id.endswith(ends)]
    choices = [(engine, c) for engine in engines if engine.check_support(problem, backend.info)
               for c in engine.configs(problem, backend.info)[: options.configs or None]]
    if not choices:
        print(f"refused {problem.op} {label}: {engines[-1].check_support(problem, backend.info).reason}", flush=True)
        return None
    tensors = make_tensors(problem, torch.Generator("cuda").manual_seed(1))  # type: ignore[arg-type]
    for name in ("scale_a", "scale_b"):
        if name in tensors:
            tensors[name].fill_(0.25)
    output = tensors[problem.outputs[0].name]
    torch.backends.cuda.matmul.allow_tf32 = False
    want, magnitude = reference(problem, tensors)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = problem.policy.math == "tf32"
    theirs = torch_call(problem, tensors)
    rows, ran = verify(backend, problem, choices, tensors, lambda: worst_error(output, want, magnitude, problem))
    torch.cuda.synchronize()
    times = backend.time_launches([*(call for _, _, call in ran), theirs], backend.default_stream(), options.repeats, FLUSH_BYTES)
    for (row, _, _), own in zip(ran, times, strict=False):
        row["us"] = statistics.median(own)
    return {"case": label, "op": problem.op, "flops": problem.flops, "library_us": statistics.median(times[-1]),
            "best": fastest(rows), "default": min(rows, key=lambda r: r["estimate_us"]), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default="gemm,conv_fprop,conv_dgrad,conv_wgrad")
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--match", default="3x3", help="only layers whose filter is so named (RxS); empty for all")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--sizes", default="1024,2048,4096,8192")
    parser.add_argument("--kind", default="bf16", choices=("bf16", "f16", "f32", *FP8, "s8"))
    parser.add_argument("--layouts", default="nt,nn,tn")
    parser.add_argument("--configs", type=int, default=0, help="only the first N of an algorithm by estimate; 0 for all")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--mma", action="store_true")
    parser.add_argument("--fused", action="store_true", help="conv_fprop with bias and relu")
    parser.add_argument("--depthwise", action="store_true", help="depthwise layers, on FMAs and on mma.sync, instead of the rest")
    parser.add_argument("--all", action="store_true", help="print every config")
    parser.add_argument("--json", default="")
    options = parser.parse_args()

    torch.backends.cudnn.benchmark = True
    backend = CudaBackend(0)
    problems: list[tuple[str, Problem]] = []
    for op in options.ops.split(","):
        if op == "gemm":
            for size in options.sizes.split(","):
                m, n, k = size.split("x") if "x" in size else (size,) * 3
                layouts = tuple((name, flags) for name, flags in (("nt", "transpose_b=True"), ("nn", ""), ("tn", "transpose_a=True"))
                                if name in options.layouts.split(","))
                if options.kind in FP8:
                    layouts = tuple((f"nt_{math_}", f"transpose_b=True scale_a=f32[1] scale_b=f32[1] math={math_}")
                                    for math_ in ("ieee", "fast"))
                    k_blocks, n_blocks = -(-int(k) // 128), -(-int(n) // 128)
                    layouts += (("nt_block", f"transpose_b=True scale_a=f32[{m},{k_blocks}] scale_b=f32[{k_blocks},{n_blocks}]"),)
                for layout, flags in layouts[:1] if options.kind in ("s8", "f32") else layouts:
                    a = f"[{k},{m}]" if layout == "tn" else f"[{m},{k}]"
                    b = f"[{n},{k}]" if layout.startswith("nt") else f"[{k},{n}]"
                    math_ = " math=tf32" if options.kind == "f32" else ""
                    problems.append((f"{size}_{layout}", parse_case(f"gemm a={options.kind}{a} b={options.kind}{b} {flags}{math_}")))
            continue
        for problem in layer_counts(options.network, options.batch, options.kind, "nhwc", (op.removeprefix("conv_"),), Policy()):
            if (problem.groups > 1) == options.depthwise and (not options.match or f"_{options.match}s" in layer_name(problem)):  # type: ignore[attr-defined]
                problems.append((layer_name(problem), with_relu(problem) if options.fused else problem))  # type: ignore[arg-type]
    print(f"{'op':11} {'case':22} {'library':>8} {'ours':>8} {'ratio':>5} {'TF/s':>5} {'default':>8} {'regret':>6}  config")
    results = []
    for label, problem in problems:
        result = measure(backend, problem, label, options)
        torch.cuda.empty_cache()
        if result is None:
            continue
        results.append(result)
        complain(problem.op, label, result["rows"])
        for row in result["rows"]:
            if options.all and "us" in row:
                print(f"    {row['engine']} {row['config']}: {row['us']:.1f} us, estimated {row['estimate_us']:.1f}")
        best, first = result["best"], result["default"].get("us", float("nan"))
        if best is None:
            print(f"{problem.op:11} {label:22} {result['library_us']:8.1f}  no right config")
            continue
        us = best["us"]
        print(f"{problem.op:11} {label:22} {result['library_us']:8.1f} {us:8.1f} {result['library_us'] / us:5.2f} "
              f"{result['flops'] / us / 1e6:5.0f} {first:8.1f} {first / us - 1:6.0%}  {best['engine'].rpartition('.')[2]} "
              f"{best['config']}", flush=True)
    for op in sorted({r["op"] for r in results}):
        ratios = [r["library_us"] / r["best"]["us"] for r in results if r["op"] == op and r["best"]]
        if ratios:
            print(f"{op}: geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.2f}x of the library over {len(ratios)}")
    if options.json:
        record = {"stamp": stamp(), "device": backend.info.name, "options": vars(options), "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
