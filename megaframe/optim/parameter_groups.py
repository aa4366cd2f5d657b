"""Choices: which rule trains each parameter, at which rates, and which parameters are not trained.

Everything follows from the role that a layer declared for its parameter and from nothing else,
except for frozen parameters, which a user lists by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial

import torch

from megaframe.config import OptimConfig, RunConfig
from megaframe.data_parallel.bucket import Bucket
from megaframe.data_parallel.partition import Division
from megaframe.distributed.mesh import Mesh
from megaframe.errors import UserError, join_or
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.optim.adamw import AdamW, AdamWOptions
from megaframe.optim.element_ids import Numbering
from megaframe.optim.elementwise import (
    Average,
    Change,
    Descent,
    Elementwise,
    Lion,
    LionOptions,
    MomentumOptions,
    Rates,
    Speed,
)
from megaframe.optim.expert_balance import Balance
from megaframe.optim.muon import Muon
from megaframe.optim.optimizer_state import Keeping
from megaframe.optim.rule import Rule
from megaframe.optim.state_dtype import codes
from megaframe.optim.state_offload import STAYS, Route, route_from
from megaframe.parameters.parameter import PRECISIONS
from megaframe.parameters.spec import ParamSpec, count_parameters
from megaframe.pipeline_parallel.stage import model_specs

GROUPS = {
    "matrix": "matrix",
    "embedding": "embedding",
    "head": "head",
    "gain": "vector",
    "bias": "vector",
    "balance": "balance",
}
"""The group of each role: those of `optim.groups`, and `balance`."""


@dataclass(frozen=True)
class Kind:
    """What parameters must have in common to be trained together. rule: the optimizer's name, None
    if they are frozen."""

    group: str
    rule: str | None
    rates: Rates


class Choices:
    """The choices of a run. Raises `UserError` if a pattern in `optim.frozen` matches nothing."""

    def __init__(self, config: RunConfig, mesh: Mesh, kernels: Kernels = NO_KERNELS) -> None:
        optim = self._optim = config.optim
        self._moe, self._kernels = config.model.moe, kernels
        self._precision = PRECISIONS[config.train.precision]
        self._frozen = frozen_names(config)
        self._mesh, self.owners = mesh, mesh.group("data_shard", "context", "tensor")
        """The ranks that together hold one copy of a stage; under Muon they own its matrices."""
        self.route = route_of(optim, mesh.device)
        """Brings optimizer state that is kept elsewhere to the device."""
        self._keeping = Keeping(*codes(optim.state), self.route)
        self.together = max(self._keeping.signed.together, self._keeping.square.together)
        """Number of neighbours in a bucket that share something in the state, such as a scale."""
        self._seed = config.run.seed

    def kind(self, spec: ParamSpec) -> Kind:
        """Return the kind of a parameter."""
        return kind_of(self._optim, spec, self._frozen)

    def rule(self, spec: ParamSpec) -> Callable[[Bucket], Rule] | None:
        """Return what makes the optimizer of a bucket of such parameters; None if frozen."""
        kind = self.kind(spec)
        return None if kind.rule is None else partial(self._make, kind)

    def _make(self, kind: Kind, bucket: Bucket) -> Rule:
        if kind.rule == "balance":
            assert self._moe is not None, "a model with routers has experts"
            return Balance(self._moe, bucket.division.spans)
        optim = self._optim
        specs = [parameter.spec for parameter in bucket.parameters]
        numbers = Numbering(specs, bucket.division, self._seed)
        keeping = replace(self._keeping, numbers=numbers)
        average = [] if optim.ema is None else [Average(optim.ema)]
        if kind.rule == "muon":
            speed = momentum_options(optim, kind.rates)
            divisions = self._on_owners(bucket)
            return Muon(bucket, speed, keeping, self._precision, self.owners, divisions, average)
        return Elementwise(bucket.weights, [*self._changes(kind, keeping), *average], keeping)

    def _on_owners(self, bucket: Bucket) -> list[Division]:
        """Return how the bucket is divided on each of the owners."""
        layout, ranks = self._mesh.layout, self.owners.ranks
        places, sizes = map(layout.full_coordinate, ranks), layout.sizes
        indices = self._mesh.indices(ranks, *bucket.sharing.shard.axes)
        return [
            bucket.divided([p.spec.local(place, sizes) for p in bucket.parameters], index)
            for place, index in zip(places, indices, strict=True)
        ]

    def _changes(self, kind: Kind, keeping: Keeping) -> list[Change]:
        """Return the changes that make up a rule that changes each element on its own."""
        optim, rates = self._optim, kind.rates
        if kind.rule == "adamw":
            options = AdamWOptions(optim.beta1, optim.beta2, optim.eps, rates)
            return [AdamW(options, keeping, self._kernels)]
        if kind.rule == "lion":
            return [Lion(LionOptions(optim.beta1, optim.beta2, rates), keeping)]
        return [Speed(momentum_options(optim, rates), keeping), Descent(rates)]


def route_of(optim: OptimConfig, device: torch.device) -> Route:
    """Return the route of what the optimizer keeps: from host memory if `optim.offload` is set and
    the device is not the CPU itself."""
    return route_from(device) if optim.offload and device.type != "cpu" else STAYS


def kind_of(optim: OptimConfig, spec: ParamSpec, frozen: frozenset[str]) -> Kind:
    """Return how a parameter is trained. Muon trains matrices; AdamW trains the rest."""
    name = GROUPS[spec.role]
    if spec.name in frozen:
        return Kind(name, None, Rates())
    if name == "balance":
        return Kind(name, name, Rates())
    group = getattr(optim.groups, name)
    decay = group.weight_decay
    if decay is None:
        decay = optim.weight_decay if spec.decay else 0.0
    rule = "adamw" if optim.name == "muon" and name != "matrix" else optim.name
    return Kind(name, rule, Rates(group.lr, decay))


def momentum_options(optim: OptimConfig, rates: Rates) -> MomentumOptions:
    """Return the options of Muon or SGD, with their defaults."""
    muon = optim.name == "muon"
    momentum = (0.95 if muon else 0.9) if optim.momentum is None else optim.momentum
    return MomentumOptions(momentum, muon if optim.nesterov is None else optim.nesterov, rates)


def frozen_names(config: RunConfig) -> frozenset[str]:
    """Return the names of the parameters that `optim.frozen` matches.

    Raises `UserError` if a pattern matches none, or if no parameter is left to train.
    """
    patterns = config.optim.frozen
    if not patterns:
        return frozenset()
    names = [spec.name for spec in model_specs(config)]
    found: set[str] = set()
    for pattern in patterns:
        expression = re.compile(".*".join(map(re.escape, pattern.split("*"))))
        fits = [name for name in names if expression.fullmatch(name)]
        if not fits:
            near = get_close_matches(pattern, names, 3, 0.0)
            raise UserError(
                f"optim.frozen={pattern} matches none of the {len(names)} parameters; "
                f"the nearest are {join_or(near)}"
            )
        found.update(fits)
    if len(found) == len(names):
        raise UserError(
            f"optim.frozen={','.join(patterns)} leaves none of the {len(names)} parameters to train"
        )
    return frozenset(found)


def choices_table(config: RunConfig, specs: Sequence[ParamSpec]) -> list[str]:
    """Return a table of how every parameter of the model is trained, a line for each kind."""
    optim, frozen = config.optim, frozen_names(config)
    kinds: dict[Kind, list[ParamSpec]] = {}
    for spec in specs:
        kinds.setdefault(kind_of(optim, spec, frozen), []).append(spec)
    head = ("parameters", "rule", "tensors", "elements", "peak lr", "weight decay")
    rows = [
        (
            kind.group,
            kind.rule or "frozen",
            str(len(of_kind)),
            f"{count_parameters(of_kind):,}",
            f"{optim.lr * kind.rates.lr:g}" if kind.rule else "-",
            f"{kind.rates.weight_decay:g}" if kind.rule else "-",
        )
        for kind, of_kind in kinds.items()
        if kind.group != "balance"
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    extras = f", state as {optim.state}" + ", with an average of weights" * (optim.ema is not None)
    return [f"optimizer   {optim.name}{extras}"] + [
        "  "
        + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
