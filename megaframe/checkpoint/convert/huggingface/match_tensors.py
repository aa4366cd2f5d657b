"""Which tensors of a foreign folder are which of the model's: every one of the folder is used, or
known to be without use, and every one of the model is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megaframe.architecture.spec import ParamSpec
from megaframe.checkpoint.convert.huggingface.family import Family
from megaframe.checkpoint.convert.huggingface.read_files import (
    TensorHeader,
    check_type,
    read_tensor,
)
from megaframe.checkpoint.convert.huggingface.tensors import HuggingFaceTensor
from megaframe.config import ModelConfig
from megaframe.errors import UserError
from megaframe.io.untrusted import make_printable

_MAX_NAMED_TENSORS = 5
"""Number of tensors that an error names."""


@dataclass(frozen=True)
class SkippedTensors:
    """Tensors that a folder may have and the model does not need.

    Attributes:
        family: Says which buffers follow from the config.
        head: Whether the output weights equal the tied embeddings.
        layers: Layers after the last one, which are predictors of further tokens.
    """

    family: Family
    head: bool
    layers: range

    def covers(self, name: str) -> bool:
        """Return whether a tensor is one of them, or a buffer that follows from the config."""
        starts = [self.family.layer.format(layer) for layer in self.layers]
        starts += self.family.other_models
        is_tied = self.head and name == find_end(self.family, "head")
        return name.endswith(self.family.skipped) or is_tied or name.startswith(tuple(starts))

    def describe(self, names: Iterable[str]) -> Iterator[str]:
        """Yield a line for each kind of tensors in a folder that is left out, except buffers."""
        skipped, head = self.family.skipped, find_end(self.family, "head")
        names = [name for name in names if self.covers(name) and not name.endswith(skipped)]
        if head in names:
            names.remove(head)
            yield f"{head} is left out: it equals the tied embeddings"
        if names:
            layers = ", ".join(map(str, self.layers))
            place = f"layer {layers}" if layers else ", ".join(self.family.other_models)
            yield (
                f"{len(names)} tensors of {place} are left out: they predict further tokens, and "
                "are no part of the model's logits"
            )


def find_end(family: Family, module: str) -> str:
    """Return the name of their tensor for the weight of a module of ours before or after layers."""
    return next(f"{name}.weight" for name, own in family.ends.items() if own == module)


def restore_prefix(
    family: Family, headers: Mapping[str, TensorHeader]
) -> Mapping[str, TensorHeader]:
    """Return the tensors of a folder under the names that they have in a model with a head. Folders
    of models that were saved without one, as GPT-2's own was, lack the first part of all names."""
    embedding = find_end(family, "embedding.tokens")
    prefix, _, bare = embedding.partition(".")
    if embedding in headers or bare not in headers:
        return headers
    head = find_end(family, "head")
    return {name if name == head else f"{prefix}.{name}": h for name, h in headers.items()}


def has_other_head(family: Family, headers: Mapping[str, TensorHeader]) -> bool:
    """Return whether the output weights of a folder differ from its embeddings. Transformers does
    not tie such weights, whatever the config says."""
    head = headers.get(find_end(family, "head"))
    embedding = headers.get(find_end(family, "embedding.tokens"))
    if head is None or embedding is None or head.shape != embedding.shape:
        return False
    return not torch.equal(read_tensor(head), read_tensor(embedding))


def choose_names(
    namings: Sequence[Iterable[HuggingFaceTensor]], headers: Mapping[str, TensorHeader]
) -> Iterable[HuggingFaceTensor]:
    """Return that of several lists of tensors of which a folder lacks the fewest."""
    if len(namings) == 1:
        return namings[0]
    lists = [list(tensors) for tensors in namings]
    return min(lists, key=lambda tensors: sum(t.name not in headers for t in tensors))


def match_tensors(
    folder: Path,
    tensors: Iterable[HuggingFaceTensor],
    headers: Mapping[str, TensorHeader],
    skipped: SkippedTensors,
) -> list[HuggingFaceTensor]:
    """Return the tensors of the config, all of which the folder has.

    Raises:
        UserError: With a few of those that are missing, unknown, or of another shape or type.
    """
    expected_tensors: dict[str, HuggingFaceTensor] = {}
    problems: list[str] = []
    for tensor in tensors:
        header = headers.get(tensor.name)
        if header is None:
            problems.append(f"{tensor.name} is missing")
        elif header.shape != tensor.shape:
            problems.append(f"{tensor.name} is {list(header.shape)}, not {list(tensor.shape)}")
        else:
            check_type(tensor.name, header, is_table=tensor.experts > 0)
            problems += _check_constant(tensor, header)
        expected_tensors[tensor.name] = tensor
        if len(problems) > _MAX_NAMED_TENSORS:  # before a wrong config becomes a long list
            break
    else:
        problems += [
            f"{make_printable(name)} {list(header.shape)} has no counterpart"
            for name, header in headers.items()
            if name not in expected_tensors and not skipped.covers(name)
        ]
    if problems:
        omitted = "\n  and more" if len(problems) > _MAX_NAMED_TENSORS else ""
        raise UserError(
            f"{folder} does not fit its config:\n  "
            + "\n  ".join(problems[:_MAX_NAMED_TENSORS])
            + omitted
            + "\nmend config.json if it is of another model, or take a whole copy of the folder"
        )
    return list(expected_tensors.values())


def _check_constant(tensor: HuggingFaceTensor, header: TensorHeader) -> Iterator[str]:
    """Yield a message if a number that has one supported value has another, up to its rounding."""
    if tensor.constant:
        value = read_tensor(header).double()
        allowed = 2 * torch.finfo(torch.bfloat16).eps * abs(tensor.constant)
        if bool(((value - tensor.constant).abs() > allowed).any()):
            yield f"{tensor.name} is {value.flatten()[0]:g}, and only {tensor.constant:g} is known"


def refuse_left_out(
    family: Family,
    model: ModelConfig,
    specs: Iterable[ParamSpec],
    tensors: Iterable[HuggingFaceTensor],
) -> None:
    """Raise `UserError` unless all weights of the model are parts of the tensors.

    Args:
        family: Has no weights for some that are constant.
        model: The model. Its predictors, and a load that balances experts, change no logit.
        specs: Of all parameters.
        tensors: What is written.
    """
    taken: Counter[str] = Counter()
    for tensor in tensors:
        for part in tensor.parts:
            taken[part.spec.name] += part.box.size
    blocks = range(model.layers, model.layers + model.mtp_depth)
    predictors = ("predictors.", *(f"blocks.{layer}." for layer in blocks))
    biased = model.moe is not None and model.moe.balance == "bias"
    for spec in specs:
        if spec.name.startswith(predictors) or (spec.role == "balance" and not biased):
            continue
        if family.has_constant(spec.name):
            continue
        if taken[spec.name] != spec.size:
            raise UserError(
                f"{spec.name} has {spec.size} elements, of which {taken[spec.name]} have a place "
                "in a Hugging Face model of its family"
            )
