"""Nodes: what it costs when ranks that talk all the time do not share one."""

from __future__ import annotations

from math import gcd

from megaframe.config.schema import RunConfig
from megaframe.layout import Layout
from megaframe.plan.chips import WIDTH
from megaframe.plan.matrices import latent_width

BETWEEN_NODES = 50e9
"""Bytes a second of one rank to another node: a 400 Gb/s adapter per rank."""
WITHIN_NODE = 450e9
"""Bytes a second of one rank to its neighbours: NVLink 4, one direction."""


def crossing(config: RunConfig, layout: Layout, node_size: int) -> str | None:
    """A warning when tensor ranks lie on several nodes of `node_size` ranks, with the predicted
    cost; None when each group is within one.

    The tensor axis is the fastest, so a group is within a node when the nodes hold whole groups.
    """
    tensor = layout.tensor
    if tensor == 1 or node_size >= layout.world or node_size % tensor == 0:
        return None
    size = tensor_bytes(config, layout)
    apart, together = size / BETWEEN_NODES, size / WITHIN_NODE
    return (
        f"parallel.tensor={tensor} crosses nodes of parallel.node_size={node_size} ranks: each "
        f"rank moves {size / 1e9:.3g} GB a step, {apart:.3g} s at {BETWEEN_NODES / 1e9:g} GB/s "
        f"between nodes instead of {together:.3g} s at {WITHIN_NODE / 1e9:g} GB/s within one; "
        f"parallel.tensor={gcd(tensor, node_size)} would stay inside"
    )


def tensor_bytes(config: RunConfig, layout: Layout) -> float:
    """Bytes that a rank moves over the tensor axis in a step, activations only.

    Per layer and microbatch 10 (t-1)/t b s h elements: each of four linears once in each direction,
    and the inputs of two gathered again in backward; the first and the last stage 2 more each.
    Where layers run again in backward, 4 more for each of them are not counted. Latent attention
    moves its latents in place of h elements, and their rotated part twice. A depth of multi-token
    prediction is a layer and has both ends.
    """
    model, train = config.model, config.train
    tokens = train.microbatch * train.seq / layout.context
    microbatches = train.global_batch // (train.microbatch * layout.data)
    layer, latent = 10 * model.hidden, model.latent
    if latent is not None:
        whole = model.hidden * (latent.query_rank is None)
        layer = 7 * model.hidden + 3 * (whole + latent_width(latent)) - latent.rotary_dim
    ends = 4 * model.hidden * (1 + model.mtp_depth)
    a_token = layer * (model.layers + model.mtp_depth) + ends
    elements = a_token * tokens * microbatches / layout.pipeline
    return elements * WIDTH[train.precision] * (layout.tensor - 1) / layout.tensor
