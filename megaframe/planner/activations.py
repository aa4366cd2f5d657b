"""Activations: bytes that forward passes keep for backward passes, and these for weight passes.

They are exact for what megaframe keeps between two actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megaframe.architecture.attention import count_exchanging_ranks
from megaframe.architecture.block import BlockDescription
from megaframe.architecture.cross_layer_tensors import (
    EMBEDDING,
    count_message_elements,
    list_handed_tensors,
)
from megaframe.architecture.layer import LayerDescription
from megaframe.architecture.model_blocks import describe_block, list_mixers
from megaframe.architecture.predictor import PredictorDescription
from megaframe.architecture.stages import StagePlan, describe_stage
from megaframe.config import ModelConfig, ParallelConfig, TrainConfig
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.schedule import Action, ActionKind


def compute_peak_activations(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    plans: Sequence[StagePlan],
    actions: Sequence[Action],
) -> tuple[int, int]:
    """Return the largest number of bytes kept at any time, and how much messages add to it.

    The first counts what is kept between passes, and all of a block while it is recomputed. A
    message exists from the posting of its receive (from its producer, if that is on this rank) to
    the end of its consumer, or to its send.

    Args:
        model: The section `model`.
        parallel: The section `parallel`.
        train: The section `train`.
        plans: The stages of this rank.
        actions: Its list of actions, in order.
    """
    size = {plan.stage_index: _compute_stage_bytes(model, parallel, train, plan) for plan in plans}
    weight_pass_size = {
        plan.stage_index: _compute_stage_weight_pass_bytes(model, parallel, train, plan)
        for plan in plans
    }
    recompute_size = {
        plan.stage_index: _compute_recompute_bytes(model, parallel, train, plan) for plan in plans
    }
    message = {
        plan.stage_index: _compute_message_bytes(model, parallel, train, plan) for plan in plans
    }
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
            message_bytes += message[stage][kind]
        elif kind in (ActionKind.SEND_F, ActionKind.SEND_B):
            message_bytes -= message[stage][kind]
        elif kind in _MESSAGES:
            receive, send, step = _MESSAGES[kind]
            arrives = (receive, stage, microbatch) in listed or stage - step in size
            leaves = (send, stage, microbatch) in listed or stage + step in size
            message_bytes += message[stage][send] * leaves - message[stage][receive] * arrives
        peak = max(peak, kept_bytes)
        peak_with_messages = max(peak_with_messages, kept_bytes + message_bytes)
    return peak, peak_with_messages - peak


def _compute_message_bytes(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, plan: StagePlan
) -> Mapping[ActionKind, int]:
    """Return the bytes of a microbatch's messages that a stage receives and sends, by action."""
    tokens, width = train.microbatch * train.seq, DTYPE_BYTES[train.precision]

    def count_bytes(layer: int, *, backward: bool) -> int:
        elements = count_message_elements(model, layer, parallel.tensor, width, backward=backward)
        return tokens * width * elements

    start, stop = plan.blocks.start, plan.blocks.stop
    return {
        ActionKind.RECV_F: count_bytes(start, backward=False),
        ActionKind.SEND_F: count_bytes(stop, backward=False),
        ActionKind.RECV_B: count_bytes(stop, backward=True),
        ActionKind.SEND_B: count_bytes(start, backward=True),
    }


def _compute_recompute_bytes(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, plan: StagePlan
) -> int:
    """Return the largest number of bytes of a stage's recomputed block while it is recomputed, 0 if
    none is; with the inputs that offload has brought back for up to two blocks."""
    stage = describe_stage(model, train, plan)
    blocks = [
        _count_saved_bytes(parallel, train, block) for block in stage.blocks[: plan.recomputed]
    ]
    if train.recompute == "full":
        blocks += [_count_saved_bytes(parallel, train, predictor) for predictor in stage.predictors]
    offloaded_inputs = 0
    if train.offload and blocks:  # inputs of the block in use and of the one before it
        tokens = train.microbatch * train.seq
        offloaded_inputs = min(2, len(blocks)) * tokens * model.stream_width
    return max(blocks, default=0) + offloaded_inputs * DTYPE_BYTES[train.precision]


SavingPart = BlockDescription | LayerDescription | PredictorDescription
"""What says how much it keeps for the backward pass."""
_MESSAGES = {
    ActionKind.F: (ActionKind.RECV_F, ActionKind.SEND_F, 1),
    ActionKind.B: (ActionKind.RECV_B, ActionKind.SEND_B, -1),
}
"""For each kind of pass: the action that receives its input, the action that sends its output, and
the distance to the next stage in its direction (which may be on the same rank)."""


def _compute_stage_bytes(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, plan: StagePlan
) -> int:
    """Return the bytes that a stage keeps of one microbatch.

    These are the input of each block, everything else of the blocks that are not recomputed, and
    the rotary tables. On the first stage, also what the embedding keeps; on the last stage what the
    head keeps for each loss, with its input, and everything else of the predictors.
    """
    stage, width = (
        describe_stage(model, train, plan),
        DTYPE_BYTES[train.precision],
    )
    stream = train.microbatch * train.seq * model.stream_width * width
    inputs = len(plan.blocks) + stage.losses
    if train.offload:
        inputs -= plan.recomputed  # those of recomputed blocks are in host memory
    saved = sum(
        _count_saved_bytes(parallel, train, block) for block in stage.blocks[plan.recomputed :]
    )
    if stage.embedding is not None:
        saved += _count_saved_bytes(parallel, train, stage.embedding)
    if stage.head is not None:
        saved += stage.losses * _count_saved_bytes(parallel, train, stage.head)
    if train.recompute != "full":
        saved += sum(
            _count_saved_bytes(parallel, train, predictor) for predictor in stage.predictors
        )
    saved += _compute_handed_bytes(model, parallel, train, plan)
    # Every tensor rank has the whole rotary tables; the result is divided by tensor ranks later.
    return inputs * stream + saved + parallel.tensor * compute_rotary_bytes(model, train)


def _compute_handed_bytes(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, plan: StagePlan
) -> int:
    """Return the bytes that a stage keeps of what is handed from layer to layer. Keys, values and
    choices are those that their layer keeps anyway, unless it is computed again or ranks move
    them."""
    recomputed, width = plan.blocks[: plan.recomputed], DTYPE_BYTES[train.precision]
    handed_bytes = 0
    for tensor in list_handed_tensors(model):
        is_received = not plan.first and tensor.crosses(plan.blocks.start)
        is_made = tensor.source in plan.blocks or (plan.first and tensor.source == EMBEDDING)
        is_kept = tensor.source in plan.blocks and tensor.source not in recomputed
        moves = parallel.context > 1
        if tensor.is_choice:
            moves = parallel.tensor * count_exchanging_ranks(parallel) > 1
        if is_received:
            handed_bytes += tensor.count_received_bytes(parallel.tensor, width)
        elif is_made and (moves or not is_kept):
            handed_bytes += tensor.count_bytes(parallel.tensor, width)
    return train.microbatch * train.seq * handed_bytes


def _count_saved_bytes(parallel: ParallelConfig, train: TrainConfig, part: SavingPart) -> int:
    """Return the bytes that a part keeps of a microbatch besides its input."""
    width = DTYPE_BYTES[train.precision]
    saved = part.count_saved(parallel, train.recompute)
    return round(train.microbatch * train.seq * saved.count_bytes(width, train.seq))


def _compute_stage_weight_pass_bytes(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, plan: StagePlan
) -> int:
    """Return the bytes that a stage's backward of one microbatch leaves for its weight pass."""
    if model.emulate is not None:
        return 0
    stage = describe_stage(model, train, plan)
    left = (_count_left_bytes(parallel, train, part) for part in stage.layers)
    return sum(left) + parallel.tensor * compute_rotary_bytes(model, train)


def _count_left_bytes(
    parallel: ParallelConfig, train: TrainConfig, part: BlockDescription | PredictorDescription
) -> int:
    """Return the bytes that the backward pass of a part leaves of a microbatch for a weight pass:
    the inputs of all linears, and the gradients of their outputs."""
    width = DTYPE_BYTES[train.precision]
    left = part.count_saved_for_weights(parallel, train.recompute)
    return round(train.microbatch * train.seq * left.count_bytes(width, train.seq))


def compute_weight_pass_bytes(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, layer: int
) -> int:
    """Return the bytes of one microbatch that the backward pass of a block leaves for its weight
    pass."""
    if model.emulate is not None:
        return 0
    return _count_left_bytes(parallel, train, describe_block(model, layer))


def compute_rotary_bytes(model: ModelConfig, train: TrainConfig) -> int:
    """Return the bytes of the cosines and sines of a microbatch, which all its samples share, and
    of the factors of its queries."""
    if model.emulate is not None:
        return 0
    mixers = list_mixers(model)
    tables = {mixer.rotary for mixer in mixers} - {None}
    width = sum(table.width for table in tables if table is not None)
    width += len({mixer.query_scale for mixer in mixers} - {None})
    return train.seq * width * DTYPE_BYTES[train.precision]


def compute_block_bytes(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, layer: int
) -> int:
    """Return the bytes that one block keeps of a microbatch besides its input."""
    return _count_saved_bytes(parallel, train, describe_block(model, layer))
