"""The search: what is tried, what may win, what is recorded, and what stops it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping

import numpy as np
import pytest

from oxidnn.dispatch import planning, search, tuning_db
from oxidnn.dispatch.planning import choice_for, plan_for
from oxidnn.dispatch.search import contenders, stage_inputs, tune_problem
from oxidnn.dispatch.tuning_db import Measurement, TuningDb
from oxidnn.errors import InvalidArgument, LaunchError, NumericsError, PtxError, Unsupported
from oxidnn.ops.base import Policy, Problem
from oxidnn.ops.case import parse_case
from oxidnn.testing.excerpt import excerpts, has_excerpts
from oxidnn.testing.reference import REFERENCES, Expected
from oxidnn.testing.stage import Stage

from .fakes import INFO, FakeBackend, FakeEngine, double, double_op  # noqa: F401

# ruff: noqa: F811


@pytest.fixture
def db() -> TuningDb:
    return TuningDb(None, ())


def test_the_fastest_right_engine_wins_and_the_others_say_why(double_op, db) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.wrong", "wrong", 1.0), FakeEngine("double.lazy", "lazy", 0.5), FakeEngine("double.short", "short", 0.5),
              FakeEngine("double.overrun", "overrun", 0.5), FakeEngine("double.clobber", "clobber", 0.5),
              FakeEngine("double.refuse", "refuse", 0.5), FakeEngine("double.slow", "right", 9.0),
              FakeEngine("double.fast", "right", 4.0, estimates=(1.0, 2.0)))
    backend = FakeBackend()
    results = tune_problem(double(), backend, db)
    assert [(m.engine, m.config, m.us) for m in results[:3]] == [
        ("double.fast", "variant0", 4.0), ("double.fast", "variant1", 8.0), ("double.slow", "variant0", 9.0)]
    reasons = {m.engine: m.reason for m in results[3:]}
    assert all(m.us is None and not m.is_fatal for m in results[3:])
    assert "NumericsError" in reasons["double.wrong"] and "expected" in reasons["double.wrong"]
    assert "nan" in reasons["double.lazy"] and "y[63]" in reasons["double.short"]
    assert "outside the elements of y" in reasons["double.overrun"] and "outside the elements of x" in reasons["double.clobber"]
    assert "LaunchError" in reasons["double.refuse"] and len(reasons) == 6
    row = db.lookup(double(), backend.info)
    assert row is not None and (row.engine, row.us) == ("double.fast", 4.0)
    assert db.measurements(double(), backend.info) == {"double.fast": 4.0, "double.slow": 9.0}
    assert len(db.entries()) == 9
    assert backend.blocks == {} and set(backend.flushed) == {2 * backend.info.l2_bytes}


def test_a_candidate_that_spoils_the_inputs_does_not_harm_the_next(double_op, db) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.clobber", "clobber", estimates=(1.0,)), FakeEngine("double.right", "right", estimates=(2.0,)))
    assert [m.engine for m in tune_problem(double(), FakeBackend(), db) if m.us] == ["double.right"]


def test_wrong_candidates_are_never_timed(double_op, db, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.wrong", "wrong"), FakeEngine("double.right", "right"))
    timed = []
    monkeypatch.setattr(Stage, "time", lambda self, plans, repeats: timed.append([p.engine.id for p in plans]) or [[1.0]] * len(plans))
    tune_problem(double(), FakeBackend(), db)
    assert timed and all(ids == ["double.right"] for ids in timed)


@pytest.mark.parametrize("body, kind", [
    ("refuse", "LaunchError"), ("spill", "AssemblyError"), ("race", "EmulatorFault"), ("wrong", "NumericsError")])
def test_failures_of_a_candidate_are_recorded(double_op, db, body: str, kind: str) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.bad", body, estimates=(0.5,)), FakeEngine("double.right", "right"))
    results = tune_problem(double(), FakeBackend(), db)
    assert [(m.engine, m.us is None) for m in results] == [("double.right", False), ("double.bad", True)]
    (row,) = [r for r in db.entries() if r.us is None]
    assert row.engine == "double.bad" and row.reason.startswith(kind + ": ")


@pytest.mark.parametrize("body, kind", [("bug", TypeError), ("malformed", PtxError), ("argument", InvalidArgument)])
def test_programming_errors_propagate(double_op, db, body: str, kind: type[Exception]) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.bad", body), FakeEngine("double.right", "right"))
    backend = FakeBackend()
    with pytest.raises(kind):
        tune_problem(double(), backend, db)
    assert db.entries() == [] and backend.blocks == {}


def test_a_fault_that_kills_the_context_stops_and_is_not_tried_again(double_op, db) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.lazy", "lazy", estimates=(0.5,)), FakeEngine("double.die", "die"),
              FakeEngine("double.right", "right", estimates=(2.0,)))
    with pytest.raises(LaunchError, match="tuning stopped: double.die variant0 left the device unusable"):
        tune_problem(double(), FakeBackend(), db)
    assert {(r.engine, r.us) for r in db.entries()} == {("double.lazy", None), ("double.die", None)}
    assert db.lookup(double(), FakeBackend().info) is None
    results = tune_problem(double(), FakeBackend(), db)  # in the next process
    assert [m.engine for m in results] == ["double.right", "double.lazy"]
    row = db.lookup(double(), FakeBackend().info)
    assert row is not None and row.engine == "double.right"
    assert db.fatal(double(), FakeBackend().info) == {("double.die", "variant0")}


def test_a_failure_while_timing_costs_only_the_one_that_fails(double_op, db, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.flaky", "right", 1.0), FakeEngine("double.right", "right", 2.0))
    original = Stage.time

    def time(self, plans, repeats):  # type: ignore[no-untyped-def]
        if any(p.engine.id == "double.flaky" for p in plans):
            raise LaunchError("out of resources")
        return original(self, plans, repeats)

    monkeypatch.setattr(Stage, "time", time)
    results = tune_problem(double(), FakeBackend(), db)
    assert [(m.engine, m.us) for m in results] == [("double.right", 2.0), ("double.flaky", None)]
    assert "out of resources" in results[1].reason


def test_pruning_keeps_the_near_and_always_two_engines(double_op) -> None:  # type: ignore[no-untyped-def]
    backend = FakeBackend()
    double_op(FakeEngine("double.a", "right", estimates=(10.0, 39.0, 41.0)), FakeEngine("double.b", "right", estimates=(400.0, 500.0)),
              FakeEngine("double.c", "right", estimates=(900.0,)))
    kept = [(c.engine.id, c.estimate_us) for c in contenders(double(), backend.info)]
    assert kept == [("double.a", 10.0), ("double.a", 39.0), ("double.b", 400.0)]
    double_op(FakeEngine("double.a", "right", estimates=(1.0, 1.1, 1.2, 1.3)), FakeEngine("double.no", "right", reason="not today"))
    assert [c.config.name for c in contenders(double(), backend.info, configs_per_engine=2)] == ["variant0", "variant1"]


def test_estimates_are_only_a_hint(double_op, db) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.boaster", "right", 50.0, estimates=(1.0,)), FakeEngine("double.modest", "right", 2.0, estimates=(300.0,)))
    assert tune_problem(double(), FakeBackend(), db)[0].engine == "double.modest"


def test_no_engine_empty_problem_and_capture(double_op, db) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.no", "right", reason="not today"))
    with pytest.raises(Unsupported, match="not today"):
        tune_problem(double(), FakeBackend(), db)
    double_op(FakeEngine("double.right", "right"))
    backend = FakeBackend()
    assert tune_problem(double(0), backend, db) == [] and backend.num_launches == 0
    with pytest.raises(InvalidArgument, match="capturing"):
        tune_problem(double(), FakeBackend(capturing=True), db)


def test_policy_holds_for_candidates(double_op, db) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.atomic", "right", 1.0, deterministic=False), FakeEngine("double.hungry", "right", 2.0, workspace=4096),
              FakeEngine("double.plain", "right", 3.0))
    problem = double(policy=Policy(deterministic=True, workspace_limit=100))
    assert [m.engine for m in tune_problem(problem, FakeBackend(), db)] == ["double.plain"]
    assert [m.engine for m in tune_problem(double(), FakeBackend(), db)] == ["double.atomic", "double.hungry", "double.plain"]


def test_progress_counts_up_to_the_end(double_op, db) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.a", "right"), FakeEngine("double.b", "right"))
    seen = []
    tune_problem(double(), FakeBackend(), db, progress=lambda done, total, what: seen.append((done, total, what)))
    assert seen == [(0, 3, "double.a variant0"), (1, 3, "double.b variant0"), (2, 3, "timing"), (3, 3, "done")]


def test_plan_for_tunes_as_asked(double_op, db) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.boaster", "right", 50.0, estimates=(1.0,)), FakeEngine("double.modest", "right", 2.0, estimates=(3.0,)))
    backend = FakeBackend()
    assert plan_for(double(), backend, tune="db", db=db).engine.id == "double.boaster"
    assert plan_for(double(), backend, tune="auto", db=db, may_measure=False).engine.id == "double.boaster" and backend.num_launches == 0
    assert plan_for(double(), backend, tune="auto", db=db).engine.id == "double.modest"
    launched = backend.num_launches
    assert plan_for(double(), backend, tune="auto", db=db).engine.id == "double.modest" and backend.num_launches == launched
    assert plan_for(double(), backend, tune="off", db=db).engine.id == "double.boaster"
    plan_for(double(), backend, tune="force", db=db)
    assert backend.num_launches > launched


# ---- large problems: excerpts and witnesses ----------------------------------------------------------------------------------------

LARGE = (
    "conv_fprop x=f32[3,6,9,8]nhwc w=f32[8,3,3,2]nhwc stride=(2,1) padding=((1,0),(2,1)) dilation=(1,2) groups=2",
    "conv_fprop x=f32[2,5,7]nchw w=f32[40,5,3]nchw padding=1 bias=f32[40]nchw residual=f32[2,40,7]nchw",
    "conv_dgrad dy=f32[3,8,5,4]nchw w=f32[8,3,3,3]nchw dx=f32[3,6,9,8]nchw stride=2 padding=1 groups=2",
    "conv_wgrad x=f32[3,6,9,8]nchw dy=f32[3,8,5,4]nchw dw=f32[8,3,3,3]nchw stride=2 padding=1 groups=2",
    "conv_transpose x=f32[2,8,4,3]nchw w=f32[8,3,3,3]nchw stride=2 padding=1 output_padding=1 groups=2",
    "gemm a=f32[70,33]nchw b=f32[90,33]nchw transpose_b=True bias=f32[90]nchw alpha=0.5",
    "gemm a=f32[3,1,17,5]nchw b=f32[2,17,90]nchw transpose_a=True c=f32[3,1,1,90]nchw beta=2.0",
    "grouped_gemm a=f32[30,7]nchw b=f32[4,90,7]nchw group_sizes=s32[4]nchw transpose_b=True",
    "grouped_gemm_wgrad a=f32[30,70]nchw b=f32[30,90]nchw group_sizes=s32[4]nchw cumulative=True",
)


@pytest.mark.parametrize("line", LARGE)
def test_excerpts_compute_parts_of_the_whole(line: str) -> None:
    problem = parse_case(line)
    assert has_excerpts(problem)
    rng = np.random.default_rng(3)
    inputs = {o.name: rng.standard_normal(o.desc.shape) for o in problem.inputs}
    whole = {name: e.want for name, e in REFERENCES[problem.op](problem, inputs, {}).items()}
    covered = np.zeros(problem.outputs[0].desc.shape, bool)
    count = 0
    for part in excerpts(problem, rng, max_flops=problem.flops / 3):
        wanted = REFERENCES[problem.op](part.problem, part.of(inputs), {})
        for name, taken in part.of(whole).items():
            np.testing.assert_allclose(wanted[name].want, taken, rtol=1e-12, atol=1e-12)
        covered[np.ix_(*part.taken[problem.outputs[0].name])] = True
        assert part.problem.flops < problem.flops
        count += 1
    assert count == 3 and covered.flat[0] and covered.flat[-1] and not covered.all()


class Product(FakeEngine):
    """a @ b with a fault of one's choice, as a stand-in for a large problem's engines."""

    def __init__(self, name: str, us: float, spoil) -> None:  # type: ignore[no-untyped-def]
        super().__init__(name, "right", us)
        self.spoil = spoil


@pytest.fixture
def large_gemm(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """gemm counted as large, run by Product engines; the value sets them, in the registry's order."""
    from oxidnn.dispatch import registry
    monkeypatch.setattr(search, "EXACT_FLOPS", 0)
    monkeypatch.setattr(search, "EXCERPT_FLOPS", 3000)
    monkeypatch.setattr(search, "build_plan", lambda problem, engine, config, backend: _ProductPlan(engine, config))

    def run(self: Stage, plan: _ProductPlan) -> dict[str, np.ndarray]:
        a, b = (self.buffers[n].read(self.buffers[n].bytes).astype(np.float64) for n in "ab")
        d = (a @ b).astype(np.float32)
        plan.engine.spoil(d)
        return {"d": d}

    monkeypatch.setattr(Stage, "run", run)
    monkeypatch.setattr(Stage, "time", lambda self, plans, repeats: [[p.engine.us] * repeats for p in plans])
    return lambda *engines: monkeypatch.setitem(registry.ENGINES, "gemm", engines)


class _ProductPlan:
    workspace_bytes = 0

    def __init__(self, engine, config) -> None:  # type: ignore[no-untyped-def]
        self.engine, self.config = engine, config


def _right(d: np.ndarray) -> None: ...


def _wrong_in_the_middle(d: np.ndarray) -> None:
    d[21, 140] += 0.5  # no excerpt holds it


def _unwritten_in_the_middle(d: np.ndarray) -> None:
    d[21, 140] = np.nan


def _wrong_at_the_corner(d: np.ndarray) -> None:
    d[0, 0] += 0.5


GEMM = "gemm a=f32[256,9]nchw b=f32[9,256]nchw"


def test_the_middle_is_in_no_excerpt() -> None:
    taken = [p.taken["d"] for p in excerpts(parse_case(GEMM), np.random.default_rng(0), 3000)]
    assert all(21 not in rows or 140 not in cols for rows, cols in taken)


@pytest.mark.parametrize("spoil", [_wrong_in_the_middle, _unwritten_in_the_middle, _wrong_at_the_corner])
@pytest.mark.parametrize("bad", ["gemm.fast", "gemm.other", "gemm.direct"])
def test_large_results_are_checked_everywhere(large_gemm, db, spoil, bad: str) -> None:  # type: ignore[no-untyped-def]
    """Whichever engine is wrong, the most general one included, it loses and the others stay."""
    names = ("gemm.fast", "gemm.other", "gemm.direct")
    large_gemm(*(Product(n, 0.5 if n == bad else 1.0 + i, spoil if n == bad else _right) for i, n in enumerate(names)))
    results = tune_problem(parse_case(GEMM), FakeBackend(), db)
    assert [m.engine for m in results] == [*(n for n in names if n != bad), bad]
    assert results[-1].us is None and "NumericsError" in results[-1].reason and results[1].us is not None


def test_two_engines_wrong_alike_lose_to_a_third(large_gemm, db) -> None:  # type: ignore[no-untyped-def]
    """Agreement with a wrong witness does not help: the reference decides at the place of the disagreement."""
    large_gemm(Product("gemm.right", 3.0, _right), Product("gemm.copy", 1.0, _wrong_in_the_middle),
               Product("gemm.direct", 2.0, _wrong_in_the_middle))
    results = tune_problem(parse_case(GEMM), FakeBackend(), db)
    assert [m.engine for m in results if m.us] == ["gemm.right"] and len(results) == 3


def test_a_single_engine_is_held_against_excerpts(large_gemm, db) -> None:  # type: ignore[no-untyped-def]
    large_gemm(Product("gemm.direct", 2.0, _wrong_at_the_corner))
    assert [m.us for m in tune_problem(parse_case(GEMM), FakeBackend(), db)] == [None]
    large_gemm(Product("gemm.direct", 2.0, _right))
    assert [m.us for m in tune_problem(parse_case(GEMM), FakeBackend(), db)] == [2.0]


def test_random_data_of_large_tensors_is_not_constant() -> None:
    problem: Problem = parse_case("gemm a=bf16[3000,2000]nchw b=bf16[2000,5]nchw")
    inputs = stage_inputs(problem, np.random.default_rng(0))
    a = inputs["a"].astype(np.float32)
    assert a.shape == (3000, 2000) and abs(a.mean()) < 0.01 and 0.95 < a.std() < 1.05
    assert len({row.tobytes() for row in inputs["a"][:50]}) == 50


def test_judge_law_is_the_references(double_op) -> None:  # type: ignore[no-untyped-def]
    """One ulp beside the reference passes, a thousandth does not."""
    double_op(FakeEngine("double.right", "right"))
    problem = double(4)
    inputs = {"x": np.array([1, 2, 3, 4], np.float32)}
    judge = search.Judge(problem, inputs, {}, np.random.default_rng(0))
    contender = contenders(problem, FakeBackend().info)[0]
    judge.check(contender, {"y": np.nextafter(np.float32(2) * inputs["x"], np.float32(9))})
    with pytest.raises(NumericsError):
        judge.check(contender, {"y": np.float32(2.002) * inputs["x"]})


def test_reference_is_called_with_values_of_the_storage_type(double_op, db, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.right", "right"))
    seen = []

    def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
        seen.append(inputs["x"])
        return {"y": Expected(2.0 * inputs["x"])}

    monkeypatch.setitem(REFERENCES, "double", reference)
    tune_problem(double(), FakeBackend(), db)
    (x,) = seen
    assert x.dtype == np.float64 and (x == x.astype(np.float32)).all()


def test_a_choice_is_remembered_by_the_next_process_and_only_for_its_inputs(double_op, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.slow", "right", us=9.0, estimates=(9.0,)), FakeEngine("double.quick", "right", estimates=(5.0, 2.0)))
    path = tmp_path / "tuning.sqlite"
    enumerated: list[str] = []
    whole = FakeEngine.configs
    monkeypatch.setattr(FakeEngine, "configs", lambda self, *a: enumerated.append(self.id) or whole(self, *a))

    def chosen(problem: Problem = double(), tune: str = "db") -> tuple[str, str, str]:  # noqa: B008
        enumerated.clear()
        db = TuningDb(path, ())  # as a new process opens it
        engine, config, why = choice_for(problem, INFO, tune, db)
        db.close()
        return engine.id, config.name, why

    assert chosen() == ("double.quick", "variant1", "estimate") and enumerated
    assert chosen() == ("double.quick", "variant1", "estimate") and not enumerated
    for other in (double(65), double(policy=Policy(workspace_limit=9))):
        assert chosen(other)[0] == "double.quick" and enumerated
    monkeypatch.setenv("OXIDNN_ENGINES", "-*.quick")
    assert chosen()[0] == "double.slow" and enumerated
    monkeypatch.delenv("OXIDNN_ENGINES")

    db = TuningDb(path, ())
    db.record(double(), INFO, [Measurement("double.slow", "variant0", 1.0)])  # a measurement is another input
    db.close()
    assert chosen() == ("double.slow", "variant0", "tuned: 1.0 us") and enumerated
    assert chosen() == ("double.slow", "variant0", "tuned: 1.0 us") and not enumerated
    assert chosen(tune="off") == ("double.quick", "variant1", "estimate") and not enumerated

    monkeypatch.setattr(planning, "code_digest", lambda: "other code")
    assert chosen()[0] == "double.slow" and enumerated
    monkeypatch.setenv("OXIDNN_VERBOSE", "dispatch")  # it shows who was refused, so it has to ask
    assert chosen()[0] == "double.slow" and enumerated


@pytest.mark.parametrize("damage", ["x", "[1]", "null", b"\xff\0", '["double.right", [["nonsense", 3]], "estimate"]', None])
def test_a_damaged_choice_is_made_anew(double_op, tmp_path, damage) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.right", "right"))
    db = TuningDb(tmp_path / "tuning.sqlite", ())
    first = choice_for(double(), INFO, "db", db)
    db.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "tuning.sqlite")) as connection, connection:
        old = connection.execute("SELECT choice FROM choice").fetchone()[0]
        connection.execute("UPDATE choice SET choice = ?", (old[:-3] if damage is None else damage,))
    again = TuningDb(tmp_path / "tuning.sqlite", ())
    assert choice_for(double(), INFO, "db", again) == first
    again.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "tuning.sqlite")) as connection:
        assert connection.execute("SELECT choice FROM choice").fetchone()[0] == old


@pytest.mark.parametrize("us", ["abc", b"q"])
def test_a_time_that_is_no_number_never_wins(double_op, us) -> None:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.right", "right"))
    db = TuningDb(None, ())
    db.record(double(), INFO, [Measurement("double.right", "variant0", us)])
    assert db.lookup(double(), INFO) is None and choice_for(double(), INFO, "db", db)[2] == "estimate"


def test_old_choices_of_other_code_go(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    db = TuningDb(tmp_path / "tuning.sqlite", ())
    db.remember("a", "old code", "1")
    db.remember("b", "code", "2")
    assert (db.recall("a"), db.recall("b"), db.recall("c")) == ("1", "2", None)
    monkeypatch.setattr(tuning_db, "CHOICES_KEPT_S", -1.0)
    db.remember("c", "code", "3")
    assert (db.recall("a"), db.recall("b"), db.recall("c")) == (None, "2", "3")
    db.clear()
    assert db.recall("b") is None
