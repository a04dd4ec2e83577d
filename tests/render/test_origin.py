"""The template line behind every line of a kernel, and where reports name it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from oxidnn.codegen.environment import template_directories
from oxidnn.codegen.origin import origin_of, origins
from oxidnn.codegen.render import render
from oxidnn.device import emulated_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import EmulatorFault
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend

CASES = ("gemm a=bf16[96,64] b=bf16[64,80] bias=f32[80] epilogue=bias_relu",
         "conv_fprop x=bf16[1,64,9,9]nhwc w=bf16[64,64,3,3]nhwc padding=1",
         "softmax x=f32[4,100]", "max_pool x=f32[2,3,7,9] window=3", "reduce x=f32[3,500] op=sum axes=1")  # fmt: skip


def specs(case: str):  # type: ignore[no-untyped-def]
    problem, info = parse_case(case), emulated_device("sm_90a")
    for engine in ENGINES[problem.op]:
        if engine.check_support(problem, info):
            for config in list(engine.configs(problem, info))[:1]:
                yield from (step.spec for step in engine.build_steps(problem, config, info).steps)


@pytest.mark.parametrize("case", CASES)
def test_every_line_has_an_origin_that_holds_its_text(case: str) -> None:
    """The first word of a PTX line stands in the template line named, or that line writes a value there."""
    files = {}
    seen, strange = 0, []
    for spec in specs(case):
        text = render(spec)
        found = origins(spec)
        assert len(found) == len(text.split("\n"))
        for line, origin in zip(text.split("\n"), found, strict=True):
            if not line.strip():
                continue
            first = re.fullmatch(r"(\S+\.j2):(\d+)(?: for (\S+\.j2):(\d+))?", origin)
            assert first, (line, origin)
            if first[1] not in files:
                path = next(d / first[1] for d in template_directories() if (d / first[1]).is_file())
                files[first[1]] = path.read_text().split("\n")
            source = files[first[1]][int(first[2]) - 1]
            if "${" not in source and line.split()[0] not in source:
                strange.append((line, origin, source))
            seen += 1
    assert seen > 50 and len(strange) <= 0.02 * seen, strange


def test_rendering_is_not_touched_and_other_texts_have_no_origin() -> None:
    spec = next(iter(specs(CASES[2])))
    before = render(spec)
    assert origins(spec) and render(spec) == before and "\x01" not in before
    assert origin_of(spec, before, 30) == origins(spec)[29]
    assert origin_of(spec, before + "\n// edited", 30) == "" and origin_of(spec, before, 10**6) == ""


def test_a_fault_of_a_shipped_kernel_names_its_template_line() -> None:
    """A launch with a tensor too short: the report names kernel, PTX line, template line, CTA, thread and the nearest allocation."""
    spec = next(s for s in specs("reduce x=f32[3,500] op=sum axes=1") if s.template == "reduce/tree")
    backend = EmulatedBackend("sm_90a", "all")
    x, out = np.ones(500, np.float32), np.zeros(3, np.float32)
    pointers = [backend.allocate(a.nbytes, 0) for a in (x, out)]
    backend.upload(pointers[0].ptr, x, 0)
    kernel = backend.load(render(spec), spec)
    values = [0 if p.type == "u64" else 0.0 if p.type == "f32" else 500 for p in spec.params]
    launch = kernel.bind((3, 1, 1), values)
    for index, param in enumerate(spec.params):
        if param.type == "u64":
            launch.set(index, pointers["x" not in param.name and "in" not in param.name].ptr)
    with pytest.raises(EmulatorFault) as caught:
        launch.launch(0)
    text = str(caught.value)
    assert re.search(r"kernel oxi_\w+, PTX line \d+: .*\n  CTA \(\d,0,0\), thread \(\d+,0,0\), warp \d+, lane \d+", text), text
    assert re.search(r"\n  from \S+\.ptx\.j2:\d+", text), text
