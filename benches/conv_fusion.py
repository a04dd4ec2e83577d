"""What fusing saves: a convolution with what goes before and after it in one launch, against the same in steps and PyTorch.

    python benches/conv_fusion.py [--batch 128] [--match 14_256] [--form residual,stats] [--configs 3] [--repeats 9]
                                  [--counters residual] [--workers 16] [--seconds S] [--json out.json]

Needs a CUDA device and torch. bf16, channels last, layers of ResNet-50. Forms: "residual", relu(conv + bias + residual); "stats", moments
of the result's channels beside it; "prologue", relu(x * gain + shift) on the way in; "gradient", dgrad through a relu. Of each:
microseconds of the convolution alone, of the fused form, of the same in launches of ours, and of PyTorch; ours are verified on poisoned
outputs first. The untuned choices are timed, with --configs as many of each engine's for the fused form, of which the fastest counts.

--counters, of cases with one of these words in "layer:form": bytes that memory read and wrote, and that were written into L2 (ncu's
dram__bytes_read.sum, dram__bytes_write.sum and lts__t_sectors_op_write.sum, caches emptied before each launch) of the convolution alone,
the fused form and the steps, beside what the tensors hold. What is in L2 still when a launch ends, memory has not written.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from moving import median_us, opened
from stamp import stamp
from verify import Tensors, poison, worst_error

from oxidnn.codegen.render import Source
from oxidnn.device import DeviceInfo
from oxidnn.dispatch.registry import engines_for
from oxidnn.dispatch.select import choose
from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.plan import Plan
from oxidnn.runtime.assembler import cubin_for
from oxidnn.runtime.cuda_backend import CudaBackend

# (image height, channels, filters, taps, stride)
LAYERS = ((56, 64, 256, 1, 1), (56, 64, 64, 3, 1), (28, 512, 128, 1, 1), (28, 128, 128, 3, 1), (14, 256, 1024, 1, 1), (14, 256, 256, 3, 1),
          (56, 128, 128, 3, 2))
FORMS = ("residual", "stats", "prologue", "gradient")
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_sectors_op_write.sum")
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """Lines of the case grammar over tensors of common names: the convolution alone, the fused form, the steps that do the same."""

    label: str
    form: str
    alone: str
    fused: str
    steps: tuple[str, ...]
    torch: Callable[[Tensors], Tensors]


def cases(options: argparse.Namespace) -> list[Case]:
    found = []
    for h, c, k, r, stride in LAYERS:
        label = f"{h}_{c}-{k}_{r}x{r}s{stride}"
        if not options.match or any(word in label for word in options.match.split(",")):
            found += [case_of(label, form, options.batch, h, c, k, r, stride) for form in options.form.split(",")]
    return found


def case_of(label: str, form: str, n: int, h: int, c: int, k: int, r: int, stride: int) -> Case:
    p, at = h // stride, f"stride={stride} padding={r // 2}"
    x, w, y = f"bf16[{n},{c},{h},{h}]nhwc", f"bf16[{k},{c},{r},{r}]nhwc", f"bf16[{n},{k},{p},{p}]nhwc"
    conv = f"conv_fprop x={x} w={w} y={y} {at}"
    options = {"stride": stride, "padding": r // 2}
    if form == "residual":
        return Case(label, form, conv, f"{conv} bias=f32[{k}] residual={y} epilogue=bias_residual_relu",
                    (conv, f'pointwise y={y} bias=f32[{k}] residual={y} out={y} expression="relu(y + bias[c] + residual)"'),
                    lambda t: {"y": F.conv2d(t["x"], t["w"], t["bias"].to(t["x"].dtype), **options).add_(t["residual"]).relu_()})
    if form == "stats":
        stats = f"f32[{k}]"
        return Case(label, form, conv, f"{conv} return_stats=True", (conv, f"batch_norm_stats x={y} count=f32[1] mean={stats} m2={stats}"),
                    lambda t: moments(F.conv2d(t["x"], t["w"], **options)))
    if form == "prologue":
        return Case(label, form, conv, f'{conv} gain=f32[{c}] shift=f32[{c}] prologue="relu(x * gain + shift)"',
                    (f'pointwise x={x} gain=f32[{c}] shift=f32[{c}] out={x} expression="relu(x * gain[c] + shift[c])"', conv),
                    lambda t: {"y": F.conv2d(F.relu(t["x"] * vector(t["gain"], t["x"]) + vector(t["shift"], t["x"])), t["w"], **options)})
    dgrad = f"conv_dgrad dy={y} w={w} dx={x} {at}"
    return Case(label, form, dgrad, f'{dgrad} saved={x} epilogue="where(saved > 0, acc, 0)"',
                (dgrad, f'pointwise dx={x} saved={x} out={x} expression="where(saved > 0, dx, 0)"'),
                lambda t: {"dx": torch.nn.grad.conv2d_input(t["saved"].shape, t["w"], t["dy"], **options) * (t["saved"] > 0)})


def vector(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return v.to(x.dtype).reshape(-1, 1, 1)


def moments(y: torch.Tensor) -> Tensors:
    """torch's one launch for them: mean and 1 / std."""
    mean, rstd = torch.batch_norm_stats(y, 0.0)
    count = y.numel() // y.shape[1]
    return {"y": y, "stats_mean": mean, "stats_m2": count / rstd.square()}


def device_info() -> DeviceInfo:
    return CudaBackend(0).info


def choices_of(line: str, info: DeviceInfo, count: int) -> list[tuple[Engine, EngineConfig]]:
    """The untuned choice and the first `count` configs of each engine, but for those expected to take three times as long."""
    problem = line_problem(line)
    first = choose(problem, info, None)[:2]
    most, found = 3 * first[0].estimate(problem, first[1], info), [first]
    for engine in engines_for(problem.op) if count else ():
        if engine.check_support(problem, info):
            found += [(engine, c) for c in engine.configs(problem, info)[:count] if engine.estimate(problem, c, info) < most]
    return list(dict.fromkeys(found))


def prepare(line: str, info: DeviceInfo, count: int) -> None:
    """The choices, assembled into the cubin store."""
    problem = line_problem(line)
    for engine, config in choices_of(line, info, count):
        for step in engine.build_steps(problem, config, info).steps:
            cubin_for(Source(step.spec), info.arch, step.spec.symbol)


def line_problem(line: str) -> Problem:
    """`out`, beside what an expression names, is pointwise's output y; a step's own y, its input."""
    return parse_case(line.replace(" y=", " result=", 1).replace("(y +", "(result +").replace(" out=", " y=")
                      if line.startswith("pointwise") else line)


class Chain:
    """Launches of several problems in turn, over tensors of common names; what one leaves, the next reads."""

    def __init__(self, backend: CudaBackend, lines: Sequence[str], tensors: Tensors, choice: tuple[Engine, EngineConfig] | None = None,
                 renamed: tuple[dict[str, str], ...] = ()) -> None:
        self.plans, self.calls = [], []
        stream = backend.default_stream()
        for i, line in enumerate(lines):
            problem = line_problem(line)
            engine, config = choice or choose(problem, backend.info, None)[:2]
            plan = Plan(problem, engine, config, engine.build_steps(problem, config, backend.info), backend)
            scratch = torch.full((max(1, plan.workspace_bytes),), 0xFF, dtype=torch.uint8, device="cuda")
            names = renamed[i] if i < len(renamed) else {}
            pointers = [tensors[names.get(o.name, o.name)].data_ptr() for o in problem.operands]
            self.plans.append(plan)
            self.calls.append(lambda plan=plan, pointers=pointers, scratch=scratch: plan.execute(pointers, scratch.data_ptr(), stream))

    def __call__(self) -> None:
        for call in self.calls:
            call()

    @property
    def launches(self) -> int:
        return sum(len(plan.build.steps) for plan in self.plans)


def names_of(case: Case) -> tuple[dict[str, str], ...]:
    """Which tensor each step's operand is."""
    if case.form == "residual":
        return {"y": "between"}, {"result": "between"}
    if case.form == "stats":
        return {}, {"x": "y", "count": "stats_count", "mean": "stats_mean", "m2": "stats_m2"}
    if case.form == "prologue":
        return {"y": "between"}, {"x": "between"}
    return {"dx": "between"}, {"dx": "between", "y": "dx"}


def tensors_of(case: Case) -> Tensors:
    generator = torch.Generator("cuda").manual_seed(1)
    tensors: Tensors = {}
    for operand in parse_case(case.fused).operands:
        d = operand.desc
        kind = torch.bfloat16 if d.dtype.name == "bf16" else torch.float32
        value = torch.randn(d.shape, device="cuda", generator=generator).to(kind)
        tensors[operand.name] = value.contiguous(memory_format=torch.channels_last) if len(d.shape) == 4 else value
    between = {"residual": "y", "stats": "y", "prologue": "x", "gradient": "dx"}[case.form]
    tensors["between"] = torch.empty_like(tensors[between])
    tensors["w"] *= (tensors["w"][0].numel()) ** -0.5
    return tensors


def wanted(case: Case, tensors: Tensors) -> Tensors:
    """The form in f32 arithmetic by PyTorch, of what the convolution reads and the stored result."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = False
    wide = {n: t.float() for n, t in tensors.items()}
    if case.form == "prologue":
        wide = wide | {"x": F.relu(wide["x"] * vector(wide["gain"], wide["x"]) + vector(wide["shift"], wide["x"])).bfloat16().float()}
        wide = wide | {"gain": torch.ones_like(wide["gain"]), "shift": torch.zeros_like(wide["shift"])}
    found = case.torch({n: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for n, t in wide.items()})
    torch.backends.cudnn.benchmark = True
    return {n: t.double() for n, t in found.items() if not n.startswith("stats")}


def judge(case: Case, tensors: Tensors, want: Tensors) -> float:
    worst = max(worst_error(tensors[n], t) for n, t in want.items())
    worst *= 0.25 if case.form == "prologue" else 1.0  # elements of the input that are rounded to the other neighbour
    if case.form == "stats":  # of the result as it is stored
        y = tensors["y"].double()
        mean, m2 = y.mean((0, 2, 3)), y.var((0, 2, 3), correction=0) * (y.numel() // y.shape[1])
        worst = max(worst, float(((tensors["stats_mean"] - mean).abs() / y.abs().mean()).max()) / 2e-6,
                    float(((tensors["stats_m2"] - m2).abs() / m2).max()) / 2e-5)
    return worst


def measure(backend: CudaBackend, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    tensors = tensors_of(case)
    want = wanted(case, tensors)
    problem = parse_case(case.fused)
    chains = []
    for choice in choices_of(case.fused, backend.info, options.configs):
        try:
            chains.append(Chain(backend, (case.fused,), tensors, choice))
        except Exception as error:
            print(f"{choice[0].id} {choice[1].name}: {type(error).__name__}: {str(error)[:200]}")
    steps = Chain(backend, case.steps, tensors, None, names_of(case))
    errors = []
    for chain in (*chains, steps):
        for output in problem.outputs:
            poison(tensors[output.name])
        chain()
        backend.synchronize(backend.default_stream())
        errors.append(judge(case, tensors, want))
    alone = Chain(backend, (case.alone,), tensors)
    with torch.no_grad():
        case.torch(tensors)
        us = median_us(backend, [alone, steps, lambda: case.torch(tensors), *chains], options.repeats)
    right = [i for i, error in enumerate(errors[:-1]) if error <= 1.0]
    best = min(right, key=lambda i: us[3 + i], default=0)

    def named(chain: Chain) -> str:
        return " + ".join(f"{p.engine.id.split('.')[1]} {p.config.name}" for p in chain.plans)

    return {"case": case.label, "form": case.form, "alone_us": us[0], "steps_us": us[1], "torch_us": us[2], "fused_us": us[3],
            "best_us": us[3 + best], "engine": named(chains[0]), "best": named(chains[best]), "alone": named(alone),
            "error": errors[0], "steps_error": errors[-1], "wrong": [named(chains[i]) for i in range(len(chains)) if i not in right],
            "num_bytes": {"alone": parse_case(case.alone).num_bytes, "fused": problem.num_bytes}}


# ---- Counters ----------------------------------------------------------------------------------------------------------------------


def run_for_counters(backend: CudaBackend, case: Case) -> None:
    """Under ncu: the launches of the convolution alone, of the fused form, of the steps, once each between the profiler's marks."""
    tensors = tensors_of(case)
    chains = {"alone": Chain(backend, (case.alone,), tensors), "fused": Chain(backend, (case.fused,), tensors),
              "steps": Chain(backend, case.steps, tensors, None, names_of(case))}
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for chain in chains.values():
        chain()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    print("LAUNCHES " + json.dumps({name: chain.launches for name, chain in chains.items()}))


def counters(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Bytes read and written, and those written into L2, by ncu."""
    command = ["ncu", "--csv", "--profile-from-start", "off", "--cache-control", "all", "--clock-control", "none", "--metrics",
               ",".join(METRICS), sys.executable, __file__, "--batch", str(options.batch), "--only", f"{case.label}:{case.form}"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    lines = done.stdout.splitlines()
    counts = next((json.loads(line.removeprefix("LAUNCHES ")) for line in lines if line.startswith("LAUNCHES ")), None)
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if counts is None or first is None:
        return {"failure": (done.stdout + done.stderr)[-600:]}
    unit = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": 32}
    by_launch: dict[int, dict[str, float]] = {}
    for row in csv.DictReader(lines[first:]):
        if row.get("Metric Name") in METRICS:
            value = float(row["Metric Value"].replace(",", "")) * unit[row["Metric Unit"]]
            by_launch.setdefault(int(row["ID"]), {})[row["Metric Name"]] = value
    launches = [by_launch[i] for i in sorted(by_launch)]
    found, at = {}, 0
    for name, count in counts.items():
        found[name] = [sum(launch[m] for launch in launches[at:at + count]) for m in METRICS]
        at += count
    return found


def show(row: dict[str, Any]) -> None:
    times = " ".join(f"{row[name + '_us']:8.1f}" for name in ("alone", "fused", "best", "steps", "torch"))
    wrong = [f"WRONG {row['error']:.2f}"] * (row["error"] > 1) + [f"STEPS WRONG {row['steps_error']:.2f}"] * (row["steps_error"] > 64)
    print(f"{row['case']:>18} {row['form']:>8} {times}  {row['steps_us'] / row['best_us']:5.2f} {row['torch_us'] / row['best_us']:5.2f}  "
          f"{row['engine']}  {' '.join(wrong)}", flush=True)
    if row["best"] != row["engine"]:
        print(f"{'':>28} best: {row['best']}")
    for name in row["wrong"]:
        print(f"{'':>28} wrong: {name}")


def show_counters(label: str, form: str, found: dict[str, Any], num_bytes: dict[str, int]) -> None:
    if "failure" in found:
        print(f"{label:>18} {form:>8} ncu: {found['failure']}")
        return
    moved = {name: (read + into_l2) / 1e6 for name, (read, _, into_l2) in found.items()}
    beside = (num_bytes["fused"] - num_bytes["alone"]) / 1e6
    parts = ", ".join(f"{name} {read / 1e6:.1f} + {written / 1e6:.1f} ({into_l2 / 1e6:.1f} into L2) MB"
                      for name, (read, written, into_l2) in found.items())
    print(f"{label:>18} {form:>8} {parts}; tensors {num_bytes['alone'] / 1e6:.1f} and {num_bytes['fused'] / 1e6:.1f} MB; "
          f"fused less alone and what it adds: {moved['fused'] - moved['alone'] - beside:+.1f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--match", default="", help="words of layers, by commas")
    parser.add_argument("--form", default=",".join(FORMS))
    parser.add_argument("--configs", type=int, default=0)
    parser.add_argument("--counters", default="", help="words of cases, by commas")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--json", default="")
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    begin = time.monotonic()
    if options.only:
        label, form = options.only.split(":")
        options.match, options.form = label, form
        run_for_counters(opened(), next(c for c in cases(options) if c.label == label))
        return
    # Forked before this process has a context of its own.
    with ProcessPoolExecutor(options.workers, mp_context=get_context("fork")) as pool:
        info = pool.submit(device_info).result()
        lines = [(c.fused, options.configs) for c in cases(options)] + [(x, 0) for c in cases(options) for x in (c.alone, *c.steps)]
        list(pool.map(prepare, *zip(*((line, info, count) for line, count in dict.fromkeys(lines)), strict=True)))
    backend = opened()
    print(f"assembled in {time.monotonic() - begin:.0f} s")
    print(f"{'layer':>18} {'form':>8} {'alone':>8} {'fused':>8} {'best':>8} {'steps':>8} {'torch':>8}  steps torch (of the best)")
    results, timed = [], []
    for case in cases(options):
        if time.monotonic() - begin > options.seconds:
            print(f"left out after {options.seconds:.0f} s: {case.label} {case.form}")
            continue
        try:
            results.append(measure(backend, case, options))
            timed.append(case)
            show(results[-1])
        except Exception as error:
            print(f"{case.label:>18} {case.form:>8} {type(error).__name__}: {str(error)[:300]}")
        torch.cuda.empty_cache()
    if options.counters and shutil.which("ncu") is None:
        print("ncu is not to be found: no counters")
    elif options.counters:
        for case, row in zip(timed, results, strict=True):
            if any(word in f"{case.label}:{case.form}" for word in options.counters.split(",")):
                row["counters"] = counters(case, options)
                show_counters(case.label, case.form, row["counters"], row["num_bytes"])
    if options.json:
        record = {"bench": "conv_fusion", "options": vars(options), **stamp(), "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
