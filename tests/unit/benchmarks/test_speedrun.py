"""The speedrun: each of its configs extends the one before, and its table is that of its file."""

import json
import sys

import yaml
from repo_copy import ROOT
from token_files import write_token_file

from megaframe.config import load
from megaframe.validate.run import validate_config

sys.path.append(str(ROOT / "benchmarks/cpu"))
import speedrun

RESULTS = ROOT / "benchmarks/results/speedrun.json"


def test_each_row_extends_the_one_before_and_says_what_it_changes():
    previous = "../demo.yaml"
    for path in speedrun.ROWS:
        assert yaml.safe_load(path.read_text())["extends"] == previous
        assert speedrun.read_change(path)
        validate_config(load(str(path), ["model.vocab=4096"]), 1, data=False)
        previous = path.name
    assert len(speedrun.ROWS) > 3


def test_the_table_in_the_readme_is_that_of_the_measurement():
    """Each row that is not missed reaches the loss of the demo."""
    document = json.loads(RESULTS.read_text())
    table = speedrun.format_table(document)
    assert table in (ROOT / "benchmarks/README.md").read_text()
    assert list(document["rows"]) == [path.stem for path in speedrun.ROWS]
    assert document["changes"] == {path.stem: speedrun.read_change(path) for path in speedrun.ROWS}


def test_a_row_that_does_not_reach_the_loss_is_marked():
    run = {"steps": 3, "tokens": 60, "seconds": 10.0, "loss": 2.0}
    rows = {
        "1-demo": [run, {**run, "seconds": 14.0, "loss": 2.1}],
        "2-fast": [{**run, "seconds": 6.0}],
        "3-bad": [{**run, "loss": 2.2}],
    }
    machine = {"cpu": "a", "instructions": ["b"]}
    changes = {name: name[2:] for name in rows}
    table = speedrun.format_table({"rows": rows, "changes": changes, "machine": machine})
    assert table.splitlines()[2:] == [
        "| 1-demo | demo | 3 | 60 | 12 (10 to 14) | 1.00 | 2.1000 |",
        "| 2-fast | fast | 3 | 60 | 6 (6 to 6) | 2.00 | 2.0000 |",
        "| 3-bad | bad | 3 | 60 | 10 (10 to 10) | 1.20 | 2.2000 (missed) |",
        "",
        "On a (b).",
    ]


def test_a_row_is_timed_by_its_steps(tmp_path):
    """Without the evaluation, which is made after the last one."""
    source = write_token_file(tmp_path / "data", [[list(range(1, 60))]] * 20)
    config = {
        "model": {"layers": 1, "hidden": 16, "heads": 2, "vocab": 64},
        "train": {"steps": 3, "seq": 16, "global_batch": 2, "eval_every": 9, "precision": "fp32"},
        "data": {"sources": [{"path": source}], "split": [0.5, 0.5, 0]},
        "run": {"device": "cpu"},
    }
    (tmp_path / "row.yaml").write_text(yaml.safe_dump(config))
    row = speedrun.train(tmp_path / "row.yaml")
    assert (row.steps, row.tokens) == (3, 3 * 2 * 16)
    assert 3.5 < row.loss < 4.5 and 0 < row.seconds < 60
