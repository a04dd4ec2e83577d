"""A device and its memory: what every method of a handle stands on."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .. import report, switches
from ..array import DeviceArray, empty, from_numpy, zeros
from ..device import DeviceInfo, parse_device
from ..dispatch.session import Session
from ..dtypes import dtype as dtype_of
from ..errors import expected
from ..runtime.backend import Backend
from ..tensor import TensorDesc
from .calls import shape_of


class OnDevice:
    """The session of one device, and arrays there."""

    _session: Session

    @property
    def device(self) -> str:
        """ "cuda:N", or "emu"."""
        return self._session.backend.device

    @property
    def info(self) -> DeviceInfo:
        """What is known of the device: architecture, SMs, memory, rates."""
        return self._session.info

    def array(self, host: Any, dtype: Any = None, layout: str = "nchw") -> DeviceArray:
        """A DeviceArray holding a copy of `host` (anything np.asarray takes), converted to `dtype`, lying in `layout`."""
        try:
            host = np.asarray(host)
        except ValueError as error:
            raise expected("array", "host", "a ragged sequence", "anything np.asarray takes", str(error)) from None
        return from_numpy(self._session.backend, host, dtype_of(host.dtype if dtype is None else dtype), layout, self._session.stream)

    def empty(self, shape: Sequence[int], dtype: Any = "float32", layout: str = "nchw") -> DeviceArray:
        """An uninitialised DeviceArray."""
        return empty(self._session.backend, TensorDesc.packed(dtype_of(dtype), _extents("empty", shape), layout), self._session.stream)

    def zeros(self, shape: Sequence[int], dtype: Any = "float32", layout: str = "nchw") -> DeviceArray:
        """A DeviceArray of zeros."""
        return zeros(self._session.backend, TensorDesc.packed(dtype_of(dtype), _extents("zeros", shape), layout), self._session.stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Waits for everything enqueued on the stream."""
        self._session.backend.synchronize(self._session.stream if stream is None else stream)


def open_backend(device: str | None = None, cache_dir: str | Path | None = None) -> Backend:
    """The backend of a device name; None means OXIDNN_DEVICE, else cuda:0, else the emulator (said once)."""
    if device is not None and not isinstance(device, str):
        raise expected("DnnHandle", "device", repr(device), "None, 'cuda', 'cuda:N', 'emu' or 'emu:sm_XY'")
    named = device or switches.get("OXIDNN_DEVICE") or None
    if named is None:
        from ..runtime.driver import why_no_cuda

        reason = why_no_cuda()
        if reason:
            report.warn_once("no-cuda", f"oxidnn found no CUDA device ({reason}); kernels run in the CPU emulator of sm_90a. "
                                        f"Name a device to say so: DnnHandle('emu:sm_90a'), or OXIDNN_DEVICE.")
        named = "emu:sm_90a" if reason else "cuda:0"
    kind, which = parse_device(named)
    if kind == "cuda":
        from ..runtime.cuda_backend import CudaBackend

        return CudaBackend(int(which), cache_dir=cache_dir)
    from ..runtime.emu_backend import EmulatedBackend

    return EmulatedBackend(str(which))


def _extents(method: str, shape: Any) -> tuple[int, ...]:
    """A shape to allocate. Raises InvalidArgument unless it is a sequence of integers >= 0 that addresses can reach."""
    found = shape_of(shape)
    if not isinstance(found, tuple) or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in found):
        raise expected(method, "shape", repr(shape), "a sequence of integers >= 0")
    if prod(int(n) for n in found) >= 2**47:
        raise expected(method, "shape", repr(shape), "fewer than 2^47 elements")
    return tuple(int(n) for n in found)
