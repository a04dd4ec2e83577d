"""Hazards of memory that results rarely show: order within a CTA, scopes of fences and atomics, the async proxy, lanes of one warp."""

# ruff: noqa: E501 (lines of PTX)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from oxidnn.runtime.emu_backend import EmulatedBackend
from tests.emu.hopper import Kernel, product, registers_a, run, swizzled, wait
from tests.emu.mutation import SCHEDULES, Mutant, mutants


@dataclass
class Case:
    kernel: Kernel
    grid: int
    arguments: Callable[[np.random.Generator], tuple[list[Any], np.ndarray, np.ndarray]]  # (arguments, output, expected)

    def run(self, schedule: Any, text: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        args, out, want = self.arguments(np.random.default_rng(7))
        return run(EmulatedBackend("sm_90a", "all", schedule), self.kernel, self.grid, args, [out], text)[0], want


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 1 << 20, shape).astype(np.uint32)


# %x and %tmp point to the CTA's 128 words, %mine and %theirs to this thread's and to another warp's word of %tmp
ADDRESSES = """.reg .b64 %mine, %theirs, %word; .reg .b32 %v, %w, %k, %peer;
mov.u32 %r1, %ctaid.x; mad.lo.u32 %r1, %r1, 128, %thread; mul.wide.u32 %word, %r1, 4; add.u64 %x, %x, %word; add.u64 %out, %out, %word;
add.u64 %mine, %tmp, %word; xor.b32 %peer, %r1, 32; mul.wide.u32 %word, %peer, 4; add.u64 %theirs, %tmp, %word; ld.global.u32 %v, [%x];
"""


def exchange(name: str, body: str, want: Callable[[np.ndarray], np.ndarray], grid: int = 3, tmp: int = 384) -> Case:
    def arguments(rng: np.random.Generator) -> tuple[list[Any], np.ndarray, np.ndarray]:
        x, out = words(rng, grid, 128), np.zeros((grid, 128), np.uint32)
        return [x, np.zeros(tmp, np.uint32), out], out, want(x)
    return Case(Kernel(name, ("x:u64", "tmp:u64", "out:u64"), ADDRESSES + body + "\nst.global.u32 [%out], %w;\nEND: ret;"), grid, arguments)


def peers(x: np.ndarray) -> np.ndarray:
    return x[:, np.arange(128) ^ 32]


# two rounds through a scratch array in global memory
SCRATCH = exchange("scratch", """mov.u32 %k, 0; mov.u32 %w, 0;
ROUND: add.u32 %r2, %v, %k; st.global.u32 [%mine], %r2;
bar.sync 0; // written
ld.global.u32 %r3, [%theirs]; add.u32 %w, %w, %r3;
bar.sync 0; // read
add.u32 %k, %k, 1; setp.lt.u32 %p0, %k, 2; @%p0 bra ROUND;""", lambda x: 2 * peers(x) + 1)

# warp 0 hands a word to warp 1 by a flag, both in global memory; the other warps do nothing
FLAG = exchange("flag", """.reg .b64 %flag; add.u64 %flag, %tmp, 1536; mov.u32 %w, 0; setp.eq.u32 %p0, %lane, 0;
setp.gt.u32 %p1, %warp, 1; @%p1 bra STORE; setp.eq.u32 %p2, %warp, 1; @%p2 bra TAKE;
st.global.u32 [%mine], %v;
bar.warp.sync -1;
@%p0 st.release.cta.global.u32 [%flag], 1;
bra STORE;
TAKE: ld.acquire.cta.global.u32 %r2, [%flag]; setp.eq.u32 %p3, %r2, 0; @%p3 bra TAKE;
ld.global.u32 %w, [%theirs];
STORE:""", lambda x: np.where(np.arange(128) // 32 == 1, peers(x), 0), grid=1, tmp=385)

# CTAs add to one word, then count themselves; whoever is last takes the sum
COUNT = exchange("count", """.reg .b64 %sum; add.u64 %sum, %tmp, 1536; .shared .b32 last; setp.ne.u32 %p0, %thread, 0; mov.u32 %w, 0;
red.global.add.u32 [%sum], %v;
fence.acq_rel.gpu; // release
bar.sync 0; // added
@%p0 bra WAIT;
atom.global.add.u32 %r2, [%sum+4], 1; st.shared.u32 [last], %r2;
WAIT: bar.sync 0;
ld.shared.u32 %r2, [last]; setp.ne.u32 %p1, %r2, 2; @%p1 bra STORE;
fence.acq_rel.gpu; // acquire
ld.global.u32 %r3, [%sum]; setp.eq.u32 %p2, %r2, 2; @!%p0 st.global.u32 [%sum+8], %r3;
STORE:""", lambda x: np.zeros_like(x), tmp=387)

# a tile goes through shared memory to global memory by a bulk copy, and is read again by all
BULK_OUT = exchange("bulk_out", """.shared .align 128 .b8 tile[512]; .reg .b64 %base; mov.u32 %r2, tile; mad.lo.u32 %r3, %thread, 4, %r2; st.shared.u32 [%r3], %v;
fence.proxy.async.shared::cta; // tile
bar.sync 0; // tile
setp.ne.u32 %p0, %thread, 0; @%p0 bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%mine], [%r2], 512;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE: bar.sync 0; // stored
ld.global.u32 %w, [%theirs];""", peers)

# words written to global memory come back by a bulk copy
BULK_IN = exchange("bulk_in", f""".shared .align 128 .b8 tile[512]; .shared .align 8 .b64 full; setp.ne.u32 %p0, %thread, 0; mov.u32 %r2, tile;
st.global.u32 [%mine], %v;
fence.proxy.async; // words
@%p0 bra READY; mbarrier.init.shared::cta.b64 [full], 1; fence.mbarrier_init.release.cluster;
READY: bar.sync 0; // words
@%p0 bra WAIT;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 512;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%mine], 512, [full];
{wait('full', '0', 'WAIT')}
xor.b32 %r3, %thread, 32; mad.lo.u32 %r3, %r3, 4, %r2; ld.shared.u32 %w, [%r3];""", peers)

# even lanes store the sum of a pair, in global and in shared memory
PAIRS = exchange("pairs", """.shared .align 16 .b32 sums[64]; shfl.sync.bfly.b32 %r2, %v, 1, 31, -1; and.b32 %r3, %lane, 1; setp.eq.u32 %p0, %r3, 0; sub.u32 %r4, %v, %r2;
shr.u32 %r5, %thread, 1; mov.u32 %r6, %ctaid.x; mad.lo.u32 %r6, %r6, 128, %r5; mul.wide.u32 %word, %r6, 4; add.u64 %mine, %tmp, %word;
mov.u32 %r7, sums; mad.lo.u32 %r7, %r5, 4, %r7;
@%p0 st.global.u32 [%mine], %r4;
@%p0 st.shared.u32 [%r7], %r4;
bar.sync 0; ld.global.u32 %w, [%mine]; ld.shared.u32 %r8, [%r7]; sub.u32 %r8, %r8, %w; add.u32 %w, %w, %r8;""",
                 lambda x: np.repeat((x[:, 0::2] - x[:, 1::2]), 2, axis=1))

# each warp writes its 512 bytes and loads them as four matrices
MATRICES = exchange("matrices", """.shared .align 128 .b8 tile[2048]; mov.u32 %r2, tile; mad.lo.u32 %r3, %thread, 16, %r2; setp.ge.u32 %p0, %lane, 0;
@%p0 st.shared.v4.b32 [%r3], {%v, %v, %v, %v};
bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r3];
add.u32 %w, %r4, %r5; add.u32 %w, %w, %r6; add.u32 %w, %w, %r7;""",
                    lambda x: sum(x.reshape(-1, 4, 4, 8)[:, :, m][:, :, np.arange(32) // 4] for m in range(4)).reshape(-1, 128))

# lanes of a warp exchange words through shared and through global memory
LANES = exchange("lanes", """.shared .align 16 .b32 box[128]; xor.b32 %r2, %thread, 5; mov.u32 %r3, box; mad.lo.u32 %r4, %thread, 4, %r3; mad.lo.u32 %r2, %r2, 4, %r3;
st.shared.u32 [%r4], %v;
bar.warp.sync -1; // shared
ld.shared.u32 %w, [%r2]; st.global.u32 [%mine], %w; xor.b32 %r6, %r1, 9; mul.wide.u32 %word, %r6, 4; add.u64 %mine, %tmp, %word;
bar.warp.sync -1; // global
ld.global.u32 %r5, [%mine]; add.u32 %w, %w, %r5;""", lambda x: x[:, np.arange(128) ^ 5] + x[:, np.arange(128) ^ 12])

# halves of a warp take different ways, each with a shuffle of its own
HALVES = exchange("halves", """setp.lt.u32 %p0, %lane, 16; @%p0 bra LOW;
shfl.sync.bfly.b32 %w, %v, 1, 31, 0xFFFF0000; bra JOIN;
LOW: shfl.sync.bfly.b32 %w, %v, 2, 31, 0xFFFF;
JOIN: bar.warp.sync -1;""", lambda x: np.where(np.arange(128) % 32 < 16, x[:, np.arange(128) ^ 2], x[:, np.arange(128) ^ 1]))


def _product() -> Case:
    """One wgmma of operands that threads write to shared memory, 128-byte swizzle."""
    def arguments(rng: np.random.Generator) -> tuple[list[Any], np.ndarray, np.ndarray]:
        a, b = (rng.integers(-3, 4, (64, 16)).astype(ml_dtypes.bfloat16) for _ in range(2))
        out = np.zeros((32, 128), np.uint32)
        images = [swizzled(x, 128) for x in (a, b)]
        descriptor = 1 << 62 | 64 << 32 | 1 << 16
        d = a.astype(np.float32) @ b.astype(np.float32).T
        i, t = np.meshgrid(np.arange(32), np.arange(128), indexing="ij")
        want = d[16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2]
        return [*images, out, descriptor, descriptor], out, np.ascontiguousarray(want).view(np.uint32)
    return Case(product(64, 16, ("f32", "bf16", "bf16"), 8192, 8192, trans=", 0, 0"), 1, arguments)


def _register_product() -> Case:
    """The same with A from registers."""
    def arguments(rng: np.random.Generator) -> tuple[list[Any], np.ndarray, np.ndarray]:
        args, out, want = _product().arguments(rng)
        a = np.zeros((64, 16), ml_dtypes.bfloat16)
        r, c = np.meshgrid(np.arange(64), np.arange(2), indexing="ij")
        a.view(np.uint8).reshape(64, 2, 16)[r, c] = args[0].reshape(-1, 16)[(r * 8 + c) ^ (r % 8)]
        return [args[0], args[1], out, 0, args[4], registers_a(a)], out, want
    return Case(product(64, 16, ("f32", "bf16", "bf16"), 0, 8192, trans=", 0", registers_a=True), 1, arguments)


CASES = {"scratch": SCRATCH, "flag": FLAG, "count": COUNT, "bulk out": BULK_OUT, "bulk in": BULK_IN, "pairs": PAIRS, "matrices": MATRICES, "lanes": LANES, "halves": HALVES,
         "product": _product(), "register product": _register_product()}  # fmt: skip

MUTANTS = mutants([
    ("scratch", "no barrier after the write", "bar.sync 0; // written", "", r"\[race\] (reads .* while the write|writes .* while the read) by warp \d of CTA .* missing is a bar.sync"),
    ("scratch", "no barrier before the next write", "bar.sync 0; // read", "", r"\[race\] (writes .* while the read|reads .* while the write) by warp \d of CTA"),
    ("scratch", "a fence is no barrier", "bar.sync 0; // written", "fence.acq_rel.gpu;", r"\[race\]"),
    ("scratch", "a fence of the CTA is no barrier", "bar.sync 0; // read", "membar.cta;", r"\[race\]"),
    ("scratch", "a shuffle orders no memory", "bar.sync 0; // written", "shfl.sync.bfly.b32 %r4, %v, 1, 31, -1;", r"\[race\]"),
    ("scratch", "a vote orders no memory", "bar.sync 0; // written", "vote.sync.any.pred %p5, %p0, -1;".replace("%p0", "%p1").replace("vote", "setp.eq.u32 %p1, 0, 0; vote", 1), r"\[race\]"),
    ("scratch", "a barrier of half the CTA", "bar.sync 0; // written", "add.u32 %r5, %warp, 0; and.b32 %r5, %r5, 2; add.u32 %r5, %r5, 1; bar.sync %r5, 64; ld.global.u32 %r6, [%theirs+256]; xor.b32 %r7, %peer, 64;", r"\[(race|bounds|uninit)\]"),
    ("scratch", "a warp barrier", "bar.sync 0; // read", "bar.warp.sync -1;", r"\[race\]"),
    ("scratch", "reads its own writes as read-only memory", "ld.global.u32 %r3, [%theirs];", "ld.global.nc.u32 %r3, [%theirs];", r"\[race\] reads .* as read-only memory \(.nc\) though the kernel writes it at line"),
    ("flag", "the flag is stored without a release", "st.release.cta.global", "st.relaxed.cta.global", r"\[race\] reads .* while the write by warp 0 of CTA \(0,0,0\)"),
    ("flag", "the flag is loaded without an acquire", "ld.acquire.cta.global", "ld.relaxed.cta.global", r"\[race\] reads"),
    ("flag", "the flag is an ordinary word", "st.release.cta.global", "st.global", r"\[race\] reads"),
    ("flag", "the flag goes before the word", "st.global.u32 [%mine], %v;\nbar.warp.sync -1;\n@%p0 st.release.cta.global.u32 [%flag], 1;", "bar.warp.sync -1;\n@%p0 st.release.cta.global.u32 [%flag], 1;\nst.global.u32 [%mine], %v;", r"\[race\]"),
    ("count", "the sum is no atomic", "red.global.add.u32 [%sum], %v;", "ld.global.u32 %r3, [%sum]; add.u32 %r3, %r3, %v; st.global.u32 [%sum], %r3;", r"\[race\]"),
    ("count", "no fence before the count", "fence.acq_rel.gpu; // release", "", r"\[race\] reads .* while the write by .* \(red.global.add.u32 .* missing is a release"),
    ("count", "no fence after the count", "fence.acq_rel.gpu; // acquire", "", r"\[race\] reads .* while the write by .* an acquire"),
    ("count", "the fence covers the CTA alone", "fence.acq_rel.gpu; // release", "fence.acq_rel.cta;", r"\[race\] reads"),
    ("count", "the fence acquires from the CTA alone", "fence.acq_rel.gpu; // acquire", "fence.acq_rel.cta;", r"\[race\] reads"),
    ("count", "the count is of the CTA's scope", "atom.global.add.u32 %r2", "atom.relaxed.cta.global.add.u32 %r2", r"\[race\] updates .* while the write by warp 0 of CTA"),
    ("count", "the sum is of the CTA's scope", "red.global.add.u32 [%sum]", "red.relaxed.cta.global.add.u32 [%sum]", r"\[race\] updates"),
    ("count", "counts before the other warps have added", "bar.sync 0; // added", "", r"\[race\] reads .* while the write by warp [123] of CTA"),
    ("bulk out", "waits only until the tile is read", "cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;", r"\[race\] reads .* while the write by a bulk copy of warp 0 of CTA .* missing is a cp.async.bulk.wait_group"),
    ("bulk out", "waits for one group too few", "cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group 1;", r"\[(race|async)\]"),
    ("bulk out", "does not wait", "cp.async.bulk.wait_group 0;", "", r"\[(race|async)\]"),
    ("bulk out", "no barrier after the wait", "DONE: bar.sync 0; // stored", "DONE:", r"\[race\]|\[uninit\]"),
    ("bulk out", "tile not fenced", "fence.proxy.async.shared::cta; // tile", "", r"\[race\] reads shared .* through the async proxy without a fence.proxy.async"),
    ("bulk out", "fence of the wrong proxy", "fence.proxy.async.shared::cta; // tile", "fence.acq_rel.cta;", r"\[race\] reads shared .* through the async proxy"),
    ("bulk out", "tile not complete", "bar.sync 0; // tile", "", r"\[(race|uninit)\]"),
    ("bulk in", "words not fenced for the copy", "fence.proxy.async; // words", "", r"\[race\] reads .* through the async proxy without a fence.proxy.async after the write by warp"),
    ("bulk in", "words not yet written", "READY: bar.sync 0; // words", "READY:", r"\[(race|barrier)\]"),
    ("bulk in", "the barrier's init is predicated off", "@%p0 bra READY; mbarrier.init", "@!%p0 bra READY; mbarrier.init", r"\[(barrier|race)\]"),
    ("bulk in", "the init is for another thread's predicate", "mbarrier.init.shared::cta.b64 [full], 1;", "@%p0 mbarrier.init.shared::cta.b64 [full], 1;", r"\[barrier\] no mbarrier was initialised"),
    ("bulk in", "initialised twice", "mbarrier.init.shared::cta.b64 [full], 1;", "mbarrier.init.shared::cta.b64 [full], 1; mbarrier.init.shared::cta.b64 [full], 1;", r"\[barrier\] .* is initialised while it lives \(mbarrier.inval"),
    ("bulk in", "invalidated before the wait", "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%mine], 512, [full];", "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%mine], 512, [full]; mbarrier.inval.shared::cta.b64 [full];", r"\[(barrier|race)\]"),
    ("pairs", "both lanes store to global memory", "@%p0 st.global.u32 [%mine]", "st.global.u32 [%mine]", r"\[race\] lanes of one store write different values to 0x"),
    ("pairs", "both lanes store to shared memory", "@%p0 st.shared.u32 [%r7]", "st.shared.u32 [%r7]", r"\[race\] lanes of one store write different values to shared address .*of sums"),
    ("matrices", "half of the rows never written", "setp.ge.u32 %p0, %lane, 0;", "setp.ge.u32 %p0, %lane, 16;", r"\[uninit\] reads 16 bytes at shared address .*of tile\), never written"),
    ("matrices", "row beyond the tile", "[%r3];\nadd", "[%r3+1024];\nadd", r"\[(bounds|uninit|race)\]"),
    ("matrices", "row misaligned", "[%r3];\nadd", "[%r3+8];\nadd", r"\[align\]"),
    ("matrices", "no barrier of the warp", "bar.warp.sync -1;\n", "", r"\[race\] reads shared .* while the write by lane \d+ of the same warp at line .* missing is a bar.warp.sync"),
    ("lanes", "no barrier of the warp in shared memory", "bar.warp.sync -1; // shared", "", r"\[race\] reads shared .* while the write by lane \d+ of the same warp .* missing is a bar.warp.sync"),
    ("lanes", "no barrier of the warp in global memory", "bar.warp.sync -1; // global", "", r"\[race\] reads 0x.* while the write by lane \d+ of the same warp .* missing is a bar.warp.sync"),
    ("lanes", "a shuffle orders no memory", "bar.warp.sync -1; // shared", "shfl.sync.bfly.b32 %r8, %v, 1, 31, -1;", r"\[race\] reads shared .* while the write by lane \d+ of the same warp"),
    ("halves", "one half names the whole warp", "31, 0xFFFF;", "31, -1;", r"\[barrier\] (deadlock|waits for lanes)"),
    ("halves", "a lane that is not in its mask", "31, 0xFFFF;", "31, 0xFFFE;", r"\[barrier\] lane is not in its own member mask"),
    ("halves", "one half never comes", "JOIN: bar.warp.sync -1;", "JOIN: setp.lt.u32 %p1, %lane, 4; @%p1 bra END; bar.warp.sync -1;", r"\[barrier\] waits for lanes that have exited: 0, 1, 2, 3"),
    ("halves", "reads a lane of the other half", "bfly.b32 %w, %v, 2, 31, 0xFFFF;", "bfly.b32 %w, %v, 16, 31, 0xFFFF;", r"\[barrier\] reads the register of lane \d+, which does not take part"),
    ("product", "operands not fenced", "fence.proxy.async.shared::cta;", "", r"\[race\] reads shared .* through the async proxy without a fence.proxy.async"),
    ("product", "fenced after the barrier by one thread", "fence.proxy.async.shared::cta;\nbar.sync 0;", "bar.sync 0; setp.eq.u32 %p4, %thread, 0; @%p4 fence.proxy.async.shared::cta;", r"\[race\] reads shared .* through the async proxy"),
    ("product", "no barrier after the operands", "fence.proxy.async.shared::cta;\nbar.sync 0;", "fence.proxy.async.shared::cta;", r"\[race\] reads shared .* while the write by warp"),
    ("product", "result read in flight", "wgmma.wait_group.sync.aligned 0;", "", r"\[async\] register %d\d+ is read while a wgmma in flight"),
    ("product", "waits for one group too few", "wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;", r"\[async\] register %d\d+ is read"),
    ("product", "operands overwritten in flight", "wgmma.commit_group.sync.aligned;", "wgmma.commit_group.sync.aligned; mad.lo.u32 %r5, %thread, 4, %smem; st.shared.b32 [%r5], %r4;", r"\[race\] writes shared .* while the read by a wgmma of warpgroup 0"),
    ("register product", "A changed in flight", "wgmma.commit_group.sync.aligned;", "wgmma.commit_group.sync.aligned; mov.b32 %a1, 0;", r"\[async\] register %a1 is written while a wgmma in flight reads it as A"),
    ("register product", "A written after the fence", "wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; add.u32 %a2, %a2, 0;", r"\[async\] register %a2 was written after the last wgmma.fence"),
])  # fmt: skip


@pytest.mark.parametrize("schedule", [*SCHEDULES, *(("random", seed) for seed in range(3, 8))], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_correct_kernels_raise_no_alarm(name: str, schedule: Any) -> None:
    got, want = CASES[name].run(schedule)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants_are_diagnosed(mutant: Mutant, schedule: Any) -> None:
    case = CASES[mutant.kernel]
    mutant.diagnose(lambda: case.run(schedule, mutant.text(case.kernel.text)))
