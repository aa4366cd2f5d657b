"""Mixture of experts: what a layer is made of, which layers have experts, and how the ranks of a
node share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import comb, gcd

from megaframe.architecture.activation import ActivationDescription
from megaframe.architecture.hash_table import HashTableDescription
from megaframe.architecture.layer import FeedForwardDescription, HasParameters, SavedActivations
from megaframe.architecture.limits import Limit
from megaframe.architecture.linear import GroupedLinearSpec, LinearSpec
from megaframe.architecture.mlp import MLPDescription
from megaframe.architecture.norm import NormDescription
from megaframe.architecture.spec import Constant, ParamSpec, locate_shard
from megaframe.architecture.traffic import AxisTraffic
from megaframe.config.model import ModelConfig, MoEConfig
from megaframe.config.parallel import ParallelConfig


def has_experts(moe: MoEConfig, layer: int) -> bool:
    """Return whether a layer has experts: after `moe.first` dense layers, every `moe.every`-th."""
    return layer >= moe.first and (layer - moe.first) % moe.every == moe.every - 1


def count_expert_layers(model: ModelConfig) -> int:
    """Return the number of layers that have experts."""
    return sum(model.moe is not None and has_experts(model.moe, i) for i in range(model.layers))


def count_near_experts(parallel: ParallelConfig, node_size: int) -> int:
    """Return how many neighbours on the expert axis share a node."""
    return gcd(parallel.expert, max(1, node_size // parallel.expert_tensor))


@dataclass(frozen=True)
class RouterDescription:
    """The router: a matrix [experts, hidden], and what it knows of the load of the experts, or a
    table of the experts of each token.

    Attributes:
        matrix: Its product, in at least fp32, of a rank's own rows, perhaps with a bias.
        initial_balance: 0 for a bias of the scores, 1 for the load of the last step.
        has_gain: Whether the output of each expert has a learned factor.
        table: The table; None if scores choose experts.
    """

    matrix: LinearSpec
    initial_balance: float
    has_gain: bool = False
    table: HashTableDescription | None = None

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of the matrix, of the balance or the table, and of the bias and the
        experts' factors if there are any."""
        weight, *bias = self.matrix.declare_parameters(name)
        yield weight
        start, shape = Constant(self.initial_balance), self.matrix.outputs
        if self.table is None:
            yield ParamSpec(f"{name}.balance", shape, start, role="balance")
        else:
            yield from self.table.declare_parameters(f"{name}.table")
        yield from bias
        if self.has_gain:
            yield ParamSpec(f"{name}.gain", shape, Constant(1.0), role="gain")


@dataclass(frozen=True)
class ExpertsDescription:
    """The two products of each expert."""

    up: GroupedLinearSpec
    down: GroupedLinearSpec

    @property
    def parts(self) -> Mapping[str, GroupedLinearSpec]:
        """Both, by name."""
        return {"up": self.up, "down": self.down}

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of both."""
        for part_name, part in self.parts.items():
            yield from part.declare_parameters(f"{name}.{part_name}")


@dataclass(frozen=True, kw_only=True)
class MoEDescription(FeedForwardDescription):
    """A router, the experts to which it sends tokens, and optionally a shared MLP for every token.

    Attributes:
        hidden: Width of the stream.
        width: Inner width of one expert.
        activation: Between the products of experts.
        bias: Whether the shared MLP has biases.
        init_std: Standard deviation of the first matrices.
        output_std: That of the second ones.
        moe: The config of the router.
        norm: Of the stream, wherever the layer has one (`model.moe.own_norms`); None for nowhere.
        words: Of the vocabulary, if experts are chosen by tokens; 0 if scores choose them.
    """

    hidden: int
    width: int
    activation: ActivationDescription
    bias: bool
    init_std: float
    output_std: float
    moe: MoEConfig
    norm: NormDescription | None = None
    words: int = 0

    name = "moe"
    keeps_normed_input = True

    @property
    def normalises_input(self) -> bool:
        """Whether each of its parts has a norm of its own."""
        return self.norm is not None

    @property
    def norms(self) -> Mapping[str, NormDescription]:
        """Those before the router, the experts and the shared MLP, and after the last two."""
        if self.norm is None:
            return {}
        of_shared = ("shared_norm", "shared_post_norm") * (self.moe.shared > 0)
        names = ("router_norm", "experts_norm", "experts_post_norm", *of_shared)
        return dict.fromkeys(names, self.norm)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The experts, their width, and that of the shared MLP."""
        experts, width, shared = self.moe.experts, self.width, self.shared
        limits: tuple[Limit, ...] = (
            Limit("expert", experts, f"model.moe.experts={experts}", even=False),
            Limit("expert_tensor", width, f"an expert's width of {width}", even=False),
        )
        if self.moe.expert_bias:
            name = f"the {self.hidden} elements of an expert's bias"
            limits = (*limits, Limit("expert_tensor", self.hidden, name, even=False))
        if shared is None:
            return limits
        name = f"the shared experts' width of {shared.width}"
        return (*limits, Limit("tensor", shared.width, name, even=False))

    @property
    def router(self) -> RouterDescription:
        """The router."""
        moe = self.moe
        matrix = LinearSpec((self.hidden,), (moe.experts,), self.init_std, bias=moe.router_bias)
        table = HashTableDescription(self.words, moe.top_k, moe.experts) if self.words else None
        return RouterDescription(matrix, float(moe.balance != "bias"), moe.expert_gain, table)

    @property
    def experts(self) -> ExpertsDescription:
        """The experts."""
        gated = self.activation.gated
        up = GroupedLinearSpec(
            (self.hidden,),
            (2, self.width) if gated else (self.width,),
            self.init_std,
            split=1 if gated else 0,
            bias=self.moe.expert_bias,
            fused={0: (1, 1)} if gated else {},
            matrices=("gate", "up") if gated else (),
            experts=self.moe.experts,
            top_k=self.moe.top_k,
        )
        down = GroupedLinearSpec(
            (self.width,),
            (self.hidden,),
            self.output_std,
            split=1,
            bias=self.moe.expert_bias,
            experts=self.moe.experts,
            top_k=self.moe.top_k,
        )
        up, down = self.adapt("experts.up", up), self.adapt("experts.down", down)
        return ExpertsDescription(up, down)

    @property
    def shared(self) -> MLPDescription | None:
        """The shared experts, which are one MLP."""
        if not self.moe.shared:
            return None
        return MLPDescription(
            hidden=self.hidden,
            width=self.moe.shared * self.width,
            activation=self.activation,
            up_bias=self.bias,
            down_bias=self.bias,
            init_std=self.init_std,
            output_std=self.output_std,
            adapters=self.adapters,
        )

    @property
    def shared_gate(self) -> LinearSpec | None:
        """From the layer's input to the gate of the shared MLP, of a rank's own rows."""
        if not self.moe.shared or not self.moe.shared_gate:
            return None
        return LinearSpec((self.hidden,), (1,), self.init_std)

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """Router, experts, and the shared MLP and its gate if there are any."""
        shared, gate = self.shared, self.shared_gate
        return {
            "router": self.router,
            "experts": self.experts,
            **({} if shared is None else {"shared": shared}),
            **({} if gate is None else {"shared_gate": gate}),
            **self.norms,
        }

    @property
    def linears(self) -> list[LinearSpec]:
        """The router's product, those of the experts, those of the shared MLP and its gate."""
        experts, shared, gate = self.experts, self.shared, self.shared_gate
        return [
            self.router.matrix,
            *experts.up.products,
            *experts.down.products,
            *([] if shared is None else shared.linears),
            *([] if gate is None else [gate]),
        ]

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what experts and their router keep. Experts count as equally loaded, and without
        their routes."""
        moe, hidden = self.moe, self.hidden
        # Each of these ranks has the rows of all, and part of a width.
        copies = parallel.expert_tensor
        arriving: float = moe.top_k * copies
        if parallel.expert * copies == 1:
            arriving = 0  # experts select from the normalised rows
        elif parallel.dispatch == "all_gather" and copies == 1:
            arriving = parallel.expert
        elif parallel.dispatch == "deduplicated" and copies == 1:
            near = count_near_experts(parallel, parallel.node_size or parallel.expert)
            if near == 1:  # a row arrives once, and its experts select from it
                arriving = parallel.expert * self._compute_node_share(parallel.expert, 1)
        elements = arriving * hidden + moe.top_k * (copies + self.experts.up.results)
        # Jitter keeps its factors and its result; the normalised rows only where experts use them
        # here.
        if moe.jitter:
            elements += hidden
            elements += hidden * ((arriving == 0 or moe.shared > 0) and not self.normalises_input)
        balanced = self.balances
        penalised = moe.z_loss > 0
        # The scores; the loads of their samples, unless all samples have the same; the logits.
        scores = moe.experts * (1 + self.balances_samples + penalised) + balanced
        scores += (moe.top_k + 2) * moe.normalise + penalised
        has_label = balanced or penalised
        saved = SavedActivations(elements, scores, 8 * moe.top_k + has_label)
        if self.shared is not None:
            saved = saved + self.shared.count_saved(parallel, recompute)
        if self.shared_gate is not None:  # what it is multiplied by, and the gate
            saved = saved + SavedActivations(hidden + 1)
        if moe.expert_gain:  # the weights of choices before and the factors of their experts
            saved = saved + SavedActivations(statistics=2 * moe.top_k)
        for norm in self.norms.values():
            saved = saved + norm.saved
        # Experts that select from rows as they arrive need no others.
        return saved + SavedActivations(-hidden * (self.normalises_input and arriving > 0))

    @property
    def balances(self) -> bool:
        """Whether there is a balance loss."""
        return self.moe.balance_loss > 0 and self.moe.balance != "none" and not self.words

    @property
    def balances_samples(self) -> bool:
        """Whether the balance loss is one of the loads in each sample."""
        return self.balances and self.moe.balance != "global"

    def count_tensor_sums(self, samples: int) -> int:
        """Return the loads of all experts in each sample, and in the padding."""
        return (samples + 1) * self.moe.experts * self.balances_samples

    def count_traffic(
        self, parallel: ParallelConfig, seq: int, near: int = 1
    ) -> Mapping[str, AxisTraffic]:
        """Return what moves to the experts and back, with the weights of the choices, as if all
        sets of `top_k` experts were chosen equally often."""
        ranks, copies, moe = parallel.expert, parallel.expert_tensor, self.moe
        traffic: dict[str, AxisTraffic] = {}
        if ranks > 1:
            traffic["expert"] = self._count_dispatch(parallel.dispatch, ranks, near)
        if copies > 1:
            # Rows that have arrived, with their weights, are gathered, and their results scattered.
            rows = moe.top_k * (copies - 1)
            moved = (2 * self.hidden + 1) * rows
            sources = {"all_to_all": ranks, "hierarchical": ranks // near, "deduplicated": near}
            counts = 8 * sources.get(parallel.dispatch, 1) * moe.experts / ranks * (copies - 1)
            traffic["expert_tensor"] = AxisTraffic(moved, moved, count_bytes=counts)
        return traffic

    def _count_dispatch(self, method: str, ranks: int, near: int) -> AxisTraffic:
        """Return what a dispatch method moves over the expert axis (`megaframe.expert_parallel`):
        rows to the experts, results back, and the weights of choices."""
        moe, hidden, far = self.moe, self.hidden, ranks // near
        choices, experts = moe.top_k, moe.experts
        # Neighbours and nodes get the same share of the choices.
        near_share, far_share = (near - 1) / near, (far - 1) / far
        integers = counts = 0.0
        if method == "all_to_all":
            rows = weights = choices * (ranks - 1) / ranks
            counts = 8 * experts * (ranks - 1)
        elif method == "all_gather":
            rows, weights = ranks - 1, choices * (ranks - 1)
            integers, counts = 8 * weights, 8 * (ranks - 1)
        elif method == "hierarchical":
            rows = weights = choices * (near_share + far_share)
            counts = 8 * experts * (ranks - 1)
        else:
            nodes = (far - 1) * self._compute_node_share(ranks, near)
            rows = choices * near_share + nodes
            weights = choices * (near_share + nodes)
            integers = 8 * choices * nodes
            counts = 8 * (far * (far - 1) + experts / far * (near - 1))
        moved = 2 * hidden * rows + weights
        return AxisTraffic(moved, moved, integer_bytes=integers, count_bytes=counts)

    def _compute_node_share(self, ranks: int, near: int) -> float:
        """Return the share of rows that have a choice on a node of `near` ranks: all but those
        whose choices are all among the experts of other nodes, on average over nodes."""
        experts, choices = self.moe.experts, self.moe.top_k
        starts = [locate_shard(experts, rank, ranks)[0] for rank in range(0, ranks, near)]
        sizes = (stop - start for start, stop in pairwise([*starts, experts]))
        elsewhere = sum(comb(experts - size, choices) for size in sizes) / len(starts)
        return 1 - elsewhere / comb(experts, choices)

    @property
    def input_products(self) -> int:
        """The router's, of rows without jitter, and those of the shared MLP and its gate, unless
        each normalises them by itself."""
        if self.normalises_input:
            return 0
        return sum((self.moe.jitter == 0, self.shared is not None, self.shared_gate is not None))

    @property
    def keeps_output_gradient(self) -> bool:
        """Only a shared MLP without a gate and a norm after it does; experts keep the rows that
        were routed to them."""
        return self.shared is not None and self.shared_gate is None and self.norm is None

    def count_saved_for_weights(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the rows of the experts and the gradients of their outputs, those of the shared
        MLP, and in at least fp32 the gradients of the scores."""
        moe, hidden, copies = self.moe, self.hidden, parallel.expert_tensor
        experts = self.experts
        per_choice = 2 * copies * hidden + experts.up.results + self.width
        for adapter in (*experts.up.adapters, *experts.down.adapters):
            # The numbers between its products and their gradients; of one matrix among several
            # also the gradient of its results.
            per_choice += 2 * copies * adapter.rank + self.width * bool(adapter.name)
        elements = hidden + moe.top_k * per_choice
        shared = self.shared
        if shared is not None:
            # Its input is that of the router, unless jitter or norms make another one of it.
            apart = moe.jitter > 0 or self.normalises_input
            elements += shared.up.results + shared.width + hidden * (1 + apart)
            parts = shared, replace(shared, adapters=None)
            adapted, plain = (part.count_saved_for_weights(parallel, recompute) for part in parts)
            elements += adapted.values - plain.values
        elements += self.shared_gate is not None  # its input is that of the shared MLP
        return SavedActivations(elements, moe.experts)

    @property
    def experts_per_token(self) -> int:
        """The experts that the router chooses."""
        return self.moe.top_k

    @property
    def inner_elements(self) -> float:
        """As of an MLP, for all experts of a token."""
        width = (self.moe.top_k + self.moe.shared) * self.width
        return width * (1.5 if self.activation.gated else 1.0)

    @property
    def widest(self) -> int:
        """The outputs of the first products of all experts of a token."""
        return (self.moe.top_k + self.moe.shared) * self.experts.up.results
