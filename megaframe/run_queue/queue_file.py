"""The file that describes the runs of a queue, and the runs of a sweep, as what the queue runs.

    folder: runs/queue
    runs:
      large: {config: large.yaml, ranks: 4:8, overrides: [faults.elastic=true]}
      urgent: {config: small.yaml, priority: 10}
      rates: {config: small.yaml, sweep: ["optim.lr=[1e-3, 3e-3]"], grace: 100}

It is read again when it changes, so it is also how runs are added to a queue that works on others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from megaframe.config import RunConfig
from megaframe.config.section import Positive, Section
from megaframe.errors import UserError
from megaframe.io.untrusted import parse_yaml, read_file
from megaframe.resilience.elastic import fit_layout
from megaframe.run_queue.run_process import parse_ranks, parse_run
from megaframe.run_queue.sweep import Sweep
from megaframe.run_queue.trials import make_trials

_LARGEST = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=,+-]{0,99}")


class QueueEntry(Section):
    """What a file says of a run, or of a sweep."""

    config: str | None = None
    """As of `pretrain_gpt.py`; a path is relative to the folder in which the queue is started."""
    overrides: tuple[str, ...] = ()
    """The other words of its command line, `section.key=value`."""
    ranks: str = "1"
    """Number of ranks, or MIN:MAX with `faults.elastic=true`."""
    priority: int = 0
    """Higher goes first, and may make lower ones leave."""
    sweep: tuple[str, ...] = ()
    """Keys to vary, in the form of --sweep; each combination is a run of its own."""
    trials: Annotated[int, Field(gt=0, le=10_000)] = 1
    """Of each combination of lists."""
    seed: int = 0
    """Of the numbers from ranges."""
    metric: str | None = None
    """What trials are compared by; default: `eval_loss`, or `loss` without evaluation."""
    grace: Positive | None = None
    """Steps after which the worse half of the trials is stopped; None stops none."""


class QueueFile(Section):
    """What a file says of a queue."""

    folder: str
    """Where the folders of the runs are."""
    runs: dict[str, QueueEntry]
    """The runs by their names, in the order in which they start."""


@dataclass(frozen=True)
class RunOfQueue:
    """A run that a queue runs.

    Attributes:
        name: Of its folder.
        words: Its command line, the same for any number of ranks.
        folder: Where it writes.
        sizes: Numbers of ranks that it can have, ascending.
        steps: Its length.
        priority: Higher goes first.
        sweep: Whose trial it is; empty for a run of its own.
        keys: The values of a trial.
        metric: What it is compared by.
        grace: Steps after which it may be stopped for being behind others; None for never.
    """

    name: str
    words: tuple[str, ...]
    folder: Path
    sizes: tuple[int, ...]
    steps: int
    priority: int = 0
    sweep: str = ""
    keys: dict[str, str] = field(default_factory=dict)
    metric: str = "loss"
    grace: int | None = None


def read_queue_file(path: Path) -> tuple[Path, list[RunOfQueue]]:
    """Return the folder of a queue, and its runs.

    Raises:
        UserError: For mistakes in the file or in one of the configs.
    """
    try:
        content = parse_yaml(read_file(path, _LARGEST))
        queue = QueueFile.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: {_describe(error.errors()[0])}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} is not the file of a queue: {reason}") from None
    folder, runs = Path(queue.folder).absolute(), []
    for name, entry in queue.runs.items():
        if not _NAME.fullmatch(name):
            raise UserError(f"{path}: runs.{name}: a name has letters, digits and _.=,+- only")
        try:
            runs += make_runs(name, entry, folder)
        except UserError as error:
            raise UserError(f"{path}: runs.{name}: {error}") from None
    return folder, runs


def _describe(mistake: Any) -> str:
    """Return a mistake that pydantic has found, with its key."""
    key = ".".join(map(str, mistake["loc"]))
    section = QueueEntry if len(mistake["loc"]) > 1 else QueueFile
    if mistake["type"] in ("extra_forbidden", "missing"):
        problem = "missing" if mistake["type"] == "missing" else "unknown"
        return f"{key}: {problem}; the keys are {', '.join(section.model_fields)}"
    return f"{key}: {mistake['msg']}"


def make_runs(name: str, entry: QueueEntry, folder: Path) -> list[RunOfQueue]:
    """Return the runs of an entry of the file: one, or the trials of a sweep.

    Args:
        name: Of the entry; begins the names of trials. Empty for a queue of one sweep.
        entry: What the file says.
        folder: Of the queue.

    Raises:
        UserError: For mistakes in the config, also of one of the trials.
    """
    words = [*(["--config", entry.config] if entry.config else []), *entry.overrides]
    if not entry.sweep:
        config, line = parse_run(words)
        if not config.checkpoint.every:
            raise UserError(
                "checkpoint.every=0 saves nothing, and the run would start from scratch after it "
                "has left for another; set checkpoint.every=1000, for example"
            )
        return [_make_run(name, config, line, folder, entry)]
    sweep = Sweep.parse(words, entry.sweep, entry.metric)
    return list(_make_trial_runs(name, sweep, entry, folder))


def _make_trial_runs(
    name: str, sweep: Sweep, entry: QueueEntry, folder: Path
) -> Iterator[RunOfQueue]:
    for trial in make_trials(sweep.space, entry.trials, entry.seed):
        values = [f"{key}={value}" for key, value in trial.keys.items()]
        config, line = parse_run([*sweep.words, *values])
        trial_name = f"{name}-{trial.name}" if name else trial.name
        yield _make_run(trial_name, config, line, folder, entry, sweep=name or folder.name,
            keys=trial.keys, metric=sweep.metric, grace=entry.grace)  # fmt: skip


def _make_run(
    name: str,
    config: RunConfig,
    line: Sequence[str],
    folder: Path,
    entry: QueueEntry,
    **options: Any,
) -> RunOfQueue:
    if config.checkpoint.folder is not None:
        raise UserError(
            f"checkpoint.folder={config.checkpoint.folder} would be shared by all runs that have "
            "it; leave it out, and each saves in its own folder"
        )
    own = [f"run.dir={folder / name}"]
    own += [] if config.checkpoint.resume else ["checkpoint.resume=latest"]
    sizes = list_sizes(config, entry.ranks)
    words = *line, *own
    return RunOfQueue(
        name, words, folder / name, sizes, config.train.steps, entry.priority, **options
    )


def list_sizes(config: RunConfig, ranks: str) -> tuple[int, ...]:
    """Return the numbers of ranks that a run can use, all of them, ascending.

    Args:
        config: The run.
        ranks: N, which is taken as it is, or MIN:MAX.

    Raises:
        UserError: The config does not allow for several, or none of them has a layout.
    """
    least, most = parse_ranks(ranks)
    if least == most:
        return (least,)
    if not config.faults.elastic:
        raise UserError(f"ranks {ranks} needs faults.elastic=true")
    parallel = config.parallel
    of_replica = parallel.tensor * parallel.pipeline * parallel.context
    # A data rank has a sample of the batch at least.
    limit = min(most, config.train.global_batch * of_replica)
    size = largest = fit_layout(config, limit)[1]
    sizes = []
    while size >= least:
        sizes.append(size)
        try:
            size = fit_layout(config, size - 1)[1]
        except UserError:  # nothing is left
            break
    if not sizes:
        raise UserError(f"ranks {ranks}: no layout uses so many; the nearest uses {largest}")
    return tuple(reversed(sizes))
