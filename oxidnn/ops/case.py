"""The case grammar: a problem as one line of text, and back.

    conv_fprop x=bf16[8,64,56,56]nhwc w=bf16[128,64,3,3]nhwc y=bf16[8,128,56,56]nhwc padding=1 epilogue="relu(acc + bias)"

A tensor is `name=dtype[shape]layout` with layout one of nchw, nhwc (channels last, any rank), or `(stride,stride,...)`, and `@n` when
its address is aligned to n bytes only. Attributes are Python literals. Outputs may be left out: they are inferred. A case carries its
policy (math=tf32, deterministic=True, workspace_limit=N): no switch changes what it means.
"""

from __future__ import annotations

import ast
import difflib
import re
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..dtypes import dtype
from ..errors import InvalidArgument, expected
from ..tensor import TensorDesc
from .base import MATH, Policy, Problem

if TYPE_CHECKING:
    from .base import OpDef

_TENSOR = re.compile(r"(\w+)\[([\d,\s]*)\](nchw|nhwc|\([-\d,\s]*\))?(?:@(\d+))?")


def format_tensor(desc: TensorDesc) -> str:
    if desc.is_packed("nchw"):
        layout = "nchw"
    elif desc.is_packed("nhwc"):
        layout = "nhwc"
    else:
        layout = "(" + ",".join(map(str, desc.strides)) + ")"
    align = f"@{desc.align}" if desc.align < 16 else ""
    return f"{desc.dtype.name}[{','.join(map(str, desc.shape))}]{layout}{align}"


def parse_tensor(text: str) -> TensorDesc:
    match = _TENSOR.fullmatch(text)
    if match is None:
        raise InvalidArgument(f"case: {text!r} is no tensor (expected dtype[shape]layout, e.g. bf16[8,64,56,56]nhwc).")
    kind, shape_text, layout, align = match.groups()
    shape = tuple(int(s) for s in shape_text.split(",") if s.strip())
    if layout and layout.startswith("("):
        try:
            strides = tuple(int(s) for s in layout[1:-1].split(",") if s.strip())
        except ValueError:
            raise InvalidArgument(f"case: {text!r} has strides {layout} (expected integers).") from None
        if len(strides) != len(shape):
            raise InvalidArgument(f"case: {text!r} has {len(strides)} strides for {len(shape)} dimensions.")
        desc = TensorDesc(dtype(kind), shape, strides)
    else:
        desc = TensorDesc.packed(dtype(kind), shape, layout or "nchw")
    if int(align or 16) not in (a for a in (1, 2, 4, 8, 16) if a >= desc.dtype.num_bytes):
        raise InvalidArgument(f"case: {text!r} is aligned to {align} bytes (expected a power of two from {desc.dtype.num_bytes} to 16).")
    return TensorDesc(desc.dtype, desc.shape, desc.strides, int(align or 16))


def format_case(problem: Problem) -> str:
    """The line of `problem`; parse_case gives the same problem back."""
    words = [problem.op, *(f"{o.name}={format_tensor(o.desc)}" for o in problem.operands)]
    for name, value in problem.attrs:
        text = value if isinstance(value, str) else repr(value) if isinstance(value, (int, float, bool, tuple, type(None))) else str(value)
        words.append(f"{name}={shlex.quote(text)}")
    policy = problem.policy
    if policy.math != "ieee":
        words.append(f"math={policy.math}")
    if policy.deterministic:
        words.append("deterministic=True")
    if policy.workspace_limit is not None:
        words.append(f"workspace_limit={policy.workspace_limit}")
    return " ".join(words)


def parse_case(line: str) -> Problem:
    """The problem of a line. Raises InvalidArgument naming the word that is off, as the op itself would."""
    from . import OPS

    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InvalidArgument(f"case: {line!r} cannot be read ({error}).") from None
    if not words or words[0] not in OPS:
        raise InvalidArgument(f"case: {words[0] if words else ''!r} is no op{near(words[0] if words else '', OPS)}.")
    definition: OpDef = OPS[words[0]]
    tensors: dict[str, TensorDesc] = {}
    attrs: dict[str, Any] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals:
            raise InvalidArgument(f"case: {word!r} is neither tensor=... nor attribute=...")
        if name in tensors or name in attrs:
            raise InvalidArgument(f"case: {name!r} is given twice.")
        if name in (*definition.inputs, *definition.outputs) or _TENSOR.fullmatch(value):
            tensors[name] = parse_tensor(value)
        else:
            try:
                attrs[name] = ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                attrs[name] = value
    return definition.make(tensors, attrs, _policy(attrs))


def near(name: str, known: Iterable[str]) -> str:
    """" (did you mean ...?)", or all that is known where nothing is alike."""
    names = sorted(known)
    begun = [n for n in names if name and n.startswith(name)][:3]
    alike = list(dict.fromkeys(begun + difflib.get_close_matches(name, names, 3, 0.6)))
    return f" (did you mean {', '.join(alike)}?)" if alike else f" (known: {', '.join(names)})"


def _policy(attrs: dict[str, Any]) -> Policy:
    """Takes the words of the policy out of the attributes."""
    policy = Policy(attrs.pop("deterministic", False), attrs.pop("math", "ieee"), attrs.pop("workspace_limit", None))
    if not isinstance(policy.deterministic, bool):
        raise expected("case", "deterministic", repr(policy.deterministic), "True or False")
    if policy.math not in MATH:
        raise expected("case", "math", repr(policy.math), " | ".join(MATH))
    limit = policy.workspace_limit
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise expected("case", "workspace_limit", repr(limit), "bytes, at least 0")
    return policy
