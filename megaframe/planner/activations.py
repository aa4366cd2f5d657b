"""Activations: bytes that forward passes keep for backward passes, and these for weight passes.

They are exact for what megaframe keeps between two actions.
"""

from __future__ import annotations

from collections.abc import Sequence

from megaframe.architecture.block import describe_block, describe_norm, list_mixers
from megaframe.architecture.stages import StagePlan, list_stage_layers
from megaframe.config.schema import RunConfig
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.schedule import Action, ActionKind


def compute_peak_activations(
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
    size = {plan.number: _compute_stage_bytes(config, plan) for plan in plans}
    weight_pass_size = {
        plan.number: _compute_stage_weight_pass_bytes(config, plan) for plan in plans
    }
    recompute_size = {plan.number: _compute_recompute_bytes(config, plan) for plan in plans}
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


def _compute_recompute_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the largest number of bytes of a stage's recomputed block while it is recomputed, 0 if
    none is; with the inputs that offload has brought back for up to two blocks."""
    blocks = [compute_block_bytes(config, layer) for layer in plan.blocks[: plan.recomputed]]
    if config.train.recompute == "full" and plan.last:
        blocks += [
            compute_predictor_bytes(config, index) for index in range(config.model.mtp_depth)
        ]
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


def _compute_stage_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the bytes that a stage keeps of one microbatch.

    These are the input of each block, everything else of the blocks that are not recomputed, and
    the rotary tables. On the last stage, also the head's input and its gradient and what its norm
    keeps, once for the model and once per predictor, and everything else of the predictors.
    """
    tokens = config.train.microbatch * config.train.seq
    stream = tokens * config.model.hidden * DTYPE_BYTES[config.train.precision]
    saved = sum(compute_block_bytes(config, layer) for layer in plan.blocks[plan.recomputed :])
    depth = config.model.mtp_depth * plan.last
    streams = len(plan.blocks) + 2 * (plan.last + depth)
    if config.train.offload:
        streams -= plan.recomputed  # the inputs of recomputed blocks are in host memory
    # Every tensor rank has the whole rotary tables; the result is divided by tensor ranks later.
    saved += config.parallel.tensor * compute_rotary_bytes(config)
    ends = (plan.last + depth) * tokens * _compute_norm_bytes(config)
    if config.train.recompute != "full":
        ends += sum(compute_predictor_bytes(config, index) for index in range(depth))
    return streams * stream + saved + ends


def _compute_stage_weight_pass_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the bytes that a stage's backward of one microbatch leaves for its weight pass."""
    model = config.model
    joins = 3 * model.mtp_depth * plan.last * model.hidden * DTYPE_BYTES[config.train.precision]
    joins *= config.train.microbatch * config.train.seq
    rotary = config.parallel.tensor * compute_rotary_bytes(config)
    return compute_weight_pass_bytes(config, list_stage_layers(model, plan)) + joins + rotary


def compute_weight_pass_bytes(config: RunConfig, layers: Sequence[int]) -> int:
    """Return the bytes of one microbatch that the backward of the blocks of `layers` leaves for
    their weight pass: the inputs of all linears, and the gradients of their outputs."""
    if config.model.emulate is not None:
        return 0
    train, width = config.train, DTYPE_BYTES[config.train.precision]
    blocks = (describe_block(config.model, layer) for layer in layers)
    saved = (block.count_saved_for_weights(config.parallel, train.recompute) for block in blocks)
    return round(train.microbatch * train.seq * sum(each.count_bytes(width) for each in saved))


def compute_rotary_bytes(config: RunConfig) -> int:
    """Return the bytes of the cosines and sines of a microbatch, which all its samples share."""
    if config.model.emulate is not None:
        return 0
    tables = {mixer.rotary for mixer in list_mixers(config.model)} - {None}
    width = sum(table.width for table in tables if table is not None)
    return config.train.seq * width * DTYPE_BYTES[config.train.precision]


def compute_predictor_bytes(config: RunConfig, index: int) -> int:
    """Return the bytes that predictor number `index` keeps of a microbatch, besides the stream that
    it starts from.

    These are five streams (the output of the preceding depth's norm, the embeddings of the tokens
    ahead, both of them normalised, and the result of joining them), and what its block and three
    norms keep.
    """
    tokens = config.train.microbatch * config.train.seq
    streams = 5 * config.model.hidden * DTYPE_BYTES[config.train.precision]
    block = compute_block_bytes(config, config.model.layers + index)
    return block + tokens * (streams + 3 * _compute_norm_bytes(config))


def _compute_norm_bytes(config: RunConfig) -> int:
    """Return the bytes of statistics that a norm of the stream keeps per token."""
    saved = describe_norm(config.model).saved_statistics
    return round(saved.count_bytes(DTYPE_BYTES[config.train.precision]))


def compute_block_bytes(config: RunConfig, layer: int) -> int:
    """Return the bytes that one block keeps of a microbatch besides its input."""
    train, width = config.train, DTYPE_BYTES[config.train.precision]
    saved = describe_block(config.model, layer).count_saved(config.parallel, train.recompute)
    return train.microbatch * train.seq * round(saved.count_bytes(width))
