"""Plots tokens per second and peak memory of all contenders from the results of train_cpu.py.

python benchmarks/cpu/plot.py benchmarks/results/train_cpu.json docs/images/train_cpu.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

OURS, PEER = "#0b6e4f", "#b8bcc2"
MEASURES = (
    ("tokens/s", "%.0f", lambda row: row["speed"]["median"]),
    ("GB at the peak", "%.2f", lambda row: row["peak_rss_bytes"] / 1e9),
)


def draw(results: dict[str, Any], out: Path) -> None:
    """Draw one panel for each measure and precision, with one bar per contender."""
    tables = {precision: part["summary"] for precision, part in results["results"].items()}
    panels = [(precision, measure) for precision in tables for measure in MEASURES]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.1 * len(panels), 2.4))
    for axis, (precision, (unit, form, value)) in zip(axes, panels, strict=True):
        names = [row["name"] for row in tables[precision]]
        values = [value(row) for row in tables[precision]]
        bars = axis.barh(names, values, color=[OURS, *[PEER] * (len(names) - 1)])
        axis.bar_label(bars, fmt=form, padding=2, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(f"{precision}: {unit}", fontsize=9)
        axis.set_xlim(0, 1.25 * max(values))
        axis.tick_params(labelsize=8, bottom=False, labelbottom=False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text(encoding="utf-8")), target)
