"""A run of Weights & Biases that belongs to a run folder, under an id that is kept there."""

from __future__ import annotations

import netrc
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaframe.io.regular_file import make_folder, write_file
from megaframe.io.run_files import WANDB_ID_FILE
from megaframe.io.untrusted import read_file

_LONGEST_ID = 1000


class InvalidWandbId(ValueError):
    """The id in a run folder is damaged; the text says what to do."""


def start_wandb_run(
    folder: Path, project: str, *, fresh: bool, config: Mapping[str, Any] | None = None
) -> Any:
    """Start the Weights & Biases run of a run folder, or continue it. It is offline without an API
    key, unless WANDB_MODE says otherwise.

    Args:
        folder: Of the run; the id and the files of an offline run are kept in it.
        project: Its project there.
        fresh: Whether to begin under a new id, whatever is in the folder.
        config: Keys and values that describe the run there.

    Returns:
        What `wandb.init` returns.

    Raises:
        ImportError: If the package is missing.
        InvalidWandbId: If the folder's id is not valid.
        OSError: If the folder cannot be written.
    """
    import wandb

    make_folder(folder / "wandb", inside=folder)  # wandb would follow a link
    offline = "WANDB_MODE" not in os.environ and not has_wandb_key()
    return wandb.init(
        project=project,
        id=read_or_make_id(folder / WANDB_ID_FILE, fresh=fresh),
        name=folder.name,
        dir=str(folder),
        config=None if config is None else dict(config),
        resume="allow",
        mode="offline" if offline else None,
        settings=wandb.Settings(silent=True, console="off"),
    )


def has_wandb_key() -> bool:
    """Return whether wandb will find an API key, in the environment or in the user's netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = re.sub(r"^https?://|/.*$", "", os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def read_or_make_id(path: Path, *, fresh: bool) -> str:
    """Return the id kept in `path`, or make one if there is none or the run begins anew.

    Raises:
        InvalidWandbId: If the file has no valid id.
    """
    if not fresh and os.path.lexists(path):
        try:
            run_id = (
                read_file(path, _LONGEST_ID, inside=path.parent).decode(errors="replace").strip()
            )
        except OSError:
            run_id = ""
        if not re.fullmatch(r"[A-Za-z0-9_-]+", run_id):
            raise InvalidWandbId(f"{path} holds no id of a Weights & Biases run; delete it")
        return run_id
    run_id = uuid.uuid4().hex[:8]
    write_file(path, run_id + "\n", inside=path.parent)
    return run_id
