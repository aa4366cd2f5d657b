"""The report of a run: its config, its speed, where the peak was lost, and what to try next.

It is written once, as Markdown. The HTML report is that text, converted by the few rules of
Markdown that it uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from megaframe.dashboard.remedies import suggest_remedies
from megaframe.dashboard.run_folder import RunFolder, get_config_value
from megaframe.dashboard.summary import (
    advise_batch_of_run,
    compute_mean_losses,
    compute_predicted_losses,
    label_cause,
    summarize_run,
)
from megaframe.io.http import CONTENT_SECURITY_POLICY
from megaframe.io.untrusted import sanitize_text

REPORT_FILES = "report.md", "report.html"
_CONFIG = (
    "model.layers", "model.hidden", "model.heads", "model.vocab", "train.seq",
    "train.global_batch", "train.microbatch", "train.precision", "train.recompute",
    "optim.name", "optim.lr", "parallel.tensor", "parallel.context", "parallel.pipeline",
    "parallel.expert", "parallel.zero", "parallel.schedule",
)  # fmt: skip
_MOST_EVENTS = 100
_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } .scroll { overflow-x: auto }
th, td { border-bottom: 1px solid #8886; padding: .2rem .8rem .2rem 0; text-align: left }
td, li, h1 { overflow-wrap: anywhere }
"""


def render_report(
    run: RunFolder, prediction: Mapping[str, Any] | None = None, planner: Sequence[str] = ()
) -> str:
    """Return the report as Markdown.

    Args:
        run: The run.
        prediction: As `panels.compute_predicted_losses` takes it, if there is one.
        planner: The planner's suggestions, or why it has none.
    """
    return "\n".join(_render_lines(run, prediction, planner)) + "\n"


def _render_lines(
    run: RunFolder, prediction: Mapping[str, Any] | None, planner: Sequence[str]
) -> Iterator[str]:
    yield f"# {_escape_markdown(run.name)}"
    if run.notes:
        yield ""
        yield from (f"- note: {_escape_markdown(note)}" for note in run.notes)
    yield from ("", "## What")
    environment = {key: run.environment.get(key) for key in ("layout", "device", "torch", "commit")}
    settings = {key: get_config_value(run.config, key) for key in _CONFIG} | environment
    rows = [[key, str(value)] for key, value in settings.items() if value is not None]
    yield from render_table(["", ""], rows)
    yield from ("", "## How fast")
    yield from render_table(["", ""], summarize_run(run))
    lost = compute_mean_losses(run)
    if not lost:
        yield from ("", "There are no metrics of where the time went.")
        return
    yield from ("", "## Where the peak was lost")
    yield from ("", "From the full peak down to the MFU, over all steps except the first.", "")
    expected = compute_predicted_losses(prediction) if prediction else {}
    causes = sorted(
        (c for c in {**lost, **expected} if c != "mfu"), key=lambda c: -lost.get(c, 0.0)
    )
    shown_causes = [c for c in causes if max(lost.get(c, 0.0), expected.get(c, 0.0)) >= 5e-4]
    rows = []
    for cause in [*shown_causes, *(["mfu"] if "mfu" in lost else [])]:
        row = [label_cause(cause), f"{lost.get(cause, 0.0):.1%}"]
        rows.append([*row, f"{expected.get(cause, 0.0):.1%}"] if expected else row)
    yield from render_table(["cause", "of the peak", *(["predicted"] if expected else [])], rows)
    events = list(run.list_events())
    counts = {kind: sum(e.kind == kind for e in events) for kind in ("restart", "skip")}
    if any(counts.values()):
        yield from ("", "## What happened", "")
        happened = [f"- {event.text}" for event in events if event.kind != "checkpoint"]
        yield from happened[:_MOST_EVENTS]
        if len(happened) > _MOST_EVENTS:
            yield f"- and {len(happened) - _MOST_EVENTS:,} more"
    yield from ("", "## What to try next", "")
    sentences = [f"- **{label_cause(cause)}**: {text}." for cause, text in suggest_remedies(lost)]
    yield from sentences or ["- Nothing costs more than 2% of the peak."]
    if (advice := advise_batch_of_run(run)) is not None:
        yield f"- **critical batch**: {_escape_markdown(advice)}."
    if planner:
        yield f"- **the planner**: {_escape_markdown('; '.join(planner))}."


class PageLink(NamedTuple):
    """A cell of a table that leads to another page.

    Attributes:
        text: What is shown.
        target: A relative address, quoted as addresses are.
    """

    text: str
    target: str

    def __str__(self) -> str:
        return self.text


def render_html(markdown: str, *, refresh: int | None = None) -> str:
    """Return the report as a self-contained HTML page, which a browser loads again every `refresh`
    seconds."""
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">'
    title = markdown.splitlines()[0].removeprefix("# ")
    body = "\n".join(_render_blocks(markdown.splitlines()))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{again}'
        f"<title>{_render_text(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _render_blocks(lines: Sequence[str]) -> Iterator[str]:
    """Convert headings, lists, tables and paragraphs, as `render_report` writes them, to HTML."""
    position = 0
    while position < len(lines):
        line = lines[position]
        start = position
        position += 1
        if line.startswith("#"):
            depth = len(line) - len(line.lstrip("#"))
            yield f"<h{depth}>{_render_text(line[depth + 1 :])}</h{depth}>"
        elif line.startswith(("- ", "|")):
            while position < len(lines) and lines[position].startswith(line[0]):
                position += 1
            block = lines[start:position]
            yield _render_list(block) if line.startswith("- ") else _render_grid(block)
        elif line:
            yield f"<p>{_render_text(line)}</p>"


def _render_list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{_render_text(line[2:])}</li>" for line in lines) + "</ul>"


def _render_grid(lines: Sequence[str]) -> str:
    """Convert a table: its heads, the rule below them, and its rows. Empty heads are left out."""
    heads, _, *rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])] for line in lines
    ]
    grid = _render_row(heads, "th") if any(heads) else ""
    grid += "".join(_render_row(row, "td") for row in rows)
    return f'<div class="scroll"><table>{grid}</table></div>'


def _render_row(cells: Sequence[str], element: str) -> str:
    inside = "".join(f"<{element}>{_render_text(cell)}</{element}>" for cell in cells)
    return f"<tr>{inside}</tr>"


def _render_text(text: str) -> str:
    """Convert Markdown inside a line to HTML, in which the only elements are bold and links."""
    bold = re.sub(r"(?<!\\)\*\*(.+?)(?<!\\)\*\*", r"<b>\1</b>", escape(text))
    link = re.sub(r"(?<!\\)\[(.+?)(?<!\\)\]\(([\w./%~-]+)\)", r'<a href="\2">\1</a>', bold)
    return re.sub(r"\\(&lt;|[\\`*_\[\]|#])", r"\1", link)


def _render_cell(cell: str | PageLink) -> str:
    if isinstance(cell, PageLink):
        return f"[{_escape_markdown(cell.text)}]({cell.target})"
    return _escape_markdown(cell)


def _escape_markdown(text: str) -> str:
    """Escape text so that Markdown treats all of it as plain text."""
    return re.sub(r"([\\`*_\[\]<|#])", r"\\\1", sanitize_text(" ".join(text.split())))


def render_table(heads: Sequence[str], rows: Sequence[Sequence[str | PageLink]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, whose cells may have any text."""
    yield ""
    for number, row in enumerate([heads, *rows]):
        yield "| " + " | ".join(map(_render_cell, row)) + " |"
        if number == 0:
            yield "|" + "---|" * len(heads)
