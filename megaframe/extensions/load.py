"""How extensions are loaded.

An extension is a Python file, or an importable package, with a function `register(registry)` that
calls `registry.register(Section)` for each part. It is loaded because a user's config or command
line names it in `run.extensions`, and for no other reason: `load_extensions` is called for the
config that starts a run, and not for those in checkpoints or in folders of other runs.

An extension may import torch; one that must be planned for without torch imports it within the
methods that make torch code.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from megaframe.config.keys import format_value
from megaframe.config.load import (
    load,
    load_from_run,
    read_extension_names,
    read_extension_names_from_run,
)
from megaframe.config.read import ConfigMistake
from megaframe.config.registry import Extension, Registry, activate, get_registry
from megaframe.config.schema import RunConfig
from megaframe.errors import UserError
from megaframe.io.run_files import CONFIG_FILE

_LINES = 4
"""Lines of a traceback that a message repeats."""
_PREFIX = "megaframe_extension_"


def load_with_extensions(path: str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return a user's own config like `megaframe.config.load`, after loading the extensions that it
    names."""
    load_extensions(path, overrides)
    return load(path, overrides)


def load_extensions(path: str | None, overrides: Sequence[str] = ()) -> None:
    """Load the extensions that a user's own config names, in order; those of earlier configs are
    forgotten.

    Args:
        path: The file, or the name of a shipped config, or None.
        overrides: `section.key=value` texts.

    Raises:
        UserError: One cannot be loaded; it names the line of the config.
    """
    registry = Registry()
    for name, origin, line in read_extension_names(path, overrides):
        try:
            _load_extension(name, registry)
        except UserError as error:
            mistake = ConfigMistake(origin, line, f"run.extensions: {name}: {error}")
            raise UserError(str(mistake)) from None
    activate(registry)


def load_named_extensions(names: Sequence[str]) -> None:
    """Load extensions that a command line names by an option of its own, if it names any.

    Args:
        names: As in `run.extensions`.

    Raises:
        UserError: As `load_extensions` does.
    """
    if names:
        load_extensions(None, [f"run.extensions={json.dumps([*names])}"])


def add_extension_option(parser: argparse.ArgumentParser) -> None:
    """Add `--extension` to a tool that reads what a run has left, for `load_named_extensions`."""
    parser.add_argument(
        "--extension",
        action="append",
        default=[],
        metavar="FILE",
        help="an extension of the run, if you trust it, as in run.extensions; may be repeated",
    )


def load_config_of_run(folder: Path) -> RunConfig:
    """Return the config in the folder of a run. The extensions that it names are not loaded.

    Args:
        folder: The folder.

    Raises:
        UserError: With all mistakes, or with the extensions that are not loaded, if there would be
            mistakes without them.
    """
    try:
        return load_from_run(folder)
    except UserError:
        refuse_missing_extensions(read_extension_names_from_run(folder), folder / CONFIG_FILE)
        raise


def refuse_missing_extensions(names: Collection[str], source: object) -> None:
    """Raise `UserError` if what a run has left needs extensions that are not loaded. They are never
    loaded because it names them: it may be somebody else's.

    Args:
        names: Those that the run had loaded.
        source: What the run has left, for the message.
    """
    loaded = [extension.name for extension in get_registry().extensions]
    missing = [name for name in names if name not in loaded]
    if missing:
        needed = [*loaded, *missing]
        count = (
            "1 extension, which"
            if len(names) == 1
            else f"{len(names)} extensions, of which {len(missing)}"
        )
        verb, pronoun = ("is", "it") if len(missing) == 1 else ("are", "them")
        raise UserError(
            f"{source} is of a run with {count} {verb} not loaded here: "
            f"{', '.join(missing)}; if you trust {pronoun}, give "
            f"run.extensions={format_value(needed)} to a run, or to a tool "
            f"{' '.join(f'--extension {name}' for name in needed)}"
        )


def _load_extension(name: str, registry: Registry) -> None:
    if any(extension.name == name for extension in registry.extensions):
        raise UserError("is named twice")
    source = _find_source(name)
    files = _list_files(source)
    digest = hashlib.sha256()
    for file in files:
        data = file.read_bytes()
        digest.update(f"{file.name} {len(data)}\n".encode() + data)
        for mistake in find_mistakes(file, data):
            raise UserError(mistake)
    module = _import(name, source, digest.hexdigest())
    register = getattr(module, "register", None)
    if not callable(register):
        raise UserError("has no function register(registry), which is called to get its parts")
    try:
        register(registry)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"its register fails:\n{_format_error(error)}") from None
    registry.extensions.append(Extension(name, digest.hexdigest()))


def _find_source(name: str) -> Path:
    """Return the file of an extension, or the folder or file of a package."""
    if name.endswith(".py") or "/" in name:
        if not Path(name).is_file():
            raise UserError(f"there is no such file in {Path.cwd()}")
        return Path(name).resolve()
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise UserError(f"cannot be imported: {error}") from None
    if spec is None or spec.origin is None:
        raise UserError(
            "is neither a file nor a package that Python finds; a path of a file ends with .py"
        )
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def _list_files(source: Path) -> list[Path]:
    return [source] if source.is_file() else sorted(source.rglob("*.py"))


def _import(name: str, source: Path, digest: str) -> ModuleType:
    try:
        if not (name.endswith(".py") or "/" in name):
            return importlib.import_module(name)
        # Named by its content, so that a changed file is another module.
        module_name = f"{_PREFIX}{source.stem}_{digest[:8]}"
        if module_name in sys.modules:
            return sys.modules[module_name]
        spec = importlib.util.spec_from_file_location(module_name, source)
        assert spec is not None and spec.loader is not None, "the file exists and ends with .py"
        module = importlib.util.module_from_spec(spec)
        # Classes look their module up while they are made.
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
        return module
    except Exception as error:
        raise UserError(f"fails to import:\n{_format_error(error)}") from None


def _format_error(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-_LINES:])


def find_mistakes(file: Path, source: bytes) -> Iterator[str]:
    """Yield a message for each use of torch.distributed in the source of an extension.

    Layers communicate through `megaframe.distributed`, which counts traffic, knows what a rank
    waits for, and works on every kind of device. What is found are imports and attributes as they
    are written; a name that is put together while the program runs, and what other libraries do,
    is not seen.
    """
    try:
        tree = ast.parse(source, str(file))
    except (SyntaxError, ValueError):
        return  # importing it says where
    torch_names = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            torch_names |= {a.asname for a in node.names if a.name == "torch" and a.asname}
    for node in ast.walk(tree):
        if _uses_distributed(node, torch_names):
            yield (
                f"{file}:{getattr(node, 'lineno', 0)}: uses torch.distributed; communicate through "
                "megaframe.distributed.collectives with a group of the mesh"
            )


def _uses_distributed(node: ast.AST, torch_names: set[str]) -> bool:
    if isinstance(node, ast.Import):
        return any(f"{alias.name}.".startswith("torch.distributed.") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if f"{module}.".startswith("torch.distributed."):
            return True
        return module == "torch" and any(alias.name == "distributed" for alias in node.names)
    if isinstance(node, ast.Attribute) and node.attr == "distributed":
        return isinstance(node.value, ast.Name) and node.value.id in torch_names
    return False
