"""Where the lines of a run go: always metrics.jsonl, and TensorBoard, Weights & Biases and
Prometheus on request.

Every sink gets the same line, and `flatten()` gives its values the same names everywhere. Every
sink continues a resumed run on one curve: what a killed process wrote about later steps is cut off
or hidden.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from megaframe.config import RunConfig
from megaframe.config.part_calls import call_part
from megaframe.errors import UserError
from megaframe.extensions.sink import Line, Sink, TextSample
from megaframe.io.output_files import GrowingFile, OutputFiles
from megaframe.io.regular_file import replace_file
from megaframe.io.run_files import METRICS_FILE, SAMPLES_FILE
from megaframe.io.untrusted import open_file
from megaframe.io.wandb_run import InvalidWandbId, start_wandb_run
from megaframe.metrics.extension_sink import GuardedSink

_ROWS = ("ranks", "experts/tokens")
_LONGEST_LINE = 1 << 24
"""Bytes of the longest line that is read; one with rows of ten thousand ranks is a tenth of it."""


def open_sinks(config: RunConfig, start_step: int, files: OutputFiles) -> list[Sink]:
    """Return the sinks that the config asks for, set to continue after `start_step`.

    Args:
        config: The run.
        start_step: The step from which this process continues.
        files: Those of the run.

    Raises:
        UserError: If an extra is missing, the run folder cannot be used, or the sink of an
            extension cannot be made.
    """
    sinks: list[Sink] = [JsonlSink(files, start_step)]
    if config.train.sample_every:
        sinks.append(SampleSink(files, start_step, SAMPLES_FILE))
    if config.metrics.tensorboard:
        sinks.append(TensorBoardSink(files, start_step))
    if config.metrics.wandb is not None:
        sinks.append(
            WandbSink(files, config.metrics.wandb, config.model_dump(mode="json"), start_step)
        )
    if config.metrics.port is not None:
        from megaframe.metrics.prometheus import PrometheusSink

        sinks.append(PrometheusSink(config.metrics.port, files.folder.name))
    for part in config.metrics.sinks:
        sink = call_part(part, "make_sink", Sink, config, files.folder, start_step)
        sinks.append(GuardedSink(part.name, sink, files))
    return sinks


def flatten(line: Line, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line; names of nested ones are joined by slashes. Rows with a number
    for each rank or expert are left out: they would be thousands of curves, and are for the
    dashboard."""
    for name, value in line.items():
        if prefix + name in _ROWS:
            continue
        if isinstance(value, list):
            value = {str(index): element for index, element in enumerate(value)}
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}/")
        elif value is not None:
            yield prefix + name, value


def make_write_error(path: Path, error: OSError) -> UserError:
    """Return the error for a full disk or a folder that is not writable."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = (
        "make room, or set run.dir to another folder" if full else "set run.dir to another folder"
    )
    return UserError(f"cannot write {path}: {error.strerror}; {advice}")


def open_growing(files: OutputFiles, name: str) -> GrowingFile:
    """Open a file of a run at its start. Raises `UserError` if it cannot be written then."""
    try:
        return files.open_growing(name)
    except OSError as error:
        raise make_write_error(files.folder / name, error) from None


class JsonlSink(Sink):
    """Appends one JSON object per step, and hands each line to the operating system at once.
    Nothing is buffered that could be flushed; the files of a run are closed together.

    JSON has no NaN and no infinity: these are written as null, like unknown values.

    Args:
        files: Those of the run.
        start_step: The step from which this process continues.
        name: Of the file in the run folder.
    """

    def __init__(self, files: OutputFiles, start_step: int, name: str = METRICS_FILE) -> None:
        self._files, self._path = files, files.folder / name
        try:
            truncate_metrics(self._path, start_step)
        except OSError as error:
            raise make_write_error(self._path, error) from None
        self._file = open_growing(files, name)

    def write(self, line: Line) -> None:
        text = json.dumps(replace_nonfinite(line), allow_nan=False) + "\n"
        self._file.append(text.encode())

    def rewind(self, step: int) -> None:
        try:
            self._file.change(lambda: truncate_metrics(self._path, step))
        except (OSError, UserError) as error:  # the lines of steps that are undone stay
            self._files.report_missing(f"{self._path} does not go back to step {step}: {error}")


class SampleSink(JsonlSink):
    """Appends one JSON object per sample of text."""

    def write(self, line: Line) -> None:
        """Do nothing: lines have a file of their own."""

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        for sample in samples:
            super().write({"step": step, "prompt": sample.prompt, "text": sample.text})


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, and an incomplete last line, by one atomic replacement.

    Raises:
        UserError: If any other line is not one of a metrics file; the file is then unchanged.
    """
    if not os.path.lexists(path):
        return
    folder = path.parent
    with open_file(path, inside=folder) as old, replace_file(path, inside=folder, sync=True) as new:
        size = os.fstat(old.fileno()).st_size
        for number, line in enumerate(iter(lambda: old.readline(_LONGEST_LINE), b""), 1):
            line_step = _read_step(line)
            if line_step is not None and line_step <= step:
                new.write(line.rstrip(b"\n") + b"\n")
            elif line_step is None and old.tell() < size:
                raise UserError(
                    f"{path}, line {number}, is not a JSON object with an integer `step`: this is "
                    "no metrics file of a run; move it away or set run.dir to another folder"
                )


def set_metrics_aside(path: Path) -> tuple[Path, int] | None:
    """Keep the lines of a run that begins anew, by renaming their file to the next free name, such
    as `metrics.1.jsonl`.

    Returns:
        The new path and the number of lines, or None if there are no lines.

    Raises:
        UserError: As `truncate_metrics`.
    """
    try:
        truncate_metrics(path, sys.maxsize)
        lines = path.read_bytes().count(b"\n") if os.path.lexists(path) else 0
        if not lines:
            return None
        names = (path.with_suffix(f".{number}{path.suffix}") for number in count(1))
        new_path = next(name for name in names if not os.path.lexists(name))
        path.rename(new_path)
    except OSError as error:
        raise make_write_error(path, error) from None
    return new_path, lines


class TensorBoardSink(Sink):
    """An event file in a folder of the run; a viewer hides a killed run's superfluous steps.
    Nothing is buffered that could be flushed; the files of a run are closed together.

    Events are written as records of TensorBoard into a file of the run, not by its writer, whose
    thread ends at the first error.

    Args:
        files: Those of the run.
        start_step: The step from which this process continues.
    """

    def __init__(self, files: OutputFiles, start_step: int) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter
            from torch.utils.tensorboard import summary
        except ImportError:
            raise _make_missing_extra_error("metrics.tensorboard=true", "tensorboard") from None
        self._event, self._session, self._summary = Event, SessionLog, summary
        now = time.time()
        name = f"events.out.tfevents.{now:010.0f}.{socket.gethostname()}.{os.getpid()}"
        names = (f"tensorboard/{name}.{number}" for number in count())
        free = next(name for name in names if not os.path.lexists(files.folder / name))
        self._make_writer = RecordWriter
        self._file = open_growing(files, free)
        self._add([Event(wall_time=now, file_version="brain.Event:2")])
        self.rewind(start_step)

    def write(self, line: Line) -> None:
        now, step = time.time(), line["step"]
        self._add(
            self._event(wall_time=now, step=step, summary=self._summary.scalar(name, value))
            for name, value in flatten(line)
            if name != "step"
        )

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        self._add(
            self._event(
                wall_time=time.time(),
                step=step,
                summary=self._summary.text(f"samples/{number}", _format_markdown(sample)),
            )
            for number, sample in enumerate(samples)
        )

    def rewind(self, step: int) -> None:
        """Have viewers hide what the folder has of later steps."""
        start = self._session(status=self._session.START)
        self._add([self._event(wall_time=time.time(), step=step + 1, session_log=start)])

    def _add(self, events: Iterable[Any]) -> None:
        """Append events at once, so that none of them can be torn."""
        records = io.BytesIO()
        writer = self._make_writer(records)
        for event in events:
            writer.write(event.SerializeToString())
        self._file.append(records.getvalue())


class WandbSink(Sink):
    """A Weights & Biases run, offline without an API key; its id is kept in the run folder.

    A resumed run continues under the same id. The service ignores steps that it already has, so
    repeating steps after a kill does no harm. wandb's own process writes what it was given, and
    outlives this one. Each prefix before a slash becomes a section of the
    workspace. `tools/dashboard.py RUN --upload` adds the whole page to the run.

    Args:
        files: Those of the run.
        project: Name of the project.
        keys: The config of the run, as the service shows it.
        start_step: The step from which this process continues.
    """

    def __init__(
        self, files: OutputFiles, project: str, keys: Mapping[str, Any], start_step: int
    ) -> None:
        folder, self._files, self._has_failed = files.folder, files, False
        try:
            self._run = start_wandb_run(folder, project, fresh=start_step == 0, config=keys)
        except ImportError:
            raise _make_missing_extra_error(f"metrics.wandb={project}", "wandb") from None
        except InvalidWandbId as error:
            raise UserError(str(error)) from None
        except OSError as error:
            raise make_write_error(folder / "wandb", error) from None
        self._run.define_metric("step", hidden=True)
        for name, summary in (("loss", "last"), ("eval_loss", "min"), ("mfu", "mean")):
            self._run.define_metric(name, step_metric="step", summary=summary)
        self._run.define_metric("*", step_metric="step")

    def write(self, line: Line) -> None:
        self._log(line["step"], lambda: dict(flatten(line)))

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        def make_table() -> Mapping[str, Any]:
            import wandb

            rows = [[step, sample.prompt, sample.text] for sample in samples]
            return {"samples": wandb.Table(columns=["step", "prompt", "text"], data=rows)}

        self._log(step, make_table)

    def _log(self, step: int, make_values: Callable[[], Mapping[str, Any]]) -> None:
        try:
            self._run.log(make_values(), step=step)
        except Exception as error:  # whatever its client or its service raises
            if not self._has_failed:
                self._has_failed = True
                self._report("takes no more lines", error)

    def close(self) -> None:
        try:
            self._run.finish()
        except Exception as error:
            self._report("does not finish the run", error)

    def _report(self, what: str, error: Exception) -> None:
        reason = " ".join(str(error).split()) or type(error).__name__
        self._files.report_missing(f"Weights & Biases {what}: {reason}")


def _format_markdown(sample: TextSample) -> str:
    """Return a sample as Markdown that shows it as it is: the prompt, and the whole as a block."""
    lines = f"{sample.prompt}{sample.text}".splitlines()
    return "\n".join(
        [f"prompt of {len(sample.prompt)} characters", "", *(f"    {x}" for x in lines)]
    )


def _make_missing_extra_error(key: str, extra: str) -> UserError:
    return UserError(f"{key} needs the extra {extra!r}: pip install 'megaframe[{extra}]'")


def replace_nonfinite(value: Any) -> Any:
    """Return a line, or a part of it, for strict JSON: None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {name: replace_nonfinite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [replace_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_step(line: bytes) -> int | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = entry.get("step") if isinstance(entry, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None
