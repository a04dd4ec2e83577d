"""Normalisation by channel on a device: more than 2^31 elements, the last channel's statistics and values, in every arrangement; gradients
that clusters hold."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.case import parse_case
from oxidnn.plan import Plan
from tests.emu.test_channel_resident import GRADIENT, GRADIENTS

from .configs import check_configs


@pytest.mark.gpu
@pytest.mark.parametrize("line", [
    *GRADIENTS,
    "group_norm_backward dy=bf16[4,320,64,64]nhwc x=bf16[4,320,64,64]nhwc mean=f32[4,32] rstd=f32[4,32] gamma=f32[320] groups=32",
])
def test_gradients_that_clusters_hold(cuda, line: str) -> None:  # type: ignore[no-untyped-def]
    if cuda.info.capability < (9, 0):
        pytest.skip("needs clusters")
    check_configs(cuda, parse_case(line), GRADIENT)


@pytest.mark.gpu
@pytest.mark.parametrize("line", [
    "batch_norm x=f16[33,64,1024,1024]nhwc training=True return_stats=True",
    "batch_norm x=f16[33,64,1024,1024]nchw training=True return_stats=True",
    "group_norm x=f16[33,64,1024,1024]nhwc groups=8 return_stats=True",
])
def test_more_than_two_to_the_31_elements(cuda, line: str) -> None:  # type: ignore[no-untyped-def]
    problem = parse_case(line)
    engine = ENGINES[problem.op][0]
    assert problem.desc("x").numel > 2**31 and engine.check_support(problem, cuda.info)
    config = engine.configs(problem, cuda.info)[0]
    plan = Plan(problem, engine, config, engine.build_steps(problem, config, cuda.info), cuda)
    stream = cuda.default_stream()
    blocks = {o.name: cuda.allocate(o.desc.num_bytes, stream) for o in problem.operands}
    blocks["workspace"] = cuda.allocate(max(1, plan.workspace_bytes), stream)
    x = problem.desc("x")
    try:
        # one everywhere but in the last sample's last rows of memory: 3 there
        ones, threes = np.ones(1 << 26, np.float16), np.full(1 << 25, 3.0, np.float16)
        for start in range(0, x.num_bytes, ones.nbytes):
            cuda.upload(blocks["x"].ptr + start, ones[: (x.num_bytes - start) // 2], stream)
        cuda.upload(blocks["x"].ptr + x.num_bytes - threes.nbytes, threes, stream)
        cuda.synchronize(stream)
        for o in problem.outputs:
            cuda.fill(blocks[o.name].ptr, 0xFF, o.desc.num_bytes, stream)
        plan.execute([blocks[o.name].ptr for o in problem.operands], blocks["workspace"].ptr, stream)
        stats = {n: np.empty(problem.desc(n).shape, np.float32) for n in ("mean", "rstd")}
        ends = [np.empty(4096, np.float16) for _ in range(2)]
        for name, array in stats.items():
            cuda.download(array, blocks[name].ptr, stream)
        cuda.download(ends[0], blocks["y"].ptr, stream)
        cuda.download(ends[1], blocks["y"].ptr + x.num_bytes - ends[1].nbytes, stream)
        cuda.synchronize(stream)
    finally:
        for block in blocks.values():
            block.free()
    # half of the last sample is 3: of all its channels (channels last), or of its later 32 channels (channels first)
    is_batch, is_last = problem.op == "batch_norm", "nhwc" in line
    part = (1 / 66 if is_last else 1 / 33) if is_batch else 0.5
    mean, rstd = 1 + 2 * part, 1 / np.sqrt(4 * part * (1 - part) + 1e-5)
    np.testing.assert_allclose(stats["mean"].reshape(-1)[-1], mean, rtol=1e-5)
    np.testing.assert_allclose(stats["rstd"].reshape(-1)[-1], rstd, rtol=1e-5)
    np.testing.assert_allclose(ends[1], np.full(4096, (3 - mean) * rstd), rtol=2e-3)
    first = (1 - mean) * rstd if is_batch and is_last else 0.0
    np.testing.assert_allclose(ends[0], np.full(4096, first), rtol=2e-3, atol=1e-3)
