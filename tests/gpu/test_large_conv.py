"""Outputs of more than 2^31 elements: the direct engine's linear index and addresses in 64 bits, on a device."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.codegen.render import render
from oxidnn.engines.affine_direct import DIRECT
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops.case import parse_case


@pytest.mark.gpu
@pytest.mark.parametrize("extra", (-65536, 65536))
def test_convolution_of_about_two_to_the_31_elements(cuda, extra: int) -> None:  # type: ignore[no-untyped-def]
    extent = 2**31 + extra
    problem = parse_case(f"conv_fprop x=f16[1,1,{extent}] w=f16[1,1,2]") if extent < 2**31 else parse_case(
        f"conv_fprop x=f16[2,1,{extent // 2}] w=f16[1,1,2] padding=((0,1),)")  # one extent must stay below 2^31
    engine = MatmulEngine("conv_fprop", DIRECT)
    assert engine.check_support(problem, cuda.info)
    (step,) = engine.build_steps(problem, engine.configs(problem, cuda.info)[0], cuda.info).steps
    assert step.spec.consts.is_wide == (problem.desc("y").numel >= 2**31)
    stream = cuda.default_stream()
    blocks = [cuda.allocate(problem.desc(name).num_bytes, stream) for name in ("x", "w", "y")]
    try:
        x, w, y = (block.ptr for block in blocks)
        cuda.fill(x, 0x3C, blocks[0].num_bytes, stream)  # every element is 0x3C3C
        cuda.fill(y, 0xFF, blocks[2].num_bytes, stream)
        cuda.upload(w, np.array([1, 8], np.float16), stream)
        row = problem.desc("x").shape[2]
        last = np.arange(1, 1025, dtype=np.float16)
        cuda.upload(x + blocks[0].num_bytes - last.nbytes, last, stream)
        cuda.load(render(step.spec), step.spec).bind(step.grid, [x, w, y]).launch(stream)
        one = np.full(1, 0x3C3C, np.uint16).view(np.float16)[0]
        got, middle = np.empty(1023, np.float16), np.empty(4096, np.float16)
        tail = 1024 if problem.padding[0][1] else 1023  # the padded position comes last
        cuda.download(got, y + blocks[2].num_bytes - 2 * tail, stream)
        cuda.download(middle, y + 2 * (row - 8192), stream)
        cuda.synchronize(stream)
        np.testing.assert_array_equal(got, (last[:-1].astype(np.float32) + 8 * last[1:].astype(np.float32)).astype(np.float16))
        if problem.desc("x").shape[0] == 2:
            np.testing.assert_array_equal(middle, np.full(4096, np.float16(np.float32(one) * 9)))
    finally:
        for block in blocks:
            block.free()
