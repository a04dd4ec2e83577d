"""Loads, stores, atomics and copies: every width and space, and what the address checks say."""

# ruff: noqa: E501 (lines of PTX)

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.emu import GlobalMemory, load
from oxidnn.errors import EmulatorFault, PtxError
from oxidnn.ptx.parser import parse
from tests.emu.running import HEADER, SCHEDULES, apply, integers, launch, same


def copy_kernel(loads: str, stores: str, registers: str, stride: int, shared: str = "") -> str:
    """Thread i handles `stride` bytes at i * stride: %src, %dst hold the addresses, %off = i * stride."""
    return f"""{HEADER}.visible .entry copy(.param .u64 src, .param .u64 dst)
{{ .reg .b64 %src, %dst, %w, %rd<8>; .reg .b32 %i, %n, %off, %s, %r<8>; .reg .pred %p<4>; {registers} {shared}
ld.param.u64 %src, [src]; ld.param.u64 %dst, [dst];
mov.u32 %i, %ctaid.x; mov.u32 %n, %ntid.x; mul.lo.u32 %i, %i, %n; mov.u32 %n, %tid.x; add.u32 %i, %i, %n;
mul.wide.u32 %w, %i, {stride}; add.u64 %src, %src, %w; add.u64 %dst, %dst, %w; mov.u32 %n, %tid.x; mul.lo.u32 %off, %n, {stride};
{loads}
{stores}
ret; }}"""


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("type_", ["b8", "u16", "b32", "f32", "b64", "f64"])
@pytest.mark.parametrize("via", ["global", "shared", "local", "generic shared", "generic global", "const"])
def test_every_width_and_space(type_: str, length: int, via: str) -> None:
    size = {"b8": 1, "u16": 2, "b32": 4, "f32": 4, "b64": 8, "f64": 8}[type_]
    total = size * length
    if total > 16:
        return
    register = "b16" if size <= 2 else type_
    vector = "" if length == 1 else f".v{length}"
    names = "%v0" if length == 1 else "{" + ", ".join(f"%v{i}" for i in range(length)) + "}"
    load_ = f"ld.global{vector}.{type_} {names}, [%src];"
    if via == "global":
        text = (load_, f"st.global{vector}.{type_} [%dst], {names};", "")
    elif via == "generic global":
        text = (f"ld{vector}.{type_} {names}, [%src];", f"st{vector}.{type_} [%dst], {names};", "")
    elif via == "const":
        text = (f"ld.global.nc.L1::no_allocate{vector}.{type_} {names}, [%src];", f"st.global.cs{vector}.{type_} [%dst], {names};", "")
    elif via == "local":
        middle = f"mov.u64 %rd0, buf; st.local{vector}.{type_} [buf], {names}; ld.local{vector}.{type_} {names}, [%rd0];"
        text = (load_ + middle, f"st.global{vector}.{type_} [%dst], {names};", ".local .align 16 .b8 buf[16];")
    elif via == "shared":
        middle = f"mov.u32 %s, tile; add.u32 %s, %s, %off; st.shared{vector}.{type_} [%s], {names}; bar.sync 0; ld.shared{vector}.{type_} {names}, [%s];"
        text = (load_ + middle, f"st.global{vector}.{type_} [%dst], {names};", f".shared .align 16 .b8 tile[{96 * total}];")
    else:
        middle = (f"mov.u64 %rd0, tile; cvta.shared.u64 %rd0, %rd0; cvt.u64.u32 %rd1, %off; add.u64 %rd0, %rd0, %rd1; "
                  f"st{vector}.{type_} [%rd0], {names}; bar.sync 0; ld{vector}.{type_} {names}, [%rd0];")  # fmt: skip
        text = (load_ + middle, f"st.global{vector}.{type_} [%dst], {names};", f".shared .align 16 .b8 tile[{96 * total}];")
    rng = np.random.default_rng(total)
    for schedule in SCHEDULES:
        source = rng.integers(0, 256, 96 * 3 * total).astype(np.uint8)
        backing = np.full(source.size + 16, 7, np.uint8)
        at = -backing.ctypes.data % 16
        target = backing[at : at + source.size]
        aligned = np.zeros(source.size + 16, np.uint8)
        at = -aligned.ctypes.data % 16
        aligned[at : at + source.size] = source
        launch(copy_kernel(text[0], text[1], f".reg .{register} %v<4>;", total, text[2]), 3, 96,
               [aligned[at : at + source.size], target], checkers="all", schedule=schedule)  # fmt: skip
        same(target, source)


def test_narrow_loads_extend_and_stores_truncate() -> None:
    source = np.arange(256, dtype=np.uint8)
    out = np.zeros(256, np.uint32)
    text = copy_kernel("ld.global.s8 %r0, [%src];", "mul.wide.u32 %w, %i, 3; add.u64 %dst, %dst, %w; st.global.u32 [%dst], %r0;", "", 1)
    launch(text, 2, 128, [source, out])
    same(out, source.view(np.int8).astype(np.int32).view(np.uint32))
    text = copy_kernel("ld.global.u8 %r0, [%src]; add.u32 %r0, %r0, 0x100;", "st.global.u8 [%dst], %r0;", "", 1)
    small = np.zeros(256, np.uint8)
    launch(text, 2, 128, [source, small])
    same(small, source)


def test_variables_are_initialised_and_shared_by_launches() -> None:
    text = f"""{HEADER}.const .align 4 .f32 table[4] = {{1.0, 2.0, 0f40400000, 4.0}};
.global .align 4 .u32 counter = 5;
.visible .entry k(.param .u64 out)
{{ .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .f32 %f;
ld.param.u64 %rd0, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 4; add.u64 %rd0, %rd0, %rd1;
mov.u64 %rd2, table; add.u64 %rd2, %rd2, %rd1; ld.const.f32 %f, [%rd2]; st.global.f32 [%rd0], %f;
mov.u64 %rd3, counter; atom.global.add.u32 %r1, [%rd3], 1; st.global.u32 [%rd0+16], %r1; ld.const.f32 %f, [table+8]; st.global.f32 [%rd0+32], %f;
ret; }}"""
    program = load(parse(text))
    memory = GlobalMemory()
    out = np.zeros(12, np.float32)
    pointer = memory.register(out, "out")
    program.launch(memory, 1, 4, [pointer])
    assert out[:4].tolist() == [1, 2, 3, 4] and out[8:].tolist() == [3] * 4
    assert out.view(np.uint32)[4:8].tolist() == [5, 6, 7, 8]
    program.launch(memory, 1, 4, [pointer])
    assert out.view(np.uint32)[4:8].tolist() == [9, 10, 11, 12]


def test_parameters_of_every_type_and_their_address() -> None:
    text = f"""{HEADER}.visible .entry k(.param .u64 out, .param .u8 a, .param .s16 b, .param .f32 c, .param .f64 d, .param .align 8 .b8 blob[24])
{{ .reg .b64 %rd<4>; .reg .b32 %r<6>; .reg .f32 %f; .reg .f64 %fd; .reg .b16 %h;
ld.param.u64 %rd0, [out]; ld.param.u8 %r0, [a]; ld.param.s16 %r1, [b]; ld.param.f32 %f, [c]; ld.param.f64 %fd, [d]; ld.param.v2.u32 {{%r2, %r3}}, [blob+8];
mov.b64 %rd1, blob; cvta.param.u64 %rd1, %rd1; ld.param.u32 %r4, [%rd1+16]; ld.u32 %r5, [%rd1];
st.global.u32 [%rd0], %r0; st.global.u32 [%rd0+4], %r1; st.global.f32 [%rd0+8], %f; st.global.f64 [%rd0+16], %fd;
st.global.v2.u32 [%rd0+24], {{%r2, %r3}}; st.global.u32 [%rd0+32], %r4; st.global.u32 [%rd0+36], %r5; ret; }}"""
    out = np.zeros(10, np.uint32)
    blob = np.arange(10, 16, dtype=np.uint32)
    launch(text, 1, 32, [out, 200, -3, 1.5, 2.25, blob.tobytes()])
    assert out[0] == 200 and out[1] == 0xFFFFFFFD and out[2:3].view(np.float32)[0] == 1.5
    assert out[4:6].view(np.float64)[0] == 2.25 and out[6:].tolist() == [12, 13, 14, 10]


def test_address_faults_name_the_allocation() -> None:
    store = copy_kernel("ld.global.f32 %v, [%src];", "st.global.f32 [%dst+4], %v;", ".reg .f32 %v;", 4)
    with pytest.raises(EmulatorFault, match=r"\[bounds\].*0 bytes past the end of 'dst'") as caught:
        launch(store, 2, 64, [np.zeros(128, np.float32), np.zeros(128, np.float32)])
    assert caught.value.thread == 63 and caught.value.cta == "(1,0,0)" and "st.global.f32" in caught.value.text
    with pytest.raises(EmulatorFault, match="read-only"):
        frozen = np.zeros(129, np.float32)
        frozen.flags.writeable = False
        launch(store, 2, 64, [np.zeros(128, np.float32), frozen])
    program = load(parse(store))
    memory = GlobalMemory()
    a, b = memory.alloc(512, "a", initialised=True), memory.alloc(600, "b")
    memory.free(b)
    with pytest.raises(EmulatorFault, match="use after free"):
        program.launch(memory, 2, 64, [a, b])
    b = memory.alloc(600, "b")
    program.launch(memory, 2, 64, [a, b])
    assert (memory.view(b + 4, 512) == 0).all()
    with pytest.raises(EmulatorFault, match=r"\[uninit\].*'b'"):
        program.launch(memory, 2, 64, [b, a])
    with pytest.raises(ValueError, match="no allocation"):
        memory.view(b + 10**9, 4)


def test_lanes_in_several_allocations_and_overlapping_arrays() -> None:
    text = f"""{HEADER}.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 out)
{{ .reg .b64 %rd<6>; .reg .b32 %r<4>; .reg .pred %p;
ld.param.u64 %rd0, [a]; ld.param.u64 %rd1, [b]; ld.param.u64 %rd2, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd3, %r0, 4;
and.b32 %r1, %r0, 1; setp.eq.u32 %p, %r1, 0; selp.b64 %rd4, %rd0, %rd1, %p; add.u64 %rd4, %rd4, %rd3; ld.global.u32 %r2, [%rd4];
add.u64 %rd5, %rd2, %rd3; st.global.u32 [%rd5], %r2; st.global.u32 [%rd4], %r0; ret; }}"""
    a, b = np.arange(64, dtype=np.uint32), np.arange(1000, 1064, dtype=np.uint32)
    out = np.zeros(64, np.uint32)
    launch(text, 1, 64, [a, b, out])
    same(out, np.where(np.arange(64) % 2 == 0, np.arange(64), np.arange(1000, 1064)))
    same(a, np.arange(64))
    memory = GlobalMemory()
    base = np.zeros(100, np.uint32)
    inner, outer = memory.register(base[20:30], "inner"), memory.register(base, "outer")
    assert memory.find(inner + 50, 4) is not None and memory.find(outer + 396, 4) is not None
    assert memory.find(outer + 400, 4) is None


ATOMIC = {
    "add": lambda o, v: o + v, "min": min, "max": max, "and": lambda o, v: o & v, "or": lambda o, v: o | v,
    "xor": lambda o, v: o ^ v, "exch": lambda o, v: v, "inc": lambda o, v: 0 if o >= v else o + 1,
    "dec": lambda o, v: v if o == 0 or o > v else o - 1,
}  # fmt: skip


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("name", ATOMIC)
def test_integer_atomics(name: str, space: str) -> None:
    """Each old value must be a step of one serial order; lane order is the machine's."""
    rng = np.random.default_rng(len(name))
    values = rng.integers(0, 50, 64, np.uint32)
    cells = rng.integers(0, 5, 64).astype(np.uint32)
    types = {"and": "b32", "or": "b32", "xor": "b32", "exch": "b32"}
    address = "mov.u32 %s, tile; st.shared.v4.u32 [tile], {9, 9, 9, 9}; st.shared.v4.u32 [tile+16], {9, 9, 9, 9}; bar.sync 0; shl.b32 %r3, %r1, 2; add.u32 %s, %s, %r3;"
    target = "[%s]" if space == "shared" else "[%rd3]"
    text = f"""{HEADER}.visible .entry k(.param .u64 values, .param .u64 cells, .param .u64 mem, .param .u64 old)
{{ .reg .b64 %rd<8>; .reg .b32 %r<8>, %s; .shared .align 16 .b32 tile[8];
ld.param.u64 %rd0, [values]; ld.param.u64 %rd1, [cells]; ld.param.u64 %rd2, [mem]; ld.param.u64 %rd4, [old];
mov.u32 %r0, %tid.x; mul.wide.u32 %rd5, %r0, 4; add.u64 %rd0, %rd0, %rd5; add.u64 %rd1, %rd1, %rd5; add.u64 %rd4, %rd4, %rd5;
ld.global.u32 %r2, [%rd0]; ld.global.u32 %r1, [%rd1]; mul.wide.u32 %rd3, %r1, 4; add.u64 %rd3, %rd2, %rd3;
{address if space == "shared" else ""}
atom.{space}.{name}.{types.get(name, "u32")} %r4, {target}, %r2; st.global.u32 [%rd4], %r4;
{"bar.sync 0; ld.shared.u32 %r5, [%s]; st.global.u32 [%rd3], %r5;" if space == "shared" else ""} ret; }}"""
    memory = np.full(8, 9, np.uint32)
    old = np.zeros(64, np.uint32)
    launch(text, 1, 64, [values, cells, memory, old], checkers="uninit" if space == "shared" else "all")
    state = [9] * 8
    for lane in range(64):
        assert old[lane] == state[cells[lane]]
        state[cells[lane]] = ATOMIC[name](state[cells[lane]], int(values[lane]))
    assert memory.tolist() == state


def test_compare_and_swap_counts() -> None:
    a = np.zeros(1, np.uint32)
    text = f"""{HEADER}.visible .entry k(.param .u64 mem)
{{ .reg .b64 %rd; .reg .b32 %r<4>; .reg .pred %p; ld.param.u64 %rd, [mem]; ld.global.u32 %r0, [%rd];
AGAIN: add.u32 %r1, %r0, 1; atom.global.cas.b32 %r2, [%rd], %r0, %r1; setp.ne.u32 %p, %r2, %r0; mov.u32 %r0, %r2; @%p bra AGAIN; ret; }}"""
    for schedule in SCHEDULES:
        a[0] = 0
        launch(text, 4, 96, [a], schedule=schedule)
        assert a[0] == 384


def test_float_atomics() -> None:
    x = np.random.default_rng(1).standard_normal(512).astype(np.float32)
    out = np.zeros(4, np.float32)
    text = copy_kernel("ld.global.f32 %v, [%src];", "ld.param.u64 %dst, [dst]; red.global.add.f32 [%dst], %v; atom.global.add.f32 %u, [%dst+4], %v;",
                       ".reg .f32 %v, %u;", 4)  # fmt: skip
    launch(text, 4, 128, [x, out])
    assert abs(out[0] - x.sum(dtype=np.float64)) < 1e-4 and out[0] == out[1]
    tiny = np.full(128, 1e-40, np.float32)
    out[:] = 0
    launch(text, 1, 128, [tiny, out])
    assert out[0] == 0  # red.global.add.f32 flushes subnormals
    halves = np.ones(8, np.uint32) * 0x3C003800
    packed = np.zeros(2, np.uint32)
    text = copy_kernel("ld.global.b32 %r0, [%src];", "ld.param.u64 %dst, [dst]; red.global.add.noftz.f16x2 [%dst], %r0;", "", 4)
    launch(text, 1, 8, [halves, packed])
    assert packed[:1].view(np.float16).tolist() == [4, 8]
    four = np.zeros(4, np.float32)
    text = copy_kernel("ld.global.f32 %v, [%src];", "ld.param.u64 %dst, [dst]; red.global.add.v4.f32 [%dst], {%v, %v, 0f3F800000, %v};", ".reg .f32 %v;", 4)
    aligned = np.zeros(8, np.float32)
    at = -aligned.ctypes.data % 16 // 4
    four = aligned[at : at + 4]
    launch(text, 1, 32, [np.full(32, 2, np.float32), four])
    assert four.tolist() == [64, 64, 32, 64]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [4, 8, 16])
def test_async_copies_with_zero_fill(size: int, schedule: object) -> None:
    rng = np.random.default_rng(size)
    source = rng.integers(1, 255, 64 * size + 16).astype(np.uint8)
    at = -source.ctypes.data % 16
    source = source[at : at + 64 * size]
    backing = np.zeros(64 * size + 16, np.uint8)
    at = -backing.ctypes.data % 16
    target = backing[at : at + 64 * size]
    type_ = {4: "b32", 8: "v2.b32", 16: "v4.b32"}[size]
    names = "%r4" if size == 4 else "{%r4, %r5}" if size == 8 else "{%r4, %r5, %r6, %r7}"
    text = copy_kernel(
        f"mov.u32 %s, tile; add.u32 %s, %s, %off; rem.u32 %r0, %n, {size + 1}; setp.eq.u32 %p0, %r0, 0; @%p0 mov.u64 %src, 0;"
        f"cp.async.ca.shared.global [%s], [%src], {size}, %r0; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;",
        f"ld.shared.{type_} {names}, [%s]; st.global.{type_} [%dst], {names};", "", size,
        f".shared .align 16 .b8 tile[{64 * size}];")  # fmt: skip
    launch(text, 1, 64, [source, target], schedule=schedule, checkers="all")
    expected = source.reshape(64, size).copy()
    for i in range(64):
        expected[i, i % (size + 1):] = 0
    same(target.reshape(64, size), expected)


def test_unknown_things_are_refused_when_loading() -> None:
    for line in ("add.rn.f32x2 %rd0, %rd0, %rd0;", "frobnicate.u32 %r0, %r1;", "add.u32 %r0, %r1, %rd0;", "ld.global.weird.u32 %r0, [%src];",
                 "mov.u32 %r9, 0;", "bar.sync 16;", "mma.sync.aligned.m16n8k16.row.col.f32.f32.f32.f32 {%r0}, {%r0}, {%r0}, {%r0};",
                 "cvt.f32.s32 %nope, %r0;", "st.param.u32 [src], %r0;", "ex2.f32 %v, %v;", "bra NOWHERE;"):  # fmt: skip
        with pytest.raises(PtxError, match="line 9"):
            load(parse(copy_kernel(line, "", ".reg .f32 %v;", 4)))


def test_signed_and_unsigned_immediates() -> None:
    a = integers(np.random.default_rng(2), np.uint32)
    same(apply("add.s32 %d, %a0, -1;", [a], np.uint32), a - np.uint32(1))
    same(apply("and.b32 %d, %a0, 0xFFFF0000;", [a], np.uint32), a & np.uint32(0xFFFF0000))
    same(apply("mov.f32 %f0, 0f40490FDB; mov.b32 %d, %f0;", [a], np.uint32), np.full(len(a), 0x40490FDB))
    same(apply("mov.f32 %f0, 1.5; mov.b32 %d, %f0;", [a], np.uint32), np.full(len(a), 0x3FC00000))
    same(apply("mul.wide.s32 %d, %a0, -4;", [a.view(np.int32)], np.int64), a.view(np.int32).astype(np.int64) * -4)
