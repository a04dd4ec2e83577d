"""What a launch counts: instructions, bytes, and bank conflicts of known patterns."""

# ruff: noqa: E501 (lines of PTX)

from __future__ import annotations

import numpy as np
import pytest

from tests.emu.running import HEADER, launch


def shared_kernel(access: str) -> str:
    """32 threads; %t the thread, %s the start of 16 KB of shared memory."""
    return f"""{HEADER}.visible .entry k(.param .u32 n)
{{ .reg .b32 %t, %s, %a, %r<8>; .shared .align 128 .b8 tile[16384];
mov.u32 %t, %tid.x; mov.u32 %s, tile; {access} ret; }}"""


@pytest.mark.parametrize(("access", "extra"), [
    ("mad.lo.u32 %a, %t, 4, %s; st.shared.u32 [%a], %t;", 0),
    ("mad.lo.u32 %a, %t, 8, %s; st.shared.u32 [%a], %t;", 1),  # stride of two words
    ("mad.lo.u32 %a, %t, 128, %s; st.shared.u32 [%a], %t;", 31),  # a column
    ("mad.lo.u32 %a, %t, 132, %s; st.shared.u32 [%a], %t;", 0),  # a padded column
    ("st.shared.u32 [%s], %t;", 0),  # one word for all
    ("mad.lo.u32 %a, %t, 8, %s; st.shared.v2.u32 [%a], {%t, %t};", 0),
    ("mad.lo.u32 %a, %t, 16, %s; st.shared.v4.u32 [%a], {%t, %t, %t, %t};", 0),
    ("mad.lo.u32 %a, %t, 128, %s; st.shared.v4.u32 [%a], {%t, %t, %t, %t};", 28),  # four phases, 8 lanes in one column
    ("mad.lo.u32 %a, %t, 128, %s; stmatrix.sync.aligned.m8n8.x4.shared.b16 [%a], {%t, %t, %t, %t};", 28),
    ("mad.lo.u32 %a, %t, 144, %s; stmatrix.sync.aligned.m8n8.x4.shared.b16 [%a], {%t, %t, %t, %t};", 0),
])  # fmt: skip
def test_bank_conflicts(access: str, extra: int) -> None:
    counters = launch(shared_kernel(access), 1, 32, [0], checkers="bank")
    assert counters.bank_conflicts == extra
    assert sum(counters.conflicts_by_line.values()) == extra
    assert counters.bank_accesses > 0


def test_bytes_and_instructions() -> None:
    text = f"""{HEADER}.visible .entry k(.param .u64 x, .param .u64 y)
{{ .reg .b64 %x, %y, %w; .reg .b32 %t, %r; .reg .pred %p; ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mov.u32 %t, %tid.x;
mul.wide.u32 %w, %t, 4; add.u64 %x, %x, %w; add.u64 %y, %y, %w; ld.global.u32 %r, [%x]; setp.lt.u32 %p, %t, 10; @%p st.global.u32 [%y], %r; ret; }}"""
    x, y = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    counters = launch(text, 1, 64, [x, y])
    assert counters.global_read == 256 and counters.global_written == 40
    assert counters.instructions == 10 * 64 and counters.steps == 10 and counters.batches == 1
    assert (y[:10] == x[:10]).all() and (y[10:] == 0).all()


def test_executions_by_line() -> None:
    text = f"""{HEADER}.visible .entry k(.param .u32 n)
{{ .reg .b32 %t, %i; .reg .pred %p;
mov.u32 %t, %tid.x; mov.u32 %i, 0;
LOOP:
add.u32 %i, %i, 1;
setp.lt.u32 %p, %i, 5;
@%p bra LOOP;
setp.lt.u32 %p, %t, 10;
@!%p bra END;
add.u32 %i, %i, 1;
END: ret; }}"""
    counters = launch(text, 2, 64, [0])
    first = text[: text.index("LOOP:")].count("\n") + 1  # the line of the label
    assert counters.executions == {first - 1: 256, first + 1: 640, first + 2: 640, first + 3: 640, first + 4: 128, first + 5: 128,
                                   first + 6: 20, first + 7: 20}  # a jump to ret is a ret  # fmt: skip
    assert sum(counters.executions.values()) == counters.instructions
    assert counters.profile()[0] == (first + 1, 640, 0, 0, "add.u32 %i, %i, 1;") and counters.summary()["instructions"] == counters.instructions


@pytest.mark.parametrize(("step", "width", "sectors", "extra"), [
    (4, 1, 8, 0), (8, 1, 16, 8), (16, 4, 32, 0), (32, 1, 64, 56), (0, 1, 2, 0), (4, 1, 8, 0)])  # fmt: skip
def test_uncoalesced_sectors(step: int, width: int, sectors: int, extra: int) -> None:
    """64 threads load `width` words each, `step` bytes apart."""
    registers = "{%r1, %r2, %r3, %r4}" if width == 4 else "%r1"
    text = f"""{HEADER}.visible .entry k(.param .u64 x)
{{ .reg .b64 %x, %w; .reg .b32 %t, %r<5>; ld.param.u64 %x, [x]; mov.u32 %t, %tid.x; mul.wide.u32 %w, %t, {step}; add.u64 %x, %x, %w;
ld.global{'.v4' if width == 4 else ''}.u32 {registers}, [%x]; ret; }}"""
    backing = np.zeros(2048 + 32, np.uint8)
    start = -backing.ctypes.data % 32
    counters = launch(text, 1, 64, [backing[start : start + 2048]], checkers="bank")
    assert counters.global_sectors == sectors
    assert counters.uncoalesced_sectors == extra == sum(counters.sectors_by_line.values())


def test_products_of_mma() -> None:
    registers = "{%r0, %r1, %r2, %r3}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r0, %r1, %r2, %r3}"
    text = shared_kernel(f".reg .f32 %f<4>; mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {registers};")
    counters = launch(text, 2, 96, [0], checkers=("bounds",))
    assert counters.products == 2 * 3 * 16 * 8 * 32
