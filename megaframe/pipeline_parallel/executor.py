"""PipelineExecutor: runs one rank's list of actions in order.

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
from megaframe.model.pass_state import LayerStatistics
from megaframe.parameters.parameter import Module
from megaframe.pipeline_parallel.nonfinite import PassMaximum, pass_maximum
from megaframe.pipeline_parallel.stage import Stage
from megaframe.schedule import Action, ActionKind, Schedule
from megaframe.tensor_parallel.context import count_rows_per_rank

ActionTrace = Callable[[Action, str], AbstractContextManager[object]]
"""Returns a context around one action, given with the name of its kind."""
_UNPAIRED: Mapping[Action, Action] = {}
_PASSES = (ActionKind.F, ActionKind.B, ActionKind.W)
_FORWARD_ONLY = (ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F)


@dataclass(frozen=True)
class PipelineOutput:
    """The results of all passes of a step on this rank.

    Attributes:
        loss: Sum over this rank's valid tokens, fp64 scalar. A rank without the head has only what
            its layers add to the loss, or zero.
        mtp_loss: The loss sum of the tokens beyond the next one (mean over depths), fp64 scalar.
        maxima: The largest magnitudes of the results of all passes.
        statistics: What the layers counted, by stage.
    """

    loss: Tensor
    mtp_loss: Tensor
    maxima: Sequence[PassMaximum]
    statistics: Sequence[LayerStatistics]


class PipelineExecutor:
    """Runs lowered schedules on the stages of this rank."""

    def __init__(
        self, stages: Mapping[int, Stage], mesh: Mesh, trace: ActionTrace | None = None
    ) -> None:
        """Prepare to run.

        Args:
            stages: The stages of this rank by number.
            mesh: This rank's groups and links.
            trace: Entered around every action of a training step.
        """
        self.stages, self.mesh = stages, mesh
        self.rank = mesh.coordinate["pipeline"]
        self.pair = InterleavedRunner()
        self._trace: ActionTrace = trace or (lambda action, kind: nullcontext())
        self._sends: deque[Pending[Tensor]] = deque()
        """Sends in flight to other ranks."""

    def run(
        self,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        scale: Tensor,
        paired: Mapping[Action, Action] = _UNPAIRED,
        *,
        by_block: bool = False,
    ) -> PipelineOutput:
        """Run all passes of a step: this rank's list up to the update.

        Args:
            schedule: A lowered schedule for this number of microbatches.
            microbatches: This rank's.
            scale: fp64 scalar; gradients are those of scale * (sum of the losses).
            paired: Forwards that take turns with the backward right after them in the list.
            by_block: Record the maximum of every block, not only of whole passes.
        """
        run = _ScheduleRun(self, schedule, microbatches, scale, by_block=by_block)
        progress = self.mesh.progress
        actions = iter(self._with_following(schedule.ranks[self.rank]))
        for action, following in actions:
            progress.begin_part("", action, action.kind.value if action.kind in _PASSES else None)
            if action in paired:
                backward, following = next(actions)
                with self._trace(action, "F"), self._trace(backward, "BW"):
                    run.do_both(action, backward, following)
            elif action.kind is not ActionKind.UPDATE:
                with self._trace(action, run.kind(action)):
                    run.do(action, following)
        statistics = [stage.take_statistics() for stage in self.stages.values()]
        # What layers add to the loss (routers) counts on the rank that has the layer.
        loss = sum((s.loss for s in statistics if s.loss is not None), run.losses.sum())
        return PipelineOutput(loss, run.mtp_loss, run.maxima, statistics)

    def evaluate(self, schedule: Schedule, microbatches: Sequence[Microbatch]) -> Tensor:
        """Run the forward passes without gradients. Returns the loss sum over this rank's valid
        tokens for each microbatch, fp64 [M]; zero on a rank without the head."""
        run = _ScheduleRun(self, schedule, microbatches, None)
        for action in schedule.ranks[self.rank]:
            if action.kind in _FORWARD_ONLY:
                run.do(action)
        self.wait_for_sends()
        return run.losses

    def send(self, x: Tensor, rank: int) -> None:
        """Start sending a tensor to another rank of the pipeline, and keep it until it is sent."""
        self._sends.append(send(x, self.mesh.link(self.rank, rank)))
        # A link delivers in order, so sends are freed from the oldest on. Until then the tensor may
        # not be reused.
        while self._sends and self._sends[0].is_complete():
            self._sends.popleft()

    def wait_for_sends(self) -> None:
        """Return when all sends are done."""
        while self._sends:
            self._sends.popleft().wait()

    def _with_following(self, actions: Sequence[Action]) -> list[tuple[Action, Module | None]]:
        """Return each action with the unit whose values are needed first by the next pass."""
        pairs: list[tuple[Action, Module | None]] = []
        following: Module | None = None
        # Backwards, so that the pass after an action is known when the action is reached.
        for action in reversed(actions):
            pairs.append((action, following))
            if action.stage is not None and action.kind in (ActionKind.F, ActionKind.B):
                # A W reads no values that must be gathered, so only F and B count.
                following = self.stages[action.stage].first(backward=action.kind is ActionKind.B)
        return pairs[::-1]


class _ScheduleRun:
    """The forward and backward passes of one step. Incoming tensors are stored under the compute
    action that uses them, outgoing ones under the action that made them. scale: that of the
    gradients, or None for evaluation."""

    def __init__(
        self,
        executor: PipelineExecutor,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        scale: Tensor | None,
        *,
        by_block: bool = False,
    ) -> None:
        self._executor, self._microbatches = executor, microbatches
        self._scale, self._by_block = scale, by_block
        self._rank_of, self._split = schedule.rank_of, schedule.split_backwards
        self._incoming: dict[tuple[ActionKind, int, int], Pending[Tensor]] = {}
        self._outgoing: dict[tuple[ActionKind, int, int], Tensor] = {}
        self._reducing: set[int] = set()
        """Stages whose gradients are complete after their next backward pass."""
        self._forwards: Counter[int] = Counter()
        self.maxima: list[PassMaximum] = []
        zeros = partial(torch.zeros, dtype=torch.float64, device=executor.mesh.device)
        self.losses, self.mtp_loss = zeros(len(microbatches)), zeros(())

    def kind(self, action: Action) -> str:
        """Return the name of the action's kind; BW for a backward that computes both gradients."""
        whole = action.kind is ActionKind.B and (action.stage, action.microbatch) not in self._split
        return "BW" if whole else action.kind.value

    def do(self, action: Action, following: Module | None = None) -> None:
        """Run one action. following: the unit whose values are needed first after this action."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        assert stage is not None
        if kind is ActionKind.REDUCE:
            # Nothing starts here: from the next backward on, each bucket's reduction starts as soon
            # as its gradients are complete.
            self._reducing.add(stage)
            return
        assert microbatch is not None
        if kind is ActionKind.F:
            self._forward(stage, microbatch, following)
        elif kind is ActionKind.B:
            self._backward(stage, microbatch, following)
        elif kind is ActionKind.W:
            # With split backwards the weight gradients are complete after W, not after B.
            last = stage in self._reducing
            self._executor.stages[stage].weight_backward(microbatch, last=last)
        elif kind is ActionKind.SEND_F:
            self._send(ActionKind.F, stage, microbatch, stage + 1)
        elif kind is ActionKind.SEND_B:
            self._send(ActionKind.B, stage, microbatch, stage - 1)
        elif kind is ActionKind.RECV_F:
            self._receive(ActionKind.F, stage, microbatch, stage - 1)
        else:
            self._receive(ActionKind.B, stage, microbatch, stage + 1)

    def do_both(self, forward: Action, backward: Action, following: Module | None) -> None:
        """Run a forward and a backward in turns. following: the unit whose values are needed first
        after both."""
        (f, of_f), (b, of_b) = ((a.stage, a.microbatch) for a in (forward, backward))
        assert f is not None and of_f is not None and b is not None and of_b is not None
        self._executor.pair.run(
            # Where the two hand over depends on the model alone, so all ranks start their transfers
            # in the same order.
            lambda hand_over: self._forward(f, of_f, None, hand_over),
            lambda hand_over: self._backward(b, of_b, following, hand_over),
        )

    def _forward(
        self,
        number: int,
        microbatch: int,
        following: Module | None,
        hand_over: HandOver | None = None,
    ) -> None:
        stage = self._executor.stages[number]
        x = None if stage.plan.first else self._take(ActionKind.F, number, microbatch)
        data = self._microbatches[microbatch]
        if self._scale is None:
            y = stage.evaluate(data, x)
        else:
            # The head's gradients are computed in the forward pass, so the last forward completes
            # them.
            self._forwards[number] += 1
            y = stage.forward(
                microbatch,
                data,
                self._scale,
                x,
                last=self._forwards[number] == len(self._microbatches),
                following=following,
                hand_over=hand_over,
                on_block=self._recorder(False, number, microbatch),
            )
            self.maxima.append(pass_maximum(False, number, microbatch, y))
        if stage.post_process is None:
            self._pass_on(ActionKind.F, number, microbatch, y, number + 1)
            return
        # An fp64 sum, not a mean: the step divides once, by the tokens of the global batch.
        self.losses[microbatch] += y
        mtp_loss = stage.post_process.take_loss_ahead()
        if mtp_loss is not None:
            self.mtp_loss += mtp_loss

    def _backward(
        self,
        number: int,
        microbatch: int,
        following: Module | None,
        hand_over: HandOver | None = None,
    ) -> None:
        stage = self._executor.stages[number]
        gradient = None if stage.plan.last else self._take(ActionKind.B, number, microbatch)
        gradient = stage.backward(
            microbatch,
            gradient,
            last=number in self._reducing,
            following=following,
            hand_over=hand_over,
            on_block=self._recorder(True, number, microbatch),
            split=(number, microbatch) in self._split,
        )
        self.maxima.append(pass_maximum(True, number, microbatch, gradient))
        if not stage.plan.first:
            self._pass_on(ActionKind.B, number, microbatch, gradient, number - 1)

    def _recorder(
        self, backward: bool, stage: int, microbatch: int
    ) -> Callable[[int, Tensor], None] | None:
        """Return what records the maximum of each block of a pass, if that is asked for."""
        if not self._by_block:
            return None

        def record(block: int, result: Tensor) -> None:
            self.maxima.append(pass_maximum(backward, stage, microbatch, result, block))

        return record

    def _pass_on(
        self, kind: ActionKind, stage: int, microbatch: int, x: Tensor, other: int
    ) -> None:
        """Hand `x` to the stage `other` if it is on the same rank, else keep it for the SEND."""
        if self._rank_of[other] == self._executor.rank:
            # Both stages are on this rank: the tensor is handed over without a copy.
            self._incoming[kind, other, microbatch] = Pending(x)
        else:
            self._outgoing[kind, stage, microbatch] = x

    def _take(self, kind: ActionKind, stage: int, microbatch: int) -> Tensor:
        return self._incoming.pop((kind, stage, microbatch)).wait()

    def _send(self, kind: ActionKind, stage: int, microbatch: int, other: int) -> None:
        # From here on only the send holds the tensor.
        x = self._outgoing.pop((kind, stage, microbatch)).contiguous()
        self._executor.send(x, self._rank_of[other])

    def _receive(self, kind: ActionKind, stage: int, microbatch: int, other: int) -> None:
        receiver, mesh = self._executor.stages[stage], self._executor.mesh
        tokens = self._microbatches[microbatch].tokens_BS.numel()
        rows = count_rows_per_rank(tokens, receiver.run.tensor.group.size)
        shape = (rows, receiver.config.model.hidden)
        # The stage keeps a received input until its backward pass, so each has memory of its own.
        into = torch.empty(shape, dtype=receiver.precision.compute, device=mesh.device)
        link = mesh.link(self._rank_of[other], self._executor.rank)
        self._incoming[kind, stage, microbatch] = receive(into, link)
