"""The CUDA backend: what needs no device (first part), and on a GPU memory, launches, capture, contexts, faults and timing."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oxidnn.array import DeviceArray, empty, from_numpy, zeros
from oxidnn.dtypes import F32, TABLE, DType
from oxidnn.errors import InvalidArgument, LaunchError
from oxidnn.interchange import as_view
from oxidnn.runtime import cuda_backend, driver
from oxidnn.runtime.cubin_store import CubinStore
from oxidnn.runtime.cuda_backend import CudaBackend
from oxidnn.runtime.driver import CurrentContext, bindings, driver_version, link_ptx, why_no_cuda
from oxidnn.runtime.memory import Workspace
from oxidnn.tensor import TensorDesc

from ..unit.kernels import scale_spec, scale_text

gpu = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, cwd=ROOT,
                          env={**os.environ, **environment}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- without a device -------------------------------------------------------------------------------------------------------


def test_without_a_driver_everything_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "_library", missing)
    assert why_no_cuda() == "no NVIDIA driver is installed"
    for call in (lambda: CudaBackend(0), driver_version):
        with pytest.raises(LaunchError, match="no NVIDIA driver is installed"):
            call()


@pytest.mark.parametrize(("code", "count", "says"),
                         [(100, 0, "finds no device"), (0, 0, "finds no device"), (803, 0, "error 803"), (0, 2, "")])
def test_the_drivers_answers(code: int, count: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def cuInit(self, flags: int) -> int:  # noqa: N802
            return code

        def cuDeviceGetCount(self, out: Any) -> int:  # noqa: N802
            out._obj.value = count
            return 0

    monkeypatch.setattr(driver, "_library", Library)
    assert (says in why_no_cuda()) if says else why_no_cuda() == ""


def test_asking_for_a_device_imports_no_cuda_package() -> None:
    assert run_python("""
        import sys
        from oxidnn.runtime.driver import why_no_cuda
        why_no_cuda()
        print([m for m in sys.modules if m.split('.')[0] == 'cuda'])
    """) == "[]"


# ---- on a GPU ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def spec(cuda: CudaBackend) -> Any:
    return scale_spec("sm_80" if cuda.info.capability >= (8, 0) else "sm_75")


@pytest.fixture
def stream(cuda: CudaBackend) -> Any:
    """A non-blocking stream, as torch's side streams are."""
    cu = bindings()
    with CurrentContext(cuda.context):
        result, handle = cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        assert not result
        yield int(handle)
        cu.cuStreamDestroy(handle)


@pytest.fixture
def capture(cuda: CudaBackend, stream: int) -> Any:
    """(begin, end): end returns a function that replays the graph on the stream."""
    cu = bindings()

    def begin(mode: str = "GLOBAL") -> None:
        (result,) = cu.cuStreamBeginCapture(stream, getattr(cu.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}"))
        assert not result

    def end() -> Any:
        result, graph = cu.cuStreamEndCapture(stream)
        assert not result, result
        result, executable = cu.cuGraphInstantiate(graph, 0)
        assert not result, result

        def replay() -> None:
            (result,) = cu.cuGraphLaunch(executable, stream)
            assert not result, result

        return replay

    return begin, end


def scale(cuda: CudaBackend, spec: Any, x: DeviceArray, y: DeviceArray, factor: float, stream: int, comment: str = "") -> None:
    grid = (-(-x.size // spec.threads), 1, 1)
    cuda.load(scale_text(spec, comment), spec).bind(grid, (x.ptr, y.ptr, x.size, factor)).launch(stream)


def context_now() -> int:
    return int(bindings().cuCtxGetCurrent()[1])


@gpu
def test_facts_are_the_devices(cuda: CudaBackend) -> None:
    info = cuda.info
    assert info.name and info.num_sms > 0 and not info.is_emulated and cuda.device == "cuda:0"
    assert info.arch.startswith(f"sm_{info.capability[0]}{info.capability[1]}")
    assert 48 << 10 <= info.smem_per_cta < info.smem_per_sm and info.l2_bytes > 0
    assert 100 < info.bandwidth_gbs < 20000 and info.tensor_tflops > info.fma_tflops > 1
    assert float(driver_version()) >= 12


@gpu
@pytest.mark.parametrize("kind", TABLE, ids=str)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_arrays_round_trip(cuda: CudaBackend, stream: int, kind: DType, layout: str) -> None:
    rng = np.random.default_rng()
    for shape in ((2, 3, 4, 5), (1,), (), (0, 3, 2, 2), (1, 3, 257, 129)):
        host = rng.integers(0, 2, shape).astype(kind.numpy)
        a = from_numpy(cuda, host, kind, layout, stream)
        assert a.numpy().tobytes() == host.tobytes() and a.ptr % 256 == 0
        if len(shape) == 4:
            assert (a[:, ::2, ::-1].numpy() == host[:, ::2, ::-1]).all()
    assert (zeros(cuda, TensorDesc.packed(kind, (3, 4)), stream).numpy().astype(np.float64) == 0).all()


@gpu
@pytest.mark.parametrize("n", [1, 63, 64, 65, 100_003])
def test_launches_compute_and_stay_inside(cuda: CudaBackend, spec: Any, stream: int, n: int) -> None:
    host = np.random.default_rng().standard_normal(n).astype(np.float32)
    x = from_numpy(cuda, host, F32, "nchw", stream)
    y = empty(cuda, TensorDesc.packed(F32, (n + 64,)), stream)
    cuda.fill(y.ptr, 0xFF, y.nbytes, stream)
    launch = cuda.load(scale_text(spec), spec).bind((-(-n // spec.threads), 1, 1), (x.ptr, y.ptr, n, 1.0))
    for factor in (2.5, -0.75):  # scalars are rewritten in place; a Python float must arrive as f32
        launch.set(3, factor)
        launch.launch(stream)
        got = y.numpy()
        assert (got[:n] == host * np.float32(factor)).all() and np.isnan(got[n:]).all()


@gpu
def test_origins(cuda: CudaBackend, spec: Any, tmp_path: Path) -> None:
    backend = CudaBackend(0, cache_dir=tmp_path)
    text = scale_text(spec, f"origins {time.time_ns()}")
    assert [backend.load(text, spec).origin for _ in range(2)] == ["assembled", "memory"]
    assert len(CubinStore((tmp_path,), "rw").entries()) == 1
    cuda_backend._modules[0].clear()
    from oxidnn.runtime import assembler

    assembler.forget_cubins()
    kernel = backend.load(text, spec)
    assert kernel.origin == "disk"
    x = from_numpy(backend, np.ones(8), F32, "nchw", 0)
    kernel.bind((1, 1, 1), (x.ptr, x.ptr, 8, 3.0)).launch(0)
    assert (x.numpy() == 3).all()


@gpu
def test_the_drivers_own_assembler(cuda: CudaBackend, spec: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cubin, log = link_ptx(scale_text(spec), cuda.info.arch, "k")
    assert cubin is not None and cubin[:4] == b"\x7fELF" and "registers" in log
    refused, log = link_ptx(scale_text(spec).replace("mul.rn", "mull.rn"), cuda.info.arch, "k")
    assert refused is None and "mull" in log and "line" in log
    monkeypatch.setenv("OXIDNN_ASSEMBLER", "driver")
    x = from_numpy(cuda, np.ones(8), F32, "nchw", 0)
    scale(CudaBackend(0, cache_dir=tmp_path), spec, x, x, 5.0, 0, f"driver {time.time_ns()}")
    assert (x.numpy() == 5).all()
    assert CubinStore((tmp_path,), "rw").entries()[0].assembler.startswith("driver ")


@gpu
def test_more_shared_memory_than_the_default(cuda: CudaBackend, stream: int) -> None:
    for smem in (49152 + 1024, cuda.info.smem_per_cta, 16384):  # the last is smaller: the limit is never lowered, and need not be
        spec = scale_spec("sm_80", dynamic_smem=smem)
        x = from_numpy(cuda, np.ones(8), F32, "nchw", stream)
        scale(cuda, spec, x, x, 2.0, stream)
        assert (x.numpy() == 2).all()
    spec = scale_spec("sm_80", dynamic_smem=cuda.info.smem_per_cta + 16)
    with pytest.raises(LaunchError, match=f"at most {cuda.info.smem_per_cta}"):
        cuda.load(scale_text(spec), spec)


@gpu
@pytest.mark.parametrize("cluster", [2, 8, 16])
def test_clusters(cuda: CudaBackend, stream: int, cluster: int) -> None:
    if not cuda.info.at_least(9):
        pytest.skip("the device has no clusters")
    spec = scale_spec("sm_90a" if cuda.info.arch == "sm_90a" else "sm_90", cluster=cluster)
    n = spec.threads * cluster * 3
    host = np.random.default_rng().standard_normal(n).astype(np.float32)
    x = from_numpy(cuda, host, F32, "nchw", stream)
    scale(cuda, spec, x, x, 2.0, stream)
    assert (x.numpy() == 2 * host).all()
    with pytest.raises(LaunchError, match=f"cluster of {cluster}"):
        cuda.load(scale_text(spec), spec).bind((cluster + 1, 1, 1), (x.ptr, x.ptr, n, 1.0))


@gpu
def test_parameters_must_be_the_kernels(cuda: CudaBackend, spec: Any) -> None:
    from dataclasses import replace

    wrong = replace(spec, params=spec.params[:3])
    text = scale_text(spec, "wrong parameters").replace(spec.symbol, wrong.symbol)
    with pytest.raises(LaunchError, match="its spec says"):
        cuda.load(text, wrong)


@gpu
def test_a_refused_launch_names_everything(cuda: CudaBackend, spec: Any) -> None:
    from dataclasses import replace

    big = replace(spec, threads=2048)
    kernel = cuda.load(scale_text(spec), spec)
    kernel.spec = big
    with pytest.raises(LaunchError) as refused:
        kernel.bind((3, 1, 1), (16, 32, 8, 1.5)).launch(0)
    message = str(refused.value)
    assert "CUDA_ERROR_" in message and "(3, 1, 1)" in message and "2048 threads" in message and "x=0x10" in message and "a=1.5" in message


@gpu
def test_the_threads_context_is_left_alone(cuda: CudaBackend, spec: Any) -> None:
    seen: list[Any] = []

    def work() -> None:
        try:
            seen.append(context_now())
            x = from_numpy(cuda, np.ones(100), F32, "nchw", 0)
            scale(cuda, spec, x, x, 2.0, 0)
            seen.append(x.numpy())
            cuda.order(0, 0)
            del x
            seen.append(context_now())
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] == 0 and (seen[1] == 2).all() and seen[2] == 0


@gpu
def test_a_foreign_context_may_be_current(cuda: CudaBackend, spec: Any) -> None:
    cu = bindings()
    device = cu.cuDeviceGet(0)[1]
    created = cu.cuCtxCreate(None, 0, device) if "ctxCreateParams" in (cu.cuCtxCreate.__doc__ or "") else cu.cuCtxCreate(0, device)
    assert not created[0]
    try:
        foreign = context_now()
        assert foreign == int(created[1]) != int(cuda.context)
        x = from_numpy(cuda, np.ones(100), F32, "nchw", 0)
        scale(cuda, spec, x, x, 2.0, 0)
        assert (x.numpy() == 2).all() and context_now() == foreign
    finally:
        cu.cuCtxDestroy(created[1])


@gpu
def test_memory_is_freed_and_reused(cuda: CudaBackend, stream: int) -> None:
    cu = bindings()

    def used() -> int:
        attribute = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
        return int(cu.cuMemPoolGetAttribute(cuda._pool, attribute)[1])

    gc.collect()
    cuda.synchronize(stream)
    before = used()
    a = empty(cuda, TensorDesc.packed(F32, (1 << 20,)), stream)
    row = a[5:]
    del a
    gc.collect()
    assert used() - before >= 4 << 20
    del row
    gc.collect()
    cuda.synchronize(stream)
    assert used() == before
    with pytest.raises(LaunchError, match="OUT_OF_MEMORY"):
        cuda.allocate(1 << 50, stream)
    cuda.allocate(1 << 20, stream).free()  # still works


@gpu
def test_two_streams_are_ordered(cuda: CudaBackend, spec: Any, stream: int) -> None:
    from oxidnn.runtime.timing import spin_spec, spin_text

    spin = cuda.load(spin_text(spin_spec(cuda.info.arch)), spin_spec(cuda.info.arch)).bind((1, 1, 1), (100_000_000,))
    cuda.load(scale_text(spec), spec)
    x = from_numpy(cuda, np.ones(100), F32, "nchw", stream)
    side = cuda._side()
    spin.launch(stream)  # about 50 ms
    scale(cuda, spec, x, x, 2.0, stream)
    cuda.order(stream, side)
    y = empty(cuda, x.desc, side)
    scale(cuda, spec, x, y, 10.0, side)
    assert (y.numpy() == 20).all()


@gpu
@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
def test_everything_is_legal_under_capture(cuda: CudaBackend, spec: Any, stream: int, capture: Any, mode: str) -> None:
    begin, end = capture
    host = np.random.default_rng().standard_normal(1000).astype(np.float32)
    x = from_numpy(cuda, host, F32, "nchw", stream)
    y = zeros(cuda, x.desc, stream)
    workspace = Workspace(cuda)
    eager = workspace.take(4000, stream)
    dropped = empty(cuda, x.desc, stream)
    cuda.synchronize(stream)
    assert not cuda.is_capturing(stream)
    begin(mode)
    assert cuda.is_capturing(stream) and cuda.capture_id(stream) != 0
    scratch = workspace.take(4000, stream)
    kernel = cuda.load(scale_text(spec, f"captured {mode} {time.time_ns()}"), spec)  # assembled and loaded inside the capture
    kernel.bind((16, 1, 1), (x.ptr, scratch, 1000, 2.0)).launch(stream)
    kernel.bind((16, 1, 1), (scratch, y.ptr, 1000, 3.0)).launch(stream)
    made = empty(cuda, x.desc, stream)  # allocated inside, kept outside
    kernel.bind((16, 1, 1), (y.ptr, made.ptr, 1000, 0.5)).launch(stream)
    del dropped
    gc.collect()
    replay = end()
    assert scratch != eager and workspace.take(4000, stream) == eager
    for factor in (1.0, -4.0):  # replays see new data
        cuda.upload(x.ptr, host * np.float32(factor), stream)
        cuda.fill(eager, 0xFF, 4000, stream)
        replay()
        assert (y.numpy() == host * np.float32(factor) * 6).all() and (made.numpy() == host * np.float32(factor) * 3).all()
    cuda.allocate(256, stream).free()
    assert not cuda._deferred
    workspace.close()


@gpu
def test_threads_launch_in_parallel(cuda: CudaBackend, spec: Any) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for i in range(30):
                host = rng.standard_normal(777).astype(np.float32)
                x = from_numpy(cuda, host, F32, "nchw", 0)
                scale(cuda, spec, x, x, 2.0, 0, f"thread {i % 4}")
                assert (x.numpy() == 2 * host).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


@gpu
def test_views_of_other_places_are_refused(cuda: CudaBackend) -> None:
    with pytest.raises(InvalidArgument, match="on cpu"):
        cuda.bind_view(as_view(np.ones(3)))
    cuda.bind_view(as_view(zeros(cuda, TensorDesc.packed(F32, (3,)), 0)))
    with pytest.raises(InvalidArgument, match="cuda:99"):
        CudaBackend(99)


@gpu
def test_host_arrays_are_not_made_behind_the_users_back(cuda: CudaBackend) -> None:
    a = zeros(cuda, TensorDesc.packed(F32, (3,)), 0)
    with pytest.raises(TypeError, match=r"\.numpy\(\)"):
        np.asarray(a)
    assert np.from_dlpack(a, device="cpu").tolist() == [0, 0, 0]  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="ambiguous"):
        a.__dlpack__(stream=0)


@gpu
def test_sync_names_the_faulting_kernel() -> None:
    """In a process of its own: a fault costs the context."""
    said = run_python("""
        from oxidnn.runtime.cuda_backend import CudaBackend
        from oxidnn.errors import LaunchError
        from tests.unit.kernels import scale_spec, scale_text
        b = CudaBackend(0)
        spec = scale_spec()
        try:
            b.load(scale_text(spec), spec).bind((1, 1, 1), (16, 32, 8, 1.5)).launch(0)
        except LaunchError as error:
            print(error)
    """, OXIDNN_CHECK="sync")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in said and "test_scale" in said and "x=0x10" in said


@gpu
def test_import_then_fork_then_use() -> None:
    assert run_python("""
        import os
        import oxidnn, oxidnn.handle, oxidnn.runtime.cuda_backend as backend
        child = os.fork()
        import numpy as np
        from oxidnn.array import from_numpy
        from oxidnn.dtypes import F32
        a = from_numpy(backend.CudaBackend(0), np.ones(3), F32, "nchw", 0)
        assert (a.numpy() == 1).all()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            print("both")
    """) == "both"


@gpu
def test_using_cuda_then_forking_gives_a_clear_message() -> None:
    said = run_python("""
        import os
        from oxidnn.runtime.cuda_backend import CudaBackend
        from oxidnn.errors import LaunchError
        CudaBackend(0)
        child = os.fork()
        if not child:
            try:
                CudaBackend(0)
                os._exit(1)
            except LaunchError as error:
                os._exit(0 if "fork" in str(error) else 2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert said == "0"


@gpu
@pytest.mark.parametrize("flush", [0, 256 << 20])
def test_timing_measures_the_device(cuda: CudaBackend, stream: int, flush: int) -> None:
    """A spin of known length is timed right, however slow the host is to launch it, and samples interleave."""
    from oxidnn.runtime.timing import spin_spec, spin_text

    spec = spin_spec(cuda.info.arch)
    kernel = cuda.load(spin_text(spec), spec)
    short, long = kernel.bind((1, 1, 1), (100_000,)), kernel.bind((1, 1, 1), (400_000,))
    order: list[str] = []

    def run_short() -> None:
        order.append("s")
        time.sleep(0.0005)  # 500 us of host time, none of the device's
        short.launch(stream)

    def run_long() -> None:
        order.append("l")
        long.launch(stream)

    times = cuda.time_launches([run_short, run_long], stream, 7, flush)
    assert [len(t) for t in times] == [7, 7] and "".join(order[-14:]) == "sl" * 7
    quick, slow = (statistics.median(t) for t in times)
    assert 40 < quick < 200, times  # 100,000 cycles at 0.5 to 2.5 GHz
    assert 3.4 < slow / quick < 4.6, times


@gpu
def test_a_launch_is_cheap(cuda: CudaBackend, spec: Any, stream: int, record_property: Any) -> None:
    x = zeros(cuda, TensorDesc.packed(F32, (64,)), stream)
    launch = cuda.load(scale_text(spec), spec).bind((1, 1, 1), (x.ptr, x.ptr, 64, 1.0))
    samples = []
    with CurrentContext(cuda.context):
        for _ in range(30):
            cuda.synchronize(stream)
            begin = time.perf_counter()
            for _ in range(200):
                launch.set(0, x.ptr)
                launch.launch(stream)
            samples.append((time.perf_counter() - begin) / 200 * 1e6)
    cost = statistics.median(samples)
    record_property("launch_us", cost)
    print(f"launch with one argument rewritten: {cost:.2f} us")
    assert cost < 25  # about 5 on a quiet machine; the bound only catches an accident
