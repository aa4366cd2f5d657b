"""The checkpoints with the lowest evaluation losses stay, and a run that resumes knows them.

Tests `megaframe.checkpoint.best`.
"""

from fault_runs import log, main
from tool_process import run_tool

from megaframe.checkpoint import locate_checkpoint

KEYS = {
    "checkpoint__every": 1,
    "checkpoint__keep": 1,
    "checkpoint__keep_best": 2,
    "train__eval_every": 1,
    "checkpoint__resume": "latest",
}
LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0, 5: float("nan"), 6: 6.0, 7: 2.5, 8: 9.0}


def set_losses(trainer):
    trainer._validator.evaluate = lambda logger, step: {"eval_loss": LOSSES[step]}


def list_saved(root):
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


def test_the_best_checkpoints_stay_across_starts(pool, overrides, tmp_path):
    run = tmp_path / "run"
    root = run / "checkpoints"
    assert pool.run(2, main, overrides(**KEYS, train__steps=6), set_losses) == [0, 0]
    assert list_saved(root) == [2, 4, 6]
    assert (root / "best").read_text() == "step-00000004\n"
    assert pool.run(2, main, overrides(**KEYS, train__steps=8), set_losses) == [0, 0]
    assert list_saved(root) == [4, 7, 8]
    for location in (run / "best", root / "best"):
        assert locate_checkpoint(location, "--checkpoint") == root / "step-00000004"
    shown = run_tool("tools/checkpoint.py", "inspect", root).stdout
    assert "step-00000004: evaluation loss 2.0000 (best)" in shown
    assert "step-00000008: evaluation loss 9.0000 (latest)" in shown
    keys = {**KEYS, "checkpoint__resume": "best", "run__dir": tmp_path / "other",
            "checkpoint__folder": root}  # fmt: skip
    assert pool.run(1, main, overrides(**keys, train__steps=5), set_losses) == [0]
    assert "resumed from step 4" in log(tmp_path / "other")


def test_a_folder_without_a_best_one_says_so(overrides, capsys):
    assert main(overrides(checkpoint__every=4, checkpoint__resume="best")) == 2
    text = "checkpoints/best: no checkpoint there is the best one; checkpoint.keep_best keeps one"
    assert text in capsys.readouterr().err
