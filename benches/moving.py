"""What the benches of memory-bound ops share: a case is verified on poisoned outputs, then timed interleaved with PyTorch and with a copy.

A row a case: our untuned choice (with --configs also the best config), TB/s by the bytes that must move, its ratio to a large copy measured
in the same run ("/large") and to a copy of as many bytes beside it ("/copy"), and how many times as fast as eager and compiled PyTorch.
Times are medians in microseconds; before each run L2 is flushed and the work queued ahead.

With workers, processes take cases in turn and prepare them side by side (our kernels assembled; torch.compile, static shapes, for --compile
shapes of each op, Triton's own search under a lock), and then measure one after another, alone on the device. They are forked from one that
has imported the compiler and seen no device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from conv_mma import FLUSH_BYTES
from conv_mma import TORCH_TYPES as FLOAT_TYPES
from stamp import stamp
from verify import Tensors, complain, fastest, verify, worst_error

from oxidnn.dispatch.registry import engines_for
from oxidnn.dispatch.select import choose
from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.ops.base import Problem
from oxidnn.plan import Plan
from oxidnn.runtime.backend import Backend
from oxidnn.runtime.cuda_backend import CudaBackend

TORCH_TYPES = FLOAT_TYPES | {"f64": torch.float64, "s8": torch.int8, "u8": torch.uint8, "s32": torch.int32, "s64": torch.int64,
                             "bool": torch.bool}
COMPILER = (  # what torch.compile imports on its way
    "torch._dynamo.backends.inductor", "torch._functorch.aot_autograd", "torch._inductor.compile_fx", "torch._inductor.async_compile",
    "torch._inductor.codegen.triton", "torch._inductor.codegen.cuda_combined_scheduling", "torch._inductor.codegen.wrapper_fxir",
    "torch._inductor.codegen.cpp_wrapper_gpu", "torch._inductor.runtime.triton_heuristics", "torch._inductor.runtime.caching",
    "torch._inductor.fx_passes.fuse_attention", "torch._inductor.fx_passes.pad_mm", "torch._inductor.fx_passes.post_grad",
    "torch._inductor.fx_passes.quantization", "torch._inductor.fx_passes.joint_graph", "torch._inductor.fx_passes.freezing_patterns",
    "triton.language", "triton.compiler", "triton.backends.nvidia.compiler")
LARGE_COPY = 1 << 30  # bytes read, and as many written
KEPT_BYTES = 32 << 30  # of device memory, that a process keeps from case to case
Forward = Callable[[Tensors], Any]
Call = Callable[[], Any]


@dataclass
class Case:
    """label: the shape, beside the op's name. make: the operands' tensors, and what torch takes besides (of a gradient, leaves and dy).
    forward: torch's, of these tensors; leaves: what the gradient is by. judge: of the tensors as they go in, what gives the outputs' error
    over tolerance. bytes: that must move, the problem's if 0. is_further: not of benches/cases/shapes. compiled: see `prepare`.
    """

    label: str
    problem: Problem
    make: Callable[[Problem], Tensors]
    forward: Forward
    leaves: tuple[str, ...] = ()
    judge: Callable[[Case, Tensors], Callable[[], float]] | None = None
    bytes: int = 0
    is_further: bool = False
    compiled: Forward | None = None

    @property
    def name(self) -> str:
        return f"{self.problem.op} {self.label}"

    def call(self, tensors: Tensors, function: Forward | None = None) -> Call:
        """torch's call, which for a gradient runs the backward alone."""
        function = function or self.forward
        if not self.leaves:
            return lambda: function(tensors)
        leaves = {n: tensors[n].detach().requires_grad_() for n in self.leaves}
        y = function(tensors | leaves)
        y = y if isinstance(y, torch.Tensor) else y[0]
        inputs = list(leaves.values())
        return lambda: torch.autograd.grad(y, inputs, tensors["dy"], retain_graph=True)

    def reference(self, tensors: Tensors) -> Tensors:
        """The outputs in float64, by the operands' names."""
        outputs = [o.name for o in self.problem.outputs]
        wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items() if n not in outputs}
        result = self.call(wide)()
        return dict(zip(outputs, result if isinstance(result, tuple) else (result,), strict=False))


def operands(problem: Problem, seed: int = 1) -> Tensors:
    """Operands laid out as the problem says: standard normal floats, integers below 100, outputs as they come."""
    generator, tensors = torch.Generator("cuda").manual_seed(seed), {}
    for o in problem.operands:
        tensor = torch.empty_strided(o.desc.shape, o.desc.strides, dtype=TORCH_TYPES[o.desc.dtype.name], device="cuda")
        if not o.is_output:
            shape, is_float = o.desc.shape, o.desc.dtype.is_float
            tensor.copy_(torch.randn(shape, device="cuda", generator=generator) if is_float else
                         torch.randint(0, 100, shape, device="cuda", generator=generator))
        tensors[o.name] = tensor
    return tensors


def against(want: Tensors, tensors: Tensors) -> Callable[[], float]:
    return lambda: max(worst_error(tensors[n], w) for n, w in want.items())


def median_us(backend: Backend, calls: Sequence[Call], repeats: int) -> list[float]:
    """Device microseconds of each call, whatever it launches: L2-cold, interleaved, queued ahead."""
    torch.cuda.synchronize()
    return [statistics.median(t) for t in backend.time_launches(calls, backend.default_stream(), repeats, FLUSH_BYTES)]


def copy_of(num_bytes: int) -> Call:
    source, target = (torch.empty(max(1, num_bytes // 2), dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_(0, 255)
    return lambda: target.copy_(source)


def opened() -> CudaBackend:
    """The device, and torch's searches on."""
    torch.backends.cudnn.benchmark = True
    return CudaBackend(0)


def choices_of(backend: CudaBackend, case: Case, options: argparse.Namespace) -> list[tuple[Engine, EngineConfig]]:
    """The untuned choice, and behind it all others where --configs names the case."""
    problem = case.problem
    first = choose(problem, backend.info, None)[:2]
    if options.configs is None or not any(word in case.name for word in options.configs.split(",")):
        return [first]
    return [first, *((e, c) for e in engines_for(problem.op) if e.check_support(problem, backend.info)
                     for c in e.configs(problem, backend.info) if (e, c) != first)]


def prepare(backend: CudaBackend, case: Case, options: argparse.Namespace, wants_compiled: bool, lock: Any) -> None:
    """Loads our kernels and, if wanted, compiles torch's; lock: held while it works on the device."""
    for engine, config in choices_of(backend, case, options):
        with contextlib.suppress(Exception):  # verify tells
            Plan(case.problem, engine, config, engine.build_steps(case.problem, config, backend.info), backend)
    if wants_compiled:
        with lock:
            tensors = case.make(case.problem)
            torch.cuda.synchronize()
        function = torch.compile(case.forward, dynamic=False)
        case.call(tensors, function)()
        torch.cuda.synchronize()
        case.compiled = function


def measure(backend: CudaBackend, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the record."""
    problem, tensors = case.problem, case.make(case.problem)
    judge = case.judge(case, tensors) if case.judge else against(case.reference(tensors), tensors)
    rows, ran = verify(backend, problem, choices_of(backend, case, options), tensors, judge)
    del judge  # and its float64 reference
    num_bytes = case.bytes or problem.num_bytes
    peers = {"copy": copy_of(num_bytes), "eager": case.call(tensors)}
    if case.compiled is not None:
        peers["compiled"] = case.call(tensors, case.compiled)
    parts: list[tuple[str, Call]] = []
    if options.parts and ran:
        plan, stream = ran[0][1], backend.default_stream()
        parts = [(step.spec.template.rpartition("/")[2], partial(launch.launch, stream))
                 for step, launch in zip(plan.build.steps, plan.launches, strict=True)]
    timed = iter(median_us(backend, [*(call for _, _, call in ran), *peers.values(), *(call for _, call in parts)], options.repeats))
    for row, _, _ in ran:
        row["us"] = next(timed)
    result: dict[str, Any] = {"op": problem.op, "case": case.label, "bytes": num_bytes, "is_further": case.is_further, "rows": rows}
    result |= {f"{name}_us": next(timed) for name in peers}
    result["parts"] = [(name, next(timed)) for name, _ in parts]
    return result | {"default": rows[0], "best": fastest(rows)}


def measured(backend: CudaBackend, case: Case, options: argparse.Namespace) -> dict[str, Any] | str:
    """The row, or why there is none: one case less."""
    try:
        return measure(backend, case, options)
    except Exception as error:
        return f"FAILED {case.name}: {type(error).__name__}: {error}"[:400]
    finally:
        tidy(KEPT_BYTES)


def tidy(kept: int = 0) -> None:
    """Nothing of the case before is alive; its memory stays for the next one, unless that is more than `kept` bytes."""
    gc.collect()
    if torch.cuda.memory_reserved() > kept:
        torch.cuda.empty_cache()


def compiled_first(cases: Sequence[Case], most: int) -> list[tuple[int, bool]]:
    """(index, whether torch.compile is asked for), those first: `most` evenly spread cases of each op."""
    groups: dict[tuple[str, bool], list[int]] = {}
    for index, case in enumerate(cases):
        groups.setdefault((case.problem.op, case.is_further), []).append(index)
    rounds: dict[int, int] = {}
    for group in groups.values():
        picks = dict.fromkeys(group[round((k + 0.5) * len(group) / most - 0.5)] for k in range(most)) if most else {}
        rounds |= {index: k for k, index in enumerate(picks)}
    wanted = sorted(rounds, key=lambda index: (rounds[index], index))
    return [*((i, True) for i in wanted), *((i, False) for i in range(len(cases)) if i not in rounds)]


def _searches_alone(lock: Any) -> None:
    """Triton's search for a config times kernels: one process at a time."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    plain = getattr(CachingAutotuner, "autotune_to_one_config", None)
    if plain is None:  # another version of torch: searches disturb one another
        return

    def alone(self: Any, *args: Any, **more: Any) -> Any:
        with lock:
            torch.cuda.synchronize()
            return plain(self, *args, **more)

    CachingAutotuner.autotune_to_one_config = alone  # type: ignore[method-assign]


def _worker(pipe: Any, *args: Any) -> None:
    """A process of `run`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # compilers are talkative; failures go through the pipe
    try:
        _work(pipe, *args)
    except Exception:
        pipe.send((False, [traceback.format_exc()]))
        raise


def _work(pipe: Any, lock: Any, taken: Any, build: Callable[[argparse.Namespace], list[Case]], options: argparse.Namespace) -> None:
    """Prepares one case after another of those that no process has `taken`, waits for its turn, and measures them."""
    begin = time.monotonic()
    cases = build(options)
    backend = opened()
    if options.compile:
        import torch._dynamo as dynamo
        import torch._functorch.config as functorch

        dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit = 1000  # the shapes of an op share their code
        functorch.donated_buffer = False  # a gradient is run again and again
        _searches_alone(lock)
    mine, failures = [], []
    order = compiled_first(cases, options.compile)
    while True:
        with taken.get_lock():
            place, taken.value = taken.value, taken.value + 1
        if place >= len(order):
            break
        index, wants_compiled = order[place]
        mine.append(index)
        is_late = time.monotonic() - begin > options.prepare_seconds
        try:
            prepare(backend, cases[index], options, wants_compiled and not is_late, lock)
        except Exception as error:
            failures.append(f"torch.compile {cases[index].name}: {type(error).__name__}: {error}"[:300])
        tidy()
        gc.freeze()  # what compilers leave is not looked through after every case
    pipe.send((True, failures))
    left = pipe.recv()  # when it is this process's turn
    end = time.monotonic() + left
    for index in sorted(mine):
        pipe.send((index, measured(backend, cases[index], options) if time.monotonic() < end else None))
    tidy()
    pipe.send(None)


def _forking(options: argparse.Namespace) -> Any:
    """Starts the process that others are forked from, before this one has work for them."""
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    # no pools below each process; whether there is a device is asked without opening it
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                   "PYTHONPATH": os.pathsep.join(paths)}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moving", *(COMPILER if options.compile else ())])
    forkserver.ensure_running()
    return context


def _by_workers(context: Any, build: Callable[[argparse.Namespace], list[Case]], options: argparse.Namespace,
                end: float) -> Iterator[tuple[int, dict[str, Any] | str | None]]:
    """What the processes send: (index, row, or a failure in words, or None where no time was left)."""
    begin = time.monotonic()
    lock, taken, workers = context.Lock(), context.Value("i", 0), []
    for _ in range(options.workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_worker, args=(theirs, lock, taken, build, options), daemon=True)
        process.start()
        theirs.close()
        workers.append((ours, process))
    ready = []
    for pipe, process in workers:
        left = begin + options.prepare_seconds + 30 - time.monotonic()
        try:
            if not pipe.poll(max(0.0, left)):
                raise EOFError
            is_ready, lines = pipe.recv()
            for line in lines:
                print(line)
            if is_ready:
                ready.append((pipe, process))
        except (EOFError, OSError):
            process.kill()
            print(f"a process was not ready after {time.monotonic() - begin:.0f} s")
    print(f"prepared by {len(ready)} processes in {time.monotonic() - begin:.0f} s", flush=True)
    for pipe, process in ready:
        with contextlib.suppress(EOFError, OSError):
            pipe.send(max(0.0, end - time.monotonic()))
            while (item := pipe.recv()) is not None:
                yield item
        process.join(5)
        process.kill()


def line_of(r: dict[str, Any], large: float) -> str:
    first, best = r["default"], r["best"]
    if best is None:
        return f"{r['op']:24} {r['case']:28} no right config"
    us = first.get("us", math.nan)
    peers = "".join(f" {r[k] / us:8.2f}" if k in r else f" {'':8}" for k in ("eager_us", "compiled_us"))
    return (f"{r['op']:24} {r['case']:28} {us:8.1f} {r['bytes'] / us / 1e6:5.2f} {r['bytes'] / us / large:6.2f} "
            f"{r['copy_us'] / us:6.2f}{peers} {us / best['us'] - 1:6.0%}  {first['engine']} {first['config']}"
            + "".join(f" {name} {t:.1f}" for name, t in r["parts"])
            + (f" (best {best['engine']} {best['config']})" if best is not first else ""))


def print_means(results: Sequence[dict[str, Any]]) -> None:
    for op in dict.fromkeys(r["op"] for r in results):
        rows = [r for r in results if r["op"] == op and "us" in r["default"]]
        means = {k: [r[k] / r["default"]["us"] for r in rows if k in r] for k in ("copy_us", "eager_us", "compiled_us")}
        print(f"{op}: geometric means over {len(rows)}: " + ", ".join(
            f"{math.exp(statistics.fmean(map(math.log, v))):.2f} of {k[:-3]}" + f" ({len(v)})" * (len(v) < len(rows))
            for k, v in means.items() if v))


def run(build: Callable[[argparse.Namespace], list[Case]], options: argparse.Namespace) -> dict[str, Any]:
    """Measures build(options), prints a line for each case and the means of each op, and writes the record, which it returns.

    build: a function of a module, so that processes find it.
    """
    begin, context = time.monotonic(), _forking(options) if options.workers else None
    backend = opened()
    copy_us = median_us(backend, [copy_of(2 * LARGE_COPY)], 5)[0]
    torch.cuda.empty_cache()
    large = 2 * LARGE_COPY / copy_us
    print(f"{backend.info.name}, median of {options.repeats}; a copy of {LARGE_COPY >> 20} MiB: {large / 1e6:.2f} TB/s", flush=True)
    cases, end = build(options), begin + options.seconds
    if options.workers:
        rows = _by_workers(context, build, options, end)
    else:
        rows = ((i, measured(backend, case, options) if time.monotonic() < end else None) for i, case in enumerate(cases))
    print(f"{'op':24} {'case':28} {'us':>8} {'TB/s':>5} {'/large':>6} {'/copy':>6} {'eager x':>8} {'compil x':>8} {'regret':>6}  config")
    found: dict[int, dict[str, Any]] = {}
    for index, row in rows:
        if not isinstance(row, dict):
            print(row or f"no time for {cases[index].name}", flush=True)
            continue
        found[index] = row
        complain(row["op"], row["case"], row["rows"])
        for config in row["rows"] if len(row["rows"]) > 1 else ():
            if "us" in config:
                print(f"    {config['engine']} {config['config']}: {config['us']:.1f} us, {row['bytes'] / config['us'] / 1e6:.2f} TB/s")
        print(line_of(row, large), flush=True)
    results = [found[index] for index in sorted(found)]
    print_means(results)
    record = {"stamp": stamp(), "device": backend.info.name, "copy_tbs": large / 1e6, "options": vars(options),
              "seconds": time.monotonic() - begin, "results": results}
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1, default=str))
    print(f"{len(results)} of {len(cases)} cases in {record['seconds']:.0f} s", flush=True)
    return record


def add_options(parser: argparse.ArgumentParser, compile_some: int = 0) -> None:
    """What `run` reads. compile_some: the default of --compile."""
    parser.add_argument("--match", default="", help="words that a case's op and label hold together, e.g. 'softmax 4096'")
    parser.add_argument("--configs", nargs="?", const="", help="all configs of cases with one of these words, not the untuned choice alone")
    parser.add_argument("--parts", action="store_true", help="also each launch alone")
    parser.add_argument("--workers", type=int, default=0, help="processes that prepare side by side; torch.compile needs at least one")
    parser.add_argument("--compile", type=int, default=compile_some, help="for how many shapes of each op also torch.compile")
    parser.add_argument("--prepare-seconds", type=float, default=60, help="no torch.compile begins later")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case begins later")
    parser.add_argument("--json", default="")


def matching(cases: Sequence[Case], options: argparse.Namespace) -> list[Case]:
    return [case for case in cases if all(word in case.name for word in options.match.split())]
