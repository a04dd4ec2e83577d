"""Draws README's tables of ratios as one picture, benches/ratios.svg: each row's worst, geometric mean and best against its peer.

    python benches/plot.py

A dot is the mean, its line reaches from the worst shape to the best, and the grey line at 1 is the peer.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "benches" / "ratios.svg"
NARROWEST, WIDEST = 0.72, 8.0  # ratios beyond end there, with an arrow
EAGER = " against eager PyTorch"  # rows of a panel of their own
WIN, LOSS, PEER = "#1f77b4", "#d62728", "#808080"


def rows_of(text: str) -> list[tuple[str, float, float, float]]:
    """(work, worst, mean, best) of the rows of tables with those columns; a peer that no row names is named in the heading."""
    rows, names, peer = [], [], ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            names = []
        elif not names:
            names = cells
            peer = next((c.removeprefix("against ") for c in cells if c.startswith("against ") and "worst" in cells), "")
        elif {"worst", "best"} <= set(names) and len(cells) == len(names) and not set(cells[0]) <= set("-:"):
            mean = cells[names.index("geometric mean" if "geometric mean" in names else f"against {peer}")]
            found = [re.match(r"([\d.]+)x", cell) for cell in (cells[names.index("worst")], mean, cells[names.index("best")])]
            if all(found):
                worst, middle, best = (float(match[1]) for match in found if match)
                title = cells[0] if "against" in cells[0] else f"{cells[0]} against {peer}"
                rows.append((title.replace("`", ""), worst, middle, best))
    return rows


def draw(rows: list[tuple[str, float, float, float]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "oxidnn", "font.size": 8, "font.sans-serif": ["DejaVu Sans", "Arial"]})
    eager = [(title.removesuffix(EAGER), *ratios) for title, *ratios in rows if title.endswith(EAGER)]
    panels = {"times as fast as the library named": [row for row in rows if not row[0].endswith(EAGER)],
              "times as fast as eager PyTorch": eager}
    longest = max(map(len, panels.values()))
    figure, both = plt.subplots(1, 2, figsize=(13, 0.19 * longest + 0.8), width_ratios=(1, 1), gridspec_kw={"wspace": 0.75})
    for axes, (label, shown) in zip(both, panels.items(), strict=True):
        axes.axvline(1, color=PEER, linewidth=1)
        for y, (title, worst, mean, best) in enumerate(shown):
            colour = WIN if mean >= 1 else LOSS
            axes.plot([worst, min(best, WIDEST)], [y, y], color=colour, linewidth=1.5, alpha=0.5)
            axes.plot([min(mean, WIDEST)], [y], "o", color=colour, markersize=4)
            if best > WIDEST:
                axes.plot([WIDEST], [y], ">", color=colour, markersize=4, clip_on=False)
            axes.text(WIDEST * 1.1, y, f"{mean:.2f}", va="center")
            axes.text(NARROWEST * 0.95, y, title, va="center", ha="right")
        axes.set_xscale("log")
        axes.set_xlim(NARROWEST, WIDEST)
        axes.set_ylim(longest - 0.4, -0.6)
        axes.set_xticks(ticks := (0.8, 1, 1.5, 2, 3, 4, 6, 8), map(str, ticks))
        axes.minorticks_off()
        axes.set_yticks([])
        axes.grid(axis="x", linewidth=0.4)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.set_xlabel(label)
    figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    draw(rows_of((ROOT / "README.md").read_text(encoding="utf-8")))
