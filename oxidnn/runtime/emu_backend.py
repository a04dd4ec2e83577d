"""The emulated device: the same text and the same arguments, run on the CPU by oxidnn.emu. Chosen only by explicit request."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import emu, report, switches
from ..codegen.origin import origin_of
from ..codegen.render import Source
from ..codegen.spec import KernelSpec, TensorMapSpec
from ..device import emulated_device
from ..emu.checkers import NAMES, expand
from ..emu.memory import GlobalMemory, host_view
from ..emu.tensor_map import TensorMap
from ..errors import InvalidArgument, LaunchError
from ..ptx.parser import parse
from ..tensor import TensorView
from .assembler import dump
from .backend import POISON
from .kernel import Value, check_launch, check_shared_memory, check_value, pack

_INSTRUCTIONS_KEPT = 1 << 17  # of 2 KB each
_programs: OrderedDict[str, Any] = OrderedDict()  # by text, for all devices: a Program knows no memory


def _program(text: str) -> tuple[Any, bool]:
    program = _programs.get(text)
    if program is not None:
        _programs.move_to_end(text)
        return program, True
    program = emu.load(parse(text))
    _programs[text] = program
    kept = sum(len(p.ops) for p in _programs.values())
    while kept > _INSTRUCTIONS_KEPT and len(_programs) > 1:
        kept -= len(_programs.popitem(last=False)[1].ops)
    return program, False


def _checkers_of_switch() -> str | tuple[str, ...]:
    """"basic", and what OXIDNN_CHECK names beyond."""
    chosen = {c.strip() for c in switches.get("OXIDNN_CHECK").split(",")}
    return "all" if "all" in chosen else tuple(sorted(set(expand("basic")) | (chosen & set(NAMES))))


@dataclass(slots=True, eq=False)
class EmulatedAllocation:
    """Memory of the emulated device between red zones; counts as never written until a kernel or an upload writes it."""

    backend: EmulatedBackend
    ptr: int
    num_bytes: int

    def share(self) -> None:
        pass

    def move_to_stream(self, stream: int) -> None:
        pass

    def free(self) -> None:
        """Frees it (once; later calls do nothing). Later accesses by a kernel are reported as use after free."""
        if self.ptr:
            self.backend.memory.free(self.ptr)
            self.ptr = 0


class EmulatedLaunch:
    """A launch with its arguments; `launch` runs the kernel to its end."""

    def __init__(self, kernel: EmulatedKernel, grid: tuple[int, int, int], args: Sequence[Value]) -> None:
        check_launch(kernel.spec, grid, args)
        self.kernel = kernel
        self.grid = grid
        self.args: list[Any] = list(args)
        self.maps = {i: value for i, value in enumerate(args) if isinstance(value, TensorMapSpec)}

    def set(self, index: int, value: int | float) -> None:
        check_value(self.kernel.spec, index, value)
        spec = self.maps.get(index)
        self.args[index] = value if spec is None else encoded(spec, int(value))

    def setter(self, index: int) -> Callable[[Any], None]:
        return partial(self.set, index)

    def launch(self, stream: int) -> None:
        """Runs it. Raises EmulatorFault when a checker fires; what it wrote up to then stays written."""
        spec, backend = self.kernel.spec, self.kernel.backend
        for index, value in enumerate(self.args):
            if isinstance(value, TensorMapSpec):
                raise LaunchError(f"{spec.symbol}: tensor map {spec.params[index].name} was never set to an address.")
        args = [pack(p, v) if p.length else v for p, v in zip(spec.params, self.args, strict=True)]
        backend.counters = self.kernel.program.launch(
            backend.memory, grid=self.grid, threads=(spec.threads, 1, 1), args=args, dynamic_smem=spec.dynamic_smem,
            cluster=(spec.cluster, 1, 1), checkers=backend.checkers, schedule=backend.schedule,
            tensor_core=backend.tensor_core, follows=spec.follows)


def encoded(spec: TensorMapSpec, address: int) -> bytes:
    """The 128 bytes of a tensor map, laid out as the sm_90 driver does."""
    return TensorMap(
        spec.dtype, address, spec.dims, spec.strides, spec.box, spec.element_strides or (1,) * len(spec.dims), spec.swizzle, spec.corners,
        spec.l2_promotion, spec.fills_nan).encode()


class EmulatedKernel:
    def __init__(self, backend: EmulatedBackend, program: Any, spec: KernelSpec, origin: str) -> None:
        self.backend = backend
        self.program = program
        self.spec = spec
        self.origin = origin

    def bind(self, grid: tuple[int, int, int], args: Sequence[Value]) -> EmulatedLaunch:
        return EmulatedLaunch(self, grid, args)


class EmulatedBackend:
    """A device of `arch` run on the CPU. Streams mean nothing: every call returns when its work is done.

    checkers: "basic" (bounds, alignment, uninitialised data, barriers, asynchronous instructions), "all" (also races), or names; None:
    basic and what OXIDNN_CHECK names beyond. schedule: "lowest_pc", or ("random", seed), which interleaves warps at random. tensor_core:
    "fast", or "exact": mma and wgmma give the bits of an H100, several times slower.
    """

    device = "emu"

    def __init__(self, arch: str = "sm_90a", checkers: Any = None, schedule: Any = "lowest_pc", tensor_core: str = "fast") -> None:
        self.info = emulated_device(arch)
        self.memory = GlobalMemory()
        self.checkers = _checkers_of_switch() if checkers is None else checkers
        self.schedule = schedule
        self.tensor_core = tensor_core
        self.counters: Any = None  # of the last launch

    def allocate(self, num_bytes: int, stream: int) -> EmulatedAllocation:
        return EmulatedAllocation(self, self.memory.alloc(num_bytes), num_bytes)

    def upload(self, ptr: int, host: np.ndarray, stream: int) -> None:
        """Copies the bytes of the contiguous array `host` to the device address `ptr`."""
        if host.nbytes:
            self.memory.view(ptr, host.nbytes)[:] = _bytes(host, "upload")
            self.memory.mark_initialised(ptr, host.nbytes)

    def download(self, host: np.ndarray, ptr: int, stream: int) -> None:
        """Copies device bytes from `ptr` into the contiguous array `host`."""
        if host.nbytes:
            _bytes(host, "download")[:] = self.memory.view(ptr, host.nbytes)

    def fill(self, ptr: int, byte: int, num_bytes: int, stream: int) -> None:
        if num_bytes:
            self.memory.view(ptr, num_bytes)[:] = byte
            self.memory.mark_initialised(ptr, num_bytes)

    def poison(self, ptr: int, num_bytes: int, stream: int) -> None:
        """Fills with POISON; the bytes count as never written, as those of a fresh allocation."""
        if num_bytes:
            self.memory.view(ptr, num_bytes)[:] = POISON
            self.memory.mark_uninitialised(ptr, num_bytes)

    def synchronize(self, stream: int) -> None:
        pass

    def default_stream(self) -> int:
        return 0

    def is_capturing(self, stream: int) -> bool:
        return False

    def capture_id(self, stream: int) -> int:
        return 0

    def order(self, first: int, then: int) -> None:
        pass

    def mark_written(self, ptr: int, num_bytes: int) -> None:
        """Counts device bytes as initialised: the host may write them through a view the emulator does not see."""
        self.memory.mark_initialised(ptr, num_bytes)

    def load(self, text: str | Source, spec: KernelSpec) -> EmulatedKernel:
        """Parses and decodes the text (once a process). Raises PtxError naming the line for what the emulator does not take, and
        LaunchError where the kernel wants more shared memory than the device it stands for has."""
        check_shared_memory(spec, self.info)
        text = str(text)
        program, is_hit = _program(text)
        if not is_hit:
            dump(text, None, spec.symbol)
        program.source_map = partial(origin_of, spec, text)
        report.line("cache", spec.symbol, self.info.arch, "memory" if is_hit else "emulated")
        return EmulatedKernel(self, program, spec, "memory" if is_hit else "emulated")

    def bind_view(self, view: TensorView) -> None:
        """Registers host memory in place (nothing is copied). Raises InvalidArgument for memory of a GPU or of another device."""
        if view.desc.numel == 0:
            return
        if view.device == "emu":
            if view.owner.backend is not self:
                raise InvalidArgument("device: a DeviceArray of another emulated device was given (expected one of this handle).")
            return
        if view.device != "cpu":
            raise InvalidArgument(f"device: an array on {view.device} was given (expected host memory or a DeviceArray of this device).")
        start, num_bytes = _extent(view)
        self.memory.register(host_view(start, num_bytes), view.framework, writable=not view.is_readonly)

    def release_view(self, view: TensorView) -> None:
        if view.desc.numel and view.device == "cpu":
            self.memory.unregister(_extent(view)[0])

    def time_launches(self, run: Sequence[Callable[[], None]], stream: int, repeats: int, flush_bytes: int) -> list[list[float]]:
        """Microseconds of host time: comparable with each other, not with a GPU's."""
        times: list[list[float]] = [[] for _ in run]
        for _ in range(repeats):
            for index, call in enumerate(run):
                start = time.perf_counter()
                call()
                times[index].append((time.perf_counter() - start) * 1e6)
        return times


def _bytes(host: np.ndarray, what: str) -> np.ndarray:
    if not host.flags.c_contiguous:
        raise InvalidArgument(f"{what}: the host array has strides {host.strides} (expected a C-contiguous array).")
    return host.reshape(-1).view(np.uint8)


def _extent(view: TensorView) -> tuple[int, int]:
    """(address, bytes) of the memory between the view's first and last element."""
    low, high = view.desc.offset_range
    size = view.desc.dtype.num_bytes
    return view.ptr + low * size, (high - low + 1) * size
