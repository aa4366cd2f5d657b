"""ParameterGroups: which rule trains each parameter, at which rates, and which are frozen.

Everything follows from the role that a layer declared for its parameter and from nothing else,
except for frozen parameters, which a user lists by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import torch
from torch import Tensor

from megaframe.architecture.frozen import is_frozen
from megaframe.architecture.parametrisation import compute_learning_rate_scale
from megaframe.architecture.spec import ParamSpec, count_parameters
from megaframe.config import OptimConfig, RunConfig
from megaframe.config.adapters import FROZEN_BASE
from megaframe.config.part_calls import call_part, describe_method
from megaframe.config.parts import OptimizerPart
from megaframe.config.registry import get_part_name
from megaframe.data_parallel.bucket import Bucket
from megaframe.data_parallel.bucket_layout import BucketingRule
from megaframe.data_parallel.partition import BucketPartition
from megaframe.distributed.mesh import Mesh
from megaframe.errors import UserError, join_or
from megaframe.model.model_chunk import list_model_specs
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.optim.adamw import AdamW, AdamWOptions
from megaframe.optim.element_ids import ElementIds
from megaframe.optim.elementwise import (
    ElementwiseRule,
    GradientDescent,
    GroupRates,
    Lion,
    LionOptions,
    Momentum,
    MomentumOptions,
    UpdateTransform,
    WeightAverage,
)
from megaframe.optim.expert_balance import ExpertBalance
from megaframe.optim.muon import Muon
from megaframe.optim.optimizer_state import MomentStorage
from megaframe.optim.state_dtype import make_state_codecs
from megaframe.optim.state_offload import NO_OFFLOAD, StateOffload, offload_to_host
from megaframe.optim.update_rule import OptimizerShard, UpdateRule
from megaframe.parameters.parameter import PRECISIONS

GROUPS = {
    "matrix": "matrix",
    "embedding": "embedding",
    "head": "head",
    "gain": "vector",
    "bias": "vector",
    "balance": "balance",
    "table": "vector",
}
"""The group of each role: those of `optim.groups`, and `balance`."""


@dataclass(frozen=True)
class ParameterGroup:
    """What parameters must have in common to be trained together.

    Attributes:
        name: The group in `optim.groups`, or `balance`.
        rule: The optimizer's name, None if the parameters are frozen.
        rates: Their learning rate and weight decay.
    """

    name: str
    rule: str | None
    rates: GroupRates


class ParameterGroups:
    """How each parameter of a run is trained.

    Attributes:
        offload: Where optimizer state is.
        owner_group: The ranks that together hold one copy of a stage; under Muon they own its
            matrices.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, kernels: Kernels = NO_KERNELS) -> None:
        """Read the config.

        Raises:
            UserError: A pattern in `optim.frozen` matches nothing, or nothing is left to train.
        """
        optim = self._optim = config.optim
        self._moe, self._kernels = config.model.moe, kernels
        self._precision = PRECISIONS[config.train.precision]
        self._specs = list_model_specs(config.model, config.train)
        self._frozen = find_frozen_names(config.frozen_patterns, self._specs)
        self._mesh, self.owner_group = mesh, mesh.group("data_shard", "context", "tensor")
        self.offload = make_state_offload(optim, mesh.device)
        self._storage = MomentStorage(*make_state_codecs(optim.state), self.offload)
        self._seed = config.run.seed

    def group(self, spec: ParamSpec) -> ParameterGroup:
        """Return the group of a parameter."""
        return group_of(self._optim, spec, self._frozen)

    @property
    def bucketing(self) -> BucketingRule:
        """What the optimizer requires of buckets."""
        storage = self._storage

        def allocate_host(length: int, dtype: torch.dtype) -> Tensor:
            # Goes through the offload, which pins it and counts its bytes.
            return self.offload.store((torch.zeros(length, dtype=dtype),))[0]

        return BucketingRule(
            self.group,
            lambda spec: self.group(spec).rule is not None,
            # Elements of one scale of a blockwise codec must be on one rank.
            alignment=max(storage.signed.block_size, storage.square.block_size),
            allocate_host=None if self.offload.device is None else allocate_host,
        )

    def list_moments(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the moments of each trained parameter of the whole model, by its
        name."""
        moments: dict[ParameterGroup, tuple[str, ...]] = {}
        names = {}
        for spec in self._specs:
            group = self.group(spec)
            if group.rule is None:
                continue
            if group not in moments:
                transforms = self._make_transforms(group, self._storage)
                moments[group] = tuple(name for part in transforms for name in part.moments)
            names[spec.name] = moments[group]
        return names

    def shard(self, bucket: Bucket) -> OptimizerShard:
        """Return the rule of a bucket with its state. Under Muon, all ranks of `owner_group` must
        call this for the same buckets in the same order."""
        group = self.group(bucket.parameters[0].spec)
        return OptimizerShard(
            bucket, None if group.rule is None else self._make_rule(group, bucket)
        )

    def _make_rule(self, group: ParameterGroup, bucket: Bucket) -> UpdateRule:
        if group.rule == "balance":
            assert self._moe is not None, "a model with routers has experts"
            return ExpertBalance(self._moe, bucket.partition.spans)
        optim = self._optim
        specs = [parameter.spec for parameter in bucket.parameters]
        # Draws depend on a place in the whole parameter, so no layout changes how state is rounded.
        element_ids = ElementIds(specs, bucket.partition, self._seed)
        storage = replace(self._storage, element_ids=element_ids)
        average = [] if optim.ema is None else [WeightAverage(optim.ema)]
        if group.rule == "muon":
            options = make_momentum_options(optim, group.rates)
            partitions = self._list_owner_partitions(bucket)
            precision, owners = self._precision, self.owner_group
            return Muon(bucket, options, storage, precision, owners, partitions, average)
        # The average comes last, so that it sees the new weights.
        transforms = [*self._make_transforms(group, storage), *average]
        return ElementwiseRule(bucket.weights, transforms, storage)

    def _list_owner_partitions(self, bucket: Bucket) -> list[BucketPartition]:
        """Return how the bucket is divided on each rank of `owner_group`."""
        layout, ranks = self._mesh.layout, self.owner_group.ranks
        places, sizes = map(layout.get_full_coordinate, ranks), layout.sizes
        # No transfer: a partition follows from layout and specs, for any rank.
        indices = self._mesh.find_indices(ranks, *bucket.sharding.shard.axes)
        return [
            bucket.partition_of(
                [p.spec.find_local_box(place, sizes) for p in bucket.parameters], index
            )
            for place, index in zip(places, indices, strict=True)
        ]

    def _make_transforms(
        self, group: ParameterGroup, storage: MomentStorage
    ) -> list[UpdateTransform]:
        """Return the transforms of a rule that changes each element on its own."""
        optim, rates = self._optim, group.rates
        if group.rule == "balance":
            return []
        if isinstance(optim.name, OptimizerPart):
            transforms = call_part(optim.name, "make_transforms", list, optim, rates, storage)
            _check_moments(optim.name, transforms)
            return transforms
        if group.rule == "adamw":
            options = AdamWOptions(optim.beta1, optim.beta2, optim.eps, rates)
            return [AdamW(options, storage, self._kernels)]
        if group.rule == "lion":
            return [Lion(LionOptions(optim.beta1, optim.beta2, rates), storage)]
        return [Momentum(make_momentum_options(optim, rates), storage), GradientDescent(rates)]


def _check_moments(part: OptimizerPart, transforms: Sequence[UpdateTransform]) -> None:
    """Raise `UserError` if an extension's optimizer is not made of transforms, or remembers another
    number of moments than it says."""
    for transform in transforms:
        if not isinstance(transform, UpdateTransform):
            raise UserError(
                f"{describe_method(part, 'make_transforms')} returns a list with "
                f"{type(transform).__name__}, which is no UpdateTransform"
            )
    names = [name for transform in transforms for name in transform.moments]
    moments = call_part(part, "count_moments", int)
    if len(names) != moments:
        raise UserError(
            f"optim.name={part.name}: {type(part).__name__}.count_moments says "
            f"{moments} and make_transforms keeps {len(names)}; "
            "make them equal, because the plan counts the memory by the first"
        )


def make_state_offload(optim: OptimConfig, device: torch.device) -> StateOffload:
    """Return where optimizer state is: in host memory if `optim.offload` is set and the device is
    not the CPU itself."""
    return offload_to_host(device) if optim.offload and device.type != "cpu" else NO_OFFLOAD


def group_of(optim: OptimConfig, spec: ParamSpec, frozen: frozenset[str]) -> ParameterGroup:
    """Return how a parameter is trained. Muon trains matrices; AdamW trains the rest.

    Args:
        optim: The section of the config.
        spec: The parameter.
        frozen: Names of parameters that are not trained, as from `find_frozen_names`.
    """
    name = GROUPS[spec.role]
    if spec.name in frozen:
        return ParameterGroup(name, None, GroupRates())
    if name == "balance":
        return ParameterGroup(name, name, GroupRates())
    group = getattr(optim.groups, name)
    decay = group.weight_decay
    if decay is None:
        # A rate that is set for the group applies to all of it; otherwise the layer decides.
        decay = optim.weight_decay if spec.decay else 0.0
    optimizer = get_part_name(optim.name)
    rule = "adamw" if optimizer == "muon" and name != "matrix" else optimizer
    scales_like = optim.name.scales_like if isinstance(optim.name, OptimizerPart) else rule
    # Without a rule for an optimizer from outside, `validate` refuses another parametrisation.
    scale = compute_learning_rate_scale(scales_like or "adamw", spec.growth)
    # A decay is multiplied by the learning rate: their product does not depend on the width.
    return ParameterGroup(name, rule, GroupRates(group.lr * scale, decay / scale))


def make_momentum_options(optim: OptimConfig, rates: GroupRates) -> MomentumOptions:
    """Return the options of Muon or SGD, with their defaults."""
    muon = optim.name == "muon"
    momentum = (0.95 if muon else 0.9) if optim.momentum is None else optim.momentum
    return MomentumOptions(momentum, muon if optim.nesterov is None else optim.nesterov, rates)


def find_frozen_names(patterns: Sequence[str], specs: Iterable[ParamSpec]) -> frozenset[str]:
    """Return the names of the parameters that `optim.frozen` matches.

    Args:
        patterns: `RunConfig.frozen_patterns`.
        specs: Of the whole model.

    Raises:
        UserError: If a pattern matches none, or if no parameter is left to train.
    """
    if not patterns:
        return frozenset()
    names = [spec.name for spec in specs]
    frozen: set[str] = set()
    for pattern in patterns:
        matches = [name for name in names if is_frozen([pattern], name)]
        if not matches and pattern != FROZEN_BASE:
            near = get_close_matches(pattern, names, 3, 0.0)
            raise UserError(
                f"optim.frozen={pattern} matches none of the {len(names)} parameters; "
                f"the nearest are {join_or(near)}"
            )
        frozen.update(matches)
    if len(frozen) == len(names):
        raise UserError(
            f"optim.frozen={','.join(patterns)} leaves none of the {len(names)} parameters to train"
        )
    return frozenset(frozen)


def format_parameter_groups(
    optim: OptimConfig, specs: Sequence[ParamSpec], frozen: frozenset[str]
) -> list[str]:
    """Return a table of how every parameter of the model is trained, a line for each group.

    Args:
        optim: The section `optim`.
        specs: Of the whole model.
        frozen: Names of those that are not trained.
    """
    groups: dict[ParameterGroup, list[ParamSpec]] = {}
    for spec in specs:
        groups.setdefault(group_of(optim, spec, frozen), []).append(spec)
    head = ("parameters", "rule", "tensors", "elements", "peak lr", "weight decay")
    rows = [
        (
            group.name,
            group.rule or "frozen",
            str(len(of_group)),
            f"{count_parameters(of_group):,}",
            f"{optim.lr * group.rates.lr:g}" if group.rule else "-",
            f"{group.rates.weight_decay:g}" if group.rule else "-",
        )
        for group, of_group in groups.items()
        if group.name != "balance"
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    extras = f", state as {optim.state}" + ", with an average of weights" * (optim.ema is not None)
    return [f"optimizer   {get_part_name(optim.name)}{extras}"] + [
        "  "
        + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
