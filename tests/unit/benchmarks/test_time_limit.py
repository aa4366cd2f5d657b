"""Commands and tests within a time limit: what they said is kept, and all they started ends."""

import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
import gpu_parts  # noqa: E402
import gpu_tests  # noqa: E402
import time_limit  # noqa: E402
from gpu_results import Results  # noqa: E402
from time_limit import TimedResult, parse_object, run_limited  # noqa: E402


@pytest.mark.slow
def test_tests_end_as_pytest_says(tmp_path, monkeypatch):
    monkeypatch.setattr(time_limit, "_GRACE", 60.0)  # even a slow pytest reports its failures
    good, bad, slow = (tmp_path / f"test_{name}.py" for name in ("good", "bad", "slow"))
    good.write_text("def test_failed_errors(): pass")
    bad.write_text("def test_one(): pass\ndef test_two(): assert 1 == 2")
    slow.write_text("import time\ndef test_one(): assert 1 == 2\ndef test_two(): time.sleep(600)")

    def run(path, seconds):
        return gpu_tests.run_tests(gpu_tests.Tests([], str(path)).build_command(True), seconds)

    assert run(good, 60)["outcome"] == "passed"
    outcome = run(bad, 60)
    assert outcome["outcome"] == "failed" and outcome["counts"].startswith("1 failed, 1 passed")
    assert "assert 1 == 2" in outcome["log"]
    heeded = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background job
    try:
        outcome = run(slow, 10)
    finally:
        signal.signal(signal.SIGINT, heeded)
    assert outcome["outcome"].startswith("not finished after") and "assert 1 == 2" in outcome["log"]


@pytest.mark.slow
def test_tests_in_several_processes_are_all_run_once(tmp_path):
    path = tmp_path / "test_several.py"
    path.write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test_one(n): assert n != 3"
    )
    lines = []
    command = gpu_tests.Tests([], str(path)).build_command(True)
    outcome = gpu_tests.run_tests(command, 60.0, 2, lines.append)
    assert (outcome["outcome"], len(lines)) == ("failed", 2) and "test_one[3]" in outcome["log"]
    assert outcome["counts"] in ("1 failed, 4 passed", "4 passed, 1 failed")


def test_tests_that_have_no_time_are_left_out_and_all_are_there():
    results = Results()
    gpu_parts.check_tests(results, "kernels", time.monotonic() + 1.0, dry=False)
    assert results.sections["left_out_for_time"] == ["tests of kernels"]
    for tests in gpu_tests.TESTS.values():
        targets = [*tests.targets, tests.tiny]
        assert all((ROOT / target.partition("::")[0]).exists() for target in targets)


@pytest.mark.slow
def test_what_a_command_started_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(time_limit, "_GRACE", 0.2)
    mark = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {mark}; echo begun; wait"
    for limits in ({"seconds": 1.0}, {"seconds": 50.0, "quiet": 1.0}):
        process = run_limited(["bash", "-c", script], **limits)
        assert process.code is None and process.lines == ["begun"] and process.seconds < 20
        # The process is gone, or a zombie that has not been waited for.
        status = Path(f"/proc/{mark.read_text().strip()}/stat")
        until = time.monotonic() + 10
        while status.exists() and status.read_text().split()[2] != "Z":
            assert time.monotonic() < until
            time.sleep(0.05)


def test_tests_without_counts_say_why():
    silent = TimedResult(
        4, [""], "conftest.py\nE   ModuleNotFoundError: No module named 'x'\n", 1.0
    )
    assert gpu_tests.find_counts(silent) == "E   ModuleNotFoundError: No module named 'x'"
    assert gpu_tests.find_counts(replace(silent, code=None)) == "not finished after 1 s"
    assert (
        gpu_tests.find_counts(replace(silent, lines=["1 failed in 2 s", ""])) == "1 failed in 2 s"
    )


def test_a_line_is_an_object_or_nothing():
    assert parse_object('{"a": 1}') == {"a": 1}
    assert [parse_object(line) for line in ("warning", "{broken", "[1]", "")] == [None] * 4
