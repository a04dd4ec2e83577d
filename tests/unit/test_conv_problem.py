"""Convolution and GEMM as problems: what is refused and in which words, what is inferred, and the references against other sources."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from oxidnn.dtypes import BF16, F16, F32
from oxidnn.errors import InvalidArgument
from oxidnn.ops import OPS, Policy
from oxidnn.ops.case import format_case, parse_case
from oxidnn.tensor import TensorDesc
from oxidnn.testing.reference import REFERENCES

REFUSED = (
    # (case, words the message must hold: the argument, the value got, what is allowed)
    ("conv_fprop x=f32[2,3] w=f32[4,3,3,3]", ("rank of x is 2", "3, 4 or 5")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3]", ("rank of w is 3", "the same for all")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,5,3,3]", ("channels of w times groups is 5 * 1", "3, the channels of x", "w: f32 [4,5,3,3]")),
    ("conv_fprop x=f32[2,4,8,8] w=f32[4,3,3,3] groups=2", ("channels of w times groups is 3 * 2", "4")),
    ("conv_fprop x=f32[2,4,8,8] w=f32[5,2,3,3] groups=2", ("groups is 2", "divisor of the 5 filters")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] groups=0", ("groups is 0", "at least 1")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] padding=-1", ("padding is -1", "at least 0")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] padding=((0,1),)", ("padding is ((0, 1),)",)),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] padding=some", ("padding is 'some'", "same_upper")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] stride=0", ("stride is 0", "at least 1")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] stride=(1,2,3)", ("stride is (1, 2, 3)", "2 of them")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] stride=1.5", ("stride is 1.5",)),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] dilation=0", ("dilation is 0",)),
    ("conv_fprop x=f32[2,3,4,8] w=f32[4,3,5,3]", ("spatial shape of w is [5, 3]", "padded extent [4, 8] of x")),
    ("conv_fprop x=f32[2,3,4,8] w=f32[4,3,3,3] dilation=2", ("with dilation [5, 5]", "[4, 8]")),
    ("conv_fprop x=s16[2,3,8,8] w=s16[4,3,3,3]", ("type of x is s16", "f64 or f32 or f16 or bf16 or e4m3 or e5m2 or s8 or u8")),
    ("conv_fprop x=s8[2,3,8,8] w=e4m3[4,3,3,3]", ("type of w is e4m3", "s8 or u8, the type of x")),
    ("conv_fprop x=f16[2,3,8,8] w=f16[4,3,3,3] scale_x=f32[1]", ("scale_x is given", "8-bit inputs", "x is f16")),
    ("conv_fprop x=s8[2,3,8,8] w=s8[4,3,3,3] scale_x=f32[3]", ("shape of scale_x is [3]", "[1]")),
    ("conv_fprop x=s8[2,3,8,8] w=s8[4,3,3,3] scale_w=f32[3]", ("shape of scale_w is [3]", "[1] or [4]")),
    ("conv_fprop x=s8[2,3,8,8] w=s8[4,3,3,3] scale_w=f16[4]", ("type of scale_w is f16", "f32")),
    ("conv_fprop x=u8[2,3,8,8] w=s8[4,3,3,3] zero_x=s8[1]", ("type of zero_x is s8", "u8")),
    ("conv_fprop x=u8[2,3,8,8] w=s8[4,3,3,3] zero_y=u8[1]", ("zero_y is given", "scale_y and a result in s8 or u8")),
    ("conv_fprop x=e4m3[2,3,8,8] w=e4m3[4,3,3,3] zero_x=e4m3[1]", ("type of zero_x is e4m3", "s8 or u8")),
    ("conv_fprop x=s8[2,3,8,8] w=s8[4,3,3,3] scale_x=f32[1] out_dtype=s32", ("out_dtype is s32", "f32 or f64 or f16 or bf16 or s8 or u8")),
    ("conv_fprop x=s8[2,3,8,8] w=s8[4,3,3,3] scale_y=f32[1] out_dtype=f16", ("out_dtype is f16", "s8")),
    ("conv_fprop x=s8[2,3,8,8] w=s8[4,3,3,3] saturate=False", ("saturate is False", "scale_y")),
    ("conv_fprop x=s8[2,3,8,8] w=s8[4,3,3,3] bias=s32[4] epilogue=bias_relu", ("epilogue is", "names other than")),
    ("conv_fprop x=s8[2,3,8,8] w=s8[4,3,3,3] bias=s32[3]", ("shape of bias is [3]", "[4]")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] bias=s32[4]", ("type of bias is s32", "f64")),
    ("conv_fprop x=s8[2,3,8,8] w=s8[4,3,3,3] y=s16[2,4,6,6]", ("type of y is s16",)),
    ("conv_fprop x=f32[2,3,8,8] w=f16[4,3,3,3]", ("type of w is f16", "f32, the type of x")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] y=f32[2,4,8,8]", ("shape of y is [2, 4, 8, 8]", "[2, 4, 6, 6]")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] y=s32[2,4,6,6]", ("type of y is s32",)),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] y=f32[2,4,6,6](0,36,6,1)", ("strides of y", "overlap")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,0,3]", ("spatial shape of w",)),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] bias=f32[3]", ("shape of bias is [3]", "[4]")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] bias=f32[4] epilogue=relu", ("bias is given", "epilogue")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] epilogue=bias_relu", ("bias is missing",)),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] residual=f32[2,4,6,5]", ("shape of residual is [2, 4, 6, 5]", "[2, 4, 6, 6]")),
    ("conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] pad=1", ("'pad' is no attribute", "padding")),
    ("conv_fprop x=f32[2,3,8,8]", ("w is missing",)),
    ("conv_dgrad dy=f32[2,4,6,6] w=f32[4,3,3,3]", ("x_shape is missing",)),
    ("conv_dgrad dy=f32[2,4,6,6] w=f32[4,3,3,3] x_shape=(2,3,9,8)", ("shape of dy is [2, 4, 6, 6]", "[2, 4, 7, 6]")),
    ("conv_dgrad dy=f32[2,4,6,6] w=f32[4,3,3,3] x_shape=(2,3,8,8) dx=f32[2,3,8,9]", ("shape of dx is [2, 3, 8, 9]", "[2, 3, 8, 8]")),
    ("conv_wgrad x=f32[2,3,8,8] dy=f32[2,4,6,6] w_shape=(4,3,3)", ("w_shape is (4, 3, 3)", "4 non-negative integers")),
    ("conv_wgrad x=f32[2,3,8,8] dy=f32[2,4,6,6] w_shape=(5,3,3,3)", ("shape of dy", "[2, 5, 6, 6]")),
    ("conv_wgrad x=f32[2,3,8,8] dy=f32[2,4,6,6] w_shape=(4,3,3,3) epilogue=relu", ("'epilogue' is no attribute",)),
    ("conv_transpose x=f32[1,4,3,3] w=f32[4,2,3,3] stride=2 output_padding=2", ("output_padding is [2, 2]", "less than stride")),
    ("conv_transpose x=f32[1,4,3,3] w=f32[5,2,3,3]", ("shape of x is [1, 4, 3, 3]", "[1, 5, 3, 3]")),
    ("conv_transpose_dgrad dy=f32[1,2,7] w=f32[3,2,3] stride=2 x_shape=(1,3,4)", ("shape of dx is [1, 3, 4]", "[1, 3, 3]")),
    ("conv_transpose x=f32[1,4,1,1] w=f32[4,2,3,3] padding=2", ("padding is",)),
    ("conv_bgrad dy=f32[3,4]", ("rank of dy is 2",)),
    ("gemm a=f32[3] b=f32[3,4]", ("rank of a is 1",)),
    ("gemm a=f32[3,5] b=f32[4,6]", ("inner extent of b is 4", "5")),
    ("gemm a=f32[3,5] b=f64[5,6]", ("type of b is f64",)),
    ("gemm a=f32[2,3,5] b=f32[3,5,6]", ("batch shape of b is [3]", "[2]")),
    ("gemm a=f32[3,5] b=f32[5,6] beta=1", ("beta is 1.0", "unless c is given")),
    ("gemm a=f32[3,5] b=f32[5,6] c=f32[3,5] beta=1", ("shape of c is [3, 5]",)),
    ("gemm a=f32[3,5] b=f32[5,6] transpose_a=2", ("transpose_a is 2",)),
    ("gemm a=f32[3,5] b=f32[5,6] alpha=x", ("alpha is 'x'",)),
    ("gemm a=f32[3,5] b=f32[5,6] d=f32[6,3]", ("shape of d is [6, 3]", "[3, 6]")),
)


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refusals_name_argument_value_and_what_is_allowed(line: str, words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_case(line)
    message = str(caught.value)
    assert message.startswith(line.split()[0] + ": ")
    for word in words:
        assert word in message, message


def test_outputs_are_inferred_in_type_shape_and_layout() -> None:
    p = parse_case("conv_fprop x=bf16[2,8,9,7]nhwc w=bf16[4,8,3,3] stride=2 padding=((1,0),(2,1))")
    assert p.desc("y") == TensorDesc.packed(BF16, (2, 4, 4, 4), "nhwc")
    # One channel is both layouts at once: the filter decides.
    assert parse_case("conv_fprop x=f32[2,1,5,5] w=f32[4,1,3,3]").desc("y").is_packed("nchw")
    assert parse_case("conv_fprop x=f16[2,3,5,5] w=f16[4,3,3,3] y=f32[2,4,3,3]").desc("y").dtype is F32
    assert parse_case("conv_transpose x=f16[2,6,5] w=f16[6,4,3] groups=2 stride=3 output_padding=1").desc("y") == TensorDesc.packed(
        F16, (2, 8, 16))
    assert parse_case("conv_bgrad dy=bf16[2,5,3,4]").desc("db") == TensorDesc.packed(BF16, (5,))
    assert parse_case("gemm a=f32[4,1,3,2] b=f32[5,6,2] transpose_b=True").desc("d") == TensorDesc.packed(F32, (4, 5, 3, 6))


def test_attributes_are_normalised() -> None:
    """Different ways to write one problem make one problem (one key, one line)."""
    line = "conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] bias=f32[4]"
    ways = [f"{line} padding=1", f"{line} padding=(1,1)", f"{line} padding=((1,1),(1,1)) stride=(1,1)",
            f"{line} padding=same_upper groups=1", f"{line} padding=1 epilogue='acc + bias'"]
    problems = {parse_case(way) for way in ways}
    assert len(problems) == 1
    (p,) = problems
    assert p.attrs == (("padding", 1),) and parse_case(format_case(p)) == p
    assert p.flops == 2 * 2 * 4 * 64 * 27


@pytest.mark.parametrize(("extent", "taps", "stride", "dilation", "upper"), [
    (7, 4, 2, 1, (1, 2)), (7, 2, 1, 1, (0, 1)), (8, 3, 3, 2, (1, 2)), (5, 1, 2, 1, (0, 0))])
def test_same_padding(extent: int, taps: int, stride: int, dilation: int, upper: tuple[int, int]) -> None:
    line = f"conv_fprop x=f32[1,1,{extent}] w=f32[1,1,{taps}] stride={stride} dilation={dilation}"
    assert parse_case(f"{line} padding=same_upper").padding == parse_case(f"{line} padding=same").padding == (upper,)
    assert parse_case(f"{line} padding=same_lower").padding == (upper[::-1],)
    assert parse_case(f"{line} padding=same_upper").desc("y").shape[2] == -(-extent // stride)


# --- The references against hand-made values, a naive loop, and ONNX's ------------------------------------------------------------


def run(line: str, **inputs: np.ndarray) -> np.ndarray:
    p = parse_case(line)
    return REFERENCES[p.op](p, {k: np.asarray(v, np.float64) for k, v in inputs.items()}, {})[p.outputs[0].name].want


def test_reference_on_values_known_by_hand() -> None:
    ones = np.ones((1, 1, 9, 9))
    y = run("conv_fprop x=f32[1,1,9,9] w=f32[1,1,5,5] padding=4 dilation=2", x=ones, w=np.ones((1, 1, 5, 5)))[0, 0]
    assert (y[0, 0], y[0, 4], y[4, 4]) == (9, 15, 25)
    small = np.array([[[[1.0, 2], [3, 4]]]])
    y = run("conv_fprop x=f32[1,1,2,2] w=f32[1,1,2,2] padding=((0,1),(1,0))", x=small, w=[[[[1, 10], [100, 1000]]]])
    assert y[0, 0].tolist() == [[3010, 4321], [30, 43]]
    y = run("conv_transpose x=f32[1,1,2,2] w=f32[1,1,3,3] stride=2 padding=1 output_padding=1", x=small, w=np.ones((1, 1, 3, 3)))
    assert y[0, 0].tolist() == [[1, 3, 2, 2], [4, 10, 6, 6], [3, 7, 4, 4], [3, 7, 4, 4]]
    nothing = run("conv_wgrad x=f32[0,3,4,4] dy=f32[0,2,2,2] w_shape=(2,3,3,3)", x=np.zeros((0, 3, 4, 4)), dy=np.zeros((0, 2, 2, 2)))
    assert nothing.shape == (2, 3, 3, 3) and not nothing.any()


GEOMETRIES = [dict(stride=s, padding=p, dilation=d, groups=g, flip=f) for s, p, d, g, f in (
    ((1, 1), ((0, 0), (0, 0)), (1, 1), 1, False), ((2, 1), ((1, 0), (2, 1)), (1, 2), 1, False),
    ((3, 2), ((2, 2), (1, 1)), (2, 1), 2, True))]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_references_against_a_naive_loop(geometry: dict) -> None:  # type: ignore[type-arg]
    """One sum over everything, in the words of the definition; its bilinear form gives both gradients too."""
    rng = np.random.default_rng(0)
    g, shape_x, shape_w = geometry["groups"], (2, 4, 7, 6), (6, 4 // geometry["groups"], 3, 2)
    x, w = rng.standard_normal(shape_x), rng.standard_normal(shape_w)
    make = OPS["conv_fprop"].make
    p = make({"x": TensorDesc.packed(F32, shape_x), "w": TensorDesc.packed(F32, shape_w)}, geometry, Policy())
    y_shape = p.desc("y").shape
    dy = rng.standard_normal(y_shape)
    y, dx, dw = np.zeros(y_shape), np.zeros(shape_x), np.zeros(shape_w)
    (u, v), ((top, _), (left, _)), (dh, dv) = geometry["stride"], geometry["padding"], geometry["dilation"]
    for n, k, i, j in np.ndindex(*y_shape):
        group = k // (6 // g)
        for c, r, s in np.ndindex(*shape_w[1:]):
            a, b, channel = i * u - top + r * dh, j * v - left + s * dv, group * shape_w[1] + c
            if 0 <= a < shape_x[2] and 0 <= b < shape_x[3]:
                tap = (k, c, 2 - r, 1 - s) if geometry["flip"] else (k, c, r, s)
                y[n, k, i, j] += x[n, channel, a, b] * w[tap]
                dx[n, channel, a, b] += dy[n, k, i, j] * w[tap]
                dw[tap] += dy[n, k, i, j] * x[n, channel, a, b]
    inputs = {"x": x, "w": w, "dy": dy}
    for op, names, attrs, want in (("conv_fprop", ("x", "w"), {}, y), ("conv_dgrad", ("dy", "w"), {"x_shape": shape_x}, dx),
                                   ("conv_wgrad", ("x", "dy"), {"w_shape": shape_w}, dw)):
        q = OPS[op].make({name: TensorDesc.packed(F32, inputs[name].shape) for name in names}, geometry | attrs, Policy())
        got = REFERENCES[op](q, {name: inputs[name] for name in names}, {})[q.outputs[0].name]
        np.testing.assert_allclose(got.want, want, rtol=1e-12, atol=1e-12)
        assert (got.magnitude >= np.abs(got.want) - 1e-12).all()


@pytest.mark.parametrize(("spatial", "stride", "dilation", "groups"), list(itertools.product((1, 2, 3), (1, 2), (1, 2), (1, 2))))
def test_references_against_onnx(spatial: int, stride: int, dilation: int, groups: int) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    rng = np.random.default_rng(spatial)
    x, w = rng.standard_normal((2, 4, *(6, 5, 5)[:spatial])), rng.standard_normal((4, 4 // groups, *(3, 2, 2)[:spatial]))
    pads = (*range(spatial), *reversed(range(spatial)))  # before each, then after each
    spatial_attrs = {"strides": [stride] * spatial, "dilations": [dilation] * spatial}
    pairs = tuple(zip(pads[:spatial], pads[spatial:], strict=True))
    geometry = {"stride": stride, "dilation": dilation, "groups": groups, "padding": pairs}
    for onnx_op, op, extra in (("Conv", "conv_fprop", {}), ("ConvTranspose", "conv_transpose", {"output_padding": stride - 1})):
        if onnx_op == "ConvTranspose" and groups > 1:
            continue  # ONNX's own reference fails for groups of several filters; the adjoint test below has groups
        more = {"output_padding": [stride - 1] * spatial} if extra else {}
        node = onnx.helper.make_node(onnx_op, ["x", "w"], ["y"], pads=pads, group=groups, **spatial_attrs, **more)
        values = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.DOUBLE, None) for n in "xwy"]
        model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", values[:2], values[2:]))
        (want,) = ReferenceEvaluator(model).run(None, {"x": x, "w": w})
        p = OPS[op].make({"x": TensorDesc.packed(F32, x.shape), "w": TensorDesc.packed(F32, w.shape)}, geometry | extra, Policy())
        np.testing.assert_allclose(REFERENCES[op](p, {"x": x, "w": w}, {})["y"].want, want, rtol=1e-10, atol=1e-10)


def test_transposed_gradients_are_adjoints() -> None:
    """<dy, conv_transpose(x, w)> = <dx, x> = <dw, w> for the gradients at dy: a bilinear map and its two adjoints."""
    rng = np.random.default_rng(1)
    x, w, dy = rng.standard_normal((2, 4, 3, 5)), rng.standard_normal((4, 3, 3, 2)), rng.standard_normal((2, 6, 6, 10))
    attrs = "stride=2 padding=((1,0),(0,1)) output_padding=(0,1) groups=2"
    y = run(f"conv_transpose x=f32[2,4,3,5] w=f32[4,3,3,2] {attrs}", x=x, w=w)
    assert y.shape == dy.shape
    dx = run(f"conv_transpose_dgrad dy=f32[2,6,6,10] w=f32[4,3,3,2] {attrs}", dy=dy, w=w)
    dw = run(f"conv_transpose_wgrad x=f32[2,4,3,5] dy=f32[2,6,6,10] w_shape=(4,3,3,2) {attrs}", x=x, dy=dy)
    want = (dy * y).sum()
    np.testing.assert_allclose([(dx * x).sum(), (dw * w).sum()], [want, want], rtol=1e-12)


def test_gemm_reference() -> None:
    rng = np.random.default_rng(2)
    a, b, c = rng.standard_normal((2, 3, 4)), rng.standard_normal((5, 4)), rng.standard_normal((3, 1))
    got = run("gemm a=f32[2,3,4] b=f32[5,4] c=f32[3,1] transpose_b=True alpha=0.5 beta=-2 epilogue=relu", a=a, b=b, c=c)
    want = np.zeros((2, 3, 5))
    for i, m, n in np.ndindex(2, 3, 5):
        want[i, m, n] = max(0.0, 0.5 * sum(a[i, m, k] * b[n, k] for k in range(4)) - 2 * c[m, 0])
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)
