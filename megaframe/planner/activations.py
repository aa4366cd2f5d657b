"""Activations: bytes that forward passes keep for backward passes, and these for weight passes.

They are exact for what megaframe keeps between two actions.
"""

from __future__ import annotations

from collections.abc import Sequence

from megaframe.architecture.block import BlockDescription, describe_block, list_mixers
from megaframe.architecture.layer import LayerDescription
from megaframe.architecture.predictor import PredictorDescription
from megaframe.architecture.stages import StagePlan, describe_stage
from megaframe.config import ModelConfig, RunConfig, TrainConfig
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
        config: Model, precision, recompute and microbatch.
        plans: The stages of this rank.
        actions: Its list of actions, in order.
    """
    size = {plan.stage_index: _compute_stage_bytes(config, plan) for plan in plans}
    weight_pass_size = {
        plan.stage_index: _compute_stage_weight_pass_bytes(config, plan) for plan in plans
    }
    recompute_size = {plan.stage_index: _compute_recompute_bytes(config, plan) for plan in plans}
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
    stage = describe_stage(config.model, config.train, plan)
    blocks = [_count_saved_bytes(config, block) for block in stage.blocks[: plan.recomputed]]
    if config.train.recompute == "full":
        blocks += [_count_saved_bytes(config, predictor) for predictor in stage.predictors]
    offloaded_inputs = 0
    if config.train.offload and blocks:  # inputs of the block in use and of the one before it
        tokens = config.train.microbatch * config.train.seq
        offloaded_inputs = min(2, len(blocks)) * tokens * config.model.hidden
    return max(blocks, default=0) + offloaded_inputs * DTYPE_BYTES[config.train.precision]


SavingPart = BlockDescription | LayerDescription | PredictorDescription
"""What says how much it keeps for the backward pass."""
_MESSAGES = {
    ActionKind.F: (ActionKind.RECV_F, ActionKind.SEND_F, 1),
    ActionKind.B: (ActionKind.RECV_B, ActionKind.SEND_B, -1),
}
"""For each kind of pass: the action that receives its input, the action that sends its output, and
the distance to the next stage in its direction (which may be on the same rank)."""


def _compute_stage_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the bytes that a stage keeps of one microbatch.

    These are the input of each block, everything else of the blocks that are not recomputed, and
    the rotary tables. On the first stage, also what the embedding keeps; on the last stage what the
    head keeps for each loss, with its input, and everything else of the predictors.
    """
    stage, width = (
        describe_stage(config.model, config.train, plan),
        DTYPE_BYTES[config.train.precision],
    )
    stream = config.train.microbatch * config.train.seq * config.model.hidden * width
    inputs = len(plan.blocks) + stage.losses
    if config.train.offload:
        inputs -= plan.recomputed  # those of recomputed blocks are in host memory
    saved = sum(_count_saved_bytes(config, block) for block in stage.blocks[plan.recomputed :])
    if stage.embedding is not None:
        saved += _count_saved_bytes(config, stage.embedding)
    if stage.head is not None:
        saved += stage.losses * _count_saved_bytes(config, stage.head)
    if config.train.recompute != "full":
        saved += sum(_count_saved_bytes(config, predictor) for predictor in stage.predictors)
    # Every tensor rank has the whole rotary tables; the result is divided by tensor ranks later.
    return (
        inputs * stream
        + saved
        + config.parallel.tensor * compute_rotary_bytes(config.model, config.train)
    )


def _count_saved_bytes(config: RunConfig, part: SavingPart) -> int:
    """Return the bytes that a part keeps of a microbatch besides its input."""
    train, width = config.train, DTYPE_BYTES[config.train.precision]
    saved = part.count_saved(config.parallel, train.recompute)
    return round(train.microbatch * train.seq * saved.count_bytes(width, train.seq))


def _compute_stage_weight_pass_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Return the bytes that a stage's backward of one microbatch leaves for its weight pass."""
    if config.model.emulate is not None:
        return 0
    stage = describe_stage(config.model, config.train, plan)
    left = (_count_left_bytes(config, part) for part in stage.layers)
    return sum(left) + config.parallel.tensor * compute_rotary_bytes(config.model, config.train)


def _count_left_bytes(config: RunConfig, part: BlockDescription | PredictorDescription) -> int:
    """Return the bytes that the backward pass of a part leaves of a microbatch for a weight pass:
    the inputs of all linears, and the gradients of their outputs."""
    train, width = config.train, DTYPE_BYTES[config.train.precision]
    left = part.count_saved_for_weights(config.parallel, train.recompute)
    return round(train.microbatch * train.seq * left.count_bytes(width, train.seq))


def compute_weight_pass_bytes(config: RunConfig, layer: int) -> int:
    """Return the bytes of one microbatch that the backward pass of a block leaves for its weight
    pass."""
    if config.model.emulate is not None:
        return 0
    return _count_left_bytes(config, describe_block(config.model, layer))


def compute_rotary_bytes(model: ModelConfig, train: TrainConfig) -> int:
    """Return the bytes of the cosines and sines of a microbatch, which all its samples share."""
    if model.emulate is not None:
        return 0
    tables = {mixer.rotary for mixer in list_mixers(model)} - {None}
    width = sum(table.width for table in tables if table is not None)
    return train.seq * width * DTYPE_BYTES[train.precision]


def compute_block_bytes(config: RunConfig, layer: int) -> int:
    """Return the bytes that one block keeps of a microbatch besides its input."""
    return _count_saved_bytes(config, describe_block(config.model, layer))
