"""The ONNX node tests of Resize and Upsample."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import oxidnn

onnx = pytest.importorskip("onnx")

# By a region of interest and a value for what lies outside it: a crop, whose outputs need not read the input at all.
NOT_COVERED = {"tf_crop_and_resize"}


def node_tests() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    return [t for t in found if len(t.model.graph.node) == 1 and t.model.graph.node[0].op_type in ("Resize", "Upsample")]


def attributes(case: Any) -> dict[str, Any]:
    found = {a.name: onnx.helper.get_attribute_value(a) for a in case.model.graph.node[0].attribute}
    return {n: v.decode() if isinstance(v, bytes) else v for n, v in found.items()}


TESTS = node_tests()
COVERED = [t for t in TESTS if attributes(t).get("coordinate_transformation_mode") not in NOT_COVERED]
LEFT = {t.name: "a crop by a region of interest, with a value for what lies outside the input" for t in TESTS if t not in COVERED}


def arguments(case: Any, x: np.ndarray, given: dict[str, np.ndarray]) -> dict[str, Any]:
    """What h.resize takes: sizes and scales of the spatial dimensions alone."""
    attrs, rank = attributes(case), x.ndim
    axes = attrs.get("axes", list(range(rank)))
    sizes, scales = list(x.shape), [1.0] * rank
    for axis, scale in zip(axes, given.get("scales", ()), strict=False):
        scales[axis] = float(scale)
    for axis, size in zip(axes, given.get("sizes", ()), strict=False):
        sizes[axis] = int(size)
    policy = attrs.get("keep_aspect_ratio_policy", "stretch")
    is_by_size = "sizes" in given
    if policy != "stretch":  # one scale for all, by which each size is rounded, halves up
        choose = min if policy == "not_larger" else max
        scale = choose(sizes[a] / x.shape[a] for a in axes)
        for a in axes:
            scales[a], sizes[a] = scale, int(np.floor(scale * x.shape[a] + 0.5))
    assert sizes[:2] == list(x.shape[:2]) and scales[:2] == [1.0, 1.0]
    out: dict[str, Any] = {"mode": attrs.get("mode", "nearest"), "antialias": bool(attrs.get("antialias", 0))}
    if is_by_size:
        out["size"] = tuple(sizes[2:])
    if not is_by_size or policy != "stretch":
        out["scales"] = tuple(scales[2:])
    if case.model.graph.node[0].op_type == "Upsample":
        return out | {"coordinates": "asymmetric"}
    if not out["antialias"]:
        out["coordinates"] = attrs.get("coordinate_transformation_mode", "half_pixel")
    if out["mode"] == "nearest":
        out["rounding"] = attrs.get("nearest_mode", "round_prefer_floor")
    else:
        out["exclude_outside"] = bool(attrs.get("exclude_outside", 0))
    return out | {"cubic_coefficient": attrs.get("cubic_coeff_a", -0.75)}


def test_all_are_found() -> None:
    assert len(TESTS) >= 39 and len(COVERED) == len(TESTS) - 4


@pytest.mark.parametrize("case", COVERED, ids=lambda t: t.name)
def test_node(case: Any) -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    names = [n for n in case.model.graph.node[0].input if n]
    for inputs, (want,) in case.data_sets:
        given = dict(zip(names, inputs, strict=True))
        x = given[names[0]]
        got = h.resize(x, **arguments(case, x, given))
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
