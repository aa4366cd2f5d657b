"""Bases of descriptions from outside that derive nothing by hand: what their layers keep, compute,
need and send is measured.

Such a description says what has parameters (`parts`), how wide the stream is (`hidden`), what ranks
can divide, and makes the layer. Numbers that depend on the length of a sample and on the precision
follow from a few measurements of short samples, in each precision.

Nothing here imports torch until something is measured that no process has measured before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megaframe.architecture.layer import (
    BatchedProduct,
    FeedForwardDescription,
    HasParameters,
    LayerDescription,
    MixerDescription,
    SavedActivations,
)
from megaframe.architecture.linear import Number
from megaframe.architecture.norm import NormDescription
from megaframe.architecture.traffic import AxisTraffic
from megaframe.config import ParallelConfig, TrainConfig
from megaframe.config.parts import ActivationPart
from megaframe.errors import UserError

if TYPE_CHECKING:
    from megaframe.model.layer_measurement import MeasuredLayer

_TOKENS = 64
"""Tokens of a rank in the shorter of two samples that are measured."""
_PRECISIONS = ("bf16", "fp32", "fp64")
DIVIDING_KEYS = ("tensor", "context", "context_kind", "context_heads", "tensor_chunks")
"""Keys of a layout on which the part of a layer that a rank has depends."""


class Measured(LayerDescription):
    """A description whose saved activations are measured; beside `SoftmaxAttention`, which knows
    the rest of attention, or `MLPDescription`."""

    hidden: int
    """Width of the stream."""

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what is measured."""
        selective = "selective" if recompute == "selective" else "none"
        return fit_saved(self, self.hidden, _select_sizes(parallel), selective)

    def find_mistakes(self, parallel: ParallelConfig) -> Iterator[str]:
        """Yield a message if the layer cannot be divided like this, cannot be measured, or does
        what no layer may do."""
        yield from super().find_mistakes(parallel)
        try:
            measure(self, self.hidden, ParallelConfig(), _TOKENS)
        except UserError as error:
            yield str(error)


class MeasuredMixer(Measured, MixerDescription):
    """A mixer that is measured."""

    @property
    def widest(self) -> int:
        """Half of what a backward pass has at its widest place besides what is kept."""
        return _count_widest(self, self.hidden)

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return the products without a parameter, as one rank makes them in a sample."""
        measured = measure(self, self.hidden, ParallelConfig(), seq)
        products = [
            (product.rows, product.outputs, product.terms, product.number)
            for product in measured.products
            if not product.has_weight
        ]
        return tuple(
            BatchedProduct(sum(number for *_, number in group), *shape)
            for shape, group in groupby(sorted(products), lambda product: product[:3])
        )

    def count_traffic(
        self, parallel: ParallelConfig, seq: int, near: int = 1
    ) -> Mapping[str, AxisTraffic]:
        """Return what is measured to move over the context axis."""
        if parallel.context == 1:
            return {}
        sizes = _select_sizes(parallel.model_copy(update={"tensor": 1}))
        return {"context": _count_context_traffic(self, self.hidden, sizes, seq)}

    @property
    def passed_elements(self) -> int:
        """What one piece of a sample sends if two ranks pass states, as it is measured."""
        if not self.context_kinds:
            return 0
        kind = {"context": 2, "context_kind": self.context_kinds[0]}
        parallel = ParallelConfig.model_validate(kind)
        sent = measure(self, self.hidden, parallel, 2 * _TOKENS).forward_bytes.get("context", 0)
        return sent // (2 * 4)  # two pieces, in fp32


class MeasuredNorm(NormDescription):
    """A norm that is measured."""

    @property
    def saved_statistics(self) -> SavedActivations:
        """What is measured to be kept, besides the result."""
        return _fit_alone(self, self.width)


class MeasuredActivation(ActivationPart):
    """An activation that is measured."""

    def count_saved(self) -> int:
        """Return the elements that are measured to be kept, besides the result."""
        width = 64
        saved = _fit_alone(self, width)
        size = saved.values + 2 * saved.statistics  # as bytes of bf16
        return -(-int(2 * size + saved.other_bytes) // (2 * width))


@dataclass(frozen=True)
class _Alone(FeedForwardDescription):
    """A norm or an activation as a layer of its own.

    Attributes:
        part: The description of the norm, or the activation.
        hidden: Width of the stream.
    """

    part: NormDescription | ActivationPart
    hidden: int

    name = "alone"
    widest = 0
    inner_elements = 0.0

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The parameters of a norm."""
        return {"norm": self.part} if isinstance(self.part, NormDescription) else {}

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what is measured, without the result."""
        saved = fit_saved(self, self.hidden, ParallelConfig(), "none")
        keeps_output = measure(self, self.hidden, ParallelConfig(), _TOKENS).keeps_output
        return saved + SavedActivations(-self.hidden * keeps_output)

    def make_layer(self, name: str, setup: Any) -> Any:
        """Return the layer."""
        from megaframe.model.layer_measurement import OperationLayer  # imports torch

        return OperationLayer(name, self.part)


def _fit_alone(part: NormDescription | ActivationPart, width: int) -> SavedActivations:
    return _Alone(part, width).count_saved(ParallelConfig(), "none")


class MeasuredFeedForward(Measured, FeedForwardDescription):
    """A feed-forward layer that is measured."""

    @property
    def widest(self) -> int:
        """Half of what a backward pass has at its widest place besides what is kept."""
        return _count_widest(self, self.hidden)

    @property
    def inner_elements(self) -> float:
        """What it keeps, as its elementwise operators have written it."""
        return float(self.count_saved(ParallelConfig(), "none").values)


def measure(
    description: LayerDescription,
    hidden: int,
    parallel: ParallelConfig,
    seq: int,
    precision: Any = "fp32",
    recompute: Any = "none",
    rank: int = 0,
) -> MeasuredLayer:
    """Measure a layer for one sample, or find what was measured before.

    Args:
        description: The layer.
        hidden: Width of the stream.
        parallel: The tensor and context ranks that divide it.
        seq: Tokens of the sample.
        precision: Of the model.
        recompute: `none` or `selective`.
        rank: Which of the ranks.

    Raises:
        UserError: As `megaframe.model.layer_measurement.measure_layer`.
    """
    from megaframe.model.measurement_cache import find_measurement  # imports torch

    keys = {"seq": seq, "microbatch": 1, "global_batch": 1}
    train = TrainConfig.model_validate({**keys, "precision": precision, "recompute": recompute})
    return find_measurement(description, hidden, parallel, train, rank=rank)


def _select_sizes(parallel: ParallelConfig) -> ParallelConfig:
    """Return the part of a layout on which a layer depends, so that others share measurements."""
    return ParallelConfig.model_validate({name: getattr(parallel, name) for name in DIVIDING_KEYS})


@lru_cache(maxsize=4096)
def fit_saved(
    description: LayerDescription, hidden: int, parallel: ParallelConfig, recompute: str
) -> SavedActivations:
    """Return what the ranks that divide a layer keep together per token. Whatever grows with the
    length of the sample beyond its tokens belongs to pairs of them.

    Args:
        description: The layer.
        hidden: Width of the stream.
        parallel: The tensor and context ranks that divide it.
        recompute: `none` or `selective`.
    """
    ranks = parallel.tensor * parallel.context
    short = 2 * _TOKENS * ranks

    def count(seq: int, precision: str) -> Fraction:
        measured = measure(description, hidden, parallel, seq, precision, recompute)
        return Fraction(measured.saved_bytes * ranks, seq)

    return fit_bytes(count, short)


def fit_bytes(count: Callable[[int, str], Fraction], short: int) -> SavedActivations:
    """Return what is kept per token, from the bytes of samples of two lengths in each precision.

    Args:
        count: Returns the bytes per token of a sample with this many tokens, in this precision.
        short: Tokens of the shorter sample; the other one has twice as many.
    """
    once, twice = (
        _separate_types(*(count(seq, precision) for precision in _PRECISIONS))
        for seq in (short, 2 * short)
    )
    slopes = [max(Fraction(), b - a) / short for a, b in zip(once, twice, strict=True)]
    constants = [b - slope * 2 * short for b, slope in zip(twice, slopes, strict=True)]
    pairs = SavedActivations(*map(_simplify, slopes)) if any(slopes) else None
    values, statistics, other_bytes = map(_simplify, constants)
    return SavedActivations(values, statistics, other_bytes, pairs)


def _separate_types(bf16: Number, fp32: Number, fp64: Number) -> tuple[Number, Number, Number]:
    """Return elements of the model's precision, elements of at least fp32, and other bytes, from
    the bytes of each precision: 2 v + 4 s + o, 4 v + 4 s + o and 8 v + 8 s + o."""
    values = (fp32 - bf16) / 2
    statistics = max(Fraction(), (fp64 - fp32 - 4 * values) / 4)
    return values, statistics, bf16 - 2 * values - 4 * statistics


def _simplify(value: Fraction) -> Number:
    """Return an int, or if it is none a float, as arrays of NumPy are multiplied by it."""
    return value.numerator if value.denominator == 1 else float(value)


def _count_widest(description: LayerDescription, hidden: int) -> int:
    measured = measure(description, hidden, ParallelConfig(), _TOKENS)
    more = measured.backward_peak_bytes - measured.saved_bytes
    return max(hidden, more // (2 * 4 * _TOKENS))


@lru_cache(maxsize=4096)
def _count_context_traffic(
    description: LayerDescription, hidden: int, parallel: ParallelConfig, seq: int
) -> AxisTraffic:
    """Return what context ranks send together per token: around a ring the first one sends as much
    less than the mean as the last one sends more."""

    def count(precision: str) -> tuple[Fraction, Fraction]:
        ends = [
            measure(description, hidden, parallel, seq, precision, rank=rank)
            for rank in (0, parallel.context - 1)
        ]
        forward, backward = (
            Fraction(sum(sent.get("context", 0) for sent in both) * parallel.context, 2 * seq)
            for both in ([m.forward_bytes for m in ends], [m.backward_bytes for m in ends])
        )
        return forward, backward

    pairs = [
        ((fp32 - bf16) / 2, (2 * bf16 - fp32) / 4)
        for bf16, fp32 in zip(count("bf16"), count("fp32"), strict=True)
    ]
    (forward, wide_forward), (backward, wide_backward) = (map(_simplify, each) for each in pairs)
    return AxisTraffic(forward, backward, wide_forward, wide_backward)
