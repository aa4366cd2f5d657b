"""Parameters of one rank, counted from the config alone, and the buckets that they are in.

The counts repeat in integers what the layers declare in their specs; a test compares the two. They
are those of the first rank of the tensor and expert axes, which has the larger part of whatever
does not divide evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megaframe.architecture.attention import head_widths, latent_width
from megaframe.architecture.buckets import BucketBlocks, group_blocks_into_buckets
from megaframe.architecture.experts import has_experts
from megaframe.architecture.stages import StagePlan, predictor_projection_elements
from megaframe.config.model import ModelConfig
from megaframe.config.schema import RunConfig
from megaframe.layout import Layout
from megaframe.schedule.zero_buffers import BucketSize, StageBuckets, UnitBuckets


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters of one rank, before ZeRO divides them.

    `split`, `experts`, `whole` and `shared` have an entry for each part of a block: attention, and
    the late part after it.

    Attributes:
        vectors: all gains and biases.
        split: the matrices that tensor ranks divide.
        tables: each embedding table, and the head.
        experts: the matrices of experts, 0 where there are none.
        whole: the matrices that all tensor ranks have whole.
        shared: the matrices that groups of neighbouring tensor ranks have in common.
        positions: the table of positions, which is whole on all tensor ranks as well.
        tensor: number of tensor ranks.
        copies: tensor ranks of a group that has `shared` matrices in common.
    """

    vectors: int
    split: tuple[int, ...]
    tables: tuple[int, ...]
    experts: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    positions: int = 0
    tensor: int = 1
    copies: int = 1

    @property
    def dense(self) -> int:
        """Number of parameters outside the experts."""
        matrices = (*self.split, *self.tables, *self.whole, *self.shared)
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
            + -(-(sum(self.whole) + self.positions) // (ranks * self.tensor))
            + -(-sum(self.shared) // (ranks * self.copies))
            + -(-sum(self.experts) // expert_ranks)
        )

    def largest_bucket_shard(self, ranks: int, expert_ranks: int) -> int:
        """Return the largest size of a rank's own part of one bucket; arguments as in
        `count_shard`."""
        tables = (*self.tables, self.positions)
        dense = max(self.vectors, *self.split, *tables, *self.whole, *self.shared)
        return max(-(-dense // ranks), -(-max(self.experts, default=0) // expert_ranks))

    @property
    def _parts(self) -> list[tuple[int, ...]]:
        """The elements of each kind of matrices, for each part of a block."""
        return [*zip(self.split, self.experts, self.whole, self.shared, strict=True)]

    def group_blocks(self, config: RunConfig, plans: Sequence[StagePlan]) -> list[BucketBlocks]:
        """Return which of the rank's blocks, counted over its stages, share buckets."""
        halves = [sum(sizes) for sizes in self._parts]
        sizes = [*zip(halves[1::2], halves[::2], strict=True)]
        least, start, groups = config.parallel.bucket_size, 0, []
        for plan in plans:
            stage_sizes = sizes[start : start + len(plan.blocks)]
            for group in group_blocks_into_buckets(stage_sizes, 1 if least == "auto" else least):
                groups.append(BucketBlocks(start + group.start, start + group.stop, group.halves))
            start += len(plan.blocks)
        return groups

    @property
    def elements_per_block(self) -> list[int]:
        """The elements of the matrices of each block."""
        halves = [sum(sizes) for sizes in self._parts]
        return [rest + late for rest, late in zip(halves[::2], halves[1::2], strict=True)]

    def merge_into_buckets(self, config: RunConfig, plans: Sequence[StagePlan]) -> RankParameters:
        """Return the same parameters with an entry for each bucket instead of each part of a block.
        plans: the stages of this rank."""
        parts, merged, stop = self._parts, [], 0
        for group in self.group_blocks(config, plans):
            stop = 2 * group.stop
            group_parts = parts[2 * group.start : stop]
            merged += group_parts if group.halves else [_sum_parts(group_parts)]
        split, experts, whole, shared = (
            zip(*merged, *parts[stop:], strict=True) if parts else ((),) * 4
        )
        return replace(self, split=split, experts=experts, whole=whole, shared=shared)

    def make_units(self, config: RunConfig, plans: Sequence[StagePlan]) -> dict[int, StageBuckets]:
        """Return the units of each stage with their buckets. plans: the stages of this rank."""
        parts = self._parts
        blocks: list[UnitBuckets] = []
        for group in self.group_blocks(config, plans):
            number = 2 * group.start
            if group.halves:
                late, rest = (
                    _make_buckets(number + 1, parts[number + 1]),
                    _make_buckets(number, parts[number]),
                )
                blocks.append(UnitBuckets(late, rest))
                continue
            shared_buckets = _make_buckets(number, _sum_parts(parts[number : 2 * group.stop]))
            blocks += [
                UnitBuckets(rest=shared_buckets, ends=block == group.start)
                for block in range(group.start, group.stop)
            ]
        for number in range(2 * len(blocks), len(parts), 2):
            late, rest = (
                _make_buckets(number + 1, parts[number + 1]),
                _make_buckets(number, parts[number]),
            )
            blocks.append(UnitBuckets(late, rest))
        tables = _make_buckets(-1, self.tables)
        tokens, tied = tables[:1], config.model.tie_embeddings
        first = any(plan.first for plan in plans)
        layers = sum(len(plan.blocks) for plan in plans)
        # The first user of the token table reduces it: the embedding, a predictor, or a tied head.
        predictors = [replace(unit, tables=tokens) for unit in blocks[layers:]]
        if predictors and not first:
            predictors[0] = replace(predictors[0], own=tokens)
        head_tables = tokens if tied else tables[-1:]
        head = UnitBuckets(
            tables=head_tables, own=() if tied and (first or predictors) else head_tables
        )
        embeddings = tokens + _make_buckets(-2, [self.positions])
        embedding = UnitBuckets(tables=embeddings, own=embeddings)
        stages, start = {}, 0
        for plan in plans:
            stop = start + len(plan.blocks)
            units, start = (*blocks[start:stop], *(predictors if plan.last else ())), stop
            stages[plan.number] = StageBuckets(
                embedding if plan.first else None, units, head if plan.last else None
            )
        return stages


def _make_buckets(part: int, sizes: Sequence[int]) -> tuple[BucketSize, ...]:
    """Return the buckets of part number `part` of a rank; sizes: its elements of each kind."""
    return tuple(BucketSize((part, kind), size) for kind, size in enumerate(sizes) if size)


def _sum_parts(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the elements of each kind in all of these parts."""
    return tuple(map(sum, zip(*parts, strict=True)))


@dataclass
class _PartCounts:
    """Elements of a part of a block, by how they are divided; fields as in `RankParameters`."""

    vectors: int = 0
    split: int = 0
    whole: int = 0
    shared: int = 0
    experts: int = 0


def count_parameters(
    config: RunConfig, layout: Layout, plans: Sequence[StagePlan]
) -> RankParameters:
    """Return the parameters of a rank that has the stages of `plans`."""
    model = config.model
    if model.emulate is not None:
        counts = []
    else:
        layers = [layer for plan in plans for layer in plan.blocks]
        counts = [part for layer in layers for part in _count_block(model, layer, layout)]
    predictors: list[_PartCounts] = []
    tables: list[int] = []
    vectors = positions = 0
    first, last = any(plan.first for plan in plans), any(plan.last for plan in plans)
    table = largest_share(model.vocab or 0, layout.tensor) * model.hidden
    if first:
        tables.append(table)
        if model.position == "learned":
            positions = (model.positions or config.train.seq) * model.hidden
    if last:
        depths = range(model.mtp_depth)
        predictors = [part for index in depths for part in _count_predictor(model, index, layout)]
        vectors += (1 + model.mtp_depth) * _norm_elements(model)
        if not first and (model.tie_embeddings or model.mtp_depth):
            tables.append(table)
        if not model.tie_embeddings:
            tables.append(table)
    parts = [*counts, *predictors]
    if layout.tensor == 1:  # then whole and split matrices share a bucket
        for part in parts:
            part.split, part.whole = part.split + part.whole, 0
    copies = _num_copies(model.kv_heads, layout.tensor) if model.latent is None else 1
    return RankParameters(
        vectors + sum(part.vectors for part in parts),
        tuple(part.split for part in parts),
        tuple(tables),
        tuple(part.experts for part in parts),
        tuple(part.whole for part in parts),
        tuple(part.shared for part in parts),
        positions,
        layout.tensor,
        copies,
    )


def _count_block(model: ModelConfig, layer: int, layout: Layout) -> tuple[_PartCounts, _PartCounts]:
    """Return the counts of attention with the block's two norms, and of the late part."""
    attention, late = _PartCounts(vectors=2 * _norm_elements(model)), _PartCounts()
    (_count_attention if model.latent is None else _count_mla)(model, layout.tensor, attention)
    moe = model.moe
    if moe is None or not has_experts(moe, layer):
        _count_mlp(model, model.ffn, layout.tensor, late)
        return attention, late
    width = moe.ffn or model.ffn
    up = 2 if model.activation == "swiglu" else 1
    experts = largest_share(moe.experts, layout.expert)
    late.experts = experts * (up + 1) * model.hidden * largest_share(width, layout.expert_tensor)
    late.whole += moe.experts * model.hidden
    if moe.shared:
        _count_mlp(model, moe.shared * width, layout.tensor, late)
    return attention, late


def _count_attention(model: ModelConfig, tensor: int, counts: _PartCounts) -> None:
    groups = largest_share(model.kv_heads, tensor)
    width = groups * (model.heads // model.kv_heads + 2) * model.head_dim
    if _num_copies(model.kv_heads, tensor) > 1:
        counts.shared += width * model.hidden
    else:
        counts.split += width * model.hidden
    counts.split += model.hidden * largest_share(model.heads, tensor) * model.head_dim
    counts.vectors += width * model.qkv_bias + model.hidden * model.bias
    counts.vectors += 2 * model.head_dim * model.qk_norm


def _count_mla(model: ModelConfig, tensor: int, counts: _PartCounts) -> None:
    latent = model.latent
    assert latent is not None
    query, value = head_widths(model)
    heads = largest_share(model.heads, tensor)
    counts.whole += latent_width(latent) * model.hidden
    counts.split += heads * query * (latent.query_rank or model.hidden)
    counts.split += heads * (latent.head_dim + value) * latent.kv_rank
    counts.split += model.hidden * heads * value
    counts.vectors += latent.kv_rank + (latent.query_rank or 0) + model.hidden * model.bias


def _count_mlp(model: ModelConfig, width: int, tensor: int, counts: _PartCounts) -> None:
    up = 2 if model.activation == "swiglu" else 1
    inner = largest_share(width, tensor)
    counts.split += (up + 1) * model.hidden * inner
    counts.vectors += (up * inner + model.hidden) * model.bias


def _count_predictor(
    model: ModelConfig, index: int, layout: Layout
) -> tuple[_PartCounts, _PartCounts]:
    attention, late = _count_block(model, model.layers + index, layout)
    attention.whole += predictor_projection_elements(model)
    attention.vectors += 2 * _norm_elements(model)
    return attention, late


def _norm_elements(model: ModelConfig) -> int:
    return model.hidden * (1 + (model.bias and model.norm == "layernorm"))


def largest_share(total: int, parts: int) -> int:
    """Return how many of `total` things the first of `parts` ranks has."""
    return -(-total // (parts // _num_copies(total, parts)))


def _num_copies(total: int, parts: int) -> int:
    """Return how many neighbouring ranks have the same thing, as `spec.copies_of` does."""
    return parts // total if 0 < total < parts else 1
