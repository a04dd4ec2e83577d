"""Resize problems: sizes, refusals, exact places, bands, and the reference against published values and torch."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import EngineConfig, TensorArg
from oxidnn.engines.resize_band import Filter, bands_of
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import format_case, parse_case
from oxidnn.ops.resize import ResizeProblem, simplest_fraction
from oxidnn.testing.reference.resize import REFERENCES, matrix
from oxidnn.testing.sample.resize import SAMPLES


def problem_of(line: str) -> ResizeProblem:
    problem = parse_case(line)
    assert isinstance(problem, ResizeProblem)
    return problem


@pytest.mark.parametrize(("line", "words"), [
    ("resize x=f32[4,8]nchw size=2", "shape of x is (4, 8)"),
    ("resize x=f32[1,1,8]nchw", "size is None"),
    ("resize x=f32[1,1,8]nchw size=0", "size is 0"),
    ("resize x=f32[1,1,8,8]nchw size=(2,2,2)", "size is (2, 2, 2)"),
    ("resize x=f32[1,1,0]nchw size=2", "no empty spatial dimension"),
    ("resize x=f32[1,1,8]nchw scales=0.1", "scales is (0.1,)"),
    ("resize x=f32[1,1,8]nchw scales=-1.0", "scales is (-1.0,)"),
    ("resize x=f32[1,1,8]nchw scales=(1.0,2.0)", "scales is (1.0, 2.0)"),
    ("resize x=f32[1,1,8]nchw scales=2.0 mode=area", "scales is (2.0,)"),
    ("resize x=f32[1,1,8]nchw size=2 mode=spline", "mode is 'spline'"),
    ("resize x=f32[1,1,8]nchw size=2 antialias=True", "antialias is True"),
    ("resize x=f32[1,1,8]nchw size=2 mode=linear antialias=True align_corners=True", "coordinates is 'align_corners'"),
    ("resize x=f32[1,1,8]nchw size=2 mode=area coordinates=half_pixel", "coordinates is 'half_pixel'"),
    ("resize x=f32[1,1,8]nchw size=2 align_corners=True coordinates=half_pixel", "align_corners is True"),
    ("resize x=f32[1,1,8]nchw size=2 coordinates=sideways", "coordinates is 'sideways'"),
    ("resize x=f32[1,1,8]nchw size=2 mode=linear rounding=ceil", "rounding is 'ceil'"),
    ("resize x=f32[1,1,8]nchw size=2 rounding=up", "rounding is 'up'"),
    ("resize x=f32[1,1,8]nchw size=2 mode=cubic cubic_coefficient=99.0", "cubic_coefficient is 99.0"),
    ("resize x=f32[1,1,8]nchw size=2 exclude_outside=True", "exclude_outside is True"),
    ("resize x=f32[1,1,8]nchw size=99 scales=0.5 mode=linear exclude_outside=True", "reads no element"),
    ("resize x=s8[1,1,8]nchw size=2", "type of x is s8"),
    ("resize x=f32[1,1,8]nchw y=f32[1,1,5]nchw size=4", "shape of y is [1, 1, 5]"),
    ("resize_backward dy=f32[1,1,4]nchw", "x_shape is None"),
    ("resize_backward dy=f32[1,1,4]nchw size=5 x_shape=(1,1,8)", "shape of dy is (1, 1, 4)"),
    ("resize_backward dy=f32[1,1,4]nchw x_shape=(1,2,8)", "shape of dy is (1, 1, 4)"),
])
def test_refusals_name_the_argument(line: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_case(line)
    assert words in str(caught.value)


@pytest.mark.parametrize("op", sorted(SAMPLES))
def test_random_problems_survive_the_case_grammar(op: str) -> None:
    rng = np.random.default_rng(11)
    for _ in range(40):
        line = format_case(SAMPLES[op](rng, "small"))
        assert format_case(parse_case(line)) == line


@pytest.mark.parametrize(("value", "fraction"), [
    (0.6, Fraction(3, 5)), (float(np.float32(0.6)), Fraction(3, 5)), (2.0, Fraction(2)), (1 / 3, Fraction(1, 3)),
    (2.94, Fraction(147, 50))])
def test_scales_are_read_as_the_fractions_they_stand_for(value: float, fraction: Fraction) -> None:
    assert simplest_fraction(value) == fraction


def test_published_nearest_places() -> None:
    for mode, places in (("nearest", [0, 1, 3]), ("nearest_exact", [0, 2, 4])):
        weights = matrix(problem_of(f"resize x=f32[1,1,5]nchw size=3 mode={mode}"), 0)
        np.testing.assert_array_equal(weights.argmax(1), places)


def test_published_cubic_weights() -> None:
    """At t = 0.25: output 5 lies at (5 + 1/2) / 2 - 1/2 = 2.25 of a doubling."""
    plain = matrix(problem_of("resize x=f32[1,1,8]nchw size=16 mode=cubic"), 0)[5, 1:5]
    np.testing.assert_allclose(plain, [-0.10546875, 0.87890625, 0.26171875, -0.03515625])
    smooth = matrix(problem_of("resize x=f32[1,1,8]nchw size=16 mode=cubic antialias=True cubic_coefficient=-0.5"), 0)[5, 1:5]
    np.testing.assert_allclose(smooth, [-0.0703125, 0.8671875, 0.2265625, -0.0234375])


@pytest.mark.parametrize("attributes", [
    "mode=nearest_exact", "mode=linear", "mode=linear align_corners=True", "mode=cubic", "mode=cubic align_corners=True", "mode=area",
    "mode=linear antialias=True", "mode=cubic antialias=True cubic_coefficient=-0.5"])
@pytest.mark.parametrize("sizes", [((7, 5), (12, 9)), ((13, 11), (4, 6)), ((6, 1), (6, 5)), ((9, 8), (3, 16))])
def test_reference_agrees_with_torch(attributes: str, sizes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    torch = pytest.importorskip("torch")
    (h, w), (p, q) = sizes
    problem = problem_of(f"resize x=f64[2,3,{h},{w}]nchw size=({p},{q}) {attributes}")
    words = dict(word.split("=") for word in attributes.split())
    mode = {"nearest_exact": "nearest-exact", "linear": "bilinear", "cubic": "bicubic", "area": "area"}[words["mode"]]
    flags = {n: True for n in ("align_corners", "antialias") if n in words}
    rng = np.random.default_rng(4)
    x, dy = rng.standard_normal((2, 3, h, w)), rng.standard_normal((2, 3, p, q))
    leaf = torch.tensor(x, requires_grad=True)
    y = torch.nn.functional.interpolate(leaf, (p, q), mode=mode, **flags)
    y.backward(torch.tensor(dy))
    np.testing.assert_allclose(REFERENCES["resize"](problem, {"x": x}, {})["y"].want, y.detach().numpy(), atol=1e-12)
    backward = problem_of(f"resize_backward dy=f64[2,3,{p},{q}]nchw x_shape=(2,3,{h},{w}) {attributes}")
    np.testing.assert_allclose(REFERENCES["resize_backward"](backward, {"dy": dy}, {})["dx"].want, leaf.grad.numpy(), atol=1e-12)


def test_every_tap_lies_in_its_band() -> None:
    """Elements with a weight lie in the band of their block, whose weights, where the text holds them, are the reference's."""
    rng, kinds = np.random.default_rng(5), set()
    for _ in range(150):
        problem = SAMPLES["resize"](rng, "small")
        assert isinstance(problem, ResizeProblem)
        for dimension, axis in enumerate(problem.axes):
            for is_transposed in (False, True):
                weights = matrix(problem, dimension)
                weights = weights.T if is_transposed else weights
                count, taps = weights.shape
                f = replace(Filter.of(problem), is_transposed=is_transposed)
                for block in (1, 2, 4):
                    bands = bands_of(axis, block, f, problem.mode == "nearest")
                    kinds.add((bands.places, bands.has_weights))
                    # as the kernels place them
                    for begin in range(0, count, block):
                        if bands.places == "divided":
                            first = min(max(begin * axis.step + axis.low, 0) // axis.denominator, taps - 1)
                        elif bands.places == "even":
                            first = begin // block * bands.advance + bands.origin
                        elif not is_transposed:
                            first = (begin * axis.step + axis.low) // axis.denominator
                        else:
                            first = -((axis.high - begin * axis.denominator) // axis.step) if axis.step else 0
                            first = min(first, 0) if begin == 0 else first
                        got = np.zeros((block, taps))
                        for k, readers in enumerate(bands.taps):
                            place = min(max(first + k, 0), taps - 1)
                            for r, weight, _ in readers:
                                if isinstance(weight, tuple):
                                    weight = weight[1 if begin == 0 else 2 if begin + block >= count else 0]
                                got[r, place] += 1 if weight is None else weight
                        for r, row in enumerate(weights[begin:begin + block]):
                            if bands.has_weights:
                                assert not ((row != 0) & (got[r] == 0)).any()
                            else:
                                np.testing.assert_allclose(got[r], row, atol=1e-12)
    assert kinds == {("even", False), ("divided", False), ("table", True)}


def test_positions_stay_exact_where_floats_do_not() -> None:
    """2^30 + 1 elements doubled: s(o) = o / 2 has no f32. Nearest takes o // 2 to the last output."""
    axis = problem_of("resize x=f32[1,1,1073741823]nchw size=2147483646").axes[0]
    for o in (0, 1, 2**24 + 1, 2**31 - 3):
        assert (axis.step * o + axis.low) // axis.denominator == o // 2


def test_images_beyond_two_billion_outputs_are_sliced() -> None:
    device = known_device("sm_90a")
    problem = problem_of("resize x=f16[5,16384,128,128]nchw size=256")
    engine = ENGINES["resize"][0]
    assert engine.check_support(problem, device)
    steps = engine.build_steps(problem, EngineConfig.of(vec=1, rows=1, across=1), device).steps
    assert [step.args[0] for step in steps] == [TensorArg("x", image * 16384 * 128 * 128 * 2) for image in range(5)]
    assert all(step.grid == (2**30 // 128, 1, 1) for step in steps)
    assert not engine.check_support(problem_of("resize x=f16[1,32768,128,128]nchw size=256"), device)


def test_a_workspace_limit_is_kept() -> None:
    device, engine = known_device("sm_90a"), ENGINES["resize"][0]
    problem = problem_of("resize x=f32[1,2,64,64]nchw size=127 mode=cubic workspace_limit=1000")
    support = engine.check_support(problem, device)
    assert not support and "workspace_limit=1000" in support.reason
    problem = problem_of("resize x=f32[1,2,64,64]nchw size=128 mode=cubic workspace_limit=20000")
    for config in engine.configs(problem, device):
        assert engine.build_steps(problem, config, device).workspace_bytes <= 20000
