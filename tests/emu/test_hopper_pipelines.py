"""Pipelines of TMA, mbarriers, wgmma and clusters: no alarm while they are right, a diagnosis for each way of breaking them."""

# ruff: noqa: E501 (lines of PTX)

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from oxidnn.codegen.spec import TensorMapSpec
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from tests.emu.hopper import GPU, Kernel, Map, run, wait
from tests.emu.mutation import SCHEDULES, Mutant, mutants


@dataclass
class Case:
    kernel: Kernel
    grid: int
    arguments: Callable[[np.random.Generator], tuple[list[Any], np.ndarray, np.ndarray]]  # (arguments, output, expected)

    def run(self, backend: Any, text: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        args, out, want = self.arguments(np.random.default_rng(7))
        return run(backend, self.kernel, self.grid, args, [out], text)[0], want


# 4 consumer warps add up tiles of 2 KB that one thread of warp 4 brings through a ring of 3 stages; out[thread] of the sums of 4 columns
def _bulk_ring() -> Case:
    body = f"""
.shared .align 8 .b64 full[3]; .shared .align 8 .b64 empty[3]; .reg .b32 %s, %ph, %i, %fb, %eb, %st; .reg .f32 %f<4>, %a<4>;
setp.ne.u32 %p0, %thread, 0; @%p0 bra READY;
mov.u32 %r1, full; mov.u32 %r2, empty;
mbarrier.init.shared::cta.b64 [%r1], 1; mbarrier.init.shared::cta.b64 [%r1+8], 1; mbarrier.init.shared::cta.b64 [%r1+16], 1;
mbarrier.init.shared::cta.b64 [%r2], 4; mbarrier.init.shared::cta.b64 [%r2+8], 4; mbarrier.init.shared::cta.b64 [%r2+16], 4;
fence.mbarrier_init.release.cluster;
READY: bar.sync 0; // barriers
mov.u32 %s, 0; mov.u32 %ph, 0; mov.u32 %i, 0;
setp.lt.u32 %p1, %warp, 4; @%p1 bra CONSUMER;
elect.sync _|%leader, -1; @!%leader bra END;
PRODUCE: setp.ge.u32 %p2, %i, %tiles; @%p2 bra END;
mov.u32 %fb, full; mad.lo.u32 %fb, %s, 8, %fb; mov.u32 %eb, empty; mad.lo.u32 %eb, %s, 8, %eb; mad.lo.u32 %st, %s, 2048, %smem;
xor.b32 %r3, %ph, 1;
{wait('%eb', '%r3', 'WE')}
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%fb], 2048;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%st], [%x], 2048, [%fb];
add.u64 %x, %x, 2048; add.u32 %i, %i, 1; add.u32 %s, %s, 1; setp.eq.u32 %p3, %s, 3; @%p3 mov.u32 %s, 0; @%p3 xor.b32 %ph, %ph, 1; // producer
bra PRODUCE;
CONSUMER:
{' '.join(f'mov.f32 %a{i}, 0f00000000;' for i in range(4))}
CONSUME: setp.ge.u32 %p2, %i, %tiles; @%p2 bra STORE;
mov.u32 %fb, full; mad.lo.u32 %fb, %s, 8, %fb; mov.u32 %eb, empty; mad.lo.u32 %eb, %s, 8, %eb; mad.lo.u32 %st, %s, 2048, %smem;
{wait('%fb', '%ph', 'WF')}
mad.lo.u32 %r4, %thread, 16, %st; ld.shared.v4.f32 {{%f0, %f1, %f2, %f3}}, [%r4];
{' '.join(f'add.f32 %a{i}, %a{i}, %f{i};' for i in range(4))}
bar.warp.sync -1; setp.eq.u32 %p4, %lane, 0;
@%p4 mbarrier.arrive.shared::cta.b64 _, [%eb];
add.u32 %i, %i, 1; add.u32 %s, %s, 1; setp.eq.u32 %p3, %s, 3; @%p3 mov.u32 %s, 0; @%p3 xor.b32 %ph, %ph, 1; // consumer
bra CONSUME;
STORE: mul.wide.u32 %rd0, %thread, 16; add.u64 %rd0, %out, %rd0; st.global.v4.f32 [%rd0], {{%a0, %a1, %a2, %a3}};
END: ret;"""

    def arguments(rng: np.random.Generator) -> tuple[list[Any], np.ndarray, np.ndarray]:
        x = rng.integers(0, 99, (11, 512)).astype(np.float32)
        out = np.zeros(512, np.float32)
        return [x, out, 11], out, x.sum(0)

    return Case(Kernel("bulk_ring", ("x:u64", "out:u64", "tiles:u32"), body, threads=160, smem=3 * 2048), 1, arguments)


# D (64, 64) f32 = A (64, K) B (64, K)^T, bf16, a ring of 3 stages of 64 k; the tile leaves through shared memory by tensor stores of 32 columns
def _matmul() -> Case:
    acc = ", ".join(f"%d{i}" for i in range(32))
    products = "\n".join(
        f"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{acc}}}, %rd2, %rd3, %p{5 if k == 0 else 6}, 1, 1, 0, 0; add.s64 %rd2, %rd2, 2; add.s64 %rd3, %rd3, 2; // k {k}"
        for k in range(4))
    stores = "\n".join(f"st.shared.v2.f32 [%r5+{32 * (j % 4) + 8192 * (j // 4) + 1024 * h}], {{%d{4 * j + 2 * h}, %d{4 * j + 2 * h + 1}}};" for j in range(8) for h in range(2))
    body = f"""
.reg .b32 %s, %full, %empty, %ph, %i, %fb, %eb, %st, %prev, %k; .reg .f32 %d<32>;
add.u32 %full, %smem, 65536; add.u32 %empty, %smem, 65560;
setp.ne.u32 %p0, %thread, 0; @%p0 bra READY;
mov.u32 %r1, %full; mov.u32 %r2, %empty;
mbarrier.init.shared::cta.b64 [%r1], 1; mbarrier.init.shared::cta.b64 [%r1+8], 1; mbarrier.init.shared::cta.b64 [%r1+16], 1;
mbarrier.init.shared::cta.b64 [%r2], 1; mbarrier.init.shared::cta.b64 [%r2+8], 1; mbarrier.init.shared::cta.b64 [%r2+16], 1;
fence.mbarrier_init.release.cluster;
READY: bar.sync 0; // barriers
mov.u32 %s, 0; mov.u32 %ph, 0; mov.u32 %i, 0;
setp.lt.u32 %p1, %warp, 4; @%p1 bra CONSUMER;
setmaxnreg.dec.sync.aligned.u32 40;
setp.ne.u32 %p1, %warp, 4; @%p1 bra END;
elect.sync _|%leader, -1; @!%leader bra END;
mov.u32 %k, 0;
PRODUCE: setp.ge.u32 %p2, %i, %tiles; @%p2 bra END;
mad.lo.u32 %fb, %s, 8, %full; mad.lo.u32 %eb, %s, 8, %empty; mad.lo.u32 %st, %s, 16384, %smem;
xor.b32 %r3, %ph, 1;
{wait('%eb', '%r3', 'WE')}
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%fb], 16384;
add.u32 %r4, %st, 8192;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%st], [%a, {{%k, 0}}], [%fb];
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r4], [%b, {{%k, 0}}], [%fb];
add.u32 %k, %k, 64; add.u32 %i, %i, 1; add.u32 %s, %s, 1; setp.eq.u32 %p3, %s, 3; @%p3 mov.u32 %s, 0; @%p3 xor.b32 %ph, %ph, 1; // producer
bra PRODUCE;
CONSUMER:
setmaxnreg.inc.sync.aligned.u32 232;
setp.eq.u32 %p6, 0, 0; setp.eq.u32 %p7, %thread, 0; mov.u32 %prev, 0;
CONSUME: setp.ge.u32 %p2, %i, %tiles; @%p2 bra STORE;
mad.lo.u32 %fb, %s, 8, %full; mad.lo.u32 %eb, %s, 8, %empty; mad.lo.u32 %st, %s, 16384, %smem;
{wait('%fb', '%ph', 'WF')}
and.b32 %r4, %st, 0x3FFFF; shr.u32 %r4, %r4, 4; cvt.u64.u32 %rd2, %r4; or.b64 %rd2, %rd2, 0x4000004000010000; add.s64 %rd3, %rd2, 512;
setp.ne.u32 %p5, %i, 0;
wgmma.fence.sync.aligned;
{products}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 1; // the one before
setp.ne.and.u32 %p4, %i, 0, %p7;
@%p4 mbarrier.arrive.shared::cta.b64 _, [%prev];
mov.u32 %prev, %eb;
add.u32 %i, %i, 1; add.u32 %s, %s, 1; setp.eq.u32 %p3, %s, 3; @%p3 mov.u32 %s, 0; @%p3 xor.b32 %ph, %ph, 1; // consumer
bra CONSUME;
STORE:
wgmma.wait_group.sync.aligned 0; // all
shr.u32 %r4, %lane, 2; mad.lo.u32 %r4, %warp, 16, %r4; shl.b32 %r4, %r4, 7; and.b32 %r5, %lane, 3; mad.lo.u32 %r5, %r5, 8, %r4; add.u32 %r5, %r5, %smem; add.u32 %r5, %r5, 49152;
{stores}
fence.proxy.async.shared::cta; // tile
bar.sync 1, 128;
@!%p7 bra END;
add.u32 %r6, %smem, 49152; add.u32 %r7, %smem, 57344;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d, {{0, 0}}], [%r6];
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d, {{32, 0}}], [%r7];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
END: ret;"""

    def arguments(rng: np.random.Generator) -> tuple[list[Any], np.ndarray, np.ndarray]:
        K = 448
        a, b = (rng.integers(-3, 4, (64, K)).astype(ml_dtypes.bfloat16) for _ in range(2))
        out = np.zeros((64, 64), np.float32)
        operand = TensorMapSpec("bf16", (K, 64), (2 * K,), (64, 64), swizzle=128)
        result = TensorMapSpec("f32", (64, 64), (256,), (32, 64))
        return [Map(operand, a), Map(operand, b), Map(result, out), K // 64], out, a.astype(np.float64) @ b.astype(np.float64).T

    return Case(Kernel("matmul", ("a:tensor_map", "b:tensor_map", "d:tensor_map", "tiles:u32"), body, threads=256, smem=49152 + 16384 + 48), 1, arguments)


# each CTA of a cluster of 4 sums its row of 128; the sums meet in the shared memory of rank 0, by st.async, and go to out[cluster]
def _cluster_sum() -> Case:
    body = f"""
.shared .align 16 .b32 parts[4]; .shared .align 8 .b64 arrived; .reg .b32 %rank, %v, %u, %to, %bar;
mov.u32 %rank, %cluster_ctarank;
setp.ne.u32 %p0, %thread, 0; @%p0 bra READY;
mbarrier.init.shared::cta.b64 [arrived], 1;
fence.mbarrier_init.release.cluster;
READY:
barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned; // start
mov.u32 %r1, %ctaid.x; mad.lo.u32 %r1, %r1, 32, %thread; mul.wide.u32 %rd0, %r1, 4; add.u64 %rd0, %x, %rd0; ld.global.u32 %v, [%rd0];
{' '.join(f'shfl.sync.bfly.b32 %u, %v, {d}, 31, -1; add.u32 %v, %v, %u;' for d in (16, 8, 4, 2, 1))}
setp.ne.u32 %p1, %rank, 0; @%p0 bra DONE;
@%p1 bra SEND;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [arrived], 16;
SEND:
mov.u32 %to, parts; mad.lo.u32 %to, %rank, 4, %to; mov.u32 %bar, arrived;
mapa.shared::cluster.u32 %to, %to, 0; mapa.shared::cluster.u32 %bar, %bar, 0;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%to], %v, [%bar];
@%p1 bra DONE;
mov.u32 %bar, arrived;
{wait('%bar', '0', 'WF')}
ld.shared.v4.u32 {{%r1, %r2, %r3, %r4}}, [parts];
add.u32 %r1, %r1, %r2; add.u32 %r3, %r3, %r4; add.u32 %r1, %r1, %r3;
mov.u32 %r5, %clusterid.x; mul.wide.u32 %rd1, %r5, 4; add.u64 %rd1, %out, %rd1; st.global.u32 [%rd1], %r1;
DONE:
barrier.cluster.arrive; barrier.cluster.wait; // end
ret;"""

    def arguments(rng: np.random.Generator) -> tuple[list[Any], np.ndarray, np.ndarray]:
        x = rng.integers(0, 1000, (3, 4, 32)).astype(np.uint32)
        out = np.zeros(3, np.uint32)
        return [x, out], out, x.sum((1, 2)).astype(np.uint32)

    return Case(Kernel("cluster_sum", ("x:u64", "out:u64"), body, threads=32, cluster=4), 12, arguments)


# two CTAs share every tile of 2 KB: each brings half of it to both, through a ring of 2; each thread sums a column of its own and its peer's half
def _multicast() -> Case:
    body = f"""
.shared .align 8 .b64 full[2]; .shared .align 8 .b64 empty[2]; .reg .b32 %s, %ph, %i, %fb, %eb, %st, %rank, %peer, %remote; .reg .f32 %f0, %f1, %a0, %a1; .reg .b16 %mask;
mov.u32 %rank, %cluster_ctarank; xor.b32 %peer, %rank, 1; mov.u16 %mask, 3;
setp.ne.u32 %p0, %thread, 0; @%p0 bra READY;
mov.u32 %r1, full; mov.u32 %r2, empty;
mbarrier.init.shared::cta.b64 [%r1], 1; mbarrier.init.shared::cta.b64 [%r1+8], 1;
mbarrier.init.shared::cta.b64 [%r2], 4; mbarrier.init.shared::cta.b64 [%r2+8], 4;
fence.mbarrier_init.release.cluster;
READY:
barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned; // start
mov.u32 %s, 0; mov.u32 %ph, 0; mov.u32 %i, 0;
setp.lt.u32 %p1, %warp, 2; @%p1 bra CONSUMER;
elect.sync _|%leader, -1; @!%leader bra END;
PRODUCE: setp.ge.u32 %p2, %i, %tiles; @%p2 bra END;
mov.u32 %fb, full; mad.lo.u32 %fb, %s, 8, %fb; mov.u32 %eb, empty; mad.lo.u32 %eb, %s, 8, %eb;
mad.lo.u32 %st, %s, 2048, %smem; mad.lo.u32 %st, %rank, 1024, %st; mul.wide.u32 %rd0, %rank, 1024; add.u64 %rd0, %x, %rd0;
xor.b32 %r3, %ph, 1;
{wait('%eb', '%r3', 'WE')}
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%fb], 2048;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%st], [%rd0], 1024, [%fb], %mask;
add.u64 %x, %x, 2048; add.u32 %i, %i, 1; add.u32 %s, %s, 1; setp.eq.u32 %p3, %s, 2; @%p3 mov.u32 %s, 0; @%p3 xor.b32 %ph, %ph, 1; // producer
bra PRODUCE;
CONSUMER: mov.f32 %a0, 0f00000000; mov.f32 %a1, 0f00000000;
CONSUME: setp.ge.u32 %p2, %i, %tiles; @%p2 bra STORE;
mov.u32 %fb, full; mad.lo.u32 %fb, %s, 8, %fb; mov.u32 %eb, empty; mad.lo.u32 %eb, %s, 8, %eb; mad.lo.u32 %st, %s, 2048, %smem;
{wait('%fb', '%ph', 'WF')}
mad.lo.u32 %r4, %thread, 4, %st; ld.shared.f32 %f0, [%r4]; ld.shared.f32 %f1, [%r4+1024]; add.f32 %a0, %a0, %f0; add.f32 %a1, %a1, %f1;
bar.warp.sync -1; setp.eq.u32 %p4, %lane, 0; mapa.shared::cluster.u32 %remote, %eb, %peer;
@%p4 mbarrier.arrive.shared::cta.b64 _, [%eb];
@%p4 mbarrier.arrive.shared::cluster.b64 _, [%remote];
add.u32 %i, %i, 1; add.u32 %s, %s, 1; setp.eq.u32 %p3, %s, 2; @%p3 mov.u32 %s, 0; @%p3 xor.b32 %ph, %ph, 1; // consumer
bra CONSUME;
STORE: mov.u32 %r5, %ctaid.x; mad.lo.u32 %r5, %r5, 64, %thread; mul.wide.u32 %rd1, %r5, 8; add.u64 %rd1, %out, %rd1; st.global.v2.f32 [%rd1], {{%a0, %a1}};
END:
barrier.cluster.arrive; barrier.cluster.wait; // end
ret;"""

    def arguments(rng: np.random.Generator) -> tuple[list[Any], np.ndarray, np.ndarray]:
        x = rng.integers(0, 99, (7, 2, 256)).astype(np.float32)
        out = np.zeros((2, 64, 2), np.float32)
        return [x, out, 7], out, np.broadcast_to(x.sum(0)[:, :64].T, (2, 64, 2))

    return Case(Kernel("multicast", ("x:u64", "out:u64", "tiles:u32"), body, threads=96, smem=2 * 2048, cluster=2), 2, arguments)


CASES = {"ring": _bulk_ring(), "matmul": _matmul(), "cluster sum": _cluster_sum(), "multicast": _multicast()}


@pytest.mark.parametrize("schedule", [*SCHEDULES, *(("random", seed) for seed in range(3, 12)), GPU], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_correct_pipelines_raise_no_alarm(name: str, schedule: Any, request: pytest.FixtureRequest) -> None:
    backend = request.getfixturevalue("cuda") if schedule == "cuda" else EmulatedBackend("sm_90a", "all", schedule)
    got, want = CASES[name].run(backend)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", CASES)
def test_the_assembler_takes_them(name: str) -> None:
    assembled = assemble(CASES[name].kernel.text, "sm_90a")
    serialised = re.findall(r"C75(?!04)\d\d|C7602", assembled.log)  # C7504: setmaxnreg and separate compilation
    assert assembled.spill_bytes == 0 and not serialised


BARRIERS = "READY: bar.sync 0; // barriers"
START = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned; // start"
# pipeline, what is broken, text, its replacement, what the report must say
MUTANTS = mutants([
    ("ring", "barriers not fenced", "fence.mbarrier_init.release.cluster;", "", r"\[race\] signals the mbarrier .* without a fence.mbarrier_init"),
    ("ring", "no barrier after the init", BARRIERS, "READY:", r"\[(barrier|race)\] (no mbarrier was initialised|.*mbarrier.init)"),
    ("ring", "barrier never initialised", "mbarrier.init.shared::cta.b64 [%r1+16], 1;", "", r"\[barrier\] no mbarrier was initialised at shared address"),
    ("ring", "empty count too large", "[%r2+8], 4;", "[%r2+8], 5;", r"\[barrier\] deadlock.*has 4 of 5 arrivals"),
    ("ring", "empty count too small", "[%r2], 4;", "[%r2], 3;", r"\[(barrier|race)\] (phase \d+ completes although nobody|too many arrivals|copies|.* while the read by warp|deadlock)"),
    ("ring", "every lane arrives", "@%p4 mbarrier.arrive", "mbarrier.arrive", r"\[barrier\] too many arrivals: \d+ at once, \d+ are pending"),
    ("ring", "full count too large", "[%r1], 1;", "[%r1], 2;", r"\[barrier\] deadlock.*has 1 of 2 arrivals"),
    ("ring", "consumer does not release", "@%p4 mbarrier.arrive.shared::cta.b64 _, [%eb];", "", r"\[barrier\] deadlock.*has 0 of 4 arrivals"),
    ("ring", "releases the full barrier", "@%p4 mbarrier.arrive.shared::cta.b64 _, [%eb];", "@%p4 mbarrier.arrive.shared::cta.b64 _, [%fb];", r"\[(barrier|race)\]"),
    ("ring", "producer does not wait", "@!%done bra WE;", "", r"\[race\] writes shared .* while the (read|write) by"),
    ("ring", "producer waits for the same parity as consumers", "xor.b32 %r3, %ph, 1;", "mov.b32 %r3, %ph;", r"\[barrier\] deadlock.*has 0 of 4 arrivals"),
    ("ring", "consumer does not wait", "@!%done bra WF;", "", r"\[(uninit|race)\]"),
    ("ring", "consumer waits for the wrong phase", "[%fb], %ph;", "[%fb], %r3;", r"\[uninit\]|\[race\]|\[barrier\]"),
    ("ring", "producer's phase never flips", "@%p3 xor.b32 %ph, %ph, 1; // producer", "", r"\[race\] writes shared .* while the|deadlock"),
    ("ring", "consumer's phase never flips", "@%p3 xor.b32 %ph, %ph, 1; // consumer", "", r"\[(race|uninit|barrier)\]"),
    ("ring", "producer skips a stage", "setp.eq.u32 %p3, %s, 3; @%p3 mov.u32 %s, 0; @%p3 xor.b32 %ph, %ph, 1; // producer",
     "setp.eq.u32 %p3, %s, 2; @%p3 mov.u32 %s, 0; @%p3 xor.b32 %ph, %ph, 1; // producer", r"\[(barrier|race)\]"),
    ("ring", "expects too few bytes", "_, [%fb], 2048;", "_, [%fb], 1024;", r"\[barrier\] deadlock.*1024 bytes more than expected"),
    ("ring", "expects too many bytes", "_, [%fb], 2048;", "_, [%fb], 4096;", r"\[barrier\] deadlock.*lacks 2048 of the bytes expected"),
    ("ring", "arrives without expecting", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%fb], 2048;", "mbarrier.arrive.shared::cta.b64 _, [%fb];", r"\[(barrier|race|uninit)\]"),
    ("ring", "copies less than it expects", "[%st], [%x], 2048, [%fb]", "[%st], [%x], 1024, [%fb]", r"\[barrier\] deadlock.*lacks 1024"),
    ("ring", "size is no multiple of 16", "[%st], [%x], 2048, [%fb]", "[%st], [%x], 2040, [%fb]", r"\[align\] the size 2040"),
    ("ring", "source misaligned", "add.u64 %x, %x, 2048;", "add.u64 %x, %x, 2056;", r"\[align\] the source .* not a multiple of 16"),
    ("ring", "one tile too many", "PRODUCE: setp.ge.u32 %p2, %i, %tiles;", "PRODUCE: setp.gt.u32 %p2, %i, %tiles;", r"\[bounds\] 2048 bytes at .* past the end"),
    ("ring", "stage beyond shared memory", "mad.lo.u32 %st, %s, 2048, %smem;\nxor", "mad.lo.u32 %st, %s, 3072, %smem;\nxor", r"\[bounds\] the destination .* leaves the"),
    ("ring", "stages overlap", "mad.lo.u32 %st, %s, 2048, %smem;\nxor", "mad.lo.u32 %st, %s, 1024, %smem;\nxor", r"\[(race|uninit)\]"),
    ("ring", "signals another stage's barrier", "[%st], [%x], 2048, [%fb]", "[%st], [%x], 2048, [full]", r"\[barrier\] |\[uninit\]"),
    ("ring", "re-initialises a barrier in the loop", "mbarrier.arrive.expect_tx", "mbarrier.init.shared::cta.b64 [%fb], 1; mbarrier.arrive.expect_tx", r"\[(barrier|race)\]"),
    ("ring", "all lanes produce", "elect.sync _|%leader, -1; @!%leader bra END;", "", r"\[barrier\] too many arrivals: 32 at once, 1 are pending"),
    ("matmul", "no wgmma.fence", "wgmma.fence.sync.aligned;", "", r"\[async\] no wgmma.fence"),
    ("matmul", "no commit", "wgmma.commit_group.sync.aligned;", "", r"\[(async|race)\]"),
    ("matmul", "no last wait", "wgmma.wait_group.sync.aligned 0; // all", "", r"\[async\] register %d\d+ is read while a wgmma in flight"),
    ("matmul", "releases before the product is done", "wgmma.wait_group.sync.aligned 1; // the one before", "", r"\[race\] writes shared .* while the read by a wgmma of warpgroup 0"),
    ("matmul", "releases its own stage at once", "[%prev];\nmov.u32 %prev, %eb;", "[%eb];", r"\[(race|barrier)\]"),
    ("matmul", "consumer does not wait", "@!%done bra WF;", "", r"\[(uninit|race)\]"),
    ("matmul", "producer does not wait", "@!%done bra WE;", "", r"\[race\] writes shared .* while the (read|write) by a"),
    ("matmul", "expects one operand only", "_, [%fb], 16384;", "_, [%fb], 8192;", r"\[barrier\] deadlock|\[(uninit|race)\]"),
    ("matmul", "stage too small", "add.u32 %r4, %st, 8192;", "add.u32 %r4, %st, 4096;", r"\[race\] writes shared .* while the write by an asynchronous copy"),
    ("matmul", "tile misaligned", "add.u32 %r4, %st, 8192;", "add.u32 %r4, %st, 8200;", r"\[align\] the destination .* not a multiple of 128"),
    ("matmul", "no proxy fence before the store", "fence.proxy.async.shared::cta; // tile", "", r"\[race\] reads shared .* through the async proxy without a fence.proxy.async"),
    ("matmul", "no barrier before the store", "bar.sync 1, 128;", "", r"\[(race|uninit)\] "),
    ("matmul", "exits before the store has read", "cp.async.bulk.wait_group.read 0;", "", r"\[async\] exits while its bulk copies may still read"),
    ("matmul", "store never committed", "cp.async.bulk.commit_group;", "", r"\[async\] exits while its bulk copies may still read"),
    ("matmul", "store at a negative coordinate", "[%d, {0, 0}]", "[%d, {-8, 0}]", r"\[bounds\] a tensor store at the negative coordinates"),
    ("matmul", "overwrites what the store reads", "cp.async.bulk.commit_group;", "cp.async.bulk.commit_group; st.shared.b32 [%r6], %r6;", r"\[race\] writes shared .* while the read by a bulk copy of warp 0"),
    ("matmul", "no tensor map", "mov.u32 %k, 0;", "mov.u32 %k, 0; add.u64 %a, %a, 64;", r"\[bounds\] .* no tensor map"),
    ("matmul", "wrong rank", "tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%st], [%a, {%k, 0}]",
     "tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%st], [%a, {%k, 0, 0}]", r"\[bounds\] the tensor map has rank 2, the instruction 3"),
    ("matmul", "swizzle forgotten by the reader", "0x4000004000010000", "0x0000004000010000", "wrong"),
    ("matmul", "wrong stride in the descriptor", "0x4000004000010000", "0x4000002000010000", "wrong"),
    ("matmul", "k advance in the wrong unit", "add.s64 %rd2, %rd2, 2;", "add.s64 %rd2, %rd2, 32;", "wrong|async|uninit"),
    ("matmul", "first product adds", "setp.ne.u32 %p5, %i, 0;", "setp.eq.u32 %p5, 0, 0;", r"\[uninit\] accumulator %d\d+ is added to"),
    ("matmul", "accumulator touched in the loop", "mov.u32 %prev, %eb;", "mov.u32 %prev, %eb; add.f32 %d3, %d3, %d3;", r"\[(async|uninit)\] register %d3"),
    ("cluster sum", "no cluster barrier at the start", START, "", r"\[(barrier|race)\] "),
    ("cluster sum", "barrier not fenced", "fence.mbarrier_init.release.cluster;", "", r"\[race\]"),
    ("cluster sum", "bytes of one CTA missing", "_, [arrived], 16;", "_, [arrived], 12;", r"\[barrier\] |\[(race|uninit)\]"),
    ("cluster sum", "does not wait", "@!%done bra WF;", "", r"\[(uninit|race)\]"),
    ("cluster sum", "rank beyond the cluster", "mapa.shared::cluster.u32 %to, %to, 0;", "mapa.shared::cluster.u32 %to, %to, 4;", r"\[bounds\] address .* names rank 4 of a cluster of 4"),
    ("cluster sum", "writes its own shared memory", "mapa.shared::cluster.u32 %to, %to, 0;", "", r"\[(uninit|race)\]"),
    ("cluster sum", "arrives twice", "barrier.cluster.arrive; barrier.cluster.wait; // end", "barrier.cluster.arrive; barrier.cluster.arrive; barrier.cluster.wait;",
     r"\[barrier\] arrives at the cluster barrier again without a wait"),
    ("cluster sum", "waits without arriving", "barrier.cluster.arrive; barrier.cluster.wait; // end", "barrier.cluster.wait;", r"\[barrier\] waits at the cluster barrier without having arrived"),
    ("multicast", "no cluster barrier at the start", START, "", r"\[(barrier|race)\] "),
    ("multicast", "the peer is not released", "@%p4 mbarrier.arrive.shared::cluster.b64 _, [%remote];", "", r"\[barrier\] deadlock.*has 2 of 4 arrivals"),
    ("multicast", "releases count for itself alone", "mbarrier.init.shared::cta.b64 [%r2], 4; mbarrier.init.shared::cta.b64 [%r2+8], 4;",
     "mbarrier.init.shared::cta.b64 [%r2], 2; mbarrier.init.shared::cta.b64 [%r2+8], 2;", r"\[(barrier|race)\]"),
    ("multicast", "expects its own half", "_, [%fb], 2048;", "_, [%fb], 1024;", r"\[(barrier|race|uninit)\]"),
    ("multicast", "copies for itself", "mov.u16 %mask, 3;", "mov.u16 %mask, 1;", r"\[barrier\] (deadlock|.*bytes)|\[uninit\]|\[race\]"),
    ("multicast", "names a CTA that is not there", "mov.u16 %mask, 3;", "mov.u16 %mask, 7;", r"\[bounds\] multicast mask 0x7"),
    ("multicast", "no cluster barrier at the end", "barrier.cluster.arrive; barrier.cluster.wait; // end", "", r"\[bounds\] .*has exited|\[race\] CTA .* exits although its shared memory may still be used"),
    ("multicast", "producer does not wait", "@!%done bra WE;", "", r"\[race\] writes shared .* while the (read|write) by"),
])  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants_are_diagnosed(mutant: Mutant, schedule: Any) -> None:
    case = CASES[mutant.kernel]
    mutant.diagnose(lambda: case.run(EmulatedBackend("sm_90a", "all", schedule), mutant.text(case.kernel.text)))
