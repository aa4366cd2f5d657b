"""Writes the adapters of a checkpoint as a folder that peft loads onto the exported base.

A matrix of theirs may stack several of ours, such as queries, keys and values, each with an adapter
of its own. It gets one adapter with the ranks of all: their A one below the other, and a B whose
rows have the numbers of their own adapter and zeros elsewhere. With DoRA it also gets a magnitude
for each row; of a row without an adapter that is its norm.

Shape legend: R rank, I inputs, O outputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megaframe.architecture.adapted_weights import list_adapted_weights
from megaframe.architecture.adapters import Adapter
from megaframe.architecture.linear import GroupedLinearSpec, LinearSpec
from megaframe.architecture.spec import ParamSpec
from megaframe.checkpoint import Checkpoint
from megaframe.checkpoint.convert.huggingface.folder_export import (
    TORCH_DTYPES,
    write_model_config,
)
from megaframe.checkpoint.convert.huggingface.tensor_names import map_tensors
from megaframe.checkpoint.convert.huggingface.tensors import HuggingFaceTensor, TensorPart
from megaframe.checkpoint.merged_adapters import open_own_base
from megaframe.checkpoint.train_state import read_train_state
from megaframe.config import ModelConfig, TrainConfig
from megaframe.config.adapters import AdaptersConfig
from megaframe.errors import UserError
from megaframe.io.regular_file import make_folder, write_file
from megaframe.model.model_chunk import list_model_specs

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a folder of peft."""
PREFIX = "base_model.model."
"""Of the names of a model's parts in that of peft around it."""
FACTORS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
"""Names of A, B and magnitudes in a module."""


AdapterNames = tuple[str, str]
"""Of A and B in a checkpoint."""
Rows = tuple[tuple[slice, ...], tuple[slice, ...]]
"""Where rows are in a box of a weight, and where in B."""


@dataclass(frozen=True)
class _ModuleAdapter:
    """The adapter of one of their matrices.

    Attributes:
        module: Its name in their model.
        rank: Of all adapters that it consists of.
        a: A of all of them, [R, I].
        b: B of all of them, [O, R].
        transposed: Whether their matrix is [I, O].
        magnitude: Of all its rows, [O]; None without DoRA.
    """

    module: str
    rank: int
    a: Tensor
    b: Tensor
    transposed: bool
    magnitude: Tensor | None


def export_adapters(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: str | None = None,
    family: str | None = None,
    base: str | None = None,
) -> None:
    """Write the adapters of a checkpoint for peft.

    Args:
        checkpoint: The checkpoint, as `open_checkpoint` opens it.
        folder: The folder to create.
        dtype: One of `TORCH_DTYPES`; by default the precision of the run.
        family: The `model_type` of the base; by default `model.family` of the run.
        base: Folder or name of the exported base, for whoever loads the adapters.

    Raises:
        UserError: If the checkpoint has no adapters or has some of experts, if no Hugging Face
            model computes the same as the base, if magnitudes need a base that is not there, or if
            the folder exists or cannot be written.
    """
    if folder.exists():
        raise UserError(f"{folder} already exists; remove it or give another folder")
    run = read_train_state(checkpoint).config
    adapters = run.model.adapters
    if adapters is None:
        raise UserError(f"{checkpoint} has no adapters; export its weights with export-hf")
    torch_dtype = TORCH_DTYPES[dtype or run.train.precision]
    linears = list_adapted_weights(run.model)
    _refuse_experts(checkpoint, linears)
    whole = map_base(run.model, run.train, family)
    with ExitStack() as opened:
        owner = open_own_base(checkpoint) if adapters.dora else checkpoint
        if owner is not checkpoint:
            opened.enter_context(owner)
        modules = list(_read_modules(checkpoint, owner, linears, whole, torch_dtype))
    others = _list_modules_without(whole, {module.module for module in modules})
    config = _make_config(adapters, modules, others, base)
    tensors = {}
    for module in modules:
        for factor, tensor in zip(FACTORS, (module.a, module.b, module.magnitude), strict=True):
            if tensor is not None:
                tensors[f"{PREFIX}{module.module}.{factor}"] = tensor.contiguous()
    try:
        make_folder(folder)
        save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})
        write_file(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    except OSError as error:
        raise UserError(f"cannot write {error.filename or folder}: {error.strerror}") from None


def _refuse_experts(checkpoint: Checkpoint, linears: Mapping[str, LinearSpec]) -> None:
    """Raise `UserError` if experts have adapters."""
    for name, linear in linears.items():
        if linear.adapters and isinstance(linear, GroupedLinearSpec):
            raise UserError(
                f"{checkpoint} has adapters of experts ({name}), which are no modules that peft "
                "could add them to; export the sums with export-hf"
            )


def map_base(model: ModelConfig, train: TrainConfig, family: str | None) -> list[HuggingFaceTensor]:
    """Return the tensors of the base as a Hugging Face model."""
    base = model.model_copy(update={"adapters": None})
    row, _ = write_model_config(base, train, family)
    return list(map_tensors(row, base, list_model_specs(base, train)))


def _list_modules_without(whole: Iterable[HuggingFaceTensor], adapted: set[str]) -> set[str]:
    """Return the last parts of the names of all modules that have no adapter."""
    names = (tensor.name.removesuffix(".weight") for tensor in whole)
    return {name.rpartition(".")[2] for name in names if name not in adapted}


def _read_modules(
    checkpoint: Checkpoint,
    base: Checkpoint,
    linears: Mapping[str, LinearSpec],
    whole: Iterable[HuggingFaceTensor],
    dtype: torch.dtype,
) -> Iterator[_ModuleAdapter]:
    """Yield the adapters of all of their matrices that have any."""
    for tensor in whole:
        adapters = find_adapters(tensor, linears)
        if not adapters:
            continue
        factors = {
            names: [checkpoint.read_tensor(f"{name}.weight").to(dtype) for name in names]
            for names in adapters
        }
        rank = len(adapters) * next(iter(adapters.values())).rank
        yield _ModuleAdapter(
            tensor.name.removesuffix(".weight"),
            rank,
            torch.cat([a.flatten(1) for a, _ in factors.values()]),
            torch.cat([_join_rows(part, adapters, factors, rank) for part in tensor.parts]),
            tensor.transposed,
            _join_magnitudes(tensor, adapters, checkpoint, base, dtype),
        )


def _join_magnitudes(
    tensor: HuggingFaceTensor,
    adapters: Mapping[AdapterNames, Adapter],
    checkpoint: Checkpoint,
    base: Checkpoint,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return the magnitudes of all rows of a tensor of theirs, [O]; None if it has none."""
    if not any(adapter.dora for adapter in adapters.values()):
        return None
    joined = []
    for part in tensor.parts:
        norms = measure_rows(base, part.spec)[part.box.slices[: -part.spec.inputs]]
        name = part.spec.name.removesuffix(".weight")
        for names, adapter in adapters.items():
            rows = find_rows(part, adapter)
            if rows is not None and names == adapter.name_factors(name):
                of_box, of_magnitude = rows
                own = checkpoint.read_tensor(adapter.name_magnitude(name))
                norms[of_box] += own[of_magnitude]
        joined.append(part.to_hugging_face(norms[..., None])[:, 0])
    return torch.cat(joined).to(dtype)


def measure_rows(base: Checkpoint, spec: ParamSpec) -> Tensor:
    """Return the norms of the rows of a weight, in the shape of its outputs and at least fp32.

    Args:
        base: The checkpoint that has it.
        spec: Of the weight.

    Raises:
        UserError: If it is not there or damaged.
    """
    weight = base.read_tensor(spec.name)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    dims = tuple(range(-spec.inputs, 0))
    norms: Tensor = torch.linalg.vector_norm(weight, dim=dims, dtype=dtype)
    return norms


def find_adapters(
    tensor: HuggingFaceTensor, linears: Mapping[str, LinearSpec]
) -> dict[AdapterNames, Adapter]:
    """Return the adapters of all that is stacked in a tensor of theirs, by the names of their
    factors."""
    adapters: dict[AdapterNames, Adapter] = {}
    for part in tensor.parts:
        linear = linears.get(part.spec.name)
        for adapter in () if linear is None else linear.adapters:
            if _find_span(part, adapter) is not None:
                name = part.spec.name.removesuffix(".weight")
                adapters[adapter.name_factors(name)] = adapter
    return adapters


def _find_span(part: TensorPart, adapter: Adapter) -> tuple[int, int] | None:
    """Return from where to where a box of a weight has rows of the matrix of an adapter, along the
    dim at which the weight is several; None if it has none."""
    first = part.box.offset[adapter.dim]
    last = first + part.box.shape[adapter.dim]
    if not adapter.name:
        return first, last
    start, stop = max(first, adapter.start), min(last, adapter.start + adapter.size)
    return (start, stop) if start < stop else None


def find_rows(part: TensorPart, adapter: Adapter) -> Rows | None:
    """Return where the rows of an adapter's matrix are in a box of a weight, and where in B; None
    if the box has none."""
    span = _find_span(part, adapter)
    if span is None:
        return None
    outputs = len(part.box.shape) - part.spec.inputs
    dim, (start, stop) = adapter.dim, span
    of_weight, of_b = list(part.box.slices[:outputs]), list(part.box.slices[:outputs])
    shift = adapter.start if adapter.name else 0
    of_b[dim] = slice(start - shift, stop - shift)
    of_weight[dim] = slice(start, stop)
    of_box = tuple(
        slice(each.start - begin, each.stop - begin)
        for each, begin in zip(of_weight, part.box.offset, strict=False)
    )
    return of_box, tuple(of_b)


def _join_rows(
    part: TensorPart,
    adapters: Mapping[AdapterNames, Adapter],
    factors: Mapping[AdapterNames, Sequence[Tensor]],
    rank: int,
) -> Tensor:
    """Return the rows of B for a box of a weight, in their order, [O, R]."""
    first = next(iter(factors.values()))[1]
    outputs = len(part.box.shape) - part.spec.inputs
    joined = torch.zeros(*part.box.shape[:outputs], rank, dtype=first.dtype)
    columns = range(0, rank, rank // len(adapters))
    for (names, adapter), column in zip(adapters.items(), columns, strict=True):
        rows = find_rows(part, adapter)
        if rows is None or not names[0].startswith(part.spec.name.removesuffix("weight")):
            continue
        of_box, of_b = rows
        joined[of_box][..., column : column + adapter.rank] = factors[names][1][of_b]
    return part.to_hugging_face(joined)


def _make_config(
    adapters: AdaptersConfig,
    modules: Sequence[_ModuleAdapter],
    others: set[str],
    base: str | None,
) -> dict[str, Any]:
    """Return the config of peft."""
    last_parts = {module.module: module.module.rpartition(".")[2] for module in modules}
    # A short name means all modules of this name.
    short = not others & set(last_parts.values())
    targets = sorted({last_parts[m.module] if short else m.module for m in modules})
    joined = {m.module: m.rank for m in modules if m.rank != adapters.rank}
    alpha = int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": targets,
        "rank_pattern": joined,
        "alpha_pattern": {name: alpha * rank / adapters.rank for name, rank in joined.items()},
        "fan_in_fan_out": any(module.transposed for module in modules),
        "bias": "none",
        "use_rslora": False,
        "use_dora": adapters.dora,
        "inference_mode": True,
    }
