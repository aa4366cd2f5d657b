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
from megaframe.pipeline_parallel.nonfinite import PassMaximum, measure_pass
from megaframe.pipeline_parallel.stage import Stage
from megaframe.schedule import Action, ActionKind, Schedule
from megaframe.tensor_parallel.context import count_rows_per_rank

ActionTrace = Callable[[Action, str], AbstractContextManager[object]]
"""Returns a context around one action, given with the name of its kind."""
_UNPAIRED: Mapping[Action, Action] = {}
_PASSES = (ActionKind.F, ActionKind.B, ActionKind.W)


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
        self.interleaved = InterleavedRunner()
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
            paired: Forwards that are interleaved with the backward right after them in the list.
            by_block: Record the maximum of every block, not only of whole passes.
        """
        run = _ScheduleRun(self, schedule, microbatches, scale, by_block=by_block)
        progress = self.mesh.progress
        actions = iter(self._with_next_unit(schedule.ranks[self.rank]))
        for action, next_unit in actions:
            kind = action.kind
            progress.begin_part("", action, kind.value if kind in _PASSES else None)
            if kind is ActionKind.UPDATE:
                continue
            if action in paired:
                backward, next_unit = next(actions)
                with self._trace(action, "F"), self._trace(backward, "BW"):
                    run.interleave(action, backward, next_unit)
                continue
            with self._trace(action, run.name_kind(action)):
                if kind is ActionKind.F:
                    run.forward(action, next_unit)
                elif kind is ActionKind.B:
                    run.backward(action, next_unit)
                elif kind is ActionKind.W:
                    run.compute_weight_gradients(action)
                elif kind is ActionKind.REDUCE:
                    run.begin_reduction(action)
                elif kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                    run.send(action)
                else:
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

    def _with_next_unit(self, actions: Sequence[Action]) -> list[tuple[Action, Module | None]]:
        """Return each action with the unit whose values are needed first by the next pass."""
        pairs: list[tuple[Action, Module | None]] = []
        next_unit: Module | None = None
        # Backwards, so that the pass after an action is known when the action is reached.
        for action in reversed(actions):
            pairs.append((action, next_unit))
            if action.stage is not None and action.kind in (ActionKind.F, ActionKind.B):
                # A W reads no values that must be gathered, so only F and B count.
                stage = self.stages[action.stage]
                next_unit = stage.find_first_unit(backward=action.kind is ActionKind.B)
        return pairs[::-1]


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
        self._rank_of, self._split = schedule.rank_of, schedule.split_backwards
        self._incoming: dict[tuple[ActionKind, int, int], Pending[Tensor]] = {}
        self._outgoing: dict[tuple[ActionKind, int, int], Tensor] = {}
        self._reducing: set[int] = set()
        """Stages whose gradients are complete after their next backward pass."""
        self._num_forwards: Counter[int] = Counter()
        self.maxima: list[PassMaximum] = []
        self.hidden: dict[int, Tensor] = {}
        zeros = partial(torch.zeros, dtype=torch.float64, device=executor.mesh.device)
        self.losses, self.mtp_loss = zeros(len(microbatches)), zeros(())

    def name_kind(self, action: Action) -> str:
        """Return the name of the action's kind; BW for a backward that computes both gradients."""
        is_split = (action.stage, action.microbatch) in self._split
        return "BW" if action.kind is ActionKind.B and not is_split else action.kind.value

    def forward(
        self, action: Action, next_unit: Module | None, hand_over: HandOver | None = None
    ) -> None:
        """Run a forward pass.

        Args:
            action: The F.
            next_unit: The unit whose values are needed first after this pass.
            hand_over: Lets a pass that is interleaved with this one continue.
        """
        assert self._scale is not None
        number, microbatch = _unpack(action)
        stage = self._executor.stages[number]
        x = None if stage.plan.first else self._take(ActionKind.F, number, microbatch)
        # The head's gradients are computed in the forward pass, so the last forward completes them.
        self._num_forwards[number] += 1
        y = stage.forward(
            microbatch,
            self._microbatches[microbatch],
            self._scale,
            x,
            last=self._num_forwards[number] == len(self._microbatches),
            next_unit=next_unit,
            hand_over=hand_over,
            on_block=self._make_block_recorder(False, number, microbatch),
        )
        self.maxima.append(measure_pass(False, number, microbatch, y))
        self._finish_forward(stage, number, microbatch, y)

    def evaluate(self, action: Action) -> None:
        """Run a forward pass without gradients."""
        number, microbatch = _unpack(action)
        stage = self._executor.stages[number]
        x = None if stage.plan.first else self._take(ActionKind.F, number, microbatch)
        y = stage.evaluate(self._microbatches[microbatch], x)
        self._finish_forward(stage, number, microbatch, y)

    def compute_hidden(self, action: Action) -> None:
        """Run a forward pass without gradients and without the head."""
        number, microbatch = _unpack(action)
        stage = self._executor.stages[number]
        x = None if stage.plan.first else self._take(ActionKind.F, number, microbatch)
        y = stage.compute_hidden(self._microbatches[microbatch], x)
        if stage.plan.last:
            self.hidden[microbatch] = y
        else:
            self._pass_on(ActionKind.F, number, microbatch, y, number + 1)

    def backward(
        self, action: Action, next_unit: Module | None, hand_over: HandOver | None = None
    ) -> None:
        """Run a backward pass. The arguments are those of `forward`."""
        number, microbatch = _unpack(action)
        stage = self._executor.stages[number]
        gradient = None if stage.plan.last else self._take(ActionKind.B, number, microbatch)
        gradient = stage.backward(
            microbatch,
            gradient,
            last=number in self._reducing,
            next_unit=next_unit,
            hand_over=hand_over,
            on_block=self._make_block_recorder(True, number, microbatch),
            split=(number, microbatch) in self._split,
        )
        self.maxima.append(measure_pass(True, number, microbatch, gradient))
        if not stage.plan.first:
            self._pass_on(ActionKind.B, number, microbatch, gradient, number - 1)

    def compute_weight_gradients(self, action: Action) -> None:
        """Compute the weight gradients that a split backward has left."""
        number, microbatch = _unpack(action)
        # With split backwards the gradients are complete after W, not after B.
        last = number in self._reducing
        self._executor.stages[number].compute_weight_gradients(microbatch, last=last)

    def interleave(self, forward: Action, backward: Action, next_unit: Module | None) -> None:
        """Run a forward and a backward in turns.

        Args:
            forward: The action of the forward pass.
            backward: The action of the backward pass.
            next_unit: The unit whose values are needed first after both.
        """
        self._executor.interleaved.run(
            # Where the two hand over depends on the model alone, so all ranks start their transfers
            # in the same order.
            lambda hand_over: self.forward(forward, None, hand_over),
            lambda hand_over: self.backward(backward, next_unit, hand_over),
        )

    def begin_reduction(self, action: Action) -> None:
        """Note that the next backward of a stage completes its gradients. Nothing is sent yet: from
        that backward on, each bucket's reduction starts as soon as its gradients are complete."""
        assert action.stage is not None
        self._reducing.add(action.stage)

    def send(self, action: Action) -> None:
        """Start to send the output of a stage, or the gradient of its input."""
        number, microbatch = _unpack(action)
        forward = action.kind is ActionKind.SEND_F
        # From here on only the send holds the tensor.
        x = self._outgoing.pop((ActionKind.F if forward else ActionKind.B, number, microbatch))
        other = number + 1 if forward else number - 1
        self._executor.send(x.contiguous(), self._rank_of[other])

    def receive(self, action: Action) -> None:
        """Start to receive the input of a stage, or the gradient of its output."""
        number, microbatch = _unpack(action)
        forward = action.kind is ActionKind.RECV_F
        stage, mesh = self._executor.stages[number], self._executor.mesh
        tokens = self._microbatches[microbatch].tokens_BS.numel()
        shape = (
            count_rows_per_rank(tokens, stage.run.tensor.group.size),
            stage.config.model.hidden,
        )
        # The stage keeps a received input until its backward pass, so each has memory of its own.
        buffer = torch.empty(shape, dtype=stage.precision.compute, device=mesh.device)
        other = number - 1 if forward else number + 1
        link = mesh.link(self._rank_of[other], self._executor.rank)
        kind = ActionKind.F if forward else ActionKind.B
        self._incoming[kind, number, microbatch] = receive(buffer, link)

    def _finish_forward(self, stage: Stage, number: int, microbatch: int, y: Tensor) -> None:
        """Pass the output of a forward on; add that of the last stage to the losses."""
        if stage.post_process is None:
            self._pass_on(ActionKind.F, number, microbatch, y, number + 1)
            return
        # An fp64 sum, not a mean: the step divides once, by the tokens of the global batch.
        self.losses[microbatch] += y
        mtp_loss = stage.post_process.take_loss_ahead()
        if mtp_loss is not None:
            self.mtp_loss += mtp_loss

    def _make_block_recorder(
        self, backward: bool, stage: int, microbatch: int
    ) -> Callable[[int, Tensor], None] | None:
        """Return a function that records the maximum of each block of a pass; None without
        `by_block`."""
        if not self._by_block:
            return None

        def record(block: int, result: Tensor) -> None:
            self.maxima.append(measure_pass(backward, stage, microbatch, result, block))

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


def _unpack(action: Action) -> tuple[int, int]:
    """Return the stage and the microbatch of an action that has both."""
    assert action.stage is not None and action.microbatch is not None
    return action.stage, action.microbatch
