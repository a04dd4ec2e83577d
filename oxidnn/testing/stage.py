"""Stage: a problem's device memory, poisoned, on which its plans are run and timed. What the harness, the search and the bench stand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from ..errors import LaunchError, NumericsError
from ..ops.base import Problem
from ..ops.case import format_case
from ..plan import Plan
from ..runtime.backend import Allocation, Backend
from .data import Buffer


class Stage:
    """Device memory of one problem with its inputs uploaded. Use as a context manager.

    Outputs, the gaps of strided tensors and the workspace are poisoned before every run.
    scalars: the numbers given with each call, by name. shared: output -> the input of the same description in whose memory it lies.
    """

    def __init__(self, backend: Backend, problem: Problem, inputs: Mapping[str, np.ndarray],
                 scalars: Mapping[str, float] | None = None, shared: Mapping[str, str] | None = None) -> None:
        self.backend = backend
        self.problem = problem
        self.stream = backend.default_stream()
        self._scalars = tuple((scalars or {})[s.name] for s in problem.scalars)
        self._shared = dict(shared or {})
        self.buffers = {o.name: Buffer(o.desc, None if o.is_output else inputs[o.name]) for o in problem.operands
                        if o.name not in self._shared}
        self._blocks: dict[str, Allocation] = {}
        self._workspace: Allocation | None = None
        try:
            for name, buffer in self.buffers.items():
                self._blocks[name] = backend.allocate(len(buffer.bytes), self.stream)
            for operand in problem.inputs:
                self._upload(operand.name)
        except BaseException:
            self.close()
            raise
        places = [self._shared.get(o.name, o.name) for o in problem.operands]
        self._pointers = [self._blocks[place].ptr + self.buffers[place].base for place in places]

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the memory; after a fault that killed the context there is nothing left to free."""
        for block in (*self._blocks.values(), *([self._workspace] if self._workspace else [])):
            with suppress(LaunchError):
                block.free()
        self._blocks, self._workspace = {}, None

    def _upload(self, name: str) -> None:
        ptr, host = self._blocks[name].ptr, self.buffers[name].bytes
        self.backend.upload(ptr, host, self.stream)
        for offset in (0, len(host) - Buffer.GUARD):  # never written, for a checker of what is read
            self.backend.poison(ptr + offset, Buffer.GUARD, self.stream)

    def _workspace_for(self, num_bytes: int) -> int:
        if num_bytes > (self._workspace.num_bytes if self._workspace is not None else 0):
            if self._workspace is not None:
                self._workspace.free()
                self._workspace = None
            self._workspace = self.backend.allocate(num_bytes, self.stream)
        return self._workspace.ptr if self._workspace is not None else 0

    def run(self, plan: Plan) -> dict[str, np.ndarray]:
        """The plan's outputs in storage types. Raises NumericsError if it wrote anything but the outputs' elements."""
        for operand in self.problem.outputs:
            if operand.name in self._shared:
                self._upload(self._shared[operand.name])
            else:
                self.backend.poison(self._blocks[operand.name].ptr, len(self.buffers[operand.name].bytes), self.stream)
        workspace = self._workspace_for(plan.workspace_bytes)
        if plan.workspace_bytes:
            self.backend.poison(workspace, plan.workspace_bytes, self.stream)
        plan.execute(self._pointers, workspace, self.stream, self._scalars)
        self.backend.synchronize(self.stream)
        outputs = {}
        for operand in self.problem.operands:
            if operand.name in self._shared.values():  # an output by now
                continue
            place = self._shared.get(operand.name, operand.name)
            buffer = self.buffers[place]
            raw = np.empty_like(buffer.bytes)
            self.backend.download(raw, self._blocks[place].ptr, self.stream)
            self.backend.synchronize(self.stream)
            if operand.is_output:
                outputs[operand.name] = buffer.read(raw)
            if not (buffer.untouched_outside(raw) if operand.is_output else np.array_equal(raw, buffer.bytes)):
                if not operand.is_output:  # the next plan must find its inputs as they were
                    self._upload(operand.name)
                raise NumericsError(f"{plan.engine.id} {plan.config.name}: bytes outside the elements of {operand.name} were written. "
                                    f"{format_case(self.problem)}")
        return outputs

    def time(self, plans: Sequence[Plan], repeats: int) -> list[list[float]]:
        """Microseconds of every plan, interleaved and L2-cold."""
        workspace = self._workspace_for(max((p.workspace_bytes for p in plans), default=0))

        def call_of(plan: Plan) -> Callable[[], None]:
            return lambda: plan.execute(self._pointers, workspace, self.stream, self._scalars)

        return self.backend.time_launches([call_of(p) for p in plans], self.stream, repeats, 2 * self.backend.info.l2_bytes)

    def is_alive(self) -> bool:
        """False if the device refuses all further work, as after an illegal access."""
        try:
            probe = self.backend.allocate(16, self.stream)
            self.backend.fill(probe.ptr, 0, 16, self.stream)
            self.backend.synchronize(self.stream)
            probe.free()
        except LaunchError:
            return False
        return True
