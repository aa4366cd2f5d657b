"""The folder of a run's checkpoints ("root"): finds and lists them, keeps the pointer, deletes old
ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from megaframe.checkpoint.load import open_checkpoint
from megaframe.checkpoint.manifest import MANIFEST
from megaframe.checkpoint.stores.store import (
    BEST,
    CHECKPOINT_NAME,
    POINTER,
    StorePath,
    format_checkpoint_name,
    is_temporary,
    parse_path,
    store_of,
)
from megaframe.config import CheckpointConfig, RunSection
from megaframe.config.load import load_from_run
from megaframe.errors import UserError
from megaframe.io.run_files import CONFIG_FILE

ACCEPTED_PATHS = (
    "a checkpoint, or a folder of checkpoints or a run folder, whose latest is used; path or URL"
)
"""What `locate_checkpoint` takes, in words for help and messages."""
RUN_SUBFOLDER = "checkpoints"
"""Folder of checkpoints in a run folder."""
_POINTER_BYTES = 64
_LOCATION_KEYS = ("run.dir", "checkpoint.folder")


@dataclass(frozen=True)
class LatestCheckpoints:
    """The checkpoints of which the latest is meant.

    Attributes:
        paths: The one that the pointer names, then the others, highest step first; a checkpoint
            that is meant itself is alone.
        folder: Where they are; None for a checkpoint that is meant itself.
        pointer: What the file `latest` there names; None without that file.
    """

    paths: tuple[StorePath, ...]
    folder: StorePath | None = None
    pointer: str | None = None

    @property
    def pointer_path(self) -> StorePath:
        """The file `latest`."""
        assert self.folder is not None
        return self.folder / POINTER

    @property
    def lost(self) -> str | None:
        """That the pointer names a checkpoint that is not there, or None."""
        if self.pointer is None or any(path.name == self.pointer for path in self.paths):
            return None
        if not CHECKPOINT_NAME.fullmatch(self.pointer):  # a link can lead to any file
            return f"{self.pointer_path} names no checkpoint"
        return f"{self.pointer_path} names {self.pointer!r}, which is not there"


def step_of(path: StorePath) -> int:
    """Return the step of a checkpoint that `list_checkpoints` found."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def list_checkpoints(root: StorePath) -> list[StorePath]:
    """Return the complete checkpoints, highest step first. A replaced one follows its successor."""
    matches = []
    for name in store_of(root).list_committed(root):
        match = CHECKPOINT_NAME.fullmatch(name)
        if match:
            matches.append((int(match[1]), match[2] is None, name))
    return [root / name for _, _, name in sorted(matches, reverse=True)]


def read_pointer(root: StorePath, pointer: str = POINTER) -> str | None:
    """Return the unchecked contents of the file `latest`, or of `best`, or None if there is no such
    file."""
    content = store_of(root).read_small_file(root / pointer, _POINTER_BYTES)
    return None if content is None else content.decode(errors="replace").strip()


def move_pointer(root: StorePath, name: str, attempt: str, pointer: str = POINTER) -> None:
    """Let the file `latest` name a checkpoint.

    Args:
        root: The folder of checkpoints.
        name: Name of the checkpoint.
        attempt: Id of the save.
        pointer: The file, if it is not `latest`.
    """
    store_of(root).replace_file(root / pointer, f"{name}\n".encode("ascii"), attempt)


def retract_checkpoint(root: StorePath, bad: StorePath, before: str | None, attempt: str) -> None:
    """Undo a commit: move the pointer back and delete the checkpoint `bad`.

    The pointer then names the checkpoint that it named before or, if that is gone, the newest one
    left; if none is left, it is deleted.

    Args:
        root: The folder of checkpoints.
        bad: The checkpoint to delete.
        before: What `read_pointer` returned before the commit. If the commit replaced the
            checkpoint of that name, its `.replaced` copy is named.
        attempt: Id of the save that undoes the commit.
    """
    store = store_of(root)
    remaining = [path.name for path in list_checkpoints(root) if path != bad]
    candidates = [name for name in (before, f"{before}.replaced") if name in remaining] + remaining
    if candidates:
        move_pointer(root, candidates[0], attempt)
    store.remove_checkpoint(bad, attempt)
    if not candidates:
        store.delete_file(root / POINTER)


def prune_checkpoints(
    root: StorePath,
    written: StorePath,
    keep: int,
    every: int,
    attempt: str,
    best: Collection[str] = (),
) -> None:
    """Delete old checkpoints that are not in use.

    Args:
        root: The folder of checkpoints.
        written: The one just written, which is kept.
        keep: Number of checkpoints to keep: that one and the `keep - 1` newest others.
        every: Checkpoints whose steps are multiples of this are kept, too; 0: none.
        attempt: Id of the save.
        best: Names of checkpoints that are kept, too.
    """
    store = store_of(root)
    checkpoints = list_checkpoints(root)
    successors = {path.name for path in checkpoints}
    num_kept = 1
    for path in checkpoints:
        if path == written:
            continue
        stem = path.name.removesuffix(".replaced")
        is_replaced = stem != path.name and stem in successors
        if not is_replaced and num_kept < keep:
            num_kept += 1
        elif path.name in best or (not is_replaced and every and step_of(path) % every == 0):
            continue
        elif not store.is_in_use(path):
            store.remove_checkpoint(path, attempt)


def _print_warning(text: str) -> None:
    print(text, file=sys.stderr)


def resolve_checkpoint_folder(run: RunSection, checkpoint: CheckpointConfig) -> StorePath:
    """Return the folder in which a run saves its checkpoints."""
    folder = checkpoint.folder
    return Path(run.dir) / RUN_SUBFOLDER if folder is None else parse_path(folder)


def find_checkpoint(
    root: StorePath, resume: str, note: Callable[[str], None] = _print_warning
) -> StorePath | None:
    """Find the checkpoint that `checkpoint.resume` asks for.

    Args:
        root: The folder of the run's checkpoints.
        resume: `latest`, `best`, or what `locate_checkpoint` takes. `latest` means the checkpoint
            that the pointer in `root` names. If that is not intact, the newest intact one is
            returned; if there is none yet, None is returned.
        note: Called with the reason if the checkpoint asked for is not intact and another one is
            returned.

    Raises:
        UserError: As `locate_checkpoint`.
    """
    if resume == BEST:
        return locate_checkpoint(root / BEST, "checkpoint.resume", note)
    if resume != "latest":
        return locate_checkpoint(resume, "checkpoint.resume", note)
    try:
        checkpoints = _list_latest(root)
        return None if checkpoints is None else _find_newest_intact(checkpoints, note)
    except OSError as error:
        raise _make_unreachable_error(root, error) from None


def locate_checkpoint(
    location: str | StorePath, key: str, note: Callable[[str], None] | None = None
) -> StorePath:
    """Return the checkpoint that a path or URL stands for: `ACCEPTED_PATHS`.

    A checkpoint that is given itself is not checked here; opening it does that.

    Args:
        location: The path or URL.
        key: The config key or the option that gives it, for messages.
        note: Called with the reason if the latest checkpoint is not intact and the newest intact
            one is returned. Without it that is an error: who asks for the latest does not get the
            numbers of another one.

    Raises:
        UserError: If there is no checkpoint, none in the folder is intact, the latest is not and
            there is no `note`, or its store cannot be reached.
    """
    checkpoints = list_latest_checkpoints(location, key)
    if checkpoints.folder is None:
        return checkpoints.paths[0]
    return _find_newest_intact(checkpoints, note)


def list_latest_checkpoints(location: str | StorePath, key: str) -> LatestCheckpoints:
    """Return the checkpoints that a path or URL may stand for (see `locate_checkpoint`).

    Raises:
        UserError: If there is none, or its store cannot be reached.
    """
    path = parse_path(location) if isinstance(location, str) else location
    store = store_of(path)
    try:
        if path.name in (POINTER, BEST) and not store.is_folder(path):
            return _follow_pointer(path, key)
        if not store.is_folder(path):
            raise UserError(f"{key}={path}: there is no such folder; it takes {ACCEPTED_PATHS}")
        if is_temporary(path.name):
            raise UserError(f"{key}={path} is a save that was never finished")
        if CHECKPOINT_NAME.fullmatch(path.name) or MANIFEST in store.list_entries(path):
            return LatestCheckpoints((path,))
        for root in _list_candidate_folders(path):
            if (checkpoints := _list_latest(root)) is not None:
                return checkpoints
    except OSError as error:
        raise _make_unreachable_error(path, error) from None
    raise UserError(f"{key}={path}: there is no checkpoint in it; it takes {ACCEPTED_PATHS}")


def _follow_pointer(path: StorePath, key: str) -> LatestCheckpoints:
    """Return the checkpoint that FOLDER/best or FOLDER/latest stands for. Raises `UserError` if
    there is none."""
    for root in _list_candidate_folders(path.parent):
        name = read_pointer(root, path.name)
        for checkpoint in list_checkpoints(root) if name is not None else ():
            if checkpoint.name == name:
                return LatestCheckpoints((checkpoint,))
    why = "checkpoint.keep_best keeps one" if path.name == BEST else "and there is no such folder"
    raise UserError(f"{key}={path}: no checkpoint there is the {path.name} one; {why}")


def _list_candidate_folders(path: StorePath) -> Iterator[StorePath]:
    """Yield the folders in which checkpoints may be if `path` is no checkpoint: itself, and if it
    is a run folder, where the run saves. Raises `UserError` after them if that is an URL: somebody
    else's run must not choose whom this machine talks to."""
    yield path
    url = None
    if isinstance(path, Path) and (path / CONFIG_FILE).is_file():
        run = load_from_run(path, _LOCATION_KEYS)
        if run.checkpoint.folder is not None:
            saved = resolve_checkpoint_folder(run.run, run.checkpoint)
            if isinstance(saved, Path):
                yield saved
            else:
                url = saved
    yield path / RUN_SUBFOLDER  # also of a run folder that was moved
    if url is not None:
        raise UserError(
            f"{path} has no checkpoint, and its {CONFIG_FILE} says that they are in {url}; if you "
            "trust it, give that URL"
        )


def _make_unreachable_error(path: StorePath, error: OSError) -> UserError:
    return UserError(f"cannot look for checkpoints in {path}: {error.strerror}")


def _list_latest(folder: StorePath) -> LatestCheckpoints | None:
    """Return the checkpoints of a folder; None if nothing was ever saved there."""
    pointer = read_pointer(folder)
    checkpoints = list_checkpoints(folder)
    if pointer is None and not checkpoints:
        return None
    # The pointer's contents are not trusted: only a checkpoint found in this folder is used.
    pointed_to = [path for path in checkpoints if path.name == pointer]
    others = [path for path in checkpoints if path not in pointed_to]
    return LatestCheckpoints((*pointed_to, *others), folder, pointer)


def _find_newest_intact(
    checkpoints: LatestCheckpoints, note: Callable[[str], None] | None
) -> StorePath:
    lost = checkpoints.lost
    problems = [lost] if lost else []
    for path in checkpoints.paths:
        try:
            open_checkpoint(path).close()
        except UserError as error:
            problems.append(str(error))
            continue
        if problems and note is None:
            raise UserError(
                f"the latest checkpoint in {checkpoints.folder} cannot be used: "
                f"{'; '.join(problems)}. To use the newest that is intact, give {path}"
            )
        if checkpoints.pointer is None:
            problems.append(f"{checkpoints.pointer_path} is missing")
        if problems:
            (note or _print_warning)(f"warning: {path} is used instead: {'; '.join(problems)}")
        return path
    folder = checkpoints.folder
    raise UserError(
        f"no intact checkpoint is left in {folder}: "
        f"{'; '.join(problems)}. To start from scratch, remove {checkpoints.pointer_path} and "
        f"every {format_checkpoint_name(0)[:5]}* there"
    )
