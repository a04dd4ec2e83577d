"""From a problem to a plan: which engines take it, which one is chosen and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import report, switches
from ..device import DeviceInfo
from ..engines.base import Engine, EngineConfig, Support, refuse
from ..errors import Unsupported
from ..ops.base import Problem
from ..ops.case import format_case
from ..plan import Plan
from ..runtime.backend import Backend
from .registry import engines_for

if TYPE_CHECKING:
    from .tuning_db import Row, TuningDb


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine's answer to a problem: supported or why not; its configs with estimated and, if tuned, measured microseconds."""

    engine: Engine
    support: Support
    configs: tuple[tuple[EngineConfig, float], ...] = ()  # (config, estimate), cheapest first
    measured_us: float | None = None

    @property
    def estimate_us(self) -> float:
        return self.configs[0][1] if self.configs else float("inf")


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `DnnHandle.explain` returns; prints as the table engine | verdict | estimate | measured."""

    case: str
    candidates: tuple[Candidate, ...]
    chosen: str
    why: str

    def rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (c.engine.id, ("supported: " + c.configs[0][0].name) if c.support else c.support.reason,
             f"{c.estimate_us:.1f} us" if c.support else "-", f"{c.measured_us:.1f} us" if c.measured_us is not None else "-")
            for c in self.candidates
        ]

    def __str__(self) -> str:
        return "\n".join([self.case, *(" | ".join(r) for r in [("engine", "verdict", "estimate", "measured"), *self.rows()]),
                          f"chosen: {self.chosen} ({self.why})"])


def verdict(engine: Engine, problem: Problem, info: DeviceInfo) -> Support:
    """The engine's support under the problem's policy."""
    if problem.policy.deterministic and not engine.is_deterministic:
        return refuse("not deterministic, and deterministic=True was asked for")
    support = engine.check_support(problem, info)
    limit = problem.policy.workspace_limit
    if support and limit is not None and not any(
        engine.build_steps(problem, config, info).workspace_bytes <= limit for config in engine.configs(problem, info)
    ):
        return refuse(f"needs more workspace than workspace_limit={limit} bytes")
    return support


def legal_configs(engine: Engine, problem: Problem, info: DeviceInfo) -> list[EngineConfig]:
    """The configs of a supporting engine that respect the workspace limit."""
    limit = problem.policy.workspace_limit
    return [c for c in engine.configs(problem, info) if limit is None or engine.build_steps(problem, c, info).workspace_bytes <= limit]


def candidates_for(problem: Problem, info: DeviceInfo, db: TuningDb | None = None, *, estimates_all: bool = True) -> list[Candidate]:
    """Every registered engine's answer, in registry order.

    estimates_all: False estimates only the config an engine names first, which is all that choosing needs.
    """
    measured = db.measurements(problem, info) if db is not None else {}
    answers = []
    for engine in engines_for(problem.op):
        support = verdict(engine, problem, info)
        if not support:
            report.line("dispatch", engine.id, f"skip:{support.reason}")
            answers.append(Candidate(engine, support))
            continue
        configs = legal_configs(engine, problem, info)
        if estimates_all:
            estimates = sorted(((c, engine.estimate(problem, c, info)) for c in configs), key=lambda pair: pair[1])
        else:
            estimates = [(c, math.inf) for c in configs]
            estimates[0] = configs[0], engine.estimate(problem, configs[0], info)
        answers.append(Candidate(engine, support, tuple(estimates), measured.get(engine.id)))
    return answers


def unsupported(problem: Problem, candidates: list[Candidate]) -> Unsupported:
    rows = "\n".join(f"  {c.engine.id} | {c.support.reason}" for c in candidates)
    if not candidates:
        rows = f"  none is left by OXIDNN_ENGINES={switches.get('OXIDNN_ENGINES')!r}"
    return Unsupported(f"{format_case(problem)}: no engine takes it.\n  engine | reason\n{rows}")


def choose(problem: Problem, info: DeviceInfo, db: TuningDb | None) -> tuple[Engine, EngineConfig, str]:
    """(engine, config, why): the fastest row of the tuning database that is still legal, else the smallest estimate. Raises Unsupported."""
    return choose_by(problem, info, [] if db is None else db.rows(problem, info))


def choose_by(problem: Problem, info: DeviceInfo, rows: Sequence[Row]) -> tuple[Engine, EngineConfig, str]:
    """`choose` with the database's rows given, the best first: a pure function of its arguments and OXIDNN_ENGINES."""
    candidates = candidates_for(problem, info, estimates_all=False)
    supported = [c for c in candidates if c.support]
    if not supported:
        raise unsupported(problem, candidates)
    configs = {(c.engine.id, config.name): (c.engine, config) for c in supported for config, _ in c.configs} if rows else {}
    for row in rows:
        found = configs.get((row.engine, row.config))
        if found is not None:
            return *found, f"tuned: {row.us:.1f} us"
    best = min(supported, key=lambda c: c.estimate_us)
    return best.engine, best.configs[0][0], "estimate"


def build_plan(problem: Problem, engine: Engine, config: EngineConfig, backend: Backend) -> Plan:
    """Renders, assembles (or fetches) and loads the steps of `problem`."""
    plan = Plan(problem, engine, config, engine.build_steps(problem, config, backend.info), backend)
    plan.say()
    return plan


def explain(problem: Problem, info: DeviceInfo, db: TuningDb | None) -> Explanation:
    """Who was refused and why, who was chosen and why. Raises nothing for an unsupported problem: the table says it."""
    candidates = candidates_for(problem, info, db)
    try:
        engine, config, why = choose(problem, info, db)
        return Explanation(format_case(problem), tuple(candidates), f"{engine.id} {config.name}", why)
    except Unsupported:
        return Explanation(format_case(problem), tuple(candidates), "none", "no engine takes it")
