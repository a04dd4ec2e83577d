"""Outputs of more than 2^31 elements: the direct engine's linear index and addresses in 64 bits, on a device."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.codegen.render import render
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.affine_direct import DIRECT
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops.case import parse_case
from oxidnn.plan import Plan
from oxidnn.testing.reference import REFERENCES


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


FAR = ("conv_fprop x={k}[33,64,1024,1024]nhwc w={k}[64,64,3,3]nhwc y={o}[33,64,1024,1024]nhwc padding=1",
       "conv_dgrad dy={k}[33,64,1024,1024]nhwc w={k}[64,64,3,3](1,576,192,64) dx={o}[33,64,1024,1024]nhwc padding=1",
       "conv_fprop x={k}[33,64,1024,1024]nhwc w={k}[64,1,3,3] y={o}[33,64,1024,1024]nhwc padding=1 groups=64")


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "out"), (("f16", "f16"), ("s8", "s32")))
@pytest.mark.parametrize("form", FAR, ids=("fprop", "dgrad", "depthwise"))
def test_every_engine_past_two_to_the_31(cuda, form: str, kind: str, out: str) -> None:  # type: ignore[no-untyped-def]
    """The last image of 33 lies beyond 2^31 elements of image and result: its last rows, and some among equal ones."""
    problem = parse_case(form.format(k=kind, o=out))
    assert problem.inputs[0].desc.numel > 2**31
    image, filters = ("x", "w") if problem.op == "conv_fprop" else ("dy", "w")
    groups = problem.groups
    small = parse_case(f"{problem.op} {image}={kind}[1,64,3,1024] w={kind}[64,{64 // groups},3,3] padding=1 groups={groups} out_dtype={out}"
                       + (" x_shape=(1,64,3,1024)" if problem.op == "conv_dgrad" else ""))
    rng = np.random.default_rng(2)
    number = problem.inputs[0].desc.dtype.numpy
    rows = (rng.standard_normal((3, 1024, 64)) if kind == "f16" else rng.integers(-100, 100, (3, 1024, 64))).astype(number)
    w = (rng.random((64, 64 // problem.groups, 3, 3)) * (1 if kind == "f16" else 100)).astype(number)
    inputs = {image: rows.transpose(2, 0, 1)[None], filters: w}
    if kind == "f16":
        inputs = {name: array.astype(np.float64) for name, array in inputs.items()}
    want = REFERENCES[small.op](small, inputs, {})[small.outputs[0].name].want[0, :, 1:].transpose(1, 2, 0)
    constant = np.frombuffer(b"\x3c" * number.itemsize, number)[0]
    over = (0, 2, 3) if problem.op == "conv_dgrad" else (1, 2, 3)
    middle = (float(constant) if kind == "f16" else int(constant)) * w.astype(np.float64).sum(over)

    stream = cuda.default_stream()
    blocks = [cuda.allocate(o.desc.num_bytes, stream) for o in problem.operands]
    scratch = None
    try:
        a, b, d = (block.ptr for block in blocks)
        cuda.fill(a, 0x3C, blocks[0].num_bytes, stream)
        cuda.upload(a + blocks[0].num_bytes - rows.nbytes, rows, stream)
        order = (1, 2, 3, 0) if problem.op == "conv_dgrad" else (0, 2, 3, 1)
        w_memory = np.ascontiguousarray(w.transpose(order) if problem.groups == 1 else w)
        cuda.upload(b, w_memory, stream)
        ran = 0
        for engine in ENGINES[problem.op]:
            if engine.id.endswith(".direct") or not engine.check_support(problem, cuda.info):
                continue  # the direct one has a test of its own
            config = engine.configs(problem, cuda.info)[0]
            plan = Plan(problem, engine, config, engine.build_steps(problem, config, cuda.info), cuda)
            if plan.workspace_bytes > 40e9:
                continue
            scratch = cuda.allocate(max(plan.workspace_bytes, 1), stream)
            cuda.fill(d, 0xFF, blocks[2].num_bytes, stream)
            plan.execute([a, b, d], scratch.ptr, stream)
            result = problem.outputs[0].desc.dtype.numpy
            got, among = np.empty((2, 1024, 64), result), np.empty((8, 64), result)
            cuda.download(got, d + blocks[2].num_bytes - got.nbytes, stream)
            cuda.download(among, d + blocks[2].num_bytes - 500 * 1024 * 64 * result.itemsize + 64 * 64 * result.itemsize, stream)
            cuda.synchronize(stream)
            scratch.free()
            scratch = None
            np.testing.assert_allclose(got.astype(np.float64), want, rtol=2e-3 if kind == "f16" else 0, atol=0.05 if kind == "f16" else 0,
                                       err_msg=engine.id)
            np.testing.assert_allclose(among.astype(np.float64), np.broadcast_to(middle, among.shape), rtol=2e-3 if kind == "f16" else 0,
                                       err_msg=engine.id)
            ran += 1
        assert ran or problem.groups > 1
    finally:
        for block in (*blocks, *([scratch] if scratch is not None else [])):
            block.free()
