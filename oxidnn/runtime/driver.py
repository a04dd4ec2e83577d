"""The CUDA driver: whether there is one, calls that raise LaunchError, contexts, and its linker.

Importing this module loads no driver and makes no context.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

from ..errors import LaunchError

_HINTS = {
    "CUDA_ERROR_INVALID_VALUE": "a grid, cluster, block or shared memory size beyond the device's limits, or memory of another device",
    "CUDA_ERROR_OUT_OF_MEMORY": "the device's memory is full: free arrays, or set workspace_limit",
    "CUDA_ERROR_NOT_INITIALIZED": "CUDA cannot be used in a process forked after its first use: start workers by spawn, or fork before",
    "CUDA_ERROR_DEINITIALIZED": "the driver is shutting down: the interpreter is exiting",
    "CUDA_ERROR_INVALID_CONTEXT": "no context is current, or the stream belongs to another device",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "somebody reset the device",
    "CUDA_ERROR_INVALID_HANDLE": "the stream was destroyed or belongs to another device",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the cubin is for another architecture",
    "CUDA_ERROR_INVALID_IMAGE": "a damaged cubin: `oxidnn cache clear`",
    "CUDA_ERROR_INVALID_PTX": "the driver's assembler refuses the text; install oxidnn[assembler] for its diagnostics",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the driver is older than the PTX: install oxidnn[assembler] or a newer driver",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an out-of-range access, perhaps of an earlier kernel: OXIDNN_CHECK=sync names it; the context is lost",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a vector access to an address that is no multiple of its size; the context is lost",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "more registers or threads than an SM has",
    "CUDA_ERROR_LAUNCH_FAILED": "a fault on the device, perhaps of an earlier kernel: OXIDNN_CHECK=sync names it; the context is lost",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "an instruction fault, often a bad descriptor or tensor map; the context is lost",
    "CUDA_ERROR_INVALID_CLUSTER_SIZE": "the grid is no multiple of the cluster, or the cluster exceeds 8 CTAs",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "not allowed while the stream is being captured",
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": "the legacy default stream cannot be used while a blocking stream is captured",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "the capture was broken by an earlier call",
}


# ---- the driver, before anything is initialised ----


def _library() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def why_no_cuda() -> str:
    """"" if there is a CUDA device, else the reason in words. Makes no context.

    Through ctypes on purpose: without a driver the CUDA packages raise from strange places and may leave a lock held.
    """
    try:
        library = _library()
    except OSError:
        return "no NVIDIA driver is installed"
    code = library.cuInit(0)
    if code == 100:
        return "the NVIDIA driver finds no device"
    if code == 3:
        return "CUDA cannot be used in a process forked after its first use: start workers by spawn, or fork before"
    if code:
        return f"the NVIDIA driver does not start: cuInit gave error {code}"
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    return "" if count.value else "the NVIDIA driver finds no device"


def driver_version() -> str:
    """The newest CUDA version the driver knows, "13.0". Raises LaunchError without a driver."""
    reason = why_no_cuda()
    if reason:
        raise LaunchError(f"{reason}.")
    version = ctypes.c_int()
    _library().cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


# ---- calling the driver ----


@cache
def bindings() -> Any:
    from cuda.bindings import driver

    return driver


def result_name(result: Any) -> str:
    return getattr(result, "name", str(result))


def driver_error(result: Any, what: str, detail: str = "") -> LaunchError:
    hint = _HINTS.get(result_name(result), "")
    return LaunchError(f"{what}: {result_name(result)}{f' ({hint})' if hint else ''}.{detail}")


def checked(returned: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call, or LaunchError."""
    if returned[0]:
        raise driver_error(returned[0], what)
    return returned[1] if len(returned) == 2 else returned[1:]


_contexts: dict[int, Any] = {}
_contexts_lock = threading.Lock()


def primary_context(index: int) -> Any:
    """The primary context of a device, retained once a process and never released: other frameworks live in it too."""
    with _contexts_lock:
        if index not in _contexts:
            cu = bindings()
            checked(cu.cuInit(0), "cuInit")
            device = checked(cu.cuDeviceGet(index), "cuDeviceGet")
            _contexts[index] = checked(cu.cuDevicePrimaryCtxRetain(device), f"cuDevicePrimaryCtxRetain(cuda:{index})")
        return _contexts[index]


def device_ordinal(address: int) -> int:
    """The index of the device an address belongs to. Raises LaunchError for one that is none of a device."""
    cu = bindings()
    ordinal = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(checked(cu.cuPointerGetAttribute(ordinal, address), f"asking for the device of address {address:#x}"))


class CurrentContext:
    """Makes the context current for a block, and leaves the thread as it was. A class, since this stands on warm paths."""

    __slots__ = ("_context", "_is_pushed")

    def __init__(self, context: Any) -> None:
        self._context = context
        self._is_pushed = False

    def __enter__(self) -> None:
        cu = bindings()
        result, context = cu.cuCtxGetCurrent()
        if result or int(context) != int(self._context):
            checked((*cu.cuCtxPushCurrent(self._context), None), "cuCtxPushCurrent")
            self._is_pushed = True

    def __exit__(self, *_: object) -> None:
        if self._is_pushed:
            bindings().cuCtxPopCurrent()


def wait_for(stream: int, index: int) -> None:
    """Waits until the work enqueued on a stream of device `index`, of anybody's, is done."""
    with CurrentContext(primary_context(index)):
        checked((*bindings().cuStreamSynchronize(stream), None), f"waiting for stream {stream:#x}")


@contextlib.contextmanager
def capture_relaxed() -> Iterator[None]:
    """Lets this thread allocate and load although some stream is being captured in global or thread-local mode."""
    cu = bindings()
    before = checked(cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED), "capture mode")
    try:
        yield
    finally:
        cu.cuThreadExchangeStreamCaptureMode(before)


def link_ptx(text: str, arch: str, name: str, index: int = 0) -> tuple[bytes | None, str]:
    """(cubin, log) by the driver's linker; (None, error log) for a text it refuses. Uses the primary context of device `index`."""
    cu = bindings()
    option = cu.CUjit_option
    info, errors = bytearray(1 << 16), bytearray(1 << 16)
    options = {
        option.CU_JIT_INFO_LOG_BUFFER: info, option.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: len(info),
        option.CU_JIT_ERROR_LOG_BUFFER: errors, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: len(errors),
        option.CU_JIT_LOG_VERBOSE: 1, option.CU_JIT_TARGET: getattr(cu.CUjit_target, f"CU_TARGET_COMPUTE_{arch[3:].upper()}"),
    }

    def log(buffer: bytearray) -> str:
        return bytes(buffer).split(b"\0", 1)[0].decode(errors="replace").strip()

    with CurrentContext(primary_context(index)), capture_relaxed():
        state = checked(cu.cuLinkCreate(len(options), list(options), list(options.values())), "cuLinkCreate")
        try:
            source = text.encode() + b"\0"
            (result,) = cu.cuLinkAddData(state, cu.CUjitInputType.CU_JIT_INPUT_PTX, source, len(source), f"{name}.ptx".encode(), 0, [], [])
            if result:
                return None, log(errors) or result_name(result)
            result, address, size = cu.cuLinkComplete(state)
            if result:
                return None, log(errors) or result_name(result)
            return ctypes.string_at(int(address), int(size)), log(info)  # the link state owns the bytes: copied before it goes
        finally:
            cu.cuLinkDestroy(state)
