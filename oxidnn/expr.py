"""Pointwise expressions for users: builders, the function table and the parser of oxidnn.codegen.pointwise."""

from .codegen.pointwise import *  # noqa: F403
from .codegen.pointwise import COMMON, TABLE, Expression, acc, arg, cast, const, outputs, parse, scalar, where

__all__ = ["COMMON", "TABLE", "Expression", "acc", "arg", "cast", "const", "outputs", "parse", "scalar", "where", *TABLE]
