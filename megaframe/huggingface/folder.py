"""Exports checkpoints to folders of Hugging Face models, and imports such folders.

Export keeps one output file in memory at a time, import one tensor of the folder. Only safetensors
files are read, so nothing is unpickled, and the contents of a folder are validated before use.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megaframe.checkpoint import Checkpoint, Place, Slice
from megaframe.checkpoint.container import PIECE_BYTES, Piece, Unplaced
from megaframe.checkpoint.examine import as_bytes, assemble, grouped
from megaframe.checkpoint.slices import Box, pieces, region
from megaframe.config import Data, RunConfig, Train
from megaframe.errors import UserError
from megaframe.huggingface.models import config_of, model_of
from megaframe.huggingface.tensors import Theirs, tensors_of
from megaframe.run_state import initial_state, read_state
from megaframe.spec import Constant, ParamSpec
from megaframe.stage import model_specs

_Origin = tuple[Theirs | ParamSpec, int]
"""Where a box comes from: a tensor of the Hugging Face model and the index of the part in it, or a
spec with a constant initial value."""
_Origins = dict[tuple[str, tuple[int, ...]], _Origin]
"""The origin of each box, by the name of its tensor and its offset."""
FILE_BYTES = 2 << 30
"""Bytes of tensors after which a new file is begun."""
_MAX_JSON = 64 << 20
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_INDEX, _SINGLE, _CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
_TOKENIZERS = {"hf": "tokenizer.json", "sentencepiece": "tokenizer.model"}


def export(checkpoint: Checkpoint, folder: Path, dtype: str = "bf16") -> None:
    """Write a checkpoint's weights as a folder that `from_pretrained` can load, with its tokenizer
    if that has a file.

    dtype: fp32, bf16 or fp16. Raises `UserError` if no Hugging Face model computes the same, or the
    folder exists or cannot be written.
    """
    if folder.exists():
        raise UserError(f"{folder} already exists; remove it or give another folder")
    run = read_state(checkpoint).config
    config = {**config_of(run.model), "dtype": str(_TYPES[dtype]).removeprefix("torch.")}
    theirs = tensors_of(run.model, model_specs(run))
    temporary = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        _write_files(checkpoint, theirs, temporary, _TYPES[dtype])
        _write_json(temporary / _CONFIG, config)
        _write_tokenizer(run, temporary)
        os.rename(temporary, folder)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or temporary}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_files(
    checkpoint: Checkpoint, theirs: list[Theirs], folder: Path, dtype: torch.dtype
) -> None:
    def bytes_of(one: Theirs) -> int:
        return sum(part.box.size for part in one.parts) * dtype.itemsize

    groups = grouped(theirs, bytes_of, FILE_BYTES)
    index: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        many = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        name = many if len(groups) > 1 else _SINGLE
        boxes = [[torch.empty(part.box.shape, dtype=dtype) for part in one.parts] for one in group]
        checkpoint.load(
            [
                Slice(part.spec.name, part.spec.shape, part.box.offset, box)
                for one, mine in zip(group, boxes, strict=True)
                for part, box in zip(one.parts, mine, strict=True)
            ]
        )
        joined = {one.name: one.join(mine) for one, mine in zip(group, boxes, strict=True)}
        save_file(joined, str(folder / name), metadata={"format": "pt"})
        index |= dict.fromkeys(joined, name)
    if len(groups) > 1:
        _write_json(
            folder / _INDEX,
            {"metadata": {"total_size": sum(map(bytes_of, theirs))}, "weight_map": index},
        )


def _write_tokenizer(run: RunConfig, folder: Path) -> None:
    kind, _, path = (run.data.tokenizer or "").partition(":")
    if kind not in _TOKENIZERS:
        return
    if not Path(path).is_file():
        raise UserError(f"data.tokenizer={run.data.tokenizer}: this file no longer exists")
    shutil.copy(path, folder / _TOKENIZERS[kind])
    name = "PreTrainedTokenizerFast" if kind == "hf" else "LlamaTokenizer"
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": name})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load(folder: Path, to: Place) -> Place:
    """Import the model in a Hugging Face folder as a checkpoint of step 0 in the folder `to`, in
    fp32.

    Raises `UserError` for a model that is not supported, for tensors that are missing, unknown or
    of another shape, and for damaged files.
    """
    config = _read_json(folder / _CONFIG)
    model = model_of(config)
    names = (f"{kind}:{folder / name}" for kind, name in _TOKENIZERS.items())
    tokenizer = next((name for name in names if Path(name.partition(":")[2]).exists()), None)
    run = RunConfig(model=model, data=Data(tokenizer=tokenizer), train=_precision(config))
    specs = model_specs(run)
    theirs = tensors_of(model, specs)
    files = _files(folder)
    _check_names(folder, theirs, files, model.tie_embeddings)
    boxes, source = _boxes(specs, theirs)
    found = _Boxes(folder, files, source)
    return assemble(
        to,
        0,
        initial_state(run).model_dump(mode="json"),
        grouped(boxes, lambda box: box.bytes, FILE_BYTES),
        found.bytes_of,
    )


def _precision(config: Mapping[str, Any]) -> Train:
    """Return a `train` section: in fp32 if the weights are stored in fp32, else in bf16."""
    dtype = config.get("dtype", config.get("torch_dtype"))
    return Train(precision="fp32" if dtype == "float32" else "bf16")


def _boxes(specs: list[ParamSpec], theirs: list[Theirs]) -> tuple[list[Unplaced], _Origins]:
    """Return the boxes to save, ordered by the tensors of the Hugging Face model, and the origin of
    each. Parameters without a counterpart there get their initial value."""
    boxes: list[Unplaced] = []
    source: _Origins = {}
    known = {part.spec.name for one in theirs for part in one.parts}
    from_theirs: list[tuple[ParamSpec, Box, _Origin]] = [
        (part.spec, (part.box.offset, part.box.shape), (one, place))
        for one in theirs
        for place, part in enumerate(one.parts)
    ]
    constant: list[tuple[ParamSpec, Box, _Origin]] = [
        (spec, ((0,) * len(spec.shape), spec.shape), (spec, 0))
        for spec in specs
        if spec.name not in known
    ]
    for spec, box, origin in [*from_theirs, *constant]:
        for offset, shape in pieces(box, PIECE_BYTES // 4):
            boxes.append(Unplaced(spec.name, spec.shape, offset, shape, "F32"))
            source[spec.name, offset] = origin
    return boxes, source


class _Boxes:
    """Provides the bytes of boxes. Keeps the tensor of the folder that was read last in memory."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, str],
        source: _Origins,
    ) -> None:
        self._folder, self._files, self._source = folder, files, source
        self._held: Theirs | None = None
        self._parts: list[Tensor] = []

    def bytes_of(self, piece: Piece) -> memoryview:
        origin, place = self._source[piece.name, piece.offset]
        if isinstance(origin, ParamSpec):
            assert isinstance(origin.init, Constant)
            return as_bytes(torch.full(piece.shape, origin.init.value))
        if origin is not self._held:
            self._held, self._parts = origin, []
            whole = _read(self._folder / self._files[origin.name], origin.name).float()
            self._parts = [box for _, box in origin.split(whole)]
        box = origin.parts[place].box
        inside = region((box.offset, box.shape), (piece.offset, piece.shape))
        return as_bytes(self._parts[place][inside])


def _files(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor, by its name."""
    if (folder / _INDEX).exists():
        files = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(
            isinstance(name, str) and Path(name).name == name for name in files.values()
        ):
            raise UserError(f"{folder / _INDEX} has no weight_map of file names in this folder")
        return files
    return {name: _SINGLE for name, _ in _names(folder / _SINGLE)}


def _check_names(folder: Path, theirs: list[Theirs], files: Mapping[str, str], tied: bool) -> None:
    wanted = {one.name: one for one in theirs}
    shapes: dict[str, list[int]] = {}
    for file in sorted(set(files.values())):
        shapes |= dict(_names(folder / file))
    problems = [f"{name} is missing" for name in wanted if name not in shapes]
    for name, shape in shapes.items():
        one = wanted.get(name)
        if one is None:
            if not _left_out(name, tied):
                problems.append(f"{name} has no counterpart")
            continue
        size = sum(part.box.size for part in one.parts)
        rows = sum(part.rows for part in one.parts)
        expected = [rows] if len(shape) == 1 else [rows, size // rows]
        if one.transposed:
            expected.reverse()
        if list(shape) != expected:
            problems.append(f"{name} is {list(shape)}, not {expected}")
    if problems:
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"{folder} does not fit its config:\n  " + "\n  ".join(problems[:5]) + more)


def _left_out(name: str, tied: bool) -> bool:
    """Return whether a tensor can be ignored: a buffer that some folders contain, or the output
    weights that equal tied embeddings."""
    buffers = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
    return name.endswith(buffers) or (tied and name == "lm_head.weight")


def _names(path: Path) -> list[tuple[str, list[int]]]:
    """Return names and shapes of the tensors in a file."""
    try:
        with safe_open(path, framework="pt") as file:
            return [(name, file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _read(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {name} from {path}: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON:
            raise UserError(f"{path} is larger than {_MAX_JSON} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content
