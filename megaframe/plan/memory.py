"""Memory that a run allocates on one rank, by kind, before it runs.

Exact for what megaframe itself keeps; the interpreter, torch and the temporaries of single
operations come on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megaframe.config.schema import Model, Optim, RunConfig
from megaframe.plan.stages import StagePlan, head_widths, latent_width
from megaframe.schedule import Action, Kind

LOSS_CHUNK = 12_900_000
"""Most logits that exist at once. Fewer make fp32 products slower (docs/log.md)."""

WIDTH = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
"""Bytes of a value or an activation, by `train.precision`."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. weights: in master precision. values: what the model computes with beside
    them. activations: what the backward of the microbatches in flight needs. logits: the chunk."""

    weights: int
    values: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Held:
    """Parameters of one rank, undivided by ZeRO. vectors: all gains and biases. blocks: the
    matrices of each block. tables: each embedding table, and the head."""

    vectors: int
    blocks: tuple[int, ...]
    tables: tuple[int, ...]

    @property
    def total(self) -> int:
        """All of them."""
        return self.vectors + sum(self.blocks) + sum(self.tables)

    @property
    def lent(self) -> int:
        """The buffers that hold whole gradients, or values, where ZeRO divides them: two blocks,
        and one for each size of table."""
        return sum(sorted(self.blocks)[-2:]) + sum(set(self.tables))


def memory(
    config: RunConfig,
    held: Held,
    ranks: int,
    plans: Sequence[StagePlan],
    actions: Sequence[Action],
) -> Memory:
    """Memory of a rank that has the parameters `held`, of which `ranks` ranks share one copy, and
    runs the stages of `plans`, in the order of its `actions`."""
    width = WIDTH[config.train.precision]
    master = max(4, width)
    stage = config.parallel.zero
    own = -(-held.total // ranks) if stage else held.total
    values = held.vectors + held.lent if stage == 3 else held.total
    if width == master:  # then the own weights are among the values, but for what is only lent
        values -= -(-held.vectors // ranks) if stage == 3 else own
    gradients = held.total
    if stage >= 2:
        gradients = held.vectors + held.lent + (held.total - held.vectors) // ranks
    tokens = config.train.microbatch * config.train.seq
    tensor = config.parallel.tensor
    vocab = -(-(config.model.vocab or 0) // tensor)
    chunk = min(tokens, max(1, LOSS_CHUNK // max(1, vocab)))
    return Memory(
        weights=own * master,
        values=values * width,
        gradients=gradients * master,
        optimizer=_state(config.optim, held, own, master),
        # Tokens are dealt to the context ranks; rows, heads and widths to the tensor ranks.
        activations=_activations(config, plans, actions) // (tensor * config.parallel.context),
        logits=chunk * vocab * width if any(plan.last for plan in plans) else 0,
    )


_STATE = {"bf16": 2.0, "int8": 1.0 + 4 / 256}
"""Bytes of a moment, by `optim.state`; int8 has a factor in fp32 for each 256."""


def _state(optim: Optim, held: Held, own: int, master: int) -> int:
    """Bytes that the optimizer remembers of `own` of the parameters."""
    moment = _STATE.get(optim.state, master)
    moments = {"adamw": 2, "lion": 1, "sgd": 1 if optim.momentum != 0 else 0, "muon": 1}[optim.name]
    size = moments * moment + (master if optim.ema is not None else 0)
    total = own * size
    if optim.name == "muon":  # what is no matrix is AdamW's
        total += own * (held.total - sum(held.blocks)) / max(1, held.total) * moment
    return math.ceil(total)


def _activations(config: RunConfig, plans: Sequence[StagePlan], actions: Sequence[Action]) -> int:
    """Most bytes kept between forward and backward at any time; and, where a block runs again,
    everything of that one."""
    size = {plan.number: _stage_bytes(config, plan) for plan in plans}
    split = {action.stage for action in actions if action.kind is Kind.W}
    kept = most = 0
    for action in actions:
        if action.stage is None:
            continue
        if action.kind is Kind.F:
            kept += size[action.stage]
        elif action.kind is (Kind.W if action.stage in split else Kind.B):
            kept -= size[action.stage]
        most = max(most, kept)
    again = [block_bytes(config)] * any(plan.recomputed for plan in plans)
    if (
        config.train.recompute == "full"
        and config.model.mtp_depth
        and any(plan.last for plan in plans)
    ):
        again.append(predictor_bytes(config))
    return most + max(again, default=0)


def _stage_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Bytes that a stage keeps of one microbatch: each block's input, all else of the blocks that
    do not run again, and for each depth the head's input with its gradient, and all else of the
    predictors."""
    tokens = config.train.microbatch * config.train.seq
    stream = tokens * config.model.hidden * WIDTH[config.train.precision]
    whole = len(plan.blocks) - plan.recomputed
    depth = config.model.mtp_depth * plan.last
    streams = len(plan.blocks) + 2 * (plan.last + depth)
    predictors = depth * tokens * _norm_bytes(config)
    if config.train.recompute != "full":
        predictors += depth * predictor_bytes(config)
    return streams * stream + whole * block_bytes(config) + predictors


def predictor_bytes(config: RunConfig) -> int:
    """Bytes that a predictor keeps of a microbatch beside the stream that it starts from: that
    after the norm of the depth before, the embeddings ahead, both normalised, what they are joined
    into, and all that its block and three norms keep."""
    tokens = config.train.microbatch * config.train.seq
    streams = 5 * config.model.hidden * WIDTH[config.train.precision]
    return block_bytes(config) + tokens * (streams + 3 * _norm_bytes(config))


def _norm_bytes(config: RunConfig) -> int:
    """Statistics that a norm keeps of a token: one in at least fp32, or the two of layernorm, which
    on a CPU are as wide as a value."""
    width = WIDTH[config.train.precision]
    return 2 * width if config.model.norm == "layernorm" else max(4, width)


def block_bytes(config: RunConfig) -> int:
    """Bytes that one block keeps of a microbatch beside its input.

    What attention keeps, the stream between attention and MLP, and the MLP before its activation;
    unless they are computed again, also both norms' outputs with their statistics, and the MLP
    after its activation. Statistics are in at least fp32, but for those of layernorm on a CPU.
    """
    model, width = config.model, WIDTH[config.train.precision]
    tokens = config.train.microbatch * config.train.seq
    selective = config.train.recompute == "selective"
    of_attention = _attention_keeps if model.latent is None else _latent_attention_keeps
    elements, statistics = of_attention(model, selective)
    elements += model.hidden + (2 if model.activation == "swiglu" else 1) * model.ffn
    if not selective:
        elements += 2 * model.hidden + model.ffn
        if model.norm == "layernorm":
            elements += 2 * 2
        else:
            statistics += 2
    return tokens * (elements * width + statistics * max(4, width))


def _attention_keeps(model: Model, selective: bool) -> tuple[int, int]:
    """Elements and statistics of a token: queries, keys and values, the output with one log-sum-exp
    a head, and of queries and keys what was before their norms."""
    queries = model.heads * model.head_dim
    qkv = queries + 2 * model.kv_heads * model.head_dim
    elements, statistics = qkv + queries, model.heads
    if model.qk_norm:
        elements += qkv
        statistics += model.heads + model.kv_heads
    elif model.position != "rotary" and 1 < model.kv_heads < model.heads:
        elements += queries
    return elements, statistics


def _latent_attention_keeps(model: Model, selective: bool) -> tuple[int, int]:
    """The same; of the latents too, and unless they are computed again those that are normalised,
    with a statistic each."""
    latent = model.latent
    assert latent is not None
    elements = latent_width(latent) + 2 * model.heads * sum(head_widths(model))
    statistics = model.heads
    if not selective:
        elements += latent_width(latent) - latent.rotary_dim
        statistics += 1 + (latent.query_rank is not None)
    return elements, statistics
