"""What `import megaframe` offers beside training: configs, checkpoints and models, for scripts and
notebooks. docs/guides/library.md shows each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from megaframe.architecture.spec import Box
from megaframe.checkpoint import Checkpoint, StorePath, locate_checkpoint
from megaframe.checkpoint.load import open_checkpoint as open_located
from megaframe.config import RunConfig
from megaframe.data.vocabulary_size import find_vocab_size
from megaframe.extensions import load_with_extensions
from megaframe.inference.generation import allocate_parameters, load_stage, read_run_tokenizer
from megaframe.inference.model import Model
from megaframe.parameters.initialization import fill_initial_values
from megaframe.pipeline_parallel.stage import build_whole_model


def load_config(
    path: str | PathLike[str] | None = None, overrides: Mapping[str, Any] | Sequence[str] = ()
) -> RunConfig:
    """Return the config of a run, after loading the extensions that it names.

    Args:
        path: A YAML file, or the name of a shipped config such as `llama3-8b`; None: all defaults.
        overrides: Keys that replace those of the file: `{"train.steps": 20}`, or texts as on the
            command line, `["train.steps=20"]`.

    Raises:
        UserError: With all mistakes, each with its place.
    """
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    return load_with_extensions(None if path is None else fspath(path), overrides)


def open_checkpoint(location: str | PathLike[str] | StorePath) -> Checkpoint:
    """Return a checkpoint: its `step`, the `state` of the run, and `tensors`, the shape and type of
    each by its name; `read_tensor(name)` reads one. Close it after use, or use `with`.

    Args:
        location: A checkpoint, a folder of checkpoints or a run folder, whose latest is used; path
            or URL.

    Raises:
        UserError: There is none, or it is damaged.
    """
    return open_located(locate_checkpoint(_as_location(location), "open_checkpoint"))


def load_model(
    checkpoint: str | PathLike[str] | StorePath,
    *,
    ema: bool = False,
    precision: str | None = None,
    device: str = "cpu",
    tokenizer: str | None = None,
) -> Model:
    """Return the model of a checkpoint, which any layout may have written.

    Args:
        checkpoint: A checkpoint, a folder of checkpoints or a run folder, whose latest is used;
            path or URL.
        ema: Load the average of the weights (`optim.ema`).
        precision: Of the matrix products; default: that of the run.
        device: Where to put the weights.
        tokenizer: KIND:PATH; default: that of the run.

    Raises:
        UserError: There is no such checkpoint, it is damaged, or this machine has too little memory
            for it.
    """
    location = _as_location(checkpoint)
    stage = load_stage(location, ema=ema, precision=precision, device=device)
    return Model(stage, read_run_tokenizer(location), tokenizer)


def build_model(config: RunConfig, *, device: str = "cpu") -> Model:
    """Return the model that a run of this config begins with: the same initial weights under any
    layout.

    Args:
        config: What `load_config` returns.
        device: Where to put the weights.

    Raises:
        UserError: The vocabulary is not given and there is no tokenizer, or a key is wrong.
    """
    config = config.replace(model={"vocab": find_vocab_size(config.model, config.data)})
    stage = build_whole_model(config)
    for part, parameter in zip(allocate_parameters(stage, device), stage.parameters(), strict=True):
        fill_initial_values(part.tensor, parameter.spec, Box(*part.box), config.run.seed)
    return Model(stage)


def _as_location(path: str | PathLike[str] | StorePath) -> str | StorePath:
    return path if isinstance(path, StorePath) else fspath(path)
