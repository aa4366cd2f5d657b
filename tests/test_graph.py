"""A step that is recorded once and run again gives the same bits as one that is told anew, whatever
tokens it is given; and it is refused where it cannot work. Recording is torch's; here the function
is called again in its place, into the same memory.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "parity"))
import training
from training import MODELS, assert_same_bits, run

from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.graph import _EAGER, _MOST, Graph, refuse
from megaframe.layout import Layout
from megaframe.pipeline import Pipeline


def record(compute):
    """Runs a function again, and puts what comes of it where it was the first time."""
    passed = compute()

    def again():
        made = compute()
        for old, new in zip(numbers(passed), numbers(made), strict=True):
            old.copy_(new)

    return passed, again


def numbers(passed):
    return [passed.loss, passed.ahead, *(sign.largest for sign in passed.signs)]


def run_recorded(monkeypatch, *given):
    """`run`, each step by a graph where there is one -> result, lines told."""
    graphs, told, init = [], [], Pipeline.__init__

    def with_graph(self, *arguments):
        init(self, *arguments)
        self._engine.graph = Graph(told.append, record)
        graphs.append(self._engine.graph)

    monkeypatch.setattr(Pipeline, "__init__", with_graph)
    result = run(*given)
    monkeypatch.setattr(Pipeline, "__init__", init)
    return result, graphs[0], told


def test_a_recorded_step_is_the_same_to_the_bit(monkeypatch):
    monkeypatch.setattr(training, "STEPS", _EAGER + 3)
    batch = training.global_batch

    def whole(config, step):  # every step has as many valid tokens
        made = batch(config, step)
        return replace(made, labels_BS=made.labels_BS.clamp_min(0))

    monkeypatch.setattr(training, "global_batch", whole)
    model = {**MODELS["llama"], "mtp_depth": 1}
    plain = run(model, {"microbatch": 4})
    result, graph, told = run_recorded(monkeypatch, model, {"microbatch": 4})
    assert_same_bits([result], [plain])
    assert len(graph._recorded) == 1 and not told


def test_a_scale_that_keeps_changing_is_said_once(monkeypatch):
    told = []
    graph = Graph(told.append, lambda compute: (compute(), lambda: None))
    for scale in range(_MOST + 3):
        for _ in range(_EAGER + 1):
            graph.run(lambda _: Nothing(), [], float(scale))
    assert len(graph._recorded) == _MOST and len(told) == 1
    assert "some steps run without one" in told[0]


class Nothing:
    def copied(self):
        return self


@pytest.mark.parametrize(
    ("sections", "layout", "reasons"),
    [
        ({}, Layout(), ["runs on a cpu"]),
        ({"model": {"dropout": 0.1, "moe": {"experts": 2, "top_k": 1}}}, Layout(), ["moe", "0.1"]),
        ({"train": {"offload": True}}, Layout(data=2), ["2 ranks", "train.offload"]),
    ],
)
def test_where_a_graph_cannot_work_it_is_refused(sections, layout, reasons):
    with pytest.raises(UserError) as error:
        refuse(RunConfig(**sections), layout, torch.device("cpu"))
    for reason in ["CUDA graphs need a GPU", *reasons]:
        assert reason in str(error.value)


def test_a_run_on_a_cpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("says of a machine without a GPU what it lacks")
    with pytest.raises(UserError, match=r"train\.cuda_graph=true cannot work here\n  CUDA graphs"):
        run(MODELS["llama"], {"cuda_graph": True})
