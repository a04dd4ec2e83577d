"""jax arrays are taken through DLPack, waited for, and never written."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.errors import InvalidArgument
from oxidnn.interchange import as_view, frame_of
from oxidnn.runtime.cuda_backend import CudaBackend
from oxidnn.runtime.emu_backend import EmulatedBackend

from .frameworks import scaled

jax = pytest.importorskip("jax")
gpu = pytest.mark.gpu


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool"])
def test_host_arrays_and_the_emulated_device(name: str) -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        a = jax.numpy.arange(24).reshape(2, 3, 4).astype(name)
    view = as_view(a)
    assert (view.framework, view.device, view.is_readonly) == ("jax", "cpu", True) and view.desc.dtype.long_name == name
    assert view.desc.shape == (2, 3, 4) and view.desc.is_packed()
    backend = EmulatedBackend("sm_80")
    frame = frame_of(a, backend, 0)
    assert frame.finish is not None
    result = frame.allocator(view.desc)()
    backend.upload(result.ptr, np.asarray(a), 0)
    back = frame.finish(result)
    assert isinstance(back, jax.Array) and (back == a).all()


def test_explicit_streams_are_refused() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        frame = frame_of(jax.numpy.ones(3), EmulatedBackend("sm_80"), 0)
    with pytest.raises(InvalidArgument, match="stream"):
        frame.stream(7)


@gpu
def test_on_the_gpu(cuda: CudaBackend) -> None:
    if not any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("jax has no GPU here")
    x = jax.random.normal(jax.random.key(0), (1 << 20,))
    y = jax.jit(lambda v: v @ v.reshape(1024, 1024).reshape(-1) * 0 + v + 1)(x)  # still running when it is taken
    view = as_view(y)
    assert view.device == "cuda:0" and view.is_readonly and view.framework == "jax"
    z = scaled(cuda, y, 2.0)
    assert isinstance(z, jax.Array) and jax.numpy.allclose(z, 2 * (x + 1), atol=1e-5)
    for _ in range(20):  # memory that jax and we hand to and fro
        z = scaled(cuda, z, 1.0)
    assert jax.numpy.allclose(z, 2 * (x + 1), atol=1e-5)


@gpu
def test_jax_arrays_are_no_outputs() -> None:
    if not any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("jax has no GPU here")
    import oxidnn

    handle = oxidnn.DnnHandle("cuda:0")
    x, w = jax.numpy.ones((1, 2, 5, 5)), jax.numpy.ones((3, 2, 3, 3))
    assert isinstance(handle.conv(x, w), jax.Array)
    with pytest.raises(InvalidArgument, match="read-only"):
        handle.conv(x, w, out=jax.numpy.zeros((1, 3, 3, 3)))
