"""mbarrier, cluster and register instructions one by one."""

# ruff: noqa: E501 (lines of PTX)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oxidnn.errors import EmulatorFault
from oxidnn.runtime.emu_backend import EmulatedBackend
from tests.emu.hopper import GPU, Kernel, run, wait


@pytest.fixture(params=["lowest_pc", ("random", 1), ("random", 4), GPU], ids=str)
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda":
        return request.getfixturevalue("cuda")
    return EmulatedBackend("sm_90a", "all", request.param)


def simple(body: str, threads: int = 64, cluster: int = 1, name: str = "bar") -> Kernel:
    """`b` is an mbarrier at 8 bytes of static shared memory; %v goes to out[CTA * threads + thread]."""
    return Kernel(name, ("out:u64",), f"""
.shared .align 8 .b64 b; .reg .b32 %v, %i, %cta; .reg .b64 %state;
mov.u32 %v, 0; mov.u32 %cta, %ctaid.x; setp.eq.u32 %p0, %thread, 0;
{body}
mad.lo.u32 %i, %cta, {threads}, %thread; mul.wide.u32 %rd0, %i, 4; add.u64 %rd0, %out, %rd0; st.global.u32 [%rd0], %v;
EXIT: ret;""", threads=threads, cluster=cluster)


def result(backend: Any, body: str, threads: int = 64, grid: int = 1, cluster: int = 1) -> list[int]:
    out = np.full(threads * grid, 0xFFFFFFFF, np.uint32)
    return run(backend, simple(body, threads, cluster), grid, [out], [out])[0].tolist()


INIT = "@%p0 mbarrier.init.shared::cta.b64 [b], {count};\nbar.sync 0;\n"


def test_a_phase_completes_with_its_last_arrival(backend: Any) -> None:
    """Every thread leaves its number, arrives and waits; all see the sum of all."""
    body = INIT.format(count=64) + f""".shared .b32 box[64];
shl.b32 %r1, %thread, 2; mov.u32 %r2, box; add.u32 %r1, %r1, %r2; st.shared.u32 [%r1], %thread;
mbarrier.arrive.shared::cta.b64 %state, [b];
{wait('b', '0', 'W')}
mov.u32 %r3, 0;
SUM: ld.shared.u32 %r4, [%r2]; add.u32 %v, %v, %r4; add.u32 %r2, %r2, 4; add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 64; @%p1 bra SUM;"""
    assert result(backend, body) == [2016] * 64


def test_states_name_phases(backend: Any) -> None:
    body = INIT.format(count=64) + """mbarrier.arrive.shared::cta.b64 %state, [b];
W: mbarrier.try_wait.shared::cta.b64 %done, [b], %state; @!%done bra W;
mbarrier.arrive.shared::cta.b64 %state, [b];
W2: mbarrier.test_wait.shared::cta.b64 %done, [b], %state; @!%done bra W2;
mbarrier.test_wait.parity.shared::cta.b64 %done, [b], 1; selp.b32 %v, 1, 0, %done;"""
    assert result(backend, body) == [1] * 64


def test_counts_of_arrivals_and_pending_counts(backend: Any) -> None:
    body = INIT.format(count=70) + f"""@!%p0 bra WAIT;
mbarrier.arrive.noComplete.shared::cta.b64 %state, [b], 2; mbarrier.pending_count.b64 %v, %state;
mbarrier.arrive.shared::cta.b64 %state, [b], 3; mbarrier.pending_count.b64 %r1, %state; mad.lo.u32 %v, %v, 1000, %r1;
mbarrier.arrive.shared::cta.b64 _, [b], 64;
WAIT:
mbarrier.arrive_drop.shared::cta.b64 _, [b];
{wait('b', '0', 'W')}""".replace("mbarrier.arrive_drop.shared::cta.b64 _, [b];", "@%p0 mbarrier.arrive_drop.shared::cta.b64 _, [b];")
    assert result(backend, body) == [70068] + [0] * 63


def test_bytes_come_before_and_after_they_are_expected(backend: Any) -> None:
    body = INIT.format(count=1) + f"""@!%p0 bra WAIT;
mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [b], 48;
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [b], 32;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [b], 48;
mbarrier.test_wait.parity.shared::cta.b64 %done, [b], 0; selp.b32 %v, 100, 1, %done;
mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [b], 32;
WAIT:
{wait('b', '0', 'W')}"""
    assert result(backend, body) == [1] + [0] * 63


def test_parity_of_the_phase_before_passes_at_once(backend: Any) -> None:
    body = INIT.format(count=1) + "mbarrier.try_wait.parity.shared::cta.b64 %done, [b], 1; selp.b32 %v, 7, 8, %done;"
    assert result(backend, body) == [7] * 64


def test_copies_of_a_thread_arrive(backend: Any) -> None:
    x = np.arange(256, dtype=np.uint32)
    out = np.zeros(64, np.uint32)
    kernel = Kernel("noinc", ("x:u64", "out:u64"), f"""
.shared .align 8 .b64 b; .shared .align 16 .b8 box[1024]; .reg .b32 %v;
setp.eq.u32 %p0, %thread, 0; @%p0 mbarrier.init.shared::cta.b64 [b], 64;
bar.sync 0;
mul.wide.u32 %rd0, %thread, 16; add.u64 %rd0, %x, %rd0; mov.u32 %r1, box; mad.lo.u32 %r2, %thread, 16, %r1;
cp.async.cg.shared.global [%r2], [%rd0], 16;
cp.async.mbarrier.arrive.noinc.shared::cta.b64 [b];
{wait('b', '0', 'W')}
xor.b32 %r3, %thread, 63; mad.lo.u32 %r3, %r3, 16, %r1; ld.shared.u32 %v, [%r3+4];
mul.wide.u32 %rd1, %thread, 4; add.u64 %rd1, %out, %rd1; st.global.u32 [%rd1], %v; ret;""", threads=64)
    assert run(backend, kernel, 1, [x, out], [out])[0].tolist() == [4 * (63 - t) + 1 for t in range(64)]
    if isinstance(backend, EmulatedBackend):
        with pytest.raises(EmulatorFault, match=r"\[(uninit|race)\]"):
            run(backend, kernel, 1, [x, out], [out], kernel.text.replace("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [b];", "mbarrier.arrive.shared::cta.b64 _, [b];"))


def test_cluster_addresses_and_registers(backend: Any) -> None:
    """Each CTA leaves its rank in the next one's shared memory, by a shared::cluster store, a generic store and an atomic."""
    body = """.shared .b32 box[4]; .reg .b32 %rank, %next;
mov.u32 %rank, %cluster_ctarank; add.u32 %next, %rank, 1; and.b32 %next, %next, 3;
mov.u32 %r1, box; @%p0 st.shared.u32 [%r1+8], 100;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mapa.shared::cluster.u32 %r2, %r1, %next;
mov.u64 %rd1, box; cvta.shared.u64 %rd1, %rd1; mapa.u64 %rd2, %rd1, %next;
@!%p0 bra JOIN;
st.shared::cluster.u32 [%r2], %rank;
add.u32 %r3, %rank, 10; st.u32 [%rd2+4], %r3;
red.shared::cluster.add.u32 [%r2+8], %rank;
JOIN: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ld.shared.u32 %r4, [%r1]; ld.shared.u32 %r5, [%r1+4]; ld.shared.u32 %r6, [%r1+8];
getctarank.shared::cluster.u32 %r7, %r2; ld.shared::cluster.u32 %r8, [%r2];
mad.lo.u32 %v, %r4, 100, %r5; mad.lo.u32 %v, %v, 1000, %r6; mad.lo.u32 %v, %v, 10, %r7; mad.lo.u32 %v, %v, 10, %r8;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    got = result(backend, body, 32, 8, 4)
    want = []
    for cta in range(8):
        rank = cta % 4
        before, after = (rank + 3) % 4, (rank + 1) % 4
        want += [(((before * 100 + before + 10) * 1000 + 100 + before) * 10 + after) * 10 + rank] * 32
    assert got == want


FAULTS: list[tuple[str, str, str]] = [
    ("count of zero", "mov.u32 %r1, 0; @%p0 mbarrier.init.shared::cta.b64 [b], %r1; bar.sync 0;", r"\[barrier\] mbarrier count 0"),
    ("misaligned", "mov.u32 %r1, b; @%p0 mbarrier.init.shared::cta.b64 [%r1+4], 1; bar.sync 0;", r"\[align\]"),
    ("beyond shared memory", "mov.u32 %r1, b; @%p0 mbarrier.init.shared::cta.b64 [%r1+4096], 1; bar.sync 0;", r"\[bounds\]"),
    ("after inval", INIT.format(count=1) + "@%p0 mbarrier.inval.shared::cta.b64 [b]; bar.sync 0; mbarrier.arrive.shared::cta.b64 _, [b];",
     r"\[barrier\] no mbarrier was initialised"),
    ("inval while others use it", INIT.format(count=1) + "mbarrier.test_wait.parity.shared::cta.b64 %done, [b], 1; setp.eq.u32 %p1, %thread, 63; @%p1 mbarrier.inval.shared::cta.b64 [b];",
     r"\[(race|barrier)\]"),
    ("twice initialised", INIT.format(count=1) + INIT.format(count=1), r"\[barrier\] .* is initialised while it lives"),
    ("more arrivals than the count", INIT.format(count=32) + "mbarrier.arrive.shared::cta.b64 _, [b]; bar.sync 0;", r"\[barrier\] (too many arrivals|phase 1 completes although nobody)"),
    ("too few arrivals", INIT.format(count=65) + f"mbarrier.arrive.shared::cta.b64 _, [b];\n{wait('b', '0', 'W')}", r"\[barrier\] deadlock.*b\) of CTA \(0,0,0\): phase 0 has 64 of 65 arrivals"),
    ("a phase nobody waits for", INIT.format(count=64) + "mbarrier.arrive.shared::cta.b64 _, [b]; bar.sync 0; mbarrier.arrive.shared::cta.b64 _, [b]; bar.sync 0;",
     r"\[barrier\] phase 1 completes although nobody has waited for the one before"),
    ("waits two phases back", INIT.format(count=64) + f"mbarrier.arrive.shared::cta.b64 %state, [b];\n{wait('b', '0', 'W')}mbarrier.arrive.shared::cta.b64 _, [b];\n{wait('b', '1', 'V')}"
     "bar.sync 0; mbarrier.test_wait.shared::cta.b64 %done, [b], %state;", r"\[barrier\] waits for a phase that is not the present or the one before"),
    ("bytes without end", INIT.format(count=1) + "@%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [b], 1048576; bar.sync 0;", r"\[barrier\] the bytes of a phase exceed"),
    ("data read before the wait", INIT.format(count=64) + ".shared .align 256 .b32 box[64];\nshl.b32 %r1, %thread, 2; mov.u32 %r2, box; add.u32 %r1, %r1, %r2; st.shared.u32 [%r1], %thread;\n"
     "mbarrier.arrive.shared::cta.b64 _, [b]; xor.b32 %r1, %r1, 128; ld.shared.u32 %v, [%r1];", r"\[(race|uninit)\]"),
    ("relaxed arrival orders nothing", INIT.format(count=64) + ".shared .align 256 .b32 box[64];\nshl.b32 %r1, %thread, 2; mov.u32 %r2, box; add.u32 %r1, %r1, %r2; st.shared.u32 [%r1], %thread;\n"
     f"mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [b];\n{wait('b', '0', 'W')}xor.b32 %r1, %r1, 128; ld.shared.u32 %v, [%r1];", r"\[race\] reads shared"),
]  # fmt: skip


@pytest.mark.parametrize("schedule", ["lowest_pc", ("random", 1), ("random", 2)], ids=str)
@pytest.mark.parametrize(("body", "report"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_misuse_is_diagnosed(body: str, report: str, schedule: Any) -> None:
    with pytest.raises(EmulatorFault, match=report) as caught:
        result(EmulatedBackend("sm_90a", "all", schedule), body)
    assert "PTX line" in str(caught.value)


def test_a_lost_wake_up_is_named() -> None:
    """Warp 1 completes two phases while warp 0 waits for the first: the parity it waits for is that of an open phase again."""
    body = INIT.format(count=1) + f"""setp.lt.u32 %p1, %thread, 32; @%p1 bra SLEEP;
mov.u32 %r1, 0;
SPIN: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 2000; @%p2 bra SPIN;
setp.ne.u32 %p2, %thread, 32; @%p2 bra OUT;
mbarrier.arrive.shared::cta.b64 _, [b];
{wait('b', '0', 'V')}mbarrier.arrive.shared::cta.b64 _, [b]; bra OUT;
SLEEP: {wait('b', '0', 'W')}
OUT:"""
    with pytest.raises(EmulatorFault, match=r"\[barrier\] lost wake-up: two phases have completed since this thread began to wait") as caught:
        result(EmulatedBackend("sm_90a", "all"), body)
    assert "try_wait" in str(caught.value) and "thread (0,0,0)" in str(caught.value)


@pytest.mark.parametrize("schedule", ["lowest_pc", ("random", 1)], ids=str)
@pytest.mark.parametrize(("less", "more", "fits"), [(24, 240, True), (40, 232, True), (24, 248, False), (56, 256, False)])
def test_registers_move_between_warpgroups(less: int, more: int, fits: bool, schedule: Any) -> None:
    """What ran and what hung on an H100, with 384 threads."""
    body = f"""setp.ge.u32 %p1, %warp, 4; @%p1 bra MORE;
setmaxnreg.dec.sync.aligned.u32 {less}; bra JOIN;
MORE: setmaxnreg.inc.sync.aligned.u32 {more};
JOIN: mov.u32 %v, 1;"""
    backend = EmulatedBackend("sm_90a", "all", schedule)
    if fits:
        assert result(backend, body, 384) == [1] * 384
        return
    with pytest.raises(EmulatorFault, match=r"\[barrier\] deadlock.*setmaxnreg.inc.*hold \d+ registers of 65536"):
        result(backend, body, 384)


def test_a_thread_may_poll_two_barriers_in_turn(backend: Any) -> None:
    """The second completes first, and what completes the first comes after it: a poll may not wait for ever."""
    body = INIT.format(count=1) + """.shared .align 8 .b64 second; .reg .pred %one, %two; .reg .b32 %seen;
@%p0 mbarrier.init.shared::cta.b64 [second], 1;
bar.sync 0; mov.u32 %seen, 0;
setp.lt.u32 %p1, %thread, 32; @%p1 bra POLL;
mov.u32 %r1, 0;
SPIN: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 1500; @%p2 bra SPIN;
setp.eq.u32 %p2, %thread, 32; @%p2 mbarrier.arrive.shared::cta.b64 _, [second];
bra OUT;
POLL:
mbarrier.test_wait.parity.shared::cta.b64 %one, [b], 0; @%one bra FIRST;
mbarrier.test_wait.parity.shared::cta.b64 %two, [second], 0;
setp.eq.u32 %p3, %seen, 0; and.pred %two, %two, %p3; @!%two bra POLL;
mov.u32 %seen, 1; bar.warp.sync -1; @%p0 mbarrier.arrive.shared::cta.b64 _, [b]; bra POLL;
FIRST: add.u32 %v, %seen, 1;
OUT:"""
    assert result(backend, body) == [2] * 32 + [0] * 32


@pytest.mark.parametrize(("operation", "type_", "want"), [("add", "u32", 110), ("max", "s32", 100), ("or", "b32", 103), ("inc", "u32", 104)])
def test_reductions_into_another_ctas_memory(backend: Any, operation: str, type_: str, want: int) -> None:
    """Each rank r brings r + 1 (inc: a bound of 1000) to a word of rank 0 that begins as 100; 16 bytes complete the phase."""
    body = f""".shared .b32 box; .reg .b32 %rank, %to, %bar, %x;
mov.u32 %rank, %cluster_ctarank;
@%p0 mbarrier.init.shared::cta.b64 [b], 1; @%p0 st.shared.u32 [box], 100;
@%p0 fence.mbarrier_init.release.cluster;
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [b], 16;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mov.u32 %to, box; mapa.shared::cluster.u32 %to, %to, 0; mov.u32 %bar, b; mapa.shared::cluster.u32 %bar, %bar, 0;
add.u32 %x, %rank, 1; {'mov.u32 %x, 1000;' if operation == 'inc' else ''}
@%p0 red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{operation}.{type_} [%to], %x, [%bar];
setp.ne.u32 %p1, %rank, 0; @%p1 bra JOIN;
{wait('b', '0', 'W')}
ld.shared.u32 %v, [box];
JOIN: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    assert result(backend, body, 32, 4, 4) == [want] * 32 + [0] * 96
