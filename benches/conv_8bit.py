"""Convolutions of 8 bits, requantised and not, by device time: what is chosen untuned, against bf16, cuDNN's bf16 and torch._int_mm.

    python benches/conv_8bit.py [--match 14_256] [--repeats 9] [--workers 16] [--seconds 60] [--json conv_8bit.json]

Needs a CUDA device and torch. NHWC, filters as K, taps, C, N=32. Forms: s8 to s32; to f16 with scales; to s8 with scales and a bias in f32
or s32; u8 to u8 with zero points; e4m3 to bf16, to e4m3 with scales and a bias, and the same with the largest size of the results. Each is
verified on poisoned outputs against sums in float64 first: integers exactly or to the nearest, 8-bit floats to what sums of 128 terms in
the tensor cores may err. Times are medians in microseconds, L2 flushed before each run, work queued ahead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from conv_mma import FLUSH_BYTES
from stamp import stamp
from verify import Tensors, complain, verify

from oxidnn.codegen.render import Source
from oxidnn.device import DeviceInfo
from oxidnn.dispatch.select import choose
from oxidnn.ops.case import parse_case
from oxidnn.ops.conv import ConvProblem
from oxidnn.runtime.assembler import cubin_for
from oxidnn.runtime.cuda_backend import CudaBackend

# (image height, channels, filters, taps)
LAYERS = ((14, 256, 256, 3), (56, 64, 64, 3), (56, 64, 128, 3), (7, 512, 2048, 1))
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "s8": torch.int8, "u8": torch.uint8, "s32": torch.int32,
         "e4m3": torch.float8_e4m3fn}
UNITS = {"f16": 2.0**-11, "bf16": 2.0**-8, "e4m3": 2.0**-4}  # half a step, of the number


def lines_of(h: int, c: int, k: int, r: int) -> dict[str, str]:
    def line(kind: str, out: str, more: str = "") -> str:
        return f"conv_fprop x={kind}[32,{c},{h},{h}]nhwc w={kind}[{k},{c},{r},{r}]nhwc y={out}[32,{k},{h},{h}]nhwc padding={r // 2}{more}"

    scales = f" scale_x=f32[1] scale_w=f32[{k}]"
    bytes_ = f"{scales} scale_y=f32[1] bias="
    return {"bf16": line("bf16", "bf16"), "s8 to s32": line("s8", "s32"), "s8 to f16": line("s8", "f16", scales),
            "s8 to s8, f32 bias": line("s8", "s8", f"{bytes_}f32[{k}]"), "s8 to s8, s32 bias": line("s8", "s8", f"{bytes_}s32[{k}]"),
            "u8, zero points": line("u8", "u8", f"{bytes_}s32[{k}] zero_x=u8[1] zero_y=u8[1]"), "e4m3 to bf16": line("e4m3", "bf16"),
            "e4m3 to e4m3": line("e4m3", "e4m3", f"{bytes_}f32[{k}]"),
            "e4m3 to e4m3, amax": line("e4m3", "e4m3", f"{bytes_}f32[{k}] return_amax=True")}


def device_info() -> DeviceInfo:
    return CudaBackend(0).info


def prepare(line: str, info: DeviceInfo) -> None:
    """The choice, assembled into the cubin store."""
    problem = parse_case(line)
    engine, config = choose(problem, info, None)[:2]
    for step in engine.build_steps(problem, config, info).steps:
        cubin_for(Source(step.spec), info.arch, step.spec.symbol)


def tensors_of(p: ConvProblem) -> Tensors:
    """Results of 8 bits use most of their range, those of f16 stay in theirs."""
    generator = torch.Generator("cuda").manual_seed(1)
    found = {}
    sigma = (p.desc("w").numel / p.desc("w").shape[0]) ** 0.5 * (74.0**2 if p.desc("x").dtype.name in ("s8", "u8") else 1.0)
    for o in p.operands:
        t = torch.empty_strided(o.desc.shape, o.desc.strides, dtype=TYPES[o.desc.dtype.name], device="cuda")
        if o.name == "scale_y":
            t.fill_(sigma / 50.0)
        elif o.name.startswith("scale_"):
            t.uniform_(0.5, 1.5, generator=generator)
            t *= 1e-2 if p.desc("y").dtype.name == "f16" else 1.0
        elif t.dtype in (torch.int8, torch.uint8):
            t.random_(*((-128, 128) if t.dtype == torch.int8 else (0, 256)), generator=generator)
        elif t.dtype == torch.int32:
            t.random_(-3000, 3000, generator=generator)
        else:
            t.copy_(torch.randn(o.desc.shape, device="cuda", generator=generator))
        found[o.name] = t
    return found


def wanted(p: ConvProblem, t: Tensors) -> torch.Tensor:
    """What is written, before it is rounded, in float64."""
    def vector(name: str) -> torch.Tensor:
        return t[name].double().reshape(1, -1, 1, 1)

    x = t["x"].double() - (t["zero_x"].double() if p.has("zero_x") else 0.0)
    value = F.conv2d(x, t["w"].double(), None, p.stride, [before for before, _ in p.padding])
    value = value + vector(p.addend) if p.addend else value
    for name in p.scales:
        value = value * vector(name)
    value = value + vector("bias") if p.has("bias") and not p.addend else value
    value = value / vector(p.scale_out) if p.scale_out else value
    return value + vector(p.zero_out) if p.zero_out else value


def error_of(p: ConvProblem, t: Tensors, want: torch.Tensor, largest: float) -> float:
    """Error over what is allowed."""
    y, kind = t["y"].double(), p.desc("y").dtype.name
    error = abs(float(t["amax"]) - largest) / (1e-3 * largest) if p.has("amax") else 0.0
    if kind == "s32":
        return float((y - want).abs().max())
    if kind in ("s8", "u8"):
        low, high = (-128, 127) if kind == "s8" else (0, 255)
        return max(error, float((y - want.clamp(low, high)).abs().max()) / 0.501)
    want = want.clamp(-448, 448) if kind == "e4m3" else want
    return max(error, float(((y - want).abs() / (1.05 * UNITS[kind] * want.abs() + 2e-3 * want.std())).max()))


def peer_of(p: ConvProblem, t: Tensors) -> tuple[str, Callable[[], Any]] | None:
    x, w = t["x"], t["w"]
    if x.dtype == torch.bfloat16:
        return "cuDNN", lambda: F.conv2d(x, w, None, p.stride, [before for before, _ in p.padding])
    if x.dtype == torch.int8 and w.shape[2] == 1 and p.desc("y").dtype.name == "s32":
        rows, columns = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]), w.reshape(w.shape[0], -1).t()
        return "torch._int_mm", lambda: torch._int_mm(rows, columns)
    return None


def measure(backend: CudaBackend, form: str, line: str, repeats: int) -> dict[str, Any]:
    p = parse_case(line)
    assert isinstance(p, ConvProblem)
    tensors = tensors_of(p)
    want = wanted(p, tensors)
    largest = float(wanted(replace(p, scale_out=""), tensors).abs().max())
    choice = choose(p, backend.info, None)[:2]
    rows, ran = verify(backend, p, [choice], tensors, lambda: error_of(p, tensors, want, largest))
    complain(p.op, line, rows)
    peer = peer_of(p, tensors)
    calls = [call for *_, call in ran] + ([peer[1]] if peer else [])
    us = [statistics.median(each) for each in backend.time_launches(calls, backend.default_stream(), repeats, FLUSH_BYTES)]
    return {"form": form, "line": line, **rows[0], "us": us[0] if ran else None, "launches": [len(plan.build.steps) for _, plan, _ in ran],
            "flops": p.flops, "peer": peer[0] if peer else "", "peer_us": us[-1] if peer else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="", help="words of layers (height_channels-filters_taps), by commas")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    begin = time.monotonic()
    layers = {f"{h}_{c}-{k}_{r}x{r}": lines_of(h, c, k, r) for h, c, k, r in LAYERS}
    layers = {name: lines for name, lines in layers.items() if any(word in name for word in options.match.split(","))}
    with ProcessPoolExecutor(options.workers, mp_context=get_context("fork")) as pool:
        info = pool.submit(device_info).result()
        every = [line for lines in layers.values() for line in lines.values()]
        list(pool.map(prepare, every, [info] * len(every)))
    backend = CudaBackend(0)
    torch.backends.cudnn.benchmark = True
    results = []
    print(f"{'layer':>16} {'form':>20} {'us':>7} {'T/s':>6} {'error':>6} launches")
    for name, lines in layers.items():
        for form, line in lines.items():
            if time.monotonic() - begin > options.seconds:
                print(f"left out after {options.seconds:.0f} s: {name} {form}")
                continue
            row = {"case": name, **measure(backend, form, line, options.repeats)}
            results.append(row)
            if row["us"]:
                peer = f"  {row['peer']} {row['peer_us']:.1f}" if row["peer"] else ""
                print(f"{name:>16} {form:>20} {row['us']:7.1f} {row['flops'] / row['us'] / 1e6:6.0f} {row['error']:6.2f} "
                      f"{row['launches'][0]}  {row['engine'].split('.')[1]} {row['config']}{peer}", flush=True)
            torch.cuda.empty_cache()
    if options.json:
        record = {"bench": "conv_8bit", "options": vars(options), **stamp(), "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
