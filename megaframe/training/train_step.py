"""TrainStep: one optimizer step of one rank: all passes of a pipeline schedule, then the update.

The schedule determines the rank of each stage, so everything else is built from it. A run without a
pipeline is a pipeline with one rank and one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.attention import count_exchanging_ranks
from megaframe.architecture.model_blocks import count_kv_copies
from megaframe.architecture.moe import count_near_experts
from megaframe.architecture.pipeline import build_forward_schedule, build_step_schedule
from megaframe.architecture.stages import compute_stage_costs, plan_stages
from megaframe.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megaframe.context_parallel.axis import ContextParallel
from megaframe.data.microbatch import IGNORE, Microbatch, look_ahead, select_context_part
from megaframe.data_parallel.sharded_parameters import ShardedParameters, TiedEmbedding
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.mesh import Mesh, read_local_world_size
from megaframe.expert_parallel.dispatch import ExpertParallel
from megaframe.inference.evaluation import score_rows
from megaframe.layout import EXPERT_SETS
from megaframe.metrics import Part
from megaframe.model.layer_inputs import PLAIN_ROUTINES, LayerRoutines, LayerSetup, make_layer_setup
from megaframe.model.model_chunk import ModelChunk, build_chunks
from megaframe.model.pass_state import LayerStatistics
from megaframe.ops.compile import Compiled
from megaframe.ops.fp8 import check_fp8
from megaframe.ops.kernel_dispatch import make_kernels
from megaframe.optim.optimizer import Optimizer, UpdateResult
from megaframe.optim.parameter_groups import ParameterGroups
from megaframe.parameters.parameter import PRECISIONS
from megaframe.pipeline_parallel.executor import ActionTrace, PipelineExecutor, PipelineOutput
from megaframe.pipeline_parallel.nonfinite import PassMaximum
from megaframe.pipeline_parallel.stage import Stage
from megaframe.pipeline_parallel.stage_pass import RankPlan
from megaframe.schedule import Schedule, lower
from megaframe.schedule.overlap_pairs import find_overlap_pairs, place_pairs_together
from megaframe.tensor_parallel.axis import RowPartition
from megaframe.training.cuda_graph import StepGraph, check_cuda_graph
from megaframe.training.island_setup import make_island_sync

Timer = Callable[[Part], AbstractContextManager[object]]
"""Returns a context that charges the code in it to a part of the step."""
_SCHEDULES = 32
"""Planned schedules to cache. During a batch ramp the number of microbatches takes a few values."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step on this rank: of its update, and as in `PipelineOutput`."""

    loss: Tensor
    mtp_loss: Tensor
    update: UpdateResult
    maxima: Sequence[PassMaximum]
    statistics: Sequence[LayerStatistics]


class TrainStep:
    """This rank's stages, their parameters and optimizer, and what runs them.

    Attributes:
        mesh: This rank's groups.
        schedule: That of a full batch. All schedules of the run have the same `rank_of`.
        rank_of: The pipeline rank of each stage.
        stages: This rank's stages by index.
        sharded_parameters: Where the values and gradients of the stages are.
        optimizer: Updates them.
        islands: Synchronises them with other islands; None if there is one.
        kernels: The kernels that the run uses.
        graph: Runs the passes as a CUDA graph; None without `train.cuda_graph`.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        time: Timer | None = None,
        note: Callable[[str], None] = print,
        *,
        trace: ActionTrace | None = None,
        routines: LayerRoutines = PLAIN_ROUTINES,
    ) -> None:
        """Build everything that this rank runs. All ranks of the world must call this.

        Args:
            config: The run.
            mesh: This rank's groups.
            time: Charges the update to its part of the step.
            note: Called with a line to show.
            trace: Entered around every action of a step; see `PipelineExecutor`.
            routines: What the plain code of layers is made of.
        """
        train, self._depth = config.train, config.model.mtp_depth
        self._config, self.mesh = config, mesh
        self._time: Timer = time or (lambda part: nullcontext())
        self._trace: ActionTrace = trace or (lambda action, kind: nullcontext())
        full = train.global_batch // (train.microbatch * mesh.layout.data)
        self.schedule = build_step_schedule(config, full)
        self.rank_of = rank_of = self.schedule.rank_of
        setup = build_layer_setup(config, mesh, note, routines)
        self.context, self.kernels = setup.context, setup.kernels
        kernels, compute = setup.kernels, PRECISIONS[train.precision].compute
        self._warning = check_fp8(train, config.kernels, mesh.device, compute, kernels)
        rank = mesh.coordinate["pipeline"]
        plans = [plan for plan in plan_stages(config) if rank_of[plan.stage_index] == rank]
        chunks = build_chunks(config.model, train, plans, setup)
        tied = self._connect_pipeline(config.model, chunks)
        groups = ParameterGroups(config, mesh, kernels)
        units = {index: chunk.units for index, chunk in chunks.items()}
        self.sharded_parameters = sharded = ShardedParameters(
            config, mesh, units, groups.bucketing, tied, kernels
        )
        self.optimizer = Optimizer(config.optim, train, mesh, sharded, groups, kernels)
        self.islands = make_island_sync(config, mesh, sharded, self.optimizer)
        self.stages: Mapping[int, Stage] = {
            index: Stage(config, chunk, setup, sharded) for index, chunk in chunks.items()
        }
        self._executor = PipelineExecutor(self.stages, mesh, self._trace)
        self.graph: StepGraph | None = None
        if train.cuda_graph:
            check_cuda_graph(config, mesh, kernels)
            self.graph = StepGraph(mesh, note)
        self._plan_schedule = lru_cache(_SCHEDULES)(self._make_plan)

    def _make_plan(self, microbatches: int, train: bool) -> RankPlan:
        """Return this rank's plan of a step of this many microbatches, or of their evaluation."""
        config, plan = self._config, self._executor.plan
        if not train:
            return plan(lower(build_forward_schedule(self.rank_of, microbatches)))
        is_full = microbatches == self.schedule.microbatches
        schedule = self.schedule if is_full else build_step_schedule(config, microbatches)
        if not config.parallel.expert_overlap:
            return plan(lower(schedule))
        paired = find_overlap_pairs(
            schedule,
            compute_stage_costs(
                config.model, config.train, plan_stages(config), config.frozen_patterns
            ),
        )
        ranks = tuple(place_pairs_together(rank, paired) for rank in lower(schedule).ranks)
        return plan(Schedule(ranks), paired)

    def _connect_pipeline(
        self, model: ModelConfig, chunks: Mapping[int, ModelChunk]
    ) -> TiedEmbedding | None:
        """Make the links between stages. Returns the token embedding if another rank has it too."""
        mesh, rank_of = self.mesh, self.rank_of
        ends = rank_of[0], rank_of[-1]
        shared = model.tie_embeddings or model.mtp_depth > 0
        twice = shared and ends[0] != ends[1]
        mesh.name_stages(rank_of)
        mesh.connect([*_list_links(rank_of), *([ends] if twice else [])])
        return _find_tied_embedding(chunks, mesh, ends) if twice else None

    def describe_kernels(self) -> Iterator[str]:
        """Yield lines for the start of the log: which code computes a step, and why not faster
        code. What else is chosen by the machine belongs here too."""
        yield from self.kernels.report()
        if self._warning is not None:
            yield self._warning

    def train(
        self,
        microbatches: Sequence[Microbatch],
        step: int,
        scale: float | Tensor,
        *,
        by_block: bool = False,
        measured: bool = False,
    ) -> StepResult:
        """Run one optimizer step.

        Args:
            microbatches: This data rank's, with whole samples.
            step: Number of steps done before, on which random masks and islands depend.
            scale: Gradients are those of scale * (sum of the losses).
            by_block: Record the largest magnitude of every block; then no CUDA graph is used.
            measured: Measure the gradients of small batches; then no CUDA graph is used either.
        """
        plan = self._plan_schedule(len(microbatches), True)
        if self._depth:
            microbatches = [look_ahead(microbatch, self._depth) for microbatch in microbatches]
        parts = self._select_context_parts(microbatches)
        if not isinstance(scale, Tensor):
            scale = torch.full((), scale, dtype=torch.float64, device=self.mesh.device)
        self.sharded_parameters.start_step(measured=measured)
        for stage in self.stages.values():
            stage.start_step(step)
        if self.graph is None or by_block or measured:
            output = self._executor.run(plan, parts, scale, by_block=by_block)
        else:
            output = self._run_as_graph(self.graph, plan, parts, scale)
        update = self._update(plan)
        self._executor.wait_for_sends()
        if self.islands is not None:
            with self._time("optimizer"):
                self.islands.end_step(step + 1)
        return StepResult(output.loss, output.mtp_loss, update, output.maxima, output.statistics)

    def _run_as_graph(
        self, graph: StepGraph, plan: RankPlan, microbatches: Sequence[Microbatch], scale: Tensor
    ) -> PipelineOutput:
        """Run all passes through `graph`, which may launch them as one CUDA graph."""

        def compute(inputs: Sequence[Microbatch], input_scale: Tensor) -> PipelineOutput:
            output = self._executor.run(plan, inputs, input_scale)
            # What a graph starts, it must wait for.
            self.sharded_parameters.wait_for_gradients()
            return output

        # The passes must not depend on what ran before: the last update's values have arrived, and
        # values that are not always on this rank are released.
        self.sharded_parameters.wait_for_values()
        return graph.run(compute, microbatches, scale)

    def _update(self, plan: RankPlan) -> UpdateResult:
        """Update the weights, which is the last action of a rank's list."""
        action = plan.actions[-1].action
        progress = self.mesh.progress
        progress.begin_part("", action, action.kind.value)
        with self._trace(action, action.kind.value), self._time("optimizer"):
            self.sharded_parameters.wait_for_gradients()
            update = self.optimizer.update()
        progress.begin_part("", None)
        return update

    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return the loss sum of each microbatch over this rank's valid tokens, without gradients,
        fp64 [M]; zero on a rank without the head."""
        plan = self._plan_schedule(len(microbatches), False)
        return self._executor.evaluate(plan.schedule, self._select_context_parts(microbatches))

    def predict(self, microbatches: Sequence[Microbatch], rows: int) -> Tensor | None:
        """Predict the next token at some positions, without gradients. All ranks must call this,
        and each with the same microbatches.

        Args:
            microbatches: Whole samples. The label of a position is the row of the result that is
                its prediction, and `IGNORE` where none is asked for.
            rows: Number of these positions in all microbatches.

        Returns:
            The logits, in at least fp32, [rows, vocabulary]; None on ranks without the head. They
            are right on the first data rank; the others need not have any.
        """
        x = self._compute_hidden_rows(microbatches, rows, counts=not self.mesh.coordinate["data"])
        return None if x is None else self._compute_logits(x)

    def score(
        self, microbatches: Sequence[Microbatch], labels_R: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Score given tokens at some positions, without gradients. All ranks must call this, with
        the same number of microbatches.

        Args:
            microbatches: Whole samples. The label of a position is its row of the result, and
                `IGNORE` where none is asked for. Ranks with other samples have other rows.
            labels_R: The token to score in each row.

        Returns:
            The log-probability of each token, in at least fp32 [R], and whether no other is more
            likely, bool [R]; None on ranks without the head.
        """
        x = self._compute_hidden_rows(microbatches, len(labels_R))
        if x is None:
            return None
        head = self.stages[len(self.rank_of) - 1].head
        assert head is not None
        return score_rows(self._compute_logits, x, labels_R, head.weight.spec.shape[0])

    def _compute_hidden_rows(
        self, microbatches: Sequence[Microbatch], rows: int, *, counts: bool = True
    ) -> Tensor | None:
        """Return the stream after the last block at the positions with a label, which is the row of
        the result, [rows, hidden]; None on ranks without the head.

        Args:
            microbatches: Whole samples of this rank.
            rows: Number of rows of all ranks.
            counts: Whether those of this rank count.
        """
        plan = self._plan_schedule(len(microbatches), False)
        parts = self._select_context_parts(microbatches)
        hidden_by_microbatch = self._executor.compute_hidden(plan.schedule, parts)
        if not hidden_by_microbatch:
            return None
        mesh, stage = self.mesh, self.stages[len(self.rank_of) - 1]
        tensor, compute = mesh.group("tensor"), stage.precision.compute
        wide = torch.promote_types(compute, torch.float32)
        x = torch.zeros(rows, stage.config.model.stream_width, dtype=wide, device=mesh.device)
        for index, hidden in hidden_by_microbatch.items() if counts else ():
            labels = parts[index].labels_BS.flatten()
            own = RowPartition(len(labels), tensor.size, tensor.index).select(labels, IGNORE)
            asked = (own != IGNORE).nonzero().flatten()
            x[own[asked]] = hidden[asked].to(wide)
        # Each row comes from one rank, so sums with the zeros of all others are exact.
        return all_reduce(x, mesh.group("data_shard", "context", "tensor")).wait().to(compute)

    def _compute_logits(self, x_RH: Tensor) -> Tensor:
        """Return the logits of rows of the stream, of the whole vocabulary, in at least fp32
        [R, V]. All tensor ranks of the last stage must call this."""
        stage = self.stages[len(self.rank_of) - 1]
        own_logits = stage.compute_logits(x_RH)
        assert stage.head is not None
        weight = stage.head.weight
        logits = own_logits.new_zeros(len(x_RH), weight.spec.shape[0])
        logits[:, weight.box.offset[0] :][:, : own_logits.shape[1]] = own_logits
        return all_reduce(logits, self.mesh.group("tensor")).wait()

    def _select_context_parts(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Return this context rank's part of each microbatch."""
        index, size = self.context.index, self.context.size
        return [select_context_part(microbatch, index, size) for microbatch in microbatches]


def build_layer_setup(
    config: RunConfig,
    mesh: Mesh,
    note: Callable[[str], None] = print,
    routines: LayerRoutines = PLAIN_ROUTINES,
) -> LayerSetup:
    """Return what a run fixes for the layers of this rank. All ranks of the world must call this.

    Args:
        config: The run.
        mesh: This rank's groups.
        note: Called with a line to show.
        routines: What the plain code of layers is made of.
    """
    context = ContextParallel(*mesh.divide_context(count_exchanging_ranks(config.parallel)))
    experts = _make_expert_parallel(config.model, config.parallel, mesh)
    kernels = make_kernels(config, mesh.device, _make_compiler(config.train, note), note)
    copies = count_kv_copies(config.model, mesh.layout.tensor)
    if copies > 1:
        mesh.add_tensor_copies_group(copies)
    return make_layer_setup(
        config.parallel, config.train, mesh.group("tensor"), context, experts, kernels, routines
    )


def _make_expert_parallel(
    model: ModelConfig, parallel: ParallelConfig, mesh: Mesh
) -> ExpertParallel:
    """Return the groups of ranks that have experts, and the dispatch method. All ranks of the world
    must call this."""
    if model.moe is None:
        return ExpertParallel()
    mesh.add_groups(EXPERT_SETS)
    if model.adapters is not None and mesh.layout.expert_tensor > 1:
        mesh.add_groups([("expert_shard", "expert_tensor")])
    near = count_near_experts(parallel, parallel.node_size or read_local_world_size())
    return ExpertParallel(
        mesh.group("expert"),
        *mesh.divide_experts(near),
        mesh.group("expert_tensor"),
        mesh.group("context", "tensor"),
        parallel.dispatch,
    )


def _make_compiler(
    train: TrainConfig, note: Callable[[str], None]
) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    backend = train.compile
    return None if backend == "none" else partial(Compiled, backend=backend, note=note)


def _list_links(rank_of: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (from, to) for all pairs of ranks with neighbouring stages, in both directions."""
    for rank, next_rank in pairwise(rank_of):
        if rank != next_rank:
            yield from ((rank, next_rank), (next_rank, rank))


def _find_tied_embedding(
    chunks: Mapping[int, ModelChunk], mesh: Mesh, ends: tuple[int, int]
) -> TiedEmbedding | None:
    """Return this rank's copy of the token embedding that the first and the last stage both have,
    or None if this rank has neither stage."""
    for chunk in chunks.values():
        if chunk.embedding is not None:
            return TiedEmbedding(chunk.embedding.tokens.weight, mesh.link(*ends))
        if chunk.post_process is not None and chunk.post_process.tokens is not None:
            return TiedEmbedding(chunk.post_process.tokens.weight, mesh.link(*ends))
    return None
