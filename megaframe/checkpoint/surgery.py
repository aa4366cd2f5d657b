"""New models of trained ones: averages of checkpoints, other layers, a larger vocabulary.

Each writes weights that new runs start from. What a tensor is made of is computed in fp64 and saved
in the widest type of what it is made of. (An MLP becomes experts where a run with experts starts
from a checkpoint without them, see `megaframe/training/initialize_from.py`.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.model_blocks import find_block_config
from megaframe.architecture.spec import ParamSpec
from megaframe.checkpoint.load import Checkpoint
from megaframe.checkpoint.manifest import DTYPE_NAMES, DTYPES, DTypeName
from megaframe.checkpoint.starting_weights import StartingWeights, write_starting_weights
from megaframe.checkpoint.stores.store import StorePath
from megaframe.checkpoint.train_state import EMA_PREFIX, read_train_state
from megaframe.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from megaframe.config.compare import TRAINING_ONLY, find_differences
from megaframe.errors import UserError
from megaframe.model.model_chunk import list_model_specs
from megaframe.validate.run import find_mistakes

_BLOCK = re.compile(r"blocks\.(\d+)\.")
_MAX_LAYERS = 2_000


def average_checkpoints(
    checkpoints: Sequence[Checkpoint],
    target: StorePath,
    weights: Sequence[float] | None = None,
    *,
    ema: bool = False,
) -> StartingWeights:
    """Write the average of the weights of checkpoints of one model.

    Args:
        checkpoints: Of one run or of several; the config is that of the first.
        target: The folder of the new checkpoint.
        weights: One for each checkpoint, in the proportion of which they count; they may be
            negative, as in model arithmetic. Default: all alike.
        ema: Take the averages over steps that `optim.ema` keeps, instead of the weights.

    Raises:
        UserError: The models differ, a checkpoint has no such averages, or the weights are not one
            finite number for each checkpoint with a sum other than 0.
    """
    shares = _normalize(weights or [1.0] * len(checkpoints), len(checkpoints))
    run, *others = (read_train_state(checkpoint).config for checkpoint in checkpoints)
    for checkpoint, other in zip(checkpoints[1:], others, strict=True):
        differing = [*find_differences(run.model, other.model, TRAINING_ONLY, "model")]
        if differing:
            lines = "\n  ".join(differing)
            raise UserError(
                f"{checkpoint.path} is of another model than {checkpoints[0].path}:\n  {lines}"
            )
    specs, prefix = list_model_specs(run.model, run.train), EMA_PREFIX if ema else ""

    def name_in(checkpoint: Checkpoint, spec: ParamSpec) -> str:
        # A balance of experts is no weight that steps are averaged of.
        kept = prefix + spec.name
        return kept if kept in checkpoint.tensors or spec.role != "balance" else spec.name

    names = {spec.name: [name_in(c, spec) for c in checkpoints] for spec in specs}
    for number, checkpoint in enumerate(checkpoints):
        if ema and not any(name.startswith(EMA_PREFIX) for name in checkpoint.tensors):
            raise UserError(
                f"{checkpoint.path} has no averages of weights: its run had no optim.ema; leave "
                "out --ema"
            )
        checkpoint.require_shapes({names[spec.name][number]: spec.shape for spec in specs})

    def read(name: str) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for share, checkpoint, saved in zip(shares, checkpoints, names[name], strict=True):
            total = total + share * checkpoint.read_tensor(saved).double()
        return total

    def list_sources(spec: ParamSpec) -> list[tuple[Checkpoint, str]]:
        return [*zip(checkpoints, names[spec.name], strict=True)]

    origin = " and ".join(str(checkpoint.path) for checkpoint in checkpoints)
    new = RunConfig(model=run.model, data=run.data, train=run.train)
    return write_starting_weights(target, new, origin, _choose_types(specs, list_sources), read)


def select_layers(
    checkpoint: Checkpoint, target: StorePath, layers: Sequence[int]
) -> StartingWeights:
    """Write a model whose layer n is the layer `layers[n]` of another one: fewer, or more by using
    some again (Kim et al. 2023, SOLAR). Predictors of further tokens stay if the pattern of layers
    still gives them the blocks that they have.

    Args:
        checkpoint: The other model.
        target: The folder of the new checkpoint.
        layers: Layers of the other model, from 0.

    Raises:
        UserError: There is no such layer, or none or too many are asked for.
    """
    run = read_train_state(checkpoint).config
    if missing := [layer for layer in layers if not 0 <= layer < run.model.layers]:
        raise UserError(
            f"--layers: {missing[0]} is no layer of {checkpoint.path}, which has 0 to "
            f"{run.model.layers - 1}"
        )
    if not 0 < len(layers) <= _MAX_LAYERS:
        raise UserError(f"--layers: {len(layers)} layers; give 1 to {_MAX_LAYERS}")
    model, notes = _select(run.model, layers)
    new = _check(model, run.train, run.data, checkpoint)
    origins = [*layers, *range(run.model.layers, run.model.layers + model.mtp_depth)]

    def find_origin(name: str) -> str:
        return _BLOCK.sub(lambda match: f"blocks.{origins[int(match[1])]}.", name, count=1)

    def list_sources(spec: ParamSpec) -> list[tuple[Checkpoint, str]]:
        return [(checkpoint, find_origin(spec.name))]

    def read(name: str) -> Tensor:
        return checkpoint.read_tensor(find_origin(name))

    specs = list_model_specs(new.model, new.train)
    checkpoint.require_shapes({find_origin(spec.name): spec.shape for spec in specs})
    tensors = _choose_types(specs, list_sources)
    written = write_starting_weights(target, new, checkpoint.path, tensors, read)
    return replace(written, notes=notes)


def grow_vocabulary(checkpoint: Checkpoint, target: StorePath, vocab: int) -> StartingWeights:
    """Write a model with more words. Each new row of the embedding and of the head is the mean of
    the rows that were there, so that a new word is about as likely as an old one (Hewitt 2021).
    Routers by hashes of tokens send new words to the experts of old ones.

    Args:
        checkpoint: The model.
        target: The folder of the new checkpoint.
        vocab: Size of the new vocabulary.

    Raises:
        UserError: The vocabulary is not larger than it was.
    """
    run = read_train_state(checkpoint).config
    old = run.model.vocab or 0
    if vocab <= old:
        raise UserError(f"--vocab={vocab}: {checkpoint.path} has a vocabulary of {old}; give more")
    new = _check(_change(run.model, {"vocab": vocab}), run.train, run.data, checkpoint)
    specs = list_model_specs(new.model, new.train)
    before = {spec.name: spec.shape for spec in list_model_specs(run.model, run.train)}
    grown = {spec.name: spec.role for spec in specs if spec.shape != before[spec.name]}
    checkpoint.require_shapes(before)

    def read(name: str) -> Tensor:
        rows = checkpoint.read_tensor(name)
        if name not in grown:
            return rows
        if grown[name] == "table":
            return rows[torch.arange(vocab) % old]
        mean = rows.double().mean(0, keepdim=True).to(rows.dtype)
        return torch.cat([rows, mean.expand(vocab - old, *rows.shape[1:])])

    tensors = _choose_types(specs, lambda spec: [(checkpoint, spec.name)])
    return write_starting_weights(target, new, checkpoint.path, tensors, read)


def _select(model: ModelConfig, layers: Sequence[int]) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return the config of a model of some layers of another, and what it cannot have."""
    if [*layers] == [*range(model.layers)]:
        return model, ()
    blocks = [find_block_config(model, layer) for layer in layers]
    changed = _change(model, {"layers": len(layers)})
    if model.blocks is not None or blocks != [
        find_block_config(changed, layer) for layer in range(len(layers))
    ]:
        kinds = {
            getattr(part, "kind", None)
            for block in blocks
            for part in (block.mixer, block.second_mixer, block.feed_forward)
        }
        changes: dict[str, Any] = {"window": None}
        changes["blocks"] = [block.model_copy(update={"repeat": 1}) for block in blocks]
        if model.latent is not None and "latent" not in kinds:
            changes |= {"latent": None, "indexer": None}
        if model.moe is not None:
            moe = model.moe.model_dump(exclude_unset=True, exclude={"first", "every"})
            changes["moe"] = moe if "moe" in kinds else None
        changed = _change(changed, changes)
    for depth in range(model.mtp_depth):
        if find_block_config(model, model.layers + depth) != find_block_config(
            changed, changed.layers + depth
        ):
            note = (
                f"model.mtp_depth is {depth} instead of {model.mtp_depth}: its blocks continue the "
                "pattern of the layers, which is another one now"
            )
            return _change(changed, {"mtp_depth": depth}), (note,)
    return changed, ()


def _normalize(weights: Sequence[float], count: int) -> list[float]:
    total = math.fsum(weights)
    if len(weights) != count or not math.isfinite(total) or total == 0:
        given = " ".join(f"{weight:g}" for weight in weights)
        raise UserError(
            f"--weights {given}: give one finite number for each of the {count} checkpoints, with "
            f"a sum other than 0"
        )
    return [weight / total for weight in weights]


def _change(model: ModelConfig, changes: dict[str, Any]) -> ModelConfig:
    return ModelConfig.model_validate({**model.model_dump(exclude_unset=True), **changes})


def _check(
    model: ModelConfig, train: TrainConfig, data: DataConfig, checkpoint: Checkpoint
) -> RunConfig:
    """Return the config of a changed model, or raise what is wrong with it."""
    new = RunConfig(model=model, data=data, train=train)
    if mistakes := find_mistakes(new, 1, data=False):
        raise UserError(f"{checkpoint.path}: {mistakes[0]}")
    return new


def _choose_types(
    specs: Sequence[ParamSpec],
    list_sources: Callable[[ParamSpec], Sequence[tuple[Checkpoint, str]]],
) -> list[tuple[ParamSpec, DTypeName]]:
    """Return each spec with the widest type of the tensors that it is made of."""
    types = (
        [DTYPES[source.tensors[name].dtype] for source, name in list_sources(spec)]
        for spec in specs
    )
    widest = (DTYPE_NAMES[reduce(torch.promote_types, of_spec)] for of_spec in types)
    return [*zip(specs, widest, strict=True)]
