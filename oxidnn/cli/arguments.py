"""Options that several commands share, how cases are read from the command line, and how tables are printed."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from ..device import DeviceInfo, emulated_device, known_device, parse_device
from ..engines.base import Engine, EngineConfig
from ..errors import InvalidArgument, Unsupported, expected
from ..handle import open_backend
from ..ops import OPS
from ..ops.base import Policy, Problem
from ..ops.case import parse_case
from ..testing import cases

Command = TypeVar("Command", bound=Callable[..., Any])

device_option = click.option("--device", metavar="DEVICE",
                             help="cuda:N or emu:sm_XY (default: OXIDNN_DEVICE, else cuda:0, else the emulator).")
arch_option = click.option("--arch", metavar="ARCH", help="Plan for this architecture, e.g. sm_90a; needs no device.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
seed_option = click.option("--seed", type=int, default=0, show_default=True, help="Of the random inputs.")


def engine_options(command: Command) -> Command:
    command = click.option("--config", metavar="NAME", help="Use this config of the engine.")(command)
    return click.option("--engine", metavar="ID", help="Use this engine instead of the one that would be chosen.")(command)


def problem_options(command: Command) -> Command:
    """CASES and the options that name shapes or a network instead."""
    for option in reversed((
        click.argument("words", metavar="[CASES]...", nargs=-1),
        click.option("--shapes", type=click.Path(path_type=Path), help="A JSON file of benchmark shapes."),
        click.option("--onnx", type=click.Path(path_type=Path), help="An ONNX model."),
        click.option("--network", metavar="NAME", help="The convolutions of a network, e.g. resnet50."),
        click.option("--batch", type=click.IntRange(min=0), help="Their batch size (default 128, or the file's)."),
        click.option("--dtype", "kind", metavar="TYPE", help="Type of their tensors (default bf16, or the model's)."),
        click.option("--layout", type=click.Choice(cases.LAYOUTS), default="nhwc", show_default=True),
        click.option("--direction", metavar="LIST", default="fprop", show_default=True, help="Comma list of fprop, dgrad, wgrad."),
        click.option("--math", metavar="MATH", help="Their f32 arithmetic: ieee, tf32, ..."),
        click.option("--deterministic", is_flag=True, help="Only engines that give the same bits run to run."),
    )):
        command = option(command)
    return command


def problems_of(words: Sequence[str], shapes: Path | None, onnx: Path | None, network: str | None, batch: int | None, kind: str | None,
                layout: str, direction: str, math: str | None, deterministic: bool) -> list[Problem]:
    """The distinct problems that the words and options of `problem_options` name, in order. Raises InvalidArgument if there is none."""
    from ..ops.base import MATH

    if math is not None and math not in MATH:
        raise expected("tune", "--math", repr(math), " | ".join(MATH))
    directions = tuple(d.strip() for d in direction.split(",") if d.strip())
    policy = Policy(deterministic, math or "ieee")
    found = [replace(p, policy=replace(p.policy, deterministic=True)) if deterministic else p for p in _read(words)]
    if shapes is not None:
        found += cases.from_shapes(shapes, batch, kind, layout, directions, policy)
    if onnx is not None:
        found += cases.from_onnx(onnx, batch, kind, layout, policy)
    if network is not None:
        found += cases.network(network, 128 if batch is None else batch, kind or "bf16", layout, directions, policy)
    if not found:
        raise InvalidArgument("no case given (expected CASES, case files, --shapes FILE, --onnx FILE or --network NAME).")
    return list(dict.fromkeys(found))


def _read(words: Sequence[str]) -> list[Problem]:
    if _is_one_case(words):
        return [problem_of(words)]
    problems: list[Problem] = []
    for word in words:
        if Path(word).is_file():
            problems += cases.from_file(word)
        elif " " not in word.strip() and word not in OPS:
            raise InvalidArgument(f"{word!r} is neither a case nor a case file (expected a line such as 'gemm a=f32[4,8] b=f32[8,4]').")
        else:
            problems.append(parse_case(word))
    return problems


def _is_one_case(words: Sequence[str]) -> bool:
    """True for a case whose words the shell has split."""
    return len(words) > 1 and words[0] in OPS and all(re.match(r"\w+=", w) for w in words[1:])


def problem_of(words: Sequence[str]) -> Problem:
    """The problem of one case, given as a line or as the words the shell split it into, or of a verbose line that holds one."""
    return parse_case(line_of(words)[0])


def line_of(words: Sequence[str]) -> tuple[str, str | None, str | None]:
    """(case, engine id, config name) of a case or a verbose line; the latter two only of a verbose line.

    A verbose line is `oxidnn,topic,engine,config,...,CASE[,time,...]`; cases have commas of their own, so the case is found by its op.
    """
    if not words:
        raise InvalidArgument("no case given (expected a line such as 'gemm a=f32[4,8] b=f32[8,4]').")
    line = words[0].strip() if len(words) == 1 else " ".join((words[0], *(_quoted(w) for w in words[1:])))
    if not line.startswith("oxidnn,"):
        return line, None, None
    match = re.search(rf",({'|'.join(map(re.escape, sorted(OPS, key=len, reverse=True)))}) \w+=", line)
    if match is None:
        raise InvalidArgument(f"{line!r} holds no case (expected a verbose line of plan, dispatch or exec, or a case).")
    fields = line[:match.start()].split(",")
    engine, config = (fields[2] if len(fields) > 2 else None), (fields[3] if len(fields) > 3 else None)
    return re.sub(r"(,[\d.]+(us|%))+$", "", line[match.start(1):]), engine, config


def _quoted(word: str) -> str:
    name, _, value = word.partition("=")
    return f"{name}={shlex.quote(value)}"


def planning_info(device: str | None, arch: str | None) -> DeviceInfo:
    """The device to plan for: the architecture's if one is named, else the device's own; nothing is opened for an emulated one."""
    if arch is not None:
        return known_device(arch)
    if device is not None and parse_device(device)[0] == "emu":
        return emulated_device(str(parse_device(device)[1]))
    return open_backend(device).info


def pick(problem: Problem, info: DeviceInfo, engine_id: str | None, config_name: str | None) -> tuple[Engine, EngineConfig, str]:
    """(engine, config, why): the one named, or the one that would be chosen. Raises InvalidArgument or Unsupported."""
    from ..dispatch.registry import engines_for
    from ..dispatch.select import choose, legal_configs, verdict
    from ..dispatch.tuning_db import TuningDb

    if engine_id is None and config_name is None:
        return choose(problem, info, TuningDb.open())
    if engine_id is None:
        engine = choose(problem, info, TuningDb.open())[0]
    else:
        engines = {e.id: e for e in engines_for(problem.op)}
        if engine_id not in engines:
            raise expected(problem.op, "engine", repr(engine_id), " | ".join(engines))
        engine = engines[engine_id]
    support = verdict(engine, problem, info)
    if not support:
        raise Unsupported(f"{engine.id}: {support.reason}")
    configs = {c.name: c for c in legal_configs(engine, problem, info)}
    if config_name is not None and config_name not in configs:
        raise expected(problem.op, f"config of {engine.id}", repr(config_name), " | ".join(configs))
    if config_name is None:
        return engine, min(configs.values(), key=lambda c: engine.estimate(problem, c, info)), "named"
    return engine, configs[config_name], "named"


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, default=str))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """A table: drawn on a terminal, aligned plain columns elsewhere."""
    texts = [[str(v) for v in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*headers, title=title or None, title_justify="left")
        for text in texts:
            table.add_row(*text)
        Console(markup=False).print(table)
        return
    if title:
        click.echo(title)
    widths = [max(len(r[i]) for r in [list(headers), *texts]) for i in range(len(headers))]
    for text in [list(headers), *texts]:
        click.echo("  ".join(t.ljust(w) for t, w in zip(text, widths, strict=True)).rstrip())
