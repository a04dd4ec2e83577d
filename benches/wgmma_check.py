"""wgmma kernels on a GPU against float64 references: each case in a process of its own, so that a hang or a fault ends only itself.

    python benches/wgmma_check.py [--match conv] [--timeout 60] [--configs N]

A line a case: every config (or the first N), worst error over tolerance; outputs, gaps and workspace poisoned beforehand. Each case runs
as planned for the device and again as for one with two SMs, where CTAs walk several tiles.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CASES = (
    "gemm a=bf16[100,96] b=bf16[136,96] transpose_b=True",
    "gemm a=bf16[300,520] b=bf16[392,520] transpose_b=True",
    "gemm a=f16[300,136] b=f16[136,328]",
    "gemm a=f16[136,300](304,1) b=f16[136,328] transpose_a=True bias=f32[328] epilogue=bias_relu",
    "gemm a=bf16[1000,1000] b=bf16[1000,1000](1,1000) d=f32[1000,1000]",
    "gemm a=bf16[3,130,72] b=bf16[3,72,144]",
    "gemm a=bf16[100,4096] b=bf16[136,4096] transpose_b=True",
    "gemm a=bf16[200,104] b=bf16[104,136] d=bf16[200,136](1,200)",
    "gemm a=bf16[200,104] b=bf16[104,135](136,1)",
    "gemm a=bf16[200,104] b=bf16[104,136] c=bf16[200,136] beta=0.5 bias=f32[136] epilogue=bias_gelu",
    "gemm a=bf16[2500,1200] b=bf16[1200,3000]",
    "conv_fprop x=bf16[2,64,9,10]nhwc w=bf16[72,64,3,3]nhwc padding=1",
    "conv_fprop x=bf16[2,64,9,10]nhwc w=bf16[72,64,3,3]nhwc padding=1 stride=2 bias=f32[72] epilogue=bias_relu",
    "conv_fprop x=bf16[2,24,9,10]nhwc w=bf16[72,24,3,3]nhwc",
    "conv_fprop x=bf16[2,24,9,10]nhwc w=bf16[72,24,3,3]nhwc padding=1",
    "conv_fprop x=f16[2,40,12,10]nhwc w=f16[72,40,3,3]nhwc padding=2 dilation=2",
    "conv_fprop x=bf16[1,64,9,10]nhwc w=bf16[72,64,3,2]nhwc padding='((0,1),(1,0))'",
    "conv_fprop x=bf16[3,64,9,10]nhwc w=bf16[72,64,1,1]nhwc stride=2",
    "conv_fprop x=bf16[2,64,40]nhwc w=bf16[72,64,5]nhwc padding=2",
    "conv_fprop x=bf16[1,64,4,5,6]nhwc w=bf16[72,64,3,3,3]nhwc padding=1",
    "conv_fprop x=bf16[1,128,9,10]nhwc w=bf16[80,64,3,3]nhwc padding=1 groups=2",
    "conv_fprop x=bf16[8,128,28,28]nhwc w=bf16[128,128,3,3]nhwc padding=1",
    "conv_fprop x=bf16[3,64,17,20]nhwc w=bf16[136,64,3,3]nhwc padding=1",
    "conv_fprop x=bf16[2,40,17,10]nhwc w=bf16[136,40,5,3]nhwc padding=2 dilation=2 bias=f32[136] epilogue=bias_relu",
    "conv_dgrad dy=f16[2,72,9,20]nhwc w=f16[72,72,5,5]nhwc x_shape=(2,72,9,20) padding=2",
    "conv_dgrad dy=bf16[4,64,9,9]nhwc w=bf16[64,72,3,3]nhwc x_shape=(4,72,17,18) padding=1 stride=2",
    "conv_dgrad dy=bf16[3,128,9,9]nhwc w=bf16[128,72,1,1]nhwc x_shape=(3,72,18,18) stride=2",
    "conv_dgrad dy=f16[2,128,5]nhwc w=f16[128,40,3]nhwc x_shape=(2,40,9) padding=1 stride=2",
    "conv_dgrad dy=bf16[2,64,9,10]nhwc w=bf16[64,72,3,3]nhwc x_shape=(2,72,9,10) padding=1",
    "conv_dgrad dy=bf16[2,64,5,5]nhwc w=bf16[64,72,3,3]nhwc x_shape=(2,72,9,10) padding=1 stride=2",
    "conv_dgrad dy=bf16[2,64,3,5]nhwc w=bf16[64,72,3,3]nhwc x_shape=(2,72,9,10) padding=1 stride=(3,2)",
    "conv_dgrad dy=bf16[2,64,9,10]nhwc w=bf16[64,72,3,3]nhwc x_shape=(2,72,11,12)",
    "conv_wgrad dy=bf16[2,72,9,10]nhwc x=bf16[2,64,9,10]nhwc w_shape=(72,64,3,3) padding=1",
    "conv_wgrad dy=bf16[2,72,5,5]nhwc x=bf16[2,64,9,10]nhwc w_shape=(72,64,3,3) padding=1 stride=2",
    "conv_wgrad dy=bf16[5,72,9,10]nhwc x=bf16[5,128,9,10]nhwc w_shape=(72,128,3,3) padding=1",
    "conv_wgrad dy=bf16[8,128,28,28]nhwc x=bf16[8,128,28,28]nhwc w_shape=(128,128,3,3) padding=1",
    "conv_transpose x=bf16[2,64,5,5]nhwc w=bf16[64,72,2,2]nhwc stride=2 padding=0",
)


def check(line: str, count: int) -> None:
    from oxidnn.engines.affine_wgmma_sm90 import WGMMA_SM90
    from oxidnn.engines.matmul import MatmulEngine
    from oxidnn.ops.case import parse_case
    from oxidnn.runtime.cuda_backend import CudaBackend
    from oxidnn.testing.harness import run_problem

    backend = CudaBackend(0)
    problem = parse_case(line)
    engine = MatmulEngine(problem.op, WGMMA_SM90)
    support = engine.check_support(problem, backend.info)
    if not support:
        print(f"refused: {support.reason}")
        return
    worst = 0.0
    tried = 0
    whole = backend.info
    for num_sms in (whole.num_sms, 2):
        backend.info = replace(whole, num_sms=num_sms)
        for config in engine.configs(problem, backend.info)[: count or None]:
            print(f"{num_sms}:{config.name}", end=" ", flush=True)
            worst = max(worst, run_problem(backend, problem, engine, config, seed=len(line)).worst)
            tried += 1
    print(f"\n    ok, {tried} configs, worst {worst:.3f} of the tolerance", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--configs", type=int, default=0, help="only the first N by estimate; 0 for all")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--case", default="", help="run this one here")
    options = parser.parse_args()
    if options.case:
        check(options.case, options.configs)
        return 0
    def verdict(line: str) -> tuple[bool, str]:
        start = time.perf_counter()
        command = [sys.executable, __file__, "--case", line, "--configs", str(options.configs)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
        except subprocess.TimeoutExpired as hung:
            return False, "HANGS after: " + (hung.stdout or b"").decode()[-300:]
        tried = done.stdout.strip().splitlines()
        seconds = f" ({time.perf_counter() - start:.1f} s)"
        if done.returncode:
            return False, f"FAILED at {' '.join(tried)[-200:]}: {done.stderr.strip()[-250:]}{seconds}"
        return True, (tried[-1].strip() if tried else "") + seconds

    cases = [c for c in CASES if options.match in c]
    wrong = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for line, (passed, text) in zip(cases, pool.map(verdict, cases), strict=True):
            wrong += not passed
            print(f"{line}\n    {text}", flush=True)
    print(f"{wrong} cases failed")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
