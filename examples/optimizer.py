"""An optimizer and a learning-rate schedule from outside: AdaBelief (Zhuang et al. 2020), which
divides by how far gradients are from their mean, and a decay by one minus a square root.

python pretrain_gpt.py --config configs/demo.yaml "run.extensions=[examples/optimizer.py]" \
    optim.name=adabelief optim.schedule=root_decay
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from megaframe.config import OptimConfig
from megaframe.extensions import OptimizerPart, Registry, SchedulePart
from megaframe.optim.elementwise import GroupRates, UpdateChunk, UpdateTransform, apply_update
from megaframe.optim.optimizer_state import MomentStorage
from megaframe.optim.update_rule import UpdateStep


class AdaBeliefConfig(OptimizerPart):
    kind: Literal["adabelief"] = "adabelief"
    """AdaBelief, with `optim.beta1` and `optim.beta2`."""
    belief_eps: Annotated[float, Field(gt=0)] = 1e-12
    """Added to the mean squared deviation of a gradient from its mean."""
    scales_like = "adamw"

    def count_moments(self) -> int:
        """Return two: the mean, and the deviation from it."""
        return 2

    def make_transforms(
        self, optim: OptimConfig, rates: GroupRates, storage: MomentStorage
    ) -> list[Any]:
        """Return the only transform."""
        return [AdaBelief(optim.beta1, optim.beta2, self.belief_eps, rates, storage)]


class AdaBelief(UpdateTransform):
    """Updates a chunk of weights and both of its moments."""

    def __init__(
        self, beta1: float, beta2: float, eps: float, rates: GroupRates, storage: MomentStorage
    ) -> None:
        super().__init__({"mean": storage.signed, "belief": storage.square})
        self.beta1, self.beta2, self.eps, self.rates = beta1, beta2, eps, rates

    def apply(self, chunk: UpdateChunk, step: UpdateStep) -> None:
        """m = beta1 m + (1 - beta1) g; s = beta2 s + (1 - beta2) (g - m)^2; w -= lr (m / sqrt(s) +
        decay w), with both moments corrected for starting at zero."""
        mean, belief = chunk.moments["mean"], chunk.moments["belief"]
        grads = step.divide_gradients(chunk.grads)
        # In a skipped step, which the host does not know of, the weights of what is new are zero.
        mean.lerp_(grads, step.select(1 - self.beta1, 0.0))
        belief.lerp_((grads - mean).square_(), step.select(1 - self.beta2, 0.0))
        root = (belief / (1 - self.beta2**step.number)).add_(self.eps).sqrt_()
        direction = mean / (1 - self.beta1**step.number) / root
        apply_update(chunk.weights, direction, self.rates, step)


class RootDecayConfig(SchedulePart):
    kind: Literal["root_decay"] = "root_decay"
    """The full rate, and then a decay by one minus the square root of the share that is done."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the steps after the warm-up in which the rate decays."""

    def compute_share(self, update: int, warmup: int, steps: int) -> float:
        """Return one, and less in the last steps."""
        length = max(1, self.share * (steps - warmup))
        return 1 - math.sqrt(min(1.0, max(0.0, (update - (steps - length)) / length)))


def register(registry: Registry) -> None:
    """Give both to megaframe."""
    registry.register(AdaBeliefConfig)
    registry.register(RootDecayConfig)
