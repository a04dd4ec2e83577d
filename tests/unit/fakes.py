"""A toy op ("double": y = 2 x), engines for it that are right, wrong, lazy, slow or fatal, and a device that runs them in NumPy.

The device charges each kernel a fixed time on its own clock, so timings are exact and tests of them cannot flake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from oxidnn.codegen.spec import KernelSpec, Target
from oxidnn.device import DeviceInfo, emulated_device
from oxidnn.dispatch import registry
from oxidnn.dtypes import F32
from oxidnn.engines.base import SUPPORTED, Arg, Build, Engine, EngineConfig, Step, Support, TensorArg, WorkspaceArg, refuse
from oxidnn.errors import AssemblyError, EmulatorFault, InvalidArgument, LaunchError, PtxError
from oxidnn.ops import OPS
from oxidnn.ops.base import OpDef, Operand, Policy, Problem
from oxidnn.runtime.backend import POISON
from oxidnn.tensor import TensorDesc, TensorView
from oxidnn.testing.reference import REFERENCES, Expected

INFO = replace(emulated_device("sm_90a"), name="Fake GPU", num_sms=7, l2_bytes=1024)


def make_double(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> Problem:
    if "x" not in tensors:
        raise InvalidArgument("double: x is missing (expected a tensor).")
    if attrs:
        raise InvalidArgument(f"double: {next(iter(attrs))!r} is no attribute (known: none).")
    x = tensors["x"]
    y = tensors.get("y", TensorDesc.packed(x.dtype, x.shape))
    return Problem("double", (Operand("x", x), Operand("y", y, True)), policy=policy)


def double(n: int = 64, policy: Policy | None = None) -> Problem:
    return make_double({"x": TensorDesc.packed(F32, (n,))}, {}, policy or Policy())


def doubled(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    return {"y": Expected(2.0 * inputs["x"])}


@dataclass(frozen=True)
class Consts:
    n: int


class FakeEngine(Engine):
    """One step running the body `body` at `us` microseconds. estimates: one config each."""

    def __init__(self, name: str, body: str, us: float = 1.0, estimates: Sequence[float] = (1.0,), workspace: int = 0, reason: str = "",
                 deterministic: bool = True) -> None:
        self.id = name  # type: ignore[misc]
        self.is_deterministic = deterministic  # type: ignore[misc]
        self.body, self.us, self.estimates, self.workspace, self.reason = body, us, tuple(estimates), workspace, reason

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        return refuse(self.reason) if self.reason else SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        return tuple(EngineConfig.of(variant=i) for i in sorted(range(len(self.estimates)), key=self.estimates.__getitem__))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return self.estimates[config["variant"]]

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        n = problem.desc("y").numel
        args = [Arg("x", "u64", TensorArg("x")), Arg("y", "u64", TensorArg("y")),
                Arg("workspace", "u64", WorkspaceArg() if self.workspace else 0), Arg("n", "u32", n)]
        template = f"{self.body}/{self.us * (1 + config['variant'])}"
        step = Step.of(template, problem.op, Target("sm_80"), 32, args, Consts(n), grid=1)
        return Build((step,), self.workspace)


Body = Callable[["FakeBackend", list], None]


def _body(factor: float, count: Callable[[int], int] = lambda n: n, extra: int = 0) -> Body:
    def run(backend: FakeBackend, args: list) -> None:
        x, y, _, n = args
        values = backend.view(x, 4 * n).view(np.float32)[: count(n)] * np.float32(factor)
        backend.view(y, 4 * (len(values) + extra)).view(np.float32)[: len(values)] = values
        if extra:
            backend.view(y, 4 * (len(values) + extra)).view(np.float32)[len(values):] = 0.0

    return run


def _clobber(backend: FakeBackend, args: list) -> None:
    _body(2.0)(backend, args)
    backend.view(args[0], 4)[:] = 0


def _raising(error: Exception) -> Body:
    def run(backend: FakeBackend, args: list) -> None:
        raise error

    return run


def _die(backend: FakeBackend, args: list) -> None:
    backend.is_dead = True


BODIES: dict[str, Body] = {
    "right": _body(2.0), "wrong": _body(2.5), "lazy": lambda backend, args: None, "short": _body(2.0, lambda n: n - 1),
    "overrun": _body(2.0, extra=3), "clobber": _clobber, "die": _die,
    "refuse": _raising(LaunchError("the device refused the launch")), "spill": _raising(AssemblyError("too many registers")),
    "race": _raising(EmulatorFault("a race")), "bug": _raising(TypeError("a mistake in the library")),
    "malformed": _raising(PtxError("line 3: no such instruction")), "argument": _raising(InvalidArgument("x is off")),
}


class FakeLaunch:
    def __init__(self, backend: FakeBackend, spec: KernelSpec, args: Sequence[int | float]) -> None:
        self.backend, self.args = backend, list(args)
        body, us = spec.template.split("/")
        self.body, self.us = BODIES[body], float(us)

    def set(self, index: int, value: int | float) -> None:
        self.args[index] = value

    def setter(self, index: int) -> Callable[[int | float], None]:
        return partial(self.set, index)

    def launch(self, stream: int) -> None:
        self.backend.touch()
        self.backend.num_launches += 1
        self.backend.clock += self.us
        self.body(self.backend, self.args)


class FakeKernel:
    origin = "assembled"

    def __init__(self, backend: FakeBackend, spec: KernelSpec) -> None:
        self.backend, self.spec = backend, spec

    def bind(self, grid: tuple[int, int, int], args: Sequence[int | float]) -> FakeLaunch:
        return FakeLaunch(self.backend, self.spec, args)


@dataclass
class FakeAllocation:
    backend: FakeBackend
    ptr: int
    num_bytes: int

    def free(self) -> None:
        self.backend.touch()
        del self.backend.blocks[self.ptr]


@dataclass
class FakeBackend:
    info: DeviceInfo = INFO
    device: str = "cuda:0"
    blocks: dict[int, np.ndarray] = field(default_factory=dict)
    clock: float = 0.0
    num_launches: int = 0
    is_dead: bool = False
    next_ptr: int = 1 << 20
    flushed: list[int] = field(default_factory=list)
    capturing: bool = False

    def touch(self) -> None:
        if self.is_dead:
            raise LaunchError("CUDA_ERROR_ILLEGAL_ADDRESS: the context is dead")

    def view(self, ptr: int, num_bytes: int) -> np.ndarray:
        for base, block in self.blocks.items():
            if base <= ptr and ptr + num_bytes <= base + len(block):
                return block[ptr - base: ptr - base + num_bytes]
        raise AssertionError(f"{ptr:#x} is not allocated")

    def allocate(self, num_bytes: int, stream: int) -> FakeAllocation:
        self.touch()
        ptr, self.next_ptr = self.next_ptr, self.next_ptr + num_bytes + 256 - num_bytes % 256
        self.blocks[ptr] = np.zeros(num_bytes, np.uint8)
        return FakeAllocation(self, ptr, num_bytes)

    def upload(self, ptr: int, host: np.ndarray, stream: int) -> None:
        self.touch()
        self.view(ptr, host.nbytes)[:] = host.reshape(-1).view(np.uint8)

    def download(self, host: np.ndarray, ptr: int, stream: int) -> None:
        self.touch()
        host.reshape(-1).view(np.uint8)[:] = self.view(ptr, host.nbytes)

    def fill(self, ptr: int, byte: int, num_bytes: int, stream: int) -> None:
        self.touch()
        self.view(ptr, num_bytes)[:] = byte

    def poison(self, ptr: int, num_bytes: int, stream: int) -> None:
        self.fill(ptr, POISON, num_bytes, stream)

    def synchronize(self, stream: int) -> None:
        self.touch()

    def load(self, text: str, spec: KernelSpec) -> FakeKernel:
        return FakeKernel(self, spec)

    def default_stream(self) -> int:
        return 0

    def is_capturing(self, stream: int) -> bool:
        return self.capturing

    def capture_id(self, stream: int) -> int:
        return int(self.capturing)

    def bind_view(self, view: TensorView) -> None: ...
    def release_view(self, view: TensorView) -> None: ...

    def time_launches(self, run: Sequence[Callable[[], None]], stream: int, repeats: int, flush_bytes: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in run]
        self.flushed.append(flush_bytes)
        for _ in range(repeats):
            for index, call in enumerate(run):
                start = self.clock
                call()
                times[index].append(self.clock - start)
        return times


@pytest.fixture
def double_op(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Registers the op; the value is a function that sets its engines."""
    monkeypatch.setitem(OPS, "double", OpDef("double", ("x",), ("y",), make_double))
    monkeypatch.setitem(REFERENCES, "double", doubled)
    monkeypatch.setitem(registry.ENGINES, "double", ())

    def set_engines(*engines: FakeEngine) -> None:
        monkeypatch.setitem(registry.ENGINES, "double", engines)

    yield set_engines
