"""Instances of every row of the instruction table, and a kernel to assemble them in."""

from __future__ import annotations

from collections.abc import Iterator

from oxidnn.ptx.isa import TARGET_VERSIONS, Form, Kind, _Row, _rows, forms

REGISTER_TYPES = (
    "pred", "b8", "b16", "u16", "s16", "f16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64", "b128",
)  # fmt: skip
_BITS = {"bf16": "b16", "bf16x2": "b32", "f16x2": "b32", "u16x2": "b32", "s16x2": "b32", "f32x2": "b64", "tf32": "b32",
         "x8": "b8", "x16": "b16", "x32": "b32", "u8": "b16", "s8": "b16"}  # fmt: skip


def all_rows() -> Iterator[_Row]:
    for rows in _rows().values():
        yield from rows


def combinations(row: _Row, pairs: bool = False) -> list[tuple[str, ...]]:
    """Modifier lists of a row: the plain one, each choice once with the others plain, and everything optional at once.

    `pairs`: every pair of choices as well.
    """
    choices: list[list[str | None]] = []
    for token in row.tokens:
        words: list[str | None] = sorted(token.choices) if not token.same_as else ["=" + token.same_as]
        choices.append([None, *words] if token.optional else words)
    plain = [options[0] for options in choices]
    full = [options[-1] for options in choices]
    picks = [plain, full]
    for index, options in enumerate(choices):
        for option in options[1:]:
            pick = [*plain[:index], option, *plain[index + 1 :]]
            picks.append(pick)
            if pairs:
                for other in range(index + 1, len(choices)):
                    picks += [[*pick[:other], word, *pick[other + 1 :]] for word in choices[other][1:]]
    found: dict[tuple[str, ...], None] = {}
    for pick in picks:
        bound = {token.name: word for token, word in zip(row.tokens, pick, strict=True) if token.name}
        words_found = tuple(bound[word[1:]] if word[0] == "=" else word for word in pick if word is not None)
        if row.match(words_found)[0] is not None:
            found[words_found] = None
    return list(found)


def operand_text(kind: Kind, index: int) -> str:
    if kind.name == "register":
        return f"%{_BITS.get(kind.type, kind.type)}_{index}"
    if kind.name == "predicate":
        return f"%pred_{index}"
    if kind.name == "immediate":
        values = kind.values
        return str(values[-1] if values else 0)
    if kind.name == "vector":
        name = _BITS.get(kind.type, kind.type)
        return "{" + ", ".join(f"%{name}_{(index + 5 * i) % 128}" for i in range(kind.count)) + "}"
    if kind.name == "pack":
        half = {"b16": "b8", "b32": "b16", "b64": "b32", "b128": "b64"}[kind.type]
        return f"{{%{half}_{index}, %{half}_{index + 1}}}"
    if kind.name == "address":
        if kind.coordinates:
            return "[%b64_0, {" + ", ".join(f"%b32_{i}" for i in range(kind.coordinates)) + "}]"
        if kind.space in ("shared", "shared::cta", "shared::cluster", "tmem"):
            return "[%b32_100+16]"
        if kind.space == "param":
            return "[parameter]"
        if kind.space == "local":
            return "[local_space]"
        if kind.space == "const":
            return "[const_space]"
        return "[%b64_100+16]"
    if kind.name == "symbol":
        return {"global": "global_space", "const": "const_space", "local": "local_space", "param": "parameter"}.get(
            kind.space, "shared_space"
        )
    return {"label": "END", "sink": "_"}[kind.name]


def text_of(form: Form, alternative: int = 0) -> str:
    """The form as PTX, with the alternative-th kind of each operand."""
    operands = []
    for index, operand in enumerate(form.operands):
        kind = operand.kinds[min(alternative, len(operand.kinds) - 1)]
        text = operand_text(kind, index)
        beside = operand.predicate == "required" or operand.predicate and alternative
        operands.append(text + f"|%pred_{index + 8}" if beside else text)
    name = ".".join((form.opcode, *form.modifiers))
    return f"{name} {', '.join(operands)};"


def satisfies(form: Form, version: tuple[int, int], target: str) -> bool:
    return (
        version >= TARGET_VERSIONS[target]
        and all(any(gate.admits(version, target) for gate in group) for group in form.gates)
        and all(version >= kind.version for operand in form.operands for kind in operand.kinds)
    )


VERSIONS = [(7, n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 8)] + [(8, n) for n in range(9)] + [(9, 0)]
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103a", "sm_120a")


def least(form: Form) -> tuple[tuple[int, int], str]:
    """The lowest target, and on it the lowest version, that the form's gates admit."""
    for target in TARGETS:
        for version in VERSIONS:
            if satisfies(form, version, target):
                return version, target
    return (9, 1), "sm_80"  # beyond every assembler listed here


def below(form: Form) -> list[tuple[tuple[int, int], str]]:
    """Neighbours just outside the gates: the version before on that target, the target before at that version."""
    version, target = least(form)
    found = []
    if version not in VERSIONS:
        return []
    place = VERSIONS.index(version)
    if place and VERSIONS[place - 1] >= TARGET_VERSIONS[target]:
        found.append((VERSIONS[place - 1], target))
    place = TARGETS.index(target)
    if place and version >= TARGET_VERSIONS[TARGETS[place - 1]]:
        found.append((version, TARGETS[place - 1]))
    return found


def kernel(lines: list[str], version: tuple[int, int], target: str) -> str:
    types = [kind for kind in REGISTER_TYPES if kind != "b128" or version >= (8, 3)]
    registers = "\n".join(f"    .reg .{kind} %{kind}_<128>;" for kind in types)
    body = "\n".join(f"    {line}" for line in lines)
    return f"""// forms
.version {version[0]}.{version[1]}
.target {target}
.address_size 64
.const .align 16 .b8 const_space[64];
.global .align 16 .b8 global_space[64];
.visible .entry forms(.param .align 16 .b8 parameter[64])
.maxntid 128, 1, 1
.minnctapersm 1
{{
    .shared .align 128 .b8 shared_space[1024];
    .local .align 16 .b8 local_space[64];
{registers}
{body}
END:
    ret;
}}
"""


def instances(pairs: bool = False) -> Iterator[tuple[Form, str]]:
    """(form, PTX) for the combinations of every row."""
    for row in all_rows():
        for modifiers in combinations(row, pairs):
            for form in forms(row.opcode, modifiers):
                if form.row == row.pattern:
                    alternatives = max((len(o.kinds) + (o.predicate == "optional") for o in form.operands), default=1)
                    for alternative in range(alternatives):
                        yield form, text_of(form, alternative)
