"""Pipelines and schedules that cannot run are refused, and what the refusal suggests passes."""

import pytest
from config_refusals import list_refusals

from megaframe.config import load


def test_chunks_are_interleaved_unless_a_schedule_is_given():
    keys = ["parallel.pipeline=2", "parallel.chunks=2"]
    assert load(None, keys).parallel.schedule == "interleaved"
    assert load(None, keys[:1]).parallel.schedule == "1f1b"
    assert load(None, [*keys, "parallel.schedule=zb-v"]).parallel.schedule == "zb-v"
    assert list_refusals(*keys, world=2) == []
    (line,) = list_refusals(*keys, "parallel.schedule=1f1b", world=2)
    assert line.startswith("parallel.schedule=1f1b does not run parallel.chunks=2; use")


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
        {"pipeline": 2, "chunks": 2, "schedule": "interleaved", "schedule_microbatches": 2.5},
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
    return list_refusals(*overrides, world=keys["pipeline"])


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


def test_a_schedule_file_fits_every_size_of_a_batch_ramp(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    ramp = "{start: 2, increment: 2, samples: 9}"
    keys = {"pipeline": 2, "schedule": f"file:{path}", "global_batch": 4, "batch_ramp": ramp}
    (line,) = list_pipeline_refusals(keys)
    assert "is made for 2, but the microbatches of a step is 4" in line
