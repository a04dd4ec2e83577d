"""Checkers observe an execution; they are told of every access and change nothing.

bounds, align, uninit, barrier and async are part of the instructions themselves (they keep the process safe, or need what
the instruction knows); race and bank conflicts live here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NAMES = ("bounds", "align", "uninit", "race", "barrier", "async", "bank")
BASIC = frozenset({"bounds", "align", "uninit", "barrier", "async"})


def observer(name: str, of: Any) -> Any:
    """A fresh observer for a State (race, bank) or a Launch (global_race)."""
    from oxidnn.emu.checkers.bank import Banks
    from oxidnn.emu.checkers.global_race import GlobalRace
    from oxidnn.emu.checkers.race import SharedRace

    return {"race": SharedRace, "bank": Banks, "global_race": GlobalRace}[name](of)


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
