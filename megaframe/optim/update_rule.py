"""UpdateRule: how gradients change one flat span of weights, and what it remembers between steps.

The optimizer has one `OptimizerShard` per bucket: the rule and its state over the part of the
bucket whose master weights this rank has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.architecture.spec import Box, ParamSpec
from megaframe.data_parallel.bucket import Bucket
from megaframe.data_parallel.partition import BucketPartition
from megaframe.data_parallel.quantised_bucket import QuantisedBucket


@dataclass(frozen=True)
class UpdateStep:
    """The numbers of one update.

    Attributes:
        number: Of the run's updates, from 1. Where a transform gets it: of the updates of the
            parameters that it changes, as bias corrections count them.
        lr: The learning rate.
        divisor: Scalar in master precision by which to divide gradients.
        skip: fp32 scalar; if it is 1, nothing changes.
    """

    number: int
    lr: float
    divisor: Tensor
    skip: Tensor

    def select(self, value: float, skipped: float) -> Tensor:
        """Return a scalar in master precision: `value`, or `skipped` in a skipped step."""
        # Selected on the device: whether to skip is not known to the host.
        full = torch.full_like(self.divisor, value)
        return torch.where(self.skip.bool(), torch.full_like(self.divisor, skipped), full)

    def divide_gradients(self, sums: Tensor) -> Tensor:
        """Divide `sums` in place and return them; zero in a skipped step, even if not finite."""
        # A product with zero would keep what is not finite.
        return sums.div_(self.divisor).masked_fill_(self.skip.bool(), 0.0)


@dataclass(frozen=True)
class CountedPiece:
    """Weights whose updates are counted from the same one.

    Attributes:
        span: The place of the weights.
        updates_before: Updates of the run before their first one.
    """

    span: slice
    updates_before: int


class UpdateRule:
    """Base of the rules that update one flat span of weights in master precision.

    An update has three phases, so that a rule can work together with other ranks: the transfers of
    several rules are in flight at once. A rule that needs no other rank does everything in the
    first one. By default a rule has no state.

    Attributes:
        has_phases: Whether there is anything to do after the first phase.
    """

    has_phases = False

    @property
    def state(self) -> Mapping[str, Tensor]:
        """All state, as it is stored in memory."""
        return {}

    def initialize_state(self, weights: Tensor) -> None:
        """Begin a run: the weights have their initial values."""

    def update(
        self, weights: Tensor, grads: Tensor, step: UpdateStep, rounded: Tensor | None = None
    ) -> None:
        """Change the weights, or start to.

        Args:
            weights: On the device or, if `rounded` is given, where the state is stored.
            grads: On the device; may be changed as is convenient.
            step: The numbers of the update.
            rounded: Receives the weights in its own type, on the device.
        """
        raise NotImplementedError

    def continue_update(self) -> None:
        """Do what comes between two transfers, and start the second one."""

    def finish_update(self) -> None:
        """Wait for the last transfer, and change the weights."""

    def export_state(self, *, to_load: bool = False) -> Mapping[str, Tensor]:
        """Return the state for a checkpoint.

        Args:
            to_load: The caller may change the tensors; `load_exported_state` then takes them
                back.

        Returns:
            Tensors as long as the weights, by name.
        """
        return {}

    def load_exported_state(self) -> None:
        """Take back the tensors that `export_state` returned, which have been changed."""

    def set_update_counts(self, pieces: Sequence[CountedPiece]) -> None:
        """Count updates from another one for some of the weights, if the rule counts them.

        Args:
            pieces: The whole span of the weights, in order.
        """


class OptimizerShard:
    """The rule and its state for the weights of a bucket that this rank has. rule: None if the
    bucket is frozen."""

    def __init__(self, bucket: Bucket, rule: UpdateRule | None) -> None:
        self.bucket, self.rule = bucket, rule

    @property
    def is_coded(self) -> bool:
        """Whether the weights are kept as codes."""
        return isinstance(self.bucket, QuantisedBucket)

    def begin(self) -> None:
        """Begin a run with the weights as they are."""
        if self.rule is not None:
            self.rule.initialize_state(self.bucket.weights)
        self.bucket.publish_weights()

    def start_update(self, step: UpdateStep) -> None:
        """Run the first phase of the rule."""
        if self.rule is not None:
            bucket = self.bucket
            if bucket.gathers:
                bucket.wait_for_gather()  # it sends the weights that are about to change
            # Only this rank's part, in master precision; `rounded` is what gathers then send.
            self.rule.update(bucket.weights, bucket.grad_sums, step, bucket.rounded)

    def continue_update(self) -> None:
        """Run the second phase of the rule."""
        if self.rule is not None:
            self.rule.continue_update()

    def finish_update(self) -> None:
        """Run the last phase of the rule."""
        if self.rule is not None:
            self.rule.finish_update()

    def load(self, updates_before: Mapping[str, int]) -> None:
        """Continue with weights and state that were loaded into the tensors of `list_tensors`.

        Args:
            updates_before: Updates of the run before the first one of a parameter, by name; none
                where a name is missing.
        """
        if self.rule is not None:
            self.rule.load_exported_state()
            names = [parameter.spec.name for parameter in self.bucket.parameters]
            numbers = [updates_before.get(name, 0) for name in names]
            self.rule.set_update_counts(find_counted_pieces(self.bucket.partition, numbers))
        self.bucket.publish_weights()

    def list_tensors(self, *, owned: bool) -> Iterator[tuple[str, ParamSpec, Box, Tensor]]:
        """Yield what a checkpoint holds of this bucket.

        Args:
            owned: Only this rank's part, which no other rank of its copy saves; else all that this
                rank has, to load it.

        Yields:
            Key, spec, box and piece.
        """
        bucket = self.bucket
        # The other end of a tied table saves it.
        if bucket.replica and owned:
            return
        # At ZeRO stage 0 all ranks have all weights, and each saves its own part.
        span = bucket.owned_span if owned else bucket.master_span
        start = bucket.master_span.start
        state = {} if self.rule is None else self.rule.export_state(to_load=not owned)
        bucket.open_weights()
        for prefix, tensor in (("", bucket.weights), *state.items()):
            # State is as long as the weights, so one slice serves all tensors.
            flat = tensor[span.start - start : span.stop - start]
            for parameter, box, piece in bucket.iterate_pieces(flat, span):
                name = parameter.spec.name
                key = f"optimizer.{prefix}/{name}" if prefix else name
                yield key, parameter.spec, box, piece
        if owned:
            bucket.close_weights()


def find_counted_pieces(
    partition: BucketPartition, updates_before: Sequence[int]
) -> list[CountedPiece]:
    """Divide this rank's weights of a bucket where their updates are counted from another one.

    Args:
        partition: How the bucket is divided.
        updates_before: Updates of the run before the first one of each parameter.

    Returns:
        The whole span of the weights, in as few pieces as possible, with places from its start.
    """
    master, pieces = partition.master_span, list[CountedPiece]()
    # Padding follows the parameter before it: nothing reads it.
    ends = [*partition.starts[1:], partition.length]
    for start, end, before in zip(partition.starts, ends, updates_before, strict=True):
        low, high = max(start, master.start), min(end, master.stop)
        if low >= high:
            continue
        first = low - master.start
        if pieces and pieces[-1].updates_before == before:
            first = pieces.pop().span.start
        pieces.append(CountedPiece(slice(first, high - master.start), before))
    return pieces
