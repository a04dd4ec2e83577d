"""Commands that run one case against the reference: repro on a device, emu in the emulator with its checkers."""

from __future__ import annotations

from typing import Any

import click

from ..device import parse_device
from ..emu.checkers import NAMES, expand
from ..errors import expected
from ..handle import open_backend
from ..ops.case import format_case, parse_case
from ..testing.harness import run_problem
from .arguments import (
    arch_option,
    device_option,
    engine_options,
    json_option,
    line_of,
    pick,
    print_json,
    print_table,
    problem_of,
    seed_option,
)

PROFILE_ROWS = 20


@click.command()
@click.argument("words", metavar="LINE", nargs=-1, required=True)
@engine_options
@seed_option
@device_option
@json_option
def repro(words: tuple[str, ...], engine: str | None, config: str | None, seed: int, device: str | None, as_json: bool) -> None:
    """Runs LINE, a case or a verbose line, on fresh random inputs and compares with the float64 reference.

    A verbose line names the engine and config too, unless --engine or --config say otherwise.
    """
    line, said_engine, said_config = line_of(words)
    problem, backend = parse_case(line), open_backend(device)
    if engine is None and config is None:
        engine, config = said_engine, said_config
    chosen, chosen_config, why = pick(problem, backend.info, engine, config)
    worst = run_problem(backend, problem, chosen, chosen_config, seed).worst
    if as_json:
        print_json({"case": format_case(problem), "device": backend.info.name, "engine": chosen.id, "config": chosen_config.name,
                    "why": why, "seed": seed, "worst_error_over_tolerance": worst})
    else:
        click.echo(f"{format_case(problem)}\n{chosen.id} {chosen_config.name} ({why}) on {backend.info.name}: "
                   f"agrees, the worst error is {worst:.3f} of the tolerance")


@click.command()
@click.argument("words", metavar="CASE", nargs=-1, required=True)
@click.option("--checkers", default="all", show_default=True, metavar="LIST", help="none, basic, all, or a comma list of names.")
@click.option("--schedule", default="lowest_pc", show_default=True, metavar="NAME", help="How warps interleave: lowest_pc or random:SEED.")
@click.option("--profile", is_flag=True, help="Print the emulator's counters of every launch.")
@engine_options
@seed_option
@arch_option
@device_option
@json_option
def emu(words: tuple[str, ...], checkers: str, schedule: str, profile: bool, engine: str | None, config: str | None, seed: int,
        arch: str | None, device: str | None, as_json: bool) -> None:
    """Runs CASE in the emulator with checkers on, on fresh random inputs, and compares with the float64 reference."""
    from ..runtime.emu_backend import EmulatedBackend

    class Recording(EmulatedBackend):
        """Keeps the counters of every launch instead of the last one's."""

        def __init__(self, *arguments: Any) -> None:
            self.launches: list[Any] = []
            super().__init__(*arguments)

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "counters" and value is not None:
                self.launches.append(value)
            super().__setattr__(name, value)

    if device is not None:
        kind, which = parse_device(device)
        if kind != "emu":
            raise expected("emu", "--device", device, "emu or emu:sm_XY")
        arch = arch or str(which)
    problem = problem_of(words)
    watched = _checkers(checkers) | ({"bank"} if profile else set())
    backend = Recording(arch or "sm_90a", tuple(sorted(watched)), _schedule(schedule))
    chosen, chosen_config, why = pick(problem, backend.info, engine, config)
    worst = run_problem(backend, problem, chosen, chosen_config, seed).worst
    if as_json:
        print_json({"case": format_case(problem), "arch": backend.info.arch, "engine": chosen.id, "config": chosen_config.name,
                    "why": why, "seed": seed, "checkers": checkers, "worst_error_over_tolerance": worst,
                    "launches": [launch.summary() for launch in backend.launches]})
        return
    click.echo(f"{format_case(problem)}\n{chosen.id} {chosen_config.name} ({why}) on {backend.info.name}: "
               f"agrees, the worst error is {worst:.3f} of the tolerance; no checker of {checkers} fired")
    if profile:
        for number, launch in enumerate(backend.launches):
            print_table(("counter", "value"), list(launch.summary().items()), f"launch {number}:")
            print_table(("PTX line", "executions", "bank conflicts", "uncoalesced sectors", "instruction"), launch.profile()[:PROFILE_ROWS],
                        f"the {PROFILE_ROWS} lines executed most:")


def _checkers(text: str) -> frozenset[str]:
    if text == "none":
        return frozenset()
    if text in ("basic", "all"):
        return expand(text)
    names = frozenset(n.strip() for n in text.split(",") if n.strip())
    if not names or not names <= set(NAMES):
        raise expected("emu", "--checkers", repr(text), f"none, basic, all, or names out of {', '.join(NAMES)}")
    return names


def _schedule(text: str) -> str | tuple[str, int]:
    kind, _, seed = text.partition(":")
    if text == "lowest_pc":
        return text
    if kind == "random" and (seed or "0").isdigit():
        return "random", int(seed or "0")
    raise expected("emu", "--schedule", repr(text), "lowest_pc, random or random:SEED")

