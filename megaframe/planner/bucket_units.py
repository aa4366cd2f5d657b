"""The units of a rank with their buckets, as the simulation of ZeRO's buffers takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megaframe.architecture.buckets import BucketBlocks
from megaframe.architecture.stages import StagePlan
from megaframe.config.model import ModelConfig
from megaframe.planner.parameter_counts import RankParameters, sum_parts
from megaframe.schedule.zero_buffers import BucketSize, StageBuckets, UnitBuckets


def make_units(
    parameters: RankParameters,
    model: ModelConfig,
    plans: Sequence[StagePlan],
    groups: Sequence[BucketBlocks],
) -> dict[int, StageBuckets]:
    """Return the units of each stage, by its number, with their buckets.

    Args:
        parameters: The rank's parameters.
        model: Says whether embeddings are tied.
        plans: The stages of this rank.
        groups: The blocks that share buckets (`group_blocks`).
    """
    parts = parameters.parts

    def make_block(number: int) -> UnitBuckets:
        first_half, second_half = (_make_buckets(n, parts[n]) for n in (number, number + 1))
        return UnitBuckets(second_half, first_half)

    blocks: list[UnitBuckets] = []
    for group in groups:
        number = 2 * group.start
        if group.halves:
            blocks.append(make_block(number))
            continue
        shared_buckets = _make_buckets(number, sum_parts(parts[number : 2 * group.stop]))
        blocks += [
            UnitBuckets(first_half=shared_buckets, ends=block == group.start)
            for block in range(group.start, group.stop)
        ]
    blocks += map(make_block, range(2 * len(blocks), len(parts), 2))
    tables = _make_buckets(-1, parameters.tables)
    tokens, tied = tables[:1], model.tie_embeddings
    first = any(plan.first for plan in plans)
    layers = sum(len(plan.blocks) for plan in plans)
    # The first user of the token table reduces it: the embedding, a predictor, or a tied head.
    predictors = [replace(unit, tables=tokens) for unit in blocks[layers:]]
    if predictors and not first:
        predictors[0] = replace(predictors[0], own_tables=tokens)
    head_tables = tokens if tied else tables[-1:]
    head = UnitBuckets(
        tables=head_tables, own_tables=() if tied and (first or predictors) else head_tables
    )
    own = 1 + (first and model.layer_embeddings is not None)
    embeddings = tables[:own] + _make_buckets(-2, [parameters.positions])
    embedding = UnitBuckets(tables=embeddings, own_tables=embeddings)
    stages, start = {}, 0
    for plan in plans:
        stop = start + len(plan.blocks)
        units, start = (*blocks[start:stop], *(predictors if plan.last else ())), stop
        stages[plan.stage_index] = StageBuckets(
            embedding if plan.first else None,
            units,
            head if plan.last else None,
            plan.first and model.layer_embeddings is not None,
        )
    return stages


def select_trained(
    stages: Mapping[int, StageBuckets], trained: RankParameters, groups: Sequence[BucketBlocks]
) -> dict[int, StageBuckets]:
    """Return the units with only those buckets, and their elements, that are not frozen.

    Args:
        stages: The units of all parameters, by stage.
        trained: The parameters that are not frozen.
        groups: The blocks that share buckets.
    """
    sizes = _list_bucket_sizes(trained, groups)

    def select(buckets: tuple[BucketSize, ...]) -> tuple[BucketSize, ...]:
        counted = (bucket._replace(size=sizes.get(bucket.name, 0)) for bucket in buckets)
        pairs = zip(buckets, counted, strict=True)
        return tuple(trained for bucket, trained in pairs if trained.size or not bucket.size)

    def select_of_unit(unit: UnitBuckets) -> UnitBuckets:
        return UnitBuckets(
            select(unit.second_half),
            select(unit.first_half),
            select(unit.tables),
            select(unit.own_tables),
            unit.ends,
        )

    return {
        number: StageBuckets(
            None if stage.embedding is None else select_of_unit(stage.embedding),
            tuple(map(select_of_unit, stage.blocks)),
            None if stage.head is None else select_of_unit(stage.head),
            stage.embedding_multiplies,
        )
        for number, stage in stages.items()
    }


def count_gathered_codes(coded: RankParameters, groups: Sequence[BucketBlocks]) -> int:
    """Return the elements of the buffers into which codes are gathered (ZeRO 3). Those of a block
    are given back when its values are made; of a second half that is while those of the next block
    arrive.

    Args:
        coded: Parameters that are kept as codes, and divided.
        groups: The blocks that share buckets.
    """
    sizes = _list_bucket_sizes(coded, groups)
    late = {2 * group.start + 1 for group in groups if group.halves}
    buffers = {size: 1 + (number in late) for (number, _), size in sizes.items()}
    return sum(size * count for size, count in buffers.items())


def _list_bucket_sizes(
    parameters: RankParameters, groups: Sequence[BucketBlocks]
) -> dict[tuple[int, int], int]:
    """Return the elements of each bucket of matrices, by the names of `make_units`."""
    parts = {number: sizes for number, sizes in enumerate(parameters.parts)}
    for group in groups:
        if not group.halves:
            numbers = range(2 * group.start, 2 * group.stop)
            parts[numbers[0]] = sum_parts([parts.pop(number) for number in numbers])
    parts |= {-1: parameters.tables, -2: (parameters.positions,)}
    return {
        (number, kind): size for number, sizes in parts.items() for kind, size in enumerate(sizes)
    }


def _make_buckets(part: int, sizes: Sequence[int]) -> tuple[BucketSize, ...]:
    """Return the buckets of part number `part` of a rank; sizes: its elements of each kind. What no
    other rank has a part of is one that needs no buffer: its gradients are in the order of
    reductions, too, which decides when the buffers of others are free."""
    buckets = tuple(BucketSize((part, kind), size) for kind, size in enumerate(sizes) if size)
    return buckets or (BucketSize((part, 0), 0),)
