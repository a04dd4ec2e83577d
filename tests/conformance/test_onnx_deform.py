"""The ONNX node tests of DeformConv; gradients against finite differences; equal bits; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import EngineConfig
from oxidnn.errors import InvalidArgument, Unsupported
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")
H100 = known_device("sm_90a")


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


@pytest.mark.parametrize("case", node_tests(("DeformConv",)), ids=lambda t: t.name)
def test_node(case: Any, h: oxidnn.DnnHandle) -> None:
    node = case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    pads = attrs.get("pads", [0] * 4)
    for inputs, outputs in case.data_sets:
        given = dict(zip(("x", "w", "offset", "bias", "mask"), (np.asarray(v) for v in inputs), strict=False))
        names = [("x", "w", "offset", "bias", "mask")[i] for i, name in enumerate(node.input) if name]
        given = dict(zip(names, given.values(), strict=True))
        y = h.deform_conv(given["x"], given["offset"], given["w"], given.get("bias"), mask=given.get("mask"),
                          stride=tuple(attrs.get("strides", (1, 1))), dilation=tuple(attrs.get("dilations", (1, 1))),
                          padding=tuple(zip(pads[:2], pads[2:], strict=True)), groups=attrs.get("group", 1))
        np.testing.assert_allclose(y, outputs[0], rtol=1e-5)


def problem(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.standard_normal((2, 4, 5, 6)), "offset": rng.standard_normal((2, 2 * 2 * 6, 3, 6)) * 1.3,
            "w": rng.standard_normal((6, 2, 3, 2)), "mask": rng.random((2, 2 * 6, 3, 6)), "bias": rng.standard_normal(6)}


WINDOW: dict[str, Any] = {"stride": (2, 1), "padding": ((1, 1), (0, 1)), "groups": 2}


def test_gradients_are_those_of_finite_differences(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(3)
    given = problem(rng)

    def forward(given: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(h.deform_conv(given["x"], given["offset"], given["w"], given["bias"], mask=given["mask"], **WINDOW))

    dy = rng.standard_normal(forward(given).shape)
    found = h.deform_conv_backward(dy, given["x"], given["offset"], given["w"], mask=given["mask"], bias_gradient=True, **WINDOW)
    for name, gradient in zip(("x", "offset", "w", "mask", "bias"), found, strict=True):
        for _ in range(12):
            at = tuple(int(rng.integers(n)) for n in given[name].shape)
            step = 1e-6
            sides = []
            for sign in (1, -1):
                moved = {**given, name: given[name].copy()}
                moved[name][at] += sign * step
                sides.append((forward(moved) * dy).sum())
            slope = (sides[0] - sides[1]) / (2 * step)
            assert abs(slope - gradient[at]) < 1e-6 * max(1.0, abs(slope)), (name, at, slope, gradient[at])


def test_zero_offsets_are_a_convolution(h: oxidnn.DnnHandle) -> None:
    given = {k: v.astype(np.float32) for k, v in problem(np.random.default_rng(4)).items()}
    y = h.deform_conv(given["x"], np.zeros_like(given["offset"]), given["w"], given["bias"], **WINDOW)
    np.testing.assert_allclose(y, h.conv(given["x"], given["w"], given["bias"], **WINDOW), atol=1e-5)


def test_infinite_offsets_lie_outside_and_nan_stays(h: oxidnn.DnnHandle) -> None:
    x, w = np.ones((1, 1, 3, 3), np.float32), np.ones((1, 1, 1, 1), np.float32)
    offset = np.zeros((1, 2, 3, 3), np.float32)
    offset[0, :, 0, 0], offset[0, 0, 1, 1], offset[0, 1, 2, 2], offset[0, 0, 0, 2] = np.inf, -np.inf, np.nan, 1e30
    y = np.asarray(h.deform_conv(x, offset, w))[0, 0]
    assert np.isnan(y[2, 2]) and (y[[0, 1, 0], [0, 1, 2]] == 0).all() and (y[[0, 1, 2], [1, 0, 1]] == 1).all()


def test_bits_do_not_depend_on_the_order_of_threads() -> None:
    rng = np.random.default_rng(5)
    given = {k: v.astype(np.float32) for k, v in problem(rng).items()}
    given["offset"] *= 0.2
    dy = rng.standard_normal((2, 6, 3, 6)).astype(np.float32)
    case = parse_case("deform_conv_backward dy=f32[2,6,3,6] x=f32[2,4,5,6] offset=f32[2,24,3,6] w=f32[6,2,3,2] mask=f32[2,12,3,6] "
                      "stride=(2,1) padding='((1,1),(0,1))' groups=2")
    engine = ENGINES[case.op][0]
    inputs = {"dy": dy, **{k: given[k] for k in ("x", "offset", "w", "mask")}}
    runs = []
    for seed in range(4):
        backend = EmulatedBackend("sm_80", schedule=("random", seed))
        runs.append(execute(backend, case, engine, engine.configs(case, backend.info)[0], inputs))
    assert all((run[name] == runs[0][name]).all() for run in runs for name in run)


@pytest.mark.parametrize("line", [
    "deform_conv x=f16[3,8,5,6]nchw offset=f16[3,36,5,6]nchw w=f16[4,8,3,3]nchw mask=f16[3,18,5,6]nchw bias=f16[4] padding=1",
    "deform_conv_backward dy=f16[3,4,5,6]nchw x=f16[3,8,5,6]nchw offset=f16[3,36,5,6]nchw w=f16[4,8,3,3]nchw mask=f16[3,18,5,6]nchw "
    "padding=1 bias_gradient=True"])
def test_images_in_turns(line: str) -> None:
    case, backend = parse_case(line), EmulatedBackend("sm_80", checkers="all")
    engine = ENGINES[case.op][0]
    for images in (1, 2, 3):
        run_problem(backend, case, engine, EngineConfig.of(images=images))
    needed = [engine.build_steps(case, EngineConfig.of(images=n), backend.info).workspace_bytes for n in (1, 3)]
    limited = parse_case(f"{line} workspace_limit={needed[0]}")
    assert needed[0] < needed[1] and [c["images"] for c in engine.configs(limited, backend.info)] == [1]
    assert "limit" in engine.check_support(parse_case(f"{line} workspace_limit={needed[0] - 1}"), backend.info).reason


def test_no_channels_and_many_images(h: oxidnn.DnnHandle) -> None:
    y = h.deform_conv(np.zeros((1, 0, 3, 3), np.float32), np.zeros((1, 2, 3, 3), np.float32), np.zeros((2, 0, 1, 1), np.float32),
                      np.float32([1, 2]))
    assert (y == np.float32([1, 2])[None, :, None, None]).all()
    x = np.zeros((70000, 1, 1, 1), np.float32)
    many = parse_case("deform_conv x=f32[70000,1,1,1] offset=f32[70000,2,1,1] w=f32[1,1,1,1]")
    for engine in ENGINES["deform_conv"]:  # only the first extent of a grid takes that many
        if engine.check_support(many, H100):
            assert all(step.grid[1:] == (1, 1) for step in engine.build_steps(many, engine.configs(many, H100)[0], H100).steps)
    with h.options(workspace_limit=10), pytest.raises(Unsupported, match="workspace"):
        h.deform_conv(x, np.zeros((70000, 2, 1, 1), np.float32), np.ones((1, 1, 1, 1), np.float32))


def test_bad_arguments(h: oxidnn.DnnHandle) -> None:
    given = {k: v.astype(np.float32) for k, v in problem(np.random.default_rng(6)).items()}

    def call(**changes: Any) -> None:
        v, window = {**given, **changes}, {**WINDOW, **{k: w for k, w in changes.items() if k in WINDOW}}
        h.deform_conv(v["x"], v["offset"], v["w"], v["bias"], mask=v["mask"], **window)

    call()
    for changes, words in (({"offset": given["offset"][:, :-1]}, "shape of offset"), ({"mask": given["mask"][:, :-1]}, "shape of mask"),
                           ({"w": given["w"][:, :1]}, "shape of w"), ({"x": given["x"][0]}, "rank of x"), ({"groups": 3}, "shape of w"),
                           ({"stride": 0}, "stride"), ({"offset": given["offset"].astype(np.float16)}, "type of offset"),
                           ({"bias": given["bias"][:2]}, "shape of bias"), ({"stride": 1}, "shape of offset")):
        with pytest.raises(InvalidArgument, match=words):
            call(**changes)
