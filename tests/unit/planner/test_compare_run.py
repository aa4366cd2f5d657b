"""The planner's comparison of its prediction with a finished run."""

import json

import pytest
from run_folders import make_lines, write
from tool_process import run_tool

from megaframe.config import dump, load
from megaframe.errors import UserError
from megaframe.planner.candidates import SearchSpace
from megaframe.planner.compare_run import compare_run, compare_run_or_reason
from megaframe.planner.constants import get_family_constants
from megaframe.planner.layout_search import search

SMALL = ["model.layers=4", "model.hidden=256", "model.heads=4", "model.vocab=512", "train.seq=128"]


def write_folder(tmp_path, *overrides):
    (tmp_path / "config.yaml").write_text(dump(load(None, [*SMALL, *overrides])))
    return tmp_path


def test_a_layout_that_waits_is_told_a_better_one(tmp_path):
    keys = ("train.global_batch=16", "train.microbatch=4", "parallel.tensor=2")
    path = write_folder(tmp_path, *keys) / "config.yaml"
    comparison = compare_run(path.parent, {"ranks": 4, "device": "CPU"})
    record = comparison.record()
    assert record["cluster"] == "cpu" and comparison.choice.layout.tensor == 2
    assert record["step_seconds"] == pytest.approx(sum(record["breakdown"].values()), rel=1e-6)
    sentence, *reasons = comparison.suggest_layouts()
    assert "instead of" in sentence and "tensor" not in sentence and reasons
    cluster = comparison.cluster
    better = search(
        SearchSpace(comparison.choice.config, 4, cluster), get_family_constants(cluster.chip.family)
    ).best
    path.write_text(dump(better.config))
    assert "none of " in next(
        compare_run(path.parent, {"ranks": 4, "device": "CPU"}).suggest_layouts()
    )


def test_a_run_that_the_planner_finds_too_large_has_a_report(tmp_path):
    folder = write_folder(tmp_path, "model.hidden=8192", "model.layers=400", "model.heads=64")
    write(folder / "run", make_lines(3))
    (folder / "config.yaml").replace(folder / "run/config.yaml")
    device = {"ranks": 1, "device": "NVIDIA H100 80GB HBM3"}
    (folder / "run/environment.json").write_text(json.dumps(device))
    process = run_tool("tools/report.py", folder / "run")
    assert process.returncode == 0, process.stderr
    assert "the planner**: it has no layout to compare with: " in process.stdout
    assert (folder / "run/report.html").exists()


def test_what_is_not_known_has_no_prediction(tmp_path):
    path = write_folder(tmp_path) / "config.yaml"
    with pytest.raises(UserError, match="no cluster of Abacus is known; name one with --cluster"):
        compare_run(path.parent, {"ranks": 1, "device": "Abacus"})
    assert compare_run(path.parent, {"ranks": 1, "device": "Abacus"}, "cpu").cluster.name == "cpu"
    for environment in ({}, {"ranks": "many"}, {"ranks": 0}):
        with pytest.raises(UserError, match=r"environment\.json does not say how many ranks"):
            compare_run(path.parent, environment)
    path.write_text("model: [")
    assert compare_run_or_reason(tmp_path, {"ranks": 1}, None)[1].startswith("no prediction: ")


def test_the_cluster_is_that_of_the_device_with_its_memory(tmp_path):
    path = write_folder(tmp_path) / "config.yaml"
    environment = {
        "ranks": 1,
        "device": "NVIDIA A100-SXM4-40GB",
        "memory of the device": 42_285_268_992,
    }
    cluster = compare_run(path.parent, environment).cluster
    assert (cluster.name, cluster.chip.memory) == ("a100-40gb-roce", 42_285_268_992)
    environment["device"] = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    with pytest.raises(UserError, match=r"unknown chip .*1g\.5gb with 39\.4 GiB"):
        compare_run(path.parent, environment)


def test_a_depth_of_prediction_that_nobody_could_walk_through_has_a_reason(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "model: {layers: 4, hidden: 256, heads: 4, vocab: 512, mtp_depth: 1000000000}\n"
        "train: {seq: 4000000000}\n"
    )
    comparison, reason = compare_run_or_reason(tmp_path, {"ranks": 1, "device": "CPU"})
    assert comparison is None and "takes a whole number from 0 to 2000" in reason


def test_no_file_that_a_run_names_is_repeated(tmp_path):
    (tmp_path / "secret").write_text("root:x:hunter22\n0F0 hunter22\n")
    for key in ("parallel.cluster", "parallel.schedule"):
        named = f"{'file:' * (key == 'parallel.schedule')}{tmp_path}/secret"
        folder = write_folder(tmp_path, f"{key}={named}")
        comparison, why = compare_run_or_reason(folder, {"ranks": 1, "device": "CPU"})
        assert comparison is None and "hunter22" not in why
        assert f"{key}={named} of the run is no {key.removeprefix('parallel.')} here" in why


def test_a_schedule_that_a_run_names_is_used(tmp_path):
    (tmp_path / "plan").write_text("0F0 0F1 0B1 0B0\n")
    keys = ("train.global_batch=2", "train.microbatch=1", f"parallel.schedule=file:{tmp_path}/plan")
    folder = write_folder(tmp_path, *keys)
    assert compare_run(folder, {"ranks": 1, "device": "CPU"}).choice.prediction.step_seconds > 0
