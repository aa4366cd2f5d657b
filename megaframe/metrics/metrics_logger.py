"""Metrics logger: collects the metrics of a step, and writes them as one line a step later.

The line of a step is written when the next step is flushed, with several islands the one after. By
then its values have been reduced over the ranks and copied to the host while training went on, so
logging never makes a step wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaframe.architecture.spec import ParamSpec
from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh
from megaframe.extensions.sink import Sink, TextSample
from megaframe.io.output_files import OutputFiles
from megaframe.metrics.console import ConsoleSink, print_note
from megaframe.metrics.environment import write_environment
from megaframe.metrics.flops import count_flops
from megaframe.metrics.link_latency import measure_idle_links
from megaframe.metrics.memory import (
    measure_peak_memory,
    read_allocator_metrics,
    read_memory_metrics,
)
from megaframe.metrics.peak_flops import find_device_peak
from megaframe.metrics.profiler import Profiler
from megaframe.metrics.prometheus import PrometheusSink
from megaframe.metrics.records import MetricValue, PendingReduction, ReduceType, StepRecords
from megaframe.metrics.sinks import open_sinks
from megaframe.metrics.step_breakdown import StepBreakdown
from megaframe.metrics.timers import Part, PartTimer, StepTimeline, StepTimer
from megaframe.metrics.trace import Tracer
from megaframe.metrics.waterfall import attribute_losses

_BYTES = "bytes/"
_AGREED = "agreed/"
"""Prefix of values that ranks tell each other and that are not written."""
CountBytes = Callable[[], Mapping[str, int]]
StepValues = Mapping[str, Any]
"""The values of a step, the same on all ranks except for those recorded as `last`, and its number
as `step`."""
ObserveStep = Callable[[StepValues], Mapping[str, float]]
"""Takes the values of a step, and returns what else its line is to have, by name."""


class MetricsLogger:
    """The metrics of a run, from all ranks to the sinks of the first one. All ranks make a logger
    and call it at the same points of a step."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        specs: Iterable[ParamSpec],
        timer: StepTimer | None = None,
        *,
        start_step: int = 0,
        count_bytes: CountBytes = dict,
        kernels: Mapping[str, Any] | None = None,
        opening: Sequence[str] = (),
        files: OutputFiles | None = None,
    ) -> None:
        """Open the sinks on the first rank, and print the first lines.

        Args:
            config: The run.
            mesh: This rank's groups, whose waits are charged to the timer from now on.
            specs: Of the whole model.
            timer: That of the step, which others may charge too; None to make one.
            start_step: Number of steps that the run has already done. Sinks drop what they have of
                later ones.
            count_bytes: Returns the bytes on this rank by kind.
            kernels: Which are used, for the environment.
            opening: Lines to print first.
            files: Those of the run, for the first rank; None to make them.

        Raises:
            UserError: A sink cannot be opened.
        """
        self._config, self._mesh = config, mesh
        self._device = mesh.device
        self._flops = count_flops(specs, config)
        self._timer = timer or StepTimer.make_for_device(mesh.device)
        self._breakdown = StepBreakdown(
            config.metrics, mesh, lambda: read_memory_metrics(count_bytes(), mesh.device)
        )
        self._files: OutputFiles | None = None
        if mesh.rank == 0:
            self._files = files or OutputFiles(Path(config.run.dir))
        self._trace = Tracer(config.metrics, mesh, self._timer, start_step, self._files)
        self._profiler = Profiler(
            config.run, config.metrics, mesh, start_step, self._report_missing
        )
        self._start = start_step
        free = measure_idle_links(config.model, config.train, mesh)
        mesh.charge_waits(
            self._timer.time_waits,
            lambda ends: self._timer.time_messages(ends, free.get(ends, 0.0)),
        )
        self._records = StepRecords()
        self._observers: list[ObserveStep] = []
        self._unreduced: deque[tuple[int, StepRecords, StepTimeline]] = deque()
        self._in_flight: deque[tuple[int, PendingReduction]] = deque()
        self._sinks: list[Sink] = []
        self._samples: dict[int, Sequence[TextSample]] = {}
        self._console: ConsoleSink | None = None
        if self._files is not None:
            self._sinks = open_sinks(config, start_step, self._files)
            write_environment(self._files, config.train, mesh, kernels or {})
            self._console = ConsoleSink(
                config.train, config.data, config.metrics, start_step, self._files
            )
            self._sinks.append(self._console)
        self._peak = find_device_peak(config.metrics, config.train, mesh)
        self._write_first_lines(opening)

    def _write_first_lines(self, opening: Sequence[str]) -> None:
        """Print these lines, and which FLOPs and which peak the utilisation is computed from."""
        for line in opening:
            self.note(line)
        self.log_detail(self._flops.describe())
        (self.note if self._peak.tflops is None else self.log_detail)(self._peak.note)
        for sink in self._sinks:
            if isinstance(sink, PrometheusSink):
                self.note(f"the latest line is at {sink.address}")

    def observe_steps(self, observe: ObserveStep) -> None:
        """Call a function for each step, once and in order, when its values are known and before
        its line is written. It also gets what functions given before have added."""
        self._observers.append(observe)

    def start_step(self) -> None:
        """Start the clock of the first step. Every later step starts where the one before it ended,
        so that no time is lost between them."""
        self._timer.start()

    def time(self, part: Part) -> PartTimer:
        """Return a context whose time is charged to `part` of the step, not to the outer part."""
        return self._timer.time(part)

    def record(self, name: str, value: MetricValue, how: ReduceType = "last") -> None:
        """Put a value into the step's line; see `StepRecords.add`. A name `a/b` is written as key b
        of an object a.

        Args:
            name: Of the metric.
            value: A number, a scalar tensor or a row.
            how: How values of one step and of several ranks become one.
        """
        self._records.add(name, value, how)

    def add_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Add samples of text of a step, which are written with its line."""
        self._samples[step] = samples

    def flush(self, step: int) -> list[StepValues]:
        """End step `step`: start reducing its values, and write the line of an earlier step.

        Rates need `tokens` to have been recorded: the tokens of the step over all ranks.

        Returns:
            The values of the steps whose lines were written, in order: one or none.
        """
        split = self._timer.take()
        self._trace.end(step, split)
        self._profiler.end(step)
        self._records.add("memory_bytes", measure_peak_memory(self._device), "max")
        for name, value in read_allocator_metrics(self._device).items():
            self._records.add(f"allocator/{name}", value, "max")
        self._records.add("at", time.time(), "last")
        for axes, size in self._mesh.take_traffic().items():
            self._records.add(_BYTES + axes, size, "max")
        self._unreduced.append((step, self._records, split))
        self._records = StepRecords()
        if self._device.type == "cuda" and len(self._unreduced) == 1:
            return []  # its times are known only when the GPU has passed its end
        return self._send()

    def _send(self) -> list[StepValues]:
        """Start reducing the values of the first due step; write the line of an earlier one."""
        step, records, split = self._unreduced.popleft()
        for name, value, how in self._breakdown.make_records(split, step):
            records.add(name, value, how)
        for _, earlier in self._in_flight:
            earlier.advance()
        mesh = self._mesh
        reduction = records.reduce(mesh.island, self._device, mesh.island_control_group)
        self._in_flight.append((step, reduction))
        return self._write_first() if len(self._in_flight) > reduction.steps else []

    def write_pending_steps(self) -> list[StepValues]:
        """Write the lines of all flushed steps now, flush all sinks, and return what `flush`
        returns.

        Called before a checkpoint of the last of these steps is published. Otherwise a run that is
        killed and resumed from it would miss the line.
        """
        written: list[StepValues] = []
        while self._unreduced:
            written += self._send()
        while self._in_flight:
            written += self._write_first()
        for sink in self._sinks:
            sink.flush()
        if self._files is not None:
            self._files.retry()
            self._tell_of_files(self._files)
        return written

    def rewind(self, step: int) -> None:
        """Forget everything about steps after `step`, from which the run continues."""
        self._start = step
        self._unreduced.clear()
        self._samples.clear()
        self._in_flight.clear()
        self._records = StepRecords()
        self._timer.take()
        for sink in self._sinks:
            sink.rewind(step)

    def note(self, text: str) -> None:
        """Print a text on the console and in the run log, once for all ranks."""
        if self._console is not None:
            self._console.note(text)

    def log_detail(self, text: str) -> None:
        """Put a text that few users need into the run log, once for all ranks."""
        if self._console is not None:
            self._console.log_detail(text)

    def note_from_rank(self, text: str) -> None:
        """Print a text that a part of the model gives rise to, and that the first rank, which may
        have another part, need not know. It is printed for the first rank of each pipeline rank,
        because the others have the same."""
        coordinate = self._mesh.coordinate
        if self._console is not None:
            self.note(text)
        elif not any(coordinate[axis] for axis in ("tensor", "context", "data")):
            print_note(self._config.run, self._config.metrics, f"rank {self._mesh.rank}: {text}")

    def close(self, ending: Sequence[tuple[str, str]] = ()) -> list[str]:
        """Write the last line and the summary, at the end of a run.

        A run that fails does not need this: what it has written is already on its way to the disk.

        Args:
            ending: Names and texts to add to the summary.

        Returns:
            What of the run's files is missing, a part of a sentence each; nothing on other ranks.
        """
        self._profiler.close()
        self._trace.close()
        self.write_pending_steps()
        self._close_sinks()
        if self._console is None or self._files is None:
            return []
        self._tell_of_files(self._files)
        missing = self._files.list_missing()
        self._console.ending = [*ending, *(("missing", text) for text in missing)]
        self._console.close()
        self._files.close()
        return self._files.list_missing()

    def release(self) -> None:
        """Close what is open here, without the other ranks; another logger continues the run."""
        self._profiler.close()
        self._close_sinks()
        if self._files is not None:
            self._files.close()

    def _close_sinks(self) -> None:
        """Close all sinks but the console, which prints the summary."""
        for sink in self._sinks:
            if sink is not self._console:
                sink.close()

    def _report_missing(self, text: str) -> None:
        """Say that a file of this rank is missing for good, which the run survives."""
        if self._files is not None:
            self._files.report_missing(text)
        else:
            print_note(
                self._config.run,
                self._config.metrics,
                f"rank {self._mesh.rank}: warning: {text}; the run goes on",
            )

    def _tell_of_files(self, files: OutputFiles) -> None:
        """Log what has happened to the run's files."""
        for line in files.take_messages():
            self.note(line)

    def _write_first(self) -> list[StepValues]:
        """Write the line of the first step in flight."""
        step, reduction = self._in_flight.popleft()
        values = reduction.wait()
        step_values = {**values, "step": step}
        added: dict[str, float] = {}
        for observe in self._observers:
            added |= observe({**step_values, **added})
        samples = self._samples.pop(step, ())
        if self._sinks:
            written = {name: values[name] for name in values if not name.startswith(_AGREED)}
            line = self._make_line(step, {**written, **added})
            for sink in self._sinks:
                sink.write(line)
                if samples:
                    sink.write_samples(step, samples)
        if self._files is not None:
            self._tell_of_files(self._files)
        return [step_values]

    def _make_line(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Return the line of a step. What else was recorded follows the named keys. Raises
        `ValueError` if a recorded name is the same as one of these."""
        breakdown = self._breakdown.take_values(values)
        seconds = breakdown["seconds"]
        tokens = int(values.pop("tokens", 0))
        per_device = tokens / seconds / self._mesh.world.size / 1e12
        flops = self._flops
        mfu = self._peak.compute_utilization(per_device * flops.model)
        line: dict[str, Any] = {
            "step": step,
            "at": values.pop("at"),
            "loss": values.pop("loss", None),
            "grad_norm": values.pop("grad_norm", None),
            "lr": values.pop("lr", None),
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "tflops_per_second": per_device * flops.model,
            "mfu": mfu,
            "mfu_full_attention": self._peak.compute_utilization(per_device * flops.full_attention),
            "hfu": self._peak.compute_utilization(per_device * flops.hardware),
            "memory_bytes": int(values.pop("memory_bytes")),
            "bytes": {
                name.removeprefix(_BYTES): int(values.pop(name))
                for name in sorted(values)
                if name.startswith(_BYTES)
            },
            **breakdown,
            "lost": attribute_losses(
                breakdown["time"],
                mfu=mfu,
                recompute=flops.recompute,
                stragglers=breakdown.get("stragglers", 0.0),
            ),
        }
        if self._start and step == self._start + 1:
            line["resumed_after"] = self._start
        if clash := line.keys() & values.keys():
            raise ValueError(f"the logger itself writes {sorted(clash)}; record other names")
        return line | nest(values)


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Put values with names `a/b` into an object a, under b."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = name.split("/")
        inner = result
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return result
