"""Commands that measure: tune, bench."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..device import DeviceInfo
from ..errors import InvalidArgument, Unsupported
from ..handle import open_backend
from ..ops.base import Problem
from ..ops.case import format_case
from .arguments import device_option, engine_options, json_option, pick, print_json, print_table, problem_options, problems_of, seed_option


@contextmanager
def _progress(total: int) -> Iterator[Callable[[float, str], None]]:
    """A callback (problems done, what is being done): a bar with the time left on a terminal, else a line every few seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        with Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False),
                      console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=total)
            yield lambda done, what: bar.update(task, completed=done, description=what)
        return
    start, said = time.monotonic(), [0.0]

    def line(done: float, what: str) -> None:
        now = time.monotonic()
        if now - said[0] > 5 or done >= total:
            said[0] = now
            left = f", about {(now - start) / done * (total - done):.0f} s left" if 0 < done < total else ""
            click.echo(f"{done:.1f} of {total}{left}: {what}", err=True)

    yield line


@click.command()
@problem_options
@click.option("--configs", type=click.IntRange(min=1), default=8, show_default=True, help="Configs tried per engine, cheapest estimate first.")
@click.option("--force", is_flag=True, help="Measure again what the database holds already.")
@seed_option
@device_option
@json_option
def tune(configs: int, force: bool, seed: int, device: str | None, as_json: bool, **chosen: Any) -> None:
    """Measures every engine on CASES, checks its results, and records the winners in the tuning database.

    The cubins of all candidates are in the cache afterwards.
    """
    from ..dispatch.search import tune_problem
    from ..dispatch.select import choose
    from ..dispatch.tuning_db import TuningDb

    problems, backend, db = problems_of(**chosen), open_backend(device), TuningDb.open()
    rows, records, regrets, failed = [], [], [], 0
    with _progress(len(problems)) as progress:
        for number, problem in enumerate(problems):
            case = format_case(problem)
            held = None if force or problem.is_empty else db.lookup(problem, backend.info)
            if problem.is_empty or held is not None:
                why = "empty: nothing to launch" if held is None else "held already"
                name, us = (f"{held.engine} {held.config}", held.us) if held is not None else ("-", None)
                rows.append((case, name, _us(us), "", why))
                records.append({"case": case, "status": why, "engine": held and held.engine, "config": held and held.config, "us": us})
                continue
            progress(number, case)

            def within(done: int, total: int, what: str, number: int = number) -> None:
                progress(number + done / total, what)

            try:
                untuned, untuned_config, _ = choose(problem, backend.info, None)
                results = tune_problem(problem, backend, db, progress=within, configs_per_engine=configs, seed=seed)
            except Unsupported as error:
                failed += 1
                rows.append((case, "-", "-", "", "no engine takes it"))
                records.append({"case": case, "status": "unsupported", "reason": str(error)})
                continue
            regret = None
            by_name = {(m.engine, m.config): m.us for m in results}
            best = results[0] if results and results[0].us is not None else None
            first = by_name.get((untuned.id, untuned_config.name))
            if best is not None and best.us and first:
                regret = first / best.us
                regrets.append(regret)
            failed += best is None
            records.append({"case": case, "status": "tuned" if best else "no candidate passed", "untuned_regret": regret, "measurements": [
                {"engine": m.engine, "config": m.config, "us": m.us, "reason": m.reason} for m in results]})
            for place, m in enumerate(results):
                verdict = m.reason.splitlines()[0] if m.us is None else "winner" if place == 0 else ""
                rows.append((case if place == 0 else "", f"{m.engine} {m.config}", _us(m.us), f"{m.us / best.us:.2f}x" if m.us and best and best.us else "",
                             verdict))
        progress(len(problems), "done")
    mean = math.exp(statistics.fmean(math.log(r) for r in regrets)) if regrets else None
    if as_json:
        print_json({"device": backend.info.name, "database": str(db.user_path or "memory"), "untuned_regret_geomean": mean, "problems": records})
    else:
        print_table(("case", "engine and config", "us", "of best", ""), rows)
        if mean is not None:
            click.echo(f"untuned choice: {mean:.3f}x the tuned time (geometric mean of {len(regrets)} problems)")
        click.echo(f"recorded in {db.user_path or 'memory'} for {backend.info.name}")
    if failed:
        raise SystemExit(1)


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us:.2f}"


def bound_us(problem: Problem, info: DeviceInfo) -> float:
    """Microseconds no kernel can beat: flops at the arithmetic's rate or bytes at the memory's, whichever takes longer."""
    kind = problem.operands[0].desc.dtype
    uses_tensor_cores = kind.bits <= 16 or (kind.name == "f32" and problem.policy.math != "ieee")
    rate = info.tensor_tflops if uses_tensor_cores else info.fma_tflops
    return max(problem.flops / rate / 1e6, problem.num_bytes / info.bandwidth_gbs / 1e3)


@click.command()
@problem_options
@engine_options
@click.option("--repeats", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--check/--no-check", default=True, show_default=True, help="Hold the results against the reference before timing.")
@seed_option
@device_option
@json_option
def bench(engine: str | None, config: str | None, repeats: int, check: bool, seed: int, device: str | None, as_json: bool, **chosen: Any) -> None:
    """Times CASES: median of L2-cold device times, and the part of the hardware's bound it reaches."""
    from ..dispatch.search import Contender, Judge, Stage, stage_inputs
    from ..dispatch.select import build_plan

    problems, backend = problems_of(**chosen), open_backend(device)
    records = []
    with _progress(len(problems)) as progress:
        for number, problem in enumerate(problems):
            case = format_case(problem)
            progress(number, case)
            if problem.is_empty:
                raise InvalidArgument(f"bench: {case} is empty, there is nothing to time.")
            picked, picked_config, why = pick(problem, backend.info, engine, config)
            rng = np.random.default_rng(seed)
            inputs = stage_inputs(problem, rng)
            with Stage(backend, problem, inputs) as stage:
                plan = build_plan(problem, picked, picked_config, backend)
                if check:
                    Judge(problem, inputs, stage.scalars, rng).check(Contender(picked, picked_config, 0.0), stage.run(plan))
                times = sorted(stage.time([plan], repeats)[0])
            us = statistics.median(times)
            low, high = times[len(times) // 4], times[-1 - len(times) // 4]
            records.append({
                "case": case, "engine": picked.id, "config": picked_config.name, "why": why, "us": us, "iqr_us": high - low, "checked": check,
                "tflops": problem.flops / us / 1e6, "tbps": problem.num_bytes / us / 1e6,
                "of_bound": None if backend.info.is_emulated else bound_us(problem, backend.info) / us})
        progress(len(problems), "done")
    if as_json:
        print_json({"device": backend.info.name, "repeats": repeats, "results": records})
        return
    print_table(("case", "engine and config", "us", "IQR", "TFLOP/s", "TB/s", "of bound"), [
        (r["case"], f"{r['engine']} {r['config']}", f"{r['us']:.2f}", f"{r['iqr_us']:.2f}", f"{r['tflops']:.3g}", f"{r['tbps']:.3g}",
         "-" if r["of_bound"] is None else f"{r['of_bound']:.0%}") for r in records], f"{backend.info.name}, median of {repeats}")
