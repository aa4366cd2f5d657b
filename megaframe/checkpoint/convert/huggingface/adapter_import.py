"""Reads adapters that peft saved, as the values that a run's own adapters start from.

Where a matrix of theirs stacks several of ours, each of our adapters gets their A and its own rows
of their B and of their magnitudes, which is the same sum. Their modules may have ranks and scales
of their own, and ours have one of each: of a module of a higher rank ours get only what their rows
of B use, those of a lower one keep the rest of their own A, with zeros in B, and B is multiplied by
the ratio of scales. Nothing of the folder is ignored: a setting that would change what is computed,
a module without an adapter here, or the reverse, is refused by name.

Shape legend: R rank, I inputs, O outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.adapted_weights import list_adapted_weights
from megaframe.architecture.adapters import Adapter
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.spec import Box
from megaframe.checkpoint import Checkpoint
from megaframe.checkpoint.convert.huggingface.adapter_export import (
    CONFIG,
    FACTORS,
    PREFIX,
    WEIGHTS,
    AdapterNames,
    Rows,
    find_adapters,
    find_rows,
    map_base,
    measure_rows,
)
from megaframe.checkpoint.convert.huggingface.read_files import (
    TensorHeader,
    check_finite,
    check_type,
    read_file_headers,
    read_json,
    read_stored_tensor,
)
from megaframe.checkpoint.convert.huggingface.tensors import HuggingFaceTensor, TensorPart
from megaframe.config import ModelConfig, TrainConfig
from megaframe.config.adapters import AdaptersConfig
from megaframe.config.keys import format_value
from megaframe.errors import UserError
from megaframe.io.untrusted import make_printable

_PATTERNS = "rank_pattern", "alpha_pattern"
_READ = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "init_lora_weights"),
    *_PATTERNS,
)
_WITHOUT_EFFECT = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "exclude_modules", "lora_dropout", "fan_in_fan_out"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size"),
)
"""Keys that say which modules have adapters, as the tensors do, how they were trained, or what a
key that is refused would need. Any other one is refused if it says anything."""
_MOST_RANKS = 1 << 20
_PATTERN = re.compile(r"[\w.\\^$|*+\[\]-]{1,200}")
"""Patterns of modules that are matched: without groups, and so without repeated repetitions."""
_MOST_REPETITIONS = 4
_FRESH = (True, False, "gaussian", "orthogonal", "eva")
"""Initial values that leave the base as it is."""


def read_adapters(
    folder: Path, model: ModelConfig, train: TrainConfig, base: Checkpoint | None = None
) -> dict[str, Tensor]:
    """Return the values of a run's adapters, by the names of the parameters. An A may have fewer
    rows than a parameter, which keeps its own in the others.

    Args:
        folder: What peft's `save_pretrained` wrote.
        model: Has adapters.
        train: Has the length of samples.
        base: What they belong to, as a model; only read for magnitudes.

    Raises:
        UserError: If the folder cannot be read, or holds adapters of other matrices, of another
            rank or scale than `model.adapters` says, or of a kind that is not known here.
    """
    adapters = model.adapters
    assert adapters is not None, "the config was not validated"
    settings = _read_settings(folder / CONFIG, adapters)
    headers = read_file_headers(folder / WEIGHTS)
    linears = list_adapted_weights(model)
    whole = map_base(model, train, None)
    adapted = [(tensor, found) for tensor in whole if (found := find_adapters(tensor, linears))]
    names = [_name_factors(tensor, adapters) for tensor, _ in adapted]
    _check_names(folder / WEIGHTS, headers, names)
    values: dict[str, Tensor] = {}
    needed = 0
    for (tensor, found), own_names in zip(adapted, names, strict=True):
        a, b, *magnitude = (headers[name] for name in own_names)
        rows, columns = tensor.shape[::-1] if tensor.transposed else tensor.shape
        rank, scale = settings.find(tensor.name.removesuffix(".weight"))
        _check_factor(a, (rank, columns))
        _check_factor(b, (rows, rank))
        ratio = scale * adapters.rank / adapters.alpha
        b_OR = _read(b) if math.isclose(ratio, 1.0) else _read(b) * ratio
        used = _fill(values, tensor, found, linears, _read(a), b_OR)
        needed = max(needed, used)
        for header in magnitude:
            assert base is not None, "the config was not validated"
            _check_factor(header, (rows,))
            _fill_magnitudes(values, tensor, found, base, _read(header))
    settings.check(adapters, needed)
    return values


@dataclass(frozen=True)
class _Settings:
    """Ranks and scales of modules.

    Attributes:
        where: The file, for messages.
        rank, alpha: Where no pattern says otherwise.
        ranks, alphas: By patterns of modules.
        root: Whether alpha is divided by the root of the rank.
    """

    where: str
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    root: bool

    def find(self, module: str) -> tuple[int, float]:
        """Return rank and scale of a module."""
        rank = _find_by_pattern(self.ranks, module, self.rank)
        alpha = _find_by_pattern(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.root else rank)

    def check(self, adapters: AdaptersConfig, needed: int) -> None:
        """Raise `UserError` if the rank and scale of a config are not those of these adapters.

        Args:
            adapters: The section.
            needed: The highest rank that an adapter of ours needs.
        """
        rank = adapters.rank if adapters.rank in (needed, self.rank) else needed
        rank = max(rank, needed)
        alpha = self.alpha * (math.sqrt(self.rank) if self.root else 1.0) * rank / self.rank
        if rank != adapters.rank or not math.isclose(alpha, adapters.alpha):
            raise UserError(
                f"{self.where} has rank {rank} and alpha {alpha:g}, and model.adapters has rank "
                f"{adapters.rank} and alpha {adapters.alpha:g}; use model.adapters.rank={rank} "
                f"model.adapters.alpha={alpha!r}"
            )


def _find_by_pattern(by_pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return what the first pattern of a module's name, or of what follows a dot of it, says."""
    for pattern, value in by_pattern.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _read_settings(path: Path, adapters: AdaptersConfig) -> _Settings:
    """Return the settings of a folder. Raises `UserError` if its adapters compute something else
    than those of a config can."""
    where, settings = make_printable(path), read_json(path)
    if settings.get("peft_type") != "LORA":
        kind = make_printable(str(settings.get("peft_type")))
        raise UserError(f"{where}: peft_type={kind} is no low-rank adapter; use LORA")
    if settings.get("init_lora_weights", True) not in _FRESH:
        raise UserError(
            f"{where}: init_lora_weights={make_printable(str(settings['init_lora_weights']))} "
            "changes the base, which is not in this folder; convert it by peft first"
        )
    for key, value in settings.items():
        if key not in (*_READ, *_WITHOUT_EFFECT) and value not in (None, False, "none", {}, []):
            raise UserError(
                f"{where}: {make_printable(key)}={make_printable(str(value))[:200]} is not known "
                "here, where adapters have no biases"
            )
    ranks, alphas = (_read_patterns(where, settings, key) for key in _PATTERNS)
    rank: Any = settings.get("r")
    alpha: Any = settings.get("lora_alpha")
    if not all(map(_is_rank, (rank, *ranks.values()))) or not all(
        map(_is_alpha, (alpha, *alphas.values()))
    ):
        raise UserError(f"{where}: r and lora_alpha are no numbers of an adapter")
    dora = bool(settings.get("use_dora"))
    if dora != adapters.dora:
        raise UserError(
            f"{where}: use_dora={format_value(dora)}, and model.adapters.dora="
            f"{format_value(adapters.dora)}; use model.adapters.dora={format_value(dora)}"
        )
    return _Settings(where, rank, alpha, ranks, alphas, bool(settings.get("use_rslora")))


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 < value < _MOST_RANKS


def _is_alpha(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


def _read_patterns(where: str, settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return numbers by patterns of modules.

    Raises:
        UserError: If they are none, or patterns that are not matched here.
    """
    by_pattern = settings.get(key) or {}
    if not isinstance(by_pattern, dict):
        raise UserError(f"{where}: {key} has no patterns of modules")
    for pattern in by_pattern:
        repetitions = sum(map(pattern.count, "*+"))
        try:
            is_known = _PATTERN.fullmatch(pattern) and re.compile(pattern)
        except re.error:
            is_known = None
        if not is_known or repetitions > _MOST_REPETITIONS:
            raise UserError(
                f"{where}: {key} names modules by {make_printable(pattern)[:200]}, which is not "
                "matched here; use their names, or patterns without groups"
            )
    return by_pattern


def _name_factors(tensor: HuggingFaceTensor, adapters: AdaptersConfig) -> list[str]:
    """Return the names that peft has for A, B and, if there are any, magnitudes of a matrix of
    theirs."""
    module = f"{PREFIX}{tensor.name.removesuffix('.weight')}"
    return [f"{module}.{factor}" for factor in FACTORS[: 3 if adapters.dora else 2]]


def _check_names(
    path: Path, headers: Mapping[str, TensorHeader], expected: Sequence[Sequence[str]]
) -> None:
    """Raise `UserError` if a file has other tensors than these."""
    names = {name for factors in expected for name in factors}
    lacking, extra = sorted(names - set(headers)), sorted(set(headers) - names)
    for kind, which in (("lacks", lacking), ("has besides them", extra)):
        if which:
            raise UserError(
                f"{make_printable(path)}: model.adapters of this model has {len(names)} factors; "
                f"the file {kind} {len(which)}, the first is {make_printable(which[0])}; use "
                "model.adapters.targets and layers that name its modules"
            )


def _check_factor(header: TensorHeader, shape: tuple[int, ...]) -> None:
    """Raise `UserError` if a factor has another shape."""
    check_type(header.name, header)
    if header.shape != shape:
        raise UserError(
            f"{make_printable(header.file)}: {make_printable(header.name)} has the shape "
            f"{format_value(list(header.shape))}, and for this model it would be "
            f"{format_value(list(shape))}: it is an adapter for another model"
        )


def _read(header: TensorHeader) -> Tensor:
    values = read_stored_tensor(header)
    check_finite(header.name, values, header.dtype)
    return values


def _fill(
    values: dict[str, Tensor],
    tensor: HuggingFaceTensor,
    adapters: Mapping[AdapterNames, Adapter],
    linears: Mapping[str, LinearSpec],
    a_RI: Tensor,
    b_OR: Tensor,
) -> int:
    """Put the factors of a matrix of theirs into those of ours. Return the highest rank of these.

    Raises:
        UserError: If a matrix of ours is several of theirs with different A, or theirs adds to
            rows that have no adapter here.
    """
    blocks = b_OR.split([part.rows for part in tensor.parts])
    arranged = [
        (part, arrange_rows(part, rows_OR).clone())
        for part, rows_OR in zip(tensor.parts, blocks, strict=True)
    ]
    used = _find_used_components(arranged, adapters)
    for part, rest in arranged:
        for names, adapter, (of_box, of_b) in _list_adapters_of(part, adapters):
            down, up = linears[part.spec.name].make_factors(adapter)
            a, b = (f"{name}.weight" for name in names)
            own_a = a_RI[used[names]].reshape(-1, *down.inputs)
            if not torch.equal(values.setdefault(a, own_a), own_a):
                raise UserError(
                    f"{make_printable(tensor.name)}: its lora_A differs from that of another "
                    f"module, with which it is one matrix here, {a}; merge the adapter by peft"
                )
            shape = (*up.outputs, max(adapter.rank, len(own_a)))
            into = values.setdefault(b, torch.zeros(shape, dtype=b_OR.dtype))
            into[of_b][..., : len(own_a)] = rest[of_box][..., used[names]]
            rest[of_box] = 0
        if rest.any():
            raise UserError(
                f"{make_printable(tensor.name)}: its lora_B has {rest.flatten(0, -2).any(1).sum()} "
                f"rows that add to matrices of {part.spec.name} without an adapter; use "
                "model.adapters.targets that name all of them"
            )
    return max(map(len, used.values()))


def _find_used_components(
    arranged: Sequence[tuple[TensorPart, Tensor]], adapters: Mapping[AdapterNames, Adapter]
) -> dict[AdapterNames, Tensor]:
    """Return which of the rows of their A each adapter of ours gets: all, or if these are more than
    its rank those that its rows of B multiply.

    Args:
        arranged: Parts of their matrix with their rows of B.
        adapters: Those of ours in them.
    """
    is_used: dict[AdapterNames, Tensor] = {}
    for part, rows in arranged:
        for names, adapter, (of_box, _) in _list_adapters_of(part, adapters):
            own = rows[of_box].flatten(0, -2)
            if own.shape[1] <= adapter.rank:
                own = torch.ones_like(own)
            used = own.ne(0).any(0)
            is_used[names] = is_used.get(names, torch.zeros_like(used)) | used
    return {names: used.nonzero()[:, 0] for names, used in is_used.items()}


def _fill_magnitudes(
    values: dict[str, Tensor],
    tensor: HuggingFaceTensor,
    adapters: Mapping[AdapterNames, Adapter],
    base: Checkpoint,
    magnitude_O: Tensor,
) -> None:
    """Put what the magnitudes of a matrix of theirs differ by from the norms of the base into
    ours."""
    blocks = magnitude_O.split([part.rows for part in tensor.parts])
    for part, rows_O in zip(tensor.parts, blocks, strict=True):
        box_rows = arrange_rows(part, rows_O[:, None])[..., 0]
        norms = measure_rows(base, part.spec)
        box_rows = box_rows - norms[part.box.slices[: norms.dim()]]
        for _, adapter, (of_box, of_magnitude) in _list_adapters_of(part, adapters):
            shape = [*norms.shape]
            shape[adapter.dim] = adapter.size
            name = adapter.name_magnitude(part.spec.name.removesuffix(".weight"))
            into = values.setdefault(name, torch.zeros(shape, dtype=box_rows.dtype))
            into[of_magnitude] = box_rows[of_box]


def _list_adapters_of(
    part: TensorPart, adapters: Mapping[AdapterNames, Adapter]
) -> Iterator[tuple[AdapterNames, Adapter, Rows]]:
    """Yield the adapters that have rows in a box of a weight, and where these are."""
    prefix = part.spec.name.removesuffix("weight")
    for names, adapter in adapters.items():
        rows = find_rows(part, adapter) if names[0].startswith(prefix) else None
        if rows is not None:
            yield names, adapter, rows


def arrange_rows(part: TensorPart, rows_OR: Tensor) -> Tensor:
    """Return rows of B in the order and shape of a box's outputs, [*outputs, R]."""
    outputs = len(part.box.shape) - part.spec.inputs
    shape = (*part.box.shape[:outputs], rows_OR.shape[1])
    offset = (*part.box.offset[:outputs], 0)
    return replace(part, box=Box(offset, shape), offset=0.0).from_hugging_face(rows_OR)
