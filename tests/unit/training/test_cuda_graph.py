"""CUDA graphs of a run: how many it keeps, when it drops them, what watch and metrics are told, and
where graphs are refused. parity/test_cuda_graph_replay.py tests the results of recorded steps.
"""

import pytest
import torch
from parity_runs import MODELS, run

from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.mesh import Mesh
from megaframe.distributed.nccl_settings import (
    _LAUNCH_ORDER,
    keep_launch_order,
    launch_order_problem,
)
from megaframe.distributed.rank_progress import RankProgress
from megaframe.distributed.traffic import Traffic, capture_transfers
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.pipeline_parallel.executor import PipelineOutput
from megaframe.training.cuda_graph import _EAGER, _MOST, StepGraph
from megaframe.validate.run import validate_config


def test_shapes_that_keep_changing_are_said_once_and_graphs_go_before_groups_end():
    messages, mesh = [], Mesh(Layout(), device="cpu")
    nothing = PipelineOutput(torch.zeros(()), torch.zeros(()), [], [])
    graph = StepGraph(mesh, messages.append, lambda compute: (compute(), lambda: None))
    for length in range(_MOST + 3):
        x = torch.zeros(1, length, dtype=torch.int64)
        for times in range(_EAGER + 1):
            graph.run(lambda *_: nothing, [Microbatch(x, x, x[0])], torch.tensor(float(times)))
    assert len(graph._graphs) == _MOST and len(messages) == 1
    assert "some steps run without one" in messages[0]
    mesh.finish()
    assert not graph._graphs


class Waiting:
    def describe_wait(self):
        return "all_reduce over data with rank 1"


class Mark:
    def query(self):
        return False


def test_of_what_is_recorded_others_are_told_when_it_runs():
    progress, traffic, waits = RankProgress(), Traffic(), []
    progress.record_event = Mark
    progress.begin_activity("step 7")
    progress.begin_part("data", None)
    with capture_transfers("the graph", progress, [traffic]) as recording:
        progress.begin_part("", "0F0")
        traffic.count(100)
        progress.record_device_wait(Waiting(), lambda: waits.append(1))
        progress.begin_part("", "0B0")
    assert not progress._device_work and traffic.take() == (0, 0) and not waits
    for _ in range(2):
        recording.replay(lambda: None)
        assert traffic.take() == (100, 1)
    progress._device_work.popleft()  # the work before the graph
    progress.begin_part("", "UPDATE")
    waiting = "waiting in all_reduce over data with rank 1"
    assert str(progress.read_status(0)) == f"step 7, the graph on its device, {waiting}"


@pytest.mark.parametrize(
    ("world", "sections", "reasons"),
    [
        (2, {"parallel": {"pipeline": 2}}, ["pipeline=2 sends"]),
        (4, {"parallel": {"context": 2, "tensor": 2}}, ["context=2 sends"]),
        (2, {"parallel": {"tensor": 2, "symmetric_memory": "auto"}}, ["symmetric_memory=auto"]),
        (2, {"parallel": {"compress": "topk"}}, ["compress=topk"]),
        (2, {"run": {"device": "shared"}}, ["run.device=shared"]),
        (1, {"train": {"offload": True, "recompute": "full"}}, ["train.offload=true"]),
        (
            2,
            {
                "model": {"moe": {"experts": 2, "top_k": 1, "normalise": False, "capacity": 1.0}},
                "parallel": {"expert": 2},
            },
            ["expert=2: the host waits", "capacity=1"],
        ),
    ],
)
def test_where_a_graph_cannot_work_it_is_refused(world, sections, reasons):
    model = {"vocab": 128, "heads": 4, "hidden": 64, **sections.get("model", {})}
    train = {"global_batch": 8, **sections.get("train", {})}

    def config(graph):
        return RunConfig(**{**sections, "model": model, "train": {**train, "cuda_graph": graph}})

    validate_config(config(False), world, data=False)
    with pytest.raises(UserError) as error:
        validate_config(config(True), world, data=False)
    lines = str(error.value).splitlines()[1:]
    for line, reason in zip(lines, reasons, strict=True):
        assert "train.cuda_graph=true cannot work here: " in line and reason in line
        assert "; use " in line or "; leave it out" in line


def test_what_a_graph_can_hold_is_not_refused():
    moe = {"experts": 2, "top_k": 1, "normalise": False}
    model = {"vocab": 128, "heads": 4, "hidden": 64, "dropout": 0.1, "moe": moe}
    train = {"cuda_graph": True, "global_batch": 8}
    for parallel in ({"zero": 3}, {"tensor": 2}, {"data_replicate": 2, "zero": 2}):
        config = RunConfig(
            model=model, train=train, parallel=parallel, data={"reset_attention": True}
        )
        validate_config(config, 4, data=False)


def test_several_communicators_need_an_order_of_nccl(monkeypatch):
    monkeypatch.setenv(_LAUNCH_ORDER, "0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    keep_launch_order()
    assert launch_order_problem().endswith(
        "with NCCL_LAUNCH_ORDER_IMPLICIT=0; use NCCL_LAUNCH_ORDER_IMPLICIT=1"
    )
    monkeypatch.delenv(_LAUNCH_ORDER)
    assert "IMPLICIT=; use" in launch_order_problem()
    keep_launch_order()
    assert launch_order_problem() is None
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 25, 1))
    assert launch_order_problem() == "NCCL 2.25.1 keeps no order among them; use NCCL 2.26 or later"


def test_a_run_on_a_cpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("says of a machine without a GPU what it lacks")
    with pytest.raises(UserError, match=r"train\.cuda_graph=true cannot work here\n  CUDA graphs"):
        run(MODELS["llama"], {"cuda_graph": True})
    with pytest.raises(UserError, match=r"of kernels\.experts"):
        moe = {"moe": {"experts": 2, "top_k": 1, "normalise": False}}
        run(moe, {"cuda_graph": True, "precision": "fp32"})
    with pytest.raises(UserError, match=r"of kernels\.experts\n.* of kernels\.fp8"):
        run(moe, {"cuda_graph": True, "precision": "fp32", "fp8": "row"})
