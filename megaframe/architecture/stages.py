"""Stages: which blocks each stage of a pipeline runs, and how much it computes.

Layers are divided by work, not by number: the head over a large vocabulary can outweigh several
blocks, and may then be a stage of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from megaframe.architecture.block import BlockDescription
from megaframe.architecture.embedding import (
    EmbeddingDescription,
    HeadDescription,
    describe_embedding,
    describe_head,
)
from megaframe.architecture.frozen import is_frozen
from megaframe.architecture.model_blocks import describe_block, describe_norm
from megaframe.architecture.predictor import PredictorDescription, describe_predictor
from megaframe.architecture.spec import NO_PARAMETERS
from megaframe.config import ModelConfig, RunConfig, TrainConfig
from megaframe.schedule.costs import ActionCosts


@dataclass(frozen=True)
class StagePlan:
    """One of `stages`, counted from 0, and the blocks (layers) that it runs.

    The first stage also has the embedding, the last one the head.

    Attributes:
        recomputed: How many of its first blocks are recomputed in backward.
    """

    stage_index: int
    stages: int
    blocks: range
    recomputed: int = 0

    @property
    def first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.stage_index == 0

    @property
    def last(self) -> bool:
        """Whether the stage has the head."""
        return self.stage_index == self.stages - 1

    def __str__(self) -> str:
        parts = ["embedding"] * self.first
        if self.blocks:
            parts.append(f"blocks {self.blocks[0]}-{self.blocks[-1]}")
        return " + ".join(parts + ["head"] * self.last)


@dataclass(frozen=True)
class StageDescription:
    """What the parts of a stage are made of.

    Attributes:
        embedding: On the first stage, else None.
        blocks: In order.
        predictors: On the last stage, in order.
        head: On the last stage, else None. It computes a loss for itself and for each predictor.
    """

    embedding: EmbeddingDescription | None
    blocks: tuple[BlockDescription, ...]
    predictors: tuple[PredictorDescription, ...]
    head: HeadDescription | None

    @property
    def layers(self) -> list[BlockDescription | PredictorDescription]:
        """The blocks and the predictors."""
        return [*self.blocks, *self.predictors]

    @property
    def losses(self) -> int:
        """How many losses its head computes."""
        return 0 if self.head is None else 1 + self.head.depths


def describe_stage(model: ModelConfig, train: TrainConfig, plan: StagePlan) -> StageDescription:
    """Return what a stage is made of, unless its blocks are emulated."""
    depths = range(model.mtp_depth if plan.last else 0)
    return StageDescription(
        describe_embedding(model, train.seq) if plan.first else None,
        tuple(describe_block(model, layer) for layer in plan.blocks),
        tuple(describe_predictor(model, index) for index in depths),
        describe_head(model, describe_norm(model)) if plan.last else None,
    )


def plan_stages(config: RunConfig) -> tuple[StagePlan, ...]:
    """Return all stages of the pipeline in order, divided as `parallel.layers_per_stage` says, or
    by work if it has no numbers."""
    stages = config.parallel.pipeline * config.parallel.chunks
    layers = config.parallel.layers_per_stage
    if not isinstance(layers, tuple):  # what is measured is not known before the run
        works = compute_part_works(config.model, config.train, config.frozen_patterns)
        layers = works.divide(stages, recompute=config.train.recompute == "full")
    plans, start = [], 0
    for stage_index, count in enumerate(layers):
        blocks = range(start, start + count)
        recomputed_first = _get_value_for_stage(config.train.recompute_blocks, stage_index)
        recomputed = count if config.train.recompute == "full" else min(count, recomputed_first)
        plans.append(StagePlan(stage_index, stages, blocks, recomputed))
        start += count
    assert start == config.model.layers, "every layer is on one stage"
    return tuple(plans)


@cache
def divide_blocks(
    blocks: tuple[float, ...], head: float, stages: int, embedding: float = 0.0
) -> tuple[int, ...]:
    """Return how many consecutive blocks each stage gets.

    The largest work of a stage is minimal, and among such divisions this is the most even one
    (least sum of squares).

    Args:
        blocks: The work of each block.
        head: The work of the head, which is on the last stage.
        stages: Number of stages.
        embedding: The work of the embedding, which is on the first stage.
    """
    ends = [0.0]
    for work in blocks:
        ends.append(ends[-1] + work)
    limit = _find_minimal_maximum(ends, head, stages, embedding)
    # squares[n]: the least sum of squares over the stages so far, which have the first n blocks.
    squares = [0.0] + [math.inf] * len(blocks)
    # starts[stage][end]: where the stage starts in the best division that ends before block `end`.
    starts: list[list[int]] = []
    for stage in range(stages):
        extra = head * (stage == stages - 1) + embedding * (stage == 0)
        choices = [
            min(
                (
                    (squares[start] + (ends[end] - ends[start] + extra) ** 2, start)
                    for start in range(end + 1)
                    if ends[end] - ends[start] + extra <= limit
                ),
                default=(math.inf, end),
            )
            for end in range(len(ends))
        ]
        squares = [value for value, _ in choices]
        starts.append([start for _, start in choices])
    counts, end = [], len(blocks)
    for start in reversed(starts):
        counts.append(end - start[end])
        end = start[end]
    return tuple(reversed(counts))


def compute_stage_costs(
    model: ModelConfig,
    train: TrainConfig,
    plans: Sequence[StagePlan],
    frozen: tuple[str, ...] = (),
) -> ActionCosts:
    """Return the modelled work of F, B and W of every stage, in FLOPs per token.

    Only the ratios matter. frozen: as in `compute_part_works`.
    """
    return compute_part_works(model, train, frozen).sum_by_stage(plans)


@dataclass(frozen=True)
class PassWork:
    """Work of F, B and W of a part: FLOPs per token; seconds per microbatch with `model.emulate`,
    or if it is measured."""

    forward: float
    backward: float
    weight: float

    @property
    def total(self) -> float:
        """Work of all three."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class PartWorks:
    """Work of the parts that stages consist of.

    Attributes:
        embedding: Before the first block.
        blocks: In order, without what is computed again.
        output: After the last block: predictors and head.
    """

    embedding: PassWork
    blocks: tuple[PassWork, ...]
    output: PassWork

    def divide(self, stages: int, *, recompute: bool) -> tuple[int, ...]:
        """Return how many blocks each stage gets, as `divide_blocks` does. recompute: all blocks
        are computed again in backward passes."""
        blocks = tuple(block.total + recompute * block.forward for block in self.blocks)
        return divide_blocks(blocks, self.output.total, stages, self.embedding.total)

    def sum_by_stage(self, plans: Sequence[StagePlan]) -> ActionCosts:
        """Return the work of F, B and W of every stage."""
        parts = [
            [self.embedding] * plan.first
            + [self.blocks[layer] for layer in plan.blocks]
            + [self.output] * plan.last
            for plan in plans
        ]
        again = [
            sum(self.blocks[layer].forward for layer in plan.blocks[: plan.recomputed])
            for plan in plans
        ]
        return ActionCosts(
            forward=tuple(sum(part.forward for part in stage) for stage in parts),
            backward=tuple(
                sum(part.backward for part in stage) + recomputed
                for stage, recomputed in zip(parts, again, strict=True)
            ),
            weight=tuple(sum(part.weight for part in stage) for stage in parts),
        )


def compute_part_works(
    model: ModelConfig, train: TrainConfig, frozen: tuple[str, ...] = ()
) -> PartWorks:
    """Return the modelled work of all parts of a model. A look-up has no products; what makes the
    inputs of layers has.

    Args:
        model: The section `model`.
        train: The section `train`.
        frozen: Patterns of the names of parameters that have no gradients.
    """
    blocks = (compute_block_work(model, train, layer, frozen) for layer in range(model.layers))
    output = compute_output_work(model, train, frozen)
    return PartWorks(_compute_embedding_work(model, train, frozen), tuple(blocks), output)


def _compute_embedding_work(
    model: ModelConfig, train: TrainConfig, frozen: tuple[str, ...]
) -> PassWork:
    linears = describe_embedding(model, train.seq).linears
    work = 0.0 if model.emulate is not None else 2.0 * sum(linear.elements for linear in linears)
    is_trained = not is_frozen(frozen, "embedding.layer_projection.weight")
    return PassWork(work, work, work * is_trained)


def compute_block_work(
    model: ModelConfig, train: TrainConfig, layer: int, frozen: tuple[str, ...] = ()
) -> PassWork:
    """Return the work of the block of a layer; frozen: as in `compute_part_works`.

    Attention counts the keys that it sees on average, and has no weight gradient.
    """
    emulated = model.emulate
    if emulated is not None:
        return PassWork(emulated.forward, emulated.backward, emulated.weight)
    block = describe_block(model, layer)
    matrices, keys = 2.0 * block.matrix_elements, block.count_attention_flops(train.seq)
    trained = compute_trained_share(model, frozen, layer)
    gradients = block.count_attention_flops(train.seq, backward=True)
    return PassWork(matrices + keys, matrices + gradients, matrices * trained)


@lru_cache(maxsize=4096)
def compute_trained_share(model: ModelConfig, frozen: tuple[str, ...], layer: int) -> float:
    """Return the share of the elements of a layer's matrices that is not frozen.

    Args:
        model: The section.
        frozen: `RunConfig.frozen_patterns`.
        layer: The layer's number.
    """
    if not frozen or model.emulate is not None:
        return 1.0
    parameters = describe_block(model, layer).declare_parameters(f"blocks.{layer}")
    vectors = "gain", "bias", *NO_PARAMETERS
    matrices = [spec for spec in parameters if spec.role not in vectors]
    trained = sum(spec.size for spec in matrices if not is_frozen(frozen, spec.name))
    every = sum(spec.size for spec in matrices)
    return trained / every if every else 1.0


def compute_output_work(
    model: ModelConfig, train: TrainConfig, frozen: tuple[str, ...] = ()
) -> PassWork:
    """Return the work after the last block; frozen: as in `compute_part_works`.

    The head computes its gradients in the forward pass, so all of its work counts as forward. Each
    predictor adds the head once more, a matrix and a block.
    """
    weight_name = "embedding.tokens.weight" if model.tie_embeddings else "head.weight"
    head = (2 if is_frozen(frozen, weight_name) else 3) * _compute_head_flops(model)
    forward, backward, weight = head, 0.0, 0.0
    for depth in range(model.mtp_depth):
        join = 2.0 * describe_predictor(model, depth).join.elements
        joins = not is_frozen(frozen, f"predictors.{depth}.join.weight")
        block = compute_block_work(model, train, model.layers + depth, frozen)
        recomputed = block.forward + join if train.recompute == "full" else 0.0
        forward += head + block.forward + join
        backward += block.backward + join + recomputed
        weight += block.weight + join * joins
    return PassWork(forward, backward, weight)


def _compute_head_flops(model: ModelConfig) -> float:
    """Return the forward FLOPs per token of the head; 0 with emulated blocks."""
    if model.emulate is not None:
        return 0.0
    head = describe_head(model, describe_norm(model))
    return 2.0 * sum(linear.elements for linear in head.linears)


def _find_minimal_maximum(
    ends: Sequence[float], head: float, stages: int, embedding: float
) -> float:
    """Return the smallest possible maximum work of a stage, by bisection over all spans of
    blocks."""
    spans = {end - start for i, end in enumerate(ends) for start in ends[: i + 1]}
    first = {end + embedding for end in ends}
    last = {ends[-1] - start + head for start in ends}
    candidates = sorted(spans | first | last | {ends[-1] + embedding + head})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _is_enough(ends, head, stages, embedding, candidates[middle]):
            high = middle
        else:
            low = middle + 1
    return candidates[low]


def _is_enough(
    ends: Sequence[float], head: float, stages: int, embedding: float, limit: float
) -> bool:
    """Return whether stages of at most `limit` work suffice; they are filled from the last one."""
    free_work, end = limit - head, len(ends) - 1
    for stage in reversed(range(stages)):
        free_work -= embedding * (stage == 0)
        if free_work < 0:
            return False
        start = end
        while start and ends[end] - ends[start - 1] <= free_work:
            start -= 1
        free_work, end = limit, start
    return end == 0


def _get_value_for_stage(value: int | tuple[int, ...] | Literal["auto"], stage: int) -> int:
    """Return the number for a stage; "auto", which the planner has not resolved yet, counts as
    0."""
    if value == "auto":
        return 0
    return value if isinstance(value, int) else value[stage]
