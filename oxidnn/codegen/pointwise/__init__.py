"""The pointwise expression: a small DAG over tensor elements and call-time scalars that lowers to PTX wherever a kernel has a slot for it.

    e = relu(acc * arg("scale", axis="c") + arg("bias", axis="c"))      # or parse("relu(acc * scale + bias)")
    e.lower({"acc": "%acc", "scale": "%scale", "bias": "%bias"}, ["%acc"], "f32")

expression.py: the nodes, their values and derivatives. text.py: the parser and its inverse. functions.py: TABLE, a row a function: PTX or
an expansion into other functions, NumPy reference, derivative, error bound. lowering.py: from the DAG to PTX.

Text form: Python syntax; `name[c]` is a per-channel operand (1-D, along dimension 1), `name[:]` a full one; a bare name is full, except
that `bias`, `scale` and `shift` are per-channel beside `acc`. `scalar(lr)` is a number given with each call; `a, b` are two outputs;
`(t := e)` names a part that is used again.
"""

from . import functions as _functions
from .expression import (
    COMMON,
    COMPUTE_TYPES,
    TABLE,
    Expression,
    Function,
    Value,
    acc,
    apply,
    arg,
    cast,
    const,
    outputs,
    plus,
    round_to,
    scalar,
    times,
)
from .functions import *  # noqa: F403
from .text import parse

__all__ = ["COMMON", "COMPUTE_TYPES", "TABLE", "Expression", "Function", "Value", "acc", "apply", "arg", "cast", "const", "outputs",
           "parse", "plus", "round_to", "scalar", "times", *_functions.__all__]
