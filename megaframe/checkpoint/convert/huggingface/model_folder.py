"""Exports checkpoints to folders of Hugging Face models, and imports such folders.

Export keeps one output file in memory at a time, import two tensors of the folder. Only safetensors
files are read, so nothing is unpickled, and the contents of a folder are validated before use.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.spec import Constant, ParamSpec
from megaframe.checkpoint import Checkpoint, StorePath
from megaframe.checkpoint.convert.huggingface.families import get_family
from megaframe.checkpoint.convert.huggingface.folder_export import (
    TORCH_DTYPES,
    get_dtype_name,
    plan_export,
)
from megaframe.checkpoint.convert.huggingface.match_tensors import (
    SkippedTensors,
    choose_names,
    find_end,
    has_other_head,
    match_tensors,
    restore_prefix,
)
from megaframe.checkpoint.convert.huggingface.nested_models import unwrap_config, unwrap_names
from megaframe.checkpoint.convert.huggingface.read_files import (
    CONFIG,
    TensorHeader,
    check_regular_file,
    join_packed_headers,
    read_headers,
    read_json,
    read_tensor,
)
from megaframe.checkpoint.convert.huggingface.tensor_names import map_tensors
from megaframe.checkpoint.convert.huggingface.tensors import HuggingFaceTensor
from megaframe.checkpoint.convert.huggingface.tokenizer import (
    TOKENIZER_FILES,
    check_tokenizer_path,
)
from megaframe.checkpoint.reshard import as_bytes, assemble_checkpoint, group_by_bytes
from megaframe.checkpoint.shard_file import MAX_ENTRY_BYTES, FileEntry, TensorBox
from megaframe.checkpoint.slices import Box, index_within, split_into_runs
from megaframe.checkpoint.starting_weights import (
    FILE_BYTES,
    StartingWeights,
    find_config_file,
    write_run_config,
)
from megaframe.checkpoint.train_state import make_initial_train_state, read_train_state
from megaframe.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from megaframe.errors import UserError
from megaframe.model.model_chunk import list_model_specs
from megaframe.validate.run import find_mistakes

_Origin = tuple[HuggingFaceTensor | ParamSpec, int]
"""Where a box comes from: a tensor of the Hugging Face model and the index of the part in it, or a
spec with a constant initial value."""
_Origins = dict[tuple[str, tuple[int, ...]], _Origin]
"""The origin of each box, by the name of its tensor and its offset."""


def export_model(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: str | None = None,
    tokenizer: str | None = None,
    family: str | None = None,
) -> list[str]:
    """Write a checkpoint's weights as a folder that `from_pretrained` can load, with its tokenizer.

    Args:
        checkpoint: The checkpoint.
        folder: The folder to create.
        dtype: One of fp64, fp32, bf16 or fp16; by default the precision of the run.
        tokenizer: KIND:PATH, `bytes` or `none`; by default that of the run, if it lies with the
            checkpoint.
        family: The `model_type` to write; by default `model.family` of the run.

    Returns:
        A line for each thing that is not exported, or not exactly.

    Raises:
        UserError: If no Hugging Face model computes the same, if the tokenizer lies elsewhere, or
            if the folder exists or cannot be written.
    """
    if folder.exists():
        raise UserError(f"{folder} already exists; remove it or give another folder")
    config = read_train_state(checkpoint).config
    name = tokenizer or check_tokenizer_path(config.data.tokenizer, checkpoint.path)
    export = plan_export(checkpoint, dtype, name, family)
    temporary = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        export.write_weights(temporary)
        export.write_texts(temporary)
        os.rename(temporary, folder)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or temporary}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return export.notes


def import_model(folder: Path, target: StorePath) -> StartingWeights:
    """Import the model in a Hugging Face folder as a checkpoint of step 0 in the folder `target`,
    in fp32, and write a config beside it that trains on from it.

    Config, names, shapes and types are compared before any tensor is read.

    Raises:
        UserError: For a model that is not supported, for tensors that are missing, unknown, of
            another shape, of integers or not finite, and for damaged files.
    """
    config_file = find_config_file(target)
    plan = plan_import(folder, read_json(folder / CONFIG), read_headers(folder))
    boxes, source = _plan_boxes(plan.specs, plan.tensors)
    box_reader = _BoxReader(plan.headers, source)
    checkpoint = assemble_checkpoint(
        target,
        0,
        make_initial_train_state(plan.run).model_dump(mode="json"),
        group_by_bytes(boxes, lambda box: box.bytes, FILE_BYTES),
        box_reader.read_bytes,
    )
    if config_file is not None:
        write_run_config(config_file, folder, plan.run, checkpoint)
    return StartingWeights(checkpoint, config_file, plan.notes)


@dataclass(frozen=True)
class ImportPlan:
    """What an import does.

    Attributes:
        run: The config of the run that the checkpoint is of.
        specs: Its parameters.
        headers: The tensors of the folder that are of the model for texts.
        tensors: Those that are read, and which parts of which parameters they are.
        notes: A line for each thing that is not taken over.
    """

    run: RunConfig
    specs: list[ParamSpec]
    headers: Mapping[str, TensorHeader]
    tensors: list[HuggingFaceTensor]
    notes: tuple[str, ...]


def plan_import(
    folder: Path, whole_config: Mapping[str, Any], all_headers: Mapping[str, TensorHeader]
) -> ImportPlan:
    """Return what an import does, from names and shapes alone.

    Args:
        folder: The folder.
        whole_config: Its `config.json`.
        all_headers: Its tensors.

    Raises:
        UserError: As `import_model`, but for elements of tensors.
    """
    config = unwrap_config(whole_config)
    family = get_family(config.get("model_type"))
    bare_headers, notes_on_towers = unwrap_names(whole_config, all_headers)
    headers = restore_prefix(family, bare_headers)
    if config.get("quantization_config") is not None:
        headers = join_packed_headers(headers)
    model = family.read_model(config, [header.shape for header in headers.values()])
    notes = [*notes_on_towers, *family.list_training_keys(config)]
    if model.tie_embeddings and has_other_head(family, headers):
        model = model.model_copy(update={"tie_embeddings": False})
        notes.append(
            f"{find_end(family, 'head')} differs from the embeddings that tie_word_embeddings=true "
            "ties it to, so it is read as a head of its own, as transformers does"
        )
    run = RunConfig(
        model=model,
        data=DataConfig(tokenizer=_find_tokenizer(folder)),
        train=_train_section(config, model),
    )
    if mistakes_found := find_mistakes(run, 1, data=False):
        raise UserError(f"{folder}: {mistakes_found[0]}")
    specs = list_model_specs(run.model, run.train)
    predictors, scales = family.count_predictors(config), family.read_scales(config)
    layers = range(model.layers, model.layers + predictors)
    skipped = SkippedTensors(family, model.tie_embeddings, layers)
    mapped = [map_tensors(naming, model, specs, scales) for naming in family.list_namings()]
    tensors = match_tensors(folder, choose_names(mapped, headers), headers, skipped)
    return ImportPlan(run, specs, headers, tensors, (*notes, *skipped.describe(headers)))


def _find_tokenizer(folder: Path) -> str | None:
    for kind, name in TOKENIZER_FILES.items():
        if (folder / name).exists():
            check_regular_file(folder / name)
            return f"{kind}:{os.path.abspath(folder / name)}"
    return None


def _train_section(config: Mapping[str, Any], model: ModelConfig) -> TrainConfig:
    """Return a `train` section: the type that the weights are stored in, by default bf16, and
    samples as long as the texts that the model was trained on."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    stored = next(
        (
            precision
            for precision, torch_dtype in TORCH_DTYPES.items()
            if dtype == get_dtype_name(torch_dtype)
        ),
        "bf16",
    )
    positions = model.positions or config.get("max_position_embeddings")
    seq = {"seq": positions} if positions else {}
    return TrainConfig.model_validate({"precision": stored, **seq})


def _plan_boxes(
    specs: list[ParamSpec], tensors: list[HuggingFaceTensor]
) -> tuple[list[TensorBox], _Origins]:
    """Return the boxes to save, ordered by the tensors of the Hugging Face model, and the origin of
    each. Parameters without a counterpart there get their initial value."""
    boxes: list[TensorBox] = []
    origins: _Origins = {}
    mapped = {part.spec.name for tensor in tensors for part in tensor.parts}
    mapped_boxes: list[tuple[ParamSpec, Box, _Origin]] = [
        (part.spec, (part.box.offset, part.box.shape), (tensor, index))
        for tensor in tensors
        for index, part in enumerate(tensor.parts)
    ]
    constant_boxes: list[tuple[ParamSpec, Box, _Origin]] = [
        (spec, ((0,) * len(spec.shape), spec.shape), (spec, 0))
        for spec in specs
        if spec.name not in mapped
    ]
    for spec, box, origin in [*mapped_boxes, *constant_boxes]:
        for offset, shape in split_into_runs(box, MAX_ENTRY_BYTES // 4):
            boxes.append(TensorBox(spec.name, spec.shape, offset, shape, "F32"))
            origins[spec.name, offset] = origin
    return boxes, origins


class _BoxReader:
    """Provides the bytes of boxes. Keeps the tensor of the folder that was read last in memory."""

    def __init__(self, headers: Mapping[str, TensorHeader], source: _Origins) -> None:
        self._headers, self._source = headers, source
        self._last_tensor: HuggingFaceTensor | None = None
        self._parts: list[Tensor] = []

    def read_bytes(self, entry: FileEntry) -> memoryview:
        """Return the bytes of an entry, in row-major order."""
        origin, part_index = self._source[entry.name, entry.offset]
        if isinstance(origin, ParamSpec):
            assert isinstance(origin.init, Constant)
            return as_bytes(torch.full(entry.shape, origin.init.value))
        if origin is not self._last_tensor:
            self._last_tensor, self._parts = origin, []
            tensor = read_tensor(self._headers[origin.name])
            self._parts = [box for _, box in origin.split(tensor)]
        box = origin.parts[part_index].box
        index = index_within((box.offset, box.shape), (entry.offset, entry.shape))
        return as_bytes(self._parts[part_index][index])
