"""The folder of a run's checkpoints ("home"): lists them, keeps the pointer, deletes old ones."""

from __future__ import annotations

from megaframe.checkpoint.names import FINAL, POINTER
from megaframe.checkpoint.stores.store import Place, store_of

_POINTER_BYTES = 64


def step_of(path: Place) -> int:
    """Return the step of a checkpoint that `checkpoints` found."""
    match = FINAL.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def checkpoints(home: Place) -> list[Place]:
    """Return the complete checkpoints, highest step first. A replaced one follows its successor."""
    found = []
    for name in store_of(home).finished(home):
        match = FINAL.fullmatch(name)
        if match:
            found.append((int(match[1]), match[2] is None, name))
    return [home / name for _, _, name in sorted(found, reverse=True)]


def read_pointer(home: Place) -> str | None:
    """Return the unchecked contents of the file `latest`, or None if there is no such file."""
    content = store_of(home).content(home / POINTER, _POINTER_BYTES)
    return None if content is None else content.decode(errors="replace").strip()


def move_pointer(home: Place, name: str, attempt: str) -> None:
    store_of(home).replace(home / POINTER, f"{name}\n".encode("ascii"), attempt)


def take_back(home: Place, bad: Place, before: str | None, attempt: str) -> None:
    """Undo a commit: move the pointer back and delete the checkpoint `bad`.

    The pointer then names the checkpoint that it named before or, if that is gone, the newest one
    left; if none is left, it is deleted. before: what `read_pointer` returned before the commit. If
    the commit replaced the checkpoint of that name, its `.replaced` copy is named.
    """
    store = store_of(home)
    left = [path.name for path in checkpoints(home) if path != bad]
    wanted = [name for name in (before, f"{before}.replaced") if name in left] + left
    if wanted:
        move_pointer(home, wanted[0], attempt)
    store.remove(bad, attempt)
    if not wanted:
        store.delete(home / POINTER)


def prune(home: Place, written: Place, keep: int, every: int, attempt: str) -> None:
    """Delete old checkpoints that are not in use.

    Kept are the one just written, the `keep - 1` newest others, and those whose steps are multiples
    of `every` (0: none).
    """
    store = store_of(home)
    found = checkpoints(home)
    successors = {path.name for path in found}
    kept = 1
    for path in found:
        if path == written:
            continue
        stem = path.name.removesuffix(".replaced")
        is_replaced = stem != path.name and stem in successors
        if not is_replaced and kept < keep:
            kept += 1
        elif not is_replaced and every and step_of(path) % every == 0:
            continue
        elif not store.is_in_use(path):
            store.remove(path, attempt)
