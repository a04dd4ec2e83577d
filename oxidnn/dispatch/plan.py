"""Plan: a problem with its engine chosen, kernels loaded and argument blocks packed. Executing it rewrites addresses and launches."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from .. import report
from ..codegen.render import render
from ..engines.base import Build, Engine, EngineConfig, ScalarArg, TensorArg, WorkspaceArg
from ..ops.base import Problem
from ..ops.case import format_case
from ..runtime.backend import Backend, BoundLaunch


class Plan:
    """What `execute` needs and nothing more; made by dispatch.select.build_plan.

    Concurrency: several threads may execute one plan; the argument blocks are rewritten and launched under a lock.
    """

    __slots__ = ("_lock", "_patched", "build", "config", "engine", "launches", "origin", "problem", "workspace_bytes")

    def __init__(self, problem: Problem, engine: Engine, config: EngineConfig, build: Build, backend: Backend) -> None:
        self.problem = problem
        self.engine = engine
        self.config = config
        self.build = build
        self.workspace_bytes = build.workspace_bytes
        self._lock = Lock()
        slots = {operand.name: i for i, operand in enumerate(problem.operands)}
        scalar_slots = {name: i for i, name in enumerate(problem.scalars)}
        launches: list[BoundLaunch] = []
        # Per launch: (argument index, kind, slot or byte offset, byte offset); kinds 0 tensor, 1 workspace, 2 scalar.
        self._patched: list[tuple[BoundLaunch, tuple[tuple[int, int, int, int], ...]]] = []
        origins = []
        for step in build.steps:
            kernel = backend.load(render(step.spec), step.spec)
            origins.append(kernel.origin)
            constants: list[int | float] = []
            patches = []
            for index, arg in enumerate(step.args):
                if isinstance(arg, TensorArg):
                    patches.append((index, 0, slots[arg.name], arg.byte_offset))
                elif isinstance(arg, WorkspaceArg):
                    patches.append((index, 1, 0, arg.byte_offset))
                elif isinstance(arg, ScalarArg):
                    patches.append((index, 2, scalar_slots[arg.name], 0))
                constants.append(arg if isinstance(arg, (int, float)) else 0)
            launch = kernel.bind(step.grid, constants)
            launches.append(launch)
            self._patched.append((launch, tuple(patches)))
        self.launches = tuple(launches)
        self.origin = "+".join(sorted(set(origins))) or "none"

    @property
    def is_deterministic(self) -> bool:
        """True if the same inputs give the same bits, run to run."""
        return self.engine.is_deterministic

    def execute(self, pointers: Sequence[int], workspace: int, stream: int, scalars: Sequence[float] = ()) -> None:
        """Enqueues all steps on `stream`. pointers: addresses in the order of problem.operands; workspace: at least workspace_bytes."""
        with self._lock:
            for launch, patches in self._patched:
                for index, kind, slot, offset in patches:
                    if kind == 0:
                        launch.set(index, pointers[slot] + offset)
                    elif kind == 1:
                        launch.set(index, workspace + offset)
                    else:
                        launch.set(index, scalars[slot])
                launch.launch(stream)

    def describe(self) -> str:
        """Engine, config, where the machine code came from, and the case: the fields of the verbose line."""
        return f"{self.engine.id},{self.config.name},cubin:{self.origin},{format_case(self.problem)}"

    def say(self) -> None:
        report.line("plan", self.describe())
