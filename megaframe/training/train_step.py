"""Pipeline: what one rank runs: its stages, their optimizer, and the lowered schedule.

The schedule determines the rank of each stage, so everything else is built from it. A run without a
pipeline is a pipeline with one rank and one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from megaframe.architecture.attention import exchanging_ranks
from megaframe.architecture.experts import near_experts
from megaframe.architecture.pipeline import build_forward_schedule, build_step_schedule
from megaframe.architecture.stages import stage_costs, stage_plans
from megaframe.config import RunConfig
from megaframe.context_parallel.context import ContextParallel
from megaframe.data.microbatch import Microbatch, context_part, look_ahead
from megaframe.distributed.mesh import Mesh, ranks_on_this_node
from megaframe.expert_parallel.dispatch import ExpertParallel
from megaframe.layout import EXPERT_SETS
from megaframe.model.forward_context import make_run_context
from megaframe.ops.compile import Compiled
from megaframe.ops.fp8 import check_fp8
from megaframe.ops.kernel_dispatch import make_kernels
from megaframe.optim.optimizer import Optimizer, Tied
from megaframe.parameters.parameter import PRECISIONS
from megaframe.parameters.spec import copies_of
from megaframe.pipeline_parallel.executor import Engine, Follower, Outcome, Timer
from megaframe.pipeline_parallel.stage import Stage, build_stages
from megaframe.schedule import Action, Schedule, lower
from megaframe.schedule.overlap_pairs import find_overlap_pairs, place_pairs_together
from megaframe.training.cuda_graph import Graph, refuse

_KEPT = 32
"""Lowered schedules to cache. During a batch ramp the number of microbatches takes a few values."""


class Pipeline:
    """This rank's stages with their optimizer, and the engine that runs them.

    `schedule` is the schedule of a full batch. All schedules of the run have the same `rank_of`.
    time: see `Engine`.
    tell: called with a line to show.
    """

    def __init__(
        self, config: RunConfig, mesh: Mesh, time: Timer, tell: Callable[[str], None] = print
    ) -> None:
        train, self._depth = config.train, config.model.mtp_depth
        full = train.global_batch // (train.microbatch * mesh.layout.data)
        self.schedule = build_step_schedule(config, full)
        self.rank_of = rank_of = self.schedule.rank_of
        here = mesh.coordinate["pipeline"]
        plans = [plan for plan in stage_plans(config) if rank_of[plan.number] == here]
        self.context = ContextParallel(*mesh.divide_context(exchanging_ranks(config.parallel)))
        experts = _places(config, mesh)
        compiler = _compiler(config, tell)
        self.kernels = kernels = make_kernels(config, mesh.device, compiler, tell)
        self._warning = check_fp8(config, mesh.device, PRECISIONS[train.precision].compute, kernels)
        tensor = mesh.group("tensor")
        run = make_run_context(config, tensor, self.context, experts, kernels)
        self.stages = build_stages(config, plans, run)
        ends = rank_of[0], rank_of[-1]
        shared = config.model.tie_embeddings or config.model.mtp_depth > 0
        twice = shared and ends[0] != ends[1]
        copies = copies_of(config.model.kv_heads, mesh.layout.tensor)
        if copies > 1:
            mesh.add_tensor_copies_group(copies)
        mesh.name_stages(rank_of)
        mesh.connect([*_links(rank_of), *([ends] if twice else [])])
        tied = _tied(self.stages, mesh, ends) if twice else None
        units = {number: stage.units for number, stage in self.stages.items()}
        self.optimizer = Optimizer(config, mesh, units, tied, kernels)
        for stage in self.stages.values():
            stage.keeper = self.optimizer
        self._engine = Engine(self.stages, self.optimizer, mesh, time)
        if train.cuda_graph:
            refuse(config, mesh, kernels)
            self._engine.graph = Graph(mesh, tell)

        @lru_cache(_KEPT)
        def lowered(microbatches: int, train: bool) -> tuple[Schedule, Mapping[Action, Action]]:
            if not train:
                return lower(build_forward_schedule(rank_of, microbatches)), {}
            known = microbatches == self.schedule.microbatches
            schedule = self.schedule if known else build_step_schedule(config, microbatches)
            if not config.parallel.expert_overlap:
                return lower(schedule), {}
            paired = find_overlap_pairs(schedule, stage_costs(config, stage_plans(config)))
            ranks = tuple(place_pairs_together(rank, paired) for rank in lower(schedule).ranks)
            return Schedule(ranks), paired

        self._lowered = lowered

    def computed_with(self) -> Iterator[str]:
        """Yield lines for the start of the log: which code computes a step, and why not faster
        code. What else is chosen by the machine belongs here too."""
        yield from self.kernels.report()
        if self._warning is not None:
            yield self._warning

    def follow(self, follower: Follower) -> None:
        """Call `follower` for every action of the following steps; see `Engine`."""
        self._engine.follow = follower

    def train(
        self,
        microbatches: Sequence[Microbatch],
        step: int,
        scale: float | Tensor,
        *,
        by_block: bool = False,
    ) -> Outcome:
        """Run one optimizer step; see `Engine.run`. The microbatches contain whole samples."""
        schedule, paired = self._lowered(len(microbatches), True)
        depth = self._depth
        ahead = [look_ahead(one, depth) for one in microbatches] if depth else microbatches
        parts = self._parts(ahead)
        return self._engine.run(schedule, parts, step, scale, paired, by_block=by_block)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return the loss sum of each microbatch without gradients, [M]; see `Engine.evaluate`."""
        schedule, _ = self._lowered(len(microbatches), False)
        return self._engine.evaluate(schedule, self._parts(microbatches))

    def _parts(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Return this context rank's part of each microbatch."""
        return [context_part(one, self.context.index, self.context.size) for one in microbatches]


def _places(config: RunConfig, mesh: Mesh) -> ExpertParallel:
    """Return where the experts are: the groups of ranks that have them, and the dispatch method.
    All ranks of the world must call this."""
    if config.model.moe is None:
        return ExpertParallel()
    mesh.add_groups(EXPERT_SETS)
    near = near_experts(config.parallel, config.parallel.node_size or ranks_on_this_node())
    return ExpertParallel(
        mesh.group("expert"),
        *mesh.divide_experts(near),
        mesh.group("expert_tensor"),
        mesh.group("context", "tensor"),
        config.parallel.dispatch,
    )


def _compiler(
    config: RunConfig, tell: Callable[[str], None]
) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    backend = config.train.compile
    return None if backend == "none" else partial(Compiled, backend=backend, tell=tell)


def _links(rank_of: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (from, to) for all pairs of ranks with neighbouring stages, in both directions."""
    for here, there in pairwise(rank_of):
        if here != there:
            yield from ((here, there), (there, here))


def _tied(stages: Mapping[int, Stage], mesh: Mesh, ends: tuple[int, int]) -> Tied | None:
    """Return this rank's copy of the token embedding that the first and the last stage both have,
    or None if this rank has neither stage."""
    for stage in stages.values():
        if stage.embedding is not None:
            return Tied(stage.embedding.tokens.weight, mesh.link(*ends))
        if stage.post_process is not None and stage.post_process.tokens is not None:
            return Tied(stage.post_process.tokens.weight, mesh.link(*ends))
    return None
