"""Initialization from a checkpoint: a new run takes its weights and nothing else.

If the run has experts and the checkpoint has none, they are upcycled (Komatsuzaki et al. 2022):
each expert is a copy of the dense MLP of its layer, and narrower experts are copies of its parts in
turn. Routers start from their initial values, and so does an indexer that is new. If experts are
whole copies and the weights of a token's choices add up to one, the new model initially computes
the same as the dense one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from megaframe.architecture.spec import Box, ParamSpec
from megaframe.checkpoint import Checkpoint, Slice
from megaframe.checkpoint.manifest import DTYPES
from megaframe.checkpoint.merged_adapters import is_of_base
from megaframe.config import ModelConfig, TrainConfig
from megaframe.config.blocks import MoEMixtureConfig
from megaframe.config.compare import TRAINING_ONLY, find_differences
from megaframe.config.keys import format_value
from megaframe.errors import UserError

_EXPERTS, _DENSE = ".moe.experts.", ".mlp."
"""In the names of experts' parameters, and of the dense parameters that they are copied from."""
_NO_WEIGHTS = ("mtp_depth", "rotary_base", "rotary_scaling", "window", "moe.balance", "adapters")
_MAY_DIFFER = TRAINING_ONLY | {f"model.{key}" for key in _NO_WEIGHTS}
"""Config keys of the model that may differ from the checkpoint's, so that training can continue for
example with longer samples. No weight depends on them but those of predictors, which can start from
their initial values."""


def match_weights(
    weights: Iterable[tuple[str, ParamSpec, Box, Tensor]],
    checkpoint: Checkpoint,
    saved: ModelConfig,
    model: ModelConfig,
) -> list[Slice]:
    """Return what to load from a checkpoint into these pieces of weights.

    Args:
        weights: (name, spec, box, tensor) of each piece.
        checkpoint: What to load from.
        saved: The checkpoint's model.
        model: The new run's.

    Raises:
        UserError: The two models do not fit.
    """
    mistakes = list(_find_mismatches(saved, model))
    if mistakes:
        raise UserError(
            "\n  ".join([f"checkpoint.weights={checkpoint.path} does not fit", *mistakes])
        )
    slices: list[Slice] = []
    for name, spec, box, tensor in weights:
        if name in checkpoint.tensors:
            slices.append(Slice(name, spec.shape, box.offset, tensor))
        elif _EXPERTS in name and is_of_base(name):
            slices += _slice_dense_mlp(spec, box, tensor, model.ffn)
    return slices


def load_adapters(
    folder: Path,
    model: ModelConfig,
    train: TrainConfig,
    weights: Iterable[tuple[str, ParamSpec, Box, Tensor]],
    base: Checkpoint,
) -> str:
    """Fill adapters with those of a folder of peft. Return a line about it.

    Args:
        folder: What peft's `save_pretrained` wrote.
        model: Has the adapters.
        train: Has the length of samples.
        weights: (name, spec, box, tensor) of each piece of this rank.
        base: What they belong to, as a model.

    Raises:
        UserError: The folder does not fit.
    """
    # Not at the top: few runs need what reads other people's folders.
    from megaframe.checkpoint.convert.huggingface.adapter_import import read_adapters

    values = read_adapters(folder, model, train, base)
    for name, _, box, tensor in weights:
        if name in values:
            part = values[name][box.slices]
            tensor[: len(part)].copy_(part)  # of a lower rank: initial values stay in the rest of A
    count = sum(value.numel() for value in values.values())
    return f"adapters of {folder}: {len(values):,} tensors with {count:,} parameters"


def describe_loaded_weights(
    specs: Iterable[ParamSpec], checkpoint: Checkpoint, seconds: float
) -> str:
    """Return a line about the weights that all ranks together have taken from a checkpoint.

    Args:
        specs: Of the whole model.
        checkpoint: What they were loaded from.
        seconds: How long it took.
    """
    saved, names, fresh = checkpoint.tensors, set[str](), 0
    for spec in specs:
        name = spec.name if spec.name in saved else spec.name.replace(_EXPERTS, _DENSE)
        if name in saved:
            names.add(name)
        else:
            fresh += spec.size
    parameters = sum(math.prod(saved[name].shape) for name in names)
    types = sorted({str(DTYPES[saved[name].dtype]).removeprefix("torch.") for name in names})
    rest = f"; {fresh:,} parameters that it lacks have initial values" if fresh else ""
    return (
        f"weights of {checkpoint.path}: {len(names):,} tensors with {parameters:,} parameters in "
        f"{' and '.join(types)}, loaded in {seconds:.1f} s{rest}"
    )


def _slice_dense_mlp(spec: ParamSpec, box: Box, tensor: Tensor, ffn: int) -> Iterator[Slice]:
    """Yield a slice of the dense matrix [..., ffn, ...] for each expert's piece of `tensor`."""
    (dim,) = (dim for dim, axis in spec.axes.items() if axis == "expert_tensor")
    width = spec.shape[dim]
    dense_shape = [*spec.shape]
    dense_shape[dim] = ffn
    for place in range(box.shape[0]):
        part = (box.offset[0] + place) % (ffn // width)
        offset = [*box.offset]
        offset[dim] += part * width
        name = spec.name.replace(_EXPERTS, _DENSE)
        yield Slice(name, tuple(dense_shape[1:]), tuple(offset[1:]), tensor[place])


def _find_mismatches(saved: ModelConfig, now: ModelConfig) -> Iterator[str]:
    free = set(_MAY_DIFFER)
    if saved.moe is None or now.moe is None:
        free.add("model.moe")
    if saved.indexer is None:  # a new one has initial values
        free.add("model.indexer")
    yield from find_differences(saved, now, free, "model")
    if saved.moe is None and now.moe is not None:
        yield from _check_upcycling(now)
    elif saved.moe is not None and now.moe is None:
        yield "it has experts, and this run has none"


def _check_upcycling(model: ModelConfig) -> Iterator[str]:
    moe = model.moe
    assert moe is not None
    width = moe.ffn or model.ffn
    if model.ffn % width:
        yield (
            f"model.moe.ffn={width} does not divide the model.ffn={model.ffn} whose parts experts "
            f"are to be; use model.moe.ffn={model.ffn}"
        )
    for number, block in enumerate(model.blocks or ()):
        mixture = block.feed_forward
        if isinstance(mixture, MoEMixtureConfig) and mixture.shared:
            yield (
                f"model.blocks.{number}.feed_forward.shared={mixture.shared} has nothing to start "
                "from; leave it out"
            )
    if moe.shared:
        yield f"model.moe.shared={moe.shared} has nothing to start from; use model.moe.shared=0"
    if model.bias or moe.expert_bias:
        yield (
            f"model.bias={format_value(model.bias)} and model.moe.expert_bias="
            f"{format_value(moe.expert_bias)}: experts are copies of matrices alone, so a dense MLP"
            " with biases is no start for them, nor one without for experts that have any"
        )
