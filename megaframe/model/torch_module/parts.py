"""The sections of a config that bring modules from outside, and what their layers declare.

Nobody derives the memory of a module by hand: it is run once on tensors without content, and the
numbers are kept by the module's source and the number of tensor ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor, nn

from megaframe.architecture.layer import (
    BatchedProduct,
    FeedForwardDescription,
    HasParameters,
    LayerDescription,
    MixerDescription,
    SavedActivations,
)
from megaframe.architecture.linear import LinearSpec, RepeatedLinearSpec
from megaframe.architecture.norm import NormDescription
from megaframe.architecture.spec import ParamSpec
from megaframe.config import ModelConfig, ParallelConfig, TrainConfig
from megaframe.config.parts import FeedForwardPart, MixerPart, NormPart, Part
from megaframe.errors import UserError
from megaframe.model.layer_inputs import LayerSetup
from megaframe.model.layer_measurement import MeasuredLayer, measure_layer
from megaframe.model.measured import fit_bytes
from megaframe.model.torch_module.layer import TorchLayer, call_module, check_output
from megaframe.model.torch_module.source import ModuleSource

_TOKENS = 32
"""Tokens of a tensor rank in the shorter of two samples that are measured."""


class _TorchPart(Part):
    """What the bases of modules from outside have in common."""

    def decays(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether weight decay applies to a parameter: by default if it has more than one
        dim.

        Args:
            name: Of the parameter in the module.
            shape: Its shape.
        """
        return len(shape) > 1


class TorchMixerPart(_TorchPart, MixerPart):
    """A mixer whose layer is a `torch.nn.Module`, called with [batch, sequence, hidden]. If its
    `forward` has an argument `positions`, it gets the position of each token, int64 [batch,
    sequence]; if it has `documents`, the number of each token's document in the same shape, or None
    if tokens see their whole sample."""

    token_wise: ClassVar[bool] = False
    """Whether it treats every token alone; then tensor ranks divide the tokens, and context ranks
    may."""

    @abstractmethod
    def make_module(self, model: ModelConfig, output_std: float) -> nn.Module:
        """Return a new module, with initial values that torch's generator draws.

        Args:
            model: The section `model`; the module is of rows of `model.hidden` elements.
            output_std: Standard deviation of the initial values of a matrix whose results are added
                to the stream.
        """

    def describe(self, model: ModelConfig, output_std: float) -> MixerDescription:
        """Return what the module declares."""
        source = ModuleSource(self, (model, output_std))
        return TorchMixerDescription(source=source, hidden=model.hidden)


class TorchFeedForwardPart(_TorchPart, FeedForwardPart):
    """A feed-forward layer that is a `torch.nn.Module`, called with [1, rows, hidden]. It treats
    every row alone, and tensor ranks have some of the rows each."""

    @abstractmethod
    def make_module(self, model: ModelConfig, output_std: float) -> nn.Module:
        """Return a new module. The arguments are those of `TorchMixerPart.make_module`."""

    def describe(self, model: ModelConfig, output_std: float) -> FeedForwardDescription:
        """Return what the module declares."""
        source = ModuleSource(self, (model, output_std))
        return TorchFeedForwardDescription(source=source, hidden=model.hidden)


class TorchNormPart(_TorchPart, NormPart):
    """A norm that is a `torch.nn.Module`, called with [..., hidden]."""

    def decays(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return False: norms are not pulled towards zero."""
        return False

    @abstractmethod
    def make_module(self, model: ModelConfig) -> nn.Module:
        """Return a new module for rows of `model.hidden` elements.

        Args:
            model: The section `model`.
        """

    def describe(self, model: ModelConfig) -> NormDescription:
        """Return what the module declares."""
        return TorchNormDescription(model.hidden, ModuleSource(self, (model,)))


@dataclass(frozen=True, kw_only=True)
class ModuleDescription(LayerDescription):
    """What a module declares, whatever it is used for.

    Attributes:
        source: Makes it.
        hidden: Width of the stream.
    """

    source: ModuleSource
    hidden: int

    keeps_normed_input = True

    @property
    def mixes_tokens(self) -> bool:
        """Whether every tensor rank computes all tokens."""
        return False

    @property
    def origin(self) -> Part:
        """The section, whose class is in the file of the extension."""
        return self.source.part

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """Nothing that `declare_parameters` does not say."""
        return {}

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of the module's parameters."""
        return self.source.declare_parameters(name)

    def make_layer(self, name: str, setup: LayerSetup) -> TorchLayer:
        """Return the layer."""
        return TorchLayer(name, self.source, setup, mixes_tokens=self.mixes_tokens)

    def find_mistakes(self, parallel: ParallelConfig) -> Iterator[str]:
        """Yield a message if the module cannot be measured, or does what no layer may do."""
        yield from super().find_mistakes(parallel)
        try:
            _measure(self, 1, _TOKENS)
        except UserError as error:
            yield f"{self.name} {self.source.part.name} ({self.source.facts.kind}): {error}"

    @property
    def linears(self) -> list[LinearSpec]:
        """Products with the matrices, each of which is taken to be used once per token."""
        kind = RepeatedLinearSpec if self.mixes_tokens else LinearSpec
        return [
            kind((spec.size // spec.shape[0],), spec.shape[:1], std=0.0)
            for spec in self.declare_parameters("")
            if spec.role == "matrix"
        ]

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what is measured on one tensor rank, for all of them."""
        return _count_saved(self, parallel.tensor)

    def count_saved_for_weights(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return nothing: the backward pass computes the gradients of weights as well."""
        return SavedActivations()

    @property
    def input_products(self) -> int:
        """None of which the input is kept for a weight pass."""
        return 0

    @property
    def keeps_output_gradient(self) -> bool:
        """Not for a weight pass."""
        return False

    @property
    def tensor_gathers(self) -> int:
        """The rows, if each rank needs those of all."""
        return self.hidden if self.mixes_tokens else 0

    @property
    def widest(self) -> int:
        """Half of what a backward pass has at its widest place besides what is kept."""
        measured = _measure(self, 1, _TOKENS, "bf16")
        more = measured.backward_peak_bytes - measured.saved_bytes
        return max(self.hidden, more // (2 * 2 * _TOKENS))


@dataclass(frozen=True, kw_only=True)
class TorchMixerDescription(ModuleDescription, MixerDescription):
    """A module that mixes tokens, unless its part says otherwise."""

    name = "mixer"

    @property
    def label(self) -> str:
        """Its kind and its class."""
        return f"mixer {self.source.part.name} ({self.source.facts.kind})"

    @property
    def mixes_tokens(self) -> bool:
        """Whether every tensor rank computes all tokens."""
        return not getattr(self.source.part, "token_wise", False)

    @property
    def repeated(self) -> bool:
        """Whether every tensor rank computes all of it."""
        return self.mixes_tokens

    @property
    def sees_documents(self) -> bool:
        """Whether it is given the documents, or needs none."""
        return not self.mixes_tokens or "documents" in self.source.facts.arguments

    @property
    def context_kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """All for a module that treats every token alone, else none."""
        return () if self.mixes_tokens else ("ring", "all_to_all", "nested")

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return the products of activations that are measured, and one for whatever else is
        counted and no product with a matrix."""
        measured = _measure(self, 1, seq)
        products = [
            BatchedProduct(p.number, p.rows, p.outputs, p.terms)
            for p in measured.products
            if not p.has_weight
        ]
        rest = measured.forward_flops - sum(product.flops for product in products)
        rest -= 2.0 * seq * self.matrix_elements
        terms = round(rest / (2.0 * seq * self.hidden))
        return (*products, *([BatchedProduct(1, seq, self.hidden, terms)] if terms > 0 else []))


@dataclass(frozen=True, kw_only=True)
class TorchFeedForwardDescription(ModuleDescription, FeedForwardDescription):
    """A module that treats every row alone."""

    name = "feed_forward"

    @property
    def inner_elements(self) -> float:
        """What it keeps, as its elementwise operators have written it."""
        return float(_count_saved(self, 1).values)


@dataclass(frozen=True)
class TorchNormDescription(NormDescription):
    """A module that normalises rows.

    Attributes:
        source: Makes it.
    """

    source: ModuleSource

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield its parameters, all of which are gains: autograd may save them."""
        return self.source.declare_parameters(name, "gain")

    @property
    def saved_statistics(self) -> SavedActivations:
        """What is measured; with the result, if the module keeps that."""
        alone = TorchFeedForwardDescription(source=self.source, hidden=self.width)
        return _count_saved(alone, 1)

    def compute(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """Return the module of x."""
        out = call_module(self.source, parameters, x, {})
        check_output(self.source, x, out)
        return out


@lru_cache(maxsize=256)
def _measure(
    description: ModuleDescription, tensor: int, seq: int, precision: Any = "fp32"
) -> MeasuredLayer:
    """Measure the layer on one of `tensor` ranks, with one sample of `seq` tokens."""
    train = TrainConfig(seq=seq, microbatch=1, global_batch=1, precision=precision)
    return measure_layer(description, description.hidden, ParallelConfig(tensor=tensor), train)


@lru_cache(maxsize=256)
def _count_saved(description: ModuleDescription, tensor: int) -> SavedActivations:
    """Return what all tensor ranks keep per token. Whatever grows with the length of the sample
    beyond its tokens belongs to pairs of them; what samples share is counted for each."""

    def count(seq: int, precision: str) -> Fraction:
        return Fraction(_measure(description, tensor, seq, precision).saved_bytes * tensor, seq)

    return fit_bytes(count, _TOKENS * tensor)
