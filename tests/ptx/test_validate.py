"""The validator: every refusal with its message, and what the assembler says of the same text."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from oxidnn import ptx
from oxidnn.errors import PtxError

from .assembler import assemble


class Case(NamedTuple):
    body: str
    message: str
    assembles: bool = False  # the assembler lets it pass: the validator is deliberately stricter
    target: str = "sm_90a"
    version: str = "8.0"
    directives: str = ".maxntid 128, 1, 1\n.minnctapersm 1"


def text_of(case: Case) -> str:
    """The body stands from line 15 on."""
    return (
        f".version {case.version}\n.target {case.target}\n.address_size 64\n"
        ".global .align 4 .b8 words[64];\n"
        f".visible .entry k(.param .u64 p, .param .align 16 .b8 q[32])\n{case.directives}\n{{\n"
        ".shared .align 16 .b8 tile[256];\n"
        ".reg .pred %p<4>;\n.reg .b16 %h<4>;\n.reg .b32 %r<16>;\n.reg .b64 %d<8>;\n.reg .f32 %f<16>;\n"
        f"{case.body}\nret;\n}}\n"
    )


REFUSED = {
    "undeclared": Case("mov.u32 %x, 1;", r"line 15: register %x is not declared: mov\.u32 %x, 1;"),
    "beyond a range": Case("mov.u32 %r16, 1;", r"register %r16 is not declared"),
    "undeclared guard": Case("@%x mov.u32 %r0, 1;", r"register %x is not declared"),
    "undeclared base": Case("ld.global.b32 %r0, [%x];", r"register %x is not declared"),
    "declared later": Case("mov.u32 %x, 1;\n.reg .b32 %x;", r"line 15: register %x is not declared"),
    "local to a scope": Case("{ .reg .b32 %x; }\nmov.u32 %x, 1;", r"line 16: register %x is not declared"),
    "width": Case("add.s64 %d0, %d1, %r0;", r"register %r0 is \.b32, which \.s64 does not take"),
    "float for integer": Case("add.u32 %r0, %f0, 1;", r"register %f0 is \.f32, which \.u32 does not take"),
    "predicate in mov.b32": Case("mov.b32 %r0, %p0;", r"register %p0 is \.pred, which \.b32 does not take"),
    "guard is no predicate": Case("@%r0 mov.u32 %r1, 1;", r"register %r0 is \.b32, which \.pred does not take"),
    "negated register": Case("mov.u32 %r0, !%r1;", r"only a predicate can be negated, %r1 is \.b32"),
    "narrow destination": Case("ld.global.b64 %r0, [%d0];", r"register %r0 is \.b32, which \.b64 does not take"),
    "f32 in a tf32 mma": Case(
        "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32"
        " {%f0, %f1, %f2, %f3}, {%f4, %f5}, {%r0}, {%f0, %f1, %f2, %f3};",
        r"register %f4 is \.f32, which \.b32 does not take",
    ),
    "global address in 32 bits": Case(
        "ld.global.b32 %r0, [%r1];", r"register %r1 is \.b32; a global address is a 64-bit"
    ),
    "float address": Case("ld.shared.b32 %r0, [%f1];", r"register %f1 is \.f32; a shared address is a 32- or 64-bit"),
    "64-bit coordinates": Case(
        "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d0, {%d1, %r0}];", r"register %d1 is \.b64, which \.s32"
    ),
    "mixed vector widths": Case("ld.global.v2.u8 {%h0, %r0}, [%d0];", r"the elements of the vector differ in width"),
    "sink read": Case("st.global.v2.b32 [%d0], {%r0, _};", r"the sink _ cannot be read"),
    "wrong pack": Case("mov.b64 %d0, {%h0, %h1};", r"register %h0 is \.b16, which \.b32 does not take"),
    "integer for float": Case("add.f32 %f0, %f1, 1;", r"1 is an integer where \.f32 wants a float \(write 1\.0\)"),
    "float for bits": Case("mov.b32 %r0, 1.5;", r"1\.5 is a float where \.b32 stands"),
    "double bits in b32": Case("mov.b32 %r0, 0d3FF0000000000000;", r"is a float where \.b32 stands"),
    "immediate bf16x2": Case("fma.rn.bf16x2 %r0, %r1, 0x3F80, %r2;", r"\.bf16x2 takes no immediate"),
    "too large": Case("mov.u32 %r0, 0x1FFFFFFFF;", r"0x1FFFFFFFF does not fit into 32 bits", True),
    "too small": Case("add.s32 %r0, %r0, -2147483649;", r"-2147483649 does not fit into 32 bits", True),
    "special in add": Case("add.u32 %r0, %tid.x, 1;", r"special register %tid\.x can be read by mov and cvt only"),
    "special written": Case("mov.u32 %tid.x, %r0;", r"special register %tid\.x cannot be written"),
    "special width": Case("mov.u64 %d0, %clock;", r"special register %clock is \.u32, which \.u64 does not take"),
    "special component": Case("mov.u32 %r0, %tid;", r"special register %tid lacks a component"),
    "no label": Case("bra NOWHERE;", r"label NOWHERE does not exist in this scope or one around it"),
    "label in an inner scope": Case("{\nIN: mov.u32 %r0, 1;\n}\nbra IN;", r"line 18: label IN does not exist"),
    "variable as label": Case("bra tile;", r"label tile does not exist"),
    "no variable": Case("mov.u32 %r0, nothing;", r"nothing is not a variable or parameter"),
    "label as address": Case("L: ld.global.b32 %r0, [L];", r"L is not a variable or parameter"),
    "shared as global": Case(
        "ld.global.b32 %r0, [tile];", r"tile is in shared space, the instruction addresses global"
    ),
    "global as shared": Case(
        "ld.shared.b32 %r0, [words];", r"words is in global space, the instruction addresses shared"
    ),
    "parameter as global": Case("ld.global.u64 %d0, [p];", r"p is in param space, the instruction addresses global"),
    "parameter as generic": Case("ld.u64 %d0, [p];", r"p is in param space, the instruction addresses generic"),
    "parameter as tensor map": Case(
        "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [q, {%r0, %r1}];", r"q is in param space"
    ),
    "cvta of another space": Case(
        "cvta.global.u64 %d0, tile;", r"tile is in shared space, the instruction wants global"
    ),
    "immediate address": Case("ld.global.b32 %r0, [16];", r"an immediate address is not allowed in global space"),
    "misaligned offset": Case(
        "ld.shared.v4.b32 {%r0, %r1, %r2, %r3}, [tile+8];", r"offset 8 of tile is not a multiple of the 16 bytes", True
    ),
    "weak alignment": Case(
        "ld.global.v2.b32 {%r0, %r1}, [words];", r"words is aligned to 4 bytes, the access needs 8", True
    ),
    "outside": Case("ld.shared.b32 %r0, [tile+256];", r"bytes 256\.\.259 lie outside tile \(256 bytes\)", True),
    "outside a parameter": Case("ld.param.u64 %d0, [q+32];", r"bytes 32\.\.39 lie outside q \(32 bytes\)", True),
    "misaligned cp.async": Case(
        "cp.async.cg.shared.global [tile+8], [%d0], 16;\ncp.async.wait_all;",
        r"offset 8 of tile is not a multiple",
        True,
    ),
    "version": Case(
        "movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r1;",
        r"needs \.version 7\.8 and sm_80 or later;"
        r" the module has \.version 7\.0 and sm_80",
        target="sm_80",
        version="7.0",
    ),
    "architecture": Case("elect.sync %r0|%p0, -1;", r"needs \.version 8\.0 and sm_90 or later", target="sm_80"),
    "architecture suffix": Case(
        "wgmma.fence.sync.aligned;",
        r"needs \.version 8\.0 and sm_90a; the module has \.version 8\.0 and sm_90",
        target="sm_90",
    ),
    "modifier's gate": Case(
        "ld.global.L1::no_allocate.b32 %r0, [%d0];", r"needs \.version 7\.4", target="sm_80", version="7.0"
    ),
    "operand's gate": Case(
        "cp.async.ca.shared.global [%r0], [%d0], 8, %p0;\ncp.async.wait_all;",
        r"operand 3 as a predicate needs \.version 7\.5",
        target="sm_80",
        version="7.4",
    ),
    "target's own version": Case("mov.u32 %r0, 1;", r"line 1: \.target sm_90a needs \.version 8\.0", version="7.8"),
    "unknown target": Case("mov.u32 %r0, 1;", r"line 1: unknown target sm_77", target="sm_77"),
    "cluster directive": Case(
        "mov.u32 %r0, 1;", r"\.reqnctapercluster needs", target="sm_80", directives=".reqnctapercluster 2\n.maxntid 32"
    ),
    "guarded bar.sync": Case(
        "@%p0 bar.sync 0;", r"bar\.sync under a guard: all threads must execute it together", True
    ),
    "guarded ldmatrix": Case(
        "@%p0 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r1];", r"ldmatrix.* under a guard", True
    ),
    "guarded cluster barrier": Case("@%p0 barrier.cluster.arrive.aligned;", r"barrier\.cluster.* under a guard", True),
    "barrier number": Case("bar.sync 16;", r"barrier number 16 is outside 0\.\.15"),
    "barrier threads": Case("bar.sync 1, 100;", r"the number of threads 100 is not a positive multiple of 32"),
    "reduction threads": Case("bar.red.popc.u32 %r0, 1, 100, %p0;", r"the number of threads 100"),
    "cp.async without commit": Case(
        "cp.async.ca.shared.global [%r0], [%d0], 8;\ncp.async.wait_group 0;",
        r"line 15: a commit and a wait is missing",
        True,
    ),
    "cp.async without wait": Case(
        "cp.async.ca.shared.global [%r0], [%d0], 8;\ncp.async.commit_group;",
        r"line 15: a wait is missing in the entry",
        True,
    ),
    "bulk store without commit": Case(
        "cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r0], 64;\ncp.async.bulk.wait_group 0;",
        r"a commit is missing in the entry \(cp\.async\.bulk\.commit_group\)",
        True,
    ),
    "wgmma without fence": Case(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %d0, %d1, %p0, 1, 1, 0, 0;\n"
        "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;",
        r"a fence is missing in the entry \(wgmma\.fence\)",
        True,
    ),
    "wgmma without wait": Case(
        "wgmma.fence.sync.aligned;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %d0, %d1, %p0, 1, 1, 0, 0;\n"
        "wgmma.commit_group.sync.aligned;",
        r"a wait is missing in the entry \(wgmma\.wait_group\)",
        True,
    ),
    "bulk bytes": Case("cp.async.bulk.prefetch.L2.global [%d0], 24;", r"24 bytes are not a multiple of 16"),
    "setmaxnreg unbounded": Case(
        "setmaxnreg.inc.sync.aligned.u32 160;", r"setmaxnreg is ignored unless", True, directives=".maxntid 128"
    ),
    "static shared memory": Case(
        ".shared .b8 big[49152];\nmov.u32 %r0, big;", r"49408 bytes of static \.shared exceed 49152", target="sm_80"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    case = REFUSED[name]
    # Registers of the frame that a body leaves unused are notes, so the problems are the body's own.
    with pytest.raises(PtxError, match=case.message):
        ptx.validate(ptx.parse(text_of(case)))


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "unknown target"])
def test_refusals_against_the_assembler(name: str) -> None:
    case = REFUSED[name]
    assert (assemble(text_of(case), case.target) == "") == case.assembles


ACCEPTED = {
    "wider registers in ld and cvt": "ld.global.u8 %r0, [%d0];\ncvt.u16.u32 %r1, %r0;\nst.global.b8 [%d0], %r1;",
    "untyped and typed": (
        ".reg .u32 %u;\n.reg .s32 %s;\nadd.u32 %s, %u, %r0;\nxor.b32 %r0, %f0, %s;\nadd.f32 %f0, %r0, %f1;"
    ),
    "literals that fit": (
        "mov.u32 %r0, 4294967295;\nmov.s32 %r1, -2147483648;\nmov.b32 %r2, 0fFF800000;\nmov.b16 %h0, 0xFFFF;"
    ),
    "special registers": (
        "mov.u32 %r0, %tid.x;\ncvt.u64.u32 %d0, %ctaid.y;\nmov.u64 %d1, %globaltimer;\nmov.b64 %d2, {%laneid, %r0};"
    ),
    "sinks": "mov.b64 {_, %r0}, %d0;\nld.shared.v4.b32 {%r0, _, _, %r1}, [tile];\natom.shared.add.u32 _, [tile], 1;",
    "addresses of variables": (
        "mov.u32 %r0, tile+16;\nmov.u64 %d0, words;\ncvta.shared.u64 %d1, tile;\nld.param.b64 %d2, [q+24];"
    ),
    "generic address of a variable": "ld.b32 %r0, [words];\nst.b32 [tile], %r0;",
    "branch out of a scope": "{\nIN: bra OUT;\n}\nOUT:",
    "same label in two scopes": "{\nL: bra L;\n}\n{\nL: bra L;\n}",
    "shadowed register": "{\n.reg .f32 %r0;\nadd.f32 %r0, %r0, %f0;\n}\nadd.u32 %r0, %r0, 1;",
    "guarded barriers that say so": "@%p0 barrier.sync 1, 64;\n@%p0 barrier.cluster.arrive;\n@%p1 bar.arrive 2, 64;",
    "register barrier": "bar.sync %r0, %r1;\nbar.red.or.pred %p0, 1, %p1;",
    "cp.async by mbarrier": (
        "cp.async.ca.shared.global [%r0], [%d0], 8;\ncp.async.mbarrier.arrive.noinc.shared::cta.b64 [tile];"
    ),
    "cp.async with byte count": "cp.async.cg.shared.global [%r0], [%d0], 16, %r1;\ncp.async.wait_all;",
    "predicates as operands": (
        "setp.lt.and.s32 %p0|%p1, %r0, 3, !%p2;\nselp.b32 %r0, 1, 0, !%p0;\nand.pred %p3, %p0, 1;"
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_as_the_assembler_does(name: str) -> None:
    text = text_of(Case(ACCEPTED[name], ""))
    ptx.validate(ptx.parse(text))
    assert assemble(text, "sm_90a") == ""


def test_all_problems_are_listed_with_their_lines() -> None:
    body = "mov.u32 %x, 1;\nadd.s64 %d0, %d1, %r0;\nfoo.b32 %r0;\nbra AWAY;"
    with pytest.raises(PtxError) as caught:
        ptx.validate(ptx.parse(text_of(Case(body, ""))))
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [
        "line 15",
        "line 16",
        "line 17",
        "line 18",
    ]


def test_notes_name_what_nothing_uses() -> None:
    text = (
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 used, .param .u64 idle)\n{\n"
        ".reg .b64 %a, %b;\n.reg .f32 %c<4>, %d<2>;\n.shared .b32 s;\n"
        "ld.param.u64 %a, [used];\nst.global.f32 [%a], %c2;\n"
        "{\n.reg .b64 %a;\n}\nUNUSED:\nret;\n}\n"
    )
    assert ptx.validate(ptx.parse(text)) == [
        "line 4: parameter idle is never used",
        "line 6: %b is never used",
        "line 7: %d<2> is never used",
        "line 8: s is never used",
        "line 12: %a is never used",
        "line 14: UNUSED is never used",
    ]
