"""How a program ends with an error that must not wait for anybody: its message, its status, and
nothing else."""

import subprocess
import sys

import pytest

ENDS = """
import atexit, threading, time
from megaframe.errors import LostRanks, UserError, leave
atexit.register(time.sleep, 60)
threading.Thread(target=time.sleep, args=(60,)).start()
try:
    leave({error}, rank={rank})
finally:
    print("cleaned up")
"""


@pytest.mark.parametrize(
    ("error", "rank", "status", "said"),
    [
        ("UserError('use 4')", 0, 2, "error: use 4\n"),
        ("UserError('use 4')", 3, 2, "error: rank 3: use 4\n"),
        ("LostRanks('gone', [1])", 3, 3, "error: rank 3: gone\n"),
        ("KeyboardInterrupt()", 0, 130, "interrupted\n"),
        ("ZeroDivisionError('by zero')", 0, 1, "ZeroDivisionError: by zero\n"),
    ],
)
def test_leaving_tells_why_and_waits_for_nothing(error, rank, status, said):
    command = [sys.executable, "-c", ENDS.format(error=error, rank=rank)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.endswith(said) and ("Traceback" in done.stderr) == (status == 1)
