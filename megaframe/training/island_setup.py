"""Builds what synchronises a run's weights with other islands: ranks of the same run, or, with a
server, runs of their own."""

from __future__ import annotations

from collections.abc import Sequence

from megaframe.config import RunConfig
from megaframe.data_parallel.sharded_parameters import ShardedParameters
from megaframe.distributed.mesh import Mesh
from megaframe.optim.islands import IslandSync
from megaframe.optim.optimizer import Optimizer
from megaframe.optim.outer_step import GroupOuterStep, OuterStep, SpanShape
from megaframe.optim.parameter_server.coordinator import describe_model
from megaframe.optim.parameter_server.ray_actors import RayServer
from megaframe.optim.parameter_server.server_outer_step import ServerConnection, ServerOuterStep


def make_island_sync(
    config: RunConfig,
    mesh: Mesh,
    parameters: ShardedParameters,
    optimizer: Optimizer,
    server: ServerConnection | None = None,
) -> IslandSync | None:
    """Return what synchronises this rank's weights; None if there is one island.

    Args:
        config: The run.
        mesh: This rank's groups.
        parameters: The buckets of the weights.
        optimizer: Updates them.
        server: In place of the one that `sync.server` names.
    """
    sync, counterparts = config.sync, mesh.group("islands")
    if not config.trains_in_islands:
        return None

    def make_outer_step(spans: Sequence[SpanShape]) -> OuterStep:
        if sync.server is None:
            return GroupOuterStep(sync, counterparts, spans, parameters.buffers)
        mesh.count_exchanges_of_runs("islands")
        return ServerOuterStep(
            sync,
            server or RayServer(sync, config.parallel.timeout),
            mesh.make_control_group(watched=True),
            counterparts,
            spans,
            describe_model(config),
        )

    return IslandSync(sync, config.train.steps, parameters, optimizer, make_outer_step)
