"""Groups that are split from one communicator: each of their ranks must have equally many groups
at that time, or torch would name the group differently on them."""

import pytest
import torch.distributed as dist
from patience import PATIENCE

from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics.timers import StepTimer
from megaframe.training.train_step import TrainStep

MODEL = {"layers": 8, "hidden": 16, "heads": 4, "vocab": 37, "tie_embeddings": True}
EXPERTS = {"moe": {"experts": 4, "top_k": 2, "ffn": 8}}


class Counting(Mesh):
    """Records, for each group that would be split, its ranks, how many groups this rank has, and
    its name."""

    def _make_handles(self, members, backend, name, *, link=False):
        known = len(dist.distributed_c10d._world.pg_names)
        made = super()._make_handles(members, backend, name, link=link)
        if backend is None and not link:
            mine = [ranks for ranks in members if self.rank in ranks]
            self.splits = [*getattr(self, "splits", []), (mine, known, len(members), name)]
        return made


def make_groups(config):
    mesh = Counting(Layout.from_parallel(config.parallel, 4), device="cpu", timeout=PATIENCE)
    TrainStep(config, mesh, StepTimer().time)
    mesh.finish()
    return mesh.splits


@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ({"pipeline": 4}, {}),
        ({"pipeline": 2, "tensor": 2}, {"kv_heads": 1}),
        ({"context": 4, "context_kind": "nested", "context_heads": 2}, {}),
        ({"data_replicate": 2, "zero": 2}, {}),
        ({"expert": 2, "pipeline": 2}, EXPERTS),
        ({"expert": 2, "expert_tensor": 2}, EXPERTS),
    ],
)
def test_all_ranks_of_a_split_have_equally_many_groups(parallel, model, pool):
    train = {"seq": 16, "global_batch": 8, "microbatch": 1, "precision": "fp64"}
    config = RunConfig(model={**MODEL, **model}, train=train, parallel=parallel)
    splits = pool.run(4, make_groups, config)
    for calls in zip(*splits, strict=True):
        groups, known, count, _ = zip(*calls, strict=True)
        assert len({*known}) == 1 and len({*count}) == 1, calls
        assert count[0] == 0 or all(len(own_groups) == 1 for own_groups in groups)
