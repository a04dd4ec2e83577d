"""Winograd's matrices, exactly; and that lossy algorithms are taken only where the caller allows them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from oxidnn.device import KNOWN
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.conv_winograd import toom_cook
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

INFO = KNOWN["sm_90a"]


@pytest.mark.parametrize(("outputs", "taps"), [(2, 3), (4, 3), (3, 2), (3, 4)])
def test_matrices_filter(outputs: int, taps: int) -> None:
    """sum_j g[j] d[i + j], in fractions: no rounding hides a wrong entry."""
    back, filter, window = (np.array([[Fraction(v).limit_denominator(1000) for v in row] for row in m]) for m in toom_cook(outputs, taps))
    rng = np.random.default_rng(3)
    g, d = (np.array([Fraction(int(v)) for v in rng.integers(-9, 10, n)]) for n in (taps, outputs + taps - 1))
    got = back @ ((filter @ g) * (window @ d))
    assert list(got) == [sum(g[j] * d[i + j] for j in range(taps)) for i in range(outputs)]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_half_types_are_lossy_by_request_only(kind: str, direction: str) -> None:
    x, w, y = f"{kind}[2,64,56,56]nhwc", f"{kind}[64,64,3,3]nhwc", f"{kind}[2,64,56,56]nhwc"
    tensors = {"fprop": f"x={x} w={w} y={y}", "dgrad": f"dy={y} w={w} dx={x}", "wgrad": f"x={x} dy={y} dw={w}"}[direction]
    for math, allowed in (("ieee", False), ("tf32", False), ("fast", True)):
        problem = parse_case(f"conv_{direction} {tensors} padding=1 math={math}")
        for engine in ENGINES[problem.op]:
            if "winograd_fused" in engine.id:  # of f32 alone
                assert "reads f32" in engine.check_support(problem, INFO).reason
            elif "winograd" in engine.id:
                support = engine.check_support(problem, INFO)
                assert bool(support) == (allowed and (kind == "f16" or "f2x3" in engine.id)), (engine.id, math, support.reason)
                assert support or "digits" in support.reason or "coarse" in support.reason


def test_what_winograd_does_not_take_is_refused_in_words() -> None:
    for math, allowed in (("ieee", False), ("tf32x3", False), ("fast", True)):
        problem = parse_case(f"conv_fprop x=f32[2,8,12,12] w=f32[8,8,3,3] math={math}")
        engines = [e for e in ENGINES["conv_fprop"] if "winograd_f" in e.id and "fused" not in e.id]
        found = {e.id.split("_")[-1]: bool(e.check_support(problem, INFO)) for e in engines}
        assert found == {"f4x3": allowed, "f2x3": True}
    refused = {"w=f32[8,8,5,5]": "5 x 5 taps", "w=f32[8,8,3,3] stride=2": "stride (2, 2)", "w=f32[8,4,3,3] groups=2": "2 groups",
               "w=f32[8,8,3,3] math=tf32": "loses digits", "w=f32[8,8,3,3] workspace_limit=1000": "exceed 1000 bytes"}
    for rest, words in refused.items():
        problem = parse_case(f"conv_fprop x=f32[2,8,12,12] {rest}")
        for engine in ENGINES["conv_fprop"]:
            if "winograd_f2" in engine.id:
                support = engine.check_support(problem, INFO)
                assert not support and words in support.reason, (rest, support.reason)


@pytest.mark.parametrize(("pixel", "output", "least", "most"), [((0, 0), (1, 1), 0.0, 4.0), ((3, 3), (0, 0), 0.0, 4.0),
                                                                ((1, 1), (0, 0), 1e3, 4e6)])
def test_errors_are_of_what_an_output_sees(pixel: tuple[int, int], output: tuple[int, int], least: float, most: float) -> None:
    """F(2 x 2, 3 x 3) in f32: a pixel of 1e6 that an output's window leaves out adds nothing to its error; one that a tap of zero meets
    adds as if the tap were the largest. In units of eps times the output's sum of magnitudes."""
    back, taps, window = (np.array(m, np.float32) for m in toom_cook(2, 3))
    rng, worst = np.random.default_rng(4), 0.0
    i, j = output
    for _ in range(100):
        x, w = rng.standard_normal((4, 4)).astype(np.float32), rng.standard_normal((3, 3)).astype(np.float32)
        w[1, 1] = 0.0
        x[pixel] = 1e6
        got = back @ ((taps @ w @ taps.T) * (window @ x @ window.T)) @ back.T
        terms = x[i:i + 3, j:j + 3].astype(np.float64) * w
        worst = max(worst, abs(float(got[i, j]) - terms.sum()) / (2.0**-23 * np.abs(terms).sum()))
    assert least <= worst < most


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_cta_goes_on_with_other_blocks(layout: str) -> None:
    """Fewer processors than blocks: the ring's stages, the pixels and the filters of the next block follow those of the last."""
    problem = parse_case(f"conv_fprop x=f32[2,9,8,10]{layout} w=f32[70,9,3,3]{layout} y=f32[2,70,8,10]{layout} padding=1")
    backend = EmulatedBackend("sm_90a", checkers="all", schedule=("random", 3))
    backend.info = replace(backend.info, num_sms=2)
    engine = next(e for e in ENGINES[problem.op] if "winograd_fused" in e.id)
    config = engine.configs(problem, backend.info)[0]
    assert config["stages"] == 3 and engine.build_steps(problem, config, backend.info).steps[-1].grid == (2, 1, 1)
    run_problem(backend, problem, engine, config)
