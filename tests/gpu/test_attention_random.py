"""Attention and its gradients on the GPU: random problems of a covering design for each engine, on poisoned memory, against float64.

OXIDNN_TEST_RUNS says how many rows of the design run. python -m tests.gpu.test_attention_random [--ops attention,attention_backward]
[--draws 4] [--seconds 40] [--workers 16] runs all rows, in many processes, and reports what was covered.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context

import numpy as np
import pytest

from oxidnn.device import DeviceInfo, known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import Engine
from oxidnn.runtime.backend import Backend
from oxidnn.runtime.emu_backend import EmulatedBackend

from .attention_design import Row, covering, pairs_in, run_row

OPS = ("attention", "attention_backward")
EVERY = [(op, engine) for op in OPS for engine in ENGINES[op]]
RUNS = int(os.environ.get("OXIDNN_TEST_RUNS", "40"))
POOL = 400  # of a test; a run of this file takes more


@pytest.mark.parametrize(("op", "engine"), EVERY, ids=[e.id for _, e in EVERY])
def test_values_of_factors_meet(op: str, engine: Engine) -> None:
    """The rows cover their pairs, tens of them, and the first is a problem that the emulator agrees on."""
    rows, count = covering(engine, op, known_device("sm_90a"), POOL)
    assert len(set().union(*map(pairs_in, rows))) == count > 150
    assert len(rows) < 100
    ran, failures = run_row(EmulatedBackend("sm_90a"), op, engine, rows[0], 0, 1, most=24)
    assert ran == 1 and not failures, failures


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "engine"), EVERY, ids=[e.id for _, e in EVERY])
def test_random_problems(op: str, engine: Engine, cuda: Backend) -> None:
    rows, _ = covering(engine, op, cuda.info, POOL)
    for at, row in enumerate(rows[:RUNS]):
        _, failures = run_row(cuda, op, engine, row, at, 2)
        assert not failures, failures


@lru_cache(maxsize=1)
def _backend() -> Backend:
    from oxidnn.runtime.cuda_backend import CudaBackend
    return CudaBackend(0)


def _design(number: int, info: DeviceInfo) -> tuple[list[Row], int]:
    op, engine = EVERY[number]
    return covering(engine, op, info, 1500)


def _info() -> DeviceInfo:
    return _backend().info


def _run(number: int, at: int, row: Row, draws: int, end: float) -> tuple[int, int, list[str]]:
    """Nothing after `end` (of time.monotonic)."""
    op, engine = EVERY[number]
    if time.monotonic() > end:
        return 0, 0, []
    with np.errstate(invalid="ignore"):
        return (1, *run_row(_backend(), op, engine, row, at, draws))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--workers", type=int, default=16)
    options = parser.parse_args()
    begin = time.monotonic()
    wanted = [n for n, (op, _) in enumerate(EVERY) if op in options.ops.split(",")]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("fork")) as pool:
        info = pool.submit(_info).result()
        designs = dict(zip(wanted, pool.map(_design, wanted, [info] * len(wanted)), strict=True))
        print(f"{sum(len(rows) for rows, _ in designs.values())} rows after {time.monotonic() - begin:.1f} s", flush=True)
        longest = max(len(rows) for rows, _ in designs.values())
        jobs = [(n, at, rows[at]) for at in range(longest) for n, (rows, _) in designs.items() if at < len(rows)]
        futures = {pool.submit(_run, *job, options.draws, begin + options.seconds): job for job in jobs}
        problems: Counter[int] = Counter()
        failures: list[str] = []
        covered: dict[int, set[tuple[str, str, str, str]]] = {n: set() for n in wanted}
        ran_rows: Counter[int] = Counter()
        for future in as_completed(futures):
            number, _, row = futures[future]
            done, count, found = future.result()
            ran_rows[number] += done
            problems[number] += count
            failures += found
            covered[number] |= pairs_in(row) if count else set()
    for number in wanted:
        rows, count = designs[number]
        print(f"{EVERY[number][1].id:40} {problems[number]:5} problems, {ran_rows[number]} of {len(rows)} rows, "
              f"{len(covered[number])} of {count} pairs of values")
    for line in failures[:40]:
        print("FAILED", line[:1500])
    print(f"{sum(problems.values())} problems, {len(failures)} failures, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
