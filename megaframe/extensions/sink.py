"""Sinks: where the lines of a run go, ours and those of extensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]
"""The metrics of one step: numbers, None for unknown values, rows, and dicts of these."""


@dataclass(frozen=True)
class TextSample:
    """A text that the model has made during training.

    Attributes:
        prompt: What it was to continue; empty for a new document.
        text: What follows the prompt.
    """

    prompt: str
    text: str


class Sink:
    """Takes the lines of a run in the order of their steps, on the first rank. Each method may be
    left out."""

    def write(self, line: Line) -> None:
        """Take one step's line."""

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Take the samples of text of a step, after its line."""

    def flush(self) -> None:
        """Return when everything that was written would survive the end of this process. Called
        before a checkpoint is complete."""

    def rewind(self, step: int) -> None:
        """Go back: the next line is that of the step after `step`."""

    def close(self) -> None:
        """Finish; nothing is written afterwards. A process that is killed does not call it."""
