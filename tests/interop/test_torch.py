"""torch and oxidnn share memory, streams and graphs."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from oxidnn.array import empty, from_numpy, zeros
from oxidnn.dtypes import F32, TABLE, DType, dtype
from oxidnn.errors import InvalidArgument
from oxidnn.interchange import as_view, frame_of, raw
from oxidnn.runtime.cuda_backend import CudaBackend
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.tensor import TensorDesc

from .frameworks import scaled

torch = pytest.importorskip("torch")
gpu = pytest.mark.gpu
KINDS = [d for d in TABLE if hasattr(torch, d.long_name)]
IN_DLPACK = [d for d in KINDS if d.name not in ("e4m3", "e5m2")]  # torch has no DLPack codes for fp8 before 2.9


# ---- host tensors and the emulated device -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", IN_DLPACK, ids=str)
def test_torch_takes_emulated_arrays(kind: DType) -> None:
    host = np.random.default_rng().integers(0, 2, (2, 3, 4, 5)).astype(kind.numpy)
    a = from_numpy(EmulatedBackend("sm_80"), host, kind, "nhwc", 0)
    t = torch.from_dlpack(a)
    assert t.data_ptr() == a.ptr and t.stride() == a.strides and t.dtype == getattr(torch, kind.long_name)
    assert (t.to(torch.float64).numpy() == host.astype(np.float64)).all()
    view = as_view(t)
    assert view.desc == a.desc and (view.framework, view.device) == ("torch", "cpu")


def test_host_tensors_take_part_in_place() -> None:
    backend = EmulatedBackend("sm_80")
    x, y = torch.arange(100.0), torch.zeros(100)
    views = [as_view(x), as_view(y)]
    for view in views:
        backend.bind_view(view)
    from ..unit.kernels import scale_spec, scale_text

    spec = scale_spec()
    backend.load(scale_text(spec), spec).bind((2, 1, 1), (x.data_ptr(), y.data_ptr(), 100, 2.0)).launch(0)
    for view in views:
        backend.release_view(view)
    assert torch.equal(y, 2 * x)


def test_tensors_without_strided_memory_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="torch"):
        as_view(torch.eye(3).to_sparse())
    with pytest.raises(InvalidArgument, match="complex64"):
        as_view(torch.zeros(3, dtype=torch.complex64))


# ---- on a GPU ---------------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_views_of_tensors(kind: DType) -> None:
    t = torch.empty((2, 8, 4, 6), dtype=getattr(torch, kind.long_name), device="cuda")
    for u in (t, t.contiguous(memory_format=torch.channels_last), t[:, 1:5, ::2], t.permute(3, 1, 0, 2), t[0, 0, 0, 1:], t[:0]):
        view = as_view(u)
        assert view.ptr == u.data_ptr() and view.desc.shape == tuple(u.shape) and view.desc.strides == tuple(u.stride())
        assert (view.desc.dtype, view.framework, view.device, view.is_readonly) == (kind, "torch", "cuda:0", False)
        assert view.ptr % view.desc.align == 0 and raw(u)[0] == view.ptr
    assert as_view(torch.nn.Parameter(torch.ones(3, device="cuda"))).framework == "torch"


@gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_results_are_tensors_with_the_strides_asked_for(cuda: CudaBackend, kind: DType, layout: str) -> None:
    desc = TensorDesc.packed(kind, (2, 3, 4, 5), layout)
    t = frame_of(torch.ones(1, device="cuda"), cuda, 0).allocator(desc)()
    assert t.is_cuda and as_view(t).desc.strides == desc.strides and as_view(t).desc.dtype == kind


@gpu
@pytest.mark.parametrize("kind", IN_DLPACK, ids=str)
def test_memory_is_shared_both_ways(cuda: CudaBackend, kind: DType) -> None:
    host = np.random.default_rng().integers(0, 2, (2, 3, 4, 5)).astype(kind.numpy)
    a = from_numpy(cuda, host, kind, "nhwc", 0)
    t = torch.from_dlpack(a)
    assert t.data_ptr() == a.ptr and t.stride() == a.strides
    assert (t.cpu().to(torch.float64).numpy() == host.astype(np.float64)).all()
    t.fill_(1)
    torch.cuda.synchronize()
    assert (a.numpy().astype(np.float64) == 1).all()
    if kind.name not in ("bf16", "bool", "u16", "u32", "u64"):
        u = torch.as_tensor(a, device="cuda")  # __cuda_array_interface__
        assert u.data_ptr() == a.ptr and u.stride() == a.strides


@gpu
def test_the_memory_outlives_the_array(cuda: CudaBackend) -> None:
    t = torch.from_dlpack(from_numpy(cuda, np.full(1 << 16, 7.0), F32, "nchw", 0))
    gc.collect()
    others = [zeros(cuda, TensorDesc.packed(F32, (1 << 16,)), 0) for _ in range(4)]
    cuda.synchronize(0)
    assert (t == 7).all() and others


@gpu
def test_work_follows_the_current_stream(cuda: CudaBackend) -> None:
    x = torch.randn(1 << 20, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert frame_of(x, cuda, 0).stream(None) == side.cuda_stream
        torch.cuda._sleep(100_000_000)  # long enough that an unordered kernel would see the old values
        z = x + 1
        y = scaled(cuda, z, 2.0)
        w = y - 2 * x
    side.synchronize()
    assert torch.allclose(w, torch.full_like(w, 2.0), atol=1e-5)
    assert frame_of(x, cuda, 0).stream(side) == side.cuda_stream


@gpu
def test_dlpack_orders_the_consumers_stream(cuda: CudaBackend) -> None:
    from oxidnn.runtime.timing import spin_spec, spin_text

    spec = spin_spec(cuda.info.arch)
    spin = cuda.load(spin_text(spec), spec).bind((1, 1, 1), (100_000_000,))
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    a = empty(cuda, TensorDesc.packed(dtype("s32"), (1000,)), producer.cuda_stream)
    cuda.fill(a.ptr, 0, a.nbytes, producer.cuda_stream)
    spin.launch(producer.cuda_stream)
    cuda.fill(a.ptr, 1, a.nbytes, producer.cuda_stream)
    with torch.cuda.stream(consumer):
        total = torch.from_dlpack(a).sum()
    assert int(total) == 1000 * 0x01010101


@gpu
def test_a_foreign_graph_captures_and_replays(cuda: CudaBackend) -> None:
    x = torch.randn(5000, device="cuda")
    scaled(cuda, x, 3.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = scaled(cuda, x, 3.0)
    for _ in range(2):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, 3 * x)


@gpu
def test_handle_calls(cuda: CudaBackend) -> None:
    """The whole way: tensors in, a tensor out, in the layout of the input, on the stream of the caller, in a graph too."""
    import oxidnn

    handle = oxidnn.DnnHandle("cuda:0")
    x, w = torch.randn(2, 8, 9, 7, device="cuda"), torch.randn(4, 8, 3, 3, device="cuda")
    reference = torch.nn.functional.conv2d(x.double(), w.double(), padding=1).float()
    for layout in (torch.contiguous_format, torch.channels_last):
        y = handle.conv(x.contiguous(memory_format=layout), w, padding=1)
        assert isinstance(y, torch.Tensor) and torch.allclose(y, reference, atol=1e-4) and y.is_contiguous(memory_format=layout)
    out = torch.empty_like(reference)
    assert handle.conv(x, w, padding=1, out=out) is out and torch.allclose(out, reference, atol=1e-4)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    y = handle.conv(x, w, padding=1, stream=side)
    side.synchronize()
    assert torch.allclose(y, reference, atol=1e-4)
    with pytest.raises(InvalidArgument, match="cpu"):
        handle.conv(x.cpu(), w.cpu())
    plan = handle.plan("conv_fprop", x, w, padding=1)
    plan(x, w, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plan(x, w)
    x.neg_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(captured, -reference, atol=1e-4)


@gpu
def test_a_second_device_is_respected(cuda: CudaBackend, request: pytest.FixtureRequest) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    x = torch.randn(1000, device="cuda:0")
    with torch.cuda.device(1):
        y = scaled(cuda, x, 2.0)
        assert torch.cuda.current_device() == 1
        other: Any = CudaBackend(1)
        z = scaled(other, x.to("cuda:1"), 2.0)
        with pytest.raises(InvalidArgument, match="cuda:1"):
            cuda.bind_view(as_view(z))
    assert y.device.index == 0 and torch.equal(y, 2 * x) and torch.equal(z.cpu(), 2 * x.cpu())
