"""What an export of a checkpoint consists of, and how its files are written.

The division into files follows from the model and the type of its weights alone. So several ranks
can write some files each, and the folder is the same whoever writes what.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megaframe.architecture.parametrisation import compute_output_multiplier
from megaframe.architecture.spec import Constant, ParamSpec
from megaframe.checkpoint import Checkpoint, Slice
from megaframe.checkpoint.convert.huggingface.families import find_fitting_families, get_family
from megaframe.checkpoint.convert.huggingface.family import Family, refuse_parts
from megaframe.checkpoint.convert.huggingface.match_tensors import refuse_left_out
from megaframe.checkpoint.convert.huggingface.read_files import (
    CONFIG,
    INDEX,
    SINGLE,
    check_finite,
)
from megaframe.checkpoint.convert.huggingface.tensor_names import map_tensors
from megaframe.checkpoint.convert.huggingface.tensors import HuggingFaceTensor, TensorPart
from megaframe.checkpoint.convert.huggingface.tokenizer import export_tokenizer
from megaframe.checkpoint.convert.huggingface.tokenizer_settings import GENERATION_CONFIG
from megaframe.checkpoint.reshard import group_by_bytes
from megaframe.checkpoint.starting_weights import FILE_BYTES
from megaframe.checkpoint.train_state import read_train_state
from megaframe.config import ModelConfig, TrainConfig
from megaframe.data.token_file_record import read_recorded_tokenizer
from megaframe.errors import UserError, join_or
from megaframe.io.regular_file import write_file
from megaframe.model.model_chunk import list_model_specs

TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The types of weights, by the names of precisions."""


@dataclass(frozen=True)
class FolderExport:
    """An export that can be written.

    Attributes:
        checkpoint: Has the weights, and stays open.
        groups: The tensors of each file of weights.
        dtype: The type of the weights.
        texts: The contents of all other files by name.
        notes: A line for each thing that is not exported, or not exactly.
    """

    checkpoint: Checkpoint
    groups: Sequence[Sequence[HuggingFaceTensor]]
    dtype: torch.dtype
    texts: Mapping[str, bytes]
    notes: list[str]

    def write_weights(self, folder: Path, part: int = 0, parts: int = 1) -> None:
        """Write the files of weights, with one file in memory at a time.

        Args:
            folder: Where to.
            part: Which of the parts to write.
            parts: Number of parts that the files are divided into.

        Raises:
            UserError: If a weight is not finite.
            OSError: If a file cannot be written.
        """
        for number in range(part, len(self.groups), parts):
            save_file(
                self._load(self.groups[number]),
                str(folder / self._name_file(number)),
                metadata={"format": "pt"},
            )

    def write_texts(self, folder: Path) -> None:
        """Write all other files: configs, the tokenizer, and the index of weights."""
        for name, content in self.texts.items():
            write_file(folder / name, content)
        if len(self.groups) > 1:
            files = {
                tensor.name: self._name_file(number)
                for number, group in enumerate(self.groups)
                for tensor in group
            }
            sizes = (_count_bytes(tensor, self.dtype) for group in self.groups for tensor in group)
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": files}
            write_file(folder / INDEX, _encode_json(index))

    def _name_file(self, number: int) -> str:
        if len(self.groups) == 1:
            return SINGLE
        return f"model-{number + 1:05d}-of-{len(self.groups):05d}.safetensors"

    def _load(self, group: Sequence[HuggingFaceTensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a file."""
        boxes = [
            [torch.empty(part.box.shape, dtype=self.dtype) for part in tensor.parts]
            for tensor in group
        ]
        self.checkpoint.load(
            [
                Slice(part.spec.name, part.spec.shape, part.box.offset, box)
                for tensor, boxes_of_tensor in zip(group, boxes, strict=True)
                for part, box in zip(tensor.parts, boxes_of_tensor, strict=True)
            ]
        )
        joined = {
            tensor.name: tensor.join(boxes_of_tensor)
            for tensor, boxes_of_tensor in zip(group, boxes, strict=True)
        }
        for name, content in joined.items():
            check_finite(name, content, get_dtype_name(self.dtype))
        return joined


def plan_export(
    checkpoint: Checkpoint, dtype: str | None, tokenizer: str | None, family: str | None
) -> FolderExport:
    """Return the export of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        dtype: One of `TORCH_DTYPES`; by default the precision of the run.
        tokenizer: KIND:PATH, `bytes` or `none`; None for no tokenizer.
        family: The `model_type` to write; by default `model.family` of the run.

    Raises:
        UserError: If no Hugging Face model computes the same, or the tokenizer is not the run's.
    """
    state = read_train_state(checkpoint)
    run = state.config
    row, config = write_model_config(run.model, run.train, family)
    torch_dtype = TORCH_DTYPES[dtype or run.train.precision]
    recorded = read_recorded_tokenizer(state.data)
    exported = export_tokenizer(tokenizer, run.model.vocab or 0, run.train.seq, recorded)
    ids = {k: v for k, v in exported.ids.items() if v is not None or k not in row.numbers}
    # The type under its new and its old name.
    config |= {**ids, **dict.fromkeys(("dtype", "torch_dtype"), get_dtype_name(torch_dtype))}
    specs = list_model_specs(run.model, run.train)
    checkpoint.require_shapes({spec.name: spec.shape for spec in specs})
    tensors = list(map_tensors(row, run.model, specs, row.read_scales(config)))
    refuse_left_out(row, run.model, specs, tensors)
    tensors = _fold_output_multiplier(row, tensors, compute_output_multiplier(run.model))
    _check_constants(row, checkpoint, specs)
    groups = group_by_bytes(tensors, lambda tensor: _count_bytes(tensor, torch_dtype), FILE_BYTES)
    texts = {
        CONFIG: _encode_json(config),
        GENERATION_CONFIG: _encode_json(exported.generation or ids),
        **exported.files,
    }
    notes = [*exported.notes, *_describe_predictors(run.model)]
    return FolderExport(checkpoint, groups, torch_dtype, texts, notes)


def write_model_config(
    model: ModelConfig, train: TrainConfig, family: str | None
) -> tuple[Family, dict[str, Any]]:
    """Return the family of an export, and the keys of its config that follow from the model.

    Raises:
        UserError: If neither the argument nor the model names a family, or it computes something
            else.
    """
    row = _choose_family(model, family)
    learned = model.position == "learned" and model.positions
    return row, row.write_config(model, learned or train.seq)


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type in a config of transformers."""
    return str(dtype).removeprefix("torch.")


def _count_bytes(tensor: HuggingFaceTensor, dtype: torch.dtype) -> int:
    return sum(part.box.size for part in tensor.parts) * dtype.itemsize


def _encode_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _choose_family(model: ModelConfig, name: str | None) -> Family:
    """Return the family to export.

    Raises:
        UserError: If neither the command nor the model names one that there is.
    """
    refuse_parts(model)
    name = name or model.family
    if name is not None:
        return get_family(name)
    fitting = find_fitting_families(model)
    which = f"{join_or(fitting)} computes the same" if fitting else "none computes the same"
    raise UserError(f"model.family is not set, so an export needs --family; {which} as this model")


def _fold_output_multiplier(
    family: Family, tensors: Sequence[HuggingFaceTensor], multiplier: float
) -> list[HuggingFaceTensor]:
    """Return tensors whose last norm makes results as many times as large as the multiplier says,
    because the norm is all that the head sees.

    Raises:
        UserError: If the family has no weights of that norm.
    """
    if multiplier == 1.0:
        return [*tensors]
    names = ("head.norm.gain", "head.norm.bias")
    if not any(part.spec.name in names for tensor in tensors for part in tensor.parts):
        raise UserError(
            f"model.parametrisation=mup multiplies logits by {multiplier:g}, and {family.name} has "
            "no weights in its last norm to multiply instead; export another family"
        )

    def fold(part: TensorPart) -> TensorPart:
        if part.spec.name not in names:
            return part
        return replace(part, scale=part.scale / multiplier, offset=part.offset / multiplier)

    return [replace(tensor, parts=tuple(map(fold, tensor.parts))) for tensor in tensors]


def _check_constants(family: Family, checkpoint: Checkpoint, specs: list[ParamSpec]) -> None:
    """Raise `UserError` if weights for which the family has no tensor are not what its code has."""
    for spec in specs:
        if family.has_constant(spec.name):
            assert isinstance(spec.init, Constant)
            values = torch.empty(spec.shape)
            checkpoint.load([Slice(spec.name, spec.shape, (0,) * len(spec.shape), values)])
            if not bool((values == spec.init.value).all()):
                raise UserError(
                    f"{spec.name} is not {spec.init.value:g} everywhere, and {family.name} has no "
                    f"weights there; train with optim.freeze for it, or export another family"
                )


def _describe_predictors(model: ModelConfig) -> list[str]:
    if not model.mtp_depth:
        return []
    return [f"model.mtp_depth={model.mtp_depth}: predictors of further tokens are left out"]
