"""Warm start: a new run begins with the weights of a checkpoint, of which it takes nothing else.

Where the run has experts and the checkpoint has none they are upcycled (Komatsuzaki et al. 2022):
each expert is a copy of the dense MLP of its layer, or, where experts are narrower, of one of its
parts in turn; routers start anew. With whole copies whose weights add up to one the new model's
first answer is that of the dense one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from megaframe.checkpoint import Checkpoint, Slice
from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.spec import Box, ParamSpec

_EXPERTS, _DENSE = ".moe.experts.", ".mlp."
"""In the names of what experts have, and of what it is made of."""
_FREE = {"moe", "dropout", "init_std", "mtp_depth", "rotary_base", "rotary_scaling", "window"}
"""Keys of the model that may differ from those of the checkpoint's: experts can be made, and on the
others no weight depends, so that a model can go on with longer samples."""
_FREE_MOE = {"balance", "balance_rate", "balance_loss", "z_loss", "jitter", "capacity"}
"""The same of its experts."""


def starting_parts(
    weights: Iterable[tuple[str, ParamSpec, Box, Tensor]],
    checkpoint: Checkpoint,
    saved: Any,
    config: RunConfig,
) -> list[Slice]:
    """What to load of a checkpoint into these pieces of weights. saved: the config of its run.

    Raises `UserError` where the two models do not fit.
    """
    mistakes = list(_mistakes(saved["model"], config))
    if mistakes:
        raise UserError(
            "\n  ".join([f"checkpoint.weights={checkpoint.path} does not fit", *mistakes])
        )
    slices: list[Slice] = []
    for name, spec, box, tensor in weights:
        if name in checkpoint.tensors:
            slices.append(Slice(name, spec.shape, box.offset, tensor))
        elif _EXPERTS in name:
            slices += _of_experts(spec, box, tensor, config.model.ffn)
    return slices


def _of_experts(spec: ParamSpec, box: Box, tensor: Tensor, ffn: int) -> Iterator[Slice]:
    """Each expert's piece as one of the dense matrix [..., ffn, ...]."""
    (dim,) = (dim for dim, axis in spec.axes.items() if axis == "expert_tensor")
    width = spec.shape[dim]
    whole = [*spec.shape]
    whole[dim] = ffn
    for place in range(box.shape[0]):
        part = (box.offset[0] + place) % (ffn // width)
        offset = [*box.offset]
        offset[dim] += part * width
        name = spec.name.replace(_EXPERTS, _DENSE)
        yield Slice(name, tuple(whole[1:]), tuple(offset[1:]), tensor[place])


def _mistakes(saved: dict[str, Any], config: RunConfig) -> Iterator[str]:
    now = config.model.model_dump(mode="json")
    for key in now:
        if key not in _FREE and saved.get(key) != now[key]:
            yield f"model.{key} is {saved.get(key)} there and {now[key]} here"
    there, here = saved.get("moe"), now["moe"]
    if there is None and here is not None:
        yield from _cannot_become_experts(config)
    elif there is not None and here is None:
        yield "it has experts, and this run has none"
    elif there is not None:
        for key in here:
            if key not in _FREE_MOE and there.get(key) != here[key]:
                yield f"model.moe.{key} is {there.get(key)} there and {here[key]} here"


def _cannot_become_experts(config: RunConfig) -> Iterator[str]:
    model = config.model
    moe = model.moe
    assert moe is not None
    width = moe.ffn or model.ffn
    if model.ffn % width:
        yield (
            f"model.moe.ffn={width} does not divide the model.ffn={model.ffn} whose parts experts "
            f"are to be; use model.moe.ffn={model.ffn}"
        )
    if moe.shared:
        yield f"model.moe.shared={moe.shared} has nothing to start from; use model.moe.shared=0"
    if model.bias:
        yield "model.bias=true gives the dense MLP biases, which experts have not"
