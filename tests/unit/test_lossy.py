"""Winograd and Fourier transforms of 16-bit types are never chosen unless the caller says math="fast": not by estimate, not as measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.dispatch.select import choose_by
from oxidnn.dispatch.tuning_db import Row
from oxidnn.dtypes import BF16, F16
from oxidnn.ops.base import MATH, Policy, Problem
from oxidnn.ops.case import parse_case
from oxidnn.testing.sample import SAMPLES

OPS = [op for op in ENGINES if op.startswith("conv_") and any("winograd" in e.id or "fft" in e.id for e in ENGINES[op])]
INFO = known_device("sm_90a")


def problems(op: str) -> list[Problem]:
    """What such algorithms are made for, in halves: layers of networks, large filters, and random problems, without a word on precision."""
    lines = []
    for kind, (n, c, k, extent, taps) in zip(("f16", "bf16") * 3, ((2, 64, 64, 56, 3), (1, 512, 512, 14, 3), (8, 16, 16, 8, 3),
                                                                   (1, 3, 32, 32, 9), (1, 4, 4, 40, 15), (2, 1, 1, 64, 3)), strict=True):
        x, w, y = (f"{kind}[{a},{b},{e},{e}]nhwc" for a, b, e in ((n, c, extent), (k, c, taps), (n, k, extent)))
        by_op = {"conv_fprop": f"x={x} w={w}", "conv_dgrad": f"dy={y} w={w} dx={x}", "conv_wgrad": f"x={x} dy={y} dw={w}",
                 "conv_transpose": f"x={y} w={w}", "conv_transpose_dgrad": f"dy={x} w={w} dx={y}",
                 "conv_transpose_wgrad": f"x={y} dy={x} dw={w}"}
        lines.append(f"{op} {by_op[op]} padding={taps // 2}")
    found = [parse_case(line) for line in lines]
    rng = np.random.default_rng(len(op))
    while len(found) < 60:
        drawn = SAMPLES[op](rng, "small")
        if drawn.inputs[0].desc.dtype in (F16, BF16) and not drawn.is_empty:
            found.append(replace(drawn, policy=Policy()))
    return found


def takes(problem: Problem, math: str, deterministic: bool = False) -> set[str]:
    asked = replace(problem, policy=Policy(deterministic, math))
    return {e.id for e in ENGINES[problem.op] if e.check_support(asked, INFO)}


@pytest.mark.parametrize("op", OPS)
def test_lossy_engines_are_by_request_only(op: str) -> None:
    named = {e.id for e in ENGINES[op] if "winograd" in e.id or "fft" in e.id}
    tried: set[str] = set()
    for problem in problems(op):
        default = takes(problem, "ieee")
        on_request = takes(problem, "fast") - default
        assert on_request <= named, "an engine that wants math=\"fast\" for halves is one of those that lose digits"
        tried |= on_request
        for math in MATH:
            if math != "fast":
                assert not takes(problem, math) & named and not takes(problem, math, True) & named
        # Nor do measurements bring one in, however fast it was.
        fast = replace(problem, policy=Policy(math="fast"))
        rows = [Row("", 0, "", "", "", e.id, config.name, 0.001, "", "", 0.0)
                for e in ENGINES[op] if e.id in on_request for config in e.configs(fast, INFO)]
        engine, _, _ = choose_by(problem, INFO, rows)
        assert engine.id not in named
    assert {name.rsplit(".", 1)[1].split("_")[0] for name in tried} == {"winograd", "fft"}, "both would take some of the problems"
