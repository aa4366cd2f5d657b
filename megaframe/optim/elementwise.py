"""Rules that change each element on its own, and the transforms that they are made of: those of
Lion and SGD, and the average of weights.

Weight decay is decoupled from the gradient in all of them (Loshchilov and Hutter 2019), so that one
setting means the same to each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megaframe.optim.optimizer_state import Moments, MomentStorage
from megaframe.optim.state_dtype import MasterCodec, StateCodec
from megaframe.optim.update_rule import CountedPiece, UpdateRule, UpdateStep


@dataclass(frozen=True)
class GroupRates:
    """Rates of a parameter group.

    Attributes:
        lr: Factor on the learning rate of the step.
        weight_decay: Per unit of learning rate.
    """

    lr: float = 1.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class UpdateChunk:
    """Elements that are changed together: all tensors are flat and equally long.

    Attributes:
        weights: In master precision.
        grads: Summed gradients, in master precision, not yet divided.
        moments: By name, in master precision.
        rounded: Where the device has the weights in the precision that it computes in, if that is
            another one.
    """

    weights: Tensor
    grads: Tensor
    moments: Mapping[str, Tensor]
    rounded: Tensor | None = None

    def select(self, span: slice) -> UpdateChunk:
        """Return a part of the chunk."""
        moments = {name: moment[span] for name, moment in self.moments.items()}
        rounded = None if self.rounded is None else self.rounded[span]
        return UpdateChunk(self.weights[span], self.grads[span], moments, rounded)


class UpdateTransform:
    """Base of the parts of a rule: `apply` works on a chunk.

    Attributes:
        moments: What it remembers, by names that no other part of the same rule has.
        single_chunk: It needs no memory of its own, so one chunk is best if everything is changed
            in place.
        writes_rounded: It is the only part to change weights, and writes the rounded ones too.
    """

    single_chunk = False
    writes_rounded = False

    def __init__(self, moments: Mapping[str, StateCodec]) -> None:
        self.moments = moments

    def initialize_state(self, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Begin a run with the initial weights; by default nothing depends on them."""

    def apply(self, chunk: UpdateChunk, step: UpdateStep) -> None:
        """Change weights and moments in place, and the gradients, which the next part gets."""
        raise NotImplementedError


class ElementwiseRule(UpdateRule):
    """The rule that applies several transforms to each chunk, one after the other.

    Args:
        weights: The master weights of this rank.
        transforms: Applied one after the other.
        storage: Where their moments are.
    """

    def __init__(
        self, weights: Tensor, transforms: Sequence[UpdateTransform], storage: MomentStorage
    ) -> None:
        codecs = {name: codec for part in transforms for name, codec in part.moments.items()}
        self._moments = Moments(weights, codecs, storage)
        self._transforms = tuple(transforms)
        self._single_chunk = all(part.single_chunk for part in transforms)
        self._writes_rounded = any(part.writes_rounded for part in transforms)
        self._counted: Sequence[CountedPiece] | None = None
        """None if all weights count the updates of the run."""

    @property
    def state(self) -> dict[str, Tensor]:
        """All state, as it is stored in memory."""
        return self._moments.tensors

    def initialize_state(self, weights: Tensor) -> None:
        """Begin a run: the weights have their initial values."""
        for part in self._transforms:
            part.initialize_state(weights, self.state)

    def update(
        self, weights: Tensor, grads: Tensor, step: UpdateStep, rounded: Tensor | None = None
    ) -> None:
        """Update the weights chunk by chunk."""
        # With rounded weights on the device, the master weights may come with the moments from the
        # host.
        mixed = rounded is not None
        for span, chunk_weights, moments in self._moments.iterate_chunks(
            weights, step, mixed, single_span=self._single_chunk
        ):
            chunk_grads, rounded_chunk = grads, rounded
            if chunk_weights is not weights:
                chunk_grads = grads[span]
                rounded_chunk = None if rounded is None else rounded[span]
            chunk = UpdateChunk(chunk_weights, chunk_grads, moments, rounded_chunk)
            if self._counted is None:
                for part in self._transforms:
                    part.apply(chunk, step)
            else:
                self._apply_by_count(self._counted, chunk, span, step)
            # The last thing done with a chunk, after all parts have changed the weights; rounded
            # once.
            if rounded_chunk is not None and not self._writes_rounded:
                rounded_chunk.copy_(chunk_weights)

    def _apply_by_count(
        self, counted: Sequence[CountedPiece], chunk: UpdateChunk, span: slice, step: UpdateStep
    ) -> None:
        """Apply the transforms to the chunk at `span`, where they count updates from different
        ones."""
        for piece in counted:
            low, high = max(piece.span.start, span.start), min(piece.span.stop, span.stop)
            if low >= high:
                continue
            is_whole = (low, high) == (span.start, span.stop)
            part = chunk if is_whole else chunk.select(slice(low - span.start, high - span.start))
            # Reduced types are drawn by the run's number, bias corrected by the parameter's.
            own_step = replace(step, number=step.number - piece.updates_before)
            for transform in self._transforms:
                transform.apply(part, own_step)

    def set_update_counts(self, pieces: Sequence[CountedPiece]) -> None:
        """Let the transforms count updates from another one for some of the weights."""
        self._counted = pieces if any(piece.updates_before for piece in pieces) else None

    def export_state(self, *, to_load: bool = False) -> dict[str, Tensor]:
        """Return the state for a checkpoint, each tensor as long as the weights."""
        return self._moments.export(to_load=to_load)

    def load_exported_state(self) -> None:
        """Take back the tensors that were exported, which have been changed."""
        self._moments.load()


@dataclass(frozen=True)
class LionOptions:
    """The constants of Lion.

    Attributes:
        beta1: Weight of the running mean in the direction.
        beta2: Decay of the running mean.
        rates: Rates of the parameter group.
    """

    beta1: float
    beta2: float
    rates: GroupRates


class Lion(UpdateTransform):
    """Moves by the sign of a mean of gradients that favours the last one (Chen et al. 2023)."""

    def __init__(self, options: LionOptions, storage: MomentStorage) -> None:
        super().__init__({"mean": storage.signed})
        self.options = options

    def apply(self, chunk: UpdateChunk, step: UpdateStep) -> None:
        """w -= lr (sign(beta1 m + (1 - beta1) g) + decay w); m = beta2 m + (1 - beta2) g."""
        mean, rates = chunk.moments["mean"], self.options.rates
        grads = step.divide_gradients(chunk.grads)
        # The direction uses beta1 and the old mean; the mean itself moves by beta2 afterwards.
        direction = mean.lerp(grads, 1.0 - self.options.beta1).sign_()
        apply_update(chunk.weights, direction, rates, step)
        # A weight of 0 in a skipped step leaves the mean as it was.
        mean.lerp_(grads, step.select(1.0 - self.options.beta2, 0.0))


@dataclass(frozen=True)
class MomentumOptions:
    """The constants of SGD with momentum, and of Muon.

    Attributes:
        momentum: What is left of the sum of gradients after a step.
        nesterov: Move as the next step would if the gradient stayed the same.
        rates: Rates of the parameter group.
    """

    momentum: float
    nesterov: bool
    rates: GroupRates


class Momentum(UpdateTransform):
    """Turns gradients into the direction to move in: m = momentum m + g or, with nesterov, g +
    momentum m, as in torch (Sutskever et al. 2013)."""

    def __init__(self, options: MomentumOptions, storage: MomentStorage) -> None:
        super().__init__({"momentum": storage.signed} if options.momentum else {})
        self.options = options

    def apply(self, chunk: UpdateChunk, step: UpdateStep) -> None:
        """Change momentum and gradients; the weights stay as they are."""
        grads = step.divide_gradients(chunk.grads)
        if not chunk.moments:
            return
        momentum = chunk.moments["momentum"]
        # In a skipped step the factor is 1 and the gradients are zero, so the momentum stays.
        momentum.mul_(step.select(self.options.momentum, 1.0)).add_(grads)
        # The gradients' memory takes the direction, which the next transform reads.
        if self.options.nesterov:
            grads.add_(momentum, alpha=self.options.momentum)
        else:
            grads.copy_(momentum)


class GradientDescent(UpdateTransform):
    """Moves one step in the direction that the gradients hold. After `Momentum` this is SGD."""

    def __init__(self, rates: GroupRates) -> None:
        super().__init__({})
        self._rates = rates

    def apply(self, chunk: UpdateChunk, step: UpdateStep) -> None:
        """w -= lr (direction + decay w)."""
        apply_update(chunk.weights, chunk.grads, self._rates, step)


class WeightAverage(UpdateTransform):
    """Exponential moving average of the weights."""

    single_chunk = True

    def __init__(self, decay: float) -> None:
        super().__init__({"ema": MasterCodec()})
        self._decay = decay

    def initialize_state(self, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Start from the initial weights."""
        # From zero it would need a correction of its bias.
        state["ema"].copy_(weights)

    def apply(self, chunk: UpdateChunk, step: UpdateStep) -> None:
        """ema = decay ema + (1 - decay) w."""
        chunk.moments["ema"].lerp_(chunk.weights, step.select(1.0 - self._decay, 0.0))


def apply_update(weights: Tensor, direction: Tensor, rates: GroupRates, step: UpdateStep) -> None:
    """Move the weights: w -= lr (direction + decay w).

    Args:
        weights: In master precision, [N]; changed.
        direction: What to move against, [N]; overwritten.
        rates: Rates of the parameter group.
        step: The numbers of the update.
    """
    # A rate of 0 in a skipped step leaves the weights unchanged, decay included.
    lr = step.select(step.lr * rates.lr, 0.0)
    weights.mul_(1.0 - lr * rates.weight_decay).sub_(direction.mul_(lr))
