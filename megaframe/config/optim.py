"""Optimizer, learning rate and parameter groups: keys of `optim`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaframe.config.parts import OptimizerPart, SchedulePart
from megaframe.config.registry import Extensible
from megaframe.config.section import NonNegative, Positive, Section


class ParameterGroupConfig(Section):
    """Rates of a group of parameters."""

    lr: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the learning rate of these parameters."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of these parameters. Default: `optim.weight_decay`, or 0 for vectors."""


class ParameterGroupsConfig(Section):
    """The groups of parameters, by the role that layers give them."""

    matrix: ParameterGroupConfig = ParameterGroupConfig()
    """Weights of the linear layers in the blocks."""
    embedding: ParameterGroupConfig = ParameterGroupConfig()
    """Token and position tables, including a tied head."""
    head: ParameterGroupConfig = ParameterGroupConfig()
    """The output head, if it is not tied."""
    vector: ParameterGroupConfig = ParameterGroupConfig()
    """Gains and biases."""


class OptimConfig(Section):
    """The optimizer, its state, and the learning rate."""

    name: Annotated[
        Literal["adamw", "muon", "lion", "sgd"] | OptimizerPart, Extensible("optimizer")
    ] = "adamw"
    """Optimizer. `muon` orthogonalises the updates of matrices and uses AdamW for everything
    else."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of the decay."""
    schedule: Annotated[
        Literal["constant", "cosine", "linear", "wsd", "inverse_sqrt"] | SchedulePart,
        Extensible("schedule"),
    ] = "cosine"
    """Learning rate after warm-up. `wsd` stays at `lr` and falls linearly at the end."""
    warmup: NonNegative = 0
    """Steps of linear warm-up from 0. A run shorter than its warm-up gives a warning."""
    decay: Positive | None = None
    """cosine, linear: step at which `min_lr` is reached (default: train.steps). wsd: length of the
    final decay in steps (default: a fifth of train.steps)."""
    span: tuple[NonNegative, Positive] | None = None
    """The steps over which the schedule runs, as [first, last]: warm-up and `decay` count from the
    first, and the last takes the place of `train.steps`. Default: [0, train.steps], and for a phase
    with keys of the learning rate (`data.phases`) that phase."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """adamw: decay of the running mean of gradients. lion: weight of that mean in the update
    direction."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        default_factory=lambda values: 0.99 if values["name"] == "lion" else 0.95
    )
    """adamw: decay of the running mean of squared gradients. lion: decay of the running mean of
    gradients. Default: 0.99 for lion, 0.95 otherwise."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """adamw: added to the square root of the mean squared gradient."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """muon, sgd: momentum. Default: 0.95 for muon, 0.9 for sgd."""
    nesterov: bool | None = None
    """muon, sgd: use Nesterov momentum. Default: true for muon, false for sgd."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of matrices and embeddings, for every optimizer. Norms and biases have
    none."""
    groups: ParameterGroupsConfig = ParameterGroupsConfig()
    """Learning rates and weight decays per kind of parameter."""
    frozen: tuple[str, ...] = ()
    """Names of parameters that are not trained; `*` matches anything, as in `blocks.0.*`, and `!`
    before a pattern means all that it does not match, as in `!head.*`."""
    state: Literal["master", "bf16", "int8"] = "master"
    """Type of the optimizer's running averages: that of the master weights, or fewer bits with
    stochastic rounding, which keeps the averages unbiased."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, saved in checkpoints.
    `tools/generate.py --ema` uses it."""
    offload: bool = False
    """Keep optimizer state in host memory, and under bf16 and fp16 the master weights too, and
    transfer it in chunks for the update. Works with every optimizer; has no effect on a CPU."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    loss_scale: Annotated[float, Field(gt=0)] = 65536.0
    """fp16: initial loss scale; halved on overflow."""
    loss_scale_window: Positive = 1000
    """fp16: steps without overflow after which the loss scale doubles."""
