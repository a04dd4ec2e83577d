"""Linear layers of quantised weights against cuBLAS with f16 weights: configs verified on poisoned outputs, then timed interleaved.

    python benches/quantized_linear.py [--rows 1,16,64,4096] [--kinds s4,nf4,s8,e4m3] [--shapes N4096_K4096,...] [--group 128] [--zero]
                                       [--x f16|bf16] [--engines stream,...] [--configs N] [--flush read|zero|chain] [--repeats 15]
                                       [--seconds S] [--workers 16] [--all] [--json F]

Needs a CUDA device and torch; kernels are assembled by --workers processes before anything is timed. A row a case: cuBLAS's time for
x @ W.T of W in x's type, our fastest config's and the untuned choice's, TB/s of codes. Medians in microseconds, work queued ahead, L2
flushed before each run; "chain": a launch of 12 in a row, each with weights of its own. Scales are f16: of groups of --group for s4, u4 and
nf4, of rows for s8 and e4m3.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from conv_mma import TORCH_TYPES
from decode_gemm import LAYERS, time_calls, time_chains
from stamp import stamp
from verify import Tensors, complain, fastest, verify

from oxidnn.codegen.render import Source
from oxidnn.codegen.spec import KernelSpec
from oxidnn.device import DeviceInfo
from oxidnn.dispatch.registry import engines_for
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.ops.quantized_linear import NF4, NIBBLES
from oxidnn.runtime.assembler import cubin_for
from oxidnn.runtime.cuda_backend import CudaBackend

SHAPES = {name: tuple(int(x[1:]) for x in name.split("_")) for name in ("N4096_K4096", "N11008_K4096", "N4096_K11008", "N28672_K8192")}


def case(m: int, n: int, k: int, kind: str, group: int, zero: bool, x: str) -> str:
    is_narrow = kind in NIBBLES
    code = "u8" if is_narrow else kind
    group = 64 if kind == "nf4" else group
    grid = f"[{n},{k // group}]" if is_narrow and group else f"[{n}]"
    zeros = f" zero_point=u8{grid}" if zero and kind in ("s4", "u4") else ""
    return f"quantized_linear x={x}[{m},{k}] w={code}[{n},{k // 2 if is_narrow else k}] scale=f16{grid}{zeros} kind={kind}"


def make_tensors(problem: Problem, seed: int) -> tuple[Tensors, torch.Tensor]:
    """(operands, W dequantised in f32)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    tensors: Tensors = {}
    kind, group = problem.kind, problem.group_size  # type: ignore[attr-defined]
    for o in problem.operands:
        shape, name = o.desc.shape, o.desc.dtype.name
        if o.name == "w":
            codes = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8, generator=generator)
            if kind == "e4m3":  # no NaN
                codes = torch.where((codes & 127) == 127, codes - 1, codes).view(torch.float8_e4m3fn)
            tensors["w"] = codes.view(torch.int8) if kind == "s8" else codes
        elif o.name == "scale":
            tensors["scale"] = (torch.rand(shape, device="cuda", generator=generator) * 0.02 + 0.01).to(TORCH_TYPES[name])
        elif o.name == "zero_point":
            tensors["zero_point"] = torch.randint(0, 16, shape, device="cuda", dtype=torch.uint8, generator=generator)
        else:
            tensors[o.name] = torch.randn(shape, device="cuda", generator=generator).to(TORCH_TYPES[name])
    w = tensors["w"]
    if kind in NIBBLES:
        codes = torch.stack([w & 15, w >> 4], -1).reshape(w.shape[0], -1).int()
        wide = torch.tensor(NF4, device="cuda")[codes] if kind == "nf4" else (codes - 16 * (codes > 7) if kind == "s4" else codes).float()
    else:
        wide = w.float()

    def spread(t: torch.Tensor) -> torch.Tensor:
        return t.float().reshape(w.shape[0], -1).repeat_interleave(min(group, wide.shape[1]), 1)[:, :wide.shape[1]]

    if "zero_point" in tensors:
        wide = wide - spread(tensors["zero_point"])
    return tensors, wide * spread(tensors["scale"])


def error_over_tolerance(got: torch.Tensor, want: torch.Tensor, spread: torch.Tensor) -> float:
    """Rounding of the result, of W to x's type (each term by itself; `spread`: the root of the sum of their squares), of sums."""
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[got.dtype]
    ratio = (got.float() - want).abs() / (1.01 * unit * want.abs() + 4 * unit * spread + 2.0**-24)
    return float("inf") if bool(torch.isnan(ratio).any()) else float(ratio.max())


def choices_of(problem: Problem, info: DeviceInfo, options: argparse.Namespace) -> list[tuple[Any, Any]]:
    found = []
    for engine in engines_for(problem.op):
        if any(part in engine.id for part in options.engines.split(",")) and engine.check_support(problem, info):
            found += [(engine, c) for c in engine.configs(problem, info)[: options.configs or None]]
    return found


def device_info() -> DeviceInfo:
    return CudaBackend(0).info


def store(spec: KernelSpec, arch: str) -> None:
    cubin_for(Source(spec), arch, spec.symbol)


def assemble_all(problems: list[Problem], options: argparse.Namespace) -> int:
    """The kernels of all choices, into the cubin store."""
    with ProcessPoolExecutor(options.workers, mp_context=get_context("fork")) as pool:
        info = pool.submit(device_info).result()
        specs = {step.spec for p in problems for engine, c in choices_of(p, info, options) for step in engine.build_steps(p, c, info).steps}
        for future in [pool.submit(store, spec, info.arch) for spec in specs]:
            future.exception()  # a choice that cannot be assembled is a row with a failure
    return len(specs)


def measure(backend: CudaBackend, line: str, options: argparse.Namespace) -> dict[str, Any]:
    problem = parse_case(line)
    tensors, wide = make_tensors(problem, 1)
    x = tensors["x"].float()
    want, spread = x @ wide.T, (x.square() @ wide.square().T).sqrt()
    rows, ran = verify(backend, problem, choices_of(problem, backend.info, options), tensors,
                       lambda: error_over_tolerance(tensors["y"], want, spread))
    dense = wide.to(tensors["x"].dtype)
    del wide
    if options.flush == "chain":
        stream = backend.default_stream()
        scratch = torch.empty(max((plan.workspace_bytes for _, plan, _ in ran), default=0) + 1, dtype=torch.uint8, device="cuda")
        layers = [tensors["w"], *(tensors["w"].clone() for _ in range(LAYERS - 1))]
        wide_layers = [dense, *(dense.clone() for _ in range(LAYERS - 1))]

        def call_of(plan: Any, w: torch.Tensor) -> Callable[[], None]:
            pointers = [(w if o.name == "w" else tensors[o.name]).data_ptr() for o in problem.operands]
            return lambda: plan.execute(pointers, scratch.data_ptr(), stream)

        chains: list[list[Callable[[], Any]]] = [[call_of(plan, w) for w in layers] for _, plan, _ in ran]
        times = time_chains([*chains, [lambda w=w: torch.nn.functional.linear(tensors["x"], w) for w in wide_layers]], options.repeats)
    else:
        calls = [*(call for _, _, call in ran), lambda: torch.nn.functional.linear(tensors["x"], dense)]
        times = time_calls(calls, options.repeats, options.flush)
    for (row, _, _), own in zip(ran, times, strict=False):
        row["us"] = statistics.median(own)
    default = min((r for r in rows if "us" in r), key=lambda r: r["estimate_us"], default={})
    return {"case": line, "weight_bytes": tensors["w"].nbytes, "library_us": statistics.median(times[-1]), "best": fastest(rows),
            "default": default, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,16,64,4096")
    parser.add_argument("--kinds", default="s4,nf4,s8,e4m3")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--zero", action="store_true")
    parser.add_argument("--x", default="f16", choices=("f16", "bf16"))
    parser.add_argument("--engines", default=".", help="parts of ids")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--configs", type=int, default=0, help="only the first N of an engine by estimate; 0 for all")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--flush", default="read", choices=("zero", "read", "chain"))
    parser.add_argument("--all", action="store_true", help="print every config")
    parser.add_argument("--seconds", type=float, default=0, help="start no case after so many seconds; 0 for no limit")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    begin = time.perf_counter()
    lines = [(f"{kind} M{m} {shape}", case(m, *SHAPES[shape], kind, options.group, options.zero, options.x))
             for m in map(int, options.rows.split(",")) for kind in options.kinds.split(",") for shape in options.shapes.split(",")]
    count = assemble_all([parse_case(line) for _, line in lines], options)
    print(f"{count} kernels assembled in {time.perf_counter() - begin:.0f} s", flush=True)
    backend = CudaBackend(0)
    print(f"{'case':24} {'cuBLAS':>7} {'ours':>7} {'TB/s':>5} {'ratio':>5} {'default':>7}  config")
    results = []
    for label, line in lines:
        if options.seconds and time.perf_counter() - begin > options.seconds:
            print(f"{label}: not run")
            continue
        r = measure(backend, line, options)
        results.append(r)
        complain("quantized_linear", label, r["rows"])
        if options.all:
            for row in sorted((row for row in r["rows"] if "us" in row), key=lambda row: row["us"]):
                print(f"    {row['engine']} {row['config']}: {row['us']:.1f} us, estimated {row['estimate_us']:.1f}, "
                      f"error {row['error']:.2f}")
        best = r["best"]
        if best is None:
            print(f"{label:24} {r['library_us']:7.1f}  no right config")
            continue
        print(f"{label:24} {r['library_us']:7.1f} {best['us']:7.1f} {r['weight_bytes'] / best['us'] / 1e6:5.2f} "
              f"{r['library_us'] / best['us']:5.2f} {r['default'].get('us', float('nan')):7.1f}  {best['engine']} {best['config']}",
              flush=True)
    done = [r for r in results if r["best"]]
    if done:
        def mean(ratios: list[float]) -> float:
            return math.exp(statistics.fmean(math.log(x) for x in ratios))

        print(f"geometric means over {len(done)}: {mean([r['library_us'] / r['best']['us'] for r in done]):.2f}x of cuBLAS in f16, "
              f"regret of the untuned choice {mean([r['default']['us'] / r['best']['us'] for r in done]) - 1:.0%}")
    if options.json:
        record = {"stamp": stamp(), "device": backend.info.name, "options": vars(options), "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
