"""Held: the parameters of one rank, counted from the config alone.

The counts repeat in integers what the layers declare in their specs; a test compares the two. They
are those of the first rank of the tensor and expert axes, which has the larger part of whatever
does not divide evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaframe.architecture.experts import has_experts
from megaframe.architecture.matrices import head_widths, latent_width
from megaframe.architecture.stages import StagePlan, join_matrix
from megaframe.config.model import ModelConfig
from megaframe.config.schema import RunConfig
from megaframe.layout import Layout
from megaframe.planner.memory import Held, Memory, memory
from megaframe.schedule import Schedule


@dataclass
class _Count:
    """Elements of a part of a block, by how they are divided; fields as in `memory.Held`."""

    vectors: int = 0
    split: int = 0
    whole: int = 0
    shared: int = 0
    experts: int = 0


def held(config: RunConfig, layout: Layout, plans: Sequence[StagePlan]) -> Held:
    """Return the parameters of a rank that has the stages of `plans`."""
    model = config.model
    if model.emulate is not None:
        counts = []
    else:
        layers = [layer for plan in plans for layer in plan.blocks]
        counts = [part for layer in layers for part in _block(model, layer, layout)]
    predictors: list[_Count] = []
    tables: list[int] = []
    vectors = positions = 0
    first, last = any(plan.first for plan in plans), any(plan.last for plan in plans)
    table = dealt(model.vocab or 0, layout.tensor) * model.hidden
    if first:
        tables.append(table)
        if model.position == "learned":
            positions = (model.positions or config.train.seq) * model.hidden
    if last:
        depths = range(model.mtp_depth)
        predictors = [part for index in depths for part in _predictor(model, index, layout)]
        vectors += (1 + model.mtp_depth) * _norm(model)
        if not first and (model.tie_embeddings or model.mtp_depth):
            tables.append(table)
        if not model.tie_embeddings:
            tables.append(table)
    parts = [*counts, *predictors]
    if layout.tensor == 1:  # then whole and split matrices share a bucket
        for part in parts:
            part.split, part.whole = part.split + part.whole, 0
    copies = _copies(model.kv_heads, layout.tensor) if model.latent is None else 1
    return Held(
        vectors + sum(part.vectors for part in parts),
        tuple(part.split for part in parts),
        tuple(tables),
        tuple(part.experts for part in parts),
        tuple(part.whole for part in parts),
        tuple(part.shared for part in parts),
        positions,
        layout.tensor,
        copies,
    )


def rank_memory(
    config: RunConfig,
    layout: Layout,
    plans: Sequence[StagePlan],
    schedule: Schedule,
    rank: int,
    *,
    host: bool = False,
) -> Memory:
    """Return the memory of the first of the ranks with pipeline coordinate `rank`.

    plans: all stages. schedule: if it is not lowered, messages are not counted. host: as in
    `memory`.
    """
    here = [plans[stage] for stage in schedule.stages(rank)]
    return memory(
        config,
        held(config, layout, here),
        layout.data_shard * layout.context,
        here,
        schedule.ranks[rank],
        layout.expert_shard,
        host=host,
    )


def _block(model: ModelConfig, layer: int, layout: Layout) -> tuple[_Count, _Count]:
    """Return the counts of attention with the block's two norms, and of the late part."""
    found, late = _Count(vectors=2 * _norm(model)), _Count()
    (_attention if model.latent is None else _latent)(model, layout.tensor, found)
    moe = model.moe
    if moe is None or not has_experts(moe, layer):
        _mlp(model, model.ffn, layout.tensor, late)
        return found, late
    width = moe.ffn or model.ffn
    up = 2 if model.activation == "swiglu" else 1
    here = dealt(moe.experts, layout.expert)
    late.experts = here * (up + 1) * model.hidden * dealt(width, layout.expert_tensor)
    late.whole += moe.experts * model.hidden
    if moe.shared:
        _mlp(model, moe.shared * width, layout.tensor, late)
    return found, late


def _attention(model: ModelConfig, tensor: int, found: _Count) -> None:
    groups = dealt(model.kv_heads, tensor)
    width = groups * (model.heads // model.kv_heads + 2) * model.head_dim
    if _copies(model.kv_heads, tensor) > 1:
        found.shared += width * model.hidden
    else:
        found.split += width * model.hidden
    found.split += model.hidden * dealt(model.heads, tensor) * model.head_dim
    found.vectors += width * model.qkv_bias + model.hidden * model.bias
    found.vectors += 2 * model.head_dim * model.qk_norm


def _latent(model: ModelConfig, tensor: int, found: _Count) -> None:
    latent = model.latent
    assert latent is not None
    query, value = head_widths(model)
    heads = dealt(model.heads, tensor)
    found.whole += latent_width(latent) * model.hidden
    found.split += heads * query * (latent.query_rank or model.hidden)
    found.split += heads * (latent.head_dim + value) * latent.kv_rank
    found.split += model.hidden * heads * value
    found.vectors += latent.kv_rank + (latent.query_rank or 0) + model.hidden * model.bias


def _mlp(model: ModelConfig, width: int, tensor: int, found: _Count) -> None:
    up = 2 if model.activation == "swiglu" else 1
    inner = dealt(width, tensor)
    found.split += (up + 1) * model.hidden * inner
    found.vectors += (up * inner + model.hidden) * model.bias


def _predictor(model: ModelConfig, index: int, layout: Layout) -> tuple[_Count, _Count]:
    found, late = _block(model, model.layers + index, layout)
    found.whole += join_matrix(model)
    found.vectors += 2 * _norm(model)
    return found, late


def _norm(model: ModelConfig) -> int:
    return model.hidden * (1 + (model.bias and model.norm == "layernorm"))


def dealt(total: int, parts: int) -> int:
    """Return how many of `total` things the first of `parts` ranks has."""
    return -(-total // (parts // _copies(total, parts)))


def _copies(total: int, parts: int) -> int:
    """Return how many neighbouring ranks have the same thing, as `spec.copies_of` does."""
    return parts // total if 0 < total < parts else 1
