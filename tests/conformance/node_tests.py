"""The node tests that the onnx package carries."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import pytest


def node_tests(ops: Collection[str]) -> list[Any]:
    """Those of one node of the operators `ops`; "..._expanded" ones decompose theirs into others. Skips where onnx is missing."""
    pytest.importorskip("onnx")
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    return [t for t in found if len(t.model.graph.node) == 1 and t.model.graph.node[0].op_type in ops]
