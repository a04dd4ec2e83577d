"""oxidnn: deep-learning primitives as PTX written at run time. `h = oxidnn.DnnHandle(); y = h.conv(x, w, padding=1)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    AssemblyError,
    EmulatorFault,
    InvalidArgument,
    LaunchError,
    NumericsError,
    OxidnnError,
    OxidnnWarning,
    PtxError,
    Unsupported,
)

if TYPE_CHECKING:
    from . import expr
    from .array import DeviceArray
    from .handle import DnnHandle

__version__ = "0.1.0"
__all__ = ["AssemblyError", "DeviceArray", "DnnHandle", "EmulatorFault", "InvalidArgument", "LaunchError", "NumericsError", "OxidnnError",
           "OxidnnWarning", "PtxError", "Unsupported", "__version__", "expr"]

_LAZY = {"DnnHandle": "handle", "DeviceArray": "array"}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Loads the heavy names on first use, so that `import oxidnn` stays light."""
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    if name == "expr":
        return import_module(".expr", __name__)
    raise AttributeError(f"module 'oxidnn' has no attribute {name!r}")
