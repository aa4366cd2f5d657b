"""How a program ends with an error: one message, one exit status, the same text in torchrun's
summary, and no wait for ranks that may never come."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    process = subprocess.run(command, capture_output=True, text=True, timeout=30)
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
