"""What an update takes for itself, against the most that a rank holds in a step of few tokens."""

import pytest
from slow_cases import slow

from megaframe.config import RunConfig
from megaframe.layout import Layout
from megaframe.training.meta_step import run_meta_step
from megaframe.training.meta_step.compare import compare_with_plan

PARALLEL = [(1, {"zero": 1}), (4, {"zero": 1}), slow(4, {"zero": 0}), slow(2, {"zero": 3})]


def compare(optim, world, parallel):
    """Return the most bytes beside weights, gradients and state, counted and planned."""
    config = RunConfig(
        model={"layers": 2, "hidden": 256, "heads": 4, "vocab": 64},
        train={"seq": 8, "global_batch": 4, "microbatch": 1, "precision": "bf16"},
        parallel={"bucket_size": 1, **parallel},
        optim=optim,
    )
    layout = Layout.from_parallel(config.parallel, world)
    rows = compare_with_plan(config, layout, 0, run_meta_step(config, layout, 0))
    of = {row.name: row for row in rows}
    kept = [of["weights, values, gradients"], of["optimizer"]]
    most = of["most at a time"]
    return most.counted - sum(row.counted for row in kept), most.planned - sum(
        row.planned for row in kept
    )


@pytest.mark.parametrize(
    "optim",
    [
        {"state": "bf16"},
        {"name": "lion", "state": "int8"},
        slow({"state": "int8", "ema": 0.9}),
        slow({"name": "sgd", "state": "int8"}),
    ],
)
@pytest.mark.parametrize(("world", "parallel"), PARALLEL)
def test_moments_in_fewer_bits_are_decoded_a_chunk_at_a_time(optim, world, parallel):
    counted, planned = compare(optim, world, parallel)
    assert counted == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize(("world", "parallel"), PARALLEL)
def test_muon_has_copies_of_a_bucket(world, parallel):
    counted, planned = compare({"name": "muon"}, world, parallel)
    assert 0.75 * planned <= counted <= 1.05 * planned
