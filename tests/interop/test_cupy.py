"""cupy and oxidnn share memory and streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oxidnn.array import from_numpy
from oxidnn.dtypes import TABLE, DType
from oxidnn.interchange import as_view, frame_of, raw
from oxidnn.runtime.cuda_backend import CudaBackend
from oxidnn.tensor import TensorDesc

from .frameworks import scaled

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu
KINDS = [d for d in TABLE if d.name not in ("bf16", "e4m3", "e5m2")]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_views(kind: DType) -> None:
    a = cupy.zeros((2, 8, 4, 6), kind.numpy)
    for b in (a, a[:, 1:5, ::2], a.transpose(3, 1, 0, 2), a[0, 0, ::-1], a[:0]):
        view = as_view(b)
        assert view.ptr == b.data.ptr and view.desc.shape == b.shape and view.desc.strides == tuple(s // b.itemsize for s in b.strides)
        assert (view.desc.dtype, view.framework, view.device) == (kind, "cupy", "cuda:0") and raw(b)[0] == view.ptr


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("take", [lambda a: cupy.from_dlpack(a), lambda a: cupy.asarray(a)], ids=["dlpack", "cuda_array_interface"])
def test_memory_is_shared(cuda: CudaBackend, kind: DType, take: Any) -> None:
    host = np.random.default_rng().integers(0, 2, (2, 3, 4, 5)).astype(kind.numpy)
    a = from_numpy(cuda, host, kind, "nhwc", 0)
    b = take(a)
    assert b.data.ptr == a.ptr and b.strides == tuple(s * b.itemsize for s in a.strides) and (cupy.asnumpy(b) == host).all()
    b[...] = 1
    cupy.cuda.Device().synchronize()
    assert (a.numpy() == 1).all()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_results_are_cupy_arrays(cuda: CudaBackend, layout: str) -> None:
    for kind in KINDS:
        desc = TensorDesc.packed(kind, (2, 3, 4, 5), layout)
        b = frame_of(cupy.ones(1), cuda, 0).allocator(desc)()
        assert isinstance(b, cupy.ndarray) and as_view(b).desc.strides == desc.strides and b.dtype == kind.numpy


def test_work_follows_the_current_stream(cuda: CudaBackend) -> None:
    x = cupy.random.standard_normal(1 << 20, dtype=cupy.float32)
    cupy.cuda.Device().synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        assert frame_of(x, cuda, 0).stream(None) == side.ptr
        z = x + 1
        w = scaled(cuda, z, 2.0) - 2 * x
    side.synchronize()
    assert cupy.allclose(w, 2, atol=1e-5)
    assert frame_of(x, cuda, 0).stream(side) == side.ptr
