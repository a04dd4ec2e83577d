"""Checkers observe an execution; they are told of every access and change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NAMES = ("bounds", "align", "uninit", "race", "barrier", "bank")
BASIC = frozenset({"bounds", "align", "uninit", "barrier"})
CHECKERS: dict[str, Any] = {}


def expand(checkers: str | Sequence[str]) -> frozenset[str]:
    """The set of checkers that a launch asks for."""
    if checkers == "basic":
        return BASIC
    if checkers == "all":
        return BASIC | {"race"}
    if isinstance(checkers, str):
        checkers = (checkers,)
    unknown = set(checkers) - set(NAMES)
    if unknown:
        raise ValueError(f"launch: checkers has {sorted(unknown)[0]!r} (expected names out of {', '.join(NAMES)})")
    return frozenset(checkers)
