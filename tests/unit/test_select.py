"""The choice of an engine: verdicts under a policy, database rows, estimates, and the explanation of it all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oxidnn.device import emulated_device, known_device
from oxidnn.dispatch import registry
from oxidnn.dispatch.planning import plan_for
from oxidnn.dispatch.registry import engines_for
from oxidnn.dispatch.select import build_plan, choose, explain
from oxidnn.dispatch.tuning_db import Measurement, TuningDb
from oxidnn.errors import Unsupported
from oxidnn.ops.base import Policy
from oxidnn.ops.case import format_case
from oxidnn.testing.sample import SAMPLES

from .fakes import INFO, FakeBackend, FakeEngine, double, double_op  # noqa: F401

# ruff: noqa: F811


@pytest.fixture
def three(double_op) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.special", "right", reason="n must be even"),
              FakeEngine("double.quick", "right", estimates=(5.0, 2.0), deterministic=False),
              FakeEngine("double.plain", "right", estimates=(9.0,), workspace=1000))


def chosen(db: TuningDb | None = None, policy: Policy | None = None) -> tuple[str, str, str]:
    engine, config, why = choose(double(policy=policy), INFO, db)
    return engine.id, config.name, why


def test_the_smallest_estimate_of_the_supporting_engines(three) -> None:  # type: ignore[no-untyped-def]
    assert chosen() == ("double.quick", "variant1", "estimate")
    assert chosen(TuningDb(None, ())) == ("double.quick", "variant1", "estimate")


def test_the_database_beats_estimates(three) -> None:  # type: ignore[no-untyped-def]
    db = TuningDb(None, ())
    db.record(double(), INFO, [Measurement("double.quick", "variant1", 8.0), Measurement("double.plain", "variant0", 6.0)])
    assert chosen(db) == ("double.plain", "variant0", "tuned: 6.0 us")
    assert choose(double(), replace(INFO, name="Other"), db)[2] == "estimate"


def test_rows_that_are_no_longer_legal_are_passed_over(three, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    db = TuningDb(None, ())
    db.record(double(), INFO, [Measurement("double.gone", "variant0", 1.0), Measurement("double.plain", "gone", 2.0),
                               Measurement("double.special", "variant0", 3.0), Measurement("double.quick", "variant0", 4.0)])
    assert chosen(db) == ("double.quick", "variant0", "tuned: 4.0 us")
    monkeypatch.setenv("OXIDNN_ENGINES", "-*.quick")
    assert chosen(db) == ("double.plain", "variant0", "estimate")


def test_policy_rules_out(three) -> None:  # type: ignore[no-untyped-def]
    assert chosen(policy=Policy(deterministic=True))[0] == "double.plain"
    assert chosen(policy=Policy(workspace_limit=999))[0] == "double.quick"
    with pytest.raises(Unsupported) as caught:
        chosen(policy=Policy(deterministic=True, workspace_limit=999))
    text = str(caught.value)
    assert "double x=f32[64]nchw" in text and "double.special | n must be even" in text
    assert "double.quick | not deterministic" in text and "double.plain | needs more workspace than workspace_limit=999" in text


@pytest.mark.parametrize("rules, left", [
    ("", {"special", "quick", "plain"}), ("-*", set()), ("-*,+*.plain", {"plain"}), ("-double.q*", {"special", "plain"}),
    ("+*.plain,-*", set()),
])
def test_engine_filter(three, monkeypatch, rules: str, left: set[str]) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("OXIDNN_ENGINES", rules)
    assert {e.id for e in engines_for("double")} == {f"double.{name}" for name in left}


def test_unknown_op() -> None:
    with pytest.raises(Unsupported, match="no engine is registered"):
        engines_for("no_such_op")


def test_explanation_shows_every_engine(three) -> None:  # type: ignore[no-untyped-def]
    db = TuningDb(None, ())
    db.record(double(), INFO, [Measurement("double.plain", "variant0", 6.0)])
    found = explain(double(), INFO, db)
    assert (found.chosen, found.why) == ("double.plain variant0", "tuned: 6.0 us")
    assert found.rows() == [
        ("double.special", "n must be even", "-", "-"), ("double.quick", "supported: variant1", "2.0 us", "-"),
        ("double.plain", "supported: variant0", "9.0 us", "6.0 us")]
    assert "double.special | n must be even | - | -" in str(found)
    nothing = explain(double(policy=Policy(deterministic=True, workspace_limit=0)), INFO, None)
    assert (nothing.chosen, nothing.why) == ("none", "no engine takes it")


def test_plan_of_a_chosen_engine_runs(three) -> None:  # type: ignore[no-untyped-def]
    backend = FakeBackend()
    plan = plan_for(double(), backend)
    assert plan.engine.id == "double.quick" and not plan.is_deterministic and backend.num_launches == 0
    assert plan.describe() == "double.quick,variant1,cubin:assembled,double x=f32[64]nchw y=f32[64]nchw"
    again = build_plan(double(), plan.engine, plan.config, backend)
    assert again.config == plan.config and again.workspace_bytes == 0


def test_engines_name_their_cheapest_config_first() -> None:
    """Choosing looks at the first config alone."""
    rng, checked = np.random.default_rng(5), 0
    for info in (known_device("sm_90a"), emulated_device("sm_80")):
        for op, engines in registry.ENGINES.items():
            for problem in (SAMPLES[op](rng, "small") for _ in range(12)):
                for engine in engines:
                    if not problem.is_empty and engine.check_support(problem, info):
                        estimates = [engine.estimate(problem, c, info) for c in engine.configs(problem, info)]
                        # Several matmuls share the config of the largest one: their sum may fall a little otherwise.
                        slack = 1.25 if "dgrad" in op or "transpose" in op else 1.0
                        assert estimates[0] <= slack * min(estimates), (engine.id, format_case(problem))
                        checked += 1
    assert checked > 200
