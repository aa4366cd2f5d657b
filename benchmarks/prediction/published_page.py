"""The page of predictions: every row of every table, predicted and measured, and a plot.

The plot is written as plain SVG text, so it needs no library and is the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from own_runs import format_own_runs, predict_own_runs
from published import (
    ErrorSummary,
    PublishedPrediction,
    compute_choice_losses,
    predict_run,
    summarize_errors,
)
from published_bounds import WIDTH, describe_bounds
from published_configs import make_gpt_config
from published_tables import TABLES, PublishedTable

from megaframe.planner.constants import CONSTANTS

_INTRODUCTION = """\
# Predicted and published step times

This page compares step times of other trainers on GPUs, as their authors published them, with \
what `megaframe.planner` predicts for the same model, layout, cluster and software. One command \
makes this page and its plot:

```sh
.venv/bin/python benchmarks/prediction/published.py --write
```

Small tables stand in `benchmarks/prediction/published_runs.py`, as figures with their citation. \
The rows of llm-foundry and vTrain are read from `../shared/anchors` beside the repository. \
Without these files the command says which lines of this page it cannot make again, and leaves \
them as they are.

![predicted against measured](../images/prediction.svg)

{summary}

Errors are relative errors of the step time. **left out**: mean error of all rows of a table, \
predicted with constants that were fitted to all other sources (tables of one publication are left \
out together), and **most**, the largest of these errors; **fitted**: mean error with the shipped \
constants, which were fitted to this source, too. **null**: the mean error of the best constant \
rate for each chip, chosen on all rows of the table itself; **removed**: the part of it that the \
prediction without the source removes. **loses**: where a table has layouts of one model on the \
same ranks, how much slower the layout predicted to be best is than the one that is best, in the \
worst case. Targets are in brackets. All rows and the plot are predictions without their source.

{notes}

## What is fitted, declared and guessed

- **Fitted**: five constants per generation of chips, to at most 14 evenly spaced rows of \
each measured table, all tables alike (`python benchmarks/prediction/published.py --fit h100`, \
which also fits them without each source, to `benchmarks/prediction/left_out.json`). Each has \
physical bounds, with their sources (`benchmarks/prediction/published_fit.py`), and no fit ends at \
one. What kernels reach by themselves was measured on an H200; a fit leaves these figures only for \
what the tables tell.
- **Known**: the share of a link's bandwidth that NCCL was seen to reach, the speeds of kernels of \
attention relative to each other, forward and backward (`megaframe/planner/constants.py`), and the \
clock that a chip's power limit leaves (`megaframe/hardware/chips.csv`).
- **Declared**, from papers and sources (`megaframe/planner/trainers.py`): what overlaps, in how \
many parts, the kernel of attention, what is recomputed, whether the libraries of products have \
persistent kernels for Hopper (`older` is the speed of those before), bytes that are moved beside \
products, microbatches, chunks, and gradients that are sent together.
- **Guessed**: how often elementwise kernels pass over a value, how many kernels are launched, the \
start of a tile (on an A100 5 microseconds, in which a multiprocessor sums 460 terms of 128 x 128 \
results; on an H100 64 terms, because persistent kernels load a tile while they store one), the \
launch of a kernel on hosts of H100 (12 microseconds, which no table shows), and which machine \
vTrain's single node was.
- **Averaged**, where the microbatch is not published (README): the alternatives that fit the chip \
and are within 5% of the fastest. The run may have used any of them, and the least of so many \
would be too low.

{constants}

## A run that no fit has seen

{own}

## Choices made with all rows in view

Constants are tested by the sources that are left out. The form of the model, the guesses and the \
choices below are not: they were made with the errors of all rows in view.

- **README.** Two facts were declared when it missed its limits: two vocabulary tables, without \
which its layers do not add up to its parameters, and chunks of one layer, as in each of NVIDIA's \
recipes of that month that has chunks (NeMo-Megatron-Launcher, 2 July 2024).
- **Libraries of 2025.** With one speed for all years, products that fit an H200 and NVIDIA's \
benchmarks of 2025 leave README 20% and torchtitan and llm-foundry 9% too fast. The year is \
declared, and how much slower the older ones are is fitted.
- **NVIDIA's benchmarks of 2025.** Without their source they were predicted 5.0% too fast, where \
the best constant rate errs by 3.5%. Seven facts were then read in their recipes, in NeMo, \
Megatron-Core and Transformer Engine, and counted for every trainer that they are known of: \
products that add to a sum do not hide its bytes (measured in a step on an H200), sums of \
gradients are in 16 bits, row products leave processors to the scatter of their results, tiles of \
a ring are combined in passes of their own, the table of words has a gradient of its own, the loss \
passes over logits four times, and some gradients of the head wait for the end. What each adds, \
and what is not counted, is in the [log](../log.md#predicted-steps).
- **Contention** of a100 is flat above 1.5, where nothing within a node is hidden; only Zero \
Bubble's transfers between stages determine it.
- **Facts left out.** Sources contain six more facts, from what norms read to how DeepSpeed's \
pipeline sends. None brings vTrain on 64 nodes below 6% \
([log](../log.md#predicted-steps), with numbers).
"""

NOTES = "What is not reached, and why"
"""Title of the section that the following text begins."""
NOTED = ("vtrain_single", "vtrain_multi", "llm_foundry")
"""Tables from whose rows the numbers of that section are computed."""
_NOTES = """\
## What is not reached, and why

- **vTrain on 64 nodes** ({missed}order): rows contradict each other, and according to the table's \
authors their own simulator errs by 14.7% on such runs.
{bounds} {absent}
- **vTrain on one node** (order): these rows are computed by its authors' simulator \
(`src/predictor.py` of VIA-Research/vTrain), although their file calls them measured. Four rows \
with tensor 8 that differ only in microbatches lie on a line to within a nanosecond, 61.894735 ms \
for each. 27 pairs that differ only in data ranks differ by what the simulator's tables of \
all-reduces contain, to 0.1 microseconds. This also holds beyond 1 GB, where its code leaves out \
the factor 2 (d - 1) / d and 8 ranks come out faster than 2. Its computation is one recording of a \
layer for each tensor size, width and microbatch: at width 1024 a pass takes 3.58 ms with tensor 2 \
and microbatches of 2, 3.13 ms with twice the work, and 3.90 ms with that divided by tensor 4. \
These recordings decide which of two layouts is best; {wrong} of {choices} choices lose more than \
1.5%.
- **Megatron-LM's README** (mean, most): its smallest model, on 48 GPUs, is predicted 13% too \
fast. The table gives neither microbatch nor version; what makes that row slower is not known.
- **vTrain on one node** (mean): small passes wait for their host, whose speed no other source \
tells, so it is taken from the host of an H200: 37 microseconds a kernel. The previous constants, \
which had been fitted to these rows, had 45, and erred by 7.4%.
- **llm-foundry**: 13 billion parameters on eight GPUs of 40 GB nearly fill them, and are up to \
{fullest} slower than predicted.
"""


def format_percent(value: float) -> str:
    """Format a share."""
    return f"{100 * value:.1f}%"


def format_summary_header() -> str:
    """Return the header of the table of summaries."""
    columns = "left out | most | fitted | null | removed | loses"
    return f"| table | rows | {columns} |\n|---|---|---|---|---|---|---|---|"


def format_summary_row(table: PublishedTable, errors: ErrorSummary, rows: int | None = None) -> str:
    """Return a line of that table."""

    def format_with_aim(value: float, aim: float | None) -> str:
        return format_percent(value) + ("" if aim is None else f" ({100 * aim:g}%)")

    cells = (
        table.source,
        "" if rows is None else str(rows),
        format_with_aim(errors.mean, table.mean),
        format_with_aim(errors.most, table.most),
        format_percent(errors.fitted),
        format_percent(errors.null),
        format_percent(errors.removed),
        "" if errors.lost is None else format_percent(errors.lost),
    )
    return f"| {' | '.join(cells)} |"


def format_section(table: PublishedTable, lines: Sequence[PublishedPrediction]) -> str:
    """Return all rows of one table, predicted without its source and (last) with it."""
    parts = [
        f"## {table.source}",
        "",
        "| run | microbatch | chunks | measured s | predicted s | error | fitted |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        alike = f", mean of {len(line.near)}" if len(line.near) > 1 else ""
        parts.append(
            f"| {line.row.label} | {line.config.train.microbatch} | "
            f"{line.config.parallel.chunks}{alike} | {line.row.seconds:.4g} | {line.seconds:.4g} | "
            f"{100 * line.error:+.1f}% | {100 * line.fitted_error:+.1f}% |"
        )
    return "\n".join(parts) + "\n"


def predict_unread_run(lines: Sequence[PublishedPrediction]) -> PublishedPrediction:
    """Return the fastest row of 39.1 billion parameters that vTrain's authors publish
    (data/ground_truth_multi.csv of VIA-Research/vTrain). It is not among the rows that are read
    here."""
    like = next(line.row for line in lines if line.config.model.hidden == WIDTH)
    config = make_gpt_config(
        48,
        WIDTH,
        64,
        2048,
        51200,
        1536,
        2,
        "full",
        tensor=4,
        data=32,
        pipeline=4,
        layers_per_stage=(12,) * 4,
    )
    return predict_run(replace(like, configs=(config,), seconds=13.8755))


def _describe_absent(lines: Sequence[PublishedPrediction]) -> str:
    line = predict_unread_run(lines)
    return (
        f"**These {len(lines)} of the authors' 109 rows leave out the fastest** of that model: "
        f"tensor 4, 4 stages, microbatches of 2, {line.row.seconds:.1f} s. It is also predicted to "
        f"be the fastest, {line.seconds:.1f} s. Among all 109 rows the four choices lose 0, 4.5, 0 "
        "and 0.6% ([log](../log.md#predicted-steps))."
    )


def _describe_fullest(lines: Sequence[PublishedPrediction]) -> str:
    """Return the largest error of 13 billion parameters on eight GPUs of 40 GB."""
    errors = [line.error for line in lines if "40gb" in line.row.cluster and line.row.world == 8]
    return f"{-100 * min(errors, default=0.0):.0f}%"


def _format_notes(predictions: Mapping[str, Sequence[PublishedPrediction]]) -> str:
    """Return what is not reached, with what can be computed about it from the available tables."""
    single, several = predictions.get("vtrain_single", ()), predictions.get("vtrain_multi", ())
    lost = list(compute_choice_losses(single))
    aim = TABLES["vtrain_multi"].mean
    over = several and aim is not None and summarize_errors(several).mean > aim
    return _NOTES.format(
        missed="mean, " if over else "",
        bounds=describe_bounds([line.row for line in several]) if several else "",
        absent=_describe_absent(several) if several else "",
        wrong=sum(loss > 0.015 for loss in lost),
        choices=len(lost),
        fullest=_describe_fullest(predictions.get("llm_foundry", ())),
    ).rstrip()


def find_section(page: str, title: str) -> range:
    """Return the numbers of a section's lines, the first of the page being 1. The last line has
    text."""
    lines = page.splitlines()
    first = lines.index(f"## {title}")
    following = (n for n in range(first + 1, len(lines)) if lines[n].startswith("## "))
    end = next(following, len(lines))
    while not lines[end - 1]:
        end -= 1
    return range(first + 1, end + 1)


def find_row(page: str, table: PublishedTable) -> int:
    """Return the number of the line that summarises a table."""
    start = f"| {table.source} |"
    return 1 + next(n for n, line in enumerate(page.splitlines()) if line.startswith(start))


def describe_missing(page: str, name: str, missing_file: str) -> str:
    """Say which lines of the page cannot be made without the file of a table."""
    table = TABLES[name]
    lines = [range(find_row(page, table), find_row(page, table) + 1)]
    if name in NOTED:
        lines.append(find_section(page, NOTES))
    lines.append(find_section(page, table.source))
    numbers = ", ".join(f"{n[0]}-{n[-1]}" if len(n) > 1 else str(n[0]) for n in lines)
    return (
        f"{missing_file} is missing: lines {numbers} of docs/reference/prediction.md "
        f"({table.source}) cannot be made again"
    )


def format_page(
    predictions: Mapping[str, Sequence[PublishedPrediction]], previous: str | None = None
) -> str:
    """Return the whole page.

    Args:
        predictions: The predicted rows of tables, by the table's name.
        previous: A page from which the lines of tables without predictions are taken. Without it
            these tables are left out.
    """
    lines = previous.splitlines() if previous else []

    def take(section: range) -> str:
        return "\n".join(lines[section[0] - 1 : section[-1]])

    rows, sections = [format_summary_header()], []
    for name, table in TABLES.items():
        if name in predictions:
            errors = summarize_errors(predictions[name])
            rows.append(format_summary_row(table, errors, len(predictions[name])))
            sections.append(format_section(table, predictions[name]))
        elif previous:
            rows.append(lines[find_row(previous, table) - 1])
            sections.append(take(find_section(previous, table.source)) + "\n")
    names = ("product", "older", "start", "attention", "memory", "launch", "contention")
    constants = [f"| | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for family in ("a100", "h100"):
        values = (f"{getattr(CONSTANTS[family], name):g}" for name in names)
        constants.append(f"| {family} | {' | '.join(values)} |")
    if previous and not all(name in predictions for name in NOTED):
        notes = take(find_section(previous, NOTES))
    else:
        notes = _format_notes(predictions)
    head = _INTRODUCTION.format(
        summary="\n".join(rows),
        constants="\n".join(constants),
        notes=notes,
        own=format_own_runs(predict_own_runs()),
    )
    return head.rstrip() + "\n\n" + "\n".join(sections)


_COLOURS = (
    "#0b6e4f",
    "#c1440e",
    "#2b59c3",
    "#8e44ad",
    "#b8860b",
    "#008b8b",
    "#d6336c",
    "#555555",
    "#7fb800",
    "#3fa7d6",
    "#6b4226",
)


def draw_plot(predictions: Mapping[str, Sequence[PublishedPrediction]]) -> str:
    """Plot predicted against measured seconds, both logarithmic, with a line where they are equal
    and lines at 10% from it."""
    width, height, left, top, side = 760, 560, 60, 20, 480
    times = [line.row.seconds for lines in predictions.values() for line in lines]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))

    def place(seconds: float) -> float:
        return (math.log10(seconds) - low) / (high - low) * side

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for power in range(low, high + 1):
        at = place(10.0**power)
        x, y = left + at, top + side - at
        label = f"{10.0**power:g} s"
        out += [
            f'<path d="M{x:.1f} {top}V{top + side}M{left} {y:.1f}H{left + side}" '
            'stroke="#ddd" fill="none"/>',
            f'<text x="{x:.1f}" y="{top + side + 16}" text-anchor="middle">{label}</text>',
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    for factor, dash in ((1.0, ""), (1.1, ' stroke-dasharray="3 3"'), (1 / 1.1, "")):
        move = place(factor * 10.0**low)
        dash = "" if factor == 1 else ' stroke-dasharray="3 3"'
        out.append(
            f'<path d="M{left} {top + side - move:.1f}L{left + side} {top - move:.1f}" '
            f'stroke="#999" fill="none"{dash}/>'
        )
    for number, (name, lines) in enumerate(predictions.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        for line in lines:
            x = left + place(line.row.seconds)
            y = top + side - place(line.seconds)
            out.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.6"/>'
            )
        y = top + 14 + 20 * number
        out += [
            f'<circle cx="{left + side + 20}" cy="{y - 4}" r="4" fill="{colour}"/>',
            f'<text x="{left + side + 30}" y="{y}">{TABLES[name].source.split(",")[0]}'
            f"{' (' + name[-5:].lstrip('_') + ')' if name.startswith(('vtrain', 'sc21')) else ''}"
            "</text>",
        ]
    out.append(
        f'<text x="{left + side / 2}" y="{height - 12}" text-anchor="middle">measured</text>'
    )
    out.append(f'<text x="{left}" y="14">predicted</text></svg>')
    return "\n".join(out) + "\n"
