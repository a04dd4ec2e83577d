"""GEMM problems and their reference: ONNX, NumPy, properties; what is refused, by name; scales, gates and types by their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oxidnn.dtypes import F32, S32
from oxidnn.errors import InvalidArgument
from oxidnn.ops import OPS, Policy
from oxidnn.ops.case import format_case, parse_case
from oxidnn.ops.gemm import Blocks
from oxidnn.tensor import TensorDesc
from oxidnn.testing.reference import REFERENCES


def reference(line: str, output: str = "d", **inputs: np.ndarray) -> np.ndarray:
    return REFERENCES["gemm"](parse_case(line), inputs, {})[output].want


def onnx_node(op_type: str, inputs: dict[str, np.ndarray], **attributes: object) -> np.ndarray:
    onnx = pytest.importorskip("onnx")
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    node = helper.make_node(op_type, list(inputs), ["out"], **attributes)
    values = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in inputs.items()]
    out = helper.make_tensor_value_info("out", onnx.TensorProto.DOUBLE, None)
    model = helper.make_model(helper.make_graph([node], "g", values, [out]), opset_imports=[helper.make_opsetid("", 18)])
    return ReferenceEvaluator(model).run(None, inputs)[0]


@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_gemm_node(transposed: tuple[int, int]) -> None:
    rng, (ta, tb) = np.random.default_rng(0), transposed
    a, b, c = rng.standard_normal((5, 3) if ta else (3, 5)), rng.standard_normal((4, 5) if tb else (5, 4)), rng.standard_normal((1, 4))
    line = f"gemm a=f32{list(a.shape)} b=f32{list(b.shape)} c=f32[1,4] transpose_a={bool(ta)} transpose_b={bool(tb)} alpha=0.5 beta=-2.0"
    want = onnx_node("Gemm", {"a": a, "b": b, "c": c}, transA=ta, transB=tb, alpha=0.5, beta=-2.0)
    np.testing.assert_allclose(reference(line.replace(", ", ","), a=a, b=b, c=c), want, rtol=1e-12)


@pytest.mark.parametrize(("left", "right"), [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((1, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (3, 4, 5))])
def test_matmul_node(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal(left), rng.standard_normal(right)
    line = f"gemm a=f32{list(left)} b=f32{list(right)}".replace(", ", ",")
    np.testing.assert_allclose(reference(line, a=a, b=b), onnx_node("MatMul", {"a": a, "b": b}), rtol=1e-12)


def test_integer_node() -> None:
    """Exact at the ends of the types too; beyond 2^31 modulo 2^32."""
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 256, (3, 70), np.uint8), rng.integers(-128, 128, (70, 4), np.int8)
    got = reference("gemm a=u8[3,70] b=s8[70,4]", a=a, b=b)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, onnx_node("MatMulInteger", {"a": a, "b": b}))
    k = 140_000
    full = reference(f"gemm a=s8[1,{k}] b=s8[{k},1]", a=np.full((1, k), -128, np.int8), b=np.full((k, 1), -128, np.int8))
    assert full[0, 0] == np.int64(k * 128 * 128).astype(np.int32) != k * 128 * 128


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300), st.sampled_from([(0, 0), (1, 0), (0, 128), (1, 128), (128, 128)]),
       st.sampled_from([(0, 0), (1, 128), (128, 128), (128, 0)]), st.integers(0, 2**31))
def test_scales_are_those_of_their_blocks(m: int, n: int, k: int, blocks_a: tuple[int, int], blocks_b: tuple[int, int], seed: int) -> None:
    """Element (i, j) is the sum over k of a * scale_a[i // rows, k // ks] * b * scale_b[k // ks, j // rows]."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-2, 3, shape).astype(np.float64) for shape in ((m, k), (k, n)))

    def extents(size: int, blocks: tuple[int, int]) -> tuple[int, int]:
        return 1 if not blocks[0] else -(-size // blocks[0]), 1 if not blocks[1] else -(-k // blocks[1])

    (ra, ka), (rb, kb) = extents(m, blocks_a), extents(n, blocks_b)
    if 0 in (ka, kb):
        return
    scale_a, scale_b = rng.uniform(0.5, 2, (ra, ka)), rng.uniform(0.5, 2, (kb, rb))
    line = f"gemm a=e4m3[{m},{k}] b=e4m3[{k},{n}] scale_a=f32[{ra},{ka}] scale_b=f32[{kb},{rb}]"
    got = reference(line, a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    i, j, t = int(rng.integers(m)), int(rng.integers(n)), np.arange(k)

    def at(scale: np.ndarray, row: int, blocks: tuple[int, int]) -> np.ndarray:
        return scale[row // blocks[0] if blocks[0] else 0, t // blocks[1] if blocks[1] else 0 * t]

    want = (a[i] * at(scale_a, i, blocks_a) * b[:, j] * at(scale_b.T, j, blocks_b)).sum()
    np.testing.assert_allclose(got[i, j], want, rtol=1e-9, atol=1e-9)


def test_blocks_by_shape() -> None:
    def blocks(a: str, b: str) -> tuple[Blocks | None, Blocks | None]:
        p = parse_case(f"gemm a=e4m3[300,400] b=e4m3[400,500] scale_a=f32{a} scale_b=f32{b}")
        assert parse_case(format_case(p)) == p
        return p.blocks_a, p.blocks_b  # type: ignore[attr-defined]

    assert blocks("[1]", "[1,1]") == (Blocks(0, 0), Blocks(0, 0))
    assert blocks("[300]", "[500]") == blocks("[300,1]", "[1,500]") == (Blocks(1, 0), Blocks(1, 0))
    assert blocks("[300,4]", "[4,4]") == (Blocks(1, 128), Blocks(128, 128))
    assert blocks("[3,4]", "[4,500]") == (Blocks(128, 128), Blocks(1, 128))


@pytest.mark.parametrize("gate", ["silu", "gelu", "sigmoid", "identity"])
def test_gates(gate: str) -> None:
    rng = np.random.default_rng(3)
    a, b, bias = rng.standard_normal((3, 5)), rng.standard_normal((5, 8)), rng.standard_normal(8)
    z, up = np.split(a @ b + bias, 2, -1)
    from math import erf, sqrt
    phi = np.vectorize(lambda t: 0.5 * (1 + erf(t / sqrt(2))))
    sigmoid = 1 / (1 + np.exp(-z))
    want = {"silu": z * sigmoid, "gelu": z * phi(z), "sigmoid": sigmoid, "identity": z}[gate] * up
    np.testing.assert_allclose(reference(f"gemm a=f32[3,5] b=f32[5,8] bias=f32[8] gate={gate}", a=a, b=b, bias=bias), want, rtol=1e-6)


def test_second_output_is_what_the_epilogue_saw() -> None:
    rng = np.random.default_rng(4)
    a, b, bias = rng.standard_normal((3, 5)), rng.standard_normal((5, 4)), rng.standard_normal(4)
    line = "gemm a=f16[3,5] b=f16[5,4] bias=f32[4] epilogue='relu(t := acc + bias), t'"
    p = parse_case(line)
    assert [o.name for o in p.outputs] == ["d", "aux"] and p.desc("aux").dtype == p.desc("a").dtype
    np.testing.assert_allclose(reference(line, "aux", a=a, b=b, bias=bias), a @ b + bias)
    np.testing.assert_allclose(reference(line, "d", a=a, b=b, bias=bias), np.maximum(a @ b + bias, 0))


def test_what_is_multiplied_by_nothing_is_not_read() -> None:
    """As in BLAS: beta = 0 leaves c out, alpha = 0 leaves a and b out, whatever they hold."""
    nan, one = np.full((2, 2), np.nan), np.ones((2, 2))
    assert (reference("gemm a=f32[2,2] b=f32[2,2] c=f32[2,2]", a=one, b=one, c=nan) == 2).all()
    assert (reference("gemm a=f32[2,2] b=f32[2,2] c=f32[2,2] alpha=0.0 beta=3.0", a=nan, b=one, c=one) == 3).all()
    assert (reference("gemm a=f32[2,0] b=f32[0,2] bias=f32[2]", a=np.ones((2, 0)), b=np.ones((0, 2)), bias=np.ones(2)) == 1).all()


@pytest.mark.parametrize(("line", "name"), [
    ("gemm a=e4m3[4,8] b=e4m3[8,4]", "bf16"), ("gemm a=e4m3[4,8] b=e5m2[8,4] out_dtype=float32", "f32"),
    ("gemm a=s8[4,8] b=u8[8,4]", "s32"), ("gemm a=s8[4,8] b=s8[8,4] scale_a=f32[1]", "f32"), ("gemm a=s8[4,8] b=s8[8,4] alpha=0.5", "f32"),
    ("gemm a=s8[4,8] b=s8[8,4] out_dtype=f16", "f16"), ("gemm a=bf16[4,8] b=bf16[8,4] out_dtype=f32", "f32"),
    ("gemm a=f32[4,8] b=f32[8,4]", "f32"),
])
def test_type_of_the_result(line: str, name: str) -> None:
    assert parse_case(line).desc("d").dtype.name == name


@pytest.mark.parametrize(("line", "words"), [
    ("gemm a=e4m3[4,8] b=s8[8,4]", ("type of b is s8", "e4m3 or e5m2")), ("gemm a=s8[4,8] b=bf16[8,4]", ("type of b is bf16", "s8 or u8")),
    ("gemm a=s32[4,8] b=s32[8,4]", ("type of a is s32",)),
    ("gemm a=s8[4,8] b=s8[8,4] scale_a=f32[1] out_dtype=s32", ("out_dtype is s32", "f32")),
    ("gemm a=s8[4,8] b=s8[8,4] bias=f32[4] d=s32[4,4]", ("type of d is s32",)),
    ("gemm a=bf16[4,8] b=bf16[8,4] out_dtype=e4m3", ("out_dtype is e4m3", "bf16")),
    ("gemm a=bf16[4,8] b=bf16[8,4] out_dtype=nonsense", ("out_dtype is 'nonsense'",)),
    ("gemm a=bf16[4,8] b=bf16[8,4] d=f32[4,4] out_dtype=f16", ("out_dtype is f16", "type of d")),
    ("gemm a=e4m3[4,256] b=e4m3[256,4] scale_a=f32[3]", ("shape of scale_a is [3]", "(4,)", "(4 or 1, 2)")),
    ("gemm a=e4m3[4,256] b=e4m3[256,4] scale_b=f32[3,4]", ("shape of scale_b is [3, 4]", "(2, 4 or 1)")),
    ("gemm a=e4m3[4,256] b=e4m3[256,4] scale_b=f16[1]", ("type of scale_b is f16", "f32")),
    ("gemm a=e4m3[4,256] b=e4m3[3,256,4] scale_a=f32[3,4,2]", ("shape of scale_a is [3, 4, 2]", "batched")),
    ("gemm a=bf16[4,256] b=bf16[256,4] scale_a=f32[4,2]", ("type of a is bf16", "block scales")),
    ("gemm a=f32[4,8] b=f32[8,5] gate=silu", ("columns of b is 5", "even")),
    ("gemm a=f32[4,8] b=f32[8,4] gate=swish", ("gate is 'swish'", "silu")),
    ("gemm a=f32[4,8] b=f32[8,4] gate=silu epilogue=relu", ("epilogue is", "None with a gate")),
    ("gemm a=f32[4,8] b=f32[8,4] c=f32[4,2] beta=1.0 gate=silu", ("gate is", "None with c")),
    ("gemm a=f32[4,8] b=f32[8,4] bias=f32[2] gate=silu", ("shape of bias is [2]", "[4]")),
    ("gemm a=e4m3[4,256] b=e4m3[256,4] scale_a=f32[4,2] gate=silu", ("gate is", "block scales")),
    ("gemm a=f32[4,8] b=f32[8,4] aux=f32[4,4]", ("aux is given",)),
    ("gemm a=f32[4,8] b=f32[8,4] epilogue='acc, acc * 2, acc * 3'", ("3 outputs", "at most 2")),
])
def test_refusals_name_the_argument(line: str, words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_case(line)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_scale_of_no_dimensions() -> None:
    tensors = {"a": TensorDesc.packed(F32, (2, 3)), "b": TensorDesc.packed(F32, (3, 4)), "scale_a": TensorDesc.packed(F32, ())}
    problem = OPS["gemm"].make(tensors, {}, Policy())
    got = REFERENCES["gemm"](problem, {"a": np.ones((2, 3)), "b": np.ones((3, 4)), "scale_a": np.array(2.0)}, {})["d"].want
    assert (got == 6).all() and problem.desc("d").dtype is not S32
