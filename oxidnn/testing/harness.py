"""run_problem: one problem through one engine on one backend, poisoned, compared with the reference. The tests' workhorse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..codegen.render import render
from ..engines.base import Engine, EngineConfig, ScalarArg, TensorArg, TensorMapArg, WorkspaceArg, constant_of
from ..errors import NumericsError
from ..ops.base import Problem
from ..ops.case import format_case
from ..runtime.backend import Backend
from .compare import check_close, tolerance_for
from .data import POISON, Buffer, random_inputs
from .reference import REFERENCES, Expected


@dataclass(frozen=True, slots=True)
class Outcome:
    """outputs: as computed, in storage types. worst: error over tolerance, the largest of all outputs."""

    outputs: dict[str, np.ndarray]
    worst: float


def execute(backend: Backend, problem: Problem, engine: Engine, config: EngineConfig, inputs: Mapping[str, np.ndarray],
            scalars: Mapping[str, float] | None = None) -> dict[str, np.ndarray]:
    """Runs the engine's steps on fresh device buffers: outputs, gaps between strides and workspace poisoned beforehand.

    Raises NumericsError if a byte outside the outputs' elements was written.
    """
    build = engine.build_steps(problem, config, backend.info)
    stream = backend.default_stream()
    buffers = {o.name: Buffer(o.desc, None if o.is_output else inputs[o.name]) for o in problem.operands}
    blocks = {name: backend.allocate(len(b.bytes), stream) for name, b in buffers.items()}
    scratch = backend.allocate(build.workspace_bytes, stream) if build.workspace_bytes else None
    try:
        for name, buffer in buffers.items():
            backend.upload(blocks[name].ptr, buffer.bytes, stream)
        if scratch is not None:
            backend.fill(scratch.ptr, POISON, build.workspace_bytes, stream)
        for step in build.steps:
            launch = backend.load(render(step.spec), step.spec).bind(step.grid, [constant_of(arg) for arg in step.args])
            for index, arg in enumerate(step.args):
                if isinstance(arg, (TensorArg, TensorMapArg)):
                    launch.set(index, blocks[arg.name].ptr + buffers[arg.name].base + arg.byte_offset)
                elif isinstance(arg, WorkspaceArg):
                    assert scratch is not None
                    launch.set(index, scratch.ptr + arg.byte_offset)
                elif isinstance(arg, ScalarArg):
                    launch.set(index, (scalars or {})[arg.name])
            launch.launch(stream)
        backend.synchronize(stream)
        outputs = {}
        for operand in problem.operands:
            buffer = buffers[operand.name]
            raw = np.empty_like(buffer.bytes)
            backend.download(raw, blocks[operand.name].ptr, stream)
            backend.synchronize(stream)
            if operand.is_output:
                outputs[operand.name] = buffer.read(raw)
            if not (buffer.untouched_outside(raw) if operand.is_output else (raw == buffer.bytes).all()):
                raise NumericsError(f"{engine.id} {config.name}: bytes outside {operand.name}'s elements were written. "
                                    f"{format_case(problem)}")
        return outputs
    finally:
        for block in blocks.values():
            block.free()
        if scratch is not None:
            scratch.free()


def compare(problem: Problem, got: Mapping[str, np.ndarray], want: Mapping[str, Expected], context: str = "") -> float:
    """check_close over all outputs under the tolerance law; the error over tolerance of the worst."""
    worst = 0.0
    for operand in problem.outputs:
        expected = want[operand.name]
        law = tolerance_for(operand.desc.dtype, accumulate=expected.accumulate, terms=expected.terms, approximate=expected.approximate)
        reference = expected.want
        if not operand.desc.dtype.is_float:
            reference = np.asarray(reference).astype(operand.desc.dtype.numpy)
        worst = max(worst, check_close(got[operand.name], reference, law, magnitude=expected.magnitude,
                                       name=f"{context} {format_case(problem)}: {operand.name}"))
    return worst


def run_problem(backend: Backend, problem: Problem, engine: Engine, config: EngineConfig | None = None, seed: int = 0,
                scalars: Mapping[str, float] | None = None) -> Outcome:
    """One fresh random run of `problem` by `engine` against the float64 reference. Raises NumericsError where they differ."""
    config = config or engine.configs(problem, backend.info)[0]
    inputs = random_inputs(problem, np.random.default_rng(seed))
    if scalars is None:
        scalars = {name: 0.5 + 0.25 * i for i, name in enumerate(problem.scalars)}
    outputs = execute(backend, problem, engine, config, inputs, scalars)
    exact = {n: a.astype(np.float64) if problem.desc(n).dtype.is_float else a for n, a in inputs.items()}
    want = REFERENCES[problem.op](problem, exact, scalars)
    return Outcome(outputs, compare(problem, outputs, want, f"{engine.id} {config.name}"))
