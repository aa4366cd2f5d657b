"""Experts that do not fit their router or their ranks are refused."""

import pytest
from config_refusals import list_refusals

EXPERTS = "model.moe={experts: 8, groups: 4}"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("parallel.expert=2",),
            "parallel.expert=2 divides experts, and the model has none; use parallel.expert=1, or "
            "set model.moe.experts",
        ),
        (
            (EXPERTS, "parallel.expert=16"),
            "parallel.expert=16 ranks are more than model.moe.experts=8; use 8 or fewer",
        ),
        (
            (EXPERTS, "model.moe.ffn=3", "parallel.expert_tensor=4"),
            "parallel.expert_tensor=4 ranks are more than an expert's width of 3; use 3 or fewer",
        ),
        (
            (EXPERTS, "model.moe.first=9", "model.moe.every=4"),
            "model.moe.first=9 and model.moe.every=4 leave none of model.layers=12 with experts; "
            "use model.moe.first=0 and model.moe.every=1, or leave model.moe out",
        ),
        (
            (EXPERTS, "parallel.expert_overlap=true", "parallel.pipeline=2"),
            "parallel.expert_overlap=true has no effect with parallel.expert=1 and "
            "parallel.pipeline=2; use 2 or more of both, or parallel.expert_overlap=false",
        ),
        (
            (
                *(EXPERTS, "parallel.expert_overlap=true", "parallel.pipeline=2"),
                *("parallel.expert=2", "parallel.zero=3"),
            ),
            "parallel.expert_overlap=true runs two passes at a time, and parallel.zero=3 gathers "
            "the weights of one; use parallel.zero=2 or less, or parallel.expert_overlap=false",
        ),
        (
            (EXPERTS, "model.moe.shared_gate=true"),
            "model.moe.shared_gate=true has no effect with model.moe.shared=0; use "
            "model.moe.shared=1 or more, or model.moe.shared_gate=false",
        ),
        (
            (
                EXPERTS,
                "model.moe.own_norms=true",
                "model.moe.shared=1",
                "model.moe.shared_gate=true",
            ),
            "model.moe.own_norms=true normalises what model.moe.shared_gate=true would scale, so "
            "that the gate does nothing; leave one of them out",
        ),
        (
            (EXPERTS, "model.activation=xielu"),
            "model.activation=xielu has slopes that are trained, which experts have no place for; "
            "use model.activation=relu2, or say activation in the MLPs of model.blocks",
        ),
        (
            (EXPERTS, "model.moe.groups=3"),
            "model.moe.groups=3 does not divide model.moe.experts=8; use 2 or 4",
        ),
        (
            (EXPERTS, "model.moe.top_groups=5"),
            "model.moe.top_groups=5 is more than model.moe.groups=4; use 4 or fewer",
        ),
        (
            (EXPERTS, "model.moe.top_groups=2", "model.moe.top_k=5"),
            "model.moe.top_k=5 is more than the 4 experts that a token may use; use 4 or fewer",
        ),
        (
            (EXPERTS, "model.moe.group_best=3"),
            "model.moe.group_best=3 is more than the 2 experts of a group; use 2 or fewer",
        ),
        (
            (EXPERTS, "model.moe.top_k=1", "model.moe.normalise=true"),
            "model.moe.normalise=true makes the weight of the one expert of model.moe.top_k=1 "
            "always 1, so that the router learns nothing; use model.moe.normalise=false",
        ),
        (
            (EXPERTS, "model.moe.normalise=false", "model.moe.normalise_eps=0.1"),
            "model.moe.normalise_eps=0.1 has no effect with model.moe.normalise=false; use "
            "model.moe.normalise_eps=0 or model.moe.normalise=true",
        ),
    ],
)
def test_experts_that_do_not_fit(overrides, line):
    assert line in list_refusals(*overrides, "train.global_batch=64", world=16)
