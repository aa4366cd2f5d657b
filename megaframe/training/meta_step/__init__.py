"""A step of one rank of a run, executed alone by the real code on tensors without content.

The mesh is that of the whole world; the model, the optimizer and the schedule are those of the
rank; and every action of a step is executed. Only tensors have no content and nothing is sent. The
memory and traffic that it counts are therefore those of the code, not those of a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megaframe.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from megaframe.config.schema import KernelsConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.ops.meta_tensors import AllocationTracker, MetaTensorMode
from megaframe.schedule import Action, ActionKind
from megaframe.training.train_step import TrainStep


@dataclass(frozen=True)
class RankMeasurement:
    """What was counted in one step of a rank, in bytes.

    Attributes:
        buffers: Weights, values and gradients.
        optimizer: Optimizer state.
        staging: Receive buffers of transfers on a CPU, and buffers for offloaded data.
        activations: The most that existed between two actions besides these: activations and
            messages in transit.
        peak: The most at any time, everything included except `host`.
        traffic: Bytes handed to collectives and links, by axes.
        actions: Number of actions executed.
        host: Bytes in host memory.
    """

    buffers: int
    optimizer: int
    staging: int
    activations: int
    peak: int
    traffic: Mapping[str, int]
    actions: int
    host: int

    @property
    def temporaries(self) -> int:
        """The most bytes that single operations needed on top of everything that outlives them."""
        return self.peak - self.buffers - self.optimizer - self.staging - self.activations


def run_meta_step(config: RunConfig, layout: Layout, rank: int) -> RankMeasurement:
    """Run one step of `rank`.

    Paired passes (`parallel.expert_overlap`) run one after the other; fused products over symmetric
    memory, kernels and compiled pieces run as plain code; and no step is a CUDA graph. All of these
    need a device or ranks that are missing here.

    Args:
        config: The run.
        layout: Its ranks.
        rank: The rank.

    Raises:
        ValueError: For a rank outside the layout.
    """
    parallel = {"expert_overlap": False, "symmetric_memory": "off"}
    train: dict[str, object] = {"compile": "none", "cuda_graph": False}
    config = config.replace(parallel=parallel, train=train)
    config = config.model_copy(update={"kernels": KernelsConfig()})
    with MetaTensorMode() as tracker:
        mesh = Mesh(layout, alone=rank)
        return measure_step(config, mesh, tracker)


def measure_step(config: RunConfig, mesh: Mesh, tracker: AllocationTracker) -> RankMeasurement:
    """Build what this rank of the mesh runs, and count one step of it in `tracker`.

    Args:
        config: The run.
        mesh: A mesh of this rank alone, with fake groups.
        tracker: Counts memory and operators.
    """
    watch = _PeakBetweenActions(tracker)
    train_step = TrainStep(config, mesh, trace=watch.follow)
    optimizer, buffers = train_step.optimizer, train_step.sharded_parameters.buffers
    optimizer.initialize(config.run.seed)
    mesh.take_traffic()
    count = config.train.global_batch // (config.train.microbatch * mesh.layout.data)
    microbatch = _make_microbatch(config.model, config.train, config.data)
    microbatches = [microbatch] * count
    state, host = optimizer.count_memory_bytes()["optimizer"], optimizer.offload.host_bytes

    def count_staging() -> int:
        return buffers.receive_bytes + optimizer.offload.staging_bytes

    watch.begin(lambda: buffers.bytes + count_staging() + state + host)
    result = train_step.train(microbatches, 0, 1.0)
    del result
    return RankMeasurement(
        buffers.bytes,
        state,
        count_staging(),
        watch.peak,
        tracker.peak - watch.before - host,
        mesh.take_traffic(),
        watch.actions,
        host,
    )


class _PeakBetweenActions:
    """Records the most bytes that exist between two actions of a step. The train step calls
    `follow` around each action."""

    def __init__(self, tracker: AllocationTracker) -> None:
        self._tracker = tracker
        self._count_buffers: Callable[[], int] | None = None
        self.peak = self.actions = self.before = 0

    def begin(self, count_buffers: Callable[[], int]) -> None:
        """Start the step.

        Args:
            count_buffers: Returns the bytes of what stays: buffers, staging buffers and state.
        """
        self._count_buffers = count_buffers
        self.before = self._tracker.live - count_buffers()
        self._tracker.mark()

    @contextmanager
    def follow(self, action: Action, kind: str) -> Iterator[None]:
        """Count around one action. The update is not counted: what it needs belongs to the
        optimizer."""
        yield
        if action.kind is not ActionKind.UPDATE and self._count_buffers is not None:
            self.actions += 1
            self.peak = max(self.peak, self._tracker.live - self.before - self._count_buffers())


def _make_microbatch(model: ModelConfig, train: TrainConfig, data: DataConfig) -> Microbatch:
    """Return a microbatch of samples of one document each, with tokens from the whole
    vocabulary."""
    assert model.vocab is not None, "the config is resolved"
    shape = (train.microbatch, train.seq)
    tokens = (torch.arange(shape[0] * shape[1]) * 7919 % model.vocab).view(shape)
    documents = torch.zeros_like(tokens) if data.reset_attention else None
    return Microbatch(tokens, tokens, torch.arange(shape[0]), None, documents)
