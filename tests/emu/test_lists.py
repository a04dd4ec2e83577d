"""Tables as kernel parameters, and CTAs that each work on memory of their own: what steps over lists stand on."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from oxidnn.codegen.spec import KernelSpec, Param, Target
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import EmulatorFault, LaunchError
from oxidnn.ops.case import parse_case
from oxidnn.plan import Plan
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.runtime.kernel import check_value, pack, param_offsets, param_size
from oxidnn.testing.stage import Stage
from tests.emu.running import launch

# CTA i writes i to the array whose address is the i-th entry of the table.
EACH = """.version 8.6\n.target sm_90a\n.address_size 64
.visible .entry each(.param .u64 table[3], .param .u64 a, .param .u64 b, .param .u64 c)
{
    .reg .u32 %cta; .reg .u64 %table, %address, %out;
    mov.u32 %cta, %ctaid.x;
    mov.u64 %table, table;
    mad.wide.u32 %address, %cta, 8, %table;
    ld.param.u64 %out, [%address];
    st.global.u32 [%out], %cta;
    ret;
}"""


def spec_of(*params: Param) -> KernelSpec:
    return KernelSpec("x", "x", Target("sm_90a"), 32, params, None)


def test_tables_are_declared_laid_out_and_packed_by_their_type() -> None:
    table, numbers = Param("table", "u64[5]"), Param("numbers", "u32[3]")
    assert (table.declaration, numbers.declaration) == (".param .u64 table[5]", ".param .u32 numbers[3]")
    assert (param_size(table), param_size(numbers)) == (40, 12)
    spec = spec_of(Param("n", "u32"), numbers, table, Param("last", "f32"))
    assert param_offsets(spec) == ((0, 4, 16, 56), 60)
    assert pack(numbers, (1, 2, 2**32 - 1)) == struct.pack("<3I", 1, 2, 2**32 - 1)
    check_value(spec, 1, [1, 2, 3])
    for wrong in ((1, 2), (1, 2, -1), (1, 2, 0.5), 3):
        with pytest.raises(LaunchError, match="numbers"):
            check_value(spec, 1, wrong)


@pytest.mark.parametrize("checkers", ["basic", "all"])
def test_ctas_may_write_an_array_each(checkers: str) -> None:
    arrays = [np.full(2, 7, np.uint32) for _ in range(3)]
    table = struct.pack("<3Q", *(a.ctypes.data for a in arrays))
    launch(EACH, 3, 1, [table, *arrays], checkers=checkers)
    assert [int(a[0]) for a in arrays] == [0, 1, 2] and all(a[1] == 7 for a in arrays)


def test_ctas_that_write_one_array_race() -> None:
    arrays = [np.zeros(2, np.uint32) for _ in range(3)]
    table = struct.pack("<3Q", *(arrays[i].ctypes.data for i in (0, 1, 1)))
    with pytest.raises(EmulatorFault, match="race"):
        launch(EACH, 3, 1, [table, *arrays], checkers="all")


def test_a_plan_runs_on_other_addresses_and_other_workspaces() -> None:
    """The tables hold addresses of operands and of copies in the workspace; both change from call to call."""
    backend = EmulatedBackend("sm_90a", checkers="all")
    problem = parse_case("sgd_step param_0=f32[4,6](8,1) param_1=f32[5] grad_0=f32[4,6](1,4) grad_1=f32[5] new_param_0=f32[4,6](7,1)")
    engine = ENGINES["sgd_step"][0]
    plan = Plan(problem, engine, engine.configs(problem, backend.info)[0],
                engine.build_steps(problem, engine.configs(problem, backend.info)[0], backend.info), backend)
    assert plan.workspace_bytes
    rng = np.random.default_rng(0)
    for _ in range(3):
        inputs = {o.name: rng.standard_normal(o.desc.shape).astype(np.float32) for o in problem.inputs}
        with Stage(backend, problem, inputs, {"lr": 0.5}) as stage:
            for _ in range(2):
                got = stage.run(plan)
                for i in range(2):
                    np.testing.assert_allclose(got[f"new_param_{i}"], inputs[f"param_{i}"] - 0.5 * inputs[f"grad_{i}"], rtol=1e-6)
