"""Rules that change each element on its own: Lion, SGD, and the average of weights beside a rule.

Weight decay is decoupled from the gradient in all of them (Loshchilov and Hutter 2019), so that one
setting means the same to each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from megaframe.optim.codes import Code, Master
from megaframe.optim.moments import Keeping, Moments
from megaframe.optim.rule import Rule, Step


@dataclass(frozen=True)
class Rates:
    """lr: factor on the learning rate of the step. weight_decay: per unit of learning rate."""

    lr: float = 1.0
    weight_decay: float = 0.0


class Elementwise:
    """Base of such rules: `apply` does the work on a chunk. whole: it needs no memory of its own,
    so that one chunk is best where moments are changed where they lie."""

    whole = False

    def __init__(self, weights: Tensor, moments: Mapping[str, Code], *, away: bool) -> None:
        self._moments = Moments(weights, moments, away=away)

    def apply(
        self, weights: Tensor, grads: Tensor, moments: Mapping[str, Tensor], step: Step
    ) -> None:
        """Change weights and moments in place; all are flat, in master precision."""
        raise NotImplementedError

    @property
    def state(self) -> dict[str, Tensor]:
        """All that is remembered, as it lies in memory."""
        return self._moments.tensors

    def start(self, weights: Tensor) -> None:
        """Nothing depends on the initial weights."""

    def update(self, weights: Tensor, grads: Tensor, step: Step) -> Iterable[None]:
        """Nothing remains to be done."""
        for span, moments in self._moments.chunks(step, whole=self.whole):
            self.apply(weights[span], grads[span], moments, step)
        return ()

    def shown(self, *, to_load: bool = False) -> dict[str, Tensor]:
        """What a checkpoint holds, each as long as the weights."""
        return self._moments.shown(to_load=to_load)

    def load(self) -> None:
        """What was shown has been changed."""
        self._moments.load()


@dataclass(frozen=True)
class LionOptions:
    """beta1: share of the mean in the direction. beta2: what the mean keeps."""

    beta1: float
    beta2: float
    rates: Rates


class Lion(Elementwise):
    """The sign of a mean of gradients that leans on the last one (Chen et al. 2023)."""

    def __init__(self, weights: Tensor, options: LionOptions, keeping: Keeping) -> None:
        super().__init__(weights, {"mean": keeping.signed}, away=keeping.away)
        self.options = options

    def apply(
        self, weights: Tensor, grads: Tensor, moments: Mapping[str, Tensor], step: Step
    ) -> None:
        """w -= lr (sign(beta1 m + (1 - beta1) g) + decay w); m = beta2 m + (1 - beta2) g."""
        mean, rates = moments["mean"], self.options.rates
        grads = step.gradients(grads)
        direction = mean.lerp(grads, 1.0 - self.options.beta1).sign_()
        move(weights, direction, rates, step)
        mean.lerp_(grads, step.constant(1.0 - self.options.beta2, 0.0))


@dataclass(frozen=True)
class MomentumOptions:
    """momentum: what is left of the sum of gradients after a step. nesterov: go where the next
    step would, if the gradient stayed."""

    momentum: float
    nesterov: bool
    rates: Rates


class SGD(Elementwise):
    """Stochastic gradient descent with momentum (Sutskever et al. 2013), in the form of torch."""

    def __init__(self, weights: Tensor, options: MomentumOptions, keeping: Keeping) -> None:
        moments = {"momentum": keeping.signed} if options.momentum else {}
        super().__init__(weights, moments, away=keeping.away)
        self.options = options

    def apply(
        self, weights: Tensor, grads: Tensor, moments: Mapping[str, Tensor], step: Step
    ) -> None:
        """m = momentum m + g; w -= lr (m + decay w), with nesterov g + momentum m in place of m."""
        grads = step.gradients(grads)
        if moments:
            gather_speed(grads, moments["momentum"], self.options, step)
        move(weights, grads, self.options.rates, step)


class Average(Elementwise):
    """Exponential moving average of the weights."""

    def __init__(self, weights: Tensor, decay: float, keeping: Keeping) -> None:
        super().__init__(weights, {"ema": Master()}, away=keeping.away)
        self._decay = decay

    def start(self, weights: Tensor) -> None:
        """It starts from the initial weights."""
        self.state["ema"].copy_(weights)

    def apply(
        self, weights: Tensor, grads: Tensor, moments: Mapping[str, Tensor], step: Step
    ) -> None:
        """ema = decay ema + (1 - decay) w."""
        moments["ema"].lerp_(weights, step.constant(1.0 - self._decay, 0.0))


class Averaged:
    """A rule, and the average of the weights that it makes."""

    def __init__(self, rule: Rule, average: Average) -> None:
        self.rule, self._average = rule, average

    @property
    def state(self) -> dict[str, Tensor]:
        """Of both."""
        return {**self.rule.state, **self._average.state}

    def start(self, weights: Tensor) -> None:
        """The weights have their initial values."""
        self.rule.start(weights)
        self._average.start(weights)

    def update(self, weights: Tensor, grads: Tensor, step: Step) -> Iterator[None]:
        """The rule's, then that of the average."""
        yield from self.rule.update(weights, grads, step)
        self._average.update(weights, grads, step)

    def shown(self, *, to_load: bool = False) -> dict[str, Tensor]:
        """Of both."""
        return {**self.rule.shown(to_load=to_load), **self._average.shown(to_load=to_load)}

    def load(self) -> None:
        """What was shown has been changed."""
        self.rule.load()
        self._average.load()


def gather_speed(grads: Tensor, momentum: Tensor, options: MomentumOptions, step: Step) -> Tensor:
    """Add gradients to the momentum, in place; they become the direction to go in."""
    momentum.mul_(step.constant(options.momentum, 1.0)).add_(grads)
    if options.nesterov:
        return grads.add_(momentum, alpha=options.momentum)
    return grads.copy_(momentum)


def move(weights: Tensor, direction: Tensor, rates: Rates, step: Step) -> None:
    """w -= lr (direction + decay w); the direction is used up."""
    lr = step.constant(step.lr * rates.lr, 0.0)
    weights.mul_(1.0 - lr * rates.weight_decay).sub_(direction.mul_(lr))
