"""Activations: what forward passes keep for backward ones, and these for weight passes.

Exact for what megaframe keeps between two actions.
"""

from __future__ import annotations

from collections.abc import Sequence

from megaframe.config.schema import RunConfig
from megaframe.plan.chips import WIDTH
from megaframe.plan.context import exchanging_ranks
from megaframe.plan.experts import has_experts
from megaframe.plan.matrices import head_widths, latent_width
from megaframe.plan.stages import StagePlan, stage_layers
from megaframe.schedule import Action, Kind


def activations(
    config: RunConfig, plans: Sequence[StagePlan], actions: Sequence[Action]
) -> tuple[int, int]:
    """Most bytes kept between passes at any time, with everything of a block while it runs again;
    and how much more are messages, from the posting of a receive, or their producer, to the end of
    their consumer or to their send."""
    size = {plan.number: _stage_bytes(config, plan) for plan in plans}
    left = {plan.number: _stage_left(config, plan) for plan in plans}
    again = {plan.number: _again_bytes(config, plan) for plan in plans}
    stream = config.train.microbatch * config.train.seq * config.model.hidden
    stream *= WIDTH[config.train.precision]
    listed = {(action.kind, action.stage, action.microbatch) for action in actions}
    kept = waiting = most = together = 0
    for action in actions:
        kind, stage, number = action.kind, action.stage, action.microbatch
        if stage is None:
            continue
        if kind is Kind.F:
            kept += size[stage]
        elif kind is Kind.B:
            before = kept
            kept += (left[stage] if (Kind.W, stage, number) in listed else 0) - size[stage]
            if again[stage]:
                within = max(before, kept) + again[stage]  # in its first block, or in its last
                most, together = max(most, within), max(together, within + waiting)
        elif kind is Kind.W:
            kept -= left[stage]
        if kind in (Kind.RECV_F, Kind.RECV_B):
            waiting += stream
        elif kind in (Kind.SEND_F, Kind.SEND_B):
            waiting -= stream
        elif kind in _MESSAGES:
            receive, send, step = _MESSAGES[kind]
            arrives = (receive, stage, number) in listed or stage - step in size
            leaves = (send, stage, number) in listed or stage + step in size
            waiting += stream * (leaves - arrives)
        most, together = max(most, kept), max(together, kept + waiting)
    return most, together - most


def _again_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Most bytes of a block of a stage that runs again, while it does."""
    blocks = [block_bytes(config, layer) for layer in plan.blocks[: plan.recomputed]]
    if config.train.recompute == "full" and plan.last:
        blocks += [predictor_bytes(config, index) for index in range(config.model.mtp_depth)]
    brought = 0
    if config.train.offload and blocks:  # the one in use and the one that comes before it
        tokens = config.train.microbatch * config.train.seq
        brought = min(2, len(blocks)) * tokens * config.model.hidden
    return max(blocks, default=0) + brought * WIDTH[config.train.precision]


_MESSAGES = {Kind.F: (Kind.RECV_F, Kind.SEND_F, 1), Kind.B: (Kind.RECV_B, Kind.SEND_B, -1)}
"""How a pass gets what it takes, where what it makes goes, and how much further the next stage is,
which may be on the same rank."""


def _stage_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Bytes that a stage keeps of one microbatch: each block's input, all else of the blocks that
    do not run again, the tables of rotation, and for each depth the head's input with its gradient,
    and all else of the predictors."""
    tokens = config.train.microbatch * config.train.seq
    stream = tokens * config.model.hidden * WIDTH[config.train.precision]
    whole = sum(block_bytes(config, layer) for layer in plan.blocks[plan.recomputed :])
    depth = config.model.mtp_depth * plan.last
    streams = len(plan.blocks) + 2 * (plan.last + depth)
    if config.train.offload:
        streams -= plan.recomputed  # which are in the host's memory
    # Every tensor rank has the tables of rotation, all of them.
    whole += config.parallel.tensor * rotary_bytes(config)
    predictors = depth * tokens * _norm_bytes(config)
    if config.train.recompute != "full":
        predictors += sum(predictor_bytes(config, index) for index in range(depth))
    return streams * stream + whole + predictors


def _stage_left(config: RunConfig, plan: StagePlan) -> int:
    """Bytes that a stage's backward of one microbatch leaves for its weight pass."""
    model = config.model
    joins = 3 * model.mtp_depth * plan.last * model.hidden * WIDTH[config.train.precision]
    joins *= config.train.microbatch * config.train.seq
    rotary = config.parallel.tensor * rotary_bytes(config)
    return left_bytes(config, stage_layers(model, plan)) + joins + rotary


def left_bytes(config: RunConfig, layers: Sequence[int]) -> int:
    """Bytes of one microbatch that the backward of the blocks of these layers leaves for their
    weight pass: of all linears the inputs, and the gradients of what came of them."""
    if config.model.emulate is not None:
        return 0
    tokens = config.train.microbatch * config.train.seq
    return tokens * sum(_block_left(config, layer) for layer in layers)


def _block_left(config: RunConfig, layer: int) -> int:
    """Bytes of a token of one block."""
    model, width = config.model, WIDTH[config.train.precision]
    hidden, latent = model.hidden, model.latent
    query, value = head_widths(model)
    if latent is None:
        heads = _queries_keys_values(config)
    else:
        again = model.hidden * (config.train.recompute == "selective")  # normalised for both
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
    """Bytes of the cosines and sines of a microbatch, which are alike for all of its samples."""
    model = config.model
    if model.position != "rotary" or model.emulate is not None:
        return 0
    width = model.rotary_fraction * model.head_dim
    if model.latent is not None:
        width = model.latent.rotary_dim
    return config.train.seq * round(width) * WIDTH[config.train.precision]


def predictor_bytes(config: RunConfig, index: int) -> int:
    """Bytes that a predictor keeps of a microbatch beside the stream that it starts from: that
    after the norm of the depth before, the embeddings ahead, both normalised, what they are joined
    into, and all that its block and three norms keep."""
    tokens = config.train.microbatch * config.train.seq
    streams = 5 * config.model.hidden * WIDTH[config.train.precision]
    block = block_bytes(config, config.model.layers + index)
    return block + tokens * (streams + 3 * _norm_bytes(config))


def _norm_bytes(config: RunConfig) -> int:
    """Statistics that a norm keeps of a token: one in at least fp32, or the two of layernorm, which
    on a CPU are as wide as a value."""
    width = WIDTH[config.train.precision]
    return 2 * width if config.model.norm == "layernorm" else max(4, width)


def block_bytes(config: RunConfig, layer: int) -> int:
    """Bytes that one block keeps of a microbatch beside its input.

    What attention keeps, the stream between attention and MLP, and the MLP before its activation;
    unless they are computed again, also both norms' outputs with their statistics, and the MLP
    after its activation. Statistics are in at least fp32, but for those of layernorm on a CPU. Of
    experts as if all were equally busy, and without what their routes take.
    """
    model, width = config.model, WIDTH[config.train.precision]
    tokens = config.train.microbatch * config.train.seq
    selective = config.train.recompute == "selective"
    keeps = _attention_keeps if model.latent is None else _latent_attention_keeps
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
    """Bytes that experts and their router keep of a token beside what it normalises. up, inner:
    times that an expert and a shared one keep their inner width."""
    model, width = config.model, WIDTH[config.train.precision]
    moe = model.moe
    assert moe is not None
    of_one = moe.ffn or model.ffn
    parallel = config.parallel
    copies = parallel.expert_tensor  # each of these has the rows of all, and part of a width
    arrive = moe.top_k * copies
    if parallel.expert * copies == 1:
        arrive = 0  # experts pick from the rows that are normalised
    elif parallel.dispatch == "all_gather" and copies == 1:
        arrive = parallel.expert
    elements = arrive * model.hidden + moe.top_k * (copies + up * of_one)
    elements += moe.shared * inner * of_one
    if moe.jitter:  # rows that travel are not kept as they were normalised, but for shared experts
        elements += (1 + (arrive == 0 or moe.shared > 0)) * model.hidden
    balanced = moe.balance_loss > 0 and moe.balance != "none"
    scores = moe.experts * (1 + balanced) + balanced
    scores += (moe.top_k + 2) * moe.normalise + (moe.z_loss > 0)
    return elements * width + scores * max(4, width) + 8 * moe.top_k + balanced


def _attention_keeps(config: RunConfig) -> tuple[int, int]:
    """Elements and statistics of a token: what attention takes and gives, with one log-sum-exp a
    head, and the product before it while norms of queries and keys, or attention, see parts of it
    as they lie there."""
    model, tensor = config.model, config.parallel.tensor
    sharing = exchanging_ranks(config.parallel)
    ring = config.parallel.context > sharing
    turned, normed = model.position == "rotary", model.qk_norm
    each, groups = model.heads // model.kv_heads, max(model.kv_heads, tensor)
    queries, keys = model.heads * model.head_dim, groups * model.head_dim
    apart = each > 1 and groups > tensor  # queries of one group do not lie beside those of the next
    made = turned or normed or apart
    if sharing > 1:  # what is exchanged is new, and so is what goes round a ring
        copies = max(1, sharing * tensor // groups)
        elements, seen = queries + 2 * keys * copies * (1 + ring), normed
    elif ring:
        elements, seen = queries * made + 2 * keys, normed or not made
    else:
        elements = queries * made + keys * (turned or normed) + keys * turned
        seen = normed or not turned
    elements += _queries_keys_values(config) * seen + queries * (apart and normed)
    elements += queries * (1 + (sharing > 1))  # given, and given back
    return elements, model.heads + normed * (model.heads + groups)


def _queries_keys_values(config: RunConfig) -> int:
    """Elements of a token that come of the product before attention; where there are fewer groups
    than tensor ranks, neighbours make the same ones."""
    model = config.model
    groups = max(model.kv_heads, config.parallel.tensor)
    return groups * (model.heads // model.kv_heads + 2) * model.head_dim


def _latent_attention_keeps(config: RunConfig) -> tuple[int, int]:
    """The same; of the latents too, and unless they are computed again those that are normalised,
    with a statistic each."""
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
