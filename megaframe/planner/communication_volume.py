"""Moved: bytes that a rank hands to collectives and links in a step, by axis, in closed form.

Reductions of a few numbers (norms, losses, counts) are left out; they are a millionth of the rest.
Gradients and values count without the padding of buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from megaframe.architecture.block import describe_block
from megaframe.architecture.stages import StagePlan, list_stage_layers
from megaframe.config.schema import RunConfig
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.layout import Layout
from megaframe.planner.parameter_counts import count_parameters
from megaframe.schedule import Action, ActionKind

_SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)


def compute_communication_bytes(
    config: RunConfig, layout: Layout, plans: Sequence[StagePlan], actions: Sequence[Action]
) -> Mapping[str, float]:
    """Return the bytes over `tensor`, `context`, `data` and `pipeline` of a rank with these stages
    and lowered actions. Over `context` it is the mean of the ranks of a ring.

    "data" has the gradients and values of dense parameters, over data and context ranks. At ZeRO 3
    it counts every value in every pass; in fact blocks whose values are still present are not
    fetched again.

    Args:
        config: Model, precision and microbatch.
        layout: The sizes of the axes.
        plans: The stages of the rank.
        actions: The lowered actions of the rank in one step.
    """
    train, tensor = config.train, layout.tensor
    width = DTYPE_BYTES[train.precision]
    tokens = train.microbatch * train.seq / layout.context
    stream = tokens * config.model.hidden * width
    microbatches = len({a.microbatch for a in actions if a.microbatch is not None})
    messages = sum(action.kind in _SENDS for action in actions)
    share = (tensor - 1) / tensor
    weight_passes = Counter(action.stage for action in actions if action.kind is ActionKind.W)
    rows = sum(
        microbatches * _count_tensor_elements_of_stage(config, plan)
        + weight_passes[plan.number] * _count_tensor_elements_of_weight_pass(config, plan)
        for plan in plans
    )
    # An all-reduce moves everything twice.
    statistics = 2 * microbatches * sum(_count_tensor_statistics(config, plan) for plan in plans)
    return {
        "tensor": share * tokens * (rows * width + statistics * max(4, width)),
        "context": microbatches * sum(_count_context_bytes(config, layout, plan) for plan in plans),
        "pipeline": messages * stream / tensor,
        "data": _compute_data_bytes(config, layout, plans, microbatches),
    }


def _count_tensor_elements_of_stage(config: RunConfig, plan: StagePlan) -> float:
    """Return the elements per token that a stage moves over tensor ranks, for one microbatch.

    Recomputed blocks repeat the transfers of forward. The embedding and the head move the stream
    twice each, and so do those of each predictor.
    """
    model = config.model
    traffic = [
        describe_block(model, layer).tensor_traffic for layer in list_stage_layers(model, plan)
    ]
    blocks = sum(block.forward + block.backward for block in traffic)
    recomputed = sum(block.forward for block in traffic[: plan.recomputed])
    depth = model.mtp_depth * plan.last
    ends = 2 * model.hidden * (plan.first + plan.last + 2 * depth)
    return blocks + recomputed + ends


def _count_tensor_statistics(config: RunConfig, plan: StagePlan) -> int:
    """Return the elements per token that a stage sums over tensor ranks in both passes of a
    microbatch, and again in recomputed blocks."""
    layers = list_stage_layers(config.model, plan)
    statistics = [describe_block(config.model, layer).tensor_statistics for layer in layers]
    return 2 * sum(statistics) + sum(statistics[: plan.recomputed])


def _count_context_bytes(config: RunConfig, layout: Layout, plan: StagePlan) -> float:
    """Return the bytes that a rank sends over the context axis for one microbatch of a stage.
    Recomputed blocks repeat those of forward."""
    train, width = config.train, DTYPE_BYTES[config.train.precision]
    sent = 0.0
    for number, layer in enumerate(list_stage_layers(config.model, plan)):
        mixer = describe_block(config.model, layer).mixer
        forward, backward = mixer.count_context_bytes(config.parallel, width, train.seq)
        sent += forward * (1 + (number < plan.recomputed)) + backward
    return train.microbatch * sent / (layout.tensor * layout.context)


def _count_tensor_elements_of_weight_pass(config: RunConfig, plan: StagePlan) -> int:
    """Return the elements per token that a separate weight pass gathers again."""
    layers = list_stage_layers(config.model, plan)
    return sum(describe_block(config.model, layer).tensor_traffic.weight for layer in layers)


def _compute_data_bytes(
    config: RunConfig, layout: Layout, plans: Sequence[StagePlan], microbatches: int
) -> float:
    """Return the bytes of gradients, reduced in master precision or `parallel.reduce_precision`,
    and of gathered values."""
    ranks, zero = layout.data_shard * layout.context, config.parallel.zero
    width = DTYPE_BYTES[config.train.precision]
    wire = 2 if config.parallel.reduce_precision == "bf16" else max(4, width)
    parameters = count_parameters(config, layout, plans)
    # Left out: what tensor ranks have whole is also reduced over them, so not over `data` alone.
    replicated = sum(parameters.replicated) + parameters.positions * (layout.tensor > 1)
    vectors, sharded = parameters.vectors, parameters.dense - parameters.vectors - replicated
    share = (ranks - 1) / ranks
    if zero == 0:
        return 2 * wire * (vectors + sharded) * share
    scatters = microbatches if zero >= 2 else 1
    gathers = 2 * microbatches if zero == 3 else 1
    return share * (sharded * (scatters * wire + gathers * width) + vectors * (wire + width))
