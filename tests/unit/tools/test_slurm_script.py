"""The Slurm script, with fake commands of Slurm."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from patience import wait_until

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "tools/launch"


SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$CALLS"
while [[ "$1" == --* ]]; do
    case $1 in --nodelist=*) NODES_OF_STEP=${1#--nodelist=};; esac
    shift
done
[ -n "${NODES_OF_STEP:-}" ] && exec "$@"
worst=0
for name in a1 a2 a3; do
    SLURMD_NODENAME=$name "$@"
    status=$?
    [ $status -gt $worst ] && worst=$status
done
exit $worst
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >> "$CALLS"
case "$1 $2" in
    "show hostnames") printf 'a1\\na2\\na3\\n';;
    "show node") echo "NodeName=$3 NodeAddr=10.0.0.${3#a} NodeHostName=$3";;
esac
"""
PYTHON = """#!/usr/bin/env bash
if [ "$2" = --look ]; then
    [ "$SICK" = mistake ] && exit 2
    [ "$SLEEP" = look ] && { touch "$CALLS.up"; sleep 1; }
    case " $SICK " in *" $SLURMD_NODENAME "*) echo "X broken" ; exit 4;; esac
    exit 0
fi
echo "python $*" >> "$CALLS"
env | grep ^PET_ | sort >> "$CALLS"
if [ "$SLEEP" = run ]; then
    trap 'echo heard >> "$CALLS"; exit 138' USR1
    touch "$CALLS.up"
    for i in $(seq 200); do sleep 0.05; done
fi
exit "$STATUS"
"""


@pytest.fixture
def slurm(tmp_path):
    """slurm(sick="", status=0, sleep="", **environment) -> process of the script.

    Like Slurm, it runs a copy of the script in another folder. The fake commands write their calls
    to tmp_path/calls. sick: nodes that are not fit. status: the run's exit status. sleep: "look" or
    "run", the part that takes long; tmp_path/calls.up exists once it has begun.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    copy = tmp_path / "slurm_script"
    copy.write_text((LAUNCH / "slurm.sh").read_text())

    def run(sick="", status=0, sleep="", **environment):
        variables = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHON": str(folder / "python"),
            "CALLS": str(tmp_path / "calls"),
            "SICK": sick,
            "STATUS": str(status),
            "SLEEP": sleep,
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "a[1-3]",
            "SLURM_SUBMIT_DIR": str(ROOT),
            **environment,
        }
        return subprocess.Popen(
            ["bash", str(copy), "--config", "RUN.yaml", "data.split=[0.9, 0.1, 0]"],
            cwd=tmp_path,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def read_calls(tmp_path):
    return (tmp_path / "calls").read_text().splitlines()


def test_a_job_runs_on_all_nodes_that_are_fit(slurm, tmp_path):
    process = slurm(sick="a1", NODES="2", RANKS="8", SLURM_RESTART_COUNT="3")
    errors = process.communicate()[1]
    assert process.returncode == 0, errors
    assert "nodes that are not fit: a1" in errors and "X broken" in errors
    srun_calls = read_calls(tmp_path)
    assert any("--nodelist=a2,a3" in line and "--ntasks=2" in line for line in srun_calls)
    assert "PET_NNODES=2" in srun_calls and "PET_NPROC_PER_NODE=8" in srun_calls
    assert "PET_RDZV_ENDPOINT=10.0.0.2:29400" in srun_calls and "PET_RDZV_ID=7-3" in srun_calls
    run = next(line for line in srun_calls if line.startswith("python"))
    assert run.endswith("node.py --no-doctor --config RUN.yaml data.split=[0.9, 0.1, 0]")
    assert not any("requeue" in line for line in srun_calls)


def test_a_job_with_too_few_fit_nodes_says_what_to_do(slurm, tmp_path):
    process = slurm(sick="a1 a3")
    errors = process.communicate()[1]
    assert process.returncode == 4
    assert "1 nodes are fit and 3 are needed" in errors and "--exclude=a1,a3" in errors
    assert not any(line.startswith("python") for line in read_calls(tmp_path))


def test_a_job_whose_config_has_a_mistake_ends_as_that(slurm, tmp_path):
    process = slurm(sick="mistake")
    assert "are fit" not in process.communicate()[1]
    assert process.returncode == 2
    assert len(read_calls(tmp_path)) == 1


@pytest.mark.parametrize(
    ("status", "count", "requeued"), [(3, 0, True), (1, 2, True), (3, 5, False), (2, 0, False)]
)
def test_a_job_that_failed_is_queued_again_where_that_may_help(
    status, count, requeued, slurm, tmp_path
):
    process = slurm(status=status, SLURM_RESTART_COUNT=str(count), RESTARTS="5")
    process.communicate()
    assert process.returncode == (0 if requeued else status)
    assert ("scontrol requeue 7" in read_calls(tmp_path)) == requeued


@pytest.mark.parametrize(
    ("seconds", "count", "requeued"), [(300, 99, True), (0, 19, True), (0, 20, False)]
)
def test_a_job_near_its_time_limit_asks_the_run_to_leave_and_is_queued_again(
    seconds, count, requeued, slurm, tmp_path
):
    """A job is not queued again forever if every start leaves only a moment to train."""
    process = slurm(sleep="run", SLURM_RESTART_COUNT=str(count), SECONDS=str(seconds))
    output = ask_to_leave(process, tmp_path)
    assert process.returncode == (0 if requeued else 138), output
    heard = read_calls(tmp_path)
    assert heard[heard.index("heard") + 1 :] == ["scontrol requeue 7"] * requeued
    assert ("status 138" in output) == requeued
    assert ("a longer --time" in output) == (seconds < 300)


def ask_to_leave(process, tmp_path):
    """Send SIGUSR1 to a job as soon as its long part has begun; return what it says."""
    wait_until((tmp_path / "calls.up").exists)
    process.send_signal(signal.SIGUSR1)
    return process.communicate()[1]


@pytest.mark.slow
def test_a_job_that_is_asked_to_leave_while_it_looks_at_nodes_begins_no_run(slurm, tmp_path):
    process = slurm(sleep="look", SECONDS="300")
    output = ask_to_leave(process, tmp_path)
    assert process.returncode == 0, output
    assert "status 138" in output
    assert read_calls(tmp_path)[-1] == "scontrol requeue 7"
    assert not any(line.startswith("python") for line in read_calls(tmp_path))


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("SLURM_JOB_ID", "", "start it with sbatch"),
        ("SLURM_SUBMIT_DIR", "/tmp", "call sbatch in the project"),
        ("PYTHON", "nowhere/python", "set PYTHON"),
    ],
)
def test_a_job_that_cannot_begin_says_why(variable, value, expected, slurm):
    process = slurm(**{variable: value})
    assert expected in process.communicate()[1]
    assert process.returncode == 2


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--config", "RUN.yaml", "--help"]])
def test_the_script_tells_how_to_use_it_where_there_is_no_slurm(words, tmp_path):
    script = [shutil.which("bash"), LAUNCH / "slurm.sh", *words]
    environment = {"PATH": "/usr/bin:/bin"}
    process = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("A run on Slurm:\n\n  sbatch --nodes 4 tools/launch/slurm.sh")
    assert process.stdout.rstrip().endswith("PORT (29400).") and "#" not in process.stdout
