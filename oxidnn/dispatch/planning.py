"""plan_for: the plan of a problem, tuned first if the caller wants that. What Session and warm-up call."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache

from .. import report, switches
from ..codegen.render import sources_digest
from ..device import DeviceInfo
from ..engines.base import Engine, EngineConfig
from ..ops.base import Problem
from ..ops.case import format_case
from ..plan import Plan
from ..runtime.backend import Backend
from .registry import engines_for
from .search import tune_problem
from .select import build_plan, choose_by
from .tuning_db import TuningDb, key_of


def plan_for(problem: Problem, backend: Backend, *, tune: str = "db", db: TuningDb | None = None, may_measure: bool = True) -> Plan:
    """The plan of `problem`.

    tune: "off" estimates only | "db" database, then estimates | "auto" measures a problem the database does not hold | "force"
    measures always. may_measure: False under graph capture, where nothing is ever measured.
    """
    if tune in ("auto", "force") and may_measure and db is not None and not problem.is_empty:
        if tune == "force" or db.lookup(problem, backend.info) is None:
            tune_problem(problem, backend, db)
    engine, config, why = choice_for(problem, backend.info, tune, db)
    report.line("dispatch", engine.id, config.name, why, format_case(problem))
    return build_plan(problem, engine, config, backend)


def choice_for(problem: Problem, info: DeviceInfo, tune: str, db: TuningDb | None) -> tuple[Engine, EngineConfig, str]:
    """(engine, config, why) as select.choose gives them, remembered in the database under a digest of all that they depend on.

    Raises Unsupported. OXIDNN_VERBOSE=dispatch wants to see the engines refused, so it chooses anew.
    """
    rows = [] if db is None or tune == "off" else db.rows(problem, info)
    if db is None or report.is_on("dispatch"):
        return choose_by(problem, info, rows)
    measured = [(r.engine, r.config, r.us) for r in rows]
    depends_on = (code_digest(), info, key_of(problem, info), switches.get("OXIDNN_ENGINES"), measured)
    inputs = hashlib.sha256(repr(depends_on).encode()).hexdigest()
    found = db.recall(inputs)
    if found is not None:
        name, knobs, why = json.loads(found)
        engine = next((e for e in engines_for(problem.op) if e.id == name), None)
        if engine is not None:
            return engine, EngineConfig(tuple((k, v) for k, v in knobs)), why
    engine, config, why = choose_by(problem, info, rows)
    text = json.dumps((engine.id, config.knobs, why))
    if json.loads(text)[1] == [list(knob) for knob in config.knobs]:  # knobs of a kind that JSON changes are chosen anew
        db.remember(inputs, code_digest(), text)
    return engine, config, why


@cache
def code_digest() -> str:
    """SHA-256 (hex) of the code that a choice depends on: problems, engines and what they stand on, and the choosing itself."""
    digest = hashlib.sha256(sources_digest().encode())
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for room in ("", "ops", "dispatch"):
        folder = os.path.join(package, room)
        for name in sorted(n for n in os.listdir(folder) if n.endswith(".py")):
            with open(os.path.join(folder, name), "rb") as file:
                digest.update(f"{room}/{name}\0".encode() + file.read() + b"\0")
    return digest.hexdigest()
