"""Memory of one rank, by kind, computed before the run.

It is exact for what megaframe itself keeps. The interpreter, torch and the temporaries of single
operations come on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megaframe.architecture.block import describe_block
from megaframe.architecture.buckets import SUMMED_AT_ONCE
from megaframe.architecture.optimizer_state import (
    OFFLOAD_BUFFERS,
    OFFLOAD_CHUNK,
    compute_moment_bytes,
    compute_state_bytes,
    compute_update_bytes,
    count_moments,
    offload_bytes_per_element,
)
from megaframe.architecture.output_head import (
    FP32_PARTS,
    compute_loss_bytes_per_logit,
    count_rows_per_chunk,
    get_max_logits_per_chunk,
)
from megaframe.architecture.stages import StagePlan
from megaframe.config import ModelConfig, RunConfig, TrainConfig
from megaframe.config.optim import OptimConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.layout import Layout
from megaframe.planner.activations import compute_peak_activations
from megaframe.planner.bucket_units import make_units, select_trained
from megaframe.planner.parameter_counts import (
    RankParameters,
    count_rank_parameters,
)
from megaframe.schedule import Action, Schedule
from megaframe.schedule.zero_buffers import compute_peak_zero_buffers


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, by kind.

    Attributes:
        weights: In master precision.
        values: What the model computes with, where it is not the weights themselves.
        gradients: Including what compression has not sent yet.
        activations: What the backward passes of the microbatches in flight need.
        logits: One chunk.
        messages: In transit between stages.
        buffers: For arriving gradients on a CPU, and for offloaded data on its way through the
            device.
        checkpoint: The copy that is being written, where it is in the same memory.
        temporaries: Of single operations.
        overhead: What the device's software takes, and what its allocator cannot use.
        host: What is kept in host memory, where the device has its own.
    """

    weights: int
    values: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    messages: int = 0
    buffers: int = 0
    checkpoint: int = 0
    temporaries: int = 0
    overhead: int = 0
    host: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes on the device by kind, so without `host`."""
        return {kind: size for kind, size in asdict(self).items() if kind != "host"}

    @property
    def total(self) -> int:
        """Sum of all kinds on the device."""
        return sum(self.kinds.values())


def _count_buffer_elements(sizes: Sequence[int]) -> int:
    """Return the elements of the buffers that serve requests of these sizes in order, where two
    consecutive requests are active at a time and a buffer serves requests of its own size only."""
    windows = [sizes[i : i + 2] for i in range(max(1, len(sizes) - 1))]
    return sum(size * max(window.count(size) for window in windows) for size in set(sizes))


def compute_memory(
    config: RunConfig,
    parameters: RankParameters,
    ranks: int,
    plans: Sequence[StagePlan],
    actions: Sequence[Action],
    expert_ranks: int = 1,
    *,
    trained: RankParameters | None = None,
    host: bool = False,
) -> RankMemory:
    """Return the memory of one rank.

    Args:
        config: Model, precision, optimizer and layout.
        parameters: The rank's parameters.
        trained: Those of them that are not frozen; None for all.
        ranks: How many ranks share one copy of the dense parameters.
        plans: The stages that the rank runs.
        actions: Its list of actions, in order.
        expert_ranks: How many ranks share one copy of the experts.
        host: Whether the device is the host, where transfers need buffers and checkpoints are
            copied in the same memory.
    """
    width = DTYPE_BYTES[config.train.precision]
    master = max(4, width)
    zero = config.parallel.zero
    shard = parameters.count_shard(ranks, expert_ranks) if zero else parameters.total
    trained = trained or parameters
    # What a single rank has is never divided.
    divided = parameters.select_divided(ranks, expert_ranks)
    values, gradients = _count_values_and_gradients(
        config, parameters, divided, ranks, plans, actions, shard
    )
    if trained != parameters:
        gradients = _count_trained_gradients(
            config, parameters, trained, (ranks, expert_ranks), plans, actions
        )
    residual = _count_residual_elements(config.parallel, trained, ranks, expert_ranks)
    state = compute_optimizer_state_bytes(
        config.optim,
        trained.count_shard(ranks, expert_ranks) if zero else trained.total,
        trained.count_shard_outside_blocks(ranks) if zero else trained.outside_blocks,
        master,
    )
    is_offloaded = config.optim.offload and not host
    weights_offloaded = is_offloaded and width < master  # rounded values stay on the device
    if weights_offloaded and zero == 3:
        values += shard - (parameters.total - divided.total)
    # Context ranks divide the tokens; tensor ranks divide rows, heads and widths.
    activation_ranks = config.parallel.tensor * config.parallel.context
    activation_bytes, messages = compute_peak_activations(
        config.model, config.parallel, config.train, plans, actions
    )
    has_head = any(plan.last for plan in plans)
    logits, loss_tensors = (
        _compute_logit_bytes(config.model, config.parallel, config.train, host=host)
        if has_head
        else (0, 0)
    )
    update = _compute_update_bytes(config, trained, ranks, expert_ranks, plans)
    checkpoint = 0
    if host and config.checkpoint.every:
        checkpoint = residual * master
        checkpoint += parameters.count_shard(ranks, expert_ranks) * master
        checkpoint += _compute_saved_state_bytes(config.optim, trained, ranks, expert_ranks, master)
    tokens = config.train.microbatch * config.train.seq
    return RankMemory(
        weights=0 if weights_offloaded else shard * master,
        values=values * width,
        gradients=(gradients + residual + _count_kept_table(config, plans)) * master,
        optimizer=0 if is_offloaded else state,
        activations=activation_bytes // activation_ranks,
        logits=logits,
        messages=messages // activation_ranks,
        buffers=_compute_buffer_bytes(config, trained, ranks, expert_ranks, plans, host=host),
        checkpoint=checkpoint,
        temporaries=max(
            2 * tokens * compute_max_width_per_token(config.model) * width // activation_ranks,
            logits + loss_tensors,
            _count_summed_apart(config, parameters) * master,
            # Activations are gone when weights are updated.
            0 if host else update - activation_bytes // activation_ranks,
        ),
        host=(shard * master if weights_offloaded else 0) + (state if is_offloaded else 0),
    )


def _count_values_and_gradients(
    config: RunConfig,
    parameters: RankParameters,
    divided: RankParameters,
    ranks: int,
    plans: Sequence[StagePlan],
    actions: Sequence[Action],
    shard: int,
) -> tuple[int, int]:
    """Return the elements of values and of gradients, with what ZeRO borrows of other ranks.

    Args:
        config: The run.
        parameters: The rank's parameters.
        divided: Those of which other ranks have a part too.
        ranks: Those that share a copy.
        plans: The rank's stages.
        actions: Its actions.
        shard: Parameters in the rank's own part.
    """
    zero, width = config.parallel.zero, DTYPE_BYTES[config.train.precision]
    same_dtype = width >= 4
    values, gradients = parameters.total, parameters.total
    alone = parameters.total - divided.total
    if zero >= 2:
        borrowed_values, borrowed_gradients = compute_peak_zero_buffers(
            make_units(
                divided, config.model, plans, parameters.group_blocks(config.parallel, plans)
            ),
            actions,
            _count_transfers(config.parallel),
            values=zero == 3,
            same_dtype=same_dtype,
        )
        gradients = parameters.vectors + borrowed_gradients + shard - parameters.vectors // ranks
        values = parameters.vectors + alone + borrowed_values if zero == 3 else values
    # With one precision the own weights are part of the whole values; borrowed values are apart.
    if same_dtype:
        values -= alone + -(-parameters.vectors // ranks) if zero == 3 else shard
    return values, gradients


def _compute_update_bytes(
    config: RunConfig,
    trained: RankParameters,
    ranks: int,
    expert_ranks: int,
    plans: Sequence[StagePlan],
) -> int:
    """Return the bytes that an update takes for itself; arguments as in `compute_memory`."""
    zero, width = config.parallel.zero, DTYPE_BYTES[config.train.precision]
    bucketed = trained.merge_into_buckets(config.parallel, plans)
    shard_ranks = (ranks, expert_ranks) if zero else (1, 1)
    return compute_update_bytes(
        config.optim,
        width,
        bucketed.compute_largest_bucket_shard(*shard_ranks),
        max(map(sum, bucketed.parts), default=0),
        zero=zero,
        alone=ranks == 1,
    )


def _count_trained_gradients(
    config: RunConfig,
    parameters: RankParameters,
    trained: RankParameters,
    ranks: tuple[int, int],
    plans: Sequence[StagePlan],
    actions: Sequence[Action],
) -> int:
    """Return the elements of gradients where not all parameters are trained.

    Args:
        config: The run.
        parameters: The rank's parameters.
        trained: Those of them that are not frozen.
        ranks: Those that share a copy of the dense parameters, and of the experts.
        plans: The rank's stages.
        actions: Its actions.
    """
    if config.parallel.zero < 2:
        return trained.total
    groups = parameters.group_blocks(config.parallel, plans)
    units = make_units(parameters.select_divided(*ranks), config.model, plans, groups)
    _, borrowed = compute_peak_zero_buffers(
        select_trained(units, trained.select_divided(*ranks), groups),
        actions,
        _count_transfers(config.parallel),
        values=False,
    )
    vectors = trained.vectors - trained.vectors // ranks[0]
    return vectors + borrowed + trained.count_shard(*ranks)


def _count_kept_table(config: RunConfig, plans: Sequence[StagePlan]) -> int:
    """Return the elements of the gradient of a table that two pipeline ranks have, which each keeps
    until the end of a step whose noise is measured."""
    model, parallel = config.model, config.parallel
    is_shared = model.tie_embeddings or model.mtp_depth > 0
    has_one_end = any(plan.first for plan in plans) != any(plan.last for plan in plans)
    if not (config.metrics.gradient_noise_every and is_shared and has_one_end):
        return 0
    return -(-(model.vocab or 0) // parallel.tensor) * model.hidden // parallel.context


def _count_summed_apart(config: RunConfig, parameters: RankParameters) -> int:
    """Return the elements that a measurement of noise sums at once over the ranks of a data
    rank."""
    parallel = config.parallel
    if not config.metrics.gradient_noise_every or parallel.context == 1:
        return 0
    return min(SUMMED_AT_ONCE, parameters.total)


def _compute_logit_bytes(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, *, host: bool
) -> tuple[int, int]:
    """Return the bytes of a chunk of logits, and of what a loss from outside computes of them."""
    width, tokens = DTYPE_BYTES[train.precision], train.microbatch * train.seq
    vocab = -(-(model.vocab or 0) // parallel.tensor)
    most_logits = get_max_logits_per_chunk(host=host)
    rows = min(tokens, count_rows_per_chunk(vocab, host=host))
    fp32_rows = min(rows, max(1, most_logits // FP32_PARTS // max(1, vocab)))
    loss_tensors = fp32_rows * vocab * compute_loss_bytes_per_logit(model, train, width)
    return rows * vocab * width, loss_tensors


def _compute_buffer_bytes(
    config: RunConfig,
    parameters: RankParameters,
    ranks: int,
    expert_ranks: int,
    plans: Sequence[StagePlan],
    *,
    host: bool,
) -> int:
    """Return the bytes of buffers for arriving gradients on a CPU, and for offloaded state on its
    way through the device; arguments as in `compute_memory`."""
    zero, width = config.parallel.zero, DTYPE_BYTES[config.train.precision]
    master = max(4, width)
    if not host and not config.optim.offload:
        return 0
    bucketed = parameters.merge_into_buckets(config.parallel, plans)
    if host:
        return _count_receive_buffer_elements(bucketed, ranks, expert_ranks, zero) * master
    shard_ranks = (ranks, expert_ranks) if zero else (1, 1)
    chunk = min(OFFLOAD_CHUNK, bucketed.compute_largest_bucket_shard(*shard_ranks))
    width_on_device = offload_bytes_per_element(config.optim, master, weights=width < master)
    return math.ceil(OFFLOAD_BUFFERS * chunk * width_on_device)


def _compute_saved_state_bytes(
    optim: OptimConfig, trained: RankParameters, ranks: int, expert_ranks: int, master: int
) -> int:
    """Return the bytes of the optimizer state that a rank saves."""
    shard = trained.count_shard(ranks, expert_ranks)
    outside_blocks = trained.count_shard_outside_blocks(ranks)
    return compute_optimizer_state_bytes(optim, shard, outside_blocks, master, saved=True)


def _count_transfers(parallel: ParallelConfig) -> int:
    """Return how many consecutive transfers a reduction takes until a rank has its part."""
    return 2 if parallel.compress == "powersgd" and parallel.data_replicate == 1 else 1


def compute_max_width_per_token(model: ModelConfig) -> int:
    """Return the elements per token at the widest place of a block. Backward has two such tensors
    on top of the kept activations."""
    if model.emulate is not None:
        return model.hidden
    blocks = [describe_block(model, layer) for layer in range(model.layers)]
    return max(layer.widest for block in blocks for layer in block.layers)


def _count_receive_buffer_elements(
    parameters: RankParameters, ranks: int, expert_ranks: int, zero: int
) -> int:
    """Return the elements of the buffers that receive the other ranks' parts of gradients."""
    if not zero:
        return 0

    def list_foreign_parts(sizes: Sequence[int], ranks_of_copy: int) -> list[int]:
        return [size - size // ranks_of_copy for size in sizes]

    matrices = (
        list_foreign_parts(parameters.split, ranks),
        list_foreign_parts(parameters.experts, expert_ranks),
        list_foreign_parts(parameters.replicated, ranks * parameters.tensor),
        list_foreign_parts(parameters.shared, ranks * parameters.copies),
    )
    # One part is still in transit when the next one starts.
    unsplit = list_foreign_parts((*parameters.tables, parameters.vectors), ranks)
    unsplit += list_foreign_parts((parameters.positions,), ranks * parameters.tensor)
    return sum(map(_count_buffer_elements, matrices)) + sum(set(unsplit))


def _count_residual_elements(
    parallel: ParallelConfig, parameters: RankParameters, ranks: int, expert_ranks: int
) -> int:
    """Return the elements of the residuals that compression carries from step to step: one for each
    element of a matrix that a rank sends. Between replicas it sends only its own part."""
    if parallel.compress == "none":
        return 0
    if parallel.data_replicate > 1:
        return parameters.count_shard(ranks, expert_ranks) - parameters.vectors // ranks
    groups = (
        (ranks, (*parameters.split, *parameters.tables)),
        (ranks * parameters.tensor, (*parameters.replicated, parameters.positions)),
        (ranks * parameters.copies, parameters.shared),
        (expert_ranks, parameters.experts),
    )
    return sum(sum(sizes) for group_ranks, sizes in groups if group_ranks > 1)


def compute_optimizer_state_bytes(
    optim: OptimConfig, elements: int, outside_blocks: int, master: int, *, saved: bool = False
) -> int:
    """Return the bytes of optimizer state.

    Args:
        optim: The optimizer and the type of its state.
        elements: Number of parameters.
        outside_blocks: How many of them are not matrices of blocks.
        master: Bytes of an element in master precision.
        saved: As in a checkpoint, which stores 8-bit blocks as fp32.
    """
    moment = 4.0 if saved and optim.state == "int8" else compute_moment_bytes(optim, master)
    total = elements * (count_moments(optim) * moment + (master if optim.ema is not None else 0))
    if optim.name == "muon":  # AdamW updates what is not a matrix
        total += outside_blocks * (2 - count_moments(optim)) * moment
    return math.ceil(total)


def compute_host_bytes_per_element(optim: OptimConfig, precision: str) -> float:
    """Return the bytes per element that the host keeps under `optim.offload`: its state (under Muon
    that of matrices), and the weight in master precision if the model computes in another one."""
    width = DTYPE_BYTES[precision]
    master = max(4, width)
    return compute_state_bytes(optim, master) + (master if width < master else 0)


def compute_rank_memory(
    config: RunConfig,
    layout: Layout,
    plans: Sequence[StagePlan],
    schedule: Schedule,
    rank: int,
    *,
    host: bool = False,
) -> RankMemory:
    """Return the memory of the first of the ranks with pipeline coordinate `rank`.

    Args:
        config: Model, precision and optimizer.
        layout: The sizes of the axes.
        plans: All stages of the model.
        schedule: That of one step; if it is not lowered, messages are not counted.
        rank: A pipeline coordinate.
        host: As in `compute_memory`.
    """
    rank_plans = [plans[stage] for stage in schedule.list_stages(rank)]
    of_rank = config.model, config.train, layout, rank_plans
    return compute_memory(
        config,
        count_rank_parameters(*of_rank),
        layout.data_shard * layout.context,
        rank_plans,
        schedule.ranks[rank],
        layout.expert_shard,
        trained=count_rank_parameters(*of_rank, config.frozen_patterns),
        host=host,
    )
