"""Checks across sections: refusals name both numbers, and suggest values that work."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.config import load
from megaframe.errors import TIMES, UserError
from megaframe.layout import Layout
from megaframe.validate.run import find_warnings, validate_config

LATENT = "model.latent={kv_rank: 64, head_dim: 32, rotary_dim: 16, value_dim: 32}"
SOUND = ("model.vocab=100", "data.sources=[{path: x}]")


def refusals(*overrides, world=1):
    """Return the lines of the refusal without its headline, or none if the config passes."""
    try:
        validate_config(load(None, [*SOUND, *overrides]), world)
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
        ("train.eval_every=5",),
        ("checkpoint.every=5", "checkpoint.keep_every=10"),
    ],
)
def test_a_sound_config_passes(overrides):
    assert refusals(*overrides) == []


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
            "compress_keep=0.5 has no effect with parallel.compress=none; .*=topk or powersgd",
        ),
        (
            ["optim.momentum=0.9", "optim.name=lion"],
            "momentum=0.9 has no effect with optim.name=lion; leave .* optim.name=muon or sgd",
        ),
        (
            ["checkpoint.every=6", "checkpoint.keep_every=10"],
            "keep_every=10 is not a multiple of checkpoint.every=6; use 6 or 12",
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
            ["model.rotary_scaling={kind: llama3, low_frequency: 4}"],
            "low_frequency=4 must be less than .*high_frequency=4",
        ),
        (
            ["model.rotary_scaling={kind: yarn, factor: 4, mscale_all_dim: 1}"],
            "mscale_all_dim=1 needs model.latent; use 0",
        ),
        (
            ["model.rotary_scaling={kind: llama3, mscale: 2}"],
            "mscale=2 and mscale_all_dim=0 have no effect with .*kind=llama3; .* use kind yarn",
        ),
        ([LATENT, "model.kv_heads=4"], "kv_heads=4 has no effect with model.latent.*heads=12"),
        ([LATENT, "model.head_dim=32"], "model.head_dim=32 .*latent.head_dim=32 dims beside"),
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
        (["data.sources=[]"], r"data.sources is empty; .*data.sources=\[{path: PATH}\]"),
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
    assert any(re.search(message, line) for line in refusals(*overrides))


def test_chunks_are_interleaved_unless_a_schedule_is_given():
    keys = ["parallel.pipeline=2", "parallel.chunks=2"]
    assert load(None, keys).parallel.schedule == "interleaved"
    assert load(None, keys[:1]).parallel.schedule == "1f1b"
    assert load(None, [*keys, "parallel.schedule=zb-v"]).parallel.schedule == "zb-v"
    assert refusals(*keys, world=2) == []
    (line,) = refusals(*keys, "parallel.schedule=1f1b", world=2)
    assert line.startswith("parallel.schedule=1f1b does not run parallel.chunks=2; use")


def test_a_comparison_of_nothing_is_warned_of():
    def list_warnings(*keys, world=4):
        config = load(None, [*SOUND, "faults.compare_every=5", *keys])
        return find_warnings(config, Layout.from_parallel(config.parallel, world), world)

    (line,) = list_warnings()
    assert line.startswith("warning: faults.compare_every=5 compares nothing: with parallel.zero=1")
    assert "use parallel.zero=0, or parallel.data_replicate=2" in line
    assert list_warnings("parallel.zero=0") == list_warnings("parallel.data_replicate=2") == []
    assert list_warnings("faults.compare_every=0") == []


# (a pipeline that is refused, the message, changes that it suggests, each of which must pass)
PIPELINES = [
    (
        {"pipeline": 16},
        "parallel.pipeline=16 is 16 stages for model.layers=12; use parallel.pipeline=12",
        [{"pipeline": 12, "global_batch": 16}],
    ),
    (
        {"pipeline": 4, "chunks": 4, "schedule": "interleaved"},
        "pipeline=4 \N{MULTIPLICATION SIGN} parallel.chunks=4 is 16 stages for model.layers=12; "
        "use parallel.chunks=3 or parallel.pipeline=3",
        [{"chunks": 3}, {"pipeline": 3}],
    ),
    (
        {"pipeline": 2, "chunks": 2, "schedule": "1f1b"},
        "parallel.schedule=1f1b does not run parallel.chunks=2; use parallel.chunks=1, or "
        "parallel.schedule=interleaved, breadth-first, zb-v, v-half, dualpipe-v or search",
        [{"chunks": 1}]
        + [
            {"schedule": name}
            for name in ("interleaved", "breadth-first", "zb-v", "v-half", "dualpipe-v", "search")
        ],
    ),
    (
        {"pipeline": 2, "chunks": 3, "schedule": "zb-v"},
        "zb-v does not run parallel.chunks=3; use parallel.chunks=2, or parallel.schedule=interl",
        [{"chunks": 2}, {"schedule": "interleaved"}],
    ),
    (
        {"pipeline": 4, "schedule": "zb-h1", "microbatch": 4},
        "a step has 2 microbatches, but parallel.schedule=zb-h1 needs at least "
        "parallel.pipeline=4; use train.global_batch or train.microbatch for 4 microbatches, "
        "parallel.pipeline=2, or parallel.schedule=gpipe, 1f1b, breadth-first or search",
        [{"global_batch": 16}, {"microbatch": 2}, {"pipeline": 2}]
        + [{"schedule": name} for name in ("gpipe", "1f1b", "breadth-first", "search")],
    ),
    (
        {"pipeline": 2, "layers_per_stage": [6, 4, 2]},
        "layers_per_stage=[6, 4, 2] has 3 stages, but parallel.pipeline=2 makes 2; "
        "use for example [6, 6], or leave it out",
        [{"layers_per_stage": [6, 6]}, {"layers_per_stage": "null"}],
    ),
    (
        {"pipeline": 4, "chunks": 2, "schedule": "zb-v", "layers_per_stage": [12] + 7 * [1]},
        "sums to 19, not to model.layers=12; use for example [2, 2, 2, 2, 1, 1, 1, 1]",
        [{"layers_per_stage": [2, 2, 2, 2, 1, 1, 1, 1]}, {"layers_per_stage": "null"}],
    ),
    (
        {"pipeline": 2, "recompute_blocks": [1, 2, 3]},
        "train.recompute_blocks=[1, 2, 3] has 3 stages, but parallel.pipeline=2 makes 2; "
        "use for example [1, 2], or one number",
        [{"recompute_blocks": [1, 2]}, {"recompute_blocks": 3}],
    ),
    (
        {"pipeline": 4, "recompute_blocks": [1, 2]},
        "has 2 stages, but parallel.pipeline=4 makes 4; use for example [1, 2, 2, 2]",
        [{"recompute_blocks": [1, 2, 2, 2]}],
    ),
    (
        {"pipeline": 2, "schedule": "1f2b"},
        "schedule=1f2b is not one of gpipe, 1f1b, interleaved, breadth-first, zb-h1, zb-h2, zb-v, "
        "v-half, dualpipe-v, search and file:PATH; did you mean 1f1b?",
        [{"schedule": "1f1b"}],
    ),
    (
        {"pipeline": 2, "schedule_microbatches": 4},
        "parallel.schedule_microbatches=4: a group of 4 microbatches has no effect with "
        "1f1b; leave it out, or use parallel.schedule=interleaved or search",
        [
            {"schedule_microbatches": "null"},
            {"schedule": "interleaved", "chunks": 2},
            {"schedule": "search"},
        ],
    ),
    (
        {"pipeline": 4, "chunks": 2, "schedule": "interleaved", "schedule_microbatches": 3},
        "schedule_microbatches=3: a group of 3 microbatches would stop interleaved on "
        "parallel.pipeline=4; use 4 or more",
        [{"schedule_microbatches": 4}, {"schedule_microbatches": 7}],
    ),
    (
        {
            "pipeline": 2,
            "chunks": 2,
            "schedule": "interleaved",
            "schedule_microbatches": 2.5,
        },
        "schedule_microbatches=2.5 is not a whole number, as parallel.schedule=interleaved needs; "
        "use 2 or 3",
        [{"schedule_microbatches": 2}, {"schedule": "search"}],
    ),
]
TRAIN = ("global_batch", "microbatch", "batch_ramp", "recompute_blocks")


def list_pipeline_refusals(keys):
    """Return the refusals of a model with 12 layers on the ranks of a pipeline."""
    named = {("train." if key in TRAIN else "parallel.") + key: keys[key] for key in keys}
    overrides = ["model.layers=12", *(f"{name}={value}" for name, value in named.items())]
    return refusals(*overrides, world=keys["pipeline"])


@pytest.mark.parametrize(("keys", "message", "mends"), PIPELINES)
def test_a_pipeline_that_cannot_be_is_refused_and_the_advice_works(keys, message, mends):
    lines = list_pipeline_refusals(keys)
    assert len(lines) == 1 and message in lines[0]
    for mend in mends:
        assert list_pipeline_refusals({**keys, **mend}) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", "deadlock of 2 of 2 ranks: rank 1 waits with 1F1"),
        ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1", "0B1 is missing: 1 B for 2 microbatches"),
        ("0F0 0F1 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", "0F1 is repeated; it stands at 1 already"),
        ("0F0 0B0 0F1 0B1", "is made for 1, but parallel.pipeline is 2"),
        ("0F0 0B0\n1F0 1B0", "is made for 1, but the microbatches of a step is 2"),
        (
            "0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1\n1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1",
            "is made for 2, but parallel.chunks is 1",
        ),
        (None, "cannot be read"),
    ],
)
def test_a_schedule_file_that_cannot_run_is_refused_and_mended(text, message, tmp_path):
    path = tmp_path / "own.txt"
    keys = {"pipeline": 2, "schedule": f"file:{path}", "global_batch": 2}
    if text is not None:
        path.write_text(text)
    lines = list_pipeline_refusals(keys)
    assert lines[0].startswith(f"parallel.schedule=file:{path}") and message in lines[0]
    path.write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert list_pipeline_refusals(keys) == []


# (context and tensor ranks that are refused, the message, changes that it suggests, each of which
# must pass)
EXCHANGE = {"parallel.context_kind": "all_to_all"}
NESTED = {"parallel.context_kind": "nested"}
RANKS = [
    (
        {**EXCHANGE, "parallel.context": 5},
        "parallel.context=5 of parallel.context_kind=all_to_all can neither divide nor evenly "
        "share model.kv_heads=12 with model.heads=12; use 4 or 6, or parallel.context_kind=ring",
        [{"parallel.context": 4}, {"parallel.context": 6}, {"parallel.context_kind": "ring"}],
    ),
    (
        {**EXCHANGE, "parallel.context": 4, "parallel.tensor": 4},
        "model.heads=12 on each of parallel.tensor=4; use 3, or parallel.context_kind=ring",
        [{"parallel.context": 3}, {"parallel.context_kind": "ring"}],
    ),
    (
        {**NESTED, "parallel.context": 4},
        "parallel.context_heads=left out does not divide parallel.context=4 into a ring of more "
        "than one group of more than one rank, as parallel.context_kind=nested needs; use "
        "parallel.context_heads=2, or parallel.context_kind=ring or all_to_all",
        [{"parallel.context_heads": 2}, {"parallel.context_kind": "ring"}, EXCHANGE],
    ),
    (
        {**NESTED, "parallel.context": 12, "parallel.context_heads": 5},
        "parallel.context_heads=5 does not divide parallel.context=12",
        [{"parallel.context_heads": 4}, {"parallel.context_heads": 6}],
    ),
    (
        {**NESTED, "parallel.context": 5, "parallel.context_heads": 5},
        "no number does; use parallel.context_kind=ring",
        [{"parallel.context_kind": "ring", "parallel.context_heads": "null"}],
    ),
    (
        {**NESTED, "parallel.context": 16, "parallel.context_heads": 8},
        "parallel.context_heads=8 can neither divide nor evenly share model.kv_heads=12 with "
        "model.heads=12; use 4, or parallel.context_kind=ring",
        [{"parallel.context_heads": 4}],
    ),
    (
        {"parallel.context": 4, "parallel.context_heads": 2},
        "parallel.context_heads=2 has no effect with parallel.context_kind=ring; leave it out, or "
        "use parallel.context_kind=nested",
        [{"parallel.context_heads": "null"}, NESTED],
    ),
    (
        {"parallel.tensor": 8},
        "parallel.tensor=8 can neither divide model.kv_heads=12 nor share them evenly among "
        "model.heads=12; use 6 or 12",
        [{"parallel.tensor": 6}, {"parallel.tensor": 12}],
    ),
    (
        {LATENT.partition("=")[0]: LATENT.partition("=")[2], "parallel.tensor": 8},
        "parallel.tensor=8 does not divide model.heads=12; use 6 or 12",
        [{"parallel.tensor": 6}, {"parallel.tensor": 12}],
    ),
    (
        {"parallel.tensor": 4, "parallel.tensor_chunks": 257},
        "parallel.tensor_chunks=257 is more than the 256 rows of a microbatch (train.microbatch=1"
        f"{TIMES}train.seq=1024) that each rank has; use 256 or fewer",
        [{"parallel.tensor_chunks": 256}],
    ),
    (
        {"parallel.tensor_chunks": 2},
        "parallel.tensor_chunks=2 has no effect with parallel.tensor=1, where no rows travel; "
        "leave it out",
        [{"parallel.tensor_chunks": 1}, {"parallel.tensor": 2}],
    ),
]


@pytest.mark.parametrize(("keys", "message", "mends"), RANKS)
def test_ranks_that_cannot_be_are_refused_and_the_advice_works(keys, message, mends):
    def list_refusals(keys):
        ranks = keys.get("parallel.context", 1) * keys.get("parallel.tensor", 1)
        return refusals(*(f"{name}={value}" for name, value in keys.items()), world=ranks)

    lines = list_refusals(keys)
    assert len(lines) == 1 and message in lines[0]
    for mend in mends:
        mended = {**keys, **mend}
        assert list_refusals(mended) == []


def test_a_schedule_file_fits_every_size_of_a_batch_ramp(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    ramp = "{start: 2, increment: 2, samples: 9}"
    keys = {"pipeline": 2, "schedule": f"file:{path}", "global_batch": 4, "batch_ramp": ramp}
    (line,) = list_pipeline_refusals(keys)
    assert "is made for 2, but the microbatches of a step is 4" in line


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
    ],
)
def test_experts_that_do_not_fit(overrides, line):
    assert line in refusals(*overrides, "train.global_batch=64", world=16)


def test_all_mistakes_come_at_once():
    lines = refusals(
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
        elif len(lines) == 1:
            for mended in re.split(" or ", line.rpartition("use ")[2]):
                keys = mended if "=" in mended else f"train.batch_ramp.start={mended}"
                assert refusals(*overrides, *keys.split(" with "), world=world) == []


@settings(deadline=None, max_examples=60)
@given(hidden=st.integers(1, 200), heads=st.integers(1, 40), kv_heads=st.integers(1, 40))
def test_suggested_heads_work(hidden, heads, kv_heads):
    keys = {"model.hidden": hidden, "model.heads": heads, "model.kv_heads": kv_heads}
    position = "model.position=none"
    for line in refusals(position, *(f"{k}={v}" for k, v in keys.items())):
        name = line.partition("=")[0]
        for value in re.findall(r"\d+", line.rpartition("use ")[2]):
            mended = {**keys, name: int(value)}
            remaining = refusals(position, *(f"{k}={v}" for k, v in mended.items()))
            assert not any(line.startswith(f"{name}={value} ") for line in remaining)


@pytest.mark.parametrize(
    "override",
    [
        "run.dir={}",
        "checkpoint.memory_dir={}",
        "parallel.cluster={}",
        "meter.wandb={}",
        "data.sources=[{{path: a}}, {{path: {}}}]",
        "data.tokenizer=hf:{}",
    ],
)
@pytest.mark.parametrize("url", ["s3://bucket/run", "sftp://user@host/x", "file:///tmp/x"])
def test_a_key_that_takes_no_url_refuses_it(override, url):
    (line,) = refusals(override.format(url))
    key = override.partition("=")[0]
    assert line.startswith(key) and " and no URL; URLs are taken by checkpoint.folder" in line
    assert "user" not in line


def test_an_api_key_is_no_project():
    (line,) = refusals("meter.wandb=" + "0123456789" * 4)
    assert "not an API key; give that in WANDB_API_KEY" in line and "0123456789" not in line
    assert refusals("meter.wandb=project-of-40-hexadecimal") == []
