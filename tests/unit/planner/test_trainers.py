"""Other trainers as software, and what the year of a library and its kernels change.

Tests `megaframe.planner.explanations.software`.
"""

from dataclasses import replace

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
