"""Verbose lines and once-only warnings: the only module of the library that prints (the command line apart)."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from . import switches
from .errors import OxidnnWarning

_said: set[str] = set()


def topics() -> frozenset[str]:
    return frozenset(t.strip() for t in switches.get("OXIDNN_VERBOSE").split(",") if t.strip())


def is_on(topic: str) -> bool:
    chosen = topics()
    return bool(chosen) and (topic in chosen or "all" in chosen)


def line(topic: str, *fields: object) -> None:
    """Prints `oxidnn,topic,field,...` if the topic is switched on: stable CSV, to standard error or OXIDNN_LOG."""
    if not is_on(topic):
        return
    text = ",".join(("oxidnn", topic, *(str(f) for f in fields)))
    log = switches.get("OXIDNN_LOG")
    if log:
        try:
            with Path(log).open("a", encoding="utf-8") as file:
                file.write(text + "\n")
            return
        except OSError as error:
            warn_once("log", f"OXIDNN_LOG={log} cannot be written ({error}); verbose lines go to standard error.")
    print(text, file=sys.stderr)


def warn_once(cause: str, message: str) -> None:
    """Warns with OxidnnWarning, once per cause and process."""
    if cause not in _said:
        _said.add(cause)
        warnings.warn(message, OxidnnWarning, stacklevel=3)
