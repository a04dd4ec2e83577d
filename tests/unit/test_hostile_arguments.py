"""Arguments nobody should give: each is refused by InvalidArgument, before anything is written."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import oxidnn
from oxidnn.ops.case import parse_case

X = np.ones((1, 2, 4, 4), np.float32)
W = np.ones((2, 2, 3, 3), np.float32)


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


CALLS = {
    "misaligned": (lambda h: h.pointwise("x + 1", np.frombuffer(b"\0" * 9, np.uint8)[1:].view("f4")), "multiple of the 4 bytes"),
    "masked": (lambda h: h.pointwise("x + 1", np.ma.masked_array(np.ones(3, np.float32), [0, 1, 0])), "mask"),
    "set": (lambda h: h.conv(X, W, stride={1}), "conv_fprop: stride is {1}"),
    "dict": (lambda h: h.conv(X, W, stride={}), "conv_fprop: stride is {}"),
    "dict for a kind": (lambda h: h.quantize(X, {}, "tensor"), "quantize: kind is {}"),
    "set for a scoring": (lambda h: h.moe_route(X[0, 0], top_k=1, scoring={1}), "moe_route: scoring is {1}"),
    "set in parameters": (lambda h: h.activation(X, "leaky_relu", parameters=[{1}]), "activation: parameters is {1}"),
    "groups True": (lambda h: h.conv(X, W[:, :, :1], groups=True), "groups is True"),
    "groups 1.0": (lambda h: h.conv(X, W[:, :, :2], groups=1.0), "groups is 1.0"),
    "scalars": (lambda h: h.conv(X, W, scalars=True), "scalars"),
    "operands": (lambda h: h.conv(X, W, operands=3), "operands"),
    "wide scalar": (lambda h: h.pointwise("x * scalar(s)", X, s=1e300), "range of f32"),
    "complex scalar": (lambda h: h.pointwise("x * scalar(s)", X, s=np.complex64(1)), "real number"),
    "shape 3": (lambda h: h.empty(3), "shape"),
    "shape 1.5": (lambda h: h.empty((1.5,)), "shape"),
    "shape -1": (lambda h: h.zeros((-1,)), "shape"),
    "huge": (lambda h: h.empty((2**40, 2**40)), "2\\^47"),
    "layout": (lambda h: h.zeros((2, 3, 4, 4), layout="NHWC"), "layout"),
    "ragged": (lambda h: h.array([[1], [1, 2]]), "ragged"),
    "warmup": (lambda h: h.warmup([3]), "warmup"),
    "device": (lambda h: oxidnn.DnnHandle(3), "device"),
    "limit": (lambda h: oxidnn.DnnHandle("emu", workspace_limit="x"), "workspace_limit"),
    "deterministic": (lambda h: h.options(deterministic=[]).__enter__(), "deterministic"),
    "op": (lambda h: h.plan("conv", X, W), "conv_fprop"),
    "type of fp8 attention": (lambda h: h.attention(*(X.astype("float8_e4m3fn"),) * 3, out_dtype=1), "attention: out_dtype is 1"),
    "type of gguf": (lambda h: h.gguf_dequantize(np.zeros((1, 34), np.uint8), "Q8_0", dtype=1), "gguf_dequantize: dtype is 1"),
    "type of casts": (lambda h: h.cast(X, 1), "cast: dtype is 1"),
    "type of pointwise": (lambda h: h.pointwise("x + 1", X, dtype={}), "pointwise: dtype is {}"),
    "op None": (lambda h: h.explain(None, X), "op is None"),
    "op 1": (lambda h: h.plan(1, X), "op is 1"),
    "op a list": (lambda h: h.plan([], X), r"op is \[\]"),
    "attribute for an array": (lambda h: h.plan("dynamic_quantize", X, "s8", "token"), "global_scale is 's8'.*by name: kind"),
    "kind None": (lambda h: h.quantized_linear(X, X, X, kind=None), "quantized_linear: kind is None"),
    "concat of None": (lambda h: h.concat([X, None]), r"arrays\[1\] is None"),
    "concat of None first": (lambda h: h.concat([None, X]), r"arrays\[0\] is None"),
    "unknown argument": (lambda h: h.adamw_step([X], [X], [X], [X], step=1, foo=1), "adamw_step: .*'foo'"),
    "misspelt argument": (lambda h: h.softmax(X, axes=1), "softmax: .*'axes'.*axis"),
    "missing argument": (lambda h: h.rms_norm(), "rms_norm: .*'x'"),
    "too many arguments": (lambda h: h.triu(X, 0, 1), "triu: too many"),
    "unknown argument of the handle": (lambda h: oxidnn.DnnHandle("emu", tuning="off"), "DnnHandle: .*'tuning'"),
    "case strides": (lambda h: parse_case("softmax x=f32[4,5](--1,2)"), "strides"),
    "case alignment": (lambda h: parse_case("softmax x=f32[4,5]@2"), "aligned"),
    "case alignment 999": (lambda h: parse_case("softmax x=f32[4,5]@999"), "aligned"),
    "case twice": (lambda h: parse_case("gemm a=f32[4,5] a=f32[4,5] b=f32[5,4]"), "twice"),
    "case depth": (lambda h: parse_case("gemm a=f32[4,5] b=f32[5,4] alpha=" + "-" * 100_000 + "1"), "alpha"),
    "case tensor": (lambda h: parse_case("softmax x=bf16[8,64"), "is no tensor"),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused(name: str, h: oxidnn.DnnHandle) -> None:
    call, match = CALLS[name]
    with pytest.raises(oxidnn.InvalidArgument, match=match):
        call(h)


def test_what_goes_wrong_within_a_method_is_not_taken_for_its_signature(h: oxidnn.DnnHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise TypeError("within")

    monkeypatch.setattr(h._session, "run", fails)
    with pytest.raises(TypeError, match="^within$"):
        h.softmax(X)


def test_arrays_of_attributes_are_lists(h: oxidnn.DnnHandle) -> None:
    np.testing.assert_array_equal(h.conv(X, W, stride=np.array([1, 1])), h.conv(X, W))


def test_overlap_by_one_element_at_either_end(h: oxidnn.DnnHandle) -> None:
    memory = np.zeros(31, np.float32)
    for source, target in ((memory[:16], memory[15:]), (memory[15:], memory[:16])):
        with pytest.raises(oxidnn.InvalidArgument, match="overlaps"):
            h.pointwise("relu(a)", source, out=target)
    memory = np.arange(-16, 16, dtype=np.float32)
    h.pointwise("relu(a)", memory[:16], out=memory[16:])
    assert (memory[16:] == 0).all()


def test_lazily_negated_torch_tensors_are_refused(h: oxidnn.DnnHandle) -> None:
    torch = pytest.importorskip("torch")
    negated = torch.randn(4, dtype=torch.cfloat).conj().imag
    h.pointwise("x + 0.0", torch.empty_strided(negated.shape, negated.stride()))
    with pytest.raises(oxidnn.InvalidArgument, match="resolve_neg"):
        h.pointwise("x + 0.0", negated)
    with pytest.raises(oxidnn.InvalidArgument, match="strided"):
        h.pointwise("x + 0.0", torch.eye(3).to_sparse())
    gc.collect()
