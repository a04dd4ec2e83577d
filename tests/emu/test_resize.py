"""Resize kernels in the emulator: published values, special values, wide strides, every config; assembled without spills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.case import format_case, parse_case
from oxidnn.ops.resize import ResizeProblem
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem
from oxidnn.testing.reference.resize import matrix
from oxidnn.testing.sample.resize import SAMPLES

ARCHES = ("sm_80", "sm_90a")


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


def test_published_places(h: oxidnn.DnnHandle) -> None:
    x = np.arange(5, dtype=np.float32).reshape(1, 1, 5)
    assert h.resize(x, 3).tolist() == [[[0, 1, 3]]]
    assert h.resize(x, 3, "nearest-exact").tolist() == [[[0, 2, 4]]]
    ones = np.ones((1, 1, 3), np.float32)
    assert h.resize_backward(ones, x.shape).tolist() == [[[1, 1, 0, 1, 0]]]
    assert h.resize_backward(ones, x.shape, "nearest-exact").tolist() == [[[1, 0, 1, 0, 1]]]


def test_nearest_never_picks_the_neighbour(h: oxidnn.DnnHandle) -> None:
    """Where o I / O is whole, rounding the ratio first falls just below it: 11 * 26 / 22 = 13."""
    for extent, outputs in ((26, 22), (49, 21), (300, 210)):
        x = np.arange(extent, dtype=np.float32).reshape(1, 1, -1)
        assert h.resize(x, outputs).ravel().tolist() == [o * extent // outputs for o in range(outputs)]


def test_the_corners_of_the_flag_coincide_whatever_the_scales(h: oxidnn.DnnHandle) -> None:
    """PyTorch's rule, forward and backward; ONNX's coordinates of the same name go by scale * extent, no whole number here."""
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    np.testing.assert_allclose(h.resize(x, mode="linear", scales=0.6, align_corners=True), [[[1, 4]]])
    np.testing.assert_allclose(h.resize(x, mode="linear", scales=0.6, coordinates="align_corners"), [[[1, 1 + 3 / 1.4]]])
    dx = h.resize_backward(np.array([[[5.0, 7.0]]]), x.shape, "linear", scales=0.6, align_corners=True)
    np.testing.assert_allclose(dx, [[[5, 0, 0, 7]]])
    line = "resize x=f32[1,2,7,9]nchw mode=cubic scales=(1.7,0.6) align_corners=True"
    problem = parse_case(line)
    assert parse_case(format_case(problem)) == problem and problem.axes == parse_case(
        "resize x=f32[1,2,7,9]nchw mode=cubic size=(11,5) align_corners=True").axes
    torch = pytest.importorskip("torch")
    for mode, shape, scales in (("linear", (2, 3, 7), 1.7), ("bilinear", (2, 3, 5, 9), (1.7, 0.6)), ("bicubic", (1, 2, 9, 6), (0.45, 2.3))):
        given = np.random.default_rng(1).standard_normal(shape)
        want = torch.nn.functional.interpolate(torch.from_numpy(given), scale_factor=scales, mode=mode, align_corners=True)
        np.testing.assert_allclose(h.resize(given, mode=mode, scales=scales, align_corners=True), want.numpy(), atol=1e-12)


def test_scales_shape_the_places(h: oxidnn.DnnHandle) -> None:
    """By a scale of 0.6, 4 elements give 2 outputs 5/3 apart, by a size of 2 they lie 2 apart."""
    x = np.arange(4, dtype=np.float64).reshape(1, 1, 4)
    np.testing.assert_allclose(h.resize(x, mode="linear", scales=0.6, coordinates="asymmetric"), [[[0, 5 / 3]]])
    np.testing.assert_allclose(h.resize(x, 2, "linear", coordinates="asymmetric"), [[[0, 2]]])


@pytest.mark.parametrize("kind", ["float32", "float16", "float64"])
def test_infinities_reach_only_the_outputs_that_read_them(h: oxidnn.DnnHandle, kind: str) -> None:
    x = np.ones((1, 8, 9, 9), kind)
    x[0, :, 4, 4] = np.inf
    x[0, :, 0, 0] = np.nan
    for layout in (x, np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)):
        y = h.resize(layout, 18, "linear")
        odd = np.argwhere(~np.isfinite(y[0, 0]))
        assert {tuple(p) for p in odd} == {(p, q) for p in (7, 8, 9, 10) for q in (7, 8, 9, 10)} | {
            (p, q) for p in (0, 1, 2) for q in (0, 1, 2)}
        dx = h.resize_backward(layout, (1, 8, 3, 3), "area")
        assert np.argwhere(~np.isfinite(dx[0, 0])).tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("op", sorted(SAMPLES))
def test_infinities_reach_whatever_has_a_weight(op: str) -> None:
    """One infinity: exactly the outputs that weigh it are not finite, whatever block they lie in, at borders too."""
    rng = np.random.default_rng(13)
    backend = EmulatedBackend("sm_90a")
    for i in range(36):
        problem = SAMPLES[op](rng, "tiny")
        if problem.is_empty:
            continue
        assert isinstance(problem, ResizeProblem)
        (source,), (target,) = problem.inputs, problem.outputs
        at = tuple(int(rng.choice([0, n - 1, rng.integers(n)])) for n in source.desc.shape)
        x = np.ones(source.desc.shape)
        x[at] = np.inf
        weighs = np.ones(())
        for dimension in range(len(problem.axes)):
            m = matrix(problem, dimension)
            weighs = np.multiply.outer(weighs, (m.T if problem.is_backward else m)[:, at[2 + dimension]] != 0)
        want = np.zeros(target.desc.shape, bool)
        want[at[:2]] = weighs
        x = x.astype(source.desc.dtype.numpy)
        for config in ENGINES[op][0].configs(problem, backend.info)[i % 2::2]:
            got = execute(backend, problem, ENGINES[op][0], config, {source.name: x}, {})[target.name]
            assert ((~np.isfinite(got.astype(np.float64))) == want).all(), f"{format_case(problem)} {config.name}"


@pytest.mark.parametrize("line", [
    f"resize x=f32[1,2,5,6]({2**30},30,6,1) size=(7,9) mode=cubic",
    f"resize_backward dy=f16[1,8,2,3]({2**31},1,24,8) mode=linear x_shape=(1,8,5,6)",
    "resize x=f32[1,2,5,6](60,-30,6,-1) size=(9,4) mode=linear",
    "resize x=f32[2,8,2,3](0,1,8,0) size=(4,6) mode=linear",
    "resize_backward dy=f32[2,8,2,3](0,0,0,0) mode=linear x_shape=(2,8,5,6)",
    "resize x=f32[1,1,200]nchw size=3 mode=cubic antialias=True",
    "resize_backward dy=f32[1,1,200]nchw mode=linear x_shape=(1,1,1)",
    "resize x=f32[1,1,1]nchw size=70 mode=linear align_corners=True",
    "resize x=f32[1,1,9]nchw size=30 scales=(1.5,) mode=cubic",
    "resize x=bf16[1,8,41,40]nhwc size=(13,12) mode=cubic antialias=True",
    "resize x=f16[1,4,40,41]nhwc size=(11,12) mode=cubic antialias=True",
    f"resize x=f32[1,4,30,31]({2**31},1,124,4) size=(7,9) mode=cubic antialias=True",
    "resize_backward dy=bf16[1,2,40,38]nchw mode=cubic x_shape=(1,2,11,13)",
    "resize_backward dy=f32[1,8,30,30]nhwc mode=cubic x_shape=(1,8,10,10)",
])
def test_strides_and_ratios_at_their_ends(line: str) -> None:
    problem, backend = parse_case(line), EmulatedBackend("sm_80", checkers="all")
    engine = ENGINES[problem.op][0]
    for config in engine.configs(problem, backend.info)[::2]:
        run_problem(backend, problem, engine, config)


def test_the_gradient_is_the_same_bits_every_time() -> None:
    problem = parse_case("resize_backward dy=f16[2,8,9,9]nhwc mode=cubic x_shape=(2,8,5,4)")
    runs = [run_problem(EmulatedBackend("sm_80", schedule=s), problem, ENGINES[problem.op][0], seed=3).outputs["dx"]
            for s in ("lowest_pc", ("random", 1), ("random", 2))]
    assert all(run.tobytes() == runs[0].tobytes() for run in runs)


def test_gradients_are_those_of_the_forward(h: oxidnn.DnnHandle) -> None:
    """Resizing is linear, so <dy, resize(v)> = <resize_backward(dy), v> says all of the gradient."""
    rng = np.random.default_rng(6)
    modes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("nearest", {}), ("linear", {"align_corners": True}), ("linear", {}), ("cubic", {"exclude_outside": True}), ("cubic", {}),
        ("area", {}), ("linear", {"antialias": True}), ("cubic", {"antialias": True}))
    for before, after in (((7, 6), (4, 9)), ((12, 9), (24, 27)), ((24, 20), (12, 10)), ((10, 15), (15, 10))):
        for mode, attrs in modes:
            v, dy = rng.standard_normal((2, 3, *before)), rng.standard_normal((2, 3, *after))
            y, dx = h.resize(v, after, mode, **attrs), h.resize_backward(dy, v.shape, mode, **attrs)
            assert (dy * y).sum() == pytest.approx((dx * v).sum(), rel=1e-11), (mode, attrs, before, after)


@pytest.mark.parametrize("op", sorted(SAMPLES))
def test_every_config_on_random_problems(op: str) -> None:
    rng = np.random.default_rng(21)
    backends = [EmulatedBackend(arch, checkers="all") for arch in ARCHES]
    for i in range(8):
        problem = SAMPLES[op](rng, "tiny")
        if problem.is_empty:
            continue
        for config in ENGINES[op][0].configs(problem, backends[i % 2].info):
            run_problem(backends[i % 2], problem, ENGINES[op][0], config, seed=i)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kind", ["bf16", "f32", "f64"])
def test_no_spills(arch: str, kind: str) -> None:
    device, seen = known_device(arch), set()
    for mode in ("nearest", "linear", "cubic", "cubic antialias=True"):
        for line in (f"resize x={kind}[8,64,32,32]nhwc size=(64,64) mode={mode}",
                     f"resize_backward dy={kind}[8,64,15,20]nhwc x_shape=(8,64,32,32) mode={mode}",
                     f"resize x={kind}[2,16,12,12,12]nchw size=(5,6,7) mode={mode}"):
            problem = parse_case(line)
            engine = ENGINES[problem.op][0]
            for config in engine.configs(problem, device)[::2]:
                for step in engine.build_steps(problem, config, device).steps:
                    key = (step.spec.template, step.spec.consts)
                    if key not in seen:
                        seen.add(key)
                        assembled = assemble(render(step.spec), arch)
                        assert assembled.spill_bytes == 0, f"{line} {config.name}"
