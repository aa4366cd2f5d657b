"""Checks of `model.parametrisation` and the widths of its base model."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.model import ModelConfig
from megaframe.config.optim import OptimConfig
from megaframe.config.parts import OptimizerPart


def find_parametrisation_mistakes(model: ModelConfig, optim: OptimConfig) -> Iterator[str]:
    """Yield a message for each mistake in the parametrisation of a model, and one if it does not
    know how to scale the learning rates of the optimizer."""
    if model.parametrisation == "standard":
        for key in ("mup_base_hidden", "mup_base_head_dim"):
            value = getattr(model, key)
            if value is not None:
                yield (
                    f"model.{key}={value} has no effect with model.parametrisation=standard; leave "
                    "it out, or use model.parametrisation=mup"
                )
        return
    if model.mup_base_hidden is None:
        yield (
            "model.parametrisation=mup needs model.mup_base_hidden, the width at which optim.lr "
            f"was found; without one it would be that of model.hidden={model.hidden}, and mup the "
            "same as standard"
        )
    if isinstance(optim.name, OptimizerPart) and optim.name.scales_like is None:
        yield (
            f"model.parametrisation=mup cannot scale the learning rates of optim.name="
            f"{optim.name.name}, whose class says nothing of scales_like; set it to adamw or sgd, "
            "or use one of our optimizers"
        )
