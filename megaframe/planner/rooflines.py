"""Rooflines of a layout: its products and attention against the chip's memory, and its axes against
their links.

Communication has a roofline, as memory has: a transfer can be hidden if the operations per byte
moved are at least the operations that the chip does in the time of one byte, the ridge of the tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megaframe.architecture.layer import LayerDescription, MixerDescription
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.moe import count_near_experts
from megaframe.architecture.stages import compute_block_work
from megaframe.config.schema import RunConfig
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout
from megaframe.planner.constants import Constants
from megaframe.planner.data_parallel_times import compute_block_load
from megaframe.planner.layout_sizes import make_layout_sizes
from megaframe.planner.local_products import compute_local_product
from megaframe.planner.machine import Machine, compute_axis_span, find_outermost_tier
from megaframe.planner.theory.roofline import (
    compute_attention_intensity,
    compute_product_intensity,
    compute_ridge,
    find_attention_seq,
    find_product_rows,
)


@dataclass(frozen=True)
class OperatorRoofline:
    """The roofline of an operator in the forward pass of a microbatch.

    Attributes:
        intensity: FLOPs per byte moved in the chip's memory.
        ridge: FLOPs of the chip in the time of one such byte.
        tokens: Tokens of a rank's microbatch at which the intensity is the ridge; None if no number
            reaches it, or for attention.
        seq: The same of attention: tokens of a sample.
    """

    operator: str
    intensity: float
    ridge: float
    tokens: float | None = None
    seq: float | None = None

    @property
    def is_compute_bound(self) -> bool:
        """Whether the chip computes for as long as its memory moves."""
        return self.intensity >= self.ridge


def compute_operator_rooflines(machine: Machine) -> Iterator[OperatorRoofline]:
    """Yield the rooflines of the products and of the attention of each kind of block, and of the
    output head, on one rank.

    Args:
        machine: The chip, and the run with its layout.
    """
    model = machine.config.model
    kinds = dict.fromkeys(describe_block(model, layer) for layer in range(model.layers))
    listed: set[str] = set()
    for block in kinds:
        for layer in block.layers:
            for name, linear in _list_linears(layer, layer.name):
                if name not in listed:
                    yield _compute_product_roofline(machine, name, linear)
                listed.add(name)
        for mixer in block.mixers:
            if mixer.has_scores and (name := _name_scores(mixer)) not in listed:
                listed.add(name)
                yield _compute_attention_roofline(machine, name, mixer)
    if model.vocab:
        head = LinearSpec((model.hidden,), (model.vocab,), std=0.0, split=0)
        yield _compute_product_roofline(machine, "output head", head)


def _list_linears(layer: LayerDescription, name: str) -> Iterator[tuple[str, LinearSpec]]:
    """Yield the products with weights of a layer, with their dotted names."""
    for part_name, part in layer.parts.items():
        if isinstance(part, LinearSpec):
            yield f"{name}.{part_name}", part
        elif isinstance(part, LayerDescription):
            yield from _list_linears(part, f"{name}.{part_name}")


def _name_scores(mixer: MixerDescription) -> str:
    window = "" if mixer.window is None else f" (window {mixer.window})"
    return f"scores of {mixer.name}{window}"


def _compute_product_roofline(machine: Machine, name: str, linear: LinearSpec) -> OperatorRoofline:
    _, rows, outputs, terms = compute_local_product(machine.sizes, machine.config.train.seq, linear)
    rate = machine.linear
    ridge = compute_ridge(rate.flops, rate.read)
    needed = find_product_rows(ridge, outputs, terms, rate.width)
    return OperatorRoofline(
        name,
        float(compute_product_intensity(rows, outputs, terms, rate.width)),
        ridge,
        tokens=None if needed is None else float(machine.tokens * needed / rows),
    )


def _compute_attention_roofline(
    machine: Machine, name: str, mixer: MixerDescription
) -> OperatorRoofline:
    """Return the roofline of fused attention. With a window its intensity does not grow with the
    sample, so no length reaches the ridge if this one does not."""
    rate, seq = machine.rate, machine.config.train.seq
    scores, values = mixer.list_batched_products(seq)[:2]
    queries = float(scores.number * (scores.terms + values.outputs))
    keys = float(mixer.ring_groups * mixer.ring_width)
    ridge = compute_ridge(rate.attention, rate.read)
    if scores.gathered:
        # Each query reads its own keys, whose number does not grow with the sample.
        seen = scores.causal_share * scores.outputs
        own = queries, seen * scores.terms, scores.causal_share, rate.width
        return OperatorRoofline(name, compute_attention_intensity(scores.outputs, *own), ridge)
    shape = queries, keys, scores.causal_share, rate.width
    return OperatorRoofline(
        name,
        compute_attention_intensity(seq, *shape),
        ridge,
        seq=None if mixer.window else find_attention_seq(ridge, *shape),
    )


@dataclass(frozen=True)
class CommunicationRoofline:
    """The roofline of one axis of a layout.

    The axis is bound by compute if intensity is at least ridge.

    Attributes:
        tier: The tier of its transfers.
        intensity: Operations of a rank per byte that it moves for this axis.
        ridge: Operations in the time of one byte on the tier.
    """

    axis: str
    tier: str
    intensity: float
    ridge: float

    @property
    def is_compute_bound(self) -> bool:
        """Whether compute can hide the transfers."""
        return self.intensity >= self.ridge


def compute_communication_rooflines(
    config: RunConfig, layout: Layout, cluster: Cluster, constants: Constants
) -> Iterator[CommunicationRoofline]:
    """Yield the communication roofline of each axis that has more than one rank.

    Bytes and operations are those of the last block for one microbatch. What data ranks exchange
    once per step counts divided by the number of microbatches.

    Args:
        config: The run.
        layout: The sizes of its axes.
        cluster: The chips and links.
        constants: What kernels and collectives reach there.
    """
    machine = Machine(
        config, cluster, constants, make_layout_sizes(config.parallel, config.train, layout)
    )
    model, width = config.model, machine.rate.width
    work = compute_block_work(config.model, config.train, model.layers - 1)
    rows = float(machine.tokens)
    flops = rows * (work.forward + work.backward + work.weight) / layout.tensor
    microbatches = config.train.global_batch // (config.train.microbatch * layout.data)
    load = compute_block_load(machine, model.layers - 1)
    block = describe_block(model, model.layers - 1)
    traffic = block.tensor_traffic
    near = count_near_experts(config.parallel, config.parallel.node_size or cluster.node)
    moved = block.count_traffic(config.parallel, config.train.seq, near)
    gathered_rows = (traffic.forward + traffic.backward) * width * rows
    gathered_rows += block.count_gathered_bytes(config.train.seq, width) * rows
    gathered = 2 * width if config.parallel.zero == 3 else 0
    bytes_per_parameter = gathered + 4 if config.parallel.zero >= 2 else 8 / microbatches
    bytes_by_axis = {
        "tensor": gathered_rows * (layout.tensor - 1) / layout.tensor,
        "data": (load.dense + load.experts) * bytes_per_parameter,
        **{
            axis: rows
            * (sent.count_forward_bytes(width) + sent.count_backward_bytes(width))
            / layout.tensor
            for axis, sent in moved.items()
        },
    }
    for axis, size in bytes_by_axis.items():
        if layout.sizes[axis] > 1 and size > 0:
            tier = find_outermost_tier(cluster, *compute_axis_span(axis, layout))
            share = constants.get_link_efficiency(cluster.tiers.index(tier))
            ridge = compute_ridge(machine.rate.flops, tier.bandwidth * share)
            yield CommunicationRoofline(axis, tier.name, flops / float(size), ridge)
