"""Predicted steps: parts sum to the step, follow the simulator, and agree with array estimates.

Tests `megaframe.planner.communication_times`.
"""

import json
import re
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
from slow_cases import slow

from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.planner.advice import describe_prediction
from megaframe.planner.candidates import Candidates, SearchSpace
from megaframe.planner.constants import CONSTANTS, get_family_constants
from megaframe.planner.layout_search import LayoutChoice
from megaframe.planner.layout_sizes import RECOMPUTE, LayoutSizes
from megaframe.planner.machine import PassTimes
from megaframe.planner.prediction import count_model_flops, predict
from megaframe.planner.searched_schedules import ScheduleColumn
from megaframe.planner.vectorized import estimate, estimate_bubble_seconds
from megaframe.schedule import NAMED_SCHEDULES, generate
from megaframe.schedule.costs import ActionCosts
from megaframe.schedule.simulate import simulate

CLUSTER = load_cluster("h100-ib")
CONSTANTS_H100 = get_family_constants("h100")
GPT = {"layers": 24, "hidden": 4096, "heads": 32, "vocab": 32000}
MOE = {**GPT, "moe": {"experts": 8, "ffn": 4096, "first": 2}}
SCHEDULES = [*NAMED_SCHEDULES]
COLUMNS = [field.name for field in fields(Candidates) if field.name != "schedules"]


def make_config(model=None, train=None, **parallel):
    return RunConfig.model_validate(
        {
            "model": model or GPT,
            "train": {"seq": 2048, "global_batch": 256, **(train or {})},
            "parallel": parallel,
        }
    )


def predict_step(config, world, cluster=CLUSTER, constants=CONSTANTS_H100):
    return predict(config, Layout.from_parallel(config.parallel, world), cluster, constants)


@pytest.mark.parametrize(
    ("model", "parallel", "world"),
    [
        (GPT, {}, 8),
        (GPT, {"tensor": 8, "pipeline": 4, "zero": 1}, 128),
        (GPT, {"tensor": 2, "context": 4, "zero": 3}, 64),
        (GPT, {"pipeline": 4, "chunks": 2, "schedule": "zb-v"}, 16),
        (MOE, {"tensor": 2, "expert": 8, "zero": 2}, 32),
        (GPT, {"zero": 3, "data_replicate": 4}, 32),
    ],
)
def test_parts_add_up_to_the_step(model, parallel, world):
    prediction = predict_step(make_config(model, **parallel), world)
    assert sum(prediction.breakdown.values()) == pytest.approx(prediction.step_seconds)
    assert min(prediction.breakdown.values()) >= 0
    tokens = 256 * 2048
    assert prediction.tokens_per_second == pytest.approx(tokens / prediction.step_seconds)
    assert prediction.tflops_per_gpu * 1e12 == pytest.approx(
        prediction.mfu * CLUSTER.chip.peaks["bf16"]
    )
    assert 0 < prediction.mfu <= prediction.hfu < 1
    axes = {"tensor": "tensor", "context": "context", "expert": "expert", "data": "data"}
    layout = Layout.from_parallel(make_config(model, **parallel).parallel, world)
    for part, axis in axes.items():
        if layout.sizes[axis] == 1:
            assert prediction.breakdown[part] == 0, part
    assert prediction.reasons and str(
        round(prediction.breakdown["compute"] / prediction.step_seconds * 100)
    )


def test_a_plan_says_how_it_counts_what_is_frozen():
    config = make_config(GPT, zero=1)
    frozen = config.optim.model_copy(update={"frozen": ("blocks.0.*",)})
    plain, some = (
        predict_step(changed, 8)
        for changed in (config, config.model_copy(update={"optim": frozen}))
    )
    assert some.memory_bytes["weights"] == plain.memory_bytes["weights"]
    for kind in ("gradients", "optimizer"):
        assert some.memory_bytes[kind] < plain.memory_bytes[kind]
    assert some.step_seconds < plain.step_seconds
    assert "optim.frozen" in some.reasons[1] and len(some.reasons) == len(plain.reasons) + 1


def test_emulated_blocks_take_what_the_simulator_says():
    times = {"forward": 0.1, "backward": 0.2, "weight": 0.1}
    model = {"layers": 8, "hidden": 8, "heads": 1, "vocab": 16, "emulate": times}
    config = make_config(
        model,
        {"seq": 4, "global_batch": 16},
        pipeline=4,
        chunks=2,
        schedule="interleaved",
        layers_per_stage=(1,) * 8,
    )
    quiet = replace(CLUSTER, jitter=0.0)
    software = replace(CONSTANTS_H100.software, step_kernels=0.0)
    prediction = predict_step(config, 4, quiet, replace(CONSTANTS_H100, software=software))
    timeline = simulate(generate("interleaved", 4, 2, 16), ActionCosts(0.1, 0.2, 0.1))
    latency = 1e-3  # of all transfers together
    assert prediction.step_seconds == pytest.approx(float(timeline.time), abs=latency)
    assert prediction.breakdown["bubble"] == pytest.approx(float(timeline.bubble_time), abs=latency)


def test_layers_take_as_long_as_their_windows_let_them():
    """On one rank, attention takes the sum of its layers' times. On a ring, each layer hides only
    what its own attention can hide. Stages of layers with shorter windows are faster."""
    train = {"seq": 32768, "global_batch": 8}

    def step(window, **parallel):
        return predict_step(make_config({**GPT, "window": window}, train, **parallel), 8)

    narrow, far, mixed = (step(w).breakdown["compute"] for w in (1024, None, [1024, None, 1024]))
    assert narrow < 0.75 * far
    assert mixed == pytest.approx((2 * narrow + far) / 3, rel=1e-12)
    narrow, far, mixed = (
        step(w, context=8).breakdown["context"] for w in (128, None, [128, None, 128])
    )
    assert mixed == pytest.approx((2 * narrow + far) / 3, rel=1e-12) and narrow > far
    halves = [1024] * 12 + [None] * 12
    even = step(halves, pipeline=2, layers_per_stage=(12, 12))
    assert step(halves, pipeline=2).step_seconds < 0.95 * even.step_seconds


def test_what_must_make_a_step_longer_does():
    base = predict_step(make_config(tensor=8, pipeline=4), 64).step_seconds
    slow_links = replace(
        CLUSTER, tiers=tuple(replace(t, bandwidth=t.bandwidth / 4) for t in CLUSTER.tiers)
    )
    assert predict_step(make_config(tensor=8, pipeline=4), 64, slow_links).step_seconds > base
    full = make_config(train={"recompute": "full"}, tensor=8, pipeline=4)
    recomputed = predict_step(full, 64)
    assert 1.15 * base < recomputed.step_seconds < 1.4 * base
    assert recomputed.hfu / recomputed.mfu == pytest.approx(
        np.divide(*count_model_flops(full)[::-1])
    )
    for name in ("product", "attention", "memory"):
        worse = replace(CONSTANTS_H100, **{name: getattr(CONSTANTS_H100, name) / 2})
        worse = replace(worse, software=replace(worse.software, kernels=0.0))
        assert (
            predict_step(make_config(), 8, constants=worse).step_seconds
            > predict_step(
                make_config(),
                8,
                constants=replace(
                    CONSTANTS_H100, software=replace(CONSTANTS_H100.software, kernels=0.0)
                ),
            ).step_seconds
        ), name


def test_tensor_ranks_of_two_nodes_are_slower_and_it_is_said():
    inside = predict_step(make_config(tensor=8, data=4), 32)
    across = predict_step(make_config(tensor=16, data=2), 32)
    assert across.step_seconds > 1.2 * inside.step_seconds
    assert any("tensor 16 crosses nodes of 8" in reason for reason in across.reasons)


def test_rows_reach_experts_without_tensor_ranks_but_shared_ones_as_an_mlp():
    def exposed(**options):
        model = {**GPT, "moe": {**MOE["moe"], "first": 0, **options}}
        return predict_step(make_config(model, tensor=8, expert=8), 8).breakdown["tensor"]

    routed, shared = exposed(), exposed(shared=1)
    # Half of the bytes, but all latencies; and both ends of the model have sums of their own.
    assert 0.5 * shared < routed < 0.7 * shared


def test_gradients_of_a_chunk_leave_in_one_message():
    """A chunk has 3 blocks, so a message per block has three times the latency of a message per
    chunk, in the prediction of one layout and in the estimate of many."""
    far = replace(CLUSTER.tiers[1], latency=1.0)
    slow = replace(CLUSTER, tiers=(replace(CLUSTER.tiers[0], latency=0.0), far), jitter=0.0)
    small = {**GPT, "vocab": 512}  # its head takes no longer than a block
    config = make_config(small, tensor=8, pipeline=2, chunks=4, schedule="interleaved", zero=0)
    row = {name: getattr(config.parallel, name, 1) for name in COLUMNS}
    row |= {"microbatch": 1, "data": 4, "recompute": 0, "schedule": SCHEDULES.index("interleaved")}
    row |= {"expert_tensor": 1, "data_replicate": 1}
    candidate = Candidates(**{name: np.array([value]) for name, value in row.items()})
    estimates = []
    for kind in ("block", "chunk"):
        software = replace(CONSTANTS_H100.software, gradients_of=kind)
        constants = replace(CONSTANTS_H100, software=software)
        exact = predict_step(config, 64, slow, constants).breakdown["data"]
        many = estimate(SearchSpace(config, 64, slow), constants, candidate).breakdown["data"][0]
        estimates.append((exact, float(many)))
    for block, chunk in zip(*estimates, strict=True):
        assert block == pytest.approx(3 * chunk, rel=0.02)


def test_what_does_not_fit_is_said():
    prediction = predict_step(make_config({**GPT, "layers": 200}, zero=0), 8)
    assert not prediction.fits and prediction.reasons[0].startswith("does not fit: ")
    assert prediction.memory_bytes["optimizer"] > 80e9


@pytest.mark.parametrize(
    ("optim", "precision", "width"),
    [
        ({}, "bf16", 12),
        ({}, "fp32", 8),  # the model computes with the weights
        ({"name": "lion", "ema": 0.9}, "bf16", 12),
        ({"name": "muon", "state": "bf16"}, "fp16", 6),
    ],
)
@pytest.mark.parametrize(("name", "link"), [("a100-ib", 31.5e9), ("gb200-nvl72", 225e9)])
def test_what_the_host_keeps_comes_and_goes_in_the_update(name, link, optim, precision, width):
    """4 ranks divide 24 layers, each with matrices [hidden, 12 hidden], and two tables."""
    cluster = load_cluster(name)
    constants = get_family_constants(cluster.chip.family)
    parameters = 24 * 12 * 4096**2 + 2 * 32000 * 4096

    def update(optim=optim, **chip):
        changed_cluster = replace(cluster, chip=replace(cluster.chip, **chip))
        sections = {"train": {"seq": 64, "global_batch": 4, "precision": precision}}
        config = RunConfig(model=GPT, parallel={"zero": 1}, optim=optim, **sections)
        away = config.model_copy(
            update={"optim": RunConfig(optim={**optim, "offload": True}).optim}
        )
        return [predict_step(changed, 4, changed_cluster, constants) for changed in (config, away)]

    on_device, away = update()
    elementwise = update({})[0].breakdown["optimizer"]  # the time to pass over the state
    orthogonal = on_device.breakdown["optimizer"] - elementwise
    assert (orthogonal > 0) == (optim.get("name") == "muon")
    coming = parameters / 4 * width / link
    assert away.breakdown["optimizer"] == pytest.approx(coming + orthogonal)
    assert elementwise < coming / 2
    if optim.get("name") != "muon":  # its tables have more state than matrices
        assert away.host_bytes == pytest.approx(parameters / 4 * width, rel=0.01)
    assert on_device.host_bytes == 0
    text = f"{away.host_bytes / 2**30:.1f} GiB of a GPU's weights and state are in host memory"
    assert away.reasons[1].startswith(f"{text} and move at {link / 1e9:g} GB/s in each direction: ")
    # The update takes as long as the slower of transfers and computation.
    on_device, away = update(host_link=1e15)
    assert away.breakdown["optimizer"] == on_device.breakdown["optimizer"]
    on_device, away = update(host_link=None)
    assert away.breakdown["optimizer"] == on_device.breakdown["optimizer"]
    assert "is not known" in away.reasons[1] and len(away.reasons) == len(on_device.reasons) + 1


def test_a_checkpoint_holds_what_the_host_keeps():
    texts = []
    for offload in (False, True):
        config = make_config(zero=1).model_copy(
            update={"optim": RunConfig(optim={"offload": offload}).optim}
        )
        layout = Layout.from_parallel(config.parallel, 64)
        prediction = predict(config, layout, CLUSTER, CONSTANTS_H100)
        *_, times = describe_prediction(LayoutChoice(config, layout, prediction), CLUSTER)
        texts.append(times.rpartition("a checkpoint every ")[2])
    assert texts[0] == texts[1]


def test_impossible_questions():
    with pytest.raises(UserError, match="2000000 ranks are more than the 131072 of cluster"):
        predict_step(make_config(data=2_000_000), 2_000_000)
    cpu = load_cluster("cpu")
    chip = replace(cpu.chip, peaks={"fp32": 1e12})
    with pytest.raises(UserError, match=r"train.precision=bf16: chip cpu .* use fp32"):
        predict_step(make_config(), 1, replace(cpu, chip=chip), CONSTANTS["cpu"])
    with pytest.raises(UserError, match="no constants are known of chips of the family z80"):
        get_family_constants("z80")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bubbles_of_the_closed_forms_are_simulated_ones(name, ranks):
    chunks = 2 if name in ("interleaved", "breadth-first", "zb-v", "v-half", "dualpipe-v") else 1
    many = 4 * ranks
    ones_array = np.array([1])
    sizes = LayoutSizes(**{field.name: ones_array for field in fields(LayoutSizes)})
    sizes = replace(
        sizes,
        pipeline=ones_array * ranks,
        chunks=ones_array * chunks,
        microbatches=ones_array * many,
    )
    passes = [(1.0, 1.0, 1.0)]
    if name not in ("zb-v", "v-half", "dualpipe-v"):
        passes += [(1.0, 1.25, 0.75), (2.0, 3.0, 2.0)]
    for times in passes:
        timeline = simulate(
            generate(name, ranks, chunks, many), ActionCosts(*times).divide_by_chunks(chunks)
        )
        bubbles = estimate_bubble_seconds(
            ScheduleColumn((NAMED_SCHEDULES[name],), 0 * ones_array), sizes, PassTimes(*times)
        )
        assert float(bubbles[0]) == pytest.approx(float(timeline.time) - many * sum(times))


def list_candidates(model, world):
    """Return valid layouts of `world` ranks as rows of numbers."""
    rows = []
    chunked = ("interleaved", "breadth-first", "zb-v", "v-half", "dualpipe-v")
    for tensor, pipeline, chunks, micro, zero, recompute, name in product(
        (1, 4), (1, 2, 4), (1, 2), (1, 2), (0, 1, 3), (0, 1, 2), SCHEDULES
    ):
        if (chunks == 2) != (name in chunked) or (pipeline == 1 and name != "1f1b"):
            continue
        data = world // tensor // pipeline
        expert = 4 if "moe" in model else 1
        row = (tensor, 1, pipeline, chunks, data, 1, expert, 1, zero, recompute, micro)
        rows.append((*row, SCHEDULES.index(name)))
    return np.array(rows)


@pytest.mark.parametrize("model", [slow(GPT, id="dense"), pytest.param(MOE, id="experts")])
def test_estimates_of_many_are_near_the_prediction_of_each(model):
    rows = list_candidates(model, 32)
    config = make_config(model)
    many = estimate(SearchSpace(config, 32, CLUSTER), CONSTANTS_H100, Candidates(*rows.T))
    assert len(many.step_seconds) == len(rows)
    assert np.allclose(sum(many.breakdown.values()), many.step_seconds)
    errors, memory = [], []
    for place in range(0, len(rows), 7):
        row = dict(zip(COLUMNS, map(int, rows[place]), strict=True))
        train = {"microbatch": row.pop("microbatch"), "recompute": RECOMPUTE[row.pop("recompute")]}
        row["schedule"] = SCHEDULES[row["schedule"]]
        exact = predict_step(make_config(model, train, **row), 32)
        errors.append(abs(many.step_seconds[place] / exact.step_seconds - 1))
        needed = sum(exact.memory_bytes.values())
        memory.append(abs(many.memory_bytes[place] / needed - 1))
    assert np.mean(errors) < 0.03 and max(errors) < 0.15
    assert np.mean(memory) < 0.1 and max(memory) < 0.4


def test_measured_stages_are_predicted_with_the_division_by_times():
    """Experts are slow for their work, because each has few rows, so a stage of them has fewer
    blocks than by work. What the bottleneck rank computes in a step falls as promised."""
    model = {**GPT, "layers": 16, "moe": {"experts": 64, "ffn": 2048, "top_k": 4, "first": 8}}
    train, parallel = {"global_batch": 64}, {"pipeline": 4, "zero": 1}
    measured = predict_step(make_config(model, train, layers_per_stage="measured", **parallel), 4)
    text = next(reason for reason in measured.reasons if "measured" in reason)
    by_times, by_work = (json.loads(part) for part in re.findall(r"\[[\d, ]+\]", text))
    assert sum(by_times) == sum(by_work) == 16 and by_times != by_work
    chosen, modelled = (
        predict_step(make_config(model, train, layers_per_stage=layers, **parallel), 4)
        for layers in (by_times, by_work)
    )
    assert measured.breakdown == chosen.breakdown
    assert chosen.step_seconds < 0.97 * modelled.step_seconds
    assert f"{modelled.step_seconds:.3g} s a step" in text
    assert predict_step(make_config(model, train, **parallel), 4).breakdown == modelled.breakdown
