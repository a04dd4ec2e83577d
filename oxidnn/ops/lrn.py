"""Local response normalisation across or within channels, and its gradient: tensors (N, C, spatial) of any rank from 2 on.

    lrn x=f32[8,96,55,55] size=5 alpha=0.0001 beta=0.75 k=2.0           y
    lrn_backward dy=... x=... size=5                                    dx
    divisive_norm x=f32[8,3,64,64] means=f32[8,3,64,64] size=9          y
    divisive_norm_backward dy=... x=... means=... size=9                dx, dmeans

y[c] = x[c] / s[c]^beta, s[c] = k + alpha / size * (sum of x^2 over the channels from c - (size - 1) // 2 to c + size // 2 that there are):
the window of ONNX and cuDNN. PyTorch's is the same for odd sizes, and one channel lower for even ones. within: the window lies within the
channel instead, along each of its 1 to 3 spatial dimensions, and alpha is divided by the `size`^dimensions elements of a whole one.

Divisive normalisation, cuDNN's: lrn within channels whose sums are of (x - means)^2, `means` being what the caller takes for the mean
around each element (an average pool, a blur); without it they are 0. y = x / s^beta: for local contrast normalisation give x less its
mean as x, and no means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import FLOATS, check_bool, check_integer, check_number, check_reach, operand, output
from .epilogue import accumulator_of

_NUMBERS = {"alpha": 1e-4, "beta": 0.75, "k": 1.0}
_DIVISIVE = {"alpha": 1.0, "beta": 0.5, "k": 1.0}
_ATTRS = (("size", 5), *_NUMBERS.items(), ("within", False))
_DIVISIVE_ATTRS = (("size", 5), *_DIVISIVE.items())


@dataclass(frozen=True)
class LrnProblem(Problem):
    size: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0
    within: bool = False

    @property
    def factor(self) -> float:
        """alpha over the elements of a window."""
        return self.alpha / (self.size ** (self.desc("x").rank - 2) if self.within else self.size)

    @property
    def is_backward(self) -> bool:
        return self.op.endswith("_backward")

    @property
    def before(self) -> int:
        """Channels (elements) of a window before its own."""
        return (self.size - 1) // 2

    @property
    def flops(self) -> int:
        taps = self.size ** (self.desc("x").rank - 2) if self.within else self.size
        return self.desc("x").numel * (2 * taps + 10) * (2 if self.is_backward else 1)


def _make(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> LrnProblem:
    is_divisive = op.startswith("divisive")
    x = operand(op, "x", tensors, FLOATS)
    if not 2 <= x.rank <= 8:
        raise expected(op, "rank of x", x.rank, "2 to 8: (N, C, spatial)")
    check_reach(op, "x", x)
    numbers = _DIVISIVE if is_divisive else _NUMBERS
    fields: dict[str, Any] = {"size": check_integer(op, "size", attrs.get("size", 5), 1)}
    fields |= {name: check_number(op, name, attrs.get(name, default), accumulator_of(x.dtype)) for name, default in numbers.items()}
    normal = [(name, value) for name, value in fields.items() if value != {"size": 5, **numbers}[name]]
    fields["within"] = is_divisive or check_bool(op, "within", attrs.get("within", False))
    normal += [("within", True)] if fields["within"] and not is_divisive else []
    if fields["within"] and not 3 <= x.rank <= 5:
        raise expected(op, "rank of x", x.rank, "3 to 5 for windows within channels: (N, C, spatial)")
    operands = [Operand("x", x)]
    if "means" in tensors:
        operands.append(Operand("means", operand(op, "means", tensors, (x.dtype,), x.shape)))
        check_reach(op, "means", tensors["means"])
    if not op.endswith("_backward"):
        operands.append(Operand("y", output(op, "y", tensors, (x.dtype,), x.shape, x), True))
    else:
        dy = operand(op, "dy", tensors, (x.dtype,), x.shape)
        check_reach(op, "dy", dy)
        results = ("dx", "dmeans") if "means" in tensors else ("dx",)
        operands = [Operand("dy", dy), *operands, *(Operand(n, output(op, n, tensors, (x.dtype,), x.shape, x), True) for n in results)]
    return LrnProblem(op, tuple(operands), tuple(normal), policy=policy, **fields)


DEFINITIONS = (
    OpDef("lrn", ("x",), ("y",), partial(_make, "lrn"), attrs=_ATTRS),
    OpDef("lrn_backward", ("dy", "x"), ("dx",), partial(_make, "lrn_backward"), attrs=_ATTRS),
    OpDef("divisive_norm", ("x", "means"), ("y",), partial(_make, "divisive_norm"), ("means",), _DIVISIVE_ATTRS),
    OpDef("divisive_norm_backward", ("dy", "x", "means"), ("dx", "dmeans"), partial(_make, "divisive_norm_backward"), ("means",),
          _DIVISIVE_ATTRS),
)
