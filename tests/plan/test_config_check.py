"""Checks across sections: what is refused, with both numbers and values that then work."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.config import load
from megaframe.errors import UserError
from megaframe.plan.check import ONLY, check

SOUND = ("model.vocab=100", "data.sources=[{path: x}]")


def refusals(*overrides, world=1):
    """The lines of the refusal without its headline, none when the config passes."""
    try:
        check(load(None, [*SOUND, *overrides]), world)
    except UserError as error:
        return str(error).split("\n  ")[1:]
    return []


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.heads=5", "model.head_dim=64"),
        ("model.rotary_fraction=0.25",),
        ("model.position=none", "model.head_dim=7"),
        ("model.position=learned", "model.positions=1024"),
        ("model.position=learned",),
        ("model.rotary_scaling={kind: yarn, factor: 4}",),
        ("train.batch_ramp={start: 2, increment: 2, samples: 50}",),
        ("optim.schedule=wsd", "optim.warmup=100", "optim.decay=900"),
        ("optim.schedule=cosine", "optim.decay=2000"),
        ("data.tokenizer=bytes", "model.vocab=null"),
        ("data.tokenizer=hf:a:b.json",),
        ("data.split=[1, 0, 0]",),
        ("train.eval_every=5",),
    ],
)
def test_a_sound_config_passes(overrides):
    assert refusals(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.heads=12", "model.kv_heads=5"], "kv_heads=5 .* model.heads=12; use 4 or 6"),
        (["model.heads=10"], "heads=10 .* model.hidden=768; use 8 or 12, or set model.head_dim"),
        (["model.heads=1000"], "heads=1000 .* model.hidden=768; use 768"),
        (["model.head_dim=63"], "of model.head_dim=63 rotates 63 dims.*even.* use 0.984127"),
        (["model.rotary_fraction=0.3"], "rotates 19.2 dims.* use 0.28125 or 0.3125"),
        (["model.head_dim=1"], "rotates 1 dims.* use model.head_dim=2"),
        (
            ["model.position=learned", "model.positions=512"],
            "train.seq=1024 is longer .* model.positions=512; use train.seq=512 or fewer",
        ),
        (
            ["model.position=learned", "model.rotary_scaling.kind=yarn"],
            "kind=yarn does nothing with model.position=learned",
        ),
        (["model.rotary_scaling.factor=2"], "factor=2 does nothing with .*kind=none"),
        (
            ["model.rotary_scaling={kind: llama3, low_frequency: 4}"],
            "low_frequency=4 must be less than .*high_frequency=4",
        ),
        (["model.vocab=null"], "model.vocab and data.tokenizer are both missing"),
        (["data.tokenizer=gpt2"], "data.tokenizer=gpt2 .* use sentencepiece:PATH, hf:PATH"),
        (["data.tokenizer='hf:'"], "data.tokenizer=hf: is not of the form"),
        (["train.microbatch=3"], "global_batch=8 .*microbatch=3 on 1 data rank; use 6 or 9"),
        (
            ["train.microbatch=2", "train.batch_ramp={start: 3, increment: 1, samples: 9}"],
            "batch_ramp.start=3 does not divide .* use 2 or 4",
        ),
        (
            ["train.microbatch=2", "train.batch_ramp={start: 2, increment: 1, samples: 9}"],
            "batch_ramp.increment=1 does not divide .* use 2",
        ),
        (
            ["train.batch_ramp={start: 9, increment: 1, samples: 9}"],
            "batch_ramp.start=9 is more than train.global_batch=8.* use 8 or fewer",
        ),
        (
            ["train.batch_ramp={start: 2, increment: 4, samples: 9}"],
            "start=2 is not a multiple of .*increment=4; use 4",
        ),
        (
            ["train.batch_ramp={start: 5, increment: 5, samples: 9}"],
            "increment=5 does not divide the rise .*start=5 to train.global_batch=8, 3; use 3",
        ),
        (["optim.warmup=1001"], "optim.warmup=1001 .* train.steps=1000; use 1000 or fewer"),
        (["optim.min_lr=1e-2"], "optim.min_lr=0.01 is above optim.lr=0.0003"),
        (["optim.schedule=wsd", "optim.decay=1000"], "optim.decay=1000 .* use 200"),
        (
            ["optim.schedule=wsd", "optim.decay=600", "optim.warmup=500"],
            "warmup=500 and .*decay=600 overlap in train.steps=1000; use optim.decay=500",
        ),
        (["optim.decay=5", "optim.warmup=5"], "decay=5, .*warmup=5; use 6 or more"),
        (["data.sources=[]"], r"data.sources is empty; .*data.sources=\[{path: PATH}\]"),
        (["data.split=[0.5, 0.1, 0]"], r"sums to 0.6, not 1; use \[0.833333, 0.166667, 0.0\]"),
        (["data.split=[0, 0, 0]"], r"sums to 0, not 1; use \[1, 0, 0\]"),
        (["data.split=[0, 0.5, 0.5]"], "leaves nothing to train on"),
        (["train.eval_every=5", "data.split=[1, 0, 0]"], "eval_every=5 needs a validation split"),
    ],
)
def test_what_is_refused(overrides, message):
    assert any(re.search(message, line) for line in refusals(*overrides))


@pytest.mark.parametrize("name", ONLY)
def test_what_this_version_cannot_do_is_said_and_not_ignored(name):
    other = "gpipe" if name == "parallel.schedule" else 3
    line = f"{name}={other}: only {ONLY[name]} works in this version"
    assert line in refusals(f"{name}={other}", world=3)
    assert refusals(f"{name}={ONLY[name]}") == []


def test_all_mistakes_come_at_once():
    lines = refusals(
        "model.heads=7",
        "train.microbatch=5",
        "optim.warmup=2000",
        "data.sources=[]",
        "parallel.zero=1",
        "parallel.data=2",
        world=4,
    )
    starts = ["parallel.zero=1", "parallel.data=2", "model.heads=7", "optim.warmup", "data.sources"]
    assert len(lines) == len(starts)
    for start, line in zip(starts, lines, strict=True):
        assert line.startswith(start)


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 40),
    microbatch=st.integers(1, 6),
    world=st.integers(1, 6),
    ramp=st.none() | st.tuples(st.integers(1, 12), st.integers(1, 6)),
)
def test_a_config_that_passes_divides_on_every_step(batch, microbatch, world, ramp):
    overrides = [f"train.global_batch={batch}", f"train.microbatch={microbatch}"]
    sizes = [batch]
    if ramp is not None:
        start, increment = ramp
        sizes += range(start, batch, increment)
        overrides.append(f"train.batch_ramp={{start: {start}, increment: {increment}, samples: 9}}")
    lines = refusals(*overrides, world=world)
    if not lines:
        assert all(size % (microbatch * world) == 0 for size in sizes)
    for line in lines:
        if line.startswith("train.global_batch="):
            for value in re.findall(r"\d+", line.rpartition("use ")[2]):
                assert refusals(overrides[1], f"train.global_batch={value}", world=world) == []


@settings(deadline=None, max_examples=60)
@given(hidden=st.integers(1, 200), heads=st.integers(1, 40), kv_heads=st.integers(1, 40))
def test_suggested_heads_work(hidden, heads, kv_heads):
    keys = {"model.hidden": hidden, "model.heads": heads, "model.kv_heads": kv_heads}
    position = "model.position=none"
    for line in refusals(position, *(f"{k}={v}" for k, v in keys.items())):
        name = line.partition("=")[0]
        for value in re.findall(r"\d+", line.rpartition("use ")[2]):
            mended = {**keys, name: int(value)}
            again = refusals(position, *(f"{k}={v}" for k, v in mended.items()))
            assert not any(line.startswith(f"{name}={value} ") for line in again)
