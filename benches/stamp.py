"""What a figure must carry: card, driver, versions, commit, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from typing import Any


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def stamp() -> dict[str, Any]:
    """Facts of this run. The commit is git's, or BENCH_COMMIT where the tree has no history."""
    card, _, driver = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").partition("\n")[0].partition(", ")
    versions = {}
    for name in ("oxidnn", "torch", "cuda-bindings", "cuda-core", "nvidia-nvjitlink", "nvidia-cudnn-cu13", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"card": card, "driver": driver, "python": platform.python_version(), "versions": versions,
            "commit": os.environ.get("BENCH_COMMIT") or _output("git", "rev-parse", "--short", "HEAD"),
            "date": datetime.date.today().isoformat(), "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
