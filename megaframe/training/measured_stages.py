"""Stages balanced by measured times (`parallel.layers_per_stage=measured`).

When a run starts, every rank times passes of each kind of block, of the embedding, and of what
comes after the last block, on the ranks that it shares them with and with random rows. All ranks
take the mean over the ranks, in whole nanoseconds, so they divide alike. The division replaces the
key before anything is built: the run is that of a config with these numbers.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import (
    PartWorks,
    PassWork,
    StagePlan,
    compute_part_works,
    plan_stages,
)
from megaframe.config import RunConfig
from megaframe.config.keys import format_value
from megaframe.data_parallel.sharded_parameters import ShardedParameters
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.mesh import Mesh
from megaframe.model.layer_inputs import LayerSetup
from megaframe.model.model_chunk import build_chunks
from megaframe.optim.parameter_groups import ParameterGroups
from megaframe.pipeline_parallel.message import StageMessage
from megaframe.pipeline_parallel.stage import Stage
from megaframe.pipeline_parallel.stage_pass import StagePass
from megaframe.planner.parameter_counts import list_layer_kinds
from megaframe.schedule.simulate import simulate
from megaframe.training.auto_layout import choose_by_stages, load_saved_config
from megaframe.training.random_microbatch import make_random_microbatch
from megaframe.training.train_step import build_layer_setup

_TRIES = 5
"""Times that each pass is timed, after one that prepares; their median counts."""


@dataclass(frozen=True)
class StageTimes:
    """What the start of a run says of its stages.

    Attributes:
        notes: Lines to log.
        values: Metrics of the first step, by name.
    """

    notes: Sequence[str] = ()
    values: Mapping[str, float] = field(default_factory=dict)


def decide_stages(config: RunConfig, mesh: Mesh) -> tuple[RunConfig, StageTimes]:
    """Return the config with numbers in place of `parallel.layers_per_stage=measured`, and with all
    that depends on them. All ranks of the world must call this.

    Args:
        config: The run, as from `resolve_config`.
        mesh: Its ranks.
    """
    if config.parallel.layers_per_stage != "measured":
        return config, StageTimes()
    stages = config.parallel.pipeline * config.parallel.chunks
    layers, times = _find_kept_layers(config, mesh), StageTimes()
    if layers is not None:
        note = "parallel.layers_per_stage=measured: the division that the run started with"
        times = StageTimes([note])
    elif stages == 1:
        layers = (config.model.layers,)
    else:
        layers, times = divide_by_times(config, mesh.layout.data, measure_parts(config, mesh))
    decided, more = choose_by_stages(
        config.replace(parallel={"layers_per_stage": layers}), mesh.layout.world
    )
    return decided, StageTimes([*times.notes, *more], times.values)


def divide_by_times(
    config: RunConfig, data: int, works: PartWorks
) -> tuple[tuple[int, ...], StageTimes]:
    """Return the layers of each stage that balance what was measured, or those by work if their
    bubble is smaller; with lines that say so and metrics of the first step.

    Args:
        config: The run, not decided.
        data: Number of data ranks.
        works: What was measured.
    """
    stages = config.parallel.pipeline * config.parallel.chunks
    modelled = compute_part_works(config.model, config.train, config.frozen_patterns)
    by_times, by_work = (
        each.divide(stages, recompute=config.train.recompute == "full")
        for each in (works, modelled)
    )

    def predict_bubble(layers: tuple[int, ...]) -> float:
        divided = config.replace(parallel={"layers_per_stage": layers})
        microbatches = config.train.global_batch // (config.train.microbatch * data)
        costs = works.sum_by_stage(plan_stages(divided))
        return float(simulate(build_step_schedule(divided, microbatches), costs).bubble)

    bubbles = {layers: predict_bubble(layers) for layers in (by_times, by_work)}
    # With few microbatches the longest stage is not all that counts.
    layers = min(bubbles, key=bubbles.__getitem__)
    after, before = (f"{format_value(each)} {bubbles[each]:.1%}" for each in (layers, by_work))
    lines = [
        f"parallel.layers_per_stage=measured: {format_value(layers)}; bubble by measured times "
        f"without communication: {after}, divided by work: {before}",
        *_list_times(works),
    ]
    values = {"bubble_by_work": bubbles[by_work], "bubble": bubbles[layers]}
    return layers, StageTimes(lines, values)


def measure_parts(config: RunConfig, mesh: Mesh) -> PartWorks:
    """Return the times of a microbatch's passes through each part of the model, in nanoseconds, the
    same on all ranks. All ranks of the world must call this.

    Args:
        config: The run.
        mesh: Its ranks.
    """
    # Nothing of the data ranks is timed: their transfers overlap with passes of other microbatches.
    # Nor are codes of weights: making values of them takes all blocks of a kind as long.
    adapters = config.model.adapters
    plain = config.replace(
        model={"adapters": adapters and adapters.model_copy(update={"quantize_base": None})},
        parallel={"zero": 0, "reduce_precision": "master", "compress": "none"},
        metrics={"gradient_noise_every": 0},
    )
    setup = build_layer_setup(plain, mesh, lambda line: None)
    kinds = list_layer_kinds(config.model, config.frozen_patterns)
    firsts = [kinds.index(kind) for kind in kinds]
    plans = {layer: StagePlan(1, 3, range(layer, layer + 1)) for layer in sorted({*firsts})}
    ends = StagePlan(0, 3, range(0)), StagePlan(2, 3, range(0))
    nanoseconds = []
    for plan in (*ends, *plans.values()):
        nanoseconds.append(_PartTimer(plain, mesh, setup, plan).take_medians())
        gc.collect()  # reference cycles would keep the memory of the part
    mesh.take_traffic()
    total = torch.tensor(nanoseconds, dtype=torch.int64, device=mesh.device)
    # Whole numbers have no rounding, so all ranks get the same ones.
    means = all_reduce(total, mesh.world).wait() // mesh.world.size
    embedding, output, *blocks = (PassWork(*of_part) for of_part in means.tolist())
    of_kind = dict(zip(plans, blocks, strict=True))
    return PartWorks(embedding, tuple(of_kind[first] for first in firsts), output)


class _PartTimer:
    """A part of the model with weights of its own, and a microbatch of random tokens."""

    def __init__(self, config: RunConfig, mesh: Mesh, setup: LayerSetup, plan: StagePlan) -> None:
        (chunk,) = build_chunks(config.model, config.train, [plan], setup).values()
        groups = ParameterGroups(config, mesh, setup.kernels)
        units = {plan.stage_index: chunk.units}
        self._sharded = ShardedParameters(config, mesh, units, groups.bucketing)
        self._sharded.initialize_weights(config.run.seed)
        for bucket in self._sharded.buckets:
            bucket.publish_weights()
        # Values are always here, and nobody reduces gradients.
        self._stage, self._device, self._plan = Stage(config, chunk, setup), mesh.device, plan
        self._stage.start_step(0)
        self._microbatch = make_random_microbatch(
            config.model,
            config.train,
            setup.context,
            mesh.device,
            documents=config.data.reset_attention,
        )
        self._scale = torch.ones((), dtype=torch.float64, device=mesh.device)
        self._input, self._gradient = map(
            self._make_message, (self._stage.received, self._stage.sent)
        )

    def _make_message(self, form: StageMessage) -> Tensor:
        """Return a random message."""
        shape = form.find_shape(*self._microbatch.tokens_BS.shape)
        message = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return message.to(self._device, self._stage.precision.compute)

    def take_medians(self) -> list[int]:
        """Return the nanoseconds of F, B and W."""
        _, *tries = [self._time_passes() for _ in range(1 + _TRIES)]
        return [int(statistics.median(times)) for times in zip(*tries, strict=True)]

    def _time_passes(self) -> list[int]:
        """Run F, B and W once; return their nanoseconds."""
        stage, one = self._stage, StagePass(0, split=True)
        self._sharded.start_step()
        x = None if self._plan.first else self._input
        forward = self._time(lambda: stage.forward(one, self._microbatch, self._scale, x))
        gradient = None if self._plan.last else self._gradient
        backward = self._time(lambda: stage.backward(one, gradient))
        weight = self._time(lambda: stage.compute_weight_gradients(one))
        stage.take_statistics()
        return [forward, backward, weight]

    def _time(self, compute: Callable[[], Tensor | None]) -> int:
        self._synchronize()
        start = time.perf_counter_ns()
        compute()
        self._synchronize()
        return time.perf_counter_ns() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _find_kept_layers(config: RunConfig, mesh: Mesh) -> tuple[int, ...] | None:
    """Return the division of the run that is resumed, as the first rank sees it, if it is one for
    this number of stages; else None."""
    key = "measured stages"
    if mesh.rank == 0:
        saved = load_saved_config(config.run, config.checkpoint)
        layers = None if saved is None else saved.parallel.layers_per_stage
        stages = config.parallel.pipeline * config.parallel.chunks
        fits = isinstance(layers, tuple) and len(layers) == stages
        fits = fits and saved is not None and saved.model.layers == config.model.layers
        mesh.store.set(key, json.dumps(layers if fits else None))
    layers = json.loads(mesh.store.get(key))
    return None if layers is None else tuple(layers)


def _list_times(works: PartWorks) -> Iterator[str]:
    """Yield a line for each part or run of equal blocks, with its milliseconds."""
    yield "  measured, ms of a microbatch   forward  backward   weight"
    starts = [n for n, one in enumerate(works.blocks) if not n or one != works.blocks[n - 1]]
    rows = [("embedding", works.embedding)]
    for start, stop in zip(starts, [*starts[1:], len(works.blocks)], strict=True):
        name = f"block {start}" if stop == start + 1 else f"each of blocks {start}-{stop - 1}"
        rows.append((name, works.blocks[start]))
    for name, work in [*rows, ("head", works.output)]:
        times = (work.forward / 1e6, work.backward / 1e6, work.weight / 1e6)
        yield f"  {name:<28}" + "".join(f"{milliseconds:>10.3f}" for milliseconds in times)
