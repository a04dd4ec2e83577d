"""lib/warp_reduce: groups of lanes and whole CTAs, every type, every operation, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.codegen.environment import environment
from oxidnn.codegen.spec import KernelSpec, Param, Target
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend

KERNEL = """//% extends "skeleton/kernel.ptx.j2"
//% from "lib/warp_reduce.ptx.j2" import lane_reduce, cta_reduce
//% block module_variables
.shared .align 8 .${ type } slots[${ 3 * warps }];
//% endblock
//% block body
    .reg .u32 %thread, %lane, %warp;
    .reg .u64 %ptr;
    .reg .${ type } %value;
    mov.u32 %thread, %tid.x;
    and.b32 %lane, %thread, 31;
    shr.u32 %warp, %thread, 5;
    ld.param.u64 %ptr, [ptr];
    mad.wide.u32 %ptr, %thread, ${ size }, %ptr;
    ld.global.${ type } %value, [%ptr];
//% if lanes
${ lane_reduce("%value", op, type, lanes) -}
//% else
    // twice, in two slots: op of equal values is checked too
${ cta_reduce("%value", op, type, warps, "slots", 0, "%lane", "%warp") -}
${ cta_reduce("%value", op, type, warps, "slots", 2, "%lane", "%warp") -}
//% endif
    st.global.${ type } [%ptr], %value;
//% endblock
"""
DTYPES = {"f32": np.float32, "f64": np.float64, "s32": np.int32, "u32": np.uint32}


def reduced(values: np.ndarray, kind: str, op: str, lanes: int, warps: int) -> np.ndarray:
    """The values after the kernel: each thread's own register."""
    spec = KernelSpec("lib_test", "reduce", Target("sm_80"), 32 * warps, (Param("ptr", "u64"),), None)
    text = environment().from_string(KERNEL).render(spec=spec, type=kind, op=op, lanes=lanes, warps=warps, size=values.itemsize)
    assert assemble(text, "sm_90a").spill_bytes == 0
    backend = EmulatedBackend("sm_80", checkers="all")
    block = backend.allocate(values.nbytes, 0)
    backend.upload(block.ptr, values, 0)
    backend.load(text, spec).bind((1, 1, 1), [block.ptr]).launch(0)
    out = np.empty_like(values)
    backend.download(out, block.ptr, 0)
    return out


@pytest.mark.parametrize("kind", list(DTYPES))
@pytest.mark.parametrize("lanes", [1, 2, 8, 32])
def test_lanes(kind: str, lanes: int) -> None:
    values = np.random.default_rng(lanes).integers(0, 100, 64).astype(DTYPES[kind])
    groups = values.reshape(-1, lanes)
    add = "add" if kind in ("s32", "u32") else "add.rn"
    for op, want in ((add, groups.sum(1)), ("max", groups.max(1)), ("min", groups.min(1))):
        np.testing.assert_array_equal(reduced(values, kind, op, lanes, 2), np.repeat(want, lanes).astype(values.dtype))


@pytest.mark.parametrize("kind", list(DTYPES))
@pytest.mark.parametrize("warps", [1, 2, 8, 16])
def test_cta(kind: str, warps: int) -> None:
    values = np.random.default_rng(warps).integers(0, 10, 32 * warps).astype(DTYPES[kind])
    add = "add" if kind in ("s32", "u32") else "add.rn"
    np.testing.assert_array_equal(reduced(values, kind, "max", 0, warps), np.full_like(values, values.max()))
    np.testing.assert_array_equal(reduced(values, kind, add, 0, warps), np.full_like(values, values.sum() * 32 * warps))


def test_a_nan_of_one_lane_reaches_all() -> None:
    values = np.zeros(64, np.float32)
    values[37] = np.nan
    assert np.isnan(reduced(values, "f32", "max.NaN", 0, 2)).all()
    assert np.isnan(reduced(values, "f32", "add.rn", 32, 2)).tolist() == [False] * 32 + [True] * 32
