"""The end of a step: the exchange of gradients and weights between data ranks, and the update.

The exchange between data ranks is exposed where it takes longer than the compute that it may
overlap with. At ZeRO 0 and 1 gradients are sent during the last backward pass and weights come back
during the first forward pass; at 2 and 3 the exchange happens in every pass. A step that is
recorded as a CUDA graph starts only when all weights are back.

Muon (`optim.name=muon`) works on whole matrices. The ranks that hold one copy of a stage divide its
matrices among themselves by work. Once per step, pieces are sent to the owners and the results are
sent back; nothing overlaps with that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaframe.architecture.buckets import compute_bucket_count
from megaframe.architecture.embedding import get_layer_words
from megaframe.architecture.linear import GroupedLinearSpec
from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.quantised import compute_bits_per_element
from megaframe.architecture.stages import compute_trained_share, plan_stages
from megaframe.config.schema import RunConfig
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout
from megaframe.planner.communication_times import estimate_exposed_seconds
from megaframe.planner.constants import get_cluster_constants
from megaframe.planner.kernel_times import (
    KernelRates,
    estimate_elementwise_seconds,
    estimate_matmul_seconds,
)
from megaframe.planner.layout_sizes import LayoutSizes, make_layout_sizes
from megaframe.planner.machine import Machine, PassTimes
from megaframe.planner.memory import compute_host_bytes_per_element
from megaframe.planner.parameter_counts import count_rank_parameters

Number = Any
_ITERATIONS = 5
"""Newton-Schulz iterations. Each has three products: the matrix X times its transpose gives A, then
A times A, and the sum of these times X."""


@dataclass(frozen=True)
class ParameterLoad:
    """What a rank exchanges and updates: numbers of parameters before data ranks divide them.

    Attributes:
        dense, experts: Of its blocks.
        tables: Of the embedding and the head.
        buckets: Number of buckets in which they are exchanged.
        muon_total, muon_longest: Seconds, as in `estimate_layer_muon_seconds`.
    """

    dense: Number = 0.0
    experts: Number = 0.0
    tables: Number = 0.0
    buckets: Number = 1.0
    muon_total: Number = 0.0
    muon_longest: Number = 0.0

    def __add__(self, other: ParameterLoad) -> ParameterLoad:
        return ParameterLoad(
            self.dense + other.dense,
            self.experts + other.experts,
            self.tables + other.tables,
            self.buckets,
            self.muon_total + other.muon_total,
            np.maximum(self.muon_longest, other.muon_longest),
        )

    def scale(self, factor: Number) -> ParameterLoad:
        """Return the parameters of `factor` blocks like this one."""
        return replace(
            self,
            dense=self.dense * factor,
            experts=self.experts * factor,
            muon_total=self.muon_total * factor,
        )

    @property
    def total(self) -> Number:
        """Number of parameters of all kinds."""
        return self.dense + self.experts + self.tables


def compute_block_load(machine: Machine, layer: int) -> ParameterLoad:
    """Return the parameters of one block. Gains and biases are few and are left out, and so is what
    is frozen, unless its values are gathered as well (ZeRO 3); codes count by their bytes."""
    model, sizes = machine.config.model, machine.sizes
    if model.emulate is not None:
        return ParameterLoad()
    dense = experts = 0.0
    for linear in describe_block(model, layer).linears:
        if isinstance(linear, GroupedLinearSpec):
            local_experts = np.ceil(linear.experts / sizes.expert)
            results, terms = linear.compute_local_sizes(sizes.expert_tensor)
            experts = experts + local_experts * results * terms
        else:
            results, terms = linear.compute_local_sizes(sizes.tensor)
            dense = dense + results * terms
    total, longest = estimate_layer_muon_seconds(machine, layer)
    share = compute_trained_share(model, machine.config.frozen_patterns, layer)
    gathered = 1.0
    if model.adapters is not None and model.adapters.quantize_base is not None:
        bits = float(compute_bits_per_element(model.adapters.quantize_base))
        gathered = share + (1 - share) * bits / 8 / DTYPE_BYTES[machine.config.train.precision]
    exchanged = np.where(sizes.zero == 3, gathered, share) if share < 1 else 1.0
    return ParameterLoad(
        dense * exchanged,
        experts * exchanged,
        muon_total=total * share,
        muon_longest=longest * (share > 0),
    )


def count_table_elements(machine: Machine) -> Number:
    """Return the number of parameters of a tensor rank's part of one vocabulary table."""
    model = machine.config.model
    if model.emulate is not None:
        return 0.0
    return np.ceil((model.vocab or 0) / machine.sizes.tensor) * model.hidden


def count_layer_table_elements(machine: Machine) -> Number:
    """Return the number of parameters of a tensor rank's part of the table of inputs of layers."""
    model = machine.config.model
    width = 0 if model.emulate is not None else model.layers * (model.layer_embeddings or 0)
    return np.ceil(get_layer_words(model) / machine.sizes.tensor) * width


def count_overlapping_passes(sizes: LayoutSizes, is_looped: Number) -> Number:
    """Return the number of microbatches that a rank computes while it exchanges its stages one by
    one, at the end of a step or at its beginning.

    Args:
        sizes: The layout.
        is_looped: Whether the schedule runs the first stage of every rank before any second stage.
            Then the stages of a rank end as many microbatches apart as there are ranks, otherwise
            together.
    """
    between = np.minimum(sizes.pipeline, sizes.microbatches) - 1
    return 1.0 + np.where(is_looped, between * (sizes.chunks - 1) / sizes.chunks, 0.0)


def count_buckets(machine: Machine, matrices: Number, chunks: Number, blocks: Number) -> Number:
    """Return the number of buckets in which a rank exchanges the matrices of its blocks.

    It follows from `Software.gradients_of`. By the rule it is `balanced_bucket_count`, for all
    collectives of a bucket together, but at least one per chunk (at ZeRO 2 and 3, one per block)
    and at most two per block.

    Args:
        machine: The links, and the layout.
        matrices: Elements of the rank's matrices.
        chunks: Stages of the rank.
        blocks: Blocks of the rank.
    """
    sent_together, bucket_size = machine.software.gradients_of, machine.config.parallel.bucket_size
    if sent_together != "buckets":
        return np.maximum(1.0, chunks if sent_together == "chunk" else blocks)
    most, fewest = np.maximum(1.0, 2.0 * blocks), np.maximum(1.0, chunks)
    if bucket_size == "auto":
        latency = estimate_exchange_times(machine, 0.0, 1.0).sum_for_zero(machine.sizes.zero)
        transfer = estimate_exchange_times(machine.without_latency(), matrices, 1.0)
        balanced = compute_bucket_count(transfer.sum_for_zero(machine.sizes.zero), latency)
        fewest = np.where(machine.sizes.zero >= 2, np.maximum(fewest, blocks), fewest)
    else:
        balanced = matrices / bucket_size
    return np.clip(balanced, fewest, np.maximum(fewest, most))


def resolve_bucket_size(config: RunConfig, layout: Layout, cluster: Cluster) -> RunConfig:
    """Return the config with `parallel.bucket_size=auto` decided for these ranks and links: half a
    block if no other rank has the same parameters.

    Args:
        config: The run.
        layout: Its ranks.
        cluster: Its machines.
    """
    if config.parallel.bucket_size != "auto":
        return config
    if layout.island_data * layout.context == 1:
        return config.replace(parallel={"bucket_size": 1})
    machine = Machine(
        config,
        cluster,
        get_cluster_constants(cluster),
        make_layout_sizes(config.parallel, config.train, layout),
    )
    parameters = count_rank_parameters(config.model, config.train, layout, plan_stages(config))
    matrices = (parameters.total - parameters.outside_blocks) / layout.pipeline
    blocks = len(parameters.split) / 2 / layout.pipeline
    count = float(count_buckets(machine, matrices, config.parallel.chunks, blocks))
    elements = matrices / count
    if config.parallel.zero >= 2:  # not several blocks where some are smaller than others
        elements = min(elements, min(parameters.elements_per_block, default=0))
    return config.replace(parallel={"bucket_size": max(1, math.ceil(elements))})


@dataclass(frozen=True)
class ExchangeTimes:
    """Seconds of the collectives of gradients and values over data ranks.

    Attributes:
        scatter: Each rank gets its part of the sums.
        gather: All ranks get all values.
        all_reduce: All ranks get all sums.
        replicas: Sums of a rank's part over its replicas.
    """

    scatter: Number
    gather: Number
    all_reduce: Number
    replicas: Number

    def sum_for_zero(self, zero: Number) -> Number:
        """Return the sum of those that take place at a ZeRO stage."""
        return np.where(zero == 0, self.all_reduce, self.scatter + self.gather) + self.replicas


def estimate_exchange_times(machine: Machine, elements: Number, buckets: Number) -> ExchangeTimes:
    """Return the seconds of exchanging so many elements in so many buckets.

    Args:
        machine: Rates and rank groups.
        elements: Elements of all buckets.
        buckets: Number of buckets.
    """
    parallel, software, seconds = (
        machine.config.parallel,
        machine.software,
        machine.estimate_collective_seconds,
    )
    values = DTYPE_BYTES[machine.config.train.precision] * elements
    wire = _get_gradient_bytes(machine)
    gradients, shard = wire * elements, wire * (elements / machine.sizes.shard)
    gather = seconds("all_gather", values, "shard", buckets)
    if software.gradient_bytes is not None or parallel.reduce_precision != "bf16":
        return ExchangeTimes(
            scatter=seconds("reduce_scatter", gradients, "shard", buckets),
            gather=gather,
            all_reduce=seconds("all_reduce", gradients, "shard", buckets),
            replicas=seconds("all_reduce", shard, "replicas", buckets),
        )
    # Rounded gradients are exchanged and summed by the receiver in master precision.
    scatter = machine.estimate_exchange_seconds(gradients, "shard", buckets)
    between_replicas = machine.estimate_exchange_seconds(shard, "replicas", buckets)
    return ExchangeTimes(
        scatter=scatter,
        gather=gather,
        all_reduce=scatter + seconds("all_gather", gradients, "shard", buckets),
        replicas=between_replicas + seconds("all_gather", shard, "replicas", buckets),
    )


def _get_gradient_bytes(machine: Machine) -> int:
    """Return the bytes per element of gradients that are sent."""
    if machine.software.gradient_bytes is not None:
        return machine.software.gradient_bytes
    half = machine.config.parallel.reduce_precision == "bf16"
    return 2 if half else max(4, DTYPE_BYTES[machine.config.train.precision])


def estimate_exposed_exchange_seconds(
    machine: Machine, load: ParameterLoad, window: PassTimes, passes: Number
) -> Number:
    """Return the exposed seconds of exchanging gradients and weights in a step.

    Args:
        machine: The links, and the layout.
        load: The rank's parameters.
        window: Compute of one microbatch on the rank.
        passes: Number of microbatches that an exchange made once per step overlaps with
            (`count_overlapping_passes`).
    """
    sizes, software = machine.sizes, machine.software
    width, wire = DTYPE_BYTES[machine.config.train.precision], _get_gradient_bytes(machine)
    size = load.total
    times = estimate_exchange_times(machine, size, load.buckets if software.overlap_data else 1.0)
    scatter, gather, all_reduce = times.scatter, times.gather, times.all_reduce
    replicas = times.replicas
    parts = load.buckets if software.data_tail is None else software.data_tail
    backward, forward = window.backward + window.weight, window.forward
    microbatches = sizes.microbatches * 1.0
    if not software.overlap_data:
        per_step = np.where(sizes.zero == 0, all_reduce, scatter + gather)
        per_pass = microbatches * (scatter + np.where(sizes.zero == 3, 2 * gather, 0.0))
        per_pass = per_pass + np.where(sizes.zero == 3, 0.0, gather)
        return np.where(sizes.zero >= 2, per_pass, per_step) + replicas

    def expose(transfer: Number, compute: Number, bytes_each: Number) -> Number:
        delay = machine.estimate_contention_seconds(bytes_each * size, "shard")
        return estimate_exposed_seconds(transfer, compute, parts, delay)

    def gather_back(transfer: Number, compute: Number) -> Number:
        graph = machine.config.train.cuda_graph
        return transfer if graph else expose(transfer, compute, width)

    is_zero0 = sizes.zero == 0
    directions = np.where(is_zero0, 2.0, 1.0)
    per_step = expose(np.where(is_zero0, all_reduce, scatter), passes * backward, wire * directions)
    per_step = per_step + np.where(is_zero0, 0.0, gather_back(gather, passes * forward))
    exposed_gather = expose(gather, forward, width)
    is_zero3 = sizes.zero == 3
    transfer = scatter + np.where(is_zero3, gather, 0.0)
    per_pass = expose(transfer, backward, wire + np.where(is_zero3, width, 0.0))
    per_pass = microbatches * (per_pass + np.where(is_zero3, exposed_gather, 0.0))
    per_pass = per_pass + np.where(is_zero3, 0.0, gather_back(gather, forward))
    return np.where(sizes.zero >= 2, per_pass, per_step) + replicas


def estimate_optimizer_seconds(machine: Machine, load: ParameterLoad) -> Number:
    """Return the optimizer's own seconds: reading and writing its state once, plus what Muon adds.
    Offloaded state takes as long as loading it from the host if that is longer; storing it
    overlaps with loading."""
    sizes = machine.sizes
    shard = load.total / np.where(sizes.zero >= 1, sizes.shard, 1.0)
    update = estimate_elementwise_seconds(machine.rate, machine.software.state_bytes * shard)
    link, config = machine.cluster.chip.host_link, machine.config
    if config.optim.offload and link is not None:
        loading = (
            compute_host_bytes_per_element(config.optim, config.train.precision) * shard / link
        )
        update = np.maximum(update, loading)
    return update + estimate_muon_seconds(
        machine, load.dense + load.experts, load.muon_total, load.muon_longest
    )


def estimate_layer_muon_seconds(machine: Machine, layer: int) -> tuple[float, float]:
    """Return the seconds in which Muon orthogonalises all matrices of a layer on one rank, and
    those of the matrix that takes longest; zeros under other optimizers."""
    if machine.config.optim.name != "muon":
        return 0.0, 0.0
    matrices = describe_block(machine.config.model, layer).matrices
    seconds = {shape: estimate_newton_schulz_seconds(machine.rate, *shape) for shape in matrices}
    total = sum(number * seconds[shape] for shape, number in matrices.items())
    return total, max(seconds.values(), default=0.0)


def estimate_newton_schulz_seconds(rate: KernelRates, outputs: int, inputs: int) -> float:
    """Return the seconds to orthogonalise a matrix [outputs, inputs].

    Args:
        rate: Rates of the kernels on the chip.
        outputs: Rows of the matrix.
        inputs: Columns of the matrix.
    """
    rows, columns = sorted((outputs, inputs))
    products = ((rows, rows, columns), (rows, rows, rows), (rows, columns, rows))
    return _ITERATIONS * float(sum(estimate_matmul_seconds(rate, *sizes) for sizes in products))


def estimate_muon_seconds(
    machine: Machine, elements: Number, total: Number, longest_matrix: Number
) -> Number:
    """Return the seconds that Muon adds to the update; 0 under other optimizers.

    Args:
        machine: The links, and the layout.
        elements: Elements of the rank's matrices before data ranks divide them.
        total: Seconds for all matrices of the rank's stages (`estimate_layer_muon_seconds`).
        longest_matrix: Seconds for the one that takes longest.
    """
    if machine.config.optim.name != "muon":
        return 0.0
    sizes = machine.sizes
    sent, received = compute_muon_bytes(machine, elements)
    send_pieces = machine.estimate_collective_seconds("all_to_all", sent, "owners")
    gather_results = machine.estimate_collective_seconds("all_gather", received, "owners")
    send_results = np.where(sizes.zero == 0, gather_results, send_pieces)
    return (
        np.maximum(total / (sizes.shard * sizes.tensor), longest_matrix)
        + send_pieces
        + send_results
    )


def compute_muon_bytes(machine: Machine, elements: Number) -> tuple[Number, Number]:
    """Return the bytes that a rank sends to owners (its part of the gradients), and those that it
    gets back from them (for everything that it keeps of the weights).

    Args:
        machine: Sizes of the axes, and rates of the kernels.
        elements: Elements of the rank's matrices before data ranks divide them.
    """
    size, sizes = machine.rate.width * elements, machine.sizes
    return size / sizes.shard, np.where(sizes.zero == 0, size, size / sizes.shard)
