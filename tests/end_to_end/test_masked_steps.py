"""Steps whose labels are all masked: they have no loss, and no part in what losses are used for."""

import math

import pytest
from entry_runs import read_lines, read_losses, train
from fault_runs import log
from repo_copy import ROOT
from tolerances import promised

from megaframe.checkpoint import open_checkpoint
from megaframe.dashboard.metrics_file import MetricsFile
from megaframe.metrics.sinks import flatten

MASKED = [2, 5, 6, 10]
"""Steps of 8 samples without a label; a checkpoint is saved after the fifth."""
SAMPLES = [8, 16, 32, 48, 72, 80]
"""The numbers of their samples: from each first one to the next number."""
KEYS = {
    "run__extensions": f"[{ROOT / 'tests/support/recording_extension.py'}]",
    "data__transforms": f"[{{kind: masking, samples: {SAMPLES}}}]",
    "optim__schedule": "constant",
    "checkpoint__every": 5,
    "model__mtp_depth": 1,
    "model__moe": "{experts: 4, top_k: 1, ffn: 8, normalise: false, balance: global}",
}


def test_a_step_without_labels_has_no_loss_and_counts_for_nothing(pool, overrides, tmp_path):
    folder = tmp_path / "run"
    pool.run(2, train, overrides(**KEYS, train__steps=5))
    pool.run(1, train, overrides(**KEYS, train__steps=10, checkpoint__resume="latest"))
    pool.run(1, train, overrides(**KEYS, train__steps=10, run__dir=tmp_path / "whole"))
    lines, text = read_lines(folder), log(folder)
    assert [line["step"] for line in lines if line["loss"] is None] == MASKED
    for line in lines:
        names = {name for name, _ in flatten(line)}
        labelled = line["step"] not in MASKED
        assert {"loss" in names, "mtp_loss" in names, "aux_loss" in names} == {labelled}
        assert line["grad_norm"] == 0.0 or labelled
    # Once for each start of the run.
    assert text.count("no token of the batch has a label") == 2
    assert "step 2: no token of the batch has a label" in text
    shown = {row.split()[0]: row.split()[1] for row in text.splitlines() if row[:1] == " "}
    assert shown["5/5"] == shown["10/10"] == "n/a"
    # The summary has the last loss that there was; no loss is taken for a spike or a jump.
    losses = [loss for loss in read_losses(folder) if loss is not None]
    last = losses[-1]
    assert f"final loss                {last:.4f}" in text
    assert "continuing from" not in text and "check that data and config" not in text
    path = folder / "checkpoints/step-00000010"
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint.state["history"]["losses"]) == 10 - len(MASKED)
        assert checkpoint.state["loss"] == pytest.approx(last)
    assert losses == promised([loss for loss in read_losses(tmp_path / "whole") if loss])
    file = MetricsFile(folder / "metrics.jsonl")
    file.read()
    gaps = [step for step, loss in enumerate(file.get_column("loss"), 1) if math.isnan(loss)]
    assert gaps == MASKED


def test_a_run_without_any_label_ends_well(pool, overrides, tmp_path):
    keys = {**KEYS, "data__transforms": "[{kind: masking, samples: [0, 999]}]"}
    pool.run(2, train, overrides(**keys, train__steps=5))
    pool.run(1, train, overrides(**keys, train__steps=6, checkpoint__resume="latest"))
    assert read_losses(tmp_path / "run") == [None] * 6
    assert "final loss                n/a" in log(tmp_path / "run")
