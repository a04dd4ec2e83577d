"""Strips of few channels in the emulator with all checkers, against float64 references, on a device of two SMs."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.affine_strip_sm90 import STRIP_GRADIENT_SM90, STRIP_SM90
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble, disassemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem

LINES = (
    "conv_fprop x=bf16[2,3,16,16]nhwc w=bf16[16,3,7,7]nhwc padding=3 stride=2",
    "conv_fprop x=f16[1,3,20,24]nhwc w=f16[24,3,3,3]nhwc padding=1 stride=2 bias=f32[24] epilogue=bias_relu",
    "conv_fprop x=bf16[3,3,16,16]nhwc w=bf16[96,3,4,4]nhwc stride=4",
    "conv_fprop x=bf16[2,8,9,10]nhwc w=bf16[72,8,3,3]nhwc padding=1",
    "conv_fprop x=bf16[2,4,9,12]nhwc w=bf16[72,4,3,5]nhwc padding='((0,1),(2,0))' stride=(2,1)",
    "conv_fprop x=bf16[2,1,33,40]nhwc w=bf16[8,1,5,5]nhwc y=bf16[2,8,17,20]nhwc padding=2 stride=2",
    "conv_fprop x=bf16[9,3,30,32]nhwc w=bf16[64,3,7,7]nhwc padding=3 stride=2",
    "conv_transpose_dgrad dy=bf16[2,3,16,16]nhwc w=bf16[16,3,4,4]nhwc x_shape=(2,16,8,8) padding=1 stride=2",
    "conv_wgrad x=bf16[2,3,32,32]nhwc dy=bf16[2,64,16,16]nhwc w_shape=(64,3,7,7) padding=3 stride=2",
    "conv_wgrad x=f16[3,3,24,56]nhwc dy=f16[3,24,12,28]nhwc w_shape=(24,3,3,3) padding=1 stride=2",
    "conv_wgrad x=bf16[2,3,16,64]nhwc dy=bf16[2,96,4,16]nhwc w_shape=(96,3,4,4) stride=4",
    "conv_wgrad x=bf16[2,8,9,11]nhwc dy=bf16[2,72,9,11]nhwc w_shape=(72,8,3,3) padding=1",
    "conv_wgrad x=bf16[2,1,9,24]nhwc dy=bf16[2,8,9,21]nhwc w_shape=(8,1,3,4) padding='((1,1),(0,0))'",
    "conv_transpose_wgrad x=bf16[2,16,8,8]nhwc dy=bf16[2,3,16,16]nhwc w_shape=(16,3,4,4) padding=1 stride=2",
)


def _engine(op: str) -> MatmulEngine:
    return MatmulEngine(op, STRIP_GRADIENT_SM90 if op.endswith("wgrad") else STRIP_SM90)


@pytest.mark.parametrize("line", LINES)
def test_against_the_reference(line: str) -> None:
    backend = EmulatedBackend("sm_90a", checkers="all")
    backend.info = replace(backend.info, num_sms=2)
    problem = parse_case(line)
    engine = _engine(problem.op)
    support = engine.check_support(problem, backend.info)
    assert support, support.reason
    for config in engine.configs(problem, backend.info):
        run_problem(backend, problem, engine, config, seed=len(line))


def test_elements_beside_a_window_do_not_touch_it() -> None:
    """k is padded to whole products by pixels beside the window: what is infinite there must not make NaN."""
    backend = EmulatedBackend("sm_90a")
    problem = parse_case("conv_fprop x=bf16[1,3,16,16]nhwc w=bf16[16,3,7,7]nhwc padding=3 stride=2")
    engine = MatmulEngine(problem.op, STRIP_SM90)
    rng = np.random.default_rng(5)
    inputs = {o.name: rng.standard_normal(o.desc.shape).astype(o.desc.dtype.numpy) for o in problem.inputs}
    inputs["x"][0, :, 8, 9] = np.inf
    y = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], inputs)["y"].astype(np.float64)[0]
    # Pixel (8, 9) lies in the windows of positions p with |2 p - pixel| <= 3.
    touched = np.abs(2 * np.arange(8) - 8)[:, None] <= 3
    touched = touched & (np.abs(2 * np.arange(8) - 9)[None, :] <= 3)
    assert np.isfinite(y[:, ~touched]).all() and not np.isfinite(y[:, touched]).any()


def test_the_gradient_of_the_stem_assembles() -> None:
    problem = parse_case("conv_wgrad x=bf16[128,3,224,224]nhwc dy=bf16[128,64,112,112]nhwc w_shape=(64,3,7,7) padding=3 stride=2")
    device = known_device("sm_90a")
    engine = MatmulEngine(problem.op, STRIP_GRADIENT_SM90)
    result = assemble(render(engine.build_steps(problem, engine.configs(problem, device)[0], device).steps[0].spec), "sm_90a")
    assert result.spill_bytes == 0
    assert "C75" not in result.log, result.log


def test_the_stem_assembles_and_multiplies_from_registers() -> None:
    problem = parse_case("conv_fprop x=bf16[128,3,224,224]nhwc w=bf16[64,3,7,7]nhwc padding=3 stride=2")
    device = known_device("sm_90a")
    engine = MatmulEngine(problem.op, STRIP_SM90)
    (step,) = engine.build_steps(problem, engine.configs(problem, device)[0], device).steps
    result = assemble(render(step.spec), "sm_90a")
    assert result.spill_bytes == 0
    assert "C75" not in result.log, result.log
    sass = disassemble(result.cubin)
    if sass is None:
        pytest.skip("nvdisasm is not installed")
    assert len(re.findall(r"\bHGMMA\.64x64x16\.F32\.BF16 R\d+, R\d+", sass)) == 11  # 7 rows of 24 elements, A from registers
    assert "UTMALDG" in sass and "UTMASTG" in sass
    assert not re.search(r"\b(LDL|STL)\b", sass)
