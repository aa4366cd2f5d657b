"""What descriptions of layers claim, and where that differs from what ranks have measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from megaframe.architecture.attention import count_exchanging_ranks
from megaframe.architecture.block import BlockDescription
from megaframe.architecture.embedding import HeadDescription, describe_embedding, describe_head
from megaframe.architecture.frozen import is_frozen
from megaframe.architecture.layer import (
    BatchedProduct,
    HasParameters,
    LayerDescription,
    MixerDescription,
)
from megaframe.architecture.linear import GroupedLinearSpec, LinearSpec
from megaframe.architecture.model_blocks import describe_block, describe_norm
from megaframe.architecture.moe import count_near_experts
from megaframe.architecture.norm import NormDescription
from megaframe.architecture.predictor import PredictorDescription, describe_predictor
from megaframe.architecture.spec import ParamSpec
from megaframe.config import ModelConfig, RunConfig, TrainConfig
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.layout import Layout
from megaframe.model.torch_module.parts import ModuleDescription, TorchNormDescription
from megaframe.training.layer_check.measure import LayerMeasurement, list_expert_sets

_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class DescribedPart:
    """A part of a model, with what it declares.

    Attributes:
        name: In the model.
        description: Of its layer, block or norm.
        specs: Of its parameters.
    """

    name: str
    description: Any
    specs: tuple[ParamSpec, ...]


@dataclass(frozen=True)
class Lie:
    """A number of a description that is not what the layer does.

    Attributes:
        layer: Name of the layer in the model, and the class of its description.
        what: What the number is of.
        described: The number of the description.
        measured: That of the layer.
        place: The lines of the description that say it.
    """

    layer: str
    what: str
    described: object
    measured: object
    place: str

    def __str__(self) -> str:
        return (
            f"{self.layer}: {self.what}: described {self.described}, measured {self.measured}; "
            f"see {self.place}"
        )


def list_described_parts(model: ModelConfig, train: TrainConfig) -> Iterator[DescribedPart]:
    """Yield the embedding, the norms, layers and blocks of the model, its predictors and its
    head."""

    def make_part(name: str, description: HasParameters) -> DescribedPart:
        return DescribedPart(name, description, tuple(description.declare_parameters(name)))

    yield make_part("embedding", describe_embedding(model, train.seq))
    for layer in range(model.layers):
        block, name = describe_block(model, layer), f"blocks.{layer}"
        for part_name, part in block.first_half.items():
            if isinstance(part, NormDescription):
                yield make_part(f"{name}.{part_name}", part)
        for described in block.layers:
            yield make_part(f"{name}.{described.name}", described)
        yield make_part(name, block)
    for index in range(model.mtp_depth):
        predictor, name = describe_predictor(model, index), f"predictors.{index}"
        specs = predictor.declare_parameters(name, f"blocks.{model.layers + index}")
        yield DescribedPart(name, predictor, tuple(specs))
    yield make_part("head", describe_head(model, describe_norm(model)))


def find_lies(
    config: RunConfig, measured_by_rank: Sequence[Mapping[str, LayerMeasurement]]
) -> list[Lie]:
    """Return where descriptions differ from what the ranks measured, both summed over all ranks.

    Args:
        config: As it was measured.
        measured_by_rank: What `measure_layers` returned on each rank.
    """
    layout = Layout.from_parallel(config.parallel, len(measured_by_rank))
    lies: list[Lie] = []
    for part in list_described_parts(config.model, config.train):
        measured = [measurements[part.name] for measurements in measured_by_rank]
        lies += _Comparison(config, layout, part, measured).find_lies()
    return lies


@dataclass
class _Comparison:
    """One part of a model, as it is described and as all ranks have measured it."""

    config: RunConfig
    layout: Layout
    part: DescribedPart
    measured: Sequence[LayerMeasurement]

    def __post_init__(self) -> None:
        train = self.config.train
        self._width = DTYPE_BYTES[train.precision]
        self._tokens = train.microbatch * train.seq * self.layout.data
        self._situation = f"with recompute={train.recompute}, {train.precision}"
        self._lies: list[Lie] = []

    def find_lies(self) -> list[Lie]:
        """Return what is described and not so."""
        self._compare_parameters()
        if is_measured(self.part.description):
            return self._lies
        if isinstance(self.part.description, _COUNTED):
            self._compare_memory()
            self._compare_flops()
            self._compare_traffic()
        else:
            saved = self.part.description.saved_statistics
            self._compare_bytes("saved_bytes", "backward", saved, "saved_statistics")
        return self._lies

    def _compare(self, what: str, described: object, actual: object, *members: str) -> None:
        if described != actual:
            description = self.part.description
            places = (_locate(description, member) for member in members)
            place = ", ".join(place for place in places if place)
            title = f"{self.part.name} ({type(description).__name__})"
            self._lies.append(Lie(title, what, described, actual, place))

    def _compare_parameters(self) -> None:
        members = "declare_parameters", "parts", "first_half"
        described = {spec.name: spec for spec in self.part.specs}
        for rank, measurement in enumerate(self.measured):
            on_rank = f" on rank {rank}" if self.layout.world > 1 else ""
            names = [*measurement.parameters]
            self._compare(f"names of parameters{on_rank}", [*described], names, *members)
            for name in described.keys() & measurement.parameters.keys():
                spec, shape = measurement.parameters[name]
                for field in fields(ParamSpec):
                    if field.name == "growth":  # the model's word, not the layer's
                        continue
                    values = (getattr(each, field.name) for each in (described[name], spec))
                    self._compare(f"{field.name} of {name}{on_rank}", *values, *members)
                coordinate = self.layout.get_full_coordinate(rank)
                box = described[name].find_local_box(coordinate, self.layout.sizes)
                self._compare(f"part of {name}{on_rank}", box.shape, shape, *members)

    def _compare_memory(self) -> None:
        description, parallel = self.part.description, self.config.parallel
        recompute = self.config.train.recompute
        saved = description.count_saved(parallel, recompute)
        self._compare_bytes("saved_bytes", "backward", saved, "count_saved")
        left = description.count_saved_for_weights(parallel, recompute)
        self._compare_bytes("weight_pass_bytes", "a weight pass", left, "count_saved_for_weights")

    def _compare_bytes(self, measured: str, purpose: str, claim: Any, member: str) -> None:
        self._compare(
            f"bytes kept for {purpose} {self._situation}",
            round(claim.count_bytes(self._width, self.config.train.seq) * self._tokens),
            sum(getattr(measurement, measured) for measurement in self.measured),
            member,
        )

    def _compare_flops(self) -> None:
        """Compare products. Around a ring each rank multiplies some of the scores only, as tiles
        that depend on its place; and matrices of states are multiplied once more for each piece."""
        description, layout = self.part.description, self.layout
        mixers, seq, flops = _list_mixers(description), self.config.train.seq, 0.0
        for mixer in mixers:
            pieces = 1
            if layout.context > 1:
                exchanging = count_exchanging_ranks(self.config.parallel)
                if mixer.has_scores and layout.context > exchanging:
                    return
                if not mixer.mixes_pieces_alike:
                    return
                if not mixer.has_scores:  # pieces of samples are mixed like samples
                    pieces = 2 * layout.context
            products = mixer.list_batched_products(-(-seq // pieces))
            copies = [product.count_copies(layout.tensor) for product in products]
            flops += pieces * sum(n * p.flops for n, p in zip(copies, products, strict=True))
        if not isinstance(description, MixerDescription):
            flops += sum(product.flops for product in _list_stream_products(description, seq))
        passes = self._count_head_passes() if isinstance(description, HeadDescription) else 1
        samples = self.config.train.microbatch * layout.data
        self._compare(
            "FLOPs of a forward pass",
            round(
                sum(
                    2.0 * self._tokens * passes * _count_elements(linear, layout)
                    for linear in description.linears
                )
                + flops * samples
                + sum(flops for flops, _ in self._list_norms()) * layout.world
            ),
            sum(measurement.flops for measurement in self.measured),
            "linears",
            "list_batched_products",
        )

    def _list_norms(self) -> list[tuple[float, float]]:
        """Return what the norms of rows of each product need (`LinearSpec.count_norms`)."""
        tensor = self.layout.tensor
        return [linear.count_norms(tensor) for linear in self.part.description.linears]

    def _count_head_passes(self) -> int:
        """Return the products of the head with its loss: the logits, and their gradients."""
        tied = self.config.model.tie_embeddings
        weight = "embedding.tokens.weight" if tied else "head.weight"
        return 2 if is_frozen(self.config.frozen_patterns, weight) else 3

    def _compare_traffic(self) -> None:
        forward, backward, split = self._describe_traffic()
        for what, described, measured in (
            ("forward", forward, "forward_bytes"),
            ("backward", backward, "backward_bytes"),
            ("backward and weight", split, "split_bytes"),
        ):
            actual: Counter[str] = Counter()
            for measurement in self.measured:
                actual.update(getattr(measurement, measured))
            for axes in sorted({*described, *actual}):
                self._compare(
                    f"bytes over the {axes} axis in the {what} pass",
                    round(described[axes]),
                    actual[axes],
                    "tensor_traffic" if axes == "tensor" else "count_traffic",
                    *("count_tensor_statistics", "count_tensor_sums", "tensor_sums"),
                )

    def _describe_traffic(self) -> tuple[Counter[str], Counter[str], Counter[str]]:
        """Return the bytes of the forward, the backward, and the split backward pass, by axes."""
        description, config, layout = self.part.description, self.config, self.layout
        wide, tensor, parallel = max(4, self._width), layout.tensor, config.parallel
        forward: Counter[str] = Counter()
        backward: Counter[str] = Counter()
        rows, moved = self._tokens * (tensor - 1), description.tensor_traffic
        # What is summed moves twice, as in a ring.
        both = 2 * wide * description.count_tensor_statistics(tensor)
        sums = 2 * wide * getattr(description, "tensor_sums", 0)
        forward["tensor"] += rows * (moved.forward * self._width + both + sums)
        backward["tensor"] += rows * (moved.backward * self._width + both)
        gathered = description.count_gathered_bytes(config.train.seq, self._width)
        forward["tensor"] += rows * gathered
        ranks = tensor * layout.context
        label = "+".join(axis for axis in ("context", "tensor") if getattr(layout, axis) > 1)
        elements = sum(sums for _, sums in self._list_norms())
        forward["tensor"] += round(2 * elements * wide * (tensor - 1) * (layout.world // tensor))
        samples = description.count_tensor_sums(config.train.microbatch)
        forward[label] += 2 * samples * wide * (ranks - 1) * layout.data
        near = count_near_experts(parallel, parallel.node_size or layout.world)
        for axis, traffic in description.count_traffic(parallel, config.train.seq, near).items():
            forward[axis] += self._tokens * traffic.count_forward_bytes(self._width)
            forward[axis] += traffic.count_bytes * layout.world
            backward[axis] += self._tokens * traffic.count_backward_bytes(self._width)
        split = backward + Counter({"tensor": rows * moved.weight * self._width})
        return forward, backward, split


_COUNTED = (LayerDescription, BlockDescription, PredictorDescription)


def is_measured(description: Any) -> bool:
    """Return whether the numbers of a description, or of a part of it, are those that its module
    was measured to have, so that there is nothing to compare."""
    description = getattr(description, "block", description)
    parts = description.__dict__.values() if isinstance(description, BlockDescription) else ()
    return any(isinstance(each, _MODULES) for each in (description, *parts))


_MODULES = (ModuleDescription, TorchNormDescription)


def can_load_evenly(model: ModelConfig, train: TrainConfig, layout: Layout) -> bool:
    """Return whether routers can send equally many rows to all experts, so that traffic is what
    descriptions say."""
    moe = model.moe
    if moe is None:
        return True
    rows = train.microbatch * train.seq // (layout.tensor * layout.context)
    return rows % len(list_expert_sets(moe.experts, moe.top_k)) == 0


def _list_mixers(description: Any) -> tuple[MixerDescription, ...]:
    """Return the mixers that a description is or contains."""
    description = getattr(description, "block", description)
    if isinstance(description, BlockDescription):
        return description.mixers
    return (description,) if isinstance(description, MixerDescription) else ()


def _list_stream_products(description: Any, seq: int) -> tuple[BatchedProduct, ...]:
    """Return the products of the streams of single tokens, which no rank divides."""
    if isinstance(description, LayerDescription):
        return description.list_batched_products(seq)
    parts = getattr(description, "block", description).stream_parts.values()
    return tuple(product for part in parts for product in part.list_batched_products(seq))


def _count_elements(linear: LinearSpec, layout: Layout) -> float:
    """Return the elements of the weight that one token is multiplied by, with what neighbouring
    ranks both have."""
    if isinstance(linear, GroupedLinearSpec):  # all of these ranks have the rows of an expert
        return linear.elements * (layout.expert_tensor if linear.split is None else 1)
    if linear.split is None:
        return linear.elements
    results, terms = linear.compute_local_sizes(layout.tensor)
    return float(results * terms * layout.tensor)


def _locate(description: Any, member: str) -> str:
    """Return the file and line in which a description's class, or one it inherits, defines a
    member; empty if none does."""
    for kind in type(description).__mro__:
        if member in vars(kind):
            function = vars(kind)[member]
            if isinstance(function, property):
                function = function.fget
            elif isinstance(function, cached_property):
                function = function.func
            path = Path(function.__code__.co_filename).resolve()
            shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
            return f"{shown}:{function.__code__.co_firstlineno} ({kind.__name__}.{member})"
    return ""
