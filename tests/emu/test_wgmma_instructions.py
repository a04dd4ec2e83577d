"""wgmma: every type, layout and width against NumPy, and bit for bit against what an H100 recorded."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oxidnn.emu import GlobalMemory, load
from oxidnn.errors import EmulatorFault
from oxidnn.ptx.parser import parse
from oxidnn.runtime.emu_backend import EmulatedBackend
from tests.emu.hopper import (
    GPU,
    KIND,
    RESULT,
    K,
    Kernel,
    accumulator_registers,
    accumulator_rows,
    k_major,
    multiply,
    product,
    registers_a,
    run,
)  # fmt: skip

VECTORS = Path(__file__).parent / "vectors"


@pytest.fixture(params=["lowest_pc", ("random", 3), GPU], ids=str)
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda":
        return request.getfixturevalue("cuda")
    return EmulatedBackend("sm_90a", "all", request.param)


def values(rng: np.random.Generator, shape: tuple[int, ...], type_: str) -> np.ndarray:
    """Small numbers: sums of their products are exact in every accumulator."""
    low = 0 if type_ == "u8" else -4
    return rng.integers(low, 5, shape).astype(KIND[type_])


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64).T


TYPES = [("f32", "bf16", "bf16"), ("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "tf32", "tf32"), ("f32", "e4m3", "e4m3"), ("f32", "e4m3", "e5m2"),
         ("f32", "e5m2", "e4m3"), ("f16", "e5m2", "e5m2"), ("s32", "s8", "s8"), ("s32", "u8", "u8"), ("s32", "u8", "s8")]


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("types", TYPES, ids="_".join)
def test_every_type(backend: Any, types: tuple[str, str, str], in_registers: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = values(rng, (64, K[types[1]]), types[1]), values(rng, (64, K[types[1]]), types[2])
    init = rng.integers(-9, 9, (64, 64)).astype(RESULT[types[0]])
    got = multiply(backend, a, b, types, init=init, in_registers=in_registers)
    np.testing.assert_array_equal(got.astype(np.float64), exact(a, b) + init)


@pytest.mark.parametrize("spans", [(0, 0), (32, 32), (64, 64), (128, 128), (0, 128), (64, 32)])
@pytest.mark.parametrize("mn", [(False, False), (True, False), (False, True), (True, True)])
def test_every_layout_of_16_bit_operands(backend: Any, spans: tuple[int, int], mn: tuple[bool, bool]) -> None:
    rng = np.random.default_rng(1)
    a, b = values(rng, (64, 16), "bf16"), values(rng, (128, 16), "bf16")
    np.testing.assert_array_equal(multiply(backend, a, b, ("f32", "bf16", "bf16"), spans, mn), exact(a, b))


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("type_", ["tf32", "e4m3", "s8"])
def test_every_swizzle_of_other_types(backend: Any, type_: str, span: int) -> None:
    rng = np.random.default_rng(2)
    a, b = values(rng, (64, K[type_]), type_), values(rng, (72 if type_ != "s8" else 96, K[type_]), type_)
    np.testing.assert_array_equal(multiply(backend, a, b, ("s32" if type_ == "s8" else "f32", type_, type_), (span, span)), exact(a, b))


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_width(n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = values(rng, (64, 16), "f16"), values(rng, (n, 16), "f16")
    np.testing.assert_array_equal(multiply(EmulatedBackend("sm_90a", "all"), a, b, ("f32", "f16", "f16")), exact(a, b))


@pytest.mark.parametrize("signs", ["-1, 1", "1, -1", "-1, -1"])
def test_signs(backend: Any, signs: str) -> None:
    rng = np.random.default_rng(3)
    a, b = values(rng, (64, 16), "bf16"), values(rng, (32, 16), "bf16")
    init = rng.integers(-9, 9, (64, 32)).astype(np.float32)
    sign = -1 if signs.count("-") == 1 else 1
    np.testing.assert_array_equal(multiply(backend, a, b, ("f32", "bf16", "bf16"), signs=signs, init=init), sign * exact(a, b) + init)


def exact_run(kernel: Kernel, args: list[Any], out: np.ndarray) -> np.ndarray:
    """On the emulator with the hardware's tensor-core arithmetic."""
    memory = GlobalMemory()
    launched = [memory.register(np.ascontiguousarray(a), f"arg{i}") if isinstance(a, np.ndarray) else a for i, a in enumerate(args)]
    load(parse(kernel.text)).launch(memory, 1, kernel.threads, launched, dynamic_smem=kernel.smem, tensor_core="exact", checkers="all")
    return out


@pytest.mark.parametrize("type_", ["bf16", "f16", "tf32", "e4m3", "e5m2"])
def test_sums_are_the_hardwares_bit_for_bit(type_: str) -> None:
    z = np.load(VECTORS / "vec_tc_accumulation2.npz")
    for i in range(len(z[f"{type_}_a"])):
        a, b = (np.ascontiguousarray(z[f"{type_}_{x}"][i]) for x in "ab")
        c = z[f"{type_}_c"][i]
        (a_image, da), (b_image, db) = k_major(a, 128), k_major(b, 128)
        out = np.zeros((4, 128), np.uint32)
        kernel = product(8, K[type_], ("f32", type_, type_), len(a_image), len(b_image), trans=", 0, 0" if type_ in ("bf16", "f16") else "", accumulates=True)
        exact_run(kernel, [a_image, b_image, out, da, db, accumulator_registers(c)], out)
        np.testing.assert_array_equal(accumulator_rows(out, np.float32).view(np.uint32), z[f"{type_}_wg"][i].view(np.uint32))


@pytest.mark.parametrize("type_", ["bf16", "f16", "tf32", "e4m3", "e5m2"])
def test_alignment_and_cancellation_bit_for_bit(type_: str) -> None:
    """One row against a B of ones, 64 rows at a time."""
    z = np.load(VECTORS / "vec_tc_accumulation.npz")
    a, c, d = z[f"{type_}_wg_a"], z[f"{type_}_wg_c"], z[f"{type_}_wg_d"]
    ones = np.ones((8, K[type_]), KIND[type_])
    for at in range(0, len(a) - 63, 64):
        rows = np.ascontiguousarray(a[at : at + 64])
        (a_image, da), (b_image, db) = k_major(rows, 128), k_major(ones, 128)
        out = np.zeros((4, 128), np.uint32)
        kernel = product(8, K[type_], ("f32", type_, type_), len(a_image), len(b_image), trans=", 0, 0" if type_ in ("bf16", "f16") else "", accumulates=True)
        init = np.repeat(c[at : at + 64, None], 8, axis=1)
        exact_run(kernel, [a_image, b_image, out, da, db, accumulator_registers(init)], out)
        np.testing.assert_array_equal(accumulator_rows(out, np.float32)[:, 0].view(np.uint32), d[at : at + 64].view(np.uint32))


@pytest.mark.parametrize("type_", ["f16", "e4m3"])
def test_f16_accumulators_bit_for_bit(type_: str) -> None:
    z = np.load(VECTORS / "vec_tc_accumulation2.npz")
    a, b, c, d = (np.ascontiguousarray(z[f"{type_}_f16acc_{x}"]) for x in "abcd")
    c, d = c.astype(np.float16), d.astype(np.float16)
    (a_image, da), (b_image, db) = k_major(a, 128), k_major(b, 128)
    out = np.zeros((2, 128), np.uint32)
    kernel = product(8, K[type_], ("f16", type_, type_), len(a_image), len(b_image), trans=", 0, 0" if type_ == "f16" else "", accumulates=True)
    exact_run(kernel, [a_image, b_image, out, da, db, accumulator_registers(c)], out)
    np.testing.assert_array_equal(accumulator_rows(out, np.float16).view(np.uint16), d.view(np.uint16))


def test_fp8_sums_lose_bits_without_promotion_even_in_fast_mode() -> None:
    """The accumulator keeps 13 fraction bits: 1 + 2^-14 is 1."""
    a, b = np.zeros((64, 32), KIND["e4m3"]), np.zeros((8, 32), KIND["e4m3"])
    a[:, 0], b[:, 0] = 2.0**-7, 2.0**-7
    init = np.ones((64, 8), np.float32)
    got = multiply(EmulatedBackend("sm_90a", "all"), a, b, ("f32", "e4m3", "e4m3"), init=init)
    np.testing.assert_array_equal(got, init)


BASE = product(64, 16, ("f32", "bf16", "bf16"), 8192, 8192, trans=", 0, 0", accumulates=True)
MUTANTS = [
    ("no proxy fence", "fence.proxy.async.shared::cta;", "", r"\[race\] reads shared .* through the async proxy without a fence.proxy.async"),
    ("no barrier after the stores", "bar.sync 0;", "", r"\[(race|uninit)\]"),
    ("no wgmma.fence", "wgmma.fence.sync.aligned;", "", r"\[async\] no wgmma.fence before the first wgmma"),
    ("fence before the accumulators are set", "wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; mov.f32 %d5, 0f00000000;",
     r"\[async\] register %d5 was written after the last wgmma.fence"),
    ("no wait", "wgmma.wait_group.sync.aligned 0;", "", r"\[async\] register %d\d+ is read while a wgmma in flight accumulates into it"),
    ("waits for too few groups", "wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;", r"\[async\] register %d\d+ is read while"),
    ("no commit", "wgmma.commit_group.sync.aligned;", "", r"\[async\] register %d\d+ is read while"),
    ("accumulator written in flight", "wgmma.commit_group.sync.aligned;", "mov.f32 %d7, 0f00000000; wgmma.commit_group.sync.aligned;", r"\[async\] register %d7 is written while"),
    ("shared memory overwritten in flight", "wgmma.commit_group.sync.aligned;", "wgmma.commit_group.sync.aligned; st.shared.b32 [%smem], %r1;",
     r"\[race\] writes shared .* while the read by a wgmma of warpgroup 0"),
    ("descriptor differs between threads", "add.u64 %rd2, %rd2, %da;", "add.u64 %rd2, %rd2, %da; cvt.u64.u32 %rd5, %lane; add.u64 %rd2, %rd2, %rd5;",
     r"\[async\] the descriptor of A differs between the threads"),
    ("scale-d differs between threads", "setp.eq.u32 %p3, 0, 0;", "setp.eq.u32 %p2, %lane, 0;", r"\[async\] scale-d differs between the threads"),
    ("tile beyond shared memory", "add.u64 %rd3, %rd3, %db;", "add.u64 %rd3, %rd3, %db; add.u64 %rd3, %rd3, 4096;", r"\[bounds\] the tile of B .* leaves"),
    ("tile never written", "setp.ge.u32 %p0, %r1, 2048; @%p0 bra Gb;", "setp.ge.u32 %p0, %r1, 1024; @%p0 bra Gb;", r"\[uninit\] reads 16 bytes at shared .* never written"),
    ("accumulator never set", "ld.global.f32 %d9, [%rd4+4608];", "", r"\[uninit\] accumulator %d9 is added to before anything wrote it"),
    ("exits in flight", "wgmma.wait_group.sync.aligned 0;", "ret;", r"\[async\] exits while a wgmma is in flight"),
    ("one warp leaves", "wgmma.fence.sync.aligned;", "setp.eq.u32 %p4, %warp, 3; @%p4 bra OUT; wgmma.fence.sync.aligned;", r"\[barrier\] deadlock.*the other lanes that must take part"),
]  # fmt: skip


@pytest.mark.parametrize("schedule", ["lowest_pc", ("random", 1), ("random", 2)], ids=str)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m[0])
def test_mutants_are_diagnosed(mutant: tuple[str, ...], schedule: Any) -> None:
    _, before, after, report = mutant
    text = BASE.text.replace("\nret;", "\nOUT: ret;").replace(before, after, 1)
    assert before in BASE.text
    rng = np.random.default_rng(4)
    (a, da), (b, db) = (k_major(values(rng, (64, 16), "bf16"), 128) for _ in range(2))
    out = np.zeros((32, 128), np.uint32)
    with pytest.raises(EmulatorFault, match=report) as caught:
        run(EmulatedBackend("sm_90a", "all", schedule), BASE, 1, [a, b, out, da, db, np.zeros((32, 128), np.uint32)], [out], text)
    assert "PTX line" in str(caught.value) and "CTA (0,0,0), thread (" in str(caught.value)


def test_registers_of_a_may_not_change_in_flight() -> None:
    kernel = product(64, 16, ("f32", "bf16", "bf16"), 0, 8192, trans=", 0", registers_a=True)
    rng = np.random.default_rng(5)
    b, db = k_major(values(rng, (64, 16), "bf16"), 128)
    a = registers_a(values(rng, (64, 16), "bf16").view(np.uint16))
    out = np.zeros((32, 128), np.uint32)
    args = [np.zeros(16, np.uint8), b, out, 0, db, a]
    for change, report in (("mov.b32 %a1, 0;", "register %a1 is written while a wgmma in flight reads it as A"),):
        text = kernel.text.replace("wgmma.commit_group.sync.aligned;", "wgmma.commit_group.sync.aligned; " + change)
        with pytest.raises(EmulatorFault, match=report):
            run(EmulatedBackend("sm_90a", "all"), kernel, 1, args, [out], text)
    text = kernel.text.replace("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; mov.b32 %a2, 0;")
    with pytest.raises(EmulatorFault, match="register %a2 was written after the last wgmma.fence"):
        run(EmulatedBackend("sm_90a", "all"), kernel, 1, args, [out], text)
