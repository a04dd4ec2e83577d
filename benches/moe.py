"""Layers of experts, bf16, against compositions of torch._grouped_mm and a fused mixture of experts in Triton (moe_triton.py).

    python benches/moe.py [--models mixtral_8x7b,...] [--tokens 1,16,...] [--configs N] [--repeats 7] [--seconds S]
                            [--backward] [--codes s4] [--steps] [--all] [--json out.json]

Needs a CUDA device, torch and triton. Random experts, topk each. ours: the whole layer from ids and weights on: sort, rows to their
experts, products with the gate, weighted sums. torch: as peers are usually measured, rows sorted beforehand and no sum:
_grouped_mm, silu, product, _grouped_mm. layer: with argsort, index_select and the weighted sum. triton: but for the sort, which is made
beforehand. Times are medians in microseconds, work queued ahead, L2 flushed before each run, all in turns. TB/s: weights of experts that
have tokens, once. --backward: all gradients, against torch's on sorted rows. Every
config's result is compared with float32 at some tokens, on poisoned outputs.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oxidnn.codegen.render import Source
from oxidnn.device import DeviceInfo
from oxidnn.dispatch.registry import engines_for
from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import cubin_for

MODELS = {"mixtral_8x7b": (8, 2, 4096, 14336), "qwen3_30b_a3b": (128, 8, 2048, 768), "deepseek_v3": (256, 8, 7168, 2048),
          "gpt_oss_20b": (32, 4, 2880, 2880)}  # experts, topk, hidden, inter
CHECKED = 4  # tokens compared


def case_line(model: str, tokens: int, backward: bool = False) -> str:
    experts, topk, hidden, inter = MODELS[model]
    op = f"moe_backward dy=bf16[{tokens},{hidden}]" if backward else "moe"
    return (f"{op} x=bf16[{tokens},{hidden}] ids=s32[{tokens},{topk}] weights=f32[{tokens},{topk}] "
            f"w_gate_up=bf16[{experts},{2 * inter},{hidden}] w_down=bf16[{experts},{hidden},{inter}]")


def quantized_line(model: str, tokens: int, codes: str) -> str:
    """e4m3 with scales of 128 x 128, s4 of groups of 128."""
    experts, topk, hidden, inter = MODELS[model]
    rows = 128 if codes == "e4m3" else 1
    text = f"moe_quantized x=bf16[{tokens},{hidden}] ids=s32[{tokens},{topk}] weights=f32[{tokens},{topk}]"
    for name, n, k in (("gate_up", 2 * inter, hidden), ("down", hidden, inter)):
        held = f"u8[{experts},{n},{k // 2}]" if codes == "s4" else f"e4m3[{experts},{n},{k}]"
        text += f" w_{name}={held} scale_{name}=f32[{experts},{-(-n // rows)},{-(-k // 128)}]"
    return text + f" block=({rows},128)"


def choices(problem: Problem, info: DeviceInfo, most: int) -> Iterator[tuple[Engine, EngineConfig]]:
    for engine in engines_for(problem.op):
        if engine.check_support(problem, info):
            for config in engine.configs(problem, info)[:most]:
                yield engine, config


def line_of(model: str, tokens: int, options: argparse.Namespace) -> str:
    return quantized_line(model, tokens, options.codes) if options.codes else case_line(model, tokens, options.backward)


def assembled(job: tuple[str, DeviceInfo, int]) -> str:
    """Kernels of a case go to the store."""
    line, info, most = job
    try:
        problem = parse_case(line)
        for engine, config in choices(problem, info, most):
            for step in engine.build_steps(problem, config, info).steps:
                found, _ = cubin_for(Source(step.spec), info.arch, step.spec.symbol)
                if found.spill_bytes:
                    return f"{step.spec.symbol} spills"
        return ""
    except Exception as error:
        return f"{line}: {error}"[:300]


def torch_calls(t: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """torch's composition on sorted rows, and the whole layer."""
    import torch
    from torch.nn.functional import silu

    up, down, ids, x = t["w_gate_up"].transpose(1, 2), t["w_down"].transpose(1, 2), t["ids"], t["x"]
    experts, topk = t["w_down"].shape[0], ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    ends = ids.flatten().bincount(minlength=experts).cumsum(0).int()
    rows = x[order // topk].contiguous()

    def products(rows: Any, ends: Any) -> Any:
        gate, other = torch._grouped_mm(rows, up, offs=ends).chunk(2, -1)
        return torch._grouped_mm((silu(gate) * other).contiguous(), down, offs=ends)

    def layer() -> Any:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        ends = torch.histc(flat.float(), experts, 0, experts - 1).cumsum(0).int()
        ys = products(x[order // topk], ends)
        each = torch.empty_like(ys)
        each[order] = ys
        return (each.view(*ids.shape, -1) * t["weights"].to(each.dtype)[..., None]).sum(1)

    return {"torch": lambda: products(rows, ends), "layer": layer}


def torch_backward(t: dict[str, Any]) -> Callable[[], Any]:
    """The gradients on sorted rows by torch._grouped_mm, the middle computed again; neither permuted nor summed."""
    import torch

    ids, topk, inter = t["ids"], t["ids"].shape[1], t["w_down"].shape[2]
    order = ids.flatten().argsort(stable=True)
    ends = ids.flatten().bincount(minlength=t["w_down"].shape[0]).cumsum(0).int()
    rows, dys = t["x"][order // topk].contiguous(), t["dy"][order // topk].contiguous()
    weights = t["weights"].flatten()[order, None]
    up = t["w_gate_up"].transpose(1, 2)

    def call() -> Any:
        z = torch._grouped_mm(rows, up, offs=ends)
        dh = torch._grouped_mm(dys, t["w_down"], offs=ends)
        g, u = z[:, :inter].float(), z[:, inter:].float()
        s = torch.sigmoid(g)
        h, d = g * s * u, dh.float()
        dweights = (h * d).sum(-1)
        d = d * weights
        dz = torch.cat((d * u * s * (1 + g * (1 - s)), d * g * s), -1).to(z.dtype)
        dw_down = torch._grouped_mm(dys.t(), (h * weights).to(z.dtype), offs=ends)
        return torch._grouped_mm(dz, t["w_gate_up"], offs=ends), dweights, torch._grouped_mm(dz.t(), rows, offs=ends), dw_down

    return call


def want_of(t: dict[str, Any], tokens: list[int]) -> Any:
    import torch

    inter, wanted = t["w_down"].shape[2], []
    for token in tokens:
        total = torch.zeros(t["x"].shape[1], device="cuda")
        for k, e in enumerate(t["ids"][token].tolist()):
            z = t["w_gate_up"][e].float() @ t["x"][token].float()
            h = (torch.nn.functional.silu(z[:inter]) * z[inter:]).bfloat16().float()
            total += t["weights"][token, k] * (t["w_down"][e].float() @ h)
        wanted.append(total)
    return torch.stack(wanted)


def measure(backend: Any, model: str, tokens: int, t: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from moe_triton import CONFIGS, layer
    from verify import verify

    experts, topk, hidden, inter = MODELS[model]
    generator = torch.Generator("cuda").manual_seed(tokens)
    problem = parse_case(case_line(model, tokens))
    t["x"] = torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16()
    t["ids"] = torch.rand(tokens, experts, device="cuda", generator=generator).topk(topk, 1).indices.int()
    t["weights"] = torch.rand(tokens, topk, device="cuda", generator=generator)
    t["y"] = torch.empty_like(t["x"])
    some = sorted({i * (tokens - 1) // max(1, CHECKED - 1) for i in range(CHECKED)})
    want = want_of(t, some)

    def error_of() -> float:
        got = t["y"][some].float()
        allowed = 2.0**-8 * want.abs() + 2.0**-5 * want.square().mean().sqrt()
        worst = float(((got - want).abs() / allowed).max())
        return worst if math.isfinite(worst) and not bool(torch.isnan(t["y"]).any()) else math.inf

    rows, ran = verify(backend, problem, choices(problem, backend.info, options.configs), t, error_of)
    calls: list[tuple[str, Callable[[], Any]]] = [("ours", call) for _, _, call in ran]
    failures = []
    per_expert = tokens * topk / min(experts, tokens * topk)
    for config in CONFIGS:
        if config[0] // 8 <= per_expert <= 8 * config[0] or (config[0] == 16 and per_expert <= 64):
            try:
                call = layer(config, t["x"], t["ids"], t["weights"], t["w_gate_up"], t["w_down"], t["y"])
                t["y"].fill_(float("nan"))
                call()
                torch.cuda.synchronize()
                if error_of() <= 1:
                    calls.append(("triton", call))
                else:
                    failures.append(f"triton {config}: error {error_of():.2g}")
            except Exception as error:
                failures.append(f"triton {config}: {error}"[:200])
    calls += list(torch_calls(t).items())
    untuned = min(ran, key=lambda r: r[0]["estimate_us"], default=None)
    steps = [] if untuned is None else [(launch, step.spec.symbol) for launch, step in
                                        zip(untuned[1].launches, untuned[1].build.steps, strict=True)]
    stream = backend.default_stream()
    if options.steps:
        calls += [(f"step {i} {name}", lambda launch=launch: launch.launch(stream)) for i, (launch, name) in enumerate(steps)]
    torch.cuda.synchronize()
    from conv_mma import FLUSH_BYTES
    repeats = options.repeats if tokens < 4096 else max(3, options.repeats // 2)
    times = [statistics.median(x) for x in backend.time_launches([call for _, call in calls], stream, repeats, FLUSH_BYTES)]
    best: dict[str, float] = {}
    for (name, _), us in zip(calls, times, strict=True):
        best[name] = min(best.get(name, math.inf), us)
    for (row, _, _), us in zip(ran, times, strict=False):
        row["us"] = us
    hit = int(t["ids"].unique().numel())
    return {"case": f"{model} {tokens}", "flops": problem.flops, "bytes": 6 * hit * hidden * inter, "us": best, "rows": rows,
            "failures": failures}


def measure_quantized(backend: Any, model: str, tokens: int, t: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Quantised experts against those of 16 bits by our own first choice (under "torch")."""
    import torch
    from conv_mma import FLUSH_BYTES
    from verify import verify

    experts, topk, hidden, inter = MODELS[model]
    problem = parse_case(quantized_line(model, tokens, options.codes))
    t["x"] = torch.randn(tokens, hidden, device="cuda").bfloat16()
    t["ids"] = torch.rand(tokens, experts, device="cuda").topk(topk, 1).indices.int()
    t["weights"] = torch.rand(tokens, topk, device="cuda")
    t["y"] = torch.empty_like(t["x"])
    q = {n: t[n] for n in ("x", "ids", "weights", "y")}
    for name in ("w_gate_up", "w_down", "scale_gate_up", "scale_down"):
        desc = problem.desc(name)
        if name.startswith("scale"):
            q[name] = torch.rand(desc.shape, device="cuda") * (0.05 if options.codes == "e4m3" else 0.01)
        else:
            q[name] = torch.randint(0, 256, desc.shape, dtype=torch.uint8, device="cuda")
            if options.codes == "e4m3":
                q[name] = q[name].bitwise_and_(0xBF).view(torch.float8_e4m3fn)  # below 2

    def numbers(name: str, e: int) -> Any:
        w, (rows, columns) = q[f"w_{name}"][e], (128 if options.codes == "e4m3" else 1, 128)
        if options.codes == "s4":
            low, high = (w & 15).to(torch.int16), (w >> 4).to(torch.int16)
            w = torch.stack((low - 16 * (low > 7), high - 16 * (high > 7)), -1).flatten(1)
        scale = q[f"scale_{name}"][e].repeat_interleave(rows, 0)[: w.shape[0]].repeat_interleave(columns, 1)[:, : w.shape[1]]
        return (w.float() * scale).bfloat16().float()

    some = sorted({i * (tokens - 1) // max(1, CHECKED - 1) for i in range(CHECKED)})
    wanted = []
    for token in some:
        total = torch.zeros(hidden, device="cuda")
        for k, e in enumerate(t["ids"][token].tolist()):
            z = numbers("gate_up", e) @ t["x"][token].float()
            h = (torch.nn.functional.silu(z[:inter]) * z[inter:]).bfloat16().float()
            total += t["weights"][token, k] * (numbers("down", e) @ h)
        wanted.append(total)
    want = torch.stack(wanted)

    def error_of() -> float:
        got = t["y"][some].float()
        worst = float(((got - want).abs() / (2.0**-8 * want.abs() + 2.0**-5 * want.square().mean().sqrt())).max())
        return worst if math.isfinite(worst) and not bool(torch.isnan(t["y"]).any()) else math.inf

    rows, ran = verify(backend, problem, choices(problem, backend.info, options.configs), q, error_of)
    plain = parse_case(case_line(model, tokens))
    first = min(choices(plain, backend.info, 1), key=lambda choice: choice[0].estimate(plain, choice[1], backend.info))
    _, other = verify(backend, plain, [first], t, lambda: 0.0)
    calls = [call for _, _, call in (*ran, *other)]
    times = [statistics.median(x) for x in backend.time_launches(calls, backend.default_stream(), options.repeats, FLUSH_BYTES)]
    for (row, _, _), us in zip(ran, times, strict=False):
        row["us"] = us
    hit = int(t["ids"].unique().numel())
    return {"case": f"{model} {tokens} {options.codes}", "flops": problem.flops, "rows": rows, "failures": [],
            "bytes": 3 * hit * hidden * inter * (0.5 if options.codes == "s4" else 1), "us": {"ours": min(times[:-1]), "torch": times[-1]}}


def measure_backward(backend: Any, model: str, tokens: int, t: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Of all gradients against torch's on sorted rows: their difference as a part of their size is the error, over 1 %."""
    import torch
    from conv_mma import FLUSH_BYTES
    from verify import verify

    experts, topk, hidden, _ = MODELS[model]
    problem = parse_case(case_line(model, tokens, True))
    t["x"], t["dy"] = (torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in range(2))
    t["ids"] = torch.rand(tokens, experts, device="cuda").topk(topk, 1).indices.int()
    t["weights"] = torch.rand(tokens, topk, device="cuda")
    for name in ("x", "weights", "w_gate_up", "w_down"):
        t[f"d{name}"] = torch.empty_like(t[name])
    theirs = torch_backward(t)
    order = t["ids"].flatten().argsort(stable=True)
    wanted = theirs()

    def error_of() -> float:
        dx = torch.zeros(tokens, hidden, device="cuda").index_add(0, order // topk, wanted[0].float())
        dweights = torch.empty(tokens * topk, device="cuda")
        dweights[order] = wanted[1]
        pairs = ((t["dx"], dx), (t["dweights"].flatten(), dweights), (t["dw_gate_up"], wanted[2]), (t["dw_down"], wanted[3]))
        found = [float((a[i].float() - b[i].float()).norm() / b[i].float().norm().clamp(min=1e-20)) for a, b in pairs
                 for i in ((slice(None),) if a.dim() < 3 else range(0, experts, max(1, experts // 4)))]
        return 100 * max(x if math.isfinite(x) else math.inf for x in found)

    rows, ran = verify(backend, problem, choices(problem, backend.info, options.configs), t, error_of)
    calls = [call for _, _, call in ran] + [theirs]
    repeats = max(3, options.repeats // 2)
    times = [statistics.median(x) for x in backend.time_launches(calls, backend.default_stream(), repeats, FLUSH_BYTES)]
    for (row, _, _), us in zip(ran, times, strict=False):
        row["us"] = us
    return {"case": f"{model} {tokens} backward", "flops": problem.flops, "bytes": 0, "us": {"ours": min(times[:-1]), "torch": times[-1]},
            "rows": rows, "failures": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="qwen3_30b_a3b,gpt_oss_20b,mixtral_8x7b,deepseek_v3")
    parser.add_argument("--tokens", default="1,16,128,1024,8192")
    parser.add_argument("--configs", type=int, default=5, help="only the first N of each engine by estimate")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--backward", action="store_true", help="gradients instead")
    parser.add_argument("--codes", default="", choices=("", "e4m3", "s4"), help="quantised experts instead, against ours of 16 bits")
    parser.add_argument("--steps", action="store_true", help="time each launch of the untuned choice by itself, too")
    parser.add_argument("--all", action="store_true", help="print every config")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after so many seconds")
    parser.add_argument("--json", default="")
    parser.add_argument("--workers", type=int, default=16, help="processes that assemble kernels beforehand")
    options = parser.parse_args()
    begin, results = time.monotonic(), []
    cases = [(model, int(tokens)) for model in options.models.split(",") for tokens in options.tokens.split(",")]
    # Before this process has a CUDA context: workers are forks.
    here = Path(__file__).resolve().parent
    wanted = 0 if options.backward or options.codes else 5
    others = [subprocess.Popen([sys.executable, str(here / "moe_triton.py"), str(i)]) for i in range(wanted)]
    query = ("from oxidnn.runtime.cuda_backend import CudaBackend; import pickle, sys; "
             "sys.stdout.buffer.write(pickle.dumps(CudaBackend(0).info))")
    info = pickle.loads(subprocess.run([sys.executable, "-c", query], cwd=here.parent, capture_output=True, check=True).stdout)
    with ProcessPoolExecutor(options.workers) as pool:
        for note in pool.map(assembled, [(line_of(*case, options), info, options.configs) for case in cases]):
            if note:
                print(note)
    for other in others:
        other.wait()
    print(f"kernels after {time.monotonic() - begin:.1f} s", flush=True)

    import torch

    from oxidnn.runtime.cuda_backend import CudaBackend
    sys.path.insert(0, str(here))
    from stamp import stamp
    from verify import complain, fastest
    backend = CudaBackend(0)
    print(f"{'case':22} {'ours':>8} {'torch':>8} {'layer':>8} {'triton':>8} | {'torch':>5} {'layer':>5} {'triton':>6} {'TFLOP/s':>7} "
          f"{'TB/s':>5} {'untuned':>8}  config")
    for model in options.models.split(","):
        experts, _, hidden, inter = MODELS[model]
        if time.monotonic() - begin > options.seconds:
            break
        t = {"w_gate_up": torch.empty(experts, 2 * inter, hidden, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02),
             "w_down": torch.empty(experts, hidden, inter, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)}
        for tokens in map(int, options.tokens.split(",")):
            if time.monotonic() - begin > options.seconds:
                print(f"{model} {tokens}: not run")
                continue
            try:
                how = measure_quantized if options.codes else measure_backward if options.backward else measure
                r = how(backend, model, tokens, t, options)
            except Exception as error:  # one case less
                print(f"FAILED {model} {tokens}: {type(error).__name__}: {error}"[:600], flush=True)
                continue
            results.append(r)
            complain("moe", r["case"], r["rows"])
            for failure in r["failures"]:
                print("   ", failure)
            for row in r["rows"] if options.all else ():
                print(f"    {row['engine']} {row['config']}: {row.get('us', math.nan):.1f} us, estimated {row['estimate_us']:.1f}")
            best, us = fastest(r["rows"]), r["us"]
            if best is None:
                continue
            theirs = [us.get(name, math.nan) for name in ("torch", "layer", "triton")]
            untuned = min((row for row in r["rows"] if "us" in row), key=lambda row: row["estimate_us"])["us"]
            print(f"{r['case']:22} {best['us']:8.1f} " + " ".join(f"{x:8.1f}" for x in theirs) + " | "
                  + " ".join(f"{x / best['us']:5.2f}" for x in theirs)
                  + f" {r['flops'] / best['us'] / 1e6:7.1f} {r['bytes'] / best['us'] / 1e6:5.2f} {untuned:8.1f}  "
                  + f"{best['engine']} {best['config']}", flush=True)
            for name, x in us.items():
                if name.startswith("step"):
                    print(f"    {name}: {x:.1f}")
        del t
        torch.cuda.empty_cache()
    for name in ("torch", "layer", "triton"):
        ratios = [r["us"][name] / r["us"]["ours"] for r in results if name in r["us"] and "ours" in r["us"]]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            print(f"{name}: geometric mean {mean:.2f}, least {min(ratios):.2f} over {len(ratios)}")
    if options.json:
        record = {"stamp": stamp(), "device": backend.info.name, "options": vars(options), "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
