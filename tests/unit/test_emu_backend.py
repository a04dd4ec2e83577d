"""The emulated backend: copies, launches in place, faults that name their cause, and the checks before a launch."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest

from oxidnn import array, emu
from oxidnn.dtypes import F32
from oxidnn.emu.machine import State
from oxidnn.emu.memory import host_view
from oxidnn.emu.program import Program
from oxidnn.errors import EmulatorFault, InvalidArgument, LaunchError, PtxError
from oxidnn.interchange import as_view
from oxidnn.ptx.parser import parse
from oxidnn.runtime import emu_backend
from oxidnn.runtime.backend import POISON
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.tensor import TensorDesc

from .kernels import scale_spec, scale_text

SPEC = scale_spec()
TEXT = scale_text(SPEC)


@pytest.fixture
def backend() -> EmulatedBackend:
    return EmulatedBackend("sm_80", checkers="basic")


def test_copies_keep_the_bytes(backend: EmulatedBackend) -> None:
    rng = np.random.default_rng()
    for host in (rng.standard_normal((3, 5)), rng.standard_normal(7).astype(ml_dtypes.bfloat16), np.array(3, np.int8), np.zeros((0, 4))):
        block = backend.allocate(host.nbytes, 0)
        backend.upload(block.ptr, host, 0)
        back = np.empty_like(host)
        backend.download(back, block.ptr, 0)
        assert back.tobytes() == host.tobytes()
        block.free()
        block.free()
    assert backend.memory.bytes_allocated == 0


def test_copies_of_strided_host_arrays_are_refused(backend: EmulatedBackend) -> None:
    block = backend.allocate(64, 0)
    with pytest.raises(InvalidArgument, match="C-contiguous"):
        backend.upload(block.ptr, np.zeros((4, 4), np.float32)[:, ::2], 0)
    with pytest.raises(InvalidArgument, match="C-contiguous"):
        backend.download(np.zeros((4, 4), np.float32).T[:2], block.ptr, 0)


def test_host_arrays_take_part_in_place(backend: EmulatedBackend) -> None:
    x = np.random.default_rng().standard_normal(100).astype(np.float32)
    y = np.full(104, np.nan, np.float32)
    views = [as_view(x), as_view(y)]
    launch = backend.load(TEXT, SPEC).bind((2, 1, 1), (0, 0, 100, 0.0))
    for view in views:
        backend.bind_view(view)
    launch.set(0, views[0].ptr)
    launch.set(1, views[1].ptr)
    launch.set(3, 2.5)
    launch.launch(0)
    for view in views:
        backend.release_view(view)
    assert (y[:100] == x * np.float32(2.5)).all() and np.isnan(y[100:]).all()
    with pytest.raises(EmulatorFault, match="bounds"):
        launch.launch(0)  # released: no longer the device's


def test_read_only_host_arrays_cannot_be_written(backend: EmulatedBackend) -> None:
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    y.flags.writeable = False
    for view in (as_view(x), as_view(y)):
        backend.bind_view(view)
    with pytest.raises(EmulatorFault):
        backend.load(TEXT, SPEC).bind((1, 1, 1), (x.ctypes.data, y.ctypes.data, 4, 2.0)).launch(0)
    assert (y == 0).all()


def test_reversed_and_overlapping_views_are_released_completely(backend: EmulatedBackend) -> None:
    x = np.arange(12, dtype=np.float32)
    views = [as_view(x[::-1]), as_view(x), as_view(x[4:8]), as_view(x[:0])]
    for view in views:
        backend.bind_view(view)
    backend.download(np.empty(12, np.float32), x.ctypes.data, 0)
    for view in views:
        backend.release_view(view)
    with pytest.raises(ValueError):
        backend.download(np.empty(1, np.float32), x.ctypes.data, 0)


def test_memory_of_other_devices_is_refused(backend: EmulatedBackend) -> None:
    other = array.zeros(EmulatedBackend("sm_80"), TensorDesc.packed(F32, (4,)), 0)
    with pytest.raises(InvalidArgument, match="another emulated device"):
        backend.bind_view(as_view(other))
    view = as_view(np.zeros(4, np.float32))
    view.device = "cuda:0"
    with pytest.raises(InvalidArgument, match="cuda:0"):
        backend.bind_view(view)


def test_unwritten_memory_is_reported(backend: EmulatedBackend) -> None:
    block, out = backend.allocate(16, 0), backend.allocate(16, 0)
    launch = backend.load(TEXT, SPEC).bind((1, 1, 1), (block.ptr, out.ptr, 4, 1.0))
    with pytest.raises(EmulatorFault, match="uninit"):
        launch.launch(0)
    backend.fill(block.ptr, 0, 16, 0)
    launch.launch(0)
    backend.poison(block.ptr, 16, 0)
    assert (host_view(block.ptr, 16) == POISON).all()
    with pytest.raises(EmulatorFault, match="uninit"):
        launch.launch(0)
    block.free()
    with pytest.raises(EmulatorFault, match="use after free"):
        launch.launch(0)


def test_programs_are_kept_by_text(backend: EmulatedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emu_backend, "_programs", type(emu_backend._programs)())
    texts = [scale_text(SPEC, str(i)) for i in range(3)]
    size = len(emu.load(parse(texts[0])).ops)
    monkeypatch.setattr(emu_backend, "_INSTRUCTIONS_KEPT", 3 * size - 1)  # two of them
    assert [backend.load(t, SPEC).origin for t in (texts[0], texts[0], texts[1], texts[2], texts[0])] == [
        "emulated", "memory", "emulated", "emulated", "emulated"]
    assert EmulatedBackend("sm_90a").load(texts[0], SPEC).origin == "memory"


def test_programs_and_launches_are_no_garbage() -> None:
    """Their arrays are freed at once, however rarely the garbage collector runs."""
    def alive() -> int:
        return sum(isinstance(o, (State, Program)) for o in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before, faults = alive(), []
        for n in (6, 7):  # elements of six: a launch that ends, and one with a fault
            memory, program = emu.GlobalMemory(), emu.load(parse(TEXT))
            x, y = (memory.register(np.zeros(6, np.float32)) for _ in range(2))
            try:
                program.launch(memory, 1, SPEC.threads, [x, y, n, 2.0], checkers="all")
            except EmulatorFault:
                faults.append(n)
        del memory, program
        assert alive() == before and faults == [7]
    finally:
        gc.enable()


def test_text_errors_name_the_line(backend: EmulatedBackend) -> None:
    at = next(i for i, line in enumerate(TEXT.splitlines(), 1) if "mul.rn" in line)
    with pytest.raises(PtxError, match=str(at)):
        backend.load(TEXT.replace("mul.rn.f32", "mul.rn.f33"), SPEC)


@pytest.mark.parametrize(
    ("grid", "args", "says"),
    [((0, 1, 1), (0, 0, 4, 1.0), "grid"), ((1, 65536, 1), (0, 0, 4, 1.0), "grid"), ((2**31, 1, 1), (0, 0, 4, 1.0), "grid"),
     ((1, 1, 1), (0, 0, 4), "4: x, y, n, a"), ((1, 1, 1), (0, 0, -1, 1.0), "n is -1"), ((1, 1, 1), (0, 0, 2**32, 1.0), "n is 4294967296"),
     ((1, 1, 1), (1.5, 0, 4, 1.0), "x is 1.5"), ((1, 1, 1), (0, 0, 4, 1e60), "a is 1e")],
)
def test_bad_launches_are_refused(backend: EmulatedBackend, grid: tuple[int, int, int], args: tuple[float, ...], says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        backend.load(TEXT, SPEC).bind(grid, args)


def test_a_grid_must_be_a_multiple_of_the_cluster() -> None:
    spec = scale_spec("sm_90a", cluster=2)
    kernel = EmulatedBackend("sm_90a").load(scale_text(spec), spec)
    with pytest.raises(LaunchError, match="cluster of 2"):
        kernel.bind((3, 1, 1), (0, 0, 4, 1.0))


def test_the_switch_adds_checkers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXIDNN_CHECK", "sync,race")
    assert "race" in EmulatedBackend().checkers and "uninit" in EmulatedBackend().checkers
    monkeypatch.setenv("OXIDNN_CHECK", "sync")
    assert "race" not in EmulatedBackend().checkers
    monkeypatch.setenv("OXIDNN_CHECK", "all")
    assert EmulatedBackend().checkers == "all"


def test_time_launches_calls_interleaved(backend: EmulatedBackend) -> None:
    calls: list[str] = []
    times = backend.time_launches([lambda: calls.append("a"), lambda: calls.append("b")], 0, 3, 0)
    assert calls == ["a", "b"] * 3 and [len(t) for t in times] == [3, 3] and all(t >= 0 for ts in times for t in ts)


def test_more_shared_memory_than_the_device_has() -> None:
    """What a GPU of that architecture would refuse to launch, the emulator refuses too."""
    spec = scale_spec("sm_90a", dynamic_smem=232449)
    with pytest.raises(LaunchError, match=r"232449 bytes of dynamic shared memory \(expected at most 232448"):
        EmulatedBackend("sm_90a").load("", spec)
