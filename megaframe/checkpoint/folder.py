"""The home of a run's checkpoints: which are in it, which one is newest, which ones stay."""

from __future__ import annotations

from megaframe.checkpoint.names import FINAL, POINTER
from megaframe.checkpoint.storage import Place, store_of

_POINTER_BYTES = 64


def step_of(path: Place) -> int:
    """The step of what `checkpoints` finds."""
    match = FINAL.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def checkpoints(home: Place) -> list[Place]:
    """Whole checkpoints, newest (highest step) first. A replaced one comes after its successor."""
    found = []
    for name in store_of(home).finished(home):
        match = FINAL.fullmatch(name)
        if match:
            found.append((int(match[1]), match[2] is None, name))
    return [home / name for _, _, name in sorted(found, reverse=True)]


def read_pointer(home: Place) -> str | None:
    """The name that `latest` holds, whatever it may be; None where there is no such file."""
    try:
        source = store_of(home).open(home / POINTER)
    except FileNotFoundError:
        return None
    try:
        content = bytearray(min(source.size, _POINTER_BYTES))
        got = source.read_into(0, memoryview(content))
        return content[:got].decode(errors="replace").strip()
    finally:
        source.close()


def move_pointer(home: Place, name: str, attempt: str) -> None:
    store_of(home).replace(home / POINTER, f"{name}\n".encode("ascii"), attempt)


def take_back(home: Place, bad: Place, before: str | None, attempt: str) -> None:
    """Undo a commit: the pointer names again what it named before, or else the newest that is left,
    and the checkpoint goes. before: what `read_pointer` found, the same name where it was replaced.
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
    """Delete all but the one just written, the `keep - 1` newest others and those of steps that are
    multiples of `every` (0: of none), unless in use."""
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
