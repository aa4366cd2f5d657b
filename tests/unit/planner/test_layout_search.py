"""The layout search: every candidate is valid, estimates agree with simulation, no random candidate
beats the first choice, and a model that fits nowhere gets advice.

Tests `megaframe.planner.memory_estimates`.
"""

import random

import numpy as np
import pytest
from slow_cases import mark_slow, slow

from megaframe.config import RunConfig, dump, load
from megaframe.errors import UserError
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.planner.advice import describe_alternatives, describe_decision
from megaframe.planner.candidates import SearchSpace
from megaframe.planner.constants import get_family_constants
from megaframe.planner.fit import compute_fit, suggest_changes
from megaframe.planner.layout_search import search
from megaframe.planner.peak_memory import fits_with_margin
from megaframe.planner.prediction import predict
from megaframe.planner.vectorized import estimate
from megaframe.validate.run import validate_config

DENSE = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "norm": "rmsnorm",
    "activation": "swiglu",
}
MOE = {**DENSE, "layers": 24, "hidden": 2048, "moe": {"experts": 64, "ffn": 1408, "top_k": 6}}
TIED = {**DENSE, "layers": 13, "kv_heads": 32, "tie_embeddings": True, "position": "learned"}
WORLDS = [(DENSE, 64, 256), (DENSE, 96, 192), (MOE, 64, 512), (TIED, 32, 64)]
CLUSTER = load_cluster("h100-ib")
CONSTANTS = get_family_constants("h100")


def make_config(model, batch, seq=4096, **sections):
    train = {"seq": seq, "global_batch": batch, "steps": 1000}
    return RunConfig(model=model, train=train, **sections)


def draw_places(many, some):
    return random.Random(0).sample(range(many), min(some, many))


@pytest.mark.parametrize(("model", "gpus", "batch"), mark_slow(WORLDS, except_for=WORLDS[:2]))
def test_every_candidate_is_a_config_that_runs(model, gpus, batch):
    config = make_config(model, batch)
    space = SearchSpace(config, gpus, CLUSTER)
    candidates = space.list_candidates()
    assert len(candidates) > 1000
    for place in draw_places(len(candidates), 60):
        chosen = space.make_config(candidates, place)
        validate_config(chosen, gpus, data=False)
        assert Layout.from_parallel(chosen.parallel, gpus).world == gpus
    table = np.stack([*candidates.columns.values()])
    assert np.unique(table, axis=1).shape[1] == len(candidates)


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "sections"),
    [
        *(slow(*WORLDS[0], {}), slow(*WORLDS[1], {}), slow(*WORLDS[2], {}), slow(*WORLDS[3], {})),
        slow({**DENSE, "window": [1024] * 5 + [None]}, 64, 256, {}),
        (*WORLDS[1], {"optim": {"offload": True}}),
        slow(*WORLDS[1], {"optim": {"name": "muon"}}),
        (*WORLDS[1], {"parallel": {"compress": "topk"}}),
    ],
)
def test_estimates_are_what_simulation_says(model, gpus, batch, sections):
    config = make_config(model, batch, **sections)
    space = SearchSpace(config, gpus, CLUSTER)
    candidates = space.list_candidates()
    candidates = candidates.select(np.array(draw_places(len(candidates), 30)))
    estimated = estimate(space, CONSTANTS, candidates)
    seconds, sizes = [], []
    for place in range(len(candidates)):
        chosen = space.make_config(candidates, place)
        exact = predict(chosen, Layout.from_parallel(chosen.parallel, gpus), CLUSTER, CONSTANTS)
        seconds.append(float(estimated.step_seconds[place]) / exact.step_seconds - 1)
        sizes.append(float(estimated.memory_bytes[place]) / sum(exact.memory_bytes.values()) - 1)
    assert np.mean(np.abs(seconds)) < 0.05
    assert np.mean(np.abs(sizes)) < 0.07
    assert np.mean(sizes) > -0.01, "what is estimated to fit mostly does"


def test_rows_that_arrive_at_experts_are_in_the_estimate():
    """Many experts of a token are most of its activations, if they are on other ranks."""
    config = load("qwen3-30b-a3b", ["parallel.expert=1"])
    fixed = {"pipeline": 1, "context": 1, "zero": 2, "recompute": "none", "microbatch": 2}
    space = SearchSpace(config, 64, CLUSTER, fixed)
    candidates = space.list_candidates()
    candidates = candidates.select(candidates.expert > 1)
    estimated = estimate(space, CONSTANTS, candidates)
    for place in draw_places(len(candidates), 10):
        chosen = space.make_config(candidates, place)
        exact = predict(chosen, Layout.from_parallel(chosen.parallel, 64), CLUSTER, CONSTANTS)
        needed = sum(exact.memory_bytes.values())
        assert estimated.memory_bytes[place] == pytest.approx(needed, rel=0.05)
    assert search(SearchSpace(config, 64, CLUSTER, {"pipeline": 1}), CONSTANTS).best.prediction.fits


@pytest.mark.parametrize(("model", "gpus", "batch"), mark_slow(WORLDS[:3], except_for=[WORLDS[1]]))
def test_nothing_drawn_beats_the_first_choice(model, gpus, batch):
    config = make_config(model, batch)
    space = SearchSpace(config, gpus, CLUSTER)
    result = search(space, CONSTANTS)
    steps = [choice.prediction.step_seconds for choice in result.choices]
    assert max(steps[0] / step for step in steps) < 1.015
    fitting = np.flatnonzero(fits_with_margin(result.estimates.memory_bytes, CLUSTER.chip))
    # Draws from the better half only, because the worse half cannot win.
    fitting = fitting[np.argsort(result.estimates.step_seconds[fitting])][: len(fitting) // 2]
    for place in fitting[draw_places(len(fitting), 20)]:
        chosen = space.make_config(result.candidates, int(place))
        other = predict(chosen, Layout.from_parallel(chosen.parallel, gpus), CLUSTER, CONSTANTS)
        assert steps[0] <= 1.015 * other.step_seconds or not other.fits
    text = " ".join([*describe_decision(result, CLUSTER), *describe_alternatives(result, CLUSTER)])
    assert "tensor 16 crosses nodes of 8: +" in text


def test_what_is_given_stays_and_the_config_can_be_loaded(tmp_path):
    config = make_config(DENSE, 256)
    fixed = {"tensor": 4, "recompute": "full", "zero": 1}
    result = search(SearchSpace(config, 64, CLUSTER, fixed), CONSTANTS)
    for choice in result.choices:
        parallel, train = choice.config.parallel, choice.config.train
        assert (parallel.tensor, parallel.zero, train.recompute) == (4, 1, "full")
    path = tmp_path / "best.yaml"
    path.write_text(dump(result.best.config))
    loaded = load(str(path))
    assert loaded == result.best.config
    validate_config(loaded, 64, data=False)


def test_a_ramp_of_batches_is_respected():
    ramp = {"start": 32, "increment": 32, "samples": 10_000}
    train = {"seq": 2048, "global_batch": 256, "batch_ramp": ramp}
    config = RunConfig(model=DENSE, train=train)
    candidates = SearchSpace(config, 64, CLUSTER).list_candidates()
    assert (32 % (candidates.data * candidates.microbatch) == 0).all()
    validate_config(search(SearchSpace(config, 64, CLUSTER), CONSTANTS).best.config, 64, data=False)


@pytest.mark.slow
def test_layouts_in_which_noise_cannot_be_measured_are_left_out():
    """Few samples of a large model are best divided over other axes than data."""
    plain = make_config(DENSE, 4)
    measured = plain.model_copy(
        update={"metrics": plain.metrics.model_copy(update={"gradient_noise_every": 10})}
    )
    free, found = (search(SearchSpace(c, 8, CLUSTER), CONSTANTS) for c in (plain, measured))
    assert found.best.layout.data >= 2
    assert found.best.prediction.step_seconds >= free.best.prediction.step_seconds
    validate_config(found.best.config, 8, data=False)


def test_a_model_that_fits_nowhere_hears_what_would_do_and_what_it_costs():
    model = {**DENSE, "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672}
    config = make_config(model, 64)
    with pytest.raises(UserError) as error:
        search(SearchSpace(config, 8, CLUSTER), CONSTANTS)
    text = str(error.value)
    assert "no layout on 8 GPUs of h100-ib" in text and "zero 3, recompute full" in text
    assert "16 GPUs of h100-ib" in text or "32 GPUs of h100-ib" in text
    assert "an hour" in text and "b200-ib" in text
    assert search(SearchSpace(config, 64, CLUSTER), CONSTANTS).best.prediction.fits
    assert not compute_fit(config, Layout(data=64), CLUSTER.chip).fits
    first, *_ = suggest_changes(SearchSpace(config, 64, CLUSTER), CONSTANTS)
    assert first.startswith("parallel.zero=") and "train.recompute" in first


@pytest.mark.parametrize(
    ("gpus", "batch", "words"), [(37, 64, "use 36 GPUs"), (200_000, 64, "are more than the 131072")]
)
def test_impossible_worlds_are_refused_with_the_nearest(gpus, batch, words):
    with pytest.raises(UserError, match=words):
        search(SearchSpace(make_config(DENSE, batch), gpus, CLUSTER), CONSTANTS)
