"""The mixture of experts: keys of `model.moe`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaframe.config.section import NonNegative, Positive, Section


class Moe(Section):
    experts: Positive
    """Experts of a layer, of which each token goes to `top_k`."""
    top_k: Positive = 2
    """Experts that each token goes to."""
    ffn: Positive | None = None
    """Inner width of one expert. Default: `model.ffn`."""
    shared: NonNegative = 0
    """Experts that every token goes to as well; they are one MLP of `shared` times `ffn`."""
    first: NonNegative = 0
    """Dense layers before the first one with experts."""
    every: Positive = 1
    """After `first`, every so many-th layer has experts; the others are dense."""
    score: Literal["softmax", "sigmoid"] = "sigmoid"
    """How a router's logits become scores, in fp32."""
    normalise: bool = Field(default_factory=lambda given: given["top_k"] > 1)
    """Divide the scores of the chosen experts by their sum. Default: where there is more than one
    of them."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on what the routed experts give."""
    groups: Positive = 1
    """Groups of neighbouring experts, of which a token may use `top_groups` only."""
    top_groups: Positive = Field(default_factory=lambda given: given["groups"])
    """Groups whose experts a token may use. Default: all."""
    group_best: Positive = 1
    """A group is judged by the sum of its so many best scores."""
    balance: Literal["bias", "sequence", "global", "none"] = "bias"
    """How experts are kept equally busy. `bias`: one number for each expert is added to its score
    where experts are chosen, and moved after every step (Wang et al. 2024), with a small loss for
    each sequence. `sequence`: that loss alone. `global`: a loss on the load of the step before."""
    balance_rate: Annotated[float, Field(gt=0)] = 1e-3
    """bias: how far it moves in a step, at most."""
    balance_loss: Annotated[float, Field(ge=0)] = Field(
        default_factory=lambda given: {"bias": 1e-4, "none": 0.0}.get(given["balance"], 1e-2)
    )
    """Weight of the balance loss per token. Default: 1e-4 with bias, 1e-2 as sequence or global."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared log-sum-exp of a router's logits per token (ST-MoE uses 1e-3)."""
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A router's inputs are multiplied by random factors in 1 - jitter to 1 + jitter."""
    capacity: Annotated[float, Field(gt=0)] | None = None
    """Let each rank send no more than so many times the mean load of a microbatch to an expert, and
    drop what scores least of the rest. The answer then depends on the layout. Default: no limit."""
