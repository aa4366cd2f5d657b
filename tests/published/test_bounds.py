"""Bounds on the accuracy of simple predictions of vTrain's 64 nodes: they hold for predictions of
that kind, and the page states them."""

import math
from dataclasses import replace

import published
import pytest
from published import PAGE, compute_choice_losses
from published_bounds import (
    APART,
    WIDTH,
    compute_error_bound,
    compute_half_microbatch_cost,
    compute_layer_costs,
    compute_loss_bound,
    compute_seconds_bound,
    describe_bounds,
    find_contradictions,
)
from published_configs import make_gpt_config
from published_page import predict_unread_run
from published_tables import TABLES

from megaframe.planner.constants import CONSTANTS


def predict_rows():
    predicted_rows = [line.row for line in published.predict_table("vtrain_multi")]
    if not predicted_rows:
        pytest.skip("vtrain_multi is read from ../shared/anchors, which is not here")
    return predicted_rows


def make_rows(cost, layers=8, samples=64, ranks=64):
    """Yield rows of a model whose layers cost `cost(tensor, microbatch)`, with 1F1B's bubble."""
    base = next(iter(TABLES["sc21_1"].rows()))
    for tensor in (1, 2, 4, 8):
        for microbatch in (1, 2, 4):
            for pipeline in (2, 4):
                data = ranks // tensor // pipeline
                config = make_gpt_config(
                    layers,
                    512,
                    8,
                    128,
                    1024,
                    samples,
                    microbatch,
                    tensor=tensor,
                    data=data,
                    pipeline=pipeline,
                )
                many = samples // (microbatch * data)
                if not many:
                    continue
                slots = (many + pipeline - 1) * layers / pipeline
                seconds = slots * cost(tensor, microbatch) * microbatch / tensor
                label = f"{tensor} {microbatch} {pipeline}"
                yield replace(base, label=label, world=ranks, configs=(config,), seconds=seconds)


def test_a_consistent_table_is_within_its_bounds():
    """A cost that grows with tensor ranks and falls with the microbatch has no contradictions, and
    no row takes longer than its bound."""
    known = compute_layer_costs(list(make_rows(lambda t, b: 1 + 0.02 * (t - 1) + 0.01 / b)), 512)
    assert not list(find_contradictions(known, 1.0)) and compute_error_bound(known, 1.0) == 0
    for cost in known:
        assert cost.seconds == pytest.approx(1 + 0.02 * (cost.tensor - 1) + 0.01 / cost.microbatch)
        assert cost.row.seconds <= compute_seconds_bound(known, cost, 1.0) * (1 + 1e-9)
    assert compute_half_microbatch_cost(known, 2) == pytest.approx(1.01 / 1.005)


def test_a_row_that_is_too_dear_is_found():
    def cost(tensor, microbatch):
        return (1 + 0.02 * (tensor - 1)) * (1.5 if (tensor, microbatch) == (2, 2) else 1.0)

    known = compute_layer_costs(list(make_rows(cost)), 512)
    pairs = list(find_contradictions(known, 1.1))
    assert {(pair.tensor, pair.microbatch) for pair, _ in pairs} == {(2, 2)}
    names = [cost.row.label for pair in pairs for cost in pair]
    assert len(set(names)) == len(names) == 4
    # However it is shared between its two rows, the error of a pair is at least their distance.
    assert compute_error_bound(known, 1.1) == pytest.approx(2 * math.log(1.02 * 1.5 / 1.02 / 1.1))


@pytest.mark.slow
def test_the_right_choice_is_beyond_a_price_for_tensor_ranks():
    """The page's claim: a prediction that is right about tensor 1 and 8, and charges tensor ranks
    for what they add, chooses a row that loses as much as the planner's choice."""
    known = compute_layer_costs(predict_rows(), WIDTH)
    dearer = compute_half_microbatch_cost(compute_layer_costs(predict_rows(), 3072), 4)
    assert len(list(find_contradictions(known, APART))) == 5
    loss = compute_loss_bound(known, dearer)
    assert loss == pytest.approx(
        max(compute_choice_losses(published.predict_table("vtrain_multi")))
    )
    assert compute_loss_bound(known, dearer * 1.02) == loss
    assert loss > compute_loss_bound(known, dearer * 1.05) == 0


@pytest.mark.slow
def test_the_fastest_row_that_is_not_read_is_predicted_to_be_the_fastest():
    predict_rows()  # skips without the table
    lines = published.predict_table("vtrain_multi")
    absent = predict_unread_run(lines)
    rivals = [line for line in lines if line.row.rivals == absent.row.rivals]
    assert len(rivals) == 22
    assert absent.row.seconds < min(line.row.seconds for line in rivals)
    assert absent.seconds < min(line.seconds for line in rivals)
    assert abs(absent.error) < 0.04


@pytest.mark.slow
def test_the_page_tells_the_bounds():
    assert describe_bounds(predict_rows()) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("family", ["a100", "h100"])
def test_links_have_what_nccl_was_seen_to_reach(family):
    """Rings over eight GPUs of a node reach 232 and 367 GB/s, as reported in issues of NCCL."""
    inside, bandwidth = {"a100": (232e9, 300e9), "h100": (367e9, 450e9)}[family]
    assert CONSTANTS[family].get_link_efficiency(0) * bandwidth == pytest.approx(inside, rel=0.01)
    assert (
        CONSTANTS[family].get_link_efficiency(1) == CONSTANTS[family].get_link_efficiency(2) == 0.9
    )
