"""Parameters that one rank holds, counted from the config alone.

The same numbers follow from the specs that layers declare; a test holds both to equality. Here they
are arithmetic, because a plan is made where there is no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megaframe.config.model import Model
from megaframe.config.schema import RunConfig
from megaframe.layout import Layout
from megaframe.plan.experts import has_experts
from megaframe.plan.memory import Held
from megaframe.plan.stages import StagePlan, head_widths, join_matrix, latent_width


def held(config: RunConfig, layout: Layout, plans: Sequence[StagePlan]) -> Held:
    """What the first tensor rank holds of the stages of `plans`, undivided by data ranks."""
    model = config.model
    layers = [layer for plan in plans for layer in plan.blocks]
    ends = any(plan.last for plan in plans)
    ahead = range(model.layers, model.layers + model.mtp_depth) if ends else range(0)
    norm = _norm(model)
    vectors = ends * norm * (1 + 3 * model.mtp_depth)
    blocks, experts = [], []
    for layer in reversed([*layers, *ahead]):
        if model.emulate is not None:
            continue
        dense, routed, few = _block(model, layout, layer)
        blocks.append(dense + (layer >= model.layers) * join_matrix(model))
        experts.append(routed)
        vectors += few
    return Held(vectors, tuple(blocks), tuple(_tables(config, layout, plans)), tuple(experts))


def dealt(total: int, ranks: int) -> int:
    """Of so many things, those of the first of these ranks; with fewer things than ranks,
    neighbours hold the same one."""
    copies = ranks // total if 0 < total < ranks else 1
    return -(-total // (ranks // copies))


def _block(model: Model, layout: Layout, layer: int) -> tuple[int, int, int]:
    """Elements of dense matrices, of experts' matrices, and of gains and biases of a block."""
    dense, vectors = _attention(model, layout.tensor)
    vectors += 2 * _norm(model)
    moe = model.moe
    if moe is None or not has_experts(moe, layer):
        size, few = _mlp(model, model.ffn, layout.tensor)
        return dense + size, 0, vectors + few
    width = moe.ffn or model.ffn
    dense += moe.experts * model.hidden
    if moe.shared:
        size, few = _mlp(model, moe.shared * width, layout.tensor)
        dense, vectors = dense + size, vectors + few
    here = dealt(moe.experts, layout.expert) * dealt(width, layout.expert_tensor)
    return dense, _matrices(model) * model.hidden * here, vectors


def _attention(model: Model, tensor: int) -> tuple[int, int]:
    """Elements of matrices, and of gains and biases."""
    hidden, latent = model.hidden, model.latent
    heads = dealt(model.heads, tensor)
    last = hidden * model.bias
    if latent is None:
        groups = dealt(model.kv_heads, tensor)
        qkv = groups * (model.heads // model.kv_heads + 2) * model.head_dim
        norms = 2 * model.head_dim * model.qk_norm
        matrices = qkv * hidden + hidden * heads * model.head_dim
        return matrices, qkv * model.qkv_bias + norms + last
    query, value = head_widths(model)
    matrices = hidden * latent_width(latent)
    matrices += heads * query * (latent.query_rank or hidden)
    matrices += heads * (latent.head_dim + value) * latent.kv_rank + hidden * heads * value
    return matrices, (latent.query_rank or 0) + latent.kv_rank + last


def _mlp(model: Model, width: int, tensor: int) -> tuple[int, int]:
    """The same."""
    inner = dealt(width, tensor)
    biases = ((_matrices(model) - 1) * inner + model.hidden) * model.bias
    return _matrices(model) * inner * model.hidden, biases


def _matrices(model: Model) -> int:
    """Matrices of an MLP."""
    return 3 if model.activation == "swiglu" else 2


def _norm(model: Model) -> int:
    """Elements of a norm."""
    return model.hidden * (1 + (model.bias and model.norm == "layernorm"))


def _tables(config: RunConfig, layout: Layout, plans: Sequence[StagePlan]) -> Iterator[int]:
    """Elements of each table that a rank holds, and of the head."""
    model = config.model
    table = dealt(model.vocab or 0, layout.tensor) * model.hidden
    first, last = any(plan.first for plan in plans), any(plan.last for plan in plans)
    if last and not model.tie_embeddings:
        yield table
    if first or (last and (model.tie_embeddings or model.mtp_depth > 0)):
        yield table
    if first and model.position == "learned":
        yield (model.positions or config.train.seq) * model.hidden
