"""The ONNX node tests of QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear, and onnx.reference on random tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")

KINDS = {"UINT8": "u8", "INT8": "s8", "UINT4": "u4", "INT4": "s4", "FLOAT4E2M1": "e2m1", "FLOAT8E4M3FN": "e4m3", "FLOAT8E5M2": "e5m2"}
FOUND = node_tests(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"))
LEFT = {t.name: "numbers of two bits, which no operand holds" for t in FOUND if "int2" in t.name}


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


def array(value: Any) -> np.ndarray:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def packed(values: np.ndarray) -> np.ndarray:
    """Numbers of four bits, one a byte in NumPy, two to a byte along the last dimension."""
    code = values.view(np.uint8) & 15
    code = np.pad(code, [(0, 0)] * (code.ndim - 1) + [(0, code.shape[-1] % 2)])
    return code[..., 0::2] | code[..., 1::2] << 4


def of_blocks(value: np.ndarray, attrs: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """Scales or zero points that broadcast to x."""
    if attrs.get("block_size") and value.ndim:
        return value.repeat(attrs["block_size"], attrs.get("axis", 1))
    return value.reshape([-1 if i == attrs.get("axis", 1) % x.ndim else 1 for i in range(x.ndim)]) if value.ndim == 1 else value


@pytest.mark.parametrize("case", [t for t in FOUND if t.name not in LEFT], ids=lambda t: t.name)
def test_node(case: Any, h: oxidnn.DnnHandle) -> None:
    node = case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    graph = case.model.graph
    types = [onnx.TensorProto.DataType.Name(v.type.tensor_type.elem_type) for v in (*graph.input, *graph.output)]
    for inputs, outputs in case.data_sets:
        x, *rest = (array(a) for a in inputs)
        wants = [array(a) for a in outputs]
        if node.op_type == "DynamicQuantizeLinear":
            q, scale, zero = h.quantize(x, "u8", "tensor", zero_point="compute")
            for got, want in zip((q, scale, zero), wants, strict=True):
                np.testing.assert_array_equal(got, want)
            continue
        scale = rest[0]
        where: dict[str, Any] = {"axis": attrs.get("axis", 1)} if scale.ndim == 1 else {}
        if attrs.get("block_size"):
            where = {"scaling": ("group", attrs["block_size"]), "axis": attrs.get("axis", 1)}
        code = types[0] if node.op_type == "DequantizeLinear" else types[len(inputs)]
        zero = rest[1] if len(rest) > 1 else None
        if code in ("INT16", "UINT16"):  # integers of 16 bits are an expression
            full = [of_blocks(a, attrs, x).astype(np.float32) for a in (scale, np.zeros(()) if zero is None else zero)]
            ends = "-32768, 32767" if code == "INT16" else "0, 65535"
            text = "(x - z) * s" if node.op_type == "DequantizeLinear" else f"clamp(round(x / s) + z, {ends})"
            operands = {"x": x, "s": full[0], "z": full[1]}
            names = oxidnn.expr.parse(text).args
            got = h.pointwise(text, *(operands[n] for n in names), dtype=wants[0].dtype)
        elif node.op_type == "DequantizeLinear":
            kind, size = KINDS[code], x.shape[-1]
            points = None if zero is None or kind[0] == "e" else zero.astype(np.int32).reshape(scale.shape)
            is_packed = kind in ("s4", "u4", "e2m1")
            more = {"size": size} if is_packed else {}
            got = h.dequantize(packed(x) if is_packed else x, scale, points, kind=kind, dtype=scale.dtype, **more, **where)
        else:
            kind = KINDS[code]
            points = None if zero is None or kind[0] == "e" else zero.astype(np.int32).reshape(scale.shape)
            got = h.quantize(x, kind, scale, zero_point=points, saturate=bool(attrs.get("saturate", 1)), **where)
            if kind == "e2m1":  # the zero point, which is added there, makes 0 of -0
                got = h.dequantize(got, kind=kind, size=x.shape[-1])
                np.testing.assert_array_equal(got, wants[0].astype(np.float32))
                continue
            if kind in ("s4", "u4"):
                np.testing.assert_array_equal(got, packed(wants[0]))
                continue
            np.testing.assert_array_equal(np.asarray(got).view(np.uint8), wants[0].view(np.uint8))
            continue
        np.testing.assert_array_equal(got, wants[0])


@pytest.mark.parametrize(("kind", "name"), [("u8", "UINT8"), ("s8", "INT8"), ("e4m3", "FLOAT8E4M3FN"), ("e5m2", "FLOAT8E5M2")])
def test_the_reference_agrees_on_random_tensors(kind: str, name: str, h: oxidnn.DnnHandle) -> None:
    """Scales of channels and of blocks, with every zero point there is."""
    rng = np.random.default_rng(8)
    code = getattr(onnx.TensorProto, name)
    x = (rng.standard_normal((3, 6, 16)) * 30).astype(np.float32)
    for axis, block in ((1, 0), (2, 8), (0, 0)):
        shape = (x.shape[axis],) if not block else (3, 6, 2)
        scale = rng.uniform(0.05, 0.6, shape).astype(np.float32)
        zero = rng.integers(0 if kind == "u8" else -100, 101, shape).astype(np.uint8 if kind == "u8" else np.int8)
        is_float = kind[0] == "e"
        inputs = [onnx.helper.make_tensor_value_info("x", 1, x.shape), onnx.helper.make_tensor_value_info("s", 1, shape)]
        inputs += [] if is_float else [onnx.helper.make_tensor_value_info("z", code, shape)]
        more = {"output_dtype": code} if is_float else {}
        node = onnx.helper.make_node("QuantizeLinear", [i.name for i in inputs], ["y"], axis=axis, block_size=block, **more)
        graph = onnx.helper.make_graph([node], "g", inputs, [onnx.helper.make_tensor_value_info("y", code, x.shape)])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)])
        feeds = {"x": x, "s": scale} | ({} if is_float else {"z": zero})
        want = np.asarray(onnx.reference.ReferenceEvaluator(model).run(None, feeds)[0])
        where: dict[str, Any] = {"axis": axis} | ({"scaling": ("group", block)} if block else {})
        got = h.quantize(x, kind, scale, zero_point=None if is_float else zero, **where)
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))
        back = h.dequantize(got, scale, None if is_float else zero, **where)
        wide = of_blocks(scale, {"axis": axis, "block_size": block}, x)
        points = 0 if is_float else of_blocks(zero, {"axis": axis, "block_size": block}, x).astype(np.float32)
        np.testing.assert_array_equal(back, (np.asarray(got).astype(np.float32) - points) * wide)
