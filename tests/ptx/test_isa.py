"""The instruction table against the assembler: every row assembles where its gate says, and not just below."""

from __future__ import annotations

import re

import pytest

from oxidnn import ptx
from oxidnn.errors import PtxError
from oxidnn.ptx.isa import Effect, Form, Gate, agrees, forms, lookup
from oxidnn.ptx.nodes import Instruction

from .assembler import assemble
from .instances import all_rows, below, instances, kernel, least

BATCH = 400


def one(text: str) -> Instruction:
    """The instruction a line of PTX spells."""
    module = ptx.parse(f".version 7.0\n.target sm_80\n.address_size 64\n.entry k()\n{{\n{text}\n}}")
    (statement,) = module.entries[0].body
    assert isinstance(statement, Instruction)
    return statement


def test_every_row_assembles_at_its_gate() -> None:
    groups: dict[tuple[tuple[int, int], str, bool], list[str]] = {}  # one kernel cannot mix both CTA groups
    rows = set()
    for form, text in instances():
        place = least(form)
        if place[0] <= (9, 0):
            groups.setdefault((*place, "cta_group::2" in text), []).append(text)
            rows.add(form.row)
    assert rows == {row.pattern for row in all_rows()}
    for (version, target, _), lines in groups.items():
        for start in range(0, len(lines), BATCH):
            text = kernel(lines[start : start + BATCH], version, target)
            complaint = assemble(text, target)
            shown = [text.splitlines()[int(n) - 1] for n in re.findall(r"line (\d+);", complaint)[:5]]
            assert not complaint, f".version {version}, {target}: {complaint[:400]} {shown}"


# The assembler checks these two less strictly than the table, which follows the ISA text.
_LOOSE = ("cp.async.ca.shared::cta", "cp.async.cg.shared::cta")


def test_every_gate_is_the_lowest() -> None:
    seen = set()
    for form, text in instances():
        if lookup(one(text)) is not form or text.startswith(_LOOSE):
            continue  # an earlier row takes that shape at a lower gate
        if any(kind.version > (0, 0) for operand in form.operands for kind in operand.kinds):
            continue  # the gate depends on the kind of operand
        for version, target in below(form):
            key = (form.row, version, target, form.gates)
            if key not in seen:
                seen.add(key)
                assert assemble(kernel([text], version, target), target), f".version {version}, {target}: {text}"
    assert len(seen) > 600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("frobnicate.u32 %a, %b;", r"line 6: unknown instruction 'frobnicate': frobnicate\.u32 %a, %b;"),
        ("add.u33 %a, %b, %c;", r"unknown modifier \.u33 in add\.u33 \(allowed there: .*\.u32"),
        ("fma.rnd.f32 %a, %b, %c, %d;", r"unknown modifier \.rnd in fma\.rnd\.f32"),
        ("cvt.bf16.f32 %a, %b;", r"unknown modifier \.f32 in cvt\.bf16\.f32"),
        ("ex2.f32 %a, %b;", r"unknown modifier \.f32 in ex2\.f32 \(allowed there: \.approx\)"),
        ("div.f32 %a, %b, %c;", r"unknown modifier \.f32 in div\.f32 \(allowed there: .*\.approx.*\.rn"),
        ("cvt.rn.e4m3x2.f32 %a, %b, %c;", r"unknown modifier \.e4m3x2 .*\.satfinite"),
        ("shfl.bfly.b32 %a, %b, 1, 31, -1;", r"unknown modifier \.bfly in shfl\.bfly\.b32 \(allowed there: \.sync\)"),
        ("add.rn.f32.ftz %a, %b, %c;", r"unknown modifier \.ftz in add\.rn\.f32\.ftz"),
        ("wgmma.fence.sync;", r"wgmma\.fence\.sync lacks a modifier \(one of \.aligned\)"),
        (
            "wgmma.mma_async.sync.aligned.m64n40k32.s32.s8.s8 {%a}, %b, %c, %p;",
            r"unknown modifier \.s32 in .*\.m64n40k32",
        ),
        ("red.global.max.bf16x2 [%a], %b;", r"unknown modifier \.bf16x2"),
        ("add.u32 %a, %b;", r"add\.u32 takes 3 operands, not 2"),
        ("min.f32 %a, %b, %c, %d, %e;", r"min\.f32 takes 3 or 4 operands, not 5"),
        ("cp.async.cg.shared.global [%a], [%b], 8;", r"operand 2 of .* is not an immediate of \[16\]"),
        ("ld.global.v4.b32 {%a, %b}, [%c];", r"operand 0 of ld\.global\.v4\.b32 is not a vector of 4 \.b32"),
        ("ld.global.v4.b64 {%a, %b, %c, %d}, [%e];", r""),
        ("elect.sync %a, -1;", r"operand 0 of elect\.sync is not \.u32 register with \|predicate"),
        ("setp.eq.f16 %p|%q, %a, %b;", r"operand 0 of setp\.eq\.f16"),
        ("mbarrier.arrive.shared::cluster.b64 %a, [%b];", r"operand 0 of .* is not the sink _"),
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%a], [%b, {%c}], [%d];",
            r"operand 1 of .* is not a global address with 2 coordinates",
        ),
        (
            "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
            " [%a], [%b, {%c, %c, %c, %c}], [%d], {%e};",
            r"operand 3 of .* is not a vector of 2 \.b16",
        ),
        (
            "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
            " [%a], [%b, {%c, %c, %c, %c}], [%d];",
            r"takes 4 operands, not 3",
        ),
    ],
)
def test_lookup_names_what_is_wrong(text: str, message: str) -> None:
    if not message:  # 256-bit accesses exist, from sm_100 on
        assert lookup(one(text)).gates[0] == (Gate((8, 8), "100+"),)
        return
    with pytest.raises(PtxError, match=message):
        lookup(one(text))


def effects(text: str) -> list[tuple[int, str, str, int | None]]:
    return [(e.operand, e.space, e.access, e.bytes) for e in lookup(one(text)).effects]


def test_memory_effects() -> None:
    assert effects("ld.global.nc.L1::no_allocate.v4.f32 {%a, %b, %c, %d}, [%e];") == [(1, "global", "read", 16)]
    assert effects("st.shared.b16 [%a], %b;") == [(0, "shared", "write", 2)]
    assert effects("ld.b64 %a, [%b];") == [(1, "generic", "read", 8)]
    assert effects("ld.param.u8 %a, [p];") == [(1, "param", "read", 1)]
    assert effects("atom.shared::cluster.add.u32 %a, [%b], 1;") == [(1, "shared::cluster", "atomic", 4)]
    assert effects("red.global.add.noftz.v8.bf16 [%a], {%b, %b, %b, %b, %b, %b, %b, %b};") == [
        (0, "global", "atomic", 16)
    ]
    assert effects("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%a, %b, %c, %d}, [%e];") == [(1, "shared", "read", 16)]
    assert effects("mbarrier.try_wait.parity.shared::cta.b64 %p, [%a], 0;") == [(1, "shared::cta", "read", 8)]
    assert effects("prefetch.global.L2 [%a];") == [(0, "global", "hint", 0)]
    assert effects("bar.sync 0;") == []


def test_asynchronous_effects_say_proxy_and_completion() -> None:
    copy = lookup(one("cp.async.ca.shared.global [%a], [%b], 8;"))
    assert copy.completion == "group"
    assert copy.effects == (
        Effect(0, "shared", "write", None, 2, True, "generic"),
        Effect(1, "global", "read", None, 2, True, "generic"),
    )
    load = lookup(
        one(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [%a], [%b, {%c, %d}], [%e];"
        )
    )
    assert load.completion == "mbarrier"
    assert load.effects == (
        Effect(0, "shared::cluster", "write", None, None, True, "async"),
        Effect(1, "global", "read", None, None, True, "async"),
        Effect(2, "shared", "atomic", 8, None, True, "async"),
    )
    store = lookup(one("cp.async.bulk.global.shared::cta.bulk_group [%a], [%b], 2048;"))
    assert (store.completion, [e.bytes_operand for e in store.effects]) == ("bulk_group", [2, 2])
    product = lookup(
        one("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%a, %b, %c, %d}, %x, %y, %p, 1, 1, 0, 0;")
    )
    assert (product.completion, product.collective, product.operands[0].role) == ("wgmma_group", "warpgroup", "update")
    assert [(e.operand, e.space, e.proxy) for e in product.effects] == [(1, "shared", "async"), (2, "shared", "async")]


def test_every_address_and_descriptor_has_an_effect() -> None:
    checked = 0
    for form, _ in instances():
        for index, operand in enumerate(form.operands):
            if any(kind.name == "address" or kind.descriptor for kind in operand.kinds):
                checked += 1
                assert any(effect.operand == index for effect in form.effects), form
    assert checked > 1000


def test_collectives() -> None:
    found = {
        text: (lookup(one(text)).collective, lookup(one(text)).aligned)
        for text in (
            "shfl.sync.idx.b32 %a, %b, 0, 31, -1;",
            "movmatrix.sync.aligned.m8n8.trans.b16 %a, %b;",
            "bar.sync 0;",
            "barrier.sync 0;",
            "bar.warp.sync -1;",
            "barrier.cluster.wait.aligned;",
            "setmaxnreg.inc.sync.aligned.u32 160;",
            "add.u32 %a, %b, %c;",
        )
    }
    assert list(found.values()) == [
        ("warp", False),
        ("warp", True),
        ("cta", True),
        ("cta", False),
        ("warp", False),
        ("cluster", True),
        ("warpgroup", True),
        (None, False),
    ]


def test_bindings_name_the_choices() -> None:
    form = lookup(one("atom.acq_rel.gpu.global.add.u32 %a, [%b], 1;"))
    assert dict(form.bindings) == {"order": "acq_rel", "scope": "gpu", "S": "global", "op": "add", "T": "u32"}


def test_forms_lists_every_arity() -> None:
    assert sorted(len(form.operands) for form in forms("mbarrier", ("try_wait", "parity", "shared::cta", "b64"))) == [
        3,
        4,
    ]
    assert all(isinstance(form, Form) for form in forms("bar", ("sync",)))


@pytest.mark.parametrize(
    ("gate", "passes", "fails"),
    [
        (Gate((7, 8), "90+"), ["sm_90", "sm_90a", "sm_120"], ["sm_80", "sm_89"]),
        (Gate((8, 0), "90a"), ["sm_90a"], ["sm_90", "sm_100a", "sm_80"]),
        (Gate((8, 6), "100f"), ["sm_100a", "sm_100f", "sm_103a"], ["sm_100", "sm_90a", "sm_120a"]),
    ],
)
def test_gates(gate: Gate, passes: list[str], fails: list[str]) -> None:
    assert all(gate.admits((9, 0), target) for target in passes)
    assert not any(gate.admits((9, 0), target) for target in fails)
    assert not any(gate.admits((7, 0), target) for target in passes)


_MATRIX = {
    "add.u16 {r}, {r}, 1;": ("u16", False),
    "add.s32 {r}, {r}, 1;": ("s32", False),
    "add.s64 {r}, {r}, 1;": ("s64", False),
    "add.f32 {r}, {r}, {r};": ("f32", False),
    "add.f64 {r}, {r}, {r};": ("f64", False),
    "add.f16 {r}, {r}, {r};": ("f16", False),
    "add.f16x2 {r}, {r}, {r};": ("f16x2", False),
    "fma.rn.bf16 {r}, {r}, {r}, {r};": ("bf16", False),
    "fma.rn.bf16x2 {r}, {r}, {r}, {r};": ("bf16x2", False),
    "mov.b16 {r}, {r};": ("b16", False),
    "mov.b32 {r}, {r};": ("b32", False),
    "mov.b64 {r}, {r};": ("b64", False),
    "xor.b32 {r}, {r}, {r};": ("b32", False),
    "not.b64 {r}, {r};": ("b64", False),
    "ld.global.u8 {r}, [%b64_0];": ("u8", True),
    "ld.global.b16 {r}, [%b64_0];": ("b16", True),
    "ld.global.b32 {r}, [%b64_0];": ("b32", True),
    "ld.global.s32 {r}, [%b64_0];": ("s32", True),
    "ld.global.f32 {r}, [%b64_0];": ("f32", True),
    "ld.global.f64 {r}, [%b64_0];": ("f64", True),
    "st.global.b8 [%b64_0], {r};": ("b8", True),
    "st.global.u16 [%b64_0], {r};": ("u16", True),
    "st.global.f32 [%b64_0], {r};": ("f32", True),
    "cvt.rn.f32.u32 %f32_0, {r};": ("u32", True),
    "cvt.u64.u16 %b64_0, {r};": ("u16", True),
    "cvt.f32.f16 %f32_0, {r};": ("f16", True),
    "cvt.rna.tf32.f32 {r}, %f32_0;": ("tf32", False),
    "cvt.rn.bf16x2.f32 {r}, %f32_0, %f32_1;": ("bf16x2", False),
    "popc.b64 {r}, %b64_0;": ("u32", False),
    "movmatrix.sync.aligned.m8n8.trans.b16 {r}, {r};": ("b32", False),
}


@pytest.mark.parametrize("line", _MATRIX, ids=lambda line: line.split(" ")[0])
def test_register_types_agree_as_the_assembler_judges(line: str) -> None:
    kind, wide = _MATRIX[line]
    for register in ("b8", "b16", "u16", "s16", "f16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64", "b128"):
        complaint = assemble(kernel([line.format(r=f"%{register}_0")], (8, 3), "sm_90a"), "sm_90a")
        assert agrees(kind, register, wide) == (not complaint), f"{register} in {line}: {complaint}"
