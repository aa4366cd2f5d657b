"""Pipeline schedules of extensions: named, planned, searched with, and refused where they are not
what they say.

Tests `megaframe.validate.schedule_part`.
"""

import numpy as np
import pytest
from repo_copy import ROOT

from megaframe.config import dump, explain
from megaframe.config.registry import Registry, use_registry
from megaframe.errors import UserError
from megaframe.extensions import load_extensions, load_with_extensions
from megaframe.hardware.cluster import load_cluster
from megaframe.planner.candidates import SearchSpace
from megaframe.planner.constants import get_cluster_constants
from megaframe.planner.layout_search import search
from megaframe.planner.vectorized import estimate
from megaframe.schedule import NAMED_SCHEDULES, PipelineSizes, generate
from megaframe.schedule.event_simulation import count_live_activations
from megaframe.validate.run import validate_config

EXAMPLE = f"run.extensions=[{ROOT / 'examples/schedule.py'}]"
EAGER = [EXAMPLE, "parallel.schedule={kind: eager, apart: 3}", "parallel.pipeline=4"]
MODEL = ["model.layers=8", "model.hidden=64", "model.heads=4", "model.vocab=512", "train.seq=128"]
CLUSTER = load_cluster("h100-ib")

SOURCE = '''
from typing import Literal
import numpy as np
from megaframe.extensions import PipelineSchedulePart
from megaframe.schedule import NAMED_SCHEDULES, Action, ActionKind, ScheduleLimits

OURS = NAMED_SCHEDULES["1f1b"]

class Mine(PipelineSchedulePart):
    kind: Literal["mine"] = "mine"
    """1F1B, but for one fault."""

    def list_actions(self, rank, sizes):
        return OURS.list_actions(rank, sizes)

    def estimate_bubble(self, sizes, forward, backward, weight):
        return OURS.estimate_bubble(sizes, forward, backward, weight)

    def count_live(self, sizes):
        return OURS.count_live(sizes)

FAULT

def register(registry):
    registry.register(Mine)
'''
FAULTS = {
    "": "",
    "Mine.limits = ScheduleLimits(1, 2)": "parallel.chunks=2 and 1 microbatch, which its limits "
    "allow, ranks have 1 stages",
    "Mine.placement = 'vee'": "placement is 'vee', but rank 0 has the first stage and rank 1 the "
    "last one",
    "Mine.list_actions = lambda self, rank, sizes: OURS.list_actions(rank, sizes)[::-1]": "it "
    "cannot run: schedule: 0B0 stands before 0F0",
    "Mine.list_actions = lambda self, rank, sizes: OURS.list_actions(0, sizes)": "it cannot run: "
    "schedule: 0F0 is on rank",
    """
def deadlock(self, rank, sizes):
    actions = OURS.list_actions(rank, sizes)
    late = actions.index(Action(ActionKind.F, rank, sizes.microbatches - 1))
    return actions if rank else [*actions[:late], *actions[late + 1:], actions[late]]
Mine.list_actions = deadlock
""": "it cannot run: schedule: 0B",
    "Mine.count_live = lambda self, sizes: 1": "Mine.count_live",
    "Mine.estimate_bubble = lambda self, *a: 9 * OURS.estimate_bubble(*a)": "says 81 s with "
    "parallel.pipeline=2, parallel.chunks=1, 1 microbatches and F=3, B=4, W=2, but a rank is idle "
    "for 9 s",
    "Mine.count_live = lambda self, sizes: min(sizes.ranks, sizes.microbatches)": "fails at",
    "Mine.list_actions = lambda self, rank, sizes: [1 / 0]": "fails at",
    "Mine.list_actions = lambda self, rank, sizes: ['0F0']": "returns 0F0, which is no F, B or W",
}


@pytest.fixture(autouse=True)
def registry():
    with use_registry(Registry()):
        yield


def write(folder, fault):
    path = folder / "mine.py"
    path.write_text(SOURCE.replace("FAULT", fault))
    return f"run.extensions=[{path}]"


def test_it_is_given_by_name_or_with_keys_and_documented():
    config = load_with_extensions(None, [*EAGER, *MODEL])
    assert config.parallel.schedule.apart == 3
    assert "kind: eager" in dump(config)
    assert type(config).model_validate(config.model_dump(mode="json")) == config
    assert (
        load_with_extensions(None, [EXAMPLE, "parallel.schedule=eager"]).parallel.schedule.apart
        == 2
    )
    assert "parallel.schedule[eager].apart\n  Forwards by which" in explain("parallel.schedule")
    with pytest.raises(UserError, match="a whole number from 1 to 8"):
        load_with_extensions(None, [EXAMPLE, "parallel.schedule={kind: eager, apart: 9}"])
    mistaken = load_with_extensions(None, [EXAMPLE, *MODEL, "parallel.schedule=eeger"])
    with pytest.raises(UserError, match=r"is not one of gpipe, .*eager.* did you mean eager\?"):
        validate_config(mistaken, 1, data=False)


def test_with_neighbours_one_apart_it_is_1f1b():
    load_extensions(None, [EXAMPLE])
    eager = load_with_extensions(None, [EXAMPLE, "parallel.schedule={kind: eager, apart: 1}"])
    assert generate(eager.parallel.schedule, 4, 1, 6) == generate("1f1b", 4, 1, 6)


@pytest.mark.parametrize("fault", FAULTS, ids=range(len(FAULTS)))
def test_a_fault_is_one_message_before_a_run_and_a_plan(fault, tmp_path):
    config = load_with_extensions(
        None, [write(tmp_path, fault), *MODEL, "parallel.schedule=mine", "parallel.pipeline=2"]
    )
    if not fault:
        return validate_config(config, 2, data=False)
    with pytest.raises(UserError) as refused:
        validate_config(config, 2, data=False)
    message = str(refused.value)
    assert FAULTS[fault] in message and "parallel.schedule=mine: " in message
    with pytest.raises(UserError) as planned:
        SearchSpace(config, 8, CLUSTER).list_candidates()
    assert str(planned.value) in message


def test_a_search_reads_bubble_and_memory_from_it():
    """The layouts of `eager` cost what those of 1f1b do, but for the memory of more activations."""
    config = load_with_extensions(None, [*EAGER, *MODEL, "train.global_batch=64"])
    constants = get_cluster_constants(CLUSTER)
    tables = {}
    for schedule in (config.parallel.schedule, "1f1b"):
        fixed = {
            "schedule": schedule,
            "pipeline": 4,
            "tensor": 1,
            "context": 1,
            "recompute": "none",
        }
        space = SearchSpace(config, 8, CLUSTER, fixed)
        candidates = space.list_candidates()
        assert {candidates.get_schedule(row).name for row in range(len(candidates))} == {
            getattr(schedule, "name", schedule)
        }
        assert space.make_config(candidates, 0).parallel.schedule == schedule
        tables[str(schedule)] = estimate(space, constants, candidates)
    eager, ours = tables.values()
    assert np.allclose(eager.step_seconds, ours.step_seconds)
    assert (eager.memory_bytes >= ours.memory_bytes).all()
    assert (eager.memory_bytes > ours.memory_bytes).any()


def test_a_search_tries_registered_schedules_and_simulates_the_best():
    config = load_with_extensions(None, [EXAMPLE, *MODEL, "train.global_batch=16"])
    every = SearchSpace(config, 8, CLUSTER).list_candidates()
    names = {every.get_schedule(row).name for row in range(len(every))}
    assert names - {*NAMED_SCHEDULES} == {"eager"}
    eager = load_with_extensions(None, [*EAGER, *MODEL]).parallel.schedule
    fixed = {"schedule": eager, "pipeline": 4}
    result = search(SearchSpace(config, 8, CLUSTER, fixed), get_cluster_constants(CLUSTER))
    best = result.best.config.parallel
    assert best.schedule == eager and best.pipeline == 4
    live = count_live_activations(generate(best.schedule, 4, 1, 16))
    assert max(live) == eager.count_live(PipelineSizes(4, 1, 16)) == 10
