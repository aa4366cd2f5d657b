"""Attempts: a run as one or more starts within this process.

If only a transfer has failed and all ranks agree on that, a new mesh and a new trainer do what a
new process would do. Nothing of the old ones is repaired, so there is only one way to continue a
run. An in-process restart saves starting the program, importing torch and the launcher's work.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import partial

from megaframe.checkpoint.lock import RunLock
from megaframe.checkpoint.manager import list_written_folders
from megaframe.config import CheckpointConfig, FaultToleranceConfig, ParallelConfig, RunConfig
from megaframe.distributed.collectives import barrier
from megaframe.distributed.device import set_deterministic
from megaframe.distributed.mesh import Mesh
from megaframe.distributed.nccl_settings import NcclSettings, allow_abort, keep_launch_order
from megaframe.distributed.numa import bind_to_numa_node
from megaframe.distributed.rank_progress import RankProgress
from megaframe.errors import LostRanks, UserError, report_and_exit
from megaframe.layout import Layout
from megaframe.resilience.launcher import LauncherProcess
from megaframe.training.trainer import Trainer

_READ_SECONDS, _PAUSE_SECONDS = 30.0, 0.05
"""How long the first rank stays for others that have yet to read why the run is refused, and how
often it looks; a rank that is lost meanwhile must not keep it for ever."""


def run_attempts(
    config: RunConfig, layout: Layout, notes: Sequence[str] = (), nccl: NcclSettings | None = None
) -> bool:
    """Run this rank's part of a training run to its end, or to that of its phase.

    While it runs, the first rank has the locks of the folders that the run writes.

    There are two exceptions to what is raised. Once the mesh exists, `LostRanks` ends the process
    (`Mesh.leave`) or starts a new attempt. If process groups cannot be closed without the other
    ranks (NCCL), any other error is reported and ends the process at once.

    Args:
        config: The config of the run.
        layout: The layout of its ranks.
        notes: Lines to log when the run starts.
        nccl: What is set for groups over NCCL.

    Returns:
        Whether it may go on with the next phase; False if a callback has ended it.

    Raises:
        UserError: If another run has one of the folders, or files are not complete at the end.
        Exception: What `Mesh` and `Trainer` raise.
    """
    if config.run.deterministic:
        set_deterministic()  # before the mesh: NCCL groups read this setting when they are made
    if config.train.cuda_graph:
        keep_launch_order()  # NCCL reads this setting once, too
    if _can_restart(config.parallel, config.checkpoint, config.faults):
        allow_abort()  # torch's NCCL groups read it when they are made
    launcher, lock = LauncherProcess(), RunLock(list_written_folders(config.run, config.checkpoint))
    try:
        missing, goes_on = _train(config, layout, notes, nccl, launcher, lock)
    finally:
        lock.release()
    if missing:
        raise UserError(f"training is done, but its files are not complete: {missing}")
    return goes_on


def _train(
    config: RunConfig,
    layout: Layout,
    notes: Sequence[str],
    nccl: NcclSettings | None,
    launcher: LauncherProcess,
    lock: RunLock,
) -> tuple[str, bool]:
    """Run all attempts. Returns what is missing in the files of the run, empty for nothing, and
    whether no callback has ended the run."""
    restarts, last_step = 0, -1
    while True:
        mesh = Mesh(
            layout,
            device=config.run.device,
            timeout=config.parallel.timeout,
            serial=config.parallel.serial,
            check_collectives=config.faults.check_collectives,
            nccl=nccl,
        )
        trainer: Trainer | None = None
        try:
            if not restarts:
                shared = config.run.device == "shared"
                notes = (
                    *notes,
                    *bind_to_numa_node(config.run.numa_binding, mesh.device, shared=shared),
                )
            notes = (*notes, *_take_locks(lock, mesh))
            trainer = Trainer(config, mesh, notes, launcher, lock)
            if (
                _can_restart(config.parallel, config.checkpoint, config.faults)
                and restarts < config.faults.restarts
            ):
                mesh.allow_restart(partial(_has_made_progress, mesh.progress, last_step))
            return trainer.run(), not trainer.callbacks.stopping
        except (Exception, KeyboardInterrupt) as error:
            # Over NCCL, what was received when a transfer was ended may cause any error.
            ended = mesh.progress.transfers_ended and isinstance(error, Exception)
            if not isinstance(error, LostRanks) and not ended:
                if mesh.ends_with_others:
                    lock.release()
                    report_and_exit(error, mesh.rank)
                raise
            why = mesh.leave(error if isinstance(error, LostRanks) else LostRanks(str(error), ()))
            assert trainer is not None, "ranks begin again from the loop over steps"
            trainer.release()
        finally:
            mesh.close()
        restarts, last_step = restarts + 1, mesh.progress.step
        count = f"{restarts} of faults.restarts={config.faults.restarts}"
        notes = (*notes, f"restarted in the same processes ({count}): {why}")
        del trainer, mesh
        gc.collect()  # reference cycles would keep memory that the next trainer needs


def _can_restart(
    parallel: ParallelConfig, checkpoint: CheckpointConfig, faults: FaultToleranceConfig
) -> bool:
    """Return whether the ranks may restart in their processes. PyTorch's symmetric memory is bound
    to the first groups of a process."""
    symmetric = parallel.symmetric_memory != "off"
    return checkpoint.resume == "latest" and faults.restarts > 0 and not symmetric


def _take_locks(lock: RunLock, mesh: Mesh) -> list[str]:
    """Take the locks on the first rank, for all. Returns lines to log, on that rank. Raises the
    same `UserError` on all ranks if another run has a folder."""
    notes: list[str] = []
    message = ""
    if mesh.rank == 0:
        mesh.call_before_exit(lock.release)
        try:
            notes = lock.take()
        except UserError as error:
            message = str(error)
        mesh.store.set("lock", message)
    barrier(mesh.world)  # a rank that is lost meanwhile ends this, but not a wait for the store
    if message := mesh.store.get("lock").decode():
        _wait_for_readers(mesh)
        raise UserError(message)
    return notes


def _wait_for_readers(mesh: Mesh) -> None:
    """Wait on the first rank until all have read what it has written, or have had the time for it:
    the store may end with this rank."""
    readers, end = mesh.store.add("lock read", 1), time.monotonic() + _READ_SECONDS
    while mesh.rank == 0 and readers < mesh.layout.world and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
        readers = mesh.store.add("lock read", 0)


def _has_made_progress(progress: RankProgress, last_step: int) -> bool:
    """Return whether this rank is past `last_step`, the step of the previous in-process restart. A
    second failure at the same step is not the network's fault."""
    return progress.step > last_step
