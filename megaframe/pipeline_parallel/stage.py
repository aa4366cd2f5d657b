"""Stage: the part of the model that one rank runs for one chunk of the pipeline.

A stage runs its blocks in an explicit loop. Each block's input is a leaf, and the backward pass
walks the blocks in reverse and calls autograd on one block at a time. Recompute, deferred weight
gradients and the start of gradient reductions are therefore plain lines in that loop, and nothing
depends on autograd hooks. A block's output is kept as an edge of its graph, not as a tensor: the
next block's input holds the same numbers, and the last output is not needed once it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaframe.architecture.stages import StagePlan
from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.interleaving import HandOver
from megaframe.model.block import EmulatedBlock, TransformerBlock
from megaframe.model.dropout import DropoutKeys
from megaframe.model.embedding import Embedding
from megaframe.model.forward_context import (
    MicrobatchContext,
    RunContext,
    make_microbatch_context,
    make_run_context,
)
from megaframe.model.output_head import (
    OutputHead,
    PostProcess,
    PostProcessActivations,
    UnitDone,
    UnitValues,
)
from megaframe.model.pass_state import BlockBoundary, LayerStatistics, PassState
from megaframe.ops.autograd import backward
from megaframe.ops.workspace import Workspace
from megaframe.parameters.parameter import PRECISIONS, Module, Parameter
from megaframe.parameters.spec import ParamSpec
from megaframe.pipeline_parallel.activation_offload import Shelf, Stored
from megaframe.tensor_parallel.deferred_gradients import DeferredGradient, DeferredGradientQueue


class Keeper(Protocol):
    """Provides the values of units: they are on this rank between `take` and `leave`. `fetch`
    starts to gather them ahead of `take`. If a unit is not taken `whole`, the values of its late
    part are on this rank only when `take_late` returns."""

    def fetch(self, unit: Module) -> None: ...

    def take(self, unit: Module, *, whole: bool = True) -> None: ...

    def take_late(self, late: Module) -> None: ...

    def leave(self, unit: Module) -> None: ...


class Here:
    """A keeper that does nothing, because all values are always on this rank."""

    def fetch(self, unit: Module) -> None: ...

    def take(self, unit: Module, *, whole: bool = True) -> None: ...

    def take_late(self, late: Module) -> None: ...

    def leave(self, unit: Module) -> None: ...


Look = Callable[[bool, int, int, int, Tensor], object]
"""Called with: backward, stage, microbatch, block (-1 for the embedding), and the result of the
pass, an output or a gradient."""


@dataclass
class Flight:
    """What a stage keeps of one microbatch between its forward and its backward.

    context: what the microbatch brings to layers.
    state: of its passes.
    inputs: the leaf that is the input of each block, possibly stored on the shelf.
    outputs: the graph edge of each block's output, None if the block is recomputed.
    embedded: the graph edge of the embedding's output.
    post_process: what the predictors and the head keep.
    deferred: the weight gradients that B leaves for W, by unit.
    """

    context: MicrobatchContext
    state: PassState
    inputs: list[Tensor | Stored] = field(default_factory=list)
    outputs: list[GradientEdge | None] = field(default_factory=list)
    embedded: GradientEdge | None = None
    post_process: PostProcessActivations | None = None
    deferred: list[tuple[Module, list[DeferredGradient]]] = field(default_factory=list)


class Stage:
    """The blocks of `plan`, plus the embedding on the first stage, and the predictors and the head
    on the last.

    `units` are the parts whose parameters are reduced, updated and gathered together, in the order
    of the forward pass.

    run: what the run fixes for the layers.
    embedding: the embedding of another stage on this rank, for the head and the predictors.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: StagePlan,
        run: RunContext,
        embedding: Embedding | None = None,
    ) -> None:
        self.config, self.plan, self.run = config, plan, run
        self.precision = PRECISIONS[config.train.precision]
        self.embedding = Embedding(config, run) if plan.first else None
        emulate = config.model.emulate
        self.blocks: list[TransformerBlock | EmulatedBlock] = [
            TransformerBlock(config.model, layer, run)
            if emulate is None
            else EmulatedBlock(emulate)
            for layer in plan.blocks
        ]
        self.post_process = (
            PostProcess(config, self.embedding or embedding, run) if plan.last else None
        )
        first = [] if self.embedding is None else [self.embedding]
        last = [] if self.post_process is None else self.post_process.units
        self.units: list[Module] = [*first, *self.blocks, *last]
        self.keeper: Keeper = Here()
        """The keeper of the values of all units."""
        self.look: Look | None = None
        """Called with the result of each block while a faulty one is being looked for."""
        moe, drops = config.model.moe, config.model.dropout > 0
        random = drops or (moe is not None and moe.jitter > 0)
        self._keys = DropoutKeys(config.run.seed) if random else None
        self._flights: dict[int, Flight] = {}
        self._statistics = LayerStatistics()
        self._workspace = Workspace()
        self._away: Shelf | None = None

    def first(self, *, backward: bool) -> Module | None:
        """Return the unit whose values a pass needs first, None if it needs none."""
        if not backward:
            return self.units[0] if self.units else None
        return next(iter(self._backward_units()), None)

    @property
    def head(self) -> OutputHead | None:
        """The model's head on the last stage, else None."""
        return None if self.post_process is None else self.post_process.head

    def _backward_units(self) -> list[Module]:
        """Return the units whose values a backward pass needs, in its order."""
        units: list[Module] = [*self.blocks]
        if self.post_process is not None:
            units += self.post_process.predictors
        return units[::-1]

    def parameters(self) -> list[Parameter]:
        """Return all parameters in order, without repeating those that units share."""
        return list({p: None for unit in self.units for p in unit.parameters()})

    @property
    def live(self) -> int:
        """Number of microbatches whose activations are live."""
        return len(self._flights)

    def start_step(self, step: int) -> None:
        """Begin optimizer step `step`, on which random masks depend."""
        if self._keys is not None:
            self._keys.begin(step)

    def forward(
        self,
        number: int,
        microbatch: Microbatch,
        scale: Tensor,
        x: Tensor | None = None,
        done: UnitDone | None = None,
        following: Module | None = None,
        hand_over: HandOver | None = None,
    ) -> Tensor:
        """Run the forward pass of microbatch `number` and keep what its backward needs.

        scale: an fp64 scalar; gradients are those of scale * (loss sum).
        x: [rows, hidden], the output of the previous stage; None on the first stage.
        done: called with the head, whose weight gradient is complete after this pass.
        following: the unit whose values are needed first after this pass.
        hand_over: lets a pass that runs in turns with this one continue.
        Returns the output for the next stage, [rows, hidden]. On the last stage, returns the loss
        sum over valid tokens, fp64 scalar.
        """
        context, state = self._context(microbatch, self._keys, scale), self._pass_state()
        flight = Flight(context, state)
        state.interleave_hook.switch = hand_over
        self._flights[number] = flight
        values = self._values(self.units, following, whole=False)
        if self.embedding is not None:
            with values(self.embedding):
                x = self.embedding(microbatch, context)
            flight.embedded = get_gradient_edge(x)
            self._show(False, number, -1, x)
        assert x is not None
        for index, block in enumerate(self.blocks):
            leaf = x.detach().requires_grad_()
            flight.inputs.append(leaf)
            again = index < self.plan.recomputed
            with values(block), torch.set_grad_enabled(not again):
                x = block(leaf, context, state)
            flight.outputs.append(None if again else get_gradient_edge(x))
            if again and self.config.train.offload:
                flight.inputs[-1] = self._shelf(leaf).store(leaf.detach())
            self._show(False, number, self.plan.blocks[index], x)
        self._workspace.clear()
        if self.post_process is None:
            return x.detach()
        loss, flight.post_process = self.post_process.forward(
            x, microbatch, context, state, scale, values
        )
        if done is not None:
            done(self.post_process.head)
        return loss

    def backward(
        self,
        number: int,
        gradient: Tensor | None = None,
        done: UnitDone | None = None,
        following: Module | None = None,
        hand_over: HandOver | None = None,
        *,
        split: bool = False,
    ) -> Tensor:
        """Run the backward pass of microbatch `number`.

        gradient: that of this stage's output, None on the last stage.
        done: called with each unit whose gradients this call completes, after its second half.
        following, hand_over: as in `forward`.
        split: leave the weight gradients of matrices for `weight_backward`; `done` is not called.
        Returns the gradient of this stage's input; on the first stage, that of the embedding's
        output.
        """
        flight = self._flights[number] if split else self._flights.pop(number)
        context, state = flight.context, flight.state
        state.deferred.deferring = split
        state.interleave_hook.switch = hand_over
        state.boundary.done = None if split else done

        def finish(unit: Module) -> None:
            if split:
                flight.deferred.append((unit, state.deferred.take()))
            elif done is not None:
                done(unit)

        values = self._values(self._backward_units(), following)
        if self.post_process is not None:
            assert flight.post_process is not None
            gradient = self.post_process.backward(flight.post_process, values, finish)
        for block in reversed(self.blocks):
            assert gradient is not None
            leaf, output = _taken(flight.inputs.pop()), flight.outputs.pop()
            if flight.inputs and isinstance(before := flight.inputs[-1], Stored):
                before.fetch()  # arrives while this block is computed
            with values(block):
                if output is None:
                    output = get_gradient_edge(block(leaf, context, state))
                backward(output, gradient)
            del output
            gradient = leaf.grad
            finish(block)
            self._show(True, number, self.plan.blocks[len(flight.inputs)], gradient)
        self._workspace.clear()
        assert gradient is not None
        if self.embedding is None:
            return gradient
        assert flight.embedded is not None
        backward(flight.embedded, gradient)
        flight.embedded = None
        finish(self.embedding)
        return gradient

    @torch.no_grad()  # as in autograd's own backward pass, where this work would otherwise run
    def weight_backward(self, number: int, done: UnitDone | None = None) -> None:
        """Compute the weight gradients that the split backward of microbatch `number` left. done:
        as in `backward`."""
        flight = self._flights.pop(number)
        # One queue for all units: the first transfer of a unit overlaps with the work before it.
        queue = DeferredGradientQueue(one for _, gradients in flight.deferred for one in gradients)
        for unit, gradients in flight.deferred:
            for _ in range(len(gradients)):
                queue.compute_next()
            gradients.clear()  # frees the operands before the unit's gradients are reduced
            if done is not None:
                if unit.second_half is not None:
                    done(unit.second_half)
                done(unit)

    @torch.no_grad()
    def evaluate(self, microbatch: Microbatch, x: Tensor | None = None) -> Tensor:
        """Run a forward pass without dropout and gradients. Returns the output for the next stage,
        or on the last stage, the cross-entropy summed over valid tokens, fp64 scalar."""
        x = self.hidden(microbatch, x)
        if self.post_process is None:
            return x
        values = self._values([self.post_process.head])
        return self.post_process.evaluate(x, microbatch, self._context(microbatch), values)

    @torch.no_grad()
    def hidden(self, microbatch: Microbatch, x: Tensor | None = None) -> Tensor:
        """Return the residual stream [rows, hidden] after this stage's last block, without dropout
        and gradients."""
        context, state = self._context(microbatch), self._pass_state()
        values = self._values(self.units, whole=False)
        if self.embedding is not None:
            with values(self.embedding):
                x = self.embedding(microbatch, context)
        assert x is not None
        for block in self.blocks:
            with values(block):
                x = block(x, context, state)
        return x

    def _shelf(self, x: Tensor) -> Shelf:
        """Return the shelf for the inputs of recomputed blocks."""
        if self._away is None:
            self._away = Shelf(x.device)
        return self._away

    def _values(
        self, units: Sequence[Module], following: Module | None = None, *, whole: bool = True
    ) -> UnitValues:
        """Return the contexts of a pass over `units`. In the context of a unit its values are on
        this rank (without `whole`, those of its second half only from the seam on), and the values
        of the next unit are being fetched. `following` is the next unit after the last."""
        coming = dict(zip(units, [*units[1:], following], strict=False))  # there may be none

        @contextmanager
        def here(unit: Module) -> Iterator[None]:
            self.keeper.take(unit, whole=whole)
            if after := coming[unit]:
                self.keeper.fetch(after)
            yield
            self.keeper.leave(unit)

        return here

    def _show(self, backward: bool, microbatch: int, block: int, made: Tensor | None) -> None:
        if self.look is not None and made is not None:
            self.look(backward, self.plan.number, microbatch, block, made.detach())

    def take_statistics(self) -> LayerStatistics:
        """Return the statistics of all microbatches since the last call, and start new ones."""
        taken, self._statistics = self._statistics, LayerStatistics()
        return taken

    def _context(
        self,
        microbatch: Microbatch,
        keys: DropoutKeys | None = None,
        scale: Tensor | None = None,
    ) -> MicrobatchContext:
        dtype = self.precision.compute
        return make_microbatch_context(self.config.model, self.run, microbatch, dtype, keys, scale)

    def _pass_state(self) -> PassState:
        boundary = BlockBoundary(self.keeper.take_late)
        return PassState(self._statistics, self._workspace, boundary)


def _taken(leaf: Tensor | Stored) -> Tensor:
    return leaf.take().requires_grad_() if isinstance(leaf, Stored) else leaf


def build_stages(
    config: RunConfig, plans: Sequence[StagePlan], run: RunContext
) -> Mapping[int, Stage]:
    """Return the stages of one rank by number. If the first and the last stage are both on this
    rank, the last one uses the first one's embedding."""
    stages: dict[int, Stage] = {}
    for plan in sorted(plans, key=lambda plan: plan.number):
        first = stages.get(0)
        embedding = None if first is None else first.embedding
        stages[plan.number] = Stage(config, plan, run, embedding)
    return stages


def whole_model(config: RunConfig) -> Stage:
    """Return the whole model as one stage on one rank."""
    recomputed = config.model.layers if config.train.recompute == "full" else 0
    plan = StagePlan(0, 1, range(config.model.layers), recomputed)
    return Stage(config, plan, make_run_context(config))


def model_specs(config: RunConfig) -> list[ParamSpec]:
    """Return the specs of all parameters of the whole model, in order. Allocates nothing."""
    return [parameter.spec for parameter in whole_model(config).parameters()]
