"""The progress of a run for people: aligned lines, notes, and a summary at the end.

All output is plain ASCII lines without control codes, so that a terminal, a pipe and a job's log
file show the same. All of it is also appended to the run log in the run folder, printed or not.
"""

from __future__ import annotations

import io
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megaframe.config import DataConfig, MetricsConfig, RunSection, TrainConfig
from megaframe.config.batch_ramp import count_samples
from megaframe.config.phases import count_tokens_left
from megaframe.extensions.sink import Line, Sink, TextSample
from megaframe.io.output_files import OutputFiles
from megaframe.io.regular_file import open_append
from megaframe.io.run_files import LOG_FILE, METRICS_FILE, SAMPLES_FILE
from megaframe.io.untrusted import escape_unprintable
from megaframe.metrics.sinks import open_growing, replace_nonfinite
from megaframe.metrics.totals import RunTotals

_RECENT_STEPS = 50


class ConsoleSink(Sink):
    """Prints a line every `metrics.every` steps and at the first and last step; its speeds are
    means since the previous line. With metrics.console=quiet, steps are only in the run log. With
    json, each step is printed as an object on its own line, and so are notes and the summary.

    ending: may be set to names and texts that the summary shows last.
    """

    def __init__(
        self,
        train: TrainConfig,
        data: DataConfig,
        metrics: MetricsConfig,
        start_step: int,
        files: OutputFiles,
    ) -> None:
        self._train, self._data, self._metrics = train, data, metrics
        self._folder = files.folder
        self._start_step = start_step
        self._columns = choose_column_widths(train.steps)
        self._has_header = False
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT_STEPS + 1)
        """Seconds and tokens of the last steps."""
        self._run, self._since = RunTotals(), RunTotals()
        self.ending: Sequence[tuple[str, str]] = ()
        self._log = open_growing(files, LOG_FILE)
        self._can_print = True

    def note(self, text: str) -> None:
        """Print a text that is not the line of a step."""
        self._print(text, {"note": text})

    def log_detail(self, text: str) -> None:
        """Put a text that few users need into the run log only."""
        self._log.append(f"{text}\n".encode(errors="backslashreplace"))

    def write(self, line: Line) -> None:
        step, last = line["step"], self._train.steps
        if self._metrics.console == "json":
            self._show(json.dumps(replace_nonfinite(line), allow_nan=False))
        self._run.add(line)
        self._since.add(line)
        self._recent.append((line["seconds"], line["tokens"]))
        first = step == self._start_step + 1
        if first or step == last or step % self._metrics.every == 0:
            if not self._has_header:
                self._has_header = True
                self._print(align(self._columns, list(self._columns)), None)
            self._print(align(self._columns, self._format_cells(line)), None)
            self._since = RunTotals()
        if line.get("eval_loss") is not None:
            self._print(format_evaluation(line), None)
        for task, scores in line.get("eval_tasks", {}).items():
            shown = ", ".join(f"{name} {score:.4f}" for name, score in scores.items())
            self._print(f"step {line['step']}: task {task}: {shown}", None)

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Print samples, a line each."""
        for sample in samples:
            text = f"step {step}: {sample.prompt!r} goes on {sample.text!r}"
            self._print(text, {"sample": {"step": step, **vars(sample)}})

    def rewind(self, step: int) -> None:
        """Begin the summary anew after `step`; what was printed stays."""
        self._run, self._since = RunTotals(), RunTotals()
        self._start_step = step

    def close(self) -> None:
        """Print the summary."""
        if self._run.steps:
            files = [METRICS_FILE, LOG_FILE]
            files += [SAMPLES_FILE] * bool(self._train.sample_every)
            files += ["tensorboard"] * self._metrics.tensorboard
            files += ["wandb"] * (self._metrics.wandb is not None)
            places = f"{self._folder}: {', '.join(files)}"
            rows = [*self._run.summarize(self._start_step), ("files", places), *self.ending]
            self._print(format_table("Summary", rows), {"summary": dict(rows)})

    def _format_cells(self, line: Line) -> list[str]:
        return [
            f"{line['step']}/{self._train.steps}",
            format_number(line["loss"], ".4f"),
            format_number(line["grad_norm"], ".3f"),
            format_number(line["lr"], ".2e"),
            format_number(self._since.tokens_per_second, ",.0f"),
            format_number(self._since.compute_mean("tflops_per_second"), ".4g"),
            format_number(self._since.compute_mean("mfu"), ".1%"),
            format_number(self._since.seconds / self._since.steps, ".4g"),
            format_duration(self._predict_seconds_left(line)),
        ]

    def _predict_seconds_left(self, line: Line) -> float:
        """Return how long the tokens of all steps after a line's take, at the speed of the last
        ones. With `train.batch_ramp` a step has more of them later."""
        # The oldest is left out, because the first step of a run includes warm-up.
        seconds, tokens = zip(*(list(self._recent)[1:] or self._recent), strict=True)
        train, step = self._train, line["step"]
        seen = round(sum(line["sources"])) if "sources" in line else count_samples(train, step)
        left = count_tokens_left(train, self._data, step, seen)
        return left * sum(seconds) / sum(tokens)

    def _print(self, text: str, json_form: Mapping[str, Any] | None) -> None:
        """Log `text` and, depending on `metrics.console`, print it.

        Args:
            text: The text.
            json_form: The same for JSON; None for the text of a step.
        """
        text, how = escape_unprintable(text), self._metrics.console
        if how == "lines" or (how == "quiet" and json_form is not None):
            self._show(text)
        elif how == "json" and json_form is not None:
            self._show(json.dumps(json_form))
        self.log_detail(text)

    def _show(self, text: str) -> None:
        """Print a text. A full disk under the output, or a closed pipe, does not end the run."""
        try:
            print(text, flush=True)
            self._can_print = True
        except OSError as error:
            if self._can_print:
                self.log_detail(f"warning: standard output takes no more lines: {error.strerror}")
            self._can_print = False


def print_note(run: RunSection, metrics: MetricsConfig, text: str) -> None:
    """Print a note of a rank that has no sink, and append it to the run log, if that is there."""
    text = escape_unprintable(text)
    output = json.dumps({"note": text}) if metrics.console == "json" else text
    folder = Path(run.dir)
    with suppress(OSError):
        print(output, flush=True)
    with suppress(OSError):
        # The first rank makes the log, also again if it was deleted.
        if (folder / LOG_FILE).exists():
            with open_append(folder / LOG_FILE, inside=folder) as log:
                log.write(f"{text}\n".encode())


def choose_column_widths(steps: int) -> dict[str, int]:
    """Return names and widths of the columns of a line."""
    widths = {"loss": 9, "grad norm": 10, "lr": 10, "tokens/s": 11, "TFLOP/s": 9, "MFU": 7}
    return {"step": max(9, 2 * len(str(steps)) + 1), **widths, "seconds": 9, "ETA": 9}


def align(columns: dict[str, int], cells: list[str]) -> str:
    """Return cells as one line, right-aligned to the columns' widths and separated by spaces."""
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, columns.values(), strict=True))


def format_number(value: Any, form: str) -> str:
    """Format a number; what is unknown is n/a."""
    return "n/a" if value is None else format(value, form)


def format_duration(seconds: float) -> str:
    """Format seconds for people: 45s, 3m 05s, 2h 08m, 3d 04h."""
    if not math.isfinite(seconds):
        return "n/a"
    rounded = round(seconds)
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if rounded >= size:
            return f"{rounded // size}{unit} {rounded % size // smaller:02d}{smaller_unit}"
    return f"{rounded // 60}m {rounded % 60:02d}s" if rounded >= 60 else f"{rounded}s"


def format_evaluation(line: Line) -> str:
    """Return the sentence about an evaluation, with perplexity and bits per byte if known."""
    text = f"step {line['step']}: validation loss {line['eval_loss']:.4f}"
    if line.get("eval_perplexity") is not None:
        text += f", perplexity {line['eval_perplexity']:.4g}"
    if line.get("eval_bits_per_byte") is not None:
        text += f", {line['eval_bits_per_byte']:.4f} bits per byte"
    return text


def format_table(title: str, rows: list[tuple[str, str]]) -> str:
    """Format rows of a name and a value as text."""
    grid = Table(title=title, show_header=False, box=None, title_justify="left")
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    text = io.StringIO()
    # No markup, because a path may contain brackets; wide, so that all can be copied whole.
    width = 1000 + max((len(value) for _, value in rows), default=0)
    Console(file=text, width=width, color_system=None, markup=False, emoji=False).print(grid)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
