"""Depthwise convolution on wgmma in the emulator with all checkers, against float64 references, on a device of two SMs: rings that turn
several times, parts with several items, tiles, strips and images that hang over, even numbers of taps."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.conv_depthwise_wgmma import ENGINES
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble, disassemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

LINES = (
    "conv_wgrad x=bf16[5,24,7,7]nhwc dy=bf16[5,24,7,7]nhwc w_shape=(24,1,7,7) padding=3 groups=24",
    "conv_wgrad x=bf16[2,40,14,14]nhwc dy=bf16[2,40,14,14]nhwc w_shape=(40,1,7,7) padding=3 groups=40",
    "conv_wgrad x=f16[3,64,9,20]nhwc dy=f16[3,64,9,20]nhwc w_shape=(64,1,3,3) padding=1 groups=64",
    "conv_wgrad x=bf16[2,16,11,13]nhwc dy=bf16[2,16,9,14]nhwc w_shape=(16,1,5,4) padding='((0,2),(3,1))' groups=16 flip=True",
    "conv_wgrad x=bf16[1,8,12,17]nhwc dy=bf16[1,8,7,13]nhwc w_shape=(8,1,6,5) groups=8",
    "conv_wgrad x=bf16[1,8,3,2]nhwc dy=bf16[1,8,9,6]nhwc w_shape=(8,1,3,3) padding='((4,4),(2,4))' groups=8",
    "conv_wgrad x=f16[1,8,2,3]nhwc dy=f16[1,8,1,3]nhwc w_shape=(8,1,2,1) groups=8",
    "conv_transpose_wgrad x=bf16[2,32,6,7]nhwc dy=bf16[2,32,6,7]nhwc w_shape=(32,1,3,3) padding=1 groups=32",
    "conv_fprop x=bf16[5,24,7,7]nhwc w=bf16[24,1,7,7] padding=3 groups=24",
    "conv_dgrad dy=bf16[3,40,14,14]nhwc w=bf16[40,1,5,5]nhwc x_shape=(3,40,14,14) padding=2 groups=40",
    "conv_fprop x=bf16[2,64,9,70]nhwc w=bf16[64,1,3,3] padding=1 groups=64",
    "conv_fprop x=bf16[1,32,5,9]nhwc w=bf16[32,1,3,2] y=f16[1,32,20,9]nhwc padding='((9,8),(0,1))' groups=32",
    "conv_dgrad dy=f16[2,16,9,6]nhwc w=f16[16,1,4,5] x_shape=(2,16,11,9) padding='((0,1),(0,1))' groups=16 flip=True",
    "conv_fprop x=bf16[1,8,3,40]nhwc w=bf16[8,1,1,8] groups=8",
    "conv_dgrad dy=f16[3,24,70]nhwc w=f16[24,1,4] x_shape=(3,24,70) padding='((3,0),)' groups=24",
    "conv_wgrad x=bf16[3,72,3,70]nhwc dy=bf16[3,72,2,70]nhwc w_shape=(72,1,2,5) padding='((0,0),(2,2))' groups=72",
    "conv_transpose_wgrad x=bf16[3,96,20]nhwc dy=bf16[3,96,23]nhwc w_shape=(96,1,4) groups=96",
    "conv_wgrad x=bf16[3,32,1,30]nhwc dy=bf16[3,32,4,29]nhwc w_shape=(32,1,1,5) padding='((1,2),(2,1))' groups=32",
    "conv_transpose x=bf16[2,32,6,7]nhwc w=bf16[32,1,3,3] padding=1 groups=32",
)


@pytest.mark.parametrize("line", LINES)
def test_against_the_reference(line: str) -> None:
    backend = EmulatedBackend("sm_90a", checkers="all")
    backend.info = replace(backend.info, num_sms=2)
    problem = parse_case(line)
    (engine,) = ENGINES[problem.op]
    support = engine.check_support(problem, backend.info)
    assert support, support.reason
    shapes = {(c["groups"], c["blocks"], c["images"], c["strip"]): c for c in engine.configs(problem, backend.info)}
    for config in shapes.values():
        run_problem(backend, problem, engine, config, seed=len(line))


@pytest.mark.parametrize("line", [line for line in LINES if "wgrad" in line])
def test_operands_end_within_memory_as_memcheck_takes_them(line: str) -> None:
    """It takes columns of 16 x 2 bytes each to follow the first line, whatever the descriptor says of neighbouring taps' lines."""
    problem, device = parse_case(line), known_device("sm_90a")
    (engine,) = ENGINES[problem.op]
    for config in engine.configs(problem, device):
        c = engine.build_steps(problem, config, device).steps[0].spec.consts
        last = max(c.line_of(first) for first, _ in c.products)
        assert (2 * c.groups - 1) * c.lines_bytes + 16 * last + 32 * c.columns <= c.smem_bytes, config.name


@pytest.mark.parametrize("op", ("conv_wgrad", "conv_fprop"))
@pytest.mark.parametrize("layer", ("56,96", "28,192", "7,768"))
def test_all_taps_are_products_of_eight_channels(op: str, layer: str) -> None:
    """No register spilled, nothing serialised; registers that products read are left alone until these are done: an assembler has put
    moves to them before the wait."""
    size, channels = map(int, layer.split(","))
    x = f"bf16[128,{channels},{size},{size}]nhwc"
    problem = parse_case(f"conv_wgrad x={x} dy={x} w_shape=({channels},1,7,7) padding=3 groups={channels}" if op == "conv_wgrad" else
                         f"conv_fprop x={x} w=bf16[{channels},1,7,7] padding=3 groups={channels}")
    device = known_device("sm_90a")
    (engine,) = ENGINES[op]
    for config in {c["groups"]: c for c in engine.configs(problem, device)}.values():
        step = engine.build_steps(problem, config, device).steps[0]
        result = assemble(render(step.spec), "sm_90a")
        assert result.spill_bytes == 0, config.name
        assert "C75" not in result.log, result.log
        sass = disassemble(result.cubin)
        if sass is None:
            pytest.skip("nvdisasm is not installed")
        lines = sass.split("\n")
        products = [(i, m) for i, line in enumerate(lines) if (m := re.search(r"\bHGMMA\.64x56x16\.F32\.BF16 R\d+, R(\d+), gdesc", line))]
        assert len(products) == (len(step.spec.consts.products) if op == "conv_wgrad" else 28)
        read = {int(m[1]) + i for _, m in products for i in range(4)}
        waits = [i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line]
        spans = [(i, min(w for w in waits if w > i)) for i, _ in products]
        if op == "conv_wgrad":  # products are under way when the next step begins
            back = next(m[1] for line in lines[products[-1][0]:] if (m := re.search(r"@!?P\d BRA `\((\.L_x_\d+)\)", line)))
            begin = lines.index(f"{back}:")
            spans.append((begin, min(w for w in waits if w > begin)))
        for begin, end in spans:
            written = {int(m[1]) for line in lines[begin:end] if "HGMMA" not in line and (m := re.search(r"\b[A-Z][\w.]* R(\d+),", line))}
            assert not written & read, (config.name, written & read)


@pytest.mark.parametrize("line", ["conv_wgrad x=bf16[1,8,4,259]nhwc dy=bf16[1,8,3,257]nhwc w_shape=(8,1,2,3) groups=8",
                                  "conv_wgrad x=bf16[1,48,8,68]nhwc dy=bf16[1,48,8,68]nhwc w_shape=(48,1,7,7) padding=3 groups=48"])
def test_what_no_tile_fits_is_refused(line: str) -> None:
    problem, device = parse_case(line), known_device("sm_90a")
    (engine,) = ENGINES[problem.op]
    assert "fits the registers" in engine.check_support(problem, device).reason
