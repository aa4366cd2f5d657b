"""Activations: bytes that forward passes keep for backward passes, and these for weight passes.

They are exact for what megaframe keeps between two actions.
"""

from __future__ import annotations

from collections.abc import Sequence

from megaframe.architecture.attention import exchanging_ranks, head_widths, latent_width
from megaframe.architecture.experts import has_experts
from megaframe.architecture.stages import StagePlan, stage_layers
from megaframe.config.schema import RunConfig
from megaframe.hardware.chips import WIDTH
from megaframe.schedule import Action, ActionKind


def peak_activations(
    config: RunConfig, plans: Sequence[StagePlan], actions: Sequence[Action]
) -> tuple[int, int]:
    """Return the largest number of bytes kept at any time, and how much messages add to it.

    The first counts what is kept between passes, and all of a block while it is recomputed. A
    message exists from the posting of its receive (from its producer, if that is on this rank) to
    the end of its consumer, or to its send. plans: the stages of this rank. actions: its list.
    """
    size = {plan.number: _stage_bytes(config, plan) for plan in plans}
    left = {plan.number: _stage_weight_pass_bytes(config, plan) for plan in plans}
    again = {plan.number: _recompute_bytes(config, plan) for plan in plans}
    stream = config.train.microbatch * config.train.seq * config.model.hidden
    stream *= WIDTH[config.train.precision]
    listed = {(action.kind, action.stage, action.microbatch) for action in actions}
    kept = waiting = most = together = 0
    for action in actions:
        kind, stage, number = action.kind, action.stage, action.microbatch
        if stage is None:
            continue
        if kind is ActionKind.F:
            kept += size[stage]
        elif kind is ActionKind.B:
            before = kept
            kept += (left[stage] if (ActionKind.W, stage, number) in listed else 0) - size[stage]
            if again[stage]:
                within = max(before, kept) + again[stage]  # at its first block, or at its last
                most, together = max(most, within), max(together, within + waiting)
        elif kind is ActionKind.W:
            kept -= left[stage]
        if kind in (ActionKind.RECV_F, ActionKind.RECV_B):
            waiting += stream
        elif kind in (ActionKind.SEND_F, ActionKind.SEND_B):
            waiting -= stream
        elif kind in _MESSAGES:
            receive, send, step = _MESSAGES[kind]
            arrives = (receive, stage, number) in listed or stage - step in size
            leaves = (send, stage, number) in listed or stage + step in size
            waiting += stream * (leaves - arrives)
        most, together = max(most, kept), max(together, kept + waiting)
    return most, together - most


def _recompute_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the largest number of bytes of a stage's recomputed block while it is recomputed, 0 if
    none is; with the inputs that offload has brought back for up to two blocks."""
    blocks = [block_bytes(config, layer) for layer in plan.blocks[: plan.recomputed]]
    if config.train.recompute == "full" and plan.last:
        blocks += [predictor_bytes(config, index) for index in range(config.model.mtp_depth)]
    brought = 0
    if config.train.offload and blocks:  # inputs of the block in use and of the one before it
        tokens = config.train.microbatch * config.train.seq
        brought = min(2, len(blocks)) * tokens * config.model.hidden
    return max(blocks, default=0) + brought * WIDTH[config.train.precision]


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
    stream = tokens * config.model.hidden * WIDTH[config.train.precision]
    whole = sum(block_bytes(config, layer) for layer in plan.blocks[plan.recomputed :])
    depth = config.model.mtp_depth * plan.last
    streams = len(plan.blocks) + 2 * (plan.last + depth)
    if config.train.offload:
        streams -= plan.recomputed  # the inputs of recomputed blocks are in host memory
    # Every tensor rank has the whole rotary tables; the result is divided by tensor ranks later.
    whole += config.parallel.tensor * rotary_bytes(config)
    predictors = depth * tokens * _norm_bytes(config)
    if config.train.recompute != "full":
        predictors += sum(predictor_bytes(config, index) for index in range(depth))
    return streams * stream + whole + predictors


def _stage_weight_pass_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the bytes that a stage's backward of one microbatch leaves for its weight pass."""
    model = config.model
    joins = 3 * model.mtp_depth * plan.last * model.hidden * WIDTH[config.train.precision]
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
    model, width = config.model, WIDTH[config.train.precision]
    hidden, latent = model.hidden, model.latent
    query, value = head_widths(model)
    if latent is None:
        heads = _qkv_elements(config)
    else:
        # Under selective recompute the queries' product normalises its input again.
        again = model.hidden * (config.train.recompute == "selective")
        heads = latent_width(latent) + latent.kv_rank + (latent.query_rank or again)
        heads += model.heads * (query + latent.head_dim + value)
    elements = 2 * hidden + heads + model.heads * value
    moe, up = model.moe, 2 if model.activation == "swiglu" else 1
    if moe is None or not has_experts(moe, layer):
        return (elements + 2 * hidden + (up + 1) * model.ffn) * width
    of_one, copies = moe.ffn or model.ffn, config.parallel.expert_tensor
    elements += hidden + moe.top_k * (2 * copies * hidden + (up + 1) * of_one)
    if moe.shared:
        elements += (up + 1) * moe.shared * of_one + hidden * (1 + (moe.jitter > 0))
    return elements * width + moe.experts * max(4, width)


def rotary_bytes(config: RunConfig) -> int:
    """Return the bytes of the cosines and sines of a microbatch, which all its samples share."""
    model = config.model
    if model.position != "rotary" or model.emulate is not None:
        return 0
    width = model.rotary_fraction * model.head_dim
    if model.latent is not None:
        width = model.latent.rotary_dim
    return config.train.seq * round(width) * WIDTH[config.train.precision]


def predictor_bytes(config: RunConfig, index: int) -> int:
    """Return the bytes that predictor number `index` keeps of a microbatch, besides the stream that
    it starts from.

    These are five streams (the output of the preceding depth's norm, the embeddings of the tokens
    ahead, both of them normalised, and the result of joining them), and what its block and three
    norms keep.
    """
    tokens = config.train.microbatch * config.train.seq
    streams = 5 * config.model.hidden * WIDTH[config.train.precision]
    block = block_bytes(config, config.model.layers + index)
    return block + tokens * (streams + 3 * _norm_bytes(config))


def _norm_bytes(config: RunConfig) -> int:
    """Return the bytes of statistics that a norm keeps per token: one number in at least fp32, or
    two for layernorm, which on a CPU are as wide as a value."""
    width = WIDTH[config.train.precision]
    return 2 * width if config.model.norm == "layernorm" else max(4, width)


def block_bytes(config: RunConfig, layer: int) -> int:
    """Return the bytes that one block keeps of a microbatch besides its input.

    These are what attention keeps, the stream between attention and MLP, and the MLP's values
    before the activation; and unless they are recomputed, the outputs of both norms with their
    statistics, and the MLP's values after the activation. Statistics are in at least fp32, except
    those of layernorm on a CPU. Experts count as equally loaded, and without their routes.
    """
    model, width = config.model, WIDTH[config.train.precision]
    tokens = config.train.microbatch * config.train.seq
    selective = config.train.recompute == "selective"
    keeps = _attention_elements if model.latent is None else _mla_elements
    elements, statistics = keeps(config)
    experts = model.moe is not None and has_experts(model.moe, layer)
    norms = (0 if selective else 1) + (experts or not selective)
    elements += (1 + norms) * model.hidden
    if model.norm == "layernorm":
        elements += 2 * norms
    else:
        statistics += norms
    size = elements * width + statistics * max(4, width)
    up = 2 if model.activation == "swiglu" else 1
    inner = up + (not selective)
    size += _expert_bytes(config, up, inner) if experts else inner * model.ffn * width
    return tokens * size


def _expert_bytes(config: RunConfig, up: int, inner: int) -> int:
    """Return the bytes per token that experts and their router keep, besides the normalised input.

    up, inner: how often a routed and a shared expert keep a value of their inner width.
    """
    model, width = config.model, WIDTH[config.train.precision]
    moe = model.moe
    assert moe is not None
    of_one = moe.ffn or model.ffn
    parallel = config.parallel
    copies = parallel.expert_tensor  # each of these ranks has the rows of all, and part of a width
    arrive = moe.top_k * copies
    if parallel.expert * copies == 1:
        arrive = 0  # experts select from the normalised rows
    elif parallel.dispatch == "all_gather" and copies == 1:
        arrive = parallel.expert
    elements = arrive * model.hidden + moe.top_k * (copies + up * of_one)
    elements += moe.shared * inner * of_one
    # Jitter keeps its factors and its result; the normalised rows only where experts use them here.
    if moe.jitter:
        elements += (1 + (arrive == 0 or moe.shared > 0)) * model.hidden
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
    turned, normed = model.position == "rotary", model.qk_norm
    each, groups = model.heads // model.kv_heads, max(model.kv_heads, tensor)
    queries, keys = model.heads * model.head_dim, groups * model.head_dim
    apart = each > 1 and groups > tensor  # the queries of several groups are not contiguous
    made = turned or normed or apart
    if sharing > 1:  # exchanged tensors are new ones, and so are those that a ring passes on
        copies = max(1, sharing * tensor // groups)
        elements, seen = queries + 2 * keys * copies * (1 + ring), normed
    elif ring:
        elements, seen = queries * made + 2 * keys, normed or not made
    else:
        elements = queries * made + keys * (turned or normed) + keys * turned
        seen = normed or not turned
    elements += _qkv_elements(config) * seen + queries * (apart and normed)
    elements += queries * (1 + (sharing > 1))  # the output, before and after the exchange back
    return elements, model.heads + normed * (model.heads + groups)


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
