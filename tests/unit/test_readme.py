"""README's commands exist, and its figures are those of the records."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


def test_the_first_lines_of_code_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OXIDNN_DEVICE", "emu:sm_90a")
    values: dict[str, Any] = {}
    exec(README.split("```python\n")[1].split("```")[0], values)
    assert "conv_fprop" in capsys.readouterr().out
    wide = {name: np.asarray(values[name]).astype(np.float64) for name in ("x", "w", "bias", "y", "z")}
    padded = np.pad(wide["x"], ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    y = np.einsum("ncpqrs,kcrs->nkpq", windows, wide["w"], optimize=True)
    np.testing.assert_allclose(wide["y"], y, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(wide["z"], np.maximum(y + wide["bias"][:, None, None], 0), rtol=1e-4, atol=1e-4)


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
