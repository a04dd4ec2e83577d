"""run_problem: one problem through one engine on one backend, poisoned, compared with the reference. The tests' workhorse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..engines.base import Engine, EngineConfig
from ..errors import NumericsError
from ..ops.base import Problem
from ..ops.case import format_case
from ..plan import Plan
from ..runtime.backend import POISON, Backend
from .compare import Tolerance, check_close, tolerance_for
from .data import random_inputs, random_scalars, stored_scalars
from .reference import REFERENCES, Expected
from .stage import Stage


@dataclass(frozen=True, slots=True)
class Outcome:
    """outputs: as computed, in storage types. worst: error over tolerance, the largest of all outputs."""

    outputs: dict[str, np.ndarray]
    worst: float


def execute(backend: Backend, problem: Problem, engine: Engine, config: EngineConfig, inputs: Mapping[str, np.ndarray],
            scalars: Mapping[str, float] | None = None, shared: Mapping[str, str] | None = None) -> dict[str, np.ndarray]:
    """Runs the engine's steps on fresh device buffers: outputs, gaps between strides and workspace poisoned beforehand.

    shared: output -> the input in whose memory it lies. Raises NumericsError if a byte outside the outputs' elements was written.
    """
    with Stage(backend, problem, inputs, scalars, shared) as stage:
        return stage.run(Plan(problem, engine, config, engine.build_steps(problem, config, backend.info), backend))


def exact(problem: Problem, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs as references take them: floats as float64."""
    return {n: a.astype(np.float64) if problem.desc(n).dtype.is_float else a for n, a in inputs.items()}


def compare(problem: Problem, got: Mapping[str, np.ndarray], want: Mapping[str, Expected], context: str = "",
            held: Mapping[str, np.ndarray] | None = None, is_coarse: bool = False) -> float:
    """check_close over all outputs under the tolerance law; the error over tolerance of the worst.

    held: what the memory of outputs held beforehand, where that was not poison. is_coarse: the engine's sums_coarsely.
    """
    worst = 0.0
    for operand in problem.outputs:
        expected, result = want[operand.name], got[operand.name]
        name = f"{context} {format_case(problem)}: {operand.name}"
        law = tolerance_for(operand.desc.dtype, accumulate=expected.accumulate, terms=expected.terms, approximate=expected.approximate)
        reference = expected.want
        if not operand.desc.dtype.is_float and expected.slack is None:
            reference = np.asarray(reference).astype(operand.desc.dtype.numpy)
        elif not operand.desc.dtype.is_float:  # an integer that a number not known exactly is rounded to
            result, law = result.astype(np.float64), Tolerance(0.0, 0.5, why=f"rounded to {operand.desc.dtype}")
        if expected.written is not None:
            _check_unwritten(got[operand.name], expected.written, (held or {}).get(operand.name), name)
            reference = np.where(expected.written, reference, result.astype(reference.dtype))
        slack = expected.coarse_slack if is_coarse and expected.coarse_slack is not None else expected.slack
        worst = max(worst, check_close(result, reference, law, magnitude=expected.magnitude, slack=slack, name=name))
    return worst


def _check_unwritten(got: np.ndarray, written: np.ndarray, held: np.ndarray | None, name: str) -> None:
    """Raises NumericsError unless the elements that are not to be written have the bits of `held`, or those of poison."""
    found = np.frombuffer(got.tobytes(), np.uint8).reshape(*got.shape, -1)
    before = np.uint8(POISON) if held is None else np.frombuffer(held.tobytes(), np.uint8).reshape(found.shape)
    wrong = (found != before).any(-1) & ~written
    if wrong.any():
        at = [int(i) for i in np.argwhere(wrong)[0]]
        raise NumericsError(f"{name}{at} was written, and should have been left alone ({int(wrong.sum())} of {got.size} elements).")


def run_problem(backend: Backend, problem: Problem, engine: Engine, config: EngineConfig | None = None, seed: int = 0,
                scalars: Mapping[str, float] | None = None, aliases: bool = False) -> Outcome:
    """One fresh random run of `problem` by `engine` against the float64 reference. Raises NumericsError where they differ.

    aliases: then one more for each of problem.aliases whose descriptions agree, with the output in the input's memory.
    """
    config = config or engine.configs(problem, backend.info)[0]
    rng = np.random.default_rng(seed)
    inputs = random_inputs(problem, rng)
    scalars = random_scalars(problem, rng) if scalars is None else stored_scalars(problem, scalars)
    want = REFERENCES[problem.op](problem, exact(problem, inputs), scalars)
    outputs = execute(backend, problem, engine, config, inputs, scalars)
    worst = compare(problem, outputs, want, f"{engine.id} {config.name}", is_coarse=engine.sums_coarsely)
    for output, name in problem.aliases if aliases else ():
        if problem.desc(output) == problem.desc(name):
            got = execute(backend, problem, engine, config, inputs, scalars, {output: name})
            context = f"{engine.id} {config.name}, {output} in place of {name}"
            worst = max(worst, compare(problem, got, want, context, {output: inputs[name]}, engine.sums_coarsely))
    return Outcome(outputs, worst)
