"""Plan: a problem with its engine chosen, kernels loaded and argument blocks packed. Executing it rewrites addresses and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

from . import report
from .codegen.render import Source
from .engines.base import Build, Engine, EngineConfig, ScalarArg, TensorArg, TensorMapArg, WorkspaceArg, constant_of
from .ops.base import Problem
from .ops.case import format_case
from .runtime.backend import Backend, BoundLaunch


class Plan:
    """What `execute` needs and nothing more; made by dispatch.select.build_plan.

    Concurrency: several threads may execute one plan; the argument blocks are rewritten and launched under a lock.
    """

    __slots__ = ("_lock", "_numbers", "_pointers", "_scratch", "_tensors", "build", "config", "engine", "launches", "origin", "problem",
                 "workspace_bytes")

    def __init__(self, problem: Problem, engine: Engine, config: EngineConfig, build: Build, backend: Backend) -> None:
        self.problem = problem
        self.engine = engine
        self.config = config
        self.build = build
        self.workspace_bytes = build.workspace_bytes
        self._lock = Lock()
        slots = {operand.name: i for i, operand in enumerate(problem.operands)}
        scalar_slots = {scalar.name: i for i, scalar in enumerate(problem.scalars)}
        launches: list[BoundLaunch] = []
        origins = []
        # What a call rewrites: (setter of the argument, slot, byte offset) of tensors, (setter, byte offset) of workspace, (setter, slot).
        tensors: list[tuple[Callable[[int], None], int, int]] = []
        scratch: list[tuple[Callable[[int], None], int]] = []
        numbers: list[tuple[Callable[[float], None], int]] = []
        for step in build.steps:
            kernel = backend.load(Source(step.spec), step.spec)
            origins.append(kernel.origin)
            launch = kernel.bind(step.grid, [constant_of(arg) for arg in step.args])
            launches.append(launch)
            for index, arg in enumerate(step.args):
                if isinstance(arg, (TensorArg, TensorMapArg)):
                    tensors.append((launch.setter(index), slots[arg.name], arg.byte_offset))
                elif isinstance(arg, WorkspaceArg):
                    scratch.append((launch.setter(index), arg.byte_offset))
                elif isinstance(arg, ScalarArg):
                    numbers.append((launch.setter(index), scalar_slots[arg.name]))
        self.launches = tuple(launches)
        self._pointers: Sequence[int] = ()
        self._tensors, self._scratch, self._numbers = tuple(tensors), tuple(scratch), tuple(numbers)
        self.origin = "+".join(sorted(set(origins))) or "none"

    @property
    def is_deterministic(self) -> bool:
        """True if the same inputs give the same bits, run to run."""
        return self.engine.is_deterministic

    def execute(self, pointers: Sequence[int], workspace: int, stream: int, scalars: Sequence[float] = ()) -> None:
        """Enqueues all steps on `stream`. pointers: addresses in the order of problem.operands, a list that is the plan's to keep;
        workspace: at least workspace_bytes; scalars: in the order of problem.scalars."""
        with self._lock:
            if pointers != self._pointers:  # a loop over the same buffers finds them set
                for set_pointer, slot, offset in self._tensors:
                    set_pointer(pointers[slot] + offset)
                self._pointers = pointers
            for set_pointer, offset in self._scratch:
                set_pointer(workspace + offset)
            for set_number, slot in self._numbers:
                set_number(scalars[slot])
            for launch in self.launches:
                launch.launch(stream)

    def describe(self) -> str:
        """Engine, config, where the machine code came from, and the case: the fields of the verbose line."""
        return f"{self.engine.id},{self.config.name},cubin:{self.origin},{format_case(self.problem)}"

    def say(self) -> None:
        report.line("plan", self.describe())
