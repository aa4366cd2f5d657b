"""PipelineExecutor: runs one rank's list of actions in order.

It knows the kinds of action, not the schedules: the same few lines execute gradient accumulation,
pipelines and any schedule that a text file can describe. A receive is posted where the list says so
and waited for by its consumer. A sent tensor is kept until its send is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megaframe.data.microbatch import Microbatch
from megaframe.distributed.collectives import Pending, receive, send
from megaframe.distributed.interleaving import HandOver, InterleavedRunner
from megaframe.distributed.mesh import Mesh
from megaframe.model.pass_state import LayerStatistics
from megaframe.parameters.parameter import Module
from megaframe.pipeline_parallel.nonfinite import PassMaximum, measure_pass
from megaframe.pipeline_parallel.stage import Stage
from megaframe.pipeline_parallel.stage_pass import PlannedAction, RankPlan, StagePass, plan_actions
from megaframe.schedule import Action, ActionKind, Schedule

ActionTrace = Callable[[Action, str], AbstractContextManager[object]]
"""Returns a context around one action, given with the name of its kind."""
_UNPAIRED: Mapping[Action, Action] = {}


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
            stages: The stages of this rank by index.
            mesh: This rank's groups and links.
            trace: Entered around every action of a training step.
        """
        self.stages, self.mesh = stages, mesh
        self.rank = mesh.coordinate["pipeline"]
        self.interleaved = InterleavedRunner()
        self._trace: ActionTrace = trace or (lambda action, kind: nullcontext())
        self._sends: deque[Pending[Tensor]] = deque()
        """Sends in flight to other ranks."""

    def plan(self, schedule: Schedule, paired: Mapping[Action, Action] = _UNPAIRED) -> RankPlan:
        """Return what this rank does in every step of a schedule.

        Args:
            schedule: A lowered schedule.
            paired: Forwards that are interleaved with the backward right after them in the list.
        """

        def find_first_unit(stage: int, backward: bool) -> Module | None:
            return self.stages[stage].find_first_unit(backward=backward)

        return plan_actions(schedule, self.rank, find_first_unit, paired)

    def run(
        self,
        plan: RankPlan,
        microbatches: Sequence[Microbatch],
        scale: Tensor,
        *,
        by_block: bool = False,
    ) -> PipelineOutput:
        """Run all passes of a step: this rank's list up to the update.

        Args:
            plan: That of a schedule for this number of microbatches.
            microbatches: This rank's.
            scale: fp64 scalar; gradients are those of scale * (sum of the losses).
            by_block: Record the maximum of every block, not only of whole passes.
        """
        run = _ScheduleRun(self, plan.schedule, microbatches, scale, by_block=by_block)
        begin_part = self.mesh.progress.begin_part
        for planned in plan.actions:
            action, kind = planned.action, planned.action.kind
            begin_part("", action, planned.counted)
            if kind is ActionKind.UPDATE:
                continue
            if planned.partner is not None:
                with self._trace(action, "F"), self._trace(planned.partner.action, "BW"):
                    run.interleave(planned, planned.partner)
                continue
            with self._trace(action, planned.name):
                if kind is ActionKind.F:
                    run.forward(planned)
                elif kind is ActionKind.B:
                    run.backward(planned)
                elif kind is ActionKind.W:
                    run.compute_weight_gradients(planned)
                elif kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                    run.send(action)
                elif kind in (ActionKind.RECV_F, ActionKind.RECV_B):
                    run.receive(action)
        statistics = [stage.take_statistics() for stage in self.stages.values()]
        # What layers add to the loss (routers) counts on the rank that has the layer.
        loss = sum((s.loss for s in statistics if s.loss is not None), run.losses.sum())
        return PipelineOutput(loss, run.mtp_loss, run.maxima, statistics)

    def evaluate(self, schedule: Schedule, microbatches: Sequence[Microbatch]) -> Tensor:
        """Run the forward passes without gradients. Returns the loss sum over this rank's valid
        tokens for each microbatch, fp64 [M]; zero on a rank without the head."""
        run = _ScheduleRun(self, schedule, microbatches)
        self._run_forwards(schedule, run, run.evaluate)
        return run.losses

    def compute_hidden(
        self, schedule: Schedule, microbatches: Sequence[Microbatch]
    ) -> Mapping[int, Tensor]:
        """Run the forward passes without gradients and without the head. Returns the stream after
        the last block by microbatch, this rank's rows [rows, hidden]; empty on a rank without the
        head."""
        run = _ScheduleRun(self, schedule, microbatches)
        self._run_forwards(schedule, run, run.compute_hidden)
        return run.hidden

    def _run_forwards(
        self, schedule: Schedule, run: _ScheduleRun, forward: Callable[[Action], None]
    ) -> None:
        """Run a schedule of forward passes. forward: runs one of them."""
        for action in schedule.ranks[self.rank]:
            if action.kind is ActionKind.F:
                forward(action)
            elif action.kind is ActionKind.SEND_F:
                run.send(action)
            elif action.kind is ActionKind.RECV_F:
                run.receive(action)
        self.wait_for_sends()

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


class _ScheduleRun:
    """The state of one run of a schedule, and what each kind of action does.

    Incoming tensors are stored under the pass that uses them, outgoing ones under the pass that
    computed them.

    Attributes:
        losses: The loss sum of each microbatch, fp64 [M].
        mtp_loss: The loss sum of the tokens beyond the next one, fp64 scalar.
        hidden: The stream after the last block by microbatch, if that is all that is computed.
        maxima: The largest magnitudes of the results of all passes.
    """

    def __init__(
        self,
        executor: PipelineExecutor,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        scale: Tensor | None = None,
        *,
        by_block: bool = False,
    ) -> None:
        """Start without tensors.

        Args:
            executor: Has the stages and the links.
            schedule: What is run.
            microbatches: This rank's.
            scale: Of the gradients, fp64 scalar; None for evaluation.
            by_block: Record the maximum of every block, not only of whole passes.
        """
        self._executor, self._microbatches = executor, microbatches
        self._scale, self._by_block = scale, by_block
        self._rank_of = schedule.rank_of
        self._incoming: dict[tuple[ActionKind, int, int], Pending[Tensor]] = {}
        self._outgoing: dict[tuple[ActionKind, int, int], Tensor] = {}
        self.maxima: list[PassMaximum] = []
        self.hidden: dict[int, Tensor] = {}
        zeros = partial(torch.zeros, dtype=torch.float64, device=executor.mesh.device)
        self.losses, self.mtp_loss = zeros(len(microbatches)), zeros(())

    def forward(self, planned: PlannedAction, hand_over: HandOver | None = None) -> None:
        """Run a forward pass.

        Args:
            planned: The F.
            hand_over: Lets a pass that is interleaved with this one continue.
        """
        assert self._scale is not None
        stage_index, microbatch = _unpack(planned.action)
        stage = self._executor.stages[stage_index]
        x = None if stage.plan.first else self._take(ActionKind.F, stage_index, microbatch)
        stage_pass = self._prepare(planned, hand_over)
        y = stage.forward(stage_pass, self._microbatches[microbatch], self._scale, x)
        self.maxima.append(measure_pass(False, stage_index, microbatch, y))
        self._finish_forward(stage, stage_index, microbatch, y)

    def evaluate(self, action: Action) -> None:
        """Run a forward pass without gradients."""
        stage_index, microbatch = _unpack(action)
        stage = self._executor.stages[stage_index]
        x = None if stage.plan.first else self._take(ActionKind.F, stage_index, microbatch)
        y = stage.evaluate(self._microbatches[microbatch], x)
        self._finish_forward(stage, stage_index, microbatch, y)

    def compute_hidden(self, action: Action) -> None:
        """Run a forward pass without gradients and without the head."""
        stage_index, microbatch = _unpack(action)
        stage = self._executor.stages[stage_index]
        x = None if stage.plan.first else self._take(ActionKind.F, stage_index, microbatch)
        y = stage.compute_hidden(self._microbatches[microbatch], x)
        if stage.plan.last:
            self.hidden[microbatch] = y
        else:
            self._pass_on(ActionKind.F, stage_index, microbatch, y, stage_index + 1)

    def backward(self, planned: PlannedAction, hand_over: HandOver | None = None) -> None:
        """Run a backward pass. The arguments are those of `forward`."""
        stage_index, microbatch = _unpack(planned.action)
        stage = self._executor.stages[stage_index]
        gradient = None if stage.plan.last else self._take(ActionKind.B, stage_index, microbatch)
        gradient = stage.backward(self._prepare(planned, hand_over), gradient)
        self.maxima.append(measure_pass(True, stage_index, microbatch, gradient))
        if not stage.plan.first:
            self._pass_on(ActionKind.B, stage_index, microbatch, gradient, stage_index - 1)

    def compute_weight_gradients(self, planned: PlannedAction) -> None:
        """Compute the weight gradients that a split backward has left."""
        stage_index, _ = _unpack(planned.action)
        assert planned.stage_pass is not None
        self._executor.stages[stage_index].compute_weight_gradients(planned.stage_pass)

    def interleave(self, forward: PlannedAction, backward: PlannedAction) -> None:
        """Run a forward and a backward in turns."""
        self._executor.interleaved.run(
            # Where the two hand over depends on the model alone, so all ranks start their transfers
            # in the same order.
            lambda hand_over: self.forward(forward, hand_over),
            lambda hand_over: self.backward(backward, hand_over),
        )

    def send(self, action: Action) -> None:
        """Start to send the output of a stage, or the gradient of its input."""
        stage_index, microbatch = _unpack(action)
        forward = action.kind is ActionKind.SEND_F
        # From here on only the send holds the tensor.
        x = self._outgoing.pop((ActionKind.F if forward else ActionKind.B, stage_index, microbatch))
        other = stage_index + 1 if forward else stage_index - 1
        self._executor.send(x.contiguous(), self._rank_of[other])

    def receive(self, action: Action) -> None:
        """Start to receive the input of a stage, or the gradient of its output."""
        stage_index, microbatch = _unpack(action)
        forward = action.kind is ActionKind.RECV_F
        stage, mesh = self._executor.stages[stage_index], self._executor.mesh
        form = stage.received if forward else stage.sent.gradients
        shape = form.find_shape(*self._microbatches[microbatch].tokens_BS.shape)
        # The stage keeps a received input until its backward pass, so each has memory of its own.
        buffer = torch.empty(shape, dtype=stage.precision.compute, device=mesh.device)
        other = stage_index - 1 if forward else stage_index + 1
        link = mesh.link(self._rank_of[other], self._executor.rank)
        kind = ActionKind.F if forward else ActionKind.B
        self._incoming[kind, stage_index, microbatch] = receive(buffer, link)

    def _finish_forward(self, stage: Stage, stage_index: int, microbatch: int, y: Tensor) -> None:
        """Pass the output of a forward on; add that of the last stage to the losses."""
        if stage.post_process is None:
            self._pass_on(ActionKind.F, stage_index, microbatch, y, stage_index + 1)
            return
        # An fp64 sum, not a mean: the step divides once, by the tokens of the global batch.
        self.losses[microbatch] += y
        mtp_loss = stage.post_process.take_loss_ahead()
        if mtp_loss is not None:
            self.mtp_loss += mtp_loss

    def _prepare(self, planned: PlannedAction, hand_over: HandOver | None) -> StagePass:
        """Return the pass of an action, with what only this step asks for."""
        stage_pass = planned.stage_pass
        assert stage_pass is not None
        if hand_over is None and not self._by_block:
            return stage_pass
        on_block = partial(self._record_block, planned.action) if self._by_block else None
        return replace(stage_pass, hand_over=hand_over, on_block=on_block)

    def _record_block(self, action: Action, block: int, result: Tensor) -> None:
        """Record the maximum of a block."""
        is_backward = action.kind is ActionKind.B
        self.maxima.append(measure_pass(is_backward, *_unpack(action), result, block))

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


def _unpack(action: Action) -> tuple[int, int]:
    """Return the stage and the microbatch of an action that has both."""
    assert action.stage is not None and action.microbatch is not None
    return action.stage, action.microbatch
