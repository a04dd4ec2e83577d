"""README's commands exist, and its figures are those of the records."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from html import escape
from pathlib import Path

from oxidnn.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_command_of_the_list_is_a_subcommand() -> None:
    listing = README[README.index("```text") :].split("```")[1]
    names = {name for line in listing.splitlines() for name in re.findall(r"oxidnn (\w+)", line)}
    assert names == set(main.commands)  # type: ignore[attr-defined]


def test_both_commands_are_there_for_ci() -> None:
    assert re.findall(r"<!-- ci: (\w+) -->\n```bash\n", README) == ["example", "test"]
    assert "FIGURES" not in README


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_picture_is_of_these_tables() -> None:
    bench = runpy.run_path(str(ROOT / "benches" / "plot.py"))
    drawn = re.findall(r">([^<>]+)</text>", bench["PICTURE"].read_text(encoding="utf-8"))
    rows = bench["rows_of"](README)
    assert len(rows) > 60
    texts = Counter(escape(title.removesuffix(bench["EAGER"]), quote=False) for title, *_ in rows)
    texts += Counter(f"{mean:.2f}" for _, _, mean, _ in rows)
    assert texts <= Counter(drawn), f"run python benches/plot.py: {texts - Counter(drawn)}"
    assert len(drawn) == texts.total() + 2 * 9, "run python benches/plot.py: rows are drawn that are gone (beside ticks and labels)"
