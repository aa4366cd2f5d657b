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
    predictions = predict_trainers(list(TRAINERS), config, layout, CLUSTER, CONSTANTS)
    assert list(predictions) == list(TRAINERS)
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
