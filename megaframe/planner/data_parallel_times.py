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

from megaframe.architecture.buckets import balanced_bucket_count
from megaframe.architecture.experts import has_experts
from megaframe.architecture.matrices import MatrixShape, attention_matrix_elements, block_matrices
from megaframe.architecture.stages import stage_plans
from megaframe.config.schema import RunConfig
from megaframe.hardware.chips import WIDTH
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout
from megaframe.planner.communication_times import exposed_seconds
from megaframe.planner.constants import cluster_constants
from megaframe.planner.kernel_times import KernelRates, elementwise_seconds, product_seconds
from megaframe.planner.layout_sizes import LayoutSizes, sizes_of
from megaframe.planner.machine import Machine, PassTimes
from megaframe.planner.memory import host_bytes_per_element
from megaframe.planner.parameter_counts import count_parameters as held_by

Number = Any
_ITERATIONS = 5
"""Newton-Schulz iterations. Each has three products: the matrix X times its transpose gives A, then
A times A, and the sum of these times X."""


@dataclass(frozen=True)
class ParameterLoad:
    """Numbers of parameters of one rank before data ranks divide them: dense parameters and experts
    of its blocks, and tables. buckets: number of buckets in which they are exchanged. whole,
    longest: as in `layer_muon_seconds`."""

    dense: Number = 0.0
    experts: Number = 0.0
    tables: Number = 0.0
    buckets: Number = 1.0
    whole: Number = 0.0
    longest: Number = 0.0

    def __add__(self, other: ParameterLoad) -> ParameterLoad:
        return ParameterLoad(
            self.dense + other.dense,
            self.experts + other.experts,
            self.tables + other.tables,
            self.buckets,
            self.whole + other.whole,
            np.maximum(self.longest, other.longest),
        )

    def times(self, factor: Number) -> ParameterLoad:
        """Return the parameters of `factor` blocks like this one."""
        return replace(
            self,
            dense=self.dense * factor,
            experts=self.experts * factor,
            whole=self.whole * factor,
        )

    @property
    def total(self) -> Number:
        """Number of parameters of all kinds."""
        return self.dense + self.experts + self.tables


def block_load(machine: Machine, layer: int) -> ParameterLoad:
    """Return the parameters of one block. Gains and biases are few and are left out."""
    model, sizes = machine.config.model, machine.sizes
    if model.emulate is not None:
        return ParameterLoad()
    moe = model.moe
    whole, longest = layer_muon_seconds(machine, layer)
    shape = 3 if model.activation == "swiglu" else 2
    attention = attention_matrix_elements(model) / sizes.tensor
    if moe is None or not has_experts(moe, layer):
        dense = attention + shape * model.hidden * model.ffn / sizes.tensor
        return ParameterLoad(dense, whole=whole, longest=longest)
    one = shape * model.hidden * (moe.ffn or model.ffn)
    shared = moe.shared * one / sizes.tensor + moe.experts * model.hidden
    here = np.ceil(moe.experts / sizes.expert)
    experts = here * one / sizes.expert_tensor
    return ParameterLoad(attention + shared, experts, whole=whole, longest=longest)


def table_elements(machine: Machine) -> Number:
    """Return the number of parameters of a tensor rank's part of one vocabulary table."""
    model = machine.config.model
    if model.emulate is not None:
        return 0.0
    return np.ceil((model.vocab or 0) / machine.sizes.tensor) * model.hidden


def overlapping_passes(sizes: LayoutSizes, circling: Number) -> Number:
    """Return the number of microbatches that a rank computes while it exchanges its stages one by
    one, at the end of a step or at its beginning.

    circling: whether the schedule runs the first stage of every rank before any second stage. Then
    the stages of a rank end as many microbatches apart as there are ranks, otherwise together.
    """
    between = np.minimum(sizes.pipeline, sizes.microbatches) - 1
    return 1.0 + np.where(circling, between * (sizes.chunks - 1) / sizes.chunks, 0.0)


def num_buckets(machine: Machine, matrices: Number, chunks: Number, blocks: Number) -> Number:
    """Return the number of buckets in which a rank exchanges the matrices of its blocks.

    It follows from `Software.gradients_of`. By the rule it is `balanced_bucket_count`, for all
    collectives of a bucket together, but at least one per chunk (at ZeRO 2 and 3, one per block)
    and at most two per block.

    Args:
        machine: the links, and the layout.
        matrices: elements of the rank's matrices.
        chunks: stages of the rank.
        blocks: blocks of the rank.
    """
    of, least = machine.software.gradients_of, machine.config.parallel.bucket_size
    if of != "buckets":
        return np.maximum(1.0, chunks if of == "chunk" else blocks)
    most, fewest = np.maximum(1.0, 2.0 * blocks), np.maximum(1.0, chunks)
    if least == "auto":
        latency = exchange_times(machine, 0.0, 1.0).in_turn(machine.sizes.zero)
        transfer = exchange_times(machine.without_latency(), matrices, 1.0)
        balanced = balanced_bucket_count(transfer.in_turn(machine.sizes.zero), latency)
        fewest = np.where(machine.sizes.zero >= 2, np.maximum(fewest, blocks), fewest)
    else:
        balanced = matrices / least
    return np.clip(balanced, fewest, np.maximum(fewest, most))


def resolve_bucket_size(config: RunConfig, layout: Layout, cluster: Cluster) -> RunConfig:
    """Return the config with `parallel.bucket_size=auto` decided for these ranks and links. It
    stays `auto` if no other rank has the same parameters."""
    if config.parallel.bucket_size != "auto" or layout.data * layout.context == 1:
        return config
    machine = Machine(config, cluster, cluster_constants(cluster), sizes_of(config, layout))
    whole = held_by(config, layout, stage_plans(config))
    matrices = (whole.total - whole.ends) / layout.pipeline
    blocks = len(whole.blocks) / 2 / layout.pipeline
    count = float(num_buckets(machine, matrices, config.parallel.chunks, blocks))
    least = matrices / count
    if config.parallel.zero >= 2:  # not several blocks where some are smaller than others
        least = min(least, min(whole.of_blocks, default=0))
    size = {"bucket_size": max(1, math.ceil(least))}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=size)})


@dataclass(frozen=True)
class ExchangeTimes:
    """Seconds of the collectives of gradients and values over data ranks. scatter: each rank gets
    its part of the sums. gather: all ranks get all values. whole: all ranks get all sums. replicas:
    sums of a rank's part over its replicas."""

    scatter: Number
    gather: Number
    whole: Number
    replicas: Number

    def in_turn(self, zero: Number) -> Number:
        """Return the sum of those that take place at a ZeRO stage."""
        return np.where(zero == 0, self.whole, self.scatter + self.gather) + self.replicas


def exchange_times(machine: Machine, size: Number, times: Number) -> ExchangeTimes:
    """Return the seconds of exchanging `size` elements in `times` buckets."""
    parallel, software = machine.config.parallel, machine.software
    part, width = size / machine.sizes.shard, WIDTH[machine.config.train.precision]
    wire = _wire_bytes(machine)
    gather = machine.seconds("all_gather", width * size, "shard", times)
    if software.gradient_bytes is not None or parallel.reduce_precision != "bf16":
        return ExchangeTimes(
            machine.seconds("reduce_scatter", wire * size, "shard", times),
            gather,
            machine.seconds("all_reduce", wire * size, "shard", times),
            machine.seconds("all_reduce", wire * part, "replicas", times),
        )
    scatter = machine.exchange(wire * size, "shard", times)
    return ExchangeTimes(
        scatter,
        gather,
        scatter + machine.seconds("all_gather", wire * size, "shard", times),
        machine.exchange(wire * part, "replicas", times)
        + machine.seconds("all_gather", wire * part, "replicas", times),
    )


def _wire_bytes(machine: Machine) -> int:
    """Return the bytes of a gradient on its way."""
    if machine.software.gradient_bytes is not None:
        return machine.software.gradient_bytes
    half = machine.config.parallel.reduce_precision == "bf16"
    return 2 if half else max(4, WIDTH[machine.config.train.precision])


def exposed_exchange_seconds(
    machine: Machine, held: ParameterLoad, window: PassTimes, passes: Number
) -> Number:
    """Return the exposed seconds of exchanging gradients and weights in a step.

    window: compute of one microbatch on the rank. passes: number of microbatches that an exchange
    made once per step overlaps with (`overlapping_passes`).
    """
    sizes, software = machine.sizes, machine.software
    width, wire = WIDTH[machine.config.train.precision], _wire_bytes(machine)
    size = held.total
    moved_once = exchange_times(machine, size, held.buckets if software.overlap_data else 1.0)
    scatter, gather, whole = moved_once.scatter, moved_once.gather, moved_once.whole
    replicas = moved_once.replicas
    tail = held.buckets if software.data_tail is None else software.data_tail
    backward, forward = window.backward + window.weight, window.forward
    each = sizes.microbatches * 1.0
    if not software.overlap_data:
        once = np.where(sizes.zero == 0, whole, scatter + gather)
        often = each * (scatter + np.where(sizes.zero == 3, 2 * gather, 0.0))
        often = often + np.where(sizes.zero == 3, 0.0, gather)
        return np.where(sizes.zero >= 2, often, once) + replicas

    def beside(moved: Number, compute: Number, bytes_each: Number) -> Number:
        delay = machine.delay(bytes_each * size, "shard")
        return exposed_seconds(moved, compute, tail, delay)

    def back(moved: Number, compute: Number) -> Number:
        graph = machine.config.train.cuda_graph
        return moved if graph else beside(moved, compute, width)

    first = sizes.zero == 0
    twice = np.where(first, 2.0, 1.0)
    once = beside(np.where(first, whole, scatter), passes * backward, wire * twice)
    once = once + np.where(first, 0.0, back(gather, passes * forward))
    gathered = beside(gather, forward, width)
    third = sizes.zero == 3
    moved = scatter + np.where(third, gather, 0.0)
    often = beside(moved, backward, wire + np.where(third, width, 0.0))
    often = each * (often + np.where(third, gathered, 0.0))
    often = often + np.where(third, 0.0, back(gather, forward))
    return np.where(sizes.zero >= 2, often, once) + replicas


def optimizer_seconds(machine: Machine, held: ParameterLoad) -> Number:
    """Return the optimizer's own seconds: reading and writing its state once, plus what Muon adds.
    Offloaded state takes as long as loading it from the host if that is longer; storing it
    overlaps with loading."""
    sizes = machine.sizes
    own = held.total / np.where(sizes.zero >= 1, sizes.shard, 1.0)
    moving = elementwise_seconds(machine.rate, machine.software.state_bytes * own)
    link, config = machine.cluster.chip.host_link, machine.config
    if config.optim.offload and link is not None:
        coming = host_bytes_per_element(config.optim, config.train.precision) * own / link
        moving = np.maximum(moving, coming)
    return moving + muon_seconds(machine, held.dense + held.experts, held.whole, held.longest)


def layer_muon_seconds(machine: Machine, layer: int) -> tuple[float, float]:
    """Return the seconds to orthogonalise all matrices of a layer on one rank, and those of the
    matrix that takes longest; zeros under other optimizers."""
    if machine.config.optim.name != "muon":
        return 0.0, 0.0
    found = block_matrices(machine.config.model, layer)
    each = [newton_schulz_seconds(machine.rate, matrix) for matrix in found]
    whole = sum(one * matrix.number for one, matrix in zip(each, found, strict=True))
    return whole, max(each, default=0.0)


def newton_schulz_seconds(rate: KernelRates, matrix: MatrixShape) -> float:
    """Return the seconds to orthogonalise one matrix (a single one, whatever its `number`)."""
    few, many = sorted((matrix.outputs, matrix.inputs))
    products = ((few, few, many), (few, few, few), (few, many, few))
    return _ITERATIONS * float(sum(product_seconds(rate, *sizes) for sizes in products))


def muon_seconds(machine: Machine, elements: Number, whole: Number, longest: Number) -> Number:
    """Return the seconds that Muon adds to the update; 0 under other optimizers.

    elements: elements of a rank's matrices before data ranks divide them. whole, longest: the
    results of `layer_muon_seconds` for the rank's stages.
    """
    if machine.config.optim.name != "muon":
        return 0.0
    sizes = machine.sizes
    given, taken = muon_bytes(machine, elements)
    collect = machine.seconds("all_to_all", given, "owners")
    everywhere = machine.seconds("all_gather", taken, "owners")
    spread = np.where(sizes.zero == 0, everywhere, collect)
    return np.maximum(whole / (sizes.shard * sizes.tensor), longest) + collect + spread


def muon_bytes(machine: Machine, elements: Number) -> tuple[Number, Number]:
    """Return the bytes that a rank sends to owners (its part of the gradients), and those that it
    gets back from them (for everything that it keeps of the weights). elements: as above."""
    size, sizes = machine.rate.width * elements, machine.sizes
    return size / sizes.shard, np.where(sizes.zero == 0, size, size / sizes.shard)
