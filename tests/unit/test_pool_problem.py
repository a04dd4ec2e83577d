"""Pooling and loss problems: geometry, refusals, and the references against published values and ONNX's own reference."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import EngineConfig, TensorArg
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import format_case, parse_case
from oxidnn.testing.reference import REFERENCES
from oxidnn.testing.sample import SAMPLES
from oxidnn.testing.sample.loss import SAMPLES as LOSS_OPS
from oxidnn.testing.sample.pool import SAMPLES as POOL_OPS


def reference(line: str, output: str, **inputs: object) -> np.ndarray:
    problem = parse_case(line)
    arrays = {n: np.asarray(v) if np.asarray(v).dtype.kind in "iu" else np.asarray(v, np.float64) for n, v in inputs.items()}
    return np.asarray(REFERENCES[problem.op](problem, arrays, {})[output].want)


@pytest.mark.parametrize(("attributes", "length", "outputs"), [
    ("window=3 stride=2", 8, 3), ("window=3 stride=2 ceil_mode=True", 8, 4), ("window=1 stride=3 ceil_mode=True", 5, 2),
    ("window=2 stride=2 padding=1 ceil_mode=True", 5, 3), ("window=3 dilation=2", 9, 2), ("window=3 stride=2 padding='same_upper'", 8, 4),
    ("window=3 stride=2 ceil_mode=True", 2, 1), ("window=2 stride=1 padding=((1,0),)", 4, 4),
])
def test_output_extent(attributes: str, length: int, outputs: int) -> None:
    assert parse_case(f"max_pool x=f32[1,1,{length}]nchw {attributes}").desc("y").shape == (1, 1, outputs)


@pytest.mark.parametrize(("line", "words"), [
    ("max_pool x=f32[4,8]nchw window=2", "shape of x is (4, 8)"),
    ("max_pool x=f32[1,1,8]nchw", "window is None"),
    ("max_pool x=f32[1,1,8]nchw window=0", "window is 0"),
    ("max_pool x=f32[1,1,8,8]nchw window=(2,2,2)", "window is (2, 2, 2)"),
    ("max_pool x=f32[1,1,8]nchw window=9", "window[0] is 9"),
    ("max_pool x=f32[1,1,8]nchw window=2 padding=2", "holds no element"),
    ("max_pool x=f32[1,1,2]nchw window=2 dilation=3 padding=1 stride=1", "holds no element"),
    ("max_pool x=f32[1,1,8]nchw window=2 padding=sideways", "padding is 'sideways'"),
    ("max_pool x=f32[1,1,8]nchw window=2 count_include_pad=True", "'count_include_pad' is no attribute"),
    ("max_pool x=s64[1,1,8]nchw window=2", "type of x is s64"),
    ("max_pool x=f32[1,1,8]nchw y=f32[1,1,5]nchw window=2", "shape of y is [1, 1, 5]"),
    ("avg_pool x=s8[1,1,8]nchw window=2", "type of x is s8"),
    ("avg_pool x=f32[1,1,8]nchw window=2 divisor_override=0", "divisor_override is 0"),
    ("avg_pool_backward dy=f32[1,1,4]nchw window=2", "x_shape is None"),
    ("avg_pool_backward dy=f32[1,1,4]nchw window=2 x_shape=(1,1,7)", "shape of dy is (1, 1, 4)"),
    ("max_pool_backward dy=f32[1,1,4]nchw window=2 x_shape=(1,1,8)", "x is missing"),
    ("adaptive_avg_pool x=f32[1,1,4]nchw output_size=0", "output_size is 0"),
    ("lp_pool x=f64[1,1,4]nchw window=2 norm=3.0", "norm is 3.0"),
    ("softmax x=f32[2,3]nchw axis=2", "axis is 2"),
    ("softmax x=s32[2,3]nchw", "type of x is s32"),
    ("softmax_backward dy=f32[2,3]nchw y=f32[2,4]nchw", "shape of y is [2, 4]"),
    ("cross_entropy logits=f32[2,3]nchw target=s64[3]nchw", "shape of target is [3]"),
    ("cross_entropy logits=f32[2,3]nchw target=s8[2]nchw", "type of target is s8"),
    ("cross_entropy logits=f32[2,3]nchw target=f32[2]nchw", "shape of target is [2]"),
    ("cross_entropy logits=f32[2,3]nchw target=s64[2]nchw weight=f32[2]nchw", "shape of weight is [2]"),
    ("cross_entropy logits=f32[2,3]nchw target=s64[2]nchw reduction=average", "reduction is 'average'"),
    ("cross_entropy logits=f32[2,3]nchw target=s64[2]nchw label_smoothing=1.5", "label_smoothing is 1.5"),
    ("cross_entropy_backward logits=f32[2,3]nchw target=s64[2]nchw d_loss=f32[2]nchw", "shape of d_loss is [2]"),
])
def test_refusals_name_the_argument(line: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_case(line)
    assert words in str(caught.value)


@pytest.mark.parametrize("op", [*POOL_OPS, *LOSS_OPS])
def test_random_problems_survive_the_case_grammar(op: str) -> None:
    rng = np.random.default_rng(11)
    for _ in range(40):
        line = format_case(SAMPLES[op](rng, "small"))
        assert format_case(parse_case(line)) == line


def test_published_pooling_values() -> None:
    nan, inf = np.nan, np.inf
    y = reference("max_pool x=f32[1,1,5]nchw window=1 stride=3 ceil_mode=True", "y", x=[[[10, 20, 30, 40, 50.0]]])
    assert y.tolist() == [[[10, 40]]]
    line = "max_pool x=f32[1,1,6]nchw window=2 return_indices=True"
    x = [[[1, nan, 2, 3, -inf, -inf]]]
    np.testing.assert_array_equal(reference(line, "y", x=x), [[[nan, 3, -inf]]])
    assert reference(line, "indices", x=x).tolist() == [[[1, 3, 4]]]
    x = [[[2, 4, 6, 8, 10.0]]]
    assert reference("avg_pool x=f32[1,1,5]nchw window=3 ceil_mode=True", "y", x=x).tolist() == [[[4, 9]]]
    line = "avg_pool x=f32[1,1,5]nchw window=3 ceil_mode=True divisor_override=10 count_include_pad=False"
    np.testing.assert_allclose(reference(line, "y", x=x), [[[1.2, 1.8]]])
    line = "adaptive_avg_pool_backward dy=f32[1,1,3]nchw output_size=3 x_shape=(1,1,5)"
    np.testing.assert_allclose(reference(line, "dx", dy=np.ones((1, 1, 3))), [[[1 / 2, 5 / 6, 1 / 3, 5 / 6, 1 / 2]]])


def test_published_loss_values() -> None:
    inf = np.inf
    np.testing.assert_array_equal(reference("softmax x=f32[1,3]nchw", "y", x=[[-inf, 0, 0]]), [[0, 0.5, 0.5]])
    assert np.isnan(reference("softmax x=f32[1,3]nchw", "y", x=[[-inf] * 3])).all()
    line = "cross_entropy logits=f32[2,2]nchw target=s64[2]nchw label_smoothing=0.2"
    assert reference(line, "loss", logits=[[2.0, 0], [0, 1]], target=[0, -100]) == pytest.approx(0.3269, abs=5e-5)


def _onnx(op_type: str, inputs: dict[str, np.ndarray], num_outputs: int = 1, opset: int = 18, **attributes: object) -> list[np.ndarray]:
    onnx = pytest.importorskip("onnx")
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    outputs = [f"out{i}" for i in range(num_outputs)]
    node = helper.make_node(op_type, list(inputs), outputs, **attributes)
    values = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in inputs.items()]
    results = [helper.make_tensor_value_info(o, onnx.TensorProto.DOUBLE, None) for o in outputs]
    graph = helper.make_graph([node], "g", values, results)
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])).run(None, inputs)


@pytest.mark.parametrize(("window", "stride", "pads"), [((3, 2), (2, 1), (1, 0, 1, 0)), ((2, 3), (2, 2), (0, 1, 1, 1))])
def test_pooling_agrees_with_onnx(window: tuple[int, ...], stride: tuple[int, ...], pads: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 7, 9))
    ours = f"x=f32[2,3,7,9]nchw window={window} stride={stride} padding={((pads[0], pads[2]), (pads[1], pads[3]))}".replace(" (", "(")
    ours = ours.replace(", ", ",")
    common = {"kernel_shape": window, "strides": stride, "pads": pads}
    np.testing.assert_allclose(reference(f"max_pool {ours}", "y", x=x), _onnx("MaxPool", {"x": x}, **common)[0])
    for include in (0, 1):
        line = f"avg_pool {ours} count_include_pad={bool(include)}"
        np.testing.assert_allclose(reference(line, "y", x=x), _onnx("AveragePool", {"x": x}, count_include_pad=include, **common)[0])
    np.testing.assert_allclose(reference(f"lp_pool {ours} norm=3.0", "y", x=x), _onnx("LpPool", {"x": x}, p=3, **common)[0])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_agrees_with_onnx(reduction: str, weighted: bool) -> None:
    rng = np.random.default_rng(1)
    logits, target, weight = rng.standard_normal((4, 5, 3)), rng.integers(0, 5, (4, 3)), rng.uniform(0.1, 2, 5)
    target[1, 1] = -100
    inputs = {"logits": logits, "target": target} | ({"weight": weight} if weighted else {})
    line = "cross_entropy logits=f32[4,5,3]nchw target=s64[4,3]nchw" + (" weight=f32[5]nchw" if weighted else "")
    want = _onnx("SoftmaxCrossEntropyLoss", inputs, reduction=reduction, ignore_index=-100)[0]
    np.testing.assert_allclose(reference(f"{line} reduction={reduction}", "loss", **inputs), want)


@pytest.mark.parametrize("line", [
    "cross_entropy_backward logits=f32[3,4,2]nchw target=s64[3,2]nchw weight=f32[4]nchw label_smoothing=0.2",
    "cross_entropy_backward logits=f32[3,4,2]nchw target=f32[3,4,2]nchw weight=f32[4]nchw label_smoothing=0.2",
    "cross_entropy_backward logits=f32[3,4,2]nchw target=s64[3,2]nchw d_loss=f32[3,2]nchw reduction=none",
    "softmax_backward dy=f32[3,4,2]nchw y=f32[3,4,2]nchw axis=1", "softmax_backward dy=f32[3,4,2]nchw y=f32[3,4,2]nchw axis=1 log=True",
    "avg_pool_backward dy=f32[1,2,3]nchw window=3 stride=2 padding=1 count_include_pad=False x_shape=(1,2,6)",
    "lp_pool_backward dy=f32[1,2,3]nchw x=f32[1,2,6]nchw y=f32[1,2,3]nchw window=2 norm=3.0",
    "max_pool_backward dy=f32[1,2,3]nchw x=f32[1,2,6]nchw window=2",
])
def test_gradients_are_those_of_the_forward_reference(line: str) -> None:
    """dx . v against (forward(x + h v) - forward(x - h v)) / 2h, weighted by the upstream gradient."""
    rng, problem = np.random.default_rng(2), parse_case(line)
    forward_op = problem.op.removesuffix("_backward")
    words = [w for w in line.split()[1:] if not w.startswith(("dy=", "y=", "d_loss=", "x_shape"))]
    source = {"cross_entropy": "logits"}.get(forward_op, "x")
    shape = problem.outputs[0].desc.shape
    if not any(w.startswith(f"{source}=") for w in words):
        words.insert(0, f"{source}=f32[{','.join(map(str, shape))}]nchw")
    forward = parse_case(" ".join([forward_op, *words]))
    x, v = rng.standard_normal(shape), rng.standard_normal(shape)
    inputs = {}
    if forward_op == "cross_entropy":
        probability = rng.uniform(size=shape)
        inputs["target"] = probability if problem.desc("target").dtype.is_float else np.array([[0, 3], [1, -100], [2, 2]])
        if problem.has("weight"):
            inputs["weight"] = rng.uniform(0.5, 2, 4)
    output = forward.outputs[0].name

    def run(at: np.ndarray) -> np.ndarray:
        return np.asarray(REFERENCES[forward_op](forward, inputs | {source: at}, {})[output].want)

    dy = rng.standard_normal(run(x).shape)
    upstream = next((n for n in ("dy", "d_loss") if problem.has(n)), None)
    given = dict(inputs) | ({upstream: dy} if upstream else {})
    dy = dy if upstream else np.ones(())
    for name, value in (("x", x), ("logits", x), ("y", run(x))):
        if problem.has(name):
            given[name] = value
    dx = REFERENCES[problem.op](problem, given, {})[problem.outputs[0].name].want
    numeric = ((run(x + 1e-6 * v) - run(x - 1e-6 * v)) / 2e-6 * dy).sum()
    assert (dx * v).sum() == pytest.approx(numeric, rel=1e-6, abs=1e-8)


def test_images_beyond_two_billion_outputs_are_sliced() -> None:
    device = known_device("sm_90a")
    problem = parse_case("max_pool x=f16[5,16384,256,256]nchw window=1")
    engine = ENGINES["max_pool"][0]
    assert engine.check_support(problem, device)
    steps = engine.build_steps(problem, EngineConfig.of(vec=1, threads=128), device).steps
    assert [step.args[0] for step in steps] == [TensorArg("x", image * 16384 * 256 * 256 * 2) for image in range(5)]
    assert all(step.grid == (2**30 // 128, 1, 1) for step in steps)
    assert not engine.check_support(parse_case("max_pool x=f16[1,32768,256,256]nchw window=1"), device)
