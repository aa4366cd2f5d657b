"""Parameters of one rank, counted from the config alone.

They are those of the first rank of the tensor and expert axes, which has the larger part of
whatever does not divide evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import sub
from typing import Any

from megaframe.architecture.block import BlockDescription
from megaframe.architecture.buckets import BucketBlocks, group_blocks_into_buckets
from megaframe.architecture.embedding import (
    TableDescription,
    describe_layer_embeddings,
    describe_position_table,
)
from megaframe.architecture.frozen import is_frozen
from megaframe.architecture.layer import HasParameters
from megaframe.architecture.model_blocks import describe_block, describe_norm
from megaframe.architecture.predictor import describe_predictor
from megaframe.architecture.spec import EXPERT_AXES, count_copies
from megaframe.architecture.stages import StagePlan, compute_trained_share
from megaframe.architecture.streams import describe_first_streams, describe_last_streams
from megaframe.config import ParallelConfig, TrainConfig
from megaframe.config.model import ModelConfig
from megaframe.layout import Layout


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters of one rank, before ZeRO divides them.

    `split`, `experts`, `replicated` and `shared` have an entry for each part of a block: attention,
    and the late part after it.

    Attributes:
        vectors: All gains and biases.
        split: The matrices that tensor ranks divide.
        tables: Each embedding table, and the head.
        experts: The matrices of experts, 0 where there are none.
        replicated: The matrices that all tensor ranks have whole.
        shared: The matrices that groups of neighbouring tensor ranks have in common.
        positions: The table of positions, which is whole on all tensor ranks as well.
        tensor: Number of tensor ranks.
        copies: Tensor ranks of a group that has `shared` matrices in common.
    """

    vectors: int
    split: tuple[int, ...]
    tables: tuple[int, ...]
    experts: tuple[int, ...] = ()
    replicated: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    positions: int = 0
    tensor: int = 1
    copies: int = 1

    @property
    def dense(self) -> int:
        """Number of parameters outside the experts."""
        matrices = (*self.split, *self.tables, *self.replicated, *self.shared)
        return self.vectors + sum(matrices) + self.positions

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.dense + sum(self.experts)

    @property
    def outside_blocks(self) -> int:
        """Number of parameters that are not matrices of blocks."""
        return self.vectors + sum(self.tables) + self.positions

    def count_shard_outside_blocks(self, ranks: int) -> int:
        """Return the number of `outside_blocks` in a rank's own part, where `ranks` ranks divide a
        copy."""
        positions = -(-self.positions // (ranks * self.tensor))
        return -(-(self.vectors + sum(self.tables)) // ranks) + positions

    def count_shard(self, ranks: int, expert_ranks: int) -> int:
        """Return the number of parameters in a rank's own part, where `ranks` ranks divide a copy
        of the dense parameters and `expert_ranks` ranks one of the experts."""
        divided = self.vectors + sum(self.split) + sum(self.tables)
        return (
            -(-divided // ranks)
            + -(-(sum(self.replicated) + self.positions) // (ranks * self.tensor))
            + -(-sum(self.shared) // (ranks * self.copies))
            + -(-sum(self.experts) // expert_ranks)
        )

    def select_divided(self, ranks: int, expert_ranks: int) -> RankParameters:
        """Return the same parameters without the matrices that a single rank has, which ZeRO never
        divides; arguments as in `count_shard`."""

        def select(sizes: tuple[int, ...], ranks_of_copy: int) -> tuple[int, ...]:
            return tuple(size if ranks_of_copy > 1 else 0 for size in sizes)

        return replace(
            self,
            split=select(self.split, ranks),
            tables=select(self.tables, ranks),
            experts=select(self.experts, expert_ranks),
            replicated=select(self.replicated, ranks * self.tensor),
            shared=select(self.shared, ranks * self.copies),
            positions=self.positions if ranks * self.tensor > 1 else 0,
        )

    def subtract(self, other: RankParameters) -> RankParameters:
        """Return those of the parameters that are not among some of them."""
        names = ("split", "tables", "experts", "replicated", "shared")
        parts: dict[str, Any] = {
            name: tuple(map(sub, getattr(self, name), getattr(other, name))) for name in names
        }
        vectors, positions = self.vectors - other.vectors, self.positions - other.positions
        return replace(self, vectors=vectors, positions=positions, **parts)

    def compute_largest_bucket_shard(self, ranks: int, expert_ranks: int) -> int:
        """Return the largest size of a rank's own part of one bucket; arguments as in
        `count_shard`."""
        tables = (*self.tables, self.positions)
        dense = max(self.vectors, *self.split, *tables, *self.replicated, *self.shared)
        return max(-(-dense // ranks), -(-max(self.experts, default=0) // expert_ranks))

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """The elements of each kind of matrices, for each part of a block."""
        return [*zip(self.split, self.experts, self.replicated, self.shared, strict=True)]

    def group_blocks(
        self, parallel: ParallelConfig, plans: Sequence[StagePlan]
    ) -> list[BucketBlocks]:
        """Return which of the rank's blocks, counted over its stages, share buckets."""
        halves = [sum(sizes) for sizes in self.parts]
        sizes = [*zip(halves[1::2], halves[::2], strict=True)]
        least, start, groups = parallel.bucket_size, 0, []
        for plan in plans:
            stage_sizes = sizes[start : start + len(plan.blocks)]
            for group in group_blocks_into_buckets(stage_sizes, 1 if least == "auto" else least):
                groups.append(BucketBlocks(start + group.start, start + group.stop, group.halves))
            start += len(plan.blocks)
        return groups

    @property
    def elements_per_block(self) -> list[int]:
        """The elements of the matrices of each block."""
        halves = [sum(sizes) for sizes in self.parts]
        return [
            first_half + second_half
            for first_half, second_half in zip(halves[::2], halves[1::2], strict=True)
        ]

    def merge_into_buckets(
        self, parallel: ParallelConfig, plans: Sequence[StagePlan]
    ) -> RankParameters:
        """Return the same parameters with an entry for each bucket instead of each part of a block.

        Args:
            parallel: Has the size of buckets.
            plans: The stages of this rank.
        """
        parts, merged, stop = self.parts, [], 0
        for group in self.group_blocks(parallel, plans):
            stop = 2 * group.stop
            group_parts = parts[2 * group.start : stop]
            merged += group_parts if group.halves else [sum_parts(group_parts)]
        split, experts, replicated, shared = (
            zip(*merged, *parts[stop:], strict=True) if parts else ((),) * 4
        )
        return replace(self, split=split, experts=experts, replicated=replicated, shared=shared)


def sum_parts(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the elements of each kind in all of these parts."""
    return tuple(map(sum, zip(*parts, strict=True)))


@dataclass(frozen=True)
class _PartCounts:
    """Elements of a part of a block, by how they are divided; fields as in `RankParameters`."""

    vectors: int = 0
    split: int = 0
    replicated: int = 0
    shared: int = 0
    experts: int = 0
    copies: int = 1

    @property
    def matrices(self) -> int:
        """Elements of all matrices."""
        return self.split + self.replicated + self.shared + self.experts

    def add(self, other: _PartCounts) -> _PartCounts:
        """Return the counts of both parts together."""
        return _PartCounts(
            self.vectors + other.vectors,
            self.split + other.split,
            self.replicated + other.replicated,
            self.shared + other.shared,
            self.experts + other.experts,
            max(self.copies, other.copies),
        )


def count_rank_parameters(
    model: ModelConfig,
    train: TrainConfig,
    layout: Layout,
    plans: Sequence[StagePlan],
    frozen: tuple[str, ...] = (),
) -> RankParameters:
    """Return the parameters of a rank that has the stages of `plans`.

    Args:
        model: The section `model`.
        train: The section `train`.
        layout: Its ranks.
        plans: The stages of the rank.
        frozen: Patterns of the names of parameters that do not count.
    """
    sizes = {
        "tensor": layout.tensor,
        "expert": layout.expert,
        "expert_tensor": layout.expert_tensor,
    }
    parts: list[_PartCounts] = []
    if model.emulate is None:
        layers = [layer for plan in plans for layer in plan.blocks]
        parts = [
            part for layer in layers for part in _count_block(model, layer, *sizes.values(), frozen)
        ]
    tables: list[int] = []
    vectors = positions = 0
    first, last = any(plan.first for plan in plans), any(plan.last for plan in plans)
    # A config may be planned before its tokenizer has said how large the vocabulary is.
    vocabulary = TableDescription(model.vocab or 0, model.hidden, model.init_std, split=True)
    table = _count_part({"tokens": vocabulary}, sizes).split

    def count(size: int, name: str) -> int:
        return 0 if is_frozen(frozen, name) else size

    def count_norm(name: str) -> int:
        part = _count_part({name: describe_norm(model)}, sizes, "", frozen)
        return part.vectors

    def count_streams(streams: HasParameters | None, unit: str) -> int:
        parts = {} if streams is None else {"streams": streams}
        return _count_part(parts, sizes, unit, frozen).vectors

    tokens = count(table, "embedding.tokens.weight")
    if first:
        tables.append(tokens)
        vectors += count_norm("embedding.norm") * model.embedding_norm
        vectors += count_streams(describe_first_streams(model), "embedding.")
        position_table = describe_position_table(model, train.seq)
        if position_table is not None:
            positions = _count_part({"positions": position_table}, sizes).replicated
            positions = count(positions, "embedding.positions.weight")
        layer_embeddings = describe_layer_embeddings(model)
        if layer_embeddings is not None:
            own = _count_part(layer_embeddings.parts, sizes, "embedding.", frozen)
            tables.append(own.split)
            positions += own.replicated
            vectors += own.vectors
    if last:
        vectors += count_norm("head.norm")
        vectors += count_streams(describe_last_streams(model), "head.")
        for index in range(model.mtp_depth):
            vectors += count_norm(f"predictors.{index}.norm")
            parts += _count_predictor(model, index, *sizes.values(), frozen)
        if not first and (model.tie_embeddings or model.mtp_depth):
            tables.append(tokens)
        if not model.tie_embeddings:
            tables.append(count(table, "head.weight"))
        if model.head_bias:
            vectors += count(table // model.hidden, "head.bias")
    return RankParameters(
        vectors + sum(part.vectors for part in parts),
        tuple(part.split for part in parts),
        tuple(tables),
        tuple(part.experts for part in parts),
        tuple(part.replicated for part in parts),
        tuple(part.shared for part in parts),
        positions,
        layout.tensor,
        max((part.copies for part in parts), default=1),
    )


def count_model_parameters(
    model: ModelConfig, train: TrainConfig, frozen: tuple[str, ...] = ()
) -> RankParameters:
    """Return the parameters of a rank that is alone; arguments as in `count_rank_parameters`."""
    whole = StagePlan(0, 1, range(model.layers))
    return count_rank_parameters(model, train, Layout(), [whole], frozen)


def list_layer_kinds(
    model: ModelConfig, frozen: tuple[str, ...]
) -> list[tuple[BlockDescription, float]]:
    """Return for each layer what layers of one kind have in common: the block, and the share of its
    matrices that is trained."""
    return [
        (describe_block(model, layer), compute_trained_share(model, frozen, layer))
        for layer in range(model.layers)
    ]


@lru_cache(maxsize=4096)
def _count_block(
    model: ModelConfig,
    layer: int,
    tensor: int,
    expert: int,
    expert_tensor: int,
    frozen: tuple[str, ...] = (),
) -> tuple[_PartCounts, _PartCounts]:
    """Return the counts of both halves of a block."""
    sizes = {"tensor": tensor, "expert": expert, "expert_tensor": expert_tensor}
    block, name = describe_block(model, layer), f"blocks.{layer}."
    first_half, second_half = (
        _count_part(half, sizes, name, frozen) for half in (block.first_half, block.second_half)
    )
    return first_half, second_half


@lru_cache(maxsize=4096)
def _count_predictor(
    model: ModelConfig,
    index: int,
    tensor: int,
    expert: int,
    expert_tensor: int,
    frozen: tuple[str, ...] = (),
) -> tuple[_PartCounts, _PartCounts]:
    """Return the counts of both halves of a predictor."""
    sizes = {"tensor": tensor, "expert": expert, "expert_tensor": expert_tensor}
    predictor = describe_predictor(model, index)
    norms = {"stream_norm": predictor.norm, "token_norm": predictor.norm}
    join: dict[str, HasParameters] = {**norms, "join": predictor.join}
    own = _count_part(join, sizes, f"predictors.{index}.", frozen)
    first_half, second_half = _count_block(
        model, model.layers + index, tensor, expert, expert_tensor, frozen
    )
    return own.add(first_half), second_half


def _count_part(
    parts: Mapping[str, HasParameters],
    sizes: Mapping[str, int],
    prefix: str = "",
    frozen: Sequence[str] = (),
) -> _PartCounts:
    """Return the counts of what these parts declare, on the first rank of each axis.

    Args:
        parts: Parts by name.
        sizes: Ranks by axis.
        prefix: Of their names in the model.
        frozen: Patterns of the names of parameters that do not count.
    """
    counts, copies = dict.fromkeys(("vectors", "split", "replicated", "shared", "experts"), 0), 1
    first_rank = dict.fromkeys(sizes, 0)
    for name, part in parts.items():
        for spec in part.declare_parameters(name):
            size = spec.find_local_box(first_rank, sizes).size
            axes, kind = set(spec.axes.values()), "split"
            if spec.role == "balance" or is_frozen(frozen, prefix + spec.name):
                continue
            if spec.role in ("gain", "bias"):
                kind = "vectors"
            elif axes & set(EXPERT_AXES):
                kind = "experts"
            elif "tensor" in axes:
                split = next(spec.shape[dim] for dim, axis in spec.axes.items() if axis == "tensor")
                if count_copies(split, sizes["tensor"]) > 1:
                    kind, copies = "shared", count_copies(split, sizes["tensor"])
            elif sizes["tensor"] > 1 or spec.role == "embedding":
                kind = "replicated"  # with one tensor rank, whole and split matrices share a bucket
            counts[kind] += size
    return _PartCounts(**counts, copies=copies)
