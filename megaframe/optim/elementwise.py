"""Rules that change each element on its own, and the changes that they are made of: those of Lion
and SGD, and the average of weights.

Weight decay is decoupled from the gradient in all of them (Loshchilov and Hutter 2019), so that one
setting means the same to each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megaframe.optim.optimizer_state import Keeping, Moments
from megaframe.optim.rule import Step
from megaframe.optim.state_dtype import Code, Master


@dataclass(frozen=True)
class Rates:
    """lr: factor on the learning rate of the step. weight_decay: per unit of learning rate."""

    lr: float = 1.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Chunk:
    """Elements that are changed together: all tensors are flat, equally long and in master
    precision. moments: by name. rounded: where the device keeps the weights in the precision that
    it computes in, if that is another one."""

    weights: Tensor
    grads: Tensor
    moments: Mapping[str, Tensor]
    rounded: Tensor | None = None


class Change:
    """Base of changes: `apply` works on a chunk. moments: what it remembers, by names that no other
    change of the same weights has. whole: it needs no memory of its own, so one chunk is best if
    everything is changed in place. rounds: it is the only one to change weights, and writes the
    rounded ones too."""

    whole = False
    rounds = False

    def __init__(self, moments: Mapping[str, Code]) -> None:
        self.moments = moments

    def start(self, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Begin a run with the initial weights; by default nothing depends on them."""

    def apply(self, chunk: Chunk, step: Step) -> None:
        """Change weights and moments in place, and the gradients, which the next change gets."""
        raise NotImplementedError


class Elementwise:
    """The rule that makes several changes to each chunk, one after the other."""

    def __init__(self, weights: Tensor, changes: Sequence[Change], keeping: Keeping) -> None:
        codes = {name: code for change in changes for name, code in change.moments.items()}
        self._moments = Moments(weights, codes, keeping)
        self._changes = tuple(changes)
        self._whole = all(change.whole for change in changes)
        self._rounds = any(change.rounds for change in changes)

    @property
    def state(self) -> dict[str, Tensor]:
        """All state, as it is stored in memory."""
        return self._moments.tensors

    def start(self, weights: Tensor) -> None:
        """Begin a run: the weights have their initial values."""
        for change in self._changes:
            change.start(weights, self.state)

    def update(
        self, weights: Tensor, grads: Tensor, step: Step, rounded: Tensor | None = None
    ) -> Iterable[None]:
        """Update the weights; no work remains."""
        mixed = rounded is not None
        for span, mine, moments in self._moments.chunks(weights, step, mixed, whole=self._whole):
            into = None if rounded is None else rounded[span]
            for change in self._changes:
                change.apply(Chunk(mine, grads[span], moments, into), step)
            if into is not None and not self._rounds:
                into.copy_(mine)
        return ()

    def settle(self) -> None:
        """Return when everything that was changed is back where it is kept."""
        self._moments.settle()

    def shown(self, *, to_load: bool = False) -> dict[str, Tensor]:
        """Return the state for a checkpoint, each tensor as long as the weights."""
        return self._moments.shown(to_load=to_load)

    def load(self) -> None:
        """Take back the tensors that were shown, which have been changed."""
        self._moments.load()


@dataclass(frozen=True)
class LionOptions:
    """beta1: weight of the running mean in the direction. beta2: decay of the running mean."""

    beta1: float
    beta2: float
    rates: Rates


class Lion(Change):
    """Moves by the sign of a mean of gradients that favours the last one (Chen et al. 2023)."""

    def __init__(self, options: LionOptions, keeping: Keeping) -> None:
        super().__init__({"mean": keeping.signed})
        self.options = options

    def apply(self, chunk: Chunk, step: Step) -> None:
        """w -= lr (sign(beta1 m + (1 - beta1) g) + decay w); m = beta2 m + (1 - beta2) g."""
        mean, rates = chunk.moments["mean"], self.options.rates
        grads = step.gradients(chunk.grads)
        direction = mean.lerp(grads, 1.0 - self.options.beta1).sign_()
        move(chunk.weights, direction, rates, step)
        mean.lerp_(grads, step.constant(1.0 - self.options.beta2, 0.0))


@dataclass(frozen=True)
class MomentumOptions:
    """momentum: what is left of the sum of gradients after a step. nesterov: move as the next step
    would if the gradient stayed the same."""

    momentum: float
    nesterov: bool
    rates: Rates


class Speed(Change):
    """Turns gradients into the direction to move in: m = momentum m + g or, with nesterov, g +
    momentum m, as in torch (Sutskever et al. 2013)."""

    def __init__(self, options: MomentumOptions, keeping: Keeping) -> None:
        super().__init__({"momentum": keeping.signed} if options.momentum else {})
        self.options = options

    def apply(self, chunk: Chunk, step: Step) -> None:
        """Change momentum and gradients; the weights stay as they are."""
        grads = step.gradients(chunk.grads)
        if not chunk.moments:
            return
        momentum = chunk.moments["momentum"]
        momentum.mul_(step.constant(self.options.momentum, 1.0)).add_(grads)
        if self.options.nesterov:
            grads.add_(momentum, alpha=self.options.momentum)
        else:
            grads.copy_(momentum)


class Descent(Change):
    """Moves one step in the direction that the gradients hold. After `Speed` this is SGD."""

    def __init__(self, rates: Rates) -> None:
        super().__init__({})
        self._rates = rates

    def apply(self, chunk: Chunk, step: Step) -> None:
        """w -= lr (direction + decay w)."""
        move(chunk.weights, chunk.grads, self._rates, step)


class Average(Change):
    """Exponential moving average of the weights."""

    whole = True

    def __init__(self, decay: float) -> None:
        super().__init__({"ema": Master()})
        self._decay = decay

    def start(self, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Start from the initial weights."""
        state["ema"].copy_(weights)

    def apply(self, chunk: Chunk, step: Step) -> None:
        """ema = decay ema + (1 - decay) w."""
        chunk.moments["ema"].lerp_(chunk.weights, step.constant(1.0 - self._decay, 0.0))


def move(weights: Tensor, direction: Tensor, rates: Rates, step: Step) -> None:
    """w -= lr (direction + decay w); `direction` is overwritten."""
    lr = step.constant(step.lr * rates.lr, 0.0)
    weights.mul_(1.0 - lr * rates.weight_decay).sub_(direction.mul_(lr))
