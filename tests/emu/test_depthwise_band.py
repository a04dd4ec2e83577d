"""Depthwise convolution by bands in the emulator with all checkers, against float64 references, on a device of two SMs: rings that turn
several times, parts with several items, tiles, strips and images that hang over, even numbers of taps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.conv_depthwise_band import ENGINES
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem

LINES = (
    "conv_fprop x=bf16[5,24,7,7]nhwc w=bf16[24,1,7,7] padding=3 groups=24",
    "conv_dgrad dy=bf16[3,40,14,14]nhwc w=bf16[40,1,5,5]nhwc x_shape=(3,40,14,14) padding=2 groups=40",
    "conv_fprop x=bf16[2,64,9,70]nhwc w=bf16[64,1,3,3] padding=1 groups=64",
    "conv_fprop x=bf16[1,32,5,9]nhwc w=bf16[32,1,3,2] y=f16[1,32,20,9]nhwc padding='((9,8),(0,1))' groups=32",
    "conv_dgrad dy=f16[2,16,9,6]nhwc w=f16[16,1,4,5] x_shape=(2,16,11,9) padding='((0,1),(0,1))' groups=16 flip=True",
    "conv_fprop x=bf16[1,8,3,40]nhwc w=bf16[8,1,1,8] groups=8",
    "conv_dgrad dy=f16[3,24,70]nhwc w=f16[24,1,4] x_shape=(3,24,70) padding='((3,0),)' groups=24",
    "conv_fprop x=bf16[1,96,5,140]nhwc w=bf16[96,1,3,5] padding='(1,2)' groups=96",
    "conv_transpose x=bf16[2,32,6,7]nhwc w=bf16[32,1,3,3] padding=1 groups=32",
    "conv_wgrad x=f16[3,64,9,20]nhwc dy=f16[3,64,9,20]nhwc w_shape=(64,1,3,3) padding=1 groups=64",
    "conv_wgrad x=bf16[5,24,7,7]nhwc dy=bf16[5,24,7,7]nhwc w_shape=(24,1,7,7) padding=3 groups=24",
    "conv_wgrad x=bf16[2,16,11,13]nhwc dy=bf16[2,16,9,14]nhwc w_shape=(16,1,5,4) padding='((0,2),(3,1))' groups=16 flip=True",
    "conv_wgrad x=bf16[1,8,12,17]nhwc dy=bf16[1,8,7,13]nhwc w_shape=(8,1,6,5) groups=8",
    "conv_wgrad x=bf16[1,8,3,2]nhwc dy=bf16[1,8,9,6]nhwc w_shape=(8,1,3,3) padding='((4,4),(2,4))' groups=8",
    "conv_wgrad x=f16[1,8,2,3]nhwc dy=f16[1,8,1,3]nhwc w_shape=(8,1,2,1) groups=8",
    "conv_wgrad x=bf16[3,32,1,30]nhwc dy=bf16[3,32,4,29]nhwc w_shape=(32,1,1,5) padding='((1,2),(2,1))' groups=32",
    "conv_wgrad x=bf16[1,96,5,140]nhwc dy=bf16[1,96,5,140]nhwc w_shape=(96,1,3,5) padding='(1,2)' groups=96",
    "conv_transpose_wgrad x=bf16[3,96,20]nhwc dy=bf16[3,96,23]nhwc w_shape=(96,1,4) groups=96",
)


@pytest.mark.parametrize("line", LINES)
def test_against_the_reference(line: str) -> None:
    backend = EmulatedBackend("sm_90a", checkers="all")
    backend.info = replace(backend.info, num_sms=2)
    problem = parse_case(line)
    (engine,) = ENGINES[problem.op]
    support = engine.check_support(problem, backend.info)
    assert support, support.reason
    shapes = {tuple(c[k] for k in ("groups", "own", "strip")): c for c in engine.configs(problem, backend.info)}
    for config in shapes.values():
        run_problem(backend, problem, engine, config, seed=len(line))


def test_an_infinity_stays_in_its_channel() -> None:
    """And, along a row, within a window of 16 positions: products with diagonals spread it over 8 channels."""
    backend = EmulatedBackend("sm_90a")
    problem = parse_case("conv_fprop x=bf16[1,16,3,48]nhwc w=bf16[16,1,3,3] padding=1 groups=16")
    (engine,) = ENGINES[problem.op]
    rng = np.random.default_rng(0)
    inputs = {o.name: rng.normal(size=o.desc.shape).astype(o.desc.dtype.numpy) for o in problem.inputs}
    inputs["x"][0, 5, 1, 20] = np.inf
    y = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], inputs)["y"].astype(np.float64)
    assert not np.isfinite(y[0, 5, :, 19:22]).any()
    assert np.isfinite(np.delete(y, 5, axis=1)).all() and np.isfinite(y[0, 5, :, :8]).all() and np.isfinite(y[0, 5, :, 32:]).all()


@pytest.mark.parametrize("op", ("conv_wgrad", "conv_fprop"))
@pytest.mark.parametrize("layer", ("56,96,7", "28,240,5", "56,144,3"))
def test_no_register_is_spilled(op: str, layer: str) -> None:
    """Of any shape of a CTA."""
    size, channels, taps = map(int, layer.split(","))
    x = f"bf16[128,{channels},{size},{size}]nhwc"
    filter = f"dy={x} w_shape=({channels},1,{taps},{taps})" if op == "conv_wgrad" else f"w=bf16[{channels},1,{taps},{taps}]"
    problem = parse_case(f"{op} x={x} {filter} padding={taps // 2} groups={channels}")
    device = known_device("sm_90a")
    (engine,) = ENGINES[op]
    for config in {tuple(c[k] for k in ("groups", "own")): c for c in engine.configs(problem, device)}.values():
        result = assemble(render(engine.build_steps(problem, config, device).steps[0].spec), "sm_90a")
        assert result.spill_bytes == 0 and result.stack_bytes == 0, config.name
