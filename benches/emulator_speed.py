"""What each of the library's kernels costs in the emulator: a Markdown row a template, with basic and with all checkers.

    python benches/emulator_speed.py [--match rowwise] [--repeats 5]

instructions: executed, summed over threads. steps: of the machine, one for all threads of a group. ms: of the launch alone, the fastest of
the repeats, the text parsed and decoded beforehand.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CASES = (
    ("gemm.wgmma_sm90", "gemm a=bf16[512,512] b=bf16[512,512] transpose_b=True", {"loader": "boxes", "split_k": 1}),
    ("conv_fprop.igemm_wgmma_sm90", "conv_fprop x=bf16[2,64,28,28]nhwc w=bf16[64,64,3,3]nhwc padding=1", {"loader": "halo"}),
    ("gemm.mma_sm80", "gemm a=bf16[256,256] b=bf16[256,256]", {"split_k": 1}),
    ("gemm.simt", "gemm a=f32[256,256] b=f32[256,256]", {"split_k": 1}),
    ("gemm.simt", "gemm a=f32[64,2048] b=f32[2048,64]", {}),
    ("conv_fprop.direct", "conv_fprop x=f32[2,8,28,28] w=f32[8,8,3,3] padding=1", {}),
    ("reduce.tree", "reduce x=f32[256,4096] op=sum axes=1", {}),
    ("softmax.row", "softmax x=f32[256,1000]", {}),
    ("softmax_backward.row", "softmax_backward dy=f32[256,1000] y=f32[256,1000]", {}),
    ("norm.row", "layer_norm x=f32[256,1000] gamma=f32[1000] beta=f32[1000]", {}),
    ("norm_backward.row",
     "layer_norm_backward dy=f32[256,1000] x=f32[256,1000] mean=f32[256] rstd=f32[256] gamma=f32[1000]", {}),
    ("cross_entropy.row", "cross_entropy logits=f32[256,1000] target=s64[256] reduction=none", {}),
    ("cross_entropy_backward.row", "cross_entropy_backward logits=f32[256,1000] target=s64[256]", {}),
    ("pool.window", "max_pool x=f32[8,16,28,28] window=3 stride=2 padding=1", {}),
    ("pool.gather", "avg_pool_backward dy=f32[8,16,14,14] window=3 stride=2 padding=1 x_shape=(8,16,28,28)", {}),
    ("pool.global_row", "global_avg_pool x=f32[64,64,7,7]", {}),
    ("pointwise.map", 'pointwise x=f32[8,16,28,28] bias=f32[16] expression="relu(x + bias[c])"', {}),
)


def launches(engine_id: str, case: str, knobs: dict[str, Any], checkers: str, repeats: int) -> list[tuple[str, int, int, float]]:
    """(template, instructions, steps, milliseconds) of every launch of the case's plan."""
    import numpy as np

    from oxidnn.dispatch.registry import ENGINES
    from oxidnn.ops.case import parse_case
    from oxidnn.plan import Plan
    from oxidnn.runtime.emu_backend import EmulatedBackend
    from oxidnn.testing.data import random_inputs, random_scalars
    from oxidnn.testing.stage import Stage

    backend = EmulatedBackend("sm_90a", checkers)
    problem = parse_case(case)
    engine = next(e for e in ENGINES[problem.op] if e.id == engine_id)
    config = next(c for c in engine.configs(problem, backend.info) if knobs.items() <= dict(c.knobs).items())
    rng = np.random.default_rng(1)
    with Stage(backend, problem, random_inputs(problem, rng), random_scalars(problem, rng)) as stage:
        build = engine.build_steps(problem, config, backend.info)
        plan = Plan(problem, engine, config, build, backend)
        stage.run(plan)
        rows = []
        for step, launch in zip(build.steps, plan.launches, strict=True):
            milliseconds = min(timed(lambda launch=launch: launch.launch(0)) for _ in range(repeats))
            rows.append((step.spec.template, backend.counters.instructions, backend.counters.steps, milliseconds))
        return rows


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="", help="only cases whose engine or text holds this")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("| template | problem | instructions | steps | ms, basic | ms, all | M instructions/s, all |\n|---|---|---:|---:|---:|---:|---:|")
    for engine, case, knobs in CASES:
        if options.match not in f"{engine} {case}":
            continue
        basic, checked = (launches(engine, case, knobs, c, options.repeats) for c in ("basic", "all"))
        for (template, instructions, steps, fast), (*_, slow) in zip(basic, checked, strict=True):
            rate = instructions / slow / 1e3
            print(f"| {template} | `{case}` | {instructions} | {steps} | {fast:.1f} | {slow:.1f} | {rate:.1f} |", flush=True)


if __name__ == "__main__":
    main()
