"""Saving: when a run saves what, and what it resumes from.

A failed save does not end the run: it is reported, the last good checkpoint stays, and the next
save is tried. Only the last save of a run must succeed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from pydantic import JsonValue

from megaframe.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Slice,
    StorePath,
    find_checkpoint,
    open_checkpoint,
    parse_path,
    resolve_checkpoint_folder,
)
from megaframe.checkpoint.exports import Exports
from megaframe.checkpoint.folder import RUN_SUBFOLDER, list_checkpoints, step_of
from megaframe.checkpoint.stores.memory_folder import MemoryFolder
from megaframe.checkpoint.stores.peer_memory import PeerMemoryWriter, PeerRanks, find_nodes
from megaframe.checkpoint.stores.peer_memory_load import PeerMemoryCheckpoint, open_peer_memory
from megaframe.config import CheckpointConfig, RunConfig, RunSection
from megaframe.distributed.collectives import Group, all_reduce
from megaframe.distributed.mesh import Mesh
from megaframe.distributed.object_collectives import gather_json
from megaframe.errors import UserError
from megaframe.io.regular_file import write_file
from megaframe.io.run_files import RUN_ID_FILE
from megaframe.io.untrusted import read_file

_LONG_WAIT = 1.0
"""Seconds that a step may wait for the previous save before a line reports it."""
_GRACE_SECONDS = 10.0
"""Seconds that a save in progress may still take at an in-process restart."""
_RUN_ID_BYTES = 64


class CheckpointManager:
    """One rank's part in all saves of one run."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        self._config, self._mesh = config, mesh
        self._run_folder = Path(config.run.dir)
        self.root = resolve_checkpoint_folder(config.run, config.checkpoint)
        self._memory_group: Group | None = None
        self._memory_folder: MemoryFolder | None = None
        self._writer: CheckpointWriter | None = None
        self._memory_writer: PeerMemoryWriter | None = None
        self._notes: list[str] = []
        self._last_saved: int | None = None
        self._agreements = 0
        self._exports: Exports | None = None
        if config.checkpoint.huggingface_every:
            from megaframe.checkpoint.convert.huggingface.run_exports import RunExports

            self._exports = RunExports(config, self.root, mesh.rank, mesh.layout.world)
        if config.checkpoint.memory_every:
            self._memory_group = mesh.make_control_group()
            self._memory_folder = MemoryFolder.create(
                Path(config.checkpoint.memory_dir), self._run_folder
            )

    def open_newest(self) -> Checkpoint | None:
        """Open the checkpoint that `checkpoint.resume` asks for, or newer copies in memory with
        `latest`. None for a fresh start."""
        resume = self._config.checkpoint.resume
        path = find_checkpoint(self.root, resume, self._notes.append) if resume else None
        checkpoint = None if path is None else open_checkpoint(path)
        if resume != "latest" or self._memory_group is None or self._memory_folder is None:
            return checkpoint
        run_id = self._run_id(self._memory_group)
        if run_id is None:
            return checkpoint
        step = None if checkpoint is None else checkpoint.step
        copies = open_peer_memory(
            self._memory_folder, run_id, self._memory_group, step, self._notes.append
        )
        if copies is None:
            return checkpoint
        if checkpoint is not None:
            checkpoint.close()
        comparison = (
            "none is saved" if step is None else f"the newest saved checkpoint is of step {step}"
        )
        self._notes.append(f"copies in memory of step {copies.step} are used; {comparison}")
        return copies

    def take_notes(self) -> list[str]:
        """Return the notes so far and forget them. They are kept until the run can log lines."""
        notes, self._notes = self._notes, []
        return notes

    def agree_on_error(self, error: str) -> str:
        """Return, on all ranks, the text of the first rank whose `error` is not empty; empty if
        there is none. All ranks must call this."""
        mesh = self._mesh
        own_rank = mesh.rank if error else mesh.world.size
        first = int(
            all_reduce(torch.tensor(own_rank, device=mesh.device), mesh.world, "min").wait()
        )
        if first == mesh.world.size:
            return ""
        return self._broadcast(error if mesh.rank == first else None)

    def open_previous(self, source: Checkpoint, error: str) -> Checkpoint:
        """Open the newest intact checkpoint before `source`, which cannot be read.

        All ranks must call this, and get the same one.

        Args:
            source: The checkpoint that cannot be read.
            error: What is wrong with `source`.

        Raises:
            UserError: If the config asks for `source` by name, if `source` is not in the root of
                the run's checkpoints, or if no earlier checkpoint is intact.
        """
        resume = self._config.checkpoint.resume
        if source.path.parent != self.root or (resume and source.path == parse_path(resume)):
            raise UserError(error)
        text = (
            json.dumps(_find_newest_intact_before(self.root, source.step))
            if self._mesh.rank == 0
            else None
        )
        name, problems = json.loads(self._broadcast(text))
        error = "; ".join([error, *problems])
        if not name:
            raise UserError(f"{error}; no earlier checkpoint is intact")
        self._notes.append(f"{error}; {name} is used instead")
        return open_checkpoint(self.root / name)

    def _broadcast(self, text: str | None) -> str:
        """Return the text of one rank on all ranks; the others pass None. All ranks must call
        this."""
        self._agreements += 1
        key, store = f"saving/{self._agreements}", self._mesh.store
        if text is not None:
            store.set(key, text)
        return store.get(key).decode()

    def create_writers(self, source: Checkpoint | None, saved: Callable[[int], None]) -> None:
        """Create the writers.

        All ranks must call this, once none of them needs any saved checkpoint but `source`.

        Args:
            source: The checkpoint from which the run continues, if any.
            saved: Called on the first rank with the step of each complete checkpoint.
        """
        config, mesh = self._config, self._mesh
        if config.checkpoint.every:
            self._writer = CheckpointWriter(
                self.root,
                rank=mesh.rank,
                world=mesh.layout.world,
                store=mesh.store,
                keep=config.checkpoint.keep,
                keep_every=config.checkpoint.keep_every,
                keep_best=config.checkpoint.keep_best,
                read_back=config.checkpoint.read_back,
                timeout=config.parallel.timeout,
                saved=saved,
                exports=self._exports,
            )
        if self._memory_group is not None and self._memory_folder is not None:
            nodes = find_nodes(self._memory_folder, self._memory_group)
            peers = PeerRanks.find(mesh.rank, nodes)
            run_id = self._run_id(self._memory_group, create=True)
            assert run_id is not None
            step_in_memory = source.step if isinstance(source, PeerMemoryCheckpoint) else None
            self._memory_writer = PeerMemoryWriter(
                self._memory_folder, self._memory_group, peers, run_id, step_in_memory
            )

    def choose_writer(
        self, step: int, *, leaving: bool = False
    ) -> CheckpointWriter | PeerMemoryWriter | None:
        """Return the writer to save with after this step, or None.

        A step that is saved to the checkpoint folder needs no copy in memory.

        Args:
            step: The step that has just been done.
            leaving: Whether the run stops after this step, to be continued later.
        """
        config, last = self._config.checkpoint, self._config.train.last_step
        if self._writer is not None and (step % config.every == 0 or step == last or leaving):
            return self._writer
        if self._memory_writer is None or step >= last:
            return None
        return self._memory_writer if step % config.memory_every == 0 or leaving else None

    def start_save(
        self,
        writer: CheckpointWriter | PeerMemoryWriter,
        step: int,
        slices: Sequence[Slice],
        state: dict[str, JsonValue],
        note: Callable[[str], None],
    ) -> None:
        """Start a save once the previous one is finished.

        Args:
            writer: The writer of files, or that of copies in memory.
            step: The step to save.
            slices: What this rank saves. They must not change before the writer's `wait_for_copy`
                returns.
            state: The state of the run, as JSON values.
            note: Called with failures of the previous save, and if the wait for it was long.
        """
        began = time.monotonic()
        self._report(writer.wait, note)
        self._report_exports(note)
        waited = time.monotonic() - began
        if waited > _LONG_WAIT:
            key = "every" if writer is self._writer else "memory_every"
            note(
                f"step {step} waited {waited:.1f} s for the previous save: checkpoint.{key}="
                f"{getattr(self._config.checkpoint, key)} saves more often than saves finish"
            )
        writer.save(step, slices, state)
        if writer is self._writer:
            self._last_saved = step

    def report_failures(self, note: Callable[[str], None]) -> None:
        """Report the saves that have failed since the last call."""
        for writer in (self._writer, self._memory_writer):
            if writer is not None:
                self._report(writer.poll, note)
        self._report_exports(note)

    def wait_for_saves(self, note: Callable[[str], None]) -> None:
        """Wait for all saves in progress; a failed one is reported."""
        for writer in (self._writer, self._memory_writer):
            if writer is not None:
                self._report(writer.wait, note)
        self._report_exports(note)

    def forget_memory_copies(self) -> None:
        """Forget the copies in memory after the run has gone back to a saved checkpoint: they are
        not newer than it, or of steps that were undone. All ranks must call this, after
        `wait_for_saves`."""
        if self._memory_writer is not None:
            self._memory_writer.forget()

    def finish(self, note: Callable[[str], None], *, leaving: bool = False) -> None:
        """Wait for the last save, at the end of the run or, with `leaving`, of a run that will be
        continued. Raises the error of a failed save to the checkpoint folder."""
        if self._writer is not None:
            self._writer.wait()
            self._report_exports(note)
        if self._memory_writer is not None:
            self._report(self._memory_writer.wait, note)
            if self._writer is not None or not leaving:
                self._memory_writer.close()

    def list_missing(self) -> list[str]:
        """Return what is missing after `finish`, as part of a sentence, on the first rank: whether
        somebody has deleted the checkpoint that was just saved."""
        if self._writer is None or self._mesh.rank or self._last_saved is None:
            return []
        try:
            steps = {step_of(path) for path in list_checkpoints(self.root)}
        except OSError:  # a store that does not answer now has said before that it has it
            return []
        if self._last_saved in steps:
            return []
        return [f"the checkpoint of step {self._last_saved} is gone from {self.root}"]

    def wait_briefly(self) -> None:
        """Before an in-process restart, wait until the save in progress on this rank is complete or
        has failed, at most `_GRACE_SECONDS` seconds: it may be waiting for a rank that has not
        begun it."""
        for writer in (self._writer, self._memory_writer):
            if writer is not None:
                writer.wait_at_most(_GRACE_SECONDS)

    def _report(self, wait_or_poll: Callable[[], object], note: Callable[[str], None]) -> None:
        try:
            wait_or_poll()
        except UserError as error:
            note(f"warning: {error}; the run continues, and earlier checkpoints stay")

    def _report_exports(self, note: Callable[[str], None]) -> None:
        for failure in self._writer.take_export_failures() if self._writer is not None else ():
            note(f"warning: {failure}; the checkpoint is saved, and export-hf can export it")

    def _run_id(self, group: Group, *, create: bool = False) -> str | None:
        """Return, on all ranks, the run id that the group's first rank reads from the run folder,
        None if there is none. With `create`, that rank writes a new id if there is no valid one."""
        path, run_id = self._run_folder / RUN_ID_FILE, None
        if group.index == 0:
            with suppress(OSError):
                content = read_file(path, _RUN_ID_BYTES, inside=self._run_folder)
                run_id = content.decode(errors="replace").strip()
            if create and not re.fullmatch("[0-9a-f]{16}", run_id or ""):
                run_id = secrets.token_hex(8)
                write_file(path, run_id + "\n", inside=self._run_folder)
        shared_id: str | None = gather_json(group, run_id)[0]
        return shared_id


def list_written_folders(run: RunSection, checkpoint: CheckpointConfig) -> dict[str, StorePath]:
    """Return the folders that a run writes and no other run may, by config key.

    Raises:
        UserError: If the folder of checkpoints in the run folder is a link, by which a run folder
            of somebody else would delete another run's checkpoints.
    """
    own = Path(run.dir) / RUN_SUBFOLDER
    if checkpoint.folder is None and own.is_symlink():
        raise UserError(
            f"{own} is a link, and links in a run folder are not followed; set "
            f"checkpoint.folder={os.path.realpath(own)} if checkpoints belong there"
        )
    folders: dict[str, StorePath] = {"run.dir": Path(run.dir)}
    if checkpoint.every:
        folders["checkpoint.folder"] = resolve_checkpoint_folder(run, checkpoint)
    return folders


def _find_newest_intact_before(root: StorePath, step: int) -> tuple[str, list[str]]:
    """Return the name of the newest checkpoint before `step` whose manifest is complete and whose
    files have the right sizes (empty if there is none), and what is wrong with newer ones."""
    problems: list[str] = []
    for path in list_checkpoints(root):
        if step_of(path) < step:
            try:
                open_checkpoint(path).close()
            except UserError as error:
                problems.append(str(error))
            else:
                return path.name, problems
    return "", problems
