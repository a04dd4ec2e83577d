"""Plan: a problem with its engine chosen, kernels loaded and argument blocks packed. Executing it rewrites addresses and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import report
from .codegen.render import Source
from .engines.base import (
    Build,
    Engine,
    EngineConfig,
    ScalarArg,
    TableArg,
    TensorArg,
    TensorMapArg,
    WorkspaceArg,
    WorkspaceMapArg,
    constant_of,
)
from .ops.base import Problem
from .ops.case import format_case
from .runtime.backend import Backend, BoundLaunch, Kernel


class _Arguments:
    """The launches of a plan with argument blocks of their own, and what a call rewrites in them: (setter of the argument, slot, byte
    offset) of tensors, (setter, byte offset) of workspace, (setter, slot) of scalars, and tables.

    A table's rows are (slot, offset): slot -1 is the workspace, -2 a plain number.
    """

    __slots__ = ("launches", "numbers", "pointers", "scratch", "tables", "tensors", "workspace")

    def __init__(self, problem: Problem, build: Build, kernels: Sequence[Kernel]) -> None:
        slots = {operand.name: i for i, operand in enumerate(problem.operands)}
        scalar_slots = {scalar.name: i for i, scalar in enumerate(problem.scalars)}
        launches: list[BoundLaunch] = []
        tensors: list[tuple[Callable[[int], None], int, int]] = []
        scratch: list[tuple[Callable[[int], None], int]] = []
        numbers: list[tuple[Callable[[float], None], int]] = []
        tables: list[tuple[Callable[[Sequence[int]], None], list[tuple[int, int]]]] = []
        for step, kernel in zip(build.steps, kernels, strict=True):
            launch = kernel.bind(step.grid, [constant_of(arg) for arg in step.args])
            launches.append(launch)
            for index, arg in enumerate(step.args):
                if isinstance(arg, (TensorArg, TensorMapArg)):
                    tensors.append((launch.setter(index), slots[arg.name], arg.byte_offset))
                elif isinstance(arg, (WorkspaceArg, WorkspaceMapArg)):
                    scratch.append((launch.setter(index), arg.byte_offset))
                elif isinstance(arg, ScalarArg):
                    numbers.append((launch.setter(index), scalar_slots[arg.name]))
                elif isinstance(arg, TableArg):
                    rows = [(-2, item) if isinstance(item, int) else (-1 if isinstance(item, WorkspaceArg) else slots[item.name],
                                                                      item.byte_offset) for item in arg.items]
                    if any(slot != -2 for slot, _ in rows):
                        tables.append((launch.setter(index), rows))
        self.launches, self.tensors, self.scratch, self.numbers = tuple(launches), tuple(tensors), tuple(scratch), tuple(numbers)
        self.tables = tuple(tables)
        self.pointers: Sequence[int] = ()
        self.workspace = -1

    def set_tables(self, pointers: Sequence[int], workspace: int) -> None:
        if self.tables and (pointers != self.pointers or workspace != self.workspace):
            places = [*pointers, 0, workspace]  # -2 and -1
            for set_table, rows in self.tables:
                set_table([places[slot] + offset for slot, offset in rows])
            self.workspace = workspace


class Plan:
    """What `execute` needs and nothing more; made by dispatch.select.build_plan.

    Concurrency: several threads may execute one plan. Each call takes argument blocks that nobody else holds, and makes new ones when
    there are none: cheaper than a lock, and a call that is interrupted leaves nothing locked.
    """

    __slots__ = ("_idle", "_kernels", "build", "config", "engine", "launches", "origin", "problem", "workspace_bytes")

    def __init__(self, problem: Problem, engine: Engine, config: EngineConfig, build: Build, backend: Backend) -> None:
        self.problem = problem
        self.engine = engine
        self.config = config
        self.build = build
        self.workspace_bytes = build.workspace_bytes
        self._kernels = tuple(backend.load(Source(step.spec), step.spec) for step in build.steps)
        self.origin = "+".join(sorted({kernel.origin for kernel in self._kernels})) or "none"
        arguments = _Arguments(problem, build, self._kernels)
        self.launches = arguments.launches
        self._idle = [arguments]

    @property
    def is_deterministic(self) -> bool:
        """True if the same inputs give the same bits, run to run."""
        return self.engine.is_deterministic

    def execute(self, pointers: Sequence[int], workspace: int, stream: int, scalars: Sequence[float] = ()) -> None:
        """Enqueues all steps on `stream`. pointers: addresses in the order of problem.operands, a list that is the plan's to keep;
        workspace: at least workspace_bytes; scalars: in the order of problem.scalars."""
        try:
            arguments = self._idle.pop()
        except IndexError:  # other threads are at it
            arguments = _Arguments(self.problem, self.build, self._kernels)
        if arguments.tables:
            arguments.set_tables(pointers, workspace)
        if pointers != arguments.pointers:  # a loop over the same buffers finds them set
            for set_pointer, slot, offset in arguments.tensors:
                set_pointer(pointers[slot] + offset)
            arguments.pointers = pointers
        for set_pointer, offset in arguments.scratch:
            set_pointer(workspace + offset)
        for set_number, slot in arguments.numbers:
            set_number(scalars[slot])
        for launch in arguments.launches:
            launch.launch(stream)
        self._idle.append(arguments)

    def describe(self) -> str:
        """Engine, config, where the machine code came from, and the case: the fields of the verbose line."""
        return f"{self.engine.id},{self.config.name},cubin:{self.origin},{format_case(self.problem)}"

    def say(self) -> None:
        report.line("plan", self.describe())
