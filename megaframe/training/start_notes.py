"""What a run logs when it starts, after its first lines: schedule, notes and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megaframe.architecture.pipeline import summarize_pipeline
from megaframe.config import DataConfig, RunConfig
from megaframe.distributed.mesh import Mesh, read_local_world_size
from megaframe.metrics import MetricsLogger
from megaframe.schedule import Schedule
from megaframe.validate.invariance import describe_layout_dependence, find_layout_dependence
from megaframe.validate.run import find_warnings


def log_start(
    logger: MetricsLogger,
    config: RunConfig,
    mesh: Mesh,
    schedule: Schedule,
    *,
    step: int,
    notes: Sequence[str] = (),
    details: Sequence[str] = (),
    old_metrics: tuple[Path, int] | None = None,
    restored_notes: Sequence[str] = (),
) -> None:
    """Log the start of a run.

    Args:
        logger: Of the run.
        config: Of the run.
        mesh: Of the run.
        schedule: Of a training step.
        step: Number of steps that the run has already done.
        notes: Lines about choices that were made before.
        details: Lines for the run log only.
        old_metrics: Where the lines of a previous start are, and how many, if it saved nothing.
        restored_notes: Lines about the checkpoint that the run continues from.
    """
    summary = [*summarize_pipeline(config, schedule)]
    for line in (*summary[:1], *notes):
        logger.note(line)
    settings = mesh.nccl_settings
    if settings is not None and mesh.device.type == "cuda":
        details = [*details, settings.allocator]
    if mesh.layout.world == 1:
        settings = None  # there are no transfers
    for line in (*summary[1:], *details, *(settings.lines if settings else ())):
        logger.log_detail(line)
    for line in settings.warnings if settings else ():
        logger.note(line)
    if old_metrics is not None:
        path, lines = old_metrics
        logger.note(
            f"started from scratch, because no checkpoint had been saved; the {lines} lines of "
            f"the previous start are in {path}"
        )
    for line in restored_notes:
        logger.note(line)
    if step >= config.train.steps:
        logger.note(
            f"the run is finished: step {step} of train.steps={config.train.steps}; to train "
            f"longer, {_say_how_to_train_longer(config.data)}"
        )
    elif step >= config.train.last_step:
        logger.note(
            f"the run is at step {step}, and train.stop_after={config.train.stop_after} stops it "
            "there; leave it out to go on"
        )
    if config.optim.offload and mesh.device.type == "cpu":
        logger.note("optim.offload=true has no effect on a CPU")
    if config.train.offload and mesh.device.type == "cpu":
        logger.note("train.offload=true only copies on a CPU")
    node = config.parallel.node_size or read_local_world_size()
    for line in find_warnings(config, mesh.layout, node):
        logger.note(line)
    for line in describe_layout_dependence(find_layout_dependence(config)):
        logger.note(line)


def _say_how_to_train_longer(data: DataConfig) -> str:
    if data.phases:
        return "add another to data.phases"
    return f"raise {'data.epochs' if data.epochs else 'train.steps'}"
