"""Worlds of ranks that run a pipeline with emulated blocks, for `pipeline_emulated.py`.

Ranks are forked from a server that has imported torch and run nothing, so 32 of them start in a
second. They use one clock, which Linux shares between processes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from megaframe.config import EmulationConfig, RunConfig
from megaframe.io.local_rendezvous import find_free_port

if TYPE_CHECKING:
    from megaframe.distributed.mesh import Mesh
    from megaframe.pipeline_parallel.stage import Stage
    from megaframe.training.train_step import TrainStep

LIMIT = 600.0
"""Seconds after which a world that has not answered is given up."""
TRIPS, REST = 100, 0.01
"""How many tensors are sent to measure latency, and the seconds between them."""
TIMER_SLACK = 29
"""PR_SET_TIMERSLACK of prctl(2). By default Linux lets a process oversleep by 50 microseconds."""


@dataclass(frozen=True)
class Steps:
    """What one rank measured of its steps, in seconds.

    Attributes:
        starts: Start of each step.
        ends: End of each step.
        firsts: Start of its first pass.
        lasts: End of its last pass.
        busy: Processor time of the thread that runs the executor.
        live: Most activations held at once, one for each microbatch of a stage.
    """

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    lasts: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    live: list[int] = field(default_factory=list)


class RecordedPass(NamedTuple):
    """When a pass of a stage ran, and how many activations its rank held after it."""

    start: float
    end: float
    live: int


def run_in_world(task: Callable[..., Any], config: RunConfig, *args: Any) -> list[Any]:
    """Run task(mesh, train_step, config, *args) on every rank of a new world and return the
    results by rank. Ends the program if a rank fails."""
    ranks = make_world(config)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "megaframe.training.train_step", "megaframe.metrics"])
    port = find_free_port()
    ends: list[Connection] = []
    for rank in range(ranks):
        parent_end, child_end = context.Pipe()
        worker_args = (child_end, rank, port, task, config, *args)
        context.Process(target=_run_rank, args=worker_args, daemon=True).start()
        child_end.close()
        ends.append(parent_end)
    results = []
    for rank, end in enumerate(ends):
        if not end.poll(LIMIT):
            sys.exit(f"rank {rank} of {ranks} gave no answer in {LIMIT:.0f} s")
        try:
            results.append(end.recv())
        except EOFError:
            sys.exit(f"rank {rank} of {ranks} failed; its message is above")
    return results


def make_world(config: RunConfig) -> int:
    """Return the number of ranks of the config's pipelines."""
    return config.parallel.pipeline * (config.parallel.data or 1)


def _run_rank(
    end: Connection, rank: int, port: int, task: Callable[..., Any], config: RunConfig, *args: Any
) -> None:
    """Run one rank: meet the others, do the task, send its result."""
    import torch

    from megaframe.distributed.collectives import barrier
    from megaframe.distributed.mesh import Mesh
    from megaframe.layout import Layout
    from megaframe.metrics import StepTimer
    from megaframe.training.train_step import TrainStep

    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(TIMER_SLACK, 1)
    world = make_world(config)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    mesh = Mesh(Layout.from_parallel(config.parallel, world), device="cpu", timeout=LIMIT)
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(config.run.seed)
    result = task(mesh, train_step, config, *args)
    barrier(mesh.world)  # so that no rank closes a connection that another still uses
    mesh.close()
    end.send(result)


def run_steps(mesh: Mesh, train_step: TrainStep, config: RunConfig, steps: int) -> Steps:
    """Run this rank's part of a few steps. One step before them is not counted; its blocks do not
    wait."""
    import torch

    from megaframe.data.microbatch import Microbatch
    from megaframe.distributed.collectives import barrier
    from megaframe.model.block import EmulatedBlock

    times = config.model.emulate
    assert times is not None, "a benchmark of blocks that wait"
    passes: list[RecordedPass] = []
    units = [block for stage in train_step.stages.values() for block in stage.blocks]
    blocks = [block for block in units if isinstance(block, EmulatedBlock)]
    for block in blocks:
        block.times = EmulationConfig()
    stages = tuple(train_step.stages.values())
    for stage in stages:
        for name in ("forward", "backward", "compute_weight_gradients"):
            setattr(stage, name, _record_passes(getattr(stage, name), stages, passes))
    tokens = torch.zeros((1, config.train.seq), dtype=torch.int64)
    microbatches = [
        Microbatch(tokens, tokens, torch.tensor([number]))
        for number in range(config.train.global_batch // mesh.layout.data)
    ]
    train_step.train(microbatches, 0, 1.0)
    for block in blocks:
        block.times = times
    steps_record = Steps()
    for step in range(1, 1 + steps):
        passes.clear()
        barrier(mesh.world)
        start, busy = time.perf_counter(), time.thread_time()
        train_step.train(microbatches, step, 1.0)
        steps_record.ends.append(time.perf_counter())
        steps_record.busy.append(time.thread_time() - busy)
        steps_record.starts.append(start)
        steps_record.firsts.append(passes[0].start)
        steps_record.lasts.append(passes[-1].end)
        steps_record.live.append(max(interval.live for interval in passes))
    return steps_record


def _record_passes(
    function: Callable[..., Any], stages: Sequence[Stage], into: list[RecordedPass]
) -> Callable[..., Any]:
    """Return `function`, wrapped to record every pass that it runs."""

    @wraps(function)
    def run_and_record(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        end = time.perf_counter()
        into.append(RecordedPass(start, end, sum(stage.live for stage in stages)))
        return result

    return run_and_record


def transfer_seconds(mesh: Mesh, train_step: TrainStep, config: RunConfig) -> float:
    """Return the median seconds from before rank 0 sends an activation until rank 1 has it, or 0 on
    other ranks. Rank 0 sleeps in between, as blocks do."""
    import torch

    from megaframe.distributed.collectives import receive, send

    if mesh.rank > 1:
        return 0.0
    link = mesh.link(0, 1)
    seconds = []
    for _ in range(TRIPS):
        tensor = torch.zeros(1, dtype=torch.float64)
        if mesh.rank == 0:
            time.sleep(REST)
            tensor[0] = time.perf_counter()
            send(tensor, link).wait()
        else:
            received = receive(tensor, link).wait()
            seconds.append(time.perf_counter() - received.item())
    return statistics.median(seconds) if seconds else 0.0
