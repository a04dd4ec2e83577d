"""The scanner: what is read, and what is refused with which message."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from oxidnn import ptx
from oxidnn.errors import PtxError
from oxidnn.ptx.nodes import Addr, Imm, Instruction, Label, Pair, Reg, RegDecl, Scope, Sym, VarDecl, Vec

from .assembler import assemble

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.ptx"))
HEAD = (
    ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p)\n{\n"  # the body starts on line 6
)


def statements(body: str) -> tuple[object, ...]:
    return ptx.parse(HEAD + body + "\n}").entries[0].body


def operands(text: str) -> tuple[object, ...]:
    (statement,) = statements(f"x {text};")
    assert isinstance(statement, Instruction)
    return statement.operands


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_corpus_is_read_judged_printed_and_assembled(path: Path) -> None:
    text = path.read_text()
    module = ptx.parse(text)
    assert ptx.validate(module) == []
    printed = ptx.print_module(module)
    assert ptx.same(ptx.parse(printed), module)
    assert assemble(text, module.target) == ""
    assert assemble(printed, module.target) == ""


@pytest.mark.parametrize(
    ("text", "value", "bits"),
    [
        ("0", 0, None),
        ("017", 15, None),
        ("0x1F", 31, None),
        ("0b101", 5, None),
        ("42U", 42, None),
        ("-0x10", -16, None),
        ("4294967295", 2**32 - 1, None),
        ("1.5", 1.5, None),
        ("-2.5e-3", -2.5e-3, None),
        ("0f3F800000", 1.0, 0x3F800000),
        ("0Fff800000", -math.inf, 0xFF800000),
        ("0d3FE0000000000000", 0.5, 0x3FE0000000000000),
        ("WARP_SZ", 32, None),
    ],
)
def test_literals(text: str, value: float, bits: int | None) -> None:
    assert operands(text) == (Imm(value, bits, text),)  # type: ignore[arg-type]


def test_operands_of_every_shape() -> None:
    read = operands("%p|%q, !%z, [%a+-4], [tile+8], [%m, {%x, 3}], {%a, _}, tile+16, _, %tid.x, $exit")
    assert read == (
        Pair(Reg("%p"), Reg("%q")),
        Reg("%z", negated=True),
        Addr(Reg("%a"), -4),
        Addr(Sym("tile"), 8),
        Addr(Reg("%m"), 0, (Reg("%x"), Imm(3, None, "3"))),
        Vec((Reg("%a"), Reg("_"))),
        Sym("tile", 16),
        Reg("_"),
        Reg("%tid.x"),
        Sym("$exit"),
    )


def test_statements_keep_their_lines_and_texts() -> None:
    body = statements(
        "/* a\n comment */ .reg .b32 %r<4>, %s; // one\n"
        "L: @!%p ld.shared::cta.v2.b32\n   {%r0, %r1},\n [%s];\n"
        "{\n.reg .b32 %r0;\n}"
    )
    first, label, second, scope = body
    assert first == RegDecl("b32", (("%r", 4), ("%s", None)), 7)
    assert label == Label("L", 8)
    assert isinstance(second, Instruction)
    assert (second.line, second.guard, second.modifiers) == (8, Reg("%p", True), ("shared::cta", "v2", "b32"))
    assert second.text == "@!%p ld.shared::cta.v2.b32 {%r0, %r1}, [%s];"
    assert scope == Scope((RegDecl("b32", (("%r0", None),), 12),), 11)


def test_module_level() -> None:
    module = ptx.parse(
        "// spec: a\n// b\n.version 8.3\n.target sm_90a, texmode_independent\n.address_size 64\n"
        ".extern .shared .align 1024 .b8 smem[];\n.const .f32 c[2][2] = {{0.1, 1.0}, {0f40000000, -3.0}}, d = 7.0;\n"
        ".visible .entry k(.param .u64 .ptr .global .align 16 x, .param .align 64 .b8 map[128])\n"
        ".reqntid 64, 2\n.minnctapersm 1\n.reqnctapercluster 2\n.explicitcluster\n.pragma \"nounroll\";\n"
        "{\nL:\n.pragma \"used_bytes_mask 1\";\nret;\n}\n.entry bare { exit; }"
    )  # fmt: skip
    assert (module.version, module.target, module.target_options) == ((8, 3), "sm_90a", ("texmode_independent",))
    assert module.comments == ("spec: a", "b")
    smem, c, d = module.variables
    assert smem == VarDecl("shared", "b8", "smem", 1024, 0, True, 6)
    assert (c.size_bytes, c.align, c.initial[1:]) == (16, 4, (1.0, 2.0, -3.0))
    assert c.initial[0] == pytest.approx(0.1, rel=1e-7) and c.initial[0] != 0.1  # rounded to .f32
    assert (d.name, d.size_bytes, d.initial) == ("d", 4, (7.0,))
    entry, bare = module.entries
    assert [(p.name, p.size_bytes, p.align, p.pointer, p.pointer_align) for p in entry.params] == [
        ("x", 8, 8, "global", 16),
        ("map", 128, 64, None, 0),
    ]
    assert entry.directives == (
        ("reqntid", (64, 2, 1)),
        ("minnctapersm", (1,)),
        ("reqnctapercluster", (2, 1, 1)),
        ("explicitcluster", ()),
    )
    assert entry.pragmas == ("nounroll",)
    assert entry.body[0] == Label("L", 15, "used_bytes_mask 1")
    assert bare.params == () and len(bare.body) == 1
    assert ptx.same(ptx.parse(ptx.print_module(module)), module)


REFUSED = [
    (".reg .u32 %tid;", r"line 6: register '%tid' shadows the special register"),
    (".reg .u32 %laneid;", r"line 6: register '%laneid' shadows"),
    (".reg .b32 %envreg<4>;", r"line 6: register '%envreg0' shadows"),
    (".reg .b32 %c0;\n.reg .f32 %c<128>;", r"line 7: duplicate definition of register '%c0' \(first on line 6\)"),
    (".reg .f32 %c<128>;\n.reg .b32 %c0;", r"line 7: duplicate definition of register '%c0'"),
    (".reg .f32 %c<128>;\n.reg .b32 %c1<10>;", r"duplicate definition of register '%c10'"),
    ("L:\nL:", r"line 7: duplicate definition of label 'L'"),
    (".shared .b32 v;\nv:", r"line 7: duplicate definition of label 'v'"),
    (".shared .b32 p;", r"duplicate definition of variable 'p' \(first on line 4\)"),
    (".reg .u31 %a;", r"line 6: not a register declaration: \.reg \.u31 %a;"),
    (".reg .b32 a;", r"register name 'a' is not of the form %name"),
    ("mov.u32 %a, 1\nmov.u32 %a, 2;", r"line 6: cannot read the operand '1\\nmov.u32 %a'.*missing ';'"),
    ("mov.u32 %a, %b,;", r"line 6: an operand is empty"),
    ("ld.global.v2.b32 {%a, %b}, [%c],;", r"an operand is missing after the last ','"),
    ("mov.u32 %a %b;", r"cannot read the operand '%a %b'"),
    ("ld.global.b32 %a, [%b-4];", r"cannot read the address \[%b-4\] \(a negative offset is written \[%base\+-4\]\)"),
    ("ld.global.b32 %a, [%b+x];", r"'x' is not an integer"),
    ("ld.global.b32 %a, [%b;", r"cannot read the operands"),
    ("mov.u32 %a, 0x12G;", r"cannot read the operand '0x12G'"),
    ("MOV.u32 %a, 1;", r"line 6: syntax error"),
    (".shared .b8 x[];", r"variable 'x' has no size and is not \.extern"),
    (".shared .align 3 .b8 x[4];", r"alignment 3 is not a power of two"),
    (".shared .bf16 x[4];", r"unknown variable type \.bf16"),
    (".global .b32 x[2] = {1, 2, 3};", r"3 initial values for 2 elements"),
    (".global .b32 x = y;", r"initial value 'y' is not a number"),
    ('mov.u32 %a, 1;\n.pragma "nounroll";', r"line 7: a \.pragma inside a body must follow a label directly"),
    (".tex .u32 t;", r"line 6: not a variable declaration"),
    ("{", r"line 4: the brace opened here is never closed"),
    ("}", r"line 7: not a directive, variable or entry: }"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[body.split("\n")[-1][:40] for body, _ in REFUSED])
def test_refusals_name_the_line(body: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        ptx.parse(HEAD + body + "\n}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".target sm_80\n.address_size 64\n", "no .version directive"),
        (".version 8.0\n", "no .target directive"),
        (".version 8.0\n.target sm_80\n.address_size 32\n", r"line 3: address size is not 64"),
        (".version 8.0\n.target sm_80\n.func f { ret; }\n", "line 3: only entries and variables"),
        (
            ".version 8.0\n.target sm_80\n.entry k()\n.maxntid\n{ ret; }",
            r"line 4: \.maxntid takes 1 to 3 numbers, not 0",
        ),
        (".version 8.0\n.target sm_80\n.entry k()\n.maxregs 3\n{ ret; }", r"line 4: not a performance directive"),
        (".version 8.0\n.target sm_80\n.entry k(.param u32 x)\n{ ret; }", r"line 3: not a parameter"),
        (
            ".version 8.0\n.target sm_80\n.entry k(.param .u32 x,\n .param .u32 x)\n{ ret; }",
            r"line 4: duplicate definition",
        ),
    ],
)
def test_module_level_refusals(text: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        ptx.parse(text)


def test_a_scope_may_declare_again_what_the_one_around_it_declares() -> None:
    body = ".reg .b32 %a;\nL: { .reg .f32 %a; L: bra L; }"
    assert len(statements(body)) == 3


def test_a_long_kernel_is_read_quickly() -> None:
    lines = [f"fma.rn.f32 %f{i % 64}, %f{(i + 1) % 64}, %f{(i + 7) % 64}, %f{i % 64};" for i in range(4000)]
    text = HEAD + ".reg .f32 %f<64>;\n" + "\n".join(lines) + "\n}"
    best = min(_seconds(text) for _ in range(3))
    assert best < 0.5, f"{best:.3f} s for 4000 lines"  # about 0.02 s on an idle machine


def _seconds(text: str) -> float:
    start = time.perf_counter()
    ptx.parse(text)
    return time.perf_counter() - start
