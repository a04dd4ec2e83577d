"""What the torch, cupy and jax tests share: a kernel of the repository run on foreign memory."""

from __future__ import annotations

from typing import Any

from oxidnn.interchange import as_view, frame_of
from oxidnn.runtime.cuda_backend import CudaBackend

from ..unit.kernels import scale_spec, scale_text


def scaled(cuda: CudaBackend, x: Any, factor: float, stream: int = 0) -> Any:
    """factor * x for a dense f32 array of any framework, in that framework, on its current stream: what an op call does."""
    frame = frame_of(x, cuda, stream)
    view = as_view(x)
    cuda.bind_view(view)
    result = frame.allocator(view.desc)()
    spec = scale_spec()
    launch = cuda.load(scale_text(spec), spec).bind((-(-view.desc.numel // spec.threads), 1, 1), (0, 0, view.desc.numel, factor))
    launch.set(0, view.ptr)
    launch.set(1, as_view(result).ptr)
    launch.launch(frame.stream(None))
    return result if frame.finish is None else frame.finish(result)
