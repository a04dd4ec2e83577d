"""CTC and cross-entropy of linear layers on a device, larger than an emulator takes: every config, twice the same bits."""

from __future__ import annotations

import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.case import parse_case

from .configs import check_configs

LINES = (
    "ctc_loss log_probs=f32[2100,2,30] targets=s64[2,1023] input_lengths=s64[2] target_lengths=s64[2] return_gradient=True",
    "ctc_loss log_probs=f64[1100,1,5] targets=s32[500] input_lengths=s32[1] target_lengths=s32[1] return_gradient=True",
    "ctc_loss_backward log_probs=bf16[400,32,1000] targets=s64[32,100] input_lengths=s64[32] target_lengths=s64[32]",
    "linear_cross_entropy x=bf16[1000,512] w=bf16[3000,512] target=s64[1000] bias=bf16[3000] return_gradients=True",
    "linear_cross_entropy x=f16[300,256] w=f16[1001,256] target=s64[300] weight=f32[1001] label_smoothing=0.1 return_gradients=True",
    "linear_cross_entropy_backward x=f32[500,128] w=f32[2000,128] target=s64[500] d_loss=f32[]",
    "row_loss_backward x=f32[50,4000] target=s64[50,4000] name=multilabel_margin",
)


@pytest.mark.gpu
@pytest.mark.parametrize("line", LINES)
def test_every_config(cuda, line: str) -> None:  # type: ignore[no-untyped-def]
    problem = parse_case(line)
    engines = [e for e in ENGINES[problem.op] if e.check_support(problem, cuda.info)]
    assert engines
    for engine in engines:
        check_configs(cuda, problem, engine)
