"""Runs on a real Slurm cluster of two nodes on this machine: a killed rank and a job that is asked
to leave lose nothing, an unfit node is not used, and a cancelled job leaves no process behind.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bitwise import assert_same_losses
from entry_runs import read_losses
from patience import count_lines, wait_until

from megaframe.io.local_rendezvous import find_free_port

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import pretrain_gpt  # noqa: E402
from megaframe.layout import Layout  # noqa: E402

# Both nodes are this machine, so only plugins that need nothing else are used. A job that is queued
# again waits until its credentials expire: after 5 seconds here, by default after two minutes.
CONFIG = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobRequeue=1
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=all Nodes=ALL Default=YES
"""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter")


def explain_refusal():
    """Return why this machine can have no cluster, or None."""
    if absent := [name for name in PROGRAMS if shutil.which(name, path=search()) is None]:
        return f"Slurm is not installed: {', '.join(absent)} not found"
    if (
        os.geteuid()
        or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode
    ):
        return "nodes need the rights of root, and mounts of their own"
    return None


def search():
    """Return the PATH extended by the folder of daemons, which a user's PATH may lack."""
    return f"{os.environ['PATH']}:/usr/sbin"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(explain_refusal() is not None, reason=str(explain_refusal())),
]


class SlurmCluster:
    """A cluster with its files in one folder and its daemons as child processes."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {
            **os.environ,
            "PATH": search(),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "PORT": str(find_free_port()),
        }
        ports = [find_free_port() for _ in range(3)]
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, ports=ports))
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        self._daemons = {}

    def begin(self):
        """Start the daemons. Raises `AssertionError` with their logs if nodes do not come up."""
        files = {"key-file": "key", "socket": "munge", "pid-file": "pid", "seed-file": "seed"}
        words = [f"--{name}={self.folder / path}" for name, path in files.items()]
        words.append(f"--log-file={self.folder / 'munged.log'}")
        self._start("munged", "munged", "--foreground", "--force", *words)
        wait_until(lambda: (self.folder / "munge").exists())
        self._start("slurmctld", "slurmctld", "-D", "-i")
        for name in ("n1", "n2"):
            # Each node has its own mounts, so that a test can give it a disk of its own.
            self._start(name, "unshare", "--mount", "slurmd", "-D", "-N", name)
        wait_until(
            lambda: self.ask("sinfo", "-h", "-o", "%D %t") == "2 idle", describe=self.read_logs
        )

    def _start(self, name, *command):
        with open(self.folder / f"{name}.txt", "w") as log_file:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=log_file, stderr=log_file, cwd=self.folder
            )

    def read_logs(self):
        return "\n".join(path.read_text() for path in self.folder.glob("*.txt"))

    def ask(self, *command, **environment):
        """Run one of Slurm's commands; return what it prints."""
        environment = {**self.environment, **environment}
        process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        return process.stdout.strip()

    def submit(self, output, *words, **environment):
        """Submit a job of two nodes that runs the script with `words`; return its number."""
        options = ("--parsable", "--nodes=2", "--time=10", f"--output={output}")
        number = self.ask("sbatch", *options, "tools/launch/slurm.sh", *words, **environment)
        assert number.isdigit(), self.read_logs()
        return number

    def job(self, number):
        """Return Slurm's record of a job."""
        words = self.ask("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number):
        """Wait for a job to end; return its state."""
        waiting = {"PENDING", "RUNNING", "COMPLETING"}
        wait_until(lambda: self.job(number)["JobState"] not in waiting, describe=self.read_logs)
        return self.job(number)["JobState"]

    def processes(self, **variables):
        """Return the environments of this cluster's processes with these variables, by id."""
        environments = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                pairs = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            expected = {"SLURM_CONF": self.environment["SLURM_CONF"], **variables}
            if expected.items() <= environment.items():
                environments[int(path.name)] = environment
        return environments

    def ranks(self, number):
        """Return the environments of a job's ranks, by process id. A rank's child processes inherit
        its environment, so a rank may be listed more than once."""
        processes = self.processes(SLURM_JOB_ID=number)
        return {pid: variables for pid, variables in processes.items() if "RANK" in variables}

    def mount(self, node, folder):
        """Mount a disk of 1 MiB at `folder`, on one node only."""
        inside = ("nsenter", "--mount", f"--target={self._daemons[node].pid}")
        subprocess.run(
            [*inside, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True
        )

    def end(self):
        """Kill the daemons and all other processes of this cluster."""
        for process in self._daemons.values():
            process.kill()
            process.wait()
        while left := self.processes():
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    started = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        started.begin()
        yield started
    finally:
        started.end()


def train(words):
    sys.argv = ["pretrain_gpt.py", *words]
    pretrain_gpt.main()


def test_a_job_loses_nothing_to_a_kill_and_to_its_time_limit(cluster, pool, overrides, tmp_path):
    """Slurm's time limits are whole minutes, so scancel sends the signal of the limit instead."""
    keys = {"train__steps": 100, "train__microbatch": 2, "checkpoint__every": 10}
    keys["parallel__tensor"] = 2
    run, output_path = tmp_path / "run", tmp_path / "output"
    words = overrides(**keys, checkpoint__resume="latest")
    number = cluster.submit(output_path, *words, RANKS="2")
    wait_until(lambda: count_lines(run / "metrics.jsonl") >= 12, describe=output_path.read_text)
    ranks = cluster.ranks(number)
    nodes = {int(variables["RANK"]): variables["SLURMD_NODENAME"] for variables in ranks.values()}
    assert sorted(nodes) == [0, 1, 2, 3]
    for group in Layout(tensor=2, data=2).list_groups("tensor"):
        assert len({nodes[rank] for rank in group}) == 1, nodes
    assert set(nodes.values()) == {"n1", "n2"}

    os.kill(
        next(pid for pid, variables in ranks.items() if variables["RANK"] == "3"), signal.SIGKILL
    )
    starts = run / "faults/ledger.jsonl"
    wait_until(lambda: starts.read_text().count('"start"') == 2, describe=output_path.read_text)
    wait_until(lambda: count_lines(run / "metrics.jsonl") >= 14, describe=output_path.read_text)
    cluster.ask("scancel", "--batch", "--signal=USR1", number)
    assert cluster.wait(number) == "COMPLETED", output_path.read_text()
    assert cluster.job(number)["Restarts"] == "1"
    assert "status 138 after 0 restarts: the job is queued again" in output_path.read_text()
    assert starts.read_text().count('"start"') == 3
    assert starts.read_text().count('"restart"') == 2 and '"idle"' not in starts.read_text()
    pool.run(4, train, overrides(run__dir=tmp_path / "alone", **keys))
    losses, alone = read_losses(run), read_losses(tmp_path / "alone")
    assert_same_losses(losses, alone, because="a checkpoint has every bit of the state")


def test_a_sick_node_has_no_part_and_a_cancelled_job_leaves_nothing(cluster, overrides, tmp_path):
    run, output_path = tmp_path / "run", tmp_path / "output"
    run.mkdir()
    cluster.mount("n2", run)
    keys = {"train__steps": 10**6, "train__microbatch": 2, "checkpoint__every": 10**6}
    words = overrides(**keys, checkpoint__resume="latest")
    number = cluster.submit(output_path, *words, NODES="1")
    wait_until(lambda: count_lines(run / "metrics.jsonl") >= 2, describe=output_path.read_text)
    assert {variables["SLURMD_NODENAME"] for variables in cluster.ranks(number).values()} == {"n1"}
    assert "nodes that are not fit: n2" in output_path.read_text()
    assert f"{run} has 0.0 GB free; 1 is needed" in output_path.read_text()

    cluster.ask("scancel", number)
    wait_until(lambda: not cluster.processes(SLURM_JOB_ID=number), describe=output_path.read_text)
    assert cluster.wait(number) == "CANCELLED"
    assert (run / "checkpoints/latest").exists()
    assert cluster.ask("squeue", "-h") == ""
