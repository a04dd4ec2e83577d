"""The ONNX node tests of Transpose, Pad, Concat, Split, Slice, Tile, Expand, Trilu, CumSum, CumProd and Cast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")

OPS = ("Transpose", "Pad", "Concat", "Split", "Slice", "Tile", "Expand", "Trilu", "CumSum", "CumProd")
MODES = {b"constant": "constant", b"edge": "replicate", b"reflect": "reflect", b"wrap": "circular"}
CASTS = ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "FLOAT8E4M3FN", "FLOAT8E5M2")  # no array has others
PACKED = {"INT4": "s4", "UINT4": "u4", "FLOAT4E2M1": "e2m1"}  # two to a byte, as arrays of bytes
TESTS = node_tests(OPS)


def kinds_of(case: Any) -> list[str]:
    """The types that a cast is between, by ONNX's names."""
    name = case.name
    for part in ("test_castlike_", "test_cast_", "no_saturate_", "e8m0_"):
        name = name.removeprefix(part)
    return name.removesuffix("_expanded").split("_to_")


CAST_FOUND = node_tests(("Cast", "CastLike"))
CAST_TESTS = [t for t in CAST_FOUND if set(kinds_of(t)) <= set(CASTS)]
PACKED_TESTS = [t for t in CAST_FOUND if set(kinds_of(t)) & set(PACKED) and kinds_of(t)[1] != "FLOAT4E2M1"]
LEFT = {t.name: f"types that no array here has: {', '.join(sorted(set(kinds_of(t)) - {*CASTS, *PACKED}))}"
        for t in CAST_FOUND if not set(kinds_of(t)) <= set(CASTS) and not set(kinds_of(t)) & set(PACKED)}
LEFT |= {t.name: "a NaN becomes 6, as by the conversion of the hardware, where the test has -0 (see test_four_bits_of_floats)"
         for t in CAST_FOUND if kinds_of(t)[1] == "FLOAT4E2M1"}


def given_by(case: Any, inputs: list[np.ndarray]) -> dict[str, Any]:
    """The node's inputs by position, and its attributes by name."""
    node = case.model.graph.node[0]
    named = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return named | {i: x for i, (name, x) in enumerate(zip([n for n in node.input if n], inputs, strict=True)) if name}  # type: ignore[misc]


def numbers(value: np.ndarray) -> list[int]:
    return [int(v) for v in np.asarray(value).ravel()]


def padding_of(given: Any, rank: int) -> list[tuple[int, int]]:
    pads = numbers(given[1])
    axes = numbers(given[3]) if 3 in given else list(range(rank))
    pairs = [(0, 0)] * rank
    for axis, low, high in zip(axes, pads[:len(axes)], pads[len(axes):], strict=True):
        pairs[axis] = low, high
    return pairs


def split_of(h: oxidnn.DnnHandle, x: np.ndarray, given: Any, count: int) -> tuple[np.ndarray, ...]:
    axis = given.get("axis", 0)
    return h.split(x, numbers(given[1]) if 1 in given else -(-x.shape[axis] // count), axis)


def run(h: oxidnn.DnnHandle, case: Any, inputs: list[np.ndarray]) -> Any:
    node, given = case.model.graph.node[0], given_by(case, inputs)
    x = inputs[0]
    flags = {"reverse": bool(given.get("reverse", 0)), "exclusive": bool(given.get("exclusive", 0)), "dtype": x.dtype}
    return {
        "Transpose": lambda: h.permute(x, given.get("perm")),
        "Pad": lambda: h.pad(x, padding_of(given, x.ndim), MODES[given.get("mode", b"constant")], float(given[2]) if 2 in given else 0),
        "Concat": lambda: h.concat(inputs, given["axis"]),
        "Split": lambda: split_of(h, x, given, len(node.output)),
        "Slice": lambda: h.slice(x, numbers(given[1]), numbers(given[2]), numbers(given[4]) if 4 in given else None,
                                 numbers(given[3]) if 3 in given else None),
        "Tile": lambda: h.tile(x, numbers(given[1])),
        "Expand": lambda: h.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(numbers(given[1])))),
        "Trilu": lambda: (h.triu if given.get("upper", 1) else h.tril)(x, int(given[1]) if 1 in given else 0),
        "CumSum": lambda: h.cumsum(x, int(given[1]), **flags),
        "CumProd": lambda: h.cumprod(x, int(given[1]), **flags),
    }[node.op_type]()


def test_all_are_found() -> None:
    assert len(TESTS) >= 80 and {t.model.graph.node[0].op_type for t in TESTS} == set(OPS) and len(CAST_TESTS) >= 60


@pytest.mark.parametrize("case", TESTS, ids=lambda t: t.name)
def test_node(case: Any) -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    for inputs, outputs in case.data_sets:
        found = run(h, case, inputs)
        for got, want in zip(found if isinstance(found, tuple) else (found,), outputs, strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            if case.model.graph.node[0].op_type in ("CumSum", "CumProd"):
                np.testing.assert_allclose(got, want, rtol=1e-14)
            else:
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("case", CAST_TESTS, ids=lambda t: t.name)
def test_cast(case: Any) -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in case.model.graph.node[0].attribute}
    for inputs, outputs in case.data_sets:
        x, want = (onnx.numpy_helper.to_array(p) if isinstance(p, onnx.TensorProto) else np.asarray(p) for p in (inputs[0], outputs[0]))
        got = h.cast(x, want.dtype, saturate=bool(attrs.get("saturate", 1)) or not want.dtype.name.startswith("float8"))
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


@pytest.mark.parametrize("case", PACKED_TESTS, ids=lambda t: t.name)
def test_cast_to_and_from_four_bits(case: Any) -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    source, target = kinds_of(case)
    for inputs, outputs in case.data_sets:
        x, want = inputs[0], outputs[0]
        if target in PACKED:
            given = onnx.numpy_helper.to_array(x).reshape(-1)
            np.testing.assert_array_equal(h.pack4(given, PACKED[target], saturate=False), np.frombuffer(want.raw_data, np.uint8))
        else:
            result = onnx.numpy_helper.to_array(want)
            got = h.unpack4(np.frombuffer(x.raw_data, np.uint8), PACKED[source], size=result.size, dtype=result.dtype)
            assert got.dtype == result.dtype
            np.testing.assert_array_equal(got, result.reshape(-1))


def test_four_bits_of_floats() -> None:
    """The casts to FLOAT4E2M1 but for their NaN."""
    h = oxidnn.DnnHandle("emu:sm_80")
    for case in [t for t in CAST_FOUND if kinds_of(t)[1] == "FLOAT4E2M1" and not t.name.endswith("_expanded")]:
        for inputs, outputs in case.data_sets:
            x, want = (onnx.numpy_helper.to_array(p).reshape(-1) for p in (inputs[0], outputs[0]))
            got = np.asarray(h.unpack4(h.pack4(x, "e2m1"), "e2m1", size=x.size))
            number = ~np.isnan(x)
            np.testing.assert_array_equal(got[number], want[number].astype(np.float32))
            assert (got[~number] == 6).all()
