"""Measurements of layers that are kept: in the process, and for others in the user's cache.

A file of the cache holds what was measured of one layer in one situation. Its name is a digest of
both and of all code that could change the numbers, so it is never wrong, only unused; a damaged one
is measured again.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from megaframe.architecture.layer import LayerDescription
from megaframe.config import ParallelConfig, TrainConfig
from megaframe.config.registry import get_registry
from megaframe.io.regular_file import delete_file, list_folder, write_file
from megaframe.io.untrusted import read_file
from megaframe.model.layer_measurement import MeasuredLayer, measure_layer
from megaframe.model.measured import DIVIDING_KEYS

_MOST_BYTES = 1 << 20
_MOST_FILES = 4096
_PACKAGE = Path(__file__).resolve().parents[1]
_TRAIN = ("seq", "microbatch", "precision", "recompute")


def find_measurement(
    description: LayerDescription,
    hidden: int,
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    rank: int = 0,
) -> MeasuredLayer:
    """Return what `measure_layer` returns, measured once for each layer and situation. The
    arguments are those of `measure_layer`.

    Raises:
        UserError: As it does.
    """
    sizes = {name: getattr(parallel, name) for name in DIVIDING_KEYS}
    keys = {name: getattr(train, name) for name in _TRAIN}
    keys |= {"global_batch": train.microbatch}
    keys["recompute"] = "selective" if train.recompute == "selective" else "none"
    situation = tuple(sizes.items()), tuple(keys.items()), rank
    return _find_in_process(description, hidden, *situation)


@lru_cache(maxsize=4096)
def _find_in_process(
    description: LayerDescription,
    hidden: int,
    sizes: tuple[tuple[str, object], ...],
    keys: tuple[tuple[str, object], ...],
    rank: int,
) -> MeasuredLayer:
    code = _digest_code(description)
    situation = json.dumps([repr(description), hidden, sizes, keys, rank])
    # What has no lasting text or no source cannot be recognised by another process.
    path = None if code is None or " at 0x" in situation else _find_file(code, situation)
    kept = None if path is None else _read(path)
    if kept is not None:
        return kept
    parallel = ParallelConfig.model_validate(dict(sizes))
    train = TrainConfig.model_validate(dict(keys))
    measured = measure_layer(description, hidden, parallel, train, rank=rank)
    if path is not None:
        _write(path, measured)
    return measured


_FORMAT = TypeAdapter(MeasuredLayer)


def _find_file(code: str, situation: str) -> Path | None:
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return None
    digest = hashlib.sha256(f"{code} {situation}".encode()).hexdigest()[:32]
    return home / "megaframe" / "layers" / f"{digest}.json"


def _read(path: Path) -> MeasuredLayer | None:
    try:
        return _FORMAT.validate_json(read_file(path, _MOST_BYTES))
    except (OSError, ValidationError):
        return None


def _write(path: Path, measured: MeasuredLayer) -> None:
    """Write a file, if that is possible: without it the next process measures again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files = list_folder(path.parent)
        for name in files if len(files) >= _MOST_FILES else ():  # most are of code that has changed
            delete_file(path.parent / name)
        write_file(path, _FORMAT.dump_json(measured))


def _digest_code(description: LayerDescription) -> str | None:
    """Return a digest of what could change a measurement: our code, that of all extensions, of the
    description and of what it imports, and the names and versions of what is installed. None if
    the description has no source file."""
    file = getattr(sys.modules.get(type(description).__module__), "__file__", None)
    if file is None:
        return None
    try:
        own = _digest_sources(file)
    except (OSError, SyntaxError, ValueError):
        return None
    extensions = [extension.digest for extension in get_registry().extensions]
    return " ".join((_digest_package(), torch.__version__, own, *extensions))


@cache
def _digest_sources(file: str) -> str:
    """Return a digest of a file and of the files that it imports, directly or not, but for what is
    installed and our own."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    roots = [Path(root or ".") for root in sys.path if not root.startswith(installed)]
    digest, files = hashlib.sha256(), [Path(file)]
    for path in files:  # grows
        data = path.read_bytes()
        digest.update(f"{path.name} {len(data)}\n".encode() + data)
        for name in _list_imports(ast.parse(data)):
            parts = name.split(".")
            if parts[0] == __package__.partition(".")[0]:
                continue
            for root in roots:
                module = root.joinpath(*parts)
                found = (module.with_suffix(".py"), module / "__init__.py")
                files += (one for one in found if one.is_file() and one not in files)
    return digest.hexdigest()


def _list_imports(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules that a file imports anywhere, and names that may be modules. A
    module of the file's own package is in the digest of the extension."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _digest_package() -> str:
    digest = hashlib.sha256(" ".join(sorted(_list_installed())).encode())
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _list_installed() -> Iterator[str]:
    """Yield the names and versions of installed packages, as their folders say."""
    for folder in map(Path, sys.path):
        if folder.is_dir():
            yield from (name for name in os.listdir(folder) if name.endswith(".dist-info"))
