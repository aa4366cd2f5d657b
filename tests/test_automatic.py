"""parallel.auto: the layout is chosen, reported, and kept when the run resumes."""

import subprocess
import sys
from pathlib import Path

import pytest

from megaframe.automatic import with_layout
from megaframe.config import Model, RunConfig, dump, load
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.plan.check import check

ROOT = Path(__file__).resolve().parents[1]


def made(folder, **sections):
    parallel = {"auto": True, "cluster": "h100-ib", **sections.pop("parallel", {})}
    return RunConfig(
        run={"dir": str(folder)},
        model={"layers": 16, "hidden": 4096, "heads": 32, "vocab": 50_000},
        train={"seq": 4096, "global_batch": 256},
        parallel=parallel,
        **sections,
    )


def test_without_auto_nothing_changes(tmp_path):
    config = made(tmp_path, parallel={"auto": False})
    assert with_layout(config, 8) == (config, [])


@pytest.mark.parametrize("world", [8, 48])
def test_the_choice_runs_and_is_the_same_on_every_rank(world, tmp_path):
    config, notes = with_layout(made(tmp_path), world)
    assert not config.parallel.auto
    check(config, world, data=False)
    assert Layout.from_parallel(config.parallel, world).world == world
    assert notes[0].startswith(f"parallel.auto: {world} ranks on h100-ib. Use ")
    assert with_layout(made(tmp_path), world)[0] == config


def test_what_the_config_sets_stays(tmp_path):
    config, _ = with_layout(made(tmp_path, parallel={"tensor": 4, "zero": 2}), 16)
    assert (config.parallel.tensor, config.parallel.zero) == (4, 2)


def test_a_resumed_run_keeps_its_layout_on_as_many_ranks(tmp_path):
    asked = made(tmp_path, checkpoint={"resume": "latest"})
    config, _ = with_layout(asked, 16)
    other = {"tensor": 2, "pipeline": 2, "data": None, "zero": 1}
    begun = config.model_copy(update={"parallel": config.parallel.model_copy(update=other)})
    (tmp_path / "config.yaml").write_text(dump(begun))
    kept, notes = with_layout(asked, 16)
    assert (kept.parallel.tensor, kept.parallel.pipeline, kept.parallel.zero) == (2, 2, 1)
    assert "started with" in notes[0]
    (tmp_path / "config.yaml").write_text(
        dump(config.model_copy(update={"parallel": config.parallel.model_copy(update={"data": 3})}))
    )
    anew, notes = with_layout(asked, 16)
    assert anew.parallel == config.parallel and "is not one for 16 ranks" in notes[-1]


def test_a_model_without_room_is_refused_before_anything_is_built(tmp_path):
    config = made(tmp_path)
    large = Model(layers=80, hidden=16384, heads=128, vocab=50_000)
    with pytest.raises(UserError, match="no layout on 8 GPUs of h100-ib"):
        with_layout(config.model_copy(update={"model": large}), 8)


def test_a_run_says_why_and_its_folder_has_the_layout(overrides, tmp_path):
    given = overrides(parallel__auto="true", train__steps=2, checkpoint__every=2)
    command = [sys.executable, "pretrain_gpt.py", *given, "checkpoint.resume=latest"]
    given.remove("train.microbatch=2")
    for steps, words in ((2, "Use "), (4, "the layout that")):
        done = subprocess.run(
            [*command, f"train.steps={steps}"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert f"parallel.auto: {'1 ranks on cpu. ' if steps == 2 else ''}{words}" in done.stdout
        saved = load(str(tmp_path / "run/config.yaml"))
        assert not saved.parallel.auto and saved.parallel.data == 1
