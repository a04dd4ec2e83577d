"""Every OXIDNN_* variable: name, default, meaning. Nothing else in the package reads os.environ."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Switch:
    """words: what each comma-separated word may be; empty: anything."""

    name: str
    default: str
    meaning: str
    words: tuple[str, ...] = ()


TABLE: dict[str, Switch] = {
    s.name: s
    for s in (
        Switch("OXIDNN_VERBOSE", "", "comma list of plan, dispatch, assemble, cache, launch, tune, exec; or all: prints a line each",
               ("plan", "dispatch", "assemble", "cache", "launch", "tune", "exec", "all")),
        Switch("OXIDNN_DUMP", "", "DIR[:ptx,cubin,sass,log]: keeps what was generated"),
        Switch("OXIDNN_CACHE_DIR", "", "where cubins and the tuning database live (default: the user cache directory)"),
        Switch("OXIDNN_CACHE", "rw", "rw | ro | off: use of the cubin store", ("rw", "ro", "off")),
        Switch("OXIDNN_TUNE", "db", "off | db | auto | force: how a plan's engine is chosen", ("off", "db", "auto", "force")),
        Switch("OXIDNN_ENGINES", "", "filters engines by id pattern, e.g. '-*mma*' or '+*simt*,-*'"),
        Switch("OXIDNN_ASSEMBLER", "auto", "auto | nvjitlink | driver", ("auto", "nvjitlink", "driver")),
        Switch("OXIDNN_CHECK", "", "comma list of sync, resources (GPU); race, uninit, bounds, align, barrier, bank or all (emulator)",
               ("sync", "resources", "race", "uninit", "bounds", "align", "barrier", "bank", "basic", "all")),
        Switch("OXIDNN_DETERMINISTIC", "0", "1: only engines that give the same bits run to run", ("0", "1")),
        Switch("OXIDNN_MATH", "ieee", "ieee | tf32 | tf32x3 | bf16x3 | fast: f32 products of a handle (a case says its own)",
               ("ieee", "tf32", "tf32x3", "bf16x3", "fast")),
        Switch("OXIDNN_DEVICE", "", "cuda:N | emu:sm_XY: the device of DnnHandle() when none is named"),
        Switch("OXIDNN_TEMPLATE_PATH", "", "directories searched for templates before the package's own"),
        Switch("OXIDNN_LOG", "", "a file that verbose lines are appended to instead of standard error"),
    )
}


def get(name: str) -> str:
    """The switch's value: the environment's, else the default. Raises InvalidArgument for a word the switch does not know."""
    switch = TABLE[name]
    value = os.environ.get(name) or switch.default
    if switch.words:
        for word in filter(None, (w.strip() for w in value.split(","))):
            if word not in switch.words:
                raise InvalidArgument(f"{name}: {word!r} is no value of it (expected {' | '.join(switch.words)}).")
    return value


def source(name: str) -> str:
    """Where the value of a switch comes from: "environment" or "default"."""
    return "environment" if os.environ.get(name) else "default"
