"""The kernels of normalisation by channel where random problems do not take them: 64-bit strides, many chunks, every config, bits twice."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines import channel_stats
from oxidnn.engines.channel_stats import Cut
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

CASES = (
    "batch_norm x=bf16[3,24,9,7]nhwc gamma=f32[24] beta=f32[24] running_mean=f32[24] running_var=f32[24] training=True return_stats=True",
    "batch_norm x=f16[3,4,40]nchw training=True beta=f32[4] return_mask=True epilogue='relu(acc)'",
    "group_norm x=bf16[2,32,9,9]nhwc gamma=f32[32] groups=4 return_stats=True",
    "batch_norm_backward dy=f32[5,16,4,4]nhwc x=f32[5,16,4,4]nchw mean=f32[16] rstd=f32[16] gamma=f32[16] return_residual=True "
    "y=f32[5,16,4,4]nhwc",
    "group_norm_backward dy=f16[2,24,50]nhwc x=f16[2,24,50]nhwc mean=f32[2,8] rstd=f32[2,8] gamma=f32[24] mask=u8[2,3,50]nhwc groups=8",
)


@pytest.mark.parametrize("line", CASES)
def test_strides_of_64_bits(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_stats, "_NARROW", 1)
    problem = parse_case(line)
    for arch in ("sm_80", "sm_90a"):
        backend = EmulatedBackend(arch, checkers="all")
        for engine in ENGINES[problem.op]:
            if engine.check_support(problem, backend.info):
                run_problem(backend, problem, engine)


@pytest.mark.parametrize("line", CASES)
def test_every_config_and_the_same_bits_twice(line: str) -> None:
    problem, backend = parse_case(line), EmulatedBackend("sm_80", checkers="all")
    engine = ENGINES[problem.op][0]
    for config in engine.configs(problem, backend.info):
        runs = [run_problem(backend, problem, engine, config, seed=4).outputs for _ in range(2)]
        for name, first in runs[0].items():
            assert first.tobytes() == runs[1][name].tobytes()


@pytest.mark.parametrize("line", [
    "batch_norm x=f32[2,3,9000]nchw training=True return_stats=True", "batch_norm x=bf16[1,8,70,71]nhwc training=True return_stats=True",
    "batch_norm_backward dy=f32[1,4,9001]nhwc x=f32[1,4,9001]nhwc mean=f32[4] rstd=f32[4] gamma=f32[4]",
    "batch_norm_stats x=f64[1,2,3000]nhwc",
])
def test_several_chunks(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of several blocks, the last in part; more partials than threads hold."""
    problem, backend = parse_case(line), EmulatedBackend("sm_80", checkers="all")
    engine = ENGINES[problem.op][0]
    config = engine.configs(problem, backend.info)[0]
    for ctas in (1, 3, 40):
        monkeypatch.setattr(channel_stats.ChannelNormEngine, "resident", lambda self, p, c, device, ctas=ctas: self.cut(p, c, ctas))
        monkeypatch.setattr(channel_stats, "_HELD_PARTIALS", 0 if ctas == 40 else 8)
        run_problem(backend, problem, engine, config, seed=ctas)


@pytest.mark.parametrize(("rows", "block", "wanted"), [(0, 4, 3), (1, 4, 3), (12, 4, 3), (13, 4, 3), (29, 4, 3), (1000, 32, 7), (5, 1, 9)])
def test_chunks_hold_all_rows_once(rows: int, block: int, wanted: int) -> None:
    cut = Cut.of(rows, block, wanted)
    assert cut.chunks <= wanted
    args = {a.name: a.value for a in cut.count_args()}
    counts = []
    for i in range(cut.chunks):
        held = [r for b in range(i * block, rows, cut.chunks * block) for r in range(b, min(b + block, rows))]
        counts.append(len(held))
        assert len(held) == (args["chunk_rows"] + args["block_rows"] * (i <= args["last_chunk"])
                             - args["rows_beyond"] * (i == args["last_chunk"]))
    assert sum(counts) == rows and (not counts or min(counts) > 0)
    assert not counts or np.ptp(counts) <= block + args["rows_beyond"]
