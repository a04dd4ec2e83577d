from dataclasses import replace
import pytest
from oxidnn.engines.conv_depthwise_wgmma import ENGINES
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem
LINES = (
    "conv_fprop x=bf16[5,24,7,7]nhwc w=bf16[24,1,7,7] padding=3 groups=24",
    "conv_dgrad dy=bf16[3,40,14,14]nhwc w=bf16[40,1,5,5]nhwc x_shape=(3,40,14,14) padding=2 groups=40",
    "conv_fprop x=bf16[2,64,9,70]nhwc w=bf16[64,1,3,3] padding=1 groups=64",
    "conv_fprop x=bf16[1,32,5,9]nhwc w=bf16[32,1,3,2] padding='((9,8),(0,1))' groups=32",
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
    for config in {(c["groups"], c["blocks"], c["images"], c["strip"]): c for c in engine.configs(problem, backend.info)}.values():
        run_problem(backend, problem, engine, config, seed=len(line))
