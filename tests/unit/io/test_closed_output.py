"""Commands whose output is read in part."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRINTS = "for number in range(100_000): print(number)"
CASES = {
    "in the middle": (PRINTS, 141, b""),
    "at the end": ("print(1)", 0, b""),
    "by a run that goes on": (
        "try: print(1, flush=True)\n    except OSError: print('goes on', file=sys.stderr)",
        0,
        b"goes on\n",
    ),
    "and a mistake": ("print(1); sys.exit(3)", 3, b""),
}


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("case", CASES)
def test_a_reader_may_leave(case, unbuffered):
    code, status, errors = CASES[case]
    if unbuffered and case in ("at the end", "and a mistake"):
        status = 141  # it is known before the end
    program = (
        "import sys\nfrom megaframe.io.closed_output import allow_closed_output\n"
        f"sys.stdin.read()\nwith allow_closed_output():\n    {code}"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    process.stdin.close()  # only now does it print
    assert process.stderr.read() == errors
    process.stderr.close()
    assert process.wait() == status


def test_a_connection_that_breaks_is_no_closed_output():
    from megaframe.io.closed_output import allow_closed_output

    with pytest.raises(BrokenPipeError), allow_closed_output():
        raise BrokenPipeError("a connection")


NO_PACKAGES = {"delay.py", "trace_step.py", "wheels.py"}
"""Commands that run without megaframe, and print a line."""


def test_every_command_allows_it():
    commands = [ROOT / "pretrain_gpt.py", *ROOT.glob("tools/**/*.py")]
    seen = 0
    for path in commands:
        _, entry, rest = path.read_text().partition('if __name__ == "__main__":\n')
        if entry and path.name not in NO_PACKAGES:
            seen += 1
            assert re.search(r"with allow_closed_output\(\)", rest), path
    assert seen > 20
