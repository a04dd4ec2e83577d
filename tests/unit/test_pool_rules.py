"""The rules of pooling and resizing over every small geometry: the references that kernels are held to, against PyTorch and exact
fractions."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest

from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.ops.resize import ResizeProblem
from oxidnn.testing.reference import REFERENCES
from oxidnn.testing.reference.resize import matrix

GEOMETRIES = [(length, window, stride, padding, ceil) for length in range(1, 8) for window in range(1, 4) for stride in range(1, 4)
              for padding in range(window // 2 + 1) for ceil in (False, True) if length + 2 * padding >= window]


def reference(line: str, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    problem = parse_case(line)
    return {name: np.asarray(found.want) for name, found in REFERENCES[problem.op](problem, inputs, {}).items()}


def test_windows_start_where_pytorch_s_do() -> None:
    """Extents, largest elements and their places, with a NaN and with an infinity; the last window is dropped, not read past the end."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    for length, window, stride, padding, ceil in GEOMETRIES:
        x = rng.standard_normal((2, 3, length))
        x[0, 0, length // 2], x[0, 1] = np.nan, -np.inf
        line = f"max_pool x=f64[2,3,{length}]nchw window={window} stride={stride} padding={padding} ceil_mode={ceil} return_indices=True"
        got = reference(line, x=x)
        y, at = torch.nn.functional.max_pool1d(torch.tensor(x), window, stride, padding, 1, ceil, True)
        np.testing.assert_array_equal(got["y"], y.numpy(), err_msg=line)
        inside = np.isfinite(got["y"])  # of equals PyTorch's first, which is ours; of a NaN its last in a window
        np.testing.assert_array_equal(got["indices"][inside], at.numpy()[inside], err_msg=line)
        assert (got["indices"] >= 0).all() and (got["indices"] < length).all()
        taken = np.take_along_axis(x, got["indices"], -1)
        np.testing.assert_array_equal(taken, got["y"], err_msg=line)


@pytest.mark.parametrize("rest", [(True, None), (False, None), (True, 7), (False, 7)])
def test_divisors_are_pytorch_s(rest: tuple[bool, int | None]) -> None:
    torch = pytest.importorskip("torch")
    includes, divisor = rest
    rng = np.random.default_rng(1)
    for length, window, stride, padding, ceil in GEOMETRIES:
        x = rng.standard_normal((1, 2, length, 1))
        words = f"window=({window},1) stride=({stride},1) padding=({padding},0) ceil_mode={ceil} count_include_pad={includes}"
        words += f" divisor_override={divisor}" if divisor else ""
        line = f"avg_pool x=f64[1,2,{length},1]nchw {words}"
        leaf = torch.tensor(x, requires_grad=True)
        want = torch.nn.functional.avg_pool2d(leaf, (window, 1), (stride, 1), (padding, 0), ceil, includes, divisor)
        np.testing.assert_allclose(reference(line, x=x)["y"], want.detach().numpy(), rtol=1e-13, err_msg=line)
        dy = rng.standard_normal(want.shape)
        want.backward(torch.tensor(dy))
        shape = ",".join(map(str, want.shape))
        line = f"avg_pool_backward dy=f64[{shape}]nchw x_shape=(1,2,{length},1) {words}"
        np.testing.assert_allclose(reference(line, dy=dy)["dx"], leaf.grad.numpy(), rtol=1e-12, atol=1e-14, err_msg=line)


def test_adaptive_bins_and_their_gradients_are_pytorch_s() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    for length in range(1, 13):
        for outputs in range(1, 15):
            x, dy = rng.standard_normal((1, 2, length)), rng.standard_normal((1, 2, outputs))
            for mode, function in (("avg", torch.nn.functional.adaptive_avg_pool1d), ("max", torch.nn.functional.adaptive_max_pool1d)):
                leaf = torch.tensor(x, requires_grad=True)
                want = function(leaf, outputs)
                want.backward(torch.tensor(dy))
                y = reference(f"adaptive_{mode}_pool x=f64[1,2,{length}]nchw output_size={outputs}", x=x)["y"]
                np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-13)
                line = f"adaptive_{mode}_pool_backward dy=f64[1,2,{outputs}]nchw output_size={outputs} x_shape=(1,2,{length})"
                given = {"dy": dy}
                if mode == "max":
                    line = line.replace(" output_size", f" x=f64[1,2,{length}]nchw output_size")
                    given["x"] = x
                np.testing.assert_allclose(reference(line, **given)["dx"], leaf.grad.numpy(), rtol=1e-12, atol=1e-14)


def test_a_window_without_an_element_is_refused() -> None:
    for line in ("max_pool x=f32[1,1,5]nchw window=2 padding=2", "avg_pool x=f32[1,1,5]nchw window=2 padding=2 count_include_pad=False"):
        with pytest.raises(InvalidArgument, match="holds no element"):
            parse_case(line)


def test_nearest_elements_by_exact_fractions() -> None:
    """floor(o I / O), and floor((o + 1/2) I / O): for every pair of extents, and the transpose gives back to the same elements."""
    for extent in range(1, 41):
        for outputs in range(1, 41):
            for mode, middle in (("nearest", Fraction(0)), ("nearest_exact", Fraction(1, 2))):
                problem = parse_case(f"resize x=f64[1,1,{extent}]nchw size={outputs} mode={mode}")
                assert isinstance(problem, ResizeProblem)
                want = np.zeros((outputs, extent))
                for o in range(outputs):
                    want[o, min(floor((o + middle) * extent / outputs), extent - 1)] = 1
                np.testing.assert_array_equal(matrix(problem, 0), want)


@pytest.mark.parametrize("coefficient", [-0.75, -0.5, -1.0])
@pytest.mark.parametrize("antialias", [False, True])
def test_cubic_weights_are_those_of_the_coefficient(coefficient: float, antialias: bool) -> None:
    """Keys' kernel at each tap's distance, over the reduction where antialiased; every row of weights sums to 1."""
    def keys(t: np.ndarray) -> np.ndarray:
        t, a = np.abs(t), coefficient
        near, far = (a + 2) * t**3 - (a + 3) * t**2 + 1, a * (t**3 - 5 * t**2 + 8 * t - 4)
        return np.where(t <= 1, near, np.where(t < 2, far, 0.0))

    for extent, outputs in ((8, 16), (9, 5), (12, 4), (5, 7), (6, 6)):
        words = f"mode=cubic antialias={antialias} cubic_coefficient={coefficient}"
        problem = parse_case(f"resize x=f64[1,1,{extent}]nchw size={outputs} {words}")
        assert isinstance(problem, ResizeProblem)
        ratio = extent / outputs
        widened = max(ratio, 1.0) if antialias else 1.0
        places = (np.arange(outputs) + 0.5) * ratio - 0.5
        taps = np.arange(-40, extent + 40)
        weights = keys((taps - places[:, None]) / widened)
        inside = (taps >= 0) & (taps < extent)
        if antialias:  # what lies outside has no weight
            want = np.where(inside, weights, 0)[:, 40:40 + extent]
            want = want / want.sum(1, keepdims=True)
        else:  # what lies outside is the edge's
            want = np.zeros((outputs, extent))
            for j, tap in enumerate(taps):
                want[:, min(max(tap, 0), extent - 1)] += weights[:, j]
        np.testing.assert_allclose(matrix(problem, 0), want, atol=1e-12)
        np.testing.assert_allclose(matrix(problem, 0).sum(1), 1, atol=1e-12)
