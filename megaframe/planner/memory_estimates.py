"""Estimates of peak memory for many layouts at once, in closed form.

The estimate looks at three ranks of a pipeline, and assumes that all stages but the last have as
many blocks as the fullest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaframe.architecture.adapted_weights import list_coded_patterns
from megaframe.architecture.block import BlockDescription
from megaframe.architecture.cross_layer_tensors import count_mean_message_elements
from megaframe.architecture.embedding import describe_layer_embeddings, describe_position_table
from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.optimizer_state import compute_state_bytes, count_outer_copies
from megaframe.architecture.output_head import (
    FP32_PARTS,
    compute_loss_bytes_per_logit,
    get_max_logits_per_chunk,
)
from megaframe.architecture.quantised import (
    DECODED_AT_ONCE,
    compute_bits_per_element,
    count_temporary_bytes,
)
from megaframe.architecture.spec import count_parameters
from megaframe.architecture.stages import StagePlan
from megaframe.architecture.streams import describe_first_streams, describe_last_streams
from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.config.schema import RunConfig, TrainConfig
from megaframe.hardware.chips import DTYPE_BYTES, Chip
from megaframe.layout import Layout
from megaframe.planner.activations import (
    compute_block_bytes,
    compute_rotary_bytes,
    compute_weight_pass_bytes,
)
from megaframe.planner.layout_sizes import (
    RECOMPUTE,
    BlocksPerRank,
    LayoutSizes,
    count_blocks_per_rank,
)
from megaframe.planner.local_products import compute_eight_bit_bytes
from megaframe.planner.memory import compute_max_width_per_token
from megaframe.planner.parameter_counts import count_model_parameters, count_rank_parameters
from megaframe.planner.peak_memory import compute_overhead_bytes
from megaframe.planner.searched_schedules import ScheduleColumn
from megaframe.schedule import NamedSchedule, PipelineSizes
from megaframe.schedule.named_schedule import HeldActivations, RanksHeld

Array = np.ndarray[Any, Any]


def estimate_peak_memory(
    config: RunConfig, chip: Chip, c: LayoutSizes, schedule: ScheduleColumn
) -> Array:
    """Estimate the bytes of the rank that needs most, for each candidate.

    It is the largest of three ranks: that with the first stage, that with the last stage, and the
    one between them where weight passes wait longest. The first and the third are assumed to have
    as many blocks as the fullest rank. The result is within a few percent of what
    `compute_pipeline_memory` says, which makes the final decision on what fits.

    Args:
        config: The run; its layout is ignored.
        chip: The device.
        c: The sizes of the candidates.
        schedule: Their schedules.
    """
    division = count_blocks_per_rank(config.model, config.train, c, config.frozen_patterns)
    blocks = _BlockTable(config.model, config.parallel, config.train, c, division)
    one_stage = c.pipeline == 1
    v_shaped = schedule.mark(lambda each: each.placement == "vee")
    nowhere = np.zeros(len(v_shaped), dtype=bool)
    first, last, inner = _count_held(c, schedule)
    ranks = (
        _PipelineRank(c, blocks, first, ~nowhere, one_stage | v_shaped, True),
        _PipelineRank(c, blocks, last, one_stage, ~nowhere, False),
        _PipelineRank(c, blocks, inner, nowhere, nowhere, True),
    )
    return np.maximum.reduce([_estimate_rank_bytes(config, chip, rank) for rank in ranks])


@dataclass(frozen=True)
class _PipelineRank:
    """One rank of each candidate.

    Attributes:
        c: The sizes of the candidates.
        blocks: What a block of each candidate has.
        counts: Activations that the rank holds.
        first, last: Whether it has the first and the last stage.
        full: Whether it has as many blocks as the fullest rank; otherwise as many as the rank with
            the last stage.
    """

    c: LayoutSizes
    blocks: _BlockTable
    counts: HeldActivations
    first: Array
    last: Array
    full: bool


class _BlockTable:
    """For each candidate, the elements of one block of each kind, and the bytes that it keeps per
    sample. They are computed once per distinct combination of the few sizes that they depend on,
    and then looked up. Kinds are numbered, the one with most parameters first."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        train: TrainConfig,
        c: LayoutSizes,
        division: BlocksPerRank,
    ) -> None:
        kinds = [_drop_window(describe_block(model, n)) for n in range(model.layers)]
        sizes_of_kinds = {kind: _count_elements(kind) for kind in dict.fromkeys(kinds)}
        largest_first = sorted(sizes_of_kinds, key=lambda kind: -sizes_of_kinds[kind])
        self.layers = [kinds.index(kind) for kind in largest_first]
        self.most = [_count_most([kind == each for each in kinds]) for kind in largest_first]
        keys = np.stack([c.tensor, c.context, c.expert, c.expert_tensor, c.recompute])
        combinations, row = np.unique(keys, axis=1, return_inverse=True)
        row = row.reshape(-1)
        rows: dict[tuple[int, str], list[int]] = {}
        tables = []
        for tensor, context, expert, expert_tensor, recompute in combinations.T.tolist():
            layout = Layout(
                tensor=tensor,
                data=expert * expert_tensor,
                expert=expert,
                expert_tensor=expert_tensor,
            )
            axes = {"tensor": tensor, "context": context, "expert": expert}
            of_block = (
                model,
                parallel.model_copy(update={**axes, "expert_tensor": expert_tensor}),
                train.model_copy(update={"microbatch": 1, "recompute": RECOMPUTE[recompute]}),
            )
            for kind, layer in enumerate(self.layers):
                parameters = count_rank_parameters(
                    model, train, layout, [StagePlan(1, 3, range(layer, layer + 1))]
                )
                kept = compute_block_bytes(*of_block, layer)
                quantities = {
                    "vectors": parameters.vectors,
                    "split": sum(parameters.split),
                    "replicated": sum(parameters.replicated),
                    "shared": sum(parameters.shared),
                    "experts": sum(parameters.experts),
                    "kept": 0 if recompute == 2 else kept,
                    "weight_pass": compute_weight_pass_bytes(*of_block, layer),
                    "recomputed": kept if recompute == 2 else 0,
                    "copies": parameters.copies,
                }
                for name, value in quantities.items():
                    rows.setdefault((kind, name), []).append(value)
            tables.append(-(-(model.vocab or 0) // tensor) * model.hidden)
        self._of = {key: np.asarray(values, dtype=float)[row] for key, values in rows.items()}
        self.table = np.asarray(tables, dtype=float)[row]
        one_sample = train.model_copy(update={"microbatch": 1})
        self.rotary = float(compute_rotary_bytes(model, one_sample))
        self.chunks = np.asarray(c.chunks, dtype=int)
        self.per_rank = {True: division.fullest, False: division.last}

    def count(self, kind: int, first: bool) -> Array:
        """Return the number of blocks of a kind on a rank: as many of the largest kinds as the
        consecutive layers of each of its stages may have.

        Args:
            kind: Index into `layers`, the largest kind first.
            first: Of the fullest rank; otherwise of the rank with the last stage.
        """
        free = np.asarray(self.per_rank[first], dtype=int)
        per_stage = -(-free // self.chunks)
        for larger in range(kind):
            free = free - np.minimum(free, self.chunks * self.most[larger][per_stage])
        if kind == len(self.layers) - 1:
            return free
        return np.minimum(free, self.chunks * self.most[kind][per_stage])

    def sum_blocks(self, name: str, first: bool) -> Array:
        """Return the sum of a quantity over the blocks of a rank.

        Args:
            name: A quantity of a block, such as "kept".
            first: As in `count`.
        """
        return sum(
            self.count(kind, first) * self._of[kind, name] for kind in range(len(self.layers))
        )

    def find_largest(self, name: str) -> Array:
        """Return a quantity of one block, of the kind that has more of it."""
        return np.maximum.reduce([self._of[kind, name] for kind in range(len(self.layers))])


def _drop_window(block: BlockDescription) -> BlockDescription:
    """Return the block without its windows, on which no memory depends."""
    mixer, second = (replace(m, window=None) for m in (block.mixer, block.second_mixer))
    return replace(block, mixer=mixer, second_mixer=second)


def _count_elements(block: BlockDescription) -> int:
    return sum(spec.size for spec in block.declare_parameters(""))


def _count_most(marked: Sequence[bool]) -> Array:
    """Return for each number from 0 the most marked items among so many consecutive ones."""
    before = np.concatenate([[0], np.cumsum(marked)])
    spans = (before[length:] - before[: len(before) - length] for length in range(len(before)))
    return np.array([span.max() for span in spans])


def _estimate_rank_bytes(config: RunConfig, chip: Chip, rank: _PipelineRank) -> Array:
    """Return the bytes of one rank of each candidate."""
    c, blocks, full = rank.c, rank.blocks, rank.full
    model, train = config.model, config.train
    width = DTYPE_BYTES[train.precision]
    master = max(4, width)
    table = describe_position_table(model, train.seq)
    positions = 0 if table is None else table.rows * table.width
    layer_embeddings = describe_layer_embeddings(model)
    if layer_embeddings is not None:  # what makes them, of which tensor ranks divide the table
        own = layer_embeddings.tokens.rows * layer_embeddings.tokens.width / c.tensor
        positions = positions + own + layer_embeddings.projection.elements
    is_whole_model, tied = rank.first & rank.last, model.tie_embeddings
    tables = rank.first * 1 + rank.last - is_whole_model * tied
    ends = blocks.table * tables + positions * rank.first
    first_streams, last_streams = (
        0 if each is None else count_parameters(each.declare_parameters(""))
        for each in (describe_first_streams(model), describe_last_streams(model))
    )
    ends = ends + first_streams * rank.first + last_streams * rank.last
    names = ("vectors", "split", "replicated", "shared", "experts")
    vectors, split, replicated, shared, experts = (blocks.sum_blocks(name, full) for name in names)
    dense = vectors + split + replicated + shared + ends
    total = dense + experts
    ranks = c.shard
    replicas = c.tensor * c.context * c.data // (c.expert * c.expert_tensor)
    shard = (vectors + split + ends) / ranks + replicated / (ranks * c.tensor)
    shard = shard + shared / (ranks * blocks.find_largest("copies"))
    expert_ranks = np.maximum(1, replicas // (c.data_replicate * c.islands))
    shard = shard + experts / expert_ranks
    outer = shard * count_outer_copies(config.sync) * master * config.trains_in_islands
    saved_shard, shard = shard - vectors / ranks, np.where(c.zero > 0, shard, total)
    # What a single rank has is never divided.
    is_divided = (
        *(ranks > 1, ranks * c.tensor > 1),
        *(ranks * blocks.find_largest("copies") > 1, expert_ranks > 1),
    )
    block = sum(blocks.find_largest(name) for name in names[1:])
    divided_block = sum(
        blocks.find_largest(name) * divided
        for name, divided in zip(names[1:], is_divided, strict=True)
    )
    matrices = (split + ends, replicated, shared, experts)
    alone = sum(m * ~d for m, d in zip(matrices, is_divided, strict=True))
    bucket_size = config.parallel.bucket_size
    least = 1 if bucket_size == "auto" else bucket_size
    blocks_of_stage = np.maximum(1.0, blocks.per_rank[full] / c.chunks)
    bucket_blocks = np.clip(np.ceil(least / np.maximum(block, 1)), 1.0, blocks_of_stage)
    # Buffers of whole values or gradients: those of two buckets, and of one table.
    table_size = blocks.table * (ranks > 1)
    borrowed = 2 * bucket_blocks * divided_block + table_size
    values = np.where(c.zero == 3, vectors + alone + borrowed, total)
    trained = _compute_kept_share(model, train, config.frozen_patterns)
    master_and_state = master + trained * compute_state_bytes(config.optim, master)
    if width == master:
        values = values - np.where(c.zero == 3, alone + vectors / ranks, shard)
    if config.optim.offload and not chip.is_host:
        master_and_state = float(master if width == master else 0)
        values = values + np.where((c.zero == 3) & (width < master), shard - alone, 0.0)
    second_table = table_size * (is_whole_model & (c.microbatches > 1))
    # Buffers are as large as the largest bucket, which some block trains, unless all of them train
    # adapters only.
    buffers = (borrowed + second_table) * (1.0 if model.adapters is None else trained)
    gradients = np.where(c.zero >= 2, buffers + trained * (vectors + shard), trained * total)
    if config.parallel.compress != "none":
        gradients = gradients + np.where(c.data_replicate > 1, saved_shard, total - vectors)
    static = shard * master_and_state + values * width + gradients * master + outer
    of_blocks = split + replicated + shared + experts
    static = static - _estimate_saved_by_codes(
        model, config.train, c.zero, of_blocks, shard / total, 2 * bucket_blocks * block
    )
    transient = _estimate_transient_bytes(
        config.model, config.train, rank, get_max_logits_per_chunk(host=chip.is_host)
    )
    return static + transient + compute_overhead_bytes(chip)


def _estimate_saved_by_codes(
    model: ModelConfig,
    train: TrainConfig,
    zero: Array,
    matrices: Array,
    own: Array,
    present: Array,
) -> Array | float:
    """Return the bytes that codes of weights save.

    Args:
        model: Keeps them.
        train: Has the precision of values.
        zero: ZeRO stage of each candidate.
        matrices: Elements of the matrices of blocks of its rank.
        own: The share of weights that is the rank's own part.
        present: Elements of blocks whose values are there at a time.
    """
    adapters = model.adapters
    if adapters is None or adapters.quantize_base is None:
        return 0.0
    coding, whole = adapters.quantize_base, count_model_parameters(model, train)
    kept = _compute_kept_share(model, train, list_coded_patterns(model))
    share = (1 - kept) * whole.total / max(1, whole.total - whole.outside_blocks)
    width, of_code = (
        DTYPE_BYTES[train.precision],
        float(compute_bits_per_element(coding) / 8),
    )
    coded, present, is_divided = matrices * share, present * share, zero == 3
    # At ZeRO 3 codes are gathered beside the values of blocks that are there anyway; elsewhere all
    # values would be, of which in one precision the own ones are the weights.
    values = coded * (1 - own * (width >= 4)) - present
    saved = np.where(is_divided, -present * of_code, values * width)
    saved = saved + coded * (own * max(4, width) - np.where(is_divided, own, 1.0) * of_code)
    decoded = np.minimum(present / 2 * np.where(is_divided, own, 1.0), DECODED_AT_ONCE)
    return saved - decoded * count_temporary_bytes(coding)


def _compute_kept_share(model: ModelConfig, train: TrainConfig, without: tuple[str, ...]) -> float:
    """Return the share of the model's parameters that is not named by patterns. Every rank is
    assumed to have that of the model."""
    if not without:
        return 1.0
    kept, every = (
        count_model_parameters(model, train, patterns).total for patterns in (without, ())
    )
    return kept / max(1, every)


def _estimate_transient_bytes(
    model: ModelConfig, train: TrainConfig, rank: _PipelineRank, max_logits: int
) -> Array:
    """Return the bytes that come and go within a step: activations, messages, logits (at most
    `max_logits` of them at once), and temporaries."""
    c, blocks, last = rank.c, rank.blocks, rank.last
    width, activation_ranks = DTYPE_BYTES[train.precision], c.tensor * c.context
    rows = c.microbatch * float(train.seq)
    stream = rows * model.stream_width * width
    backward, weight_pass = (
        blocks.sum_blocks(name, rank.full) * c.microbatch / c.chunks + blocks.rotary * c.tensor
        for name in ("kept", "weight_pass")
    )
    if not train.offload:  # which moves the inputs of all blocks to the host
        backward = backward + blocks.per_rank[rank.full] / c.chunks * stream
    vocab = np.ceil((model.vocab or 0) / c.tensor)
    logits = np.minimum(rows, np.maximum(1, max_logits // np.maximum(1, vocab))) * vocab * width
    fp32_rows = np.maximum(1, max_logits // FP32_PARTS // np.maximum(1, vocab))
    loss_tensors = (
        np.minimum(rows, fp32_rows) * vocab * compute_loss_bytes_per_logit(model, train, width)
    )
    temporaries = np.maximum.reduce(
        np.broadcast_arrays(
            2 * rows * compute_max_width_per_token(model) * width / activation_ranks,
            compute_eight_bit_bytes(model, train, c),
            (logits + loss_tensors) * last,
        )
    )
    handed = count_mean_message_elements(model, width) / model.stream_width
    messages = np.where(c.pipeline > 1, 2 * stream * handed / activation_ranks, 0.0)
    inputs = 2 * stream * (last + train.offload)
    counts = rank.counts
    between_passes = counts.backward * backward + counts.weight_pass * weight_pass
    between_passes = between_passes + counts.either * np.maximum(backward, weight_pass)
    recomputed = blocks.find_largest("recomputed") * c.microbatch
    activations = (between_passes + recomputed + inputs) / activation_ranks
    return activations + messages + logits * last + temporaries


def _count_held(c: LayoutSizes, schedule: ScheduleColumn) -> RanksHeld:
    """Return what the three ranks of each candidate hold. Without a pipeline it is one activation,
    on a rank that is both the first and the last."""

    def compute(named: NamedSchedule, part: PipelineSizes, _: Array) -> list[Array]:
        return [count for rank in named.count_held(part) for count in rank]

    counts = schedule.compute(c, 9, compute)
    alone = np.asarray(c.pipeline == 1)
    first, last, inner = (HeldActivations(*counts[start : start + 3]) for start in (0, 3, 6))
    return RanksHeld(
        first._replace(backward=first.backward + alone),
        last._replace(backward=last.backward + alone),
        inner,
    )
