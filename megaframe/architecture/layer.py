"""What every kind of layer says about itself, without torch.

A layer is described once. Its torch module is built from the description; the planner, the memory,
the FLOPs and the checkpoints add descriptions up. All elements are per token and summed over the
tensor and context ranks, which divide tokens or widths, so that a rank has its share of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

from megaframe.architecture.adapters import InputKind, is_target
from megaframe.architecture.limits import Limit
from megaframe.architecture.linear import LinearSpec, Number, TensorTraffic
from megaframe.architecture.rotary import RotaryDescription
from megaframe.architecture.spec import ParamSpec, count_copies
from megaframe.architecture.traffic import AxisTraffic
from megaframe.architecture.window import Window
from megaframe.config.adapters import AdaptersConfig
from megaframe.config.blocks import QueryScaleConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.errors import join_or

Linear = TypeVar("Linear", bound=LinearSpec)


@dataclass(frozen=True)
class SavedActivations:
    """What a forward pass keeps per token until its backward pass.

    Attributes:
        values: Elements in the precision of the model.
        statistics: Elements in at least fp32.
        other_bytes: Bytes of integers and masks.
        pairs: What is kept for each pair of tokens of a sample, such as scores; None for nothing.
    """

    values: Number = 0
    statistics: Number = 0
    other_bytes: Number = 0
    pairs: SavedActivations | None = None

    def __add__(self, other: SavedActivations) -> SavedActivations:
        return SavedActivations(
            self.values + other.values,
            self.statistics + other.statistics,
            self.other_bytes + other.other_bytes,
            self.pairs if other.pairs is None else other.pairs + (self.pairs or SavedActivations()),
        )

    def count_bytes(self, width: int, seq: int) -> Number:
        """Return the bytes per token.

        Args:
            width: Bytes of a value.
            seq: Tokens of a sample.
        """
        per_token = self.values * width + self.statistics * max(4, width) + self.other_bytes
        return (
            per_token
            if self.pairs is None
            else per_token + seq * self.pairs.count_bytes(width, seq)
        )


@dataclass(frozen=True)
class BatchedProduct:
    """Products of activations with activations, such as queries with keys: in each sample `number`
    products of [rows, terms] and [terms, outputs], divided over tensor and context ranks.

    Attributes:
        causal_share: The share of them that a causal kernel with this layer's window computes.
        differentiated: Whether a backward pass computes the gradients of both factors.
        groups: Groups of heads that tensor ranks divide, if neighbours repeat the products of the
            one that they share; else 0.
        gathered: Whether each row has columns of its own, so that none is computed in vain beside
            those of other rows.
    """

    number: int
    rows: int
    outputs: int
    terms: int
    causal_share: float = 1.0
    differentiated: bool = True
    groups: int = 0
    gathered: bool = False

    def count_copies(self, tensor: int) -> int:
        """Return how many of so many tensor ranks make each of them."""
        return count_copies(self.groups, tensor)

    @property
    def flops(self) -> float:
        """FLOPs of a sample, with all that is masked."""
        return 2.0 * self.number * self.rows * self.outputs * self.terms


class HasParameters(Protocol):
    """A part of a layer that declares parameters."""

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of all parameters.

        Args:
            name: Dotted path of the part in the model.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LayerDescription(ABC):
    """One mixer of tokens, or one feed-forward layer. A frozen dataclass of plain numbers, so that
    layers of the same kind are equal.

    Attributes:
        adapters: What is added to its matrices; None for nothing.
    """

    adapters: AdaptersConfig | None = None

    name: ClassVar[str]
    """Of the layer within a block."""
    keeps_normed_input = False
    """Whether it normalises its input for several uses, so that recompute cannot leave the norm to
    a linear."""

    @property
    def origin(self) -> object:
        """An object of a class of whoever brings the layer, for messages that name its file."""
        return self

    @property
    @abstractmethod
    def parts(self) -> Mapping[str, HasParameters]:
        """What has parameters, by name, in the order in which a checkpoint lists them."""

    @abstractmethod
    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what a forward pass keeps besides the layer's input.

        Args:
            parallel: The layout.
            recompute: `none` or `selective`, which recomputes norms and activations. With `full`
                this is what exists while the block is recomputed, as with `none`.
        """

    @property
    def limits(self) -> tuple[Limit, ...]:
        """What the ranks of an axis divide, if not every number of ranks can."""
        return ()

    def find_mistakes(self, parallel: ParallelConfig) -> Iterator[str]:
        """Yield a message for each reason why the layer cannot be divided like this, with the key,
        both numbers and the nearest valid values. The layer's place in the config is put before it.

        Args:
            parallel: The layout. Axes that a search has not chosen yet are 1.
        """
        for limit in self.limits:
            yield from limit.find_mistakes(parallel)

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of all parameters.

        Args:
            name: Dotted path of the layer in the model.
        """
        for part_name, part in self.parts.items():
            yield from part.declare_parameters(f"{name}.{part_name}")

    def make_layer(self, name: str, setup: Any) -> Any:
        """Return the torch layer of a description from outside. Layers of our own descriptions are
        known to `megaframe.model.block.build_layer`, because nothing here imports torch.

        Args:
            name: Of the layer in the model.
            setup: What the run fixes (`LayerSetup`).
        """
        raise NotImplementedError

    def adapt(self, part: str, linear: Linear, inputs: InputKind = "kept") -> Linear:
        """Return a product with the adapters that the config gives its matrices, and with how
        these are kept.

        Args:
            part: Its name in the layer.
            linear: The product without adapters.
            inputs: What it multiplies.
        """
        config = self.adapters
        if config is None:
            return linear
        adapters = []
        for name, place in linear.list_matrices():
            target = ".".join(filter(None, (self.name, part, name)))
            if is_target(config, target):
                adapters.append(
                    replace(
                        place,
                        name=name,
                        rank=config.rank,
                        scale=config.alpha / config.rank,
                        dropout=config.dropout,
                        dora=config.dora,
                        inputs=inputs,
                        target=target,
                    )
                )
        return replace(linear, adapters=tuple(adapters), quantised=config.quantize_base)

    @property
    def linears(self) -> list[LinearSpec]:
        """All products with weights, in order of use."""
        linears: list[LinearSpec] = []
        for part in self.parts.values():
            if isinstance(part, LinearSpec):
                linears += part.products
            elif isinstance(part, LayerDescription):
                linears += part.linears
        return linears

    @property
    def adapted_linears(self) -> list[LinearSpec]:
        """The products that adapters add to."""
        return [linear for linear in self.linears if linear.adapters]

    @property
    def adapter_input_products(self) -> int:
        """Number of products of adapters that multiply the layer's own input."""
        adapters = (adapter for linear in self.adapted_linears for adapter in linear.adapters)
        # With dropout what they multiply is another tensor in any case.
        return sum(adapter.inputs == "stream" and not adapter.dropout for adapter in adapters)

    def count_saved_by_adapters(self, parallel: ParallelConfig) -> SavedActivations:
        """Return what a forward pass keeps for the adapters. The inputs of A are kept already, and
        dropped elements are drawn again.

        Args:
            parallel: The layout.
        """
        adapted = self.adapted_linears
        saved = (linear.count_saved_by_adapters(parallel.tensor) for linear in adapted)
        return SavedActivations(sum(saved))

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrices that one token is multiplied by."""
        return sum(linear.elements for linear in self.linears)

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return the products of activations with activations in a sample of `seq` tokens. Without
        scores they are the same in a piece of a sample, which context ranks mix like a sample."""
        return ()

    @property
    def tensor_gathers(self) -> int:
        """Elements per token that are gathered over tensor ranks besides the inputs of linears, and
        whose gradients are scattered."""
        return 0

    @property
    def input_products(self) -> int:
        """Number of products that multiply the layer's own input, and keep it for a weight pass."""
        return 1

    @property
    def keeps_output_gradient(self) -> bool:
        """Whether the gradient of the layer's output is kept for a weight pass, as after a
        product."""
        return True

    def count_saved_for_weights(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what a backward pass leaves for a separate weight pass, if the layer's input is
        not normalised again by each product."""
        tensor = parallel.tensor
        saved_elements = (linear.count_kept_for_weights(tensor) for linear in self.linears)
        shared_elements = (
            linear.count_shared_by_adapters(tensor, recompute=recompute == "selective")
            for linear in self.adapted_linears
        )
        return SavedActivations(values=sum(saved_elements) - sum(shared_elements))

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """What the rows of a token move over the tensor axis."""
        total = TensorTraffic(self.tensor_gathers, self.tensor_gathers, 0)
        for linear in self.linears:
            total = total + linear.tensor_traffic
        return total

    def count_traffic(
        self, parallel: ParallelConfig, seq: int, near: int = 1
    ) -> Mapping[str, AxisTraffic]:
        """Return what moves over other axes than `tensor`, by axis.

        Args:
            parallel: The layout.
            seq: Tokens of a sample.
            near: Neighbours on the expert axis that share a node
                (`megaframe.architecture.moe.count_near_experts`).
        """
        return {}

    def count_tensor_statistics(self, tensor: Number) -> Number:
        """Return the elements per token, in at least fp32, that a forward pass sums over tensor
        ranks which all have the token, and a backward pass as well.

        Args:
            tensor: Number of tensor ranks.
        """
        return 0

    def count_gathered_bytes(self, seq: int, width: int) -> int:
        """Return the bytes per token that a forward pass gathers over tensor ranks beside elements
        in the precision of the model, those of sums counted twice.

        Args:
            seq: Tokens of a sample.
            width: Bytes of an element in the precision of the model.
        """
        return 0

    def count_tensor_sums(self, samples: int) -> int:
        """Return the elements, in at least fp32, that a forward pass of `samples` samples sums over
        the ranks that have tokens of the same samples, tensor ranks among them."""
        return 0


def iterate_linears(part: object, name: str) -> Iterator[tuple[str, LinearSpec]]:
    """Yield the products of a part and of all parts below it, with their names.

    Args:
        part: A layer, or a part of one.
        name: Its own name.
    """
    if isinstance(part, LinearSpec):
        yield name, part
    for part_name, below in getattr(part, "parts", {}).items():
        yield from iterate_linears(below, f"{name}.{part_name}")


class FeedForwardDescription(LayerDescription):
    """A layer that treats every token alone."""

    @property
    def normalises_input(self) -> bool:
        """Whether it has norms of the stream before its parts, so that its block has none."""
        return False

    @property
    def experts_per_token(self) -> int:
        """To how many experts the rows of a token are sent; 0 without experts."""
        return 0

    @property
    @abstractmethod
    def inner_elements(self) -> float:
        """Elements per token between its products, as its elementwise kernels read and write
        them."""

    @property
    @abstractmethod
    def widest(self) -> int:
        """Elements per token at its widest place."""


@dataclass(frozen=True, kw_only=True)
class MixerDescription(LayerDescription):
    """A layer in which tokens of a sample see each other, such as attention.

    Attributes:
        window: How many tokens a token sees, with itself, or in what chunk; None for all before
            it.
        rotary: How queries and keys are rotated, for which the microbatch has tables; None if they
            are not.
        query_scale: How a factor of queries grows with their positions; None for no factor.
    """

    window: Window = None
    rotary: RotaryDescription | None = None
    query_scale: QueryScaleConfig | None = None

    has_scores: ClassVar[bool] = False
    """Whether each token scores all that it sees, as attention does; so the microbatch has a mask
    for its window."""

    context_kinds: ClassVar[tuple[str, ...]] = ()
    """The values of `parallel.context_kind` under which ranks may have parts of a sample."""

    mixes_pieces_alike: ClassVar[bool] = True
    """Whether a mixer without scores makes the same products of a piece of a sample, which context
    ranks have, as of a sample."""

    @property
    def sees_documents(self) -> bool:
        """Whether it can keep tokens from seeing other documents than their own."""
        return True

    @property
    def repeated(self) -> bool:
        """Whether every tensor rank computes all tokens and all widths."""
        return False

    @property
    def label(self) -> str:
        """What a message calls it."""
        return type(self).__name__

    def find_mistakes(self, parallel: ParallelConfig) -> Iterator[str]:
        """Yield a message for each reason why the layer cannot be divided like this, also because
        it needs whole samples."""
        yield from super().find_mistakes(parallel)
        kind, kinds = parallel.context_kind, self.context_kinds
        if parallel.context > 1 and kind not in kinds:
            yield (
                f"parallel.context={parallel.context} divides samples, which "
                f"{self.label} cannot mix with parallel.context_kind={kind}; use "
                + (f"parallel.context_kind={join_or(kinds)}, or " if kinds else "")
                + "parallel.context=1"
            )

    def can_share(self, tensor: int, ranks: int) -> bool:
        """Return whether neighbouring context ranks can exchange tokens for heads.

        Args:
            tensor: Tensor ranks, which divide the heads already.
            ranks: Such neighbours.
        """
        return True

    @property
    def widest(self) -> int:
        """Elements per token at its widest place, of which a backward pass has two besides what is
        kept; 0 if it is no wider than a feed-forward."""
        return 0

    @property
    def exchanged_elements(self) -> int:
        """Elements per token that context ranks exchange if they divide heads (all-to-all)."""
        return 0

    @property
    def shared_groups(self) -> int:
        """Groups of heads that tensor ranks divide, of which neighbours have the same one if there
        are fewer than ranks; 0 if there are none."""
        return self.ring_groups

    @property
    def ring_groups(self) -> int:
        """Key and value heads that go around a ring of context ranks, of `ring_width` elements per
        token each."""
        return 0

    @property
    def ring_width(self) -> int:
        """Elements per token of what goes around a ring."""
        return 0

    @property
    def gathered_elements(self) -> int:
        """Elements per token that context ranks gather of whole samples, in place of exchanging
        heads or passing keys and values around; 0 if they do not."""
        return 0

    @property
    def passed_elements(self) -> int:
        """Elements, in at least fp32, that say what a piece of a sample does to the state that it
        is passed (`megaframe.context_parallel.states.pass_states`): a state and its decay."""
        return 0

    def count_passed(self, tokens: int, tensor: int = 1) -> int:
        """Return `passed_elements` of a piece of so many tokens, if it depends on them, or on how
        many tensor ranks there are."""
        return self.passed_elements

    def count_traffic(
        self, parallel: ParallelConfig, seq: int, near: int = 1
    ) -> Mapping[str, AxisTraffic]:
        """Return what moves over other axes than `tensor`. By default each context rank sends all
        others what its two pieces do to a state: forward, once more where the backward pass
        computes it again (`megaframe.ops.autograd.recompute`), and the gradients of it."""
        context, piece = parallel.context, -(-seq // (2 * parallel.context))
        passed = 2 * context * (context - 1) * self.count_passed(piece, parallel.tensor) / seq
        return {"context": AxisTraffic(wide_forward=passed, wide_backward=2 * passed)}
