"""Every tile of the wgmma main loop assembles for sm_90a without spills or serialised products; refusals name their reason."""

from __future__ import annotations

import re

import numpy as np
import pytest

from oxidnn import ptx
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.affine_wgmma_sm90 import WGMMA_SM90
from oxidnn.engines.matmul import MatmulEngine, lower, lower_group
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble, disassemble
from oxidnn.testing.sample import SAMPLES

DEVICE = known_device("sm_90a")
# The assembler's notes that products are serialised or waits injected.
NOTES = re.compile(r"C7[56]\d\d")
LINES = (
    "gemm a=bf16[4096,4096] b=bf16[4096,4096] transpose_b=True",
    "gemm a=f16[4096,4096] b=f16[4096,4096] bias=f32[4096] epilogue=bias_relu",
    "gemm a=bf16[4096,4096] b=bf16[4096,4096] c=bf16[4096,4096] beta=1.0 bias=f32[4096] epilogue=bias_gelu",
    "gemm a=f32[4096,4096] b=f32[4096,4096] transpose_b=True math=tf32",
    "gemm a=bf16[2048,2048] b=bf16[2048,2048] c=bf16[2048,2048] beta=1.0",
    "gemm a=bf16[512,8192] b=bf16[8192,512] d=f32[512,512](1,512)",
    "conv_fprop x=bf16[128,128,28,28]nhwc w=bf16[128,128,3,3]nhwc padding=1",
    "conv_fprop x=bf16[128,64,56,56]nhwc w=bf16[128,64,3,3]nhwc bias=f32[128] residual=bf16[128,128,28,28]nhwc padding=1 stride=2 "
    "epilogue=bias_residual_relu",
    "conv_dgrad dy=bf16[128,128,28,28]nhwc w=bf16[128,64,3,3]nhwc x_shape=(128,64,56,56) padding=1 stride=2",
    "conv_dgrad dy=bf16[128,512,28,28]nhwc w=bf16[512,256,1,1]nhwc x_shape=(128,256,56,56) stride=2",
    "gemm a=e4m3[4096,4096] b=e5m2[4096,4096] transpose_b=True scale_a=f32[1] scale_b=f32[4096] math=fast",
    "gemm a=s8[4096,4096] b=u8[4096,4096] transpose_b=True scale_a=f32[1] scale_b=f32[4096] bias=f32[4096] epilogue=bias_relu "
    "out_dtype=bf16",
    "gemm a=e4m3[4096,4096] b=e4m3[4096,4096] transpose_b=True scale_a=f32[4096,32] scale_b=f32[32,32]",
    "conv_wgrad x=bf16[128,128,28,28]nhwc dy=bf16[128,128,28,28]nhwc w_shape=(128,128,3,3) padding=1",
)


@pytest.mark.parametrize("line", LINES)
def test_every_tile_assembles(line: str) -> None:
    seen = set()
    problem = parse_case(line)
    group = lower_group(problem)
    for am in (*(am for am in lower(problem) if am.k.size), *((group,) if group else ())):
        assert WGMMA_SM90.check(am, DEVICE), WGMMA_SM90.check(am, DEVICE).reason
        for config in WGMMA_SM90.configs(am, DEVICE):
            for step in WGMMA_SM90.build("op", am, config, DEVICE).steps:
                if step.spec in seen:
                    continue
                seen.add(step.spec)
                text = render(step.spec)
                result = assemble(text, "sm_90a")
                assert result.spill_bytes == 0, f"{result.spill_bytes} bytes spilled: {config.name}"
                assert not NOTES.search(result.log), result.log
                assert text.count("\n") <= 6000, config.name
                assert step.spec.dynamic_smem <= DEVICE.smem_per_cta
                if len(seen) == 1:
                    ptx.validate(ptx.parse(text))
    assert len(seen) >= 3


@pytest.mark.parametrize("op", ["gemm", "conv_dgrad", "conv_transpose"])
def test_wide_tiles_of_random_problems_fit_the_registers(op: str) -> None:
    """Wide accumulators beside the epilogues, digits and layouts that samples draw: where registers are shortest."""
    rng = np.random.default_rng([20261128, *op.encode()])
    engine = MatmulEngine(op, WGMMA_SM90)
    seen: set[object] = set()
    for _ in range(8000):
        if len(seen) >= 8:
            break
        problem = SAMPLES[op](rng, "small")
        if problem.is_empty or not any(o.name not in ("a", "b", "x", "w", "dy") for o in problem.inputs) \
                or not engine.check_support(problem, DEVICE):
            continue
        wide = [c for c in engine.configs(problem, DEVICE) if c["tile_n"] >= 192 or c["tile_m"] * c["tile_n"] >= 192 * 128]
        for config in wide[:2]:
            for step in engine.build_steps(problem, config, DEVICE).steps:
                if step.spec.template == "matmul/wgmma_sm90" and step.spec not in seen:
                    seen.add(step.spec)
                    result = assemble(render(step.spec), "sm_90a")
                    assert result.spill_bytes == 0, f"{result.spill_bytes} bytes spilled: {config.name} of {problem}"
    assert len(seen) >= 4


@pytest.mark.parametrize("line", [LINES[0], LINES[6], LINES[-1]])
def test_machine_code_multiplies_and_copies_asynchronously(line: str) -> None:
    """The loop is products: as many as the k tile takes, all asynchronous, operands by tensor copies, nothing spilled to memory."""
    am = lower(parse_case(line))[0]
    config = next(c for c in WGMMA_SM90.configs(am, DEVICE)
                  if (c["schedule"], c["loader"], c["tile_m"], c["tile_n"]) == ("coop", "boxes", 128, 128))
    sass = disassemble(assemble(render(WGMMA_SM90.build("op", am, config, DEVICE).steps[0].spec), "sm_90a").cubin)
    if sass is None:
        pytest.skip("nvdisasm is not installed")
    assert len(re.findall(r"\bHGMMA\.64x128x16\.F32\.BF16", sass)) == 4
    assert "UTMALDG" in sass
    assert not re.search(r"\b(LDL|STL)\b", sass)


@pytest.mark.parametrize(("line", "reason"), [
    ("gemm a=bf16[64,60] b=bf16[60,64]", "120 bytes"),
    ("gemm a=bf16[64,64]@8 b=bf16[64,64]", "aligned to 8 bytes"),
    ("gemm a=f32[64,64] b=f32[64,64] math=tf32", "neither along k"),
    ("gemm a=e4m3[64,64] b=e4m3[64,64]", "neither along k"),
    ("gemm a=s8[64,72] b=s8[64,72] transpose_b=True", "72 bytes"),
    ("gemm a=e4m3[64,256] b=e4m3[64,256] transpose_b=True scale_a=f32[64,2] scale_b=f32[2,64]", "among the 64 columns"),
    ("gemm a=f32[64,64] b=f32[64,64]", "rounds f32 to tf32"),
    ("conv_fprop x=bf16[2,64,9,10] w=bf16[64,64,3,3] padding=1", "a bound ties"),
    ("conv_fprop x=bf16[2,64,300,300]nhwc w=bf16[64,64,3,3]nhwc padding=130 dilation=130", "exceed 8 bits"),
    ("conv_wgrad x=bf16[2,72,9,9]nhwc dy=bf16[2,72,9,9]nhwc w_shape=(72,72,3,3) padding=1", "linear walk"),
])
def test_refusals(line: str, reason: str) -> None:
    problem = parse_case(line)
    support = MatmulEngine(problem.op, WGMMA_SM90).check_support(problem, DEVICE)
    assert not support and reason in support.reason, support.reason


def test_other_targets_are_refused() -> None:
    am = lower(parse_case(LINES[0]))[0]
    assert "sm_90a" in WGMMA_SM90.check(am, known_device("sm_80")).reason
