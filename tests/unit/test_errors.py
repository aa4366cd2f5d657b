"""How a program ends with an error: one message, one exit status, the same text in torchrun's
summary, and no wait for ranks that may never come."""

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from megaframe import errors
from megaframe.errors import BadDevice, NotFinite, UserError, report_errors

ROOT = Path(__file__).resolve().parents[2]
ENTRY = str(ROOT / "pretrain_gpt.py")
ENDS = """
import atexit, threading, time
from megaframe.errors import LostRanks, UserError, report_and_exit
atexit.register(time.sleep, 60)
threading.Thread(target=time.sleep, args=(60,)).start()
try:
    report_and_exit({error}, rank={rank})
finally:
    print("cleaned up")
"""


@pytest.mark.parametrize(
    ("error", "rank", "status", "expected"),
    [
        ("UserError('use 4')", 0, 2, "error: use 4\n"),
        ("UserError('use 4')", 3, 2, "error: rank 3: use 4\n"),
        ("LostRanks('gone', [1])", 3, 3, "error: rank 3: gone\n"),
        ("KeyboardInterrupt()", 0, 130, "interrupted\n"),
        ("ZeroDivisionError('by zero')", 0, 1, "ZeroDivisionError: by zero\n"),
    ],
)
def test_leaving_tells_why_and_waits_for_nothing(error, rank, status, expected):
    command = [sys.executable, "-c", ENDS.format(error=error, rank=rank)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (process.returncode, process.stdout) == (status, "")
    assert process.stderr.endswith(expected) and ("Traceback" in process.stderr) == (status == 1)


@pytest.mark.parametrize(
    ("error", "status"), [(UserError("wrong"), 2), (NotFinite("nan"), 5), (BadDevice("gpu"), 6)]
)
def test_an_error_is_its_message_and_its_status(error, status, capsys):
    with pytest.raises(SystemExit) as ended, report_errors():
        raise error
    assert ended.value.code == status
    assert capsys.readouterr().err == f"error: {error}\n"


def end_with(error, rank, folder, monkeypatch):
    """Return the status of a rank that ends with an error under torchrun."""
    monkeypatch.setattr(errors, "_REPORT_DELAY", 0.01)
    monkeypatch.setattr(errors, "_SEEN_DELAY", 0.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
    file = folder / str(rank % 2) / "error.json"
    file.parent.mkdir(exist_ok=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit) as ended, report_errors(rank):
        raise error
    return ended.value.code


@pytest.mark.parametrize("node", [0, 1])
def test_ranks_with_the_same_mistake_leave_it_to_the_first_of_their_node(
    node, tmp_path, monkeypatch, capsys
):
    first, second = 2 * node, 2 * node + 1
    assert end_with(UserError("use 4"), first, tmp_path, monkeypatch) == 2
    assert capsys.readouterr().err.endswith("use 4\n")
    assert end_with(UserError("use 4"), second, tmp_path, monkeypatch) == 0
    assert capsys.readouterr().err == ""
    assert end_with(UserError("use 5"), second, tmp_path, monkeypatch) == 2
    assert capsys.readouterr().err == f"error: rank {second}: use 5\n"


def test_a_rank_whose_neighbour_does_not_report_does(tmp_path, monkeypatch, capsys):
    assert end_with(UserError("use 4"), 1, tmp_path, monkeypatch) == 2
    assert capsys.readouterr().err == "error: rank 1: use 4\n"


@pytest.mark.slow
def test_a_mistake_of_all_ranks_is_told_once_and_stands_in_the_summary():
    words = ["--nproc-per-node", "2", ENTRY, "--config", "demo", "train.stps=5"]
    process = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert process.returncode == 1
    output, _, summary = process.stderr.partition("pretrain_gpt.py FAILED")
    line = "train.stps: unknown key; did you mean train.steps?"
    assert output.count(line) == 1
    assert summary.count(line) == 1 and "To enable traceback" not in summary


def test_what_a_program_did_not_foresee_stands_in_the_summary_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ZeroDivisionError), report_errors():
        raise ZeroDivisionError("unforeseen")
    assert "ZeroDivisionError: unforeseen" in (tmp_path / "error.json").read_text()


def test_an_entry_without_words_shows_how_it_is_used():
    process = subprocess.run([sys.executable, ENTRY], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 2 and process.stderr.startswith("usage: ")
    assert "--config configs/demo.yaml" in process.stderr and "--dry-run" in process.stderr
    assert "model.vocab" not in process.stderr
