"""plan_for: the plan of a problem, tuned first if the caller wants that. What Session and warm-up call."""

from __future__ import annotations

from .. import report
from ..ops.base import Problem
from ..ops.case import format_case
from ..plan import Plan
from ..runtime.backend import Backend
from .search import tune_problem
from .select import build_plan, choose
from .tuning_db import TuningDb


def plan_for(problem: Problem, backend: Backend, *, tune: str = "db", db: TuningDb | None = None, may_measure: bool = True) -> Plan:
    """The plan of `problem`.

    tune: "off" estimates only | "db" database, then estimates | "auto" measures a problem the database does not hold | "force"
    measures always. may_measure: False under graph capture, where nothing is ever measured.
    """
    if tune in ("auto", "force") and may_measure and db is not None and not problem.is_empty:
        if tune == "force" or db.lookup(problem, backend.info) is None:
            tune_problem(problem, backend, db)
    engine, config, why = choose(problem, backend.info, None if tune == "off" else db)
    report.line("dispatch", engine.id, config.name, why, format_case(problem))
    return build_plan(problem, engine, config, backend)
