"""Moved: bytes that a rank hands to collectives and links in a step, by axis, in closed form.

Reductions of a few numbers (norms, losses, counts) are left out; they are a millionth of the rest.
Gradients and values count without the padding of buckets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from megaframe.architecture.adapted_weights import list_coded_patterns
from megaframe.architecture.cross_layer_tensors import count_message_elements
from megaframe.architecture.moe import count_near_experts
from megaframe.architecture.quantised import compute_bits_per_element
from megaframe.architecture.stages import StagePlan, describe_stage
from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.config.schema import RunConfig, TrainConfig
from megaframe.config.sync import SyncConfig
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.layout import Layout
from megaframe.planner.island_times import compute_sync_bytes_per_element, count_sent_messages
from megaframe.planner.parameter_counts import RankParameters, count_rank_parameters
from megaframe.schedule import Action, ActionKind

_SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)


def compute_communication_bytes(
    config: RunConfig, layout: Layout, plans: Sequence[StagePlan], actions: Sequence[Action]
) -> Mapping[str, float]:
    """Return the bytes over `tensor`, `context`, `data`, `pipeline`, `expert` and `expert_tensor`,
    and over `islands` if there are several, of a rank with these stages and lowered actions. Over
    context and expert axes it is the mean of their ranks, with equally loaded experts.

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
    microbatches = len({a.microbatch for a in actions if a.microbatch is not None})
    messages = _count_message_elements(config.model, tensor, width, plans, actions)
    share = (tensor - 1) / tensor
    trained = count_rank_parameters(config.model, train, layout, plans, config.frozen_patterns)
    weight_passes = Counter(action.stage for action in actions if action.kind is ActionKind.W)
    rows = sum(
        microbatches * _count_tensor_elements_of_stage(config.model, config.train, plan)
        + weight_passes[plan.stage_index]
        * _count_tensor_elements_of_weight_pass(config.model, config.train, plan)
        for plan in plans
    )
    by_stage = [
        _count_bytes_of_layers(config.model, config.parallel, config.train, layout, plan)
        for plan in plans
    ]
    # An all-reduce moves everything twice.
    statistics = (
        2
        * microbatches
        * sum(_count_tensor_statistics(config.model, config.train, tensor, plan) for plan in plans)
    )
    gathered = microbatches * sum(
        _count_gathered_bytes(config.model, config.train, plan) for plan in plans
    )
    return {
        "tensor": share * tokens * (rows * width + statistics * max(4, width) + gathered),
        **{
            axis: microbatches * sum(moved[axis] for moved in by_stage)
            for axis in ("context", "expert", "expert_tensor")
        },
        "pipeline": messages * tokens * width / tensor,
        "data": _compute_data_bytes(config, layout, plans, trained, microbatches),
        **(
            {"islands": _compute_island_bytes(config.sync, train.precision, layout, trained)}
            if config.trains_in_islands
            else {}
        ),
    }


def _count_message_elements(
    model: ModelConfig,
    tensor: int,
    width: int,
    plans: Sequence[StagePlan],
    actions: Sequence[Action],
) -> int:
    """Return the elements per token, summed over tensor ranks, of all messages that are sent."""
    blocks, total = {plan.stage_index: plan.blocks for plan in plans}, 0
    for action in actions:
        if action.kind in _SENDS and action.stage is not None:
            own, backward = blocks[action.stage], action.kind is not ActionKind.SEND_F
            start = own.start if backward else own.stop
            total += count_message_elements(model, start, tensor, width, backward=backward)
    return total


def _count_tensor_elements_of_stage(
    model: ModelConfig, train: TrainConfig, plan: StagePlan
) -> float:
    """Return the elements per token that a stage moves over tensor ranks, for one microbatch.
    Recomputed blocks repeat the transfers of forward."""
    stage = describe_stage(model, train, plan)
    traffic = [part.tensor_traffic for part in stage.layers]
    if stage.embedding is not None:
        traffic.append(stage.embedding.tensor_traffic)
    if stage.head is not None:
        traffic += [stage.head.tensor_traffic] * stage.losses
    recomputed = sum(block.tensor_traffic.forward for block in stage.blocks[: plan.recomputed])
    return sum(moved.forward + moved.backward for moved in traffic) + recomputed


def _count_tensor_statistics(
    model: ModelConfig, train: TrainConfig, tensor: int, plan: StagePlan
) -> int:
    """Return the elements per token that a stage sums over tensor ranks in both passes of a
    microbatch, and again in recomputed blocks."""
    layers = describe_stage(model, train, plan).layers
    statistics = [part.count_tensor_statistics(tensor) for part in layers]
    return 2 * sum(statistics) + sum(statistics[: plan.recomputed])


def _count_gathered_bytes(model: ModelConfig, train: TrainConfig, plan: StagePlan) -> int:
    """Return the bytes per token that a stage gathers over tensor ranks beside elements in the
    precision of the model, for one microbatch, and again in recomputed blocks."""
    width, layers = DTYPE_BYTES[train.precision], describe_stage(model, train, plan).layers
    gathered = [part.count_gathered_bytes(train.seq, width) for part in layers]
    return sum(gathered) + sum(gathered[: plan.recomputed])


def _count_bytes_of_layers(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    layout: Layout,
    plan: StagePlan,
) -> Mapping[str, float]:
    """Return the bytes that a rank sends over other axes than `tensor` for one microbatch of a
    stage, by axis. Recomputed blocks repeat those of forward."""
    width = DTYPE_BYTES[train.precision]
    tokens = train.microbatch * train.seq / (layout.tensor * layout.context)
    near = count_near_experts(parallel, parallel.node_size or layout.world)
    sent: dict[str, float] = defaultdict(float)
    stage = describe_stage(model, train, plan)
    for number, part in enumerate(stage.layers):
        passes = 1 + (number < plan.recomputed)
        for axis, traffic in part.count_traffic(parallel, train.seq, near).items():
            forward = tokens * traffic.count_forward_bytes(width) + traffic.count_bytes
            sent[axis] += passes * forward + tokens * traffic.count_backward_bytes(width)
    return sent


def _count_tensor_elements_of_weight_pass(
    model: ModelConfig, train: TrainConfig, plan: StagePlan
) -> int:
    """Return the elements per token that a separate weight pass gathers again."""
    stage = describe_stage(model, train, plan)
    return sum(part.tensor_traffic.weight for part in stage.layers)


def _compute_data_bytes(
    config: RunConfig,
    layout: Layout,
    plans: Sequence[StagePlan],
    trained: RankParameters,
    microbatches: int,
) -> float:
    """Return the bytes of gradients, reduced in master precision or `parallel.reduce_precision`,
    and of gathered values."""
    ranks, zero = layout.data_shard * layout.context, config.parallel.zero
    width = DTYPE_BYTES[config.train.precision]
    wire = 2 if config.parallel.reduce_precision == "bf16" else max(4, width)
    parameters = trained  # weights that do not change stay where they are
    if zero == 3:
        parameters = count_rank_parameters(config.model, config.train, layout, plans)
    # Left out: what tensor ranks have whole is also reduced over them, so not over `data` alone.
    vectors, reduced = trained.vectors, _count_divided(trained)
    gathered = float(_count_divided(parameters) * width)
    adapters = config.model.adapters
    if zero == 3 and adapters is not None and adapters.quantize_base is not None:
        coded = list_coded_patterns(config.model)
        plain = count_rank_parameters(config.model, config.train, layout, plans, coded)
        saved = width - float(compute_bits_per_element(adapters.quantize_base)) / 8
        gathered -= _count_divided(parameters.subtract(plain)) * saved
    share = (ranks - 1) / ranks
    if zero == 0:
        return 2 * wire * (vectors + reduced) * share
    scatters = microbatches if zero >= 2 else 1
    gathers = 2 * microbatches if zero == 3 else 1
    matrices = reduced * scatters * wire + gathered * gathers
    return share * (matrices + vectors * (wire + width))


def _compute_island_bytes(
    sync: SyncConfig, precision: str, layout: Layout, trained: RankParameters
) -> float:
    """Return the bytes to other islands, or to a server, in the mean step. Gains and biases are
    sent as they are."""
    ranks, width = layout.data_shard * layout.context, max(4, DTYPE_BYTES[precision])
    own = trained.count_shard(ranks, layout.expert_shard)
    vectors = trained.vectors / ranks
    matrices = compute_sync_bytes_per_element(sync, precision) * (own - vectors)
    return count_sent_messages(sync, layout.islands) * (matrices + width * vectors) / sync.every


def _count_divided(parameters: RankParameters) -> int:
    """Return the elements of matrices that are exchanged over `data` alone."""
    replicated = sum(parameters.replicated) + parameters.positions * (parameters.tensor > 1)
    return parameters.dense - parameters.vectors - replicated
