"""Graphs: why the passes of a step cannot be recorded as one graph (`train.cuda_graph`).

A graph repeats the recorded work with the same shapes, in the same memory, without the host. So
nothing in it may depend on a number that the host has to read from the device on the way, and what
changes from step to step has to reach it as a tensor.

Collectives are recorded like all other work, in the same order on every rank, and NCCL starts them
in that order (`distributed/traffic.py`). Messages between two ranks are not recorded: torch's
flight recorder keeps their events and would query them later, which is not allowed for events of a
graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.config.schema import RunConfig, RunSection, TrainConfig


def find_graph_obstacles(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield what in a config cannot be recorded, with what to use instead.

    Args:
        config: The config of the run.
        sizes: Size of each axis.
    """
    yield from _find_transfer_obstacles(config.run, config.parallel, sizes)
    yield from _find_expert_obstacles(config.model, config.train, sizes)
    if config.train.offload:
        yield "train.offload=true copies to memory that the host deals out; use false"


def _find_transfer_obstacles(
    run: RunSection, parallel: ParallelConfig, sizes: Mapping[str, int]
) -> Iterator[str]:
    tensor = sizes["tensor"]
    several = any(sizes[axis] > 1 for axis in ("tensor", "context", "data", "pipeline"))
    for axis in ("context", "pipeline"):
        if sizes[axis] > 1:
            yield (
                f"parallel.{axis}={sizes[axis]} sends messages between two ranks, whose events "
                "torch's flight recorder would query later; use data and tensor ranks"
            )
    if several and run.device == "shared":
        yield "run.device=shared exchanges through the host's memory; use cuda"
    if tensor > 1 and parallel.symmetric_memory != "off":
        yield (
            f"parallel.symmetric_memory={parallel.symmetric_memory} has streams of its own; use off"
        )
    if several and parallel.compress != "none":
        yield (
            f"parallel.compress={parallel.compress} decomposes or sorts by functions of torch of "
            "which it is not known that they never wait for the host; use none"
        )


def _find_expert_obstacles(
    model: ModelConfig, train: TrainConfig, sizes: Mapping[str, int]
) -> Iterator[str]:
    moe = model.moe
    if moe is None:
        return
    for axis in ("expert", "expert_tensor"):
        if sizes[axis] > 1:
            yield (
                f"parallel.{axis}={sizes[axis]}: the host waits for the number of tokens from each "
                "rank; use 1"
            )
    if moe.capacity is not None:
        yield (
            f"model.moe.capacity={moe.capacity:g}: the host waits for the number of choices that "
            "are dropped; leave it out"
        )
    if train.precision == "fp64":
        yield "train.precision=fp64 has no grouped product of experts; use bf16 or fp32"
