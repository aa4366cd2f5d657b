"""Floating-point operations per token of a training step, counted from specs and shapes.

A multiply and an add are two operations; the backward pass costs twice the forward pass. The
headline counts causal attention as half of the full square, because the other half need not be
computed. What is computed a second time on purpose (recompute) counts for the hardware, never for
the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from megaframe.architecture.embedding import describe_embedding, describe_head, get_vocab_size
from megaframe.architecture.model_blocks import describe_block, describe_norm
from megaframe.architecture.predictor import describe_predictor
from megaframe.architecture.spec import ParamSpec
from megaframe.architecture.stages import compute_block_work, plan_stages
from megaframe.config import RunConfig


@dataclass(frozen=True)
class Flops:
    """Operations per token, forward and backward.

    Attributes:
        model: With causal, windowed attention; the headline.
        full_attention: With every query attending to all `train.seq` keys, as many published tables
            count.
        hardware: `model` plus recompute.
    """

    model: float
    full_attention: float
    hardware: float

    @property
    def recompute(self) -> float:
        """Share of the hardware's operations that are recompute."""
        return 1.0 - self.model / self.hardware if self.hardware else 0.0

    def describe(self) -> str:
        """Return one sentence for the run log."""
        return (
            f"model FLOPs per token: {self.model / 1e6:,.1f} M with causal attention (headline), "
            f"{self.full_attention / 1e6:,.1f} M with full attention, "
            f"{self.hardware / 1e6:,.1f} M including recompute"
        )


def count_flops(specs: Iterable[ParamSpec], config: RunConfig) -> Flops:
    """Return the operations per token of the model that `specs` declare. Each matrix is used once
    per token; matrices of experts count by the share of tokens routed to them."""
    model, seq = config.model, config.train.seq
    elements = {"matrix": Fraction(0), "head": Fraction(0)}
    for spec in specs:
        if spec.role in elements:
            elements[spec.role] += spec.size * spec.token_share
    if model.tie_embeddings:
        # A tied table is declared as an embedding, but it is also multiplied as the head.
        elements["head"] = Fraction(get_vocab_size(model) * model.hidden)
    depth = model.mtp_depth
    described = [describe_block(model, layer) for layer in range(model.layers + depth)]
    causal, full = (
        sum(
            block.count_attention_flops(seq, causal=causal, backward=backward)
            for block in described
            for backward in (False, True)
        )
        for causal in (True, False)
    )
    ends = describe_embedding(model, seq), describe_head(model, describe_norm(model))
    of_streams = [product for end in ends for product in end.list_batched_products(seq)]
    embedding = ends[0].linears if model.emulate is None else []
    elements["matrix"] += sum(linear.elements for linear in embedding)
    matrices = 6 * float(elements["matrix"]) + sum(3 * p.flops for p in of_streams) / seq
    head = 6 * float(elements["head"]) * (1 + depth)
    layers = [layer for plan in plan_stages(config) for layer in plan.blocks[: plan.recomputed]]
    recomputed = 0.0
    if config.train.recompute == "full":
        layers += range(model.layers, model.layers + depth)
        joins = (describe_predictor(model, index).join for index in range(depth))
        recomputed = sum(2.0 * join.elements for join in joins)
    recomputed += sum(
        compute_block_work(config.model, config.train, layer).forward for layer in layers
    )
    return Flops(
        model=matrices + causal + head,
        full_attention=matrices + full + head,
        hardware=matrices + causal + head + recomputed,
    )
