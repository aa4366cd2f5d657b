"""Saves checkpoints in the background, so that training waits only for a copy in memory.

Every rank writes its own files. Rank 0 commits the checkpoint once every rank has reported its
files and rank 0 has read their headers. Only then do all ranks read their files back. Meanwhile the
checkpoint already counts, since loading checks everything that it reads, and older checkpoints are
kept until the reading back is done. A save that fails on any rank raises an error on every rank
and leaves nothing behind, except if a rank does not answer while reading back: then the checkpoint
stays, next to the older ones.
"""

from __future__ import annotations

import json
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from pydantic import JsonValue
from torch.distributed import Store

from megaframe.checkpoint.background import BackgroundCopier, HostCopy
from megaframe.checkpoint.best import BestCheckpoints
from megaframe.checkpoint.commit import commit_checkpoint
from megaframe.checkpoint.coordinator import (
    EXPORT,
    NEED,
    READ_BACK,
    WRITE,
    Message,
    SaveCoordinator,
)
from megaframe.checkpoint.exports import Exports
from megaframe.checkpoint.folder import (
    move_pointer,
    prune_checkpoints,
    read_pointer,
    retract_checkpoint,
)
from megaframe.checkpoint.manifest import SavedFile
from megaframe.checkpoint.shard_file import FileEntry, split_into_files, write_shard_file
from megaframe.checkpoint.shard_reader import verify_shard_file
from megaframe.checkpoint.slices import Slice
from megaframe.checkpoint.stores.store import BEST, StorePath, format_checkpoint_name, store_of
from megaframe.errors import UserError


@dataclass(frozen=True)
class _SaveJob:
    """What this rank saves in one step."""

    step: int
    entries: list[FileEntry]
    data: HostCopy
    state: dict[str, JsonValue]
    files: dict[str, SavedFile] = field(default_factory=dict)
    """The files that this rank has written."""


class CheckpointWriter(BackgroundCopier):
    """Writes one rank's part of each checkpoint of a run into `root`, which all ranks share.

    An error in the background is raised by the next `save`, `wait` or `poll`, as UserError if the
    user can fix it. After that the writer can be used again. The background thread is a daemon and
    ends with the process, so call `wait` before the process exits.

    Args:
        root: The folder of checkpoints.
        rank: This rank.
        world: Number of ranks.
        store: Of all ranks, which agree by it.
        keep: Number of newest checkpoints to keep (at least 1).
        keep_every: Checkpoints of steps that are multiples of it are kept for good; 0: none.
        keep_best: Number of checkpoints with the lowest evaluation losses that are kept, too. The
            best one is named by the file `best`.
        read_back: Read each checkpoint back and check it before older ones are deleted (in a
            store that cannot withdraw a checkpoint: before it is committed).
        timeout: Seconds to wait for another rank before a save is abandoned.
        saved: Called on rank 0, in the background, with the step of each completed checkpoint.
        exports: Writes completed checkpoints in another format.
    """

    def __init__(
        self,
        root: StorePath,
        *,
        rank: int,
        world: int,
        store: Store,
        keep: int,
        keep_every: int = 0,
        keep_best: int = 0,
        read_back: bool = True,
        timeout: float = 600.0,
        saved: Callable[[int], None] = lambda step: None,
        exports: Exports | None = None,
    ) -> None:
        super().__init__()
        self._root = root
        self._backend = store_of(root)
        self._rank = rank
        self._world = world
        # A separate connection, since others may be waiting in the given one. (torch's stubs lack
        # `clone`.)
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._keep, self._keep_every = keep, keep_every
        can_withdraw = self._backend.keeps_replaced
        self._verifies = read_back and not can_withdraw
        self._phases = (WRITE, READ_BACK) if read_back and can_withdraw else (WRITE,)
        self._timeout, self._saved = timeout, saved
        self._exports, self._export_failures = exports, deque[str]()
        if rank == 0:
            with _explain_os_errors(f"cannot use {root} for checkpoints", root):
                self._backend.prepare(root)
                self._best = BestCheckpoints(root, keep_best)

    def save(self, step: int, slices: Sequence[Slice], state: Mapping[str, JsonValue]) -> None:
        """Start saving `slices` and `state` in the background.

        The state is copied before this returns. The slices are copied in the background and must
        not change until `wait_for_copy` has returned. Every rank calls this with the same step.
        Together the ranks' slices cover each tensor exactly once; a rank may have none. Only rank
        0's `state` is saved; its floats are restored bit for bit. Waits for the previous save.

        Args:
            step: Step of the checkpoint.
            slices: What this rank has of the tensors.
            state: Plain data of the run: counters, the config.
        """
        state_copy = json.loads(json.dumps(dict(state)))
        self.start(
            slices, lambda entries, data: self._write(_SaveJob(step, entries, data, state_copy))
        )

    def _write(self, job: _SaveJob) -> None:
        coordinator = SaveCoordinator(
            self._store, step=job.step, rank=self._rank, world=self._world, timeout=self._timeout
        )
        if self._rank == 0:
            self._lead_save(coordinator, job)
        else:
            self._follow(coordinator, job)

    def _lead_save(self, coordinator: SaveCoordinator, job: _SaveJob) -> None:
        attempt = coordinator.open_attempt()
        draft = self._backend.make_draft_path(self._root, job.step, attempt)
        failure = "rank 0 was stopped"
        try:
            coordinator.send_report(attempt, NEED, {"bytes": job.data.size})
            needed = sum(
                int(message["bytes"]) for message in coordinator.collect_reports(attempt, NEED)
            )
            with _explain_os_errors(
                f"cannot write the checkpoint of step {job.step}", draft, needed
            ):
                self._backend.create_draft(draft)  # makes the root again if it was deleted
                _require_space(self._root, job.step, needed)
                coordinator.start_phase(attempt, WRITE)
                self._contribute(coordinator, attempt, job, WRITE)
                files = _merge_reports(job.step, coordinator.collect_reports(attempt, WRITE))
                previous_name = read_pointer(self._root)
                checkpoint = commit_checkpoint(
                    draft, self._root, job.step, job.state, files, attempt
                )
                if READ_BACK in self._phases:
                    self._read_back(coordinator, attempt, job, checkpoint, previous_name)
                self._saved(job.step)
                self._prune(job, checkpoint, attempt)
            if self._exports is not None and self._exports.is_due(job.step):
                self._lead_export(self._exports, coordinator, attempt, job)
            failure = ""
        except Exception as error:
            failure = str(error) if isinstance(error, UserError) else repr(error)
            raise
        finally:
            if failure:
                self._backend.discard_draft(draft, attempt)
            coordinator.end_attempt(attempt, failure)

    def take_export_failures(self) -> list[str]:
        """Return why exports have failed since the last call, on rank 0."""
        return [self._export_failures.popleft() for _ in range(len(self._export_failures))]

    def _lead_export(
        self, exports: Exports, coordinator: SaveCoordinator, attempt: str, job: _SaveJob
    ) -> None:
        """Have all ranks export a checkpoint that is saved, whatever becomes of the export."""
        try:
            exports.begin(job.step, attempt)
            coordinator.start_phase(attempt, EXPORT)
            self._contribute(coordinator, attempt, job, EXPORT)
            reports = coordinator.collect_reports(attempt, EXPORT)
            if errors := _join_errors(reports):
                raise UserError(errors)
            exports.publish(job.step, attempt)
        except (UserError, OSError) as error:
            self._export_failures.append(
                f"the checkpoint of step {job.step} could not be exported: {error}"
            )
        finally:
            exports.discard(job.step, attempt)

    def _prune(self, job: _SaveJob, checkpoint: StorePath, attempt: str) -> None:
        """Delete the checkpoints that are not kept, once the new one is complete."""
        self._best.add(job.step, job.state)
        best = self._best.list_names()
        if best and best[0] != read_pointer(self._root, BEST):
            move_pointer(self._root, best[0], attempt, BEST)
        prune_checkpoints(self._root, checkpoint, self._keep, self._keep_every, attempt, best)

    def _read_back(
        self,
        coordinator: SaveCoordinator,
        attempt: str,
        job: _SaveJob,
        checkpoint: StorePath,
        previous_name: str | None,
    ) -> None:
        """Have all ranks read back their files of a checkpoint, and withdraw it if any of them
        reports an error.

        If some rank does not answer, the checkpoint stays and so do older ones.

        Args:
            previous_name: The name that `latest` held before the commit.
        """
        coordinator.start_phase(attempt, READ_BACK)
        self._contribute(coordinator, attempt, job, READ_BACK)
        reports = coordinator.collect_reports(attempt, READ_BACK)
        try:
            _merge_reports(job.step, reports)
        except UserError:
            retract_checkpoint(self._root, checkpoint, previous_name, attempt)
            raise

    def _follow(self, coordinator: SaveCoordinator, job: _SaveJob) -> None:
        joined, old_failure = None, None
        phases = [*self._phases]
        if self._exports is not None and self._exports.is_due(job.step):
            phases.append(EXPORT)
        remaining_phases = [*phases]
        deadline_seconds = (1 + len(remaining_phases)) * self._timeout
        # Longer than the leader waits, because the leader can name the ranks that are missing.
        for _ in coordinator.poll(deadline_seconds):
            attempt = coordinator.read_latest_attempt()
            if attempt is not None and attempt != joined:
                old_failure = coordinator.read_outcome(attempt)
                if old_failure is None:
                    joined, remaining_phases = attempt, [*phases]
                    coordinator.send_report(joined, NEED, {"bytes": job.data.size})
            if joined is None:
                continue
            failure = coordinator.read_outcome(joined)
            if failure:
                raise UserError(failure)
            if failure is not None:
                return
            if remaining_phases and coordinator.has_started(joined, remaining_phases[0]):
                self._contribute(coordinator, joined, job, remaining_phases.pop(0))
        raise UserError(
            f"checkpoint of step {job.step} was abandoned by rank {self._rank} after "
            f"{deadline_seconds:g} s: rank 0 did not finish it"
            + (f" (it said: {old_failure})" if old_failure else "")
        )

    def _contribute(
        self, coordinator: SaveCoordinator, attempt: str, job: _SaveJob, phase: str
    ) -> None:
        """Write this rank's files (none if it has no data), read them back, or export some. Tell
        the leader which files they are, or what went wrong."""
        message: Message = {}
        try:
            if phase == WRITE:
                self._write_files(attempt, job)
            elif phase == EXPORT:
                assert self._exports is not None, "the phase of exports has begun"
                self._exports.write_part(job.step, attempt)
            else:
                for name, saved in job.files.items():
                    verify_shard_file(self._root / format_checkpoint_name(job.step) / name, saved)
            message = {"files": {name: saved.model_dump() for name, saved in job.files.items()}}
        except UserError as error:
            message = {"error": str(error)}
        except Exception:
            message = {"error": traceback.format_exc()}
        coordinator.send_report(attempt, phase, message)

    def _write_files(self, attempt: str, job: _SaveJob) -> None:
        job.files.clear()
        with ThreadPoolExecutor(self._backend.count_parallel_files(self._root)) as pool:
            entry_groups = enumerate(split_into_files(job.entries, self._backend.max_file_bytes))
            job.files.update(
                pool.map(
                    lambda numbered_group: self._make_file(attempt, job, *numbered_group),
                    entry_groups,
                )
            )

    def _make_file(
        self, attempt: str, job: _SaveJob, part_number: int, entries: Sequence[FileEntry]
    ) -> tuple[str, SavedFile]:
        draft = self._backend.make_draft_path(self._root, job.step, attempt)
        path = draft / self._backend.make_file_name(self._rank, part_number, attempt)
        with _explain_os_errors("cannot write", path, job.data.size, discard=path):
            aligned_data = job.data.wait_for_memory() if len(entries) == len(job.entries) else None
            saved = write_shard_file(path, entries, job.data.wait_for_entry, aligned_data)
            if self._verifies:
                verify_shard_file(path, saved)
        return path.name, saved


def _merge_reports(step: int, messages: Sequence[Message]) -> dict[str, SavedFile]:
    """Return the files that the ranks reported. Raises UserError with the first errors if any rank
    reported one."""
    if errors := _join_errors(messages):
        raise UserError(f"checkpoint of step {step} could not be saved: {errors}")
    return {
        name: SavedFile.model_validate(saved)
        for message in messages
        for name, saved in message["files"].items()
    }


def _join_errors(messages: Sequence[Message]) -> str:
    """Return the first errors that ranks reported; empty if none did."""
    errors = [
        f"rank {rank}: {message['error']}"
        for rank, message in enumerate(messages)
        if "error" in message
    ]
    omitted = f" (and {len(errors) - 3} more ranks)" if len(errors) > 3 else ""
    return "; ".join(errors[:3]) + omitted


def _require_space(root: StorePath, step: int, needed: int) -> None:
    free = store_of(root).free_bytes(root)
    if free is not None and free < needed:
        raise UserError(
            f"checkpoint of step {step} needs {needed:,} bytes but {root} has {free:,} bytes "
            "free; free some space or lower checkpoint.keep"
        )


@contextmanager
def _explain_os_errors(
    action: str, path: StorePath, needed: int | None = None, discard: StorePath | None = None
) -> Iterator[None]:
    """Turn an OSError into a UserError that names the path and, if `needed` is given, the needed
    and free bytes.

    Args:
        discard: A file to delete first, so that its bytes count as free.
    """
    try:
        yield
    except OSError as error:
        if discard is not None:
            store_of(discard).delete_file(discard)
        text = f"{action}: {error.filename or path}: {error.strerror}"
        if needed is not None:
            with suppress(OSError):
                free = store_of(path).free_bytes(path.parent)
                if free is not None:
                    text += f" (it needs {needed:,} bytes and {free:,} bytes are free)"
        raise UserError(text) from error
