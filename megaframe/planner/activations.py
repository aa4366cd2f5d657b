"""Activations: bytes that forward passes keep for backward passes, and these for weight passes.

They are exact for what megaframe keeps between two actions.
"""

from __future__ import annotations

from collections.abc import Sequence

from megaframe.architecture.attention import exchanging_ranks, head_widths, latent_width
from megaframe.architecture.experts import has_experts
from megaframe.architecture.stages import StagePlan, stage_layers
from megaframe.config.schema import RunConfig
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.schedule import Action, ActionKind


def peak_activations(
    config: RunConfig, plans: Sequence[StagePlan], actions: Sequence[Action]
) -> tuple[int, int]:
    """Return the largest number of bytes kept at any time, and how much messages add to it.

    The first counts what is kept between passes, and all of a block while it is recomputed. A
    message exists from the posting of its receive (from its producer, if that is on this rank) to
    the end of its consumer, or to its send.

    Args:
        config: model, precision, recompute and microbatch.
        plans: the stages of this rank.
        actions: its list of actions, in order.
    """
    size = {plan.number: _stage_bytes(config, plan) for plan in plans}
    weight_pass_size = {plan.number: _stage_weight_pass_bytes(config, plan) for plan in plans}
    recompute_size = {plan.number: _recompute_bytes(config, plan) for plan in plans}
    stream = config.train.microbatch * config.train.seq * config.model.hidden
    stream *= DTYPE_BYTES[config.train.precision]
    listed = {(action.kind, action.stage, action.microbatch) for action in actions}
    kept_bytes = message_bytes = peak = peak_with_messages = 0
    for action in actions:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if stage is None:
            continue
        if kind is ActionKind.F:
            kept_bytes += size[stage]
        elif kind is ActionKind.B:
            before = kept_bytes
            if (ActionKind.W, stage, microbatch) in listed:
                kept_bytes += weight_pass_size[stage]
            kept_bytes -= size[stage]
            if recompute_size[stage]:
                # The peak is at the first block that is recomputed, or at the last.
                in_recompute = max(before, kept_bytes) + recompute_size[stage]
                peak = max(peak, in_recompute)
                peak_with_messages = max(peak_with_messages, in_recompute + message_bytes)
        elif kind is ActionKind.W:
            kept_bytes -= weight_pass_size[stage]
        if kind in (ActionKind.RECV_F, ActionKind.RECV_B):
            message_bytes += stream
        elif kind in (ActionKind.SEND_F, ActionKind.SEND_B):
            message_bytes -= stream
        elif kind in _MESSAGES:
            receive, send, step = _MESSAGES[kind]
            arrives = (receive, stage, microbatch) in listed or stage - step in size
            leaves = (send, stage, microbatch) in listed or stage + step in size
            message_bytes += stream * (leaves - arrives)
        peak = max(peak, kept_bytes)
        peak_with_messages = max(peak_with_messages, kept_bytes + message_bytes)
    return peak, peak_with_messages - peak


def _recompute_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the largest number of bytes of a stage's recomputed block while it is recomputed, 0 if
    none is; with the inputs that offload has brought back for up to two blocks."""
    blocks = [block_bytes(config, layer) for layer in plan.blocks[: plan.recomputed]]
    if config.train.recompute == "full" and plan.last:
        blocks += [predictor_bytes(config, index) for index in range(config.model.mtp_depth)]
    offloaded_inputs = 0
    if config.train.offload and blocks:  # inputs of the block in use and of the one before it
        tokens = config.train.microbatch * config.train.seq
        offloaded_inputs = min(2, len(blocks)) * tokens * config.model.hidden
    return max(blocks, default=0) + offloaded_inputs * DTYPE_BYTES[config.train.precision]


_MESSAGES = {
    ActionKind.F: (ActionKind.RECV_F, ActionKind.SEND_F, 1),
    ActionKind.B: (ActionKind.RECV_B, ActionKind.SEND_B, -1),
}
"""For each kind of pass: the action that receives its input, the action that sends its output, and
the distance to the next stage in its direction (which may be on the same rank)."""


def _stage_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the bytes that a stage keeps of one microbatch.

    These are the input of each block, everything else of the blocks that are not recomputed, and
    the rotary tables. On the last stage, also the head's input and its gradient, once for the model
    and once per predictor, and everything else of the predictors.
    """
    tokens = config.train.microbatch * config.train.seq
    stream = tokens * config.model.hidden * DTYPE_BYTES[config.train.precision]
    kept = sum(block_bytes(config, layer) for layer in plan.blocks[plan.recomputed :])
    depth = config.model.mtp_depth * plan.last
    streams = len(plan.blocks) + 2 * (plan.last + depth)
    if config.train.offload:
        streams -= plan.recomputed  # the inputs of recomputed blocks are in host memory
    # Every tensor rank has the whole rotary tables; the result is divided by tensor ranks later.
    kept += config.parallel.tensor * rotary_bytes(config)
    predictors = depth * tokens * _norm_bytes(config)
    if config.train.recompute != "full":
        predictors += sum(predictor_bytes(config, index) for index in range(depth))
    return streams * stream + kept + predictors


def _stage_weight_pass_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the bytes that a stage's backward of one microbatch leaves for its weight pass."""
    model = config.model
    joins = 3 * model.mtp_depth * plan.last * model.hidden * DTYPE_BYTES[config.train.precision]
    joins *= config.train.microbatch * config.train.seq
    rotary = config.parallel.tensor * rotary_bytes(config)
    return weight_pass_bytes(config, stage_layers(model, plan)) + joins + rotary


def weight_pass_bytes(config: RunConfig, layers: Sequence[int]) -> int:
    """Return the bytes of one microbatch that the backward of the blocks of `layers` leaves for
    their weight pass: the inputs of all linears, and the gradients of their outputs."""
    if config.model.emulate is not None:
        return 0
    tokens = config.train.microbatch * config.train.seq
    return tokens * sum(_block_weight_pass_bytes(config, layer) for layer in layers)


def _block_weight_pass_bytes(config: RunConfig, layer: int) -> int:
    """Return the bytes per token that the backward of one block leaves for its weight pass."""
    model, width = config.model, DTYPE_BYTES[config.train.precision]
    hidden, latent = model.hidden, model.latent
    query, value = head_widths(model)
    if latent is None:
        heads = _qkv_elements(config)
    else:
        # Under selective recompute the queries' product normalises its input again.
        recomputed_input = model.hidden * (config.train.recompute == "selective")
        heads = latent_width(latent) + latent.kv_rank + (latent.query_rank or recomputed_input)
        heads += model.heads * (query + latent.head_dim + value)
    elements = 2 * hidden + heads + model.heads * value
    moe, up = model.moe, 2 if model.activation == "swiglu" else 1
    if moe is None or not has_experts(moe, layer):
        return (elements + 2 * hidden + (up + 1) * model.ffn) * width
    expert_width, expert_copies = moe.ffn or model.ffn, config.parallel.expert_tensor
    elements += hidden + moe.top_k * (2 * expert_copies * hidden + (up + 1) * expert_width)
    if moe.shared:
        elements += (up + 1) * moe.shared * expert_width + hidden * (1 + (moe.jitter > 0))
    return elements * width + moe.experts * max(4, width)


def rotary_bytes(config: RunConfig) -> int:
    """Return the bytes of the cosines and sines of a microbatch, which all its samples share."""
    model = config.model
    if model.position != "rotary" or model.emulate is not None:
        return 0
    width = model.rotary_fraction * model.head_dim
    if model.latent is not None:
        width = model.latent.rotary_dim
    return config.train.seq * round(width) * DTYPE_BYTES[config.train.precision]


def predictor_bytes(config: RunConfig, index: int) -> int:
    """Return the bytes that predictor number `index` keeps of a microbatch, besides the stream that
    it starts from.

    These are five streams (the output of the preceding depth's norm, the embeddings of the tokens
    ahead, both of them normalised, and the result of joining them), and what its block and three
    norms keep.
    """
    tokens = config.train.microbatch * config.train.seq
    streams = 5 * config.model.hidden * DTYPE_BYTES[config.train.precision]
    block = block_bytes(config, config.model.layers + index)
    return block + tokens * (streams + 3 * _norm_bytes(config))


def _norm_bytes(config: RunConfig) -> int:
    """Return the bytes of statistics that a norm keeps per token: one number in at least fp32, or
    two for layernorm, which on a CPU are as wide as a value."""
    width = DTYPE_BYTES[config.train.precision]
    return 2 * width if config.model.norm == "layernorm" else max(4, width)


def block_bytes(config: RunConfig, layer: int) -> int:
    """Return the bytes that one block keeps of a microbatch besides its input.

    These are what attention keeps, the stream between attention and MLP, and the MLP's values
    before the activation; and unless they are recomputed, the outputs of both norms with their
    statistics, and the MLP's values after the activation. Statistics are in at least fp32, except
    those of layernorm on a CPU. Experts count as equally loaded, and without their routes.
    """
    model, width = config.model, DTYPE_BYTES[config.train.precision]
    tokens = config.train.microbatch * config.train.seq
    selective = config.train.recompute == "selective"
    attention = _attention_elements if model.latent is None else _mla_elements
    elements, statistics = attention(config)
    experts = model.moe is not None and has_experts(model.moe, layer)
    norms = (0 if selective else 1) + (experts or not selective)
    elements += (1 + norms) * model.hidden
    if model.norm == "layernorm":
        elements += 2 * norms
    else:
        statistics += norms
    size = elements * width + statistics * max(4, width)
    up = 2 if model.activation == "swiglu" else 1
    inner_copies = up + (not selective)
    size += _expert_bytes(config, up, inner_copies) if experts else inner_copies * model.ffn * width
    return tokens * size


def _expert_bytes(config: RunConfig, up: int, inner: int) -> int:
    """Return the bytes per token that experts and their router keep, besides the normalised input.

    Args:
        up, inner: how often a routed and a shared expert keep a value of their inner width.
    """
    model, width = config.model, DTYPE_BYTES[config.train.precision]
    moe = model.moe
    assert moe is not None
    expert_width = moe.ffn or model.ffn
    parallel = config.parallel
    copies = parallel.expert_tensor  # each of these ranks has the rows of all, and part of a width
    arriving = moe.top_k * copies
    if parallel.expert * copies == 1:
        arriving = 0  # experts select from the normalised rows
    elif parallel.dispatch == "all_gather" and copies == 1:
        arriving = parallel.expert
    elements = arriving * model.hidden + moe.top_k * (copies + up * expert_width)
    elements += moe.shared * inner * expert_width
    # Jitter keeps its factors and its result; the normalised rows only where experts use them here.
    if moe.jitter:
        elements += (1 + (arriving == 0 or moe.shared > 0)) * model.hidden
    balanced = moe.balance_loss > 0 and moe.balance != "none"
    scores = moe.experts * (1 + balanced) + balanced
    scores += (moe.top_k + 2) * moe.normalise + (moe.z_loss > 0)
    return elements * width + scores * max(4, width) + 8 * moe.top_k + balanced


def _attention_elements(config: RunConfig) -> tuple[int, int]:
    """Return the elements and the statistics per token that attention keeps.

    These are its inputs and its output, with one log-sum-exp per head. The output of the product
    before it counts too, where norms of queries and keys, or attention, use views of it.
    """
    model, tensor = config.model, config.parallel.tensor
    sharing = exchanging_ranks(config.parallel)
    ring = config.parallel.context > sharing
    rotated, normalised = model.position == "rotary", model.qk_norm
    queries_per_group, groups = model.heads // model.kv_heads, max(model.kv_heads, tensor)
    queries, keys = model.heads * model.head_dim, groups * model.head_dim
    # The queries of several groups are not contiguous.
    is_scattered = queries_per_group > 1 and groups > tensor
    copies_queries = rotated or normalised or is_scattered
    if sharing > 1:  # exchanged tensors are new ones, and so are those that a ring passes on
        copies = max(1, sharing * tensor // groups)
        elements, keeps_product = queries + 2 * keys * copies * (1 + ring), normalised
    elif ring:
        elements = queries * copies_queries + 2 * keys
        keeps_product = normalised or not copies_queries
    else:
        elements = queries * copies_queries + keys * (rotated or normalised) + keys * rotated
        keeps_product = normalised or not rotated
    elements += _qkv_elements(config) * keeps_product + queries * (is_scattered and normalised)
    elements += queries * (1 + (sharing > 1))  # the output, before and after the exchange back
    return elements, model.heads + normalised * (model.heads + groups)


def _qkv_elements(config: RunConfig) -> int:
    """Return the elements per token of queries, keys and values, summed over tensor ranks. With
    fewer groups than tensor ranks, neighbouring ranks compute the same group."""
    model = config.model
    groups = max(model.kv_heads, config.parallel.tensor)
    return groups * (model.heads // model.kv_heads + 2) * model.head_dim


def _mla_elements(config: RunConfig) -> tuple[int, int]:
    """Return what `_attention_elements` does, for latent attention: with the latents, and unless
    these are recomputed, with the normalised latents and a statistic for each."""
    model, latent = config.model, config.model.latent
    assert latent is not None
    query, value = head_widths(model)
    sharing = exchanging_ranks(config.parallel)
    elements = latent_width(latent) + 2 * model.heads * (query + value)
    if sharing > 1:
        elements += model.heads * (value + (query + value) * (config.parallel.context > sharing))
    statistics = model.heads
    if config.train.recompute != "selective":
        elements += latent_width(latent) - latent.rotary_dim
        statistics += 1 + (latent.query_rank is not None)
    return elements, statistics
