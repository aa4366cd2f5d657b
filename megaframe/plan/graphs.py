"""Graphs: why the passes of a step cannot be recorded as one graph (`train.cuda_graph`).

What is recorded is done again with the same shapes, in the same memory, without the host. So
nothing in it may depend on a number that the host has to learn on the way, and what changes from
step to step has to reach it as a tensor.

Transfers are recorded like all else. NCCL does those of one communicator in the order in which they
were recorded, on every rank; between several it keeps no order unless told to
(NCCL_LAUNCH_ORDER_IMPLICIT), and two ranks that begin with different ones can wait for each other
forever. Data ranks alone, or tensor ranks alone, have one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megaframe.config.numbers import TIMES
from megaframe.config.schema import RunConfig

_ONE_COMMUNICATOR: tuple[list[str], ...] = ([], ["data"], ["tensor"])


def graph_reasons(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    """What of a config cannot be recorded, with what to use instead. sizes: of the axes."""
    yield from _transfers(config, sizes)
    yield from _experts(config, sizes)
    if config.train.offload:
        yield "train.offload=true copies to memory that the host deals out; use false"


def _transfers(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    parallel, tensor = config.parallel, sizes["tensor"]
    axes = [axis for axis in ("tensor", "context", "data", "pipeline") if sizes[axis] > 1]
    if axes not in _ONE_COMMUNICATOR:
        given = TIMES.join(f"parallel.{axis}={sizes[axis]}" for axis in axes)
        yield (
            f"{given} exchange over several communicators, among which NCCL keeps no order in a "
            "graph; use data ranks alone, or tensor ranks alone"
        )
    if sizes["data_replicate"] > 1:
        yield (
            f"parallel.data_replicate={sizes['data_replicate']} sums over a second communicator; "
            "use 1"
        )
    if config.model.kv_heads and 1 < tensor // config.model.kv_heads < tensor:
        yield (
            f"parallel.tensor={tensor} ranks share model.kv_heads={config.model.kv_heads} over a "
            f"second communicator; use parallel.tensor={config.model.kv_heads} or fewer"
        )
    if axes and config.run.device == "shared":
        yield "run.device=shared exchanges through the host's memory; use cuda"
    if tensor > 1 and parallel.symmetric_memory != "off":
        yield (
            f"parallel.symmetric_memory={parallel.symmetric_memory} has streams of its own; use off"
        )
    if axes and parallel.compress != "none":
        yield (
            f"parallel.compress={parallel.compress} decomposes or sorts by functions of torch of "
            "which it is not known that they never wait for the host; use none"
        )


def _experts(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    moe = config.model.moe
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
    if config.train.precision == "fp64":
        yield "train.precision=fp64 has no grouped product of experts; use bf16 or fp32"
