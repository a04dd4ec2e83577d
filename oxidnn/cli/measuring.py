"""Commands that measure: tune, bench."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
import numpy as np

from .. import switches
from ..device import DeviceInfo
from ..dispatch.tuning_db import TuningDb
from ..errors import InvalidArgument, Unsupported
from ..handle import open_backend
from ..ops.base import Problem
from ..ops.case import format_case
from ..runtime.backend import Backend
from .arguments import device_option, engine_options, json_option, pick, print_json, print_table, problem_options, problems_of, seed_option


@contextmanager
def _progress(total: int) -> Iterator[Callable[[float, str], None]]:
    """A callback (problems done, what is being done): a bar with the time left on a terminal, else a line every few seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        text = TextColumn("{task.description}", markup=False)
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), text
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=total)
            yield lambda done, what: bar.update(task, completed=done, description=what)
        return
    start, said = time.monotonic(), [0.0]

    def line(done: float, what: str) -> None:
        now = time.monotonic()
        if now - said[0] > 5 or what == "done":
            said[0] = now
            left = f", about {(now - start) / done * (total - done):.0f} s left" if 0 < done < total else ""
            click.echo(f"{done:.1f} of {total}{left}: {what}", err=True)

    yield line


@click.command()
@problem_options
@click.option("--configs", type=click.IntRange(min=1), default=8, show_default=True, help="Configs tried per engine.")
@click.option("--force", is_flag=True, help="Measure again what the database holds already.")
@seed_option
@device_option
@json_option
def tune(configs: int, force: bool, seed: int, device: str | None, as_json: bool, **chosen: Any) -> None:
    """Measures every engine on CASES, checks its results, and records the winners in the tuning database.

    The cubins of all candidates are in the cache afterwards.
    """
    problems, backend, db = problems_of(**chosen), open_backend(device), TuningDb.open()
    if backend.info.is_emulated and not (device or switches.get("OXIDNN_DEVICE")):
        raise InvalidArgument("tune: there is no GPU to measure on (expected one, or --device emu:sm_90a to time the emulator).")
    records: list[dict[str, Any]] = []
    with _progress(len(problems)) as progress:
        for number, problem in enumerate(problems):

            def within(done: int, total: int, what: str, number: int = number) -> None:
                progress(number + done / total, what)

            progress(number, format_case(problem))
            records.append(_tune_one(problem, backend, db, within, force=force, configs=configs, seed=seed))
        progress(len(problems), "done")
    regrets = [r["untuned_regret"] for r in records if r["untuned_regret"]]
    mean = math.exp(statistics.fmean(math.log(r) for r in regrets)) if regrets else None
    where = str(db.user_path or "memory")
    if as_json:
        print_json({"device": backend.info.name, "database": where, "untuned_regret_geomean": mean, "problems": records})
    else:
        rows = []
        for record in records:
            best = next((m["us"] for m in record["measurements"] if m["us"]), None)
            for place, m in enumerate(record["measurements"] or [{"engine": "-", "config": "", "us": None, "reason": ""}]):
                what = m["reason"].partition("\n")[0] or (record["status"] if place == 0 else "")
                us, ratio = (f"{m['us']:.2f}", f"{m['us'] / best:.2f}x") if m["us"] and best else ("-", "")
                rows.append(("" if place else record["case"], f"{m['engine']} {m['config']}", us, ratio, what))
        print_table(("case", "engine and config", "us", "of best", ""), rows)
        if mean is not None:
            click.echo(f"untuned choice: {mean:.3f}x the tuned time (geometric mean of {len(regrets)} problems)")
        click.echo(f"recorded in {where} for {backend.info.name}")
    if any(r["status"] in (_NO_ENGINE, _NONE_PASSED) for r in records):
        raise SystemExit(1)


_NO_ENGINE, _NONE_PASSED = "no engine takes it", "no candidate passed"


def _tune_one(problem: Problem, backend: Backend, db: TuningDb, progress: Callable[[int, int, str], None], *, force: bool, configs: int,
              seed: int) -> dict[str, Any]:
    """Tunes one problem: its case, a status, the measurements, and how much slower the untuned choice is than the best."""
    from ..dispatch.search import tune_problem
    from ..dispatch.select import choose

    record: dict[str, Any] = {"case": format_case(problem), "status": "winner", "untuned_regret": None, "measurements": []}
    held = [] if force or problem.is_empty else db.rows(problem, backend.info)
    if held:
        return record | {"status": "held already", "measurements": [
            {"engine": r.engine, "config": r.config, "us": r.us, "reason": ""} for r in held[:1]]}
    if problem.is_empty:
        return record | {"status": "empty: nothing to launch"}
    try:
        untuned, untuned_config, _ = choose(problem, backend.info, None)
        results = tune_problem(problem, backend, db, progress=progress, configs_per_engine=configs, seed=seed)
    except Unsupported as error:
        return record | {"status": _NO_ENGINE, "reason": str(error)}
    record["measurements"] = [{"engine": m.engine, "config": m.config, "us": m.us, "reason": m.reason} for m in results]
    first = next((m.us for m in results if (m.engine, m.config) == (untuned.id, untuned_config.name)), None)
    if not results or results[0].us is None:
        record["status"] = _NONE_PASSED
    elif first and results[0].us:
        record["untuned_regret"] = first / results[0].us
    return record


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
def bench(engine: str | None, config: str | None, repeats: int, check: bool, seed: int, device: str | None, as_json: bool,
          **chosen: Any) -> None:
    """Times CASES: median of L2-cold device times, and the part of the hardware's bound it reaches."""
    from ..dispatch.search import Contender, Judge, stage_inputs
    from ..dispatch.select import build_plan
    from ..testing.data import random_scalars
    from ..testing.stage import Stage

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
            scalars = random_scalars(problem, rng)
            with Stage(backend, problem, inputs, scalars) as stage:
                plan = build_plan(problem, picked, picked_config, backend)
                if check:
                    Judge(problem, inputs, scalars, rng).check(Contender(picked, picked_config, 0.0), stage.run(plan))
                times = sorted(stage.time([plan], repeats)[0])
            us = statistics.median(times)
            low, high = times[len(times) // 4], times[-1 - len(times) // 4]
            records.append({
                "case": case, "engine": picked.id, "config": picked_config.name, "why": why, "us": us, "iqr_us": high - low,
                "checked": check, "tflops": problem.flops / us / 1e6, "tbps": problem.num_bytes / us / 1e6,
                "of_bound": None if backend.info.is_emulated else bound_us(problem, backend.info) / us})
        progress(len(problems), "done")
    if as_json:
        print_json({"device": backend.info.name, "repeats": repeats, "results": records})
        return
    print_table(("case", "engine and config", "us", "IQR", "TFLOP/s", "TB/s", "of bound"), [
        (r["case"], f"{r['engine']} {r['config']}", f"{r['us']:.2f}", f"{r['iqr_us']:.2f}", f"{r['tflops']:.3g}", f"{r['tbps']:.3g}",
         "-" if r["of_bound"] is None else f"{r['of_bound']:.0%}") for r in records], f"{backend.info.name}, median of {repeats}")
