"""Totals over the lines of many steps: rates over the whole time, never means of rates."""

from __future__ import annotations

import math
from collections import Counter

from megaframe.extensions.sink import Line

_RATES = ("tflops_per_second", "mfu", "mfu_full_attention", "hfu")


class RunTotals:
    """Sums over the lines given to `add`.

    Attributes:
        seconds: Of all these steps.
        tokens: Of all these steps.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.seconds = 0.0
        self._work: dict[str, float | None] = dict.fromkeys(_RATES, 0.0)
        self._parts: Counter[str] = Counter()
        self._bytes_sent: Counter[str] = Counter()
        self._memory = 0.0
        self._loss: float | None = None
        self._best = math.inf

    def add(self, line: Line) -> None:
        """Add one more step's line."""
        self.steps += 1
        self.tokens += line["tokens"]
        self.seconds += line["seconds"]
        for name, work in self._work.items():
            rate = line[name]
            is_known = work is not None and rate is not None
            self._work[name] = work + rate * line["seconds"] if is_known else None
        self._parts.update(line["time"])
        self._bytes_sent.update(line["bytes"])
        self._memory = max(self._memory, line["memory_bytes"])
        if line["loss"] is not None:  # a step without labels has none
            self._loss = line["loss"]
        validation = line.get("eval_loss")
        if validation is not None and validation < self._best:
            self._best = validation

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens / self.seconds

    def compute_mean(self, rate: str) -> float | None:
        """Return the mean over time of a line's rate; None if any line did not know it."""
        work = self._work[rate]
        return None if work is None else work / self.seconds

    def summarize(self, start_step: int) -> list[tuple[str, str]]:
        """Return rows of a name and a value, for the table at the end of a run."""
        shares = [
            f"{part} {seconds / self.seconds:.1%}"
            for part, seconds in self._parts.most_common()
            if seconds
        ]
        traffic = ", ".join(
            f"{axes} {size / self.steps / 2**20:,.3g} MiB"
            for axes, size in self._bytes_sent.most_common()
        )
        return [
            ("steps", f"{start_step + 1} to {start_step + self.steps}"),
            ("tokens", f"{self.tokens:,}"),
            ("final loss", "n/a" if self._loss is None else f"{self._loss:.4f}"),
            ("best validation loss", f"{self._best:.4f}" if self._best < math.inf else "n/a"),
            ("tokens/s", f"{self.tokens_per_second:,.0f}"),
            ("TFLOP/s per device", f"{self.compute_mean('tflops_per_second'):.4g}"),
            ("MFU", self._share("mfu")),
            ("MFU, full attention", self._share("mfu_full_attention")),
            ("HFU", self._share("hfu")),
            ("time", ", ".join(shares)),
            ("sent by a rank in a step", traffic or "nothing"),
            ("peak memory of a rank", f"{self._memory / 2**20:,.0f} MiB"),
        ]

    def _share(self, rate: str) -> str:
        mean = self.compute_mean(rate)
        return "n/a" if mean is None else f"{mean:.1%}"
