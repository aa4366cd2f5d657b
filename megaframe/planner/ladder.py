"""A ladder: runs of one shape in growing sizes, of which the number of layers is the only dial.

A config is a rung itself: the one with its own number of layers. Others follow from it. Widths and
heads are in proportion to the layers. There are equally many tokens for each parameter, and the
batch grows with the FLOPs as a near-optimal one does. The learning rate is that of the config in
muP, which makes it the same over widths, and grows with the root of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaframe.config import RunConfig
from megaframe.config.model import ModelConfig
from megaframe.errors import UserError, join_or
from megaframe.layout import Layout
from megaframe.planner.model_sizes import scale_model
from megaframe.planner.parameter_counts import count_model_parameters
from megaframe.planner.theory.loss_fit import LEAST_RUNS
from megaframe.planner.theory.scaling_laws import FLOPS_PER_PARAMETER, compute_batch_tokens

_DIGITS = 4
"""Digits of rates that follow from others."""


@dataclass(frozen=True)
class Rung:
    """A run of the ladder.

    Attributes:
        layers: Its place on the dial.
        parameters: Of the whole model, with its tables.
        tokens: On which it is trained.
        keys: What it changes of the config, in the format of a command line.
    """

    layers: int
    parameters: int
    tokens: int
    keys: Mapping[str, str]

    @property
    def flops(self) -> float:
        """C = 6 N D."""
        return FLOPS_PER_PARAMETER * self.parameters * self.tokens

    @property
    def name(self) -> str:
        """Of its folder and its config file."""
        return f"depth-{self.layers}"


@dataclass(frozen=True)
class Ladder:
    """All runs of one shape.

    Attributes:
        config: The run whose shape they have.
        tokens_per_parameter: D / N.
        ranks: Of each run.
    """

    config: RunConfig
    tokens_per_parameter: float
    ranks: int

    def make_rungs(self, depths: Sequence[int], target: int) -> list[Rung]:
        """Return rungs in order, the target last.

        Args:
            depths: Numbers of layers of the rungs that are run to fit a law.
            target: Number of layers of the rung whose loss is predicted.

        Raises:
            UserError: There are too few rungs, one has no such shape, or its tokens make no step.
        """
        below = sorted({depth for depth in depths if depth < target})
        if len(below) < LEAST_RUNS:
            raise UserError(
                f"--depths {_format(depths)} has {len(below)} rungs below --target {target}, and a "
                f"law needs {LEAST_RUNS}; {_suggest_depths(self.config.model, target)}"
            )
        return [self.make_rung(depth) for depth in (*below, target)]

    def make_rung(self, layers: int) -> Rung:
        """Return the rung with so many layers.

        Raises:
            UserError: There is no such shape, or its tokens make no step.
        """
        config, train, optim = self.config, self.config.train, self.config.optim
        shape = _scale_shape(config.model, layers)
        parameters, own = (
            count_model_parameters(model, train).total for model in (shape, config.model)
        )
        data = Layout.from_parallel(config.parallel, self.ranks).data
        growth = compute_batch_tokens((parameters / own) ** 2) / compute_batch_tokens(1.0)
        unit = train.microbatch * data
        batch = max(1, round(train.global_batch * growth / unit)) * unit
        tokens = self.tokens_per_parameter * parameters
        steps = math.floor(tokens / (batch * train.seq))
        if not steps:
            raise UserError(
                f"--tokens-per-parameter {self.tokens_per_parameter:g} are {tokens:,.0f} tokens "
                f"for {layers} layers, less than a step of {batch * train.seq:,}; use "
                f"{math.ceil(100 * batch * train.seq / parameters) / 100:g} or more, or a smaller "
                "batch"
            )
        rate = math.sqrt(batch / train.global_batch)
        sizes = {"layers": layers, "hidden": shape.hidden, "heads": shape.heads, "ffn": shape.ffn}
        sizes |= {"kv_heads": shape.kv_heads}
        keys: dict[str, object] = {f"model.{key}": size for key, size in sizes.items()}
        keys |= {
            "model.parametrisation": "mup",
            "model.mup_base_hidden": config.model.mup_base_hidden or config.model.hidden,
            "train.steps": steps,
            "train.global_batch": batch,
            "train.eval_every": steps,
            "optim.lr": f"{optim.lr * rate:.{_DIGITS}g}",
            "optim.min_lr": f"{optim.min_lr * rate:.{_DIGITS}g}",
            "optim.warmup": round(optim.warmup * steps / train.steps),
            "checkpoint.resume": "latest",
        }
        if optim.decay is not None:
            keys["optim.decay"] = max(1, round(optim.decay * steps / train.steps))
        texts = {key: str(value) for key, value in keys.items()}
        return Rung(layers, parameters, steps * batch * train.seq, texts)


def _scale_shape(model: ModelConfig, layers: int) -> ModelConfig:
    """Return a model with so many layers and exactly the proportions of this one."""
    scaled = scale_model(model, layers)
    unit = _find_depth_unit(model)
    if layers < 1 or layers % unit:
        below = layers // unit * unit
        near = [str(depth) for depth in (below, below + unit) if depth > 0]
        raise UserError(
            f"{layers} layers have no width: model.hidden={model.hidden}, model.heads="
            f"{model.heads} and model.kv_heads={model.kv_heads} of model.layers={model.layers} are "
            f"in proportion at multiples of {unit}; use {join_or(near)}"
        )
    ffn = model.ffn * layers // model.layers if model.ffn * layers % model.layers == 0 else None
    return scaled.model_copy(update={"ffn": ffn or scaled.ffn})


def _find_depth_unit(model: ModelConfig) -> int:
    """Return the number of layers of whose multiples all have whole numbers of heads, and widths in
    proportion."""
    units = (model.layers // math.gcd(model.layers, n) for n in (model.kv_heads, model.hidden))
    return math.lcm(*units)


def _suggest_depths(model: ModelConfig, target: int) -> str:
    """Return which depths make a ladder below the target, or which target is above one."""
    unit = _find_depth_unit(model)
    below = range(unit, target, unit)
    if len(below) >= LEAST_RUNS:
        return f"use --depths {_format(below[-LEAST_RUNS - 1 :])}"
    least = [unit * number for number in range(1, LEAST_RUNS + 2)]
    return f"use --depths {_format(least[:-1])} and --target {least[-1]}"


def _format(depths: Sequence[int]) -> str:
    return ",".join(map(str, depths))
