"""The number of communicators by the config against those that a mesh and a pipeline make."""

import pytest
from patience import PATIENCE

from megaframe.architecture.cuda_streams import count_communicators, count_streams
from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics.timers import StepTimer
from megaframe.training.measured_stages import decide_stages
from megaframe.training.train_step import TrainStep

MODEL = {"layers": 8, "hidden": 16, "heads": 4, "vocab": 37}
EXPERTS = {"moe": {"experts": 4, "top_k": 2, "ffn": 8}}


def count_groups(config):
    """Return how many communicators this rank is in."""
    mesh = Mesh(Layout.from_parallel(config.parallel, 4), device="cpu", timeout=PATIENCE)
    config, _ = decide_stages(config, mesh)
    TrainStep(config, mesh, StepTimer().time)
    num_communicators = mesh.num_communicators
    mesh.finish()
    return num_communicators


def make_config(parallel, model, noise=False):
    train = {"seq": 16, "global_batch": 8, "microbatch": 1, "precision": "fp64"}
    metrics = {"gradient_noise_every": int(noise)}
    return RunConfig(model={**MODEL, **model}, train=train, parallel=parallel, metrics=metrics)


MEASURED = {"layers_per_stage": "measured"}


@pytest.mark.parametrize(
    ("parallel", "model", "spare"),
    [
        ({}, {}, 0),
        ({"pipeline": 4}, {"tie_embeddings": True}, 0),
        ({"pipeline": 4, "chunks": 2, "schedule": "interleaved"}, {}, 0),
        ({"pipeline": 2, "chunks": 2, "schedule": "zb-v"}, {"tie_embeddings": True}, 0),
        ({"tensor": 2, "pipeline": 2}, {"kv_heads": 1}, 1),
        ({"context": 4}, {}, 0),
        ({"context": 4, "context_kind": "nested", "context_heads": 2}, {}, 0),
        ({"context": 2, "data_replicate": 2, "zero": 2}, {}, 0),
        ({"reduce_precision": "bf16", "node_size": 2}, {}, 1),
        ({"expert": 4}, EXPERTS, 3),
        ({"expert": 2, "expert_tensor": 2}, EXPERTS, 3),
        ({"context": 2, "pipeline": 2, **MEASURED}, {}, 0),
        ({"expert": 2, "pipeline": 2, **MEASURED}, EXPERTS, 4),
    ],
)
def test_no_rank_is_in_more_communicators(parallel, model, spare, pool):
    """spare: how many are counted that there are not, because their ranks happen to be those of
    another one."""
    config = make_config(parallel, model)
    counted = count_communicators(config.model, config.parallel, 4)
    most = max(pool.run(4, count_groups, config))
    assert most + spare == counted


@pytest.mark.parametrize(
    ("parallel", "spare"), [({"context": 2, "zero": 3}, 0), ({"tensor": 2}, 2), ({}, 0)]
)
def test_no_rank_is_in_more_communicators_while_noise_is_measured(parallel, spare, pool):
    config = make_config(parallel, {}, noise=True)
    counted = count_communicators(config.model, config.parallel, 4, noise=True)
    assert max(pool.run(4, count_groups, config)) + spare == counted


def test_streams_are_those_of_communicators_products_and_copies():
    config = make_config({"context": 4}, {})
    assert count_streams(config, 4) == count_communicators(config.model, config.parallel, 4) + 3
    offloaded = config.model_copy(
        update={"optim": config.optim.model_copy(update={"offload": True})}
    )
    assert count_streams(offloaded, 4) == count_communicators(config.model, config.parallel, 4) + 5
    assert count_streams(make_config({"auto": True}, {}), 4) is None
