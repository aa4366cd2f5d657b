"""What a mistake looks like: one message, one status, and the same words in torchrun's summary."""

import subprocess
import sys
from pathlib import Path

import pytest

from megaframe.errors import BadDevice, NotFinite, UserError, reported

ROOT = Path(__file__).resolve().parent.parent
ENTRY = str(ROOT / "pretrain_gpt.py")


@pytest.mark.parametrize(
    ("error", "status"), [(UserError("wrong"), 2), (NotFinite("nan"), 5), (BadDevice("gpu"), 6)]
)
def test_an_error_is_its_message_and_its_status(error, status, capsys):
    with pytest.raises(SystemExit) as ended, reported():
        raise error
    assert ended.value.code == status
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_mistake_of_all_ranks_is_told_by_the_first_and_stands_in_the_summary():
    command = ["torchrun", "--nproc-per-node", "2", ENTRY, "--config", "demo", "train.stps=5"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:]],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1
    told, _, summary = done.stderr.partition("pretrain_gpt.py FAILED")
    line = "train.stps: unknown key; did you mean train.steps?"
    assert told.count(line) == 1 and "rank 1:" not in told
    assert summary.count(line) == 1 and "To enable traceback" not in summary


def test_what_a_program_did_not_foresee_stands_in_the_summary_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ZeroDivisionError), reported():
        raise ZeroDivisionError("unforeseen")
    assert "ZeroDivisionError: unforeseen" in (tmp_path / "error.json").read_text()


def test_an_entry_without_words_shows_how_it_is_used():
    done = subprocess.run([sys.executable, ENTRY], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")
    assert "--config configs/demo.yaml" in done.stderr and "--dry-run" in done.stderr
    assert "model.vocab" not in done.stderr
