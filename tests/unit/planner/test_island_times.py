"""What islands send and wait for, by hand: on a link so slow that nothing else matters
(`megaframe/planner/island_times.py`, `megaframe/planner/island_advice.py`)."""

import re
from dataclasses import replace

import pytest

from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.planner.communication_volume import compute_communication_bytes
from megaframe.planner.constants import get_cluster_constants, get_family_constants
from megaframe.planner.island_advice import list_reasons, propose_islands
from megaframe.planner.layout_search import LayoutChoice
from megaframe.planner.memory import compute_rank_memory
from megaframe.planner.parameter_counts import count_model_parameters
from megaframe.planner.prediction import predict
from megaframe.schedule import generate

GPT = {"layers": 8, "hidden": 1024, "heads": 8, "vocab": 32000}
H100 = load_cluster("h100-ib")
SLOW = 25e6
"""bytes/s: 200 Mbit/s."""
SITES = replace(
    H100,
    tiers=(H100.tiers[0], replace(H100.tiers[1], bandwidth=SLOW, latency=0.0)),
    jitter=0.0,
)
"""Nodes of eight GPUs, each a site of its own."""


def predict_step(count=2, world=16, zero=1, **sync):
    config = RunConfig(
        model=GPT,
        train={"seq": 2048, "global_batch": 512, "microbatch": 8},
        parallel={"islands": count, "zero": zero},
        sync=sync,
    )
    layout = Layout.from_parallel(config.parallel, world)
    constants = get_family_constants("h100")
    return config, layout, predict(config, layout, SITES, constants)


def find_sentence(prediction):
    return next(reason for reason in prediction.reasons if "islands synchronise" in reason)


def test_an_interval_divides_what_a_synchronisation_takes():
    config, layout, often = predict_step(every=10)
    seldom = predict_step(every=1000)[2]
    assert often.breakdown["islands"] == pytest.approx(100 * seldom.breakdown["islands"])
    own = count_model_parameters(config.model, config.train).total / 8
    # Half of fp32 to the other island, and half of the sums back, at the speed of the link.
    (share,) = {get_family_constants("h100").links[-1]}
    expected = 4 * own / (SLOW * share) / 10
    assert often.breakdown["islands"] == pytest.approx(expected, rel=0.02)
    sentence = find_sentence(often)
    assert f"a rank sends {4 * own / 1e6:.3g} MB each time" in sentence
    per_token = 4 * own * 16 / 10 / (512 * 2048)
    assert f"{per_token:.3g} bytes per token" in sentence
    assert "from sync.every=" in sentence or "sync.delay=" in sentence
    traffic = compute_communication_bytes(config, layout, plan_stages(config), ())
    assert traffic["islands"] == pytest.approx(4 * own / 10, rel=0.01)


def test_four_bits_and_steps_meanwhile_hide_it():
    plain = predict_step(every=100)[2].breakdown["islands"]
    packed = predict_step(every=100, compress="int4")[2].breakdown["islands"]
    assert packed == pytest.approx(plain * (0.5 + 4 / 128) / 4)
    hidden = predict_step(every=100, compress="int4", delay=99)[2]
    assert hidden.breakdown["islands"] == 0
    assert find_sentence(hidden).endswith("waits 0.0% of the time")


def test_a_server_is_sent_all_and_sends_all_back():
    """It has the momentum, so an island keeps the synchronised weights and what it sends."""
    sync = {"server": "s", "islands": 4, "every": 10}
    config, layout, prediction = predict_step(1, 8, **sync)
    own = count_model_parameters(config.model, config.train).total / 8
    (share,) = {get_family_constants("h100").links[-1]}
    expected = 2 * 4 * own / (SLOW * share) / 10
    assert prediction.breakdown["islands"] == pytest.approx(expected, rel=0.02)
    sentence = find_sentence(prediction)
    assert sentence.startswith("4 islands synchronise every 10 steps over")
    assert f"with server s: a rank sends {4 * own / 1e6:.3g} MB each time" in sentence
    assert "from sync.every=" in sentence or "sync.delay=" in sentence
    traffic = compute_communication_bytes(config, layout, plan_stages(config), ())
    assert traffic["islands"] == pytest.approx(4 * own / 10, rel=0.01)
    schedule = generate("1f1b", 1, 1, 2)
    memory = compute_rank_memory(config, layout, plan_stages(config), schedule, 0)
    assert memory.islands == pytest.approx(2 * 4 * own, rel=1e-4)


def test_one_island_has_nothing_of_it():
    config, layout, alone = predict_step(count=1)
    assert "islands" not in alone.breakdown
    assert "islands" not in compute_communication_bytes(config, layout, plan_stages(config), ())


def test_outer_state_takes_memory_at_any_zero_stage():
    """Weights and momentum in fp32, a residual, and a fragment on its way."""
    for zero in (0, 3):
        config, layout, _ = predict_step(zero=zero, compress="int8", fragments=4)
        schedule = generate("1f1b", 1, 1, 2)
        memory = compute_rank_memory(config, layout, plan_stages(config), schedule, 0)
        own = count_model_parameters(config.model, config.train).total / 8
        assert memory.islands == pytest.approx(3.25 * 4 * own, rel=1e-4)


def choose(cluster, islands=1, world=64, model=GPT, **parallel):
    train = {"seq": 2048, "global_batch": 512, "microbatch": 8}
    keys = {"islands": islands, "zero": 1, **parallel}
    config = RunConfig(model=model, train=train, parallel=keys, optim={"lr": 1e-3})
    layout = Layout.from_parallel(config.parallel, world)
    prediction = predict(config, layout, cluster, get_cluster_constants(cluster))
    return LayoutChoice(config, layout, prediction)


@pytest.mark.parametrize(
    ("parallel", "islands"),
    [({}, 8), ({"tensor": 8}, 8), ({"pipeline": 4}, 8), ({"data_replicate": 4}, 8)],
)
def test_islands_are_proposed_within_the_fast_tier(parallel, islands):
    choice = choose(SITES, **parallel)
    text = propose_islands(choice, SITES)
    keys = dict(re.findall(r"sync\.(\w+)=(\w+)", text.partition(" a step would")[0]))
    sync = {"compress": keys["compress"], "every": int(keys["every"]), "delay": int(keys["delay"])}
    assert f"parallel.islands={islands}," in text
    proposed = {"islands": islands, "data_replicate": 1}
    config = choice.config.replace(parallel=proposed, sync=sync)
    layout = Layout.from_parallel(config.parallel, 64)
    promised = predict(config, layout, SITES, get_cluster_constants(SITES)).step_seconds
    assert f"{promised:.3g} s, {choice.prediction.step_seconds / promised:.3g} times" in text
    assert "waits 0.0% of the time" in text and SITES.tiers[1].name in text


def test_nothing_is_proposed_where_it_would_not_help():
    assert propose_islands(choose(H100), H100) is None
    assert propose_islands(choose(SITES, islands=8), SITES) is None
    # The 16 data ranks of a stage have two copies of the experts, and would be eight islands.
    experts = {**GPT, "moe": {"experts": 8, "ffn": 512}}
    assert propose_islands(choose(SITES, model=experts, pipeline=4, expert=8), SITES) is None
    choice = choose(SITES)
    averaged = choice.config.replace(optim={"ema": 0.9})  # needs one island
    assert propose_islands(replace(choice, config=averaged), SITES) is None
    assert list(list_reasons(choose(H100), H100)) == list(choose(H100).prediction.reasons)
