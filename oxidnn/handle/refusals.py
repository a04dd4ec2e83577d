"""Arguments that are in no signature, refused in words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from ..codegen.pointwise import TABLE
from ..errors import InvalidArgument
from ..ops.case import near

_T = TypeVar("_T")

# What PyTorch calls these arguments.
_NAMES_ELSEWHERE = {"dim": ("axis", "axes"), "kernel_size": ("window", "kernel"), "scale_factor": ("scales",), "weight": ("w", "gamma"),
                    "input": ("x",), "keepdim": ("keepdims",), "num_groups": ("groups",), "normalized_shape": ("axes",),
                    "size": ("sizes", "output_size")}
# And its functions; of functions of elements, "activation".
_METHODS_ELSEWHERE = {"linear": "gemm(x, w, bias, transpose_b=True)", "matmul": "gemm", "mm": "gemm", "bmm": "gemm", "cat": "concat",
                      "log_softmax": "softmax(x, log=True)", "scaled_dot_product_attention": "attention",
                      "mse_loss": 'loss(x, target, "mse")', "interpolate": "resize", "upsample": "resize", "transpose": "permute",
                      **{name: f'reduce(x, "{name}")' for name in ("sum", "mean", "max", "min", "prod", "var", "std")}}


def no_method(handle: type, name: str) -> str:
    """What to say of a method that the handle has not."""
    methods = [n for n in dir(handle) if not n.startswith("_")]
    plain = re.sub("[123]d$", "", name)
    here = _METHODS_ELSEWHERE.get(name) or (plain if plain in methods else f'activation(x, "{name}")' if name in TABLE else "")
    alike = near(name, methods)
    return f"DnnHandle has no {name}{f' (it is {here} here)' if here else alike if 'did you mean' in alike else ''}."


def refusing(handle: type[_T]) -> type[_T]:
    """Every public method of the class, inherited ones too, says what is wrong with its arguments by InvalidArgument."""
    for name, method in inspect.getmembers(handle, inspect.isfunction):
        if name == "__init__" or not name.startswith("_"):
            setattr(handle, name, _refuses(handle, method))
    return handle


def _refuses(handle: type, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` as the handle's own, with InvalidArgument in the place of Python's TypeError for arguments that are not in its signature."""
    name = method.__name__.replace("__init__", "DnnHandle")

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except TypeError as error:
            parameters = inspect.signature(method).parameters
            try:
                inspect.signature(method).bind(*args, **kwargs)
            except TypeError as reason:
                names = [n for n in parameters if n != "self"]
                unknown = [k for k in kwargs if k not in names]
                same = [(k, n) for k in unknown for n in _NAMES_ELSEWHERE.get(k, ()) if n in names and n not in kwargs]
                hint = f" ({same[0][0]} is {same[0][1]} here)" if same else near(unknown[0], names) if unknown else ""
                hint = hint if same or "did you mean" in hint else ""
                raise InvalidArgument(f"{name}: {reason}{hint} (expected {', '.join(names)}).") from None
            raise error

    call.__module__, call.__qualname__ = handle.__module__, f"{handle.__qualname__}.{method.__name__}"  # pickled by that name
    return call
