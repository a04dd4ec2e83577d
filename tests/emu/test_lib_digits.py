"""lib/digits with engines.digits: every index splits as np.unravel_index says and lands where the strides say, 32- and 64-bit."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.codegen.environment import environment
from oxidnn.codegen.spec import KernelSpec, Param, Target
from oxidnn.engines.base import Arg
from oxidnn.engines.digits import Digits
from oxidnn.runtime.emu_backend import EmulatedBackend

KERNEL = """//% extends "skeleton/kernel.ptx.j2"
//% from "lib/digits.ptx.j2" import declare, split, locate
//% block body
    .reg .u32 %linear;
    .reg .u64 %address, %ptr;
${ declare(d) -}
    mov.u32 %linear, %tid.x;
    add.u32 %linear, %linear, ${ base };
${ split("%linear", d) -}
${ locate("%address", "x", d) -}
    ld.param.u64 %ptr, [out];
    sub.u32 %linear, %linear, ${ base };
    mad.wide.u32 %ptr, %linear, 8, %ptr;
    st.global.u64 [%ptr], %address;
//% endblock
"""


@pytest.mark.parametrize(("extents", "strides", "base"), [
    ((4, 3, 5, 2), (120, 40, 8, 4), 0), ((128,), (-12,), 0), ((1, 1, 64), (7, 9, 2), 0), ((7, 65537, 4001), (2**33, 8, -(2**20)), 2**30),
    ((3, 1, 700000000), (2**31 - 1, 0, 4), 2**31 - 49_000_000),
])
def test_indices_land_where_the_strides_say(extents: tuple[int, ...], strides: tuple[int, ...], base: int) -> None:
    digits = Digits(tuple(f"d{i}" for i in range(len(extents))), extents, {"x": strides})
    consts = digits.consts()
    backend, threads = EmulatedBackend("sm_80", checkers="all"), 64
    block = backend.allocate(8 * threads, 0)
    args = [Arg("ptr_x", "u64", 2**40), *digits.args(consts.wide), Arg("out", "u64", block.ptr)]
    spec = KernelSpec("lib_test", "digits", Target("sm_80"), threads, tuple(Param(a.name, a.type) for a in args), None)
    text = environment().from_string(KERNEL).render(spec=spec, d=consts, base=base, unique=lambda stem: stem)
    backend.load(text, spec).bind((1, 1, 1), [a.value for a in args]).launch(0)
    out = np.empty(threads, np.uint64)
    backend.download(out, block.ptr, 0)
    linear = base + np.arange(threads)
    want, rest = np.zeros(threads, np.int64), linear
    for extent, stride in list(zip(extents, strides, strict=True))[:0:-1]:
        want, rest = want + rest % extent * stride, rest // extent
    want += rest * strides[0] + 2**40
    np.testing.assert_array_equal(out.astype(np.int64), want)


def test_collapsing_keeps_every_offset() -> None:
    digits = Digits(("a", "b", "c", "d"), (2, 1, 3, 4), {"x": (48, 5, 16, 4), "y": (100, 7, 16, 4)})
    assert digits.collapsed() == Digits(("r0", "r1"), (2, 12), {"x": (48, 4), "y": (100, 4)})
    assert Digits(("a",), (1,), {"x": (9,)}).collapsed() == Digits(("r0",), (1,), {"x": (0,)})
    assert digits.ordered_for("x").names == ("b", "a", "c", "d")
