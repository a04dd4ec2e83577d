"""Every kernel of every engine, in several configs, renders, validates, round-trips and assembles without spills for each target."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from oxidnn import ptx
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.runtime.assembler import assemble
from oxidnn.testing.sample import SAMPLES

from ..emu.test_registry import IDS, PAIRS, seed_of

TARGETS = ("sm_80", "sm_90a")
MAX_LINES = 6000
KERNELS = 4  # of an engine, for each target
QUIET = 8  # problems of an engine in a row whose kernels are there already


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(("op", "engine"), PAIRS, ids=IDS)
def test_kernels_assemble(op: str, engine, arch: str) -> None:  # type: ignore[no-untyped-def]
    info = known_device(arch)
    rng = np.random.default_rng(seed_of(op, engine.id, arch))
    specs = {}
    reasons = set()
    for _ in range(1000):
        problem = SAMPLES[op](rng, "tiny")
        support = engine.check_support(problem, info)
        if problem.is_empty or not support:
            reasons.add(support.reason)
            continue
        for config in engine.configs(problem, info):
            for step in engine.build_steps(problem, config, info).steps:
                specs.setdefault((step.spec.template, config.name, step.spec.suffix), step.spec)
            if len(specs) >= KERNELS:
                break
        if len(specs) >= KERNELS:
            break
    too_old = [r for r in reasons if "needs sm_" in r or "compute capability" in r]
    if not specs and too_old:
        pytest.skip(too_old[0])
    assert specs, f"{engine.id} took no random problem"
    for spec in list(specs.values())[:KERNELS]:
        text = render(spec)
        assert text.count("\n") <= MAX_LINES, spec.describe()
        module = ptx.parse(text)
        ptx.validate(module)
        assert ptx.same(ptx.parse(ptx.print_module(module)), module), spec.describe()
        result = assemble(text, spec.target.arch)
        assert result.spill_bytes == 0, f"{result.spill_bytes} bytes spilled: {spec.describe()}"
        assert result.registers <= spec.max_registers, f"{result.registers} registers: {spec.describe()}"


@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_89", "sm_100a", "sm_120a"])
def test_other_targets(arch: str) -> None:
    """Kernels of every template, for some types of operands, for the targets that the test above leaves out."""
    info = known_device(arch)
    seen: set[tuple[str, ...]] = set()
    kinds: Counter[str] = Counter()
    for op, engine in PAIRS:
        rng, quiet = np.random.default_rng(seed_of(op, engine.id, arch)), 0
        for _ in range(40):
            if quiet == QUIET:
                break
            problem = SAMPLES[op](rng, "tiny")
            if problem.is_empty or not engine.check_support(problem, info):
                continue
            quiet += 1
            for step in engine.build_steps(problem, engine.configs(problem, info)[0], info).steps:
                spec, key = step.spec, (step.spec.template, *sorted({o.desc.dtype.name for o in problem.operands}))
                if key in seen or kinds[spec.template] == 3:
                    continue
                seen.add(key)
                kinds[spec.template] += 1
                quiet = 0
                result = assemble(render(spec), arch)
                assert result.spill_bytes == 0, f"{result.spill_bytes} bytes spilled: {spec.describe()}"
                assert result.registers <= spec.max_registers, f"{result.registers} registers: {spec.describe()}"
    assert len(seen) > 40


def test_every_op_has_engines_references_and_samples() -> None:
    from oxidnn.ops import OPS
    from oxidnn.testing.reference import REFERENCES

    assert set(OPS) == set(ENGINES) == set(REFERENCES) == set(SAMPLES)
