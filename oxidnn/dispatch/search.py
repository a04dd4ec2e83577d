"""Search: which engine config is fastest for a problem, by running them. A candidate is held against a reference before it is timed.

Up to EXACT_FLOPS every candidate is compared with the float64 reference. Above, in excerpts; beyond them its result has to agree with
another engine's, the most general one's first, and where two results differ the reference says which is wrong.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .. import report
from ..device import DeviceInfo
from ..engines.base import Engine, EngineConfig
from ..errors import AssemblyError, EmulatorFault, InvalidArgument, LaunchError, NumericsError
from ..ops.base import Problem
from ..ops.case import format_case
from ..plan import Plan
from ..runtime.backend import Backend
from ..testing.compare import tolerance_for
from ..testing.data import random_inputs, random_scalars, to_storage
from ..testing.excerpt import Excerpt, excerpt_at, excerpts, has_excerpts
from ..testing.harness import compare, exact
from ..testing.reference import REFERENCES, Expected
from ..testing.sample import FILLS
from ..testing.stage import Stage
from .select import build_plan, candidates_for, unsupported
from .tuning_db import Measurement, TuningDb

EXACT_FLOPS = 2e8  # a float64 reference of this size takes NumPy about a second
EXCERPT_FLOPS = 1e8
ESTIMATE_FACTOR = 4.0  # candidates estimated above this many times the best are not tried
FIRST_REPEATS, MAX_REPEATS, MIN_REPEATS, TIMING_BUDGET_US = 3, 30, 5, 3e5
CONTENDER_FACTOR = 1.5  # after the first round only candidates this close to the best are timed on

# What a candidate may do wrong. Everything else is an error of ours and propagates.
DEVICE_FAILURES = (LaunchError, AssemblyError, NumericsError, EmulatorFault)

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine config worth trying, with its estimate in microseconds."""

    engine: Engine
    config: EngineConfig
    estimate_us: float

    @property
    def name(self) -> str:
        return f"{self.engine.id} {self.config.name}"

    def result(self, us: float | None, reason: str = "", is_fatal: bool = False) -> Measurement:
        return Measurement(self.engine.id, self.config.name, us, reason, is_fatal)


def stage_inputs(problem: Problem, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """random_inputs, made faster for tensors of many million elements: a random block whose length is prime, repeated."""
    block_size = 1048573
    if sum(o.desc.numel for o in problem.inputs) <= 4 * block_size:
        return random_inputs(problem, rng)
    if any((problem.op, o.name) in FILLS or not o.desc.dtype.is_float for o in problem.inputs):
        return random_inputs(problem, rng)
    inputs = {}
    for operand in problem.inputs:
        block = to_storage(rng.standard_normal(min(block_size, operand.desc.numel)), operand.desc.dtype)
        repeats = -(-operand.desc.numel // max(1, len(block)))
        inputs[operand.name] = np.tile(block, repeats)[: operand.desc.numel].reshape(operand.desc.shape)
    return inputs


@dataclass(frozen=True, slots=True)
class _Witness:
    """A result of a large problem that passed its excerpts; results of other engines have to agree with it."""

    engine: Engine
    name: str
    output: np.ndarray
    backers: list[str]  # who agreed with it, itself included


class Judge:
    """Decides whether outputs are right.

    Small problems: by the reference. Large ones: by the reference in excerpts, and everywhere by agreement with another engine's result;
    where two results differ, the reference decides which of them is wrong. No engine is a witness for itself, so two are kept.
    rejected: name of a contender that passed at first -> why it turned out to be wrong.
    """

    def __init__(self, problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float], rng: np.random.Generator) -> None:
        self.problem = problem
        self.is_exact = problem.flops <= EXACT_FLOPS or not has_excerpts(problem)
        self.rejected: dict[str, str] = {}
        self._inputs = inputs
        self._scalars = scalars
        self._witnesses: list[_Witness] = []
        if self.is_exact:
            self._want = REFERENCES[problem.op](problem, exact(problem, inputs), self._scalars)
        else:
            self._parts = [self._part(excerpt) for excerpt in excerpts(problem, rng, EXCERPT_FLOPS)]

    def _part(self, excerpt: Excerpt) -> tuple[Excerpt, dict[str, Expected]]:
        small = excerpt.problem
        return excerpt, REFERENCES[small.op](small, exact(small, excerpt.of(self._inputs)), self._scalars)

    def check(self, contender: Contender, outputs: Mapping[str, np.ndarray]) -> None:
        """Raises NumericsError if the outputs are wrong. May add to `rejected`."""
        if self.is_exact:
            compare(self.problem, outputs, self._want, contender.name, is_coarse=contender.engine.sums_coarsely)
            return
        name = self.problem.outputs[0].name  # convolution and GEMM have one output
        output = outputs[name]
        for part in self._parts:
            self._check_part(part, output, contender.name, contender.engine)
        if not np.isfinite(output).all():
            raise NumericsError(f"{contender.name}: {name} is not finite everywhere: parts were not written, or the sums overflow.")
        for witness in [w for w in self._witnesses if w.engine.id != contender.engine.id]:
            place = self._disagreement(output, witness.output)
            if place is not None:
                part = self._part(excerpt_at(self.problem, place, EXCERPT_FLOPS))
                self._check_part(part, output, contender.name, contender.engine)
                try:
                    self._check_part(part, witness.output, witness.name, witness.engine)
                except NumericsError as error:  # the witness is wrong, and so is who agreed with it
                    self._witnesses.remove(witness)
                    self.rejected.update(dict.fromkeys(witness.backers, f"NumericsError: {error}"))
                    continue
            witness.backers.append(contender.name)
            break
        if len(self._witnesses) < 2 and all(w.engine.id != contender.engine.id for w in self._witnesses):
            self._witnesses.append(_Witness(contender.engine, contender.name, output, [contender.name]))

    def _check_part(self, part: tuple[Excerpt, dict[str, Expected]], output: np.ndarray, name: str, engine: Engine) -> None:
        excerpt, want = part
        compare(excerpt.problem, excerpt.of({self.problem.outputs[0].name: output}), want, f"{name}, excerpt",
                is_coarse=engine.sums_coarsely)

    def _disagreement(self, output: np.ndarray, other: np.ndarray) -> tuple[int, ...] | None:
        """A place where the results differ by more than two errors allowed at the excerpts' largest magnitude; None if there is none."""
        operand = self.problem.outputs[0]
        expected = [want[operand.name] for _, want in self._parts]
        first = expected[0]
        law = tolerance_for(operand.desc.dtype, accumulate=first.accumulate, terms=first.terms, approximate=first.approximate)
        magnitude = max(float(np.max(np.abs(e.want if e.magnitude is None else e.magnitude), initial=0.0)) for e in expected)
        slacks = [e.slack if e.coarse_slack is None else e.coarse_slack for e in expected]
        slack = max(0.0 if s is None else float(np.max(s, initial=0.0)) for s in slacks)
        fixed = 2 * (law.absolute + law.accumulated * 2 * magnitude + 2 * slack)
        flat, against, step = output.reshape(-1), other.reshape(-1), 1 << 22
        for start in range(0, flat.size, step):  # in pieces: a float64 copy of the whole may not fit
            a, b = flat[start:start + step].astype(np.float64), against[start:start + step].astype(np.float64)
            excess = np.abs(a - b) - 2 * law.relative * np.abs(b)
            worst = int(np.argmax(excess))
            if excess[worst] > fixed:
                return tuple(int(i) for i in np.unravel_index(start + worst, output.shape))
        return None


def contenders(problem: Problem, info: DeviceInfo, configs_per_engine: int = 8) -> list[Contender]:
    """The engine configs worth trying, cheapest estimate first: within ESTIMATE_FACTOR of the best, but of two engines if two support it.

    Raises Unsupported if no engine does.
    """
    answers = candidates_for(problem, info)
    supported = sorted((c for c in answers if c.support), key=lambda c: c.estimate_us)
    if not supported:
        raise unsupported(problem, answers)
    limit = ESTIMATE_FACTOR * supported[0].estimate_us
    kept = []
    for rank, answer in enumerate(supported):
        for index, (config, estimate) in enumerate(answer.configs[:configs_per_engine]):
            if estimate <= limit or (rank < 2 and index == 0):
                kept.append(Contender(answer.engine, config, estimate))
    return sorted(kept, key=lambda c: c.estimate_us)


def _most_general(problem: Problem, info: DeviceInfo) -> Contender:
    """The last engine of the registry's order that takes the problem."""
    answer = [c for c in candidates_for(problem, info) if c.support][-1]
    return Contender(answer.engine, *answer.configs[0])


def tune_problem(problem: Problem, backend: Backend, db: TuningDb | None, *, progress: Progress | None = None, configs_per_engine: int = 8,
                 seed: int = 0) -> list[Measurement]:
    """Measures the candidates of `problem` and records them in `db`; fastest first, failures last with their reasons.

    progress(done, total, what) is called as candidates are tried. Raises Unsupported if no engine takes the problem, and LaunchError if a
    candidate leaves the device unusable: that candidate is recorded as such and not tried again. An empty problem has no candidates.
    """
    if problem.is_empty:
        return []
    info = backend.info
    if backend.is_capturing(backend.default_stream()):
        raise InvalidArgument("tune: the stream is capturing a graph (expected a stream that is not: measuring synchronises).")
    fatal = db.fatal(problem, info) if db is not None else set()
    tried = [c for c in contenders(problem, info, configs_per_engine) if (c.engine.id, c.config.name) not in fatal]
    rng = np.random.default_rng(seed)
    inputs = stage_inputs(problem, rng)
    results: list[Measurement] = []
    survivors: list[tuple[Contender, Plan]] = []
    scalars = random_scalars(problem, rng)
    with Stage(backend, problem, inputs, scalars) as stage:
        judge = Judge(problem, inputs, scalars, rng)

        def fail(contender: Contender, error: Exception) -> None:
            is_fatal = not stage.is_alive()
            results.append(contender.result(None, f"{type(error).__name__}: {error}", is_fatal))
            report.line("tune", contender.engine.id, contender.config.name, f"failed:{error}".replace("\n", " "), format_case(problem))
            if is_fatal:
                if db is not None:
                    db.record(problem, info, results, replace=False)
                raise LaunchError(f"tuning stopped: {contender.name} left the device unusable, start the program again (the candidate will "
                                  f"not be tried again). {format_case(problem)}\n{error}") from error

        def passes(contender: Contender) -> Plan | None:
            """Its plan if it runs and its outputs are right."""
            try:
                plan = build_plan(problem, contender.engine, contender.config, backend)
                judge.check(contender, stage.run(plan))
            except DEVICE_FAILURES as error:
                fail(contender, error)
                return None
            return plan

        if not judge.is_exact:  # the most general engine's result first, as a witness; as a candidate it comes last and has to agree too
            general = _most_general(problem, info)
            tried.sort(key=lambda c: c.engine.id == general.engine.id)
            if (general.engine.id, general.config.name) not in fatal and passes(general) is None:
                tried = [c for c in tried if c.name != general.name]
        for done, contender in enumerate(tried):
            if progress is not None:
                progress(done, len(tried) + 1, contender.name)
            plan = passes(contender)
            if plan is not None:
                survivors.append((contender, plan))
        results += [c.result(None, judge.rejected[c.name]) for c, _ in survivors if c.name in judge.rejected]
        survivors = [(c, plan) for c, plan in survivors if c.name not in judge.rejected]
        if progress is not None:
            progress(len(tried), len(tried) + 1, "timing")
        results += _time(stage, survivors, fail)
    results.sort(key=lambda m: (m.us is None, m.us or 0.0, m.engine, m.config))  # equal times: in the database's order
    for m in results:
        if m.us is not None:
            report.line("tune", m.engine, m.config, f"{m.us:.2f}us", format_case(problem))
    if db is not None:
        db.record(problem, info, results)
    if progress is not None:
        progress(len(tried) + 1, len(tried) + 1, "done")
    return results


def _time(stage: Stage, survivors: list[tuple[Contender, Plan]], fail: Callable[[Contender, Exception], None]) -> list[Measurement]:
    """A short round over all survivors, then a long one over those near the best; medians."""
    medians: dict[int, float] = {}

    def measure(indices: list[int], repeats: int) -> None:
        try:
            rounds = stage.time([survivors[i][1] for i in indices], repeats)
        except DEVICE_FAILURES as error:
            if len(indices) == 1:
                fail(survivors[indices[0]][0], error)
                medians.pop(indices[0], None)
                return
            for index in indices:  # one of them fails: find out which
                measure([index], repeats)
            return
        medians.update((i, statistics.median(times)) for i, times in zip(indices, rounds, strict=True))

    if survivors:
        measure(list(range(len(survivors))), FIRST_REPEATS)
    if medians:
        best = min(medians.values())
        near = [i for i, us in medians.items() if us <= CONTENDER_FACTOR * best]
        repeats = int(min(MAX_REPEATS, max(MIN_REPEATS, TIMING_BUDGET_US / max(1e-3, sum(medians[i] for i in near)))))
        measure(near, repeats)
    return [survivors[i][0].result(us) for i, us in medians.items()]
