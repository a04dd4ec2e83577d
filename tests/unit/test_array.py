"""DeviceArray on the emulated device: copies, layouts, views, lifetime."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oxidnn import array
from oxidnn.array import DeviceArray, empty, from_numpy, zeros
from oxidnn.dtypes import F32, TABLE, DType, dtype
from oxidnn.errors import InvalidArgument
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.tensor import TensorDesc

BACKEND = EmulatedBackend("sm_80")
RNG = np.random.default_rng()


@pytest.fixture(autouse=True)
def _collect_what_a_test_makes() -> Iterator[None]:
    """gc.collect() passes over what was there before: millions of objects by the time that other tests have run."""
    gc.freeze()
    yield
    gc.unfreeze()


def values(kind: DType, shape: tuple[int, ...]) -> np.ndarray:
    if kind.kind == "bool":
        return RNG.integers(0, 2, shape).astype(bool)
    return RNG.integers(0, 100, shape).astype(kind.numpy) if not kind.is_float else RNG.standard_normal(shape).astype(kind.numpy)


@pytest.mark.parametrize("kind", TABLE, ids=str)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 1, 1), (2, 0, 3, 3), (3, 7), (5,), (), (2, 3, 2, 3, 4)], ids=str)
def test_round_trip(kind: DType, layout: str, shape: tuple[int, ...]) -> None:
    host = values(kind, shape)
    a = from_numpy(BACKEND, host, kind, layout, 0)
    back = a.numpy()
    assert back.dtype == kind.numpy and back.shape == shape and back.tobytes() == np.ascontiguousarray(host).tobytes()
    assert back.flags.c_contiguous and back.flags.writeable
    assert a.desc.is_packed(layout) and a.shape == shape and a.ndim == len(shape) and a.size == host.size and a.nbytes == host.nbytes
    assert str(a.dtype) == kind.name and a.device == "emu"


def test_strides_count_elements() -> None:
    assert from_numpy(BACKEND, np.zeros((2, 3, 4, 5)), dtype("f64"), "nhwc", 0).strides == (60, 1, 15, 3)


def test_conversion_rounds_to_even_and_saturates_e4m3() -> None:
    host = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1e9, -1e9, np.nan, np.inf])
    bf16 = from_numpy(BACKEND, host, dtype("bf16"), "nchw", 0).numpy().astype(np.float32)
    assert bf16[0] == 1 and bf16[1] == 1 + 2.0**-6 and np.isnan(bf16[4]) and np.isinf(bf16[5])
    e4m3 = from_numpy(BACKEND, host, dtype("e4m3"), "nchw", 0).numpy().astype(np.float32)
    assert e4m3[2] == e4m3[5] == 448 and e4m3[3] == -448 and np.isnan(e4m3[4])


def test_host_order_does_not_matter() -> None:
    host = RNG.standard_normal((4, 3, 5, 2)).astype(np.float32)
    for view in (host.transpose(2, 0, 3, 1), np.asfortranarray(host), host[::-1, :, ::2]):
        for layout in ("nchw", "nhwc"):
            assert (from_numpy(BACKEND, view, F32, layout, 0).numpy() == view).all()


def test_zeros_and_empty() -> None:
    assert (zeros(BACKEND, TensorDesc.packed(F32, (3, 4)), 0).numpy() == 0).all()
    padded = zeros(BACKEND, TensorDesc(F32, (2, 3), (8, 2)), 0)
    assert padded.strides == (8, 2) and (padded.numpy() == 0).all()
    with pytest.raises(InvalidArgument, match="negative"):
        empty(BACKEND, TensorDesc(F32, (2,), (-1,)), 0)


indices = st.one_of(st.integers(-3, 3), st.slices(3), st.none(), st.just(Ellipsis))


@settings(max_examples=200, deadline=None)
@given(st.lists(indices, max_size=4).map(tuple), st.sampled_from(["nchw", "nhwc"]))
def test_indexing_is_numpys(index: tuple[object, ...], layout: str) -> None:
    host = np.arange(81, dtype=np.int32).reshape(3, 3, 3, 3)
    a = from_numpy(BACKEND, host, dtype("s32"), layout, 0)
    try:
        want = host[index]
    except IndexError:
        with pytest.raises(IndexError):
            a[index]
        return
    got = a[index]
    assert isinstance(got, DeviceArray) and got.shape == want.shape and (got.numpy() == want).all()


def test_views_share_the_memory_and_keep_it() -> None:
    backend = EmulatedBackend("sm_80")
    a = from_numpy(backend, np.arange(24, dtype=np.float32).reshape(2, 3, 4), F32, "nchw", 0)
    row = a[1, ::-1]
    assert row.ptr == a.ptr + (12 + 8) * 4 and row.desc.align == 16 and a[0, 0, 1].desc.align == 4
    backend.fill(a[1, 2].ptr, 0, 16, 0)
    want = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[1, ::-1].copy()
    want[0] = 0
    del a
    gc.collect()
    assert (row.numpy() == want).all() and backend.memory.bytes_allocated == 96
    del row
    gc.collect()
    assert backend.memory.bytes_allocated == 0


def test_reshape_and_permute() -> None:
    host = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    a = from_numpy(BACKEND, host, F32, "nchw", 0)
    assert (a.reshape(4, -1).numpy() == host.reshape(4, 6)).all() and a.reshape((24,)).shape == (24,)
    assert (a.permute(2, 0, 1).numpy() == host.transpose(2, 0, 1)).all() and (a.permute(-1, 0, 1).numpy() == host.transpose(2, 0, 1)).all()
    for bad in ((5, 5), (-1, -1), (7, -1), (-2, 12)):
        with pytest.raises(InvalidArgument, match="24 elements"):
            a.reshape(bad)
    with pytest.raises(InvalidArgument, match="packed"):
        a.permute(1, 0, 2).reshape(24)
    with pytest.raises(InvalidArgument, match="each of 0..2 once"):
        a.permute(0, 0, 1)


def test_python_protocols() -> None:
    a = from_numpy(BACKEND, np.array([[3.5]], np.float32), F32, "nchw", 0)
    assert a.item() == 3.5 and len(a) == 1 and [r.item() for r in a] == [3.5] and {a: 1}[a] == 1
    assert repr(a) == "DeviceArray(f32 [1,1] row on emu)"
    with pytest.raises(TypeError, match="arrays of indices"):
        a[np.array([0])]
    with pytest.raises(TypeError):
        len(a[0, 0])
    assert not hasattr(a, "__cuda_array_interface__")


def test_memory_the_host_may_write_counts_as_written() -> None:
    from .kernels import scale_spec, scale_text

    backend = EmulatedBackend("sm_80", checkers="basic")
    x, y = (empty(backend, TensorDesc.packed(F32, (4,)), 0) for _ in range(2))
    np.asarray(x)[:] = [1, 2, 3, 4]
    spec = scale_spec()
    backend.load(scale_text(spec), spec).bind((1, 1, 1), (x.ptr, y.ptr, 4, 2.0)).launch(0)
    assert y.numpy().tolist() == [2, 4, 6, 8]


def test_ml_dtypes_come_back() -> None:
    assert from_numpy(BACKEND, np.ones(3), dtype("e5m2"), "nchw", 0).numpy().dtype == ml_dtypes.float8_e5m2


def test_arrays_that_outlive_the_names_of_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the interpreter's end names of modules are None before arrays that others hold are gone."""
    freed = []
    memory = array._Memory(SimpleNamespace(free=lambda: freed.append(1)))  # type: ignore[arg-type]
    monkeypatch.setattr(array, "sys", None)
    memory.__del__()
    assert freed == [1]
