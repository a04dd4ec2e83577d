"""Correct kernels raise no alarm under any schedule; each way of breaking them is diagnosed under every schedule."""

# ruff: noqa: E501 (lines of PTX)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from oxidnn.emu import GlobalMemory, load
from oxidnn.errors import EmulatorFault
from oxidnn.ptx.parser import parse
from tests.emu.mutation import SCHEDULES, Mutant, mutants
from tests.emu.running import HEADER, launch


@dataclass
class Kernel:
    text: str
    grid: int
    threads: int
    inputs: Callable[[np.random.Generator], list[np.ndarray]]
    reference: Callable[..., np.ndarray]
    result: tuple[int, type]
    scalars: list[int] = field(default_factory=list)

    def run(self, text: str, schedule: object) -> np.ndarray:
        program = load(parse(text))
        memory = GlobalMemory()
        arrays = self.inputs(np.random.default_rng(5))
        pointers = []
        for i, array in enumerate(arrays):
            pointer = memory.alloc(array.nbytes, program.entry.params[i].name)
            memory.view(pointer, array.nbytes)[:] = array.reshape(-1).view(np.uint8)
            memory.mark_initialised(pointer, array.nbytes)
            pointers.append(pointer)
        count, dtype = self.result
        size = count * np.dtype(dtype).itemsize
        out = memory.alloc(size, "out")
        program.launch(memory, self.grid, self.threads, [*pointers, out, *self.scalars], checkers="all", schedule=schedule, step_limit=100000)
        return memory.view(out, size).view(dtype)


SCALE = Kernel(
    f"""{HEADER}.visible .entry scale(.param .u64 x, .param .u64 out, .param .u32 n)
{{ .reg .b64 %x, %y, %w; .reg .b32 %i, %r<4>, %n; .reg .f32 %f<5>; .reg .pred %p;
ld.param.u64 %x, [x]; ld.param.u64 %y, [out]; ld.param.u32 %n, [n];
mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %i, %r0, %r1, %r2;
shl.b32 %i, %i, 2;
setp.ge.u32 %p, %i, %n;
@%p bra END;
mul.wide.u32 %w, %i, 4; add.u64 %x, %x, %w; add.u64 %y, %y, %w;
ld.global.v4.f32 {{%f0, %f1, %f2, %f3}}, [%x];
add.f32 %f4, %f0, %f1; mul.f32 %f1, %f1, %f4;
st.global.v4.f32 [%y], {{%f4, %f1, %f2, %f3}};
END: ret; }}""",
    3, 64, lambda rng: [rng.standard_normal(600).astype(np.float32)],
    lambda x: np.stack([x[0::4] + x[1::4], x[1::4] * (x[0::4] + x[1::4]), x[2::4], x[3::4]], 1).reshape(-1), (600, np.float32), [600],
)  # fmt: skip

MATMUL = Kernel(
    f"""{HEADER}.visible .entry matmul(.param .u64 a, .param .u64 b, .param .u64 out, .param .u32 n)
{{ .reg .pred %p<3>; .reg .b32 %r<24>; .reg .b64 %rd<8>; .reg .f32 %f<8>; .shared .align 16 .f32 sa[256]; .shared .align 16 .f32 sb[256];
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [out]; ld.param.u32 %r1, [n];
mov.u32 %r20, %tid.x; and.b32 %r2, %r20, 15; shr.u32 %r3, %r20, 4; mov.u32 %r4, %ctaid.x;
and.b32 %r5, %r4, 1; shr.u32 %r4, %r4, 1; mad.lo.u32 %r6, %r5, 16, %r3; mad.lo.u32 %r7, %r4, 16, %r2;
mov.u32 %r8, sa; mov.u32 %r9, sb; shl.b32 %r10, %r20, 2; add.u32 %r11, %r8, %r10; add.u32 %r12, %r9, %r10;
shl.b32 %r13, %r3, 6; add.u32 %r13, %r13, %r8; shl.b32 %r14, %r2, 2; add.u32 %r14, %r14, %r9;
mov.f32 %f1, 0f00000000; mov.u32 %r15, 0;
LOOP:
add.u32 %r16, %r15, %r2; mad.lo.u32 %r16, %r6, %r1, %r16; mul.wide.u32 %rd4, %r16, 4; add.u64 %rd4, %rd1, %rd4; ld.global.f32 %f2, [%rd4];
add.u32 %r17, %r15, %r3; mad.lo.u32 %r17, %r17, %r1, %r7; mul.wide.u32 %rd5, %r17, 4; add.u64 %rd5, %rd2, %rd5; ld.global.f32 %f3, [%rd5];
st.shared.f32 [%r11], %f2; st.shared.f32 [%r12], %f3;
bar.sync 0; // full
{chr(10).join(f"ld.shared.f32 %f4, [%r13+{4 * k}]; ld.shared.f32 %f5, [%r14+{64 * k}]; fma.rn.f32 %f1, %f4, %f5, %f1;" for k in range(16))}
bar.sync 0; // empty
add.u32 %r15, %r15, 16; setp.lt.u32 %p1, %r15, %r1; @%p1 bra LOOP;
mad.lo.u32 %r18, %r6, %r1, %r7; mul.wide.u32 %rd6, %r18, 4; add.u64 %rd6, %rd3, %rd6; st.global.f32 [%rd6], %f1; ret; }}""",
    4, 256, lambda rng: [rng.integers(-4, 5, (32, 32)).astype(np.float32) for _ in range(2)],
    lambda a, b: (a @ b).reshape(-1), (1024, np.float32), [32],
)  # fmt: skip

# a ring of three stages; each thread copies 16 bytes and reads its neighbour's from another warp
PIPELINE = Kernel(
    f"""{HEADER}.visible .entry pipeline(.param .u64 x, .param .u64 out, .param .u32 tiles)
{{ .reg .b64 %x, %y, %w; .reg .b32 %t, %ring, %dst, %src, %k, %next, %tiles, %o, %r<4>; .reg .f32 %f<4>, %s<4>; .reg .pred %p, %q;
.shared .align 16 .b8 ring[6144];
ld.param.u64 %x, [x]; ld.param.u64 %y, [out]; ld.param.u32 %tiles, [tiles]; mov.u32 %t, %tid.x;
mul.wide.u32 %w, %t, 16; add.u64 %x, %x, %w; add.u64 %y, %y, %w; mov.u32 %ring, ring;
mad.lo.u32 %dst, %t, 16, %ring; xor.b32 %r0, %t, 96; mad.lo.u32 %src, %r0, 16, %ring;
{chr(10).join(f"mov.f32 %s{i}, 0f00000000;" for i in range(4))}
cp.async.cg.shared.global [%dst], [%x], 16; cp.async.commit_group;
cp.async.cg.shared.global [%dst+2048], [%x+2048], 16; cp.async.commit_group;
add.u64 %x, %x, 4096; mov.u32 %k, 0; mov.u32 %next, 4096; mov.u32 %o, 0;
LOOP:
cp.async.wait_group 1;
bar.sync 0; // full
add.u32 %r1, %src, %o; ld.shared.v4.f32 {{%f0, %f1, %f2, %f3}}, [%r1];
{chr(10).join(f"add.f32 %s{i}, %s{i}, %f{i};" for i in range(4))}
add.u32 %r2, %k, 2; setp.lt.u32 %p, %r2, %tiles; add.u32 %r3, %dst, %next;
@%p cp.async.cg.shared.global [%r3], [%x], 16;
cp.async.commit_group; // in the loop
add.u64 %x, %x, 2048;
add.u32 %next, %next, 2048; setp.eq.u32 %q, %next, 6144; selp.b32 %next, 0, %next, %q;
add.u32 %o, %o, 2048; setp.eq.u32 %q, %o, 6144; selp.b32 %o, 0, %o, %q;
add.u32 %k, %k, 1; setp.lt.u32 %p, %k, %tiles; @%p bra LOOP;
st.global.v4.f32 [%y], {{%s0, %s1, %s2, %s3}}; ret; }}""",
    1, 128, lambda rng: [rng.integers(0, 99, (7, 128, 4)).astype(np.float32)],
    lambda x: x.sum(0)[np.arange(128) ^ 96].reshape(-1), (512, np.float32), [7],
)  # fmt: skip

REDUCE = Kernel(
    f"""{HEADER}.visible .entry reduce(.param .u64 x, .param .u64 out)
{{ .reg .b64 %x, %y, %w; .reg .b32 %t, %lane, %warp, %v, %u, %a, %r<8>; .reg .pred %p, %q; .shared .b32 parts[8];
ld.param.u64 %x, [x]; ld.param.u64 %y, [out]; mov.u32 %t, %tid.x; mov.u32 %lane, %laneid; shr.u32 %warp, %t, 5; mov.u32 %r0, %ctaid.x;
mad.lo.u32 %r1, %r0, 256, %t; mul.wide.u32 %w, %r1, 4; add.u64 %x, %x, %w; ld.global.u32 %v, [%x];
{chr(10).join(f"shfl.sync.bfly.b32 %u, %v, {d}, 31, -1; add.u32 %v, %v, %u;" for d in (16, 8, 4, 2, 1))}
mov.u32 %a, parts; mad.lo.u32 %r2, %warp, 4, %a; setp.eq.u32 %p, %lane, 0;
@%p st.shared.u32 [%r2], %v;
bar.sync 0;
setp.ne.u32 %q, %warp, 0; @%q bra END;
and.b32 %r3, %lane, 7; mad.lo.u32 %r4, %r3, 4, %a; ld.shared.u32 %v, [%r4];
{chr(10).join(f"shfl.sync.down.b32 %u, %v, {d}, 0x1807, -1; add.u32 %v, %v, %u; // final" for d in (4, 2, 1))}
mul.wide.u32 %w, %r0, 4; add.u64 %y, %y, %w; @%p st.global.u32 [%y], %v;
END: ret; }}""",
    5, 256, lambda rng: [rng.integers(0, 1000, (5, 256)).astype(np.uint32)], lambda x: x.sum(1).astype(np.uint32), (5, np.uint32),
)  # fmt: skip

# every CTA leaves a partial sum; the last one to count itself adds them up
LAST_BLOCK = Kernel(
    f"""{HEADER}.visible .entry last(.param .u64 x, .param .u64 partial, .param .u64 counter, .param .u64 out)
{{ .reg .b64 %x, %part, %count, %y, %w, %z; .reg .b32 %t, %c, %n, %v, %s, %r<4>; .reg .pred %p, %q; .shared .b32 ticket;
ld.param.u64 %x, [x]; ld.param.u64 %part, [partial]; ld.param.u64 %count, [counter]; ld.param.u64 %y, [out];
mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %n, %nctaid.x; mad.lo.u32 %r0, %c, 64, %t; mul.wide.u32 %w, %r0, 4; add.u64 %x, %x, %w;
ld.global.u32 %v, [%x]; add.u64 %z, %part, %w; st.global.u32 [%z], %v;
fence.acq_rel.gpu; // release
bar.sync 0; // all written
setp.ne.u32 %p, %t, 0; @%p bra WAIT;
atom.global.add.u32 %r1, [%count], 1; st.shared.u32 [ticket], %r1;
WAIT: bar.sync 0; // ticket
ld.shared.u32 %r1, [ticket]; sub.u32 %r2, %n, 1; setp.ne.u32 %q, %r1, %r2; @%q bra END;
fence.acq_rel.gpu; // acquire
mov.u32 %s, 0; mov.u32 %r3, 0; mul.wide.u32 %w, %t, 4; add.u64 %z, %part, %w;
SUM: ld.global.u32 %v, [%z]; add.u32 %s, %s, %v; add.u64 %z, %z, 256; add.u32 %r3, %r3, 1; setp.lt.u32 %p, %r3, %n; @%p bra SUM;
add.u64 %y, %y, %w; st.global.u32 [%y], %s;
END: ret; }}""",
    6, 64, lambda rng: [rng.integers(0, 1000, (6, 64)).astype(np.uint32), np.zeros((6, 64), np.uint32), np.zeros(1, np.uint32)],
    lambda x, p, c: x.sum(0).astype(np.uint32), (64, np.uint32),
)  # fmt: skip

HANDOVER = Kernel(
    f"""{HEADER}.visible .entry handover(.param .u64 x, .param .u64 out)
{{ .reg .b64 %x, %y, %w; .reg .b32 %t, %a, %v, %s, %k, %r<3>; .reg .pred %p<3>; .shared .b32 box[64];
ld.param.u64 %x, [x]; ld.param.u64 %y, [out]; mov.u32 %t, %tid.x; and.b32 %r0, %t, 63; mov.u32 %a, box; mad.lo.u32 %a, %r0, 4, %a;
mul.wide.u32 %w, %r0, 4; add.u64 %x, %x, %w; add.u64 %y, %y, %w; mov.u32 %k, 0; mov.u32 %s, 0;
setp.ge.u32 %p0, %t, 64; @%p0 bra CONSUME;
PRODUCE: ld.global.u32 %v, [%x];
setp.eq.u32 %p1, %k, 0; @%p1 bra SKIP;
bar.sync 2, 128; // empty
SKIP: st.shared.u32 [%a], %v;
bar.arrive 1, 128; // full
add.u64 %x, %x, 256; add.u32 %k, %k, 1; setp.lt.u32 %p2, %k, 5; @%p2 bra PRODUCE;
bra END;
CONSUME:
bar.sync 1, 128; // full
ld.shared.u32 %v, [%a]; add.u32 %s, %s, %v; add.u32 %k, %k, 1; setp.ge.u32 %p2, %k, 5; @%p2 bra STORE;
bar.arrive 2, 128; // empty
bra CONSUME;
STORE: st.global.u32 [%y], %s;
END: ret; }}""",
    1, 128, lambda rng: [rng.integers(0, 1000, (5, 64)).astype(np.uint32)], lambda x: x.sum(0).astype(np.uint32), (64, np.uint32),
)  # fmt: skip

KERNELS = {"scale": SCALE, "matmul": MATMUL, "pipeline": PIPELINE, "reduce": REDUCE, "last block": LAST_BLOCK, "handover": HANDOVER}


@pytest.mark.parametrize("schedule", [*SCHEDULES, *(("random", seed) for seed in range(3, 9))], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_correct_kernels_raise_no_alarm(name: str, schedule: object) -> None:
    kernel = KERNELS[name]
    out = kernel.run(kernel.text, schedule)
    np.testing.assert_array_equal(out, kernel.reference(*(a.copy() for a in kernel.inputs(np.random.default_rng(5)))))


# kernel, what is broken, text, its replacement, what the report must say
MUTANTS = mutants([
    ("scale", "no tail guard", "@%p bra END;", "", r"\[bounds\] 16 bytes.*past the end of 'x'"),
    ("scale", "tail guard off by one", "setp.ge.u32 %p", "setp.gt.u32 %p", r"\[bounds\] 16 bytes.* 0 bytes past the end of 'x'"),
    ("scale", "vector at a 4-byte address", "}, [%x];", "}, [%x+4];", r"\[align\] address .* not a multiple of 16"),
    ("scale", "store too far", "[%y], {", "[%y+16], {", r"\[(bounds|race)\].*'out'"),
    ("scale", "reads the output", "}, [%x];", "}, [%y];", r"\[uninit\] reads 16 bytes .*'out'"),
    ("scale", "register never set", "add.f32 %f4, %f0, %f1;", "", r"\[uninit\] register %f4 is read before"),
    ("scale", "register set in one branch", "add.f32 %f4, %f0, %f1;", "setp.lt.f32 %p, %f0, 0f00000000; @%p add.f32 %f4, %f0, %f1;",
     r"\[uninit\] register %f4 is read by a thread"),
    ("scale", "wrong scale of the index", "mul.wide.u32 %w, %i, 4;", "mul.wide.u32 %w, %i, 16;", r"\[bounds\]"),
    ("scale", "pointer difference as an address", "add.u64 %x, %x, %w;", "mov.u64 %x, %w;", r"\[bounds\].*32-bit value"),
    ("scale", "every CTA writes the first tile", "mad.lo.u32 %i, %r0, %r1, %r2;", "mov.u32 %i, %r2;", r"\[race\] writes .*'out'"),
    ("scale", "works in place over a neighbour", "st.global.v4.f32 [%y]", "ld.param.u64 %y, [x]; xor.b32 %i, %i, 256; mul.wide.u32 %w, %i, 4; "
     "add.u64 %y, %y, %w; setp.ge.u32 %p, %i, %n; @!%p st.global.v4.f32 [%y]", r"\[race\] (reads|writes) .*'x'"),
    ("matmul", "no barrier after the stores", "bar.sync 0; // full", "", r"\[(race|uninit)\]"),
    ("matmul", "no barrier before the stores", "bar.sync 0; // empty", "", r"\[race\] writes shared .*read by warp \d+ at line"),
    ("matmul", "tile too small", ".f32 sb[256]", ".f32 sb[240]", r"\[bounds\] .*shared address .*past the end"),
    ("matmul", "half of the tile is stored", "st.shared.f32 [%r12], %f3;", "setp.lt.u32 %p2, %r3, 8; @%p2 st.shared.f32 [%r12], %f3;",
     r"\[uninit\] reads 4 bytes at shared .*byte \d+ of sb\), never written"),
    ("matmul", "one k step too many", "add.u32 %r15, %r15, 16; setp.lt", "add.u32 %r15, %r15, 16; setp.le", r"\[bounds\] 4 bytes .*'(a|b)'"),
    ("matmul", "barrier only for some threads", "bar.sync 0; // full", "setp.lt.u32 %p2, %r20, 128; @%p2 bar.sync 0;", r"\[barrier\]|\[race\]"),
    ("matmul", "barrier divides a warp", "bar.sync 0; // empty", "setp.lt.u32 %p2, %r2, 8; @%p2 bra LOW; bar.sync 0; bra BOTH;\nLOW: bar.sync 0;\nBOTH:",
     r"\[barrier\] divergent barrier 0: .*at line \d+"),
    ("matmul", "shared offset as a global address", "ld.shared.f32 %f4, [%r13+0];", "cvt.u64.u32 %rd7, %r13; ld.global.f32 %f4, [%rd7];",
     r"\[bounds\].*perhaps a shared offset"),
    ("matmul", "tile row misaligned", "ld.shared.f32 %f4, [%r13+4];", "ld.shared.f32 %f4, [%r13+6];", r"\[align\]"),
    ("pipeline", "waits for too few copies", "cp.async.wait_group 1;", "cp.async.wait_group 2;", r"\[(uninit|race)\] reads 16 bytes .*no wait|\[race\]"),
    ("pipeline", "no wait", "cp.async.wait_group 1;", "", r"\[(uninit|race)\]"),
    ("pipeline", "no barrier", "bar.sync 0; // full", "", r"\[(uninit|race)\]"),
    ("pipeline", "no commit before the loop", "[%x+2048], 16; cp.async.commit_group;", "[%x+2048], 16;", r"\[(uninit|race)\]"),
    ("pipeline", "no commit in the loop", "cp.async.commit_group; // in the loop", "", r"\[(uninit|race)\]"),
    ("pipeline", "copies into the stage that is read", "mov.u32 %next, 4096;", "mov.u32 %next, 0;", r"\[race\] copies to shared|\[(uninit|race)\]"),
    ("pipeline", "ring of two in the copies", "%next, 6144; selp", "%next, 4096; selp", r"\[(bounds|race|uninit)\]"),
    ("pipeline", "copies beyond the tensor", "@%p cp.async", "cp.async", r"\[bounds\] 16 bytes .*past the end of 'x'"),
    ("pipeline", "copy to a misaligned address", "[%dst], [%x], 16;", "[%dst+8], [%x], 16;", r"\[align\]"),
    ("reduce", "no barrier", "bar.sync 0;", "", r"\[(race|uninit)\]"),
    ("reduce", "one warp's part is missing", "setp.eq.u32 %p, %lane, 0;", "setp.eq.u32 %p, %lane, %warp; setp.ne.and.u32 %p, %warp, 3, %p;", r"\[uninit\] .*parts"),
    ("reduce", "shuffle for half of the warp", "and.b32 %r3, %lane, 7;", "setp.ge.u32 %q, %lane, 8; @%q bra END; and.b32 %r3, %lane, 7;",
     r"\[barrier\] waits for lanes that have exited: 8, 9"),
    ("reduce", "not in its own mask", "31, -1; add.u32 %v, %v, %u;\nshfl.sync.bfly.b32 %u, %v, 1, 31, -1;",
     "31, -1; add.u32 %v, %v, %u;\nshfl.sync.bfly.b32 %u, %v, 1, 31, 0xFFFF;", r"\[barrier\] lane is not in its own member mask"),
    ("reduce", "all warps store to one word", "mad.lo.u32 %r2, %warp, 4, %a;", "mov.u32 %r2, %a;", r"\[race\] writes shared .*write by warp"),
    ("last block", "no fence before the count", "fence.acq_rel.gpu; // release", "", r"\[race\] reads .*'partial'"),
    ("last block", "no fence after the count", "fence.acq_rel.gpu; // acquire", "", r"\[race\] reads .*'partial'"),
    ("last block", "the ticket is read too early", "WAIT: bar.sync 0; // ticket", "WAIT:", r"\[(race|uninit)\].*ticket"),
    ("last block", "the count is no atomic", "atom.global.add.u32 %r1, [%count], 1;", "ld.global.u32 %r1, [%count]; add.u32 %r2, %r1, 1; st.global.u32 [%count], %r2;",
     r"\[race\] .*'counter'"),
    ("handover", "consumer does not release", "bar.arrive 2, 128; // empty", "", r"\[barrier\] deadlock.*barrier 2|\[race\]"),
    ("handover", "producer does not wait", "bar.sync 2, 128; // empty", "", r"\[(race|barrier)\]"),
    ("handover", "count too small", "bar.arrive 1, 128; // full", "bar.arrive 1, 96; // full", r"\[barrier\].*barrier 1 is used with count|\[barrier\]"),
    ("handover", "waits for the wrong barrier", "CONSUME:\nbar.sync 1, 128;", "CONSUME:\nbar.sync 3, 128;", r"\[barrier\].*(deadlock|arrive at barrier 1)"),
    ("handover", "endless loop", "add.u64 %x, %x, 256; add.u32 %k, %k, 1;", "", r"\[(deadlock|barrier|race)\]"),
])  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants_are_diagnosed(mutant: Mutant, schedule: object) -> None:
    kernel = KERNELS[mutant.kernel]
    mutant.diagnose(lambda: (kernel.run(mutant.text(kernel.text), schedule), np.zeros(0)))


def test_races_are_invisible_without_the_race_checker_but_results_show_them() -> None:
    """The random schedule interleaves warps: a missing barrier gives wrong numbers even when nobody checks."""
    broken = MATMUL.text.replace("bar.sync 0; // empty", "")
    wrong = 0
    for seed in range(8):
        a, b = MATMUL.inputs(np.random.default_rng(5))
        out = np.zeros((32, 32), np.float32)
        launch(broken, MATMUL.grid, MATMUL.threads, [a, b, out, 32], checkers="bounds", schedule=("random", seed))
        wrong += bool((out != a @ b).any())
    assert wrong >= 2


def test_faults_point_to_the_line_and_its_origin() -> None:
    program = load(parse(SCALE.text.replace("@%p bra END;", "")))
    program.source_map = lambda line: f"scale.ptx.j2:{line * 10}"
    x = np.zeros(600, np.float32)
    memory = GlobalMemory()
    with pytest.raises(EmulatorFault) as caught:
        program.launch(memory, 3, 64, [memory.register(x, "x"), memory.register(x.copy(), "out"), 600])
    error = caught.value
    assert error.checker == "bounds" and error.kernel == "scale" and error.cta == "(2,0,0)" and error.thread == 22
    line = SCALE.text.replace("@%p bra END;", "").split("\n")[error.line - 1]
    assert error.text in line and f"from scale.ptx.j2:{error.line * 10}" in str(error)
