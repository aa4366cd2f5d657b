"""Makes use of what `gpu_check.py` measured: a result is all that must come back from a GPU.

    python benchmarks/gpu/apply_results.py [RESULT.json|FOLDER ...]

By default it reads `benchmarks/results/*/`. It writes the order of kernels of each chip into
`choices.json`, what the planner knows of the chip into `measured_constants.json`, the table of
goals in docs/guides/gpu.md, the README's line and the plot. Chips are never mixed: each has its own
order, constants and column. Nothing is written of a dry run. It writes the same again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
from gpu_goals import evaluate_goals  # noqa: E402
from gpu_results import RESULTS, derive, list_results, merge  # noqa: E402
from gpu_steps import STEPS  # noqa: E402
from time_limit import write_text  # noqa: E402

CHOICES = ROOT / "kernels" / "megaframe_kernels" / "choices.json"
CONSTANTS = ROOT / "megaframe" / "planner" / "measured_constants.json"
GUIDE = ROOT / "docs" / "guides" / "gpu.md"
README = ROOT / "README.md"
PLOT = ROOT / "docs" / "images" / "gpu.svg"
_TABLE = "<!-- goals, by benchmarks/gpu/apply_results.py -->", "<!-- end of goals -->"
_LINE = "<!-- gpu, by benchmarks/gpu/apply_results.py -->", "<!-- end of gpu -->"
_MEASURED = ("product", "start", "attention", "memory", "launch")
_ROW = "llama-8b-slice"
_GUIDE = "[docs/guides/gpu.md](docs/guides/gpu.md)"
Chips = Mapping[str, dict[str, Any]]


def read_chips(places: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return what is known of each chip: the files of all steps together, with what they are about.
    A step is measured anew after every mend, so steps may be of different commits."""
    names = {step.name for step in STEPS}
    chips: dict[str, dict[str, Any]] = {}
    for path, content in list_results(places):
        # Files that were kept aside have the name of their commit too.
        if content["dry"] or (path.parent in places and path.stem not in names):
            continue
        known = chips.setdefault(content["chip"], {"commits": [], "chip": content["chip"]})
        versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
        known |= merge(known, content)
        known |= {"device": content["device"], "versions": versions}
        known["commits"] = [*dict.fromkeys([*known["commits"], content["commit"]])]
    return {chip: {**known, **derive(known)} for chip, known in sorted(chips.items())}


def write_choices(chips: Chips, path: Path) -> None:
    """Write the measured order of each chip into the table from which implementations are
    chosen."""
    from megaframe_kernels.registry import KERNELS

    table = json.loads(path.read_text(encoding="utf-8"))
    for chip, known in chips.items():
        # Results may name what has been taken out since.
        exist = {
            kernel: [name for name in names if name in KERNELS[kernel].implementations]
            for kernel, names in known["order"].items()
            if kernel in KERNELS
        }
        if order := {kernel: names for kernel, names in exist.items() if names}:
            table[chip] = {**table.get(chip, {}), **order}
    entries = (
        ",\n".join(
            f"    {json.dumps(kernel)}: {json.dumps(names)}" for kernel, names in each.items()
        )
        for each in table.values()
    )
    parts = (f"  {json.dumps(c)}: {{\n{e}\n  }}" for c, e in zip(table, entries, strict=True))
    write_text(path, "{\n" + ",\n".join(parts) + "\n}\n")


def write_constants(chips: Chips, path: Path) -> None:
    """Write the measured constants of each chip that the planner knows by its datasheet."""
    from megaframe.hardware.chips import find_chip

    table = json.loads(path.read_text(encoding="utf-8"))
    for known in chips.values():
        chip, constants = find_chip(known["device"]), known["constants"] or {}
        numbers = {name: constants.get(name) for name in _MEASURED}
        if chip is None or not all(_is_number(number) for number in numbers.values()):
            continue
        rounded = {name: float(f"{number:.3g}") for name, number in numbers.items()}
        table[chip.name] = {**rounded, "measured_on": describe(known)}
    write_text(path, json.dumps(table, indent=2) + "\n")


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= 0


def describe(known: Mapping[str, Any]) -> str:
    """Return in words on what something was measured."""
    return f"{known['device']}, {known['versions']}, commit {' and '.join(known['commits'])}"


def format_goals(chips: Chips) -> str:
    """Return the table of all goals, with a column for each chip."""
    goals = evaluate_goals({"chip": "h200", **merge({}, {}), "chosen_over_best": []})
    header = ["goal", "to reach on one H200", *(known["device"] for known in chips.values())]
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    measured = [{goal["name"]: goal for goal in known["goals"]} for known in chips.values()]
    for goal in goals:
        cells = [goal["name"], f"{'at most' if goal['most'] else 'at least'} {goal['reach']:,g}"]
        lines.append(" | ".join([*cells, *(_format_cell(by.get(goal["name"])) for by in measured)]))
    notes = [f"{known['device']}: {describe(known)}." for known in chips.values()]
    return "\n".join([*(f"| {line} |" for line in lines), *(["", *notes] if notes else [])])


def _format_cell(goal: Mapping[str, Any] | None) -> str:
    if goal is None:
        return ""
    met = {True: " (met)", False: " (missed)", None: ""}[goal["met"]]
    return f"{goal['measured']:,.4g}{met}"


def format_line(chips: Chips) -> str:
    """Return the README's line: how fast a slice of a large model trains on each chip."""
    sentences = []
    for known in chips.values():
        row = {row["row"]: row for row in known["training"]}.get(_ROW, {})
        ours = row.get("ours", {})
        if "tokens_per_second" not in ours:
            continue
        text = f"On one {known['device']} a slice of Llama 3 8B trains with "
        text += f"{ours['tokens_per_second']:,.0f} tokens/s"
        if ours.get("mfu_causal") is not None:
            text += f", an MFU of {ours['mfu_causal']:.1%}"
        if "times_plain" in row:
            text += f", {row['times_plain']:.2f} times plain PyTorch under torch.compile"
        sentences.append(f"{text}.")
    if not sentences:
        text = (
            f"Nothing here has run on a GPU or over NCCL yet; {_GUIDE} says what is tested and how."
        )
        return text
    return f"{' '.join(sentences)} {_GUIDE} has all goals, and what has not run yet."


def replace_between(text: str, marks: Sequence[str], new: str) -> str:
    """Return a text with `new` between two marks.

    Raises:
        SystemExit: The marks are not there.
    """
    first, last = marks
    before, found, rest = text.partition(first)
    _, closed, after = rest.partition(last)
    if not found or not closed:
        sys.exit(f"no text between {first} and {last} to replace")
    return f"{before}{first}\n{new}\n{last}{after}"


def draw(chips: Chips) -> str | None:
    """Return a plot of how close the fastest implementation of each case is to what the GPU
    reaches, as SVG; None if nothing was measured."""
    bars: list[tuple[str, float]] = []
    for known in chips.values():
        for goal in known["goals"]:
            if not goal["most"] and goal["reach"] > 0:
                label = f"{known['device']}: {goal['name']}"
                bars.append((label, goal["measured"] / goal["reach"]))
    if not bars:
        return None
    height, scale = 20 * len(bars) + 30, 240.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="860" height="{height}" '
        f'viewBox="0 0 860 {height}" font-family="sans-serif" font-size="12" fill="#777">',
        '<text x="8" y="16">measured, as a share of the goal (line)</text>',
    ]
    for number, (label, share) in enumerate(bars):
        y = 28 + 20 * number
        colour = "#0b6e4f" if share >= 1 else "#b8bcc2"
        width = scale * min(share, 1.6)
        parts.append(f'<text x="8" y="{y + 12}">{escape(label)}</text>')
        parts.append(f'<rect x="420" y="{y}" width="{width:.1f}" height="15" fill="{colour}"/>')
        parts.append(f'<text x="{424 + width:.1f}" y="{y + 12}">{share:.2f}</text>')
    x = 420 + scale
    parts.append(f'<line x1="{x}" x2="{x}" y1="24" y2="{height}" stroke="#777"/>')
    return "\n".join([*parts, "</svg>", ""])


def apply(chips: Chips) -> list[Path]:
    """Write everything that follows from the results. Return the files."""
    write_choices(chips, CHOICES)
    write_constants(chips, CONSTANTS)
    for path, marks, new in (
        (GUIDE, _TABLE, format_goals(chips)),
        (README, _LINE, format_line(chips)),
    ):
        write_text(path, replace_between(path.read_text(encoding="utf-8"), marks, new))
    written = [CHOICES, CONSTANTS, GUIDE, README]
    if (plot := draw(chips)) is not None:
        write_text(PLOT, plot)
        written.append(PLOT)
    return written


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="*", type=Path)
    places = parser.parse_args().results or sorted(p for p in RESULTS.iterdir() if p.is_dir())
    chips = read_chips(places)
    for chip, known in chips.items():
        print(f"{chip}: {describe(known)}; {len(known['goals'])} goals measured")
    for path in apply(chips):
        print(f"wrote {path.relative_to(ROOT)}")
    print(
        "read again what says that nothing has run on a GPU: docs/guides/gpu.md, kernels/README.md"
    )


if __name__ == "__main__":
    main()
