"""Checks across sections: refusals name both numbers, and suggest values that work.

Tests `megaframe.validate.optim` and `megaframe.validate.train`.
"""

import re

import pytest
from config_refusals import LATENT, SOUND, list_refusals
from hypothesis import given
from hypothesis import strategies as st

from megaframe.config import load
from megaframe.layout import Layout
from megaframe.validate.run import find_warnings

INDEXER, RANK = "model.indexer={heads: 2, head_dim: 16, top_k: 9}", "model.latent.query_rank=24"
ABSORB = "model.indexer.absorb=true"
ABSORBED = INDEXER, ABSORB


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.heads=5", "model.head_dim=64"),
        ("model.rotary_fraction=0.25",),
        ("model.position=none", "model.head_dim=7"),
        ("model.layers=3", "model.window=[8, null]"),
        ("model.layers=2", "model.window=[8, null]"),
        (LATENT,),
        (LATENT, "model.heads=5", "model.hidden=64"),
        (LATENT, "model.rotary_scaling={kind: yarn, factor: 40, mscale_all_dim: 0.7}"),
        ("model.position=learned", "model.positions=1024"),
        ("model.position=learned",),
        ("model.rotary_scaling={kind: yarn, factor: 4}",),
        ("train.batch_ramp={start: 2, increment: 2, samples: 50}",),
        ("optim.schedule=wsd", "optim.warmup=100", "optim.decay=900"),
        ("optim.schedule=cosine", "optim.decay=2000"),
        ("optim.name=muon", "optim.momentum=0.9", "optim.nesterov=false"),
        ("optim.name=sgd", "optim.momentum=0"),
        ("data.tokenizer=bytes", "model.vocab=null"),
        ("data.tokenizer=hf:a:b.json",),
        ("data.split=[1, 0, 0]",),
        ("model.parametrisation=mup", "model.mup_base_hidden=256"),
        ("model.parametrisation=mup", "model.mup_base_hidden=7", "model.mup_base_head_dim=8"),
        ("train.eval_every=5",),
        ("checkpoint.every=5", "checkpoint.keep_every=10"),
    ],
)
def test_a_sound_config_passes(overrides):
    assert list_refusals(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallel.compress=int8", "train.precision=fp16"],
            "compress=int8 .*train.precision=fp16 may change; use bf16 or fp32, or .*=none",
        ),
        (
            ["parallel.compress=topk", "parallel.compress_keep=2"],
            "compress_keep=2 is more than all elements, of which parallel.compress=topk sends a sh",
        ),
        (
            ["parallel.compress=powersgd", "parallel.compress_keep=0.5"],
            "compress_keep=0.5 is not a whole number of columns, as .*=powersgd needs; use 1",
        ),
        (
            ["parallel.compress_keep=0.5"],
            "compress_keep=0.5 has no effect with parallel.compress=none; .*threshold or powersgd",
        ),
        (
            ["optim.momentum=0.9", "optim.name=lion"],
            "momentum=0.9 has no effect with optim.name=lion; leave .* optim.name=muon or sgd",
        ),
        (
            ["model.parametrisation=mup"],
            "parametrisation=mup needs model.mup_base_hidden, .* that of model.hidden=768, and mup",
        ),
        (
            ["model.mup_base_hidden=256"],
            "mup_base_hidden=256 has no effect with model.parametrisation=standard; leave it out",
        ),
        (
            ["model.mup_base_head_dim=64"],
            "mup_base_head_dim=64 has no effect with model.parametrisation=standard; leave it out",
        ),
        (
            ["checkpoint.every=6", "checkpoint.keep_every=10"],
            "keep_every=10 is not a multiple of checkpoint.every=6; use 6 or 12",
        ),
        (
            ["checkpoint.every=6", "checkpoint.huggingface_every=10"],
            "huggingface_every=10 is not a multiple of checkpoint.every=6; use 6 or 12",
        ),
        (
            ["checkpoint.huggingface_every=1000", "checkpoint.folder=s3://bucket/run"],
            "huggingface_every=1000 writes into a file system, and checkpoint.folder is a URL",
        ),
        (
            ["checkpoint.every=6", "checkpoint.keep_best=2"],
            "keep_best=2 compares evaluations, and train.eval_every=0 has none; use "
            "train.eval_every=6",
        ),
        (
            ["checkpoint.every=6", "train.eval_every=4", "checkpoint.keep_best=2"],
            "is a multiple of the other; use train.eval_every=3 or 6",
        ),
        (
            ["checkpoint.every=0", "checkpoint.keep_every=10"],
            "keep_every=10 has no effect with checkpoint.every=0",
        ),
        (["optim.nesterov=true"], "nesterov=true has no effect with optim.name=adamw"),
        (
            ["optim.name=sgd", "optim.nesterov=true", "optim.momentum=0"],
            "nesterov=true looks ahead along optim.momentum=0; use optim.nesterov=false",
        ),
        (
            ["model.layers=2", "model.window=[8, null, 4]"],
            "model.window has 3 entries for model.layers=2; use 1 to 2 of them, which are repeated",
        ),
        (
            ["model.layers=2", "model.window=[]"],
            r"model.window=\[\] has 0 entries to repeat over model.layers=2; .* or 1 to 2 entries",
        ),
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
            "kind=yarn has no effect with model.position=learned",
        ),
        (["model.rotary_scaling.factor=2"], "factor=2 has no effect with .*kind=none"),
        (
            ["model.rotary_scaling={kind: llama3, low_frequency: 5}"],
            "low_frequency=5 must be at most .*high_frequency=4",
        ),
        (
            ["model.rotary_scaling={kind: yarn, factor: 4, low_frequency: 5}"],
            "low_frequency=5 must be at most .*high_frequency=4",
        ),
        (
            ["model.rotary_scaling={kind: yarn, factor: 4, mscale_all_dim: 1}"],
            "mscale_all_dim=1 needs model.latent; use 0",
        ),
        (
            ["model.rotary_scaling={kind: llama3, mscale: 2}"],
            "mscale=2 and mscale_all_dim=0 have no effect with .*kind=llama3; .* use kind yarn",
        ),
        (
            ["model.rotary_scaling={kind: linear, short_factors: [1.0]}"],
            "short_factors and long_factors have no effect with .*kind=linear; .* kind longrope",
        ),
        (
            ["model.rotary_scaling={kind: linear, proportion: 0.5}"],
            "proportion=0.5 has no effect with .*kind=linear; leave it out, or use kind prop",
        ),
        (
            ["model.rotary_scaling={kind: proportional, proportion: 0.01}"],
            "proportion=0.01 of 64 dims rotates no pair; use 0.03125 or more, or kind linear",
        ),
        (
            ["model.rotary_scaling={kind: linear, truncate: false}"],
            "truncate=false has no effect with .*kind=linear; leave it out, or use kind yarn",
        ),
        (
            ["model.rotary_scaling={kind: dynamic, factor: 2}", "model.head_dim=2"],
            "kind=dynamic has no larger base for 2 rotated dims; rotate 4 or more",
        ),
        (
            ["model.rotary_scaling={kind: longrope, short_factors: [1.0]}"],
            "short_factors has 1 factors for the 32 pairs .* are rotated; give 32",
        ),
        ([LATENT, "model.kv_heads=4"], "kv_heads=4 has no effect with model.latent.*heads=12"),
        ([LATENT, "model.head_dim=32"], "model.head_dim=32 .*latent.head_dim=32 dims beside"),
        (
            [LATENT, "model.qk_norm=whole"],
            "qk_norm=whole cannot be combined with model.latent; .*=false",
        ),
        (
            [LATENT, "model.qk_norm=true"],
            "qk_norm=true cannot be combined with model.latent; .*=false",
        ),
        (
            [LATENT, "model.bias=true"],
            "qkv_bias=true cannot be combined with model.latent; .*=false",
        ),
        (
            [LATENT, "model.position=learned"],
            "rotary_dim=16 rotated dims, but model.position=learned; use model.position=rotary",
        ),
        ([LATENT, "model.latent.rotary_dim=7"], "rotary_dim=7 must be an even.* use 6 or 8"),
        (
            [LATENT, "model.rotary_fraction=0.5"],
            "rotary_fraction=0.5 has no effect with model.latent, of which .*rotary_dim=16",
        ),
        ([INDEXER], "model.latent is missing; set it, or leave model.indexer out"),
        ([LATENT, INDEXER], "model.latent.query_rank is missing; set it, or leave"),
        (
            [LATENT, RANK, INDEXER, "model.indexer.head_dim=12"],
            "head_dim=12 is less than the .*rotary_dim=16 dims that are rotated; use 16 or more",
        ),
        (
            [LATENT, RANK, INDEXER, "model.indexer.dense=true"],
            "dense=true lets .* and model.indexer.loss=0 trains nothing .*; use a larger loss",
        ),
        (
            [LATENT, RANK, INDEXER, "model.indexer.loss=1", "model.adapters={rank: 2}"],
            "indexer.loss=1 has no effect with model.adapters, .* use model.indexer.loss=0",
        ),
        ([LATENT, RANK, *ABSORBED, "train.seq=9"], f"{ABSORB} cannot .*seq=9 .*top_k=9; use"),
        ([LATENT, RANK, *ABSORBED, "train.fp8=row"], f"{ABSORB} cannot .* train.fp8=row mult"),
        (
            [LATENT, RANK, *ABSORBED, "model.indexer.loss=1", "model.indexer.dense=true"],
            f"{ABSORB} cannot work here: model.indexer.dense=true lets attention see all keys; "
            "use model.indexer.absorb=auto or false",
        ),
        (
            [LATENT, RANK, *ABSORBED, "model.adapters={rank: 2, targets: [value]}"],
            f"{ABSORB} cannot .* model.adapters.targets names attention.kv.value, to whose",
        ),
        (
            ["model.mtp_depth=1", "model.emulate={forward: 1}"],
            "mtp_depth=1 predicts with blocks, .* model.emulate .*; use model.mtp_depth=0",
        ),
        (["model.mtp_depth=4", "train.seq=4"], "mtp_depth=4 looks past .*seq=4 .*use 3 or less"),
        (["train.mtp_weight=0.1"], "mtp_weight=0.1 has no effect with model.mtp_depth=0.*depth=1"),
        (["model.vocab=null"], "model.vocab and data.tokenizer are both missing"),
        (["data.tokenizer=gpt2"], "data.tokenizer=gpt2 .* use sentencepiece:PATH, hf:PATH"),
        (["data.tokenizer='hf:'"], "data.tokenizer=hf: is not of the form"),
        (["train.microbatch=3"], "global_batch=8 .*microbatch=3 on 1 data rank; use 6 or 9"),
        (
            ["train.microbatch=2", "train.batch_ramp={start: 3, increment: 1, samples: 9}"],
            "batch_ramp.start=3 and train.batch_ramp.increment=1 do not divide .*microbatch=2 on 1 "
            "data rank; use train.batch_ramp.start=4 with train.batch_ramp.increment=2$",
        ),
        (
            ["train.microbatch=2", "train.batch_ramp={start: 2, increment: 1, samples: 9}"],
            "batch_ramp.increment=1 does not divide .* use train.batch_ramp.start=2 with "
            "train.batch_ramp.increment=2$",
        ),
        (
            ["train.batch_ramp={start: 9, increment: 1, samples: 9}"],
            "batch_ramp.start=9 is more than train.global_batch=8; use train.batch_ramp.start=8$",
        ),
        (
            ["train.batch_ramp={start: 2, increment: 4, samples: 9}"],
            "start=2 is not a multiple of .*increment=4; use train.batch_ramp.start=4$",
        ),
        (
            ["train.batch_ramp={start: 5, increment: 5, samples: 9}"],
            "increment=5 does not divide the rise .*start=5 to train.global_batch=8, 3; use "
            "train.batch_ramp.start=4 with train.batch_ramp.increment=4 or "
            "train.batch_ramp.start=8 with train.batch_ramp.increment=8$",
        ),
        (["optim.min_lr=1e-2"], "optim.min_lr=0.01 is above optim.lr=0.0003"),
        (["optim.schedule=wsd", "optim.decay=1000"], "optim.decay=1000 .* use 200"),
        (
            ["optim.schedule=wsd", "optim.decay=600", "optim.warmup=500"],
            "warmup=500 and .*decay=600 steps overlap in train.steps=1000; use optim.decay=500",
        ),
        (["optim.decay=5", "optim.warmup=5"], "decay=5, .*warmup=5; use 6 or more"),
        (["data.sources=[]"], r"data.sources is empty; .*data.sources=\[PATH\]"),
        (["data.split=[0.5, 0.1, 0]"], r"sums to 0.6, not 1; use \[0.833333, 0.166667, 0.0\]"),
        (["data.split=[0, 0, 0]"], r"sums to 0, not 1; use \[1, 0, 0\]"),
        (["data.split=[0, 0.5, 0.5]"], "leaves nothing to train on"),
        (["train.eval_every=5", "data.split=[1, 0, 0]"], "eval_every=5 needs a validation split"),
        (
            ["data.sources=[{path: a}, {path: b, split: [0.5, 0, 1]}]"],
            r"data.sources\[1\].split=\[0.5, 0.0, 1.0\] sums to 1.5, not 1; use \[0.333333, 0.0",
        ),
        (
            ["data.sources=[{path: a, split: [0, 1, 0]}, {path: b, split: [0, 0, 1]}]"],
            r"sources\[0\].split=\[0.0, 1.0, 0.0\], .*sources\[1\].* leaves nothing to train on",
        ),
        (
            ["train.eval_every=5", "data.sources=[{path: a, split: [1, 0, 0]}]"],
            r"needs a validation split, and data.sources\[0\].split=\[1.0, 0.0, 0.0\] has none",
        ),
    ],
)
def test_what_is_refused(overrides, message):
    assert any(re.search(message, line) for line in list_refusals(*overrides))


def test_a_comparison_of_nothing_is_warned_of():
    def list_warnings(*keys, world=4):
        config = load(None, [*SOUND, "faults.compare_every=5", *keys])
        return find_warnings(config, Layout.from_parallel(config.parallel, world), world)

    (line,) = list_warnings()
    assert line.startswith("warning: faults.compare_every=5 compares nothing: with parallel.zero=1")
    assert "use parallel.zero=0, or parallel.data_replicate=2" in line
    assert list_warnings("parallel.zero=0") == list_warnings("parallel.data_replicate=2") == []
    assert list_warnings("faults.compare_every=0") == []


def test_all_mistakes_come_at_once():
    lines = list_refusals(
        "model.heads=7",
        "train.microbatch=5",
        "optim.min_lr=1",
        "data.sources=[]",
        "parallel.expert=2",
        "parallel.data=2",
        world=4,
    )
    starts = [
        "parallel.data=2",
        "model.heads=7",
        "parallel.expert=2",
        "optim.min_lr",
        "data.sources",
    ]
    assert len(lines) == len(starts)
    for start, line in zip(starts, lines, strict=True):
        assert line.startswith(start)


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
    lines = list_refusals(*overrides, world=world)
    if not lines:
        assert all(size % (microbatch * world) == 0 for size in sizes)
    for line in lines:
        if line.startswith("train.global_batch="):
            for value in re.findall(r"\d+", line.rpartition("use ")[2]):
                assert list_refusals(overrides[1], f"train.global_batch={value}", world=world) == []
        elif len(lines) == 1:
            for mended in re.split(" or ", line.rpartition("use ")[2]):
                keys = mended if "=" in mended else f"train.batch_ramp.start={mended}"
                assert list_refusals(*overrides, *keys.split(" with "), world=world) == []


@given(hidden=st.integers(1, 200), heads=st.integers(1, 40), kv_heads=st.integers(1, 40))
def test_suggested_heads_work(hidden, heads, kv_heads):
    keys = {"model.hidden": hidden, "model.heads": heads, "model.kv_heads": kv_heads}
    position = "model.position=none"
    for line in list_refusals(position, *(f"{k}={v}" for k, v in keys.items())):
        name = line.partition("=")[0]
        for value in re.findall(r"\d+", line.rpartition("use ")[2]):
            mended = {**keys, name: int(value)}
            remaining = list_refusals(position, *(f"{k}={v}" for k, v in mended.items()))
            assert not any(line.startswith(f"{name}={value} ") for line in remaining)


@pytest.mark.parametrize(
    "override",
    [
        "run.dir={}",
        "checkpoint.memory_dir={}",
        "parallel.cluster={}",
        "metrics.wandb={}",
        "data.streaming.cache={}",
        "data.tokenizer=hf:{}",
    ],
)
@pytest.mark.parametrize("url", ["s3://bucket/run", "sftp://user@host/x", "file:///tmp/x"])
def test_a_key_that_takes_no_url_refuses_it(override, url):
    (line,) = list_refusals(override.format(url))
    key = override.partition("=")[0]
    assert line.startswith(key) and " and no URL; URLs are taken by data.sources, " in line
    assert "user" not in line


def test_a_url_of_a_source_with_a_secret_is_refused():
    assert list_refusals("data.sources=[s3://bucket/texts, https://host/texts]") == []
    for url in ("https://host/a?token=abcdefgh", "s3://user:abcdefgh@bucket/a", "s3://bucket/../a"):
        (line,) = list_refusals(f"data.sources=[{{path: a}}, {{path: '{url}'}}]")
        assert "data.sources" in line and "abcdefgh" not in line


def test_an_api_key_is_no_project():
    (line,) = list_refusals("metrics.wandb=" + "0123456789" * 4)
    assert "not an API key; give that in WANDB_API_KEY" in line and "0123456789" not in line
    assert list_refusals("metrics.wandb=project-of-40-hexadecimal") == []
