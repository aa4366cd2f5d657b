"""Sinks of extensions, kept from ending a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

from megaframe.config.part_calls import describe_failure
from megaframe.extensions.sink import Line, Sink, TextSample
from megaframe.io.output_files import OutputFiles


class GuardedSink(Sink):
    """Calls another sink. What it raises is reported, once, as something that is missing of the
    run, which goes on; the next line is tried again."""

    def __init__(self, name: str, sink: Sink, files: OutputFiles) -> None:
        """Make it.

        Args:
            name: That of the sink.
            sink: The sink.
            files: Those of the run.
        """
        self._name, self._sink, self._files = name, sink, files
        self._has_failed = False

    def write(self, line: Line) -> None:
        """Give it a line of its own, which other sinks do not share."""
        self._call(f"does not take step {line['step']}", lambda: self._sink.write(deepcopy(line)))

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Give it samples."""
        self._call(
            f"does not take the samples of step {step}",
            lambda: self._sink.write_samples(step, samples),
        )

    def flush(self) -> None:
        """Flush it."""
        self._call("does not flush", self._sink.flush)

    def rewind(self, step: int) -> None:
        """Rewind it."""
        self._call(f"does not go back to step {step}", lambda: self._sink.rewind(step))

    def close(self) -> None:
        """Close it."""
        self._call("does not close", self._sink.close)

    def _call(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever the code of an extension raises
            if not self._has_failed:
                self._has_failed = True
                reason = describe_failure(self._sink, error)
                self._files.report_missing(f"sink {self._name} {what}: {reason}")
