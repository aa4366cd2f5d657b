"""Stage: the part of the model that one rank runs for one chunk of the pipeline.

A stage runs its blocks in an explicit loop. Each block's input is a leaf, and backward walks the
blocks in reverse, calling autograd on one block at a time; so recompute, weight gradients put off
and the launch of a gradient reduction are plain lines in that loop, and nothing depends on autograd
hooks. What came of a block is kept as an edge of its graph, not as a tensor: the next block's input
holds the same numbers, and those of the last one are not needed once they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaframe.backward import backward
from megaframe.comm import ALONE, Group, symmetric
from megaframe.comm.shelf import Shelf, Stored
from megaframe.config import RunConfig
from megaframe.ending import Done, End, Kept, Values
from megaframe.kernels import NO_KERNELS, Kernels
from megaframe.mesh import ranks_on_this_node
from megaframe.microbatch import Microbatch
from megaframe.model import Block, Embedding, EmulatedBlock, Head
from megaframe.nn.context import Context
from megaframe.nn.dropout import Keys
from megaframe.nn.eight_bits import EightBits
from megaframe.nn.frame import Frame, Left, do_all, make_frame
from megaframe.nn.moe.dispatch import Places
from megaframe.nn.scratch import Scratch
from megaframe.nn.seam import Seam
from megaframe.nn.tally import Tally
from megaframe.nn.turns import HandOver
from megaframe.parameter import PRECISIONS, Module, Parameter
from megaframe.plan.stages import StagePlan
from megaframe.spec import ParamSpec


class Keeper(Protocol):
    """Who keeps the values of units. They are here between `take` and `leave`; `fetch` starts
    bringing them, ahead of `take`. Of a unit that is not taken `whole`, those of its late part are
    here when `take_late` returns."""

    def fetch(self, unit: Module) -> None: ...

    def take(self, unit: Module, *, whole: bool = True) -> None: ...

    def take_late(self, late: Module) -> None: ...

    def leave(self, unit: Module) -> None: ...


class Here:
    """Keeps nothing, because every value is always here."""

    def fetch(self, unit: Module) -> None: ...

    def take(self, unit: Module, *, whole: bool = True) -> None: ...

    def take_late(self, late: Module) -> None: ...

    def leave(self, unit: Module) -> None: ...


Look = Callable[[bool, int, int, int, Tensor], object]
"""backward, stage, microbatch, block (-1 for the embedding), and what came of its pass."""
_WHOLE = Context()
"""Of a rank that has whole samples."""
_HERE = Places()
"""Of a rank that has all experts."""


@dataclass
class Flight:
    """What a stage keeps of one microbatch between its forward and its backward.

    inputs: the leaf that each block started from, maybe on the shelf. outputs: what came of each
    block, None where it runs again. embedded: output of the embedding. end: what the end keeps.
    left: what B leaves for W.
    """

    frame: Frame
    inputs: list[Tensor | Stored] = field(default_factory=list)
    outputs: list[GradientEdge | None] = field(default_factory=list)
    embedded: GradientEdge | None = None
    end: Kept | None = None
    left: list[tuple[Module, list[Left]]] = field(default_factory=list)


class Stage:
    """The blocks of `plan`, with the embedding in front of the first and the end behind the last.

    `units` are the parts whose parameters are reduced, updated and gathered together, in the order
    of the forward pass. tensor: the ranks that split its matrices. embedding: that of another stage
    on this rank, for the end. context: the ranks that divide samples. experts: those that have
    experts. kernels: what computes what has a fast form.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: StagePlan,
        tensor: Group,
        embedding: Embedding | None = None,
        context: Context = _WHOLE,
        experts: Places = _HERE,
        kernels: Kernels = NO_KERNELS,
    ) -> None:
        self.config, self.plan, self.tensor, self.context = config, plan, tensor, context
        self.experts, self.kernels = experts, kernels
        self.precision = PRECISIONS[config.train.precision]
        wanted = config.parallel.symmetric_memory == "auto"
        node_size = config.parallel.node_size or ranks_on_this_node()
        fp8 = config.train.fp8
        self._eight = None if fp8 == "none" else EightBits(fp8, kernels)
        wanted = wanted and self._eight is None  # those products are of wide numbers
        self._symmetric = wanted and symmetric.available(tensor, node_size)
        self.embedding = Embedding(config) if plan.first else None
        emulate = config.model.emulate
        self.blocks: list[Block | EmulatedBlock] = [
            Block(config.model, layer) if emulate is None else EmulatedBlock(emulate)
            for layer in plan.blocks
        ]
        self.end = End(config, self.embedding or embedding) if plan.last else None
        first = [] if self.embedding is None else [self.embedding]
        last = [] if self.end is None else self.end.units
        self.units: list[Module] = [*first, *self.blocks, *last]
        self.keeper: Keeper = Here()
        """Of the values of all units."""
        self.look: Look | None = None
        """Is shown what comes of each block, where somebody looks for the one that is at fault."""
        moe, drops = config.model.moe, config.model.dropout > 0
        random = drops or (moe is not None and moe.jitter > 0)
        self._keys = Keys(config.run.seed) if random else None
        self._flights: dict[int, Flight] = {}
        self._tally = Tally()
        self._scratch = Scratch()
        self._away: Shelf | None = None

    def first(self, *, backward: bool) -> Module | None:
        """The unit whose values a pass needs first, None where it needs none."""
        if not backward:
            return self.units[0] if self.units else None
        return next(iter(self._backward_units()), None)

    @property
    def head(self) -> Head | None:
        """That of the model, on the last stage."""
        return None if self.end is None else self.end.head

    def _backward_units(self) -> list[Module]:
        """Those whose values a backward needs, in its order."""
        units: list[Module] = [*self.blocks, *([] if self.end is None else self.end.predictors)]
        return units[::-1]

    def parameters(self) -> list[Parameter]:
        """All parameters, in order, once each though units may share them."""
        return list({p: None for unit in self.units for p in unit.parameters()})

    @property
    def live(self) -> int:
        """Microbatches whose activations it holds."""
        return len(self._flights)

    def start_step(self, step: int) -> None:
        """Optimizer step `step` begins."""
        if self._keys is not None:
            self._keys.begin(step)

    def forward(
        self,
        number: int,
        microbatch: Microbatch,
        scale: Tensor,
        x: Tensor | None = None,
        done: Done | None = None,
        following: Module | None = None,
        hand_over: HandOver | None = None,
    ) -> Tensor:
        """Run microbatch `number` and keep what its backward needs.

        x: [rows, hidden], what came of the stage before; None on the first. Returns the same for
        the next stage; on the last one the loss sum over valid tokens, whose gradients are those of
        scale * (loss sum); both are fp64 scalars. `done` is told of the head. following: the unit
        whose values are needed next, after this pass. hand_over: lets the work that runs beside
        this go on.
        """
        flight = Flight(self._frame(microbatch, self._keys, scale))
        flight.frame.turn.hand_over = hand_over
        self._flights[number] = flight
        values = self._values(self.units, following, whole=False)
        if self.embedding is not None:
            with values(self.embedding):
                x = self.embedding(microbatch, flight.frame)
            flight.embedded = get_gradient_edge(x)
            self._show(False, number, -1, x)
        assert x is not None
        for index, block in enumerate(self.blocks):
            leaf = x.detach().requires_grad_()
            flight.inputs.append(leaf)
            again = index < self.plan.recomputed
            with values(block), torch.set_grad_enabled(not again):
                x = block(leaf, flight.frame)
            flight.outputs.append(None if again else get_gradient_edge(x))
            if again and self.config.train.offload:
                flight.inputs[-1] = self._shelf(leaf).store(leaf.detach())
            self._show(False, number, self.plan.blocks[index], x)
        self._scratch.clear()
        if self.end is None:
            return x.detach()
        loss, flight.end = self.end.forward(x, microbatch, flight.frame, scale, values)
        if done is not None:
            done(self.end.head)
        return loss

    def backward(
        self,
        number: int,
        gradient: Tensor | None = None,
        done: Done | None = None,
        following: Module | None = None,
        hand_over: HandOver | None = None,
        *,
        split: bool = False,
    ) -> Tensor:
        """Backward of microbatch `number`; with `split` the weight gradients of matrices wait for
        `weight_backward`.

        gradient: of this stage's output, None on the last stage. Returns that of its input, on the
        first stage of what came of the embedding. `done` is told of the units that this call
        completes, each after its late part; `following` and `hand_over` as in `forward`.
        """
        flight = self._flights[number] if split else self._flights.pop(number)
        frame = flight.frame
        frame.later.hold = split
        frame.turn.hand_over = hand_over
        frame.seam.done = None if split else done

        def finish(unit: Module) -> None:
            if split:
                flight.left.append((unit, frame.later.take()))
            elif done is not None:
                done(unit)

        values = self._values(self._backward_units(), following)
        if self.end is not None:
            assert flight.end is not None
            gradient = self.end.backward(flight.end, values, finish)
        for block in reversed(self.blocks):
            assert gradient is not None
            leaf, output = _taken(flight.inputs.pop()), flight.outputs.pop()
            if flight.inputs and isinstance(before := flight.inputs[-1], Stored):
                before.fetch()  # while this one is computed
            with values(block):
                if output is None:
                    output = get_gradient_edge(block(leaf, frame))
                backward(output, gradient)
            del output
            gradient = leaf.grad
            finish(block)
            self._show(True, number, self.plan.blocks[len(flight.inputs)], gradient)
        self._scratch.clear()
        assert gradient is not None
        if self.embedding is None:
            return gradient
        assert flight.embedded is not None
        backward(flight.embedded, gradient)
        flight.embedded = None
        finish(self.embedding)
        return gradient

    @torch.no_grad()  # as in autograd's own backward, from which the work is put off
    def weight_backward(self, number: int, done: Done | None = None) -> None:
        """The weight gradients that the backward of microbatch `number` left."""
        flight = self._flights.pop(number)
        works = do_all(one for _, left in flight.left for one in left)
        for unit, left in flight.left:
            for _ in zip(left, works, strict=False):
                pass  # those of the unit, and what the next one begins with is on its way
            left.clear()
            if done is not None:
                if unit.late is not None:
                    done(unit.late)
                done(unit)

    @torch.no_grad()
    def evaluate(self, microbatch: Microbatch, x: Tensor | None = None) -> Tensor:
        """Without dropout and without gradients: the output for the next stage, or on the last one
        the cross-entropy summed over valid tokens, fp64 scalar."""
        x = self.hidden(microbatch, x)
        if self.end is None:
            return x
        values = self._values([self.end.head])
        return self.end.evaluate(x, microbatch, self._frame(microbatch, None), values)

    @torch.no_grad()
    def hidden(self, microbatch: Microbatch, x: Tensor | None = None) -> Tensor:
        """The residual stream [rows, hidden] after the last block, without dropout."""
        frame = self._frame(microbatch, None)
        values = self._values(self.units, whole=False)
        if self.embedding is not None:
            with values(self.embedding):
                x = self.embedding(microbatch, frame)
        assert x is not None
        for block in self.blocks:
            with values(block):
                x = block(x, frame)
        return x

    def _shelf(self, x: Tensor) -> Shelf:
        """Where inputs of blocks that run again are put away."""
        if self._away is None:
            self._away = Shelf(x.device)
        return self._away

    def _values(
        self, units: Sequence[Module], following: Module | None = None, *, whole: bool = True
    ) -> Values:
        """For a pass over `units`: a context in which the values of one are here, without `whole`
        those of its late part from the seam on, and those of the next one on their way; `following`
        is that of the last."""
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

    def take_tally(self) -> Tally:
        """What the microbatches since the last call came to."""
        taken, self._tally = self._tally, Tally()
        return taken

    def _frame(
        self, microbatch: Microbatch, keys: Keys | None, scale: Tensor | None = None
    ) -> Frame:
        return make_frame(
            self.config.model,
            microbatch,
            self.precision.compute,
            keys,
            tensor=self.tensor,
            context=self.context,
            selective=self.config.train.recompute == "selective",
            chunks=self.config.parallel.tensor_chunks,
            symmetric=self._symmetric,
            experts=self.experts,
            scale=scale,
            tally=self._tally,
            seam=Seam(self.keeper.take_late),
            scratch=self._scratch,
            kernels=self.kernels,
            eight=self._eight,
        )


def _taken(leaf: Tensor | Stored) -> Tensor:
    return leaf.take().requires_grad_() if isinstance(leaf, Stored) else leaf


def build_stages(
    config: RunConfig,
    plans: Sequence[StagePlan],
    tensor: Group,
    context: Context = _WHOLE,
    experts: Places = _HERE,
    kernels: Kernels = NO_KERNELS,
) -> Mapping[int, Stage]:
    """The stages of one rank by number; a head tied to an embedding on the same rank shares it."""
    stages: dict[int, Stage] = {}
    for plan in sorted(plans, key=lambda plan: plan.number):
        first = stages.get(0)
        embedding = None if first is None else first.embedding
        stages[plan.number] = Stage(config, plan, tensor, embedding, context, experts, kernels)
    return stages


def whole_model(config: RunConfig) -> Stage:
    """The whole model as one stage on one rank."""
    recomputed = config.model.layers if config.train.recompute == "full" else 0
    return Stage(config, StagePlan(0, 1, range(config.model.layers), recomputed), ALONE)


def model_specs(config: RunConfig) -> list[ParamSpec]:
    """Specs of all parameters of the whole model, in order; allocates nothing."""
    return [parameter.spec for parameter in whole_model(config).parameters()]
