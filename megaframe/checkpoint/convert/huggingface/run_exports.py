"""Exports during training: every n steps a folder of Hugging Face beside the checkpoint.

All ranks write some of its files each, from the checkpoint that was just saved, so no rank holds
the model, and the folder has the same bytes under any layout that saves the same weights. It gets
its name when it is complete.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from megaframe.checkpoint.convert.huggingface.families import find_fitting_families
from megaframe.checkpoint.convert.huggingface.folder_export import plan_export, write_model_config
from megaframe.checkpoint.merged_adapters import open_model
from megaframe.checkpoint.stores.store import (
    CHECKPOINT_NAME,
    StorePath,
    format_checkpoint_name,
    is_temporary,
)
from megaframe.config import RunConfig
from megaframe.errors import UserError, join_or
from megaframe.io.regular_file import make_folder

SUBFOLDER = "huggingface"
"""Folder of exports in a folder of checkpoints."""


class RunExports:
    """One rank's part in the exports of a run.

    Args:
        config: Of the run.
        root: The folder of checkpoints, on a file system that all ranks share.
        rank: This rank.
        world: Number of ranks.

    Raises:
        UserError: If no Hugging Face model of the family computes the same.
    """

    def __init__(self, config: RunConfig, root: StorePath, rank: int, world: int) -> None:
        assert isinstance(root, Path)  # `validate_config` refuses URLs
        model = config.model.model_copy(update={"adapters": None})  # exports have their sums
        if model.family is None:
            fitting = find_fitting_families(model)
            which = f"{join_or(fitting)} computes" if fitting else "no family computes"
            raise UserError(
                "checkpoint.huggingface_every needs model.family, which names the family of "
                f"transformers to write; {which} the same as this model"
            )
        write_model_config(model, config.train, None)
        self._root, self._rank, self._world = root, rank, world
        self._tokenizer = config.data.tokenizer
        self._every, self._last = config.checkpoint.huggingface_every, config.train.steps
        self._keep, self._keep_every = config.checkpoint.keep, config.checkpoint.keep_every

    def is_due(self, step: int) -> bool:
        """Return whether the checkpoint of a step is exported."""
        return step % self._every == 0 or step == self._last

    def begin(self, step: int, attempt: str) -> None:
        """On the first rank, make an empty folder, and remove what killed exports have left.

        Raises:
            OSError: If that fails.
        """
        folder = self._root / SUBFOLDER
        make_folder(folder)
        for entry in folder.iterdir():
            if is_temporary(entry.name) and not entry.is_symlink():
                shutil.rmtree(entry)
        self._make_draft_path(step, attempt).mkdir()

    def write_part(self, step: int, attempt: str) -> None:
        """Write this rank's files; on the first rank also all that are not of weights.

        Raises:
            UserError: If the checkpoint cannot be read, or a file not written.
        """
        draft = self._make_draft_path(step, attempt)
        with open_model(self._root / format_checkpoint_name(step)) as checkpoint:
            export = plan_export(checkpoint, None, self._tokenizer, None)
            try:
                export.write_weights(draft, self._rank, self._world)
                if self._rank == 0:
                    export.write_texts(draft)
            except (OSError, SafetensorError) as error:
                raise UserError(f"cannot write {draft}: {error}") from None

    def publish(self, step: int, attempt: str) -> None:
        """On the first rank, give a complete folder its name, in place of an older one of this
        step, and remove those that are not kept.

        Raises:
            OSError: If that fails.
        """
        folder = self._root / SUBFOLDER / format_checkpoint_name(step)
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(self._make_draft_path(step, attempt), folder)
        names = {
            int(match[1]): entry
            for entry in folder.parent.iterdir()
            if (match := CHECKPOINT_NAME.fullmatch(entry.name)) and not entry.is_symlink()
        }
        for old in sorted(names.keys() - {step}, reverse=True)[self._keep - 1 :]:
            if not (self._keep_every and old % self._keep_every == 0):
                shutil.rmtree(names[old])

    def discard(self, step: int, attempt: str) -> None:
        """On the first rank, remove an incomplete folder."""
        shutil.rmtree(self._make_draft_path(step, attempt), ignore_errors=True)

    def _make_draft_path(self, step: int, attempt: str) -> Path:
        return self._root / SUBFOLDER / f"{format_checkpoint_name(step)}.{attempt}.tmp"
