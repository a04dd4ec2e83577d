"""Errors of convolution's algorithms against float64, in units in the last place (ulps) of the result's type.

    python benches/conv_error.py [--device cuda:0 | emu:sm_90a] [--op conv_fprop] [--small] [--json FILE]

An ulp is that of the element, or of the results' root mean square where the element is smaller: sums that cancel have no digits to lose.
Inputs are standard normal, in the storage type, so that rounding them counts for no one. Each engine runs its first config.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import Engine
from oxidnn.handle import open_backend
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.backend import Backend
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import exact, execute
from oxidnn.testing.reference import REFERENCES

# (n, channels, filters, extent, taps)
SHAPES = {"64 channels, 56 x 56, 3 x 3": (1, 64, 64, 56, 3), "512 channels, 14 x 14, 3 x 3": (1, 512, 128, 14, 3),
          "32 channels, 28 x 28, 9 x 9": (1, 32, 32, 28, 9)}
SMALL = {"16 channels, 8 x 8, 3 x 3": (1, 16, 16, 8, 3)}
# Type, arithmetic, and the engines of which that makes something new ("" for all).
ARITHMETICS = (("f32", "ieee", ""), ("f32", "tf32", "igemm_mma igemm_wgmma"), ("f32", "tf32x3", "igemm_mma"),
               ("f32", "bf16x3", "igemm_mma"), ("f32", "fast", "winograd_f4 winograd_fused fft"), ("f16", "ieee", ""),
               ("f16", "fast", "winograd fft"), ("bf16", "ieee", ""), ("bf16", "fast", "winograd fft"))


def problem_of(op: str, shape: tuple[int, ...], kind: str, math: str) -> Problem:
    n, c, k, extent, taps = shape
    x, w, y = (f"{kind}[{a},{b},{e},{e}]nhwc" for a, b, e in ((n, c, extent), (k, c, taps), (n, k, extent)))
    tensors = {"conv_fprop": f"x={x} w={w}", "conv_dgrad": f"dy={y} w={w} dx={x}", "conv_wgrad": f"x={x} dy={y} dw={w}"}[op]
    return parse_case(f"{op} {tensors} padding={taps // 2} math={math}")


def ulps(got: np.ndarray, want: np.ndarray, epsilon: float) -> tuple[float, float]:
    """(largest, mean) error."""
    size = np.maximum(np.abs(want), np.sqrt(np.mean(want * want)))
    error = np.abs(got.astype(np.float64) - want) / (epsilon * 2.0 ** np.floor(np.log2(size)))
    return float(error.max()), float(error.mean())


def takers(backend: Backend, problem: Problem, words: str) -> list[Engine]:
    found = [e for e in ENGINES[problem.op] if e.check_support(problem, backend.info)]
    return [e for e in found if not words or any(word in e.id for word in words.split())]


def rows(backend: Backend, op: str, shapes: dict[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    table = []
    for label, shape in shapes.items():
        for kind, math, words in ARITHMETICS:
            problem = problem_of(op, shape, kind, math)
            engines = takers(backend, problem, words)
            if not engines:
                continue
            inputs = random_inputs(problem, np.random.default_rng(1))
            out = problem.outputs[0]
            want = REFERENCES[op](problem, exact(problem, inputs), {})[out.name].want
            for engine in engines:
                config = engine.configs(problem, backend.info)[0]
                got = execute(backend, problem, engine, config, inputs)[out.name]
                largest, mean = ulps(got, want, out.desc.dtype.epsilon)
                table.append({"shape": label, "op": op, "type": kind, "math": math, "engine": engine.id.split(".")[1],
                              "config": config.name, "max_ulp": round(largest, 3), "mean_ulp": round(mean, 4)})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None)
    parser.add_argument("--op", default="conv_fprop", choices=("conv_fprop", "conv_dgrad", "conv_wgrad"))
    parser.add_argument("--small", action="store_true", help="one small shape, for the emulator")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    backend = open_backend(args.device)
    table = rows(backend, args.op, SMALL if args.small else SHAPES)
    print(f"{'shape':30}{'type':6}{'math':8}{'engine':26}{'max ulp':>10}{'mean':>9}")
    for row in table:
        print(f"{row['shape']:30}{row['type']:6}{row['math']:8}{row['engine']:26}{row['max_ulp']:10.2f}{row['mean_ulp']:9.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"device": backend.info.name, "rows": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
