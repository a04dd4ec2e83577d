"""Backend: the one protocol a device answers. The CUDA one and the emulated one run the same text with the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..codegen.render import Source
from ..codegen.spec import KernelSpec, TensorMapSpec
from ..device import DeviceInfo
from ..tensor import TensorView

POISON = 0xFF  # bytes of NaN in every float type; -1 or the largest value in integers


class Kernel(Protocol):
    """A loaded kernel."""

    spec: KernelSpec
    origin: str  # where its machine code came from: "memory" | "disk" | "assembled" | "emulated"

    def bind(self, grid: tuple[int, int, int], args: Sequence[int | float | TensorMapSpec | tuple[int, ...]]) -> BoundLaunch:
        """A launch with its argument block packed by the parameters' types; made once per plan and step.

        A tensor_map parameter is bound to a TensorMapSpec and then set to the address it starts at; a table is set to a sequence.
        """
        ...


class BoundLaunch(Protocol):
    """A launch ready to go; `set` rewrites single arguments in place (pointers, call-time scalars)."""

    def set(self, index: int, value: int | float) -> None: ...

    def setter(self, index: int) -> Callable[[Any], None]:
        """What `set` does to one argument, without its checks: for addresses and numbers known to fit. Made once, called often."""
        ...

    def launch(self, stream: int) -> None:
        """Enqueues the kernel; allocates nothing, synchronises nothing. Raises LaunchError when the device refuses."""
        ...


class Allocation(Protocol):
    ptr: int
    num_bytes: int

    def free(self) -> None: ...
    def move_to_stream(self, stream: int) -> None:
        """It is freed in the order of `stream` from now on."""
        ...
    def share(self) -> None:
        """Says that other streams than its own may still use it when it is freed."""
        ...


class Backend(Protocol):
    info: DeviceInfo
    device: str  # "cuda:0", "emu"

    def allocate(self, num_bytes: int, stream: int) -> Allocation: ...
    def upload(self, ptr: int, host: np.ndarray, stream: int) -> None: ...
    def download(self, host: np.ndarray, ptr: int, stream: int) -> None: ...
    def fill(self, ptr: int, byte: int, num_bytes: int, stream: int) -> None: ...
    def poison(self, ptr: int, num_bytes: int, stream: int) -> None:
        """Fills with POISON; the emulator counts the bytes as never written, so that a kernel that reads them faults."""
        ...
    def synchronize(self, stream: int) -> None: ...
    def load(self, text: str | Source, spec: KernelSpec) -> Kernel: ...
    def default_stream(self) -> int: ...
    def is_capturing(self, stream: int) -> bool: ...
    def capture_id(self, stream: int) -> int:
        """A number that is the same for one capture of a stream and no other; 0 when the stream is not capturing."""
        ...
    def order(self, first: int, then: int) -> None:
        """What is enqueued on the stream `then` from now on waits for what is already enqueued on `first`."""
        ...
    def mark_written(self, ptr: int, num_bytes: int) -> None:
        """Tells the emulator that the host may write these bytes unseen; nothing on a GPU."""
        ...
    def bind_view(self, view: TensorView) -> None:
        """Makes the view's memory legal for kernels (the emulator registers NumPy arrays); InvalidArgument if it lies elsewhere."""
        ...
    def release_view(self, view: TensorView) -> None: ...
    def time_launches(self, run: Sequence[Callable[[], None]], stream: int, repeats: int, flush_bytes: int) -> list[list[float]]:
        """Microseconds of each callable, `repeats` times, interleaved, with work queued ahead and L2 flushed before each."""
        ...
