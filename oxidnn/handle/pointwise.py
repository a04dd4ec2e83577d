"""The handle's elementwise functions and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..codegen.pointwise import Expression, parse
from ..dispatch.session import Call, hashable
from ..errors import expected
from ..ops.checks import check_choice, check_number
from .calls import CALLS, pointwise_call, shape_of
from .device import OnDevice

_OP_TENSOR = {"add": "a + b", "mul": "a * b", "min": "minimum(a, b)", "max": "maximum(a, b)", "sqrt": "sqrt(a)", "not": "1 - a"}
_ARGUMENTS = ("dtype", "saturate", "out", "stream")  # of `pointwise`, beside which scalars stand


class PointwiseOps(OnDevice):
    """Methods of DnnHandle."""

    def pointwise(self, expression: Any, /, *tensors: Any, dtype: Any = None, saturate: bool = True, out: Any = None, stream: Any = None,
                  **scalars: float) -> Any:
        """An expression over tensors, broadcast as NumPy does; tensors stand in the order of expression.args.

        expression: an oxidnn.expr expression, a string, or a tuple of them (several outputs). scalars: values of expr.scalar names, by
        name; none may be called dtype, saturate, out or stream. saturate: as of `cast`. out may be one of the inputs.
        """
        call, expression = _call_of(hashable(expression, "pointwise", "expression"))
        if len(tensors) != len(call.tensors):
            raise expected("pointwise", "tensors", f"{len(tensors)} arrays", f"{len(call.tensors)}: {', '.join(call.tensors)}")
        return self._session.run(call, tensors, (expression, dtype, saturate), out, stream, scalars)

    def activation(self, x: Any, name: str, *, parameters: Sequence[float] = (), out: Any = None, stream: Any = None) -> Any:
        """An activation by name ("relu", "gelu", "leaky_relu", ...); parameters as the function takes them, e.g. the slope."""
        if type(parameters) is not tuple or parameters:  # the default is left as it is: this is a warm path
            parameters = hashable(parameters, "activation", "parameters")
        return self._session.run(CALLS["activation"], (x,), (name, parameters), out, stream)

    def activation_backward(self, dy: Any, x: Any, name: str, *, parameters: Sequence[float] = (), out: Any = None,
                            stream: Any = None) -> Any:
        """dx = dy * activation'(x)."""
        if type(parameters) is not tuple or parameters:  # the default is left as it is: this is a warm path
            parameters = hashable(parameters, "activation_backward", "parameters")
        return self._session.run(CALLS["activation_backward"], (dy, x), (name, parameters), out, stream)

    def prelu(self, x: Any, slope: Any, *, out: Any = None, stream: Any = None) -> Any:
        """x where it is above 0, else slope * x: of one slope, or of one a channel (dimension 1)."""
        return self._session.run(CALLS["prelu"], (x, slope), (), out, stream)

    def prelu_backward(self, dy: Any, x: Any, slope: Any, *, out: Any = None, stream: Any = None) -> Any:
        """(dx, dslope) of `prelu`, the same bits on every run. Workspace: as many elements as x, in f32 (f64)."""
        return self._session.run(CALLS["prelu_backward"], (dy, x, slope), (), out, stream)

    def op_tensor(self, a: Any, b: Any = None, op: str = "add", *, alpha1: float = 1.0, alpha2: float = 1.0, beta: float = 0.0,
                  out: Any = None, stream: Any = None) -> Any:
        """op(alpha1 * a, alpha2 * b) + beta * out, broadcast: "add", "mul", "min", "max"; of a alone "sqrt", and "not", 1 - alpha1 * a.

        The numbers do not enter the plan. `pointwise` takes any expression; this is the form of cuDNN's OpTensor.
        """
        text = check_choice("op_tensor", "op", op, tuple(_OP_TENSOR)) and _OP_TENSOR[op]
        if (b is None) != ("b" not in text):
            raise expected("op_tensor", "b", "missing" if b is None else "given", f"an array, for {op}" if b is None else f"none, for {op}")
        if beta != 0 and out is None:
            raise expected("op_tensor", "out", None, "what is added beta times", f"beta is {beta}.")
        numbers = {"alpha1": alpha1, "alpha2": alpha2, "beta": beta}
        for name, operand in (("alpha1", "a"), ("alpha2", "b")):
            if numbers[name] != 1 and operand in parse(text).args:
                text = str(parse(text).substitute({operand: parse(f"scalar({name}) * {operand}")}))
        text += "" if beta == 0 else " + c" if beta == 1 else " + scalar(beta) * c"
        given = {"a": a, "b": b, "c": out}
        parsed = parse(text)
        scalars: dict[str, Any] = {name: check_number("op_tensor", name, numbers[name]) for name in parsed.scalars}
        return self.pointwise(text, *(given[n] for n in parsed.args), out=out, stream=stream, **scalars)

    def add_tensor(self, a: Any, c: Any, *, alpha: float = 1.0, beta: float = 1.0, out: Any = None, stream: Any = None) -> Any:
        """alpha * a + beta * c, a broadcast to c; out may be c."""
        numbers: dict[str, Any] = {"alpha": check_number("add_tensor", "alpha", alpha), "beta": check_number("add_tensor", "beta", beta)}
        return self.pointwise("scalar(beta) * c + scalar(alpha) * a", c, a, out=out, stream=stream, **numbers)

    def glu(self, x: Any, axis: int = -1, *, name: str = "glu", out: Any = None, stream: Any = None) -> Any:
        """A gated linear unit of the halves a, b of x along `axis`, which has an even extent: "glu" a * sigmoid(b), as PyTorch's; "swiglu"
        silu(a) * b; "geglu" gelu(a) * b; "geglu_tanh"; "reglu" relu(a) * b; "bilinear" a * b. One launch; out: of any float type."""
        return self._session.run(CALLS["glu"], (x,), (axis, name), out, stream)

    def glu_backward(self, dy: Any, x: Any, axis: int = -1, *, name: str = "glu", out: Any = None, stream: Any = None) -> Any:
        """dx of `glu`, both halves in one launch; out may be x."""
        return self._session.run(CALLS["glu_backward"], (dy, x), (axis, name), out, stream)

    def swiglu(self, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """silu(a) * b of the halves of x: see `glu`."""
        return self.glu(x, axis, name="swiglu", out=out, stream=stream)

    def swiglu_backward(self, dy: Any, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """dx of `swiglu`."""
        return self.glu_backward(dy, x, axis, name="swiglu", out=out, stream=stream)

    def geglu(self, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """gelu(a) * b of the halves of x: see `glu`."""
        return self.glu(x, axis, name="geglu", out=out, stream=stream)

    def geglu_backward(self, dy: Any, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """dx of `geglu`."""
        return self.glu_backward(dy, x, axis, name="geglu", out=out, stream=stream)

    def reglu(self, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """relu(a) * b of the halves of x: see `glu`."""
        return self.glu(x, axis, name="reglu", out=out, stream=stream)

    def reglu_backward(self, dy: Any, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """dx of `reglu`."""
        return self.glu_backward(dy, x, axis, name="reglu", out=out, stream=stream)

    def reduce(self, x: Any, op: str = "sum", axes: Any = None, keepdims: bool = False, *, correction: int = 0,
               return_indices: bool = False, out: Any = None, stream: Any = None) -> Any:
        """Reduction over `axes` (None: all): sum, mean, max, min, prod, norm1, norm2, amax, any, all, argmax, argmin, var, std, ...

        correction: of var and std, which divide by the number of elements less it. return_indices: of max, min and amax also the index of
        the first such element, over the reduced axes in their order (int64), by the same launch.
        """
        return self._session.run(CALLS["reduce"], (x,), (op, axes, keepdims, correction, return_indices), out, stream)

    def dot(self, x: Any, x2: Any, *, out: Any = None, stream: Any = None) -> Any:
        """The sum over all elements of x * x2, of like shapes, made in f32 (f64 for f64) in a fixed order; of the type of x."""
        return self._session.run(CALLS["dot"], (x, x2), (), out, stream)

    def reduce_to(self, x: Any, shape: Sequence[int], op: str = "sum", *, out: Any = None, stream: Any = None) -> Any:
        """x reduced ("sum", "max", "min", "prod") to a shape that broadcasts to its own: what broadcast_to spread, taken back."""
        return self._session.run(CALLS["reduce_to"], (x,), (shape_of(shape), op), out, stream)

    def trace(self, x: Any, diagonal: int = 0, *, out: Any = None, stream: Any = None) -> Any:
        """The sum of a diagonal of the last two dimensions, above the main one if positive."""
        return self._session.run(CALLS["trace"], (x,), (diagonal,), out, stream)

    def reduce_backward(self, dy: Any, x: Any, op: str = "sum", axes: Any = None, *, y: Any = None, correction: int = 0, out: Any = None,
                        stream: Any = None) -> Any:
        """dx, in the shape and type of x, of y = reduce(x, op, axes), y and dy with or without the reduced dimensions.

        Sums and means are one launch; the others need what the reduction found: y where it is given (var: not), else it is found again.
        Ties of max, min and amax share dy evenly; the one zero of a product gets the product of the others. any, all, argmax, argmin and
        count_nonzero have no gradient.
        """
        return self._session.run(CALLS["reduce_backward"], (dy, x, y), (op, axes, correction), out, stream)


@lru_cache(maxsize=1024)
def _call_of(expression: Any) -> tuple[Call, Expression]:
    """`pointwise_call` of an expression whose scalars can be given beside the method's arguments."""
    call, parsed = pointwise_call(expression)
    for name in parsed.scalars:
        if name in _ARGUMENTS:
            others = f"another name than {', '.join(_ARGUMENTS)}"
            raise expected("pointwise", f"scalar {name}", "named as an argument of the method", others)
    return call, parsed
