"""Checkpoints of adapters, and what they stand for: the model that their base is with them.

A run with adapters that began from a checkpoint saves only what it trains, with the place and the
fingerprint of that base. Whoever wants weights opens such a checkpoint by `open_model`, which reads
like one of a model without adapters: each weight is that of the base plus scale B A, with DoRA
rescaled by rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from megaframe.architecture.adapted_weights import list_adapted_weights
from megaframe.architecture.adapters import Adapter
from megaframe.architecture.linear import GroupedLinearSpec, LinearSpec
from megaframe.checkpoint.base_weights import BaseWeights
from megaframe.checkpoint.folder import locate_checkpoint
from megaframe.checkpoint.load import Checkpoint, open_checkpoint
from megaframe.checkpoint.manifest import SAVED_TENSORS, compute_checksum
from megaframe.checkpoint.slices import Box, Slice, index_within, intersect
from megaframe.checkpoint.stores.store import StorePath, parse_path
from megaframe.checkpoint.train_state import read_train_state
from megaframe.config import ModelConfig, TrainConfig
from megaframe.config.url import is_url
from megaframe.errors import UserError
from megaframe.io.untrusted import make_printable
from megaframe.ops.block_codec import round_to_codes
from megaframe.parameters.parameter import PRECISIONS
from megaframe.tensor_parallel.adapted_results import compute_row_factors

_OTHERS = "optimizer."
"""Prefix of tensors that are no weights."""
_MOST_BASES = 8
"""Checkpoints of adapters that are each the base of the next one, at most."""


def record_base(path: StorePath) -> BaseWeights:
    """Return what a checkpoint of adapters says of the checkpoint that they belong to.

    Raises:
        UserError: If it cannot be opened.
    """
    with open_checkpoint(path) as checkpoint:
        where = str(path.absolute()) if isinstance(path, Path) else str(path)
        return BaseWeights(path=where, fingerprint=compute_fingerprint(checkpoint))


def compute_fingerprint(checkpoint: Checkpoint) -> str:
    """Return a digest of the tensors of a checkpoint, and of what their base is: it follows from
    the checksums that the manifest has of all bytes."""
    tensors = SAVED_TENSORS.dump_json(dict(checkpoint.tensors))
    return compute_checksum(tensors + repr(checkpoint.state.get("base")).encode())


def open_base(base: BaseWeights, location: str, owner: Checkpoint, depth: int = 0) -> Checkpoint:
    """Open the checkpoint that adapters belong to, as a model.

    Args:
        base: Which one it is.
        location: Where it is if it is no longer at its path, such as `checkpoint.weights`; may be
            empty. If it is a URL, a base under a URL is opened.
        owner: The checkpoint of the adapters, for messages.
        depth: How many checkpoints of adapters this is the base of.

    Raises:
        UserError: If it is not there, or is another one.
    """
    path = parse_path(base.path)
    if not isinstance(path, Path) and isinstance(owner.path, Path) and not is_url(location):
        # Whoever hands over a folder does not decide what is asked for over a network.
        raise UserError(
            f"{owner} holds adapters of a base under a URL, {make_printable(base.path)}, which a "
            "checkpoint on a disk cannot make a command open; resume with checkpoint.weights=URL, "
            "or keep both in one store"
        )
    try:
        checkpoint = open_checkpoint(path)
    except UserError as error:
        if not location:
            raise UserError(f"{owner} holds adapters of {base.path}: {error}") from None
        path = locate_checkpoint(location, "checkpoint.weights")
        checkpoint = open_checkpoint(path)
    try:
        fingerprint = compute_fingerprint(checkpoint)
        if fingerprint != base.fingerprint:
            raise UserError(
                f"{owner} holds adapters of {base.path} with the fingerprint {base.fingerprint}, "
                f"and {path} has {fingerprint}: it is another base"
            )
        return merge_adapters(checkpoint, depth)
    except BaseException:
        checkpoint.close()
        raise


def open_model(path: StorePath) -> Checkpoint:
    """Open a checkpoint for its weights. One with adapters reads like the model that the base is
    with them, without adapters and without optimizer state.

    Raises:
        UserError: If it or its base cannot be opened, or the base is another one.
    """
    checkpoint = open_checkpoint(path)
    try:
        return merge_adapters(checkpoint)
    except BaseException:
        checkpoint.close()
        raise


def merge_adapters(checkpoint: Checkpoint, depth: int = 0) -> Checkpoint:
    """Return the model that an open checkpoint stands for: itself, if it has no adapters.

    Args:
        checkpoint: Is closed with what is returned.
        depth: How many checkpoints of adapters this is the base of.

    Raises:
        UserError: If its base cannot be opened, or is another one.
    """
    config: Any = checkpoint.state.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict) or not model.get("adapters"):
        return checkpoint
    if depth >= _MOST_BASES:
        raise UserError(f"{checkpoint}: more than {_MOST_BASES} checkpoints of adapters in a row")
    base = open_own_base(checkpoint, depth)
    return _MergedCheckpoint(checkpoint, base, read_train_state(checkpoint).config.model)


def open_own_base(checkpoint: Checkpoint, depth: int = 0) -> Checkpoint:
    """Return the checkpoint, as a model, whose weights the adapters of another one belong to: the
    same one if it has them itself.

    Args:
        checkpoint: With adapters.
        depth: How many checkpoints of adapters it is the base of.

    Raises:
        UserError: If the base cannot be opened, or is another one.
    """
    state = read_train_state(checkpoint)
    if state.base is None:
        return checkpoint
    config = state.config
    location = config.checkpoint.weights or ""
    location = "" if is_url(location) else location  # as the checkpoint says, not the user
    return round_base(
        open_base(state.base, location, checkpoint, depth + 1), config.model, config.train
    )


def describe_rounding(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line if the base of a checkpoint's adapters is kept as codes."""
    model = read_train_state(checkpoint).config.model
    coding = None if model.adapters is None else model.adapters.quantize_base
    if coding is not None:
        yield (
            f"the run keeps its base as {coding.type} in blocks of {coding.block} (model.adapters."
            "quantize_base): merged weights are those of the rounded base, to which its adapters "
            "belong"
        )


def round_base(base: Checkpoint, model: ModelConfig, train: TrainConfig) -> Checkpoint:
    """Return the base of a run's adapters as the run computes with it: if it keeps matrices as
    codes, with what is left of them.

    Args:
        base: Is closed with what is returned.
        model: Has the adapters.
        train: Has the precision of master weights.
    """
    adapters = model.adapters
    if adapters is None or adapters.quantize_base is None:
        return base
    return _RoundedCheckpoint(base, model, train)


class _RoundedCheckpoint(Checkpoint):
    """A base whose matrices are what is left of them after they were kept as codes."""

    def __init__(self, base: Checkpoint, model: ModelConfig, train: TrainConfig) -> None:
        super().__init__(base.path, base.manifest, base.file)
        self._base, self._linears = base, list_adapted_weights(model)
        # Codes are made of master weights.
        self._dtype = PRECISIONS[train.precision].master

    def close(self) -> None:
        """Close the base."""
        self._base.close()

    @torch.no_grad()
    def load(self, slices: Sequence[Slice], unshared: Collection[tuple[str, Box]] = ()) -> None:
        """Fill the slices' tensors in place, as `Checkpoint.load` does."""
        self._base.load([each for each in slices if each.name not in self._linears], unshared)
        for target in slices:
            linear = self._linears.get(target.name)
            if linear is not None and target.tensor.numel():
                assert linear.quantised is not None, "all of them are"
                rows = _widen_to_rows(target, linear, self._dtype)
                self._base.load([rows])
                round_to_codes(rows.tensor, linear.quantised)
                _copy_from_rows(target, rows)


def _widen_to_rows(target: Slice, linear: LinearSpec, dtype: torch.dtype) -> Slice:
    """Return a slice of memory of its own, of all inputs of the outputs that a slice has."""
    count = len(target.shape) - len(linear.inputs)
    offset = (*target.offset[:count], *(0 for _ in linear.inputs))
    shape = (*target.tensor.shape[:count], *linear.inputs)
    return Slice(target.name, target.shape, offset, torch.empty(shape, dtype=dtype))


def _copy_from_rows(target: Slice, rows: Slice) -> None:
    """Fill a slice from one that it is a part of."""
    target.tensor.copy_(rows.tensor[index_within(rows.box, target.box)])


class _MergedCheckpoint(Checkpoint):
    """A base with adapters, as one model."""

    def __init__(self, adapters: Checkpoint, base: Checkpoint, model: ModelConfig) -> None:
        self._adapters, self._base = adapters, base
        linears = list_adapted_weights(model)
        self._linears = {name: linear for name, linear in linears.items() if linear.adapters}
        tensors = {name: tensor for name, tensor in base.tensors.items() if is_of_base(name)}
        manifest = adapters.manifest.model_copy(
            update={"state": _leave_out_adapters(adapters.state), "tensors": tensors}
        )
        super().__init__(adapters.path, manifest, adapters.file)

    def close(self) -> None:
        """Close both checkpoints."""
        self._adapters.close()
        self._base.close()

    @torch.no_grad()
    def load(self, slices: Sequence[Slice], unshared: Collection[tuple[str, Box]] = ()) -> None:
        """Fill the slices' tensors in place, as `Checkpoint.load` does, with what adapters add."""
        self._require(slices)
        self._base.load([each for each in slices if each.name not in self._linears], unshared)
        for target in slices:
            linear = self._linears.get(target.name)
            if linear is not None and target.tensor.numel():
                self._merge(target, linear)

    def _merge(self, target: Slice, linear: LinearSpec) -> None:
        """Make one slice of a weight that of the base with all adapters of it."""
        if not linear.rescales:
            self._add(target, linear)
            return
        # Rows have norms as a whole.
        rows = _widen_to_rows(target, linear, target.tensor.dtype)
        self._add(rows, linear)
        _copy_from_rows(target, rows)

    def _add(self, target: Slice, linear: LinearSpec) -> None:
        """Add the products of all adapters of a weight to one slice of it."""
        # In at least fp32: the sum is rounded once, to the type of the slice.
        dtype = torch.promote_types(target.tensor.dtype, torch.float32)
        name = target.name.removesuffix(".weight")
        total = torch.empty(target.tensor.shape, dtype=dtype)
        self._base.load([Slice(target.name, target.shape, target.offset, total)])
        for adapter in linear.adapters:
            part = _find_part(target, linear, adapter)
            if part is not None:
                box, down, up = part
                sizes = tuple(zip((down, up), adapter.name_factors(name), strict=True))
                a, b = (
                    Slice(f"{factor_name}.weight", shape, offset, torch.empty(size, dtype=dtype))
                    for (shape, offset, size), factor_name in sizes
                )
                self._adapters.load([a, b])
                lead = a.tensor.shape[: isinstance(linear, GroupedLinearSpec)]
                product = b.tensor.reshape(*lead, -1, adapter.rank) @ a.tensor.reshape(
                    *lead, adapter.rank, -1
                )
                index = tuple(
                    slice(start - first, start - first + size)
                    for first, start, size in zip(target.offset, *box, strict=True)
                )
                whole = total[index] + adapter.scale * product.view(box[1])
                if adapter.dora:
                    whole *= self._compute_factors(total[index], whole, linear, adapter, name, box)
                total[index] = whole
        target.tensor.copy_(total)

    def _compute_factors(
        self, base: Tensor, whole: Tensor, linear: LinearSpec, adapter: Adapter, name: str, box: Box
    ) -> Tensor:
        """Return what some rows of the sum of a matrix and its adapter are multiplied by.

        Args:
            base: The rows of the base.
            whole: The sum.
            linear: What the product declares.
            adapter: Which one.
            name: Of the linear layer.
            box: Where the rows are in the weight.
        """
        spec = linear.declare_magnitude(adapter, name)
        outputs = len(spec.shape)
        start = [*box[0][:outputs]]
        start[adapter.dim] -= adapter.start
        magnitude = base.new_empty(base.shape[:outputs])
        self._adapters.load([Slice(spec.name, spec.shape, tuple(start), magnitude)])
        dims = tuple(range(outputs, base.dim()))
        norms = torch.stack([torch.linalg.vector_norm(rows, dim=dims) for rows in (base, whole)])
        factors, _ = compute_row_factors(norms, magnitude)
        return factors.view(*factors.shape, *(1 for _ in dims))


_Part = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Shape of a factor, offset and size of a box of it."""


def _find_part(
    target: Slice, linear: LinearSpec, adapter: Adapter
) -> tuple[Box, _Part, _Part] | None:
    """Return the box of a weight that an adapter adds to within a slice, and the boxes of A and B
    that it is the product of; None if it adds nothing there."""
    down, up = linear.make_factors(adapter)
    lead = int(isinstance(linear, GroupedLinearSpec))
    dim, outputs = lead + adapter.dim, lead + len(linear.outputs)
    start, size = [0] * len(target.shape), [*target.shape]
    start[dim], size[dim] = adapter.start, adapter.size
    box = intersect(target.box, (tuple(start), tuple(size)))
    if box is None:
        return None
    offset, shape = box
    whole = target.shape[:lead]
    rank = (adapter.rank,)
    b_offset = [*offset[:outputs], 0]
    b_offset[dim] -= adapter.start
    a = (
        (*whole, *down.outputs, *down.inputs),
        (*offset[:lead], 0, *offset[outputs:]),
        (*shape[:lead], *rank, *shape[outputs:]),
    )
    b = ((*whole, *up.outputs, *up.inputs), tuple(b_offset), (*shape[:outputs], *rank))
    return box, a, b


def _leave_out_adapters(state: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the state of a run as if its model had no adapters and no base."""
    config: Any = state["config"]
    plain = {**config, "model": {**config["model"], "adapters": None}}
    return {**state, "config": plain, "base": None}


def is_of_base(name: str) -> bool:
    """Return whether a tensor of a run with adapters is a weight of their base."""
    return not name.startswith(_OTHERS) and ".adapters." not in name
