"""Control flow and collectives of threads: divergence, loops, exits, barriers, shuffles, votes."""

# ruff: noqa: E501 (lines of PTX)

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.errors import EmulatorFault
from tests.emu.running import HEADER, SCHEDULES, launch, same


def kernel(body: str, registers: str = "", shared: str = "") -> str:
    """%x holds element i of `x`; what is left in %y goes to element i of `y`."""
    return f"""{HEADER}.visible .entry k(.param .u64 x, .param .u64 y)
{{ .reg .b64 %xp, %yp, %w; .reg .b32 %i, %t, %lane, %x, %y, %r<16>; .reg .pred %p<8>; {registers} {shared}
ld.param.u64 %xp, [x]; ld.param.u64 %yp, [y]; mov.u32 %i, %ctaid.x; mov.u32 %r0, %ntid.x; mov.u32 %t, %tid.x; mov.u32 %lane, %laneid;
mad.lo.u32 %i, %i, %r0, %t; mul.wide.u32 %w, %i, 4; add.u64 %xp, %xp, %w; add.u64 %yp, %yp, %w; ld.global.u32 %x, [%xp];
{body}
st.global.u32 [%yp], %y; ret; }}"""


def run(body: str, x: np.ndarray, threads: int, **options: object) -> np.ndarray:
    registers, shared = options.pop("registers", ""), options.pop("shared", "")
    y = np.full(len(x), 0xDEAD, np.uint32)
    launch(kernel(body, str(registers), str(shared)), len(x) // threads, threads, [x.astype(np.uint32), y], **options)
    return y


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("threads", [1, 32, 40, 128])
def test_loops_with_a_trip_count_per_thread(threads: int, schedule: object) -> None:
    x = np.random.default_rng(threads).integers(1, 3000, threads * 3)
    body = """mov.u32 %y, 0;
LOOP: setp.eq.u32 %p0, %x, 1; @%p0 bra DONE; and.b32 %r1, %x, 1; setp.eq.u32 %p1, %r1, 0; @%p1 bra EVEN;
mad.lo.u32 %x, %x, 3, 1; bra NEXT;
EVEN: shr.u32 %x, %x, 1;
NEXT: add.u32 %y, %y, 1; bra LOOP;
DONE:"""

    def collatz(n: int) -> int:
        steps = 0
        while n != 1:
            n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
        return steps

    same(run(body, x, threads, schedule=schedule), [collatz(int(n)) for n in x])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_exits_and_scopes(schedule: object) -> None:
    x = np.arange(96)
    body = """{ .reg .b32 %r1; mov.u32 %r1, 5; setp.lt.u32 %p0, %x, 10; @%p0 bra SMALL; add.u32 %y, %x, %r1; bra OUT;
SMALL: { .reg .b32 %r1; mov.u32 %r1, 7; mul.lo.u32 %y, %x, %r1; } add.u32 %y, %y, %r1; OUT: }
setp.gt.u32 %p1, %x, 80; @%p1 exit; setp.eq.u32 %p2, %x, 40; @%p2 ret;"""
    y = run(body, x, 96, schedule=schedule)
    expected = np.where(x < 10, x * 7 + 5, x + 5)
    expected[81:] = expected[40] = 0xDEAD
    same(y, expected)


def test_trap_and_endless_loops_are_reported() -> None:
    with pytest.raises(EmulatorFault, match=r"\[trap\]"):
        run("mov.u32 %y, 0; setp.eq.u32 %p0, %x, 3; @%p0 trap;", np.arange(32), 32)
    with pytest.raises(EmulatorFault, match="endless"):
        run("mov.u32 %y, 0; L: bra L;", np.arange(32), 32, step_limit=1000)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_spin_lock_in_global_memory_makes_progress(schedule: object) -> None:
    body = """ld.param.u64 %w, [y]; mov.u32 %y, 0; mov.u32 %r5, %ctaid.x; setp.ne.u32 %p0, %t, 0; @%p0 bra END;
WAIT: ld.acquire.gpu.global.u32 %r6, [%w+508]; setp.ne.u32 %p1, %r6, %r5; @%p1 bra WAIT;
add.u32 %r6, %r6, 1; st.release.gpu.global.u32 [%w+508], %r6; mov.u32 %y, %r6;
END:"""
    y = np.zeros(128, np.uint32)
    launch(kernel(body), 3, 32, [np.zeros(96, np.uint32), y], schedule=schedule, checkers="all")
    assert y[[0, 32, 64]].tolist() == [1, 2, 3] and y[127] == 3


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("threads", [32, 64, 96])
def test_barriers_order_shared_memory(threads: int, schedule: object) -> None:
    x = np.random.default_rng(3).integers(0, 1000, threads * 4)
    body = f"""mov.u32 %r1, tile; shl.b32 %r2, %t, 2; add.u32 %r2, %r1, %r2; st.shared.u32 [%r2], %x; bar.sync 0;
sub.u32 %r3, {threads - 1}, %t; shl.b32 %r3, %r3, 2; add.u32 %r3, %r1, %r3; ld.shared.u32 %y, [%r3];"""
    y = run(body, x, threads, schedule=schedule, checkers="all", shared=f".shared .b32 tile[{threads}];")
    same(y, x.reshape(-1, threads)[:, ::-1].reshape(-1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_named_barriers_with_counts_and_arrive(schedule: object) -> None:
    """Warps 0-1 produce, warps 2-3 consume: two barriers as full and empty."""
    body = """mov.u32 %r1, tile; and.b32 %r2, %t, 63; shl.b32 %r2, %r2, 2; add.u32 %r1, %r1, %r2; mov.u32 %y, 0; mov.u32 %r3, 0;
setp.ge.u32 %p0, %t, 64; @%p0 bra CONSUME;
PRODUCE: setp.eq.u32 %p1, %r3, 0; @%p1 bra FIRST; bar.sync 2, 128; FIRST: add.u32 %r4, %x, %r3; st.shared.u32 [%r1], %r4; bar.arrive 1, 128;
add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 4; @%p2 bra PRODUCE; bra END;
CONSUME: bar.sync 1, 128; ld.shared.u32 %r4, [%r1]; add.u32 %y, %y, %r4; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 4; @%p2 bar.arrive 2, 128; @%p2 bra CONSUME;
END:"""
    x = np.random.default_rng(4).integers(0, 1000, 256)
    y = run(body, x, 128, schedule=schedule, checkers="all", shared=".shared .b32 tile[64];")
    expected = np.zeros((2, 128))
    expected[:, 64:] = x.reshape(2, 128)[:, :64] * 4 + 6
    same(y, expected.reshape(-1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_barrier_reductions(schedule: object) -> None:
    x = np.random.default_rng(5).integers(0, 4, 192)
    body = """setp.eq.u32 %p0, %x, 1; bar.red.popc.u32 %y, 0, %p0; setp.lt.u32 %p1, %x, 4; bar.red.and.pred %p2, 0, %p1;
setp.gt.u32 %p3, %x, 3; bar.red.or.pred %p4, 0, %p3; selp.u32 %r1, 1000, 0, %p2; selp.u32 %r2, 5000, 0, %p4; add.u32 %y, %y, %r1; add.u32 %y, %y, %r2;"""
    y = run(body, x, 96, schedule=schedule)
    same(y, np.repeat((x.reshape(2, 96) == 1).sum(1) + 1000, 96))


def test_exited_threads_and_barriers() -> None:
    body = "mov.u32 %y, 1; setp.ge.u32 %p0, %t, 32; @%p0 exit; bar.sync 0;"
    x = np.zeros(64)
    with pytest.raises(EmulatorFault, match=r"deadlock \(32 threads.*exited\).*barrier 0 has 32 of 64"):
        run(body, x, 64)
    y = run(body, x, 64, checkers="bounds")  # as hardware: a barrier counts the live threads
    same(y, [1] * 32 + [0xDEAD] * 32)


SHUFFLES = {
    "up": lambda lane, b, low, top: (lane - b, lane - b >= low),
    "down": lambda lane, b, low, top: (lane + b, lane + b <= top),
    "bfly": lambda lane, b, low, top: (lane ^ b, (lane ^ b) <= top),
    "idx": lambda lane, b, low, top: (low | b, (low | b) <= top),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", SHUFFLES)
@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles(mode: str, width: int, schedule: object) -> None:
    rng = np.random.default_rng(width)
    x = rng.integers(0, 2**32, 128)
    for b in (0, 1, 3, width // 2):
        limits = (32 - width) << 8 | (0 if mode == "up" else 31)
        body = f"shfl.sync.{mode}.b32 %y|%p0, %x, {b}, {limits}, -1; @!%p0 add.u32 %y, %y, 1;"
        expected = []
        for i in range(128):
            lane = i % 32
            low = lane & (32 - width)
            j, ok = SHUFFLES[mode](lane, b, low, low + width - 1)
            expected.append((int(x[i - lane + j]) if ok else int(x[i]) + 1) & 0xFFFFFFFF)
        same(run(body, x, 64, schedule=schedule), expected)
    varying = "and.b32 %r1, %x, 7; shfl.sync.idx.b32 %y, %x, %r1, 31, -1;"
    same(run(varying, x, 64, schedule=schedule), [x[i - i % 32 + (int(x[i]) & 7)] for i in range(128)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_collectives_under_divergence(schedule: object) -> None:
    """Half a warp shuffles with its own mask; the halves rejoin."""
    x = np.arange(64) * 3
    body = """setp.lt.u32 %p0, %lane, 16; @%p0 bra LOW; shfl.sync.bfly.b32 %y, %x, 1, 31, 0xFFFF0000; bra JOIN;
LOW: shfl.sync.bfly.b32 %y, %x, 2, 31, 0xFFFF; JOIN: shfl.sync.bfly.b32 %y, %y, 0, 31, -1;"""
    lane = np.arange(64) % 32
    same(run(body, x, 64, schedule=schedule), np.where(lane < 16, x[np.arange(64) ^ 2], x[np.arange(64) ^ 1]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_votes_matches_and_reductions(schedule: object) -> None:
    rng = np.random.default_rng(9)
    x = rng.integers(0, 5, 96)
    rows = x.reshape(3, 32)
    bits = lambda m: (m.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1)  # noqa: E731
    same(run("setp.eq.u32 %p0, %x, 2; vote.sync.ballot.b32 %y, %p0, -1;", x, 96, schedule=schedule), np.repeat(bits(rows == 2), 32))
    for mode, fn in (("any", np.any), ("all", np.all)):
        body = f"setp.lt.u32 %p0, %x, 4; vote.sync.{mode}.pred %p1, %p0, -1; selp.u32 %y, 1, 0, %p1;"
        same(run(body, x, 96, schedule=schedule), np.repeat(fn(rows < 4, axis=1), 32))
    same(run("match.any.sync.b32 %y, %x, -1;", x, 96, schedule=schedule), bits(rows[:, :, None] == rows[:, None, :]).reshape(-1))
    same(run("match.all.sync.b32 %y|%p0, %x, -1; @!%p0 mov.u32 %y, 9;", np.repeat([1, 2, 3], 32) + (np.arange(96) == 40), 96,
             schedule=schedule), np.repeat([0xFFFFFFFF, 9, 0xFFFFFFFF], 32))  # fmt: skip
    for name, fn2 in {"add": np.sum, "min": np.min, "max": np.max}.items():
        same(run(f"redux.sync.{name}.u32 %y, %x, -1;", x, 96, schedule=schedule), np.repeat(fn2(rows, axis=1), 32))
    for name, ufunc in {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items():
        same(run(f"redux.sync.{name}.b32 %y, %x, -1;", x, 96, schedule=schedule), np.repeat(ufunc.reduce(rows, axis=1), 32))
    signed = "sub.s32 %x, %x, 2; redux.sync.min.s32 %y, %x, -1;"
    same(run(signed, x, 96, schedule=schedule), np.repeat((rows.min(1) - 2).astype(np.int32).view(np.uint32) if False else (rows.min(1) - 2) & 0xFFFFFFFF, 32))
    same(run("elect.sync %r1|%p0, -1; selp.u32 %y, 1, 0, %p0; add.u32 %y, %y, %r1;", x, 96, schedule=schedule), np.arange(96) % 32 == 0)
    same(run("mov.u32 %y, 0; setp.lt.u32 %p0, %x, 3; @%p0 activemask.b32 %y;", x, 96), np.where(x < 3, np.repeat(bits(rows < 3), 32), 0))


def test_special_registers() -> None:
    text = f"""{HEADER}.visible .entry k(.param .u64 out)
{{ .reg .b64 %rd<3>; .reg .b32 %r<20>; ld.param.u64 %rd0, [out];
mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z; mov.u32 %r3, %ntid.x; mov.u32 %r4, %ntid.y; mov.u32 %r5, %ctaid.x;
mov.u32 %r6, %ctaid.y; mov.u32 %r7, %nctaid.x; mov.u32 %r8, %laneid; mov.u32 %r9, %warpid; mov.u32 %r10, %lanemask_lt;
mad.lo.u32 %r11, %r2, %r4, %r1; mad.lo.u32 %r11, %r11, %r3, %r0; mad.lo.u32 %r12, %r6, %r7, %r5; mad.lo.u32 %r12, %r12, 48, %r11;
mul.wide.u32 %rd1, %r12, 16; add.u64 %rd0, %rd0, %rd1; shl.b32 %r13, %r9, 16; or.b32 %r13, %r13, %r8;
mov.u32 %r14, %clock; mov.u64 %rd2, %globaltimer;
st.global.u32 [%rd0], %r13; st.global.u32 [%rd0+4], %r10; st.global.u32 [%rd0+8], %r5; st.global.u32 [%rd0+12], %r6; ret; }}"""
    out = np.full((6, 48, 4), 77, np.uint32)
    launch(text, (3, 2), (4, 6, 2), [out])
    thread = np.arange(48)
    same(out[:, :, 0], np.broadcast_to(thread // 32 << 16 | thread % 32, (6, 48)))
    same(out[:, :, 1], np.broadcast_to((1 << thread % 32) - 1, (6, 48)))
    same(out[:, :, 2], np.broadcast_to((np.arange(6) % 3)[:, None], (6, 48)))
    same(out[:, :, 3], np.broadcast_to((np.arange(6) // 3)[:, None], (6, 48)))


def test_launch_arguments_are_checked() -> None:
    text = kernel("mov.u32 %y, 0;")
    x = np.zeros(32, np.uint32)
    for options, match in (({"checkers": "rcae"}, "rcae"), ({"schedule": "fast"}, "schedule")):
        with pytest.raises(ValueError, match=match):
            launch(text, 1, 32, [x, x.copy()], **options)
    with pytest.raises(ValueError, match="threads"):
        launch(text, 1, 2048, [x, x.copy()])
    with pytest.raises(ValueError, match="grid"):
        launch(text, 0, 32, [x, x.copy()])
