"""Engine: runs one rank's list of actions in order.

It knows the kinds of action, not the schedules: the same few lines execute gradient accumulation,
pipelines and any schedule that a text file can describe. A receive is posted where the list says so
and waited for by its consumer. A sent tensor is kept until its send is done.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megaframe.data.microbatch import Microbatch
from megaframe.distributed.collectives import Pending, receive, send
from megaframe.distributed.interleaving import HandOver, InterleavedRunner
from megaframe.distributed.mesh import Mesh
from megaframe.metrics import Part
from megaframe.model.output_head import UnitDone
from megaframe.model.pass_state import LayerStatistics
from megaframe.optim.optimizer import Optimizer, Update
from megaframe.parameters.parameter import Module
from megaframe.pipeline_parallel.nonfinite import Sign, largest, sign
from megaframe.pipeline_parallel.stage import Stage
from megaframe.schedule import Action, ActionKind, Schedule
from megaframe.tensor_parallel.context import rows_per_rank
from megaframe.training.cuda_graph import Compute, Graph, Passed

Timer = Callable[[Part], AbstractContextManager[object]]
Follower = Callable[[Action, str], AbstractContextManager[object]]
_ALONE: Mapping[Action, Action] = {}
_PASSES = (ActionKind.F, ActionKind.B, ActionKind.W)
_FORWARD_ONLY = (ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F)


@dataclass(frozen=True)
class Outcome:
    """The result of one step on this rank.

    loss: sum over this rank's valid tokens, fp64 scalar. A rank without the head has only what its
    layers add to the loss, or zero.
    ahead: the loss sum of the tokens beyond the next one (mean over depths), fp64 scalar.
    signs: the health signs of all passes of this rank.
    tallies: the tallies of its stages.
    """

    loss: Tensor
    ahead: Tensor
    update: Update
    signs: Sequence[Sign]
    tallies: Sequence[LayerStatistics]


class Engine:
    """Runs lowered schedules on the stages of this rank.

    time: returns a context that charges the code in it to a part of the step.
    `follow` may be set. It returns a context that records when an action of a kind ran.
    """

    def __init__(
        self, stages: Mapping[int, Stage], optimizer: Optimizer, mesh: Mesh, time: Timer
    ) -> None:
        self.stages, self.optimizer, self.mesh, self.time = stages, optimizer, mesh, time
        self.follow: Follower = lambda action, kind: nullcontext()
        self.rank = mesh.coordinate["pipeline"]
        self.graph: Graph | None = None
        self.pair = InterleavedRunner()
        self.sent: deque[Pending[Tensor]] = deque()
        """Sends in flight to other ranks."""

    def run(
        self,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        step: int,
        scale: float | Tensor,
        paired: Mapping[Action, Action] = _ALONE,
        *,
        by_block: bool = False,
    ) -> Outcome:
        """Execute this rank's list, which ends with the update, on the microbatches of optimizer
        step `step`.

        scale: gradients are those of scale * (sum of the losses).
        paired: forwards that take turns with the backward right after them in the list.
        by_block: record a health sign for every block; then no CUDA graph is used.
        """
        self.optimizer.start_step()
        for stage in self.stages.values():
            stage.start_step(step)

        def compute(inputs: Sequence[Microbatch], scaling: Tensor) -> Passed:
            return self._pass(schedule, inputs, scaling, paired, by_block)

        scaling = scale if isinstance(scale, Tensor) else self._number(scale)
        if self.graph is None or by_block:
            passed = compute(microbatches, scaling)
        else:
            passed = self._by_graph(self.graph, compute, microbatches, scaling)
        update = self._update(schedule.ranks[self.rank][-1])
        self._finish()
        return Outcome(passed.loss, passed.ahead, update, passed.signs, passed.tallies)

    def _number(self, value: float) -> Tensor:
        """Return an fp64 scalar on the device."""
        return torch.full((), value, dtype=torch.float64, device=self.mesh.device)

    def _by_graph(
        self, graph: Graph, compute: Compute, microbatches: Sequence[Microbatch], scale: Tensor
    ) -> Passed:
        """Run everything but the update through `graph`, which may launch it as one CUDA graph.
        Before it starts, the last update's values have arrived and values that are not always on
        this rank are dropped, so the pass does not depend on what ran before. It ends by waiting
        for its transfers."""

        def whole(inputs: Sequence[Microbatch], scaling: Tensor) -> Passed:
            passed = compute(inputs, scaling)
            self.optimizer.wait()
            return passed

        self.optimizer.settle()
        return graph.run(whole, microbatches, scale)

    def _pass(
        self,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        scale: Tensor,
        paired: Mapping[Action, Action],
        by_block: bool,
    ) -> Passed:
        """Run this rank's list up to the update."""
        passes = _Passes(self, schedule, microbatches, scale)
        for stage in self.stages.values():
            stage.look = passes.look if by_block else None
        progress = self.mesh.progress
        actions = iter(self._with_following(schedule.ranks[self.rank]))
        for action, following in actions:
            progress.begin_part("", action, action.kind.value if action.kind in _PASSES else None)
            if action in paired:
                backward, following = next(actions)
                with self.follow(action, "F"), self.follow(backward, "BW"):
                    passes.do_both(action, backward, following)
            elif action.kind is not ActionKind.UPDATE:
                with self.follow(action, passes.kind(action)):
                    passes.do(action, following)
        tallies = [stage.take_statistics() for stage in self.stages.values()]
        loss = sum((t.loss for t in tallies if t.loss is not None), passes.losses.sum())
        return Passed(loss, passes.ahead, passes.signs, tallies)

    def _update(self, action: Action) -> Update:
        """Run the update, the last action of a list."""
        self.mesh.progress.begin_part("", action, action.kind.value)
        with self.follow(action, action.kind.value), self.time("optimizer"):
            self.optimizer.wait()
            update = self.optimizer.update()
        self.mesh.progress.begin_part("", None)
        return update

    def _with_following(self, actions: Sequence[Action]) -> list[tuple[Action, Module | None]]:
        """Return each action with the unit whose values are needed first by the next pass."""
        found: list[tuple[Action, Module | None]] = []
        following: Module | None = None
        for action in reversed(actions):
            found.append((action, following))
            if action.stage is not None and action.kind in (ActionKind.F, ActionKind.B):
                following = self.stages[action.stage].first(backward=action.kind is ActionKind.B)
        return found[::-1]

    def evaluate(self, schedule: Schedule, microbatches: Sequence[Microbatch]) -> Tensor:
        """Run the forward passes without gradients. Returns the loss sum over this rank's valid
        tokens for each microbatch, fp64 [M]; zero on a rank without the head."""
        passes = _Passes(self, schedule, microbatches, None)
        for action in schedule.ranks[self.rank]:
            if action.kind in _FORWARD_ONLY:
                passes.do(action)
        self._finish()
        return passes.losses

    def _finish(self) -> None:
        """Wait until all sends are done."""
        while self.sent:
            self.sent.popleft().wait()


class _Passes:
    """The forward and backward passes of one step. Incoming tensors are stored under the compute
    action that uses them, outgoing ones under the action that made them. scale: that of the
    gradients, or None for evaluation."""

    def __init__(
        self,
        engine: Engine,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        scale: Tensor | None,
    ) -> None:
        self._engine, self._microbatches = engine, microbatches
        self._scale = scale
        self._rank_of, self._split = schedule.rank_of, schedule.split_backwards
        self._arriving: dict[tuple[ActionKind, int, int], Pending[Tensor]] = {}
        self._leaving: dict[tuple[ActionKind, int, int], Tensor] = {}
        self._reducing: set[int] = set()
        self._forwards: Counter[int] = Counter()
        self.signs: list[Sign] = []
        zeros = partial(torch.zeros, dtype=torch.float64, device=engine.mesh.device)
        self.losses, self.ahead = zeros(len(microbatches)), zeros(())

    def kind(self, action: Action) -> str:
        """Return the name of the action's kind; BW for a backward that computes both gradients."""
        whole = action.kind is ActionKind.B and (action.stage, action.microbatch) not in self._split
        return "BW" if whole else action.kind.value

    def do(self, action: Action, following: Module | None = None) -> None:
        """Run one action. following: the unit whose values are needed first after this action."""
        kind, stage, number = action.kind, action.stage, action.microbatch
        assert stage is not None
        if kind is ActionKind.REDUCE:
            self._reducing.add(stage)
            return
        assert number is not None
        if kind is ActionKind.F:
            self._forward(stage, number, following)
        elif kind is ActionKind.B:
            self._backward(stage, number, following)
        elif kind is ActionKind.W:
            self._engine.stages[stage].weight_backward(number, self._done(stage))
            self._completed(stage)
        elif kind is ActionKind.SEND_F:
            self._send(ActionKind.F, stage, number, stage + 1)
        elif kind is ActionKind.SEND_B:
            self._send(ActionKind.B, stage, number, stage - 1)
        elif kind is ActionKind.RECV_F:
            self._receive(ActionKind.F, stage, number, stage - 1)
        else:
            self._receive(ActionKind.B, stage, number, stage + 1)

    def do_both(self, forward: Action, backward: Action, following: Module | None) -> None:
        """Run a forward and a backward in turns. following: the unit whose values are needed first
        after both."""
        (f, of_f), (b, of_b) = ((a.stage, a.microbatch) for a in (forward, backward))
        assert f is not None and of_f is not None and b is not None and of_b is not None
        self._engine.pair.run(
            lambda hand_over: self._forward(f, of_f, None, hand_over),
            lambda hand_over: self._backward(b, of_b, following, hand_over),
        )

    def look(self, backward: bool, stage: int, number: int, block: int, made: Tensor) -> None:
        """Record a health sign for the pass of one block."""
        self.signs.append(Sign(backward, stage, number, largest(made), block))

    def _forward(
        self,
        number: int,
        microbatch: int,
        following: Module | None,
        hand_over: HandOver | None = None,
    ) -> None:
        stage = self._engine.stages[number]
        x = None if stage.plan.first else self._take(ActionKind.F, number, microbatch)
        data = self._microbatches[microbatch]
        if self._scale is None:
            y = stage.evaluate(data, x)
        else:
            self._forwards[number] += 1
            last = self._forwards[number] == len(self._microbatches)
            done = partial(self._engine.optimizer.reduce, last=last)
            y = stage.forward(microbatch, data, self._scale, x, done, following, hand_over)
            self.signs.append(sign(False, number, microbatch, y))
        if stage.post_process is not None:
            self.losses[microbatch] += y
            ahead = stage.post_process.take_loss_ahead()
            if ahead is not None:
                self.ahead += ahead
        else:
            self._pass_on(ActionKind.F, number, microbatch, y, number + 1)

    def _backward(
        self,
        number: int,
        microbatch: int,
        following: Module | None,
        hand_over: HandOver | None = None,
    ) -> None:
        stage = self._engine.stages[number]
        gradient = None if stage.plan.last else self._take(ActionKind.B, number, microbatch)
        split = (number, microbatch) in self._split
        done = None if split else self._done(number)
        gradient = stage.backward(microbatch, gradient, done, following, hand_over, split=split)
        self.signs.append(sign(True, number, microbatch, gradient))
        if not stage.plan.first:
            self._pass_on(ActionKind.B, number, microbatch, gradient, number - 1)
        if not split:
            self._completed(number)

    def _done(self, stage: int) -> UnitDone:
        return partial(self._engine.optimizer.reduce, last=stage in self._reducing)

    def _completed(self, stage: int) -> None:
        """Called when a stage has finished a microbatch. After the last one, start the reduction of
        the stage's gains and biases."""
        if stage in self._reducing:
            self._engine.optimizer.reduce_vectors(stage)

    def _pass_on(
        self, kind: ActionKind, stage: int, microbatch: int, made: Tensor, other: int
    ) -> None:
        """Hand `made` to the stage `other` if it is on the same rank, else keep it for the SEND."""
        if self._rank_of[other] == self._engine.rank:
            self._arriving[kind, other, microbatch] = Pending(made)
        else:
            self._leaving[kind, stage, microbatch] = made

    def _take(self, kind: ActionKind, stage: int, microbatch: int) -> Tensor:
        return self._arriving.pop((kind, stage, microbatch)).wait()

    def _send(self, kind: ActionKind, stage: int, microbatch: int, other: int) -> None:
        made = self._leaving.pop((kind, stage, microbatch)).contiguous()
        link = self._engine.mesh.link(self._engine.rank, self._rank_of[other])
        sent = self._engine.sent
        sent.append(send(made, link))
        while sent and sent[0].is_complete():
            sent.popleft()

    def _receive(self, kind: ActionKind, stage: int, microbatch: int, other: int) -> None:
        here = self._engine.stages[stage]
        tokens = self._microbatches[microbatch].tokens_BS.numel()
        rows = rows_per_rank(tokens, here.run.tensor.group.size)
        shape = (rows, here.config.model.hidden)
        into = torch.empty(shape, dtype=here.precision.compute, device=self._engine.mesh.device)
        link = self._engine.mesh.link(self._rank_of[other], self._engine.rank)
        self._arriving[kind, stage, microbatch] = receive(into, link)
