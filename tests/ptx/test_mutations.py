"""Broken copies of the corpus: what the assembler refuses, parser, table and validator refuse as well."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from oxidnn import ptx
from oxidnn.errors import PtxError

from .assembler import assemble

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.ptx"))
_TYPES = (
    "pred",
    "b8",
    "u8",
    "b16",
    "u16",
    "s16",
    "b32",
    "u32",
    "s32",
    "f32",
    "b64",
    "u64",
    "s64",
    "f64",
    "f16",
    "bf16x2",
)
_STATEMENT = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*)((?:\.[\w:]+)*)", re.MULTILINE)


def refused(text: str) -> str:
    """Why the room refuses the text, "" if it does not."""
    try:
        ptx.validate(ptx.parse(text))
        return ""
    except PtxError as error:
        return str(error)


def heads(text: str) -> Iterator[re.Match[str]]:
    """One match per distinct instruction name of a kernel's body."""
    seen = set()
    for match in _STATEMENT.finditer(text, text.index("\n{")):
        if match[0].strip().split(" ")[-1] not in seen:
            seen.add(match[0].strip().split(" ")[-1])
            yield match


def misspelt(text: str) -> Iterator[tuple[str, str]]:
    """Every modifier of every distinct instruction, with its last letter doubled or dropped."""
    for match in heads(text):
        place = match.start(2)
        for modifier in match[2].split(".")[1:]:
            start = place + 1
            place = start + len(modifier)
            for wrong in (modifier + modifier[-1], modifier[:-1]):
                if wrong:
                    yield f"{match[1]}{match[2]}: .{modifier} -> .{wrong}", text[:start] + wrong + text[place:]


def retyped(text: str) -> Iterator[tuple[str, str]]:
    """Every type modifier of every distinct instruction replaced by each other type."""
    for match in heads(text):
        place = match.start(2)
        for modifier in match[2].split(".")[1:]:
            start = place + 1
            place = start + len(modifier)
            if modifier in _TYPES:
                for other in _TYPES:
                    if other != modifier:
                        yield f"{match[1]}{match[2]}: .{modifier} -> .{other}", text[:start] + other + text[place:]


def redeclared(text: str) -> Iterator[tuple[str, str]]:
    """Every `.reg` line with each other type."""
    for match in re.finditer(r"\.reg \.(\w+)", text):
        for other in ("pred", "b16", "u16", "f16", "b32", "s32", "f32", "b64", "s64", "f64"):
            if other != match[1]:
                line = text.count("\n", 0, match.start()) + 1
                yield (
                    f"line {line}: .reg .{match[1]} -> .{other}",
                    text[: match.start(1)] + other + text[match.end(1) :],
                )


def undeclared(text: str) -> Iterator[tuple[str, str]]:
    """Every register declaration without one of its names."""
    for match in re.finditer(r"\.reg \.\w+ ([^;]*);", text):
        names = match[1].split(", ")
        for index, name in enumerate(names):
            rest = ", ".join(names[:index] + names[index + 1 :])
            replacement = f"{match[0][: match[0].index('%')]}{rest};" if rest else ""
            yield f"without {name}", text[: match.start()] + replacement + text[match.end() :]


def reshaped(text: str) -> Iterator[tuple[str, str]]:
    """Every distinct instruction without its last operand, and with it twice."""
    for match in heads(text):
        end = text.index(";", match.end())
        operands = text[match.end() : end]
        cut = operands.rfind(",")
        if cut >= 0 and "]" not in operands[cut:] and "}" not in operands[cut:]:
            yield f"{match[0].strip()} without its last operand", text[: match.end() + cut] + text[end:]
            yield f"{match[0].strip()} with its last operand twice", text[:end] + operands[cut:] + text[end:]


# What the room refuses and the assembler lets pass: silent truncation, misalignment, bytes outside a variable.
_STRICTER = ("does not fit into", "is not a multiple of", "the access needs", "lie outside")
# Single cases: a type that the ISA text does not list, registers of two types in one vector, a stray operand.
_ODD = ("unknown modifier .s32 in mapa", "register %a is .f32, which .", "atom.shared.exch.b32 takes 3 operands, not 4")


@pytest.mark.parametrize("mutate", [misspelt, retyped, redeclared, undeclared, reshaped])
@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_mutants_are_judged_as_the_assembler_judges_them(path: Path, mutate) -> None:  # type: ignore[no-untyped-def]
    text = path.read_text()
    target = re.search(r"\.target (\w+)", text)[1]  # type: ignore[index]
    count = 0
    for what, mutant in mutate(text):
        count += 1
        why = refused(mutant)
        complaint = assemble(mutant, target)
        if complaint:
            assert why, f"{what}: accepted, the assembler says {complaint}"
        elif why:
            assert all(any(word in line for word in (*_STRICTER, *_ODD)) for line in why.splitlines()), f"{what}: {why}"
    assert count > 3
