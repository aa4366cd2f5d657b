"""The folder of a run's checkpoints: what its entries are called, which one is newest.

A checkpoint has its final name only once it is whole, and loses that name before any of it is
deleted. So whoever may be killed, and whenever, a folder under a final name is a whole checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path

from megaframe.checkpoint.manifest import MANIFEST

POINTER = "latest"
_FINAL = re.compile(r"step-([0-9]{8,12})(\.replaced)?")
_TEMPORARY = re.compile(r"step-[0-9]{8,12}(\.replaced)?\.[0-9a-f]+\.tmp")


def final_name(step: int) -> str:
    return f"step-{step:08d}"


def is_temporary(name: str) -> bool:
    return name.endswith(".tmp")


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, newest (highest step) first. A replaced one comes after its successor."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FINAL.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), match[2] is None, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def step_of(path: Path) -> int:
    """The step of a whole checkpoint, by its name."""
    match = _FINAL.fullmatch(path.name)
    assert match is not None, "as `checkpoints` gives it"
    return int(match[1])


def read_pointer(folder: Path) -> str | None:
    """The name that `latest` holds, whatever it may be; None where there is no such file."""
    try:
        return (folder / POINTER).read_bytes()[:64].decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def move_pointer(folder: Path, name: str, attempt: str) -> None:
    temporary = folder / f"{POINTER}.{attempt}.tmp"
    with open(temporary, "w", encoding="ascii") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / POINTER)
    flush(folder)


def flush(folder: Path) -> None:
    """Make the names in a folder as durable as the files that they name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, step: int, attempt: str) -> Path:
    """Give a whole checkpoint its final name.

    One that an earlier run left under that name stays, as `.replaced`, until the new one is in
    place: `checkpoints` finds it if this is as far as the process gets.
    """
    folder = temporary.parent
    final = folder / final_name(step)
    replaced = folder / f"{final.name}.replaced"
    if final.exists():
        if replaced.exists():
            remove(replaced, attempt)
        os.rename(final, replaced)
    os.rename(temporary, final)
    flush(folder)
    return final


def prune(folder: Path, written: Path, keep: int, attempt: str) -> None:
    """Delete all but the one just written and the `keep - 1` newest others, unless in use."""
    successors = {path.name for path in checkpoints(folder)}
    kept = 1
    for path in checkpoints(folder):
        if path == written:
            continue
        is_replaced = path.suffix == ".replaced" and path.stem in successors
        if not is_replaced and kept < keep:
            kept += 1
        elif not is_in_use(path):
            remove(path, attempt)


def remove(path: Path, attempt: str) -> None:
    """Delete a folder, under a temporary name. What cannot be deleted is left for next time."""
    gone = path if is_temporary(path.name) else path.with_name(f"{path.name}.{attempt}.tmp")
    try:
        if gone != path:
            os.rename(path, gone)
    except OSError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def remove_stale(folder: Path) -> None:
    """Delete what killed saves have left."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif re.fullmatch(rf"{POINTER}\.[0-9a-f]+\.tmp", path.name):
            path.unlink(missing_ok=True)


def is_in_use(path: Path) -> bool:
    """Whether any process has the checkpoint open (see `hold`)."""
    try:
        with open(path / MANIFEST, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # Damaged, or a file system without locks: then nothing can be known to be in use.
        return False
    return False


def hold(descriptor: int) -> None:
    """Keep a checkpoint from being deleted while its manifest stays open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        # Without locks the file can still be read; a file that vanishes meanwhile is named.
        return
