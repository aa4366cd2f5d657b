"""Mixture of experts: keys of `model.moe`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaframe.config.section import NonNegative, Positive, Section


class Moe(Section):
    experts: Positive
    """Number of routed experts per layer."""
    top_k: Positive = 2
    """Number of experts that each token is routed to."""
    ffn: Positive | None = None
    """Inner width of one expert. Default: `model.ffn`."""
    shared: NonNegative = 0
    """Number of shared experts, which every token uses; they are one MLP of width `shared` times
    `ffn`."""
    first: NonNegative = 0
    """Number of dense layers before the first expert layer."""
    every: Positive = 1
    """After `first`, every n-th layer has experts; the others are dense."""
    score: Literal["softmax", "sigmoid"] = "sigmoid"
    """Function that turns a router's logits into scores, in fp32."""
    normalise: bool = Field(default_factory=lambda given: given["top_k"] > 1)
    """Divide the scores of the chosen experts by their sum. Default: true if `top_k` is more than
    1."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the output of the routed experts."""
    groups: Positive = 1
    """Number of groups of neighbouring experts; a token may use only `top_groups` of them."""
    top_groups: Positive = Field(default_factory=lambda given: given["groups"])
    """Number of groups whose experts a token may use. Default: all."""
    group_best: Positive = 1
    """A group's score is the sum of this many of its best scores."""
    balance: Literal["bias", "sequence", "global", "none"] = "bias"
    """How to balance the load of the experts. `bias` adds a number to each expert's score when
    experts are chosen and adjusts it after every step (Wang et al. 2024), with a small loss per
    sequence. `sequence` uses that loss alone. `global` uses a loss on the load of the previous
    step."""
    balance_rate: Annotated[float, Field(gt=0)] = 1e-3
    """bias: largest change of the bias in a step."""
    balance_loss: Annotated[float, Field(ge=0)] = Field(
        default_factory=lambda given: {"bias": 1e-4, "none": 0.0}.get(given["balance"], 1e-2)
    )
    """Weight of the balance loss per token. Default: 1e-4 for bias, 1e-2 for sequence and
    global."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared log-sum-exp of a router's logits per token (ST-MoE uses 1e-3)."""
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Multiply a router's inputs by random factors between 1 - jitter and 1 + jitter."""
    capacity: Annotated[float, Field(gt=0)] | None = None
    """Limit the tokens that each rank sends to an expert to this factor times the mean load of a
    microbatch, and drop those with the lowest scores. Results then depend on the layout. Default:
    no limit."""
