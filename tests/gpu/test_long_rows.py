"""Rows longer than the registers of a CTA, or begun between packs, on a device: every home, rings that wrap, the same bits twice."""

from __future__ import annotations

import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.case import parse_case
from tests.emu.test_long_rows import LINES
from tests.emu.test_skewed_rows import LINES as SKEWED

from .configs import check_configs

MORE = (
    "layer_norm_backward dy=bf16[4000,256] x=bf16[4000,256] mean=f32[4000] rstd=f32[4000] gamma=bf16[256]",
    "layer_norm_backward dy=bf16[2000,4096] x=bf16[2000,4096] mean=f32[2000] rstd=f32[2000] gamma=f32[4096]",
    "rms_norm_backward dy=f16[150,65536] x=f16[150,65536] rstd=f32[150] gamma=f16[65536]",
    "softmax x=bf16[40,131072]", "softmax_backward dy=f32[40,65536] y=f32[40,65536]", "layer_norm x=bf16[3,1048576] return_stats=True",
    "layer_norm x=bf16[65,50257] gamma=bf16[50257] beta=bf16[50257] return_stats=True", "softmax x=f16[65,50257]",
    "layer_norm_backward dy=bf16[300,50257] x=bf16[300,50257] mean=f32[300] rstd=f32[300] gamma=bf16[50257]",
    "rms_norm_backward dy=f32[500,3001] x=f32[500,3001] rstd=f32[500] gamma=f32[3001]",
)


@pytest.mark.gpu
@pytest.mark.parametrize("line", [*(line for line, _ in LINES), *SKEWED, *MORE])
def test_every_config(cuda, line: str) -> None:  # type: ignore[no-untyped-def]
    problem = parse_case(line)
    engine = ENGINES[problem.op][0]
    check_configs(cuda, problem, engine)
