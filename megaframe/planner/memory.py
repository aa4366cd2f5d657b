"""Memory of one rank, by kind, computed before the run.

It is exact for what megaframe itself keeps. The interpreter, torch and the temporaries of single
operations come on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megaframe.architecture.adapted_weights import list_coded_patterns
from megaframe.architecture.buckets import SUMMED_AT_ONCE
from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.optimizer_state import (
    OFFLOAD_BUFFERS,
    OFFLOAD_CHUNK,
    compute_moment_bytes,
    compute_state_bytes,
    compute_update_bytes,
    count_moments,
    count_outer_copies,
    offload_bytes_per_element,
)
from megaframe.architecture.output_head import (
    FP32_PARTS,
    compute_loss_bytes_per_logit,
    count_rows_per_chunk,
    get_max_logits_per_chunk,
)
from megaframe.architecture.quantised import (
    DECODED_AT_ONCE,
    compute_bits_per_element,
    count_temporary_bytes,
)
from megaframe.architecture.stages import StagePlan
from megaframe.config import ModelConfig, RunConfig, TrainConfig
from megaframe.config.adapters import QuantisationConfig
from megaframe.config.optim import OptimConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.layout import Layout
from megaframe.planner.activations import compute_peak_activations
from megaframe.planner.bucket_units import count_gathered_codes, make_units, select_trained
from megaframe.planner.local_products import ProductSizes, compute_eight_bit_bytes
from megaframe.planner.parameter_counts import (
    RankParameters,
    count_rank_parameters,
)
from megaframe.schedule import Action, Schedule
from megaframe.schedule.zero_buffers import StageBuckets, compute_peak_zero_buffers


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, by kind.

    Attributes:
        weights: In master precision.
        values: What the model computes with, where it is not the weights themselves.
        gradients: Including what compression has not sent yet.
        activations: What the backward passes of the microbatches in flight need.
        logits: One chunk.
        islands: The last synchronised weights, the momentum of the outer optimizer, what
            compression has not sent yet, and what travels.
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
    islands: int = 0
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


@dataclass(frozen=True)
class PlannedRank:
    """A rank before the run: what it has and does, from which its memory follows.

    Attributes:
        config: Model, precision, optimizer and layout.
        parameters: The rank's parameters.
        ranks: How many ranks share one copy of the dense parameters.
        plans: The stages that the rank runs.
        actions: Its list of actions, in order.
        expert_ranks: How many ranks share one copy of the experts.
        unfrozen: Those of its parameters that are not frozen; None for all.
        uncoded: Those that are not kept as codes; None for all.
        host: Whether the device is the host, where transfers need buffers and checkpoints are
            copied in the same memory.
    """

    config: RunConfig
    parameters: RankParameters
    ranks: int
    plans: Sequence[StagePlan]
    actions: Sequence[Action]
    expert_ranks: int = 1
    unfrozen: RankParameters | None = None
    uncoded: RankParameters | None = None
    host: bool = False

    @property
    def trained(self) -> RankParameters:
        """The parameters that have gradients and optimizer state."""
        return self.unfrozen or self.parameters

    @property
    def plain(self) -> RankParameters:
        """The parameters that are kept as numbers."""
        return self.uncoded or self.parameters

    @property
    def width(self) -> int:
        """Bytes of a number that the model computes with."""
        return DTYPE_BYTES[self.config.train.precision]

    @property
    def master(self) -> int:
        """Bytes of a number in master precision."""
        return max(4, self.width)

    @property
    def shard_ranks(self) -> tuple[int, int]:
        """How many ranks divide what is updated: the dense parameters, and the experts."""
        return (self.ranks, self.expert_ranks) if self.config.parallel.zero else (1, 1)

    @property
    def shard(self) -> int:
        """Number of parameters in the rank's own part that are kept as numbers."""
        return self._count_own(self.plain)

    @property
    def divided(self) -> RankParameters:
        """The parameters of which other ranks have a part too; what a single rank has is never
        divided."""
        return self.plain.select_divided(self.ranks, self.expert_ranks)

    @property
    def is_offloaded(self) -> bool:
        """Whether optimizer state is kept in host memory."""
        return self.config.optim.offload and not self.host

    @property
    def are_weights_offloaded(self) -> bool:
        """Whether weights are, too; their rounded values stay on the device."""
        return self.is_offloaded and self.width < self.master

    def compute_memory(self) -> RankMemory:
        """Return the memory of the rank."""
        model, parallel, train = self.config.model, self.config.parallel, self.config.train
        weights, state = self.shard * self.master, self._compute_state_bytes()
        values, gradients = self._count_values_and_gradients()
        codes, decoded = self._compute_coded_bytes()
        # Context ranks divide the tokens; tensor ranks divide rows, heads and widths.
        activation_ranks = parallel.tensor * parallel.context
        activations, messages = (
            size // activation_ranks
            for size in compute_peak_activations(model, parallel, train, self.plans, self.actions)
        )
        logits = loss_tensors = 0
        if any(plan.last for plan in self.plans):
            logits, loss_tensors = _compute_logit_bytes(model, parallel, train, host=self.host)
        widest = train.microbatch * train.seq * compute_max_width_per_token(model)
        return RankMemory(
            weights=(0 if self.are_weights_offloaded else weights) + codes,
            values=values * self.width + decoded,
            gradients=(gradients + self._count_residuals() + self._count_kept_table())
            * self.master,
            optimizer=0 if self.is_offloaded else state,
            activations=activations + self._compute_row_factor_bytes(),
            logits=logits,
            islands=self._compute_outer_bytes(),
            messages=messages,
            buffers=self._compute_buffer_bytes(),
            checkpoint=self._compute_checkpoint_bytes(),
            temporaries=max(
                2 * widest * self.width // activation_ranks,
                self._compute_eight_bit_bytes(),
                logits + loss_tensors,
                self._count_summed_apart() * self.master,
                self._compute_decoding_bytes(),
                # Activations are gone when weights are updated.
                0 if self.host else self._compute_update_bytes() - activations,
            ),
            host=weights * self.are_weights_offloaded + state * self.is_offloaded,
        )

    def _compute_eight_bit_bytes(self) -> int:
        """Return the bytes of a backward pass's product in 8 bits."""
        model, parallel, train = self.config.model, self.config.parallel, self.config.train
        sizes = ProductSizes(
            parallel.tensor,
            parallel.context,
            parallel.expert,
            parallel.expert_tensor,
            train.microbatch,
        )
        return math.ceil(compute_eight_bit_bytes(model, train, sizes))

    def _count_own(self, parameters: RankParameters) -> int:
        """Return how many of these parameters are in the rank's own part."""
        whole = not self.config.parallel.zero
        return parameters.total if whole else parameters.count_shard(self.ranks, self.expert_ranks)

    def _compute_state_bytes(self) -> int:
        """Return the bytes of optimizer state."""
        trained = self.trained
        outside_blocks = trained.outside_blocks
        if self.config.parallel.zero:
            outside_blocks = trained.count_shard_outside_blocks(self.ranks)
        own = self._count_own(trained)
        return compute_optimizer_state_bytes(self.config.optim, own, outside_blocks, self.master)

    def _count_values_and_gradients(self) -> tuple[int, int]:
        """Return the elements of values and of gradients, with what ZeRO borrows of other ranks."""
        zero, parameters, divided = self.config.parallel.zero, self.plain, self.divided
        same_dtype = self.width >= 4
        values, gradients = parameters.total, parameters.total
        alone = parameters.total - divided.total
        own_vectors = parameters.vectors // self.ranks
        if zero >= 2:
            borrowed_values, borrowed_gradients = compute_peak_zero_buffers(
                self._make_units(self.divided),
                self.actions,
                _count_transfers(self.config.parallel),
                values=zero == 3,
                same_dtype=same_dtype,
            )
            gradients = parameters.vectors + borrowed_gradients + self.shard - own_vectors
            values = parameters.vectors + alone + borrowed_values if zero == 3 else values
        # With one precision the own weights are part of the whole values; borrowed values are
        # apart.
        if same_dtype:
            values -= alone + -(-parameters.vectors // self.ranks) if zero == 3 else self.shard
        elif self.are_weights_offloaded and zero == 3:
            values += self.shard - alone
        if self.trained != self.parameters:
            gradients = self._count_trained_gradients()
        return values, gradients

    def _count_trained_gradients(self) -> int:
        """Return the elements of gradients where not all parameters are trained."""
        trained, ranks = self.trained, (self.ranks, self.expert_ranks)
        if self.config.parallel.zero < 2:
            return trained.total
        groups = self.parameters.group_blocks(self.config.parallel, self.plans)
        _, borrowed = compute_peak_zero_buffers(
            select_trained(self._make_units(self.divided), trained.select_divided(*ranks), groups),
            self.actions,
            _count_transfers(self.config.parallel),
            values=False,
        )
        vectors = trained.vectors - trained.vectors // self.ranks
        return vectors + borrowed + trained.count_shard(*ranks)

    def _compute_row_factor_bytes(self) -> int:
        """Return the bytes of the two vectors that each product with DoRA has for its backward
        passes."""
        model, tensor = self.config.model, self.config.parallel.tensor
        results = sum(
            linear.compute_local_sizes(tensor)[0]
            for plan in self.plans
            for layer in plan.blocks
            for linear in describe_block(model, layer).linears
            if linear.rescales
        )
        return round(2 * results) * self.master

    def _make_units(self, parameters: RankParameters) -> dict[int, StageBuckets]:
        """Return the units of its stages with the buckets of some of its parameters."""
        groups = self.parameters.group_blocks(self.config.parallel, self.plans)
        return make_units(parameters, self.config.model, self.plans, groups)

    @property
    def coding(self) -> QuantisationConfig | None:
        """How `coded` are kept."""
        adapters = self.config.model.adapters
        return adapters.quantize_base if adapters is not None and self.uncoded else None

    @property
    def coded(self) -> RankParameters:
        """The parameters that are kept as codes."""
        return self.parameters.subtract(self.plain)

    def _compute_coded_bytes(self) -> tuple[int, int]:
        """Return the bytes of the codes of this rank, and those of values that are made of them and
        of codes that are gathered."""
        if self.coding is None:
            return 0, 0
        coded, ranks, gathered = self.coded, (self.ranks, self.expert_ranks), 0
        bits = compute_bits_per_element(self.coding)
        values, _ = compute_peak_zero_buffers(self._make_units(coded), self.actions, values=True)
        own = coded.total
        if self.config.parallel.zero == 3:
            groups = self.parameters.group_blocks(self.config.parallel, self.plans)
            own = coded.count_shard(*ranks)
            gathered = count_gathered_codes(coded.select_divided(*ranks), groups)
        return math.ceil(own * bits / 8), values * self.width + math.ceil(gathered * bits / 8)

    def _compute_decoding_bytes(self) -> int:
        """Return the bytes that making values of a bucket takes for itself."""
        if self.coding is None:
            return 0
        bucketed = self.coded.merge_into_buckets(self.config.parallel, self.plans)
        # Gathered codes are decoded part by part.
        ranks = (self.ranks, self.expert_ranks) if self.config.parallel.zero == 3 else (1, 1)
        largest = bucketed.compute_largest_bucket_shard(*ranks)
        return math.ceil(min(largest, DECODED_AT_ONCE) * count_temporary_bytes(self.coding))

    def _count_residuals(self) -> int:
        """Return the elements of the residuals that compression carries from step to step: one for
        each element of a matrix that a rank sends. Between replicas it sends only its own part."""
        parallel, trained, ranks = self.config.parallel, self.trained, self.ranks
        if parallel.compress == "none":
            return 0
        if parallel.data_replicate > 1:
            return trained.count_shard(ranks, self.expert_ranks) - trained.vectors // ranks
        groups = (
            (ranks, (*trained.split, *trained.tables)),
            (ranks * trained.tensor, (*trained.replicated, trained.positions)),
            (ranks * trained.copies, trained.shared),
            (self.expert_ranks, trained.experts),
        )
        return sum(sum(sizes) for group_ranks, sizes in groups if group_ranks > 1)

    def _count_kept_table(self) -> int:
        """Return the elements of the gradient of a table that two pipeline ranks have, which each
        keeps until the end of a step whose noise is measured."""
        model, parallel, plans = self.config.model, self.config.parallel, self.plans
        is_shared = model.tie_embeddings or model.mtp_depth > 0
        has_one_end = any(plan.first for plan in plans) != any(plan.last for plan in plans)
        if not (self.config.metrics.gradient_noise_every and is_shared and has_one_end):
            return 0
        return -(-(model.vocab or 0) // parallel.tensor) * model.hidden // parallel.context

    def _count_summed_apart(self) -> int:
        """Return the elements that a measurement of noise sums at once over the ranks of a data
        rank."""
        if not self.config.metrics.gradient_noise_every or self.config.parallel.context == 1:
            return 0
        return min(SUMMED_AT_ONCE, self.parameters.total)

    def _compute_outer_bytes(self) -> int:
        """Return the bytes of the outer state, of this rank's own part at any ZeRO stage."""
        if not self.config.trains_in_islands:
            return 0
        own = self.trained.count_shard(self.ranks, self.expert_ranks)
        return math.ceil(own * count_outer_copies(self.config.sync)) * self.master

    def _compute_update_bytes(self) -> int:
        """Return the bytes that an update takes for itself."""
        bucketed = self.trained.merge_into_buckets(self.config.parallel, self.plans)
        return compute_update_bytes(
            self.config.optim,
            self.width,
            bucketed.compute_largest_bucket_shard(*self.shard_ranks),
            max(map(sum, bucketed.parts), default=0),
            zero=self.config.parallel.zero,
            alone=self.ranks == 1,
        )

    def _compute_buffer_bytes(self) -> int:
        """Return the bytes of buffers for arriving gradients on a CPU, and for offloaded state on
        its way through the device."""
        parallel, optim = self.config.parallel, self.config.optim
        if not self.host and not optim.offload:
            return 0
        bucketed = self.trained.merge_into_buckets(parallel, self.plans)
        if self.host:
            received = _count_receive_buffer_elements(
                bucketed, self.ranks, self.expert_ranks, parallel.zero
            )
            return received * self.master
        chunk = min(OFFLOAD_CHUNK, bucketed.compute_largest_bucket_shard(*self.shard_ranks))
        weights = self.width < self.master
        width_on_device = offload_bytes_per_element(optim, self.master, weights=weights)
        return math.ceil(OFFLOAD_BUFFERS * chunk * width_on_device)

    def _compute_checkpoint_bytes(self) -> int:
        """Return the bytes of the copy that is being written: residuals, weights and state."""
        if not self.host or not self.config.checkpoint.every:
            return 0
        ranks, trained = (self.ranks, self.expert_ranks), self.trained
        state = compute_optimizer_state_bytes(
            self.config.optim,
            trained.count_shard(*ranks),
            trained.count_shard_outside_blocks(self.ranks),
            self.master,
            saved=True,
        )
        copied = self._count_residuals() + self.parameters.count_shard(*ranks)
        return copied * self.master + state


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


def _count_transfers(parallel: ParallelConfig) -> int:
    """Return how many consecutive transfers a reduction takes until a rank has its part."""
    return 2 if parallel.compress == "powersgd" and parallel.data_replicate == 1 else 1


def compute_max_width_per_token(model: ModelConfig) -> int:
    """Return the elements per token at the widest place of a block. Backward has two such tensors
    on top of the kept activations."""
    if model.emulate is not None:
        return model.hidden
    blocks = [describe_block(model, layer) for layer in range(model.layers)]
    parts = (part for block in blocks for part in (*block.layers, *block.stream_parts.values()))
    return max(part.widest for part in parts)


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
        host: As in `PlannedRank`.
    """
    rank_plans = [plans[stage] for stage in schedule.list_stages(rank)]
    of_rank = config.model, config.train, layout, rank_plans
    return PlannedRank(
        config,
        count_rank_parameters(*of_rank),
        layout.data_shard * layout.context,
        rank_plans,
        schedule.ranks[rank],
        layout.expert_shard,
        count_rank_parameters(*of_rank, config.frozen_patterns),
        count_rank_parameters(*of_rank, list_coded_patterns(config.model)),
        host,
    ).compute_memory()
