"""Memory-bound ops against eager and compiled PyTorch: verified against float64 on poisoned outputs, then timed interleaved.

    python benches/memory_bound.py [--ops layer_norm,softmax_backward] [--shapes 32768x256,...] [--long] [--more] [--kind bf16] [--configs]
                                   [--parts] [--compile 'softmax 16384x4096'] [--workers 14] [--repeats 9] [--seconds S] [--json out.json]

Needs a CUDA device and torch. Shapes: benches/cases/shapes/memory_bound.json; --long adds rows of 2^20 elements, --more takes 20 further
shapes instead (odd sizes, small batches, f32, channels first). A row a case: our untuned choice (with --configs also the best config), TB/s
by the bytes that must move (row-wise: 1 read + 1 write forward, 2 + 1 backward; pooling: in + out), its ratio to a copy at 3.03 TB/s and to
the copy measured here of as many bytes, and how many times as fast as eager and compiled PyTorch. Times are medians in microseconds, L2
flushed before each run. --seconds: start no case after so long. --workers: processes that fill torch.compile's cache on disk beforehand.
Dropout and random numbers are verified by their statistics here, by their values in tests/.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from conv_mma import FLUSH_BYTES
from conv_mma import TORCH_TYPES as FLOAT_TYPES
from stamp import stamp
from verify import Tensors, complain, fastest, verify

from oxidnn.dispatch.registry import engines_for
from oxidnn.dispatch.select import choose
from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.cuda_backend import CudaBackend
from oxidnn.testing.cases import shapes_file

COPY_TBS = 3.03  # measured on an H100, read + write
TORCH_TYPES = FLOAT_TYPES | {"f64": torch.float64, "s64": torch.int64, "s32": torch.int32}
ROW_OPS = ("layer_norm", "rms_norm", "softmax", "layer_norm_backward", "rms_norm_backward", "softmax_backward", "cross_entropy",
           "cross_entropy_backward", "activation", "activation_backward", "pointwise", "reduce")
LOSSES = {"mse": F.mse_loss, "huber": F.huber_loss, "bce": F.binary_cross_entropy, "bce_with_logits": F.binary_cross_entropy_with_logits,
          "kl_div": F.kl_div}
LOSS_OPS = tuple(f"{name}{suffix}" for name in LOSSES for suffix in ("", "_backward"))
RANDOM_OPS = ("dropout", "uniform", "normal", "bernoulli")
ELEMENT_SIZES = ((2048, 8192), (8192, 16384))  # of losses and random numbers: what a row is does not count
POOL_OPS = ("pool", "pool_backward")
LONG = (128, 1 << 20)
MORE_OPS = ("layer_norm", "rms_norm", "softmax", "layer_norm_backward", "softmax_backward", "cross_entropy", "activation", "reduce")
MORE_ROWS = (  # rows, columns, type
    (4096, 50257, "bf16"), (30000, 1000, "bf16"), (65537, 768, "bf16"), (100, 4096, "bf16"), (8, 8192, "bf16"), (1, 131072, "bf16"),
    (777, 12289, "bf16"), (16384, 1024, "f32"), (4096, 16384, "f32"), (2048, 65536, "f32"), (3001, 3001, "f32"), (8192, 4096, "f16"))
MORE_POOLS = (  # entry of the file, type, layout
    ({"op": "max", "N": 64, "C": 64, "H": 112, "W": 112, "k": 3, "s": 2, "p": 1}, "bf16", "nchw"),
    ({"op": "max", "N": 32, "C": 64, "H": 113, "W": 111, "k": 3, "s": 2, "p": 1}, "bf16", "nhwc"),
    ({"op": "max", "N": 1, "C": 64, "H": 112, "W": 112, "k": 3, "s": 2, "p": 1}, "bf16", "nhwc"),
    ({"op": "max", "N": 32, "C": 96, "H": 54, "W": 54, "k": 3, "s": 1, "p": 1}, "f32", "nhwc"),
    ({"op": "avg", "N": 64, "C": 192, "H": 35, "W": 35, "k": 3, "s": 1, "p": 1}, "bf16", "nhwc"),
    ({"op": "avg", "N": 64, "C": 128, "H": 56, "W": 56, "k": 2, "s": 2, "p": 0}, "f32", "nchw"),
    ({"op": "global_avg", "N": 8, "C": 1280, "H": 7, "W": 7}, "bf16", "nhwc"),
    ({"op": "global_avg", "N": 128, "C": 2048, "H": 7, "W": 7}, "f32", "nchw"))


def row_case(op: str, rows: int, cols: int, kind: str) -> str:
    x, per_row, per_column = f"{kind}[{rows},{cols}]", f"f32[{rows}]", f"{kind}[{cols}]"
    if op in LOSS_OPS:
        return f"loss{'_backward' * op.endswith('_backward')} x={x} target={x} name={op.removesuffix('_backward')}"
    if op in ("uniform", "normal"):
        return f"random shape=({rows},{cols}) distribution={op} dtype={kind}"
    return op + {
        "dropout": f" x={x} p=0.1",
        "bernoulli": f" probability={x}",
        "layer_norm": f" x={x} gamma={per_column} beta={per_column}",
        "rms_norm": f" x={x} gamma={per_column}",
        "softmax": f" x={x}",
        "layer_norm_backward": f" dy={x} x={x} mean={per_row} rstd={per_row} gamma={per_column}",
        "rms_norm_backward": f" dy={x} x={x} rstd={per_row} gamma={per_column}",
        "softmax_backward": f" dy={x} y={x}",
        "cross_entropy": f" logits={x} target=s64[{rows}]",
        "cross_entropy_backward": f" logits={x} target=s64[{rows}]",
        "activation": f" x={x} name=gelu",
        "activation_backward": f" dy={x} x={x} name=gelu",
        "pointwise": f' x={x} y={x} expression="x + y"',
        "reduce": f" x={x} op=sum axes=(1,)",
    }[op]


def pool_case(entry: dict[str, Any], kind: str, backward: bool, layout: str = "nhwc") -> str:
    n, c, h, w = (entry[d] for d in "NCHW")
    op = f"{entry['op']}_pool" + "_backward" * backward
    attrs = "" if entry["op"] == "global_avg" else f" window={entry['k']} stride={entry['s']} padding={entry['p']}"
    if not backward:
        return f"{op} x={kind}[{n},{c},{h},{w}]{layout}{attrs}"
    p, q = (1, 1) if not attrs else ((d + 2 * entry["p"] - entry["k"]) // entry["s"] + 1 for d in (h, w))
    given = f" x={kind}[{n},{c},{h},{w}]{layout}" if entry["op"] == "max" else f" x_shape=({n},{c},{h},{w})"
    return f"{op} dy={kind}[{n},{c},{p},{q}]nhwc{given} dx={kind}[{n},{c},{h},{w}]{layout}{attrs}"


# The same by torch: op without "_backward" -> (function of the tensors, inputs it is differentiated by).
def forward_of(problem: Problem) -> tuple[Callable[[Tensors], torch.Tensor], tuple[str, ...]]:
    op = problem.op.removesuffix("_backward")
    if op.endswith("_pool"):
        if op == "global_avg_pool":
            return lambda t: F.adaptive_avg_pool2d(t["x"], 1), ("x",)
        window, stride, padding = ([getattr(a, f) for a in problem.axes] for f in ("window", "stride", "low"))  # type: ignore[attr-defined]
        function = F.max_pool2d if op == "max_pool" else F.avg_pool2d
        return lambda t: function(t["x"], window, stride, padding), ("x",)
    if op == "loss":
        loss = LOSSES[dict(problem.attrs)["name"]]
        return lambda t: loss(t["x"], t["target"]), ("x",)
    if op == "random":
        return (lambda t: t["y"].normal_()) if dict(problem.attrs).get("distribution") == "normal" else (lambda t: t["y"].uniform_()), ()
    return {
        "dropout": (lambda t: F.dropout(t["x"], 0.1), ("x",)),
        "bernoulli": (lambda t: torch.bernoulli(t["probability"]), ()),
        "layer_norm": (lambda t: F.layer_norm(t["x"], t["x"].shape[1:], t["gamma"], t["beta"]), ("x", "gamma", "beta")),
        "rms_norm": (lambda t: F.rms_norm(t["x"], t["x"].shape[1:], t["gamma"], 1e-5), ("x", "gamma")),
        "softmax": (lambda t: torch.softmax(t["x"], -1), ("x",)),
        "cross_entropy": (lambda t: F.cross_entropy(t["logits"], t["target"]), ("logits",)),
        "activation": (lambda t: F.gelu(t["x"]), ("x",)),
        "pointwise": (lambda t: t["x"] + t["y"], ()),
        "reduce": (lambda t: t["x"].sum(1), ()),
    }[op]


def make_tensors(problem: Problem, seed: int, device: str = "cuda") -> Tensors:
    """Operands (outputs of NaN), and what torch needs besides: x behind a softmax or a pool's gradient, beta, dy."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=torch.float32).to(kind)

    tensors: Tensors = {}
    for operand in problem.operands:
        desc, kind = operand.desc, TORCH_TYPES[operand.desc.dtype.name]
        storage = torch.empty_strided(desc.shape, desc.strides, dtype=kind, device=device)
        if operand.is_output:
            storage.fill_(float("nan"))
        elif problem.op.startswith("loss") or operand.name == "probability":
            storage.copy_(torch.rand(desc.shape, device=device, generator=generator) * 0.9 + 0.05)
        elif operand.name == "target":
            classes = problem.desc("logits").shape[1]
            storage.copy_(torch.randint(0, classes, desc.shape, device=device, generator=generator))
        else:
            storage.copy_(normal(desc.shape, torch.float32))
        tensors[operand.name] = storage
    op = problem.op
    if "norm" in op and op.endswith("backward"):
        wide = tensors["x"].double()
        mean = wide.mean(1) if "layer" in op else torch.zeros_like(wide[:, 0])
        tensors |= {"beta": torch.zeros_like(tensors["gamma"])}
        values = {"mean": mean, "rstd": ((wide - mean[:, None]).square().mean(1) + 1e-5).rsqrt()}
        for name in values:
            if name in tensors:
                tensors[name].copy_(values[name])
    if op == "softmax_backward":
        tensors["x"] = normal(tensors["y"].shape, tensors["y"].dtype)
        tensors["y"].copy_(torch.softmax(tensors["x"].double(), 1))
    if op.endswith("pool_backward") and "x" not in tensors:
        shape = problem.desc("dx").shape
        last = torch.channels_last if problem.desc("dx").strides[1] == 1 else torch.contiguous_format
        tensors["x"] = normal(shape, tensors["dy"].dtype).contiguous(memory_format=last)
    if op in ("cross_entropy_backward", "loss_backward"):
        tensors["dy"] = torch.ones((), dtype=tensors["logits" if "logits" in tensors else "x"].dtype, device=device)
    return tensors


def call_of(problem: Problem, tensors: Tensors, compile_it: bool = False) -> Callable[[], Any]:
    """torch's call, which for gradients runs the backward alone."""
    function, names = forward_of(problem)
    if compile_it:
        torch._dynamo.reset()
        function = torch.compile(function, dynamic=False)
    if not problem.op.endswith("_backward"):
        return lambda: function(tensors)
    leaves = {n: tensors[n].detach().requires_grad_() for n in names}
    y = function(tensors | leaves)
    inputs = list(leaves.values())
    return lambda: torch.autograd.grad(y, inputs, tensors["dy"], retain_graph=True)


def reference(problem: Problem, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Outputs in float64; none of dropout and random numbers."""
    if problem.op in ("dropout", "random", "bernoulli"):
        return {}
    outputs = [o.name for o in problem.outputs]
    names = {o.name for o in problem.outputs}
    wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items() if n not in names}
    if problem.op.endswith("pool_backward"):  # by padded windows of channels last torch 2.11 gives a wrong one (pytorch issue 188344)
        wide = {n: t.contiguous() for n, t in wide.items()}
    if problem.op == "softmax_backward":  # of the rounded y
        y, dy = wide["y"], wide["dy"]
        return {"dx": y * (dy - (dy * y).sum(1, keepdim=True))}
    result = call_of(problem, wide)()
    return dict(zip(outputs, result if isinstance(result, tuple) else (result,), strict=False))


def worst_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Error over what rounding the result and f32 arithmetic allow, the largest; infinite where a poisoned element was left."""
    unit = 1.01 * {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20}[got.dtype]
    floor = 2.0**-14 * want.square().mean().sqrt() + (2.0**-24 if got.dtype is torch.float16 else 0.0)  # of f16: a subnormal
    ratio = (got.double().reshape(want.shape) - want).abs_() / (unit * want.abs() + floor)
    return float("inf") if bool(torch.isnan(ratio).any()) else float(ratio.max())


def moments_error(problem: Problem, tensors: Tensors) -> float:
    """Of dropout and random numbers: the mean's and the variance's distance from what they should be, over five of their deviations."""
    y, p = tensors["y"].double(), 0.1
    if problem.op == "dropout":
        kept = y != 0
        scaled = (y - tensors["x"].double() / (1 - p))[kept & (tensors["x"] != 0)]
        if float(scaled.abs().max() / y.abs().max()) > 2.0**-8:
            return float("inf")
        values, mean, variance = kept[tensors["x"] != 0].double(), 1 - p, p * (1 - p)
    elif problem.op == "bernoulli":
        chance = tensors["probability"].double()
        values, mean, variance = y - chance, 0.0, float((chance * (1 - chance)).mean())
    elif dict(problem.attrs).get("distribution") == "normal":
        values, mean, variance = y, 0.0, 1.0
    else:
        values, mean, variance = y, 0.5, 1 / 12
    slack = 5 / values.numel() ** 0.5 + (2.0**-9 if y is values and tensors["y"].element_size() == 2 else 0.0)  # rounding to 16 bits
    error = max(abs(float(values.mean()) - mean) / variance**0.5, abs(float(values.var()) / variance - 1) / 2) / slack
    return float("inf") if math.isnan(error) else error


def choices_of(backend: CudaBackend, problem: Problem, every: bool) -> list[tuple[Engine, EngineConfig]]:
    """The untuned choice, and if `every` all others behind it."""
    engine, config, _ = choose(problem, backend.info, None)
    others = [(e, c) for e in engines_for(problem.op) if e.check_support(problem, backend.info) for c in e.configs(problem, backend.info)]
    return [(engine, config), *(c for c in others if every and c != (engine, config))]


def against_torch(backend: CudaBackend, problem: Problem, label: str, options: argparse.Namespace, tensors: Tensors,
                  want: Tensors, call_of: Callable[..., Callable[[], Any]], num_bytes: int) -> dict[str, Any]:
    """Verifies our choices against `want`, then times them with a copy of num_bytes / 2, call_of(problem, tensors) and its compiled form,
    and with options.parts each launch of the first choice."""
    rows, ran = verify(backend, problem, choices_of(backend, problem, options.configs), tensors,
                       lambda: max(worst_error(tensors[n], w) for n, w in want.items()) if want else moments_error(problem, tensors))
    want.clear()
    source, target = (torch.empty(max(1, num_bytes // 2), dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_(0, 255)
    peers = {"copy": lambda: target.copy_(source), "eager": call_of(problem, tensors)}
    if wants_compiled(options, problem, label):
        try:
            peers["compiled"] = call_of(problem, tensors, compile_it=True)
            peers["compiled"]()
        except Exception as error:  # a compiler that fails is reported, not fatal
            print(f"torch.compile {problem.op} {label}: {type(error).__name__}: {error}"[:300])
            peers.pop("compiled", None)
    stream = backend.default_stream()
    parts: list[tuple[str, Callable[[], None]]] = []
    if options.parts and ran:
        plan = ran[0][1]
        parts = [(step.spec.template.rpartition("/")[2], lambda launch=launch: launch.launch(stream))
                 for step, launch in zip(plan.build.steps, plan.launches, strict=True)]
    torch.cuda.synchronize()
    calls = [*(call for _, _, call in ran), *peers.values(), *(call for _, call in parts)]
    timed = iter([statistics.median(t) for t in backend.time_launches(calls, stream, options.repeats, FLUSH_BYTES)])
    for row, _, _ in ran:
        row["us"] = next(timed)
    result: dict[str, Any] = {"op": problem.op, "case": label, "bytes": num_bytes, "rows": rows}
    result |= {f"{name}_us": next(timed) for name in peers}
    result["parts"] = [(name, next(timed)) for name, _ in parts]
    return result | {"default": rows[0], "best": fastest(rows)}


def measure(backend: CudaBackend, problem: Problem, label: str, options: argparse.Namespace) -> dict[str, Any]:
    tensors = make_tensors(problem, 1)
    return against_torch(backend, problem, label, options, tensors, reference(problem, tensors), call_of, problem.num_bytes)


def line_of(r: dict[str, Any]) -> str:
    first, best = r["default"], r["best"]
    if best is None:
        return f"{r['op']:23} {r['case']:16} no right config"
    us = first.get("us", float("nan"))
    peers = "".join(f" {r[k] / us:8.2f}" if k in r else f" {'':8}" for k in ("eager_us", "compiled_us"))
    return (f"{r['op']:23} {r['case']:16} {us:8.1f} {r['bytes'] / us / 1e6:5.2f} {r['bytes'] / us / 1e6 / COPY_TBS:6.2f} "
            f"{r['copy_us'] / us:6.2f}{peers} {us / best['us'] - 1:6.0%}  {first['config']}"
            + "".join(f" {name} {t:.1f}" for name, t in r["parts"])
            + (f" (best {best['engine']} {best['config']})" if best is not first else ""))


def run(backend: CudaBackend, problems: Iterable[tuple[str, Problem]], measure: Callable[..., dict[str, Any]],
        options: argparse.Namespace) -> None:
    """Measures the problems, prints a line for each and the means of each op, and writes the record."""
    begin = time.monotonic()
    print(f"{backend.info.name}, median of {options.repeats}")
    print(f"{'op':23} {'case':16} {'us':>8} {'TB/s':>5} {'/3.03':>6} {'/copy':>6} {'eager x':>8} {'compil x':>8} {'regret':>6}  config")
    results, left = [], []
    for label, problem in problems:
        if time.monotonic() - begin > options.seconds:
            left.append(f"{problem.op} {label}")
            continue
        try:
            result = measure(backend, problem, label, options)
        except Exception as error:  # one case less
            print(f"FAILED {problem.op} {label}: {type(error).__name__}: {error}"[:400], flush=True)
            continue
        gc.collect()
        torch.cuda.empty_cache()
        results.append(result)
        complain(problem.op, label, result["rows"])
        for row in result["rows"]:
            if options.configs and "us" in row:
                print(f"    {row['engine']} {row['config']}: {row['us']:.1f} us, {result['bytes'] / row['us'] / 1e6:.2f} TB/s")
        print(line_of(result), flush=True)
    for op in dict.fromkeys(r["op"] for r in results):
        rows = [r for r in results if r["op"] == op and "us" in r["default"]]
        means = {k: [r[k] / r["default"]["us"] for r in rows if k in r] for k in ("copy_us", "eager_us", "compiled_us")}
        print(f"{op}: geometric means over {len(rows)}: " + ", ".join(
            f"{math.exp(statistics.fmean(map(math.log, v))):.2f} of {k[:-3]}" for k, v in means.items() if v))
    if left:
        print(f"no time for {len(left)}: {', '.join(left)}")
    if options.json:
        record = {"stamp": stamp(), "device": backend.info.name, "options": vars(options), "seconds": time.monotonic() - begin,
                  "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1, default=str))


def add_options(parser: argparse.ArgumentParser) -> None:
    """What against_torch and run read."""
    parser.add_argument("--configs", action="store_true", help="all configs, not the untuned choice alone")
    parser.add_argument("--parts", action="store_true", help="also each launch alone")
    parser.add_argument("--compile", default="all", help='for which cases also torch.compile: parts of "op case", "all", or empty')
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--json", default="")


def problems_of(options: argparse.Namespace) -> list[tuple[str, Problem]]:
    table = json.loads(shapes_file("memory_bound").read_text(encoding="utf-8"))
    sizes = [tuple(s) for s in table["rows_cols"]] + ([LONG] if options.long else [])
    if options.shapes:
        sizes = [tuple(map(int, s.split("x"))) for s in options.shapes.split(",")]
    found = []
    for op in options.ops.split(","):
        if options.more and op in ROW_OPS:
            found += [(f"{r}x{c} {kind}", parse_case(row_case(op, r, c, kind))) for r, c, kind in MORE_ROWS]
        elif op in ROW_OPS:
            found += [(f"{r}x{c}", parse_case(row_case(op, r, c, options.kind))) for r, c in sizes]
        elif op in LOSS_OPS + RANDOM_OPS:
            found += [(f"{op.removesuffix('_backward')} {r}x{c}", parse_case(row_case(op, r, c, options.kind))) for r, c in ELEMENT_SIZES]
        pools = MORE_POOLS if options.more else [(entry, options.kind, "nhwc") for entry in table["pool"]]
        for entry, kind, layout in pools if op in POOL_OPS else ():
            problem = parse_case(pool_case(entry, kind, op == "pool_backward", layout))
            label = f"{entry['H']}_{entry['C']}" + (f"_k{entry['k']}s{entry['s']}" if "k" in entry else "")
            found.append((label + (f" n{entry['N']} {kind} {layout}" if options.more else ""), problem))
    return found


def wants_compiled(options: argparse.Namespace, problem: Problem, label: str) -> bool:
    return options.compile == "all" or any(part and part in f"{problem.op} {label}" for part in options.compile.split(","))


def fill_cache(options: argparse.Namespace, problems: list[tuple[str, Problem]]) -> None:
    """torch.compile's cache on disk, by processes of this file that compile a share each."""
    if options.share:
        index, count = map(int, options.share.split("/"))
        for label, problem in problems[index::count]:
            if wants_compiled(options, problem, label):
                call_of(problem, make_tensors(problem, 1), compile_it=True)()
                torch.cuda.empty_cache()
        return
    begin = time.monotonic()
    command = [sys.executable, __file__, *sys.argv[1:], "--share"]
    alone = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of processes below each
    shares = [subprocess.Popen([*command, f"{i}/{options.workers}"], env=alone, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
              for i in range(options.workers)]
    for share in shares:
        share.wait()
    print(f"cache of torch.compile filled in {time.monotonic() - begin:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default="")
    parser.add_argument("--shapes", default="", help="RxC, separated by commas; empty for the file's")
    parser.add_argument("--long", action="store_true", help="also rows of 2^20 elements")
    parser.add_argument("--more", action="store_true", help="further shapes instead")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)
    parser.add_argument("--kind", default="bf16", choices=sorted(FLOAT_TYPES))
    add_options(parser)
    options = parser.parse_args()

    options.ops = options.ops or ",".join((*MORE_OPS, *POOL_OPS) if options.more else (*ROW_OPS, *POOL_OPS, *LOSS_OPS, *RANDOM_OPS))
    problems = problems_of(options)
    if options.share or options.workers:
        fill_cache(options, problems)
    if not options.share:
        run(CudaBackend(0), problems, measure, options)


if __name__ == "__main__":
    main()
