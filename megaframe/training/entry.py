"""The entry into training: decide what a config leaves open, check that it fits, and run this
rank's part. `pretrain_gpt.py` and `megaframe.train` both come in here."""

from __future__ import annotations

import gc

from megaframe.architecture.cuda_streams import count_streams
from megaframe.config import RunConfig
from megaframe.distributed.mesh import read_global_rank, read_world_size
from megaframe.distributed.nccl_settings import configure_nccl
from megaframe.resilience.signals import enable_flight_recorder
from megaframe.training.auto_layout import resolve_phases
from megaframe.training.memory_check import check_memory
from megaframe.training.restart import run_attempts


def train(config: RunConfig, *, force: bool = False) -> None:
    """Train a run to its end, as this process's rank of it.

    The launcher's variables (`RANK`, `WORLD_SIZE` and the others of torchrun) say which rank this
    is; without them the run has one rank. What it leaves is in the run folder, `run.dir`. With
    `checkpoint.resume=latest` it continues the run that is there.

    Args:
        config: What `load_config` returns.
        force: Train even if there is too little memory by the plan.

    Raises:
        UserError: Something in the config cannot work, another run has the folder, or files of the
            run are not complete at the end.
        SystemExit: A signal ended the run early, after a save.
    """
    world = read_world_size()
    nccl = None
    if config.run.device != "cpu":
        nccl = configure_nccl(count_streams(config, world), graph=config.train.cuda_graph)
    phases = resolve_phases(config, world)
    warnings = [check_memory(phase, layout, force=force) for phase, layout, _ in phases]
    enable_flight_recorder(config.run)
    for (phase, layout, notes), more in zip(phases, warnings, strict=True):
        if read_global_rank() >= layout.world:
            continue  # the layout that was chosen does not use this rank
        if not run_attempts(phase, layout, [*notes, *more], nccl):
            return  # a callback has ended the run
        gc.collect()  # reference cycles would keep memory that the next phase needs
