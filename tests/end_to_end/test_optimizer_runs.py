"""Whole runs with options of optimizers: resuming, types of state, averages, and the dry run."""

import pytest
import torch
from bitwise import assert_bitwise_equal, assert_same_losses
from entry_runs import pretrain_gpt, read_losses, train
from slow_cases import slow
from tolerances import PROMISE

from megaframe.checkpoint import Slice, open_checkpoint
from megaframe.checkpoint.train_state import describe_missing_state, find_restarted, prepare_slices
from megaframe.errors import UserError
from megaframe.inference.generation import load_stage

EVERY = {"optim__schedule": "constant", "checkpoint__every": 6, "train__precision": "fp32"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim",
    [
        {"optim__name": "muon", "optim__state": "int8", "optim__ema": 0.9},
        {"optim__name": "lion", "optim__state": "bf16", "optim__lr": 0.001},
    ],
)
def test_a_resumed_run_is_that_which_never_stopped_to_the_last_bit(
    optim, pool, overrides, tmp_path
):
    parallel = {"parallel__zero": 1, "parallel__tensor": 2}
    pool.run(2, train, overrides(run__dir=tmp_path / "whole", **EVERY, **optim, **parallel))
    pool.run(2, train, overrides(train__steps=6, **EVERY, **optim, **parallel))
    pool.run(2, train, overrides(checkpoint__resume="latest", **EVERY, **optim, **parallel))
    losses, whole = read_losses(tmp_path / "run"), read_losses(tmp_path / "whole")
    assert_same_losses(losses, whole, because="a checkpoint has every bit of the state")


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_another_optimizer_and_other_frozen_weights(
    pool, overrides, tmp_path
):
    shared_keys = {
        **EVERY,
        "train__precision": "fp64",
        "train__global_batch": 32,
        "optim__lr": 0.01,
    }
    parts = [
        (1, {"optim__state": "int8", "optim__frozen": "[blocks.0.*]"}),
        (2, {"optim__frozen": "[embedding.*]", "parallel__zero": 3}),
        (2, {"optim__name": "muon", "optim__ema": 0.5, "parallel__tensor": 2}),
        (4, {"optim__name": "muon", "optim__ema": 0.5, "parallel__zero": 2}),
    ]
    weights = []
    for number, (ranks, keys) in enumerate(parts, 1):
        resume = {"checkpoint__resume": "latest"} if number > 1 else {}
        pool.run(ranks, train, overrides(train__steps=6 * number, **shared_keys, **keys, **resume))
        stage = load_stage(tmp_path / "run/checkpoints")
        weights.append({p.spec.name: p.value for p in stage.parameters()})
    curve = read_losses(tmp_path / "run")
    assert curve[-1] < 0.9 * curve[0]

    def has_changed(name, first, other):
        return bool((weights[first][name] != weights[other][name]).any())

    embeddings = [of_part["embedding.tokens.weight"] for of_part in weights]
    assert_bitwise_equal(embeddings[:1], embeddings[1:2], because="it is frozen in the second part")
    assert has_changed("blocks.0.mlp.up.weight", 0, 1)
    assert has_changed("embedding.tokens.weight", 1, 2)


def test_the_average_is_saved_and_used(pool, overrides, tmp_path):
    keys = {**EVERY, "optim__ema": 0.6, "optim__frozen": "[blocks.1.*]", "train__steps": 6}
    pool.run(2, train, overrides(**keys, parallel__zero=2))
    folder = tmp_path / "run/checkpoints"
    plain = load_stage(folder)
    averaged = load_stage(folder, ema=True)
    for parameter, other in zip(plain.parameters(), averaged.parameters(), strict=True):
        assert parameter.spec.name == other.spec.name
        frozen = parameter.spec.name.startswith("blocks.1.")
        assert bool((parameter.value != other.value).any()) != frozen
        torch.testing.assert_close(parameter.value, other.value, rtol=0, atol=0.06)
    pool.run(
        1, train, overrides(**{**keys, "run__dir": tmp_path / "without", "optim__ema": "null"})
    )
    with pytest.raises(UserError, match="has no average of weights; train with optim"):
        load_stage(tmp_path / "without/checkpoints", ema=True)


def test_state_that_is_not_saved_is_named_and_starts_anew():
    tensors = torch.ones(6, 2)
    names = ["a", "b", *(f"optimizer.{kind}/{n}" for kind in ("mean", "ema") for n in "ab")]
    slices = [Slice(n, (2,), (0,), tensor) for n, tensor in zip(names, tensors, strict=True)]
    saved = {"a", "b", "optimizer.mean/a", "optimizer.square/a"}
    restarted = find_restarted({"a": ("mean",), "b": ("mean",)}, saved, frozen=())
    assert restarted == {"b"}
    assert [part.name for part in prepare_slices(slices, saved, restarted)] == [
        "a", "b", "optimizer.mean/a", "a", "b",
    ]  # fmt: skip
    zeroed = [n for n, tensor in zip(names, tensors, strict=True) if not tensor.any()]
    assert zeroed == ["optimizer.mean/b"]
    # Another optimizer's moments are no part of this one's; what has none may count updates too.
    assert find_restarted({"a": ("mean", "belief"), "b": ()}, saved, frozen=("b",)) == {"a", "b"}
    assert list(describe_missing_state(slices, saved)) == [
        "the checkpoint has no optimizer state `mean` of b; its moments start from zero",
        "the checkpoint has no optimizer state `ema` of a and 1 more; it starts from the weights",
    ]
    assert list(describe_missing_state(slices[:3], saved)) == []
    missing = [Slice("c", (2,), (0,), tensors[0])]
    # A missing weight fails later, in the load.
    assert [part.name for part in prepare_slices(missing, saved, ())] == ["c"]


def test_a_checkpoint_in_8_bits_holds_what_any_run_can_load(pool, overrides, tmp_path):
    pool.run(1, train, overrides(**EVERY, optim__state="int8", train__steps=6))
    with open_checkpoint(tmp_path / "run/checkpoints/step-00000006") as checkpoint:
        for name, saved in checkpoint.tensors.items():
            plain = name.partition("/")[2] or name
            assert saved.shape == checkpoint.tensors[plain].shape
            assert saved.dtype == "F32"


def test_the_dry_run_says_how_every_parameter_is_trained(overrides, call_main):
    keys = {"optim__name": "muon", "optim__frozen": "[head.*]", "optim__state": "bf16"}
    keys |= {"optim__groups__embedding__lr": 0.5, "optim__lr": 0.02, "model__bias": True}
    _, text, _ = call_main(pretrain_gpt.main, "--dry-run", *overrides(**keys))
    assert "optimizer   muon, state as bf16" in text
    words = [line.split() for line in text.splitlines()]
    assert ["matrix", "muon", "8", "6,144", "0.02", "0.1"] in words
    assert ["embedding", "adamw", "1", "976", "0.01", "0.1"] in words
    assert ["head", "frozen", "1", "976", "-", "-"] in words
    assert ["vector", "adamw", "16", "416", "0.02", "0"] in words
    assert ["vector", "frozen", "2", "32", "-", "-"] in words


PHASES = ("[blocks.0.*]", "[]", "[]", "[head.*]", "[]")
"""What is frozen in each part of a run; the third resumes what the second unfroze."""


@pytest.mark.parametrize(
    "layouts",
    [
        # Each part of a run has another layout than the part before it.
        [(2, {"parallel__zero": 3}), (2, {"parallel__tensor": 2}), (2, {"parallel__pipeline": 2})],
        slow(
            [
                (2, {"parallel__context": 2}),
                (4, {"parallel__zero": 2, "train__microbatch": 2}),
                (1, {}),
            ]
        ),
    ],
    ids=["zero", "context"],
)
def test_updates_of_unfrozen_parameters_are_counted_alike_under_any_layout(
    layouts, pool, overrides, tmp_path
):
    shared_keys = {**EVERY, "train__precision": "fp64", "checkpoint__every": 3}

    def train_parts(name, layouts):
        for number, frozen in enumerate(PHASES):
            ranks, parallel = layouts[number % len(layouts)]
            keys = {**shared_keys, **parallel, "run__dir": tmp_path / name}
            keys |= {"train__steps": 3 * (number + 1), "optim__frozen": frozen}
            resume = {"checkpoint__resume": "latest"} if number else {}
            pool.run(ranks, train, overrides(**keys, **resume))
        with open_checkpoint(tmp_path / name / "checkpoints/step-00000015") as checkpoint:
            before = checkpoint.state["optimizer"]["updates_before"]
        stage = load_stage(tmp_path / name / "checkpoints", precision="fp64")
        return before, {p.spec.name: p.value for p in stage.parameters()}

    before, weights = train_parts("alone", [(1, {})])
    assert before["blocks.0.mlp.up.weight"] == 3 and before["head.weight"] == 12
    assert "blocks.1.mlp.up.weight" not in before
    other_before, other_weights = train_parts("run", layouts)
    assert other_before == before
    for name, weight in weights.items():
        torch.testing.assert_close(other_weights[name], weight, rtol=0, atol=PROMISE)
