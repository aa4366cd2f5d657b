"""Other trainers as software, and what the year of a library and its kernels change.

Tests `megaframe.planner.explanations.software`.
"""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.planner.constants import (
    ATTENTION_SPEEDS,
    MEGAFRAME,
    get_attention_speeds,
    get_family_constants,
)
from megaframe.planner.explanations.software import explain_software
from megaframe.planner.layout_search import LayoutChoice
from megaframe.planner.prediction import predict
from megaframe.planner.trainers import TRAINERS, find_trainer, predict_trainers

CLUSTER = load_cluster("h100-ib")
CONSTANTS = get_family_constants("h100")


def make_config(train=None, model=None, **parallel):
    sizes = {"layers": 8, "hidden": 4096, "heads": 32, "vocab": 32000}
    return RunConfig.model_validate(
        {
            "model": {**sizes, **(model or {})},
            "train": {"seq": 8192, "global_batch": 16, **(train or {})},
            "parallel": {"zero": 1, **parallel},
        }
    )


def predict_step(config, software=MEGAFRAME, cluster=CLUSTER):
    constants = replace(get_family_constants(cluster.chip.family), software=software)
    return predict(config, Layout.from_parallel(config.parallel, 8), cluster, constants)


def test_trainers_are_predicted_beside_ours_on_the_same_layout():
    config = make_config(tensor=2)
    layout = Layout.from_parallel(config.parallel, 8)
    names = [name for name, software in TRAINERS.items() if software.scaling is None]
    predictions = predict_trainers(names, config, layout, CLUSTER, CONSTANTS)
    assert list(predictions) == names
    assert predictions["megaframe"] == predict(config, layout, CLUSTER, CONSTANTS)
    # Libraries got faster, transfers overlap, scores stay on the chip.
    years = [
        predictions[f"megatron-{year}"].step_seconds for year in ("2021", "2022", "2024", "2025")
    ]
    assert years == sorted(years, reverse=True)
    assert predictions["torchtitan"].step_seconds < predictions["torchtitan-2024"].step_seconds
    assert predict_trainers((), config, layout, CLUSTER, CONSTANTS) == {}


def test_what_trainers_take_is_told_beside_ours_as_predictions():
    config = make_config(tensor=2)
    layout = Layout.from_parallel(config.parallel, 8)
    choice = LayoutChoice(config, layout, predict(config, layout, CLUSTER, CONSTANTS))
    told = explain_software(choice, CLUSTER, CONSTANTS, ["megatron-2025", "deepspeed"])
    assert "predictions, not measurements" in told.lines[0]
    assert [row[0] for row in told.rows] == ["megaframe", "megatron-2025", "deepspeed"]
    ours = choice.prediction.step_seconds
    for name, seconds, speed, mfu, share in told.rows:
        expected = predict_step(config, find_trainer(name))
        assert (seconds, speed, mfu) == (
            expected.step_seconds,
            expected.tokens_per_second,
            expected.mfu,
        )
        assert share == seconds / ours


def test_an_unknown_trainer_is_told_its_like():
    with pytest.raises(UserError, match=r"--software megtron-2025: .* use megatron-2025"):
        find_trainer("megtron-2025")
    with pytest.raises(UserError, match="use megaframe, megatron-2021"):
        find_trainer("q")


@pytest.mark.parametrize("family", ATTENTION_SPEEDS)
def test_speeds_of_attention_are_relative_to_the_fastest_forward(family):
    speeds = list(ATTENTION_SPEEDS[family].values())
    assert speeds[0][0] == 1 and speeds == sorted(speeds, reverse=True)
    assert all(backward < forward for forward, backward in speeds)
    # What a family's table lacks is taken to be its fastest.
    assert get_attention_speeds("unheard-of", family) == speeds[0]
    assert get_attention_speeds("cudnn", "cdna")[0] == 1


def test_slower_kernels_of_attention_make_steps_longer_by_what_they_take():
    config = make_config()
    fast, slow = (
        predict_step(config, replace(MEGAFRAME, attention=kernel)).breakdown["compute"]
        for kernel in ("cudnn", "flash-2")
    )
    # 8 layers, 2 samples a rank: four operations per score and head width in forward, 2.5 times as
    # many in backward; half of the scores and half a tile of 128 keys at the edge.
    flops = 4 * 8192 * (8192 / 2 + 0.5 + 64) * 4096 * 8 * 2
    rate = CLUSTER.chip.get_sustained_flops("bf16") * CONSTANTS.attention
    more = (1 / 0.545 - 1) + 2.5 * (1 / 0.5 - 1 / 0.78)
    assert slow - fast == pytest.approx(flops / rate * more, rel=0.01)


def test_attention_with_a_window_takes_another_kernel_and_more_than_what_it_sees():
    """torch's kernels take no window, so ours computes it, tile by tile."""

    def compute(window, **software):
        config = make_config(model={"window": window})
        return predict_step(config, replace(MEGAFRAME, **software)).breakdown["compute"]

    near, far = compute(1024), compute(1024, windowed_attention=None)
    flops = 4 * 8192 * 4096 * 8 * 2 / CLUSTER.chip.get_sustained_flops("bf16")
    keys = 1 / 8 * (512 + 64) + 7 / 8 * (1024 + 128)
    ours = (keys + 338) / (1 + 338 / 4160) * (1 / 0.7 + 2.5 / 0.61)
    assert near - far == pytest.approx(
        flops / CONSTANTS.attention * (ours - keys * (1 + 2.5 / 0.78)), rel=0.01
    )
    # A window as long as the sample sees what no window does, in the same kernel.
    assert compute(8192) == compute(None) == compute(None, windowed_attention=None)


def test_narrow_heads_wait_for_exponentials():
    """Heads of 64 take as many products, and twice as many exponentials, as heads of 128."""
    wide = make_config(train={"seq": 32768, "global_batch": 8}).model_copy(deep=True)
    narrow = make_config(train={"seq": 32768, "global_batch": 8}, model={"heads": 64})
    assert predict_step(narrow).step_seconds > 1.1 * predict_step(wide).step_seconds


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_products_in_8_bits_take_less_but_their_operands_are_converted(scaling):
    plain = predict_step(make_config()).breakdown["compute"]
    eight = predict_step(make_config({"fp8": scaling})).breakdown["compute"]
    assert 0.55 * plain < eight < 0.9 * plain


def test_a_chip_without_8_bits_is_planned_as_without_them():
    cluster = load_cluster("a100-ib")
    plain, eight = (
        predict_step(make_config(train), cluster=cluster) for train in ({}, {"fp8": "tensor"})
    )
    assert eight.step_seconds == plain.step_seconds
    assert any("train.fp8" in reason for reason in eight.reasons)
    assert not any("train.fp8" in reason for reason in plain.reasons)


@pytest.mark.parametrize("name", ["megatron-2025", "torchtitan"])
def test_products_in_mxfp8_take_half_and_their_conversions_move_bytes(name):
    """On one rank the difference is that of the products at twice the peak, and of operands that
    are read and written. No step in mxfp8 was published that this could be compared with."""
    cluster = load_cluster("b200-ib")
    constants = get_family_constants("b200")
    rate = cluster.chip.peaks["bf16"] * cluster.chip.power_share * constants.product
    config = make_config()
    layout = Layout.from_parallel(config.parallel, 8)
    plain, eight = predict_trainers(
        [name, f"{name}-mxfp8"], config, layout, cluster, constants
    ).values()
    matrix, rows = 12 * 4096**2, 8192  # of a block; two microbatches and eight blocks follow
    saved = 6 * matrix * rows / rate / 2
    # Inputs and results of the four linears, per token, in terms of the stream.
    elements = rows * 4096 * (1 + 1 + 1 + 4 + 3 + 1 + 4 + 1) + matrix
    moved = {"megatron-2025": 2 + 2 * 33 / 32, "torchtitan": 2 * (2 + 33 / 32)}[name]
    converting = moved * elements / (cluster.chip.bandwidth * constants.memory)
    difference = plain.breakdown["compute"] - eight.breakdown["compute"]
    assert difference == pytest.approx(16 * (saved - converting), rel=0.05)


def test_mxfp8_is_told_as_a_prediction_and_only_of_chips_that_have_it():
    config = make_config()
    layout = Layout.from_parallel(config.parallel, 8)
    cluster, constants = load_cluster("gb200-nvl72"), get_family_constants("b200")
    choice = LayoutChoice(config, layout, predict(config, layout, cluster, constants))
    told = explain_software(choice, cluster, constants, ["megatron-2025-mxfp8"])
    assert "megaframe has no mxfp8" in told.lines[1] and "no published step" in told.lines[1]
    with pytest.raises(UserError, match=r"h100 has no products in mxfp8; use a cluster of b200, "):
        predict_trainers(["torchtitan-mxfp8"], config, layout, CLUSTER, CONSTANTS)


def test_a_graph_waits_for_no_launches():
    small = {"hidden": 256, "heads": 2, "vocab": 1024}
    train = {"seq": 128, "global_batch": 8}
    plain, graph = (
        predict_step(make_config({**train, "cuda_graph": recorded}, small)).breakdown["compute"]
        for recorded in (False, True)
    )
    launches = CONSTANTS.launch * MEGAFRAME.kernels * (1 + MEGAFRAME.backward_kernels) * 8
    assert graph < 0.1 * plain and plain >= launches


def test_a_kernel_for_each_part_of_the_rows_has_a_last_wave_for_each():
    software = replace(MEGAFRAME, parts="ranks", copy_engines=True)
    fused = replace(software, fused_parts=True)
    config = make_config(tensor=8)
    apart, joined = (predict_step(config, each).breakdown["compute"] for each in (software, fused))
    assert 1.02 * joined < apart < 1.5 * joined
    alone = make_config()
    assert predict_step(alone, software) == predict_step(alone, fused)


H200 = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "h200"


def test_a_sum_of_gradients_in_fp32_takes_as_much_longer_as_in_a_recorded_step():
    """The head of Llama 3 8B, in eight chunks of 2,048 rows of which seven add to the sum."""
    with gzip.open(H200 / "trace-llama-8b-slice.json.gz") as stream:
        events = json.load(stream)["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    products = [(e["name"], e["dur"] / 1e6) for e in kernels if "nvjet" in e["name"]]
    adding = [number for number, (name, _) in enumerate(products) if "badd" in name]
    assert len(adding) == 14  # of two steps
    added, plain = (
        median(products[number + shift][1] for number in adding for shift in shifts)
        for shifts in ((0,), (-1, 1))  # between the forward product and that of the rows' gradient
    )
    chip = load_cluster("h200-ib").chip
    moved = MEGAFRAME.accumulate_bytes * 128256 * 4096
    assert added - plain == pytest.approx(moved / (0.88 * chip.bandwidth), rel=0.05)  # as a copy


def make_quiet(**software):
    """Return software whose steps differ only by what the given facts add."""
    nothing = {"accumulate_bytes": 0.0, "ring_bytes": (0.0, 0.0)}
    return replace(MEGAFRAME, **{**nothing, **software})


@pytest.mark.parametrize(
    ("software", "parallel", "part", "moved"),
    [
        # Two microbatches, and eight blocks of 12 squares of the stream's width.
        (
            {"accumulate_bytes": 6.0},
            {},
            "compute",
            2 * 6 * 8 * 12 * 4096**2,
        ),
        ({"embedding_bytes": 12.0}, {}, "compute", 2 * 12 * 32000 * 4096),
        # A rank's 2,048 rows, and three quarters of them for each of the three other ranks.
        (
            {"ring_bytes": (7.0, 9.0)},
            {"context": 4},
            "context",
            8 * 8 * 16 * 2048 * 4096 * (1 + 3 * 0.75),
        ),
    ],
)
def test_what_is_moved_beside_products_takes_its_bytes(software, parallel, part, moved):
    config = make_config(**parallel)
    without, with_it = (
        predict_step(config, make_quiet(**facts)).breakdown[part] for facts in ({}, software)
    )
    speed = CLUSTER.chip.bandwidth * CONSTANTS.memory
    assert with_it - without == pytest.approx(moved / speed, rel=1e-6)


def test_row_products_take_longer_on_fewer_processors():
    config = make_config(tensor=2)
    facts = {"scatter_units": 22.0}, {"scatter_units": 44.0}
    none, some, more = (
        predict_step(config, make_quiet(**one)).breakdown["compute"] for one in ({}, *facts)
    )
    # 132 / 110 and 132 / 88 of the time.
    assert more - none == pytest.approx(2.5 * (some - none)) and some > none
    alone = make_config()
    assert predict_step(alone, make_quiet(**facts[0])) == predict_step(alone, make_quiet())


def test_gradients_of_the_head_can_wait_until_others_finish():
    """Of four microbatches one or all wait, on the last of two stages, which has most work."""
    config = make_config(
        model={"vocab": 128000}, pipeline=2, layers_per_stage=(4, 4), train={"global_batch": 16}
    )
    none, one, every = (
        predict_step(config, make_quiet(head_backward=True, deferred_heads=number))
        for number in (0.0, 1.0, 50.0)
    )
    saved = none.breakdown["compute"] - every.breakdown["compute"]
    rate = CLUSTER.chip.get_sustained_flops("bf16") * CONSTANTS.product
    assert saved == pytest.approx(4 * 2 * 8192 * 128000 * 4096 / rate, rel=0.05)
    assert none.breakdown["compute"] - one.breakdown["compute"] == pytest.approx(saved / 4)
