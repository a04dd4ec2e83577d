"""Expressions as text: Python syntax, parsed by its own parser, and written back."""

from __future__ import annotations

import ast
import difflib
import math
from functools import lru_cache
from typing import Any

from ...errors import InvalidArgument
from .expression import CHANNEL_NAMES, COMMON, TABLE, Expression, acc, apply, arg, cast, const, int_or_nan, outputs, scalar, unknown
from .functions import where

_BINARY = {"add": ("+", 5), "sub": ("-", 5), "mul": ("*", 6), "div": ("/", 6), "mod": ("%", 6), "pow": ("**", 8)}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_BINARY_NODES = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Mod: "mod", ast.Pow: "pow", ast.BitAnd: "logical_and",
                 ast.BitOr: "logical_or", ast.BitXor: "logical_xor"}
_COMPARE_NODES = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}


@lru_cache(maxsize=4096)
def written(expression: Expression) -> str:
    users: dict[Expression, int] = {}
    for node in expression.nodes():
        for operand in node.operands:
            users[operand] = users.get(operand, 0) + 1
    taken = set(expression.args) | set(expression.scalars)
    names: dict[Expression, str] = {}
    has_acc = "acc" in expression.args

    def constant(value: float) -> str:
        if not math.isfinite(value):
            return "nan" if value != value else "inf" if value > 0 else "-inf"
        return str(int(value)) if value == int_or_nan(value) and value < 1e15 and value > -1e15 else repr(value)

    def text(node: Expression, level: int) -> str:
        if node in names:
            return names[node]
        if node.operands and users.get(node, 0) > 1 and node.op != "tuple":
            name = f"t{len(names)}"
            while name in taken:
                name = "_" + name
            written = plain(node, 0)
            # Parts of `node` may have taken the number meanwhile.
            index = len(names)
            while (name := f"t{index}") in taken:
                index += 1
            taken.add(name)
            names[node] = name
            return f"({name} := {written})"
        return plain(node, level)

    def plain(node: Expression, level: int) -> str:
        if node.op == "arg":
            name, axis = node.value
            bare = "c" if has_acc and name in CHANNEL_NAMES else None
            return f"{name}[c]" if axis == "c" else f"{name}[:]" if bare == "c" else name
        if node.op == "scalar":
            return f"scalar({node.value})"
        if node.op == "const":
            written, precedence = constant(node.value), 7 if constant(node.value).startswith("-") else 10
        elif node.op == "tuple":
            return ", ".join(text(o, 1) for o in node.operands)
        elif node.op == "cast":
            return f"cast({text(node.operands[0], 1)}, {node.value})"
        elif node.op in _BINARY:
            sign, precedence = _BINARY[node.op]
            right = precedence if node.op == "pow" else precedence + 1
            left = precedence + 1 if node.op == "pow" else precedence
            written = f"{text(node.operands[0], left)} {sign} {text(node.operands[1], right)}"
        elif node.op in _COMPARE:
            precedence = 2
            written = f"{text(node.operands[0], 3)} {_COMPARE[node.op]} {text(node.operands[1], 3)}"
        elif node.op == "neg":
            precedence, written = 7, f"-{text(node.operands[0], 8)}"
        else:
            return f"{node.op}({', '.join(text(o, 1) for o in node.operands)})"
        return f"({written})" if precedence < level else written

    return text(expression, 0)


def parse(source: str | Expression | Any) -> Expression:
    """The expression of a text (module docstring), of a function's name ("gelu" is gelu(acc)), of a name in COMMON ("bias_relu"), or of
    a tuple of these, each an output.

    Raises InvalidArgument naming the part that is off, with near matches of an unknown function.
    """
    if isinstance(source, Expression):
        return source
    if isinstance(source, tuple) and source:
        return outputs(*map(parse, source))
    if not isinstance(source, str):
        raise InvalidArgument(f"expression: {source!r} is no expression (expected text or an Expression).")
    try:
        return _parse(source)
    except RecursionError:
        raise InvalidArgument(f"expression: {source[:40]!r}... nests too deeply (expected fewer operations within each other).") from None


@lru_cache(maxsize=4096)
def _parse(source: str) -> Expression:
    text = COMMON.get(source.strip(), source.strip())
    if text in TABLE:
        return apply(text, acc)
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise InvalidArgument(f"expression: {source!r} does not parse ({error.msg} at column {error.offset}).") from None
    except ValueError as error:  # a null character
        raise InvalidArgument(f"expression: {source!r} does not parse ({error}).") from None
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    word_alone = tree.id if isinstance(tree, ast.Name) and tree.id not in ("acc", "x", "inf", "nan") else ""
    if difflib.get_close_matches(word_alone, [*TABLE, *COMMON], 1, 0.75):
        raise InvalidArgument(unknown(word_alone))
    channel = CHANNEL_NAMES if "acc" in names else ()
    bound: dict[str, Expression] = {}

    def build(node: ast.expr) -> Expression:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return const(node.value)
        if isinstance(node, ast.Name):
            if node.id in bound:
                return bound[node.id]
            if node.id in ("inf", "nan"):
                return const(float(node.id))
            return arg(node.id, "c" if node.id in channel else None)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            if isinstance(node.slice, ast.Name) and node.slice.id == "c":
                return arg(node.value.id, "c")
            if isinstance(node.slice, ast.Slice) and not (node.slice.lower or node.slice.upper or node.slice.step):
                return arg(node.value.id)
        if isinstance(node, ast.NamedExpr):
            bound[node.target.id] = build(node.value)
            return bound[node.target.id]
        if isinstance(node, ast.Tuple) and node.elts:
            return outputs(*map(build, node.elts))
        if isinstance(node, ast.UnaryOp):
            inner = build(node.operand)
            if isinstance(node.op, ast.USub):
                return const(-inner.value) if inner.op == "const" else -inner
            if isinstance(node.op, ast.UAdd):
                return inner
            return apply("logical_not", inner)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY_NODES:
            left = build(node.left)
            return apply(_BINARY_NODES[type(node.op)], left, build(node.right))
        if isinstance(node, ast.BoolOp):
            name = "logical_and" if isinstance(node.op, ast.And) else "logical_or"
            value = build(node.values[0])
            for other in node.values[1:]:
                value = apply(name, value, build(other))
            return value
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE_NODES:
            left = build(node.left)
            return apply(_COMPARE_NODES[type(node.ops[0])], left, build(node.comparators[0]))
        if isinstance(node, ast.IfExp):
            condition = build(node.test)
            return where(condition, build(node.body), build(node.orelse))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return call(node.func.id, node.args)
        raise InvalidArgument(f"expression: {ast.unparse(node)!r} has no meaning here (in {source!r}).")

    def word(node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        raise InvalidArgument(f"expression: {ast.unparse(node)!r} is no name (in {source!r}).")

    def call(name: str, operands: list[ast.expr]) -> Expression:
        if name == "scalar" and len(operands) == 1:
            return scalar(word(operands[0]))
        if name == "arg" and 1 <= len(operands) <= 2:
            return arg(word(operands[0]), word(operands[1]) if len(operands) == 2 else None)
        if name == "cast" and len(operands) == 2:
            return cast(build(operands[0]), word(operands[1]))
        return apply(name, *map(build, operands))

    return build(tree)
