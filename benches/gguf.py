"""Products of GGUF matrices with a few rows against cuBLAS on the same numbers in f16, and dequantising against a copy.

    python benches/gguf.py [--formats Q4_0,Q4_K,...] [--shapes 16384x16384,4096x4096] [--rows 1,8] [--kind f16|bf16|f32] [--configs N]
                           [--dequantize] [--seconds S] [--json out.json]

Needs a CUDA device and torch. Each row is verified on poisoned outputs, then timed: medians, in microseconds, of launches queued one behind
the other, each with blocks of its own, so that none finds them in L2. TB/s counts the bytes that must move; "of bound" is what a plain copy
of 1 GiB reaches in the same run. --configs N: the N first configs beside the untuned choice, which is the first of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from conv_shapes import device_info
from stamp import stamp
from verify import Row, Tensors, complain, fastest, verify

from oxidnn.codegen.render import Source
from oxidnn.device import DeviceInfo
from oxidnn.dispatch.registry import engines_for
from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.ops.case import parse_case
from oxidnn.ops.gguf import EXACT_ROWS, FORMATS, GgufProblem
from oxidnn.plan import Plan
from oxidnn.runtime.assembler import cubin_for
from oxidnn.runtime.backend import Backend
from oxidnn.runtime.cuda_backend import CudaBackend
from oxidnn.testing.reference.gguf import decode
from oxidnn.testing.sample.gguf import moderate

KINDS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
DEFAULTS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "IQ4_NL", "IQ4_XS")
L2_BYTES = 160 << 20  # what launches in turn move in all, at least
LAUNCHES = 12
PATTERN = 4096  # blocks that are random; matrices repeat them
Choices = list[tuple[Engine, EngineConfig]]


def random_blocks(name: str, rows: int, row_bytes: int) -> tuple[torch.Tensor, np.ndarray]:
    """Bytes on the device, (rows, row_bytes), and what their numbers are: of the blocks of the pattern, f32."""
    num_bytes = FORMATS[name][1]
    pattern = moderate(name, np.random.default_rng(3).integers(0, 256, (PATTERN, num_bytes)).astype(np.uint8))
    products, minima = decode(name, pattern)
    blocks = torch.from_numpy(pattern).cuda()
    need = -(-rows * row_bytes // (PATTERN * num_bytes))
    return blocks.reshape(-1).repeat(need)[: rows * row_bytes].reshape(rows, row_bytes).contiguous(), (products - minima).astype(np.float32)


def numbers_of(values: np.ndarray, rows: int, k: int) -> torch.Tensor:
    """The matrix (rows, k) that the repeated pattern makes."""
    flat = torch.from_numpy(values).cuda().reshape(-1)
    return flat.repeat(-(-rows * k // flat.numel()))[: rows * k].reshape(rows, k)


def microseconds(calls: Sequence[Callable[[], Any]], repeats: int) -> float:
    """Of a launch: the median over rounds of LAUNCHES, which take the calls in turn, all queued before the first runs."""
    taken = []
    for r in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        begin.record()
        for i in range(LAUNCHES):
            calls[(r * LAUNCHES + i) % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
    return statistics.median(taken[1:])


def launches(backend: Backend, problem: GgufProblem, engine: Engine, config: EngineConfig,
             sets: Sequence[Tensors]) -> list[Callable[[], None]]:
    plan = Plan(problem, engine, config, engine.build_steps(problem, config, backend.info), backend)
    scratch = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
    stream = backend.default_stream()

    def call(pointers: list[int]) -> Callable[[], None]:
        return lambda: plan.execute(pointers, scratch.data_ptr(), stream, [])

    return [call([tensors[o.name].data_ptr() for o in problem.operands]) for tensors in sets]


def judge(got: torch.Tensor, want: torch.Tensor, sizes: torch.Tensor, k: int) -> float:
    """Error over tolerance: of the result's rounding and of sums in f32; where W may be rounded, six times what roundings add up to."""
    unit = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-23}[got.dtype]
    of_sums = 2 * 2.0**-23 * k**0.5 + (6 * unit / k**0.5 if len(got) > EXACT_ROWS else 0.0)
    ratio = (got.double() - want).abs() / (unit * want.abs() + of_sums * sizes + 1e-30)
    return float("inf") if bool(torch.isnan(ratio).any()) else float(ratio.max())


def case_of(name: str, shape: tuple[int, int], rows: int, kind: str) -> str:
    n, k = shape
    return f"gguf_matvec blocks=u8[{n},{row_bytes_of(name, k)}] x={kind}[{rows},{k}] format={name}"


def row_bytes_of(name: str, k: int) -> int:
    size, num_bytes = FORMATS[name]
    return k // size * num_bytes


class Matrix:
    """Blocks of `name`, (n, k), as often as launches in turn need them to be, and what they are."""

    def __init__(self, name: str, shape: tuple[int, int]) -> None:
        self.name, (self.n, self.k) = name, shape
        self.blocks, self.values = random_blocks(name, self.n, row_bytes_of(name, self.k))

    @cached_property
    def copies(self) -> list[torch.Tensor]:
        return [self.blocks, *(self.blocks.clone() for _ in range(-(-L2_BYTES // self.blocks.numel()) - 1))]

    @cached_property
    def numbers(self) -> torch.Tensor:
        return numbers_of(self.values, self.n, self.k)

    def times(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x W' and |x| |W'|, float64."""
        x64, parts = x.double(), [part.double() for part in self.numbers.split(2048)]
        return torch.cat([x64 @ part.T for part in parts], 1), torch.cat([x64.abs() @ part.abs().T for part in parts], 1)

    def cublas_us(self, x: torch.Tensor, repeats: int) -> float:
        """cuBLAS on the same numbers in f16."""
        half, half_x = self.numbers.half(), x.half()
        halves = [half, *(half.clone() for _ in range(-(-L2_BYTES // (2 * half.numel())) - 1))]
        return microseconds([partial(torch.matmul, half_x, w.T) for w in halves], repeats)


def measure(backend: Backend, matrix: Matrix, rows: int, kind: str, choices: Choices, repeats: int) -> list[Row]:
    problem = parse_case(case_of(matrix.name, (matrix.n, matrix.k), rows, kind))
    assert isinstance(problem, GgufProblem)
    x = (torch.randn(rows, matrix.k, device="cuda") / 2**12).to(KINDS[kind])  # results stay numbers of f16
    tensors = {"blocks": matrix.blocks, "x": x, "y": torch.empty(rows, matrix.n, dtype=KINDS[kind], device="cuda")}
    want, sizes = matrix.times(x)
    found, ran = verify(backend, problem, choices, tensors, lambda: judge(tensors["y"], want, sizes, matrix.k))
    complain("gguf_matvec", f"{matrix.name} {matrix.n}x{matrix.k} {rows}", found)
    by_choice = {(e.id, c.name): (e, c) for e, c in choices}
    for row, _, _ in ran:
        calls = launches(backend, problem, *by_choice[row["engine"], row["config"]], [{**tensors, "blocks": b} for b in matrix.copies])
        row["us"] = microseconds(calls, repeats)
        row["tb_per_s"] = problem.num_bytes / row["us"] / 1e6
    cublas = matrix.cublas_us(x, repeats)
    for row in found:
        row |= {"format": matrix.name, "shape": f"{matrix.n}x{matrix.k}", "rows": rows, "kind": kind, "cublas_f16_us": cublas}
    return found


def candidates(case: str, info: DeviceInfo, configs: int) -> Choices:
    """The first configs of each engine, of which the first is the untuned choice."""
    problem = parse_case(case)
    choices = [(e, c) for e in engines_for(problem.op) if e.check_support(problem, info)
               for c in e.configs(problem, info)[: max(configs, 1)]]
    return sorted(choices, key=lambda choice: choice[0].estimate(problem, choice[1], info))


def assemble(case: str, info: DeviceInfo, choices: Choices) -> None:
    """Kernels into the cubin store."""
    problem = parse_case(case)
    for engine, config in choices:
        for step in engine.build_steps(problem, config, info).steps:
            cubin_for(Source(step.spec), info.arch, step.spec.symbol)


def measure_dequantize(backend: Backend, matrix: Matrix, kind: str, repeats: int) -> list[Row]:
    n, k = matrix.n, matrix.k
    problem = parse_case(f"gguf_dequantize blocks=u8[{n},{row_bytes_of(matrix.name, k)}] format={matrix.name} dtype={kind}")
    assert isinstance(problem, GgufProblem)
    want = matrix.numbers.to(KINDS[kind])
    tensors = {"blocks": matrix.blocks, "y": torch.empty(n, k, dtype=KINDS[kind], device="cuda")}
    choices = [(e, e.configs(problem, backend.info)[0]) for e in engines_for("gguf_dequantize")]
    found, ran = verify(backend, problem, choices, tensors, lambda: 0.0 if torch.equal(tensors["y"], want) else float("inf"))
    complain("gguf_dequantize", f"{matrix.name} {n}x{k}", found)
    for row, _, call in ran:
        row["us"] = microseconds([call], repeats)
        row["tb_per_s"] = problem.num_bytes / row["us"] / 1e6
    for row in found:
        row |= {"format": matrix.name, "shape": f"{n}x{k}", "kind": kind}
    return found


def copy_bandwidth(repeats: int) -> float:
    """TB/s, reading and writing, of a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds([lambda: target.copy_(source)], repeats) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(DEFAULTS))
    parser.add_argument("--shapes", default="16384x16384,8192x28672,4096x4096")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--kind", default="f16", choices=KINDS)
    parser.add_argument("--configs", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    begin = time.perf_counter()
    found: list[Row] = []
    names = tuple(FORMATS) if options.formats == "all" else tuple(options.formats.split(","))
    cases = [(name, (int(n), int(k))) for n, _, k in (s.partition("x") for s in options.shapes.split(",")) for name in names]
    all_rows = [] if options.dequantize else [int(r) for r in options.rows.split(",")]
    choices: dict[str, Choices] = {}
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:  # nothing is timed while the host's cores assemble
        info = pool.submit(device_info).result()
        for name, shape in cases:
            for rows in all_rows:
                case = case_of(name, shape, rows, options.kind)
                choices[case] = candidates(case, info, options.configs)
        for done in [pool.submit(assemble, case, info, chosen) for case, chosen in choices.items()]:
            done.result()
    backend = CudaBackend()
    bound = copy_bandwidth(options.repeats)
    print(f"copy of 1 GiB: {bound:.2f} TB/s; assembled in {time.perf_counter() - begin:.0f} s")
    for name, shape in cases:
        matrix = Matrix(name, shape)
        for rows in all_rows or [0]:
            if time.perf_counter() - begin > options.seconds:
                print("stopped by time")
                break
            if options.dequantize:
                made = measure_dequantize(backend, matrix, options.kind, options.repeats)
            else:
                made = measure(backend, matrix, rows, options.kind, choices[case_of(name, shape, rows, options.kind)], options.repeats)
            found += made
            first, best = made[0], fastest(made)
            if best is None or "us" not in first:
                continue
            line = f"{name:8} {first['shape']:12} {rows:2} first {first['us']:7.1f} us {first['tb_per_s']:.2f} TB/s "
            line += f"{first['tb_per_s'] / bound:.2f} of bound"
            if "cublas_f16_us" in first:
                line += f", cuBLAS f16 {first['cublas_f16_us']:.1f} us ({first['cublas_f16_us'] / first['us']:.2f}x)"
            if options.configs:
                line += f"; {first['config']}; best {best['us']:.1f} us {best['tb_per_s'] / bound:.2f} {best['config']}"
            print(line, flush=True)
        del matrix
    if options.json:
        Path(options.json).write_text(json.dumps({**stamp(), "copy_tb_per_s": bound, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
