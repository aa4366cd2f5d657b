"""Lost time by cause, across the starts of a run."""

import json
import os

import pytest

from megaframe.io.output_files import OutputFiles
from megaframe.resilience.downtime import CAUSES, LEDGER_FILE, DowntimeLedger
from megaframe.resilience.launcher import LauncherProcess
from megaframe.resilience.stragglers import KINDS, SlowRank, find_slow_ranks


class SettableClock:
    now = 1000.0

    def __call__(self):
        return self.now


class Run:
    """Starts of a run in a folder, each by the launcher that the environment names."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.clock, self._monkeypatch = folder, SettableClock(), monkeypatch
        for name in _LAUNCHER_VARIABLES:
            monkeypatch.delenv(name, raising=False)

    def start(self, after, load=3, **variables):
        """Start `after` seconds later, as a launcher with these variables would."""
        for name in _LAUNCHER_VARIABLES:
            self._monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)
        self.clock.now += after
        return self.continue_by(LauncherProcess(), load=load)

    def continue_by(self, launcher, after=0, load=3):
        """Start `after` seconds later, by this launcher."""
        self.clock.now += after
        ledger = DowntimeLedger(self.folder, OutputFiles(self.folder), launcher, self.clock)
        self.clock.now += load
        return ledger

    def train(self, ledger, first, last):
        """Do steps of 10 seconds, and return the seconds lost before the first of them."""
        ledger.record_start(first - 1)
        lost = []
        for step in range(first, last + 1):
            self.clock.now += 10
            lost.append(ledger.record_step(step, 0.0))
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step}) + "\n")
        os.utime(self.folder / "metrics.jsonl", (self.clock.now, self.clock.now))
        return lost[0]


_LAUNCHER_VARIABLES = (
    "MEGAFRAME_LAUNCHER",
    "SKYPILOT_TASK_ID",
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
    "ENVIRONMENT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


SBATCH = {"ENVIRONMENT": "BATCH"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    return Run(tmp_path, monkeypatch)


def test_time_between_two_commands_is_idle_and_not_lost(run):
    run.train(run.start(0, MEGAFRAME_LAUNCHER="first"), 1, 10)
    resumed = run.start(10800, MEGAFRAME_LAUNCHER="second")
    assert run.train(resumed, 11, 20) == {**dict.fromkeys(CAUSES, 0), "load": 3}
    expected = (
        f"effective time {200 / 206:.1%} of 206 s since the first start, idle time between "
        "commands (3h 00m) left out; lost: detection 0.0%, restart 0.0%, load 2.9%"
    )
    assert resumed.summarize().startswith(expected)
    again = run.start(90, MEGAFRAME_LAUNCHER="second")
    assert run.train(again, 21, 21)["restart"] == 90
    assert f"effective time {210 / 309:.1%} of 309 s since" in again.summarize()
    assert "(3h 00m) left out" in again.summarize()


@pytest.mark.parametrize(
    ("before", "after", "restarted"),
    [
        ({}, {}, False),
        ({"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "none"}, True),
        ({"TORCHELASTIC_RUN_ID": "none"}, {}, False),
        ({}, {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({}, {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}, False),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, False),  # two commands in one salloc
        ({"SLURM_JOB_ID": "7", **SBATCH}, {"SLURM_JOB_ID": "7", **SBATCH}, True),  # a loop
        ({"SLURM_JOB_ID": "7", **SBATCH}, {"SLURM_JOB_ID": "8", **SBATCH}, False),
        ({"SKYPILOT_TASK_ID": "a"}, {"SKYPILOT_TASK_ID": "a"}, True),
        ({"SKYPILOT_TASK_ID": "7"}, {"SLURM_JOB_ID": "7"}, False),
    ],
)
def test_only_what_a_launcher_has_restarted_is_lost(run, before, after, restarted):
    run.train(run.start(0, **before), 1, 5)
    lost = run.train(run.start(500, **after), 6, 7)
    assert lost["restart"] == (500 if restarted else 0)


def test_attempts_within_a_process_belong_together_and_calls_do_not(run):
    launcher = LauncherProcess()
    run.train(run.continue_by(launcher), 1, 5)
    assert run.train(run.continue_by(launcher, after=50), 6, 7)["restart"] == 50
    assert run.train(run.start(50), 8, 9)["restart"] == 0


def test_no_second_before_a_start_that_failed_is_counted_twice(run):
    run.train(run.start(0, SLURM_JOB_ID="1"), 1, 5)
    run.start(1000, SLURM_JOB_ID="2")  # another command, which fails while it loads
    second = run.start(40, SLURM_JOB_ID="2", SLURM_RESTART_COUNT="1")
    second.record_start(5)  # and fails before its first step
    last = run.start(60, SLURM_JOB_ID="2", SLURM_RESTART_COUNT="2")
    run.train(last, 6, 10)
    # 3 s of load in each start, of which the second was never recorded.
    assert "idle time between commands (16m 40s) left out" in last.summarize()
    elapsed, restart, load = 100 + 3 + 43 + 63 + 3, 43 + 60, 9
    parts = f"restart {restart / elapsed:.1%}, load {load / elapsed:.1%}, repeat 0.0%"
    assert f"of {elapsed:,} s" in last.summarize() and parts in last.summarize()


def test_a_ledger_of_an_earlier_version_does_not_tell_the_launcher(run):
    run.train(run.start(0), 1, 5)
    path = run.folder / "faults" / LEDGER_FILE
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(
            json.dumps({key: value for key, value in entry.items() if key != "launcher"}) + "\n"
            for entry in entries
        )
    )
    assert run.train(run.start(500), 6, 7)["restart"] == 0


def test_each_second_has_a_cause(tmp_path):
    clock, launcher = SettableClock(), LauncherProcess()
    ledger = DowntimeLedger(tmp_path, OutputFiles(tmp_path), launcher, clock)
    clock.now += 2
    ledger.record_start(0)
    metrics = tmp_path / "metrics.jsonl"
    for step in range(1, 11):
        clock.now += 1
        lost = ledger.record_step(step, 0.25 if step == 6 else 0.0)
        assert lost["load"] == (2 if step == 1 else 0) and lost["save"] == (step == 6) * 0.25
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
    os.utime(metrics, (clock.now, clock.now))
    clock.now += 30  # it hangs until it is ended
    with (tmp_path / "faults/ended.jsonl").open("w") as file:
        file.write(json.dumps({"at": clock.now, "text": "stuck"}) + "\n")
    clock.now += 15
    resumed = DowntimeLedger(tmp_path, OutputFiles(tmp_path), launcher, clock)
    clock.now += 3
    resumed.record_start(5)
    clock.now += 1
    first = resumed.record_step(6, 0.0)
    assert first == pytest.approx(
        {"detection": 30, "restart": 15, "load": 3, "repeat": 1, "save": 0}
    )
    for step in range(7, 13):
        clock.now += 1
        assert resumed.record_step(step, 0.0)["repeat"] == (step <= 10)
    total = 2 + 10 + 30 + 15 + 3 + 7
    assert resumed.summarize().startswith(
        f"effective time {1 - (2 + 0.25 + 48 + 5) / total:.1%} of"
    )
    assert all(cause in resumed.summarize() for cause in CAUSES)


def test_a_new_run_forgets_and_torn_lines_do_no_harm(tmp_path):
    clock, launcher = SettableClock(), LauncherProcess()
    DowntimeLedger(tmp_path, OutputFiles(tmp_path), launcher, clock).record_start(0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"st')
    with (tmp_path / "faults" / LEDGER_FILE).open("a") as file:
        file.write('{"seconds": ')
    ledger = DowntimeLedger(tmp_path, OutputFiles(tmp_path), launcher, clock)
    ledger.record_start(0)
    clock.now += 1
    assert ledger.record_step(3, 0.0)["repeat"] == 1
    (tmp_path / "metrics.jsonl").unlink()
    ledger = DowntimeLedger(tmp_path, OutputFiles(tmp_path), launcher, clock)
    ledger.record_start(0)
    assert ledger.record_step(1, 0.0) == dict.fromkeys(CAUSES, 0)


def test_an_outlier_is_one_among_those_that_do_the_same():
    times = {rank: [0.1] * len(KINDS) for rank in range(4)}
    times[2] = [0.1, 0.5, 0.1, 0.1, 0.1]
    assert list(find_slow_ranks(times, 2.0)) == [SlowRank(2, KINDS[1], 0.5, 0.1)]
    assert not list(find_slow_ranks({0: [9.0] * len(KINDS)}, 2.0))
    tiny = {0: [1e-6] * len(KINDS), 1: [9e-4] * len(KINDS)}
    assert not list(find_slow_ranks(tiny, 2.0))
