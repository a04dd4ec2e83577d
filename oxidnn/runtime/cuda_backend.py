"""The CUDA device: facts and modules through cuda.core, memory, order and launches through the driver API.

Importing this module loads no driver and makes no context. A backend retains the primary context of its device, the one torch, cupy
and jax use, so memory and streams are shared with them; the context current in the calling thread is always left as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import report, switches
from ..codegen.render import Source, sources_digest
from ..codegen.spec import KernelSpec, TensorMapSpec
from ..device import KNOWN, DeviceInfo, arch_of
from ..errors import AssemblyError, InvalidArgument, LaunchError
from ..tensor import TensorView
from .assembler import assembler_identity, cubin_for
from .backend import POISON
from .cubin_store import CubinStore
from .driver import CurrentContext, bindings, capture_relaxed, checked, driver_error, primary_context, result_name, why_no_cuda
from .kernel import (
    PARAM_LAYOUT,
    TENSOR_MAP_BYTES,
    Value,
    check_launch,
    check_shared_memory,
    check_value,
    describe_launch,
    param_size,
    table_layout,
)
from .timing import spin_spec, spin_text

_MODULES_KEPT = 1024
_POOL_KEEPS_BYTES = 1 << 30  # freed memory the pool holds on to for the next allocation


# ---- kernels ----


class _TensorMap:
    """A tensor map in an argument block; called with an address it lets the map start there: encoded once, then readdressed in place,
    which takes half the time."""

    __slots__ = ("_context", "_encode", "_fields", "_map", "_replace", "_spec", "_target", "_what", "address")

    def __init__(self, spec: TensorMapSpec, target: int, what: str, context: Any) -> None:
        cu = bindings()

        def words(values: Sequence[int]) -> list[Any]:
            return [cu.cuuint32_t(v) for v in values]

        def longs(values: Sequence[int]) -> list[Any]:
            return [cu.cuuint64_t(v) for v in values]

        rank = len(spec.dims)
        types = {"u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "s32": "INT32", "u64": "UINT64", "s64": "INT64", "f16": "FLOAT16",
                 "bf16": "BFLOAT16", "f32": "FLOAT32", "f32_ftz": "FLOAT32_FTZ", "tf32": "TFLOAT32", "f64": "FLOAT64"}
        dtype = getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{types[spec.dtype]}")
        swizzle = f"{spec.swizzle}B" if spec.swizzle else "NONE"
        promotion = f"L2_{spec.l2_promotion}B" if spec.l2_promotion else "NONE"
        fill = "NAN_REQUEST_ZERO_FMA" if spec.fills_nan else "NONE"
        layout = (words(spec.element_strides or (1,) * rank), cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                  getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
                  getattr(cu.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}"),
                  getattr(cu.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}"))
        extents = (longs(spec.dims), longs(spec.strides or (16,)))  # of one dimension, too, the driver wants an array of strides
        if spec.corners is None:
            self._encode = cu.cuTensorMapEncodeTiled
            self._fields = ((dtype, rank), (*extents, words(spec.box), *layout))
        else:
            self._encode = cu.cuTensorMapEncodeIm2col
            lower, upper = spec.corners
            self._fields = ((dtype, rank), (*extents, list(lower), list(upper), *spec.box, *layout))
        self._replace = cu.cuTensorMapReplaceAddress
        self._map = cu.CUtensorMap(target)  # the argument block's own bytes
        self._spec = spec
        self._target = target
        self._context = context
        self._what = what
        self.address = 0

    def __call__(self, address: int) -> None:
        if address == self.address:
            return
        if self.address:
            (result,) = self._replace(self._map, address)
        else:
            result = self._encoded(address)
        if result and result_name(result) == "CUDA_ERROR_INVALID_CONTEXT":  # none is current in this thread
            with CurrentContext(self._context):
                result = self._encoded(address)
        if result:
            raise driver_error(result, f"{self._what}: the driver refuses the tensor map at {address:#x}", f" {self._spec}")
        self.address = address

    def _encoded(self, address: int) -> Any:
        before, after = self._fields
        result, encoded = self._encode(*before, address, *after)
        if not result:
            ctypes.memmove(self._target, encoded.getPtr(), TENSOR_MAP_BYTES)
        return result

    def __str__(self) -> str:
        return f"{self._spec} at {self.address:#x}"


def _set_table(layout: struct.Struct, block: Any, at: int, values: Sequence[int]) -> None:
    layout.pack_into(block, at, *values)


class CudaLaunch:
    """A launch with its configuration and argument block built; see Kernel.bind.

    Concurrency: `set` and `launch` of one object belong to one thread at a time.
    """

    __slots__ = ("_block", "_config", "_enqueue", "_grid", "_is_watched", "_kernel", "_pointers", "_pointers_at", "_setters", "_stream")

    def __init__(self, kernel: CudaKernel, grid: tuple[int, int, int], args: Sequence[Value]) -> None:
        cu = bindings()
        spec = kernel.spec
        check_launch(spec, grid, args)
        self._kernel = kernel
        self._grid = grid
        # The driver wants a pointer to each value; tensor maps (aligned to 128 for every driver's sake) stand before the numbers.
        maps = [i for i, p in enumerate(spec.params) if p.type == "tensor_map"]
        at, end = {index: rank * TENSOR_MAP_BYTES for rank, index in enumerate(maps)}, len(maps) * TENSOR_MAP_BYTES
        for index, param in enumerate(spec.params):
            if param.type != "tensor_map":
                at[index] = end
                end += -(-param_size(param) // 8) * 8
        self._block = ctypes.create_string_buffer(end + 128)
        base = ctypes.addressof(self._block)
        lead = -base % 128
        self._pointers = (ctypes.c_void_p * max(len(at), 1))(*(base + lead + at[i] for i in range(len(at))))
        self._pointers_at = ctypes.addressof(self._pointers) if at else 0
        setters: list[Callable[[Any], None]] = []
        for index, (param, value) in enumerate(zip(spec.params, args, strict=True)):
            if isinstance(value, TensorMapSpec):
                setters.append(_TensorMap(value, base + lead + at[index], f"{spec.symbol}: {param.name}", kernel.backend.context))
            elif param.length:
                setters.append(partial(_set_table, table_layout(param.element, param.length), self._block, lead + at[index]))
                setters[-1](value)
            else:
                setters.append(partial(PARAM_LAYOUT[param.type].pack_into, self._block, lead + at[index]))
                setters[-1](value)
        self._setters = tuple(setters)
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = spec.threads, 1, 1
        config.sharedMemBytes = spec.dynamic_smem
        attributes = []
        if spec.cluster > 1:
            attributes.append(cu.CUlaunchAttribute())
            attributes[-1].id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            extent = attributes[-1].value.clusterDim
            extent.x, extent.y, extent.z = spec.cluster, 1, 1
        if spec.follows:
            attributes.append(cu.CUlaunchAttribute())
            attributes[-1].id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if attributes:
            config.attrs = attributes
            config.numAttrs = len(attributes)
        self._config = config
        self._stream = -1
        self._enqueue = partial(cu.cuLaunchKernelEx, config, kernel.function, self._pointers_at, 0)
        self._is_watched = kernel.backend.checks_sync or report.is_on("launch")

    def set(self, index: int, value: int | float) -> None:
        setter = self._setters[index]
        if isinstance(setter, _TensorMap):
            check_value(self._kernel.spec, index, value)
        try:
            setter(value)
        except (struct.error, OverflowError):
            check_value(self._kernel.spec, index, value)
            raise

    def setter(self, index: int) -> Callable[[Any], None]:
        return self._setters[index]

    def launch(self, stream: int) -> None:
        if stream != self._stream:
            self._config.hStream = stream
            self._stream = stream
        (result,) = self._enqueue()
        if result or self._is_watched:
            self._look_closer(result, stream)

    def _look_closer(self, result: Any, stream: int) -> None:
        backend, spec = self._kernel.backend, self._kernel.spec
        wrong_context = ("CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_HANDLE")
        if result and result_name(result) in wrong_context:  # another device, or none, is current in this thread: the rare case pays
            with CurrentContext(backend.context):
                (result,) = self._enqueue()
        if not result and backend.checks_sync and not backend.is_capturing(stream):
            with CurrentContext(backend.context):
                (result,) = bindings().cuStreamSynchronize(stream)
        values = [s if isinstance(s, _TensorMap) else f"a table of {p.length}" if p.length
                  else PARAM_LAYOUT[p.type].unpack(ctypes.string_at(at, param_size(p)))[0]
                  for p, s, at in zip(spec.params, self._setters, self._pointers, strict=False)]
        if result:
            raise driver_error(result, f"{spec.symbol} on {backend.device}, stream {stream:#x}",
                               "\n" + describe_launch(spec, self._grid, values))
        report.line("launch", spec.symbol, "x".join(map(str, self._grid)), spec.threads, spec.dynamic_smem, hex(stream))


class _Module:
    """A loaded cubin: shared by all backends of a device, unloaded with the last kernel that refers to it."""

    def __init__(self, code: Any, kernel: Any, function: Any) -> None:
        self.code = code
        self.kernel = kernel
        self.function = function
        self.dynamic_smem = 0  # what it has been opted in to; only ever raised: lowering races with launches


class CudaKernel:
    def __init__(self, backend: CudaBackend, module: _Module, spec: KernelSpec, origin: str) -> None:
        self.backend = backend
        self.module = module
        self.function = module.function
        self.spec = spec
        self.origin = origin

    def bind(self, grid: tuple[int, int, int], args: Sequence[Value]) -> CudaLaunch:
        return CudaLaunch(self, grid, args)


_modules: dict[int, OrderedDict[str, _Module]] = {}
_modules_lock = threading.RLock()


# ---- memory ----


class CudaAllocation:
    """Memory of the device's pool, freed in the order of `stream`, or after all work of the device once it was shared."""

    __slots__ = ("_backend", "_is_shared", "num_bytes", "ptr", "stream")

    def __init__(self, backend: CudaBackend, ptr: int, num_bytes: int, stream: int) -> None:
        self._backend = backend
        self.ptr = ptr
        self.num_bytes = num_bytes
        self.stream = stream
        self._is_shared = False

    def share(self) -> None:
        self._is_shared = True

    def move_to_stream(self, stream: int) -> None:
        self.stream = stream

    def free(self) -> None:
        """Frees it (once; later calls do nothing)."""
        ptr, self.ptr = self.ptr, 0
        if ptr:
            self._backend._release(ptr, self.stream, self._is_shared)


_pools: dict[int, Any] = {}
_pools_lock = threading.Lock()


def _pool_of(index: int) -> Any:
    """The memory pool of a device: one a process, and not the driver's default one, whose settings belong to others."""
    with _pools_lock:
        if index not in _pools:
            cu = bindings()
            props = cu.CUmemPoolProps()
            props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            props.handleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
            location = cu.CUmemLocation()
            location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = index
            props.location = location
            pool = checked(cu.cuMemPoolCreate(props), "cuMemPoolCreate")
            threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
            checked(cu.cuMemPoolSetAttribute(pool, threshold, cu.cuuint64_t(_POOL_KEEPS_BYTES)), "cuMemPoolSetAttribute")
            _pools[index] = pool
        return _pools[index]


class CudaBackend:
    """Device `cuda:index`. Raises LaunchError where there is no driver or device, InvalidArgument for an index beyond the devices.

    cache_dir: where cubins are kept (default: what OXIDNN_CACHE_DIR says).
    Concurrency: safe for threads; the context current in the calling thread stays as it was.
    """

    def __init__(self, index: int = 0, cache_dir: str | Path | None = None) -> None:
        reason = why_no_cuda()
        if reason:
            raise LaunchError(f"cuda:{index} cannot be used: {reason}. DnnHandle('emu:sm_90a') runs kernels on the CPU.")
        import cuda.core  # noqa: F401  half a second, which belongs to opening the device and not to its first kernel

        # So does what tells of one's kernels whether they are in the store: the digest of the templates, the assembler's version.
        sources_digest()
        with contextlib.suppress(AssemblyError):
            assembler_identity()
        cu = self._cu = bindings()
        count = checked(cu.cuDeviceGetCount(), "cuDeviceGetCount")
        if not 0 <= index < count:
            raise InvalidArgument(f"device: cuda:{index} does not exist (expected cuda:0 to cuda:{count - 1}).")
        self.index = index
        self.device = f"cuda:{index}"
        self.context = primary_context(index)
        self.info, self._clock_khz, has_pools = _facts(index)
        self.checks_sync = "sync" in _checks()
        self._store = None if cache_dir is None else CubinStore((Path(cache_dir).expanduser(),))
        self._deferred: list[tuple[int, int, bool]] = []  # frees that must wait for the end of a capture
        self._side_stream: int | None = None
        self._pool = _pool_of(index) if has_pools else None

    def __repr__(self) -> str:
        return f"CudaBackend({self.device!r}: {self.info.name})"

    # -- memory --

    def allocate(self, num_bytes: int, stream: int) -> CudaAllocation:
        """Memory (256-byte aligned) valid for work enqueued on `stream` from now on; none for 0 bytes.

        While `stream` is being captured it comes from outside the graph, so that it outlives a replay and is kept by its owner.
        Raises LaunchError when the device has too little.
        """
        if num_bytes == 0:
            return CudaAllocation(self, 0, 0, stream)
        with CurrentContext(self.context):
            is_captured = self.capture_id(stream) != 0
            if self._deferred and not is_captured:
                waiting, self._deferred = self._deferred, []
                for entry in waiting:
                    self._release(*entry)
            if not is_captured:
                return CudaAllocation(self, self._take(num_bytes, stream), num_bytes, stream)
            with capture_relaxed():
                side = self._side()
                ptr = self._take(num_bytes, side)
                checked(self._cu.cuStreamSynchronize(side), "allocate")
            return CudaAllocation(self, ptr, num_bytes, stream)

    def _take(self, num_bytes: int, stream: int) -> int:
        cu = self._cu
        if self._pool is None:
            return int(checked(cu.cuMemAlloc(num_bytes), f"allocating {num_bytes} bytes"))
        result, ptr = cu.cuMemAllocFromPoolAsync(num_bytes, self._pool, stream)
        if result and result_name(result) == "CUDA_ERROR_OUT_OF_MEMORY":  # what was freed on other streams may not have come back yet
            cu.cuStreamSynchronize(stream)
            cu.cuMemPoolTrimTo(self._pool, 0)
            result, ptr = cu.cuMemAllocFromPoolAsync(num_bytes, self._pool, stream)
        if result:
            raise driver_error(result, f"allocating {num_bytes} bytes on {self.device}")
        return int(ptr)

    def _side(self) -> int:
        """A stream of our own that is never captured."""
        if self._side_stream is None:
            flags = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING
            self._side_stream = int(checked(self._cu.cuStreamCreate(flags), "cuStreamCreate"))
        return self._side_stream

    def _release(self, ptr: int, stream: int, is_shared: bool) -> None:
        with CurrentContext(self.context):
            if self.capture_id(stream):  # freeing here would become part of the graph
                self._deferred.append((ptr, stream, is_shared))
                return
            if is_shared or self._pool is None or self._cu.cuMemFreeAsync(ptr, stream)[0]:
                with capture_relaxed():
                    self._cu.cuMemFree(ptr)  # waits for the whole device: the streams of its users are unknown, or its own is gone

    def upload(self, ptr: int, host: np.ndarray, stream: int) -> None:
        """Copies the contiguous array `host` to `ptr`. Pageable memory may be reused on return, pinned only after the stream is done."""
        if host.nbytes:
            _check_contiguous(host, "upload")
            with CurrentContext(self.context):
                checked(self._cu.cuMemcpyHtoDAsync(ptr, host.ctypes.data, host.nbytes, stream), f"uploading {host.nbytes} bytes")

    def download(self, host: np.ndarray, ptr: int, stream: int) -> None:
        """Copies from `ptr` into the contiguous array `host`; synchronize before reading it."""
        if host.nbytes:
            _check_contiguous(host, "download")
            with CurrentContext(self.context):
                checked(self._cu.cuMemcpyDtoHAsync(host.ctypes.data, ptr, host.nbytes, stream), f"downloading {host.nbytes} bytes")

    def fill(self, ptr: int, byte: int, num_bytes: int, stream: int) -> None:
        if num_bytes:
            with CurrentContext(self.context):
                checked(self._cu.cuMemsetD8Async(ptr, byte, num_bytes, stream), f"filling {num_bytes} bytes")

    def poison(self, ptr: int, num_bytes: int, stream: int) -> None:
        self.fill(ptr, POISON, num_bytes, stream)

    def mark_written(self, ptr: int, num_bytes: int) -> None:
        pass

    def bind_view(self, view: TensorView) -> None:
        if view.device != self.device:
            raise InvalidArgument(f"device: an array on {view.device} was given (expected one on {self.device}).")

    def release_view(self, view: TensorView) -> None:
        pass

    # -- streams --

    def default_stream(self) -> int:
        """The legacy default stream, which torch and cupy use unless told otherwise."""
        return 0

    def synchronize(self, stream: int) -> None:
        """Waits for the stream. Raises LaunchError for a fault of anything enqueued before."""
        with CurrentContext(self.context):
            checked(self._cu.cuStreamSynchronize(stream), f"waiting for stream {stream:#x} (a fault of any kernel before)")

    def is_capturing(self, stream: int) -> bool:
        return self.capture_id(stream) != 0

    def capture_id(self, stream: int) -> int:
        result, status = self._cu.cuStreamIsCapturing(stream)
        if result:
            # The legacy stream while some blocking stream is captured: not captured itself, but just as untouchable.
            return -1 if result_name(result) == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT" else 0
        if not status:
            return 0
        result, _, identity, *_ = self._cu.cuStreamGetCaptureInfo(stream)
        return -1 if result else int(identity) or -1

    def order(self, first: int, then: int) -> None:
        if first == then:
            return
        cu = self._cu
        with CurrentContext(self.context):
            event = checked(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING), "cuEventCreate")
            try:
                checked(cu.cuEventRecord(event, first), f"recording on stream {first:#x}")
                checked(cu.cuStreamWaitEvent(then, event, 0), f"making stream {then:#x} wait")
            finally:
                cu.cuEventDestroy(event)

    # -- kernels --

    def load(self, text: str | Source, spec: KernelSpec) -> CudaKernel:
        """The kernel of a text: from the modules loaded, the cubin store, or the assembler. Legal while streams are captured.

        Raises AssemblyError for a text the assembler refuses, LaunchError for a cubin the device does not take or whose parameters
        are not those of `spec`.
        """
        with _modules_lock:
            modules = _modules.setdefault(self.index, OrderedDict())
            key = text.digest if isinstance(text, Source) else text
            module = modules.get(key)
            if module is not None:
                modules.move_to_end(key)
                origin = "memory"
            else:
                assembled, origin = cubin_for(text, self.info.arch, spec.symbol, self._store)
                if "resources" in _checks() and (assembled.spill_bytes or assembled.registers > spec.max_registers):
                    raise AssemblyError(f"{spec.symbol}: {assembled.registers} registers and {assembled.spill_bytes} bytes of spills "
                                        f"(expected at most {spec.max_registers} and none). spec: {spec.describe()}")
                module = self._load_module(assembled.cubin, spec)
                modules[key] = module
                while len(modules) > _MODULES_KEPT:
                    modules.popitem(last=False)
            if spec.dynamic_smem > module.dynamic_smem:
                self._opt_in(module, spec)
            return CudaKernel(self, module, spec, origin)

    def _load_module(self, cubin: bytes, spec: KernelSpec) -> _Module:
        from cuda.core import ObjectCode

        cu = self._cu
        # Everything lazy is forced here, so that a first launch under capture loads nothing.
        with CurrentContext(self.context), capture_relaxed():
            code = ObjectCode.from_cubin(cubin, name=spec.symbol)
            try:
                kernel = code.get_kernel(spec.symbol)
            except Exception as error:
                raise LaunchError(f"loading {spec.symbol} on {self.device} ({self.info.arch}): {error}") from error
            # Sizes only: the driver counts offsets from where the constant bank's parameters begin, 16 bytes off the alignment of maps.
            declared, found = [param_size(p) for p in spec.params], [int(a.size) for a in kernel.arguments_info]
            if found != declared:
                raise LaunchError(f"{spec.symbol}: the kernel's parameters have {found} bytes, its spec says {declared}.")
            function = checked(cu.cuKernelGetFunction(kernel.handle), f"cuKernelGetFunction({spec.symbol})")
            checked(cu.cuFuncLoad(function), f"cuFuncLoad({spec.symbol})")
            if spec.cluster > 8:
                non_portable = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                checked(cu.cuFuncSetAttribute(function, non_portable, 1), f"{spec.symbol}: cluster of {spec.cluster}")
        return _Module(code, kernel, function)

    def _opt_in(self, module: _Module, spec: KernelSpec) -> None:
        check_shared_memory(spec, self.info)
        attribute = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with CurrentContext(self.context):
            checked(self._cu.cuFuncSetAttribute(module.function, attribute, spec.dynamic_smem),
                     f"{spec.symbol}: opting in to {spec.dynamic_smem} bytes of dynamic shared memory")
        module.dynamic_smem = spec.dynamic_smem

    # -- timing --

    def time_launches(self, run: Sequence[Callable[[], None]], stream: int, repeats: int, flush_bytes: int) -> list[list[float]]:
        """Microseconds of device time of each callable, which enqueues its work on `stream`; `repeats` samples, interleaved.

        Before every sample `flush_bytes` bytes are zeroed (256 MB empty the L2 cache of any device; 0 leaves it warm) and a kernel
        spins for longer than the host takes to enqueue the callable, so that only device time lies between the events.
        """
        cu = self._cu
        spec = spin_spec(self.info.arch)
        spin = self.load(spin_text(spec), spec).bind((1, 1, 1), (0,))
        cycles_per_us = self._clock_khz / 1000
        flush = self.allocate(flush_bytes, stream)
        events: list[Any] = []
        times: list[list[float]] = [[] for _ in run]
        with CurrentContext(self.context):
            try:
                events = [checked(cu.cuEventCreate(0), "cuEventCreate") for _ in range(2 * len(run))]
                host_us = self._warm_up(run, stream, spin, cycles_per_us)
                for _ in range(repeats):
                    for index, call in enumerate(run):
                        self.fill(flush.ptr, 0, flush_bytes, stream)
                        spin.set(0, int((2 * host_us[index] + 60) * cycles_per_us))
                        spin.launch(stream)
                        checked(cu.cuEventRecord(events[2 * index], stream), "cuEventRecord")
                        call()
                        checked(cu.cuEventRecord(events[2 * index + 1], stream), "cuEventRecord")
                    self.synchronize(stream)
                    for index in range(len(run)):
                        elapsed = checked(cu.cuEventElapsedTime(events[2 * index], events[2 * index + 1]), "cuEventElapsedTime")
                        times[index].append(elapsed * 1000)
            finally:
                for event in events:
                    cu.cuEventDestroy(event)
                flush.free()
        return times

    def _warm_up(self, run: Sequence[Callable[[], None]], stream: int, spin: CudaLaunch, cycles_per_us: float) -> list[float]:
        """Raises the clocks, runs every callable, and gives the host's microseconds to enqueue each."""
        host_us = []
        spin.set(0, int(3000 * cycles_per_us))
        spin.launch(stream)
        for call in run:
            call()  # whatever is made on first use
            begin = time.perf_counter()
            call()
            host_us.append(min((time.perf_counter() - begin) * 1e6, 5000.0))
            self.synchronize(stream)
        return host_us


def _checks() -> frozenset[str]:
    return frozenset(c.strip() for c in switches.get("OXIDNN_CHECK").split(","))


def _check_contiguous(host: np.ndarray, what: str) -> None:
    if not host.flags.c_contiguous:
        raise InvalidArgument(f"{what}: the host array has strides {host.strides} (expected a C-contiguous array).")


def _facts(index: int) -> tuple[DeviceInfo, int, bool]:
    """(facts, SM clock in kHz, whether memory pools work). Rates scale from the nearest device of the table by what can be asked."""
    from cuda.core import Device

    device = Device(index)
    p = device.properties
    capability = (int(p.compute_capability_major), int(p.compute_capability_minor))
    near = max((d for d in KNOWN.values() if d.capability <= capability), key=lambda d: d.capability, default=KNOWN["sm_75"])
    num_sms = int(p.multiprocessor_count)
    # Two transfers a clock; a copy reaches nine tenths of the data sheet. Some drivers no longer tell the clock.
    bandwidth = 2 * int(p.memory_clock_rate) * int(p.global_memory_bus_width) / 8 / 1e6 * 0.9
    info = DeviceInfo(
        name=device.name, arch=arch_of(capability), capability=capability, num_sms=num_sms,
        smem_per_cta=int(p.max_shared_memory_per_block_optin), smem_per_sm=int(p.max_shared_memory_per_multiprocessor),
        l2_bytes=int(p.l2_cache_size), bandwidth_gbs=bandwidth or near.bandwidth_gbs,
        tensor_tflops=near.tensor_tflops * num_sms / near.num_sms, fma_tflops=near.fma_tflops * num_sms / near.num_sms,
    )
    return info, int(p.clock_rate) or 1_500_000, bool(p.memory_pools_supported)
