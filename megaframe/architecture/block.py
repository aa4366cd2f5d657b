"""The transformer block: what it is made of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megaframe.architecture.laurel import LaurelDescription
from megaframe.architecture.layer import (
    FeedForwardDescription,
    HasParameters,
    MixerDescription,
    SavedActivations,
)
from megaframe.architecture.layer_embedding import LayerEmbeddingDescription
from megaframe.architecture.linear import LinearSpec, Number, TensorTraffic
from megaframe.architecture.no_layer import NoLayer, NoMixer
from megaframe.architecture.norm import (
    NormDescription,
)
from megaframe.architecture.spec import Constant, ParamSpec
from megaframe.architecture.streams import StreamsDescription
from megaframe.architecture.traffic import AxisTraffic
from megaframe.config.parallel import ParallelConfig

_SECOND_STREAMS = "mlp_streams"
"""What reads and writes several streams for the second half."""


@dataclass(frozen=True)
class ScalarDescription:
    """A learned factor of the whole stream."""

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the factor."""
        yield ParamSpec(f"{name}.gain", (1,), Constant(1.0), role="gain")


@dataclass(frozen=True)
class BlockDescription:
    """A mixer of tokens and a feed-forward layer, or one of them, each of which adds to the
    residual stream. Equal for blocks of the same kind.

    Attributes:
        mixer: Mixes tokens.
        feed_forward: Follows it.
        norm: Of the stream, wherever the block has one.
        norms: `before` each half: x + half(norm(x)); `after` it: x + norm(half(x)); `both`, or
            `none`.
        parallel: `none`, or whether both halves start from the same stream, with `one_norm` or
            `two_norms` before them.
        residual_scale: Factor of what each half adds.
        drops: Whether parts of what each half adds are dropped at random in training.
        second_mixer: Starts from the same rows as the mixer, and adds to its output.
        scalar: A factor of the stream after the block; None for none.
        layer_embedding: Adds an input of its own to the stream after both halves; None without one.
        streams: How each half, or the block, reads and writes several streams; None for a single
            one, to which halves add.
        laurel: Adds to the stream beside the mixers; None without one.
    """

    mixer: MixerDescription
    feed_forward: FeedForwardDescription
    norm: NormDescription
    norms: str = "before"
    parallel: str = "none"
    residual_scale: float = 1.0
    drops: bool = False
    second_mixer: MixerDescription = field(default_factory=NoMixer)
    scalar: ScalarDescription | None = None
    layer_embedding: LayerEmbeddingDescription | None = None
    streams: StreamsDescription | None = None
    laurel: LaurelDescription | None = None

    @property
    def norms_before(self) -> bool:
        """Whether there are norms before both halves."""
        return self.norms in ("before", "both")

    @property
    def norms_after(self) -> bool:
        """Whether there are norms after both halves."""
        return self.norms in ("after", "both")

    @property
    def shares_norm(self) -> bool:
        """Whether both halves start from the same normalised rows."""
        return self.norms_before and self.parallel == "one_norm"

    @property
    def mixers(self) -> tuple[MixerDescription, ...]:
        """The mixers that there are."""
        mixers = (self.mixer, self.second_mixer)
        return tuple(mixer for mixer in mixers if not isinstance(mixer, NoLayer))

    @property
    def layers(self) -> tuple[MixerDescription | FeedForwardDescription, ...]:
        """The mixers and what is beside them, the feed-forward layer, and what adds an input of its
        own, as far as they are there; in order of use."""
        beside = () if self.laurel is None else (self.laurel,)
        own = () if self.layer_embedding is None else (self.layer_embedding,)
        second = (self.feed_forward,) if self.has_second_half else ()
        return (*self.mixers, *beside, *second, *own)

    @property
    def _first_layers(self) -> int:
        """How many layers the first half has."""
        return len(self.mixers) + (self.laurel is not None)

    @property
    def has_second_half(self) -> bool:
        """Whether there is a feed-forward layer."""
        return not isinstance(self.feed_forward, NoLayer)

    @property
    def halves(self) -> int:
        """How often the block adds to the stream."""
        return bool(self.mixers) + self.has_second_half

    @property
    def first_half(self) -> Mapping[str, HasParameters]:
        """What the block computes first, all norms, the scalar, and what reads and writes streams
        for it."""
        parts: dict[str, HasParameters] = {}
        if self.mixers:
            if self.norms_before:
                parts["attention_norm"] = self.norm
            parts |= {layer.name: layer for layer in self.layers[: self._first_layers]}
            if self.norms_after:
                parts["attention_post_norm"] = self.norm
        if self.has_second_half:
            own = self.shares_norm or self.feed_forward.normalises_input
            if self.norms_before and not own:
                parts["mlp_norm"] = self.norm
            if self.norms_after:
                parts["mlp_post_norm"] = self.norm
        if self.scalar is not None:
            parts["layer_scalar"] = self.scalar
        streams = self.stream_parts.items()
        return parts | {name: part for name, part in streams if name != _SECOND_STREAMS}

    @property
    def stream_parts(self) -> Mapping[str, StreamsDescription]:
        """What reads and writes several streams, for each half or once."""
        if self.streams is None:
            return {}
        if self.streams.of_block:
            return {"streams": self.streams}
        halves = {"attention_streams": bool(self.mixers), _SECOND_STREAMS: self.has_second_half}
        return {name: self.streams for name, is_there in halves.items() if is_there}

    @property
    def second_half(self) -> Mapping[str, HasParameters]:
        """The parts whose parameters are used last and whose gradients are complete first."""
        parts: dict[str, HasParameters] = {}
        if _SECOND_STREAMS in self.stream_parts:
            parts[_SECOND_STREAMS] = self.stream_parts[_SECOND_STREAMS]
        return parts | {layer.name: layer for layer in self.layers[self._first_layers :]}

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of all parameters.

        Args:
            name: Dotted path of the block in the model.
        """
        for part_name, part in (*self.first_half.items(), *self.second_half.items()):
            yield from part.declare_parameters(f"{name}.{part_name}")

    @cached_property
    def linears(self) -> list[LinearSpec]:
        """All products with weights, in order of use but for those of streams, which are last."""
        linears = [linear for layer in self.layers for linear in layer.linears]
        return linears + [linear for part in self.stream_parts.values() for linear in part.linears]

    @cached_property
    def matrix_elements(self) -> int:
        """Elements of the matrices that one token is multiplied by."""
        elements = sum(layer.matrix_elements for layer in self.layers)
        parts = self.stream_parts.values()
        return elements + sum(linear.elements for part in parts for linear in part.linears)

    @cached_property
    def matrices(self) -> Counter[tuple[int, int]]:
        """The matrices of a block: how many there are of each shape [outputs, inputs]. A fused
        weight is several matrices."""
        shapes: Counter[tuple[int, int]] = Counter()
        for spec in self.declare_parameters(""):
            if spec.role == "matrix":
                for box in spec.matrices:
                    outputs = math.prod(box.shape[: -spec.inputs])
                    shapes[outputs, box.size // outputs] += 1
        return shapes

    def count_attention_flops(
        self, seq: int, *, causal: bool = True, backward: bool = False
    ) -> float:
        """Return the FLOPs per token of the products of activations with activations.

        Args:
            seq: Tokens of a sample.
            causal: Whether what is masked is left out.
            backward: Those of a backward pass, rather than of a forward pass.
        """
        parts = (*self.mixers, *self.stream_parts.values())
        products = [product for part in parts for product in part.list_batched_products(seq)]
        passes = [2 * product.differentiated if backward else 1 for product in products]
        shares = [product.causal_share if causal else 1.0 for product in products]
        flops = zip(passes, shares, products, strict=True)
        return sum(number * share * product.flops for number, share, product in flops) / seq

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what a block keeps per token besides its input.

        It is what the mixers and the feed-forward keep, the stream between them, the outputs of the
        norms before them with their statistics, unless they are recomputed, the inputs of the norms
        after them with their statistics, the stream before what follows the halves, what a scalar
        multiplies, and what is kept of several streams.
        """
        layers, halves = self.layers, self.halves
        saved = sum(
            (layer.count_saved(parallel, recompute) for layer in layers), SavedActivations()
        )
        hidden, streams = self.norm.width, self.streams
        width = hidden if streams is None else streams.width
        if self.parallel == "none" and halves == 2:
            in_one = streams is None or streams.of_block
            saved = saved + SavedActivations(values=hidden if in_one else width)
        saved = sum((part.saved for part in self.stream_parts.values()), saved)
        recomputed = recompute == "selective" and self.norm.recomputes
        if self.norms_before:
            normalises = self.feed_forward.normalises_input
            needs_rows = [self.feed_forward.keeps_normed_input and not normalises]
            needs_rows += [mixer.keeps_normed_input for mixer in self.mixers]
            needs_rows += [self.laurel is not None]
            norms = 1 if self.shares_norm else halves - normalises
            # A shared norm that is recomputed is so by each half.
            kept_norms = min(halves - normalises, sum(needs_rows)) if recomputed else norms
            saved = sum([self.norm.saved] * kept_norms, saved)
        if self.norms_after:
            saved = sum([self.norm.saved] * halves, saved)
        if self.layer_embedding is not None:  # what its gates are computed from
            selected = 0 if streams is None else hidden
            saved = saved + SavedActivations(values=width + selected)
        if self.scalar is not None:  # what it multiplies
            saved = saved + SavedActivations(values=width)
        return saved

    def count_saved_for_weights(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what the backward pass of a block leaves for its weight pass, per token."""
        layers, in_parallel = self.layers, self.parallel != "none"
        first = layers[: self._first_layers]
        apart = (first, *((layer,) for layer in layers[self._first_layers :]))
        together = (layers if self.layer_embedding is None else layers[:-1],)
        saved = sum(
            (layer.count_saved_for_weights(parallel, recompute) for layer in layers),
            SavedActivations(),
        )
        if recompute == "selective" and self.norms_before and self.norm.recomputes:
            # Each product of the input normalises it again, into memory of its own.
            rows = sum(
                layer.input_products - 1 + layer.adapter_input_products
                for layer in layers
                if not layer.keeps_normed_input
            )
        else:  # layers that start from the same rows keep them once
            shares = in_parallel and (self.shares_norm or not self.norms_before)
            groups = together if shares else apart
            rows = -_count_repeated([[bool(x.input_products) for x in group] for group in groups])
        # Layers whose outputs are added have the same gradient; in parallel halves, that of the
        # stream.
        changes = self.norms_after or self.drops or self.residual_scale != 1.0
        groups = together if in_parallel and not changes else apart
        rows -= _count_repeated([[x.keeps_output_gradient for x in group] for group in groups])
        return saved + SavedActivations(values=rows * self.norm.width)

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """What the rows of a token move over the tensor axis."""
        return sum((layer.tensor_traffic for layer in self.layers), TensorTraffic(0, 0, 0))

    def count_traffic(
        self, parallel: ParallelConfig, seq: int, near: int = 1
    ) -> Mapping[str, AxisTraffic]:
        """Return what moves over other axes than `tensor`, by axis. The arguments are those of
        `LayerDescription.count_traffic`."""
        traffic: dict[str, AxisTraffic] = {}
        for part in self.layers:
            for axis, moved in part.count_traffic(parallel, seq, near).items():
                traffic[axis] = traffic.get(axis, AxisTraffic()) + moved
        return traffic

    def count_tensor_statistics(self, tensor: Number) -> Number:
        """Return the elements per token, in at least fp32, that each pass sums over tensor
        ranks."""
        return sum(layer.count_tensor_statistics(tensor) for layer in self.layers)

    def count_gathered_bytes(self, seq: int, width: int) -> int:
        """Return the bytes per token that a forward pass gathers over tensor ranks beside
        elements."""
        return sum(layer.count_gathered_bytes(seq, width) for layer in self.layers)

    def count_tensor_sums(self, samples: int) -> int:
        """Return the elements that a forward pass sums over the ranks of a sample."""
        return sum(layer.count_tensor_sums(samples) for layer in self.layers)


def _count_repeated(groups: Iterable[Iterable[bool]]) -> int:
    """Return how many layers have what another one of their group has already."""
    return sum(max(0, sum(group) - 1) for group in groups)
