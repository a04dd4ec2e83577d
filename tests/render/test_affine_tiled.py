"""Every tile shape of the tiled matmuls assembles for both targets: no spills, bounded text, parameters within 4 KB."""

from __future__ import annotations

import re

import pytest

from oxidnn import ptx
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.affine_mma_sm80 import MMA_SM80
from oxidnn.engines.affine_simt import SIMT
from oxidnn.engines.base import EngineConfig
from oxidnn.engines.matmul import lower
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble, disassemble

LINES = (
    "conv_fprop x={t}[128,64,28,28]nhwc w={t}[128,64,3,3]nhwc y={t}[128,128,28,28]nhwc bias=f32[128] residual={t}[128,128,28,28]nhwc "
    "padding=1 epilogue=bias_residual_relu",
    "conv_fprop x={t}[128,5,28,28]nhwc w={t}[128,5,3,3]nhwc y={t}[128,128,28,28]nhwc padding=1",
    "conv_fprop x={t}[16,64,9,28,28] w={t}[128,64,3,3,3] padding=1 stride=2",
    "conv_wgrad x={t}[128,64,28,28]nhwc dy={t}[128,128,28,28]nhwc dw={t}[128,64,3,3]nhwc padding=1",
    "gemm a={t}[4,1024,1024](1048576,1,1024) b={t}[4,1024,1024]",
)
KINDS = (("bf16", MMA_SM80, ""), ("f16", MMA_SM80, ""), ("f32", MMA_SM80, " math=tf32"), ("f32", MMA_SM80, " math=tf32x3"),
         ("f32", MMA_SM80, " math=bf16x3"), ("f32", SIMT, ""), ("f64", SIMT, ""))


ARCHS = ("sm_75", "sm_80", "sm_90a")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(("kind", "algorithm", "math"), KINDS, ids=lambda k: getattr(k, "name", k))
def test_every_tile_shape_assembles(line: str, kind: str, algorithm, math: str, arch: str) -> None:  # type: ignore[no-untyped-def]
    device = known_device(arch)
    turn = (LINES.index(line) + KINDS.index((kind, algorithm, math)) + ARCHS.index(arch)) % len(LINES)
    if turn > ((kind, math) == ("bf16", "")) and (kind, math, arch) != ("bf16", "", "sm_90a"):
        pytest.skip("one of the lines in turn; for bf16 all on sm_90a and two on sm_80")
    if arch == "sm_75" and algorithm is MMA_SM80 and kind != "f16" or kind == "f16" and arch != "sm_75":
        pytest.skip("sm_75 multiplies f16 only; elsewhere bf16 stands for it")
    seen = set()
    for am in lower(parse_case(line.format(t=kind) + math))[:1]:
        for config in algorithm.configs(am, device):
            shape = tuple(knob for knob in config.knobs if knob[0] != "split_k")
            if shape in seen:
                continue
            seen.add(shape)
            for step in algorithm.build("conv", am, config, device, 0).steps:
                text = render(step.spec)
                result = assemble(text, arch)
                assert result.spill_bytes == 0, f"{result.spill_bytes} bytes spilled: {step.spec.describe()}"
                assert text.count("\n") <= (10000 if "x3" in math else 6000), config.name  # of parts, three products each, twice
                assert sum(8 if p.type in ("u64", "s64") else 4 for p in step.spec.params) < 4096
                if len(seen) == 1 and arch != "sm_75":  # which the instruction table does not know
                    ptx.validate(ptx.parse(text))
    assert len(seen) >= (2 if math == " math=bf16x3" else 3), f"{len(seen)} tile shapes are left"


@pytest.mark.parametrize(("kinds", "arch"), [(("s8", "u8"), "sm_80"), (("s8", "s8"), "sm_90a"), (("e4m3", "e5m2"), "sm_89"),
                                             (("e4m3", "e4m3"), "sm_120a")])
def test_8_bit_tiles_assemble(kinds: tuple[str, str], arch: str) -> None:
    device = known_device(arch)
    line = f"gemm a={kinds[0]}[1024,1024] b={kinds[1]}[1024,1024] transpose_b=True d=bf16[1024,1024] scale_a=f32[1024] scale_b=f32[1]"
    am = lower(parse_case(line))[0]
    assert MMA_SM80.check(am, device)
    for config in MMA_SM80.configs(am, device):
        spec = MMA_SM80.build("gemm", am, config, device, 0).steps[0].spec
        assert assemble(render(spec), arch).spill_bytes == 0, config.name


def test_nhwc_convolutions_use_wide_copies_and_tensor_cores() -> None:
    """What makes the loop fast must not get lost: 16-byte copies past the registers, matrix loads, and few other instructions."""
    device = known_device("sm_90a")
    for line in (LINES[0], LINES[3]):
        am = lower(parse_case(line.format(t="bf16")))[0]
        config = next(c for c in MMA_SM80.configs(am, device) if (c["tile_m"], c["tile_n"], c["tile_k"], c["warps_n"]) == (128, 128, 32, 2))
        sass = disassemble(assemble(render(MMA_SM80.build("conv", am, config, device, 0).steps[0].spec), "sm_90a").cubin)
        if sass is None:
            pytest.skip("nvdisasm is not installed")
        assert "HMMA.16816.F32.BF16" in sass and "LDSM.16" in sass and "STG.E.128" in sass
        copies = [line for line in sass.splitlines() if "LDGSTS" in line]
        assert copies and all(".128 " in line for line in copies)
        assert "STL" not in sass and "LDL" not in sass


@pytest.mark.parametrize("shape", [(256, 128, 32, 4, 2, 4), (128, 128, 32, 2, 2, 4), (128, 128, 64, 2, 2, 3)], ids=str)
@pytest.mark.parametrize("line", [LINES[0], LINES[3]])
def test_fragments_come_long_before_they_are_multiplied(line: str, shape: tuple[int, ...]) -> None:
    """In the machine code of the main loop every matrix load but one stands at least 12 mma's before the first that needs it: the assembler
    moves no load past a copy, and spread copies keep it from holding loads back."""
    names = ("tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "stages")
    config = EngineConfig.of(**dict(zip(names, shape, strict=True)), sync="late", split_k=1)
    am = lower(parse_case(line.format(t="bf16")))[0]
    text = render(MMA_SM80.build("conv", am, config, known_device("sm_90a"), 0).steps[0].spec)
    sass = disassemble(assemble(text, "sm_90a").cubin)
    if sass is None:
        pytest.skip("nvdisasm is not installed")
    ahead = mmas_ahead(main_loop(sass))
    assert len(ahead) == 8 * shape[2] // 16 and sum(count < 12 for count in ahead) <= 1, ahead


def main_loop(sass: str) -> list[str]:
    """The instructions of the loop with the most mma's."""
    code: list[str] = []
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
            back = re.search(r"BRA.*?(\.L_\w+)", instruction[1])
            if back and back[1] in labels:
                loops.append(code[labels[back[1]]:])
    return max(loops, key=lambda loop: sum("HMMA" in i for i in loop))


def mmas_ahead(loop: list[str]) -> list[int]:
    """Of each matrix load, how many mma's are issued before the first that reads its registers, in this round or the next."""
    found = []
    for at, load in enumerate(loop):
        if load.startswith("LDSM"):
            first, count = int(re.search(r"R(\d+)", load)[1]), 0  # type: ignore[index]
            for later in (*loop[at + 1:], *loop[:at]):
                if "HMMA" in later:
                    _, a, b, *_ = (int(r) for r in re.findall(r"\bR(\d+)", later))
                    if first <= a < first + 4 or first <= b < first + 4:
                        break
                    count += 1
            found.append(count)
    return found
