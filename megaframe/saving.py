"""Saving: when a run saves what, and what it continues from.

A save that fails ends no run: it is said, the last good checkpoint stays, and the next one is
tried. Only the last of a run has to succeed.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from pydantic import JsonValue

from megaframe.checkpoint import Checkpoint, Place, Slice, Writer, find, open_checkpoint, place
from megaframe.checkpoint.folder import checkpoints, step_of
from megaframe.checkpoint.gather import gather_json
from megaframe.checkpoint.memory import MemoryWriter, Peers
from megaframe.checkpoint.ram import Ram
from megaframe.checkpoint.recall import Recalled, recall
from megaframe.comm import Group, all_reduce
from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.mesh import Mesh, ranks_on_this_node

_LONG = 1.0
"""Seconds that a step waits for the save before, from which on it is said."""
_GRACE = 10.0
"""Seconds that a save may still take when the ranks begin again."""
_ID = "run-id"
"""File in the run folder: to which run copies in memory belong."""


class Saving:
    """One rank's part in all saves of one run."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        self._config, self._mesh = config, mesh
        self._folder = Path(config.run.dir)
        home = config.checkpoint.folder
        self.home = self._folder / "checkpoints" if home is None else place(home)
        self._group: Group | None = None
        self._ram: Ram | None = None
        self._writer: Writer | None = None
        self._memory: MemoryWriter | None = None
        self._notes: list[str] = []
        self._agreements = 0
        if config.checkpoint.memory_every:
            self._group = mesh.beside()
            self._ram = Ram.of(Path(config.checkpoint.memory_dir), self._folder)

    def newest(self) -> Checkpoint | None:
        """What `checkpoint.resume` asks for, open; None for a fresh start."""
        wanted = self._config.checkpoint.resume
        path = find(self.home, wanted, self._notes.append) if wanted else None
        saved = None if path is None else open_checkpoint(path)
        if wanted != "latest" or self._group is None or self._ram is None:
            return saved
        run = self._run_id(self._group)
        if run is None:
            return saved
        step = None if saved is None else saved.step
        recalled = recall(self._ram, run, self._group, step, self._notes.append)
        if recalled is None:
            return saved
        if saved is not None:
            saved.close()
        than = "none is saved" if step is None else f"the newest saved checkpoint is of step {step}"
        self._notes.append(f"resumed from copies in memory of step {recalled.step}; {than}")
        return recalled

    def take_notes(self) -> list[str]:
        """What is to be said, once the run can say anything."""
        notes, self._notes = self._notes, []
        return notes

    def agree(self, wrong: str) -> str:
        """What the first rank that has something to say says, to all ranks; empty where none has.
        All ranks call it."""
        mesh = self._mesh
        mine = mesh.rank if wrong else mesh.world.size
        first = int(all_reduce(torch.tensor(mine, device=mesh.device), mesh.world, "min").wait())
        if first == mesh.world.size:
            return ""
        return self._told(wrong if mesh.rank == first else None)

    def before(self, source: Checkpoint, wrong: str) -> Checkpoint:
        """The newest checkpoint before one that cannot be read, open. All ranks call it, and get
        the same. wrong: what is wrong with that one. Raises `UserError` where the config asks for
        that one by its name, or where none is left."""
        asked = self._config.checkpoint.resume
        if source.path.parent != self.home or (asked and source.path == place(asked)):
            raise UserError(wrong)
        text = json.dumps(_whole_before(self.home, source.step)) if self._mesh.rank == 0 else None
        name, problems = json.loads(self._told(text))
        wrong = "; ".join([wrong, *problems])
        if not name:
            raise UserError(f"{wrong}; no earlier checkpoint is intact")
        self._notes.append(f"{wrong}; resumed from {name} instead")
        return open_checkpoint(self.home / name)

    def _told(self, text: str | None) -> str:
        """What one rank tells all; None on the others. All ranks call it."""
        self._agreements += 1
        key, store = f"saving/{self._agreements}", self._mesh.store
        if text is not None:
            store.set(key, text)
        return store.get(key).decode()

    def begin(self, source: Checkpoint | None, saved: Callable[[int], None]) -> None:
        """Get ready to save. All ranks call it, when none needs anything any more that is saved but
        `source`, from which the run continues. saved: is told on the first rank of the step of each
        checkpoint that is there."""
        config, mesh = self._config, self._mesh
        if config.checkpoint.every:
            self._writer = Writer(
                self.home,
                rank=mesh.rank,
                world=mesh.layout.world,
                store=mesh.store,
                keep=config.checkpoint.keep,
                keep_every=config.checkpoint.keep_every,
                read_back=config.checkpoint.read_back,
                timeout=config.parallel.timeout,
                saved=saved,
            )
        if self._group is not None and self._ram is not None:
            size = config.parallel.node_size or ranks_on_this_node()
            peers = Peers.of(mesh.rank, mesh.layout.world, size)
            run = self._run_id(self._group, make=True)
            assert run is not None
            kept = source.step if isinstance(source, Recalled) else None
            self._memory = MemoryWriter(self._ram, self._group, peers, run, kept)

    def due(self, step: int, *, leaving: bool = False) -> Writer | MemoryWriter | None:
        """Who is to save after this step. What is saved needs no copy in memory. leaving: the run
        stops here, to be continued."""
        config, last = self._config.checkpoint, self._config.train.steps
        if self._writer is not None and (step % config.every == 0 or step == last or leaving):
            return self._writer
        if self._memory is None or step >= last:
            return None
        return self._memory if step % config.memory_every == 0 or leaving else None

    def start(
        self,
        writer: Writer | MemoryWriter,
        step: int,
        slices: Sequence[Slice],
        state: dict[str, JsonValue],
        note: Callable[[str], None],
    ) -> None:
        """Start a save, after the one before. The slices must not change before `copied`."""
        began = time.monotonic()
        self._report(writer.wait, note)
        waited = time.monotonic() - began
        if waited > _LONG:
            name = "every" if writer is self._writer else "memory_every"
            note(
                f"step {step} waited {waited:.1f} s for the previous save: checkpoint.{name}="
                f"{getattr(self._config.checkpoint, name)} saves more often than saves finish"
            )
        writer.save(step, slices, state)

    def watch(self, note: Callable[[str], None]) -> None:
        """Report saves that have failed since the last call."""
        for writer in (self._writer, self._memory):
            if writer is not None:
                self._report(writer.poll, note)

    def settle(self, note: Callable[[str], None]) -> None:
        """Return when nothing is being saved any more; a save that failed is reported."""
        for writer in (self._writer, self._memory):
            if writer is not None:
                self._report(writer.wait, note)

    def rewind(self) -> None:
        """The run has gone back to what is saved. All ranks call it, after `settle`: copies in
        memory are no newer, or of steps that are forgotten."""
        if self._memory is not None:
            self._memory.forget()

    def finish(self, note: Callable[[str], None], *, leaving: bool = False) -> None:
        """The run has ended whole, or, leaving, is to be continued: wait for its last save. Raises
        what went wrong with it."""
        if self._writer is not None:
            self._writer.wait()
        if self._memory is not None:
            self._report(self._memory.wait, note)
            if self._writer is not None or not leaving:
                self._memory.close()

    def let_go(self) -> None:
        """The ranks have lost each other, and begin again: return when what this rank is saving is
        there or has failed, or when it waits for too long for a rank that has not begun that."""
        for writer in (self._writer, self._memory):
            if writer is not None:
                writer.let_go(_GRACE)

    def _report(self, ask: Callable[[], object], note: Callable[[str], None]) -> None:
        try:
            ask()
        except UserError as error:
            note(f"warning: {error}; the run continues, and earlier checkpoints stay")

    def _run_id(self, group: Group, *, make: bool = False) -> str | None:
        """The id that rank 0 finds in the run folder; with `make`, else a new one."""
        path, found = self._folder / _ID, None
        if group.index == 0:
            if path.is_file():
                found = path.read_bytes()[:64].decode(errors="replace").strip()
            if make and not re.fullmatch("[0-9a-f]{16}", found or ""):
                found = secrets.token_hex(8)
                self._folder.mkdir(parents=True, exist_ok=True)
                path.write_text(found + "\n", encoding="ascii")
        told: str | None = gather_json(group, found)[0]
        return told


def _whole_before(home: Place, step: int) -> tuple[str, list[str]]:
    """The name of the newest checkpoint of a step before one whose manifest is whole and whose
    files have the right sizes, empty where there is none; and what is wrong with those between."""
    problems: list[str] = []
    for path in checkpoints(home):
        if step_of(path) < step:
            try:
                open_checkpoint(path).close()
            except UserError as error:
                problems.append(str(error))
            else:
                return path.name, problems
    return "", problems
